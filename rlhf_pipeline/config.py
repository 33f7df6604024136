"""Every setting, in one typed, frozen tree; recipes/*.yaml fill it, unknown keys are refused.

Order, later wins: defaults here, the presets a recipe names, the recipe, environment variables
(RLHF_STATE_DIR, RLHF_DATABASE_URL, RLHF_MLFLOW_URI, RLHF_DAGSTER_URL, RLHF_MLFLOW_URL,
RLHF_WEBHOOK), explicit overrides. A field is described once, beside it; `rlhf config show`
prints the resolved tree.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from rlhf_pipeline.cron import checked_cron
from rlhf_pipeline.errors import ConfigError, ModelError, SourceError
from rlhf_pipeline.feedback.rules import AGENT_ID
from rlhf_pipeline.files import SQLITE, read_yaml, sqlite_path, sqlite_url
from rlhf_pipeline.ppo.settings import AGGRESSIVE, CONSERVATIVE, LEAST_TEMPERATURE, PpoSettings
from rlhf_pipeline.reward.remote import parts_of
from rlhf_pipeline.reward.settings import CRITERION, LEARNED, FunctionSettings, spelt_out
from rlhf_pipeline.reward.settings import PRESETS as REWARD_PRESETS
from rlhf_pipeline.safety import UNSAFE

if TYPE_CHECKING:
    from rlhf_pipeline.feedback.renaming import Renaming

INBOX_DONE = "done"  # folder beside dropped files, of those that were taken in
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
BY_SIZE = ("tiny", "specialists", "gpt2", "qwen2.5-0.5b", "phi-2", "llama-2-7b-chat")

PAGE = r"^https?://[^\s/@][^\s@]*$"  # pages link to it: no password, which all would see

T = TypeVar("T")
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Days = Annotated[float, Field(ge=0, le=36_500)]  # a century: a date that far back can be told
Hours = Annotated[float, Field(ge=0, le=24 * 36_500)]
Seconds = Annotated[float, Field(ge=0, le=60 * 60 * 24 * 36_500)]
Minutes = Annotated[float, Field(ge=0, le=60 * 24 * 36_500)]
Endpoint = Annotated[
    str,
    Field(
        pattern=r"^https?://[^\s@]+$",  # messages and events show it
        description="Ends with /v1, as clients take it; its key is in `key_variable`.",
    ),
]


Cron = Annotated[str, AfterValidator(checked_cron)]


def _is_address(secret: SecretStr) -> SecretStr:
    parts = parts_of(secret.get_secret_value())
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            "needed an address that begins with http:// or https://, has a host's name, a port's "
            "number, if any, and no spaces or signs beyond ASCII; correct it"
        )
    if "@" in parts.netloc:
        raise ValueError("needed an address without a user or password, which are not sent")
    return secret


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


class Section(BaseModel):
    """A part of the tree: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TinySettings(Section):
    """The policy that is built from scratch where nothing is downloaded."""

    vocabulary: int = Field(
        1024,
        ge=300,
        description="Tokens, at most, of the byte-level BPE trained here: on seeds, and what three "
        "people said in three conversations.",
    )
    layers: Positive = Field(4, description="Transformer layers.")
    width: Positive = Field(128, description="Of its hidden states.")
    heads: Positive = Field(4, description="Attention heads; they divide the width.")
    context: Positive = Field(256, description="Tokens a prompt and its completion may take.")
    encoding: str | None = Field(
        None,
        pattern=r"^tiktoken:.|\.tiktoken$",
        description="Instead of a BPE trained here: `tiktoken:cl100k_base`, or a local file of "
        "ranks, `path/name.tiktoken`. `vocabulary` then says nothing.",
    )

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> TinySettings:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"width must be an even number of units for each head, found width {self.width} "
                f"and {self.heads} heads; take a multiple of {2 * self.heads}"
            )
        return self


class LoraSettings(Section):
    """Low-rank adapters on every linear layer instead of full weights (arXiv:2106.09685)."""

    enabled: bool = Field(False, description="Train adapters in place of all weights.")
    rank: Positive = Field(16, description="Of the adapters.")
    alpha: Annotated[float, Field(gt=0)] = Field(
        32, description="What the adapters' part is scaled by, over the rank."
    )


