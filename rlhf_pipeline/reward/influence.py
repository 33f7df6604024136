"""What each part of the raters does to the reward: held-out pairs judged as if it had said nothing.

With several heads the others judge without one. A single head on a frozen trunk is fitted again
without each part; how far each rater's word goes, and how much weights are shrunk, stay as they
were. What this does not tell: what a part does to a trunk that trains (each part would take a
training of its own), or what raters do who are spread over all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rlhf_pipeline.reward.heads import parts_of

PARTS = 5  # of the raters, where one head learns from all of them

Without = Callable[[Collection[str]], Tensor]
"""Returns the head (F,), on plain features, that everybody's votes but these raters' give."""


@dataclass(frozen=True, slots=True)
class PartInfluence:
    """What one part of the raters does to the reward: held-out pairs judged without its votes."""

    raters: int
    votes: int
    accuracy: float  # of what the others taught
    changed: float  # share of held-out pairs that this ranks otherwise


def of_heads(
    margins: Callable[[Tensor], Tensor],
    by_head: Tensor,
    parts: Mapping[str, int],
    votes: Sequence[int],
) -> list[PartInfluence]:
    """Return each part's influence on held-out pairs; by_head are their texts' scores (T, K).

    `margins` combines the scores of some heads, and returns how far the better texts then lead the
    worse ones, (N,). `votes` is how many each part trained on.
    """
    heads = by_head.shape[1]
    before = margins(by_head)
    found = []
    for part in range(heads):
        others = [head for head in range(heads) if head != part]
        after = margins(by_head[:, others])
        raters = sum(one == part for one in parts.values())
        found.append(_influence(raters, votes[part], before, after))
    return found


def of_one_head(
    margins: Tensor, differences: Tensor, without: Without, votes: Mapping[str, int]
) -> list[PartInfluence]:
    """Return the influence of each of PARTS parts of the raters; `votes` are how many each gave.

    Shapes: the head's margins on held-out pairs (N,) and features(chosen) - features(rejected) of
    these, (N, F) float64. Raises NotEnoughData where there are fewer raters than parts.
    """
    parts = parts_of(list(votes), PARTS)
    found = []
    for part in range(PARTS):
        gone = [name for name, one in parts.items() if one == part]
        after = differences @ without(gone)
        found.append(_influence(len(gone), sum(votes[name] for name in gone), margins, after))
    return found


def why_unknown(*, trunk_trains: bool, raters: int) -> str | None:
    """Return why a single head's influence of parts cannot be had; None where it can."""
    if trunk_trains:
        return (
            "the trunk was trained on everybody's votes, and would have to be again without each "
            "part; set reward.freeze_trunk to see it"
        )
    if raters < PARTS:
        return f"parts of the raters need {PARTS} raters, found {raters}"
    return None


def _influence(raters: int, votes: int, before: Tensor, after: Tensor) -> PartInfluence:
    return PartInfluence(
        raters,
        votes,
        float((after > 0).double().mean() + (after == 0).double().mean() / 2),
        float(((after > 0) != (before > 0)).double().mean()),
    )
