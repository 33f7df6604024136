"""A consistent copy of a live state folder, a state folder from such a copy, and one moved by hand.

What a copy holds, in this order, each listed when its time has come: files that were dropped, so
that votes which are taken in meanwhile are in their file, in the database, or in both (which does
no harm: their keys are known); every SQLite database, taken with SQLite's online backup while
others write; every other file, so that whatever a database row names was already there when its
copy was made (files are written once, under names that are not used again); a manifest with each
file's SHA-256, written last: a folder without a manifest is no backup. What it leaves out: lock
files and PPO's checkpoints, which a training that goes on would not miss; and, named in it, links
and files whose names are no UTF-8, which no manifest can hold.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import quote, unquote

import sqlalchemy as sa
from pydantic import BaseModel, ValidationError

from rlhf_pipeline import records
from rlhf_pipeline.config import Settings
from rlhf_pipeline.database import Database, claims, snapshots
from rlhf_pipeline.errors import BackupError
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.files import (
    file_sha256,
    folder_sha256,
    new_folder,
    no_room,
    printable,
    read_json,
    sqlite_url,
    write_json,
)
from rlhf_pipeline.records import Progress, ignore_progress
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger

MANIFEST = "manifest.json"
WAIT_SECONDS = 60.0  # for a database that somebody else holds
PRIVATE = 0o700  # of a copy from its first file on: it is what people wrote, and may be killed
STATE = "state"
DAMAGED = ".damaged"

_DROPPED, _DATABASE, _OTHER = range(3)  # ranks of files, copied in this order
_LEFT_OUT = {"checkpoints"}  # folders
_OF_OURS = {"feedback.db", "mlflow", "dagster"}  # a .db in them is a database, or damaged
# Where MLflow's own tables hold the place of an artifact, absolute by its design.
_MLFLOW_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
    ("trace_tags", "value"),  # of mlflow.artifactLocation
)
_ARTIFACTS = "/mlflow/artifacts"  # where in a state folder all of them lie


class _Manifest(BaseModel):
    """What a backup says of itself."""

    format: Literal[1]
    created_at: str
    state_dir: str
    damaged: tuple[str, ...] = ()
    unsound: dict[str, str] = {}
    links: tuple[str, ...] = ()
    misnamed: tuple[str, ...] = ()
    files: dict[str, str]  # names in the state folder to their SHA-256


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup holds."""

    path: Path
    files: int
    bytes: int
    created_at: str  # ISO 8601, UTC
    state_dir: str  # where the state was
    damaged: tuple[str, ...] = ()  # versions out of use whose files were not as registered
    unsound: Mapping[str, str] = field(default_factory=dict)  # databases, and what SQLite says
    links: tuple[str, ...] = ()  # "name -> target": not copied, to be made again by a person
    misnamed: tuple[str, ...] = ()  # files whose names are no UTF-8, as `printable`: not copied


def back_up(settings: Settings, target: Path, report: Progress = ignore_progress) -> Backup:
    """Copy the state folder to `target`, a folder that is not there yet; others may go on writing.

    Raises BackupError where the store is not embedded or not sound, `target` is taken, or a file of
    a version in use is not the one the ledger registered: a backup must not be the place where that
    is found too late. Of a version out of use it is named, and so is a damaged database of MLflow's
    or Dagster's: they are no reason to leave everything else uncopied.
    """
    if settings.database_url is not None:
        raise BackupError(
            "rlhf backup copies the embedded store, found database_url set; back the database up "
            "with its own tool (pg_dump), then copy the state folder"
        )
    state = settings.state_dir
    if not (state / "feedback.db").exists():
        raise BackupError(f"needed a state folder with a store, found none at {state}; see --state")
    if target.exists():
        raise BackupError(f"a backup goes to a new folder, found something at {target}")
    if target.resolve().is_relative_to(state.resolve()):
        raise BackupError(f"a backup inside the state folder would copy itself: {target}")
    links = _links_in(state)
    if away := [link for link in links if "/" not in link.partition(" -> ")[0]]:
        raise BackupError(
            f"a backup follows no links, found {', '.join(away)} in {state}; move the folder "
            "there, or the whole state folder to the larger disk and name it with --state"
        )
    with new_folder(target) as folder:
        folder.chmod(PRIVATE)
        copied: set[str] = set()
        misnamed: set[str] = set()
        unsound: dict[str, str] = {}
        for rank in (_DROPPED, _DATABASE, _OTHER):
            every = set(_files_of(state))
            misnamed |= {name for name in every if printable(name) != name}
            left = every - copied - misnamed
            of = len(copied) + len(left)
            for name in sorted(n for n in left if _rank(n, settings.feedback.drop_folder) <= rank):
                copy = folder / STATE / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                try:
                    said = _copy(state, name, copy)
                except FileNotFoundError:  # a temporary file of somebody at work; the check below
                    continue  # misses it if anything registered needs it
                if said is not None:
                    unsound[name] = said
                copied.add(name)
                report({"file": name, "done": len(copied), "of": of})
        _copy_modes(state, folder / STATE)
        made = _Manifest(
            format=1,
            created_at=records.now().isoformat(),
            state_dir=str(state.resolve()),
            damaged=tuple(_check_models(folder / STATE)),
            unsound=unsound,
            links=tuple(links),
            misnamed=tuple(sorted(map(printable, misnamed))),
            files=folder_sha256(folder / STATE),
        )
        write_json(folder / MANIFEST, made.model_dump(mode="json"))
    return _described(target, made)


