"""A turn whose PPO maximises the learned reward together with functions the recipe names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.registry.reproduce import newest_turn
from rlhf_pipeline.reward.settings import FunctionSettings
from rlhf_pipeline.stages import improve
from tests.assets.world import FirstTurn, Loop

FUNCTIONS = {
    "learned": FunctionSettings(normalisation="running"),
    "rouge-l": FunctionSettings(weight=0.5),  # compares with what the proxy's voters chose
    "empathy": FunctionSettings(weight=0.2),
}


def test_a_turn_maximises_what_the_recipe_names_and_chooses_by_people(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    agent = first_turn.agent_id
    turn = newest_turn(loop.pipeline.ledger, loop.pipeline.settings(agent), agent)
    reward = turn.settings.reward.model_copy(update={"functions": FUNCTIONS})
    ppo = replace(turn.settings.ppo, updates=1)
    turn = replace(turn, settings=turn.settings.model_copy(update={"reward": reward, "ppo": ppo}))
    result = improve(turn, tmp_path, ppo, lambda facts: None)
    (update,) = result.history
    pieces = [update[f"reward/{name}/added_mean"] for name in FUNCTIONS]
    assert update["rollout/score_mean"] == pytest.approx(sum(pieces), abs=1e-6)
    assert 0 < update["reward/rouge-l/score_mean"] < 1
    # The update is chosen by the stopping model alone, which no function is part of.
    plain = improve(
        replace(turn, settings=loop.pipeline.settings(agent)), tmp_path / "plain", ppo, print
    )
    assert result.evaluations[0].stopping_mean == plain.evaluations[0].stopping_mean
    assert result.evaluations[0].score_mean != plain.evaluations[0].score_mean
