from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlhf_pipeline.evaluation.groups import group_facts, judge_by_group, judge_by_voted_groups
from rlhf_pipeline.feedback.datasets import cohort_of
from rlhf_pipeline.records import EvaluationPrompt, PreferencePair, RewardInput, user_prompt

TEA = user_prompt("tea?")


def pairs(n: int, origin: str, chosen: str, question: str = "tea?") -> list[PreferencePair]:
    asked = user_prompt(question)
    return [
        PreferencePair(f"{origin}{i}", asked, chosen, "plain", "ann", origin, "evaluation")
        for i in range(n)
    ]


def longer(items: Sequence[RewardInput]) -> list[float]:
    return [float(len(item.completion)) for item in items]


def test_the_judge_is_held_against_each_topic_and_cohort() -> None:
    prompts = [EvaluationPrompt("p", TEA, topic="drinks"), EvaluationPrompt("q", user_prompt("?"))]
    told = [
        *pairs(40, "chat", "a longer one"),
        *pairs(10, "chat", "one"),
        *pairs(30, "in/votes.jsonl", "one", "soup?"),  # who like it short
        *pairs(29, "few", "a longer one", "soup?"),
    ]
    tie = PreferencePair("t", TEA, "a", "b", "ann", "chat", "evaluation", tie=True)
    seen = PreferencePair("s", TEA, "a", "b", "ann", "chat", "train")
    found = judge_by_group(longer, [*told, tie, seen], prompts)
    assert {group: (number.n, number.value) for group, number in found.items()} == {
        "cohort chat": (50, 0.8),
        "cohort votes.jsonl": (30, 0.0),
        "topic drinks": (50, 0.8),
    }
    facts = group_facts(found)
    assert facts["reward/worst_group_high"] == pytest.approx(0.1135, abs=1e-4)  # Wilson, 0 of 30
    assert group_facts({}) == {}
    assert judge_by_group(longer, [tie, seen], prompts) == {}


def test_a_cohort_is_where_votes_came_in() -> None:
    assert [cohort_of(origin) for origin in ("api", "/in/box/a.jsonl", "/", "x" * 99)] == [
        "api",
        "a.jsonl",
        "/",
        "x" * 80,
    ]


def test_where_votes_judge_their_groups_are_the_reports() -> None:
    many = {"share": 0.4, "low": 0.3, "high": 0.48, "n": 60}
    few = {**many, "high": 0.1, "n": 59}
    findings = {"by_topic": {"drinks": many, "soup": few}, "by_cohort": {"chat": {**many, "n": 99}}}
    found = judge_by_voted_groups({"judged_by": "votes", "findings": findings})
    assert {group: (number.value, number.n) for group, number in found.items()} == {
        "cohort chat": (0.4, 99),
        "topic drinks": (0.4, 60),
    }
    assert group_facts(found) == {"reward/worst_group_high": 0.48}
    assert judge_by_voted_groups({"judged_by": "pairs", "findings": findings}) == {}
    assert judge_by_voted_groups({"judged_by": "votes", "findings": None}) == {}