def check_backup(source: Path) -> Backup:
    """Return what the backup holds, having hashed every file. Raises BackupError if one differs."""
    made = _manifest_of(source)
    for name, sha256 in made.files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BackupError(f"a manifest may name files inside the backup only, found {name!r}")
        copy = source / STATE / name
        if not copy.is_file() or file_sha256(copy) != sha256:
            raise BackupError(
                f"the backup is damaged: {name} is not the file that was copied; take another one"
            )
    return _described(source, made)


def restore(settings: Settings, source: Path, report: Progress = ignore_progress) -> Backup:
    """Make the settings' state folder from the backup at `source`; the folder must not be there.

    Paths inside the databases are turned to the new folder, so the copy works wherever it lies. A
    turn that was under way counts as one that died.
    Its store is brought up to this release's schema. Raises BackupError where the backup is damaged
    or the state folder exists, PipelineError where a newer release made it.
    """
    found = check_backup(source)
    state = settings.state_dir
    if settings.database_url is not None:
        raise BackupError(
            "rlhf restore makes an embedded store, found database_url set; leave it out"
        )
    if state.exists() and any(state.iterdir()):
        raise BackupError(
            f"a restore goes to a new state folder, found one at {state}; move it aside, or name "
            "another with --state"
        )
    # A damaged database stays in the backup: its words would be beyond the reach of an erasure.
    left_out = {f"{name}{DAMAGED}" for name in found.unsound}
    names = [name for name in _manifest_of(source).files if name not in left_out]
    with new_folder(state) as folder:
        folder.chmod(PRIVATE)
        for done, name in enumerate(names, 1):
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / STATE / name, copy)
            report({"file": name, "done": done, "of": len(names)})
        _copy_modes(source / STATE, folder)
        _turn_rows(folder, state.resolve())
    return found


def _files_of(state: Path) -> Iterator[str]:
    """Yield the relative names of everything worth keeping."""
    # A folder may go while they are listed: os.walk passes over it, where rglob raises.
    every = (Path(folder, file) for folder, _, files in os.walk(state) for file in files)
    for path in every:
        name = path.relative_to(state)
        if path.is_symlink() or not path.is_file() or _LEFT_OUT.intersection(name.parts):
            continue
        halves = (".new-", ".old-")  # half written, half removed
        aside = any(p.startswith(".") and any(h in p for h in halves) for p in name.parts)
        if aside or path.name.endswith((".lock", "-wal", "-shm", "-journal")):
            continue
        yield name.as_posix()


def _links_in(state: Path) -> list[str]:
    """Return the links in a state folder, as `Backup.links` has them: what is there stays there."""
    every = (Path(f, name) for f, folders, files in os.walk(state) for name in (*folders, *files))
    found = sorted(path for path in every if path.is_symlink())
    told = [f"{path.relative_to(state).as_posix()} -> {path.readlink()}" for path in found]
    return [printable(link) for link in told]


def _rank(name: str, drop_folder: str) -> int:
    if name.endswith(".db"):
        return _DATABASE
    return _DROPPED if PurePosixPath(name).is_relative_to(drop_folder) else _OTHER


def _copy_modes(source: Path, target: Path) -> None:
    """Give the folders of a copy the modes they had: what others may not read stays so."""
    for path in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        try:
            shutil.copymode(source / path.relative_to(target), path)
        except FileNotFoundError:  # gone since its files were copied: who might read it is not told
            path.chmod(0o700)


