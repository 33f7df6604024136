"""Our reward training beside TRL's RewardTrainer: pairs per second.

    make bench-peer   # once, for TRL's own environment
    python -m benchmarks.reward_throughput [--peer .venv-peer/bin/python] [--cases spread,full]

Both train the same weights on the same pairs of token ids, with the same batch, epochs, float32 and
threads, each in a process of its own; their runs alternate, so that whatever else the machine does
meets both. Timed is the training call alone: loading and tokenising are done before. TRL runs as
it comes, but for gradient checkpointing and bfloat16, which are off on both sides. Reported are
medians over the runs after the first.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import torch

from benchmarks.ppo_cases import Case, Worker, touch, write_model
from benchmarks.ppo_throughput import Engine, take_turns
from benchmarks.promises import tell

NEEDED = 1.5
PAIRS = "pairs.json"


@dataclass(frozen=True)
class RewardCase:
    """One shape to measure; both trainers get it word for word."""

    spread: bool  # completions' lengths are log-normal; False: all are of one length
    pairs: int = 128
    batch: int = 32
    prompt_tokens: int = 32
    completion_tokens: int = 80  # the median, or the length of all
    longest: int = 384
    deviation: float = 0.7  # of log length: chat completions vary about so much
    learning_rate: float = 1e-4
    threads: int = 2

    def write(self, folder: Path) -> float:
        """Write the model and the pairs' token ids; return the mean length of a completion."""
        write_model(
            Case(
                layers=4,
                width=256,
                heads=4,
                vocabulary=4096,
                rollouts=1,
                prompt_tokens=self.prompt_tokens,
                completion_tokens=self.longest,
                ends_per_token=0.0,
            ),
            folder,
        )
        draw = random.Random(0)
        lengths: list[int] = []
        rows = []
        for _ in range(self.pairs):
            prompt = [draw.randrange(2, 4096) for _ in range(self.prompt_tokens)]
            sides = []
            for _ in range(2):
                length = self.completion_tokens
                if self.spread:
                    length = round(length * draw.lognormvariate(0.0, self.deviation))
                length = max(4, min(self.longest, length))
                lengths.append(length)
                said = [draw.randrange(2, 4096) for _ in range(length)]
                sides.append(prompt + said)
            rows.append({"chosen_ids": sides[0], "rejected_ids": sides[1]})
        (folder / PAIRS).write_text(json.dumps(rows))
        return mean(lengths)


CASES = {"spread": RewardCase(spread=True), "full": RewardCase(spread=False)}


def work(case: RewardCase, folder: Path) -> None:
    """Train as the protocol asks for it, each time from the same weights."""
    from rlhf_pipeline.records import ignore_progress
    from rlhf_pipeline.reward.model import Row, new_reward_model
    from rlhf_pipeline.reward.tuning import Descent, EncodedPairs, fit_model

    worker = Worker()
    torch.set_num_threads(case.threads)
    rows = json.loads((folder / PAIRS).read_text())
    chosen, rejected = (
        [Row(row[name], case.prompt_tokens) for row in rows]
        for name in ("chosen_ids", "rejected_ids")
    )
    pairs = EncodedPairs(chosen, rejected, [1.0] * len(rows))
    while worker.wait():
        model, _ = new_reward_model(folder, seed=0, device="cpu")
        touch(model)
        started = time.perf_counter()
        once = Descent(1, case.learning_rate, case.batch, seed=0)
        fit = fit_model(model, pairs, once, report=ignore_progress)
        seconds = time.perf_counter() - started
        worker.answer(seconds=seconds, loss=mean(loss for _, loss in fit.loss_curve))


def compare(case: RewardCase, peer: str, runs: int, folder: Path) -> dict[str, Engine]:
    """Return both trainers, their runs taken in turn."""
    case.write(folder)
    told = json.dumps(asdict(case))
    beside = str(Path(__file__).with_name("reward_peer.py"))
    commands = {
        "TRL": [peer, beside, told, str(folder)],
        "ours": [sys.executable, "-m", "benchmarks.reward_throughput", "--work", told, str(folder)],
    }
    engines = {name: Engine(line, folder / f"{name}.log") for name, line in commands.items()}
    take_turns(engines.values(), runs)
    return engines


def main() -> None:
    """Print a row for each case and trainer, then what was needed and found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", default=".venv-peer/bin/python", help="python that has TRL")
    parser.add_argument("--cases", default="spread,full")
    parser.add_argument("--runs", type=int, default=4, help="the first of them is not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(RewardCase(**json.loads(arguments.work[0])), Path(arguments.work[1]))
        return
    asked = [arguments.peer, "-c", "import trl; print(trl.__version__)"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    print(f"TRL {version}\n\n| completions | trainer | s a run | pairs/s | x TRL | mean loss |")
    print("|---|---|---|---|---|---|")
    found: list[tuple[str, str, str, bool]] = []
    for name in arguments.cases.split(","):
        case = replace(CASES[name], threads=arguments.threads)
        with tempfile.TemporaryDirectory() as scratch:
            engines = compare(case, arguments.peer, arguments.runs, Path(scratch))
        slow = engines["TRL"].middle(lambda answer: answer["seconds"])
        for trainer, engine in engines.items():
            seconds = engine.middle(lambda answer: answer["seconds"])
            loss = engine.middle(lambda answer: answer["loss"])
            print(
                f"| {name} | {trainer} | {seconds:.2f} | {case.pairs / seconds:.1f} | "
                f"{slow / seconds:.2f} | {loss:.3f} |",
                flush=True,
            )
        times = slow / engines["ours"].middle(lambda answer: answer["seconds"])
        if case.spread:
            found.append(
                ("lengths as people's", f"≥ {NEEDED} x TRL", f"{times:.2f}", times >= NEEDED)
            )
    print()
    tell(found)


if __name__ == "__main__":
    main()
