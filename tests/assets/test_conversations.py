"""A turn whose PPO trains on conversations with simulated customers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.registry.reproduce import newest_turn
from rlhf_pipeline.stages import improve
from tests.assets.world import FirstTurn, Loop


@pytest.mark.slow
def test_a_turns_policy_talks_with_customers_where_the_recipe_says_so(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    agent = first_turn.agent_id
    turn = newest_turn(loop.pipeline.ledger, loop.pipeline.settings(agent), agent)
    training = turn.settings.training.model_copy(update={"simulated_user": "shop"})
    ppo = replace(turn.settings.ppo, updates=1, max_turns=2, reward_timing="each_turn")
    settings = turn.settings.model_copy(update={"training": training, "ppo": ppo})
    heard: list[object] = []
    result = improve(
        replace(turn, settings=settings), tmp_path, ppo, lambda facts: heard.append(facts)
    )
    (update,) = result.history
    assert 1.5 < update["rollout/turns_mean"] <= 2  # few customers are asked for a secret
    assert update["policy/first_ratio"] == pytest.approx(1, abs=1e-3)
    assert heard
