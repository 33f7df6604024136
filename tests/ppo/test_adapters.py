"""One base with adapters: for the policy, the critic and reward models, and off for the reference.

Gradients, memory and what is saved are held against models that stand alone.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import file_sha256, read_json
from rlhf_pipeline.policy.adapters import (
    adapter_weights,
    add_adapters,
    keep_adapters,
    linear_names,
    load_adapters,
    load_base,
    only,
    save_adapters,
    shares_base,
    unique_bytes,
)
from rlhf_pipeline.policy.loading import Policy, load_policy, save_policy
from rlhf_pipeline.policy.sampling import trunk_of
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.ppo.critic import AdapterCritic
from rlhf_pipeline.ppo.learner import Learner, build_learner, shared_base
from rlhf_pipeline.ppo.optimising import accumulate_gradients, clipped_step
from rlhf_pipeline.ppo.plan import make_plan, read_config
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.records import PreferencePair, RewardInput, user_prompt
from rlhf_pipeline.reward.model import LearnedReward, load_reward_model
from rlhf_pipeline.reward.training import train_reward_model
from tests.policy.test_families import family_model
from tests.ppo.world import PROMPTS, changed, learner_at, rollouts_of, train

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_key_value_heads": 1, "num_local_experts": 4, "intermediate_size": 8},
    # A dense layer first, and an expert shared by all: linear ones, by the names of the others.
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 8,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
ITEMS = [RewardInput(p, c) for p in PROMPTS for c in ("please sing", "no")]


def pairs(count: int, *, start: int) -> list[PreferencePair]:
    """Return pairs whose chosen side is the polite one."""
    return [
        PreferencePair(
            pair_id=f"pair {i}",
            prompt=user_prompt(f"{i} why"),
            chosen=f"please {i % 7}",
            rejected=f"no {i % 5}",
            voter="v",
            origin="test",
            split="train",
        )
        for i in range(start, start + count)
    ]


def save_reward(base: Path, folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """Train a small reward model with adapters on base."""
    arguments: dict[str, Any] = {
        "freeze_trunk": False,
        "centre_on": ITEMS,
        "epochs": 3,
        "learning_rate": 3e-3,
        "batch_size": 8,
        "max_prompt_tokens": 28,
        "max_completion_tokens": 16,
        "seed": seed,
        "lora_rank": 2,
        "device": "cpu",
    }
    test = pairs(12, start=500)
    train_reward_model(base, pairs(40, start=0), test, folder, **{**arguments, **options})
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base wide enough for adapters to be small beside it."""
    policy = build_tiny(
        ["please sing to the bird", "no"] * 9,
        vocabulary=290,
        layers=2,
        width=128,
        heads=2,
        context=64,
        seed=0,
    )
    folder = tmp_path_factory.mktemp("wide") / "policy"
    save_policy(policy, folder)
    return folder


@pytest.fixture(scope="module")
def proxy(wide: Path) -> Path:
    """A reward model with adapters on the wide base."""
    return save_reward(wide, wide.parent / "proxy")


def weights_in_memory(learner: Learner, rewards: list[LearnedReward]) -> int:
    """Return the bytes of every model's weights, what they share counted once."""
    modules = [learner.policy.model, *(reward.model for reward in rewards)]
    if learner.critic is not None:
        modules.append(learner.critic)
    return unique_bytes([t for m in modules for t in (*m.parameters(), *m.buffers())])


def test_four_roles_take_at_most_a_third_more_than_one_base(wide: Path, proxy: Path) -> None:
    stopping = save_reward(wide, wide.parent / "stopping", freeze_trunk=True)
    alone = load_policy(wide).model
    one = unique_bytes([*alone.parameters(), *alone.buffers()])
    settings = changed(lora_rank=2, critic="separate")
    base = shared_base(wide, wide, settings)
    rewards = [load_reward_model(path, base=base) for path in (proxy, stopping)]
    learner = build_learner(wide, wide, proxy, settings, base=base)
    assert isinstance(learner.critic, AdapterCritic)
    found = weights_in_memory(learner, rewards)
    assert one < found <= 1.3 * one
    # Each on a base of its own, to see that the count can tell:
    apart = [load_reward_model(path) for path in (proxy, stopping)]
    assert weights_in_memory(learner, apart) > 2.9 * one


