"""Alarms, metrics, results, and what the package may import."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.ppo.alarms import (
    Alarm,
    find_alarms,
    not_finite,
    over_optimisation,
    reward_saturation,
)
from rlhf_pipeline.ppo.metrics import METRICS, as_markdown, checked
from rlhf_pipeline.ppo.result import Evaluation, TrainingResult

HEALTHY = {
    "rollout/kl_per_completion": 2.0,
    "rollout/entropy": 2.0,
    "rollout/length_mean": 10.0,
    "rollout/eos_share": 0.9,
    "rollout/repetition": 0.01,
    "critic/explained_variance": 0.4,
}


def alarms_after(**changes: float) -> list[str]:
    """Return the alarms of a healthy history whose latest five updates show the changes."""
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    history = [HEALTHY, *[{**HEALTHY, **named}] * 5]
    return [a.name for a in find_alarms(history, kl_target=6.0, max_completion_tokens=20)]


@pytest.mark.parametrize(
    ("changes", "alarms"),
    [
        ({}, []),
        ({"rollout__kl_per_completion": 25.0}, ["kl_blow_up"]),
        ({"rollout__kl_per_completion": 23.0}, []),
        ({"rollout__entropy": 0.1}, ["entropy_collapse"]),
        ({"rollout__length_mean": 18.0}, ["length_explosion"]),
        ({"rollout__length_mean": 14.0}, []),
        ({"rollout__eos_share": 0.4}, ["eos_loss"]),
        ({"rollout__repetition": 0.05}, ["repetition"]),
        ({"rollout__repetition": 0.03}, []),
        ({"critic__explained_variance": -0.1}, ["critic_useless"]),
    ],
)
def test_each_alarm_hears_its_trouble_and_nothing_else(
    changes: dict[str, float], alarms: list[str]
) -> None:
    assert alarms_after(**changes) == alarms


def test_a_critic_is_given_five_updates_and_none_is_asked_of_rloo() -> None:
    bad = {**HEALTHY, "critic/explained_variance": -1.0}
    assert not find_alarms([bad] * 4, kl_target=6.0, max_completion_tokens=20)
    none = {k: v for k, v in HEALTHY.items() if not k.startswith("critic")}
    assert not find_alarms([none] * 9, kl_target=6.0, max_completion_tokens=20)


def looks_at(*scores: tuple[float, float]) -> list[Evaluation]:
    """Return looks with these mean proxy and stopping scores, both of a deviation of 1."""
    return [
        Evaluation(5 * i, proxy, 1.0, stopping, 1.0, 5.0, 1.0, stopping_std=1.0)
        for i, (proxy, stopping) in enumerate(scores)
    ]


def test_a_proxy_that_rises_while_the_stopping_reward_falls_is_told() -> None:
    hacked = looks_at((0.0, 0.0), (1.0, 2.0), (2.0, 0.9))
    (alarm,) = over_optimisation(hacked)
    assert (alarm.name, alarm.update) == ("over_optimisation", 10)
    assert "fell from 2.00 after update 5 to 0.90" in alarm.found
    assert "ppo.patience" in alarm.remedy
    assert over_optimisation(looks_at((0.0, 0.0), (1.0, -0.3)))  # it never rose
    for harmless in (
        looks_at((0.0, 0.0)),
        looks_at((0.0, 0.0), (1.0, 2.0), (2.0, 1.1)),  # most of what was gained is kept
        looks_at((0.0, 0.0), (1.0, 2.0), (0.5, 0.5)),  # both fell
        looks_at((0.0, 0.0), (1.0, -0.1)),  # chance
        [replace(look, stopping_mean=None) for look in hacked],
    ):
        assert over_optimisation(harmless) == []


@pytest.mark.parametrize("unit", [0.01, 1.0, 100.0])
def test_whether_the_stopping_score_fell_does_not_hang_on_the_proxys_unit(unit: float) -> None:
    def in_unit(*scores: tuple[float, float]) -> list[Evaluation]:
        looks = looks_at(*scores)
        return [replace(k, score_mean=unit * k.score_mean, score_std=unit) for k in looks]

    assert over_optimisation(in_unit((0.0, 0.0), (1.0, 2.0), (2.0, 0.9)))
    assert not over_optimisation(in_unit((0.0, 0.0), (1.0, -0.1)))


def test_scores_that_no_longer_tell_completions_apart_are_told() -> None:
    first, later = looks_at((0.0, 0.0), (1.0, 1.0))
    (alarm,) = reward_saturation([first, replace(later, score_std=0.09)])
    assert (alarm.name, alarm.update) == ("reward_saturation", 5)
    assert reward_saturation([first, replace(later, score_std=0.1)]) == []
    assert reward_saturation([replace(first, score_std=0.0)]) == []  # one watch prompt


def test_an_alarm_names_cause_and_remedy() -> None:
    text = str(not_finite(7, "the loss"))
    assert "not_finite at update 7: the loss is not finite" in text
    assert "lower ppo.learning_rate" in text


def test_metrics_outside_the_table_are_refused_and_the_table_is_documented() -> None:
    assert checked({"rollout/score_mean": 1}) == {"rollout/score_mean": 1.0}
    with pytest.raises(KeyError, match="no row for rollout/scores"):
        checked({"rollout/scores": 1.0})
    lines = as_markdown().splitlines()
    assert len(lines) == len(METRICS) + 2
    assert all(f"| `{name}` |" in line for name, line in zip(METRICS, lines[2:], strict=True))


def test_the_documentation_shows_the_table_as_it_is() -> None:
    shown = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    assert shown.endswith(as_markdown() + "\n"), (
        "docs/metrics.md must end with ppo.metrics.as_markdown(), found another table; "
        "paste what `python -m rlhf_pipeline.ppo.metrics` writes below its first lines"
    )


RESULT = TrainingResult(
    model_path="out/policy",
    reward_model_path=None,
    feedback_count=None,
    chosen_update=1,
    stopped_because="all updates are made",
    final_reward_mean=0.5,
    final_reward_std=0.1,
    training_steps=4,
    reward_history=(0.25,),
    kl_history=(0.5,),
    loss_history=(-0.125,),
    history=({"rollout/score_mean": 0.25},),
    evaluations=(Evaluation(0, 0.0, 1.0, None, 0.0, 5.0, 1.0),),
    alarms=(Alarm("eos_loss", 1, "found", "cause", "remedy"),),
    seconds={"sample": 1.5},
    resumed_from=None,
    fingerprint="abc",
    settings={"updates": 1},
    plots=("training.png",),
)


def test_a_result_comes_back_from_json_as_it_was(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "result.json")
    assert TrainingResult.load(tmp_path / "result.json") == RESULT
    counted = replace(RESULT, feedback_count=40)
    counted.save(tmp_path / "result.json")
    assert TrainingResult.load(tmp_path / "result.json").feedback_count == 40


def test_another_json_is_not_taken_for_a_result(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"updates": 3}')
    with pytest.raises(TrainingError, match="a training result is needed"):
        TrainingResult.load(tmp_path / "other.json")


def test_ppo_can_be_lifted_to_a_machine_with_torch_and_transformers_only() -> None:
    root = Path(__file__).parents[2] / "rlhf_pipeline"
    allowed = set(sys.stdlib_module_names) | {
        *("torch", "transformers", "peft", "accelerate", "numpy", "safetensors", "matplotlib"),
        *("tokenizers", "jinja2", "yaml"),  # transformers' own
    }
    # DPO and conversations of several turns need more; nothing else does.
    more = {"dpo.py": {"trl", "datasets"}, "environment.py": {"gymnasium"}}
    more |= {"metrics.py": {"scipy"}}  # for intervals, which PPO has none of
    ours = {"rlhf_pipeline.ppo", "rlhf_pipeline.policy"}
    ours |= {
        f"rlhf_pipeline.{n}" for n in ("records", "errors", "fence", "files", "evaluation.metrics")
    }
    lifted = [*(root / "ppo").glob("*.py"), *(root / n for n in ("records.py", "errors.py"))]
    lifted += [root / "fence.py", root / "files.py", root / "evaluation" / "metrics.py"]
    lifted += [root / "policy" / f"{n}.py" for n in ("loading", "chat", "sampling", "tiny")]
    for path in lifted:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                known = allowed | more.get(path.name, set())
                fine = name.split(".")[0] in known or any(name.startswith(o) for o in ours)
                assert fine, f"{path.name} imports {name}"
