"""Sequences: the arithmetic by hand, by another way, and by playing many looks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad

from rlhf_pipeline.experiment.sequences import (
    FEWEST,
    SPREAD,
    RampStep,
    Sample,
    boundary,
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
