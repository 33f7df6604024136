"""One person in the store: who is meant, what is held about them, and taking it out.

Theirs are the votes they signed, the interactions they had (their `user`, or unsigned ones of the
same session), what the chat noted about those, and lines in quarantine that carry their name. What
others said about their interactions keeps its number and loses its words: a tombstone that still
counts, and that nothing is trained on. What this cannot find: a text of theirs that somebody else
sent in as a row of their own, and the beginning of a line in quarantine that was too long to hold,
where their name came after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.errors import UnknownRater
from rlhf_pipeline.feedback.claims import Claim, check_token
from rlhf_pipeline.feedback.formats import HASHED_RATER, WHO
from rlhf_pipeline.records import Source, hash_rater, hashed, now, uuid7

SIGNATURE = re.compile(rf'"({"|".join(WHO)})"\s*:\s*("(?:[^"\\]|\\.)*"|-?[0-9]+)')
MENTION = re.compile(r'"(?:other_)?interaction_id"\s*:\s*"([^"\\]*)"')
CELL = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
LONGEST_ID = 36  # characters of an interaction's id
MOST_MARKS = 100
WORDS = ("prompt", "completion", "text", "other_completion", "other_prompt", "comment", "topic")


@dataclass(frozen=True, slots=True)
class Person:
    """One rater of one agent."""

    agent_id: str
    rater_id: str  # hashed, as the store has it
    unsigned: bool = False  # also interactions nobody signed that they said something about

    @property
    def mark(self) -> str:
        """Return what is kept of them after an erasure: a hash of the hash, found nowhere else."""
        return hashed("erased", self.agent_id, self.rater_id)

    @property
    def voters(self) -> tuple[str, ...]:
        """Return as whom votes count that have their name: theirs, and those of machines."""
        return tuple(voter_of(self.rater_id, source) for source in get_args(Source))


def voter_of(rater_id: str, source: Source) -> str:
    """Return as whom a signed vote counts: what a machine says takes the place of no person's."""
    return rater_id if source == "human" else f"{source}:{rater_id}"


@dataclass(frozen=True, slots=True)
class Vote:
    """What of a feedback row decides where it counts."""

    feedback_id: str
    voter: str
    target: str
    kind: str
    seq: int
    is_blank: bool  # it went before, with an answer of somebody's that it was about


@dataclass(frozen=True)
class Held:
    """What the store holds about a person, by id."""

    votes: tuple[Vote, ...]  # theirs
    about: tuple[Vote, ...]  # other people's, about their interactions
    interactions: frozenset[str]
    quarantined: frozenset[str]  # lines with their name
    mentioned: frozenset[str]  # other people's lines in quarantine about their interactions

    @cached_property
    def gone(self) -> frozenset[str]:
        """Return the ids of the feedback that nothing may be trained on any more."""
        return frozenset(vote.feedback_id for vote in (*self.votes, *self.about))

    def __bool__(self) -> bool:
        return bool(self.votes or self.interactions or self.quarantined)


def find(
    database: db.Database, given: str, agent_id: str | None = None, *, unsigned: bool = False
) -> list[Person]:
    """Return the person in every agent, or the one named, that holds anything about them.

    `given` is the id as the sender wrote it, or the hash that the store made of it.
    """
    found = []
    with database.read() as connection:
        a = db.agents.c.agent_id
        agents = connection.execute(sa.select(a).order_by(a)).scalars().all()
        for agent in agents if agent_id is None else [agent_id]:
            found += [p for p in persons(given, agent, unsigned=unsigned) if held(connection, p)]
    return found


def persons(given: str, agent_id: str, *, unsigned: bool = False) -> list[Person]:
    """Return whom an agent may mean by an id: its hash, and itself where it looks like one."""
    hashes = [hash_rater(agent_id, given), *([given] if HASHED_RATER.fullmatch(given) else [])]
    return [Person(agent_id, rater_id, unsigned) for rater_id in hashes]


def need(people: Sequence[Person], given_agent: str | None) -> None:
    """Raise UnknownRater where nobody was found. The message does not repeat the id."""
    if not people:
        where = "any agent" if given_agent is None else f"agent {given_agent!r}"
        raise UnknownRater(
            f"needed a rater that {where} holds anything about, found none; give the id as it was "
            "sent, with any blanks around it, or the hash that an export shows"
        )


