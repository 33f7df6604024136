"""`train_ppo`: the loop, to be read straight down. The arithmetic is in the modules it calls.

A run owns output_dir: checkpoints/ while it goes on; policy/ (a plain transformers folder), plots/
and result.json when it has ended. Killed at any instant and called again with the same arguments
it goes on from its last checkpoint and, on a CPU, ends with the very same weights. Launched several
times at once (processes.py), one process writes and all end with one policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlhf_pipeline.errors import ConfigError, LogitsNotFinite, TrainingError
from rlhf_pipeline.files import remove_half_written
from rlhf_pipeline.policy.adapters import SharedBase
from rlhf_pipeline.policy.loading import Policy, save_policy
from rlhf_pipeline.ppo import checkpoint
from rlhf_pipeline.ppo.learner import build_learner, saved_model
from rlhf_pipeline.ppo.optimising import NotFinite
from rlhf_pipeline.ppo.plots import draw_plots
from rlhf_pipeline.ppo.processes import join_team
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.rollout import RolloutEngine, sample_completions
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.state import restore_state, run_fingerprint, write_state
from rlhf_pipeline.ppo.updating import begin, checked_training, result_of, tell, update
from rlhf_pipeline.ppo.watching import (
    choose_update,
    load_chosen,
    raise_not_finite,
    reason_to_stop,
    write_samples,
)
from rlhf_pipeline.records import Progress, Prompt, RewardFunction, SimulatedUser, ignore_progress


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
    replaces_others: bool = False,
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
    Checkpoints of another run (other models, prompts or settings) in output_dir are refused; with
    replaces_others they make room: for whoever asks in one folder until it is right.
    `keep_going` is called before every update and every write, and raises to stop the run.

    1. Load the models and check prompts and rewards before anything is trained.
    2. Go on from the last checkpoint, or look at the watch prompts and write checkpoint 0.
    3. Until there is a reason to stop: one update (updating.py), every few updates a look at the
       watch prompts, alarms, a checkpoint.
    4. Load the chosen update's weights, save them as the policy, draw the plots, write the result.

    A finished run returns its result again. Raises ConfigError for the estimator of another
    function, TrainingError before training if the input cannot be trained on, and later if the
    ratio is not 1, a score is not finite or nothing usable came out.
    """
    if settings.estimator == "dpo":
        raise ConfigError("ppo.estimator must be gae or rloo here, found dpo; call train_dpo")
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
    learner.team = team = replace(team, keep_up=learner.keep_up)
    training = checked_training(
        learner,
        reward=reward,
        stopping=stopping,
        prompts=prompts,
        watch_prompts=watch_prompts,
        user=user,
        final_reward=final_reward,
        engine=engine,
    )
    generators, replay = training.generators, training.replay

    def write_checkpoint() -> None:
        keep_going()
        team.check_alike("weights", learner.trainable().values())
        now = training.now
        with now.timed("checkpoint"):
            if team.is_main:
                write_state(checkpoints, learner, now, generators, replay, fingerprint)
                best = choose_update(now.evaluations, settings)
                checkpoint.retain(checkpoints, latest=settings.keep_checkpoints, best=[best])
            team.wait()

    def write_down() -> None:
        if team.is_main:
            write_samples(output_dir / "samples.jsonl", training.now.evaluations)

    # 2. Where to begin.
    if team.is_main:
        remove_half_written(output_dir)
    team.wait()
    latest = checkpoint.latest_checkpoint(checkpoints) if resume else None
    team.wait()  # until all have read it
    if latest is not None and replaces_others and latest.state["fingerprint"] != fingerprint:
        keep_going()
        report({"update": latest.update, "checkpoints": "those of another run make room"})
        latest = None
    if latest is not None:
        training.now = restore_state(latest, learner, generators, replay, fingerprint)
        training.curriculum.restore(training.now.reward)
    if team.is_main:
        checkpoint.remove_later(checkpoints, None if latest is None else latest.update)
    if latest is None:
        begin(training)
        write_down()
        write_checkpoint()
    now = training.now

    # 3. The loop.
    stopped_because = reason_to_stop(now, settings)
    while stopped_because is None:
        keep_going()
        number = now.update + 1
        is_last = number == settings.updates
        looks = is_last or number % settings.evaluate_every == 0
        try:
            facts = update(training)
            tell(training, facts, report, looks=looks)
        except (NotFinite, LogitsNotFinite) as error:
            alarm = raise_not_finite(now, number, error, report)
            # Of the logits each process knows its own share's alone: they would part here.
            parts = isinstance(error, LogitsNotFinite) and team.size > 1
            if parts or now.update == 0 or choose_update(now.evaluations, settings) == 0:
                raise TrainingError(f"training cannot go on: {alarm}") from error
            stopped_because = alarm.found
            break
        if looks:
            write_down()
        is_best = looks and choose_update(now.evaluations, settings) == now.update
        if is_last or is_best or now.update % settings.checkpoint_every == 0:
            write_checkpoint()
        stopped_because = reason_to_stop(now, settings)

    # 4. What comes out.
    keep_going()
    chosen, reward_state = load_chosen(checkpoints, learner, now, settings)
    if team.is_main:
        trained = Policy(saved_model(learner, policy_dir, reference_dir), learner.policy.tokenizer)
        save_policy(trained, output_dir / "policy", base_digest=learner.base_digest)
    result = result_of(
        training,
        chosen,
        policy=output_dir / "policy",
        value_init=value_init,
        stopped_because=stopped_because,
        fingerprint=fingerprint,
        resumed_from=None if latest is None else latest.update,
        reward_state=dict(reward_state),
        feedback_count=feedback_count,
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
