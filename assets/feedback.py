"""From the store to validated votes: a frozen snapshot, its checks, its drift."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from assets.common import Materialized, agents, table
from resources.pipeline import Pipeline, agent_of
from rlhf_pipeline import stages
from rlhf_pipeline.evaluation.facts import DRIFT, DRIFT_PAGE, SUPPORT
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.support import SUPPORT_CHECKS
from rlhf_pipeline.feedback.validation import BLOCKING, CHECKS
from rlhf_pipeline.files import new_file, read_json, write_json

if TYPE_CHECKING:
    import pandas as pd

SNAPSHOT, VALIDATED = snapshot.FILE, snapshot.VALIDATED


class SnapshotConfig(dg.Config):
    """What to freeze."""

    watermark: int | None = None  # None: everything that is there now
    again: bool = False  # train once more from a fingerprint that was trained on


def _last_vote(pipeline: Pipeline, agent_id: str, wanted: int | None) -> int:
    """Return up to which vote a turn is to train: as wanted, and the agent's newest at most.

    From a number above it on, the votes yet to come would count as trained on; so would an erasure
    have it that took the newest while the run waited. 0 was wanted when there were none. Raises
    dg.Failure (no retry) where none of the agent's votes is so old.
    """
    newest = snapshot.newest_seq(pipeline.database, agent_id)
    if not wanted or newest == 0:  # without votes, taking the snapshot says so
        return newest
    oldest = snapshot.oldest_seq(pipeline.database, agent_id)
    if wanted < oldest:
        raise dg.Failure(
            f"watermark needed a number from {oldest} to {newest}, the first and the newest vote "
            f"of agent {agent_id!r}, found {wanted}; correct it, or leave it out to train from all "
            "that are there",
            allow_retries=False,
        )
    return min(wanted, newest)


@dg.asset(partitions_def=agents, group_name="feedback", kinds={"parquet"})
def feedback_snapshot(
    context: dg.AssetExecutionContext, config: SnapshotConfig, pipeline: Pipeline
) -> Materialized:
    """The effective votes up to a watermark, frozen; this run's claim on them begins here."""
    agent_id = agent_of(context)
    watermark = _last_vote(pipeline, agent_id, config.watermark)
    mark = snapshot.fingerprint(pipeline.database, agent_id, watermark)
    turn = pipeline.begin_turn(context, mark, watermark, again=config.again)
    with pipeline.turn(context):
        taken = snapshot.take(
            pipeline.database,
            agent_id,
            watermark,
            turn.data / SNAPSHOT,
            claimed=turn.fingerprint,
            redacts=turn.settings.feedback.redact,
            regions=turn.settings.feedback.phone_regions,
        )
    redacted = snapshot.redacted_in(taken.path) or {}
    return dg.MaterializeResult(
        data_version=dg.DataVersion(taken.fingerprint),
        metadata={
            "dagster/row_count": taken.rows,
            "fingerprint": taken.fingerprint,
            "watermark": watermark,
            "claim_token": turn.token,
            "votes by kind": table(
                [{"kind": k, "votes": n} for k, n in snapshot.kinds_in(taken.path).items()]
            ),
            "redacted": table([{"kind": k, "found": n} for k, n in redacted.items()]),
            "path": dg.MetadataValue.path(taken.path),
        },
    )


@dg.asset(
    partitions_def=agents,
    group_name="feedback",
    deps=[feedback_snapshot],
    kinds={"greatexpectations"},
    check_specs=[
        dg.AssetCheckSpec(name, asset="validated_feedback", blocking=name in BLOCKING)
        for name in (*CHECKS, *SUPPORT_CHECKS)
    ],
)
def validated_feedback(context: dg.AssetExecutionContext, pipeline: Pipeline) -> Materialized:
    """The snapshot's rows that keep every rule; the others are in quarantine, by rule."""
    from rlhf_pipeline.feedback.support import set_apart, support_of, support_to_json
    from rlhf_pipeline.feedback.validation import validate

    with pipeline.turn(context) as turn:
        limits = turn.settings.validation
        report = validate(
            snapshot.read(turn.data / SNAPSHOT),
            min_rows=limits.min_rows,
            max_prompt_characters=limits.max_prompt_characters,
            max_completion_characters=limits.max_completion_characters,
            takes_roles=stages.takes_roles(turn),
        )
        people = turn.settings.experiments.people_per_network
        support = support_of(report.clean, people_per_network=people)
        quarantines, most = limits.narrow_support == "quarantine", limits.top_raters_share
        report = set_apart(report, support, quarantines=quarantines, top_raters_share=most)
        with new_file(turn.data / VALIDATED) as half:
            report.clean.to_parquet(half, **snapshot.PACKED)
        told = support_to_json(support, report.clean)
        left_in = 0 if quarantines else len(support.associations)
        write_json(turn.data / SUPPORT, {**told, "left_in": left_in})
        aside = report.quarantine_rows()
        pipeline.store.release(turn.agent_id, turn.watermark, aside)
        pipeline.store.quarantine(aside)
    by_rule: dict[str, int] = {}
    for row in report.quarantined:
        by_rule[row.rule] = by_rule.get(row.rule, 0) + 1
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": len(report.clean),
            "quarantined": len(report.quarantined),
            "quarantined by rule": table([{"rule": r, "rows": n} for r, n in by_rule.items()]),
            "narrow n-grams": table([{"found": a.words()} for a in support.associations]),
            "narrow topics": table([dataclasses.asdict(topic) for topic in support.topics]),
            "agreement": table([{"on": on, **found} for on, found in told["agreement"].items()]),
            "raters who agree least": table(told["by_rater"][:10]),
        },
        check_results=[
            dg.AssetCheckResult(
                check_name=check.name,
                passed=check.passed,
                description=check.told,
                severity=(
                    dg.AssetCheckSeverity.ERROR if check.blocking else dg.AssetCheckSeverity.WARN
                ),
                metadata={
                    "unexpected": check.unexpected,
                    "total": check.total,
                    **{name: float(number) for name, number in check.numbers.items()},
                },
            )
            for check in report.checks
        ],
    )


