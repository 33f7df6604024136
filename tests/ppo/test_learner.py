"""Policy, reference and critic: positions, padding, temperature, dropout, adapters."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_pipeline.errors import ConfigError, ModelError
from rlhf_pipeline.policy.loading import load_policy, save_policy
from rlhf_pipeline.policy.sampling import trunk_of
from rlhf_pipeline.ppo.critic import AdapterCritic, SeparateCritic, fresh_head
from rlhf_pipeline.ppo.learner import allow_recomputing, check_policy, is_same_model
from rlhf_pipeline.ppo.optimising import accumulate_gradients
from rlhf_pipeline.ppo.plan import RewardModels, make_plan, read_config
from rlhf_pipeline.ppo.rollout import Tokens
from rlhf_pipeline.reward.model import (
    Calibration,
    Limits,
    Row,
    load_reward_model,
    new_reward_model,
    save_reward_model,
)
from tests.ppo.world import bytes_kept, changed, learner_at, rollouts_of, tiny_policy


def wider(tokens: Tokens, *, left: int, right: int, filling: int) -> Tokens:
    """Return the same rollouts in larger rectangles, padding filled with an arbitrary token."""
    B = len(tokens)
    prompt = torch.full((B, left), filling)
    completion = torch.full((B, right), filling)
    return Tokens(
        torch.cat([prompt, tokens.prompt_ids.masked_fill(~tokens.prompt_mask, filling)], 1),
        torch.cat([torch.zeros_like(prompt).bool(), tokens.prompt_mask], 1),
        torch.cat(
            [tokens.completion_ids.masked_fill(~tokens.completion_mask, filling), completion], 1
        ),
        torch.cat([tokens.completion_mask, torch.zeros_like(completion).bool()], 1),
    )


@pytest.mark.parametrize("positions", ["base", "absolute"])
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_padding_changes_neither_logprobs_nor_values(
    request: pytest.FixtureRequest, positions: str, critic: str
) -> None:
    learner = learner_at(request.getfixturevalue(positions), changed(critic=critic))
    tokens = rollouts_of(learner).tokens
    T, mask = tokens.completion_ids.shape[1], tokens.completion_mask
    with torch.no_grad():
        logprobs, values = learner.logprobs_and_values(tokens)
        padded = wider(tokens, left=4, right=3, filling=7)
        wide_logprobs, wide_values = learner.logprobs_and_values(padded)
        assert values is not None
        assert wide_values is not None
        assert torch.allclose(logprobs[mask], wide_logprobs[:, :T][mask], atol=1e-5)
        assert torch.allclose(values[mask], wide_values[:, :T][mask], atol=1e-5)
        for i in range(3):  # alone, without any padding
            one = tokens.rows(torch.tensor([i]))
            n = one.completion_ids.shape[1]
            assert bool(one.prompt_mask.all() and one.completion_mask.all())
            alone, alone_values = learner.logprobs_and_values(one)
            assert alone_values is not None
            assert torch.allclose(alone[0], logprobs[i, :n], atol=1e-5)
            assert torch.allclose(alone_values[0], values[i, :n], atol=1e-5)
            assert torch.allclose(learner.values(one)[0], values[i, :n], atol=1e-5)


def test_logprobs_are_those_of_a_plain_forward_pass_over_one_temperature(base: Path) -> None:
    learner = learner_at(base, changed(temperature=0.5))
    rollouts = rollouts_of(learner)
    for i in range(4):
        one = rollouts.tokens.rows(torch.tensor([i]))
        P, T = one.prompt_ids.shape[1], one.completion_ids.shape[1]
        ids = torch.cat([one.prompt_ids, one.completion_ids], 1)
        with torch.no_grad():
            logits = learner.policy.model(ids).logits[0, P - 1 : P + T - 1]
        plain = (logits / 0.5).log_softmax(-1).gather(1, one.completion_ids[0, :, None])[:, 0]
        for logprobs in (
            rollouts.logprobs[i, :T],
            rollouts.reference_logprobs[i, :T],
            learner.logprobs_and_values(one)[0][0].detach(),
        ):
            assert torch.allclose(logprobs, plain, atol=1e-5)


def test_a_value_sees_the_prompt_and_earlier_tokens_only(base: Path) -> None:
    learner = learner_at(base, changed(critic="separate"))
    tokens = rollouts_of(learner).tokens.rows(torch.tensor([0]))
    other = tokens.completion_ids.clone()
    other[0, 2] = (other[0, 2] + 5) % 200 + 10
    changed_tokens = Tokens(tokens.prompt_ids, tokens.prompt_mask, other, tokens.completion_mask)
    with torch.no_grad():
        one, two = learner.values(tokens)[0], learner.values(changed_tokens)[0]
    assert torch.allclose(one[:3], two[:3], atol=1e-6)
    assert not torch.allclose(one[3:], two[3:], atol=1e-3)


def test_the_reference_is_fixed_while_the_policy_moves(base: Path) -> None:
    learner = learner_at(base)
    rollouts = rollouts_of(learner)
    with torch.no_grad():
        for weight in learner.policy.model.parameters():
            weight.add_(0.01)
    after = learner.reference_logprobs(rollouts.tokens)
    assert torch.equal(after, learner_at(base).reference_logprobs(rollouts.tokens))
    moved, _ = learner.logprobs_and_values(rollouts.tokens)
    assert not torch.allclose(moved, after, atol=1e-3)


def test_a_reference_of_its_own_is_the_model_at_that_folder(base: Path, tmp_path: Path) -> None:
    other = tiny_policy()
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.mul_(1.3)
    save_policy(other, tmp_path / "other")
    learner = learner_at(base, reference=tmp_path / "other")
    tokens = rollouts_of(learner).tokens
    with torch.no_grad():
        expected, _ = learner_at(tmp_path / "other").logprobs_and_values(tokens)
    assert torch.allclose(learner.reference_logprobs(tokens), expected, atol=1e-6)


def test_dropout_is_off_in_every_model(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with_dropout"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    learner = learner_at(folder, changed(critic="separate"))
    tokens = rollouts_of(learner).tokens
    functions: list[Callable[[], Tensor]] = [
        lambda: learner.logprobs_and_values(tokens)[0],
        lambda: learner.values(tokens),
        lambda: learner.reference_logprobs(tokens),
    ]
    for function in functions:
        assert torch.equal(function(), function())
    expected, _ = learner_at(base).logprobs_and_values(tokens)
    assert torch.allclose(learner.logprobs_and_values(tokens)[0], expected, atol=1e-6)


def test_adapters_begin_at_the_base_and_the_reference_is_the_policy_without_them(
    base: Path,
) -> None:
    learner = learner_at(base, changed(lora_rank=2))
    plain = learner_at(base)
    rollouts = rollouts_of(learner)
    expected, _ = plain.logprobs_and_values(rollouts.tokens)
    assert torch.allclose(rollouts.logprobs, expected.detach(), atol=1e-5)
    assert all("lora" in n or n.startswith("critic/") for n in learner.trainable())
    with torch.no_grad():
        for weight in learner.trainable().values():
            weight.add_(0.05)
    moved, _ = learner.logprobs_and_values(rollouts.tokens)
    assert not torch.allclose(moved, expected, atol=1e-2)
    after = learner.reference_logprobs(rollouts.tokens)
    assert torch.allclose(after, expected.detach(), atol=1e-5)


def test_saved_adapters_are_merged_into_a_plain_model(base: Path, tmp_path: Path) -> None:
    learner = learner_at(base, changed(lora_rank=2))
    tokens = rollouts_of(learner).tokens
    with torch.no_grad():
        for weight in learner.trainable().values():
            weight.add_(0.05)
    expected, _ = learner.logprobs_and_values(tokens)
    policy = load_policy(base)
    policy.model = learner.saved_model
    save_policy(policy, tmp_path / "merged")
    merged, _ = learner_at(tmp_path / "merged").logprobs_and_values(tokens)
    assert torch.allclose(merged, expected, atol=1e-4)


def test_a_fresh_head_has_the_stated_deviation_and_no_bias() -> None:
    head = fresh_head(4095, torch.Generator().manual_seed(0))
    assert float(head.weight.detach().std()) == pytest.approx(1 / math.sqrt(4096), rel=0.05)
    assert float(head.bias.detach()) == 0.0


def test_a_separate_critic_shares_no_weight_with_the_policy(base: Path) -> None:
    learner = learner_at(base, changed(critic="separate"))
    assert isinstance(learner.critic, SeparateCritic)
    pointers = {p.data_ptr() for p in learner.policy.model.parameters()}
    assert pointers.isdisjoint(p.data_ptr() for p in learner.critic.parameters())


def save_reward(base: Path, directory: Path, *, offset: float) -> Path:
    model, tokenizer = new_reward_model(base, seed=4, device="cpu")
    directory.mkdir()
    save_reward_model(
        model,
        tokenizer,
        directory,
        limits=Limits(max_prompt_tokens=28, max_completion_tokens=8),
        calibration=Calibration(offset=offset),
    )
    return directory


def test_a_critic_that_starts_from_the_reward_model_values_as_it_scores(
    base: Path, tmp_path: Path
) -> None:
    directory = save_reward(base, tmp_path / "reward", offset=0.75)
    learner = learner_at(base, changed(critic="separate"), value_init=directory)
    tokens = rollouts_of(learner_at(base)).tokens
    reward = load_reward_model(directory, device="cpu")
    for i in range(3):
        one = tokens.rows(torch.tensor([i]))
        row = torch.cat([one.prompt_ids, one.completion_ids], 1)[0].tolist()
        with torch.no_grad():  # the value before the last token judges all but that token
            score = float(reward.model([Row(row[:-1], one.prompt_ids.shape[1])])) - 0.75
            assert float(learner.values(one)[0, -1]) == pytest.approx(score, abs=1e-5)


def test_on_a_shared_base_a_critic_is_adapters_though_the_reward_is_not(
    base: Path, tmp_path: Path
) -> None:
    directory = save_reward(base, tmp_path / "reward", offset=0.0)
    settings = changed(critic="separate", lora_rank=2)
    with pytest.warns(UserWarning, match="so the critic starts from fresh ones"):
        learner = learner_at(base, settings, value_init=directory)
    assert isinstance(learner.critic, AdapterCritic)
    # What `rlhf plan` counts, and refuses by.
    plan = make_plan(read_config(base), settings, RewardModels())
    assert sum(w.numel() for w in learner.trained_weights) == plan.trained


def test_of_several_heads_a_critic_begins_with_the_mean(base: Path, tmp_path: Path) -> None:
    directory = save_reward(base, tmp_path / "reward", offset=0.5)
    saved = load_file(directory / "head.safetensors")
    three = {name: torch.cat([rows * n for n in (1, 2, 6)]) for name, rows in saved.items()}
    save_file(three, directory / "head.safetensors")
    learner = learner_at(base, changed(critic="separate"), value_init=directory)
    assert learner.critic is not None
    assert learner.critic.head.weight.detach().allclose(saved["weight"] * 3)
    assert learner.critic.head.bias.detach().allclose(saved["bias"] * 3 - 0.5)


def test_a_reward_model_that_cannot_be_a_critic_is_passed_over_with_a_warning(
    base: Path, tmp_path: Path
) -> None:
    directory = save_reward(base, tmp_path / "reward", offset=0.0)
    facts = (directory / "reward_model.json").read_text()
    (directory / "reward_model.json").write_text(facts.replace('"last"', '"first"'))
    with pytest.warns(UserWarning, match="a state other than the last one"):
        learner = learner_at(base, changed(critic="separate"), value_init=directory)
    assert isinstance(learner.critic, SeparateCritic)
    with pytest.raises(ModelError, match="found no trunk"):
        learner_at(base, changed(critic="separate"), value_init=tmp_path)


def test_rates_anneal_together_and_adam_has_the_stated_epsilon(base: Path) -> None:
    learner = learner_at(base, changed(critic_learning_rate=1e-2))
    assert learner.set_learning_rate(0.5) == pytest.approx(1.5e-3)
    assert [g["lr"] for g in learner.optimizer.param_groups] == pytest.approx([1.5e-3, 5e-3])
    assert {g["eps"] for g in learner.optimizer.param_groups} == {1e-5}


def test_lengths_beyond_the_context_are_refused() -> None:
    settings = changed(max_prompt_tokens=60, tokens_per_microbatch=500)
    with pytest.raises(ConfigError, match="context of 64 tokens, found 68"):
        check_policy(tiny_policy(), settings)


@pytest.mark.parametrize(("name", "word"), [("pad_token", "pad"), ("eos_token", "end")])
def test_a_tokenizer_without_pad_or_end_is_refused(name: str, word: str) -> None:
    policy = tiny_policy()
    setattr(policy.tokenizer, name, None)
    with pytest.raises(ModelError, match=f"with a {word} token, found none; set {name} and"):
        check_policy(policy, changed())


def test_a_reference_with_another_vocabulary_is_refused(base: Path, tmp_path: Path) -> None:
    other = tiny_policy()
    other.tokenizer.add_tokens(["<new>"])
    other.model.resize_token_embeddings(len(other.tokenizer), mean_resizing=False)
    save_policy(other, tmp_path / "other")
    with pytest.raises(ModelError, match="must share one vocabulary"):
        learner_at(base, reference=tmp_path / "other")


def test_the_same_model_is_one_path_or_folders_of_equal_files(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    assert is_same_model(base, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text("{}")
    assert not is_same_model(base, tmp_path / "copy")
    assert is_same_model("hub/model", "hub/model")
    assert not is_same_model("hub/model", "hub/other")


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("positions", ["base", "absolute"])
def test_gradient_checkpointing_gives_the_same_gradient_and_keeps_less(
    positions: str, critic: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(positions)
    gradients: list[dict[str, torch.Tensor]] = []
    kept: list[int] = []
    for switch in (False, True):
        settings = changed(critic=critic, gradient_checkpointing=switch, tokens_per_microbatch=999)
        learner = learner_at(folder, settings)
        rollouts = rollouts_of(learner)
        kept.append(bytes_kept(learner, rollouts.tokens))
        accumulate_gradients(learner, rollouts, torch.arange(len(rollouts)))
        named = learner.trainable()
        gradients.append({n: p.grad for n, p in named.items() if p.grad is not None})
        assert not learner.policy.model.training
    assert kept[1] < 0.5 * kept[0]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_trunk_that_cannot_recompute_its_layers_is_refused() -> None:
    trunk: Any = trunk_of(tiny_policy().model)
    trunk.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match="computed again, found LlamaModel"):
        allow_recomputing(trunk)
