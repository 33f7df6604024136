"""How far people agree with each other: Krippendorff's alpha, and every rater beside the others.

A unit is something that several people judged: an answer (thumbs), or two answers to one prompt
(which is better, a tie, both bad). Only units with two judgements or more say anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_pipeline.records import FeedbackKind, this_won

if TYPE_CHECKING:
    import pandas as pd

Unit = Mapping[str, Hashable]
"""Who judged it, and what each said."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far people agree."""

    answers: int  # units that two or more people judged
    alike: float | None  # share of pairs of people who said the same; None: no answer to look at
    alpha: float | None  # Krippendorff's, nominal: 1 is perfect, 0 is chance; None as above

    def words(self) -> str:
        """Return it for a person."""
        if not self.answers:
            return "Agreement: no answer was judged by two people yet."
        return (
            f"Agreement: {self.alike:.0%} on {self.answers} answers judged by two or more "
            f"(Krippendorff's alpha {self.alpha:.2f})."
        )


@dataclass(frozen=True, slots=True)
class RaterAgreement:
    """One rater beside the others."""

    voter: str  # hashed
    votes: int
    compared: int  # judgements of others on what this rater judged too
    alike: float | None  # share of them that said the same; None: nothing to compare


def agreement_of(judgements: Iterable[Sequence[Hashable]]) -> Agreement:
    """Return the agreement of each unit's judgements.

    Source of alpha: Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), nominal data
    with missing values, by the coincidence matrix. Its cells are never filled, as one answer may
    have thousands of judgements: n of a unit make n (n - 1) ordered pairs, each 1 / (n - 1) of a
    coincidence; c of them the same make c (c - 1) on the diagonal, and add c to its row's sum.
    """
    said: Counter[Hashable] = Counter()
    answers, alike, pairs, differing = 0, 0, 0, 0.0
    for votes in judgements:
        n = len(votes)
        if n < 2:
            continue
        counts = Counter(votes)
        same = sum(c * (c - 1) for c in counts.values())
        answers += 1
        alike += same
        pairs += n * (n - 1)
        differing += (n * (n - 1) - same) / (n - 1)
        said.update(counts)
    if not answers:
        return Agreement(0, None, None)
    total = said.total()
    expected = total**2 - sum(count**2 for count in said.values())
    alpha = 1.0 if expected == 0 else 1 - (total - 1) * differing / expected
    return Agreement(answers, alike / pairs, alpha)


def units_of(frame: pd.DataFrame) -> dict[str, list[Unit]]:
    """Return what several people may have judged in a snapshot frame: "pairs" and "thumbs".

    Of a pair the better one is "first" or "second" in the order of their texts: by its text no two
    pairs would share an answer, and agreement by chance would seem next to impossible.
    """
    pairs: dict[Hashable, dict[str, Hashable]] = defaultdict(dict)
    thumbs: dict[Hashable, dict[str, Hashable]] = defaultdict(dict)
    columns = ("kind", "voter", "prompt", "completion", "other_completion", "choice", "shown_first")
    for kind, voter, prompt, this, other, choice, first, number in zip(
        *(frame[name] for name in columns), frame["number"], strict=True
    ):
        if kind == FeedbackKind.thumbs:
            thumbs[prompt, this][voter] = bool(number > 0.5)
        elif kind == FeedbackKind.preference:
            better: Hashable = choice
            if choice in ("left", "right"):
                better = (
                    "first" if this_won(choice, first) == (str(this) < str(other)) else "second"
                )
            pairs[prompt, frozenset((this, other))][voter] = better
    return {"pairs": list(pairs.values()), "thumbs": list(thumbs.values())}


def by_rater(units: Iterable[Unit], votes: Mapping[str, int]) -> list[RaterAgreement]:
    """Return every rater with two votes or more, those who agree least with the others first.

    `votes` is how many each gave of any kind.
    """
    compared: Counter[str] = Counter()
    alike: Counter[str] = Counter()
    for unit in units:
        counts = Counter(unit.values())
        for voter, said in unit.items():
            compared[voter] += len(unit) - 1
            alike[voter] += counts[said] - 1
    table = [
        RaterAgreement(v, n, compared[v], alike[v] / compared[v] if compared[v] else None)
        for v, n in votes.items()
        if n > 1
    ]
    return sorted(
        table, key=lambda r: (r.alike is None, r.alike if r.alike is not None else 0, r.voter)
    )