def _copy(state: Path, name: str, target: Path) -> str | None:
    """Copy a file that others may be writing to; return what is wrong with a damaged database.

    The copy of such a one gets DAMAGED after its name. Raises BackupError where it is the store.
    """
    source, said = state / name, "file is not a database"
    try:
        if name.endswith(".db") and _copy_database(source, target):
            return None
        if not (name.endswith(".db") and PurePosixPath(name).parts[0] in _OF_OURS):
            shutil.copy(source, target)  # with its mode: keys are their owner's
            return None
    except sqlite3.DatabaseError as error:
        said = " ".join(str(error).split())
    if name == "feedback.db":
        raise BackupError(
            f"needed a sound store, found {source}: {said}; put the state folder aside and take "
            "one back with `rlhf restore`, or save what `sqlite3 feedback.db .recover` reads of it"
        )
    target.unlink(missing_ok=True)
    shutil.copy(source, f"{target}{DAMAGED}")
    return said


def _copy_database(source: Path, target: Path) -> bool:
    """Copy a database that others may be writing to, as of one instant; False where it is none.

    Raises BackupError where it cannot be opened, or written anew, or somebody holds it all the
    while: `Connection.backup` asks for ever, so it is given up once SQLite has waited by itself.
    Raises sqlite3.DatabaseError where the copy is damaged, as then is what it was made from.

    SQLite alone opens it. Whoever closes a file loses every lock the process has on it (POSIX),
    those of SQLite's open connections among them: the next to close the database takes its log
    away under them, and what they commit after that is lost.
    """

    def give_up(status: int, _left: int, _of: int) -> None:
        if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise BackupError(
                f"needed {source} to be free to read within {WAIT_SECONDS:g} s, found it locked by "
                "another program all the while; end that program, and back up again"
            )

    reading = f"file:{quote(str(source))}?mode=ro"
    try:
        with (
            closing(sqlite3.connect(reading, uri=True, timeout=WAIT_SECONDS)) as reader,
            closing(sqlite3.connect(target)) as writer,
        ):
            reader.backup(writer, progress=give_up)
            writer.execute("PRAGMA journal_mode=DELETE")  # one file, no log beside it
            # Takes less time than the copy, of which it sees every page.
            [said] = writer.execute("PRAGMA quick_check(1)").fetchone()
        if said != "ok":
            raise sqlite3.DatabaseError(said)
    except sqlite3.DatabaseError as error:
        if not source.exists():
            raise FileNotFoundError(source) from error
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            return False
        for file in (target, source):
            if full := no_room(error, str(file)):
                raise BackupError(full) from error
        if isinstance(error, sqlite3.OperationalError):  # damage has words of its own
            raise BackupError(
                f"needed a database that can be read, and room for a copy of it, found {source}: "
                f"{error}; mend that, and back up again"
            ) from error
        raise
    return True


def _check_models(state: Path) -> list[str]:
    """Return the versions whose files are not there byte for byte, in words.

    Raises BackupError if one of them is in use.
    """
    state, damaged = state.resolve(), []
    database = Database(sqlite_url(state / "feedback.db"))
    try:
        ledger = PromotionLedger(database, state)
        with database.read() as connection:
            known = connection.exec_driver_sql("SELECT DISTINCT agent_id FROM model_versions")
            agents = [str(row[0]) for row in known]
        for agent_id in agents:
            used = _in_use(ledger, agent_id)
            for version in ledger.versions(agent_id):
                if not version.path.is_relative_to(state):
                    continue  # registered from elsewhere; not ours to copy
                odd = _changed(version)
                if not odd:
                    continue
                place, role = version.path.relative_to(state), used.get(version.version)
                found = f"version {version.version} of {agent_id}: {place.as_posix()}/{odd[0]}"
                if role is not None:
                    leave = f", or leave it with `rlhf rollback --agent {agent_id} --reason WHY`"
                    raise BackupError(
                        f"needed the files of {role} as they were registered, found another or "
                        f"none for {found}; put the file back from an earlier backup or from "
                        "MLflow's copy of the version" + (leave if role == "the champion" else "")
                    )
                damaged.append(found)
    finally:
        database.close()  # the last connection folds the log back into the file
    return damaged


