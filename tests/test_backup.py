"""Backup and restore: a live state folder copied, damaged, moved, and taken back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_pipeline import backup
from rlhf_pipeline.backup import MANIFEST, STATE, back_up, check_backup, restore
from rlhf_pipeline.cli import app
from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.config import Settings
from rlhf_pipeline.database import Database, open_database
from rlhf_pipeline.errors import BackupError, PipelineError, RegistryError
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import file_sha256, folder_sha256
from rlhf_pipeline.records import Feedback, FeedbackKind, Interaction, now, user_prompt
from rlhf_pipeline.registry.forgetting import forget_traces
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.registry.traces import log_interaction
from rlhf_pipeline.serving.keys import Keys
from tests.assets.world import FirstTurn, Loop

WRITER = """
import sys
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Feedback, FeedbackKind, user_prompt

store = FeedbackStore(Database(f"sqlite:///{sys.argv[1]}/feedback.db"))
store.ensure_agent("tea")
for n in range(1_000_000):
    store.append([
        Feedback("tea", FeedbackKind.thumbs, f"key {n}", prompt=user_prompt("Why?"),
                 completion=f"Because {n}.", number=1.0)
    ])
    print(n, flush=True)
"""

LISTS = """
import sys
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.store import FeedbackStore

database = Database(f"sqlite:///{sys.argv[1]}/feedback.db")
print(*FeedbackStore(database).agents())
database.close()
"""


def settings_in(folder: Path) -> Settings:
    return Settings.model_validate({"recipe": "a test", "state_dir": folder})


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Make a state folder with a store, a version and a file nobody knows."""
    folder = tmp_path / "state"
    database = Database(f"sqlite:///{folder / 'feedback.db'}")
    FeedbackStore(database).ensure_agent("tea")
    model = folder / "agents" / "tea" / "v0"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    PromotionLedger(database, folder).add_baseline(
        "tea", label="v0", path=model, files=folder_sha256(model), lineage={}, actor="test"
    )
    database.close()
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "big").write_bytes(b"left out")
    (folder / "notes.txt").write_text("kept")
    return folder


def test_a_store_that_is_written_to_all_the_time_is_copied_as_of_one_instant(
    state: Path, tmp_path: Path
) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(state)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    try:
        before = [int(writer.stdout.readline()) for _ in range(50)][-1] + 1
        back_up(settings_in(state), tmp_path / "copy")
        assert writer.poll() is None
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        after = before + len(writer.stdout.read().splitlines()) + 1  # one may be stored, not told
        writer.wait()
        writer.stdout.close()
    elsewhere = settings_in(tmp_path / "elsewhere")
    restore(elsewhere, tmp_path / "copy")
    database = Database(elsewhere.resolved_database_url)
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
        keys = connection.exec_driver_sql("SELECT idempotency_key FROM feedback ORDER BY seq")
        found = [row[0] for row in keys]
    database.close()
    assert found == [f"key {n}" for n in range(len(found))]  # a prefix: nothing lost, nothing torn
    assert before <= len(found) <= after


def test_a_copy_takes_no_locks_from_who_makes_it(state: Path, tmp_path: Path) -> None:
    def listed_by_another() -> list[str]:
        told = subprocess.run(
            [sys.executable, "-c", LISTS, str(state)], check=True, capture_output=True, text=True
        )
        return told.stdout.split()

    ours = FeedbackStore(Database(f"sqlite:///{state / 'feedback.db'}"))
    ours.ensure_agent("coffee")
    back_up(settings_in(state), tmp_path / "copy")
    # Whoever thinks it is the last to close takes the log away, and with it what comes next.
    assert listed_by_another() == ["tea", "coffee"]
    ours.ensure_agent("cocoa")
    found = listed_by_another()
    ours.database.close()
    assert found == ["tea", "coffee", "cocoa"]


@pytest.mark.parametrize("name", ["notes.db", "100%20#1?.db"])
def test_a_file_that_only_ends_as_a_database_does_is_copied_as_it_is(
    name: str, state: Path, tmp_path: Path
) -> None:
    (state / name).write_bytes(b"not a database, and longer than the sixteen bytes of a head " * 9)
    back_up(settings_in(state), tmp_path / "copy")
    assert (tmp_path / "copy" / STATE / name).read_bytes() == (state / name).read_bytes()


