"""Every knob of PPO training, described once, beside the field.

Where a default follows a source it is the N+ recipe ("The N+ Implementation Details of RLHF with
PPO", arXiv:2403.17031); where it departs from it, the line says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from rlhf_pipeline.errors import ConfigError

LEAST_TEMPERATURE = 1e-6
"""Logits divided by next to nothing leave the range of float32, or their squares in the metrics do:
at 1e-20 no metric can be written, at 1e-39 the model looks damaged."""
SEEDS = 2**32  # as many as numpy and scikit-learn take
LARGEST_KL_ERROR = 0.2  # arXiv:1909.08593: the proportional error is clipped to +-0.2


@dataclass(frozen=True, slots=True)
class PpoSettings:
    """How PPO trains. Frozen; contradictions are refused with a ConfigError when it is made."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,  # `rlhf config explain` tells them
    }

    # how long
    updates: int = 50
    """PPO iterations; each samples, then trains on what it sampled."""
    rollouts_per_update: int = 128
    """Completions sampled per update. N+ takes 512; 128 keeps a laptop's update at seconds."""
    completions_per_prompt: int = 1
    """Completions of one prompt within an update; rloo needs at least 2. gae has a critic instead,
    and learns more from as many different prompts."""
    epochs: int = 4
    """Passes over an update's rollouts (N+: 4)."""
    minibatches: int = 4
    """Optimizer steps per epoch. N+ takes 1 of 512 rollouts; 4 learn more from fewer."""

    # lengths and sampling
    max_prompt_tokens: int = 64
    """Longest prompt, in tokens, with the chat template's own."""
    max_completion_tokens: int = 48
    """Longest completion, in tokens, its end token counted (N+: 53)."""
    long_prompts: Literal["refuse", "keep_latest"] = "refuse"
    """One over max_prompt_tokens stops the run before it trains, or loses its oldest turns."""
    temperature: float = 0.7
    """Divides the logits in sampling and in every log-probability, reference alike (N+: 0.7)."""
    top_k: int = 0
    """Sample among this many likeliest tokens; 0, as N+, among all. What top_k and top_p leave in
    reach of a draw is kept with it, and every log-probability of that token is taken within."""
    top_p: float = 1.0
    """Sample within the smallest set of likeliest tokens of this probability; 1, as N+, in all."""

    # what is maximised
    kl_coef: float = 0.05
    """Weight of the per-token KL penalty in the reward (N+: 0.05)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that KL (N+: k1, the plain log-ratio)."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive moves kl_coef towards kl_target after every update (arXiv:1909.08593 eq. 4)."""
    kl_target: float = 6.0
    """Nats per completion the adaptive controller aims at."""
    kl_horizon: int = 10_000
    """Episodes over which the adaptive controller corrects."""
    missing_eos_score: float | None = -1.0
    """Most a completion without an end token can score (N+: -1); None lets it keep its own, as does
    a number above all scores.
    Either way the completion ends its episode: nothing is bootstrapped past the length limit."""
    score_normalisation: Literal["none", "running"] = "none"
    """running subtracts the mean and divides by the deviation of all scores so far (kept in the
    checkpoint); none takes them as they are (N+). The critic begins at the first update's mean
    return, wherever that lies; their scale counts beside kl_coef and value_clip_range."""
    score_clip: float | None = None
    """Largest absolute score after normalisation; None leaves it (N+)."""
    whiten_rewards: bool = False
    """Divide rewards by their deviation over completion tokens, subtracting nothing (N+: off)."""

    # the estimator
    estimator: Literal["gae", "rloo", "dpo"] = "gae"
    """gae needs a critic; rloo compares completions of one prompt instead (arXiv:2402.14740); dpo
    learns from the preference pairs alone, samples nothing, and costs least (dpo.py)."""
    dpo_beta: float = 0.1
    """dpo's weight of staying near the reference (arXiv:2305.18290); larger stays nearer."""
    gamma: float = 1.0
    """Discount per token (N+: 1)."""
    gae_lambda: float = 0.95
    """Decay of the advantage estimate per token (N+: 0.95)."""
    whiten_advantages: bool = True
    """Zero mean, unit variance over the update's completion tokens (N+)."""

    # conversations
    max_turns: int = 1
    """Turns of the assistant in a conversation; above 1 a simulated user answers in between. Then
    rollouts_per_update counts conversations, and every turn of one is a completion."""
    reward_timing: Literal["each_turn", "end"] = "each_turn"
    """When the reward judges: every turn as it ends, or the conversation's last turn alone."""
    turn_gamma: float = 1.0
    """Discount from one turn's last token to the next turn's first, where gamma is per token."""
    turn_gae_lambda: float = 0.95
    """Decay of the advantage estimate there."""

    # replay
    replay_updates: int = 0
    """Earlier updates whose rollouts are trained on again beside the fresh ones; 0 stays on-policy,
    as PPO is meant. Replayed tokens count by min(policy's / sampling's probability, replay_cap)."""
    replay_cap: float = 1.0
    """Largest importance weight of a replayed token (arXiv:1802.01561: 1)."""

    # the losses
    clip_range: float = 0.2
    """Policy ratios beyond 1 +- this earn nothing more (N+: 0.2)."""
    value_clip_range: float = 0.2
    """Values may move this far from the rollout's before the clipped loss counts (N+: 0.2)."""
    value_coef: float = 0.1
    """Weight of the value loss (N+: 0.1)."""
    critic: Literal["separate", "shared"] = "separate"
    """A network of its own (N+), or a head on the policy's trunk: half the memory and time."""

    # the optimizer
    learning_rate: float = 3e-6
    """At the first update (N+: 3e-6, for billions of weights). Small models want larger rates."""
    critic_learning_rate: float | None = None
    """For the critic's own weights; None takes learning_rate, as N+ does."""
    anneal: bool = True
    """Lower the rates linearly to 0 over the updates (N+)."""
    adam_eps: float = 1e-5
    """Adam's epsilon (N+: 1e-5, not the framework's 1e-8)."""
    importance_cap: float | None = None
    """For sampling and training that compute log-probabilities differently (other kernels, less
    precision): training's own are taken as the old ones, and each token's loss is weighted by
    min(training's / sampling's probability, this). None takes sampling's, which saves a pass."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm. N+ has none; a guard against one bad batch."""

    # adapters
    lora_rank: int = 0
    """0 trains every weight; above, low-rank adapters on all linear layers (arXiv:2106.09685)."""
    lora_alpha: float = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""

    # stopping
    evaluate_every: int = 5
    """Updates between looks at the watch prompts: the scores that choose the checkpoint."""
    samples_shown: int = 4
    """Watch prompts whose completions every look keeps, beside the baseline's; 0 keeps none."""
    patience: int | None = None
    """Stop after this many looks without a better stopping score; None never does."""
    max_kl: float | None = None
    """Nats per completion from the reference: no checkpoint beyond is chosen, and training stops
    after three updates in a row beyond; None sets no bound."""
    max_repetition: float | None = 0.25
    """No checkpoint is chosen whose completions repeat themselves by more than this share more than
    before training (4-grams; below 2 % counts as 2), as the gate would not have it: what a reward
    model thinks of a phrase said twice it has seldom been told. None sets no bound."""

    # the machine
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """bfloat16 and float16 run forward passes under autocast; weights and sums stay float32.
    float16, for GPUs without the other, also scales the loss: where a gradient overflows it is
    computed again at half the scale, so no step is lost."""
    gradient_checkpointing: bool = False
    """Keep each layer's input only and compute the layer again in the backward pass: the same
    gradient for a third more time, with memory that hardly grows with the layers."""
    tokens_per_microbatch: int = 8192
    """Tokens, padding counted, per forward pass; changes memory and speed, never the gradient."""
    completions_at_once: int = 512
    """Completions decoded together; bounds the cache of keys and values, never what is sampled."""
    device: str = "auto"
    """auto takes the GPU where there is one."""
    ratio_tolerance: float = 0.05
    """Largest mean |log ratio| on the first minibatch of an update, before any step. 0.05 leaves
    room for bfloat16 kernels; float32 shows about 1e-6."""
    seed: int = 0
    """Of sampling, shuffling and fresh heads."""

    # checkpoints
    checkpoint_every: int = 5
    """Updates between checkpoints; a new best is written too, whenever it comes."""
    keep_checkpoints: int = 2
    """Latest checkpoints kept, beside the best one. At least 2: if one is damaged, one is left."""

    def __post_init__(self) -> None:
        for look in (self._out_of_range, self._contradictions):  # the second counts on the first
            if found := list(look()):
                raise ConfigError("; ".join(found))

    def _out_of_range(self) -> Iterator[str]:
        """Yield what is wrong with each setting alone."""
        for name in _AT_LEAST_ONE:
            yield from self._unless(
                self._is_none(name) or getattr(self, name) >= 1, name, "at least 1"
            )
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            fine = value is None or (math.isfinite(value) and value > 0)
            yield from self._unless(fine, name, "above 0")
        for name in ("kl_coef", "value_coef"):
            value = getattr(self, name)
            yield from self._unless(math.isfinite(value) and value >= 0, name, "0 or more")
        for name in ("gamma", "gae_lambda", "turn_gamma", "turn_gae_lambda"):
            yield from self._unless(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        yield from self._unless(self.clip_range < 1, "clip_range", "below 1")
        warm = math.isfinite(self.temperature) and self.temperature >= LEAST_TEMPERATURE
        yield from self._unless(warm, "temperature", f"finite and at least {LEAST_TEMPERATURE:g}")
        finite = self.missing_eos_score is None or math.isfinite(self.missing_eos_score)
        yield from self._unless(finite, "missing_eos_score", "a finite number, or null")
        yield from self._unless(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        for name in ("top_k", "lora_rank", "replay_updates", "samples_shown"):
            yield from self._unless(getattr(self, name) >= 0, name, "0 or more")
        # A generator takes 64 bits, of which the order of the prompts needs room to count on from.
        yield from self._unless(0 <= self.seed < SEEDS, "seed", f"from 0 to {SEEDS - 1}")
        yield from self._unless(self.keep_checkpoints >= 2, "keep_checkpoints", "at least 2")
        for name, allowed in _CHOICES.items():
            fine = getattr(self, name) in allowed
            yield from self._unless(fine, name, "one of " + ", ".join(allowed))

    def _contradictions(self) -> Iterator[str]:
        """Yield where settings, each fine by itself, do not go together."""
        multiple = math.lcm(self.minibatches, self.completions_per_prompt)
        if self.rollouts_per_update % multiple:
            yield (
                "ppo.rollouts_per_update must divide into equal minibatches and whole prompts: "
                f"found {self.rollouts_per_update} rollouts, {self.minibatches} minibatches and "
                f"{self.completions_per_prompt} completions per prompt; take a multiple of "
                f"{multiple}"
            )
        if self.estimator == "rloo" and self.completions_per_prompt < 2:
            yield (
                "ppo.estimator rloo compares completions of one prompt: needed "
                f"ppo.completions_per_prompt of at least 2, found {self.completions_per_prompt}; "
                "raise it or take estimator gae"
            )
        if self.estimator != "gae" and self.max_turns > 1:
            yield (
                f"ppo.estimator {self.estimator} knows nothing of turns: needed ppo.max_turns of "
                f"1, found {self.max_turns}; take gae, which hands credit from turn to turn"
            )
        if self.kl_controller == "adaptive":
            yield from self._controller_faults()
        longest = self.max_prompt_tokens + self.max_completion_tokens
        if self.tokens_per_microbatch < longest:
            yield (
                "ppo.tokens_per_microbatch must hold one rollout: needed "
                f"policy.max_prompt_tokens + policy.max_completion_tokens = {longest}, found "
                f"{self.tokens_per_microbatch}; raise it"
            )

    def _controller_faults(self) -> Iterator[str]:
        """Yield where the controller cannot move kl_coef, or would turn its sign."""
        if self.kl_coef == 0:
            yield (
                "ppo.kl_controller adaptive multiplies ppo.kl_coef: needed one above 0, found 0; "
                "raise it or take fixed"
            )
        largest = LARGEST_KL_ERROR * self.rollouts_per_update
        if self.kl_horizon <= largest:
            yield (
                "one correction of ppo.kl_controller adaptive must leave ppo.kl_coef above 0: "
                f"needed ppo.kl_horizon above {LARGEST_KL_ERROR} * ppo.rollouts_per_update = "
                f"{largest:g}, found {self.kl_horizon}; raise it"
            )

    def _unless(self, fine: bool, name: str, needed: str) -> Iterator[str]:
        if not fine:
            yield f"ppo.{name} must be {needed}: found {getattr(self, name)!r}; change it"

    def _is_none(self, name: str) -> bool:
        return getattr(self, name) is None

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps in one update."""
        return self.epochs * self.minibatches

    @property
    def prompts_per_update(self) -> int:
        """Different prompts in one update."""
        return self.rollouts_per_update // self.completions_per_prompt

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs values."""
        return self.estimator == "gae"


_AT_LEAST_ONE = (
    "updates rollouts_per_update completions_per_prompt epochs minibatches max_prompt_tokens "
    "max_completion_tokens max_turns kl_horizon evaluate_every patience checkpoint_every "
    "completions_at_once"
).split()
_ABOVE_ZERO = (
    "kl_target dpo_beta score_clip clip_range value_clip_range learning_rate "
    "critic_learning_rate adam_eps importance_cap replay_cap max_grad_norm lora_alpha max_kl "
    "ratio_tolerance max_repetition"
).split()
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "long_prompts": ("refuse", "keep_latest"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_controller": ("fixed", "adaptive"),
    "score_normalisation": ("none", "running"),
    "estimator": ("gae", "rloo", "dpo"),
    "reward_timing": ("each_turn", "end"),
    "critic": ("separate", "shared"),
    "precision": ("float32", "bfloat16", "float16"),
}


CONSERVATIVE: Mapping[str, Any] = MappingProxyType(
    {
        "kl_coef": 0.1,
        "kl_controller": "adaptive",
        "kl_target": 3.0,
        "clip_range": 0.1,
        "epochs": 2,
        "max_grad_norm": 0.5,
        "max_kl": 10.0,
        "patience": 3,
    }
)
"""Overrides that stay near the baseline: for a policy people already use."""

AGGRESSIVE: Mapping[str, Any] = MappingProxyType(
    {
        "kl_coef": 0.01,
        "clip_range": 0.3,
        "epochs": 4,
        "max_grad_norm": 1.0,
        "max_kl": 50.0,
        "patience": 5,
    }
)
"""Overrides that move far: for a weak baseline and a reward one trusts."""
