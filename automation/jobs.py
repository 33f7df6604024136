"""The jobs: a turn from feedback to verdict, version 0 alone, and taking in dropped files."""

import errno
import fcntl
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from assets.common import table
from resources.pipeline import ASKED_BY, Pipeline
from rlhf_pipeline.config import INBOX_DONE
from rlhf_pipeline.continuous import Due
from rlhf_pipeline.errors import ClaimLost
from rlhf_pipeline.feedback.inbox import check_folder, stamp_of
from rlhf_pipeline.feedback.sources import LINES
from rlhf_pipeline.files import fitting, made_by_another, moved

if TYPE_CHECKING:
    from rlhf_pipeline.feedback.ingest import IngestSummary
    from rlhf_pipeline.registry.tracking import Ended
    from rlhf_pipeline.retention import Item

WATERMARK = "rlhf/watermark"  # run tag: up to which vote a run was asked to train from
DROPPED = "rlhf/dropped"  # run tag: which file, in which state, a run was asked to take in
CAME_TO_NOTHING = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]  # key is used up
MAX_RUNTIME = "dagster/max_runtime"  # run tag: seconds, after which a dead run gives its place back
# What Dagster puts before the words of an error that was raised to be read.
TYPE_OF_WORDS = re.compile(r"^(?:rlhf_pipeline\.errors\.\w+|dagster\.[\w.]+\.Failure): ")
# What SQLite and the operating system say of it, whoever passes it on.
OF_A_FULL_DISK = re.compile(rf"database or disk is full|\[Errno ({errno.ENOSPC}|{errno.EDQUOT})\]")
FULL_DISK = "needed room on the disk, found it full; make room, and ask for the run again"
# What Dagster says of a run that something else than the run itself marked as failed.
FROM_OUTSIDE = "This run has been marked as failed from outside the execution context."
TRAINING = {"sft_policy", "reward_model", "ppo_policy"}  # steps that make an attempt of a run
SHORT = {MAX_RUNTIME: str(60 * 60)}  # of what keeps no heartbeat; what is done by then stays done


@dg.failure_hook(required_resource_keys={"pipeline"})
def free_the_claim(context: dg.HookContext) -> None:
    """Let the next attempt begin at once when a step has failed for good."""
    logs = context.instance.all_logs(context.run_id)
    why = why_failed([log.dagster_event for log in logs if log.dagster_event is not None])
    why = why.removeprefix(f"{context.op.name}: ")  # which is said before it
    _close(context, f"step {context.op.name} failed: {why}", "FAILED")


@dg.success_hook(required_resource_keys={"pipeline"})
def free_the_claim_of_a_part(context: dg.HookContext) -> None:
    """Let the next attempt begin at once when all steps of a run for some assets are done.

    A turn has its verdict from the last asset; to whoever wanted fewer nothing else says that it is
    over, and their run would be taken for dead. Who only looked at the data has tried nothing.
    """
    instance = context.instance
    run = instance.get_run_by_id(context.run_id)
    if run is None or run.execution_plan_snapshot_id is None:
        return
    plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    done = instance.get_records_for_run(
        context.run_id, of_type=dg.DagsterEventType.STEP_SUCCESS
    ).records
    steps = set(plan.step_keys_to_execute)
    if steps <= {record.event_log_entry.step_key for record in done}:
        why = f"no more was asked for than {', '.join(sorted(steps))}"
        _close(context, why if steps & TRAINING else None, "KILLED")


def _close(context: dg.HookContext, why: str | None, status: "Ended") -> None:
    """Close the claim of the hook's run as one that came to no verdict, where it is held.

    Without a `why` there is nothing to tell: it counts as no attempt.
    """
    pipeline: Pipeline = context.resources.pipeline
    run = context.instance.get_run_by_id(context.run_id)
    claim = pipeline.claims.of_holder((run and run.root_run_id) or context.run_id)
    if claim is None or claim.state != "held":
        return
    try:
        pipeline.end_without_verdict(claim, why, status)
    except ClaimLost:
        context.log.info("the claim had been taken over already")


HOOKS = frozenset({free_the_claim, free_the_claim_of_a_part})


