"""One policy in training: what it is made of, one update of it, a look at it, what came out.

`train_ppo` (trainer.py) repeats this for one policy, `train_specialists` for several in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_pipeline.ppo.changing import Curriculum
from rlhf_pipeline.ppo.collecting import (
    Task,
    check_conversation,
    encode_checked,
    episode_facts,
    next_prompts,
    play_episodes,
    probe_rewards,
    shape_scores,
)
from rlhf_pipeline.ppo.criteria import Noting, noting
from rlhf_pipeline.ppo.kl import next_kl_coef
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.measuring import make_rollouts
from rlhf_pipeline.ppo.memory import give_back_freed, peak_memory
from rlhf_pipeline.ppo.metrics import checked
from rlhf_pipeline.ppo.optimising import train_on
from rlhf_pipeline.ppo.replay import Replay
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.rollout import RolloutEngine, sample_completions
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.state import Progressed
from rlhf_pipeline.ppo.watching import evaluate, raise_alarms, watch_facts
from rlhf_pipeline.records import Progress, Prompt, RewardFunction, SimulatedUser

PHASES = ("sample", "score", "measure", "train")


@dataclass
class Training:
    """A policy in training: who learns, from what, and how far it is."""

    learner: Learner
    task: Task
    watch: Task
    stopping: RewardFunction | None
    noted: Noting | None  # the task's reward, where the critic learns its pieces too
    replay: Replay
    curriculum: Curriculum
    generators: dict[str, torch.Generator]
    now: Progressed

    @property
    def settings(self) -> PpoSettings:
        """The learner's."""
        return self.learner.settings


def checked_training(
    learner: Learner,
    *,
    reward: RewardFunction,
    stopping: RewardFunction | None,
    prompts: Sequence[Prompt],
    watch_prompts: Sequence[Prompt],
    user: SimulatedUser | None = None,
    final_reward: RewardFunction | None = None,
    engine: RolloutEngine = sample_completions,
    whose: str = "",
    learns_pieces: bool = True,
) -> Training:
    """Return a training that has not begun; its prompts and rewards have been tried.

    `whose`, such as "shop's ", stands before what an error is about. Raises TrainingError and
    ModelError for input that cannot be trained on.
    """
    settings = learner.settings
    encoded = encode_checked(learner.policy, prompts, settings, f"{whose}prompts")
    watch_encoded = encode_checked(learner.policy, watch_prompts, settings, f"{whose}watch_prompts")
    check_conversation(settings, user, final_reward)
    rewards = {f"{whose}proxy": reward, f"{whose}stopping": stopping, "final": final_reward}
    probe_rewards(learner, encoded, prompts, rewards)
    noted = noting(reward, has_critic=settings.has_critic and learns_pieces)
    learner.criteria = learner.new_criteria([] if noted is None else noted.reward.piece_names)
    task = Task(prompts, encoded, noted or reward, user, final_reward, engine)
    return Training(
        learner,
        task,
        replace(task, prompts=watch_prompts, encoded=watch_encoded),
        stopping,
        noted,
        Replay(settings.replay_updates),
        Curriculum(reward),
        {
            "sampling": torch.Generator().manual_seed(settings.seed),
            "shuffling": torch.Generator().manual_seed(settings.seed + 1),
        },
        Progressed(kl_coef=settings.kl_coef),
    )


def begin(training: Training) -> None:
    """Begin at the beginning: the reward's scales, and a look at the policy as it is."""
    training.curriculum.start(training.learner, training.task)
    training.now.reward = training.now.first_reward = training.curriculum.state()
    look(training)


def look(training: Training) -> None:
    """Look at the watch prompts; the reference's completions are those of the first look.

    A reward that changes scores every look alike: else they could not be held against each other.
    """
    now, curriculum = training.now, training.curriculum
    shown = min(training.settings.samples_shown, len(training.watch.prompts))
    alike = curriculum.in_one_unit(now.first_reward, training.settings.updates)
    with now.timed("watch"), alike:
        baselines = [
            sample["baseline"] for first in now.evaluations[:1] for sample in first.samples
        ]
        # A run may be resumed with other samples to show; those that lack are drawn again.
        baselines = baselines[:shown] if len(baselines) >= shown else []
        now.evaluations.append(
            evaluate(
                training.learner,
                training.watch,
                training.stopping,
                now.update,
                baselines=baselines,
            )
        )


