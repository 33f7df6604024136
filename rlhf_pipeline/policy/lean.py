"""A small Llama's forward pass with little around its arithmetic.

A model of a million weights spends three quarters of a decoding step in the Python around its
products: modules, hooks, a mask made anew. While it does it holds the interpreter's lock, for which
the service's event loop waits; and each time that it lets go, as it does for every product, it may
wait for the loop. Here the same arithmetic takes a tenth of the calls, and TorchScript makes all of
them in one, during which the lock is free: the loop reads and writes beside a running step.
Only decoding in service uses it; training and evaluation stay with transformers' own forward.

PyTorch has deprecated TorchScript for `torch.compile`, which needs a C++ compiler where people
serve. With a PyTorch that has it no more the same lines run in Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from rlhf_pipeline.policy.sampling import (
    draw,
    logits_of,
    output_head,
    position_ids,
    run_trunk,
    trunk_of,
)

SMALL = 2**25  # weights: beyond, arithmetic takes the time, and copies of weights the memory

Forward = Callable[[Tensor, Tensor, DynamicCache], Tensor]
"""From ids (B, T), whose rows' first `starts` (B,) places with the cache's are padding, to the next
token's logits (B, V) float32; the cache then holds these ids too."""

Function = TypeVar("Function", bound=Callable[..., Any])


def forward_of(model: PreTrainedModel) -> Forward:
    """Return the model's forward pass: `LeanLlama` where that can be, else its own.

    It is for inference alone: weights that change later are not seen.
    """
    return LeanLlama(model) if can_lean(model) else partial(plain_forward, model)


def plain_forward(
    model: PreTrainedModel, ids: Tensor, starts: Tensor, cache: DynamicCache
) -> Tensor:
    """Return what a `Forward` does, as transformers computes it."""
    T = ids.shape[1]
    places = torch.arange(cache.get_seq_length() + T, device=ids.device)
    mask = places >= starts[:, None]
    hidden = run_trunk(trunk_of(model), ids, mask.long(), position_ids(mask)[:, -T:], cache)
    return logits_of(model, hidden[:, -1]).float()


def can_lean(model: PreTrainedModel) -> bool:
    """Say whether `LeanLlama` computes what the model does, and is worth its copies of weights."""
    if type(model) is not LlamaForCausalLM:
        return False
    config: Any = model.config
    return (
        config._attn_implementation == "sdpa"
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] == "default"  # others change with the length
        and all(weights.dtype == torch.float32 for weights in model.parameters())
        and sum(weights.numel() for weights in model.parameters()) <= SMALL
        # Adapters wrap the layers that they change, and the weight one reads there is the base's.
        and not any(hasattr(part, "base_layer") for part in model.modules())
    )


@dataclass(frozen=True, slots=True)
class _Layers:
    """The weights, a list entry a layer; those that read the same states stand together."""

    before: list[Tensor] = field(default_factory=list)  # (H,) of the norm before attention
    heads: list[Tensor] = field(default_factory=list)  # (H, (q + 2 kv) heads * D)
    heads_bias: list[Tensor | None] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)  # (q heads * D, H)
    out_bias: list[Tensor | None] = field(default_factory=list)
    between: list[Tensor] = field(default_factory=list)  # (H,) of the norm before the MLP
    gate_up: list[Tensor] = field(default_factory=list)  # (H, 2 * inner)
    gate_up_bias: list[Tensor | None] = field(default_factory=list)
    down: list[Tensor] = field(default_factory=list)  # (inner, H)
    down_bias: list[Tensor | None] = field(default_factory=list)


class LeanLlama:
    """A Llama's forward pass over a cache.

    Source: the arithmetic is transformers' modeling_llama.py; a test holds it against that.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        config, trunk = model.config, model.model
        embedding, head = trunk.embed_tokens.weight.detach(), output_head(model)
        width = int(trunk.layers[0].self_attn.head_dim)
        places = torch.arange(config.max_position_embeddings, device=embedding.device)
        cos, sin = trunk.rotary_emb(embedding, places[None])
        half = width // 2
        # A half turned is its neighbour, the first with its sign changed: the sign is kept here.
        sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        layers = _Layers()
        for layer in trunk.layers:
            attention, mlp = layer.self_attn, layer.mlp
            reading = attention.q_proj, attention.k_proj, attention.v_proj
            layers.before.append(layer.input_layernorm.weight.detach())
            _join(reading, layers.heads, layers.heads_bias)
            _join((attention.o_proj,), layers.out, layers.out_bias)
            layers.between.append(layer.post_attention_layernorm.weight.detach())
            _join((mlp.gate_proj, mlp.up_proj), layers.gate_up, layers.gate_up_bias)
            _join((mlp.down_proj,), layers.down, layers.down_bias)
        self.weights = (
            *(embedding, cos[0], sin),  # (V, H), (context, D), (context, D)
            *(getattr(layers, each.name) for each in fields(layers)),
            *(trunk.norm.weight.detach(), head.weight.detach().T.contiguous()),  # (H,), (H, V)
            None if head.bias is None else head.bias.detach(),
            *(config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps),
        )
        self.kept = embedding.new_empty(1, config.num_key_value_heads, 1, width)  # by a cache
        self.run = scripted(_run)

    def __call__(self, ids: Tensor, starts: Tensor, cache: DynamicCache) -> Tensor:
        """Return the next token's logits, as `Forward` says."""
        rows, new = ids.shape
        rooms = [layer.make_room(rows, new, self.kept, self.kept) for layer in cache.layers]
        keys, values = [keys for keys, _ in rooms], [values for _, values in rooms]
        past = cache.get_seq_length()
        logits, keys, values = self.run(ids, starts, past, keys, values, *self.weights)
        for layer, *seen in zip(cache.layers, keys, values, strict=True):
            layer.keys, layer.values = seen
        return logits


