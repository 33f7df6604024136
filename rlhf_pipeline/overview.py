"""Where an agent stands, in numbers: what the dashboard shows and alerts are judged by.

The cost does not grow with the table: votes and troubles are counted among the newest ones, along
an index.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from statistics import fmean, median, variance
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.evaluation.facts import DRIFT, SUPPORT
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook, Look
from rlhf_pipeline.experiment.watch import Failures, failures, its_time, made_champion
from rlhf_pipeline.feedback.claims import AHEAD, Claim, ClaimBook
from rlhf_pipeline.feedback.store import ON_A_SCALE, on_scale
from rlhf_pipeline.files import read_json
from rlhf_pipeline.records import now
from rlhf_pipeline.registry.comparison import baseline_of, by_place, learned_per_thousand

if TYPE_CHECKING:
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.registry.ledger import ModelVersion, Promotion, PromotionLedger

DAYS = 30
NEWEST_VOTES = 50_000  # among which votes are counted
NEWEST_ANSWERS = 1_000  # of which it is looked how long they took, and for whom they were
LATEST_ANSWERS = 50  # among which it is looked whether the champion failed
NEWEST_TROUBLES = 1_000
NEWEST_ATTEMPTS = 8
FEWEST = 20  # votes, or answers, before an average is worth a look
HUNDREDTH = 100  # people from whom on a hundredth of them is somebody


@dataclass(frozen=True, slots=True)
class Votes:
    """The newest votes: how many of each kind came on each day, and from whom."""

    counted: int  # as they came: also those that a later one of the same person replaced
    days: Sequence[date]
    by_kind: Mapping[str, Sequence[int]]  # one number a day
    voters: int  # people who signed; a model's or a program's votes are nobody's
    top_share: float | None  # of people's signed votes, by the busiest hundredth, or one of fewer
    newest_at: datetime | None  # of those that no clock far ahead dated


@dataclass(frozen=True, slots=True)
class Waits:
    """How long answers took, in seconds."""

    answers: int
    median: float
    late: float  # the 95th percentile; of fewer than FEWEST the slowest


@dataclass(frozen=True, slots=True)
class Standing:
    """One version: what people and the gate say of it."""

    version: int
    label: str
    created_at: datetime
    roles: tuple[str, ...]  # the names that it has, and withdrawn where it was
    passed: bool | None  # None: not judged
    votes: int
    satisfaction: float | None  # mean of thumbs, ratings and scores, 0 to 1; None with few
    margin: float | None  # half the width of its 95 % interval, people taken as independent
    gain: float | None  # held-out score over the baseline's, lower bound
    kl: float | None  # nats a completion, to the baseline
    score: float | None = None  # held-out, by the gate's model of its turn: mean over prompts
    spread: float | None = None  # its standard deviation between prompts
    learned: float | None = None  # score over the champion of its day, for 1,000 more votes
    mlflow_version: str | None = None
    baseline: int | None = None  # the version that score and KL are counted from


@dataclass(frozen=True, slots=True)
class Overview:
    """Where an agent stands."""

    agent_id: str
    paused: str | None
    votes: Votes
    standings: Sequence[Standing]  # newest first
    attempts: Sequence[Claim]  # at training, newest first
    last_turn: Claim | None  # the newest that was trained to its verdict
    waiting_votes: int  # since that one's snapshot
    experiment: Experiment | None  # the one that runs, or the last one
    looks: Sequence[Look]
    troubles: Mapping[str, int]  # rule -> how often, most first
    waits: Waits | None  # for the newest answers
    drift: Mapping[str, Any] | None  # as the newest snapshot's drift.json says
    support: Mapping[str, Any] | None = None  # on whom it rests, as its support.json says
    enough_since: datetime | None = None  # when as many votes waited as the next turn needs
    failures: Failures | None = None  # of the champion, at its latest answers
    moved: Promotion | None = None  # the ledger's newest entry
    network_share: float | None = None  # of people at the chat page, from one; None with few
    champion: ModelVersion | None = None


def overview(
    store: FeedbackStore,
    ledger: PromotionLedger,
    agent_id: str,
    *,
    enough: int | None = None,
    latest: int = LATEST_ANSWERS,
) -> Overview:
    """Return where the agent stands now; `enough` votes start a turn, where that is known.

    At the `latest` answers it is looked whether the champion failed.
    """
    database, row = store.database, store.agent(agent_id)
    book, claims = ExperimentBook(database), ClaimBook(database)
    last_turn = claims.last_done(agent_id)
    watermark = last_turn.watermark if last_turn else 0
    waiting = store.new_since(agent_id, watermark).votes
    experiment = next(iter(book.history(agent_id)), None)
    history = ledger.history(agent_id)
    made = made_champion(history)
    since, until = (None, None) if made is None else its_time(database, made, now())
    waits, network_share = _newest_answers(database, agent_id)
    return Overview(
        agent_id=agent_id,
        paused=row.paused_reason if row else None,
        votes=_votes(database, agent_id),
        standings=standings(database, ledger, agent_id),
        attempts=claims.history(agent_id)[: -NEWEST_ATTEMPTS - 1 : -1],
        last_turn=last_turn,
        waiting_votes=waiting,
        experiment=experiment,
        looks=book.looks(experiment.experiment_id) if experiment else (),
        troubles=_troubles(database, agent_id),
        waits=waits,
        drift=_of_snapshot(database, agent_id, DRIFT),
        support=_of_snapshot(database, agent_id, SUPPORT),
        enough_since=(
            store.arrived(agent_id, watermark, enough) if enough and waiting >= enough else None
        ),
        failures=failures(database, agent_id, most=latest, since=since, until=until),
        moved=history[-1] if history else None,
        network_share=network_share,
        champion=ledger.champion(agent_id),
    )


def _newest(f: Any, agent_id: str, *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    """Return the query of the agent's newest votes; `f` are the columns of all or of those that
    count.
    """
    return (
        sa.select(*columns).where(f.agent_id == agent_id).order_by(f.seq.desc()).limit(NEWEST_VOTES)
    )


def _votes(database: db.Database, agent_id: str) -> Votes:
    f = db.feedback.c
    today = now().date()
    days = [today - timedelta(days=n) for n in reversed(range(DAYS))]
    place = {day: n for n, day in enumerate(days)}
    by_kind: dict[str, list[int]] = defaultdict(lambda: [0] * DAYS)
    columns = (f.kind, f.received_at, f.rater_id, f.source)
    said = _newest(f, agent_id, *columns).where(~f.idempotency_key.startswith(db.WITHDRAWN))
    newest = said.subquery()
    # Counted by the database: tens of thousands of rows for each agent are a tick's whole time.
    moment = newest.c.received_at
    in_utc = moment if database.is_sqlite else sa.func.timezone("UTC", moment)
    day = sa.func.date(in_utc, type_=sa.Date)
    # Of one that a clock far ahead dated nobody knows when it came.
    last_known = sa.func.max(moment).filter(moment <= now() + AHEAD)
    counts = sa.select(newest.c.kind, day, sa.func.count(), last_known)
    signed = sa.select(sa.func.count()).where(
        newest.c.rater_id.is_not(None), newest.c.source == "human"
    )
    counted, newest_at, oldest = 0, None, None
    with database.read() as connection:
        for kind, came, n, last in connection.execute(counts.group_by(newest.c.kind, day)):
            counted += n
            newest_at = max(filter(None, (last, newest_at)), default=None)
            oldest = min(came, oldest or came)
            if (at := place.get(came)) is not None:
                by_kind[kind][at] += n
        people = list(connection.execute(signed.group_by(newest.c.rater_id)).scalars())
    if counted == NEWEST_VOTES and oldest is not None:  # of that day, and before, some are not read
        whole = max(1, (today - oldest).days)
        days = days[-whole:]
        by_kind.update({kind: counts[-whole:] for kind, counts in by_kind.items()})
    busiest = sorted(people, reverse=True)[: math.ceil(len(people) / HUNDREDTH)]
    share = sum(busiest) / sum(people) if people else None
    return Votes(counted, days, dict(sorted(by_kind.items())), len(people), share, newest_at)


def standings(database: db.Database, ledger: PromotionLedger, agent_id: str) -> list[Standing]:
    """Return every version, newest first: what people, its comparison and the gate say of it."""
    opinions = _opinions(database, agent_id)
    versions, standing = ledger.versions(agent_id), ledger.standing(agent_id)
    known = by_place(versions)
    return [
        _standing(
            version,
            known,
            tuple(standing.roles(version.version)),
            opinions.get(version.version, []),
        )
        for version in reversed(versions)
    ]


def _standing(
    version: ModelVersion,
    known: Mapping[str, ModelVersion],
    roles: tuple[str, ...],
    said: Sequence[float],
) -> Standing:
    compared = version.lineage.get("evaluation", {})
    judged = {} if version.gate is None else {r["rule"]: r for r in version.gate["results"]}
    baseline = baseline_of(version, known)
    enough = len(said) >= FEWEST
    return Standing(
        version=version.version,
        label=version.label,
        created_at=version.created_at,
        roles=roles,
        passed=None if version.gate is None else version.passed_gate,
        votes=len(said),
        satisfaction=fmean(said) if enough else None,
        margin=margin_of(said) if enough else None,
        gain=judged.get("score_vs_baseline", {}).get("number"),
        kl=judged.get("kl_stop", {}).get("number"),
        score=compared.get("score"),
        spread=compared.get("score_std"),
        learned=learned_per_thousand(version, known),
        mlflow_version=version.mlflow_version,
        baseline=None if baseline is None else baseline.version,
    )


def margin_of(said: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean of numbers from 0 to 1.

    The spread is that of them with two of 0 and two of 1: twenty people who all are content do not
    show that everybody is.
    Source: Agresti & Coull, The American Statistician 52 (1998) 119-126,
    doi:10.1080/00031305.1998.10480550, for a share. Theirs is about the mean of all of these and
    counts the four; ours is about the mean of what was said, and would be too narrow if it did.
    """
    return 1.96 * math.sqrt(variance([*said, 0.0, 0.0, 1.0, 1.0]) / len(said))


