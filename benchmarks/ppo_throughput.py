"""Our PPO engine beside TRL's PPOTrainer: episodes and tokens per second, peak memory, the floor.

Run: make bench-peer, then python -m benchmarks.ppo_throughput [--cases full,skewed,memory].
Both engines get the same weights, prompts, batch, epochs, minibatches and threads; each runs in a
process of its own, and their updates alternate, so that whatever else the machine does meets both.
Neither pays for a reward model. Our second row is the engine at its fastest settings (shared
trunk, bfloat16 where this processor multiplies it faster), the first is TRL's work: two networks,
float32. Reported are medians over the updates after the first.

The floor is what an update of the case needs at least: its matrix products' FLOPs over the
measured rate of a large product, the weights read at every decoded token where that takes longer
than the products, and the bytes Adam moves over the measured bandwidth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.ppo_cases import (
    TEMPERATURE,
    Case,
    Worker,
    as_argument,
    case_from,
    forget_peak,
    memory_bytes,
    prompts_of,
    touch,
    write_model,
)

if TYPE_CHECKING:
    from rlhf_pipeline.ppo.settings import PpoSettings

SMALL: dict[str, Any] = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 4096, "rollouts": 64}
CASES = {
    "full": Case(**SMALL, prompt_tokens=16, completion_tokens=48, ends_per_token=0.0),
    # Geometric lengths: the mean is 40 % of the limit, and one in ten reaches it.
    "skewed": Case(**SMALL, prompt_tokens=16, completion_tokens=48, ends_per_token=0.047),
    "memory": Case(
        layers=12,
        width=768,
        heads=12,
        vocabulary=50257,
        rollouts=8,
        prompt_tokens=64,
        completion_tokens=128,
        ends_per_token=0.0,
        epochs=1,  # the peak is that of one minibatch
    ),
}
MOST_UPDATES = 50


@dataclass(frozen=True)
class Machine:
    """What this machine was measured to do."""

    flops: float  # per second, of a large float32 product
    bfloat16_flops: float
    bytes: float  # per second, read and written


# --- one engine in a process of its own ----------------------------------------------------------


def settings_of(case: Case, changes: dict[str, Any]) -> PpoSettings:
    """Return a case's settings for our engine, with these changed."""
    from rlhf_pipeline.ppo.settings import PpoSettings

    usual = {"device": "cpu", "temperature": TEMPERATURE, "learning_rate": 1e-7}
    return PpoSettings(
        rollouts_per_update=case.rollouts,
        epochs=case.epochs,
        minibatches=case.minibatches,
        max_prompt_tokens=case.prompt_tokens,
        max_completion_tokens=case.completion_tokens,
        **{**usual, **changes},
    )


def work(case: Case, folder: Path, changes: dict[str, Any]) -> None:
    """Run our engine's updates, with these settings changed, as the protocol asks for them."""
    from rlhf_pipeline.ppo.collecting import sample_for
    from rlhf_pipeline.ppo.learner import build_learner
    from rlhf_pipeline.ppo.measuring import make_rollouts
    from rlhf_pipeline.ppo.optimising import train_on
    from rlhf_pipeline.ppo.rollout import Tokens

    worker = Worker()
    torch.set_num_threads(case.threads)
    settings = settings_of(case, changes)
    on_gpu = settings.device != "cpu"
    learner = build_learner(folder, folder, None, settings)
    sampling, shuffling = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    prompts = prompts_of(case, MOST_UPDATES)
    # Weights may still lie in a file that is only mapped; a small pass reads the reference's.
    touch(learner.policy.model)
    touch(learner.critic)
    probe = torch.tensor(prompts[:1], device=learner.policy.device)
    everything = torch.ones_like(probe, dtype=torch.bool)
    learner.reference_logprobs(Tokens(probe, everything, probe[:, :1], everything[:, :1]))
    before = memory_bytes()[0]
    update = 0

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    while worker.wait():
        forget_peak()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        some = prompts[update * case.rollouts : (update + 1) * case.rollouts]
        processor = time.process_time()
        times = [now()]
        sampled = sample_for(learner, some, sampling)
        times.append(now())
        rollouts, _ = make_rollouts(learner, sampled, [0.0] * len(some), settings.kl_coef)
        times.append(now())
        train_on(learner, rollouts, shuffling)
        times.append(now())
        phases = ("sample", "measure", "train")
        worker.answer(
            seconds=times[-1] - times[0],
            processor_seconds=time.process_time() - processor,
            phases={n: b - a for n, (a, b) in zip(phases, pairwise(times), strict=True)},
            tokens=int(sampled.tokens.completion_mask.sum()),
            rss_before=before,
            rss_peak=memory_bytes()[1],
            gpu_peak=torch.cuda.max_memory_allocated() if on_gpu else 0,
            gpu_held=torch.cuda.max_memory_reserved() if on_gpu else 0,
        )
        update += 1


