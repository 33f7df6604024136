"""Two nights of the loop with nobody at the wheel: a real service, a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from automation.nights import CLOCK, Wanted, _so_far, compress
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.files import write_json
from rlhf_pipeline.simulation.nights import Report
from tests.assets.world import write_recipe

ROOT = Path(__file__).parents[2]


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


@pytest.mark.slow
def test_two_nights_pass_with_nobody_at_the_wheel(tmp_path: Path) -> None:
    state = tmp_path / "state"
    # People must be able to read what it writes: garbled answers are no feedback.
    recipe = write_recipe(
        tmp_path / "minute.yaml",
        state,
        policy={
            "max_completion_tokens": 32,
            "tiny": {"vocabulary": 512, "layers": 2, "width": 64, "heads": 2, "context": 96},
        },
        sft={"seed_conversations": "simulated:1500", "epochs": 2, "learning_rate": 5e-3},
    )
    words = ["--recipe", str(recipe), "simulate", "--agent", "shop", "--nights", "2"]
    command = [sys.executable, "-m", "rlhf_pipeline.cli", *words]
    done = subprocess.run(
        [
            *command,
            "--events",
            "150",
            "--people",
            "60",
            "--trial",
            "100",
            "--turn-at",
            "40",
            "--out",
            str(tmp_path / "out"),
        ],
        cwd=ROOT,
        env={**os.environ, "RLHF_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    report = json.loads((tmp_path / "out" / "nights.json").read_text())
    first, second = report["nights"]
    assert (first["kind"], second["kind"]) == ("ordinary", "ordinary")
    assert first["versions"] == {"0": 225}
    assert (first["sent"], first["accepted"]) == (250, 150)  # a hundred in a file
    assert len(first["turns"]) == 1
    assert "version 1 passed and meets 20% of the people" in first["turns"][0]
    assert "1" in second["versions"], "some people met the challenger"
    assert second["experiment"].startswith("version 1 at ")
    assert second["manual_steps"] == 0
    kept = {promise["what"]: promise["met"] for promise in report["promises"]}
    assert kept["manual steps"]
    # A model of two layers after seconds of training need not please anybody.
    assert done.returncode == (0 if all(kept.values()) else 1), done.stderr
    assert (tmp_path / "out" / "nights.png").stat().st_size > 10_000
    assert "| night | day |" in (tmp_path / "out" / "nights.md").read_text()
