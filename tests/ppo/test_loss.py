"""The losses against hand-worked numbers; masks; additivity over microbatches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.errors import ShapeMismatch
from rlhf_pipeline.ppo.loss import policy_loss, value_loss

MASK = torch.tensor([[True, True, True], [True, True, False]])
OLD = torch.full((2, 3), -1.0)
RATIOS = torch.tensor([[1.5, 0.5, 1.1], [1.5, 0.5, 1.0]])
LOGPROBS = OLD + RATIOS.log()
ADVANTAGES = torch.tensor([[1.0, 1.0, 2.0], [-1.0, -1.0, 9.0]])


def loss_of(logprobs: Tensor, mask: Tensor = MASK, token_count: int = 5) -> Tensor:
    loss, _ = policy_loss(logprobs, OLD, ADVANTAGES, mask, clip_range=0.2, token_count=token_count)
    return loss


def test_policy_loss_worked_by_hand() -> None:
    # gain 1: ratio 1.5 counts as 1.2, 0.5 stays; gain 2: 1.1 stays
    # gain -1: ratio 1.5 stays (it must come down), 0.5 counts as 0.8
    by_hand = -(1.2 + 0.5 + 2.2 - 1.5 - 0.8) / 5
    loss, facts = policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_range=0.2, token_count=5)
    assert float(loss) == pytest.approx(by_hand)
    assert facts["ratio"] == pytest.approx((1.5 + 0.5 + 1.1 + 1.5 + 0.5) / 5)
    assert facts["policy/clip_fraction"] == pytest.approx(2 / 5)
    k3 = [r - 1 - math.log(r) for r in (1.5, 0.5, 1.1, 1.5, 0.5)]
    assert facts["policy/approx_kl"] == pytest.approx(sum(k3) / 5)
    assert facts["abs_log_ratio"] == pytest.approx(
        sum(abs(math.log(r)) for r in (1.5, 0.5, 1.1, 1.5, 0.5)) / 5
    )


def test_a_small_change_of_the_policy_has_a_divergence_too() -> None:
    for log_ratio in (1e-4, -1e-4):
        _, facts = policy_loss(
            OLD + log_ratio, OLD, ADVANTAGES, MASK, clip_range=0.2, token_count=5
        )
        by_hand = math.expm1(log_ratio) - log_ratio
        assert facts["policy/approx_kl"] == pytest.approx(by_hand, rel=0.1)  # OLD rounds the ratio


def test_importance_weights_scale_each_tokens_loss() -> None:
    weights = torch.tensor([[2.0, 1.0, 0.5], [1.0, 0.0, math.nan]])
    loss, _ = policy_loss(
        LOGPROBS, OLD, ADVANTAGES, MASK, clip_range=0.2, token_count=5, weights=weights
    )
    assert float(loss) == pytest.approx(-(2 * 1.2 + 0.5 + 0.5 * 2.2 - 1.5) / 5)


def test_beyond_the_clip_on_the_winning_side_there_is_no_gradient_and_elsewhere_there_is() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    loss_of(logprobs).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert logprobs.grad is not None
    # d loss / d logprob = -advantage * ratio / count where it counts
    by_hand = torch.tensor([[0.0, -0.5, -2.2], [1.5, 0.0, 0.0]]) / 5
    assert torch.allclose(logprobs.grad, by_hand, atol=1e-6)


def test_the_ratio_is_per_token() -> None:
    # Log-ratios +d and -d cancel in the sum over the completion, and must not.
    logprobs = torch.tensor([[-1.0 + math.log(1.1), -1.0 - math.log(1.1)]])
    old, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    advantages = torch.tensor([[1.0, 0.0]])
    loss, _ = policy_loss(logprobs, old, advantages, mask, clip_range=0.2, token_count=2)
    assert float(loss) == pytest.approx(-1.1 / 2)


def test_value_loss_worked_by_hand_with_both_sides_of_the_clip() -> None:
    values = torch.tensor([[1.0, 2.0, 0.1], [3.0, 0.0, 7.0]])
    old = torch.tensor([[0.0, 0.0, 0.0], [3.0, 3.0, 7.0]])
    returns = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 9.0]])
    # clipped values .2 .2 .1 / 3 2.8; squared errors: plain 0 1 .81 / 4 1,
    # clipped .64 .64 .81 / 4 14.44
    loss, facts = value_loss(values, old, returns, MASK, value_clip_range=0.2, token_count=5)
    assert float(loss) == pytest.approx(0.5 * (0.64 + 1.0 + 0.81 + 4.0 + 14.44) / 5)
    assert facts["critic/clip_fraction"] == pytest.approx(2 / 5)


def test_nothing_is_held_back_within_the_range_whatever_rounding_says() -> None:
    generator = torch.Generator().manual_seed(0)
    old, moved, returns = torch.randn(3, 4, 500, generator=generator)
    mask = torch.ones_like(old, dtype=torch.bool)
    values = old + moved / 10
    _, facts = value_loss(values, old, returns, mask, value_clip_range=9.0, token_count=2000)
    assert facts["critic/clip_fraction"] == 0


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e9])
def test_masked_positions_cannot_matter_to_losses_or_gradients(garbage: float) -> None:
    def both(fill: float) -> tuple[Tensor, Tensor, Tensor]:
        dirty = [x.masked_fill(~MASK, fill) for x in (LOGPROBS, OLD, ADVANTAGES)]
        logprobs, values = dirty[0].requires_grad_(), (RATIOS * 1).masked_fill(~MASK, fill)
        values.requires_grad_()
        old, gains = dirty[1:]
        loss, facts = policy_loss(logprobs, old, gains, MASK, clip_range=0.2, token_count=5)
        critic, more = value_loss(values, old, gains, MASK, value_clip_range=0.2, token_count=5)
        (loss + critic).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        assert all(math.isfinite(x) for x in {**facts, **more}.values())
        assert logprobs.grad is not None
        assert values.grad is not None
        return (loss + critic).detach(), logprobs.grad, values.grad

    for clean, dirty in zip(both(0.5), both(garbage), strict=True):
        assert torch.equal(clean, dirty)


def test_microbatches_add_up_to_the_whole() -> None:
    whole = loss_of(LOGPROBS)
    parts = [
        policy_loss(
            LOGPROBS[i : i + 1],
            OLD[i : i + 1],
            ADVANTAGES[i : i + 1],
            MASK[i : i + 1],
            clip_range=0.2,
            token_count=5,
        )
        for i in range(2)
    ]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole))
    assert sum(facts["ratio"] for _, facts in parts) == pytest.approx(5.1 / 5)


def test_losses_refuse_shapes_that_disagree() -> None:
    with pytest.raises(ShapeMismatch):
        loss_of(LOGPROBS[:, :2])
    with pytest.raises(ShapeMismatch):
        value_loss(OLD, OLD[:1], OLD, MASK, value_clip_range=0.2, token_count=5)