def _opinions(database: db.Database, agent_id: str) -> dict[int, list[float]]:
    """Return, by version, how good its answers were found: one number, 0 to 1, for each person.

    A person's votes are averaged, so that one who votes a hundred times counts once; of those on
    one answer the newest counts.
    """
    f, i = db.effective_feedback.c, db.interactions.c
    newest = _newest(f, agent_id, f.interaction_id, f.voter, f.kind, f.number, f.source).subquery()
    query = (
        sa.select(i.model_version, sa.func.avg(on_scale(newest.c)))
        .join(newest, newest.c.interaction_id == i.interaction_id)
        .where(
            newest.c.kind.in_(ON_A_SCALE),
            newest.c.number.is_not(None),
            newest.c.source == "human",
        )
        .group_by(i.model_version, newest.c.voter)
    )
    found: dict[int, list[float]] = defaultdict(list)
    with database.read() as connection:
        for version, mean in connection.execute(query):
            found[version].append(float(mean))
    return found


def _troubles(database: db.Database, agent_id: str) -> dict[str, int]:
    e = db.chat_events.c
    query = (
        sa.select(e.rule)
        .where(e.agent_id == agent_id)
        .order_by(e.seq.desc())
        .limit(NEWEST_TROUBLES)
    )
    with database.read() as connection:
        return dict(Counter(connection.execute(query).scalars()).most_common())


