"""Live experiments from rows to the ledger: what is measured, decided, done and kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from rlhf_pipeline.config import ExperimentSettings, load_settings
from rlhf_pipeline.database import Database, experiment_looks, interactions
from rlhf_pipeline.errors import (
    ConfigError,
    ExperimentError,
    HashMismatch,
    RegistryAway,
    RegistryError,
)
from rlhf_pipeline.experiment import live
from rlhf_pipeline.experiment.assignment import Arm, arm_of
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook
from rlhf_pipeline.experiment.decision import GUARDRAILS, Verdict
from rlhf_pipeline.experiment.live import bounds_under, growth_until_the_end, measured
from rlhf_pipeline.experiment.watch import STILL_LOADING
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.overview import overview
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    hash_rater,
    now,
    user_prompt,
    uuid7,
)
from rlhf_pipeline.registry.explain import explain, to_text
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.serving.gateway import Gateway
from rlhf_pipeline.serving.trials import Trials
from tests.assets.world import write_recipe
from tests.experiment.world import AGENT, SETTINGS, another, begin, ledger_of_two, meet


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeedbackStore]:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    yield FeedbackStore(database)
    database.close()


@pytest.fixture
def ledger(store: FeedbackStore, tmp_path: Path) -> PromotionLedger:
    return ledger_of_two(store, tmp_path)


def look(
    book: ExperimentBook,
    ledger: PromotionLedger,
    experiment: Experiment,
    settings: ExperimentSettings,
    *,
    automatic: bool = True,
) -> tuple[Verdict, str]:
    """Look at versions whose files, of which there are none here, are as they were."""
    return live.look(book, ledger, experiment, settings, check=bool, automatic=automatic)


def watched(book: ExperimentBook, experiment: Experiment, *spans: tuple[float, float]) -> None:
    """Store the looks of a daemon that runs from one day to another, counted from its share on."""
    hours = [h for begun, ended in spans for h in range(round(24 * begun), round(24 * ended) + 1)]
    rows: list[dict[str, Any]] = [
        {
            "experiment_id": experiment.experiment_id,
            "look": look,
            "share": experiment.share,
            "action": "continue",
            "verdict": {"reasons": [], "differences": {}},
            "looked_at": experiment.share_since + timedelta(hours=hour),
        }
        for look, hour in enumerate(hours, start=1 + len(book.looks(experiment.experiment_id)))
    ]
    with book.database.write() as connection:
        connection.execute(experiment_looks.insert(), rows)


def challenged(experiment: Experiment, user: int) -> bool:
    return arm_of(experiment.experiment_id, f"user-{user}", experiment.share) == "challenger"


def champion(ledger: PromotionLedger) -> int:
    found = ledger.champion(AGENT)
    assert found is not None
    return found.version


def test_a_better_challenger_is_promoted_by_the_ledger(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(1200), likes=(0.55, 0.80))
    verdict, done = look(book, ledger, experiment, SETTINGS)
    assert verdict.action == "promote", verdict
    assert champion(ledger) == 1
    [entry] = [e for e in ledger.history(AGENT) if e.action == "promote"]
    assert entry.actor == "experiment"
    assert "satisfaction is better" in entry.reason
    [ended] = book.history(AGENT)
    assert ended.state == "promoted"
    assert ended.ended_at is not None
    assert "1" in done
    [kept] = book.looks(experiment.experiment_id)
    assert kept.action == "promote"
    assert kept.verdict["differences"]["satisfaction"]["low"] > 0


def test_a_worse_challenger_leaves_and_the_ledger_never_moved(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(700), likes=(0.75, 0.45))
    verdict, _ = look(book, ledger, experiment, SETTINGS)
    assert verdict.action == "roll_back"
    assert champion(ledger) == 0
    assert book.running(AGENT) is None
    assert [e.state for e in book.history(AGENT)] == ["rolled_back"]
    assert len(ledger.history(AGENT)) == 1  # the baseline's entry alone


def test_an_equal_challenger_goes_up_the_ramp_step_by_step_and_times_out(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.1)
    meet(store, experiment, range(50), likes=(0.6, 0.6))
    _, done = look(book, ledger, experiment, SETTINGS)
    assert "goes on at 10%" in done  # too few have met it
    meet(store, experiment, range(50, 400), likes=(0.6, 0.6), seed=1)
    _, done = look(book, ledger, experiment, SETTINGS)
    assert done == "ramped from 10% to 50%"
    wider = book.running(AGENT)
    assert wider is not None
    assert wider.share == 0.5
    meet(store, wider, range(400), likes=(0.6, 0.6), seed=2)
    verdict, _ = look(book, ledger, wider, SETTINGS)
    assert verdict.action == "continue"
    verdict, done = look(book, ledger, wider, SETTINGS.model_copy(update={"days": 1e-9}))
    assert verdict.action == "time_out"
    assert champion(ledger) == 0
    assert [e.state for e in book.history(AGENT)] == ["timed_out"]
    assert [k.look for k in book.looks(experiment.experiment_id)] == [1, 2, 3, 4]


def test_a_few_people_hold_no_step_of_the_ramp_for_more_than_its_part_of_half_the_days(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    settings = SETTINGS.model_copy(update={"users_per_step": 30, "days": 12})
    book, experiment = begin(store, 0.1)
    longest = timedelta(days=12) / 2 / 2  # two steps share half the days
    watched(book, experiment, (0, 12))

    def looked(after: timedelta) -> str:
        with patch("rlhf_pipeline.experiment.live.now", lambda: experiment.share_since + after):
            return look(book, ledger, experiment, settings)[1]

    assert "goes on at 10%" in looked(longest)  # nobody came: nothing is learnt by showing more
    meet(store, experiment, range(60), likes=(0.6, 0.6))  # six or so meet the challenger
    assert "goes on at 10%" in looked(longest - timedelta(minutes=1))
    assert looked(longest) == "ramped from 10% to 50%"


@pytest.mark.parametrize(
    ("share", "gone", "give_up", "state"),
    [
        (0.5, 10.0, 0.005, "gave_up"),
        (0.5, 3.0, 0.005, "running"),
        (0.1, 10.0, 0.005, "running"),
        (0.5, 10.0, 0.0, "running"),
    ],
    ids=["most of the days", "a day or two", "a step before the last", "switched off"],
)
def test_an_equal_challenger_leaves_when_the_days_left_will_hardly_help_it(
    store: FeedbackStore,
    ledger: PromotionLedger,
    share: float,
    gone: float,
    give_up: float,
    state: str,
) -> None:
    book, begun = begin(store, share)
    meet(store, begun, range(900 if share == 0.5 else 1500), likes=(2.0, 2.0))  # all like all
    earlier = begun.started_at - timedelta(days=gone)
    experiment = replace(begun, started_at=earlier, share_since=earlier)
    watched(book, experiment, (0, gone))
    # No step of the ramp today.
    settings = SETTINGS.model_copy(update={"minutes_per_step": 1e6, "give_up": give_up})
    _, done = look(book, ledger, experiment, settings)
    [after] = book.history(AGENT)
    assert after.state == state, done
    assert champion(ledger) == 0
    if state == "running":
        return
    assert "the chance that it is surely better" in after.reason
    told = to_text(explain(ledger, AGENT, 1))
    assert f"beside version 0, 50% of the people  gave up: {after.reason}" in told
    waits = ledger.standing(AGENT).challenger  # undecided: who wants it may still promote it
    assert waits is not None
    assert waits.version == 1


def test_growth_is_counted_from_the_last_step_to_the_last_day() -> None:
    settings = ExperimentSettings(ramp=(0.1, 0.5), days=12)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    begun = Experiment("e", AGENT, 0, 1, "running", "", 0.5, start, "test", start, None, 1)
    later = replace(begun, share_since=start + timedelta(days=4))

    def growth(experiment: Experiment, days: float, *, came: bool = True) -> float | None:
        return growth_until_the_end(experiment, settings, start + timedelta(days=days), came=came)

    assert growth(begun, 4) == pytest.approx(3)
    assert growth(later, 8) == pytest.approx(2)
    assert growth(later, 6.9) is None
    ramping = replace(begun, share=0.1)
    assert growth(ramping, 8) is None
    assert growth(ramping, 8, came=False) == pytest.approx(1.5)
    assert growth(ramping, 5.9, came=False) is None


def test_an_experiment_that_nobody_meets_ends_after_half_its_days(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    """No turn of the agent starts while it runs, and its votes may come from elsewhere."""
    book, begun = begin(store, 0.1)
    half = SETTINGS.days / 2
    watched(book, replace(begun, share_since=begun.share_since - timedelta(days=half)), (0, half))

    def looked(days: float) -> str:
        earlier = begun.started_at - timedelta(days=days)
        experiment = replace(begun, started_at=earlier, share_since=earlier)
        return look(book, ledger, experiment, SETTINGS)[1]

    assert "goes on at 10%" in looked(half - 0.1)
    assert "by 0 and 0 users; as people come, it will be 0 and 0" in looked(half)
    assert [e.state for e in book.history(AGENT)] == ["gave_up"]
    assert ledger.standing(AGENT).challenger is not None  # a person may still promote it


def woken(
    book: ExperimentBook, ledger: PromotionLedger, days: float, settings: ExperimentSettings
) -> str:
    """Look so many days after the running experiment began, and return how it stands then."""
    [experiment] = book.history(AGENT)
    at = experiment.started_at + timedelta(days=days)
    with (
        patch("rlhf_pipeline.experiment.live.now", lambda: at),
        patch("rlhf_pipeline.experiment.book.now", lambda: at),
    ):
        look(book, ledger, experiment, settings)
    return book.history(AGENT)[0].state


@pytest.mark.parametrize("asleep", [5.0, 40.0], ids=["within its days", "past its last day"])
def test_time_in_which_nobody_looked_counts_for_neither_the_rate_nor_the_deadline(
    store: FeedbackStore, ledger: PromotionLedger, asleep: float
) -> None:
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(20), likes=(0.5, 0.8))
    settings, awake = ExperimentSettings(), 0.5 + asleep
    watched(book, experiment, (0, 0.5), (awake, awake + 14))
    # Twice, as two daemons may wake at once, or one that is killed after its first look.
    assert [woken(book, ledger, awake, settings) for _ in range(2)] == ["running"] * 2
    assert book.running(AGENT) == experiment
    # Nobody comes from then on, which is believed when a quarter of the days was watched.
    assert woken(book, ledger, awake + 2.9, settings) == "running"
    assert woken(book, ledger, awake + 3.1, settings) == "gave_up"


def test_an_experiment_is_over_when_it_was_watched_for_all_its_days(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(50), likes=(0.6, 0.6))
    settings = ExperimentSettings(give_up=0)
    # Off for half a day in between, as a machine that is off by night.
    watched(book, experiment, (0, 3), (10, 12), (12.5, 15), (30, 50))
    assert woken(book, ledger, 35.9, settings) == "running"
    assert woken(book, ledger, 36.1, settings) == "timed_out"


def test_days_that_nobody_watched_are_no_part_of_a_step_of_the_ramp(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.1)
    meet(store, experiment, range(400), likes=(0.6, 0.6))
    settings = SETTINGS.model_copy(update={"minutes_per_step": 60})
    for day in (0.0, 0.01, 2.5, 2.52):
        woken(book, ledger, day, settings)
        assert book.history(AGENT)[0].share == 0.1
    woken(book, ledger, 2.55, settings)
    assert book.history(AGENT)[0].share == 0.5


@pytest.mark.parametrize("wrong", [-20_000.0, -2.0, 5.0, 40.0])
def test_a_clock_that_is_wrong_for_a_look_ends_nothing_and_keeps_nothing_running(
    store: FeedbackStore, ledger: PromotionLedger, wrong: float
) -> None:
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(50), likes=(0.6, 0.6))
    settings = ExperimentSettings(give_up=0)

    def stands(day: float) -> str:
        [dated] = book.history(AGENT)
        moved = (experiment.started_at - dated.started_at) / timedelta(days=1)
        return woken(book, ledger, day + moved, settings)

    watched(book, experiment, (0, 0.5))
    assert [stands(day) for day in (wrong, 0.5)] == ["running"] * 2
    watched(book, experiment, (0.5, 15))
    assert stands(13.9) == "running"
    assert stands(15) == "timed_out"


def answered(experiment: Experiment, user: str | None, **changes: Any) -> Interaction:
    """Return an answer of the challenger at the experiment's share."""
    plain: dict[str, Any] = {
        "interaction_id": uuid7(),
        "agent_id": AGENT,
        "prompt": user_prompt("what now?"),
        "completion": "this and that",
        "model_version": experiment.challenger,
        "created_at": now() - timedelta(seconds=1),
        "user_id": user,
        "experiment": experiment.experiment_id,
        "arm": "challenger",
        "sampling": {"challenger_share": experiment.share},
    }
    return Interaction(**{**plain, **changes})


