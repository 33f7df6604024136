"""Scores, the EOS trick, rewards and microbatches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.ppo.rollout import (
    Tokens,
    apply_eos_trick,
    ends_with_stop_token,
    join_rows,
    measure,
    microbatches,
    rewards_per_token,
    score_completions,
)
from rlhf_pipeline.records import RewardInput, ScoreMoments, user_prompt

EOS, PAD = 1, 0
MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])


def tokens_of(prompts: list[list[int]], completions: list[list[int]]) -> Tokens:
    """Return prompts (0 is padding on the left) and completions (0 is padding on the right)."""
    prompt_ids, completion_ids = torch.tensor(prompts), torch.tensor(completions)
    return Tokens(prompt_ids, prompt_ids != PAD, completion_ids, completion_ids != PAD)


@pytest.mark.parametrize("on_the_left", [False, True])
def test_rows_are_joined_without_a_second_copy_of_them(on_the_left: bool) -> None:
    parts = [torch.ones(rows, width, 3) for rows, width in ((2, 4), (1, 7), (3, 0))]
    with torch.profiler.profile(profile_memory=True) as watched:
        joined = join_rows(parts, on_the_left=on_the_left)
    filled = joined.flip(1) if on_the_left else joined
    assert filled[..., 0].sum(1).tolist() == [4, 4, 7, 0, 0, 0]
    assert filled[:, :4].all(-1).all(-1).tolist() == [True, True, True, False, False, False]
    made = sum(max(event.self_cpu_memory_usage, 0) for event in watched.key_averages())
    assert made == joined.nbytes


def test_only_the_stop_token_within_the_completion_ends_it() -> None:
    completion_ids = torch.tensor([[5, 6, EOS], [5, EOS, EOS], [5, 6, 7], [5, 6, EOS], [2, 5, 6]])
    mask = torch.ones(5, 3, dtype=torch.bool)
    mask[3, 2] = False  # that end token is padding
    prompt_ids = torch.full((5, 2), EOS)  # chat prompts hold end tokens of earlier turns
    tokens = Tokens(prompt_ids, torch.ones(5, 2, dtype=torch.bool), completion_ids, mask)
    assert ends_with_stop_token(tokens, EOS).tolist() == [True, True, False, False, False]
    assert ends_with_stop_token(tokens, 2).tolist() == [False, False, False, False, True]


def test_completions_that_did_not_end_get_the_fixed_score_at_most_and_others_keep_theirs() -> None:
    scores = torch.tensor([3.0, -5.0, 0.5, 2.0])
    ended = torch.tensor([True, False, True, False])
    # Nor is anything gained by not ending where a floor has said no.
    assert apply_eos_trick(scores, ended, -1.0).tolist() == [3.0, -5.0, 0.5, -1.0]
    assert apply_eos_trick(scores, ended, None).tolist() == [3.0, -5.0, 0.5, 2.0]


def test_the_score_stands_on_the_last_real_token_and_kl_on_every_real_one() -> None:
    kl = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 9.0], [0.6, 9.0, 9.0]])
    rewards = rewards_per_token(torch.tensor([1.0, 2.0, 3.0]), kl, MASK, kl_coef=0.5)
    by_hand = torch.tensor([[-0.05, -0.1, 0.85], [-0.2, 1.75, 0.0], [2.7, 0.0, 0.0]])
    assert torch.allclose(rewards, by_hand)


def test_rewards_ignore_masked_kl_and_rollouts_without_tokens() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    kl = torch.tensor([[0.0, math.nan], [1e9, math.inf]])
    rewards = rewards_per_token(torch.tensor([1.0, 2.0]), kl, mask, kl_coef=0.5)
    assert rewards.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_microbatches_hold_everyone_once_and_respect_the_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [[PAD] * (9 - n) + [3] * n for n in torch.randint(1, 10, (40,), generator=generator)]
    completions = [
        [4] * n + [PAD] * (9 - n) for n in torch.randint(1, 10, (40,), generator=generator)
    ]
    tokens = tokens_of(prompts, completions)
    members = torch.randperm(40, generator=generator)[:30]
    groups = list(microbatches(tokens, members, token_budget=50))
    assert sorted(torch.cat(groups).tolist()) == sorted(members.tolist())
    for group in groups:
        some = tokens.rows(group)
        assert some.prompt_ids.numel() + some.completion_ids.numel() <= 50
        assert torch.equal(some.prompt_mask.sum(1), tokens.prompt_mask[group].sum(1))
        assert torch.equal(some.completion_mask.sum(1), tokens.completion_mask[group].sum(1))
    padding = sum(int((~tokens.rows(g).completion_mask).sum()) for g in groups)
    assert padding < int((~tokens.rows(members).completion_mask).sum())


def test_a_rollout_over_the_budget_is_a_microbatch_of_its_own() -> None:
    tokens = tokens_of([[3, 3], [PAD, 3]], [[4, 4], [4, PAD]])
    groups = [g.tolist() for g in microbatches(tokens, torch.tensor([0, 1]), token_budget=1)]
    assert groups == [[0], [1]]


def test_measuring_in_microbatches_returns_rows_in_order_and_zero_outside_the_mask() -> None:
    tokens = tokens_of([[PAD, 3], [3, 3], [PAD, 3]], [[4, PAD, PAD], [5, 6, 7], [8, 9, PAD]])

    def ids_and_garbage(some: Tokens) -> torch.Tensor:
        return torch.where(some.completion_mask, some.completion_ids.float(), math.nan)

    measured = measure(ids_and_garbage, tokens, token_budget=5)
    assert measured.tolist() == tokens.completion_ids.tolist()


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], "needed 2, found 1"),
        ([1.0, math.nan], "found nan for item 1"),
        ([math.inf, 1.0], "found inf for item 0"),
        ([1.0, None], "the proxy reward must give one number per item, found what is none: .*None"),
        (["good", 1.0], "one number per item, .*'good'"),
        (torch.ones(2, 3), "one number per item, found what is none"),  # a classifier's logits
        (None, "one number per item, .*not iterable"),
    ],
)
def test_rewards_that_are_not_one_finite_score_each_are_refused(scores: Any, message: str) -> None:
    def broken(items: Sequence[RewardInput], /) -> Any:
        return scores

    with pytest.raises(TrainingError, match=message):
        score_completions(broken, [user_prompt("hi")] * 2, ["a", "b"], name="proxy")


def test_running_moments_agree_with_the_statistics_module() -> None:
    moments = ScoreMoments()
    moments.add([1.0, 5.0])
    moments.add([3.0, -2.0, 8.0])
    scores = [1.0, 5.0, 3.0, -2.0, 8.0]
    assert moments.mean == pytest.approx(statistics.fmean(scores))
    assert moments.normalised([8.0])[0] == pytest.approx((8 - 3) / statistics.pstdev(scores))


def test_running_moments_of_equal_scores_only_centre() -> None:
    moments = ScoreMoments()
    assert moments.normalised([2.0]) == [2.0]
    moments.add([4.0, 4.0])
    assert moments.normalised([4.0, 5.0]) == [0.0, 1.0]
