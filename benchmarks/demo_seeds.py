"""No seed lottery in the demo: the loop, closed once per seed, each with its own people and models.

    python -m benchmarks.demo_seeds [SEED ...]        (default: 0 1 2; minutes each)

Each run is the demo with nothing but the seed changed, in a state folder of its own. Prints one
row per seed and ends with status 1 if a promise is short on any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from rlhf_pipeline.config import RECIPES

ROOT = Path(__file__).parents[1]


def run(seed: int, folder: Path) -> list[dict[str, object]]:
    """Return the demo's table for one seed, also of one whose candidate the gate refused."""
    recipe = yaml.safe_load((RECIPES / "tiny.yaml").read_text(encoding="utf-8"))
    recipe["training"] = {"seed": seed}
    path, table = folder / f"seed-{seed}.yaml", folder / f"seed-{seed}.json"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    environment = {
        **os.environ,
        "RLHF_RECIPE": str(path),
        "RLHF_STATE_DIR": str(folder / f"state-{seed}"),
    }
    command = [sys.executable, "-m", "automation.demo", "--seed", str(seed), "--json", str(table)]
    subprocess.run([*command, "--turns", "1"], cwd=ROOT, env=environment, check=False)
    rows: list[dict[str, object]] = json.loads(table.read_text())
    return rows


def main() -> None:
    """Run the seeds named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "seeds",
        metavar="SEED",
        nargs="*",
        type=int,
        default=[0, 1, 2],
        help="default: 0 1 2; minutes each",
    )
    seeds: list[int] = parser.parse_args().seeds
    short = 0
    with tempfile.TemporaryDirectory() as folder:
        tables = {seed: run(seed, Path(folder)) for seed in seeds}
    print("| what | " + " | ".join(f"seed {seed}" for seed in seeds) + " |")
    print("|---" * (len(seeds) + 1) + "|")
    for position, first in enumerate(tables[seeds[0]]):
        found = [tables[seed][position] for seed in seeds]
        short += sum(not row["met"] for row in found)
        print(f"| {first['what']} | " + " | ".join(str(row["found"]) for row in found) + " |")
    sys.exit(1 if short else 0)


if __name__ == "__main__":
    main()
