"""When the next turn starts: every reason not to, with its numbers, and the one to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa

from rlhf_pipeline.config import RewardSettings, Settings, load_settings
from rlhf_pipeline.continuous import (
    BACK_OFF,
    COUNTED,
    Due,
    NotDue,
    back_off,
    due,
    minutes_in_a_day,
    reward_lacks,
    unfinished,
)
from rlhf_pipeline.database import Database, erasures, promotions
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.claims import INTERRUPTED, Claim, ClaimBook
from rlhf_pipeline.feedback.datasets import JOBS, job_of
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Feedback, FeedbackKind, now, user_prompt
from rlhf_pipeline.stages import BEGAN, REWARD

RULES: dict[str, Any] = {
    "min_new_feedback": 5,
    "min_age_seconds": 60,
    "cool_down_minutes": 30,
    "gpu_minutes_per_night": 100,
    "max_attempts": 3,
}


class Agent:
    """One agent whose votes come in now and whose turns ran at moments the test says."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.store = FeedbackStore(database)
        self.at = now() + timedelta(
            seconds=90
        )  # votes sent until half a minute from now are old enough
        self.book = ClaimBook(database, clock=lambda: self.at)
        self.votes = 0

    def send(self, votes: int, **changes: Any) -> None:
        thumbs = Feedback(
            "tea",
            FeedbackKind.thumbs,
            "",
            number=1.0,
            completion="Because.",
            prompt=user_prompt("Why?"),
        )
        numbers = range(self.votes, self.votes + votes)
        self.store.append([replace(thumbs, idempotency_key=str(n), **changes) for n in numbers])
        self.votes += votes

    def mark(self) -> str:
        return snapshot.fingerprint(self.database, "tea", self.newest())

    def newest(self) -> int:
        return snapshot.newest_seq(self.database, "tea")

    def turn(
        self,
        began: datetime,
        minutes: float,
        state: Any,
        mark: str | None = None,
        watermark: int | None = None,
        again: bool = False,
        reason: str = "",
    ) -> Claim:
        """Leave a turn in the books that ran from `began` for so many minutes."""
        later, self.at = self.at, began
        claim = self.book.claim(
            "tea",
            mark or self.mark(),
            self.newest() if watermark is None else watermark,
            holder="run-1234567",
            asked_by="sensor",
            again=again,
        )
        self.at = began + timedelta(minutes=minutes)
        self.book.beat(claim.token)
        if state != "held":
            self.book.finish(claim.token, state, reason)
        self.at = later
        return claim

    def asks(self, *, minimum: int | None = None, **changes: Any) -> Due | NotDue:
        tree: dict[str, Any] = {"continuous_learning": RULES | changes}
        return due(
            self.database, "tea", load_settings("tiny", tree), at=self.at, min_new_feedback=minimum
        )

    def unfinished(self) -> Claim | None:
        return unfinished(self.database, self.book.history("tea"), load_settings("tiny"))

    def refusal(self, **changes: Any) -> str:
        verdict = self.asks(**changes)
        assert isinstance(verdict, NotDue)
        assert verdict.agent_id == "tea"
        return verdict.reason


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path))
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    yield Agent(database)
    database.close()


def test_enough_votes_that_are_old_enough_start_a_turn(agent: Agent) -> None:
    agent.send(7)
    verdict = agent.asks()
    assert verdict == Due("tea", agent.newest(), votes=7, attempt=1)
    assert isinstance(verdict, Due)
    assert verdict.run_key == f"tea:{agent.newest()}:1"
    assert agent.asks() == verdict  # asked again, the same turn: the same run key


def steps(agent: Agent) -> int:
    """Return how many steps SQLite's machine takes for a look."""
    taken = 0

    def count() -> int:
        nonlocal taken
        taken += 1
        return 0

    def watch(raw: Any, *_: Any) -> None:
        raw.set_progress_handler(count, 1)

    engine = agent.database.engine
    sa.event.listen(engine, "checkout", watch)
    assert isinstance(agent.asks(), Due)
    sa.event.remove(engine, "checkout", watch)
    return taken


