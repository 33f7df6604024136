"""Chat over HTTP: OpenAI's own client against a real server in this process, on a tiny champion."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
import torch
from structlog.testing import capture_logs
from torch.overrides import TorchFunctionMode

from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.config import Settings, UpstreamSettings
from rlhf_pipeline.database import interactions
from rlhf_pipeline.errors import ChatAway, ModelError
from rlhf_pipeline.experiment.assignment import arm_of
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook
from rlhf_pipeline.experiment.watch import STILL_LOADING, failures
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.cache import merge
from rlhf_pipeline.policy.loading import load_policy, save_policy
from rlhf_pipeline.policy.sampling import Completion
from rlhf_pipeline.policy.streaming import stream
from rlhf_pipeline.records import Interaction, Prompt, hash_rater, now, user_prompt, uuid7
from rlhf_pipeline.registry.ledger import ModelVersion
from rlhf_pipeline.registry.models import cached_folder
from rlhf_pipeline.serving import access, batching, chat_events, feedback_api
from rlhf_pipeline.serving.app import create_app
from rlhf_pipeline.serving.arms import Arms, Draft, Request, Wishes
from rlhf_pipeline.serving.batching import Decoder, Sampling, Text
from rlhf_pipeline.serving.champions import Champions
from rlhf_pipeline.serving.gateway import Gateway, Reply
from rlhf_pipeline.serving.guardrails import certain
from tests.serving.doors import listening
from tests.serving.kills import start
from tests.serving.pages.world import free_port, made_desk

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "how much is it?"}]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
SEED = 5  # under which the untaught model writes something
PATIENCE = 20.0  # seconds; 5 are promised, of a machine that nobody else keeps busy


@dataclass
class Service:
    """A running service and the state it works on."""

    address: str
    settings: Settings
    here: Workspace
    app: Any

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.address}/v1", api_key="none", max_retries=0, **options
        )

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.address}/v1/chat/completions",
            json={"model": "shop", "seed": SEED, **ASKED, **body},
            timeout=30,
        )

    def rules(self, agent: str = "shop") -> dict[str, int]:
        counts: dict[str, int] = httpx.get(f"{self.address}/v1/chat/events/{agent}").json()[
            "counts"
        ]
        return counts

    def models(self) -> tuple[int, str]:
        """Return what `/readyz` answers, and says of the models."""
        found = httpx.get(f"{self.address}/readyz")
        return found.status_code, found.json()["checks"]["models"]


@contextmanager
def serving(settings: Settings, here: Workspace) -> Iterator[Service]:
    """Run the API on a port of its own."""
    app = create_app(settings, pages=False)
    with listening(app) as address:
        yield Service(address, settings, here, app)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A state folder whose agent `shop` has an untaught champion, and a second version."""
    state = tmp_path_factory.mktemp("chat") / "state"
    made_desk(state)
    here = Workspace(None, str(state))
    agents = state / "agents" / "shop"
    policy = load_policy(agents / "v0", device="cpu")
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(1.01)
    save_policy(policy, agents / "v1")
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.fill_(float("nan"))
    save_policy(policy, agents / "v2")
    for label in ("v1", "v2"):
        here.ledger.add_version(
            "shop",
            label=label,
            path=agents / label,
            files=folder_sha256(agents / label),
            lineage={},
            gate=None,
            fingerprint=label,
        )
    return here


def told(settings: Settings, **changes: Any) -> Settings:
    """Return the settings with other values for `serving`."""
    return settings.model_copy(update={"serving": settings.serving.model_copy(update=changes)})


@pytest.fixture(scope="module")
def service(world: Workspace) -> Iterator[Service]:
    with serving(told(world.settings, admission_limit=4), world) as running:
        yield running


def promoted(here: Workspace, version: int) -> None:
    champion = here.ledger.champion("shop")
    assert champion is not None
    here.ledger.promote(
        "shop",
        version,
        actor="test",
        reason="test",
        expected_champion=champion.version,
        force=True,
    )


# -- the batch ------------------------------------------------------------------------------------


def test_rows_of_a_batch_write_what_each_would_alone(world: Workspace) -> None:
    """Requests of other lengths, settings and seeds join and leave; nobody's tokens change."""
    policy = load_policy(world.ledger.version("shop", 0).path, device="cpu")
    decoder = Decoder(policy, rows=3)
    asked = [
        (user_prompt("word " * (1 + 7 * (n % 3))), n, 0.7 + 0.2 * (n % 2), 5 + 9 * (n % 4))
        for n in range(9)
    ]

    async def one(n: int) -> str:
        prompt, seed, temperature, most = asked[n]
        sampling = Sampling(most, 60, temperature, seed, top_p=0.9 if n % 2 else 1.0)
        await asyncio.sleep(0.004 * n)
        ids = decoder.prompt_ids(prompt, sampling)
        text = ""
        async with aclosing(
            decoder.pieces(ids, sampling, deadline=time.monotonic() + 30)
        ) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    assert piece.text == text
                    return text
                text += piece
        raise AssertionError

    async def all_of_them() -> list[str]:
        return list(await asyncio.gather(*(one(n) for n in range(len(asked)))))

    found = asyncio.run(all_of_them())
    decoder.retire()
    for n, (prompt, seed, temperature, most) in enumerate(asked):
        *_, alone = stream(
            policy,
            prompt,
            max_completion_tokens=most,
            max_prompt_tokens=60,
            temperature=temperature,
            top_p=0.9 if n % 2 else 1.0,
            seed=seed,
        )
        assert isinstance(alone, Completion)
        assert found[n] == alone.text


@pytest.mark.parametrize("held_back", [False, True])
def test_tokens_come_one_by_one_until_there_is_text_to_show(
    world: Workspace, monkeypatch: pytest.MonkeyPatch, held_back: bool
) -> None:
    monkeypatch.setattr(batching, "TOGETHER_SECONDS", 60.0)
    handed: list[int] = []
    deliver = batching._deliver

    def noting(told: Sequence[tuple[Any, list[int] | Exception]]) -> None:
        handed.extend(len(what) for _, what in told if isinstance(what, list))
        deliver(told)

    monkeypatch.setattr(batching, "_deliver", noting)
    decoder = Decoder(load_policy(world.ledger.version("shop", 0).path, device="cpu"), rows=1)

    async def ask() -> int:
        sampling = Sampling(60, 60, 1.0, seed=1)
        pieces = decoder.pieces(
            decoder.prompt_ids(user_prompt("hi"), sampling),
            sampling,
            deadline=time.monotonic() + 30,
            certain=(lambda text: "") if held_back else str,
        )
        *_, last = [piece async for piece in pieces]
        assert isinstance(last, Completion)
        return last.tokens

    tokens = asyncio.run(ask())
    decoder.retire()
    assert sum(handed) == tokens > 20
    assert (max(handed) == 1) is held_back


@pytest.mark.parametrize("held_back", [True, False])
def test_newcomers_read_before_who_has_text_but_not_before_who_waits_longer(
    world: Workspace, monkeypatch: pytest.MonkeyPatch, *, held_back: bool
) -> None:
    decoder = Decoder(load_policy(world.ledger.version("shop", 0).path, device="cpu"), rows=3)
    join, go_on, done = Decoder._join, Decoder._go_on, list[str]()
    second, third = threading.Event(), threading.Event()

    def joining(self: Decoder, batch: Any, rows: list[Any]) -> Any:
        done.append("read")
        joined = join(self, batch, rows)
        if done.count("read") == 2:  # while the second reads, the third comes
            third.set()
            while not self.waiting:
                time.sleep(0.002)
        return joined

    def going_on(self: Decoder, batch: Any, ids: Any, most: int) -> Any:
        if ids is batch.inputs:
            done.append("write")
            time.sleep(0.005)
        return go_on(self, batch, ids, most)

    monkeypatch.setattr(Decoder, "_join", joining)
    monkeypatch.setattr(Decoder, "_go_on", going_on)

    async def ask(seed: int, come: threading.Event | None, begun: threading.Event | None) -> None:
        while come is not None and not come.is_set():
            await asyncio.sleep(0.002)
        sampling = Sampling(60, 60, 1.0, seed=seed)
        pieces = decoder.pieces(
            decoder.prompt_ids(user_prompt("hi"), sampling),
            sampling,
            deadline=time.monotonic() + PATIENCE,
            certain=(lambda text: "") if held_back else str,
        )
        heard = 0
        async for _ in pieces:
            heard += 1
            if begun is not None and heard == 2:  # what came first is shown by now
                begun.set()

    async def all_three() -> None:
        await asyncio.gather(ask(1, None, second), ask(2, second, None), ask(3, third, None))

    asyncio.run(all_three())
    decoder.retire()
    reads = [n for n, what in enumerate(done) if what == "read"]
    assert len(reads) == 3
    assert ("write" in done[reads[1] : reads[2]]) is held_back