class PolicySettings(Section):
    """Which model answers, and within which limits."""

    base: str = Field(
        "tiny",
        description="`tiny`, a hub id, a local folder such as `rlhf export` writes, or a model in "
        "MLflow's registry: `models:/name@alias`, `models:/name/3`.",
    )
    tiny: TinySettings = TinySettings()
    lora: LoraSettings = LoraSettings()
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="bfloat16 trains under autocast; weights stay float32, but those that adapters "
        "leave frozen. float16 is for PPO on GPUs without bfloat16: with a scaled loss, and all "
        "weights in float32. What is compared and served is rounded to either, so the gate sees "
        "it as people do; float32 rounds away nothing of a small update.",
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="`auto` takes a GPU where there is one; else `cpu`, `cuda` or, of several "
        "GPUs, `cuda:1`.",
    )
    max_prompt_tokens: Positive = Field(
        96, description="Longest prompt, in tokens, with the chat template's own."
    )
    max_completion_tokens: Positive = Field(
        48, description="Longest completion, in tokens, its end token counted."
    )
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=2)] = Field(
        1.0,
        description="Divides the logits wherever completions are sampled or scored. At least 1e-6: "
        "what is divided by less leaves the range of float32.",
    )

    @property
    def frozen_dtype(self) -> str:
        """Return the type of weights that nothing trains beside adapters."""
        return "bfloat16" if self.lora.enabled and self.dtype == "bfloat16" else "float32"

    def within(self, context: int) -> PolicySettings:
        """Return them with a prompt and a completion that fit the context together.

        The recipe need not be the one that a model was trained with. Each keeps its share.
        """
        longest = self.max_prompt_tokens + self.max_completion_tokens
        if longest <= context:
            return self
        completion = max(1, self.max_completion_tokens * context // longest)
        lengths = {"max_prompt_tokens": context - completion, "max_completion_tokens": completion}
        return self.model_copy(update=lengths)

    @model_validator(mode="after")
    def _tiny_context_holds_both(self) -> PolicySettings:
        longest = self.max_prompt_tokens + self.max_completion_tokens
        if self.base == "tiny" and longest > self.tiny.context:
            raise ValueError(
                f"policy.tiny.context must hold max_prompt_tokens + max_completion_tokens = "
                f"{longest}, found {self.tiny.context}; raise it or lower one of them"
            )
        return self


class SftSettings(Section):
    """The supervised baseline, version 0."""

    seed_conversations: str | None = Field(
        None,
        description="JSONL of {messages: […]}, taken beside the snapshot's corrections, well-rated "
        "and chosen completions; or `simulated:N`, the simulated people's, where there are none.",
    )
    epochs: Annotated[float, Field(gt=0)] = Field(3, description="Passes over the examples.")
    learning_rate: Rate = Field(1e-3, description="Of AdamW, at its highest.")
    batch_size: Positive = Field(32, description="Examples per optimizer step.")
    max_examples: Positive | None = Field(
        None, description="Examples trained on, at most; None: all."
    )
    lora_rank: int = Field(
        0, ge=0, description="Above 0: adapters are trained, then merged; a model from a hub only."
    )


class FileNames(Section):
    """How files name what our formats name otherwise; one that has none of the columns has ours."""

    columns: dict[str, str] = Field(
        {},
        description="Field -> column, or where in an object it is (trace.input.text). A file that "
        "has any must have the rater's.",
    )
    fixed: dict[str, str] = Field(
        {}, description="Field -> what it is in every row of such a file, as kind: thumbs."
    )
    words: dict[str, str] = Field(
        {}, description="Their word for a vote -> ours, as like: up, in such a file."
    )
    zone: str | None = Field(
        None,
        description="Of moments without a zone, in any file: its IANA name, as Europe/Berlin. "
        "Null: such rows are set aside.",
    )

    def renaming(self) -> Renaming:
        """Return what ingestion, and an erasure, read files by."""
        from rlhf_pipeline.feedback.renaming import Renaming

        return Renaming(self.columns, self.fixed, self.words, self.zone, for_any_file=True)

    @model_validator(mode="after")
    def _can_be_told(self) -> FileNames:
        if (self.fixed or self.words) and not self.columns:
            raise ValueError(
                "needed columns by which such a file is known, found fixed or words alone; name one"
            )
        try:
            self.renaming()
        except SourceError as error:
            raise ValueError(str(error)) from None
        return self


class FeedbackSettings(Section):
    """What is taken in, and how it is split."""

    enabled: bool = Field(True, description="False: the service takes no votes (503).")
    min_rating: int = Field(
        4, ge=1, le=5, description="Rating from which a completion is imitated."
    )
    max_samples: Positive | None = Field(None, description="Rows per data set; None keeps all.")
    max_votes: Positive | None = Field(
        100_000,
        description="Votes that data sets are made of, the newest; older ones stay in the "
        "snapshot. Without a bound a turn takes longer every year, and new votes weigh ever less. "
        "None: all.",
    )
    max_per_rater: Positive | None = Field(
        1000,
        description="Votes of one rater that data sets are made of, the same ones every time; the "
        "rest stay in the snapshot. None: no cap.",
    )
    max_unsigned: Positive | None = Field(
        10_000,
        description="The same for votes without a rater that came in one way (a file, the API, a "
        "page), together: whoever sends them could be one person. Raise it, or None, where nobody "
        "is named and all of them are to count.",
    )
    evaluation_share: Annotated[Share, Field(lt=1)] = Field(
        0.15, description="Conversations kept from training, by a hash of their first words."
    )
    gold_questions: str | None = Field(
        None,
        description="File of pairs whose better answer is known: how a rater answers them counts "
        "in how far their word goes, and nothing said on their prompts is trained or tested on.",
    )
    redact: bool = Field(
        True,
        description="Take e-mails, phones, cards, IBANs, US social security numbers, keys and IPs "
        "out of what is trained on.",
    )
    phone_regions: tuple[str, ...] = Field(
        ("US", "GB", "DE", "FR"),
        description="Where a phone number may stand without its country's code, each as two "
        "letters (ISO 3166); with it any country's is found. Of a region whose numbers begin with "
        "no 0 (ES, DK), ordinary numbers in the same groups are taken out too.",
    )
    votes_per_minute: Positive | None = Field(
        120,
        description="Of one rater to one agent over HTTP, and as many at once after a pause; more "
        "is 429. None: no limit. Votes of models and code, and unsigned ones, count for their key.",
    )
    drop_folder: str = Field(
        "inbox", description="Folder in the state whose JSONL files are taken."
    )
    names: FileNames = Field(
        FileNames(),
        description="Of files in the inbox, on the Files page and for `rlhf ingest`.",
    )

    @field_validator("phone_regions")
    @classmethod
    def _regions_are_known(cls, regions: tuple[str, ...]) -> tuple[str, ...]:
        from rlhf_pipeline.feedback.privacy import unknown_regions

        if unknown := unknown_regions(regions):
            raise ValueError(
                "needed regions in two capitals whose phone numbers are known (US, ES, ...), "
                f"found {', '.join(unknown)[:200]}; name others"
            )
        return regions


class ValidationSettings(Section):
    """When a snapshot is fit for training."""

    min_rows: int = Field(10, ge=1, description="Clean rows below which nothing is trained.")
    max_prompt_characters: Positive = Field(20_000, description="A longer one goes to quarantine.")
    max_completion_characters: Positive = Field(
        20_000, description="A longer one goes to quarantine."
    )
    narrow_support: Literal["quarantine", "report"] = Field(
        "quarantine",
        description="What becomes of pairs decided by words whose success few raters carry "
        "(feedback/support.py); where they are only reported, a person decides on promotion.",
    )
    top_raters_share: Share = Field(
        0.10,
        description="Of the votes, by the hundredth of the raters who gave most; above it a person "
        "decides on promotion.",
    )


class DriftSettings(Section):
    """When feedback has changed so much that promotion waits for a person."""

    threshold_psi: Annotated[float, Field(gt=0)] = Field(
        0.2,
        description="Population stability index of any feature of the votes since the last turn; "
        "above it promotion is manual.",
    )


class RewardShares(Section):
    """Which part of the voters each reward model learns from; they never share one."""

    proxy: Share = Field(0.6, description="Of the voters, for the one that PPO maximises.")
    stopping: Share = Field(
        0.2, description="Of the voters, for the one that chooses the checkpoint."
    )
    gate: Share = Field(0.2, description="Of the voters, for the one that judges the candidate.")

    def by_job(self) -> dict[Literal["proxy", "stopping", "gate"], float]:
        """Return each reward model's part of the voters."""
        return {"proxy": self.proxy, "stopping": self.stopping, "gate": self.gate}

    @model_validator(mode="after")
    def _sum_to_one(self) -> RewardShares:
        total = self.proxy + self.stopping + self.gate
        if abs(total - 1) > 1e-6 or min(self.proxy, self.stopping, self.gate) <= 0:
            raise ValueError(f"shares must be positive and sum to 1, found {total:g}")
        return self


Trains = Literal["preference", "correction", "thumbs", "rating", "score", "criteria"]
PAIRS_ALONE: Mapping[Trains, float] = {"preference": 1.0, "correction": 1.0}


def _check_functions(functions: Mapping[str, FunctionSettings]) -> None:
    from rlhf_pipeline.reward.named import check_function  # may run a module of one's own

    for name, one in functions.items():
        try:
            check_function(name, one)
        except ModelError as error:
            raise ValueError(f"functions.{name}: {error}") from error


class RewardSettings(Section):
    """The three reward models."""

    kinds: Mapping[Trains, Annotated[float, Field(gt=0)]] = Field(
        default_factory=lambda: dict(PAIRS_ALONE),
        description="Kinds of feedback the score is learnt from, with the weight of each in the "
        "loss, and judged by where pairs are few.",
    )

    base: str | None = Field(
        None,
        description="A folder or a hub id whose trunk the reward models begin with, causal or an "
        "encoder (BERT, RoBERTa, DeBERTa, ...); unset: the baseline's. It reads text with its own "
        "tokenizer, and a separate critic then begins with the policy instead.",
    )
    reads: Literal["first", "last", "mean"] | None = Field(
        None,
        description="What the head judges: an encoder's first token, a causal base's last, or the "
        "mean of all; unset: the first or the last, and the mean where a head is fitted first.",
    )
    shares: RewardShares = RewardShares()
    min_pairs: Positive = Field(30, description="Training pairs each of the three needs.")
    reads_likelihood: bool = Field(
        False,
        description="The head also reads how likely the baseline finds the completion: relevance "
        "for small bases that learn little of it from votes. Causal bases only.",
    )
    weigh_raters: bool = Field(
        True,
        description="Let each pair count as far as its rater's word goes: by whether their votes "
        "are foreseen by everybody else's (reward/raters.py).",
    )
    heads: Positive = Field(
        1,
        description="Above 1: so many heads on a frozen trunk, each fitted to a part of the "
        "raters; costs accuracy, and few raters then move the score little.",
    )
    combine: Literal["median", "mean", "pessimistic"] = Field(
        "median",
        description="How several heads' scores become one; pessimistic is the mean less "
        "disagreement_weight times their deviation.",
    )
    disagreement_weight: Annotated[float, Field(ge=0)] = Field(
        1.0, description="How much disagreement a pessimistic score loses by."
    )
    freeze_trunk: bool = Field(False, description="Train only heads on the policy's features.")
    warm_start: bool = Field(
        False,
        description="Begin with the turn before's reward models rather than with their base, where "
        "they are made alike and no conversation or rater has changed sides "
        "(feedback.evaluation_share, reward.shares); heads on a frozen trunk are fitted anew. "
        "Leave it off for a turn after changing reward.base.",
    )
    retrain_drop: Share | None = Field(
        None,
        description="Use the turn before's reward models again until their accuracy on the votes "
        "since they were trained is so much below what it was found to be, and surely below, or "
        "the settings they were made by change. Those that votes on single answers judge are "
        "trained every turn, and None trains all.",
    )
    given: str | None = Field(
        None,
        description="A folder with proxy/, stopping/ and gate/ as a turn leaves them: used as they "
        "are, and nothing is trained.",
    )
    freeze_judges: bool = Field(
        False, description="The same for the stopping and the gate model alone: quicker."
    )
    lora_rank: int = Field(
        0,
        ge=0,
        description="Above 0: adapters on the baseline's trunk instead of a trunk of its own each; "
        "a PPO run with adapters then keeps one base in memory for all.",
    )
    epochs: Positive = Field(2, description="Passes over the training pairs.")
    learning_rate: Rate = Field(3e-4, description="Of AdamW, at its highest.")
    batch_size: Positive = Field(32, description="Pairs per optimizer step.")
    functions: Annotated[
        Mapping[Annotated[str, Field(pattern=r"^[\w.:-]+$")], FunctionSettings],
        BeforeValidator(spelt_out),
    ] = Field(
        default_factory=dict,
        description="What PPO maximises beside the learned reward (`learned`): each name with its "
        "weight, normalisation, floor and options; `learned:safety` is a criterion that people "
        "rate. `reward.preset` fills it in.",
    )

    wish_bound: Share = Field(
        0.0,
        description="How much of a function's weight may be added where its `wish` is what people "
        "tick; the share of people who do is the share of this that is added.",
    )

    @property
    def weights(self) -> dict[str, float]:
        """Return `kinds` as the engine takes them: the weight of each by its name."""
        return {str(kind): weight for kind, weight in self.kinds.items()}

    @property
    def reads_every_kind(self) -> bool:
        """Say whether more than plain pairs is learnt from."""
        return dict(self.kinds) != PAIRS_ALONE

    @property
    def looks_back(self) -> bool:
        """Say whether reward models may begin from those of the turn before, or be them."""
        return self.warm_start or self.retrain_drop is not None

    @model_validator(mode="after")
    def _functions_are_known(self) -> RewardSettings:
        if self.functions:
            _check_functions(self.functions)
            if all(one.weight == 0 for one in self.functions.values()) and (
                LEARNED in self.functions
            ):
                raise ValueError("functions must hold one that counts, found weights of 0 alone")
        return self

    @model_validator(mode="after")
    def _heads_read_a_frozen_trunk(self) -> RewardSettings:
        if self.heads > 1 and not self.freeze_trunk:
            raise ValueError(
                f"several heads need freeze_trunk true, found {self.heads} heads and freeze_trunk "
                "false; change one of them"
            )
        return self

    @model_validator(mode="after")
    def _the_first_token_is_an_encoders(self) -> RewardSettings:
        if self.reads == "first" and self.base is None and self.given is None:
            raise ValueError(
                "reads first needs a base of its own, an encoder, found none, and the baseline's "
                "trunk is causal; name one in base, set reads to last or mean, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _something_is_learnt_from(self) -> RewardSettings:
        if not self.kinds:
            raise ValueError("kinds must name at least one kind of feedback, found none")
        return self


class TrainingSettings(Section):
    """How training runs."""

    enabled: bool = Field(True, description="False: no turn begins.")
    stage_timeout_minutes: Positive = Field(
        720, description="A stage that takes longer is stopped."
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**31,  # numpy takes 32 bits, and what counts on from it needs room
        description="Of everything that is drawn; another one is another training.",
    )
    simulated_user: Literal["shop"] | None = Field(
        None,
        description="Who answers the assistant where ppo.max_turns is above 1: `shop` is a "
        "customer of the simulated world. Other users are passed to train_ppo.",
    )
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        (),
        description="Where the metrics of every update go beside MLflow: tensorboard (files in "
        "the turn's ppo/tracking), wandb.",
    )
    watch_prompts: Positive = Field(128, description="Prompts the stopping reward is measured on.")
    dagster_url: str = Field(
        "http://127.0.0.1:3000",
        pattern=PAGE,
        description="Where the service asks for training runs: Dagster's page.",
    )


class PairJudgeSettings(Section):
    """A language model that says which of two completions is better, asked in both orders."""

    url: Endpoint
    model: str = Field(min_length=1, description="The model's name there.")
    question: str = Field(
        "Which answer helps the person more, and is right, harmless and to the point?",
        min_length=1,
        description="What it decides by.",
    )
    prompts: Positive = Field(100, description="Held-out prompts it is asked about, at most.")
    key_variable: str | None = Field(
        None, description="Environment variable that holds the API key; None: no key."
    )
    at_once: Positive = Field(4, description="Requests under way at the same time.")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        60.0, description="For its answer to one question."
    )
    structured: bool = Field(
        True, description="Ask for the verdict's schema; false for servers that refuse that."
    )