def test_a_look_costs_the_same_however_many_votes_there_are(agent: Agent) -> None:
    agent.send(50)
    agent.turn(agent.at - timedelta(hours=2), 10, "done")
    agent.send(COUNTED)
    few = steps(agent)
    agent.send(9 * COUNTED)
    assert steps(agent) < 2 * few
    verdict = agent.asks()
    assert isinstance(verdict, Due)
    assert verdict.votes == COUNTED


def test_an_agent_nobody_knows_has_no_votes(agent: Agent) -> None:
    assert agent.refusal() == "0 new votes of the 5 needed"


def test_too_few_votes_are_said_with_both_numbers(agent: Agent) -> None:
    agent.send(4)
    assert agent.refusal() == "4 new votes of the 5 needed"
    assert isinstance(agent.asks(min_new_feedback=4), Due)


def test_the_night_takes_whatever_is_new(agent: Agent) -> None:
    agent.send(1)
    assert isinstance(agent.asks(minimum=1), Due)
    agent.turn(agent.at - timedelta(hours=2), 10, "done")
    assert agent.refusal(minimum=1) == "0 new votes of the 1 needed"


def test_a_change_of_mind_is_one_new_vote(agent: Agent) -> None:
    agent.send(6, rater_id="ann")
    assert agent.refusal() == "1 new votes of the 5 needed"


def test_a_burst_is_taken_whole(agent: Agent) -> None:
    agent.send(5)
    agent.at = now() + timedelta(seconds=20)
    reason = agent.refusal()
    assert reason.endswith(" s old, 60 s needed, or 5 votes that have waited 600 s: 0 have")
    assert 15 <= int(reason.removeprefix("newest vote is ").split()[0]) <= 21


def test_where_votes_never_pause_enough_of_them_wait_ten_quiet_times_at_most(agent: Agent) -> None:
    agent.send(5)
    waited = agent.newest()
    begun, until = now(), now() + timedelta(seconds=600)
    with patch("rlhf_pipeline.feedback.store.now", lambda: until):
        agent.send(3)
    agent.at = until + timedelta(seconds=1)
    verdict = agent.asks()
    assert isinstance(verdict, Due)
    # Of what has waited: a younger vote may still be on its way into its place before others.
    assert (verdict.votes, verdict.watermark) == (5, waited)
    assert "6 votes that have waited 600 s: 5 have" in agent.refusal(min_new_feedback=6)
    agent.at = begun + timedelta(seconds=590)
    assert "5 votes that have waited 600 s: 0 have" in agent.refusal()


def test_a_paused_agent_says_why(agent: Agent) -> None:
    agent.send(5)
    agent.store.set_agent("tea", paused_reason="moving house")
    assert agent.refusal() == "paused: moving house"
    agent.store.set_agent("tea", paused_reason=None)
    assert isinstance(agent.asks(), Due)


@pytest.mark.parametrize("switch", [("training", "enabled"), ("continuous_learning", "enabled")])
def test_switched_off_is_off(agent: Agent, switch: tuple[str, str]) -> None:
    agent.send(5)
    settings = load_settings("tiny", {switch[0]: {switch[1]: False}})
    verdict = due(agent.database, "tea", settings, at=agent.at)
    assert verdict == NotDue("tea", "training.enabled or continuous_learning.enabled is off")


def test_one_turn_at_a_time(agent: Agent) -> None:
    agent.send(5)
    claim = agent.turn(agent.at, 0, "held")
    assert agent.refusal() == f"run run-1234 holds attempt 1 (token {claim.token})"
    agent.at += timedelta(days=1)  # stale, and still the watchdog's business
    assert "holds attempt 1" in agent.refusal()


def test_the_next_turn_waits_for_a_running_experiment(agent: Agent) -> None:
    agent.send(5)
    book = ExperimentBook(agent.database)
    experiment = book.start("tea", champion=0, challenger=3, share=0.1, actor="promotion")
    assert agent.refusal() == "version 3 is in an experiment"
    book.end(experiment, "rolled_back", "worse")
    assert isinstance(agent.asks(), Due)


