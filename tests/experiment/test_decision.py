"""Decisions: every outcome from numbers made for it, in the order that safety asks for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhf_pipeline.experiment.decision import GUARDRAILS, PRIMARY, Arms, Verdict, decide
from rlhf_pipeline.experiment.sequences import RampStep, Sample

EVEN = [RampStep(0.5, 1000, 1000)]


def arm(mean: float, users: int = 1000) -> Sample:
    return Sample(users, mean, mean * (1 - mean))


def arms(
    primary: tuple[float, float] = (0.7, 0.7), users: int = 1000, **guardrails: tuple[float, float]
) -> dict[str, Arms]:
    """Challenger and champion means; guardrails not named are the same in both arms."""
    means = {PRIMARY.name: primary, **{m.name: (0.02, 0.02) for m in GUARDRAILS}, **guardrails}
    return {name: Arms(arm(a, users), arm(b, users)) for name, (a, b) in means.items()}


def test_a_surely_better_challenger_is_promoted_with_the_number() -> None:
    verdict = decide(arms((0.85, 0.70)), EVEN)
    assert verdict.action == "promote"
    assert "satisfaction is better: at least +0." in verdict.reasons[0]


def test_better_on_the_primary_but_perhaps_worse_elsewhere_goes_on() -> None:
    verdict = decide(arms((0.85, 0.70), thumbs_down=(0.12, 0.10)), EVEN)
    assert verdict.action == "continue"
    assert any(reason.startswith("thumbs_down may be worse") for reason in verdict.reasons)


@pytest.mark.parametrize("metric", [PRIMARY, *GUARDRAILS], ids=lambda m: m.name)
def test_surely_worse_on_any_metric_rolls_back(metric: object) -> None:
    assert isinstance(metric, type(PRIMARY))
    worse, better = (0.3, 0.7) if metric.better == "higher" else (0.7, 0.3)
    found = arms((0.85, 0.70)) | {metric.name: Arms(arm(worse), arm(better))}
    verdict = decide(found, EVEN)
    assert verdict.action == "roll_back"
    assert verdict.reasons[0].startswith(metric.name)


def test_a_hard_trigger_needs_no_statistics() -> None:
    verdict = decide(arms((0.99, 0.10)), EVEN, triggers=["5 of the last 5 answers failed"])
    assert verdict.action == "roll_back"
    assert verdict.reasons == ("5 of the last 5 answers failed",)


def test_numbers_of_a_broken_assignment_are_not_believed() -> None:
    verdict = decide(arms((0.85, 0.70)), [RampStep(0.5, 1300, 1000)])
    assert verdict.action == "invalid"
    assert "1300 of 2300" in verdict.reasons[0]


def test_out_of_time_keeps_the_champion_unless_the_numbers_suffice() -> None:
    assert decide(arms(), EVEN, timed_out=True).action == "time_out"
    assert decide(arms((0.85, 0.70)), EVEN, timed_out=True).action == "promote"
    assert decide(arms(), EVEN).action == "continue"


def test_a_sure_margin_is_no_obstacle() -> None:
    """A guardrail a little worse than the champion's, but surely within its margin."""
    many = arms((0.80, 0.70), users=40_000, thumbs_down=(0.11, 0.10))
    strict = [m if m.name != "thumbs_down" else replace(m, margin=0.001) for m in GUARDRAILS]
    assert decide(many, EVEN, guardrails=strict).action != "promote"
    verdict = decide(many, EVEN)
    assert verdict.differences["thumbs_down"].value == pytest.approx(-0.01)
    assert verdict.action == "roll_back"  # surely worse at all is reason enough to leave


def test_a_verdict_is_json_without_infinities() -> None:
    few: Verdict = decide(arms(users=3), [])
    assert few.action == "continue"
    assert few.to_json()["differences"]["satisfaction"]["low"] is None


def test_looking_all_the_time_promotes_the_same_model_rarely() -> None:
    """A/A with users who agree with themselves; the benchmark plays 2,000 of these."""
    rng = np.random.default_rng(1)
    promoted = rolled = 0
    for _ in range(60):
        own = [rng.beta(0.7 * 2.33, 0.3 * 2.33, 600) for _ in range(2)]
        rated = [(rng.random((600, 5)) < rates[:, None]).mean(1) for rates in own]
        for users in range(50, 601, 50):
            found = arms() | {PRIMARY.name: Arms(*(Sample.of(r[:users]) for r in rated))}
            action = decide(found, EVEN).action
            promoted += action == "promote"
            rolled += action == "roll_back"
            if action != "continue":
                break
    assert promoted <= 8  # 5 % of 60 and three standard errors
    assert rolled <= 3
