"""`rlhf tune`: better training settings, searched for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_pipeline.commands.common import AgentArgument, console, progress, workspace

if TYPE_CHECKING:
    from rlhf_pipeline.tuning import Search


def tune(
    agent: AgentArgument,
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


def _print(found: Search) -> None:
    from rich.table import Table

    from rlhf_pipeline.tuning import SEARCHED

    table = Table("trial", *SEARCHED, "stopping reward", "KL", "update", "")
    for trial in found.trials:
        numbers = [f"{trial.settings[name]:.3g}" for name in SEARCHED]
        said = "best" if trial.number == found.best.number else trial.failure or ""
        table.add_row(
            f"{trial.number}" + (" (recipe)" if trial.number == 0 else ""),
            *numbers,
            "–" if trial.score is None else f"{trial.score:.3f}",
            "–" if trial.kl is None else f"{trial.kl:.2f}",
            "–" if trial.chosen_update is None else str(trial.chosen_update),
            said,
        )
    console().print(table)
    typer.echo((found.folder / "best.yaml").read_text(), nl=False)
    typer.echo(f"table, plot and these lines: {found.folder}", err=True)
