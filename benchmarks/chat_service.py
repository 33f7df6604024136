"""The chat service under load: a batch's worth, time to the first word, and far too many clients.

    python -m benchmarks.chat_service [--seconds 10]

A real server process on loopback with a tiny champion (recipes/tiny.yaml's sizes, taught for some
seconds to write words and never to end, so that its completions are long: one that is not taught
writes bytes that are no characters yet, and its first text takes several tokens), clients in this
process: the two share the cores. One client, sixteen, and sixteen askers of the same decoder
without the service (chat_engine.py) come in turn, five times, as a machine's speed drifts: a ratio
is the median of the turns' ratios. What the service adds to the first text is the time over HTTP
with sixteen clients less that of the sixteen askers, the difference of the medians of the turns'
99th percentiles: to wait for a running step, read sixteen prompts and write in sixteen rows is any
batching engine's, under the same load, and none of it the service's. The row below it takes less
away, the time of the model alone with one request (to the first text of the same completion), and
so holds the batching too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.chat_engine import QUESTION, TOGETHER, champion_folder
from benchmarks.promises import tell
from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.config import PolicySettings
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.chat import encode_prompt
from rlhf_pipeline.policy.loading import Policy, save_policy
from rlhf_pipeline.policy.streaming import stream
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.records import SftExample, user_prompt
from rlhf_pipeline.simulation.world import seed_conversations
from tests.serving.pages.world import free_port

TAUGHT = 80  # steps of 16 rows of 64 tokens
TURNS = 5  # of one client, of sixteen, and of the engine alone, one after the other


@dataclass
class Seen:
    """What clients saw."""

    tokens: int = 0
    first: dict[int, float] = field(default_factory=dict)  # seconds to the first text, by seed
    took: list[float] = field(default_factory=list)  # seconds to the end, of answers
    refused: list[float] = field(default_factory=list)  # seconds to a 429 or 503
    odd: int = 0  # anything else
    seconds: float = 0.0  # from the first client's coming to the last one's going

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def made_state(state: Path) -> Policy:
    """Make a state folder whose agent `shop` has a tiny champion, and return that."""
    here = Workspace(None, str(state))
    conversations = seed_conversations(400, 0)
    texts = [t for e in conversations for t in (e.prompt[-1].content, e.completion)]
    sizes = here.settings.policy.tiny
    policy = build_tiny(
        texts,
        vocabulary=sizes.vocabulary,
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        context=sizes.context,
        seed=0,
    )
    teach(policy, conversations)
    folder = champion_folder(state)
    save_policy(policy, folder)
    here.store.ensure_agent("shop")
    here.ledger.add_baseline(
        "shop", label="v0", path=folder, files=folder_sha256(folder), lineage={}, actor="benchmark"
    )
    return policy


def teach(policy: Policy, conversations: Iterable[SftExample]) -> None:
    """Teach the policy the words of these conversations, one after the other without an end."""
    tokens: list[int] = []
    for one in conversations:
        tokens += encode_prompt(policy.tokenizer, one.prompt, max_tokens=policy.context_length)
        tokens += policy.tokenizer(one.completion, add_special_tokens=False)["input_ids"]
    text, columns = torch.tensor(tokens), torch.arange(65)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=3e-3)
    policy.model.train()
    for _ in range(TAUGHT):
        rows = text[torch.randint(len(text) - 64, (16, 1), generator=generator) + columns]
        logits = policy.model(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        optimizer.step()
    policy.model.eval()


class Client(asyncio.Protocol):
    """A client with one connection, on bare asyncio: its own work must not be what is measured."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.transport: asyncio.Transport | None = None
        self.said = b""  # of this answer, as it came
        self.first: float | None = None  # the time.perf_counter() moment of its first text
        self.ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to write."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Note the first text, and the end: the last chunk, or the length that was told."""
        self.said += data
        if self.first is None and b'"content"' in self.said:
            self.first = time.perf_counter()
        if self.ended is None or self.ended.done():
            return
        if self.said.endswith(b"\r\n0\r\n\r\n") or self._whole():
            self.ended.set_result(None)

    def connection_lost(self, problem: Exception | None) -> None:
        """Wait no longer."""
        if self.ended is not None and not self.ended.done():
            self.ended.set_exception(problem or ConnectionError("closed before the answer ended"))

    def _whole(self) -> bool:
        """Say whether an answer of one piece, such as a refusal, is all there."""
        head, _, body = self.said.partition(b"\r\n\r\n")
        _, told, length = head.lower().partition(b"content-length:")
        return bool(told) and len(body) >= int(length.split(b"\r\n")[0])

    async def ask(self, seen: Seen, seed: int) -> bool:
        """Ask once, reading along; say whether there was an answer."""
        body = json.dumps(
            {
                "model": "shop",
                "messages": [{"role": "user", "content": QUESTION}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "seed": seed,
            }
        ).encode()
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        if self.transport is None:
            await loop.create_connection(lambda: self, "127.0.0.1", self.port)
        assert self.transport is not None
        self.said, self.first, self.ended = b"", None, loop.create_future()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost"
        kind = f"content-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(f"{head}\r\n{kind}\r\n\r\n".encode() + body)
        await self.ended
        took = time.perf_counter() - began
        if self.said.split(b" ", 2)[1] in (b"429", b"503"):
            seen.refused.append(took)
            return False
        usage = re.search(rb'"completion_tokens": ?(\d+)', self.said)
        if usage is None or self.first is None:
            seen.odd += 1
            return False
        seen.tokens += int(usage[1])
        seen.first[seed] = self.first - began
        seen.took.append(took)
        return True

    def close(self) -> None:
        """Let the connection go."""
        if self.transport is not None:
            self.transport.close()


async def crowd(port: int, clients: int, seconds: float) -> Seen:
    """Let so many clients ask one question after the other; a refused one waits as it is told."""
    seen, began = Seen(), time.monotonic()

    async def ask(n: int) -> None:
        client, k = Client(port), 0
        await asyncio.sleep(n / clients * min(1.0, clients / 100))
        while time.monotonic() - began < seconds:
            k += 1
            if not await client.ask(seen, n * 10_000 + k):
                await asyncio.sleep(1.0)
        client.close()

    await asyncio.gather(*(ask(n) for n in range(clients)))
    seen.seconds = time.monotonic() - began
    return seen


def engine_alone(state: Path, seconds: float) -> list[float]:
    """Return the seconds to each first text without the service, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.chat_engine", str(state)]
    told = subprocess.run(
        [*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=True, text=True
    )
    firsts: list[float] = json.loads(told.stdout.splitlines()[-1])
    return firsts


def alone(policy: Policy, limits: PolicySettings, seeds: Iterable[int]) -> dict[int, float]:
    """Return the seconds to the first text of each seed's completion with one request and no more.

    Each is the median of three.
    """

    def once(seed: int) -> float:
        began = time.perf_counter()
        pieces = stream(
            policy,
            user_prompt(QUESTION),
            max_completion_tokens=limits.max_completion_tokens,
            max_prompt_tokens=limits.max_prompt_tokens,
            temperature=limits.temperature,
            seed=seed,
        )
        next(pieces)
        return time.perf_counter() - began

    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))  # as the service's decoder
    once(0)
    return {seed: statistics.median(once(seed) for _ in range(3)) for seed in seeds}


def p99(seconds: list[float]) -> float:
    """Return the 99th percentile."""
    return float(np.percentile(seconds, 99)) if seconds else float("nan")


def over_turns(turns: list[list[float]]) -> tuple[float, float]:
    """Return the medians of the turns' 99th percentiles and of their medians, in ms."""
    lates, middles = [p99(turn) for turn in turns], [statistics.median(turn) for turn in turns]
    return 1000 * statistics.median(lates), 1000 * statistics.median(middles)


def started(state: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the service and wait until its model has answered."""
    command = [sys.executable, "-m", "rlhf_pipeline.cli", "serve", "--no-pages"]
    environment = {**os.environ, "RLHF_STATE_DIR": str(state)}
    server = subprocess.Popen([*command, "--port", str(port)], env=environment)
    body: dict[str, Any] = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(300):
        time.sleep(0.2)
        try:
            if httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body).is_success:
                return server
        except httpx.HTTPError:
            continue
    raise SystemExit("the service did not begin to answer")


def main() -> None:
    """Print the table; status 1 where a promise is short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        state, port = Path(folder) / "state", free_port()
        policy = made_state(state)
        settings = Workspace(None, str(state)).settings
        limit = settings.serving.admission_limit
        server = started(state, port)
        try:
            singles: list[Seen] = []
            turns: list[Seen] = []
            engine: list[list[float]] = []
            for _ in range(TURNS):
                singles.append(asyncio.run(crowd(port, 1, seconds)))
                turns.append(asyncio.run(crowd(port, TOGETHER, seconds)))
                engine.append(engine_alone(state, seconds))
            full = asyncio.run(crowd(port, limit, seconds))
            over = asyncio.run(crowd(port, 10 * limit, seconds))
            ended = time.monotonic()
            while True:  # until a client is answered as quickly as before
                back = asyncio.run(crowd(port, 1, 0.5))
                if back.took and min(back.took) < 2 * statistics.median(singles[-1].took):
                    break
                if time.monotonic() - ended > 60:
                    break
            recovered = time.monotonic() - ended
        finally:
            server.terminate()
            server.wait()
    ratios = [many.speed / one.speed for one, many in zip(singles, turns, strict=True)]
    speed = statistics.median(ratios)
    together = statistics.median(seen.speed for seen in turns)
    single = statistics.median(seen.speed for seen in singles)
    ours, ours_middle = over_turns([list(seen.first.values()) for seen in turns])
    engines, engines_middle = over_turns(engine)
    seeds = {seed for seen in (*singles, *turns) for seed in seen.first}
    ask_alone = alone(policy, settings.policy, seeds)
    beyond, _ = over_turns([[t - ask_alone[n] for n, t in seen.first.items()] for seen in turns])
    beyond_one, _ = over_turns(
        [[t - ask_alone[n] for n, t in seen.first.items()] for seen in singles]
    )
    slower = p99(over.took) / p99(full.took)
    odd = sum(seen.odd for seen in (*singles, *turns, full, over))
    rows = [
        (
            f"tokens/s, {TOGETHER} clients over one",
            "≥ 4",
            f"{speed:.2f} ({min(ratios):.2f} to {max(ratios):.2f}; {together:.0f} / {single:.0f})",
            speed >= 4,
        ),
        (
            f"first text over HTTP, {TOGETHER} clients, p99 (median)",
            "",
            f"{ours:.1f} ms ({ours_middle:.1f})",
            True,
        ),
        (
            f"first text of the engine alone, {TOGETHER} askers, p99 (median)",
            "",
            f"{engines:.1f} ms ({engines_middle:.1f})",
            True,
        ),
        (
            "first text of one request alone, p99 (median)",
            "",
            "{:.1f} ms ({:.1f})".format(*over_turns([list(ask_alone.values())])),
            True,
        ),
        (
            f"added to the first text under the same load, {TOGETHER} clients, p99 less p99",
            "≤ 20 ms",
            f"{ours - engines:.1f} ms",
            ours - engines <= 20,
        ),
        (
            f"added to one request alone, {TOGETHER} clients, batching and all, p99",
            "≤ 20 ms",
            f"{beyond:.1f} ms (one client {beyond_one:.1f})",
            beyond <= 20,
        ),
        (
            f"refusals at {10 * limit} clients, p99",
            "quick",
            f"{1000 * p99(over.refused):.0f} ms, {len(over.refused)} of them",
            bool(over.refused) and p99(over.refused) < 1,
        ),
        (
            f"accepted then, p99 over that at {limit} clients",
            "< 2",
            f"{slower:.2f} ({p99(over.took):.2f} / {p99(full.took):.2f} s)",
            slower < 2,
        ),
        ("recovers", "10 s", f"{recovered:.1f} s", recovered < 10),
        ("answers cut off or of another kind", "0", str(odd), not odd),
    ]
    tell(rows)


if __name__ == "__main__":
    main()
