"""The arithmetic of a comparison: text statistics, win rates, intervals. numpy only, seeded.

Words are runs of letters and digits, and single other signs; in scripts without spaces a run is a
whole phrase, so compare such texts with each other only. Two-sided intervals hold 95 %.

Turns of one conversation are no independent tries: `groups` (n,) tells which conversation each
value is of, numbered in the order of their first, and intervals are then among conversations.
Without it each value is a try of its own.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_pipeline.errors import EvaluationError

Floats = NDArray[np.float64]
Groups = NDArray[np.int64]  # (n,)

CONFIDENCE = 0.95
Z = 1.959963984540054  # the standard normal's 97.5 % point
TIE = 1e-6  # scores this close are a tie: equal texts differ by rounding between batches
REPETITION_FLOOR = 0.02  # below this, twice as much repetition still is next to none
BARS = 31  # of a histogram; odd, so that the middle lies within one
INTERCEPT_LIMIT = 8.0  # log-odds; keeps a clean sweep finite (win rate 0.9997)


@dataclass(frozen=True, slots=True)
class Number:
    """A measured value, its 95 % interval where there is one, and how many it is made from."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 0


def words(text: str) -> list[str]:
    """Return a text's words, lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def distinct(texts: Sequence[str], n: int) -> float:
    """Return distinct n-grams over all n-grams of the texts together, in [0, 1]; 0 if none.

    Source: Li et al., arXiv:1510.03055 (distinct-1, distinct-2), with n-grams rather than tokens
    below the line. It falls as a corpus grows: compare equal numbers of texts.
    """
    grams = [gram for text in texts for gram in ngrams(words(text), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def distinct_with_interval(texts: Sequence[str], n: int, *, groups: Groups | None = None) -> Number:
    """Return distinct-n with its jackknife interval; none from fewer than two groups.

    Not by bootstrap: a text drawn twice says everything twice, and every resampled corpus is less
    diverse than the one that was written. Leaving out one group at a time does not do that.
    Source: Tukey 1958; of counts of different kinds, Heltshe & Forrester 1983,
    doi:10.2307/2530802; of groups, Wolter 2007, Introduction to Variance Estimation, chapter 4.
    """
    without_each = _distinct_without_each(texts, n, groups)
    found = _jackknife(distinct(texts, n), without_each, len(texts))
    if found.low is None or found.high is None:
        return found
    return Number(found.value, max(0.0, found.low), min(1.0, found.high), found.n)


def distinct_difference(
    texts: Sequence[str], other: Sequence[str], n: int, *, groups: Groups | None = None
) -> Number:
    """Return distinct-n less that of another's texts on the same prompts, paired by prompt."""
    value = distinct(texts, n) - distinct(other, n)
    here, there = (_distinct_without_each(some, n, groups) for some in (texts, other))
    return _jackknife(value, here - there, len(texts))