def held(connection: sa.Connection, person: Person) -> Held:
    """Return the ids of everything the store holds about the person."""
    f = db.feedback.c
    interactions = frozenset(connection.execute(_theirs(person)).scalars())
    columns = (f.feedback_id, f.voter, f.target, f.kind, f.seq, f.erased_at.is_not(None))
    mine = sa.select(*columns).where(f.agent_id == person.agent_id, f.voter.in_(person.voters))
    votes = _in_order(connection, mine)
    about: list[Vote] = []
    if interactions:
        about = _in_order(connection, sa.select(*columns).where(_about(person)))
    gone = {vote.feedback_id for vote in (*votes, *about)}
    quarantined, mentioned = _lines(connection, person, gone, interactions)
    return Held(tuple(votes), tuple(about), interactions, quarantined, mentioned)


def _lines(
    connection: sa.Connection, person: Person, gone: Collection[str], interactions: Collection[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the lines in quarantine with their name, and others' about these interactions."""
    q = db.quarantine.c
    quarantined, mentioned = set(), set()
    lines = sa.select(q.quarantine_id, q.feedback_id, q.raw).where(
        q.agent_id == person.agent_id, sa.or_(q.feedback_id.is_not(None), q.raw.like('%"%'))
    )
    # Some at a time: else PostgreSQL would hear nothing while all of them are looked at.
    for key, feedback_id, raw in connection.execute(lines.execution_options(yield_per=db.AT_ONCE)):
        if feedback_id in gone or (raw is not None and is_signed_by(raw, person)):
            quarantined.add(key)
        elif raw is not None and interactions and mentions(raw, interactions):
            mentioned.add(key)
    return frozenset(quarantined), frozenset(mentioned)


def is_signed_by(text: str, person: Person) -> bool:
    """Say whether a line, whole or broken, carries the person's name as its rater.

    Of a table's row that was set aside without its columns' names any cell may be the name, but
    one of a single sign: that is a rating, of whomever.
    """
    if text.startswith('["'):
        cells = (_loaded(cell) for cell in CELL.findall(text) if len(cell) > len('"5"'))
        return any(person.rater_id in (c, hash_rater(person.agent_id, c)) for c in cells if c)
    for name, value in SIGNATURE.findall(text):
        if _rater_of(person.agent_id, name, value) == person.rater_id:
            return True
    return False


def marks_of(agent_id: str, text: str) -> str:
    """Return what a line is found by when someone is erased, short, whatever is cut out of it.

    Its raters, hashed, and the interactions it is about; of more than MOST_MARKS the first.
    """
    marks: dict[str, None] = {}
    for name, value in SIGNATURE.findall(text):
        if rater_id := _rater_of(agent_id, name, value):
            marks[f'"rater_id": "{rater_id}"'] = None
    for found in MENTION.findall(text):
        if len(found) <= LONGEST_ID:
            marks[f'"interaction_id": "{found}"'] = None
    return ", ".join(list(marks)[:MOST_MARKS])


def _rater_of(agent_id: str, name: str, value: str) -> str | None:
    """Return the hash of whom a field's value, as JSON, names; None where it names nobody."""
    told = _loaded(value)
    if name != "rater_id":
        return None if told is None else hash_rater(agent_id, told)
    return told if told is not None and HASHED_RATER.fullmatch(told) else None


def _loaded(value: str) -> str | None:
    try:
        return str(json.loads(value))
    except ValueError:  # an escape that JSON does not have
        return None


def mentions(text: str, interactions: Collection[str]) -> bool:
    """Say whether a line is about one of the interactions."""
    return any(found in interactions for found in MENTION.findall(text))


def rows_in_snapshots(
    connection: sa.Connection, agent_id: str, gone: Iterable[Vote]
) -> dict[str, int]:
    """Return {fingerprint: how many of these votes its snapshot was taken with}, oldest first.

    Asks the votes and not the files, so an erasure that is begun again says the same. A vote that
    went before, with somebody else, was counted then: a snapshot of only such has 0.
    """
    s = db.snapshots.c
    query = sa.select(s.fingerprint, s.watermark).where(s.agent_id == agent_id)
    votes = sorted(gone, key=lambda vote: vote.seq)
    found = {}
    for fingerprint, watermark in connection.execute(query.order_by(s.created_at)):
        # One per voter, target and kind: what came later replaced what was there.
        last = {(v.voter, v.target, v.kind): v for v in votes if v.seq <= watermark}
        if last:
            found[str(fingerprint)] = sum(not vote.is_blank for vote in last.values())
    return found


def remove(
    database: db.Database,
    person: Person,
    found: Held,
    token: int,
    *,
    counts: Mapping[str, int],
    snapshots: Sequence[Mapping[str, Any]],
    versions: Sequence[Mapping[str, Any]],
) -> None:
    """Take `found` out of the store in one transaction, and write down that it was done.

    What has come in since it was found stays, but for what is about the interactions that go: to
    wait until nothing does would be to wait until they stop voting. Raises ClaimLost where `token`
    does not hold any more.
    """
    with database.write(alone=True) as connection:  # nobody adds a vote while this looks
        check_token(connection, token, keep=True)
        f, i, e, q = db.feedback, db.interactions, db.chat_events, db.quarantine
        blank: dict[str, Any] = dict.fromkeys(WORDS)
        mentioned = _lines(connection, person, found.gone, found.interactions)[1]
        for some in db.chunks(sorted(vote.feedback_id for vote in found.votes)):
            _remove_votes(connection, person, f.c.feedback_id.in_(some))
        for some in db.chunks(sorted(found.interactions)):
            these = sa.select(i.c.interaction_id).where(i.c.interaction_id.in_(some))
            about = _are_about(person.agent_id, these)
            _remove_votes(connection, person, sa.and_(f.c.voter.in_(person.voters), about))
            connection.execute(
                f.update()
                .where(f.c.erased_at.is_(None), about)
                .values(**blank, tags="[]", body_sha256="", erased_at=now())
            )
            connection.execute(
                e.update()
                .where(e.c.interaction_id.in_(some))
                .values(interaction_id=None, detail="")
            )
            connection.execute(i.delete().where(i.c.interaction_id.in_(some)))
        for some in db.chunks(sorted(found.quarantined)):
            lines = q.c.quarantine_id.in_(some)
            ids = connection.execute(sa.select(q.c.quarantine_id).where(lines)).scalars().all()
            connection.execute(q.delete().where(lines))
            _keep_away(connection, person, ids)
        for some in db.chunks(sorted(mentioned)):
            connection.execute(
                q.update().where(q.c.quarantine_id.in_(some)).values(raw=None, detail="")
            )
        connection.execute(
            db.erasures.insert().values(
                erasure_id=uuid7(),
                agent_id=person.agent_id,
                person=person.mark,
                counts=dict(counts),
                snapshots=[dict(one) for one in snapshots],
                versions=[dict(one) for one in versions],
                erased_at=now(),
            )
        )


def _remove_votes(
    connection: sa.Connection, person: Person, condition: sa.ColumnElement[bool]
) -> None:
    """Remove these votes of the person's agent; none comes back under its key."""
    f = db.feedback
    keys = sa.select(f.c.idempotency_key).where(condition)
    marks = [erased_key(person.agent_id, key) for key in connection.execute(keys).scalars()]
    connection.execute(f.delete().where(condition))
    _keep_away(connection, person, marks)


def _keep_away(connection: sa.Connection, person: Person, keys: Sequence[str]) -> None:
    if keys:
        rows = [{"agent_id": person.agent_id, "key": key} for key in keys]
        connection.execute(db.erased_keys.insert(), rows)


def erased_key(agent_id: str, key: str) -> str:
    """Return what is kept of the key of a vote that was erased."""
    return hashed("erased key", agent_id, key)


def erased_among(connection: sa.Connection, agent_id: str, keys: Sequence[str]) -> set[str]:
    """Return which of these an erasure took: what `erased_key` returned, or ids of quarantine."""
    e = db.erased_keys.c
    query = sa.select(e.key).where(e.agent_id == agent_id, e.key.in_(keys))
    return set(connection.execute(query).scalars())


def erasures_of(database: db.Database, people: Iterable[Person]) -> list[dict[str, Any]]:
    """Return what was erased for these people before, oldest first."""
    e = db.erasures
    marks = [person.mark for person in people]
    query = e.select().where(e.c.person.in_(marks)).order_by(e.c.erased_at, e.c.erasure_id)
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [
        {
            "agent_id": row.agent_id,
            "counts": row.counts,
            "snapshots": row.snapshots,
            "versions": row.versions,
            "erased_at": row.erased_at.isoformat(),
        }
        for row in rows
    ]


def erased_since(database: db.Database, claim: Claim) -> bool:
    """Say whether somebody was erased for the claim's agent since, or at all from its snapshot.

    The latter whenever clocks say that was: the claim's may have been ahead.
    """
    e = db.erasures.c
    since = sa.exists().where(e.agent_id == claim.agent_id, e.erased_at > claim.created_at)
    with database.read() as connection:
        if connection.execute(sa.select(since)).scalar_one():
            return True
    return erased_rows(database, claim.agent_id, claim.fingerprint) > 0


def erased_rows(database: db.Database, agent_id: str, fingerprint: str | None) -> int:
    """Return how many rows were erased from a snapshot since it was taken."""
    e = db.erasures.c
    with database.read() as connection:
        told = connection.execute(sa.select(e.snapshots).where(e.agent_id == agent_id)).scalars()
        return sum(
            int(one["rows"]) for each in told for one in each if one["fingerprint"] == fingerprint
        )


def contents(connection: sa.Connection, person: Person) -> dict[str, list[dict[str, Any]]]:
    """Return every row about the person as plain JSON values: what they may ask to see.

    Of what others said about their interactions only that it is there: it is those people's.
    """
    f, i, e, q = db.feedback, db.interactions, db.chat_events, db.quarantine
    found = held(connection, person)
    mine = f.select().where(
        f.c.agent_id == person.agent_id,
        f.c.voter.in_(person.voters),
        ~f.c.idempotency_key.startswith(db.WITHDRAWN),
    )
    events: list[dict[str, Any]] = []
    for some in db.chunks(sorted(found.interactions)):
        events += _plain(connection, e.select().where(e.c.interaction_id.in_(some)))
    aside: list[dict[str, Any]] = []
    for some in db.chunks(sorted(found.quarantined)):
        aside += _plain(connection, q.select().where(q.c.quarantine_id.in_(some)))
    return {
        "feedback": sorted(_plain(connection, mine), key=lambda row: int(row["seq"])),
        "interactions": _plain(
            connection,
            i.select().where(i.c.interaction_id.in_(_theirs(person))).order_by(i.c.created_at),
        ),
        "chat_events": events,
        "quarantined": aside,
        "votes_about_them": [
            {"feedback_id": vote.feedback_id, "kind": vote.kind} for vote in found.about
        ],
    }


def unsigned_interactions(connection: sa.Connection, person: Person) -> list[str]:
    """Return the interactions nobody signed that they said something about: theirs, perhaps."""
    return sorted(connection.execute(_unsigned(person)).scalars())


def _theirs(person: Person) -> sa.CompoundSelect[Any]:
    """Return the query for the ids of their interactions.

    Each part goes along an index of its own: joined by OR, PostgreSQL reads all the agent has.
    """
    i, other = db.interactions.c, db.interactions.alias("other").c
    sessions = sa.select(other.session_id).where(
        other.agent_id == person.agent_id,
        other.user_id == person.rater_id,
        other.session_id.is_not(None),
    )
    agents = sa.select(i.interaction_id).where(i.agent_id == person.agent_id)
    parts = [
        agents.where(i.user_id == person.rater_id),
        agents.where(i.user_id.is_(None), i.session_id.in_(sessions)),
    ]
    if person.unsigned:
        parts.append(_unsigned(person))
    return sa.union(*parts)


def _unsigned(person: Person) -> sa.Select[Any]:
    """Return the query for the ids of those nobody signed that they said something about.

    The agent is not asked for: a vote is about its own agent's, and with the agent in the condition
    SQLite reads all that nobody signed.
    """
    i = db.interactions.c
    judged = i.interaction_id.in_(_judged(person))
    return sa.select(i.interaction_id).where(i.user_id.is_(None), judged)


def _judged(person: Person) -> sa.Select[tuple[Any]]:
    f = db.feedback.c
    return sa.select(f.interaction_id).where(
        f.agent_id == person.agent_id,
        f.voter.in_(person.voters),
        f.interaction_id.is_not(None),
    )


def _about(person: Person) -> sa.ColumnElement[bool]:
    """Other people's votes that show one of their interactions and still have their words."""
    f = db.feedback.c
    return sa.and_(
        f.voter.not_in(person.voters),
        f.erased_at.is_(None),
        _are_about(person.agent_id, _theirs(person)),
    )


def _are_about(agent_id: str, these: sa.SelectBase) -> sa.ColumnElement[bool]:
    """Votes of the agent's that show one of the interactions whose ids a query returns."""
    f, i = db.feedback.c, db.interactions.c
    prompts = sa.select(i.prompt).where(i.interaction_id.in_(these))
    which = (
        f.interaction_id.in_(these),
        f.other_interaction_id.in_(these),
        # A preference out of MLflow holds the trace's prompt itself, and no interaction's id.
        sa.and_(f.agent_id == agent_id, db.FROM_MLFLOW, f.prompt.in_(prompts)),
    )
    return sa.and_(
        f.agent_id == agent_id,
        f.seq.in_(sa.union(*(sa.select(f.seq).where(one) for one in which))),
    )


def _in_order(connection: sa.Connection, query: sa.Select[Any]) -> list[Vote]:
    """Return a query's votes, oldest first.

    Put in order here: asked for it, SQLite reads all of the agent's votes, which lie in order.
    """
    votes = [Vote(*row) for row in connection.execute(query)]
    return sorted(votes, key=lambda vote: vote.seq)


def _plain(connection: sa.Connection, query: sa.Select[Any]) -> list[dict[str, Any]]:
    return [
        {
            name: value.isoformat() if hasattr(value, "isoformat") else value
            for name, value in row._mapping.items()
            if name != "body_sha256"
        }
        for row in connection.execute(query)
    ]
