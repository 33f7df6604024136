"""Scored completions to rollouts: log-probabilities, values, rewards and advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rlhf_pipeline.ppo.advantages import (
    counted,
    estimate_turn_advantages,
    explained_variance,
    leave_one_out_advantages,
    masked_mean,
    mean_of_alike,
    scale_to_unit_variance,
    whiten,
)
from rlhf_pipeline.ppo.criteria import CriteriaHeads, criteria_facts
from rlhf_pipeline.ppo.kl import estimate_kl
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.optimising import check_first_ratio
from rlhf_pipeline.ppo.replay import Collected, Replay
from rlhf_pipeline.ppo.rollout import (
    Episodes,
    Rollouts,
    SampledCompletions,
    Tokens,
    apply_eos_trick,
    ends_with_stop_token,
    importance_weights,
    measure,
    microbatches,
    rewards_per_token,
)


def measure_together(
    learner: Learner, function: Callable[[Tokens], Tensor], tokens: Tokens
) -> Tensor:
    """Return what `measure` does, for all rollouts; each process runs its part."""
    team, budget = learner.team, learner.settings.tokens_per_microbatch
    members = torch.arange(len(tokens), device=tokens.completion_ids.device)
    mine = measure(function, tokens, token_budget=budget, members=team.part(members))
    return team.add(mine)


def values_and_criteria(
    learner: Learner, heads: CriteriaHeads, tokens: Tokens, pieces: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the values (B, T) that `measure_together` would, and what the criteria heads foretold.

    The heads then learn from the same states. `pieces` (n, K) are those of the first n rollouts;
    the others are replayed, and teach the heads nothing a second time.
    """
    team, mask = learner.team, tokens.completion_mask
    unknown = pieces.new_full((len(tokens) - len(pieces), pieces.shape[1]), math.nan)
    pieces = torch.cat([pieces, unknown]).to(mask.device, torch.float32)
    # The last column is the value, the others what is foretold.
    found = torch.zeros(*mask.shape, len(heads.names) + 1, device=mask.device)
    size = len(heads.gram)
    sums = torch.zeros(size, size + len(heads.names), dtype=torch.float64)
    members = team.part(torch.arange(len(tokens), device=mask.device))
    budget = learner.settings.tokens_per_microbatch
    for rows in microbatches(tokens, members, token_budget=budget):
        some = tokens.rows(rows)
        with torch.no_grad(), learner.autocast():
            states = learner.critic_states(some)
            values = learner.read_values(states)
        said = torch.cat([heads(states), values.float()[..., None]], 2)
        counts = some.completion_mask
        found[rows, : said.shape[1]] = said.masked_fill(~counts[..., None], 0.0)
        known = counts & pieces[rows].isfinite().all(1)[:, None]
        targets = pieces[rows][:, None].expand(*counts.shape, -1)
        sums += heads.sums(states[known], targets[known])
    found = team.add(found)
    told = criteria_facts(heads, found[..., :-1], pieces, mask)
    heads.learn(team.add(sums).cpu())
    return found[..., -1].contiguous(), told


def collect(
    learner: Learner,
    sampled: SampledCompletions,
    scores: Sequence[float],
    episodes: Episodes | None = None,
) -> Collected:
    """Return what stays true of completions: reference log-probabilities and final scores.

    `scores` are those of the completions that were judged, after shaping; the others have 0.
    Without `episodes` every completion was judged and is a conversation of its own.
    """
    settings, tokens, mask = learner.settings, sampled.tokens, sampled.tokens.completion_mask
    reference_logprobs = measure_together(learner, learner.reference_logprobs, tokens)
    all_scores = torch.tensor(scores, device=mask.device)
    turn = torch.zeros(len(tokens), dtype=torch.long, device=mask.device)
    next_turn = torch.full_like(turn, -1)
    if episodes is not None:
        judged = torch.tensor(episodes.judged, device=mask.device)
        all_scores = torch.zeros(len(tokens), device=mask.device).masked_scatter(judged, all_scores)
        turn, next_turn = turn.new_tensor(episodes.turn), turn.new_tensor(episodes.next_turn)
    ended = ends_with_stop_token(tokens, learner.policy.eos_id)
    final_scores = apply_eos_trick(all_scores, ended, settings.missing_eos_score)
    return Collected(tokens, sampled.logprobs, reference_logprobs, final_scores, turn, next_turn)


