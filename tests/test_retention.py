"""What goes and what never does: real folders, a real ledger, real claims."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import sqlite3
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from automation.jobs import prune_state
from resources.pipeline import Pipeline
from rlhf_pipeline import database as db
from rlhf_pipeline import retention
from rlhf_pipeline.backup import back_up
from rlhf_pipeline.cli import app
from rlhf_pipeline.config import RECIPES, KeptSettings, RetentionSettings, Settings, load_settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.erasure import erase
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.evaluation.facts import SUPPORT
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.claims import ERASURE, PRUNE, ClaimBook
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import file_sha256, folder_sha256, write_json
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    hash_rater,
    hashed,
    now,
    prompt_to_json,
    user_prompt,
)
from rlhf_pipeline.registry import forgetting
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.reward import HEAD, SETTINGS
from rlhf_pipeline.stages import PAIRS
from rlhf_pipeline.topics import ERASED

NONE = KeptSettings(newest=0, days=0)
GREEDY = RetentionSettings(checkpoints=NONE, rewards=NONE, turns=NONE)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@dataclass
class State:
    """A state folder; each agent is made by the test that names it."""

    folder: Path
    database: Database
    rules: RetentionSettings = GREEDY
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def settings(self) -> Settings:
        return Settings(state_dir=self.folder, retention=self.rules)

    @property
    def ledger(self) -> PromotionLedger:
        return PromotionLedger(self.database, self.folder)

    @property
    def claims(self) -> ClaimBook:
        return ClaimBook(self.database)

    @property
    def registry(self) -> ModelRegistry:
        mlflow = self.folder / "mlflow"
        return ModelRegistry(self.ledger, f"sqlite:///{mlflow}/mlflow.db", mlflow)

    def new_agent(self) -> str:
        """Return an agent with a baseline, registered from a turn of its own."""
        agent = f"agent-{next(self.numbers)}"
        FeedbackStore(self.database).ensure_agent(agent)
        turn = self.trained(agent, "seeds")
        write(turn / "sft" / "model.safetensors", f"{agent} baseline")
        self.ledger.add_baseline(
            agent,
            label="v0",
            path=turn / "sft",
            files=folder_sha256(turn / "sft"),
            lineage={},
            actor="test",
            fingerprint=hashed(agent, "seeds"),
        )
        return agent

    def trained(
        self, agent: str, name: str, *, state: str | None = "done", days_ago: float = 50
    ) -> Path:
        """Leave what a turn leaves, with a claim in this state, and return the turn's folder."""
        mark = hashed(agent, name)
        folder = self.settings.turn_folder(agent, mark)
        data = self.settings.agent_folder(agent) / "snapshots" / mark[:16]
        write(data / PAIRS, name)
        write(folder / "ppo" / "checkpoints" / "update-000001" / "policy.safetensors", name)
        write(folder / "ppo" / "policy" / "model.safetensors", f"{agent} {name}")
        for job in ("proxy", "stopping", "gate"):
            write(folder / "reward" / job / "trunk" / "model.safetensors", name)
            write(folder / "reward" / job / "report.json", "{}")
        if state is not None:
            at = now() - timedelta(days=days_ago)
            row = {"agent_id": agent, "fingerprint": mark, "watermark": 1, "attempt": 1}
            row |= {"state": state, "holder": f"run-{name}", "asked_by": "sensor"}
            moments = dict.fromkeys(("created_at", "heartbeat_at", "expires_at"), at)
            if state == "held":
                moments["expires_at"] = now() + timedelta(minutes=3)
            with self.database.write() as connection:
                connection.execute(db.claims.insert().values(**row, **moments))
        return folder

    def registered(
        self,
        agent: str,
        name: str,
        *,
        passed: bool = True,
        previous: Path | None = None,
        recipe: dict[str, Any] | None = None,
    ) -> int:
        """Register the version that a turn made, and return its number.

        `previous` is the folder of the turn whose reward models its own began from.
        """
        mark = hashed(agent, name)
        folder = self.settings.turn_folder(agent, mark)
        data = self.settings.agent_folder(agent) / "snapshots" / mark[:16]
        champion, baseline = self.ledger.champion(agent), self.ledger.baseline(agent)
        assert champion is not None
        assert baseline is not None
        made = self.ledger.add_version(
            agent,
            label="v1",
            path=folder / "ppo" / "policy",
            files=folder_sha256(folder / "ppo" / "policy"),
            lineage={
                "data": {p.name: file_sha256(p) for p in data.iterdir()},
                "reward_models": {},
                "started_from": str(champion.path),
                "baseline": str(baseline.path),
                "previous": str(previous) if previous else None,
                "recipe": recipe or {},
            },
            gate={"passed": passed, "results": []},
            fingerprint=mark,
        )
        return made.version

    def promote(self, agent: str, version: int) -> None:
        champion = self.ledger.champion(agent)
        assert champion is not None
        self.ledger.promote(
            agent, version, actor="ann", reason="test", expected_champion=champion.version
        )

    def prune(self, agent: str, **wishes: Any) -> list[retention.Item]:
        return retention.prune(self.registry, lambda _: self.settings, agents=[agent], **wishes)

    def files(self, agent: str) -> set[str]:
        folder = self.settings.agent_folder(agent)
        return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[State]:
    folder = (tmp_path_factory.mktemp("retention") / "state").resolve()
    database = Database(f"sqlite:///{folder}/feedback.db")
    yield State(folder, database)
    database.close()


