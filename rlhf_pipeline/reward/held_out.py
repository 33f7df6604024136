"""What held-out votes say of a reward model beside its accuracy: for whom, beside what, how wrong.

Shares come with 95 % intervals: Wilson's where pairs are counted, Hanley and McNeil's for votes on
single completions; either of as many as they are worth that share neither person nor conversation
(calibration.shared_effect). `find` reads pairs; where single votes judge, matched.py finds the same
by these.
What this does not tell: how good people's votes are. It holds the model against them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from rlhf_pipeline.evaluation.metrics import Z, design_effect, wilson_interval
from rlhf_pipeline.feedback.datasets import cohort_of, unit_interval
from rlhf_pipeline.records import (
    FeedbackKind,
    PreferencePair,
    Prompt,
    RewardExample,
    prompt_to_json,
)
from rlhf_pipeline.reward.calibration import (
    HangsOn,
    accuracy_interval,
    hangs_on,
    pair_accuracy,
    shared_effect,
)
from rlhf_pipeline.reward.logistic import logistic
from rlhf_pipeline.reward.raters import WIDEST
from rlhf_pipeline.reward.rules import words_of

JudgedBy = Literal["pairs", "votes"]

FEWEST = 10  # pairs of a topic or a cohort, or votes on each side of a group; fewer say nothing
ALIKE = 0.1  # two completions are of like length where they differ by this much of the longer one
WORST = 10  # pairs that are kept as examples
MOST_WORDS, WORDS_RIDGE = 300, 30.0  # of the bag of words, which is to cost no second
MOST_PAIRS = 2000  # that the bag of words learns from, and as many votes
CURVE = (1 / 8, 1 / 4, 1 / 2, 1.0)  # shares of the training pairs, or votes
CURVE_PAIRS = 1000  # training pairs or votes at most, and half as many held-out pairs
CURVE_RIDGE = 10.0
CONSTANT = 10.0  # a feature of every vote, for how many are good; so large that no ridge shrinks it
MOST_SINGLES = 400  # held-out votes of a kind that are scored


@dataclass(frozen=True)
class HeldOut:
    """Twos of completions the first of which people find better, and what is usual beside each.

    `texts` are N better ones, N worse ones, and as many for each of the prompts that `place` (2N,)
    numbers; none where pairs judge, whose two sides have one prompt.
    """

    judged_by: JudgedBy
    texts: list[tuple[Prompt, str]]
    fitting: list[int]  # of the twos, those that fit temperature and lapse
    judging: list[int]
    on: list[HangsOn]  # each of the twos
    place: Tensor | None = None

    def __len__(self) -> int:
        return len(self.fitting) + len(self.judging)

    def lead(self, values: Tensor) -> Tensor:
        """Return the 2N completions' values less what is usual; `values` are the texts', (T, ...).

        Scores, features or lengths: whatever is a mean's to take.
        """
        said, usual = values[: 2 * len(self)], values[2 * len(self) :]
        if self.place is None:
            return said
        prompts = int(self.place.max()) + 1
        return said - usual.reshape(prompts, -1, *usual.shape[1:]).mean(1)[self.place]

    def ahead(self, values: Tensor) -> Tensor:
        """Return how far the better completions lead the worse ones, (N, ...)."""
        better, worse = self.lead(values).chunk(2)
        return better - worse

    def margins(self, values: Tensor) -> list[float]:
        """Return what `ahead` does, of values (T,)."""
        margins: list[float] = self.ahead(values).tolist()
        return margins

    def lengths(self) -> Tensor:
        """Return how many characters each text has, (T,) float64."""
        return torch.tensor([len(text) for _, text in self.texts], dtype=torch.float64)

    def longer_is_better(self) -> float:
        """Return the accuracy of always preferring the longer completion, in characters."""
        return pair_accuracy(self.margins(self.lengths()))

    def of_like_length(self) -> list[bool]:
        """Return which twos lead each other little in length (N,), so that it says little."""
        lengths = self.lengths()
        better, worse = lengths[: 2 * len(self)].chunk(2)
        alike: list[bool] = (self.ahead(lengths).abs() <= ALIKE * better.maximum(worse)).tolist()
        return alike

    def at_like_length(self, scores: Tensor) -> Measured | None:
        """Return the accuracy of scores (T,) on twos of like length; None where none is."""
        alike = [n for n, is_alike in enumerate(self.of_like_length()) if is_alike]
        return _measured_of(alike, self.margins(scores), self.on) if alike else None

    def length_correlation(self, scores: Tensor) -> float | None:
        """Return how leads of scores (T,) go with those of lengths, as `rank_correlation` does."""
        return rank_correlation(self.lead(scores).tolist(), self.lead(self.lengths()).tolist())


def of_pairs(pairs: Sequence[PreferencePair], fitting: list[int], judging: list[int]) -> HeldOut:
    """Return decided pairs as what judges, in these halves."""
    sides = [(pair.prompt, pair.chosen) for pair in pairs]
    sides += [(pair.prompt, pair.rejected) for pair in pairs]
    return HeldOut("pairs", sides, fitting, judging, [hangs_on(pair) for pair in pairs])


@dataclass(frozen=True, slots=True)
class Measured:
    """A share in [0, 1], its 95 % interval, and of how many."""

    share: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a head reaches that was fitted to some of the training pairs, or votes."""

    pairs: int  # or votes
    accuracy: Measured


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A held-out pair, or vote, on which the model is surely of another opinion; no words of it."""

    pair_id: str  # or the vote's
    margin: float  # below 0; of a vote, how far the answer leads what is usual, or trails it
    longer: bool  # the model prefers the longer completion, or what is longer than usual
    cohort: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What held-out votes say of one reward model; what too few votes stand behind is left out."""

    # Accuracy on pairs; where single votes judge, how well leads tell them apart (`tells_apart`).
    by_topic: dict[str, Measured]
    by_cohort: dict[str, Measured]  # of raters: where their votes came in
    # pairs by how they came about; of single votes see `tells_apart`, or where these judge the
    # accuracy of those that were matched
    by_kind: dict[str, Measured]
    bag_of_words: Measured | None  # accuracy of a regression on the words, fitted to the same votes
    annotators: Measured | None  # share of people who said the same of the same two completions
    length_matched: Measured | None  # accuracy on pairs of like length
    length_correlation: float | None  # of score and characters, by ranks, in [-1, 1]
    learning_curve: tuple[Learnt, ...]  # of a head on the trunk as it was before it was trained
    worst: tuple[Disagreement, ...]  # the worst first


