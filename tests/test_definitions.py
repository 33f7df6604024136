"""The definitions as a whole: what there is, by name. A change here is a change people see."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import structlog
from dagster._core.scheduler import DagsterDaemonScheduler
from dagster._core.storage.tags import PARTITION_NAME_TAG

from resources.pipeline import AGENT
from rlhf_pipeline.definitions import definitions
from rlhf_pipeline.feedback.support import SUPPORT_CHECKS
from rlhf_pipeline.feedback.validation import BLOCKING, CHECKS

ROOT = Path(__file__).resolve().parents[1]

GROUPS = {
    "feedback": "feedback_snapshot validated_feedback feedback_profile",
    "data": "preference_pairs reward_examples sft_examples evaluation_prompts",
    "training": "sft_policy reward_model ppo_policy",
    "release": "evaluation_report registered_model promotion",
}
UPSTREAM = {
    "feedback_snapshot": "",
    "validated_feedback": "feedback_snapshot",
    "feedback_profile": "validated_feedback",
    "preference_pairs": "feedback_profile validated_feedback",
    "reward_examples": "feedback_profile validated_feedback",
    "sft_examples": "feedback_profile validated_feedback",
    "evaluation_prompts": "feedback_profile validated_feedback",
    "sft_policy": "sft_examples",
    "reward_model": "preference_pairs reward_examples sft_policy",
    "ppo_policy": "reward_model sft_policy",
    "evaluation_report": "evaluation_prompts feedback_profile ppo_policy",
    "registered_model": "evaluation_report",
    "promotion": "registered_model",
}
GPU = {"sft_policy", "reward_model", "ppo_policy", "evaluation_report"}
OTHER_CHECKS = {
    "feedback_profile": {"feedback_is_stable"},
    "reward_model": {"ranks_better_than_length", "is_calibrated"},
    "ppo_policy": {"training_is_healthy"},
    "evaluation_report": {"gate_lets_it_through"},
}


@pytest.fixture(scope="module")
def defs() -> dg.Definitions:
    return definitions()


def test_what_a_process_of_dagsters_logs_shows_no_variables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    structlog.reset_defaults()
    definitions()
    written = " ".join(["what", "somebody", "wrote"])  # so that no line of code holds it
    try:
        len(written) / 0
    except ZeroDivisionError:
        structlog.get_logger().exception("experiment not looked at")
    structlog.reset_defaults()
    told = capsys.readouterr().out
    assert "ZeroDivisionError" in told
    assert written not in told


@pytest.fixture(scope="module")
def specs(defs: dg.Definitions) -> dict[str, dg.AssetSpec]:
    return {spec.key.to_user_string(): spec for spec in defs.resolve_all_asset_specs()}


def definition_of(defs: dg.Definitions, name: str) -> dg.AssetsDefinition:
    return defs.resolve_assets_def(name)


def test_the_definitions_are_loadable(defs: dg.Definitions) -> None:
    dg.Definitions.validate_loadable(defs)


def test_what_starts_things_and_every_data_set_says_what_it_is(
    defs: dg.Definitions, specs: dict[str, dg.AssetSpec]
) -> None:
    """On Dagster's pages, where a name is all there is without it."""
    repository = defs.get_repository_def()
    starts: list[Any] = [*repository.sensor_defs, *repository.schedule_defs]
    assert [one.name for one in starts if not one.description] == []
    assert len({spec.description for spec in specs.values()}) == len(specs)


def test_the_assets_and_their_groups(specs: dict[str, dg.AssetSpec]) -> None:
    expected = {name: group for group, names in GROUPS.items() for name in names.split()}
    assert {name: spec.group_name for name, spec in specs.items()} == expected


def test_each_asset_follows_the_ones_it_reads(specs: dict[str, dg.AssetSpec]) -> None:
    found = {
        name: {dep.asset_key.to_user_string() for dep in spec.deps} for name, spec in specs.items()
    }
    assert found == {name: set(names.split()) for name, names in UPSTREAM.items()}


def test_every_asset_has_a_partition_per_agent(specs: dict[str, dg.AssetSpec]) -> None:
    partitions = {spec.partitions_def for spec in specs.values()}
    assert partitions == {dg.DynamicPartitionsDefinition(name="agents")}


def test_training_waits_in_the_gpu_pool_and_is_retried(defs: dg.Definitions) -> None:
    for name in UPSTREAM:
        op = definition_of(defs, name).op
        assert (op.pool == "gpu") is (name in GPU), name
        if name in GPU:
            policy = op.retry_policy
            assert policy is not None
            assert (policy.max_retries, policy.backoff) == (2, dg.Backoff.EXPONENTIAL)
        else:
            assert op.retry_policy is None, name


