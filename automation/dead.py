"""Ends what nobody is at work on: dead turns' Dagster runs and MLflow runs.

Dagster's default launcher notices nothing of a killed process. A run keeps its claim's heartbeat
going from its first step to its end, so a heartbeat that stopped is a run that died, or one that a
person terminated outside a training stage: of that Dagster tells no hook, which would let the claim
go.
"""

from datetime import UTC, datetime, timedelta

import dagster as dg
import structlog

from automation.jobs import bootstrap, retrain
from resources.pipeline import AGENT, Pipeline
from rlhf_pipeline.errors import RegistryError
from rlhf_pipeline.feedback.claims import LEASE, Claim
from rlhf_pipeline.records import now

log = structlog.get_logger()
UNCLAIMED = timedelta(minutes=10)  # of a run: more than importing and counting votes takes
UNFINISHED = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
ASSETS = "__ASSET_JOB"  # Dagster's name for what a person starts on an asset's page
TERMINATED = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
AT_WORK = [*UNFINISHED, dg.DagsterRunStatus.QUEUED]  # nobody can be dead in the queue


def end_dead_turns(
    instance: dg.DagsterInstance, pipeline: Pipeline, agent_id: str | None = None
) -> list[Claim]:
    """End every turn that died, of one agent or of all; return the claims of those.

    A turn that a person terminated is not among them: its claim is given up as well, and when the
    agent's next one starts is for the settings to say.
    1. A claim whose heartbeat stopped: its runs are ended, then the claim is given up.
    2. A run that is at work long after its claim was closed, or that claimed nothing at all: it
       died before its first step or after its last, or another run took its stale claim over.
    MLflow comes first: where it is away for all of them this raises, and the next call begins here
    again; where it comes to be away half way, those that were ended are returned.
    """
    died = []
    refused: list[RegistryError] = []

    def ends(agent_id: str, fingerprint: str) -> bool:
        """End the turn's runs in MLflow; say whether it let us."""
        try:
            pipeline.registry.end_runs(agent_id, fingerprint)
        except RegistryError as error:
            refused.append(error)
            return False
        return True

    for claim in pipeline.claims.stale():
        if agent_id not in (None, claim.agent_id):
            continue
        if not ends(claim.agent_id, claim.fingerprint):
            continue
        runs = runs_of(instance, claim.holder)
        is_terminated = bool(runs) and runs[-1].status in TERMINATED
        for run in runs:
            if not run.is_finished:
                words = (
                    f"no heartbeat since {claim.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC: worker died"
                )
                instance.report_run_failed(run, message=words)
        if is_terminated:
            pipeline.claims.give_up(claim.token, "terminated by hand")
            log.warning("run terminated", agent=claim.agent_id, run=claim.holder)
            continue
        pipeline.claims.give_up(claim.token, "the worker died: no heartbeat")
        died.append(claim)
        log.warning("run found dead", agent=claim.agent_id, run=claim.holder, token=claim.token)
    for run, words, closed in _left_over(instance, pipeline, agent_id):
        held = None if closed is None else pipeline.claims.held(closed.agent_id)
        is_over = closed is not None and (held is None or held.fingerprint != closed.fingerprint)
        if closed is not None and is_over and not ends(closed.agent_id, closed.fingerprint):
            continue
        instance.report_run_failed(run, message=words)
        log.warning("run found dead", agent=run.tags.get(AGENT, ""), run=run.run_id, why=words)
    if refused:
        log.warning("turns that died not all ended", error=str(refused[-1]))
        if not died:
            raise refused[-1]
    return died


def runs_of(instance: dg.DagsterInstance, holder: str) -> list[dg.DagsterRun]:
    """Return the run that claimed, and those that a person set going again from it, in order."""
    first = instance.get_run_by_id(holder)
    again = instance.get_runs(dg.RunsFilter(tags={"dagster/root_run_id": holder}))
    return [run for run in (first, *reversed(again)) if run is not None]


def _left_over(
    instance: dg.DagsterInstance, pipeline: Pipeline, agent_id: str | None
) -> list[tuple[dg.DagsterRun, str, Claim | None]]:
    """Return the runs that hold no claim and yet have not ended, with why, and what they held."""
    tags = {} if agent_id is None else {AGENT: agent_id}
    records = [
        record
        for job in (retrain.name, bootstrap.name, ASSETS)
        for record in instance.get_run_records(
            dg.RunsFilter(job_name=job, statuses=UNFINISHED, tags=tags)
        )
    ]
    found: list[tuple[dg.DagsterRun, str, Claim | None]] = []
    for record in records:
        run, at = record.dagster_run, now()
        # One that has yet to start left the queue when it was changed last.
        began = _moment(record.start_time) or record.update_timestamp.replace(tzinfo=UTC)
        claim = pipeline.claims.of_holder(run.root_run_id or run.run_id)
        if claim is None and at - began >= UNCLAIMED:
            found.append((run, "it claimed nothing: worker died before its first step", None))
        elif claim and claim.state != "held" and at - max(began, claim.heartbeat_at) >= LEASE:
            found.append((run, f"its turn had been closed ({claim.state}): worker died", claim))
    return found


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
