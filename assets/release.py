"""From candidate to champion: the comparison, the gate, the registry, the promotion."""

from pathlib import Path

import dagster as dg

from assets.common import GPU, RESUME, Materialized, agents, plots
from resources.compute import Compute
from resources.pipeline import Pipeline, as_maximised
from rlhf_pipeline.evaluation.gate import GateDecision
from rlhf_pipeline.evaluation.report import EvaluationReport
from rlhf_pipeline.files import read_json


@dg.asset(
    partitions_def=agents,
    pool=GPU,
    retry_policy=RESUME,
    group_name="release",
    deps=["ppo_policy", "evaluation_prompts", "feedback_profile"],  # whose drift the gate reads
    kinds={"pytorch"},
    check_specs=[dg.AssetCheckSpec("gate_lets_it_through", asset="evaluation_report")],
)
def evaluation_report(
    context: dg.AssetExecutionContext, pipeline: Pipeline, compute: Compute
) -> Materialized:
    """The candidate beside baseline and champion on held-out prompts, and the gate's verdict."""
    with pipeline.turn(context) as turn:
        outcome = compute.run_stage(context, "evaluation", as_maximised(turn))
        report = EvaluationReport.from_json(outcome["report"])
        decision = GateDecision.from_json(outcome["gate"])
        with pipeline.tracked(turn) as run:
            run.log_metrics({f"evaluation/{k}": v for k, v in report.metrics().items()})
            run.log_text("evaluation/report.md", outcome["markdown"])
            run.log_text("evaluation/gate.md", outcome["gate_markdown"])
            run.log_table("evaluation/comparison.json", report.table())
            if groups := report.group_table():
                run.log_table("evaluation/groups.json", groups)
            if phrases := report.phrase_table():
                run.log_table("evaluation/phrases.json", phrases)
            run.log_table("evaluation/gate.json", decision.to_json()["results"])
            run.log_file(Path(outcome["page"]), "evaluation")
            for path in outcome["plots"]:
                run.log_file(Path(path), "evaluation")
    return dg.MaterializeResult(
        metadata={
            "win rate over the baseline": round(report.win_rates["baseline"].value, 4),
            "gate": dg.MetadataValue.md(outcome["gate_markdown"]),
            "comparison": dg.MetadataValue.md(outcome["markdown"]),
            "page": dg.MetadataValue.path(outcome["page"]),
            **plots(outcome["plots"]),
        },
        check_results=[
            dg.AssetCheckResult(
                check_name="gate_lets_it_through",
                passed=decision.passed,
                # A refusal is a normal outcome: nobody is paged for it.
                severity=dg.AssetCheckSeverity.WARN,
                metadata={"reasons": dg.MetadataValue.json(list(decision.reasons))},
            )
        ],
    )


@dg.asset(partitions_def=agents, group_name="release", deps=[evaluation_report], kinds={"mlflow"})
def registered_model(context: dg.AssetExecutionContext, pipeline: Pipeline) -> Materialized:
    """The candidate as a version with its whole lineage, whatever the gate said."""
    with pipeline.turn(context) as turn, pipeline.tracked(turn) as run:
        outcome = read_json(turn.work / "evaluation.json")["result"]
        version = pipeline.registry.register(
            turn.agent_id,
            turn.work / "ppo" / "policy",
            label=f"v{pipeline.rows(turn)}",
            lineage=pipeline.lineage(turn),
            gate=outcome["gate"],
            fingerprint=turn.fingerprint,
            token=turn.token,
            run_id=run.run_id,
        )
    return dg.MaterializeResult(
        metadata={
            "version": version.version,
            "label": version.label,
            "gate": "passed" if version.passed_gate else "refused",
            "mlflow version": version.mlflow_version or "",
            "files": dg.MetadataValue.json(dict(version.files)),
        }
    )


@dg.asset(partitions_def=agents, group_name="release", deps=[registered_model], kinds={"mlflow"})
def promotion(context: dg.AssetExecutionContext, pipeline: Pipeline) -> Materialized:
    """Who is champion now, and why: promoted, waiting for a person, or refused."""
    with pipeline.turn(context) as turn:
        with pipeline.tracked(turn):  # what an attempt that failed here left as failed
            words = pipeline.promote_if_due(turn)
            pipeline.registry.reconcile(turn.agent_id)
        pipeline.registry.end_runs(turn.agent_id, turn.fingerprint, "FINISHED")
        # Last: a run that dies before it is found by its claim, and asked for again.
        pipeline.claims.finish(turn.token, "done", words)
        champion = pipeline.ledger.champion(turn.agent_id)
    return dg.MaterializeResult(
        metadata={
            "verdict": words,
            "champion": champion.version if champion else "none",
            "ledger": dg.MetadataValue.md(
                "\n".join(
                    f"- {p.created_at:%Y-%m-%d %H:%M} {p.action} version {p.version}: {p.reason}"
                    for p in pipeline.ledger.history(context.partition_key)
                )
            ),
        }
    )
