"""The feedback store: append-only events, each stored once, acknowledged only when synced.

Protects against: a crash after the acknowledgement (the commit is synced before `append` returns),
a sender's retry (idempotency key), a sender who reuses a key for something else (refused), what an
erasure took and somebody sends again (refused). A file's row whose vote was taken back is no retry:
it is stored anew. Does not protect against a lost disk: that is what backups are for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from rlhf_pipeline import database as db
from rlhf_pipeline.errors import (
    ConfigError,
    FeedbackError,
    FeedbackRefused,
    IdempotencyConflict,
    VoteErased,
)
from rlhf_pipeline.feedback.raters import erased_among, erased_key, marks_of, voter_of
from rlhf_pipeline.feedback.rules import Rule
from rlhf_pipeline.feedback.together import GroupCommit, Ticket
from rlhf_pipeline.fence import need_right_to_write
from rlhf_pipeline.records import (
    LIVE,
    Feedback,
    FeedbackKind,
    Interaction,
    QuarantinedRow,
    hashed,
    now,
    prompt_from_json,
    prompt_to_json,
    this_won,
    uuid7,
)

LONGEST_RAW = 20_000  # characters of a quarantined line that are kept
LEFT = (  # by which a vote whose words an erasure took is known again
    *("kind", "interaction_id", "other_interaction_id", "number", "choice", "shown_first"),
    *("rater_id", "source"),
)
ON_A_SCALE = (FeedbackKind.thumbs, FeedbackKind.rating, FeedbackKind.score)


@dataclass(frozen=True, slots=True)
class Stored:
    """The answer to one event: its id, and whether it was already there."""

    feedback_id: str
    known: bool


@dataclass(frozen=True, slots=True)
class NewFeedback:
    """What came in after a watermark."""

    votes: int  # distinct (rater, target, kind); comments train nothing and are none
    newest_seq: int
    newest_received_at: datetime | None


class TakenBack(NamedTuple):
    """How many votes were taken back, and how many that those had replaced count again."""

    votes: int
    again: int


@dataclass(frozen=True, slots=True)
class Opinion:
    """How good people find an agent's completions: mean and standard deviation, 0 to 1."""

    votes: int
    mean: float | None  # None without votes
    std: float | None


VoteTicket = Ticket[Feedback, Stored | FeedbackError]


