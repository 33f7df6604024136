"""A registered version as a folder that any transformers program can load."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlhf_pipeline.errors import HashMismatch, RegistryError
from rlhf_pipeline.files import folder_sha256, new_folder
from rlhf_pipeline.registry.models import ModelRegistry


def export(registry: ModelRegistry, agent_id: str, version: int, directory: Path) -> dict[str, str]:
    """Write the version into `directory` and return the SHA-256 of what was written.

    The registered files are checked before and, where they are copied, after. An adapter is merged
    into its base model, so the hashes differ from the registered ones there. Raises RegistryError
    if the directory holds something already, HashMismatch if the files are not the registered ones.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RegistryError(
            f"an export needs a new or an empty folder, found something at {directory}; "
            "choose another or remove it"
        )
    found = registry.ledger.version(agent_id, version)
    source = registry.folder_of(found)
    if (source / "adapter_config.json").is_file():
        from rlhf_pipeline.policy.loading import load_policy, save_policy

        policy = load_policy(source, device="cpu", dtype="auto", expected_sha256=found.files)
        save_policy(policy, directory)
        return folder_sha256(directory)
    with new_folder(directory) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        written = folder_sha256(folder)
        if written != dict(found.files):
            raise HashMismatch(
                f"the copy of version {version} of agent {agent_id} needs the registered files, "
                f"found others; somebody writes to {source}: stop that and export again"
            )
    return written
