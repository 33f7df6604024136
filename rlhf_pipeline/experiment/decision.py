"""When an experiment says enough: promote, roll back, go on, or give up, and why.

A pure function of counts and per-user numbers, so that every look can be replayed. Each number is
one user's mean in [0, 1]; users, never single ratings, are the units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf_pipeline.experiment.assignment import percent
from rlhf_pipeline.experiment.sequences import (
    FEWEST,
    Difference,
    RampStep,
    Sample,
    chance_to_pass,
    difference,
    sample_ratio_evidence,
)

Action = Literal["continue", "promote", "roll_back", "time_out", "give_up", "invalid"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing measured per user, in [0, 1]."""

    name: str
    meaning: str
    better: Literal["higher", "lower"]
    margin: float  # how much worse the challenger may be and still be promoted


PRIMARY = Metric(
    "satisfaction", "mean of a user's thumbs, ratings and scores, on 0 to 1", "higher", 0.0
)
GUARDRAILS = (
    Metric("thumbs_down", "interactions with a thumb down", "lower", 0.05),
    Metric("feedback_rate", "interactions with any feedback", "higher", 0.10),
    Metric(
        "fallbacks",
        "interactions that broke off, that nobody waited for, or that the baseline had to answer",
        "lower",
        0.02,
    ),
    Metric("truncated", "completions cut off at the token limit", "lower", 0.05),
    Metric("refusals", "completions that refuse", "lower", 0.05),
    Metric("slow", "interactions over the latency limit", "lower", 0.05),
    Metric("length", "completion length over the limit, at most 1", "lower", 0.10),
)

SIGN = "Above 0 the challenger is better; where less is better, it has less."
"""How every difference is read; who shows one says so."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How sure is sure."""

    promote: float = 0.05
    """Largest share of experiments that promote a challenger who is no better, looked at always."""
    roll_back: float = 0.01
    """Largest share that roll back one within every margin; split evenly over all metrics."""
    imbalance: float = 0.002
    """Largest share declared invalid though assignment works."""
    give_up: float = 0.005
    """Chance of being promoted yet, below which an experiment ends; 0: it lasts its whole time."""
    tuned_for: int = 600
    """Users in both arms together at which the bounds are tightest."""


@dataclass(frozen=True, slots=True)
class Arms:
    """What one metric's users say in either arm."""

    challenger: Sample
    champion: Sample


@dataclass(frozen=True, slots=True)
class Verdict:
    """One look's outcome, with the numbers it stands on."""

    action: Action
    reasons: tuple[str, ...]
    differences: Mapping[str, Difference]
    imbalance_evidence: float

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values; a difference or bound not yet known is null."""

        def finite(number: float) -> float | None:
            return number if math.isfinite(number) else None

        return {
            "action": self.action,
            "reasons": list(self.reasons),
            "imbalance_evidence": self.imbalance_evidence,
            "differences": {
                name: {
                    "value": finite(d.value),
                    "low": finite(d.low),
                    "high": finite(d.high),
                    "challenger_users": d.challenger_users,
                    "champion_users": d.champion_users,
                }
                for name, d in self.differences.items()
            },
        }


def as_read(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a verdict's difference and its bounds as people read them, ? where not known yet."""
    value, low, high = (
        "?" if found[key] is None else f"{found[key]:+.3f}" for key in ("value", "low", "high")
    )
    return value, low, high


