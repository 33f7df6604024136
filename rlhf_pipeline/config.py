"""Every setting, in one typed, frozen tree; recipes/*.yaml fill it, unknown keys are refused.

Order, later wins: defaults here, the presets a recipe names, the recipe, environment variables
(RLHF_STATE_DIR, RLHF_DATABASE_URL, RLHF_MLFLOW_URI), explicit overrides. A field is described once,
beside it; `rlhf config show` prints the resolved tree.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.ppo.settings import AGGRESSIVE, CONSERVATIVE, PpoSettings

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A part of the tree: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TinySettings(Section):
    """The policy that is built from scratch where nothing is downloaded."""

    vocabulary: int = Field(1024, ge=300, description="Tokens of the byte-level BPE trained here.")
    layers: Positive = 4
    width: Positive = 128
    heads: Positive = 4
    context: Positive = Field(256, description="Tokens a prompt and its completion may take.")


class LoraSettings(Section):
    """Low-rank adapters on every linear layer instead of full weights (arXiv:2106.09685)."""

    enabled: bool = False
    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32


class PolicySettings(Section):
    """Which model answers, and within which limits."""

    base: str = Field(
        "tiny",
        description="`tiny`, a hub id, a local folder, or models:/name@alias of the registry.",
    )
    tiny: TinySettings = TinySettings()
    lora: LoraSettings = LoraSettings()
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16 runs forward passes under autocast; weights stay float32."
    )
    device: str = Field("auto", description="`auto` takes a GPU where there is one.")
    max_prompt_tokens: Positive = 96
    max_completion_tokens: Positive = 48
    temperature: Annotated[float, Field(gt=0, le=2)] = Field(
        1.0, description="Divides the logits wherever completions are sampled or scored."
    )


class SftSettings(Section):
    """The supervised baseline, version 0."""

    seed_conversations: str | None = Field(
        None,
        description="JSONL of {messages: […]}, or `simulated:N` for the simulated people's own; "
        "None trains on the snapshot's corrections, well-rated and chosen completions.",
    )
    epochs: Annotated[float, Field(gt=0)] = 3
    learning_rate: Rate = 1e-3
    batch_size: Positive = 32
    max_examples: Positive | None = None


class FeedbackSettings(Section):
    """What is taken in, and how it is split."""

    enabled: bool = True
    min_rating: int = Field(
        4, ge=1, le=5, description="Rating from which a completion is imitated."
    )
    max_samples: Positive | None = Field(None, description="Rows per data set; None keeps all.")
    evaluation_share: Share = Field(0.15, description="Prompts kept from training, by hash.")
    drop_folder: str = Field(
        "inbox", description="Folder in the state whose JSONL files are taken."
    )


class ValidationSettings(Section):
    """When a snapshot is fit for training."""

    min_rows: int = Field(10, ge=1, description="Clean rows below which nothing is trained.")
    max_prompt_characters: Positive = 20_000
    max_completion_characters: Positive = 20_000


class DriftSettings(Section):
    """When feedback has changed so much that promotion waits for a person."""

    threshold_psi: Annotated[float, Field(gt=0)] = Field(
        0.2, description="Population stability index of any feature; above it promotion is manual."
    )


class RewardShares(Section):
    """Which part of the voters each reward model learns from; they never share one."""

    proxy: Share = 0.6
    stopping: Share = 0.2
    gate: Share = 0.2

    @model_validator(mode="after")
    def _sum_to_one(self) -> RewardShares:
        total = self.proxy + self.stopping + self.gate
        if abs(total - 1) > 1e-6 or min(self.proxy, self.stopping, self.gate) <= 0:
            raise ValueError(f"shares must be positive and sum to 1, found {total:g}")
        return self


class RewardSettings(Section):
    """The three reward models."""

    shares: RewardShares = RewardShares()
    min_pairs: Positive = Field(30, description="Training pairs each of the three needs.")
    freeze_trunk: bool = Field(False, description="Train only heads on the policy's features.")
    freeze_judges: bool = Field(
        False, description="The same for the stopping and the gate model alone: quicker."
    )
    epochs: Positive = 2
    learning_rate: Rate = 3e-4
    batch_size: Positive = 32


class TrainingSettings(Section):
    """How training runs."""

    enabled: bool = True
    stage_timeout_minutes: Positive = Field(
        720, description="A stage that takes longer is stopped."
    )
    seed: int = Field(0, ge=0)
    watch_prompts: Positive = Field(128, description="Prompts the stopping reward is measured on.")


class EvaluationSettings(Section):
    """How a candidate is compared."""

    prompts: Positive = Field(400, description="Held-out prompts, at most.")
    bootstrap_samples: Positive = 2000
    samples_shown: Positive = 10


class PromotionSettings(Section):
    """Who decides, and by which limits."""

    automatic: bool = Field(
        False, description="False asks a person; a refusal is always automatic."
    )
    gate: Mapping[str, float] = Field(
        default_factory=dict, description="Limits that differ from the gate's defaults, by rule."
    )


class ContinuousLearningSettings(Section):
    """When the next turn starts by itself."""

    enabled: bool = True
    min_new_feedback: Positive = Field(100, description="Effective votes that start a turn.")
    min_age_seconds: Annotated[float, Field(ge=0)] = Field(
        60.0, description="Quiet time after the newest vote, so that a burst is taken whole."
    )
    cool_down_minutes: Annotated[float, Field(ge=0)] = 60.0
    nightly_cron: str = "0 2 * * *"
    deadline_minutes: Positive = Field(480, description="A run that takes longer is ended.")
    gpu_minutes_per_night: Positive = Field(480, description="Turns start only within this budget.")
    max_attempts: Positive = Field(3, description="Tries at one fingerprint before a person looks.")


class ExperimentSettings(Section):
    """Live A/B between champion and challenger."""

    enabled: bool = False


class NotificationSettings(Section):
    """Who hears of failures."""

    webhook: SecretStr | None = None


class Settings(Section):
    """The whole tree."""

    recipe: str = "defaults"
    state_dir: Annotated[Path, AfterValidator(Path.absolute)] = Field(
        Path("state"), validate_default=True, description="The one folder all state lives in."
    )
    database_url: SecretStr | None = Field(None, description="None: SQLite in the state folder.")
    mlflow_uri: str | None = Field(None, description="None: SQLite and files in the state folder.")
    policy: PolicySettings = PolicySettings()
    sft: SftSettings = SftSettings()
    feedback: FeedbackSettings = FeedbackSettings()
    validation: ValidationSettings = ValidationSettings()
    drift: DriftSettings = DriftSettings()
    reward: RewardSettings = RewardSettings()
    ppo: PpoSettings = PpoSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    promotion: PromotionSettings = PromotionSettings()
    continuous_learning: ContinuousLearningSettings = ContinuousLearningSettings()
    experiments: ExperimentSettings = ExperimentSettings()
    notifications: NotificationSettings = NotificationSettings()

    @property
    def resolved_database_url(self) -> str:
        """Return the database's URL, the embedded one where none is set."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.state_dir / 'feedback.db'}"

    @property
    def resolved_mlflow_uri(self) -> str:
        """Return MLflow's tracking URI, the embedded one where none is set."""
        return self.mlflow_uri or f"sqlite:///{self.state_dir / 'mlflow' / 'mlflow.db'}"

    def agent_folder(self, agent_id: str) -> Path:
        """Return where an agent's snapshots, turns and baseline are kept."""
        return self.state_dir / "agents" / agent_id


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quick": {
        "ppo": {"updates": 12, "rollouts_per_update": 64},
        "reward": {"epochs": 1},
        "evaluation": {"prompts": 200, "bootstrap_samples": 1000},
    },
    "production": {
        "evaluation": {"prompts": 1000, "bootstrap_samples": 5000},
        "training": {"watch_prompts": 256},
        "promotion": {"automatic": False},
    },
    "memory-constrained": {
        "policy": {"lora": {"enabled": True}, "dtype": "bfloat16"},
        "ppo": {"critic": "shared", "tokens_per_microbatch": 2048},
        "sft": {"batch_size": 4},
        "reward": {"batch_size": 8, "freeze_judges": True},
    },
}
PPO_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "conservative": CONSERVATIVE,
    "aggressive": AGGRESSIVE,
}


