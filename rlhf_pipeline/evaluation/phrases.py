"""What one system says more often than another: the words that training has put into its mouth.

Numbers say that a candidate is better; these say what it does differently, and so show a person
what the reward has a weakness for. Of the prompts to which one of the two alone answers with a
phrase (of up to LONGEST words),

    z = (gained - lost) / sqrt(gained + lost)      (McNemar 1947, doi:10.1007/BF02295996)

A phrase tells something from Z on: by chance one in 30,000 does.

What this does not see: what is said in other words each time, what few answers say, and parts of
what is written without blanks between words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_pipeline.evaluation.metrics import ngrams, words

LONGEST = 5  # words
Z = 4.0  # sixteen prompts, where the other never says it
MOST = 8  # phrases in each direction
AS_GOOD = 0.8  # of the prompts that a word gains: a longer phrase that gains as many stands for it

Gram = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words, and the shares of both systems' answers that have them."""

    words: str
    here: float
    other: float


def telling_phrases(here: Sequence[str], other: Sequence[str]) -> list[Phrase]:
    """Return what is surely said more often `here` than by the other, then what less often.

    Of each the most telling first, MOST at most, no two of one wording. Texts are answers to the
    same prompts, aligned.
    """
    more, less = _gained(here, other), _gained(other, here)
    return [*more, *(Phrase(phrase.words, phrase.other, phrase.here) for phrase in less)]


def _gained(here: Sequence[str], other: Sequence[str]) -> list[Phrase]:
    said: Counter[Gram] = Counter()
    net: Counter[Gram] = Counter()
    apart: Counter[Gram] = Counter()  # prompts that have it from one of the two alone
    for text, beside in zip(here, other, strict=True):
        mine, theirs = _grams(text), _grams(beside)
        said.update(mine)
        net.update(mine - theirs)
        net.subtract(theirs - mine)
        apart.update(mine ^ theirs)
    z = {gram: net[gram] / math.sqrt(n) for gram, n in apart.items()}
    telling = sorted((g for g in z if z[g] >= Z), key=lambda g: (-z[g], -len(g), g))
    found: list[Gram] = []
    while telling and len(found) < MOST:
        first = telling[0]
        longer = (g for g in telling if first in _parts(g) and net[g] >= AS_GOOD * net[first])
        found.append(max(longer, key=lambda g: (len(g), net[g], g)))
        telling = [g for g in telling if not _alike(g, found[-1])]
    n = len(here)
    return [Phrase(" ".join(g), said[g] / n, (said[g] - net[g]) / n) for g in found]


def _grams(text: str) -> set[Gram]:
    told = words(text)
    return {gram for n in range(1, LONGEST + 1) for gram in ngrams(told, n)}


def _parts(gram: Gram) -> set[Gram]:
    return {part for n in range(1, len(gram) + 1) for part in ngrams(gram, n)}


def _alike(one: Gram, other: Gram) -> bool:
    """Say whether one is in the other, or both have two words in a row."""
    shared = _parts(one) & _parts(other)
    return one in shared or other in shared or any(len(part) > 1 for part in shared)
