"""Which agents' turns should be asked for now, by the sensor and by the night alike.

A run that waits in the queue holds no claim yet: until it begins, only Dagster knows of it. What
this does not see is a run that the other of the two asks for in the same second. An agent whose own
recipe does not load, whose turn's files are damaged, or with whom anything else is wrong, keeps no
other one waiting; of the first two the sensor `alerts` tells people.
"""

import dagster as dg
import structlog

from automation.dead import AT_WORK
from automation.jobs import retrain
from resources.pipeline import AGENT, Pipeline
from rlhf_pipeline.config import ContinuousLearningSettings
from rlhf_pipeline.continuous import Due, due
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.records import now

log = structlog.get_logger()


def due_turns(
    instance: dg.DagsterInstance, pipeline: Pipeline, *, min_new_feedback: int | None = None
) -> tuple[list[tuple[Due, ContinuousLearningSettings]], list[str]]:
    """Return the turns to ask for, each with its agent's rules, and why no other agent's starts."""
    turns, reasons = [], []
    asked = asked_for(instance)
    for agent_id in pipeline.store.agents():
        if agent_id in asked:
            reasons.append(f"{agent_id}: run {asked[agent_id][:8]} waits or is at work")
            continue
        try:
            settings = pipeline.settings(agent_id)
            verdict = due(
                pipeline.database, agent_id, settings, at=now(), min_new_feedback=min_new_feedback
            )
        except PipelineError as error:
            reasons.append(f"{agent_id}: {error}")
            continue
        except Exception as error:  # a fault of ours; the others' turns are asked for all the same
            log.exception("turn not looked at", agent=agent_id)
            reasons.append(f"{agent_id}: {type(error).__name__}: {error}")
            continue
        if isinstance(verdict, Due):
            turns.append((verdict, settings.continuous_learning))
        else:
            reasons.append(f"{agent_id}: {verdict.reason}")
    return turns, reasons


def asked_for(instance: dg.DagsterInstance) -> dict[str, str]:
    """Return the id of the unfinished turn's run of each agent that has one."""
    runs = instance.get_runs(dg.RunsFilter(job_name=retrain.name, statuses=AT_WORK))
    return {run.tags.get(AGENT, ""): run.run_id for run in runs}
