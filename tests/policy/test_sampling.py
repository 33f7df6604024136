"""The decode loop against a naive one: no cache, no batch, the whole rectangle of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    Lfm2Config,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
)

from rlhf_pipeline.errors import ModelError, ShapeMismatch
from rlhf_pipeline.policy import sampling
from rlhf_pipeline.policy.loading import Policy, switch_off_dropout
from rlhf_pipeline.policy.sampling import (
    aligned_head,
    complete,
    completion_hidden,
    completion_logprobs,
    decode,
    logits_of,
    narrow,
    output_head,
    pack_bits,
    pad_left,
    state_logprobs,
    trunk_of,
    unpack_bits,
)
from rlhf_pipeline.policy.streaming import stream
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.records import user_prompt

V, PAD, EOS = 23, 0, 1
COMMON: dict[str, Any] = {
    "vocab_size": V,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 2,
    "initializer_range": 0.3,  # far from uniform, so that a wrong position shows
}
LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **COMMON),
    "opt": OPTConfig(
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        word_embed_proj_dim=8,
        init_std=0.3,
        **{k: v for k, v in COMMON.items() if k != "initializer_range"},
    ),
    "gpt_neo": GPTNeoConfig(
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
        **COMMON,
    ),
    "phi": PhiConfig(**LLAMA_LIKE, **COMMON),
    "llama": LlamaConfig(**LLAMA_LIKE, num_key_value_heads=1, **COMMON),
    "qwen2": Qwen2Config(**LLAMA_LIKE, num_key_value_heads=1, **COMMON),
    "gemma2": Gemma2Config(  # sliding windows and capped logits
        **LLAMA_LIKE,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        final_logit_softcapping=5.0,
        attn_implementation="eager",
        **COMMON,
    ),
    "lfm2": Lfm2Config(  # a layer that keeps a state, where others keep the past
        **LLAMA_LIKE,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        **COMMON,
    ),
}
GEMMA4_TEXT = {  # of a model that sees and hears too
    **LLAMA_LIKE,
    **COMMON,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": V,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 1.0,
}
PROMPTS: Sequence[Sequence[int]] = ([5, 6, 7, 8], [9], [10, 11], [12, 13, 14, 15, 16], [9], [3, 4])


def make_model(name: str) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    switch_off_dropout(model)
    return model


def naive_sample(
    model: Any, prompt: Sequence[int], uniforms: Tensor, temperature: float, top_k: int = 0
) -> tuple[list[int], list[float]]:
    """One row, no padding, no cache, token by token in double precision."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for u in uniforms.tolist():
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double() / temperature
        full = logits.log_softmax(-1)
        kept = set(logits.argsort(descending=True)[: top_k or V].tolist())
        weights = [float(full[i].exp()) if i in kept else 0.0 for i in range(V)]
        passed = list(accumulate(w / sum(weights) for w in weights))
        token = next(i for i in range(V) if passed[i] > u)
        tokens.append(token)
        logprobs.append(float(full[token]))
        if token == EOS:
            break
    return tokens, logprobs


@pytest.mark.parametrize("name", CONFIGS)
def test_sampling_equals_a_naive_uncached_loop_and_recomputed_logprobs(name: str) -> None:
    model = make_model(name)
    prompt_ids, prompt_mask = pad_left(PROMPTS, PAD)
    temperature = 0.7
    uniforms = torch.rand(len(PROMPTS), 12, generator=torch.Generator().manual_seed(3))
    got = decode(
        model,
        prompt_ids,
        prompt_mask,
        uniforms,
        temperature=temperature,
        eos_id=EOS,
        pad_id=PAD,
    )
    for i, prompt in enumerate(PROMPTS):
        tokens, logprobs = naive_sample(model, prompt, uniforms[i], temperature)
        mask = got.completion_mask[i]
        assert got.completion_ids[i][mask].tolist() == tokens
        assert got.logprobs[i][mask].tolist() == pytest.approx(logprobs, abs=1e-4)
        assert bool(got.finished[i]) == (tokens[-1] == EOS)
        assert not mask[len(tokens) :].any()
        assert (got.completion_ids[i][~mask] == PAD).all()
        assert (got.logprobs[i][~mask] == 0).all()
    again = completion_logprobs(
        model,
        prompt_ids,
        prompt_mask,
        got.completion_ids,
        got.completion_mask,
        temperature=temperature,
    )
    torch.testing.assert_close(again, got.logprobs, atol=1e-4, rtol=0)
    whole_rectangle = _logprobs_by_the_whole_rectangle(model, prompt_ids, prompt_mask, got, 0.7)
    torch.testing.assert_close(again, whole_rectangle, atol=1e-4, rtol=0)


