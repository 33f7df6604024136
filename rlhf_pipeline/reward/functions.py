"""Reward functions: whatever scores completions, behind one checked interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import RewardFunction, RewardInput, checked_scores


class CheckedReward:
    """A reward function held to its contract: one finite number per item, in order."""

    def __init__(self, reward: RewardFunction, name: str, *, version: str | None = None) -> None:
        self.reward = reward
        self.name = name
        self._version = name if version is None else version

    @property
    def version(self) -> Any:
        """Return the function's own version; what has none counts as what it was made with says."""
        return getattr(self.reward, "version", self._version)

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        """Return the scores. Raises ModelError if the function breaks the contract."""
        return checked_scores(self.reward, items, name=self.name, error=ModelError)


RewardSource = str | Path | RewardFunction | Mapping[str, "RewardSource"]
"""A callable; a reward model's folder; the address of a remote one; several of these, by name."""


def as_reward(source: RewardSource, *, device: str = "auto") -> RewardFunction:
    """Return a checked reward function from any of the forms a reward comes in.

    Several are an ensemble by their mean; reward.ensemble.EnsembleReward combines otherwise.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        from rlhf_pipeline.reward.remote import RemoteReward

        return RemoteReward(source)
    if isinstance(source, str | Path):
        from rlhf_pipeline.reward.model import load_reward_model

        return load_reward_model(source, device=device)
    if isinstance(source, Mapping):
        from rlhf_pipeline.reward.ensemble import EnsembleReward

        return EnsembleReward({n: as_reward(one, device=device) for n, one in source.items()})
    return CheckedReward(source, getattr(source, "__name__", type(source).__name__))
