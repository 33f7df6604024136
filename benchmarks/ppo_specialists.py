"""Three agents around one critic, beside the same three with a critic each.

    python -m benchmarks.ppo_specialists --work .rlhf-specialists

Recipe `specialists` in the simulated world: one baseline, then the same training twice. What each
agent earned and what people secretly think, before and after, on prompts nobody trained on; the
critic's explained variance over the last quarter of the updates; the memory that critics take
(weights, gradients, Adam's moments) and each process's peak. Work that is done is kept in --work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_pipeline.config import load_settings
from rlhf_pipeline.files import read_json, write_json
from rlhf_pipeline.records import ignore_progress

MIB = 2**20


def run(work: Path, critic: str, updates: int | None) -> None:
    """Train the agents once and write what came of them to work/critic.json."""
    from rlhf_pipeline.ppo.memory import forget_peak, resident_memory
    from rlhf_pipeline.ppo.specialists import Specialist, build_learners, critic_bytes
    from rlhf_pipeline.specialising import as_markdown, baseline_of, specialise

    settings = load_settings("specialists")
    if updates is not None:
        settings = settings.model_copy(update={"ppo": replace(settings.ppo, updates=updates)})
    start = baseline_of(settings, work / "baseline", ignore_progress)
    if critic == "baseline":
        return
    shares = critic == "shared"
    began = time.monotonic()
    forget_peak()
    rows = specialise(settings, work / critic, shares_critic=shares, baseline=start)
    seconds, peak = time.monotonic() - began, resident_memory()[1]
    nobody = {n: Specialist(start, start, len, [], []) for n in settings.specialists}  # type: ignore[arg-type]  # never asked
    learners = build_learners(nobody, settings.ppo, shares_critic=shares)
    write_json(
        work / f"{critic}.json",
        {
            "table": as_markdown(rows),
            "explained": {row.agent: row.explained_variance for row in rows},
            "before": {row.agent: dict(row.before) for row in rows},
            "after": {row.agent: dict(row.after) for row in rows},
            "critics": 4 * critic_bytes(list(learners.values())),
            "peak": peak,
            "seconds": seconds,
        },
    )


def table(shared: dict[str, Any], apart: dict[str, Any]) -> str:
    """Return both runs as Markdown."""
    lines = [
        "| agent | on held-out prompts | before | one critic | a critic each |",
        "|---|---|---|---|---|",
    ]
    for agent, after in shared["after"].items():
        for name, value in after.items():
            before, other = shared["before"][agent][name], apart["after"][agent][name]
            lines.append(f"| {agent} | {name} | {before:.3f} | {value:.3f} | {other:.3f} |")
    lines += ["", "| | one critic | a critic each |", "|---|---|---|"]
    for agent, explained in shared["explained"].items():
        lines.append(
            f"| explained variance, {agent} | {explained:.2f} | {apart['explained'][agent]:.2f} |"
        )
    means = [statistics.fmean(one["explained"].values()) for one in (shared, apart)]
    lines.append(f"| explained variance, mean | {means[0]:.2f} | {means[1]:.2f} |")
    for name, title in (("critics", "critics with gradients and moments"), ("peak", "peak")):
        sizes = [one[name] / MIB for one in (shared, apart)]
        lines.append(f"| {title}, MiB | {sizes[0]:.1f} | {sizes[1]:.1f} |")
    lines.append(f"| seconds | {shared['seconds']:.0f} | {apart['seconds']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is not done yet and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path(".rlhf-specialists"))
    parser.add_argument("--updates", type=int, help="rounds; default: the recipe's")
    parser.add_argument("--critic", choices=["baseline", "shared", "apart"], help="run this, here")
    given = parser.parse_args()
    work = given.work.absolute()
    if given.critic:
        run(work, given.critic, given.updates)
        return
    for critic in ("baseline", "shared", "apart"):
        if not (work / f"{critic}.json").exists():
            words = ["--work", str(work), "--critic", critic]
            words += [] if given.updates is None else ["--updates", str(given.updates)]
            subprocess.run([sys.executable, "-m", "benchmarks.ppo_specialists", *words], check=True)
            if critic != "baseline":
                print(json.dumps(read_json(work / f"{critic}.json")["explained"]), flush=True)
    print(table(read_json(work / "shared.json"), read_json(work / "apart.json")))


if __name__ == "__main__":
    main()