def test_the_next_turn_waits_for_the_last_to_cool_down(agent: Agent) -> None:
    agent.send(5)
    agent.turn(agent.at - timedelta(minutes=20), 8, "done")
    agent.send(5)
    assert agent.refusal() == "12.0 min since the last turn, 30 needed"
    assert isinstance(agent.asks(cool_down_minutes=12), Due)


@pytest.mark.parametrize("ended", ["done", "failed"])
def test_nothing_waits_for_what_a_clock_far_ahead_dated(agent: Agent, ended: str) -> None:
    right, agent.at = agent.at, agent.at + timedelta(days=30)
    agent.send(5)
    agent.turn(agent.at, 200, ended)
    with patch("rlhf_pipeline.feedback.store.now", lambda: agent.at):
        agent.send(5)
    agent.at = right
    assert isinstance(agent.asks(), Due)


@pytest.mark.parametrize("ended", ["done", "failed"])
def test_what_another_machines_clock_dated_a_little_later_is_young(
    agent: Agent, ended: str
) -> None:
    agent.send(5)
    agent.turn(agent.at - timedelta(minutes=5), 10, ended)
    agent.send(5)
    assert agent.refusal().startswith("-5.0 min since")


def test_only_what_is_new_since_the_last_turn_counts(agent: Agent) -> None:
    agent.send(9)
    agent.turn(agent.at - timedelta(hours=2), 10, "done")
    agent.send(4)
    assert agent.refusal() == "4 new votes of the 5 needed"
    agent.send(1)
    verdict = agent.asks()
    assert isinstance(verdict, Due)
    assert (verdict.votes, verdict.watermark) == (5, agent.newest())


def test_version_0_from_seeds_needs_no_rest(agent: Agent) -> None:
    agent.turn(agent.at - timedelta(minutes=2), 1, "done", mark="bootstrap")  # watermark 0
    agent.send(5)
    assert isinstance(agent.asks(), Due)


def test_version_0_made_again_makes_no_votes_new_again(agent: Agent) -> None:
    agent.send(5)
    agent.turn(agent.at - timedelta(hours=2), 1, "done")
    agent.turn(agent.at - timedelta(hours=1), 1, "done", mark="bootstrap", watermark=0)
    assert agent.refusal() == "0 new votes of the 5 needed"


def test_the_budget_of_a_day_is_kept(agent: Agent) -> None:
    agent.send(5)
    agent.turn(agent.at - timedelta(hours=20), 60, "done", mark="one")
    agent.turn(agent.at - timedelta(hours=10), 50, "done", mark="two")
    agent.send(5)
    assert agent.refusal() == "110 min of training in 24 h, budget 100 min"
    assert isinstance(agent.asks(gpu_minutes_per_night=111), Due)
    agent.at += timedelta(hours=5)  # the first is no longer within the day
    assert isinstance(agent.asks(), Due)


def test_only_the_part_within_the_day_counts() -> None:
    start = datetime.fromisoformat("2026-03-01T00:00:00+00:00")

    def claim(began: float, ended: float) -> Claim:
        """Return a claim that worked from hour to hour."""
        first, last = (start + timedelta(hours=h) for h in (began, ended))
        return Claim(1, "tea", "f", 1, 1, "done", "run", "sensor", first, last, last)

    def counted(*claims: Claim) -> float:
        longest = timedelta(hours=8)
        return minutes_in_a_day([*claims], start + timedelta(hours=24), longest=longest)

    assert counted() == 0
    assert counted(claim(1, 2), claim(3, 3.5)) == 90
    assert counted(claim(-1, 0.5)) == 30  # begun the day before
    assert counted(claim(-3, -2)) == 0
    assert counted(claim(23.5, 40)) == 30  # a clock that was ahead wrote the end
    assert counted(claim(30, 40)) == 0
    assert counted(claim(-1, 23)) == 7 * 60  # so did one that jumped a day ahead meanwhile
    assert counted(claim(-9, 15)) == 0


