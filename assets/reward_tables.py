"""A reward model's report as numbers and rows for MLflow and Dagster."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.common import table
from rlhf_pipeline.feedback.datasets import JOBS
from rlhf_pipeline.reward.calibration import judged_by

BESIDE = ("bag_of_words", "annotators", "length_matched")


def beside(report: Mapping[str, Any]) -> dict[str, float]:
    """Return what a report's accuracy is read beside, by metric name; what is unknown is left out.

    `report` is report.json of reward.training, so are those of the others here.
    """
    findings = report.get("findings")  # of a model that is given from elsewhere there may be none
    if new := report.get("on_new_votes"):
        return {"accuracy/on_new_votes": new["share"]}  # of a model that was used again
    if findings is None:
        return {}
    found = {f"accuracy/{n}": findings[n]["share"] for n in BESIDE if findings[n] is not None}
    if findings["length_correlation"] is not None:
        found["length_correlation"] = findings["length_correlation"]
    return found


def worst_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the pairs, or the votes, the model is most wrong about, by id, the worst first."""
    findings = report.get("findings") or {}
    return list(findings.get("worst", ()))


def influence_of(report: Mapping[str, Any]) -> dg.MetadataValue:
    """Return what each part of the raters does to the model, or in words why that is not known."""
    if report.get("influence"):
        return table(report["influence"])
    return dg.MetadataValue.text(report.get("no_influence") or "not known")


def groups_of(reports: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per model and group of held-out votes, with accuracy and interval."""
    rows = []
    for job in JOBS:
        findings = reports[job].get("findings") or {}
        groups = [("new votes", reports[job].get("on_new_votes"))]
        groups += [(n.replace("_", " "), findings.get(n)) for n in BESIDE]
        for word in ("kind", "topic", "cohort"):
            of_word = findings.get(f"by_{word}", {})
            groups += [(f"{word} {name}", one) for name, one in of_word.items()]
        curve = findings.get("learning_curve", ())
        of = judged_by(reports[job])
        groups += [(f"head on {one['pairs']} {of}", one["accuracy"]) for one in curve]
        rows += [
            {
                "model": job,
                "group": group,
                "accuracy": round(one["share"], 4),
                "low": round(one["low"], 4),
                "high": round(one["high"], 4),
                "held-out": one["n"],
            }
            for group, one in groups
            if one is not None
        ]
    return rows
