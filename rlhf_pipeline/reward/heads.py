"""Several heads on one frozen trunk, each fitted to raters of its own, and their scores as one.

What few raters plant reaches the heads that read them and no other; the median follows the rest.
The trunk must be frozen: one that learnt from everybody would hand every head the trigger. How far
the heads disagree says where the reward is least sure of itself. The price is accuracy: each head
sees a part of the votes, and how much that costs is measured by benchmarks/reward_trust.py and, of
every kind (kinds.py has how those are fitted), by benchmarks/reward_kinds.py. A criterion that
people rate by name stays one head of everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_pipeline.errors import NotEnoughData
from rlhf_pipeline.records import hashed
from rlhf_pipeline.reward.ensemble import Combine
from rlhf_pipeline.reward.logistic import logistic, preference_loss

HEAD_RIDGES = (1.0, 3.0, 10.0)  # strengths tried, one for all heads


@dataclass(frozen=True, slots=True)
class Combined:
    """How the heads' scores become one: reward/ensemble.py says what each way means."""

    combine: Combine = "median"
    disagreement_weight: float = 1.0

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the combined scores (B,) of scores (B, K)."""
        if scores.shape[1] == 1:
            return scores[:, 0]
        if self.combine == "median":
            ordered, middle = scores.sort(1).values, scores.shape[1] // 2
            return (ordered[:, middle] + ordered[:, -middle - 1]) / 2
        if self.combine == "mean":
            return scores.mean(1)
        return scores.mean(1) - self.disagreement_weight * disagreement(scores)


def disagreement(scores: Tensor) -> Tensor:
    """Return the deviation among the heads (B,), of scores (B, K), in units of score."""
    return (scores - scores.mean(1, keepdim=True)).square().mean(1).sqrt()


def parts_of(voters: Sequence[str], heads: int) -> dict[str, int]:
    """Return which head learns from each voter: dealt out in the order of their hashes.

    Raises NotEnoughData where there are fewer voters than heads.
    """
    names = sorted(set(voters), key=lambda voter: hashed("reward head", voter))
    if len(names) < heads:
        raise NotEnoughData(
            f"{heads} heads need {heads} raters, one each at least, found {len(names)}; lower "
            "reward.heads or collect feedback from more people"
        )
    return {name: i % heads for i, name in enumerate(names)}


def fit_heads(
    chosen: Tensor,
    rejected: Tensor,
    targets: Tensor,
    weights: Tensor,
    parts: Tensor,
    kept_out: Tensor,
    combined: Combined,
) -> tuple[Tensor, float]:
    """Return the heads (K, F) and their ridge, each fitted to the pairs of its part.

    Shapes: the two sides' features (N, F) float64, of one scale and about their common mean, as the
    scores will be; the others (N,). The ridge is the one under which what is `kept_out` is
    likeliest, by margins between combined scores; then all pairs are used.
    """
    differences = chosen - rejected
    decided = kept_out & (targets == 1)
    ridge = HEAD_RIDGES[len(HEAD_RIDGES) // 2]
    if decided.any() and not kept_out.all():
        surprise: dict[float, float] = {}
        for tried in HEAD_RIDGES:
            heads = _fitted(differences, targets, weights, parts, ~kept_out, tried)
            scores = [combined(side[decided] @ heads.T) for side in (chosen, rejected)]
            margins = scores[0] - scores[1]
            surprise[tried] = float(preference_loss(margins, targets[decided]).mean())
        ridge = min(surprise, key=lambda r: surprise[r])
    everything = torch.ones_like(kept_out)
    return _fitted(differences, targets, weights, parts, everything, ridge), ridge


def _fitted(
    differences: Tensor, targets: Tensor, weights: Tensor, parts: Tensor, used: Tensor, ridge: float
) -> Tensor:
    heads = []
    for part in range(int(parts.max()) + 1):
        mine = used & (parts == part)
        heads.append(logistic(differences[mine], targets[mine], ridge, weights[mine])[0])
    return torch.stack(heads)
