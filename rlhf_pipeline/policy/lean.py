"""A small Llama's forward pass with little around its arithmetic.

A model of a million weights spends three quarters of a decoding step in the Python around its
products: modules, hooks, a mask made anew. While it does it holds the interpreter's lock, for which
the service's event loop waits. Here the same arithmetic takes a tenth of the calls. Only decoding
in service uses it; training and evaluation stay with transformers' own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from rlhf_pipeline.policy.sampling import run_trunk

SMALL = 2**25  # weights: beyond, arithmetic takes the time, and copies of weights the memory

Forward = Callable[[Tensor, Tensor, Tensor, DynamicCache], Tensor]


def forward_of(trunk: nn.Module) -> Forward:
    """Return `run_trunk` of this trunk: by `LeanLlama` where it can, else as it is.

    It is for inference alone: weights that change later are not seen.
    """
    return LeanLlama(trunk) if can_lean(trunk) else partial(run_trunk, trunk)


def can_lean(trunk: nn.Module) -> bool:
    """Say whether `LeanLlama` computes what the trunk does, and is worth its copies of weights."""
    if type(trunk) is not LlamaModel:
        return False
    config: Any = trunk.config
    return (
        config._attn_implementation == "sdpa"
        and config.rope_parameters["rope_type"] == "default"  # others change with the length
        and all(weights.dtype == torch.float32 for weights in trunk.parameters())
        and sum(weights.numel() for weights in trunk.parameters()) <= SMALL
        # Adapters wrap the layers that they change, and the weight one reads there is the base's.
        and not any(hasattr(part, "base_layer") for part in trunk.modules())
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights; those that read the same states stand together."""

    before: Tensor  # (H,) of the norm before attention
    heads: Tensor  # ((q + 2 kv) heads * D, H): queries, keys, values
    heads_bias: Tensor | None
    out: nn.Linear
    between: Tensor  # (H,) of the norm before the MLP
    gate_up: Tensor  # (2 * inner, H)
    gate_up_bias: Tensor | None
    down: nn.Linear
    act: Callable[[Tensor], Tensor]


class LeanLlama:
    """A Llama trunk's forward pass over a cache.

    Source: the arithmetic is transformers' modeling_llama.py; a test holds it against that.
    """

    def __init__(self, trunk: LlamaModel) -> None:
        config = trunk.config
        self.width = int(trunk.layers[0].self_attn.head_dim)
        self.queries, self.keys = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.embedding, self.norm = trunk.embed_tokens.weight, trunk.norm.weight
        places = torch.arange(config.max_position_embeddings, device=self.embedding.device)
        cos, sin = trunk.rotary_emb(self.embedding, places[None])
        half = self.width // 2
        self.cos = cos[0]  # (context, D)
        # A half turned is its neighbour, the first with its sign changed: the sign is kept here.
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        self.layers = [_layer(layer) for layer in trunk.layers]

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Return the last hidden states (B, T, H); mask (B, past + T), ids and positions (B, T)."""
        B, T = ids.shape
        states = F.embedding(ids, self.embedding)
        shape, H = (B, T, self.queries + 2 * self.keys, self.width), states.shape[-1]
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        seen = _seen(mask.bool(), T)
        turned = self.queries + self.keys
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            normed = F.rms_norm(states, (H,), layer.before, self.eps)
            heads = F.linear(normed, layer.heads, layer.heads_bias).view(shape)
            turning = heads[:, :, :turned]
            turning = turning * cos + turning.roll(self.width // 2, -1) * sin
            queries, keys = turning.transpose(1, 2).split([self.queries, self.keys], dim=1)
            keys, values = kept.update(keys, heads[:, :, turned:].transpose(1, 2))
            attended = F.scaled_dot_product_attention(
                queries, keys, values, seen, enable_gqa=self.queries != self.keys
            )
            states = states + layer.out(attended.transpose(1, 2).reshape(B, T, -1))
            normed = F.rms_norm(states, (H,), layer.between, self.eps)
            gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            states = states + layer.down(layer.act(gate) * up)
        return F.rms_norm(states, (H,), self.norm, self.eps)


def _seen(mask: Tensor, T: int) -> Tensor | None:
    """Return which of L places each of the last T sees, (B, 1, T, L); None where all see all.

    Padding sees itself: a row of softmax over nothing would be no numbers, in the cache too.
    """
    L = mask.shape[1]
    if T == 1:
        return None if bool(mask.all()) else mask[:, None, None]
    places = torch.arange(L, device=mask.device)
    own = places[L - T :, None]
    return ((places <= own) & mask[:, None, None]) | (places == own)


def _layer(layer: LlamaDecoderLayer) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    heads = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = _joined(mlp.gate_proj, mlp.up_proj)
    return _Layer(
        layer.input_layernorm.weight,
        *heads,
        attention.o_proj,
        layer.post_attention_layernorm.weight,
        *gate_up,
        mlp.down_proj,
        mlp.act_fn,
    )


def _joined(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the weights, and the biases if there are any, of layers that read the same states."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weight = torch.cat([linear.weight for linear in linears]).detach()
    return weight, torch.cat(biases).detach() if biases else None