def reachable(state: State, agent: str) -> set[Path]:
    """Return every file that ledger, claims and experiments point at, found without our code."""
    ledger, folder = state.ledger, state.settings.agent_folder(agent)
    standing, versions = ledger.standing(agent), ledger.versions(agent)
    found: set[Path] = set()
    for version in versions:
        found |= {version.path / name for name in version.files}
        data = folder / "snapshots" / (version.fingerprint or "")[:16]
        found |= {data / name for name in version.lineage.get("data", {})}
        for key in ("started_from", "baseline"):  # what `rlhf reproduce` begins from
            if key in version.lineage:
                found |= {p for p in Path(version.lineage[key]).rglob("*") if p.is_file()}
        if version.lineage.get("previous"):
            found |= set(Path(version.lineage["previous"], "reward").rglob("*"))
    in_use = {entry.version for entry in standing.history}
    in_use |= {v.version for v in (standing.challenger, standing.previous) if v is not None}
    running = ExperimentBook(state.database).running(agent)
    in_use |= {running.champion, running.challenger} if running else set()
    for version in versions:
        if version.version in in_use and version.path.name == "policy":
            found |= set((version.path.parents[1] / "reward").rglob("*"))
    done = state.claims.last_done(agent)
    held = state.claims.held(agent)
    for claim in (done, held):
        if claim is not None:
            mark = claim.fingerprint[:16]
            found |= set((folder / "snapshots" / mark).rglob("*"))
            found |= set((folder / "turns" / mark / "reward").rglob("*"))
    if held is not None:
        found |= set(folder.rglob("*"))
    return {path for path in found if path.is_file()}


TURN = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["done", "done", "done", "failed", "lost", None]),
        "registered": st.booleans(),
        "passed": st.booleans(),
        "promoted": st.booleans(),
        "looks_back": st.booleans(),
        "days_ago": st.integers(0, 100),
    }
)


def turn(state: str = "done", *, registered: bool = True, promoted: bool = False) -> dict[str, Any]:
    """Return a turn of long ago."""
    wanted = {"registered": registered, "promoted": promoted, "looks_back": False}
    return {"state": state, "passed": True, "days_ago": 100, **wanted}


NOTHING_ELSE = {"rolls_back": False, "experiments": False, "trains": False, "newest": 0, "days": 0}


