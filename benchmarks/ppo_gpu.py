"""PPO on one GPU: episodes a second, generation's share, peak memory; with and without CUDA graphs.

    make bench-peer && python -m benchmarks.ppo_gpu [--cases 124m,1.3b,7b]

Random weights in GPT-2's layout, bfloat16, full-length completions. TRL's PPOTrainer runs the
smallest model beside us, on the same weights, prompts, batch, epochs and minibatches; there updates
alternate. Larger models have the GPU to themselves, the largest no more than 24 GB of it. Medians
over the updates after the first, and the most memory over all: of tensors, and held by torch, which
graphs keep too. Beside them what `rlhf plan` foretells.
`--device cpu --cases tiny` shows that the script works where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.ppo_cases import Case, as_argument, case_from, write_model
from benchmarks.ppo_throughput import (
    MOST_UPDATES,
    Engine,
    phase_seconds,
    settings_of,
    take_turns,
    work,
)

GB = 10**9
PHASES = ("sample", "measure", "train")
LORA = {"lora_rank": 16, "critic": "shared"}
GPT2: dict[str, Any] = {"vocabulary": 50257, "completion_tokens": 256, "ends_per_token": 0.0}
CASES = {
    "124m": Case(layers=12, width=768, heads=12, rollouts=64, prompt_tokens=256, **GPT2),
    "1.3b": Case(layers=24, width=2048, heads=16, rollouts=32, prompt_tokens=256, **GPT2),
    "7b": Case(
        layers=32,
        width=4096,
        heads=32,
        rollouts=16,
        prompt_tokens=512,
        weights="bfloat16",
        **GPT2,
    ),
    "tiny": Case(
        layers=2,
        width=32,
        heads=2,
        vocabulary=300,
        rollouts=8,
        prompt_tokens=8,
        completion_tokens=16,
        ends_per_token=0.0,
    ),
}
ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "124m": {"separate critic": {}, "shared trunk": {"critic": "shared"}},
    "1.3b": {"separate critic": {"completions_at_once": 32}, "LoRA, shared trunk": LORA},
    "7b": {
        "LoRA, shared trunk": {**LORA, "gradient_checkpointing": True, "completions_at_once": 8}
    },
    "tiny": {"separate critic": {}, "LoRA, shared trunk": LORA},
}
BESIDE_TRL = {"124m", "tiny"}
CAPPED = {"7b": 24 * GB}


def compare(name: str, peer: Path, rounds: int, device: str, *, quick: bool) -> None:
    """Run a case's engines in turn and print their rows."""
    case, usual = CASES[name], {"device": device, "precision": "bfloat16"}
    here = [sys.executable, "-m", "benchmarks.ppo_gpu", "--worker", as_argument(case)]
    engines: dict[str, Engine] = {}
    plans: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(case, folder)
        commands: dict[str, list[str]] = {}
        if name in BESIDE_TRL and peer.exists():
            script = str(Path(__file__).with_name("ppo_peer.py"))
            options = [as_argument(case), str(folder), str(MOST_UPDATES), device]
            commands["TRL"] = [str(peer), script, *options]
        for label, changes in ENGINES[name].items():
            options = ["--folder", str(folder), "--changes", json.dumps(usual | changes)]
            if name in CAPPED and device != "cpu":
                options += ["--cap", str(CAPPED[name])]
            commands[label] = [*here, *options]
            said = subprocess.run([*commands[label], "--plan"], stdout=subprocess.PIPE, check=True)
            plans[label] = json.loads(said.stdout)
        at_once = len(commands) if name in BESIDE_TRL else 1
        for start in range(0, len(commands), at_once):
            running = {}
            for label, command in list(commands.items())[start : start + at_once]:
                engine = Engine(command, Path(scratch) / f"{label}.log", RLHF_CUDA_GRAPHS="1")
                running[label] = engine
                if label in ENGINES[name] and not quick:
                    running[f"{label}, no graphs"] = engine.switched(RLHF_CUDA_GRAPHS="0")
            take_turns(running.values(), rounds + 1)
            engines |= running
    print(
        "| engine | s an update | planned s | sample / measure / train | planned | generation | "
        f"episodes/s | tokens/s | peak GB | planned GB | held GB | x TRL |\n|{'---|' * 12}"
    )
    for label, engine in engines.items():
        print(row(case, label, engine, engines.get("TRL"), plans.get(label)))


def plan(case: Case, folder: Path, changes: dict[str, Any]) -> None:
    """Print what a plan says of the updates: the most bytes they hold, and seconds by phase."""
    from rlhf_pipeline.ppo.plan import NO_MODELS, make_plan, probe, read_config

    config, settings = read_config(folder), settings_of(case, changes)
    peak = make_plan(config, settings, NO_MODELS).peak
    print(json.dumps({"peak": peak} | asdict(probe(config, settings, NO_MODELS))))


def row(
    case: Case, label: str, engine: Engine, peer: Engine | None, planned: dict[str, float] | None
) -> str:
    """Return one engine's line of the table."""
    seconds = engine.middle(lambda a: a["seconds"])
    phases = [engine.middle(partial(phase_seconds, p)) for p in PHASES]
    faster = peer.middle(lambda a: a["seconds"]) / seconds if peer else float("nan")
    foretold = [planned[p] for p in PHASES] if planned else []
    whole, peak = (f"{sum(foretold):.2f}", f"{planned['peak'] / GB:.2f}") if planned else ("", "")
    return (
        f"| {label} | {seconds:.2f} | {whole} | "
        f"{' / '.join(f'{s:.2f}' for s in phases)} | {' / '.join(f'{s:.2f}' for s in foretold)} | "
        f"{phases[0] / seconds:.0%} | {case.rollouts / seconds:.1f} | "
        f"{engine.middle(lambda a: a['tokens']) / seconds:.0f} | "
        f"{engine.most(lambda a: a['gpu_peak']) / GB:.2f} | {peak} | "
        f"{engine.most(lambda a: a['gpu_held']) / GB:.2f} | {faster:.2f} |"
    )


def main() -> None:
    """Run the cases asked for, or work for another process that does."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="124m,1.3b,7b", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3, help="updates measured of each engine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="leave out updates without graphs")
    parser.add_argument("--peer", type=Path, default=Path(".venv-peer/bin/python"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--changes", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        if given.cap:
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, given.cap / whole))
        run = plan if given.plan else work
        run(case_from(given.worker), given.folder, given.changes)
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("needed a CUDA GPU, found none; --device cpu --cases tiny runs without")
    for name in given.cases.split(","):
        print(f"\n{name}: {CASES[name]}\n", flush=True)
        compare(name, given.peer, given.rounds, given.device, quick=given.quick)


if __name__ == "__main__":
    main()
