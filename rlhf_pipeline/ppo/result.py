"""What a PPO run leaves behind, as one record that is kept as JSON beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.files import read_json, write_json
from rlhf_pipeline.ppo.alarms import Alarm


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One look at the watch prompts."""

    update: int
    score_mean: float  # proxy reward
    score_std: float
    stopping_mean: float | None  # None where there is no stopping reward
    kl: float  # nats per completion to the reference
    length_mean: float  # tokens
    eos_share: float  # 0 to 1
    repetition: float | None = None  # share of 4-grams said before; None in results of old
    stopping_std: float | None = None  # None without a stopping reward, and in results of old
    samples: tuple[Mapping[str, Any], ...] = ()  # prompt, baseline, completion, score of a few

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(self.samples))  # JSON knows lists only


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How training went and what came out.

    Histories have one number per update, in order; kl is nats per completion, loss is the policy
    loss plus value_coef times the critic's, reward is the mean raw score. DPO scores and measures
    at looks alone: its reward is the update's margin, and its kl has one number per look.
    """

    # what came out
    model_path: str
    reward_model_path: str | None
    feedback_count: int | None  # rows of feedback behind it; whoever knows the snapshot sets it
    chosen_update: int  # 0 is the policy training started from
    stopped_because: str
    # how good it is: the proxy reward of the chosen policy on the watch prompts
    final_reward_mean: float
    final_reward_std: float
    # how it got there
    training_steps: int  # optimizer steps
    reward_history: tuple[float, ...]
    kl_history: tuple[float, ...]
    loss_history: tuple[float, ...]
    history: tuple[Mapping[str, float], ...]  # every metric of every update
    evaluations: tuple[Evaluation, ...]
    alarms: tuple[Alarm, ...]
    seconds: Mapping[str, float]  # by phase, attempts before a resume included
    resumed_from: int | None  # the update whose checkpoint this attempt went on from
    fingerprint: str  # of models, prompts and settings: what decides the result
    settings: Mapping[str, Any] = field(default_factory=dict)
    plots: tuple[str, ...] = ()  # paths within the output folder
    reward_state: Mapping[str, Any] = field(default_factory=dict)  # at the chosen update

    @property
    def updates(self) -> int:
        """PPO updates that were made."""
        return len(self.reward_history)

    def save(self, path: str | Path) -> None:
        """Write the result as JSON, in one rename."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> TrainingResult:
        """Return what `save` wrote. Raises TrainingError if the file holds something else."""
        saved = read_json(path)
        known = {f.name for f in fields(cls)}
        if not isinstance(saved, dict) or {*saved, "reward_state"} != known:
            raise TrainingError(f"a training result is needed at {path}, found another JSON; rerun")
        for name in ("reward_history", "kl_history", "loss_history", "history", "plots"):
            saved[name] = tuple(saved[name])
        saved["evaluations"] = tuple(Evaluation(**e) for e in saved["evaluations"])
        saved["alarms"] = tuple(Alarm(**a) for a in saved["alarms"])
        return cls(**saved)
