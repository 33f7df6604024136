"""The one decode loop, and the log-probabilities that belong to it.

PPO, evaluation, serving and simulation all sample here, so a completion means the same everywhere:
prompts are padded on the left and completions on the right, position ids count real tokens only,
and a log-probability is that of the whole temperature-scaled distribution,
log softmax(logits / temperature), whether or not top_k or top_p narrowed the draw. Who trains on a
narrowed draw asks for its support, the tokens it could have taken: log-probabilities are then those
within it, in sampling and wherever they are taken again.

Speed: keys and values are cached; a row that has ended leaves the batch; a GPU is shown a token's
kernels once (policy/captured.py); of the logits only the chosen token's log-probability is kept.
Training computes logits at completion positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from rlhf_pipeline.errors import LogitsNotFinite, ModelError, ShapeMismatch
from rlhf_pipeline.policy.cache import empty_cache
from rlhf_pipeline.policy.captured import CapturedForward, can_capture
from rlhf_pipeline.policy.chat import decode_completions, encode_prompts
from rlhf_pipeline.policy.loading import Policy, text_config
from rlhf_pipeline.policy.low_rank import rounding_once
from rlhf_pipeline.policy.packed import (
    TILE,
    Room,
    can_pack,
    packed_hidden,
    stepping,
    true_first,
    whole_tiles,
)
from rlhf_pipeline.records import Progress, Prompt

COMPACT_BELOW = 0.75  # rows are dropped once a quarter of those in the batch have ended
CAPTURED_BELOW = 0.5  # and where that costs capturing a step anew, once half of them have
LOGITS_AT_ONCE = 2**24  # elements of a logits matrix held at a time: 64 MiB in float32
CACHED_LOGITS = 2**19  # elements worked through at a time: 2 MiB
# A GPU is done with these sooner than Python has asked for the next, so there they are larger.
TIMES_AT_ONCE_ON_GPU, TIMES_CACHED_ON_GPU = 16, 64
ALIGNED = 64  # columns: of others that 8 does not divide a GPU's product takes five times as long


Head = Callable[[Tensor], Tensor]
"""From hidden states (..., H) to what an output layer says of them, (..., V)."""


@dataclass(frozen=True)
class Sampled:
    """B completions of at most T tokens, on the prompts' device."""

    completion_ids: Tensor  # (B, T) int64; pad after the end
    completion_mask: Tensor  # (B, T) bool; True on completion tokens, eos among them
    logprobs: Tensor  # (B, T) float32, nats, at the sampling temperature; 0 where the mask is False
    finished: Tensor  # (B,) bool; True where the completion ends with eos
    likeliest: Tensor  # (B, T) bool; True where no token was likelier than the one taken
    support: Tensor | None = None  # (B, T, V / 8) uint8, `pack_bits` of the tokens in reach


@dataclass(frozen=True, slots=True)
class Completion:
    """What a policy wrote, with the very tokens that were drawn (its text may encode otherwise)."""

    text: str
    ids: list[int]  # eos counts
    finished: bool  # False: cut off at the token limit
    stopped: bool = False  # before a text at which it was to end

    @property
    def tokens(self) -> int:
        """Return how many were drawn."""
        return len(self.ids)


