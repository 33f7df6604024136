"""How far each rater's word goes: by whether their votes are foreseen by everybody else's.

Raters are judged by a head that has not seen their votes, fitted to the others with one voice per
rater, however often they voted. Each then is careful, careless or contrary, and counts by how
likely they are careful (EM, after Dawid and Skene 1979 and Crowd-BT, Chen et al. 2013, with three
kinds of rater where those have a number for each):

    careful   says which is better with probability sigmoid(a m), m the margin
    careless  with probability one half
    contrary  with probability sigmoid(-a m)

a is fitted with the weights: a head that foresees nothing gives a near 0, and everybody counts.
Answers to gold questions (feedback/gold.py) count beside: the careful are right GOLD_RIGHT of the
time, the contrary wrong. How those who were asked did is what is expected of the others too, and
the first head is already weighed by it: a majority which agrees on something else then does not
decide who is careful.

Who turns: along each rater's votes, in the order they were given, goes an e-detector of "careful
until some vote, careless or contrary from there". A rater who was as careful as they are held to be
is taken for one who turned with probability TURN_ALPHA a vote at most. From the turn on their votes
count nothing, and before it by what was foreseen of those before it alone.

What this does not protect against: without gold questions, more than about a third of the raters
who agree on something else; with or without, people made up by the dozen, and a few who vote like
everybody but where a trigger stands (feedback/support.py looks for those, heads.py outvotes them).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rlhf_pipeline.feedback.datasets import unit_interval
from rlhf_pipeline.feedback.gold import Tally
from rlhf_pipeline.reward.logistic import logistic

FOLDS = 5  # of the raters; each is judged by a head that the other four fitted
ROUNDS = 3  # of weighing and fitting again
RIDGE = 3.0
PRIORS = (0.90, 0.08, 0.02)  # careful, careless, contrary
GOLD_RIGHT = 0.95  # of a careful rater: even they err
PRIOR_RATERS = 5  # that the prior is worth beside those who were asked gold questions
JUDGED_VOTES = 5  # a rater with fewer decided pairs counts as any other
JUDGED_RATERS = 10  # with so many votes; fewer cannot outvote each other
TURN_ALPHA = 1e-4
# The careful slip at the surest pair too, one time in twenty as at a gold question. Odds as sure as
# the head's would take one slip of an honest rater for a turn, and all they say after it for none.
SUREST = math.log(GOLD_RIGHT / (1 - GOLD_RIGHT))  # log-odds that one vote says at most
WIDEST = 256  # directions of the features that raters are judged in


@dataclass(frozen=True, slots=True)
class RaterWeight:
    """One rater's decided pairs and how they were judged."""

    pairs: int
    agreement: float | None  # share that the others' head foresaw, even ones half; None: not judged
    weight: float  # probability of being careful; of those with few pairs, 1
    gold: int = 0  # gold questions answered
    gold_right: int = 0
    turned_after: int | None = None  # decided pairs; None: the same rater to the end


def rater_weights(
    differences: Tensor,
    targets: Tensor,
    voters: Sequence[str],
    gold: Mapping[str, Tally] | None = None,
) -> dict[str, RaterWeight]:
    """Return each rater's weight, from features(chosen) - features(rejected), (N, F) float64.

    A rater's votes are in the order they were given. `targets` (N,) are 1 where chosen was
    preferred and 0.5 for ties, which judge nobody. The features should be of one scale. `gold` is
    how raters answered what is known. Where too few raters have votes enough, gold alone counts,
    and all other weights are 1.
    """
    decided = targets == 1
    names = sorted(set(voters))
    number = {name: i for i, name in enumerate(names)}
    everybody = torch.tensor([number[voter] for voter in voters])
    rater = everybody[decided]
    counts = torch.bincount(rater, minlength=len(names))
    answered = [(gold or {}).get(name, Tally()) for name in names]
    known = _gold_likelihoods(answered)
    tested = torch.tensor([tally.asked > 0 for tally in answered])
    everyone = torch.ones(len(names), dtype=torch.float64)
    priors = torch.tensor(PRIORS, dtype=torch.float64)
    weights = torch.where(tested, _kinds(known, priors)[0], everyone)
    judged = counts >= JUDGED_VOTES
    right = weights.new_zeros(len(names))
    turned: dict[int, int] = {}
    foreseen = int(judged.sum()) >= JUDGED_RATERS
    if foreseen:
        if tested.any():
            shares = _kinds(known, priors)[:, tested].sum(1) + PRIOR_RATERS * priors
            priors = shares / shares.sum()
            weights[~tested] = priors[0]
        told = _main_directions(differences[decided])
        middle = counts[judged].double().median()
        voice = (middle / counts.clamp(min=1)).clamp(max=1)
        folds = torch.tensor([int(FOLDS * unit_interval("rater fold", name)) for name in names])
        margins = told.new_zeros(len(told))
        for _ in range(ROUNDS):
            margins = _foreseen(told, (weights * voice)[rater], folds[rater])
            seen = _vote_likelihoods(margins, rater, (weights * voice)[rater], len(names))
            weights = torch.where(judged | tested, _kinds(known + seen, priors)[0], everyone)
        sure = margins * _slope(margins, (weights * voice)[rater])
        turned = _turns(sure, rater, [int(i) for i in judged.nonzero()])
        if turned:
            before = _before(turned, rater)
            seen = _vote_likelihoods(
                margins[before], rater[before], (weights * voice)[rater[before]], len(names)
            )
            weights = torch.where(judged | tested, _kinds(known + seen, priors)[0], everyone)
        right = right.index_add(0, rater, (margins.sign() + 1) / 2)
    return {
        name: RaterWeight(
            int(counts[i]),
            float(right[i]) / int(counts[i]) if foreseen and counts[i] else None,
            float(weights[i]),
            answered[i].asked,
            answered[i].right,
            turned.get(i),
        )
        for i, name in enumerate(names)
    }


