"""What a long run keeps: nothing."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil
import pytest
import torch

from rlhf_pipeline.ppo.collecting import encode_checked, next_prompts, sample_for
from rlhf_pipeline.ppo.measuring import make_rollouts
from rlhf_pipeline.ppo.optimising import train_on
from tests.ppo.world import PROMPTS, changed, learner_at

MIB = 2**20


def resident_mib() -> float:
    """Return what this process holds, less what it freed and the allocator keeps."""
    if sys.platform == "linux":  # other tests before it leave a heap full of holes
        ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss / MIB)


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_resident_memory_is_flat_over_500_updates(base: Path, critic: str) -> None:
    settings = changed(updates=500, critic=critic, learning_rate=1e-5, epochs=1)
    learner = learner_at(base, settings)
    encoded = encode_checked(learner.policy, PROMPTS, settings, "prompts")
    generator = torch.Generator().manual_seed(0)
    resident: list[float] = []
    for update in range(settings.updates):
        used = update * settings.prompts_per_update
        members = next_prompts(used, settings, len(PROMPTS))
        sampled = sample_for(learner, [encoded[i] for i in members], generator)
        rollouts, _ = make_rollouts(learner, sampled, [0.0] * len(members), settings.kl_coef)
        train_on(learner, rollouts, generator)
        resident.append(resident_mib())
    # One rollout's tensors kept per update would be a few hundred KiB each: 100 MiB and more.
    assert resident[-1] - resident[99] < 8
