"""The one table of training metrics: name, unit, range and how the number is reduced.

Every number that PPO reports is a row here and is computed in exactly one place; `checked` refuses
a name that is not. `as_markdown` writes the table that docs/metrics.md shows; so does
`python -m rlhf_pipeline.ppo.metrics`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """What one reported number means."""

    unit: str
    sign: str  # its range, or which direction is which
    reduction: str
    meaning: str


_ROLLOUTS = "mean over the update's rollouts"
_TOKENS = "mean over the update's completion tokens"
_FRESH_TOKENS = "mean over the update's completion tokens, not the replayed"
_TRAINED = "share of all that are trained on"
_REPLAYED = "mean over replayed rollouts"
_MINIBATCHES = "mean over the update's optimizer steps"

METRICS: Mapping[str, Metric] = {
    "rollout/score_mean": Metric("score", "any", _ROLLOUTS, "raw score of the reward function"),
    "rollout/score_std": Metric("score", ">= 0", "deviation over rollouts", "its spread"),
    "rollout/reward_mean": Metric(
        "reward", "any", _ROLLOUTS, "sum of per-token rewards: what is maximised"
    ),
    "rollout/kl_mean": Metric("nats per token", ">= 0 in expectation", _TOKENS, "k1 to reference"),
    "rollout/kl_per_completion": Metric(
        "nats per completion", ">= 0 in expectation", _ROLLOUTS, "k1 to reference, summed"
    ),
    "rollout/entropy": Metric(
        "nats per token", ">= 0", _TOKENS, "minus the sampled log-probability: unbiased"
    ),
    "rollout/perplexity": Metric("tokens", ">= 1", _TOKENS, "exp of rollout/entropy"),
    "rollout/reference_perplexity": Metric(
        "tokens", ">= 1", _TOKENS, "the same of the reference: whether it could have said that"
    ),
    "rollout/token_accuracy": Metric(
        "share", "0 to 1", _TOKENS, "the sampled token was the policy's likeliest"
    ),
    "rollout/advantage_mean": Metric("reward", "any", _FRESH_TOKENS, "before whitening"),
    "rollout/advantage_std": Metric("reward", ">= 0", "deviation over tokens", "before whitening"),
    "rollout/advantage_min": Metric("reward", "any", "least of all tokens", "before whitening"),
    "rollout/advantage_max": Metric("reward", "any", "most of all tokens", "before whitening"),
    "rollout/length_mean": Metric("tokens", ">= 1", _ROLLOUTS, "completion tokens with the end"),
    "rollout/eos_share": Metric("share", "0 to 1", _ROLLOUTS, "completions with an end token"),
    "rollout/repetition": Metric(
        "share", "0 to 1", _ROLLOUTS, "4-grams that the same completion had said before"
    ),
    "rollout/turns_mean": Metric(
        "turns", ">= 1", "mean over the update's conversations", "where there may be several"
    ),
    "rollout/conversation_score": Metric(
        "score", "any", "mean over the update's conversations", "raw scores of its turns, summed"
    ),
    "replay/share": Metric("share", "0 to 1", _TRAINED, "rollouts of earlier updates"),
    "replay/staleness": Metric("updates", "> 0", _REPLAYED, "how long ago they were sampled"),
    "replay/logprob_gap": Metric(
        "nats per token", ">= 0", "mean over replayed tokens", "policy now against sampling"
    ),
    "replay/weight_mean": Metric(
        "weight", "0 to replay_cap", "mean over replayed tokens", "importance weight after the cap"
    ),
    "replay/capped_share": Metric(
        "share", "0 to 1", "share of replayed tokens", "where the cap acts"
    ),
    "policy/loss": Metric("advantage", "any", _MINIBATCHES, "clipped surrogate, minimised"),
    "policy/approx_kl": Metric("nats per token", ">= 0", _MINIBATCHES, "rollout policy to now"),
    "policy/last_approx_kl": Metric(
        "nats per token", ">= 0", "the update's last minibatch", "how far one update moved"
    ),
    "policy/clip_fraction": Metric("share", "0 to 1", _MINIBATCHES, "tokens where the clip acts"),
    "policy/first_ratio": Metric("ratio", "1", "the update's first minibatch", "smoke test: 1"),
    "policy/logprob_gap": Metric(
        "nats per token",
        ">= 0",
        "the update's first minibatch; with importance_cap or replay mean over all fresh tokens",
        "sampling against training",
    ),
    "policy/grad_norm": Metric("norm", ">= 0", _MINIBATCHES, "before clipping, critic included"),
    "critic/loss": Metric("score squared", ">= 0", _MINIBATCHES, "half squared error, clipped"),
    "critic/clip_fraction": Metric("share", "0 to 1", _MINIBATCHES, "tokens where the clip acts"),
    "critic/explained_variance": Metric(
        "share", "<= 1; 0 explains nothing", "over the update's tokens", "values against returns"
    ),
    "critic/*/explained_variance": Metric(
        "share",
        "<= 1; 0 explains nothing",
        "over the update's tokens",
        "a function's raw score, foretold by the critic's head for it",
    ),
    "dpo/margin": Metric(
        "nats * dpo_beta", "any", "over the update's pairs", "implicit reward, chosen - rejected"
    ),
    "dpo/accuracy": Metric("share", "0 to 1", "over the update's pairs", "chosen above rejected"),
    "train/loss": Metric("loss", "any", _MINIBATCHES, "policy loss + value_coef * critic loss"),
    "train/kl_coef": Metric("score per nat", ">= 0", "used in this update", "KL penalty weight"),
    "train/learning_rate": Metric(
        "rate", ">= 0", "used in this update; with DPO in its last step", "of the policy"
    ),
    "train/optimizer_steps": Metric("steps", ">= 0", "since the start", "steps taken so far"),
    "train/loss_scale": Metric("factor", ">= 1", "after the update", "of the loss, in float16"),
    "reward/*/weight": Metric("weight", "any", "used in this update", "how much a function counts"),
    "reward/*/score_mean": Metric("score", "any", _ROLLOUTS, "a function's raw score"),
    "reward/*/added_mean": Metric("score", "any", _ROLLOUTS, "what it added to the composite"),
    "reward/*/below_floor": Metric("share", "0 to 1", _ROLLOUTS, "under the function's floor"),
    "reward/*/skipped": Metric("share", "0 to 1", _ROLLOUTS, "which it could not judge"),
    "watch/score_mean": Metric(
        "score",
        "any",
        "mean over watch prompts",
        "proxy reward, by the scales training begins and the weights it ends with",
    ),
    "watch/score_std": Metric("score", ">= 0", "deviation over watch prompts", "its spread"),
    "watch/stopping_mean": Metric("score", "any", "mean over watch prompts", "stopping reward"),
    "watch/kl": Metric(
        "nats per completion", ">= 0 in expectation", "mean over watch prompts", "k1 to reference"
    ),
    "watch/length_mean": Metric("tokens", ">= 1", "mean over watch prompts", "completion tokens"),
    "watch/eos_share": Metric("share", "0 to 1", "mean over watch prompts", "with an end token"),
    "watch/repetition": Metric(
        "share", "0 to 1", "mean over watch prompts", "4-grams that a completion had said before"
    ),
    "time/sample": Metric("seconds", ">= 0", "this update", "sampling completions"),
    "time/score": Metric("seconds", ">= 0", "this update", "the reward function"),
    "time/measure": Metric("seconds", ">= 0", "this update", "reference log-probs and values"),
    "time/train": Metric("seconds", ">= 0", "this update", "forward, backward, step"),
    "time/tokens_per_second": Metric(
        "tokens per second", "> 0", "this update", "completion tokens over all four phases"
    ),
    "memory/process_peak": Metric("MiB", "> 0", "since the process began", "resident memory"),
    "memory/gpu_peak": Metric("MiB", "> 0", "since training began", "allocated by torch, on a GPU"),
}


def checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics as plain floats; KeyError names one that the table does not have.

    A row's * stands for the name of one of the composite's functions.
    """
    unknown = sorted(name for name in metrics if _row(name) not in METRICS)
    if unknown:
        raise KeyError(f"ppo.metrics.METRICS has no row for {', '.join(unknown)}; add one")
    return {name: float(value) for name, value in metrics.items()}


def _row(name: str) -> str:
    parts = name.split("/")
    return "/".join([parts[0], "*", parts[-1]]) if len(parts) > 2 else name


def as_markdown() -> str:
    """Return the table as Markdown."""
    rows = [
        f"| `{name}` | {m.meaning} | {m.unit} | {m.sign} | {m.reduction} |"
        for name, m in METRICS.items()
    ]
    head = "| metric | what | unit | range | reduction |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