def measured(margins: Sequence[float], on: Sequence[HangsOn] | None = None) -> Measured:
    """Return the accuracy of these margins, each of which hangs on something; needs one margin."""
    interval = accuracy_interval(margins, on)
    return Measured(pair_accuracy(margins), *interval, len(margins))


def _measured_of(
    some: Sequence[int], margins: Sequence[float], on: Sequence[HangsOn] | None
) -> Measured:
    return measured([margins[n] for n in some], None if on is None else [on[n] for n in some])


def by_group(
    margins: Sequence[float],
    groups: Iterable[str | None],
    on: Sequence[HangsOn] | None = None,
) -> dict[str, Measured]:
    """Return each group's accuracy, by name; None is in no group, small groups are left out."""
    found: dict[str, list[int]] = defaultdict(list)
    for n, (_, group) in enumerate(zip(margins, groups, strict=True)):
        if group is not None:
            found[group].append(n)
    return {
        name: _measured_of(of, margins, on)
        for name, of in sorted(found.items())
        if len(of) >= FEWEST
    }


def apart_by_group(
    leads: Sequence[float], votes: Sequence[RewardExample], groups: Iterable[str | None]
) -> dict[str, Measured]:
    """Return how well leads tell each group's good votes from its bad ones, by name.

    None is in no group; of FEWEST on each side at least.
    """
    found: dict[str, tuple[list[Lead], list[Lead]]] = defaultdict(lambda: ([], []))
    for lead, vote, group in zip(leads, votes, groups, strict=True):
        if group is not None:
            found[group][0 if is_good(vote) else 1].append(Lead(lead, hangs_on(vote)))
    return {
        name: tells_apart(*sides)
        for name, sides in sorted(found.items())
        if min(map(len, sides)) >= FEWEST
    }


class Lead(NamedTuple):
    """A score, or how far it is beyond what is usual, and what the vote on it hangs on."""

    value: float
    on: HangsOn