def test_the_checks_and_which_of_them_block(defs: dg.Definitions) -> None:
    found: dict[str, dict[str, bool]] = {}
    for key in defs.resolve_asset_graph().asset_check_keys:
        spec = defs.resolve_asset_graph().get_check_spec(key)
        found.setdefault(key.asset_key.to_user_string(), {})[key.name] = spec.blocking
    expected = {asset: dict.fromkeys(names, False) for asset, names in OTHER_CHECKS.items()}
    expected["validated_feedback"] = {name: name in BLOCKING for name in (*CHECKS, *SUPPORT_CHECKS)}
    assert found == expected


def test_no_asset_has_a_second_trigger(specs: dict[str, dg.AssetSpec]) -> None:
    assert [name for name, spec in specs.items() if spec.automation_condition is not None] == []


def test_jobs_sensors_and_schedules(defs: dg.Definitions) -> None:
    repository = defs.get_repository_def()
    jobs = {job.name for job in repository.get_all_jobs()} - {"__ASSET_JOB"}
    assert jobs == {"retrain", "bootstrap", "ingest_file", "prune_state"}
    sensors = {s.name: s for s in repository.sensor_defs}
    assert {name: s.default_status.value for name, s in sensors.items()} == dict.fromkeys(
        (
            "enough_new_feedback",
            "dropped_files",
            "dead_runs",
            "aliases_moved_by_hand",
            "live_experiments",
            "young_champions",
            "alerts",
            "assessments_in_mlflow",
            "run_failed",
        ),
        "RUNNING",
    )
    found = {s.name: (s.cron_schedule, s.job_name) for s in repository.schedule_defs}
    assert found == {
        "nightly": ("0 2 * * *", "retrain"),
        "retention": ("30 4,10,16,22 * * *", "prune_state"),
    }


def test_the_jobs_cover_what_they_say(defs: dg.Definitions) -> None:
    selected = {
        name: {
            key.to_user_string()
            for key in defs.resolve_job_def(name).asset_layer.selected_asset_keys
        }
        for name in ("retrain", "bootstrap")
    }
    assert selected == {"retrain": set(UPSTREAM), "bootstrap": {"sft_policy"}}
    for name in ("retrain", "bootstrap", "ingest_file"):
        assert defs.resolve_job_def(name).executor_def is dg.in_process_executor


def run_dg(*arguments: str, home: Path) -> str:
    """Run the dg command as `make check` does and return what it printed."""
    tool = Path(sys.executable).with_name("dg")
    if not tool.exists():
        pytest.skip("dagster-dg-cli is not installed beside this Python")
    shutil.copyfile(ROOT / "dagster.yaml", home / "dagster.yaml")
    done = subprocess.run(
        [tool, *arguments],
        cwd=ROOT,
        env={**os.environ, "DAGSTER_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow  # `make check` runs the same
def test_dg_check_defs_finds_nothing_wrong(tmp_path: Path) -> None:
    assert "All definitions loaded successfully" in run_dg("check", "defs", home=tmp_path)


def test_dg_list_defs_lists_everything(tmp_path: Path) -> None:
    listed: dict[str, list[dict[str, Any]]] = json.loads(
        run_dg("list", "defs", "--json", home=tmp_path)
    )
    assert {entry["asset_key"] for entry in listed["assets"]} == set(UPSTREAM)
    assert all(entry["description"] for entry in listed["assets"])
    counts = {kind: len(entries) for kind, entries in listed.items()}
    assert counts == {
        "assets": 13,
        "asset_checks": len(CHECKS) + len(SUPPORT_CHECKS) + 5,
        "jobs": 4,
        "resources": 2,
        "schedules": 2,
        "sensors": 9,
    }


def test_the_instance_file_is_valid_and_lets_turns_wait_in_the_queue(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "dagster.yaml", tmp_path / "dagster.yaml")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        pools = instance.get_concurrency_config().pool_config
        assert pools.pool_granularity is not None
        assert (pools.pool_granularity.value, pools.default_pool_limit) == ("run", 1)
        queue = instance.get_concurrency_config().run_queue_config
        assert queue is not None
        [limit] = queue.tag_concurrency_limits
        assert limit == {"key": AGENT, "value": {"applyLimitPerUniqueValue": True}, "limit": 1}
        assert AGENT == PARTITION_NAME_TAG  # the one tag that a run begun on the page has
        assert instance.run_monitoring_enabled
        assert not instance.telemetry_enabled
        assert not instance.run_retries_enabled  # the sensor dead_runs asks again
        scheduler = instance.scheduler
        assert isinstance(scheduler, DagsterDaemonScheduler)
        assert scheduler.max_tick_retries > 0  # or one failed look costs every agent a night
