"""Reward functions without a model: what a completion's own words say of it, each in [0, 1].

Higher is better in all of them. A word is a run of letters, digits and apostrophes, in small
letters. None of these is a reward to maximise alone: each has an easy optimum that nobody wants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import RewardFunction, RewardInput

WORD = re.compile(r"[\w']+")
SHORTEST, LONGEST = 5, 60  # words of a completion that is neither too short nor too long
REPEATED = 3  # words that count as a repetition when they come again


def words_of(text: str) -> list[str]:
    """Return the text's words in order, in small letters."""
    return WORD.findall(text.lower())


def distinct_share(text: str, n: int) -> float:
    """Return the share of different ones among the text's n-grams of words, in [0, 1].

    A text with fewer than n words has said nothing, and has 0.
    Source: arXiv:1510.03055 section 4.2, which counts over a corpus; here over one completion.
    """
    grams = _ngrams(words_of(text), n)
    return len(set(grams)) / len(grams) if grams else 0.0


def length_fit(text: str, shortest: int = SHORTEST, longest: int = LONGEST) -> float:
    """Return 1 within the window of words, and less the further outside: words per bound.

    n words of n < shortest have n / shortest; of n > longest have longest / n.
    """
    count = len(words_of(text))
    if count < shortest:
        return count / shortest
    return longest / count if count > longest else 1.0


def unrepeated_share(text: str) -> float:
    """Return the share of the text's trigrams that did not stand in it before, in [0, 1].

    Short of one trigram nothing can repeat, and it is 1: distinct-n is what marks silence down.
    """
    grams = _ngrams(words_of(text), REPEATED)
    return len(set(grams)) / len(grams) if grams else 1.0


def rouge_l(text: str, reference: str) -> float:
    """Return ROUGE-L's F1 of the text against the reference, in [0, 1]; without stemming.

    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", eq. 2 to 4, beta 1.
    """
    said, meant = words_of(text), words_of(reference)
    common = _longest_common_subsequence(said, meant)
    return 2 * common / (len(said) + len(meant)) if common else 0.0


def closest_reference(items: Sequence[RewardInput], /) -> list[float]:
    """Return each item's ROUGE-L against the reference it is nearest to.

    Raises ModelError for an item without a reference: 0 would say that it was compared and failed.
    """
    for i, item in enumerate(items):
        if not item.references:
            raise ModelError(
                f"the reward rouge-l needs a reference for every item, found none for item {i}; "
                "give references or leave rouge-l out"
            )
    return [max(rouge_l(item.completion, r) for r in item.references) for item in items]


def _by_text(rule: Callable[[str], float]) -> RewardFunction:
    def reward(items: Sequence[RewardInput], /) -> list[float]:
        return [rule(item.completion) for item in items]

    return reward


RULES: Mapping[str, RewardFunction] = {
    "distinct-1": _by_text(lambda text: distinct_share(text, 1)),
    "distinct-2": _by_text(lambda text: distinct_share(text, 2)),
    "length": _by_text(length_fit),
    "repetition": _by_text(unrepeated_share),
    "rouge-l": closest_reference,
}
"""Every rule by the name a person asks for it with."""


def _ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def _longest_common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Return its length, by dynamic programming over one row."""
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for j, candidate in enumerate(other, 1):
            above = row[j]
            row[j] = diagonal + 1 if word == candidate else max(above, row[j - 1])
            diagonal = above
    return row[-1]
