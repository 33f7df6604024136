"""What goes wrong in PPO, recognised from the metrics, with its usual cause and remedy.

An alarm informs; it stops nothing. What stops training is max_kl, patience and a loss or gradient
that is not finite (which is an alarm too, so that the report names it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_pipeline.evaluation.metrics import repetition_change

if TYPE_CHECKING:
    from rlhf_pipeline.ppo.result import Evaluation

KL_TARGETS = 4.0  # times kl_target
ENTROPY_SHARE = 0.1  # of the first update's
LENGTH_GROWTH, LENGTH_SHARE = 1.5, 0.8  # times the first update's, and of the limit
EOS_SHARE, EOS_LOSS = 0.1, 0.5  # of all completions, and of the first update's share
REPETITION_GROWTH = 1.0  # twice the first update's, to at least 2 %
SPREAD_SHARE = 0.1  # of the first update's deviation of scores
CRITIC_PATIENCE = 5  # updates in a row with explained variance below 0
NOT_FINITE = "not_finite"  # the one alarm that ends training
GIVEN_BACK = 0.5  # of what the stopping score had gained
NOISE = 0.2  # deviations of stopping scores: a mean over a hundred strays by half of that


DPO_ADVICE = {  # cause and remedy where pairs are learnt from, and no reward
    "kl_blow_up": (
        "The policy runs from the reference faster than ppo.dpo_beta holds it",
        "Raise ppo.dpo_beta, or lower ppo.learning_rate or ppo.epochs",
    ),
    "length_explosion": (
        "The chosen completions of the pairs are the longer ones",
        "Raise ppo.dpo_beta, or set ppo.estimator to gae or rloo and add a length penalty to the "
        "reward",
    ),
    "eos_loss": (
        "Chosen completions are cut off at the limit, or the baseline never learned to end",
        "Raise policy.max_completion_tokens, or train SFT longer",
    ),
    "repetition": (
        "The policy has run from the reference, or chosen completions repeat themselves",
        "Raise ppo.dpo_beta, or lower ppo.learning_rate or ppo.epochs; max_repetition keeps such "
        "an update from being chosen",
    ),
    "reward_saturation": (
        "The proxy tells completions no longer apart: they are all alike, or it is at its end",
        "Stop here and collect votes on this policy",
    ),
    "over_optimisation": (
        "The policy learns what these pairs and the proxy like, and other voters do not",
        "The best update is kept; set ppo.patience or ppo.max_kl to stop there, raise "
        "ppo.dpo_beta, and collect votes on this policy",
    ),
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that went wrong, first seen at `update`."""

    name: str
    update: int
    found: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} at update {self.update}: {self.found}. {self.cause}. {self.remedy}."


def for_dpo(alarm: Alarm) -> Alarm:
    """Return the alarm with the cause and remedy that hold where DPO trains."""
    cause, remedy = DPO_ADVICE.get(alarm.name, (alarm.cause, alarm.remedy))
    return replace(alarm, cause=cause, remedy=remedy)


def not_finite(update: int, what: str) -> Alarm:
    """Return the alarm for a loss or gradient that is NaN or infinite."""
    return Alarm(
        NOT_FINITE,
        update,
        f"{what} is not finite",
        "Scores of a wild range, a learning rate that is too large, or bfloat16 overflow",
        "Set ppo.score_normalisation to running, lower ppo.learning_rate, or train in float32",
    )


def over_optimisation(looks: Sequence[Evaluation]) -> list[Alarm]:
    """Return the alarm, if any, for a proxy that rises while the stopping reward falls.

    Source: arXiv:2210.10760 figure 1. `looks` are those at the watch prompts, in order.
    """
    first, now = looks[0], looks[-1]
    judged = [(look.stopping_mean, look) for look in looks if look.stopping_mean is not None]
    if now.stopping_mean is None or first.stopping_mean is None:
        return []
    highest, best = max(judged, key=lambda pair: pair[0])
    fell, gained = highest - now.stopping_mean, highest - first.stopping_mean
    # The proxy's unit may be another; results of old know no deviation but its.
    spread = first.score_std if first.stopping_std is None else first.stopping_std
    if now.score_mean <= best.score_mean or fell <= max(GIVEN_BACK * gained, NOISE * spread):
        return []
    return [
        Alarm(
            "over_optimisation",
            now.update,
            f"the stopping score fell from {highest:.2f} after update {best.update} to "
            f"{now.stopping_mean:.2f}, while the proxy's score rose from {best.score_mean:.2f} to "
            f"{now.score_mean:.2f}",
            "The policy learns what the proxy alone rewards: it has left what people voted on",
            "The best update is kept; set ppo.patience or ppo.max_kl to stop there, raise "
            "ppo.kl_coef, and collect votes on this policy",
        )
    ]


