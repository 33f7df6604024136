"""A world small enough to train in: a policy of two layers, short prompts, rewards one can see."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_pipeline.policy.loading import Policy, save_policy
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.ppo.collecting import encode_checked, next_prompts, sample_for
from rlhf_pipeline.ppo.learner import Learner, build_learner
from rlhf_pipeline.ppo.measuring import make_rollouts
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.rollout import Rollouts, Tokens
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.trainer import train_ppo
from rlhf_pipeline.records import Message, Prompt, RewardInput, user_prompt
from rlhf_pipeline.reward.composite import CompositeReward, Term
from rlhf_pipeline.reward.named import named_reward
from rlhf_pipeline.reward.settings import Linear

PROMPTS: list[Prompt] = [
    *map(user_prompt, ("hi", "tell me a tale", "why", "name a bird", "what is rain, really")),
    # The template closes an earlier turn with the end token: a prompt holds one too.
    (Message("user", "sing"), Message("assistant", "la"), Message("user", "why")),
]

SETTINGS = PpoSettings(
    updates=2,
    rollouts_per_update=12,
    epochs=2,
    minibatches=2,
    max_prompt_tokens=28,
    max_completion_tokens=8,
    temperature=0.7,
    critic="shared",
    learning_rate=3e-3,
    evaluate_every=1,
    checkpoint_every=1,
    tokens_per_microbatch=120,
    ratio_tolerance=1e-3,
    max_repetition=None,  # random weights and eight tokens say some of them twice
)


def changed(**changes: Any) -> PpoSettings:
    """Return SETTINGS with some of them changed."""
    return replace(SETTINGS, **changes)


def lower_share(items: Sequence[RewardInput]) -> list[float]:
    """Score completions by their share of lower-case letters: learnable within seconds."""
    return [
        sum(c.islower() for c in item.completion) / max(len(item.completion), 1) for item in items
    ]


def two_pieces() -> CompositeReward:
    """Return a reward that changes: a weight on a schedule, a scale it learns."""
    ramp = Linear(start=1.0, end=0.2, updates=3)
    return CompositeReward(
        {"lower": Term(lower_share, ramp, running=True), "length": Term(named_reward("length"))}
    )


def tiny_policy(**config: Any) -> Policy:
    """Return an untrained policy whose weights are large enough to have opinions."""
    texts = ["tell me a tale of rain", "why does the bird sing", "the rain sings to the bird"] * 5
    policy = build_tiny(
        texts, vocabulary=290, layers=2, width=32, heads=2, context=64, seed=0, **config
    )
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for weight in policy.model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 0.15, generator=generator)
        # The end token is likely enough that completions have different lengths.
        embeddings = policy.model.get_input_embeddings().weight
        embeddings[policy.eos_id] *= 2.0
    return policy


def save_absolute(directory: Path) -> Path:
    """Write a policy with learned absolute positions, which wrong position ids show in.

    Rotary positions are relative: there a constant shift by the padding changes nothing.
    """
    tokenizer = tiny_policy().tokenizer
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(20)
    save_policy(Policy(model, tokenizer), directory)
    return directory


def save_base(directory: Path) -> Path:
    """Write the tiny policy and return its folder."""
    save_policy(tiny_policy(), directory)
    return directory


def learner_at(base: Path, settings: PpoSettings = SETTINGS, **options: Any) -> Learner:
    """Return a learner whose policy and reference both start at base."""
    return build_learner(
        base, options.pop("reference", base), options.pop("value_init", None), settings
    )


def rollouts_of(learner: Learner, *, seed: int = 0, kl_coef: float = 0.05) -> Rollouts:
    """Return one update's rollouts, as the trainer makes them."""
    settings = learner.settings
    encoded = encode_checked(learner.policy, PROMPTS, settings, "prompts")
    members = next_prompts(0, settings, len(PROMPTS))
    generator = torch.Generator().manual_seed(seed)
    sampled = sample_for(learner, [encoded[i] for i in members], generator)
    scores = lower_share([RewardInput(PROMPTS[0], text) for text in sampled.texts])
    rollouts, _ = make_rollouts(learner, sampled, scores, kl_coef)
    return rollouts


def bytes_kept(learner: Learner, tokens: Tokens) -> int:
    """Return how many bytes one forward pass keeps for the backward pass."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.logprobs_and_values(tokens)
    return kept


def train(
    base: Path,
    output: Path,
    settings: PpoSettings = SETTINGS,
    *,
    draws: bool = False,
    **options: Any,
) -> TrainingResult:
    """Run train_ppo in this world; options replace its arguments.

    draws: whether the plots are drawn, which takes longer than all the rest.
    """
    arguments: dict[str, Any] = {
        "policy_dir": base,
        "reference_dir": base,
        "reward": lower_share,
        "stopping": None,
        "prompts": PROMPTS,
        "watch_prompts": PROMPTS[:4],
        "output_dir": output,
        "settings": settings,
    }
    with contextlib.ExitStack() as stack:
        if not draws:
            stack.enter_context(patch("rlhf_pipeline.ppo.trainer.draw_plots", return_value=()))
        return train_ppo(**{**arguments, **options})


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """Return the saved weights of a model folder."""
    from safetensors.torch import load_file

    return dict(load_file(directory / "model.safetensors"))
