"""What waits: enough new feedback, dropped files, dead runs, failures, aliases moved by hand.

They run by default: spending is governed by the settings (`continuous_learning`, its budget and
cool-down) and by `rlhf pause`, which work the same with and without the UI.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, timedelta
from typing import Any

import dagster as dg
import structlog

from assets.common import agents
from automation import outbox
from automation.dead import end_dead_turns, runs_of
from automation.due_turns import asked_for, due_turns
from automation.jobs import (
    CAME_TO_NOTHING,
    DROPPED,
    WATERMARK,
    bootstrap,
    ingest_file,
    request,
    retrain,
    take_in,
    unfit_to_take,
    why_failed_in_our_words,
)
from resources.pipeline import (
    AGENT,
    ASKED_BY,
    LEARNING_RATE,
    MAX_STEPS,
    Pipeline,
    bootstrap_mark,
)
from rlhf_pipeline.alerts import BLIND, UNSEEN, alerts_about, disk_alerts, name_alerts
from rlhf_pipeline.config import Settings
from rlhf_pipeline.continuous import Due, attempts_at, back_off, due, is_young, minutes_in_a_day
from rlhf_pipeline.errors import ConfigError, PipelineError, RegistryAway
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.experiment.live import ANSWERS_AT_ONCE, catch_up, look
from rlhf_pipeline.experiment.watch import go_back_if_failing
from rlhf_pipeline.feedback.claims import NO_TRAINING
from rlhf_pipeline.feedback.inbox import Refused, keep_refused, refused_files, stamp_of
from rlhf_pipeline.feedback.sources import LINES, in_order, why_left
from rlhf_pipeline.overview import Overview, overview
from rlhf_pipeline.promoting import promotes_by_itself
from rlhf_pipeline.records import now

log = structlog.get_logger()
RUNNING = dg.DefaultSensorStatus.RUNNING
ENDED_BADLY = {dg.DagsterEventType.RUN_FAILURE, dg.DagsterEventType.RUN_CANCELED}
SETTLED = timedelta(minutes=1)  # since a dropped file was written to: longer than a writer's pause


@dg.sensor(
    jobs=[retrain],
    minimum_interval_seconds=5,
    default_status=RUNNING,
    description="Ask for a turn when an agent has enough new effective votes.",
)
def enough_new_feedback(
    context: dg.SensorEvaluationContext, pipeline: Pipeline
) -> dg.SensorResult | dg.SkipReason:
    """Ask for a turn when an agent has enough new effective votes."""
    known = set(context.instance.get_dynamic_partitions(str(agents.name)))
    fresh = [agent_id for agent_id in pipeline.store.agents() if agent_id not in known]
    turns, reasons = due_turns(context.instance, pipeline)
    requests = []
    for turn, rules in turns:
        used, reason = _ended_unclaimed(context.instance, pipeline, turn, rules.max_attempts)
        if reason is not None:
            reasons.append(f"{turn.agent_id}: {reason}")
            continue
        asked = request(turn, asked_by="sensor", deadline_minutes=rules.deadline_minutes)
        requests.append(asked._replace(run_key=f"{asked.run_key}.{used}") if used else asked)
    if not requests and not fresh:
        return dg.SkipReason("; ".join(reasons) or "no agent has sent feedback yet")
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[agents.build_add_request(fresh)] if fresh else [],
    )


def _ended_unclaimed(
    instance: dg.DagsterInstance, pipeline: Pipeline, turn: Due, most: int
) -> tuple[int, str | None]:
    """Return how many run keys of the turn led to no claim, and why none starts now.

    A run key is used up even by a run whose process never came to its first step, or that a person
    cancelled in the queue, or whose claim went as the store was put back to an older copy; without
    this count the turn would never be asked for again. It waits for those that came to nothing
    since the agent's last claim. What a person began counts for neither.
    """
    claims = pipeline.claims.history(turn.agent_id)

    def unclaimed(**which: Any) -> list[dg.RunRecord]:
        records = instance.get_run_records(dg.RunsFilter(job_name=retrain.name, **which))
        asked = [r for r in records if WATERMARK in r.dagster_run.tags]
        return [r for r in asked if pipeline.claims.of_holder(r.dagster_run.run_id) is None]

    ended = unclaimed(
        tags={AGENT: turn.agent_id},
        statuses=CAME_TO_NOTHING,
        created_after=claims[-1].created_at if claims else None,
    )
    used = unclaimed(
        tags={AGENT: turn.agent_id, WATERMARK: str(turn.watermark)},
        statuses=[*CAME_TO_NOTHING, dg.DagsterRunStatus.SUCCESS],
    )
    same = [r for r in ended if r.dagster_run.tags[WATERMARK] == str(turn.watermark)]
    words = f"{len(ended)} runs ended before they began"
    return len(used), _why_wait(ended, words, is_over=len(same) >= most)


def _why_wait(failed: Sequence[dg.RunRecord], words: str, *, is_over: bool) -> str | None:
    """Return why none starts now after these: each doubles the wait, until a person must look."""
    if not failed:
        return None
    if is_over:
        return f"{words}; a person must look"
    latest = max(record.update_timestamp for record in failed).replace(tzinfo=UTC)
    age, wait = now() - latest, back_off(len(failed))
    return f"{words}; next in {wait - age}" if is_young(age, wait) else None


@dg.sensor(
    job=ingest_file,
    minimum_interval_seconds=15,
    default_status=RUNNING,
    description="Take in JSONL files that lie in the inbox folder, once they have settled.",
)
def dropped_files(context: dg.SensorEvaluationContext, pipeline: Pipeline) -> dg.SensorResult:
    """Take in JSONL files that lie in <state>/inbox/<agent>/, once they have settled."""
    settings = pipeline.settings()
    inbox = settings.state_dir / settings.feedback.drop_folder
    before: dict[str, int] = json.loads(context.cursor or "{}")
    sizes: dict[str, int] = {}
    requests, reasons = [], []
    kept, refused = refused_files(settings), dict[str, Refused]()
    if settings.feedback.enabled:
        for path in in_order(inbox.glob("*/*")):
            if path.name.startswith("."):
                continue  # what a program is copying here, or a system leaves in every folder
            if left := why_left(path):
                reasons.append(left)
                continue
            if not path.name.lower().endswith(LINES):
                continue
            try:
                stat, problem = path.stat(), unfit_to_take(path)
            except FileNotFoundError:
                continue  # taken in since the folder was listed
            except OSError as error:  # as a link to itself is: the other files are taken in
                reasons.append(f"{path.name} cannot be looked at: {error.strerror}")
                continue
            if problem:
                reasons.append(f"{path.name} is {problem}")
                continue
            sizes[str(path)] = stat.st_size
            if before.get(str(path)) != stat.st_size:
                continue  # seen for the first time, or still being written
            if abs(now().timestamp() - stat.st_mtime) < SETTLED.total_seconds():
                continue  # whoever writes it may only pause; where clocks differ it is near too
            key = f"{path}:{stamp_of(stat)}"
            ended = _came_to_nothing(context.instance, key)
            is_over = len(ended) >= settings.continuous_learning.max_attempts
            if ended:
                name = f"{path.parent.name}/{path.name}"
                stamp, known = stamp_of(stat), kept.get(name)
                refused[name] = _refused(context.instance, stamp, ended, known, is_over=is_over)
            words = f"{len(ended)} runs for {path.name} came to nothing"
            if (reason := _why_wait(ended, words, is_over=is_over)) is not None:
                reasons.append(reason)
                continue
            requests.append(
                dg.RunRequest(
                    run_key=f"{key}.{len(ended)}" if ended else key,
                    tags={DROPPED: key},
                    run_config={
                        "ops": {
                            "take_in": {"config": {"agent_id": path.parent.name, "path": str(path)}}
                        }
                    },
                )
            )
    try:
        if refused != kept:
            keep_refused(settings, refused)
    except OSError:  # a full disk perhaps; whether a run starts does not rest on it
        log.exception("refused files not kept")
    waiting = "; ".join([f"{len(sizes)} files in {inbox}, none ready to take in", *reasons])
    skip = None if requests else waiting
    return dg.SensorResult(run_requests=requests, skip_reason=skip, cursor=json.dumps(sizes))


def _came_to_nothing(instance: dg.DagsterInstance, key: str) -> Sequence[dg.RunRecord]:
    """Return the runs that did not take the file in as it is; their run keys are used up."""
    return instance.get_run_records(dg.RunsFilter(tags={DROPPED: key}, statuses=CAME_TO_NOTHING))


def _refused(
    instance: dg.DagsterInstance,
    stamp: str,
    ended: Sequence[dg.RunRecord],
    kept: Refused | None,
    *,
    is_over: bool,
) -> Refused:
    """Return what is told of a file at which these runs ended; the last one's log is read once."""
    if kept is not None and (kept.stamp, kept.runs) == (stamp, len(ended)):
        return replace(kept, is_over=is_over)
    last = max(ended, key=lambda record: record.update_timestamp).dagster_run
    events = _events(instance, last)
    said = [e.message for e in events if e.event_type in ENDED_BADLY]
    why = why_failed_in_our_words(events, (said and said[-1]) or last.status.value)
    return Refused(stamp, len(ended), is_over, why.removeprefix(f"{take_in.name}: "))


