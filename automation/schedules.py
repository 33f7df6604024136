"""What time starts at night: a turn for each agent that has anything new; what is old goes."""

import dagster as dg

from assets.common import agents
from automation.jobs import prune_state, request, retrain
from resources.pipeline import Pipeline
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.continuous import Due, due
from rlhf_pipeline.records import now


def nightly_schedule() -> dg.ScheduleDefinition:
    """Return the nightly schedule at the hour the settings name."""

    @dg.schedule(
        name="nightly",
        job=retrain,
        cron_schedule=load_settings().continuous_learning.nightly_cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
    def nightly(
        context: dg.ScheduleEvaluationContext, pipeline: Pipeline
    ) -> list[dg.RunRequest] | dg.SkipReason:
        """Ask for a turn of every agent with new feedback, however little."""
        requests, reasons = [], []
        known = set(context.instance.get_dynamic_partitions(str(agents.name)))
        for agent_id in pipeline.store.agents():
            settings = pipeline.settings(agent_id)
            verdict = due(pipeline.database, agent_id, settings, at=now(), min_new_feedback=1)
            if not isinstance(verdict, Due):
                reasons.append(f"{agent_id}: {verdict.reason}")
                continue
            if agent_id not in known:
                context.instance.add_dynamic_partitions(str(agents.name), [agent_id])
            minutes = settings.continuous_learning.deadline_minutes
            requests.append(request(verdict, asked_by="schedule", deadline_minutes=minutes))
        return requests or dg.SkipReason("; ".join(reasons) or "no agent has sent feedback yet")

    return nightly


def retention_schedule() -> dg.ScheduleDefinition:
    """Return the schedule that removes what is old, running where the settings say so."""
    rules = load_settings().retention
    return dg.ScheduleDefinition(
        name="retention",
        job=prune_state,
        cron_schedule=rules.cron,
        default_status=(
            dg.DefaultScheduleStatus.RUNNING if rules.enabled else dg.DefaultScheduleStatus.STOPPED
        ),
    )
