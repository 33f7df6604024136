"""Completions from an OpenAI-compatible server (vLLM and the like), streamed through.

Its key comes from the environment and stands in no message. What it answers is checked as far as it
is used: an upstream that says something else is an error, never an empty answer. Taken is what such
servers do beside the rules: choices without a delta (Azure's filter), no [DONE] (llama.cpp and TGI
for years) where a finish_reason has said that the text is whole.

Which of the ledger's versions answers is told by the model's name there (`Served`): a server that
has not loaded a new champion yet is asked for the one before, and each answer is the version's that
gave it. What that version reads there is what it would read here (`Readers`).
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import lru_cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import httpx
import structlog

from rlhf_pipeline.errors import HashMismatch, ModelError, PromptRefused
from rlhf_pipeline.files import file_sha256
from rlhf_pipeline.records import Prompt, as_messages
from rlhf_pipeline.reward.remote import bearer_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_pipeline.config import UpstreamSettings
    from rlhf_pipeline.registry.ledger import PromotionLedger
    from rlhf_pipeline.serving.champions import Champions

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 5.0
KEPT_SECONDS = 30.0  # a connection that nobody uses
END_SECONDS = 0.05  # for the end of an answer, once all that is said in it has come
LOOK_EVERY_SECONDS = 2.0  # how long a model that an upstream has loaded may go unseen
LONGEST_LINE = 1 << 20  # bytes
MOST_TOKENS = 2**31
WEIGHTS = ".safetensors"
BROKEN_OFF = ("abort", "error")  # finish reasons of what is not whole
COUNTED = ("prompt_tokens", "completion_tokens")
TOO_LONG = re.compile(rb"context[ _](?:length|size|window)", re.IGNORECASE)
"""What a refusal has in it where the conversation is longer than the model's context: OpenAI's and
vLLM's "maximum context length", llama.cpp's "exceed_context_size_error"."""


_kept: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


@asynccontextmanager
async def connections_kept() -> AsyncGenerator[None, None]:
    """Within it, what this event loop asks of upstreams leaves its connections to what comes next.

    To connect anew takes two round trips where TLS is spoken, and milliseconds of the loop's time.
    """
    loop = asyncio.get_running_loop()
    async with _client() as client:
        _kept[loop] = client
        try:
            yield
        finally:
            del _kept[loop]


async def upstream_pieces(
    upstream: UpstreamSettings, prompt: Prompt, settings: dict[str, Any], *, deadline: float
) -> AsyncGenerator[str | dict[str, Any], None]:
    """Yield the completion's text piece by piece, and last {finish_reason, usage}.

    An upstream that tells its usage as it writes has it yielded so too, after each piece.
    `settings` are the request's own (temperature, max_tokens, ...), handed on as they are.
    Raises ModelError where the upstream fails, PromptRefused where the messages are longer than its
    context, TimeoutError at the deadline (time.monotonic()).
    """
    body = {
        **settings,
        "model": upstream.model,
        "messages": as_messages(prompt),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last: dict[str, Any] = {"finish_reason": None, "usage": None}
    strange = False
    async with _asked(upstream, "chat/completions", deadline, body) as answer:
        lines = _lines(answer, deadline)
        if answer.status_code in (400, 413) and TOO_LONG.search(await _beginning(answer, deadline)):
            raise PromptRefused(
                "messages within the upstream's context are needed, found longer ones; send fewer, "
                "or ask for fewer tokens"
            )
        _need_200(upstream, answer)
        async for line in lines:
            if time.monotonic() > deadline:
                raise TimeoutError
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if not data:  # an event of no data is nobody's (WHATWG HTML, 9.2.6)
                continue
            if data == b"[DONE]":
                # Some tell of a failure in words of their own, and end as if all were well.
                if strange and last["finish_reason"] is None:
                    raise ModelError(
                        f"the upstream at {upstream.url} must end with a finish_reason, found none "
                        "and an event that is no chunk of a completion; look at its log"
                    )
                yield last
                with suppress(TimeoutError, ModelError, httpx.HTTPError):  # the answer is whole
                    async with asyncio.timeout(END_SECONDS):
                        async for _ in lines:  # a connection is used again once it is read empty
                            pass
                return
            piece = _read(data, last)
            strange = strange or piece is None
            if piece:
                yield piece
            if last["usage"] is not None and last["finish_reason"] is None:
                yield dict(last)
    if last["finish_reason"] is None:
        raise ModelError(f"the upstream at {upstream.url} must end with [DONE], found it cut off")
    yield last


class Served:
    """Which of an agent's champions its upstream serves, looked at every LOOK_EVERY_SECONDS."""

    def __init__(self, ledger: PromotionLedger) -> None:
        self._ledger = ledger
        self._seen: dict[str, tuple[float, int, int]] = {}  # by agent: when, champion, served

    async def version(self, agent_id: str, upstream: UpstreamSettings, deadline: float) -> int:
        """Return the newest of the line of champions that the upstream has by its name.

        Raises ModelError where it has none of them, or cannot say; TimeoutError at the deadline.
        """
        seen = self._seen.get(agent_id)
        if seen is not None and time.monotonic() - seen[0] < LOOK_EVERY_SECONDS:
            return seen[2]
        line = await asyncio.to_thread(self._ledger.champions, agent_id)
        served = await _newest_served(upstream, line, deadline)
        if (line[-1], served) != (seen and seen[1:]) and served != line[-1]:
            log.warning(
                "upstream serves an older champion",
                agent=agent_id,
                champion=line[-1],
                serves=served,
            )
        self._seen[agent_id] = (time.monotonic(), line[-1], served)
        return served


