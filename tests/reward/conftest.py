"""A planted preference: the kind completion is the better one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast

from rlhf_pipeline.policy.loading import save_policy
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.records import (
    FeedbackKind,
    PreferencePair,
    RewardExample,
    RewardInput,
    user_prompt,
)

SETTINGS: dict[str, Any] = {
    "epochs": 4,
    "learning_rate": 3e-3,
    "batch_size": 16,
    "max_prompt_tokens": 32,
    "max_completion_tokens": 40,
    "seed": 0,
    "device": "cpu",
}
"""How the tests train a reward model."""

WORDS = "the order is ready at our shop today and you can open it in blue or green".split()


@dataclass(frozen=True)
class Planted:
    """A small base model and pairs whose chosen side holds a kind word."""

    base: Path
    train: Sequence[PreferencePair]
    test: Sequence[PreferencePair]
    centre: Sequence[RewardInput]


def planted_pairs(count: int, *, start: int, seed: int) -> list[PreferencePair]:
    """Return pairs on prompts numbered from `start`; length says nothing."""
    rng = random.Random(seed)
    pairs = []
    for i in range(start, start + count):
        plain, kind = (rng.choices(WORDS, k=rng.randint(3, 9)) for _ in range(2))
        kind[rng.randrange(len(kind))] = "please"
        pairs.append(
            PreferencePair(
                pair_id=f"pair {i}",
                prompt=user_prompt(f"question {i} {rng.choice(WORDS)}?"),
                chosen=" ".join(kind),
                rejected=" ".join(plain),
                voter="v",
                origin="test",
                split="train",
            )
        )
    return pairs


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Return the planted preference on a base model that has learnt nothing."""
    train = planted_pairs(240, start=0, seed=1)
    test = planted_pairs(80, start=1000, seed=2)
    texts = [f"{p.prompt[0].content} {p.chosen} {p.rejected}" for p in train]
    policy = build_tiny(texts, vocabulary=340, layers=2, width=32, heads=2, context=96, seed=0)
    base = tmp_path_factory.mktemp("base") / "policy"
    save_policy(policy, base)
    centre = [RewardInput(p.prompt, p.rejected) for p in train[:40]]
    return Planted(base, train, test, centre)


SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "deberta-v2": {  # as DeBERTa-v3 sets it: relative positions alone, shared with the keys
        "relative_attention": True,
        "position_buckets": 16,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
}


def save_encoder(
    folder: Path,
    model_type: Literal["bert", "deberta-v2"],
    *,
    width: int = 16,
    layers: int = 1,
    context: int = 96,
) -> Path:
    """Save an encoder that has learnt nothing, and a tokenizer of whole words."""
    words = [*SPECIAL, "User", "Assistant", ":", "please", "question", *sorted(set(WORDS))]
    wordlevel = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    wordlevel.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wordlevel.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=wordlevel,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_max_length=context - 6,
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(words),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=context,
        **ENCODERS[model_type],
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scored_sides(pairs: Sequence[PreferencePair], voters: Sequence[str]) -> list[RewardExample]:
    """Return a score of both sides of each pair, the better one's first; the voters take turns."""
    return [
        RewardExample(
            f"{pair.pair_id}{side}",
            pair.prompt,
            text,
            FeedbackKind.score,
            number,
            None,
            voters[i % len(voters)],
            "train",
        )
        for i, pair in enumerate(pairs)
        for side, text, number in ((0, pair.chosen, 0.9), (1, pair.rejected, 0.2))
    ]
