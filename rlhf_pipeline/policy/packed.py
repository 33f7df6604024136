"""Running sequences of different lengths end to end, so that cost follows real tokens.

A trunk sees one row holding every sequence, each with its own positions; only attention needs the
sequences apart. On a CPU it takes them one by one, unless they are all of one length; a GPU, where
many small calls are slow, and bfloat16 on a CPU, where torch's kernel is slow on short ones, get a
rectangle padded on the right. Neither needs a mask of the padding. Models that do more across
tokens than plain causal attention (sliding windows, ALiBi, recurrences) are left to the padded
path. The last layer's MLP is run for those tokens alone whose states are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, NewGELUActivation
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PACKED = "rlhf_packed"  # no mask function goes by this name, so transformers builds no mask
STEPPING = "rlhf_stepping"
TILE = 64  # tokens: what rows are rounded up to where code is compiled for each shape
PACKABLE = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2", "qwen3"})


@dataclass(frozen=True, slots=True)
class Packing:
    """Where N packed tokens belong: B sequences one after the other, of at most L tokens."""

    rows: int  # B
    lengths: list[int] | None  # (B,); None: the device alone knows them, and not all are L
    places: Tensor  # (N,), of the tokens in a rectangle of B * L
    longest: int  # L
    filler: int = 0  # tokens after the N that belong to no sequence and mean nothing
    as_on: str | None = None  # the kind of device to attend as on; None: the states' own

    @property
    def is_rectangle(self) -> bool:
        """Whether all sequences are L tokens long."""
        return self.lengths is not None and min(self.lengths) == self.longest

    def apart(self, states: Tensor) -> Tensor:
        """Return packed states (1, heads, N, width) as (B, heads, L, width), 0 after the end."""
        packed = _first(states.squeeze(0).transpose(0, 1), len(self.places))
        rows, longest = self.rows, self.longest
        if not self.is_rectangle:
            shape = (rows * longest, *packed.shape[1:])
            packed = packed.new_zeros(shape).index_copy(0, self.places, packed)
        return packed.reshape(rows, longest, *packed.shape[1:]).transpose(1, 2)

    def together(self, states: Tensor) -> Tensor:
        """Return states (B, L, heads, width) packed, (1, N, heads, width)."""
        flat = states.flatten(0, 1)
        return self.filled((flat if self.is_rectangle else flat.index_select(0, self.places))[None])

    def filled(self, states: Tensor) -> Tensor:
        """Return packed states (1, N, heads, width) with zeros for the filler."""
        return nn.functional.pad(states, (0, 0, 0, 0, 0, self.filler)) if self.filler else states


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens to run where that must be known before they are looked at.

    What is left of the room is filled with padding, which is computed and read by nobody.
    """

    tokens: int  # that the trunk runs, at least all real ones
    read: int  # whose states are read, at least all of those
    is_full: bool  # no token of the rectangle is padding


def can_pack(trunk: nn.Module) -> bool:
    """Return whether the trunk's only traffic between tokens is plain causal attention."""
    config: Any = trunk.config
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return config.model_type in PACKABLE and config._attn_implementation == "sdpa" and not slides


def packed_hidden(
    trunk: nn.Module, ids: Tensor, mask: Tensor, *, read_from: int = 0, room: Room | None = None
) -> tuple[Tensor, Tensor]:
    """Return the last hidden states (N, H) of the real tokens, and their places (N,) in B * S.

    Shapes: ids and mask (B, S); each row's real tokens stand together. They come row by row.
    Those of columns before `read_from` are finite numbers without meaning. With room for more
    tokens, some of the padding comes after them; then nothing waits for the device.
    """
    where, positions, packing, read = (
        _places_found(mask, read_from) if room is None else _places_in(room, mask, read_from)
    )
    N, fill = len(where), (0, packing.filler)
    with _attending(trunk, PACKED), _last_mlp_at(trunk, read, N + packing.filler):
        hidden: Tensor = trunk(
            input_ids=nn.functional.pad(ids.flatten()[where], fill)[None],
            position_ids=nn.functional.pad(positions, fill)[None],
            use_cache=False,
            packing=packing,
        ).last_hidden_state
    return _first(hidden.squeeze(0), N), where


