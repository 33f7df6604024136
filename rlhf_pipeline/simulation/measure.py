"""The ruler: how much better people secretly like one policy than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_pipeline.evaluation.metrics import Number, wilson_interval, win_rate
from rlhf_pipeline.records import Prompt, RewardFunction, RewardInput
from rlhf_pipeline.reward.calibration import pair_accuracy
from rlhf_pipeline.simulation.people import thumbs_up_probability
from rlhf_pipeline.simulation.world import hidden_preference


@dataclass(frozen=True, slots=True)
class HiddenComparison:
    """Candidate and baseline by the hidden preference, on the same prompts."""

    prompts: int
    candidate_mean: float  # of the hidden preference, 0 to 1
    baseline_mean: float
    win_rate: Number  # ties half
    candidate_thumbs: float  # expected share of thumbs-up, 0 to 1
    baseline_thumbs: float

    @property
    def relative_gain(self) -> float:
        """Return how much the mean rose, relative to the baseline's."""
        return self.candidate_mean / self.baseline_mean - 1

    @property
    def relative_thumbs(self) -> float:
        """Return how much the share of thumbs-up rose, relative to the baseline's."""
        return self.candidate_thumbs / self.baseline_thumbs - 1


def compare_hidden(
    prompts: Sequence[Prompt], candidate: Sequence[str], baseline: Sequence[str]
) -> HiddenComparison:
    """Return the comparison of two policies' completions to the same prompts."""
    ours = np.array([hidden_preference(p, c) for p, c in zip(prompts, candidate, strict=True)])
    theirs = np.array([hidden_preference(p, c) for p, c in zip(prompts, baseline, strict=True)])
    return HiddenComparison(
        prompts=len(prompts),
        candidate_mean=float(ours.mean()),
        baseline_mean=float(theirs.mean()),
        win_rate=win_rate(ours, theirs),
        candidate_thumbs=float(np.mean([thumbs_up_probability(h) for h in ours])),
        baseline_thumbs=float(np.mean([thumbs_up_probability(h) for h in theirs])),
    )


def hidden_accuracy(
    reward: RewardFunction,
    prompts: Sequence[Prompt],
    first: Sequence[str],
    second: Sequence[str],
) -> Number:
    """Return how often the reward ranks two baseline completions as the hidden preference does.

    Pairs of which neither is preferred are left out; the interval is Wilson's.
    """
    items = list(zip(prompts, first, second, strict=True))
    hidden = [(hidden_preference(p, a), hidden_preference(p, b)) for p, a, b in items]
    decided = [i for i, (a, b) in enumerate(hidden) if a != b]
    scores = reward([RewardInput(items[i][0], text) for i in decided for text in items[i][1:]])
    margins = [
        (scores[2 * n] - scores[2 * n + 1]) * (1 if hidden[i][0] > hidden[i][1] else -1)
        for n, i in enumerate(decided)
    ]
    share = pair_accuracy(margins)
    return Number(share, *wilson_interval(share, len(decided)), len(decided))
