"""Sequences: the arithmetic by hand, by another way, and by playing many looks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from rlhf_pipeline.experiment.sequences import (
    FEWEST,
    SPREAD,
    RampStep,
    Sample,
    boundary,
    chance_to_pass,
    difference,
    sample_ratio_evidence,
)


def test_a_sample_is_what_statistics_says() -> None:
    assert Sample.of([1.0, 0.0, 1.0, 1.0]) == Sample(4, 0.75, 0.25)
    assert Sample.of([0.5]) == Sample(1, 0.5, 0.0)
    assert Sample.of([]) == Sample(0, 0.0, 0.0)


def test_the_boundary_keeps_its_promise_at_all_looks_together() -> None:
    """Unit normals, looked at after each of 5,000: strays in at most alpha of the walks."""
    rng = np.random.default_rng(0)
    n = np.arange(1, 5001)
    limits = np.array([boundary(int(i), 0.05, 600) for i in n])
    strayed = sum(
        bool((rng.standard_normal(5000).cumsum() / n > limits).any()) for _ in range(1000)
    )
    assert strayed <= 50 + 3 * math.sqrt(1000 * 0.05 * 0.95)
    assert strayed >= 5  # and is no wider than it needs to be by far


def test_the_boundary_is_the_mixture_s_root() -> None:
    """At the boundary the one-sided normal mixture of likelihood ratios is at least 1/alpha."""
    alpha, tuned, n = 0.02, 400, 300
    rho2 = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1) / tuned

    def mixture(mean: float) -> float:
        def integrand(shift: float) -> float:
            prior = 2 * math.exp(-(shift**2) / (2 * rho2)) / math.sqrt(2 * math.pi * rho2)
            return prior * math.exp(n * (shift * mean - shift**2 / 2))

        return float(quad(integrand, 0, 2)[0])

    assert mixture(boundary(n, alpha, tuned)) >= 1 / alpha
    assert mixture(0.9 * boundary(n, alpha, tuned)) < 1 / alpha


def test_a_difference_needs_users_in_both_arms() -> None:
    many, few = Sample(5000, 0.9, 0.09), Sample(FEWEST - 1, 0.1, 0.09)
    found = difference(many, few, alpha_low=0.05, alpha_high=0.05, tuned_for=600)
    assert found.value == pytest.approx(0.8)
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_users_who_all_agree_give_no_certainty() -> None:
    good, bad = Sample(FEWEST, 1.0, 0.0), Sample.of([1.0] * (FEWEST - 3) + [0.0] * 3)
    found = difference(good, bad, alpha_low=0.05, alpha_high=0.05, tuned_for=600)
    assert found.low < 0


def test_the_smaller_arm_has_pretended_users_with_a_fair_coins_variance() -> None:
    def radius(variance: float, more: int) -> float:
        arms = Sample(100, 0.5, variance), Sample(more, 0.5, variance)
        return -difference(*arms, alpha_low=0.05, alpha_high=0.00125, tuned_for=600).low

    # Of 112 users 12 have the variance 1/4, so the mean's is 12 * 1/4 / 112 / 100, in one arm.
    for more in (100, 900):
        pretended = (100 + more) * 12 * 0.25 / 112 / 100
        assert radius(0.0, more) == pytest.approx(
            math.sqrt(pretended) * boundary(100 + more, 0.05, 600)
        )
    # As all others have it, it is what it would be without them.
    assert radius(0.25, 100) == pytest.approx(
        math.sqrt(200 * 2 * 0.25 / 100) * boundary(200, 0.05, 600)
    )


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("margin", [0.02, 0.05])
def test_what_rarely_fails_is_not_found_within_a_margin_it_is_beyond(
    share: float, margin: float
) -> None:
    """The challenger fails by the margin, the champion never: a look after every tenth more."""
    rng, alpha, experiments = np.random.default_rng(0), 0.01, 400
    users = np.unique(np.geomspace(FEWEST, 1500, 30).astype(int))
    strayed = 0
    for _ in range(experiments):
        failed = np.cumsum(rng.random(users[-1]) < margin)[users - 1]
        strayed += any(
            difference(
                Sample(n, -rate, rate * (1 - rate)),
                Sample(round(n * (1 - share) / share), 0.0, 0.0),
                alpha_low=alpha,
                alpha_high=alpha,
                tuned_for=600,
            ).low
            > -margin
            for n, rate in zip(users.tolist(), (failed / users).tolist(), strict=True)
        )
    assert strayed <= experiments * alpha + 3 * math.sqrt(experiments * alpha)


def test_a_small_arm_of_contented_people_is_not_taken_for_the_better_one() -> None:
    """Equal arms, one in ten with the challenger, nearly all content: a look after every ten."""
    rng, alpha, experiments = np.random.default_rng(0), 0.01, 300
    strayed = 0
    for _ in range(experiments):
        few = (rng.random(400) < 0.98).astype(float)
        many = (rng.random(3600) < 0.98).astype(float)
        strayed += any(
            difference(
                Sample.of(few[:n]),
                Sample.of(many[: 9 * n]),
                alpha_low=alpha,
                alpha_high=alpha,
                tuned_for=600,
            ).low
            > 0
            for n in range(FEWEST, 401, 10)
        )
    assert strayed <= experiments * alpha + 3 * math.sqrt(experiments * alpha)


def test_bounds_close_in_with_users_and_open_with_doubt() -> None:
    def width(users: int, alpha: float) -> float:
        arm = Sample(users, 0.5, 0.25)
        found = difference(arm, arm, alpha_low=alpha, alpha_high=alpha, tuned_for=600)
        return found.high - found.low

    assert width(400, 0.05) > width(1600, 0.05) > width(6400, 0.05)
    assert width(400, 0.01) > width(400, 0.05)


def chance(gain: float, users: int, growth: float, limit: float = 0.0) -> float:
    arms = Sample(users, 0.6 + gain, 0.24), Sample(users, 0.6, 0.24)
    return chance_to_pass(*arms, limit, growth=growth, alpha=0.01, tuned_for=600)


def test_the_chance_to_pass_is_twice_the_power_averaged_over_what_may_be() -> None:
    """The power at each true difference, weighed by how well that explains the users so far."""
    users, growth, gain = 2000, 2.0, 0.02
    later = int(users * (growth - 1))
    end = Sample(int(users * growth), 0.6, 0.24)
    needed = -difference(end, end, alpha_low=0.01, alpha_high=0.01, tuned_for=600).low
    rest = (needed * (users + later) - gain * users) / later  # what those to come have to say
    known, to_come = (norm(0, math.sqrt(2 * 0.24 / n)) for n in (users, later))

    def integrand(true: float) -> float:
        return float(known.pdf(true - gain) * to_come.sf(rest - true))

    power = quad(integrand, gain - 0.2, gain + 0.2, points=[gain])[0]
    assert chance(gain, users, growth) == pytest.approx(2 * power, rel=0.01)


def test_fewer_pass_at_any_later_look_than_the_chance_says() -> None:
    """Walks from 300 users per arm on, the true difference drawn from what those leave open."""
    rng, gain, users, last = np.random.default_rng(0), 0.03, 300, 1200
    looks = np.arange(users + 10, last + 1, 10)
    limits = []
    for n in looks:
        arm = Sample(int(n), 0.6, 0.24)
        limits.append(-difference(arm, arm, alpha_low=0.01, alpha_high=0.01, tuned_for=600).low)
    true = rng.normal(gain, math.sqrt(2 * 0.24 / users), (20_000, 1))
    steps = 10 * true + rng.normal(0, math.sqrt(2 * 0.24 * 10), (20_000, looks.size))
    means = (gain * users + steps.cumsum(axis=1)) / looks
    passed = float((means > np.array(limits)).any(axis=1).mean())
    told = chance(gain, users, last / users)
    assert told / 3 < passed < told + 3 * math.sqrt(told / 20_000)


def test_the_chance_to_pass_falls_with_time_and_rises_with_the_gain_and_the_margin() -> None:
    assert chance(0.02, 500, 4) > chance(0.02, 500, 2) > chance(0.02, 500, 1.01) >= 0
    assert chance(0.0, 500, 2) < chance(0.02, 500, 2) < chance(0.04, 500, 2)
    assert chance(0.0, 500, 2, limit=-0.05) > chance(0.0, 500, 2)
    assert chance(0.08, 500, 100) == 1.0  # as it stands, it passes with the users to come
    assert chance(0.02, 500, 1.0) == 0.0  # nobody comes


def test_few_users_say_nothing_of_the_chance_unless_few_will_come() -> None:
    assert chance(-0.3, FEWEST - 1, 2) == 1.0
    assert chance(+0.3, FEWEST // 4, 3) == 0.0  # no bound is given by the end either


def test_the_bound_draws_nearer_with_every_user() -> None:
    """What the chance to pass takes for granted."""
    arms = [Sample(n, 0.6, 0.24) for n in range(FEWEST, 5000, 7)]
    lows = [difference(a, a, alpha_low=0.01, alpha_high=0.01, tuned_for=600).low for a in arms]
    assert lows == sorted(lows)


def test_evidence_agrees_with_an_integral() -> None:
    step = RampStep(0.25, 40, 80)

    def integrand(shift: float) -> float:
        odds = math.log1p(0.25 * math.expm1(shift))
        prior = math.exp(-(shift**2) / (2 * SPREAD**2)) / math.sqrt(2 * math.pi) / SPREAD
        return prior * math.exp(40 * (shift - odds) - 80 * odds)

    assert sample_ratio_evidence([step]) == pytest.approx(quad(integrand, -3, 3)[0], rel=1e-6)


def test_evidence_adds_up_over_a_ramp_and_begins_at_one() -> None:
    assert sample_ratio_evidence([]) == pytest.approx(1.0)
    one = [RampStep(0.01, 30, 970), RampStep(0.1, 150, 850)]  # thrice, then half again too many
    assert sample_ratio_evidence(one) > sample_ratio_evidence(one[:1]) > 500
    as_planned = [RampStep(0.01, 10, 990), RampStep(0.5, 500, 500)]
    assert sample_ratio_evidence(as_planned) < 1


def test_evidence_of_a_huge_experiment_does_not_overflow() -> None:
    assert math.isfinite(sample_ratio_evidence([RampStep(0.5, 0, 10_000_000)]))
