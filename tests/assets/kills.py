"""kill -9 at named points between a turn's first step and its last; then the loop is run again.

The turns here find their training in the folder of one that was really trained: a stage copies what
that one left, file by file, where it would have trained. Everything around it is the product's: the
run is what `make train` starts, with its claims, snapshots, checks, MLflow, ledger and the stages'
own cache. A process that has imported everything forks each run, so that a kill costs what a turn
costs and not what importing does. benchmarks/kill_points.py is the way in.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_pipeline.files import new_folder, read_json, write_json

if TYPE_CHECKING:
    import dagster as dg
    import pandas as pd

    from resources.pipeline import Pipeline

VOTES = 60
LONGEST = 180.0  # seconds a run may take before something is wrong


@dataclass(frozen=True)
class Point:
    """The instant before or after the nth call of a function, by module and name."""

    where: str
    when: Literal["before", "after"]
    nth: int = 1


POINTS: Mapping[str, Point] = {
    "begun, nothing claimed": Point("rlhf_pipeline.feedback.claims:ClaimBook.claim", "before"),
    "claimed": Point("rlhf_pipeline.feedback.claims:ClaimBook.claim", "after"),
    "snapshot written": Point("rlhf_pipeline.feedback.snapshot:take", "after"),
    "votes validated": Point("rlhf_pipeline.feedback.store:FeedbackStore.quarantine", "before"),
    "data sets half written": Point("rlhf_pipeline.feedback.datasets:write_jsonl", "after", 2),
    "SFT half-way": Point("tests.assets.kills:sft_half_way", "before"),
    "baseline in the ledger, not in MLflow": Point(
        "rlhf_pipeline.registry.ledger:PromotionLedger.add_baseline", "after"
    ),
    "first reward model saved": Point("tests.assets.kills:reward_model_saved", "before"),
    "PPO checkpoint saved": Point("tests.assets.kills:ppo_checkpoint_saved", "before"),
    "PPO finished, no result yet": Point("tests.assets.kills:ppo_finished", "before"),
    "comparison written": Point(
        "rlhf_pipeline.evaluation.report:EvaluationReport.from_json", "before", 2
    ),
    "version in the ledger, not in MLflow": Point(
        "rlhf_pipeline.registry.ledger:PromotionLedger.add_version", "after"
    ),
    "version in MLflow, not linked": Point(
        "rlhf_pipeline.registry.ledger:PromotionLedger.link_mlflow", "before", 2
    ),
    "promoted in the ledger, aliases not moved": Point(
        "rlhf_pipeline.registry.ledger:PromotionLedger.promote", "after"
    ),
    "aliases moved, claim open": Point("rlhf_pipeline.feedback.claims:ClaimBook.finish", "before"),
    "claim closed, run not ended": Point("rlhf_pipeline.feedback.claims:ClaimBook.finish", "after"),
}


STALLS: Mapping[str, Point] = {
    "before it registers its version": Point(
        "rlhf_pipeline.registry.ledger:PromotionLedger.add_version", "before"
    ),
    "before it promotes": Point("rlhf_pipeline.registry.ledger:PromotionLedger.promote", "before"),
    "before it closes its claim": Point("rlhf_pipeline.feedback.claims:ClaimBook.finish", "before"),
}
Asked = Literal["make train", "the daemon", "from where it died"]
CHAIN: Mapping[
    str, Asked
] = {  # from the snapshot to the aliases, and who asks for the next attempt
    "snapshot written": "the daemon",
    "votes validated": "make train",
    "data sets half written": "from where it died",
    "SFT half-way": "from where it died",
    "baseline in the ledger, not in MLflow": "from where it died",
    "first reward model saved": "make train",
    "PPO checkpoint saved": "from where it died",
    "PPO finished, no result yet": "from where it died",
    "comparison written": "the daemon",
    "version in the ledger, not in MLflow": "from where it died",
    "version in MLflow, not linked": "from where it died",
    "promoted in the ledger, aliases not moved": "from where it died",
}
TRAINING: Mapping[str, Point] = {  # the four of them that are in the training's own process
    "SFT half-way": Point("rlhf_pipeline.policy.sft:_Watcher.on_log", "after", 2),
    "first reward model saved": Point("rlhf_pipeline.reward.training:train_reward_model", "after"),
    "PPO checkpoint saved": Point("rlhf_pipeline.ppo.checkpoint:write_checkpoint", "after", 3),
    "PPO finished, no result yet": Point("rlhf_pipeline.ppo.result:TrainingResult.save", "before"),
}


def die() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_the_run() -> None:
    """End the run that started this process too."""
    os.kill(os.getppid(), signal.SIGKILL)
    die()


def stall() -> None:
    """Stop this process until somebody lets it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def arm(point: Point, act: Callable[[], None] = die) -> None:
    """Let this process die at the point."""
    module, _, names = point.where.partition(":")
    *owners, name = names.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    real, calls = getattr(owner, name), [0]

    @functools.wraps(real)
    def deadly(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == point.nth and point.when == "before":
            act()
        result = real(*given, **named)
        if calls[0] == point.nth and point.when == "after":
            act()
        return result

    setattr(owner, name, deadly)


# -- training that finds its models instead of making them ------------------------------------


def sft_half_way() -> None:
    """Half the files of the baseline are written."""


def reward_model_saved() -> None:
    """The proxy is in place, the other two are not."""


def ppo_checkpoint_saved() -> None:
    """The newest checkpoint is in place."""


def ppo_finished() -> None:
    """The policy is in place, the result that says so is not."""


def train_from(source: Path) -> None:
    """Replace the four stages by ones that copy what they left in the source's folder."""
    from resources.compute import Compute
    from resources.worker import run, specification
    from rlhf_pipeline import stages
    from rlhf_pipeline.evaluation.gate import decide
    from rlhf_pipeline.evaluation.report import EvaluationReport

    def result_of(stage: str, turn: stages.Turn) -> dict[str, Any]:
        with (turn.work / f"{stage}.trained").open("a") as file:
            file.write(f"{os.getpid()}\n")
        text = json.dumps(read_json(source / f"{stage}.json")["result"])
        return dict(json.loads(text.replace(str(source), str(turn.work))))

    def baseline(turn: stages.Turn, *_: Any) -> dict[str, Any]:
        files = sorted((source / "sft").iterdir())
        with new_folder(turn.work / "sft") as aside:
            for number, file in enumerate(files):
                if number == len(files) // 2:
                    sft_half_way()
                shutil.copy(file, aside)
        return result_of("baseline", turn)

    def reward(turn: stages.Turn, *_: Any) -> dict[str, Any]:
        for job in ("proxy", "stopping", "gate"):
            with new_folder(turn.work / "reward" / job) as aside:
                shutil.copytree(source / "reward" / job, aside, dirs_exist_ok=True)
            if job == "proxy":
                reward_model_saved()
        return result_of("reward", turn)

    def ppo(turn: stages.Turn, *_: Any) -> dict[str, Any]:
        parts = sorted((source / "ppo").iterdir(), key=lambda p: (p.name == "result.json", p.name))
        for part in parts:
            if part.name == "result.json":
                ppo_finished()
            if part.is_dir():
                shutil.copytree(part, turn.work / "ppo" / part.name, dirs_exist_ok=True)
            else:
                shutil.copy(part, turn.work / "ppo" / part.name)
            if part.name == "checkpoints":
                ppo_checkpoint_saved()
        return result_of("ppo", turn)

    def evaluation(turn: stages.Turn, *_: Any) -> dict[str, Any]:
        result = result_of("evaluation", turn)
        shutil.copytree(source / "evaluation", turn.work / "evaluation", dirs_exist_ok=True)
        report = EvaluationReport.from_json(result["report"])
        return {**result, "gate": decide(report, turn.settings.promotion.gate).to_json()}

    stages.STAGES.update(  # type: ignore[attr-defined]  # a dict
        baseline=baseline, reward=reward, ppo=ppo, evaluation=evaluation
    )

    def run_stage(self: Compute, context: Any, stage: str, turn: stages.Turn) -> dict[str, Any]:
        told = specification(turn)
        write_json(turn.work / f"{stage}.spec.json", told)
        return run(stage, told)

    Compute.run_stage = run_stage  # type: ignore[method-assign]
    Compute.start_ahead = lambda self: None  # type: ignore[method-assign]


# -- one life after another ------------------------------------------------------------------


def make_train(pipeline: Pipeline, agent_id: str) -> str:
    """Do what `make train` does; return the refusal, or nothing."""
    from io import StringIO

    from rich.console import Console

    from automation.bars import Bars
    from automation.launch import run_job
    from rlhf_pipeline.errors import PipelineError

    try:
        run_job(pipeline, agent_id, Bars(Console(file=StringIO())))
    except PipelineError as error:
        return str(error)
    return ""


def daemon_ticks(pipeline: Pipeline, agent_id: str) -> None:
    """Do what the daemon does: tick the watchdog and the sensor of new votes, run what they ask."""
    import dagster as dg

    from rlhf_pipeline.definitions import definitions

    instance, defs = dg.DagsterInstance.get(), definitions()
    for sensor in ("dead_runs", "enough_new_feedback"):
        with dg.build_sensor_context(
            instance=instance,
            instance_ref=instance.get_ref(),
            definitions=defs,
            resources={"pipeline": pipeline},
            sensor_name=sensor,
        ) as context:
            tick = defs.resolve_sensor_def(sensor).evaluate_tick(context)
        for asked in tick.run_requests or []:
            if asked.partition_key == agent_id:
                run_request(instance, asked)


def run_request(instance: dg.DagsterInstance, asked: dg.RunRequest) -> None:
    """Run what a sensor asked for, in this process."""
    from rlhf_pipeline.definitions import definitions

    definitions().resolve_job_def(str(asked.job_name)).execute_in_process(
        instance=instance,
        partition_key=asked.partition_key,
        run_config={**asked.run_config, "loggers": {"console": {"config": {"log_level": "ERROR"}}}},
        tags=dict(asked.tags),
        raise_on_error=False,
    )


def expire_leases(pipeline: Pipeline, agent_id: str, ago: timedelta) -> None:
    """Move the agent's claims back in time, so that who holds it seems gone."""
    import sqlalchemy as sa

    from rlhf_pipeline import database as db

    c = db.claims.c
    with pipeline.database.write() as connection:
        for row in connection.execute(sa.select(db.claims).where(c.agent_id == agent_id)).all():
            connection.execute(
                db.claims.update()
                .where(c.token == row.token)
                .values(heartbeat_at=row.heartbeat_at - ago, expires_at=row.expires_at - ago)
            )


def let_time_pass(pipeline: Pipeline, agent_id: str) -> None:
    """Let a quarter of an hour go by, for claims and for the watchdog of this process."""
    from automation import dead
    from rlhf_pipeline.records import now

    ago = timedelta(minutes=15)
    expire_leases(pipeline, agent_id, ago)
    dead.now = lambda: now() + ago  # type: ignore[attr-defined]


def check(pipeline: Pipeline, instance: dg.DagsterInstance, agent_id: str) -> None:
    """Raise AssertionError unless the turn came to one whole, consistent end."""
    import dagster as dg

    from resources.pipeline import AGENT
    from rlhf_pipeline.feedback import snapshot
    from rlhf_pipeline.registry.models import model_name

    ledger, registry, client = pipeline.ledger, pipeline.registry, pipeline.registry.client
    # Exactly one champion, and its files are the registered ones.
    history = [(p.action, p.version) for p in ledger.history(agent_id)]
    assert history == [("baseline", 0), ("promote", 1)], history
    versions = ledger.versions(agent_id)
    assert [v.version for v in versions] == [0, 1]
    for version in versions:
        registry.folder_of(version)
    # Ledger, versions and aliases agree, each registered once.
    numbers = {v.mlflow_version: v.version for v in versions}
    model = client.get_registered_model(model_name(agent_id))
    aliases = {alias: numbers[str(n)] for alias, n in model.aliases.items()}
    assert aliases == {"champion": 1, "previous": 0}, aliases
    found = client.search_model_versions(f"name = '{model_name(agent_id)}'")
    assert sorted(v.tags["rlhf.version"] for v in found) == ["0", "1"]
    experiment = client.get_experiment_by_name(model_name(agent_id)).experiment_id
    stored = client.search_logged_models(experiment_ids=[experiment])
    assert [str(m.status) for m in stored] == ["READY", "READY"]
    # The turn is done, once, and nobody holds the agent.
    claims = pipeline.claims.history(agent_id)
    states = [claim.state for claim in claims]
    assert states[-1] == "done", states
    assert set(states[:-1]) <= {"lost"}, states
    assert len({claim.fingerprint for claim in claims}) == 1
    # Every vote was learned from.
    taken = snapshot.find(pipeline.database, agent_id, claims[-1].fingerprint)
    assert taken is not None
    assert taken.rows == sum(pipeline.store.counts(agent_id).values())
    # No run is left open, in MLflow or in Dagster.
    runs = client.search_runs([experiment])
    assert [run.info.status for run in runs] == ["FINISHED"], [r.info.status for r in runs]
    assert runs[0].data.params["fingerprint"] == claims[0].fingerprint
    ended = instance.get_runs(dg.RunsFilter(tags={AGENT: agent_id}))
    assert all(run.is_finished for run in ended), [run.status for run in ended]
    # Nothing half-written is left behind.
    folder = pipeline.settings().agent_folder(agent_id)
    left = [p for p in folder.rglob("*") if ".new-" in p.name or p.suffix == ".partial"]
    assert left == [], left


def check_that_no_stage_trained_twice(pipeline: Pipeline, agent_id: str) -> None:
    """Raise AssertionError where one that was not killed in its middle was trained once more."""
    mark = pipeline.claims.history(agent_id)[0].fingerprint
    for stage in ("baseline", "reward", "ppo", "evaluation"):
        path = pipeline.settings().turn_folder(agent_id, mark) / f"{stage}.trained"
        assert len(path.read_text().splitlines()) == 1, (stage, path.read_text())


def in_a_fork(work: Callable[[], None], *, seconds: float = LONGEST) -> int:
    """Run the work in a child; return its exit code, or the negative number of its signal."""
    child = os.fork()
    if child == 0:
        os._exit(_exit_code(work))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"a run took over {seconds:.0f} s")


