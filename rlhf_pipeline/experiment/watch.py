"""The champion after its promotion: whether it fails, and the way back where it does.

A version may be promoted without ever having met people, and one that met a few may fail many. In
its first days, from the first answer on that is asked of it, a champion that fails as often as ends
an experiment at once is rolled back: far oftener than the champions before it, else the trouble is
not the version's. One step is gone back and no second; from there a person looks. What this does
not see: answers that reach people and are bad, which satisfaction by version shows (overview.py)
and only an experiment proves.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice, pairwise
from statistics import fmean, median_low
from typing import TYPE_CHECKING

import sqlalchemy as sa

from rlhf_pipeline import database as db

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.registry.ledger import Promotion
    from rlhf_pipeline.registry.models import ModelRegistry

WATCH = "watch"  # who rolls back, in the ledger
USUAL = 10  # times the answers looked at tell how often another version fails
READ_AT_MOST = 10  # times the answers looked at: others were asked of the baseline
READ_A_DAY = 20_000  # answers, the latest, to tell how a day's worst went
FEW_DAYS = 3  # of which there is a usual one
FEW_PEOPLE = 10  # who tell what is usual
STILL_LOADING = "still_loading"  # the rule where an answer's time passed while its model loaded
NOT_ITS_FAULT = frozenset({"unsafe_request", STILL_LOADING})
"""Rules that say nothing of the champion: it was not asked, or could not be in time."""
SOON = timedelta(minutes=1)  # so far ahead of a look a service may date what it answered
_FOUND: dict[tuple[str, str, int], datetime] = {}
"""By database, agent and entry: when a promotion was found first that is dated later than that."""


@dataclass(frozen=True, slots=True)
class Failures:
    """How often a champion failed at its latest answers, and at how many people's latest."""

    answers: int
    failed: int  # broken off, cut off by a rule, or given by the baseline in its place
    people: int
    people_failed: int
    persons_share: float  # of one person's answers the part it failed at, the mean over people
    rules: Mapping[str, int]  # what they failed by, most first

    @property
    def share(self) -> float:
        """Return the part of the answers it failed at; 0 of none."""
        return self.failed / self.answers if self.answers else 0.0

    @property
    def usual(self) -> float:
        """Return how often it fails whoever asks: at that share of answers, and of a person's."""
        # Not of people's latest: where nobody gives a name that is one answer, failed or not.
        return min(self.share, self.persons_share)

    @property
    def words(self) -> str:
        """Return them as a sentence's end."""
        by = ", ".join(f"{rule} {n}" for rule, n in self.rules.items())
        return (
            f"failed at {self.failed} of its latest {self.answers} answers, and at "
            f"{self.people_failed} of {self.people} people's latest ({by})"
        )


def is_trouble(
    found: Failures, *, most: int, share: float, usual: float = 0.0, worst: float = 0.0
) -> bool:
    """Say whether too many failed of the latest `most` answers, and of the people who had them.

    Of both: one person's questions can be such that any answer is blocked. It is looked at again
    after every answer, so the worst of many windows counts; of what fails at a `usual` share of
    answers whichever version is asked, that is well above it. Twice that and `share` is not met by
    chance in 20,000 answers (usual shares to 0.12, share 0.2 of 50). What fails together comes to
    more than that: `worst` is what does in so many answers on a usual day, which may be so much
    that these tell nothing.
    """
    if worst and share + worst >= 1.0:
        return False
    limit = min(1.0, share + max(2 * usual, worst))
    of_answers = found.failed >= max(limit * most, 1.0)
    return of_answers and found.people_failed >= limit * found.people and usual < 0.5


def persons_share(answers: Iterable[tuple[str | None, bool]]) -> float:
    """Return the part of one person's answers that failed, the mean over people; 0 of nobody.

    An answer is who had it and whether it failed.
    """
    of_each: dict[str | None, list[bool]] = defaultdict(list)
    for who, failed in answers:
        of_each[who].append(failed)
    return fmean(fmean(failed) for failed in of_each.values()) if of_each else 0.0


def usual_of(answers: Sequence[tuple[str | None, bool]]) -> float:
    """Return how often these answers failed whoever asks, as `Failures.usual` is; 0 of none."""
    share = fmean(failed for _, failed in answers) if answers else 0.0
    return min(share, persons_share(answers))


