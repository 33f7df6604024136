"""A policy built from nothing: a byte-level BPE trained here, or tiktoken's, and a small Llama.

It exists so that a fresh machine runs the whole loop offline and without a GPU. It knows nothing
until `train_sft` teaches it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.policy.loading import Policy
from rlhf_pipeline.policy.tokenizers import tiktoken_tokenizer

PAD, EOS = "<|pad|>", "<|eos|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
BYTES = 256  # the alphabet of byte-level BPE: any text can be written
AT_ONCE = 1000  # texts encoded
SAID_BY = 3  # people, in as many conversations: fewer are known by what is said

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


class Said(NamedTuple):
    """A text that a tokenizer may be fitted to, and what it may be told by."""

    text: str
    of: tuple[str, str, str] | None  # who asked, who voted, in which conversation; None: a seed


def build_tiny(
    texts: Iterable[str],
    said: Sequence[Said] = (),
    /,
    *,
    vocabulary: int,
    layers: int,
    width: int,
    heads: int,
    context: int,
    seed: int,
) -> Policy:
    """Return an untrained policy on the CPU whose tokenizer is fitted to `texts`.

    A tokenizer is readable, and outlives an erasure: where it is told who `said` what, its tokens
    hold nothing that stands in no seed, and that fewer than SAID_BY people asked or were answered,
    as many voted on, in as many conversations.
    `vocabulary` is the most tokens there may be; few texts give fewer. The same arguments give the
    same tokenizer and the same weights. Raises ModelError where the sizes do not fit together.
    """
    smallest = BYTES + len(ROLES) + 2
    if vocabulary < smallest:
        raise ModelError(
            f"a byte-level vocabulary needs at least {smallest} tokens, found {vocabulary}; "
            "raise `vocabulary`"
        )
    _check_width(width, heads)
    tokenizer = train_tokenizer(texts, said, vocabulary=vocabulary, context=context)
    return _on(tokenizer, layers=layers, width=width, heads=heads, context=context, seed=seed)


def build_tiny_on(
    encoding: str, *, layers: int, width: int, heads: int, context: int, seed: int
) -> Policy:
    """Return an untrained policy as `build_tiny` does, on a tiktoken name or ranks file."""
    _check_width(width, heads)
    tokenizer = _with_roles(tiktoken_tokenizer(encoding), context)
    return _on(tokenizer, layers=layers, width=width, heads=heads, context=context, seed=seed)


def _check_width(width: int, heads: int) -> None:
    if width % heads or (width // heads) % 2:
        raise ModelError(
            f"width / heads must be a whole even number (rotary positions), found {width} / "
            f"{heads}; choose e.g. width 128 and heads 4"
        )


def _on(
    tokenizer: PreTrainedTokenizerFast,
    *,
    layers: int,
    width: int,
    heads: int,
    context: int,
    seed: int,
) -> Policy:
    config = tiny_config(
        len(tokenizer),
        layers=layers,
        width=width,
        heads=heads,
        context=context,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return Policy(model.eval(), tokenizer)


def tiny_config(
    vocabulary: int, *, layers: int, width: int, heads: int, context: int, **tokens: int
) -> LlamaConfig:
    """Return the configuration of the tiny policy; `tokens` are ids such as eos_token_id."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 32) * 32,  # SwiGLU's 8/3, arXiv:2002.05202
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        **tokens,
    )


def train_tokenizer(
    texts: Iterable[str], said: Sequence[Said] = (), /, *, vocabulary: int, context: int
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with role tokens, pad, eos and a chat template.

    It is fitted to `texts`, and holds of what was `said` what `build_tiny` has it hold.
    Source of byte-level BPE: Radford et al. 2019 (GPT-2), section 2.2.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[PAD, EOS, *ROLES],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if said:
        bpe.model = _of_several(bpe, said)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    return _with_roles(tokenizer, context)


def _of_several(bpe: Tokenizer, said: Sequence[Said]) -> models.BPE:
    """Return its merges without those that too few people's words came to."""
    model = json.loads(bpe.to_str())["model"]
    parts = {token: {token} for token in model["vocab"]}
    for left, right in model["merges"]:  # the tokens that a token was merged from, and itself
        parts[left + right] |= parts[left] | parts[right]
    merged = {left + right for left, right in model["merges"]}
    kept = model["vocab"].keys() - merged
    told: dict[str, tuple[set[str], ...]] = {}  # by token: who asked, who voted, where
    for one, found in zip(said, _found(bpe, [one.text for one in said], parts), strict=True):
        if one.of is None:
            kept |= found
            continue
        for token in found - kept:
            of_it = told.setdefault(token, (set(), set(), set()))
            for so_far, new in zip(of_it, one.of, strict=True):
                so_far.add(new)
            if min(map(len, of_it)) >= SAID_BY:
                kept.add(token)  # and whatever it was merged from, which was found as often
    vocabulary = [
        token for token in sorted(model["vocab"], key=model["vocab"].get) if token in kept
    ]
    merges = [(left, right) for left, right in model["merges"] if left + right in kept]
    return models.BPE(vocab={token: n for n, token in enumerate(vocabulary)}, merges=merges)


def _found(bpe: Tokenizer, texts: Sequence[str], parts: dict[str, set[str]]) -> Iterable[set[str]]:
    """Return which tokens, and parts of tokens, each text is of."""
    for start in range(0, len(texts), AT_ONCE):
        for encoded in bpe.encode_batch(texts[start : start + AT_ONCE]):
            yield set[str]().union(*(parts[token] for token in {*encoded.tokens}))


def _with_roles(tokenizer: PreTrainedTokenizerFast, context: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer with a token for each role, the chat template and its longest text."""
    tokenizer.add_special_tokens({"additional_special_tokens": list(ROLES)})
    tokenizer.model_max_length = context
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
