"""What a plan counts, what it refuses, and that it comes true."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig, PretrainedConfig
from typer.testing import CliRunner

from benchmarks.ppo_plan import BAR, compare
from rlhf_pipeline.cli import app
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import ConfigError, ModelError, TrainingError
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.adapters import shares_base, unique_bytes
from rlhf_pipeline.policy.loading import save_policy
from rlhf_pipeline.policy.tiny import tiny_config
from rlhf_pipeline.ppo import plan as plan_module
from rlhf_pipeline.ppo.plan import (
    FULL,
    JOINED,
    NO_MODELS,
    RESIDENT,
    Plan,
    RewardModels,
    check_fits,
    make_plan,
    probe,
    read_config,
    rehearse,
)
from rlhf_pipeline.ppo.replay import Collected, Replay
from rlhf_pipeline.ppo.rollout import Tokens
from rlhf_pipeline.registry.ledger import PromotionLedger
from tests.ppo.test_learner import save_reward
from tests.ppo.world import changed, learner_at, tiny_policy

LLAMA = tiny_config(290, layers=2, width=32, heads=2, context=64)


def test_a_plan_counts_what_the_learner_holds(base: Path) -> None:
    settings = changed(critic="separate")
    learner = learner_at(base, settings)
    plan = make_plan(read_config(base), settings, NO_MODELS)
    own = sum(p.numel() for p in learner.policy.model.parameters())
    trained = sum(p.numel() for p in learner.trainable().values())
    assert (plan.parameters, plan.trained) == (own, trained)
    assert plan.parts["gradients"] == 4 * trained
    assert plan.parts["optimiser"] == 8 * trained


def test_a_plan_counts_what_a_narrowed_draw_had_in_reach() -> None:
    wide, narrowed = (make_plan(LLAMA, changed(top_p=p, device="cpu")) for p in (1.0, 0.9))
    settings = narrowed.settings
    bits = settings.rollouts_per_update * settings.max_completion_tokens * -(-290 // 8)
    more = narrowed.parts["rollouts"] - wide.parts["rollouts"]
    assert more == bits * (1 + settings.replay_updates)
    assert narrowed.phases["sample"] - wide.phases["sample"] >= 2 * bits


@pytest.mark.parametrize("narrowing", [{"top_k": 50}, {"top_p": 0.9}])
def test_narrowing_what_is_measured_and_trained_on_holds_no_second_copy_of_the_logits(
    narrowing: dict[str, Any],
) -> None:
    config = tiny_config(8192, layers=1, width=32, heads=2, context=64)
    usual = {"minibatches": 1, "tokens_per_microbatch": 10_000, "device": "cpu"}
    wide, narrowed = (
        make_plan(config, changed(**usual, **more), NO_MODELS) for more in ({}, narrowing)
    )
    tokens = changed().rollouts_per_update * changed().max_completion_tokens
    logits = FULL * 8192 * tokens

    def measuring(plan: Plan) -> int:
        return plan.phases["measure"] - sum(plan.parts[name] for name in RESIDENT)

    def training(plan: Plan) -> int:
        return plan.parts["activations, logits"]

    for held in (measuring, training):
        assert held(wide) >= logits
        assert held(narrowed) - held(wide) < logits / 2


def test_a_plan_counts_replayed_rollouts_as_they_came_and_as_they_are_joined() -> None:
    settings = changed(replay_updates=2, top_k=50, device="cpu")
    B, P, T = (
        settings.rollouts_per_update,
        settings.max_prompt_tokens,
        settings.max_completion_tokens,
    )

    def collected() -> Collected:
        ids, mask = (torch.zeros(B, P + T, dtype=kind) for kind in (torch.long, torch.bool))
        support = torch.zeros(B, T, -(-290 // 8), dtype=torch.uint8)
        tokens = Tokens(ids[:, :P], mask[:, :P], ids[:, P:], mask[:, P:], support)
        logprobs, of_each = torch.zeros(2, B, T), torch.zeros(3, B, dtype=torch.long)
        return Collected(tokens, *logprobs, *of_each)

    def tensors(part: Collected) -> list[Tensor]:
        of_tokens = [getattr(part.tokens, field.name) for field in fields(Tokens)]
        return [*of_tokens, part.logprobs, part.reference_logprobs]

    replay = Replay(settings.replay_updates)
    for _ in range(2):
        replay.keep(collected())
    fresh = collected()
    parts = [fresh, *replay.earlier, replay.beside(fresh)[0]]
    held = unique_bytes([tensor for part in parts for tensor in tensors(part)])
    plan = make_plan(LLAMA, settings, NO_MODELS)
    learned_from = 6 * FULL * 3 * B * T  # old log-probabilities, values, rewards and such
    assert plan.parts["rollouts"] + plan.parts[JOINED] == held + learned_from
    rest = sum(plan.parts[name] for name in ("gradients", "activations, logits"))
    assert plan.phases["train"] - rest > held


def test_a_plan_counts_every_turn_and_what_is_replayed_among_what_is_trained_on() -> None:
    once = changed(tokens_per_microbatch=10_000, rollouts_per_update=8, device="cpu")
    as_many = make_plan(LLAMA, replace(once, rollouts_per_update=24), NO_MODELS)
    for more in (replace(once, max_turns=3), replace(once, replay_updates=2)):
        plan = make_plan(LLAMA, more, NO_MODELS)
        assert plan.parts["activations, logits"] == as_many.parts["activations, logits"]
        assert plan.parts["keys and values"] < as_many.parts["keys and values"]  # turn by turn


@pytest.mark.slow
def test_more_to_train_on_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_pipeline.ppo.plan._seconds", lambda device, run: 1.0)
    once = changed(rollouts_per_update=8, device="cpu")
    plain, turns, replayed = (
        probe(LLAMA, more, RewardModels(count=1))
        for more in (once, replace(once, max_turns=3), replace(once, replay_updates=2))
    )
    steps = once.steps_per_update  # take as long for many as for few
    assert turns.train - steps == replayed.train - steps == 3 * (plain.train - steps)
    assert turns.measure == 3 * plain.measure
    assert plain.measure < replayed.measure < turns.measure  # nothing is scored again


@pytest.mark.slow
def test_a_plan_counts_the_weights_that_adapters_are_merged_into(base: Path) -> None:
    """Where few tokens are trained on, that is the peak."""
    plan = make_plan(read_config(base), changed(lora_rank=4, device="cpu"))
    assert 0 < plan.parts["merged weights"] < 4 * plan.parameters  # embeddings are not copied
    planned, measured = compare("few tokens, LoRA")
    assert abs(planned / measured - 1) <= BAR


@pytest.mark.slow
def test_a_plan_counts_the_adapters_that_are_trained(base: Path) -> None:
    settings = changed(lora_rank=4)
    trained = sum(p.numel() for p in learner_at(base, settings).trainable().values())
    assert make_plan(read_config(base), settings).trained == trained


@pytest.mark.slow
def test_of_a_spread_base_a_process_plans_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(290, layers=6, width=32, heads=2, context=64)
    settings = changed(lora_rank=2, device="cpu")
    whole = make_plan(config, settings).parts
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    spread = make_plan(config, settings).parts
    layer = (4 * 32**2 + 3 * 32 * 96 + 2 * 32) * 4  # attention, MLP, norms; bytes
    assert whole["policy"] - spread["policy"] == 3 * layer  # it holds two of six, and one at work
    assert {n: spread[n] for n in spread if n != "policy"} == {
        n: whole[n] for n in whole if n != "policy"
    }


def test_a_base_that_is_not_the_reference_is_planned_with_that_beside_it(
    base: Path, tmp_path: Path
) -> None:
    other = tiny_policy()
    with torch.no_grad():
        other.model.get_input_embeddings().weight.add_(0.01)
    save_policy(other, tmp_path)
    settings = changed(lora_rank=2, precision="bfloat16", ratio_tolerance=0.1, device="cpu")
    learner = learner_at(tmp_path, settings, reference=base)
    assert learner.reference is not None
    held = unique_bytes(list(learner.reference.model.parameters()))
    config, rewards = read_config(tmp_path), RewardModels(number_bytes=2)
    for reference in (tmp_path, base):
        shares = shares_base(tmp_path, reference, settings.lora_rank)
        parts = make_plan(config, settings, rewards, shares_reference=shares).parts
        copies = 0 if shares else 1
        assert parts["reference"] == copies * held
        assert parts["reward models"] == 2 * copies * held  # the proxy's and the stopping one's
    assert not shares


BERT_BASE = 109_482_240  # its published size, with the pooler, which reward models leave out
POOLER = 768 * 768 + 768


@pytest.mark.slow
def test_reward_models_are_of_their_own_base_whatever_the_policy_is() -> None:
    settings = changed(device="cpu")
    bert = RewardModels(config=BertConfig(), shares=False)
    plan = make_plan(LLAMA, settings, bert)
    assert plan.parts["reward models"] == 2 * 4 * (BERT_BASE - POOLER)
    usual = make_plan(LLAMA, settings)
    assert usual.parts["reward models"] == 2 * 4 * usual.parameters  # its output layer is tied
    assert plan.parts["scoring"] > 10 * usual.parts["scoring"]
    assert plan.phases["measure"] >= plan.parts["reward models"] + plan.parts["scoring"]
    rest = ("policy", "critic", "reference", "optimiser", "gradients")
    assert [plan.parts[name] for name in rest] == [usual.parts[name] for name in rest]
    # With adapters they read with the policy's base, but for those that were trained without.
    adapted = replace(settings, lora_rank=4)
    held = [
        make_plan(LLAMA, adapted, rewards).parts["reward models"]
        for rewards in (RewardModels(), RewardModels(shares=False), bert)
    ]
    assert held == [0, usual.parts["reward models"], plan.parts["reward models"]]


@pytest.mark.slow
def test_the_command_sizes_reward_models_by_their_base(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    for name, config in (
        ("encoder", BertConfig(vocab_size=5_000, intermediate_size=128, **sizes)),
        ("causal", LlamaConfig(vocab_size=5_000, intermediate_size=128, **sizes)),
    ):
        config.save_pretrained(tmp_path / name)
        model = AutoModel.from_config(config)
        own = sum(p.numel() for n, p in model.named_parameters() if "pooler" not in n)
        recipe.write_text(f"policy: {{base: tiny}}\nreward: {{base: {tmp_path / name}}}\n")
        plan = ["--state", str(tmp_path), "plan", str(recipe), "--no-time"]
        told = CliRunner().invoke(app, plan)
        assert told.exit_code == 0, told.output
        [line] = [line for line in told.output.splitlines() if "reward models" in line]
        assert f"{2 * 4 * own / 2**20:,.1f}" in line


@pytest.mark.slow
def test_activations_follow_the_microbatch_and_recomputing_lowers_them() -> None:
    config = GPT2Config(
        vocab_size=300, n_positions=128, n_embd=32, n_layer=4, n_head=2, eos_token_id=1
    )
    large = changed(tokens_per_microbatch=100_000, rollouts_per_update=64, minibatches=1)
    halved = replace(large, tokens_per_microbatch=36 * 32)
    recomputed = replace(large, gradient_checkpointing=True)
    held = [make_plan(config, s).parts["activations, logits"] for s in (large, halved, recomputed)]
    assert 1.7 < held[0] / held[1] < 2.1
    assert held[2] < held[0] / 2


def test_a_plan_for_a_gpu_attends_as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # A CPU keeps short sequences' probabilities, L numbers for each token and head; a GPU none.
    config = tiny_config(290, layers=4, width=512, heads=4, context=256)
    settings = changed(
        max_prompt_tokens=128,
        max_completion_tokens=128,
        tokens_per_microbatch=1024,
        rollouts_per_update=8,
        minibatches=2,
    )
    planned = {}
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(plan_module, "choose_device", lambda _, kind=kind: torch.device(kind))
        parts = make_plan(config, settings, NO_MODELS).parts
        planned[kind] = parts["activations, logits"]
    probabilities = 4 * (4 * 4 * 255 * 255) * FULL  # 4 layers of 4 rows of 4 heads
    saved = (planned["cpu"] - planned["cuda"]) / probabilities
    assert 0.9 < saved < 1.5


def test_sampling_holds_the_same_whether_training_computes_layers_again() -> None:
    settings = changed(rollouts_per_update=64, critic="shared", device="cpu")
    plain, again = (
        make_plan(LLAMA, replace(settings, gradient_checkpointing=flag), NO_MODELS)
        for flag in (False, True)
    )
    assert again.parts["activations, logits"] < plain.parts["activations, logits"]
    assert again.phases["sample"] == plain.phases["sample"]


GPT2 = GPT2Config(vocab_size=290, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=1)


@pytest.mark.parametrize(
    ("config", "changes", "number_bytes"),
    [
        (LLAMA, {}, 4 + 4),
        (LLAMA, {"precision": "bfloat16"}, 4 + 2),  # rotated in float32
        (LLAMA, {"precision": "bfloat16", "lora_rank": 2}, 2 + 2),  # the base is halved too
        (GPT2, {"precision": "bfloat16"}, 2 + 2),  # positions are added to the tokens
    ],
)
def test_keys_and_values_are_planned_in_the_types_they_are_kept_in(
    config: PretrainedConfig, changes: dict[str, Any], number_bytes: int
) -> None:
    settings = changed(ratio_tolerance=0.1, device="cpu", **changes)
    plan = make_plan(config, settings, NO_MODELS)
    tokens = settings.rollouts_per_update * (settings.max_prompt_tokens + 64)  # and spare room
    assert plan.parts["keys and values"] == 2 * 32 * tokens * number_bytes


@pytest.mark.slow
def test_what_cannot_fit_is_refused_with_settings_that_do() -> None:
    settings = changed(tokens_per_microbatch=100_000, rollouts_per_update=96, minibatches=1)
    plan = make_plan(LLAMA, settings)
    assert check_fits(LLAMA, settings, made=plan, room=2 * plan.peak) is plan
    needed = r"fit: ppo\.tokens_per_microbatch 864, ppo\.completions_at_once 24$"
    with pytest.raises(TrainingError, match=needed):
        check_fits(LLAMA, settings, made=plan, room=plan.peak)  # only nine tenths may be filled
    fitting = replace(settings, tokens_per_microbatch=864, completions_at_once=24)
    assert make_plan(LLAMA, fitting).peak <= 0.9 * plan.peak


@pytest.mark.slow
def test_where_no_setting_helps_a_smaller_base_is_asked_for() -> None:
    with pytest.raises(TrainingError, match="take a smaller base"):
        check_fits(LLAMA, changed(), room=1000)


@pytest.mark.slow
def test_a_large_model_is_counted_without_its_weights() -> None:
    config = LlamaConfig(num_hidden_layers=2)  # as wide as one of 7B
    plan = make_plan(config, changed(critic="shared", device="cpu"), NO_MODELS)
    assert plan.peak > 16 * plan.parameters  # weights, gradients, Adam
    assert rehearse(config, plan) is plan  # nothing of this size is run


@pytest.mark.slow
def test_a_rehearsal_finds_more_than_tensors() -> None:
    counted = make_plan(LLAMA, changed(critic="separate", device="cpu"))
    rehearsed = rehearse(LLAMA, counted)
    assert {n: s for n, s in rehearsed.parts.items() if n != "libraries"} == counted.parts
    assert rehearsed.phases.keys() == counted.phases.keys()
    assert rehearsed.peak > counted.peak


def test_more_tokens_than_the_model_has_positions_for_have_no_plan() -> None:
    longer = changed(max_prompt_tokens=60, tokens_per_microbatch=1000, device="cpu")
    with pytest.raises(ConfigError, match="must fit the policy's context of 64 tokens, found 68"):
        make_plan(LLAMA, longer)


def test_an_unknown_model_has_no_plan() -> None:
    with pytest.raises(ModelError, match="found none on this machine; download"):
        read_config("nobody/has-this-model")


@pytest.mark.slow
def test_the_command_prints_a_plan(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["--state", str(tmp_path), "plan", "tiny", "--no-time"])
    assert told.exit_code == 0, told.output
    for part in ("734,080 parameters", "optimiser", "peak"):
        assert part in told.output


@pytest.mark.slow
def test_the_command_counts_the_reward_models_that_specialists_name(
    base: Path, tmp_path: Path
) -> None:
    save_reward(base, folder := tmp_path / "taste", offset=0.0)
    recipe = tmp_path / "recipe.yaml"
    one = f"{{functions: {{taste: {{function: {folder}}}}}}}"
    recipe.write_text(f"policy: {{base: tiny}}\nspecialists: {{a: {one}, b: {one}}}\n")
    words = ["--state", str(tmp_path), "plan", str(recipe), "--no-time"]
    told = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    assert told.exit_code == 0, told.output
    found = re.search(r"reward models\s*│\s*([\d.]+)", told.output)
    held = 2 * 4 * sum(p.numel() for p in tiny_policy().model.parameters()) / 2**20
    assert found is not None
    assert float(found[1]) == pytest.approx(held, abs=0.06)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_the_command_refuses_what_specialists_cannot_have(names: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    each = ", ".join(f"{name}: {{functions: {{length: 1}}}}" for name in names)
    recipe.write_text(f"policy: {{base: tiny}}\nppo: {{critic: shared}}\nspecialists: {{{each}}}\n")
    words = ["--state", str(tmp_path), "plan", str(recipe), "--no-time"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 1, told.output
    assert "need ppo.critic separate, found shared" in told.output


@pytest.mark.slow
def test_the_command_plans_what_an_agents_next_turn_trains(base: Path, tmp_path: Path) -> None:
    """With adapters a champion that was trained whole no longer shares its base with version 0."""
    recipe = tmp_path / "recipe.yaml"
    short = "max_prompt_tokens: 24, max_completion_tokens: 8"
    recipe.write_text(f"policy: {{base: tiny, {short}, lora: {{enabled: true, rank: 2}}}}\n")
    asked = ["--state", str(tmp_path), "--recipe", str(recipe), "plan", "--no-time"]

    def told(*more: str) -> dict[str, str]:
        result = CliRunner().invoke(app, [*asked, *more], env={"COLUMNS": "100"})
        assert result.exit_code == 0, result.output
        rows = [re.split(r"\s*│\s*", line) for line in result.output.splitlines() if "│" in line]
        return {"said": result.output, **{row[1]: row[2] for row in rows}}

    database = Database(f"sqlite:///{tmp_path / 'feedback.db'}")
    database.migrate()
    ledger = PromotionLedger(database, tmp_path)
    other = tiny_policy()
    with torch.no_grad():
        other.model.get_input_embeddings().weight.add_(0.01)
    save_policy(other, tmp_path / "v1")
    own = f"{4 * sum(p.numel() for p in other.model.parameters()) / 2**20:,.1f}"
    FeedbackStore(database).ensure_agent("shop")
    first = told("--agent", "shop")
    plain = told()
    assert "a first turn: " in plain.pop("said")
    assert "a first turn: " in first.pop("said")
    assert first == plain
    assert first["policy"] != own  # the recipe's, not this one
    ledger.add_baseline(
        "shop", label="v0", path=base, files=folder_sha256(base), lineage={}, actor="test"
    )
    second = told("--agent", "shop")
    assert "version 0, its champion, is the policy; version 0 is the ref" in second["said"]
    assert second["reference"] == "0.0"
    ledger.add_version(
        "shop",
        label="v1",
        path=tmp_path / "v1",
        files=folder_sha256(tmp_path / "v1"),
        lineage={},
        gate={"passed": True},
        fingerprint="f",
    )
    ledger.promote("shop", 1, actor="test", reason="better", expected_champion=0)
    third = told("--agent", "shop")
    assert "version 1, its champion, is the policy; version 0 is the reference" in third["said"]
    assert third["reference"] == own
    unknown = CliRunner().invoke(app, [*asked, "--agent", "shap"])
    assert unknown.exit_code == 1
    assert "found 'shap'" in unknown.output
    database.close()


@pytest.mark.slow
def test_the_command_tells_the_time_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = CliRunner().invoke(app, ["--state", str(tmp_path), "plan", "tiny"])
    assert "minutes for 40" in told.output
    monkeypatch.setattr("rlhf_pipeline.ppo.plan.memory_found", lambda device: 2**27)
    refused = CliRunner().invoke(app, ["--state", str(tmp_path), "plan", "tiny", "--no-time"])
    assert refused.exit_code == 1
    assert "these would fit: ppo.tokens_per_microbatch" in refused.output


@pytest.mark.slow
def test_the_planned_peak_comes_true() -> None:
    planned, measured = compare("4 x 256")
    assert abs(planned / measured - 1) <= BAR
