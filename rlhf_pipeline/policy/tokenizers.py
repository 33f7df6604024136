"""Tokenizers: tiktoken encodings beside Hugging Face ones, and a look at whether one is sound.

A tiktoken encoding is a table of ranks (a line each: base64 of a token's bytes, a space, its rank)
and a pattern that cuts text into pieces before they are merged. Here it becomes an ordinary fast
tokenizer, so training, sampling, saving and serving need not know where it came from. Known
encodings go by name (`tiktoken:cl100k_base`, fetched once by tiktoken itself where the network
reaches), any by a local ranks file (`ranks.tiktoken`), offline.

What this does not do: the special tokens of an encoding (`<|endoftext|>` and the like) are left
out; a policy gets role tokens, pad and eos of its own.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.policy.chat import decode_completions, encode_completions
from rlhf_pipeline.policy.loading import Policy, load_tokenizer
from rlhf_pipeline.records import hashed

TIKTOKEN = "tiktoken:"
SUFFIX = ".tiktoken"
BYTES = 256

# Patterns of the published encodings: openai/tiktoken, tiktoken_ext/openai_public.py at 0.14.0.
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"""
    r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K_PATTERN = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
PATTERNS: Mapping[str, str] = {
    "gpt2": GPT2_PATTERN,
    "r50k_base": GPT2_PATTERN,
    "p50k_base": GPT2_PATTERN,
    "cl100k_base": CL100K_PATTERN,
    "o200k_base": O200K_PATTERN,
    "o200k_harmony": O200K_PATTERN,
}

TIMES_ENCODED = 20  # the samples, to see how fast that goes
SAMPLES: Mapping[str, str] = {
    "plain": "The kettle is 24.50 euros, isn't it?",
    "spaces": "  two before,\ttab,\n\nblank line  ",
    "accents": "Où est l'été? Straße, naïve, Ελληνικά, русский",
    "scripts": "日本語のテスト 한국어 العربية हिन्दी",
    "emoji": "👍🏽 👩‍👩‍👧 🇫🇷",
    "code": "def f(x):\n    return {'a': x**2}  # ok",
    "numbers": "1234567890 3.14159 1e-9",
}
"""Texts a byte-level tokenizer must give back as they were."""


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    """What a look at a tokenizer found."""

    kind: str
    tokens: int  # vocabulary, special tokens included
    special: Mapping[str, str]  # role -> spelling
    has_chat_template: bool
    tokens_per_character: float  # over the samples
    characters_per_second: float
    samples: Mapping[str, str]  # what was looked at, by name
    changed: Mapping[str, str]  # sample -> what came back, where it differs
    seals_special_tokens: bool  # text that spells a special token is not one

    @property
    def is_sound(self) -> bool:
        """Whether every sample came back as it was and no text acts as a special token."""
        return not self.changed and self.seals_special_tokens

    def lines(self) -> list[str]:
        """Return the report for a person."""
        special = ", ".join(f"{role} {text}" for role, text in self.special.items())
        seal = "cannot" if self.seals_special_tokens else "CAN"
        looked_at = len(self.samples)
        trip = f"{looked_at - len(self.changed)} of {looked_at} samples come back as they were"
        wrong = [f"             {n}: {self.samples[n]!r} -> {t!r}" for n, t in self.changed.items()]
        return [
            f"tokenizer    {self.kind}, {self.tokens:,} tokens",
            f"special      {special}; text {seal} spell one",
            f"template     {'its own' if self.has_chat_template else 'none: plain turns'}",
            f"round trip   {trip}",
            *wrong,
            f"size         {self.tokens_per_character:.2f} tokens a character, "
            f"{self.characters_per_second:,.0f} characters a second",
        ]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What a look at a policy's model found."""

    name: str
    parameters: int
    dtype: str
    device: str
    context_length: int  # tokens
    has_finite_weights: bool
    tokens_fit: bool  # every token has a row of weights
    tokens_per_second: float  # one row, decoding

    @property
    def is_sound(self) -> bool:
        """Whether it can answer at all."""
        return self.has_finite_weights and self.tokens_fit

    def lines(self) -> list[str]:
        """Return the report for a person."""
        finite = "all finite" if self.has_finite_weights else "NOT FINITE: do not serve it"
        fit = "" if self.tokens_fit else "; FEWER ROWS THAN TOKENS"
        return [
            f"model        {self.name}, {self.parameters:,} weights, {finite}{fit}",
            f"runs         {self.dtype} on {self.device}, context {self.context_length} tokens",
            f"speed        {self.tokens_per_second:,.0f} tokens a second, one answer at a time",
        ]