def failures(
    database: db.Database,
    agent_id: str,
    *,
    most: int,
    since: datetime | None = None,
    until: datetime | None = None,
    without: Iterable[tuple[datetime, datetime]] = (),
) -> Failures:
    """Return how the latest `most` answers went that were asked of the champion of that time.

    `without` are times, after when until when, whose answers do not count. Whoever gave no name
    counts as one person together.
    """
    read = READ_AT_MOST * most
    with closing(_latest(database, agent_id, read, since, until, without)) as found:
        return _failures_of([*islice(found, most)])


def _failures_of(latest: Sequence[tuple[str | None, str | None]]) -> Failures:
    """Return how answers went that `_latest` found."""
    answers = [(who, rule is not None) for who, rule in latest]
    rules = Counter(rule for _, rule in latest if rule is not None)
    people: dict[str | None, bool] = {}  # whether it failed at their latest
    for who, failed in answers:
        people.setdefault(who, failed)
    return Failures(
        answers=len(answers),
        failed=sum(failed for _, failed in answers),
        people=len(people),
        people_failed=sum(people.values()),
        persons_share=persons_share(answers),
        rules=dict(rules.most_common()),
    )


def at_worst(
    database: db.Database,
    agent_id: str,
    windows: Collection[int],
    *,
    until: datetime,
    days: float,
    without: Iterable[tuple[datetime, datetime]] = (),
) -> dict[int, float]:
    """Return how often the champions failed in the worst so many answers in a row of a usual day.

    Of the days before, the median of those on which people asked, FEW_DAYS at least: what is away
    once is no excuse for days, what is away every night excuses a night's.
    """
    worst: dict[int, list[float]] = {most: [] for most in windows}
    for day in range(math.ceil(days)):
        end = until - timedelta(days=day)
        begun = end - timedelta(days=1)
        found = _latest(database, agent_id, READ_A_DAY, begun, end, without)
        if answers := [(who, rule is not None) for who, rule in found]:
            for most, of_days in worst.items():
                of_days.append(_worst_of(answers, most))
    return {
        most: median_low([*of_days, *[0.0] * (FEW_DAYS - len(of_days))])
        for most, of_days in worst.items()
    }


def _worst_of(answers: Sequence[tuple[str | None, bool]], most: int) -> float:
    """Return which part of the worst `most` answers in a row failed; of people, where less.

    Of FEW_PEOPLE where as many asked in all: one person's questions can be such that any fails.
    """
    few = min(FEW_PEOPLE, len({who for who, _ in answers}))
    people, failed = Counter[str | None](), Counter[str | None]()  # of the answers in a row
    worst, count = 0.0, 0
    for n, (who, fails) in enumerate(answers):
        people[who] += 1
        failed[who] += fails
        count += fails
        if n >= most:
            gone, failed_then = answers[n - most]
            people[gone] -= 1
            failed[gone] -= failed_then
            count -= failed_then
        if fails and count > worst * most:
            worst = max(worst, min(count / most, len(+failed) / max(len(+people), few)))
    return worst


def _latest(
    database: db.Database,
    agent_id: str,
    most: int,
    since: datetime | None,
    until: datetime | None,
    without: Iterable[tuple[datetime, datetime]] = (),
) -> Generator[tuple[str | None, str | None]]:
    """Go back through answers asked of the champion: who had each, and the rule it failed by.

    Reads `most` answers, whoever was asked.
    """
    i = db.interactions.c
    query = sa.select(i.user_id, i.session_id, i.arm, i.sampling).where(
        i.agent_id == agent_id, i.arm.is_distinct_from("challenger")
    )
    if since is not None:
        query = query.where(i.created_at > since)
    if until is not None:
        query = query.where(i.created_at <= until)
    for start, end in without:
        query = query.where(sa.or_(i.created_at <= start, i.created_at > end))
    query = query.order_by(i.created_at.desc()).limit(most)
    with database.read() as connection, closing(connection.execute(query)) as rows:
        for row in rows:
            broken = [
                event["rule"]
                for event in row.sampling.get("events", ())
                if event["arm"] == "champion" and event["rule"] not in NOT_ITS_FAULT
            ]
            if broken or row.arm == "champion":
                yield row.user_id or row.session_id, broken[0] if broken else None


