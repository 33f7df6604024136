"""A look at a running experiment, from the rows people left to what is done about it.

1. `measured`: interactions and effective votes to one number per user and metric. 2. `decide`
(decision.py): what the numbers say. 3. `look`: the verdict is stored, then carried out.

A user counts in the arm that the present share gives them, with what they were answered and said
while it held: both arms then lived through the same days. (Whom the ramp has just moved has no
earlier days in the new arm; beside people who have, a day without votes would speak against the
challenger.) What it costs is the numbers of smaller steps; people who come again count again.
Arms are drawn by the hash, never by what people thought. A fallback answer stays in its arm.

Answers are read once: a process keeps what it has counted of a running experiment, and reads those
that came since. Votes, which people change and take back, are read at every look.

Opinions are counted by who has them: an annotator who judges the answers of a thousand people is
one opinion in either arm, not a thousand. Each voter is heard on one person's answers in either
arm, the first they voted on, and all who are heard on one person's are one opinion together: a
thousand accounts that praise one answer are as many as the people who were given it. People whom
nothing but a cookie knows are, of one network, as many as the settings say (`counted_as`): who
comes a thousand times as somebody else is one. Which arm they meet is theirs all the same.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.errors import RegistryAway, RegistryError
from rlhf_pipeline.experiment.assignment import Arm, counted_as, percent
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook, State
from rlhf_pipeline.experiment.decision import (
    GUARDRAILS,
    PRIMARY,
    Action,
    Arms,
    Bounds,
    Metric,
    Verdict,
    decide,
)
from rlhf_pipeline.experiment.sequences import RampStep, Sample
from rlhf_pipeline.experiment.watch import NOT_ITS_FAULT
from rlhf_pipeline.records import now

if TYPE_CHECKING:
    from rlhf_pipeline.config import ExperimentSettings
    from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger

ENDS: Mapping[Action, State] = {
    "promote": "promoted",
    "roll_back": "rolled_back",
    "time_out": "timed_out",
    "give_up": "gave_up",
    "invalid": "invalid",
}
BELIEVED = 0.25
"""Part of its days after which the rate at which users come is believed: three days and a half by
default, as a night or a weekend alone does not tell how many come on the other days."""
SILENT = 0.5
"""Part of its days after which it is believed that nobody comes."""
UNWATCHED = timedelta(days=1)
"""Time without a look that counts for nothing, as the machine was off or slept. Less does count: to
one that is off by night people come by day alone, and its fourteen days are fourteen days."""
CLOCKS_APART = timedelta(hours=1)  # of two machines, at the most
ROWS_AT_ONCE = 1000
ANSWERS_AT_ONCE = 100_000  # counted in one tick of a sensor, which Dagster ends after a minute
SETTLED = CLOCKS_APART + timedelta(minutes=15)
"""Age from which an answer is counted for good: a younger one may yet be stored after one that was
given later, or by a machine whose clock is behind, and would be passed over."""
REFUSES = re.compile(
    r"\b(i (can(no|')?t|won'?t|must decline)|i( a|')m (sorry|unable|not able))\b",
    re.IGNORECASE,
)
"""Words that begin a refusal, in English; a completion is searched in its first 80 characters."""


def refuses(completion: str) -> bool:
    """Say whether the completion begins with a refusal, whichever apostrophe it is written with."""
    return REFUSES.search(completion[:80].replace("’", "'")) is not None


_Place = tuple[str, Arm]  # in an arm a user, or all who count as one


class _Answered(NamedTuple):
    """What one user was answered in one arm: sums over the answers."""

    answers: int = 0
    fallbacks: int = 0
    truncated: int = 0
    refusals: int = 0
    slow: int = 0
    words: int = 0  # of an answer at most as many as make it a long one

    def and_(self, other: _Answered) -> _Answered:
        """Return the sums over both."""
        return _Answered(*map(sum, zip(self, other, strict=True)))


@dataclass(slots=True)
class _Tally:
    """Who was answered what while the present share held, and who met it or one before."""

    people: dict[_Place, _Answered] = field(default_factory=dict)
    met: dict[str, tuple[float, Arm]] = field(default_factory=dict)  # share and arm at first
    until: datetime | None = None  # the newest answer's moment

    def read(
        self,
        database: db.Database,
        experiment: Experiment,
        rules: ExperimentSettings,
        *,
        settled: datetime | None = None,
        most: int | None = None,
    ) -> bool:
        """Count the answers that came since, up to a moment; return whether these were all.

        No more than `most`, but for others of the last one's moment.
        """
        with closing(_interactions(database, experiment, self.until, settled)) as rows:
            for n, row in enumerate(rows):
                if most is not None and n >= most and row.created_at != self.until:
                    return False
                self._count(row, experiment, rules)
                self.until = row.created_at
        return True

    def _count(self, row: Any, experiment: Experiment, rules: ExperimentSettings) -> None:
        user, arm = row.user_id or row.session_id, row.arm
        if user is None or arm not in ("champion", "challenger"):
            return
        share = float(row.sampling.get("challenger_share", 0.0))
        self.met.setdefault(user, (share, arm))
        if share != experiment.share:
            return
        place = counted_as(user, row.sampling.get("network"), rules.people_per_network), arm
        # The arm was not asked: the request itself broke a rule, or it was still loading.
        events = row.sampling.get("events", ())
        asked = not any(e["arm"] == arm and e["rule"] in NOT_ITS_FAULT for e in events)
        served = experiment.challenger if arm == "challenger" else experiment.champion
        answered = _Answered(
            answers=1,
            # The version says it of older rows alone: a baseline that is champion stands in for
            # itself.
            fallbacks=asked and row.sampling.get("fell_back", row.model_version != served),
            truncated=row.sampling.get("ending") == "length",
            refusals=refuses(row.completion),
            slow=(row.latency_seconds or 0.0) > rules.slow_seconds,
            words=min(len(row.completion.split()), rules.long_words),
        )
        self.people[place] = self.people.get(place, _Answered()).and_(answered)

    def and_(self, newer: _Tally) -> _Tally:
        """Return both as one: who was met in this one was met here first."""
        people = dict(self.people)
        for place, answered in newer.people.items():
            people[place] = people.get(place, _Answered()).and_(answered)
        return _Tally(people, newer.met | self.met, newer.until or self.until)


_KEPT: dict[tuple[str, str], tuple[object, _Tally]] = {}
"""By database and agent: of its running experiment, what was counted for good, and under what."""
_READING = threading.Lock()


def catch_up(
    database: db.Database,
    experiment: Experiment,
    settings: ExperimentSettings,
    *,
    most: int | None = None,
) -> bool:
    """Count answers that are SETTLED for good; return whether all of them are counted.

    They are counted anew where the share, a rule or an erasure changed what counts, and where the
    clock was set back, as answers are stored then whose moments were passed already.
    """
    with _READING:
        tally = _kept(database, experiment, settings)
        return tally.read(database, experiment, settings, settled=now() - SETTLED, most=most)


def _kept(database: db.Database, experiment: Experiment, settings: ExperimentSettings) -> _Tally:
    """Return what was counted for good under the rules that hold, nothing where they are new."""
    e = db.erasures.c
    erased = sa.select(sa.func.count()).where(e.agent_id == experiment.agent_id)
    with database.read() as connection:
        under = (
            experiment.experiment_id,
            experiment.share,
            settings.slow_seconds,
            settings.long_words,
            settings.people_per_network,
            connection.execute(erased).scalar_one(),
        )
    place = (str(database.url), experiment.agent_id)
    then, tally = _KEPT.get(place, (None, _Tally()))
    is_set_back = tally.until is not None and tally.until > now() - SETTLED
    if then != under or is_set_back:
        tally = _Tally()
        _KEPT[place] = under, tally
    return tally


def guardrails_under(settings: ExperimentSettings) -> list[Metric]:
    """Return the guardrails with the margins that the settings give them."""
    return [replace(m, margin=settings.margins.get(m.name, m.margin)) for m in GUARDRAILS]


def bounds_under(settings: ExperimentSettings) -> Bounds:
    """Return how sure each step of the ramp must be, for all of them to be as sure as is asked.

    Every step begins its numbers anew, so each may be wrong by itself: they share the chances.
    """
    steps = len(settings.ramp)
    return Bounds(
        promote=settings.promote / steps,
        roll_back=settings.roll_back / steps,
        give_up=settings.give_up,
    )


def growth_until_the_end(
    experiment: Experiment, settings: ExperimentSettings, at: datetime, *, came: bool
) -> float | None:
    """Return how many times the users so far there are when time is up, if they come as so far.

    None where nobody can say: the ramp goes on, or its last step is younger than BELIEVED of the
    days. Where nobody `came` in a step, as to an assistant whose people are elsewhere, the ramp
    never goes on: that is believed after SILENT of the days.
    """
    so_far, days = at - experiment.share_since, timedelta(days=settings.days)
    left = experiment.started_at + days - at
    goes_on = came and experiment.share < settings.ramp[-1]
    if goes_on or so_far < (BELIEVED if came else SILENT) * days:
        return None
    return 1 + left / so_far


def measured(
    database: db.Database, experiment: Experiment, settings: ExperimentSettings
) -> tuple[dict[str, Arms], list[RampStep]]:
    """Return every metric's users in either arm, and how many users each step of the ramp met."""
    catch_up(database, experiment, settings)
    with _READING:
        settled = _kept(database, experiment, settings)
        recent = _Tally(until=settled.until)
        recent.read(database, experiment, settings)
        tally = settled.and_(recent)
    opinions: dict[_Place, list[float]] = defaultdict(list)  # by who voted
    heard_on: dict[_Place, str] = {}  # who voted -> on whose answers they count
    heard: dict[_Place, set[str]] = defaultdict(set)  # interactions with any feedback
    downs: dict[_Place, set[str]] = defaultdict(set)  # and those with a thumb down
    for vote in _votes(database, experiment):
        user, arm = vote.user_id or vote.session_id, vote.arm
        if user is None or (vote.share or 0.0) != experiment.share:
            continue
        voter = vote.rater_id or user
        user = counted_as(user, vote.network, settings.people_per_network)
        if (user, arm) not in tally.people:
            continue
        said = opinions[voter, arm]
        if heard_on.setdefault((voter, arm), user) == user:
            heard[user, arm].add(vote.interaction_id)
            if vote.kind == "thumbs" and vote.number == 0:
                downs[user, arm].add(vote.interaction_id)
        if vote.kind in ("thumbs", "score"):
            said.append(vote.number)
        elif vote.kind == "rating":
            said.append((vote.number - 1) / 4)
    numbers: dict[str, dict[Arm, list[float]]] = {
        metric.name: {"champion": [], "challenger": []} for metric in (PRIMARY, *GUARDRAILS)
    }
    for (user, arm), answered in tally.people.items():
        n = answered.answers
        shown = {
            "thumbs_down": len(downs.get((user, arm), ())) / n,
            "feedback_rate": len(heard.get((user, arm), ())) / n,
            "fallbacks": answered.fallbacks / n,
            "truncated": answered.truncated / n,
            "refusals": answered.refusals / n,
            "slow": answered.slow / n,
            "length": answered.words / n / settings.long_words,
        }
        for name, value in shown.items():
            numbers[name][arm].append(min(value, 1.0))
    on_whom: dict[_Place, list[float]] = defaultdict(list)  # each voter's mean
    for (voter, arm), said in opinions.items():
        if said:
            on_whom[heard_on[voter, arm], arm].append(sum(said) / len(said))
    for (_, arm), means in on_whom.items():
        numbers[PRIMARY.name][arm].append(sum(means) / len(means))
    arms = {
        name: Arms(Sample.of(by_arm["challenger"]), Sample.of(by_arm["champion"]))
        for name, by_arm in numbers.items()
    }
    counts: dict[float, dict[Arm, int]] = defaultdict(lambda: {"champion": 0, "challenger": 0})
    for share, arm in tally.met.values():
        counts[share][arm] += 1
    steps = [RampStep(s, n["challenger"], n["champion"]) for s, n in sorted(counts.items())]
    return arms, steps


