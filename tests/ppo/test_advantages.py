"""Advantages against hand-worked numbers and a slow definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_pipeline.errors import ShapeMismatch
from rlhf_pipeline.ppo.advantages import (
    estimate_advantages,
    estimate_turn_advantages,
    explained_variance,
    leave_one_out_advantages,
    masked_mean,
    scale_to_unit_variance,
    whiten,
)

MASK = torch.tensor([[True, True, True], [True, True, False]])


def slow_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Equation 16 of arXiv:1506.02438 as it is written: a sum over all later steps."""
    result = torch.zeros_like(rewards)
    for b in range(len(rewards)):
        length = int(mask[b].sum())
        for t in range(length):
            total = 0.0
            for later in range(t, length):
                following = float(values[b, later + 1]) if later + 1 < length else 0.0
                surprise = float(rewards[b, later]) + gamma * following - float(values[b, later])
                total += (gamma * gae_lambda) ** (later - t) * surprise
            result[b, t] = total
    return result


def test_advantages_of_two_rollouts_worked_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 2.0], [0.0, 4.0, 7.0]])
    values = torch.tensor([[0.5, 1.0, 1.0], [2.0, 2.0, 9.0]])
    advantages, returns = estimate_advantages(rewards, values, MASK, gamma=0.5, gae_lambda=0.5)
    # row 0: surprises 1 + .5 - .5 = 1, 0 + .5 - 1 = -.5, 2 - 1 = 1; decay .25
    # row 1: surprises 0 + 1 - 2 = -1, 4 - 2 = 2; nothing follows the second token
    by_hand = torch.tensor([[0.9375, -0.25, 1.0], [-0.5, 2.0, 0.0]])
    assert torch.equal(advantages, by_hand)
    assert torch.equal(returns, torch.tensor([[1.4375, 0.75, 2.0], [1.5, 4.0, 0.0]]))


def test_credit_flows_from_a_turn_to_the_one_before_as_worked_by_hand() -> None:
    """Rows 0 and 2 are one conversation, row 1 is one of a single turn."""
    rewards = torch.tensor([[1.0, 0.0], [2.0, math.nan], [0.0, 4.0]])
    values = torch.tensor([[0.5, 1.0], [1.0, math.nan], [2.0, 2.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    advantages, returns = estimate_turn_advantages(
        rewards,
        values,
        mask,
        torch.tensor([0, 0, 1]),
        torch.tensor([2, -1, -1]),
        gamma=0.5,
        gae_lambda=0.5,
        turn_gamma=0.8,
        turn_gae_lambda=0.5,
    )
    # row 2: surprises 0 + .5 * 2 - 2 = -1 and 4 - 2 = 2, decay .25: advantages -.5 and 2
    # row 0: its last surprise is 0 + .8 * 2 - 1 = .6, its advantage .6 + .8 * .5 * -.5 = .4;
    #        the first 1 + .5 * 1 - .5 = 1, so 1 + .25 * .4 = 1.1
    by_hand = torch.tensor([[1.1, 0.4], [1.0, 0.0], [-0.5, 2.0]])
    assert torch.allclose(advantages, by_hand)
    assert torch.allclose(returns, torch.tensor([[1.6, 1.4], [2.0, 0.0], [1.5, 4.0]]))


def test_turns_with_the_tokens_discount_are_one_long_completion() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 1, 6, generator=generator)
    mask = torch.ones(1, 6, dtype=torch.bool)
    whole, _ = estimate_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    parts, _ = estimate_turn_advantages(
        rewards.view(3, 2),
        values.view(3, 2),
        mask.view(3, 2),
        torch.tensor([0, 1, 2]),
        torch.tensor([1, 2, -1]),
        gamma=0.9,
        gae_lambda=0.8,
        turn_gamma=0.9,
        turn_gae_lambda=0.8,
    )
    assert torch.allclose(parts.view(1, 6), whole, atol=1e-6)


def test_gamma_discounts_and_lambda_decays_and_they_are_not_the_same() -> None:
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    # The second surprise is 0, so only gamma times the following value is left of the first.
    advantages, _ = estimate_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.1)
    assert advantages[0].tolist() == pytest.approx([0.9, 0.0])


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=30)
def test_advantages_agree_with_the_definition(seed: int, gamma: float, gae_lambda: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    values = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, 10, (4, 1), generator=generator)
    mask = torch.arange(9) < lengths
    advantages, returns = estimate_advantages(
        rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda
    )
    slow = slow_advantages(rewards, values, mask, gamma, gae_lambda)
    assert torch.allclose(advantages, slow, atol=1e-6, rtol=0)
    assert torch.allclose(returns[mask], (slow + values)[mask], atol=1e-6, rtol=0)
    assert not returns[~mask].any()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e9])
