"""`make train AGENT=name`: one turn now, from the terminal, through the same Dagster job.

What the nightly schedule and the sensor ask for, a person asks for here; it shows in the UI like
any other run. Exit code 0 when the turn came to its verdict, whether that was a promotion or not.
"""

import argparse
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import dagster as dg
import structlog
from rich.console import Console
from rich.markup import escape

from assets.common import GPU
from automation import processes
from automation.bars import Bars, be_quiet, looking
from automation.dead import UNFINISHED, end_dead_turns
from automation.jobs import bootstrap, retrain, why_failed
from resources.pipeline import AGENT, ASKED_BY, Pipeline, bootstrap_mark
from rlhf_pipeline.commands.common import console as made_console
from rlhf_pipeline.commands.common import is_foreseen, told_of
from rlhf_pipeline.continuous import unfinished
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.claims import INTERRUPTED
from rlhf_pipeline.files import locked, read_json
from rlhf_pipeline.reward.calibration import by_length, judged_by

log = structlog.get_logger()
LOOK_SECONDS = 5.0  # between two looks whether there is a place


def run_job(
    pipeline: Pipeline, agent_id: str, bars: Bars, *, job: str = retrain.name, again: bool = False
) -> dg.ExecuteInProcessResult:
    """Run the job for the agent in this process, showing its stages; raises PipelineError."""
    instance = dg.DagsterInstance.get()
    instance.add_dynamic_partitions("agents", [agent_id])
    end_dead_turns(instance, pipeline, agent_id)
    with _a_place(instance, pipeline, agent_id, bars):
        return _run(instance, pipeline, agent_id, bars, job=job, again=again)


def _run(
    instance: dg.DagsterInstance,
    pipeline: Pipeline,
    agent_id: str,
    bars: Bars,
    *,
    job: str,
    again: bool,
) -> dg.ExecuteInProcessResult:
    from rlhf_pipeline.definitions import definitions

    settings = pipeline.settings(agent_id)
    history = pipeline.claims.history(agent_id)
    # What fails is told below in a line; its traceback stands in Dagster's log of the run.
    config: dict[str, object] = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    if job == bootstrap.name:
        mark = bootstrap_mark(agent_id)
    else:
        begun = None if again else unfinished(pipeline.database, history, settings)
        newest = snapshot.newest_seq(pipeline.database, agent_id)
        watermark = begun.watermark if begun else newest
        if watermark < newest:
            told = (
                "going on with the turn that did not end; votes since it began are the next one's"
            )
            bars.progress.console.print(told, highlight=False)
        mark = snapshot.fingerprint(pipeline.database, agent_id, watermark)
        config["ops"] = {"feedback_snapshot": {"config": {"watermark": watermark, "again": again}}}
    claims = [c for c in history if c.fingerprint == mark]
    folder = settings.turn_folder(agent_id, mark, [c.state for c in claims].count("done"))
    run_id = str(uuid.uuid4())  # as Dagster makes its own
    try:
        with looking(bars, folder):
            outcome = (
                definitions()
                .resolve_job_def(job)
                .execute_in_process(
                    instance=instance,
                    run_id=run_id,
                    partition_key=agent_id,
                    tags={ASKED_BY: "person"},
                    run_config=config,
                    raise_on_error=False,
                )
            )
    except Exception as error:  # Dagster's own, that it could not store what the run came to
        claim = pipeline.claims.of_holder(run_id)
        if claim is not None and claim.state == "held":
            with suppress(Exception):  # the store may lie on the same full disk: its lease runs out
                pipeline.end_without_verdict(claim, told_of(error), "FAILED")
        if not is_foreseen(error) or claim is None or claim.reason is None:
            raise
        raise PipelineError(
            f"{job} of {agent_id} failed: {claim.reason}; and Dagster could not store that: "
            f"{told_of(error)}"
        ) from error
    if not outcome.success:
        claim = pipeline.claims.of_holder(run_id)
        if claim is not None and claim.state == "held":
            # Ctrl-C: of that Dagster tells no hook, which would let the claim go.
            pipeline.end_without_verdict(claim, INTERRUPTED, "KILLED")
            raise PipelineError(
                f"{job} of {agent_id} was interrupted; the same command goes on from what had "
                "finished"
            )
        raise PipelineError(
            f"{job} of {agent_id} failed: {why_failed(outcome.all_events)}; see "
            + (f"{folder} and `make ui`" if folder.exists() else "`make ui`")
        )
    return outcome


