"""Checkpoints come back exactly, or are recognised as damaged."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rlhf_pipeline.errors import CheckpointDamaged
from rlhf_pipeline.ppo.checkpoint import (
    checkpoint_at,
    checkpoint_updates,
    latest_checkpoint,
    optimizer_tensors,
    random_states,
    read_checkpoint,
    remove_later,
    restore_optimizer,
    restore_parameters,
    restore_random_states,
    retain,
    write_checkpoint,
)


def write(root: Path, update: int) -> Path:
    tensors = {"policy": {"w": torch.full((3,), float(update))}, "critic": {}}
    return write_checkpoint(root, update, tensors=tensors, state={"update": update, "a": [1.5]})


def flip_a_bit(path: Path) -> None:
    file = path / "policy.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut_short(path: Path) -> None:
    file = path / "state.json"
    file.write_bytes(file.read_bytes()[:-5])


def lose_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def spoil_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"update": 3')


def lose_a_file(path: Path) -> None:
    (path / "policy.safetensors").unlink()


def add_a_file(path: Path) -> None:
    (path / "more.safetensors").write_bytes(b"?")


DAMAGES = [
    flip_a_bit,
    cut_short,
    lose_the_manifest,
    spoil_the_manifest,
    lose_a_file,
    add_a_file,
]


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    saved = read_checkpoint(write(tmp_path, 3))
    assert saved.update == 3
    assert saved.tensors["policy"]["w"].tolist() == [3.0, 3.0, 3.0]
    assert saved.tensors["critic"] == {}
    assert saved.state == {"update": 3, "a": [1.5]}
    assert [p.name for p in tmp_path.iterdir()] == ["update-000003"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_recognised_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    write(tmp_path, 2)
    damage(write(tmp_path, 3))
    with pytest.raises(CheckpointDamaged):
        checkpoint_at(tmp_path, 3)
    with pytest.warns(UserWarning, match="checkpoint of update 3 is damaged"):
        saved = latest_checkpoint(tmp_path)
    assert saved is not None
    assert saved.update == 2


def test_without_a_whole_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    flip_a_bit(write(tmp_path, 1))
    with pytest.warns(UserWarning, match="damaged"):
        assert latest_checkpoint(tmp_path) is None


def test_what_a_kill_leaves_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    half = tmp_path / ".update-000002.new-abc"
    half.mkdir()
    (half / "policy.safetensors").write_bytes(b"half")
    saved = latest_checkpoint(tmp_path)
    assert saved is not None
    assert saved.update == 1


def test_a_disk_without_room_is_told_with_the_place_and_leaves_what_there_was(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # no file may be longer
    try:
        with pytest.raises(OSError, match=r"update-000002 cannot be written: .*; make room there"):
            write(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["update-000001"]


def test_the_latest_and_the_best_are_kept(tmp_path: Path) -> None:
    for update in range(6):
        write(tmp_path, update)
    retain(tmp_path, latest=2, best=[1])
    assert checkpoint_updates(tmp_path) == [1, 4, 5]
    remove_later(tmp_path, None)
    assert checkpoint_updates(tmp_path) == []
    remove_later(tmp_path, None)


def test_every_random_state_comes_back(tmp_path: Path) -> None:
    own = {"sampling": torch.Generator().manual_seed(5)}

    def numbers() -> list[float]:
        normal = float(np.random.default_rng(random.getrandbits(32)).normal())
        legacy = float(np.random.standard_normal())  # keeps a second number for the next call
        drawn = [random.random(), random.gauss(0, 1), legacy, normal]
        return [*drawn, float(torch.rand(())), float(torch.rand((), generator=own["sampling"]))]

    numbers()
    tensors, facts = random_states(own)
    path = write_checkpoint(tmp_path, 1, tensors={"random": tensors}, state={"random": facts})
    first = numbers()
    assert numbers() != first
    saved = read_checkpoint(path)
    restore_random_states(saved.tensors["random"], saved.state["random"], own)
    assert numbers() == first


def test_an_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    def start() -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
        named = {"policy/a": nn.Parameter(torch.ones(3)), "critic/b": nn.Parameter(torch.ones(2))}
        return named, torch.optim.AdamW(named.values(), lr=0.1, fused=True)

    def step(
        named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, scale: float
    ) -> None:
        for weight in named.values():
            weight.grad = weight.detach() * scale
        optimizer.step()

    named, optimizer = start()
    step(named, optimizer, 1.0)
    step(named, optimizer, -0.3)
    tensors = {"optimizer": optimizer_tensors(optimizer, named), "weights": named}
    saved = read_checkpoint(write_checkpoint(tmp_path, 1, tensors=tensors, state={}))
    again, other = start()
    restore_parameters(again, saved.tensors["weights"])
    restore_optimizer(other, again, saved.tensors["optimizer"])
    step(named, optimizer, 0.5)
    step(again, other, 0.5)
    for name, weight in named.items():
        assert torch.equal(weight, again[name])


def test_weights_of_another_model_are_refused() -> None:
    named = {"a": nn.Parameter(torch.ones(3))}
    with pytest.raises(CheckpointDamaged, match="belongs to another model"):
        restore_parameters(named, {"b": torch.ones(3)})