@pytest.mark.parametrize("width", [1, 7, 8, 23])
def test_packed_bits_are_the_flags_again(width: int) -> None:
    flags = torch.rand(3, 2, width, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = pack_bits(flags)
    assert packed.shape == (3, 2, -(-width // 8))
    assert torch.equal(unpack_bits(packed, width), flags)
    assert int(pack_bits(torch.tensor([True, False, True]))) == 5


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (5, 0.9)])
def test_logprobs_within_a_kept_support_are_those_of_the_narrowed_draw(
    top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    prompt_ids, prompt_mask = pad_left(PROMPTS, PAD)
    uniforms = torch.rand(len(PROMPTS), 12, generator=torch.Generator().manual_seed(3))
    arguments: dict[str, Any] = {"temperature": 0.7, "top_k": top_k, "top_p": top_p}
    arguments |= {"eos_id": EOS, "pad_id": PAD}
    whole = decode(model, prompt_ids, prompt_mask, uniforms, **arguments)
    got = decode(model, prompt_ids, prompt_mask, uniforms, **arguments, keeps_support=True)
    assert torch.equal(got.completion_ids, whole.completion_ids)
    assert whole.support is None
    assert got.support is not None
    for i, prompt in enumerate(PROMPTS):
        tokens = got.completion_ids[i][got.completion_mask[i]].tolist()
        for t, token in enumerate(tokens):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens[:t]]])).logits[:, -1] / 0.7
            narrowed = narrow(logits, top_k, top_p)[0]
            reach = unpack_bits(got.support[i, t], V)
            assert torch.equal(reach, narrowed.isfinite())
            assert bool(reach[token])
            weight = narrowed.exp()
            expected = float((weight[token] / weight.sum()).log())
            assert float(got.logprobs[i, t]) == pytest.approx(expected, abs=1e-4)
    for logits_at_once in (sampling.LOGITS_AT_ONCE, 4 * V):  # in one piece and in several
        monkeypatch.setattr(sampling, "LOGITS_AT_ONCE", logits_at_once)
        again = completion_logprobs(
            model,
            prompt_ids,
            prompt_mask,
            got.completion_ids,
            got.completion_mask,
            temperature=0.7,
            support=got.support,
        )
        torch.testing.assert_close(again, got.logprobs, atol=1e-4, rtol=0)
    again.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
    assert all(bool(w.grad.isfinite().all()) for w in model.parameters() if w.grad is not None)


def _logprobs_by_the_whole_rectangle(
    model: Any, prompt_ids: Tensor, prompt_mask: Tensor, got: Any, temperature: float
) -> Tensor:
    ids = torch.cat([prompt_ids, got.completion_ids], 1)
    mask = torch.cat([prompt_mask, got.completion_mask], 1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits / temperature
    ahead = logits.log_softmax(-1)[:, prompt_ids.shape[1] - 1 : -1]
    picked: Tensor = ahead.gather(-1, got.completion_ids[..., None])[..., 0]
    return picked.masked_fill(~got.completion_mask, 0.0).detach()


def test_rows_leave_the_batch_when_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    sizes = []
    original = sampling.run_trunk

    def counting(trunk: Any, ids: Tensor, *rest: Any) -> Tensor:
        sizes.append(ids.shape[0])
        return original(trunk, ids, *rest)

    monkeypatch.setattr(sampling, "run_trunk", counting)
    ids, mask = pad_left([[5, 6]] * 64, PAD)
    uniforms = torch.rand(64, 40, generator=torch.Generator().manual_seed(0))
    got = decode(model, ids, mask, uniforms, temperature=1.5, eos_id=EOS, pad_id=PAD)
    lengths, batch, expected = got.completion_mask.sum(1), 64, []
    for t in range(int(lengths.max())):
        expected.append(batch)
        alive = int((lengths > t + 1).sum())
        batch = alive if alive <= 0.75 * batch else batch
    assert sizes == expected
    assert sizes[-1] < sizes[0] / 2


def test_top_k_narrows_the_draw_but_not_the_logprobs() -> None:
    model = make_model("llama")
    ids, mask = pad_left(PROMPTS, PAD)
    uniforms = torch.rand(len(PROMPTS), 8, generator=torch.Generator().manual_seed(5))
    got = decode(model, ids, mask, uniforms, temperature=1.3, top_k=3, eos_id=EOS, pad_id=PAD)
    for i, prompt in enumerate(PROMPTS):
        tokens, logprobs = naive_sample(model, prompt, uniforms[i], 1.3, top_k=3)
        assert got.completion_ids[i][got.completion_mask[i]].tolist() == tokens
        assert got.logprobs[i][got.completion_mask[i]].tolist() == pytest.approx(logprobs, abs=1e-4)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]]).log()
    kept = narrow(logits, 0, 0.7).isfinite().tolist()
    assert kept == [[False, True, False, True], [True, False, False, False]]
    assert narrow(logits, 2, 1.0).isfinite().tolist()[0] == [False, True, False, True]


