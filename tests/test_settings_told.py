"""What `rlhf config explain` prints: a recipe of the defaults in which nothing goes unsaid."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlhf_pipeline.config import load_settings, shown
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.settings_told import told


def test_all_of_it_is_a_recipe_of_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(told())
    (tmp_path / "nothing.yaml").write_text("{}")
    every, none = (
        shown(load_settings(str(tmp_path / name))) for name in ("all.yaml", "nothing.yaml")
    )
    assert {**every, "recipe": ""} == {**none, "recipe": ""}
    lines = told().splitlines()
    silent = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if not line.lstrip().startswith("#") and not before.lstrip().startswith("#")
    ]
    assert silent == []  # a comment stands before each
    assert max(len(line) for line in lines if line.lstrip().startswith("#")) <= 100


def test_a_part_stands_where_a_recipe_has_it() -> None:
    assert told("ppo.kl_coef") == (
        "ppo:\n  # Weight of the per-token KL penalty in the reward (N+: 0.05).\n  kl_coef: 0.05\n"
    )
    # The default of a section that one of its users changes, not the section's own.
    assert yaml.safe_load(told("retention.checkpoints")) == {
        "retention": {"checkpoints": {"newest": 1, "days": 7.0}}
    }
    assert yaml.safe_load(told("retention.checkpoints.days")) == {
        "retention": {"checkpoints": {"days": 7.0}}
    }
    assert list(yaml.safe_load(told("reward"))) == ["reward"]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("reward.combine", "One of: median, mean, pessimistic."),
        ("reward.reads", "One of: first, last, mean."),  # or none
        ("feedback.min_rating", "At least 1, at most 5."),
        ("sft.learning_rate", "Above 0, at most 1."),
    ],
)
def test_limits_are_told(place: str, words: str) -> None:
    assert words in " ".join(told(place).replace("#", " ").split())


def test_what_may_stand_where_nothing_does_is_told() -> None:
    assert "\n  judge: null\n  # judge:\n  #   # Ends with /v1" in told("evaluation.judge")
    upstreams = told("serving.upstreams")
    assert "\n  upstreams: {}\n  # NAME:\n  #   # Ends with /v1" in upstreams
    assert "\n  #   url:\n" in upstreams  # needed: it has no default
    assert yaml.safe_load(upstreams) == {"serving": {"upstreams": {}}}


@pytest.mark.parametrize(
    ("place", "near"),
    [
        ("ppo.kl_coeff", "'ppo.kl_coef'"),
        ("rewards", "'reward'"),
        ("ppo.temperature", "'policy.temperature'"),
        ("reward.heads.more", "'reward.heads'"),
        ("nosuch", "there are .*reward, .*, and more below these"),
    ],
)
def test_what_is_no_setting_is_refused_with_the_nearest(place: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"needed a setting, found no '{place}'; .*{near}"):
        told(place)
