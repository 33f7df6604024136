"""What the pages do: answer as an agent's champion, show a second answer, take what people say.

No web framework here. Every answer is stored before it can be voted on, and every vote passes the
same rules as one from anywhere else. What this does not do: keep people apart who share a browser.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import structlog

from rlhf_pipeline.config import load_settings
from rlhf_pipeline.errors import FeedbackError, PipelineError, RegistryError
from rlhf_pipeline.feedback.datasets import unit_interval
from rlhf_pipeline.feedback.rules import check_event
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    Message,
    Prompt,
    hash_rater,
    now,
    uuid7,
)

if TYPE_CHECKING:
    from rlhf_pipeline.config import PolicySettings, Settings
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.policy.loading import Policy
    from rlhf_pipeline.registry.ledger import ModelVersion
    from rlhf_pipeline.registry.models import ModelRegistry

log = structlog.get_logger(__name__)

LOOK_EVERY_SECONDS = 3.0  # how long a new champion may go unseen
REMEMBERED = 200  # answers that say what a usual disagreement is
ENOUGH = 20  # of them before anything counts as unusual
ALTERNATIVES = 2  # further answers sampled to see whether the model agrees with itself


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that was stored, and what to ask about it."""

    interaction: Interaction
    asks: bool  # the page should ask for more than a thumb
    other: Interaction | None = None  # a second answer to the same prompt, to be compared


@dataclass(slots=True)
class _Seat:
    """The model that answers for an agent."""

    version: ModelVersion
    policy: Policy
    limits: PolicySettings
    looked_at: float


