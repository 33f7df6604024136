"""Completions from an OpenAI-compatible server (vLLM and the like), streamed through.

Its key comes from the environment and stands in no message. What it answers is checked as far as it
is used: an upstream that says something else is an error, never an empty answer. Taken is what such
servers do beside the rules: choices without a delta (Azure's filter), no [DONE] (llama.cpp and TGI
for years) where a finish_reason has said that the text is whole.

Which of the ledger's versions answers is told by the model's name there (`Served`): a server that
has not loaded a new champion yet is asked for the one before, and each answer is the version's that
gave it.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import httpx
import structlog

from rlhf_pipeline.errors import ModelError, PromptRefused
from rlhf_pipeline.records import Prompt, as_messages
from rlhf_pipeline.reward.remote import bearer_token

if TYPE_CHECKING:
    from rlhf_pipeline.config import UpstreamSettings
    from rlhf_pipeline.registry.ledger import PromotionLedger

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 5.0
LOOK_EVERY_SECONDS = 2.0  # how long a model that an upstream has loaded may go unseen
LONGEST_LINE = 1 << 20  # bytes
MOST_TOKENS = 2**31
COUNTED = ("prompt_tokens", "completion_tokens")
TOO_LONG = re.compile(rb"context[ _](?:length|size|window)", re.IGNORECASE)
"""What a refusal has in it where the conversation is longer than the model's context: OpenAI's and
vLLM's "maximum context length", llama.cpp's "exceed_context_size_error"."""


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
    async with _asked(upstream, "chat/completions", deadline, body) as answer:
        if answer.status_code in (400, 413) and TOO_LONG.search(await _beginning(answer, deadline)):
            raise PromptRefused(
                "messages within the upstream's context are needed, found longer ones; send fewer, "
                "or ask for fewer tokens"
            )
        _need_200(upstream, answer)
        async for line in _lines(answer, deadline):
            if time.monotonic() > deadline:
                raise TimeoutError
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                yield last
                return
            if piece := _read(data, last):
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
    # httpx bounds each wait anew, and not how long they take together: the deadline does.
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    url = f"{upstream.url.rstrip('/')}/{path}"
    method = "GET" if body is None else "POST"
    try:
        async with httpx.AsyncClient(timeout=timeout, verify=_trust(), trust_env=False) as client:
            request = client.build_request(method, url, json=body, headers=_headers(upstream))
            async with asyncio.timeout(deadline - time.monotonic()):
                answer = await client.send(request, stream=True)
            async with aclosing(answer):
                packed = answer.headers.get("content-encoding", "identity")
                if packed != "identity":
                    raise ModelError(
                        f"the upstream at {upstream.url} must answer as it stands, found "
                        f"{packed[:20]!r}; switch compression off there"
                    )
                yield answer
    except httpx.TimeoutException as error:
        raise TimeoutError from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ModelError(
            f"the upstream at {upstream.url} must answer, found {type(error).__name__}; start it "
            "or correct serving.upstreams"
        ) from error


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


def _read(data: bytes, last: dict[str, Any]) -> str:
    """Return one event's text and take its ending into `last`."""
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
        if "\x00" in text:
            raise ValueError("no database keeps NUL")
        text.encode()  # nor half a surrogate pair
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            "the upstream must send chat completion chunks, found something else; check that its "
            "address ends with /v1"
        ) from error
    return text


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


@lru_cache(maxsize=1)
def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # takes 20 ms: once a process
