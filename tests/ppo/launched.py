"""Two processes that train one policy, as a launcher would start them.

    python -m tests.ppo.launched BASE FOLDER PORT

A process that has loaded torch but computed nothing forks both, so that importing is paid once.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_pipeline.files import write_json
from rlhf_pipeline.policy.adapters import (
    adapter_weights,
    add_adapters,
    load_adapters,
    only,
    save_adapters,
)
from rlhf_pipeline.policy.loading import load_policy
from rlhf_pipeline.policy.sampling import trunk_of
from rlhf_pipeline.ppo.learner import shared_base
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.trackers import reporting
from rlhf_pipeline.records import Prompt, RewardFunction, RewardInput
from rlhf_pipeline.reward.composite import CompositeReward, Term
from tests.ppo.world import changed, lower_share, train, two_pieces

SIZE = 2
RUNS: dict[str, PpoSettings] = {
    "shared": changed(
        kl_controller="adaptive", kl_horizon=100, score_normalisation="running", top_k=40
    ),
    # Odd numbers: shares of rollouts, minibatches and watch prompts differ in size.
    "separate": changed(
        critic="separate", rollouts_per_update=15, minibatches=3, replay_updates=1, updates=3
    ),
    # Shares end at different tokens and are cut into different numbers of microbatches.
    "spread": changed(
        critic="separate",
        lora_rank=2,
        gradient_checkpointing=True,
        rollouts_per_update=15,
        minibatches=3,
        tokens_per_microbatch=48,
    ),
    # Some conversations are over after a turn: shares of the second turns differ in size too.
    "turns": changed(
        max_turns=2, max_prompt_tokens=48, max_completion_tokens=6, rollouts_per_update=8
    ),
}


def options_of(name: str) -> dict[str, Any]:
    """Return who judges and answers in a run: rewards of two change as training goes on."""
    reward: RewardFunction = two_pieces() if name in ("separate", "turns") else lower_share
    if name == "turns":  # shares skip different parts of what they judge, or all
        assert isinstance(reward, CompositeReward)
        reward = CompositeReward({**reward.terms, "choosy": Term(Choosy(), running=True)})
    options: dict[str, Any] = {"reward": reward, "stopping": lower_share}
    if name == "turns":
        options |= {"user": says_why, "final_reward": lower_share}
    return options


def says_why(conversations: Sequence[Prompt], /) -> list[str | None]:
    """Ask why, but for those who began with hi: they leave."""
    return [None if c[0].content == "hi" else "why" for c in conversations]


class Choosy:
    """Judges only completions of an even number of characters."""

    may_skip = True

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        """Return the share of e among their letters, or that nothing can be said."""
        texts = [item.completion for item in items]
        return [t.count("e") / (len(t) + 1) if len(t) % 2 == 0 else math.nan for t in texts]


class Moody:
    """Says in each process something else, and counts how often they were asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, conversations: Sequence[Prompt], /) -> list[str | None]:
        """Leave those who began with hi; say little or nothing to the others."""
        self.asked += len(conversations)
        said = ("", "ja ä\0")[int(os.environ["RANK"])]
        return [None if c[0].content == "hi" else said for c in conversations]


def run_all(base: Path, folder: Path) -> None:
    """Train every run; a run that was cut short is gone on with."""
    for name, settings in RUNS.items():
        os.environ["ACCELERATE_USE_FSDP"] = str(name == "spread").lower()
        trackers = ["tensorboard"] if name == "shared" else []  # they come before the first run
        with reporting(trackers, folder / name / "tracking", "one") as report:
            train(base, folder / name, settings, report=report, **options_of(name))
    moody, rank = Moody(), os.environ["RANK"]
    train(base, folder / "moody", RUNS["turns"], user=moody, reward=lower_share)
    write_json(folder / f"asked-{rank}.json", moody.asked)
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    write_json(folder / "held.json", look_at_a_spread_base(base, folder))
    os.environ["ACCELERATE_USE_FSDP"] = "false"
    cut_short, options = folder / "interrupted", options_of("shared")
    try:
        train(base, cut_short, RUNS["shared"], keep_going=interruption(), **options)
    except KeyboardInterrupt:
        train(base, cut_short, RUNS["shared"], **options)


def look_at_a_spread_base(base: Path, folder: Path) -> dict[str, float]:
    """Return which share of a base's weights this process holds, in layers and outside of them.

    And how far a set of adapters that is loaded into it, as a reward model's is, is from the same
    set on a whole base.
    """
    whole_model, kept = load_policy(base, device="cpu").model, folder / f"set-{os.environ['RANK']}"
    add_adapters(trunk_of(whole_model), "one", rank=2, alpha=16.0, seed=3)
    with torch.no_grad():
        for weight in adapter_weights(trunk_of(whole_model), "one").values():
            weight.fill_(0.1)
    save_adapters(trunk_of(whole_model), "one", kept)
    model: Any = shared_base(base, base, RUNS["spread"]).policy.model
    load_adapters(trunk_of(model), "one", kept)
    ids = torch.arange(5, 25)[None]
    states = []
    for one in (whole_model, model):
        with torch.no_grad(), only(one, "one"):
            states.append(trunk_of(one)(input_ids=ids).last_hidden_state)
    held = {"layers": 0, "rest": 0}
    whole = dict(held)
    for name, weight in model.named_parameters():
        part = "layers" if ".layers." in name and ".lora_" not in name else "rest"
        held[part] += getattr(weight, "to_local", lambda w=weight: w)().numel()
        whole[part] += weight.numel()
    shares = {part: held[part] / whole[part] for part in held}
    return {**shares, "apart": float((states[0] - states[1]).abs().max())}


def interruption() -> Callable[[], None]:
    """Return a check that stops the run at its third look."""
    looks = iter(range(99))

    def check() -> None:
        if next(looks) == 3:
            raise KeyboardInterrupt

    return check


def fork(work: Callable[[int], None]) -> int:
    """Fork the processes, let each do the work of its rank, and return 1 if one failed, else 0."""
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(rank)
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    return int(any(os.waitpid(child, 0)[1] for child in children))


def main() -> None:
    """Train in every process; exit with 1 if one failed."""
    base, folder, port = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)

    def work(rank: int) -> None:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(SIZE),
            "LOCAL_WORLD_SIZE": str(SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",  # as accelerate launch has it
            "OMP_NUM_THREADS": "1",
        }
        run_all(base, folder)

    sys.exit(fork(work))


if __name__ == "__main__":
    main()
