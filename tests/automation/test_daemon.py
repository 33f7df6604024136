"""The loop with nobody at the wheel: a real daemon, its sensors, and a run killed for real."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import dagster as dg
import psutil
import pytest
from dagster._core.scheduler.instigation import (
    InstigatorState,
    ScheduleInstigatorData,
    SensorInstigatorData,
)

from automation import processes
from resources.pipeline import AGENT, ASKED_BY, Pipeline
from rlhf_pipeline.files import read_json
from tests.assets.world import chat, write_recipe

pytestmark = pytest.mark.slow
AGENT_ID = "alone"


@dataclass(frozen=True)
class Unattended:
    """A daemon at work on a state folder."""

    state: Path
    pipeline: Pipeline
    instance: dg.DagsterInstance
    daemon: psutil.Process

    def runs(self) -> list[dg.DagsterRun]:
        """Return the agent's turns, oldest first."""
        filters = dg.RunsFilter(job_name="retrain", tags={AGENT: AGENT_ID})
        return list(reversed(self.instance.get_runs(filters)))

    def wait(self, what: str, met: Callable[[], bool], seconds: float) -> None:
        """Return when it is so; fail with the daemon's last words when it takes too long."""
        deadline = time.monotonic() + seconds
        while not met():
            assert self.daemon.is_running()
            if time.monotonic() > deadline:
                log = (self.state / "logs" / "dagster-daemon.log").read_text()[-3000:]
                runs = [(r.status, r.tags) for r in self.runs()]
                pytest.fail(f"waited {seconds:g} s for {what}; runs: {runs}\n{log}")
            time.sleep(0.2)

    def children(self, word: str) -> list[psutil.Process]:
        """Return the daemon's descendants with a word on their command line."""
        found = []
        for process in self.daemon.children(recursive=True):
            try:
                if word in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue
        return found


def lives(process: psutil.Process) -> bool:
    """Return whether a process still runs; one that nobody has reaped yet does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def unattended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unattended]:
    folder = tmp_path_factory.mktemp("unattended")
    state = folder / "state"
    recipe = write_recipe(folder / "minute.yaml", state, ppo={"updates": 120})
    with patch.dict(os.environ, {"RLHF_RECIPE": str(recipe)}):
        home = processes.prepare_home(state)
        with dg.DagsterInstance.from_config(str(home)) as instance:
            daemon = processes.start_daemon(state)
            try:
                yield Unattended(
                    state, Pipeline(recipe=str(recipe)), instance, psutil.Process(daemon.pid)
                )
            finally:
                left = psutil.Process(daemon.pid).children(recursive=True)
                processes.stop(daemon)
                deadline = time.monotonic() + 20
                while any(lives(process) for process in left) and time.monotonic() < deadline:
                    time.sleep(0.2)
                outlived = [process for process in left if lives(process)]
                for process in outlived:
                    process.kill()
        assert outlived == [], "the daemon's processes outlived it"


def test_votes_alone_lead_to_one_verdict_and_no_second_turn_from_the_same_votes(
    unattended: Unattended,
) -> None:
    chat(unattended.pipeline.store, AGENT_ID, 160)
    unattended.wait("the sensor to ask", lambda: len(unattended.runs()) > 0, 120)
    unattended.wait("a verdict", lambda: unattended.runs()[0].is_finished, 300)
    [run] = unattended.runs()
    assert run.is_success
    assert run.tags[ASKED_BY] == "sensor"
    [claim] = unattended.pipeline.claims.history(AGENT_ID)
    assert (claim.state, claim.holder, claim.asked_by) == ("done", run.run_id, "sensor")
    assert run.tags["dagster/run_key"] == f"{AGENT_ID}:{claim.watermark}:1"
    assert [v.version for v in unattended.pipeline.ledger.versions(AGENT_ID)] == [0, 1]

    def looked() -> list[dg.SkipReason | str | None]:
        [state] = [
            s
            for s in unattended.instance.all_instigator_state()
            if s.instigator_name == "enough_new_feedback"
        ]
        ticks = unattended.instance.get_ticks(state.instigator_origin_id, state.selector_id)
        return [t.skip_reason for t in ticks if t.skip_reason and ": 0 new votes" in t.skip_reason]

    unattended.wait("two more looks of the sensor", lambda: len(looked()) >= 2, 90)
    assert len(unattended.runs()) == 1


def test_sensors_go_on_after_the_clock_was_set_back_by_an_hour(unattended: Unattended) -> None:
    """Their last ticks are dated an hour ahead then."""
    ahead = time.time() + 3600
    for state in unattended.instance.all_instigator_state():
        data = state.instigator_data
        if isinstance(data, SensorInstigatorData):
            data = data._replace(last_tick_timestamp=ahead, last_tick_start_timestamp=ahead)
            unattended.instance.update_instigator_state(state.with_data(data))

    def ticked() -> set[str]:
        return {
            state.instigator_name
            for state in unattended.instance.all_instigator_state()
            if isinstance(data := state.instigator_data, SensorInstigatorData)
            and (data.last_tick_success_timestamp or 0) > ahead - 3600
        }

    asked_often = {"enough_new_feedback", "live_experiments", "dead_runs"}
    unattended.wait("the sensors' next ticks", lambda: asked_often <= ticked(), 90)


def test_schedules_go_on_after_a_clock_far_ahead_was_set_right(unattended: Unattended) -> None:
    """Dagster's scheduler brings what is dated so to its own look, which comes each minute."""
    ahead = time.time() + 20 * 86_400

    def dated() -> list[tuple[InstigatorState, ScheduleInstigatorData]]:
        states = unattended.instance.all_instigator_state()
        return [
            (s, d) for s in states if isinstance(d := s.instigator_data, ScheduleInstigatorData)
        ]

    unattended.wait("a first look", lambda: len(dated()) > 0, 90)
    for state, data in dated():
        data = data._replace(start_timestamp=ahead, last_iteration_timestamp=ahead)
        unattended.instance.update_instigator_state(state.with_data(data))

    def gone_on() -> bool:
        moments = [(d.start_timestamp, d.last_iteration_timestamp) for _, d in dated()]
        return all(moment is not None and moment < ahead for two in moments for moment in two)

    unattended.wait("the schedules to go on", gone_on, 90)


