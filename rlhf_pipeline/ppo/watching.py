"""Looks at the watch prompts, and what follows from them: the update to keep, when to stop."""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf_pipeline.errors import CheckpointDamaged, LogitsNotFinite
from rlhf_pipeline.evaluation.metrics import repetition, repetition_change
from rlhf_pipeline.files import write_text
from rlhf_pipeline.ppo import checkpoint
from rlhf_pipeline.ppo.alarms import (
    NOT_FINITE,
    Alarm,
    find_alarms,
    for_dpo,
    not_finite,
    over_optimisation,
    reward_saturation,
)
from rlhf_pipeline.ppo.collecting import Task, play_episodes, sample_for, score_together
from rlhf_pipeline.ppo.kl import estimate_kl
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.measuring import measure_together
from rlhf_pipeline.ppo.optimising import NotFinite
from rlhf_pipeline.ppo.result import Evaluation
from rlhf_pipeline.ppo.rollout import ends_with_stop_token
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.state import Progressed
from rlhf_pipeline.records import Progress, RewardFunction

ASTRAY = 3
"""Updates in a row beyond max_kl that end training. One may be a few completions that went round in
circles: in seed 2 of the demo a batch stood at 15 nats and the next at 3, as their scores told the
policy; what came of it was the best of the run."""


def evaluate(
    learner: Learner,
    task: Task,
    stopping: RewardFunction | None,
    update: int,
    *,
    baselines: Sequence[str] = (),
) -> Evaluation:
    """Return one look at the task's prompts: raw scores, no EOS trick, always the same draws.

    The stopping reward judges what the proxy judged: every turn, or the last one. `baselines` are
    the reference policy's completions of the samples shown; without them they are sampled here.
    """
    settings = learner.settings
    generator = torch.Generator().manual_seed(settings.seed + 2)
    everyone = range(len(task.prompts))
    episodes = play_episodes(learner, task, everyone, generator, lambda phase: nullcontext())
    sampled = episodes.sampled
    tokens, mask = sampled.tokens, sampled.tokens.completion_mask
    reference_logprobs = measure_together(learner, learner.reference_logprobs, tokens)
    scores = episodes.judged_scores
    stopping_scores = []
    if stopping is not None:
        judged = [i for i, flag in enumerate(episodes.judged) if flag]
        stopping_scores = score_together(
            learner,
            stopping,
            [episodes.prompts[i] for i in judged],
            [sampled.texts[i] for i in judged],
            name="stopping",
        )
    ended = ends_with_stop_token(tokens, learner.policy.eos_id)
    baselines = baselines or sample_baselines(learner, task)
    samples = [
        {
            "update": update,
            "prompt": prompt[-1].content,
            "baseline": baseline,
            "completion": text,
            "score": episodes.score_from(i),
        }
        for i, (prompt, text, baseline) in enumerate(
            zip(episodes.prompts, sampled.texts, baselines, strict=False)
        )
    ]
    return Evaluation(
        update=update,
        score_mean=statistics.fmean(scores),
        score_std=statistics.pstdev(scores),
        stopping_mean=statistics.fmean(stopping_scores) if stopping_scores else None,
        stopping_std=statistics.pstdev(stopping_scores) if stopping_scores else None,
        kl=float(estimate_kl(sampled.logprobs, reference_logprobs, "k1").sum(1).mean()),
        length_mean=float(mask.sum(1).float().mean()),
        eos_share=float(ended.float().mean()),
        repetition=statistics.fmean(map(repetition, sampled.texts)),
        samples=tuple(samples),
    )


def sample_baselines(learner: Learner, task: Task) -> list[str]:
    """Return the reference policy's completions of the first prompts, drawn as a look draws."""
    settings = learner.settings
    shown = task.encoded[: settings.samples_shown]
    if not shown:
        return []
    generator = torch.Generator().manual_seed(settings.seed + 2)
    with learner.as_reference() as reference:
        return sample_for(replace(learner, policy=reference), shown, generator).texts


def write_samples(path: Path, looks: Sequence[Evaluation]) -> None:
    """Write the samples of every look, one JSON object a line, in one rename."""
    lines = [json.dumps(sample, ensure_ascii=False) for look in looks for sample in look.samples]
    if lines:
        write_text(path, "\n".join(lines) + "\n")


def watch_facts(look: Evaluation) -> dict[str, float]:
    """Return a look at the watch prompts as metrics."""
    facts = {
        "watch/score_mean": look.score_mean,
        "watch/score_std": look.score_std,
        "watch/kl": look.kl,
        "watch/length_mean": look.length_mean,
        "watch/eos_share": look.eos_share,
    }
    if look.repetition is not None:
        facts["watch/repetition"] = look.repetition
    if look.stopping_mean is not None:
        facts["watch/stopping_mean"] = look.stopping_mean
    return facts


def choose_update(evaluations: Sequence[Evaluation], settings: PpoSettings) -> int:
    """Return the update to keep: `updates_by_preference`'s first."""
    return updates_by_preference(evaluations, settings)[0]


