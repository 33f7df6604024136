"""The trained models: version 0, the three reward models, and the policy PPO improves."""

from pathlib import Path

import dagster as dg

from assets.common import GPU, RESUME, Materialized, agents, plots, table
from assets.reward_tables import beside, groups_of, influence_of, worst_of
from resources.compute import Compute
from resources.pipeline import Pipeline
from rlhf_pipeline.feedback.datasets import JOBS
from rlhf_pipeline.files import read_json
from rlhf_pipeline.reward import WORST
from rlhf_pipeline.reward.calibration import beyond_chance, by_length, highest_floor, judged_by


@dg.asset(
    partitions_def=agents,
    pool=GPU,
    retry_policy=RESUME,
    group_name="training",
    deps=["sft_examples"],
    kinds={"pytorch", "trl"},
)
def sft_policy(
    context: dg.AssetExecutionContext, pipeline: Pipeline, compute: Compute
) -> Materialized:
    """Version 0: the fixed baseline every later version is measured against, and first champion."""
    pipeline.begin_bootstrap_if_alone(context)
    with pipeline.turn(context) as turn:
        if turn.baseline is not None:
            with pipeline.tracked(turn):  # what an attempt that died after registering left open
                pipeline.registry.reconcile(turn.agent_id)
            pipeline.finish_bootstrap(turn)
            return dg.MaterializeResult(
                metadata={
                    "path": dg.MetadataValue.path(str(turn.baseline)),
                    "trained": "earlier; the baseline is fixed until a person resets it",
                }
            )
        result = compute.run_stage(context, "baseline", turn)
        with pipeline.tracked(turn) as run:
            for step, loss in result["loss_curve"]:
                run.log_metrics({"sft/loss": loss}, step=step)
            version = pipeline.registry.register_baseline(
                turn.agent_id,
                Path(result["path"]),
                label=f"v{pipeline.rows(turn)}",
                lineage={
                    **pipeline.lineage(turn, examples=result["examples"]),
                    **result.get("base", {}),
                },
                actor="sft_policy",
                fingerprint=turn.fingerprint,
                token=turn.token,
                run_id=run.run_id,
            )
        pipeline.finish_bootstrap(turn)
    return dg.MaterializeResult(
        metadata={
            "version": version.version,
            "path": dg.MetadataValue.path(str(version.path)),
            "examples": result["examples"],
            "parameters": result["parameters"],
            "final loss": result["loss_curve"][-1][1],
            "seconds": result["seconds"],
        }
    )