def _in_use(ledger: PromotionLedger, agent_id: str) -> dict[int, str]:
    """Return the versions that somebody meets or is compared with, and as what."""
    standing, running = ledger.standing(agent_id), ExperimentBook(ledger.database).running(agent_id)
    used = {} if running is None else {running.challenger: "a running experiment"}
    for role, version in (
        ("the baseline", standing.baseline),
        ("the previous champion", standing.previous),
        ("the challenger", standing.challenger),
        ("the champion", standing.champion),  # last: what it is told as, of all that it is
    ):
        if version is not None:
            used[version.version] = role
    return used


def _changed(version: ModelVersion) -> list[str]:
    """Return the names of files that are not as they were registered."""
    found = folder_sha256(version.path) if version.path.is_dir() else {}
    return [name for name, sha256 in version.files.items() if found.get(name) != sha256]


def moved(settings: Settings, database: Database) -> tuple[Path, ...]:
    """Let what is kept of a state folder's place follow one that was moved or copied by hand.

    Returns the places that were kept in place of its own; none where it is as it was.
    """
    state = settings.state_dir.resolve()
    with database.write() as connection:
        former = _turn_snapshots(connection, state)
    return tuple(sorted(former | _turn_mlflow(state, state)))


def _turn_rows(folder: Path, state: Path) -> None:
    """Let absolute paths in a folder's databases point to what will be the state folder.

    And let leases end: nobody trains in a copy, and whoever held the agent when it was made beats
    for the former folder's claim, if for any.
    """
    database = Database(sqlite_url(folder / "feedback.db"))
    try:
        with database.write() as connection:
            _turn_snapshots(connection, state)
            held = sa.and_(claims.c.state == "held", claims.c.expires_at > records.now())
            connection.execute(claims.update().where(held).values(expires_at=records.now()))
    finally:
        database.close()
    _turn_mlflow(folder, state)


def _turn_snapshots(connection: sa.Connection, state: Path) -> set[Path]:
    """Let snapshots' paths be inside the state folder; return the folders they were inside."""
    former, s = set(), snapshots.c
    for path in connection.execute(sa.select(s.path)).scalars().all():
        place, inside = Path(*Path(path).parts[:-5]), Path(path).parts[-5:]
        is_ours = len(inside) == 5 and inside[0] == "agents" and inside[2] == "snapshots"
        if is_ours and place.resolve() != state:
            turned = str(state.joinpath(*inside))
            connection.execute(snapshots.update().where(s.path == path).values(path=turned))
            former.add(place)
    return former


def _turn_mlflow(folder: Path, state: Path) -> set[Path]:
    """Let places in a folder's embedded MLflow be the state folder's; return whose they were."""
    tracking = folder / "mlflow" / "mlflow.db"
    if not tracking.exists():
        return set()
    new, former = state.as_uri(), set()
    try:
        with closing(sqlite3.connect(tracking, timeout=60)) as connection, connection:
            for table, column in _MLFLOW_PLACES:  # both names are ours
                begins = f"substr({column}, 1, instr({column}, :inside) - 1)"
                others = f"{column} LIKE 'file://%{_ARTIFACTS}%' AND {begins} != :new"
                told = {"inside": _ARTIFACTS, "new": new}
                found = connection.execute(
                    f"SELECT DISTINCT {begins} FROM {table} WHERE {others}", told
                )
                former |= {Path(unquote(str(row[0]).removeprefix("file://"))) for row in found}
                connection.execute(
                    f"UPDATE {table} SET {column} = :new || substr({column}, "
                    f"instr({column}, :inside)) WHERE {others}",
                    told,
                )
    except sqlite3.DatabaseError as error:
        error.add_note(str(tracking))  # as database.py does for what goes through SQLAlchemy
        raise
    return former


def _manifest_of(source: Path) -> _Manifest:
    """Return what a backup says of itself. Raises BackupError where it says nothing of ours."""
    path = source / MANIFEST
    if not path.exists():
        raise BackupError(f"needed a backup's folder with a {MANIFEST}, found none at {source}")
    try:
        return _Manifest.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where, found = ".".join(map(str, first["loc"])) or "what it holds", str(first["input"])[:60]
        raise BackupError(
            f"needed a manifest as this release's rlhf backup writes it, found {where} to be "
            f"{found} in {path}; take another backup, or the release that made this one"
        ) from error


def _described(path: Path, made: _Manifest) -> Backup:
    sizes = [(path / STATE / name).stat().st_size for name in made.files]
    return Backup(
        path,
        files=len(sizes),
        bytes=sum(sizes),
        created_at=made.created_at,
        state_dir=made.state_dir,
        damaged=made.damaged,
        unsound=made.unsound,
        links=made.links,
        misnamed=made.misnamed,
    )