def _exit_code(work: Callable[[], None]) -> int:
    try:
        work()
    except BaseException:  # noqa: BLE001  # a child says what it died of, whatever that was
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def killed_and_run_again(recipe: Path, name: str, agent_id: str, *, by_daemon: bool) -> bool:
    """Kill a turn of a new agent at the point, run the loop again; return whether all is well."""
    import dagster as dg

    from resources.pipeline import Pipeline

    def first_life() -> None:
        from tests.assets.world import chat

        pipeline = Pipeline(recipe=str(recipe))
        chat(pipeline.store, agent_id, VOTES)
        arm(POINTS[name])
        make_train(pipeline, agent_id)

    def second_life() -> None:
        pipeline = Pipeline(recipe=str(recipe))
        let_time_pass(pipeline, agent_id)
        if by_daemon:
            daemon_ticks(pipeline, agent_id)
        else:
            refusal = make_train(pipeline, agent_id)
            assert ("trained on already" in refusal) == (name == "claim closed, run not ended")
        check(pipeline, dg.DagsterInstance.get(), agent_id)
        check_that_no_stage_trained_twice(pipeline, agent_id)

    ended = in_a_fork(first_life)
    if ended != -signal.SIGKILL:
        raise RuntimeError(f"the run had to die at {name!r}, found exit code {ended}")
    return in_a_fork(second_life) == 0