def _run(
    ids: Tensor,
    starts: Tensor,
    past: int,
    keys: list[Tensor],
    values: list[Tensor],
    embedding: Tensor,
    cosines: Tensor,
    sines: Tensor,
    before: list[Tensor],
    heads: list[Tensor],
    heads_bias: list[Tensor | None],
    out: list[Tensor],
    out_bias: list[Tensor | None],
    between: list[Tensor],
    gate_up: list[Tensor],
    gate_up_bias: list[Tensor | None],
    down: list[Tensor],
    down_bias: list[Tensor | None],
    norm: Tensor,
    head: Tensor,
    head_bias: Tensor | None,
    queries: int,
    pairs: int,
    eps: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the last places' logits (B, V), and keys and values (B, kv heads, past + T, D) each.

    Those are views of the cache's buffers; the last T places are written here.
    """
    states = F.embedding(ids, embedding)
    B, T = ids.shape
    turned, D, length = queries + pairs, cosines.shape[-1], past + T
    places = torch.arange(length, device=ids.device)
    mask = places >= starts[:, None]
    positions = (places[past:] - starts[:, None]).clamp(min=0)
    cos, sin = cosines[positions][:, :, None], sines[positions][:, :, None]
    seen = _seen(mask, T)
    all_keys, all_values = [k[:B, :, :length] for k in keys], [v[:B, :, :length] for v in values]
    for n in range(len(before)):
        normed = _normed(states, before[n], eps)
        split = _linear(normed, heads[n], heads_bias[n]).view(B, T, turned + pairs, D)
        turning = split[:, :, :turned]
        turning = turning * cos + turning.roll(D // 2, -1) * sin
        all_keys[n][:, :, past:] = turning[:, :, queries:].transpose(1, 2)
        all_values[n][:, :, past:] = split[:, :, turned:].transpose(1, 2)
        asking = turning[:, :, :queries].transpose(1, 2)
        if T == 1 and queries == pairs:  # of one token each plain products are the faster
            fits = torch.matmul(asking * D**-0.5, all_keys[n].transpose(2, 3))
            if seen is not None:
                fits = fits.masked_fill(~seen, -torch.inf)
            told = torch.matmul(fits.softmax(-1), all_values[n])
        else:
            told = F.scaled_dot_product_attention(
                asking, all_keys[n], all_values[n], seen, enable_gqa=queries != pairs
            )
        states = states + _linear(told.transpose(1, 2).reshape(B, T, -1), out[n], out_bias[n])
        normed = _normed(states, between[n], eps)
        gate, up = _linear(normed, gate_up[n], gate_up_bias[n]).chunk(2, dim=-1)
        states = states + _linear(F.silu(gate) * up, down[n], down_bias[n])
    return _linear(_normed(states[:, -1], norm, eps), head, head_bias), all_keys, all_values


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the states times a weight (in, out): few rows times that are faster than its turn."""
    found = torch.matmul(states, weight)
    return found if bias is None else found + bias


def _normed(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `F.rms_norm`, which without gradients makes more passes over the states."""
    return states * torch.rsqrt((states * states).mean(-1, keepdim=True) + eps) * weight


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


def drawn(
    logits: Tensor, uniforms: Tensor, temperature: float, top_p: float
) -> tuple[Tensor, Tensor]:
    """Return a token for each row of logits (N, V), and whether these are numbers, both (N,).

    The token is that of `sampling.draw`; of a row that is not sound it is any.
    """
    sound = logits.amax(-1).isfinite()  # NaN is the largest of all
    if not bool(sound.all()):
        logits = logits.where(sound[:, None], torch.zeros_like(logits))
    tokens, _ = draw(logits, uniforms, temperature, 0, top_p)
    return tokens, sound


def scripted(function: Function) -> Function:
    """Return the function as TorchScript, or as it is where there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        try:
            found: Function = torch.jit.script(function)
        except (AttributeError, RuntimeError):
            return function
    return found


def _join(linears: Sequence[nn.Linear], weights: list[Tensor], biases: list[Tensor | None]) -> None:
    """Add the weight, and the bias if there is one, of layers that read the same states."""
    those = [linear.bias.detach() for linear in linears if linear.bias is not None]
    weights.append(torch.cat([linear.weight.detach() for linear in linears]).T.contiguous())
    biases.append(torch.cat(those) if those else None)