def _newest_answers(database: db.Database, agent_id: str) -> tuple[Waits | None, float | None]:
    """Return how long the newest answers took, and the busiest network's share of who got them."""
    i = db.interactions.c
    query = (
        sa.select(i.latency_seconds, i.user_id, i.sampling["network"].as_string())
        # What a clock far ahead dated would be the newest until that moment has come.
        .where(i.agent_id == agent_id, i.created_at <= now() + AHEAD)
        .order_by(i.created_at.desc())
        .limit(NEWEST_ANSWERS)
    )
    with database.read() as connection:
        found = connection.execute(query).all()
    took = sorted(seconds for seconds, _, _ in found if seconds is not None)
    late = math.ceil(0.95 * len(took)) - 1
    waits = Waits(len(took), median(took), took[late]) if took else None
    # Newest last, so that of somebody who has moved the network of today counts.
    people = {user: network for _, user, network in reversed(found) if network is not None}
    most = max(Counter(people.values()).values(), default=0)
    return waits, most / len(people) if len(people) >= FEWEST else None


def _of_snapshot(database: db.Database, agent_id: str, name: str) -> Mapping[str, Any] | None:
    s = db.snapshots.c
    # Its votes tell which is the newest: a clock that was ahead may have dated another later.
    newest = s.watermark.desc(), s.created_at.desc()
    query = sa.select(s.path).where(s.agent_id == agent_id).order_by(*newest).limit(1)
    with database.read() as connection:
        path = connection.execute(query).scalar()
    report = Path(path).parent / name if path else None
    if report is None or not report.exists():
        return None
    found: Mapping[str, Any] = read_json(report)
    return found
