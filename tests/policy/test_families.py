"""Every supported family samples as transformers generates, however far its prompts are padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_pipeline.policy.sampling import completion_logprobs, decode, pad_left

V, PAD, EOS = 23, 0, 1
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "initializer_range": 0.3,
    "init_std": 0.3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    # As OPT-350M has it: states as wide as the embeddings, narrower than the layers.
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 8},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "phi": {"intermediate_size": 24},
    "llama": {"intermediate_size": 24, "num_key_value_heads": 1},
    "qwen2": {"intermediate_size": 24, "num_key_value_heads": 1},
    "qwen3": {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8},
    "mistral": {"intermediate_size": 24, "num_key_value_heads": 1, "sliding_window": None},
    "gpt_neox": {"intermediate_size": 24},
}


def family_model(family: str, **changes: Any) -> Any:
    """Return a small model of this family with weights large enough to have opinions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **changes})
        return AutoModelForCausalLM.from_config(config).eval()


PROMPTS = [[5, 6], [7, 8, 9, 10, 11, 12], [13]]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_is_the_familys_own_generation(family: str) -> None:
    model = family_model(family)
    sampled = decode(
        model,
        *pad_left(PROMPTS, PAD),
        torch.zeros(len(PROMPTS), 10),
        temperature=0.0,
        eos_id=EOS,
        pad_id=PAD,
    )
    for i, prompt in enumerate(PROMPTS):  # alone: without any padding
        wanted = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=10,
            do_sample=False,
        )[0, len(prompt) :]
        length = int(sampled.completion_mask[i].sum())
        assert sampled.completion_ids[i, :length].tolist() == wanted.tolist()
    again = completion_logprobs(
        model,
        *pad_left(PROMPTS, PAD),
        sampled.completion_ids,
        sampled.completion_mask,
        temperature=1.0,
    )
    torch.testing.assert_close(again.detach(), sampled.logprobs, atol=1e-5, rtol=1e-5)
