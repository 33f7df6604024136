"""The plan's peak beside the measured one: `train_ppo` in fresh processes, on a CPU.

    python -m benchmarks.ppo_plan [SHAPE ...]

Each shape trains two updates in a process of its own, every completion of full length. Measured is
the peak of its resident memory above what it held once everything was imported; the bar is 15 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ppo_cases import Case, write_model
from rlhf_pipeline.ppo.memory import forget_peak, resident_memory
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.records import RewardFunction

MIB = 2**20
BAR = 0.15


@dataclass(frozen=True)
class Shape:
    """A model and the settings that differ from the defaults."""

    case: Case
    settings: PpoSettings
    learned: int = 0  # reward models on the policy's base, each whole


def shape(
    layers: int,
    width: int,
    vocabulary: int,
    prompt_tokens: int,
    completion_tokens: int,
    learned: int = 0,
    **options: Any,
) -> Shape:
    """Return a shape whose rollouts are all as long as they can be."""
    settings = PpoSettings(
        updates=2,
        max_prompt_tokens=prompt_tokens,
        max_completion_tokens=completion_tokens,
        long_prompts="keep_latest",
        device="cpu",
        **options,
    )
    rollouts = settings.rollouts_per_update
    case = Case(
        layers, width, width // 64, vocabulary, rollouts, prompt_tokens, completion_tokens, 0.0
    )
    return Shape(case, settings, learned)


SHAPES = {
    "tiny recipe": shape(3, 128, 1024, 64, 48, rollouts_per_update=128, epochs=2, critic="shared"),
    "tiny recipe, reward models": shape(
        *(3, 128, 1024, 64, 48), 2, rollouts_per_update=128, epochs=2, critic="shared"
    ),
    "4 x 256": shape(4, 256, 4096, 16, 48, rollouts_per_update=64, epochs=1),
    "narrowed, replayed": shape(
        *(1, 64, 8192, 16, 32),
        rollouts_per_update=128,
        epochs=1,
        minibatches=8,
        critic="shared",
        top_k=50,
        replay_updates=1,
    ),
    "GPT-2 vocabulary": shape(
        2, 768, 50257, 64, 64, rollouts_per_update=8, epochs=1, minibatches=2, critic="shared"
    ),
    "GPT-2 vocabulary, reward models": shape(
        *(2, 768, 50257, 64, 64, 2), rollouts_per_update=8, epochs=1, minibatches=2, critic="shared"
    ),
    "GPT-2 vocabulary, LoRA": shape(
        4, 768, 50257, 64, 64, rollouts_per_update=16, epochs=1, minibatches=1, lora_rank=16
    ),
    "few tokens, LoRA": shape(
        *(4, 768, 50257, 16, 16),
        rollouts_per_update=8,
        epochs=1,
        minibatches=1,
        critic="shared",
        lora_rank=8,
        tokens_per_microbatch=64,
    ),
}


def measure(name: str, folder: Path) -> int:
    """Return the peak of a run's resident memory in bytes, above imports; for a fresh process."""
    import torch

    torch.set_num_threads(1)
    if SHAPES[name].settings.lora_rank:
        import peft  # noqa: F401  # imported before the level is taken

    from rlhf_pipeline.ppo.trainer import train_ppo
    from rlhf_pipeline.records import user_prompt

    made = SHAPES[name]
    words = made.settings.max_prompt_tokens
    prompts = [user_prompt(" ".join(f"w{2 + n + i}" for i in range(words))) for n in range(8)]
    forget_peak()
    before, _ = resident_memory()
    learned: list[RewardFunction] = [_learned(name, folder, n) for n in range(made.learned)]
    learned = learned or [lambda items: [float(len(item.completion) % 7) for item in items]]
    train_ppo(
        policy_dir=folder,
        reference_dir=folder,
        reward=learned[0],
        stopping=learned[1] if made.learned > 1 else None,
        prompts=prompts,
        watch_prompts=prompts[:2],
        output_dir=folder.parent / "out",
        settings=made.settings,
    )
    return resident_memory()[1] - before


def _learned(name: str, base: Path, seed: int) -> RewardFunction:
    from rlhf_pipeline.reward.model import Calibration, LearnedReward, Limits, new_reward_model

    settings = SHAPES[name].settings
    limits = Limits(settings.max_prompt_tokens, settings.max_completion_tokens)
    model, tokenizer = new_reward_model(base, seed=seed, device="cpu")
    return LearnedReward(model.eval(), tokenizer, limits, Calibration(), str(seed))


def plan(name: str, folder: Path) -> int:
    """Return the planned peak in bytes; for a fresh process, where no library is loaded yet."""
    import torch

    from rlhf_pipeline.ppo.plan import RewardModels, make_plan, read_config, rehearse
    from rlhf_pipeline.reward.model import TOKENS_ON_CPU

    torch.set_num_threads(1)
    config, made = read_config(folder), SHAPES[name]
    rewards = RewardModels(made.learned, shares=False, tokens_at_once=TOKENS_ON_CPU)
    return rehearse(config, make_plan(config, made.settings, rewards)).peak


def compare(name: str) -> tuple[int, int]:
    """Return the planned and the measured peak of one shape, in bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        write_model(SHAPES[name].case, folder)
        found = []
        for what in ("--plan", "--measure"):
            run = [sys.executable, "-m", "benchmarks.ppo_plan", name, what, str(folder)]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found.append(int(done.stdout.splitlines()[-1]))
        return found[0], found[1]


def main() -> None:
    """Print the table; status 1 where an estimate misses by more than the bar."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.shapes) - set(SHAPES):
        parser.error(f"needed shapes of {', '.join(SHAPES)}, found {', '.join(sorted(unknown))}")
    if folder := given.plan or given.measure:
        print((plan if given.plan else measure)(given.shapes[0], folder))
        return
    met = True
    print("| shape | planned MiB | measured MiB | planned / measured |\n|---|---|---|---|")
    for name in given.shapes or SHAPES:
        planned, measured = compare(name)
        ratio = planned / measured
        met = met and abs(ratio - 1) <= BAR
        print(f"| {name} | {planned / MIB:.0f} | {measured / MIB:.0f} | {ratio:.2f} |", flush=True)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
