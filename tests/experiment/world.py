"""People who meet a champion and a challenger, with rates one sets."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlhf_pipeline.config import ExperimentSettings
from rlhf_pipeline.experiment.assignment import arm_of
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    hash_rater,
    now,
    user_prompt,
    uuid7,
)
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger

AGENT = "shop"
SETTINGS = ExperimentSettings(minutes_per_step=0, ramp=(0.1, 0.5), users_per_step=20)


def ledger_of_two(store: FeedbackStore, root: Path) -> PromotionLedger:
    """Return a ledger whose champion is version 0, with version 1 let through by the gate.

    Of version 1 the file that is to be there holds `weights`; of neither is it there.
    """
    store.ensure_agent(AGENT)
    ledger = PromotionLedger(store.database, root)
    files = {"model.safetensors": "00"}
    ledger.add_baseline(AGENT, label="v0", path=root / "0", files=files, lineage={}, actor="test")
    ledger.add_version(
        AGENT,
        label="v1",
        path=root / "1",
        files={"model.safetensors": hashlib.sha256(b"weights").hexdigest()},
        lineage={},
        gate={"passed": True, "results": []},
        fingerprint="print",
    )
    return ledger


def another(ledger: PromotionLedger, root: Path, *, passed: bool = True) -> ModelVersion:
    """Register a version 2."""
    return ledger.add_version(
        AGENT,
        label="v2",
        path=root / "2",
        files={"model.safetensors": "02"},
        lineage={},
        gate={"passed": passed, "results": []},
        fingerprint="other",
    )


def meet(
    store: FeedbackStore,
    experiment: Experiment,
    users: Iterable[int],
    *,
    likes: tuple[float, float],
    fallbacks: float = 0.0,
    answers: int = 2,
    silent: bool = False,
    rater: str | None = None,
    unsafe: float = 0.0,
    network: str | None = None,
    seed: int = 0,
) -> None:
    """Let users chat and vote; `likes` are the rates of thumbs-up of champion and challenger.

    Silent users chat and do not vote; with a `rater` that one person judges everybody's answers.
    `unsafe` is the share of requests, in either arm, that the baseline answers. All are of the
    `network`, where one is given.
    """
    rng = random.Random(seed)
    said: list[Interaction] = []
    votes: list[Feedback] = []
    for number in users:
        user = f"user-{number}"
        arm = arm_of(experiment.experiment_id, user, experiment.share)
        version = experiment.challenger if arm == "challenger" else experiment.champion
        own = likes[arm == "challenger"] + rng.gauss(0, 0.05)
        for _ in range(answers):
            failed = arm == "challenger" and rng.random() < fallbacks
            turned = unsafe > 0 and rng.random() < unsafe
            told: dict[str, Any] = {"fell_back": failed or turned} if unsafe else {}
            told |= {"events": [{"arm": arm, "rule": "unsafe_request"}]} if turned else {}
            told |= {"network": network} if network else {}
            interaction = Interaction(
                interaction_id=uuid7(),
                agent_id=AGENT,
                prompt=user_prompt(f"question {rng.random()}"),
                completion="an answer of five words",
                model_version=0 if failed or turned else version,
                created_at=now() - timedelta(seconds=1),
                user_id=user,
                experiment=experiment.experiment_id,
                arm=arm,
                sampling={"challenger_share": experiment.share, "ending": "stop", **told},
                latency_seconds=0.2,
            )
            said.append(interaction)
            if silent:
                continue
            votes.append(
                Feedback(
                    agent_id=AGENT,
                    idempotency_key=uuid7(),
                    kind=FeedbackKind.thumbs,
                    interaction_id=interaction.interaction_id,
                    number=float(rng.random() < own),
                    rater_id=hash_rater(AGENT, rater or user),
                    occurred_at=now(),
                )
            )
    store.add_interactions(said)
    store.append(votes)


def begin(store: FeedbackStore, share: float) -> tuple[ExperimentBook, Experiment]:
    """Return the book and an experiment of version 1 beside 0 at the share."""
    book = ExperimentBook(store.database)
    return book, book.start(AGENT, champion=0, challenger=1, share=share, actor="test")
