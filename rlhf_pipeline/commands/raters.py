"""`rlhf raters export · erase`: what is held about one person, shown or taken out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rlhf_pipeline.commands.common import Force, Workspace, need_new, need_outside, workspace
from rlhf_pipeline.errors import UnknownRater

Rater = Annotated[
    str, typer.Argument(metavar="ID", help="As it was sent, or the hash that an export shows.")
]
OneAgent = Annotated[
    str | None, typer.Option("--agent", "-a", help="Only this agent; without it every one.")
]


def export(
    rater: Rater,
    out: Annotated[
        Path | None, typer.Option("--out", help="A JSON file. Default: the terminal.")
    ] = None,
    agent: OneAgent = None,
    force: Force = False,
) -> None:
    """Write everything that is held about a person as JSON.

    Their votes, their interactions, what the chat noted about those, lines in quarantine with
    their name, traces in MLflow, and every snapshot and version that has their rows in it. Tables
    in the inbox, and files that nothing takes in, are named on the terminal: look for their rows
    in those yourself.
    """
    from rlhf_pipeline.erasure import held_about, tables_beside
    from rlhf_pipeline.files import new_file

    here = workspace()
    if out is not None:
        need_new(out, force=force)
        need_outside(out, here.settings.state_dir)
    with _telling_where(here):
        told = held_about(here.registry, rater, agent)
        tables = tables_beside(here.settings, here.registry, rater, agent)
    for table in tables:
        typer.echo(f"not looked into: {table}; look for their rows in it", err=True)
    text = json.dumps(told, ensure_ascii=False, indent=2)
    if out is None:
        typer.echo(text)
        return
    with new_file(out, private=True) as aside:
        aside.write_text(text + "\n", encoding="utf-8")
    rows = sum(len(one["feedback"]) + len(one["interactions"]) for one in told["agents"])
    typer.echo(f"{rows:,} rows in {out}")


def erase(
    rater: Rater,
    agent: OneAgent = None,
    unsigned: Annotated[
        bool,
        typer.Option(
            "--unsigned",
            help="Also interactions nobody signed that they said something about: for programs "
            "that send no `user` with a chat. Not for annotators.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Take a person out of the store, snapshots, data sets, examples and MLflow, for ever.

    Numbers stay: counts, fingerprints, hashes. Printed is every snapshot and version that had
    their rows; a version's weights keep what they learned until a new one is trained. Killed half
    way, ask again. Backups and exports made before are not touched.
    """
    from rlhf_pipeline.erasure import erase as take_out
    from rlhf_pipeline.erasure import held_about, told

    here = workspace()
    if not yes:
        with _telling_where(here):
            found = held_about(here.registry, rater, agent)
        for one in found["agents"]:
            typer.echo(
                f"agent {one['agent_id']}: {len(one['feedback'])} votes, "
                f"{len(one['interactions'])} interactions, {len(one['traces'])} traces"
            )
        typer.confirm("Erase all of it? It cannot be undone", abort=True)
    with _telling_where(here):
        done = take_out(here.settings, here.registry, rater, agent, unsigned=unsigned)
    for line in told(done["erasures"], done["tables"]):
        typer.echo(line)


@contextmanager
def _telling_where(here: Workspace) -> Iterator[None]:
    """Say of somebody unknown whose agents were asked: in another folder the answer is no."""
    try:
        yield
    except UnknownRater as error:
        raise UnknownRater(f"{error} (known agents: {here.known()})") from error
