"""What the composite reward says of each system, function by function, on the same prompts.

It explains training: what PPO was after, and what it got. It judges nothing; the gate does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_pipeline.evaluation.metrics import Floats, Number

if TYPE_CHECKING:
    from rlhf_pipeline.reward.composite import Breakdown

COMPOSITE = "composite"  # the column of the whole


@dataclass(frozen=True, slots=True)
class RewardPieces:
    """Means over prompts. Functions are in the recipe's order."""

    prompts: int
    weights: dict[str, float]  # function -> weight where the kept policy was
    scores: dict[str, dict[str, Number]]  # system -> function: raw score
    added: dict[str, dict[str, Number]]  # system -> function or COMPOSITE
    differences: dict[str, dict[str, Number]]  # against -> the same, candidate minus the other

    def metrics(self) -> Iterator[tuple[str, Number]]:
        """Yield every number by a flat name: SYSTEM/reward/FUNCTION/score or …/added."""
        for system in self.scores:
            for name, number in self.scores[system].items():
                yield f"{system}/reward/{name}/score", number
            for name, number in self.added[system].items():
                yield f"{system}/reward/{name}/added", number
        for against, numbers in self.differences.items():
            for name, number in numbers.items():
                yield f"vs_{against}/reward/{name}/added", number

    def to_markdown(self) -> str:
        """Return the table: a column per function, a row per system and difference."""
        head, *rest = (f"| {' | '.join(row)} |" for row in self.rows())
        rows = [head, "|---" * (len(self.weights) + 2) + "|", *rest]
        note = f"What training maximised, by function: means over {self.prompts} prompts."
        return "\n\n".join(["### Reward by function", note, "\n".join(rows)])

    def rows(self) -> list[list[str]]:
        """Return the table's cells, its head first."""
        columns = [COMPOSITE, *self.weights]
        rows = [["", *columns], ["weight", "", *(f"{w:g}" for w in self.weights.values())]]
        for system, numbers in self.added.items():
            rows.append([f"{system} got", *(f"{numbers[n].value:+.3f}" for n in columns)])
        for against, numbers in self.differences.items():
            cells = [_with_interval(numbers[name]) for name in columns]
            rows.append([f"candidate − {against}", *cells])
        for system, numbers in self.scores.items():
            cells = [f"{numbers[name].value:.3f}" for name in self.weights]
            rows.append([f"{system}, raw score", "", *cells])
        return rows

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RewardPieces:
        """Return what dataclasses.asdict gave."""
        fields = dict(value)
        for key in ("scores", "added", "differences"):
            fields[key] = {
                who: {name: Number(**number) for name, number in numbers.items()}
                for who, numbers in fields[key].items()
            }
        return cls(**fields)


def reward_pieces(
    told: Mapping[str, Sequence[Breakdown]],
    weights: Mapping[str, float],
    *,
    mean: Callable[[Floats], Number],
) -> RewardPieces:
    """Return the means of what the composite told of each system, on the same prompts in order.

    `told` has the candidate and what it is compared with; `mean` is one of the prompts' values,
    with its interval.
    """
    added = {system: _added(breakdowns, weights) for system, breakdowns in told.items()}
    scores = {
        system: {name: np.array([b.pieces[name].score for b in breakdowns]) for name in weights}
        for system, breakdowns in told.items()
    }
    return RewardPieces(
        prompts=len(told["candidate"]),
        weights=dict(weights),
        scores={s: {name: mean(of) for name, of in scores[s].items()} for s in told},
        added={s: {name: mean(of) for name, of in added[s].items()} for s in told},
        differences={
            s: {name: mean(added["candidate"][name] - of) for name, of in added[s].items()}
            for s in told
            if s != "candidate"
        },
    )


def _added(breakdowns: Sequence[Breakdown], weights: Mapping[str, float]) -> dict[str, Floats]:
    pieces = {name: np.array([b.pieces[name].added for b in breakdowns]) for name in weights}
    return {COMPOSITE: np.array([b.score for b in breakdowns]), **pieces}


def _with_interval(number: Number) -> str:
    if number.low is None or number.high is None:
        return f"{number.value:+.3f}"
    return f"{number.value:+.3f} ({number.low:+.3f} to {number.high:+.3f})"
