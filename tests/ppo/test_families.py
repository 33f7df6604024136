"""A whole update of every supported family, on the tokenizer and template it comes with.

GPT-2, OPT, GPT-Neo and Phi have neither pad token nor chat template; Llama and Qwen chat models
have a template.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.policy import sampling
from rlhf_pipeline.policy.loading import Policy, load_policy, save_policy
from rlhf_pipeline.policy.packed import PACKABLE, can_pack
from rlhf_pipeline.policy.sampling import completion_logprobs, trunk_of
from rlhf_pipeline.policy.tiny import CHAT_TEMPLATE
from rlhf_pipeline.ppo.collecting import encode_checked, sample_for
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.measuring import make_rollouts
from rlhf_pipeline.ppo.optimising import accumulate_gradients, train_on
from rlhf_pipeline.ppo.plan import make_plan, read_config
from rlhf_pipeline.ppo.rollout import Rollouts, SampledCompletions, Tokens
from rlhf_pipeline.records import user_prompt
from rlhf_pipeline.reward.model import Limits, check_lengths, encode_rows, new_reward_model
from tests.policy.test_chat import plain_tokenizer
from tests.policy.test_families import FAMILIES, family_model
from tests.ppo.world import PROMPTS, bytes_kept, changed, learner_at, train

LONG = 64  # tokens of a prompt in plain layout, byte by byte
WITH_TEMPLATE = {"llama", "qwen2"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model of the family, as one from a hub: named after the family."""
    name = str(request.param)
    tokenizer = plain_tokenizer()
    if name in WITH_TEMPLATE:
        tokenizer.chat_template = CHAT_TEMPLATE
    end = int(tokenizer.eos_token_id)
    model = family_model(
        name,
        vocab_size=len(tokenizer),
        max_position_embeddings=96,
        pad_token_id=None,
        eos_token_id=end,
    )
    folder = tmp_path_factory.mktemp("family") / name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_every_family_has_a_plan_that_holds_its_weights(family: Path, lora_rank: int) -> None:
    """Training asks for one before it loads anything."""
    settings = changed(max_prompt_tokens=LONG, max_completion_tokens=16, lora_rank=lora_rank)
    plan = make_plan(read_config(family), settings)
    learner = learner_at(family, settings)
    held = sum(weights.nbytes for weights in learner.policy.model.parameters())
    assert plan.parts["policy"] == pytest.approx(held, rel=0.01)  # a pad token may be added


def test_every_family_has_a_plan_in_which_recomputed_layers_hold_less(family: Path) -> None:
    settings = changed(max_prompt_tokens=LONG, max_completion_tokens=16, tokens_per_microbatch=2000)
    planned = [
        make_plan(read_config(family), replace(settings, gradient_checkpointing=recomputes))
        for recomputes in (False, True)
    ]
    kept, again = (plan.parts["activations, logits"] for plan in planned)
    assert again < 0.7 * kept


@pytest.mark.parametrize("family", ["opt"], indirect=True)
def test_layers_of_a_decoder_that_could_drop_some_are_recomputed_all_the_same(family: Path) -> None:
    gradients, kept = [], []
    for recomputes in (False, True):
        learner, rollouts = learner_of(family, gradient_checkpointing=recomputes)
        kept.append(bytes_kept(learner, rollouts.tokens))
        gradients.append(gradients_of(learner, rollouts))
    assert kept[1] < 0.8 * kept[0]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5)


def learner_of(folder: Path, **options: Any) -> tuple[Learner, Rollouts]:
    """Return a learner at this folder and one update's rollouts, cut to different lengths."""
    settings = changed(
        max_prompt_tokens=LONG,
        max_completion_tokens=16,
        tokens_per_microbatch=600,
        epochs=1,
        **options,
    )
    learner = learner_at(folder, settings)
    encoded = encode_checked(learner.policy, PROMPTS, settings, "prompts") * 2
    sampled = sample_for(learner, encoded, torch.Generator().manual_seed(0))
    tokens, T = sampled.tokens, sampled.tokens.completion_ids.shape[1]
    kept = tokens.completion_mask & (torch.arange(T) < T - torch.arange(len(encoded))[:, None])
    cut = Tokens(
        tokens.prompt_ids,
        tokens.prompt_mask,
        tokens.completion_ids.masked_fill(~kept, learner.policy.pad_id),
        kept,
    )
    logprobs = sampled.logprobs.masked_fill(~kept, 0.0)
    scores = [float(i % 3) for i in range(len(encoded))]
    return learner, make_rollouts(
        learner, SampledCompletions(cut, logprobs, sampled.texts), scores, 0.05
    )[0]


def gradients_of(learner: Learner, rollouts: Rollouts) -> dict[str, Tensor]:
    """Return the gradients of one step over all rollouts, and forget them."""
    accumulate_gradients(learner, rollouts, torch.arange(len(rollouts)))
    found = {n: p.grad.clone() for n, p in learner.trainable().items() if p.grad is not None}
    learner.optimizer.zero_grad()
    return found


