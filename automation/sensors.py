"""What waits: enough new feedback, dropped files, dead runs, failures, aliases moved by hand.

They run by default: spending is governed by the settings (`continuous_learning`, its budget and
cool-down) and by `rlhf pause`, which work the same with and without the UI.
"""

import json
import urllib.request

import dagster as dg
import structlog

from assets.common import agents
from automation.jobs import bootstrap, ingest_file, request, retrain
from resources.pipeline import AGENT, ASKED_BY, Pipeline, bootstrap_mark
from rlhf_pipeline.continuous import Due, due
from rlhf_pipeline.records import now

log = structlog.get_logger()
RUNNING = dg.DefaultSensorStatus.RUNNING


@dg.sensor(jobs=[retrain], minimum_interval_seconds=15, default_status=RUNNING)
def enough_new_feedback(
    context: dg.SensorEvaluationContext, pipeline: Pipeline
) -> dg.SensorResult | dg.SkipReason:
    """Ask for a turn when an agent has enough new effective votes."""
    known = set(context.instance.get_dynamic_partitions(str(agents.name)))
    every = pipeline.store.agents()
    fresh = [agent_id for agent_id in every if agent_id not in known]
    requests, reasons = [], []
    for agent_id in every:
        settings = pipeline.settings(agent_id)
        verdict = due(pipeline.database, agent_id, settings, at=now())
        if isinstance(verdict, Due):
            minutes = settings.continuous_learning.deadline_minutes
            requests.append(request(verdict, asked_by="sensor", deadline_minutes=minutes))
        else:
            reasons.append(f"{agent_id}: {verdict.reason}")
    if not requests and not fresh:
        return dg.SkipReason("; ".join(reasons) or "no agent has sent feedback yet")
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[agents.build_add_request(fresh)] if fresh else [],
    )


@dg.sensor(job=ingest_file, minimum_interval_seconds=15, default_status=RUNNING)
def dropped_files(context: dg.SensorEvaluationContext, pipeline: Pipeline) -> dg.SensorResult:
    """Take in JSONL files that lie in <state>/inbox/<agent>/, once they have stopped growing."""
    settings = pipeline.settings()
    inbox = settings.state_dir / settings.feedback.drop_folder
    before: dict[str, int] = json.loads(context.cursor or "{}")
    sizes: dict[str, int] = {}
    requests = []
    if settings.feedback.enabled:
        for path in sorted(inbox.glob("*/*.json*")):
            stat = path.stat()
            sizes[str(path)] = stat.st_size
            if before.get(str(path)) != stat.st_size:
                continue  # seen for the first time, or still being written
            requests.append(
                dg.RunRequest(
                    run_key=f"{path}:{stat.st_size}:{stat.st_mtime_ns}",
                    run_config={
                        "ops": {
                            "take_in": {"config": {"agent_id": path.parent.name, "path": str(path)}}
                        }
                    },
                )
            )
    skip = None if requests else f"{len(sizes)} files in {inbox}, none ready to take in"
    return dg.SensorResult(run_requests=requests, skip_reason=skip, cursor=json.dumps(sizes))


@dg.sensor(jobs=[retrain, bootstrap], minimum_interval_seconds=30, default_status=RUNNING)
def dead_runs(
    context: dg.SensorEvaluationContext, pipeline: Pipeline
) -> dg.SensorResult | dg.SkipReason:
    """Find turns whose heartbeat stopped, mark their run failed, and ask for them again."""
    requests = []
    for claim in pipeline.claims.stale():
        run = context.instance.get_run_by_id(claim.holder)
        if run is not None and not run.is_finished:
            context.instance.report_run_failed(
                run, message=f"no heartbeat since {claim.heartbeat_at:%H:%M:%S} UTC: worker died"
            )
        pipeline.claims.give_up(claim.token, "the worker died: no heartbeat")
        log.warning("run found dead", agent=claim.agent_id, run=claim.holder, token=claim.token)
        settings = pipeline.settings(claim.agent_id)
        if claim.attempt >= settings.continuous_learning.max_attempts:
            continue
        if claim.fingerprint == bootstrap_mark(claim.agent_id):
            requests.append(
                dg.RunRequest(
                    job_name=bootstrap.name,
                    run_key=f"{claim.agent_id}:bootstrap:{claim.attempt + 1}",
                    partition_key=claim.agent_id,
                    tags={AGENT: claim.agent_id, ASKED_BY: "watchdog"},
                )
            )
            continue
        again = Due(claim.agent_id, claim.fingerprint, claim.watermark, 0, claim.attempt + 1)
        minutes = settings.continuous_learning.deadline_minutes
        requests.append(request(again, asked_by="watchdog", deadline_minutes=minutes))
    if not requests:
        return dg.SkipReason("every held claim has a heartbeat")
    return dg.SensorResult(run_requests=requests)


@dg.sensor(target=None, minimum_interval_seconds=60, default_status=RUNNING)
def aliases_moved_by_hand(context: dg.SensorEvaluationContext, pipeline: Pipeline) -> dg.SkipReason:
    """Keep MLflow's aliases in step with the ledger; a person's move is adopted or set back."""
    said: list[str] = []
    for agent_id in pipeline.store.agents():
        if pipeline.ledger.champion(agent_id) is not None:
            said += pipeline.registry.reconcile(agent_id).changes
    return dg.SkipReason("; ".join(said) or "aliases and ledger agree")


@dg.run_failure_sensor(minimum_interval_seconds=30, default_status=RUNNING)
def run_failed(context: dg.RunFailureSensorContext, pipeline: Pipeline) -> None:
    """Tell people: a log line always, a webhook where one is set."""
    run, settings = context.dagster_run, pipeline.settings()
    log.error("run failed", job=run.job_name, run=run.run_id, agent=run.tags.get(AGENT, ""))
    webhook = settings.notifications.webhook
    if webhook is None:
        return
    body = {
        "text": f"{run.job_name} of {run.tags.get(AGENT, 'no agent')} failed",
        "run": run.run_id,
        "message": context.failure_event.message or "",
    }
    call = urllib.request.Request(
        webhook.get_secret_value(),
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=10):  # an error shows in the sensor's tick
        pass
