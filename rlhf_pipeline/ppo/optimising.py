"""The optimizer steps of one update: gradients over microbatches, checked, clipped and taken."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from rlhf_pipeline.errors import TrainingError
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
                check_first_ratio(facts, settings.ratio_tolerance)
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
    settings, team = learner.settings, learner.team
    token_count = max(int(rollouts.tokens.completion_mask[members].sum()), 1)
    found: list[dict[str, Tensor]] = []
    budget = settings.tokens_per_microbatch
    for some in microbatches(rollouts.tokens, team.part(members), token_budget=budget):
        tokens = rollouts.tokens.rows(some)
        T = tokens.completion_ids.shape[1]
        logprobs, values = learner.logprobs_and_shared_values(tokens)
        loss, facts = policy_loss(
            logprobs,
            rollouts.logprobs[some, :T],
            rollouts.advantages[some, :T],
            tokens.completion_mask,
            clip_range=settings.clip_range,
            token_count=token_count,
            weights=None if rollouts.weights is None else rollouts.weights[some, :T],
        )
        facts["policy/loss"] = facts["train/loss"] = loss.detach()
        if isinstance(learner.critic, (SeparateCritic, AdapterCritic)):
            # The two networks share nothing: one's activations go before the other's come.
            descend(loss, learner.scaler)
            loss, values = torch.zeros_like(loss), learner.values(tokens)
        if values is not None:
            critic_loss, critic_facts = value_loss(
                values,
                rollouts.values[some, :T],
                rollouts.returns[some, :T],
                tokens.completion_mask,
                value_clip_range=settings.value_clip_range,
                token_count=token_count,
            )
            facts |= {**critic_facts, "critic/loss": critic_loss.detach()}
            facts["train/loss"] = facts["policy/loss"] + settings.value_coef * facts["critic/loss"]
            loss = loss + settings.value_coef * critic_loss
        descend(loss, learner.scaler)
        found.append(facts)
    team.add_gradients(trained_weights(learner))
    shares = torch.stack([torch.stack(list(facts.values())) for facts in found])
    return team.add_facts(dict(zip(found[0], shares.cpu().double().sum(0).tolist(), strict=True)))


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
    while not all(_is_finite(w) for w in trained_weights(learner)):
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


def trained_weights(learner: Learner) -> list[nn.Parameter]:
    """Return what the optimizer moves, in its order."""
    return [w for group in learner.optimizer.param_groups for w in group["params"]]


def check_first_ratio(facts: dict[str, float], tolerance: float) -> None:
    """Raise TrainingError unless the policy that trains is the one that sampled."""
    gap, approx_kl = facts["abs_log_ratio"], facts["policy/approx_kl"]
    if not (gap <= tolerance and abs(approx_kl) <= tolerance):
        raise TrainingError(
            "before the first step of an update the policy must be the one that sampled: needed a "
            f"mean |log ratio| and an approximate KL of at most {tolerance}, found {gap:.4g} and "
            f"{approx_kl:.4g}; look at dropout, temperature, padding and position ids"
        )


def clipped_step(learner: Learner) -> float:
    """Clip the gradient's global norm, step, and return the norm before clipping."""
    norm = float(clip_grad_norm_(trained_weights(learner), learner.settings.max_grad_norm))
    if not math.isfinite(norm):
        learner.optimizer.zero_grad()
        raise NotFinite("the loss or its gradient")
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    if learner.scaler is not None:
        learner.scaler.update()
    return norm