def decide(
    arms: Mapping[str, Arms],
    steps: Sequence[RampStep],
    *,
    bounds: Bounds = Bounds(),
    guardrails: Sequence[Metric] = GUARDRAILS,
    timed_out: bool = False,
    growth: float | None = None,
) -> Verdict:
    """Return what to do at this look; `arms` holds the primary metric and every guardrail's users.

    1. An arm that gets more or fewer users than planned makes the numbers meaningless: invalid, the
    champion stays. 2. Surely worse on any metric, and by more than its margin: roll back. What a
    promotion would forgive is no reason for one. 3. Surely better on the primary and surely not
    worse than its margin on every guardrail: promote. 4. Out of time: the champion stays. 5. So it
    does where the users still to come will hardly make 3 true: when time is up there are `growth`
    times as many as now; None where nobody can say. Differences are signed as SIGN says.
    """
    metrics = (PRIMARY, *guardrails)
    found = {
        metric.name: _signed(
            metric,
            arms[metric.name],
            alpha_better=bounds.promote,
            alpha_worse=bounds.roll_back / len(metrics),
            tuned_for=bounds.tuned_for,
        )
        for metric in metrics
    }
    evidence = sample_ratio_evidence(steps)

    def verdict(action: Action, reasons: Sequence[str]) -> Verdict:
        return Verdict(action, tuple(reasons), found, evidence)

    if evidence >= 1 / bounds.imbalance:
        counted = ", ".join(f"{s.challenger} of {s.challenger + s.champion}" for s in steps)
        planned = ", ".join(percent(s.share) for s in steps)
        return verdict(
            "invalid",
            [f"the challenger met {counted} users where {planned} was planned: look at assignment"],
        )
    worse = [
        f"{m.name} ({m.meaning}) is worse: at best {found[m.name].high:+.3f}, "
        f"allowed {0 - m.margin:g}"
        for m in metrics
        if found[m.name].high < -m.margin
    ]
    if worse:
        return verdict("roll_back", worse)
    open_questions = _open_questions(guardrails, found)
    if not open_questions:
        low = found[PRIMARY.name].low
        return verdict("promote", [f"{PRIMARY.name} is better: at least {low:+.3f}"])
    if timed_out:
        return verdict("time_out", ["time is up", *open_questions])
    if growth is not None:
        chance, metric = min(
            ((_chance(m, arms[m.name], bounds, growth), m) for m in metrics), key=lambda c: c[0]
        )
        if chance < bounds.give_up:
            return verdict("give_up", [_hopeless(metric, found[metric.name], growth, chance)])
    return verdict("continue", open_questions)


def _open_questions(guardrails: Sequence[Metric], found: Mapping[str, Difference]) -> list[str]:
    """Return what is in the way of a promotion, in words; none where nothing is."""
    # A metric's users are those it is known of, so satisfaction, which comes first, has the fewest.
    few = [(name, d) for name, d in found.items() if d.low == -math.inf]
    questions = [
        f"too few users yet: {name} is known of {d.challenger_users} of the challenger's and "
        f"{d.champion_users} of the champion's, and {FEWEST} of either are needed"
        for name, d in few[:1]
    ]
    low = found[PRIMARY.name].low
    if -math.inf < low <= 0:
        questions.append(f"{PRIMARY.name} is not surely better yet: at least {low:+.3f}")
    questions += [
        f"{m.name} may be worse by {-found[m.name].low:.3f}, allowed {m.margin:g}"
        for m in guardrails
        if -math.inf < found[m.name].low <= -m.margin
    ]
    return questions


def _chance(metric: Metric, arms: Arms, bounds: Bounds, growth: float) -> float:
    """Return how likely the metric is no obstacle to a promotion before time is up, at most."""
    return chance_to_pass(
        *_turned(metric, arms),
        -metric.margin,
        growth=growth,
        alpha=bounds.promote,
        tuned_for=bounds.tuned_for,
    )


def _hopeless(metric: Metric, found: Difference, growth: float, chance: float) -> str:
    """Return why the metric will hardly let the challenger be promoted, in words."""
    users = found.challenger_users, found.champion_users
    then = [int(n * growth) for n in users]
    wanted = "better" if metric is PRIMARY else f"no more than {metric.margin} worse"
    value = "unknown" if math.isnan(found.value) else f"{found.value:+.3f}"
    words = (
        f"{metric.name} is {value} by {users[0]} and {users[1]} users; as people come, "
        f"it will be {then[0]} and {then[1]} when time is up"
    )
    if min(then) < FEWEST:
        return f"{words}, and {FEWEST} in either arm are needed"
    return f"{words}, and the chance that it is surely {wanted} by then is {chance:.1%} at most"


def _signed(
    metric: Metric, arms: Arms, *, alpha_better: float, alpha_worse: float, tuned_for: int
) -> Difference:
    """Return the difference, above 0 where the challenger is better."""
    read = difference(
        *_turned(metric, arms),
        alpha_low=alpha_better,
        alpha_high=alpha_worse,
        tuned_for=tuned_for,
    )
    challenger, champion = arms.challenger.users, arms.champion.users
    return replace(read, challenger_users=challenger, champion_users=champion)


def _turned(metric: Metric, arms: Arms) -> tuple[Sample, Sample]:
    """Return the arms, turned round where less is better: SIGN holds for first less second."""
    pair = (arms.challenger, arms.champion)
    return pair if metric.better == "higher" else pair[::-1]
