"""An earlier reward model is begun from, or used again until people vote otherwise than it says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlhf_pipeline import stages
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.errors import ModelError, TrainingError
from rlhf_pipeline.evaluation.metrics import wilson_interval
from rlhf_pipeline.feedback.datasets import JOBS, write_jsonl
from rlhf_pipeline.files import read_json, write_json
from rlhf_pipeline.records import FeedbackKind, RewardExample, RewardInput, ignore_progress
from rlhf_pipeline.reward.model import (
    Calibration,
    LearnedReward,
    Limits,
    load_reward_model,
    new_reward_model,
    save_reward_model,
)
from rlhf_pipeline.reward.reuse import accuracy_on, begin_with, has_fallen, use_again
from rlhf_pipeline.reward.training import RewardModelReport, train_reward_model
from tests.reward.conftest import SETTINGS, Planted

LORA = {"lora_rank": 4, "learning_rate": 2e-2, "epochs": 3}
EVERY = {"preference": 1.0, "thumbs": 1.0, "criteria": 1.0}


def train(planted: Planted, folder: Path, **changes: Any) -> RewardModelReport:
    settings = {**SETTINGS, "epochs": 2, "freeze_trunk": False, **changes}
    return train_reward_model(
        planted.base,
        settings.pop("train", planted.train),
        planted.test,
        folder,
        centre_on=planted.centre,
        **settings,
    )


@pytest.fixture(scope="module")
def earlier(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return reward models: one with a trunk of its own, one of adapters on every kind of vote."""
    folder = tmp_path_factory.mktemp("earlier")
    criteria = [
        RewardExample(
            f"e{i}", p.prompt, text, FeedbackKind.criteria, None, {"kind": good}, "v", "train"
        )
        for i, p in enumerate(planted.train[:40])
        for text, good in ((p.chosen, 0.9), (p.rejected, 0.2))
    ]
    train(planted, folder / "whole")
    train(planted, folder / "adapters", **LORA, kinds=EVERY, examples=criteria)
    return {"whole": folder / "whole", "adapters": folder / "adapters"}


def scores(reward: LearnedReward, planted: Planted) -> list[float]:
    return reward([RewardInput(p.prompt, p.chosen) for p in planted.test[:20]])


