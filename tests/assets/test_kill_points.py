"""A turn killed with -9 between its first step and its last comes to one whole, consistent end."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import dagster as dg
import pytest

from automation import processes
from resources.pipeline import Pipeline
from rlhf_pipeline.files import read_json
from rlhf_pipeline.stages import BEGAN
from tests.assets.kills import CHAIN, POINTS, TRAINING, check, expire_leases
from tests.assets.world import FirstTurn, chat, write_recipe

TIMES = 5
MEMORY = Path("/dev/shm")  # no disk has to be waited for where a process is killed, not a machine


def test_one_turn_killed_at_point_after_point_ends_as_if_nothing_had_happened(
    first_turn: FirstTurn,
) -> None:
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2**30  # a container's is not
    with tempfile.TemporaryDirectory(dir=MEMORY if roomy else None) as scratch:
        command = [sys.executable, "-m", "benchmarks.kill_points", "--chain"]
        ended = subprocess.run(
            [*command, "--source", str(first_turn.work)],
            cwd=processes.ROOT,
            env={**os.environ, "TMPDIR": scratch},
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert f"killed at {len(CHAIN)} of {len(CHAIN)} points" in ended.stdout


@pytest.mark.slow
def test_a_turn_killed_at_any_point_and_run_again_ends_as_if_nothing_had_happened(
    first_turn: FirstTurn, tmp_path: Path
) -> None:
    told = tmp_path / "told.json"
    command = [sys.executable, "-m", "benchmarks.kill_points", "--times", str(TIMES)]
    command += ["--source", str(first_turn.work), "--json", str(told)]
    ended = subprocess.run(command, cwd=processes.ROOT, capture_output=True, text=True, check=False)
    assert told.exists(), ended.stderr[-3000:]
    recovered = {name: numbers["recovered"] for name, numbers in read_json(told).items()}
    assert recovered == dict.fromkeys(POINTS, TIMES), ended.stderr[-3000:]


@pytest.mark.slow
def test_a_stalled_turn_that_was_overtaken_changes_nothing_when_it_wakes(
    first_turn: FirstTurn, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "benchmarks.kill_points", "--stalls"]
    command += ["--source", str(first_turn.work)]
    ended = subprocess.run(command, cwd=processes.ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder of its own, that this process and its children use."""
    state = tmp_path / "state"
    recipe = write_recipe(tmp_path / "minute.yaml", state)
    with patch.dict(os.environ, {"RLHF_RECIPE": str(recipe)}):
        processes.prepare_home(state)
        yield state


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_a_power_cut_while_training_costs_no_finished_stage(state: Path, name: str) -> None:
    agent = "shop"
    pipeline = Pipeline()
    chat(pipeline.store, agent, 160)
    launcher = [sys.executable, "tests/assets/killed_worker.py", name]
    killed = make_train(agent, RLHF_LAUNCHER=shlex.join(launcher))
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    mark = pipeline.claims.history(agent)[0].fingerprint
    work = pipeline.settings().turn_folder(agent, mark)
    results = [path for path in work.glob("*.json") if not path.name.endswith(".spec.json")]
    finished = {path: path.stat().st_mtime_ns for path in results if path.name != BEGAN}
    assert len(finished) == list(TRAINING).index(name) - (name == "PPO finished, no result yet")

    expire_leases(pipeline, agent, timedelta(minutes=15))
    again = make_train(agent)
    assert again.returncode == 0, again.stdout + again.stderr
    with dg.DagsterInstance.get() as instance:
        check(pipeline, instance, agent)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    resumed = read_json(work / "ppo" / "result.json")["resumed_from"]
    assert resumed == {"PPO checkpoint saved": 2, "PPO finished, no result yet": 20}.get(name)


def make_train(agent: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Do what `make train AGENT=name` does."""
    command = [sys.executable, "-m", "automation.launch", "--agent", agent]
    return subprocess.run(
        command,
        cwd=processes.ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