def update(training: Training) -> dict[str, float]:
    """Make one update and return its facts.

    1. Sample completions, or whole conversations, and score them; a reward that changes has this
       update's weights, and learns its scales from the scores.
    2. Measure reference log-probabilities and values; make rewards and advantages; where the
       reward has pieces, the critic's criteria heads learn to foretell them.
    3. Take epochs x minibatches optimizer steps; on the first, the ratio must be 1.
    4. Move the KL coefficient, count what was done.

    Raises NotFinite, with the update not counted, and TrainingError.
    """
    learner, now, settings = training.learner, training.now, training.settings
    before = dict(now.seconds)
    share = 1 - now.update / settings.updates if settings.anneal else 1.0
    facts: dict[str, float] = {
        "train/learning_rate": learner.set_learning_rate(share),
        "train/kl_coef": now.kl_coef,
    }

    # 1. Sample and score.
    members = next_prompts(now.prompts_used, settings, len(training.task.prompts))
    now.prompts_used += settings.prompts_per_update
    training.curriculum.begin(now.update)
    if training.noted is not None:
        training.noted.forget()  # what a look heard: a turn that nobody scores may say the same
    sampling = training.generators["sampling"]
    episodes = play_episodes(learner, training.task, members, sampling, now.timed)
    pieces = None
    if training.noted is not None:
        pieces = training.noted.take(episodes.prompts, episodes.sampled.texts, learner.team)
    scores = shape_scores(episodes.judged_scores, now.scores, settings)
    facts |= episode_facts(episodes, len(members), settings) | training.curriculum.end(learner)
    now.reward = training.curriculum.state()
    give_back_freed()

    # 2. Measure, then rewards and advantages.
    with now.timed("measure"):
        rollouts, measured = make_rollouts(
            learner,
            episodes.sampled,
            scores,
            now.kl_coef,
            episodes=episodes,
            replay=training.replay,
            pieces=pieces,
        )
    facts |= measured
    give_back_freed()
    learner.team.check_alike("rollouts", [rollouts.tokens.prompt_ids, rollouts.advantages])

    # 3. Optimizer steps.
    with now.timed("train"):
        facts = train_on(learner, rollouts, training.generators["shuffling"]) | facts
    give_back_freed()

    # 4. The coefficient and the counts.
    now.update += 1
    now.optimizer_steps += settings.steps_per_update
    if settings.kl_controller == "adaptive":
        now.kl_coef = next_kl_coef(
            now.kl_coef,
            facts["rollout/kl_per_completion"],
            target=settings.kl_target,
            horizon=settings.kl_horizon,
            episodes=settings.rollouts_per_update,
        )
    facts["train/optimizer_steps"] = now.optimizer_steps
    for phase in PHASES:
        facts[f"time/{phase}"] = now.seconds[phase] - before.get(phase, 0.0)
    spent = math.fsum(facts[f"time/{phase}"] for phase in PHASES)
    facts["time/tokens_per_second"] = int(episodes.sampled.tokens.completion_mask.sum()) / spent
    return facts | peak_memory(learner.policy.device)


def tell(training: Training, facts: dict[str, float], report: Progress, *, looks: bool) -> None:
    """Look at the watch prompts where it is time, keep the update's facts, raise alarms."""
    now = training.now
    if looks:
        look(training)
        facts = facts | watch_facts(now.evaluations[-1])
    now.history.append(checked(facts))
    report({"update": now.update, "updates": training.settings.updates, **now.history[-1]})
    raise_alarms(now, training.settings, report)


def result_of(
    training: Training,
    chosen: int,
    *,
    policy: Path,
    value_init: Path | None,
    stopped_because: str,
    fingerprint: str,
    resumed_from: int | None,
    reward_state: dict[str, Any],
    feedback_count: int | None = None,
) -> TrainingResult:
    """Return what came out, where update `chosen` is the one whose policy was saved."""
    now = training.now
    there = next(one for one in now.evaluations if one.update == chosen)
    return TrainingResult(
        model_path=str(policy),
        reward_model_path=None if value_init is None else str(value_init),
        feedback_count=feedback_count,
        chosen_update=chosen,
        stopped_because=stopped_because,
        final_reward_mean=there.score_mean,
        final_reward_std=there.score_std,
        training_steps=now.optimizer_steps,
        reward_history=tuple(m["rollout/score_mean"] for m in now.history),
        kl_history=tuple(m["rollout/kl_per_completion"] for m in now.history),
        loss_history=tuple(m["train/loss"] for m in now.history),
        history=tuple(now.history),
        evaluations=tuple(now.evaluations),
        alarms=tuple(now.alarms),
        seconds=dict(now.seconds),
        resumed_from=resumed_from,
        fingerprint=fingerprint,
        settings=asdict(training.settings),
        reward_state=reward_state,
    )
