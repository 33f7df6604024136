"""Packed passes against padded ones, and the fused arithmetic against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.activations import NewGELUActivation

from rlhf_pipeline.policy import packed, sampling
from rlhf_pipeline.policy.packed import (
    TILE,
    Packing,
    can_pack,
    causal_attention,
    fuse_steps,
    stepping,
    whole_tiles,
)
from rlhf_pipeline.policy.sampling import completion_logprobs, pad_left, pad_right, trunk_of

V, PAD = 23, 0
LLAMA: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
PROMPTS = [[5, 6], [7, 8, 9, 10], [11], [12, 13, 14]]
COMPLETIONS: list[list[int]] = [[3, 4, 5, 6, 7], [], [8], [9, 10, 1]]
Batch = tuple[list[list[int]], list[list[int]]]
# Rows of many lengths, and rows that are all of one.
BATCHES: list[Batch] = [(PROMPTS, COMPLETIONS), ([[5, 6], [7, 8, 9]], [[3, 4, 5], [6, 1]])]


def small(name: str) -> PreTrainedModel:
    """Return a model of two layers with weights large enough to have opinions."""
    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3
        )
        return GPT2LMHeadModel(config).eval()
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()


def logprobs_and_gradients(
    model: PreTrainedModel,
    prompts: list[list[int]] = PROMPTS,
    completions: list[list[int]] = COMPLETIONS,
) -> tuple[Tensor, list[Tensor]]:
    """Return a batch's log-probabilities, and gradients of a weighted sum of them."""
    model.zero_grad()
    logprobs = completion_logprobs(
        model, *pad_left(prompts, PAD), *pad_right(completions, PAD), temperature=0.7
    )
    weights = torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    return logprobs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("batch", BATCHES)