def make_rollouts(
    learner: Learner,
    sampled: SampledCompletions,
    scores: Sequence[float],
    kl_coef: float,
    *,
    episodes: Episodes | None = None,
    replay: Replay | None = None,
    pieces: Tensor | None = None,
) -> tuple[Rollouts, dict[str, float]]:
    """Return rollouts with rewards and advantages, and the facts of the rollout phase.

    The log-probabilities of sampling are the old log-probabilities: no pass recomputes them, but
    with importance_cap. Those of earlier updates in `replay`, which takes the fresh ones in, are
    held against the policy and the critic as they are now. Facts are of the fresh ones alone.
    `pieces` (B, K), NaN where unknown, are what the learner's criteria heads learn to foretell.
    The critic's values are moved to the mean of the undecayed returns, over the fresh tokens,
    wherever the scores lie. Where several turns or replayed rollouts make returns of several
    levels, each of these is in the advantages alone, and what the critic learns is without it.
    """
    settings = learner.settings
    replay = replay or Replay(0)
    fresh = collect(learner, sampled, scores, episodes)
    batch, ages = replay.beside(fresh)
    replay.keep(fresh)
    n = len(fresh)
    tokens, mask, reference_logprobs = (
        batch.tokens,
        batch.tokens.completion_mask,
        batch.reference_logprobs,
    )
    heads = learner.criteria
    told: dict[str, float] = {}
    if heads is None or pieces is None:
        values = measure_together(learner, learner.values, tokens)
    else:
        values, told = values_and_criteria(learner, heads, tokens, pieces)
    logprobs, weights, facts = old_logprobs(learner, batch, ages)
    facts |= told

    kl = estimate_kl(
        torch.where(ages[:, None] > 0, logprobs, batch.logprobs),
        reference_logprobs,
        settings.kl_estimator,
    )
    rewards = rewards_per_token(batch.scores, kl, mask, kl_coef=kl_coef)
    totals = rewards.sum(1)
    if settings.whiten_rewards:
        rewards = scale_to_unit_variance(rewards, mask)
    if settings.estimator == "gae":
        estimate = partial(
            estimate_turn_advantages,
            rewards,
            completion_mask=mask,
            turn=batch.turn,
            next_turn=batch.next_turn,
            gamma=settings.gamma,
            turn_gamma=settings.turn_gamma,
        )
        above, _ = estimate(values=values, gae_lambda=1.0, turn_gae_lambda=1.0)
        gap = masked_mean(above[:n], mask[:n])
        learner.raise_values(gap)
        values = counted(values + gap, mask)
        alike = ages * (1 + batch.turn.max()) + batch.turn
        level = mean_of_alike(above - gap, mask, alike)
        advantages, returns = estimate(
            values=values + level,
            gae_lambda=settings.gae_lambda,
            turn_gae_lambda=settings.turn_gae_lambda,
        )
        returns = counted(returns - level, mask)
    else:
        advantages = leave_one_out_advantages(
            rewards, mask, completions_per_prompt=settings.completions_per_prompt
        )
        returns = torch.zeros_like(rewards)
    facts |= advantage_facts(advantages[:n], mask[:n])
    if settings.whiten_advantages:
        advantages = whiten(advantages, mask)

    said = fresh.tokens.completion_mask
    log_ratio = estimate_kl(fresh.logprobs, fresh.reference_logprobs, "k1")
    ended = ends_with_stop_token(fresh.tokens, learner.policy.eos_id)
    entropy = -float(masked_mean(fresh.logprobs, said))
    if sampled.likeliest is not None:
        facts["rollout/token_accuracy"] = float(masked_mean(sampled.likeliest.float(), said))
    facts |= {
        "rollout/reward_mean": float(totals[:n].mean()),
        "rollout/kl_mean": float(masked_mean(log_ratio, said)),
        "rollout/kl_per_completion": float(log_ratio.sum(1).mean()),
        "rollout/entropy": entropy,
        "rollout/perplexity": perplexity(entropy),
        "rollout/reference_perplexity": perplexity(
            -float(masked_mean(fresh.reference_logprobs, said))
        ),
        "rollout/length_mean": float(said.sum(1).float().mean()),
        "rollout/eos_share": float(ended.float().mean()),
    }
    if settings.has_critic:
        facts["critic/explained_variance"] = explained_variance(values[:n], returns[:n], mask[:n])
    rollouts = Rollouts(
        tokens, logprobs, reference_logprobs, values, rewards, advantages, returns, weights
    )
    return rollouts, facts


