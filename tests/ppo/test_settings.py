"""Settings refuse what cannot be meant."""

from __future__ import annotations

import math
from typing import Any

import pydantic
import pytest

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.ppo.kl import next_kl_coef
from rlhf_pipeline.ppo.settings import AGGRESSIVE, CONSERVATIVE, PpoSettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"updates": 0}, "ppo.updates must be at least 1: found 0"),
        ({"temperature": 0.0}, "ppo.temperature must be finite and at least 1e-06: found 0.0"),
        ({"temperature": 9e-7}, "ppo.temperature must be finite and at least 1e-06: found 9e-07"),
        ({"temperature": math.inf}, "ppo.temperature must be finite and at least 1e-06: found inf"),
        ({"learning_rate": float("nan")}, "ppo.learning_rate must be above 0"),
        ({"kl_coef": -0.1}, "ppo.kl_coef must be 0 or more"),
        ({"gamma": 1.1}, "ppo.gamma must be between 0 and 1"),
        ({"clip_range": 1.0}, "ppo.clip_range must be below 1"),
        ({"missing_eos_score": math.nan}, "ppo.missing_eos_score must be a finite number, or null"),
        ({"top_k": -1}, "ppo.top_k must be 0 or more: found -1"),
        ({"top_p": 0.0}, "ppo.top_p must be above 0 and at most 1"),
        ({"lora_rank": -1}, "ppo.lora_rank must be 0 or more"),
        ({"keep_checkpoints": 1}, "ppo.keep_checkpoints must be at least 2"),
        ({"critic": "twin"}, "ppo.critic must be one of separate, shared: found 'twin'"),
        ({"minibatches": 3}, "take a multiple of 3"),
        ({"minibatches": 4, "completions_per_prompt": 6}, "take a multiple of 12"),
        (
            {"estimator": "rloo", "completions_per_prompt": 2, "max_turns": 2},
            "needed ppo.max_turns of 1, found 2",
        ),
        ({"turn_gamma": 2.0}, "ppo.turn_gamma must be between 0 and 1"),
        ({"reward_timing": "never"}, "ppo.reward_timing must be one of each_turn, end"),
        ({"replay_updates": -1}, "ppo.replay_updates must be 0 or more"),
        ({"estimator": "rloo"}, "ppo.completions_per_prompt of at least 2, found 1"),
        ({"tokens_per_microbatch": 10}, "max_completion_tokens = 112, found 10"),
        ({"kl_controller": "adaptive", "kl_coef": 0.0}, "multiplies ppo.kl_coef"),
        (
            {"kl_controller": "adaptive", "kl_horizon": 25},
            r"needed ppo.kl_horizon above 0.2 \* ppo.rollouts_per_update = 25.6, found 25",
        ),
        ({"patience": 0}, "ppo.patience must be at least 1"),
        ({"seed": -1}, "ppo.seed must be from 0 to 4294967295: found -1"),
        ({"seed": 2**63 - 1}, "ppo.seed must be from 0 to 4294967295"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PpoSettings(**changes)


def test_the_shortest_horizon_leaves_the_coefficient_its_sign() -> None:
    settings = PpoSettings(kl_controller="adaptive", kl_horizon=26)

    def after(horizon: int) -> float:
        episodes = settings.rollouts_per_update
        return next_kl_coef(0.05, 0.0, target=6.0, episodes=episodes, horizon=horizon)

    assert after(settings.kl_horizon) > 0 > after(settings.kl_horizon - 1)


@pytest.mark.parametrize("preset", [{}, CONSERVATIVE, AGGRESSIVE])
def test_defaults_and_presets_are_valid(preset: dict[str, Any]) -> None:
    settings = PpoSettings(**preset)
    assert settings.steps_per_update == settings.epochs * settings.minibatches


def test_presets_order_by_how_far_they_let_the_policy_go() -> None:
    conservative, aggressive = PpoSettings(**CONSERVATIVE), PpoSettings(**AGGRESSIVE)
    assert conservative.kl_coef > PpoSettings().kl_coef > aggressive.kl_coef
    assert conservative.clip_range < PpoSettings().clip_range < aggressive.clip_range


def test_a_configuration_tree_can_nest_the_settings_and_unknown_keys_are_refused() -> None:
    tree = pydantic.TypeAdapter(PpoSettings)
    assert tree.validate_python({"epochs": 2}).epochs == 2
    with pytest.raises(pydantic.ValidationError, match="epochz"):
        tree.validate_python({"epochz": 2})
