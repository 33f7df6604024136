"""How far the policy is from the reference: estimators on sampled tokens, and the coefficient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf_pipeline.ppo.settings import LARGEST_KL_ERROR


def estimate_kl(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Return per-token estimates of KL(policy || reference), for tokens the policy sampled.

    With d = logprob - reference_logprob: k1 = d, unbiased, either sign; k2 = d^2 / 2, biased, never
    negative, low variance; k3 = exp(-d) - 1 + d, unbiased, never negative.
    Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html
    """
    d = logprobs - reference_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d


def next_kl_coef(
    kl_coef: float, observed: float, *, target: float, horizon: int, episodes: int
) -> float:
    """Return the coefficient after `episodes` more rollouts: larger when KL is over target.

    observed and target are nats per completion. Source: arXiv:1909.08593 eq. 4.
    """
    error = min(max(observed / target - 1, -LARGEST_KL_ERROR), LARGEST_KL_ERROR)
    return kl_coef * (1 + error * episodes / horizon)
