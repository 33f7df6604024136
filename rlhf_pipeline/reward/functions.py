"""Reward functions: whatever scores completions, behind one checked interface."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import RewardFunction, RewardInput


class CheckedReward:
    """A reward function held to its contract: one finite number per item, in order."""

    def __init__(self, reward: RewardFunction, name: str) -> None:
        self.reward = reward
        self.name = name

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        """Return the scores. Raises ModelError if the function breaks the contract."""
        scores = [float(score) for score in self.reward(items)] if items else []
        if len(scores) != len(items):
            raise ModelError(
                f"reward {self.name} must give one score per item, found {len(scores)} for "
                f"{len(items)}; correct the function"
            )
        broken = [i for i, score in enumerate(scores) if not math.isfinite(score)]
        if broken:
            raise ModelError(
                f"reward {self.name} must give finite scores, found {scores[broken[0]]} for item "
                f"{broken[0]} and {len(broken) - 1} more; correct the function"
            )
        return scores


def as_reward(source: str | Path | RewardFunction, *, device: str = "auto") -> RewardFunction:
    """Return a checked reward function from a callable, or from a reward model's folder."""
    if isinstance(source, str | Path):
        from rlhf_pipeline.reward.model import load_reward_model

        return load_reward_model(source, device=device)
    return CheckedReward(source, getattr(source, "__name__", type(source).__name__))