def look(
    book: ExperimentBook,
    ledger: PromotionLedger,
    experiment: Experiment,
    settings: ExperimentSettings,
    *,
    check: Callable[[ModelVersion], object],
    automatic: bool = True,
) -> tuple[Verdict, str]:
    """Look at a running experiment, store the verdict, carry it out; return it and what was done.

    Promoting moves the ledger and ends the experiment in one transaction, if the experiment still
    runs and the champion is the one it began with, and was all the while. A challenger that the
    ledger will not have (refused by the gate and put to people by force) ends it too, as does one
    whose files `check` refuses with a RegistryError: a person decides then. So does one decide
    where nobody began the experiment and promotion is not, or no more, `automatic`; whoever begins
    one by hand has asked for what comes of it.
    """
    champion = ledger.champion(experiment.agent_id)
    arms, steps = measured(book.database, experiment, settings)
    at = now()
    experiment = _as_watched(book, _from_now_on(book, experiment, at), at)
    verdict = decide(
        arms,
        steps,
        bounds=bounds_under(settings),
        guardrails=guardrails_under(settings),
        timed_out=at - experiment.started_at > timedelta(days=settings.days),
        growth=growth_until_the_end(experiment, settings, at, came=_anybody(arms)),
    )
    book.record(experiment, verdict.action, verdict.to_json())
    why = "; ".join(verdict.reasons)
    agent_id, challenger = experiment.agent_id, experiment.challenger
    if champion is not None and champion.version == challenger:
        book.end(experiment, "promoted", "the challenger is the champion")
        return verdict, f"version {challenger} is the champion"
    if other := _other_champion(ledger, experiment, champion):
        book.end(experiment, "stopped", f"the champion {other}")
        return verdict, f"stopped: the champion {other}"
    if verdict.action == "continue":
        return verdict, _go_on(book, experiment, settings, arms, why)
    if verdict.action == "promote":
        if experiment.actor == "promotion" and not automatic:
            words = "automatic promotion is off, so a person decides"
            book.end(experiment, "stopped", f"the challenger won ({why}), but {words}")
            return verdict, f"stopped: {words}"
        try:
            check(ledger.version(agent_id, challenger))  # it answers from memory meanwhile
            outcome = ledger.promote(
                agent_id,
                challenger,
                actor="experiment",
                reason=why,
                expected_champion=experiment.champion,
                experiment=experiment.experiment_id,
            )
        except RegistryAway:  # the next look asks again
            raise
        except RegistryError as error:
            book.end(experiment, "stopped", f"the challenger won ({why}), but {error}")
            return verdict, f"stopped: {error}"
        return verdict, outcome.words
    book.end(experiment, ENDS[verdict.action], why)
    return verdict, f"version {experiment.champion} stays: {why}"


