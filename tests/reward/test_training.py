"""Reward training finds what people prefer, says how sure it is, and refuses what cannot teach."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pipeline.errors import NotEnoughData, TrainingError
from rlhf_pipeline.files import folder_sha256, read_json
from rlhf_pipeline.records import FeedbackKind, Message, PreferencePair, RewardExample, RewardInput
from rlhf_pipeline.reward import tuning
from rlhf_pipeline.reward.calibration import highest_floor
from rlhf_pipeline.reward.fitting import encode_pairs, fit_head
from rlhf_pipeline.reward.functions import as_reward
from rlhf_pipeline.reward.judging import halves
from rlhf_pipeline.reward.logistic import logistic, preference_loss
from rlhf_pipeline.reward.model import Limits, load_reward_model, new_reward_model, score_rows
from rlhf_pipeline.reward.training import RewardModelReport, train_reward_model
from tests.reward.conftest import SETTINGS, Planted


def train(
    planted: Planted, folder: Path, *, freeze_trunk: bool = False, **changes: Any
) -> RewardModelReport:
    data: dict[str, Any] = {"train": planted.train, "test": planted.test, "centre": planted.centre}
    data |= {name: changes.pop(name) for name in list(changes) if name in data}
    return train_reward_model(
        planted.base,
        data["train"],
        data["test"],
        folder,
        freeze_trunk=freeze_trunk,
        centre_on=data["centre"],
        **{**SETTINGS, **changes},
    )


def test_the_loss_is_that_of_a_hand_worked_example() -> None:
    margins = torch.tensor([0.0, 2.0, -2.0, 2.0])
    targets = torch.tensor([1.0, 1.0, 1.0, 0.5])
    expected = [
        math.log(2),
        math.log(1 + math.exp(-2)),
        math.log(1 + math.exp(2)),
        (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2,
    ]
    assert preference_loss(margins, targets).tolist() == pytest.approx(expected)


def test_the_gradient_is_that_of_finite_differences_and_ties_pull_to_zero() -> None:
    targets = torch.tensor([1.0, 0.5, 0.5], dtype=torch.float64)
    margins = torch.tensor([0.3, 1.2, -0.7], dtype=torch.float64, requires_grad=True)
    torch.autograd.backward(preference_loss(margins, targets).sum())
    assert margins.grad is not None
    for i in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[i] = 1e-5
        with torch.no_grad():
            up, down = (preference_loss(margins + s * step, targets).sum() for s in (1, -1))
        assert margins.grad[i].item() == pytest.approx(float(up - down) / 2e-5, abs=1e-8)
    assert margins.grad[1] > 0 > margins.grad[2]


def test_a_planted_preference_is_learnt_centred_and_loads_again(
    planted: Planted, tmp_path: Path
) -> None:
    heard: list[Any] = []
    report = train(planted, tmp_path / "rm", report=heard.append)
    assert report.accuracy > 0.9
    assert report.interval[0] < report.accuracy <= report.interval[1]
    assert report.accuracy > highest_floor(report.floors) + 0.2
    assert report.n == 80
    assert (report.train_accuracy or 0.0) > 0.9
    assert report.loss_curve[-1][1] < 0.3 < report.loss_curve[0][1]
    assert heard[-1]["step"] == heard[-1]["of"] == 60
    reward = load_reward_model(tmp_path / "rm", device="cpu")
    assert statistics.fmean(reward(planted.centre)) == pytest.approx(0, abs=1e-4)
    assert statistics.pstdev(reward(planted.centre)) == pytest.approx(
        report.score_deviation, abs=1e-4
    )
    chosen = reward([RewardInput(p.prompt, p.chosen) for p in planted.test])
    rejected = reward([RewardInput(p.prompt, p.rejected) for p in planted.test])
    right = [c > r for c, r in zip(chosen, rejected, strict=True)]
    assert statistics.fmean(right) == report.accuracy
    assert reward.calibration.probability(0) == 0.5
    sure = report.lapse / 2 + (1 - report.lapse) / (1 + math.e**-1)
    assert reward.calibration.probability(report.temperature) == pytest.approx(sure)
    saved = read_json(tmp_path / "rm" / "report.json")
    assert saved["accuracy"] == report.accuracy
    for plot in ("loss.png", "reliability.png", "margins.png"):
        assert (tmp_path / "rm" / plot).read_bytes().startswith(b"\x89PNG")
    kinds = {Path(name).suffix for name in folder_sha256(tmp_path / "rm")}
    assert kinds == {".json", ".safetensors", ".png", ".jinja"}


def test_a_head_on_frozen_features_learns_it_too_and_leaves_the_trunk_alone(
    planted: Planted, tmp_path: Path
) -> None:
    report = train(planted, tmp_path / "rm", freeze_trunk=True)
    assert report.accuracy > 0.9
    assert report.freeze_trunk
    fresh, _ = new_reward_model(planted.base, seed=0, device="cpu")
    reward = load_reward_model(tmp_path / "rm", device="cpu")
    for kept, original in zip(
        reward.model.trunk.parameters(), fresh.trunk.parameters(), strict=True
    ):
        assert torch.equal(kept, original)
    assert reward.model.reads == "mean"
    assert statistics.fmean(as_reward(tmp_path / "rm")(planted.centre)) == pytest.approx(
        0, abs=1e-4
    )


def test_the_same_seed_gives_the_same_model_and_another_another(
    planted: Planted, tmp_path: Path
) -> None:
    versions = []
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        train(planted, tmp_path / name, train=planted.train[:40], epochs=1, seed=seed)
        versions.append(load_reward_model(tmp_path / name).version)
    assert versions[0] == versions[1] != versions[2]


def test_swapping_chosen_and_rejected_flips_the_margins(planted: Planted) -> None:
    model, tokenizer = new_reward_model(planted.base, seed=0, device="cpu")
    limits = Limits(32, 40)
    pairs = planted.test[:20]
    swapped = [replace(p, chosen=p.rejected, rejected=p.chosen) for p in pairs]

    def margins_of(pairs: Sequence[PreferencePair]) -> list[float]:
        encoded = encode_pairs(tokenizer, pairs, limits)
        sides = (score_rows(model, encoded.chosen), score_rows(model, encoded.rejected))
        return [chosen - rejected for chosen, rejected in zip(*sides, strict=True)]

    margins, flipped = margins_of(pairs), margins_of(swapped)
    assert margins == pytest.approx([-m for m in flipped], abs=1e-6)
    assert max(map(abs, margins)) > 1e-3


def test_how_a_minibatch_is_split_does_not_change_its_gradient(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient_and_loss() -> tuple[list[torch.Tensor], float]:
        model, tokenizer = new_reward_model(planted.base, seed=0, device="cpu")
        pairs = encode_pairs(tokenizer, planted.train[:12], Limits(32, 40))
        loss, margins = tuning.backward(model, pairs, range(12))
        assert sorted(margins) == list(range(12))
        return [p.grad for p in model.parameters() if p.grad is not None], loss

    whole, loss = gradient_and_loss()
    monkeypatch.setattr(tuning, "tokens_at_once", lambda device: 150)
    pieces, same_loss = gradient_and_loss()
    assert loss == pytest.approx(same_loss, abs=1e-6)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)


def test_the_heads_newton_fit_is_where_the_gradient_vanishes() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    y = torch.where(torch.rand(50, generator=generator) < 0.2, 0.5, 1.0).double()
    weight, curve = logistic(x, y, ridge=2.0)
    weight = weight.requires_grad_()
    objective = preference_loss(x @ weight, y).sum() + weight.square().sum()
    (gradient,) = torch.autograd.grad(objective, weight)
    assert float(gradient.abs().max()) < 1e-5
    assert curve[-1][1] < math.log(2)


def test_ties_are_counted_and_trained_towards_no_margin(planted: Planted, tmp_path: Path) -> None:
    ties = [replace(p, tie=True) for p in planted.train]
    report = train(planted, tmp_path / "rm", train=[*ties, planted.train[0]], freeze_trunk=True)
    assert report.ties == 240
    assert report.pairs == 241
    decided = train(planted, tmp_path / "decided", freeze_trunk=True)
    assert report.score_deviation < decided.score_deviation / 3


def test_calibration_is_judged_on_prompts_that_did_not_fit_it(planted: Planted) -> None:
    pairs = [replace(p, prompt=planted.test[i // 4].prompt) for i, p in enumerate(planted.test)]
    fitting, judging = halves(pairs)
    assert sorted([*fitting, *judging]) == list(range(80))
    assert abs(len(fitting) - len(judging)) <= 4
    assert not {pairs[i].prompt for i in fitting} & {pairs[i].prompt for i in judging}
    one_prompt = [replace(p, prompt=planted.test[0].prompt) for p in planted.test[:4]]
    assert [len(half) for half in halves(one_prompt)] == [2, 2]


def test_what_cannot_teach_or_judge_is_refused(planted: Planted, tmp_path: Path) -> None:
    pairs, test = list(planted.train[:30]), list(planted.test)

    def refused(kind: type[Exception], message: str, **changes: Any) -> None:
        with pytest.raises(kind, match=message):
            train(planted, tmp_path / "rm", **changes)

    refused(
        NotEnoughData, "needs 40 preference pairs, found 30; collect 10", train=pairs, min_pairs=40
    )
    refused(NotEnoughData, "found 30 ties only", train=[replace(p, tie=True) for p in pairs])
    refused(
        NotEnoughData,
        r"held-out prompts \(a tie is none\), found 0, or",
        test=[replace(p, both_bad=True) for p in test],
    )
    rated = [
        RewardExample(str(i), p.prompt, p.chosen, FeedbackKind.thumbs, 1.0, None, p.voter, "train")
        for i, p in enumerate(pairs)
    ]
    thumbs = {"train": pairs, "kinds": {"thumbs": 1.0}, "min_pairs": 20}
    refused(NotEnoughData, "20 votes of the kinds thumbs, found 0; collect 20", **thumbs)
    thumbs["examples"] = rated
    refused(NotEnoughData, "that tell completions apart, found 30 that all say the same", **thumbs)
    one_prompt: Sequence[PreferencePair] = [replace(p, prompt=pairs[0].prompt) for p in pairs]
    refused(NotEnoughData, "found one prompt only", train=one_prompt)
    seen = planted.train[0]
    more = (*seen.prompt, Message("assistant", seen.chosen), Message("user", "And then?"))
    for pair in (seen, replace(seen, prompt=more)):  # a later turn holds what was trained on
        refused(TrainingError, "found 1 of 81 of training's; split by", test=[*test, pair])
    refused(NotEnoughData, "centring needs", centre=[])
    same = [*pairs, replace(pairs[0], rejected=pairs[0].chosen)]
    refused(TrainingError, "same one twice in pair pair 0", train=same)
    refused(TrainingError, "must stay finite", learning_rate=1e30)
    assert not (tmp_path / "rm").exists()


def test_damaged_features_are_refused(planted: Planted) -> None:
    model, tokenizer = new_reward_model(planted.base, seed=0, reads="mean", device="cpu")
    with torch.no_grad():
        next(model.trunk.parameters()).fill_(float("nan"))
    pairs = encode_pairs(tokenizer, planted.train[:20], Limits(32, 40))
    with pytest.raises(TrainingError, match="features must be finite"):
        fit_head(model, pairs, ["0"] * 20, report=lambda facts: None)


def test_a_correction_goes_without_likelihoods(planted: Planted) -> None:
    pair = replace(planted.train[0], corrected=True)
    _, tokenizer = new_reward_model(planted.base, seed=0, device="cpu")
    encoded = encode_pairs(tokenizer, [pair, planted.train[1]], Limits(32, 40))
    assert [row.sampled for row in encoded.chosen] == [False, True]
    assert [row.sampled for row in encoded.rejected] == [False, True]


def test_minibatches_hold_every_pair_once_and_those_of_like_length_together() -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(1, 400) for _ in range(500)]
    batches = tuning.like_length(lengths, 8, rng)
    assert sorted(i for batch in batches for i in batch) == list(range(500))
    assert all(len(batch) <= 8 for batch in batches)

    def padded(batches: list[list[int]]) -> int:
        return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)

    random_ones = [list(range(i, min(i + 8, 500))) for i in range(0, 500, 8)]
    assert sum(lengths) <= padded(batches) < 1.15 * sum(lengths) < padded(random_ones)
    assert batches != tuning.like_length(lengths, 8, rng)  # another epoch, another order