def test_a_copy_has_what_matters_and_says_what_it_is(state: Path, tmp_path: Path) -> None:
    made = back_up(settings_in(state), tmp_path / "copy")
    assert check_backup(tmp_path / "copy") == made
    names = set(folder_sha256(tmp_path / "copy" / STATE))
    assert names == {"feedback.db", "notes.txt", "agents/tea/v0/model.safetensors"}
    assert made.files == 3


def test_nobody_else_may_look_into_a_copy_while_it_is_made(state: Path, tmp_path: Path) -> None:
    """Nor into what is left of one that was killed."""
    seen: list[tuple[str, int]] = []

    def look(_: object) -> None:
        [aside] = tmp_path.glob("elsewhere/.*.new-*")
        seen.append((aside.name.split(".")[1], aside.stat().st_mode & 0o777))

    settings = Settings(state_dir=state)
    copy = back_up(settings, tmp_path / "elsewhere" / "copy", look).path
    restore(Settings(state_dir=tmp_path / "elsewhere" / "state"), copy, look)
    assert set(seen) == {("copy", 0o700), ("state", 0o700)}
    assert copy.stat().st_mode & 0o777 == 0o700


def test_a_dropped_file_that_is_taken_in_meanwhile_is_in_the_copy(
    state: Path, tmp_path: Path
) -> None:
    inbox = state / "inbox" / "tea"
    (inbox / "done").mkdir(parents=True)
    dropped = inbox / "votes.jsonl"
    vote = {"kind": "thumbs", "value": "up", "prompt": "Why?", "completion": "So.", "rater": "ann"}
    dropped.write_text(json.dumps(vote) + "\n")
    store = FeedbackStore(Database(f"sqlite:///{state / 'feedback.db'}"))

    def take_in(facts: Mapping[str, Any]) -> None:
        if facts["file"] == "feedback.db":
            ingest(store, dropped, "tea")
            dropped.replace(inbox / "done" / dropped.name)

    back_up(settings_in(state), tmp_path / "copy", take_in)
    assert store.counts("tea") == {"thumbs": 1}
    store.database.close()
    new = tmp_path / "new"
    restore(settings_in(new), tmp_path / "copy")
    restored = FeedbackStore(Database(f"sqlite:///{new / 'feedback.db'}"))
    assert restored.counts("tea") == {}
    for _ in range(2):  # it is there under both names
        ingest(restored, new / "inbox" / "tea", "tea")
        assert restored.counts("tea") == {"thumbs": 1}
    restored.database.close()


def test_what_a_database_names_is_in_the_copy_however_late_it_came(
    state: Path, tmp_path: Path
) -> None:
    (state / "dagster").mkdir()
    with closing(sqlite3.connect(state / "dagster" / "runs.db")) as runs:
        runs.execute("CREATE TABLE runs (id)")
    store = FeedbackStore(Database(f"sqlite:///{state / 'feedback.db'}"))
    store.append(
        [
            Feedback(
                "tea",
                FeedbackKind.thumbs,
                "one",
                prompt=user_prompt("Why?"),
                completion="So.",
                number=1.0,
            )
        ]
    )
    data = state / "agents" / "tea" / "snapshots" / "late"
    told = []

    def take_snapshot(facts: Mapping[str, Any]) -> None:
        told.append(facts)
        if facts["file"] == "dagster/runs.db":  # which comes before feedback.db
            snapshot.take(store.database, "tea", 1, data / snapshot.FILE)

    made = back_up(settings_in(state), tmp_path / "copy", take_snapshot)
    store.database.close()
    new = tmp_path / "new"
    restore(settings_in(new), tmp_path / "copy")
    with closing(sqlite3.connect(new / "feedback.db")) as connection:
        [path] = connection.execute("SELECT path FROM snapshots").fetchone()
    assert path == str(new / data.relative_to(state) / snapshot.FILE)
    assert len(snapshot.read(Path(path))) == 1
    assert [facts["done"] for facts in told] == list(range(1, made.files + 1))
    assert told[-1]["of"] == made.files


