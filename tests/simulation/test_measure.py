"""The ruler: two policies by the hidden preference, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlhf_pipeline.records import RewardInput, user_prompt
from rlhf_pipeline.simulation.measure import compare_hidden, hidden_accuracy
from rlhf_pipeline.simulation.people import thumbs_up_probability
from rlhf_pipeline.simulation.world import hidden_preference

PROMPT = user_prompt("how much is the lamp?")
BEST = "happy to help! the lamp costs 12 coins. thank you for asking!"  # hidden 1
PLAIN = "well, the lamp costs 12 coins, as far as we know."  # hidden 0.5 + 0.1 + 0.15 + 0.15 = 0.9
RUDE = "who cares. the lamp costs 12 coins, as far as we know."  # hidden 0.8


def test_policies_are_compared_prompt_by_prompt() -> None:
    prompts = [PROMPT] * 4
    found = compare_hidden(prompts, [BEST, PLAIN, BEST, RUDE], [PLAIN, PLAIN, RUDE, BEST])
    assert found.prompts == 4
    assert found.candidate_mean == pytest.approx((1 + 0.9 + 1 + 0.8) / 4)
    assert found.baseline_mean == pytest.approx((0.9 + 0.9 + 0.8 + 1) / 4)
    assert found.win_rate.value == pytest.approx((1 + 0.5 + 1 + 0) / 4)  # a tie counts half
    assert found.relative_gain == pytest.approx(3.7 / 3.6 - 1)
    ups = [thumbs_up_probability(h) for h in (1, 0.9, 1, 0.8)]
    assert found.candidate_thumbs == pytest.approx(sum(ups) / 4)
    assert found.relative_thumbs > 0


def test_swapping_the_policies_mirrors_the_comparison() -> None:
    one = compare_hidden([PROMPT] * 3, [BEST, PLAIN, RUDE], [PLAIN, RUDE, RUDE])
    other = compare_hidden([PROMPT] * 3, [PLAIN, RUDE, RUDE], [BEST, PLAIN, RUDE])
    assert one.win_rate.value == pytest.approx(1 - other.win_rate.value)
    assert one.candidate_mean == other.baseline_mean
    assert (1 + one.relative_gain) * (1 + other.relative_gain) == pytest.approx(1)


def test_a_reward_that_is_the_hidden_preference_ranks_all_and_its_opposite_none() -> None:
    first, second = [BEST, RUDE, PLAIN, BEST], [PLAIN, PLAIN, PLAIN, RUDE]

    def knows(items: Sequence[RewardInput]) -> list[float]:
        return [hidden_preference(item.prompt, item.completion) for item in items]

    def opposes(items: Sequence[RewardInput]) -> list[float]:
        return [-score for score in knows(items)]

    right = hidden_accuracy(knows, [PROMPT] * 4, first, second)
    assert (right.value, right.n) == (1.0, 3)  # the pair that ties is left out
    assert hidden_accuracy(opposes, [PROMPT] * 4, first, second).value == 0.0


@pytest.mark.parametrize("turned", [False, True])
def test_a_reward_that_finds_all_alike_ranks_half(turned: bool) -> None:
    pair = [PLAIN] * 4, [BEST] * 4
    first, second = pair[::-1] if turned else pair

    def alike(items: Sequence[RewardInput]) -> list[float]:
        return [0.5] * len(items)

    assert hidden_accuracy(alike, [PROMPT] * 4, first, second).value == 0.5
