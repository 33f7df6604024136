"""The lean forward pass against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from rlhf_pipeline.policy.adapters import add_adapters
from rlhf_pipeline.policy.cache import empty_cache
from rlhf_pipeline.policy.lean import LeanLlama, can_lean
from rlhf_pipeline.policy.sampling import position_ids, run_trunk


def llama(**changes: Any) -> LlamaModel:
    """Return a small Llama whose every weight is a number of its own, norms and biases too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, **{**sizes, **changes})
    config._attn_implementation = "sdpa"
    trunk = LlamaModel(config).eval()
    with torch.no_grad():
        for weights in trunk.parameters():
            weights.add_(torch.randn(weights.shape) / 4)
    return trunk


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "head_dim": 16}],
)
@torch.inference_mode()
def test_lean_states_are_those_of_transformers(changes: dict[str, Any]) -> None:
    """Prompts of other lengths, then tokens one by one: what real tokens see is the same."""
    trunk = llama(**changes)
    assert can_lean(trunk)
    lean, steps = LeanLlama(trunk), 4
    starts = torch.tensor([0, 3, 6])
    ids = torch.randint(50, (3, 7 + steps))
    mask = torch.arange(7 + steps)[None] >= starts[:, None]
    positions = position_ids(mask)
    caches = [empty_cache(trunk.config) for _ in range(2)]
    for begin, end in [(0, 7), *((7 + t, 8 + t) for t in range(steps))]:
        cut = slice(begin, end)
        args = ids[:, cut], mask[:, :end].long(), positions[:, cut]
        theirs, ours = run_trunk(trunk, *args, caches[0]), lean(*args, caches[1])
        torch.testing.assert_close(ours[mask[:, cut]], theirs[mask[:, cut]], atol=1e-4, rtol=1e-4)
        assert ours.isfinite().all()
    for theirs, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(
            ours.keys.transpose(1, 2)[mask], theirs.keys.transpose(1, 2)[mask], atol=1e-4, rtol=1e-4
        )


def test_other_models_keep_their_own_forward() -> None:
    """Other kinds, types, adapters, positions that change with the length: none is run lean."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    eager = llama()
    eager.config._attn_implementation = "eager"
    gpt2 = GPT2Model(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
    adapted = llama()
    add_adapters(adapted, "some", rank=2, alpha=4, seed=0)
    others = [gpt2, llama().bfloat16(), llama(rope_parameters=dynamic), eager, adapted]
    assert not any(can_lean(trunk) for trunk in others)
