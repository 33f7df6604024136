"""The two losses of PPO, as sums over a microbatch divided by the minibatch's token count.

Dividing by the count of the whole minibatch, not of the microbatch, makes the gradient of the sum
over microbatches equal to the gradient of one large batch, however it was split. All tensors are
(B, T); completion_mask is True on tokens that count, and nothing elsewhere can matter, not even
for the gradient: inputs are replaced by 0 there before the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_pipeline.ppo.advantages import counted, same_shape

POLICY_FACTS = ("ratio", "policy/approx_kl", "abs_log_ratio", "policy/clip_fraction")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    clip_range: float,
    token_count: int | Tensor,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate loss (to minimise) and its statistics.

    The ratio is per token. `weights`, (B, T), are importance weights of the old policy over the one
    that sampled; None means 1. The statistics, POLICY_FACTS, are means over tokens: of the ratio,
    of k3 between old and new policy (nats), of |log ratio|, and the share of tokens that the clip
    holds back. They stay where the losses are: to ask a GPU for a number is to wait for it.
    Source: arXiv:1707.06347 eq. 7, with the sign turned.
    """
    same_shape(logprobs, old_logprobs, advantages, completion_mask)
    log_ratio = counted(logprobs, completion_mask) - counted(old_logprobs, completion_mask)
    advantages = counted(advantages, completion_mask)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    losses = torch.maximum(unclipped, clipped)
    if weights is not None:
        losses = losses * counted(weights, completion_mask)
    loss = counted(losses, completion_mask).sum() / token_count
    with torch.no_grad():
        facts = torch.stack(
            [
                counted(ratio, completion_mask).sum(),
                counted(torch.expm1(log_ratio) - log_ratio, completion_mask).sum(),
                log_ratio.abs().sum(),
                counted((clipped > unclipped).to(ratio.dtype), completion_mask).sum(),
            ]
        )
    return loss, dict(zip(POLICY_FACTS, facts / token_count, strict=True))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    completion_mask: Tensor,
    *,
    value_clip_range: float,
    token_count: int | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squared error of the values against returns, clipped around the old values.

    The larger of the plain and the clipped error counts, so leaving the range never pays; the
    returns themselves come from unclipped values. The statistic is the share of tokens that the
    clip holds back.
    Source: openai/baselines ppo2, as kept by N+ (arXiv:2403.17031, detail 6).
    """
    same_shape(values, old_values, returns, completion_mask)
    values, old_values = counted(values, completion_mask), counted(old_values, completion_mask)
    returns = counted(returns, completion_mask)
    moved = values - old_values
    held = old_values + moved.clamp(-value_clip_range, value_clip_range)
    # Within the range the value itself: a sum that is rounded would count as held back.
    clipped = torch.where(moved.abs() > value_clip_range, held, values)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * torch.maximum(error, clipped_error).sum() / token_count
    with torch.no_grad():
        clip_fraction = (clipped_error > error).sum() / token_count
    return loss, {"critic/clip_fraction": clip_fraction}