def test_thumbs_ratings_and_scores_count_on_one_scale_and_only_thumbs_are_down(
    store: FeedbackStore,
) -> None:
    _, experiment = begin(store, 0.5)
    said = [
        (FeedbackKind.thumbs, 1.0, 1.0),
        (FeedbackKind.rating, 2.0, 0.25),
        (FeedbackKind.score, 0.0, 0.0),
        (FeedbackKind.score, 0.75, 0.75),
    ]
    for n, (kind, number, _) in enumerate(said):
        one = answered(experiment, f"user-{n}")
        store.add_interactions([one])
        vote = Feedback(AGENT, kind, uuid7(), interaction_id=one.interaction_id, number=number)
        store.append([replace(vote, rater_id=f"rater-{n}")])
    arms, _ = measured(store.database, experiment, SETTINGS)
    assert arms["satisfaction"].challenger.users == len(said)
    assert arms["satisfaction"].challenger.mean == pytest.approx(0.5)
    assert arms["thumbs_down"].challenger.mean == 0.0
    assert arms["feedback_rate"].challenger.mean == 1.0


def test_what_one_user_was_answered_and_said_is_a_share_of_it_not_a_sum(
    store: FeedbackStore,
) -> None:
    _, experiment = begin(store, 0.5)
    met = {"challenger_share": experiment.share}
    four = [
        answered(
            experiment, "ann", completion="one two three", sampling={**met, "fell_back": True}
        ),
        answered(experiment, "ann", completion="I can't say", sampling={**met, "fell_back": False}),
        answered(experiment, "ann", latency_seconds=2 * SETTINGS.slow_seconds),
        answered(experiment, "ann", sampling={**met, "ending": "length"}),
    ]
    store.add_interactions(four)
    for one, number in zip(four, (1.0, 0.0, 1.0), strict=False):  # the last without a vote
        thumb = Feedback(AGENT, FeedbackKind.thumbs, uuid7(), interaction_id=one.interaction_id)
        store.append([replace(thumb, number=number, rater_id="ann")])
    arms, _ = measured(store.database, experiment, SETTINGS)
    found = {name: arm.challenger.mean for name, arm in arms.items()}
    assert found == pytest.approx(
        {
            "satisfaction": 2 / 3,
            "thumbs_down": 1 / 4,
            "feedback_rate": 3 / 4,
            "fallbacks": 1 / 4,
            "truncated": 1 / 4,
            "refusals": 1 / 4,
            "slow": 1 / 4,
            "length": 3 / SETTINGS.long_words,
        }
    )


