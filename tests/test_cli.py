"""The command line, as a person and a script meet it: words, exit codes, one line for an error."""

from __future__ import annotations

import errno
import io
import json
import re
import resource
import shlex
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import structlog
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from rlhf_pipeline import backup, database
from rlhf_pipeline.cli import app
from rlhf_pipeline.commands import agents, conversation, models
from rlhf_pipeline.commands.batch import read_prompts
from rlhf_pipeline.commands.common import OBEYED, Workspace, lines_there
from rlhf_pipeline.commands.conversation import Conversation
from rlhf_pipeline.commands.feedback import _bytes_of
from rlhf_pipeline.commands.score import read_items
from rlhf_pipeline.config import PPO_PRESETS, PRESETS, RECIPES, Settings, recipe_names
from rlhf_pipeline.database import open_database
from rlhf_pipeline.errors import ConfigError, PipelineError, RegistryError
from rlhf_pipeline.experiment import offline
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.experiment.decision import GUARDRAILS, PRIMARY, SIGN, Arms, decide
from rlhf_pipeline.experiment.sequences import Sample
from rlhf_pipeline.feedback import formats
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.inbox import Refused, keep_refused, left_in, stamp_of
from rlhf_pipeline.feedback.snapshot import newest_seq
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.records import as_messages, hash_rater, now, user_prompt
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.registry.reproduce import Reproduction
from rlhf_pipeline.reward.settings import PRESETS as REWARD_PRESETS
from tests.evaluation.test_gate import report

HEAVY = (
    "torch transformers great_expectations evidently mlflow peft trl dagster datasets pandas "
    "fastapi gradio matplotlib accelerate"
).split()
THUMBS = '{"kind": "thumbs", "value": "up", "prompt": "Why?", "completion": "Because."}\n'
ROOT = Path(__file__).parents[1]

Run = Callable[..., Result]


