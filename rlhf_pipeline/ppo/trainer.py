"""`train_ppo`: the loop, to be read straight down. The arithmetic is in the modules it calls.

A run owns output_dir: checkpoints/ while it goes on; policy/ (a plain transformers folder), plots/
and result.json when it has ended. Killed at any instant and called again with the same arguments
it goes on from its last checkpoint and, on a CPU, ends with the very same weights.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from rlhf_pipeline.errors import CheckpointDamaged, TrainingError
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.adapters import SharedBase
from rlhf_pipeline.policy.chat import encode_prompts
from rlhf_pipeline.policy.loading import Policy, save_policy
from rlhf_pipeline.ppo import checkpoint
from rlhf_pipeline.ppo.advantages import (
    estimate_turn_advantages,
    explained_variance,
    leave_one_out_advantages,
    masked_mean,
    scale_to_unit_variance,
    whiten,
)
from rlhf_pipeline.ppo.alarms import Alarm, find_alarms, not_finite
from rlhf_pipeline.ppo.critic import AdapterCritic, SeparateCritic
from rlhf_pipeline.ppo.kl import estimate_kl, next_kl_coef
from rlhf_pipeline.ppo.learner import Learner, build_learner
from rlhf_pipeline.ppo.loss import policy_loss, value_loss
from rlhf_pipeline.ppo.metrics import checked
from rlhf_pipeline.ppo.plots import draw_plots
from rlhf_pipeline.ppo.replay import Collected, Replay
from rlhf_pipeline.ppo.result import Evaluation, TrainingResult
from rlhf_pipeline.ppo.rollout import (
    Episodes,
    RolloutEngine,
    Rollouts,
    SampledCompletions,
    ScoreMoments,
    apply_eos_trick,
    ends_with_stop_token,
    importance_weights,
    measure,
    microbatches,
    rewards_per_token,
    sample_completions,
    score_completions,
)
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.records import (
    Progress,
    Prompt,
    RewardFunction,
    SimulatedUser,
    hashed,
    ignore_progress,
    prompt_to_json,
)

MACHINE_SETTINGS = (
    "device completions_at_once tokens_per_microbatch gradient_checkpointing checkpoint_every "
    "keep_checkpoints"
).split()  # may differ when a run is resumed: they change no result beyond rounding
PROBES = 4  # completions the reward functions are tried on before training


class NotFinite(TrainingError):
    """A gradient is NaN or infinite; no step was taken with it."""


@dataclass
class Progressed:
    """Everything of a run that moves, but weights, optimizer and random states."""

    kl_coef: float
    update: int = 0  # updates made
    prompts_used: int = 0  # the prompt cursor
    optimizer_steps: int = 0
    scores: ScoreMoments = field(default_factory=ScoreMoments)
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the whole as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Progressed:
        """Return what `as_json` described."""
        return cls(
            **{
                **saved,
                "scores": ScoreMoments(**saved["scores"]),
                "evaluations": [Evaluation(**e) for e in saved["evaluations"]],
                "alarms": [Alarm(**a) for a in saved["alarms"]],
            }
        )

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds the block takes to the phase's."""
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed


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
    `keep_going` is called before every update and every write, and raises to stop the run.

    1. Load the models and check prompts and rewards before anything is trained.
    2. Go on from the last checkpoint, or look at the watch prompts and write checkpoint 0.
    3. Until there is a reason to stop:
       3.1 sample completions, or whole conversations, and score them;
       3.2 measure reference log-probabilities and values; make rewards and advantages;
       3.3 take epochs x minibatches optimizer steps; on the first, the ratio must be 1;
       3.4 move the KL coefficient, keep the metrics, look for alarms;
       3.5 every few updates look at the watch prompts; write checkpoints.
    4. Load the chosen update's weights, save them as the policy, draw the plots, write the result.

    A finished run returns its result again. Raises TrainingError before training if the input
    cannot be trained on, and later if the ratio is not 1, a score is not finite or nothing usable
    came out.
    """
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
    encoded = encode_checked(learner.policy, prompts, settings, "prompts")
    watch_encoded = encode_checked(learner.policy, watch_prompts, settings, "watch_prompts")
    check_conversation(settings, user, final_reward)
    rewards = {"proxy": reward, "stopping": stopping, "final": final_reward}
    probe_rewards(learner, encoded, prompts, rewards)
    task = Task(prompts, encoded, reward, user, final_reward, engine)
    watch = replace(task, prompts=watch_prompts, encoded=watch_encoded)
    replay = Replay(settings.replay_updates)
    generators = {
        "sampling": torch.Generator().manual_seed(settings.seed),
        "shuffling": torch.Generator().manual_seed(settings.seed + 1),
    }

    def look_at_watch_prompts() -> None:
        with now.timed("watch"):
            now.evaluations.append(evaluate(learner, watch, stopping, now.update))

    def write_checkpoint() -> None:
        keep_going()
        with now.timed("checkpoint"):
            _write_checkpoint(checkpoints, learner, now, generators, replay, fingerprint)
            best = choose_update(now.evaluations, max_kl=settings.max_kl)
            checkpoint.retain(checkpoints, latest=settings.keep_checkpoints, best=[best])

    # 2. Where to begin.
    if not resume:
        checkpoint.remove_all(checkpoints)
    latest = checkpoint.latest_checkpoint(checkpoints)
    if latest is not None:
        now = _restore(latest, learner, generators, replay, fingerprint)
    else:
        now = Progressed(kl_coef=settings.kl_coef)
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
        episodes = play_episodes(learner, task, members, generators["sampling"], now.timed)
        scores = shape_scores(episodes.judged_scores, now.scores, settings)
        facts |= _episode_facts(episodes, len(members), settings)

        # 3.2 Measure, then rewards and advantages.
        with now.timed("measure"):
            rollouts, measured = make_rollouts(
                learner, episodes.sampled, scores, now.kl_coef, episodes=episodes, replay=replay
            )
        facts |= measured

        # 3.3 Optimizer steps.
        try:
            with now.timed("train"):
                facts = train_on(learner, rollouts, generators["shuffling"]) | facts
        except NotFinite as error:
            alarm = not_finite(now.update + 1, str(error))
            now.alarms.append(alarm)
            report({"update": alarm.update, "alarm": alarm.name, "found": alarm.found})
            if now.update == 0 or choose_update(now.evaluations, max_kl=settings.max_kl) == 0:
                raise TrainingError(f"training cannot go on: {alarm}") from error
            stopped_because = alarm.found
            break

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
        for phase in ("sample", "score", "measure", "train"):
            facts[f"time/{phase}"] = now.seconds[phase] - before.get(phase, 0.0)

        # 3.5 Watch prompts, checkpoint.
        is_last = now.update == settings.updates
        looks = is_last or now.update % settings.evaluate_every == 0
        if looks:
            look_at_watch_prompts()
            facts |= watch_facts(now.evaluations[-1])
        now.history.append(checked(facts))
        report({"update": now.update, "updates": settings.updates, **now.history[-1]})
        _raise_alarms(now, settings, report)
        is_best = looks and choose_update(now.evaluations, max_kl=settings.max_kl) == now.update
        if is_last or is_best or now.update % settings.checkpoint_every == 0:
            write_checkpoint()
        stopped_because = reason_to_stop(now, settings)

    # 4. What comes out.
    keep_going()
    chosen = _load_chosen(checkpoints, learner, now, settings)
    trained = Policy(learner.saved_model, learner.policy.tokenizer)
    save_policy(trained, output_dir / "policy", base_digest=learner.base_digest)
    look = next(e for e in now.evaluations if e.update == chosen)
    result = TrainingResult(
        model_path=str(output_dir / "policy"),
        reward_model_path=None if value_init is None else str(value_init),
        feedback_count=None,
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
    )
    try:
        drawn = draw_plots(result, output_dir / "plots")
        result = replace(result, plots=tuple(f"plots/{name}" for name in drawn))
    except ImportError:  # a bare GPU machine needs no matplotlib; the curves are in the result
        report({"update": now.update, "plots": "not drawn: matplotlib is not installed"})
    keep_going()
    result.save(result_path)
    return result


# --- before training ---------------------------------------------------------------------------


def encode_checked(
    policy: Policy, prompts: Sequence[Prompt], settings: PpoSettings, name: str
) -> list[list[int]]:
    """Return the prompts' tokens; raises TrainingError where there are none or one is too long."""
    if not prompts:
        raise TrainingError(f"PPO needs at least one of {name}, found none; collect some")
    limit = settings.max_prompt_tokens
    if settings.long_prompts == "keep_latest":
        return encode_prompts(policy.tokenizer, prompts, max_tokens=limit)
    encoded = encode_prompts(policy.tokenizer, prompts, max_tokens=10**9)
    long = [i for i, row in enumerate(encoded) if len(row) > limit]
    if long:
        raise TrainingError(
            f"{name} must have at most ppo.max_prompt_tokens = {limit} tokens, found {len(long)} "
            f"longer (number {long[0]} has {len(encoded[long[0]])}); shorten them, raise "
            "ppo.max_prompt_tokens within the policy's context, or set ppo.long_prompts to "
            "keep_latest"
        )
    return encoded


