"""`rlhf backup · restore · moved · prune`: the whole state folder, here or elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_pipeline.commands.common import AsJson, console, progress, workspace
from rlhf_pipeline.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_pipeline.backup import Backup
    from rlhf_pipeline.records import Progress


def backup(
    folder: Annotated[Path, typer.Argument(help="A new folder; it must not be there yet.")],
) -> None:
    """Copy the state folder as it is at this moment, while everything goes on.

    Votes, ledger, models, snapshots and MLflow's and Dagster's own records go along, each file
    with its hash. Every model is checked against the hash it was registered with: a version in use
    must be as it was, another one that is not is told. So must the store; a database of MLflow's
    or Dagster's that is damaged is told.
    """
    from rlhf_pipeline.backup import back_up

    here = workspace()
    made = _watched("copying", lambda report: back_up(here.settings, folder, report))
    _tell_of_gaps(made)
    typer.echo(f"{made.path}: {made.files} files, {made.bytes / 2**20:.1f} MiB")


def restore(
    folder: Annotated[Path, typer.Argument(help="A folder that `rlhf backup` made.")],
) -> None:
    """Make a state folder from a backup: the same votes, ledger, champion and API keys.

    Goes to --state, which must not be there yet. Every file is checked before anything is written.
    """
    from rlhf_pipeline.backup import restore as take_back

    here = workspace()
    found = _watched("restoring", lambda report: take_back(here.settings, folder, report))
    _tell_of_gaps(found)
    typer.echo(f"{here.settings.state_dir}: {found.files} files, as of {found.created_at}")
    typer.echo(
        "keys that were revoked since hold again, and who was erased since is back; revoke "
        "(`rlhf keys list`) and erase again",
        err=True,
    )


def moved() -> None:
    """Let a state folder that was moved or copied by hand be where it is now.

    MLflow keeps the places of its files whole, so after such a move nothing is trained or erased
    until this has run. Run it once, in the new place, while nothing else uses the folder.
    """
    from rlhf_pipeline.backup import moved as follow

    here = workspace()
    state = here.settings.state_dir
    if not state.is_dir():
        raise ConfigError(f"needed a state folder, found none at {state}; name it with --state")
    former = follow(here.settings, here.database)
    if not former:
        typer.echo(f"{state}: everything is kept under this place; there was nothing to do")
    for place in former:
        typer.echo(f"{state}: what was kept under {place} is kept under this place now")
        if place.is_dir() and place.resolve() != state.resolve():
            typer.echo(
                f"{place} is still there, a state folder of its own from now on; what it was given "
                "since the two parted is not here",
                err=True,
            )


def prune(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would go and what stays, and why.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what is old and nothing points at: checkpoints, rewards, turns, traces, runs, rows.

    What goes is set under `retention` in a recipe, by age and number of each kind. Whatever the
    ledger, an experiment, a training or `rlhf reproduce` needs stays, and the list says why. An
    agent whose recipe does not load is left as it is, and named once the others are pruned.
    """
    from automation.old_runs import embedded_instance, prune_runs  # Dagster: only here
    from rlhf_pipeline.retention import lost_recipes, told_lost
    from rlhf_pipeline.retention import prune as remove

    here = workspace()
    every = here.store.agents()
    lost = lost_recipes(every, here.settings_of)
    instance = embedded_instance(here.settings.state_dir)  # refused before anything goes
    with progress() as bars:
        task = bars.add_task("looking", total=None)
        items = remove(
            here.registry,
            here.settings_of,
            agents=[agent_id for agent_id in every if agent_id not in lost],
            dry_run=dry_run,
            report=lambda facts: bars.update(task, description=str(facts["removed"])),
        )
        if instance is not None:
            with instance:
                items += prune_runs(
                    instance, here.ledger, here.settings_of, without=lost, dry_run=dry_run
                )
    told = [
        {
            "kind": item.kind,
            "agent": item.agent_id,
            "name": item.name,
            "made_at": item.made_at.isoformat(),
            "bytes": item.bytes,
            "runs": len(item.runs),
            "traces": item.traces,
            "rows": item.rows,
            "stays": item.stays,
        }
        for item in items
    ]
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False, indent=2))
    else:
        _show(told, "would go" if dry_run else "gone")
    if lost:
        raise ConfigError(told_lost(lost))


def _show(told: list[dict[str, Any]], word: str) -> None:
    from rich.table import Table

    table = Table("kind", "agent", "name", "last at work (UTC)", "MiB", "")
    for one in told:
        why = word if one["stays"] is None else f"stays: {one['stays']}"
        many = [f"{one[name]} {name}" for name in ("traces", "rows") if one[name]]
        size = many[0] if many else f"{one['bytes'] / 2**20:.1f}"
        moment = one["made_at"][:16].replace("T", " ")
        table.add_row(one["kind"], one["agent"], one["name"], moment, size, why)
    console().print(table)
    gone = [one for one in told if one["stays"] is None]
    mib = sum(one["bytes"] for one in gone) / 2**20
    typer.echo(f"{len(gone)} of {len(told)} {word}, {mib:.1f} MiB")


def _tell_of_gaps(copied: Backup) -> None:
    for link in copied.links:
        typer.echo(
            f"not copied, as it is a link: {link}; make it again where it is to be", err=True
        )
    for name in copied.misnamed:
        typer.echo(
            f"not copied, as its name is no UTF-8: {name}; copy it by hand, or rename it and back "
            "up again",
            err=True,
        )
    for version in copied.damaged:
        typer.echo(
            f"not as it was registered: {version}; put it back from an earlier backup, if one is "
            "to go back to this version",
            err=True,
        )
    for name, said in copied.unsound.items():
        typer.echo(
            f"a damaged database: {name}: {said}; its copy ends in .damaged, and a restore goes "
            "without. Put the file aside, and MLflow or Dagster begins a new one, which gets the "
            "versions and aliases again",
            err=True,
        )


def _watched(what: str, work: Callable[[Progress], Backup]) -> Backup:
    with progress() as bars:
        task = bars.add_task(what, total=None)
        return work(
            lambda facts: bars.update(
                task, completed=float(facts["done"]), total=float(facts["of"])
            )
        )
