"""Rollouts that are trained on again: what is made anew for them, and what stays."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.ppo.checkpoint import latest_checkpoint
from rlhf_pipeline.ppo.collecting import encode_checked, sample_for
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.measuring import make_rollouts
from rlhf_pipeline.ppo.optimising import accumulate_gradients, train_on
from rlhf_pipeline.ppo.replay import Collected, Replay, join
from rlhf_pipeline.ppo.rollout import Rollouts, Tokens
from tests.ppo.world import PROMPTS, changed, learner_at, train

MASK = torch.tensor([[True, True], [True, False]])


def collected(fill: int, *, width: int = 2, support: bool = False) -> Collected:
    """Return two rollouts, the second of which is the first one's next turn."""
    wide = torch.nn.functional.pad(MASK, (0, width - 2))
    ids = torch.full((2, width), fill)
    tokens = Tokens(ids, wide.flip(1), ids, wide, ids[..., None].byte() if support else None)
    numbers = torch.full((2, width), float(fill))
    turn, next_turn = torch.tensor([0, 1]), torch.tensor([1, -1])
    return Collected(tokens, numbers, numbers + 1, torch.tensor([1.0, 2.0]), turn, next_turn)


def test_joined_rollouts_are_padded_alike_and_their_next_turns_still_theirs() -> None:
    both = join([collected(3), collected(5, width=4)])
    assert both.next_turn.tolist() == [1, -1, 3, -1]
    assert both.tokens.prompt_mask.int().tolist()[1] == [0, 0, 0, 1]
    assert both.tokens.completion_mask.int().tolist()[0] == [1, 1, 0, 0]
    assert both.logprobs[0].tolist() == [3.0, 3.0, 0.0, 0.0]
    assert both.tokens.completion_ids[2].tolist() == [5] * 4
    kept = join([collected(3, support=True), collected(5, width=3, support=True)])
    assert kept.tokens.support is not None
    assert kept.tokens.support[:, :, 0].tolist()[0] == [3, 3, 0]


def test_the_last_updates_are_kept_and_come_back_from_a_checkpoint() -> None:
    replay = Replay(2)
    for fill in (3, 4, 5):
        replay.keep(collected(fill, support=fill == 5))
    batch, ages = replay.beside(collected(9))
    assert ages.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.logprobs[:, 0].tolist() == [9, 9, 5, 5, 4, 4]
    again = Replay(2)
    again.restore(replay.tensors(), torch.device("cpu"))
    assert replay.tensors().keys() == again.tensors().keys()
    for name, tensor in replay.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name
    nothing = Replay(0)
    nothing.keep(collected(3))
    assert nothing.tensors() == {}
    assert nothing.beside(collected(3))[1].tolist() == [0, 0]


def rollouts_after_a_step(base: Path, cap: float) -> tuple[Learner, Rollouts, dict[str, float]]:
    """Return one update's rollouts beside those of an earlier one, the policy moved in between."""
    learner = learner_at(base, changed(replay_updates=1, replay_cap=cap, whiten_advantages=False))
    encoded = encode_checked(learner.policy, PROMPTS, learner.settings, "prompts")
    replay, generator = Replay(1), torch.Generator().manual_seed(0)
    scores = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    make_rollouts(learner, sample_for(learner, encoded, generator), scores, 0.5, replay=replay)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(3)
        for weight in learner.policy.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * 0.03)
    sampled = sample_for(learner, encoded, generator)
    rollouts, facts = make_rollouts(learner, sampled, scores, 0.5, replay=replay)
    assert torch.equal(replay.earlier[0].logprobs, sampled.logprobs)  # the older ones have left
    return learner, rollouts, facts


