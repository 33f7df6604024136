"""A reward made of others: their weighted sum, with floors that no weight can buy off.

Each term is brought to a common scale first, (score - centre) / scale, so that weights compare.
`breakdown` says what each term added. What this does not protect against: a term loaded as
`module:function` is code that runs here; name only what you would run.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import Prompt, RewardFunction, RewardInput, checked_scores, hashed
from rlhf_pipeline.reward.functions import CheckedReward, as_reward
from rlhf_pipeline.reward.rules import RULES

ENTRY_POINTS = "rlhf_pipeline.rewards"  # the group in which an installed package offers rewards
BELOW_FLOOR = -5.0  # the most a completion under a floor can get, in units of the composite


@dataclass(frozen=True, slots=True)
class Term:
    """One reward in a composite, and how it counts."""

    reward: RewardFunction
    weight: float = 1.0  # negative: less of it is better
    centre: float = 0.0  # the reward's score that counts as 0
    scale: float = 1.0  # > 0, the difference in score that counts as 1
    floor: float | None = None  # the least score, uncentred; a completion under it is refused


@dataclass(frozen=True, slots=True)
class Piece:
    """What one term says of a completion."""

    score: float  # as the reward gave it
    normalised: float  # (score - centre) / scale
    added: float  # weight * normalised
    below_floor: bool


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A composite's score with what it is made of; without a broken floor, the pieces' sum."""

    score: float
    pieces: Mapping[str, Piece]


class CompositeReward:
    """The terms' weighted sum, itself a reward function."""

    def __init__(self, terms: Mapping[str, Term], *, below_floor: float = BELOW_FLOOR) -> None:
        """Raises ModelError for no terms, or a number that makes no sum."""
        if not terms:
            raise ModelError("a composite reward needs one term or more, found none; name a reward")
        for name, term in terms.items():
            numbers = (term.weight, term.centre, term.scale, term.floor or 0.0, below_floor)
            if not all(map(math.isfinite, numbers)) or term.scale <= 0 or term.weight == 0:
                raise ModelError(
                    f"the term {name} needs finite numbers, a scale above 0 and a weight other "
                    f"than 0, found weight {term.weight}, centre {term.centre}, scale "
                    f"{term.scale}, floor {term.floor}, below_floor {below_floor}; correct it or "
                    "leave the term out"
                )
        self.terms = dict(terms)
        self.below_floor = below_floor
        parts = [
            f"{name}:{getattr(t.reward, 'version', 'unknown')}:{t.weight}:{t.centre}:{t.scale}"
            f":{t.floor}"
            for name, t in self.terms.items()
        ]
        self.version = hashed("composite", str(below_floor), *parts)

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        """Return the scores. Raises ModelError naming a term that breaks its word."""
        return [one.score for one in self.judge(items)]

    def breakdown(
        self, prompt: Prompt, completion: str, references: tuple[str, ...] = ()
    ) -> Breakdown:
        """Return one completion's score, piece by piece."""
        return self.judge([RewardInput(prompt, completion, references)])[0]

    def judge(self, items: Sequence[RewardInput]) -> list[Breakdown]:
        """Return every item's breakdown, in order; each term is asked once for all of them."""
        by_term = {
            name: checked_scores(term.reward, items, name=name, error=ModelError)
            for name, term in self.terms.items()
        }
        return [
            self._sum({name: scores[i] for name, scores in by_term.items()})
            for i in range(len(items))
        ]

    def _sum(self, scores: Mapping[str, float]) -> Breakdown:
        pieces = {name: _piece(self.terms[name], score) for name, score in scores.items()}
        total = math.fsum(piece.added for piece in pieces.values())
        if any(piece.below_floor for piece in pieces.values()):
            total = min(total, self.below_floor)
        return Breakdown(total, pieces)


def _piece(term: Term, score: float) -> Piece:
    normalised = (score - term.centre) / term.scale
    below = term.floor is not None and score < term.floor
    return Piece(score, normalised, term.weight * normalised, below)


def named_reward(name: str, *, device: str = "auto") -> RewardFunction:
    """Return the reward a person names, checked at once that it can be called.

    A name is a rule's (reward.rules.RULES), one an installed package offers, the address of a
    remote reward, a reward model's folder, or `module:function`. Raises ModelError for any other.
    """
    if name in RULES:
        return CheckedReward(RULES[name], name)
    offered = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in offered:
        return _loaded(offered[name].value, name)
    if name.startswith(("http://", "https://")) or Path(name).is_dir():
        return as_reward(name, device=device)
    if ":" in name:
        return _loaded(name, name)
    known = ", ".join([*RULES, *offered])
    raise ModelError(
        f"needed a reward's name ({known}), a reward model's folder, an address or "
        f"module:function, found {name!r}; correct it"
    )


def _loaded(target: str, name: str) -> RewardFunction:
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"the reward {name} needs {attribute!r} in the module {module!r}, found none "
            f"({error}); correct the name or install the package"
        ) from error
    if not callable(found):
        raise ModelError(
            f"the reward {name} needs a function that takes items, found a "
            f"{type(found).__name__}; name a function"
        )
    return CheckedReward(found, name)
