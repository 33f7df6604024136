"""Statistics that may be looked at all the time: confidence sequences and a sample-ratio test.

A usual 95 % interval holds at one look that was fixed beforehand; looked at daily it is wrong far
more often than 1 time in 20. These hold at every look at once. numpy and math only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

SPREAD = 0.25  # typical log odds ratio of an imbalance the ratio test looks for; 55/45 is 0.2
FEWEST = 100  # users per arm below which no bound is given: the theory is asymptotic
PRETENDED = 12
"""Users of a fair coin's variance that the smaller arm has besides its own.

With so many, a challenger that fails by just the margin oftener than a champion that never fails
(margins 0.005 to 0.1, shares 2 to 50 %) is found within it as often as alpha allows, 0.05 to 0.002;
with one at 1 to 50 times that.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One arm's users, a number each: how many, their mean, their variance."""

    users: int
    mean: float
    variance: float  # unbiased; 0 below two users

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Sample:
        """Return the summary of one number per user."""
        values = np.fromiter(numbers, dtype=np.float64)
        if values.size == 0:
            return cls(0, 0.0, 0.0)
        spread = float(values.var(ddof=1)) if values.size > 1 else 0.0
        return cls(int(values.size), float(values.mean()), spread)


@dataclass(frozen=True, slots=True)
class Difference:
    """Challenger minus champion, with bounds that hold at every look at once."""

    value: float  # NaN where an arm has nobody
    low: float  # true difference below: in at most alpha of all experiments, ever
    high: float  # true difference above: likewise
    challenger_users: int
    champion_users: int


def difference(
    challenger: Sample,
    champion: Sample,
    *,
    alpha_low: float,
    alpha_high: float,
    tuned_for: int,
) -> Difference:
    """Return the difference of the means with a one-sided sequence on either side.

    Each bound holds at all looks together but with probability alpha_low or alpha_high. It is
    tightest when the two arms together have `tuned_for` users. Infinite until both arms have
    FEWEST users. Source: asymptotic confidence sequences, Waudby-Smith et al., arXiv:2103.06476,
    the one-sided Gaussian mixture boundary on the influence values of a difference in means.
    """
    fewest = min(challenger.users, champion.users)
    value = challenger.mean - champion.mean if fewest else math.nan
    low, high = -math.inf, math.inf
    if fewest >= FEWEST:
        low = value - _radius(challenger, champion, alpha_low, tuned_for)
        high = value + _radius(challenger, champion, alpha_high, tuned_for)
    return Difference(value, low, high, challenger.users, champion.users)


def chance_to_pass(
    challenger: Sample,
    champion: Sample,
    limit: float,
    *,
    growth: float,
    alpha: float,
    tuned_for: int,
) -> float:
    """Return how likely the lower bound, below the limit now, is yet to be above it, at most.

    That is, at any look until both arms have `growth` times the users they have now. Of the true
    difference nothing is known but what those users say (a flat prior). 1 while an arm has fewer
    than FEWEST users, 0 where it has fewer at the end too.
    Source: predictive power, Spiegelhalter, Freedman & Blackburn, Controlled Clinical Trials 7
    (1986) 8-17: the chance to be above at the end. Ours is twice that: the bound draws nearer to
    the difference with every user, and the difference is as likely to rise from where it is as to
    fall, so of all that were ever above at least half are so at the end (reflection principle).
    """
    # As if all who come were new, which hopes too much, and as far apart as those so far, which
    # hopes too little: the means of people who rate on draw together. Where everybody rates once a
    # day, 2 to 3 in 100 of the experiments given up at a chance of 1 in 200 would have promoted.
    then = [Sample(int(s.users * growth), s.mean, s.variance) for s in (challenger, champion)]
    end = difference(*then, alpha_low=alpha, alpha_high=alpha, tuned_for=tuned_for)
    if end.low == -math.inf:
        return 0.0
    if end.low > limit or min(challenger.users, champion.users) < FEWEST:
        return 1.0
    still_open = _variance(challenger, champion) - _variance(*then)
    return math.erfc((limit - end.low) / math.sqrt(2 * still_open)) if still_open > 0 else 0.0


def _radius(one: Sample, other: Sample, alpha: float, tuned_for: int) -> float:
    n = one.users + other.users
    return math.sqrt(_variance(one, other) * n) * boundary(n, alpha, tuned_for)


def _variance(one: Sample, other: Sample) -> float:
    """Return the variance of the difference of the two means."""
    # Where nearly everybody is content, or nothing fails, a small arm whose first users all say so
    # looks certain: most such arms meet no other for a while. So an arm is no surer than the other,
    # which knows better where it is the larger, and the smaller has pretended users of a fair
    # coin's variance.
    each = max(one.variance, other.variance)
    fewer, more = sorted((one.users, other.users))
    known = (each * fewer + PRETENDED * 0.25) / (fewer + PRETENDED)
    return known / fewer + each / more


def boundary(n: int, alpha: float, tuned_for: int) -> float:
    """Return how far the mean of n unit-variance numbers strays upwards, at any n ever."""
    rho2 = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1) / tuned_for
    scaled = n * rho2 + 1
    return math.sqrt(2 * scaled / (n * n * rho2) * math.log(1 + math.sqrt(scaled) / (2 * alpha)))


@cache
def _mixture() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Normal(0, SPREAD^2) as points and the logarithms of their weights."""
    points, weights = np.polynomial.hermite_e.hermegauss(41)
    return SPREAD * points, np.log(weights / weights.sum())


@dataclass(frozen=True, slots=True)
class RampStep:
    """How many users were first seen while the challenger had a share of them."""

    share: float  # of the challenger, as planned
    challenger: int
    champion: int


def sample_ratio_evidence(steps: Sequence[RampStep]) -> float:
    """Return the evidence against the planned shares: an e-value, 1 at the start.

    If assignment works it exceeds 1/a, at any look ever, with probability at most a. It is a
    mixture over log odds ratios d ~ Normal(0, SPREAD^2) of the likelihood ratio that the odds of
    meeting the challenger are e^d times the planned ones, so steps with other shares add up.
    Source: Lindon & Malek, "Anytime-Valid Inference for Multinomial Count Data", arXiv:2011.03567,
    with a normal mixture in place of the Dirichlet one.
    """
    shift, logs = _mixture()
    for step in steps:
        if not 0.0 < step.share < 1.0:
            continue
        odds = np.log1p(step.share * np.expm1(shift))
        logs = logs + step.challenger * (shift - odds) - step.champion * odds
    top = float(logs.max())
    return math.exp(min(top + math.log(float(np.exp(logs - top).sum())), 700.0))