@contextmanager
def _a_place(
    instance: dg.DagsterInstance, pipeline: Pipeline, agent_id: str, bars: Bars
) -> Iterator[None]:
    """Hold a place in the pool: wait until fewer runs of other agents train than it has.

    Dagster lets its runs wait in its queue, which this one does not go through. A lock keeps others
    begun by hand away until Dagster knows this one. What this does not see: a run that leaves the
    queue in the seconds until this one begins, and, where there are several places, another begun
    by hand in the same seconds.
    """
    limits = {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}
    places = limits.get(GPU, instance.global_op_concurrency_default_limit)
    looks, told = 1, False
    with Path(instance.root_directory, "begun_by_hand.lock").open("a+") as handle:
        while places is not None:
            others = [
                run.tags.get(AGENT) or run.job_name
                for run in instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
                if run.run_op_concurrency is not None
                and GPU in (run.run_op_concurrency.all_pools or ())
                and run.tags.get(AGENT) != agent_id
            ]
            if len(others) < places and places == 1 and not _locked_for(agent_id, handle):
                handle.seek(0)
                others = [handle.read() or "one that begins now"]
            if len(others) < places:
                looks -= 1
                if looks == 0:
                    break
            else:
                looks = 2  # a place that is still free at the second is not for whoever is queued
                if not told:
                    words = f"waits while others are trained: {', '.join(others)}"
                    bars.progress.console.print(words, markup=False, highlight=False)
                    told = True
            time.sleep(LOOK_SECONDS)
            end_dead_turns(instance, pipeline)  # without a daemon nobody else does
        over = threading.Event()
        looks_on = threading.Thread(
            target=_let_go_once_known, args=(handle, instance, agent_id, over)
        )
        looks_on.start()
        try:
            yield
        finally:
            over.set()
            looks_on.join()


def _locked_for(agent_id: str, handle: IO[str]) -> bool:
    """Take the lock, and say for others in it who has it; False where it is taken."""
    if not locked(handle):
        return False
    handle.truncate(0)
    handle.write(f"{agent_id}, which begins now (process {os.getpid()})")
    handle.flush()
    return True


def _let_go_once_known(
    handle: IO[str], instance: dg.DagsterInstance, agent_id: str, over: threading.Event
) -> None:
    """Close the lock's file as the agent's run begins: a run that stands still can be ended.

    A process that stands still, as one that was sent behind with Ctrl-Z, holds what it has locked.
    """
    at_work = dg.RunsFilter(statuses=UNFINISHED, tags={AGENT: agent_id})
    while not handle.closed and not over.wait(1.0):
        try:
            if instance.get_runs(at_work, limit=1):
                handle.close()
        except Exception:  # a database that is away for a moment
            log.exception("could not look whether the run has begun", agent=agent_id)


def main() -> None:
    """Run one turn for the agent named on the command line."""
    parser = argparse.ArgumentParser(prog="make train AGENT=name", description=__doc__)
    parser.add_argument("--agent", required=True, help="whose feedback to train from")
    parser.add_argument("--job", choices=[retrain.name, bootstrap.name], default=retrain.name)
    parser.add_argument("--again", action="store_true", help="also from feedback trained on before")
    arguments = parser.parse_args()
    be_quiet()
    console, pipeline = made_console(), Pipeline()
    try:
        state = pipeline.settings().state_dir
        processes.prepare_home(state)
        if arguments.agent not in (agents := pipeline.store.agents()):
            raise PipelineError(
                f"needed an agent with feedback, found none called {arguments.agent!r}; known: "
                f"{', '.join(agents) or f'none yet in {state}'}; `rlhf ingest FILE --agent NAME` "
                "makes one"
            )
        bars = Bars(console)
        with bars.progress:
            run_job(pipeline, arguments.agent, bars, job=arguments.job, again=arguments.again)
    except Exception as error:
        if not is_foreseen(error):
            raise
        line = f"[red]error[/]: {escape(told_of(error))}"  # as `rlhf` does
        Console(stderr=True).print(line, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:  # before the run began, or after it: within it, it is an error
        sys.exit("interrupted")
    _report(pipeline, arguments.agent, console)


def _report(pipeline: Pipeline, agent_id: str, console: Console) -> None:
    done = [claim for claim in pipeline.claims.history(agent_id) if claim.state == "done"]
    if not done:
        return
    claim = done[-1]
    verdicts = pipeline.claims.verdicts_before(claim)
    folder = pipeline.settings(agent_id).turn_folder(agent_id, claim.fingerprint, verdicts)
    console.print(f"verdict: {claim.reason}", highlight=False, soft_wrap=True)
    version = pipeline.ledger.versions(agent_id)[-1].version
    explained = f"why: .venv/bin/rlhf explain {version} --agent {agent_id}"
    console.print(explained, highlight=False, soft_wrap=True)
    for rule, count in pipeline.store.quarantined(agent_id).items():
        console.print(f"quarantine: {rule} {count}", highlight=False, soft_wrap=True)
    reward = folder / "reward.json"
    if reward.exists():
        for job, report in read_json(reward)["result"].items():
            length, share = by_length(report["floors"])
            console.print(
                f"{job} reward model: accuracy {report['accuracy']:.3f} "
                f"({report['interval'][0]:.3f} to {report['interval'][1]:.3f}) on {report['n']} "
                f"held-out pairs{_of_what(report)}; {length}: {share:.3f}, random: 0.5"
                + (f"; its trunk is as it was: {report['undone']}" if report.get("undone") else ""),
                highlight=False,
                soft_wrap=True,
            )


def _of_what(report: Mapping[str, Any]) -> str:
    return "" if judged_by(report) == "pairs" else " of votes on single answers"


if __name__ == "__main__":
    main()