def check_conversation(
    settings: PpoSettings, user: SimulatedUser | None, final_reward: RewardFunction | None
) -> None:
    """Raise TrainingError unless user and rewards are those that the settings speak of."""
    if (settings.max_turns > 1) != (user is not None):
        raise TrainingError(
            "a conversation of several turns needs somebody who answers in between, and one of a "
            f"single turn nobody: found ppo.max_turns {settings.max_turns} and "
            f"{'no user' if user is None else 'a user'}; pass a SimulatedUser or change the setting"
        )
    if final_reward is not None and (settings.max_turns == 1 or settings.reward_timing == "end"):
        raise TrainingError(
            "a final reward comes beside one that judges every turn of several: found "
            f"ppo.max_turns {settings.max_turns} and ppo.reward_timing {settings.reward_timing}; "
            "put the two into one reward, or change the setting"
        )


def probe_rewards(
    learner: Learner,
    encoded: Sequence[Sequence[int]],
    prompts: Sequence[Prompt],
    rewards: Mapping[str, RewardFunction | None],
) -> None:
    """Score a few completions with every reward, so a broken one stops the run before it trains."""
    sampled = sample_for(learner, encoded[:PROBES], torch.Generator().manual_seed(0))
    for name, reward in rewards.items():
        if reward is not None:
            score_completions(reward, prompts[:PROBES], sampled.texts, name=name)