def perplexity(nats_per_token: float) -> float:
    """Return exp(nats_per_token): among how many equal choices a token was one."""
    return math.exp(min(nats_per_token, 700.0))  # beyond, a float has no number for it


def advantage_facts(advantages: Tensor, completion_mask: Tensor) -> dict[str, float]:
    """Return mean, deviation and range of advantages (B, T) over the tokens that count."""
    counted_ones = advantages[completion_mask]
    if not len(counted_ones):
        return {}
    return {
        "rollout/advantage_mean": float(counted_ones.mean()),
        "rollout/advantage_std": float(counted_ones.std(correction=0)),
        "rollout/advantage_min": float(counted_ones.min()),
        "rollout/advantage_max": float(counted_ones.max()),
    }


def old_logprobs(
    learner: Learner, batch: Collected, ages: Tensor
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Return PPO's old log-probabilities, their importance weights (None: all 1), and facts.

    They are sampling's for fresh rollouts (age 0), unless importance_cap is set, and the policy's
    as it is now for replayed ones.
    Raises TrainingError where there are replayed ones and another policy than the learner's sampled
    the fresh ones. Training's own look cannot tell: in its first minibatch the replayed ones, whose
    ratio is 1 whoever sampled, hide what the fresh ones say.
    """
    settings, mask = learner.settings, batch.tokens.completion_mask
    replayed, corrects = ages > 0, settings.importance_cap is not None
    fresh, said = ~replayed, mask[~replayed]
    if not (corrects or bool(replayed.any())):
        return batch.logprobs, None, {}
    now = measure_together(learner, lambda t: learner.logprobs_and_values(t)[0], batch.tokens)
    log_ratio = now - batch.logprobs
    gap = log_ratio.abs()
    facts = {"policy/logprob_gap": float(masked_mean(gap[fresh], said))}
    if not corrects:
        approx_kl = estimate_kl(batch.logprobs, now, "k3")
        check_first_ratio(
            facts["policy/logprob_gap"],
            float(masked_mean(approx_kl[fresh], said)),
            settings.ratio_tolerance,
        )
    logprobs = torch.where(replayed[:, None] | corrects, now, batch.logprobs)
    caps = torch.where(replayed, settings.replay_cap, settings.importance_cap or 1.0)[:, None]
    weights = importance_weights(logprobs, batch.logprobs, mask, cap=caps)
    if bool(replayed.any()):
        again = mask[replayed]
        capped = log_ratio > math.log(settings.replay_cap)
        facts |= {
            "replay/share": float(replayed.float().mean()),
            "replay/staleness": float(ages[replayed].float().mean()),
            "replay/logprob_gap": float(masked_mean(gap[replayed], again)),
            "replay/weight_mean": float(masked_mean(weights[replayed], again)),
            "replay/capped_share": float(masked_mean(capped[replayed].float(), again)),
        }
    return logprobs, weights, facts
