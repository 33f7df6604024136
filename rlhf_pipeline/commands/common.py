"""What every command shares: the state it works on, its settings options, how it fails.

Nothing heavy is imported before a command needs it: `rlhf --help` answers in a moment.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import click
import typer
from click.core import ParameterSource
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.models import ArgumentInfo

from rlhf_pipeline.errors import ConfigError, FeedbackRefused, PipelineError, RegistryError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn

    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.database import Database
    from rlhf_pipeline.feedback.claims import ClaimBook
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.records import Prompt
    from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
    from rlhf_pipeline.registry.models import ModelRegistry

SOME_QUARANTINED = 3
"""Exit code of an ingest that took what was sound and set the rest aside."""

PIPE_WIDTH = 200  # columns of a table that goes to a file or another program

UNFIT = (ValueError, KeyError, TypeError, AttributeError, RecursionError, FeedbackRefused)
"""What a line of JSON that is not what a command takes may fail with."""

MOST_SEED = 2**31 - 1  # as of training.seed

Agent = Annotated[
    str,
    typer.Option("--agent", "-a", envvar="RLHF_AGENT", help="The assistant, by its agent's name."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace what is there already, a folder wholly.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
VersionArgument = Annotated[
    str,
    typer.Argument(
        metavar="VERSION",
        help="A number, champion, challenger, previous, baseline, or models:/rlhf-AGENT/3.",
    ),
]


def numbered_lines(path: Path, of: str, wanted: str) -> list[tuple[int, str]]:
    """Return a text file's lines that are not blank, with their numbers from 1.

    `of` says what the file is of, `wanted` what a line is. Raises ConfigError where there is no
    such file or no such line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # U+2028 is within a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a UTF-8 file of {of} is needed at {path}, found none ({error}); check the path"
        ) from error
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"needed {wanted} in {path}, one a line, found none; write some")
    return found


