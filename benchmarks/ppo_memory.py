"""Resident memory of a long PPO run: its curve, and its slope with an interval.

    python -m benchmarks.ppo_memory --updates 500

Whole runs of `train_ppo` on a tiny policy (2 layers of width 32), with everything that a run does
again and again: sampling, a composite reward, criteria heads, looks at the watch prompts,
checkpoints. One run with a shared and one with a separate critic, each in a process of its own.
Memory is read after every update; the slope is that of a line through the means of every
20 updates after the first 100, which warm the allocator, with Student's interval. What a run must
keep grows a little: the metrics of its updates, which its result holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

WARM, BLOCK, SHOWN = 100, 20, 50  # updates
MIB = 2**20


def run(updates: int, critic: str) -> None:
    """Train once and print the memory after every update, in MiB, as JSON."""
    import torch

    from rlhf_pipeline.ppo.memory import resident_memory
    from tests.ppo.world import changed, save_base, train, two_pieces

    torch.set_num_threads(1)
    resident: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        base = save_base(Path(folder) / "base")
        settings = changed(
            updates=updates,
            critic=critic,
            learning_rate=1e-4,
            epochs=1,
            evaluate_every=10,
            checkpoint_every=10,
        )

        def note(facts: object) -> None:
            if isinstance(facts, dict) and "train/loss" in facts:
                resident.append(resident_memory()[0] / MIB)

        result = train(base, Path(folder) / "run", settings, reward=two_pieces(), report=note)
    kept = len(json.dumps(result.history)) / MIB
    sys.stdout.write(json.dumps({"resident": resident, "history": kept}))


def slope(resident: Sequence[float]) -> tuple[float, float, float]:
    """Return MiB per 100 updates after the warm ones, and the 95 % interval's ends."""
    from scipy import stats

    kept = np.array(resident[WARM:])
    blocks = kept[: len(kept) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(1)
    fitted = stats.linregress(np.arange(len(blocks)) * BLOCK / 100, blocks)
    half = float(fitted.stderr) * float(stats.t.ppf(0.975, len(blocks) - 2))
    return float(fitted.slope), float(fitted.slope) - half, float(fitted.slope) + half


def main() -> None:
    """Run both critics and print their curves."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--critic", choices=["shared", "separate"], help="run this one, here")
    given = parser.parse_args()
    if given.critic:
        run(given.updates, given.critic)
        return
    places = range(SHOWN, given.updates + 1, SHOWN)
    print("| critic | " + " | ".join(f"update {u}" for u in places) + " | MiB / 100 updates |")
    print("|---" * (len(places) + 2) + "|")
    for critic in ("shared", "separate"):
        began = time.monotonic()
        words = ["--updates", str(given.updates), "--critic", critic]
        told = subprocess.run(
            [sys.executable, "-m", "benchmarks.ppo_memory", *words],
            capture_output=True,
            text=True,
            check=True,
        )
        said = json.loads(told.stdout)
        resident = said["resident"]
        found, low, high = slope(resident)
        curve = [f"{statistics.fmean(resident[u - 10 : u]):.1f}" for u in places]
        print(
            f"| {critic} | {' | '.join(curve)} | {found:+.2f} ({low:+.2f} to {high:+.2f}) |",
            flush=True,
        )
        print(
            f"{critic}: {time.monotonic() - began:.0f} s; the metrics it keeps are "
            f"{said['history']:.2f} MiB as JSON",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
