"""The models of one run: policy, reference policy, critic, and the optimizer that moves them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import ConfigError, ModelError
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.adapters import (
    POLICY,
    SharedBase,
    adapter_weights,
    add_adapters,
    base_digest,
    computing_as_now,
    load_base,
    only,
)
from rlhf_pipeline.policy.captured import can_capture
from rlhf_pipeline.policy.loading import (
    Policy,
    choose_device,
    load_policy,
    switch_off_dropout,
)
from rlhf_pipeline.policy.packed import Room, attending_as_now
from rlhf_pipeline.policy.sampling import (
    completion_hidden,
    completion_logprobs,
    hidden_logprobs,
    state_width,
    trunk_of,
)
from rlhf_pipeline.ppo.criteria import CriteriaHeads
from rlhf_pipeline.ppo.critic import (
    AdapterCritic,
    SeparateCritic,
    SharedCritic,
    fresh_head,
    head_values,
    load_reward_adapters,
    load_reward_trunk,
)
from rlhf_pipeline.ppo.graphs import Graphs
from rlhf_pipeline.ppo.memory import suit_allocator
from rlhf_pipeline.ppo.processes import ALONE, Team, base_shares, join_team
from rlhf_pipeline.ppo.rollout import Tokens
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.spreading import spread_layers

CAPTURED = 2**28  # bytes of trained weights, whose gradient graphs hold twice more: adapters

Critic = SharedCritic | SeparateCritic | AdapterCritic


@dataclass
class Learner:
    """What is trained, and what it is held against."""

    policy: Policy  # model is the plain causal LM; with LoRA its adapters sit inside it
    saved_model: Any  # what save_policy is given: the PEFT wrapper with LoRA, else the model
    reference: Policy | None  # fixed; None where it is the policy's base with adapters off
    critic: Critic | None
    optimizer: torch.optim.Optimizer
    settings: PpoSettings
    base_digest: str | None = None  # with LoRA: of the frozen base, kept with the saved adapters
    team: Team = ALONE  # the processes that train it together
    criteria: CriteriaHeads | None = None  # on the critic's states, where the reward has pieces
    scaler: torch.amp.GradScaler | None = None  # of the loss, in float16
    keep_up: Callable[[], None] = lambda: None  # Team's, where the base is spread over processes
    graphs: Graphs = field(default_factory=Graphs)

    def logprobs_and_values(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Return the policy's log-probabilities and the critic's values, both (B, T)."""
        logprobs, values = self.logprobs_and_shared_values(tokens)
        if isinstance(self.critic, (SeparateCritic, AdapterCritic)):
            values = self.values(tokens)
        return logprobs, values

    def logprobs_and_shared_values(
        self, tokens: Tokens, room: Room | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what one pass of the policy's trunk gives: a separate critic's values are None."""
        with self.autocast(), recomputing(trunk_of(self.policy.model), self.settings):
            hidden = self._hidden(tokens, room)
            logprobs = hidden_logprobs(
                self.policy.model,
                hidden,
                tokens.completion_ids,
                tokens.completion_mask,
                temperature=self.settings.temperature,
                support=tokens.support,
                room=room,
            )
            if isinstance(self.critic, SharedCritic):
                return logprobs, head_values(self.critic.head, hidden)
            return logprobs, None

    def values(self, tokens: Tokens, room: Room | None = None) -> Tensor:
        """Return the critic's values (B, T); zeros where there is no critic."""
        if self.critic is None:
            return torch.zeros_like(tokens.completion_ids, dtype=torch.float32)
        with self.autocast():
            if isinstance(self.critic, SharedCritic):
                return head_values(self.critic.head, self._hidden(tokens, room))
            with recomputing(self.critic.base_model, self.settings):
                values: Tensor = self.critic(tokens, room)
            return values

    def critic_states(self, tokens: Tokens) -> Tensor:
        """Return the hidden states (B, T, width) that the critic's values are read from."""
        if isinstance(self.critic, (SeparateCritic, AdapterCritic)):
            return self.critic.states(tokens)
        return self._hidden(tokens)

    def read_values(self, states: Tensor) -> Tensor:
        """Return the values (B, T) of states that `critic_states` returned."""
        if self.critic is None:
            return torch.zeros_like(states[..., 0], dtype=torch.float32)
        return head_values(self.critic.head, states)

    def raise_values(self, by: Tensor) -> None:
        """Add a number to all of the critic's values from now on.

        A fresh head's values lie near 0, and value_clip_range lets them move little in an update.
        Where scores lie elsewhere, or move there as a reward's weights change, the value loss would
        rule the gradient until they are there, and drag a shared trunk along.
        """
        if self.critic is not None:
            with torch.no_grad():
                self.critic.head.bias.add_(by)

    def new_criteria(self, names: Sequence[str]) -> CriteriaHeads | None:
        """Return untaught heads for these pieces of a reward; None where there are none."""
        width = 0 if self.critic is None else self.critic.head.in_features
        return CriteriaHeads(names, width) if names and width else None

    @contextmanager
    def as_reference(self) -> Iterator[Policy]:
        """Yield the fixed reference policy; where it shares the base, adapters are off inside."""
        if self.reference is not None:
            yield self.reference
        else:
            with only(self.policy.model, None):
                yield self.policy

    def reference_logprobs(self, tokens: Tokens) -> Tensor:
        """Return the reference policy's log-probabilities (B, T), without gradients."""
        with torch.no_grad(), self.autocast(), self.as_reference() as reference:
            return completion_logprobs(
                reference.model,
                tokens.prompt_ids,
                tokens.prompt_mask,
                tokens.completion_ids,
                tokens.completion_mask,
                temperature=self.settings.temperature,
                support=tokens.support,
            )

    def _hidden(self, tokens: Tokens, room: Room | None = None) -> Tensor:
        return completion_hidden(
            self.policy.model,
            tokens.prompt_ids,
            tokens.prompt_mask,
            tokens.completion_ids,
            tokens.completion_mask,
            room=room,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context every forward pass, sampling and reference included, runs in."""
        return autocast(self.policy.device, self.settings)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the weights that training moves, by name: policy/... and critic/..."""
        return trainable_of(self.policy, self.critic)

    @cached_property
    def weights(self) -> list[nn.Parameter]:
        """All weights that the policy and the critic are computed with."""
        of_critic = [] if self.critic is None else self.critic.parameters()
        return [*self.policy.model.parameters(), *of_critic]

    @property
    def trained_weights(self) -> list[nn.Parameter]:
        """What the optimizer moves of these weights, in its order; specialists share one."""
        own = set(map(id, self.weights))
        return [w for group in self.optimizer.param_groups for w in group["params"] if id(w) in own]

    def can_capture(self) -> bool:
        """Say whether a microbatch's pass is the same kernels every time, and worth a graph."""
        return (
            self.scaler is None
            and not self.settings.gradient_checkpointing
            and can_capture(trunk_of(self.policy.model), self.policy.device)
            and sum(w.nbytes for w in self.trained_weights) <= CAPTURED
        )

    def set_learning_rate(self, share: float) -> float:
        """Set every rate to `share` of its first value; return the policy's."""
        for group in self.optimizer.param_groups:
            group["lr"] = share * group["initial_lr"]
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate


def build_learner(
    policy_dir: str | Path,
    reference_dir: str | Path,
    value_init: Path | None,
    settings: PpoSettings,
    *,
    base: SharedBase | None = None,
) -> Learner:
    """Return a learner at its start; the same arguments give the same weights.

    With LoRA one base carries the policy's adapters and, where it is separate, the critic's; where
    that base is the reference, the reference is the base with adapters off, otherwise a model of
    its own. `base` is what `shared_base` loaded, for reward models that share it.
    """
    scaler = new_scaler(choose_device(settings.device), settings)
    if base is None and settings.lora_rank:
        base = shared_base(policy_dir, reference_dir, settings)
    policy = load_policy(policy_dir, device=settings.device) if base is None else base.policy
    check_policy(policy, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    critic = build_critic(policy, value_init, settings, generator, base)
    shares_base = base is not None and base.digest == base_digest(reference_dir)
    reference = None if shares_base else load_reference(policy, reference_dir, settings)
    if settings.gradient_checkpointing:
        allow_recomputing(trunk_of(policy.model), adapted=base is not None)
        if isinstance(critic, SeparateCritic):
            allow_recomputing(critic.base_model)
    saved_model: Any = policy.model if base is None else base.wrapper
    digest = None if base is None else base.digest
    optimizer = new_optimizer(trainable_of(policy, critic), settings)
    if policy.device.type == "cpu":
        suit_allocator(list(policy.model.parameters()))
    learner = Learner(
        policy, saved_model, reference, critic, optimizer, settings, digest, scaler=scaler
    )
    if base is not None:
        learner.keep_up = base.keep_up
    return learner


def shared_base(
    policy_dir: str | Path, reference_dir: str | Path, settings: PpoSettings
) -> SharedBase:
    """Return the base, with the policy's adapters, that build_learner and reward models share.

    Its weights are of the settings' precision: nothing trains them. Where FSDP was asked for, they
    are spread over the processes (spreading.py); ConfigError where it is not the reference's base.
    """
    if base_shares() == 1:
        return _whole_base(policy_dir, reference_dir, settings, settings.device)
    team = join_team(settings)
    base = _whole_base(policy_dir, reference_dir, settings, "cpu")
    if base.digest != base_digest(reference_dir):
        raise ConfigError(
            f"FSDP spreads one base, which is the reference too: needed {policy_dir} to be the "
            f"baseline, or trained on it with adapters of rank {settings.lora_rank}, found other "
            "weights; take plain data parallelism, or the rank it was trained with"
        )
    return replace(base, keep_up=spread_layers(base.policy.model, team.device).keep_up)


def saved_model(learner: Learner, policy_dir: str | Path, reference_dir: str | Path) -> Any:
    """Return what `save_policy` is given: with a base that is spread, a whole one on the CPU."""
    if base_shares() == 1:
        return learner.saved_model
    whole = _whole_base(policy_dir, reference_dir, learner.settings, "cpu")
    trained = adapter_weights(trunk_of(learner.policy.model), POLICY)
    with torch.no_grad():
        for name, weight in adapter_weights(trunk_of(whole.policy.model), POLICY).items():
            weight.copy_(trained[name])
    return whole.wrapper


def _whole_base(
    policy_dir: str | Path, reference_dir: str | Path, settings: PpoSettings, device: str
) -> SharedBase:
    return load_base(
        policy_dir,
        reference_dir,
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        seed=settings.seed,
        device=device,
        dtype=_frozen_dtype(settings),
    )


def _frozen_dtype(settings: PpoSettings) -> str:
    """Return the type of weights that nothing trains where adapters are trained."""
    return "bfloat16" if settings.precision == "bfloat16" else "float32"


def trainable_of(policy: Policy, critic: Critic | None) -> dict[str, nn.Parameter]:
    """Return the weights that training moves, by name: policy/... and critic/..."""
    of_critic = {} if critic is None else dict(critic.named_parameters())
    apart = {id(p) for p in of_critic.values()}
    named = {f"policy/{n}": p for n, p in policy.model.named_parameters() if id(p) not in apart}
    named |= {f"critic/{n}": p for n, p in of_critic.items()}
    return {name: p for name, p in named.items() if p.requires_grad}


def new_optimizer(
    trainable: Mapping[str, nn.Parameter], settings: PpoSettings
) -> torch.optim.Optimizer:
    """Return Adam on these weights, the policy's and the critic's at rates of their own."""
    rates = {
        "policy": settings.learning_rate,
        "critic": settings.critic_learning_rate or settings.learning_rate,
    }
    groups = [
        {"params": [p for n, p in trainable.items() if n.startswith(f"{part}/")], "lr": rate}
        for part, rate in rates.items()
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, eps=settings.adam_eps, weight_decay=0.0, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def new_scaler(device: torch.device, settings: PpoSettings) -> torch.amp.GradScaler | None:
    """Return what scales float16's loss; None for other precisions.

    Raises ConfigError on a CPU, where float16 is slower than what it would take the place of.
    """
    if settings.precision != "float16":
        return None
    if device.type != "cuda":
        raise ConfigError(
            "policy.dtype float16 is for GPUs without bfloat16: needed a CUDA "
            f"device, found {device.type}; take float32, or bfloat16 where the processor has it"
        )
    return torch.amp.GradScaler(device.type)


def allow_recomputing(trunk: Any, *, adapted: bool = False) -> None:
    """Prepare a trunk for gradient checkpointing; raises ConfigError where it knows none.

    Layers are computed again as they were computed: packed or not and, where the trunk is adapted,
    with the same set of adapters, the policy's or the critic's.
    """

    @contextmanager
    def both(
        one: AbstractContextManager[None], other: AbstractContextManager[None]
    ) -> Iterator[None]:
        with one, other:
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        computing = computing_as_now(trunk) if adapted else nullcontext()
        return nullcontext(), both(attending_as_now(trunk), computing)

    if not trunk.supports_gradient_checkpointing:
        raise ConfigError(
            "ppo.gradient_checkpointing needs a model whose layers can be computed again, found "
            f"{type(trunk).__name__}; set it to false"
        )
    trunk.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    # Of adapters transformers has embeddings ask for gradients, by a hook that no graph can run;
    # what is computed again without re-entering backward needs none.
    trunk.disable_input_require_grads()


@contextmanager
def recomputing(trunk: nn.Module, settings: PpoSettings) -> Iterator[None]:
    """Let the backward pass of what runs inside compute the trunk's layers again, where asked for.

    transformers does so in training mode only, in which it keeps no keys and values. Dropout is off
    in either mode.
    """
    recomputes = settings.gradient_checkpointing and torch.is_grad_enabled()
    if recomputes:
        trunk.train()
        draw_nothing(trunk)
    try:
        yield
    finally:
        if recomputes:
            trunk.eval()


def draw_nothing(model: nn.Module) -> None:
    """Take out of training mode what would draw random numbers in it; the rest stays in it."""
    for module in model.modules():
        # OPT's decoder would draw which layers to drop, none, by a number that a plan has not.
        # Its layers, whose own mode it is that counts, train on.
        # PhiMoE's router would draw experts, other ones when it is computed again.
        if hasattr(module, "layerdrop") or hasattr(module, "router_jitter_noise"):
            module.training = False


def check_policy(policy: Policy, settings: PpoSettings) -> None:
    """Raise unless prompt and completion fit the context and the tokenizer can pad and end."""
    tokenizer = policy.tokenizer
    for name, attribute in (("pad", "pad_token"), ("end", "eos_token")):
        if getattr(tokenizer, f"{attribute}_id") is None:
            raise ModelError(
                f"PPO needs a tokenizer with a {name} token, found none; set {attribute} and save "
                "the policy again"
            )
    check_context(policy.context_length, settings)


def check_context(context_length: int, settings: PpoSettings) -> None:
    """Raise ConfigError unless prompt and completion fit so many tokens."""
    longest = settings.max_prompt_tokens + settings.max_completion_tokens
    if longest > context_length:
        raise ConfigError(
            "policy.max_prompt_tokens + policy.max_completion_tokens must fit the policy's context "
            f"of {context_length} tokens, found {longest}; lower one of them"
        )


def build_critic(
    policy: Policy,
    value_init: Path | None,
    settings: PpoSettings,
    generator: torch.Generator,
    base: SharedBase | None,
) -> Critic | None:
    """Return the critic of the settings, or None where the estimator needs none.

    A separate one is the reward model at value_init; without that, the policy's trunk with a fresh
    head. On a shared base it is adapters there: the reward model's, or fresh ones. A shared critic
    is a fresh head on the policy's trunk: a head trained on another trunk means nothing there.
    """
    if not settings.has_critic:
        return None
    width = state_width(policy.model.config)
    if settings.critic == "shared":
        return SharedCritic(fresh_head(width, generator)).to(policy.device)
    if base is not None and value_init is not None:
        trained = load_reward_adapters(value_init, base)
        if trained is not None:
            return AdapterCritic(base, trained).to(policy.device)
    if base is not None:
        add_adapters(
            trunk_of(policy.model),
            AdapterCritic.SET,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            seed=settings.seed + 1,
        )
        return AdapterCritic(base, fresh_head(width, generator)).to(policy.device)
    start = None if value_init is None else load_reward_trunk(value_init, policy)
    if start is None:
        start = copy.deepcopy(trunk_of(policy.model)), fresh_head(width, generator)
    trunk, head = start
    switch_off_dropout(trunk)
    return SeparateCritic(trunk.eval().requires_grad_(True), head).to(policy.device)


def load_reference(policy: Policy, reference_dir: str | Path, settings: PpoSettings) -> Policy:
    """Return the model at reference_dir, which nothing trains, in the type of adapters' base."""
    dtype = _frozen_dtype(settings) if settings.lora_rank else "float32"
    reference = load_policy(reference_dir, device=settings.device, dtype=dtype)
    if reference.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(
            f"policy and reference must share one vocabulary, found another at {reference_dir}; "
            "use the baseline this policy was trained from"
        )
    reference.model.requires_grad_(False)
    return reference


def is_same_model(one: str | Path, other: str | Path) -> bool:
    """Return whether both name the same model: one place, or folders of equal files."""
    if str(one) == str(other):
        return True
    both_are_folders = Path(one).is_dir() and Path(other).is_dir()
    return both_are_folders and folder_sha256(one) == folder_sha256(other)


def autocast(device: torch.device, settings: PpoSettings) -> AbstractContextManager[Any]:
    """Return the precision of every forward pass: autocast to half of float32, or nothing."""
    context: AbstractContextManager[Any] = torch.autocast(
        device.type,
        dtype=torch.float16 if settings.precision == "float16" else torch.bfloat16,
        enabled=settings.precision != "float32",
    )
    return context