class Engine:
    """A running worker and what it answered, where it ran updates with these switches."""

    def __init__(self, command: list[str], log: Path, **switches: str) -> None:
        self.log, self.switches = log, switches
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.answers: list[dict[str, Any]] = []

    def switched(self, **switches: str) -> Engine:
        """Return the same worker with other switches, for updates to tell apart."""
        other = copy(self)
        other.switches, other.answers = switches, []
        return other

    def update(self) -> None:
        """Run one update and keep its facts."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(["go", *map("=".join, self.switches.items())]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"an engine ended early; its last words:\n{self.log.read_text()[-2000:]}"
            )
        self.answers.append(json.loads(line))

    def close(self) -> None:
        """Let the worker end, if it has not."""
        if self.process.poll() is None:
            self.process.communicate("end\n", timeout=60)

    def middle(self, read: Callable[[dict[str, Any]], float]) -> float:
        """Return the median over the updates after the first."""
        return median(read(answer) for answer in self.answers[1:])

    def most(self, read: Callable[[dict[str, Any]], float]) -> float:
        """Return the largest over all updates, the first among them."""
        return max(read(answer) for answer in self.answers)


def take_turns(engines: Collection[Engine], updates: int) -> None:
    """Run the engines' updates in turn, so that what else the machine does meets all; end them."""
    for _ in range(updates):
        for engine in engines:
            engine.update()
    for engine in engines:
        engine.close()


# --- what the machine and the case allow ---------------------------------------------------------


def measure_machine(threads: int) -> Machine:
    """Return the rates of large products and of a large copy, the best of several."""
    torch.set_num_threads(threads)
    square = torch.randn(1024, 1024)
    rates = {
        dtype: 2 * 1024**3 / best_seconds(partial(torch.matmul, *[square.to(dtype)] * 2))
        for dtype in (torch.float32, torch.bfloat16)
    }
    big = torch.zeros(2**26)
    target = torch.empty_like(big)
    return Machine(
        flops=rates[torch.float32],
        bfloat16_flops=rates[torch.bfloat16],
        bytes=2 * big.nbytes / best_seconds(partial(target.copy_, big)),
    )


def best_seconds(action: Callable[[], Any]) -> float:
    """Return the least time of ten calls."""
    times = []
    for _ in range(10):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def weights_of(case: Case) -> tuple[int, int]:
    """Return the weights of a trunk, and of the output layer."""
    context = case.prompt_tokens + case.completion_tokens
    blocks = case.layers * 12 * case.width**2
    return blocks + (case.vocabulary + context) * case.width, case.vocabulary * case.width


def floor_seconds(
    case: Case, machine: Machine, completion_tokens: float, *, shared: bool, bfloat16: bool
) -> float:
    """Return the least time of an update with so many completion tokens in all."""
    rate = machine.bfloat16_flops if bfloat16 else machine.flops
    run = case.rollouts * (case.prompt_tokens - 1) + completion_tokens  # the last predicts nothing
    mean = completion_tokens / case.rollouts + case.prompt_tokens
    per_token = 2 * 12 * case.layers * case.width**2 + 2 * case.layers * case.width * mean
    unread = case.rollouts * (case.prompt_tokens - 1)  # the last layer's MLP there says nothing
    trunk = run * per_token - unread * 2 * 8 * case.width**2
    head = completion_tokens * 2 * case.vocabulary * case.width
    networks = 1 if shared else 2
    # Sampling, the reference, the critic's values before the update, then forward and twice back.
    flops = trunk + head + trunk + head + (networks - 1) * trunk
    flops += 3 * case.epochs * (networks * trunk + head)
    trunk_weights, head_weights = weights_of(case)
    trained = networks * trunk_weights + head_weights
    adam = case.epochs * case.minibatches * trained * 28  # reads 4 numbers a weight, writes 3
    reads = case.completion_tokens * 4 * (12 * case.layers * case.width**2 + head_weights)
    waits = max(0.0, reads / machine.bytes - (trunk + head) / rate)
    return flops / rate + adam / machine.bytes + waits