def test_a_folder_that_goes_while_the_state_is_listed_is_passed_over(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir, gone = os.scandir, state / "agents" / "tea" / "temporary"
    gone.mkdir()

    def scan(path: Any) -> Any:
        if path in (gone, str(gone)):
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert back_up(settings_in(state), tmp_path / "copy").files == 3
    assert not gone.exists()


def test_a_folder_that_goes_once_its_files_are_copied_is_its_owners_alone(
    state: Path, tmp_path: Path
) -> None:
    pruned = state / "agents" / "tea" / "pruned"
    pruned.mkdir()
    (pruned / "a file").write_text("of a turn")

    def prune(facts: Mapping[str, float | int | str]) -> None:
        if facts["file"] == "agents/tea/pruned/a file":
            shutil.rmtree(pruned)

    assert back_up(settings_in(state), tmp_path / "copy", prune).files == 4
    copy = tmp_path / "copy" / STATE / "agents" / "tea" / "pruned"
    assert (copy / "a file").read_text() == "of a turn"
    assert copy.stat().st_mode & 0o777 == 0o700


def test_the_restored_ledger_finds_its_champion_in_the_new_place(
    state: Path, tmp_path: Path
) -> None:
    back_up(settings_in(state), tmp_path / "copy")
    new = tmp_path / "new" / "state"
    restore(settings_in(new), tmp_path / "copy")
    database = Database(f"sqlite:///{new / 'feedback.db'}")
    champion = PromotionLedger(database, new).champion("tea")
    assert champion is not None
    assert champion.path == new / "agents" / "tea" / "v0"
    assert folder_sha256(champion.path) == champion.files
    database.close()


def test_a_turn_that_was_under_way_is_at_work_in_no_restored_folder(
    state: Path, tmp_path: Path
) -> None:
    database = Database(f"sqlite:///{state / 'feedback.db'}")
    ClaimBook(database).claim("tea", "f" * 64, 7, holder="there", asked_by="sensor")
    database.close()
    back_up(settings_in(state), tmp_path / "copy")
    new = tmp_path / "new" / "state"
    restore(settings_in(new), tmp_path / "copy")
    for folder, at_work in ((state, 0), (new, 1)):
        database = Database(f"sqlite:///{folder / 'feedback.db'}")
        assert len(ClaimBook(database).stale()) == at_work, folder
        database.close()
    database = Database(f"sqlite:///{new / 'feedback.db'}")
    taken = ClaimBook(database).claim("tea", "f" * 64, 7, holder="here", asked_by="person")
    database.close()
    assert (taken.attempt, taken.holder) == (2, "here")


def test_keys_go_along_and_open_the_restored_service_for_their_owner_alone(
    state: Path, tmp_path: Path
) -> None:
    before = Keys(state)
    _, key = before.create("admin")
    secret = before.signing_secret()
    back_up(settings_in(state), tmp_path / "copy")
    new = tmp_path / "new"
    restore(settings_in(new), tmp_path / "copy")
    after = Keys(new)
    found = after.find(key)
    assert found is not None
    assert found.role == "admin"
    assert after.signing_secret() == secret
    for folder in (tmp_path / "copy" / STATE, new):
        for path in (folder / "access", *(folder / "access").iterdir()):
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_model_that_is_not_what_was_registered_is_found_out(state: Path, tmp_path: Path) -> None:
    (state / "agents" / "tea" / "v0" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(BackupError, match=r"the champion .* version 0 of tea: agents/tea/v0/model"):
        back_up(settings_in(state), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_damaged_version_out_of_use_is_named_and_keeps_nothing_from_being_copied(
    state: Path, tmp_path: Path
) -> None:
    database = Database(f"sqlite:///{state / 'feedback.db'}")
    ledger = PromotionLedger(database, state)
    for number in (1, 2):
        model = state / "agents" / "tea" / f"v{number}"
        model.mkdir()
        (model / "model.safetensors").write_bytes(b"weights %d" % number)
        ledger.add_version(
            "tea",
            label=f"v{number}",
            path=model,
            files=folder_sha256(model),
            lineage={},
            gate={"passed": True},
            fingerprint=f"f{number}",
        )
        ledger.promote("tea", number, actor="t", reason="r", expected_champion=number - 1)
    (model / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(BackupError, match="leave it with `rlhf rollback --agent tea --reason WHY`"):
        back_up(settings_in(state), tmp_path / "copy")
    ledger.rollback("tea", actor="t", reason="damaged")
    database.close()
    made = back_up(settings_in(state), tmp_path / "copy")
    assert made.damaged == ("version 2 of tea: agents/tea/v2/model.safetensors",)
    again = CliRunner().invoke(
        app, ["--state", str(tmp_path / "new"), "restore", str(tmp_path / "copy")]
    )
    assert again.exit_code == 0
    assert "not as it was registered: version 2 of tea" in again.stderr
    assert "keys that were revoked since hold again" in again.stderr
    (state / "agents" / "tea" / "v0" / "model.safetensors").unlink()  # the baseline
    with pytest.raises(BackupError, match="the previous champion"):
        back_up(settings_in(state), tmp_path / "other")


def test_links_are_named_and_not_followed(state: Path, tmp_path: Path) -> None:
    outside = tmp_path / "drop"
    outside.mkdir()
    (outside / "votes.jsonl").write_text("{}")
    (state / "inbox").mkdir(exist_ok=True)
    (state / "inbox" / "support").symlink_to(outside)
    copy = tmp_path / "copy"
    made = back_up(settings_in(state), copy)
    assert made.links == (f"inbox/support -> {outside}",)
    new = CliRunner().invoke(app, ["--state", str(tmp_path / "new"), "restore", str(copy)])
    assert new.exit_code == 0
    assert f"not copied, as it is a link: inbox/support -> {outside}; make it again" in new.stderr
    (state / "dagster").symlink_to(outside)  # of which nothing would be kept
    with pytest.raises(BackupError, match="a backup follows no links, found dagster -> "):
        back_up(settings_in(state), tmp_path / "other")


def test_what_is_named_in_no_utf_8_is_named_and_keeps_nothing_else_out(
    state: Path, tmp_path: Path
) -> None:
    inbox = state / "inbox" / "tea"
    inbox.mkdir(parents=True)
    (inbox / "votes.jsonl").write_text("{}")
    (inbox / os.fsdecode(b"caf\xe9.jsonl")).write_text("{}")
    (inbox / os.fsdecode(b"d\xe9p\xf4t")).mkdir()
    (inbox / os.fsdecode(b"d\xe9p\xf4t") / "more.jsonl").write_text("{}")
    (inbox / os.fsdecode(b"l\xefen")).symlink_to(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9t\xe9"))
    copy = tmp_path / "copy"
    made = back_up(settings_in(state), copy)
    assert made.misnamed == (r"inbox/tea/caf\xe9.jsonl", r"inbox/tea/d\xe9p\xf4t/more.jsonl")
    assert made.links == (rf"inbox/tea/l\xefen -> {tmp_path}/\xe9t\xe9",)
    new = CliRunner().invoke(app, ["--state", str(tmp_path / "new"), "restore", str(copy)])
    assert new.exit_code == 0
    assert r"not copied, as its name is no UTF-8: inbox/tea/caf\xe9.jsonl; copy it by" in new.stderr
    assert [path.name for path in (tmp_path / "new" / "inbox" / "tea").iterdir()] == ["votes.jsonl"]
    (state / os.fsdecode(b"l\xefen")).symlink_to(inbox)
    with pytest.raises(BackupError, match=r"follows no links, found l\\xefen -> "):
        back_up(settings_in(state), tmp_path / "other")


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_a_damaged_backup_is_not_restored(how: str, state: Path, tmp_path: Path) -> None:
    back_up(settings_in(state), tmp_path / "copy")
    victim = tmp_path / "copy" / STATE / "notes.txt"
    victim.write_text("kept?") if how == "changed" else victim.unlink()
    with pytest.raises(BackupError, match=r"damaged: notes\.txt"):
        restore(settings_in(tmp_path / "new"), tmp_path / "copy")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        ("[]", r"what it holds to be \[\]"),
        ('{"format": 2}', "format to be 2"),
        ('{"format": 1, "created_at": "", "state_dir": "", "files": ["a"]}', "files to be"),
    ],
)
def test_a_manifest_of_another_shape_is_said_to_be_one(
    manifest: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(BackupError, match=named):
        restore(settings_in(tmp_path / "new"), tmp_path)


def test_a_newer_releases_backup_is_not_restored(state: Path, tmp_path: Path) -> None:
    back_up(settings_in(state), tmp_path / "copy")
    store, manifest = tmp_path / "copy" / STATE / "feedback.db", tmp_path / "copy" / MANIFEST
    was = file_sha256(store)
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    manifest.write_text(manifest.read_text().replace(was, file_sha256(store)))
    with pytest.raises(PipelineError, match="install the release that it was used with last"):
        restore(settings_in(tmp_path / "new"), tmp_path / "copy")
    assert not (tmp_path / "new").exists()


def test_a_manifest_cannot_reach_outside(state: Path, tmp_path: Path) -> None:
    back_up(settings_in(state), tmp_path / "copy")
    manifest = tmp_path / "copy" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"notes.txt"', '"../../escaped.txt"'))
    with pytest.raises(BackupError, match="inside the backup only"):
        restore(settings_in(tmp_path / "new"), tmp_path / "copy")


def test_nothing_that_is_there_is_written_over(state: Path, tmp_path: Path) -> None:
    back_up(settings_in(state), tmp_path / "copy")
    with pytest.raises(BackupError, match="a new folder"):
        back_up(settings_in(state), tmp_path / "copy")
    with pytest.raises(BackupError, match="a new state folder"):
        restore(settings_in(state), tmp_path / "copy")
    with pytest.raises(BackupError, match="would copy itself"):
        back_up(settings_in(state), state / "backup")


def test_what_cannot_be_copied_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="see --state"):
        back_up(settings_in(tmp_path / "nothing"), tmp_path / "copy")
    away = Settings.model_validate(
        {"recipe": "a test", "state_dir": tmp_path, "database_url": "postgresql://somewhere/db"}
    )
    with pytest.raises(BackupError, match="pg_dump"):
        back_up(away, tmp_path / "copy")
    with pytest.raises(BackupError, match=MANIFEST):
        restore(settings_in(tmp_path / "new"), tmp_path)


def test_a_whole_turn_moves_to_another_machine(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    """After a real turn: equal votes and ledger, and MLflow finds the champion's files."""
    agent = first_turn.agent_id
    back_up(settings_in(loop.state), tmp_path / "copy")
    new = tmp_path / "moved"
    restore(settings_in(new), tmp_path / "copy")
    before = Database(f"sqlite:///{loop.state / 'feedback.db'}")
    after = open_database(f"sqlite:///{new / 'feedback.db'}")
    votes = "SELECT * FROM effective_feedback ORDER BY seq"
    entries = "SELECT * FROM promotions ORDER BY agent_id, entry"
    for question in (votes, entries):
        answers = []
        for database in (before, after):
            with database.read() as connection:
                answers.append(connection.exec_driver_sql(question).fetchall())
        assert answers[0] == answers[1]
        assert answers[0]
    registry = Workspace(None, str(new)).registry
    champion = registry.find(f"models:/rlhf-{agent}@champion")
    assert champion.path.is_relative_to(new)
    for _, row in _places(new):
        assert str(loop.state) not in row
    before.close()
    after.close()


def test_what_mlflow_keeps_is_the_restored_folders_own_whatever_its_name(
    state: Path, tmp_path: Path
) -> None:
    """Erasing in a restored state must reach its words, and leave those of the state before."""
    live = state.rename(tmp_path / "früher, 50%41 with blanks #1")
    registry = Workspace(None, str(live)).registry
    asked = Interaction("asked", "tea", user_prompt("secret?"), "Yes.", 0, now())
    log_interaction(registry, asked)
    with registry.run("tea", fingerprint="one", stage="turn", parameters={}) as run:
        run.log_text("note.txt", "secret")
    back_up(settings_in(live), tmp_path / "copy")
    new = tmp_path / "später, 50%41 with blanks?"
    restore(settings_in(new), tmp_path / "copy")

    def kept(folder: Path) -> list[str]:
        files = [path for path in (folder / "mlflow" / "artifacts").rglob("*") if path.is_file()]
        return sorted(path.name for path in files if b"secret" in path.read_bytes())

    assert kept(live) == kept(new) == ["note.txt", "traces.json"]
    restored = Workspace(None, str(new)).registry
    with restored.run("tea", fingerprint="two", stage="turn", parameters={}) as later:
        later.log_text("later.txt", "secret")
    assert kept(new) == ["later.txt", "note.txt", "traces.json"]
    forget_traces(restored, "tea", ["asked"], "nobody")
    assert kept(new) == ["later.txt", "note.txt"]
    assert kept(live) == ["note.txt", "traces.json"]
    place = restored.client.get_run(run.run_id).info.artifact_uri
    assert place.startswith(f"{new.as_uri()}/")


def _told(folder: Path, *command: str) -> str:
    done = CliRunner().invoke(app, ["--state", str(folder), *command])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("how", ["moved", "moved, with a link left", "copied"])
def test_a_folder_moved_by_hand_takes_nothing_until_its_places_follow(
    how: str, state: Path, tmp_path: Path
) -> None:
    """Nothing of it goes to where it was: neither a turn's files, nor what people asked."""
    old = state.rename(tmp_path / "früher, with blanks")
    before = Workspace(None, str(old))
    asked = Interaction("asked", "tea", user_prompt("secret?"), "Yes.", 0, now())
    log_interaction(before.registry, asked)
    with before.registry.run("tea", fingerprint="one", stage="turn", parameters={}) as run:
        run.log_text("note.txt", "secret")
    vote = Feedback("tea", FeedbackKind.thumbs, "k", prompt=user_prompt("q"), completion="a")
    before.store.append([replace(vote, number=1.0)])
    place = old / "agents" / "tea" / "snapshots" / "0123" / snapshot.FILE
    taken = snapshot.take(before.database, "tea", 10, place)
    before.database.close()
    assert "nothing to do" in _told(old, "moved")

    new = tmp_path / "später"
    if how == "copied":
        shutil.copytree(old, new)
    else:
        old.rename(new)
    if how == "moved, with a link left":
        old.symlink_to(new)
    here = Workspace(None, str(new))
    left = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))]
    with pytest.raises(RegistryError, match="moved or copied by hand; `rlhf moved`"):
        here.registry.run("tea", fingerprint="two", stage="turn", parameters={}).__enter__()
    with pytest.raises(RegistryError, match="`rlhf moved`"):
        log_interaction(here.registry, replace(asked, interaction_id="later"))
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == left

    told = _told(new, "moved")
    assert f"what was kept under {old} is kept under this place now" in told
    assert ("is still there" in told) == (how == "copied")
    assert "nothing to do" in _told(new, "moved")
    with here.registry.run("tea", fingerprint="two", stage="turn", parameters={}) as later:
        later.log_text("later.txt", "secret")
    log_interaction(here.registry, replace(asked, interaction_id="later"))
    # A link that was left leads to the snapshot as well.
    found = snapshot.find(here.database, "tea", taken.fingerprint)
    assert found is not None
    assert Path(found.path).resolve() == new / place.relative_to(old)
    assert len(snapshot.read(found.path)) == 1
    forget_traces(here.registry, "tea", ["asked", "later"], "nobody")

    def kept(folder: Path) -> list[str]:
        files = [path for path in (folder / "mlflow" / "artifacts").rglob("*") if path.is_file()]
        return sorted(path.name for path in files if b"secret" in path.read_bytes())

    assert kept(new) == ["later.txt", "note.txt"]
    if how == "copied":
        assert kept(old) == ["note.txt", "traces.json"]
        assert "nothing to do" in _told(old, "moved")
    else:
        assert old.is_symlink() == old.exists() == (how != "moved")


def test_a_backup_of_a_folder_that_was_moved_twice_is_the_restored_folders_own(
    state: Path, tmp_path: Path
) -> None:
    registry = Workspace(None, str(state)).registry
    with registry.run("tea", fingerprint="one", stage="turn", parameters={}) as run:
        run.log_text("note.txt", "secret")
    moved = state.rename(tmp_path / "first").rename(tmp_path / "second")
    back_up(settings_in(moved), tmp_path / "copy")
    new = tmp_path / "new"
    restore(settings_in(new), tmp_path / "copy")
    restored = Workspace(None, str(new)).registry
    place = restored.client.get_run(run.run_id).info.artifact_uri
    assert place.startswith(f"{new.as_uri()}/")
    assert "nothing to do" in _told(new, "moved")


def test_no_state_folder_that_is_not_there_is_said_to_have_moved(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--state", str(tmp_path / "none"), "moved"])
    assert done.exit_code != 0
    assert "needed a state folder, found none" in " ".join(done.output.split())
    assert not (tmp_path / "none").exists()


def _places(state: Path) -> list[tuple[str, str]]:
    database = Database(f"sqlite:///{state / 'mlflow' / 'mlflow.db'}")
    found = []
    with database.engine.connect() as connection:
        for table, column in (("runs", "artifact_uri"), ("model_versions", "storage_location")):
            rows = connection.exec_driver_sql(f"SELECT {column} FROM {table}")
            found += [(table, str(row[0])) for row in rows]
    database.engine.dispose()
    assert len(found) > 2
    return found


def test_a_database_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    source = tmp_path / "feedback.db"
    database = Database(f"sqlite:///{source}")
    database.migrate()
    database.close()
    with pytest.raises(BackupError, match=r"feedback\.db: unable to open database file; mend"):
        backup._copy_database(source, tmp_path / "gone" / "feedback.db")


def test_a_database_that_somebody_holds_is_given_up_and_named(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "WAIT_SECONDS", 0.2)
    (state / "mlflow").mkdir()
    held = state / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(held, isolation_level=None)) as other:
        other.execute("CREATE TABLE runs (id)")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BackupError, match=r"mlflow\.db to be free .* 0\.2 s, .* end that"):
            back_up(settings_in(state), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert back_up(settings_in(state), tmp_path / "copy").files == 4


def damage(file: Path) -> None:
    """Overwrite the last table's only leaf: the file opens, and its other tables can be read."""
    content = file.read_bytes()
    file.write_bytes(content[:-4096] + b"\xa5" * 4096)


def with_rows(file: Path) -> None:
    file.parent.mkdir(parents=True)
    with closing(sqlite3.connect(file)) as made, made:
        made.execute("CREATE TABLE a (word)")
        made.execute("CREATE TABLE b (word)")
        made.execute("INSERT INTO b VALUES ('runs')")


def test_a_damaged_store_is_not_backed_up(state: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(state / "feedback.db")) as store, store:
        store.execute("CREATE TABLE last (word)")
    damage(state / "feedback.db")
    with pytest.raises(BackupError, match=r"sound store, found .*feedback\.db: .*; put the state"):
        back_up(settings_in(state), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_damaged_database_beside_the_store_is_named_and_not_restored(
    state: Path, tmp_path: Path
) -> None:
    tracking, runs = state / "mlflow" / "mlflow.db", state / "dagster" / "history" / "runs.db"
    for file in (tracking, runs):
        with_rows(file)
    damage(tracking)
    runs.write_bytes(bytes(8192))
    told = CliRunner().invoke(app, ["--state", str(state), "backup", str(tmp_path / "copy")])
    assert told.exit_code == 0
    assert "a damaged database: mlflow/mlflow.db: *** in database main" in told.stderr
    assert "dagster/history/runs.db: file is not a database; its copy" in told.stderr
    kept = tmp_path / "copy" / STATE / "mlflow" / "mlflow.db.damaged"
    assert kept.read_bytes() == tracking.read_bytes()
    new = tmp_path / "new"
    found = restore(settings_in(new), tmp_path / "copy")
    assert set(found.unsound) == {"mlflow/mlflow.db", "dagster/history/runs.db"}
    assert set(folder_sha256(new)) == {
        "feedback.db",
        "notes.txt",
        "agents/tea/v0/model.safetensors",
    }


def test_a_database_too_damaged_to_be_copied_keeps_no_vote_from_it(
    state: Path, tmp_path: Path
) -> None:
    file = state / "mlflow" / "mlflow.db"
    with_rows(file)
    file.write_bytes(file.read_bytes()[:5000])
    made = back_up(settings_in(state), tmp_path / "copy")
    assert made.unsound == {"mlflow/mlflow.db": "database disk image is malformed"}
