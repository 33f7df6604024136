"""What the engine computes on the CPU and on a GPU, or on a pretended one, as JSON.

    python -m tests.on_device FOLDER

A process of its own: pretended.py has to be there before the first backward pass. Where there is
torch, transformers and peft alone the service is left out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_pipeline.policy import captured, sampling, scripting
from rlhf_pipeline.policy.captured import Step
from rlhf_pipeline.policy.loading import load_policy
from rlhf_pipeline.policy.packed import can_pack
from rlhf_pipeline.policy.sampling import Completion, complete
from rlhf_pipeline.ppo import learner as learners
from rlhf_pipeline.ppo.optimising import train_on
from rlhf_pipeline.records import RewardInput
from rlhf_pipeline.reward.functions import as_reward
from rlhf_pipeline.reward.training import train_reward_model
from tests.policy.recorded import recorded
from tests.ppo.world import PROMPTS, changed, learner_at, lower_share, rollouts_of, save_base, train
from tests.reward.conftest import SETTINGS as REWARD_SETTINGS
from tests.reward.conftest import planted_pairs

UPDATES: dict[str, dict[str, Any]] = {
    "shared critic": {},
    "separate critic": {"critic": "separate"},
    "without a critic": {"estimator": "rloo", "completions_per_prompt": 2},
    "adapters": {"critic": "separate", "lora_rank": 2, "epochs": 4},
    "adapters, computed twice": {"lora_rank": 2, "gradient_checkpointing": True},
    "a narrow choice": {"top_k": 40, "top_p": 0.9, "score_normalisation": "running"},
}


def update(changes: dict[str, Any], base: Path, folder: Path, device: str) -> list[float]:
    """Return what an update tells, and the sum of each weight's squares after it."""
    learner = learner_at(base, changed(device=device, **changes))
    facts = train_on(learner, rollouts_of(learner), torch.Generator().manual_seed(3))
    weights = [float(w.detach().double().square().sum()) for w in learner.trainable().values()]
    # Not those in which one token's rounding shows: which were clipped, and rounding itself.
    told = [facts[n] for n in sorted(facts) if "clip_fraction" not in n and "gap" not in n]
    return [*(float(value) for value in told if value is not None), *weights]


def whole_run(base: Path, folder: Path, device: str) -> list[float]:
    """Return the scores of a run that broke off in its second update and was taken up again."""
    settings = changed(updates=3, device=device, replay_updates=1, epochs=1)
    calls = 0

    def breaks_off(items: Sequence[RewardInput]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return lower_share(items)

    with suppress(KeyboardInterrupt):
        train(base, folder / "run", settings, reward=breaks_off)
    result = train(base, folder / "run", settings)
    saved = load_policy(folder / "run" / "policy", device=device)
    said = complete(saved, PROMPTS, max_completion_tokens=8, max_prompt_tokens=28, seed=1)
    return [*result.reward_history, *result.kl_history, *(float(c.tokens) for c in said)]


def reward_model(base: Path, folder: Path, device: str) -> list[float]:
    """Return what a reward model that was trained there scores."""
    pairs = planted_pairs(48, start=0, seed=0)
    train_reward_model(
        base,
        pairs[:32],
        pairs[32:],
        folder / "reward",
        freeze_trunk=False,
        centre_on=[RewardInput(p.prompt, p.chosen) for p in pairs[:4]],
        **{**REWARD_SETTINGS, "device": device, "max_completion_tokens": 32},
    )
    reward = as_reward(folder / "reward", device=device)
    return list(reward([RewardInput(pair.prompt, pair.chosen) for pair in pairs[:6]]))


def service(base: Path, folder: Path, device: str) -> list[str]:
    """Return what a decoder says to several at once, one of whom leaves."""
    from rlhf_pipeline.serving.batching import Decoder, Sampling

    decoder = Decoder(load_policy(base, device=device), rows=3)

    async def one(n: int) -> str:
        await asyncio.sleep(0.01 * n)
        sampling = Sampling(6 + 8 * (n % 3), 28, 1.0, n, top_p=0.9 if n % 2 else 1.0)
        ids = decoder.prompt_ids(PROMPTS[n], sampling)
        async with aclosing(
            decoder.pieces(ids, sampling, deadline=time.monotonic() + 60)
        ) as pieces:
            async for piece in pieces:
                if n == 2:
                    return "left"
                if isinstance(piece, Completion):
                    return piece.text
        raise AssertionError

    async def everybody() -> list[str]:
        return list(await asyncio.gather(*map(one, range(len(PROMPTS)))))

    said = asyncio.run(everybody())
    decoder.retire()
    decoder._thread.join()
    return said


def counting(capture: Callable[..., Step], captures: list[Step]) -> Callable[..., Step]:
    """Return the capture, which then adds each graph to the list."""

    def counted(step: Step, pool: Any = None) -> Step:
        captures.append(capture(step, pool))
        return captures[-1]

    return counted


def can_record(trunk: nn.Module, device: torch.device) -> bool:
    """Say what `can_capture` would, were the pretended device CUDA's."""
    return device.type != "cpu" and can_pack(trunk)


def meeting(device: str) -> list[str]:
    """Return which operations on tensors of two places are refused: the test's own test."""
    here, there = torch.ones(3), torch.ones(3, device=device)
    tried: dict[str, Callable[[], Any]] = {
        "sum": lambda: there + here,
        "place in a row": lambda: here[torch.zeros(1, dtype=torch.long, device=device)],
        "joined": lambda: torch.cat([here, there]),
        "in place": lambda: here.add_(there),
        "array": lambda: there.numpy(),
        "scalar": lambda: there + torch.tensor(1.0),
        "copied": lambda: there.cpu() + here,
        "index": lambda: there[torch.tensor([0])],
    }
    refused = []
    for name, meet in tried.items():
        try:
            meet()
        except (RuntimeError, TypeError, ValueError):
            refused.append(name)
    return refused


CASES: dict[str, Callable[[Path, Path, str], list[Any]]] = {
    "whole run": whole_run,
    "reward model": reward_model,
    "service": service,
    **{name: partial(update, changes) for name, changes in UPDATES.items()},
}


def main() -> None:
    """Print case -> [on the CPU, on the device], meetings "refused", and how many "graphs"."""
    folder, device = Path(sys.argv[1]), "cuda"
    captures: list[Step] = []
    captured.WORTH = 2  # completions are short here
    if not torch.cuda.is_available():
        from tests.pretended import DEVICE

        device = str(DEVICE)
        sampling.can_capture = can_record  # type: ignore[attr-defined]  # where they look
        learners.can_capture = can_record  # type: ignore[attr-defined]
        captured.cuda_graph = recorded
        # TorchScript asks the device itself.
        scripting._scripted = lambda function: function  # type: ignore[assignment]  # and so no cache
    captured.cuda_graph = counting(captured.cuda_graph, captures)  # parameter names
    base = save_base(folder / "base")
    torch.set_num_threads(1)
    told: dict[str, list[Any]] = {"refused": meeting(device)}
    for name, case in CASES.items():
        if case is service and find_spec("pydantic") is None:
            continue
        told[name] = [
            case(base, folder / name / place, on)
            for place, on in (("cpu", "cpu"), ("device", device))
        ]
    told["graphs"] = [len(captures)]
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
