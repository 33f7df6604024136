"""The training feedback nearest to a question: what a model may have learned an answer from.

Nearness is the cosine of TF-IDF vectors over words, weighed as scikit-learn's TfidfVectorizer does
by default: a word's count times ln((1 + texts) / (1 + texts with the word)) + 1. It knows words and
not meanings: a question put in other words is found far away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_pipeline.feedback.datasets import Job, job_of
from rlhf_pipeline.records import PreferencePair, Prompt, RewardExample
from rlhf_pipeline.reward.rules import words_of


@dataclass(frozen=True, slots=True)
class Near:
    """One vote that a reward model learned from, and how near it is."""

    feedback_id: str
    similarity: float  # of the questions, 0 to 1
    completion_similarity: float  # of the completions, 0 to 1; of a pair's, the nearer one
    learned_by: Job  # the reward model that read this vote
    question: str
    said: str  # what the vote says of `completion`, in words
    completion: str
    other: str | None  # the completion it was held against


def nearest(
    prompt: Prompt,
    completion: str,
    pairs: Sequence[PreferencePair],
    examples: Sequence[RewardExample],
    shares: Mapping[Job, float],
    *,
    count: int,
) -> list[Near]:
    """Return the `count` nearest of the votes that were trained on, the nearest question first.

    Equal questions are ordered by how near their completions are. `shares` are the parts of the
    voters that each reward model learned from.
    """
    every: list[PreferencePair | RewardExample] = [*pairs, *examples]
    votes = [vote for vote in every if vote.split == "train"]
    asked = similarities(_question(prompt), [_question(vote.prompt) for vote in votes])
    first = [_completions(vote)[0] for vote in votes]
    other = [_completions(vote)[1] or "" for vote in votes]
    written = similarities(completion, first + other)
    alike = [max(written[i], written[len(votes) + i]) for i in range(len(votes))]
    order = sorted(range(len(votes)), key=lambda i: (-asked[i], -alike[i], i))
    return [
        Near(
            feedback_id=_id(votes[i]),
            similarity=asked[i],
            completion_similarity=alike[i],
            learned_by=job_of(votes[i].voter, shares),
            question=_question(votes[i].prompt),
            said=said(votes[i]),
            completion=first[i],
            other=_completions(votes[i])[1],
        )
        for i in order[:count]
    ]


def similarities(text: str, others: Sequence[str]) -> list[float]:
    """Return the cosine of the text with each of the others, in [0, 1]; 0 without a common word.

    Words are weighed by how few of `others` have them.
    """
    counted = [Counter(words_of(other)) for other in others]
    texts_with = Counter(word for counts in counted for word in counts)

    def weighed(counts: Mapping[str, int]) -> dict[str, float]:
        return {
            word: n * (math.log((1 + len(others)) / (1 + texts_with[word])) + 1)
            for word, n in counts.items()
        }

    here = weighed(Counter(words_of(text)))
    found = []
    for counts in counted:
        there = weighed(counts)
        product = math.fsum(here[word] * weight for word, weight in there.items() if word in here)
        lengths = math.hypot(*here.values()) * math.hypot(*there.values())
        found.append(min(1.0, product / lengths) if lengths else 0.0)
    return found


def said(vote: PreferencePair | RewardExample) -> str:
    """Return what the vote says of its first completion, in words."""
    if isinstance(vote, PreferencePair):
        if vote.both_bad:
            return "as bad as"
        if vote.tie:
            return "as good as"
        return "written by a person over" if vote.corrected else "preferred over"
    if vote.kind == "thumbs":
        return "thumbs up" if vote.number else "thumbs down"
    if vote.kind == "criteria":
        return ", ".join(f"{name} {value:g}" for name, value in (vote.criteria or {}).items())
    return f"{vote.kind} {vote.number:g}"


def _completions(vote: PreferencePair | RewardExample) -> tuple[str, str | None]:
    if isinstance(vote, PreferencePair):
        return vote.chosen, vote.rejected
    return vote.completion, None


def _id(vote: PreferencePair | RewardExample) -> str:
    return vote.pair_id if isinstance(vote, PreferencePair) else vote.example_id


def _question(prompt: Prompt) -> str:
    return prompt[-1].content if prompt else ""
