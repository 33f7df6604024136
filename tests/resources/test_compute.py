"""A stage in a process of its own: what comes back, what is tried again, what is ended."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import psutil
import pytest
from pydantic import SecretStr

from assets.common import agents
from automation.jobs import why_failed
from resources.compute import (
    POLL_SECONDS,
    Compute,
    WholeLines,
    _observe,
    _where_it_begins,
    _why_ended,
)
from resources.worker import same_work, specification
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.database import open_database
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.files import write_json
from rlhf_pipeline.stages import Turn
from tests.assets.world import Loop, failures


@pytest.fixture(scope="module")
def launcher(warmed: list[str]) -> list[str]:
    """What gives the worker stages that train nothing."""
    return [*warmed, "-m", "tests.resources.launch"]


def begun(loop: Loop, name: str, **changes: Any) -> Turn:
    """Return a turn whose claim is held."""
    pipeline, agent_id = loop.pipeline, loop.agent(name)
    claim = pipeline.claims.claim(agent_id, "f" * 64, 1, holder=agent_id, asked_by="person")
    folder = pipeline.settings().agent_folder(agent_id)
    return Turn(
        agent_id=agent_id,
        fingerprint=claim.fingerprint,
        watermark=1,
        token=claim.token,
        data=folder / "data",
        work=folder / "work",
        baseline=None,
        champion=None,
        settings=pipeline.settings().model_copy(update=changes),
    )


def run(
    loop: Loop,
    compute: Compute | list[str],
    stage: str,
    turn: Turn,
    *,
    retries: int = 1,
) -> tuple[dg.ExecuteInProcessResult, list[dict[str, Any]]]:
    """Run the stage from an asset; return the run and what the stage gave back.

    Where `compute` is a launcher, every attempt has a Compute of its own.
    """
    given: list[dict[str, Any]] = []

    @dg.asset(partitions_def=agents, retry_policy=dg.RetryPolicy(max_retries=retries))
    def trained(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster compares it with the bare class
        """Train."""
        own = compute if isinstance(compute, Compute) else Compute(launcher=compute)
        given.append(own.run_stage(context, stage, turn))
        return dg.MaterializeResult()

    result = dg.materialize(
        [trained],
        partition_key=turn.agent_id,
        instance=loop.instance,
        raise_on_error=False,
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
    )
    return result, given


def attempts(loop: Loop, result: dg.ExecuteInProcessResult) -> int:
    [step] = loop.instance.get_run_step_stats(result.run_id)
    return step.attempts or 0


def test_half_a_line_of_a_report_waits_for_its_other_half() -> None:
    told: list[Any] = []
    handler: Any = SimpleNamespace(handle_message=told.append)
    line = json.dumps({"method": "report_custom_message", "params": {"update": 1}}) + "\n"
    with WholeLines().read_messages(handler) as where:
        for text in (line + line[:20], line[20:] + line, line + line[:20]):  # a kill ends the last
            with Path(where["path"]).open("a") as messages:
                messages.write(text)
            time.sleep(3 * POLL_SECONDS)  # what is there is read, and its end looked for again
    assert told == [json.loads(line)] * 4


def test_a_stage_gives_its_result_and_its_last_report_is_shown(
    loop: Loop, launcher: list[str]
) -> None:
    result, given = run(loop, launcher, "count", begun(loop, "counting"))
    assert result.success, failures(result)
    assert given[0]["sum"] == 6
    logs = loop.instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    event = logs[-1].dagster_event
    assert event is not None
    shown = {
        key: value.value
        for key, value in event.asset_observation_data.asset_observation.metadata.items()
    }
    assert shown["update"] == 3
    assert shown["score"] == 1.5
    assert shown["stage"] == "count"


def test_an_alarm_is_shown_though_other_reports_follow_it_at_once() -> None:
    shown: list[dg.AssetObservation] = []
    context: Any = SimpleNamespace(
        log_event=shown.append, asset_key=dg.AssetKey("ppo_policy"), partition_key="shop"
    )
    alarm = {"update": 4, "alarm": "eos_loss", "found": "5%", "remedy": "train SFT longer"}
    _observe(context, "ppo", [{"update": 4, "train/loss": 0.5}, alarm, {"update": 5}])
    _observe(context, "ppo", [{"update": 6}])
    first, second = ({n: v.value for n, v in one.metadata.items()} for one in shown)
    assert first == {**alarm, "update": 5, "stage": "ppo"}
    assert second == {"update": 6, "stage": "ppo"}


def test_without_a_launcher_it_is_a_python_of_its_own_and_what_was_finished_is_given_back(
    loop: Loop,
) -> None:
    turn = begun(loop, "finished")
    work = same_work("baseline", specification(turn))
    write_json(turn.work / "baseline.json", {"work": work, "result": {"path": "there"}})
    result, given = run(loop, [], "baseline", turn)
    assert result.success, failures(result)
    assert given == [{"path": "there"}]


def test_what_is_refused_is_not_tried_again_and_says_why(loop: Loop, launcher: list[str]) -> None:
    turn = begun(loop, "refusing")
    result, _ = run(loop, launcher, "refuse", turn)
    assert not result.success
    assert attempts(loop, result) == 1
    assert why_failed(result.all_events) == "trained: needed 30 preference pairs, found 2"
    assert "Traceback" in (turn.work / "refuse.log").read_text()


def test_of_a_log_the_words_of_our_own_error_are_told_else_its_last_error() -> None:
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in run\n    raise\n'
    cause = f"{trace}KeyError: 'x'\n\nThe above exception was the direct cause of this one:\n\n"
    ours = "rlhf_pipeline.errors.NotEnoughData: needed 30: found 2\n"
    assert _why_ended(f"{cause}{trace}{ours}") == "needed 30: found 2"
    assert _why_ended(f"[rank0]: {ours}{trace}CalledProcessError: 1\n") == "needed 30: found 2"
    memory = "torch.OutOfMemoryError: needed 3 GiB"
    assert _why_ended(f"{cause}{trace}{memory}\n/a.py: UserWarning: leaked\n") == memory
    assert _why_ended(f"{trace}    assert x\nAssertionError\n") == "AssertionError"
    assert _why_ended("a warning: killed\n") is None


def test_a_process_that_dies_is_started_again_whatever_earlier_ones_logged(
    loop: Loop, launcher: list[str]
) -> None:
    turn = begun(loop, "once-refused")
    turn.work.mkdir(parents=True)
    (turn.work / "fall_over.log").write_text("rlhf_pipeline.errors.NotEnoughData: last night\n")
    result, given = run(loop, launcher, "fall_over", turn)
    assert result.success, failures(result)
    assert given == [{"attempt": 2}]
    assert attempts(loop, result) == 2


def test_a_stage_that_takes_too_long_is_ended_for_good(
    loop: Loop, launcher: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = begun(loop, "slow")
    pid = turn.work / "pid"

    def monotonic() -> float:
        """An hour goes by once the stage is at work."""
        return time.monotonic() + (3600 if pid.exists() and pid.read_text() else 0)

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr("resources.compute.time", clock)
    result, _ = run(loop, launcher, "ignore_everything", turn)
    assert not result.success
    assert attempts(loop, result) == 1
    assert "training.stage_timeout_minutes" in failures(result)
    assert not psutil.pid_exists(int(pid.read_text()))


def test_a_stage_stops_when_its_claim_is_lost(loop: Loop, launcher: list[str]) -> None:
    turn = begun(loop, "lost-claim")

    def take_over() -> None:
        pid = turn.work / "pid"
        while not pid.exists():
            time.sleep(0.02)
        loop.pipeline.claims.finish(turn.token, "failed", "somebody else took over")

    thread = threading.Thread(target=take_over, daemon=True)
    thread.start()
    result, _ = run(loop, launcher, "hang", turn)
    thread.join()
    assert not result.success
    assert attempts(loop, result) == 1
    assert "Failure: needed claim" in failures(result)
    assert not (turn.work / "hang.json").exists()


def test_ctrl_c_ends_the_stage_and_is_no_reason_to_try_again(
    loop: Loop, launcher: list[str]
) -> None:
    """Dagster, by itself, starts a step with retries again when a person interrupts it."""
    interrupted(loop, launcher, "hang", {"pid": signal.SIGINT})


def test_who_interrupts_again_leaves_no_stage_behind(loop: Loop, launcher: list[str]) -> None:
    """As automation's stop does, while the run waits for the stage to end."""
    interrupted(loop, launcher, "end_slowly", {"pid": signal.SIGTERM, "asked": signal.SIGTERM})


