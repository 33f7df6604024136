"""A champion in its first days: gone back from where it fails, and only then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest

from rlhf_pipeline.config import Settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import HashMismatch
from rlhf_pipeline.experiment.watch import (
    NOT_ITS_FAULT,
    STILL_LOADING,
    USUAL,
    Failures,
    at_worst,
    failures,
    go_back_if_failing,
    is_trouble,
)
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.overview import overview
from rlhf_pipeline.records import Interaction, now, user_prompt, uuid7
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.serving.guardrails import Rail
from tests.experiment.world import AGENT, another, ledger_of_two

SETTINGS = Settings()
LONG_AGO = now() - timedelta(hours=3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeedbackStore]:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    yield FeedbackStore(database)
    database.close()


@pytest.fixture
def ledger(store: FeedbackStore, tmp_path: Path) -> PromotionLedger:
    """Version 1 was promoted a moment ago."""
    ledger = ledger_of_two(store, tmp_path)
    ledger.promote(AGENT, 1, actor="ann", reason="passed", expected_champion=0)
    return ledger


def promote_another(ledger: PromotionLedger, tmp_path: Path, *, after: int) -> None:
    """Make a version 2 that passed the gate champion."""
    second = another(ledger, tmp_path)
    ledger.promote(AGENT, second.version, actor="ann", reason="passed", expected_champion=after)


def looked(
    ledger: PromotionLedger, settings: Settings = SETTINGS, days: float = 0.0, sound: bool = True
) -> str | None:
    def folder_of(version: ModelVersion) -> Path:
        if not sound:
            raise HashMismatch("changed files")
        return version.path

    registry = cast("ModelRegistry", SimpleNamespace(ledger=ledger, folder_of=folder_of))
    return go_back_if_failing(registry, AGENT, settings, at=now() + timedelta(days=days))


def answers(
    store: FeedbackStore,
    count: int,
    *,
    failed: int = 0,
    rule: str = "HashMismatch",
    user: str | None = "user-{}",
    before: bool = False,
    arm: str = "champion",
    at: datetime | None = None,
) -> None:
    """Store so many answers of as many people, the last failed, now or before the promotion."""
    rows = []
    for n in range(count):
        fails = n >= count - failed
        events: dict[str, Any] = {"events": [{"arm": arm, "rule": rule}]} if fails else {}
        rows.append(
            Interaction(
                interaction_id=uuid7(),
                agent_id=AGENT,
                prompt=user_prompt("what now?"),
                completion="this",
                model_version=0 if fails or before else 1,
                created_at=(at or (LONG_AGO if before else now())) + timedelta(milliseconds=n),
                user_id=None if user is None else user.format(n),
                arm="baseline" if fails and arm == "champion" else arm,
                sampling=events,
            )
        )
    store.add_interactions(rows)


def test_a_champion_that_fails_after_its_promotion_is_gone_back_from(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    answers(store, 60, failed=2, before=True)
    answers(store, 30, failed=13)
    assert looked(ledger) is None
    answers(store, 1, failed=1, user="another")
    assert looked(ledger) == "rolled back from 1 to 0"
    entry = ledger.history(AGENT)[-1]
    assert (entry.action, entry.version, entry.actor) == ("rollback", 0, "watch")
    assert entry.reason == (
        "version 1 failed at 14 of its latest 31 answers, and at 14 of 31 people's latest "
        "(HashMismatch 14); the champions before it at 2 of 60"
    )
    assert looked(ledger) is None  # and no second step
    standing = ledger.standing(AGENT)
    assert standing.challenger is None
    assert 1 in standing.withdrawn


@pytest.mark.parametrize(
    "some",
    [
        {"count": 60},
        {"count": 60, "failed": 9},
        {"count": 60, "failed": 60, "rule": "unsafe_request"},
        {"count": 60, "failed": 60, "rule": STILL_LOADING},
        {"count": 60, "failed": 60, "arm": "challenger"},
        {"count": 60, "failed": 60, "arm": "baseline"},
        {"count": 60, "failed": 60, "before": True},
    ],
    ids=lambda some: str(some),
)
def test_what_is_no_failure_of_the_champion_moves_nothing(
    store: FeedbackStore, ledger: PromotionLedger, some: dict[str, Any]
) -> None:
    answers(store, **some)
    assert looked(ledger) is None
    assert len(ledger.history(AGENT)) == 2


def test_one_persons_questions_do_not_bring_it_down(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    answers(store, 20)
    answers(store, 30, failed=30, user="one")
    assert failures(store.database, AGENT, most=50).people_failed == 1
    assert looked(ledger) is None
    answers(store, 50, failed=50, user=None)  # who gave no name is one person, here the only one
    assert looked(ledger) == "rolled back from 1 to 0"


def test_trouble_that_the_champion_before_had_too_is_not_the_versions(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    answers(store, 50, failed=8, before=True, rule="time_out")
    answers(store, 50, failed=25, rule="time_out")
    assert looked(ledger) is None
    answers(store, 50, failed=26, rule="time_out")
    assert looked(ledger) == "rolled back from 1 to 0"


@pytest.mark.parametrize("users", [[None], ["one", "two", "three"]], ids=["unnamed", "three"])
def test_what_few_people_met_before_counts_also_where_their_latest_answers_were_fine(
    store: FeedbackStore, ledger: PromotionLedger, users: list[str | None]
) -> None:
    for user in users:
        answers(store, 6, failed=6, before=True, user=user, at=LONG_AGO - timedelta(hours=1))
        answers(store, 54, before=True, user=user)
    before = failures(store.database, AGENT, most=500)
    assert (before.people, before.people_failed) == (len(users), 0)
    assert before.usual == pytest.approx(0.1)
    answers(store, 50, failed=14, user=users[0])  # by chance, of many windows
    assert looked(ledger) is None
    answers(store, 50, failed=30, user=users[0])
    assert looked(ledger) == "rolled back from 1 to 0"


@pytest.mark.parametrize("days", [[0], [0, 1, 2], [0, 2, 3, 4], [1, 2, 3, 20, 21]], ids=str)
def test_trouble_of_every_day_is_not_the_versions_and_that_of_one_is_no_excuse(
    store: FeedbackStore, ledger: PromotionLedger, days: list[int]
) -> None:
    for day in range(7):
        at = now() - timedelta(days=day, hours=5)
        answers(store, 60, failed=12 * (day in days), before=True, at=at)
    answers(store, 500, before=True)
    is_usual = len({*days} & {*range(7)}) > 3
    answers(store, 50, failed=21)
    assert (looked(ledger) is None) == is_usual
    if is_usual:
        answers(store, 50, failed=22)
        assert looked(ledger) == "rolled back from 1 to 0"


def test_how_a_days_worst_went_is_told_of_the_days_on_which_people_asked(
    store: FeedbackStore,
) -> None:
    def worst(days: float = 7.0, most: int = 50) -> float:
        return at_worst(store.database, AGENT, [most], until=now(), days=days)[most]

    assert worst() == 0.0
    for day, failed in ((1, 20), (3, 10), (4, 30)):
        answers(store, 40, at=now() - timedelta(days=day, hours=2))
        answers(store, 60, failed=failed, at=now() - timedelta(days=day, hours=1))
    assert worst() == 0.4  # 0.2, 0.4 and 0.6
    assert worst(most=100) == 0.2
    assert worst(days=4.0) == 0.2  # 0.2 and 0.4: of fewer than three days the rest went well
    assert worst(days=2.0) == 0.0
    # One person whose questions fail, of a hundred who ask, does so once.
    answers(store, 50, failed=50, user="one", at=now() - timedelta(days=1, hours=3))
    answers(store, 50, failed=50, user="one", at=now() - timedelta(days=3, hours=3))
    assert worst() == 0.4
    # Where nobody gives a name, one asks.
    for day in range(10, 13):
        answers(store, 30, failed=25, user=None, at=now() - timedelta(days=day, hours=1))
    until = now() - timedelta(days=10)
    assert at_worst(store.database, AGENT, [50], until=until, days=3.0) == {50: 0.5}


@pytest.mark.parametrize("burst", [20, 40, 60])
@pytest.mark.parametrize("share", [0.4, 0.6, 1.0])
def test_who_fails_all_the_time_cannot_hide_behind_the_worst_minutes(
    store: FeedbackStore, ledger: PromotionLedger, burst: int, share: float
) -> None:
    """And where everything fails for minutes every day, that takes no sound version back."""
    for day in range(4):
        for hour in (9, 7):
            at = now() - timedelta(days=day, hours=hour)
            answers(store, 300, failed=burst * (hour == 9), before=True, at=at)
    answers(store, 500, before=True)
    answers(store, 300, failed=burst, user="noon-{}")
    assert looked(ledger) is None
    for n in range(10):
        at = now() + timedelta(milliseconds=400 + 100 * n)
        answers(store, 50, failed=int(50 * share), user=f"user-{n}-{{}}", at=at)
    assert looked(ledger) == "rolled back from 1 to 0"


def test_what_was_rolled_back_for_its_failures_excuses_no_later_version(
    store: FeedbackStore, ledger: PromotionLedger, tmp_path: Path
) -> None:
    answers(store, 30, before=True)
    answers(store, 50, failed=50)
    time.sleep(0.05)  # the last of them is dated as much ahead
    assert looked(ledger) == "rolled back from 1 to 0"
    answers(store, 15, user="again-{}")
    time.sleep(0.02)
    promote_another(ledger, tmp_path, after=0)
    answers(store, 50, failed=30, user="later-{}")
    assert looked(ledger) == "rolled back from 2 to 0"
    assert ledger.history(AGENT)[-1].reason.endswith("the champions before it at 0 of 45")


def test_what_failed_before_a_champion_that_met_nobody_counts(
    store: FeedbackStore, ledger: PromotionLedger, tmp_path: Path
) -> None:
    answers(store, 500, failed=75, before=True)
    promote_another(ledger, tmp_path, after=1)
    answers(store, 50, failed=13)
    assert looked(ledger) is None


def test_what_one_person_met_before_hides_no_failures(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    answers(store, 30, before=True)
    answers(store, 70, failed=70, before=True, user="one")
    answers(store, 50, failed=15)
    assert looked(ledger) == "rolled back from 1 to 0"


@pytest.mark.parametrize("usual", [0.0, 0.02, 0.05, 0.08, 0.12])
def test_a_version_that_fails_as_the_one_before_stays_and_one_far_worse_goes(usual: float) -> None:
    """Looked at after every answer for a week, each of another person."""
    rng, rules = np.random.default_rng(1), SETTINGS.experiments
    most = rules.trouble_answers

    def first_trouble(before: float, rate: float, count: int) -> int | None:
        known = float(rng.binomial(USUAL * most, before) / (USUAL * most))
        failed = np.cumsum(np.r_[np.zeros(most, int), rng.random(count) < rate])
        for n, found in enumerate((failed[most:] - failed[:-most]).tolist()):
            seen = min(n, most)
            latest = Failures(seen, found, seen, found, found / max(seen, 1), {})
            if is_trouble(latest, most=most, share=rules.trouble_share, usual=known):
                return n
        return None

    assert [first_trouble(usual, usual, 20_000) for _ in range(5)] == [None] * 5
    worse = 0.3 + 3 * usual
    assert all((first_trouble(usual, worse, 400) or 400) < 150 for _ in range(20))


def test_only_in_its_first_days_and_only_to_a_sound_version(
    store: FeedbackStore, ledger: PromotionLedger
) -> None:
    answers(store, 50, failed=50)
    assert looked(ledger, days=7.1) is None
    assert looked(ledger, Settings.model_validate({"promotion": {"watch_days": 0}})) is None
    far = {"serving": {"upstreams": {AGENT: {"url": "http://x/v1", "model": "m", "version": 1}}}}
    assert looked(ledger, Settings.model_validate(far)) is None
    with pytest.raises(HashMismatch):
        looked(ledger, sound=False)
    ledger.reset_baseline(AGENT, actor="ann", reason="it was promoted all the same")
    assert looked(ledger, days=6.9) == "rolled back from 1 to 0"


@pytest.mark.parametrize(("days", "goes"), [(8.1, True), (14.9, True), (15.1, False)])
def test_its_first_days_begin_with_the_first_answer_that_was_asked_of_it(
    store: FeedbackStore, ledger: PromotionLedger, days: float, goes: bool
) -> None:
    """It was promoted before a week in which nobody came."""
    promoted = now()
    answers(store, 5, arm="challenger", user="early-{}", at=promoted + timedelta(hours=1))
    answers(store, 2, failed=1, user="first-{}", at=promoted + timedelta(days=8))
    answers(store, 50, failed=50, at=promoted + timedelta(days=days, minutes=-5))
    assert looked(ledger, days=days) == ("rolled back from 1 to 0" if goes else None)


def test_one_that_was_promoted_while_a_clock_was_ahead_is_watched_from_the_first_look(
    store: FeedbackStore, tmp_path: Path
) -> None:
    ledger, moment = ledger_of_two(store, tmp_path), now()
    ahead = moment + timedelta(hours=2)
    answers(store, 60, failed=2, before=True)
    answers(store, 60, at=ahead - timedelta(minutes=1), failed=20, user="early-{}", before=True)
    with patch("rlhf_pipeline.records.now", lambda: ahead):
        ledger.promote(AGENT, 1, actor="ann", reason="passed", expected_champion=0)
    assert looked(ledger) is None
    answers(store, 50, failed=13)
    later = 1 / 24
    assert looked(ledger, days=later) is None
    answers(store, 1, failed=1, user="another")
    assert looked(ledger, days=later) == "rolled back from 1 to 0"
    assert ledger.history(AGENT)[-1].reason.endswith("the champions before it at 2 of 60")


@pytest.mark.parametrize("ahead", [timedelta(minutes=5), timedelta(days=1)])
def test_answers_that_a_clock_dated_ahead_hide_no_failures(
    store: FeedbackStore, ledger: PromotionLedger, ahead: timedelta
) -> None:
    answers(store, 60, failed=2, before=True)
    answers(store, 60, user="early-{}", at=now() + ahead)
    answers(store, 50, failed=50)
    found = overview(store, ledger, AGENT).failures
    assert found is not None
    assert (found.answers, found.failed) == (50, 50)
    assert looked(ledger) == "rolled back from 1 to 0"


def test_a_champion_promoted_ahead_of_the_clock_is_seen_to_fail_from_the_first_look(
    store: FeedbackStore, tmp_path: Path
) -> None:
    ledger, ahead = ledger_of_two(store, tmp_path), now() + timedelta(days=1)
    with patch("rlhf_pipeline.records.now", lambda: ahead):
        ledger.promote(AGENT, 1, actor="ann", reason="passed", expected_champion=0)
    answers(store, 50, before=True)
    found = overview(store, ledger, AGENT).failures
    assert found is not None
    assert found.answers == 0  # all were by the champion before it, as far as anybody can tell
    answers(store, 30, failed=30)
    with patch("rlhf_pipeline.overview.now", lambda: now() + timedelta(minutes=1)):
        found = overview(store, ledger, AGENT).failures
    assert found is not None
    assert (found.answers, found.failed) == (30, 30)


def test_version_0_has_nothing_to_go_back_to(store: FeedbackStore, tmp_path: Path) -> None:
    ledger = ledger_of_two(store, tmp_path)
    answers(store, 50, failed=50)
    assert looked(ledger) is None


def test_the_rules_that_say_nothing_of_a_champion_are_those_of_the_service() -> None:
    assert {Rail.unsafe_request, STILL_LOADING} == NOT_ITS_FAULT
