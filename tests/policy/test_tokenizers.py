"""tiktoken encodings as fast tokenizers: the same tokens as tiktoken's own, and a sound policy."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.loading import Policy, load_policy, save_policy
from rlhf_pipeline.policy.sampling import complete
from rlhf_pipeline.policy.sft import train_sft
from rlhf_pipeline.policy.tiny import BYTES, Said, build_tiny, build_tiny_on, train_tokenizer
from rlhf_pipeline.policy.tokenizers import (
    PATTERNS,
    SAMPLES,
    diagnose,
    diagnose_model,
    find_tokenizer,
    from_ranks,
    pieces,
    read_ranks,
    tiktoken_tokenizer,
)
from rlhf_pipeline.records import SftExample, ignore_progress, user_prompt
from rlhf_pipeline.serving.app import create_app
from rlhf_pipeline.stages import Turn, train_baseline
from tests.assets.world import write_recipe

TEXTS = [*SAMPLES.values(), "the kettle, the lamp and the teapot are in the shop " * 3]


def made_ranks() -> dict[bytes, int]:
    """Ranks as an encoding has them: the bytes, then what a small BPE learnt to merge."""
    trained = train_tokenizer(TEXTS, vocabulary=420, context=64)
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    merges = json.loads(trained.backend_tokenizer.to_str())["model"]["merges"]
    learnt = (bytes(byte_of[letter] for letter in left + right) for left, right in merges)
    tokens = dict.fromkeys([*(bytes([b]) for b in range(256)), *learnt])
    return {token: rank for rank, token in enumerate(tokens)}


RANKS = made_ranks()


def write_ranks(path: Path, ranks: dict[bytes, int] = RANKS) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
@given(
    text=st.one_of(
        st.text(max_size=40),
        st.text("ab cdé'sTLl 0123456789\n\r\t\u00a0\u2028\u3000.,!/日👍🏽", max_size=30),
    )
)
@settings(max_examples=150)
def test_a_converted_encoding_gives_the_tokens_that_tiktoken_gives(name: str, text: str) -> None:
    theirs = tiktoken.Encoding(
        name, pat_str=PATTERNS[name], mergeable_ranks=RANKS, special_tokens={}
    )
    ours = _converted(name)
    ids = ours.encode(text).ids
    assert ids == theirs.encode(text, disallowed_special=())
    assert ours.decode(ids) == text


_MADE: dict[str, Tokenizer] = {}


def _converted(name: str) -> Tokenizer:
    if name not in _MADE:
        _MADE[name] = from_ranks(RANKS, PATTERNS[name])
    return _MADE[name]


def test_our_patterns_are_tiktokens_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiktoken_ext import openai_public

    nothing = {"data_gym_to_mergeable_bpe_ranks", "load_tiktoken_bpe"}
    for loader in nothing:  # what would reach for the network
        monkeypatch.setattr(openai_public, loader, lambda *_, **__: {})
    for name, pattern in PATTERNS.items():
        assert openai_public.ENCODING_CONSTRUCTORS[name]()["pat_str"] == pattern, name


def test_a_named_encoding_comes_from_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiktoken.Encoding(
        "shop", pat_str=PATTERNS["gpt2"], mergeable_ranks=RANKS, special_tokens={}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"shop": made}.__getitem__)
    found = find_tokenizer("tiktoken:shop")
    assert found("the lamp")["input_ids"] == made.encode("the lamp")
    with pytest.raises(ModelError, match=r"known: gpt2, .*name a local \.tiktoken file"):
        tiktoken_tokenizer("tiktoken:nowhere")


def test_ranks_with_a_gap_keep_their_order(tmp_path: Path) -> None:
    gapped = {token: rank + 10 * (rank > 300) for token, rank in RANKS.items()}
    path = write_ranks(tmp_path / "gapped.tiktoken", gapped)
    assert read_ranks(path) == gapped
    whole = tiktoken_tokenizer(str(write_ranks(tmp_path / "whole.tiktoken")))
    assert whole(TEXTS)["input_ids"] == tiktoken_tokenizer(str(path))(TEXTS)["input_ids"]


@pytest.mark.parametrize("content", [b"no ranks\n", b"YQ== 0\n", b"YQ==\n", b"YQ== x\n"], ids=str)
def test_what_holds_no_ranks_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.tiktoken"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"needed (at|in) .*bad\.tiktoken, found"):
        tiktoken_tokenizer(str(path))
    with pytest.raises(ModelError, match=r"gone\.tiktoken, found"):
        tiktoken_tokenizer(str(tmp_path / "gone.tiktoken"))


def test_a_tiny_policy_learns_and_answers_on_an_encoding(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "cl100k_base.tiktoken")
    policy = build_tiny_on(str(path), layers=1, width=32, heads=2, context=64, seed=0)
    example = SftExample(user_prompt("how much is the lamp?"), "the lamp is 9 €", "seed")
    train_sft(
        policy,
        [example] * 32,
        tmp_path / "sft",
        epochs=12,
        learning_rate=1e-2,
        batch_size=8,
        max_tokens=64,
        seed=0,
    )
    served = load_policy(next(p.parent for p in tmp_path.rglob("config.json")), device="cpu")
    (completion,) = complete(
        served,
        [example.prompt],
        max_completion_tokens=24,
        max_prompt_tokens=40,
        temperature=0,
        seed=0,
    )
    assert completion.text == example.completion
    assert completion.finished
    assert diagnose(served.tokenizer).is_sound


@pytest.mark.slow
def test_a_recipe_trains_on_an_encoding_and_the_service_answers_with_it(tmp_path: Path) -> None:
    ranks = write_ranks(tmp_path / "cl100k_base.tiktoken")
    tiny = {"layers": 1, "width": 32, "heads": 2, "context": 96, "encoding": str(ranks)}
    tokens = {"max_prompt_tokens": 64, "max_completion_tokens": 24}
    recipe = write_recipe(
        tmp_path / "encoding.yaml", tmp_path / "state", policy={"tiny": tiny, **tokens}
    )
    settings = load_settings(str(recipe))
    work = tmp_path / "work"
    turn = Turn("shop", "f" * 64, 0, 1, tmp_path / "data", work, None, None, settings)
    path = Path(train_baseline(turn, ignore_progress, lambda: None)["path"])
    here = Workspace(str(recipe))
    here.store.ensure_agent("shop")
    files = folder_sha256(path)
    here.ledger.add_baseline("shop", label="v0", path=path, files=files, lineage={}, actor="test")
    app = create_app(settings, pages=False)
    text = "how much is the lamp in €?"
    with TestClient(app, base_url="http://localhost") as client:
        body = {"model": "shop", "messages": [{"role": "user", "content": text}], "seed": 1}
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    kept = here.store.interaction(said["id"])
    here.database.close()
    assert kept is not None
    assert kept.completion == said["choices"][0]["message"]["content"] != ""
    assert kept.model_version == 0
    own = tiktoken_tokenizer(str(ranks))
    assert load_policy(path, device="cpu").tokenizer.encode(text) == own.encode(text)
    assert said["usage"]["prompt_tokens"] > len(own.encode(text))  # and the turns' own marks


def test_a_look_at_a_tokenizer_says_what_it_loses() -> None:
    sound = tiktoken_like()
    report = diagnose(sound, ["mine"])
    assert report.is_sound
    assert "8 of 8 samples" in "\n".join(report.lines())
    sound.backend_tokenizer.normalizer = normalizers.Lowercase()
    report = diagnose(sound, ["MINE"])
    assert not report.is_sound
    assert report.changed["plain"] == SAMPLES["plain"].lower()
    told = "\n".join(report.lines())
    assert f"{8 - len(report.changed)} of 8 samples" in told
    assert "yours 1: 'MINE' -> 'mine'" in told


def tiktoken_like() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocabulary=300, context=512)


def test_pieces_say_how_a_text_is_cut() -> None:
    cut = pieces(tiktoken_like(), "the kettle")
    assert "".join(text for _, text in cut) == "the kettle"


def test_a_look_at_a_model_finds_weights_that_are_no_numbers(tmp_path: Path) -> None:
    policy = build_tiny(TEXTS, vocabulary=300, layers=1, width=32, heads=2, context=64, seed=0)
    report = diagnose_model(policy, tokens=4)
    assert report.is_sound
    assert report.parameters == sum(p.numel() for p in policy.model.parameters())
    assert "all finite" in "\n".join(report.lines())
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[-1, 0] = float("nan")
    assert not diagnose_model(policy, tokens=4).is_sound
    save_policy(policy, tmp_path / "kept")
    more: Policy = load_policy(tmp_path / "kept", device="cpu")
    more.tokenizer.add_tokens(["one", "too", "many"])
    assert not diagnose_model(more, tokens=4).tokens_fit


def test_a_tokenizer_keeps_no_word_of_few_people() -> None:
    def by(word: str, askers: int, voters: int, places: int) -> list[Said]:
        return [
            Said(f"it is {word} who asks", (f"a{n % askers}", f"v{n % voters}", f"c{n % places}"))
            for n in range(12)
        ]

    said = [
        *by("Brzeczyszczykiewicz", 2, 2, 12),  # two people, wherever
        *by("Grzegorz", 1, 3, 12),  # somebody on whose chats three vote
        *by("wherefore", 12, 2, 12),  # two annotators
        *by("kettlefish", 12, 12, 2),  # a conversation that many voted on
        *by("everybody", 3, 3, 12),
        *by("Brzoza", 12, 12, 12),  # which begins as the first does
    ]
    seeds = ["the kettle is here"] * 5
    texts = [*seeds, *(one.text for one in said)]
    whose = [*(Said(text, None) for text in seeds), *said]
    tokenizer = train_tokenizer(texts, whose, vocabulary=800, context=64)
    plain = train_tokenizer(seeds, vocabulary=800, context=64)
    words = {token.removeprefix("Ġ") for token in tokenizer.get_vocab()}
    assert {"everybody", "Brzoza", "kettle", "who"} <= words
    few = ("Brzeczy", "Grzeg", "kettlef", "wheref")
    assert not any(start in word for word in words for start in few)
    everything = train_tokenizer(texts, vocabulary=800, context=64)
    assert {"ĠBrzeczyszczykiewicz", "ĠGrzegorz", "Ġkettlefish"} <= everything.get_vocab().keys()
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert tokenizer.all_special_ids == plain.all_special_ids
    for text in (*SAMPLES.values(), *(one.text for one in said)):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    two = by("anybody", 2, 2, 2)
    nothing = train_tokenizer([one.text for one in two], two, vocabulary=800, context=64)
    assert len(nothing) == BYTES + len(nothing.all_special_tokens)


@pytest.mark.parametrize("text", [*SAMPLES.values()], ids=[*SAMPLES])
def test_what_three_people_said_is_a_tokenizers_as_a_seed_is(text: str) -> None:
    said = [Said(text, (who, who, who)) for who in ("ann", "bob", "cy")]
    heard = train_tokenizer([text], said, vocabulary=500, context=64)
    told = train_tokenizer([text], vocabulary=500, context=64)
    assert heard.backend_tokenizer.to_str() == told.backend_tokenizer.to_str()