def test_who_has_no_name_is_known_by_the_session_and_without_one_is_nobody(
    store: FeedbackStore,
) -> None:
    _, experiment = begin(store, 0.5)
    store.add_interactions(
        [
            answered(experiment, None, session_id="one"),
            answered(experiment, None, session_id="one"),
            voted_on := answered(experiment, None, session_id="two"),
            answered(experiment, None),
            answered(experiment, "ann", arm="baseline"),
        ]
    )
    store.append(
        [
            Feedback(
                AGENT,
                FeedbackKind.thumbs,
                uuid7(),
                interaction_id=voted_on.interaction_id,
                number=1.0,
            )
        ]
    )
    arms, [step] = measured(store.database, experiment, SETTINGS)
    found = arms["feedback_rate"]
    assert (found.challenger.users, found.champion.users) == (2, 0)
    assert found.challenger.mean == 0.5
    assert (arms["satisfaction"].challenger.users, arms["satisfaction"].challenger.mean) == (1, 1.0)
    assert (step.challenger, step.champion) == (2, 0)


def test_an_answer_is_slow_beyond_the_limit_and_not_where_nobody_timed_it(
    store: FeedbackStore,
) -> None:
    _, experiment = begin(store, 0.5)
    limit = SETTINGS.slow_seconds
    timed = {"ann": limit + 0.1, "bob": limit, "cid": None, "dot": 0.1}
    store.add_interactions(
        [answered(experiment, user, latency_seconds=took) for user, took in timed.items()]
    )
    arms, _ = measured(store.database, experiment, SETTINGS)
    assert arms["slow"].challenger.mean == 0.25


def test_of_an_answer_that_does_not_say_so_the_version_tells_who_gave_it(
    store: FeedbackStore,
) -> None:
    _, experiment = begin(store, 0.5)
    who = [("challenger", 1), ("challenger", 0), ("champion", 0), ("champion", 0)]
    store.add_interactions(
        [answered(experiment, f"{n}", arm=a, model_version=v) for n, (a, v) in enumerate(who)]
    )
    arms, _ = measured(store.database, experiment, SETTINGS)
    assert (arms["fallbacks"].challenger.mean, arms["fallbacks"].champion.mean) == (0.5, 0.0)


def test_the_steps_of_a_ramp_share_what_may_go_wrong() -> None:
    """Each begins its numbers anew: wrong as often as asked by itself, all would be k times."""
    settings = ExperimentSettings(ramp=(0.1, 0.2, 0.5), promote=0.06, roll_back=0.03, give_up=0.01)
    found = bounds_under(settings)
    assert found.promote == pytest.approx(0.02)
    assert found.roll_back == pytest.approx(0.01)
    assert found.give_up == 0.01


def test_a_user_counts_in_one_arm_and_a_fallback_stays_in_its_arm(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.1)
    meet(store, experiment, range(300), likes=(0.5, 0.5))
    book.ramp(experiment, 0.5)
    wider = book.running(AGENT)
    assert wider is not None
    meet(store, wider, range(300), likes=(0.5, 0.5), fallbacks=0.5, seed=1)
    arms, steps = measured(store.database, wider, SETTINGS)
    challengers = sum(
        arm_of(wider.experiment_id, f"user-{n}", 0.5) == "challenger" for n in range(300)
    )
    answers = arms["feedback_rate"]
    assert (answers.challenger.users, answers.champion.users) == (challengers, 300 - challengers)
    assert arms["fallbacks"].champion.mean == 0.0
    assert 0.3 < arms["fallbacks"].challenger.mean < 0.6
    # All were first met at the first share; nobody is counted again at the second.
    [step] = steps
    assert step.share == 0.1
    assert step.challenger + step.champion == 300
    assert arms["slow"].challenger.mean == 0.0
    assert arms["length"].champion.mean == pytest.approx(5 / SETTINGS.long_words)


def is_champions(experiment: Experiment, user: str) -> bool:
    return arm_of(experiment.experiment_id, user, experiment.share) == "champion"


