"""One real turn, from votes to a promoted version, with its training process killed on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from rlhf_pipeline.feedback.support import SUPPORT_CHECKS
from rlhf_pipeline.feedback.validation import BLOCKING, CHECKS
from rlhf_pipeline.files import folder_sha256, read_json
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.registry.comparison import by_place, learned_per_thousand
from tests.assets.world import UPDATES, FirstTurn, Loop, failures

ASSETS = (
    "feedback_snapshot validated_feedback feedback_profile preference_pairs reward_examples "
    "sft_examples evaluation_prompts sft_policy reward_model ppo_policy evaluation_report "
    "registered_model promotion"
).split()


def metadata(turn: FirstTurn, asset: str) -> dict[str, Any]:
    events = turn.result.asset_materializations_for_node(
        "training_data" if asset == "preference_pairs" else asset
    )
    return {key: value.value for key, value in events[0].metadata.items()}


def test_a_killed_training_process_is_started_again_and_the_run_succeeds(
    loop: Loop, first_turn: FirstTurn
) -> None:
    assert first_turn.result.success, failures(first_turn.result)
    assert first_turn.killed_after_update >= 3
    attempts = {
        s.step_key: s.attempts for s in loop.instance.get_run_step_stats(first_turn.result.run_id)
    }
    assert attempts.pop("ppo_policy") == 2
    assert set(attempts.values()) == {1}


def test_training_goes_on_from_the_last_checkpoint(first_turn: FirstTurn) -> None:
    result = read_json(first_turn.work / "ppo" / "result.json")
    # An update's checkpoint comes after its report, so the last one may not have been written.
    assert first_turn.killed_after_update - 1 <= result["resumed_from"] < UPDATES
    assert len(result["reward_history"]) == UPDATES


def test_every_asset_is_materialised_for_the_agent(first_turn: FirstTurn) -> None:
    done = [e for e in first_turn.result.all_events if e.is_step_materialization]
    assert sorted(str(e.asset_key and e.asset_key.to_user_string()) for e in done) == sorted(ASSETS)
    assert {e.partition for e in done} == {"shop"}


def test_the_snapshot_is_known_by_its_fingerprint_and_holds_every_effective_vote(
    loop: Loop, first_turn: FirstTurn
) -> None:
    said = metadata(first_turn, "feedback_snapshot")
    claim = loop.pipeline.claims.history("shop")[0]
    votes = sum(loop.pipeline.store.counts("shop").values())
    assert said["fingerprint"] == claim.fingerprint
    assert said["dagster/row_count"] == votes
    event = first_turn.result.asset_materializations_for_node("feedback_snapshot")[0]
    assert (event.tags or {})["dagster/data_version"] == claim.fingerprint


def test_every_check_is_recorded_and_only_what_makes_training_pointless_is_an_error(
    first_turn: FirstTurn,
) -> None:
    found = {e.check_name: e for e in first_turn.result.get_asset_check_evaluations()}
    others = {
        "feedback_is_stable",
        "ranks_better_than_length",
        "is_calibrated",
        "training_is_healthy",
        "gate_lets_it_through",
    }
    assert set(found) == {*CHECKS, *SUPPORT_CHECKS} | others
    errors = {name for name, e in found.items() if e.severity is dg.AssetCheckSeverity.ERROR}
    assert errors - {"feedback_is_stable"} == BLOCKING  # that one had nothing to compare with
    assert all(found[name].passed for name in BLOCKING)
    assert found["gate_lets_it_through"].passed


def test_calibration_is_checked_beyond_what_chance_gives_so_few_pairs(
    first_turn: FirstTurn,
) -> None:
    checks = first_turn.result.get_asset_check_evaluations()
    (found,) = [check for check in checks if check.check_name == "is_calibrated"]
    reports = read_json(first_turn.work / "reward.json")["result"].values()
    beyond = max(report["ece"] - report["ece_noise"] for report in reports)
    assert found.metadata["worst beyond chance"].value == pytest.approx(max(0.0, beyond))
    assert found.passed == (beyond <= 0.05)


def test_version_0_is_the_baseline_and_version_1_the_promoted_candidate(
    loop: Loop, first_turn: FirstTurn
) -> None:
    history = loop.pipeline.ledger.history("shop")
    assert [(p.action, p.version, p.previous_version) for p in history] == [
        ("baseline", 0, None),
        ("promote", 1, 0),
    ]
    claim = loop.pipeline.claims.history("shop")[0]
    assert (claim.state, claim.reason) == ("done", "champion moved from 0 to 1")
    assert history[1].token == claim.token
    assert metadata(first_turn, "promotion")["champion"] == 1


def test_mlflows_aliases_say_what_the_ledger_says(loop: Loop, first_turn: FirstTurn) -> None:
    assert loop.aliases(first_turn.agent_id) == {"champion": 1, "previous": 0}


def test_the_registered_files_are_the_ones_that_were_trained(
    loop: Loop, first_turn: FirstTurn
) -> None:
    version = loop.version("shop", 1)
    assert version.path == (first_turn.work / "ppo" / "policy").resolve()
    assert dict(version.files) == folder_sha256(version.path)
    assert loop.version("shop", 0).files != version.files  # PPO changed something
    assert loop.pipeline.registry.resolve("models:/rlhf-shop@champion") == version.path


def test_a_version_keeps_the_gates_numbers_and_its_whole_lineage(
    loop: Loop, first_turn: FirstTurn
) -> None:
    version = loop.version("shop", 1)
    assert version.gate is not None
    numbers = {r["rule"]: r["number"] for r in version.gate["results"]}
    assert all(isinstance(numbers[rule], float) for rule in ("kl_stop", "score_vs_baseline"))
    claim = loop.pipeline.claims.history("shop")[0]
    lineage = version.lineage
    assert lineage["fingerprint"] == claim.fingerprint
    assert lineage["recipe"]["ppo"]["updates"] == UPDATES
    assert (
        lineage["counts"]["preference_pairs"]
        == metadata(first_turn, "preference_pairs")["dagster/row_count"]
    )
    assert set(lineage["reward_models"]) == {"proxy", "stopping", "gate"}
    assert Path(lineage["started_from"]) == loop.version("shop", 0).path
    assert version.label == f"v{lineage['votes']}"
    report = read_json(first_turn.work / "evaluation.json")["result"]["report"]
    assert lineage["evaluation"]["score"] == pytest.approx(
        sum(report["scores"]["candidate"]) / report["prompts"]
    )
    known = by_place(loop.pipeline.ledger.versions("shop"))
    assert learned_per_thousand(version, known) == pytest.approx(
        1000 * report["differences"]["baseline"]["gate_score"]["value"] / lineage["votes"]
    )
    assert lineage["votes"] == metadata(first_turn, "feedback_snapshot")["dagster/row_count"]


def test_a_recipe_that_was_edited_since_is_not_taken_for_the_one_that_trained(
    loop: Loop, first_turn: FirstTurn
) -> None:
    lineage, claim = loop.version("shop", 1).lineage, loop.pipeline.claims.history("shop")[0]
    turn = loop.pipeline._turn(claim)
    edited = turn.settings.model_copy(
        update={
            "ppo": replace(turn.settings.ppo, learning_rate=0.5),
            "reward": turn.settings.reward.model_copy(update={"epochs": 77}),
            "alerts": turn.settings.alerts.model_copy(update={"quiet_hours": 5}),
        }
    )
    told = loop.pipeline.lineage(replace(turn, settings=edited))["recipe"]
    assert {name for name in told if told[name] != lineage["recipe"][name]} == {"alerts"}


def test_one_mlflow_run_holds_parameters_metrics_per_step_and_plots(
    loop: Loop, first_turn: FirstTurn
) -> None:
    client = loop.pipeline.registry.client
    version = loop.version("shop", 1)
    experiment = client.get_experiment_by_name("rlhf-shop")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.run_id for run in runs] == [version.mlflow_run_id]
    [run] = runs
    assert run.info.status == "FINISHED"
    assert run.data.params["ppo.updates"] == str(UPDATES)
    assert run.data.params["fingerprint"] == version.fingerprint
    curve = client.get_metric_history(run.info.run_id, "ppo/rollout/score_mean")
    result = read_json(first_turn.work / "ppo" / "result.json")
    assert [point.step for point in curve] == list(range(1, UPDATES + 1))
    assert [point.value for point in curve] == pytest.approx(result["reward_history"])
    assert client.get_metric_history(run.info.run_id, "sft/loss")
    assert "evaluation/candidate/kl_to_baseline" in run.data.metrics
    kept = {
        item.path
        for folder in ("ppo", "evaluation", "reward/proxy")
        for item in client.list_artifacts(run.info.run_id, folder)
    }
    assert {"ppo/result.json", "ppo/training.png", "evaluation/gate.md"} <= kept
    tables = [table["path"] for table in json.loads(run.data.tags["mlflow.loggedArtifacts"])]
    of_evaluation = [f"evaluation/{name}.json" for name in ("comparison", "groups", "gate")]
    assert tables == ["ppo/samples.json", *of_evaluation]
    assert kept.issuperset(tables)
    assert version.label == f"v{result['feedback_count']}"
    assert any(path.startswith("reward/proxy/") and path.endswith(".png") for path in kept)


def test_plots_are_shown_where_a_person_looks(first_turn: FirstTurn) -> None:
    for asset in ("reward_model", "ppo_policy", "evaluation_report"):
        shown = [v for v in metadata(first_turn, asset).values() if str(v).startswith("![")]
        assert shown, asset
        assert all("](data:image/png;base64,iVBORw0KGgo" in image for image in shown)


def test_the_candidates_kl_is_that_of_the_update_that_was_chosen(first_turn: FirstTurn) -> None:
    result = TrainingResult.load(first_turn.work / "ppo" / "result.json")
    (chosen,) = [look for look in result.evaluations if look.update == result.chosen_update]
    kl = metadata(first_turn, "ppo_policy")["KL, nats per completion"]
    assert kl == pytest.approx(chosen.kl, abs=1e-4)


def test_progress_is_streamed_while_training(loop: Loop, first_turn: FirstTurn) -> None:
    logs = loop.instance.all_logs(
        first_turn.result.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION
    )
    observed = [
        entry.dagster_event.asset_observation_data.asset_observation
        for entry in logs
        if entry.dagster_event is not None
    ]
    ppo = [o for o in observed if o.asset_key == dg.AssetKey("ppo_policy")]
    assert {o.partition for o in observed} == {"shop"}
    assert ppo[-1].metadata["update"].value == UPDATES
    stages = {str(o.metadata["stage"].value).split(":")[0] for o in observed}
    assert stages == {"baseline", "reward", "ppo", "evaluation"}


def test_no_value_is_pickled_between_assets(loop: Loop, first_turn: FirstTurn) -> None:
    assert first_turn.result.success
    root = Path(loop.instance.storage_directory())
    stored = {path.parts[len(root.parts)] for path in root.rglob("*") if path.is_file()}
    assert not stored & {*ASSETS, "training_data"}


def test_a_fingerprint_that_was_trained_on_is_refused_and_not_trained_again(
    loop: Loop, first_turn: FirstTurn
) -> None:
    stages = sorted(first_turn.work.glob("*.log"))
    before = [path.stat().st_mtime_ns for path in stages]
    again = loop.run("retrain", first_turn.agent_id)
    assert not again.success
    [failure] = [e for e in again.all_events if e.is_step_failure]
    assert failure.step_key == "feedback_snapshot"
    error = failure.step_failure_data.error
    assert error is not None
    assert error.cls_name == "Failure"
    assert "was trained on already; collect new feedback, or ask for it `again`" in error.message
    [step] = [
        s
        for s in loop.instance.get_run_step_stats(again.run_id)
        if s.step_key == "feedback_snapshot"
    ]
    assert step.attempts == 1  # trying again would not help
    assert [path.stat().st_mtime_ns for path in stages] == before
    assert [c.state for c in loop.pipeline.claims.history("shop")] == ["done"]
    assert len(loop.pipeline.ledger.versions("shop")) == 2
