"""`rlhf plan`, `tune` and `specialise`: what training takes, better settings, several agents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_pipeline.commands.common import Agent, console, progress, workspace

if TYPE_CHECKING:
    from rlhf_pipeline.ppo.plan import Plan, Seconds
    from rlhf_pipeline.tuning import Search


def plan(
    name: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A name or file. Default: --recipe's.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option("--agent", "-a", envvar="RLHF_AGENT", help="Plan this agent's next turn."),
    ] = None,
    timed: Annotated[
        bool,
        typer.Option(
            "--time/--no-time", help="Run it in small: for the time, and memory beside tensors."
        ),
    ] = True,
) -> None:
    """Say what a recipe's PPO will hold and take before it is launched, and refuse what cannot fit.

    Parameters, memory by part and phase, tokens, and the time by a short run with random weights,
    which also finds what a small model's run on a CPU holds beside its tensors; every completion
    counts at full length. An agent's next turn trains its champion, with the baseline as its
    reference; without an agent, or a champion, the plan is of the recipe's base as both, as in a
    first turn; of a recipe with specialists, of one of them beside the others. A hub model needs
    only its configuration here. Exits with 1, and the settings that
    would fit, where memory does not suffice.
    """
    from rlhf_pipeline.errors import ConfigError
    from rlhf_pipeline.ppo.plan import (
        NO_MODELS,
        beside_others,
        check_fits,
        make_plan,
        memory_found,
        probe,
        rehearse,
    )
    from rlhf_pipeline.ppo.specialists import check_settings
    from rlhf_pipeline.stages import named_models, next_policy, policy_config, reward_models_of

    here = workspace()
    champion = baseline = None
    if agent is not None:
        here.need_agent(agent)
        champion, baseline = here.ledger.champion(agent), here.ledger.baseline(agent)
    default = here.settings if agent is None else here.settings_of(agent)
    settings = default if name is None else here.load(name)
    specialises = agent is None and bool(settings.specialists)
    if specialises:
        check_settings(settings.ppo)
    if settings.ppo.estimator == "dpo":
        raise ConfigError(
            "a plan is for training that samples: needed ppo.estimator gae or rloo, found dpo; "
            "change it, or start dpo as it is"
        )
    if champion is None or baseline is None:
        config, shares = policy_config(settings), True
        typer.echo(f"a first turn: recipe {settings.recipe}'s base is policy and reference")
    else:
        config, shares = next_policy(champion.path, baseline.path, settings.ppo)
        typer.echo(
            f"{agent}'s next turn under recipe {settings.recipe}: version {champion.version}, its "
            f"champion, is the policy; version {baseline.version} is the reference"
        )
    if specialises:
        each = [one.functions for one in settings.specialists.values()]
        named = [one for f in each for one in named_models(f, settings.policy.device)]
        rewards = replace(NO_MODELS, beside=tuple(named))
    else:
        rewards = reward_models_of(settings)
    made = make_plan(config, settings.ppo, rewards, shares_reference=shares)
    found = memory_found(settings.ppo.device)
    if timed and made.fits(found):
        made = rehearse(config, made)
    if specialises:
        others = len(settings.specialists) - 1
        typer.echo(f"as `rlhf specialise` trains it, around one critic with {others} others")
        made = beside_others(made, others)
    _print_plan(made, found)
    check_fits(config, settings.ppo, rewards, shares_reference=shares, made=made, room=found)
    if timed:
        _print_seconds(probe(config, settings.ppo, rewards), settings.ppo.updates)


def _print_plan(plan: Plan, found: int) -> None:
    from rich.table import Table

    typer.echo(
        f"{plan.parameters:,} parameters, {plan.trained:,} trained; {plan.tokens_per_update:,} "
        f"tokens an update, {plan.tokens:,} in {plan.settings.updates} updates"
    )
    table = Table("memory", "MiB")
    for name, size in plan.parts.items():
        table.add_row(name, f"{size / 2**20:,.1f}")
    for name, size in plan.phases.items():
        table.add_row(f"held while it {name}s", f"{size / 2**20:,.1f}")
    console().print(table)
    typer.echo(f"peak {plan.peak / 2**20:,.1f} MiB on the {plan.device}, {found / 2**20:,.0f} free")


def _print_seconds(seconds: Seconds, updates: int) -> None:
    typer.echo(
        f"about {seconds.update:.1f} s an update (sampling {seconds.sample:.1f}, measuring "
        f"{seconds.measure:.1f}, training {seconds.train:.1f}): "
        f"{seconds.update * updates / 60:.0f} minutes for {updates}, looks not counted"
    )


def tune(
    agent: Agent,
    trials: Annotated[
        int, typer.Option("--trials", "-n", min=1, help="Finished trials in all, earlier ones too.")
    ] = 12,
    updates: Annotated[
        int | None,
        typer.Option("--updates", min=1, help="PPO updates per trial. Default: the recipe's."),
    ] = None,
) -> None:
    """Search learning rate, KL coefficient, clip range and epochs for an agent's next turn.

    Trains from the newest turn's champion with its reward models; the stopping reward judges, the
    gate model is never asked. The first trial is the recipe as it stands. Ctrl-C and run again:
    it goes on. Ends with a table, a plot, and the lines to put into the recipe.
    """
    from rlhf_pipeline.registry.reproduce import newest_turn
    from rlhf_pipeline.tuning import search

    here = workspace()
    here.version(agent, "champion")  # says what to do where there is none
    settings = here.settings_of(agent)
    turn = newest_turn(here.ledger, settings, agent)
    with progress() as bars:
        task = bars.add_task("tuning", total=trials)

        def show(facts: object) -> None:
            if isinstance(facts, dict) and "trial" in facts:
                update = f", update {facts['update']}" if "update" in facts else ""
                bars.update(
                    task,
                    completed=facts["trial"] - 1,
                    description=f"trial {facts['trial']}{update}",
                )

        folder = settings.agent_folder(agent) / "tuning"
        found = search(turn, folder, trials=trials, updates=updates, report=show)
    _print(found)


def specialise(
    out: Annotated[
        Path | None, typer.Option(help="Where to train. Default: specialists in the state folder.")
    ] = None,
) -> None:
    """Train the recipe's specialists: an agent each for what they are asked, around one critic.

    All start from the recipe's SFT; each has prompts, reward functions and a KL weight of its own.
    Ctrl-C and run again: it goes on. Ends with what each earned on prompts it never saw, before
    and after; the policies are plain model folders, OUT/NAME/policy.
    """
    from rlhf_pipeline.specialising import as_markdown
    from rlhf_pipeline.specialising import specialise as train

    settings = workspace().settings
    folder = out or settings.state_dir / "specialists"
    with progress() as bars:
        task = bars.add_task("specialising", total=settings.ppo.updates)

        def show(facts: object) -> None:
            if isinstance(facts, dict) and "update" in facts and "agent" in facts:
                bars.update(
                    task, completed=facts["update"], description=f"training {facts['agent']}"
                )

        rows = train(settings, folder, report=show)
    typer.echo(as_markdown(rows), nl=False)
    typer.echo(f"policies and this table: {folder}", err=True)


def _print(found: Search) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rlhf_pipeline.tuning import SEARCHED

    table = Table("trial", *SEARCHED, "stopping reward", "KL", "update", "")
    for trial in found.trials:
        numbers = [f"{trial.settings[name]:.3g}" for name in SEARCHED]
        said = "best" if trial.number == found.best.number else escape(trial.failure or "")
        table.add_row(
            f"{trial.number}" + (" (recipe)" if trial.settings == found.recipe else ""),
            *numbers,
            "–" if trial.score is None else f"{trial.score:.3f}",
            "–" if trial.kl is None else f"{trial.kl:.2f}",
            "–" if trial.chosen_update is None else str(trial.chosen_update),
            said,
        )
    console().print(table)
    typer.echo((found.folder / "best.yaml").read_text(), nl=False)
    typer.echo(f"table, plot and these lines: {found.folder}", err=True)
