"""What held-out margins say about a reward model: accuracy, floors, calibration. No torch here.

A margin is score(chosen) - score(rejected); the model is right where it is positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlhf_pipeline.evaluation.metrics import design_effect, wilson_interval
from rlhf_pipeline.feedback.datasets import conversation_of
from rlhf_pipeline.records import PreferencePair, RewardExample

BINS = 15  # Guo et al., arXiv:1706.04599, use 15 for the expected calibration error
TEMPERATURES = (0.05, 20.0)  # where it is looked for
SHOWN = 1.92  # nats that chance alone saves in one of twenty fits: half of chi squared's 3.84
ONE_OF_20 = 1.645  # deviations above the mean, of a normal variable
MOST_LAPSES = 0.5  # beyond, more than half of the votes would be by chance


class HangsOn(NamedTuple):
    """Whose word something measured is, and in which conversation: two of each for two votes."""

    people: tuple[str, ...]
    conversations: tuple[str, ...] = ()  # as they began; as many as people, or none


def hangs_on(*votes: PreferencePair | RewardExample) -> HangsOn:
    """Return what something hangs on that was measured by these one or two votes."""
    return HangsOn(
        tuple(vote.voter for vote in votes),
        tuple(conversation_of(vote.prompt) for vote in votes),
    )


def shared_effect(values: Sequence[float], on: Sequence[HangsOn]) -> float:
    """Return how much the variance of the values' mean grows by all they share, 1 or more.

    By the people (`design_effect`) and by the conversations, less what was counted with both; no
    less than by either alone.
    Source: Cameron, Gelbach and Miller 2011, doi:10.1198/jbes.2010.07136, eq. 2.3.
    """
    people = design_effect(values, [one.people for one in on])
    conversations = design_effect(values, [one.conversations for one in on])
    each = [{"\x1f".join(both) for both in zip(*one, strict=False)} for one in on]
    return max(people, conversations, people + conversations - design_effect(values, each))


@dataclass(frozen=True)
class Bin:
    """Held-out pairs of like confidence; confidence is that of the side the model prefers."""

    low: float  # confidence from
    high: float  # to, at most 1
    n: int
    confidence: float  # mean, in [0.5, 1]
    accuracy: float  # share of them that are right


@dataclass(frozen=True)
class Confidence:
    """What a margin says: P(chosen over rejected) = lapse / 2 + (1 - lapse) sigmoid(margin / T).

    Some of the surest margins are wrong whatever their size (votes by chance, a fact the model
    cannot see), and no temperature follows both them and the rest. The share that is decided by
    chance is the lapse of psychometric curves. Sources: temperature scaling, arXiv:1706.04599
    section 4.2, for a two-way choice; lapse, Wichmann and Hill 2001, doi:10.3758/BF03194544.
    """

    temperature: float = 1.0
    lapse: float = 0.0  # in [0, MOST_LAPSES]

    def chance(self, margin: float) -> float:
        """Return the probability that a completion ahead by `margin` is preferred."""
        return self.lapse / 2 + (1 - self.lapse) * sigmoid(margin / self.temperature)


def judged_by(report: Mapping[str, Any]) -> str:
    """Return what judged the model of a report.json: "pairs", or "votes" (matched.py)."""
    return str(report.get("judged_by", "pairs"))  # which earlier releases knew alone


def pair_accuracy(margins: Sequence[float]) -> float:
    """Return the share of pairs ranked as people did; a margin of exactly 0 counts half."""
    return sum(map(_credit, margins)) / len(margins)


def _credit(margin: float) -> float:
    return 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0


def accuracy_interval(
    margins: Sequence[float], on: Sequence[HangsOn] | None = None
) -> tuple[float, float]:
    """Return the 95 % interval of the margins' accuracy, among people and conversations like these.

    Wilson's, of as many answers of different people in different conversations as these are worth:
    a model that knows some better than others knows many answers of few less well than their number
    says. Without `on`, what each margin hangs on, each answer counts; so it does where all are of
    one person, who can be held against nobody, or in one conversation.
    Source: the effective sample size of Korn and Graubard 1998, Survey Methodology 24, 193 to 201,
    with its design effect kept at 1 or more.
    """
    share = pair_accuracy(margins)
    effect = 1.0 if on is None else shared_effect(list(map(_credit, margins)), on)
    return wilson_interval(share, len(margins) / effect)


def highest_floor(floors: Mapping[str, float]) -> float:
    """Return the best accuracy of what knows nothing, of a report's floors."""
    return max(by_length(floors)[1], floors["random"])