def test_a_failed_attempt_is_tried_again_after_a_while_that_doubles(agent: Agent) -> None:
    agent.send(5)
    begin = agent.at
    agent.turn(begin, 1, "failed")
    agent.at = begin + timedelta(minutes=3)
    assert agent.refusal() == "2.0 min since a turn failed (1 since the last verdict), 5 needed"
    agent.at = begin + timedelta(minutes=1) + BACK_OFF
    second = agent.asks()
    assert isinstance(second, Due)
    assert (second.attempt, second.run_key[-2:]) == (2, ":2")
    agent.turn(agent.at, 1, "failed")
    agent.at += timedelta(minutes=10)
    assert agent.refusal() == "9.0 min since a turn failed (2 since the last verdict), 10 needed"


def test_new_votes_do_not_start_what_failed_just_now(agent: Agent) -> None:
    agent.send(5)
    agent.turn(agent.at - timedelta(minutes=60), 1, "done")
    for minutes in (30, 20, 7):
        agent.send(5)
        agent.turn(agent.at - timedelta(minutes=minutes), 1, "failed")
    agent.send(5)  # another fingerprint each time
    assert agent.refusal() == "6.0 min since a turn failed (3 since the last verdict), 20 needed"
    agent.at += timedelta(minutes=14)
    assert isinstance(agent.asks(), Due)


def test_a_turn_found_dead_long_after_is_left_to_who_found_it_for_a_while(agent: Agent) -> None:
    agent.send(5)
    morning = agent.at
    agent.at = morning - timedelta(hours=9)
    claim = agent.book.claim("tea", agent.mark(), 5, holder="dead", asked_by="sensor")
    agent.at = morning  # the machine is up again
    agent.book.give_up(claim.token, "the worker died")
    assert agent.refusal() == "0.0 min since a turn failed (1 since the last verdict), 5 needed"
    agent.at += BACK_OFF
    assert isinstance(agent.asks(), Due)


def trained_rewards(agent: Agent, claim: Claim, champion: int = 0) -> None:
    """Leave in the claim's turn folder what it has once its reward models are trained."""
    folder = load_settings("tiny").turn_folder("tea", claim.fingerprint)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BEGAN).write_text(json.dumps({"champion": champion, "baseline": 0}))
    (folder / REWARD).write_text("{}")


def move(agent: Agent, action: str, version: int, token: int | None = None) -> None:
    """Write down in the ledger who is champion now."""
    with agent.database.write() as connection:
        entry = connection.execute(sa.select(sa.func.count()).select_from(promotions)).scalar_one()
        told = {"actor": "ann", "reason": "why", "created_at": agent.at, "token": token}
        row = {"agent_id": "tea", "entry": entry + 1, "action": action, "version": version}
        connection.execute(promotions.insert().values(**row, **told))


def test_a_turn_that_has_reward_models_goes_on_though_people_vote(agent: Agent) -> None:
    agent.send(5)
    move(agent, "baseline", 0)
    old = agent.newest()
    claim = agent.turn(agent.at - timedelta(hours=9), 200, "failed")
    agent.send(2)
    # Nothing had finished: the newest votes are as good.
    assert agent.asks(gpu_minutes_per_night=999) == Due("tea", agent.newest(), votes=7, attempt=1)
    trained_rewards(agent, claim)
    verdict = agent.asks(gpu_minutes_per_night=999)
    assert verdict == Due("tea", old, votes=7, attempt=2)
    agent.turn(agent.at - timedelta(hours=5), 1, "failed", claim.fingerprint, old)
    agent.turn(agent.at - timedelta(hours=4), 1, "failed", claim.fingerprint, old)
    after = agent.asks(gpu_minutes_per_night=999)  # that was the last attempt
    assert after == Due("tea", agent.newest(), votes=7, attempt=1)


