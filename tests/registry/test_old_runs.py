"""Old traces and runs leave MLflow with their files; newer ones, and other people's, stay."""

from __future__ import annotations

import shutil
import sqlite3
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from rlhf_pipeline.config import KeptSettings, RetentionSettings, Settings
from rlhf_pipeline.errors import RegistryError
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Interaction, now, user_prompt
from rlhf_pipeline.registry.forgetting import (
    forget_old_traces,
    forget_runs,
    forget_samples,
    old_traces,
    runs_of,
)
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.registry.traces import log_interaction
from rlhf_pipeline.retention import Item, prune


def test_old_traces_go_but_for_the_newest(registry: ModelRegistry) -> None:
    ids = []
    for days in (100, 95, 1):
        said = Interaction(
            f"t{days}", "old", user_prompt("hi"), "yes", 0, now() - timedelta(days=days)
        )
        ids.append(log_interaction(registry, said))
    before = now() - timedelta(days=90)
    assert [info.trace_id for info in old_traces(registry, "old", 0, before)] == [ids[1], ids[0]]
    assert [info.trace_id for info in old_traces(registry, "old", 2, before)] == [ids[0]]
    forget_old_traces(registry, "old", 2, before)
    assert [info.trace_id for info in old_traces(registry, "old", 0, now())] == [ids[2], ids[1]]
    files = [path.parts for path in registry.folder.rglob("*") if path.is_file()]
    assert [any(trace_id in parts for parts in files) for trace_id in ids] == [False, True, True]
    assert old_traces(registry, "nobody", 0, now()) == []


def test_a_chat_stays_as_long_as_its_trace(registry: ModelRegistry, tmp_path: Path) -> None:
    """An erasure finds a person's traces by their chats."""
    database = registry.ledger.database
    store = FeedbackStore(database)
    store.ensure_agent("traced")
    prompt = user_prompt("hi")
    said = {
        days: Interaction(f"{days} days", "traced", prompt, "yes", 0, now() - timedelta(days=days))
        for days in (100, 99, 95)
    }
    store.add_interactions(list(said.values()))
    for days in (100, 95):
        log_interaction(registry, said[days])
    rules = RetentionSettings(
        traces=KeptSettings(newest=1, days=30), chats=KeptSettings(newest=0, days=30)
    )
    settings = Settings(state_dir=tmp_path, retention=rules)
    at = now()

    def pruned(*, dry_run: bool) -> list[Item]:
        return prune(registry, lambda _: settings, agents=["traced"], dry_run=dry_run, at=at)

    told = pruned(dry_run=True)
    assert [(item.kind, item.traces, item.rows) for item in told] == [
        ("traces", 1, 0),
        ("chats", 0, 2),
    ]
    assert all(store.interaction(f"{days} days") for days in said)
    assert pruned(dry_run=False) == told
    assert [days for days in said if store.interaction(f"{days} days")] == [95]
    assert pruned(dry_run=False) == []


def test_a_folder_copied_by_hand_deletes_nothing_of_the_one_it_came_from(
    registry: ModelRegistry, tmp_path: Path
) -> None:
    """Nor is anybody erased there whose words would stay in what a turn logged."""
    with registry.run("copied", fingerprint="c" * 64, stage="turn", parameters={"x": 1}) as run:
        run.log_text("ppo/result.json", '{"evaluations": []}')
    said = Interaction("copied", "copied", user_prompt("hi"), "yes", 0, now())
    trace_id = log_interaction(registry, said)
    folder = tmp_path / "mlflow"
    shutil.copytree(registry.folder, folder)
    copy = ModelRegistry(registry.ledger, f"sqlite:///{folder}/mlflow.db", folder)
    with pytest.raises(RegistryError, match="moved or copied by hand"):
        forget_old_traces(copy, "copied", 0, now() + timedelta(days=1))
    with pytest.raises(RegistryError, match="moved or copied by hand"):
        forget_samples(copy, "copied", "c" * 16, ['[["user", "hi"]]'], [], None)
    assert [info.trace_id for info in old_traces(copy, "copied", 0, now())] == [trace_id]
    assert list(registry.folder.glob(f"artifacts/traces/{trace_id}/artifacts/traces.json"))


def test_a_trace_whose_file_will_not_go_is_kept_to_be_asked_again(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_id = log_interaction(
        registry, Interaction("stuck", "stuck", user_prompt("hi"), "yes", 0, now())
    )
    tomorrow = now() + timedelta(days=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_: None)
        with pytest.raises(RegistryError, match=r"found traces\.json still there"):
            forget_old_traces(registry, "stuck", 0, tomorrow)
    assert [info.trace_id for info in old_traces(registry, "stuck", 0, tomorrow)] == [trace_id]
    forget_old_traces(registry, "stuck", 0, tomorrow)
    assert old_traces(registry, "stuck", 0, tomorrow) == []


def test_runs_of_a_turn_go_with_their_files(registry: ModelRegistry, tmp_path: Path) -> None:
    made = {}
    for mark in ("a" * 64, "b" * 64):
        with registry.run("old", fingerprint=mark, stage="turn", parameters={"x": 1}) as run:
            run.log_text("ppo/samples.json", "quoted")
            made[mark[0]] = run.run_id
    assert runs_of(registry, "old", "a" * 16) == [made["a"]]
    files = [p for p in registry.folder.rglob("samples.json") if made["a"] in p.parts]
    assert len(files) == 1
    forget_runs(registry, [made["a"]])
    assert not files[0].exists()
    assert registry.client.get_run(made["a"]).info.lifecycle_stage == "deleted"
    assert runs_of(registry, "old", "b" * 16) == [made["b"]]
    assert runs_of(registry, "nobody", "a" * 16) == []


def test_a_run_deleted_on_mlflows_page_goes_with_its_turn_and_its_files(
    registry: ModelRegistry,
) -> None:
    """Once the turn's snapshot has gone, no erasure knows any more what to look for in them."""
    with registry.run("old", fingerprint="d" * 64, stage="turn", parameters={"x": 1}) as run:
        run.log_text("ppo/samples.json", "quoted")
    registry.client.delete_run(run.run_id)
    assert runs_of(registry, "old", "d" * 16) == [run.run_id]
    forget_runs(registry, [run.run_id])
    assert [p for p in registry.folder.rglob("samples.json") if run.run_id in p.parts] == []
    assert registry.client.get_run(run.run_id).info.lifecycle_stage == "deleted"


def test_what_mlflow_could_not_write_stands_in_no_error(
    registry: ModelRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """It is what people wrote, and errors go to logs, which no erasure reaches."""

    def full(_cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT"):
            raise sqlite3.OperationalError("database or disk is full")

    written = Interaction("full", "full", user_prompt("my nougat?"), "marzipan", 0, now())
    registry.experiment("full")
    sa.event.listen(sa.Engine, "do_execute", full)
    try:
        with pytest.raises(RegistryError, match="disk is full") as refused:
            log_interaction(registry, written)
    finally:
        sa.event.remove(sa.Engine, "do_execute", full)
    told = "".join(traceback.format_exception(refused.value)) + caplog.text
    assert "hidden" in told
    assert not [word for word in ("nougat", "marzipan") if word in told]
