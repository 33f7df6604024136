"""`make train AGENT=name` where no turn comes of it: a line says why and what to do."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from rich.console import Console

from assets.common import GPU
from automation import launch, processes
from automation.bars import Bars
from automation.jobs import bootstrap
from resources.pipeline import AGENT, Pipeline
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.database import open_database
from rlhf_pipeline.definitions import definitions
from rlhf_pipeline.feedback.claims import PRUNE, ClaimBook
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import locked

VOTE = '{"kind": "thumbs", "prompt": "Why?", "completion": "So.", "value": "up", "rater": "ann"}\n'


@pytest.mark.slow  # two processes that load everything
def test_a_turn_that_cannot_be_says_so_in_a_line(tmp_path: Path) -> None:
    state = tmp_path / "state"
    settings = load_settings(None, {"state_dir": str(state)})
    database = open_database(settings.resolved_database_url)
    votes = tmp_path / "votes.jsonl"
    votes.write_text(VOTE + VOTE.replace("Why?", "Where?"))
    ingest(FeedbackStore(database), votes, "tea")

    few = train("tea", state)
    assert "needed 10 votes that keep every rule, found 2; collect more" in few
    assert "validation.min_rows; see `make ui`\n" in few  # no stage began: there is no folder

    claims = ClaimBook(database)
    told = claims.history("tea")[-1].reason or ""  # as `rlhf status` says
    assert "failed: enough_rows_are_clean: needed 10 votes that keep every rule, found 2" in told
    token = claims.claim(
        "tea", "f" * 64, 2, holder="another", asked_by="sensor", lease=timedelta(minutes=5)
    ).token
    assert "agent 'tea' is being trained by run another" in train("tea", state)
    claims.let_go(token)
    claims.claim("tea", "p" * 64, 0, holder="prune-1", asked_by=PRUNE)
    assert "agent 'tea' is being cleared of old files; do it again once" in train("tea", state)
    database.close()


def test_a_recipe_that_is_not_there_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "--agent", "tea"])
    monkeypatch.setattr(launch, "be_quiet", lambda: None)
    monkeypatch.setenv("RLHF_RECIPE", "tinny")
    with pytest.raises(SystemExit, match="1"):
        launch.main()
    assert capsys.readouterr().err.startswith("error: needed a recipe, found no ")


def test_an_agent_that_nobody_has_named_is_told_beside_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("RLHF_STATE_DIR", str(state))
    monkeypatch.setattr(sys, "argv", ["launch", "--agent", "tee"])
    monkeypatch.setattr(launch, "be_quiet", lambda: None)
    monkeypatch.setattr(processes, "prepare_home", lambda state: state)
    for known in (f"none yet in {state}", "tea"):
        with pytest.raises(SystemExit, match="1"):
            launch.main()
        told = capsys.readouterr().err
        assert told.startswith(
            f"error: needed an agent with feedback, found none called 'tee'; known: {known}; `rlhf"
        )
        Pipeline().store.ensure_agent("tea")
    Pipeline().database.close()


def test_a_turn_that_ctrl_c_ended_holds_its_claim_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    pipeline = Pipeline()
    pipeline.store.ensure_agent("tea")

    @dg.op
    def interrupted(context: dg.OpExecutionContext) -> None:
        pipeline.claims.claim("tea", "f" * 64, 1, holder=context.run_id, asked_by="person")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)  # the signal ends it

    @dg.job(name=bootstrap.name, partitions_def=dg.DynamicPartitionsDefinition(name="agents"))
    def a_turn() -> None:
        interrupted()

    monkeypatch.setattr(
        "rlhf_pipeline.definitions.definitions", lambda: dg.Definitions(jobs=[a_turn])
    )
    with dg.DagsterInstance.ephemeral() as instance:
        monkeypatch.setattr(dg.DagsterInstance, "get", lambda: instance)
        monkeypatch.setattr(processes, "prepare_home", lambda state: state)
        monkeypatch.setattr(sys, "argv", ["launch", "--agent", "tea", "--job", bootstrap.name])
        with pytest.raises(SystemExit, match="1"):
            launch.main()
    told = capsys.readouterr().err.strip()
    assert told.startswith("error: bootstrap of tea was interrupted; the same command goes on")
    assert "\n" not in told
    [claim] = pipeline.claims.history("tea")
    assert (claim.state, claim.reason) == ("failed", "interrupted")
    pipeline.claims.claim("tea", "f" * 64, 1, holder="the next", asked_by="person")
    pipeline.database.close()


@pytest.mark.parametrize(
    ("why", "is_store_full"),
    [("step reward_model failed: make room there", False), (None, False), (None, True)],
)
def test_a_run_that_dagster_could_not_store_is_a_line_with_why_it_failed(
    why: str | None,
    is_store_full: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a full disk: the run is over, and its storage takes no event, nor the store an end."""
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    home = processes.prepare_home(tmp_path / "state")
    pipeline = Pipeline()
    pipeline.store.ensure_agent("tea")

    @dg.op
    def fails(context: dg.OpExecutionContext) -> None:
        claim = pipeline.claims.claim("tea", "f" * 64, 1, holder=context.run_id, asked_by="person")
        if why is not None:
            pipeline.claims.finish(claim.token, "failed", why)
        shutil.rmtree(home / "history")
        if is_store_full:
            monkeypatch.setattr(ClaimBook, "finish", full)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    @dg.job(name=bootstrap.name, partitions_def=dg.DynamicPartitionsDefinition(name="agents"))
    def a_turn() -> None:
        fails()

    monkeypatch.setattr(
        "rlhf_pipeline.definitions.definitions", lambda: dg.Definitions(jobs=[a_turn])
    )
    monkeypatch.setattr(sys, "argv", ["launch", "--agent", "tea", "--job", bootstrap.name])
    with dg.DagsterInstance.from_config(str(home)) as instance:
        monkeypatch.setattr(dg.DagsterInstance, "get", lambda: instance)
        monkeypatch.setattr(processes, "prepare_home", lambda state: state)
        with pytest.raises(SystemExit, match="1"):
            launch.main()
    told = capsys.readouterr().err
    assert "Traceback" not in told
    [line] = [line for line in told.splitlines() if line.startswith("error: ")]
    assert line.endswith("unable to open database file")
    if why is not None:
        assert line.startswith(f"error: bootstrap of tea failed: {why}; and Dagster could not")
    [claim] = pipeline.claims.history("tea")
    if is_store_full:
        assert claim.state == "held"  # until its lease runs out
    else:
        assert claim.reason == (why or line.removeprefix("error: "))
        pipeline.claims.claim("tea", "f" * 64, 1, holder="the next", asked_by="person")
    pipeline.database.close()