@dg.asset(
    partitions_def=agents,
    pool=GPU,
    retry_policy=RESUME,
    group_name="training",
    deps=["preference_pairs", "reward_examples", sft_policy],
    kinds={"pytorch"},
    check_specs=[
        dg.AssetCheckSpec("ranks_better_than_length", asset="reward_model"),
        dg.AssetCheckSpec("is_calibrated", asset="reward_model"),
    ],
)
def reward_model(
    context: dg.AssetExecutionContext, pipeline: Pipeline, compute: Compute
) -> Materialized:
    """Three models on disjoint raters: proxy (maximised), stopping (chooses), gate (judges)."""
    with pipeline.turn(context) as turn:
        reports = compute.run_stage(context, "reward", turn)
        images = [
            path for job in JOBS for path in sorted((turn.work / "reward" / job).glob("*.png"))
        ]
        with pipeline.tracked(turn) as run:
            for job in JOBS:
                for step, loss in reports[job]["loss_curve"]:
                    run.log_metrics({f"reward/{job}/loss": loss}, step=step)
                numbers = ("accuracy", "n", "ece", "temperature", "pairs")
                run.log_metrics({f"reward/{job}/{n}": float(reports[job][n]) for n in numbers})
                run.log_metrics({f"reward/{job}/{n}": v for n, v in beside(reports[job]).items()})
                run.log_json(f"reward/{job}/report.json", reports[job])
            for path in images:
                run.log_file(path, f"reward/{path.parent.name}")
    rows = [
        {
            "model": job,
            "accuracy": round(reports[job]["accuracy"], 4),
            "low": round(reports[job]["interval"][0], 4),
            "high": round(reports[job]["interval"][1], 4),
            "held-out pairs": reports[job]["n"],
            "pairs are of": "answers to one prompt"
            if judged_by(reports[job]) == "pairs"
            else "votes on single answers",
            "length alone": "{}: {:.4f}".format(*by_length(reports[job]["floors"])),
            "random": reports[job]["floors"]["random"],
            "training pairs": reports[job]["pairs"],
            "votes": reports[job].get("votes", reports[job]["pairs"]),  # as of earlier releases
            "ECE": round(reports[job]["ece"], 4),
            "raters": reports[job]["raters"],
            "doubted": reports[job]["doubted"],
            "turned": reports[job].get("turned", 0),
            "heads": reports[job]["heads"],
            "trunk": reports[job].get("undone")
            or ("frozen" if reports[job]["freeze_trunk"] else "trained"),
            "began with": reports[job].get("reused_from")
            or reports[job].get("began_with")
            or ": ".join(["base", *filter(None, [reports[job].get("why_cold")])]),
            "disagreement": round(reports[job]["disagreement"], 4),
        }
        for job in JOBS
    ]
    worst = min(reports.values(), key=lambda r: r["accuracy"] - highest_floor(r["floors"]))
    words = turn.work / "reward" / "proxy" / WORST  # not of given models, or an earlier release's
    miscalibrated = max(beyond_chance(report) for report in reports.values())
    return dg.MaterializeResult(
        metadata={
            "accuracy": round(reports["proxy"]["accuracy"], 4),
            "held-out accuracy": table(rows),
            "held-out accuracy by group": table(groups_of(reports)),
            "influence of parts of the raters": influence_of(reports["proxy"]),
            "worst disagreements": table(worst_of(reports["proxy"])),
            **({"their words": dg.MetadataValue.path(str(words))} if words.exists() else {}),
            **plots([p for p in images if p.parent.name == "proxy"]),
        },
        check_results=[
            dg.AssetCheckResult(
                check_name="ranks_better_than_length",
                passed=worst["interval"][0] > highest_floor(worst["floors"]),
                severity=dg.AssetCheckSeverity.WARN,  # the gate has the last word
                metadata={"accuracy": worst["accuracy"], "floor": highest_floor(worst["floors"])},
            ),
            dg.AssetCheckResult(
                check_name="is_calibrated",
                passed=miscalibrated <= 0.05,  # as the gate has it
                severity=dg.AssetCheckSeverity.WARN,
                metadata={
                    "worst ECE": max(report["ece"] for report in reports.values()),
                    "worst beyond chance": miscalibrated,
                },
            ),
        ],
    )


@dg.asset(
    partitions_def=agents,
    pool=GPU,
    retry_policy=RESUME,
    group_name="training",
    deps=[reward_model, sft_policy],
    kinds={"pytorch"},
    check_specs=[dg.AssetCheckSpec("training_is_healthy", asset="ppo_policy")],
)
def ppo_policy(
    context: dg.AssetExecutionContext, pipeline: Pipeline, compute: Compute
) -> Materialized:
    """The candidate: the champion after PPO against the proxy, at its best checkpoint."""
    with pipeline.turn(context) as turn:
        outcome = compute.run_stage(context, "ppo", turn)
        result = read_json(Path(outcome["result"]))
        images = [turn.work / "ppo" / name for name in result["plots"]]
        shown = [sample for look in result["evaluations"] for sample in look["samples"]]
        chosen = next(
            look for look in result["evaluations"] if look["update"] == result["chosen_update"]
        )
        with pipeline.tracked(turn) as run:
            for update, metrics in enumerate(result["history"], 1):
                run.log_metrics({f"ppo/{name}": v for name, v in metrics.items()}, step=update)
            for path in images:
                run.log_file(path, "ppo")
            run.log_json("ppo/result.json", result)
            if shown:
                run.log_table("ppo/samples.json", shown)
    return dg.MaterializeResult(
        metadata={
            "path": dg.MetadataValue.path(outcome["path"]),
            "updates": len(result["reward_history"]),
            "chosen update": result["chosen_update"],
            "stopped because": result["stopped_because"],
            "score": round(result["final_reward_mean"], 4),
            "KL, nats per completion": round(chosen["kl"], 4),
            "samples of the chosen update": table(chosen["samples"]),
            **plots(images),
        },
        check_results=[
            dg.AssetCheckResult(
                check_name="training_is_healthy",
                passed=not result["alarms"],
                severity=dg.AssetCheckSeverity.WARN,
                metadata={"alarms": dg.MetadataValue.json(result["alarms"])},
            )
        ],
    )
