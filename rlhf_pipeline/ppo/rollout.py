"""Prompts to rollouts: sample, score, apply the EOS trick, turn scores and KL into rewards.

Letters: B rollouts, P prompt tokens (padded on the left), T completion tokens (padded on the
right). Masks are True on real tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.policy.chat import decode_completions
from rlhf_pipeline.policy.loading import Policy
from rlhf_pipeline.policy.sampling import decode, pad_left
from rlhf_pipeline.ppo.advantages import counted
from rlhf_pipeline.records import Prompt, RewardFunction, RewardInput, checked_scores


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompts and their completions as two rectangles."""

    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P)
    completion_ids: Tensor  # (B, T)
    completion_mask: Tensor  # (B, T)
    support: Tensor | None = None  # (B, T, V / 8), packed: what top_k and top_p left in reach

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def rows(self, members: Tensor) -> Tokens:
        """Return some of the rollouts, without the columns that are padding in all of them."""
        prompt_mask, completion_mask = self.prompt_mask[members], self.completion_mask[members]
        P = self.prompt_ids.shape[1] - int(prompt_mask.sum(1).max())
        T = max(int(completion_mask.sum(1).max()), 1)
        return Tokens(
            self.prompt_ids[members, P:],
            prompt_mask[:, P:],
            self.completion_ids[members, :T],
            completion_mask[:, :T],
            None if self.support is None else self.support[members, :T],
        )


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What one update learns from."""

    tokens: Tokens
    logprobs: Tensor  # (B, T), nats, PPO's old log-probabilities: those of sampling, as a rule
    reference_logprobs: Tensor  # (B, T), nats, at the same temperature
    values: Tensor  # (B, T), the critic's before the update; 0 where there is none
    rewards: Tensor  # (B, T), KL penalty, plus the score on the last token
    advantages: Tensor  # (B, T)
    returns: Tensor  # (B, T), the critic's targets
    weights: Tensor | None = None  # (B, T), importance weights; None where all are 1

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, members: Tensor) -> Rollouts:
        """Return some of the rollouts, without the columns that are padding in all of them."""
        tokens = self.tokens.rows(members)
        T = tokens.completion_ids.shape[1]
        return self._changed(tokens, lambda numbers: numbers[members, :T])

    def widened(self, prompt: int, completion: int) -> Rollouts:
        """Return the rollouts with padding up to so many columns of prompts and completions."""
        tokens = self.tokens
        before = (prompt - tokens.prompt_ids.shape[1], 0)
        after = (0, completion - tokens.completion_ids.shape[1])
        support = None if tokens.support is None else pad(tokens.support, (0, 0, *after))
        wide = Tokens(
            pad(tokens.prompt_ids, before),
            pad(tokens.prompt_mask, before),
            pad(tokens.completion_ids, after),
            pad(tokens.completion_mask, after),
            support,
        )
        return self._changed(wide, lambda numbers: pad(numbers, after))

    def tensors(self) -> list[Tensor]:
        """Return all tensors there are, in order."""
        everything = [getattr(part, f.name) for part in (self.tokens, self) for f in fields(part)]
        return [one for one in everything if isinstance(one, Tensor)]

    def _changed(self, tokens: Tokens, change: Callable[[Tensor], Tensor]) -> Rollouts:
        """Return these with other tokens, and numbers (B, T) as the change has them."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tokens"}
        found: dict[str, Any] = {
            name: None if one is None else change(one) for name, one in numbers.items()
        }
        return replace(self, tokens=tokens, **found)


def join_rows(parts: Sequence[Tensor], *, on_the_left: bool = False) -> Tensor:
    """Return tensors (B, width, …) below each other, the narrower ones filled up with 0."""
    width = max(part.shape[1] for part in parts)
    joined = parts[0].new_zeros(sum(map(len, parts)), width, *parts[0].shape[2:])
    for part, rows in zip(parts, torch.split(joined, [len(part) for part in parts]), strict=True):
        start = width - part.shape[1] if on_the_left else 0
        rows[:, start : start + part.shape[1]] = part
    return joined


