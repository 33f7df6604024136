"""The one way to a reply: input rules, the champion, output rules, the baseline where that fails.

The API and the chat page both come through here. A reply is stored before its last part is handed
out; a block or a failure is an event in the store (chat_events.py), and where no words have been
shown yet the agent's SFT baseline answers instead. Once words have been shown they cannot be taken
back: a block then cuts the reply, a failure ends it with an error (`guardrails.release: whole`
shows nothing before all is checked). What somebody has seen is stored, also where they stop it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from rlhf_pipeline.errors import (
    ChatAway,
    ChatRefused,
    ConfigError,
    PipelineError,
    PromptRefused,
    RegistryAway,
)
from rlhf_pipeline.experiment.watch import NOT_ITS_FAULT, STILL_LOADING
from rlhf_pipeline.records import Interaction, Prompt, hashed, now, uuid7
from rlhf_pipeline.serving import chat_events
from rlhf_pipeline.serving.arms import Arms, Draft, Ending, Request, Wishes
from rlhf_pipeline.serving.champions import Arm, Champions
from rlhf_pipeline.serving.guardrails import Blocked, Rail, certain, input_block, output_block
from rlhf_pipeline.serving.tracing import Tracing
from rlhf_pipeline.serving.trials import Trials
from rlhf_pipeline.serving.upstream import Served

if TYPE_CHECKING:
    from rlhf_pipeline.config import ExperimentSettings, Settings
    from rlhf_pipeline.experiment.book import Experiment
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.registry.models import ModelRegistry
    from rlhf_pipeline.serving.metrics import Metrics

log = structlog.get_logger(__name__)

LEFT = "left"  # the rule where nobody waited any longer
SETTLE_SECONDS = 5.0  # for what was cut off when the service ends to be stored


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that is stored."""

    interaction: Interaction
    ending: Ending
    prompt_tokens: int  # by the length of the texts, where an upstream told none
    completion_tokens: int  # the pieces that came, where an upstream told none
    others: tuple[str, ...] = ()  # further completions of the same prompt, not stored