class EvaluationSettings(Section):
    """How a candidate is compared."""

    prompts: Positive = Field(400, description="Held-out prompts, at most.")
    bootstrap_samples: Positive = Field(2000, description="Resamples behind each interval.")
    samples_shown: Positive = Field(30, description="Prompts shown with every system's answer.")
    judge: PairJudgeSettings | None = Field(
        None,
        description="Whom to ask which of two answers is better, beside the reward models; prompts "
        "and answers go to its address.",
    )
    titles: str | None = Field(
        None,
        description="A JSON file with the items whose share of the words is counted: titles, or "
        "{title: [words about it]}. None: any Title (1999) or @12345 is one.",
    )
    behaviour_tries: int = Field(
        8,
        ge=0,
        le=1000,
        description="Completions of each behaviour item by each system; 0 leaves the items out.",
    )


class PromotionSettings(Section):
    """Who decides, and by which limits."""

    automatic: bool = Field(
        False, description="False asks a person; a refusal is always automatic."
    )
    watch_days: Annotated[Days, Field(ge=0)] = Field(
        7.0,
        description="From the first answer after a promotion, in which a champion that fails as "
        "often as ends an experiment (experiments.trouble_share), the champion before it in the "
        "champion's place, is rolled back, once; 0: never.",
    )
    gate: Mapping[str, Annotated[float, Field(allow_inf_nan=True)] | None] = Field(
        default_factory=dict,
        description="Limits that differ from the gate's defaults, by rule; null or .inf switches "
        "one off.",
    )

    @field_validator("gate")
    @classmethod
    def _off_is_null(cls, gate: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return an infinite limit as none: turns are described in JSON, which knows no other."""
        found = {}
        for name, limit in gate.items():
            if limit is not None and math.isnan(limit):
                raise ValueError(
                    f"the limit of {name} must be a number, found nan; correct it or set null "
                    "for off"
                )
            found[name] = None if limit is None or math.isinf(limit) else limit
        return found

    @model_validator(mode="after")
    def _gate_names_rules(self) -> PromotionSettings:
        if self.gate:
            from rlhf_pipeline.evaluation.gate import (
                DEFAULT_RULES,
            )  # imports numpy: only where needed

            known = [rule.name for rule in DEFAULT_RULES]
            for name in self.gate:
                if name not in known:
                    near = difflib.get_close_matches(name, known, n=1, cutoff=0)
                    raise ValueError(
                        f"the gate has no rule {name!r}; the nearest right one is {near[0]!r}, "
                        f"all are {', '.join(known)}"
                    )
        return self


class ContinuousLearningSettings(Section):
    """When the next turn starts by itself."""

    enabled: bool = Field(True, description="False: a turn begins where somebody asks for it.")
    min_new_feedback: Positive = Field(100, description="Effective votes that start a turn.")
    min_age_seconds: Seconds = Field(
        60.0,
        description="Quiet time after the newest vote, so that a burst is taken whole; where votes "
        "never pause, those that have waited ten times as long are taken.",
    )
    cool_down_minutes: Minutes = Field(
        60.0, description="Between the end of one turn and the start of the next."
    )
    nightly_cron: Cron = Field("0 2 * * *", description="In UTC.")
    deadline_minutes: Annotated[Positive, Field(le=60 * 24 * 36_500)] = Field(
        480, description="A run that takes longer is ended."
    )
    gpu_minutes_per_night: Positive = Field(480, description="Turns start only within this budget.")
    max_attempts: Positive = Field(3, description="Tries at one fingerprint before a person looks.")


class ExperimentSettings(Section):
    """Live A/B between champion and challenger."""

    enabled: bool = Field(
        False,
        description="A version the gate let through meets people in an experiment before it is "
        "promoted; needs people who chat through `rlhf serve`.",
    )
    ramp: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (0.01, 0.05, 0.10, 0.25, 0.50),
        min_length=1,
        description="Shares of the users that meet the challenger, one step after the other.",
    )
    users_per_step: Positive = Field(
        30,
        description="Challenger users at a step of the ramp before the next; where so many do not "
        "come, fewer do after a while: all steps but the last together take half the days at most.",
    )
    minutes_per_step: Minutes = Field(60.0, description="That a step of the ramp lasts at least.")
    days: Annotated[Days, Field(gt=0)] = Field(
        14.0,
        description="Then the champion stays; a day or more in which the daemon was off is no "
        "part of them.",
    )
    promote: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.05, description="Largest chance to promote a challenger that is no better."
    )
    roll_back: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.01, description="Largest chance to roll back one that is within every margin."
    )
    give_up: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.005,
        description="Chance that it is promoted in the days left, below which an experiment ends "
        "and the next turn may start; 0: it lasts all its days.",
    )
    margins: Mapping[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="How much worse a challenger may be and still be promoted, by guardrail, as a "
        "share; one that is surely beyond is rolled back. Those not named: thumbs_down 0.05, "
        "feedback_rate 0.1, fallbacks 0.02, truncated 0.05, refusals 0.05, slow 0.05, length 0.1.",
    )
    people_per_network: Positive | None = Field(
        1,
        description="As how many people all who chat at /ui/ from one network count at most: their "
        "votes are averaged, and words that they alone let win are set apart (validation."
        "narrow_support). More where your people share few addresses, null: everybody counts.",
    )
    slow_seconds: Annotated[float, Field(gt=0)] = Field(
        10.0, description="An answer that takes longer counts as slow."
    )
    long_words: Positive = Field(400, description="A completion of so many words has length 1.")
    # At 20, a challenger that fails at 2 % of its answers, as the champion does, is rolled back in
    # six of ten experiments of 10,000 answers; at 50 in hardly any, and one that always fails after
    # ten answers.
    trouble_answers: Positive = Field(
        50,
        description="Latest answers of the challenger, and people it answered, that the hard "
        "trigger looks at.",
    )
    trouble_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2,
        description="Share of either at which it failed, beyond twice what the champion fails at: "
        "rolled back at once.",
    )

    @model_validator(mode="after")
    def _ramp_rises(self) -> ExperimentSettings:
        if list(self.ramp) != sorted(set(self.ramp)):
            raise ValueError(f"the ramp must rise from step to step, found {list(self.ramp)}")
        if not self.margins:
            return self
        from rlhf_pipeline.experiment.decision import GUARDRAILS  # imports numpy: only here

        known = [metric.name for metric in GUARDRAILS]
        if unknown := sorted(set(self.margins) - set(known)):
            raise ValueError(
                f"margins are for guardrails, found {', '.join(unknown)}; all are "
                f"{', '.join(known)}"
            )
        return self


class PagesSettings(Section):
    """What the chat page asks of people."""

    collection_rate: Share = Field(
        0.3, description="Part of the answers people are asked about; thumbs are always there."
    )
    active_learning: bool = Field(
        True, description="Sample two answers more, and ask, or show a pair, where they differ."
    )
    reward_disagreement: bool = Field(
        True,
        description="Do so too where the heads of the champion's reward model differ, if it has "
        "several; that model is then held in memory beside the champion.",
    )
    mlflow_url: str | None = Field(
        None,
        pattern=PAGE,
        description="MLflow's page, for links to versions. None: mlflow_uri, where that is a page.",
    )
    log_traces: bool = Field(
        False,
        description="Log each answer as an MLflow trace, and take what people say of it there.",
    )
    assessments: tuple[str, ...] | None = Field(
        None,
        description="Names of what people say there that counts, as [thumbs, expected_response]: "
        "a no to too_long speaks for the answer, and would count against it. None: every name.",
    )


class GuardrailSettings(Section):
    """What the chat service lets in and out; null or an empty list switches a rule off."""

    unsafe_requests: tuple[str, ...] = Field(
        UNSAFE,
        description="Regular expressions, case ignored, that a user's newest message must not "
        "match; the baseline answers instead. A list catches words, not intentions.",
    )
    max_prompt_characters: Positive = Field(
        20_000, description="All messages of a request together."
    )
    max_completion_characters: Positive | None = Field(
        20_000, description="A longer one is blocked; None: no limit."
    )
    pii: bool = Field(
        True,
        description="Block completions with an email address, phone, card, key or IP address that "
        "the request did not hold.",
    )
    max_repeats: Positive | None = Field(
        8,
        description="How often in a row a completion may say the same words, up to a line of them. "
        "Numbers, tables' rules and ruling lines are no words.",
    )
    release: Literal["words", "whole"] = Field(
        "words",
        description="What a stream may show before all is checked: `words` shows each once it is "
        "whole, and can only be cut when a later one is blocked; `whole` waits, so that the "
        "baseline can still answer.",
    )

    @model_validator(mode="after")
    def _expressions_compile(self) -> GuardrailSettings:
        for expression in self.unsafe_requests:
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(
                    f"unsafe_requests needs regular expressions, found {expression!r}: {error}; "
                    "correct it"
                ) from error
        return self


class UpstreamSettings(Section):
    """An OpenAI-compatible server that answers for an agent instead of a model in this process."""

    url: Endpoint
    model: str = Field(
        description="The model's name there. `{version}` in it stands for a version's number: the "
        "champion's, or that of the newest champion before it which the upstream serves."
    )
    version: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="The ledger's version it serves, where its name does not say; None: none of "
        "the ledger's.",
    )
    key_variable: str | None = Field(
        None, description="Environment variable that holds the API key; None: no key."
    )

    @model_validator(mode="after")
    def _version_is_said_once(self) -> UpstreamSettings:
        if set("{}") & set(self.model.replace("{version}", "")):
            raise ValueError(
                f"model needs no brace but those of {{version}}, found {self.model!r}; correct it"
            )
        if self.version is not None and "{version}" in self.model:
            raise ValueError(
                f"model or version must say which version is served, found both ({self.model!r} "
                f"and {self.version}); leave the version out"
            )
        return self


class ServingSettings(Section):
    """The chat service."""

    batch_rows: Positive = Field(16, description="Requests that decode together on one model.")
    admission_limit: Positive = Field(
        32, description="Requests answered or waiting at once; the next ones are refused with 429."
    )
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        60.0, description="After which the champion is given up, and then the baseline."
    )
    patience_seconds: Annotated[float, Field(gt=0)] = Field(
        5.0,
        description="Whoever leaves after so long without a word of an answer was failed by who "
        "was to give it, as by one that broke off; sooner, they thought better of it.",
    )
    upstreams: Mapping[Annotated[str, Field(pattern=f"^{AGENT_ID.pattern}$")], UpstreamSettings] = (
        Field(default_factory=dict, description="By agent: where its champion is served instead.")
    )
    guardrails: GuardrailSettings = GuardrailSettings()

    @property
    def longest_answer(self) -> float:
        """Return the seconds that an answer may take: the champion's, and then the baseline's."""
        return 2 * self.timeout_seconds


class NotificationSettings(Section):
    """Who hears of failures and alerts: the log always, a webhook where one is set."""

    webhook: Annotated[SecretStr, AfterValidator(_is_address)] | None = Field(
        None, description="Its address; better by RLHF_WEBHOOK, as it may be a secret."
    )


class AlertSettings(Section):
    """From when on something is worth a person's look."""

    quiet_hours: Annotated[Hours, Field(gt=0)] = Field(
        48.0, description="Without a vote, where there were votes in the last 30 days."
    )
    refused_in_a_row: Positive = Field(3, description="Newest versions that the gate all refused.")
    overdue_days: Annotated[Days, Field(gt=0)] = Field(
        7.0, description="While enough votes for a turn wait and none begins."
    )
    busiest_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.10, description="Of the signed votes, by the busiest hundredth of 100 people or more."
    )
    network_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5,
        description="Of the newest people at /ui/, from one network, where they count together.",
    )
    disk_gib: Annotated[float, Field(ge=0)] = Field(1.0, description="Free where the state lies.")