def interrupted(
    loop: Loop, launcher: list[str], stage: str, when: Mapping[str, signal.Signals]
) -> None:
    """Run a stage, send a signal as each of its files is there; it ends once, its process too."""
    turn = begun(loop, f"interrupted-{stage.replace('_', '-')}")
    pid = turn.work / "pid"

    def interrupt() -> None:
        for name, ask in when.items():
            while not ((turn.work / name).exists() and pid.read_text()):
                time.sleep(0.02)
            os.kill(os.getpid(), ask)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    result, _ = run(loop, launcher, stage, turn)
    thread.join()
    assert not result.success
    assert attempts(loop, result) == 1
    assert why_failed(result.all_events) == (
        "trained: interrupted; asked for again, its stage begins anew"
    )
    assert not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.parametrize(
    ("stage", "estimator", "words"),
    [
        ("ppo", "gae", "it goes on from its last checkpoint"),
        ("ppo", "rloo", "it goes on from its last checkpoint"),
        ("ppo", "dpo", "its stage begins anew"),
        ("reward", "gae", "its stage begins anew"),
    ],
)
def test_a_checkpoint_is_spoken_of_where_there_is_one(
    stage: str, estimator: str, words: str, loop: Loop
) -> None:
    settings = loop.pipeline.settings()
    ppo = replace(settings.ppo, estimator=estimator, completions_per_prompt=2)  # type: ignore[arg-type]
    turn: Any = SimpleNamespace(settings=settings.model_copy(update={"ppo": ppo}))
    assert _where_it_begins(stage, turn) == words


