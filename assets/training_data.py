"""What training reads: pairs, reward examples, SFT examples and held-out prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from assets.common import Materialized, agents, table
from assets.feedback import VALIDATED, feedback_profile, validated_feedback
from resources.pipeline import Pipeline
from rlhf_pipeline import stages
from rlhf_pipeline.feedback import datasets, snapshot
from rlhf_pipeline.stages import Turn

DEPS = [validated_feedback, feedback_profile]


@dg.multi_asset(
    name="training_data",
    partitions_def=agents,
    specs=[
        dg.AssetSpec(name, description=words, deps=DEPS, group_name="data", kinds={"json"})
        for name, words in {
            "preference_pairs": "Two completions of one prompt, and which one a person preferred.",
            "reward_examples": "One completion, and what one person said about it alone.",
            "sft_examples": "Completions worth imitating.",
            "evaluation_prompts": "Prompts whose votes train nothing; seeds may have them.",
        }.items()
    ],
)
def training_data(
    context: dg.AssetExecutionContext, pipeline: Pipeline
) -> tuple[Materialized, Materialized, Materialized, Materialized]:
    """The validated votes as data sets; no prompt is in two splits."""
    with pipeline.turn(context) as turn:
        feedback = turn.settings.feedback
        every = stages.without_gold(turn, snapshot.read(turn.data / VALIDATED))
        per_rater, unsigned = feedback.max_per_rater, feedback.max_unsigned
        votes = datasets.newest(every, feedback.max_votes, per_rater=per_rater, unsigned=unsigned)
        if len(votes) < len(every):
            context.log.info(
                "the newest %d of %d votes train (feedback.max_votes)", len(votes), len(every)
            )
        capped, left_out = datasets.within_caps(votes, per_rater=per_rater, unsigned=unsigned)
        for whose, rows in left_out.items():
            setting = "max_per_rater" if whose == "signed" else "max_unsigned"
            context.log.warning(
                "%d votes (%s) are over feedback.%s (%s) and train nothing this turn; raise it if "
                "they should",
                rows,
                whose,
                setting,
                getattr(feedback, setting),
            )
        built = datasets.build(
            capped,
            evaluation_share=feedback.evaluation_share,
            min_rating=feedback.min_rating,
            max_samples=feedback.max_samples,
        )
        with pipeline.tracked(turn) as run:
            run.log_input(
                turn.fingerprint,
                turn.data / VALIDATED,
                {
                    "older": len(every) - len(votes),
                    "over_caps": len(votes) - len(capped),
                    "preference_pairs": len(built.preference_pairs),
                    "reward_examples": len(built.reward_examples),
                    "sft_examples": len(built.sft_examples),
                    "evaluation_prompts": len(built.evaluation_prompts),
                },
            )
        return (
            _kept(turn, "preference_pairs", stages.PAIRS, built.preference_pairs, left_out),
            _kept(turn, "reward_examples", stages.EXAMPLES, built.reward_examples, left_out),
            _kept(turn, "sft_examples", stages.SFT_EXAMPLES, built.sft_examples, left_out),
            _kept(turn, "evaluation_prompts", stages.PROMPTS, built.evaluation_prompts, left_out),
        )


def _kept(
    turn: Turn, asset: str, file: str, records: Sequence[Any], left_out: Mapping[str, int]
) -> Materialized:
    datasets.write_jsonl(turn.data / file, records)
    counts: dict[str, int] = {}
    for record in records:
        split = getattr(record, "split", "all")
        counts[split] = counts.get(split, 0) + 1
    return dg.MaterializeResult(
        asset_key=asset,
        metadata={
            "dagster/row_count": len(records),
            "by split": table([{"split": s, "rows": n} for s, n in counts.items()]),
            "votes over the caps": table([{"of": w, "votes": n} for w, n in left_out.items()]),
            "path": dg.MetadataValue.path(str(turn.data / file)),
        },
    )
