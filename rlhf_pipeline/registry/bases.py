"""A model to start from, by its name in MLflow: `models:/name@alias` or `models:/name/3`.

A name that the ledger knows (`rlhf-<agent>`) means what the ledger says, and its files are checked
by hash. Any other model is MLflow's alone: one that a pipeline of ours registered elsewhere carries
a digest of its files, which is checked; of the rest is asked only what is asked of every model,
safetensors and nothing pickled. What this does not protect: MLflow's own database.

And whether a recipe names the base that an agent began from, or other sizes of the tiny one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_pipeline.config import RECIPES, Settings
from rlhf_pipeline.errors import HashMismatch, RegistryError
from rlhf_pipeline.files import folder_sha256, new_folder
from rlhf_pipeline.records import hashed
from rlhf_pipeline.registry.models import (
    FILES_DIGEST,
    ModelRegistry,
    files_digest,
    model_name,
    safe_files,
)
from rlhf_pipeline.registry.tracking import mlflow_refusals
from rlhf_pipeline.stages import base_source


def base_folder(registry: ModelRegistry, uri: str) -> Path:
    """Return the local folder of the model that a `models:/` URI names at this moment.

    Raises RegistryError for what is unknown or no plain folder of safetensors, HashMismatch where
    files are not the ones that were registered.
    """
    match = re.fullmatch(r"models:/([^/@]+)(?:@([^/@]+)|/(\d+))", uri)
    if match is None:
        raise RegistryError(
            "a base from the registry needs a URI like models:/<name>@<alias> or "
            f"models:/<name>/<version>, found {uri!r}; correct policy.base"
        )
    name, alias, number = match.groups()
    agent_id = name.removeprefix(model_name(""))
    if agent_id != name and registry.ledger.versions(agent_id):
        return registry.resolve(uri)
    with mlflow_refusals(f"finding {uri}"):
        client = registry.client
        if alias is not None:
            entity = client.get_model_version_by_alias(name, alias)
        else:
            entity = client.get_model_version(name, number)
        # A model that was deleted and made again begins with version 1 again.
        mark = hashed(registry.tracking_uri, str(entity.creation_timestamp))[:12]
        cached = registry.folder / "cache" / "bases" / f"{name}-{entity.version}-{mark}"
        if not cached.is_dir():
            with registry.copy_of(name, str(entity.version)) as stored:
                if registry.is_embedded:
                    return _checked(stored, uri, entity.tags.get(FILES_DIGEST))
                with new_folder(cached) as aside:
                    shutil.copytree(stored, aside, dirs_exist_ok=True)
    return _checked(cached, uri, entity.tags.get(FILES_DIGEST))


def _checked(folder: Path, uri: str, digest: str | None) -> Path:
    if digest is not None and files_digest(folder_sha256(folder)) != digest:
        raise HashMismatch(
            f"{uri} needs the files that were registered, found others in {folder}; register the "
            "model again, or take another version"
        )
    files = safe_files(folder)
    if not {"config.json", "adapter_config.json"} & files.keys():
        found = ", ".join(sorted(files)[:5]) or "no files"
        raise RegistryError(
            f"{uri} needs a plain transformers folder behind it (config.json, safetensors and the "
            f"tokenizer at its top), found {found}; register what `save_pretrained` writes"
        )
    return folder


def held_against(settings: Settings, lineage: Mapping[str, Any]) -> Literal["same", "other", "?"]:
    """Say whether policy.base names what version 0 of this lineage was made from.

    A folder may have been moved, or be said otherwise: then its weights tell. Nobody can tell (?)
    where one of the two is a folder and the other a hub id, where an earlier release recorded no
    weights, and where a hub id has another owner: `gpt2` is `openai-community/gpt2`.
    """
    then, now = lineage.get("base"), settings.policy.base
    if then in (None, now):
        return "other" if resized(settings, lineage) else "same"
    if "tiny" in (then, now):
        return "other"
    home = RECIPES.parent  # where stages run, so where a relative path begins
    if (home / then).resolve() == (home / now).resolve():
        return "same"
    digest, source = lineage.get("base_digest"), str(base_source(settings))
    is_folder, was_folder = (home / source).is_dir(), digest != lineage.get("started_from")
    if digest is None or is_folder != was_folder:
        return "?"
    if is_folder:
        from rlhf_pipeline.policy.adapters import is_recorded_base

        return "same" if is_recorded_base(home / source, digest) else "other"
    return "?" if Path(source).name == Path(then).name else "other"


def resized(settings: Settings, lineage: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what both recipes say of `policy.tiny`, version 0's and this, where they differ.

    Empty unless both begin from the tiny policy. Its vocabulary says nothing beside an encoding.
    """
    then = lineage.get("recipe", {}).get("policy", {})
    if not then.get("base") == settings.policy.base == "tiny":
        return {}
    was, now = then["tiny"], settings.policy.tiny.model_dump()
    if was.get("encoding") and now["encoding"]:
        now.pop("vocabulary")
    return {name: (was[name], now[name]) for name in now if was.get(name, now[name]) != now[name]}


def both_told(settings: Settings, agent_id: str, lineage: Mapping[str, Any]) -> str:
    """Return the words for what version 0 was made from, and what this recipe names instead."""
    named = {f"tiny.{size}": both for size, both in resized(settings, lineage).items()}
    named = named or {"base": (lineage.get("base"), settings.policy.base)}
    needed = ", ".join(f"policy.{name} {then!r}" for name, (then, _) in named.items())
    found = ", ".join(repr(now) for _, now in named.values())
    return (
        f"needed {needed}, which version 0 of {agent_id!r} was made from and every later one goes "
        f"on from, found {found}"
    )