def test_temperature_zero_takes_the_likeliest_token_every_time() -> None:
    model = make_model("gpt2")
    ids, mask = pad_left([[5, 6, 7]], PAD)
    draws = [torch.rand(1, 6, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    one, two = (
        decode(model, ids, mask, uniforms, temperature=0, eos_id=EOS, pad_id=PAD).completion_ids
        for uniforms in draws
    )
    assert torch.equal(one, two)
    with torch.no_grad():
        assert one[0, 0] == model(ids).logits[0, -1].argmax()


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    n = 20_000
    uniforms = (torch.arange(n) + 0.5) / n
    tokens, logprobs = sampling.draw(probabilities.log().expand(n, 4), uniforms, 1.0)
    assert (tokens.bincount(minlength=4) / n).tolist() == pytest.approx([0.5, 0, 0.2, 0.3])
    assert logprobs.exp().mean().item() == pytest.approx(0.25 + 0.04 + 0.09, abs=1e-4)
    highest = torch.tensor([1 - 2**-24])
    assert sampling.draw(torch.tensor([[0.0, 0.0, -1e9]]), highest, 1.0)[0].item() == 1


def test_what_stands_at_masked_positions_does_not_matter_and_the_batch_can_be_split() -> None:
    model = make_model("qwen2")
    ids, mask = pad_left(PROMPTS, PAD)
    completions = torch.tensor([[5, 6, 1], [7, 1, 0], [8, 9, 10], [1, 0, 0], [2, 3, 1], [4, 4, 4]])
    completion_mask = torch.tensor(
        [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 1]], dtype=torch.bool
    )
    expected = completion_logprobs(model, ids, mask, completions, completion_mask, temperature=1)
    noisy_ids = ids.masked_fill(~mask, 19)
    noisy = completions.masked_fill(~completion_mask, 17)
    got = completion_logprobs(model, noisy_ids, mask, noisy, completion_mask, temperature=1)
    torch.testing.assert_close(got, expected)
    halves = [
        completion_logprobs(
            model, ids[s], mask[s], completions[s], completion_mask[s], temperature=1
        )
        for s in (slice(0, 2), slice(2, None))
    ]
    torch.testing.assert_close(torch.cat(halves), expected, atol=1e-5, rtol=0)


def test_logprobs_in_pieces_have_the_same_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama")
    ids, mask = pad_left(PROMPTS, PAD)
    completions = torch.randint(2, V, (len(PROMPTS), 4), generator=torch.Generator().manual_seed(0))
    everywhere = torch.ones_like(completions, dtype=torch.bool)

    def value_and_gradient() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        value = completion_logprobs(model, ids, mask, completions, everywhere, temperature=0.9)
        torch.autograd.backward(value.square().sum())
        return value.detach(), model.model.embed_tokens.weight.grad.clone()

    whole = value_and_gradient()
    monkeypatch.setattr(sampling, "LOGITS_AT_ONCE", 5 * V)
    pieces = value_and_gradient()
    # Sums in another order, some of thousands of terms that nearly cancel.
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "phi"])  # without a bias in the output layer, and with
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_fast_on_a_gpu_has_the_values_and_gradients_of_the_cpu(
    name: str, *, autocast: bool
) -> None:
    model = make_model(name)
    head = output_head(model)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, head.in_features, generator=generator)
    tokens = torch.randint(V, (40,), generator=generator)
    weights = torch.randn(40, generator=generator)

    def value_and_gradients(kind: str) -> list[Tensor | None]:
        model.zero_grad()
        given = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logprobs = state_logprobs(model, given, tokens, 0.9, as_on=kind)
        torch.autograd.backward(logprobs @ weights)
        return [logprobs.detach(), *(x.grad for x in (given, *head.parameters()))]

    assert aligned_head(model, "cpu") is head
    assert aligned_head(model, "cuda") is not head  # 23 words do not make whole tiles
    torch.testing.assert_close(value_and_gradients("cuda"), value_and_gradients("cpu"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 3.0}),
        ("hyperclovax", {"logits_scaling": 0.25}),  # which multiplies by what Granite divides by
        (
            "falcon_h1",
            {
                "lm_head_multiplier": 0.3,
                "mamba_d_ssm": 16,
                "mamba_n_heads": 2,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "mamba_chunk_size": 4,
            },
        ),
        ("gemma4", {"text_config": GEMMA4_TEXT, "vision_config": None, "audio_config": None}),
    ],
)
def test_logits_are_scaled_as_the_family_scales_them(family: str, changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(
        family, **{**LLAMA_LIKE, "num_key_value_heads": 2, **COMMON, **changes}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        hidden = trunk_of(model)(input_ids=ids).last_hidden_state
        torch.testing.assert_close(logits_of(model, hidden), model(input_ids=ids).logits)


def test_hidden_states_have_not_seen_the_token_they_predict() -> None:
    model = make_model("gpt_neo")
    ids, mask = pad_left([[5, 6, 7]], PAD)
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    before = completion_hidden(model, ids, mask, torch.tensor([[3, 4, 5, 6]]), everywhere)
    after = completion_hidden(model, ids, mask, torch.tensor([[3, 4, 9, 6]]), everywhere)
    assert before.shape == (1, 4, 16)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3], after[:, 3])