def tells_apart(better: Sequence[Lead], worse: Sequence[Lead]) -> Measured:
    """Return how likely a completion judged well scores above one judged badly; ties count half.

    It is the area under the ROC curve, over prompts, as scores are one scale for all of them.
    Sources of the interval: Hanley and McNeil 1982, doi:10.1148/radiology.143.1.7063747, eq. 1, for
    votes that share nothing; what those of a person or a conversation do makes it wider as in
    Obuchowski 1997, doi:10.2307/2533958, whose parts are how much each vote moves the area. It is
    laid in log-odds, half a pair short of all and of none: few votes that are told apart whole are
    no proof that all are.
    """
    values = [lead.value for lead in (*better, *worse)]
    n, m = len(better), len(worse)
    above, below = _ranks(values[:n]), _ranks(values[n:])
    # Of each better one the share of worse ones it is above, and the other way round.
    wins = [(rank - own) / m for rank, own in zip(_ranks(values), [*above, *below], strict=True)]
    wins[n:] = [1 - win * m / n for win in wins[n:]]
    area = statistics.fmean(wins[:n])
    moves = [(win - area) / (n if i < n else m) for i, win in enumerate(wins)]
    inner = (area * n * m + 0.5) / (n * m + 1)
    q1, q2 = inner / (2 - inner), 2 * inner**2 / (1 + inner)
    spread = inner * (1 - inner) + (n - 1) * (q1 - inner**2) + (m - 1) * (q2 - inner**2)
    effect = shared_effect(moves, [lead.on for lead in (*better, *worse)])
    reach = Z * math.sqrt(spread / (n * m) * effect) / (inner * (1 - inner))
    odds = math.log(inner / (1 - inner))
    low, high = (1 / (1 + math.exp(-odds - way * reach)) for way in (-1, 1))
    return Measured(area, min(area, low), max(area, high), n + m)


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
    kinds = ["correction" if pair.corrected else "preference" for pair in pairs]
    found = by_group(margins, kinds, [hangs_on(pair) for pair in pairs])
    return found | apart_by_group(scores, examples, [example.kind.value for example in examples])


def annotators_agree(pairs: Sequence[PreferencePair]) -> Measured | None:
    """Return how often two people prefer the same of two completions; None where none did both.

    No reward model can be expected to do better on these people's votes. Every vote counts once, as
    in a model's accuracy: by how many of the others' on the same two completions are like it. The
    interval is Wilson's of as many twos of completions as they are worth, of which many people's
    votes on one are no more than one: the effective sample size of Korn and Graubard 1998, as in
    metrics.win_rate.
    """
    units: dict[tuple[str, frozenset[str]], dict[str, str]] = defaultdict(dict)
    for pair in pairs:
        key = prompt_to_json(pair.prompt), frozenset((pair.chosen, pair.rejected))
        units[key][pair.voter] = pair.chosen
    alike: list[float] = []
    of: list[tuple[str]] = []
    several = [list(unit.values()) for unit in units.values() if len(unit) > 1]
    for number, votes in enumerate(several):
        counts = Counter(votes)
        alike += [(counts[said] - 1) / (len(votes) - 1) for said in votes]
        of += [(str(number),)] * len(votes)
    if not several:
        return None
    share = statistics.fmean(alike)
    worth = min(len(several), len(alike) / design_effect(alike, of))
    return Measured(share, *wilson_interval(share, worth), len(several))


def of_like_length(pair: PreferencePair) -> bool:
    """Return whether the two completions differ little in length, so that length says little."""
    return of_pairs([pair], [], [0]).of_like_length()[0]


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return Spearman's correlation, in [-1, 1]; None where one of the two does not vary."""
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    return statistics.correlation(_ranks(xs), _ranks(ys))


def word_margins(
    train: Sequence[PreferencePair],
    held_out: HeldOut,
    votes: Sequence[RewardExample] = (),
) -> list[float]:
    """Return held-out margins of a logistic regression on which words a completion has.

    It learns from pairs which of two is better, and from votes what is good. The MOST_WORDS words
    that stand in most training completions are known, and those in two at least. Empty where no
    word is.
    """
    train = train[:MOST_PAIRS]
    votes = [vote for vote in votes if is_good(vote) is not None][:MOST_PAIRS]
    said = [text for pair in train for text in (pair.chosen, pair.rejected)]
    said += [vote.completion for vote in votes]
    counts = Counter(word for text in said for word in set(words_of(text)))
    known = [word for word, count in counts.most_common(MOST_WORDS) if count > 1]
    if not known:
        return []
    place = {word: i for i, word in enumerate(known)}

    def has(texts: Sequence[str]) -> Tensor:
        found = torch.zeros(len(texts), len(known), dtype=torch.float64)
        for row, text in zip(found, texts, strict=True):
            row[[place[word] for word in set(words_of(text)) & place.keys()]] = 1
        return found

    told = has(said)
    ahead = told[: 2 * len(train) : 2] - told[1 : 2 * len(train) : 2]
    head, _ = logistic(*taught(ahead, told[2 * len(train) :], votes), WORDS_RIDGE)
    margins: list[float] = (
        held_out.ahead(has([t for _, t in held_out.texts])) @ head[:-1]
    ).tolist()
    return margins


