"""Everything that is known about one version, for a person who asks why it serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rlhf_pipeline.config import unlike_defaults
from rlhf_pipeline.database import claims, snapshots
from rlhf_pipeline.evaluation import PAGE
from rlhf_pipeline.experiment.assignment import percent
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook
from rlhf_pipeline.feedback.raters import erased_rows
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.registry.comparison import by_place, compared_with, comparison_of
from rlhf_pipeline.registry.ledger import ModelVersion, Promotion, PromotionLedger, Standing


def explain(ledger: PromotionLedger, agent_id: str, version: int) -> dict[str, Any]:
    """Return a version's standing, lineage, data, training attempts, gate table, what it says more
    often, ledger entries and the experiments in which it was the challenger.

    Plain JSON values; `to_text` writes them for people. Raises RegistryError if it is unknown.
    """
    found = ledger.version(agent_id, version)
    standing = ledger.standing(agent_id)
    then = compared_with(found, by_place(ledger.versions(agent_id)))
    entries = [e for e in standing.history if version in (e.version, e.previous_version)]
    return {
        "agent_id": agent_id,
        "version": version,
        "label": found.label,
        "standing": _standing(found, standing),
        "created_at": found.created_at.isoformat(),
        "path": str(found.path),
        "report": _report(found),
        "mlflow": {"version": found.mlflow_version, "run_id": found.mlflow_run_id},
        "lineage": dict(found.lineage),
        "data": _data(ledger, found),
        "compared_with": None if then is None else then.version,  # the champion of that day
        "gate": dict(found.gate) if found.gate is not None else None,
        "phrases": _phrases(found),
        "ledger": [_entry(e) for e in entries],
        "experiments": [
            _tried(e)
            for e in ExperimentBook(ledger.database).history(agent_id)
            if e.challenger == version
        ],
        "files": dict(found.files),
    }


def to_text(explanation: dict[str, Any]) -> str:
    """Return an explanation as text, the most asked first."""
    e = explanation
    lines = [
        f"{e['agent_id']} version {e['version']} ({e['label']}): {', '.join(e['standing'])}",
        f"registered {e['created_at'][:19]} UTC, files in {e['path']}",
    ]
    if e["mlflow"]["version"]:
        lines.append(f"MLflow version {e['mlflow']['version']}, run {e['mlflow']['run_id'] or '–'}")
    if e["report"]:
        lines.append(f"report {e['report']}, in MLflow as {PAGE}")
    lines += ["", "Ledger"]
    lines += [
        f"  {x['entry']:>3}  {x['created_at'][:19]}  {x['action']:<8} {_arrow(x)}  "
        f"by {x['actor']}: {x['reason']}"
        for x in e["ledger"]
    ] or ["  no entry: it never was champion"]
    if e["experiments"]:
        lines += ["", "Experiments"]
        lines += [
            f"  {x['started_at'][:19]}  beside version {x['champion']}, {percent(x['share'])} "
            "of the people  "
            f"{x['state'].replace('_', ' ')}{': ' if x['reason'] else ''}{x['reason']}"
            for x in e["experiments"]
        ]
    lines += ["", "Gate"]
    if e["gate"] is None:
        lines.append("  not judged")
    else:
        failed = [r["rule"] for r in e["gate"]["results"] if r["verdict"] == "fail"]
        said = "passed" if e["gate"]["passed"] else f"refused by {', '.join(failed)}"
        beside = e["compared_with"]
        lines.append(f"  {said}{'' if beside is None else f', compared with version {beside}'}")
        results = e["gate"]["results"]
        width = max((len(r["rule"]) for r in results), default=0)
        lines += [f"  {r['verdict']:<5} {r['rule']:<{width}} {r['words']}" for r in results]
    if e["phrases"]:
        against = e["phrases"][0]["against"]
        lines += ["", f"Words in its answers, after so many of the {against}'s had them"]
        lines += [f"  {x['other']:>4} → {x['candidate']:>4}  {x['words']}" for x in e["phrases"]]
    lines += ["", "Lineage", *_tree(_in_short(e["lineage"]))]
    attempts = {
        f"attempt {x['attempt']}": f"{x['state']}, asked by {x['asked_by']} "
        f"{x['created_at'][:19]}, run {x['holder']}, claim {x['token']}"
        f"{': ' if x['reason'] else ''}{x['reason'] or ''}"
        for x in e["data"].get("attempts", ())
    }
    data = {key: value for key, value in e["data"].items() if key != "taken_back" or value}
    lines += ["", "Data", *_tree({**data, "attempts": attempts or "none"})]
    if "recipe" in e["lineage"]:
        lines += ["", f"Recipe {e['lineage']['recipe']['recipe']}, where it is unlike the defaults"]
        lines += _tree(unlike_defaults(e["lineage"]["recipe"]))
        lines += ["  (--json has the whole recipe, and the hash of every file)"]
    lines += ["", "Files", *(f"  {digest}  {name}" for name, digest in e["files"].items())]
    return "\n".join(lines) + "\n"


def _standing(version: ModelVersion, standing: Standing) -> list[str]:
    gone = standing.withdrawn.get(version.version, "").removeprefix("was ")
    found = [gone if name == "withdrawn" else name for name in standing.roles(version.version)]
    if version.gate is not None and not version.passed_gate:
        found.append("refused by the gate")
    return found or ["registered"]


def _report(version: ModelVersion) -> str | None:
    """Return the page of its comparison: beside the model, in the folder of the turn it is from."""
    page = version.work / PAGE
    return str(page) if page.exists() else None


def _phrases(version: ModelVersion) -> list[dict[str, str]]:
    """Return what it said more often than the champion, or less; no report, nothing."""
    report = comparison_of(version)
    if report is None:
        return []
    return [row for row in report.phrase_table() if row["against"] == report.others[-1]]


def _data(ledger: PromotionLedger, version: ModelVersion) -> dict[str, Any]:
    """Return the snapshot it was trained from, what of it is gone, every attempt to train on it."""
    if version.fingerprint is None:
        return {"fingerprint": None}
    s, c = snapshots.c, claims.c
    with ledger.database.read() as connection:
        snapshot = connection.execute(
            sa.select(s.watermark, s.rows, s.sha256, s.created_at).where(
                s.agent_id == version.agent_id, s.fingerprint == version.fingerprint
            )
        ).one_or_none()
        attempts = connection.execute(
            sa.select(c.token, c.attempt, c.state, c.holder, c.asked_by, c.created_at, c.reason)
            .where(c.agent_id == version.agent_id, c.fingerprint == version.fingerprint)
            .order_by(c.token)
        ).all()
    store = FeedbackStore(ledger.database)
    return {
        "fingerprint": version.fingerprint,
        "snapshot": _plain(snapshot) if snapshot else None,
        "erased_rows": erased_rows(ledger.database, version.agent_id, version.fingerprint),
        "taken_back": (
            store.withdrawn_by_origin(version.agent_id, snapshot.watermark) if snapshot else {}
        ),
        "attempts": [_plain(attempt) for attempt in attempts],
    }


def _plain(row: Any) -> dict[str, Any]:
    return {k: v.isoformat() if hasattr(v, "isoformat") else v for k, v in row._mapping.items()}


def _entry(entry: Promotion) -> dict[str, Any]:
    return {
        "entry": entry.entry,
        "action": entry.action,
        "version": entry.version,
        "previous_version": entry.previous_version,
        "token": entry.token,
        "actor": entry.actor,
        "reason": entry.reason,
        "created_at": entry.created_at.isoformat(),
    }


def _tried(experiment: Experiment) -> dict[str, Any]:
    return {
        "champion": experiment.champion,
        "state": experiment.state,
        "reason": experiment.reason,
        "share": experiment.share,
        "started_at": experiment.started_at.isoformat(),
        "ended_at": experiment.ended_at.isoformat() if experiment.ended_at else None,
    }


def _arrow(entry: dict[str, Any]) -> str:
    before = entry["previous_version"]
    return f"{'–' if before is None else before} → {entry['version']}"


def _in_short(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lineage without its recipe, and of files with hashes the names alone."""
    told = {key: value for key, value in lineage.items() if key != "recipe"}
    return told | {key: ", ".join(told[key]) for key in ("data", "reward_models") if told.get(key)}


def _tree(value: Any, indent: int = 2) -> list[str]:
    """Return nested values as indented lines."""
    if not isinstance(value, dict) or not value:
        return [" " * indent + (value if isinstance(value, str) else json.dumps(value))]
    lines = []
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            lines += [" " * indent + f"{key}:", *_tree(inner, indent + 2)]
        else:
            shown = inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)
            shown = f"{inner:.4g}" if isinstance(inner, float) else shown
            lines.append(" " * indent + f"{key}: {shown}")
    return lines