def go_on_from_where_it_died(pipeline: Pipeline, agent_id: str) -> None:
    """Do what a person does who finds the dead run on Dagster's page."""
    import dagster as dg

    from automation.dead import end_dead_turns
    from resources.pipeline import AGENT
    from tests.assets.world import failures, going_on

    instance = dg.DagsterInstance.get()
    end_dead_turns(instance, pipeline, agent_id)
    [newest] = instance.get_runs(dg.RunsFilter(tags={AGENT: agent_id}), limit=1)
    with going_on(instance, newest.run_id, agent_id) as again:
        assert again.success, failures(again)


def ask_for_a_turn(recipe: Path, agent_id: str, asked: Asked) -> Pipeline:
    """Run the agent's turn as it would be after a quarter of an hour."""
    from resources.pipeline import Pipeline

    pipeline = Pipeline(recipe=str(recipe))
    let_time_pass(pipeline, agent_id)
    if asked == "make train":
        refusal = make_train(pipeline, agent_id)
        assert refusal == "", refusal
    elif asked == "the daemon":
        daemon_ticks(pipeline, agent_id)
    else:
        go_on_from_where_it_died(pipeline, agent_id)
    return pipeline


def killed_at_one_point_after_another(state: Path, source: Path) -> list[int]:
    """Kill one turn at each point of CHAIN, then let it end; return how each attempt ended.

    Raises RuntimeError where the turn did not die at a point. Call it from a process that has
    opened no database: it is forked.
    """
    import dagster as dg

    from resources.pipeline import Pipeline

    agent_id = "chain"
    ended: list[int] = []
    recipe = prepare(state, continuous_learning={"max_attempts": len(CHAIN) + 1})
    train_from(source)

    def attempt(name: str, asked: Asked) -> None:
        from tests.assets.world import chat

        if not ended:
            chat(Pipeline(recipe=str(recipe)).store, agent_id, VOTES)
        point = POINTS[name]
        # Version 0 was linked by an attempt before: this one links its own first.
        arm(replace(point, nth=1) if point.where.endswith("link_mlflow") else point)
        ask_for_a_turn(recipe, agent_id, asked)

    def last_attempt(asked: Asked) -> None:
        pipeline = ask_for_a_turn(recipe, agent_id, asked)
        check(pipeline, dg.DagsterInstance.get(), agent_id)
        check_that_no_stage_trained_twice(pipeline, agent_id)
        assert len(pipeline.claims.history(agent_id)) == len(CHAIN) + 1

    asked: Asked = "make train"
    for name, next_asked in CHAIN.items():
        ended.append(in_a_fork(functools.partial(attempt, name, asked)))
        if ended[-1] != -signal.SIGKILL:
            raise RuntimeError(f"the run had to die at {name!r}, found exit code {ended[-1]}")
        if len(ended) == 1:
            validate_once(state, recipe)
        asked = next_asked
    return [*ended, in_a_fork(functools.partial(last_attempt, asked))]