def test_a_reward_on_the_shared_base_scores_as_it_does_alone(wide: Path, proxy: Path) -> None:
    settings = changed(lora_rank=2, critic="separate")
    base = shared_base(wide, wide, settings)
    shared = load_reward_model(proxy, base=base)
    learner = build_learner(wide, wide, proxy, settings, base=base)
    with torch.no_grad():  # the policy and the critic move; the reward does not
        for weight in learner.trainable().values():
            weight.add_(0.03)
    alone = load_reward_model(proxy)
    assert shared(ITEMS) == pytest.approx(alone(ITEMS), abs=1e-5)
    assert shared.version == alone.version
    scores = alone(ITEMS)
    assert all(polite > rude for polite, rude in zip(scores[::2], scores[1::2], strict=True))
    names = set(learner.trainable())
    assert not any("reward" in name for name in names)
    assert {name.partition("/")[0] for name in names} == {"policy", "critic"}


def test_a_critic_of_adapters_starts_as_the_reward_model_and_learns_apart_from_the_policy(
    wide: Path, proxy: Path
) -> None:
    learner = build_learner(wide, wide, proxy, changed(lora_rank=2, critic="separate"))
    reward = load_reward_model(proxy)
    row = rollouts_of(learner_at(wide)).tokens.rows(torch.tensor([0]))
    ids = torch.cat([row.prompt_ids, row.completion_ids[:, :-1]], 1)
    with torch.no_grad(), reward.model.read():
        hidden = reward.model.trunk(input_ids=ids).last_hidden_state
        expected = reward.model.head(hidden)[0, row.prompt_ids.shape[1] - 1 :, 0]
    values = learner.values(row)[0].detach()
    assert torch.allclose(values, expected - reward.calibration.offset, atol=1e-4)

    rollouts = rollouts_of(learner)
    before = {n: w.detach().clone() for n, w in learner.trainable().items()}
    facts = accumulate_gradients(learner, rollouts, torch.arange(len(rollouts)))
    assert facts["ratio"] == pytest.approx(1, abs=1e-5)
    for part in ("policy/", "critic/"):
        assert all(w.grad is not None for n, w in learner.trainable().items() if part in n)
    clipped_step(learner)
    moved = [n for n, w in learner.trainable().items() if not torch.equal(w, before[n])]
    assert any(n.startswith("policy/") for n in moved)
    assert any(n.startswith("critic/adapters") for n in moved)
    reference = learner.reference_logprobs(rollouts.tokens)
    assert torch.allclose(reference, rollouts.reference_logprobs, atol=1e-5)


def test_the_critics_gradient_is_that_of_a_model_that_is_not_shared(wide: Path) -> None:
    learner = build_learner(wide, wide, None, changed(lora_rank=2, critic="separate"))
    assert isinstance(learner.critic, AdapterCritic)
    rollouts = rollouts_of(learner)
    accumulate_gradients(learner, rollouts, torch.arange(len(rollouts)))
    together = {n: w.grad.clone() for n, w in learner.trainable().items() if w.grad is not None}
    learner.optimizer.zero_grad()
    no_policy = replace(rollouts, advantages=torch.zeros_like(rollouts.advantages))
    accumulate_gradients(learner, no_policy, torch.arange(len(rollouts)))
    for name, weight in learner.trainable().items():
        assert weight.grad is not None
        if name.startswith("critic/"):
            assert torch.allclose(weight.grad, together[name], atol=1e-7)
        else:
            assert float(weight.grad.abs().max()) == 0


def test_trained_adapters_are_saved_merged_and_trained_on_by_the_next_turn(
    base: Path, tmp_path: Path
) -> None:
    settings = changed(lora_rank=2, critic="separate", updates=1)
    result = train(base, tmp_path / "run", settings)
    champion = Path(result.model_path)
    assert (champion / "model.safetensors").is_file()
    merged, again = learner_at(champion), learner_at(champion, settings, reference=base)
    tokens = rollouts_of(merged).tokens
    with torch.no_grad():
        expected = merged.logprobs_and_values(tokens)[0]
        assert torch.allclose(again.logprobs_and_values(tokens)[0], expected, atol=1e-4)
        plain = learner_at(base).logprobs_and_values(tokens)[0]
    assert not torch.allclose(expected, plain, atol=1e-3)
    # Adapters off, that model is the baseline again: the reference costs nothing.
    assert torch.allclose(again.reference_logprobs(tokens), plain, atol=1e-5)
    assert load_base(champion, base, rank=2, alpha=16, seed=0).digest == again.base_digest
    with pytest.warns(UserWarning, match="adapters of alpha 16 go on with that, found .* 32"):
        assert load_base(champion, base, rank=2, alpha=32, seed=0).digest == again.base_digest
    # With another rank, or another reference, the champion is a base of its own.
    other = load_base(champion, base, rank=4, alpha=16, seed=0)
    assert other.digest != again.base_digest
    assert [shares_base(champion, base, rank) for rank in (2, 4)] == [True, False]


