"""The models of one run: policy, reference policy, critic, and the optimizer that moves them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import ConfigError, ModelError
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.loading import Policy, load_policy, switch_off_dropout
from rlhf_pipeline.policy.packed import attending_as_now
from rlhf_pipeline.policy.sampling import (
    completion_hidden,
    completion_logprobs,
    hidden_logprobs,
    trunk_of,
)
from rlhf_pipeline.ppo.critic import (
    SeparateCritic,
    SharedCritic,
    fresh_head,
    head_values,
    load_reward_trunk,
)
from rlhf_pipeline.ppo.rollout import Tokens
from rlhf_pipeline.ppo.settings import PpoSettings


@dataclass
class Learner:
    """What is trained, and what it is held against."""

    policy: Policy  # model is the plain causal LM; with LoRA its adapters sit inside it
    saved_model: Any  # what save_policy is given: the PEFT wrapper with LoRA, else the model
    reference_logprobs: Callable[[Tokens], Tensor]  # (B, T), of the fixed reference policy
    critic: SharedCritic | SeparateCritic | None
    optimizer: torch.optim.Optimizer
    settings: PpoSettings

    def logprobs_and_values(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Return the policy's log-probabilities and the critic's values, both (B, T)."""
        logprobs, values = self.logprobs_and_shared_values(tokens)
        if isinstance(self.critic, SeparateCritic):
            values = self.values(tokens)
        return logprobs, values

    def logprobs_and_shared_values(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Return what one pass of the policy's trunk gives: a separate critic's values are None."""
        with self.autocast(), self._recomputing(trunk_of(self.policy.model)):
            hidden = self._hidden(tokens)
            logprobs = hidden_logprobs(
                self.policy.model,
                hidden,
                tokens.completion_ids,
                tokens.completion_mask,
                temperature=self.settings.temperature,
                support=tokens.support,
            )
            if isinstance(self.critic, SharedCritic):
                return logprobs, head_values(self.critic.head, hidden)
            return logprobs, None

    def values(self, tokens: Tokens) -> Tensor:
        """Return the critic's values (B, T); zeros where there is no critic."""
        if self.critic is None:
            return torch.zeros_like(tokens.completion_ids, dtype=torch.float32)
        with self.autocast():
            if isinstance(self.critic, SharedCritic):
                return head_values(self.critic.head, self._hidden(tokens))
            with self._recomputing(self.critic.base_model):
                values: Tensor = self.critic(tokens)
            return values

    @contextmanager
    def _recomputing(self, trunk: nn.Module) -> Iterator[None]:
        """Let the backward pass of what runs inside compute the trunk's layers again.

        transformers does so in training mode only. Dropout is off in either mode.
        """
        recomputes = self.settings.gradient_checkpointing and torch.is_grad_enabled()
        if recomputes:
            trunk.train()
        try:
            yield
        finally:
            if recomputes:
                trunk.eval()

    def _hidden(self, tokens: Tokens) -> Tensor:
        return completion_hidden(
            self.policy.model,
            tokens.prompt_ids,
            tokens.prompt_mask,
            tokens.completion_ids,
            tokens.completion_mask,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context every forward pass, sampling and reference included, runs in."""
        return autocast(self.policy.device, self.settings)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the weights that training moves, by name: policy/... and critic/..."""
        named = {f"policy/{n}": p for n, p in self.policy.model.named_parameters()}
        if self.critic is not None:
            named |= {f"critic/{n}": p for n, p in self.critic.named_parameters()}
        return {name: p for name, p in named.items() if p.requires_grad}

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
) -> Learner:
    """Return a learner at its start; the same arguments give the same weights.

    With LoRA and a reference that is the base itself, the reference is the policy with its
    adapters off; otherwise it is a model of its own.
    """
    policy = load_policy(policy_dir, device=settings.device)
    check_policy(policy, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    critic = build_critic(policy, value_init, settings, generator)
    saved_model: Any = policy.model
    if settings.lora_rank:
        saved_model = add_adapters(policy, settings)
    if settings.lora_rank and is_same_model(policy_dir, reference_dir):
        reference_logprobs = adapters_off_logprobs(policy, saved_model, settings)
    else:
        reference_logprobs = own_model_logprobs(policy, reference_dir, settings)
    if settings.gradient_checkpointing:
        allow_recomputing(trunk_of(policy.model))
        if isinstance(critic, SeparateCritic):
            allow_recomputing(critic.base_model)
    policy_weights = [p for p in policy.model.parameters() if p.requires_grad]
    groups = [{"params": policy_weights, "lr": settings.learning_rate}]
    if critic is not None:
        rate = settings.critic_learning_rate or settings.learning_rate
        groups.append({"params": list(critic.parameters()), "lr": rate})
    optimizer = torch.optim.AdamW(groups, eps=settings.adam_eps, weight_decay=0.0, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return Learner(policy, saved_model, reference_logprobs, critic, optimizer, settings)


def allow_recomputing(trunk: Any) -> None:
    """Prepare a trunk for gradient checkpointing; raises ConfigError where it knows none."""
    if not trunk.supports_gradient_checkpointing:
        raise ConfigError(
            "ppo.gradient_checkpointing needs a model whose layers can be computed again, found "
            f"{type(trunk).__name__}; set it to false"
        )
    trunk.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (nullcontext(), attending_as_now(trunk))}
    )


def check_policy(policy: Policy, settings: PpoSettings) -> None:
    """Raise unless prompt and completion fit the context and the tokenizer can pad and end."""
    tokenizer = policy.tokenizer
    for name, token in (("pad", tokenizer.pad_token_id), ("end", tokenizer.eos_token_id)):
        if token is None:
            raise ModelError(
                f"PPO needs a tokenizer with a {name} token, found none; set {name[:3]}_token and "
                "save the policy again"
            )
    longest = settings.max_prompt_tokens + settings.max_completion_tokens
    if longest > policy.context_length:
        raise ConfigError(
            f"ppo.max_prompt_tokens + ppo.max_completion_tokens must fit the policy's context of "
            f"{policy.context_length} tokens, found {longest}; lower one of them"
        )


def build_critic(
    policy: Policy, value_init: Path | None, settings: PpoSettings, generator: torch.Generator
) -> SharedCritic | SeparateCritic | None:
    """Return the critic of the settings, or None where the estimator needs none.

    A separate one is the reward model at value_init; without that, the policy's trunk with a fresh
    head. A shared one is a fresh head on the policy's trunk: a head trained on another trunk means
    nothing there.
    """
    if not settings.has_critic:
        return None
    width = policy.model.config.hidden_size
    if settings.critic == "shared":
        return SharedCritic(fresh_head(width, generator)).to(policy.device)
    start = None if value_init is None else load_reward_trunk(value_init, policy)
    if start is None:
        start = copy.deepcopy(trunk_of(policy.model)), fresh_head(width, generator)
    trunk, head = start
    switch_off_dropout(trunk)
    return SeparateCritic(trunk.eval().requires_grad_(True), head).to(policy.device)


def add_adapters(policy: Policy, settings: PpoSettings) -> Any:
    """Put LoRA adapters into the policy's linear layers, freeze the rest; return PEFT's wrapper."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(settings.seed)  # PEFT draws the adapters' first weights from torch's own
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(policy.model, config)


def adapters_off_logprobs(
    policy: Policy, wrapper: Any, settings: PpoSettings
) -> Callable[[Tokens], Tensor]:
    """Return the reference's log-probabilities as the policy's without its adapters."""

    def logprobs(tokens: Tokens) -> Tensor:
        with wrapper.disable_adapter():
            return _logprobs(policy, tokens, settings)

    return logprobs


def own_model_logprobs(
    policy: Policy, reference_dir: str | Path, settings: PpoSettings
) -> Callable[[Tokens], Tensor]:
    """Return the log-probabilities of the model at reference_dir, which nothing trains."""
    reference = load_policy(reference_dir, device=settings.device)
    if reference.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(
            f"policy and reference must share one vocabulary, found another at {reference_dir}; "
            "use the baseline this policy was trained from"
        )
    reference.model.requires_grad_(False)

    def logprobs(tokens: Tokens) -> Tensor:
        return _logprobs(reference, tokens, settings)

    return logprobs


def is_same_model(one: str | Path, other: str | Path) -> bool:
    """Return whether both name the same model: one place, or folders of equal files."""
    if str(one) == str(other):
        return True
    both_are_folders = Path(one).is_dir() and Path(other).is_dir()
    return both_are_folders and folder_sha256(one) == folder_sha256(other)


def autocast(device: torch.device, settings: PpoSettings) -> AbstractContextManager[Any]:
    """Return the precision of every forward pass: bfloat16 autocast, or nothing."""
    wanted = settings.precision == "bfloat16"
    context: AbstractContextManager[Any] = torch.autocast(
        device.type, dtype=torch.bfloat16, enabled=wanted
    )
    return context


def _logprobs(policy: Policy, tokens: Tokens, settings: PpoSettings) -> Tensor:
    with torch.no_grad(), autocast(policy.device, settings):
        return completion_logprobs(
            policy.model,
            tokens.prompt_ids,
            tokens.prompt_mask,
            tokens.completion_ids,
            tokens.completion_mask,
            temperature=settings.temperature,
            support=tokens.support,
        )
