"""A small Llama's forward pass with little around its arithmetic.

A model of a million weights spends three quarters of a decoding step in the Python around its
products: modules, hooks, a mask made anew. While it does it holds the interpreter's lock, for which
the service's event loop waits; and each time that it lets go, as it does for every product, it may
wait for the loop. Here the same arithmetic takes a tenth of the calls, and TorchScript makes all of
them in one, for as many tokens as nobody has to hear of one by one. The lock is free meanwhile: the
loop reads and writes beside it.
Only decoding in service uses it; training and evaluation stay with transformers' own forward.
"""

# No annotations from __future__ here: TorchScript reads the types of a NamedTuple's fields.
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from rlhf_pipeline.policy.cache import make_room, show
from rlhf_pipeline.policy.sampling import (
    draw,
    logits_of,
    output_head,
    position_ids,
    run_trunk,
    trunk_of,
)
from rlhf_pipeline.policy.scripting import scripted

SMALL = 2**25  # weights: beyond, arithmetic takes the time, and copies of weights the memory


class Drawing(NamedTuple):
    """How the next tokens of B rows are drawn, and how many."""

    uniforms: Tensor  # (B, most), a random number from 0 to 1 for each token
    settings: list[tuple[float, float]]  # temperature and top_p, each once
    alike: list[Tensor]  # the rows of each setting; read where there are several
    eos_id: int
    enough: Tensor  # (1,) anything but 0, from whatever thread: this token is the last for now


Writer = Callable[[Tensor, Tensor, DynamicCache, Drawing], tuple[Tensor, Tensor]]
"""From ids (B, T), whose rows' first `starts` (B,) places with the cache's are padding, to the next
tokens (B, n) and whether the logits of each were numbers, (B, n). At least one; no more after
one that ends a row, one that is not sound, or `enough`. The cache then holds all but the last."""


def writer_of(model: PreTrainedModel) -> Writer:
    """Return what writes with the model: `LeanLlama` where that can be, else its own forward pass.

    It is for inference alone: weights that change later are not seen.
    """
    return LeanLlama(model).write if can_lean(model) else partial(plain_write, model)


def plain_write(
    model: PreTrainedModel, ids: Tensor, starts: Tensor, cache: DynamicCache, drawing: Drawing
) -> tuple[Tensor, Tensor]:
    """Write one token in every row, as transformers computes it."""
    logits = plain_forward(model, ids, starts, cache)
    tokens, sound = drawn(logits, drawing.uniforms[:, 0], drawing)
    return tokens[:, None], sound[:, None]


def plain_forward(
    model: PreTrainedModel, ids: Tensor, starts: Tensor, cache: DynamicCache
) -> Tensor:
    """Return the next token's logits (B, V) float32; the cache then holds these ids too."""
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


class _Layer(NamedTuple):
    """A layer's weights, those that read the same states together."""

    before: Tensor  # (H,) of the norm before attention
    heads: Tensor  # (H, (q + 2 kv) heads * D)
    heads_bias: Tensor | None
    out: Tensor  # (q heads * D, H)
    out_bias: Tensor | None
    between: Tensor  # (H,) of the norm before the MLP
    gate_up: Tensor  # (H, 2 * inner)
    gate_up_bias: Tensor | None
    down: Tensor  # (inner, H)
    down_bias: Tensor | None


class _Weights(NamedTuple):
    embedding: Tensor  # (V, H)
    cosines: Tensor  # (context, D)
    sines: Tensor  # (context, D), the first half's sign changed
    layers: list[_Layer]
    norm: Tensor  # (H,)
    head: Tensor  # (H, V)
    head_bias: Tensor | None
    queries: int  # heads
    pairs: int  # heads of keys and values
    eps: float  # of the norms


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
        self.weights = _Weights(
            embedding,
            cos[0],
            sin,
            [_layer(layer) for layer in trunk.layers],
            trunk.norm.weight.detach(),
            head.weight.detach().T.contiguous(),
            None if head.bias is None else head.bias.detach(),
            config.num_attention_heads,
            config.num_key_value_heads,
            config.rms_norm_eps,
        )
        self.kept = embedding.new_empty(1, config.num_key_value_heads, 1, width)  # by a cache
        self.written = scripted(_written)

    def write(
        self, ids: Tensor, starts: Tensor, cache: DynamicCache, drawing: Drawing
    ) -> tuple[Tensor, Tensor]:
        """Write tokens, as `Writer` says."""
        rows, new = ids.shape
        new += drawing.uniforms.shape[1] - 1  # the last one is not read yet
        past, buffers = cache.get_seq_length(), make_room(cache, rows, new, self.kept)
        tokens, sound, seen = self.written(ids, starts, past, buffers, self.weights, drawing)
        show(cache, seen)
        return tokens, sound