def run_fingerprint(
    models: Sequence[str | Path],
    rewards: Sequence[object],
    prompts: Sequence[Prompt],
    settings: PpoSettings,
) -> str:
    """Return a digest of what decides a run's result: models, rewards, prompts and settings.

    Folders count by their files; rewards, and whoever else takes part, by their `version` where
    they have one.
    """
    decisive = {k: v for k, v in asdict(settings).items() if k not in MACHINE_SETTINGS}
    files = [str(folder_sha256(m)) if Path(m).is_dir() else str(m) for m in models]
    versions = [str(getattr(r, "version", r is not None)) for r in rewards]
    texts = [prompt_to_json(p) for p in prompts]
    return hashed(str(sorted(decisive.items())), *files, *versions, *texts)


# --- one update --------------------------------------------------------------------------------


def next_prompts(used: int, settings: PpoSettings, prompt_count: int) -> list[int]:
    """Return the indices of the next update's prompts, siblings of rloo side by side.

    Every pass over the prompts has its own order, which follows from the seed alone, so the cursor
    `used` is all that a checkpoint needs.
    """
    members: list[int] = []
    for i in range(used, used + settings.prompts_per_update):
        passes, place = divmod(i, prompt_count)
        order = _order(prompt_count, settings.seed, passes)
        members += [order[place]] * settings.completions_per_prompt
    return members