def test_a_turn_waits_while_as_many_others_are_trained_as_the_pool_has_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the daemon starts waits in Dagster's queue, which `make train` does not go through."""
    home = processes.prepare_home(tmp_path / "state")
    pipeline, bars, slept = Pipeline(), Bars(Console(width=100)), []

    class Begun(Exception):
        """The run would begin."""

    def begin(*_: object) -> None:
        raise Begun

    def run_of(agent_id: str, job: str = "retrain") -> dg.DagsterRun:
        made = definitions().resolve_job_def(job)
        status = dg.DagsterRunStatus.STARTED
        return instance.create_run_for_job(made, status=status, tags={AGENT: agent_id})

    with dg.DagsterInstance.from_config(str(home)) as instance:
        monkeypatch.setattr(dg.DagsterInstance, "get", lambda: instance)
        monkeypatch.setattr(launch, "unfinished", begin)
        run_of("own")  # which is refused by the claim
        run_of("tea", "prune_state")
        first = run_of("tea")

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 2:
                instance.report_run_failed(first)

        monkeypatch.setattr("automation.launch.time.sleep", sleep)
        with pytest.raises(Begun):
            launch.run_job(pipeline, "own", bars)
        assert len(slept) == 3  # one more, for the queue goes first
        run_of("tea")
        instance.event_log_storage.set_concurrency_slots(GPU, 2)  # as Dagster's page does
        with pytest.raises(Begun):
            launch.run_job(pipeline, "own", bars)
    assert len(slept) == 3
    assert capsys.readouterr().out == "waits while others are trained: tea\n"
    pipeline.database.close()