def test_a_turn_that_ended_or_lost_votes_to_an_erasure_is_not_gone_on_with(agent: Agent) -> None:
    agent.send(5)
    move(agent, "baseline", 0)
    claim = agent.turn(agent.at - timedelta(hours=9), 1, "failed")
    trained_rewards(agent, claim)
    agent.send(5)
    begun = agent.unfinished()
    assert begun is not None
    assert begun.token == claim.token
    with agent.database.write() as connection:
        told = {"person": "", "counts": {}, "snapshots": [], "versions": [], "erased_at": agent.at}
        connection.execute(erasures.insert().values(erasure_id="1", agent_id="tea", **told))
    assert agent.unfinished() is None
    later = agent.turn(agent.at - timedelta(hours=3), 1, "failed")
    trained_rewards(agent, later)
    with agent.database.write() as connection:
        connection.execute(erasures.delete())
    assert agent.unfinished() is not None
    move(agent, "promote", 1)  # by hand: the turn would begin from who is champion no more
    assert agent.unfinished() is None
    move(agent, "promote", 2, later.token)  # its own version, before it came to its verdict
    assert agent.unfinished() is not None
    move(agent, "rollback", 0)
    assert agent.unfinished() is not None
    agent.turn(agent.at - timedelta(hours=2), 1, "done")
    assert agent.unfinished() is None
    agent.send(1)
    hour = timedelta(hours=1)
    again = agent.turn(agent.at - hour, 1, "failed", later.fingerprint, 10, again=True)
    trained_rewards(agent, again)
    assert agent.unfinished() is None  # those had their verdict
    agent.turn(agent.at, 1, "held", "another", 99)
    assert agent.unfinished() is None  # it is being trained


def test_what_a_person_interrupted_is_no_attempt_of_a_turn_that_is_gone_on_with(
    agent: Agent,
) -> None:
    agent.send(5)
    move(agent, "baseline", 0)
    mark, newest = agent.mark(), agent.newest()
    agent.send(5)
    for hours, reason in ((9, ""), (8, INTERRUPTED), (7, INTERRUPTED), (6, "")):
        claim = agent.turn(
            agent.at - timedelta(hours=hours), 1, "failed", mark, newest, reason=reason
        )
        trained_rewards(agent, claim)
    assert agent.unfinished() is not None
    agent.turn(agent.at - timedelta(hours=5), 1, "failed", mark, newest)  # the third that failed
    assert agent.unfinished() is None


def test_a_turn_whose_votes_were_taken_back_is_not_gone_on_with(agent: Agent) -> None:
    agent.send(4, origin="wrong.csv")
    agent.send(1, rater_id="ann")
    agent.send(1, rater_id="bob", origin="mlflow")
    move(agent, "baseline", 0)
    claim = agent.turn(agent.at - timedelta(hours=9), 1, "failed")
    trained_rewards(agent, claim)
    agent.send(1, rater_id="ann", number=0.0, origin="wrong.csv")  # changed, then taken back
    agent.store.withdraw("tea", ["5", "6"])  # "5" as somebody changed it in MLflow
    agent.send(5)
    assert agent.unfinished() is not None
    agent.store.withdraw("tea", agent.store.keys_from("tea", "wrong.csv"))
    agent.send(4, origin="right.csv")
    assert agent.unfinished() is None
    assert agent.asks() == Due("tea", agent.newest(), votes=10, attempt=1)


def test_what_was_taken_back_starts_no_turn_and_is_in_none(agent: Agent) -> None:
    agent.send(5)
    agent.turn(agent.at - timedelta(hours=9), 1, "done")
    agent.send(20, origin="wrong.csv")
    agent.send(6)
    until = now() + timedelta(seconds=600)
    with patch("rlhf_pipeline.feedback.store.now", lambda: until):  # a moment ago
        agent.store.withdraw("tea", agent.store.keys_from("tea", "wrong.csv"))
    back = agent.newest()
    with patch("rlhf_pipeline.feedback.store.now", lambda: until):
        agent.send(1)
    agent.at = until + timedelta(seconds=1)
    assert agent.asks() == Due("tea", back, votes=6, attempt=1)
    assert "of the 8 needed" in agent.refusal(min_new_feedback=8)