def _written(
    ids: Tensor,
    starts: Tensor,
    past: int,
    buffers: list[Tensor],
    weights: _Weights,
    drawing: Drawing,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return what `Writer` does, and keys and values as `_run`."""
    tokens: list[Tensor] = []
    sound: list[Tensor] = []
    seen = buffers
    for n in range(drawing.uniforms.shape[1]):
        logits, seen = _run(ids, starts, past, buffers, weights)
        token, is_sound = drawn(logits, drawing.uniforms[:, n], drawing)
        tokens.append(token)
        sound.append(is_sound)
        if bool(drawing.enough[0]) or bool(((token == drawing.eos_id) | ~is_sound).any()):
            break
        past += ids.shape[1]
        ids = token[:, None]
    return torch.stack(tokens, 1), torch.stack(sound, 1), seen


def _run(
    ids: Tensor, starts: Tensor, past: int, buffers: list[Tensor], w: _Weights
) -> tuple[Tensor, list[Tensor]]:
    """Return the last places' logits (B, V), and keys and values in turn, each (B, kv heads,
    past + T, D).

    Those are views of the cache's buffers; the last T places are written here.
    """
    states = F.embedding(ids, w.embedding)
    B, T = ids.shape
    turned, D, length = w.queries + w.pairs, w.cosines.shape[-1], past + T
    places = torch.arange(length, device=ids.device)
    mask = places >= starts[:, None]
    positions = (places[past:] - starts[:, None]).clamp(min=0)
    cos, sin = w.cosines[positions][:, :, None], w.sines[positions][:, :, None]
    visible = _visible(mask, T)
    seen = [buffer[:B, :, :length] for buffer in buffers]
    for n, layer in enumerate(w.layers):
        keys, values = seen[2 * n], seen[2 * n + 1]
        normed = _normed(states, layer.before, w.eps)
        split = _linear(normed, layer.heads, layer.heads_bias).view(B, T, turned + w.pairs, D)
        turning = split[:, :, :turned]
        turning = turning * cos + turning.roll(D // 2, -1) * sin
        keys[:, :, past:] = turning[:, :, w.queries :].transpose(1, 2)
        values[:, :, past:] = split[:, :, turned:].transpose(1, 2)
        asking = turning[:, :, : w.queries].transpose(1, 2)
        if T == 1 and w.queries == w.pairs:  # of one token each plain products are the faster
            fits = torch.matmul(asking * D**-0.5, keys.transpose(2, 3))
            if visible is not None:
                fits = fits.masked_fill(~visible, -torch.inf)
            told = torch.matmul(fits.softmax(-1), values)
        else:
            told = F.scaled_dot_product_attention(
                asking, keys, values, visible, enable_gqa=w.queries != w.pairs
            )
        states = states + _linear(told.transpose(1, 2).reshape(B, T, -1), layer.out, layer.out_bias)
        normed = _normed(states, layer.between, w.eps)
        gate, up = _linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        states = states + _linear(F.silu(gate) * up, layer.down, layer.down_bias)
    return _linear(_normed(states[:, -1], w.norm, w.eps), w.head, w.head_bias), seen


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the states times a weight (in, out): few rows times that are faster than its turn."""
    found = torch.matmul(states, weight)
    return found if bias is None else found + bias


def _normed(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `F.rms_norm`, which without gradients makes more passes over the states."""
    return states * torch.rsqrt((states * states).mean(-1, keepdim=True) + eps) * weight


def _visible(mask: Tensor, T: int) -> Tensor | None:
    """Return which of L places each of the last T sees, (B, 1, T, L); None where all see all.

    Padding sees itself: a row of softmax over nothing would be no numbers, in the cache too.
    """
    L = mask.shape[1]
    if T == 1:
        return None if bool(mask.all()) else mask[:, None, None]
    places = torch.arange(L, device=mask.device)
    own = places[L - T :, None]
    return ((places <= own) & mask[:, None, None]) | (places == own)


def drawn(logits: Tensor, uniforms: Tensor, drawing: Drawing) -> tuple[Tensor, Tensor]:
    """Return a token for each row of logits (B, V), and whether these are numbers, both (B,).

    The token is that of `sampling.draw`; of a row that is not sound it is any.
    """
    if len(drawing.settings) == 1:
        temperature, top_p = drawing.settings[0]
        tokens, logprobs = draw(logits, uniforms, temperature, 0, top_p)
        return tokens, logprobs.isfinite()
    tokens = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    sound = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for n, (temperature, top_p) in enumerate(drawing.settings):
        some = drawing.alike[n]
        tokens[some], logprobs = draw(logits[some], uniforms[some], temperature, 0, top_p)
        sound[some] = logprobs.isfinite()
    return tokens, sound


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        layer.input_layernorm.weight.detach(),
        *_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        *_joined(attention.o_proj),
        layer.post_attention_layernorm.weight.detach(),
        *_joined(mlp.gate_proj, mlp.up_proj),
        *_joined(mlp.down_proj),
    )


def _joined(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the weight, and the bias if there is one, of layers that read the same states."""
    weights = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return weights.T.contiguous(), torch.cat(biases) if biases else None
