"""The optimizer steps of one update: gradients over microbatches, checked, clipped and taken."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.policy.packed import Room
from rlhf_pipeline.ppo.critic import AdapterCritic, SeparateCritic
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.loss import policy_loss, value_loss
from rlhf_pipeline.ppo.rollout import Rollouts, microbatches


class NotFinite(TrainingError):
    """A gradient is NaN or infinite; no step was taken with it."""


def train_on(learner: Learner, rollouts: Rollouts, generator: torch.Generator) -> dict[str, float]:
    """Take epochs x minibatches optimizer steps on the rollouts; return the facts of training.

    Raises TrainingError if the first minibatch shows another policy than the one that sampled, and
    NotFinite before a step with a gradient that is NaN or infinite.
    """
    settings = learner.settings
    steps: list[dict[str, float]] = []
    for _ in range(settings.epochs):
        order = torch.randperm(len(rollouts), generator=generator)
        for members in order.to(rollouts.rewards.device).tensor_split(settings.minibatches):
            facts = accumulate_gradients(learner, rollouts, members)
            if learner.scaler is not None:
                facts = without_overflow(learner, rollouts, members, facts)
            if not steps:
                gap, approx_kl = facts["abs_log_ratio"], facts["policy/approx_kl"]
                check_first_ratio(gap, approx_kl, settings.ratio_tolerance)
            facts["policy/grad_norm"] = clipped_step(learner)
            steps.append(facts)
    first, last = steps[0], steps[-1]
    means = {n: statistics.fmean(s[n] for s in steps) for n in first if "/" in n}
    if learner.scaler is not None:
        means["train/loss_scale"] = learner.scaler.get_scale()
    return {
        **means,
        "policy/first_ratio": first["ratio"],
        "policy/logprob_gap": first["abs_log_ratio"],
        "policy/last_approx_kl": last["policy/approx_kl"],
    }


def accumulate_gradients(learner: Learner, rollouts: Rollouts, members: Tensor) -> dict[str, float]:
    """Add one minibatch's gradient to the weights' and return its facts.

    Losses are divided by the minibatch's token count, so microbatches, and the parts that several
    processes take, add up to the same gradient however they are cut.
    """
    team, tokens = learner.team, rollouts.tokens
    token_count = max(int(tokens.completion_mask[members].sum()), 1)
    budget = learner.settings.tokens_per_microbatch
    found = [
        add_gradient(learner, rollouts.rows(some), token_count)
        for some in microbatches(tokens, team.part(members), token_budget=budget)
    ]
    team.add_gradients(learner.trained_weights)
    shares = torch.stack([torch.stack(list(facts.values())) for facts in found])
    return team.add_facts(dict(zip(found[0], shares.cpu().double().sum(0).tolist(), strict=True)))


def add_gradient(learner: Learner, few: Rollouts, token_count: int) -> dict[str, Tensor]:
    """Add one microbatch's gradient to the weights' and return its facts, each of ()."""
    if learner.can_capture():
        compute = partial(gradients_of, learner)
        shown = learner.graphs.add_gradients(
            few, token_count, compute, learner.trained_weights, learner.weights
        )
        if shown is not None:
            return shown
    facts: dict[str, Tensor] = {}
    for loss, told in losses(learner, few, token_count):
        descend(loss, learner.scaler)
        facts = told
    return facts


def gradients_of(
    learner: Learner, few: Rollouts, token_count: Tensor, room: Room
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return one microbatch's gradient, of each trained weight, and its facts, each of ()."""
    trained = learner.trained_weights
    found: list[Tensor | None] = [None] * len(trained)
    facts: dict[str, Tensor] = {}
    for loss, told in losses(learner, few, token_count, room):
        parts = torch.autograd.grad(loss, trained, allow_unused=True)
        # No weight is in two losses.
        found = [one if part is None else part for one, part in zip(found, parts, strict=True)]
        facts = told
    gradients = [
        torch.zeros_like(w) if g is None else g for w, g in zip(trained, found, strict=True)
    ]
    return gradients, facts


def losses(
    learner: Learner, few: Rollouts, token_count: int | Tensor, room: Room | None = None
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield one microbatch's losses, each to descend before the next, and the facts so far.

    There is one, or one of the policy and one of the critic: where two networks share nothing,
    one's activations go before the other's come.
    """
    settings, tokens = learner.settings, few.tokens
    logprobs, values = learner.logprobs_and_shared_values(tokens, room)
    loss, facts = policy_loss(
        logprobs,
        few.logprobs,
        few.advantages,
        tokens.completion_mask,
        clip_range=settings.clip_range,
        token_count=token_count,
        weights=few.weights,
    )
    facts["policy/loss"] = facts["train/loss"] = loss.detach()
    if isinstance(learner.critic, (SeparateCritic, AdapterCritic)):
        yield loss, facts
        loss, values = torch.zeros_like(loss), learner.values(tokens, room)
    if values is not None:
        critic_loss, critic_facts = value_loss(
            values,
            few.values,
            few.returns,
            tokens.completion_mask,
            value_clip_range=settings.value_clip_range,
            token_count=token_count,
        )
        facts = {**facts, **critic_facts, "critic/loss": critic_loss.detach()}
        facts["train/loss"] = facts["policy/loss"] + settings.value_coef * facts["critic/loss"]
        loss = loss + settings.value_coef * critic_loss
    yield loss, facts


def without_overflow(
    learner: Learner, rollouts: Rollouts, members: Tensor, facts: dict[str, float]
) -> dict[str, float]:
    """Make the minibatch's gradient, scaled as it is, one that float16 can hold; return its facts.

    Where it overflowed it is computed again at half the scale: no minibatch is left out. Raises
    NotFinite where no scale of 1 or more helps.
    """
    scaler = learner.scaler
    assert scaler is not None  # only float16 comes here
    scaler.unscale_(learner.optimizer)
    while not all(_is_finite(w) for w in learner.trained_weights):
        learner.optimizer.zero_grad()
        scaler.update()
        if scaler.get_scale() < 1:
            raise NotFinite("the loss or its gradient")
        facts = accumulate_gradients(learner, rollouts, members)
        scaler.unscale_(learner.optimizer)
    return facts


def _is_finite(weight: nn.Parameter) -> bool:
    return weight.grad is None or bool(weight.grad.isfinite().all())


def descend(loss: Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
    """Add the loss's gradient, scaled where there is a scaler, to the weights'."""
    if scaler is not None:
        loss = scaler.scale(loss)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped


def check_first_ratio(gap: float, approx_kl: float, tolerance: float) -> None:
    """Raise TrainingError unless the policy that trains is the one that sampled.

    `gap` is the mean |log ratio| of its tokens, `approx_kl` the mean of k3, in nats.
    """
    if not (gap <= tolerance and abs(approx_kl) <= tolerance):
        raise TrainingError(
            "before the first step of an update the policy must be the one that sampled: needed a "
            f"mean |log ratio| and an approximate KL of at most {tolerance}, found {gap:.4g} and "
            f"{approx_kl:.4g}; look at dropout, temperature, padding and position ids"
        )


def clipped_step(learner: Learner) -> float:
    """Clip the gradient's global norm, step, and return the norm before clipping."""
    norm = float(clip_grad_norm_(learner.trained_weights, learner.settings.max_grad_norm))
    if not math.isfinite(norm):
        learner.optimizer.zero_grad()
        raise NotFinite("the loss or its gradient")
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    if learner.scaler is not None:
        learner.scaler.update()
    return norm