def _events(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[dg.DagsterEvent]:
    logs = instance.all_logs(run.run_id)
    return [entry.dagster_event for entry in logs if entry.dagster_event is not None]


@dg.sensor(
    jobs=[retrain, bootstrap],
    minimum_interval_seconds=30,
    default_status=RUNNING,
    description="End the turns that died, and ask again for those that may be tried.",
)
def dead_runs(
    context: dg.SensorEvaluationContext, pipeline: Pipeline
) -> dg.SensorResult | dg.SkipReason:
    """End the turns that died (automation/dead.py) and ask again for those that may be tried."""
    requests = []
    known = set(context.instance.get_dynamic_partitions(str(agents.name)))
    died = end_dead_turns(context.instance, pipeline)
    asked_anew = asked_for(context.instance)  # by a sensor that saw the claim given up already
    for claim in died:
        if claim.asked_by in NO_TRAINING:
            continue  # whoever asked for it asks again; there is nothing to train
        try:
            settings = pipeline.settings(claim.agent_id)
        except ConfigError as error:  # `alerts` tells of it; the other claims were given up too
            log.warning("not asked for again", agent=claim.agent_id, error=str(error))
            continue
        row, rules = pipeline.store.agent(claim.agent_id), settings.continuous_learning
        if (
            claim.attempt >= rules.max_attempts
            or not (settings.training.enabled and rules.enabled)
            or (row is not None and row.paused_reason is not None)
            or claim.agent_id in asked_anew
            or pipeline.claims.held(claim.agent_id) is not None  # another has taken over
        ):
            continue
        is_first = claim.fingerprint == bootstrap_mark(claim.agent_id)
        history = pipeline.claims.history(claim.agent_id)
        deadline = timedelta(minutes=rules.deadline_minutes)
        day = minutes_in_a_day(history, now(), longest=deadline)
        if not is_first and day >= rules.gpu_minutes_per_night:
            continue  # as one that its deadline ended: the budget says when the next turn starts
        if is_first:
            requests.append(
                dg.RunRequest(
                    job_name=bootstrap.name,
                    run_key=f"{claim.agent_id}:bootstrap:{claim.attempt + 1}",
                    partition_key=claim.agent_id,
                    tags={ASKED_BY: "watchdog"},
                )
            )
            continue
        if pipeline.store.withdrawn_from(claim.agent_id, claim.watermark):
            continue  # it would learn from them; what is left may be too little for a turn
        attempt = len(attempts_at(claim.watermark, history)) + 1
        asked = request(
            Due(claim.agent_id, claim.watermark, 0, attempt),
            asked_by="watchdog",
            deadline_minutes=rules.deadline_minutes,
            again=pipeline.claims.verdicts_before(claim) > 0,
        )
        runs = runs_of(context.instance, claim.holder)
        wishes = {k: r.tags[k] for r in runs for k in (MAX_STEPS, LEARNING_RATE) if k in r.tags}
        requests.append(asked._replace(tags={**asked.tags, **wishes}))
    if not requests:
        return dg.SkipReason("no claim without a heartbeat that may be tried again")
    fresh = sorted({str(r.partition_key) for r in requests} - known)
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[agents.build_add_request(fresh)] if fresh else [],
    )


