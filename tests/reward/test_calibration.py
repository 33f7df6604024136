"""The report's arithmetic against hand-worked answers."""

from __future__ import annotations

import math
import random

import pytest

from rlhf_pipeline.reward.calibration import (
    calibration_error,
    calibration_noise,
    fit_temperature,
    pair_accuracy,
    reliability,
    sigmoid,
    softplus,
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
    bins = reliability(margins, 1.0)
    assert [b.n for b in bins] == [1, 4]
    assert bins[0].confidence == 0.5
    assert bins[0].accuracy == 0.5
    assert bins[1].confidence == pytest.approx(0.9)
    assert bins[1].accuracy == 0.75
    assert bins[1].low <= 0.9 <= bins[1].high
    assert calibration_error(bins) == pytest.approx(4 / 5 * 0.15)
    assert reliability([1e6], 1.0)[0].high == pytest.approx(1.0)


def test_temperature_undoes_overconfidence() -> None:
    rng = random.Random(0)
    true = [rng.gauss(0, 2) for _ in range(20_000)]
    signed = [m if rng.random() < sigmoid(m) else -m for m in true]
    assert fit_temperature(signed) == pytest.approx(1.0, rel=0.05)
    inflated = [3 * m for m in signed]
    assert fit_temperature(inflated) == pytest.approx(3.0, rel=0.05)
    after = calibration_error(reliability(inflated, fit_temperature(inflated)))
    assert after < 0.02 < calibration_error(reliability(inflated, 1.0))
    assert fit_temperature([1.0, 2.0]) == pytest.approx(0.05, rel=1e-3)


def test_a_calibrated_model_shows_as_much_error_as_the_noise_predicts() -> None:
    rng = random.Random(1)
    errors, predicted = [], []
    for _ in range(200):
        true = [abs(rng.gauss(0, 2)) for _ in range(150)]
        bins = reliability([m if rng.random() < sigmoid(m) else -m for m in true], 1.0)
        errors.append(calibration_error(bins))
        predicted.append(calibration_noise(bins))
    assert sum(errors) == pytest.approx(sum(predicted), rel=0.1)
    assert sum(errors) / 200 > 0.05  # so 150 pairs cannot show an error below 0.05


def test_extreme_numbers_do_not_overflow() -> None:
    assert sigmoid(-1e4) == 0.0
    assert sigmoid(1e4) == 1.0
    assert softplus(1e4) == 1e4
    assert softplus(-1e4) == 0.0
