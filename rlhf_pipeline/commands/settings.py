"""`rlhf config`: what the settings are, and whether a recipe is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_pipeline.commands.common import console, need_file, workspace


def show(
    agent: Annotated[
        str | None,
        typer.Option("--agent", "-a", help="As this agent has them: it may have its own recipe."),
    ] = None,
) -> None:
    """Print every setting as it is resolved: defaults, presets, recipe, environment.

    Secrets are masked. Unmasked, the output is a recipe itself: keep it beside a result to have
    the same settings again.
    """
    import yaml

    from rlhf_pipeline.config import SHARED_WITH_PPO, shown

    here = workspace()
    tree = shown(here.settings if agent is None else here.settings_of(agent))
    for key in SHARED_WITH_PPO:
        tree["ppo"].pop(key)  # said once, under policy and training
    typer.echo(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).rstrip())


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recipe in YAML.")],
) -> None:
    """Tell everything that is wrong with a recipe at once.

    Unknown keys (with the nearest right one), values out of range, contradictions.
    """
    settings = workspace().load(str(need_file(file)))
    typer.echo(f"{file}: sound; the policy starts from {settings.policy.base}")


def recipes() -> None:
    """List the recipes that come with the project, smallest first."""
    from rich.table import Table

    from rlhf_pipeline.config import RECIPES, load_settings, recipe_names

    table = Table("recipe", "policy", "weights", "for")
    for name in recipe_names():
        policy = load_settings(name).policy
        first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        weights = f"LoRA rank {policy.lora.rank}" if policy.lora.enabled else "all"
        table.add_row(name, policy.base, weights, first.lstrip("# ").strip())
    console().print(table)
