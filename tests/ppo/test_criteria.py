"""The critic's criteria heads: what they learn, that they disturb nothing, what is read of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlhf_pipeline.cli import app
from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.policy.chat import encode_completion, encode_prompt
from rlhf_pipeline.policy.loading import load_policy
from rlhf_pipeline.ppo.breakdown import load_critic
from rlhf_pipeline.ppo.checkpoint import checkpoint_at
from rlhf_pipeline.ppo.criteria import CriteriaHeads, Noting, noting
from rlhf_pipeline.ppo.processes import ALONE
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.records import RewardInput
from rlhf_pipeline.reward.composite import CompositeReward, Term
from tests.ppo.world import PROMPTS, changed, lower_share, train, weights_of

UPDATES = 2
SETTINGS = changed(
    updates=UPDATES,
    rollouts_per_update=72,
    epochs=1,
    minibatches=1,
    evaluate_every=UPDATES,
    checkpoint_every=UPDATES,
    tokens_per_microbatch=1000,
)
SHORT, LONG = PROMPTS[0], PROMPTS[4]


def long_question(items: Sequence[RewardInput], /) -> list[float]:
    """Say whether the question is long: what is planted for the critic to find."""
    return [float(len(item.prompt[-1].content) > 6) for item in items]


def planted() -> CompositeReward:
    """Return a reward of two pieces, one of which the prompt decides."""
    return CompositeReward({"long": Term(long_question, 0.3), "lower": Term(lower_share)})


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two runs left: of a reward with pieces, and of the same without names for them."""
    folder = tmp_path_factory.mktemp("criteria")
    whole = planted()
    train(base, folder / "pieces", SETTINGS, reward=whole)
    train(base, folder / "plain", SETTINGS, reward=lambda items: whole(items))
    return folder


def test_heads_are_the_least_squares_of_what_they_saw() -> None:
    generator = torch.Generator().manual_seed(0)
    states, noise = torch.randn(2, 600, 5, generator=generator)
    targets = torch.stack([states[:, 1] - 2 * states[:, 4] + 3, noise[:, 0]], 1)
    heads = CriteriaHeads(["planted", "noise"], 5)
    for part in (slice(0, 300), slice(300, 600)):
        heads.learn(heads.sums(states[part], targets[part]))
    wanted = torch.tensor([0.0, 1, 0, 0, -2, 3])
    assert (heads.weights[:, 0].float() - wanted).abs().max() < 0.05  # the ridge's
    assert heads.weights[:-1, 1].abs().max() < 0.15  # there is nothing to find
    torch.testing.assert_close(heads(states)[:, 0], targets[:, 0], atol=0.15, rtol=0)


def test_what_was_seen_fades() -> None:
    states = torch.ones(50, 1) * torch.linspace(-1, 1, 50)[:, None]
    heads = CriteriaHeads(["turned"], 1)
    heads.learn(heads.sums(states, states))
    before = float(heads.weights[0])
    for _ in range(20):
        heads.learn(heads.sums(states, -states))
    assert before > 0.9
    assert float(heads.weights[0]) < -0.9
    kept = heads.weights
    heads.learn(heads.sums(states * math.nan, states))
    assert torch.equal(heads.weights, kept)


def test_the_critic_finds_a_planted_criterion_and_nothing_else_of_the_run_changes(
    runs: Path,
) -> None:
    pieces, plain = (TrainingResult.load(runs / n / "result.json") for n in ("pieces", "plain"))
    found = [row.get("critic/long/explained_variance") for row in pieces.history]
    assert found[0] is None  # nothing learnt yet
    assert found[-1] is not None
    assert found[-1] > 0.5
    for ours, theirs in zip(pieces.history, plain.history, strict=True):
        own = {n for n in ours if n.startswith("reward/") or n.count("/") > 1}
        assert ours.keys() - own == theirs.keys()
        for name in theirs:
            if not name.startswith(("time/", "memory/")):
                assert ours[name] == theirs[name], name
    weights = weights_of(runs / "plain/policy")
    for name, weight in weights_of(runs / "pieces/policy").items():
        assert torch.equal(weight, weights[name])
    files = {p.name for p in (runs / "plain/checkpoints").glob("*/*.safetensors")}
    assert "criteria.safetensors" not in files


