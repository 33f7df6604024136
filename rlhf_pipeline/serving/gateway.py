"""The one way to a reply: input rules, the champion, output rules, the baseline where that fails.

The API and the chat page both come through here. A reply is stored before its last part is handed
out; a block or a failure is an event in the store (chat_events.py), and where no words have been
shown yet the agent's SFT baseline answers instead. Once words have been shown they cannot be taken
back: a block then cuts the reply, a failure ends it with an error (`guardrails.release: whole`
shows nothing before all is checked). What somebody has seen is stored, also where they stop it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import structlog

from rlhf_pipeline.errors import (
    ChatAway,
    ChatRefused,
    ConfigError,
    PipelineError,
    PromptRefused,
)
from rlhf_pipeline.experiment.watch import STILL_LOADING
from rlhf_pipeline.records import ELSEWHERE, Interaction, Prompt, hashed, now, uuid7
from rlhf_pipeline.serving import chat_events
from rlhf_pipeline.serving.champions import Arm, Champions, Seat
from rlhf_pipeline.serving.guardrails import Blocked, Rail, certain, input_block, output_block
from rlhf_pipeline.serving.tracing import Tracing
from rlhf_pipeline.serving.trials import Trials
from rlhf_pipeline.serving.upstream import Readers, Served, name_of, upstream_pieces

if TYPE_CHECKING:
    from rlhf_pipeline.config import ExperimentSettings, Settings, UpstreamSettings
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.registry.models import ModelRegistry
    from rlhf_pipeline.serving.metrics import Metrics

log = structlog.get_logger(__name__)

LONG_PROMPT = 2_000  # characters; the event loop, which everybody shares, does not wait for longer
COLDEST = 1e-4
"""A temperature below it is 0, the likeliest token: logits divided by next to nothing are infinite,
and so look like those of a damaged model, which would count against it."""
SETTLE_SECONDS = 5.0  # for what was cut off when the service ends to be stored
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
class Reply:
    """A reply that is stored."""

    interaction: Interaction
    ending: Ending
    prompt_tokens: int  # by the length of the texts, where an upstream told none
    completion_tokens: int  # the pieces that came, where an upstream told none
    others: tuple[str, ...] = ()  # further completions of the same prompt, not stored


@dataclass(slots=True)
class _Draft:
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
    of_beside: list[_Draft] = field(default_factory=list)  # what those have read and written
    others: tuple[str, ...] = ()
    broken: Exception | None = None  # what ended it after words had been shown

    def count(self, tokens: int) -> None:
        """Note how many tokens are written so far."""
        self.completion_tokens = tokens


class _Stopped(Exception):
    """An output rule is broken."""

    def __init__(self, blocked: Blocked) -> None:
        super().__init__(blocked.detail)
        self.blocked = blocked


class Gateway:
    """Replies for every agent of one state folder."""

    def __init__(
        self,
        settings: Settings,
        store: FeedbackStore,
        registry: ModelRegistry,
        metrics: Metrics | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.metrics = metrics
        self.champions = Champions(settings, store, registry)
        self.served = Served(registry.ledger)
        self.readers = Readers(self.champions)
        self.trials = Trials(store.database, self.rules_of_trials)
        self.tracing = Tracing(settings, store, registry)
        self.under_way = 0  # requests answered or waiting, as the API admits them
        self._known: set[str] = set()
        self._ending: set[str] = set()  # ids of replies that are being stored
        # Two: one commits while the next prepares. More fight over the interpreter, for which first
        # texts wait, and those that share a commit come back with their next requests together.
        self._enders = ThreadPoolExecutor(2, thread_name_prefix="ending")

    @property
    def waiting(self) -> int:
        """Return how many requests wait for a place in a batch."""
        return sum(decoder.waiting for decoder in self.champions.decoders())

    def agents(self) -> list[str]:
        """Return the agents that can answer: those with a champion or an upstream."""
        return sorted({*self.champions.agents(), *self.settings.serving.upstreams})

    def knows(self, agent_id: str) -> bool:
        """Say whether the agent can answer."""
        if self.champions.ready(agent_id, "champion") or agent_id in self._known:
            return True
        return agent_id in self.agents()

    async def reply(
        self,
        agent_id: str,
        prompt: Prompt,
        wishes: Wishes,
        *,
        arm: Arm = "champion",
        interaction_id: str | None = None,
        session_id: str | None = None,
        user_id: str | None = None,
        network: str | None = None,
        others: int = 0,
        note: Callable[[str, Sequence[str]], Mapping[str, Any]] | None = None,
        at_once: bool = False,
    ) -> AsyncGenerator[str | Reply, None]:
        """Yield the reply piece by piece, and last the stored `Reply`.

        `at_once` says that each piece is shown as it comes. Where it is not, nothing is yielded
        before all of it is checked, so that the baseline can still answer.
        `network` marks where somebody came from whom nothing but a cookie knows; it is kept as a
        mark that no other experiment has, nor, of an answer in none, another agent or month.
        `others` more completions are drawn beside it, in the same batch; those that fail are left
        out. `note` gets the text and them once it is shown, and returns what is to be stored with
        the sampling settings.
        Raises ChatRefused for a prompt that is empty, too long or not readable; ChatAway, or what
        failed first, where neither the arm nor the baseline can answer.
        """
        interaction_id = interaction_id or uuid7()
        began = time.monotonic()
        rules = self.settings.serving.guardrails
        trial, unit = None, user_id or session_id
        if arm == "champion" and unit and agent_id not in self.settings.serving.upstreams:
            trial = await asyncio.to_thread(self.trials.running, agent_id)
            if trial and not self.champions.prepared(agent_id, trial.challenger):
                trial = None  # nobody waits for it to load, and nothing counts until it has
            if trial is not None and self.trials.is_challenged(trial, unit):
                arm = "challenger"
        if network is not None:
            among = trial.experiment_id if trial else f"{agent_id} {now():%Y-%m}"
            network = hashed("network", among, network)[:16]
        arms: list[Arm] = [arm, "baseline"] if arm != "baseline" else ["baseline"]
        trouble: list[dict[str, str]] = []
        untold: list[dict[str, str]] = []  # of it, what is not recorded yet

        def meet(whose: Arm, rule: str, detail: str) -> None:
            trouble.append({"arm": whose, "rule": rule})
            untold.append({**trouble[-1], "detail": detail})

        def tell() -> None:
            while untold:
                self._record(agent_id, interaction_id, **untold.pop(0))

        if blocked := input_block(prompt, rules):
            meet(arm, blocked.rail, blocked.detail)
            if blocked.rail is not Rail.unsafe_request:
                await asyncio.to_thread(tell)
                raise ChatRefused(blocked.rail, blocked.detail)
            arms = ["baseline"]
        first: Exception | None = None
        done: _Draft | None = None
        cut: _Draft | None = None  # blocked after something sound that nobody has seen

        def as_kept(draft: _Draft, took: float, more: Mapping[str, Any]) -> Interaction:
            in_trial: dict[str, Any] = {}
            if trial is not None:
                in_trial = {
                    "challenger_share": trial.share,
                    "ending": draft.ending,
                    "fell_back": draft.arm != arm or first is not None,  # broke off, or was cut off
                }
            return Interaction(
                interaction_id=interaction_id,
                agent_id=agent_id,
                prompt=prompt,
                completion=draft.text,
                model_version=draft.version,
                created_at=now(),
                session_id=session_id,
                user_id=user_id,
                experiment=None if trial is None else trial.experiment_id,
                arm=draft.arm if trial is None else arm,  # a fallback answer stays in its arm
                sampling={
                    **draft.sampling,
                    **in_trial,
                    **({} if network is None else {"network": network}),
                    **({"events": trouble} if trouble else {}),
                    **more,
                },
                latency_seconds=took,
            )

        for whose in arms:
            if untold:
                await asyncio.to_thread(tell)
            draft, shown = _Draft(whose, again=first is not None), 0
            try:
                async with aclosing(
                    self._written(agent_id, prompt, wishes, draft, others, at_once)
                ) as pieces:
                    async for piece in pieces:
                        shown += len(piece)
                        yield piece
                done = draft
                break
            except (asyncio.CancelledError, GeneratorExit):  # who asked has left
                if shown:  # and may vote on what was seen: its id came with the first words
                    draft.text = draft.text[:shown]
                    left = as_kept(draft, time.monotonic() - began, {"left": True})
                    # Not waited for: whoever cancels does so again at every wait.
                    self._finish(interaction_id, partial(self.keep, left))
                raise
            except _Stopped as stop:
                meet(whose, stop.blocked.rail, stop.blocked.detail)
                first = first or ChatAway(f"the reply was blocked: {stop.blocked.rail}")
                if shown:
                    draft.text, draft.ending = draft.text[:shown], "content_filter"
                    done = draft
                    break
                if draft.sound:
                    cut = cut or draft
            except (PipelineError, TimeoutError) as error:
                if isinstance(error, PromptRefused) and first is None:
                    # The request's fault and no arm's: none is given up, nothing counts against it.
                    meet(whose, Rail.prompt_unreadable, str(error))
                    await asyncio.to_thread(tell)
                    raise ChatRefused(Rail.prompt_unreadable, str(error)) from error
                late = isinstance(error, TimeoutError)
                detail = f"nothing within {self.settings.serving.timeout_seconds} s"
                rule = type(error).__name__
                if late:
                    rule = STILL_LOADING if draft.loading else "time_out"
                meet(whose, rule, str(error) or detail)
                failed = ChatAway(detail) if late else error
                first = first or failed
                if shown:  # what was seen is kept, and counts: a vote may be about it
                    draft.text, draft.broken = draft.text[:shown], failed
                    done = draft
                    break
            finally:
                for one in (draft, *draft.of_beside):
                    if one is done or one.completion_tokens:  # else perhaps nothing read the prompt
                        self._count_tokens(agent_id, one)
        last: list[Callable[[], None]] = [tell]
        if trial and unit and arm != "baseline" and arms[0] == arm:  # else a request was unsafe
            fell_back = first is not None
            last.append(
                partial(
                    self.trials.tell, trial, unit, arm=arm, network=network, fell_back=fell_back
                )
            )
        unseen = ""
        if done is None and cut is not None:  # better than nothing
            unseen = cut.text[: cut.sound]
            cut.text, cut.ending, done = unseen, "content_filter", cut
        if done is not None:
            took = time.monotonic() - began
            interaction = as_kept(done, took, note(done.text, done.others) if note else {})
            last.append(partial(self.keep, interaction))
        ending = self._finish(interaction_id, *last)
        await asyncio.wait([ending])  # who leaves meanwhile leaves it alone
        ending.result()
        if done is None:
            assert first is not None
            raise first
        if unseen:
            yield unseen
        if done.broken is not None:
            raise done.broken
        yield Reply(
            interaction, done.ending, done.prompt_tokens, done.completion_tokens, done.others
        )

    def keep(self, interaction: Interaction) -> None:
        """Store an answer that somebody sees, and have it traced where that is asked for."""
        if interaction.agent_id not in self._known:
            self.store.ensure_agent(interaction.agent_id)
            self._known.add(interaction.agent_id)
        self.store.add_interactions([interaction])
        self.tracing.note(interaction)

    async def settled(self) -> None:
        """Return once nothing is under way and what people saw before they left is stored."""
        until = time.monotonic() + SETTLE_SECONDS
        while (self.under_way or self._ending) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Let the models go, and end the logging of traces."""
        self.champions.close()
        self.tracing.close()

    def rules_of_trials(self, agent_id: str) -> ExperimentSettings:
        """Return the rules of the agent's own recipe; where that has gone, the service's."""
        try:
            return self.champions.settings_of(agent_id).experiments
        except ConfigError:  # neither an answer that was written nor a page is lost to it
            return self.settings.experiments

    # -- one arm ----------------------------------------------------------------------------------

    async def _written(
        self,
        agent_id: str,
        prompt: Prompt,
        wishes: Wishes,
        draft: _Draft,
        others: int,
        at_once: bool,
    ) -> AsyncGenerator[str, None]:
        """Yield what the arm writes once it is checked, and fill in the draft.

        Raises _Stopped at an output rule, PipelineError or TimeoutError where the arm fails.
        """
        rules = self.settings.serving.guardrails
        shown = 0
        try:
            async with aclosing(self._raw(agent_id, prompt, wishes, draft, others)) as pieces:
                async for piece in pieces:
                    draft.text += piece
                    sure = certain(draft.text)
                    if len(sure) <= draft.sound:
                        continue
                    blocked = output_block(sure, prompt, rules, whole=False, looked_at=draft.sound)
                    if blocked:
                        raise _Stopped(blocked)
                    draft.sound = len(sure)
                    if at_once and rules.release == "words":
                        yield sure[shown:]
                        shown = len(sure)
            # Where the request's own stop text began it, nothing is the answer that was asked for.
            if blocked := output_block(draft.text, prompt, rules, whole=not draft.stopped):
                raise _Stopped(blocked)
            rest = draft.text[shown:]
            if at_once and rest:
                yield rest
            # An arm that gives one answer but not three gives one: others are a courtesy, which
            # whoever reads along does not wait for.
            found = await asyncio.gather(*draft.beside, return_exceptions=True)
            draft.others = tuple(text for text in found if isinstance(text, str))
            if not at_once and rest:  # shown with them: who leaves before has seen nothing
                yield rest
        finally:
            for task in draft.beside:
                task.cancel()
            await asyncio.gather(*draft.beside, return_exceptions=True)

    async def _raw(
        self, agent_id: str, prompt: Prompt, wishes: Wishes, draft: _Draft, others: int
    ) -> AsyncGenerator[str, None]:
        deadline = time.monotonic() + self.settings.serving.timeout_seconds
        upstream = self.settings.serving.upstreams.get(agent_id)
        if upstream is not None and draft.arm == "champion":
            source = self._from_upstream(
                agent_id, upstream, prompt, wishes, draft, deadline, others
            )
        else:
            source = self._from_model(agent_id, prompt, wishes, draft, deadline, others)
        async with aclosing(source) as pieces:
            async for piece in pieces:
                yield piece

    async def _from_model(
        self,
        agent_id: str,
        prompt: Prompt,
        wishes: Wishes,
        draft: _Draft,
        deadline: float,
        others: int,
    ) -> AsyncGenerator[str, None]:
        seat = await self._seat(agent_id, draft, deadline)
        from rlhf_pipeline.serving.batching import Sampling

        limits = seat.limits
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
        draft.of_beside = [_Draft(draft.arm, prompt_tokens=len(ids)) for _ in range(others)]
        draft.beside = [
            asyncio.ensure_future(
                _whole(
                    seat.decoder.pieces(
                        ids,
                        replace(sampling, seed=seed + 1 + n),
                        deadline=deadline,
                        count=other.count,
                    )
                )
            )
            for n, other in enumerate(draft.of_beside)
        ]
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

    async def _seat(self, agent_id: str, draft: _Draft, deadline: float) -> Seat:
        """Return the loaded model of the arm; the first request for it waits while it loads."""
        seat = self.champions.ready(agent_id, draft.arm)
        if seat is None or seat.decoder.retired:
            draft.loading = True
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                seat = await self.champions.seat(agent_id, draft.arm)
        return seat

    async def _from_upstream(
        self,
        agent_id: str,
        upstream: UpstreamSettings,
        prompt: Prompt,
        wishes: Wishes,
        draft: _Draft,
        deadline: float,
        others: int,
    ) -> AsyncGenerator[str, None]:
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
        draft.of_beside = [
            _Draft(draft.arm, prompt_tokens=draft.prompt_tokens) for _ in range(others)
        ]

        def asked_for(into: _Draft, seed: Mapping[str, int]) -> AsyncGenerator[str, None]:
            more = {**settings, **seed}
            return _noted(upstream_pieces(upstream, prompt, more, deadline=deadline), into)

        draft.beside = [
            asyncio.ensure_future(
                _whole(
                    asked_for(other, {} if wishes.seed is None else {"seed": wishes.seed + 1 + n})
                )
            )
            for n, other in enumerate(draft.of_beside)
        ]
        async with aclosing(asked_for(draft, {})) as pieces:
            async for piece in pieces:
                yield piece
        draft.stopped = bool(wishes.stop) and draft.ending == "stop"  # few tell which stop it was

    # -- the store --------------------------------------------------------------------------------

    def _finish(self, interaction_id: str, *jobs: Callable[[], None]) -> asyncio.Future[None]:
        """Begin what ends a reply, in a thread; who asked may leave, the service waits for it."""

        def finish() -> None:
            try:
                for job in jobs:
                    job()
            except Exception:  # perhaps nobody waits for it
                log.exception("reply not stored", interaction=interaction_id)
                raise
            finally:
                self._ending.discard(interaction_id)

        self._ending.add(interaction_id)
        return asyncio.get_running_loop().run_in_executor(self._enders, finish)

    def _count_tokens(self, agent_id: str, draft: _Draft) -> None:
        """Count what an arm read and wrote, whatever became of it: the upstream's bill has it."""
        if self.metrics is not None:
            self.metrics.count_tokens(agent_id, "prompt", draft.prompt_tokens)
            self.metrics.count_tokens(agent_id, "completion", draft.completion_tokens)

    def _record(self, agent_id: str, interaction_id: str, **event: str) -> None:
        """Record a block or a failure; a store that cannot be written costs no answer."""
        if self.metrics is not None:
            self.metrics.count_chat_event(event["rule"])
        log.warning("chat event", agent=agent_id, interaction=interaction_id, **event)
        try:
            chat_events.record(
                self.store.database, agent_id, interaction_id=interaction_id, **event
            )
        except Exception:  # the answer goes on; the log above has it
            log.exception("chat event not stored", interaction=interaction_id)


async def _noted(
    pieces: AsyncGenerator[str | dict[str, Any], None], draft: _Draft
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