@dataclass(slots=True)
class _Exchange:
    """A request under way: where it counts, and what has gone wrong with it so far."""

    request: Request
    interaction_id: str
    session_id: str | None
    user_id: str | None
    network: str | None
    arm: Arm
    trial: Experiment | None = None
    began: float = field(default_factory=time.monotonic)
    trouble: list[dict[str, str]] = field(default_factory=list)
    untold: list[dict[str, str]] = field(default_factory=list)  # of it, what is not recorded yet
    first: Exception | None = None  # what failed or was blocked first, an unsafe request not among

    @property
    def unit(self) -> str | None:
        """Return whom an experiment counts: the person, or the conversation of an unknown one."""
        return self.user_id or self.session_id

    def meet(self, whose: Arm, rule: str, detail: str) -> None:
        """Note a block or a failure."""
        self.trouble.append({"arm": whose, "rule": rule})
        self.untold.append({**self.trouble[-1], "detail": detail})

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.began

    def as_kept(self, draft: Draft, seconds: float, **more: Any) -> Interaction:
        """Return the answer as it is stored, with `more` beside its sampling settings.

        `seconds` is how long whoever asked has waited for all of it.
        """
        in_trial: dict[str, Any] = {}
        if self.trial is not None:
            in_trial = {
                "challenger_share": self.trial.share,
                "ending": draft.ending,
                # broke off, or was cut off
                "fell_back": draft.arm != self.arm or self.first is not None,
            }
        return Interaction(
            interaction_id=self.interaction_id,
            agent_id=self.request.agent_id,
            prompt=self.request.prompt,
            completion=draft.text,
            model_version=draft.version,
            created_at=now(),
            session_id=self.session_id,
            user_id=self.user_id,
            experiment=None if self.trial is None else self.trial.experiment_id,
            # a fallback answer stays in its arm
            arm=draft.arm if self.trial is None else self.arm,
            sampling={
                **draft.sampling,
                **in_trial,
                **({} if self.network is None else {"network": self.network}),
                **({"events": self.trouble} if self.trouble else {}),
                **more,
            },
            latency_seconds=seconds,
        )


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
        is_ending: Callable[[], bool] = lambda: False,  # whether the service was asked to stop
    ) -> None:
        self.settings = settings
        self.is_ending = is_ending
        self.store = store
        self.metrics = metrics
        self.champions = Champions(settings, store, registry)
        self.arms = Arms(settings, self.champions, Served(registry.ledger))
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
        rules = self.settings.serving.guardrails
        request = Request(agent_id, prompt, wishes, others)
        exchange = await self._entered(
            _Exchange(request, interaction_id or uuid7(), session_id, user_id, network, arm)
        )
        arm = exchange.arm
        arms: list[Arm] = [arm, "baseline"] if arm != "baseline" else ["baseline"]
        if blocked := input_block(prompt, rules):
            exchange.meet(arm, blocked.rail, blocked.detail)
            if blocked.rail is not Rail.unsafe_request:
                await asyncio.to_thread(self._tell, exchange)
                raise ChatRefused(blocked.rail, blocked.detail)
            arms = ["baseline"]
        last = [partial(self._tell, exchange)]
        if arms[0] == arm:  # else the request was unsafe
            last.append(partial(self._count_in_trial, exchange))
        done: Draft | None = None
        cut: Draft | None = None  # blocked after something sound that nobody has seen
        for whose in arms:
            if exchange.untold:
                await asyncio.to_thread(self._tell, exchange)
            draft, shown = Draft(whose, again=exchange.first is not None), 0
            try:
                async with aclosing(self._checked(request, draft, at_once=at_once)) as pieces:
                    async for piece in pieces:
                        shown += len(piece)
                        yield piece
                done = draft
                break
            except (asyncio.CancelledError, GeneratorExit):  # who asked has left
                self._leave(exchange, draft, shown, last)
                raise
            except _Stopped as stop:
                exchange.meet(whose, stop.blocked.rail, stop.blocked.detail)
                exchange.first = exchange.first or ChatAway(
                    f"the reply was blocked: {stop.blocked.rail}"
                )
                if shown:
                    draft.text, draft.ending = draft.text[:shown], "content_filter"
                    done = draft
                    break
                if draft.sound:
                    cut = cut or draft
            except (PipelineError, TimeoutError) as error:
                if isinstance(error, PromptRefused) and exchange.first is None:
                    # The request's fault and no arm's: none is given up, nothing counts against it.
                    exchange.meet(whose, Rail.prompt_unreadable, str(error))
                    await asyncio.to_thread(self._tell, exchange)
                    raise ChatRefused(Rail.prompt_unreadable, str(error)) from error
                failed = self._failed(exchange, draft, error)
                if shown:  # what was seen is kept, and counts: a vote may be about it
                    draft.text, draft.broken = draft.text[:shown], failed
                    done = draft
                    break
            finally:
                for one in (draft, *draft.of_beside):
                    if one is done or one.completion_tokens:  # else perhaps nothing read the prompt
                        self._count_tokens(agent_id, one)
        unseen = ""
        if done is None and cut is not None:  # better than nothing
            unseen = cut.text[: cut.sound]
            cut.text, cut.ending, done = unseen, "content_filter", cut
        if done is None:
            await self._finished(exchange, *last)
            assert exchange.first is not None
            raise exchange.first
        seconds = exchange.seconds  # a note may ask a judge, for which nobody waits
        noted = note(done.text, done.others) if note else {}
        interaction = exchange.as_kept(done, seconds, **noted)
        await self._finished(exchange, *last, partial(self.keep, interaction))
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

    # -- one request ------------------------------------------------------------------------------

    async def _entered(self, exchange: _Exchange) -> _Exchange:
        """Return it with the experiment that it is part of, and its arm there."""
        agent_id, unit = exchange.request.agent_id, exchange.unit
        trial = None
        if exchange.arm == "champion" and unit and agent_id not in self.settings.serving.upstreams:
            trial = await asyncio.to_thread(self.trials.running, agent_id)
            if trial and not self.champions.prepared(agent_id, trial.champion, trial.challenger):
                await self._stopped_if_unfit(trial)
                trial = None  # nobody waits for them to load, and nothing counts until they have
            if trial is not None and self.trials.is_challenged(trial, unit):
                exchange.arm = "challenger"
        exchange.trial = trial
        if exchange.network is not None:
            among = trial.experiment_id if trial else f"{agent_id} {now():%Y-%m}"
            exchange.network = hashed("network", among, exchange.network)[:16]
        return exchange

    async def _stopped_if_unfit(self, trial: Experiment) -> None:
        """Stop an experiment whose challenger cannot be loaded where its champion answers.

        Not where MLflow's copy is only away: it is tried again, and nobody meets it meanwhile.
        """
        why = self.champions.why_unfit(trial.agent_id, trial.challenger)
        champion = self.champions.ready(trial.agent_id, "champion")
        if champion is not None and why is not None and not isinstance(why, RegistryAway):
            reason = f"the challenger could not be loaded: {why}"
            await asyncio.to_thread(self.trials.stop, trial, reason)

    async def _checked(
        self, request: Request, draft: Draft, *, at_once: bool
    ) -> AsyncGenerator[str, None]:
        """Yield what the arm writes once it is checked, and fill in the draft.

        Raises _Stopped at an output rule, PipelineError or TimeoutError where the arm fails.
        """
        rules = self.settings.serving.guardrails
        shown = 0
        try:
            async with aclosing(self.arms.write(request, draft)) as pieces:
                async for piece in pieces:
                    draft.text += piece
                    sure = certain(draft.text)
                    if len(sure) <= draft.sound:
                        continue
                    blocked = output_block(
                        sure, request.prompt, rules, whole=False, looked_at=draft.sound
                    )
                    if blocked:
                        raise _Stopped(blocked)
                    if not sure.strip():  # nothing else may come: then it is empty, and not shown
                        continue
                    draft.sound = len(sure)
                    if at_once and rules.release == "words":
                        yield sure[shown:]
                        shown = len(sure)
            # Where the request's own stop text began it, nothing is the answer that was asked for.
            if blocked := output_block(draft.text, request.prompt, rules, whole=not draft.stopped):
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

    def _failed(self, exchange: _Exchange, draft: Draft, error: Exception) -> Exception:
        """Note that the arm failed, and return what to raise where no other can answer."""
        failed, rule = error, type(error).__name__
        if isinstance(error, TimeoutError):
            rule = STILL_LOADING if draft.loading else "time_out"
            failed = ChatAway(f"nothing within {self.settings.serving.timeout_seconds} s")
        exchange.meet(draft.arm, rule, str(error) or str(failed))
        exchange.first = exchange.first or failed
        return failed

    def _leave(
        self, exchange: _Exchange, draft: Draft, shown: int, last: Sequence[Callable[[], None]]
    ) -> None:
        """Keep what was seen by somebody who left, who may vote on it: its id came with the words.

        Where they waited long and saw none, that the arm failed them: whoever is kept waiting
        leaves sooner than a time-out, and an arm that hangs would look as sound as any.
        """
        if not shown and exchange.first is None:
            if self.is_ending() or exchange.seconds < self.settings.serving.patience_seconds:
                return  # who is sent away by a service that ends does not leave
            exchange.meet(
                draft.arm,
                STILL_LOADING if draft.loading else LEFT,
                f"who asked left after {exchange.seconds:.1f} s without a word",
            )
            exchange.first = ChatAway("nobody waited for the answer")
        draft.text = draft.text[:shown]
        kept = exchange.as_kept(draft, exchange.seconds, left=True)
        # Not waited for: whoever cancels does so again at every wait.
        self._finish(exchange, *([] if shown else last), partial(self.keep, kept))

    # -- the store --------------------------------------------------------------------------------

    def _finish(self, exchange: _Exchange, *jobs: Callable[[], None]) -> asyncio.Future[None]:
        """Begin what ends a reply, in a thread; who asked may leave, the service waits for it."""

        def finish() -> None:
            try:
                for job in jobs:
                    job()
            except Exception:  # perhaps nobody waits for it
                log.exception("reply not stored", interaction=exchange.interaction_id)
                raise
            finally:
                self._ending.discard(exchange.interaction_id)

        self._ending.add(exchange.interaction_id)
        return asyncio.get_running_loop().run_in_executor(self._enders, finish)

    async def _finished(self, exchange: _Exchange, *jobs: Callable[[], None]) -> None:
        ending = self._finish(exchange, *jobs)
        await asyncio.wait([ending])  # who leaves meanwhile leaves it alone
        ending.result()

    def _count_in_trial(self, exchange: _Exchange) -> None:
        """Tell the experiment of the request, where it is part of one."""
        if exchange.trial and exchange.unit and exchange.arm != "baseline":
            excused = any(
                event["arm"] == exchange.arm and event["rule"] in NOT_ITS_FAULT
                for event in exchange.trouble
            )
            self.trials.tell(
                exchange.trial,
                exchange.unit,
                arm=exchange.arm,
                network=exchange.network,
                fell_back=exchange.first is not None and not excused,
            )

    def _count_tokens(self, agent_id: str, draft: Draft) -> None:
        """Count what an arm read and wrote, whatever became of it: the upstream's bill has it."""
        if self.metrics is not None:
            self.metrics.count_tokens(agent_id, "prompt", draft.prompt_tokens)
            self.metrics.count_tokens(agent_id, "completion", draft.completion_tokens)

    def _tell(self, exchange: _Exchange) -> None:
        """Record blocks and failures; a store that cannot be written costs no answer."""
        agent_id, interaction_id = exchange.request.agent_id, exchange.interaction_id
        while exchange.untold:
            event = exchange.untold.pop(0)
            if self.metrics is not None:
                self.metrics.count_chat_event(event["rule"])
            log.warning("chat event", agent=agent_id, interaction=interaction_id, **event)
            try:
                chat_events.record(
                    self.store.database, agent_id, interaction_id=interaction_id, **event
                )
            except Exception:  # the answer goes on; the log above has it
                log.exception("chat event not stored", interaction=interaction_id)
