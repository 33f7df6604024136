"""`rlhf`: the product without the UI. Each command lives in commands/; here they get their names.

Exit codes: 0 done; 1 refused or failed, with one line on stderr that says what was needed, found
and to do; 2 the command line itself is wrong; 3 `rlhf ingest` set some rows aside.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from rlhf_pipeline.commands import (
    agents,
    chat,
    experiment,
    feedback,
    keys,
    models,
    raters,
    score,
    serve,
    settings,
    simulate,
    state,
    tokenizer,
    training,
)
from rlhf_pipeline.commands.common import Command, Group

app = typer.Typer(
    cls=Group,
    help="People's feedback on a chat assistant in; a better, gated, registered model out.\n\n"
    "`rlhf ingest votes.jsonl --agent tea` takes feedback in, `make train AGENT=tea` trains a turn "
    "from it, `rlhf chat --agent tea` talks to what came out. With `make ui` running, turns start "
    "by themselves and everything is in a browser.",
    epilog="Exit codes: 0 done, 1 refused or failed (one line on stderr says why), 2 wrong usage, "
    "3 ingest set rows aside. Settings: --recipe and --state, or RLHF_RECIPE and RLHF_STATE_DIR.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # paragraphs of a docstring flow
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does
    context_settings={"help_option_names": ["-h", "--help"]},
)
feedback_out = typer.Typer(
    no_args_is_help=True,
    help="Copy feedback out of the store, take a file's back, see what was set aside.",
)
access = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")
people = typer.Typer(no_args_is_help=True, help="What is held about one person, shown or erased.")
experiments = typer.Typer(no_args_is_help=True, help="A challenger among people, measured.")
config = typer.Typer(no_args_is_help=True, help="Show and check settings and recipes.")

FEEDBACK, MODELS, TRAINING, AUTOMATION = "Feedback", "Models", "Training", "Automation"
STATE = "State"
SETTINGS = "Settings and recipes"

COMMANDS: tuple[tuple[Callable[..., None], str, str], ...] = (
    (feedback.ingest, FEEDBACK, "rlhf ingest votes.jsonl exports/ --agent tea"),
    (simulate.simulate, FEEDBACK, "rlhf simulate --agent demo --events 500 --seed 7"),
    (chat.chat, MODELS, 'rlhf chat --agent demo --once "how much is the lamp?"'),
    (serve.serve, MODELS, "rlhf serve --port 8080"),
    (tokenizer.tokenizer, MODELS, "rlhf tokenizer tiktoken:cl100k_base"),
    (models.versions, MODELS, "rlhf versions --agent demo"),
    (models.promote, MODELS, 'rlhf promote challenger --agent demo --reason "reads better"'),
    (models.rollback, MODELS, 'rlhf rollback --agent demo --reason "rude to customers"'),
    (
        models.reset_baseline,
        MODELS,
        'rlhf reset-baseline --agent demo --reason "shorter answers are what we want"',
    ),
    (models.explain, MODELS, "rlhf explain champion --agent demo"),
    (models.reproduce, MODELS, "rlhf reproduce champion --agent demo"),
    (models.export, MODELS, "rlhf export champion ./demo-model --agent demo"),
    (score.score, MODELS, "rlhf score replies.jsonl --reward length --out scores.jsonl"),
    (training.plan, TRAINING, "rlhf plan gpt2"),
    (training.tune, TRAINING, "rlhf tune --agent demo --trials 8 --updates 20"),
    (training.specialise, TRAINING, "rlhf specialise --recipe specialists --out ./agents"),
    (agents.status, AUTOMATION, "rlhf status"),
    (agents.pause, AUTOMATION, 'rlhf pause --agent demo --reason "moving house"'),
    (agents.resume, AUTOMATION, "rlhf resume --agent demo"),
    (agents.automatic, AUTOMATION, "rlhf automatic on --agent demo"),
    (state.backup, STATE, "rlhf backup /backups/2026-11-21"),
    (state.restore, STATE, "rlhf restore /backups/2026-11-21 --state ./state"),
    (state.moved, STATE, "rlhf moved --state ./state"),
    (state.prune, STATE, "rlhf prune --dry-run"),
)
for function, panel, example in COMMANDS:
    app.command(cls=Command, rich_help_panel=panel, epilog=f"Example: {example}")(function)
CONFIG_COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (settings.show, "rlhf config show --recipe tiny"),
    (settings.explain, "rlhf config explain reward"),
    (settings.check, "rlhf config check my-recipe.yaml"),
    (settings.recipes, "rlhf config recipes"),
    (settings.use, "rlhf config use my-recipe.yaml --agent demo"),
)
for function, example in CONFIG_COMMANDS:
    config.command(cls=Command, epilog=f"Example: {example}")(function)
KEY_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("create", keys.create, "rlhf keys create --role client --agent demo --days 90"),
    ("list", keys.show, "rlhf keys list"),
    ("revoke", keys.revoke, "rlhf keys revoke 0123456789ab"),
)
for word, function, example in KEY_COMMANDS:
    access.command(word, cls=Command, epilog=f"Example: {example}")(function)
RATER_COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (raters.export, "rlhf raters export customer-17 --out customer-17.json"),
    (raters.erase, "rlhf raters erase customer-17"),
)
for function, example in RATER_COMMANDS:
    people.command(cls=Command, epilog=f"Example: {example}")(function)
FEEDBACK_COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (feedback.export, "rlhf feedback export votes.jsonl --agent demo"),
    (feedback.withdraw, "rlhf feedback withdraw --agent demo --file votes.jsonl"),
    (feedback.quarantine, "rlhf feedback quarantine --agent demo --rule value_out_of_range"),
)
for function, example in FEEDBACK_COMMANDS:
    feedback_out.command(cls=Command, epilog=f"Example: {example}")(function)
EXPERIMENT_COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (experiment.start, "rlhf experiment start --agent demo --version 3"),
    (experiment.status, "rlhf experiment status --agent demo"),
    (experiment.stop, 'rlhf experiment stop --agent demo --reason "a complaint"'),
    (experiment.offline, "rlhf experiment offline baseline champion --agent demo --prompts 100"),
)
for function, example in EXPERIMENT_COMMANDS:
    experiments.command(cls=Command, epilog=f"Example: {example}")(function)
app.add_typer(experiments, name="experiment", rich_help_panel=MODELS)
app.add_typer(feedback_out, name="feedback", rich_help_panel=FEEDBACK)
app.add_typer(people, name="raters", rich_help_panel=FEEDBACK)
app.add_typer(access, name="keys", rich_help_panel=STATE)
app.add_typer(config, name="config", rich_help_panel=SETTINGS)


@app.callback()
def rlhf() -> None:
    """Take the settings options before a command's name."""


def main() -> None:
    """Run the command line."""
    app(prog_name="rlhf")


if __name__ == "__main__":
    main()
