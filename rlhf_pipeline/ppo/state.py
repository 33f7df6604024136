"""What a run is known by and what of it moves, written to a checkpoint and taken up again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.ppo import checkpoint
from rlhf_pipeline.ppo.alarms import Alarm
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.replay import Replay
from rlhf_pipeline.ppo.result import Evaluation
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.records import Prompt, ScoreMoments, hashed, prompt_to_json

MACHINE_SETTINGS = (
    "device completions_at_once tokens_per_microbatch gradient_checkpointing checkpoint_every "
    "keep_checkpoints samples_shown"
).split()  # may differ when a run is resumed: they change no result beyond rounding


@dataclass
class Progressed:
    """Everything of a run that moves, but weights, optimizer and random states."""

    kl_coef: float
    update: int = 0  # updates made
    prompts_used: int = 0  # the prompt cursor
    optimizer_steps: int = 0
    scores: ScoreMoments = field(default_factory=ScoreMoments)
    reward: dict[str, Any] = field(default_factory=dict)  # a changing reward's state
    first_reward: dict[str, Any] = field(default_factory=dict)  # as training began
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the whole as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Progressed:
        """Return what `as_json` described."""
        return cls(
            **{
                **saved,
                "scores": ScoreMoments(**saved["scores"]),
                "evaluations": [Evaluation(**e) for e in saved["evaluations"]],
                "alarms": [Alarm(**a) for a in saved["alarms"]],
            }
        )

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds the block takes to the phase's."""
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed


def decisive(settings: PpoSettings) -> list[tuple[str, Any]]:
    """Return the settings that decide a run's result, by name: all but the machine's."""
    return sorted((k, v) for k, v in asdict(settings).items() if k not in MACHINE_SETTINGS)


def run_fingerprint(
    models: Sequence[str | Path],
    rewards: Sequence[object],
    prompts: Sequence[Prompt],
    settings: PpoSettings,
) -> str:
    """Return a digest of what decides a run's result: models, rewards, prompts and settings.

    Folders count by their files; rewards, and whoever else takes part, by their `version` where
    they have one.
    """
    files = [str(folder_sha256(m)) if Path(m).is_dir() else str(m) for m in models]
    versions = [str(getattr(r, "version", r is not None)) for r in rewards]
    texts = [prompt_to_json(p) for p in prompts]
    return hashed(str(decisive(settings)), *files, *versions, *texts)


def write_state(
    root: Path,
    learner: Learner,
    now: Progressed,
    generators: dict[str, torch.Generator],
    replay: Replay,
    fingerprint: str,
) -> None:
    trainable = learner.trainable()
    random_tensors, random_facts = checkpoint.random_states(generators)
    parts = {
        part: {n: p for n, p in trainable.items() if n.startswith(f"{part}/")}
        for part in ("policy", "critic")
    }
    checkpoint.write_checkpoint(
        root,
        now.update,
        tensors={
            **parts,
            "optimizer": checkpoint.optimizer_tensors(learner.optimizer, trainable),
            "random": random_tensors,
            "replay": replay.tensors(),
            **({} if learner.criteria is None else {"criteria": learner.criteria.tensors()}),
        },
        state={
            "fingerprint": fingerprint,
            "progressed": now.as_json(),
            "learning_rates": [group["lr"] for group in learner.optimizer.param_groups],
            "random": random_facts,
            **({} if learner.criteria is None else {"criteria": learner.criteria.names}),
            **({} if learner.scaler is None else {"scaler": learner.scaler.state_dict()}),
        },
    )


def restore_state(
    saved: checkpoint.Checkpoint,
    learner: Learner,
    generators: dict[str, torch.Generator],
    replay: Replay,
    fingerprint: str,
) -> Progressed:
    if saved.state["fingerprint"] != fingerprint:
        raise TrainingError(
            f"the checkpoints beside {saved.path} must be of this run, found those of another "
            "(other models, prompts or settings); take another output_dir, or move "
            "this one away to begin again"
        )
    trainable = learner.trainable()
    weights = {**saved.tensors["policy"], **saved.tensors["critic"]}
    checkpoint.restore_parameters(trainable, weights)
    checkpoint.restore_optimizer(learner.optimizer, trainable, saved.tensors["optimizer"])
    for group, rate in zip(
        learner.optimizer.param_groups, saved.state["learning_rates"], strict=True
    ):
        group["lr"] = rate
    checkpoint.restore_random_states(saved.tensors["random"], saved.state["random"], generators)
    replay.restore(saved.tensors["replay"], learner.policy.device)
    if learner.criteria is not None and "criteria" in saved.tensors:
        learner.criteria.restore(saved.tensors["criteria"])
    if learner.scaler is not None:
        learner.scaler.load_state_dict(saved.state["scaler"])
    return Progressed.from_json(saved.state["progressed"])