class SpecialistSettings(Section):
    """One of several agents that `rlhf specialise` trains around one critic."""

    functions: Annotated[
        Mapping[Annotated[str, Field(pattern=r"^[\w.:-]+$")], FunctionSettings],
        BeforeValidator(spelt_out),
        Field(min_length=1),
    ] = Field(description="What this agent maximises, as in reward.functions, without `learned`.")
    prompts: str = Field(
        "simulated",
        description="A JSONL file of prompts, with references where a function compares; or "
        "simulated, or simulated:TOPIC,TOPIC, of the simulated world.",
    )
    count: Positive = Field(512, description="How many, of simulated ones.")
    kl_coef: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Weight of staying near its reference. None: ppo.kl_coef."
    )

    @model_validator(mode="after")
    def _functions_are_known(self) -> SpecialistSettings:
        _check_functions(self.functions)
        for name, one in self.functions.items():
            if (one.function or name).partition(":")[0] == LEARNED:
                raise ValueError(
                    "a specialist has no reward model of its own, found the function `learned`; "
                    "name a reward model's folder instead"
                )
        return self


class KeptSettings(Section):
    """What stays of one kind: the newest, however old, and the young, however many."""

    newest: int = Field(ge=0, description="So many of each agent stay.")
    days: Days = Field(description="Nothing younger goes.")