def test_a_vote_that_is_given_again_stays_on_the_answer_it_was_first_given_on(
    store: FeedbackStore,
) -> None:
    """An annotator counts with the first whose answer they voted on: down there, up elsewhere."""
    _, experiment = begin(store, 0.5)
    users = [u for u in map("user-{}".format, range(40)) if is_champions(experiment, u)][:2]
    answers = [
        Interaction(
            interaction_id=uuid7(),
            agent_id=AGENT,
            prompt=user_prompt("why?"),
            completion="so",
            model_version=0,
            created_at=now() - timedelta(seconds=1),
            user_id=user,
            experiment=experiment.experiment_id,
            arm="champion",
            sampling={"challenger_share": 0.5, "ending": "stop"},
            latency_seconds=0.2,
        )
        for user in users
    ]
    store.add_interactions(answers)
    found = []
    for place, number in ((0, 0.0), (1, 1.0), (0, 0.0)):
        store.append(
            [
                Feedback(
                    agent_id=AGENT,
                    idempotency_key=uuid7(),
                    kind=FeedbackKind.thumbs,
                    interaction_id=answers[place].interaction_id,
                    number=number,
                    rater_id=hash_rater(AGENT, "ann"),
                    occurred_at=now(),
                )
            ]
        )
        arms, _ = measured(store.database, experiment, SETTINGS)
        found.append(arms["thumbs_down"].champion.mean)
    assert found == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("likes", [(0.0, 1.0), (1.0, 0.0)])
def test_one_rater_of_many_people_s_answers_is_one_opinion(
    store: FeedbackStore, ledger: PromotionLedger, likes: tuple[float, float]
) -> None:
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(700), likes=likes, answers=1, rater="ann")
    verdict, _ = look(book, ledger, experiment, SETTINGS)
    found = verdict.differences["satisfaction"]
    assert (found.challenger_users, found.champion_users) == (1, 1)
    for metric in ("thumbs_down", "feedback_rate"):  # of one person in either arm
        assert abs(verdict.differences[metric].value) < 0.01
    assert verdict.action == "continue"
    assert champion(ledger) == 0


def test_many_accounts_that_praise_one_person_s_answers_are_one_opinion(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(600), likes=(0.6, 0.6))
    [one] = [n for n in range(600, 640) if challenged(experiment, n)][:1]
    for crowd in range(400):
        meet(store, experiment, [one], likes=(9.0, 9.0), answers=1, rater=f"account {crowd}")
    verdict, _ = look(book, ledger, experiment, SETTINGS)
    found = verdict.differences["satisfaction"]
    assert found.challenger_users == 1 + sum(challenged(experiment, n) for n in range(600))
    assert verdict.action == "continue", verdict.reasons
    assert champion(ledger) == 0


@pytest.mark.parametrize(
    ("likes", "end", "state"),
    [((0.0, 1.0), "promote", "promoted"), ((1.0, 0.0), "roll_back", "rolled_back")],
)
@pytest.mark.parametrize("most", [1, 3, None])
def test_who_comes_again_and_again_as_somebody_else_is_as_many_as_one_network_may_be(
    store: FeedbackStore,
    ledger: PromotionLedger,
    likes: tuple[float, float],
    end: str,
    state: str,
    most: int | None,
) -> None:
    """The challenger is no better and no worse: the crowd of one network would have it either."""
    book, experiment = begin(store, 0.5)
    settings = SETTINGS.model_copy(update={"people_per_network": most})
    meet(store, experiment, range(400), likes=(0.6, 0.6))
    meet(store, experiment, range(1000, 1400), likes=likes, answers=1, network="a mark")
    verdict, _ = look(book, ledger, experiment, settings)
    found = verdict.differences["satisfaction"]
    if most is None:
        assert (verdict.action, book.history(AGENT)[0].state) == (end, state)
        return
    assert verdict.action == "continue", verdict.reasons
    honest = sum(challenged(experiment, n) for n in range(400))
    counted = found.challenger_users, found.champion_users
    assert counted == (honest + most, 400 - honest + most)
    _, [step] = measured(store.database, experiment, settings)
    assert step.challenger + step.champion == 800  # each met an arm, whoever they are


def test_people_of_one_network_are_heard_as_their_mean(store: FeedbackStore) -> None:
    _, experiment = begin(store, 0.5)
    met = {"challenger_share": experiment.share, "network": "office"}
    said = [answered(experiment, f"user-{n}", sampling=met) for n in range(4)]
    store.add_interactions(said)
    for n, number in enumerate((1.0, 0.0, 0.0)):  # the fourth without a vote
        vote = Feedback(AGENT, FeedbackKind.thumbs, uuid7(), interaction_id=said[n].interaction_id)
        store.append([replace(vote, number=number, rater_id=f"user-{n}")])
    arms, _ = measured(store.database, experiment, SETTINGS)
    found = {
        name: arms[name].challenger for name in ("satisfaction", "thumbs_down", "feedback_rate")
    }
    assert {sample.users for sample in found.values()} == {1}
    assert [sample.mean for sample in found.values()] == pytest.approx([1 / 3, 2 / 4, 3 / 4])


def test_a_vote_sent_again_without_a_name_is_no_second_thumb_down(store: FeedbackStore) -> None:
    """Events without a rater are one vote each, and stay so."""
    _, experiment = begin(store, 0.5)
    meet(store, experiment, [1], likes=(9.0, 9.0), answers=4)
    with store.database.read() as connection:
        said = sa.select(interactions.c.interaction_id).limit(1)
        one = connection.execute(said).scalar_one()
    for n in range(4):
        thumb: dict[str, Any] = {"kind": FeedbackKind.thumbs, "number": 0.0, "occurred_at": now()}
        again = Feedback(agent_id=AGENT, idempotency_key=f"{n}", interaction_id=one, **thumb)
        store.append([again])
    arms, _ = measured(store.database, experiment, SETTINGS)
    downs = arms["thumbs_down"]
    assert max(downs.challenger.mean, downs.champion.mean) == 0.25


def test_requests_that_the_baseline_answers_for_both_speak_against_neither(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    """The champion is the baseline: its own version says nothing of who answered for it."""
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(1200), likes=(0.55, 0.80), unsafe=0.1)
    arms, _ = measured(store.database, experiment, SETTINGS)
    assert arms["fallbacks"].champion.mean == arms["fallbacks"].challenger.mean == 0
    verdict, _ = look(book, ledger, experiment, SETTINGS)
    assert verdict.action == "promote", verdict.reasons