def test_what_is_saved_of_adapters_is_in_no_order_of_this_process_alone(
    base: Path, tmp_path: Path
) -> None:
    """Each process hashes names otherwise, and a set of them comes in the order of their hashes."""
    whole = load_base(base, base, rank=2, alpha=4, seed=0, device="cpu")
    trunk = trunk_of(whole.policy.model)
    add_adapters(trunk, "reward", rank=2, alpha=4, seed=0)
    keep_adapters(whole.wrapper, whole.digest, tmp_path)
    save_adapters(trunk, "reward", tmp_path / "reward")
    for name in ("adapter", "reward"):
        found = read_json(tmp_path / name / "adapter_config.json")["target_modules"]
        assert found == linear_names(trunk)
        assert found == sorted(found)


def test_what_is_kept_of_adapters_is_the_policys_set_alone(base: Path, tmp_path: Path) -> None:
    """Those of a critic and of reward models sit in the same layers."""
    whole = load_base(base, base, rank=2, alpha=4, seed=0, device="cpu")
    keep_adapters(whole.wrapper, whole.digest, tmp_path / "alone")
    add_adapters(trunk_of(whole.policy.model), "reward-1a2b", rank=2, alpha=4, seed=0)
    keep_adapters(whole.wrapper, whole.digest, tmp_path / "beside")
    weights = "adapter/adapter_model.safetensors"
    assert file_sha256(tmp_path / "beside" / weights) == file_sha256(tmp_path / "alone" / weights)
    kept = load_file(tmp_path / "beside" / weights)
    assert len(kept) == len(adapter_weights(whole.wrapper, "default"))
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in kept)


def test_a_frozen_base_may_be_bfloat16_while_adapters_are_float32(wide: Path) -> None:
    settings = changed(lora_rank=2, critic="separate", precision="bfloat16", ratio_tolerance=0.05)
    learner = build_learner(wide, wide, None, settings)
    trainable = learner.trainable()
    assert {w.dtype for w in trainable.values()} == {torch.float32}
    frozen = [w for w in learner.policy.model.parameters() if not w.requires_grad]
    assert {w.dtype for w in frozen} == {torch.bfloat16}
    rollouts = rollouts_of(learner)
    facts = accumulate_gradients(learner, rollouts, torch.arange(len(rollouts)))
    assert facts["ratio"] == pytest.approx(1, abs=0.02)
    assert clipped_step(learner) > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_was_trained_is_what_is_saved(wide: Path, tmp_path: Path, precision: str) -> None:
    """A change that is too small for bfloat16's grid too."""
    settings = changed(
        lora_rank=2, critic="separate", precision=precision, ratio_tolerance=0.05, seed=3
    )
    learner = build_learner(wide, wide, None, settings)
    with torch.no_grad():
        for weight in learner.trainable().values():
            weight.add_(torch.randn(weight.shape) * 1e-4)  # the critic's set is not to be merged
    save_policy(
        Policy(learner.saved_model, learner.policy.tokenizer), tmp_path / "p", base_digest="d"
    )
    before, saved = (load_policy(folder, device="cpu").model for folder in (wide, tmp_path / "p"))
    if precision == "bfloat16":
        before = before.bfloat16().float()
    layer = learner.policy.model.model.layers[1].mlp.down_proj
    change = layer.get_delta_weight("default").detach().float()
    found = saved.model.layers[1].mlp.down_proj.weight - before.model.layers[1].mlp.down_proj.weight
    assert change.abs().max() > 0
    torch.testing.assert_close(found, change, atol=1e-7, rtol=1e-3)
    names = saved.state_dict()
    assert names.keys() == before.state_dict().keys()
    assert torch.equal(names["model.norm.weight"], before.state_dict()["model.norm.weight"])
    assert read_json(tmp_path / "p" / "config.json")["dtype"] == "float32"
    assert not any(path.is_dir() for path in (tmp_path / "p" / "adapter").iterdir())