@dg.sensor(
    target=None,
    minimum_interval_seconds=60,
    default_status=RUNNING,
    description="Keep MLflow's aliases in step with the ledger; adopt or undo a person's move.",
)
def aliases_moved_by_hand(context: dg.SensorEvaluationContext, pipeline: Pipeline) -> dg.SkipReason:
    """Keep MLflow's aliases in step with the ledger; a person's move is adopted or set back."""
    said: list[str] = []
    failed: list[str] = []
    for agent_id in pipeline.store.agents():
        if pipeline.ledger.champion(agent_id) is None:
            continue
        try:
            said += pipeline.registry.reconcile(agent_id)
        except RegistryAway as error:  # its tries take seconds of a tick's minute, for each agent
            failed.append(f"{agent_id}: {error}; the next tick looks at the agents after it")
            break
        except PipelineError as error:  # the others' are kept in step all the same
            failed.append(f"{agent_id}: {error}")
    if failed:
        raise RuntimeError("; ".join(["aliases that could not be set", *failed, *said]))
    return dg.SkipReason("; ".join(said) or "aliases and ledger agree")


@dg.sensor(
    target=None,
    minimum_interval_seconds=15,
    default_status=RUNNING,
    description="Look at every running experiment, and promote, roll back, widen or end it.",
)
def live_experiments(context: dg.SensorEvaluationContext, pipeline: Pipeline) -> dg.SkipReason:
    """Look at every running experiment, and promote, roll back, widen or end it."""
    book = ExperimentBook(pipeline.database)
    said, failed = [], []
    for experiment in book.all_running():
        try:
            whole = pipeline.settings(experiment.agent_id)
            settings = whole.experiments
            if not catch_up(pipeline.database, experiment, settings, most=ANSWERS_AT_ONCE):
                said.append(f"{experiment.agent_id}: counts the answers so far")
                continue
            automatic = promotes_by_itself(pipeline.store, experiment.agent_id, whole)
            _, done = look(
                book,
                pipeline.ledger,
                experiment,
                settings,
                check=pipeline.registry.folder_of,
                automatic=automatic,
            )
        except Exception as error:  # the others are looked at all the same
            log.exception("experiment not looked at", agent=experiment.agent_id)
            failed.append(f"{experiment.agent_id}: {type(error).__name__}: {error}")
            continue
        log.info("experiment", agent=experiment.agent_id, done=done)
        said.append(f"{experiment.agent_id}: {done}")
    if failed:
        raise RuntimeError("; ".join(["experiments that could not be looked at", *failed, *said]))
    return dg.SkipReason("; ".join(said) or "no experiment is running")