def test_only_an_arm_that_was_still_loading_itself_was_not_asked(store: FeedbackStore) -> None:
    _, experiment = begin(store, 0.5)
    met = {"challenger_share": experiment.share, "fell_back": True}
    loading = {"arm": "challenger", "rule": STILL_LOADING}
    its_own = [{"arm": "challenger", "rule": "repetition"}, {**loading, "arm": "baseline"}]
    for user, events in {"ann": [loading], "bob": its_own}.items():
        store.add_interactions([answered(experiment, user, sampling={**met, "events": events})])
    arms, _ = measured(store.database, experiment, SETTINGS)
    assert arms["fallbacks"].challenger.mean == 0.5


def test_an_experiment_that_is_stopped_during_a_look_promotes_nobody(
    store: FeedbackStore, ledger: PromotionLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(1200), likes=(0.55, 0.80))

    def stopped_meanwhile(*given: object) -> object:
        found = measured(*given)  # type: ignore[arg-type]  # whatever `look` gives
        assert book.end(experiment, "stopped", "by hand")
        return found

    monkeypatch.setattr("rlhf_pipeline.experiment.live.measured", stopped_meanwhile)
    verdict, done = look(book, ledger, experiment, SETTINGS)
    assert verdict.action == "promote"
    assert "found it ended meanwhile" in done
    assert champion(ledger) == 0
    assert [(e.state, e.reason) for e in book.history(AGENT)] == [("stopped", "by hand")]


def test_a_winner_that_the_ledger_will_not_have_ends_its_experiment(
    store: FeedbackStore, ledger: PromotionLedger, tmp_path: Path
) -> None:
    refused = another(ledger, tmp_path, passed=False)
    book = ExperimentBook(store.database)
    begun = book.start(AGENT, champion=0, challenger=refused.version, share=0.5, actor="forced")
    meet(store, begun, range(1200), likes=(0.55, 0.80))
    _, done = look(book, ledger, begun, SETTINGS)
    assert "was refused by the gate" in done
    [ended] = book.history(AGENT)
    assert ended.state == "stopped"
    assert "satisfaction is better" in ended.reason
    assert champion(ledger) == 0


