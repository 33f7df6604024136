"""The tracking server as `make ui` starts it, and the registry against it."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import HashMismatch
from rlhf_pipeline.records import Interaction, now, prompt_to_json, user_prompt
from rlhf_pipeline.registry.bases import base_folder
from rlhf_pipeline.registry.forgetting import (
    forget_runs,
    forget_samples,
    forget_traces,
    traces_of,
)
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.registry.traces import log_interaction, trace_files

ROOT = Path(__file__).parents[2]


def test_the_mlflow_folder_never_shadows_the_library() -> None:
    assert not (ROOT / "mlflow" / "__init__.py").exists()
    assert os.access(ROOT / "mlflow" / "start", os.X_OK)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("server") / "50%20 or #1"
    state.mkdir()
    address = f"http://127.0.0.1:{(port := free_port())}"
    with (
        (state / "server.log").open("w") as log,
        subprocess.Popen(
            [str(ROOT / "mlflow" / "start"), str(state), str(port)],
            env=os.environ | {"PYTHON": sys.executable},
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            for _ in range(240):
                if process.poll() is not None or answers(f"{address}/health"):
                    break
                time.sleep(0.5)
            assert answers(f"{address}/health"), (state / "server.log").read_text()
            yield address
        finally:
            process.terminate()


def test_a_folder_that_it_makes_is_its_owners_alone(tmp_path: Path) -> None:
    state = tmp_path / "new"
    start = [str(ROOT / "mlflow" / "start"), str(state)]
    subprocess.run(start, env=os.environ | {"PYTHON": "true"}, check=True)
    assert state.stat().st_mode & 0o777 == 0o700


def test_tables_that_were_left_half_made_are_whole_before_the_server_starts(tmp_path: Path) -> None:
    file = tmp_path / "mlflow" / "mlflow.db"
    file.parent.mkdir()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE registered_model_tags (name VARCHAR(256))")
    python = tmp_path / "python"  # starts no server
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    start = [str(ROOT / "mlflow" / "start"), str(tmp_path)]
    subprocess.run(start, env=os.environ | {"PYTHON": str(python)}, check=True)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall()
        assert connection.execute("SELECT name FROM experiments").fetchall() == [("Default",)]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.mark.slow
def test_the_server_answers_here_and_refuses_other_host_names(server: str) -> None:
    url = f"{server}/api/2.0/mlflow/experiments/search?max_results=1"
    assert answers(url)
    request = urllib.request.Request(url, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 403
    refused.value.close()


@pytest.mark.slow
def test_the_registry_works_through_a_server(server: str, tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    ledger = PromotionLedger(database)
    registry = ModelRegistry(ledger, server, tmp_path / "mlflow")
    for name in ("baseline", "candidate"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text(name)
    registry.register_baseline("a", tmp_path / "baseline", label="v0", lineage={}, actor="test")
    with registry.run("a", fingerprint="f", stage="ppo", parameters={"seed": 1}) as run:
        run.log_metrics({"score_mean": 0.5}, step=1)
    version = registry.register(
        "a",
        tmp_path / "candidate",
        label="v1",
        lineage={"base_model": "tiny"},
        gate={"passed": True, "results": []},
        fingerprint="f",
        run_id=run.run_id,
    )
    registry.client.set_registered_model_alias("rlhf-a", "champion", version.mlflow_version)
    assert registry.reconcile("a")[0].startswith("adopted from the MLflow page")
    assert registry.reconcile("a") == []
    (tmp_path / "candidate").rename(tmp_path / "gone")
    cached = registry.resolve("models:/rlhf-a@champion")
    assert cached == tmp_path / "mlflow" / "cache" / "rlhf-a" / "1"
    assert (cached / "model.safetensors").read_text() == "candidate"
    database.close()


@pytest.mark.slow
def test_another_ledgers_model_is_fetched_once_and_held_against_its_digest(
    server: str, tmp_path: Path
) -> None:
    databases = [Database(f"sqlite:///{tmp_path}/{name}.db") for name in ("one", "other")]
    one, other = (
        ModelRegistry(PromotionLedger(database), server, tmp_path / name)
        for database, name in zip(databases, ("one", "other"), strict=True)
    )
    folder = tmp_path / "baseline"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    one.register_baseline("b", folder, label="v0", lineage={}, actor="test")
    fetched = base_folder(other, "models:/rlhf-b@champion")
    assert fetched.is_relative_to(tmp_path / "other" / "cache" / "bases")
    assert base_folder(other, "models:/rlhf-b/1") == fetched
    assert (fetched / "config.json").read_text() == "{}"
    (fetched / "config.json").write_text("changed")
    with pytest.raises(HashMismatch, match="needs the files that were registered"):
        base_folder(other, "models:/rlhf-b@champion")
    for database in databases:
        database.close()


@pytest.mark.slow
def test_a_trace_goes_to_the_server_and_from_it_whatever_the_process_tracks(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    database = Database(f"sqlite:///{tmp_path}/store.db")
    registry = ModelRegistry(PromotionLedger(database), server, tmp_path / "mlflow")
    said = Interaction(
        interaction_id="i1",
        agent_id="c",
        prompt=user_prompt("how much is the kettle?"),
        completion="9 coins",
        model_version=0,
        created_at=now(),
    )
    log_interaction(registry, said)
    [info], _ = traces_of(registry, "c", ["i1"], "nobody")
    files = trace_files(registry, info)
    assert "9 coins" in json.dumps(files.download_trace_data())
    assert forget_traces(registry, "c", ["i1"], "nobody")["traces"] == 1
    assert files.list_artifacts() == []
    assert traces_of(registry, "c", ["i1"], "nobody")[0] == []
    database.close()


@pytest.mark.slow
def test_a_deleted_run_is_cleaned_and_emptied_through_a_server(server: str, tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    registry = ModelRegistry(PromotionLedger(database), server, tmp_path / "mlflow")
    samples = [{"prompt": text} for text in ("theirs?", "another's?")]
    with registry.run("d", fingerprint="d" * 64, stage="turn", parameters={}) as run:
        run.log_table("ppo/samples.json", samples)
    client = registry.client
    client.delete_run(run.run_id)
    theirs = prompt_to_json(user_prompt("theirs?"))
    assert forget_samples(registry, "d", "d" * 16, [theirs], [], None) == 1
    left = client.download_artifacts(run.run_id, "ppo/samples.json", str(tmp_path))
    assert json.loads(Path(left).read_text())["data"] == [["another's?"]]
    forget_runs(registry, [run.run_id])
    assert client.list_artifacts(run.run_id) == []
    assert client.get_run(run.run_id).info.lifecycle_stage == "deleted"
    database.close()