def test_a_run_killed_with_its_process_is_found_and_brought_to_its_verdict(
    unattended: Unattended,
) -> None:
    before = len(unattended.runs())
    assert before == 1, "this goes on from the test above"
    chat(unattended.pipeline.store, AGENT_ID, 160, seed=1)
    unattended.wait("a second turn", lambda: len(unattended.runs()) == 2, 120)
    second = unattended.runs()[1]
    claims = unattended.pipeline.claims

    def training() -> bool:
        claim = claims.of_holder(second.run_id)
        return claim is not None and checkpoints(unattended, claim.fingerprint) > 2

    unattended.wait("its second checkpoint", training, 300)
    orphans = unattended.children("resources.worker")
    assert len(orphans) == 2, "one trains, the next stage's waits"
    worker = orphans[0].parent()
    assert worker is not None
    worker.kill()
    unattended.wait("the orphans to end", lambda: not any(map(lives, orphans)), 10)

    # The lease runs out in three minutes; the watchdog looks every half minute.
    unattended.wait("the watchdog to ask again", lambda: len(unattended.runs()) == 3, 300)
    unattended.wait("a verdict", lambda: unattended.runs()[2].is_finished, 300)
    third = unattended.runs()[2]
    assert [r.status.value for r in unattended.runs()] == ["SUCCESS", "FAILURE", "SUCCESS"]
    assert third.tags[ASKED_BY] == "watchdog"
    _, lost, done = claims.history(AGENT_ID)
    assert (lost.state, done.state) == ("lost", "done")
    assert lost.fingerprint == done.fingerprint
    assert (lost.attempt, done.attempt) == (1, 2)
    assert done.token > lost.token
    work = unattended.pipeline.settings().agent_folder(AGENT_ID) / "turns" / done.fingerprint[:16]
    assert read_json(work / "ppo" / "result.json")["resumed_from"] >= 1
    assert [v.version for v in unattended.pipeline.ledger.versions(AGENT_ID)] == [0, 1, 2]


def checkpoints(unattended: Unattended, fingerprint: str) -> int:
    """Return the newest update that has a checkpoint."""
    folder = unattended.pipeline.settings().agent_folder(AGENT_ID) / "turns" / fingerprint[:16]
    names = [p.name for p in (folder / "ppo" / "checkpoints").glob("update-*")]
    return max((int(name.removeprefix("update-")) for name in names), default=0)