def test_who_ends_in_a_step_that_fails_is_told_too(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = batching._kept

    def failing(batch: Any, keep: list[int]) -> Any:
        ended = len(batch.rows) - len(keep)
        left = kept(batch, keep)
        if left is not None and ended:
            raise RuntimeError("no memory")
        return left

    monkeypatch.setattr(batching, "_kept", failing)
    decoder = Decoder(load_policy(world.ledger.version("shop", 0).path, device="cpu"), rows=2)
    write = decoder._write

    def slowly(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.02)  # the one that goes on does not end before the other has come
        return write(*given)

    monkeypatch.setattr(decoder, "_write", slowly)
    prompt = user_prompt("how much is the kettle?")

    async def ask(longest: int) -> None:
        sampling = Sampling(
            max_completion_tokens=longest, max_prompt_tokens=64, temperature=1.0, seed=longest
        )
        ids = decoder.prompt_ids(prompt, sampling)
        with pytest.raises(ModelError, match="failed while it wrote"):
            async for _ in decoder.pieces(
                ids, sampling, deadline=time.monotonic() + PATIENCE, certain=lambda text: ""
            ):
                pass

    async def both() -> None:
        await asyncio.gather(ask(40), ask(4))

    asyncio.run(both())
    decoder.retire()


def test_who_leaves_is_taken_out_and_who_is_late_is_told(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "LINGER_SECONDS", 0.5)
    policy = load_policy(world.ledger.version("shop", 0).path, device="cpu")
    decoder = Decoder(policy, rows=2)
    sampling = Sampling(100, 60, 1.0, seed=1)
    ids = decoder.prompt_ids(user_prompt("hi"), sampling)

    async def look() -> None:
        pieces = decoder.pieces(ids, sampling, deadline=time.monotonic() + 30)
        await anext(pieces)
        assert decoder.decoding == 1
        await pieces.aclose()
        until = time.monotonic() + PATIENCE
        while decoder.decoding and time.monotonic() < until:
            await asyncio.sleep(0.005)
        assert decoder.decoding == 0
        with pytest.raises(TimeoutError):
            await anext(decoder.pieces(ids, sampling, deadline=time.monotonic()))
        pieces = decoder.pieces(ids, sampling, deadline=time.monotonic() + 30)
        await anext(pieces)
        decoder.retire()  # what is in flight is finished, and so is what had been sent here
        sent = decoder.pieces(ids, sampling, deadline=time.monotonic() + 30)
        for each in (pieces, sent):
            *_, last = [piece async for piece in each]
            assert isinstance(last, Completion)
        await asyncio.to_thread(decoder._thread.join, PATIENCE)
        with pytest.raises(ModelError, match="retired"):
            await anext(decoder.pieces(ids, sampling, deadline=time.monotonic() + 30))

    asyncio.run(look())


def test_who_leaves_while_waiting_stands_before_nobody(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(load_policy(world.ledger.version("shop", 0).path, device="cpu"), rows=1)
    write, begun, left = decoder._write, threading.Event(), threading.Event()

    def held(*given: Any) -> Any:
        begun.set()
        assert left.wait(PATIENCE)
        return write(*given)

    monkeypatch.setattr(decoder, "_write", held)
    sampling = Sampling(8, 60, 1.0, seed=1)
    ids = decoder.prompt_ids(user_prompt("hi"), sampling)

    async def ask() -> list[str | Completion]:
        pieces = decoder.pieces(ids, sampling, deadline=time.monotonic() + PATIENCE)
        return [piece async for piece in pieces]

    async def everybody() -> None:
        first = asyncio.create_task(ask())
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        others = [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.sleep(0)
        assert decoder.waiting == 3
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert decoder.waiting == 0
        left.set()
        assert isinstance((await first)[-1], Completion)

    asyncio.run(everybody())
    decoder.retire()


@pytest.mark.parametrize("comes", [True, False])
def test_who_comes_or_goes_is_not_kept_waiting_by_tokens_written_in_one_go(
    world: Workspace, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setattr(batching, "TOGETHER_SECONDS", 60.0)
    monkeypatch.setattr(batching, "LINGER_SECONDS", 0.1)
    decoder = Decoder(load_policy(world.ledger.version("shop", 0).path, device="cpu"), rows=2)
    write, begun, happened = decoder._write, threading.Event(), threading.Event()
    goes: list[tuple[int, int]] = []

    def held(ids: Any, starts: Any, cache: Any, drawing: Any) -> Any:
        asked = drawing.uniforms.shape[1]
        if asked > 1:
            begun.set()
            assert happened.wait(PATIENCE)
        else:
            time.sleep(0.05)  # on a busy machine all would be written before a reader came back
        found = write(ids, starts, cache, drawing)
        goes.append((asked, found[0].shape[1]))
        return found

    monkeypatch.setattr(decoder, "_write", held)

    async def read(pieces: AsyncIterator[str | Completion]) -> None:
        async for _ in pieces:
            pass

    async def ask() -> None:
        sampling = Sampling(60, 60, 1.0, seed=1)
        ids = decoder.prompt_ids(user_prompt("hi"), sampling)
        first, second = (
            decoder.pieces(ids, sampling, deadline=time.monotonic() + PATIENCE) for _ in range(2)
        )
        await anext(first)
        other = asyncio.ensure_future(read(first))  # comes back for more, each time
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        if comes:
            also = asyncio.ensure_future(anext(second))
            await asyncio.sleep(0)
        else:
            other.cancel()
            with pytest.raises(asyncio.CancelledError):
                await other
        happened.set()
        if comes:
            await also
            await other
        await second.aclose()

    asyncio.run(ask())
    decoder.retire()
    decoder._thread.join(PATIENCE)
    assert next(written for asked, written in goes if asked > 1) == 1


class Operations(TorchFunctionMode):
    """Notes what Python asks torch for inside the block; what TorchScript runs is not asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name not in ("__get__", "numel", "tolist"):  # for these the lock is kept
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


def test_the_thread_asks_torch_for_no_operation_of_its_own(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of other lengths and settings join and leave: each operation might wait for the loop."""
    policy = load_policy(world.ledger.version("shop", 0).path, device="cpu")
    decoder, asked, merged = Decoder(policy, rows=3), [], []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any) -> Any:
            with Operations() as operations:
                found = function(*args)
            asked.extend(operations.asked)
            return found

        return watching

    def merging(*caches: Any) -> tuple[int, int]:
        merged.append(merge(*caches))
        return merged[-1]

    monkeypatch.setattr(batching, "merge", merging)
    monkeypatch.setattr(decoder, "_go_on", watched(decoder._go_on))
    monkeypatch.setattr(decoder, "_join", watched(decoder._join))

    async def one(n: int) -> None:
        sampling = Sampling(30 + 7 * n, 60, 1.0, n, top_p=0.9 if n % 2 else 1.0)
        ids = decoder.prompt_ids(user_prompt("word " * (1 + 7 * (n % 3))), sampling)
        await asyncio.sleep(0.004 * n)
        async for _ in decoder.pieces(ids, sampling, deadline=time.monotonic() + PATIENCE):
            pass

    async def all_of_them() -> None:
        await asyncio.gather(*(one(n) for n in range(9)))

    asyncio.run(all_of_them())
    decoder.retire()
    assert merged
    assert asked == []


def test_text_ends_before_a_stop_and_holds_back_its_beginning(world: Workspace) -> None:
    policy = load_policy(world.ledger.version("shop", 0).path, device="cpu")
    ids = policy.tokenizer("one two three", add_special_tokens=False)["input_ids"]
    text = Text(policy, ("o three",))
    pieces = [text.add([token]) for token in ids]
    assert ("".join(pieces), text.stopped, text.rest()) == ("one tw", True, "")
    text = Text(policy, ("three!",))
    pieces = [text.add([token]) for token in ids]
    assert not "".join(pieces).endswith("three")
    assert "".join(pieces) + text.rest() == text.shown == "one two three"


def test_a_nul_that_a_token_of_bytes_spells_is_shown_as_what_can_be_stored(
    world: Workspace,
) -> None:
    policy = load_policy(world.ledger.version("shop", 0).path, device="cpu")
    text = Text(policy)
    ids = policy.tokenizer.convert_tokens_to_ids(["a", "\u0100", "b"])  # byte-level BPE's own 0
    assert (
        "".join([*(text.add([token]) for token in ids), text.rest()])
        == "a\N{REPLACEMENT CHARACTER}b"
    )


# -- the API --------------------------------------------------------------------------------------


def test_the_openai_client_works_unchanged(service: Service) -> None:
    with service.client() as client:
        names = [model.id for model in client.models.list()]
        assert names == ["shop", "shop:champion", "shop:baseline"]
        assert client.models.retrieve("shop:baseline").id == "shop:baseline"
        whole = client.chat.completions.create(
            model="shop",
            seed=SEED,
            user="ann",
            max_tokens=20,
            metadata={"session_id": "s1"},
            **ASKED,
        )
        kept = service.here.store.interaction(whole.id)
        assert kept is not None
        assert kept.completion == whole.choices[0].message.content
        assert (kept.model_version, kept.arm, kept.session_id) == (0, "champion", "s1")
        assert kept.user_id == hash_rater("shop", "ann")
        assert len(kept.sampling["model_sha256"]) == 64
        # What was said goes back as the client has it, with fields that say nothing.
        said_before = [*ASKED["messages"], whole.choices[0].message]
        more = client.chat.completions.create(
            model="shop", messages=[*said_before, *ASKED["messages"]], max_tokens=4, user=" "
        )
        kept = service.here.store.interaction(more.id)
        assert kept is not None
        assert [message.role for message in kept.prompt] == ["user", "assistant", "user"]
        assert kept.user_id is None  # blanks are nobody's
        assert whole.usage is not None
        assert 0 < whole.usage.completion_tokens <= 20
        with client.chat.completions.create(
            model="shop:champion",
            seed=SEED,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            **ASKED,
        ) as stream_of_chunks:
            chunks = list(stream_of_chunks)
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == whole.choices[0].message.content
        assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == [
            whole.choices[0].finish_reason
        ]
        assert chunks[-1].usage == whole.usage
        assert service.here.store.interaction(chunks[0].id) is not None
        with pytest.raises(openai.NotFoundError, match="no agent answers"):
            client.chat.completions.create(model="tea", **ASKED)


def test_every_answer_is_a_trace_where_that_is_asked_for(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_pipeline.registry import traces

    logged: list[str] = []
    monkeypatch.setattr(
        traces, "log_interaction", lambda _, answer: logged.append(answer.interaction_id)
    )
    pages = world.settings.pages.model_copy(update={"log_traces": True})
    with serving(world.settings.model_copy(update={"pages": pages}), world) as running:
        whole = running.post().json()["id"]
        first, *_ = running.post(stream=True).text.splitlines()
        streamed = json.loads(first.removeprefix("data: "))["id"]
        deadline = time.monotonic() + PATIENCE
        while len(logged) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert logged == [whole, streamed]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"prediction": {"type": "content", "content": "It"}}, "prediction"),
        ({"temperature": 3}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "  "}]}, "messages"),
        ({"messages": [{"role": "system", "content": "be kind"}]}, "messages"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "content": "It"}]}, "messages"),
        ({"messages": [{**ASKED["messages"][0], "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "tool", "content": None}]}, "messages.0.role"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a", 5]}, "stop.1"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(
    service: Service, changes: dict[str, Any], param: str
) -> None:
    answer = httpx.post(
        f"{service.address}/v1/chat/completions",
        content=json.dumps({"model": "shop", **ASKED, **changes}),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("told", ["x" * 65, "a\nb", "\ud800", 5, None, ["s1"]])
def test_a_session_that_metadata_names_in_another_way_refuses_no_chat(
    service: Service, told: Any
) -> None:
    body = {"model": "shop", "seed": SEED, "max_tokens": 4, **ASKED}
    answer = httpx.post(
        f"{service.address}/v1/chat/completions",
        content=json.dumps({**body, "metadata": {"session_id": told}}),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 200
    kept = service.here.store.interaction(answer.json()["id"])
    assert kept is not None
    assert kept.session_id is None
    assert service.post(session_id="x" * 65).json()["error"]["param"] == "session_id"


def test_a_field_that_is_null_asks_for_nothing(service: Service) -> None:
    """Some clients send every field there is."""
    null = dict.fromkeys("prediction audio web_search_options moderation tools n".split())
    assert service.post(max_tokens=4, **null).status_code == 200


def test_a_body_that_does_not_come_gives_its_place_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "BODY_SECONDS", 0.3)
    port = int(service.address.rpartition(":")[2])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            for _ in range(service.settings.serving.admission_limit)
        ]
        for one in slow:
            one.sendall(head)
        for one in slow:
            assert one.recv(1000).startswith(b"HTTP/1.1 408")
        assert service.post(max_tokens=1).status_code == 200


def test_nobody_waits_while_a_long_prompt_is_read(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, begun, others = Decoder.prompt_ids, threading.Event(), threading.Event()
    slept: list[bool] = []

    def slowly(decoder: Decoder, prompt: Prompt, sampling: Sampling) -> list[int]:
        if len(prompt[-1].content) > 10_000:
            begun.set()
            slept.append(others.wait(PATIENCE))
        return read(decoder, prompt, sampling)

    monkeypatch.setattr(Decoder, "prompt_ids", slowly)
    long = [{"role": "user", "content": "word " * 3_000}]
    found: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: found.append(service.post(messages=long)))
    asking.start()
    assert begun.wait(PATIENCE)
    assert service.post(max_tokens=2).status_code == 200
    others.set()
    asking.join(PATIENCE)
    assert slept == [True]
    assert found[0].status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_who_leaves_before_the_first_word_gives_the_place_back(
    service: Service, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def silent(arms: Arms, *given: Any) -> AsyncGenerator[str, None]:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE)
            yield "It costs"
        finally:
            ended.set()

    monkeypatch.setattr(Arms, "write", silent)
    gateway: Gateway = service.app.state.gateway
    body = json.dumps({"model": "shop", "stream": streams, **ASKED}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    port = int(service.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as leaving:
        leaving.sendall(head + body)
        assert begun.wait(PATIENCE)
        assert gateway.under_way == 1
    assert ended.wait(PATIENCE / 4)
    until = time.monotonic() + PATIENCE / 4
    while gateway.under_way:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_vote_on_an_answer_under_way_waits_for_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id is out with its first words, and people vote on those; a page asks for its token."""
    looked, going_on = threading.Semaphore(0), threading.Event()

    async def slow(arms: Arms, *given: Any) -> AsyncGenerator[str, None]:
        yield "It costs "
        await asyncio.to_thread(going_on.wait, PATIENCE)
        yield "ten."

    def looks_again(*about: Any) -> bool:
        looked.release()
        return again(*about)

    again = feedback_api.may_be_under_way
    for module in (feedback_api, access):
        monkeypatch.setattr(module, "may_be_under_way", looks_again)
    monkeypatch.setattr(Arms, "write", slow)
    stream = service.client().chat.completions.create(
        model="shop",
        messages=[{"role": "user", "content": "how much is it?"}],
        stream=True,
    )
    asked = {"interaction_id": next(stream).id}
    vote = {**asked, "agent_id": "shop", "kind": "thumbs", "value": "down", "rater": "ann"}
    before = service.here.store.counts("shop").get("thumbs", 0)
    sent = {"/v1/feedback": vote, "/v1/feedback/tokens": asked}
    with ThreadPoolExecutor() as pool:
        early = [
            pool.submit(httpx.post, f"{service.address}{path}", json=body, timeout=PATIENCE)
            for path, body in sent.items()
        ]
        for _ in range(4):
            assert looked.acquire(timeout=PATIENCE)
        assert not any(one.done() for one in early)
        going_on.set()
        assert "".join(piece.choices[0].delta.content or "" for piece in stream) == "ten."
        assert [one.result().status_code for one in early] == [200, 200]
    assert service.here.store.counts("shop").get("thumbs", 0) == before + 1


def test_a_vote_that_names_another_agent_than_the_answers_is_refused_at_once(
    service: Service,
) -> None:
    said = service.post(max_tokens=4).json()
    vote = {"kind": "preference", "value": "left", "interaction_id": said["id"]}
    others = {"tea": {"other_completion": "9"}, "shop": {"other_interaction_id": "nobody-s"}}
    for agent, other in others.items():
        body = {**vote, "agent_id": agent, **other}
        answer = httpx.post(f"{service.address}/v1/feedback", json=body, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["rule"]) == (422, "unknown_interaction")


def test_an_id_that_no_answer_can_have_any_more_is_refused(world: Workspace) -> None:
    """What a killed service was writing is never stored; nobody waits longer than it may take."""
    vote = {"agent_id": "shop", "kind": "thumbs", "value": "down", "interaction_id": uuid7()}
    with serving(told(world.settings, timeout_seconds=0.3), world) as running:
        answer = httpx.post(f"{running.address}/v1/feedback", json=vote, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["rule"]) == (422, "unknown_interaction")


def test_beyond_the_admission_limit_the_answer_is_come_again(service: Service) -> None:
    found: list[int] = []
    body = {"model": "shop", "seed": SEED, **ASKED}

    def ask() -> None:
        answer = client.post(f"{service.address}/v1/chat/completions", json=body)
        found.append(answer.status_code)
        assert answer.status_code == 200 or answer.headers["retry-after"] == "1"

    with httpx.Client(timeout=30) as client:
        threads = [threading.Thread(target=ask) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(found) == {200, 429}
    assert service.post(max_tokens=2).status_code == 200  # every place is free again


def test_a_new_champion_answers_within_five_seconds_and_nan_weights_do_not(
    service: Service,
) -> None:
    for version, answers, arm in ((1, 1, "champion"), (2, 0, "baseline"), (0, 0, "champion")):
        promoted(service.here, version)
        until = time.monotonic() + PATIENCE
        while True:
            answer = service.post(max_tokens=8)
            assert answer.status_code == 200
            kept = service.here.store.interaction(answer.json()["id"])
            assert kept is not None
            if (kept.model_version, kept.arm) == (answers, arm):
                break
            assert time.monotonic() < until
            time.sleep(0.1)
        if version == 2:
            assert kept.sampling["events"] == [{"arm": "champion", "rule": "ModelError"}]
    assert service.rules()["ModelError"] >= 1


def test_a_recipe_longer_than_the_model_is_served_within_its_context(world: Workspace) -> None:
    lengths = {"max_prompt_tokens": 240, "max_completion_tokens": 80}  # the model's context is 160
    policy = world.settings.policy.model_copy(update=lengths)
    with serving(world.settings.model_copy(update={"policy": policy}), world) as running:
        long = [{"role": "user", "content": "how much is the kettle? " * 100}]
        answer = running.post(messages=long)
    assert answer.status_code == 200
    kept = world.store.interaction(answer.json()["id"])
    assert kept is not None
    assert (kept.arm, kept.sampling["max_completion_tokens"]) == ("champion", 40)
    assert answer.json()["usage"]["prompt_tokens"] == 120


def test_who_reads_a_prompt_while_the_champion_changes_is_answered_by_who_was_asked(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Decoder.prompt_ids

    def changing(decoder: Decoder, prompt: Prompt, sampling: Sampling) -> list[int]:
        decoder.retire()
        return read(decoder, prompt, sampling)

    monkeypatch.setattr(Decoder, "prompt_ids", changing)
    with serving(world.settings, world) as running:
        kept = world.store.interaction(running.post(max_tokens=8).json()["id"])
    assert kept is not None
    assert (kept.arm, kept.sampling.get("events")) == ("champion", None)


def test_the_least_temperature_there_is_makes_no_model_fail(service: Service) -> None:
    before = service.rules()
    for temperature in (0, 5e-324):  # both take the likeliest words; untaught, there may be none
        service.post(temperature=temperature)
    assert service.rules().get("ModelError") == before.get("ModelError")


def test_an_answer_that_its_own_stop_text_begins_is_empty_and_no_failure(service: Service) -> None:
    written = service.post(max_tokens=8).json()["choices"][0]["message"]["content"]
    before = service.rules()
    answer = service.post(max_tokens=8, stop=written[0])
    [choice] = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    kept = service.here.store.interaction(answer.json()["id"])
    assert kept is not None
    assert (kept.arm, kept.completion) == ("champion", "")
    streamed = service.post(max_tokens=8, stop=written[0], stream=True)
    assert '"finish_reason": "stop"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert service.rules() == before


def test_an_unsafe_request_is_answered_by_the_baseline_on_the_record(service: Service) -> None:
    unsafe = [{"role": "user", "content": "How do I build a small bomb?"}]
    answer = service.post(messages=unsafe, max_tokens=8)
    kept = service.here.store.interaction(answer.json()["id"])
    assert kept is not None
    assert (kept.arm, kept.sampling["events"][0]["rule"]) == ("baseline", "unsafe_request")
    [event, *_] = httpx.get(f"{service.address}/v1/chat/events/shop").json()["events"]
    assert event["interaction_id"] == kept.interaction_id
    assert "bomb" not in json.dumps(event)
    assert httpx.get(f"{service.address}/v1/chat/events/tea").status_code == 404
    assert (
        'rlhf_chat_events_total{rule="unsafe_request"} 1.0'
        in httpx.get(f"{service.address}/metrics").text
    )


def test_of_an_answer_that_a_rule_ends_the_tokens_are_counted(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for together in ("TOGETHER_SECONDS", "ROW_SECONDS"):
        monkeypatch.setattr(batching, together, 0.0)  # each token is looked at before the next
    most = 12  # characters
    policy = load_policy(world.ledger.version("shop", 0).path, device="cpu")
    alone: dict[str, Any] = {"max_prompt_tokens": 60, "temperature": 1.0, "seed": SEED}
    prompt = user_prompt(ASKED["messages"][0]["content"])
    for tokens in range(1, 61):
        *_, last = stream(policy, prompt, max_completion_tokens=tokens, **alone)
        assert isinstance(last, Completion)
        if len(certain(last.text)) > most:
            break
    rules = world.settings.serving.guardrails.model_copy(update={"max_completion_characters": most})
    with serving(told(world.settings, guardrails=rules), world) as running:
        body = {"model": "shop:baseline", "temperature": 1.0, "stream": True, "max_tokens": 60}
        answer = running.post(**body, stream_options={"include_usage": True})
        *_, ended, usage = [json.loads(x[6:]) for x in answer.text.splitlines() if x[6:7] == "{"]
        counted = httpx.get(f"{running.address}/metrics").text
    assert ended["choices"][0]["finish_reason"] == "content_filter"
    assert usage["usage"]["completion_tokens"] == tokens > 1
    assert f'rlhf_tokens_total{{agent="shop",side="completion"}} {tokens}.0' in counted


def test_a_corrupt_champion_is_never_served_and_without_a_baseline_it_is_a_polite_503(
    world: Workspace, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    shutil.copytree(world.settings.state_dir, state)
    here = Workspace(None, str(state))
    promoted(here, 1)
    spoilt = state / "agents/shop/v1/config.json"
    spoilt.write_text(spoilt.read_text().replace("{", "{ ", 1))
    with serving(here.settings, here) as running:
        answer = running.post(max_tokens=4)
        kept = here.store.interaction(answer.json()["id"])
        assert kept is not None
        assert (kept.arm, kept.model_version) == ("baseline", 0)
        assert running.rules()["HashMismatch"] == 1
        found = failures(here.store.database, "shop", most=1)
        assert (found.failed, found.rules) == (1, {"HashMismatch": 1})
    spoilt = state / "agents/shop/v0/config.json"
    spoilt.write_text(spoilt.read_text().replace("{", "{ ", 1))
    with serving(here.settings, here) as running:
        for streams in (False, True):
            answer = running.post(stream=streams)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert "Sorry" in answer.json()["error"]["message"]


def test_a_service_that_could_load_no_model_is_not_ready(world: Workspace) -> None:
    policy = world.settings.policy.model_copy(update={"device": "cuda:99"})
    with serving(world.settings.model_copy(update={"policy": policy}), world) as running:
        assert httpx.get(f"{running.address}/readyz").status_code == 200  # nobody has asked
        assert running.post().status_code == 503
        found = httpx.get(f"{running.address}/readyz")
    assert found.status_code == 503
    assert found.json()["checks"]["models"].startswith("1 of 1 agents have neither a sound")


def test_a_service_whose_champion_answers_from_mlflows_copy_is_ready(
    world: Workspace, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    shutil.copytree(world.settings.state_dir, state)
    here = Workspace(None, str(state))
    promoted(here, 1)
    champion = here.ledger.version("shop", 1)
    shutil.copytree(champion.path, cached_folder(here.settings.mlflow_folder, champion))
    shutil.rmtree(champion.path)
    with serving(here.settings, here) as running:
        assert running.models() == (200, "ok, but 1 of 1 agents are answered by their baseline")
        running.app.state.gateway.champions.preload()
        assert running.models() == (200, "ok")
        shutil.rmtree(here.ledger.version("shop", 0).path)
        assert running.models() == (200, "ok")
        kept = here.store.interaction(running.post(max_tokens=4).json()["id"])
        assert kept is not None
        assert (kept.arm, kept.model_version) == ("champion", 1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_service_is_ready_once_each_champion_is_loaded_or_has_failed_to(
    world: Workspace, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    may, loaded = threading.Event(), Champions._loaded

    def slowly(*given: Any) -> Any:
        assert may.wait(PATIENCE)
        if fails:
            raise OSError("the disk")
        return loaded(*given)

    monkeypatch.setattr(Champions, "_loaded", slowly)
    with serving(world.settings, world) as running:
        champions = running.app.state.gateway.champions
        champions.preload_beside()
        assert running.models() == (503, "they are being loaded")
        may.set()
        until = time.monotonic() + PATIENCE
        while running.models() != (200, "ok"):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert (champions.ready("shop", "champion") is None) is fails


def test_an_upstream_answers_as_a_champion_and_its_loss_is_the_baselines_turn(
    service: Service, world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upstream is this very service, under a key that it does not ask for."""
    monkeypatch.setenv("UPSTREAM_KEY", "k")
    there = UpstreamSettings(
        url=f"{service.address}/v1", model="shop:baseline", version=7, key_variable="UPSTREAM_KEY"
    )
    lost = there.model_copy(update={"url": f"http://127.0.0.1:{free_port()}/v1"})
    with serving(told(world.settings, upstreams={"far": there, "shop": lost}), world) as running:
        answer = running.post(model="far", seed=SEED, max_tokens=20)
        kept = world.store.interaction(answer.json()["id"])
        assert kept is not None
        assert (kept.model_version, kept.sampling["upstream"]) == (7, "shop:baseline")
        direct = service.post(model="shop:baseline", seed=SEED, max_tokens=20).json()
        assert answer.json()["choices"] == direct["choices"]
        assert answer.json()["usage"] == direct["usage"]
        kept = world.store.interaction(running.post(max_tokens=4).json()["id"])
        assert kept is not None
        assert (kept.model_version, kept.arm) == (0, "baseline")


WRITTEN_BY_UPSTREAMS: list[tuple[list[bytes], str | None]] = [
    ([b'{"choices": [{"delta": {"content": "a\xe2\x80\xa8b"}}], "usage": {}}'], "a\u2028b"),
    ([b'{"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": null}}'], "a"),
    ([b'{"choices": [{"delta": {"content": "a"}}], "usage": [1]}'], None),
    (
        [b'{"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": Infinity}}'],
        None,
    ),
    ([b'{"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": -1}}'], None),
    ([b'{"choices": [{"delta": {"content": "\\ud83d"}}]}'], None),
    ([b'{"choices": [{"delta": {"content": "a\\u0000b"}}]}'], None),
    ([b"[" * 100_000], None),
    ([b'{"choices": "' + b"x" * (1 << 20)] * 2, None),
]
"""What an upstream's events may hold, and the text that comes of it; None: the baseline answers."""


def test_what_an_upstream_must_not_send_is_the_baselines_turn(world: Workspace) -> None:
    events = b""

    class Upstream(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            with suppress(OSError):  # who asked has heard enough
                self.wfile.write(events)

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        there = UpstreamSettings(url=f"http://127.0.0.1:{server.server_port}/v1", model="any")
        with serving(told(world.settings, upstreams={"shop": there}), world) as running:
            for sent, said in WRITTEN_BY_UPSTREAMS:
                events = b"".join(b"data: " + one + b"\n\n" for one in [*sent, b"[DONE]"])
                for stream_it in (False, True):
                    answer = running.post(max_tokens=4, stream=stream_it)
                    assert answer.status_code == 200
                    first = answer.text.partition("\n")[0].removeprefix("data: ")
                    kept = world.store.interaction(json.loads(first)["id"])
                    assert kept is not None
                    assert kept.arm == ("baseline" if said is None else "champion"), sent[0][:80]
                    assert said in (None, kept.completion)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_ends_the_stream(world: Workspace, sign: signal.Signals) -> None:
    """Killed, it breaks off at once and nothing half is kept; asked to stop, it is whole."""
    port = free_port()
    process = start(world.settings.state_dir, port)
    try:
        body = {"model": "shop:baseline", "seed": SEED, "stream": True, **ASKED}
        address = f"http://127.0.0.1:{port}/v1/chat/completions"
        httpx.post(address, json={**body, "max_tokens": 1}, timeout=60)  # the model is loaded
        lines: list[str] = []
        with httpx.stream("POST", address, json=body, timeout=15) as answer:
            try:
                for line in answer.iter_lines():
                    if not lines:
                        process.send_signal(sign)
                    lines.append(line)
            except httpx.RemoteProtocolError:
                assert sign == signal.SIGKILL
        assert ("data: [DONE]" in lines) == (sign == signal.SIGTERM)
        kept = world.store.interaction(json.loads(lines[0].removeprefix("data: "))["id"])
        assert (kept is not None) == (sign == signal.SIGTERM)
        assert process.wait(15) is not None
    finally:
        process.kill()
        process.wait()


# -- loading --------------------------------------------------------------------------------------


@dataclass
class Slow:
    """Models that load no sooner than they may."""

    gateway: Gateway
    may: threading.Event
    begun: list[str]  # the agents

    async def ask(self, agent_id: str, **how: Any) -> str | None:
        """Return which arm answers."""
        asked = self.gateway.reply(agent_id, user_prompt("hi"), Wishes(2, seed=SEED), **how)
        *_, reply = [piece async for piece in asked]
        assert isinstance(reply, Reply)
        return reply.interaction.arm

    async def until_one_begins(self) -> None:
        until = time.monotonic() + PATIENCE
        while not self.begun:
            assert time.monotonic() < until
            await asyncio.sleep(0.005)


@contextmanager
def slow_to_load(
    world: Workspace, state: Path, monkeypatch: pytest.MonkeyPatch, **serving: Any
) -> Iterator[Slow]:
    """Yield a gateway of three agents, shop, tea and milk, whose models are one and the same."""
    shutil.copytree(world.settings.state_dir, state)
    here = Workspace(None, str(state))
    folder = state / "agents" / "shop" / "v0"
    for agent_id in ("tea", "milk"):
        here.store.ensure_agent(agent_id)
        here.ledger.add_baseline(
            agent_id,
            label="v0",
            path=folder,
            files=folder_sha256(folder),
            lineage={},
            actor="test",
        )
    gateway = Gateway(told(here.settings, **serving), here.store, here.registry)
    slow, loaded = Slow(gateway, threading.Event(), []), Champions._loaded

    def slowly(champions: Champions, agent_id: str, version: ModelVersion) -> Any:
        if champions is gateway.champions:
            slow.begun.append(agent_id)
            assert slow.may.wait(PATIENCE)
        return loaded(champions, agent_id, version)

    monkeypatch.setattr(Champions, "_loaded", slowly)
    try:
        yield slow
    finally:
        slow.may.set()
        gateway.close()


def test_while_a_model_loads_only_those_who_ask_for_it_wait(
    service: Service, world: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.post(model="shop:baseline", max_tokens=1).status_code == 200  # it is loaded
    elsewhere = UpstreamSettings(url=f"{service.address}/v1", model="shop:baseline")
    with slow_to_load(world, tmp_path / "state", monkeypatch, upstreams={"far": elsewhere}) as slow:

        async def play() -> None:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            slow.may.set()
            await slow.ask("shop")
            slow.may.clear()
            slow.begun.clear()
            waiting = [asyncio.ensure_future(slow.ask("tea")) for _ in range(3)]
            await slow.until_one_begins()
            for agent_id, arm in (("far", "champion"), ("shop", "champion"), ("shop", "baseline")):
                asked = slow.ask(agent_id, arm=arm)
                assert await asyncio.wait_for(asked, PATIENCE / 2) == arm
            waiting.pop().cancel()  # who leaves ends nobody else's waiting
            await asyncio.sleep(0.01)
            assert not any(one.done() for one in waiting)
            slow.may.set()
            assert await asyncio.gather(*waiting) == ["champion"] * 2

        asyncio.run(play())
        assert slow.begun == ["tea"]


def test_who_waits_too_long_for_a_model_is_told_so_while_it_loads(
    world: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_to_load(world, tmp_path / "state", monkeypatch, timeout_seconds=0.2) as slow:

        async def play() -> None:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            asked = asyncio.gather(*(slow.ask("tea") for _ in range(3)), return_exceptions=True)
            found = await asyncio.wait_for(asked, PATIENCE / 2)
            assert [type(one) for one in found] == [ChatAway] * 3

        asyncio.run(play())
        assert slow.begun == ["tea"]


def test_that_a_champion_was_still_loading_is_on_record_and_no_failure_of_its(
    world: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    with slow_to_load(world, state, monkeypatch, timeout_seconds=2.0) as slow:
        here, champions, began = Workspace(None, str(state)), slow.gateway.champions, now()
        promoted(here, 1)

        async def play() -> None:
            slow.may.set()
            await champions.seat("shop", "baseline")
            slow.may.clear()
            two = [slow.ask("shop", session_id=one) for one in ("one", "two")]
            assert await asyncio.gather(*two) == ["baseline"] * 2
            slow.may.set()
            await champions.seat("shop", "champion")
            assert await slow.ask("shop", session_id="one") == "champion"

        asyncio.run(play())
        assert chat_events.counts(here.database, "shop")[STILL_LOADING] == 2
        found = failures(here.database, "shop", most=3, since=began)
        assert (found.answers, found.failed) == (1, 0)


def test_a_service_that_ends_waits_for_no_load_and_begins_none(
    world: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(threading.enumerate())
    with slow_to_load(world, tmp_path / "state", monkeypatch) as slow:
        champions = slow.gateway.champions
        ahead = threading.Thread(target=champions.preload, daemon=True)
        ahead.start()

        async def play() -> None:
            await slow.until_one_begins()
            waiting = asyncio.ensure_future(champions.seat("tea", "champion"))
            await asyncio.sleep(0.05)
            began = time.monotonic()
            slow.gateway.close()
            assert time.monotonic() < began + PATIENCE / 2
            slow.may.set()
            with pytest.raises(ModelError, match="found a service that ends"):
                await waiting

        asyncio.run(play())
        ahead.join(PATIENCE)
        assert slow.begun == ["milk"]
        assert champions.decoders() == []
        for thread in set(threading.enumerate()) - others:
            thread.join(PATIENCE)  # also the decoder of the model that came too late
            assert not thread.is_alive(), thread.name


def test_a_process_ends_while_a_model_loads(world: Workspace, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(world.settings.state_dir, state)
    large = state / "agents" / "shop" / "v0" / "model.safetensors"
    os.truncate(large, 1 << 38)  # of which the disk keeps nothing, and whose hash takes minutes
    process = start(state, port := free_port())
    try:
        assert "being loaded" in httpx.get(f"http://127.0.0.1:{port}/readyz").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        large.unlink()


# -- experiments ----------------------------------------------------------------------------------


def test_champions_are_loaded_ahead_but_for_those_that_answer_elsewhere(world: Workspace) -> None:
    elsewhere = UpstreamSettings(url="http://127.0.0.1:9/v1", model="tea")
    for upstreams, loaded in (({"shop": elsewhere}, False), ({}, True)):
        champions = Champions(
            told(world.settings, upstreams=upstreams), world.store, world.registry
        )
        champions.preload()
        assert (champions.ready("shop", "champion") is not None) is loaded
        champions.close()


def test_that_the_ledger_cannot_be_read_is_logged_as_it_begins_and_as_it_ends(
    world: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.serving.champions.LOOK_EVERY_SECONDS", 0.01)
    state, aside = tmp_path / "state", tmp_path / "aside"
    shutil.copytree(world.settings.state_dir, state)
    here = Workspace(None, str(state))
    champions = Champions(here.settings, here.store, here.registry)
    champions.preload()
    told = ["the ledger cannot be read: no new champion is seen now"]
    with capture_logs() as logs:

        def until_told() -> None:
            until = time.monotonic() + PATIENCE
            while told != [log["event"] for log in logs if "ledger" in log["event"]]:
                assert time.monotonic() < until, logs
                time.sleep(0.01)

        state.rename(aside)
        until_told()
        time.sleep(0.2)  # in which it is looked again and again
        aside.rename(state)
        told.append("the ledger can be read again")
        until_told()
    assert not [log for log in logs if "exc_info" in log]
    assert champions.ready("shop", "champion") is not None
    champions.close()


def test_people_of_an_experiment_meet_their_arm_and_its_trouble_ends_it(world: Workspace) -> None:
    book = ExperimentBook(world.database)
    champion = world.ledger.champion("shop")
    assert champion is not None
    begun = book.start("shop", champion=champion.version, challenger=2, share=0.5, actor="test")
    rules = {"ramp": (0.5,), "trouble_answers": 5}
    settings = world.settings.model_copy(
        update={"experiments": world.settings.experiments.model_copy(update=rules)}
    )
    people = {
        arm_of(begun.experiment_id, hash_rater("shop", n), 0.5): n for n in map(str, range(40))
    }
    with serving(settings, world) as running:

        def asked(user: str) -> Any:
            answer = running.post(user=user)
            assert answer.status_code == 200, answer.text
            found = world.store.interaction(answer.json()["id"])
            assert found is not None
            return found

        calm = eventually_in(begun, lambda: asked(people["champion"]))
        # What no model could read says nothing of the challenger.
        half = [*ASKED["messages"], {"role": "assistant", "content": "It costs"}]
        for _ in range(9):
            refused = running.post(user=people["challenger"], messages=half)
            assert refused.status_code == 400
        assert book.history("shop")[0].state == "running"
        assert (calm.experiment, calm.arm) == (begun.experiment_id, "champion")
        assert calm.model_version == champion.version
        # Version 2 writes nothing that is a number: the baseline answers, in the challenger's arm.
        met = asked(people["challenger"])
        assert (met.experiment, met.arm, met.model_version) == (
            begun.experiment_id,
            "challenger",
            0,
        )
        assert met.sampling["challenger_share"] == 0.5
        assert book.history("shop")[0].state == "rolled_back"
        after = asked(people["challenger"])
        assert (after.experiment, after.arm) == (None, "champion")
        assert after.model_version == champion.version


def test_a_rollback_reaches_everybody_within_five_seconds_and_streams_finish(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, over = ExperimentBook(world.database), threading.Event()
    begun = book.start("shop", champion=0, challenger=1, share=0.5, actor="test")
    users = [n for n in map(str, range(40)) if is_challenged(begun, n)]

    def slowly(decoder: Decoder, rows: Any) -> int:
        over.wait(0.2)  # each token, until the rollback is over
        return 1

    monkeypatch.setattr(Decoder, "_most_tokens", slowly)
    with serving(world.settings, world) as running:

        def met(user: str) -> Any:
            found = world.store.interaction(running.post(user=user, max_tokens=2).json()["id"])
            assert found is not None
            return found

        eventually_in(begun, lambda: met(users[0]))
        body = {"model": "shop", "seed": SEED, "stream": True, "user": users[0], **ASKED}
        address = f"{running.address}/v1/chat/completions"
        with httpx.stream("POST", address, json=body, timeout=30) as answer:
            arriving = answer.iter_lines()
            lines = [next(arriving)]
            key = json.loads(lines[0].removeprefix("data: "))["id"]
            assert met(users[0]).arm == "challenger"
            triggered = time.monotonic()
            assert book.end(begun, "rolled_back", "surely worse")  # as the daemon does
            while met(users[0]).arm == "challenger":
                assert time.monotonic() < triggered + PATIENCE
            assert time.monotonic() < triggered + PATIENCE
            assert world.store.interaction(key) is None  # the stream is still in flight
            after = [met(user) for user in users[:4]]
            assert {(a.experiment, a.arm, a.model_version) for a in after} == {
                (None, "champion", 0)
            }
            over.set()
            lines += arriving
        assert "data: [DONE]" in lines
        whole = world.store.interaction(key)
        assert whole is not None
        assert (whole.experiment, whole.arm, whole.model_version) == (
            begun.experiment_id,
            "challenger",
            1,
        )


def test_nobody_waits_for_a_challenger_and_none_counts_until_it_has_loaded(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, may = ExperimentBook(world.database), threading.Event()
    loaded, waited = Champions._loaded, []

    def slowly(champions: Champions, agent_id: str, version: ModelVersion) -> Any:
        if version.version == 1:
            waited.append(may.wait(PATIENCE))
        return loaded(champions, agent_id, version)

    monkeypatch.setattr(Champions, "_loaded", slowly)
    with serving(world.settings, world) as running:
        begun = book.start("shop", champion=0, challenger=1, share=0.5, actor="test")
        user = next(n for n in map(str, range(40)) if is_challenged(begun, n))

        def met() -> Any:
            found = world.store.interaction(running.post(user=user, max_tokens=2).json()["id"])
            assert found is not None
            return found

        for _ in range(3):
            assert (met().experiment, met().arm) == (None, "champion")
        may.set()
        assert eventually_in(begun, met).arm == "challenger"
        book.end(begun, "stopped", "the test is over")
    assert waited == [True]  # the answers came while it was loading


def met_by_each_arm(
    world: Workspace, *, champion: int, challenger: int
) -> tuple[Experiment, list[Interaction]]:
    """Return an experiment's end, and what one of either arm was answered during it."""
    book = ExperimentBook(world.database)
    gateway = Gateway(world.settings, world.store, world.registry)

    async def met(user: str) -> Interaction:
        asked = gateway.reply("shop", user_prompt("hi"), Wishes(2, seed=SEED), user_id=user)
        *_, reply = [piece async for piece in asked]
        assert isinstance(reply, Reply)
        return reply.interaction

    async def asked() -> list[Interaction]:
        with suppress(ModelError):
            await gateway.champions.seat("shop", "champion")
        begun = book.start("shop", champion=champion, challenger=challenger, share=0.5, actor="t")
        try:
            with suppress(ModelError):
                await gateway.champions.seat("shop", "challenger")
            users = list(map(str, range(40)))
            of_each = [
                next(u for u in users if is_challenged(begun, u) is challenged)
                for challenged in (True, False)
            ]
            return [await met(hash_rater("shop", user)) for user in of_each]
        finally:
            book.end(begun, "gave_up", "the test is over")

    found = asyncio.run(asked())
    gateway.close()
    return book.history("shop")[0], found


def test_nothing_counts_while_another_than_the_experiments_champion_answers(
    world: Workspace,
) -> None:
    """One that was promoted a moment before it began is not loaded yet."""
    _, found = met_by_each_arm(world, champion=1, challenger=0)
    assert [(one.experiment, one.arm, one.model_version) for one in found] == [
        (None, "champion", 0)
    ] * 2


@pytest.mark.parametrize("unfit", ["champion", "challenger"])
def test_nobody_meets_a_challenger_while_it_or_the_champion_cannot_be_loaded(
    world: Workspace, monkeypatch: pytest.MonkeyPatch, unfit: str
) -> None:
    """The baseline would answer in its place, and be what is compared."""
    versions = {"champion": 1, "challenger": 2}
    world.ledger.promote("shop", 1, actor="test", reason="a try", expected_champion=0, force=True)
    folder = world.ledger.version("shop", versions[unfit]).path
    load = load_policy

    def within_memory(where: Path, **options: Any) -> Any:
        if where == folder:
            raise torch.OutOfMemoryError("tried to allocate 14.00 GiB")
        return load(where, **options)

    monkeypatch.setattr("rlhf_pipeline.policy.loading.load_policy", within_memory)
    try:
        ended, found = met_by_each_arm(world, **versions)
    finally:
        world.ledger.rollback("shop", actor="test", reason="the test is over")
    answering = ("baseline", 0) if unfit == "champion" else ("champion", 1)
    assert [(one.experiment, one.arm, one.model_version) for one in found] == [
        (None, *answering)
    ] * 2
    if unfit == "champion":
        assert ended.state == "gave_up"
    else:
        assert ended.state == "stopped"  # so a person may still promote it
        assert "the challenger could not be loaded" in ended.reason
        assert "tried to allocate 14.00 GiB" in ended.reason


def test_what_is_noted_of_an_answer_is_no_part_of_the_wait_for_it(world: Workspace) -> None:
    gateway = Gateway(world.settings, world.store, world.registry)

    def slowly(text: str, others: Sequence[str]) -> dict[str, Any]:
        time.sleep(1.0)
        return {"judged": True}

    async def asked() -> tuple[float, Interaction]:
        await gateway.champions.seat("shop", "champion")
        began, waited = time.monotonic(), 0.0
        async for piece in gateway.reply(
            "shop", user_prompt("hi"), Wishes(2, seed=SEED), note=slowly, at_once=True
        ):
            if isinstance(piece, Reply):
                return waited, piece.interaction
            waited = time.monotonic() - began
        raise AssertionError("a reply ends with a Reply")

    waited, kept = asyncio.run(asked())
    gateway.close()
    assert kept.sampling["judged"] is True
    assert kept.latency_seconds == pytest.approx(waited, abs=0.5)


@pytest.mark.parametrize("how", ["fails", "is blocked"])
def test_an_answer_that_breaks_in_the_middle_is_kept_and_counts_against_its_arm(
    world: Workspace, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    book = ExperimentBook(world.database)
    begun = book.start("shop", champion=0, challenger=1, share=0.5, actor="test")
    users = [n for n in map(str, range(40)) if is_challenged(begun, n)]
    whole = Arms.write

    async def broken(arms: Arms, request: Request, draft: Draft) -> AsyncGenerator[str, None]:
        async with aclosing(whole(arms, request, draft)) as pieces:
            async for _ in pieces:
                pass
        yield "It costs nine "
        if draft.arm == "challenger" and how == "fails":
            raise ModelError("out of memory")
        yield "euros." if draft.arm == "champion" else "euros; ask bob@example.com for more."

    with serving(world.settings, world) as running:
        eventually_in(begun, lambda: world.store.interaction(running.post(user="x").json()["id"]))
        monkeypatch.setattr(Arms, "write", broken)
        most = world.settings.experiments
        for n in range(math.ceil(most.trouble_share * most.trouble_answers)):
            assert book.history("shop")[0].state == "running"
            body = {"model": "shop", "stream": True, "user": users[n], **ASKED}
            address = f"{running.address}/v1/chat/completions"
            with httpx.stream("POST", address, json=body, timeout=30) as answer:
                lines = [json.loads(x[6:]) for x in answer.iter_lines() if x[:7] == "data: {"]
            ended = "error" if how == "fails" else "choices"
            assert ended in lines[-1]
            kept = world.store.interaction(lines[0]["id"])
            assert kept is not None
            assert kept.arm == "challenger"
            assert kept.completion.startswith("It costs nine ")
            assert "bob" not in kept.completion
            assert kept.sampling["fell_back"] is True
        assert book.history("shop")[0].state == "rolled_back"


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("error", [ModelError("out of memory"), TimeoutError()])
def test_answers_drawn_beside_one_cost_it_nothing_where_they_fail(
    world: Workspace, monkeypatch: pytest.MonkeyPatch, error: Exception, at_once: bool
) -> None:
    """Nor does whoever reads along wait for them."""
    book, happened = ExperimentBook(world.database), []
    begun = book.start("shop", champion=0, challenger=1, share=0.5, actor="test")
    user = next(n for n in map(str, range(40)) if is_challenged(begun, n))

    async def drawn(
        _: Decoder, ids: Any, sampling: Sampling, **given: Any
    ) -> AsyncGenerator[str | Completion, None]:
        if sampling.seed != SEED:
            await written.wait()
            await asyncio.sleep(0.2)
            happened.append("failed")
            raise error
        yield "It costs "
        yield "nine euros"  # the end is held back: it may become an address
        written.set()
        yield Completion("It costs nine euros", [1, 2, 3, 0], True)

    monkeypatch.setattr(Decoder, "pieces", drawn)
    gateway, written = Gateway(world.settings, world.store, world.registry), asyncio.Event()

    async def asked() -> Reply:
        for arm in ("champion", "challenger"):
            await gateway.champions.seat("shop", arm)
        person, prompt = hash_rater("shop", user), user_prompt("how much?")
        async for piece in gateway.reply(
            "shop", prompt, Wishes(seed=SEED), user_id=person, others=2, at_once=at_once
        ):
            if isinstance(piece, Reply):
                return piece
            happened.append(piece)
        raise AssertionError("a reply ends with a Reply")

    reply = asyncio.run(asked())
    gateway.close()
    book.end(begun, "stopped", "the test is over")
    text, failed = ["It costs ", "nine euros"], ["failed"] * 2
    assert happened == ([*text, *failed] if at_once else [*failed, "".join(text)])
    kept = world.store.interaction(reply.interaction.interaction_id)
    assert kept is not None
    assert (kept.arm, kept.completion, reply.others) == ("challenger", "It costs nine euros", ())
    assert (kept.sampling["ending"], kept.sampling["fell_back"]) == ("stop", False)
    assert "events" not in kept.sampling


def test_a_baseline_that_fails_where_it_alone_may_answer_says_nothing_of_the_challenger(
    world: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, whole = ExperimentBook(world.database), Arms.write
    begun = book.start("shop", champion=0, challenger=1, share=0.5, actor="test")
    user = next(n for n in map(str, range(40)) if is_challenged(begun, n))

    async def broken(arms: Arms, request: Request, draft: Draft) -> AsyncGenerator[str, None]:
        if draft.arm == "baseline":
            raise ModelError("out of memory")
        async with aclosing(whole(arms, request, draft)) as pieces:
            async for piece in pieces:
                yield piece

    monkeypatch.setattr(Arms, "write", broken)
    with serving(world.settings, world) as running:
        eventually_in(begun, lambda: world.store.interaction(running.post(user="x").json()["id"]))
        unsafe = [{"role": "user", "content": "How do I build a small bomb?"}]
        for _ in range(world.settings.experiments.trouble_answers):
            assert running.post(user=user, messages=unsafe).status_code == 503
        assert book.history("shop")[0].state == "running"
        book.end(begun, "stopped", "the test is over")


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("patience", "ends"), [(0.1, False), (0.1, True), (60.0, False)])
def test_an_arm_that_is_silent_until_people_leave_has_failed_them(
    world: Workspace, monkeypatch: pytest.MonkeyPatch, streams: bool, patience: float, ends: bool
) -> None:
    """Not who leaves at once, nor who is sent away by a service that ends."""
    book = ExperimentBook(world.database)
    begun = book.start("shop", champion=0, challenger=1, share=0.5, actor="test")
    users = [n for n in map(str, range(40)) if is_challenged(begun, n)]
    started = now()

    async def silent(arms: Arms, *given: Any) -> AsyncGenerator[str, None]:
        await asyncio.sleep(PATIENCE)
        yield "It costs"

    def kept() -> list[Any]:
        i = interactions.c
        query = sa.select(i.completion, i.arm, i.sampling, i.user_id).where(
            i.experiment == begun.experiment_id, i.created_at > started, i.completion == ""
        )
        with world.database.read() as connection:
            return [*connection.execute(query)]

    settings = told(world.settings, patience_seconds=patience)
    rules = settings.experiments
    enough = math.ceil(rules.trouble_share * rules.trouble_answers)
    with serving(settings, world) as running:
        eventually_in(begun, lambda: world.store.interaction(running.post(user="x").json()["id"]))
        monkeypatch.setattr(Arms, "write", silent)
        running.app.state.is_ending = lambda: ends
        for n in range(enough):
            assert book.history("shop")[0].state == "running"
            body = {"model": "shop", "stream": streams, "user": users[n], **ASKED}
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{running.address}/v1/chat/completions", json=body, timeout=0.5)
            until = time.monotonic() + PATIENCE
            while running.app.state.gateway.under_way or running.app.state.gateway._ending:
                assert time.monotonic() < until
                time.sleep(0.01)
    ended, found = book.history("shop")[0], kept()
    if patience > 1 or ends:
        assert (ended.state, found) == ("running", [])
        book.end(begun, "stopped", "the test is over")
        return
    assert ended.state == "rolled_back"
    assert f"failed at {enough} of its latest" in (ended.reason or "")
    assert {row.user_id for row in found} == {hash_rater("shop", user) for user in users[:enough]}
    for row in found:
        assert row.arm == "challenger"
        assert (row.sampling["left"], row.sampling["fell_back"]) == (True, True)
        assert [event["rule"] for event in row.sampling["events"]] == ["left"]
    assert chat_events.counts(world.database, "shop")["left"] >= enough


def eventually_in(experiment: Experiment, ask: Callable[[], Any]) -> Any:
    """Return the first answer that is part of the experiment: its challenger loads meanwhile."""
    until = time.monotonic() + PATIENCE
    while (found := ask()).experiment != experiment.experiment_id:
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def is_challenged(experiment: Experiment, user: str) -> bool:
    """Say whether a chat's `user` meets the challenger."""
    unit = hash_rater("shop", user)
    return arm_of(experiment.experiment_id, unit, experiment.share) == "challenger"