class FeedbackStore:
    """Interactions, feedback and quarantine of every agent, in one database."""

    def __init__(
        self, database: db.Database, *, on_stored: Callable[[Feedback], None] = lambda event: None
    ) -> None:
        """Open the store; `on_stored` hears of every new event once it is synced."""
        self.database = database
        self._on_stored = on_stored
        self._votes = GroupCommit(self._add_votes)
        self._answers = GroupCommit(self._add_answers)

    # -- agents ---------------------------------------------------------------------------------

    def ensure_agent(self, agent_id: str, *, recipe: str | None = None) -> None:
        """Make the agent known; one that is already known keeps its settings.

        Raises ConfigError for a recipe whose path the column does not hold.
        """
        _need_path(recipe)
        with self.database.write() as connection:
            _make_known(connection, agent_id, now(), recipe)

    def agents(self) -> list[str]:
        """Return every agent's id, oldest first."""
        with self.database.read() as connection:
            query = sa.select(db.agents.c.agent_id).order_by(
                db.agents.c.created_at, db.agents.c.agent_id
            )
            return list(connection.execute(query).scalars())

    def agent(self, agent_id: str) -> sa.Row[Any] | None:
        """Return the agent's row (recipe, automatic_promotion, paused_reason), or None."""
        with self.database.read() as connection:
            return connection.execute(
                db.agents.select().where(db.agents.c.agent_id == agent_id)
            ).first()

    def recipe_of(self, agent_id: str) -> str | None:
        """Return the agent's own recipe; None where it has none, or nobody has named it."""
        row = self.agent(agent_id)
        return None if row is None else row.recipe

    def set_agent(self, agent_id: str, **values: bool | str | None) -> None:
        """Change the agent's `recipe`, `automatic_promotion` or `paused_reason`.

        Raises FeedbackRefused for an agent nobody has named yet, ConfigError for a recipe whose
        path the column does not hold.
        """
        _need_path(values.get("recipe"))
        with self.database.write() as connection:
            changed = connection.execute(
                db.agents.update().where(db.agents.c.agent_id == agent_id).values(**values)
            )
            if changed.rowcount == 0:
                raise FeedbackRefused(
                    "unknown_agent",
                    f"agent {agent_id!r} is not known; known: {', '.join(self.agents()) or 'none'}",
                )

    # -- writing --------------------------------------------------------------------------------

    def append(
        self,
        events: Sequence[Feedback],
        *,
        on_refused: Callable[[Feedback, FeedbackError], None] | None = None,
    ) -> list[Stored]:
        """Store the events and return one answer each, in order, once they are synced to disk.

        Callers that arrive while a commit is under way share the next one (group commit). An event
        that repeats a known key with the same body is answered as known; one with another body, or
        one about an interaction nobody has seen, raises (IdempotencyConflict, FeedbackRefused)
        after the others are stored, as does one whose key's vote was erased (VoteErased); with
        `on_refused` it is handed over instead and left out.
        """
        ticket = VoteTicket(events)
        self.commit([ticket])
        stored = []
        for event, outcome in zip(events, ticket.told(), strict=True):
            if isinstance(outcome, Stored):
                stored.append(outcome)
            elif on_refused is None:
                raise outcome
            else:
                on_refused(event, outcome)
        return stored

    def commit(self, tickets: Sequence[VoteTicket]) -> None:
        """Store the votes of every ticket, as GroupCommit does; `on_stored` hears of the new."""
        self._votes.commit(tickets)
        for ticket in tickets:
            for event, outcome in zip(ticket.items, ticket.outcomes, strict=False):
                if isinstance(outcome, Stored) and not outcome.known:
                    self._on_stored(event)

    def _add_votes(self, events: Sequence[Feedback]) -> list[Stored | FeedbackError]:
        # Alone: sequence numbers then appear in the order of commits, so no reader ever sees
        # a number below its watermark turn up late.
        with self.database.write(alone=True) as connection:
            return _insert_events(connection, events)

    def withdraw(self, agent_id: str, keys: Collection[str]) -> TakenBack:
        """Take back the votes under these keys that count; return how many, and how many do again.

        A blank row after each replaces it and counts for nothing, so what was made of the votes up
        to a number stays what it was. What its voter had said of the same before, elsewhere than in
        the same file, counts again: it comes anew after the blank row, under the key that it had.
        """
        e = db.effective_feedback.c
        replaced = (e.agent_id, e.kind, e.target, e.voter, e.rater_id, e.source, e.origin)
        with self.database.write(alone=True) as connection:  # nobody votes while this looks
            at = now()
            blank = {"body_sha256": "", "shown_first": "this", "tags": "[]"}
            moments = dict.fromkeys(("occurred_at", "received_at", "erased_at"), at)
            rows, again, freed, keys = [], [], [], set(keys)
            for some in db.chunks(sorted(keys)):
                query = sa.select(e.feedback_id, *replaced).where(
                    e.agent_id == agent_id, e.idempotency_key.in_(some)
                )
                gone = connection.execute(query).all()
                for row in gone:
                    new = {"feedback_id": uuid7(), "idempotency_key": f"{db.WITHDRAWN}{uuid7()}"}
                    rows.append({**row._mapping, **blank, **moments, **new})
                before, in_file = _said_before(connection, [row.feedback_id for row in gone], keys)
                again += before
                freed += in_file
            if rows:
                connection.execute(db.feedback.insert(), rows)
            _retire(connection, [*freed, *(row["feedback_id"] for row in again)])
            if again:
                anew = [{**row, "feedback_id": uuid7()} for row in again]
                connection.execute(db.feedback.insert(), anew)
        return TakenBack(len(rows), len(again))

    def add_interactions(self, interactions: Sequence[Interaction]) -> None:
        """Store what was said; an id that is already there is left as it is.

        Callers that arrive while a commit is under way share the next one, as those of `append`.
        """
        ticket = Ticket[Interaction, None](interactions)
        self._answers.commit([ticket])
        ticket.told()

    def _add_answers(self, interactions: Sequence[Interaction]) -> list[None]:
        told: dict[str, Interaction] = {}
        for interaction in interactions:
            told.setdefault(interaction.interaction_id, interaction)
        with self.database.write() as connection:
            for ids in db.chunks(list(told)):
                known = set(
                    connection.execute(
                        sa.select(db.interactions.c.interaction_id).where(
                            db.interactions.c.interaction_id.in_(ids)
                        )
                    ).scalars()
                )
                rows = [_interaction_row(told[key]) for key in ids if key not in known]
                if rows:
                    connection.execute(db.interactions.insert(), rows)
        return [None] * len(interactions)

    def quarantine(self, rows: Sequence[QuarantinedRow]) -> int:
        """Set the rows aside and return how many were not there yet; their agents become known.

        What is said of those that are there is what is said now; what an erasure took stays away.
        """
        q, added = db.quarantine.c, 0
        with self.database.write(alone=True) as connection:  # two files may hold one bad line
            need_right_to_write()
            for agent_id in {row.agent_id for row in rows}:
                _make_known(connection, agent_id, now())
            for some in db.chunks(rows):
                by_id = {_quarantine_id(row): row for row in some}
                for agent_id in {row.agent_id for row in some}:
                    for erased in erased_among(connection, agent_id, list(by_id)):
                        del by_id[erased]
                said = sa.select(q.quarantine_id, q.detail).where(q.quarantine_id.in_(by_id))
                known = dict(connection.execute(said).all())
                fresh = [
                    {
                        "quarantine_id": key,
                        "agent_id": row.agent_id,
                        "rule": row.rule,
                        "detail": db.storable(row.detail),
                        "origin": db.storable(row.origin)[-400:],
                        "line": row.line,
                        "feedback_id": row.feedback_id,
                        "raw": None
                        if row.raw is None
                        else _shortened(db.storable(row.raw), row.agent_id),
                        "created_at": now(),
                    }
                    for key, row in by_id.items()
                    if key not in known
                ]
                if fresh:
                    connection.execute(db.quarantine.insert(), fresh)
                added += len(fresh)
                anew = [
                    {"key": key, "said": now_said}
                    for key, detail in known.items()
                    if detail != (now_said := db.storable(by_id[key].detail))
                ]
                if anew:
                    row = db.quarantine.update().where(q.quarantine_id == sa.bindparam("key"))
                    connection.execute(row.values(detail=sa.bindparam("said")), anew)
        return added

    def release(self, agent_id: str, watermark: int, aside: Sequence[QuarantinedRow]) -> int:
        """Take the votes up to the watermark out of quarantine that are not set aside as before.

        `aside` is what validation sets aside of them now. Returns how many went: votes that train,
        votes that later ones replaced, and those that break another rule than they did.
        """
        q, f = db.quarantine.c, db.feedback.c
        kept = {(row.feedback_id, row.rule) for row in aside}
        query = (
            sa.select(q.quarantine_id, q.feedback_id, q.rule)
            .join(db.feedback, f.feedback_id == q.feedback_id)
            .where(q.agent_id == agent_id, f.seq <= watermark)
        )
        with self.database.read() as connection:
            gone = [
                row.quarantine_id
                for row in connection.execute(query)
                if (row.feedback_id, row.rule) not in kept
            ]
        # Votes wait for what is alone, and so for the removing, but not for the look at every row.
        with self.database.write(alone=True) as connection:
            for some in db.chunks(gone):
                connection.execute(db.quarantine.delete().where(q.quarantine_id.in_(some)))
        return len(gone)

    def close_quarantined(self, agent_id: str, *, rule: str | None = None) -> int:
        """Note that somebody dealt with the rows set aside, of one rule where it is named.

        Returns how many there were. They stay, and are counted and shown no more.
        """
        with self.database.write(alone=True) as connection:
            closed = db.quarantine.update().where(*_open(agent_id, rule)).values(closed_at=now())
            return connection.execute(closed).rowcount

    # -- reading --------------------------------------------------------------------------------

    def interaction(self, interaction_id: str) -> Interaction | None:
        """Return the interaction, or None where there is none."""
        with self.database.read() as connection:
            row = connection.execute(
                db.interactions.select().where(db.interactions.c.interaction_id == interaction_id)
            ).first()
        if row is None:
            return None
        values = dict(row._mapping)
        values["prompt"] = prompt_from_json(values["prompt"])
        return Interaction(**values)

    def askers(self, agent_id: str) -> dict[str, str]:
        """Return who asked what each vote is about, by the vote's id, where that is known."""
        f, i = db.feedback.c, db.interactions.c
        asker = sa.func.coalesce(i.user_id, i.session_id)
        joined = db.feedback.join(db.interactions, i.interaction_id == f.interaction_id)
        query = sa.select(f.feedback_id, asker).select_from(joined)
        query = query.where(f.agent_id == agent_id, asker.is_not(None))
        with self.database.read() as connection:
            return {str(vote): str(who) for vote, who in connection.execute(query)}

    def new_since(
        self,
        agent_id: str,
        watermark: int,
        *,
        until: datetime | None = None,
        most: int | None = None,
    ) -> NewFeedback:
        """Return what arrived after the watermark, and where said by a moment.

        Votes are counted up to `most` where that is said. Costs what is counted, not what is there.
        What was taken back counts for nothing, whenever that was.
        """
        f = db.feedback.c
        new = [f.agent_id == agent_id, f.seq > watermark]
        if until is not None:
            # The newest number is not before one at which votes were taken back: up to there they
            # would be trained on.
            new.append(sa.or_(f.received_at <= until, f.idempotency_key.startswith(db.WITHDRAWN)))
        with self.database.read() as connection:
            train = _train(connection, agent_id, watermark)
            fresh = sa.select(f.voter, f.target, f.kind).where(*new, *train)
            if most is None:
                # Materialised, or SQLite reads the agent's whole voting index to spare a sort.
                all_of_them = fresh.cte("fresh").prefix_with("MATERIALIZED")
                votes = connection.execute(
                    sa.select(sa.func.count()).select_from(
                        sa.select(all_of_them).distinct().subquery()
                    )
                ).scalar_one()
            else:
                # The newest first: before them may lie a large file that was taken back.
                votes = _distinct(connection, fresh.order_by(f.seq.desc()), most)
            last = connection.execute(
                sa.select(f.seq, f.received_at).where(*new).order_by(f.seq.desc()).limit(1)
            ).first()
        return NewFeedback(votes, last.seq if last else watermark, last and last.received_at)

    def arrived(self, agent_id: str, watermark: int, count: int) -> datetime | None:
        """Return when so many votes had arrived since the watermark; None where fewer have.

        One that was repeated or changed arrived when it was first given; one that was taken back
        did not.
        """
        f = db.feedback.c
        with self.database.read() as connection:
            new = (f.agent_id == agent_id, f.seq > watermark)
            train = _train(connection, agent_id, watermark)
            # Materialised as in `new_since`.
            given = sa.select(f.voter, f.target, f.kind, f.seq).where(*new, *train).cte("given")
            given = given.prefix_with("MATERIALIZED")
            began = (
                sa.select(sa.func.min(given.c.seq).label("seq"))
                .group_by(given.c.voter, given.c.target, given.c.kind)
                .order_by("seq")
                .offset(count - 1)
                .limit(1)
            )
            query = sa.select(f.received_at).where(f.seq == began.scalar_subquery())
            return connection.execute(query).scalar()

    def withdrawn_from(self, agent_id: str, watermark: int) -> bool:
        """Say whether votes were taken back since that counted up to the watermark.

        Not where somebody changed in MLflow what they had said: that is another vote of theirs.
        """
        query = sa.exists().where(*_counted_up_to(agent_id, watermark))
        with self.database.read() as connection:
            return bool(connection.execute(sa.select(query)).scalar_one())

    def withdrawn_by_origin(self, agent_id: str, watermark: int) -> dict[str, int]:
        """Return how many of those votes each origin had brought."""
        origin = db.feedback.c.origin
        taken_back = _counted_up_to(agent_id, watermark)
        query = sa.select(origin, sa.func.count()).where(*taken_back).group_by(origin)
        with self.database.read() as connection:
            return {
                str(name): int(count) for name, count in connection.execute(query.order_by(origin))
            }

    def counts(self, agent_id: str) -> dict[str, int]:
        """Return how many effective votes of each kind there are."""
        e = db.effective_feedback
        with self.database.read() as connection:
            query = (
                sa.select(e.c.kind, sa.func.count())
                .where(e.c.agent_id == agent_id)
                .group_by(e.c.kind)
                .order_by(e.c.kind)
            )
            return {str(kind): int(count) for kind, count in connection.execute(query)}

    def sides(self, agent_id: str) -> dict[str, tuple[int, int]]:
        """Return how many answers most votes on a scale are for, and against, by their kind."""
        e = db.effective_feedback.c
        number = on_scale(e)
        ahead = sa.func.sum(sa.case((number > 0.5, 1), (number < 0.5, -1), else_=0))
        answers = (
            sa.select(e.kind, ahead.label("ahead"))
            .where(e.agent_id == agent_id, e.kind.in_(ON_A_SCALE))
            .group_by(e.kind, e.target)
            .subquery()
            .c
        )
        of_side = [
            sa.func.sum(sa.case((side, 1), else_=0))
            for side in (answers.ahead > 0, answers.ahead < 0)
        ]
        query = sa.select(answers.kind, *of_side).group_by(answers.kind).order_by(answers.kind)
        with self.database.read() as connection:
            found = connection.execute(query)
            return {str(kind): (int(good), int(bad)) for kind, good, bad in found}

    def ties(self, agent_id: str) -> int:
        """Return how many effective preferences say that neither answer is better."""
        e = db.effective_feedback.c
        query = sa.select(sa.func.count()).where(
            e.agent_id == agent_id,
            e.kind == FeedbackKind.preference,
            e.choice.in_(("tie", "both_bad")),
        )
        with self.database.read() as connection:
            return int(connection.execute(query).scalar_one())

    def origins(self, agent_id: str) -> dict[str, int]:
        """Return how many effective votes came from where: a file's name, or a way in."""
        e = db.effective_feedback.c
        query = sa.select(e.origin, sa.func.count()).where(e.agent_id == agent_id)
        with self.database.read() as connection:
            found = connection.execute(query.group_by(e.origin).order_by(e.origin))
            return {str(origin): int(count) for origin, count in found}

    def keys_from(self, agent_id: str, origin: str) -> list[str]:
        """Return the idempotency keys of the effective votes of an origin."""
        e = db.effective_feedback.c
        # As its index has the condition, which it would not be known by with a value beside it.
        came = db.FROM_MLFLOW if origin == "mlflow" else e.origin == origin
        query = sa.select(e.idempotency_key).where(e.agent_id == agent_id, came)
        with self.database.read() as connection:
            return list(connection.execute(query).scalars())

    def votes_by_voter(
        self, agent_id: str, kinds: Collection[str], *, most: int
    ) -> dict[str, int] | None:
        """Return how many effective votes of these kinds each voter gave; None of more than most.

        Whoever did not sign is a voter each time.
        """
        e = db.effective_feedback.c
        query = (
            sa.select(e.voter, sa.func.count())
            .where(e.agent_id == agent_id, e.kind.in_(kinds))
            .group_by(e.voter)
            .limit(most + 1)
        )
        with self.database.read() as connection:
            found = {str(voter): int(count) for voter, count in connection.execute(query)}
        return None if len(found) > most else found

    def received_at(self, feedback_id: str) -> datetime | None:
        """Return when an event was stored, None where there is no such event."""
        f = db.feedback.c
        with self.database.read() as connection:
            query = sa.select(f.received_at).where(f.feedback_id == feedback_id)
            return connection.execute(query).scalar()

    def opinion(self, agent_id: str) -> Opinion:
        """Return what the effective thumbs, ratings and scores say, on the scale from 0 to 1."""
        e = db.effective_feedback.c
        scaled = on_scale(e)
        # PostgreSQL refuses a product that is too small for a float; SQLite says 0 as well.
        square = sa.case((sa.func.abs(scaled) < 1e-150, 0.0), else_=scaled * scaled)
        query = sa.select(sa.func.count(), sa.func.avg(scaled), sa.func.avg(square)).where(
            e.agent_id == agent_id, e.kind.in_(ON_A_SCALE)
        )
        with self.database.read() as connection:
            votes, mean, squares = connection.execute(query).one()
        if not votes:
            return Opinion(0, None, None)
        return Opinion(votes, float(mean), math.sqrt(max(0.0, squares - mean * mean)))

    @property
    def waiting(self) -> int:
        """Return how many events wait for the next commit."""
        return self._votes.waiting

    def quarantined(self, agent_id: str) -> dict[str, int]:
        """Return how many rows each rule has set aside that nobody has dealt with."""
        q = db.quarantine.c
        with self.database.read() as connection:
            query = (
                sa.select(q.rule, sa.func.count())
                .where(*_open(agent_id))
                .group_by(q.rule)
                .order_by(q.rule)
            )
            return {str(rule): int(count) for rule, count in connection.execute(query)}

    def quarantined_rows(
        self, agent_id: str, *, rule: str | None = None, limit: int = 20
    ) -> list[QuarantinedRow]:
        """Return the rows set aside last that nobody has dealt with, oldest first.

        Of one rule where it is named.
        """
        q = db.quarantine.c
        query = sa.select(*(q[each.name] for each in fields(QuarantinedRow))).where(
            *_open(agent_id, rule)
        )
        with self.database.read() as connection:
            newest = connection.execute(
                query.order_by(q.created_at.desc(), q.origin.desc(), q.line.desc()).limit(limit)
            ).all()
        return [QuarantinedRow(**row._mapping) for row in reversed(newest)]


