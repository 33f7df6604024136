"""From rewards to advantages: pure functions on (B, T) tensors, B rollouts, T completion tokens.

completion_mask is True on tokens that count. Whatever stands elsewhere (NaN, 1e9) changes nothing:
every function replaces it by 0 before it computes anything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_pipeline.errors import ShapeMismatch

_SMALLEST_VARIANCE = 1e-8


def estimate_advantages(
    rewards: Tensor, values: Tensor, completion_mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return per-token advantages and returns by generalised advantage estimation.

    Shapes: all five tensors are (B, T). values[:, t] is the value of the state in which token t is
    chosen. Positions where completion_mask is False come back as 0. Neither result is whitened.

    Raises ShapeMismatch if the inputs disagree.
    Source: arXiv:1506.02438 eq. 16. The value after the last token is 0: a completion ends its
    episode, at its end token or at the length limit (which `missing_eos_score` penalises).
    """
    same_shape(rewards, values, completion_mask)
    rewards, values = counted(rewards, completion_mask), counted(values, completion_mask)
    advantages = torch.zeros_like(rewards)
    following_advantage = following_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        surprise = rewards[:, t] + gamma * following_value - values[:, t]
        following_advantage = surprise + gamma * gae_lambda * following_advantage
        following_advantage = counted(following_advantage, completion_mask[:, t])
        following_value = values[:, t]
        advantages[:, t] = following_advantage
    return advantages, advantages + values


def estimate_turn_advantages(
    rewards: Tensor,
    values: Tensor,
    completion_mask: Tensor,
    turn: Tensor,
    next_turn: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    turn_gamma: float,
    turn_gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of conversations: credit flows from each turn to those before.

    A row is one turn's completion. turn (B,) counts from 0; next_turn (B,) is the row with the same
    conversation's next turn, -1 after the last. Between a turn's last token and the next turn's
    first, turn_gamma and turn_gae_lambda stand where gamma and gae_lambda stand between tokens:
    what the user says in between is the environment's step. Shapes, masks and errors are those of
    `estimate_advantages`, which this is where no turn follows another.

    Source: arXiv:1506.02438 eq. 16, with a discount and a decay that depend on the step.
    """
    same_shape(rewards, values, completion_mask)
    values = counted(values, completion_mask)
    last = completion_mask & (completion_mask.cumsum(1) == completion_mask.sum(1, keepdim=True))
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for k in reversed(range(int(turn.max()) + 1)):
        rows = (turn == k).nonzero()[:, 0]
        follows = next_turn[rows]
        ahead = values[follows, 0] + turn_gae_lambda * advantages[follows, 0]
        ahead = turn_gamma * counted(ahead, follows >= 0)
        # What lies beyond the last token is, to the tokens of this turn, part of its reward.
        advantages[rows], returns[rows] = estimate_advantages(
            rewards[rows] + counted(ahead[:, None], last[rows]),
            values[rows],
            completion_mask[rows],
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
    return advantages, returns


def leave_one_out_advantages(
    rewards: Tensor, completion_mask: Tensor, *, completions_per_prompt: int
) -> Tensor:
    """Return (B, T) advantages: a completion's total reward less the mean of its siblings'.

    Rows come in blocks of completions_per_prompt with the same prompt; every token of a completion
    gets the same advantage. Source: RLOO, arXiv:2402.14740 eq. 8.
    """
    same_shape(rewards, completion_mask)
    k = completions_per_prompt
    totals = counted(rewards, completion_mask).sum(1).view(-1, k)
    # What siblings share is in none of their advantages; taken off first, it leaves no rounding
    # where they score alike, which whitening and Adam would make a step of full size.
    totals = totals - totals[:, :1]
    siblings = (totals.sum(1, keepdim=True) - totals) / (k - 1)
    return counted((totals - siblings).view(-1, 1).expand_as(rewards), completion_mask)


def whiten(x: Tensor, completion_mask: Tensor) -> Tensor:
    """Return x with mean 0 and variance 1 over counted positions, 0 elsewhere.

    Shapes (B, T). The mean is not added back. One counted token, or all equal, comes back as 0.
    """
    centred, variance = _centred(x, completion_mask)
    return centred * torch.rsqrt(variance + _SMALLEST_VARIANCE)


def scale_to_unit_variance(x: Tensor, completion_mask: Tensor) -> Tensor:
    """Return x divided by its deviation over counted positions, 0 elsewhere; signs are kept.

    Where all are equal there is no deviation, and they stay as they are.
    """
    _, variance = _centred(x, completion_mask)
    scale = torch.rsqrt(variance + _SMALLEST_VARIANCE)
    return counted(x, completion_mask) * torch.where(variance > _SMALLEST_VARIANCE, scale, 1.0)


def explained_variance(values: Tensor, returns: Tensor, completion_mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 is a perfect critic, <= 0 a useless one.

    Where all returns are equal there is nothing to explain, and the answer is 0.
    """
    same_shape(values, returns)
    _, variance = _centred(returns, completion_mask)
    _, unexplained = _centred(returns - values, completion_mask)
    return float(1 - unexplained / variance) if variance > _SMALLEST_VARIANCE else 0.0


def masked_mean(x: Tensor, completion_mask: Tensor) -> Tensor:
    """Return the mean of x over counted positions; 0 where none counts."""
    same_shape(x, completion_mask)
    return counted(x, completion_mask).sum() / completion_mask.sum().clamp(min=1)


def mean_of_alike(x: Tensor, completion_mask: Tensor, alike: Tensor) -> Tensor:
    """Return for each row (B, 1) the mean of x over the counted positions of all rows like it.

    x and completion_mask are (B, T); rows with the same number in alike (B,) are like each other.
    """
    same = alike[:, None] == alike
    sums, counts = counted(x, completion_mask).sum(1), completion_mask.sum(1)
    total, number = (counted(of.expand_as(same), same).sum(1) for of in (sums, counts))
    return (total / number.clamp(min=1))[:, None]


def counted(x: Tensor, completion_mask: Tensor) -> Tensor:
    """Return x where the mask is True and 0 elsewhere, also where x is NaN there."""
    return torch.where(completion_mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def same_shape(*tensors: Tensor) -> None:
    """Raise ShapeMismatch unless all tensors have one shape."""
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) > 1:
        found = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ShapeMismatch(
            f"needed tensors of one shape (rollouts, tokens), found {found}; pad them alike"
        )


def _centred(x: Tensor, completion_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return x less its mean over counted positions, 0 elsewhere, and its variance there.

    It is measured from the least of them: where all are equal both are 0, without the rounding that
    their sum would have.
    """
    least = x.masked_fill(~completion_mask, math.inf).amin()
    x = counted(x - least, completion_mask)
    centred = counted(x - masked_mean(x, completion_mask), completion_mask)
    return centred, masked_mean(centred.square(), completion_mask)
