"""What people say in MLflow about traced interactions, taken in as feedback, each once."""

import json
from typing import TYPE_CHECKING

import dagster as dg
import structlog

from resources.pipeline import Pipeline
from rlhf_pipeline.records import QuarantinedRow

if TYPE_CHECKING:
    from rlhf_pipeline.registry.traces import Read

log = structlog.get_logger()


@dg.sensor(
    target=None,
    minimum_interval_seconds=60,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Take in as feedback what people assess in MLflow.",
)
def assessments_in_mlflow(
    context: dg.SensorEvaluationContext, pipeline: Pipeline
) -> dg.SensorResult | dg.SkipReason:
    """Store what was assessed since the last look; the usual sensor then asks for the turn.

    The cursor says which of the older traces are next; an assessment's key keeps it from being
    stored twice. It moves after the votes are stored, so what a crash interrupts is read again.
    """
    if not (pipeline.settings().pages.log_traces and pipeline.settings().feedback.enabled):
        return dg.SkipReason("pages.log_traces is off: there are no traces to look at")
    from rlhf_pipeline.registry.traces import read_assessments

    cursor: dict[str, int] = json.loads(context.cursor or "{}")
    said, failed = [], []
    for agent_id in pipeline.store.agents():
        try:
            names = pipeline.settings(agent_id).pages.assessments
            found = read_assessments(pipeline.registry, agent_id, cursor.get(agent_id, 0), names)
            # First: of a person's votes on one thing the row that is stored last decides.
            gone = _taken_back(pipeline, agent_id, found)
            fresh, unfit = _taken_in(pipeline, found)
        except Exception as error:  # the others are heard all the same
            log.exception("assessments not looked at", agent=agent_id)
            failed.append(f"{agent_id}: {type(error).__name__}: {error}")
            continue
        if fresh or unfit or gone:  # what was read comes again, and is known by then
            back = f", {gone} taken back" if gone else ""
            said.append(f"{agent_id}: {fresh} new votes, {unfit} set aside{back}")
            log.info("assessments taken in", agent=agent_id, votes=fresh, aside=unfit, gone=gone)
        cursor[agent_id] = found.turn_ms
    if failed:
        said = ["assessments that could not be looked at", *failed, *said]
        if json.loads(context.cursor or "{}") == cursor:  # else the others' turn would not move on
            raise RuntimeError("; ".join(said))
    words = "; ".join(said) or "nothing was assessed since the last look"
    return dg.SensorResult(skip_reason=words, cursor=json.dumps(cursor))


def _taken_back(pipeline: Pipeline, agent_id: str, found: "Read") -> int:
    """Take back what an assessment said before it was changed or overridden; return how much."""
    if not found.revised:
        return 0
    outdated = found.outdated(pipeline.store.keys_from(agent_id, "mlflow"))
    return pipeline.store.withdraw(agent_id, outdated).votes


def _taken_in(pipeline: Pipeline, found: "Read") -> tuple[int, int]:
    """Store what a look found; return how many votes are new, and how many were set aside."""
    aside: list[QuarantinedRow] = list(found.aside)
    stored = pipeline.store.append(
        found.events,
        on_refused=lambda event, error: aside.append(
            QuarantinedRow(
                event.agent_id,
                getattr(error, "rule", "idempotency_conflict"),
                str(error),
                "mlflow",
                raw=event.idempotency_key,
            )
        ),
    )
    return sum(not one.known for one in stored), pipeline.store.quarantine(aside)