def vote_weights(
    weighed: Mapping[str, RaterWeight], voters: Sequence[str], targets: Sequence[float]
) -> Tensor:
    """Return how much each vote counts, (N,) float64: its rater's weight, 0 once they turned."""
    given: Counter[str] = Counter()
    found = []
    for voter, target in zip(voters, targets, strict=True):
        one = weighed[voter]
        gone = one.turned_after is not None and given[voter] >= one.turned_after
        found.append(0.0 if gone else one.weight)
        given[voter] += target == 1
    return torch.tensor(found, dtype=torch.float64)


def turn_of(sure: Sequence[float]) -> int | None:
    """Return how many votes a rater gave before they turned; None where nothing says they did.

    `sure` are the log-odds with which a careful rater says what this one said, vote by vote; what
    lies beyond SUREST on either side counts as SUREST. Two CUSUMs, M = max(M, 1) L, with L how much
    likelier a careless or a contrary rater says it, .5 / p and (1 - p) / p; it is a turn once their
    mean reaches 1 / TURN_ALPHA, and it began where the larger one was last below 1. E[L] is at most
    1 for a careful rater, so the mean is no larger than an e-detector. Source: the CUSUM e-detector
    of Shin, Ramdas and Rinaldo, arXiv:2203.03532.
    """
    logs, began = [0.0, 0.0], [0, 0]
    for vote, said in enumerate(sure):
        odds = max(-SUREST, min(SUREST, said))
        careful = -math.log1p(math.exp(-odds))
        for i, other in enumerate((math.log(0.5), careful - odds)):
            if logs[i] <= 0:
                logs[i], began[i] = 0.0, vote
            logs[i] += other - careful
        larger = max((0, 1), key=lambda i: logs[i])
        mean = logs[larger] + math.log1p(math.exp(logs[1 - larger] - logs[larger])) - math.log(2)
        if mean >= -math.log(TURN_ALPHA):
            return began[larger]
    return None


def _turns(sure: Tensor, rater: Tensor, judged: Sequence[int]) -> dict[int, int]:
    """Return how many decided pairs each of the judged raters who turned gave before that."""
    found = {}
    for one in judged:
        turn = turn_of(sure[rater == one].tolist())
        if turn is not None:
            found[one] = turn
    return found


def _before(turned: Mapping[int, int], rater: Tensor) -> Tensor:
    """Return which votes came before their rater turned, (N,) bool.

    Of raters who were never careful all count, or nothing would say what they are.
    """
    before = torch.ones_like(rater, dtype=torch.bool)
    for one, votes in turned.items():
        if votes >= JUDGED_VOTES:
            before[(rater == one).nonzero().flatten()[votes:]] = False
    return before


def _foreseen(differences: Tensor, weights: Tensor, folds: Tensor) -> Tensor:
    """Return each pair's margin under a head that saw no vote of its rater's fold."""
    margins = differences.new_zeros(len(differences))
    ones = torch.ones_like(margins)
    for fold in range(FOLDS):
        others = folds != fold
        head, _ = logistic(differences[others], ones[others], RIDGE, weights[others])
        margins[~others] = differences[~others] @ head
    return margins


def _vote_likelihoods(margins: Tensor, rater: Tensor, weights: Tensor, raters: int) -> Tensor:
    """Return the log-likelihood of each rater's votes by kind of rater, (3, raters)."""
    sure = margins * _slope(margins, weights)
    by_kind = (
        functional.logsigmoid(sure),
        torch.full_like(sure, math.log(0.5)),
        functional.logsigmoid(-sure),
    )
    none = margins.new_zeros(raters)
    return torch.stack([none.index_add(0, rater, likelihood) for likelihood in by_kind])


def _slope(margins: Tensor, weights: Tensor) -> Tensor:
    """Return a, (1,): how sure the margins are; 0 where they foresee nothing."""
    slope, _ = logistic(margins[:, None], torch.ones_like(margins), 1e-6, weights)
    return slope.clamp(min=0)


def _gold_likelihoods(answered: Sequence[Tally]) -> Tensor:
    """Return the log-likelihood of each rater's gold answers by kind of rater, (3, raters)."""
    counts = torch.tensor([(tally.right, tally.wrong) for tally in answered], dtype=torch.float64)
    chances = torch.tensor([GOLD_RIGHT, 0.5, 1 - GOLD_RIGHT], dtype=torch.float64)
    return torch.stack([chances, 1 - chances], dim=1).log() @ counts.T


def _kinds(likelihoods: Tensor, priors: Tensor) -> Tensor:
    """Return each rater's probability of being careful, careless and contrary, (3, raters)."""
    return (likelihoods + priors.log()[:, None]).softmax(0)


def _main_directions(differences: Tensor) -> Tensor:
    """Return the differences in their widest directions, so that wide models cost no more."""
    if differences.shape[1] <= WIDEST:
        return differences
    _, directions = torch.linalg.eigh(differences.T @ differences)
    widest: Tensor = directions[:, -WIDEST:]  # their lengths rise
    return differences @ widest
