"""Versions go into MLflow, and aliases follow the ledger."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import sqlalchemy as sa
from alembic import command
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
from mlflow.store.db.utils import (
    _get_alembic_config,
    _get_latest_schema_revision,
    _initialize_tables,
)

from rlhf_pipeline.database import model_versions
from rlhf_pipeline.errors import ClaimLost, HashMismatch, RegistryAway, RegistryError
from rlhf_pipeline.fence import writing_while
from rlhf_pipeline.files import folder_sha256, sqlite_path, sqlite_url
from rlhf_pipeline.registry import models
from rlhf_pipeline.registry.ledger import ModelVersion
from rlhf_pipeline.registry.models import PROJECTED, ModelRegistry, model_name
from rlhf_pipeline.registry.tracking import Ended, mlflow_refusals, open_client

ROOT = Path(__file__).parents[2]
PASSED = {"passed": True, "results": []}
REFUSED = {
    "passed": False,
    "results": [{"rule": "kl", "number": 25.0, "verdict": "fail", "words": "too far"}],
}


@pytest.fixture
def agent(registry: ModelRegistry, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An agent of its own for each test, its baseline registered."""
    agent_id = f"a{abs(hash(request.node.name)) % 10**9}"
    registry.register_baseline(
        agent_id, folder(tmp_path / "baseline", "0"), label="v0", lineage={}, actor="test"
    )
    return agent_id