class Readers:
    """By agent, the tokenizer of the version that its upstream serves, loaded without the model.

    With it messages are made what the version reads in training and where it is served here.
    """

    def __init__(self, champions: Champions) -> None:
        self._champions = champions
        self._one_at_a_time = threading.Lock()
        self._loaded: dict[str, tuple[int, tuple[PreTrainedTokenizerBase, int] | None]] = {}

    def as_read(self, agent_id: str, version: int, prompt: Prompt) -> Prompt:
        """Return the messages to send, as they are where the ledger has no such version.

        The first call for a version loads its tokenizer, which takes seconds. Raises HashMismatch
        where that is not the registered one, PromptRefused where the version's template refuses.
        """
        from rlhf_pipeline.policy.chat import messages_within

        with self._one_at_a_time:  # neither loading nor a tokenizer is made for several threads
            number, reader = self._loaded.get(agent_id, (None, None))
            if number != version:
                reader = self._load(agent_id, version)
                self._loaded[agent_id] = version, reader
            if reader is None:
                return prompt
            tokenizer, most = reader
            return messages_within(tokenizer, prompt, max_tokens=most)

    def _load(self, agent_id: str, number: int) -> tuple[PreTrainedTokenizerBase, int] | None:
        from rlhf_pipeline.policy.loading import load_tokenizer

        registry = self._champions.registry
        known = {version.version: version for version in registry.ledger.versions(agent_id)}
        if number not in known:
            return None
        version = known[number]
        folder = version.path if version.path.is_dir() else registry.folder_of(version)
        # Weights are gigabytes, and nothing is read of them here.
        for name in (name for name in version.files if not name.endswith(WEIGHTS)):
            path = folder / name
            if not path.is_file() or file_sha256(path) != version.files[name]:
                raise HashMismatch(
                    f"version {number} of {agent_id} needs the tokenizer it was registered with, "
                    f"found {path} changed or missing; restore it from a backup"
                )
        return load_tokenizer(folder), self._champions.limits(agent_id).max_prompt_tokens


async def _newest_served(upstream: UpstreamSettings, line: Sequence[int], deadline: float) -> int:
    async with _asked(upstream, "models", deadline) as answer:
        _need_200(upstream, answer)
        try:
            names = {one["id"] for one in json.loads(await _beginning(answer, deadline))["data"]}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelError(
                f"the upstream at {upstream.url} must list its models at /models, found something "
                "else; check that its address ends with /v1"
            ) from error
    for version in reversed(line):
        if name_of(upstream, version) in names:
            return version
    wanted = name_of(upstream, line[-1]) if line else "any champion, of which there is none yet"
    raise ModelError(
        f"the upstream at {upstream.url} must serve {wanted}, or a champion before it; load it "
        "there (docs/serving.md says how)"
    )


def name_of(upstream: UpstreamSettings, version: int) -> str:
    """Return the name by which the upstream has a version of the ledger's."""
    return upstream.model.replace("{version}", str(version))


def _need_200(upstream: UpstreamSettings, answer: httpx.Response) -> None:
    if answer.status_code != 200:
        raise ModelError(
            f"the upstream at {upstream.url} must answer 200, found {answer.status_code}; look at "
            "its log"
        )