def by_length(floors: Mapping[str, float]) -> tuple[str, float]:
    """Return what length alone says best, of a report's floors: in words, and its accuracy."""
    longer = floors["longer"]
    return ("always longer", longer) if longer >= 0.5 else ("always shorter", 1 - longer)


def reliability(
    margins: Sequence[float], confidence: Confidence | Sequence[Confidence]
) -> list[Bin]:
    """Return the non-empty bins of equal width over confidences from 0.5 to 1.

    `confidence` is one for all margins, or one each where parts of them were fitted apart.
    """
    ways = [confidence] * len(margins) if isinstance(confidence, Confidence) else confidence
    filled: dict[int, list[tuple[float, float]]] = {}
    for margin, way in zip(margins, ways, strict=True):
        sure = way.chance(abs(margin))
        place = min(BINS - 1, int((sure - 0.5) * 2 * BINS))
        filled.setdefault(place, []).append((sure, _credit(margin)))
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


def calibration_effect(
    margins: Sequence[float], confidence: Confidence, on: Sequence[HangsOn]
) -> float:
    """Return the `shared_effect` on how far what is right is from what the model foresees."""
    beyond = [_credit(margin) - confidence.chance(abs(margin)) for margin in margins]
    return shared_effect(beyond, on)


def calibration_noise(bins: Sequence[Bin], effect: float = 1.0) -> float:
    """Return what a perfectly calibrated model's error is below, 19 times of 20, on so few pairs.

    As many count as they are worth by an `effect` (calibration_effect).
    An error up to this is no evidence of miscalibration. In a bin of n pairs whose choice is right
    with probability p, n times the accuracy's distance from p has the mean sqrt(2 n p (1 - p) / pi)
    and the variance n p (1 - p) (1 - 2 / pi), in the normal approximation (a half-normal's).
    In 5 to 8 % of tries a perfectly calibrated model is beyond it, and in more where its lapse was
    fitted to few pairs.
    """
    total = sum(b.n for b in bins)
    spreads = [b.n * b.confidence * (1 - b.confidence) * effect for b in bins]
    mean = sum(math.sqrt(2 * spread / math.pi) for spread in spreads)
    return (mean + ONE_OF_20 * math.sqrt(sum(spreads) * (1 - 2 / math.pi))) / total


def beyond_chance(report: Mapping[str, Any]) -> float:
    """Return how much of a report.json's calibration error so few pairs do not explain."""
    return max(0.0, float(report["ece"]) - float(report["ece_noise"]))


def fit_confidence(margins: Sequence[float]) -> Confidence:
    """Return the temperature and lapse under which the margins' log loss is least, in bounds.

    A lapse where the margins show one (likelihood-ratio test): of a few hundred it is mostly noise.
    Two more pairs count, ahead by the median's size and behind by it: a handful that were all
    ranked right are no proof of certainty. Source: the targets of Platt 1999, Probabilistic Outputs
    for Support Vector Machines, which are those of one more of either kind.
    """
    typical = np.median(np.abs(margins)) if len(margins) else 0.0
    ahead = np.array([*margins, typical, -typical])

    def log_loss(log_temperature: float, lapse: float) -> float:
        right = 1 / (1 + np.exp(np.clip(-ahead * math.exp(-log_temperature), -700, 700)))
        return float(-np.log(lapse / 2 + (1 - lapse) * right).sum())

    def lapse_at(log_temperature: float) -> float:  # the loss is convex in it: one valley
        return _minimum(lambda lapse: log_loss(log_temperature, lapse), 0.0, MOST_LAPSES)

    low, high = (math.log(t) for t in TEMPERATURES)
    alone = _minimum(lambda t: log_loss(t, 0.0), low, high)
    best = _minimum(lambda t: log_loss(t, lapse_at(t)), low, high)
    lapse = lapse_at(best)
    if log_loss(alone, 0.0) - log_loss(best, lapse) <= SHOWN:
        return Confidence(math.exp(alone))
    return Confidence(math.exp(best), lapse)


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


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