def taught(
    ahead: Tensor, features: Tensor, votes: Sequence[RewardExample]
) -> tuple[Tensor, Tensor]:
    """Return what a regression learns from, rows (P + V, F + 1) and targets (P + V,), float64.

    `ahead` (P, F) are features of better completions less those of worse ones; of the completions
    that the votes are on they are `features` (V, F). The last feature is the votes' constant.
    """
    constant = features.new_full((len(votes), 1), CONSTANT)
    rows = torch.cat([nn.functional.pad(ahead, (0, 1)), torch.cat([features, constant], 1)])
    good = [float(bool(is_good(vote))) for vote in votes]
    return rows, torch.tensor([1.0] * len(ahead) + good, dtype=torch.float64)


def learning_curve(
    train: Tensor,
    targets: Tensor,
    test: Tensor,
    on: Sequence[HangsOn] | None = None,
) -> tuple[Learnt, ...]:
    """Return the held-out accuracy of heads fitted to growing shares of what they learn from.

    `train` (N, F) are features(chosen) - features(rejected) of decided pairs, whose `targets` (N,)
    are 1, or what `taught` makes of votes; `test` (M, F) are differences like the pairs', each of
    which hangs on something, `on` (M,). All tensors are float64.
    """
    if not bool(train.isfinite().all()):
        return ()  # who trains on these says what is wrong with them
    if train.shape[1] > WIDEST:
        _, _, directions = torch.linalg.svd(train, full_matrices=False)
        train, test = train @ directions[:WIDEST].T, test @ directions[:WIDEST].T
    found = []
    for share in CURVE:
        count = math.ceil(share * len(train))
        head, _ = logistic(train[:count], targets[:count], CURVE_RIDGE)
        found.append(Learnt(count, measured((test @ head).tolist(), on)))
    return tuple(found)


def worst(found: Iterable[Disagreement]) -> tuple[Disagreement, ...]:
    """Return what the model most surely has the other way round, the worst first."""
    order = sorted(found, key=lambda one: (one.margin, one.pair_id))
    return tuple(one for one in order[:WORST] if one.margin < 0)


def find(
    held_out: HeldOut,
    pairs: Sequence[PreferencePair],
    scores: Tensor,
    *,
    train: Sequence[PreferencePair],
    examples: Sequence[RewardExample] = (),
    example_scores: Sequence[float] = (),
    topics: Mapping[str, str],
    curve: tuple[Learnt, ...] = (),
) -> Findings:
    """Return what decided held-out pairs, and examples, say of a model.

    `held_out` is `of_pairs` of them, `scores` (T,) its texts'; `train` are the model's decided
    training pairs; `topics` what prompts (records.prompt_to_json) were filed under.
    """
    margins, on = held_out.margins(scores), held_out.on
    words = word_margins(train, held_out)
    by_topic = [topics.get(prompt_to_json(pair.prompt)) for pair in pairs]
    return Findings(
        by_topic=by_group(margins, by_topic, on),
        by_kind=by_kind(pairs, margins, examples, example_scores),
        by_cohort=by_group(margins, [cohort_of(pair.origin) for pair in pairs], on),
        bag_of_words=measured(words, on) if words else None,
        annotators=annotators_agree(pairs),
        length_matched=held_out.at_like_length(scores),
        length_correlation=held_out.length_correlation(scores),
        learning_curve=curve,
        worst=worst(
            Disagreement(
                pair.pair_id,
                margin,
                len(pair.rejected) > len(pair.chosen),
                cohort_of(pair.origin),
            )
            for pair, margin in zip(pairs, margins, strict=True)
        ),
    )


def learnt_floors(findings: Findings) -> dict[str, float]:
    """Return what a bag of words reaches and how often people agree, by name, where known."""
    found = {"bag_of_words": findings.bag_of_words, "annotators": findings.annotators}
    return {name: one.share for name, one in found.items() if one is not None}


def _ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank from 1; equal values share the mean of theirs."""
    ranks: list[float] = pd.Series(values, dtype=float).rank().tolist()
    return ranks