def test_masked_positions_cannot_matter_to_advantages(garbage: float) -> None:
    clean = torch.tensor([[1.0, 2.0, 3.0], [4.0, 6.0, 0.0]])
    dirty = clean.masked_fill(~MASK, garbage)
    kwargs = {"gamma": 0.9, "gae_lambda": 0.8}
    for one, other in zip(
        estimate_advantages(clean, clean / 2, MASK, **kwargs),
        estimate_advantages(dirty, dirty / 2, MASK, **kwargs),
        strict=True,
    ):
        assert torch.equal(one, other)
    for function in (whiten, scale_to_unit_variance, masked_mean):
        assert torch.equal(function(clean, MASK), function(dirty, MASK))
    assert explained_variance(clean / 2, clean, MASK) == explained_variance(dirty / 2, dirty, MASK)
    assert torch.equal(
        leave_one_out_advantages(clean, MASK, completions_per_prompt=2),
        leave_one_out_advantages(dirty, MASK, completions_per_prompt=2),
    )


def test_a_rollout_without_tokens_has_no_advantage() -> None:
    mask = torch.tensor([[False, False], [True, False]])
    ones = torch.ones(2, 2)
    advantages, returns = estimate_advantages(ones, ones / 2, mask, gamma=1.0, gae_lambda=1.0)
    assert advantages.tolist() == [[0.0, 0.0], [0.5, 0.0]]
    assert returns.tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_whitening_worked_by_hand_counts_completion_tokens_only() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 100.0]])
    # mean 3, variance 2 over five tokens
    by_hand = torch.tensor([[-2.0, -1.0, 0.0], [1.0, 2.0, 0.0]]) / math.sqrt(2)
    assert torch.allclose(whiten(x, MASK), by_hand, atol=1e-6)


def test_whitened_advantages_are_centred_whatever_the_mean_was() -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) + 50
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    whitened = whiten(x, mask)[mask]
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-5)
    assert float(whitened.var(correction=0)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "mask", [torch.tensor([[True, False]]), torch.tensor([[True, True]]), torch.zeros(1, 2) > 0]
)
def test_whitening_one_token_equal_ones_or_none_gives_zeros(mask: Tensor) -> None:
    assert whiten(torch.tensor([[3.0, 3.0]]), mask).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("value", [0.7, 333.3, -1e4])
def test_what_is_equal_leaves_no_rounding_to_learn_from(value: float) -> None:
    """Whitening would make a spread of it, and Adam a step of full size."""
    equal = torch.full((9, 2), value)
    mask = torch.ones(9, 2, dtype=torch.bool)
    assert whiten(equal, mask).count_nonzero() == 0
    assert torch.equal(scale_to_unit_variance(equal, mask), equal)
    assert explained_variance(torch.zeros(9, 2), equal, mask) == 0
    alone = leave_one_out_advantages(equal[:, :1], mask[:, :1], completions_per_prompt=3)
    assert alone.count_nonzero() == 0


def test_scaling_keeps_signs_and_makes_variance_one() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 100.0]])
    scaled = scale_to_unit_variance(x, MASK)
    by_hand = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]) / math.sqrt(2)
    assert torch.allclose(scaled, by_hand, atol=1e-6)


@pytest.mark.parametrize("mask", [[True, False], [True, True]])
def test_scaling_one_token_or_equal_ones_leaves_them(mask: list[bool]) -> None:
    scaled = scale_to_unit_variance(torch.tensor([[0.3, 0.3]]), torch.tensor([mask]))
    assert scaled[0, mask].tolist() == pytest.approx([0.3] * sum(mask))


def test_leave_one_out_worked_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 0.0], [1.0, 0.0, 5.0], [4.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    mask = torch.tensor(
        [[True, True, True], [True, True, False], [True, False, False], [True, True, True]]
    )
    # totals 3, 1 | 4, 2; each less its sibling
    by_hand = [[2.0, 2.0, 2.0], [-2.0, -2.0, 0.0], [2.0, 0.0, 0.0], [-2.0, -2.0, -2.0]]
    assert leave_one_out_advantages(rewards, mask, completions_per_prompt=2).tolist() == by_hand


def test_explained_variance_of_perfect_constant_and_inverted_critics() -> None:
    returns = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]])
    assert explained_variance(returns, returns, MASK) == pytest.approx(1)
    assert explained_variance(torch.ones(2, 3), returns, MASK) == pytest.approx(0)
    assert explained_variance(-returns, returns, MASK) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(2, 3), MASK) == 0.0


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match=r"found \(2, 3\), \(2, 2\)"):
        estimate_advantages(torch.ones(2, 3), torch.ones(2, 2), MASK, gamma=1.0, gae_lambda=1.0)