def prompt_in(values: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a line's object, by `prompt` or `messages`; raises UNFIT for none."""
    from rlhf_pipeline.feedback.formats import messages_of

    name = "messages" if values.get("prompt") is None else "prompt"  # pandas writes nulls
    prompt = messages_of(values[name], name)
    for message in prompt:
        message.content.encode()  # half a sign, as of an emoji cut in two, cannot be written
    return prompt


def lines_there(
    out: Path, expected: Sequence[Any], told_of: Callable[[Any], Any], whose: str
) -> int:
    """Return how many whole lines of JSON `out` holds; a last one that broke off is cut away.

    `told_of` takes from a line what must be as `expected` of its place, `whose` says so in words.
    Raises ConfigError where it is not, or what there is was not written line by line by a command
    whose lines begin with their number.
    """
    if not out.exists():
        return 0
    if not out.is_file():  # a pipe has no end to read to
        raise ConfigError(f"--out must be a file, found a folder, pipe or device at {out}")
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.decode("utf-8", "replace").split("\n")[:-1]
    broken = content[len(whole) :]
    begins = json.dumps({"number": len(lines) + 1})[:-1].encode()
    if broken[: len(begins)] != begins[: len(broken)]:
        raise _foreign(out, len(lines), broken.decode("utf-8", "replace"))
    for i, line in enumerate(lines):
        try:
            told = told_of(json.loads(line))
        except UNFIT as error:
            raise _foreign(out, i, line) from error
        if i >= len(expected) or told != expected[i]:
            raise ConfigError(
                f"{out} must hold {whose}, found another in line {i + 1}; name another file"
            )
    if broken:
        os.truncate(out, len(whole))
    return len(lines)


def _foreign(out: Path, i: int, line: str) -> ConfigError:
    return ConfigError(
        f"--out must be a new file or one this command began, found {line[:60]!r} in line "
        f"{i + 1} of {out}; name another file"
    )


def _settings_options() -> list[click.Parameter]:
    """Return the options every command takes, before or after its name."""

    def option(*names: str, **attributes: Any) -> TyperOption:
        return TyperOption(
            param_decls=list(names),
            expose_value=False,
            callback=_remember,
            rich_help_panel="Settings",
            **attributes,
        )

    return [
        option(
            "--recipe",
            envvar="RLHF_RECIPE",
            show_envvar=True,
            metavar="NAME|FILE",
            help="A recipe that comes with the project, or a YAML file. Default: tiny.",
        ),
        option(
            "--state",
            envvar="RLHF_STATE_DIR",
            show_envvar=True,
            metavar="FOLDER",
            help="The folder all state lives in. Default: the recipe's, ./state.",
        ),
        option("--debug", is_flag=True, help="Show log lines, and the traceback of an error."),
    ]


def _remember(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Keep the value for `workspace()`; what was typed wins over what the environment says."""
    key = f"rlhf.{option.name}"
    typed = option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    if value and (typed or key not in context.meta):
        context.meta[key] = value
    return value


class Command(TyperCommand):
    """A command with the settings options, that says in one line what went wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._describe_arguments()
        self.params.extend(_settings_options())

    def _describe_arguments(self) -> None:
        """Give arguments their help back: click 8.5 clears what typer 0.25 set before it.

        To be deleted when typer passes `help` on to click.
        """
        hints = get_type_hints(self.callback, include_extras=True)
        for parameter in self.params:
            for described in getattr(hints.get(parameter.name or ""), "__metadata__", ()):
                if isinstance(described, ArgumentInfo):
                    parameter.help = described.help

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error it foresees becomes a line on stderr and exit code 1."""
        debug = bool(ctx.meta.get("rlhf.debug"))
        _quiet_logs(debug)
        try:
            for parameter in self.params:
                typed = ctx.params.get(parameter.name or "")
                if isinstance(typed, str):
                    need_whole(typed, parameter.opts[0], "type it again")
            return super().invoke(ctx)
        except Exception as error:
            if debug or not is_foreseen(error):
                raise
            typer.echo(f"error: {told_of(error)}", err=True)
            raise typer.Exit(1) from error


MAKE = {"train": "make train AGENT=name", "ui": "make ui", "demo": "make demo"}
"""What goes through Dagster, which nothing here imports: words that people try all the same."""


class Group(TyperGroup):
    """The program itself: takes the settings options before the command's name as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(_settings_options())

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; raises UsageError naming the make target where that does it."""
        if args[0] in MAKE:
            raise click.UsageError(
                f"needed a command of rlhf, found {args[0]!r}; in the project's folder "
                f"`{MAKE[args[0]]}` does it",
                ctx,
            )
        return super().resolve_command(ctx, args)


class Workspace:
    """The store, ledger and registry behind a recipe and a state folder, opened when asked for.

    With `is_there` the state folder is not made: opening them raises ConfigError where it is not.
    """

    def __init__(
        self, recipe: str | None = None, state: str | None = None, *, is_there: bool = False
    ) -> None:
        self.recipe = recipe
        self.state = state
        self.is_there = is_there

    def load(self, recipe: str | None) -> Settings:
        """Return the settings of a recipe, in this workspace's state folder."""
        from rlhf_pipeline.config import load_settings

        return load_settings(recipe, {"state_dir": self.state} if self.state else None)

    @cached_property
    def settings(self) -> Settings:
        """Return the resolved settings."""
        return self.load(self.recipe)

    def settings_of(self, agent_id: str) -> Settings:
        """Return the settings; an agent that was given a recipe of its own has that one's."""
        from rlhf_pipeline.config import own_settings

        return own_settings(self.settings, self.store.recipe_of(agent_id))

    @cached_property
    def database(self) -> Database:
        """Return the one database of this state folder."""
        from rlhf_pipeline.database import open_database

        folder = self.settings.state_dir
        if self.is_there and self.settings.database_url is None and not folder.exists():
            raise ConfigError(
                f"needed a state folder, found none at {folder}; name another with --state, or "
                "make one with `rlhf ingest`"
            )
        return open_database(self.settings.resolved_database_url).reached()

    @cached_property
    def store(self) -> FeedbackStore:
        """Return the feedback store."""
        from rlhf_pipeline.feedback.store import FeedbackStore

        return FeedbackStore(self.database)

    @cached_property
    def claims(self) -> ClaimBook:
        """Return the claims table."""
        from rlhf_pipeline.feedback.claims import ClaimBook

        return ClaimBook(self.database)

    @cached_property
    def ledger(self) -> PromotionLedger:
        """Return the promotion ledger."""
        from rlhf_pipeline.registry.ledger import PromotionLedger

        return PromotionLedger(self.database, self.settings.state_dir)

    @cached_property
    def registry(self) -> ModelRegistry:
        """Return the registry; MLflow itself is imported at the first call that talks to it."""
        from rlhf_pipeline.registry.models import ModelRegistry

        settings = self.settings
        return ModelRegistry(self.ledger, settings.resolved_mlflow_uri, settings.mlflow_folder)

    def knows(self, agent_id: str) -> bool:
        """Say whether the agent has sent feedback or has a version."""
        return self.store.agent(agent_id) is not None or bool(self.ledger.versions(agent_id))

    def known_beside(self, agent_id: str) -> list[str]:
        """Return the agents there are where this one is new, to tell; none where it is known."""
        return [] if self.knows(agent_id) else self.store.agents()

    def known(self) -> str:
        """Return the agents there are, for a message; where there are none it may be the folder."""
        return ", ".join(self.store.agents()) or f"none yet in {self.settings.state_dir}"

    def need_agent(self, agent_id: str) -> None:
        """Raise FeedbackRefused unless the agent has sent feedback or has a version."""
        if self.store.agent(agent_id) is not None:
            return
        if not self.ledger.versions(agent_id):
            raise FeedbackRefused(
                "unknown_agent",
                f"needed a known agent, found {agent_id!r}; known: {self.known()}; "
                "`rlhf ingest` makes one known",
            )
        self.store.ensure_agent(agent_id)

    def version(self, agent_id: str, name: str) -> ModelVersion:
        """Return the version a person means: a number, a name, or a models:/ URI of the agent."""
        if not self.ledger.versions(agent_id):
            raise RegistryError(
                f"agent {agent_id!r} needs a version, found none registered (known agents: "
                f"{self.known()}); its first turn trains one: `make train AGENT={agent_id}`"
            )
        if not name.startswith("models:/"):
            return self.ledger.find(agent_id, name)
        found = self.registry.find(name)
        if found.agent_id != agent_id:
            raise RegistryError(
                f"needed a version of agent {agent_id!r}, found {name}; say --agent "
                f"{found.agent_id} or name another version"
            )
        return found


def workspace(*, may_be_new: bool = False) -> Workspace:
    """Return the workspace that the running command's options name.

    Its state folder is there already, but for a command that may begin a new one: one that is run
    in another folder, or with a misspelt --state, leaves nothing behind.
    """
    meta = click.get_current_context().meta
    return Workspace(meta.get("rlhf.recipe"), meta.get("rlhf.state"), is_there=not may_be_new)


def finite(value: float | None) -> float | None:
    """Return an option's number. Raises BadParameter for nan, which is in every range."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"needed a number, found {value}")
    return value


def need_name(agent_id: str) -> None:
    """Raise BadParameter for a name that no agent can have."""
    from rlhf_pipeline.feedback.rules import AGENT_ID

    if not AGENT_ID.fullmatch(agent_id):
        raise typer.BadParameter(
            "needed 1 to 64 letters, digits, - and _, the first a letter or digit, found "
            f"{ascii(agent_id)[:80]}",
            param_hint="--agent",
        )


def need_whole(text: str, where: str, remedy: str) -> None:
    """Raise ConfigError for half a character: no tokenizer takes it, and no database keeps it.

    Python reads a byte that is no UTF-8 so, and JSON has halves of emojis.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[max(0, error.start - 20) : error.end]  # with what stands before, to find it by
        raise ConfigError(
            f"needed whole UTF-8 characters in {where}, found {found!a}; {remedy}"
        ) from error


def tell_new(agent_id: str, others: Sequence[str]) -> None:
    """Say that an agent is new beside others: a misspelt name makes one too."""
    typer.echo(f"{agent_id} is a new agent; known before: {', '.join(others)}", err=True)


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, and wide enough for tables elsewhere."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPE_WIDTH
    return made


def progress(*columns: ProgressColumn) -> Bars:
    """Return progress bars on stderr that leave nothing behind; none where nobody watches."""
    from rich.progress import Progress

    watched = console(stderr=True)
    return Progress(*columns, console=watched, transient=True, disable=not watched.is_terminal)


OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys in place of showing it: control signs but tabs and line ends, turns of
the direction of writing."""


def inert(text: str) -> str:
    """Return what somebody or a model wrote without what a terminal would obey."""
    return OBEYED.sub(" ", text)


def actor() -> str:
    """Return who the ledger says did it."""
    try:
        return f"person:{getpass.getuser()}"
    except (OSError, KeyError):  # a container's user without a name
        return f"person:{os.getuid()}"


def one_line(error: BaseException) -> str:
    """Return the error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def is_foreseen(error: Exception) -> bool:
    """Say whether the message alone tells what to do: ours, a file's or a database's trouble."""
    if isinstance(error, BrokenPipeError | click.exceptions.ClickException | click.exceptions.Exit):
        return False  # click's own
    if isinstance(error, PipelineError | OSError) or _damage(error) is not None:
        return True
    # SQLAlchemy's, or SQLite's as it is; the other is of a connection that was cut while it read
    away = type(error).__name__ in ("OperationalError", "InterfaceError")
    return away or _is_for_reading(_drivers(error))


def told_of(error: Exception) -> str:
    """Return what went wrong and what to do, on one line."""
    from rlhf_pipeline.files import no_room

    said, file = one_line(_drivers(error)), _file_of(error)
    if _damage(error) is not None:
        remedy = "put the state folder aside and take one back with `rlhf restore`"
        if file.endswith("/mlflow/mlflow.db"):
            remedy = (
                "the store is another: end what uses this file and put it aside; MLflow begins a "
                "new one, and the next `rlhf promote` or `rlhf rollback` tells it the versions"
            )
        found = f"found {file}" if file else "found"
        return f"needed a sound database, {found}: {said}; {remedy}"
    if file and _is_held(_drivers(error)):
        return (
            f"needed {file} to be free, found: {said}; end the program that holds it, or wait for "
            "it, and do it again"
        )
    if full := no_room(_drivers(error), file):
        return full
    if _is_for_reading(_drivers(error)):
        return (
            f"needed a database that may be written to, found: {said}; see its "
            "default_transaction_read_only, and whether database_url names a standby"
        )
    if _is_closed(_drivers(error)):
        return f"needed files that can be read and written, found: {said}; mend it or name others"
    return said


def _damage(error: Exception) -> Exception | None:
    """Return what SQLite says of a file that is no database, or not a whole one."""
    import sqlite3

    found = _drivers(error)
    return found if type(found) is sqlite3.DatabaseError else None


def _drivers(error: Exception) -> Exception:
    """Return what the database's driver said, where SQLAlchemy puts the statement beside it."""
    found: Exception = getattr(error, "orig", None) or error
    return found


def _file_of(error: Exception) -> str:
    """Return the SQLite file that an error is about, as database.py notes it; else ""."""
    notes: list[str] = getattr(error, "__notes__", [])
    return notes[0] if notes else ""


def _is_held(error: Exception) -> bool:
    import sqlite3

    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_BUSY


def _is_for_reading(error: Exception) -> bool:
    """Say whether PostgreSQL takes no writes, which is no OperationalError to its driver."""
    return getattr(error, "pgcode", None) == "25006"


def _is_closed(error: Exception) -> bool:
    """Say whether the system refused a path: another's, of another kind, or not to be written."""
    import sqlite3

    if isinstance(error, OSError):
        return error.filename is not None
    code = getattr(error, "sqlite_errorcode", 0)  # its low byte says what, the others why
    return code & 0xFF == sqlite3.SQLITE_READONLY


def _quiet_logs(debug: bool) -> None:
    """Send log lines to stderr: warnings, and with --debug everything."""
    import structlog

    from rlhf_pipeline.logs import Lines, plain_lines

    level = logging.DEBUG if debug else logging.WARNING
    structlog.configure(
        processors=plain_lines(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: Lines(),
    )
    if not debug:
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")


def need_new(path: Path, *, force: bool) -> None:
    """Raise ConfigError where something is at the path already, unless it may be replaced."""
    if force or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    raise ConfigError(
        f"needed a new file or folder, found something at {path}; choose another name, or replace "
        "it with --force"
    )


def need_outside(path: Path, state_dir: Path) -> None:
    """Raise ConfigError where writing to the path could replace what the state folder holds."""
    path, state_dir = path.resolve(), state_dir.resolve()
    if path in (state_dir, *state_dir.parents) or state_dir in path.parents:
        raise ConfigError(
            f"needed a file or folder outside the state folder {state_dir}, found {path}, and "
            "what is written there might replace votes and models; choose another name"
        )


def need_file(path: Path) -> Path:
    """Return the path; raises ConfigError where there is no such file."""
    if not path.is_file():
        raise ConfigError(f"needed a YAML file, found none at {path}; check the path")
    return path