def test_replayed_tokens_are_held_against_the_policy_of_today_and_weighted(base: Path) -> None:
    learner, rollouts, facts = rollouts_after_a_step(base, cap=1.1)
    assert len(rollouts) == 12
    with torch.no_grad():
        now, values = learner.logprobs_and_values(rollouts.tokens)
    mask = rollouts.tokens.completion_mask
    assert values is not None
    assert torch.allclose(rollouts.logprobs, now, atol=1e-5)
    assert torch.allclose(rollouts.values[mask], values[mask], atol=1e-5)
    assert rollouts.weights is not None
    assert torch.equal(rollouts.weights[:6], mask[:6].float())
    # The base policy sampled the old ones: it is the reference, whose log-probabilities are kept.
    sampling = rollouts.reference_logprobs[6:]
    expected = (now[6:] - sampling).exp().clamp(max=1.1) * mask[6:]
    assert torch.allclose(rollouts.weights[6:], expected, atol=1e-4)
    old = mask[6:]
    gap = (now[6:] - sampling)[old]
    assert facts["replay/share"] == 0.5
    assert facts["replay/staleness"] == 1
    assert facts["policy/logprob_gap"] < 1e-5
    assert facts["replay/logprob_gap"] == pytest.approx(float(gap.abs().mean()), abs=1e-4)
    assert facts["replay/weight_mean"] == pytest.approx(float(expected[old].mean()), abs=1e-4)
    capped = float((gap > math.log(1.1)).float().mean())
    assert facts["replay/capped_share"] == pytest.approx(capped)
    assert 0 < capped < 1
    # Their KL penalty is that of the policy as it is now.
    lengths = old.sum(1)
    middle = [(i, t) for i in range(6) for t in range(int(lengths[i]) - 1)]
    assert middle
    for i, t in middle:
        penalty = -0.5 * float(now[6 + i, t] - sampling[i, t])
        assert float(rollouts.rewards[6 + i, t]) == pytest.approx(penalty, abs=1e-4)
    first = accumulate_gradients(learner, rollouts, torch.arange(12))
    assert first["ratio"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("updates", [0, 1])
def test_replayed_rollouts_do_not_hide_that_another_policy_sampled_the_fresh_ones(
    base: Path, updates: int
) -> None:
    """Of a minibatch with replayed tokens the mean |log ratio| is too small: theirs is 0."""
    learner = learner_at(base, changed(replay_updates=updates, minibatches=1))
    encoded = encode_checked(learner.policy, PROMPTS, learner.settings, "prompts")
    replay, generator = Replay(updates), torch.Generator().manual_seed(0)
    scores = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    late = sample_for(learner, encoded, generator)  # as of an engine that missed the new weights
    make_rollouts(learner, late, scores, 0.5, replay=replay)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(3)
        for weight in learner.policy.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * 0.03)
        now = learner.logprobs_and_values(late.tokens)[0]
    said = late.tokens.completion_mask
    gap = float((now - late.logprobs)[said].abs().mean())
    learner.settings = replace(learner.settings, ratio_tolerance=gap * 0.9)
    with pytest.raises(TrainingError, match=rf"mean \|log ratio\| .* found {gap:.4g}"):
        train_on(learner, make_rollouts(learner, late, scores, 0.5, replay=replay)[0], generator)


def test_facts_of_the_rollouts_are_of_the_fresh_ones_alone(base: Path) -> None:
    _, rollouts, facts = rollouts_after_a_step(base, cap=1.0)
    mask = rollouts.tokens.completion_mask[:6]
    assert facts["rollout/length_mean"] == pytest.approx(float(mask.sum(1).float().mean()))
    assert facts["rollout/entropy"] == pytest.approx(
        -float(rollouts.logprobs[:6][mask].mean()), abs=1e-5
    )
    assert rollouts.weights is not None
    assert float(rollouts.weights.max()) <= 1


def test_replay_is_off_unless_asked_for_and_says_in_the_metrics_what_it_does(
    base: Path, tmp_path: Path
) -> None:
    off = train(base, tmp_path / "off", changed(updates=1))
    assert not any(name.startswith("replay/") for name in off.history[0])
    on = train(base, tmp_path / "on", changed(updates=3, replay_updates=2))
    staleness = [row.get("replay/staleness") for row in on.history]
    assert staleness == [None, 1.0, 1.5]
    assert [row.get("replay/share") for row in on.history] == [None, 0.5, pytest.approx(2 / 3)]
    assert all(row["policy/first_ratio"] == pytest.approx(1, abs=1e-4) for row in on.history)
    assert on.training_steps == 3 * 2 * 2
    saved = latest_checkpoint(tmp_path / "on/checkpoints")
    assert saved is not None
    assert {name.partition("/")[0] for name in saved.tensors["replay"]} == {"0", "1"}