# --- the table -----------------------------------------------------------------------------------


def compare(case: Case, peer: Path, rounds: int, machine: Machine, *, defaults: bool) -> None:
    """Run the engines in turn and print their rows."""
    bfloat16 = machine.bfloat16_flops > machine.flops
    here = [sys.executable, "-m", "benchmarks.ppo_throughput"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(case, folder)
        options = ["--worker", as_argument(case), "--folder", str(folder)]
        engines: dict[str, Engine] = {}
        if peer.exists():
            script = str(Path(__file__).with_name("ppo_peer.py"))
            command = [str(peer), script, as_argument(case), str(folder), str(MOST_UPDATES)]
            engines["TRL"] = Engine(command, Path(scratch) / "trl.log")
        engines["ours, like for like"] = Engine([*here, *options], Path(scratch) / "like.log")
        if defaults:
            changes = {"critic": "shared"} | ({"precision": "bfloat16"} if bfloat16 else {})
            fast = ["--changes", json.dumps(changes)]
            engines["ours, fastest"] = Engine([*here, *options, *fast], Path(scratch) / "fast.log")
        take_turns(engines.values(), rounds + 1)
    print(
        f"| engine | s an update | processor s | sample / measure / train | episodes/s | "
        f"tokens/s | mean length | peak MiB | x TRL | x floor |\n|{'---|' * 10}"
    )
    for name, engine in engines.items():
        fastest = name == "ours, fastest"
        print(row(case, machine, name, engine, engines.get("TRL"), fastest, bfloat16 and fastest))


def row(
    case: Case,
    machine: Machine,
    name: str,
    engine: Engine,
    peer: Engine | None,
    shared: bool,
    bfloat16: bool,
) -> str:
    """Return one engine's line of the table."""
    seconds = engine.middle(lambda a: a["seconds"])
    tokens = engine.middle(lambda a: a["tokens"])
    shown = (engine.middle(partial(phase_seconds, p)) for p in ("sample", "measure", "train"))
    phases = " / ".join(f"{s:.2f}" for s in shown)
    floor = floor_seconds(case, machine, tokens, shared=shared, bfloat16=bfloat16)
    faster = peer.middle(lambda a: a["seconds"]) / seconds if peer else float("nan")
    processor = engine.middle(lambda a: a["processor_seconds"])  # says more on a busy machine
    return (
        f"| {name} | {seconds:.2f} | {processor:.2f} | {phases} | {case.rollouts / seconds:.1f} | "
        f"{tokens / seconds:.0f} | {tokens / case.rollouts:.1f} | "
        f"{above_state(case, engine, shared=shared) / 2**20:.0f} | {faster:.2f} | "
        f"{seconds / floor:.2f} |"
    )


def phase_seconds(phase: str, answer: dict[str, Any]) -> float:
    """Return what an update's phase took."""
    seconds: float = answer["phases"][phase]
    return seconds


def above_state(case: Case, engine: Engine, *, shared: bool) -> float:
    """Return the peak's bytes above the loaded models, gradients and Adam's two moments."""
    trunk, head = weights_of(case)
    trained = trunk + head + (0 if shared else trunk)
    return engine.middle(lambda a: a["rss_peak"] - a["rss_before"]) - 3 * 4 * trained


def main() -> None:
    """Measure the machine and the cases asked for, or work for another process that does."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="updates measured of each engine")
    parser.add_argument("--threads", type=int, default=2, help="of either engine")
    parser.add_argument("--peer", type=Path, default=Path(".venv-peer/bin/python"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--changes", type=json.loads, default={}, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(case_from(given.worker), given.folder, given.changes)
        return
    if not given.peer.exists():
        print(f"TRL is not at {given.peer}; make bench-peer sets it up. Ours alone:")
    for name in given.cases.split(","):
        case = replace(CASES[name], threads=given.threads)
        machine = measure_machine(case.threads)
        print(
            f"\n{name}: {case}\nthis machine: {machine.flops / 1e9:.0f} GFLOP/s float32, "
            f"{machine.bfloat16_flops / 1e9:.0f} bfloat16, {machine.bytes / 1e9:.1f} GB/s\n",
            flush=True,
        )
        compare(case, given.peer, given.rounds, machine, defaults=name != "memory")


if __name__ == "__main__":
    main()