def validate_once(state: Path, recipe: Path) -> None:
    """Judge the one snapshot there is here, so that no fork has to: its rows stay the same."""
    from rlhf_pipeline.config import load_settings
    from rlhf_pipeline.feedback import snapshot, validation

    [path] = state.glob(f"agents/*/snapshots/*/{snapshot.FILE}")
    limits, frame = load_settings(recipe).validation, snapshot.read(path)
    chosen = ("min_rows", "max_prompt_characters", "max_completion_characters")
    wanted: dict[str, Any] = {name: getattr(limits, name) for name in chosen}
    real = validation.validate
    report = real(frame, **wanted)

    def validate(
        given: pd.DataFrame, takes_roles: Any = None, **asked: Any
    ) -> validation.ValidationReport:
        same = asked == wanted and given.equals(frame)
        return report if same else real(given, takes_roles=takes_roles, **asked)

    validation.validate = validate  # type: ignore[assignment]  # with any limits


def stalled_and_overtaken(recipe: Path, point: Point, agent_id: str) -> bool:
    """Stop a turn, let another attempt end it, wake the first; return whether all is well."""
    import dagster as dg

    from resources.pipeline import Pipeline

    def sleeper() -> None:
        from tests.assets.world import chat

        pipeline = Pipeline(recipe=str(recipe))
        chat(pipeline.store, agent_id, VOTES)
        arm(point, stall)
        refusal = make_train(pipeline, agent_id)
        assert "this run must stop" in refusal or "stop this run" in refusal, refusal

    def overtaker() -> None:
        pipeline = Pipeline(recipe=str(recipe))
        let_time_pass(pipeline, agent_id)
        daemon_ticks(pipeline, agent_id)
        check(pipeline, dg.DagsterInstance.get(), agent_id)

    def last_look() -> None:
        pipeline = Pipeline(recipe=str(recipe))
        check(pipeline, dg.DagsterInstance.get(), agent_id)
        # The story: the first attempt lost its claim, the second has whatever was written since.
        lost, done = pipeline.claims.history(agent_id)
        assert (lost.state, done.state) == ("lost", "done")
        promoted = lost if point.where.endswith("ClaimBook.finish") else done  # that comes last
        assert pipeline.ledger.history(agent_id)[-1].token == promoted.token

    sleeping = os.fork()
    if sleeping == 0:
        os._exit(_exit_code(sleeper))
    _, status = os.waitpid(sleeping, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise RuntimeError(f"the run had to stop at {point.where}, found that it ended: {status}")
    try:
        overtaken = in_a_fork(overtaker) == 0
    finally:
        os.kill(sleeping, signal.SIGCONT)
        _, status = os.waitpid(sleeping, 0)
    return overtaken and status == 0 and in_a_fork(last_look) == 0


def prepare(state: Path, **changes: Mapping[str, Any]) -> Path:
    """Import what turns need, without keeping anything open, and return the recipe."""
    import alembic.command  # noqa: F401  # so that no fork has to
    import dagster as dg
    import great_expectations  # noqa: F401
    import mlflow  # noqa: F401
    import pandas  # noqa: F401
    import pytest
    from sqlalchemy.orm import configure_mappers

    from automation import processes
    from automation.bars import be_quiet
    from rlhf_pipeline.definitions import definitions
    from tests.assets.world import keep_dagsters_engines, write_recipe

    importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    configure_mappers()
    be_quiet()
    definitions()
    home = processes.prepare_home(state)
    keep_dagsters_engines(pytest.MonkeyPatch())
    instance = dg.DagsterInstance.from_config(str(home))  # seconds of migrations
    dg.DagsterInstance.get = lambda: instance  # type: ignore[method-assign]
    recipe = write_recipe(state / "minute.yaml", state, **changes)
    os.environ["RLHF_RECIPE"] = str(recipe)
    return recipe


def play(
    state: Path, source: Path, times: int, names: Sequence[str] = tuple(POINTS)
) -> dict[str, dict[str, float]]:
    """Kill so many times at each point; the sensors and `make train` recover by turns.

    Call it from a process that has opened no database: it is forked.
    """
    recipe = prepare(state)
    train_from(source)
    told = {}
    for name in names:
        number, began, well = list(POINTS).index(name), time.monotonic(), 0
        for attempt in range(times):
            by_daemon = (number + attempt) % 2 == 0
            agent_id = f"p{number}-{attempt}"
            well += killed_and_run_again(recipe, name, agent_id, by_daemon=by_daemon)
        told[name] = {"kills": times, "recovered": well, "seconds": time.monotonic() - began}
        sys.stderr.write(f"{name}: {well} of {times} recovered\n")
    return told