def why_failed(events: Sequence[dg.DagsterEvent]) -> str:
    """Return what ended the run of these events last: a blocking check's words, a step's error."""
    for event in reversed(events):
        if event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            check = event.asset_check_evaluation_data
            if check.blocking and not check.passed and check.description is not None:
                return f"{check.check_name}: {check.description}"
    for event in reversed(events):
        if event.is_step_failure and event.step_failure_data.error is not None:
            error = event.step_failure_data.error
            cause = (error.cause or error).message
            words = TYPE_OF_WORDS.sub("", cause)
            if words == cause and OF_A_FULL_DISK.search(cause):  # which is not told in ours
                words = FULL_DISK
            return f"{event.step_key}: {words.strip()[:600]}"
    return "no step failed"


def why_failed_in_our_words(events: Sequence[dg.DagsterEvent], message: str) -> str:
    """Return why the run of these events failed, for people who do not see Dagster's page.

    Of a step what our own code says: another's error may quote what people wrote, and `message`,
    the run's own, names the step. Of a killed process that says nothing; what Dagster's server
    found does.
    """
    if message == FROM_OUTSIDE:
        found = [e.message for e in events if e.event_type is dg.DagsterEventType.ENGINE_EVENT]
        return (found and found[-1]) or message
    errors = [e.step_failure_data.error for e in events if e.is_step_failure]
    causes = [error.cause.message for error in errors if error is not None and error.cause]
    if errors and all(TYPE_OF_WORDS.match(cause) for cause in causes):
        return why_failed(events)
    if any(OF_A_FULL_DISK.search(cause) for cause in causes):
        return FULL_DISK
    return message


LIGHT = dg.in_process_executor  # a step's own process costs seconds; training has one anyway

retrain = dg.define_asset_job(
    "retrain",
    selection=dg.AssetSelection.all(),
    executor_def=LIGHT,
    description="One turn: from the feedback that is there to a gated, registered version.",
)

bootstrap = dg.define_asset_job(
    "bootstrap",
    selection=dg.AssetSelection.assets("sft_policy"),
    executor_def=LIGHT,
    description="Version 0 from the seed conversations alone: something to chat with.",
)


class DroppedFile(dg.Config):
    """One file somebody dropped for an agent."""

    agent_id: str
    path: str


@dg.op
def take_in(context: dg.OpExecutionContext, config: DroppedFile, pipeline: Pipeline) -> None:
    """Store the file's feedback, then move the file aside. Taking it twice stores nothing twice.

    A file that was written to, or that another took the name of, meanwhile stays where it is: the
    sensor asks for it again.
    """
    path, settings = Path(config.path), pipeline.settings()
    inbox = settings.inbox_folder(config.agent_id)
    check_folder(config.agent_id)
    # Whoever reaches Dagster's page may ask for any path, and has no business with other files.
    if path.parent != inbox:
        raise dg.Failure(f"{path} is not in the agent's inbox", allow_retries=False)
    lock = settings.inbox_lock(config.agent_id)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        # An erasure writes files there anew: what it took out is not read from the former ones.
        fcntl.flock(handle, fcntl.LOCK_EX)
        summary = _take_in(context, path, config.agent_id, pipeline)
    if summary is None:
        return
    context.add_output_metadata(
        {
            "read": summary.read,
            "stored": summary.stored,
            "already known": summary.known,
            "erased before": summary.erased,
            "quarantined": dg.MetadataValue.json(dict(summary.quarantined)),
            **({"remarks": "\n".join(summary.remarks)} if summary.remarks else {}),
        }
    )


def _take_in(
    context: dg.OpExecutionContext, path: Path, agent_id: str, pipeline: Pipeline
) -> "IngestSummary | None":
    from rlhf_pipeline.feedback.ingest import ingest

    before = _stamp(path)
    if before is None:
        context.log.info(f"{path} was taken in by an earlier run")
        return None
    if problem := unfit_to_take(path):
        raise dg.Failure(f"{path} is {problem}", allow_retries=False)
    pipeline.store.ensure_agent(agent_id)  # though nothing of the file goes in: people look there
    own_names = pipeline.settings(agent_id).feedback.names.renaming()
    summary = ingest(pipeline.store, [path], agent_id, renaming=own_names)
    if _stamp(path) != before:
        context.log.info(f"{path} has changed since; what is new in it is taken in next")
    else:
        _set_aside(path)
    return summary