def find_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer at a tiktoken name, a ranks file, a local folder or a hub id."""
    if is_tiktoken(source):
        return tiktoken_tokenizer(source)
    return load_tokenizer(source)


def is_tiktoken(source: str) -> bool:
    """Tell whether a source names a tiktoken encoding or a file of ranks."""
    return source.startswith(TIKTOKEN) or source.endswith(SUFFIX)


def tiktoken_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Return a tiktoken encoding as a fast tokenizer that gives the same tokens, eos and pad added.

    A ranks file's pattern follows from its name (`cl100k_base.tiktoken`); cl100k_base's is taken
    for a name nobody knows. Raises ModelError where there are no ranks to read.
    """
    if source.startswith(TIKTOKEN):
        ranks, pattern = _named_ranks(source.removeprefix(TIKTOKEN))
    else:
        path = Path(source)
        ranks = read_ranks(path)
        pattern = PATTERNS.get(path.name.removesuffix(SUFFIX), CL100K_PATTERN)
    return PreTrainedTokenizerFast(
        tokenizer_object=from_ranks(ranks, pattern),
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks in a file: a line each, base64 of the token's bytes, a space, the rank.

    Raises ModelError for a file that is none, or whose ranks do not start with all 256 bytes.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelError(
            f"a file of tiktoken ranks (base64 and a number a line) is needed at {path}, found "
            f"{error}; check the path, or fetch the encoding's .tiktoken file again"
        ) from error
    return _checked(ranks, str(path))


def _named_ranks(name: str) -> tuple[dict[bytes, int], str]:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # requests and tiktoken raise a dozen unrelated types
        known = ", ".join(PATTERNS)
        raise ModelError(
            f"the tiktoken encoding {name!r} is needed (known: {known}), found "
            f"{type(error).__name__}: {str(error)[:200]}; name a local {SUFFIX} file instead, or "
            "set TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from error
    return _checked(dict(encoding._mergeable_ranks), name), str(encoding._pat_str)


def _checked(ranks: dict[bytes, int], source: str) -> dict[bytes, int]:
    missing = sum(bytes([b]) not in ranks for b in range(BYTES))
    if missing or len(set(ranks.values())) != len(ranks):
        raise ModelError(
            f"ranks that differ, with every single byte among them, are needed in {source}, found "
            f"{len(ranks)} tokens, {missing} bytes missing; take the encoding's whole file"
        )
    return ranks


def from_ranks(ranks: Mapping[bytes, int], pattern: str) -> Tokenizer:
    """Return a byte-level BPE that cuts by `pattern` and merges in the ranks' order.

    tiktoken merges the neighbours whose union has the lowest rank. The BPE of `tokenizers` merges
    listed pairs in the list's order, so the list holds every split of every token into two others,
    by the token's rank; a piece that is a token as a whole is taken at once in both. A token's id
    is its rank, or its place among the ranks where those have gaps (p50k_base).
    """
    spelled = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    in_order = sorted(ranks, key=ranks.__getitem__)
    merges = [
        (text(token[:cut]), text(token[cut:]))
        for token in in_order
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {text(token): i for i, token in enumerate(in_order)}
    bpe = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_for_oniguruma(pattern)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _for_oniguruma(pattern: str) -> str:
    """Return tiktoken's pattern in the dialect of `tokenizers`.

    There `{1,3}+` repeats the repetition instead of holding on to it, and `$` also matches before
    a line break.
    """
    return re.sub(r"(\{\d+,\d+\})\+", r"\1", pattern).replace("$", r"\z")


def diagnose(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = ()) -> TokenizerReport:
    """Return what encoding and decoding the samples, and `texts`, finds."""
    samples = {**SAMPLES, **{f"yours {i}": text for i, text in enumerate(texts, 1)}}
    changed = {}
    tokens = 0
    for name, text in samples.items():
        row = encode_completions(tokenizer, [text], max_tokens=len(text.encode()) + 2)[0]
        row = row[:-1] if row and row[-1] == tokenizer.eos_token_id else row
        tokens += len(row)
        back = decode_completions(tokenizer, [row])[0]
        if back != text and back != text.removeprefix(" "):
            changed[name] = back
    characters = sum(map(len, samples.values()))
    began = time.perf_counter()
    for _ in range(TIMES_ENCODED):
        encode_completions(tokenizer, list(samples.values()), max_tokens=10_000)
    seconds = time.perf_counter() - began
    marks = [str(token) for token in tokenizer.added_tokens_encoder]
    ids = set(tokenizer.added_tokens_encoder.values())
    forged = encode_completions(tokenizer, [f"a {m} b" for m in marks], max_tokens=1_000)
    return TokenizerReport(
        kind=type(tokenizer).__name__,
        tokens=len(tokenizer),
        special={
            role: str(getattr(tokenizer, f"{role}_token"))
            for role in ("bos", "eos", "pad", "unk")
            if getattr(tokenizer, f"{role}_token", None) is not None
        },
        has_chat_template=bool(tokenizer.chat_template),
        tokens_per_character=tokens / characters,
        characters_per_second=TIMES_ENCODED * characters / seconds,
        samples=samples,
        changed=changed,
        seals_special_tokens=not any(set(row[:-1]) & ids for row in forged),
    )


def diagnose_model(policy: Policy, *, tokens: int = 32) -> ModelReport:
    """Return what a look at every weight and a short decode finds."""
    from rlhf_pipeline.policy.streaming import stream
    from rlhf_pipeline.records import user_prompt

    model = policy.model
    rows = int(model.get_input_embeddings().weight.shape[0])
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    room = min(tokens, policy.context_length // 2)
    written = stream(
        policy,
        user_prompt("hello"),
        max_completion_tokens=room,
        max_prompt_tokens=policy.context_length - room,
        temperature=0,
        seed=0,
    )
    began = time.perf_counter()
    last = list(written)[-1] if finite else None  # others give no logits to draw from
    seconds = time.perf_counter() - began
    return ModelReport(
        name=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        device=str(policy.device),
        context_length=policy.context_length,
        has_finite_weights=finite,
        tokens_fit=len(policy.tokenizer) <= rows,
        tokens_per_second=getattr(last, "tokens", 0) / seconds,
    )


def reading_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, str | None]:
    """Return what of a tokenizer decides which tokens a model reads, long parts as digests."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    template = tokenizer.chat_template
    return {
        "vocabulary": hashed(vocabulary)[:32],
        **{f"{role}_token": getattr(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad")},
        "chat_template": hashed(json.dumps(template, sort_keys=True))[:32] if template else None,
    }


def pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, str]]:
    """Return each token of a text and how it reads alone."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [(int(i), str(tokenizer.decode([i], clean_up_tokenization_spaces=False))) for i in ids]
