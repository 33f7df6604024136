"""`rlhf status · pause · resume · automatic`: what goes on by itself, and who may stop it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf_pipeline.commands.common import (
    Agent,
    AsJson,
    Workspace,
    console,
    inert,
    workspace,
)

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.feedback.claims import Claim
    from rlhf_pipeline.registry.ledger import Promotion


def status(
    agent: Annotated[
        str | None, typer.Option("--agent", "-a", help="Only this agent.", envvar="RLHF_AGENT")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every agent: votes, quarantine, champion, last turn, and when the next one starts.

    Votes are effective votes: of somebody who changed their mind, the last one counts.
    """
    from rlhf_pipeline.feedback.inbox import left_beside

    here = workspace()
    known = here.store.agents()
    if agent not in known and (left := left_beside(here.settings, known)):
        typer.echo(f"inbox: {_shortly(left)}", err=True)  # of no agent that is listed
    if agent is not None:
        here.need_agent(agent)
    found = [_status(here, each) for each in ([agent] if agent else known)]
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
        return
    if not found:
        typer.echo(f"no agent in {here.settings.state_dir} yet; `rlhf ingest` makes one known")
    for values in found:
        _print_status(values)


def pause(
    agent: Agent,
    reason: Annotated[
        str, typer.Option("--reason", "-r", help="Why; `rlhf status` shows it.")
    ] = "by hand",
) -> None:
    """Start no more turns of an agent by themselves; one that runs is not stopped."""
    here = workspace()
    here.need_agent(agent)
    here.store.set_agent(agent, paused_reason=reason)
    typer.echo(f"{agent} is paused: {reason}")


def resume(agent: Agent) -> None:
    """Let the turns of a paused agent start by themselves again."""
    here = workspace()
    here.need_agent(agent)
    row = here.store.agent(agent)
    here.store.set_agent(agent, paused_reason=None)
    was_paused = row is not None and row.paused_reason is not None
    typer.echo(f"{agent} goes on" if was_paused else f"{agent} was not paused")


def automatic(
    agent: Agent,
    switch: Annotated[Literal["on", "off"], typer.Argument(metavar="on|off")],
) -> None:
    """Choose who promotes an agent's versions: on lets the gate decide, off asks a person.

    Until it is chosen here, the recipe's promotion.automatic holds. The gate's refusal always does.
    """
    here = workspace()
    here.need_agent(agent)
    here.store.set_agent(agent, automatic_promotion=switch == "on")
    who = "what the gate lets through" if switch == "on" else "a version only when a person asks"
    typer.echo(f"automatic promotion of {agent} is {switch}: it promotes {who}")


def _status(here: Workspace, agent_id: str) -> dict[str, Any]:
    from rlhf_pipeline.continuous import lacks_for_reward
    from rlhf_pipeline.errors import ConfigError, PipelineError
    from rlhf_pipeline.feedback.inbox import left_in, passed_over_in

    row = here.store.agent(agent_id)
    own = row.recipe if row is not None else None
    automatic: bool | None = None
    votes, lacks = here.store.counts(agent_id), None
    try:
        settings = here.settings_of(agent_id)
        lacks = lacks_for_reward(here.store, agent_id, votes, settings)
        automatic = settings.promotion.automatic
        next_turn = _next_turn(here, agent_id, settings)
    except ConfigError as error:  # the other agents are shown all the same
        next_turn = f"none until its recipe loads: {error}"
    except PipelineError as error:
        next_turn = f"not known: {error}"
    standing = here.ledger.standing(agent_id)
    turns = here.claims.history(agent_id)
    chosen = row.automatic_promotion if row is not None else None
    return {
        "agent": agent_id,
        "paused": row.paused_reason if row is not None else None,
        "recipe": own or here.settings.recipe,
        "own_recipe": own is not None,
        "automatic_promotion": automatic if chosen is None else bool(chosen),
        "votes": votes,
        "reward_lacks": lacks,
        "quarantine": here.store.quarantined(agent_id),
        "inbox": [*left_in(here.settings, agent_id), *passed_over_in(here.settings, agent_id)],
        "champion": None if standing.champion is None else standing.champion.version,
        "challenger": None if standing.challenger is None else standing.challenger.version,
        "last_promotion": _promotion(standing.history[-1]) if standing.history else None,
        "last_turn": _turn(turns[-1]) if turns else None,
        "next_turn": next_turn,
    }


def _next_turn(here: Workspace, agent_id: str, settings: Settings) -> str:
    from rlhf_pipeline.continuous import COUNTED, Due, due
    from rlhf_pipeline.records import now

    verdict = due(here.database, agent_id, settings, at=now())
    if isinstance(verdict, Due):
        least = "at least " if verdict.votes >= COUNTED else ""
        return f"due now: {least}{verdict.votes} new votes, attempt {verdict.attempt}"
    return verdict.reason


def _promotion(entry: Promotion) -> str:
    return f"{entry.action} by {entry.actor} {entry.created_at:%Y-%m-%d %H:%M} UTC: {entry.reason}"


def _turn(claim: Claim) -> str:
    said = f": {claim.reason}" if claim.reason else ""
    return (
        f"{claim.state}, attempt {claim.attempt}, asked by {claim.asked_by}, "
        f"{claim.heartbeat_at:%Y-%m-%d %H:%M} UTC{said}"
    )


def _print_status(values: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    champion, challenger = values["champion"], values["challenger"]
    rows = {
        "votes": _counts(values["votes"]),
        **({"reward": values["reward_lacks"]} if values["reward_lacks"] else {}),
        "quarantine": _counts(values["quarantine"]),
        **({"inbox": _shortly(values["inbox"])} if values["inbox"] else {}),
        "champion": "none yet"
        if champion is None
        else f"version {champion}; {values['last_promotion']}",
        "challenger": "none" if challenger is None else f"version {challenger} waits",
        "promotion": {None: "unknown", True: "automatic", False: "asks a person"}[
            values["automatic_promotion"]
        ],
        "recipe": f"{values['recipe']}{', its own' if values['own_recipe'] else ''}",
        "last turn": values["last_turn"] or "none yet",
        "next turn": values["next_turn"],
    }
    table = Table(title=values["agent"], title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, escape(text))
    console().print(table)


def _shortly(left: list[str]) -> str:
    from rlhf_pipeline.feedback.inbox import MOST_LEFT

    more = f"; and {len(left) - MOST_LEFT} more" if len(left) > MOST_LEFT else ""
    return inert("; ".join(left[:MOST_LEFT])) + more


def _counts(counts: dict[str, int]) -> str:
    said = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"{sum(counts.values()):,} ({said})" if counts else "none"