@pytest.mark.slow
def test_adapters_learn_from_every_kind_and_keep_criteria(
    planted: Planted, earlier: dict[str, Path]
) -> None:
    reward = load_reward_model(earlier["adapters"], device="cpu")
    assert read_json(earlier["adapters"] / "report.json")["accuracy"] > 0.9
    kind = reward.criterion("kind")
    told = [kind([RewardInput(p.prompt, t) for p in planted.test]) for t in ("please", "the order")]
    assert sum(told[0]) > sum(told[1])
    names = {path.name for path in (earlier["adapters"] / "trunk").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


@pytest.mark.slow
@pytest.mark.parametrize("made", ["whole", "adapters"])
def test_a_warm_start_goes_on_where_the_earlier_model_ended(
    made: str, planted: Planted, earlier: dict[str, Path], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {} if made == "whole" else LORA
    began = train(
        planted,
        tmp_path / "rm",
        earlier=earlier[made],
        **{**changes, "reads": read_json(earlier[made] / "reward_model.json")["reads"]},
    )
    assert began.began_with == earlier[made]
    assert began.loss_curve[0][1] < 0.35  # a fresh one knows nothing: 0.69
    assert began.accuracy > 0.9
    assert began.findings is not None
    assert began.findings.learning_curve == ()


@pytest.mark.slow
def test_what_is_made_otherwise_is_not_begun_with(
    planted: Planted, earlier: dict[str, Path], tmp_path: Path
) -> None:
    reads = read_json(earlier["adapters"] / "reward_model.json")["reads"]
    other: dict[str, Any]
    for other in ({"on_base": True, "lora_rank": 2, "reads": reads}, {"on_base": True}, {}):
        model, _ = new_reward_model(planted.base, seed=0, device="cpu", **other)
        assert begin_with(model, earlier["adapters"]) is not None
    assert "no whole reward model" in (begin_with(model, tmp_path) or "")
    assert begin_with(model, earlier["whole"]) is None


def test_a_trunk_of_another_base_of_the_same_shape_is_not_begun_with(
    planted: Planted, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(planted.base, other)
    [weights] = other.glob("*.safetensors")
    save_file({n: t + 0.01 for n, t in load_file(weights).items()}, weights, {"format": "pt"})
    first, tokenizer = new_reward_model(planted.base, seed=0, device="cpu")
    limits, folder = Limits(40, 40), tmp_path / "rm"
    folder.mkdir()
    save_reward_model(first, tokenizer, folder, limits=limits, calibration=Calibration())
    write_json(folder / "report.json", {})
    for base, why in ((other, f"from another base than {other}"), (planted.base, None)):
        model, _ = new_reward_model(base, seed=1, device="cpu")
        before = {name: t.clone() for name, t in model.state_dict().items()}
        said = begin_with(model, folder)
        assert said is None if why is None else why in (said or "")
        taken = model.state_dict()
        assert any(not t.equal(before[name]) for name, t in taken.items()) == (why is None)
    settings = read_json(folder / "reward_model.json")
    del settings["trained_from"]  # one that does not say what it was trained from
    write_json(folder / "reward_model.json", settings)
    assert "another base" in (begin_with(model, folder) or "")


def test_a_model_is_used_again_until_people_vote_otherwise(
    planted: Planted, tmp_path: Path
) -> None:
    folder, again = tmp_path / "proxy", tmp_path / "deeper" / "turn" / "proxy"
    settings = {"freeze_trunk": True, "lora_rank": 1, "train": planted.train[:120]}
    train(planted, folder, **settings)  # it shares its base, and has to find it from anywhere
    reward = load_reward_model(folder, device="cpu")
    as_before = accuracy_on(reward, planted.test)
    assert as_before is not None
    assert as_before.share == pytest.approx(read_json(folder / "report.json")["accuracy"])
    assert not has_fallen(folder, as_before, 0.02)
    turned = [replace(p, chosen=p.rejected, rejected=p.chosen) for p in planted.test]
    assert has_fallen(folder, accuracy_on(reward, turned[:12]), 0.02)
    mixed = [replace(p, voter=f"v{n}") for n, p in enumerate([*turned[:20], *planted.test[20:]])]
    many = accuracy_on(reward, mixed)
    few = accuracy_on(reward, [*(replace(p, voter="v0") for p in mixed[:20]), *mixed[20:]])
    assert many is not None
    assert few is not None
    assert (many.low, many.high) == wilson_interval(many.share, len(mixed))
    assert few.low < many.low  # twenty votes of one person
    by_chance = replace(as_before, share=as_before.share - 0.1, high=as_before.share + 0.01)
    assert not has_fallen(folder, by_chance, 0.02)
    assert has_fallen(folder, replace(by_chance, high=as_before.share - 0.01), 0.02)
    assert not has_fallen(folder, replace(by_chance, high=as_before.share - 0.01), 0.2)
    few = accuracy_on(reward, [*turned[:9], replace(turned[9], tie=True)])
    assert few is None
    assert not has_fallen(folder, few, 0.02)
    write_json(folder / "raters.json", {"weights": {"ann": {}}})
    report = read_json(folder / "report.json")
    report["findings"]["by_topic"] = {"ann's": {"share": 0.5, "low": 0.4, "high": 0.6, "n": 12}}
    write_json(folder / "report.json", report)
    assert use_again(folder, again, as_before, is_own=True)["reused_from"] == str(folder)
    assert {path.name for path in again.iterdir()} == {path.name for path in folder.iterdir()}
    assert read_json(again / "report.json")["findings"] == report["findings"]
    assert read_json(again / "report.json")["on_new_votes"]["n"] == 80
    assert scores(load_reward_model(again, device="cpu"), planted) == scores(reward, planted)
    with pytest.raises(ModelError, match=r"reward\.given"):
        use_again(tmp_path, tmp_path / "none", None, is_own=True)
    # Another agent's goes without what names its people: who erases them there never comes here.
    others = tmp_path / "others"
    told = use_again(folder, others, None, is_own=False)
    left_out = {path.name for path in folder.iterdir()} - {path.name for path in others.iterdir()}
    assert left_out == {"raters.json", "worst.json"}
    assert told == read_json(others / "report.json")
    assert (told["findings"]["by_topic"], told["findings"]["worst"]) == ({}, [])
    assert told["findings"]["by_kind"] == report["findings"]["by_kind"] != {}
    assert scores(load_reward_model(others, device="cpu"), planted) == scores(reward, planted)


def test_of_other_settings_no_earlier_models_are_taken(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as they are where they would come out otherwise, nor to begin with where they leak."""
    train(planted, tmp_path / "made", freeze_trunk=True)
    began: list[Path | None] = []
    reasons: set[str | None] = set()

    def made(*given: Any, earlier: Path | None, **_: Any) -> Any:
        began.append(earlier)
        shutil.copytree(tmp_path / "made", given[3])
        return SimpleNamespace(path=given[3])

    monkeypatch.setattr("rlhf_pipeline.reward.training.train_reward_model", made)
    monkeypatch.setattr(stages, "_baseline_completions", lambda *_: ([], []))
    data = tmp_path / "data" / "first"
    pairs = [replace(p, voter=f"v{i}") for i, p in enumerate(planted.train[:40])]
    pairs += [replace(p, split="evaluation") for p in planted.test[:2]]
    write_jsonl(data / stages.PAIRS, pairs)
    for name in (stages.EXAMPLES, stages.PROMPTS):
        (data / name).touch()
    tree: dict[str, dict[str, Any]] = {
        "policy": {"base": str(planted.base), "max_prompt_tokens": 32, "max_completion_tokens": 40},
        "reward": {"min_pairs": 2},
    }

    def turn(
        name: str,
        previous: Path | None,
        baseline: Path = planted.base,
        **changes: dict[str, Any],
    ) -> list[Path | None]:
        """Train a turn's reward models; return with which earlier ones each began."""
        asked = {part: {**tree.get(part, {}), **some} for part, some in changes.items()}
        settings = load_settings("tiny", {**tree, **asked})
        one = stages.Turn(
            agent_id="shop",
            fingerprint=name,
            watermark=1,
            token=1,
            data=data,
            work=tmp_path / "work" / name,
            baseline=baseline,
            champion=None,
            settings=settings,
            previous=previous,
        )
        began.clear()
        reports = stages.train_reward_models(one, ignore_progress, lambda: None)
        reasons.clear()
        reasons.update(reports[job]["why_cold"] for job in JOBS)
        return list(began)

    assert turn("first", None) == [None] * 3
    first = tmp_path / "work" / "first"
    kept = {"min_pairs": 2, "retrain_drop": 0.5}
    assert turn("again", first, reward=kept) == []
    assert turn("still", tmp_path / "work" / "again", reward=kept) == []
    others: list[dict[str, dict[str, Any]]] = [
        {"reward": {**kept, "weigh_raters": False}},
        {"reward": kept, "policy": {"max_completion_tokens": 41}},
        {"reward": kept, "feedback": {"evaluation_share": 0.3}},
    ]
    for i, changes in enumerate(others):
        assert (
            len(turn(f"otherwise {i}", tmp_path / "work" / "still", planted.base, **changes)) == 3
        )
    reset = tmp_path / "reset baseline"
    shutil.copytree(planted.base, reset)
    assert len(turn("reset", tmp_path / "work" / "still", reset, reward=kept)) == 3
    warm = {"min_pairs": 2, "warm_start": True}
    assert turn("warm", first, reward={**warm, "epochs": 1}) == [
        first / "reward" / job for job in JOBS
    ]
    shares = {"proxy": 0.5, "stopping": 0.25, "gate": 0.25}
    assert turn("raters", first, reward={**warm, "shares": shares}) == [None] * 3
    assert reasons == {"votes are divided otherwise than for the earlier one"}
    held_out = {"evaluation_share": 0.3}
    assert turn("held out", first, reward=warm, feedback=held_out) == [None] * 3
    made_by = first / "reward" / stages.MADE_BY
    told = json.loads(made_by.read_text())
    assert told["split_by"] == "said"
    made_by.write_text(json.dumps({**told, "split_by": "conversation"}))
    assert turn("by every letter", first, reward=warm) == [None] * 3
    del told["split_by"]
    made_by.write_text(json.dumps(told))  # as releases did that held prompts out one by one
    assert turn("one by one", first, reward=warm) == [None] * 3
    given = {"min_pairs": 2, "given": str(first / "reward")}
    assert turn("given", None, reward=given) == []
    with pytest.raises(TrainingError, match=r"needed 32 and 41 tokens, found 32 and 40 of .*proxy"):
        turn("longer", None, reward=given, policy={"max_completion_tokens": 41})