def folder(path: Path, content: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_text(content)
    return path


def add(registry: ModelRegistry, agent: str, path: Path, gate: Any = PASSED) -> ModelVersion:
    number = len(registry.ledger.versions(agent))
    return registry.register(
        agent,
        folder(path / f"candidate{number}", str(number)),
        label=f"v{number}00",
        lineage={"base_model": "tiny", "data": {"pairs": 12}},
        gate=gate,
        fingerprint=f"print{number}",
    )


def aliases(registry: ModelRegistry, agent: str) -> dict[str, int]:
    """Ledger version numbers by alias, read from MLflow."""
    found = registry.client.get_registered_model(model_name(agent)).aliases
    by_number = {v.mlflow_version: v.version for v in registry.ledger.versions(agent)}
    return {alias: by_number[str(number)] for alias, number in found.items()}


def move(registry: ModelRegistry, agent: str, version: int) -> None:
    """Do what a person does in the MLflow page."""
    number = registry.ledger.version(agent, version).mlflow_version
    registry.client.set_registered_model_alias(model_name(agent), "champion", number)


def set_back_reason(registry: ModelRegistry, agent: str) -> str:
    return str(registry.client.get_registered_model(model_name(agent)).tags["rlhf.set_back"])


def promote(registry: ModelRegistry, agent: str, version: int, expected: int) -> None:
    registry.ledger.promote(agent, version, actor="ann", reason="won", expected_champion=expected)


def test_registering_puts_files_lineage_and_verdict_into_mlflow(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    with registry.run(agent, fingerprint="print1", stage="ppo", parameters={"seed": 1}) as run:
        pass
    version = registry.register(
        agent,
        folder(tmp_path / "c", "one"),
        label="v100",
        lineage={"base_model": "tiny", "data": {"pairs": 12}},
        gate=REFUSED,
        fingerprint="print1",
        run_id=run.run_id,
    )
    entity = registry.client.get_model_version(model_name(agent), version.mlflow_version)
    assert entity.tags["rlhf.lineage.base_model"] == "tiny"
    assert entity.tags["rlhf.lineage.data"] == '{"pairs": 12}'
    assert (entity.tags["rlhf.gate"], entity.tags["rlhf.gate_reasons"]) == ("refused", "too far")
    assert json.loads(entity.tags["rlhf.gate_results"]) == {
        "kl": {"number": 25.0, "verdict": "fail"}
    }
    assert entity.tags["rlhf.label"] == "v100"
    assert version.files["model.safetensors"] in entity.tags["rlhf.files"]
    note = registry.client.get_run(run.run_id).data.tags["mlflow.note.content"]
    assert note == entity.description  # what people read first on either page
    assert "(v100), learnt from snapshot print1. By the gate: refused.\n\n- fail: too far" in note
    assert f"`rlhf explain {version.version} --agent {agent}`" in note
    assert entity.run_id == run.run_id == version.mlflow_run_id
    names = {f.path for f in registry.client.list_artifacts(run.run_id)}
    assert {"lineage.json", "gate.json"} <= names
    assert aliases(registry, agent) == {"champion": 0}  # refused: nobody's challenger


def test_a_retried_registration_makes_one_version_on_both_sides(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    version = add(registry, agent, tmp_path)
    again = registry.register(
        agent,
        version.path,
        label="v100",
        lineage={},
        gate=PASSED,
        fingerprint=version.fingerprint,
    )
    assert again == version
    assert registry.reconcile(agent) == []
    found = registry.client.search_model_versions(f"name = '{model_name(agent)}'")
    assert len(found) == 2


def test_a_store_older_than_mlflow_takes_no_version_of_another_snapshot_for_its_own(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    version, table = add(registry, agent, tmp_path), model_versions.c
    mine = (table.agent_id == agent) & (table.version == version.version)

    def restored(**values: Any) -> str | None:
        """Return what a version becomes in MLflow that the store knows nothing of there."""
        with registry.ledger.database.write() as connection:
            change = model_versions.update().where(mine).values(mlflow_version=None, **values)
            connection.execute(change)
        registry.reconcile(agent)
        return registry.ledger.version(agent, version.version).mlflow_version

    assert restored() == version.mlflow_version
    number = restored(fingerprint="another")
    assert number != version.mlflow_version
    tags = registry.client.get_model_version(model_name(agent), number).tags
    assert tags["rlhf.fingerprint"] == "another"


def test_the_champion_alias_is_never_missing_while_it_moves(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    """Somebody reads it all the time, from another thread; it names one version or the other."""
    for number in (1, 2):
        add(registry, agent, tmp_path / str(number))
    registry.reconcile(agent)
    numbers = {v.mlflow_version for v in registry.ledger.versions(agent)}
    over, seen = Event(), []

    def watch() -> None:
        while not over.is_set():
            found = registry.client.get_model_version_by_alias(model_name(agent), "champion")
            seen.append(str(found.version))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            for before, after in ((0, 1), (1, 2), (2, 1), (1, 0)):
                promote(registry, agent, after, expected=before)
                registry.reconcile(agent)
        finally:
            over.set()
        watching.result()  # MLflow raises where there is no such alias
    assert set(seen) <= numbers
    assert len(set(seen)) > 1  # it was watched while it moved


def test_a_registration_cut_short_after_the_ledger_is_finished_by_reconcile(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "c", "c")
    registry.ledger.add_version(
        agent,
        label="v1",
        path=path,
        files=folder_sha256(path),
        lineage={},
        gate=PASSED,
        fingerprint="p",
    )
    assert registry.reconcile(agent)[0].startswith("version 1 is MLflow version")
    assert aliases(registry, agent) == {"champion": 0, "challenger": 1}


def test_aliases_follow_the_ledger(registry: ModelRegistry, agent: str, tmp_path: Path) -> None:
    add(registry, agent, tmp_path)
    assert aliases(registry, agent) == {"champion": 0, "challenger": 1}
    promote(registry, agent, 1, 0)
    add(registry, agent, tmp_path)
    assert aliases(registry, agent) == {"champion": 1, "challenger": 2, "previous": 0}
    registry.ledger.rollback(agent, actor="watch", reason="errors")
    registry.reconcile(agent)
    assert aliases(registry, agent) == {"champion": 0, "challenger": 2}
    assert registry.reconcile(agent) == []


def test_a_persons_move_is_adopted_after_the_hash_check(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    add(registry, agent, tmp_path)
    move(registry, agent, 1)
    assert registry.reconcile(agent)[0].startswith("adopted from the MLflow page")
    entry = registry.ledger.history(agent)[-1]
    assert (entry.action, entry.version, entry.actor) == ("adopt", 1, "mlflow-ui")
    assert aliases(registry, agent) == {"champion": 1, "previous": 0}
    move(registry, agent, 0)  # and back again
    registry.reconcile(agent)
    assert registry.ledger.history(agent)[-1].version == 0


def test_a_move_to_a_version_the_gate_refused_is_set_back_with_the_reason(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    add(registry, agent, tmp_path, gate=REFUSED)
    move(registry, agent, 1)
    registry.reconcile(agent)
    assert aliases(registry, agent) == {"champion": 0}
    assert "refused by the gate" in set_back_reason(registry, agent)
    assert len(registry.ledger.history(agent)) == 1


def test_a_move_to_a_version_whose_files_changed_is_set_back(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    add(registry, agent, tmp_path)
    with registry._stored(registry.ledger.version(agent, 1)) as stored:
        (stored / "model.safetensors").write_text("poison")
    move(registry, agent, 1)
    registry.reconcile(agent)
    assert aliases(registry, agent)["champion"] == 0
    assert "model.safetensors changed" in set_back_reason(registry, agent)


def test_a_move_that_cannot_be_checked_as_mlflow_is_away_is_heard_later(
    registry: ModelRegistry, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(registry, agent, tmp_path)
    move(registry, agent, 1)
    with monkeypatch.context() as patched:
        patched.setattr(registry, "_stored", Mock(side_effect=RegistryAway("no answer")))
        with pytest.raises(RegistryAway):
            registry.reconcile(agent)
    assert aliases(registry, agent)["champion"] == 1
    assert registry.reconcile(agent)[0].startswith("adopted from the MLflow page")


def test_a_move_to_a_version_the_ledger_does_not_know_is_set_back(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    client, name = registry.client, model_name(agent)
    foreign = client.create_model_version(name, folder(tmp_path / "x", "x").as_uri())
    client.set_registered_model_alias(name, "champion", foreign.version)
    registry.reconcile(agent)
    assert aliases(registry, agent) == {"champion": 0}
    assert "not in the ledger" in set_back_reason(registry, agent)


def test_a_projection_cut_short_is_not_taken_for_a_persons_move(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    add(registry, agent, tmp_path)
    # The ledger moved on and nothing was projected yet.
    promote(registry, agent, 1, 0)
    assert "adopted" not in str(registry.reconcile(agent))
    assert aliases(registry, agent)["champion"] == 1
    # The alias was set, the crash came before the tag.
    add(registry, agent, tmp_path)
    promote(registry, agent, 2, 1)
    move(registry, agent, 2)
    registry.ledger.rollback(agent, actor="watch", reason="errors")
    assert "adopted" not in str(registry.reconcile(agent))
    assert aliases(registry, agent)["champion"] == 1
    assert "rlhf.set_back" not in registry.client.get_registered_model(model_name(agent)).tags


def test_a_move_that_the_ledger_overtook_is_set_back(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    add(registry, agent, tmp_path)
    add(registry, agent, tmp_path)
    move(registry, agent, 1)
    promote(registry, agent, 2, 0)
    registry.reconcile(agent)
    assert aliases(registry, agent)["champion"] == 2
    assert "entry 2 is newer" in set_back_reason(registry, agent)


def test_aliases_a_person_deleted_come_back(registry: ModelRegistry, agent: str) -> None:
    registry.client.delete_registered_model_alias(model_name(agent), "champion")
    registry.reconcile(agent)
    assert aliases(registry, agent) == {"champion": 0}


def test_a_deleted_registered_model_is_made_again(registry: ModelRegistry, agent: str) -> None:
    registry.client.delete_registered_model(model_name(agent))
    registry.reconcile(agent)
    assert aliases(registry, agent) == {"champion": 0}
    assert registry.client.get_registered_model(model_name(agent)).tags[PROJECTED] == "1"


def test_lost_files_of_a_version_that_nobody_needs_stop_no_other(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    add(registry, agent, tmp_path, gate=REFUSED).path.rename(tmp_path / "lost")
    add(registry, agent, tmp_path)
    registry.client.delete_registered_model(model_name(agent))
    registry.reconcile(agent)
    assert aliases(registry, agent) == {"champion": 0, "challenger": 2}
    registry.client.delete_registered_model(model_name(agent))
    (tmp_path / "baseline").rename(tmp_path / "lost too")
    with pytest.raises(HashMismatch, match="version 0 of agent"):
        registry.reconcile(agent)


def test_no_two_versions_have_one_number_after_the_registered_model_was_deleted(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    lost, champion = add(registry, agent, tmp_path), add(registry, agent, tmp_path)
    promote(registry, agent, champion.version, 0)
    shutil.rmtree(lost.path)
    registry.client.delete_registered_model(model_name(agent))
    registry.reconcile(agent)  # MLflow counts from 1 again, and gives the lost one's number
    numbers = {v.version: v.mlflow_version for v in registry.ledger.versions(agent)}
    assert numbers == {0: "1", lost.version: None, champion.version: lost.mlflow_version}
    assert registry.find(f"models:/{model_name(agent)}/{lost.mlflow_version}").version == (
        champion.version
    )
    assert aliases(registry, agent)["champion"] == champion.version


@pytest.mark.parametrize("is_gone", [False, True], ids=["deleted", "gone for good"])
def test_a_version_whose_run_was_deleted_is_registered_again(
    registry: ModelRegistry,
    agent: str,
    tmp_path: Path,
    is_gone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with registry.run(agent, fingerprint="print1", stage="ppo", parameters={}) as run:
        pass
    path = folder(tmp_path / "c", "one")
    more: dict[str, Any] = {"label": "v1", "lineage": {}, "gate": PASSED, "fingerprint": "print1"}
    version = registry.register(agent, path, **more, run_id=run.run_id)
    client = registry.client
    client.delete_registered_model(model_name(agent))
    client.delete_run(run.run_id)
    if is_gone:  # `mlflow gc` takes the row

        def finds_none(run_id: str) -> Any:
            raise MlflowException(f"no run {run_id}", RESOURCE_DOES_NOT_EXIST)

        monkeypatch.setattr(client, "get_run", finds_none)
    promote(registry, agent, version.version, 0)
    registry.reconcile(agent)
    assert aliases(registry, agent) == {"champion": version.version, "previous": 0}
    number = registry.ledger.version(agent, version.version).mlflow_version
    entity = client.get_model_version(model_name(agent), number)
    assert (entity.run_id or None) == (None if is_gone else run.run_id)


def test_a_look_that_finds_nothing_to_do_reads_the_ledger_once(
    registry: ModelRegistry, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = iter([registry.ledger.standing])
    monkeypatch.setattr(registry.ledger, "standing", lambda agent_id: next(once)(agent_id))
    assert registry.reconcile(agent) == []


def test_an_agent_without_a_baseline_has_nothing_to_reconcile(registry: ModelRegistry) -> None:
    assert registry.reconcile("nobody") == []


def test_a_uri_resolves_to_the_registered_files(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    version = add(registry, agent, tmp_path)
    name = model_name(agent)
    assert registry.resolve(f"models:/{name}@challenger") == version.path
    assert registry.resolve(f"models:/{name}@champion") == tmp_path / "baseline"
    assert registry.find(f"models:/{name}@baseline").version == 0
    assert registry.find(f"models:/{name}/{version.mlflow_version}").version == 1
    for wrong in ("models:/other/1", f"models:/{name}@latest", f"models:/{name}/99"):
        with pytest.raises(RegistryError):
            registry.resolve(wrong)


def test_the_alias_in_a_uri_means_the_ledger_not_what_somebody_set(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    add(registry, agent, tmp_path, gate=REFUSED)
    move(registry, agent, 1)
    assert registry.find(f"models:/{model_name(agent)}@champion").version == 0


@pytest.mark.parametrize("harm", ["changed", "added", "removed"])
def test_files_that_are_not_the_registered_ones_are_refused(
    registry: ModelRegistry, agent: str, tmp_path: Path, harm: str
) -> None:
    path = tmp_path / "baseline"
    if harm == "changed":
        (path / "model.safetensors").write_text("poison")
    elif harm == "added":
        (path / "modeling_evil.py").write_text("")
    else:
        (path / "config.json").unlink()
    with pytest.raises(HashMismatch, match="needs the files that were registered"):
        registry.resolve(f"models:/{model_name(agent)}@champion")


def test_where_the_training_folder_is_gone_mlflows_copy_serves(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    version = add(registry, agent, tmp_path)
    version.path.rename(tmp_path / "gone")
    found = registry.folder_of(version)
    assert found != version.path
    assert (found / "model.safetensors").read_text() == "1"
    shutil.rmtree(found)
    with pytest.raises(RegistryError) as caught:
        registry.folder_of(version)
    assert str(caught.value) == (
        f"version 1 of agent {agent} needs its files, found none in {version.path}, nor MLflow's "
        "copy; put them back from a backup, or leave a champion with "
        f"`rlhf rollback --agent {agent} --reason WHY`"
    )


def test_the_copy_of_a_state_folder_that_was_moved_by_hand_follows_rather_than_being_given_up(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    version, moved = add(registry, agent, tmp_path), tmp_path / "mlflow"
    shutil.rmtree(version.path)
    shutil.copytree(registry.folder, moved)
    here = ModelRegistry(registry.ledger, f"sqlite:///{moved}/mlflow.db", moved)
    found = here.folder_of(version)  # read where it was, as long as it is there
    assert found.is_relative_to(registry.folder)
    shutil.rmtree(found)
    with pytest.raises(RegistryError, match="moved or copied by hand; `rlhf moved`"):
        here.folder_of(version)


def test_a_folder_with_a_pickle_is_not_registered(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "p", "p")
    (path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(RegistryError, match="safetensors"):
        registry.register(agent, path, label="v1", lineage={}, gate=PASSED, fingerprint="p")


def test_a_retried_step_resumes_its_run(registry: ModelRegistry, agent: str) -> None:
    work: dict[str, Any] = {"fingerprint": "f1", "stage": "ppo", "parameters": {"rate": 1e-3}}
    try:
        with registry.run(agent, **work) as first:
            first.log_metrics({"score_mean": 0.5}, step=1)
            raise InterruptedError("killed")
    except InterruptedError:
        pass
    assert registry.client.get_run(first.run_id).info.status == "FAILED"
    with registry.run(agent, **work) as second:
        assert second.resumed
        second.log_metrics({"score_mean": 0.7}, step=2)
    assert second.run_id == first.run_id
    entity = registry.client.get_run(first.run_id)
    assert entity.info.status == "RUNNING"
    assert entity.data.params == {"rate": "0.001"}
    curve = registry.client.get_metric_history(first.run_id, "score_mean")
    assert [(m.step, m.value) for m in curve] == [(1, 0.5), (2, 0.7)]
    with registry.run(agent, **(work | {"parameters": {"rate": 1e-4}})) as other:
        assert not other.resumed


def test_a_disk_that_is_full_is_told_of_as_that(registry: ModelRegistry, tmp_path: Path) -> None:
    own = ModelRegistry(registry.ledger, sqlite_url(tmp_path / "mlflow.db"), tmp_path)
    assert own.client  # its tables are there

    def no_more_pages(connection: sa.Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")  # SQLite keeps those it has

    many = {f"setting_{n}": "x" * 400 for n in range(90)}
    sa.event.listen(sa.Engine, "begin", no_more_pages)
    try:
        with (
            pytest.raises(RegistryError, match=r"needed room on the disk, found.* full; make room"),
            own.run("tea", fingerprint="full", stage="ppo", parameters=many),
        ):
            pass
    finally:
        sa.event.remove(sa.Engine, "begin", no_more_pages)


def test_a_copy_that_a_full_disk_has_no_room_for_is_told_of_as_that_and_made_later(
    registry: ModelRegistry, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", full)
        patch.setattr("shutil.copy2", full)
        with pytest.raises(RegistryError, match=r"needed room on the disk.*No space left"):
            add(registry, agent, tmp_path)
    assert registry.reconcile(agent)[0].startswith("version 1 is MLflow version")
    assert aliases(registry, agent) == {"champion": 0, "challenger": 1}


def test_a_move_whose_files_a_full_disk_keeps_from_being_checked_is_heard_later(
    registry: ModelRegistry, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    add(registry, agent, tmp_path)
    move(registry, agent, 1)
    with monkeypatch.context() as patch:
        patch.setattr(models, "folder_sha256", full)
        with pytest.raises(RegistryAway, match="needed room on the disk"):
            registry.reconcile(agent)
    assert registry.reconcile(agent)[0].startswith("adopted from the MLflow page")
    assert aliases(registry, agent) == {"champion": 1, "previous": 0}


def test_no_error_of_mlflows_tells_the_password_of_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    def told(ask: Callable[[], object]) -> str:
        with pytest.raises((RegistryError, OSError)) as refused, mlflow_refusals("this"):
            ask()
        return "".join(traceback.format_exception(refused.value))

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    me = "me:plum@quince"
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://{me}@127.0.0.1:{server.server_port}"
        shown = f"http://me:**********@127.0.0.1:{server.server_port}"
        files = HttpArtifactRepository(f"{address}/api/2.0/mlflow-artifacts/artifacts")
        refused = told(files.list_artifacts)
        server.shutdown()
    away = told(open_client(address).search_experiments)
    odd = told(lambda: open_client(f"odd://{me}@there"))
    assert "found API request to " + shown in away
    assert "for url: " + shown in refused
    assert "got unsupported URI 'odd://me:**********@there'" in odd
    assert not re.search("plum|quince", away + refused + odd)


def test_settings_named_by_a_persons_own_words_are_parameters_of_a_run(
    registry: ModelRegistry, agent: str
) -> None:
    long = "really " * 50
    words = {"👍": "up", "👎": "down", "Yes!": "up", "a//b": "up", "a\n": "up", "liked": "up"}
    words |= {f"{long}good": "up", f"{long}bad": "down"}
    work: dict[str, Any] = {
        "fingerprint": "f0",
        "stage": "turn",
        "parameters": {f"feedback.names.words.{word}": ours for word, ours in words.items()},
    }
    with registry.run(agent, **work) as run:
        pass
    params = registry.client.get_run(run.run_id).data.params
    assert sorted(params.values()) == sorted(words.values())  # none in another's place
    assert params["feedback.names.words.liked"] == "up"
    shown = {name.rpartition(" ")[0]: ours for name, ours in params.items()}
    assert shown["feedback.names.words.:thumbs up sign:"] == "up"
    assert shown["feedback.names.words.:thumbs down sign:"] == "down"
    with registry.run(agent, **work) as again:
        assert again.resumed


def test_a_retried_step_draws_its_curve_once(registry: ModelRegistry, agent: str) -> None:
    work: dict[str, Any] = {"fingerprint": "f2", "stage": "ppo", "parameters": {}}
    curves = ((0.5, 0.1 + 0.2, math.nan), (0.5, 0.1 + 0.2, math.nan, 0.9))
    for curve in curves:
        with registry.run(agent, **work) as run:
            for step, value in enumerate(curve, 1):
                run.log_metrics({"score_mean": value}, step=step)
            run.log_metrics(
                {"final": curve[-1]}
            )  # another number at a step it has: the newer holds
    history = registry.client.get_metric_history(run.run_id, "score_mean")
    assert [(m.step, m.value) for m in history[:2]] == [(1, 0.5), (2, 0.1 + 0.2)]
    assert [m.step for m in history] == [1, 2, 3, 4]
    assert registry.client.get_run(run.run_id).data.metrics["final"] == 0.9


def test_mlflow_shows_every_table_of_a_run_also_after_a_retry(
    registry: ModelRegistry, agent: str
) -> None:
    work: dict[str, Any] = {"fingerprint": "f3", "stage": "turn", "parameters": {}}
    for _ in range(2):
        with registry.run(agent, **work) as run:
            run.log_table("ppo/samples.json", [{"update": 1, "score": 0.5}])
            run.log_table("evaluation/comparison.json", [{"name": "length", "here": "3.0"}])
    tags = registry.client.get_run(run.run_id).data.tags
    paths = [table["path"] for table in json.loads(tags["mlflow.loggedArtifacts"])]
    assert paths == ["ppo/samples.json", "evaluation/comparison.json"]


def test_a_projection_that_hangs_holds_nobody_for_ever(
    registry: ModelRegistry, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = registry.ledger
    with (
        ledger.one_projection_at_a_time(agent),
        pytest.raises(RegistryError, match=r"needs its turn within 0\.1 s, found another process"),
        ledger.one_projection_at_a_time(agent, wait_seconds=0.1),
    ):
        pass
    add(registry, agent, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_pipeline.registry.models.PROJECTION_SECONDS", -1.0)
        ledger.promote(agent, 1, actor="ann", reason="better", expected_champion=0)
        with pytest.raises(RegistryError, match="found it slower before champion was set"):
            registry.reconcile(agent)
    assert aliases(registry, agent) == {"champion": 0, "challenger": 1}
    assert "adopted" not in str(registry.reconcile(agent))
    assert aliases(registry, agent) == {"champion": 1, "previous": 0}


def test_a_run_that_a_kill_left_open_is_ended_and_taken_up_again_whole(
    registry: ModelRegistry, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: dict[str, Any] = {"fingerprint": "f5", "stage": "turn", "parameters": {"a": 1, "b": 2}}

    def killed(*_: Any, **__: Any) -> None:
        raise InterruptedError("killed")

    with monkeypatch.context() as patch:  # before the parameters were there
        patch.setattr(registry.client, "log_batch", killed)
        with pytest.raises(InterruptedError):
            registry.run(agent, **work).__enter__()
    experiment = [registry.experiment(agent)]
    [left] = registry.client.search_runs(experiment)
    assert (left.info.status, left.data.params) == ("RUNNING", {})
    assert registry.end_runs(agent, "another") == 0
    assert registry.end_runs(agent, "f5") == 1
    assert registry.client.get_run(left.info.run_id).info.status == "KILLED"
    with registry.run(agent, **work) as run:
        assert run.run_id == left.info.run_id
    entity = registry.client.get_run(run.run_id)
    assert (entity.info.status, entity.data.params) == ("RUNNING", {"a": "1", "b": "2"})
    assert registry.end_runs("nobody", "f5") == 0


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_work_goes_on_after_a_block_until_it_is_ended(
    registry: ModelRegistry, agent: str, status: Ended
) -> None:
    work: dict[str, Any] = {"fingerprint": "f7", "stage": "turn", "parameters": {}}
    for _ in range(2):
        with registry.run(agent, **work) as run:
            run.log_metrics({"loss": 1.0})
        entity = registry.client.get_run(run.run_id)
        assert (entity.info.status, entity.data.metrics) == ("RUNNING", {"loss": 1.0})
    assert registry.end_runs(agent, "f7", status) == 1
    assert registry.client.get_run(run.run_id).info.status == status


def test_who_lost_the_claim_leaves_the_newer_holders_run_alone(
    registry: ModelRegistry, agent: str
) -> None:
    work: dict[str, Any] = {"fingerprint": "f6", "stage": "turn", "parameters": {}}

    def stall() -> None:
        with registry.run(agent, **work):
            with registry.run(agent, **work):
                pass  # the newer holder
            registry.end_runs(agent, "f6", "FINISHED")
            raise ClaimLost("another took over")

    with pytest.raises(ClaimLost):
        stall()
    [run] = registry.client.search_runs([registry.experiment(agent)])
    assert run.info.status == "FINISHED"


def test_a_run_keeps_nothing_of_who_lost_the_claim(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    def lost() -> None:
        raise ClaimLost("another took over")

    (tmp_path / "page.html").touch()
    with registry.run(agent, fingerprint="f8", stage="turn", parameters={}) as run:
        late: list[tuple[Callable[..., None], Any]] = [
            (run.log_json, ("a.json", {})),
            (run.log_table, ("b.json", [{"a": 1}])),
            (run.log_text, ("c.md", "")),
            (run.log_file, (tmp_path / "page.html", "evaluation")),
        ]
        for log, given in late:
            with writing_while(lost), pytest.raises(ClaimLost):
                log(*given)
    assert registry.client.list_artifacts(run.run_id) == []


def test_a_run_keeps_files_texts_and_what_it_read(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    with registry.run(agent, fingerprint="f2", stage="evaluation", parameters={}) as run:
        run.log_text("report.md", "# fine")
        run.log_json("gate.json", {"passed": True})
        run.log_file(folder(tmp_path / "d", "d") / "config.json", "configs")
        for _ in range(2):  # a retry notes it once
            run.log_input("f" * 64, tmp_path, {"n": 3})
    names = {f.path for f in registry.client.list_artifacts(run.run_id)}
    assert names == {"report.md", "gate.json", "configs"}
    inputs = registry.client.get_run(run.run_id).inputs.dataset_inputs
    assert [(i.dataset.name, i.tags[0].value) for i in inputs] == [("feedback", "training")]


def test_metrics_wait_while_mlflow_is_away_and_are_not_lost(
    registry: ModelRegistry, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    monkeypatch.setattr("rlhf_pipeline.registry.tracking.FLUSH_SECONDS", 0.0)
    with registry.run(agent, fingerprint="f3", stage="ppo", parameters={}) as run:
        real = run.client

        def away(*_: Any, **__: Any) -> None:
            raise MlflowException("away")

        run.client = SimpleNamespace(log_batch=away)
        run.log_metrics({"loss": 1.0}, step=4)  # no exception
        with pytest.raises(RegistryError, match="away"):
            run.flush()
        run.client = real
    assert registry.client.get_run(run.run_id).data.metrics == {"loss": 1.0}


def test_an_experiment_that_a_person_deleted_is_restored(
    registry: ModelRegistry, agent: str
) -> None:
    registry.client.delete_experiment(registry.experiment(agent))
    with registry.run(agent, fingerprint="f4", stage="ppo", parameters={}) as run:
        run.log_metrics({"loss": 1.0})


def test_an_experiment_is_known_by_its_tag_whatever_people_call_it(
    registry: ModelRegistry, agent: str
) -> None:
    made = registry.experiment(agent)
    registry.client.rename_experiment(made, f"{agent} for all")
    assert registry.known_experiment(agent) == registry.experiment(agent) == made
    registry.client.delete_experiment(made)
    assert registry.known_experiment(agent) == made


def test_an_experiment_of_an_earlier_release_is_given_its_tag(
    registry: ModelRegistry, agent: str
) -> None:
    agent = f"{agent}-older"
    made = registry.client.create_experiment(model_name(agent))
    assert registry.known_experiment(agent) == registry.experiment(agent) == made
    registry.client.rename_experiment(made, f"{agent} for all")
    assert registry.known_experiment(agent) == made


def test_an_experiment_that_somebody_else_made_meanwhile_is_taken(
    registry: ModelRegistry, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, look = registry.experiment(agent), registry.client.get_experiment_by_name
    looks = iter([lambda name: None])  # it was not there yet
    monkeypatch.setattr(registry.client, "get_experiment_by_name", lambda n: next(looks, look)(n))
    assert registry.experiment(agent) == made


@pytest.mark.parametrize("step", ["log_model_artifacts", "create_model_version"])
def test_an_upload_cut_short_is_finished_without_a_second_copy(
    registry: ModelRegistry,
    agent: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise InterruptedError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(registry.client, step, killed)
        with pytest.raises(InterruptedError):
            add(registry, agent, tmp_path)
    assert aliases(registry, agent) == {"champion": 0}
    registry.reconcile(agent)
    assert aliases(registry, agent) == {"champion": 0, "challenger": 1}
    models = registry.client.search_logged_models(experiment_ids=[registry.experiment(agent)])
    assert [m.tags["rlhf.version"] for m in models] == ["1", "0"]
    assert {str(m.status) for m in models} == {"READY"}


def test_reconciling_from_many_threads_takes_nobody_for_a_person(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    add(registry, agent, tmp_path)
    promote(registry, agent, 1, 0)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(registry.reconcile, [agent] * 8))
    assert "adopted" not in str(found)
    assert sum(bool(changes) for changes in found) == 1
    assert aliases(registry, agent) == {"champion": 1, "previous": 0}


def test_a_server_that_is_not_there_is_a_refusal_with_its_reason(
    registry: ModelRegistry, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    def away(*_: Any, **__: Any) -> None:
        raise MlflowException("no route")

    monkeypatch.setattr(registry.client, "get_registered_model", away)
    with pytest.raises(RegistryError, match="no route"):
        registry.reconcile(agent)


def test_a_process_goes_on_when_mlflows_database_is_replaced(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    origin, file, backup = sqlite_path(registry.tracking_uri), tmp_path / "m.db", tmp_path / "b.db"
    assert origin is not None
    for copy in (file, backup):
        shutil.copy(origin, copy)
    uri = f"sqlite:///{file}"
    open_client(uri).create_registered_model("since the backup")
    assert open_client(uri) is open_client(uri)
    backup.replace(file)
    assert [
        m.name for m in open_client(uri).search_registered_models("name = 'since the backup'")
    ] == []
    open_client(uri).set_registered_model_tag(model_name(agent), "color", "red")
    file.write_bytes(b"\0" * 8192)
    with pytest.raises(MlflowException, match="not a database"):
        open_client(uri).get_registered_model(model_name(agent))
    file.unlink()  # as a person does who has no backup: the next look makes the tables
    open_client(uri).create_registered_model(model_name(agent))
    assert file.stat().st_size


def test_mlflows_tables_are_made_to_the_end_after_a_kill_among_them(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    code = (
        "import os, sys; import sqlalchemy as sa\n"
        "from rlhf_pipeline.registry.tracking import open_client\n"
        "@sa.event.listens_for(sa.Engine, 'after_cursor_execute')\n"
        "def kill(connection, cursor, statement, *_):\n"
        "    if 'CREATE TABLE _alembic_tmp_latest_metrics' in statement: os.kill(os.getpid(), 9)\n"
        "open_client(sys.argv[1])"
    )
    command = [sys.executable, "-c", code, sqlite_url(file)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    assert file.stat().st_size
    open_client(sqlite_url(file)).create_registered_model("made")
    assert revision(file) == _get_latest_schema_revision()


@pytest.mark.parametrize("after", ["TABLE _alembic_tmp_metrics", "TABLE job_locks"])
def test_tables_of_mlflows_that_an_earlier_release_left_half_made_are_made_anew(
    after: str, tmp_path: Path
) -> None:
    file = left_half_made(tmp_path / "mlflow.db", after)
    open_client(sqlite_url(file)).create_registered_model("made")
    assert revision(file) == _get_latest_schema_revision()


def test_tables_of_mlflows_left_half_made_that_hold_something_are_left_alone(
    tmp_path: Path,
) -> None:
    file = left_half_made(tmp_path / "mlflow.db", "TABLE _alembic_tmp_metrics")
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        names = "key, value, timestamp, run_uuid, step"
        connection.execute(
            f"INSERT INTO _alembic_tmp_metrics ({names}) VALUES ('loss', 0.5, 1, 'a', 1)"
        )
    with pytest.raises(sa.exc.OperationalError, match="duplicate column name: step"):
        open_client(sqlite_url(file))
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT value FROM _alembic_tmp_metrics").fetchall() == [(0.5,)]


def test_a_database_of_an_earlier_mlflow_is_upgraded_with_what_it_holds(
    registry: ModelRegistry, agent: str, tmp_path: Path
) -> None:
    origin, file = sqlite_path(registry.tracking_uri), tmp_path / "mlflow.db"
    assert origin is not None
    shutil.copy(origin, file)
    engine = sa.create_engine(sqlite_url(file), poolclass=sa.NullPool)
    config = _get_alembic_config(sqlite_url(file))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "-1")
    assert revision(file) != _get_latest_schema_revision()
    with cut_short("TABLE job_locks"):
        open_client(sqlite_url(file))
    assert open_client(sqlite_url(file)).get_registered_model(model_name(agent))
    assert revision(file) == _get_latest_schema_revision()


def left_half_made(file: Path, after: str) -> Path:
    """Make MLflow's tables as its own clients do, up to a statement that says this."""
    engine = sa.create_engine(sqlite_url(file), poolclass=sa.NullPool)
    with cut_short(after):
        _initialize_tables(engine)
    assert file.stat().st_size
    return file


@contextmanager
def cut_short(after: str) -> Iterator[None]:
    """Let the block fail after a statement that says this, as on a disk that fills."""

    def fail(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if after in statement:
            raise RuntimeError("cut short")

    sa.event.listen(sa.Engine, "after_cursor_execute", fail)
    try:
        with pytest.raises(RuntimeError, match="cut short"):
            yield
    finally:
        sa.event.remove(sa.Engine, "after_cursor_execute", fail)


def revision(file: Path) -> Any:
    with closing(sqlite3.connect(file)) as connection:
        [(found,)] = connection.execute("SELECT version_num FROM alembic_version")
    return found
