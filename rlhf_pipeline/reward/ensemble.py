"""Several reward functions as one: their mean, their median, or their mean less their disagreement.

A policy finds what one reward model is wrong about; several trained apart are seldom wrong alike.
Where raters may be bought, heads on partitions of them and the median keep the rest in charge.
What this does not do: bring scores of different scales together; centre and scale them before.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import RewardFunction, RewardInput, checked_scores, hashed

Combine = Literal["mean", "median", "pessimistic"]
COMBINE: tuple[Combine, ...] = ("mean", "median", "pessimistic")


@dataclass(frozen=True, slots=True)
class EnsembleScores:
    """What an ensemble says of some items, each tuple in their order."""

    scores: tuple[float, ...]
    disagreement: tuple[float, ...]  # deviation among the members, in units of score
    by_member: Mapping[str, tuple[float, ...]]


class EnsembleReward:
    """The members' scores combined, itself a reward function.

    mean        their mean
    median      their median: more than half of them must be wrong together
    pessimistic their mean less disagreement_weight times their deviation; arXiv:2310.02743 eq. 4,
                with the deviation where the paper has the variance, so that the weight has no unit
    """

    def __init__(
        self,
        members: Mapping[str, RewardFunction],
        *,
        combine: Combine = "mean",
        disagreement_weight: float = 1.0,
    ) -> None:
        """Raises ModelError for fewer than two members or a combination nobody knows."""
        if len(members) < 2:
            raise ModelError(
                f"an ensemble needs at least two rewards, found {len(members)}; add one, or use "
                "the one itself"
            )
        if combine not in COMBINE or not disagreement_weight >= 0:
            raise ModelError(
                f"an ensemble combines by {', '.join(COMBINE)} with a disagreement_weight of 0 or "
                f"more, found {combine!r} and {disagreement_weight}; correct it"
            )
        self.members = dict(members)
        self.combine = combine
        self.disagreement_weight = disagreement_weight
        versions = [f"{n}:{getattr(r, 'version', 'unknown')}" for n, r in self.members.items()]
        self.version = hashed("ensemble", combine, str(disagreement_weight), *versions)

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        """Return the combined scores. Raises ModelError naming a member that breaks its word."""
        return list(self.judge(items).scores)

    def judge(self, items: Sequence[RewardInput]) -> EnsembleScores:
        """Return the combined scores with what each member gave and how far they disagree."""
        by_member = {
            name: tuple(checked_scores(reward, items, name=name, error=ModelError))
            for name, reward in self.members.items()
        }
        per_item = list(zip(*by_member.values(), strict=True))
        disagreement = tuple(statistics.pstdev(scores) for scores in per_item)
        combined = map(self._combined, per_item, disagreement)
        return EnsembleScores(tuple(combined), disagreement, by_member)

    def _combined(self, scores: Sequence[float], disagreement: float) -> float:
        if self.combine == "median":
            return statistics.median(scores)
        mean = statistics.fmean(scores)
        if self.combine == "pessimistic":
            return mean - self.disagreement_weight * disagreement
        return mean