@dg.sensor(
    target=None,
    minimum_interval_seconds=30,
    default_status=RUNNING,
    description="Roll back a champion that fails in its first days.",
)
def young_champions(context: dg.SensorEvaluationContext, pipeline: Pipeline) -> dg.SkipReason:
    """Roll back a champion that fails in its first days."""
    said, failed = [], []
    for agent_id in pipeline.store.agents():
        try:
            settings = pipeline.settings(agent_id)
        except ConfigError as error:  # `alerts` tells of it; the others are looked at all the same
            log.warning("champion not looked at", agent=agent_id, error=str(error))
            continue
        try:
            done = go_back_if_failing(pipeline.registry, agent_id, settings, at=now())
        except Exception as error:  # the others are looked at all the same
            log.exception("champion not looked at", agent=agent_id)
            failed.append(f"{agent_id}: {type(error).__name__}: {error}")
            continue
        if done is not None:
            log.warning("champion rolled back", agent=agent_id, done=done)
            said.append(f"{agent_id}: {done}")
    if failed:
        raise RuntimeError("; ".join(["champions that could not be looked at", *failed, *said]))
    return dg.SkipReason("; ".join(said) or "no young champion fails")


@dg.sensor(
    target=None,
    minimum_interval_seconds=300,
    default_status=RUNNING,
    description="Tell people of what is worth a look, once when it begins.",
)
def alerts(context: dg.SensorEvaluationContext, pipeline: Pipeline) -> dg.SkipReason:
    """Tell people of what is worth a look, once when it begins; the cursor holds what was told.

    What `run_failed` could not tell is told here too. Of an agent that nobody can look at now,
    what was told stands. Raises RuntimeError where no agent can be looked at and all that can be
    said of it was told before.
    """

    def looked(agent_id: str, settings: Settings) -> Overview:
        enough = settings.continuous_learning.min_new_feedback
        latest = settings.experiments.trouble_answers
        # Asked for what it raises: a turn that cannot be asked for is told of nowhere else.
        due(pipeline.database, agent_id, settings, at=now())
        return overview(pipeline.store, pipeline.ledger, agent_id, enough=enough, latest=latest)

    told, settings = set(json.loads(context.cursor or "[]")), pipeline.settings()
    standing, failed, is_away = set(), [], False
    until = time.monotonic() + outbox.TELLING
    try:
        outbox.send_kept(settings, seconds=outbox.TELLING)
    except outbox.AWAY as error:
        failed.append(f"a failed run was not told: {type(error).__name__}")
        is_away = outbox.is_away(error)
    agent_ids = pipeline.store.agents()
    found = [*disk_alerts(settings), *name_alerts(agent_ids)]
    for agent_id in agent_ids:
        found += alerts_about(agent_id, pipeline.settings, looked, at=now())
    for alert in found:
        if alert.key not in told:
            log.warning("alert", agent=alert.agent_id, alert=alert.name, words=alert.words)
            if is_away or time.monotonic() > until:
                failed.append(f"{alert.key} was not told")
                continue
            text = f"{alert.agent_id}: {alert.name.replace('_', ' ')}"
            try:
                outbox.tell(settings, {"text": text, "message": alert.words})
            except outbox.AWAY as error:  # told again at the next tick
                failed.append(f"{alert.key} was not told: {type(error).__name__}")
                is_away = outbox.is_away(error)
                continue
        standing.add(alert.key)
    blind = {alert.agent_id for alert in found if alert.name in BLIND}
    standing |= {key for key in told if key.split("/")[0] in blind}
    for key in sorted(told - standing):
        log.info("alert over", alert=key)
    unseen = [f"{alert.agent_id}: {alert.words}" for alert in found if alert.name == UNSEEN]
    # Only where the cursor stays as it is: a tick that fails keeps none, and would tell all again.
    if unseen and len(unseen) == len(agent_ids) and standing == told:
        raise RuntimeError("; ".join(["no agent could be looked at", *unseen, *failed]))
    context.update_cursor(json.dumps(sorted(standing)))
    return dg.SkipReason("; ".join([*sorted(standing), *failed]) or "nothing is worth a look")