def unfit_to_take(path: Path) -> str:
    """Return why what was dropped is not read and moved; nothing where it may be.

    Who may drop files may not thereby read or move others of the machine's, nor put theirs among
    them: links are followed where whoever runs this made them, or the system's administrator.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        return "no file"  # reading a pipe would never end
    for each in (path.parent, path, path.parent / INBOX_DONE):
        if made_by_another(each):
            return f"reached by a link that somebody else made ({each.name})"
    return ""


def _stamp(path: Path) -> str | None:
    try:
        return stamp_of(path.stat())
    except FileNotFoundError:
        return None


def _set_aside(path: Path) -> None:
    done = path.parent / INBOX_DONE
    done.mkdir(exist_ok=True)
    target = done / path.name
    if target.exists() or target.is_symlink():  # another day's of the same name, gone perhaps
        # The end stays whole: by it erasures know what they read.
        ends = (len(end) for end in LINES if path.name.lower().endswith(end))
        cut = len(path.name) - max(ends, default=len(path.suffix))
        target = done / fitting(path.name[:cut], f".{time.time_ns()}{path.name[cut:]}")
    moved(path, target)


@dg.job(
    executor_def=LIGHT,
    tags=SHORT,
    description="Take in one JSONL file that was dropped into the inbox.",
)
def ingest_file() -> None:
    """Take in one dropped file."""
    take_in()


@dg.op
def remove_what_is_old(context: dg.OpExecutionContext, pipeline: Pipeline) -> None:
    """Remove what the settings let go, of every agent whose settings let anything go by itself.

    Raises dg.Failure at the end, the others' done, where an agent's recipe does not load.
    """
    from automation.old_runs import NO_AGENT, prune_runs
    from rlhf_pipeline.retention import lost_recipes, prune, told_lost

    every = pipeline.store.agents()
    lost = lost_recipes(every, pipeline.settings)
    agents = [a for a in every if a not in lost and pipeline.settings(a).retention.enabled]
    items = prune(pipeline.registry, pipeline.settings, agents=agents)
    if pipeline.settings().retention.enabled:
        agents.append(NO_AGENT)
    ledger = pipeline.registry.ledger
    items += prune_runs(context.instance, ledger, pipeline.settings, agents=agents)
    gone = [item for item in items if item.stays is None]
    told: dict[str, int | float | dg.MetadataValue] = {
        "removed": len(gone),
        "MiB": sum(item.bytes for item in gone) / 2**20,
        "gone": table([_row(item) for item in gone]),
        "stays": table([_row(item) for item in items if item.stays is not None]),
    }
    if lost:
        raise dg.Failure(told_lost(lost), metadata=told, allow_retries=False)
    context.add_output_metadata(told)


def _row(item: "Item") -> dict[str, str]:
    return {
        "agent": item.agent_id,
        "kind": item.kind,
        "name": item.name,
        "why it stays": item.stays or "",
    }


@dg.job(executor_def=LIGHT, tags=SHORT, description="Remove what is old and nothing points at.")
def prune_state() -> None:
    """Remove what is old and nothing points at."""
    remove_what_is_old()


def request(
    turn: Due, *, asked_by: str, deadline_minutes: int, again: bool = False
) -> dg.RunRequest:
    """Return the run that a due turn asks for; the same turn asks once.

    `again` is for votes that were trained on before, where a person wanted that.
    """
    snapshot = {"watermark": turn.watermark, **({"again": True} if again else {})}
    return dg.RunRequest(
        job_name=retrain.name,
        run_key=turn.run_key,
        partition_key=turn.agent_id,
        run_config={"ops": {"feedback_snapshot": {"config": snapshot}}},
        tags={
            ASKED_BY: asked_by,
            WATERMARK: str(turn.watermark),
            "rlhf/new_votes": str(turn.votes),
            MAX_RUNTIME: str(60 * deadline_minutes),
        },
    )