def tiny_policy() -> Policy:
    return build_tiny(
        ["open the settings page", "where is my order"] * 5,
        vocabulary=300,
        layers=1,
        width=32,
        heads=2,
        context=64,
        seed=0,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_model_whose_logits_are_no_numbers_is_told(temperature: float) -> None:
    policy = build_tiny(
        ["tell me a tale"] * 9, vocabulary=280, layers=1, width=32, heads=2, context=64, seed=0
    )
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(math.nan)
    room: dict[str, Any] = {"max_completion_tokens": 8, "max_prompt_tokens": 16}
    with pytest.raises(ModelError, match="must give finite logits"):
        complete(policy, [user_prompt("hi")] * 3, temperature=temperature, seed=0, **room)
    with pytest.raises(ModelError, match="must give finite logits"):
        list(stream(policy, user_prompt("hi"), temperature=temperature, seed=0, **room))


def test_complete_keeps_order_and_ignores_batch_size() -> None:
    policy = tiny_policy()
    prompts = [user_prompt("order " * n) for n in (5, 1, 3, 1, 9, 2)]
    settings: dict[str, Any] = {
        "max_completion_tokens": 10,
        "max_prompt_tokens": 40,
        "temperature": 1.0,
        "seed": 4,
    }
    heard: list[Any] = []
    one = complete(policy, prompts, batch_size=1, **settings)
    all_at_once = complete(policy, prompts, batch_size=64, report=heard.append, **settings)
    assert one == all_at_once
    assert len(one) == 6
    assert one[1] != one[3]  # the same prompt, other random numbers
    assert all(1 <= c.tokens <= 10 and c.finished == (c.tokens < 10) for c in one if c.tokens < 10)
    assert heard == [{"completions": 6, "of": 6}]
    assert complete(policy, [], **settings) == []


def test_refusals_say_what_is_wrong() -> None:
    policy = tiny_policy()
    ids, mask = pad_left([[5, 6], [7]], PAD)
    good: dict[str, Any] = {
        "uniforms": torch.zeros(2, 4),
        "temperature": 1.0,
        "eos_id": EOS,
        "pad_id": PAD,
    }
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"uniforms": torch.zeros(2, 0)}):
        with pytest.raises(ModelError, match="sampling needs"):
            decode(policy.model, ids, mask, **{**good, **wrong})
    with pytest.raises(ShapeMismatch, match="padded on the left"):
        decode(policy.model, ids.flip(1), mask.flip(1), **good)
    with pytest.raises(ShapeMismatch, match="agree in shape"):
        decode(policy.model, ids, mask[:, :1], **good)
    with pytest.raises(ShapeMismatch, match="pass pairs"):
        completion_hidden(policy.model, ids, mask, ids, mask[:1])
    with pytest.raises(ModelError, match="must fit a context of 64 tokens, found 60 \\+ 10"):
        complete(policy, [user_prompt("x")], max_completion_tokens=10, max_prompt_tokens=60, seed=0)
    with pytest.raises(ModelError, match="an output layer"):
        sampling.output_head(policy.model.model)
    with pytest.raises(ModelError, match="a trunk of its own"):
        sampling.trunk_of(policy.model.model)
