"""Supervised fine-tuning teaches completions, and only completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from rlhf_pipeline.errors import NotEnoughData, TrainingError
from rlhf_pipeline.policy.chat import encode_completion, encode_prompt
from rlhf_pipeline.policy.loading import Policy, load_policy
from rlhf_pipeline.policy.sampling import complete, pad_right
from rlhf_pipeline.policy.sft import IGNORED, packed_loss, sft_rows, train_sft
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.records import SftExample, user_prompt

COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
EXAMPLES = [
    SftExample(user_prompt(f"what colour is {thing}?"), f"it is {colour}", "seed")
    for thing, colour in COLOURS.items()
] * 16
TEXTS = [f"{e.prompt[0].content} {e.completion}" for e in EXAMPLES]
SETTINGS: dict[str, Any] = {
    "epochs": 24,
    "learning_rate": 1e-2,
    "batch_size": 16,
    "max_tokens": 48,
    "seed": 0,
}


def tiny_policy() -> Policy:
    return build_tiny(TEXTS, vocabulary=320, layers=2, width=48, heads=2, context=64, seed=0)


def test_labels_stand_on_completion_tokens_only() -> None:
    policy = tiny_policy()
    example = EXAMPLES[0]
    (row,) = sft_rows(policy, [example], max_tokens=48)
    prompt = encode_prompt(policy.tokenizer, example.prompt, max_tokens=48)
    completion = encode_completion(policy.tokenizer, example.completion, max_tokens=48)
    assert row["input_ids"] == prompt + completion
    assert row["labels"] == [IGNORED] * len(prompt) + completion
    long = SftExample(user_prompt("word " * 100), "word " * 100, "seed")
    (row,) = sft_rows(policy, [long], max_tokens=20)
    assert len(row["input_ids"]) == 20
    assert row["labels"].count(IGNORED) == 10
    assert row["labels"][9] == IGNORED
    assert row["input_ids"][9] == policy.tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_a_shortened_prompt_keeps_the_token_that_texts_begin_with() -> None:
    """As sampling does: what Gemma or Llama read without it is not what they were trained on."""
    policy = tiny_policy()
    tokenizer = policy.tokenizer
    tokenizer.bos_token = "<|user|>"
    tokenizer.chat_template = "{{ bos_token }}{{ messages[-1]['content'] }}<|assistant|>"
    (row,) = sft_rows(
        policy, [SftExample(user_prompt("word " * 100), "word " * 100, "seed")], max_tokens=20
    )
    sampled = encode_prompt(tokenizer, user_prompt("word " * 100), max_tokens=10)
    assert sampled[0] == tokenizer.bos_token_id
    assert row["input_ids"][:10] == sampled


def test_the_packed_loss_is_the_cross_entropy_of_labelled_tokens_and_so_is_its_gradient() -> None:
    policy = tiny_policy()
    policy.model.train()
    rows = sft_rows(policy, [*EXAMPLES[:3], EXAMPLES[3]], max_tokens=48)
    ids, mask = pad_right([row["input_ids"] for row in rows], policy.pad_id)
    labels = torch.tensor(
        [r["labels"] + [IGNORED] * (ids.shape[1] - len(r["labels"])) for r in rows]
    )
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    torch.autograd.backward(packed_loss(policy.model, inputs))
    found = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    logits = policy.model(input_ids=ids, attention_mask=mask.long()).logits
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.autograd.backward(expected)
    torch.testing.assert_close(packed_loss(policy.model, inputs), expected)
    count = int((labels != IGNORED).sum())
    halved = packed_loss(policy.model, inputs, num_items_in_batch=2 * count)
    torch.testing.assert_close(halved, expected / 2)
    assert len(found) > 10
    for name, weight in policy.model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, atol=1e-6, rtol=1e-4)
    with pytest.raises(TrainingError, match="gives a loss only"):
        packed_loss(policy.model, inputs, return_outputs=True)


def test_a_trained_policy_answers_as_it_was_shown_and_saves_what_it_learnt(tmp_path: Path) -> None:
    policy = tiny_policy()
    heard: list[Any] = []
    result = train_sft(policy, EXAMPLES, tmp_path / "sft", report=heard.append, **SETTINGS)
    assert result.loss_curve[-1][1] < 0.2 < result.loss_curve[0][1]
    assert result.steps == 96
    assert result.examples == 64
    assert heard[-1]["step"] == heard[-1]["of"] == 96
    assert not policy.model.training
    assert "forward" not in policy.model.__dict__
    saved = load_policy(result.path, device="cpu")
    prompts = [user_prompt(f"what colour is {thing}?") for thing in COLOURS]
    answers = complete(
        saved, prompts, max_completion_tokens=16, max_prompt_tokens=40, temperature=0, seed=0
    )
    assert [a.text for a in answers] == [f"it is {c}" for c in COLOURS.values()]
    assert all(a.finished for a in answers)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(policy.model(ids).logits, saved.model(ids).logits)


def test_training_twice_from_one_seed_gives_the_same_curve(tmp_path: Path) -> None:
    short = {**SETTINGS, "epochs": 1}
    one, two = (
        train_sft(tiny_policy(), EXAMPLES, tmp_path / name, **short) for name in ("one", "two")
    )
    assert one.loss_curve == two.loss_curve


def test_training_of_one_step_teaches_too(tmp_path: Path) -> None:
    policy = tiny_policy()
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    one = {**SETTINGS, "epochs": 1, "batch_size": len(EXAMPLES)}
    assert train_sft(policy, EXAMPLES, tmp_path / "sft", **one).steps == 1
    assert any(not torch.equal(p, before[name]) for name, p in policy.model.named_parameters())


def test_training_refuses_nothing_and_nonsense(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughData, match="at least 1 example"):
        train_sft(tiny_policy(), [], tmp_path / "sft", **SETTINGS)
    broken = tiny_policy()
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="the loss must stay finite"):
        train_sft(broken, EXAMPLES[:4], tmp_path / "sft", **{**SETTINGS, "epochs": 1})
    assert not (tmp_path / "sft").exists()


def test_adapters_learn_are_merged_and_leave_a_plain_model(tmp_path: Path) -> None:
    policy = tiny_policy()
    embeddings = policy.model.get_input_embeddings().weight.detach().clone()
    result = train_sft(policy, EXAMPLES, tmp_path / "sft", lora_rank=16, **SETTINGS)
    assert result.loss_curve[-1][1] < 0.9 * result.loss_curve[0][1]  # on random embeddings
    assert not (tmp_path / "sft" / "adapter_config.json").exists()
    loaded = load_policy(tmp_path / "sft", device="cpu")
    assert torch.equal(loaded.model.get_input_embeddings().weight, embeddings)  # frozen
    ids = torch.tensor([encode_prompt(policy.tokenizer, EXAMPLES[0].prompt, max_tokens=48)])
    with torch.no_grad():
        expected, fresh = policy.model(ids).logits, tiny_policy().model(ids).logits
        assert torch.allclose(loaded.model(ids).logits, expected, atol=1e-5)
    assert not torch.allclose(expected, fresh, atol=1e-2)