@pytest.fixture
def rlhf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Run one command in a state folder of the test's own."""
    for name in ("RECIPE", "DATABASE_URL", "MLFLOW_URI", "WEBHOOK", "AGENT"):
        monkeypatch.delenv(f"RLHF_{name}", raising=False)
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()

    def run(*words: str, typed: str | bytes | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(app, list(words), input=typed)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    yield run
    for state in tmp_path.glob("**/feedback.db"):
        open_database(f"sqlite:///{state}").close()


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def every_command() -> dict[str, click.Command]:
    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    found: dict[str, click.Command] = {}
    for name, command in root.commands.items():
        if isinstance(command, click.Group):
            found |= {f"{name} {sub}": each for sub, each in command.commands.items()}
        else:
            found[name] = command
    return found


# -- help ---------------------------------------------------------------------------------------


def test_every_command_of_the_design_that_is_there_has_its_name() -> None:
    assert set(every_command()) >= set(
        "ingest chat versions promote rollback explain export pause resume automatic status "
        "simulate".split()
    ) | {"config show", "config check", "config recipes"}


@pytest.mark.parametrize("name", every_command())
def test_every_command_explains_itself_and_its_example_holds(name: str, rlhf: Run) -> None:
    told = rlhf(*name.split(), "--help").stdout
    command = every_command()[name]
    assert len(command.help or "") > 30
    example = (command.epilog or "").removeprefix("Example: ")
    assert example.startswith(f"rlhf {name}")
    assert example in " ".join(told.split())
    words = shlex.split(example)[1 + len(name.split()) :]
    command.make_context(name, words)  # raises where the command would not take it
    for parameter in command.params:
        if parameter.name != "help" and not isinstance(parameter.type, click.Choice):
            assert getattr(parameter, "help", None), f"{name} {parameter.name} says nothing"


def test_an_agent_is_named_the_same_way_everywhere() -> None:
    named = {
        name: parameter
        for name, command in every_command().items()
        for parameter in command.params
        if parameter.name == "agent"
    }
    assert len(named) > 20
    assert {tuple(parameter.opts) for parameter in named.values()} == {("--agent", "-a")}


def test_help_names_the_exit_codes_and_where_settings_come_from(rlhf: Run) -> None:
    told = " ".join(rlhf("--help").stdout.split())
    words = (
        "RLHF_RECIPE",
        "RLHF_STATE_DIR",
        "3 ingest set rows aside",
        "--debug",
        "make train AGENT=",
    )
    for word in words:
        assert word in told
    assert "3 when some were quarantined" in " ".join(rlhf("ingest", "-h").stdout.split())


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


@pytest.mark.parametrize("words", [["--help"], ["chat", "--help"], ["config", "recipes"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    loaded = run_python(
        f"import sys; sys.argv = ['rlhf', *{words}]\n"
        "from rlhf_pipeline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    assert not set(loaded.splitlines()[-1].split()) & set(HEAVY)


# -- errors and settings ------------------------------------------------------------------------


def test_what_is_refused_is_one_line_on_stderr(rlhf: Run) -> None:
    result = rlhf("versions", "--agent", "tea", code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("error: agent 'tea' needs a version, found none registered")
    assert "; its first turn trains one: `make train AGENT=tea`\n" in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize(
    "words", ["chat -a tea --once", "tokenizer no.tiktoken --text", "versions --agent"]
)
def test_bytes_on_the_command_line_that_are_no_text_are_one_line(words: str, rlhf: Run) -> None:
    told = rlhf(*words.split(), b"caf\xe9".decode("utf-8", "surrogateescape"), code=1).stderr
    named = words.split()[-1]
    assert told == (
        f"error: needed whole UTF-8 characters in {named}, found 'caf\\udce9'; type it again\n"
    )


def test_debug_shows_where_it_happened(rlhf: Run) -> None:
    for words in (["--debug", "versions", "-a", "tea"], ["versions", "-a", "tea", "--debug"]):
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, RegistryError)


def test_a_logged_exception_shows_no_variables(
    rlhf: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(prompt: str) -> None:
        raise ValueError(f"{len(prompt)} characters are too many")

    written = " ".join(["what", "somebody", "wrote"])  # so that no line of code holds it
    rlhf("config", "recipes")
    try:
        answer(written)
    except ValueError:
        structlog.get_logger().exception("decoding failed", rows=1)
    told = capsys.readouterr().err
    assert "in answer" in told
    assert "19 characters are too many" in told
    assert written not in told


def test_a_log_on_a_full_disk_ends_nothing(rlhf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    rlhf("config", "recipes")
    log = structlog.get_logger()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Full())
        log.error("reply not stored", why="OperationalError")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", with_room := io.StringIO())
        log.error("champion not sound")
    assert "champion not sound" in with_room.getvalue()


def test_a_wrong_command_line_is_another_code(rlhf: Run) -> None:
    assert "Missing option '--agent'" in rlhf("versions", code=2).stderr
    assert "on" in rlhf("automatic", "perhaps", "--agent", "tea", code=2).stderr
    assert "needed --agent too" in rlhf("explain", "1", code=2).stderr
    named = ("explain", "1", "--agent", "tea", "--version", "2")
    assert "found version 1" in rlhf(*named, code=2).stderr
    rlhf("nonsense", code=2)
    for typed, meant in ((("chatt",), "chat"), (("config", "shwo"), "show")):
        told = rlhf(*typed, code=2).stderr
        assert told.count("Did you mean") == 1
        assert f"Did you mean '{meant}'" in told
    told = rlhf("train", "--agent", "tea", code=2).stderr
    assert "`make train AGENT=name` does it" in " ".join(told.replace("│", " ").split())
    rlhf("simulate", "--agent", "tea", "--events", "0", code=2)


def test_a_database_that_is_not_there_is_one_line(
    rlhf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_DATABASE_URL", "postgresql://me:hunter2@127.0.0.1:9/rlhf")
    (line,) = rlhf("status", code=1).stderr.splitlines()
    assert line.startswith("error: needed a database that answers, found postgresql")
    assert "refused" in line
    assert "sqlalche" not in line
    assert "hunter2" not in line
    monkeypatch.setenv("RLHF_DATABASE_URL", "nonsense")
    (line,) = rlhf("status", code=1).stderr.splitlines()
    assert "URL" in line


def test_what_is_typed_wins_over_the_environment_before_and_after_the_command(
    rlhf: Run, tmp_path: Path
) -> None:
    other = str(tmp_path / "other")
    Path(other).mkdir()
    for words in (["--state", other, "status"], ["status", "--state", other]):
        assert f"no agent in {other} yet" in rlhf(*words).stdout
    assert f"no agent in {tmp_path}/state yet" in rlhf("status").stdout
    shown = rlhf("--recipe", "gpt2", "config", "show").stdout
    assert "base: gpt2" in shown
    assert "base: gpt2" in rlhf("config", "show", "--recipe", "gpt2").stdout


def test_the_settings_of_an_agent_that_nobody_knows_are_shown_as_a_new_ones(rlhf: Run) -> None:
    assert rlhf("config", "show", "--agent", "shop").stderr == ""  # nobody is known yet
    Workspace().store.ensure_agent("shop")
    assert rlhf("config", "show", "--agent", "shop").stderr == ""
    told = rlhf("config", "show", "--agent", "shoop").stderr
    assert told == "shoop is a new agent; known before: shop\n"
    rlhf("config", "show", "--agent", "the shop", code=2)


def test_a_number_that_is_none_is_in_no_range(rlhf: Run) -> None:
    for words in (
        ("chat", "--agent", "tea", "--once", "Hi.", "--temperature", "nan"),
        ("chat", "--agent", "tea", "--once", "Hi.", "--seed", "99999999999999999999"),
        ("keys", "create", "--days", "nan"),
    ):
        assert words[-2] in rlhf(*words, code=2).stderr


def test_a_state_folder_that_is_not_there_is_not_made(
    rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    named = ("--agent", "tea", "--state", str(gone))
    for command in (["status"], ["versions"], ["explain", "champion"]):
        told = rlhf(*command, *named, code=1).stderr
        assert told.startswith(f"error: needed a state folder, found none at {gone}; name another")
        assert not gone.exists()
    monkeypatch.chdir(tmp_path / "state")  # not the folder that has ./state in it
    monkeypatch.delenv("RLHF_STATE_DIR")
    for command in (["status"], ["prune", "--dry-run"], ["raters", "export", "ann"]):
        assert f"none at {tmp_path}/state/state; name" in rlhf(*command, code=1).stderr
    rlhf("keys", "revoke", "0123456789ab", code=1)
    assert list((tmp_path / "state").iterdir()) == []
    rlhf("keys", "create", *named)  # this and ingest may begin one
    new = ("--agent", "tea", "--state", str(tmp_path / "new"))
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), *new)
    rlhf("status", *new)


# -- config -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_shown_is_a_recipe_itself(name: str, rlhf: Run, tmp_path: Path) -> None:
    shown = rlhf("config", "show", "--recipe", name).stdout
    path = write(tmp_path / "shown.yaml", shown)
    assert "sound" in rlhf("config", "check", str(path)).stdout
    again = rlhf("config", "show", "--recipe", str(path)).stdout
    assert again == shown


def test_a_mistake_in_a_recipe_is_named(rlhf: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "ppo: {updats: 3}")
    (line,) = rlhf("config", "check", str(path), code=1).stderr.splitlines()
    assert "the nearest right one is 'ppo.updates'" in line
    path = write(tmp_path / "broken.yaml", "{\n a: [")
    (line,) = rlhf("config", "check", str(path), code=1).stderr.splitlines()
    assert "is not YAML" in line
    tiny = (RECIPES / "tiny.yaml").read_text()
    path = write(tmp_path / "twice.yaml", f"{tiny}\nreward:\n  kinds: {{thumbs: 1}}\n")
    assert "found 'reward' again" in rlhf("config", "check", str(path), code=1).stderr
    assert "found none at" in rlhf("config", "check", str(tmp_path / "no.yaml"), code=1).stderr


@pytest.mark.parametrize("section", ["policy", "reward"])
def test_a_model_folder_that_is_not_there_is_named(section: str, rlhf: Run, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    path = write(tmp_path / "mine.yaml", f"{section}: {{base: {gone}}}")
    (line,) = rlhf("config", "check", str(path), code=1).stderr.splitlines()
    assert f"mine.yaml: {section}.base: a model folder is needed, found none at {gone}" in line


def test_files_that_a_turn_would_not_find_are_named(
    rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sections = "sft: {{seed_conversations: {0}}}\nfeedback: {{gold_questions: {0}}}"
    path = write(tmp_path / "mine.yaml", sections.format("mine.yaml"))  # a turn is elsewhere
    (line,) = rlhf("config", "check", str(path), code=1).stderr.splitlines()
    for setting in ("sft.seed_conversations", "feedback.gold_questions"):
        assert f"{RECIPES.parent / 'mine.yaml'} ({setting})" in line
    told = rlhf("config", "use", str(path), "--agent", "tea", code=1).stderr
    assert f"{RECIPES.parent / 'mine.yaml'} (feedback.gold_questions)" in told
    for found in (path, "recipes/tiny.yaml"):
        write(path, sections.format(found))
        assert "sound" in rlhf("config", "check", str(path)).stdout
        rlhf("config", "use", str(path), "--agent", "tea")
    write(path, f"reward: {{given: {tmp_path}}}")
    assert (
        f"{tmp_path / 'gate'} (reward.given)" in rlhf("config", "check", str(path), code=1).stderr
    )
    for job in ("proxy", "stopping", "gate"):
        (tmp_path / job).mkdir()
    assert "sound" in rlhf("config", "check", str(path)).stdout


def test_the_prompts_of_specialists_are_looked_through(
    rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where `rlhf specialise` looks from, unlike a turn
    one = "specialists: {{short: {{functions: {{length: {{weight: 1}}}}, prompts: {0}}}}}"
    path = write(tmp_path / "mine.yaml", one.format("mine.jsonl"))
    assert "found none" in rlhf("config", "check", str(path), code=1).stderr
    write(tmp_path / "mine.jsonl", "".join(f'{{"prompt": "q{i}"}}\n' for i in range(8)))
    assert "sound" in rlhf("config", "check", str(path)).stdout
    write(tmp_path / "mine.jsonl", '{"question": "q"}\n')
    assert "mine.jsonl:1 needs" in rlhf("config", "check", str(path), code=1).stderr


def test_secrets_are_not_shown(rlhf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_DATABASE_URL", "postgresql://me:hunter2@db/rlhf")
    monkeypatch.setenv("RLHF_WEBHOOK", "https://hooks.example/hunter2")
    monkeypatch.setenv("RLHF_MLFLOW_URI", "https://me:hunter2@mlflow.example")
    shown = rlhf("config", "show").stdout
    assert "hunter2" not in shown
    assert shown.count("*****") >= 3


def test_settings_are_explained_as_a_recipe_that_can_be_read(rlhf: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(rlhf("config", "explain", "reward").stdout)
    assert "sound" in rlhf("config", "check", str(tmp_path / "mine.yaml")).stdout
    assert "'reward.heads'" in rlhf("config", "explain", "reward.head", code=1).stderr


@pytest.mark.parametrize(
    ("place", "presets"),
    [("presets", PRESETS), ("ppo.preset", PPO_PRESETS), ("reward.preset", REWARD_PRESETS)],
)
def test_a_preset_is_explained_by_what_it_fills_in(
    place: str, presets: Mapping[str, Mapping[str, Any]], rlhf: Run
) -> None:
    lines = rlhf("config", "explain", place).stdout.splitlines()
    assert lines[0].startswith(f"# {place}: ")
    told = yaml.safe_load("\n".join(line.removeprefix("# ") for line in lines[2:]))
    assert told == json.loads(json.dumps({**presets}, default=dict))
    near = rlhf("config", "explain", f"{place}x", code=1).stderr
    assert f"the nearest right one is '{place}'" in near


def test_recipes_are_listed_with_what_they_are_for(rlhf: Run) -> None:
    told = rlhf("config", "recipes").stdout
    assert [name for name in recipe_names() if name in told] == recipe_names()
    assert "LoRA rank 16" in told


# -- ingest and status --------------------------------------------------------------------------


def cells(output: str) -> dict[str, str]:
    """Return the first column of a table and the second."""
    rows = (re.findall(r"│([^│]*)", line) for line in output.splitlines())
    return {row[0].strip(): row[1].strip() for row in rows if len(row) > 1}


HOSTILE = "\x1b]0;title\x07\x1b[2Jgone\x9b31m\u202e"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_terminal_obeys_nothing_that_somebody_wrote(
    rlhf: Run, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr(models, "_reasons", lambda *_: ({"said": HOSTILE}, f"said\n\t{HOSTILE}ok"))
    words = ["--json"] if as_json else []
    shown = rlhf("explain", "interaction", "i-1", *words).stdout
    assert "gone" in shown
    assert not OBEYED.search(shown)
    assert as_json or (shown.startswith("said\n\t") and shown.endswith("ok\n"))


def test_what_a_model_writes_at_the_terminal_is_not_obeyed_and_is_kept_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlhf_pipeline.policy.sampling import Completion

    said = Completion(text=f"hi {HOSTILE}", ids=[1, 2, 3], finished=True)
    monkeypatch.setattr(conversation, "answer", lambda *_: iter([said.text, said]))
    nobody: Any = None
    talk = Conversation("tea", 1, nobody, nobody, 1.0, 0, nobody)
    talk.say("hello")
    assert not OBEYED.search(capsys.readouterr().out)
    assert talk.last is not None
    assert talk.last.completion == said.text


def test_clean_feedback_goes_in_once(rlhf: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "votes.jsonl", THUMBS + THUMBS.replace("up", "down"))
    told = cells(rlhf("ingest", str(path), "--agent", "tea").stdout)
    assert (told["read"], told["stored"], told["quarantined"]) == ("2", "2", "0")
    told = cells(rlhf("ingest", str(path), "--agent", "tea").stdout)
    assert (told["read"], told["stored"], told["already known"]) == ("2", "0", "2")


def test_dirt_is_told_by_rule_with_a_code_of_its_own(rlhf: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "votes.jsonl", THUMBS + "{broken\n[]\n{also broken\n")
    told = cells(rlhf("ingest", str(path), "-a", "tea", code=3).stdout)
    assert (told["stored"], told["quarantined"]) == ("1", "3")
    assert (told["broken_json"], told["not_an_object"]) == ("2", "1")


def test_a_file_that_cannot_be_read(rlhf: Run, tmp_path: Path) -> None:
    empty = rlhf("ingest", str(write(tmp_path / "empty.jsonl", "")), "-a", "tea")
    assert "no row was found in 1 file" in empty.stderr
    (line,) = rlhf("ingest", str(tmp_path / "no.jsonl"), "-a", "tea", code=1).stderr.splitlines()
    assert "check the path" in line
    write(tmp_path / "inbox" / "good.jsonl", THUMBS)
    write(tmp_path / "inbox" / "odd.jsonl", '{"apples": 3}')
    result = rlhf("ingest", str(tmp_path / "inbox"), "-a", "tea", code=3)
    assert cells(result.stdout)["stored"] == "1"
    assert "not read: " in result.stderr
    assert "odd.jsonl" in result.stderr
    good = str(tmp_path / "inbox" / "good.jsonl")
    unknown = rlhf("ingest", good, "-a", "tea", "--format", "csv", code=1)
    assert "found 'csv'" in unknown.stderr


def test_files_of_a_folder_that_are_not_read_are_named(rlhf: Run, tmp_path: Path) -> None:
    folder = tmp_path / "votes"
    write(folder / "good.jsonl", THUMBS)
    for left in (
        ".DS_Store",
        "_SUCCESS",
        ".good.jsonl.crc",
        "good.crc",
        ".git/config",
        "README.md",
    ):
        write(folder / left, "")
    assert "passed over" not in rlhf("ingest", str(folder), "-a", "tea").stderr
    names = ("a.txt", "deep/b.zip", "c.jsonl.zst")
    for name in names:
        write(folder / name, THUMBS)
    write(folder / "state" / "feedback.db", "")
    told = rlhf("ingest", str(folder), "-a", "tea").stderr
    assert "passed over, as they are not named *.jsonl, *.json, " in told
    listed = ", ".join(str(folder / name) for name in sorted(names))
    assert f": {listed}; unpack or rename" in told


def test_the_bar_knows_every_byte_before_the_first_is_read(tmp_path: Path) -> None:
    one = write(tmp_path / "inbox" / "a.jsonl", THUMBS)
    two = write(tmp_path / "inbox" / "deep" / "b.json", THUMBS * 3)
    write(tmp_path / "inbox" / "notes.txt", "not feedback")
    write(tmp_path / "inbox" / ".half-written.jsonl", THUMBS)
    whole = one.stat().st_size + two.stat().st_size
    assert _bytes_of([str(tmp_path / "inbox")]) == whole
    assert _bytes_of([str(tmp_path / "inbox"), str(one)]) == whole + one.stat().st_size


@pytest.mark.parametrize("kept", [5000, 0])
def test_a_damaged_store_is_told_in_one_line(kept: int, rlhf: Run, tmp_path: Path) -> None:
    rlhf("status")
    file = tmp_path / "state" / "feedback.db"
    open_database(f"sqlite:///{file}").close()
    file.write_bytes(file.read_bytes()[:kept] or b"no database" * 500)
    told = rlhf("status", code=1).stderr
    assert told.startswith(f"error: needed a sound database, found {file}: ")
    assert told.endswith("take one back with `rlhf restore`\n")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("command", [["prune", "--dry-run"], ["moved"]])
def test_a_damaged_database_of_mlflows_costs_no_vote(
    command: list[str], rlhf: Run, tmp_path: Path
) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    file = write(tmp_path / "state" / "mlflow" / "mlflow.db", "no database" * 500)
    # Before it, what MLflow logs of opening its database, where a test has imported it before.
    *_, told = rlhf(*command, code=1).stderr.splitlines()
    line = f"error: needed a sound database, found {file}: file is not a database; the store is"
    assert told.startswith(line)
    assert "rlhf restore" not in told


def test_a_database_that_somebody_holds_is_told_by_its_name(
    rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    file = tmp_path / "state" / "feedback.db"
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.001)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        told = rlhf("pause", "--agent", "tea", code=1).stderr
    assert told.startswith(f"error: needed {file} to be free, found: database is locked; end the")


def test_a_path_that_the_system_refuses_is_told_in_one_line(rlhf: Run, tmp_path: Path) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    line = "error: needed files that can be read and written, found: {}; mend it or name others\n"
    store = open_database(f"sqlite:///{tmp_path}/state/feedback.db")
    with store.read() as connection:
        connection.exec_driver_sql("PRAGMA query_only=1")
    told = rlhf("pause", "--agent", "tea", code=1).stderr
    assert told == line.format("attempt to write a readonly database")
    store.close()
    taken = write(tmp_path / "taken", "")
    told = rlhf("feedback", "export", str(taken / "votes.csv"), "--agent", "tea", code=1).stderr
    assert told == line.format(f"[Errno 17] File exists: '{taken}'")


def test_a_server_that_takes_no_writes_is_told_in_one_line(
    rlhf: Run, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_DATABASE_URL", postgres_url)
    store = open_database(postgres_url)
    FeedbackStore(store).ensure_agent("tea")
    with store.write() as connection:
        name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    store.close()
    votes = str(write(tmp_path / "votes.jsonl", THUMBS))
    for words in (["pause", "--agent", "tea"], ["ingest", votes, "--agent", "tea"]):
        told = rlhf(*words, code=1).stderr
        assert told.startswith("error: needed a database that may be written to, found: cannot ")
        assert len(told.splitlines()) == 1
    store.close()


def test_a_full_disk_is_told_in_one_line(
    rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = str(write(tmp_path / "votes.jsonl", THUMBS))
    rlhf("ingest", votes, "--agent", "tea")
    store = open_database(f"sqlite:///{tmp_path}/state/feedback.db")
    with store.read() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count=1")  # as large as it is, and no larger
    large = write(tmp_path / "large.jsonl", THUMBS.replace("Because.", "x" * 100_000))
    line = "error: needed room on the disk, found{}; make room, and do it again\n"
    told = rlhf("ingest", str(large), "--agent", "tea", code=1).stderr
    assert told == line.format(f" {tmp_path}/state/feedback.db: database or disk is full")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    told = rlhf("feedback", "export", str(tmp_path / "o.csv"), "--agent", "tea", code=1).stderr
    assert told == line.format(": [Errno 28] No space left on device")

    def busy(*_: Any) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(backup, "back_up", busy)
    told = rlhf("backup", str(tmp_path / "copy"), code=1).stderr
    assert told == "error: database is locked\n"


@pytest.mark.parametrize("command", [["status"], ["prune", "--dry-run"], ["backup", "copy"]])
def test_a_disk_without_room_for_the_index_of_a_log_is_told_as_full(
    command: list[str], rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite reads nothing then, and says no more than that it could not."""
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    file = tmp_path / "state" / "feedback.db"
    open_database(f"sqlite:///{file}").close()  # its log and the index of that go with it
    if command == ["status"]:
        open_database.cache_clear()  # as a process that has not opened it yet
    command = [str(tmp_path / word) if word == "copy" else word for word in command]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = []
    for free in (0, 2**40):
        room = {file.parent: free}  # and enough where the copy goes
        monkeypatch.setattr(
            "shutil.disk_usage", lambda at, room=room: SimpleNamespace(free=room.get(at, 2**40))
        )
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # no file may be longer
        try:
            told.append(rlhf(*command, code=1).stderr)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    words = f"room on the disk, found {file}: disk I/O error; make room, and do it again"
    assert told[0] == f"error: needed {words}\n"
    assert "disk I/O error" in told[1]
    assert "room on the disk" not in told[1]  # it is something else


def test_a_key_is_for_an_agent_that_can_be(rlhf: Run, tmp_path: Path) -> None:
    told = rlhf("keys", "create", "--agent", "bad name", code=1).stderr
    assert "found 'bad name'" in told
    assert f"no key yet in {tmp_path}/state; " in rlhf("keys", "list").stdout


def test_a_key_may_come_before_its_agents_first_vote(rlhf: Run, tmp_path: Path) -> None:
    create = ("keys", "create", "--agent", "tea")
    early = rlhf(*create)
    assert "nobody has heard of agent tea yet; known: none yet" in early.stderr
    assert len(early.stdout.splitlines()) == 1  # the key alone: a script reads it
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    assert "nobody" not in rlhf(*create).stderr


def test_an_agent_whose_first_file_was_set_aside_whole_is_known(rlhf: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "votes.csv", "kind,prompt,completion,value\nrating,hi,hello,6\n")
    told = rlhf("ingest", str(path), "--agent", "tea", code=3).stdout
    asked = told.splitlines()[-1].partition(": rlhf ")[2].split()  # the words that it says to type
    assert asked == ["feedback", "quarantine", "--agent", "tea"]
    assert "found 6.0" in rlhf(*asked).stdout
    assert cells(rlhf("status").stdout)["quarantine"] == "1 (value_out_of_range 1)"


def test_who_sends_thumbs_alone_is_told_that_they_teach_no_reward(
    rlhf: Run, tmp_path: Path
) -> None:
    path = str(write(tmp_path / "votes.jsonl", THUMBS))
    told = rlhf("ingest", path, "--agent", "tea").stdout
    lacks = cells(rlhf("status").stdout)["reward"]  # its first line
    assert told.splitlines()[-1].startswith(f"no reward yet: {lacks}")
    assert "thumbs 1 would count where reward.kinds names them" in lacks
    teaches = str(write(tmp_path / "mine.yaml", "reward: {kinds: {thumbs: 1}, min_pairs: 1}"))
    rlhf("config", "use", "--agent", "tea", teaches)
    # Of few that did not sign, chance would give some model none.
    more = THUMBS + "".join(THUMBS.replace("Why?", f"{i}?") for i in range(99))
    path = str(write(tmp_path / "votes.jsonl", more))
    told = rlhf("ingest", path, "--agent", "tea").stdout
    assert (
        "no reward yet: 0 preferences and corrections, thumbs 100 liked and 0 not to judge" in told
    )
    pair = '{"prompt": "Why?", "chosen": "Because.", "rejected": "No."}\n'
    path = str(write(tmp_path / "pairs.jsonl", pair + pair.replace("Why?", "When?")))
    told = rlhf("ingest", path, "--agent", "tea").stdout
    assert "probably too few votes: 2 preferences and corrections, thumbs 100 liked" in told
    pairs = "".join(pair.replace("Why?", f"When is {i}?") for i in range(12))
    path = str(write(tmp_path / "pairs.jsonl", pairs))
    assert "no reward yet" not in rlhf("ingest", path, "--agent", "tea").stdout
    assert "reward" not in cells(rlhf("status").stdout)


def test_who_sends_votes_that_nobody_signed_is_told_which_columns_were_left(
    rlhf: Run, tmp_path: Path
) -> None:
    pair = '{"prompt": "Why?", "chosen": "Because.", "rejected": "No.", "by": "ann", "n\\u001b": 1}'
    path = str(write(tmp_path / "pairs.jsonl", f"{pair}\n"))
    told = rlhf("ingest", path, "--agent", "tea").stdout
    assert "1 of 1 rows name no rater: each counts as another person" in told
    assert r"not read were the columns 'by', 'n\x1b'. If" in told
    assert "--map rater=COLUMN" in told
    assert "rater" not in rlhf("ingest", path, "--agent", "new", "--map", "rater=by").stdout
    path = str(write(tmp_path / "votes.jsonl", THUMBS))
    told = rlhf("ingest", path, "--agent", "tea").stdout
    assert "rows name no rater: each counts as another person; no other column is there" in told


def test_the_zone_of_dates_is_told_or_the_recipes(rlhf: Run, tmp_path: Path) -> None:
    row = '{"kind": "thumbs", "value": "up", "prompt": "Why?", "completion": "So.", '
    path = str(write(tmp_path / "votes.jsonl", row + '"occurred_at": "2026-05-01 14:00"}'))
    told = rlhf("ingest", path, "--agent", "tea", code=3).stdout
    assert "or say of which zone such moments are: rlhf ingest --zone Europe/Berlin" in told
    assert "'Mars'" in rlhf("ingest", path, "--agent", "tea", "--zone", "Mars", code=1).stderr
    recipe = str(write(tmp_path / "mine.yaml", "feedback: {names: {zone: Europe/Berlin}}"))
    given = rlhf("ingest", path, "--agent", "coffee", "--recipe", recipe)
    assert cells(given.stdout)["stored"] == "1"
    given = rlhf("ingest", path, "--agent", "tea", "--recipe", recipe, "--zone", "America/Lima")
    assert cells(given.stdout)["stored"] == "1"
    for agent, hour in (("coffee", 12), ("tea", 19)):
        shown = rlhf("feedback", "export", "-", "--agent", agent).stdout
        assert json.loads(shown)["occurred_at"] == f"2026-05-01T{hour}:00:00+00:00"
    bad = str(write(tmp_path / "bad.yaml", "feedback: {names: {zone: Mars}}"))
    assert "found 'Mars'" in rlhf("config", "check", bad, code=1).stderr


def test_who_asks_in_another_folder_is_told_which(
    rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    erase = ("raters", "erase", "nobody", "--yes")
    assert rlhf(*erase, code=1).stderr.endswith(" (known agents: tea)\n")
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    nobody = f"none yet in {tmp_path / 'elsewhere'}"
    for words in (erase, ("raters", "export", "ann"), ("versions", "--agent", "tea")):
        assert f"(known agents: {nobody})" in rlhf(*words, code=1).stderr
    assert f"known: {nobody}; `rlhf ingest`" in rlhf("status", "--agent", "tea", code=1).stderr


def test_an_agent_beside_others_is_told_to_be_new(rlhf: Run, tmp_path: Path) -> None:
    path = str(write(tmp_path / "votes.jsonl", THUMBS))
    assert rlhf("ingest", path, "--agent", "support").stderr == ""
    empty = str(write(tmp_path / "empty.jsonl", ""))
    assert "new agent" not in rlhf("ingest", empty, "--agent", "suport").stderr  # nor is it made
    told = rlhf("ingest", path, "--agent", "suport").stderr
    assert told == "suport is a new agent; known before: support\n"
    for agent in ("support", "suport"):
        assert rlhf("ingest", path, "--agent", agent).stderr == ""


@pytest.mark.parametrize("name", ["suport.jsonl", "suport.csv", "suport"])
def test_votes_sent_under_a_misspelt_name_are_taken_in_under_the_right_one(
    rlhf: Run, tmp_path: Path, name: str
) -> None:
    path = str(write(tmp_path / "votes.jsonl", THUMBS))
    rlhf("ingest", path, "--agent", "suport")
    out = str(tmp_path / name)
    rlhf("feedback", "export", out, "--agent", "suport")
    assert "other_agent" in rlhf("ingest", out, "--agent", "support", code=3).stdout
    told = rlhf("ingest", out, "--agent", "support", "--set", "agent_id=support").stdout
    assert (cells(told)["stored"], cells(told)["quarantined"]) == ("1", "0")


def test_votes_of_an_agent_that_cannot_be_are_not_read(rlhf: Run, tmp_path: Path) -> None:
    path = str(write(tmp_path / "votes.jsonl", THUMBS))
    told = rlhf("ingest", path, "--agent", "my agent", code=2).stderr
    assert "Invalid value for --agent" in told
    assert "found 'my agent'" in told


def test_a_port_that_is_taken_is_told_in_one_line(rlhf: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = rlhf("serve", "--port", port, code=1)
    assert result.stdout == ""  # no address that nothing of ours answers at
    told = result.stderr.splitlines()
    assert told[-1] == (
        f"error: needed to listen on 127.0.0.1, port {port}, found Address already in use; "
        "end what does, or name another --port"
    )


def test_a_service_tells_its_addresses_and_the_folder_it_serves(
    rlhf: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rlhf_pipeline.serving.app.run", lambda *_, about_to, **__: about_to())
    told = rlhf("serve", "--port", "9", "--no-pages").stdout.splitlines()
    assert told == [
        "API       http://127.0.0.1:9/openapi.json",
        f"state     {tmp_path / 'state'}",
    ]


def test_status_tells_what_is_there_and_why_nothing_starts(rlhf: Run, tmp_path: Path) -> None:
    assert "yet; `rlhf ingest` makes one known" in rlhf("status").stdout
    assert json.loads(rlhf("status", "--json").stdout) == []
    path = write(tmp_path / "votes.jsonl", THUMBS + "{broken\n")
    rlhf("ingest", str(path), "--agent", "tea", code=3)
    told = cells(rlhf("status").stdout)
    assert told["votes"] == "1 (thumbs 1)"
    assert told["quarantine"] == "1 (broken_json 1)"
    assert (told["champion"], told["last turn"]) == ("none yet", "none yet")
    assert told["next turn"] == "1 new votes of the 100 needed"
    (values,) = json.loads(rlhf("status", "--json", "--agent", "tea").stdout)
    assert values["votes"] == {"thumbs": 1}
    assert "known: tea" in rlhf("status", "--agent", "tee", code=1).stderr
    book = ClaimBook(Workspace().database)
    book.finish(book.claim("tea", "f", 1, holder="run", asked_by="sensor").token, "failed", "oom")
    last = cells(rlhf("status").stdout)["last turn"]
    assert last.startswith("failed, attempt 1, asked by sensor, ")
    assert last.endswith(" UTC: oom")


def test_status_shows_the_others_where_an_agents_recipe_has_gone(rlhf: Run, tmp_path: Path) -> None:
    votes = str(write(tmp_path / "votes.jsonl", THUMBS))
    for agent in ("coffee", "tea"):
        rlhf("ingest", votes, "--agent", agent)
    Workspace().store.set_agent("coffee", recipe="/srv/gone.yaml")
    # It might tell the names that the file has, its rater's among them.
    refused = rlhf("ingest", votes, "--agent", "coffee", code=1).stderr
    assert "needed a recipe, found no /srv/gone.yaml" in refused
    told = rlhf("ingest", votes, "--agent", "coffee", "--map", "prompt=prompt").stdout
    assert cells(told)["already known"] == "1"
    assert "no reward yet: needed a recipe, found no /srv/gone.yaml" in told
    without, sound = json.loads(rlhf("status", "--json").stdout)
    assert without["next_turn"].startswith("none until its recipe loads: needed a recipe, found no")
    assert (without["automatic_promotion"], without["votes"]) == (None, {"thumbs": 1})
    assert sound["next_turn"] == "1 new votes of the 100 needed"
    assert cells(rlhf("status", "--agent", "coffee").stdout)["promotion"] == "unknown"


def test_status_shows_the_others_where_an_agents_turn_cannot_be_read(
    rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = str(write(tmp_path / "votes.jsonl", THUMBS))
    for agent in ("coffee", "tea"):
        rlhf("ingest", votes, "--agent", agent)

    def next_turn(here: Workspace, agent_id: str, settings: Settings) -> str:
        if agent_id == "coffee":
            raise PipelineError("a JSON file is needed at began.json, found none")
        return known(here, agent_id, settings)

    known = agents._next_turn
    monkeypatch.setattr(agents, "_next_turn", next_turn)
    damaged, sound = json.loads(rlhf("status", "--json").stdout)
    assert damaged["next_turn"] == "not known: a JSON file is needed at began.json, found none"
    assert damaged["automatic_promotion"] is True
    assert sound["next_turn"] == "1 new votes of the 100 needed"


def test_an_agent_is_paused_and_resumed_by_hand(rlhf: Run, tmp_path: Path) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    told = rlhf("pause", "--agent", "tea", "--reason", "moving house").stdout
    assert told == "tea is paused: moving house\n"
    assert cells(rlhf("status").stdout)["next turn"] == "paused: moving house"
    assert rlhf("resume", "--agent", "tea").stdout == "tea goes on\n"
    assert rlhf("resume", "--agent", "tea").stdout == "tea was not paused\n"
    assert cells(rlhf("status").stdout)["next turn"] == "1 new votes of the 100 needed"
    for words in (["pause"], ["resume"], ["automatic", "on"]):
        assert "found 'tee'; known: tea" in rlhf(*words, "--agent", "tee", code=1).stderr


def test_files_that_nothing_takes_out_of_an_inbox_are_told(rlhf: Run, tmp_path: Path) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    inbox = tmp_path / "state" / "inbox" / "tea"
    for name in ("votes.jsonl", "half.part", ".hidden.csv", "done/old.csv"):
        write(inbox / name, THUMBS)
    assert "inbox" not in cells(rlhf("status").stdout)
    write(inbox / "survey.csv", "prompt,chosen\n")
    write(inbox / "b.jsonl.tmp", THUMBS)
    assert cells(rlhf("status").stdout)["inbox"] == (
        "b.jsonl.tmp does not end in .jsonl; rename it when it is whole; survey.csv is not called "
        ".jsonl; `rlhf ingest` takes it in, then move it away"
    )
    (values,) = json.loads(rlhf("status", "--json").stdout)
    assert len(values["inbox"]) == 2
    for n in range(9):
        write(inbox / f"z{n}.xlsx", "")
    assert "; and 6 more" in " ".join(rlhf("status").stdout.split())
    settings = Workspace(None, str(tmp_path / "state")).settings
    stamp = stamp_of((inbox / "votes.jsonl").stat())
    for kept in (stamp, f"{stamp}9"):  # another state of it has not been tried
        refused = Refused(kept, runs=3, is_over=True, why="needed a rater\x1b")
        keep_refused(settings, {"tea/votes.jsonl": refused})
        told = " ".join(rlhf("status").stdout.split())
        assert ("so: needed a rater" in told) == (kept == stamp)
        assert "\x1b" not in told
    write(tmp_path / "state" / "inbox.json", "half of it {")
    assert "votes.jsonl" not in rlhf("status").stdout


def test_what_nothing_looks_into_in_an_inbox_is_told_once(rlhf: Run, tmp_path: Path) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    inbox = tmp_path / "state" / "inbox" / "tea"
    for name in ("votes.part", ".hidden", "_SUCCESS", "README.md", "done/old.zip"):
        write(inbox / name, THUMBS)
    assert "inbox" not in cells(rlhf("status").stdout)
    for name in ("2026-05/votes.jsonl", "votes.txt", "votes.jsonl"):
        write(inbox / name, THUMBS)
    told = [
        "2026-05 is a folder, which nothing looks into; move its files up, or name it to "
        "`rlhf ingest`, then move it away",
        "votes.txt is of no kind that is read; if it holds votes, make it .jsonl, or a table for "
        "`rlhf ingest`, else move it away",
    ]
    (values,) = json.loads(rlhf("status", "--json").stdout)
    assert values["inbox"] == told
    assert left_in(Workspace(None, str(tmp_path / "state")).settings, "tea") == []  # no alarm


def test_what_lies_in_the_inbox_for_no_known_agent_is_told(rlhf: Run, tmp_path: Path) -> None:
    inbox = tmp_path / "state" / "inbox"
    for name in ("new/votes.jsonl", ".trash/votes.jsonl"):
        write(inbox / name, THUMBS)
    assert rlhf("status").stderr == ""  # it waits for its first run
    for name in ("new/votes.csv", "new/votes.zip", "my agent/votes.jsonl", "votes.jsonl"):
        write(inbox / name, THUMBS)
    told = rlhf("status").stderr
    assert told == (
        "inbox: needed agent_id as 1 to 64 letters, digits, - and _, the first a letter or digit, "
        "found 'my agent'; rename the folder in the inbox; for new, no known agent yet: votes.csv "
        "is not called .jsonl; `rlhf ingest` takes it in, then move it away; for new, no known "
        "agent yet: votes.zip is of no kind that is read; if it holds votes, make it .jsonl, or a "
        "table for `rlhf ingest`, else move it away; votes.jsonl lies in no agent's folder; move "
        f"it to {inbox}/AGENT/\n"
    )
    assert rlhf("status", "--json").stderr == told
    assert rlhf("status", "--agent", "new", code=1).stderr.startswith(told)
    rlhf("ingest", str(inbox / "new" / "votes.jsonl"), "--agent", "new")
    assert "for new" not in rlhf("status").stderr
    assert rlhf("status", "--agent", "new").stderr == ""


def test_who_promotes_is_chosen_per_agent(rlhf: Run, tmp_path: Path) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    assert cells(rlhf("status").stdout)["promotion"] == "automatic"  # as the recipe tiny says
    assert "off" in rlhf("automatic", "off", "--agent", "tea").stdout
    assert cells(rlhf("status").stdout)["promotion"] == "asks a person"
    rlhf("automatic", "on", "--agent", "tea")
    assert cells(rlhf("status").stdout)["promotion"] == "automatic"


def test_an_agents_own_recipe_holds_for_it(rlhf: Run, tmp_path: Path) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    use = ("config", "use", "--agent", "tea")
    assert rlhf(*use).stdout == "tea has no recipe of its own; tiny holds for it\n"
    assert rlhf(*use, "gpt2").stdout == "tea has a recipe of its own: gpt2\n"
    assert rlhf(*use).stdout == "tea has a recipe of its own: gpt2\n"
    told = cells(rlhf("status").stdout)
    assert told["next turn"] == "1 new votes of the 300 needed"
    assert told["recipe"] == "gpt2, its own"
    assert "base: gpt2" in rlhf("config", "show", "--agent", "tea").stdout
    assert "base: tiny" in rlhf("config", "show").stdout
    assert "no recipe of its own; tiny" in rlhf(*use, "--none").stdout
    (values,) = json.loads(rlhf("status", "--json").stdout)
    assert (values["recipe"], values["own_recipe"]) == ("tiny", False)


def test_an_agents_own_recipe_is_one_and_stays_where_it_is(
    rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    use = ("config", "use", "--agent", "tea")
    write(tmp_path / "mine.yaml", "continuous_learning: {min_new_feedback: 7}")
    monkeypatch.chdir(tmp_path)
    assert f"its own: {tmp_path}/mine.yaml\n" in rlhf(*use, "mine.yaml").stdout
    monkeypatch.chdir("/")
    assert cells(rlhf("status").stdout)["next turn"] == "1 new votes of the 7 needed"
    assert "did you mean 'gpt2'" in rlhf(*use, "gpt3", code=1).stderr
    assert "needed a recipe or --none" in rlhf(*use, "gpt2", "--none", code=2).stderr
    deep = write(tmp_path / ("d" * 200) / "mine.yaml", "")
    assert "at most 200 characters" in rlhf(*use, str(deep), code=1).stderr
    assert "found 'tee'; known: tea" in rlhf("config", "use", "--agent", "tee", code=1).stderr
    new = ("config", "use", "--agent", "tee")
    for refused in ((*new, "gpt3"), (*new, str(deep)), (*new, "--none")):
        rlhf(*refused, code=1)
    assert "found 'a b'" in rlhf("config", "use", "gpt2", "--agent", "a b", code=2).stderr
    assert "tee" not in rlhf("status").stdout
    assert f"{tmp_path}/mine.yaml" in rlhf(*use).stdout  # what was refused changed nothing


def test_an_agent_may_have_its_recipe_before_its_first_votes(rlhf: Run, tmp_path: Path) -> None:
    names = "{columns: {prompt: Q, completion: A, value: V}, fixed: {kind: thumbs}}"
    recipe = str(write(tmp_path / "mine.yaml", f"feedback: {{names: {names}}}"))
    made = rlhf("config", "use", recipe, "--agent", "tea")
    assert (made.stdout, made.stderr) == (f"tea has a recipe of its own: {recipe}\n", "")
    votes = str(write(tmp_path / "votes.csv", "Q,A,V\nWhy?,Because.,up\n"))
    assert cells(rlhf("ingest", votes, "--agent", "tea").stdout)["stored"] == "1"
    second = rlhf("config", "use", "gpt2", "--agent", "coffee").stderr
    assert second == "coffee is a new agent; known before: tea\n"
    assert rlhf("config", "use", "gpt2", "--agent", "coffee").stderr == ""


def test_a_recipe_of_another_base_than_version_0s_is_taken_with_a_warning(
    shop: Path, rlhf: Run
) -> None:
    for given, held in (("gpt2", True), ("tiny", False), ("gpt2", True), ("--none", False)):
        told = rlhf("config", "use", given).stderr
        assert ("turns will be refused: needed policy.base 'tiny', " in told) == held, given
        assert ("found 'gpt2'" in told) == held


# -- versions -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a state with four tiny versions: baseline, passed, refused, and one never judged."""
    from rlhf_pipeline.policy.loading import save_policy
    from rlhf_pipeline.policy.tiny import build_tiny
    from rlhf_pipeline.simulation.world import seed_conversations

    state = tmp_path_factory.mktemp("shop") / "state"
    here = Workspace(None, str(state))
    texts = [t for e in seed_conversations(200, 0) for t in (e.prompt[-1].content, e.completion)]
    refused = {"rule": "kl_stop", "verdict": "fail", "words": "too far", "number": 99.0}
    gates: tuple[dict[str, Any] | None, ...] = (
        None,
        {"passed": True, "results": []},
        {"passed": False, "results": [refused]},
        None,
    )
    for number, gate in enumerate(gates):
        folder = state / "agents" / "shop" / f"v{number}"
        size: dict[str, int] = {"vocabulary": 400, "layers": 1, "width": 32, "heads": 2}
        save_policy(build_tiny(texts, **size, context=128, seed=number), folder)
        given: dict[str, Any] = {
            "label": f"v{10 * number}",
            "path": folder,
            "files": folder_sha256(folder),
            "lineage": {"base": "tiny"},
        }
        if number == 0:
            here.ledger.add_baseline("shop", **given, actor="test")
        else:
            here.ledger.add_version("shop", **given, gate=gate, fingerprint=f"{number}" * 64)
    here.database.close()
    return state


@pytest.fixture
def shop(made_shop: Path, tmp_path: Path, rlhf: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a copy of the shop: a state folder that has moved still finds its models."""
    state = tmp_path / "state"
    shutil.copytree(made_shop, state, dirs_exist_ok=True)
    monkeypatch.setenv("RLHF_AGENT", "shop")
    return state


def no_mlflow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the aliases; their own tests are in tests/registry."""
    reconciled: list[str] = []

    def away(_: ModelRegistry, agent_id: str) -> Any:
        reconciled.append(agent_id)
        raise RegistryError("MLflow is away")

    monkeypatch.setattr(ModelRegistry, "reconcile", away)
    return reconciled


def standing(rlhf: Run) -> dict[str, str]:
    rows = (re.findall(r"│([^│]*)", line) for line in rlhf("versions").stdout.splitlines())
    return {row[0].strip(): row[2].strip() for row in rows if len(row) > 3}


def test_versions_tell_who_stands_where(shop: Path, rlhf: Run) -> None:
    assert standing(rlhf) == {"0": "champion, baseline", "1": "challenger", "2": "", "3": ""}
    told = rlhf("versions").stdout
    assert "refused: kl_stop" in told
    assert "not judged" in told


def test_versions_can_be_read_in_a_narrow_terminal(
    shop: Path, rlhf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = rlhf("versions").stdout
    assert max(map(len, told.splitlines())) <= 80
    for whole in ("champion,", "baseline", "challenger", "refused:", "kl_stop", f"{now():%Y-%m-}"):
        assert f"│ {whole}" in told
    assert "MLflow" not in told


def test_a_version_is_promoted_rolled_back_and_explained_with_mlflow_behind(
    shop: Path, rlhf: Run
) -> None:
    told = rlhf("promote", "challenger", "--reason", "reads better").stdout
    assert told.startswith("champion moved from 0 to 1")
    assert "MLflow champion: None -> 2" in told
    assert standing(rlhf)["1"] == "champion"
    assert rlhf("promote", "1").stdout == "version 1 already is the champion\n"
    told = rlhf("rollback", "--reason", "rude to customers").stdout
    assert told.startswith("rolled back from 1 to 0")
    assert "MLflow champion: 2 -> 1" in told
    text = rlhf("explain", "1").stdout
    assert "by person:" in text
    assert "reads better" in text
    assert "rude to customers" in text
    entries = json.loads(rlhf("explain", "1", "--json").stdout)["ledger"]
    assert [entry["action"] for entry in entries] == ["promote", "rollback"]
    assert "rolled back from; train a new one" in rlhf("promote", "1", code=1).stderr


def test_the_ledger_moves_although_mlflow_is_away(
    shop: Path, rlhf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciled = no_mlflow(monkeypatch)
    result = rlhf("promote", "1")
    assert result.stdout == "champion moved from 0 to 1\n"
    assert result.stderr == (
        "warning: the ledger has it, MLflow's aliases will follow: MLflow is away\n"
    )
    rlhf("rollback", "--to", "baseline", "--reason", "a test")
    assert reconciled == ["shop", "shop"]
    assert standing(rlhf) == {
        "0": "champion, baseline",
        "1": "withdrawn",
        "2": "",
        "3": "",
    }


def test_who_promotes_over_a_champion_that_it_never_met_is_told(
    shop: Path, rlhf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_mlflow(monkeypatch)
    folder, here = shop / "agents" / "shop" / "v3", Workspace(None, str(shop))
    for number in (4, 5):
        here.ledger.add_version(
            "shop",
            label=f"v{10 * number}",
            path=folder,
            files=folder_sha256(folder),
            lineage={"started_from": "/elsewhere/agents/shop/v0"},
            gate={"passed": True, "results": []},
            fingerprint=f"{number}" * 64,
        )
    assert "compared with" not in rlhf("promote", "4").stderr  # with version 0, which it replaces
    result = rlhf("promote", "5")
    assert result.stdout == "champion moved from 4 to 5\n"
    assert result.stderr.startswith(
        "warning: version 5 was compared with version 0, the champion of that day, and not with "
        "version 4; `rlhf experiment offline 4 5 --agent shop` does that\n"
    )
    assert "compared with" not in rlhf("promote", "5").stderr  # nothing moved


def test_a_version_that_comes_out_otherwise_is_told_of_a_template_that_reads_the_clock(
    shop: Path, rlhf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Workspace(None, str(shop)).version("shop", "1").path
    outcome = Reproduction(1, policy, ("config.json",), ("model.safetensors",))
    monkeypatch.setattr("rlhf_pipeline.registry.reproduce.reproduce", lambda *_: outcome)
    told = rlhf("reproduce", "1", code=1).stderr
    assert "version 1 of shop came out otherwise in 1 of" in told
    assert "clock" not in told
    with (policy / "chat_template.jinja").open("a") as template:
        template.write("{{ strftime_now('%d %b %Y') }}")
    told = rlhf("reproduce", "1", code=1).stderr
    assert "its chat template reads the clock (strftime_now)" in told


def test_an_offline_comparison_says_the_same_on_its_page(
    shop: Path, rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_pipeline.evaluation.phrases import Phrase
    from rlhf_pipeline.evaluation.report import Sample as Shown

    said = {"candidate": "Yes.", "baseline": "No."}
    compared = replace(
        report(),
        champion_is_baseline=True,
        samples=[Shown("p", [["user", "Why?"]], said, {"candidate": 1.0, "baseline": 0.5})],
        phrases={"baseline": [Phrase("yes", 0.62, 0.05)]},
    )
    found = offline.Offline("shop", 1, 2, 2, 120, 46, 54, False, compared)
    monkeypatch.setattr(offline, "offline", lambda *_, **__: found)
    page = tmp_path / "page.html"
    result = rlhf("experiment", "offline", "1", "2", "--page", str(page))
    text = page.read_text()
    for line in (found.words, found.basis, *found.warnings):
        assert line in result.output
        assert f"<p>{escape(line)}</p>" in text
    assert "compared on 46 held out and 54 seen; judged by the gate model of version 2's turn" in (
        result.stdout
    )
    assert "kl to version 1" in result.stdout
    for told in (
        "<h1>shop: version 2 beside version 1</h1>",
        "<h2>Version 2 against version 1</h2>",
        "<p>100 prompts, temperature",
        "kl to version 1<br><small>nats per completion",
        "<h2>What version 2 says more often, and less than version 1</h2>",
        "<th>version 2 (1.00)</th><th>version 1 (0.50)</th>",
    ):
        assert told in text
    for word in ("candidate", "baseline", "held-out"):
        assert word not in (result.output + text).replace("held-out score", "").lower()


def test_an_experiments_differences_are_told_with_what_their_sign_says(
    shop: Path, rlhf: Run
) -> None:
    assert "has had no experiment" in rlhf("experiment", "status").stdout
    assert rlhf("experiment", "start", "--version", "1").stdout == (
        "shop: version 1 meets 1% of the people beside version 0, and is promoted if they like it "
        "better\n"
    )
    begun = rlhf("experiment", "status").stdout
    assert begun == "version 1 beside 0: running, 1% of the people, 0 looks kept\n"
    arms = {
        metric.name: Arms(Sample(7, 0.2, 0.01), Sample(9, 0.3, 0.01))
        for metric in (PRIMARY, *GUARDRAILS)
    }
    book = ExperimentBook(Workspace(None, str(shop)).store.database)
    (experiment,) = book.history("shop")
    book.record(experiment, "continue", decide(arms, []).to_json())
    sign, _, why, *lines = rlhf("experiment", "status").stdout.splitlines()
    assert sign == SIGN
    assert why.startswith("  too few users yet: satisfaction is known of 7 of the challenger's")
    told = dict(line.strip().split(": ", 1) for line in lines)
    assert told["satisfaction"] == "-0.100 (? to ?), 7 and 9 users"
    assert told["thumbs_down"] == "+0.100 (? to ?), 7 and 9 users"  # there are fewer of them
    arms[PRIMARY.name] = Arms(Sample.of([]), Sample(9, 0.3, 0.01))
    book.record(experiment, "continue", decide(arms, []).to_json())
    assert "  satisfaction: ? (? to ?), 0 and 9 users\n" in rlhf("experiment", "status").stdout
    here = Workspace(None, str(shop))
    here.ledger.promote("shop", 1, actor="t", reason="t", expected_champion=0, force=True)
    assert rlhf("experiment", "stop").stdout == "shop: stopped; version 1 answers everybody\n"
    here.ledger.promote("shop", 0, actor="t", reason="t", expected_champion=1, force=True)
    (ended,) = book.history("shop")
    assert ended.ended_at is not None
    times = f"{ended.started_at:%Y-%m-%d %H:%M} to {ended.ended_at:%Y-%m-%d %H:%M} UTC"
    said = f"version 1 beside 0: stopped, {times}, at last 1% of the people, 2 looks kept\n"
    assert said in rlhf("experiment", "status").stdout


def test_a_refused_version_meets_people_by_force_and_is_not_the_one_that_waits(
    shop: Path, rlhf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_mlflow(monkeypatch)
    told = rlhf("experiment", "start", "--version", "2", "--force").stdout
    assert told.endswith("if they like it better the experiment ends, and a person decides\n")
    refused = rlhf("promote", "challenger", code=1).stderr
    assert "needed, found challenger: version 2 is in an experiment, and version 1" in refused
    assert standing(rlhf)["0"] == "champion, baseline"
    assert rlhf("promote", "1").stdout.startswith("champion moved from 0 to 1")


def test_no_experiment_begins_where_an_upstream_answers(
    shop: Path, rlhf: Run, tmp_path: Path
) -> None:
    serving = "{upstreams: {shop: {url: 'http://127.0.0.1:9/v1', model: m}}}"
    recipe = write(tmp_path / "served.yaml", f"serving: {serving}")
    refused = rlhf("--recipe", str(recipe), "experiment", "start", "--version", "1", code=1)
    assert "found that those of agent 'shop' are answered by its upstream" in refused.stderr
    assert ExperimentBook(Workspace(None, str(shop)).store.database).history("shop") == []


def test_the_newest_experiments_are_shown_and_the_others_on_demand(shop: Path, rlhf: Run) -> None:
    book = ExperimentBook(Workspace(None, str(shop)).store.database)
    for challenger in range(1, 9):
        if (running := book.running("shop")) is not None:
            book.end(running, "stopped", "enough")
        book.start("shop", champion=0, challenger=challenger, share=0.1, actor="test")
    said = rlhf("experiment", "status").stdout
    assert said.startswith("version 8 beside 0: running")
    assert re.findall(r"version (\d)", said) == list("876543")
    assert said.endswith("2 older; `rlhf experiment status --agent shop --all` shows them too\n")
    whole = rlhf("experiment", "status", "--all").stdout
    assert re.findall(r"version (\d)", whole) == list("87654321")
    assert "older" not in whole
    assert len(json.loads(rlhf("experiment", "status", "--json").stdout)) == 8


def test_the_baseline_is_version_0_until_a_person_resets_it(
    shop: Path, rlhf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_mlflow(monkeypatch)
    why = ("--reason", "shorter is what we want")
    assert rlhf("reset-baseline", *why).stdout == "version 0 already is the baseline\n"
    rlhf("promote", "1")
    assert rlhf("reset-baseline", *why).stdout == "version 1 is the baseline now\n"
    assert standing(rlhf)["1"] == "champion, baseline"
    assert "shorter is what we want" in rlhf("explain", "baseline").stdout
    rlhf("rollback", "--reason", "not so")
    rlhf("reset-baseline", *why)
    assert standing(rlhf)["0"] == "champion, baseline"


def test_what_the_gate_refused_needs_force(
    shop: Path, rlhf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_mlflow(monkeypatch)
    refused = rlhf("promote", "2", code=1).stderr
    assert "was refused by the gate" in refused
    assert "`rlhf promote --force --reason WHY`" in refused
    assert "was never judged by the gate" in rlhf("promote", "3", code=1).stderr
    rlhf("promote", "2", "--force", "--reason", "a person looked")
    assert standing(rlhf)["2"] == "champion"
    assert "forced (version 2 of agent shop was refused" in rlhf("explain", "champion").stdout


def test_changed_files_are_never_served(
    shop: Path, rlhf: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_mlflow(monkeypatch)
    config = shop / "agents" / "shop" / "v1" / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    for words in (
        ["promote", "1"],
        ["chat", "--version", "1", "--once", "hello"],
        ["export", "1", str(tmp_path / "out")],
    ):
        assert "found config.json changed" in rlhf(*words, code=1).stderr
    assert standing(rlhf)["0"] == "champion, baseline"
    assert not (tmp_path / "out").exists()


def test_a_version_that_is_not_there(shop: Path, rlhf: Run) -> None:
    for words in (["explain", "9"], ["promote", "9"], ["chat", "--version", "9", "--once", "x"]):
        assert "version 9 of agent shop is needed" in rlhf(*words, code=1).stderr
    assert "found no 'previous'" in rlhf("explain", "previous", code=1).stderr
    assert "use promote" in rlhf("rollback", "--reason", "x", code=1).stderr
    other = rlhf("chat", "--once", "x", "--version", "models:/rlhf-tea@champion", code=1)
    assert "'champion'" in other.stderr


def test_an_export_is_what_was_registered(shop: Path, rlhf: Run, tmp_path: Path) -> None:
    told = rlhf("export", "baseline", str(tmp_path / "out")).stdout
    said = {line.split("  ")[1]: line.split("  ")[0] for line in told.splitlines()}
    assert said == folder_sha256(tmp_path / "out") == folder_sha256(shop / "agents/shop/v0")
    assert "empty folder" in rlhf("export", "0", str(tmp_path / "out"), code=1).stderr


# -- chat and simulate --------------------------------------------------------------------------


def test_one_completion_is_printed_and_nothing_else(shop: Path, rlhf: Run) -> None:
    words = ("chat", "--once", "how much is the lamp?", "--seed", "1")
    first = rlhf(*words)
    assert first.stdout.strip()
    assert first.stderr == ""
    assert rlhf(*words).stdout == first.stdout
    assert rlhf(*words, "--version", "baseline").stdout == first.stdout
    assert rlhf(*words, "--version", "1").stdout != first.stdout
    assert "found an empty one" in rlhf("chat", "--once", " ", code=1).stderr


def test_a_conversation_without_an_input_is_told_what_to_take_instead() -> None:
    words = f"{sys.executable} -m rlhf_pipeline.cli chat --agent tea <&-"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "found it closed; take --once or --batch" in done.stderr


def test_a_recipe_longer_than_the_model_is_chatted_with_within_its_context(
    shop: Path, rlhf: Run, tmp_path: Path
) -> None:
    longer = "{max_prompt_tokens: 400, max_completion_tokens: 200, tiny: {context: 1024}}"
    words = ("--recipe", str(write(tmp_path / "longer.yaml", f"policy: {longer}")), "chat")
    question = "how much is the lamp? " * 200
    assert rlhf(*words, "--once", question, "--seed", "1").stdout.strip()
    batch, out = write(tmp_path / "asked.txt", question), tmp_path / "out.jsonl"
    assert "1 replies" in rlhf(*words, "--batch", str(batch), "--out", str(out)).stdout


def test_a_conversation_knows_its_commands(shop: Path, rlhf: Run) -> None:
    typed = "help\nhow much is the lamp?\nhistory\nclear\nhistory\n\nbye\nnot heard\n"
    told = rlhf("chat", "--seed", "1", "--temperature", "0", typed=typed).stdout
    assert "shop version 0 (v0)" in told
    assert "clear      forget it" in told
    assert told.count("user: how much is the lamp?") == 1
    assert told.count("assistant: ") == 1
    assert told.index("forgotten") < told.index("nothing said yet")
    assert "not heard" not in told
    for word in ("quit", "EXIT", ""):  # the empty one is the end of what was typed
        rlhf("chat", typed=f"{word}\n" if word else "")


def test_a_conversation_is_saved_and_gone_on_with(shop: Path, rlhf: Run, tmp_path: Path) -> None:
    talk = tmp_path / "talk.json"
    first = rlhf("chat", "--seed", "1", typed=f"hello\nsave {talk}\nquit\n").stdout
    assert f"2 messages saved in {talk}" in first
    kept = json.loads(talk.read_text())
    assert [m["role"] for m in kept["messages"]] == ["user", "assistant"]
    assert kept["model_version"] == 0
    told = rlhf("chat", "--seed", "1", typed=f"load {talk}\nhistory\nsave\nload nowhere\n").stdout
    assert "user: hello" in told
    assert "save needs a file" in told
    assert "nothing to save yet" in rlhf("chat", typed=f"save {tmp_path}/none.json\n").stdout
    assert not (tmp_path / "none.json").exists()
    assert "error: a JSON file is needed at nowhere" in told
    typed = "hello\nsave ~nosuchuser/talk.json\nload ~nosuchuser/talk.json\nhistory\n"
    told = rlhf("chat", "--seed", "1", typed=typed).stdout
    assert told.count("error: needed a file whose folder is known, found ~nosuchuser") == 2
    assert "user: hello" in told[told.rindex("error: ") :]  # the conversation is still there
    talk.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    assert "ends with the assistant's words" in rlhf("chat", typed=f"load {talk}\n").stdout
    for text in ("{}", "[]", '{"messages": [1]}', "7"):
        talk.write_text(text)
        told = rlhf("chat", typed=f"load {talk}\nhistory\n").stdout
        assert f"error: needed messages in {talk}" in told
        assert "nothing said yet" in told  # the conversation goes on
    half = [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "hi"}]
    for text, needed in ((json.dumps(half), "needed whole"), ("[" * 3000, "a JSON file")):
        talk.write_text(text)
        told = rlhf("chat", typed=f"load {talk}\nhistory\n").stdout
        assert f"error: {needed}" in told


def test_a_saved_conversation_replaces_another_and_no_other_file(
    shop: Path, rlhf: Run, tmp_path: Path
) -> None:
    talk = tmp_path / "talk.json"
    rlhf("chat", "--seed", "1", typed=f"hello\nsave {talk}\n")
    typed = f"load {talk}\nhello\nsave {talk}\n"
    assert "4 messages saved" in rlhf("chat", "--seed", "1", typed=typed).stdout
    for text in ('{"agent_id": "shop"}\n', "a letter\n", '"a letter"', ""):
        other = write(tmp_path / "other", text)
        told = rlhf("chat", "--seed", "1", typed=f"hello\nsave {other}\nhistory\n").stdout
        assert f"{other} is there already and is no saved conversation; name another" in told
        assert "user: hello" in told[told.index("error: ") :]
        assert other.read_text() == text


def test_words_around_a_command_make_it_a_question(shop: Path, rlhf: Run) -> None:
    told = rlhf("chat", "--seed", "1", typed="clear the table\nsave the whales\nhistory\n").stdout
    assert "user: clear the table" in told
    assert "user: save the whales" in told


def test_typed_bytes_that_are_no_text_are_told_and_the_conversation_goes_on(
    shop: Path, rlhf: Run
) -> None:
    told = rlhf("chat", "--seed", "1", typed=b"hello\ncaf\xe9\nsave caf\xe9\nhistory\n").stdout
    wrong = "error: needed whole UTF-8 characters in what was typed, found 'caf\\udce9'; type it"
    assert wrong in told
    assert told.count("error: ") == 2
    assert told.count("user: ") == told.count("user: hello") == 1


def test_what_is_rated_is_stored_with_what_was_said(shop: Path, rlhf: Run) -> None:
    typed = "rate\nrate 4\nhello\nrate up\nrate 4\nrate\n2\nrate\nsplendid\nrate 9\nrate it\nrate\n"
    told = rlhf("chat", "--seed", "1", typed=typed).stdout
    assert told.count("nothing to rate yet") == 2
    assert "rated up" in told
    for found in ("splendid", "9", "it"):  # and none of it was said to the model
        assert f"not rated: needed up, down or 1 to 5, found '{found}'" in told
    database = open_database(f"sqlite:///{shop}/feedback.db")
    with database.read() as connection:
        votes = connection.exec_driver_sql(
            "SELECT kind, number, origin, rater_id FROM effective_feedback ORDER BY kind"
        ).all()
        said = connection.exec_driver_sql("SELECT model_version, prompt FROM interactions").all()
    assert [tuple(vote)[:3] for vote in votes] == [
        ("rating", 2.0, "terminal"),
        ("thumbs", 1.0, "terminal"),
    ]
    assert len({vote[3] for vote in votes}) == 1
    assert [tuple(row) for row in said] == [(0, '[["user", "hello"]]')]


def test_a_conversation_can_look_at_its_own_model(shop: Path, rlhf: Run) -> None:
    told = rlhf("chat", typed="test\n").stdout
    assert "7 of 7 samples come back as they were" in told
    assert "all finite" in told


def test_a_file_of_prompts_is_answered_and_gone_on_with(
    shop: Path, rlhf: Run, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "prompts.txt", "".join(f"question {i}\n\n" for i in range(70)))
    words = ("chat", "--batch", str(prompts), "--out")
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert rlhf(*words, str(whole)).stdout == f"70 replies of version 0 in {whole}\n"
    lines = whole.read_text().splitlines(keepends=True)
    assert [json.loads(line)["number"] for line in lines] == list(range(1, 71))
    assert json.loads(lines[3])["prompt"] == [{"role": "user", "content": "question 3"}]
    for kept in (0, 10, 66):  # killed in the middle of a line
        broken.write_text("".join(lines[:kept]) + lines[kept][:30])
        told = rlhf(*words, str(broken)).stdout
        assert (f", {kept} of them were there before" in told) == bool(kept)
        assert broken.read_text() == whole.read_text()
    assert "same version, seed" in rlhf(*words, str(whole), "--seed", "3", code=1).stderr
    other = write(tmp_path / "other.jsonl", '{"prompt": "another"}\n')
    assert "same prompts" in rlhf("chat", "--batch", str(other), "--out", str(whole), code=1).stderr
    for text in ("a question\n", "all that is left of a line"):
        another = write(tmp_path / "another.txt", text)
        assert "a new file" in rlhf(*words, str(another), code=1).stderr
        assert another.read_text() == text


def test_a_batch_takes_every_sign_that_a_text_may_hold(tmp_path: Path) -> None:
    text = "one\u2028two\x85three\x0cfour"  # what Unicode calls the end of a line, JSON does not
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    asked = read_prompts(write(tmp_path / "prompts.jsonl", f"{line}\n\n{line}\n"))
    assert asked == [user_prompt(text)] * 2
    assert read_prompts(write(tmp_path / "prompts.txt", f"{text}\n")) == asked[:1]
    prompts = [as_messages(prompt) for prompt in asked]
    told = [{"number": i, "prompt": prompt} for i, prompt in enumerate(prompts, 1)]
    whole, second = (json.dumps(line, ensure_ascii=False) + "\n" for line in told)
    out = write(tmp_path / "out.jsonl", whole + second[:20])  # killed in its second line
    assert lines_there(out, prompts, lambda line: line["prompt"], "answers") == 1
    assert out.read_text() == whole


def test_what_is_no_file_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="found a folder, pipe or device at /dev/full"):
        lines_there(Path("/dev/full"), [], str, "answers")


@pytest.mark.parametrize("value", ['"half \\ud83d"', "[" * 100_000, '[{"role": "user"}]'])
def test_a_prompt_that_cannot_be_one_is_named_by_its_line(tmp_path: Path, value: str) -> None:
    path = write(tmp_path / "prompts.jsonl", f'{{"prompt": "Hello?"}}\n{{"prompt": {value}}}\n')
    with pytest.raises(ConfigError, match=r"prompts.jsonl:2 needs"):
        read_prompts(path)


def test_a_prompt_that_is_null_leaves_the_line_its_messages(tmp_path: Path) -> None:
    messages = as_messages(user_prompt("Hello?"))
    line = json.dumps({"prompt": None, "messages": messages, "completion": "Hi."})
    path = write(tmp_path / "prompts.jsonl", f"{line}\n")
    assert read_prompts(path) == [user_prompt("Hello?")]
    assert [item.prompt for item in read_items(path)] == [user_prompt("Hello?")]


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    row = '{"prompt": "Hello?"}'
    for name, line in (("p.txt", "Hello?"), ("p.jsonl", row), ("P.JSONL", row), ("p.ndjson", row)):
        path = write(tmp_path / name, f"\ufeff{line}\r\n")
        assert read_prompts(path) == [user_prompt("Hello?")]


def test_a_batch_says_what_it_needs(shop: Path, rlhf: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "out.jsonl")
    empty = str(write(tmp_path / "empty.txt", "\n"))
    odd = str(write(tmp_path / "odd.jsonl", '{"prompt": "fine"}\n{"say": 1}\n'))
    answered = write(
        tmp_path / "a.jsonl", '{"messages": [{"role": "assistant", "content": "hi"}]}\n'
    )
    for words, wrong in (
        (["--batch", empty], "found no --out"),
        (["--out", out], "found no --batch"),
        (["--batch", empty, "--out", out, "--once", "x"], "found both"),
        (["--batch", empty, "--out", out], "one a line, found none"),
        (["--batch", "nowhere.txt", "--out", out], "file of prompts is needed at nowhere.txt"),
        (["--batch", odd, "--out", out], "odd.jsonl:2 needs"),
        (["--batch", str(answered), "--out", out], "ends with the user's message"),
    ):
        assert wrong in rlhf("chat", *words, code=1).stderr
    assert not Path(out).exists()


def test_a_tokenizer_is_looked_at(shop: Path, rlhf: Run, tmp_path: Path) -> None:
    folder = str(shop / "agents/shop/v0")
    told = rlhf("tokenizer", folder, "--text", "the lamp").stdout
    assert "samples come back as they were" in told
    assert "pieces       " in told
    assert json.loads(rlhf("tokenizer", folder, "--json").stdout)["is_sound"]
    assert "tiktoken ranks" in rlhf("tokenizer", str(tmp_path / "no.tiktoken"), code=1).stderr


def test_simulated_people_send_what_was_asked_for(shop: Path, rlhf: Run) -> None:
    told = rlhf("simulate", "--events", "40", "--people", "10").stdout
    completions, pairs = (
        int(re.findall(p, told)[0]) for p in (r"about (\d+)", r"preference (\d+)")
    )
    assert told.startswith("40 events about ")
    assert "completions of version 0: " in told
    assert completions == 40 + pairs
    assert cells(rlhf("status").stdout)["votes"].startswith("40 (")
    rlhf("simulate", "--events", "5")
    assert cells(rlhf("status").stdout)["votes"].startswith("45 (")


def test_a_simulation_needs_events_or_nights(rlhf: Run) -> None:
    assert "needed --events, or --nights" in rlhf("simulate", "--agent", "tea", code=2).stderr
    words = ("simulate", "--agent", "tea", "--events", "5", "--out", "there")
    assert "--out goes with --nights" in rlhf(*words, code=2).stderr


def test_an_agent_without_a_version_has_nobody_to_talk_to(rlhf: Run) -> None:
    for words in (["chat", "--once", "hello"], ["simulate", "--events", "5"]):
        assert "`make train AGENT=tea`" in rlhf(*words, "--agent", "tea", code=1).stderr


def test_rows_that_were_set_aside_are_shown_with_their_place(rlhf: Run, tmp_path: Path) -> None:
    stars = [json.dumps({**json.loads(THUMBS), "kind": "rating", "value": n}) for n in (5, 7, 0)]
    path = write(tmp_path / "votes.jsonl", "\n".join([*stars, "no \x1b[31m JSON"]))
    told = rlhf("ingest", str(path), "--agent", "tea", code=3).stdout
    assert "value_out_of_range: votes.jsonl:2: needed a whole value from 1 to 5" in told
    assert "withdraw --agent AGENT --file NAME), and in again with every vote as a `score`" in (
        " ".join(told.split())
    )
    assert "broken_json: votes.jsonl:4: needed one JSON value" in told
    assert "rlhf feedback quarantine --agent tea" in told
    show = ("feedback", "quarantine", "--agent", "tea")
    lines = rlhf(*show).stdout.splitlines()
    assert [line.split(": ")[0] for line in lines[::2]] == [f"votes.jsonl:{n}" for n in (2, 3, 4)]
    assert lines[1].strip() == stars[1]
    assert lines[5].strip() == "no  [31m JSON"
    last = rlhf(*show, "--rule", "value_out_of_range", "--limit", "1", "--json")
    row = json.loads(last.stdout)
    assert (row["line"], row["rule"], row["raw"]) == (3, "value_out_of_range", stars[2])
    assert "the newest 1 of 2" in last.stderr
    wrong = rlhf(*show, "--rule", "bad_text", code=1).stderr
    assert "(broken_json, value_out_of_range), found 'bad_text'" in wrong
    assert rlhf(*show, "--rule", "broken_json", "--close").stdout == "rows of agent tea closed: 1\n"
    rlhf("ingest", str(path), "--agent", "tea", code=3)  # the same dirt again
    assert len(rlhf(*show).stdout.splitlines()) == 4
    assert cells(rlhf("status").stdout)["quarantine"] == "2 (value_out_of_range 2)"
    rlhf(*show, "--close")
    assert cells(rlhf("status").stdout)["quarantine"] == "none"
    rlhf("ingest", str(write(tmp_path / "good.jsonl", THUMBS)), "--agent", "coffee")
    none = rlhf("feedback", "quarantine", "--agent", "coffee")
    assert (none.stdout, none.stderr) == ("", "no row of agent coffee is in quarantine\n")


def test_an_export_replaces_nothing_unless_it_is_told_to(rlhf: Run, tmp_path: Path) -> None:
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    letter = write(tmp_path / "mine.jsonl", "Dear Ann,")
    kept = letter.read_text()
    for out in (letter, tmp_path):
        refused = rlhf("feedback", "export", str(out), "--agent", "tea", code=1).stderr
        assert f"found something at {out}; choose another name, or replace it with" in refused
    assert letter.read_text() == kept
    rlhf("feedback", "export", str(letter), "--agent", "tea", "--force")
    assert json.loads(letter.read_text())["kind"] == "thumbs"
    state = tmp_path / "state"
    for out in (state, state.parent, state / "agents" / "tea"):
        refused = rlhf("feedback", "export", str(out), "--agent", "tea", "--force", code=1).stderr
        assert f"outside the state folder {state}" in " ".join(refused.split())
    (tmp_path / "empty").mkdir()
    rlhf("feedback", "export", str(tmp_path / "empty"), "--agent", "tea")
    told = rlhf("feedback", "export", "-", "--agent", "tea")
    assert told.stdout == letter.read_text()  # and nothing else, for whatever reads it
    assert told.stderr == "1 events of agent tea in -\n"


@pytest.mark.parametrize("name", ["votes.jsonl", "votes.csv", "votes"])
def test_an_export_is_read_by_its_owner_alone(rlhf: Run, tmp_path: Path, name: str) -> None:
    rlhf("ingest", str(write(tmp_path / "taken.jsonl", THUMBS)), "--agent", "tea")
    out = tmp_path / "out" / name
    for more in ((), ("--force",)):
        rlhf("feedback", "export", str(out), "--agent", "tea", *more)
        assert out.stat().st_mode & 0o077 == 0
        out.chmod(0o755)


def test_ingest_is_refused_where_feedback_is_switched_off(tmp_path: Path) -> None:
    recipe = tmp_path / "closed.yaml"
    recipe.write_text("feedback: {enabled: false}\n")
    votes = tmp_path / "votes.jsonl"
    votes.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    result = CliRunner().invoke(
        app, ["--recipe", str(recipe), "ingest", str(votes), "--agent", "shop"]
    )
    assert result.exit_code == 1
    assert "feedback.enabled is off" in result.output


def test_a_files_own_names_are_told_with_the_command(rlhf: Run, tmp_path: Path) -> None:
    table = write(
        tmp_path / "survey.csv", "Q,A,Liked,Who\nWhy?,So.,1 = yes,ann\nWhere?,Here.,no,bob\n"
    )
    named = ["--map", "prompt=Q", "--map", "completion=A", "--map", "value=Liked"]
    said = ["--set", "kind=thumbs", "--means", "1 = yes=up", "--means", "no=down"]
    bare = rlhf("ingest", str(table), "--agent", "tea", code=1)
    assert "tell `rlhf ingest` which they are with --map and --set" in bare.stderr
    wrong = rlhf("ingest", str(table), "--agent", "tea", *named, *said, "--map", "rater=W", code=1)
    assert "needed 'W' among the columns of survey.csv, found ['Q', 'A', 'Liked'" in wrong.stderr
    for option in (["--map", "promptQ"], ["--set", "kind="], [*said, "--set", "kind=rating"]):
        told = rlhf("ingest", str(table), "--agent", "tea", *option, code=2).stderr
        assert "needed NAME=VALUE, each name once" in " ".join(told.replace("│", " ").split())
    rlhf("ingest", str(table), "--agent", "tea", *named, *said, "--map", "rater=Who")
    rlhf("feedback", "export", str(tmp_path / "out.jsonl"), "--agent", "tea")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["value"], row["completion"]) for row in rows] == [
        ("thumbs", 1.0, "So."),
        ("thumbs", 0.0, "Here."),
    ]
    assert len({row["rater_id"] for row in rows}) == 2


def test_a_files_own_names_are_told_once_in_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    names = "columns: {prompt: Q, completion: A, value: Liked, rater: Who}, fixed: {kind: thumbs}"
    recipe.write_text(
        f"state_dir: {tmp_path / 'state'}\nfeedback: {{names: {{{names}, words: {{liked: up}}}}}}\n"
    )
    table = write(tmp_path / "survey.csv", "Q,A,Liked,Who\nWhy?,So.,liked,ann\n")
    call = ["--recipe", str(recipe), "ingest", str(table), "--agent", "tea"]
    first = CliRunner().invoke(app, call)
    assert first.exit_code == 0, first.output
    assert "stored │ 1" in " ".join(first.output.split())
    other = CliRunner().invoke(app, [*call, "--map", "prompt=Question"])
    assert other.exit_code == 1
    assert "needed 'Question' among the columns" in " ".join(other.output.split())


def test_who_voted_is_read_where_a_tool_names_one_and_passed_over_where_it_does_not(
    rlhf: Run, tmp_path: Path
) -> None:
    row = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
    named: list[dict[str, object]] = [{"annotator_id": "w"}, {"rater": " ", "worker_id": 7}]
    named += [{"annotator_id": ["w", "v"]}]
    named += [{"rater_id": "0" * 32, "labeler": "w"}, {"worker_id": 1.5, "idempotency_key": ""}]
    lines = (json.dumps({**row, **who, "prompt": f"Why {n}?"}) for n, who in enumerate(named))
    rlhf("ingest", str(write(tmp_path / "pairs.jsonl", "\n".join(lines))), "--agent", "tea")
    told = rlhf("feedback", "export", "-", "--agent", "tea").stdout.splitlines()
    rows = [json.loads(line) for line in told]
    found = {row["prompt"][0]["content"]: row.get("rater_id") for row in rows}
    expected = [hash_rater("tea", "w"), hash_rater("tea", "7"), None, "0" * 32, None]
    assert [found[f"Why {n}?"] for n in range(5)] == expected


def test_a_row_whose_rater_is_known_by_now_is_the_row_that_was_there_before(
    rlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = '{"prompt": "Why?", "chosen": "So.", "rejected": "No.", "annotator_id": "w"}'
    take_in = ("ingest", str(write(tmp_path / "pairs.jsonl", row)), "--agent", "tea")
    with monkeypatch.context() as earlier:
        earlier.setattr(formats, "LABELLED", ())
        rlhf(*take_in)
    told = " ".join(rlhf(*take_in).stdout.split())
    assert "already known │ 1" in told
    assert cells(rlhf("status").stdout)["votes"].startswith("1")


def test_a_recipes_zone_holds_beside_names_on_the_command_line(rlhf: Run, tmp_path: Path) -> None:
    recipe = write(tmp_path / "zone.yaml", "feedback: {names: {zone: Europe/Berlin}}")
    row = json.dumps({**json.loads(THUMBS), "who": "ann", "occurred_at": "2026-01-02 03:04:05"})
    votes = str(write(tmp_path / "votes.jsonl", row))
    rlhf("--recipe", str(recipe), "ingest", votes, "--agent", "tea", "--map", "rater=who")
    out = json.loads(rlhf("feedback", "export", "-", "--agent", "tea").stdout)
    assert out["occurred_at"].startswith("2026-01-02T02:04:05")


def test_words_told_with_the_command_leave_the_recipes_names_as_they_are(
    rlhf: Run, tmp_path: Path
) -> None:
    recipe = write(tmp_path / "own.yaml", "feedback: {names: {columns: {rater: Kunde}}}")
    rows = ["q0;a;true;ann", "q1;a;false;bob", "q2;a;ok;ann"]
    votes = write(tmp_path / "votes.csv", "\n".join(["prompt;completion;label;Kunde", *rows]))
    take_in = ("--recipe", str(recipe), "ingest", str(votes), "--agent", "tea")
    told = " ".join(rlhf(*take_in, code=3).stdout.split())
    assert "--means 'ok=true|false'" in told
    told = " ".join(rlhf(*take_in, "--means", "ok=true").stdout.split())
    assert "stored │ 1" in told
    assert "already known │ 2" in told
    out = rlhf("feedback", "export", "-", "--agent", "tea").stdout.splitlines()
    found = [json.loads(line) for line in out]
    assert [(row["value"], row["rater_id"]) for row in found] == [
        (value, hash_rater("tea", who)) for value, who in ((1, "ann"), (0, "bob"), (1, "ann"))
    ]


def test_a_file_that_was_read_by_wrong_names_is_taken_back(rlhf: Run, tmp_path: Path) -> None:
    row = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "who": "ann"}
    rows = "\n".join(json.dumps({**row, "prompt": f"Why {n}?"}) for n in range(3))
    pairs = str(write(tmp_path / "pairs.jsonl", rows))
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", THUMBS)), "--agent", "tea")
    rlhf("ingest", pairs, "--agent", "tea")
    back = ("feedback", "withdraw", "--agent", "tea", "--file")
    told = " ".join(rlhf(*back, "pears.jsonl", code=1).stderr.split())
    assert "found 'pears.jsonl'; they came from pairs.jsonl (3), votes.jsonl (1)" in told
    rlhf(*back, "pairs.jsonl", typed="n\n", code=1)
    assert cells(rlhf("status").stdout)["votes"].startswith("4")
    assert rlhf(*back, "pairs.jsonl", "--yes").stdout == "votes of agent tea taken back: 3\n"
    assert cells(rlhf("status").stdout)["votes"].startswith("1")
    rlhf("ingest", pairs, "--agent", "tea")  # as it was read before
    book = ClaimBook(Workspace().database)
    book.claim("tea", "f", newest_seq(book.database, "tea"), holder="run", asked_by="sensor")
    assert cells(rlhf("status").stdout)["votes"].startswith("4")
    told = rlhf(*back, "pairs.jsonl", "--yes").stdout
    assert "the turn at work learns from them: its version waits for a person" in told
    rlhf("ingest", pairs, "--agent", "tea", "--map", "rater=who")
    assert cells(rlhf("status").stdout)["votes"].startswith("4")
    out = tmp_path / "out.jsonl"
    rlhf("feedback", "export", str(out), "--agent", "tea")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["kind"] for row in found) == ["preference"] * 3 + ["thumbs"]


def test_each_row_of_a_file_that_was_taken_back_counts_as_it_is_read_then(
    rlhf: Run, tmp_path: Path
) -> None:
    cells_of = [("Why?", "up", "ann"), ("How?", "like", ""), ("When?", "like", "bob")]
    lines = [f"{prompt},So.,{said},{who},2026-05-01 12:00:00" for prompt, said, who in cells_of]
    votes = write(
        tmp_path / "votes.csv", "\n".join(["prompt,completion,value,who,occurred_at", *lines])
    )
    take_in = ("ingest", str(votes), "--agent", "tea", "--set", "kind=thumbs")
    wrongly = ("--zone", "Asia/Tokyo", "--means", "like=down", "--source", "model")
    rightly = ("--zone", "Europe/Berlin", "--means", "like=up", "--map", "rater=who")
    rlhf(*take_in, *wrongly)
    rlhf("feedback", "withdraw", "--agent", "tea", "--file", "votes.csv", "--yes")
    assert "stored │ 3" in " ".join(rlhf(*take_in, *rightly).stdout.split())
    assert "already known │ 3" in " ".join(rlhf(*take_in, *rightly).stdout.split())
    out = rlhf("feedback", "export", "-", "--agent", "tea").stdout
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["value"] for row in found] == [1, 1, 1]
    assert {row["occurred_at"][11:16] for row in found} == {"10:00"}
    assert sum("rater_id" in row for row in found) == 2


# -- a person's data ----------------------------------------------------------------------------


def test_a_person_is_shown_and_erased(rlhf: Run, tmp_path: Path) -> None:
    row = '{"kind": "thumbs", "value": "up", "prompt": "Why?", "completion": "So.", "rater": "ann"}'
    rlhf("ingest", str(write(tmp_path / "votes.jsonl", row)), "--agent", "tea")
    out = tmp_path / "ann.json"
    rlhf("raters", "export", "ann", "--out", str(out))
    assert out.stat().st_mode & 0o077 == 0
    [tea] = json.loads(out.read_text())["agents"]
    again = ("raters", "export", "ann", "--out", str(out))
    assert f"found something at {out}; choose another" in rlhf(*again, code=1).stderr
    late = write(tmp_path / "state" / "inbox" / "tea" / "late.csv", "rater\nann\n")
    shown = "not looked into: inbox/tea/late.csv; look for their rows in it"
    assert shown in rlhf(*again, "--force").stderr
    late.unlink()
    assert json.loads(rlhf("raters", "export", tea["rater_id"]).stdout)["agents"] == [tea]
    asked = rlhf("raters", "erase", "ann", typed="n\n", code=1)
    assert "agent tea: 1 votes, 0 interactions, 0 traces" in asked.output
    done = rlhf("raters", "erase", "ann", typed="y\n")
    assert "feedback 1" in done.stdout
    assert rlhf("raters", "erase", "ann", "--yes").stdout == done.stdout.splitlines()[-1] + "\n"
    unknown = rlhf("raters", "erase", "bob", "--yes", code=1)
    assert "found none; give the id as it was sent" in unknown.stderr