def _from_now_on(book: ExperimentBook, experiment: Experiment, at: datetime) -> Experiment:
    """Return the experiment, dated at this look where a clock that was ahead has dated it.

    It would go on as it stands until that moment has come, and keep the agent's turns waiting.
    """

    def of_a_right_clock(moment: datetime) -> datetime:
        return at if moment > at + CLOCKS_APART else moment

    dated = replace(
        experiment,
        started_at=of_a_right_clock(experiment.started_at),
        share_since=of_a_right_clock(experiment.share_since),
    )
    if dated != experiment:
        book.date(dated)
    return dated


def _as_watched(book: ExperimentBook, experiment: Experiment, at: datetime) -> Experiment:
    """Return the experiment as if it, and its share, had begun later by the time UNWATCHED.

    To a machine that is off nobody can come: that tells neither how many will, nor that time is
    up. Where the service went on answering, the people who came then count, and its time does not:
    more are expected than will come, which ends nothing too early. All of it is read from the looks
    and nothing is stored, so two looks at once, or one that is broken off, count no time twice.
    """
    looks = book.moments(experiment.experiment_id, until=at)

    def moved(since: datetime) -> datetime:
        seen = [since, *(look for look in looks if look > since), at]
        gaps = (after - before for before, after in pairwise(seen))
        return since + sum((gap for gap in gaps if gap > UNWATCHED), timedelta())

    return replace(
        experiment,
        started_at=moved(experiment.started_at),
        share_since=moved(experiment.share_since),
    )


