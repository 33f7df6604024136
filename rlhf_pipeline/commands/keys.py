"""`rlhf keys`: who may use the service."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

import typer

from rlhf_pipeline.commands.common import finite, workspace
from rlhf_pipeline.records import now


def create(
    role: Annotated[
        Literal["client", "admin"],
        typer.Option("--role", help="client: chat and feedback; admin: everything."),
    ] = "client",
    agent: Annotated[
        str | None, typer.Option("--agent", "-a", help="Only this agent; without it every one.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Whom or what it is for.")] = "",
    days: Annotated[
        float | None,
        typer.Option("--days", min=0.001, max=36500, callback=finite, help="It ends after these."),
    ] = None,
) -> None:
    """Make an API key and show it, this once: only its hash is kept.

    From the first key on the service answers nobody without one.
    """
    from rlhf_pipeline.serving.keys import Keys

    ends = None if days is None else now() + timedelta(days=days)
    here = workspace()
    made, secret = Keys(here.settings.state_dir).create(
        role, agent_id=agent, name=name, expires_at=ends
    )
    typer.echo(f"key {made.key_id}; it is not shown again", err=True)
    typer.echo(secret)
    # It may come before its agent's first vote, so it is no fault.
    if agent is not None and not here.knows(agent) and agent not in here.settings.serving.upstreams:
        typer.echo(f"nobody has heard of agent {agent} yet; known: {here.known()}", err=True)


def show() -> None:
    """List the keys by their ids: what each may do, and until when."""
    from rlhf_pipeline.serving.keys import Keys

    folder = workspace().settings.state_dir
    found = Keys(folder).all()
    if not found:
        typer.echo(f"no key yet in {folder}; `rlhf keys create` makes one")
    for key in found.values():
        ends = f"until {key.expires_at}" if key.expires_at else "no end"
        state = ends if key.holds else "revoked" if key.revoked_at else "expired"
        typer.echo(f"{key.key_id}  {key.role}  {key.agent_id or 'all agents'}  {state}  {key.name}")


def revoke(key_id: Annotated[str, typer.Argument(help="As `rlhf keys list` shows it.")]) -> None:
    """Make a key open nothing any more, from the next request on."""
    from rlhf_pipeline.serving.keys import Keys

    Keys(workspace().settings.state_dir).revoke(key_id)
    typer.echo(f"key {key_id} is revoked")