def sample_for(
    learner: Learner,
    encoded: Sequence[Sequence[int]],
    generator: torch.Generator,
    engine: RolloutEngine = sample_completions,
) -> SampledCompletions:
    """Return one completion per encoded prompt, sampled by the policy as it is now."""
    settings = learner.settings
    with learner.autocast():
        return engine(
            learner.policy,
            encoded,
            max_completion_tokens=settings.max_completion_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            at_once=settings.completions_at_once,
            generator=generator,
        )


@dataclass(frozen=True)
class Task:
    """What is asked, who judges the answers, and what samples them."""

    prompts: Sequence[Prompt]
    encoded: Sequence[Sequence[int]]  # the prompts as tokens
    reward: RewardFunction
    user: SimulatedUser | None = None
    final_reward: RewardFunction | None = None
    engine: RolloutEngine = sample_completions


def play_episodes(
    learner: Learner,
    task: Task,
    members: Sequence[int],
    generator: torch.Generator,
    timed: Callable[[str], AbstractContextManager[None]],
) -> Episodes:
    """Return scored completions of the prompts with these numbers: one each, or conversations.

    Conversations are played in the vectorised environment, all of them side by side.
    """
    settings = learner.settings

    def sample(rows: Sequence[Sequence[int]]) -> SampledCompletions:
        return sample_for(learner, rows, generator, task.engine)

    if settings.max_turns == 1:
        prompts = [task.prompts[i] for i in members]
        with timed("sample"):
            sampled = sample([task.encoded[i] for i in members])
        with timed("score"):
            scores = score_completions(task.reward, prompts, sampled.texts, name="proxy")
        n = len(members)
        return Episodes(sampled, prompts, scores, [True] * n, [0] * n, [-1] * n)

    from rlhf_pipeline.ppo.environment import ChatTask, ChatVectorEnv, play

    at_the_end = settings.reward_timing == "end"
    chat = ChatTask(
        tokenizer=learner.policy.tokenizer,
        prompts=task.prompts,
        vocabulary=learner.policy.model.config.vocab_size,
        user=task.user,
        turn_reward=None if at_the_end else task.reward,
        episode_reward=task.reward if at_the_end else task.final_reward,
        max_turns=settings.max_turns,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_completion_tokens=settings.max_completion_tokens,
        long_prompts=settings.long_prompts,
    )
    return play(ChatVectorEnv(chat, len(members)), sample, members, timed=timed)


