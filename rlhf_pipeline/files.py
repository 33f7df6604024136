"""Files that are either wholly there or not at all, and the hashes that prove which ones they are.

Everything is written aside, flushed to disk (fsync) and renamed into place. What this does not
protect: two writers of the same path at once (the last rename wins), and the instant between the
two renames when an existing *folder* is replaced, during which a reader finds neither.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

import yaml

from rlhf_pipeline.errors import PipelineError, TrainingError
from rlhf_pipeline.fence import need_right_to_write

SQLITE = "sqlite:///"  # before a path, in a URL
LONGEST_NAME = 255  # bytes, on any file system of today
LEAST_ROOM = 2**20  # bytes free on a disk that is not called full
# As Rust words it: safetensors and the tokenizers raise no OSError.
RUSTS_FULL_DISK = re.compile(rf"\(os error ({errno.ENOSPC}|{errno.EDQUOT})\)")


@contextmanager
def new_folder(directory: str | Path, *, private: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `directory` that takes its place when the block ends well.

    One that is `private` its owner alone may enter. If the block raises, the folder is removed and
    `directory` is left as it was. Where safetensors or the tokenizers could not write, on a full
    disk for one, it raises OSError as every other writer does.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = beside(target, "new")
    aside.mkdir(mode=0o700 if private else 0o777)
    try:
        yield aside
        _sync_tree(aside)
        need_right_to_write()
        _move_into_place(aside, target)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if full := RUSTS_FULL_DISK.search(str(error)):
            number = int(full[1])
            raise OSError(number, os.strerror(number), str(target)) from error
        if str(error).startswith("Error while serializing"):  # safetensors', which is no OSError
            raise OSError(f"{target} cannot be written: {error}; make room there") from error
        raise


@contextmanager
def new_file(path: str | Path, *, may_stay: bool = False, private: bool = False) -> Iterator[Path]:
    """Yield where to write a file that takes the place of `path` when the block ends well.

    One that is `private` its owner alone may read, from before there is anything in it. If the
    block raises, `path` is as it was; so it is where it `may_stay` and the block leaves no file
    there. Raises FileNotFoundError for one that is gone otherwise: it would be lost unseen.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = beside(target, "new")
    try:
        if private:
            aside.touch(mode=0o600)
        yield aside
        if not may_stay or aside.exists():
            _sync_file(aside)
            need_right_to_write()
            aside.replace(target)
            _sync_directory(target.parent)
    finally:
        aside.unlink(missing_ok=True)


def fitting(name: str, end: str) -> str:
    """Return the name with this end, cut before it to what a file may be called anywhere."""
    room = LONGEST_NAME - len(os.fsencode(end))
    return os.fsencode(name)[:room].decode(errors="ignore") + end


def printable(name: str | Path) -> str:
    """Return a file's name as text that can be kept and sent: what is no UTF-8 in it as escapes."""
    return os.fsencode(name).decode(errors="backslashreplace")


def beside(target: Path, why: str) -> Path:
    """Return a hidden name in the same folder that nobody has, for what is `new` or `old`."""
    return target.parent / fitting(f".{target.name}", f".{why}-{uuid.uuid4().hex[:12]}")


def moved(path: Path, target: Path) -> None:
    """Move a file to where none is, on another file system too.

    One that is a link leads from there to where it led.
    """
    if path.is_symlink():
        target.symlink_to(path.resolve())
        path.unlink()
        return
    try:
        path.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with new_file(target) as aside:
            shutil.copy2(path, aside)
        path.unlink()


def made_by_another(link: Path) -> bool:
    """Say whether it is a link that neither whoever runs this made nor the administrator."""
    return link.is_symlink() and link.lstat().st_uid not in (0, os.getuid())


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold a folder that is trained in; raises TrainingError where another process holds it.

    However a process ends, it holds nothing any more.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".held").open("w") as handle:
        if not locked(handle):
            raise TrainingError(
                f"one process at a time trains in {directory}, found another at work; wait for "
                "it, or stop it and run this again"
            )
        yield


def locked(handle: IO[str]) -> bool:
    """Take the lock of an open file, and say whether nobody else had it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sqlite_url(path: Path) -> str:
    """Return the URL of a database's file, in which no part of a folder's name has a meaning."""
    return SQLITE + re.sub("[%?#]", lambda sign: quote(sign[0]), str(path))


def sqlite_path(url: str) -> Path | None:
    """Return the file that SQLAlchemy opens for a URL; None where it is none of SQLite's."""
    if not url.startswith(SQLITE):
        return None
    return Path(unquote(url.removeprefix(SQLITE).partition("?")[0]))


