"""The reward models of the turn a version came from, held against the hashes of the day."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.errors import HashMismatch, RegistryError
from rlhf_pipeline.feedback.datasets import Job
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.registry.ledger import ModelVersion
from rlhf_pipeline.reward import SETTINGS


def reward_folder(version: ModelVersion, job: Job) -> Path:
    """Return the folder of one reward model; what it does not read may have changed since.

    Raises RegistryError where the version had none or it is gone, HashMismatch where it is another.
    """
    from rlhf_pipeline.reward import HEAD, TRUNK

    name = f"version {version.version} of {version.agent_id}"
    known = version.lineage.get("reward_models", {}).get(job)
    if known is None:
        raise RegistryError(
            f"{name} was trained by no {job} reward model; name a later version, such as champion"
        )
    folder = version.work / "reward" / job
    if not (folder / TRUNK).is_dir():
        raise RegistryError(
            f"{name} learned from the {job} reward model at {folder}, found none there: it was "
            "pruned (retention.rewards) or moved; restore it from a backup"
        )
    found = folder_sha256(folder)
    read = [n for n in known if n.startswith(f"{TRUNK}/") or n in (HEAD, SETTINGS)]
    if odd := [n for n in read if found.get(n) != known[n]]:
        raise HashMismatch(
            f"the {job} reward model of {name} needs the files it was trained with, found "
            f"{', '.join(odd[:3])} changed or missing in {folder}; restore them from a backup"
        )
    return folder