def _other_champion(
    ledger: PromotionLedger, experiment: Experiment, champion: ModelVersion | None
) -> str | None:
    """Return what the champion is, or was between two looks, in place of the experiment's."""
    if champion is None:
        return "is none now"
    if champion.version != experiment.champion:
        return f"is version {champion.version} now"
    for entry in ledger.history(experiment.agent_id):
        # By their numbers: what a clock that was ahead has dated may be older.
        if entry.entry > experiment.began_under and entry.version != experiment.champion:
            return f"was version {entry.version} meanwhile"
    return None


def _go_on(
    book: ExperimentBook,
    experiment: Experiment,
    settings: ExperimentSettings,
    arms: Mapping[str, Arms],
    why: str,
) -> str:
    """Take the next step of the ramp when enough people met the challenger for long enough.

    One hundredth of a few hundred people is never enough: a step in which anybody came takes its
    part of half the days at most, which leaves the other half to the last step.
    """
    wider = [share for share in settings.ramp if share > experiment.share]
    so_far = now() - experiment.share_since
    waited = so_far >= timedelta(minutes=settings.minutes_per_step)
    longest = timedelta(days=settings.days) / (2 * len(settings.ramp))
    met = arms["feedback_rate"].challenger.users
    enough = met >= settings.users_per_step or (_anybody(arms) and so_far >= longest)
    if wider and waited and enough:
        book.ramp(experiment, wider[0])
        return f"ramped from {percent(experiment.share)} to {percent(wider[0])}"
    return f"goes on at {percent(experiment.share)}: {why}"


