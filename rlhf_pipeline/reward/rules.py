"""Reward functions without a model: what a completion's own text says of it, each in [0, 1].

Higher is better in all of them. A word is a run of letters, digits and apostrophes, in small
letters. None of these is a reward to maximise alone: each has an easy optimum that nobody wants.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.evaluation.metrics import ngrams
from rlhf_pipeline.records import RewardFunction, RewardInput

WORD = re.compile(r"[\w']+")
# Where a sentence ends: a mark with space after it, or one that needs none, or a line.
ENDS = re.compile(r"(?<=[.!?…])\s+|[。！？।\n]+")
SHORTEST, LONGEST = 5, 60  # words of a completion that is neither too short nor too long
REPEATED = 3  # words that count as a repetition when they come again


def is_count(value: object) -> bool:
    """Say whether this is 1, 2, 3 or more: what an option that counts something may be."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def words_of(text: str) -> list[str]:
    """Return the text's words in order, in small letters."""
    return WORD.findall(text.lower())


def distinct_share(text: str, n: int) -> float:
    """Return the share of different ones among the text's n-grams of words, in [0, 1].

    A text with fewer than n words has said nothing, and has 0.
    Source: arXiv:1510.03055 section 4.2, which counts over a corpus; here over one completion.
    """
    grams = ngrams(words_of(text), n)
    return len(set(grams)) / len(grams) if grams else 0.0


def length_fit(text: str, shortest: int, longest: int) -> float:
    """Return 1 within the window of words, and less the further outside: words per bound.

    n words of n < shortest have n / shortest; of n > longest have longest / n.
    """
    count = len(words_of(text))
    if count < shortest:
        return count / shortest
    return longest / count if count > longest else 1.0


def unrepeated_share(text: str) -> float:
    """Return how little the text repeats itself, in [0, 1]: 1 where nothing stands in it twice.

    The share of its trigrams that did not stand in it before, or that of its words outside
    sentences said before, whichever is less: "my pleasure!" at both ends repeats no trigram.
    Of a text without words it is 1: distinct-n is what marks silence down.
    """
    sentences = [tuple(words_of(sentence)) for sentence in ENDS.split(text)]
    words = [*chain.from_iterable(sentences)]
    if not words:
        return 1.0
    grams = ngrams(words, REPEATED)
    new = len(set(grams)) / len(grams) if grams else 1.0
    return min(new, sum(map(len, set(sentences))) / len(words))


def rouge_l(text: str, reference: str) -> float:
    """Return ROUGE-L's F1 of the text against the reference, in [0, 1]; without stemming.

    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", eq. 2 to 4, beta 1.
    """
    said, meant = words_of(text), words_of(reference)
    common = _longest_common_subsequence(said, meant)
    return 2 * common / (len(said) + len(meant)) if common else 0.0


def closest_reference(items: Sequence[RewardInput], /) -> list[float]:
    """Return each item's ROUGE-L against the reference it is nearest to."""
    _need_references(items, "rouge-l")
    return [max(rouge_l(item.completion, r) for r in item.references) for item in items]


def bleu(items: Sequence[RewardInput], /) -> list[float]:
    """Return each item's BLEU against all of its references, in [0, 1].

    sacrebleu's sentence BLEU with its defaults (13a tokens, exponential smoothing), n-grams as far
    as the completion has them, over 100. Source: Papineni et al. 2002, doi:10.3115/1073083.1073135.
    """
    from sacrebleu.metrics import BLEU  # type: ignore[attr-defined]  # it exports without saying so

    _need_references(items, "bleu")
    measure = BLEU(effective_order=True)
    scores = [measure.sentence_score(i.completion, list(i.references)).score for i in items]
    return [min(score / 100, 1.0) for score in scores]


def _need_references(items: Sequence[RewardInput], name: str) -> None:
    """Raise ModelError for an item without: 0 would say that it was compared and failed."""
    for i, item in enumerate(items, 1):
        if not item.references:
            raise ModelError(
                f"the reward {name} needs a reference for every item, found none for item {i}; "
                f"give references or leave {name} out"
            )


def length_window(shortest: int = SHORTEST, longest: int = LONGEST) -> RewardFunction:
    """Return length_fit with these bounds as a reward."""
    if not 1 <= shortest <= longest:
        raise ModelError(
            "the reward length needs 1 <= shortest <= longest, in words, found "
            f"{shortest} and {longest}; correct them"
        )
    return _by_text(lambda text: length_fit(text, shortest, longest))


def format_fit(
    pattern: str | None = None, *, is_json: bool = False, max_lines: int | None = None
) -> RewardFunction:
    """Return a reward that is the share of the asked-for conditions a completion meets.

    `pattern` is a regular expression the whole completion must match, blank ends aside; is_json:
    it must parse as JSON; max_lines: it has so many lines at most. Raises ModelError for none.
    """
    conditions: list[Callable[[str], bool]] = []
    if pattern is not None:
        try:
            expression = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ModelError(
                f"the reward format needs a regular expression, found {pattern!r}: {error}; "
                "correct it"
            ) from error
        conditions.append(lambda text: expression.fullmatch(text) is not None)
    if is_json:
        conditions.append(_is_json)
    if max_lines is not None:
        if not is_count(max_lines):
            raise ModelError(
                f"the reward format needs max_lines of 1, 2, 3 or more, found {max_lines!r}; "
                "correct it"
            )
        conditions.append(lambda text: len(text.splitlines()) <= max_lines)
    if not conditions:
        raise ModelError(
            "the reward format needs a pattern, is_json or max_lines, found none; ask for one"
        )
    return _by_text(lambda text: sum(c(text.strip()) for c in conditions) / len(conditions))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _by_text(rule: Callable[[str], float]) -> RewardFunction:
    def reward(items: Sequence[RewardInput], /) -> list[float]:
        return [rule(item.completion) for item in items]

    return reward


RULES: Mapping[str, RewardFunction] = {
    "distinct-1": _by_text(lambda text: distinct_share(text, 1)),
    "distinct-2": _by_text(lambda text: distinct_share(text, 2)),
    "repetition": _by_text(unrepeated_share),
    "rouge-l": closest_reference,
    "bleu": bleu,
}
"""Every rule that takes no options, by the name a person asks for it with."""
NEED_REFERENCES = ("rouge-l", "bleu")


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
