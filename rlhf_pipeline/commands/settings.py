"""`rlhf config`: what the settings are, whether a recipe is sound, and whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_pipeline.commands.common import (
    Agent,
    Workspace,
    console,
    need_file,
    need_name,
    tell_new,
    workspace,
)
from rlhf_pipeline.errors import ConfigError, ModelError, RegistryError

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings


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
    if agent is not None:
        need_name(agent)
        if others := here.known_beside(agent):
            tell_new(agent, others)
    tree = shown(here.settings if agent is None else here.settings_of(agent))
    for key in SHARED_WITH_PPO:
        tree["ppo"].pop(key)  # said once, under policy and training
    typer.echo(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).rstrip())


def explain(
    setting: Annotated[
        str,
        typer.Argument(metavar="[SETTING]", help="Such as reward or ppo.kl_coef. Default: all."),
    ] = "",
) -> None:
    """Print what settings are for, with their defaults and limits: a recipe with comments.

    A part of it can go into a recipe as it is. What a recipe of yours resolves to: `show`.
    """
    from rlhf_pipeline.settings_told import told

    typer.echo(told(setting).rstrip())


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recipe in YAML.")],
) -> None:
    """Tell everything that is wrong with a recipe at once.

    Unknown keys (with the nearest right one), values out of range, contradictions; then whether the
    files that it names are there (a specialist's prompts are read), and its folders hold models.
    Models of a hub or a registry are looked for by `rlhf plan`.
    """
    from rlhf_pipeline.specialising import prompts_of

    settings = workspace().load(str(need_file(file)))
    _check_files(settings)
    for name, one in settings.specialists.items():
        prompts_of(name, one, settings)
    for setting, base in (
        ("policy.base", settings.policy.base),
        ("reward.base", settings.reward.base),
    ):
        if base not in (None, "tiny") and not base.startswith("models:/"):
            from rlhf_pipeline.policy.loading import local_folder

            try:
                local_folder(base)
            except ModelError as error:
                raise ConfigError(f"recipe {settings.recipe}: {setting}: {error}") from error
    typer.echo(f"{file}: sound; the policy starts from {settings.policy.base}")


def _check_files(settings: Settings) -> None:
    """Raise ConfigError with every file that a turn would not find, from where its stages run."""
    from rlhf_pipeline.config import RECIPES
    from rlhf_pipeline.feedback.datasets import JOBS

    named = {
        "policy.tiny.encoding": settings.policy.tiny.encoding,
        "sft.seed_conversations": settings.sft.seed_conversations,
        "feedback.gold_questions": settings.feedback.gold_questions,
        "evaluation.titles": settings.evaluation.titles,
    }
    places = {
        setting: RECIPES.parent / name
        for setting, name in named.items()
        if name is not None and not name.startswith(("tiktoken:", "simulated:"))
    }
    gone = [f"{path} ({setting})" for setting, path in places.items() if not path.is_file()]
    if settings.reward.given is not None:
        folders = [RECIPES.parent / settings.reward.given / job for job in JOBS]
        gone += [f"{folder} (reward.given)" for folder in folders if not folder.is_dir()]
    if gone:
        raise ConfigError(
            f"recipe {settings.recipe}: needed the files that it names, found none at "
            f"{', '.join(gone)}; correct the path, a whole one"
        )


def use(
    agent: Agent,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME|FILE", help="As for --recipe. Left out: say which it has."),
    ] = None,
    none: Annotated[
        bool,
        typer.Option("--none", help="Take its own away: what --recipe names holds for it again."),
    ] = False,
) -> None:
    """Give one agent a recipe of its own: for its turns, its promotion and how it chats.

    It wins over --recipe and RLHF_RECIPE, which hold for the other agents. A file is read anew
    whenever the agent is at work: it must stay where it is, and what is changed in it holds. An
    agent that nobody has named yet is made: its recipe may say how its first votes are read.
    """
    if none and name is not None:
        raise typer.BadParameter(f"needed a recipe or --none, found {name} and --none")
    here = workspace(may_be_new=name is not None)
    if name is None:
        here.need_agent(agent)
    if none:
        here.store.set_agent(agent, recipe=None)
    elif name is not None:
        need_name(agent)
        _check_files(here.load(name))  # raises where it is no recipe, or a turn would fail at it
        is_file = Path(name).suffix in (".yaml", ".yml")
        recipe = str(Path(name).absolute()) if is_file else name
        others = here.known_beside(agent)
        here.store.ensure_agent(agent, recipe=recipe)
        here.store.set_agent(agent, recipe=recipe)
        if others:
            tell_new(agent, others)
    if none or name is not None:
        _tell_other_base(here, agent)
    own = here.store.recipe_of(agent)
    if own is None:
        typer.echo(f"{agent} has no recipe of its own; {here.settings.recipe} holds for it")
    else:
        typer.echo(f"{agent} has a recipe of its own: {own}")


def _tell_other_base(here: Workspace, agent_id: str) -> None:
    """Say that turns will be refused under the recipe that holds now: it names another base."""
    from rlhf_pipeline.registry.bases import both_told, held_against

    versions = here.ledger.versions(agent_id)
    if not versions:
        return
    settings, made_from = here.settings_of(agent_id), versions[0].lineage
    told, why = both_told(settings, agent_id, made_from), ""
    try:
        is_other = held_against(settings, made_from) == "other"
    except RegistryError as error:
        is_other, why = True, f" ({error})"
    if is_other:
        typer.echo(f"{agent_id}'s turns will be refused: {told}{why}", err=True)


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
