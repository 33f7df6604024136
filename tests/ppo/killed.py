"""A run that is killed with -9 as it scores the fourth update's rollouts.

python -m tests.ppo.killed BASE FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_pipeline.records import RewardInput
from tests.ppo.test_resume import SETTINGS
from tests.ppo.world import lower_share, train


def main() -> None:
    """Train until the end comes."""
    torch.set_num_threads(1)
    calls = 0

    def deadly(items: Sequence[RewardInput], /) -> list[float]:
        nonlocal calls
        calls += len(items) == SETTINGS.rollouts_per_update
        if calls == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return lower_share(items)

    train(Path(sys.argv[1]), Path(sys.argv[2]), SETTINGS, reward=deadly)


if __name__ == "__main__":
    main()
