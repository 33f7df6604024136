"""What held-out margins say about a reward model: accuracy, floors, calibration. No torch here.

A margin is score(chosen) - score(rejected); the model is right where it is positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BINS = 15  # Guo et al., arXiv:1706.04599, use 15 for the expected calibration error
KNOW_NOTHING = ("longer", "random")  # rules, of a report's floors
TEMPERATURES = (0.05, 20.0)  # separable margins would send the fitted temperature to 0


@dataclass(frozen=True)
class Bin:
    """Held-out pairs of like confidence; confidence is that of the side the model prefers."""

    low: float  # confidence from
    high: float  # to, at most 1
    n: int
    confidence: float  # mean, in [0.5, 1]
    accuracy: float  # share of them that are right


def pair_accuracy(margins: Sequence[float]) -> float:
    """Return the share of pairs ranked as people did; a margin of exactly 0 counts half."""
    right = sum(1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in margins)
    return right / len(margins)


def highest_floor(floors: Mapping[str, float]) -> float:
    """Return the best accuracy of what knows nothing, of a report's floors."""
    return max(floors[name] for name in KNOW_NOTHING)


def wilson_interval(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % score interval of a share seen in n trials. Source: Wilson 1927."""
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - spread) / scale, (centre + spread) / scale
    # At 0 and 1 the interval ends at the share itself, which rounding would miss by 1e-16.
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def reliability(margins: Sequence[float], temperature: float) -> list[Bin]:
    """Return the non-empty bins of equal width over confidences from 0.5 to 1."""
    filled: dict[int, list[tuple[float, float]]] = {}
    for margin in margins:
        confidence = sigmoid(abs(margin) / temperature)
        place = min(BINS - 1, int((confidence - 0.5) * 2 * BINS))
        right = 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0
        filled.setdefault(place, []).append((confidence, right))
    width = 0.5 / BINS
    return [
        Bin(
            low=0.5 + place * width,
            high=0.5 + (place + 1) * width,
            n=len(pairs),
            confidence=sum(c for c, _ in pairs) / len(pairs),
            accuracy=sum(r for _, r in pairs) / len(pairs),
        )
        for place, pairs in sorted(filled.items())
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Return the expected calibration error, in [0, 1]. Source: arXiv:1706.04599 eq. 3."""
    total = sum(b.n for b in bins)
    return sum(b.n * abs(b.confidence - b.accuracy) for b in bins) / total


def calibration_noise(bins: Sequence[Bin]) -> float:
    """Return the calibration error to expect of a perfectly calibrated model with so few pairs.

    In each bin the accuracy is off by sqrt(2 p (1 - p) / (pi n)) on average (normal approximation),
    so an error near this is no evidence of miscalibration.
    """
    total = sum(b.n for b in bins)
    return (
        sum(b.n * math.sqrt(2 * b.confidence * (1 - b.confidence) / (math.pi * b.n)) for b in bins)
        / total
    )


def fit_temperature(margins: Sequence[float]) -> float:
    """Return the temperature under which the margins' log loss is least, within TEMPERATURES.

    Source: temperature scaling, arXiv:1706.04599 section 4.2, for a two-way choice.
    """

    def log_loss(log_temperature: float) -> float:
        scale = math.exp(-log_temperature)
        return sum(softplus(-m * scale) for m in margins)

    low, high = (math.log(t) for t in TEMPERATURES)
    return math.exp(_minimum(log_loss, low, high))


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x: float) -> float:
    """Return log(1 + exp(x)) without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _minimum(f: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one valley is least, by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = f(left), f(right)
    while high - low > 1e-5:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = f(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = f(right)
    return (low + high) / 2
