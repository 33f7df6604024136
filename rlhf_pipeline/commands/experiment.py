"""`rlhf experiment start · status · stop · offline`: a challenger beside the champion."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_pipeline.commands.common import (
    Agent,
    AsJson,
    Workspace,
    actor,
    console,
    progress,
    workspace,
)

if TYPE_CHECKING:
    from rlhf_pipeline.experiment.book import Experiment, ExperimentBook

NEWEST = 6  # experiments to show: the one that runs, as none begins beside it, and five that ended


def start(
    agent: Agent,
    version: Annotated[
        str, typer.Option("--version", "-v", help="A version number, or challenger.")
    ] = "challenger",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also a version that the gate refused, or one that was rolled back."
        ),
    ] = False,
) -> None:
    """Let a version meet a growing share of the people who chat through `rlhf serve`.

    It begins at the first step of experiments.ramp. A sensor of the daemon looks at it, widens the
    share, promotes, rolls back or gives up; `rlhf experiment status` has what it saw. It promotes
    also where `rlhf automatic` is off: whoever begins one asks for what comes of it.
    """
    from rlhf_pipeline.errors import ExperimentError
    from rlhf_pipeline.experiment.assignment import percent

    here = workspace()
    here.need_agent(agent)
    if agent in here.settings.serving.upstreams:
        raise ExperimentError(
            f"an experiment needs people whom this service answers, found that those of agent "
            f"{agent!r} are answered by its upstream; compare versions by `rlhf experiment offline`"
        )
    champion = here.ledger.champion(agent)
    challenger = here.ledger.find(agent, version)
    if champion is None:
        raise ExperimentError(
            f"an experiment needs a champion to hold version {challenger.version} against, found "
            f"none for agent {agent!r}; promote one first"
        )
    objection = here.ledger.objection(agent, challenger.version)
    if objection and not force:
        raise ExperimentError(
            f"only what may become champion meets people, found that {objection.split(';')[0]}; "
            "see `rlhf explain`, or take --force"
        )
    settings = here.settings_of(agent).experiments
    begun = _book(here).start(
        agent,
        champion=champion.version,
        challenger=challenger.version,
        share=settings.ramp[0],
        actor=actor(),
    )
    then = "is promoted if they like it better"
    if objection:  # which promoting it needs --force for, whatever people say
        then = "if they like it better the experiment ends, and a person decides"
    typer.echo(
        f"{agent}: version {begun.challenger} meets {percent(begun.share)} of the people beside "
        f"version {begun.champion}, and {then}"
    )


def status(
    agent: Agent,
    every: Annotated[
        bool, typer.Option("--all", help="All there were, not the newest alone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the agent's newest experiments, newest first, with the latest look at each.

    Where a difference is above 0 the challenger is better; where less is better, it has less.
    JSON has all there were.
    """
    from rlhf_pipeline.experiment.assignment import percent
    from rlhf_pipeline.experiment.decision import SIGN, as_read

    here = workspace()
    here.need_agent(agent)
    book = _book(here)
    history = book.history(agent)
    shown = history if every or as_json else history[:NEWEST]
    found = [_told(book, experiment) for experiment in shown]
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2, default=str))
        return
    if not found:
        typer.echo(f"{agent} has had no experiment; begin one with `rlhf experiment start`")
    if any(each["latest"] for each in found):
        typer.echo(SIGN)
    for each in found:
        began, ended = each["started_at"], each["ended_at"]
        was = f"{began:%Y-%m-%d %H:%M} to {ended:%Y-%m-%d %H:%M} UTC, at last " if ended else ""
        typer.echo(
            f"version {each['challenger']} beside {each['champion']}: {each['state']}, "
            f"{was}{percent(each['share'])} of the people, {each['looks']} looks kept"
            + (f"\n  {each['reason']}" if each["reason"] else "")
        )
        latest = each["latest"] or {}
        if each["ended_at"] is None and latest.get("reasons"):
            typer.echo(f"  {'; '.join(latest['reasons'])}")
        differences = latest.get("differences", {})
        for name, difference in differences.items():
            value, low, high = as_read(difference)
            typer.echo(
                f"  {name}: {value} ({low} to {high}), "
                f"{difference['challenger_users']} and {difference['champion_users']} users"
            )
    if len(history) > len(found):
        more = len(history) - len(found)
        typer.echo(f"{more} older; `rlhf experiment status --agent {agent} --all` shows them too")


def stop(
    agent: Agent,
    reason: Annotated[str, typer.Option("--reason", "-r", help="Why; it is kept.")] = "by hand",
) -> None:
    """End the running experiment; within seconds everybody meets the champion."""
    from rlhf_pipeline.errors import ExperimentError

    here = workspace()
    here.need_agent(agent)
    book = _book(here)
    running = book.running(agent)
    if running is None or not book.end(running, "stopped", reason):
        raise ExperimentError(
            f"stopping needs a running experiment of agent {agent!r}, found none; "
            "`rlhf experiment status` lists those that ended"
        )
    champion = here.ledger.champion(agent)
    answers = running.champion if champion is None else champion.version  # moved meanwhile, perhaps
    typer.echo(f"{agent}: stopped; version {answers} answers everybody")


def offline(
    agent: Agent,
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A version: a number, champion, challenger, previous, baseline."
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="The version held against it.")],
    prompts: Annotated[
        int, typer.Option("--prompts", "-n", min=2, help="Logged prompts, at most.")
    ] = 200,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comparison as an HTML page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let two versions answer the same logged prompts, judged by what neither was trained on.

    What people asked comes first where neither version was trained on it. The gate reward model of
    the newer version's turn scores both answers to each prompt; the win rate is paired and
    length-controlled, with its interval. It asks nobody: `rlhf experiment start` asks people.
    """
    from rich.table import Table

    from rlhf_pipeline.evaluation.page import body
    from rlhf_pipeline.evaluation.page import page as page_of
    from rlhf_pipeline.experiment.offline import offline as compared
    from rlhf_pipeline.files import write_text

    here = workspace()
    here.need_agent(agent)
    with progress() as bars:
        task = bars.add_task("two versions", total=None)
        found = compared(
            here.registry,
            here.settings_of(agent),
            agent,
            first,
            second,
            prompts=prompts,
            report=lambda facts: bars.update(
                task, description=str(facts.get("stage", "answering"))
            ),
        )
    if page is not None:
        title = f"{agent}: version {found.second} beside version {found.first}"
        words = [found.words, found.basis, *found.warnings]
        inner = body(found.report, None, [], words=words, names=found.names)
        write_text(page, page_of(title, inner))
    if as_json:
        typer.echo(json.dumps(found.to_json(), ensure_ascii=False, indent=2))
        return
    names = found.names
    table = Table("metric", names["baseline"], names["candidate"], "change", "95 %")
    for row in found.report.rows("baseline"):
        table.add_row(names.get(row.name, row.name), row.other, row.here, row.change, row.interval)
    console().print(table)
    typer.echo(found.words)
    typer.echo(found.basis)
    for warning in found.warnings:
        typer.echo(warning, err=True)


def _book(here: Workspace) -> ExperimentBook:
    from rlhf_pipeline.experiment.book import ExperimentBook

    return ExperimentBook(here.store.database)


def _told(book: ExperimentBook, experiment: Experiment) -> dict[str, Any]:
    looks = book.looks(experiment.experiment_id)
    latest = looks[-1].verdict if looks else None
    return {**asdict(experiment), "looks": len(looks), "latest": latest}