def test_a_family_is_updated_as_its_own_forward_pass_says(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, rollouts = learner_of(family)
    policy, tokens = learner.policy, rollouts.tokens
    assert policy.pad_id != policy.eos_id
    for i in range(3):  # alone, as the model itself is called: nothing is padded
        one = tokens.rows(torch.tensor([i]))
        P, said = one.prompt_ids.shape[1], one.completion_ids
        with torch.no_grad():
            logits = policy.model(torch.cat([one.prompt_ids, said], 1)).logits[0, P - 1 : -1]
        wanted = (logits / 0.7).log_softmax(-1).gather(1, said[0, :, None])[:, 0]
        torch.testing.assert_close(rollouts.logprobs[i, : len(wanted)], wanted, rtol=0, atol=1e-4)

    assert can_pack(trunk_of(policy.model)) is (family.name in PACKABLE)
    packed = gradients_of(learner, rollouts)
    monkeypatch.setattr(sampling, "can_pack", lambda trunk: False)
    padded = gradients_of(learner, rollouts)
    monkeypatch.undo()
    assert packed.keys() == padded.keys()
    for name in packed:
        torch.testing.assert_close(packed[name], padded[name], rtol=1e-3, atol=1e-5)

    facts = train_on(learner, rollouts, torch.Generator().manual_seed(0))
    assert facts["policy/first_ratio"] == pytest.approx(1, abs=1e-5)
    assert facts["policy/last_approx_kl"] > 1e-4  # the weights have moved


@pytest.mark.parametrize(
    "family",
    [
        *("gpt2", "opt", "phi"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neo", "llama", "qwen2")),
    ],
    indirect=True,
)
def test_adapters_find_every_linear_layer_of_a_family(family: Path, tmp_path: Path) -> None:
    learner, rollouts = learner_of(family, lora_rank=2, critic="separate")
    trunk = trunk_of(load_policy(family, device="cpu").model)
    linear = {n for n, m in trunk.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    ending = ".lora_A.default.weight"
    adapted = [n.removesuffix(ending) for n in learner.trainable() if n.endswith(ending)]
    assert len(adapted) == len(linear)
    assert all(any(name.endswith(f".{one}") for name in adapted) for one in linear)
    before = learner.reference_logprobs(rollouts.tokens)
    train_on(learner, rollouts, torch.Generator().manual_seed(0))
    assert torch.equal(learner.reference_logprobs(rollouts.tokens), before)
    with torch.no_grad():
        moved, _ = learner.logprobs_and_values(rollouts.tokens)
    assert not torch.allclose(moved, before, atol=1e-3)
    save_policy(Policy(learner.saved_model, learner.policy.tokenizer), tmp_path / "merged")
    merged = load_policy(tmp_path / "merged", device="cpu")
    with torch.no_grad():
        found = completion_logprobs(
            merged.model,
            rollouts.tokens.prompt_ids,
            rollouts.tokens.prompt_mask,
            rollouts.tokens.completion_ids,
            rollouts.tokens.completion_mask,
            temperature=0.7,
        )
    torch.testing.assert_close(found, moved, rtol=0, atol=1e-3)


def test_a_reward_model_on_a_family_scores_alike_however_far_it_is_padded(family: Path) -> None:
    model, tokenizer = new_reward_model(family, seed=0, device="cpu")
    said = [(user_prompt("hi"), "a"), (user_prompt("why does it rain"), "because it must")]
    rows = encode_rows(tokenizer, said, Limits(LONG, 16))
    with torch.no_grad():
        alone = torch.cat([model([row]) for row in rows])
        torch.testing.assert_close(model(rows), alone, rtol=1e-4, atol=1e-4)


def test_a_model_that_sees_too_is_trained_by_what_its_configuration_says_of_text(
    tmp_path: Path,
) -> None:
    """Gemma 3's has widths, vocabulary and context length of its own for text."""
    tokenizer = plain_tokenizer()
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 24}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"head_dim": 8, "max_position_embeddings": 96}
    sees = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sees |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=sees)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    settings = changed(max_prompt_tokens=80, max_completion_tokens=16, max_turns=2, updates=1)
    plan = make_plan(read_config(tmp_path / "base"), settings)
    learner = learner_at(tmp_path / "base", settings)
    assert learner.policy.context_length == 96
    trained = sum(weights.numel() for weights in learner.trainable().values())
    assert plan.trained == pytest.approx(trained, rel=0.01)  # a pad token is added
    reward, _ = new_reward_model(tmp_path / "base", seed=0, device="cpu")
    with pytest.raises(ModelError, match=r"reads at most 96 tokens, found .* up to 81"):
        check_lengths(reward, tokenizer, Limits(81, 16))
    result = train(
        tmp_path / "base",
        tmp_path / "out",
        settings,
        user=lambda conversations: ["why"] * len(conversations),
    )
    assert result.history[-1]["rollout/turns_mean"] > 1


def test_a_mixture_draws_no_experts_where_its_layers_are_computed_again(tmp_path: Path) -> None:
    tokenizer = plain_tokenizer()
    end = int(tokenizer.eos_token_id)
    model = family_model(
        "phimoe",
        vocab_size=len(tokenizer),
        num_key_value_heads=1,
        max_position_embeddings=96,
        pad_token_id=None,
        eos_token_id=end,
    )
    model.save_pretrained(tmp_path / "phimoe")
    tokenizer.save_pretrained(tmp_path / "phimoe")
    gradients = []
    for recomputes in (False, True):
        learner, rollouts = learner_of(tmp_path / "phimoe", gradient_checkpointing=recomputes)
        accumulate_gradients(learner, rollouts, torch.arange(len(rollouts)))
        gradients.append([w.grad for w in learner.trainable().values() if w.grad is not None])
    for one, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, one, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"critic": "separate"},
        {"gradient_checkpointing": True},
        {"lora_rank": 2, "precision": "bfloat16", "ratio_tolerance": 0.1},
    ],
)
def test_a_whole_run_of_every_family(family: Path, options: dict[str, Any], tmp_path: Path) -> None:
    settings = changed(max_prompt_tokens=LONG, max_completion_tokens=16, **options)
    result = train(family, tmp_path / "out", settings)
    assert result.training_steps == 2 * settings.steps_per_update
    load_policy(result.model_path, device="cpu")
