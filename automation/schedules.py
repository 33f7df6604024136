"""What time starts: a turn at night for each agent that has anything new; what is old goes."""

import dagster as dg

from assets.common import agents
from automation.due_turns import due_turns
from automation.jobs import prune_state, request, retrain
from resources.pipeline import Pipeline
from rlhf_pipeline.config import load_settings


def nightly_schedule() -> dg.ScheduleDefinition:
    """Return the nightly schedule at the hour the settings name."""

    @dg.schedule(
        name="nightly",
        job=retrain,
        cron_schedule=load_settings().continuous_learning.nightly_cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Ask for a turn of every agent with new feedback, however little.",
    )
    def nightly(
        context: dg.ScheduleEvaluationContext, pipeline: Pipeline
    ) -> list[dg.RunRequest] | dg.SkipReason:
        """Ask for a turn of every agent with new feedback, however little."""
        requests = []
        known = set(context.instance.get_dynamic_partitions(str(agents.name)))
        turns, reasons = due_turns(context.instance, pipeline, min_new_feedback=1)
        for turn, rules in turns:
            if turn.agent_id not in known:
                context.instance.add_dynamic_partitions(str(agents.name), [turn.agent_id])
            asked = request(turn, asked_by="schedule", deadline_minutes=rules.deadline_minutes)
            requests.append(asked)
        return requests or dg.SkipReason("; ".join(reasons) or "no agent has sent feedback yet")

    return nightly


def retention_schedule() -> dg.ScheduleDefinition:
    """Return the schedule that removes what is old, running where the settings say so."""
    rules = load_settings().retention
    return dg.ScheduleDefinition(
        name="retention",
        job=prune_state,
        cron_schedule=rules.cron,
        description="Remove what is old and nothing points at, where the settings say so.",
        default_status=(
            dg.DefaultScheduleStatus.RUNNING if rules.enabled else dg.DefaultScheduleStatus.STOPPED
        ),
    )