class Desk:
    """Answers and votes of every agent in one state folder."""

    def __init__(self, settings: Settings, store: FeedbackStore, registry: ModelRegistry) -> None:
        self.settings = settings
        self.store = store
        self.registry = registry
        self._seats: dict[str, _Seat] = {}
        self._seating = threading.Lock()
        self._generating = threading.Lock()  # one answer at a time: cores are shared anyway
        self._tracing = ThreadPoolExecutor(1, "traces")  # nobody waits for MLflow to answer
        self._disagreements: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def agents(self) -> list[str]:
        """Return the agents that have a champion."""
        known = self.store.agents()
        return [agent for agent in known if self.registry.ledger.champion(agent) is not None]

    # -- answering ------------------------------------------------------------------------------

    def answer(
        self, agent_id: str, prompt: Prompt, *, session_id: str, person: str, pair: bool = False
    ) -> Iterator[str | Answer]:
        """Yield the champion's answer piece by piece, then the stored `Answer`.

        Two more answers are sampled beside it: how far the three differ says how sure the model is.
        With `pair`, or where they differ more than nine out of ten did before, one of them comes
        along to be compared. Raises RegistryError where the agent has no model.
        """
        from rlhf_pipeline.policy.sampling import complete
        from rlhf_pipeline.policy.streaming import stream

        seat = self._seat(agent_id)
        limits = seat.limits
        sizes: dict[str, Any] = {
            "max_completion_tokens": limits.max_completion_tokens,
            "max_prompt_tokens": limits.max_prompt_tokens,
            "temperature": limits.temperature,
        }
        seed = random.SystemRandom().randrange(2**31)
        text, began = "", time.monotonic()
        with self._generating:
            for piece in stream(seat.policy, prompt, seed=seed, **sizes):
                if isinstance(piece, str):
                    yield piece
                else:
                    text = piece.text
        took = time.monotonic() - began
        others: list[str] = []
        if pair or self.settings.pages.active_learning:
            with self._generating:
                drawn = complete(seat.policy, [prompt] * ALTERNATIVES, seed=seed + 1, **sizes)
            others = [completion.text for completion in drawn]
        disagreement = disagreement_of([text, *others]) if others else None
        said: dict[str, Any] = {
            "agent_id": agent_id,
            "prompt": prompt,
            "model_version": seat.version.version,
            "session_id": session_id,
            "user_id": hash_rater(agent_id, person),
        }
        sampling = {"temperature": limits.temperature, "seed": seed, "disagreement": disagreement}
        this = Interaction(
            interaction_id=uuid7(),
            completion=text,
            created_at=now(),
            sampling=sampling,
            latency_seconds=took,
            **said,
        )
        unusual = disagreement is not None and self._is_unusual(agent_id, disagreement)
        different = next((other for other in others if other.strip() != text.strip()), None)
        shown = None
        if different is not None and (pair or unusual):
            sampling = {"temperature": limits.temperature, "seed": seed + 1}
            shown = Interaction(
                interaction_id=uuid7(),
                completion=different,
                created_at=now(),
                sampling=sampling,
                **said,
            )
        self.store.ensure_agent(agent_id)
        self.store.add_interactions([this] if shown is None else [this, shown])
        if self.settings.pages.log_traces:
            self._tracing.submit(self._trace, this)
        share = unit_interval("ask", this.interaction_id)
        yield Answer(this, unusual or share < self.settings.pages.collection_rate, shown)

    def _trace(self, interaction: Interaction) -> None:
        """Log the interaction in MLflow; where that fails, the log says which one is missing."""
        from rlhf_pipeline.registry.traces import log_interaction

        try:
            log_interaction(self.registry, interaction)
        except Exception:  # nobody waits for this result: the log is where it is heard
            log.exception("trace not logged", interaction=interaction.interaction_id)

    def _is_unusual(self, agent_id: str, disagreement: float) -> bool:
        """Say whether it is above nine tenths of those before it, and remember it."""
        before = self._disagreements[agent_id]
        ordered = sorted(before)
        before.append(disagreement)
        if len(ordered) < ENOUGH:
            return False
        return disagreement > ordered[int(0.9 * len(ordered))]

    def _seat(self, agent_id: str) -> _Seat:
        """Return the champion, loaded; its files are checked against the ledger's hashes first."""
        with self._seating:
            seat = self._seats.get(agent_id)
            if seat is not None and time.monotonic() - seat.looked_at < LOOK_EVERY_SECONDS:
                return seat
            version = self.registry.ledger.champion(agent_id)
            if version is None:
                raise RegistryError(
                    f"agent {agent_id!r} needs a champion to answer, found none; its first turn "
                    "trains version 0"
                )
            if seat is None or seat.version.version != version.version:
                from rlhf_pipeline.policy.loading import load_policy

                limits = self._limits(agent_id)
                folder = self.registry.folder_of(version)
                policy = load_policy(folder, device=limits.device, dtype=limits.dtype)
                seat = _Seat(version, policy, limits, 0.0)
            seat.looked_at = time.monotonic()
            self._seats[agent_id] = seat
            return seat

    def _limits(self, agent_id: str) -> PolicySettings:
        """Return how the agent's model runs: as its own recipe says, where it has one."""
        row = self.store.agent(agent_id)
        if row is None or row.recipe is None:
            return self.settings.policy
        return load_settings(row.recipe, {"state_dir": self.settings.state_dir}).policy

    # -- voting ---------------------------------------------------------------------------------

    def vote(
        self,
        interaction: Interaction,
        kind: FeedbackKind,
        *,
        person: str,
        origin: str = "chat",
        wants: Sequence[str] = (),
        **value: Any,
    ) -> str:
        """Store one vote and return its id once it is synced.

        `value` are the fields the kind needs. `wants` is what the person said matters to them; it
        stays with the vote as tags. Raises FeedbackRefused where the vote breaks a rule.
        """
        if not self.settings.feedback.enabled:
            raise FeedbackError("feedback.enabled is off in this recipe; nothing was stored")
        event = Feedback(
            agent_id=interaction.agent_id,
            kind=kind,
            idempotency_key=f"{origin}:{uuid7()}",
            interaction_id=interaction.interaction_id,
            rater_id=hash_rater(interaction.agent_id, person),
            origin=origin,
            occurred_at=now(),
            tags=tuple(f"wants:{want}" for want in wants),
            **value,
        )
        check_event(event)
        return self.store.append([event])[0].feedback_id


def said_so_far(history: Sequence[tuple[str, str]], question: str) -> Prompt:
    """Return the prompt of a conversation's (question, answer) turns and the next question."""
    if not question.strip():
        raise PipelineError("a question is needed, found an empty one; write something")
    messages: list[Message] = []
    for asked, answered in history:
        messages += [Message("user", asked), Message("assistant", answered)]
    return (*messages, Message("user", question))


def disagreement_of(texts: Sequence[str]) -> float:
    """Return how far texts differ, 0 (equal) to 1: the mean Jaccard distance of their words."""
    pairs = list(combinations([frozenset(text.lower().split()) for text in texts], 2))
    if not pairs:
        return 0.0
    return sum(1 - len(a & b) / len(a | b) if a | b else 0.0 for a, b in pairs) / len(pairs)
