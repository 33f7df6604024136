"""`train_ppo`: the loop, to be read straight down. The arithmetic is in the modules it calls.

A run owns output_dir: checkpoints/ while it goes on; policy/ (a plain transformers folder), plots/
and result.json when it has ended. Killed at any instant and called again with the same arguments
it goes on from its last checkpoint and, on a CPU, ends with the very same weights. Launched several
times at once (processes.py), one process writes and all end with one policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.files import remove_half_written
from rlhf_pipeline.policy.adapters import SharedBase
from rlhf_pipeline.policy.loading import Policy, save_policy
from rlhf_pipeline.ppo import checkpoint
from rlhf_pipeline.ppo.alarms import not_finite
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
from rlhf_pipeline.ppo.criteria import noting
from rlhf_pipeline.ppo.kl import next_kl_coef
from rlhf_pipeline.ppo.learner import build_learner
from rlhf_pipeline.ppo.measuring import make_rollouts
from rlhf_pipeline.ppo.memory import give_back_freed, peak_memory
from rlhf_pipeline.ppo.metrics import checked
from rlhf_pipeline.ppo.optimising import NotFinite, train_on
from rlhf_pipeline.ppo.plots import draw_plots
from rlhf_pipeline.ppo.processes import join_team
from rlhf_pipeline.ppo.replay import Replay
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.rollout import RolloutEngine, sample_completions
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.state import Progressed, restore_state, run_fingerprint, write_state
from rlhf_pipeline.ppo.watching import (
    choose_update,
    evaluate,
    load_chosen,
    raise_alarms,
    reason_to_stop,
    watch_facts,
    write_samples,
)
from rlhf_pipeline.records import Progress, Prompt, RewardFunction, SimulatedUser, ignore_progress

PHASES = ("sample", "score", "measure", "train")


def train_ppo(
    *,
    policy_dir: str | Path,
    reference_dir: str | Path,
    reward: RewardFunction,
    stopping: RewardFunction | None,
    prompts: Sequence[Prompt],
    watch_prompts: Sequence[Prompt],
    output_dir: Path,
    settings: PpoSettings,
    value_init: Path | None = None,
    base: SharedBase | None = None,
    user: SimulatedUser | None = None,
    final_reward: RewardFunction | None = None,
    engine: RolloutEngine = sample_completions,
    feedback_count: int | None = None,
    resume: bool = True,
    report: Progress = ignore_progress,
    keep_going: Callable[[], None] = lambda: None,
) -> TrainingResult:
    """Train the policy at policy_dir with PPO and return what came out, saved in output_dir.

    `reward` is maximised; `stopping`, which training never sees, chooses the update whose policy
    is kept, by its mean score on watch_prompts. Without it the last update is kept. reference_dir
    is the fixed baseline; value_init a reward model's folder the critic starts from; base, with
    LoRA, the base in memory that the rewards read with too (learner.shared_base).
    With settings.max_turns above 1 rollouts are conversations with `user`, `reward` judges by
    settings.reward_timing, and final_reward, if any, is added where a conversation ends.
    feedback_count, the votes behind all this, is for the result to say.
    `keep_going` is called before every update and every write, and raises to stop the run.

    1. Load the models and check prompts and rewards before anything is trained.
    2. Go on from the last checkpoint, or look at the watch prompts and write checkpoint 0.
    3. Until there is a reason to stop:
       3.1 sample completions, or whole conversations, and score them; a reward that changes
           has this update's weights, and learns its scales from the scores;
       3.2 measure reference log-probabilities and values; make rewards and advantages; where the
           reward has pieces, the critic's criteria heads learn to foretell them;
       3.3 take epochs x minibatches optimizer steps; on the first, the ratio must be 1;
       3.4 move the KL coefficient, keep the metrics, look for alarms;
       3.5 every few updates look at the watch prompts; write checkpoints.
    4. Load the chosen update's weights, save them as the policy, draw the plots, write the result.

    A finished run returns its result again. Raises TrainingError before training if the input
    cannot be trained on, and later if the ratio is not 1, a score is not finite or nothing usable
    came out.
    """
    team = join_team(settings)
    report = report if team.is_main else ignore_progress
    torch.manual_seed(settings.seed)
    fingerprint = run_fingerprint(
        [policy_dir, reference_dir, *([] if value_init is None else [value_init])],
        [reward, stopping, *(r for r in (user, final_reward) if r is not None)],
        [*prompts, (), *watch_prompts],
        settings,
    )
    checkpoints, result_path = output_dir / "checkpoints", output_dir / "result.json"
    if resume and result_path.exists():
        finished = TrainingResult.load(result_path)
        if finished.fingerprint == fingerprint and Path(finished.model_path).is_dir():
            return finished

    # 1. Models and checks.
    learner = build_learner(policy_dir, reference_dir, value_init, settings, base=base)
    learner.team = team
    encoded = encode_checked(learner.policy, prompts, settings, "prompts")
    watch_encoded = encode_checked(learner.policy, watch_prompts, settings, "watch_prompts")
    check_conversation(settings, user, final_reward)
    rewards = {"proxy": reward, "stopping": stopping, "final": final_reward}
    probe_rewards(learner, encoded, prompts, rewards)
    noted = noting(reward, has_critic=settings.has_critic)
    learner.criteria = learner.new_criteria([] if noted is None else noted.reward.piece_names)
    task = Task(prompts, encoded, noted or reward, user, final_reward, engine)
    watch = replace(task, prompts=watch_prompts, encoded=watch_encoded)
    replay, curriculum = Replay(settings.replay_updates), Curriculum(reward)
    generators = {
        "sampling": torch.Generator().manual_seed(settings.seed),
        "shuffling": torch.Generator().manual_seed(settings.seed + 1),
    }

    def look_at_watch_prompts() -> None:
        with now.timed("watch"):
            baselines = [
                sample["baseline"] for look in now.evaluations[:1] for sample in look.samples
            ]
            now.evaluations.append(
                evaluate(learner, watch, stopping, now.update, baselines=baselines)
            )
            if team.is_main:
                write_samples(output_dir / "samples.jsonl", now.evaluations)

    def write_checkpoint() -> None:
        keep_going()
        team.check_alike("weights", learner.trainable().values())
        with now.timed("checkpoint"):
            if team.is_main:
                write_state(checkpoints, learner, now, generators, replay, fingerprint)
                best = choose_update(now.evaluations, settings)
                checkpoint.retain(checkpoints, latest=settings.keep_checkpoints, best=[best])
            team.wait()

    # 2. Where to begin.
    if team.is_main:
        remove_half_written(output_dir)
        if not resume:
            checkpoint.remove_all(checkpoints)
    team.wait()
    latest = checkpoint.latest_checkpoint(checkpoints)
    if latest is not None:
        now = restore_state(latest, learner, generators, replay, fingerprint)
        curriculum.restore(now.reward)
    else:
        now = Progressed(kl_coef=settings.kl_coef)
        curriculum.start(learner, task)
        now.reward = curriculum.state()
        look_at_watch_prompts()
        write_checkpoint()

    # 3. The loop.
    stopped_because = reason_to_stop(now, settings)
    while stopped_because is None:
        keep_going()
        before = dict(now.seconds)
        share = 1 - now.update / settings.updates if settings.anneal else 1.0
        facts = {
            "train/learning_rate": learner.set_learning_rate(share),
            "train/kl_coef": now.kl_coef,
        }

        # 3.1 Sample and score.
        members = next_prompts(now.prompts_used, settings, len(prompts))
        now.prompts_used += settings.prompts_per_update
        curriculum.begin(now.update)
        episodes = play_episodes(learner, task, members, generators["sampling"], now.timed)
        pieces = None
        if noted is not None:
            pieces = noted.take(episodes.prompts, episodes.sampled.texts, team)
        scores = shape_scores(episodes.judged_scores, now.scores, settings)
        facts |= episode_facts(episodes, len(members), settings) | curriculum.end(learner)
        now.reward = curriculum.state()
        give_back_freed()

        # 3.2 Measure, then rewards and advantages.
        with now.timed("measure"):
            rollouts, measured = make_rollouts(
                learner,
                episodes.sampled,
                scores,
                now.kl_coef,
                episodes=episodes,
                replay=replay,
                pieces=pieces,
            )
        facts |= measured
        give_back_freed()
        team.check_alike("rollouts", [rollouts.tokens.prompt_ids, rollouts.advantages])

        # 3.3 Optimizer steps.
        try:
            with now.timed("train"):
                facts = train_on(learner, rollouts, generators["shuffling"]) | facts
        except NotFinite as error:
            alarm = not_finite(now.update + 1, str(error))
            now.alarms.append(alarm)
            report({"update": alarm.update, "alarm": alarm.name, "found": alarm.found})
            if now.update == 0 or choose_update(now.evaluations, settings) == 0:
                raise TrainingError(f"training cannot go on: {alarm}") from error
            stopped_because = alarm.found
            break

        give_back_freed()

        # 3.4 The coefficient, the metrics, the alarms.
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
        facts |= peak_memory(learner.policy.device)

        # 3.5 Watch prompts, checkpoint.
        is_last = now.update == settings.updates
        looks = is_last or now.update % settings.evaluate_every == 0
        if looks:
            look_at_watch_prompts()
            facts |= watch_facts(now.evaluations[-1])
        now.history.append(checked(facts))
        report({"update": now.update, "updates": settings.updates, **now.history[-1]})
        raise_alarms(now, settings, report)
        is_best = looks and choose_update(now.evaluations, settings) == now.update
        if is_last or is_best or now.update % settings.checkpoint_every == 0:
            write_checkpoint()
        stopped_because = reason_to_stop(now, settings)

    # 4. What comes out.
    keep_going()
    chosen, reward_state = load_chosen(checkpoints, learner, now, settings)
    trained = Policy(learner.saved_model, learner.policy.tokenizer)
    if team.is_main:
        save_policy(trained, output_dir / "policy", base_digest=learner.base_digest)
    look = next(e for e in now.evaluations if e.update == chosen)
    result = TrainingResult(
        model_path=str(output_dir / "policy"),
        reward_model_path=None if value_init is None else str(value_init),
        feedback_count=feedback_count,
        chosen_update=chosen,
        stopped_because=stopped_because,
        final_reward_mean=look.score_mean,
        final_reward_std=look.score_std,
        training_steps=now.optimizer_steps,
        reward_history=tuple(m["rollout/score_mean"] for m in now.history),
        kl_history=tuple(m["rollout/kl_per_completion"] for m in now.history),
        loss_history=tuple(m["train/loss"] for m in now.history),
        history=tuple(now.history),
        evaluations=tuple(now.evaluations),
        alarms=tuple(now.alarms),
        seconds=dict(now.seconds),
        resumed_from=None if latest is None else latest.update,
        fingerprint=fingerprint,
        settings=asdict(settings),
        reward_state=reward_state,
    )
    if not team.is_main:
        team.wait()
        return result
    try:
        drawn = draw_plots(result, output_dir / "plots")
        result = replace(result, plots=tuple(f"plots/{name}" for name in drawn))
    except ImportError:  # a bare GPU machine needs no matplotlib; the curves are in the result
        report({"update": now.update, "plots": "not drawn: matplotlib is not installed"})
    keep_going()
    result.save(result_path)
    team.wait()
    return result
