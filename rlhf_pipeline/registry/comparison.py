"""What a version was compared by, as its turn left it: the report behind the gate's verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_pipeline.evaluation.report import EvaluationReport
from rlhf_pipeline.files import read_json
from rlhf_pipeline.registry.ledger import ModelVersion

OUTCOME = "evaluation.json"  # in the turn's work folder: what its evaluation stage came to


def comparison_of(version: ModelVersion) -> EvaluationReport | None:
    """Return the version's comparison; None where it had none, or its turn's folder is gone."""
    return None if version.gate is None else report_in(version.work)


def report_in(work: Path) -> EvaluationReport | None:
    """Return the comparison in a turn's work folder; None where it did not come to that."""
    outcome = work / OUTCOME
    if not outcome.is_file():
        return None
    return EvaluationReport.from_json(read_json(outcome)["result"]["report"])


def by_place(versions: Sequence[ModelVersion]) -> dict[str, ModelVersion]:
    """Return an agent's versions, given oldest first, by the places that a lineage names."""
    return {_place(version.path): version for version in versions}


def compared_with(version: ModelVersion, known: Mapping[str, ModelVersion]) -> ModelVersion | None:
    """Return who was champion when the version was trained and compared; None where unknown.

    `known` are the agent's versions by place.
    """
    return version_at(version.lineage.get("started_from"), known)


def baseline_of(version: ModelVersion, known: Mapping[str, ModelVersion]) -> ModelVersion | None:
    """Return the baseline from which the version's score and KL are counted; None where unknown."""
    return version_at(version.lineage.get("baseline"), known)


def version_at(path: str | Path | None, known: Mapping[str, ModelVersion]) -> ModelVersion | None:
    """Return the version that lies where a lineage says; None where it is none of the `known`."""
    return None if path is None else known.get(_place(Path(path)))


def _place(path: Path) -> str:
    # The end of the path, as the state folder may have been elsewhere on that day.
    return "/".join(path.parts[-3:])


def learned_per_thousand(version: ModelVersion, known: Mapping[str, ModelVersion]) -> float | None:
    """Return how much higher the version scored than the champion of its day, for 1,000 more votes.

    By the gate's model on held-out prompts. Votes before reward models count in nothing: a baseline
    imitates, and has learned from none. None where its lineage does not say, or where it was
    trained on no more votes than that champion.
    """
    before = compared_with(version, known)
    gained = version.lineage.get("evaluation", {}).get("over_champion")
    if before is None or gained is None:
        return None
    had = int(before.lineage.get("votes", 0)) if before.lineage.get("reward_models") else 0
    more = int(version.lineage.get("votes", 0)) - had
    return 1000 * float(gained) / more if more > 0 else None
