"""What held-out votes say of a reward model beside its accuracy: for whom, beside what, how wrong.

Shares come with 95 % intervals: Wilson's where pairs are counted (votes of one person count as if
they were of several), Hanley and McNeil's for votes on single completions.
What this does not tell: how good people's votes are. It holds the model against them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from rlhf_pipeline.feedback.agreement import agreement_of
from rlhf_pipeline.feedback.datasets import cohort_of, unit_interval
from rlhf_pipeline.records import FeedbackKind, PreferencePair, RewardExample, prompt_to_json
from rlhf_pipeline.reward.calibration import pair_accuracy, wilson_interval
from rlhf_pipeline.reward.logistic import logistic
from rlhf_pipeline.reward.raters import WIDEST
from rlhf_pipeline.reward.rules import words_of

FEWEST = 10  # pairs of a topic or a cohort, or votes on each side of a kind; fewer say nothing
ALIKE = 0.1  # two completions are of like length where they differ by this much of the longer one
WORST = 10  # pairs that are kept as examples
MOST_WORDS, WORDS_RIDGE = 300, 30.0  # of the bag of words, which is to cost no second
MOST_PAIRS = 2000  # that the bag of words learns from
CURVE = (1 / 8, 1 / 4, 1 / 2, 1.0)  # shares of the training pairs
CURVE_PAIRS = 1000  # training pairs at most, and half as many held-out ones
CURVE_RIDGE = 10.0
MOST_SINGLES = 400  # held-out votes of a kind that are scored
Z = 1.959964  # 95 %


@dataclass(frozen=True, slots=True)
class Measured:
    """A share in [0, 1], its 95 % interval, and of how many."""

    share: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a head reaches that was fitted to some of the training pairs."""

    pairs: int
    accuracy: Measured


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A held-out pair on which the model is surely of another opinion; no words of it."""

    pair_id: str
    margin: float  # below 0
    longer: bool  # the model prefers the longer completion
    cohort: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What held-out votes say of one reward model; what too few votes stand behind is left out."""

    by_topic: dict[str, Measured]
    # pairs by how they came about; of single votes see `tells_apart`, or where these judge the
    # accuracy of those that were matched
    by_kind: dict[str, Measured]
    by_cohort: dict[str, Measured]  # of raters: where their votes came in
    bag_of_words: Measured | None  # accuracy of a regression on the words, fitted to the same pairs
    annotators: Measured | None  # share of people who said the same of the same two completions
    length_matched: Measured | None  # accuracy on pairs of like length
    length_correlation: float | None  # of score and characters, by ranks, in [-1, 1]
    learning_curve: tuple[Learnt, ...]  # of a head on the trunk as it was before it was trained
    worst: tuple[Disagreement, ...]  # the worst first


def measured(margins: Sequence[float]) -> Measured:
    """Return the accuracy of these margins; needs one."""
    share = pair_accuracy(margins)
    return Measured(share, *wilson_interval(share, len(margins)), len(margins))


def by_group(margins: Sequence[float], groups: Iterable[str | None]) -> dict[str, Measured]:
    """Return each group's accuracy, by name; None is in no group, small groups are left out."""
    found: dict[str, list[float]] = defaultdict(list)
    for margin, group in zip(margins, groups, strict=True):
        if group is not None:
            found[group].append(margin)
    return {name: measured(of) for name, of in sorted(found.items()) if len(of) >= FEWEST}


def tells_apart(better: Sequence[float], worse: Sequence[float]) -> Measured:
    """Return how likely a completion judged well scores above one judged badly; ties count half.

    It is the area under the ROC curve, over prompts, as scores are one scale for all of them.
    Source of the interval: Hanley and McNeil 1982, doi:10.1148/radiology.143.1.7063747, eq. 1.
    """
    ranks = _ranks([*better, *worse])
    n, m = len(better), len(worse)
    area = (sum(ranks[:n]) - n * (n + 1) / 2) / (n * m)
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (n - 1) * (q1 - area**2) + (m - 1) * (q2 - area**2)
    reach = Z * math.sqrt(max(0.0, spread) / (n * m))
    return Measured(area, max(0.0, area - reach), min(1.0, area + reach), n + m)


def is_good(example: RewardExample) -> bool | None:
    """Return whether somebody judged the completion well; None: neither well nor badly."""
    if example.kind is FeedbackKind.criteria:
        number, middle = statistics.fmean((example.criteria or {"": 0.5}).values()), 0.5
    else:
        number = 0.5 if example.number is None else example.number
        middle = 3.0 if example.kind is FeedbackKind.rating else 0.5
    return None if number == middle else number > middle


def some_of_each_kind(examples: Sequence[RewardExample]) -> list[RewardExample]:
    """Return at most MOST_SINGLES of each kind that judge well or badly, the same every time."""
    kept: Counter[str] = Counter()
    found = []
    for example in sorted(examples, key=lambda e: unit_interval("held out", e.example_id)):
        if is_good(example) is not None and kept[example.kind] < MOST_SINGLES:
            kept[example.kind] += 1
            found.append(example)
    return found


def by_kind(
    pairs: Sequence[PreferencePair],
    margins: Sequence[float],
    examples: Sequence[RewardExample],
    scores: Sequence[float],
) -> dict[str, Measured]:
    """Return accuracy by kind: of pairs, and of single votes how well the score tells them apart.

    Single votes are never made pairs to learn from; here good and bad ones are only counted.
    """
    found = by_group(margins, ["correction" if p.corrected else "preference" for p in pairs])
    sides: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for example, score in zip(examples, scores, strict=True):
        sides[example.kind.value][0 if is_good(example) else 1].append(score)
    for kind, (better, worse) in sorted(sides.items()):
        if min(len(better), len(worse)) >= FEWEST:
            found[kind] = tells_apart(better, worse)
    return found


