"""Decisions: every outcome from numbers made for it, in the order that safety asks for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhf_pipeline.experiment.decision import (
    GUARDRAILS,
    PRIMARY,
    Arms,
    Bounds,
    Verdict,
    decide,
)
from rlhf_pipeline.experiment.sequences import RampStep, Sample, difference

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
def test_surely_much_worse_on_any_metric_rolls_back(metric: object) -> None:
    assert isinstance(metric, type(PRIMARY))
    worse, better = (0.3, 0.7) if metric.better == "higher" else (0.7, 0.3)
    found = arms((0.85, 0.70)) | {metric.name: Arms(arm(worse), arm(better))}
    verdict = decide(found, EVEN)
    assert verdict.action == "roll_back"
    assert verdict.reasons[0].startswith(metric.name)
    assert verdict.reasons[0].endswith(f", allowed {f'-{metric.margin}' if metric.margin else 0}")


def test_a_verdict_that_goes_on_says_first_that_satisfaction_is_open() -> None:
    verdict = decide(arms((0.72, 0.70), thumbs_down=(0.12, 0.10)), EVEN)
    low = verdict.differences[PRIMARY.name].low
    assert verdict.action == "continue"
    assert verdict.reasons[0] == f"satisfaction is not surely better yet: at least {low:+.3f}"
    sure = decide(arms((0.85, 0.70), thumbs_down=(0.12, 0.10)), EVEN)
    assert not any(reason.startswith("satisfaction") for reason in sure.reasons)


def test_all_metrics_together_roll_back_as_seldom_as_asked_and_a_promotion_is_not_shared() -> None:
    """Any of eight may roll back, so each has an eighth; one alone, the primary, promotes."""
    found = arms((0.72, 0.70))[PRIMARY.name]
    sure = Bounds(promote=0.05, roll_back=0.08)
    each = difference(
        found.challenger, found.champion, alpha_low=0.05, alpha_high=0.01, tuned_for=600
    )
    assert len(GUARDRAILS) == 7
    assert decide(arms((0.72, 0.70)), EVEN, bounds=sure).differences[PRIMARY.name] == each


def test_numbers_of_a_broken_assignment_are_not_believed() -> None:
    verdict = decide(arms((0.85, 0.70)), [RampStep(0.5, 1300, 1000)])
    assert verdict.action == "invalid"
    assert "1300 of 2300" in verdict.reasons[0]
    steps = [RampStep(0.005, 30, 1000), RampStep(0.5, 900, 600)]
    assert "users where 0.5%, 50% was planned" in decide(arms(), steps).reasons[0]


def test_out_of_time_keeps_the_champion_unless_the_numbers_suffice() -> None:
    assert decide(arms(), EVEN, timed_out=True).action == "time_out"
    assert decide(arms((0.85, 0.70)), EVEN, timed_out=True).action == "promote"
    assert decide(arms(), EVEN).action == "continue"


def test_out_of_time_says_what_is_open_and_nothing_that_is_not() -> None:
    better = decide(arms((0.85, 0.70), thumbs_down=(0.12, 0.10)), EVEN, timed_out=True)
    assert better.action == "time_out"
    assert better.differences[PRIMARY.name].low > 0
    [words, why] = better.reasons
    assert words == "time is up"
    assert why.startswith("thumbs_down may be worse by 0.0")
    assert why.endswith(", allowed 0.05")
    equal = decide(arms(), EVEN, timed_out=True)
    assert equal.reasons[1].startswith("satisfaction is not surely better yet: at least -0.")


def test_too_few_users_are_told_of_once_and_no_bound_is_infinite_in_words() -> None:
    everybody = arms(users=3) | {PRIMARY.name: Arms(arm(0.7, 2), arm(0.7, 1))}
    few = (
        "too few users yet: satisfaction is known of 2 of the challenger's and 1 of the "
        "champion's, and 100 of either are needed"
    )
    assert decide(everybody, []).reasons == (few,)
    assert decide(everybody, [], timed_out=True).reasons == ("time is up", few)
    voters = arms(thumbs_down=(0.12, 0.10)) | {PRIMARY.name: everybody[PRIMARY.name]}
    [first, second] = decide(voters, EVEN).reasons
    assert first == few
    assert second.startswith("thumbs_down may be worse by 0.0")


def test_it_ends_where_the_users_to_come_will_hardly_change_it() -> None:
    verdict = decide(arms((0.70, 0.70)), EVEN, growth=1.3)
    assert verdict.action == "give_up"
    [why] = verdict.reasons
    assert why.startswith("satisfaction is +0.000 by 1000 and 1000 users; as people come, it will")
    assert "be 1300 and 1300 when time is up" in why
    chance = float(why.rpartition(" is ")[2].split("%")[0])
    assert 0 <= chance < 100 * Bounds().give_up
    assert decide(arms(), EVEN).action == "continue"  # nobody can say who is to come
    assert decide(arms(), EVEN, growth=50).action == "continue"
    assert decide(arms((0.75, 0.70)), EVEN, growth=2).action == "continue"
    assert decide(arms(), EVEN, growth=1.3, bounds=Bounds(give_up=0)).action == "continue"
    assert decide(arms(), EVEN, growth=1, timed_out=True).action == "time_out"
    assert decide(arms((0.85, 0.70)), EVEN, growth=1.01).action == "promote"


def test_it_ends_where_too_few_will_have_come_for_any_verdict() -> None:
    verdict = decide(arms((0.9, 0.5), users=30), [], growth=3)
    assert verdict.action == "give_up"
    assert verdict.reasons[0].endswith(
        "be 90 and 90 when time is up, and 100 in either arm are needed"
    )
    assert decide(arms((0.5, 0.9), users=30), [], growth=4).action == "continue"


def test_a_guardrail_that_will_hardly_be_within_its_margin_ends_it_by_name() -> None:
    verdict = decide(arms((0.85, 0.70), feedback_rate=(0.50, 0.58)), EVEN, growth=1.3)
    assert verdict.action == "give_up"
    assert verdict.reasons[0].startswith("feedback_rate is -0.080 by 1000 and 1000 users")
    assert "surely no more than 0.1 worse" in verdict.reasons[0]
    turned = decide(arms((0.85, 0.70), thumbs_down=(0.140, 0.100)), EVEN, growth=1.2)
    assert turned.action == "give_up"
    assert turned.reasons[0].startswith("thumbs_down is -0.040")


def test_a_sure_margin_is_no_obstacle() -> None:
    """A guardrail a little worse than the champion's, but surely within its margin."""
    many = arms((0.80, 0.70), users=40_000, thumbs_down=(0.11, 0.10))
    strict = [m if m.name != "thumbs_down" else replace(m, margin=0.001) for m in GUARDRAILS]
    assert decide(many, EVEN, guardrails=strict).action != "promote"
    verdict = decide(many, EVEN)
    assert verdict.differences["thumbs_down"].value == pytest.approx(-0.01)
    assert -0.05 < verdict.differences["thumbs_down"].high < 0  # surely worse, and no obstacle
    assert verdict.action == "promote"
    assert decide(arms(users=40_000, thumbs_down=(0.11, 0.10)), EVEN).action == "continue"


