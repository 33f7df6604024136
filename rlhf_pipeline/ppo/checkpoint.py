"""Checkpoints that are either whole or recognised as damaged, and hold all that training needs.

A checkpoint is a folder `update-000012` of safetensors files, `state.json`, and `manifest.json`
with the SHA-256 of every other file, written last. The folder is written aside, flushed and
renamed, so a kill at any instant leaves the one before. Nothing is pickled. What this does not
protect: someone who can write to the folder can write a matching manifest too.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_pipeline.errors import CheckpointDamaged, PipelineError
from rlhf_pipeline.files import folder_sha256, new_folder, read_json, write_json

MANIFEST, STATE = "manifest.json", "state.json"
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What `write_checkpoint` was given, read back and held against the manifest."""

    path: Path
    update: int
    tensors: Mapping[str, Tensors]  # file name without suffix -> tensors
    state: Mapping[str, Any]


def write_checkpoint(
    root: Path, update: int, *, tensors: Mapping[str, Tensors], state: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of `update` under root and return its folder."""
    path = _folder(root, update)
    with new_folder(path) as folder:
        for name, group in tensors.items():
            copies = {key: t.detach().cpu().contiguous() for key, t in group.items()}
            save_file(copies, folder / f"{name}.safetensors")
        write_json(folder / STATE, state)
        write_json(folder / MANIFEST, {"update": update, "sha256": folder_sha256(folder)})
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint; raises CheckpointDamaged unless every file is the one written."""
    try:
        manifest = read_json(path / MANIFEST)
        found = folder_sha256(path)
        found.pop(MANIFEST)
        differing = sorted(
            name
            for name in found.keys() | manifest["sha256"].keys()
            if found.get(name) != manifest["sha256"].get(name)
        )
    except (PipelineError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(
            f"a whole checkpoint is needed at {path}, found no readable manifest; go on from the "
            "one before"
        ) from error
    if differing:
        raise CheckpointDamaged(
            f"the files in {path} must be the ones its manifest lists, found {len(differing)} that "
            f"differ ({', '.join(differing[:5])}); go on from the one before"
        )
    tensors = {p.stem: load_file(p) for p in sorted(path.glob("*.safetensors"))}
    return Checkpoint(path, int(manifest["update"]), tensors, read_json(path / STATE))


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the latest undamaged checkpoint, with a warning for each damaged one passed over.

    None where there is none: training then begins at the beginning.
    """
    for update in sorted(checkpoint_updates(root), reverse=True):
        try:
            return read_checkpoint(_folder(root, update))
        except CheckpointDamaged as error:
            warnings.warn(f"checkpoint of update {update} is damaged: {error}", stacklevel=2)
    return None


def checkpoint_at(root: Path, update: int) -> Checkpoint:
    """Return the checkpoint of one update; raises CheckpointDamaged if it is not there whole."""
    return read_checkpoint(_folder(root, update))


def checkpoint_updates(root: Path) -> list[int]:
    """Return the updates that have a checkpoint folder, damaged or not, in order."""
    names = (p.name.removeprefix("update-") for p in root.glob("update-*"))
    return sorted(int(name) for name in names if name.isdigit())


def retain(root: Path, *, latest: int, best: Iterable[int]) -> None:
    """Remove all checkpoints but the latest `latest` and those of the `best` updates."""
    updates = checkpoint_updates(root)
    for update in set(updates) - set(updates[-latest:]) - set(best):
        shutil.rmtree(_folder(root, update))


def remove_later(root: Path, update: int | None) -> None:
    """Remove the checkpoints after this update, or every one, for a run that goes on from there.

    What is later is damaged, or of a run that is given up. Left there it would count among the
    latest that `retain` keeps, in the place of what is written from here on.
    """
    for later in checkpoint_updates(root):
        if update is None or later > update:
            shutil.rmtree(_folder(root, later))


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> Tensors:
    """Return the optimizer's state, one tensor per "parameter name/state name"."""
    return {
        f"{name}/{key}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Tensors
) -> None:
    """Give the optimizer the state that `optimizer_tensors` returned."""
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        parameter = named[name]
        optimizer.state[parameter][kind] = value.clone().to(parameter.device)


def restore_parameters(named: Mapping[str, nn.Parameter], tensors: Tensors) -> None:
    """Copy saved weights into the parameters; raises CheckpointDamaged if the names differ."""
    if named.keys() != tensors.keys():
        raise CheckpointDamaged(
            f"a checkpoint of this model is needed: {len(named)} weights, found {len(tensors)} or "
            "other names; it belongs to another model, start in another folder"
        )
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(tensors[name])


def random_states(generators: Mapping[str, torch.Generator]) -> tuple[Tensors, dict[str, Any]]:
    """Return the states of python, numpy, torch, CUDA and our own generators: tensors and JSON."""
    version, integers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "python": torch.tensor(integers, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "torch": torch.get_rng_state(),
        **{f"own/{key}": generator.get_state() for key, generator in generators.items()},
    }
    if torch.cuda.is_available():
        for i, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda/{i}"] = state
    return tensors, {
        "python": [version, gauss],
        "numpy": [str(name), int(position), int(has_gauss), float(cached)],
    }


def restore_random_states(
    tensors: Tensors, facts: Mapping[str, Any], generators: Mapping[str, torch.Generator]
) -> None:
    """Put every random state back as `random_states` found it."""
    version, gauss = facts["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    name, position, has_gauss, cached = facts["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((name, keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for key, generator in generators.items():
        generator.set_state(tensors[f"own/{key}"])
    cuda = [tensors[k] for k in sorted(tensors) if k.startswith("cuda/")]
    if cuda and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)


def _folder(root: Path, update: int) -> Path:
    return root / f"update-{update:06d}"