@dg.asset(
    partitions_def=agents,
    group_name="feedback",
    deps=[validated_feedback],
    kinds={"evidently"},
    check_specs=[dg.AssetCheckSpec("feedback_is_stable", asset="feedback_profile")],
)
def feedback_profile(context: dg.AssetExecutionContext, pipeline: Pipeline) -> Materialized:
    """How the votes since the turn before differ from the newest that it was trained on
    (Evidently).
    """
    from rlhf_pipeline.feedback.drift import feedback_drift, newest_of

    with pipeline.turn(context) as turn:
        # Asked for `again`, a turn is beside the one before its first time, not beside itself.
        before = pipeline.claims.last_done(turn.agent_id, other_than=turn.fingerprint)
        folder = turn.data.parent / before.fingerprint[:16] if before else None
        if before is None or folder is None or not (folder / VALIDATED).exists():
            write_json(turn.data / DRIFT, {"drifted": False, "compared_with": None})
            return _stable({"compared with": "nothing: no votes of a turn before are there"})
        votes, trained_on = (snapshot.read(each / VALIDATED) for each in (turn.data, folder))
        new = votes[votes["seq"] > before.watermark]
        trained_on = newest_of(trained_on, len(new))
        earlier = _compared_with(folder)
        compared = {"compared_with": folder.name, "votes": len(new), "with_votes": len(trained_on)}
        sides: dict[str, str | int] = {
            "compared with": folder.name,
            "new votes": len(new),
            "its votes": len(trained_on),
        }
        if not len(new) or not len(trained_on):
            same = {"drifted": False, "psi": {}, "limits": {}, "features": []}
            write_json(turn.data / DRIFT, {**compared, **same})
            return _stable(sides)
        report = feedback_drift(
            new,
            trained_on,
            earlier=None if earlier is None else newest_of(earlier, len(new)),
            threshold_psi=turn.settings.drift.threshold_psi,
            html_path=turn.data / DRIFT_PAGE,
        )
        write_json(
            turn.data / DRIFT,
            {
                **compared,
                "drifted": report.drifted,
                "psi": report.psi,
                "limits": {name: f.threshold for name, f in report.features.items()},
                "features": [name for name, f in report.features.items() if f.drifted],
            },
        )
        with pipeline.tracked(turn) as run:
            run.log_file(turn.data / DRIFT_PAGE, "drift")
            run.log_metrics({f"drift/{name}": psi for name, psi in report.psi.items()})
    rows = [
        {
            "feature": name,
            "PSI": float(f.psi),
            "limit": float(f.threshold),
            "drifted": bool(f.drifted),
        }
        for name, f in report.features.items()
    ]
    return dg.MaterializeResult(
        metadata={
            **sides,
            "features": table(rows),
            "report": dg.MetadataValue.path(report.html_path),
        },
        check_results=[
            dg.AssetCheckResult(
                passed=not report.drifted,
                check_name="feedback_is_stable",
                severity=dg.AssetCheckSeverity.WARN,  # training goes on; automatic promotion waits
                metadata={name: float(psi) for name, psi in report.psi.items()},
            )
        ],
    )


def _compared_with(data: Path) -> "pd.DataFrame | None":
    """Return the votes that a turn's were compared with, where its had drifted and those are there.

    An erasure or a pruning may have taken either since.
    """
    drift = read_json(data / DRIFT) if (data / DRIFT).exists() else {}
    validated = data.parent / str(drift.get("compared_with")) / VALIDATED
    return snapshot.read(validated) if drift.get("drifted") and validated.exists() else None


def _stable(compared: dict[str, str | int]) -> Materialized:
    """Return the profile of a turn that has nothing to compare, or nothing to compare with."""
    return dg.MaterializeResult(
        metadata=compared,
        check_results=[dg.AssetCheckResult(passed=True, check_name="feedback_is_stable")],
    )
