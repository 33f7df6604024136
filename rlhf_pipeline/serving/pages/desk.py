"""What the pages do: answer as an agent's champion, show a second answer, take what people say.

No web framework here. Every answer is stored before it can be voted on, and every vote passes the
same rules as one from anywhere else. What this does not do: keep people apart who share a browser.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_pipeline.errors import ChatRefused, FeedbackError
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
from rlhf_pipeline.serving.arms import Ending, Wishes
from rlhf_pipeline.serving.doubts import HeadDoubts
from rlhf_pipeline.serving.gateway import Gateway, Reply
from rlhf_pipeline.serving.guardrails import Rail, output_block
from rlhf_pipeline.serving.limits import RaterLimit

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.registry.models import ModelRegistry

REMEMBERED = 200  # answers that say what a usual disagreement is
ENOUGH = 20  # of them before anything counts as unusual
T = TypeVar("T")

ABOUT_ONE = (
    *("disagreement", "reward_disagreement", "reward_model", "events"),
    *("challenger_share", "ending", "fell_back"),
)
"""What an answer's sampling holds that is not so of another answer drawn with it."""

ALTERNATIVES = 2  # further answers sampled to see whether the model agrees with itself


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that was stored, and what to ask about it."""

    interaction: Interaction
    asks: bool  # the page should ask for more than a thumb
    other: Interaction | None = None  # a second answer to the same prompt, to be compared
    ending: Ending = "stop"


class Desk:
    """Answers and votes of every agent in one state folder."""

    def __init__(
        self,
        settings: Settings,
        store: FeedbackStore,
        registry: ModelRegistry,
        gateway: Gateway | None = None,
        limit: RaterLimit | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.registry = registry
        self.gateway = gateway or Gateway(settings, store, registry)
        self.limit = limit or RaterLimit(settings.feedback.votes_per_minute)
        self.doubts = HeadDoubts(registry.ledger, self.gateway.champions.limits)
        self._explaining = threading.Lock()  # a reward model is loaded for it: one at a time
        self._disagreements: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def agents(self) -> list[str]:
        """Return the agents that can answer."""
        return self.gateway.agents()

    # -- answering ------------------------------------------------------------------------------

    def answer(
        self,
        agent_id: str,
        prompt: Prompt,
        *,
        session_id: str,
        person: str,
        network: str | None = None,
        pair: bool = False,
    ) -> Iterator[str | Answer]:
        """Yield the champion's answer piece by piece, then the stored `Answer`.

        Two more answers are sampled beside it: how far the three differ says how sure the model is,
        and how far the reward model's heads differ on the answer how sure its judges are. With
        `pair`, or where either is above nine out of ten before it, one of them comes along to be
        compared. Raises RegistryError where the agent has no model.
        """
        others = ALTERNATIVES if pair or self.settings.pages.active_learning else 0

        def note(text: str, also: Sequence[str]) -> dict[str, Any]:
            doubts = self.doubts.about(agent_id, prompt, text) if self._asks_heads else {}
            return {"disagreement": disagreement_of([text, *also]) if also else None, **doubts}

        reply: Reply | None = None
        pieces = self.gateway.reply(
            agent_id,
            prompt,
            Wishes(),
            session_id=session_id,
            user_id=hash_rater(agent_id, person),
            network=network,
            others=others,
            note=note,
            at_once=not pair,
        )
        for piece in _in_turn(pieces):
            if isinstance(piece, str):
                yield piece
            else:
                reply = piece
        assert reply is not None  # a reply ends with a Reply
        this = reply.interaction
        unusual = self._is_doubtful(this)
        text, rules = this.completion.strip(), self.settings.serving.guardrails
        fit = (o for o in reply.others if not output_block(o, prompt, rules, whole=True))
        different = next((other for other in fit if other.strip() != text), None)
        shown = None
        if different is not None and (pair or unusual):
            drawn = {k: v for k, v in this.sampling.items() if k not in ABOUT_ONE}
            if "seed" in drawn:  # an upstream draws its own
                drawn["seed"] += 1 + reply.others.index(different)
            shown = replace(
                this,
                interaction_id=uuid7(),
                completion=different,
                created_at=now(),
                experiment=None,  # one question is one answer there, however many came of it
                sampling=drawn,
                latency_seconds=None,
            )
            self.gateway.keep(shown)
        share = unit_interval("ask", this.interaction_id)
        yield Answer(
            this, unusual or share < self.settings.pages.collection_rate, shown, reply.ending
        )

    @property
    def _asks_heads(self) -> bool:
        return self.settings.pages.active_learning and self.settings.pages.reward_disagreement

    def _is_doubtful(self, this: Interaction) -> bool:
        """Say whether the answers drawn or the reward model's heads disagree unusually far."""
        drawn, heads = (this.sampling.get(n) for n in ("disagreement", "reward_disagreement"))
        # Each reward model has a scale of its own, so its disagreements are compared among them. So
        # has each version: in an experiment both arms' people are asked equally often.
        kinds = (("drawn", drawn), (this.sampling.get("reward_model", ""), heads))
        found = [
            self._is_unusual(f"{this.agent_id} {this.model_version} {kind}", value)
            for kind, value in kinds
            if value is not None
        ]
        return any(found)

    def _is_unusual(self, kind: str, disagreement: float) -> bool:
        """Say whether it is above nine tenths of its kind before it, and remember it."""
        before = self._disagreements[kind]
        ordered = sorted(before)
        before.append(disagreement)
        if len(ordered) < ENOUGH:
            return False
        return disagreement > ordered[int(0.9 * len(ordered))]

    def why(self, answer: Answer) -> str:
        """Return what training maximised says of the answer, piece by piece, as text.

        Of both where two were drawn. Raises PipelineError where that is not known, and says why.
        """
        from rlhf_pipeline.registry.scored import scored, to_text

        drawn = [one for one in (answer.interaction, answer.other) if one is not None]
        settings = self.gateway.champions.settings_of(drawn[0].agent_id)
        with self._explaining:
            return to_text(scored(self.registry, settings, drawn))

    # -- voting ---------------------------------------------------------------------------------

    def vote(
        self,
        interaction: Interaction,
        kind: FeedbackKind,
        *,
        person: str | None = None,
        origin: str = "chat",
        wants: Sequence[str] = (),
        **value: Any,
    ) -> str:
        """Store one vote and return its id once it is synced.

        It is the vote of `person`; of nobody named, that of who was answered. `value` are the
        fields the kind needs. `wants` is what the person said matters to them; it
        stays with the vote as tags. Raises FeedbackRefused where the vote breaks a rule,
        TooManyVotes where the person votes faster than the settings allow.
        """
        if not self.settings.feedback.enabled:
            raise FeedbackError("feedback.enabled is off in this recipe; nothing was stored")
        said_by = hash_rater(interaction.agent_id, person) if person else interaction.user_id
        event = Feedback(
            agent_id=interaction.agent_id,
            kind=kind,
            idempotency_key=f"{origin}:{uuid7()}",
            interaction_id=interaction.interaction_id,
            rater_id=said_by,
            origin=origin,
            occurred_at=now(),
            tags=tuple(f"wants:{want}" for want in wants),
            **value,
        )
        check_event(event)
        self.limit.admit([event])
        return self.store.append([event])[0].feedback_id


def _in_turn(pieces: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield what an asynchronous generator gives, for callers in a thread of their own."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(pieces))
            except StopAsyncIteration:
                return
    finally:
        if _loop_runs_here():  # who asked has left, and the page drops this among others' requests
            threading.Thread(target=_end, args=(loop, pieces)).start()
        else:
            _end(loop, pieces)


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _end(loop: asyncio.AbstractEventLoop, pieces: AsyncGenerator[Any, None]) -> None:
    loop.run_until_complete(pieces.aclose())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def said_so_far(history: Sequence[tuple[str, str]], question: str) -> Prompt:
    """Return the prompt of a conversation's (question, answer) turns and the next question."""
    if not question.strip():
        raise ChatRefused(
            Rail.prompt_empty, "a question is needed, found an empty one; write something"
        )
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
