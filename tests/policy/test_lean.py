"""The lean forward pass against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rlhf_pipeline.policy import lean
from rlhf_pipeline.policy.adapters import add_adapters
from rlhf_pipeline.policy.cache import empty_cache
from rlhf_pipeline.policy.lean import LeanLlama, can_lean, drawn, plain_forward, scripted
from rlhf_pipeline.policy.sampling import draw


def llama(**changes: Any) -> LlamaForCausalLM:
    """Return a small Llama whose every weight is a number of its own, norms and biases too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, **{**sizes, **changes})
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape) / 4)
    return model


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "head_dim": 16}],
)
@torch.inference_mode()
def test_lean_logits_are_those_of_transformers(changes: dict[str, Any], script: bool) -> None:
    """Prompts of other lengths, then tokens one by one: what real tokens see is the same."""
    model = llama(**changes)
    assert can_lean(model)
    ours, steps = LeanLlama(model), 70  # more than a cache has room for at first
    assert isinstance(ours.run, torch.jit.ScriptFunction)
    if not script:
        ours.run = lean._run
    starts = torch.tensor([0, 3, 6])
    ids = torch.randint(50, (3, 7 + steps))
    caches = [empty_cache(model.config) for _ in range(2)]
    for begin, end in [(0, 7), *((7 + t, 8 + t) for t in range(steps))]:
        theirs = plain_forward(model, ids[:, begin:end], starts, caches[0])
        found = ours(ids[:, begin:end], starts, caches[1])
        torch.testing.assert_close(found, theirs, atol=1e-4, rtol=1e-4)
    mask = torch.arange(7 + steps) >= starts[:, None]
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        for theirs, found in ((one.keys, other.keys), (one.values, other.values)):
            assert found.isfinite().all()
            real = found.transpose(1, 2)[mask], theirs.transpose(1, 2)[mask]
            torch.testing.assert_close(*real, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.5), (0.0, 1.0)])
@torch.inference_mode()
def test_tokens_are_drawn_as_everywhere_and_broken_rows_are_told(
    temperature: float, top_p: float
) -> None:
    logits, uniforms = torch.randn(40, 30), torch.rand(40)
    expected, _ = draw(logits, uniforms, temperature, 0, top_p)
    logits[3, 2], logits[5, 0] = float("nan"), float("inf")
    for function in (drawn, scripted(drawn)):
        tokens, sound = function(logits, uniforms, temperature, top_p)
        assert (~sound).nonzero().flatten().tolist() == [3, 5]
        assert tokens[sound].equal(expected[sound])


def test_a_pytorch_without_torchscript_runs_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.jit, "script")
    assert scripted(drawn) is drawn


def test_other_models_keep_their_own_forward() -> None:
    """Other kinds, types, adapters, positions that change with the length: none is run lean."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    eager = llama()
    eager.config._attn_implementation = "eager"
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
    adapted = llama()
    add_adapters(adapted.model, "some", rank=2, alpha=4, seed=0)
    others = [gpt2, llama().bfloat16(), llama(rope_parameters=dynamic), eager, adapted]
    others.append(llama(hidden_act="gelu"))
    assert not any(can_lean(model) for model in others)