@torch.no_grad()
@rounding_once()
def decode(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    uniforms: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_id: int,
    pad_id: int,
    keeps_support: bool = False,
) -> Sampled:
    """Return one completion for each left-padded prompt; T shrinks to the longest one's length.

    Shapes: prompt_ids and prompt_mask (B, P). A row's own `uniforms` (B, T), numbers in [0, 1),
    choose its tokens, so its completion does not depend on when other rows end.
    temperature 0 takes the likeliest token; its log-probabilities are at temperature 1.
    top_k 0 and top_p 1 leave the distribution whole. With keeps_support, what they left in reach is
    returned too, and log-probabilities are those within it. Raises ModelError on settings out of
    range, and where the model's logits are not finite.

    1. Run the prompts once; 2. draw a token for each row from the last position's logits;
    3. now and then, drop rows that have ended from the batch and the cache; 4. run the new tokens;
    5. after the loop, cut everything after the first eos.
    """
    _check_settings(prompt_ids, prompt_mask, uniforms, temperature, top_k, top_p)
    B, P = prompt_ids.shape
    T = uniforms.shape[1]
    device = prompt_ids.device
    trunk = trunk_of(model)
    completion_ids = torch.full((B, T), pad_id, dtype=torch.long, device=device)
    logprobs = torch.zeros(B, T, device=device)
    likeliest = torch.zeros(B, T, dtype=torch.bool, device=device)
    support: Tensor | None = None
    if keeps_support and (top_k or top_p < 1):
        V = output_head(model).weight.shape[0]
        support = torch.zeros(B, T, -(-V // 8), dtype=torch.uint8, device=device)
    # A look at which rows have ended waits for a GPU to catch up, so there it is taken less often.
    look_every = 1 if device.type == "cpu" else 8

    cache, head = empty_cache(trunk.config), aligned_head(model, device.type)

    def forward(ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        with stepping(trunk):
            hidden = run_trunk(trunk, ids, mask, positions, cache)[:, -1]
        return logits_of(model, hidden, head)

    captured: CapturedForward | None = None
    if can_capture(trunk, device):
        captured = CapturedForward(forward, cache, most=P + T)
    mask = torch.ones(B, P + T, dtype=torch.long, device=device)
    mask[:, :P] = prompt_mask
    positions = position_ids(prompt_mask)
    rows = torch.arange(B, device=device)
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    inputs, last = prompt_ids, positions[:, -1:]
    for t in range(T):
        # In float32 once for all that looks at them: of bfloat16 a CPU is slow to find the largest.
        logits = (captured or forward)(inputs, mask[:, : P + t], positions).float()
        if support is None:
            tokens, token_logprobs = draw(logits, uniforms[rows, t], temperature, top_k, top_p)
        else:
            logits = narrow(logits / (temperature or 1.0), top_k, top_p)
            tokens, token_logprobs = draw(logits, uniforms[rows, t], 1.0 if temperature else 0.0)
            support[rows, t] = pack_bits(logits.isfinite())
        completion_ids[rows, t] = tokens
        logprobs[rows, t] = token_logprobs
        # On a CPU the largest number is found six times faster than its place.
        likeliest[rows, t] = logits.gather(-1, tokens[:, None])[:, 0] >= logits.amax(-1)
        ended |= tokens == eos_id
        inputs, last = tokens[:, None], last + 1
        if (t + 1) % look_every == 0:
            alive = int((~ended).sum())
            if alive == 0:
                break
            wanted = whole_tiles(alive, device, TILE // 8)  # some that have ended stay to fill it
            if wanted <= (CAPTURED_BELOW if captured else COMPACT_BELOW) * len(rows):
                keep = ended.int().argsort(stable=True)[:wanted].sort().values
                if captured:
                    captured.release()
                cache.reorder_cache(keep)  # layers of a recurrent state select rows by no other
                rows, mask, inputs = rows[keep], mask[keep], inputs[keep]
                last, ended = last[keep], ended[keep]
        positions = last

    is_eos = completion_ids == eos_id
    completion_mask = is_eos.cumsum(1) - is_eos.long() == 0  # True up to and on the first eos
    finished = is_eos.any(1)
    check_finite(logprobs.masked_fill(~completion_mask, 0.0))
    longest = int(completion_mask.sum(1).max()) if B and T else 0
    completion_mask = completion_mask[:, :longest].clone()
    return Sampled(
        completion_ids[:, :longest].masked_fill(~completion_mask, pad_id),
        completion_mask,
        logprobs[:, :longest].masked_fill(~completion_mask, 0.0),
        finished,
        likeliest[:, :longest] & completion_mask,
        None if support is None else support[:, :longest],
    )


def draw(
    logits: Tensor, uniforms: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return a token for each row of logits (N, V) and its log-probability, both (N,).

    The token is where the cumulative distribution passes the row's uniform number (inverse
    transform sampling), so equal numbers give equal tokens whatever else is in the batch.
    Of logits that are not finite it is any token, and its log-probability is not finite either.
    """
    logits = logits.float()
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        logits = logits / temperature
        probabilities = narrow(logits, top_k, top_p).softmax(-1)
        cumulative = probabilities.cumsum(-1)
        total = cumulative[:, -1:]
        # Stay below the total: rounding must not choose a last token that has no probability.
        below = torch.nextafter(total, torch.zeros_like(total))
        passed = torch.minimum(uniforms[:, None] * total, below)
        tokens = torch.searchsorted(cumulative, passed, right=True)[:, 0]
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # of logits that are no numbers: past all
        if not top_k and top_p == 1.0:
            return tokens, probabilities.gather(-1, tokens[:, None])[:, 0].log()
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    return tokens, chosen - logits.logsumexp(-1)


def check_room(policy: Policy, prompt: int, completion: int) -> None:
    """Raise ModelError unless as many tokens of a prompt and its completion fit the context."""
    if prompt < 1 or prompt + completion > policy.context_length:
        raise ModelError(
            f"prompt and completion must fit a context of {policy.context_length} tokens, found "
            f"{prompt} + {completion}; lower one of the two"
        )


def check_finite(logprobs: Tensor) -> None:
    """Raise LogitsNotFinite unless the log-probabilities of drawn tokens are finite."""
    if not bool(logprobs.isfinite().all()):
        raise LogitsNotFinite(
            "a model must give finite logits, found some that are no numbers; its weights are "
            "damaged: load another; or they are too large for float16: take bfloat16 or float32; "
            "or a learning rate was too large"
        )


def narrow(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return logits (N, V) with -inf outside the top_k likeliest and the top_p nucleus.

    The nucleus is the smallest set of likeliest tokens whose probability reaches top_p, taken
    after top_k. Source: Holtzman et al., arXiv:1904.09751 section 3.1.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= top_p  # what came before suffices
        outside[:, 0] = False
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return logits


def pack_bits(flags: Tensor) -> Tensor:
    """Return flags (..., V) as uint8 (..., V / 8 rounded up), the first flag in the lowest bit."""
    width = flags.shape[-1]
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -width % 8))
    places = torch.arange(8, dtype=torch.uint8, device=flags.device)
    bits = padded.view(*flags.shape[:-1], -1, 8) << places
    return bits.sum(-1).to(torch.uint8)


def unpack_bits(packed: Tensor, width: int) -> Tensor:
    """Return the bool flags (..., width) that `pack_bits` took."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> places) & 1).flatten(-2)[..., :width].bool()


def complete(
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    max_completion_tokens: int,
    max_prompt_tokens: int,
    temperature: float = 0.7,
    seed: int,
    batch_size: int = 64,
    report: Progress | None = None,
) -> list[Completion]:
    """Return one completion per prompt, in the prompts' order.

    Prompts of like length are run together. The n-th prompt's random numbers follow from `seed`
    and n alone, so neither batch_size nor the other prompts change its completion (but for ties
    within rounding). `report` hears {"completions": done, "of": all} after each batch.
    Raises ModelError if prompt and completion do not fit the context together.
    """
    check_room(policy, max_prompt_tokens, max_completion_tokens)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(prompts), max_completion_tokens, generator=generator)
    encoded = encode_prompts(policy.tokenizer, prompts, max_tokens=max_prompt_tokens)
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    completions: list[Completion | None] = [None] * len(prompts)
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        prompt_ids, prompt_mask = pad_left([encoded[i] for i in members], policy.pad_id)
        sampled = decode(
            policy.model,
            prompt_ids.to(policy.device),
            prompt_mask.to(policy.device),
            uniforms[members].to(policy.device),
            temperature=temperature,
            eos_id=policy.eos_id,
            pad_id=policy.pad_id,
        )
        lengths = sampled.completion_mask.sum(1).tolist()
        rows = [row[:n] for row, n in zip(sampled.completion_ids.tolist(), lengths, strict=True)]
        texts = decode_completions(policy.tokenizer, rows)
        endings = sampled.finished.tolist()
        for i, text, ids, finished in zip(members, texts, rows, endings, strict=True):
            completions[i] = Completion(text, ids, finished)
        if report is not None:
            report({"completions": min(start + batch_size, len(order)), "of": len(order)})
    return [c for c in completions if c is not None]


def completion_logprobs(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float,
    support: Tensor | None = None,
) -> Tensor:
    """Return each completion token's log-probability, (B, T) float32, with gradients.

    Positions where completion_mask is False come back as 0. Logits are computed only where it is
    True. At the temperature, and within the support, of sampling these are the log-probabilities
    that `decode` returned.
    """
    hidden = completion_hidden(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    return hidden_logprobs(
        model, hidden, completion_ids, completion_mask, temperature=temperature, support=support
    )


def completion_hidden(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    room: Room | None = None,
) -> Tensor:
    """Return the trunk's last hidden states from which each completion token follows, (B, T, H).

    hidden[:, t] has seen the prompt and the completion's tokens before t, and nothing later: the
    state whose logits choose token t, and whose value a critic estimates. Positions where
    completion_mask is False hold finite numbers without meaning. `room` is for trunks that can be
    packed, and `packed_hidden`'s.
    Shapes: prompts (B, P) padded on the left, completions (B, T) on the right.
    """
    if prompt_ids.shape != prompt_mask.shape or completion_ids.shape != completion_mask.shape:
        raise ShapeMismatch(
            "ids and masks must agree in shape, found prompts "
            f"{tuple(prompt_ids.shape)} and {tuple(prompt_mask.shape)}, completions "
            f"{tuple(completion_ids.shape)} and {tuple(completion_mask.shape)}; pass pairs"
        )
    # The last completion token predicts nothing, so it need not be run.
    ids = torch.cat([prompt_ids, completion_ids[:, :-1]], dim=1)
    mask = torch.cat([prompt_mask, completion_mask[:, :-1]], dim=1)
    trunk, before = trunk_of(model), prompt_ids.shape[1] - 1
    if not can_pack(trunk):
        return run_trunk(trunk, ids, mask.long(), position_ids(mask), None)[:, before:]
    # A row's own last token predicts nothing either, unless the row is a prompt alone.
    mask[:, before + 1 :] &= completion_mask[:, 1:]
    packed, where = packed_hidden(trunk, ids, mask, read_from=before, room=room)
    hidden = packed.new_zeros(mask.numel(), packed.shape[-1]).index_copy(0, where, packed)
    return hidden.view(*mask.shape, -1)[:, before:]


def hidden_logprobs(
    model: PreTrainedModel,
    hidden: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float,
    support: Tensor | None = None,
    room: Room | None = None,
) -> Tensor:
    """Return log-probabilities (B, T) from `completion_hidden`'s states, 0 outside the mask.

    Never holds more than LOGITS_AT_ONCE logits: beyond that they are computed in pieces, and again
    in the backward pass. With `support`, (B, T, V / 8) packed, they are those of the distribution
    renormalised within it. Source: "keep sampling mask", DeepSeek-V3.2 (arXiv:2512.02556) 3.1.
    """
    # What is filled up with is computed, and taken by nobody.
    if room is None:
        where = completion_mask.flatten().nonzero()[:, 0]
        filled = nn.functional.pad(where, (0, whole_tiles(len(where), where.device) - len(where)))
    else:
        where = filled = true_first(completion_mask.flatten())[: room.read]
    states = hidden.flatten(0, 1).index_select(0, filled)
    tokens = completion_ids.flatten()[filled]
    within = None if support is None else support.flatten(0, 1)[filled]
    if within is not None and room is not None:  # where nothing is in reach there is no number
        within = within.masked_fill(~completion_mask.flatten()[filled][:, None], 0xFF)
    packed = state_logprobs(model, states, tokens, temperature, within)[: len(where)]
    flat = packed.new_zeros(completion_mask.numel()).index_copy(0, where, packed)
    return torch.where(completion_mask, flat.view_as(completion_mask), 0.0)


def state_logprobs(
    model: PreTrainedModel,
    states: Tensor,
    tokens: Tensor,
    temperature: float,
    within: Tensor | None = None,
    *,
    as_on: str | None = None,
) -> Tensor:
    """Return the tokens' (N,) log-probabilities after hidden states (N, H), in bounded memory.

    They are computed as on the states' own kind of device, or as on another that a plan is for.
    """
    kind = as_on or states.device.type
    at_once = LOGITS_AT_ONCE * (1 if kind == "cpu" else TIMES_AT_ONCE_ON_GPU)
    piece = max(1, at_once // int(output_head(model).weight.shape[0]))
    head = aligned_head(model, kind)
    if len(tokens) <= piece:
        return _token_logprobs(model, head, states, tokens, temperature, within, kind)
    # Of one size: a smaller last one would go to the heap, and leave a hole there.
    piece = -(-len(tokens) // -(-len(tokens) // piece))
    cuts = [slice(start, start + piece) for start in range(0, len(tokens), piece)]
    return torch.cat(
        [
            checkpoint(
                _token_logprobs,
                model,
                head,
                states[cut],
                tokens[cut],
                temperature,
                None if within is None else within[cut],
                kind,
                use_reentrant=False,
                preserve_rng_state=False,  # nothing is drawn, and a CUDA graph allows no look
            )
            for cut in cuts
        ]
    )


def _token_logprobs(
    model: PreTrainedModel,
    head: Head,
    states: Tensor,
    tokens: Tensor,
    temperature: float,
    within: Tensor | None,
    kind: str,
) -> Tensor:
    logits = logits_of(model, states, head)
    return chosen_logprobs(logits, tokens, temperature or 1.0, within, as_on=kind)


def chosen_logprobs(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    within: Tensor | None = None,
    *,
    as_on: str | None = None,
) -> Tensor:
    """Return log softmax(logits / temperature) at the tokens: (N, V), (N,) -> (N,) float32.

    `within` (N, ceil(V / 8)) is what `pack_bits` made of the tokens in reach; all are without it.
    Where a gradient is wanted the logits are overwritten, and its backward pass can be taken once.
    `as_on` is `state_logprobs`'s.
    """
    apply: Callable[..., Tensor] = _ChosenLogprobs.apply
    at_once = CACHED_LOGITS
    if (as_on or logits.device.type) != "cpu":
        at_once *= TIMES_CACHED_ON_GPU
    return apply(logits, tokens, temperature, within, max(1, at_once // max(logits.shape[-1], 1)))


class _ChosenLogprobs(torch.autograd.Function):
    """`chosen_logprobs` with a backward pass of its own.

    Works in float32 through a few rows at a time, which stay in the processor's cache. It turns the
    logits into probabilities, and those into the logits' gradient, in place and in the logits' own
    precision, so nothing else of their size is ever held.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: float,
        within: Tensor | None,
        rows: int,
    ) -> Tensor:
        found = []
        narrowed = () if within is None else (within,)
        for some, chosen, *reach in _groups(rows, logits, tokens, *narrowed):
            scaled = _wide(some) / temperature
            for packed in reach:
                scaled.masked_fill_(~unpack_bits(packed, scaled.shape[-1]), float("-inf"))
            at_token = scaled.gather(-1, chosen[:, None])[:, 0]
            highest = scaled.amax(-1)
            totals = scaled.sub_(highest[:, None]).exp_().sum(-1)
            found.append(at_token - highest - totals.log())
            if ctx.needs_input_grad[0]:
                some.copy_(scaled.div_(totals[:, None]))
        logprobs = torch.cat(found)
        ctx.save_for_backward(logits, tokens, logprobs)
        ctx.temperature, ctx.rows = temperature, rows
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, tokens, logprobs = ctx.saved_tensors
        weights = gradients[0] / ctx.temperature
        # 1 - p of the token itself, which p has no digits for where it is near 1.
        at_tokens = -weights * logprobs.expm1()
        groups = _groups(ctx.rows, probabilities, tokens, weights, at_tokens)
        for some, chosen, weight, at_token in groups:
            slopes = _wide(some).mul_(-weight[:, None])
            some.copy_(slopes.scatter_(-1, chosen[:, None], at_token[:, None]))
        return probabilities, None, None, None, None


def _wide(rows: Tensor) -> Tensor:
    """Return the rows in float32 at least: themselves where they are."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _groups(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return views of so many rows at a time of all the tensors."""
    return zip(*(torch.split(each, rows) for each in tensors), strict=True)


def logits_of(model: PreTrainedModel, hidden: Tensor, head: Head | None = None) -> Tensor:
    """Return the model's own logits for hidden states (..., H), its scaling and cap included.

    `head` is what `aligned_head` returned, for whoever asks for logits more than once.
    """
    logits: Tensor = (head or output_head(model))(hidden)
    config = text_config(plain_model(model).config)
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere and Falcon-H1 multiply
        scale = getattr(config, name, None)
        if scale is not None:
            logits = logits * scale
    scaling = getattr(config, "logits_scaling", None)  # Granite divides, HyperCLOVA X multiplies
    if scaling is not None:
        logits = logits * scaling if config.model_type == "hyperclovax" else logits / scaling
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2, arXiv:2408.00118
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


def plain_model(model: Any) -> Any:
    """Return the causal LM inside a PEFT wrapper (its adapters stay active), or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model: Any) -> nn.Linear:
    """Return the layer that turns hidden states into logits."""
    head: nn.Linear | None = plain_model(model).get_output_embeddings()
    if head is None:
        raise ModelError(
            f"a causal language model with an output layer is needed, found "
            f"{type(model).__name__}; load it with load_policy"
        )
    return head


def aligned_head(model: Any, kind: str) -> Head:
    """Return the output layer with a number of columns that this kind of device multiplies fast.

    GPT-2's 50,257 words, or any vocabulary that a pad token was added to, would keep a GPU from
    its fast kernels. The weight is copied for that, so let it go when it changes.
    """
    head = output_head(model)
    words = head.weight.shape[0]
    filler = -words % ALIGNED
    if kind == "cpu" or words % 8 == 0 or type(head) is not nn.Linear:
        return head
    weight: Tensor = head.weight
    place = weight.device.type
    if torch.is_autocast_enabled(place):
        weight = weight.to(torch.get_autocast_dtype(place))
    weight = nn.functional.pad(weight, (0, 0, 0, filler))
    bias = None if head.bias is None else nn.functional.pad(head.bias, (0, filler))
    return lambda states: nn.functional.linear(states, weight, bias)[..., :words]


def trunk_of(model: Any) -> nn.Module:
    """Return the causal LM without its output layer: ids to last hidden states."""
    plain = plain_model(model)
    trunk: nn.Module = plain.base_model
    if trunk is plain:
        raise ModelError(
            f"a causal language model with a trunk of its own is needed, found "
            f"{type(plain).__name__}; load it with load_policy"
        )
    return trunk


def state_width(config: Any) -> int:
    """Return H, the width of a trunk's last hidden states.

    That is the layers' width but for OPT-350M, which projects its states down to the embeddings'.
    """
    config = text_config(config)
    return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)


def position_ids(mask: Tensor) -> Tensor:
    """Return the position of each token among the real ones of its row; padding gets 0."""
    return (mask.long().cumsum(-1) - 1).clamp_(min=0)


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[list[list[int]], list[int]]:
    """Return the rows, padded to end together, and where each begins."""
    width = max(map(len, rows), default=0)
    starts = [width - len(row) for row in rows]
    return [[pad_id] * start + list(row) for row, start in zip(rows, starts, strict=True)], starts


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return ids (B, P) and mask (B, P) of rows that end together."""
    padded, starts = left_padded(rows, pad_id)
    ids = torch.tensor(padded)
    return ids, torch.arange(ids.shape[-1])[None] >= torch.tensor(starts)[:, None]


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return ids (B, T) and mask (B, T) of rows that begin together."""
    width = max(map(len, rows), default=0)
    ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width)[None] < lengths[:, None]


def run_trunk(
    trunk: nn.Module, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None
) -> Tensor:
    """Return the trunk's last hidden states (B, T, H); mask (B, past + T), positions (B, T)."""
    forward: Callable[..., Any] = type(trunk).forward
    places = {"position_ids": positions} if _takes_positions(forward) else {}
    hidden: Tensor = trunk(
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=cache is not None,
        **places,
    ).last_hidden_state
    return hidden


@lru_cache(maxsize=64)
def _takes_positions(forward: Callable[..., Any]) -> bool:
    """True but for models, such as BLOOM, that count positions from the mask themselves."""
    return "position_ids" in signature(forward).parameters


def _check_settings(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    uniforms: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    if prompt_ids.shape != prompt_mask.shape or uniforms.shape[0] != prompt_ids.shape[0]:
        raise ShapeMismatch(
            f"prompt_ids and prompt_mask must agree in shape, found {tuple(prompt_ids.shape)} and "
            f"{tuple(prompt_mask.shape)} for {uniforms.shape[0]} rows; pass one mask per prompt"
        )
    if prompt_ids.numel() and not bool(prompt_mask[:, -1].all()):
        raise ShapeMismatch(
            "prompts must be padded on the left, found one whose last token is padding; "
            "use pad_left"
        )
    if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1) or uniforms.shape[1] < 1:
        raise ModelError(
            "sampling needs temperature >= 0, top_k >= 0, 0 < top_p <= 1 and room for one token, "
            f"found {temperature}, {top_k}, {top_p} and {uniforms.shape[1]}; correct the setting"
        )
