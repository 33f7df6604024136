"""A linear layer with low-rank adapters in few passes over its states.

PEFT's own layer turns the states into the adapters' float32, which autocast turns back, and scales
and adds the adapters' part in passes of their own: over wide states these take as long as the
products do. Here that part is added by the product which makes it, and the backward pass does the
same. Weights stay PEFT's, and so do the names they are saved by.

Decoding takes few tokens at a time, and of few a GPU makes the product with adapters no faster than
one with a hundred times their weights. So there the base's weights have room beside them, in which
adapters are while text is decoded, and one product is made of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

ROOMY = frozenset({"cuda"})  # kinds of device on which adapters get room beside the base


def take_few_passes(model: nn.Module) -> None:
    """Let PEFT's adapted linear layers in the model compute as this module does."""
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if type(layer) is Linear:
            layer.__class__ = _layer_class()
        if isinstance(layer, Linear):
            _make_room(layer.base_layer, max(layer.r.values()))


def _make_room(base: Any, rank: int) -> None:
    """Let weights of half of float32 lie where so many columns more fit beside them."""
    if not isinstance(base, (nn.Linear, Conv1D)) or _with_room(base, rank) is not None:
        return
    weight = base.weight.detach()
    if weight.device.type not in ROOMY or weight.dtype == torch.float32:
        return
    inside, out = weight.T.shape if isinstance(base, nn.Linear) else weight.shape
    if isinstance(base, nn.Linear):
        wide = weight.new_zeros(out + rank, inside).T
        wide[:, :out] = weight.T
        base.weight.data = wide[:, :out].T
    else:
        wide = weight.new_zeros(inside, out + rank)
        wide[:, :out] = weight
        base.weight.data = wide[:, :out]
    base.with_room = wide


def _with_room(base: Any, rank: int) -> Tensor | None:
    """Return the layer's weights and the columns beside them, (in, out + rank), where there are."""
    wide: Tensor | None = getattr(base, "with_room", None)
    # Weights that were moved or copied since have left their room.
    if wide is None or wide.data_ptr() != base.weight.data_ptr():
        return None
    columns = rank + (base.weight.shape[0] if isinstance(base, nn.Linear) else base.nf)
    return wide[:, :columns] if columns <= wide.shape[1] else None


@cache
def _layer_class() -> type[nn.Module]:
    from peft.tuners.lora import Linear

    class FewPasses(Linear):  # type: ignore[misc,unused-ignore]  # PEFT is untyped
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            name = None if args or kwargs else _plain_set(self)
            cast = torch.is_autocast_enabled(x.device.type)
            if name is None or not (cast or x.dtype == self.lora_A[name].weight.dtype):
                found: Tensor = super().forward(x, *args, **kwargs)
                return found
            down, up, scale = self.lora_A[name], self.lora_B[name], float(self.scaling[name])
            return adapted(self.base_layer, in_autocasts_type(x), down, up, scale)

    return FewPasses


def _plain_set(layer: Any) -> str | None:
    """Return the one set of plain matrices that computes; None where there are other sets."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    plain = (
        len(names) == 1
        and type(layer.base_layer) in (nn.Linear, Conv1D)
        and not (layer.disable_adapters or layer.merged or layer.lora_variant)
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and layer.lora_B[names[0]].bias is None
    )
    return names[0] if plain else None


def in_autocasts_type(states: Tensor) -> Tensor:
    """Return the states as autocast would hand them to each product, for all of them at once."""
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states


def adapted(
    base: nn.Linear | Conv1D, states: Tensor, down: nn.Linear, up: nn.Linear, scale: float
) -> Tensor:
    """Return what the layer says of states (..., in), its adapters' part added, (..., out)."""
    weight: Any = base.weight
    if weight.dtype != states.dtype or weight.requires_grad:
        # Autocast turns that weight, or it has a gradient of its own: none of those made here.
        plain, own = base(states), up(down(states))
        return torch.add(plain, own, alpha=scale).to(plain.dtype)
    beside = None if torch.is_grad_enabled() else _with_adapters_beside(base, down.weight)
    if beside is not None:
        return _in_one_product(states, *beside, up.weight, scale)
    matrix = weight.T if isinstance(base, nn.Linear) else weight
    return adapted_linear(states, matrix, base.bias, down.weight, up.weight, scale)


