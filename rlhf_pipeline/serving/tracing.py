"""Answers logged as MLflow traces, where `pages.log_traces` asks for it: the API's and the pages'.

Nobody who chats waits for MLflow. What this does not promise is every trace: while MLflow is away,
or slower than people chat, or somebody is erased from the agent, the service's log names the
answers that have none; of those that wait when the service ends it says how many.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

from rlhf_pipeline.errors import RegistryError
from rlhf_pipeline.feedback.claims import ERASURE, ClaimBook
from rlhf_pipeline.records import now

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.records import Interaction
    from rlhf_pipeline.registry.models import ModelRegistry

log = structlog.get_logger(__name__)

MOST_WAITING = 1000  # answers held in memory until MLflow has taken them


class Tracing:
    """Logs answers one after the other, in a thread of its own."""

    def __init__(self, settings: Settings, store: FeedbackStore, registry: ModelRegistry) -> None:
        self.enabled = settings.pages.log_traces
        self._store = store
        self._claims = ClaimBook(store.database)
        self._registry = registry
        self._thread = ThreadPoolExecutor(1, "traces")
        self._waiting = 0
        self._count = threading.Lock()

    def note(self, interaction: Interaction) -> None:
        """Have an answer logged soon, where traces are asked for."""
        if not self.enabled:
            return
        with self._count:
            full = self._waiting >= MOST_WAITING
            self._waiting += not full
        if full:
            log.error("trace not logged", interaction=interaction.interaction_id, why="too many")
            return
        self._thread.submit(self._write, interaction)

    def _write(self, interaction: Interaction) -> None:
        """Log the answer; where that fails, the log says which one is missing."""
        from rlhf_pipeline.registry.forgetting import forget_trace
        from rlhf_pipeline.registry.traces import log_interaction

        try:
            trace_id = log_interaction(self._registry, interaction)
            if why := self._must_go(interaction):
                forget_trace(self._registry, interaction.agent_id, trace_id)
                log.warning("trace taken back", interaction=interaction.interaction_id, why=why)
        except RegistryError as error:  # a line each: MLflow may be away for days
            log.error("trace not logged", interaction=interaction.interaction_id, why=str(error))
        except Exception:  # nobody waits for this result: the log is where it is heard
            log.exception("trace not logged", interaction=interaction.interaction_id)
        finally:
            with self._count:
                self._waiting -= 1

    def _must_go(self, interaction: Interaction) -> str | None:
        """Return why an answer's trace, which is there by now, must not stay; None: it may.

        An erasure looks for traces once, and takes the answers out of the store last: one that is
        at work may have looked before this trace was there, and after it nothing would lead from
        the person to the trace. So whether one is at work is asked first: one that has ended since
        has taken the answer along, one that begins later finds the trace.
        """
        claim = self._claims.held(interaction.agent_id)
        if claim is not None and claim.asked_by == ERASURE and claim.expires_at > now():
            return "somebody is being erased"
        if self._store.interaction(interaction.interaction_id) is None:
            return "it was erased"
        return None

    def finish(self) -> None:
        """Return once what was noted is logged."""
        self._thread.shutdown()

    def close(self) -> None:
        """End without waiting for MLflow; what is not logged by then is counted in the log."""
        self.enabled = False  # an answer that is stored later still costs nobody an error
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._waiting:
            log.error("traces not logged", answers=self._waiting, why="the service ended")