def test_the_databases_address_reaches_the_worker_but_no_file(
    loop: Loop, launcher: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{loop.state}/sesame-open-7.db"
    settings = load_settings(str(loop.pipeline.recipe), {"database_url": url})
    turn = begun(loop, "hidden", database_url=SecretStr(url))
    claim = ClaimBook(open_database(url)).claim(
        turn.agent_id, "f" * 64, 1, holder="hidden", asked_by="person"
    )
    turn = Turn(
        **{n: getattr(turn, n) for n in Turn.__slots__ if n not in ("token", "settings")},
        token=claim.token,
        settings=settings,
    )
    monkeypatch.delenv("RLHF_DATABASE_URL", raising=False)
    result, given = run(loop, launcher, "count", turn)
    assert result.success, failures(result)
    assert given[0]["secret"] == url
    spec = (turn.work / "count.spec.json").read_text()
    assert "sesame-open-7" not in spec
    assert "RLHF_DATABASE_URL" not in os.environ


def ahead(monkeypatch: pytest.MonkeyPatch) -> Compute:
    """Return what starts processes ahead, for stages that train nothing."""
    launch = Path(__file__).with_name("launch.py")
    words = (sys.executable, str(launch), "-m", "resources.worker")
    monkeypatch.setattr("resources.compute.WORKER", words)
    monkeypatch.setattr("resources.compute.FOLLOWED", ("count",))
    return Compute(launcher=[])


def waiting() -> psutil.Process:
    """Return the process that waits for the next stage."""
    [child] = [p for p in psutil.Process().children() if p.cmdline()[-1:] == ["--ahead"]]
    return child


def test_stages_run_in_the_processes_that_were_started_ahead_of_them(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = ahead(monkeypatch)
    compute.setup_for_execution(dg.build_init_resource_context())
    first = waiting()
    result, given = run(loop, compute, "count", begun(loop, "ahead"))
    assert result.success, failures(result)
    assert (given[0]["sum"], given[0]["pid"]) == (6, first.pid)

    second = waiting()
    result, _ = run(loop, compute, "refuse", begun(loop, "ahead to say no"))
    assert "Failure: needed 30 preference pairs, found 2" in failures(result)
    assert not second.is_running()

    compute.start_ahead()
    third = waiting()
    compute.teardown_after_execution(dg.build_init_resource_context())
    assert not third.is_running()


@pytest.mark.slow
def test_a_stage_whose_process_died_before_it_came_gets_another(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = ahead(monkeypatch)
    compute.start_ahead()
    dead = waiting()
    dead.kill()
    dead.wait()
    result, given = run(loop, compute, "count", begun(loop, "ahead of its time"))
    assert result.success, failures(result)
    assert given[0]["pid"] != dead.pid
    compute.teardown_after_execution(dg.build_init_resource_context())
