"""A reward model on an encoder: BERT's and DeBERTa's kind, whole or with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import new_folder
from rlhf_pipeline.policy.loading import load_tokenizer
from rlhf_pipeline.records import RewardInput, user_prompt
from rlhf_pipeline.reward.ensemble import EnsembleReward
from rlhf_pipeline.reward.model import (
    Calibration,
    Limits,
    encode_rows,
    load_reward_model,
    new_reward_model,
    save_reward_model,
    score_rows,
)
from rlhf_pipeline.reward.training import train_reward_model
from tests.reward.conftest import ENCODERS, SETTINGS, Planted, save_encoder

Kind = Literal["bert", "deberta-v2"]
LIMITS = Limits(32, 40)
CONVERSATIONS = [
    (user_prompt("order"), "please"),
    (user_prompt("order open"), "no please order it today"),
]


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("reads", ["first", "mean"])
def test_an_encoder_is_read_at_its_first_token_or_the_mean_and_loads_again(
    tmp_path: Path, kind: Kind, reads: Any
) -> None:
    base = save_encoder(tmp_path / "base", kind)
    model, tokenizer = new_reward_model(
        base, seed=0, reads=None if reads == "first" else reads, device="cpu"
    )
    assert (model.encoder, model.reads) == (True, reads)
    rows = encode_rows(tokenizer, CONVERSATIONS, LIMITS)
    assert rows[0].ids[0] == tokenizer.cls_token_id
    assert rows[0].ids.count(tokenizer.sep_token_id) == 1
    with torch.no_grad():  # each alone, so nothing is padded
        states = [model.trunk(torch.tensor([row.ids])).last_hidden_state[0] for row in rows]
        read = [state[0] if reads == "first" else state.mean(0) for state in states]
        expected = [float(model.head(state)) for state in read]
    assert score_rows(model, rows) == pytest.approx(expected, abs=1e-5)
    with new_folder(tmp_path / "rm") as folder:
        save_reward_model(model, tokenizer, folder, limits=LIMITS, calibration=Calibration(0.5))
    reward = load_reward_model(tmp_path / "rm", device="cpu")
    items = [RewardInput(p, c) for p, c in CONVERSATIONS]
    assert reward(items) == pytest.approx([s - 0.5 for s in expected], abs=1e-5)


def test_a_shortened_prompt_keeps_the_token_that_is_read(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_encoder(tmp_path / "base", "bert"))
    prompt = user_prompt("order " * 40)
    (row,) = encode_rows(tokenizer, [(prompt, "please")], Limits(8, 8))
    assert (row.start, row.ids[0]) == (8, tokenizer.cls_token_id)


@pytest.mark.parametrize("kind", ENCODERS)
def test_bert_s_pooler_is_left_out_so_the_same_seed_gives_the_same_model(
    tmp_path: Path, kind: Kind
) -> None:
    base = save_encoder(tmp_path / "base", kind)  # a masked language model's, without a pooler
    for name in ("a", "b"):
        model, tokenizer = new_reward_model(base, seed=0, device="cpu")
        assert not [n for n, _ in model.named_parameters() if "pooler" in n]
        with new_folder(tmp_path / name) as folder:
            save_reward_model(model, tokenizer, folder, limits=LIMITS, calibration=Calibration())
    versions = [load_reward_model(tmp_path / name, device="cpu").version for name in ("a", "b")]
    assert versions[0] == versions[1]


@pytest.mark.parametrize(
    ("kind", "rank"), [("bert", 0), ("bert", 4), ("deberta-v2", 0), ("deberta-v2", 4)]
)
@pytest.mark.slow
def test_an_encoder_learns_a_planted_preference_whole_or_with_adapters(
    planted: Planted, tmp_path: Path, kind: Kind, rank: int
) -> None:
    base = save_encoder(tmp_path / "base", kind, width=32, layers=2)
    report = train_reward_model(
        base,
        planted.train,
        planted.test,
        tmp_path / "rm",
        freeze_trunk=False,
        centre_on=planted.centre,
        lora_rank=rank,
        **SETTINGS,
    )
    assert report.accuracy > 0.9
    has_trunk = (tmp_path / "rm" / "trunk" / "config.json").is_file()
    has_adapters = (tmp_path / "rm" / "trunk" / "adapter_model.safetensors").is_file()
    assert (has_trunk, has_adapters) == (rank == 0, rank > 0)
    reward = load_reward_model(tmp_path / "rm", device="cpu")
    # Beside another in an ensemble, on texts alone: each reads with its own tokenizer.
    policys, tokenizer = new_reward_model(planted.base, seed=0, device="cpu")
    with new_folder(tmp_path / "other") as folder:
        save_reward_model(policys, tokenizer, folder, limits=LIMITS, calibration=Calibration())
    other = load_reward_model(tmp_path / "other", device="cpu")
    items = [RewardInput(p.prompt, p.chosen) for p in planted.test[:8]]
    both = EnsembleReward({"encoder": reward, "policy's": other})
    means = [(a + b) / 2 for a, b in zip(reward(items), other(items), strict=True)]
    assert list(both(items)) == pytest.approx(means)


def test_what_cannot_be_read_is_refused(planted: Planted, tmp_path: Path) -> None:
    base = save_encoder(tmp_path / "base", "bert")
    with pytest.raises(ModelError, match="no likelihood"):
        new_reward_model(base, seed=0, likelihood=True, device="cpu")
    with pytest.raises(ModelError, match="of an encoder the head reads the first token"):
        new_reward_model(base, seed=0, reads="last", device="cpu")
    with pytest.raises(ModelError, match="of a causal base the head reads the last token"):
        new_reward_model(planted.base, seed=0, reads="first", device="cpu")
    with pytest.raises(ModelError, match=r"reads at most 90 tokens, found .* 32 \+ 60"):
        train_reward_model(
            base,
            planted.train,
            planted.test,
            tmp_path / "rm",
            freeze_trunk=True,
            centre_on=planted.centre,
            **{**SETTINGS, "max_completion_tokens": 60},
        )