def no_room(error: BaseException | None, file: str = "") -> str:
    """Return what to tell of a call that failed as its disk is full; "" where it failed otherwise.

    Where there is not even room for the index of its log, SQLite cannot read either, and says no
    more than "disk I/O error": what is free beside the file tells that from a broken disk.
    """
    said = " ".join(str(error).split())
    if isinstance(error, shutil.Error):  # of a folder's copy: of each file's error the words alone
        said = str(error.args[0][0][-1])
        is_full = said.startswith(tuple(f"[Errno {n}]" for n in (errno.ENOSPC, errno.EDQUOT)))
    elif isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    else:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the other bytes say at what
        is_full = code == sqlite3.SQLITE_FULL
        if code == sqlite3.SQLITE_IOERR and file and Path(file).parent.is_dir():
            is_full = shutil.disk_usage(Path(file).parent).free < LEAST_ROOM
    if not is_full:
        return ""
    found = f"found {file}" if file else "found"
    return f"needed room on the disk, {found}: {said}; make room, and do it again"


def make_private(directory: Path) -> None:
    """Make a folder that its owner alone may enter; one that is there keeps the mode it has."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write one file so that a reader sees the old content or the new, never a part."""
    with new_file(path) as aside:
        aside.write_bytes(content)


def write_text(path: str | Path, content: str) -> None:
    """Write one UTF-8 file as `write_bytes` does."""
    write_bytes(path, content.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write strict JSON (no NaN or infinity), keys in the order given, one final newline."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Return what `write_json` wrote. Raises PipelineError where there is no such JSON file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PipelineError(
            f"a JSON file is needed at {path}, found none that can be read ({error}); "
            "correct the path, or make the file again"
        ) from error


def read_yaml(path: str | Path) -> Any:
    """Return what a YAML file holds. Raises OSError or yaml.YAMLError, for a repeated key too.

    By libyaml where PyYAML came with it: settings are read at every step of a turn, and the reader
    in Python takes ten times as long.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        return _yaml(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return _yaml(text, yaml.SafeLoader)  # it shows the line that is wrong


def _yaml(text: str, reader: Any) -> Any:
    loader = reader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(node: yaml.Node, seen: set[int]) -> None:
    """Raise yaml.YAMLError where a key stands twice: PyYAML drops what stands under the first."""
    if isinstance(node, yaml.ScalarNode) or id(node) in seen:
        return
    seen.add(id(node))  # an alias may lead back to what it stands in
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, seen)
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue  # a list, or an object, which no key of ours is
        if (key.tag, key.value) in lines:
            raise yaml.constructor.ConstructorError(
                problem=f"needed each key once, found {key.value!r} again, as in line "
                f"{lines[key.tag, key.value]}; keep one, with what stands under both",
                problem_mark=key.start_mark,
            )
        lines[key.tag, key.value] = key.start_mark.line + 1
        _check_keys(value, seen)


def file_sha256(path: str | Path) -> str:
    """Return a file's SHA-256 as hex, read in blocks."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_identity(path: str | Path) -> tuple[int, int] | None:
    """Return what no other file on this machine has, nor one that takes its name; None if empty."""
    try:
        found = Path(path).stat()
    except OSError:  # there is none
        return None
    return (found.st_dev, found.st_ino) if found.st_size else None


def folder_sha256(directory: str | Path) -> dict[str, str]:
    """Return {relative file name with forward slashes: SHA-256 hex}, sorted by name.

    Links are followed, so a hub cache's snapshot folder hashes like a plain copy of it.
    Raises PipelineError if `directory` is not a folder.
    """
    root = Path(directory)
    if not root.is_dir():
        raise PipelineError(f"a folder is needed to hash, found none at {root}; check the path")
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return {p.relative_to(root).as_posix(): file_sha256(p) for p in files}


def remove_half_written(*directories: str | Path) -> int:
    """Remove what killed processes left half-written or half-replaced anywhere in these folders.

    Returns how much that was. Call it while nothing else writes there: to another writer they are
    not leftovers.
    """
    removed = 0
    for directory in map(Path, directories):
        for pattern in (".*.new-*", ".*.old-*", "*.partial"):  # the last are older releases'
            for path in list(directory.rglob(pattern)):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
                removed += 1
    return removed


def _move_into_place(aside: Path, target: Path) -> None:
    """Rename `aside` to `target`; what stood there is removed only after the rename."""
    former = beside(target, "old")
    replaces = target.exists()
    if replaces:
        target.rename(former)
    try:
        aside.rename(target)
    except BaseException:
        if replaces:
            former.rename(target)
        raise
    _sync_directory(target.parent)
    if replaces:
        shutil.rmtree(former, ignore_errors=True)


def _sync_tree(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            _sync_file(path)
    for path in [root, *(p for p in root.rglob("*") if p.is_dir())]:
        _sync_directory(path)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