def updates_by_preference(evaluations: Sequence[Evaluation], settings: PpoSettings) -> list[int]:
    """Return evaluated updates, best first: by stopping score, the earlier one among equals.

    Where there is no stopping reward, later is better. Updates beyond max_kl or max_repetition
    come last, the one nearest to the reference first among them.
    """
    before = min(evaluations, key=lambda look: look.update)

    def key(look: Evaluation) -> tuple[bool, float, float]:
        if _is_beyond(look, before, settings):
            return (True, look.kl, look.update)
        if look.stopping_mean is None:
            return (False, -look.update, 0.0)
        return (False, -look.stopping_mean, look.update)

    return [look.update for look in sorted(evaluations, key=key)]


def _is_beyond(look: Evaluation, before: Evaluation, settings: PpoSettings) -> bool:
    if settings.max_kl is not None and look.kl > settings.max_kl:
        return True
    if settings.max_repetition is None or look.repetition is None or before.repetition is None:
        return False
    return repetition_change(look.repetition, before.repetition) > settings.max_repetition


def reason_to_stop(now: Progressed, settings: PpoSettings) -> str | None:
    """Return why training ends here, or None where it goes on; a function of the history alone."""
    for alarm in now.alarms:
        if alarm.name == NOT_FINITE:
            return alarm.found
    if settings.max_kl is not None:
        kls = [facts["rollout/kl_per_completion"] for facts in now.history[-ASTRAY:]]
        if len(kls) == ASTRAY and min(kls) > settings.max_kl:
            return (
                f"KL to the reference is {kls[-1]:.2f} nats per completion, and was over "
                f"{settings.max_kl} for {ASTRAY} updates"
            )
    looks = [e for e in now.evaluations if e.stopping_mean is not None]
    if settings.patience is not None and looks:
        best = choose_update(looks, settings)
        waited = sum(e.update > best for e in looks)
        if waited >= settings.patience:
            return (
                f"the stopping score has not risen for {waited} looks; "
                f"it was best after update {best}"
            )
    return "all updates are made" if now.update >= settings.updates else None


def load_chosen(
    root: Path, learner: Learner, now: Progressed, settings: PpoSettings
) -> tuple[int, Mapping[str, Any]]:
    """Put the chosen update's weights into the policy; return the update and its reward's state."""
    saved = chosen_checkpoint(root, now, settings)
    policy_weights = {n: p for n, p in learner.trainable().items() if n.startswith("policy/")}
    checkpoint.restore_parameters(policy_weights, saved.tensors["policy"])
    return saved.update, saved.state["progressed"].get("reward", {})


def chosen_checkpoint(root: Path, now: Progressed, settings: PpoSettings) -> checkpoint.Checkpoint:
    """Return the best update's checkpoint that is whole, with a warning for each passed over.

    Raises CheckpointDamaged where there is none.
    """
    kept = set(checkpoint.checkpoint_updates(root))
    for update in updates_by_preference(now.evaluations, settings):
        if update not in kept:
            continue
        try:
            return checkpoint.checkpoint_at(root, update)
        except CheckpointDamaged as error:
            warnings.warn(f"the best checkpoint cannot be taken: {error}", stacklevel=2)
    raise CheckpointDamaged(
        f"a whole checkpoint of an evaluated update is needed in {root}, found none; "
        "move that folder away and train again"
    )


def raise_alarms(now: Progressed, settings: PpoSettings, report: Progress) -> None:
    """Keep and report alarms that have not been raised before in this run."""
    found = find_alarms(
        now.history,
        kl_target=settings.kl_target,
        max_completion_tokens=settings.max_completion_tokens,
        update=now.update,
    )
    looks = now.evaluations
    for alarm in [*found, *reward_saturation(looks), *over_optimisation(looks)]:
        if alarm.name not in {known.name for known in now.alarms}:
            alarm = for_dpo(alarm) if settings.estimator == "dpo" else alarm
            now.alarms.append(alarm)
            report(
                {
                    "update": alarm.update,
                    "alarm": alarm.name,
                    "found": alarm.found,
                    "remedy": alarm.remedy,
                }
            )


def raise_not_finite(
    now: Progressed, update: int, error: NotFinite | LogitsNotFinite, report: Progress
) -> Alarm:
    """Keep, report and return the alarm for the update that ended with this error."""
    of_logits = isinstance(error, LogitsNotFinite)
    alarm = not_finite(update, "a logit of the policy" if of_logits else str(error))
    now.alarms.append(alarm)
    report({"update": alarm.update, "alarm": alarm.name, "found": alarm.found})
    return alarm


def as_rollouts(look: Evaluation) -> dict[str, float]:
    """Return what alarms ask of an update's rollouts, of a look, for training that has none."""
    return {
        "rollout/kl_per_completion": look.kl,
        "rollout/length_mean": look.length_mean,
        "rollout/eos_share": look.eos_share,
        "rollout/repetition": look.repetition or 0.0,
    }