def test_of_two_turns_begun_by_hand_in_one_moment_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither is a run yet that the other could see."""
    home = processes.prepare_home(tmp_path / "state")
    pipeline, bars, slept = Pipeline(), Bars(Console(width=100)), []
    with dg.DagsterInstance.from_config(str(home)) as instance, ExitStack() as first:
        first.enter_context(launch._a_place(instance, pipeline, "tea", bars))

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 2:
                first.close()

        monkeypatch.setattr("automation.launch.time.sleep", sleep)
        with launch._a_place(instance, pipeline, "own", bars):
            assert len(slept) == 3
    words = f"waits while others are trained: tea, which begins now (process {os.getpid()})\n"
    assert capsys.readouterr().out == words
    pipeline.database.close()


def test_a_turn_that_stands_still_once_it_has_begun_keeps_no_other_from_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one sent behind with Ctrl-Z does: its run is ended, and what it holds must be nothing."""
    home = processes.prepare_home(tmp_path / "state")
    pipeline, bars = Pipeline(), Bars(Console(width=100))
    with dg.DagsterInstance.from_config(str(home)) as instance, ExitStack() as stack:
        stack.enter_context(launch._a_place(instance, pipeline, "tea", bars))
        run = instance.create_run_for_job(
            definitions().resolve_job_def("retrain"),
            status=dg.DagsterRunStatus.STARTED,
            tags={AGENT: "tea"},
        )
        lock = Path(instance.root_directory, "begun_by_hand.lock")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with lock.open() as other:
                if locked(other):
                    break
            time.sleep(0.1)
        instance.report_run_failed(run)
        stack.enter_context(launch._a_place(instance, pipeline, "own", bars))
    assert capsys.readouterr().out == ""
    pipeline.database.close()


def test_ctrl_c_before_the_run_has_begun_is_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(state: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(processes, "prepare_home", interrupted)
    monkeypatch.setattr(sys, "argv", ["launch", "--agent", "tea"])
    with pytest.raises(SystemExit, match="interrupted"):
        launch.main()


def test_what_goes_to_a_file_has_every_stages_time_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column that finds no room is a column of three dots."""

    def trained(pipeline: Pipeline, agent_id: str, bars: Bars, **_: Any) -> None:
        for stage in ("ppo", "evaluation"):
            numbers = {"score_mean": 0.5, "kl_mean": 0.125, "loss": 0.25, "entropy": 1.25}
            bars.show(stage, {"update": 1, "of": 40, **numbers})

    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "argv", ["launch", "--agent", "tea"])
    monkeypatch.setattr(launch, "be_quiet", lambda: None)
    monkeypatch.setattr(processes, "prepare_home", lambda state: state)
    monkeypatch.setattr(launch, "run_job", trained)
    Pipeline().store.ensure_agent("tea")
    launch.main()
    told = capsys.readouterr().out
    assert told.count("0:00:00 score_mean 0.5, kl_mean 0.125, loss 0.25, entropy 1.25") == 2
    assert "…" not in told
    Pipeline().database.close()


def test_a_verdict_is_told_with_where_its_reasons_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    pipeline = Pipeline()
    pipeline.store.ensure_agent("tea")
    ledger = pipeline.ledger
    common: dict[str, Any] = {"path": tmp_path, "files": {"w": "0"}, "lineage": {}}
    ledger.add_baseline("tea", label="v0", actor="test", **common)
    ledger.add_version("tea", label="v1", gate=None, fingerprint="f" * 64, **common)
    claim = pipeline.claims.claim("tea", "f" * 64, 1, holder="run", asked_by="person")
    pipeline.claims.finish(claim.token, "done", "version 1 was refused; version 0 stays")
    launch._report(pipeline, "tea", Console())
    assert capsys.readouterr().out == (
        "verdict: version 1 was refused; version 0 stays\n"
        "why: .venv/bin/rlhf explain 1 --agent tea\n"
    )
    pipeline.database.close()


def train(agent: str, state: Path) -> str:
    """Return what a refused `make train` printed, which is a line."""
    done = subprocess.run(
        [sys.executable, "-m", "automation.launch", "--agent", agent],
        cwd=processes.ROOT,
        env={**os.environ, "RLHF_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Stack Trace" not in done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stderr.split("\n") if line] == ["error"]
    return done.stderr
