"""Files are wholly there or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, models

from automation import processes
from rlhf_pipeline.database import open_database
from rlhf_pipeline.errors import ClaimLost, PipelineError
from rlhf_pipeline.fence import writing_while
from rlhf_pipeline.files import (
    folder_sha256,
    new_file,
    new_folder,
    no_room,
    read_json,
    read_yaml,
    remove_half_written,
    write_bytes,
    write_json,
    write_text,
)
from rlhf_pipeline.serving.keys import Keys


def test_a_folder_takes_its_place_only_when_the_block_ends_well(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_folder(target) as folder:
        (folder / "a.txt").write_text("first")
        assert not target.exists()
    with pytest.raises(OSError, match="nowhere"), new_folder(target) as folder:
        (folder / "nowhere" / "a.txt").write_text("second")
    assert (target / "a.txt").read_text() == "first"
    with new_folder(target) as folder:
        (folder / "b.txt").write_text("third")
    assert sorted(p.name for p in target.iterdir()) == ["b.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_nothing_takes_its_place_once_its_writer_may_not_write_any_more(tmp_path: Path) -> None:
    claim = ["held"]

    def check() -> None:
        if claim == ["lost"]:
            raise ClaimLost("another took over")

    with writing_while(check):
        write_text(tmp_path / "votes", "first")
        with new_folder(tmp_path / "model") as aside:
            (aside / "first").touch()
        claim[:] = ["lost"]
        with pytest.raises(ClaimLost):
            write_text(tmp_path / "votes", "late")
        with pytest.raises(ClaimLost), new_folder(tmp_path / "model") as aside:
            (aside / "late").touch()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["model", "model/first", "votes"]
    assert (tmp_path / "votes").read_text() == "first"
    write_text(tmp_path / "votes", "another's")  # who holds no claim may


def test_a_file_takes_its_place_only_when_the_block_ends_well_and_left_one(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "votes"
    with new_file(target) as aside:
        aside.write_text("first")
        assert not target.exists()
    with pytest.raises(OSError, match="nowhere"), new_file(target) as aside:
        (aside / "nowhere").write_text("second")
    with new_file(target, may_stay=True):
        pass
    with pytest.raises(FileNotFoundError), new_file(target):
        pass  # as where somebody tidied up what was written
    assert target.read_text() == "first"
    with new_file(target) as aside:
        aside.write_text("third")
    assert target.read_text() == "third"
    assert [p.name for p in target.parent.iterdir()] == ["votes"]


@pytest.mark.parametrize("name", ["v" * 255, "é" * 127])
def test_what_has_the_longest_name_can_be_replaced(tmp_path: Path, name: str) -> None:
    for text in ("first", "second"):
        with new_file(tmp_path / name) as aside:
            aside.write_text(text)
            assert aside.name.startswith(f".{name[:9]}")
    assert (tmp_path / name).read_text() == "second"
    with new_folder(tmp_path / "deep" / name) as folder:
        (folder / "first").touch()
    with new_folder(tmp_path / "deep" / name) as folder:
        (folder / "second").touch()
    assert [path.name for path in (tmp_path / "deep").rglob("*")] == [name, "second"]


def test_what_is_private_is_so_before_anything_is_in_it(tmp_path: Path) -> None:
    with new_file(tmp_path / "votes", private=True) as aside:
        assert aside.stat().st_mode & 0o777 == 0o600
        aside.write_text("up")
    with new_folder(tmp_path / "data", private=True) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "votes").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_a_file_that_cannot_be_moved_into_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_bytes(tmp_path / "taken", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_a_folder_that_cannot_be_moved_into_place_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    write_text(target / "a.txt", "first")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if ".new-" in self.name:
            raise OSError("disk full")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="disk full"), new_folder(target):
        pass
    assert (target / "a.txt").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_the_same_to_writers_in_rust_as_to_all_others(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="No space left") as found, new_folder(target):
        Tokenizer(models.BPE()).save("/dev/full")
    why = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
    assert no_room(found.value) == no_room(why) != ""
    with pytest.raises(OSError, match="quota") as found, new_folder(target):
        raise Exception(f"Error while serializing: I/O error: (os error {errno.EDQUOT})")
    assert found.value.errno == errno.EDQUOT
    assert list(tmp_path.iterdir()) == []


def test_digests_are_those_of_the_contents(tmp_path: Path) -> None:
    write_text(tmp_path / "f" / "deep" / "a.txt", "héllo")
    write_bytes(tmp_path / "f" / "b.bin", b"")
    assert folder_sha256(tmp_path / "f") == {
        "b.bin": hashlib.sha256(b"").hexdigest(),
        "deep/a.txt": hashlib.sha256("héllo".encode()).hexdigest(),
    }
    with pytest.raises(PipelineError, match="a folder is needed"):
        folder_sha256(tmp_path / "nowhere")


def test_json_is_strict_and_comes_back(tmp_path: Path) -> None:
    value = {"z": [1, 2.5, None], "a": "é"}
    write_json(tmp_path / "v.json", value)
    assert read_json(tmp_path / "v.json") == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "v.json", float("nan"))
    assert read_json(tmp_path / "v.json") == value
    write_text(tmp_path / "v.json", "{")
    with pytest.raises(PipelineError, match="a JSON file is needed"):
        read_json(tmp_path / "v.json")


@pytest.mark.parametrize(
    "begin",
    [
        lambda state: open_database(f"sqlite:///{state}/feedback.db").close(),
        lambda state: Keys(state).create("admin"),
        processes.prepare_home,
    ],
    ids=["store", "keys", "dagster"],
)
def test_a_state_folder_is_made_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Path], object]
) -> None:
    """Whatever makes it first; one that is there is as its owner wants it."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    state, shared = tmp_path / "above" / "state", tmp_path / "shared"
    shared.mkdir(mode=0o750)
    for folder, mode in ((state, 0o700), (shared, 0o750)):
        begin(folder)
        assert folder.stat().st_mode & 0o777 == mode
    beside = tmp_path / "beside"
    beside.mkdir()
    assert state.parent.stat().st_mode == beside.stat().st_mode  # it need not be ours


