"""A linear layer with low-rank adapters in few passes over its states.

PEFT's own layer turns the states into the adapters' float32, which autocast turns back, and scales
and adds the adapters' part in passes of their own: over wide states these take as long as the
products do. Here that part is added by the product which makes it, and the backward pass does the
same. Weights stay PEFT's, and so do the names they are saved by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def take_few_passes(model: nn.Module) -> None:
    """Let PEFT's adapted linear layers in the model compute as this module does."""
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if type(layer) is Linear:
            layer.__class__ = _layer_class()


@cache
def _layer_class() -> type[nn.Module]:
    from peft.tuners.lora import Linear

    class FewPasses(Linear):  # type: ignore[misc,unused-ignore]  # PEFT is untyped
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            name, x = _plain_set(self), in_autocasts_type(x)
            if name is not None and not torch.is_autocast_enabled(x.device.type):
                name = name if x.dtype == self.lora_A[name].weight.dtype else None
            if name is None or args or kwargs:
                found: Tensor = super().forward(x, *args, **kwargs)
                return found
            scale = float(self.scaling[name])
            return adapted(self.base_layer, x, self.lora_A[name], self.lora_B[name], scale)

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
    frozen = not weight.requires_grad  # a gradient of its own is not among those made here
    if torch.is_grad_enabled() and frozen and weight.dtype == states.dtype:
        matrix = weight.T if isinstance(base, nn.Linear) else weight
        return adapted_linear(states, matrix, base.bias, down.weight, up.weight, scale)
    # Autocast keeps what it has made of a small weight; `to` would make it anew.
    plain, own = base(states), up(down(states))
    return torch.add(plain, own, alpha=scale).to(plain.dtype)


def adapted_linear(
    states: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Return states W + bias + scale (states A^T) B^T, with gradients of all but W.

    Shapes: states (..., in), weight W (in, out), bias (out,), down A (rank, in), up B (out, rank).
    What A and B are of more than the others' type is rounded off for the products alone: their
    gradients come in their own type.
    Source: LoRA, arXiv:2106.09685 section 4.1.
    """
    apply: Callable[..., Tensor] = _AdaptedLinear.apply
    found = apply(states.flatten(0, -2), weight, bias, down, up, scale)
    return found.view(*states.shape[:-1], found.shape[-1])


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
        down, up = down.to(states.dtype), up.to(states.dtype)
        with torch.autocast(states.device.type, enabled=False):
            inside = _scaled(states, down.T, scale)
            found = states @ weight if bias is None else torch.addmm(bias, states, weight)
            found.addmm_(inside, up.T)
        ctx.save_for_backward(states, weight, down, up, inside)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, down, up, inside = ctx.saved_tensors
        gradient, wanted = gradients[0], ctx.needs_input_grad
        with torch.autocast(gradient.device.type, enabled=False):
            of_inside = _scaled(gradient, up, ctx.scale)
            of_states = (gradient @ weight.T).addmm_(of_inside, down) if wanted[0] else None
            of_bias = gradient.sum(0) if wanted[2] else None
            of_down = _product(of_inside.T, states, ctx.trained)
            of_up = _product(gradient.T, inside, ctx.trained)
        return of_states, None, of_bias, of_down, of_up, None


def _scaled(one: Tensor, other: Tensor, scale: float) -> Tensor:
    """Return scale times the product, in one pass."""
    return torch.addmm(one.new_empty(()), one, other, beta=0, alpha=scale)


def _product(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in this type, which is the tensors' own or float32."""
    if dtype != one.dtype and one.device.type == "cuda":
        return torch.mm(one, other, out_dtype=dtype)
    return (one @ other).to(dtype)