def target_of(event: Feedback) -> str:
    """Return what the event is about, as one string: the same target and rater supersede.

    The interaction, or for inline rows the hash of agent, prompt and completion. A preference is
    about two completions, so the other one is part of its target: a person who ranks A over B and
    A over C has cast two votes. Which of the two is named first is not: B and A is the same pair.
    """
    this = event.interaction_id or hashed(
        event.agent_id, prompt_to_json(event.prompt or ()), event.completion or ""
    )
    if event.kind is not FeedbackKind.preference:
        return this
    other = event.other_interaction_id or hashed(
        event.agent_id,
        prompt_to_json(event.other_prompt or event.prompt or ()),
        event.other_completion or "",
    )
    return hashed(*sorted((this, other)))


def body_sha256(event: Feedback) -> str:
    """Return the hash of what the sender said; equal for a retry, different for another vote.

    Topic and time are left out: they are compared with the stored row's own (`_repeats`).
    """
    return hashed(
        *(
            repr(value)
            for value in (
                event.kind.value,
                event.interaction_id,
                event.prompt,
                event.completion,
                event.number,
                event.text,
                sorted((event.criteria or {}).items()),
                event.other_interaction_id,
                event.other_completion,
                event.other_prompt,
                event.choice,
                event.shown_first,
                event.rater_id,
                event.source,
                event.tags,
                event.comment,
            )
        )
    )


