"""How far the heads of a champion's reward model disagree about an answer: there a vote teaches.

Only a reward model of several heads (`reward.heads`) disagrees with itself. It is loaded in a
thread of its own at an agent's first question, and again for each new champion, what it reads
held against the lineage's hashes; until it is there nothing is known, and no answer waits for it.
What this does not do: share the policy's base, so it takes the memory of one more model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import structlog

from rlhf_pipeline.files import read_json
from rlhf_pipeline.records import Prompt, RewardInput

if TYPE_CHECKING:
    from rlhf_pipeline.config import PolicySettings
    from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
    from rlhf_pipeline.reward.model import LearnedReward

log = structlog.get_logger(__name__)


class HeadDoubts:
    """The reward models of all agents' champions, those with several heads."""

    def __init__(self, ledger: PromotionLedger, limits: Callable[[str], PolicySettings]) -> None:
        """`limits` says how an agent's models run."""
        self._ledger = ledger
        self._limits = limits
        self._loaded: dict[str, tuple[int, Future[LearnedReward | None]]] = {}  # by agent
        self._loading = ThreadPoolExecutor(1, "reward models")
        self._lock = threading.Lock()  # one scores at a time: they share the processor anyway

    def about(self, agent_id: str, prompt: Prompt, completion: str) -> dict[str, Any]:
        """Return `reward_disagreement`, in units of score, and the `reward_model` whose it is.

        Empty where the champion's reward model has one head, is not loaded yet, or cannot say.
        """
        try:
            with self._lock:
                reward = self._ready(agent_id)
                if reward is None:
                    return {}
                [doubt] = reward.judge([RewardInput(prompt, completion)]).disagreement
        except Exception:  # the answer is given: it goes on without
            log.exception("reward disagreement not known", agent=agent_id)
            return {}
        return {"reward_disagreement": doubt, "reward_model": reward.version}

    def _ready(self, agent_id: str) -> LearnedReward | None:
        """Return the champion's reward model if it is loaded; begin to load it where it is not."""
        champion = self._ledger.champion(agent_id)
        if champion is None:
            return None
        known = self._loaded.get(agent_id)
        if known is None or known[0] != champion.version:
            known = (champion.version, self._loading.submit(self._load, champion))
            self._loaded[agent_id] = known
        return known[1].result() if known[1].done() else None

    def _load(self, version: ModelVersion) -> LearnedReward | None:
        try:
            known = version.lineage.get("reward_models", {}).get("proxy")
            folder = version.work / "reward" / "proxy"
            if known is None or not read_json(folder / "reward_model.json").get("heads"):
                return None
            from rlhf_pipeline.registry.judges import reward_folder
            from rlhf_pipeline.reward.model import load_reward_model

            limits = self._limits(version.agent_id)
            return load_reward_model(
                reward_folder(version, "proxy"), device=limits.device, dtype=limits.dtype
            )
        except Exception as error:  # answers are asked about without it
            log.exception(
                "reward model not loaded",
                agent=version.agent_id,
                version=version.version,
                why=str(error),
            )
            return None
