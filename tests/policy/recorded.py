"""What a CUDA graph does with a step, done on a CPU.

While it is captured nothing happens; what the host reads, or brings, is refused; and a replay is
the same operations on the same memory, whatever Python would do by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
READ = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.masked_scatter_backward.default,  # which selects
    aten.equal.default,
    aten.lift_fresh.default,  # torch.tensor: from the host
}
COPIES = {aten._to_copy.default, aten.copy_.default}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships no types
    """Keeps every operation, and what memory held before it was written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in READ:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for memory in tree_leaves(given):
                    self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        found = func(*args, **kwargs)
        outcomes = tree_leaves(found)
        met = [leaf for leaf in tree_leaves((args, found)) if isinstance(leaf, Tensor)]
        if func in COPIES and len({tensor.device for tensor in met}) > 1:
            raise RuntimeError(f"cannot copy between CPU and CUDA tensors while capturing: {func}")
        self.calls.append((func, args, kwargs, outcomes))
        return found


def recorded(step: Callable[[], Tensor], pool: Any = None) -> Callable[[], Tensor]:
    """Return a replay of the step, which leaves no trace of its first call."""
    with Recorder() as recorder:
        found = step()
    with torch.no_grad():
        for memory, before in reversed(list(recorder.before.values())):
            memory.copy_(before)

    def replay() -> Tensor:
        # What is kept was cast, and has its gradients.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, outcomes in recorder.calls:
                again = tree_leaves(func(*args, **kwargs))
                for outcome, other in zip(outcomes, again, strict=True):
                    if isinstance(outcome, Tensor) and outcome.data_ptr() != other.data_ptr():
                        outcome.copy_(other)
        return found

    return replay
