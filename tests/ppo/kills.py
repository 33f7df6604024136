"""kill -9 at random instants of a real process that trains; then the run is asked for again.

    python -m tests.ppo.kills BASE FOLDER KILLS SEED

A process that has loaded torch but computed nothing forks each attempt, so that an attempt costs
what training costs and not what importing does. Prints JSON: how many kills hit sampling and
learning, how many a half-written checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.ppo.test_resume import SETTINGS
from tests.ppo.world import train

LONGEST = 120.0  # seconds an attempt may take before something is wrong


def attempt(base: Path, folder: Path, until: float | None) -> bool:
    """Fork one attempt, kill it after `until` seconds (None: never); return whether it finished."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            train(base, folder, SETTINGS)
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    started = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                raise SystemExit(f"an attempt ended with status {status}")
            return True
        waited = time.monotonic() - started
        if waited > LONGEST:
            os.kill(child, signal.SIGKILL)
            raise SystemExit(f"an attempt took over {LONGEST:.0f} s")
        if until is not None and waited >= until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.001)


def main() -> None:
    """Kill a run again and again, then let it finish."""
    base, folder, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5])
    torch.set_num_threads(1)
    rng = random.Random(seed)
    started = time.monotonic()
    attempt(base, folder / "whole", None)
    whole = time.monotonic() - started
    counts = {"between": 0, "in_a_save": 0, "runs": 0}
    done = 0
    while done < kills:
        run = folder / f"killed-{counts['runs']}"
        counts["runs"] += 1
        for _ in range(5):
            before = set(run.glob("checkpoints/.*.new-*"))  # what earlier kills left
            if done == kills or attempt(base, run, rng.uniform(0, whole)):
                break
            done += 1
            saving = set(run.glob("checkpoints/.*.new-*")) - before
            counts["in_a_save" if saving else "between"] += 1
        attempt(base, run, None)
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main()