def _anybody(arms: Mapping[str, Arms]) -> bool:
    met = arms["feedback_rate"]
    return met.challenger.users + met.champion.users > 0


def _interactions(
    database: db.Database,
    experiment: Experiment,
    after: datetime | None,
    until: datetime | None,
) -> Generator[Any]:
    i = db.interactions.c
    columns = (
        i.user_id,
        i.session_id,
        i.arm,
        i.model_version,
        i.completion,
        i.sampling,
        i.latency_seconds,
        i.created_at,
    )
    query = sa.select(*columns).where(i.experiment == experiment.experiment_id)
    if after is not None:
        query = query.where(i.created_at > after)
    if until is not None:
        query = query.where(i.created_at <= until)
    return _rows(database, query.order_by(i.created_at))


def _votes(database: db.Database, experiment: Experiment) -> Generator[Any]:
    first = _first_vote(database, experiment)
    if first is None:
        return
    f, i, said = db.effective_feedback.c, db.interactions.c, db.feedback.alias("said").c
    # Whoever says the same again, or changes it, gave the vote when they first did.
    began = (
        sa.select(sa.func.min(said.seq))
        .where(
            said.agent_id == f.agent_id,
            said.voter == f.voter,
            said.target == f.target,
            said.kind == f.kind,
        )
        .scalar_subquery()
    )
    share = i.sampling["challenger_share"].as_float().label("share")
    network = i.sampling["network"].as_string().label("network")
    query = (
        sa.select(
            *(f.interaction_id, f.kind, f.number, f.rater_id),
            *(i.user_id, i.session_id, i.arm, share, network),
        )
        .select_from(
            db.effective_feedback.join(db.interactions, f.interaction_id == i.interaction_id)
        )
        .where(
            i.experiment == experiment.experiment_id,
            f.source == "human",
            f.agent_id == experiment.agent_id,
            f.seq >= first,
        )
        .order_by(began, f.seq)
    )
    yield from _rows(database, query)


def _first_vote(database: db.Database, experiment: Experiment) -> int | None:
    """Return the number of the first vote on the experiment's answers, or None.

    Votes that count are looked for from there on, as PostgreSQL would read all there are. Their
    moments do not tell where that is: a clock may have been set back.
    """
    f, i = db.feedback.c, db.interactions.c
    query = (
        sa.select(sa.func.min(f.seq))
        .join(db.interactions, f.interaction_id == i.interaction_id)
        .where(i.experiment == experiment.experiment_id)
    )
    with database.read() as connection:
        found: int | None = connection.execute(query).scalar()
    return found


def _rows(database: db.Database, query: sa.Select[Any]) -> Generator[Any]:
    """Yield what a query finds without holding all of it: weeks of answers may be among it."""
    with database.read() as connection:
        yield from connection.execution_options(yield_per=ROWS_AT_ONCE).execute(query)
