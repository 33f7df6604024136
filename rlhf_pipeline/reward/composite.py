"""A reward made of others: their weighted sum, with floors that no weight can buy off.

Each term is brought to a common scale first, (score - centre) / scale, so that weights compare;
the two are given, or learnt from what the term scored in this training (`running`). Weights may
follow a schedule over PPO's updates. `breakdown` says what each term added.

Within an update nothing of it changes: the running scales are those of the updates before, so a
completion's score does not depend on which ones were scored beside it. Where a term may skip what
it cannot judge (`may_skip`), a skipped completion is given the mean of the call's others, which
neither helps nor hurts it, and the skip is counted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import (
    Gather,
    Prompt,
    RewardFunction,
    RewardInput,
    ScoreMoments,
    checked_scores,
    hashed,
    prompt_to_json,
)
from rlhf_pipeline.reward.settings import Linear, Stepped, Weight, weight_at

SOME = 4  # completions: of fewer in a call all may be skipped by chance
# In units of the composite: the most a completion under a floor can get, and where there are floors
# the least that any other can. However bad, it never comes after one that is refused.
BELOW_FLOOR = -5.0


@dataclass(frozen=True, slots=True)
class Term:
    """One reward in a composite, and how it counts."""

    reward: RewardFunction
    weight: Weight = 1.0  # negative: less of it is better
    centre: float = 0.0  # the reward's score that counts as 0
    scale: float = 1.0  # > 0, the difference in score that counts as 1
    floor: float | None = None  # the least score, uncentred; a completion under it is refused
    running: bool = False  # centre and scale follow what was scored; those above until then

    @property
    def may_skip(self) -> bool:
        """Whether the reward may give NaN for what it cannot judge, instead of failing."""
        return bool(getattr(self.reward, "may_skip", False))


@dataclass(frozen=True, slots=True)
class Piece:
    """What one term says of a completion."""

    score: float  # as the reward gave it
    normalised: float  # (score - centre) / scale
    added: float  # weight * normalised
    below_floor: bool
    skipped: bool = False  # the score is the mean of those that could be judged beside it


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A composite's score with what it is made of; where there are no floors, the pieces' sum."""

    score: float
    pieces: Mapping[str, Piece]