def test_the_wait_doubles_up_to_six_hours() -> None:
    waits = [back_off(n) / timedelta(minutes=1) for n in (1, 2, 3, 7, 8, 9, 10_000)]
    assert waits == [5, 10, 20, 320, 360, 360, 360]


def test_after_the_last_attempt_a_person_must_look(agent: Agent) -> None:
    agent.send(5)
    for hours in (9, 6, 3):
        agent.turn(agent.at - timedelta(hours=hours), 1, "failed")
    mark = agent.mark()
    assert agent.refusal() == f"3 attempts at {mark[:16]} failed; a person must look"
    agent.send(1)  # other votes are another matter
    verdict = agent.asks()
    assert isinstance(verdict, Due)
    assert verdict.attempt == 1


def test_settings_decide_for_each_agent(agent: Agent) -> None:
    agent.send(5)
    assert isinstance(Settings().continuous_learning.min_new_feedback, int)
    patient = load_settings("tiny", {"continuous_learning": {"min_new_feedback": 500}})
    assert due(agent.database, "tea", patient, at=agent.at) == NotDue(
        "tea", "5 new votes of the 500 needed"
    )


def test_votes_that_teach_no_reward_are_told_with_what_would_let_them() -> None:
    pairs = RewardSettings(min_pairs=10)
    assert reward_lacks({"preference": 20, "correction": 10, "thumbs": 500}, {}, pairs) is None
    votes = {"preference": 20, "correction": 9, "thumbs": 1500, "comment": 3}
    assert reward_lacks(votes, {"thumbs": (900, 600)}, pairs) == (
        "29 votes to learn from (preference, correction) of at least 30; thumbs 1,500 would count "
        "where reward.kinds names them"
    )
    thumbs = RewardSettings(min_pairs=5, kinds={"thumbs": 1, "criteria": 1})
    both = {"thumbs": 30, "preference": 1, "correction": 1}
    assert reward_lacks(both, {"thumbs": (30, 0)}, thumbs) is None
    assert reward_lacks({"thumbs": 30, "preference": 1}, {"thumbs": (20, 10)}, thumbs) is None
    assert reward_lacks({"thumbs": 1500, "preference": 1}, {"thumbs": (1491, 9)}, thumbs) == (
        "1 preferences and corrections, thumbs 1,491 liked and 9 not to judge one by, which takes "
        "2 preferences or corrections, or 10 answers that most liked and as many that most did "
        "not, on held-out prompts; "
        "the review page asks people for some"
    )
    # Of criteria nobody knows which are good before they are read.
    assert reward_lacks({"criteria": 20}, {}, thumbs) is None
    told = reward_lacks({"thumbs": 9, "criteria": 19}, {"thumbs": (9, 0)}, thumbs)
    assert told is not None
    assert told.startswith(
        "0 preferences and corrections, thumbs 9 liked and 0 not, criteria 19 to"
    )
    assert reward_lacks({"thumbs": 500}, {"thumbs": (400, 100)}, pairs) == (
        "0 votes to learn from (preference, correction) of at least 30; thumbs 500 would count "
        "where reward.kinds names them"
    )
    assert reward_lacks({"thumbs": 500}, {"thumbs": (491, 9)}, pairs) == (
        "0 votes to learn from (preference, correction) of at least 30; thumbs 500 would count "
        "where reward.kinds names them; judging one takes 2 preferences or corrections, or 10 "
        "answers that most liked and as many that most did not, on held-out prompts"
    )
    none = reward_lacks({}, {}, RewardSettings(min_pairs=10))
    votes = {"preference": 100}
    # Whom each model learns from is a hash of the name.
    shares = pairs.shares.by_job()
    by_job = {job: next(n for n in map(str, range(99)) if job_of(n, shares) == job) for job in JOBS}
    alone = {by_job["gate"]: 100}
    assert reward_lacks(votes, {}, pairs, alone) == (
        "0 votes for the proxy reward model to learn from of at least 10: one rater gave all 100, "
        "and no rater teaches two models; ask several more people"
    )
    few = {by_job["gate"]: 50, by_job["proxy"]: 41, by_job["stopping"]: 9}
    told = reward_lacks(votes, {}, pairs, few)
    assert told is not None
    assert told.startswith("9 votes for the stopping reward model to learn from of at least 10: 3")
    told = reward_lacks(votes, {}, pairs, few, held_out=0.4)
    assert told is not None
    assert told.startswith("5 votes for the stopping reward model to learn from of at least 10: 3")
    assert reward_lacks(votes, {}, pairs, {**few, by_job["stopping"]: 10}) is None
    assert reward_lacks(votes, {}, pairs, None) is None
    # Held-out conversations teach nothing: of 10 votes 8 or 9 are left, if nobody knows whose.
    some = {**few, by_job["stopping"]: 10}
    told = reward_lacks(votes, {}, pairs, some, held_out=0.15)
    assert told is not None
    assert told.startswith(
        "probably too few votes for the stopping reward model: of 10 some 8 are to learn from, of "
        "at least 10, as 15% of the conversations are kept for judging"
    )
    assert reward_lacks(votes, {}, pairs, {**few, by_job["stopping"]: 12}, held_out=0.15) is None
    told = reward_lacks({"preference": 35}, {}, pairs, None, held_out=0.15)
    assert told is not None
    assert told.startswith("probably too few votes: of 35 some 29 are to learn from, of at least")
    assert reward_lacks({"preference": 36}, {}, pairs, None, held_out=0.15) is None
    assert none == "0 votes to learn from (preference, correction) of at least 30"
    assert reward_lacks({}, {}, RewardSettings(given="/models/rewards")) is None


