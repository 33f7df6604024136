"""KL estimators against the exact divergence of small distributions; the adaptive coefficient."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from rlhf_pipeline.ppo.kl import estimate_kl, next_kl_coef

POLICY = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
EXACT = float((POLICY * (POLICY / REFERENCE).log()).sum())


def test_k1_is_positive_where_the_policy_likes_a_token_more_than_the_reference_does() -> None:
    k1 = estimate_kl(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0]), "k1")
    assert k1.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: Literal["k1", "k3"]) -> None:
    estimates = estimate_kl(POLICY.log(), REFERENCE.log(), estimator)
    assert float((POLICY * estimates).sum()) == pytest.approx(EXACT)


def test_k2_is_half_the_square_and_near_the_truth_for_near_policies() -> None:
    assert estimate_kl(torch.tensor([-1.0]), torch.tensor([-4.0]), "k2").tolist() == [4.5]
    near = (REFERENCE + 0.01 * POLICY) / 1.01
    exact = float((near * (near / REFERENCE).log()).sum())
    estimates = estimate_kl(near.log(), REFERENCE.log(), "k2")
    assert float((near * estimates).sum()) == pytest.approx(exact, rel=0.02)


def test_k2_and_k3_are_never_negative_and_all_are_zero_for_equal_policies() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 1000, generator=generator) * 3
    assert estimate_kl(one, other, "k2").min() >= 0
    assert estimate_kl(one, other, "k3").min() >= 0
    assert not estimate_kl(one, one, "k1").any()
    assert not estimate_kl(one, one, "k2").any()
    assert not estimate_kl(one, one, "k3").any()


def test_k3_worked_by_hand() -> None:
    # d = log 2: 1/2 - 1 + log 2
    k3 = estimate_kl(torch.tensor([0.0]), torch.tensor([-0.6931472]), "k3")
    assert float(k3) == pytest.approx(0.1931472, abs=1e-6)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.1),  # on target: unchanged
        (6.6, 0.1 * (1 + 0.1 * 64 / 1000)),  # 10 % over
        (5.4, 0.1 * (1 - 0.1 * 64 / 1000)),  # 10 % under
        (60.0, 0.1 * (1 + 0.2 * 64 / 1000)),  # clipped
        (0.0, 0.1 * (1 - 0.2 * 64 / 1000)),  # clipped
    ],
)
def test_the_coefficient_follows_the_clipped_error(observed: float, expected: float) -> None:
    coef = next_kl_coef(0.1, observed, target=6.0, horizon=1000, episodes=64)
    assert coef == pytest.approx(expected)