def test_packed_rows_have_the_values_and_gradients_of_padded_ones(
    name: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(name)
    assert can_pack(trunk_of(model))
    packed, packed_gradients = logprobs_and_gradients(model, *batch)
    monkeypatch.setattr(sampling, "can_pack", lambda trunk: False)
    padded, padded_gradients = logprobs_and_gradients(model, *batch)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    assert len(packed_gradients) == len(padded_gradients)
    for one, other in zip(packed_gradients, padded_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_packed_states_come_apart_into_a_rectangle_and_together_again() -> None:
    packing = Packing(3, [2, 3, 1], torch.tensor([0, 1, 3, 4, 5, 6]), longest=3)
    states = torch.arange(1.0, 25.0).view(1, 2, 6, 2)  # two heads, six tokens, width 2
    apart = packing.apart(states)
    assert apart.shape == (3, 2, 3, 2)
    assert torch.equal(apart[1], states[0, :, 2:5])
    assert apart[0, :, 2].eq(0).all()
    together = packing.together(apart.transpose(1, 2))
    assert torch.equal(together, states.transpose(1, 2))


def test_the_trunk_runs_real_tokens_only_and_none_that_predicts_nothing() -> None:
    model = small("llama")
    seen: list[int] = []

    def count(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(inputs[0].numel())

    model.get_input_embeddings().register_forward_hook(count)
    logprobs_and_gradients(model)
    # Of each row everything but its last token; the row without a completion keeps its prompt.
    assert seen == [(2 + 5 - 1) + 4 + (1 + 1 - 1) + (3 + 3 - 1)]


def test_the_last_mlp_runs_only_where_states_are_read() -> None:
    model: Any = small("llama")
    seen: list[int] = []

    def count(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(inputs[0].shape[1])

    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(count)
    logprobs_and_gradients(model)
    # The states that choose a completion's tokens, and a lone prompt's last one.
    assert seen == [6 + 4 + 1 + 5, 5 + 1 + 1 + 3]
    assert not model.model.layers[-1].mlp._forward_hooks  # whoever runs it next gets all of it


def test_attention_is_the_models_own_again_after_a_packed_pass() -> None:
    model = small("gpt2")
    logprobs_and_gradients(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("window", "packs"), [(None, True), (4, False)])
def test_a_sliding_window_is_left_to_the_padded_path(window: int | None, packs: bool) -> None:
    model = MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=window))
    assert can_pack(trunk_of(model)) is packs


def test_a_fused_activation_computes_what_it_replaces() -> None:
    model = small("gpt2")
    before, gradients_before = logprobs_and_gradients(model)
    fuse_steps(model)
    assert not any(isinstance(m, NewGELUActivation) for m in model.modules())
    after, gradients_after = logprobs_and_gradients(model)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients_after, gradients_before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("narrowed", [False, True])
@pytest.mark.parametrize("at_once", [1, 2**17])
def test_chosen_logprobs_and_their_gradient_are_log_softmaxs(
    at_once: int, narrowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CACHED_LOGITS", at_once)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, V, generator=generator, dtype=torch.float64) * 3
    logits[2, 5:] = float("-inf")  # outside a support
    tokens = torch.tensor([0, 1, 4, 3, 22, 7, 7])
    weights = torch.randn(7, generator=generator, dtype=torch.float64)
    reach = torch.rand(7, V, generator=generator) < (0.5 if narrowed else 1.0)
    reach.scatter_(1, tokens[:, None], True)

    plain = logits.clone().requires_grad_()
    masked = plain.masked_fill(~reach, float("-inf"))
    expected = (masked / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]

    ours = logits.clone().requires_grad_()
    within = sampling.pack_bits(reach) if narrowed else None
    found = sampling.chosen_logprobs(ours * 1.0, tokens, 0.7, within)
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad)


def test_attention_as_large_products_has_the_values_and_gradients_of_torchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(3, 2, 9, 4, generator=generator) for _ in range(3)]
    weights = torch.randn(3, 2, 9, 4, generator=generator)
    found = []
    for ours in (True, False):
        q, k, v = (s.clone().requires_grad_() for s in states)
        if ours:
            output = causal_attention(q, k, v, 0.3)
        else:
            output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        found.append([output, *torch.autograd.grad((output * weights).sum(), (q, k, v))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("batch", BATCHES)
def test_bfloat16_differs_from_float32_by_rounding(name: str, batch: Batch) -> None:
    model = small(name)
    logprobs, gradients = logprobs_and_gradients(model, *batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, rounded_gradients = logprobs_and_gradients(model, *batch)
    torch.testing.assert_close(rounded, logprobs, rtol=0.05, atol=0.1)
    for one, other in zip(rounded_gradients, gradients, strict=True):
        assert (one - other).norm() < 0.05 * other.norm() + 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_fills_whole_tiles_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(name)
    exact = logprobs_and_gradients(model)

    def always(count: int, device: torch.device, tile: int = TILE) -> int:
        return -(-count // tile) * tile

    for module in (packed, sampling):
        monkeypatch.setattr(module, "whole_tiles", always)
    filled = logprobs_and_gradients(model)
    torch.testing.assert_close(filled, exact, rtol=1e-5, atol=1e-5)


def test_products_under_autocast_meet_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = small("llama")
    seen: set[int] = set()

    def count(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.add(inputs[0].numel() // inputs[0].shape[-1])

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(count)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs_and_gradients(model)
    assert seen == {TILE}
    assert whole_tiles(3, torch.device("cpu")) == 3


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_step_under_autocast_gives_the_logits_of_a_whole_pass(name: str) -> None:
    model = small(name)
    trunk: Any = trunk_of(model)
    ids, mask = pad_left([[*p, 3, 4] for p in PROMPTS], PAD)
    uniforms = torch.full((len(ids), 5), 0.5)
    with torch.autocast("cpu", torch.bfloat16), stepping(trunk):
        assert trunk.config._attn_implementation == packed.STEPPING
    with torch.autocast("cpu", torch.bfloat16):
        sampled = sampling.decode(model, ids, mask, uniforms, temperature=0.7, eos_id=1, pad_id=PAD)
        again = completion_logprobs(
            model, ids, mask, sampled.completion_ids, sampled.completion_mask, temperature=0.7
        )
    torch.testing.assert_close(sampled.logprobs, again.detach(), rtol=0.02, atol=0.06)
    assert trunk.config._attn_implementation == "sdpa"


ON_EITHER = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)


@ON_EITHER
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_of_a_single_step_is_torchs_own(
    kv_heads: int, device: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 1, 8, generator=generator)
    key, value = torch.randn(2, 3, kv_heads, 6, 8, generator=generator)
    seen = torch.ones(3, 1, 1, 6, dtype=torch.bool)
    seen[1, ..., :4] = False
    query, key, value = (states.to(dtype) for states in (query, key, value))
    expected = scaled_dot_product_attention(
        query.float(), key.float(), value.float(), seen, scale=0.3, enable_gqa=True
    )
    # A cache with room to spare: what is seen of it is a view.
    room = torch.zeros(2, 3, kv_heads, 9, 8, dtype=dtype, device=device)
    room[0, :, :, :6], room[1, :, :, :6] = key.to(device), value.to(device)
    keys, values = room[:, :, :, :6]
    found, _ = packed._stepping_attention(
        torch.nn.Module(), query.to(device), keys, values, seen.to(device), scaling=0.3
    )
    assert found.dtype == dtype
    digits = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        found.float().cpu(), expected.transpose(1, 2), rtol=digits, atol=digits
    )


@ON_EITHER
def test_a_norm_keeps_the_type_of_states_that_are_of_its_weights(
    device: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(16)
    norm.weight.data.normal_()
    norm.to(dtype).float()
    states = torch.randn(4, 16).to(dtype).requires_grad_()
    exact = norm(states.float())
    exact.square().sum().backward()
    wanted, states.grad = states.grad, None
    model = torch.nn.Sequential(norm).to(device, dtype)
    fuse_steps(model)
    with torch.autocast(device, torch.bfloat16):
        found = model(states.to(device))
    found.float().square().sum().backward()
    assert found.dtype == dtype
    torch.testing.assert_close(found.float().cpu(), exact, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(states.grad, wanted, rtol=2e-2, atol=5e-2)


def test_the_gradient_at_a_confident_token_keeps_bfloat16s_digits() -> None:
    logits = torch.zeros(1, V, dtype=torch.bfloat16)
    logits[0, 3] = 10.0
    plain, ours = logits.double().requires_grad_(), logits.clone().requires_grad_()
    plain.log_softmax(-1)[0, 3].backward()  # type: ignore[no-untyped-call]
    sampling.chosen_logprobs(ours * 1.0, torch.tensor([3]), 1.0).sum().backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad.double(), plain.grad, rtol=0.02, atol=0.0)


def test_a_norm_without_weights_is_left_as_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16, elementwise_affine=False))
    fuse_steps(model)
    states = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.nn.functional.layer_norm(states.float(), (16,))
    torch.testing.assert_close(model(states).float(), exact, rtol=1e-2, atol=1e-2)