def shape_scores(raw: Sequence[float], moments: ScoreMoments, settings: PpoSettings) -> list[float]:
    """Return the scores after normalisation and clipping; `moments` takes them into account."""
    scores = list(raw)
    if settings.score_normalisation == "running":
        moments.add(scores)
        scores = moments.normalised(scores)
    if settings.score_clip is not None:
        bound = settings.score_clip
        scores = [min(max(score, -bound), bound) for score in scores]
    return scores


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
    reference_logprobs = measure(
        learner.reference_logprobs, tokens, token_budget=settings.tokens_per_microbatch
    )
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
) -> tuple[Rollouts, dict[str, float]]:
    """Return rollouts with rewards and advantages, and the facts of the rollout phase.

    The log-probabilities of sampling are the old log-probabilities: no pass recomputes them, but
    with importance_cap. Those of earlier updates in `replay`, which takes the fresh ones in, are
    held against the policy and the critic as they are now. Facts are of the fresh ones alone.
    """
    settings = learner.settings
    replay = replay or Replay(0)
    fresh = collect(learner, sampled, scores, episodes)
    batch, ages = replay.beside(fresh)
    replay.keep(fresh)
    tokens, mask, reference_logprobs = (
        batch.tokens,
        batch.tokens.completion_mask,
        batch.reference_logprobs,
    )
    budget = settings.tokens_per_microbatch
    values = measure(learner.values, tokens, token_budget=budget)
    logprobs, weights, facts = old_logprobs(learner, batch, ages)

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
        advantages, returns = estimate_turn_advantages(
            rewards,
            values,
            mask,
            batch.turn,
            batch.next_turn,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
            turn_gamma=settings.turn_gamma,
            turn_gae_lambda=settings.turn_gae_lambda,
        )
    else:
        advantages = leave_one_out_advantages(
            rewards, mask, completions_per_prompt=settings.completions_per_prompt
        )
        returns = torch.zeros_like(rewards)
    if settings.whiten_advantages:
        advantages = whiten(advantages, mask)

    n, said = len(fresh), fresh.tokens.completion_mask
    log_ratio = estimate_kl(fresh.logprobs, fresh.reference_logprobs, "k1")
    ended = ends_with_stop_token(fresh.tokens, learner.policy.eos_id)
    facts |= {
        "rollout/reward_mean": float(totals[:n].mean()),
        "rollout/kl_mean": float(masked_mean(log_ratio, said)),
        "rollout/kl_per_completion": float(log_ratio.sum(1).mean()),
        "rollout/entropy": -float(masked_mean(fresh.logprobs, said)),
        "rollout/length_mean": float(said.sum(1).float().mean()),
        "rollout/eos_share": float(ended.float().mean()),
    }
    if settings.has_critic:
        facts["critic/explained_variance"] = explained_variance(values[:n], returns[:n], mask[:n])
    rollouts = Rollouts(
        tokens, logprobs, reference_logprobs, values, rewards, advantages, returns, weights
    )
    return rollouts, facts


