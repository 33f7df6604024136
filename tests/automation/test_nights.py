"""What many nights begin from: a recipe with its waiting compressed, and a report to go on in."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from automation.nights import CLOCK, Wanted, _so_far, compress
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.files import write_json
from rlhf_pipeline.simulation.nights import Report


def test_the_recipe_of_the_nights_differs_in_waiting_and_in_who_decides(tmp_path: Path) -> None:
    compress("tiny", tmp_path / "nights.yaml", turn_at=700)
    ours, theirs = load_settings(tmp_path / "nights.yaml"), load_settings("tiny")
    assert ours.experiments.enabled
    assert ours.promotion.automatic
    assert ours.continuous_learning.min_new_feedback == 700
    assert ours.promotion.gate == theirs.promotion.gate
    for section in ("policy", "sft", "reward", "ppo", "training", "evaluation", "validation"):
        assert getattr(ours, section) == getattr(theirs, section)
    tree = yaml.safe_load((tmp_path / "nights.yaml").read_text())
    assert all(tree[section].items() >= values.items() for section, values in CLOCK.items())


def test_another_simulation_does_not_go_on_in_a_report(tmp_path: Path) -> None:
    wanted = Wanted("shop", 3, 0, 100, 40, 500, 200)
    assert _so_far(tmp_path, wanted) == (Report("shop", 0, 100, 40, 500, 200), [])
    other = {**asdict(Report("shop", 1, 100, 40, 500, 200)), "late": []}
    write_json(tmp_path / "nights.json", other)
    with pytest.raises(ConfigError, match="is the report of another simulation"):
        _so_far(tmp_path, wanted)