def annotators_agree(pairs: Sequence[PreferencePair]) -> Measured | None:
    """Return how often two people prefer the same of two completions; None where none did both.

    No reward model can be expected to do better on these people's votes. The interval is of the
    number of twos of completions.
    """
    units: dict[tuple[str, frozenset[str]], dict[str, str]] = defaultdict(dict)
    for pair in pairs:
        key = prompt_to_json(pair.prompt), frozenset((pair.chosen, pair.rejected))
        units[key][pair.voter] = pair.chosen
    told = agreement_of([list(unit.values()) for unit in units.values()])
    if not told.answers:
        return None
    return Measured(told.alike, *wilson_interval(told.alike, told.answers), told.answers)


def of_like_length(pair: PreferencePair) -> bool:
    """Return whether the two completions differ little in length, so that length says little."""
    lengths = len(pair.chosen), len(pair.rejected)
    return max(lengths) - min(lengths) <= ALIKE * max(lengths)


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return Spearman's correlation, in [-1, 1]; None where one of the two does not vary."""
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    return statistics.correlation(_ranks(xs), _ranks(ys))


def word_margins(train: Sequence[PreferencePair], test: Sequence[PreferencePair]) -> list[float]:
    """Return test margins of a logistic regression on which words a completion has.

    The MOST_WORDS words that stand in most training completions are known, and those in two at
    least. Empty where no word is.
    """
    train = train[:MOST_PAIRS]
    counts = Counter(
        w for p in train for text in (p.chosen, p.rejected) for w in set(words_of(text))
    )
    known = [word for word, count in counts.most_common(MOST_WORDS) if count > 1]
    if not known:
        return []
    place = {word: i for i, word in enumerate(known)}

    def differences(pairs: Sequence[PreferencePair]) -> Tensor:
        found = torch.zeros(len(pairs), len(known), dtype=torch.float64)
        for row, pair in zip(found, pairs, strict=True):
            for text, sign in ((pair.chosen, 1), (pair.rejected, -1)):
                for word in set(words_of(text)) & place.keys():
                    row[place[word]] += sign
        return found

    told = differences(train)
    head, _ = logistic(told, torch.ones(len(told), dtype=torch.float64), WORDS_RIDGE)
    margins: list[float] = (differences(test) @ head).tolist()
    return margins


def learning_curve(train: Tensor, test: Tensor) -> tuple[Learnt, ...]:
    """Return the held-out accuracy of heads fitted to growing shares of the training pairs.

    Both are features(chosen) - features(rejected) of decided pairs, (N, F) and (M, F) float64.
    """
    if not bool(train.isfinite().all()):
        return ()  # who trains on these says what is wrong with them
    if train.shape[1] > WIDEST:
        _, _, directions = torch.linalg.svd(train, full_matrices=False)
        train, test = train @ directions[:WIDEST].T, test @ directions[:WIDEST].T
    found = []
    for share in CURVE:
        pairs = math.ceil(share * len(train))
        ones = torch.ones(pairs, dtype=torch.float64)
        head, _ = logistic(train[:pairs], ones, CURVE_RIDGE)
        found.append(Learnt(pairs, measured((test @ head).tolist())))
    return tuple(found)


def worst(pairs: Sequence[PreferencePair], margins: Sequence[float]) -> tuple[Disagreement, ...]:
    """Return the pairs the model has most surely the other way round, the worst first."""
    order = sorted(range(len(pairs)), key=lambda i: (margins[i], pairs[i].pair_id))
    return tuple(
        Disagreement(
            pairs[i].pair_id,
            margins[i],
            len(pairs[i].rejected) > len(pairs[i].chosen),
            cohort_of(pairs[i].origin),
        )
        for i in order[:WORST]
        if margins[i] < 0
    )


def find(
    pairs: Sequence[PreferencePair],
    margins: Sequence[float],
    scores: Sequence[float],
    *,
    train: Sequence[PreferencePair],
    examples: Sequence[RewardExample] = (),
    example_scores: Sequence[float] = (),
    topics: Mapping[str, str],
    curve: tuple[Learnt, ...] = (),
) -> Findings:
    """Return what decided held-out pairs, and examples, say of a model.

    `scores` are those of all chosen and then all rejected completions; `train` are its decided
    training pairs; `topics` what prompts (records.prompt_to_json) were filed under.
    """
    texts = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    alike = [m for pair, m in zip(pairs, margins, strict=True) if of_like_length(pair)]
    words = word_margins(train, pairs)
    return Findings(
        by_topic=by_group(margins, [topics.get(prompt_to_json(pair.prompt)) for pair in pairs]),
        by_kind=by_kind(pairs, margins, examples, example_scores),
        by_cohort=by_group(margins, [cohort_of(pair.origin) for pair in pairs]),
        bag_of_words=measured(words) if words else None,
        annotators=annotators_agree(pairs),
        length_matched=measured(alike) if alike else None,
        length_correlation=rank_correlation(scores, [float(len(text)) for text in texts]),
        learning_curve=curve,
        worst=worst(pairs, margins),
    )


def learnt_floors(findings: Findings) -> dict[str, float]:
    """Return what a bag of words reaches and how often people agree, by name, where known."""
    found = {"bag_of_words": findings.bag_of_words, "annotators": findings.annotators}
    return {name: one.share for name, one in found.items() if one is not None}


def _ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank from 1; equal values share the mean of theirs."""
    ranks: list[float] = pd.Series(values, dtype=float).rank().tolist()
    return ranks