def test_votes_that_probably_judge_no_reward_are_told_beforehand() -> None:
    thumbs = RewardSettings(min_pairs=10, kinds={"thumbs": 1})
    few, enough = ({"thumbs": (3000 - against, against)} for against in (30, 67))
    assert reward_lacks({"thumbs": 3000}, few, thumbs, held_out=0.15) == (
        "probably too few votes: 0 preferences and corrections, thumbs 2,970 liked and 30 not to "
        "judge one by, of which some 15% are on held-out prompts (feedback.evaluation_share), "
        "which takes 2 preferences or corrections, or 10 answers that most liked and as many that "
        "most did not, on "
        "held-out prompts; the review page asks people for some"
    )
    assert reward_lacks({"thumbs": 3000}, few, thumbs) is None  # a file's own split may say whose
    assert reward_lacks({"thumbs": 3000}, enough, thumbs, held_out=0.15) is None
    compared = {"thumbs": 3000, "preference": 14}
    assert reward_lacks(compared, few, thumbs, held_out=0.15) is None
    told = reward_lacks(compared, few, thumbs, held_out=0.15, ties=1)
    assert told is not None
    assert "13 preferences and corrections (and 1 ties, which are none), thumbs" in told


def test_ties_teach_and_judge_nothing() -> None:
    pairs = RewardSettings(min_pairs=10)
    told = reward_lacks({"preference": 585}, {}, pairs, ties=585)
    assert told is not None
    assert told.startswith("0 preferences and corrections (and 585 ties, which are none) to judge")
    assert reward_lacks({"preference": 585}, {}, pairs, ties=583) is None


def test_a_clock_that_jumped_ahead_in_a_turn_costs_no_more_than_the_longest_turn(
    agent: Agent,
) -> None:
    agent.send(5)
    began = agent.at
    agent.turn(began, 24 * 60, "done")
    agent.send(5)
    agent.at = began + timedelta(hours=25.5)
    assert isinstance(agent.asks(deadline_minutes=120), Due)
    reason = agent.refusal(deadline_minutes=240)
    assert reason == "150 min of training in 24 h, budget 100 min"
