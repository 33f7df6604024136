"""Replay: the rollouts of the last few updates, to be trained on again beside the fresh ones.

They were sampled by policies that are no longer there. Three things are therefore made anew from
the policy and the critic as they are now: the old log-probabilities (so the first ratio is 1 for
them too), the values, and the KL penalty in the reward. What sampling thought of each token stays,
and gives its importance weight, cut off at a cap; a capped weight is a bias in return for bounded
variance. What is not corrected: the advantages follow the path that an earlier policy chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rlhf_pipeline.ppo.rollout import Tokens, join_rows, join_tokens


@dataclass(frozen=True, slots=True)
class Collected:
    """What stays true of rollouts when the policy has moved on; B completions."""

    tokens: Tokens
    logprobs: Tensor  # (B, T), nats, of the policy that sampled
    reference_logprobs: Tensor  # (B, T), nats
    scores: Tensor  # (B,), as they enter the reward
    turn: Tensor  # (B,) int64, from 0
    next_turn: Tensor  # (B,) int64, the row of the same conversation's next turn; -1 after the last

    def __len__(self) -> int:
        return len(self.tokens)


class Replay:
    """The rollouts of the last `updates` updates, oldest first; part of every checkpoint."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.earlier: list[Collected] = []

    def beside(self, fresh: Collected) -> tuple[Collected, Tensor]:
        """Return fresh and earlier rollouts as one, and for each (B,) how many updates old it is.

        The fresh ones come first.
        """
        parts = [fresh, *reversed(self.earlier)]
        ages = [torch.full((len(part),), age) for age, part in enumerate(parts)]
        return join(parts), torch.cat(ages).to(fresh.scores.device)

    def keep(self, fresh: Collected) -> None:
        """Take an update's rollouts in; the oldest leave where there are too many."""
        self.earlier = [*self.earlier, fresh][-self.updates :] if self.updates else []

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it for a checkpoint, by "place/field"."""
        return {
            f"{place}/{name}": tensor
            for place, part in enumerate(self.earlier)
            for name, tensor in _tensors(part).items()
        }

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take back what `tensors` returned."""
        places: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            place, _, name = key.partition("/")
            places.setdefault(int(place), {})[name] = tensor.to(device)
        self.earlier = [_collected(places[place]) for place in sorted(places)]


def join(parts: Sequence[Collected]) -> Collected:
    """Return the rollouts of all parts, in order, as one rectangle."""
    starts = [sum(len(part) for part in parts[:i]) for i in range(len(parts))]
    next_turns = [
        torch.where(part.next_turn < 0, -1, part.next_turn + start)
        for part, start in zip(parts, starts, strict=True)
    ]
    return Collected(
        tokens=join_tokens([part.tokens for part in parts]),
        logprobs=join_rows([part.logprobs for part in parts]),
        reference_logprobs=join_rows([part.reference_logprobs for part in parts]),
        scores=torch.cat([part.scores for part in parts]),
        turn=torch.cat([part.turn for part in parts]),
        next_turn=torch.cat(next_turns),
    )


_TOKENS = tuple(field.name for field in fields(Tokens))
_OTHERS = tuple(field.name for field in fields(Collected) if field.name != "tokens")


def _tensors(part: Collected) -> dict[str, Tensor]:
    """Return the tensors there are, by name; the support only where sampling was narrowed."""
    of_tokens = {name: getattr(part.tokens, name) for name in _TOKENS}
    there = {name: tensor for name, tensor in of_tokens.items() if tensor is not None}
    return there | {name: getattr(part, name) for name in _OTHERS}


def _collected(tensors: Mapping[str, Tensor]) -> Collected:
    tokens = Tokens(**{name: tensors[name] for name in _TOKENS if name in tensors})
    return Collected(tokens, **{name: tensors[name] for name in _OTHERS})