@example(turns=[turn(promoted=True), turn()], **NOTHING_ELSE)
@example(turns=[turn(promoted=True), turn(registered=False)], **NOTHING_ELSE)
@example(turns=[turn(), {**turn(), "looks_back": True}], **NOTHING_ELSE)
@example(turns=[turn(), {**turn(), "passed": False}], **NOTHING_ELSE)  # an older challenger
@example(turns=[turn(), turn(), turn()], **{**NOTHING_ELSE, "experiments": True})
@example(turns=[turn(promoted=True)] * 3, **{**NOTHING_ELSE, "rolls_back": True})
@example(turns=[turn("failed", registered=False)], **{**NOTHING_ELSE, "trains": True})
@given(
    turns=st.lists(TURN, max_size=4),
    rolls_back=st.booleans(),
    experiments=st.booleans(),
    trains=st.booleans(),
    newest=st.integers(0, 2),
    days=st.sampled_from([0, 10]),
)
@settings(max_examples=6)
def test_nothing_reachable_from_the_ledger_is_ever_removed(
    state: State,
    turns: list[dict[str, Any]],
    rolls_back: bool,
    experiments: bool,
    trains: bool,
    newest: int,
    days: int,
) -> None:
    agent = state.new_agent()
    for number, one in enumerate(turns):
        standing = state.ledger.standing(agent)
        running = ExperimentBook(state.database).running(agent)
        if experiments and running is None and standing.champion and standing.challenger:
            ExperimentBook(state.database).start(
                agent,
                champion=standing.champion.version,
                challenger=standing.challenger.version,
                share=0.1,
                actor="test",
            )
        state.trained(agent, str(number), state=one["state"], days_ago=one["days_ago"])
        if one["registered"]:
            last = state.ledger.versions(agent)[-1].work if one["looks_back"] else None
            version = state.registered(agent, str(number), passed=one["passed"], previous=last)
            if one["passed"] and one["promoted"]:
                state.promote(agent, version)
    if rolls_back and state.ledger.standing(agent).previous is not None:
        state.ledger.rollback(agent, actor="ann", reason="worse")
    if trains:
        state.trained(agent, "at work", state="held", days_ago=0)
    kept = KeptSettings(newest=newest, days=days)
    rules = RetentionSettings(checkpoints=kept, rewards=kept, turns=kept)
    before, needed = state.files(agent), reachable(state, agent)
    items = State(state.folder, state.database, rules).prune(agent)
    assert [path for path in needed if not path.is_file()] == []
    for each in state.ledger.versions(agent):
        assert folder_sha256(each.path) == dict(each.files)
    gone = before - state.files(agent)
    assert bool(gone) == any(item.stays is None for item in items)
    assert state.claims.held(agent) is None or trains


def test_what_is_old_and_nothing_points_at_goes(state: State) -> None:
    agent = state.new_agent()
    for name in ("won", "refused", "newest"):
        state.trained(agent, name)
        state.registered(agent, name, passed=name == "won")
        if name == "won":
            state.promote(agent, 1)
    state.trained(agent, "failed", state="failed")
    state.trained(agent, "young", state="failed", days_ago=1)
    before = state.files(agent)
    rules = GREEDY.model_copy(update={"turns": KeptSettings(newest=0, days=10)})
    old = State(state.folder, state.database, rules)
    told = old.prune(agent, dry_run=True)
    assert state.files(agent) == before
    assert old.prune(agent) == told
    mark = {name: hashed(agent, name)[:16] for name in ("seeds", "won", "refused", "newest")}
    failed, young = hashed(agent, "failed")[:16], hashed(agent, "young")[:16]
    gone = {Path(name).parts for name in before - state.files(agent)}
    assert {parts[:2] for parts in gone if parts[0] == "snapshots"} == {("snapshots", failed)}
    assert {parts[1] for parts in gone if parts[2:4] == ("ppo", "checkpoints")} == {
        *mark.values(),
        failed,
    }
    weights = {parts[1] for parts in gone if parts[2] == "reward" and parts[1] != failed}
    assert weights == {mark["refused"]}
    assert (
        (old.settings.turn_folder(agent, hashed(agent, "refused")))
        .joinpath("reward", "gate", "report.json")
        .exists()
    )
    why = {(item.kind, item.name): item.stays for item in told}
    assert why["rewards", mark["won"]] == "version 1 is the champion"
    assert why["rewards", mark["newest"]] == "version 3 is the newest version"
    assert why["turns", young] == "younger than 10 days"
    assert why["turns", failed] is None
    assert old.prune(agent, dry_run=True) == [item for item in told if item.stays is not None]
    state.ledger.rollback(agent, actor="ann", reason="worse")
    why = {(item.kind, item.name): item.stays for item in old.prune(agent, dry_run=True)}
    assert why["rewards", mark["won"]] == "version 1 was champion"


