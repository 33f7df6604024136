"""What is worth a look, and what is not yet."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.alerts import alerts_about, alerts_of, disk_alerts, name_alerts
from rlhf_pipeline.config import AlertSettings, Settings
from rlhf_pipeline.experiment.book import Experiment
from rlhf_pipeline.experiment.watch import Failures
from rlhf_pipeline.feedback.claims import Claim
from rlhf_pipeline.overview import Overview, Standing, Votes
from rlhf_pipeline.registry.ledger import ModelVersion

AT = datetime(2026, 5, 1, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
VOTES = Votes(500, [AT.date()], {"thumbs": [500]}, 200, 0.05, AT - HOUR)


def standing(version: int, passed: bool | None) -> Standing:
    return Standing(version, f"v{version}", AT, (), passed, 0, None, None, None, None)


def turn(began: datetime) -> Claim:
    return Claim(1, "tea", "f", 100, 1, "done", "run", "sensor", began, began, began)


CALM = Overview(
    agent_id="tea",
    paused=None,
    votes=VOTES,
    standings=[standing(2, False), standing(1, True), standing(0, None)],
    attempts=[],
    last_turn=turn(AT - 60 * DAY),
    waiting_votes=5000,
    experiment=None,
    looks=(),
    troubles={},
    waits=None,
    drift={"drifted": False, "psi": {"prompt_characters": 0.01}},
    enough_since=AT - 6 * DAY,
)
ENDED = Experiment("e", "tea", 1, 2, "invalid", "look at assignment", 0.5, AT, "me", AT, AT, 1)
RUNNING = replace(ENDED, state="running", ended_at=None)
PSI = {"topic": 0.4, "rating": 0.6}  # of few ratings, so within chance
WAITING = [
    replace(standing(2, True), roles=("challenger",), created_at=AT - HOUR),
    standing(1, True),
]
REFUSED = [standing(n, False) for n in (4, 3, 2)] + [standing(1, True)]


def test_of_an_agent_that_nobody_can_look_at_the_kind_of_failure_alone_is_told() -> None:
    def looked(_: str, __: Settings) -> Overview:
        raise ValueError("what somebody wrote")

    [alert] = alerts_about("tea", lambda _: Settings(), looked, at=AT)
    assert (alert.name, alert.agent_id) == ("not_looked_at", "tea")
    assert alert.words.endswith("looked at: ValueError; the log says more")


def names(overview: Overview) -> list[str]:
    return [alert.name for alert in alerts_of(overview, Settings(), at=AT)]


def test_a_calm_agent_has_none() -> None:
    assert names(CALM) == []


@pytest.mark.parametrize(
    ("name", "changes", "nearly"),
    [
        ("one_network", {"network_share": 0.51}, {"network_share": 0.5}),
        (
            "feedback_dried_up",
            {"votes": replace(VOTES, newest_at=AT - 49 * HOUR)},
            {"votes": replace(VOTES, newest_at=AT - 47 * HOUR)},
        ),
        (
            "few_people_vote_most",
            {"votes": replace(VOTES, top_share=0.11)},
            {"votes": replace(VOTES, top_share=0.11, voters=99)},
        ),
        (
            "drift",
            {"drift": {"drifted": True, "psi": PSI, "features": ["topic"]}},
            {"drift": {"drifted": False, "psi": PSI, "features": []}},
        ),
        ("gate_refuses", {"standings": REFUSED}, {"standings": REFUSED[1:]}),
        (
            "reward_model_stale",
            {"enough_since": AT - 8 * DAY},
            {"enough_since": AT - 8 * DAY, "waiting_votes": 99},
        ),
        (
            "version_waits",
            {"standings": WAITING},
            {"standings": [replace(WAITING[0], created_at=AT - HOUR / 10), *WAITING[1:]]},
        ),
        (
            "experiment_imbalance",
            {"experiment": ENDED},
            {"experiment": replace(ENDED, state="stopped")},
        ),
    ],
)
def test_each_begins_at_its_limit(
    name: str, changes: dict[str, Any], nearly: dict[str, Any]
) -> None:
    assert names(replace(CALM, **changes)) == [name]
    assert names(replace(CALM, **nearly)) == []


def test_where_everybody_counts_one_network_is_nothing_to_look_at() -> None:
    everybody = Settings.model_validate({"experiments": {"people_per_network": None}})
    assert alerts_of(replace(CALM, network_share=1.0), everybody, at=AT) == []


def test_a_version_that_waits_comes_with_the_way_to_decide() -> None:
    [alert] = alerts_of(replace(CALM, standings=WAITING), Settings(), at=AT)
    assert "`rlhf promote 2 --agent tea`, or /candidates/tea" in alert.words
    assert names(replace(CALM, standings=WAITING, experiment=RUNNING)) == []  # people decide
    assert names(replace(CALM, standings=WAITING, experiment=replace(RUNNING, challenger=1))) == [
        "version_waits"
    ]


def test_a_moment_that_a_clock_far_ahead_dated_keeps_no_alert_back() -> None:
    for ahead, told in ((HOUR / 2, []), (20 * DAY, ["version_waits"])):
        waiting = replace(WAITING[0], created_at=AT + ahead)
        assert names(replace(CALM, standings=[waiting, *WAITING[1:]])) == told
    old = replace(CALM, enough_since=AT - 14 * DAY)
    for ahead, told in ((HOUR / 2, []), (20 * DAY, ["reward_model_stale"])):
        ended = replace(RUNNING, state="stopped", ended_at=AT + ahead)
        assert names(replace(old, experiment=ended)) == told


def test_no_turn_is_overdue_that_an_experiment_keeps_from_starting() -> None:
    old = replace(CALM, enough_since=AT - 14 * DAY)
    assert names(replace(old, experiment=RUNNING)) == []
    lately = replace(RUNNING, state="stopped", ended_at=AT - 6 * DAY)
    assert names(replace(old, experiment=lately)) == []
    long_ago = replace(lately, ended_at=AT - 8 * DAY)
    assert names(replace(old, experiment=long_ago)) == ["reward_model_stale"]


def test_the_drift_that_is_told_is_what_drifted() -> None:
    drifted: dict[str, Any] = {"drifted": True, "psi": PSI, "features": ["topic"]}
    drifted["limits"] = {"topic": 0.2, "rating": 0.75}
    [alert] = alerts_of(replace(CALM, drift=drifted), Settings(), at=AT)
    assert "most in topic (PSI 0.40, above 0.20)" in alert.words
    del drifted["features"], drifted["limits"]  # as an early release wrote it
    [alert] = alerts_of(replace(CALM, drift=drifted), Settings(), at=AT)
    assert "most in rating (PSI 0.60)" in alert.words


def test_what_cannot_be_told_is_no_alert() -> None:
    silent = Votes(0, [], {}, 0, None, None)
    old = replace(VOTES, by_kind={}, newest_at=AT - 90 * DAY)  # given up long ago
    unknown = replace(
        CALM, votes=silent, standings=[], last_turn=None, drift=None, enough_since=None
    )
    assert names(unknown) == names(replace(CALM, votes=old)) == []
    overdue = replace(CALM, enough_since=AT - 30 * DAY)
    assert names(replace(overdue, paused="by a person")) == []
    off = Settings(training={"enabled": False})
    assert alerts_of(overdue, off, at=AT) == []


def test_a_first_turn_that_never_begins_is_told() -> None:
    stuck = replace(CALM, last_turn=None, standings=[], enough_since=AT - 9 * DAY)
    [alert] = alerts_of(stuck, Settings(), at=AT)
    assert alert.name == "reward_model_stale"
    assert "5,000 votes wait, enough for a turn for 9 days; the last one began never" in alert.words


def test_a_full_disk_is_everybodys(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    assert disk_alerts(settings) == []
    greedy = settings.model_copy(update={"alerts": AlertSettings(disk_gib=10**6)})
    [alert] = disk_alerts(greedy)
    assert alert.name == "disk_nearly_full"
    assert "`rlhf prune`, which needs a few MiB itself" in alert.words


def test_a_champion_that_fails_is_told_of_however_old_it_is() -> None:
    well = Failures(50, 9, 40, 20, 0.2, {"time_out": 9})
    assert names(replace(CALM, failures=well)) == []
    assert names(replace(CALM, failures=replace(well, failed=30, people_failed=7))) == []
    badly = replace(CALM, failures=replace(well, failed=30))
    [alert] = alerts_of(badly, Settings(), at=AT)
    assert alert.name == "champion_fails"
    assert "failed at 30 of its latest 50 answers" in alert.words
    assert "`rlhf rollback --agent tea --reason WHY`" in alert.words


def test_a_champion_whose_files_are_gone_is_told_of(tmp_path: Path) -> None:
    made = tmp_path / "policy"
    champion = ModelVersion("tea", 2, "v90", made, {}, {}, None, None, AT)
    settings, lost = Settings(state_dir=tmp_path / "state"), replace(CALM, champion=champion)
    [alert] = alerts_of(lost, settings, at=AT)
    assert alert.name == "champion_lost"
    assert f"version 2, the champion, are not in {made}: " in alert.words
    assert "the baseline answers instead" in alert.words
    assert "`rlhf rollback --agent tea --reason WHY`" in alert.words
    for place in (made, settings.mlflow_folder / "cache" / "rlhf-tea" / "2"):
        place.mkdir(parents=True)
        assert alerts_of(lost, settings, at=AT) == []
        place.rmdir()


def test_a_champion_whom_people_like_less_than_the_one_before_is_told_of() -> None:
    now = replace(standing(2, True), roles=("champion",), votes=60, satisfaction=0.6, margin=0.05)
    before = replace(standing(1, True), roles=("previous",), satisfaction=0.7, margin=0.04)
    [alert] = alerts_of(replace(CALM, standings=[now, before]), Settings(), at=AT)
    assert alert.name == "liked_less"
    assert "version 2 (0.60 ± 0.05, 60 of them) less than version 1 before it (0.70" in alert.words
    assert "`rlhf rollback --agent tea --reason WHY`" in alert.words
    for other in (replace(before, satisfaction=0.68), replace(before, satisfaction=None)):
        assert names(replace(CALM, standings=[now, other])) == []


@pytest.mark.parametrize(
    ("older", "name", "alike"),
    [
        ("support", "suport", True),
        ("support", "suppport", True),
        ("support", "suppotr", True),
        ("support", "supporf", True),
        ("support", "Support", True),
        ("shop-helpdesk", "shop_helpdesk", True),
        ("shop-helpdesk", "shophelpdesk", True),
        ("shop-helpdesk", "shop-helpdesc", True),
        ("support", "sports", False),
        ("support", "support-eu", False),
        ("support-eu", "support-us", False),
        ("shop-a", "shop-b", False),
        ("shop-en", "shop-de", False),
        ("shop1", "shop2", False),
        ("tenant-1001", "tenant-1002", False),
        ("tenant1", "tenant12", False),
        ("tea", "ten", False),
        ("milk-tea", "mint-tea", False),
    ],
)
def test_a_name_that_may_be_a_slip_is_told(older: str, name: str, alike: bool) -> None:
    found = name_alerts(["other", older, name])
    assert [(alert.name, alert.agent_id) for alert in found] == [("name_alike", name)] * alike
    assert all(f"nearly like {older} and kept apart" in alert.words for alert in found)
    # Of two the older one is what it is.
    assert [alert.agent_id for alert in name_alerts([name, older])] == [older] * alike