def reward_saturation(looks: Sequence[Evaluation]) -> list[Alarm]:
    """Return the alarm, if any, for scores that no longer tell completions apart.

    Looks are all in one unit; an update's scores are in that of its functions' weights then.
    """
    first, now = looks[0].score_std, looks[-1].score_std
    if now >= SPREAD_SHARE * first:
        return []
    return [
        Alarm(
            "reward_saturation",
            looks[-1].update,
            f"scores spread {now:.2g} around their mean, {first:.2g} at first",
            "All completions earn the same: the reward is at its end, or they are all alike",
            "Stop here and collect votes on this policy; raise ppo.score_clip where it is set",
        )
    ]


def find_alarms(
    history: Sequence[Mapping[str, float]],
    *,
    kl_target: float,
    max_completion_tokens: int,
    update: int | None = None,
) -> list[Alarm]:
    """Return what the latest update shows; `history` holds one dict of metrics per update.

    `update` is its number where that is not how many there are.
    """
    first, now, update = history[0], history[-1], update or len(history)
    alarms = []
    kl = now["rollout/kl_per_completion"]
    if kl > KL_TARGETS * kl_target:
        alarms.append(
            Alarm(
                "kl_blow_up",
                update,
                f"KL to the reference is {kl:.1f} nats per completion",
                "The policy runs from the reference faster than the KL penalty pulls",
                "Raise ppo.kl_coef, set ppo.kl_controller to adaptive, or lower ppo.learning_rate",
            )
        )
    # DPO samples nothing to learn from: only looks are known of it, and they tell no entropy.
    entropy, first_entropy = (facts.get("rollout/entropy", 0.0) for facts in (now, first))
    if entropy < ENTROPY_SHARE * first_entropy:
        alarms.append(
            Alarm(
                "entropy_collapse",
                update,
                f"entropy fell from {first_entropy:.2f} to {entropy:.2f} nats per token",
                "The policy writes one completion over and over",
                "Raise ppo.kl_coef or policy.temperature, lower ppo.learning_rate or ppo.epochs",
            )
        )
    length, first_length = now["rollout/length_mean"], first["rollout/length_mean"]
    if length > LENGTH_GROWTH * first_length and length > LENGTH_SHARE * max_completion_tokens:
        alarms.append(
            Alarm(
                "length_explosion",
                update,
                f"completions grew from {first_length:.0f} to {length:.0f} tokens",
                "The reward model likes length",
                "Train it on pairs of matched length, or add a length penalty to the reward",
            )
        )
    eos, first_eos = now["rollout/eos_share"], first["rollout/eos_share"]
    if eos < max(EOS_SHARE, EOS_LOSS * first_eos):
        alarms.append(
            Alarm(
                "eos_loss",
                update,
                f"{eos:.0%} of completions end with the end token, {first_eos:.0%} at first",
                "Not ending pays, or the baseline never learned to end",
                "Lower ppo.missing_eos_score, raise policy.max_completion_tokens, or train SFT "
                "longer",
            )
        )
    repeated, first_repeated = now["rollout/repetition"], first["rollout/repetition"]
    if repetition_change(repeated, first_repeated) > REPETITION_GROWTH:
        alarms.append(
            Alarm(
                "repetition",
                update,
                f"{repeated:.1%} of four words in a row were said before, {first_repeated:.1%} at "
                "first",
                "The reward likes a phrase, and twice the better: it has seldom seen it twice",
                "Name the function repetition with a floor in reward.functions; max_repetition "
                "keeps such an update from being chosen",
            )
        )
    recent = [m.get("critic/explained_variance", 1.0) for m in history[-CRITIC_PATIENCE:]]
    if len(recent) == CRITIC_PATIENCE and max(recent) < 0:
        alarms.append(
            Alarm(
                "critic_useless",
                update,
                f"explained variance below 0 for {CRITIC_PATIENCE} updates, now {recent[-1]:.2f}",
                "The critic is worse than a constant: a fresh head, or values that cannot follow",
                "Start it from the reward model, raise ppo.critic_learning_rate or ppo.value_coef",
            )
        )
    return alarms