def old_logprobs(
    learner: Learner, batch: Collected, ages: Tensor
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Return PPO's old log-probabilities, their importance weights (None: all 1), and facts.

    They are sampling's for fresh rollouts (age 0), unless importance_cap is set, and the policy's
    as it is now for replayed ones.
    """
    settings, mask = learner.settings, batch.tokens.completion_mask
    replayed = ages > 0
    remeasured = replayed if settings.importance_cap is None else torch.ones_like(replayed)
    if not bool(remeasured.any()):
        return batch.logprobs, None, {}
    members = remeasured.nonzero()[:, 0]
    now = measure(
        lambda t: learner.logprobs_and_values(t)[0],
        batch.tokens,
        token_budget=settings.tokens_per_microbatch,
        members=members,
    )
    logprobs = torch.where(remeasured[:, None], now, batch.logprobs)
    caps = torch.where(replayed, settings.replay_cap, settings.importance_cap or 1.0)[:, None]
    weights = importance_weights(logprobs, batch.logprobs, mask, cap=caps)
    facts = {}
    gap = (logprobs - batch.logprobs).abs()
    if settings.importance_cap is not None:
        fresh = ~replayed
        facts["policy/logprob_gap"] = float(masked_mean(gap[fresh], mask[fresh]))
    if bool(replayed.any()):
        again = mask[replayed]
        capped = logprobs - batch.logprobs > math.log(settings.replay_cap)
        facts |= {
            "replay/share": float(replayed.float().mean()),
            "replay/staleness": float(ages[replayed].float().mean()),
            "replay/logprob_gap": float(masked_mean(gap[replayed], again)),
            "replay/weight_mean": float(masked_mean(weights[replayed], again)),
            "replay/capped_share": float(masked_mean(capped[replayed].float(), again)),
        }
    return logprobs, weights, facts


def train_on(learner: Learner, rollouts: Rollouts, generator: torch.Generator) -> dict[str, float]:
    """Take epochs x minibatches optimizer steps on the rollouts; return the facts of training.

    Raises TrainingError if the first minibatch shows another policy than the one that sampled, and
    NotFinite before a step with a gradient that is NaN or infinite.
    """
    settings = learner.settings
    steps: list[dict[str, float]] = []
    for _ in range(settings.epochs):
        order = torch.randperm(len(rollouts), generator=generator)
        for members in order.to(rollouts.rewards.device).tensor_split(settings.minibatches):
            facts = accumulate_gradients(learner, rollouts, members)
            if not steps:
                check_first_ratio(facts, settings.ratio_tolerance)
            facts["policy/grad_norm"] = clipped_step(learner)
            steps.append(facts)
    first, last = steps[0], steps[-1]
    means = {n: statistics.fmean(s[n] for s in steps) for n in first if "/" in n}
    return {
        **means,
        "policy/first_ratio": first["ratio"],
        "policy/logprob_gap": first["abs_log_ratio"],
        "policy/last_approx_kl": last["policy/approx_kl"],
    }


def accumulate_gradients(learner: Learner, rollouts: Rollouts, members: Tensor) -> dict[str, float]:
    """Add one minibatch's gradient to the weights' and return its facts.

    Losses are divided by the minibatch's token count, so microbatches add up to the same gradient
    however they are cut.
    """
    settings = learner.settings
    token_count = max(int(rollouts.tokens.completion_mask[members].sum()), 1)
    sums = {"train/loss": 0.0}
    budget = settings.tokens_per_microbatch
    for some in microbatches(rollouts.tokens, members, token_budget=budget):
        tokens = rollouts.tokens.rows(some)
        T = tokens.completion_ids.shape[1]
        logprobs, values = learner.logprobs_and_shared_values(tokens)
        loss, facts = policy_loss(
            logprobs,
            rollouts.logprobs[some, :T],
            rollouts.advantages[some, :T],
            tokens.completion_mask,
            clip_range=settings.clip_range,
            token_count=token_count,
            weights=None if rollouts.weights is None else rollouts.weights[some, :T],
        )
        facts["policy/loss"] = facts["train/loss"] = float(loss.detach())
        if isinstance(learner.critic, (SeparateCritic, AdapterCritic)):
            # The two networks share nothing: one's activations go before the other's come.
            descend(loss)
            loss, values = torch.zeros_like(loss), learner.values(tokens)
        if values is not None:
            critic_loss, critic_facts = value_loss(
                values,
                rollouts.values[some, :T],
                rollouts.returns[some, :T],
                tokens.completion_mask,
                value_clip_range=settings.value_clip_range,
                token_count=token_count,
            )
            facts |= {**critic_facts, "critic/loss": float(critic_loss.detach())}
            facts["train/loss"] += settings.value_coef * facts["critic/loss"]
            loss = loss + settings.value_coef * critic_loss
        descend(loss)
        for name, share in facts.items():
            sums[name] = sums.get(name, 0.0) + share
    return sums


def descend(loss: Tensor) -> None:
    """Add the loss's gradient to the weights'."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped


def check_first_ratio(facts: dict[str, float], tolerance: float) -> None:
    """Raise TrainingError unless the policy that trains is the one that sampled."""
    gap, approx_kl = facts["abs_log_ratio"], facts["policy/approx_kl"]
    if not (gap <= tolerance and abs(approx_kl) <= tolerance):
        raise TrainingError(
            "before the first step of an update the policy must be the one that sampled: needed a "
            f"mean |log ratio| and an approximate KL of at most {tolerance}, found {gap:.4g} and "
            f"{approx_kl:.4g}; look at dropout, temperature, padding and position ids"
        )


def clipped_step(learner: Learner) -> float:
    """Clip the gradient's global norm, step, and return the norm before clipping."""
    weights = [w for group in learner.optimizer.param_groups for w in group["params"]]
    norm = float(clip_grad_norm_(weights, learner.settings.max_grad_norm))
    if not math.isfinite(norm):
        learner.optimizer.zero_grad()
        raise NotFinite("the loss or its gradient")
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    return norm


# --- watching and stopping ---------------------------------------------------------------------


def evaluate(
    learner: Learner, task: Task, stopping: RewardFunction | None, update: int
) -> Evaluation:
    """Return one look at the task's prompts: raw scores, no EOS trick, always the same draws.

    The stopping reward judges what the proxy judged: every turn, or the last one.
    """
    settings = learner.settings
    generator = torch.Generator().manual_seed(settings.seed + 2)
    everyone = range(len(task.prompts))
    episodes = play_episodes(learner, task, everyone, generator, lambda phase: nullcontext())
    sampled = episodes.sampled
    tokens, mask = sampled.tokens, sampled.tokens.completion_mask
    reference_logprobs = measure(
        learner.reference_logprobs, tokens, token_budget=settings.tokens_per_microbatch
    )
    scores = episodes.judged_scores
    stopping_mean = None
    if stopping is not None:
        judged = [i for i, flag in enumerate(episodes.judged) if flag]
        stopping_mean = statistics.fmean(
            score_completions(
                stopping,
                [episodes.prompts[i] for i in judged],
                [sampled.texts[i] for i in judged],
                name="stopping",
            )
        )
    ended = ends_with_stop_token(tokens, learner.policy.eos_id)
    return Evaluation(
        update=update,
        score_mean=statistics.fmean(scores),
        score_std=statistics.pstdev(scores),
        stopping_mean=stopping_mean,
        kl=float(estimate_kl(sampled.logprobs, reference_logprobs, "k1").sum(1).mean()),
        length_mean=float(mask.sum(1).float().mean()),
        eos_share=float(ended.float().mean()),
    )


def choose_update(evaluations: Sequence[Evaluation], *, max_kl: float | None) -> int:
    """Return the update to keep: `updates_by_preference`'s first."""
    return updates_by_preference(evaluations, max_kl=max_kl)[0]


def updates_by_preference(evaluations: Sequence[Evaluation], *, max_kl: float | None) -> list[int]:
    """Return evaluated updates, best first: by stopping score, the earlier one among equals.

    Where there is no stopping reward, later is better. Updates beyond max_kl come last, the one
    nearest to the reference first among them.
    """

    def key(look: Evaluation) -> tuple[bool, float, float]:
        beyond = max_kl is not None and look.kl > max_kl
        if beyond:
            return (True, look.kl, look.update)
        if look.stopping_mean is None:
            return (False, -look.update, 0.0)
        return (False, -look.stopping_mean, look.update)

    return [look.update for look in sorted(evaluations, key=key)]


def reason_to_stop(now: Progressed, settings: PpoSettings) -> str | None:
    """Return why training ends here, or None where it goes on; a function of the history alone."""
    if now.history and settings.max_kl is not None:
        kl = now.history[-1]["rollout/kl_per_completion"]
        if kl > settings.max_kl:
            return f"KL to the reference is {kl:.2f} nats per completion, over {settings.max_kl}"
    looks = [e for e in now.evaluations if e.stopping_mean is not None]
    if settings.patience is not None and looks:
        best = choose_update(looks, max_kl=settings.max_kl)
        waited = sum(e.update > best for e in looks)
        if waited >= settings.patience:
            return (
                f"the stopping score has not risen for {waited} looks; "
                f"it was best after update {best}"
            )
    return "all updates are made" if now.update >= settings.updates else None


# --- checkpoints -------------------------------------------------------------------------------


def _write_checkpoint(
    root: Path,
    learner: Learner,
    now: Progressed,
    generators: dict[str, torch.Generator],
    replay: Replay,
    fingerprint: str,
) -> None:
    trainable = learner.trainable()
    random_tensors, random_facts = checkpoint.random_states(generators)
    parts = {
        part: {n: p for n, p in trainable.items() if n.startswith(f"{part}/")}
        for part in ("policy", "critic")
    }
    checkpoint.write_checkpoint(
        root,
        now.update,
        tensors={
            **parts,
            "optimizer": checkpoint.optimizer_tensors(learner.optimizer, trainable),
            "random": random_tensors,
            "replay": replay.tensors(),
        },
        state={
            "fingerprint": fingerprint,
            "progressed": now.as_json(),
            "learning_rates": [group["lr"] for group in learner.optimizer.param_groups],
            "random": random_facts,
        },
    )


def _restore(
    saved: checkpoint.Checkpoint,
    learner: Learner,
    generators: dict[str, torch.Generator],
    replay: Replay,
    fingerprint: str,
) -> Progressed:
    if saved.state["fingerprint"] != fingerprint:
        raise TrainingError(
            f"the checkpoints beside {saved.path} must be of this run, found those of another "
            "(other models, prompts or settings); take another output_dir, or resume=False to "
            "begin again"
        )
    trainable = learner.trainable()
    weights = {**saved.tensors["policy"], **saved.tensors["critic"]}
    checkpoint.restore_parameters(trainable, weights)
    checkpoint.restore_optimizer(learner.optimizer, trainable, saved.tensors["optimizer"])
    for group, rate in zip(
        learner.optimizer.param_groups, saved.state["learning_rates"], strict=True
    ):
        group["lr"] = rate
    checkpoint.restore_random_states(saved.tensors["random"], saved.state["random"], generators)
    replay.restore(saved.tensors["replay"], learner.policy.device)
    return Progressed.from_json(saved.state["progressed"])


def _load_chosen(root: Path, learner: Learner, now: Progressed, settings: PpoSettings) -> int:
    """Put the chosen update's weights into the policy and return the update."""
    kept = set(checkpoint.checkpoint_updates(root))
    policy_weights = {n: p for n, p in learner.trainable().items() if n.startswith("policy/")}
    for update in updates_by_preference(now.evaluations, max_kl=settings.max_kl):
        if update not in kept:
            continue
        try:
            saved = checkpoint.checkpoint_at(root, update)
        except CheckpointDamaged as error:
            warnings.warn(f"the best checkpoint cannot be taken: {error}", stacklevel=2)
            continue
        checkpoint.restore_parameters(policy_weights, saved.tensors["policy"])
        return update
    raise CheckpointDamaged(
        f"a whole checkpoint of an evaluated update is needed in {root}, found none; "
        "train again with resume=False"
    )


def _raise_alarms(now: Progressed, settings: PpoSettings, report: Progress) -> None:
    """Keep and report alarms that have not been raised before in this run."""
    known = {alarm.name for alarm in now.alarms}
    for alarm in find_alarms(
        now.history,
        kl_target=settings.kl_target,
        max_completion_tokens=settings.max_completion_tokens,
    ):
        if alarm.name not in known:
            now.alarms.append(alarm)
            report({"update": alarm.update, "alarm": alarm.name, "found": alarm.found})


def _episode_facts(
    episodes: Episodes, conversations: int, settings: PpoSettings
) -> dict[str, float]:
    scores = episodes.judged_scores
    facts = {
        "rollout/score_mean": statistics.fmean(scores),
        "rollout/score_std": statistics.pstdev(scores),
    }
    if settings.max_turns > 1:
        facts["rollout/turns_mean"] = len(episodes.turn) / conversations
        facts["rollout/conversation_score"] = math.fsum(scores) / conversations
    return facts


def watch_facts(look: Evaluation) -> dict[str, float]:
    """Return a look at the watch prompts as metrics."""
    facts = {
        "watch/score_mean": look.score_mean,
        "watch/score_std": look.score_std,
        "watch/kl": look.kl,
        "watch/length_mean": look.length_mean,
        "watch/eos_share": look.eos_share,
    }
    if look.stopping_mean is not None:
        facts["watch/stopping_mean"] = look.stopping_mean
    return facts


def _order(count: int, seed: int, passes: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + passes)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
