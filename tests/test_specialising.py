"""Several agents from one recipe: what they are asked, and what `rlhf specialise` leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_pipeline.config import RECIPES, SpecialistSettings, load_settings
from rlhf_pipeline.errors import ConfigError, NotEnoughData, TrainingError
from rlhf_pipeline.files import alone_in, write_json
from rlhf_pipeline.ppo.checkpoint import write_checkpoint
from rlhf_pipeline.ppo.plan import NO_MODELS, make_plan
from rlhf_pipeline.records import RewardInput, ignore_progress, user_prompt
from rlhf_pipeline.reward import HEAD, SETTINGS, TRUNK
from rlhf_pipeline.reward.composite import CompositeReward, Term
from rlhf_pipeline.specialising import (
    Asked,
    Row,
    as_markdown,
    baseline_of,
    judge,
    prompts_of,
    reward_of,
    specialise,
)
from rlhf_pipeline.stages import policy_config
from tests.ppo.test_reports import RESULT

SMALL: dict[str, Any] = {
    "policy": {"tiny": {"layers": 1, "width": 32, "heads": 2, "vocabulary": 400}},
    "sft": {"seed_conversations": "simulated:80", "epochs": 1},
    "ppo": {"updates": 2, "rollouts_per_update": 16, "epochs": 1, "evaluate_every": 1},
    "training": {"watch_prompts": 8},
    "specialists": {name: {"count": 32} for name in ("reply", "emotion", "recommendation")},
}


def test_the_recipes_agents_have_prompts_and_rewards_of_their_own() -> None:
    settings = load_settings("specialists")
    asked = {name: prompts_of(name, one, settings) for name, one in settings.specialists.items()}
    for one in asked.values():
        apart = [set(part) for part in (one.train, one.watch, one.held_out)]
        assert min(map(len, apart)) >= 64
        assert len(set.union(*apart)) == sum(map(len, apart))  # none in two parts
    worry = RewardInput(asked["emotion"].train[0], "of course. have a lovely day!")
    emotion = reward_of(settings.specialists["emotion"], asked["emotion"], settings)
    (told,) = emotion.judge([worry])
    assert told.pieces["kindness"].score == 1.0
    assert list(told.pieces) == ["kindness", "rouge-l", "safety"]
    wanted = RewardInput(user_prompt("how much is the lamp?"), "the lamp costs 3 coins.")
    sales = reward_of(settings.specialists["recommendation"], asked["recommendation"], settings)
    told = sales.breakdown(wanted.prompt, wanted.completion, ("the lamp costs 3 coins.",))
    assert told.pieces["names-items"].score == pytest.approx(0.2)
    assert told.pieces["rouge-l"].score == 1.0


def test_prompts_of_ones_own_come_with_references(tmp_path: Path) -> None:
    path, settings = tmp_path / "asked.jsonl", load_settings("tiny")
    lines = [{"prompt": f"question {i}", "references": [f"answer {i}"]} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)))
    one = SpecialistSettings(prompts=str(path), functions={"rouge-l": 1})
    asked = prompts_of("mine", one, settings)
    assert [len(part) for part in (asked.train, asked.watch, asked.held_out)] == [4, 2, 2]
    assert reward_of(one, asked, settings).breakdown(asked.train[0], "answer").score > 0
    path.write_text("\n".join([*map(json.dumps, lines[1:]), json.dumps({"prompt": "bare"})]))
    with pytest.raises(NotEnoughData, match="found 1 without"):
        reward_of(one, prompts_of("mine", one, settings), settings)
    path.write_text(json.dumps(lines[0]))
    with pytest.raises(NotEnoughData, match="mine needs 8 prompts, found 1"):
        prompts_of("mine", one, settings)
    signs = [json.dumps({"prompt": f"{i}\u2028\x85?"}, ensure_ascii=False) for i in range(8)]
    path.write_text("\n".join(signs), encoding="utf-8")
    assert user_prompt("0\u2028\x85?") in prompts_of("mine", one, settings).held_out  # one line
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, lines)) + "\n \n", encoding="utf-8")
    assert prompts_of("mine", one, settings) == asked
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"asked.jsonl:1 needs"):
        prompts_of("mine", one, settings)
    for no_list in ("answer 0", {"a": 1}, [1]):  # of a text, every letter would be a reference
        path.write_text(json.dumps({**lines[0], "references": no_list}))
        with pytest.raises(ConfigError, match="references, if any, as a list of texts"):
            prompts_of("mine", one, settings)


def test_the_baseline_is_trained_again_for_other_conversations_or_another_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[object] = []

    def train(turn: Any, *_: Any) -> dict[str, Any]:
        trained.append(turn)
        return {"loss_curve": []}

    monkeypatch.setattr("rlhf_pipeline.stages.train_baseline", train)
    seeds, base = tmp_path / "seeds.jsonl", tmp_path / "base"
    base.mkdir()
    tree = {"policy": {"base": str(base)}, "sft": {"seed_conversations": str(seeds)}}
    settings = load_settings("tiny", tree)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    for times, (answer, weights) in enumerate((("hello", b"1"), ("hey", b"1"), ("hey", b"2")), 1):
        talk[1]["content"] = answer
        seeds.write_text(json.dumps({"messages": talk}) + "\n")
        (base / "model.safetensors").write_bytes(weights)
        for _ in range(2):
            assert baseline_of(settings, tmp_path, ignore_progress) == tmp_path / "sft"
            assert len(trained) == times


def test_agents_that_began_with_another_baseline_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.stages.train_baseline", lambda *_: pytest.fail("trained"))
    write_json(tmp_path / "baseline.json", {"settings": "another recipe's"})
    write_checkpoint(tmp_path / "checkpoints", 0, tensors={}, state={})
    with pytest.raises(TrainingError, match="must be of this run, found those of another"):
        specialise(load_settings("specialists"), tmp_path)


def test_what_a_function_could_not_judge_is_left_out_of_its_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sceptic:
        """Judges what has an o in it, as a service that answers no more to some."""

        may_skip = True

        def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
            return [float(len(i.completion)) if "o" in i.completion else math.nan for i in items]

    said = ["rain", "so", "soon"]
    monkeypatch.setattr("rlhf_pipeline.simulation.play.assistant", lambda *_: lambda prompts: said)
    asked = Asked([], [], [*map(user_prompt, ("a", "b", "c"))], {})
    means = judge(Path(), asked, CompositeReward({"o": Term(Sceptic())}), load_settings("tiny"))
    assert means == {"o": 3.0}


def test_the_table_says_why_each_agent_ended_one_that_made_no_update_too() -> None:
    ended = replace(RESULT, chosen_update=0, history=(), stopped_because="the loss is not finite")
    trained = replace(ended, history=({"critic/explained_variance": 0.5},), stopped_because="done")
    table = as_markdown([Row(name, {}, {}, one) for name, one in (("a", ended), ("b", trained))])
    assert table.splitlines()[-2:] == [
        "| a | 0 | 0.00 | – | the loss is not finite |",
        "| b | 0 | 0.00 | 0.50 | done |",
    ]


@pytest.mark.parametrize(
    ("specialist", "message"),
    [
        ({"functions": {}}, "at least 1 item"),
        ({"functions": {"learned": 1}}, "has no reward model of its own"),
        ({"functions": {"lenght": 1}}, r"found 'lenght'; correct it \(the nearest is 'length'\)"),
        ({"functions": {"length": 1}, "prompt": "x"}, "unknown setting 'specialists.a.prompt'"),
    ],
)
def test_a_specialist_that_cannot_be_is_refused(specialist: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings("tiny", {"specialists": {"a": specialist}})


@pytest.mark.parametrize("name", ["sft", "checkpoints", "SFT"])
def test_a_specialist_cannot_have_the_folder_of_the_baseline_or_the_checkpoints(name: str) -> None:
    specialists = {"a": {"functions": {"length": 1}}, name: {"functions": {"length": 1}}}
    with pytest.raises(ConfigError, match=rf"needed another than these, found '{name}'; rename it"):
        load_settings("tiny", {"specialists": specialists})


def test_prompts_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before a baseline is trained."""
    settings = load_settings("tiny")
    for prompts, message in (("simulated:prise", "found prise"), ("no.jsonl", "found none")):
        one = SpecialistSettings(prompts=prompts, functions={"length": 1})
        with pytest.raises(ConfigError, match=message):
            prompts_of("a", one, settings)
    with pytest.raises(ConfigError, match="needed some in recipe tiny, found none"):
        specialise(settings, tmp_path)
    monkeypatch.setattr("rlhf_pipeline.stages.train_baseline", lambda *_: pytest.fail("trained"))
    named = {"a": {"prompts": "no.jsonl", "functions": {"length": 1}}}
    with pytest.raises(ConfigError, match="found none"):
        specialise(load_settings("tiny", {"specialists": named}), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ppo": {"critic": "shared"}}, "need ppo.critic separate, found shared"),
        ({"policy": {"lora": {"enabled": True}}}, "needed policy.lora.enabled false, found"),
    ],
)
def test_settings_that_specialists_cannot_have_are_refused_before_a_baseline_is_trained(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.stages.train_baseline", lambda *_: pytest.fail("trained"))
    with pytest.raises(ConfigError, match=message):
        specialise(load_settings("specialists", change), tmp_path)


def test_what_memory_does_not_suffice_for_is_refused_before_a_baseline_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.stages.train_baseline", lambda *_: pytest.fail("trained"))
    settings = load_settings("specialists")
    alone = make_plan(policy_config(settings), settings.ppo, NO_MODELS)
    found = int(1.2 * alone.peak)  # room for one of three
    assert alone.fits(found)
    monkeypatch.setattr("rlhf_pipeline.ppo.plan.memory_found", lambda _: found)
    with pytest.raises(TrainingError, match="training needs about"):
        specialise(settings, tmp_path)


def test_a_reward_model_that_reads_less_than_a_specialist_may_say_is_refused(
    tmp_path: Path,
) -> None:
    taste = tmp_path / "taste"
    for name in (TRUNK, HEAD):
        (taste / name).mkdir(parents=True)
    write_json(taste / SETTINGS, {"max_prompt_tokens": 4096, "max_completion_tokens": 3})
    functions = {"taste": {"function": str(taste)}}
    tree = {**SMALL, "specialists": {"reply": {"count": 32, "functions": functions}}}
    with pytest.raises(TrainingError, match=r"specialists\.reply\.functions must read whole"):
        specialise(load_settings("specialists", tree), tmp_path / "trained")
    assert not (tmp_path / "trained").exists()


def test_specialists_are_trained_in_a_folder_by_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        alone_in(tmp_path),
        pytest.raises(TrainingError, match="found another at work; wait for it, or stop it"),
    ):
        specialise(load_settings("specialists"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".held"]
    with alone_in(tmp_path):  # nothing is held any more
        pass


@pytest.mark.slow
def test_rlhf_specialise_trains_the_recipes_agents_and_goes_on(tmp_path: Path) -> None:
    import yaml

    from rlhf_pipeline.cli import app

    recipe, out = tmp_path / "small.yaml", tmp_path / "agents"
    tree = yaml.safe_load((RECIPES / "specialists.yaml").read_text())
    for section, smaller in SMALL.items():
        for key, value in smaller.items():
            known = tree.setdefault(section, {}).get(key)
            tree[section][key] = {**known, **value} if isinstance(known, dict) else value
    recipe.write_text(yaml.safe_dump(tree))
    words = ["specialise", "--recipe", str(recipe), "--out", str(out)]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    rows = {
        line.split("|")[1].strip() for line in told.output.splitlines() if "hidden tone" in line
    }
    assert rows == {"reply", "emotion", "recommendation"}
    assert (out / "table.md").read_text() in told.output
    for name in rows:
        assert (out / name / "policy/model.safetensors").exists()
    weights = out / "emotion/policy/model.safetensors"
    trained = weights.read_bytes()
    assert CliRunner().invoke(app, words).output == told.output  # nothing is trained twice
    assert weights.read_bytes() == trained