Places = tuple[Tensor, Tensor, Packing, Tensor]
"""Tokens' places in B * S, their positions, what sequences they are, and which of them are read."""


def _places_found(mask: Tensor, read_from: int) -> Places:
    S = mask.shape[1]
    where = mask.flatten().nonzero()[:, 0]
    N = len(where)
    lengths = mask.sum(1)
    starts = lengths.cumsum(0) - lengths
    row = where // S
    positions = torch.arange(N, device=mask.device) - starts[row]
    longest = int(lengths.max())
    if int(lengths.min()) < longest:
        longest = whole_tiles(longest, mask.device, TILE // 4)
    filler = whole_tiles(N, mask.device) - N
    packing = Packing(len(mask), lengths.tolist(), row * longest + positions, longest, filler)
    # Tokens that are read come first, and among the others some to make their number a round one.
    is_read = nn.functional.pad(where % S >= read_from, (0, filler))
    read = true_first(is_read)[: whole_tiles(int(is_read.sum()), mask.device)]
    return where, positions, packing, read


def _places_in(room: Room, mask: Tensor, read_from: int) -> Places:
    B, S = mask.shape
    where = true_first(mask.flatten())[: room.tokens]
    # A row's padding stands after its tokens, where none of these attends to it.
    padding = ~mask
    slots = torch.where(mask, mask.cumsum(1), mask.sum(1, keepdim=True) + padding.cumsum(1)) - 1
    slots, row, is_real = slots.flatten()[where], where // S, mask.flatten()[where]
    lengths = [S] * B if room.is_full else None
    packing = Packing(B, lengths, row * S + slots, S)
    read = true_first(is_real & (where % S >= read_from))[: room.read]
    return where, slots.where(is_real, 0), packing, read


def true_first(flags: Tensor) -> Tensor:
    """Return all places of flags (N,), those of what is True first, each kind in its order."""
    return flags.byte().argsort(stable=True, descending=True)


def _first(states: Tensor, count: int) -> Tensor:
    """Return the first so many states; of a cut that leaves out none, backward still copies."""
    return states if len(states) == count else states[:count]


def whole_tiles(count: int, device: torch.device, tile: int = TILE) -> int:
    """Return the next multiple of `tile` under autocast on a CPU, elsewhere the count itself.

    There oneDNN compiles products for each shape it meets, in about a millisecond and a megabyte,
    and keeps a thousand of them: where lengths vary, an update meets several hundred.
    """
    compiles = device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return -(-count // tile) * tile if compiles else count


def rectangle_hidden(trunk: nn.Module, ids: Tensor, *, read_from: int, as_on: str) -> Tensor:
    """Return the last hidden states (B * S, H) of sequences of one length, ids (B, S), row by row.

    It is `packed_hidden` where nothing is looked at but shapes, so a plan can run it on tensors
    without numbers. These attend as on their own kind of device, or as on the one a plan is for.
    """
    B, S = ids.shape
    places = torch.arange(S, device=ids.device).repeat(B)
    if not can_pack(trunk):
        padded: Tensor = trunk(input_ids=ids, use_cache=False).last_hidden_state
        return padded.flatten(0, 1)
    every = torch.arange(B * S, device=ids.device)
    packing = Packing(B, [S] * B, every, S, as_on=as_on)
    read = every.view(B, S)[:, read_from:].flatten()
    with _attending(trunk, PACKED), _last_mlp_at(trunk, read, B * S):
        hidden: Tensor = trunk(
            input_ids=ids.flatten()[None],
            position_ids=places[None],
            use_cache=False,
            packing=packing,
        ).last_hidden_state
    return hidden.squeeze(0)


@contextmanager
def _last_mlp_at(trunk: nn.Module, read: Tensor, tokens: int) -> Iterator[None]:
    """Let the last layer's MLP, which looks at one token at a time, run for those read alone.

    `read` are places (n,) in a packed row of so many tokens. All run where layers are computed a
    second time, in the backward pass, and where the last layer keeps no MLP apart.
    """
    layers: Any = getattr(trunk, "layers", None) or getattr(trunk, "h", None) or [None]
    mlp: Any = getattr(layers[-1], "mlp", None)
    if mlp is None or trunk.training or len(read) == tokens:
        yield
        return

    def narrow(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return (given[0].index_select(1, read),)

    def widen(_: nn.Module, given: tuple[Tensor], found: Tensor) -> Tensor:
        return found.new_zeros(1, tokens, found.shape[2]).index_copy(1, read, found)

    hooks = mlp.register_forward_pre_hook(narrow), mlp.register_forward_hook(widen)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def attending_as_now(trunk: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the trunk attends as it does at this moment, packed or not.

    For a backward pass that computes layers a second time, after `packed_hidden` has returned.
    """
    config: Any = trunk.config
    return _attending(trunk, config._attn_implementation)


def stepping(trunk: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the trunk, under autocast, reads one new token fast."""
    faster = any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) and can_pack(trunk)
    return _attending(trunk, STEPPING) if faster else nullcontext()


def fuse_steps(model: nn.Module) -> None:
    """Replace what takes many elementwise steps by one of torch's kernels.

    GPT-2's GELU, the tanh approximation of arXiv:1606.08415, takes seven; results agree within
    rounding, and backward keeps one tensor where it kept five. Norms of half of float32 take four
    more under a GPU's autocast, which turns states and weights into float32 for a kernel that
    computes in it anyway, and rounds what comes out for the next layer.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, NewGELUActivation):
                setattr(module, name, ACT2FN["gelu_pytorch_tanh"])
            if type(child) is nn.LayerNorm and child.elementwise_affine:
                child.__class__ = _LayerNorm


class _LayerNorm(nn.LayerNorm):
    """A layer norm whose states stay of half of float32 where its weights are."""

    def forward(self, states: Tensor) -> Tensor:
        halved = states.dtype == self.weight.dtype != torch.float32
        with torch.autocast(states.device.type, enabled=False) if halved else nullcontext():
            return super().forward(states)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    **options: Any,
) -> tuple[Tensor, None]:
    options["is_causal"] = True
    states = (query, key, value)
    on_cpu = (packing.as_on or query.device.type) == "cpu"
    products = packing.is_rectangle or query.dtype == torch.bfloat16
    if on_cpu and products and is_short(packing, query.shape[-1]):
        groups = query.shape[1] // key.shape[1]
        states = (query, repeat_kv(key, groups), repeat_kv(value, groups))
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        queries, keys, values = map(packing.apart, states)
        output = causal_attention(queries, keys, values, scale)
        return packing.together(output.transpose(1, 2)), None
    if on_cpu and packing.lengths is not None and not packing.is_rectangle:
        each = [*packing.lengths, packing.filler]
        sequences = zip(
            *(torch.split(s, each, dim=2)[: len(each) - 1] for s in states), strict=True
        )
        outputs = [sdpa_attention_forward(module, *s, None, **options)[0] for s in sequences]
        return packing.filled(torch.cat(outputs, dim=1)), None
    output, _ = sdpa_attention_forward(module, *map(packing.apart, states), None, **options)
    return packing.together(output), None


def is_short(packing: Packing, width: int) -> bool:
    """Return whether heads of this width hold no more probabilities than an MLP holds states."""
    return packing.longest <= 4 * width


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return causal attention over (B, heads, L, D), as few large products.

    torch's own kernel on a CPU takes each head of each sequence by itself, and its backward pass
    spends more on calling products than they take: in bfloat16 20 ms for 64 heads of 36 tokens,
    here 1.5; in float32 2.5 ms for 64 heads of 63, here 1.4. The arithmetic is the same: scores and
    softmax are float32, probabilities are rounded to the values' type for the product with these.
    They, L numbers for each token and head, are kept.
    """
    apply: Callable[..., Tensor] = _CausalAttention.apply
    return apply(*(states.flatten(0, 1) for states in (query, key, value)), scale).view_as(query)


def _stepping_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with `causal_attention`'s arithmetic where one token of each row (B, heads, 1, D) is.

    On a CPU torch's kernel takes each head of each row by itself, three times as long; on a GPU the
    one that a mask leaves is made for many queries: 84 us for 64 rows of 12 heads and 512 tokens
    (H200), here 51.
    """
    kind = query.device.type
    is_half = key.dtype != torch.float32
    if query.shape[2] > 1 or not (kind == "cpu" or (kind == "cuda" and is_half)):
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    # Heads that share keys stand where the tokens of a longer query would.
    grouped = query.view(*key.shape[:2], -1, query.shape[-1])
    with torch.autocast(kind, enabled=False):
        scores = _float_products(grouped, key.transpose(2, 3), scale)
        if attention_mask is not None:
            scores = torch.where(attention_mask, scores, float("-inf"))
        attended = torch.matmul(scores.softmax(-1).to(value.dtype), value)
    return attended.view_as(query).transpose(1, 2), None


def _float_products(one: Tensor, other: Tensor, scale: float) -> Tensor:
    """Return scale times the products (B, heads, M, N) of half of float32, in float32."""
    if one.device.type == "cuda":
        nothing = one.new_empty((1, 1, 1), dtype=torch.float32)
        pairs, wide = (one.flatten(0, 1), other.flatten(0, 1)), torch.float32
        found = torch.baddbmm(nothing, *pairs, out_dtype=wide, beta=0, alpha=scale)
        return found.view(*one.shape[:3], other.shape[3])
    return torch.matmul(one.float(), other.float()).mul_(scale)


class _CausalAttention(torch.autograd.Function):
    """`causal_attention` of flat heads (N, L, D); its backward's products are of their type."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        L = query.shape[1]
        hidden = query.new_full((L, L), float("-inf"), dtype=torch.float32).triu_(1)
        with torch.autocast(query.device.type, enabled=False):
            keys = key.float().transpose(1, 2)
            scores = torch.baddbmm(hidden, query.float(), keys, alpha=scale)
            probabilities = scores.softmax(-1).to(value.dtype)
            ctx.save_for_backward(query, key, value, probabilities)
            ctx.scale = scale
            return torch.bmm(probabilities, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, probabilities = ctx.saved_tensors
        gradient = gradients[0]
        # d softmax: p * (g - sum of p g); Source: arXiv:2205.14135, appendix B.2.
        slopes = torch.bmm(gradient, value.transpose(1, 2)).float()
        slopes -= (slopes * probabilities).sum(-1, keepdim=True)
        scores = slopes.mul_(probabilities).mul_(ctx.scale).to(query.dtype)
        return (
            torch.bmm(scores, key),
            torch.bmm(scores.transpose(1, 2), query),
            torch.bmm(probabilities.transpose(1, 2), gradient),
            None,
        )


@contextmanager
def _attending(trunk: nn.Module, implementation: Any) -> Iterator[None]:
    config: Any = trunk.config
    usual = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = usual


# cuDNN's attention, which torch prefers on newer GPUs, takes 60 ms to plan for each shape it meets
# (H200, 12 layers): decoding meets one with every token, training one with every microbatch.
torch.backends.cuda.enable_cudnn_sdp(False)
ALL_ATTENTION_FUNCTIONS.register(PACKED, _packed_attention)
ALL_ATTENTION_FUNCTIONS.register(STEPPING, _stepping_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(STEPPING, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
