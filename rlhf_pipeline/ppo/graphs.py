"""Microbatches as CUDA graphs.

A pass over a microbatch with adapters is some two thousand kernels, and Python takes longer to ask
for them than a GPU to compute them. Here it is shown those of each set of shapes that comes back,
and from then on does all of them at one call. So that shapes do come back, microbatches are filled
up with padding to round numbers of tokens, which a sixteenth of the rectangle bounds.

Graphs last as long as the weights stay where they are; all share one pool of memory, which stays
taken between updates, so there are none where it would bring the GPU near its end. The gradient of
each is held, once, against the one that Python asked for: where the two differ, or a GPU refuses,
training goes on without and says so. RLHF_CUDA_GRAPHS=0 keeps it without.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.policy import captured
from rlhf_pipeline.policy.captured import Step
from rlhf_pipeline.policy.packed import TILE, Room
from rlhf_pipeline.ppo.rollout import Rollouts

MOST = 32  # graphs kept: beyond that, shapes do not come back
AGREE = 0.05  # of the gradient's norm: kernels may be others, whose roundings add up in sums near 0
NEAR_ITS_END = 0.8  # of a GPU's memory: what graphs may bring its peak to

Pass = Callable[[Rollouts, Tensor, Room], tuple[list[Tensor], dict[str, Tensor]]]
"""From a microbatch, its minibatch's token count, (), and its room to gradients and facts, ()."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """What must be the same for a graph to fit a microbatch."""

    rows: int
    prompt: int  # columns
    completion: int  # columns
    room: Room
    has_support: bool
    has_weights: bool

    def widened(self, few: Rollouts) -> Rollouts:
        """Return the microbatch with columns of padding up to these."""
        return few.widened(self.prompt, self.completion)


@dataclass(frozen=True, slots=True)
class Shown:
    """A graph, what it reads and where it leaves the facts; gradients are left with the others'."""

    few: Rollouts
    token_count: Tensor  # ()
    replay: Step
    names: tuple[str, ...]  # of the facts


@dataclass
class Graphs:
    """The graphs of one learner's microbatches."""

    _seen: Counter[Shape] = field(default_factory=Counter)
    _shown: dict[Shape, Shown] = field(default_factory=dict)
    _gradients: list[Tensor] = field(default_factory=list)
    _addresses: list[int] = field(default_factory=list)
    _pool: Any = None
    _refused: bool = False

    def add_gradients(
        self,
        few: Rollouts,
        token_count: int,
        compute: Pass,
        trained: Sequence[nn.Parameter],
        every: Sequence[nn.Parameter],
    ) -> dict[str, Tensor] | None:
        """Add a microbatch's gradient to the trained weights' by a graph, and return its facts.

        None, with nothing done, where no graph fits and none is worth it yet. `every` weight that
        is read must be where it was.
        """
        addresses = [weight.data_ptr() for weight in every]
        if addresses != self._addresses:
            self.let_go()
            self._addresses = addresses
        shape = shape_of(few)
        shown = self._shown.get(shape)
        if shown is None:
            self._seen[shape] += 1
            full = len(self._shown) >= MOST
            if self._refused or full or self._seen[shape] < 2:
                return None
            return self._show(shape, few, token_count, compute, trained)
        torch._foreach_copy_(shown.few.tensors(), shape.widened(few).tensors())
        shown.token_count.fill_(token_count)
        facts = shown.replay().clone()
        _add(trained, self._gradients)
        return dict(zip(shown.names, facts, strict=True))

    def let_go(self) -> None:
        """Forget all graphs, and give their memory back."""
        self._shown.clear()
        self._seen.clear()
        self._gradients, self._pool = [], None

    def _show(
        self,
        shape: Shape,
        few: Rollouts,
        token_count: int,
        compute: Pass,
        trained: Sequence[nn.Parameter],
    ) -> dict[str, Tensor]:
        few = shape.widened(few)
        count = torch.tensor(float(token_count), device=few.values.device)
        # This also loads what a first run loads, which no capture may.
        wanted, facts = compute(few, count, shape.room)
        _add(trained, wanted)
        if not self._gradients:
            self._gradients = [torch.zeros_like(gradient) for gradient in wanted]

        def step() -> Tensor:
            gradients, found = compute(few, count, shape.room)
            torch._foreach_copy_(self._gradients, gradients)
            return torch.stack([found[name] for name in facts])

        try:
            self._pool = self._pool or captured.new_pool(count.device)
            shown = Shown(few, count, captured.cuda_graph(step, self._pool), tuple(facts))
            shown.replay()
            _check_alike(self._gradients, wanted)
            captured.check_memory(count.device, NEAR_ITS_END)
        except RuntimeError as error:
            self._refused = True
            self.let_go()
            log.warning(
                "training goes on without CUDA graphs, slower: %s; RLHF_CUDA_GRAPHS=0 tries none",
                str(error).splitlines()[0],
            )
        else:
            self._shown[shape] = shown
        return facts


def shape_of(few: Rollouts) -> Shape:
    """Return the shape of the microbatch, its tokens counted up to round numbers."""
    tokens = few.tokens
    rows, prompt = tokens.prompt_ids.shape
    completion = tokens.completion_ids.shape[1]
    prompt, completion = (-(-columns // TILE) * TILE for columns in (prompt, completion))
    chosen = tokens.completion_mask.sum(1).clamp(min=1)
    # Of a completion the last token need not be run: it predicts nothing.
    run, read = torch.stack([(tokens.prompt_mask.sum(1) + chosen - 1).sum(), chosen.sum()]).tolist()
    rectangle = rows * (prompt + completion - 1)
    room = Room(
        _rounded(run, rectangle, 16), _rounded(read, rows * completion, 8), run == rectangle
    )
    return Shape(
        rows, prompt, completion, room, tokens.support is not None, few.weights is not None
    )


def _rounded(count: int, most: int, steps: int) -> int:
    """Return the count rounded up to a multiple of a `steps`-th of the most, in whole tiles."""
    step = -(-most // (steps * TILE)) * TILE
    return min(most, -(-count // step) * step)


def _add(trained: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """Add gradients to those the weights have; they are read, not kept."""
    held = []
    for weight in trained:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        held.append(weight.grad)
    torch._foreach_add_(held, list(gradients))


def _check_alike(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Raise RuntimeError unless the two gradients are one, but for rounding."""
    apart, size = map(_norm, (torch._foreach_sub(found, wanted), wanted))
    if not apart <= AGREE * size:
        raise RuntimeError(f"gradients {apart:.3g} apart, of {size:.3g}")


def _norm(parts: Sequence[Tensor]) -> float:
    return float(torch.stack([part.norm() for part in parts]).norm())
