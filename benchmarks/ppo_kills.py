"""Two hundred kill -9 at random instants of PPO training; each run must end bit-identical.

python -m benchmarks.ppo_kills [--kills 200] [--seed 2]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.ppo.test_resume import kill_at_random
from tests.ppo.world import save_base


def main() -> None:
    """Kill, resume, compare; raises AssertionError where a run ends otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2, help="Of the instants.")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        base = save_base(Path(folder) / "base")
        counts = kill_at_random([sys.executable], base, Path(folder), options.kills, options.seed)
    print("| kills | in a save | runs | ended bit-identical | seconds |\n|---|---|---|---|---|")
    print(
        f"| {options.kills} | {counts['in_a_save']} | {counts['runs']} | {counts['runs']} "
        f"| {time.monotonic() - started:.0f} |"
    )


if __name__ == "__main__":
    main()
