"""Which functions PPO maximises beside the learned reward, and how much each of them counts.

`reward.functions` in a recipe maps a name to a FunctionSettings, or to a number, its weight. The
learned reward is the function `learned`; it counts 1 where it is not named. `learned:safety` is
what people say of the criterion safety, where their votes have taught it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from rlhf_pipeline.errors import ConfigError

LEARNED = "learned"
CRITERION = f"{LEARNED}:"  # and a name: one criterion that people rate, as the same model learnt it


TOLD = {"extra": "forbid", "use_attribute_docstrings": True}  # `rlhf config explain` tells them


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight that moves evenly from `start`, at the first update, to `end`, then stays."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = TOLD

    start: float
    """At the first update."""
    end: float
    """From the last of them on."""
    updates: int
    """PPO updates it takes."""

    def __post_init__(self) -> None:
        if self.updates < 1 or not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise ConfigError(
                "a linear weight needs finite start and end and at least 1 update, found "
                f"{self.start}, {self.end} and {self.updates}; correct it"
            )


@dataclass(frozen=True, slots=True)
class Stepped:
    """A weight that takes each number from its update on; the first is that of update 0."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = TOLD

    steps: Mapping[int, float]
    """Updates made before -> weight."""

    def __post_init__(self) -> None:
        if min(self.steps, default=-1) != 0 or not all(map(math.isfinite, self.steps.values())):
            raise ConfigError(
                f"a stepped weight needs finite numbers from update 0 on, found {dict(self.steps)};"
                " write {steps: {0: 0.1, 10: 0.5}}"
            )


Weight = float | Linear | Stepped
"""A constant, or a schedule over PPO's updates."""


def weight_at(weight: Weight, update: int) -> float:
    """Return the weight where `update` updates are made."""
    if isinstance(weight, Linear):
        done = min(update / weight.updates, 1.0)
        return weight.start + done * (weight.end - weight.start)
    if isinstance(weight, Stepped):
        return weight.steps[max(step for step in weight.steps if step <= update)]
    return weight


def scaled(weight: Weight, factor: float) -> Weight:
    """Return the weight, or schedule, times the factor."""
    if isinstance(weight, Linear):
        return Linear(weight.start * factor, weight.end * factor, weight.updates)
    if isinstance(weight, Stepped):
        return Stepped({step: number * factor for step, number in weight.steps.items()})
    return weight * factor


@dataclass(frozen=True, slots=True)
class FunctionSettings:
    """One reward function of the composite."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = TOLD

    weight: Weight = 1.0
    """A number, {start, end, updates} or {steps: {0: 0.1, 10: 0.5}}; negative: less is better."""
    normalisation: Literal["none", "running"] | tuple[float, float] = "none"
    """running: less the mean, over the deviation, of what it scored in this training so far;
    [low, high]: 0 at low, 1 at high, straight on beyond."""
    floor: float | None = None
    """A completion whose raw score is below gets -5 at most, whatever else it earns."""
    function: str | None = None
    """What scores, where its name is another: a name, a folder, an address, module:function."""
    wish: str | None = None
    """What people tick under "What should it learn?" that speaks for it: reward.wish_bound."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the function is made with, e.g. {shortest: 5, longest: 40} of `length`."""

    def __post_init__(self) -> None:
        low, high = self.fixed_range
        numbers = [low, high, self.floor or 0.0]
        if isinstance(self.weight, int | float):
            numbers.append(self.weight)
        if not all(map(math.isfinite, numbers)) or low >= high:
            raise ConfigError(
                "a reward function needs finite numbers and a range [low, high] that rises, found "
                f"weight {self.weight}, normalisation {self.normalisation} and floor "
                f"{self.floor}; correct it"
            )

    @property
    def counts(self) -> bool:
        """Say whether it is asked at all: for its weight, or for its floor."""
        return self.weight != 0 or self.floor is not None

    @property
    def fixed_range(self) -> tuple[float, float]:
        """Return the raw scores that count as 0 and 1 where no running scale is kept."""
        return (0.0, 1.0) if isinstance(self.normalisation, str) else self.normalisation


def with_wishes(
    functions: Mapping[str, FunctionSettings], shares: Mapping[str, float], bound: float
) -> dict[str, FunctionSettings]:
    """Return the functions with weights raised by what people wish for, at most by `bound`.

    `shares` are of those who wish for something, 0 to 1: a function whose wish is everybody's
    counts 1 + bound times the recipe's weight, one that nobody wishes for the recipe's.
    """
    return {
        name: replace(one, weight=scaled(one.weight, 1 + bound * shares.get(one.wish or "", 0.0)))
        for name, one in functions.items()
    }


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "empathy": {
            "learned": {"weight": 1.0, "normalisation": "running"},
            "empathy": {"weight": {"start": 0.2, "end": 0.6, "updates": 20}, "wish": "kinder"},
            "repetition": {"weight": 0.3, "floor": 0.5},
            "safety": {"weight": 0.5, "floor": 0.5, "wish": "safer"},
        },
        "recommendation": {
            "learned": {"weight": 1.0, "normalisation": "running"},
            "recommendation": {"weight": 1.0},
            "length": {"weight": 0.3, "options": {"shortest": 5, "longest": 60}},
            "repetition": {"weight": 0.3, "floor": 0.5},
            "safety": {"weight": 0.5, "floor": 0.5, "wish": "safer"},
        },
        "balanced": {
            "learned": {"weight": 1.0, "normalisation": "running"},
            "empathy": {"weight": 0.2, "wish": "kinder"},
            "distinct-2": {"weight": 0.2},
            "length": {"weight": 0.2, "options": {"shortest": 5, "longest": 60}},
            "repetition": {"weight": 0.3, "floor": 0.5},
            "safety": {"weight": 0.5, "floor": 0.5, "wish": "safer"},
        },
    }
)
"""Weights by name, for `reward.preset`. They are starting points, chosen so that a whole rule is
worth a fraction of one deviation of the learned reward; nobody has tuned them on your people."""


def spelt_out(functions: Any) -> Any:
    """Return `reward.functions` as people write it with every number as {weight: number}.

    A function that is null, as whoever wants a preset without it writes, is left out. Raises
    ConfigError, without the address, which may hold a secret, where one is a function's name.
    """
    if not isinstance(functions, Mapping):
        return functions  # for pydantic to say what it should be
    found: dict[Any, Any] = {}
    for name, one in functions.items():
        if "://" in str(name):
            raise ConfigError(
                "a reward function needs a name for metrics and tables, of letters, digits, _ . : "
                "and -, found an address; name it yourself: `mine: {function: 'https://…'}`"
            )
        if isinstance(one, int | float) and not isinstance(one, bool):
            found[name] = {"weight": one}
        elif one is not None:
            found[name] = {**one, "weight": _weight(name, one)} if _has_schedule(one) else one
    return found


def _has_schedule(one: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("weight"), Mapping)


def _weight(name: str, one: Mapping[str, Any]) -> Linear | Stepped:
    """Return the schedule that is written; raises ConfigError where it is neither."""
    written = one["weight"]
    try:
        if "steps" in written:
            return Stepped(**{**written, "steps": {int(k): v for k, v in written["steps"].items()}})
        return Linear(**written)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"reward.functions.{name}.weight must be a number, {{start, end, updates}} or "
            f"{{steps: {{0: 0.1, 10: 0.5}}}}, found {dict(written)}; correct it"
        ) from error
