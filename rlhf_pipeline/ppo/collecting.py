"""Prompts to scored completions: what is asked in an update, what is sampled, who judges it.

Input is checked here too, before anything is trained on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.evaluation.metrics import repetition
from rlhf_pipeline.policy.chat import encode_prompts
from rlhf_pipeline.policy.loading import Policy, text_config
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.processes import Team
from rlhf_pipeline.ppo.rollout import (
    Episodes,
    RolloutEngine,
    SampledCompletions,
    Tokens,
    completion_texts,
    sample_completions,
    score_completions,
)
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.records import (
    Prompt,
    RewardFunction,
    RewardInput,
    ScoreMoments,
    SharedReward,
    SimulatedUser,
    checked_answers,
    checked_scores,
)

PROBES = 4  # completions the reward functions are tried on before training


@dataclass(frozen=True)
class Task:
    """What is asked, who judges the answers, and what samples them."""

    prompts: Sequence[Prompt]
    encoded: Sequence[Sequence[int]]  # the prompts as tokens
    reward: RewardFunction
    user: SimulatedUser | None = None
    final_reward: RewardFunction | None = None
    engine: RolloutEngine = sample_completions


def encode_checked(
    policy: Policy, prompts: Sequence[Prompt], settings: PpoSettings, name: str
) -> list[list[int]]:
    """Return the prompts' tokens; raises TrainingError where there are none or one is too long."""
    return encode_within(policy.tokenizer, prompts, settings, name)


def encode_within(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], settings: PpoSettings, name: str
) -> list[list[int]]:
    """Return what `encode_checked` does, where no policy is loaded."""
    if not prompts:
        raise TrainingError(f"PPO needs at least one of {name}, found none; collect some")
    limit = settings.max_prompt_tokens
    if settings.long_prompts == "keep_latest":
        return encode_prompts(tokenizer, prompts, max_tokens=limit)
    encoded = encode_prompts(tokenizer, prompts, max_tokens=10**9)
    long = [i for i, row in enumerate(encoded) if len(row) > limit]
    if long:
        raise TrainingError(
            f"{name} must have at most policy.max_prompt_tokens = {limit} tokens, found "
            f"{len(long)} longer (number {long[0]} has {len(encoded[long[0]])}); shorten them, "
            "raise policy.max_prompt_tokens within the policy's context, or set "
            "ppo.long_prompts to keep_latest"
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


def _order(count: int, seed: int, passes: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + passes)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def sample_for(
    learner: Learner,
    encoded: Sequence[Sequence[int]],
    generator: torch.Generator,
    engine: RolloutEngine = sample_completions,
) -> SampledCompletions:
    """Return one completion per encoded prompt, sampled by the policy as it is now."""
    settings, team = learner.settings, learner.team

    def drawn(rows: Sequence[Sequence[int]], generator: torch.Generator) -> SampledCompletions:
        with learner.autocast():
            return engine(
                learner.policy,
                rows,
                max_completion_tokens=settings.max_completion_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                at_once=settings.completions_at_once,
                generator=generator,
            )

    if team.size == 1:
        return drawn(encoded, generator)
    # Fewer rows than processes: each draws them all, and the main one's count.
    few = len(encoded) < team.size
    mine = slice(0, len(encoded)) if few else team.span(len(encoded))
    # Rows draw in order: a share's numbers begin where those of the rows before it end.
    own = torch.Generator()
    own.set_state(generator.get_state())
    torch.rand(mine.start, settings.max_completion_tokens, generator=own)
    torch.rand(len(encoded), settings.max_completion_tokens, generator=generator)
    sampled = drawn(encoded[mine], own)
    tokens, keep = sampled.tokens, slice(0, 0 if few and not team.is_main else None)
    support = tokens.support
    together = Tokens(
        team.gather(tokens.prompt_ids[keep], on_the_left=True),
        team.gather(tokens.prompt_mask[keep], on_the_left=True),
        team.gather(tokens.completion_ids[keep]),
        team.gather(tokens.completion_mask[keep]),
        None if support is None else team.gather(support[keep]),
    )
    likeliest = sampled.likeliest
    return SampledCompletions(
        together,
        team.gather(sampled.logprobs[keep]),
        completion_texts(learner.policy, together),
        None if likeliest is None else team.gather(likeliest[keep]),
    )


def score_together(
    learner: Learner,
    reward: RewardFunction,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    *,
    name: str,
) -> list[float]:
    """Return one raw score per completion, as `score_completions`; each process asks for a share.

    A reward must therefore judge completions one by one, not against each other.
    """
    items = [RewardInput(p, c) for p, c in zip(prompts, completions, strict=True)]
    return list(_in_shares(learner.team, reward, name)(items))


def _in_shares(team: Team, reward: RewardFunction, name: str) -> RewardFunction:
    """Return the reward as a team asks it: each process for a share, and each hears every score."""

    def asked(items: Sequence[RewardInput], /) -> list[float]:
        mine = items[team.span(len(items))]
        if isinstance(reward, SharedReward):  # asked also where mine is empty
            told, _ = reward.of_share(mine, team.gather_numbers)
            scores = checked_scores(lambda _: told, mine, name=name, error=TrainingError)
        else:
            scores = checked_scores(reward, mine, name=name, error=TrainingError)
        return team.gather_numbers(scores)

    return asked


def _user_in_shares(team: Team, user: SimulatedUser) -> SimulatedUser:
    """Return the user as a team asks them: each process in a share of conversations, all hear all.

    So each conversation is answered once, and goes on alike in every process.
    """

    def asked(conversations: Sequence[Prompt], /) -> list[str | None]:
        mine = conversations[team.span(len(conversations))]
        return team.gather_texts(checked_answers(user, mine, TrainingError))

    return asked


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
            scores = score_together(learner, task.reward, prompts, sampled.texts, name="proxy")
        n = len(members)
        return Episodes(sampled, prompts, scores, [True] * n, [0] * n, [-1] * n)

    from rlhf_pipeline.ppo.environment import ChatTask, ChatVectorEnv, play

    team, user = learner.team, task.user

    def together(reward: RewardFunction | None, name: str) -> RewardFunction | None:
        return reward if reward is None or team.size == 1 else _in_shares(team, reward, name)

    at_the_end = settings.reward_timing == "end"
    chat = ChatTask(
        tokenizer=learner.policy.tokenizer,
        prompts=task.prompts,
        vocabulary=text_config(learner.policy.model.config).vocab_size,
        user=user if user is None or team.size == 1 else _user_in_shares(team, user),
        turn_reward=together(None if at_the_end else task.reward, "turn"),
        episode_reward=together(task.reward if at_the_end else task.final_reward, "episode"),
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


def episode_facts(
    episodes: Episodes, conversations: int, settings: PpoSettings
) -> dict[str, float]:
    scores = episodes.judged_scores
    facts = {
        "rollout/score_mean": statistics.fmean(scores),
        "rollout/score_std": statistics.pstdev(scores),
        "rollout/repetition": statistics.fmean(map(repetition, episodes.sampled.texts)),
    }
    if settings.max_turns > 1:
        facts["rollout/turns_mean"] = len(episodes.turn) / conversations
        facts["rollout/conversation_score"] = math.fsum(scores) / conversations
    return facts
