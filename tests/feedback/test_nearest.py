from __future__ import annotations

import math

import pytest

from rlhf_pipeline.feedback.datasets import Job
from rlhf_pipeline.feedback.nearest import nearest, said, similarities
from rlhf_pipeline.records import (
    FeedbackKind,
    PreferencePair,
    RewardExample,
    Split,
    user_prompt,
)

SHARES: dict[Job, float] = {"proxy": 0.6, "stopping": 0.2, "gate": 0.2}


def pair(pair_id: str, question: str, chosen: str, split: Split = "train") -> PreferencePair:
    return PreferencePair(pair_id, user_prompt(question), chosen, "no", "ann", "test", split)


def rated(kind: FeedbackKind, number: float | None, **criteria: float) -> RewardExample:
    return RewardExample("e", user_prompt("q"), "c", kind, number, criteria, "bob", "train")


def test_similarity_is_the_cosine_of_tf_idf_weights() -> None:
    # Of three texts "lamp" stands in two and "red" in one: weights ln(4/3)+1 and ln(4/2)+1.
    common, rare = math.log(4 / 3) + 1, math.log(4 / 2) + 1
    found = similarities("red lamp lamp", ["lamp", "Red lamp!", "kettle"])
    here = math.hypot(rare, 2 * common)
    expected = [
        2 * common / here,
        (rare * rare + 2 * common * common) / (here * math.hypot(rare, common)),
        0.0,
    ]
    assert found == pytest.approx(expected)
    assert similarities("", ["lamp"]) == [0.0]
    assert similarities("lamp", []) == []


def test_the_same_question_comes_first_and_then_the_likest_completion() -> None:
    votes = [
        pair("far", "do you sell kettles", "yes"),
        pair("held out", "how much is the lamp", "ten euros", "evaluation"),
        pair("other words", "how much is the lamp", "it costs a fortune"),
        pair("same", "how much is the lamp", "ten euros"),
    ]
    found = nearest(user_prompt("How much is the lamp?"), "ten euros", votes, [], SHARES, count=3)
    assert [near.feedback_id for near in found] == ["same", "other words", "far"]
    assert found[0].similarity == pytest.approx(1)
    assert found[0].completion_similarity == pytest.approx(1)
    assert found[1].completion_similarity == 0
    assert {near.learned_by for near in found} <= set(SHARES)


@pytest.mark.parametrize(
    ("vote", "words"),
    [
        (pair("p", "q", "c"), "preferred over"),
        (rated(FeedbackKind.thumbs, 0), "thumbs down"),
        (rated(FeedbackKind.rating, 4), "rating 4"),
        (rated(FeedbackKind.score, 0.25), "score 0.25"),
        (rated(FeedbackKind.criteria, None, tone=0.5), "tone 0.5"),
    ],
)
def test_a_vote_is_told_in_words(vote: PreferencePair | RewardExample, words: str) -> None:
    assert said(vote) == words