def test_a_winner_whose_files_are_not_the_registered_ones_is_not_promoted(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    """It answers from memory all the while, and would not be loaded again."""
    book, experiment = begin(store, 0.5)
    meet(store, experiment, range(1200), likes=(0.55, 0.80))
    errors: list[RegistryError] = [RegistryAway("MLflow is away"), HashMismatch("other weights")]

    def check(version: ModelVersion) -> None:
        assert version.version == 1
        raise errors.pop(0)

    with pytest.raises(RegistryAway):  # of which the next look may hear better
        live.look(book, ledger, experiment, SETTINGS, check=check)
    assert book.running(AGENT) == experiment
    _, done = live.look(book, ledger, experiment, SETTINGS, check=check)
    assert done == "stopped: other weights"
    [ended] = book.history(AGENT)
    assert ended.state == "stopped"
    assert ended.reason.startswith("the challenger won (satisfaction is better")
    assert champion(ledger) == 0


@pytest.mark.parametrize(("actor", "moves"), [("promotion", False), ("a person", True)])
def test_where_promotion_is_automatic_no_more_a_person_decides_what_no_person_began(
    store: FeedbackStore, ledger: PromotionLedger, actor: str, moves: bool
) -> None:
    book = ExperimentBook(store.database)
    begun = book.start(AGENT, champion=0, challenger=1, share=0.5, actor=actor)
    meet(store, begun, range(1200), likes=(0.55, 0.80))
    _, done = look(book, ledger, begun, SETTINGS, automatic=False)
    [ended] = book.history(AGENT)
    assert champion(ledger) == int(moves)
    if not moves:
        assert done == "stopped: automatic promotion is off, so a person decides"
        assert ended.state == "stopped"
        assert "the challenger won (satisfaction is better" in ended.reason
        waits = ledger.standing(AGENT).challenger
        assert waits is not None
        assert waits.version == 1


def test_who_lost_an_experiment_is_nobody_s_challenger(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.5)
    assert ledger.standing(AGENT).challenger is not None
    book.end(experiment, "rolled_back", "thumbs_down is worse")
    assert ledger.standing(AGENT).challenger is None
    assert ledger.standing(AGENT).waiting == ()
    with pytest.raises(RegistryError, match=r"rolled back in an experiment \(thumbs_down is worse"):
        ledger.promote(AGENT, 1, actor="ann", reason="by hand", expected_champion=0)
    told = to_text(explain(ledger, AGENT, 1))
    assert "rolled back in an experiment (thumbs_down is worse)" in told.splitlines()[0]
    assert "beside version 0, 50% of the people  rolled back: thumbs_down is worse" in told
    ledger.promote(AGENT, 1, actor="ann", reason="I looked", expected_champion=0, force=True)
    assert ledger.standing(AGENT).withdrawn == {}


def test_experiments_of_two_agents_know_nothing_of_each_other(store: FeedbackStore) -> None:
    book, mine = begin(store, 0.5)
    other = book.start("tea", champion=3, challenger=4, share=0.1, actor="test")
    for experiment in (mine, other):
        assert book.running(experiment.agent_id) == experiment
        assert book.history(experiment.agent_id) == [experiment]
        assert book.record(experiment, "continue", {"of": experiment.agent_id}) == 1
    assert [look.verdict for look in book.looks(other.experiment_id)] == [{"of": "tea"}]
    assert book.end(other, "stopped", "enough")
    assert (book.running("tea"), book.running(AGENT)) == (None, mine)
    assert book.all_running() == [mine]


def test_of_looks_that_change_nothing_few_are_kept(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, experiment = begin(store, 0.5)
    began, seconds = experiment.started_at, 0

    def soon() -> datetime:
        return began + timedelta(seconds=seconds)

    monkeypatch.setattr("rlhf_pipeline.experiment.book.now", soon)
    for seconds in range(0, 3600, 15):
        book.record(experiment, "continue", {"n": seconds})
    kept = book.looks(experiment.experiment_id)
    assert [look.look for look in kept] == list(range(1, len(kept) + 1))
    assert 10 <= len(kept) <= 14
    assert kept[-1].verdict == {"n": 3585}  # the newest is what status shows
    book.record(experiment, "roll_back", {})
    assert [look.action for look in book.looks(experiment.experiment_id)][-2:] == [
        "continue",
        "roll_back",
    ]


def test_looks_after_a_clock_was_set_back_are_kept(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, experiment = begin(store, 0.5)
    for minutes in (0, 1, 60, -300, -299, -240):
        moment = experiment.started_at + timedelta(minutes=minutes)
        monkeypatch.setattr("rlhf_pipeline.experiment.book.now", lambda moment=moment: moment)
        book.record(experiment, "continue", {"minutes": minutes})
    kept = [look.verdict["minutes"] for look in book.looks(experiment.experiment_id)]
    assert kept == [0, 60, -300, -240]  # the newest takes the place of one just before it


def test_a_silent_day_after_a_ramp_says_nothing_of_the_challenger(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    """Whom the ramp moved has the silent day alone in the new arm, the others a day before it."""
    book, experiment = begin(store, 0.1)
    meet(store, experiment, range(600), likes=(0.6, 0.6))
    book.ramp(experiment, 0.5)
    wider = book.running(AGENT)
    assert wider is not None
    meet(store, wider, range(600), likes=(0.6, 0.6), silent=True, seed=1)
    verdict, _ = look(book, ledger, wider, SETTINGS)
    assert verdict.differences["feedback_rate"].value == 0
    assert verdict.action == "continue"


def test_assignment_that_does_not_keep_the_share_is_invalid(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.5)
    planned = [
        n
        for n in range(1500)
        if arm_of(experiment.experiment_id, f"user-{n}", 0.5) == "challenger" or n % 2
    ]
    meet(store, experiment, planned, likes=(0.6, 0.6), answers=1)
    verdict, _ = look(book, ledger, experiment, SETTINGS)
    assert verdict.action == "invalid"
    assert champion(ledger) == 0


def test_one_experiment_at_a_time_and_two_watchers_end_it_once(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.1)
    with pytest.raises(ExperimentError, match="one experiment at a time, found version 1"):
        book.start(AGENT, champion=0, challenger=1, share=0.1, actor="test")
    with pytest.raises(ExperimentError, match="needs two versions"):
        book.start("other", champion=2, challenger=2, share=0.1, actor="test")
    with pytest.raises(ExperimentError, match="goes up only"):
        book.ramp(experiment, 0.05)
    assert book.ramp(experiment, 0.2)
    assert not book.ramp(experiment, 0.2)  # a watcher that looked before the step
    assert book.end(experiment, "stopped", "first")
    assert not book.end(experiment, "promoted", "second")
    assert [(e.state, e.reason) for e in book.history(AGENT)] == [("stopped", "first")]
    assert book.start(AGENT, champion=0, challenger=1, share=0.1, actor="test").state == "running"


def test_a_champion_that_changed_ends_the_experiment_and_a_killed_promotion_is_finished(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.5)
    ledger.promote(AGENT, 1, actor="experiment", reason="killed after this", expected_champion=0)
    _, done = look(book, ledger, experiment, SETTINGS)
    assert done == "version 1 is the champion"
    assert [e.state for e in book.history(AGENT)] == ["promoted"]
    begun = book.start(AGENT, champion=0, challenger=2, share=0.5, actor="test")
    _, done = look(book, ledger, begun, SETTINGS)
    assert "the champion is version 1 now" in done
    assert book.history(AGENT)[0].state == "stopped"


def test_a_champion_that_was_another_between_two_looks_ends_the_experiment(
    store: FeedbackStore, ledger: PromotionLedger, tmp_path: Path
) -> None:
    """The champion's arm then holds another version's answers, and votes on them."""
    another(ledger, tmp_path, passed=True)
    book, experiment = begin(store, 0.5)
    ledger.promote(AGENT, 1, actor="ann", reason="a night ago", expected_champion=0)
    book.end(experiment, "stopped", "version 1 is the champion")
    experiment = book.start(AGENT, champion=1, challenger=2, share=0.5, actor="test")
    ledger.reset_baseline(AGENT, actor="ann", reason="the champion is who it was")
    look(book, ledger, experiment, SETTINGS)
    assert book.running(AGENT) == experiment
    ledger.rollback(AGENT, actor="ann", reason="a try")
    ledger.promote(AGENT, 1, actor="ann", reason="no", expected_champion=0, force=True)
    meet(store, experiment, range(1200), likes=(0.55, 0.80))
    _, done = look(book, ledger, experiment, SETTINGS)
    assert done == "stopped: the champion was version 0 meanwhile"
    ended = book.history(AGENT)[0]
    assert (ended.state, ended.reason) == ("stopped", "the champion was version 0 meanwhile")
    assert champion(ledger) == 1


def test_a_champion_that_a_clock_ahead_dates_after_the_look_ends_no_experiment(
    store: FeedbackStore, ledger: PromotionLedger, tmp_path: Path
) -> None:
    another(ledger, tmp_path, passed=True)
    ahead = now() + timedelta(days=1)
    with patch("rlhf_pipeline.records.now", lambda: ahead):
        ledger.promote(AGENT, 1, actor="ann", reason="a try", expected_champion=0)
        ledger.rollback(AGENT, actor="ann", reason="no", expected_champion=1)
    book = ExperimentBook(store.database)
    experiment = book.start(AGENT, champion=0, challenger=2, share=0.5, actor="test")
    look(book, ledger, experiment, SETTINGS)
    assert book.running(AGENT) == experiment


def test_a_clock_that_was_set_back_ends_no_experiment_as_it_comes_to_older_promotions(
    store: FeedbackStore, ledger: PromotionLedger, tmp_path: Path
) -> None:
    another(ledger, tmp_path, passed=True)
    begun = now()
    clock = [begun + timedelta(days=1)]
    with patch("rlhf_pipeline.records.now", lambda: clock[0]):
        ledger.promote(AGENT, 1, actor="ann", reason="better", expected_champion=0)
        clock[0] += timedelta(hours=1)
        ledger.promote(AGENT, 2, actor="ann", reason="better", expected_champion=1)
        clock[0] += timedelta(hours=1)
        book = ExperimentBook(store.database)
        experiment = book.start(AGENT, champion=2, challenger=1, share=0.5, actor="test")
        for hour in (0, 24, 25, 26, 27):
            clock[0] = begun + timedelta(hours=hour)
            look(book, ledger, experiment, SETTINGS)
            again = book.running(AGENT)
            assert again is not None, hour
            experiment = again
        ledger.promote(AGENT, 1, actor="ann", reason="a try", expected_champion=2, force=True)
        ledger.promote(AGENT, 2, actor="ann", reason="no", expected_champion=1, force=True)
        _, done = look(book, ledger, experiment, SETTINGS)
    assert done == "stopped: the champion was version 1 meanwhile"


def test_an_experiment_of_an_earlier_release_began_under_the_promotion_before_it(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.5)
    ledger.promote(AGENT, 1, actor="ann", reason="a try", expected_champion=0)
    ledger.rollback(AGENT, actor="ann", reason="no", expected_champion=1)
    with store.database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE experiments DROP COLUMN began_under")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0011'")
    again = Database(store.database.url.render_as_string(hide_password=False))
    assert ExperimentBook(again).running(AGENT) == experiment
    again.close()
    _, done = look(book, ledger, experiment, SETTINGS)
    assert done == "stopped: the champion was version 1 meanwhile"


def test_an_experiment_begun_under_a_clock_ahead_counts_from_the_first_look(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    begun, ahead = now(), timedelta(days=20)
    with patch("rlhf_pipeline.experiment.book.now", lambda: begun + ahead):
        book, experiment = begin(store, 0.1)
    meet(store, experiment, range(60), likes=(0.6, 0.6))  # six or so meet the challenger
    settings = SETTINGS.model_copy(update={"users_per_step": 30, "days": 12})
    watched(book, replace(experiment, share_since=begun), (0, 13))

    def looked(days: float) -> str:
        running, at = book.running(AGENT), begun + timedelta(days=days)
        assert running is not None
        with (
            patch("rlhf_pipeline.experiment.live.now", lambda: at),
            patch("rlhf_pipeline.experiment.book.now", lambda: at),
        ):
            return look(book, ledger, running, settings)[1]

    assert "goes on at 10%" in looked(1)
    [dated] = book.history(AGENT)
    assert dated.started_at == dated.share_since == begun + timedelta(days=1)
    assert "goes on at 10%" in looked(3.9)
    assert looked(4) == "ramped from 10% to 50%"  # two steps share half the days
    looked(13.1)
    [ended] = book.history(AGENT)
    assert ended.state != "running"


def test_a_step_taken_under_a_clock_ahead_counts_from_the_first_look_and_the_rest_as_it_was(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.1)
    with patch("rlhf_pipeline.experiment.book.now", lambda: now() + timedelta(days=20)):
        book.ramp(experiment, 0.5)
    running = book.running(AGENT)
    assert running is not None
    at = running.share_since - live.CLOCKS_APART  # another machine's clock may be so far ahead
    for moment, since in ((at, running.share_since), (at - timedelta(seconds=1),) * 2):
        with patch("rlhf_pipeline.experiment.live.now", lambda moment=moment: moment):
            look(book, ledger, running, SETTINGS.model_copy(update={"days": 30}))
        assert book.running(AGENT) == replace(running, share_since=since)


def test_the_one_that_runs_is_shown_before_one_that_a_clock_ahead_dated(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    ahead = now() + timedelta(days=1)
    with patch("rlhf_pipeline.experiment.book.now", lambda: ahead):
        book, experiment = begin(store, 0.5)
        book.end(experiment, "stopped", "by hand")
    _, running = begin(store, 0.5)
    assert book.history(AGENT)[0] == running == overview(store, ledger, AGENT).experiment


def test_who_was_promoted_after_a_loss_that_a_clock_ahead_dated_is_withdrawn_no_more(
    store: FeedbackStore, ledger: PromotionLedger, tmp_path: Path
) -> None:
    ahead = now() + timedelta(days=1)
    with patch("rlhf_pipeline.experiment.book.now", lambda: ahead):
        book, experiment = begin(store, 0.5)
        book.end(experiment, "rolled_back", "worse")
    assert set(ledger.standing(AGENT).withdrawn) == {1}
    ledger.promote(AGENT, 1, actor="ann", reason="so", expected_champion=0, force=True)
    assert not ledger.standing(AGENT).withdrawn
    another(ledger, tmp_path, passed=True)
    ledger.promote(AGENT, 2, actor="ann", reason="passed", expected_champion=1)
    lost = book.start(AGENT, champion=2, challenger=0, share=0.5, actor="test")
    book.end(lost, "rolled_back", "worse")
    assert set(ledger.standing(AGENT).withdrawn) == {0}
    assert ledger.rollback(AGENT, actor="ann", reason="no").words == "rolled back from 2 to 1"


def test_trouble_ends_it_here_at_once_and_in_the_book(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    book, experiment = begin(store, 0.5)
    trials = Trials(store.database, lambda _: SETTINGS.model_copy(update={"trouble_answers": 10}))
    assert trials.running(AGENT) == experiment
    assert trials.running("another") is None
    for n in range(30):
        trials.tell(experiment, f"user-{n}", fell_back=False)
    trials.tell(experiment, "ann", fell_back=True)
    assert trials.running(AGENT) == experiment
    trials.tell(experiment, "bob", fell_back=True)
    assert trials.running(AGENT) is None
    [ended] = book.history(AGENT)
    assert ended.state == "rolled_back"
    assert ended.reason == (
        "the challenger failed at 2 of its latest 10 answers, and 2 of the latest 10 people; the "
        "champion at 0 of 0"
    )


def test_that_experiments_cannot_be_read_is_logged_as_it_begins_and_as_it_ends(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.serving.trials.LOOK_EVERY_SECONDS", 0.0)
    _, experiment = begin(store, 0.5)
    trials = Trials(store.database, lambda agent_id: SETTINGS)
    file = Path(str(store.database.url.database))
    aside = file.with_suffix(".aside")
    assert trials.running(AGENT) == experiment
    with capture_logs() as logs:
        file.rename(aside)
        assert [trials.running(AGENT) for _ in range(3)] == [None] * 3
        aside.rename(file)
        assert [trials.running(AGENT) for _ in range(3)] == [experiment] * 3
    assert [log["event"] for log in logs if log["event"].startswith("experiments")] == [
        "experiments cannot be read: all meet the champion now",
        "experiments can be read again",
    ]


def test_trouble_that_one_person_has_among_many_ends_nothing(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    """Whoever asks for what no answer may hold has every answer blocked; alone they are heard."""
    book, experiment = begin(store, 0.5)
    trials = Trials(store.database, lambda _: SETTINGS)
    for n in range(10):
        trials.tell(experiment, f"user-{n}", fell_back=False)
    for _ in range(3 * SETTINGS.trouble_answers):
        trials.tell(experiment, "mallory", fell_back=True)
    assert trials.running(AGENT) == experiment
    book.end(experiment, "stopped", "by hand")
    begun = book.start(AGENT, champion=0, challenger=1, share=0.5, actor="test")
    for _ in range(SETTINGS.trouble_answers):
        trials.tell(begun, "mallory", fell_back=True)
    assert book.history(AGENT)[0].state == "rolled_back"


def test_trouble_of_one_network_is_that_of_one(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    """Who asks for what no answer may hold, as somebody else each time."""
    book, experiment = begin(store, 0.5)
    trials = Trials(store.database, lambda _: SETTINGS)
    for n in range(10):
        trials.tell(experiment, f"user-{n}", fell_back=False, network=f"home {n}")
    for n in range(3 * SETTINGS.trouble_answers):
        trials.tell(experiment, f"mallory-{n}", fell_back=True, network="one line")
    assert book.history(AGENT)[0].state == "running"
    for n in range(SETTINGS.trouble_answers):
        trials.tell(experiment, f"user-{n}", fell_back=True, network=f"home {n}")
    assert book.history(AGENT)[0].state == "rolled_back"


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_a_challenger_that_fails_as_the_champion_does_is_left_alone(
    store: FeedbackStore, share: float
) -> None:
    """At 10,000 answers of each, by chance or by what people ask."""
    book, experiment = begin(store, 0.5)
    rng = random.Random(0)
    for _ in range(5):
        trials = Trials(store.database, lambda _: ExperimentSettings())
        for n in range(10_000):
            for arm in ("champion", "challenger"):
                fails = rng.random() < share
                trials.tell(experiment, f"{arm}-{n}", fell_back=fails, arm=arm)
        assert book.running(AGENT) == experiment
    for n in range(40):
        trials.tell(experiment, f"late-{n}", fell_back=True)
    assert book.history(AGENT)[0].reason.startswith("the challenger failed at ")


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("fails", [0.4, 1.0])
def test_what_is_away_for_both_arms_is_no_trouble_of_the_challengers(
    store: FeedbackStore, share: float, fails: float
) -> None:
    """After a long calm that says nothing of now."""
    book, experiment = begin(store, share)
    rng = random.Random(0)
    trials = Trials(store.database, lambda _: ExperimentSettings())

    def ask(requests: int, fails: float) -> None:
        for _ in range(requests):
            arm: Arm = "challenger" if rng.random() < share else "champion"
            fell_back = rng.random() < fails
            trials.tell(experiment, f"user-{rng.random()}", fell_back=fell_back, arm=arm)

    for _ in range(20):
        ask(2000, 0.01)
        ask(rng.randrange(20, 800), fails)
    assert book.running(AGENT) == experiment
    ask(2000, 0.01)
    for n in range(15):
        trials.tell(experiment, f"late-{n}", fell_back=True)
        trials.tell(experiment, f"also-{n}", fell_back=False, arm="champion")
    assert book.history(AGENT)[0].state == "rolled_back"


def test_what_the_champion_fails_one_person_at_counts_also_where_the_latest_answer_was_fine(
    store: FeedbackStore,
) -> None:
    book, experiment = begin(store, 0.5)
    trials = Trials(store.database, lambda _: ExperimentSettings())
    for n in range(500):
        trials.tell(experiment, "one", fell_back=n % 10 == 0, arm="champion")
    for n in range(50):
        trials.tell(experiment, "other", fell_back=n % 4 == 0)
    assert book.running(AGENT) == experiment
    for _ in range(50):
        trials.tell(experiment, "other", fell_back=True)
    assert book.history(AGENT)[0].state == "rolled_back"


def test_trouble_is_what_the_agents_own_recipe_says_and_one_that_has_gone_costs_no_answer(
    store: FeedbackStore, ledger: PromotionLedger, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "own.yaml", tmp_path, experiments={"trouble_answers": 7})
    store.ensure_agent("own", recipe=str(recipe))
    store.ensure_agent("astray", recipe=str(tmp_path / "gone.yaml"))
    settings = load_settings("tiny", {"state_dir": str(tmp_path)})
    gateway = Gateway(settings, store, ModelRegistry(ledger, "sqlite:////nowhere", tmp_path))
    assert gateway.trials.settings_of("own").trouble_answers == 7
    assert gateway.trials.settings_of("astray") == settings.experiments
    gateway.close()


def test_trouble_ends_it_here_also_while_the_book_cannot_be_written(
    store: FeedbackStore, ledger: PromotionLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.serving.trials.LOOK_EVERY_SECONDS", 0.0)
    book, experiment = begin(store, 0.5)
    trials = Trials(store.database, lambda _: SETTINGS.model_copy(update={"trouble_answers": 1}))
    assert trials.running(AGENT) == experiment

    def full(*_: object) -> bool:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(ExperimentBook, "end", full)
        trials.tell(experiment, "ann", fell_back=True)  # whose request is answered all the same
        assert trials.running(AGENT) is None
        assert book.running(AGENT) is not None
    assert trials.running(AGENT) is None
    [ended] = book.history(AGENT)
    assert (ended.state, ended.reason) == (
        "rolled_back",
        "the challenger failed at 1 of its latest 1 answers, and 1 of the latest 1 people; the "
        "champion at 0 of 0",
    )


def test_an_experiment_that_ends_elsewhere_is_over_here_within_seconds(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.serving.trials.LOOK_EVERY_SECONDS", 0.0)
    store.ensure_agent(AGENT)
    book, experiment = begin(store, 0.5)
    trials = Trials(store.database, lambda _: SETTINGS)
    found = trials.running(AGENT)
    assert found is not None
    assert trials.is_challenged(found, "ann") == (
        arm_of(experiment.experiment_id, "ann", 0.5) == "challenger"
    )
    book.end(experiment, "stopped", "by hand")
    assert trials.running(AGENT) is None


def test_where_the_book_cannot_be_read_everybody_meets_the_champion(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.ensure_agent(AGENT)
    begin(store, 0.5)
    trials = Trials(store.database, lambda _: SETTINGS)

    def broken(_: ExperimentBook) -> list[object]:
        raise OSError("disk on fire")

    monkeypatch.setattr(ExperimentBook, "all_running", broken)
    assert trials.running(AGENT) is None


def test_settings_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the ramp must rise"):
        load_settings("tiny", {"experiments": {"ramp": [0.5, 0.1]}})
    with pytest.raises(ConfigError, match="margins are for guardrails, found kindness"):
        load_settings("tiny", {"experiments": {"margins": {"kindness": 0.1}}})
    assert ExperimentSettings(margins={"slow": 0.2}).margins == {"slow": 0.2}
    told = str(ExperimentSettings.model_fields["margins"].description)
    assert all(f"{metric.name} {metric.margin:g}" in told for metric in GUARDRAILS)
