"""The report's arithmetic against hand-worked answers."""

from __future__ import annotations

import math
import random

import pytest

from rlhf_pipeline.reward.calibration import (
    Confidence,
    calibration_error,
    calibration_noise,
    fit_confidence,
    pair_accuracy,
    reliability,
    sigmoid,
    wilson_interval,
)


def test_accuracy_counts_a_margin_of_zero_as_half() -> None:
    assert pair_accuracy([1.0, -1.0, 0.0, 2.0]) == 0.625


def test_the_wilson_interval_is_the_published_one() -> None:
    low, high = wilson_interval(0.8, 10)  # 8 of 10: 0.490 to 0.943
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0.0, 5)[0] == 0
    assert wilson_interval(1.0, 5)[1] == 1


def test_bins_and_calibration_error_by_hand() -> None:
    sure = math.log(9)  # confidence 0.9
    margins = [sure, sure, sure, -sure, 0.0]
    bins = reliability(margins, Confidence())
    assert [b.n for b in bins] == [1, 4]
    assert bins[0].confidence == 0.5
    assert bins[0].accuracy == 0.5
    assert bins[1].confidence == pytest.approx(0.9)
    assert bins[1].accuracy == 0.75
    assert bins[1].low <= 0.9 <= bins[1].high
    assert calibration_error(bins) == pytest.approx(4 / 5 * 0.15)
    assert reliability([1e6], Confidence())[0].high == pytest.approx(1.0)


def test_temperature_undoes_overconfidence() -> None:
    rng = random.Random(0)
    true = [rng.gauss(0, 2) for _ in range(20_000)]
    signed = [m if rng.random() < sigmoid(m) else -m for m in true]
    assert fit_confidence(signed).temperature == pytest.approx(1.0, rel=0.05)
    inflated = [3 * m for m in signed]
    found = fit_confidence(inflated)
    assert found.temperature == pytest.approx(3.0, rel=0.05)
    assert found.lapse < 0.01
    after = calibration_error(reliability(inflated, found))
    assert after < 0.02 < calibration_error(reliability(inflated, Confidence()))
    few = [fit_confidence(signed[i : i + 200]).lapse for i in range(0, 20_000, 200)]
    assert sum(lapse > 0 for lapse in few) <= 10  # of 100, where 5 are to be expected at most
    separable = fit_confidence([1.0, 2.0])
    assert separable.temperature == pytest.approx(0.05, rel=1e-3)
    assert separable.lapse == 0


def test_votes_by_chance_are_a_lapse_that_no_temperature_follows() -> None:
    rng = random.Random(2)
    votes = []
    for _ in range(20_000):
        margin = rng.gauss(0, 4)
        chance = 0.5 if rng.random() < 0.2 else sigmoid(margin)
        votes.append(margin if rng.random() < chance else -margin)
    found = fit_confidence(votes)
    assert found.lapse == pytest.approx(0.2, abs=0.02)
    assert found.temperature == pytest.approx(1.0, rel=0.1)
    assert found.chance(100) == pytest.approx(0.9, abs=0.01)
    assert found.chance(-1) == pytest.approx(1 - found.chance(1))
    assert calibration_error(reliability(votes, found)) < 0.01
    log_temperatures = [math.log(0.05) + i * 0.02 for i in range(300)]
    without = min(
        calibration_error(reliability(votes[::10], Confidence(math.exp(t))))
        for t in log_temperatures
    )
    assert without > 0.02

    def log_loss(some: Confidence) -> float:
        return -sum(math.log(some.chance(m)) for m in votes)

    for temperature in (0.9, 1.0, 1.1):  # none of the neighbours is better
        for lapse in (-0.02, 0.0, 0.02):
            near = Confidence(found.temperature * temperature, found.lapse + lapse)
            assert log_loss(near) >= log_loss(found) - 1e-3


def test_confidences_that_were_fitted_apart_share_the_bins() -> None:
    apart = reliability([2.0, -1.0, 3.0], [Confidence(), Confidence(2.0), Confidence()])
    together = reliability([2.0, -0.5, 3.0], Confidence())
    assert apart == together


def test_a_calibrated_model_shows_as_much_error_as_the_noise_predicts() -> None:
    rng = random.Random(1)
    errors, predicted = [], []
    for _ in range(200):
        true = [abs(rng.gauss(0, 2)) for _ in range(150)]
        bins = reliability([m if rng.random() < sigmoid(m) else -m for m in true], Confidence())
        errors.append(calibration_error(bins))
        predicted.append(calibration_noise(bins))
    assert sum(errors) == pytest.approx(sum(predicted), rel=0.1)
    assert sum(errors) / 200 > 0.05  # so 150 pairs cannot show an error below 0.05


def test_extreme_numbers_do_not_overflow() -> None:
    assert sigmoid(-1e4) == 0.0
    assert sigmoid(1e4) == 1.0
    assert fit_confidence([1e4, -1e4] * 5).lapse == pytest.approx(0.5, abs=1e-4)
