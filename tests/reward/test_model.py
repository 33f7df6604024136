"""A reward model's scores depend on the conversation alone, and its files on nothing pickled."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import new_folder, read_json, write_json
from rlhf_pipeline.policy.chat import encode_completion, encode_prompt
from rlhf_pipeline.policy.loading import Policy, load_policy, load_tokenizer, save_policy
from rlhf_pipeline.records import RewardInput, user_prompt
from rlhf_pipeline.reward import SETTINGS, TRUNK
from rlhf_pipeline.reward.functions import as_reward
from rlhf_pipeline.reward.model import (
    Calibration,
    Limits,
    batches_by_length,
    encode_rows,
    load_reward_model,
    new_reward_model,
    save_reward_model,
    score_rows,
)
from tests.reward.conftest import Planted

LIMITS = Limits(32, 40)


def items_of(planted: Planted) -> list[RewardInput]:
    items = [RewardInput(p.prompt, p.chosen) for p in planted.test[:12]]
    return [*items, RewardInput(items[0].prompt, "")]


@pytest.mark.parametrize("reads", ["last", "mean"])
def test_scores_do_not_depend_on_padding_order_or_batching(planted: Planted, reads: Any) -> None:
    model, tokenizer = new_reward_model(planted.base, seed=3, reads=reads, device="cpu")
    rows = encode_rows(tokenizer, [(i.prompt, i.completion) for i in items_of(planted)], LIMITS)
    together = score_rows(model, rows)
    alone = [score_rows(model, [row])[0] for row in rows]
    assert together == pytest.approx(alone, abs=1e-5)
    assert score_rows(model, rows[::-1]) == pytest.approx(together[::-1], abs=1e-5)
    assert len({round(s, 6) for s in together}) == len(rows)


def test_a_causal_reward_model_reads_the_state_at_the_end_token(planted: Planted) -> None:
    model, tokenizer = new_reward_model(planted.base, seed=3, device="cpu")
    item = items_of(planted)[0]
    (row,) = encode_rows(tokenizer, [(item.prompt, item.completion)], LIMITS)
    prompt = encode_prompt(tokenizer, item.prompt, max_tokens=32)
    assert row.ids == prompt + encode_completion(tokenizer, item.completion, max_tokens=40)
    assert (row.ids[-1], row.start) == (tokenizer.eos_token_id, len(prompt))
    with torch.no_grad():
        state = model.trunk(input_ids=torch.tensor([row.ids])).last_hidden_state[0, -1]
        expected = float(state @ model.head.weight[0] + model.head.bias)
    assert score_rows(model, [row]) == pytest.approx([expected], abs=1e-5)


def test_the_head_starts_small_and_the_output_layer_is_gone(planted: Planted) -> None:
    model, _ = new_reward_model(planted.base, seed=0, device="cpu")
    assert float(model.head.weight.detach().std()) == pytest.approx(1 / math.sqrt(33), rel=0.3)
    assert float(model.head.bias.detach()) == 0
    assert not [n for n, _ in model.named_parameters() if "lm_head" in n]


def test_batches_keep_within_the_token_budget_and_lose_nothing() -> None:
    lengths = [5, 1, 9, 3, 3, 8, 40]
    batches = batches_by_length(lengths, tokens=18)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    sizes = [len(b) * max(lengths[i] for i in b) for b in batches]
    assert all(size <= 18 for size in sizes[:-1])
    assert batches[-1] == [6]


def saved(planted: Planted, folder: Path, calibration: Calibration) -> None:
    model, tokenizer = new_reward_model(planted.base, seed=0, device="cpu")
    with new_folder(folder) as new:
        save_reward_model(model, tokenizer, new, limits=LIMITS, calibration=calibration)


def test_the_version_follows_the_weights_and_settings_not_the_report(
    planted: Planted, tmp_path: Path
) -> None:
    saved(planted, tmp_path / "a", Calibration())
    saved(planted, tmp_path / "b", Calibration(offset=1.0))
    first = load_reward_model(tmp_path / "a").version
    (tmp_path / "a" / "report.json").write_text("{}")
    assert load_reward_model(tmp_path / "a").version == first
    assert load_reward_model(tmp_path / "b").version != first


def test_damaged_reward_models_are_refused(planted: Planted, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"found no trunk, head\.safetensors, reward_model\.json"):
        load_reward_model(tmp_path)
    saved(planted, tmp_path / "rm", Calibration())
    good = (tmp_path / "rm" / "reward_model.json").read_text()
    settings = json.loads(good)
    del settings["reads"]
    (tmp_path / "rm" / "reward_model.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="must belong together"):
        load_reward_model(tmp_path / "rm")
    (tmp_path / "rm" / "reward_model.json").write_text(good)
    (tmp_path / "rm" / "head.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ModelError, match="must belong together"):
        load_reward_model(tmp_path / "rm")
    shutil.copytree(planted.base, tmp_path / "base")
    (tmp_path / "base" / "trunk").mkdir()
    with pytest.raises(ModelError, match="found no head"):
        load_reward_model(tmp_path / "base")


def without_template(trunk: Path) -> None:
    (trunk / "chat_template.jinja").unlink()


def with_another_end(trunk: Path) -> None:
    config = read_json(trunk / "tokenizer_config.json")
    write_json(trunk / "tokenizer_config.json", {**config, "eos_token": config["pad_token"]})


def without_pad(trunk: Path) -> None:
    config = read_json(trunk / "tokenizer_config.json")
    del config["pad_token"]
    write_json(trunk / "tokenizer_config.json", config)


def with_another_token(trunk: Path) -> None:
    tokenizer = load_tokenizer(trunk)
    tokenizer.add_tokens("please ")
    tokenizer.save_pretrained(trunk)


@pytest.mark.parametrize(
    ("swap", "found", "found_in_an_earlier_release_s"),
    [
        (without_template, "another chat_template", None),
        (with_another_end, "another eos_token", None),
        (without_pad, "another pad_token", "no pad_token"),
        (with_another_token, "another vocabulary", r"\d+ tokens where the trunk knows \d+"),
    ],
)
@pytest.mark.parametrize("on_base", [False, True])
def test_a_tokenizer_that_is_not_the_one_of_the_training_is_refused(
    planted: Planted,
    tmp_path: Path,
    swap: Callable[[Path], None],
    found: str,
    found_in_an_earlier_release_s: str | None,
    on_base: bool,
) -> None:
    root = tmp_path / "rm"
    made = new_reward_model(
        planted.base, seed=0, on_base=on_base, lora_rank=2 * on_base, device="cpu"
    )
    with new_folder(root) as new:
        save_reward_model(*made, new, limits=LIMITS, calibration=Calibration())
    expected = load_reward_model(root, device="cpu")(items_of(planted))
    settings = read_json(root / SETTINGS)
    of_earlier = {name: value for name, value in settings.items() if name != "tokenizer"}
    write_json(root / SETTINGS, of_earlier)
    assert load_reward_model(root, device="cpu")(items_of(planted)) == expected
    swap(root / TRUNK)
    if found_in_an_earlier_release_s is not None:
        with pytest.raises(ModelError, match=f"found {found_in_an_earlier_release_s} in"):
            load_reward_model(root)
    write_json(root / SETTINGS, settings)
    with pytest.raises(
        ModelError, match=f"needs the tokenizer it was trained with, found {found} in"
    ):
        load_reward_model(root)


def test_scores_that_are_not_finite_are_refused(planted: Planted, tmp_path: Path) -> None:
    saved(planted, tmp_path / "rm", Calibration())
    reward = load_reward_model(tmp_path / "rm", device="cpu")
    assert reward([]) == []
    with torch.no_grad():
        reward.model.head.bias.fill_(float("inf"))
    with pytest.raises(ModelError, match="found 2 of 2"):
        reward(items_of(planted)[:2])


def test_any_callable_is_held_to_the_reward_contract() -> None:
    items = [RewardInput(user_prompt("hi"), text) for text in ("a", "bb")]

    def length(items: Sequence[RewardInput]) -> Sequence[float]:
        return [len(item.completion) for item in items]

    def one_short(items: Sequence[RewardInput]) -> Sequence[float]:
        return [1.0]

    def broken(items: Sequence[RewardInput]) -> Sequence[float]:
        return [1.0, float("nan")]

    assert as_reward(length)(items) == [1.0, 2.0]
    assert as_reward(length)([]) == []
    with pytest.raises(ModelError, match="the one_short reward must give one score per item"):
        as_reward(one_short)(items)
    with pytest.raises(ModelError, match="found nan for item 1"):
        as_reward(broken)(items)


def test_the_likelihoods_are_those_of_the_completion_alone(planted: Planted) -> None:
    model, tokenizer = new_reward_model(
        planted.base, seed=3, likelihood=True, reads="mean", device="cpu"
    )
    rows = encode_rows(tokenizer, [(i.prompt, i.completion) for i in items_of(planted)[:5]], LIMITS)
    together = model.features(rows)
    for row, found in zip(rows, together, strict=True):
        with torch.no_grad():
            logits = model.trunk(input_ids=torch.tensor([row.ids])).logits[0].float()
        logprobs = [  # a slow loop over the completion's tokens, each given all before it
            float(logits[t - 1].log_softmax(-1)[row.ids[t]]) for t in range(row.start, len(row))
        ]
        expected = [sum(logprobs) / len(logprobs), min(logprobs), sum(logprobs) / 16]
        assert found[-3:].tolist() == pytest.approx(expected, abs=1e-4)


def test_likelihoods_are_read_of_states_that_a_gpus_autocast_left_in_float32(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's autocast runs layer norms in float32, which the CPU's does not: played here."""
    computed = torch.layer_norm

    def in_float32(x: Any, shape: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return computed(x.float(), shape, weight.float(), bias.float(), *rest)

    tokenizer = load_tokenizer(planted.base)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=96,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_policy(Policy(GPT2LMHeadModel(config).eval(), tokenizer), tmp_path / "base")
    model, _ = new_reward_model(
        tmp_path / "base",
        seed=0,
        likelihood=True,
        on_base=True,
        lora_rank=2,
        dtype="bfloat16",
        device="cpu",
    )
    rows = encode_rows(tokenizer, [(i.prompt, i.completion) for i in items_of(planted)[:5]], LIMITS)
    with torch.no_grad():
        expected = model.features(rows)[:, -3:]
        monkeypatch.setattr(torch, "layer_norm", in_float32)
        monkeypatch.setattr(
            "rlhf_pipeline.reward.model.autocast",
            lambda device: torch.autocast("cpu", dtype=torch.bfloat16),
        )
        found = model.features(rows)[:, -3:]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("likelihood", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_base_that_is_an_adapter_s_folder_is_read_with_the_adapter_merged_in(
    planted: Planted, tmp_path: Path, likelihood: bool, rank: int
) -> None:
    shutil.copytree(planted.base, tmp_path / "base")
    policy = load_policy(tmp_path / "base", device="cpu")
    adapted: Any = get_peft_model(
        policy.model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")  # the tokenizer is its base's
    save_policy(load_policy(tmp_path / "adapter", device="cpu"), tmp_path / "merged")
    made = [
        new_reward_model(
            tmp_path / name,
            seed=3,
            likelihood=likelihood,
            on_base=rank > 0,
            lora_rank=rank,
            device="cpu",
        )
        for name in ("adapter", "merged", "base")
    ]
    rows = encode_rows(made[0][1], [(i.prompt, i.completion) for i in items_of(planted)], LIMITS)
    scores = [score_rows(model, rows) for model, _ in made]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert scores[0] != pytest.approx(scores[2], abs=1e-3)
    trained = [{n for n, p in m.named_parameters() if p.requires_grad} for m, _ in made]
    assert trained[0] == trained[1]
    model, tokenizer = made[0]
    with new_folder(tmp_path / "rm") as folder:
        save_reward_model(model, tokenizer, folder, limits=LIMITS, calibration=Calibration())
    assert score_rows(load_reward_model(tmp_path / "rm", device="cpu").model, rows) == (
        pytest.approx(scores[0], abs=1e-5)
    )
    weights = tmp_path / "base" / "model.safetensors"
    save_file({n: 2 * t for n, t in load_file(weights).items()}, weights, {"format": "pt"})
    if rank:
        with pytest.raises(ModelError, match="found other weights"):
            load_reward_model(tmp_path / "rm", device="cpu")
    else:  # it has a trunk of its own
        again = load_reward_model(tmp_path / "rm", device="cpu").model
        assert score_rows(again, rows) == pytest.approx(scores[0], abs=1e-5)