def test_adapters_of_another_base_are_refused(base: Path, wide: Path, proxy: Path) -> None:
    model = load_policy(base).model
    with pytest.raises(ModelError, match=r"adapters .* are needed"):
        load_adapters(trunk_of(model), "critic", proxy / "trunk")
    settings: PpoSettings = changed(lora_rank=2, critic="separate")
    with pytest.warns(UserWarning, match="no adapters on the policy's base"):
        learner = build_learner(base, base, proxy, settings)  # fresh ones instead
    assert isinstance(learner.critic, AdapterCritic)


def test_a_reward_model_without_its_base_says_so(wide: Path, tmp_path: Path) -> None:
    shutil.copytree(wide, tmp_path / "base")
    folder = save_reward(tmp_path / "base", tmp_path / "reward", epochs=1)
    (tmp_path / "base" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ModelError, match="other weights"):
        load_reward_model(folder)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ModelError, match="found none at"):
        load_reward_model(folder)


def test_no_set_computes_unless_asked(wide: Path, proxy: Path) -> None:
    policy = load_policy(wide)
    ids = torch.tensor([policy.tokenizer("sing to the bird").input_ids])
    with torch.no_grad():
        plain = policy.model(ids).logits
        load_adapters(trunk_of(policy.model), "one", proxy / "trunk")
        assert torch.equal(policy.model(ids).logits, plain)
        with only(policy.model, "one"):
            assert not torch.allclose(policy.model(ids).logits, plain, atol=1e-3)
        assert torch.equal(policy.model(ids).logits, plain)


def test_layers_are_computed_again_with_the_set_that_computed_them(wide: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for recomputes in (False, True):
        settings = changed(lora_rank=2, critic="separate", gradient_checkpointing=recomputes)
        learner = build_learner(wide, wide, None, settings)
        parts = trunk_of(learner.policy.model).modules()
        assert not any(part._forward_hooks for part in parts)  # no CUDA graph could run them
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():  # sets that are still fresh compute what the bare base does
            for weight in learner.trainable().values():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
        tokens = rollouts_of(learner).tokens
        logprobs, values = learner.logprobs_and_values(tokens)
        assert values is not None
        (logprobs.sum() + values.sum()).backward()  # type: ignore[no-untyped-call]  # as torch has it
        named = learner.trainable()
        found.append({n: p.grad for n, p in named.items() if p.grad is not None})
        assert len(found[-1]) == len(named)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("family", "sizes"), MIXTURES.items())
def test_of_a_mixture_of_experts_adapters_take_what_is_no_expert_and_merge(
    family: str, sizes: dict[str, Any], wide: Path, tmp_path: Path
) -> None:
    tokenizer = load_policy(wide, device="cpu").tokenizer
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = family_model(family, vocab_size=len(tokenizer), num_experts_per_tok=2, **sizes, **ids)
    save_policy(Policy(model, tokenizer), tmp_path / "base")
    learner = learner_at(tmp_path / "base", changed(lora_rank=2, critic="separate"))
    adapted = [n for n in learner.trainable() if n.endswith(".lora_A.default.weight")]
    layers = trunk_of(model).named_modules()
    linear = [n for n, m in layers if isinstance(m, nn.Linear) and ".mlp." not in n]
    assert len(adapted) == len(linear)
    planned = make_plan(read_config(tmp_path / "base"), learner.settings)
    assert planned.trained == sum(weight.numel() for weight in learner.trainable().values())
    for name, weight in learner.trainable().items():
        if ".lora_B." in name:
            nn.init.normal_(weight)
    save_policy(
        Policy(learner.saved_model, tokenizer), tmp_path / "policy", base_digest=learner.base_digest
    )
    read = torch.arange(2, 9)[None]
    with torch.no_grad():
        before, trained = model(read).logits, learner.policy.model(read).logits
        assert not torch.allclose(trained, before, atol=0.1)
        merged = load_policy(tmp_path / "policy", device="cpu").model(read).logits
        torch.testing.assert_close(merged, trained, atol=1e-4, rtol=0)
        gone_on = load_base(tmp_path / "policy", tmp_path / "base", rank=2, alpha=16.0, seed=0)
        torch.testing.assert_close(gone_on.policy.model(read).logits, trained)
