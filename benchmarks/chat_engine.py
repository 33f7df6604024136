"""The chat service's engine alone: askers of `batching.Decoder` in a process of their own.

    python -m benchmarks.chat_engine STATE [--seconds 10]

What is left of the service here: the model from its folder, the decoder with its thread, the
server's event loop and settings. What is not: HTTP, admission, guardrails, store and metrics. The
askers share the decoder's interpreter and its lock, as the service's event loop does: turning
tokens into text costs an engine's process something whoever asks, so what that costs counts as the
engine's here. An engine that hands bare tokens to another process would be a lower floor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from contextlib import aclosing
from pathlib import Path

from uvicorn.loops.auto import auto_loop_factory

from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.config import Settings
from rlhf_pipeline.policy.loading import load_policy
from rlhf_pipeline.records import user_prompt
from rlhf_pipeline.serving.batching import Decoder, Sampling
from rlhf_pipeline.serving.champions import settle

TOGETHER = 16
QUESTION = "How much is the kettle, and can I bring it back?"


def champion_folder(state: Path) -> Path:
    """Return where the benchmark keeps its champion."""
    return state / "agents" / "shop" / "v0"


async def first_texts(
    decoder: Decoder, settings: Settings, clients: int, seconds: float
) -> list[float]:
    """Return the seconds to each first text of so many askers, one question after the other."""
    limits, firsts, began = settings.policy, [], time.monotonic()

    async def ask(n: int) -> None:
        k = 0
        await asyncio.sleep(n / clients * min(1.0, clients / 100))
        while time.monotonic() - began < seconds:
            k += 1
            firsts.append(await first_text(n * 10_000 + k))

    async def first_text(seed: int) -> float:
        sampling = Sampling(
            max_completion_tokens=limits.max_completion_tokens,
            max_prompt_tokens=limits.max_prompt_tokens,
            temperature=limits.temperature,
            seed=seed,
        )
        asked, first = time.perf_counter(), None
        ids = decoder.prompt_ids(user_prompt(QUESTION), sampling)
        deadline = time.monotonic() + settings.serving.timeout_seconds
        async with aclosing(decoder.pieces(ids, sampling, deadline=deadline)) as pieces:
            async for _ in pieces:
                first = first or time.perf_counter() - asked
        assert first is not None  # every completion ends with a piece: the `Completion` itself
        return first

    await asyncio.gather(*(ask(n) for n in range(clients)))
    return firsts


def main() -> None:
    """Print the seconds to each first text as one JSON list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    settings = Workspace(None, str(options.state)).settings
    policy = load_policy(
        champion_folder(options.state), device=settings.policy.device, dtype=settings.policy.dtype
    )
    decoder = Decoder(policy, rows=settings.serving.batch_rows)
    settle()
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(first_texts(decoder, settings, 1, 0.5))  # a model's first steps are slow
        firsts = runner.run(first_texts(decoder, settings, TOGETHER, options.seconds))
    decoder.retire()
    for thread in threading.enumerate():
        if thread.name == "decoder":
            thread.join()  # or torch is taken down under its last step, and the process aborts
    print(json.dumps(firsts))


if __name__ == "__main__":
    main()
