"""What one system says more often than another: the words that training has put into its mouth.

Numbers say that a candidate is better; these say what it does differently, and so show a person
what the reward has a weakness for. Of the prompts to which one of the two alone answers with a
phrase (of up to LONGEST words),

    z = (gained - lost) / sqrt(gained + lost)      (McNemar 1947, doi:10.1007/BF02295996)

A phrase tells something from Z on: by chance one in 30,000 does. Turns of one conversation are no
independent tries: below the line stands the sum of (gained - lost)^2 of each conversation, which of
one turn each is the same (Durkalski et al. 2003, doi:10.1002/sim.1438, where all are of one size).

What this does not see: what is said in other words each time, what few answers say, and parts of
what is written without blanks between words.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_pipeline.evaluation.metrics import Groups, ngrams, words

LONGEST = 5  # words
Z = 4.0  # sixteen conversations of one prompt each, where the other never says it
MOST = 8  # phrases in each direction
AS_GOOD = 0.8  # of the prompts that a word gains: a longer phrase that gains as many stands for it

Gram = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words, and the shares of both systems' answers that have them."""

    words: str
    here: float
    other: float


def telling_phrases(
    here: Sequence[str], other: Sequence[str], *, groups: Groups | None = None
) -> list[Phrase]:
    """Return what is surely said more often `here` than by the other, then what less often.

    Of each the most telling first, MOST at most, no two of one wording. Texts are answers to the
    same prompts, aligned; `groups` (n,) tells which conversation each is of. Without it each is of
    its own.
    """
    places = range(len(here)) if groups is None else groups.tolist()
    more, less = _gained(here, other, places), _gained(other, here, places)
    return [*more, *(Phrase(phrase.words, phrase.other, phrase.here) for phrase in less)]


def _gained(here: Sequence[str], other: Sequence[str], places: Sequence[int]) -> list[Phrase]:
    said: Counter[Gram] = Counter()
    gained: dict[int, Counter[Gram]] = defaultdict(Counter)  # prompts, by conversation
    for place, text, beside in zip(places, here, other, strict=True):
        mine, theirs = _grams(text), _grams(beside)
        said.update(mine)
        gained[place].update(mine - theirs)
        gained[place].subtract(theirs - mine)
    net: Counter[Gram] = Counter()
    squares: Counter[Gram] = Counter()
    for own in gained.values():
        net.update(own)
        squares.update({gram: prompts**2 for gram, prompts in own.items()})
    z = {gram: net[gram] / math.sqrt(n) for gram, n in squares.items() if n}
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