def _need_path(recipe: object) -> None:
    path = str(recipe or "")
    if len(path) > db.RECIPE_CHARACTERS:
        raise ConfigError(
            f"needed a recipe's path of at most {db.RECIPE_CHARACTERS} characters, found "
            f"{path}; move it nearer to the root"
        )
    if db.storable(path) != path:
        raise ConfigError(
            f"needed a recipe's path in UTF-8, found {path!a}; rename the file or its folder"
        )


def _make_known(
    connection: sa.Connection, agent_id: str, at: datetime, recipe: str | None = None
) -> None:
    # Not looked up first: on PostgreSQL another may make it known in between.
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    row = insert(db.agents).values(agent_id=agent_id, created_at=at, recipe=recipe)
    connection.execute(row.on_conflict_do_nothing())


def _insert_events(
    connection: sa.Connection, events: Sequence[Feedback]
) -> list[Stored | FeedbackError]:
    """Insert what is new and return an answer or a refusal for each event, in order."""
    known = _known_keys(connection, events)
    erased = _erased_keys(connection, events, known)
    missing = _missing_interactions(connection, events)
    stored = _with_texts(connection, events, known)
    received = now()
    rows: list[dict[str, Any]] = []
    retired: list[str] = []  # the ids of votes taken back whose keys these rows take over
    outcomes: list[Stored | FeedbackError] = []
    for event in events:
        body = body_sha256(event)
        before = known.get((event.agent_id, event.idempotency_key))
        # A person takes a file in again; a request is sent again, and MLflow read, by itself.
        if before is not None and before.is_withdrawn and event.origin not in LIVE:
            before = None
        if before is not None and not (
            _repeats(event, body, before)
            or before.left == _without_words(event)
            or _is_exported(event, body, before, stored)
            or _says_more_now(event, before)
            or _is_nobodys_now(event, before)
        ):
            is_row = event.idempotency_key.startswith("row:")
            remedy = (
                "something else is told of it now: rlhf feedback withdraw --file takes back what "
                "its file said, to be taken in again"
                if is_row
                else "send a new key for a new vote"
            )
            used = f"key {event.idempotency_key!r} was used before for another body; {remedy}"
            outcomes.append(IdempotencyConflict(used))
            continue
        if before is not None:
            outcomes.append(Stored(before.feedback_id, known=True))
            continue
        if (event.agent_id, event.idempotency_key) in erased:
            outcomes.append(
                VoteErased(
                    f"the vote under key {event.idempotency_key!r} was erased with who gave it; "
                    "send a new key for a new vote"
                )
            )
            continue
        lost = missing & {(event.agent_id, i) for i in interaction_ids(event)}
        if lost:
            outcomes.append(
                FeedbackRefused(
                    "unknown_interaction",
                    f"needed an interaction of agent {event.agent_id!r}, found no "
                    f"{', '.join(sorted(i for _, i in lost))}; send both texts inline",
                )
            )
            continue
        row = _feedback_row(event, uuid7(), body, received)
        if (old := known.get((event.agent_id, event.idempotency_key))) is not None:
            retired.append(old.feedback_id)
        known[event.agent_id, event.idempotency_key] = _Known(
            row["feedback_id"], body, row["topic"], row["occurred_at"], received
        )
        rows.append(row)
        outcomes.append(Stored(row["feedback_id"], known=False))
    for agent_id in {row["agent_id"] for row in rows}:
        _make_known(connection, agent_id, received)
    _retire(connection, retired)
    if rows:
        connection.execute(db.feedback.insert(), rows)
    return outcomes


