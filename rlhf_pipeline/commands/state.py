"""`rlhf backup · restore`: the whole state folder as a copy that can be trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_pipeline.commands.common import progress, workspace

if TYPE_CHECKING:
    from rlhf_pipeline.backup import Backup
    from rlhf_pipeline.records import Progress


def backup(
    folder: Annotated[Path, typer.Argument(help="A new folder; it must not be there yet.")],
) -> None:
    """Copy the state folder as it is at this moment, while everything goes on.

    Votes, ledger, models, snapshots and MLflow's and Dagster's own records go along, each file
    with its hash. Every model is checked against the hash it was registered with.
    """
    from rlhf_pipeline.backup import back_up

    here = workspace()
    made = _watched("copying", lambda report: back_up(here.settings, folder, report))
    typer.echo(f"{made.path}: {made.files} files, {made.bytes / 2**20:.1f} MiB")


def restore(
    folder: Annotated[Path, typer.Argument(help="A folder that `rlhf backup` made.")],
) -> None:
    """Make a state folder from a backup: the same votes, ledger and champion.

    Goes to --state, which must not be there yet. Every file is checked before anything is written.
    """
    from rlhf_pipeline.backup import restore as take_back

    here = workspace()
    found = _watched("restoring", lambda report: take_back(here.settings, folder, report))
    typer.echo(f"{here.settings.state_dir}: {found.files} files, as of {found.created_at}")


def _watched(what: str, work: Callable[[Progress], Backup]) -> Backup:
    with progress() as bars:
        task = bars.add_task(what, total=None)
        return work(
            lambda facts: bars.update(
                task, completed=float(facts["done"]), total=float(facts["of"])
            )
        )
