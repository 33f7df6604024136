"""What one system writes to the prompts of a comparison, and how likely it finds what is written.

One policy is in memory at a time. All sample with the same seed, so a difference between prompts
is paired.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation.metrics import Floats
from rlhf_pipeline.records import EvaluationPrompt, Progress, Prompt

if TYPE_CHECKING:
    import torch

    from rlhf_pipeline.policy.loading import Policy
    from rlhf_pipeline.policy.sampling import Completion
    from rlhf_pipeline.reward.composite import Breakdown

SCORING_BATCH = 32  # completions per forward pass where log-probabilities are looked up


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every system answers."""

    max_completion_tokens: int
    max_prompt_tokens: int
    temperature: float
    seed: int
    batch_size: int
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Answers:
    """What one system wrote, and what it thinks of it and of the references."""

    completions: list[Completion]
    vocabulary: Mapping[str, int]
    logprobs: Floats  # (n,) nats of each of its own completions, at the sampling temperature
    reference_logprobs: Floats  # (n,) nats of each prompt's references together
    reference_tokens: Floats  # (n,)
    kl_to_baseline: Floats  # (n,) log-ratio of its own completions; 0 for the baseline
    seconds: float  # per completion
    memory_mib: float
    said: list[str]  # to the behaviour items, the tries of each together
    scores: dict[str, Floats] = field(default_factory=dict)
    told: dict[int, Breakdown] = field(default_factory=dict)  # by prompt; the composite's


def visit(
    folder: Path,
    prompts: Sequence[EvaluationPrompt],
    others: Mapping[Path, Answers],
    how: Sampling,
    report: Progress,
    asked: Sequence[Prompt],
) -> Answers:
    """Load one policy, let it answer, and weigh the others' answers (the baseline's task)."""
    from rlhf_pipeline.policy.chat import encode_completions, encode_prompts
    from rlhf_pipeline.policy.loading import load_policy

    policy = load_policy(folder, device=how.device, dtype=how.dtype)
    starts = encode_prompts(
        policy.tokenizer, [p.prompt for p in prompts], max_tokens=how.max_prompt_tokens
    )
    if how.max_prompt_tokens + how.max_completion_tokens > policy.context_length:
        raise EvaluationError(
            f"prompt and completion must fit a context of {policy.context_length} tokens, found "
            f"{how.max_prompt_tokens} + {how.max_completion_tokens}; lower one of the two"
        )
    forget_peak(policy.device)
    begun = time.monotonic()
    completions = _answers(policy, [p.prompt for p in prompts], how, report)
    seconds = (time.monotonic() - begun) / len(completions)
    memory = memory_mib(policy.device)
    said = _answers(policy, asked, how, report)
    written = [c.ids for c in completions]
    vocabulary = policy.tokenizer.get_vocab()
    for other, found in others.items():
        if found.vocabulary != vocabulary:
            raise EvaluationError(
                f"policies that are compared need one vocabulary, found {len(found.vocabulary)} "
                f"tokens in {other.name} and {len(vocabulary)} in the baseline, or other ids; "
                "start the candidate from the baseline, or reset the baseline"
            )
        theirs = [c.ids for c in found.completions]
        found.kl_to_baseline[:] = found.logprobs - _logprobs(
            policy, starts, theirs, how.temperature
        )
    owners = [i for i, p in enumerate(prompts) for _ in p.references]
    texts = [text for p in prompts for text in p.references]
    references = encode_completions(policy.tokenizer, texts, max_tokens=how.max_completion_tokens)
    sums = _logprobs(policy, [starts[i] for i in owners], references, temperature=1.0)
    n = len(prompts)
    reference_logprobs, reference_tokens = np.zeros(n), np.zeros(n)
    np.add.at(reference_logprobs, owners, sums)
    np.add.at(reference_tokens, owners, [len(row) for row in references])
    return Answers(
        completions,
        vocabulary,
        _logprobs(policy, starts, written, how.temperature),
        reference_logprobs,
        reference_tokens,
        np.zeros(n),
        seconds,
        memory,
        [completion.text for completion in said],
    )


def _answers(
    policy: Policy, prompts: Sequence[Prompt], how: Sampling, report: Progress
) -> list[Completion]:
    from rlhf_pipeline.policy.sampling import complete

    return complete(
        policy,
        prompts,
        max_completion_tokens=how.max_completion_tokens,
        max_prompt_tokens=how.max_prompt_tokens,
        temperature=how.temperature,
        seed=how.seed,
        batch_size=how.batch_size,
        report=report,
    )


def _logprobs(
    policy: Policy,
    starts: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]],
    temperature: float,
) -> Floats:
    """Return the summed log-probability of each row of tokens after its prompt, (n,) nats."""
    import torch

    from rlhf_pipeline.policy.sampling import completion_logprobs, pad_left, pad_right

    sums = np.zeros(len(rows))
    order = sorted((i for i in range(len(rows)) if rows[i]), key=lambda i: len(rows[i]))
    with torch.no_grad():
        for first in range(0, len(order), SCORING_BATCH):
            members = order[first : first + SCORING_BATCH]
            batch = (
                *pad_left([starts[i] for i in members], policy.pad_id),
                *pad_right([rows[i] for i in members], policy.pad_id),
            )
            logprobs = completion_logprobs(
                policy.model, *(t.to(policy.device) for t in batch), temperature=temperature
            )
            sums[members] = logprobs.sum(1).double().cpu().numpy()
    return sums


def forget_peak(device: torch.device) -> None:
    """Begin to measure a GPU's peak memory anew; other devices remember none."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_mib(device: torch.device) -> float:
    """Return the most memory held on the GPU since `forget_peak`; else what this process holds."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return float(psutil.Process().memory_info().rss) / 2**20
