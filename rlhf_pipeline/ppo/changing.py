"""A reward that changes while PPO trains on it: when it may, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_pipeline.ppo.collecting import Task, sample_for, score_together
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.records import ChangingReward, RewardFunction

SHOWN_FIRST = 64  # completions of the starting policy that scales begin from


class Curriculum:
    """The reward's changes, in the order of updates; of a reward that never changes, nothing."""

    def __init__(self, reward: RewardFunction) -> None:
        self.changing = reward if isinstance(reward, ChangingReward) else None

    def start(self, learner: Learner, task: Task) -> None:
        """Begin at the beginning: without state, then with scales from the policy as it is."""
        if self.changing is None:
            return
        self.changing.restore({})
        if not self.changing.learns_scales:
            return
        self.begin(0)
        generator = torch.Generator().manual_seed(learner.settings.seed + 3)
        sampled = sample_for(learner, task.encoded[:SHOWN_FIRST], generator, task.engine)
        prompts = task.prompts[:SHOWN_FIRST]
        score_together(learner, task.reward, prompts, sampled.texts, name="proxy")
        self.end(learner)

    def begin(self, update: int) -> None:
        """Let the reward be that of this update, `update` of them being made."""
        if self.changing is not None:
            self.changing.begin_update(update)

    def end(self, learner: Learner) -> dict[str, float]:
        """Let the reward learn from what it scored; return its metrics."""
        if self.changing is None:
            return {}
        told = self.changing.end_update(learner.team.gather_numbers)
        return {f"reward/{name}": number for name, number in told.items()}

    @contextmanager
    def in_one_unit(self, first: Mapping[str, Any], updates: int) -> Iterator[None]:
        """Score as nothing changed: by the scales of `first`, and the weights `updates` end with.

        What is scored meanwhile is not learnt from. Without `first` (a checkpoint of a release that
        looked as the update was) as it is now.
        """
        if not first:
            yield
            return
        was = self.state()
        self.restore(first)
        self.begin(updates - 1)
        try:
            yield
        finally:
            self.restore(was)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {} if self.changing is None else self.changing.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        if self.changing is not None:
            self.changing.restore(state)
