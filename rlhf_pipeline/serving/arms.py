"""What one arm writes to a request: a model that is loaded here, or a server elsewhere.

No rule is looked at here: gateway.py asks the arms in turn and checks what they write.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rlhf_pipeline.records import ELSEWHERE, Prompt
from rlhf_pipeline.serving.champions import Arm, Champions, Seat
from rlhf_pipeline.serving.guardrails import certain
from rlhf_pipeline.serving.upstream import Readers, Served, name_of, upstream_pieces

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings, UpstreamSettings

LONG_PROMPT = 2_000  # characters; the event loop, which everybody shares, does not wait for longer
COLDEST = 1e-4
"""A temperature below it is 0, the likeliest token: logits divided by next to nothing are infinite,
and so look like those of a damaged model, which would count against it."""
BYTES_OF_TOKEN = 4  # of a prompt, about, where nobody tells how many tokens it has

Ending = Literal["stop", "length", "content_filter"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request asks of the sampling; None is as the agent's settings say."""

    max_completion_tokens: int | None = None
    # What the request calls that. An upstream is told so: OpenAI's reasoning models refuse the old
    # name, and servers older than the new one pass it over.
    limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What an arm is asked."""

    agent_id: str
    prompt: Prompt
    wishes: Wishes
    others: int = 0  # further completions, drawn beside it in the same batch


@dataclass(slots=True)
class Draft:
    """What an arm has written, and how."""

    arm: Arm
    again: bool = False  # the first arm was blocked or failed
    loading: bool = False  # when it was asked: what it has no time for then is not its fault
    version: int = ELSEWHERE
    text: str = ""
    sound: int = 0  # characters at its beginning that break no rule
    ending: Ending = "stop"
    stopped: bool = False  # by a stop text of the request's, as far as is known
    prompt_tokens: int = 0
    completion_tokens: int = 0  # so far: a rule may end it before a total is told
    sampling: dict[str, Any] = field(default_factory=dict)
    beside: list[asyncio.Future[str]] = field(default_factory=list)  # others under way
    of_beside: list[Draft] = field(default_factory=list)  # what those have read and written
    others: tuple[str, ...] = ()
    broken: Exception | None = None  # what ended it after words had been shown

    def count(self, tokens: int) -> None:
        """Note how many tokens are written so far."""
        self.completion_tokens = tokens

    def draw_beside(
        self, others: int, write: Callable[[int, Draft], AsyncGenerator[Any, None]]
    ) -> None:
        """Begin `others` further completions; `write(nth, into)` writes the nth, from 1 on."""
        self.of_beside = [Draft(self.arm, prompt_tokens=self.prompt_tokens) for _ in range(others)]
        self.beside = [
            asyncio.ensure_future(_whole(write(nth, other)))
            for nth, other in enumerate(self.of_beside, start=1)
        ]


class Arms:
    """The arms of every agent of one state folder."""

    def __init__(self, settings: Settings, champions: Champions, served: Served) -> None:
        self.settings = settings
        self.champions = champions
        self.served = served
        self.readers = Readers(champions)

    async def write(self, request: Request, draft: Draft) -> AsyncGenerator[str, None]:
        """Yield what the draft's arm writes as it comes, and note in the draft how.

        Raises PipelineError or TimeoutError where the arm fails.
        """
        deadline = time.monotonic() + self.settings.serving.timeout_seconds
        upstream = self.settings.serving.upstreams.get(request.agent_id)
        if upstream is not None and draft.arm == "champion":
            source = self._from_upstream(request, upstream, draft, deadline)
        else:
            source = self._from_model(request, draft, deadline)
        async with aclosing(source) as pieces:
            async for piece in pieces:
                yield piece

    async def _from_model(
        self, request: Request, draft: Draft, deadline: float
    ) -> AsyncGenerator[str, None]:
        seat = await self._seat(request.agent_id, draft, deadline)
        from rlhf_pipeline.serving.batching import Sampling

        prompt, wishes, limits = request.prompt, request.wishes, seat.limits
        asked = wishes.max_completion_tokens or limits.max_completion_tokens
        seed = random.SystemRandom().randrange(2**31) if wishes.seed is None else wishes.seed
        seed += draft.again  # where both arms are one version it must not write the same again
        temperature = limits.temperature if wishes.temperature is None else wishes.temperature
        sampling = Sampling(
            max_completion_tokens=min(asked, limits.max_completion_tokens),
            max_prompt_tokens=limits.max_prompt_tokens,
            temperature=temperature if temperature >= COLDEST else 0.0,
            top_p=1.0 if wishes.top_p is None else wishes.top_p,
            seed=seed,
            stop=wishes.stop,
        )
        if sum(len(message.content) for message in prompt) > LONG_PROMPT:
            ids = await asyncio.to_thread(seat.decoder.prompt_ids, prompt, sampling)
        else:
            ids = seat.decoder.prompt_ids(prompt, sampling)
        draft.version, draft.prompt_tokens = seat.version.version, len(ids)
        draft.sampling = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "max_completion_tokens": sampling.max_completion_tokens,
            "model_sha256": seat.digest,
        }

        def another(nth: int, into: Draft) -> AsyncGenerator[Any, None]:
            other = replace(sampling, seed=seed + nth)
            return seat.decoder.pieces(ids, other, deadline=deadline, count=into.count)

        draft.draw_beside(request.others, another)
        async with aclosing(
            seat.decoder.pieces(
                ids, sampling, deadline=deadline, certain=certain, count=draft.count
            )
        ) as pieces:
            async for piece in pieces:
                if isinstance(piece, str):
                    yield piece
                else:
                    draft.completion_tokens = piece.tokens
                    draft.ending = "stop" if piece.finished else "length"
                    draft.stopped = piece.stopped

    async def _seat(self, agent_id: str, draft: Draft, deadline: float) -> Seat:
        """Return the loaded model of the arm; the first request for it waits while it loads."""
        seat = self.champions.ready(agent_id, draft.arm)
        if seat is None or seat.decoder.retired:
            draft.loading = True
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                seat = await self.champions.seat(agent_id, draft.arm)
        return seat

    async def _from_upstream(
        self, request: Request, upstream: UpstreamSettings, draft: Draft, deadline: float
    ) -> AsyncGenerator[str, None]:
        agent_id, prompt, wishes = request.agent_id, request.prompt, request.wishes
        asked = {
            wishes.limit_name: wishes.max_completion_tokens,
            "temperature": wishes.temperature,
            "top_p": wishes.top_p,
            "seed": wishes.seed,
            "stop": list(wishes.stop) or None,
        }
        settings = {name: value for name, value in asked.items() if value is not None}
        draft.version = ELSEWHERE if upstream.version is None else upstream.version
        if "{version}" in upstream.model:
            draft.version = await self.served.version(agent_id, upstream, deadline)
            name = name_of(upstream, draft.version)
            upstream = upstream.model_copy(update={"model": name})
        if draft.version != ELSEWHERE:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                prompt = await asyncio.to_thread(
                    self.readers.as_read, agent_id, draft.version, prompt
                )
        draft.sampling = {**settings, "upstream": upstream.model}
        size = sum(len(message.content.encode()) for message in prompt)
        draft.prompt_tokens = math.ceil(size / BYTES_OF_TOKEN)  # most tell it last, if at all

        def asked_for(nth: int, into: Draft) -> AsyncGenerator[str, None]:
            seed = {} if wishes.seed is None else {"seed": wishes.seed + nth}
            more = {**settings, **seed}
            return _noted(upstream_pieces(upstream, prompt, more, deadline=deadline), into)

        draft.draw_beside(request.others, asked_for)
        async with aclosing(asked_for(0, draft)) as pieces:
            async for piece in pieces:
                yield piece
        draft.stopped = bool(wishes.stop) and draft.ending == "stop"  # few tell which stop it was


async def _noted(
    pieces: AsyncGenerator[str | dict[str, Any], None], draft: Draft
) -> AsyncGenerator[str, None]:
    """Yield an upstream's texts, and note in the draft its tokens and how it ends."""
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, str):
                draft.completion_tokens += 1  # a delta is about a token
                yield piece
                continue
            usage = piece["usage"] or {}
            draft.prompt_tokens = int(usage.get("prompt_tokens") or draft.prompt_tokens)
            told = usage.get("completion_tokens")
            draft.completion_tokens = int(told or draft.completion_tokens)
            reason = piece["finish_reason"]
            draft.ending = reason if reason in ("length", "content_filter") else "stop"


async def _whole(written: AsyncGenerator[Any, None]) -> str:
    """Return a completion's whole text."""
    text = ""
    async with aclosing(written) as pieces:
        async for piece in pieces:
            text += piece if isinstance(piece, str) else ""
    return text
