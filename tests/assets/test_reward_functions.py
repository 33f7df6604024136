"""A turn whose PPO maximises the learned reward together with functions the recipe names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.feedback import wishes
from rlhf_pipeline.registry.reproduce import newest_turn
from rlhf_pipeline.reward.settings import FunctionSettings
from rlhf_pipeline.stages import evaluate_candidate, improve
from tests.assets.world import FirstTurn, Loop

FUNCTIONS = {
    "learned": FunctionSettings(normalisation="running"),
    "rouge-l": FunctionSettings(weight=0.5),  # compares with what the proxy's voters chose
    "empathy": FunctionSettings(weight=0.2, wish="kinder"),
}


@pytest.mark.slow
def test_a_turn_maximises_and_tells_what_the_recipe_names(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = first_turn.agent_id
    turn = newest_turn(loop.pipeline.ledger, loop.pipeline.settings(agent), agent)
    reward = turn.settings.reward.model_copy(update={"functions": FUNCTIONS, "wish_bound": 0.5})
    asked: list[Path] = []

    def everybody_is_for_kindness(path: Path, _counts: object) -> dict[str, float]:
        asked.append(path)
        return {"kinder": 1.0}

    monkeypatch.setattr(wishes, "wished_shares", everybody_is_for_kindness)
    ppo = replace(turn.settings.ppo, updates=1, epochs=1, rollouts_per_update=16)
    training = turn.settings.training.model_copy(update={"watch_prompts": 4})
    evaluation = turn.settings.evaluation.model_copy(update={"prompts": 8})
    changes = {"reward": reward, "ppo": ppo, "training": training, "evaluation": evaluation}
    (tmp_path / "reward").symlink_to(turn.work / "reward")
    turn = replace(turn, work=tmp_path, settings=turn.settings.model_copy(update=changes))
    result = improve(turn, tmp_path / "ppo", ppo, lambda facts: None)
    (update,) = result.history
    added = [update[f"reward/{name}/added_mean"] for name in FUNCTIONS]
    assert update["rollout/score_mean"] == pytest.approx(sum(added), abs=1e-6)
    assert 0 < update["reward/rouge-l/score_mean"] < 1
    assert update["reward/empathy/weight"] == pytest.approx(0.3)
    assert asked == [turn.data / "feedback.parquet"]
    told = evaluate_candidate(turn, lambda facts: None, lambda: None)
    pieces = told["report"]["reward"]
    assert pieces["weights"] == {"learned": 1, "rouge-l": 0.5, "empathy": pytest.approx(0.3)}
    assert "|  | composite | learned | rouge-l | empathy |" in told["markdown"]
    # The learned reward's scale is the one the kept policy was trained with.
    moments = result.reward_state["moments"]["learned"]
    raw, scaled = (pieces[key]["candidate"]["learned"]["value"] for key in ("scores", "added"))
    deviation = (moments["squares"] / moments["count"]) ** 0.5
    assert scaled == pytest.approx((raw - moments["mean"]) / deviation)