class RetentionSettings(Section):
    """What is removed by schedule; nothing that the ledger points at ever is (retention.py)."""

    enabled: bool = Field(True, description="False: `rlhf prune` alone removes anything.")
    cron: Cron = Field(
        "30 4,10,16,22 * * *",
        description="When the daemon prunes, in UTC; agents that are being trained then are left "
        "to the next time.",
    )
    checkpoints: KeptSettings = Field(
        KeptSettings(newest=1, days=7), description="Of turns that came to their verdict."
    )
    rewards: KeptSettings = Field(
        KeptSettings(newest=5, days=30),
        description="Reward models of versions that never were champion; their reports stay.",
    )
    turns: KeptSettings = Field(
        KeptSettings(newest=3, days=30),
        description="Turns that came to no version: snapshot, folders and MLflow runs.",
    )
    traces: KeptSettings = Field(
        KeptSettings(newest=10_000, days=90),
        description="Chats in MLflow; 30 days at least, so that people can vote on them.",
    )
    runs: KeptSettings = Field(
        KeptSettings(newest=50, days=30),
        description="Dagster's finished runs, with their events and logs.",
    )
    chats: KeptSettings = Field(
        KeptSettings(newest=100_000, days=730),
        description="Answers that nobody said anything about; 30 days at least, as for traces.",
    )
    looks: KeptSettings = Field(
        KeptSettings(newest=10, days=365),
        description="Looks at experiments that ended, the last one apart; `newest` experiments.",
    )
    events: KeptSettings = Field(
        KeptSettings(newest=10_000, days=365),
        description="What the chat blocked and what failed it.",
    )
    quarantine: KeptSettings = Field(
        KeptSettings(newest=1_000, days=365),
        description="Lines in quarantine, since a person dealt with them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _what_is_left_out_is_as_usual(cls, told: Any) -> Any:
        if not isinstance(told, Mapping):
            return told
        usual = {name: field.default for name, field in cls.model_fields.items()}
        return {
            name: {**usual[name].model_dump(), **one}
            if isinstance(usual.get(name), KeptSettings) and isinstance(one, Mapping)
            else one
            for name, one in told.items()
        }

    @model_validator(mode="after")
    def _answers_outlast_their_votes(self) -> RetentionSettings:
        for name in ("traces", "chats"):
            days = getattr(self, name).days
            if days < 30:
                raise ValueError(
                    f"{name}.days must be 30 or more, found {days:g}: people need so long to vote "
                    "on them"
                )
        return self


class Settings(Section):
    """The whole tree."""

    recipe: str = "defaults"
    state_dir: Annotated[Path, AfterValidator(_absolute)] = Field(
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
    pages: PagesSettings = PagesSettings()
    serving: ServingSettings = ServingSettings()
    notifications: NotificationSettings = NotificationSettings()
    alerts: AlertSettings = AlertSettings()
    specialists: Mapping[Annotated[str, Field(pattern=r"^[\w-]+$")], SpecialistSettings] = Field(
        default_factory=dict, description="Agents of `rlhf specialise`, by name."
    )
    retention: RetentionSettings = RetentionSettings()

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> Settings:
        if self.policy.base == "tiny" and self.sft.lora_rank:
            raise ValueError(
                "sft.lora_rank adapts a model that knows something; policy.base tiny starts from "
                f"nothing: needed sft.lora_rank 0, found {self.sft.lora_rank}; change one of them"
            )
        return self

    @model_validator(mode="after")
    def _specialists_have_folders_of_their_own(self) -> Settings:
        for name in self.specialists:
            if name.casefold() in ("sft", "checkpoints"):
                raise ValueError(
                    "a specialist's name is its folder, beside the baseline's, sft, and "
                    f"checkpoints: needed another than these, found {name!r}; rename it"
                )
        return self

    @property
    def resolved_database_url(self) -> str:
        """Return the database's URL, the embedded one where none is set.

        Raises ConfigError where the embedded one lies in another place, as `_embedded` says.
        """
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return _embedded(self.state_dir / "feedback.db")

    @property
    def resolved_mlflow_uri(self) -> str:
        """Return MLflow's tracking URI, the embedded one where none is set, as for the database."""
        return self.mlflow_uri or _embedded(self.state_dir / "mlflow" / "mlflow.db")

    @property
    def mlflow_folder(self) -> Path:
        """Return where an embedded MLflow keeps its files, and the registry its copies."""
        return self.state_dir.resolve() / "mlflow"

    def agent_folder(self, agent_id: str) -> Path:
        """Return where an agent's snapshots, turns and baseline are kept."""
        return self.state_dir / "agents" / agent_id

    def inbox_folder(self, agent_id: str) -> Path:
        """Return where files for an agent are dropped."""
        return self.state_dir / self.feedback.drop_folder / agent_id

    def inbox_lock(self, agent_id: str) -> Path:
        """Return the file that is locked while an agent's dropped files are read or written anew.

        Not among them: others may write there.
        """
        return self.agent_folder(agent_id) / "inbox.lock"

    def turn_folder(self, agent_id: str, fingerprint: str, verdicts: int = 0) -> Path:
        """Return where a turn trains. One asked for again, after so many verdicts, gets its own:
        the model in the earlier folder is registered, and may be the champion.
        """
        name = fingerprint[:16] if verdicts == 0 else f"{fingerprint[:16]}-{verdicts + 1}"
        return self.agent_folder(agent_id) / "turns" / name


def _is_ours(path: Path) -> bool:
    """Say whether it is a database of votes, or of MLflow; whoever else writes may have one too."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = database.execute("SELECT name FROM sqlite_master").fetchall()
    except sqlite3.Error:  # there is none
        return False
    return not {"feedback", "experiments"}.isdisjoint(name for (name,) in tables)


def _embedded(path: Path) -> str:
    """Return the URL of an embedded database.

    Raises ConfigError where there is none but in the folder that releases before this one wrote to,
    which read %41 in a folder's name as A: an empty one would be begun beside it.
    """
    former = sqlite_path(f"{SQLITE}{path}")
    if former is not None and former != path and not path.exists() and _is_ours(former):
        raise ConfigError(
            f"needed the database {path}, found {former}, where an earlier release kept it; end "
            "what uses it and move it there with its -wal and -shm, or name that folder with "
            "--state or RLHF_STATE_DIR"
        )
    return sqlite_url(path)


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


_PPO = TypeAdapter(PpoSettings)
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
SECRETS = ("database_url", "mlflow_uri", "notifications")  # their values stand in no message
BY_NAME = "needed values by name (`name: value`)"
# To the last @ before the path: up to there all is the password, where one was not written as %40.
PASSWORD = re.compile(r"(://[^/:\s]*:)[^/\s]*@")


def load_settings(
    recipe: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """Return the resolved settings of a recipe: a name in recipes/, or a path to a YAML file.

    Raises ConfigError for a recipe that is not there, and for every key nobody knows (with the
    nearest right one), value out of range and contradiction at once.
    """
    name = recipe if recipe is not None else os.environ.get("RLHF_RECIPE") or "tiny"
    environment = {
        "state_dir": os.environ.get("RLHF_STATE_DIR"),
        "database_url": os.environ.get("RLHF_DATABASE_URL"),
        "mlflow_uri": os.environ.get("RLHF_MLFLOW_URI"),
    }
    faults: list[str] = []
    tree = _merged(_read_recipe(name, faults), {key: v for key, v in environment.items() if v})
    if dagster := os.environ.get("RLHF_DAGSTER_URL"):
        tree = _merged(tree, {"training": {"dagster_url": dagster}})
    if page := os.environ.get("RLHF_MLFLOW_URL"):
        tree = _merged(tree, {"pages": {"mlflow_url": page}})
    if webhook := os.environ.get("RLHF_WEBHOOK"):
        tree = _merged(tree, {"notifications": {"webhook": webhook}})
    settings = _checked({"recipe": str(name), **_merged(tree, overrides or {})}, faults)
    if settings is None or faults:
        numbered = [f"({number}) {fault}" for number, fault in enumerate(faults, 1)]
        raise ConfigError(f"recipe {name}: {'; '.join(numbered if len(faults) > 1 else faults)}")
    return settings


def own_settings(settings: Settings, recipe: str | None) -> Settings:
    """Return the settings of an agent's own recipe; without one these.

    Where things are kept is no agent's own: state, database and MLflow stay where these have them.
    Nor is who is answered elsewhere: the service goes by the recipe that it is started with.
    """
    if recipe is None:
        return settings
    places = ("state_dir", "database_url", "mlflow_uri")
    own = load_settings(recipe, {name: getattr(settings, name) for name in places})
    serving = own.serving.model_copy(update={"upstreams": settings.serving.upstreams})
    return own.model_copy(update={"serving": serving})


@contextmanager
def _noting(faults: list[str]) -> Iterator[None]:
    """Add what the block finds wrong to the faults, and go on: people mend all of it at once."""
    try:
        yield
    except ConfigError as error:
        faults.append(str(error))


def _checked(tree: Mapping[str, Any], faults: list[str]) -> Settings | None:
    """Return the tree as settings; None, with the faults added, where some part of it is none."""
    own = {} if tree.get("ppo") is None else tree["ppo"]
    if not isinstance(own, Mapping):
        faults.append(f"ppo must hold settings by name, found {own!r}; see `rlhf config show`")
        own = {}
    faults += [
        f"ppo.{key} follows {home}, which other stages share; set {home}"
        for key, home in SHARED_WITH_PPO.items()
        if key in own
    ]
    others = {key: value for key, value in tree.items() if key != "ppo"}
    rest = _validated(Settings.model_validate, others, faults)
    # Where nobody knows the lengths, none is so long that it would be a fault of its own.
    shared = _shared(rest) if rest else {"max_prompt_tokens": 1, "max_completion_tokens": 1}
    ppo = _validated(_PPO.validate_python, {**own, **shared}, faults, "ppo.")
    if rest is None or ppo is None:
        return None
    settings = rest.model_copy(update={"ppo": ppo})
    faults += _words_for_numbers(tree, settings.model_dump())
    faults += _contradictions(settings)
    return settings


def _validated(
    validate: Callable[[Any], T], tree: Mapping[str, Any], faults: list[str], section: str = ""
) -> T | None:
    """Return what is made of the tree, or None, with the faults added.

    Keys nobody knows are told and left out: what else is wrong with the rest is told as well.
    """
    try:
        return validate(tree)
    except ConfigError as error:  # PPO's own checks
        faults.append(str(error))
    except ValidationError as error:
        problems = error.errors()
        unknown = [problem for problem in problems if problem["type"] in UNKNOWN]
        faults += [_explain(problem, section) for problem in unknown or _told_once(problems)]
        known = without(tree, [problem["loc"] for problem in unknown])
        if unknown and known != tree:
            return _validated(validate, known, faults, section)
    return None


def _told_once(problems: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the problems less those of lists that are too short for want of a value told below."""
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem, place in zip(problems, places, strict=True)
        if problem["type"] != "too_short"
        or not any(len(p) > len(place) and p[: len(place)] == place for p in places)
    ]


def without(tree: Any, places: Sequence[tuple[Any, ...]]) -> Any:
    """Return the tree without the keys at these places, as pydantic names them."""
    if not isinstance(tree, Mapping):
        return tree
    return {
        key: without(value, [place[1:] for place in places if place[0] == key and place[1:]])
        for key, value in tree.items()
        if (key,) not in places
    }


def _words_for_numbers(given: Any, made: Any, place: str = "") -> Iterator[str]:
    """Yield where a number was made of a truth value, as YAML makes those of some words.

    A gate's rule that was to be `off` would be a limit of 0, which refuses nearly everything.
    """
    if isinstance(given, Mapping) and isinstance(made, Mapping):
        for key in (key for key in given if key in made):
            yield from _words_for_numbers(given[key], made[key], f"{place}.{key}".lstrip("."))
    elif isinstance(given, Sequence) and isinstance(made, Sequence):
        for n, (one, other) in enumerate(zip(given, made, strict=False)):
            if not isinstance(one, str):
                yield from _words_for_numbers(one, other, f"{place}.{n}")
    elif isinstance(given, bool) and isinstance(made, int | float) and made is not given:
        words = "on or yes" if given else "off or no"
        yield (
            f"{place}: needed a number, found {str(given).lower()}, as YAML reads {words}; write "
            "the number, or null where the setting can be switched off"
        )


def _shared(settings: Settings) -> dict[str, Any]:
    """Return what PPO shares with the other stages, from where it is set."""
    policy = settings.policy
    return {
        "max_prompt_tokens": policy.max_prompt_tokens,
        "max_completion_tokens": policy.max_completion_tokens,
        "temperature": policy.temperature,
        "precision": policy.dtype,
        "device": policy.device,
        "lora_rank": policy.lora.rank if policy.lora.enabled else 0,
        "lora_alpha": policy.lora.alpha,
        "seed": settings.training.seed,
    }


def _contradictions(settings: Settings) -> Iterator[str]:
    """Yield where PPO and another section, each fine by itself, do not go together."""
    if settings.reward.functions and settings.ppo.estimator == "dpo":
        yield (
            "reward.functions are for what samples completions, found ppo.estimator dpo, which "
            "learns from pairs alone; take gae or rloo, or no functions"
        )
    functions = settings.reward.functions
    if functions and settings.ppo.max_turns > 1:
        from rlhf_pipeline.reward.named import needs_references  # imports numpy

        if needs_references(functions):
            yield (
                "reward.functions that compare with references know those of first turns alone, "
                f"found ppo.max_turns {settings.ppo.max_turns}; leave them out, or set it to 1"
            )
    asked = [
        name for name, one in functions.items() if (one.function or name).startswith(CRITERION)
    ]
    if asked and "criteria" not in settings.reward.kinds:
        yield (
            f"{', '.join(asked)} of reward.functions is learned from votes by criteria, found none "
            f"in reward.kinds ({', '.join(settings.reward.kinds) or 'empty'}); give criteria a "
            "weight there, or leave the function out"
        )
    turns, user = settings.ppo.max_turns, settings.training.simulated_user
    if (turns > 1) != (user is not None):
        yield (
            "ppo.max_turns above 1 and training.simulated_user come together, found "
            f"{turns} and {user}; set both or neither"
        )


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the project, smallest model first."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    return sorted(names, key=lambda n: BY_SIZE.index(n) if n in BY_SIZE else len(BY_SIZE))


def shown(settings: Settings) -> dict[str, Any]:
    """Return the resolved tree as plain values, secrets masked: what a run keeps."""
    values: dict[str, Any] = settings.model_dump(mode="json")
    if settings.mlflow_uri is not None:
        values["mlflow_uri"] = masked(settings.mlflow_uri)
    return values


def masked(text: str) -> str:
    """Return a text with the passwords of the addresses in it masked."""
    return PASSWORD.sub(r"\1**********@", text)


def models_named(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return what each setting says that names a model, of a recipe as plain values.

    What is named may be a folder, or a hub id, a function or an address.
    """
    reward = recipe.get("reward", {})
    named = {
        "policy.base": recipe.get("policy", {}).get("base"),
        "reward.base": reward.get("base"),
        "reward.given": reward.get("given"),
    }
    for name, one in reward.get("functions", {}).items():
        named[f"reward.functions.{name}"] = one.get("function") or name
    return {name: said for name, said in named.items() if said}


def unlike_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resolved tree, as `shown` gives it, has otherwise than the defaults, by name.

    Its own name and its state folder are left out, and what PPO shares is told once, at its home.
    """

    def walk(values: Mapping[str, Any], usual: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        plain = _plain(usual)
        for key, value in values.items():
            inner = getattr(usual, key, None)
            if isinstance(value, Mapping) and (isinstance(inner, Section) or is_dataclass(inner)):
                yield from walk(value, inner, f"{prefix}{key}.")
            elif key not in plain or plain[key] != value:
                yield f"{prefix}{key}", value

    left_out = {"recipe", "state_dir", *(f"ppo.{key}" for key in SHARED_WITH_PPO)}
    return {key: value for key, value in walk(tree, Settings(), "") if key not in left_out}


def _plain(part: Any) -> dict[str, Any]:
    values: dict[str, Any] = TypeAdapter(type(part)).dump_python(part, mode="json")
    return values


def _read_recipe(name: str | Path, faults: list[str]) -> dict[str, Any]:
    """Return the recipe's tree over its presets, those that are none left out and told."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = RECIPES / f"{name}.yaml"
    try:
        tree = read_yaml(path) or {}
    except (FileNotFoundError, NotADirectoryError):
        near = difflib.get_close_matches(str(name), recipe_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"needed a recipe, found no {path}; known: {', '.join(recipe_names())}{hint}"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: as 2026-02-30 gives
        raise ConfigError(f"{path} is not YAML that can be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold settings by name, found {type(tree).__name__}")
    presets = tree.pop("presets", None) or []
    if not isinstance(presets, list):
        faults.append(f"presets must be a list, found {presets!r}; write [{presets}]")
        presets = []
    resolved: dict[str, Any] = {}
    for preset in presets:
        with _noting(faults):
            resolved = _merged(resolved, _preset(preset, "presets"))
    ppo = tree.get("ppo")
    if isinstance(ppo, dict) and "preset" in ppo:
        ppo = dict(ppo)
        preset = ppo.pop("preset")
        tree = {**tree, "ppo": ppo}
        with _noting(faults):
            tree = {**tree, "ppo": _merged(_preset(preset, "ppo.preset"), ppo)}
    reward = tree.get("reward")
    if isinstance(reward, dict) and "preset" in reward:
        rest = {key: value for key, value in reward.items() if key != "preset"}
        tree = {**tree, "reward": rest}
        with _noting(faults):
            below, own = _reward_preset(reward["preset"], path), reward.get("functions") or {}
            left = {key: one for key, one in below.items() if own.get(key, ...) is not None}
            functions = _merged(spelt_out(left), spelt_out(own))
            tree = {**tree, "reward": {**rest, "functions": functions}}
    return _merged(resolved, tree)


def reward_functions(preset: str, folder: Path) -> Mapping[str, FunctionSettings]:
    """Return the functions of a preset, or of a YAML file in the folder, checked as a recipe's."""
    try:
        return RewardSettings(functions=_reward_preset(preset, folder / "preset")).functions
    except ValidationError as error:
        raise ConfigError(f"{preset}: {'; '.join(map(_explain, error.errors()))}") from error


def _reward_preset(name: Any, path: Path) -> dict[str, Any]:
    """Return the functions of a preset, or those of a YAML file of one's own."""
    if isinstance(name, str) and name in REWARD_PRESETS:
        return dict(REWARD_PRESETS[name])
    file = path.parent / str(name)
    if file.suffix not in (".yaml", ".yml"):
        near = difflib.get_close_matches(str(name), REWARD_PRESETS, n=1)
        hint = f"; the nearest right one is {near[0]!r}" if near else ""
        raise ConfigError(
            f"reward.preset knows {', '.join(REWARD_PRESETS)}, or a .yaml file of "
            f"functions by name, found {name!r}{hint}"
        )
    try:
        functions = read_yaml(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"reward.preset needs a YAML file at {file}: {error}") from error
    if not isinstance(functions, dict):
        raise ConfigError(
            f"{file} must hold reward functions by name, found {type(functions).__name__}"
        )
    return functions


def _preset(name: Any, place: str) -> dict[str, Any]:
    """Return the preset that a recipe names under `presets` or `ppo.preset`."""
    homes = {"presets": PRESETS, "ppo.preset": PPO_PRESETS}
    if isinstance(name, str) and name in homes[place]:
        return dict(homes[place][name])
    by_name = {known: home for home, presets in homes.items() for known in presets}
    near = difflib.get_close_matches(str(name), by_name, n=1)
    hint = ""
    if near:
        elsewhere = "" if by_name[near[0]] == place else f" under {by_name[near[0]]}"
        hint = f"; the nearest right one is {near[0]!r}{elsewhere}"
    raise ConfigError(f"{place} knows {', '.join(homes[place])}, found {name!r}{hint}")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(old, value) if both else value  # type: ignore[arg-type]  # both are
    return result


def _explain(problem: ErrorDetails, section: str = "") -> str:
    """Return a problem in words, with the nearest right key for an unknown one."""
    where = section + ".".join(str(part) for part in problem["loc"])
    if problem["type"] in UNKNOWN:
        near = nearest_settings(where)
        hint = f"; the nearest right one is {' or '.join(map(repr, near))}" if near else ""
        return f"unknown setting {where!r}{hint}"
    if problem["type"] == "value_error":
        told = str(problem["ctx"]["error"])  # ours: says what was found
        return f"{where}: {told}" if where else told  # of several settings it names them itself
    found = "what may be a secret" if where.startswith(SECRETS) else masked(repr(problem["input"]))
    said = BY_NAME if problem["type"] in ("dict_type", "mapping_type") else problem["msg"]
    return f"{where}: {said}, found {found}"


def nearest_settings(where: str) -> list[str]:
    """Return the settings somebody may have meant, likeliest first.

    A misspelt or abbreviated (lr) name of the same section; else the right name in another one;
    else whatever looks most alike.
    """
    section, _, name = where.rpartition(".")
    siblings = [key for key in _every_key() if key.rpartition(".")[0] == section]
    if short := [key for key in siblings if _initials(key.rpartition(".")[2]) == name]:
        return short
    if section == "ppo" and (near := difflib.get_close_matches(name, SHARED_WITH_PPO, n=1)):
        return [SHARED_WITH_PPO[near[0]]]
    if near := difflib.get_close_matches(where, siblings, n=1, cutoff=0.75):
        return near
    if elsewhere := [key for key in _every_key() if key.rpartition(".")[2] == name]:
        return elsewhere[:3]
    return difflib.get_close_matches(where, siblings, n=1, cutoff=0.6) or (
        difflib.get_close_matches(where, _every_key(), n=1, cutoff=0.4)
    )


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_"))


@lru_cache(maxsize=1)
def _every_key() -> tuple[str, ...]:
    keys: list[str] = []

    def walk(tree: Mapping[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            if prefix == "ppo." and key in SHARED_WITH_PPO:
                continue  # set elsewhere
            keys.append(prefix + key)
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{key}.")

    walk(Settings().model_dump(), "")
    return (*keys, "presets", "ppo.preset", "reward.preset")