class CompositeReward:
    """The terms' weighted sum: a records.RewardFunction, ChangingReward and PiecedReward."""

    def __init__(
        self,
        terms: Mapping[str, Term],
        *,
        below_floor: float = BELOW_FLOOR,
        references: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Raises ModelError for no terms, or a number that makes no sum.

        `references` are completions to compare with, by records.prompt_to_json of the prompt, for
        items that bring none, as PPO's do not.
        """
        if not terms:
            raise ModelError("a composite reward needs one term or more, found none; name a reward")
        for name, term in terms.items():
            numbers = [term.centre, term.scale, term.floor or 0.0, below_floor]
            constant = not isinstance(term.weight, Linear | Stepped)
            numbers += [term.weight] if constant else []  # type: ignore[list-item]  # a number
            idle = term.weight == 0 and term.floor is None
            if not all(map(math.isfinite, numbers)) or term.scale <= 0 or idle:
                raise ModelError(
                    f"the term {name} needs finite numbers, a scale above 0 and a weight other "
                    f"than 0 or a floor, found weight {term.weight}, centre {term.centre}, scale "
                    f"{term.scale}, floor {term.floor}, below_floor {below_floor}; correct it or "
                    "leave the term out"
                )
        self.terms = dict(terms)
        self.below_floor = below_floor
        self.references = {key: tuple(texts) for key, texts in (references or {}).items()}
        parts = [
            f"{name}:{getattr(t.reward, 'version', 'unknown')}:{t.weight}:{t.centre}:{t.scale}"
            f":{t.floor}:{t.running}"
            for name, t in self.terms.items()
        ]
        known = [text for key in sorted(self.references) for text in (key, *self.references[key])]
        self.version = hashed("composite", str(below_floor), *parts, *known)
        self._heard: dict[str, list[Piece]] | None = None  # since an update began
        self.restore({})

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        """Return the scores. Raises ModelError naming a term that breaks its word."""
        return [one.score for one in self.judge(items)]

    def breakdown(
        self, prompt: Prompt, completion: str, references: tuple[str, ...] = ()
    ) -> Breakdown:
        """Return one completion's score, piece by piece."""
        return self.judge([RewardInput(prompt, completion, references)])[0]

    def of_share(
        self, items: Sequence[RewardInput], gather: Gather, /
    ) -> tuple[list[float], list[dict[str, float]]]:
        """Return a share's scores and pieces; what a term skipped gets the mean of all shares."""
        told = self.judge(items, gather)
        pieces = [
            {name: piece.score for name, piece in one.pieces.items() if not piece.skipped}
            for one in told
        ]
        return [one.score for one in told], pieces

    def judge(self, items: Sequence[RewardInput], gather: Gather = list) -> list[Breakdown]:
        """Return every item's breakdown, in order; each term is asked once for all of them."""
        items = [self._with_references(item) for item in items]
        by_term: dict[str, list[Piece]] = {}
        for name, term in self.terms.items():
            scores, skipped = _scores(term, items, name, self._middle(name)[0], gather)
            by_term[name] = [
                self._piece(name, score, skip) for score, skip in zip(scores, skipped, strict=True)
            ]
            if self._heard is not None:
                self._heard[name] += by_term[name]
        return [
            self._sum({name: pieces[i] for name, pieces in by_term.items()})
            for i in range(len(items))
        ]

    @property
    def piece_names(self) -> tuple[str, ...]:
        """Return the terms' names."""
        return tuple(self.terms)

    def scores_and_pieces(
        self, items: Sequence[RewardInput]
    ) -> tuple[list[float], list[dict[str, float]]]:
        """Return the scores, and of each item every term's raw score that was not skipped."""
        return self.of_share(items, list)

    @property
    def weights(self) -> dict[str, float]:
        """Return every term's weight as it is at this update."""
        return {name: weight_at(term.weight, self._update) for name, term in self.terms.items()}

    @property
    def learns_scales(self) -> bool:
        """Whether a term's scale follows what was scored."""
        return any(term.running for term in self.terms.values())

    def begin_update(self, update: int) -> None:
        """Take the weights for where `update` updates are made; note what is scored from here."""
        self._update = update
        self._heard = {name: [] for name in self.terms}

    def end_update(self, gather: Gather) -> dict[str, float]:
        """Take the scores since `begin_update` into the running scales; return each term's metrics.

        Metrics are named TERM/WHAT, see ppo.metrics. Raises ModelError where no update was begun.
        """
        if self._heard is None:
            raise ModelError("a composite ends an update that it began, found none; begin one")
        heard, self._heard = self._heard, None
        facts: dict[str, float] = {}
        for name, term in self.terms.items():
            judged = [piece for piece in heard[name] if not piece.skipped]
            facts[f"{name}/weight"] = weight_at(term.weight, self._update)
            scores = gather([piece.score for piece in judged])
            if scores:
                facts[f"{name}/score_mean"] = statistics.fmean(scores)
                added = gather([piece.added for piece in judged])
                facts[f"{name}/added_mean"] = statistics.fmean(added)
            if term.floor is not None and scores:
                below = gather([float(piece.below_floor) for piece in judged])
                facts[f"{name}/below_floor"] = statistics.fmean(below)
            if term.may_skip:
                skipped = gather([float(piece.skipped) for piece in heard[name]])
                facts[f"{name}/skipped"] = statistics.fmean(skipped) if skipped else 0.0
            if term.running:
                self._moments[name].add(scores)
        return facts

    def state(self) -> dict[str, Any]:
        """Return the update and the running scales, as JSON values."""
        moments = {name: asdict(moments) for name, moments in self._moments.items()}
        return {"update": self._update, "weights": self.weights, "moments": moments}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state` described; an empty one is the beginning."""
        self._update = int(state.get("update", 0))
        known = state.get("moments", {})
        self._moments = {
            name: ScoreMoments(**known.get(name, {}))
            for name, term in self.terms.items()
            if term.running
        }
        self._heard = None

    def _with_references(self, item: RewardInput) -> RewardInput:
        if item.references or not self.references:
            return item
        return replace(item, references=self.references.get(prompt_to_json(item.prompt), ()))

    def _middle(self, name: str) -> tuple[float, float]:
        """Return the score of a term that adds nothing, and how far another is from it adds 1."""
        term = self.terms[name]
        moments = self._moments[name] if term.running else None
        return (
            (moments.mean, moments.scale)
            if moments and moments.count
            else (term.centre, term.scale)
        )

    def _piece(self, name: str, score: float, skipped: bool) -> Piece:
        term, (centre, scale) = self.terms[name], self._middle(name)
        normalised = (score - centre) / scale
        below = term.floor is not None and score < term.floor and not skipped
        weight = weight_at(term.weight, self._update)
        return Piece(score, normalised, weight * normalised, below, skipped)

    def _sum(self, pieces: Mapping[str, Piece]) -> Breakdown:
        total = math.fsum(piece.added for piece in pieces.values())
        if any(piece.below_floor for piece in pieces.values()):
            total = min(total, self.below_floor)
        elif any(term.floor is not None for term in self.terms.values()):
            total = max(total, self.below_floor)
        return Breakdown(total, pieces)


def _scores(
    term: Term, items: Sequence[RewardInput], name: str, middle: float, gather: Gather
) -> tuple[list[float], list[bool]]:
    """Return the term's scores, and which of them stand in for what it could not judge.

    Those are the mean of the others or, of so few that all were skipped by chance, the `middle`.
    """
    if not term.may_skip:
        return checked_scores(term.reward, items, name=name, error=ModelError), [False] * len(items)
    given = [float(score) for score in term.reward(items)] if items else []
    skipped = [math.isnan(score) for score in given]
    judged = gather([score for score in given if not math.isnan(score)])
    if not judged and (asked := len(gather([0.0] * len(items)))) >= SOME:
        raise ModelError(
            f"the {name} reward must judge some of {asked} completions, found all skipped; "
            "look at its service, or leave it out"
        )
    mean = statistics.fmean(judged) if judged else middle
    filled = [mean if skip else score for skip, score in zip(skipped, given, strict=True)]
    return checked_scores(lambda _: filled, items, name=name, error=ModelError), skipped