@dg.run_failure_sensor(
    monitor_all_code_locations=True,  # a run of `make train` is of none, to Dagster
    minimum_interval_seconds=30,
    default_status=RUNNING,
    description="Tell people that a run failed: a log line always, a webhook where one is set.",
)
def run_failed(context: dg.RunFailureSensorContext, pipeline: Pipeline) -> None:
    """Tell people: a log line always, a webhook where one is set.

    An error shows in the sensor's tick; this is not called again for the run, so what was not told
    waits in the outbox.
    """
    run, settings = context.dagster_run, pipeline.settings()
    log.error("run failed", job=run.job_name, run=run.run_id, agent=run.tags.get(AGENT, ""))
    of = f" of {run.tags[AGENT]}" if AGENT in run.tags else ""  # pruning is everybody's
    text = f"{run.job_name}{of} failed"
    events = _events(context.instance, run)
    message = why_failed_in_our_words(events, context.failure_event.message or "")
    body = {"text": text, "run": run.run_id, "message": message}
    try:
        outbox.keep(settings, body)
    except OSError:  # a full disk perhaps, which the run failed of too
        log.exception("message not kept", run=run.run_id)
        outbox.tell(settings, body)
    else:
        outbox.send_kept(settings, seconds=5)  # a tick may hear of several runs
