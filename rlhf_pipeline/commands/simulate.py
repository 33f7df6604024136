"""`rlhf simulate`: a day of simulated people, or many nights of the whole loop among them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from rlhf_pipeline.commands.common import MOST_SEED, Agent, progress, workspace

if TYPE_CHECKING:
    from rlhf_pipeline.records import Prompt

NIGHTLY_EVENTS, NIGHTLY_PEOPLE = 800, 2400
PEOPLE = 200


def simulate(
    agent: Agent,
    events: Annotated[
        int | None,
        typer.Option(
            "--events",
            "-n",
            min=1,
            help="Feedback events they send in all; with --nights on an ordinary day, 800 unless "
            "said.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            max=MOST_SEED,
            help="The same seed, the same questions and the same days. Default: another every "
            "time; with --nights 0.",
        ),
    ] = None,
    people: Annotated[
        int | None,
        typer.Option("--people", min=3, help="How many people: 200, with --nights 2,400."),
    ] = None,
    nights: Annotated[
        int | None,
        typer.Option(
            "--nights", min=2, help="Play so many days and nights of the whole loop instead."
        ),
    ] = None,
    trial: Annotated[
        int,
        typer.Option(
            "--trial",
            min=0,
            help="With --nights: votes about version 0 from before the first day, which come as a "
            "file on its evening.",
        ),
    ] = 6000,
    turn_at: Annotated[
        int | None,
        typer.Option(
            "--turn-at",
            min=1,
            help="With --nights: new votes that start a turn. Default: twice --events.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="With --nights: where nights.json, .md and .png go. Default: the state."
        ),
    ] = None,
) -> None:
    """Let simulated people chat with the champion and send feedback.

    They ask a small shop's helpdesk, like some completions better than others for reasons no
    training stage ever sees, and say so with noise; about one in ten is careless. Made for the
    recipe `tiny`, whose seed conversations are the same people's.

    `--nights 14` plays the loop with nobody at the wheel: a service and Dagster's daemon are
    started on the state folder, people chat and vote over HTTP by day, and by night the sensors do
    what is due: turns, the gate, live experiments, promotion, rollback. Some days are quiet, late,
    doubled, corrupt or hostile; which, follows from the seed. The agent gets a recipe of its own:
    this one with promotion and experiments automatic, waiting times short, and a turn for every two
    days' votes. A day here is over when all that was due is done; only waiting is compressed, never
    work. About an hour for 14 nights on one core with the recipe tiny. Killed, the same command
    goes on with the night it was at.

    The report (table, nights.json, nights.png) has for each night the kind of day, votes sent,
    accepted, refused and quarantined, turns with their verdicts, the experiment, the champion, and
    the hidden satisfaction of what people saw. Exit code 1 where a promise broke: satisfaction up
    20 % from the first night to the last, never more than 5 % below its best two nights running,
    no manual step.
    """
    if nights is not None:
        _play_nights(agent, nights, events, seed, people, trial, turn_at, out)
        return
    if out is not None:
        raise click.UsageError("--out goes with --nights")
    if events is None:
        raise click.UsageError("needed --events, or --nights")
    _play_a_day(agent, events, seed, people or PEOPLE)


def _play_nights(
    agent: str,
    nights: int,
    events: int | None,
    seed: int | None,
    people: int | None,
    trial: int,
    turn_at: int | None,
    out: Path | None,
) -> None:
    from automation.nights import Wanted, simulate_nights  # Dagster: only here

    here = workspace()
    met = simulate_nights(
        here.settings,
        Wanted(
            agent_id=agent,
            nights=nights,
            seed=seed or 0,
            events=events or NIGHTLY_EVENTS,
            people=people or NIGHTLY_PEOPLE,
            trial=trial,
            turn_at=turn_at or 2 * (events or NIGHTLY_EVENTS),
            out=out,
        ),
        say=typer.echo,
    )
    if not met:
        raise typer.Exit(1)


def _play_a_day(agent: str, events: int, seed: int | None, people: int) -> None:
    here = workspace()
    champion = here.version(agent, "champion")
    folder, settings = here.registry.folder_of(champion), here.settings_of(agent)
    limits = settings.policy
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    from rlhf_pipeline.feedback import snapshot
    from rlhf_pipeline.policy.loading import load_policy
    from rlhf_pipeline.policy.sampling import complete
    from rlhf_pipeline.simulation.people import population
    from rlhf_pipeline.simulation.play import play

    policy = load_policy(folder, device=limits.device)
    # Where nobody chose, the questions follow from what is stored: another day, other questions.
    chosen = seed if seed is not None else snapshot.newest_seq(here.database, agent)
    asked = 0

    def answer(prompts: Sequence[Prompt]) -> list[str]:
        nonlocal asked
        asked += 1
        completions = complete(
            policy,
            prompts,
            max_completion_tokens=limits.max_completion_tokens,
            max_prompt_tokens=limits.max_prompt_tokens,
            temperature=limits.temperature,
            seed=1_000_003 * (chosen + 1) + asked,
        )
        return [completion.text for completion in completions]

    columns = (TextColumn("events"), BarColumn(), MofNCompleteColumn())
    with progress(*columns) as bar:
        task = bar.add_task("events", total=events)
        day = play(
            here.store,
            agent,
            answer,
            population(people, settings.training.seed),
            model_version=champion.version,
            events=events,
            seed=chosen,
            report=lambda facts: bar.update(task, completed=int(facts["events"])),
        )
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(day.by_kind.items()))
    typer.echo(
        f"{day.events} events about {day.interactions} completions of version "
        f"{champion.version}: {kinds}"
    )
