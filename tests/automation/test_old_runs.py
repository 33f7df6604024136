"""Which of Dagster's finished runs go, in a real instance: none that anything still leans on."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dagster as dg
import pytest
from typer.testing import CliRunner

from automation.jobs import WATERMARK
from automation.old_runs import NO_AGENT, prune_runs
from automation.processes import ROOT
from resources.pipeline import AGENT
from rlhf_pipeline import database as db
from rlhf_pipeline.cli import app
from rlhf_pipeline.config import KeptSettings, RetentionSettings, Settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import folder_sha256, write_json
from rlhf_pipeline.records import hashed, now
from rlhf_pipeline.registry.ledger import PromotionLedger

pytestmark = pytest.mark.slow  # an instance of its own, and steps that really run

LATER = now() + timedelta(days=60)


@dg.asset
def thing() -> None:
    """Stand for what a turn makes."""


@dg.job
def retrain() -> None:
    """Bear the name of the real one, which alone is looked at."""


@dg.job
def ingest_file() -> None:
    """Likewise."""


class World:
    """A state folder's Dagster, claims and ledger."""

    def __init__(self, state: Path) -> None:
        self.state = state
        home = state / "dagster"
        home.mkdir(parents=True)
        (home / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
        self.instance = dg.DagsterInstance.from_config(str(home))
        self.database = Database(f"sqlite:///{state}/feedback.db")
        self.ledger = PromotionLedger(self.database, state)

    def made(self, agent: str) -> str:
        """Return a run that made the asset."""
        done = dg.materialize([thing], instance=self.instance, tags={AGENT: agent})
        return done.run_id

    def ran(self, agent: str = NO_AGENT, job: dg.JobDefinition = retrain, **more: Any) -> str:
        """Return a run that somebody ended."""
        run = self.began(agent, job, **more)
        self.instance.report_run_canceled(run)
        return run.run_id

    def failed(self, agent: str) -> str:
        """Return a run that a sensor asked for and that failed before its first step."""
        run = self.began(agent, asked=True)
        self.instance.report_run_failed(run)
        return run.run_id

    def began(
        self, agent: str, job: dg.JobDefinition = retrain, *, asked: bool = False, **more: Any
    ) -> dg.DagsterRun:
        tags = {AGENT: agent} if agent else {}
        tags |= {WATERMARK: "1"} if asked else {}  # by a sensor
        started = dg.DagsterRunStatus.STARTED
        return self.instance.create_run_for_job(job, status=started, tags=tags, **more)

    def claimed(self, agent: str, holder: str, mark: str, state: str) -> None:
        row = {"agent_id": agent, "fingerprint": mark, "watermark": 1, "attempt": 1}
        row |= {"state": state, "holder": holder, "asked_by": "sensor"}
        row |= dict.fromkeys(("created_at", "heartbeat_at", "expires_at"), now())
        with self.database.write() as connection:
            connection.execute(db.claims.insert().values(**row))

    def settings(self, newest: int, days: float) -> Settings:
        kept = KeptSettings(newest=newest, days=days)
        return Settings(state_dir=self.state, retention=RetentionSettings(runs=kept))

    def prune(
        self,
        *agents: str,
        newest: int = 0,
        days: float = 30,
        at: datetime = LATER,
        dry_run: bool = False,
    ) -> dict[str, str | None]:
        """Return {run: why it stays} of these agents' runs, sixty days from now."""
        with patch("automation.old_runs.now", lambda: at):
            items = prune_runs(
                self.instance,
                self.ledger,
                lambda _: self.settings(newest, days),
                agents=agents,
                dry_run=dry_run,
            )
        return {item.name: item.stays for item in items}

    def indexed(self, run: str) -> int:
        """Return how many of a run's events Dagster keeps for all runs together."""
        path = self.state / "dagster" / "history" / "runs" / "index.db"
        with closing(sqlite3.connect(path)) as index:
            query = "SELECT count(*) FROM event_logs WHERE run_id = ?"
            return int(index.execute(query, (run,)).fetchone()[0])

    def events(self) -> list[str]:
        """Return the runs that have a file of events."""
        folder = self.state / "dagster" / "history" / "runs"
        return [p.name for p in folder.iterdir() if not p.name.startswith("index")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("old-runs") / "state")
    yield made
    made.instance.dispose()
    made.database.close()


def test_what_is_old_goes_and_nothing_that_anything_leans_on(world: World) -> None:
    first, newest = world.made("tea"), world.made("tea")
    counted_no_more = world.failed("tea")
    held, champion, old, resumed = (world.ran("tea") for _ in range(4))
    at_work = world.began("tea", root_run_id=resumed, parent_run_id=resumed).run_id
    world.claimed("tea", held, "h" * 64, "held")
    mark = hashed("tea", "seeds")
    folder = world.state / "agents" / "tea" / "v0"
    write_json(folder / "config.json", {})
    files = folder_sha256(folder)
    world.ledger.add_baseline(
        "tea", label="v0", path=folder, files=files, lineage={}, actor="test", fingerprint=mark
    )
    world.claimed("tea", champion, mark, "done")
    counted, cancelled = world.failed("tea"), world.ran("tea", asked=True)
    others = world.ran("milk")
    told = world.prune("tea", dry_run=True)
    assert told == {
        first: None,
        old: None,
        counted_no_more: None,
        newest: "has the newest of thing",
        held: "its turn's claim is held",
        champion: "version 0 is the champion",
        resumed: "a run that is under way goes on from it",
        **dict.fromkeys(
            (counted, cancelled), "ended before it claimed its turn, and none began since"
        ),
    }
    runs = {run.run_id for run in world.instance.get_runs()}
    assert {first, old, at_work, others} < runs
    assert world.prune("tea") == told
    gone = {run for run, why in told.items() if why is None}
    assert {run.run_id for run in world.instance.get_runs()} == runs - gone
    assert [name for name in world.events() if first in name] == []
    assert not (world.state / "dagster" / "storage" / first).exists()
    assert (world.indexed(first), world.indexed(newest) > 0) == (0, True)
    assert world.prune("tea") == {run: why for run, why in told.items() if why is not None}


def test_the_newest_and_the_young_stay(world: World) -> None:
    runs = [world.ran(job=ingest_file) for _ in range(3)]
    young = world.prune(NO_AGENT, at=now() + timedelta(days=1))
    assert set(young.values()) == {"younger than 30 days"}
    told = world.prune(NO_AGENT, newest=2, days=0)
    assert [told[run] for run in runs] == [None, "among the newest 2", "among the newest 2"]
    assert [run.run_id for run in world.instance.get_runs() if run.job_name == "ingest_file"] == [
        runs[2],
        runs[1],
    ]


def test_a_prune_that_was_killed_leaves_a_run_to_be_found_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.ran("oat")
    assert [name for name in world.events() if first in name] != []

    class Killed(BaseException):
        """What kill -9 is to code: nothing after it runs."""

    def killed(run_id: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(world.instance, "delete_run", killed)
        with pytest.raises(Killed):
            world.prune("oat")
    assert world.prune("oat", dry_run=True)[first] is None
    world.prune("oat")
    assert not world.instance.has_run(first)
    assert [name for name in world.events() if first in name] == []


def test_the_command_lists_runs_beside_the_rest(world: World) -> None:
    run = world.ran("rye")
    command = ["prune", "--dry-run", "--json", "--state", str(world.state)]
    told = json.loads(CliRunner().invoke(app, command).stdout)
    [rye] = [one for one in told if one["agent"] == "rye"]
    assert (rye["kind"], rye["name"], rye["stays"]) == ("runs", run, "among the newest 50")


def test_the_command_leaves_the_runs_of_an_agent_whose_recipe_has_gone(world: World) -> None:
    run = world.ran("lost")
    FeedbackStore(world.database).ensure_agent("lost", recipe="/srv/gone.yaml")
    command = ["prune", "--json", "--state", str(world.state)]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 1
    assert "lost" not in {one["agent"] for one in json.loads(told.stdout)}
    assert world.instance.has_run(run)