SHARED_WITH_PPO: Mapping[str, str] = {
    "max_prompt_tokens": "policy.max_prompt_tokens",
    "max_completion_tokens": "policy.max_completion_tokens",
    "temperature": "policy.temperature",
    "precision": "policy.dtype",
    "device": "policy.device",
    "lora_rank": "policy.lora",
    "lora_alpha": "policy.lora",
    "seed": "training.seed",
}


def load_settings(
    recipe: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """Return the resolved settings of a recipe: a name in recipes/, or a path to a YAML file.

    Raises ConfigError for a recipe that is not there, a key nobody knows (with the nearest right
    one), or a value out of range.
    """
    name = recipe if recipe is not None else os.environ.get("RLHF_RECIPE", "tiny")
    environment = {
        "state_dir": os.environ.get("RLHF_STATE_DIR"),
        "database_url": os.environ.get("RLHF_DATABASE_URL"),
        "mlflow_uri": os.environ.get("RLHF_MLFLOW_URI"),
    }
    tree = _merged(_read_recipe(name), {key: v for key, v in environment.items() if v})
    tree = _merged(tree, overrides or {})
    try:
        return Settings.model_validate({"recipe": str(name), **_with_shared(tree, name)})
    except ValidationError as error:
        raise ConfigError(_explain(error, name)) from error


def _with_shared(tree: Mapping[str, Any], recipe: str | Path) -> dict[str, Any]:
    """Return the tree with what PPO shares with the other stages filled in from where it is set."""
    ppo = tree.get("ppo") or {}
    for key, home in SHARED_WITH_PPO.items():
        if key in ppo:
            raise ConfigError(
                f"recipe {recipe}: ppo.{key} follows {home}, which other stages share; set {home}"
            )
    policy = PolicySettings.model_validate(tree.get("policy") or {})
    training = TrainingSettings.model_validate(tree.get("training") or {})
    shared = {
        "max_prompt_tokens": policy.max_prompt_tokens,
        "max_completion_tokens": policy.max_completion_tokens,
        "temperature": policy.temperature,
        "precision": policy.dtype,
        "device": policy.device,
        "lora_rank": policy.lora.rank if policy.lora.enabled else 0,
        "lora_alpha": policy.lora.alpha,
        "seed": training.seed,
    }
    return {**tree, "ppo": {**ppo, **shared}}


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the project, smallest first."""
    return [path.stem for path in sorted(RECIPES.glob("*.yaml"), key=lambda p: p.stat().st_size)]


def shown(settings: Settings) -> dict[str, Any]:
    """Return the resolved tree as plain values, secrets masked: what a run keeps."""
    values: dict[str, Any] = settings.model_dump(mode="json")
    return values


def _read_recipe(name: str | Path) -> dict[str, Any]:
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = RECIPES / f"{name}.yaml"
    if not path.exists():
        near = difflib.get_close_matches(str(name), recipe_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"needed a recipe, found no {path}; known: {', '.join(recipe_names())}{hint}"
        )
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold settings by name, found {type(tree).__name__}")
    resolved: dict[str, Any] = {}
    for preset in tree.pop("presets", []):
        resolved = _merged(resolved, _preset(preset, PRESETS, path))
    ppo = tree.get("ppo")
    if isinstance(ppo, dict) and "preset" in ppo:
        ppo = dict(ppo)
        tree = {**tree, "ppo": _merged(_preset(ppo.pop("preset"), PPO_PRESETS, path), ppo)}
    return _merged(resolved, tree)


def _preset(name: str, presets: Mapping[str, Mapping[str, Any]], path: Path) -> dict[str, Any]:
    if name not in presets:
        near = difflib.get_close_matches(str(name), presets, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{path}: no preset {name!r}; known: {', '.join(presets)}{hint}")
    return dict(presets[name])


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(old, value) if both else value  # type: ignore[arg-type]  # both are
    return result


def _explain(error: ValidationError, recipe: str | Path) -> str:
    """Return one line per problem, with the nearest right key for an unknown one."""
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            near = difflib.get_close_matches(where, _every_key(), n=1, cutoff=0.4)
            hint = f"; the nearest right one is {near[0]!r}" if near else ""
            lines.append(f"unknown setting {where!r}{hint}")
        else:
            lines.append(f"{where}: {problem['msg']}, found {problem['input']!r}")
    return f"recipe {recipe}: " + "; ".join(lines)


@lru_cache(maxsize=1)
def _every_key() -> tuple[str, ...]:
    keys: list[str] = []

    def walk(tree: Mapping[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            keys.append(prefix + key)
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{key}.")

    walk(Settings().model_dump(), "")
    return tuple(keys)