def join_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Return the rows of all parts, in order; what is padding is for the masks to say."""
    support = [part.support for part in parts if part.support is not None]
    return Tokens(
        join_rows([part.prompt_ids for part in parts], on_the_left=True),
        join_rows([part.prompt_mask for part in parts], on_the_left=True),
        join_rows([part.completion_ids for part in parts]),
        join_rows([part.completion_mask for part in parts]),
        join_rows(support) if support else None,
    )


@dataclass(frozen=True, slots=True)
class SampledCompletions:
    """Completions with what sampling knows of them."""

    tokens: Tokens
    logprobs: Tensor  # (B, T)
    texts: list[str]
    likeliest: Tensor | None = None  # (B, T) bool, Sampled's; None where an engine does not say


def join_sampled(parts: Sequence[SampledCompletions]) -> SampledCompletions:
    """Return the completions of all parts, in order."""
    likeliest = [part.likeliest for part in parts if part.likeliest is not None]
    return SampledCompletions(
        join_tokens([part.tokens for part in parts]),
        join_rows([part.logprobs for part in parts]),
        [text for part in parts for text in part.texts],
        join_rows(likeliest) if len(likeliest) == len(parts) else None,
    )


@dataclass(frozen=True, slots=True)
class Episodes:
    """Completions, what they were given for it, and where each stands in its conversation.

    A list has one entry per completion. Where conversations have one turn, next_turn is -1.
    """

    sampled: SampledCompletions
    prompts: list[Prompt]  # what each answers
    scores: list[float]  # raw; 0 where nothing judged it
    judged: list[bool]
    turn: list[int]  # from 0
    next_turn: list[int]  # which completion is the same conversation's next turn; -1 after the last

    @property
    def judged_scores(self) -> list[float]:
        """Return the scores that a reward gave."""
        return [score for score, judged in zip(self.scores, self.judged, strict=True) if judged]

    def score_from(self, i: int) -> float:
        """Return what completion i was given, or, as nothing judged it, its conversation later."""
        while not self.judged[i] and self.next_turn[i] >= 0:
            i = self.next_turn[i]
        return self.scores[i]


class RolloutEngine(Protocol):
    """Whatever samples a policy's completions: this process, or another engine with its weights.

    An engine whose arithmetic is not the trainer's wants ppo.importance_cap.
    """

    def __call__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        *,
        max_completion_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        at_once: int,
        generator: torch.Generator,
    ) -> SampledCompletions:
        """Return one completion per encoded prompt, in order, on the policy's device."""
        ...


def sample_completions(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    max_completion_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    at_once: int,
    generator: torch.Generator,
) -> SampledCompletions:
    """Return one completion per encoded prompt, in order: the engine that runs in this process.

    Every row's random numbers are drawn beforehand from `generator`, on the CPU, so neither
    `at_once` nor the device's own generator decides what is sampled.
    """
    T = max_completion_tokens
    prompt_ids, prompt_mask = pad_left(prompts, policy.pad_id)
    prompt_ids, prompt_mask = prompt_ids.to(policy.device), prompt_mask.to(policy.device)
    uniforms = torch.rand(len(prompts), T, generator=generator).to(policy.device)
    ids = torch.full((len(prompts), T), policy.pad_id, device=policy.device)
    mask = torch.zeros(len(prompts), T, dtype=torch.bool, device=policy.device)
    logprobs = torch.zeros(len(prompts), T, device=policy.device)
    likeliest = torch.zeros_like(mask)
    support: Tensor | None = None
    for start in range(0, len(prompts), at_once):
        some = slice(start, start + at_once)
        sampled = decode(
            policy.model,
            prompt_ids[some],
            prompt_mask[some],
            uniforms[some],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_id=policy.eos_id,
            pad_id=policy.pad_id,
            keeps_support=True,
        )
        longest = sampled.completion_ids.shape[1]
        ids[some, :longest] = sampled.completion_ids
        mask[some, :longest] = sampled.completion_mask
        logprobs[some, :longest] = sampled.logprobs
        likeliest[some, :longest] = sampled.likeliest
        if sampled.support is not None:
            if support is None:
                support = sampled.support.new_zeros(len(prompts), T, sampled.support.shape[2])
            support[some, :longest] = sampled.support
    longest = max(int(mask.sum(1).max()), 1)
    if support is not None:
        support = support[:, :longest]
    tokens = Tokens(prompt_ids, prompt_mask, ids[:, :longest], mask[:, :longest], support)
    texts = completion_texts(policy, tokens)
    return SampledCompletions(tokens, logprobs[:, :longest], texts, likeliest[:, :longest])


def completion_texts(policy: Policy, tokens: Tokens) -> list[str]:
    """Return what the completions say."""
    lengths = tokens.completion_mask.sum(1).tolist()
    ids = tokens.completion_ids.tolist()
    rows = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    return decode_completions(policy.tokenizer, rows)