@asynccontextmanager
async def _asked(
    upstream: UpstreamSettings, path: str, deadline: float, body: dict[str, Any] | None = None
) -> AsyncGenerator[httpx.Response, None]:
    """Give the upstream's answer once its headers have come, and close it.

    Raises ModelError where it cannot be asked or breaks off, TimeoutError at the deadline.
    """
    kept = _kept.get(asyncio.get_running_loop())
    begun = False
    try:
        async with AsyncExitStack() as opened:
            answer = await _sent(kept, upstream, path, deadline, body) if kept else None
            if answer is None:
                client = await opened.enter_async_context(_client())
                answer = await _sent(client, upstream, path, deadline, body)
                assert answer is not None  # none is kept there
            await opened.enter_async_context(aclosing(answer))
            packed = answer.headers.get("content-encoding", "identity")
            if packed != "identity":
                raise ModelError(
                    f"the upstream at {upstream.url} must answer as it stands, found "
                    f"{packed[:20]!r}; switch compression off there"
                )
            begun = True
            yield answer
    except httpx.ConnectTimeout as error:
        raise ModelError(
            f"the upstream at {upstream.url} must take a connection within {CONNECT_SECONDS} s, "
            "found none; start it or correct serving.upstreams"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        if begun:
            raise ModelError(
                f"the upstream at {upstream.url} must send all of its answer, found it cut off "
                f"({type(error).__name__}); look at its log"
            ) from error
        raise ModelError(
            f"the upstream at {upstream.url} must answer, found {type(error).__name__}; start it "
            "or correct serving.upstreams"
        ) from error


async def _sent(
    client: httpx.AsyncClient,
    upstream: UpstreamSettings,
    path: str,
    deadline: float,
    body: dict[str, Any] | None,
) -> httpx.Response | None:
    """Return the answer's head; None where a connection that was kept turns out to be closed.

    The upstream may close it at the moment in which it is used again. That is no failure, and says
    nothing about the request, which need only be sent once more.
    """
    begins = False  # a connection

    async def notice(event: str, _: Any) -> None:
        nonlocal begins
        begins = begins or event == "connection.connect_tcp.started"

    request = client.build_request(
        "GET" if body is None else "POST",
        f"{upstream.url.rstrip('/')}/{path}",
        json=body,
        headers=_headers(upstream),
        extensions={"trace": notice},
    )
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await client.send(request, stream=True)
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        if begins:
            raise
        return None


async def _beginning(answer: httpx.Response, deadline: float) -> bytes:
    """Return the first LONGEST_LINE bytes of an answer, or less."""
    found = b""
    async for some in _chunks(answer, deadline):
        found += some
        if len(found) >= LONGEST_LINE:
            break
    return found


async def _lines(answer: httpx.Response, deadline: float) -> AsyncGenerator[bytes, None]:
    """Yield the answer's whole lines; texts may hold what is a line's end elsewhere (U+2028)."""
    rest = b""
    async for some in _chunks(answer, deadline):
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LONGEST_LINE:
            raise ModelError(f"the upstream must send lines of at most {LONGEST_LINE} bytes")
    yield rest


async def _chunks(answer: httpx.Response, deadline: float) -> AsyncGenerator[bytes, None]:
    """Yield the answer's bytes as they come. Raises TimeoutError at the deadline."""
    chunks = answer.aiter_raw()
    while True:
        # Around each wait alone: whoever reads this may take the next piece in another task.
        async with asyncio.timeout(deadline - time.monotonic()):
            some = await anext(chunks, None)
        if some is None:
            return
        yield some


def _read(data: bytes, last: dict[str, Any]) -> str | None:
    """Return one event's text and take its ending into `last`; None where it is no chunk."""
    try:
        event = json.loads(data)
        if event.get("error") is not None:
            raise ModelError("the upstream failed while it wrote; look at its log")
        if usage := event.get("usage"):
            last["usage"] = {name: _count(usage.get(name)) for name in COUNTED}
        text = ""
        for choice in event.get("choices") or ():
            text += (choice.get("delta") or {}).get("content") or ""
            last["finish_reason"] = choice.get("finish_reason") or last["finish_reason"]
            if last["finish_reason"] in BROKEN_OFF:
                raise ModelError("the upstream broke off while it wrote; look at its log")
        if "\x00" in text:
            raise ValueError("no database keeps NUL")
        text.encode()  # nor half a surrogate pair
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            "the upstream must send chat completion chunks, found something else; check that its "
            "address ends with /v1"
        ) from error
    return text if "choices" in event or "usage" in event else None


def _count(told: Any) -> int:
    """Return a number of tokens; none told is 0. Raises ValueError for what is none."""
    if told is None:
        return 0
    if isinstance(told, bool) or not isinstance(told, int) or not 0 <= told <= MOST_TOKENS:
        raise ValueError(f"needed 0 to {MOST_TOKENS} tokens, found {told!r:.40}")
    return told


def _headers(upstream: UpstreamSettings) -> dict[str, str]:
    # A kilobyte that is packed may come out as a gigabyte, in one piece.
    asked = {"accept-encoding": "identity"}
    token = bearer_token(
        upstream.key_variable,
        f"the upstream at {upstream.url}",
        "set it where the service starts",
    )
    return asked if token is None else {**asked, "authorization": f"Bearer {token}"}


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        # httpx bounds each wait anew, and not how long they take together: the deadline does.
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(keepalive_expiry=KEPT_SECONDS),  # and nobody waits for a connection
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # they are another request's
        verify=_trust(),
        trust_env=False,
    )


@lru_cache(maxsize=1)
def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # takes 20 ms: once a process
