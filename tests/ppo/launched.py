"""Two processes that train one policy, as a launcher would start them.

    python -m tests.ppo.launched BASE FOLDER PORT

A process that has loaded torch but computed nothing forks both, so that importing is paid once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.records import RewardFunction
from tests.ppo.world import changed, lower_share, train, two_pieces

SIZE = 2
RUNS: dict[str, PpoSettings] = {
    "shared": changed(
        kl_controller="adaptive", kl_horizon=100, score_normalisation="running", top_k=40
    ),
    # Odd numbers: shares of rollouts, minibatches and watch prompts differ in size.
    "separate": changed(
        critic="separate", rollouts_per_update=15, minibatches=3, replay_updates=1, updates=3
    ),
}


def reward_of(name: str) -> RewardFunction:
    """Return what a run maximises: in one of them a reward that changes as training goes on."""
    return two_pieces() if name == "separate" else lower_share


def run_all(base: Path, folder: Path) -> None:
    """Train every run; a run that was cut short is gone on with."""
    for name, settings in RUNS.items():
        reward = reward_of(name)
        train(base, folder / name, settings, stopping=lower_share, reward=reward)
    try:
        train(base, folder / "interrupted", RUNS["shared"], keep_going=interruption())
    except KeyboardInterrupt:
        train(base, folder / "interrupted", RUNS["shared"])


def interruption() -> Callable[[], None]:
    """Return a check that stops the run at its third look."""
    looks = iter(range(99))

    def check() -> None:
        if next(looks) == 3:
            raise KeyboardInterrupt

    return check


def fork(work: Callable[[int], None]) -> int:
    """Fork the processes, let each do the work of its rank, and return 1 if one failed, else 0."""
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(rank)
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    return int(any(os.waitpid(child, 0)[1] for child in children))


def main() -> None:
    """Train in every process; exit with 1 if one failed."""
    base, folder, port = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)

    def work(rank: int) -> None:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(SIZE),
            "LOCAL_WORLD_SIZE": str(SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        run_all(base, folder)

    sys.exit(fork(work))


if __name__ == "__main__":
    main()