def test_reward_models_that_a_version_began_from_stay_in_a_folder_that_was_moved_too(
    state: State,
) -> None:
    """`rlhf reproduce` of that version begins from them again."""
    agent = state.new_agent()
    for name in ("refused", "other", "newest"):
        state.trained(agent, name)
    before = Path("/of/before/agents", agent, "turns", hashed(agent, "refused")[:16])
    for name, previous in (("refused", None), ("other", None), ("newest", before)):
        state.registered(agent, name, passed=False, previous=previous)
    why = {item.name: item.stays for item in state.prune(agent) if item.kind == "rewards"}
    assert why[hashed(agent, "refused")[:16]] == "version 3 began from them"
    assert why[hashed(agent, "other")[:16]] is None
    weights = state.settings.agent_folder(agent) / "turns" / before.name / "reward"
    assert len([*weights.glob("*/trunk")]) == 3


def test_reward_models_of_a_version_promoted_while_a_prune_looks_stay(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking through MLflow takes a while, and a promotion waits for no prune."""
    agent, looks = state.new_agent(), forgetting.old_traces
    for name in ("kept", "other", "newest"):
        state.trained(agent, name)
        state.registered(agent, name)

    def while_looking(*given: Any) -> list[str]:
        state.promote(agent, 1)
        return looks(*given)

    monkeypatch.setattr(forgetting, "old_traces", while_looking)
    why = {item.name: item.stays for item in state.prune(agent) if item.kind == "rewards"}
    assert why[hashed(agent, "kept")[:16]] == "version 1 is the champion"
    assert why[hashed(agent, "other")[:16]] is None
    turns = state.settings.agent_folder(agent) / "turns"
    assert len([*turns.glob(f"{hashed(agent, 'kept')[:16]}/reward/*/trunk")]) == 3
    assert not [*turns.glob(f"{hashed(agent, 'other')[:16]}/reward/*/trunk")]


def test_reward_models_that_another_agents_recipe_names_stay(state: State) -> None:
    agent, other = state.new_agent(), state.new_agent()
    lost: list[str] = []
    names = ("named", "failed", "function", "base", "trained by", "other", "newest")
    for name in names:
        state.trained(agent, name, state="failed" if name == "failed" else "done")
        if name != "failed":
            state.registered(agent, name, passed=False)
    turns = {name: state.settings.turn_folder(agent, hashed(agent, name)) for name in names}
    named = {other: turns["named"] / "reward", agent: turns["failed"] / "reward"}
    for name in (SETTINGS, HEAD):
        (turns["function"] / "reward" / "proxy" / name).touch()
    elsewhere = Path("/elsewhere") / turns["trained by"].relative_to(state.settings.state_dir)
    state.trained(other, "theirs")
    state.registered(
        other,
        "theirs",
        recipe={"state_dir": "/elsewhere", "reward": {"given": str(elsewhere / "reward")}},
    )

    def settings_of(agent_id: str) -> Settings:
        if agent_id in lost:
            raise ConfigError("no such recipe")
        folder = named.get(agent_id)
        given = None if folder is None else os.path.relpath(folder, RECIPES.parent)
        reward: dict[str, Any] = {"given": given}
        if agent_id == other and folder is not None:
            reward["base"] = str(turns["base"] / "reward" / "proxy" / "trunk")
            taste = {"function": str(turns["function"] / "reward" / "proxy")}
            reward["functions"] = {"old_taste": taste}
        return load_settings("tiny", {"state_dir": state.folder, "reward": reward}).model_copy(
            update={"retention": GREEDY}
        )

    def prune(**wishes: Any) -> dict[tuple[str, str], str | None]:
        items = retention.prune(state.registry, settings_of, agents=[agent], **wishes)
        return {(item.kind, item.name): item.stays for item in items}

    told = prune(dry_run=True)
    assert prune() == told
    marks = {name: folder.name for name, folder in turns.items()}
    theirs = f"the recipe of {other} names them"
    assert told["rewards", marks["named"]] == f"{theirs} (reward.given)"
    assert told["rewards", marks["function"]] == f"{theirs} (reward.functions.old_taste)"
    assert told["rewards", marks["base"]] == f"{theirs} (reward.base)"
    assert told["turns", marks["failed"]] == f"the recipe of {agent} names them (reward.given)"
    assert told["rewards", marks["other"]] is None
    assert len([*turns["named"].glob("reward/*/trunk")]) == 3
    assert turns["failed"].is_dir()
    named.clear()
    lost.append(other)
    why = f"the recipe of {other} does not load, and may name them"
    assert prune()["rewards", marks["named"]] == why
    lost.clear()
    told = prune()
    assert told["rewards", marks["named"]] is None
    assert told["rewards", marks["function"]] is None
    by = f"version 1 of {other} was trained by them (reward.given)"
    assert told["rewards", marks["trained by"]] == by
    assert not [*turns["named"].glob("reward/*/trunk")]


def test_the_newest_stay_however_old(state: State) -> None:
    agent = state.new_agent()
    for days in (90, 80, 70):
        state.trained(agent, f"{days}", state="failed", days_ago=days)
    kept = RetentionSettings(turns=KeptSettings(newest=2, days=1))
    items = State(state.folder, state.database, kept).prune(agent)
    turns = [(item.name, item.stays) for item in items if item.kind == "turns"]
    names = [hashed(agent, str(days))[:16] for days in (70, 80, 90)]
    expected = ["among the newest 2", "among the newest 2", None]
    assert turns == list(zip(names, expected, strict=True))


def test_an_agent_that_is_being_trained_is_left_alone(state: State) -> None:
    agent = state.new_agent()
    state.trained(agent, "failed", state="failed")
    state.trained(agent, "at work", state="held")
    before = state.files(agent)
    items = state.prune(agent)
    assert state.files(agent) == before
    assert {item.stays for item in items} == {"run run-at work trains it"}


@pytest.mark.parametrize(
    ("asked_by", "why"),
    [
        (ERASURE, "the agent is being cleared of somebody's data"),
        (PRUNE, "the agent is being cleared of old files"),
    ],
)
def test_an_agent_that_is_being_cleared_is_said_to_be(
    asked_by: str, why: str, state: State
) -> None:
    agent = state.new_agent()
    state.trained(agent, "failed", state="failed")
    ClaimBook(state.database).claim(agent, hashed("it"), 0, holder="dead", asked_by=asked_by)
    assert {item.stays for item in state.prune(agent)} == {why}


def test_folders_that_a_training_removes_meanwhile_keep_nobody_from_being_pruned(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = state.new_agent()
    turn = state.trained(agent, "at work", state="held")
    unclaimed = state.trained(agent, "by hand", state=None)
    scandir, stat, gone = os.scandir, Path.stat, turn / "ppo" / "checkpoints" / "update-000001"

    def scan(path: Any) -> Any:
        if str(path) == str(gone):
            shutil.rmtree(gone, ignore_errors=True)
        return scandir(path)

    def stated(path: Path, **more: Any) -> os.stat_result:
        if path == unclaimed and unclaimed in listed:
            raise FileNotFoundError(errno.ENOENT, "it has gone", str(path))
        listed.add(path)
        return stat(path, **more)

    listed: set[Path] = set()
    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(Path, "stat", stated)
    items = state.prune(agent)
    assert not gone.exists()
    assert {item.stays for item in items} == {"run run-at work trains it"}


class Killed(BaseException):
    """What kill -9 is to code: nothing after it runs."""


def test_a_prune_that_was_killed_anywhere_ends_the_same_when_it_is_asked_again(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = state.new_agent()
    for name in ("a", "b"):
        state.trained(whole, name, state="failed")
    state.prune(whole)
    left = {name.replace(hashed(whole, "seeds")[:16], "seeds") for name in state.files(whole)}
    removed = shutil.rmtree
    for steps in range(4):
        agent = state.new_agent()
        for name in ("a", "b"):
            state.trained(agent, name, state="failed")
        count = itertools.count()

        def killed(path: Path, count: Iterator[int] = count, steps: int = steps, **_: Any) -> None:
            if next(count) >= steps:
                next(p for p in sorted(Path(path).rglob("*")) if p.is_file()).unlink()  # half way
                raise Killed
            removed(path)

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", killed)
            with pytest.raises(Killed):
                state.prune(agent)
        folder = state.settings.agent_folder(agent)
        for turn in (folder / "turns").glob("[!.]*"):  # whole or gone
            assert (turn / "ppo" / "policy" / "model.safetensors").exists()
        state.prune(agent)
        seeds = hashed(agent, "seeds")[:16]
        assert {name.replace(seeds, "seeds") for name in state.files(agent)} == left


def test_after_a_prune_a_backup_is_whole_and_erasures_find_nothing_left(tmp_path: Path) -> None:
    """What a snapshot that goes said cannot be looked for later, so it is blanked as it goes."""
    folder = (tmp_path / "state").resolve()
    database = Database(f"sqlite:///{folder}/feedback.db")
    state = State(folder, database)
    agent = state.new_agent()
    asked = {"ann": "is nougat good?", "bob": "is pear good?"}
    for rater, question in asked.items():
        vote = Feedback(
            agent,
            FeedbackKind.thumbs,
            rater,
            prompt=user_prompt(question),
            completion="Yes.",
            number=1.0,
            rater_id=hash_rater(agent, rater),
        )
        FeedbackStore(database).append([vote])
        watermark = snapshot.newest_seq(database, agent)
        mark = snapshot.fingerprint(database, agent, watermark)
        taken = state.settings.agent_folder(agent) / "snapshots" / mark[:16]
        snapshot.take(database, agent, watermark, taken / snapshot.FILE)
    write_json(taken / SUPPORT, {"associations": [{"ngram": "nougat bar"}], "by_rater": []})
    examples = [{"prompt": question, "completion": "Yes."} for question in asked.values()]
    event = {"__class__": "TableRecord", "rows": [*examples, {"found": "'nougat bar' wins 9"}]}
    (folder / "dagster").mkdir()
    dagster = sqlite3.connect(folder / "dagster" / "runs.db", isolation_level=None)
    dagster.execute("CREATE TABLE event_logs (id INTEGER PRIMARY KEY, run_id, event)")
    dagster.execute("INSERT INTO event_logs (event) VALUES (?)", (json.dumps(event),))

    def shown() -> list[str]:
        (text,) = dagster.execute("SELECT event FROM event_logs").fetchone()
        return [next(iter(row.values())) for row in json.loads(text)["rows"]]

    kept = GREEDY.model_copy(update={"turns": KeptSettings(newest=1, days=0)})
    State(folder, database, kept).prune(agent)  # the first snapshot; the second says the same
    assert [p.name for p in taken.parent.iterdir() if p.name != _mark(agent)] == [mark[:16]]
    assert shown() == [*asked.values(), "'nougat bar' wins 9"]
    state.prune(agent)
    assert not taken.exists()
    assert shown() == [ERASED] * 3
    dagster.close()
    told = erase(state.settings, state.registry, "ann")
    assert told["erasures"][0]["counts"]["feedback"] == 1
    assert back_up(state.settings, tmp_path / "copy").damaged == ()
    database.close()


def _mark(agent: str) -> str:
    """Return the folder of the turn that made the baseline."""
    return hashed(agent, "seeds")[:16]


def test_what_other_snapshots_say_is_looked_at_one_snapshot_at_a_time(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot's prompts may be all there is of memory; an agent has many snapshots."""

    class Prompts(frozenset[str]):
        held: ClassVar[weakref.WeakSet[Prompts]] = weakref.WeakSet()

    most = 0

    def read(taken: Path) -> Prompts:
        nonlocal most
        prompts = Prompts({prompt_to_json(user_prompt(taken.name))})
        Prompts.held.add(prompts)
        most = max(most, len(Prompts.held))
        return prompts

    monkeypatch.setattr(retention, "_prompts_of", read)
    snapshots = state.settings.agent_folder(state.new_agent()) / "snapshots"
    for name in "abcdef":
        (snapshots / name).mkdir(parents=True)
    retention._said_alone(snapshots / "a")
    assert most == 2  # what goes, and one that stays


def test_snapshots_are_read_no_further_than_until_all_is_said_again(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def read(taken: Path) -> frozenset[str]:
        looked.append(f"{taken.parents[1].name}/{taken.name}")
        return frozenset({"how much?", "when?"} if taken.name in "ac" else {"how much?"})

    monkeypatch.setattr(retention, "_prompts_of", read)
    ours = state.new_agent()
    for age, name in enumerate("ecb"):
        folder = state.settings.agent_folder(ours) / "snapshots" / name
        folder.mkdir(parents=True)
        os.utime(folder, (1e9 - age, 1e9 - age))
    taken = state.settings.agent_folder(ours) / "snapshots" / "a"
    shutil.rmtree(state.settings.agent_folder(ours) / "snapshots" / hashed(ours, "seeds")[:16])
    taken.mkdir()
    retention._said_alone(taken)
    assert looked == [f"{ours}/a", f"{ours}/e", f"{ours}/c"]


@pytest.mark.parametrize("file", [SUPPORT, snapshot.FILE])
def test_a_damaged_snapshot_stays_and_keeps_nothing_else_from_going(
    state: State, file: str
) -> None:
    damaged, other = state.new_agent(), state.new_agent()
    for agent in (damaged, other):
        state.trained(agent, "failed", state="failed")
    mark = hashed(damaged, "failed")
    broken = state.settings.agent_folder(damaged) / "snapshots" / mark[:16]
    write(broken / file, "")
    items = state.prune(damaged)
    [why] = {item.stays for item in items if broken in item.places}
    assert str(why).startswith("its snapshot is damaged, look at it: ")
    assert broken.exists()
    write(
        state.settings.agent_folder(other) / "snapshots" / hashed(other, "failed")[:16] / SUPPORT,
        json.dumps({"associations": [{"ngram": "of no other one"}]}),
    )
    state.prune(other)
    assert not state.settings.turn_folder(other, hashed(other, "failed")).exists()
    write_json(broken / SUPPORT, {"associations": []})
    (broken / snapshot.FILE).unlink(missing_ok=True)
    state.prune(damaged)
    assert not broken.exists()


def test_a_snapshot_whose_prompt_is_none_stays_and_is_told_of(state: State) -> None:
    """Unredacted, a snapshot is taken with it, and its row is set aside later."""
    agent, other = state.new_agent(), state.new_agent()
    for each in (agent, other):
        state.trained(each, "failed", state="failed")
    snapshots = state.settings.agent_folder(agent) / "snapshots"
    broken = snapshots / hashed(agent, "failed")[:16]
    pd.DataFrame({"prompt": ["not json at all"]}).to_parquet(broken / snapshot.FILE)
    [why] = {item.stays for item in state.prune(agent) if broken in item.places}
    assert str(why).startswith("its snapshot is damaged, look at it: ")
    state.prune(other)
    assert not state.settings.turn_folder(other, hashed(other, "failed")).exists()


@pytest.mark.parametrize("linked", ["snapshots", "turns"])
def test_a_folder_that_was_moved_and_linked_is_left_to_a_person(
    state: State, tmp_path: Path, linked: str
) -> None:
    agent = state.new_agent()
    state.trained(agent, "failed", state="failed")
    link = state.settings.agent_folder(agent) / linked / hashed(agent, "failed")[:16]
    moved = tmp_path / "elsewhere"
    shutil.move(link, moved)
    link.symlink_to(moved)
    items = state.prune(agent)
    [why] = {item.stays for item in items if link in item.places}
    assert why == f"{link} is a link: remove it and what it leads to by hand"
    assert link.is_symlink()
    assert any(moved.iterdir())


def test_the_command_lists_what_goes_and_what_stays(state: State) -> None:
    agent = state.new_agent()
    state.trained(agent, "failed", state="failed")
    run = CliRunner().invoke(app, ["prune", "--dry-run", "--json", "--state", str(state.folder)])
    told = [one for one in json.loads(run.stdout) if one["agent"] == agent]
    assert {one["kind"]: one["stays"] for one in told} == {
        "checkpoints": "among the newest 1",
        "turns": "among the newest 3",
    }
    table = CliRunner().invoke(app, ["prune", "--dry-run", "--state", str(state.folder)])
    assert "stays: among the newest 3" in table.stdout
    assert table.stdout.strip().endswith("0.0 MiB")


def test_rows_of_an_agent_that_is_being_trained_stay_and_the_command_tells_of_them(
    state: State, tmp_path: Path
) -> None:
    agent = state.new_agent()
    store = FeedbackStore(state.database)
    old = Interaction(f"of {agent}", agent, user_prompt("hi"), "Yes.", 1, now() - timedelta(50))
    store.add_interactions([old])
    tree = {"state_dir": str(state.folder), "retention": {"chats": {"newest": 0, "days": 30}}}
    recipe = tmp_path / "brief.yaml"
    recipe.write_text(json.dumps(tree))  # JSON is YAML
    store.set_agent(agent, recipe=str(recipe))

    def asked(*options: str) -> str:
        return CliRunner().invoke(app, ["prune", "--state", str(state.folder), *options]).stdout

    def of_chats(*options: str) -> dict[str, Any]:
        [told] = [one for one in json.loads(asked("--json", *options)) if one["kind"] == "chats"]
        return {name: told[name] for name in ("agent", "rows", "stays")}

    state.trained(agent, "at work", state="held")
    assert of_chats() == {"agent": agent, "rows": 1, "stays": "run run-at work trains it"}
    assert store.interaction(old.interaction_id) == old
    held = state.claims.held(agent)
    assert held is not None
    state.claims.let_go(held.token)
    assert "1 rows" in asked("--dry-run")
    assert of_chats() == {"agent": agent, "rows": 1, "stays": None}
    assert store.interaction(old.interaction_id) is None


def test_the_command_prunes_the_others_and_fails_where_a_recipe_has_gone(
    state: State, tmp_path: Path
) -> None:
    tree = {"state_dir": str(state.folder), "retention": json.loads(GREEDY.model_dump_json())}
    recipe = tmp_path / "greedy.yaml"
    recipe.write_text(json.dumps(tree))  # JSON is YAML
    without, agent = state.new_agent(), state.new_agent()  # the oldest is looked at first
    store = FeedbackStore(state.database)
    kept, gone = (state.trained(one, "failed", state="failed") for one in (without, agent))
    store.set_agent(agent, recipe=str(recipe))
    store.set_agent(without, recipe="/srv/gone.yaml")
    run = CliRunner().invoke(app, ["prune", "--json", "--state", str(state.folder)])
    store.set_agent(without, recipe=str(recipe))  # the state is every test's
    assert run.exit_code == 1
    assert f"{without}: needed a recipe, found no /srv/gone.yaml" in run.stderr
    told = {one["agent"] for one in json.loads(run.stdout)}
    assert agent in told
    assert without not in told
    assert (kept.exists(), gone.exists()) == (True, False)


def test_the_nightly_job_leaves_agents_alone_whose_settings_say_so(
    state: State, tmp_path: Path
) -> None:
    tree = {"state_dir": str(state.folder), "retention": json.loads(GREEDY.model_dump_json())}
    recipes = {}
    for enabled in (True, False):
        tree["retention"]["enabled"] = enabled
        recipes[enabled] = tmp_path / f"{enabled}.yaml"
        recipes[enabled].write_text(json.dumps(tree))  # JSON is YAML
    agents = {enabled: state.new_agent() for enabled in recipes}
    for enabled, agent in agents.items():
        state.trained(agent, "failed", state="failed")
        FeedbackStore(state.database).set_agent(agent, recipe=str(recipes[enabled]))
    pipeline = Pipeline(recipe=str(recipes[True]))
    run = prune_state.execute_in_process(
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        resources={"pipeline": pipeline},
    )
    assert run.success
    failed = [
        state.settings.turn_folder(agents[enabled], hashed(agents[enabled], "failed"))
        for enabled in (True, False)
    ]
    assert [folder.exists() for folder in failed] == [False, True]


def test_the_nightly_job_serves_the_others_and_fails_where_a_recipe_has_gone(
    state: State, tmp_path: Path
) -> None:
    tree = {"state_dir": str(state.folder), "retention": json.loads(GREEDY.model_dump_json())}
    recipe = tmp_path / "greedy.yaml"
    recipe.write_text(json.dumps(tree))  # JSON is YAML
    agent, without = state.new_agent(), state.new_agent()
    store = FeedbackStore(state.database)
    state.trained(agent, "failed", state="failed")
    store.set_agent(agent, recipe=str(recipe))
    store.set_agent(without, recipe="/srv/gone.yaml")
    run = prune_state.execute_in_process(
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        resources={"pipeline": Pipeline(recipe=str(recipe))},
        raise_on_error=False,
    )
    store.set_agent(without, recipe=str(recipe))  # the state is every test's
    [failure] = [e for e in run.all_events if e.is_step_failure]
    assert f"{without}: needed a recipe, found no /srv/gone.yaml" in str(
        failure.event_specific_data
    )
    assert not state.settings.turn_folder(agent, hashed(agent, "failed")).exists()


def test_traces_outlast_the_votes_on_them() -> None:
    with pytest.raises(
        (ConfigError, ValueError), match=r"traces\.days must be 30 or more, found 7"
    ):
        RetentionSettings(traces=KeptSettings(newest=1, days=7))
