"""kill -9 at every named point of a turn, again and again; each must end as if nothing happened.

python -m benchmarks.kill_points [--times 20] [--source FOLDER] [--json FILE] [POINT ...]
python -m benchmarks.kill_points --chain | --stalls [--source FOLDER]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.assets.kills import (
    CHAIN,
    POINTS,
    STALLS,
    in_a_fork,
    killed_at_one_point_after_another,
    play,
    prepare,
    stalled_and_overtaken,
    train_from,
)


def train_source(folder: Path) -> None:
    """Train one real turn in a state folder, for the others to take their models from."""
    import dagster as dg

    from automation import processes
    from tests.assets.world import Loop, chat

    home = processes.prepare_home(folder)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        loop = Loop(folder, instance)
        agent_id = loop.agent("source")
        chat(loop.pipeline.store, agent_id, 160)
        assert loop.run("retrain", agent_id).success


def wake(state: Path, source: Path) -> bool:
    """Stop a turn, let another attempt end it, wake the first; say whether nothing was changed."""
    recipe = prepare(state)
    train_from(source)
    well = []
    for number, (name, point) in enumerate(STALLS.items()):
        well.append(stalled_and_overtaken(recipe, point, f"s{number}"))
        print(f"stalled {name}: {'overtaken, and silent when woken' if well[-1] else 'harmed'}")
    return all(well)


def chain(state: Path, source: Path) -> bool:
    """Kill one turn at point after point; say whether it ended as if nothing had happened."""
    began = time.monotonic()
    *died, ended = killed_at_one_point_after_another(state, source)
    outcome = "ended well" if ended == 0 else "was harmed"
    print(f"one turn killed at {len(died)} of {len(CHAIN)} points {outcome}", end="")
    print(f" in {time.monotonic() - began:.1f} s")
    return ended == 0


def main() -> None:
    """Kill, recover, count; exit code 0 only if every turn recovered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("points", nargs="*", metavar="POINT", help=", ".join(POINTS))
    parser.add_argument("--times", type=int, default=20, help="kills at each point")
    parser.add_argument("--source", type=Path, default=None, help="a trained turn's folder")
    parser.add_argument("--chain", action="store_true", help="one turn, point after point")
    parser.add_argument("--stalls", action="store_true", help="stop and wake instead of killing")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, source = Path(scratch), options.source
        if source is None:
            if in_a_fork(lambda: train_source(folder / "source"), seconds=900) != 0:
                raise SystemExit("the turn to take the models from could not be trained")
            [source] = (folder / "source" / "agents" / "source" / "turns").iterdir()
        if options.chain:
            raise SystemExit(0 if chain(folder / "state", source) else 1)
        if options.stalls:
            raise SystemExit(0 if wake(folder / "state", source) else 1)
        told = play(folder / "state", source, options.times, options.points or list(POINTS))
    print("| killed where | kills | recovered | seconds each |\n|---|---|---|---|")
    for name, numbers in told.items():
        each = numbers["seconds"] / numbers["kills"]
        print(f"| {name} | {numbers['kills']:.0f} | {numbers['recovered']:.0f} | {each:.1f} |")
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1))
    if any(numbers["recovered"] < numbers["kills"] for numbers in told.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
