"""How well the judge judges for each topic and each cohort of raters, on held-out votes.

A reward model may be right on the whole and wrong for the few: on a topic hardly anybody asked
about, or for people who came another way. A cohort is where a vote came in (a vote's origin).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pipeline.evaluation.metrics import Number
from rlhf_pipeline.feedback.datasets import cohort_of
from rlhf_pipeline.records import (
    EvaluationPrompt,
    PreferencePair,
    RewardFunction,
    RewardInput,
    prompt_to_json,
)
from rlhf_pipeline.reward.calibration import (
    HangsOn,
    accuracy_interval,
    hangs_on,
    judged_by,
    pair_accuracy,
)

FEWEST_OF_GROUP = 30  # pairs; fewer say nothing


def judge_by_group(
    judge: RewardFunction,
    pairs: Sequence[PreferencePair],
    prompts: Sequence[EvaluationPrompt],
) -> dict[str, Number]:
    """Return the judge's accuracy on the decided held-out pairs of each group, with its interval.

    A topic is the one its prompt was filed under, of `prompts`. Nothing of groups with few pairs.
    """
    topics = {prompt_to_json(p.prompt): p.topic for p in prompts if p.topic is not None}
    decided = [p for p in pairs if p.split == "evaluation" and p.decided]
    if not decided:
        return {}
    chosen = judge([RewardInput(pair.prompt, pair.chosen) for pair in decided])
    rejected = judge([RewardInput(pair.prompt, pair.rejected) for pair in decided])
    told: dict[str, list[tuple[float, HangsOn]]] = defaultdict(list)
    for pair, better, worse in zip(decided, chosen, rejected, strict=True):
        topic = topics.get(prompt_to_json(pair.prompt))
        groups = [f"cohort {cohort_of(pair.origin)}", *([f"topic {topic}"] if topic else [])]
        for group in groups:
            told[group].append((better - worse, hangs_on(pair)))
    return {
        group: _number(*map(list, zip(*of, strict=True)))
        for group, of in sorted(told.items())
        if len(of) >= FEWEST_OF_GROUP
    }


def _number(margins: Sequence[float], on: Sequence[HangsOn]) -> Number:
    return Number(pair_accuracy(margins), *accuracy_interval(margins, on), len(margins))


def judge_by_voted_groups(report: Mapping[str, Any]) -> dict[str, Number]:
    """Return the same of a judge whose report.json says that single votes judged it.

    How well it tells a group's good votes from its bad ones (reward/matched.py). Of as many votes
    as so many pairs have completions; nothing of a judge that pairs judged.
    """
    findings = report.get("findings")
    if findings is None or judged_by(report) == "pairs":
        return {}
    return {
        f"{of} {name}": Number(one["share"], one["low"], one["high"], one["n"])
        for of in ("cohort", "topic")
        for name, one in sorted(findings[f"by_{of}"].items())
        if one["n"] >= 2 * FEWEST_OF_GROUP
    }


def group_facts(judged: Mapping[str, Number]) -> dict[str, float]:
    """Return the upper bound of the judge's accuracy on the group it judges worst, for the gate."""
    bounds = [number.high for number in judged.values() if number.high is not None]
    return {"reward/worst_group_high": min(bounds)} if bounds else {}