def test_what_a_kill_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("a/.sft.new-1/model", "a/b/.proxy.old-2/model", "a/.x.json.new-3", "c/v.partial"):
        write_text(tmp_path / name, "half")
    write_text(tmp_path / "a" / "b" / "model", "whole")
    assert remove_half_written(tmp_path / "a", tmp_path / "c", tmp_path / "nowhere") == 4
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [tmp_path / "a" / "b" / "model"]


def test_yaml_that_is_wrong_is_shown_where_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("policy:\n  base: tiny\n")
    assert read_yaml(path) == {"policy": {"base": "tiny"}}
    path.write_text("policy:\n  base: a: b\n")
    with pytest.raises(yaml.YAMLError, match=r"line 2[^^]*base: a: b"):
        read_yaml(path)
    path.write_text("!!python/object/apply:os.getcwd []")
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
        read_yaml(path)


def test_a_key_that_stands_twice_is_shown_as_what_is_under_the_first_would_be_lost(
    tmp_path: Path,
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("reward:\n  epochs: 1\nppo: {updates: 3}\n\nreward:\n  kinds: {thumbs: 1}\n")
    with pytest.raises(yaml.YAMLError, match=r"'reward' again, as in line 1;.*\n.*line 5"):
        read_yaml(path)
    path.write_text("- name: a\n  tries: [{most: 1, 'most': 2}]\n")
    with pytest.raises(yaml.YAMLError, match=r"(?s)'most' again.*line 2, column 21.*\^"):
        read_yaml(path)
    path.write_text("a: &a {x: {of: 1}, y: 2}\nb: {of: {<<: *a, y: 3}, 1: of, '1': of}\nc: &c [*c]")
    read = read_yaml(path)
    assert read["b"] == {"of": {"x": {"of": 1}, "y": 3}, 1: "of", "1": "of"}
    assert read["c"][0] is read["c"]


def test_a_copy_that_a_full_disk_has_no_room_for_says_so(tmp_path: Path) -> None:
    write_text(tmp_path / "model" / "weights", "many")
    why = OSError(errno.ENOSPC, "No space left on device")

    def copy(*_: object) -> None:
        raise why

    with pytest.raises(shutil.Error) as found:
        shutil.copytree(tmp_path / "model", tmp_path / "copy", copy_function=copy)
    assert no_room(found.value) == no_room(why)
    assert no_room(why).startswith("needed room on the disk, found: [Errno 28]")
    why = OSError(errno.EACCES, "Permission denied")
    with pytest.raises(shutil.Error) as found:
        shutil.copytree(tmp_path / "model", tmp_path / "another", copy_function=copy)
    assert no_room(found.value) == ""