def go_back_if_failing(
    registry: ModelRegistry, agent_id: str, settings: Settings, *, at: datetime
) -> str | None:
    """Roll back a champion in its first days that fails; return what was done, None for nothing.

    Raises RegistryError where the champion before it is not sound, or another moved the champion
    meanwhile.
    """
    ledger = registry.ledger
    promoted = made_champion(ledger.history(agent_id))
    if promoted is None or promoted.action == "rollback" or agent_id in settings.serving.upstreams:
        return None  # an upstream that is away says nothing about a version
    rules, days = settings.experiments, settings.promotion.watch_days
    if not days:
        return None
    share = rules.trouble_share
    database = ledger.database
    since, until = its_time(database, promoted, at)
    standing = ledger.standing(agent_id)
    previous = standing.previous
    if previous is None:
        return None
    # Of many answers the worst of a usual day are few: these find what is as bad as the worst
    # minutes, all the time.
    few, many = rules.trouble_answers, USUAL * rules.trouble_answers
    read = READ_AT_MOST * many
    with closing(_latest(database, agent_id, read, since, until)) as found:
        latest = [*islice(found, many)]
    looks = {most: _failures_of(latest[:most]) for most in (few, many)}
    if not any(is_trouble(look, most=most, share=share) for most, look in looks.items()):
        return None
    # Asked last: where few answers are a champion's, all that came since may have to be read.
    if _is_asked(database, agent_id, since, at - timedelta(days=days)):
        return None
    back = _times_of(standing.withdrawn, standing.history)
    before = failures(database, agent_id, most=many, until=since, without=back)
    worst = at_worst(database, agent_id, looks, until=since, days=days, without=back)
    failing = [
        look
        for most, look in looks.items()
        if is_trouble(look, most=most, share=share, usual=before.usual, worst=worst[most])
    ]
    if not failing:
        return None
    registry.folder_of(previous)
    return ledger.rollback(
        agent_id,
        actor=WATCH,
        reason=f"version {promoted.version} {failing[0].words}; the champions before it at "
        f"{before.failed} of {before.answers}",
        expected_champion=promoted.version,
    ).words


def _is_asked(database: db.Database, agent_id: str, since: datetime, until: datetime) -> bool:
    """Say whether the champion was asked for an answer in that time."""
    i = db.interactions.c
    asked = (
        sa.select(i.created_at)
        .where(
            i.agent_id == agent_id,
            i.arm.in_(("champion", "baseline")),  # which answers where the champion does not
            i.created_at > since,
            i.created_at <= until,
        )
        .order_by(i.created_at)
        .limit(1)
    )
    with database.read() as connection:
        return connection.execute(asked).first() is not None


def its_time(database: db.Database, promoted: Promotion, at: datetime) -> tuple[datetime, datetime]:
    """Return from when until when answers are a champion's, by the entry that made it one.

    What is dated ahead of the look counts once its time has come: the latest answers would be the
    same ones until then, whatever it fails at.
    """
    if promoted.created_at <= at:
        return promoted.created_at, at + SOON
    # The clock that dated it was ahead, or was set back since. Answers count from the first look
    # on: else all it fails at until then would be how the champion before it failed.
    key = (str(database.url), promoted.agent_id, promoted.entry)
    since = _FOUND[key] = min(at, _FOUND.get(key, at))
    return since, at  # what is dated later may be by the champion before it


def made_champion(history: Sequence[Promotion]) -> Promotion | None:
    """Return the entry since which the champion is champion; None where there is none yet."""
    return moves[-1] if (moves := _moves(history)) else None


def _moves(history: Sequence[Promotion]) -> list[Promotion]:
    """Return the entries that made a version champion."""
    return [e for e in history if e.action != "baseline" or e.previous_version is None]


def _times_of(
    versions: Collection[int], history: Sequence[Promotion]
) -> list[tuple[datetime, datetime]]:
    """Return when one of the versions was champion and another became it, from when until when.

    What was rolled back for its failures must not excuse the next that fails.
    """
    return [
        (entry.created_at, after.created_at)
        for entry, after in pairwise(_moves(history))
        if entry.version in versions
    ]