def test_a_margin_surely_passed_rolls_back_however_content_people_are() -> None:
    many = arms((0.80, 0.70), users=40_000, thumbs_down=(0.17, 0.10))
    verdict = decide(many, EVEN)
    assert verdict.action == "roll_back"
    assert verdict.reasons[0].startswith("thumbs_down (interactions with a thumb down) is worse")
    assert verdict.reasons[0].endswith("allowed -0.05")
    roomier = [m if m.name != "thumbs_down" else replace(m, margin=0.1) for m in GUARDRAILS]
    assert decide(many, EVEN, guardrails=roomier).action == "promote"


def test_a_verdict_is_json_without_infinities() -> None:
    few: Verdict = decide(arms(users=3), [])
    assert few.action == "continue"
    assert few.to_json()["differences"]["satisfaction"]["low"] is None


@pytest.mark.parametrize("empty", ["challenger", "champion"])
def test_a_difference_from_nobody_is_unknown(empty: str) -> None:
    met = Arms(arm(0.8, 40), arm(0.8, 40))
    found = arms(users=40) | {PRIMARY.name: replace(met, **{empty: Sample.of([])})}
    told = decide(found, []).to_json()["differences"]
    assert told["satisfaction"]["value"] is None
    assert told["thumbs_down"]["value"] == 0.0
    [why] = decide(found, [], growth=2).reasons
    assert why.startswith("satisfaction is unknown by ")
    assert "0.8" not in why


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


def ended(seed: int, lift: float, bounds: Bounds) -> tuple[str, int]:
    """Return how an experiment of at most 600 users per arm ends, and with how many."""
    rng = np.random.default_rng(seed)
    own = [rng.beta(rate * 2.33, (1 - rate) * 2.33, 600) for rate in (0.7 + lift, 0.7)]
    rated = [(rng.random((600, 5)) < rates[:, None]).mean(1) for rates in own]
    for users in range(150, 601, 50):
        found = arms() | {PRIMARY.name: Arms(*(Sample.of(r[:users]) for r in rated))}
        over = users == 600
        action = decide(
            found, EVEN, bounds=bounds, timed_out=over, growth=None if over else 600 / users
        ).action
        if action != "continue":
            return action, users
    raise AssertionError("an experiment that is out of time ends")


def test_giving_up_spares_equals_a_third_of_their_time_and_costs_hardly_a_better_one() -> None:
    """The benchmark plays more; 5 points are what 600 users find in some, not in all."""
    whole = Bounds(give_up=0)
    equal = [ended(seed, 0.0, Bounds())[1] for seed in range(60)]
    assert np.median(equal) <= 400
    assert np.median([ended(seed, 0.0, whole)[1] for seed in range(10)]) == 600
    kept, lost = 0, 0
    for seed in range(60):
        found = ended(seed, 0.05, whole)[0] == "promote"
        still = ended(seed, 0.05, Bounds())[0] == "promote"
        assert found or not still  # nobody is promoted by giving up
        kept += still
        lost += found and not still
    assert kept >= 25
    assert lost <= 3
