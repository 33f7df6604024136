"""What a version was compared by, as its turn left it: the report behind the gate's verdict."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.evaluation.report import EvaluationReport
from rlhf_pipeline.files import read_json
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger

OUTCOME = "evaluation.json"  # in the turn's work folder: what its evaluation stage came to


def comparison_of(version: ModelVersion) -> EvaluationReport | None:
    """Return the version's comparison; None where it had none, or its turn's folder is gone."""
    outcome = _work(version) / OUTCOME
    if version.gate is None or not outcome.is_file():
        return None
    return EvaluationReport.from_json(read_json(outcome)["result"]["report"])


def pictures_of(version: ModelVersion) -> list[Path]:
    """Return the pictures of its comparison, and over-optimisation in its training."""
    work = _work(version)
    drawn = sorted((work / "evaluation").glob("*.png"))
    return [*drawn, *sorted((work / "ppo").rglob("over_optimisation.png"))]


def compared_with(ledger: PromotionLedger, version: ModelVersion) -> ModelVersion | None:
    """Return who was champion when the version was trained and compared; None where unknown."""
    place = str(version.lineage.get("started_from") or "")
    # The end of the path, as the state folder may have been elsewhere on that day.
    known = reversed(ledger.versions(version.agent_id)) if place else iter(())
    return next((v for v in known if place.endswith("/".join(v.path.parts[-3:]))), None)


def _work(version: ModelVersion) -> Path:
    return version.path.parent.parent  # of ppo/policy
