"""The critic's criteria heads: beside what a state is worth, what each piece of the reward says.

A head is linear on the hidden states the value is read from, and foretells the raw score that one
named piece of the reward (records.PiecedReward) gives the whole completion: at its first token from
the prompt alone, at its last from nearly all of it. Heads are fitted by least squares in the pass
that measures the values, over this update's tokens and, fading, those before. No gradient goes
through them, so they cost little and change nothing else of a run; where the reward has no pieces,
or the estimator no critic, there are none. What they do not do: shape the trunk they read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_pipeline.ppo.advantages import counted, explained_variance
from rlhf_pipeline.ppo.processes import Team
from rlhf_pipeline.records import (
    Gather,
    PiecedReward,
    Prompt,
    RewardFunction,
    RewardInput,
    SharedReward,
)

Told = tuple[Sequence[float], Sequence[Mapping[str, float]]]
"""Scores, and what the pieces said, as records.PiecedReward gives them."""
FADING = 0.8  # what the updates before still count, per update: the states move with the policy


class Noting:
    """A pieced reward that remembers, until `take`, what its pieces said of each completion."""

    def __init__(self, reward: PiecedReward) -> None:
        self.reward = reward
        self.version = str(getattr(reward, "version", True))
        self._said: dict[tuple[Prompt, str], Mapping[str, float]] = {}

    def __call__(self, items: Sequence[RewardInput], /) -> Sequence[float]:
        """Return the reward's scores."""
        return self._noted(items, self.reward.scores_and_pieces(items))[0]

    def of_share(self, items: Sequence[RewardInput], gather: Gather, /) -> Told:
        """Return a share's scores and pieces, as the reward tells of shares where it does."""
        if isinstance(self.reward, SharedReward):
            return self._noted(items, self.reward.of_share(items, gather))
        return self._noted(items, self.reward.scores_and_pieces(items) if items else ([], []))

    def _noted(self, items: Sequence[RewardInput], told: Told) -> Told:
        for item, said in zip(items, told[1], strict=True):
            self._said[item.prompt, item.completion] = said
        return told

    def forget(self) -> None:
        """Forget what was said, of a look or of scales before any: no checkpoint keeps it."""
        self._said = {}

    def take(self, prompts: Sequence[Prompt], completions: Sequence[str], team: Team) -> Tensor:
        """Return the pieces' raw scores (B, K), and forget them all.

        NaN stands in the rows of completions that no process has scored, or that a piece could not
        judge.
        """
        names = self.reward.piece_names
        found = torch.zeros(len(completions), len(names) + 1, dtype=torch.float64)
        for i, key in enumerate(zip(prompts, completions, strict=True)):
            said = self._said.get(key, {})
            if all(name in said for name in names):
                found[i] = torch.tensor([*(said[name] for name in names), 1.0])
        self.forget()
        found = team.add(found).cpu()  # two processes may have scored the same one: alike
        return found[:, :-1] / found[:, -1:]  # 0 / 0 is NaN


def noting(reward: RewardFunction, *, has_critic: bool) -> Noting | None:
    """Return the reward as one whose pieces are noted; None where there is nothing to learn."""
    return Noting(reward) if has_critic and isinstance(reward, PiecedReward) else None


class CriteriaHeads:
    """K linear heads on states of `width` numbers, and the sums they are fitted from."""

    def __init__(self, names: Sequence[str], width: int) -> None:
        self.names = tuple(names)
        size, double = width + 1, torch.float64  # the last input is 1: the bias
        self.gram = torch.zeros(size, size, dtype=double)
        self.cross = torch.zeros(size, len(self.names), dtype=double)
        self.weights = torch.zeros(size, len(self.names), dtype=double)
        self.tokens = torch.zeros((), dtype=double)  # that the sums are of, faded like them

    def __call__(self, states: Tensor) -> Tensor:
        """Return what is foretold, (…, K) float32, of states (…, width)."""
        weights = self.weights.float().to(states.device)
        with torch.autocast(states.device.type, enabled=False):
            return states.float() @ weights[:-1] + weights[-1]

    def sums(self, states: Tensor, targets: Tensor) -> Tensor:
        """Return what N states (N, width) with targets (N, K) add: products, (width + 1, …)."""
        with torch.autocast(states.device.type, enabled=False):
            x = torch.cat([states.float(), states.new_ones(len(states), 1).float()], 1)
            return (x.T @ torch.cat([x, targets.to(x)], 1)).double().cpu()

    def learn(self, sums: Tensor) -> None:
        """Fit the heads to an update's sums and the faded ones of those before.

        The ridge is one token's worth of noise for every number of a state, spread over what was
        seen: it is strong where there are fewer tokens than numbers, and vanishes with more. The
        bias has none. Sums that are not finite are left out; training stops for them by itself.
        """
        if not bool(sums.isfinite().all()):
            return
        size = len(self.gram)
        self.gram = FADING * self.gram + sums[:, :size]
        self.cross = FADING * self.cross + sums[:, size:]
        self.tokens = self.gram[-1, -1].clone()
        if not self.tokens:
            return
        ridge = torch.full((size,), float(self.gram.diagonal()[:-1].mean()), dtype=torch.float64)
        ridge = ridge * (size / self.tokens) + 1e-9
        ridge[-1] = 0.0
        # Laid out as a checkpoint gives it back: another layout multiplies with other rounding.
        self.weights = torch.linalg.solve(self.gram + ridge.diag(), self.cross).contiguous()

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it for a checkpoint."""
        return {name: getattr(self, name) for name in _KEPT}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` returned."""
        for name in _KEPT:
            setattr(self, name, tensors[name].clone())


_KEPT = ("gram", "cross", "weights", "tokens")


def criteria_facts(
    heads: CriteriaHeads, foretold: Tensor, pieces: Tensor, completion_mask: Tensor
) -> dict[str, float]:
    """Return how much of each piece the heads foretold before they saw it; nothing at first.

    foretold (B, T, K), pieces (B, K) with NaN where nothing is known.
    """
    if not bool(heads.weights.any()):
        return {}
    known = pieces.isfinite().all(1)
    mask = completion_mask & known[:, None].to(completion_mask.device)
    if not bool(mask.any()):
        return {}
    targets = pieces.nan_to_num().to(foretold)[:, None].expand_as(foretold)
    return {
        f"critic/{name}/explained_variance": explained_variance(
            counted(foretold[..., k], mask), counted(targets[..., k], mask), mask
        )
        for k, name in enumerate(heads.names)
    }
