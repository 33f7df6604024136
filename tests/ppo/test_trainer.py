"""One update taken apart, and the loop as a whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.errors import ClaimLost, ConfigError, TrainingError
from rlhf_pipeline.policy.chat import decode_completions
from rlhf_pipeline.policy.loading import Policy, load_policy
from rlhf_pipeline.policy.sampling import output_head, unpack_bits
from rlhf_pipeline.ppo import checkpoint, updating
from rlhf_pipeline.ppo.collecting import encode_checked, next_prompts, sample_for, shape_scores
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.measuring import make_rollouts
from rlhf_pipeline.ppo.optimising import (
    accumulate_gradients,
    check_first_ratio,
    clipped_step,
    train_on,
)
from rlhf_pipeline.ppo.result import Evaluation, TrainingResult
from rlhf_pipeline.ppo.rollout import Rollouts, sample_completions
from rlhf_pipeline.ppo.settings import LEAST_TEMPERATURE
from rlhf_pipeline.ppo.state import Progressed
from rlhf_pipeline.ppo.watching import choose_update, reason_to_stop, updates_by_preference
from rlhf_pipeline.records import Prompt, RewardInput, ScoreMoments, user_prompt
from rlhf_pipeline.reward.composite import CompositeReward, Term
from rlhf_pipeline.reward.settings import Stepped
from tests.ppo.test_advantages import slow_advantages
from tests.ppo.test_learner import wider
from tests.ppo.world import (
    PROMPTS,
    SETTINGS,
    changed,
    learner_at,
    lower_share,
    rollouts_of,
    train,
    two_pieces,
    weights_of,
)


def moved_learner(base: Path, **changes: Any) -> Learner:
    """Return a learner whose policy has left the reference."""
    learner = learner_at(base, changed(**changes))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in learner.policy.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.03)
    return learner


def gradients(learner: Learner, rollouts: Rollouts) -> tuple[list[Tensor], dict[str, float]]:
    """Return the gradient of all rollouts as one minibatch, and its facts."""
    learner.optimizer.zero_grad()
    facts = accumulate_gradients(learner, rollouts, torch.arange(len(rollouts)))
    grads = [w.grad.clone() for w in learner.trainable().values() if w.grad is not None]
    assert len(grads) == len(learner.trainable())
    return grads, facts


# --- one update --------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rollouts_agree_with_a_loop_that_knows_nothing_of_tensors(
    base: Path, estimator: str
) -> None:
    learner = moved_learner(
        base, gamma=0.9, gae_lambda=0.7, kl_estimator=estimator, whiten_advantages=False
    )
    rollouts = rollouts_of(learner, kl_coef=0.5)
    tokens, eos = rollouts.tokens, learner.policy.eos_id
    rewards = torch.zeros_like(rollouts.rewards)
    ended = 0
    for i in range(len(rollouts)):
        length = int(tokens.completion_mask[i].sum())
        ids = tokens.completion_ids[i, :length].tolist()
        for t in range(length):
            d = float(rollouts.logprobs[i, t]) - float(rollouts.reference_logprobs[i, t])
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
            rewards[i, t] = -0.5 * kl
        text = decode_completions(learner.policy.tokenizer, [ids])[0]
        score = lower_share([RewardInput(PROMPTS[0], text)])[0] if ids[-1] == eos else -1.0
        ended += ids[-1] == eos
        rewards[i, length - 1] += score
    assert 0 < ended < len(rollouts)  # both kinds are here
    assert torch.allclose(rollouts.rewards, rewards, atol=1e-5)
    advantages = slow_advantages(rewards, rollouts.values, tokens.completion_mask, 0.9, 0.7)
    assert torch.allclose(rollouts.advantages, advantages, atol=1e-5)
    returns = (advantages + rollouts.values).masked_fill(~tokens.completion_mask, 0.0)
    assert torch.allclose(rollouts.returns, returns, atol=1e-5)
    with torch.no_grad():
        values = learner.values(tokens)
    assert torch.allclose(
        rollouts.values, values.masked_fill(~tokens.completion_mask, 0.0), atol=1e-5
    )


def test_advantages_are_whitened_over_completion_tokens(base: Path) -> None:
    rollouts = rollouts_of(moved_learner(base))
    counted = rollouts.advantages[rollouts.tokens.completion_mask]
    assert float(counted.mean()) == pytest.approx(0, abs=1e-5)
    assert float(counted.var(correction=0)) == pytest.approx(1, abs=1e-3)


def test_whitened_rewards_have_unit_variance_and_keep_their_signs(base: Path) -> None:
    plain = rollouts_of(moved_learner(base)).rewards
    rollouts = rollouts_of(moved_learner(base, whiten_rewards=True))
    counted = rollouts.rewards[rollouts.tokens.completion_mask]
    assert float(counted.var(correction=0)) == pytest.approx(1, abs=1e-3)
    assert torch.equal(rollouts.rewards.sign(), plain.sign())


def test_rloo_needs_no_values_and_compares_completions_of_one_prompt(base: Path) -> None:
    learner = moved_learner(
        base, estimator="rloo", completions_per_prompt=3, whiten_advantages=False
    )
    assert learner.critic is None
    rollouts = rollouts_of(learner)
    tokens = rollouts.tokens
    for i in (0, 3, 6, 9):
        assert torch.equal(tokens.prompt_ids[i], tokens.prompt_ids[i + 1])
        assert torch.equal(tokens.prompt_ids[i], tokens.prompt_ids[i + 2])
    totals = rollouts.rewards.sum(1).tolist()
    for i, total in enumerate(totals):
        first = i // 3 * 3
        siblings = [totals[j] for j in range(first, first + 3) if j != i]
        expected = total - sum(siblings) / 2
        assert float(rollouts.advantages[i, 0]) == pytest.approx(expected, abs=1e-5)


def test_where_sampling_and_training_differ_tokens_are_weighted_up_to_the_cap(base: Path) -> None:
    learner = moved_learner(base, importance_cap=1.5)
    encoded = encode_checked(learner.policy, PROMPTS, learner.settings, "prompts")
    sampled = sample_for(learner, encoded, torch.Generator().manual_seed(0))
    mask = sampled.tokens.completion_mask
    exact, facts = make_rollouts(learner, sampled, [0.0] * 6, 0.05)
    assert exact.weights is not None
    assert torch.allclose(exact.weights, mask.float(), atol=1e-4)
    assert facts["policy/logprob_gap"] < 1e-5
    off = replace(sampled, logprobs=sampled.logprobs - 0.2)  # sampling thought them less likely
    off.logprobs[0] -= 9.0
    rollouts, facts = make_rollouts(learner, off, [0.0] * 6, 0.05)
    assert rollouts.weights is not None
    assert torch.allclose(rollouts.logprobs, exact.logprobs)
    assert torch.allclose(rollouts.weights[0], 1.5 * mask[0], atol=1e-4)
    assert torch.allclose(rollouts.weights[1:], math.exp(0.2) * mask[1:], atol=1e-4)
    assert facts["policy/logprob_gap"] > 0.2


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_gradient_is_the_same_for_any_microbatches_and_padding(base: Path, critic: str) -> None:
    learner = moved_learner(base, critic=critic, tokens_per_microbatch=10**6)
    rollouts = rollouts_of(learner)
    whole, facts = gradients(learner, rollouts)
    T = rollouts.rewards.shape[1]
    padded = Rollouts(
        wider(rollouts.tokens, left=2, right=3, filling=9),
        *(
            torch.nn.functional.pad(x, (0, 3), value=math.nan).masked_fill(
                ~torch.nn.functional.pad(rollouts.tokens.completion_mask, (0, 3)), math.nan
            )
            for x in (
                rollouts.logprobs,
                rollouts.reference_logprobs,
                rollouts.values,
                rollouts.rewards,
                rollouts.advantages,
                rollouts.returns,
            )
        ),
    )
    assert padded.rewards.shape[1] == T + 3
    for budget, same in ((10**6, padded), (40, rollouts), (120, padded)):
        learner.settings = replace(learner.settings, tokens_per_microbatch=budget)
        parts, part_facts = gradients(learner, same)
        for one, other in zip(whole, parts, strict=True):
            assert torch.allclose(one, other, atol=2e-6, rtol=1e-4)
        assert part_facts == pytest.approx(facts, abs=1e-5)


@pytest.mark.parametrize("positions", ["base", "absolute"])
def test_on_the_first_minibatch_the_ratio_is_one(
    request: pytest.FixtureRequest, positions: str
) -> None:
    learner = moved_learner(request.getfixturevalue(positions))
    _, facts = gradients(learner, rollouts_of(learner))
    assert facts["ratio"] == pytest.approx(1, abs=1e-5)
    assert facts["abs_log_ratio"] < 1e-5
    assert facts["policy/approx_kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("narrowing", [{"top_k": 5}, {"top_p": 0.8}])
def test_a_narrowed_draw_has_one_support_in_sampling_reference_and_training(
    base: Path, narrowing: dict[str, Any]
) -> None:
    learner = moved_learner(base, temperature=1.0, **narrowing)
    rollouts = rollouts_of(learner)
    tokens = rollouts.tokens
    assert tokens.support is not None
    _, facts = gradients(learner, rollouts)
    assert facts["abs_log_ratio"] < 1e-5
    reference = learner_at(base).policy.model
    V = reference.config.vocab_size
    for i in range(3):
        prompt = tokens.prompt_ids[i][tokens.prompt_mask[i]]
        ids = tokens.completion_ids[i][tokens.completion_mask[i]]
        with torch.no_grad():
            logits = reference(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        within = unpack_bits(tokens.support[i, : len(ids)], V)
        assert 1 < int(within.sum(1).max()) < V
        logprobs = logits.masked_fill(~within, -math.inf).log_softmax(-1)
        expected = logprobs.gather(1, ids[:, None])[:, 0]
        assert torch.allclose(rollouts.reference_logprobs[i, : len(ids)], expected, atol=1e-4)
    # The policy moves, and tokens that today's own top_k would not reach stay finite.
    trained = train_on(learner, rollouts, torch.Generator().manual_seed(0))
    assert all(math.isfinite(x) for x in trained.values())
    assert trained["policy/last_approx_kl"] > 1e-5


def test_a_first_ratio_that_is_not_one_stops_training(base: Path) -> None:
    check_first_ratio(0.01, 0.001, 0.05)
    for gap in (0.2, math.nan):
        with pytest.raises(TrainingError, match="look at dropout, temperature, padding"):
            check_first_ratio(gap, 0.0, 0.05)
    learner = learner_at(base)
    rollouts = rollouts_of(learner)
    for weight in learner.policy.model.parameters():
        weight.data.mul_(1.2)
    with pytest.raises(TrainingError, match="must be the one that sampled"):
        train_on(learner, rollouts, torch.Generator().manual_seed(0))


def test_later_minibatches_are_held_against_the_policy_that_sampled(base: Path) -> None:
    learner = moved_learner(base, epochs=3, value_coef=0.0)
    rollouts = rollouts_of(learner)
    old = rollouts.logprobs.clone()
    facts = train_on(learner, rollouts, torch.Generator().manual_seed(0))
    assert torch.equal(rollouts.logprobs, old)
    assert facts["policy/last_approx_kl"] > 1e-4
    with torch.no_grad():
        now, _ = learner.logprobs_and_values(rollouts.tokens)
    moved = (now - old)[rollouts.tokens.completion_mask].abs().mean()
    assert float(moved) > 0.01


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 3), (3, 4)])
def test_every_epoch_takes_one_optimizer_step_per_minibatch(
    base: Path, epochs: int, minibatches: int
) -> None:
    learner = moved_learner(base, epochs=epochs, minibatches=minibatches)
    train_on(learner, rollouts_of(learner), torch.Generator().manual_seed(0))
    steps = {int(s["step"]) for s in learner.optimizer.state.values()}
    assert steps == {epochs * minibatches}


def test_gradients_are_really_clipped(base: Path) -> None:
    learner = moved_learner(base, max_grad_norm=0.01)
    _, _ = gradients(learner, rollouts_of(learner))
    taken: list[Tensor] = []
    step = learner.optimizer.step

    def spy(*args: Any) -> Any:
        taken.extend(w.grad.clone() for w in learner.trainable().values() if w.grad is not None)
        return step(*args)

    learner.optimizer.step = spy  # type: ignore[assignment]  # to see what is stepped with
    before = clipped_step(learner)
    assert before > 0.05
    total = math.sqrt(sum(float(g.square().sum()) for g in taken))
    assert total == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_clipped_to_almost_nothing_moves_almost_nothing(base: Path) -> None:
    learner = moved_learner(base, max_grad_norm=1e-9)
    rollouts = rollouts_of(learner)
    before = {n: w.detach().clone() for n, w in learner.trainable().items()}
    train_on(learner, rollouts, torch.Generator().manual_seed(0))
    for name, weight in learner.trainable().items():
        assert torch.allclose(weight, before[name], atol=1e-5, rtol=0)


def test_prompts_come_in_a_fresh_order_each_pass_and_none_is_left_out() -> None:
    settings = changed(rollouts_per_update=4)
    drawn = [i for u in range(6) for i in next_prompts(4 * u, settings, 8)]
    passes = [drawn[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(p) == list(range(8)) for p in passes)
    assert passes[0] != passes[1]
    siblings = next_prompts(0, changed(rollouts_per_update=8, completions_per_prompt=4), 5)
    assert siblings[:4] == [siblings[0]] * 4


def test_scores_are_normalised_over_all_so_far_and_then_clipped() -> None:
    moments = ScoreMoments()
    settings = changed(score_normalisation="running", score_clip=1.2)
    assert shape_scores([1.0, 3.0], moments, settings) == [-1.0, 1.0]
    assert shape_scores([9.0], moments, settings) == [1.2]
    assert moments.count == 3
    assert shape_scores([9.0], ScoreMoments(), changed()) == [9.0]


# --- the loop ----------------------------------------------------------------------------------


def test_training_learns_a_reward_that_is_easy_to_see(base: Path, tmp_path: Path) -> None:
    settings = changed(
        updates=14,
        rollouts_per_update=48,
        epochs=4,
        learning_rate=1e-2,
        kl_coef=0.01,
        temperature=1.0,
        missing_eos_score=None,
        evaluate_every=7,
        checkpoint_every=14,
        tokens_per_microbatch=4096,
    )
    result = train(base, tmp_path, settings)
    first, last = result.evaluations[0], result.evaluations[-1]
    assert result.chosen_update == 14
    assert last.score_mean > first.score_mean + 0.2
    # Four deviations of what chance alone does; ten seeds gained 0.5 to 1.5.
    assert sum(result.reward_history[-3:]) > sum(result.reward_history[:3]) + 0.3
    assert last.kl > 1
    assert abs(first.kl) < 1e-4
    assert result.final_reward_mean == last.score_mean


def test_a_short_run_keeps_its_promises(base: Path, tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    settings = changed(updates=3, evaluate_every=2, minibatches=3, kl_controller="adaptive")
    result = train(
        base, tmp_path, settings, draws=True, report=lambda facts: heard.append(dict(facts))
    )
    assert TrainingResult.load(tmp_path / "result.json") == result
    assert result.training_steps == 3 * 2 * 3
    saved = checkpoint.latest_checkpoint(tmp_path / "checkpoints")
    assert saved is not None
    steps = {int(t) for n, t in saved.tensors["optimizer"].items() if n.endswith("/step")}
    assert steps == {18}
    for metrics in result.history:
        assert metrics["policy/first_ratio"] == pytest.approx(1, abs=1e-4)
        assert metrics["policy/logprob_gap"] < 1e-4
        assert metrics["policy/last_approx_kl"] > 1e-5
    assert result.history[0]["rollout/kl_mean"] == pytest.approx(0, abs=1e-5)
    assert result.kl_history[-1] > 0.01
    rates = [m["train/learning_rate"] for m in result.history]
    assert rates == pytest.approx([3e-3, 2e-3, 1e-3])
    coefs = [m["train/kl_coef"] for m in result.history]
    assert coefs[1] == pytest.approx(coefs[0] * (1 - 0.2 * 12 / 10_000))
    assert [e.update for e in result.evaluations] == [0, 2, 3]
    assert result.stopped_because == "all updates are made"
    assert result.updates == 3
    updates = [f for f in heard if "rollout/score_mean" in f]
    assert [f["update"] for f in updates] == [1, 2, 3]
    names = {"checkpoints", "policy", "plots", "result.json", "samples.jsonl"}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert result.plots == ("plots/training.png", "plots/over_optimisation.png")
    assert all((tmp_path / p).stat().st_size > 10_000 for p in result.plots)
    trained = load_policy(result.model_path)
    assert trained.context_length == 64
    assert not torch.equal(
        weights_of(base)["model.norm.weight"], weights_of(tmp_path / "policy")["model.norm.weight"]
    )


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_critic_stays_at_the_mean_of_the_returns(base: Path, critic: str) -> None:
    learner = moved_learner(base, critic=critic, gamma=0.9, whiten_advantages=False)
    encoded = encode_checked(learner.policy, PROMPTS, learner.settings, "prompts")
    sampled = sample_for(learner, encoded, torch.Generator().manual_seed(0))
    mask = sampled.tokens.completion_mask
    for level in (100.0, -30.0):  # as in the update in which a reward's weights change
        with torch.no_grad():
            before = learner.values(sampled.tokens)
        scores = [level + n for n in range(len(PROMPTS))]
        rollouts, _ = make_rollouts(learner, sampled, scores, 0.5)
        nothing = torch.zeros_like(rollouts.values)
        expected = slow_advantages(rollouts.rewards, nothing, mask, 0.9, 1.0)
        assert float(rollouts.values[mask].mean()) == pytest.approx(float(expected[mask].mean()))
        moved = rollouts.values - before
        assert float(moved[mask].abs().mean()) > 10
        assert torch.allclose(moved[mask], moved[mask][:1], atol=1e-4)  # all of them alike
        with torch.no_grad():  # and from now on
            assert torch.allclose(learner.values(sampled.tokens)[mask], rollouts.values[mask])


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_number_added_to_every_score_changes_nothing(
    base: Path, tmp_path: Path, critic: str, turns: int
) -> None:
    """Rewards of 0 to 10 train as well as those around 0: a shared trunk is not dragged along.

    In conversations, where what is still to come is less with every turn, too.
    """

    def higher(items: Sequence[RewardInput]) -> list[float]:
        return [10.0 + score for score in lower_share(items)]

    settings = changed(
        critic=critic,
        missing_eos_score=None,
        updates=3,
        max_turns=turns,
        long_prompts="keep_latest",  # else one that grows too long ends, and longer is better
    )
    talks: dict[str, Any] = {"user": says_why} if turns > 1 else {}
    plain = train(base, tmp_path / "plain", settings, **talks)
    raised = train(base, tmp_path / "raised", settings, reward=higher, **talks)
    lower = [score - 10.0 for score in raised.reward_history]
    assert lower == pytest.approx(plain.reward_history, abs=1e-4)
    assert raised.kl_history == pytest.approx(plain.kl_history, abs=1e-3)
    assert raised.loss_history == pytest.approx(plain.loss_history, abs=1e-3)


@pytest.mark.parametrize("replay_updates", [0, 2])
def test_a_reward_that_says_one_number_changes_nothing_when_it_steps_in(
    base: Path, tmp_path: Path, replay_updates: int
) -> None:
    """Nor beside replayed rollouts, whose scores are without it."""

    def always(items: Sequence[RewardInput]) -> list[float]:
        return [7.0 for _ in items]

    term = Term(lower_share)
    plain = CompositeReward({"lower": term, "always": Term(always, 1e-9)})
    stepped = CompositeReward({"lower": term, "always": Term(always, Stepped({0: 0.0, 2: 1.0}))})
    settings = changed(
        critic="shared", missing_eos_score=None, updates=4, replay_updates=replay_updates
    )
    usual, risen = (
        train(base, tmp_path / name, settings, reward=reward)
        for name, reward in (("usual", plain), ("risen", stepped))
    )
    scores = [a - b for a, b in zip(risen.reward_history, usual.reward_history, strict=True)]
    assert scores == pytest.approx([0, 0, 7, 7], abs=1e-4)
    assert risen.kl_history == pytest.approx(usual.kl_history, abs=1e-3)
    assert risen.loss_history == pytest.approx(usual.loss_history, abs=1e-3)


def test_the_short_trajectory_is_the_pinned_one(base: Path, tmp_path: Path) -> None:
    """Training changed if this fails: say so, with evidence that it is better, and pin again."""
    result = train(base, tmp_path, changed(updates=3, evaluate_every=3))
    assert result.reward_history == pytest.approx(PINNED_SCORES, abs=2e-3)
    assert result.kl_history == pytest.approx(PINNED_KL, abs=2e-3)
    assert result.loss_history == pytest.approx(PINNED_LOSS, abs=2e-3)


PINNED_SCORES = [0.26782, 0.16543, 0.07275]
PINNED_KL = [0.0, 1.1292, 2.35382]
PINNED_LOSS = [-0.01028, -0.03279, -0.01261]


def test_a_finished_run_answers_again_without_training(base: Path, tmp_path: Path) -> None:
    result = train(base, tmp_path)

    def must_not_run(items: Sequence[RewardInput], /) -> list[float]:
        raise AssertionError("trained again")

    assert train(base, tmp_path, reward=must_not_run) == result
    again = train(base, tmp_path, resume=False)
    assert again.reward_history == result.reward_history
    assert again.resumed_from is None


class Versioned:
    """A reward model that was trained again."""

    version = "2"

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        return lower_share(items)


def test_another_run_in_the_same_folder_is_refused_and_machine_settings_may_differ(
    base: Path, tmp_path: Path
) -> None:
    train(base, tmp_path)
    (tmp_path / "result.json").unlink()
    with pytest.raises(TrainingError, match="found those of another"):
        train(base, tmp_path, changed(gamma=0.9))
    with pytest.raises(TrainingError, match="found those of another"):
        train(base, tmp_path, reward=Versioned())
    resumed = train(base, tmp_path, changed(tokens_per_microbatch=500))
    assert resumed.resumed_from == 2


def test_a_folder_that_is_asked_in_again_with_other_settings_begins_again(
    base: Path, tmp_path: Path
) -> None:
    begun: dict[str, Any] = {"replaces_others": True}
    train(base, tmp_path / "turn", changed(updates=3), **begun)
    told: list[Mapping[str, Any]] = []
    settings = changed(updates=2, gamma=0.9)
    again = train(base, tmp_path / "turn", settings, report=told.append, **begun)
    assert told[0] == {"update": 3, "checkpoints": "those of another run make room"}
    assert again.resumed_from is None
    assert again.reward_history == train(base, tmp_path / "alone", settings).reward_history
    assert checkpoint.checkpoint_updates(tmp_path / "turn/checkpoints") == [1, 2]
    (tmp_path / "turn/result.json").unlink()
    assert train(base, tmp_path / "turn", settings, **begun).resumed_from == 2  # its own


def test_the_policy_the_stopping_reward_likes_best_comes_out(base: Path, tmp_path: Path) -> None:
    """A stopping reward that falls as the proxy rises keeps the policy training began with."""
    looks = itertools.count()

    def falling(items: Sequence[RewardInput], /) -> list[float]:
        return [-float(next(looks))] * len(items)

    result = train(base, tmp_path, changed(updates=4, patience=2), stopping=falling)
    assert result.chosen_update == 0
    assert result.updates == 2
    assert result.stopped_because == (
        "the stopping score has not risen for 2 looks; it was best after update 0"
    )
    kept = weights_of(tmp_path / "policy")
    assert all(torch.equal(w, kept[n]) for n, w in weights_of(base).items())


def test_the_best_update_in_the_middle_comes_out(base: Path, tmp_path: Path) -> None:
    answers = iter([0.0, 0.0, 1.0, 0.5, 0.2, 0.1])  # the probe, then updates 0 to 4

    def peak(items: Sequence[RewardInput], /) -> list[float]:
        return [next(answers)] * len(items)

    result = train(base, tmp_path, changed(updates=4), stopping=peak)
    assert result.chosen_update == 1
    saved = checkpoint.checkpoint_at(tmp_path / "checkpoints", 1)
    for name, weight in weights_of(tmp_path / "policy").items():
        assert torch.equal(weight, saved.tensors["policy"][f"policy/{name}"])
    assert checkpoint.checkpoint_updates(tmp_path / "checkpoints") == [1, 3, 4]


def test_if_the_best_checkpoint_is_damaged_the_next_best_comes_out(
    base: Path, tmp_path: Path
) -> None:
    train(base, tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "checkpoints/update-000002/policy.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="update 2 is damaged"):
        result = train(base, tmp_path)
    assert (result.resumed_from, result.chosen_update) == (1, 2)


def test_training_stops_when_kl_leaves_the_bound_and_keeps_a_policy_within(
    base: Path, tmp_path: Path
) -> None:
    settings = changed(updates=6, learning_rate=3e-2, max_kl=0.5)
    result = train(base, tmp_path, settings)
    assert "over 0.5 for 3 updates" in result.stopped_because
    assert result.updates < 6
    chosen = next(e for e in result.evaluations if e.update == result.chosen_update)
    assert chosen.kl <= 0.5


def test_numbers_that_are_not_finite_stop_training_before_they_reach_the_weights(
    base: Path, tmp_path: Path
) -> None:
    def huge_after(calls: int) -> Callable[[Sequence[RewardInput]], list[float]]:
        called = itertools.count(1)

        def reward(items: Sequence[RewardInput], /) -> list[float]:
            huge = next(called) > calls and len(items) == SETTINGS.rollouts_per_update
            return [float(i % 2) * (1e30 if huge else 1.0) for i in range(len(items))]

        return reward

    settings = changed(missing_eos_score=None)
    with pytest.raises(TrainingError, match="not_finite at update 1"):
        train(base, tmp_path / "at_once", settings, reward=huge_after(0))
    result = train(base, tmp_path / "later", settings, reward=huge_after(4))
    assert result.stopped_because == "the loss or its gradient is not finite"
    assert result.chosen_update == 1
    assert result.alarms[-1].name == "not_finite"
    assert all(bool(w.isfinite().all()) for w in weights_of(tmp_path / "later/policy").values())


def test_an_estimator_of_another_function_is_refused_first(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found dpo; call train_dpo"):
        train(base, tmp_path / "run", changed(estimator="dpo"))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("evaluate_every", "fails_at"), [(1, 3), (2, 4)])  # looking, or sampling
def test_a_step_after_which_the_logits_are_no_numbers_ends_with_the_best_before(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluate_every: int,
    fails_at: int,
) -> None:
    steps = itertools.count(1)

    def ruinous(learner: Learner, *rest: Any) -> dict[str, float]:
        facts = train_on(learner, *rest)
        if next(steps) == 3:
            with torch.no_grad():
                output_head(learner.policy.model).weight.fill_(math.nan)
        return facts

    monkeypatch.setattr(updating, "train_on", ruinous)
    settings = changed(updates=5, evaluate_every=evaluate_every, missing_eos_score=None)
    result = train(base, tmp_path / "run", settings)
    assert result.stopped_because == "a logit of the policy is not finite"
    assert result.chosen_update == 2
    assert (result.alarms[-1].name, result.alarms[-1].update) == ("not_finite", fails_at)
    assert all(bool(w.isfinite().all()) for w in weights_of(tmp_path / "run/policy").values())


def test_when_the_claim_is_lost_nothing_more_is_written(base: Path, tmp_path: Path) -> None:
    calls = itertools.count(1)

    def lost_at_the_fourth() -> None:
        if next(calls) >= 4:
            raise ClaimLost("a newer holder has taken over")

    with pytest.raises(ClaimLost):
        train(base, tmp_path, changed(updates=3), keep_going=lost_at_the_fourth)
    # Calls: checkpoint 0, update 1, checkpoint 1, update 2.
    assert checkpoint.checkpoint_updates(tmp_path / "checkpoints") == [0, 1]
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"critic": "separate"},
        {"estimator": "rloo", "completions_per_prompt": 2},
        {"lora_rank": 2, "critic_learning_rate": 1e-2},
        {"precision": "bfloat16", "ratio_tolerance": 0.1},
        {"score_normalisation": "running", "whiten_rewards": True, "completions_at_once": 5},
        {"importance_cap": 2.0, "max_completion_tokens": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_variant_trains(base: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    result = train(base, tmp_path, changed(updates=1, **changes))
    assert result.training_steps == 4
    assert math.isfinite(result.loss_history[0])
    assert result.chosen_update == 1


@pytest.mark.parametrize("temperature", [1e-4, LEAST_TEMPERATURE])
def test_a_batch_of_equal_completions_trains_without_numbers_that_are_not(
    base: Path, tmp_path: Path, temperature: float
) -> None:
    settings = changed(updates=1, temperature=temperature, kl_coef=0.0, ratio_tolerance=1.0)
    prompts = [user_prompt("hi")]
    result = train(base, tmp_path, settings, prompts=prompts, watch_prompts=prompts)
    assert result.history[0]["rollout/entropy"] == pytest.approx(0, abs=1e-3)
    assert all(math.isfinite(x) for x in result.history[0].values())


# --- conversations -----------------------------------------------------------------------------


def says_why(conversations: Sequence[Prompt], /) -> list[str | None]:
    return ["why" for _ in conversations]


def first_answer(items: Sequence[RewardInput], /) -> list[float]:
    """Judge a conversation by its first answer alone, which only the prompt of the last holds."""
    firsts = [next((m for m in i.prompt if m.role == "assistant"), None) for i in items]
    return lower_share(
        [
            RewardInput(i.prompt, i.completion if first is None else first.content)
            for i, first in zip(items, firsts, strict=True)
        ]
    )


TALK = {
    "max_turns": 2,
    "max_prompt_tokens": 48,
    "reward_timing": "end",
    "updates": 12,
    "rollouts_per_update": 48,
    "epochs": 4,
    "learning_rate": 1e-2,
    "kl_coef": 0.0,
    "gae_lambda": 1.0,  # an untrained critic is no help in carrying credit
    "turn_gae_lambda": 1.0,
    "value_coef": 1.0,
    "value_clip_range": 1.0,
    "max_completion_tokens": 4,
    "temperature": 1.0,
    "missing_eos_score": None,
    "evaluate_every": 6,
    "checkpoint_every": 12,
    "tokens_per_microbatch": 4096,
}
OPENINGS = [*map(user_prompt, ("hi", "tell me a tale", "why", "name a bird"))]


def test_a_reward_at_the_end_of_a_conversation_improves_its_first_turn(
    base: Path, tmp_path: Path
) -> None:
    result = train(
        base,
        tmp_path,
        changed(**TALK),
        reward=first_answer,
        user=says_why,
        prompts=OPENINGS,
        watch_prompts=OPENINGS,
    )
    first, last = result.reward_history[:3], result.reward_history[-3:]
    assert sum(last) > sum(first) + 0.6
    assert result.evaluations[-1].score_mean > result.evaluations[0].score_mean + 0.2
    assert result.history[-1]["rollout/turns_mean"] == 2
    # A sample is shown with what its conversation was given: its first turn was given nothing.
    for look in result.evaluations:
        shown = [float(sample["score"]) for sample in look.samples]
        assert sum(shown) / len(shown) == pytest.approx(look.score_mean)
    # One score a conversation: the sum over its turns is the mean of those that were judged.
    row = result.history[-1]
    assert row["rollout/conversation_score"] == pytest.approx(row["rollout/score_mean"])


@pytest.mark.slow
def test_without_credit_between_turns_the_first_turn_learns_nothing(
    base: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"reward": first_answer, "user": says_why}
    options |= {"prompts": OPENINGS, "watch_prompts": OPENINGS}
    gains = []
    for turn_gamma in (1.0, 0.0):
        settings = changed(**{**TALK, "turn_gamma": turn_gamma})
        scores = train(base, tmp_path / str(turn_gamma), settings, **options).reward_history
        gains.append(sum(scores[-3:]) - sum(scores[:3]))
    assert gains[0] > gains[1] + 0.5


def test_every_turn_may_be_judged_and_the_conversation_beside(base: Path, tmp_path: Path) -> None:
    settings = changed(updates=1, max_turns=2, max_prompt_tokens=48)
    lengths: list[int] = []

    def one_each(items: Sequence[RewardInput], /) -> list[float]:
        return [1.0 for _ in items]

    def ten_each(items: Sequence[RewardInput], /) -> list[float]:
        lengths.extend(len(item.prompt) for item in items)
        return [10.0 for _ in items]

    result = train(base, tmp_path, settings, reward=one_each, user=says_why, final_reward=ten_each)
    assert result.history[0]["rollout/conversation_score"] == 12
    assert result.history[0]["rollout/score_mean"] == 6
    assert result.history[0]["rollout/turns_mean"] == 2
    assert set(lengths[4:]) <= {3, 5}  # beyond the probe: the last turns alone


def test_another_engine_can_sample(base: Path, tmp_path: Path) -> None:
    calls: list[float] = []

    def engine(policy: Policy, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
        calls.append(options["temperature"])
        return sample_completions(policy, prompts, **options)

    result = train(base, tmp_path / "other", changed(updates=1), engine=engine)
    assert calls == [0.7] * 3  # a look, the update, a look
    assert result.reward_history == train(base, tmp_path / "own", changed(updates=1)).reward_history


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"max_turns": 2}, {}, "found ppo.max_turns 2 and no user"),
        ({}, {"user": says_why}, "found ppo.max_turns 1 and a user"),
        ({}, {"final_reward": lower_share}, "found ppo.max_turns 1 and ppo.reward_timing each"),
        (
            {"max_turns": 2, "reward_timing": "end"},
            {"user": says_why, "final_reward": lower_share},
            "ppo.max_turns 2 and ppo.reward_timing end",
        ),
    ],
)
def test_users_and_final_rewards_that_nothing_would_ask_are_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        train(base, tmp_path, changed(**changes), **options)


# --- what is refused before training -----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "at least one of prompts, found none"),
        ({"watch_prompts": []}, "at least one of watch_prompts, found none"),
        ({"prompts": [user_prompt("rain " * 40)]}, "found 1 longer"),
        ({"reward": lambda items: [math.nan] * len(items)}, "proxy reward must give finite"),
        ({"reward": lambda items: [0.5]}, "proxy reward must give one score per item"),
        ({"stopping": lambda items: []}, "stopping reward must give one score per item"),
    ],
)
def test_input_that_cannot_be_trained_on_is_refused_first(
    base: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        train(base, tmp_path, **options)
    assert not (tmp_path / "checkpoints").exists()


def test_long_prompts_lose_their_oldest_tokens_where_that_is_asked_for(
    base: Path, tmp_path: Path
) -> None:
    settings = changed(updates=1, long_prompts="keep_latest")
    assert train(base, tmp_path, settings, prompts=[user_prompt("rain " * 40)]).updates == 1


# --- choosing and stopping ---------------------------------------------------------------------


def look(
    update: int, stopping: float | None, kl: float = 1.0, repeated: float | None = None
) -> Evaluation:
    return Evaluation(update, 0.0, 1.0, stopping, kl, 5.0, 1.0, repeated)


def test_updates_are_preferred_by_stopping_score_then_earliness_within_the_bound() -> None:
    looks = [look(0, 0.1, 0.0), look(5, 0.7), look(10, 0.7), look(15, 0.9, 9.0)]
    assert updates_by_preference(looks, changed(max_kl=None)) == [15, 5, 10, 0]
    assert updates_by_preference(looks, changed(max_kl=5.0)) == [5, 10, 0, 15]
    without = [look(0, None, 0.0), look(5, None), look(10, None, 7.0)]
    assert choose_update(without, changed(max_kl=None)) == 10
    assert choose_update(without, changed(max_kl=5.0)) == 5


def test_an_update_that_repeats_itself_is_not_chosen_however_the_stopping_reward_likes_it() -> None:
    looks = [look(0, 0.1, 0.0, 0.04), look(5, 0.3, 1.0, 0.045), look(10, 0.9, 2.0, 0.06)]
    assert updates_by_preference(looks, changed(max_repetition=0.25)) == [5, 0, 10]
    assert choose_update(looks, changed(max_repetition=None)) == 10
    # Less than 2 % counts as 2 %: of a thousand 4-grams, a few more or less are chance.
    hardly = [look(0, 0.1, 0.0, 0.0), look(5, 0.3, 1.0, 0.0122), look(10, 0.4, 2.0, 0.0249)]
    assert choose_update(hardly, changed(max_repetition=0.25)) == 10
    clearly = [*hardly, look(15, 0.9, 2.0, 0.0251)]
    assert choose_update(clearly, changed(max_repetition=0.25)) == 10
    of_old = [look(0, 0.1, 0.0), look(5, 0.3)]  # nobody looked at it then
    assert choose_update(of_old, changed(max_repetition=0.25)) == 5


def test_reasons_to_stop_follow_from_the_history_alone() -> None:
    now = Progressed(kl_coef=0.1)
    assert reason_to_stop(now, SETTINGS) is None
    now.evaluations = [look(0, 0.1), look(1, 0.5), look(2, 0.4), look(3, 0.45)]
    assert reason_to_stop(now, changed(updates=9, patience=3)) is None
    stopped = reason_to_stop(now, changed(updates=9, patience=2))
    assert stopped is not None
    assert "best after update 1" in stopped
    now.history = [{"rollout/kl_per_completion": kl} for kl in (15.0, 3.0, 4.0, 4.1)]
    assert reason_to_stop(now, changed(updates=9, max_kl=3.0)) is None  # it came back in between
    now.history.append({"rollout/kl_per_completion": 4.2})
    stopped = reason_to_stop(now, changed(updates=9, max_kl=3.9))
    assert (
        stopped == "KL to the reference is 4.20 nats per completion, and was over 3.9 for 3 updates"
    )
    assert reason_to_stop(now, changed(updates=9, max_kl=4.0)) is None
    now.update = 9
    assert reason_to_stop(now, changed(updates=9)) == "all updates are made"


def test_every_look_scores_in_one_unit_though_the_reward_changes(
    base: Path, tmp_path: Path
) -> None:
    still = changed(updates=4, evaluate_every=1, learning_rate=1e-12)
    result = train(base, tmp_path, still, reward=two_pieces())
    first, *later = [look.score_mean for look in result.evaluations]
    assert len(later) == 4
    assert later == pytest.approx([first] * 4, rel=1e-3)
    weights = [update["reward/lower/weight"] for update in result.history]
    assert weights[0] > weights[-1]  # as training went it did change