def _distinct_without_each(texts: Sequence[str], n: int, groups: Groups | None = None) -> Floats:
    """Return distinct-n of all texts but one group's, for each group that is left out."""
    places = range(len(texts)) if groups is None else groups.tolist()
    of_group: dict[int, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for place, text in zip(places, texts, strict=True):
        of_group[place].update(ngrams(words(text), n))
    grams = of_group.values()
    everywhere: Counter[tuple[str, ...]] = Counter()
    for own in grams:
        everywhere.update(own)
    rest = [
        (
            len(everywhere) - sum(count == everywhere[gram] for gram, count in own.items()),
            everywhere.total() - own.total(),
        )
        for own in grams
    ]
    return np.array([different / said if said else 0.0 for different, said in rest])


def _jackknife(value: float, without_each: Floats, n: int) -> Number:
    many = len(without_each)
    if many < 2:
        return Number(value, n=n)
    reach = math.sqrt((many - 1) ** 2 / many * float(np.var(without_each, ddof=1))) * _student(many)
    return Number(value, value - reach, value + reach, n)


def repetition(text: str) -> float:
    """Return the share of a text's 4-grams that it had said before, in [0, 1]; 0 if too short.

    Source: seq-rep-n, Welleck et al., arXiv:1908.04319 (n = 4).
    """
    grams = ngrams(words(text), 4)
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def repetition_change(now: float, before: float) -> float:
    """Return how much more is repeated, relative to what was; either counts as 0.02 at least."""
    now, before = max(now, REPETITION_FLOOR), max(before, REPETITION_FLOOR)
    return (now - before) / before


def bleu(text: str, references: Sequence[str], n: int) -> float:
    """Return BLEU of one text against its references, n-grams up to n weighted alike, in [0, 1].

    Unsmoothed: 0 where no n-gram of some length is shared. Per text, so that a mean over prompts
    can be paired; a corpus's BLEU pools the counts instead.
    Source: Papineni et al. 2002, doi:10.3115/1073083.1073135, eq. 2 and 3.
    """
    said, meant = words(text), [words(reference) for reference in references]
    logs = 0.0
    for size in range(1, n + 1):
        grams = Counter(ngrams(said, size))
        most: Counter[tuple[str, ...]] = Counter()
        for reference in meant:
            most |= Counter(ngrams(reference, size))
        shared = (grams & most).total()
        if not shared:
            return 0.0
        logs += math.log(shared / grams.total()) / n
    closest = min((len(reference) for reference in meant), key=lambda r: (abs(r - len(said)), r))
    return math.exp(logs + min(0.0, 1 - closest / len(said)))


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


def outcomes(candidate: Floats, other: Floats) -> Floats:
    """Return 1 where the candidate scored higher, 0 where lower, 0.5 where they tie."""
    difference = candidate - other
    return np.where(np.abs(difference) <= TIE, 0.5, (difference > 0).astype(np.float64))


def win_rate(candidate: Floats, other: Floats, *, groups: Groups | None = None) -> Number:
    """Return the share of prompts the candidate wins, ties half, with the Wilson interval.

    Of groups, that of as many tries as they are worth.
    Source: the effective sample size of Korn and Graubard 1998, Survey Methodology 24, 193 to 201.
    """
    won = outcomes(candidate, other)
    rate, n = float(won.mean()), len(won)
    effect = 1.0
    if groups is not None:
        many = len(np.unique(groups))
        if many < 2:
            return Number(rate, n=n)
        # Where all are alike, that each group agrees with itself is all that is known.
        effect = n / many
        if np.ptp(won) > 0:
            effect = design_effect(won.tolist(), [(str(group),) for group in groups])
    return Number(rate, *wilson_interval(rate, n / effect), n)


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % interval of a share seen in n tries; never empty, also of none and of all.

    With ties counted half it is wider than it need be: ties vary less than wins and losses.
    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953.
    """
    if n == 0:
        raise EvaluationError("an interval needs at least one outcome, found none; add prompts")
    spread = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    centre, scale = share + Z * Z / (2 * n), 1 + Z * Z / n
    # At 0 and 1 the interval ends at the share itself, which rounding would miss by 1e-16.
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def bin_edges(values: Sequence[float]) -> list[float]:
    """Return the edges of a histogram's BARS bars; values that are a tie share one.

    numpy's own refuse a range that has no room for so many numbers between its ends.
    """
    low, high = min(values), max(values)
    if high - low <= TIE:
        low, high = low - 0.5, high + 0.5
    edges: list[float] = np.linspace(low, high, BARS + 1).tolist()
    return edges


def design_effect(values: Sequence[float], people: Sequence[Collection[str]]) -> float:
    """Return how much the variance of the values' mean grows by people's having several, 1 or more.

    Each value hangs on one person or on two, as when one's vote is set beside another's; values
    that share somebody go together. The variance is the jackknife's among G people, as who gave
    most pulls the mean to themselves: (G - 1) / G times the squares of how far it moves without
    each of them, by (their residuals' sum) / (n - how many are theirs). Of two people each, what
    was counted with either is taken off once. It is over that of as many values on their own,
    and times (t of the people / t of the values)^2, as a variance among few is not known but
    found; people count as (sum of what each gave)^2 / (sum of its squares), and as 5 at least: by
    t alone two would say less than one does. Whom every value hangs on can be held against nobody,
    so that the others count; 1 where these are none or one, and where each gave one value.
    Sources: Kish 1965, Survey Sampling, 8.2; the jackknife, CV3 of MacKinnon, Nielsen and Webb,
    arXiv:2301.04527; t, Korn and Graubard 1998 as in `win_rate`, who count each group as one; of
    two people each, Aronow, Samii and Assenova 2015, doi:10.1093/pan/mpv018, eq. 3, by residuals.
    """
    n, mean = len(values), sum(values) / len(values)
    of_one: dict[str, list[float]] = defaultdict(list)
    of_two: dict[frozenset[str], list[float]] = defaultdict(list)
    everywhere = frozenset(people[0]).intersection(*people)
    for value, all_of_it in zip(values, people, strict=True):
        who = frozenset(all_of_it) - everywhere
        for person in sorted(who):  # a set's order differs by process, and by it what sums come to
            of_one[person].append(value - mean)
        if len(who) == 2:
            of_two[who].append(value - mean)
    given, G = [len(own) for own in of_one.values()], len(of_one)
    squares = sum((value - mean) ** 2 for value in values)
    if G < 2 or max(given) == 1 or not squares:
        return 1.0
    together = _moved(of_one.values(), n) * (G - 1) / G - _moved(of_two.values(), n)
    alone = squares / (n * (n - 1))
    evenly = max(5.0, sum(given) ** 2 / sum(one**2 for one in given))
    return max(1.0, together / alone * (_student(evenly) / _student(n)) ** 2)


def _moved(residuals: Iterable[Sequence[float]], n: int) -> float:
    """Return the sum of squares of how far the mean of n values moves without some of them."""
    return sum((sum(own) / (n - len(own))) ** 2 for own in residuals if len(own) < n)


def length_controlled_win_rate(
    candidate: Floats,
    other: Floats,
    length_difference: Floats,
    *,
    bootstrap_samples: int,
    seed: int,
    groups: Groups | None = None,
) -> Number:
    """Return the win rate that is left at equal length, with a bootstrap interval.

    A logistic regression of the outcome (ties half) on tanh(length difference / its standard
    deviation); reported is its value at difference 0. The slope has a standard normal prior, so a
    few one-sided prompts cannot blame all on length; the intercept has none: with equal lengths
    this is the plain win rate. Where one side is always longer, difference 0 is an extrapolation.
    Source: Dubois et al., arXiv:2404.04475, without its terms for the instruction's difficulty.
    """
    won = outcomes(candidate, other)
    spread = float(np.std(length_difference))
    x = np.tanh(length_difference / spread) if spread > 0 else np.zeros(len(won))
    return bootstrap_statistic(
        lambda w: _win_rate_at_zero(w, won, x), len(won), bootstrap_samples, seed, groups
    )


def _win_rate_at_zero(weights: Floats, won: Floats, x: Floats) -> Floats:
    """Return sigmoid(intercept) of one logistic regression per row of weights (B, n), by Newton."""
    intercept = np.zeros(len(weights))
    slope = np.zeros(len(weights))
    for _ in range(50):
        chance = 1 / (1 + np.exp(-(intercept[:, None] + slope[:, None] * x)))
        residual = weights * (won - chance)
        variance = weights * chance * (1 - chance)
        gradient = np.stack([residual.sum(1), residual @ x - slope])
        a = variance.sum(1) + 1e-9
        b = variance @ x
        c = variance @ (x * x) + 1.0
        determinant = a * c - b * b
        step_intercept = (c * gradient[0] - b * gradient[1]) / determinant
        step_slope = (a * gradient[1] - b * gradient[0]) / determinant
        # Short steps: far out the curvature vanishes and a full Newton step overshoots.
        moved = intercept + np.clip(step_intercept, -2, 2)
        moved = np.clip(moved, -INTERCEPT_LIMIT, INTERCEPT_LIMIT)
        change = np.abs(moved - intercept).max() + np.abs(np.clip(step_slope, -2, 2)).max()
        intercept = moved
        slope = slope + np.clip(step_slope, -2, 2)
        if change < 1e-8:
            break
    rates: Floats = 1 / (1 + np.exp(-intercept))
    return rates


def bootstrap_mean(
    values: Floats, *, samples: int, seed: int, groups: Groups | None = None
) -> Number:
    """Return the mean with its percentile bootstrap interval; none from fewer than two groups.

    For a paired difference pass the differences: prompts are drawn, not answers.
    Source: Efron 1979, doi:10.1214/aos/1176344552.
    """
    return bootstrap_statistic(
        lambda w: (w @ values) / w.sum(1), len(values), samples, seed, groups
    )


def perplexity(
    logprob_sums: Floats,
    tokens: Floats,
    *,
    samples: int,
    seed: int,
    groups: Groups | None = None,
) -> Number:
    """Return exp(-mean log-probability per token) over all texts together, with its interval.

    `logprob_sums` (n,) are nats per text, `tokens` (n,) their lengths; texts of no tokens say
    nothing and are left out. Source: Jelinek et al. 1977, doi:10.1121/1.2016299.
    """
    known = tokens > 0
    if not known.any():
        raise EvaluationError(
            "perplexity needs at least one reference token, found none; give prompts references"
        )
    nats, lengths = -logprob_sums[known], tokens[known]
    return bootstrap_statistic(
        lambda w: np.exp((w @ nats) / (w @ lengths)), len(nats), samples, seed, _of(groups, known)
    )


def perplexity_difference(
    logprob_sums: Floats,
    other: Floats,
    tokens: Floats,
    *,
    samples: int,
    seed: int,
    groups: Groups | None = None,
) -> Number:
    """Return the perplexity less another's on the same texts, paired by text; see `perplexity`."""
    known = tokens > 0
    lengths, nats, theirs = tokens[known], -logprob_sums[known], -other[known]

    def difference(w: Floats) -> Floats:
        drawn = w @ lengths
        found: Floats = np.exp((w @ nats) / drawn) - np.exp((w @ theirs) / drawn)
        return found

    return bootstrap_statistic(difference, len(lengths), samples, seed, _of(groups, known))


def bootstrap_statistic(
    statistic: Callable[[Floats], Floats],
    n: int,
    samples: int,
    seed: int,
    groups: Groups | None,
) -> Number:
    """Return statistic(weights) on all n and its interval over resampled weights (B, n).

    The same groups, samples and seed draw the same prompts for every statistic. Whole groups are
    drawn, as Davison and Hinkley 1997, Bootstrap Methods and their Application, 3.8, have it.
    """
    if n == 0:
        raise EvaluationError("a mean needs at least one value, found none; add prompts")
    value = float(statistic(np.ones((1, n)))[0])
    place = np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]
    many = int(place.max()) + 1
    if many < 2:
        return Number(value, n=n)
    generator = np.random.default_rng(seed)
    drawn = []
    for first in range(0, samples, 500):  # bounded memory
        size = min(500, samples - first)
        counts = generator.multinomial(many, np.full(many, 1 / many), size=size)
        drawn.append(statistic(counts.astype(np.float64)[:, place]))
    low, high = _percentiles(np.concatenate(drawn), many)
    return Number(value, low, high, n)


def _of(groups: Groups | None, known: NDArray[np.bool_]) -> Groups | None:
    return None if groups is None else groups[known]


def _student(n: float) -> float:
    """Return how many deviations an interval reaches whose deviation is found from n tries."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, n - 1))


def _percentiles(drawn: Floats, n: int) -> tuple[float, float]:
    """Return the interval that resampled values of n tries tell, expanded for few of them.

    Resamples vary by n - 1 of n parts of what samples do, and the deviation is not known but found:
    of ten tries plain percentiles miss in one of ten. Source: Hesterberg 2015,
    doi:10.1080/00031305.2015.1089789, section 5.3.
    """
    from scipy.stats import norm

    reach = math.sqrt(n / (n - 1)) * _student(n)
    tail = 100 * float(norm.cdf(-reach))
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)