def test_the_breakdown_is_read_where_the_policy_reads(runs: Path) -> None:
    run = runs / "pieces"
    critic = load_critic(run)
    items = [RewardInput(SHORT, "abc de"), RewardInput(LONG, "Z"), RewardInput(LONG, "abc de f")]
    told = critic(items)
    policy = load_policy(run / "policy")
    head = checkpoint_at(run / "checkpoints", UPDATES).tensors["critic"]
    for item, said in zip(items, told, strict=True):
        ids = encode_prompt(policy.tokenizer, item.prompt, max_tokens=99)
        start = len(ids)
        ids += encode_completion(policy.tokenizer, item.completion, max_tokens=8)
        with torch.no_grad():
            states: Any = policy.model.base_model(torch.tensor([ids])).last_hidden_state[0]
        values = states @ head["critic/head.weight"][0] + head["critic/head.bias"]
        assert said.value_before == pytest.approx(float(values[start - 1]), abs=1e-4)
        assert said.value == pytest.approx(float(values[len(ids) - 2]), abs=1e-4)
        assert list(said.criteria) == ["long", "lower"]
    assert told[0].criteria_before["long"] < 0.5 < told[1].criteria_before["long"]
    assert told[1].criteria_before == pytest.approx(told[2].criteria_before, abs=1e-4)
    assert told[1].criteria != told[2].criteria
    assert critic([]) == []


def test_pieces_that_nobody_gave_teach_nothing() -> None:
    class Skips(CompositeReward):
        def scores_and_pieces(
            self, items: Sequence[RewardInput]
        ) -> tuple[list[float], list[dict[str, float]]]:
            scores, pieces = super().scores_and_pieces(items)
            skipped = [item.completion == "no" for item in items]
            return scores, [{} if s else p for s, p in zip(skipped, pieces, strict=True)]

    reward = Noting(Skips({"long": Term(long_question), "lower": Term(lower_share)}))
    assert reward([RewardInput(LONG, "aB"), RewardInput(SHORT, "no")]) == [1.5, 1.0]
    asked = [SHORT, LONG, SHORT]
    found = reward.take(asked, ["no", "aB", "never asked"], ALONE)
    assert found[1].tolist() == [1.0, 0.5]
    assert bool(found[[0, 2]].isnan().all())
    assert bool(reward.take(asked, ["no", "aB", "x"], ALONE).isnan().all())  # forgotten
    assert noting(lower_share, has_critic=True) is None
    assert noting(planted(), has_critic=False) is None


def test_a_run_without_a_critic_to_read_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"found no result\.json"):
        load_critic(tmp_path)
    result = TrainingResult.load(runs / "pieces/result.json")
    for changes, message in (
        ({"estimator": "rloo", "completions_per_prompt": 2}, "found estimator rloo"),
        ({"critic": "separate", "lora_rank": 2}, "found adapters"),
    ):
        settings = {**result.settings, **changes}
        replace(result, settings=settings).save(tmp_path / "result.json")
        with pytest.raises(ModelError, match=message):
            load_critic(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(runs / "pieces", run)
    replace(result, chosen_update=0).save(run / "result.json")
    with pytest.raises(ModelError, match=r"found update 0 kept, .* had learned nothing"):
        load_critic(run)


def test_a_run_whose_checkpoints_retention_let_go_is_refused(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "pieces", run, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(ModelError, match=r"retention\.checkpoints .*: take a newer run"):
        load_critic(run)


def test_score_shows_the_critic_beside_the_reward(runs: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps({"prompt": LONG[-1].content, "completion": "abc"}) + "\n")
    words = ["score", str(file), "--reward", "length", "--out", str(out)]
    done = CliRunner().invoke(app, [*words, "--critic", str(runs / "pieces")])
    assert done.exit_code == 0, done.output
    line = json.loads(out.read_text())
    (said,) = load_critic(runs / "pieces")([RewardInput(LONG, "abc")])
    assert line["critic"]["criteria"] == said.criteria
    assert line["critic"]["value"] == said.value
    again = CliRunner().invoke(app, words)  # without the critic: other lines, not mixed in
    assert again.exit_code == 1
    assert "same completions" in " ".join(again.output.split())