def score_completions(
    reward: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[str], *, name: str
) -> list[float]:
    """Return one finite raw score per completion; raises TrainingError if the reward gives others.

    `name` says in the message whose scores they are.
    """
    items = [RewardInput(p, c) for p, c in zip(prompts, completions, strict=True)]
    return checked_scores(reward, items, name=name, error=TrainingError)


def ends_with_stop_token(tokens: Tokens, stop_id: int) -> Tensor:
    """Return (B,) bool: the completion itself, not its prompt or padding, holds the stop token."""
    return ((tokens.completion_ids == stop_id) & tokens.completion_mask).any(1)


def apply_eos_trick(scores: Tensor, ended: Tensor, missing_eos_score: float | None) -> Tensor:
    """Return scores (B,) where completions that did not end get missing_eos_score at most.

    None leaves all as they are. Source: N+ (arXiv:2403.17031), the "EOS trick"; there it stands in
    for lower scores too, so what a floor refuses would gain by not ending.
    """
    if missing_eos_score is None:
        return scores
    return torch.where(ended, scores, scores.clamp(max=missing_eos_score))


def rewards_per_token(
    scores: Tensor, kl: Tensor, completion_mask: Tensor, *, kl_coef: float
) -> Tensor:
    """Return (B, T) rewards: -kl_coef * kl on every token, plus the score on the last real one.

    scores is (B,), kl (B, T). The last real token is the end token where there is one. A row
    without tokens has nothing to reward. Source: arXiv:1909.08593 eq. 2.
    """
    rewards = counted(-kl_coef * kl, completion_mask)
    positions = torch.arange(completion_mask.shape[1], device=scores.device)
    last = torch.where(completion_mask, positions, -1).amax(1, keepdim=True)
    is_last = (positions == last) & completion_mask
    return rewards + torch.where(is_last, scores[:, None].to(rewards.dtype), 0.0)


def importance_weights(
    logprobs: Tensor, sampled_logprobs: Tensor, completion_mask: Tensor, *, cap: Tensor | float
) -> Tensor:
    """Return (B, T) weights min(exp(logprobs - sampled_logprobs), cap), 0 outside the mask.

    They make tokens that one engine sampled count as the other would have sampled them, with
    bounded variance. A cap for each rollout has shape (B, 1).
    Source: E. Ionides, "Truncated Importance Sampling", JCGS 17(2), 2008.
    """
    weights = (logprobs - sampled_logprobs).exp()
    weights = weights.minimum(torch.as_tensor(cap, dtype=weights.dtype, device=weights.device))
    return counted(weights, completion_mask)


def microbatches(tokens: Tokens, members: Tensor, *, token_budget: int) -> Iterator[Tensor]:
    """Yield the members in groups of like length that hold at most token_budget tokens, padded.

    A group holds at least one rollout. Which group a rollout is in changes speed and memory only.
    """
    prompts = tokens.prompt_mask.sum(1)[members]
    completions = tokens.completion_mask.sum(1)[members]
    order = torch.argsort(prompts + completions, stable=True, descending=True)
    group: list[int] = []
    widest_prompt = widest_completion = 0
    lengths = torch.stack([prompts, completions], 1)[order].tolist()
    for i, (prompt, completion) in zip(order.tolist(), lengths, strict=True):
        wide = max(widest_prompt, prompt) + max(widest_completion, completion)
        if group and wide * (len(group) + 1) > token_budget:
            yield members[group]
            group, widest_prompt, widest_completion = [], 0, 0
        group.append(i)
        widest_prompt = max(widest_prompt, prompt)
        widest_completion = max(widest_completion, completion)
    if group:
        yield members[group]


@torch.no_grad()
def measure(
    function: Callable[[Tokens], Tensor],
    tokens: Tokens,
    *,
    token_budget: int,
    members: Tensor | None = None,
) -> Tensor:
    """Return function(tokens), (B, T) float32 with 0 outside the mask, run in microbatches.

    With `members`, row numbers, only theirs is computed and the other rows are 0.
    """
    result = torch.zeros(tokens.completion_ids.shape, device=tokens.completion_ids.device)
    if members is None:
        members = torch.arange(len(tokens), device=result.device)
    for rows in microbatches(tokens, members, token_budget=token_budget):
        some = tokens.rows(rows)
        numbers = counted(function(some).float(), some.completion_mask)
        result[rows, : numbers.shape[1]] = numbers
    return result
