"""Stages beyond what the first turn runs: other estimators, the same output, the same gate."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from rlhf_pipeline import stages
from rlhf_pipeline.evaluation.gate import GateDecision
from rlhf_pipeline.feedback.datasets import JOBS
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.records import ignore_progress
from rlhf_pipeline.registry.reproduce import recorded_turn
from rlhf_pipeline.reward.model import load_reward_model
from tests.assets.world import FirstTurn, Loop
from tests.reward.conftest import save_encoder


@pytest.mark.parametrize("estimator", [pytest.param("rloo", marks=pytest.mark.slow), "dpo"])
def test_one_setting_chooses_the_estimator_and_the_gate_judges_what_comes_out(
    estimator: Literal["rloo", "dpo"], loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    version = loop.version(first_turn.agent_id, 1)
    recorded = loop.pipeline.settings(first_turn.agent_id)
    turn = recorded_turn(loop.pipeline.ledger, recorded, version, tmp_path / "work")
    shutil.copytree(first_turn.work / "reward", turn.work / "reward")
    ppo = replace(turn.settings.ppo, estimator=estimator, completions_per_prompt=2)
    turn = replace(turn, settings=turn.settings.model_copy(update={"ppo": ppo}))
    outcome = stages.train_policy(turn, ignore_progress, lambda: None)
    result = TrainingResult.load(outcome["result"])
    assert result.settings["estimator"] == estimator
    assert result.updates >= 1
    judged = stages.evaluate_candidate(turn, ignore_progress, lambda: None)
    decision = GateDecision.from_json(judged["gate"])
    assert {r.rule for r in decision.results} >= {"score_vs_baseline", "kl_stop"}


def test_reward_models_are_used_again_while_nobody_votes_otherwise(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    version = loop.version(first_turn.agent_id, 1)
    recorded = loop.pipeline.settings(first_turn.agent_id)
    turn = recorded_turn(loop.pipeline.ledger, recorded, version, tmp_path / "work")
    before = first_turn.work / "reward"
    for changes in ({"retrain_drop": 0.0}, {"given": str(before)}):
        reward = turn.settings.reward.model_copy(update=changes)
        again = replace(
            turn,
            work=tmp_path / next(iter(changes)),
            settings=turn.settings.model_copy(update={"reward": reward}),
            previous=first_turn.work,
        )
        reports = stages.train_reward_models(again, ignore_progress, lambda: None)
        assert {job: one["reused_from"] for job, one in reports.items()} == {
            job: str(before / job) for job in JOBS
        }
        weights = "head.safetensors"
        kept = again.work / "reward" / "proxy" / weights
        assert kept.read_bytes() == (before / "proxy" / weights).read_bytes()
        # Of the turn before nothing is new; of given models nobody knows what they have seen.
        new = reports["proxy"]["on_new_votes"]
        assert new is None if "retrain_drop" in changes else new["n"] > 20


@pytest.mark.slow
def test_reward_models_on_an_encoder_guide_a_policy_that_writes_other_tokens(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    version = loop.version(first_turn.agent_id, 1)
    recorded = loop.pipeline.settings(first_turn.agent_id)
    turn = recorded_turn(loop.pipeline.ledger, recorded, version, tmp_path / "work")
    base = save_encoder(tmp_path / "encoder", "bert", context=512)
    changes = {"base": str(base), "reads": "mean", "reads_likelihood": False, "epochs": 1}
    reward = turn.settings.reward.model_copy(update=changes)
    ppo = replace(turn.settings.ppo, updates=1, critic="separate")
    turn = replace(turn, settings=turn.settings.model_copy(update={"reward": reward, "ppo": ppo}))
    reports = stages.train_reward_models(turn, ignore_progress, lambda: None)
    assert all(0 < report["accuracy"] < 1 for report in reports.values())
    proxy = load_reward_model(turn.work / "reward" / "proxy", device="cpu")
    assert (proxy.model.encoder, proxy.model.reads) == (True, "mean")
    outcome = stages.train_policy(turn, ignore_progress, lambda: None)
    assert TrainingResult.load(outcome["result"]).updates == 1
    judged = stages.evaluate_candidate(turn, ignore_progress, lambda: None)
    assert GateDecision.from_json(judged["gate"]).results