def _with_adapters_beside(
    base: nn.Linear | Conv1D, down: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    """Return the base's weights with the adapters' first beside them, and its bias with zeros.

    Shapes: (in, out + rank) and (out + rank,). None outside `rounding_once`, where they would have
    to be put there anew, and without room.
    """
    rounded, rank = _ROUNDED.get(), down.shape[0]
    wide = None if rounded is None else _with_room(base, rank)
    if rounded is None or wide is None:
        return None
    if rounded.get(base.weight) is not down:
        wide[:, -rank:] = down.detach().T
        rounded[base.weight] = down
        if base.bias is not None:
            rounded[base.bias] = nn.functional.pad(base.bias, (0, rank))
    return wide, None if base.bias is None else rounded[base.bias]


def _in_one_product(
    states: Tensor, wide: Tensor, bias: Tensor | None, up: Tensor, scale: float
) -> Tensor:
    """Return what `adapted_linear` does, of weights with the adapters' first beside them."""
    rows, out = states.flatten(0, -2), up.shape[0]
    with _as_they_are(rows):
        both = rows @ wide if bias is None else torch.addmm(bias, rows, wide)
        found = both[:, :out].addmm_(both[:, out:], _in_type(up, rows.dtype).T, alpha=scale)
    return found.view(*states.shape[:-1], -1)


_ROUNDED: ContextVar[dict[Tensor, Tensor] | None] = ContextVar("_ROUNDED", default=None)


@contextmanager
def rounding_once() -> Iterator[None]:
    """Round adapters off once for all that this thread does inside, where no weight may change.

    An optimizer's fused step leaves no trace on a weight that could tell a later call of it.
    """
    token = _ROUNDED.set({})
    try:
        yield
    finally:
        _ROUNDED.reset(token)


def _in_type(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in this type, without its gradient."""
    rounded = _ROUNDED.get()
    if weight.dtype == dtype or rounded is None:
        return weight.detach().to(dtype)
    if weight not in rounded or rounded[weight].dtype != dtype:
        rounded[weight] = weight.detach().to(dtype)
    return rounded[weight]


def adapted_linear(
    states: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Return states W + bias + scale (states A^T) B^T, with gradients of all but W.

    Shapes: states (..., in), weight W (in, out), bias (out,), down A (rank, in), up B (out, rank).
    What A and B are of more than the others' type is rounded off for the products alone: their
    gradients come in their own type.
    Source: LoRA, arXiv:2106.09685 section 4.1.
    """
    if not torch.is_grad_enabled():
        return _with_adapters(states, weight, bias, down, up, scale)[0]
    apply: Callable[..., Tensor] = _AdaptedLinear.apply
    return apply(states, weight, bias, down, up, scale)


def _with_adapters(
    states: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what the layer says, (..., out), and what its backward pass reads."""
    rows = states.flatten(0, -2)
    down, up = _in_type(down, rows.dtype), _in_type(up, rows.dtype)
    with _as_they_are(rows):
        inside = _scaled(rows, down.T, scale)
        found = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
        found.addmm_(inside, up.T)
    return found.view(*states.shape[:-1], -1), (rows, weight, down, up, inside)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.scale, ctx.trained = scale, down.dtype
        found, read = _with_adapters(states, weight, bias, down, up, scale)
        ctx.save_for_backward(*read)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, inside = ctx.saved_tensors
        wanted, shape = ctx.needs_input_grad, gradients[0].shape[:-1]
        gradient = gradients[0].flatten(0, -2)
        with _as_they_are(gradient):
            of_inside = _scaled(gradient, up, ctx.scale)
            of_states = (gradient @ weight.T).addmm_(of_inside, down) if wanted[0] else None
            of_bias = gradient.sum(0) if wanted[2] else None
            of_down = _product(of_inside.T, rows, ctx.trained)
            of_up = _product(gradient.T, inside, ctx.trained)
        if of_states is not None:
            of_states = of_states.view(*shape, -1)
        return of_states, None, of_bias, of_down, of_up, None


def _as_they_are(states: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast leaves tensors of the states' type alone."""
    kind = states.device.type
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != states.dtype
    return torch.autocast(kind, enabled=False) if cast else nullcontext()


def _scaled(one: Tensor, other: Tensor, scale: float) -> Tensor:
    """Return scale times the product, in one pass."""
    return torch.addmm(one.new_empty(()), one, other, beta=0, alpha=scale)


def _product(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in this type, which is the tensors' own or float32."""
    if dtype != one.dtype and one.device.type == "cuda":
        return torch.mm(one, other, out_dtype=dtype)
    return (one @ other).to(dtype)