def _retire(connection: sa.Connection, feedback_ids: Sequence[str]) -> None:
    """Free the keys of these votes for rows that come under them anew."""
    f = db.feedback.c
    for some in db.chunks(feedback_ids):
        connection.execute(
            db.feedback.update()
            .where(f.feedback_id.in_(some))
            .values(idempotency_key=db.RETIRED + f.feedback_id)
        )


def _said_before(
    connection: sa.Connection, feedback_ids: Sequence[str], keys: Collection[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the voters of these votes, which have the keys, had said of the same before.

    The newest that was not taken back, now or before, and whose words nobody erased. And the ids of
    what the same file had said before: that goes with the file.
    """
    f, gone = db.feedback.c, db.feedback.alias("gone")
    query = (
        sa.select(*(column for column in f if column.name != "seq"))
        .add_columns(gone.c.origin.label("came_with"))
        .join(gone, sa.and_(*_same(gone.c), f.seq < gone.c.seq))
        .where(
            gone.c.feedback_id.in_(feedback_ids),
            f.erased_at.is_(None),
            ~f.idempotency_key.startswith(db.RETIRED),
            ~_following().startswith(db.WITHDRAWN),
        )
        .order_by(f.seq)
    )
    newest, in_file = {}, []
    for row in connection.execute(query):
        values = dict(row._mapping)
        if values.pop("came_with") == row.origin and row.origin not in LIVE:
            in_file.append(row.feedback_id)
        elif row.idempotency_key not in keys:
            newest[row.voter, row.target, row.kind] = values
    return list(newest.values()), in_file


class _Known(NamedTuple):
    """What is stored under a key, as far as a retry is told by it."""

    feedback_id: str
    body_sha256: str
    topic: str | None
    occurred_at: datetime
    received_at: datetime
    is_withdrawn: bool = False
    rater_id: str | None = None
    left: tuple[object, ...] | None = None  # by an erasure, which took the words and their hash


def _repeats(event: Feedback, body: str, known: _Known) -> bool:
    """Say whether the event says what is stored under its key.

    A vote sent without a time got the moment it was received: then none belongs to its retry.
    """
    sent = None if known.occurred_at == known.received_at else known.occurred_at
    same_time = event.occurred_at in (sent, known.occurred_at)
    return (body, event.topic) == (known.body_sha256, known.topic) and same_time


def _without_words(event: Feedback) -> tuple[object, ...]:
    """Return what an erasure of the answer that a vote is about leaves of the vote."""
    return tuple(getattr(event, name) for name in LEFT)


def _is_exported(event: Feedback, body: str, known: _Known, stored: Mapping[str, Feedback]) -> bool:
    """Say whether the event is what an export writes of what is stored under its key.

    A vote on an interaction comes with its texts instead; of `--pairs` a preference or a correction
    comes as the two texts and who chose, and no more: a file's votes are people's by default.
    """
    if (vote := stored.get(known.feedback_id)) is None:
        return False
    if _repeats(event, body, known._replace(body_sha256=body_sha256(vote))):
        return True
    is_anothers = event.source not in ("human", vote.source)
    says_more = event.tags or event.comment or event.topic or event.occurred_at or is_anothers
    pair = None if says_more or event.rater_id != vote.rater_id else _pair_of(event)
    return pair is not None and pair == _pair_of(vote)


def _says_more_now(event: Feedback, known: _Known) -> bool:
    """Say whether it is a file's row of which less was read when it was taken in.

    Nobody's name, or nothing that stands beside the vote; what was exported has its stored moment.
    """
    bare = replace(event, occurred_at=None, comment=None, topic=None, tags=())
    as_then = [replace(event, rater_id=None)]
    if event.occurred_at != known.occurred_at:
        as_then += [bare, replace(bare, rater_id=None)]
    return event.idempotency_key.startswith("row:") and any(
        _repeats(each, body_sha256(each), known) for each in as_then
    )


def _pair_of(event: Feedback) -> tuple[object, ...] | None:
    """Return prompt, chosen and rejected of a vote that has all texts; None where it is no pair."""
    if event.kind is FeedbackKind.correction:
        return event.prompt, event.text, event.completion
    if event.choice not in ("left", "right") or event.other_prompt not in (None, event.prompt):
        return None
    sides = (event.completion, event.other_completion)
    won = this_won(event.choice, event.shown_first)
    return (event.prompt, *(sides if won else sides[::-1]))


def _is_nobodys_now(event: Feedback, known: _Known) -> bool:
    """Say whether it is an assessment that an earlier release took for one person's, as all were
    that MLflow's page names nobody for.
    """
    then = replace(event, rater_id=known.rater_id)
    is_unsigned = event.origin == "mlflow" and event.rater_id is None
    return is_unsigned and _repeats(then, body_sha256(then), known)


def _with_texts(
    connection: sa.Connection,
    events: Sequence[Feedback],
    known: Mapping[tuple[str, str], _Known],
) -> dict[str, Feedback]:
    """Return, by feedback id, the stored votes that events contradict, with all their texts."""
    asked = [
        before.feedback_id
        for event in events
        if (before := known.get((event.agent_id, event.idempotency_key))) is not None
        and not _repeats(event, body_sha256(event), before)
    ]
    f, this, other = db.feedback, db.interactions.alias("this"), db.interactions.alias("other")
    query = (
        sa.select(
            f,
            sa.func.coalesce(f.c.prompt, this.c.prompt).label("asked"),
            sa.func.coalesce(f.c.completion, this.c.completion).label("answer"),
            sa.func.coalesce(f.c.other_completion, other.c.completion).label("other_answer"),
            other.c.prompt.label("other_asked"),
        )
        .outerjoin(this, this.c.interaction_id == f.c.interaction_id)
        .outerjoin(other, other.c.interaction_id == f.c.other_interaction_id)
        .where(f.c.erased_at.is_(None))
    )
    found: dict[str, Feedback] = {}
    for some in db.chunks(asked):
        for row in connection.execute(query.where(f.c.feedback_id.in_(some))):
            beside = row.other_prompt
            if row.other_interaction_id is not None and row.other_asked != row.asked:
                beside = row.other_asked
            found[row.feedback_id] = Feedback(
                agent_id=row.agent_id,
                kind=FeedbackKind(row.kind),
                idempotency_key=row.idempotency_key,
                prompt=None if row.asked is None else prompt_from_json(row.asked),
                completion=row.answer,
                number=row.number,
                text=row.text,
                criteria=None if row.criteria is None else json.loads(row.criteria),
                other_completion=row.other_answer,
                other_prompt=None if beside is None else prompt_from_json(beside),
                choice=row.choice,
                shown_first=row.shown_first,
                rater_id=row.rater_id,
                source=row.source,
                tags=tuple(json.loads(row.tags)),
                comment=row.comment,
            )
    return found


def _known_keys(
    connection: sa.Connection, events: Sequence[Feedback]
) -> dict[tuple[str, str], _Known]:
    f = db.feedback.c
    moments = (f.occurred_at, f.received_at)
    told = (f.feedback_id, f.body_sha256, f.topic, *moments, _is_withdrawn(), f.rater_id)
    left = [f[name] for name in LEFT]
    known: dict[tuple[str, str], _Known] = {}
    for agent_id in {event.agent_id for event in events}:
        keys = [e.idempotency_key for e in events if e.agent_id == agent_id]
        for some in db.chunks(keys):
            query = sa.select(f.idempotency_key, *told, *left).where(
                f.agent_id == agent_id, f.idempotency_key.in_(some)
            )
            for key, *row in connection.execute(query):
                before = _Known(*row[: len(told)])
                if not before.body_sha256:
                    before = before._replace(left=tuple(row[len(told) :]))
                known[agent_id, key] = before
    return known


def _erased_keys(
    connection: sa.Connection,
    events: Sequence[Feedback],
    known: Mapping[tuple[str, str], _Known],
) -> set[tuple[str, str]]:
    """Return under which of the keys that are not known a vote was, until it was erased."""
    marks: dict[str, dict[str, str]] = {}
    for event in events:
        agent_id, key = event.agent_id, event.idempotency_key
        if (agent_id, key) not in known:
            marks.setdefault(agent_id, {})[erased_key(agent_id, key)] = key
    return {
        (agent_id, by_mark[mark])
        for agent_id, by_mark in marks.items()
        for some in db.chunks(list(by_mark))
        for mark in erased_among(connection, agent_id, some)
    }


def _is_withdrawn() -> sa.ColumnElement[bool]:
    """Return what says of a vote that it was taken back, or what replaced it was and nothing since.

    Not of one whose row came in again, nor of one that was erased.
    """
    f = db.feedback.c
    taken_back = sa.or_(*(_following(newest=x).startswith(db.WITHDRAWN) for x in (False, True)))
    return sa.and_(f.erased_at.is_(None), ~f.idempotency_key.startswith(db.RETIRED), taken_back)


def _following(*, newest: bool = False) -> sa.ScalarSelect[str]:
    """Return the key of what the voter said next of the same, or said last."""
    f, newer = db.feedback.c, db.feedback.alias("newer").c
    keys = sa.select(newer.idempotency_key).where(*_same(newer), newer.seq > f.seq)
    return keys.order_by(newer.seq.desc() if newest else newer.seq).limit(1).scalar_subquery()


def _same(other: Any) -> list[sa.ColumnElement[bool]]:
    """Return what says of another row, by its columns, that its voter speaks of the same thing."""
    names = ("agent_id", "voter", "target", "kind")
    return [other[name] == db.feedback.c[name] for name in names]


def _takes_back(agent_id: str, watermark: int) -> list[sa.ColumnElement[bool]]:
    """Return what says of a row after the watermark that it only takes an earlier vote back."""
    f = db.feedback.c
    # Erased as well, which such a row is: an index has those alone.
    is_blank = (f.erased_at.is_not(None), f.idempotency_key.startswith(db.WITHDRAWN))
    return [f.agent_id == agent_id, f.seq > watermark, *is_blank]


def _counted_up_to(agent_id: str, watermark: int) -> list[sa.ColumnElement[bool]]:
    """Return what says of a row that it takes back, from outside MLflow, a vote up to there."""
    f, before = db.feedback.c, db.feedback.alias("before").c
    replaced = sa.select(sa.func.max(before.seq)).where(*_same(before), before.seq < f.seq)
    return [
        *_takes_back(agent_id, watermark),
        f.origin != "mlflow",
        replaced.scalar_subquery() <= watermark,
    ]


def _train(
    connection: sa.Connection, agent_id: str, watermark: int
) -> list[sa.ColumnElement[bool]]:
    """Return what says of a vote after the watermark that it trains: not one taken back since."""
    f, newer = db.feedback.c, db.feedback.alias("newer").c
    train = [f.kind != FeedbackKind.comment.value, f.erased_at.is_(None)]
    # To look at what came after each vote takes three times as long as to count them.
    blank = sa.select(sa.exists().where(*_takes_back(agent_id, watermark)))
    if connection.execute(blank).scalar_one():
        is_blank = newer.idempotency_key.startswith(db.WITHDRAWN)
        train.append(~sa.exists().where(*_same(newer), newer.seq > f.seq, is_blank))
    return train


def _missing_interactions(
    connection: sa.Connection, events: Sequence[Feedback]
) -> set[tuple[str, str]]:
    i = db.interactions.c
    wanted = {(event.agent_id, key) for event in events for key in interaction_ids(event)}
    found: set[tuple[str, str]] = set()
    for some in db.chunks(sorted({key for _, key in wanted})):
        query = sa.select(i.agent_id, i.interaction_id).where(i.interaction_id.in_(some))
        found |= {(agent, key) for agent, key in connection.execute(query)}
    return wanted - found


def interaction_ids(event: Feedback) -> list[str]:
    """Return the ids of the interactions a vote is about: none where it brings its own texts."""
    return [i for i in (event.interaction_id, event.other_interaction_id) if i is not None]


def _feedback_row(
    event: Feedback, feedback_id: str, body: str, received: datetime
) -> dict[str, Any]:
    return {
        "feedback_id": feedback_id,
        "agent_id": event.agent_id,
        "idempotency_key": event.idempotency_key,
        "body_sha256": body,
        "kind": event.kind.value,
        "target": target_of(event),
        "voter": voter_of(event.rater_id, event.source)
        if event.rater_id
        else f"anonymous:{feedback_id}",
        "interaction_id": event.interaction_id,
        "prompt": None if event.prompt is None else prompt_to_json(event.prompt),
        "completion": event.completion,
        "number": event.number,
        "text": event.text,
        "criteria": None if event.criteria is None else json.dumps(dict(event.criteria)),
        "other_interaction_id": event.other_interaction_id,
        "other_completion": event.other_completion,
        "other_prompt": None if event.other_prompt is None else prompt_to_json(event.other_prompt),
        "choice": event.choice,
        "shown_first": event.shown_first,
        "rater_id": event.rater_id,
        "source": event.source,
        "origin": db.storable(event.origin)[-400:],
        "tags": json.dumps(list(event.tags)),
        "comment": event.comment,
        "topic": event.topic,
        "occurred_at": event.occurred_at or received,
        "received_at": received,
    }


def _interaction_row(interaction: Interaction) -> dict[str, Any]:
    return {
        "interaction_id": interaction.interaction_id,
        "agent_id": interaction.agent_id,
        "session_id": interaction.session_id,
        "user_id": interaction.user_id,
        "model_version": interaction.model_version,
        "experiment": interaction.experiment,
        "arm": interaction.arm,
        "prompt": prompt_to_json(interaction.prompt),
        "completion": interaction.completion,
        "sampling": dict(interaction.sampling),
        "latency_seconds": interaction.latency_seconds,
        "created_at": interaction.created_at,
    }


def _distinct(connection: sa.Connection, query: sa.Select[Any], most: int) -> int:
    """Return how many different rows there are, `most` at most, reading no further than that."""
    found = set()
    with connection.execute(query.execution_options(yield_per=db.AT_ONCE)) as rows:
        for row in rows:
            found.add(row)
            if len(found) >= most:
                break
    return len(found)


def on_scale(columns: Any) -> sa.ColumnElement[float]:
    """Return what a thumb, rating or score says, on the scale from 0 to 1."""
    return sa.case(
        (columns.kind == FeedbackKind.rating, (columns.number - 1) / 4), else_=columns.number
    )


def _open(agent_id: str, rule: str | None = None) -> list[sa.ColumnElement[bool]]:
    """Return what says of a row in quarantine that it waits for somebody."""
    q = db.quarantine.c
    named = [] if rule is None else [q.rule == rule]
    return [q.agent_id == agent_id, q.closed_at.is_(None), *named]


def _quarantine_id(row: QuarantinedRow) -> str:
    if row.feedback_id is not None:
        return hashed(row.agent_id, row.feedback_id)  # a stored row is set aside once
    said = row.raw if row.raw is not None else row.detail
    if row.rule in (Rule.damaged_file, Rule.line_too_long):  # all that is kept of it may be alike
        return hashed(row.agent_id, row.rule, said, row.origin, str(row.line))
    return hashed(row.agent_id, row.rule, said)


def _shortened(text: str, agent_id: str) -> str:
    """Return the text, its middle cut out where it is long; first whom an erasure may look for."""
    if len(text) <= LONGEST_RAW:
        return text
    half = LONGEST_RAW // 2
    marks = marks_of(agent_id, text)  # at the start, where no text that broke off is before them
    kept = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return f"{marks} … {kept}" if marks else kept
