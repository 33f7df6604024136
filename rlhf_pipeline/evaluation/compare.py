"""Candidate, baseline and champion answer the same held-out prompts; the gate's judge scores them.

One policy is in memory at a time. All sample with the same seed, so a difference between prompts
is paired. Failure is an exception, never a bad number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation import metrics
from rlhf_pipeline.evaluation.behaviour import BehaviourItem, ItemResult, judge_items
from rlhf_pipeline.evaluation.metrics import Floats, Number
from rlhf_pipeline.evaluation.pair_judge import Judged, Pair, PairJudge
from rlhf_pipeline.evaluation.phrases import telling_phrases
from rlhf_pipeline.evaluation.pieces import reward_pieces
from rlhf_pipeline.evaluation.report import (
    APART,
    GATE_SCORE,
    KL,
    EvaluationReport,
    GroupResult,
    Sample,
    prompt_to_rows,
)
from rlhf_pipeline.feedback.datasets import conversations_of
from rlhf_pipeline.records import (
    EvaluationPrompt,
    Progress,
    Prompt,
    RewardFunction,
    RewardInput,
    ignore_progress,
)
from rlhf_pipeline.reward.lexicon import empathy, item_ratio
from rlhf_pipeline.reward.rules import rouge_l

if TYPE_CHECKING:
    import torch

    from rlhf_pipeline.policy.loading import Policy
    from rlhf_pipeline.policy.sampling import Completion
    from rlhf_pipeline.reward.composite import Breakdown, CompositeReward

SCORING_BATCH = 32  # completions per forward pass where log-probabilities are looked up
OTHERS = ("baseline", "champion")
OF_REFERENCES = ("bleu_1", "bleu_2", "rouge_l")  # NaN where a prompt has no reference
OF_ALL_WORDS = {"distinct_1": 1, "distinct_2": 2}  # n-grams of this size, all texts together
FEWEST_OF_GROUP = 10  # prompts; fewer say nothing


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


def compare(
    candidate: Path,
    baseline: Path,
    champion: Path | None,
    prompts: Sequence[EvaluationPrompt],
    judge: RewardFunction,
    other_rewards: Mapping[str, RewardFunction],
    *,
    composite: CompositeReward | None = None,
    referenced_only: bool = False,
    titles: str | None = None,
    pair_judge: PairJudge | None = None,
    pairs_judged: int = 100,
    max_completion_tokens: int,
    max_prompt_tokens: int,
    temperature: float,
    seed: int,
    bootstrap_samples: int,
    samples_shown: int = 10,
    behaviour: Sequence[BehaviourItem] = (),
    behaviour_tries: int = 8,
    batch_size: int = 64,
    device: str = "auto",
    dtype: str = "float32",
    report: Progress = ignore_progress,
) -> EvaluationReport:
    """Return the comparison on `prompts`. No champion, or the same folder, means the baseline.

    1. Candidate and champion answer, and say how likely their answers and the references are.
    2. The baseline does the same and says how likely it finds the others' answers (for the KL).
    3. The judge and the other rewards score all answers, empathy and item ratio are counted
       (`titles` is the JSON file of the items, as the rewards of these names take it); the
       composite, if any, tells its pieces, `referenced_only` on the prompts that have references.
    4. `pair_judge`, if any, says of `pairs_judged` prompts whose answer is better.
    5. Numbers, paired differences and win rates with intervals; what the behaviour items find, and
       which words the candidate says more often, or less.

    The KL is the mean of log p(candidate) - log p(baseline) over whole completions (k1: unbiased,
    Schulman, joschu.net/blog/kl-approx.html), at the sampling temperature, on the tokens drawn.
    Raises EvaluationError on fewer than 2 prompts, policies of different
    vocabularies, a temperature of 0, or a reward that is not finite.
    """
    if len(prompts) < 2:
        raise EvaluationError(
            f"a comparison needs at least 2 held-out prompts, found {len(prompts)}; raise "
            "feedback.evaluation_share or collect more"
        )
    if temperature <= 0:
        raise EvaluationError(
            f"a comparison samples, so it needs a temperature above 0, found {temperature}; "
            "raise it (0.7 is usual)"
        )
    started = time.monotonic()
    counted = {"empathy": empathy(), "item_ratio": item_ratio(titles)}
    how = Sampling(
        max_completion_tokens, max_prompt_tokens, temperature, seed, batch_size, device, dtype
    )
    folders = {
        "candidate": candidate.resolve(),
        "champion": (champion or baseline).resolve(),
        "baseline": baseline.resolve(),
    }
    answers: dict[Path, Answers] = {}
    asked = [item.prompt for item in behaviour for _ in range(behaviour_tries)]
    # The baseline comes last: by then it is known whose answers it has to weigh.
    others = [f for f in dict.fromkeys(folders.values()) if f != folders["baseline"]]
    for folder in [*others, folders["baseline"]]:
        report({"stage": f"{next(s for s in folders if folders[s] == folder)} answers"})
        weighs = answers if folder == folders["baseline"] else {}
        answers[folder] = _visit(folder, prompts, weighs, how, report, asked)
    for folder, found in answers.items():
        report({"stage": "scoring", "systems": len(answers)})
        items = [
            RewardInput(p.prompt, c.text, p.references)
            for p, c in zip(prompts, found.completions, strict=True)
        ]
        for name, reward in {GATE_SCORE: judge, **_named(other_rewards)}.items():
            scores, apart = _judged(reward, items)
            found.scores[name] = _finite(scores, len(items), name, folder)
            if apart is not None:
                found.scores[name.removesuffix("_score") + APART] = np.asarray(apart)
        for name, count in counted.items():
            found.scores[name] = np.asarray(count(items), dtype=np.float64)
        if composite is not None:
            some = [i for i in range(len(items)) if items[i].references or not referenced_only]
            found.told.update(zip(some, composite.judge([items[i] for i in some]), strict=True))
    by_system = {system: answers[folders[system]] for system in ("candidate", *OTHERS)}
    found_behaviour = judge_items(
        behaviour, {system: of.said for system, of in by_system.items()}, behaviour_tries
    )
    asked_of: dict[str, Judged] = {}
    if pair_judge is not None:
        report({"stage": "asking the judge", "systems": len(answers)})
        asked_of = _asked(
            pair_judge,
            prompts[:pairs_judged],
            by_system,
            bootstrap_samples=bootstrap_samples,
            seed=seed,
        )
    return summarise(
        prompts,
        by_system,
        judged=asked_of,
        weights={} if composite is None else composite.weights,
        behaviour=found_behaviour,
        seed=seed,
        temperature=temperature,
        bootstrap_samples=bootstrap_samples,
        samples_shown=samples_shown,
        started=started,
    )


def _asked(
    judge: PairJudge,
    prompts: Sequence[EvaluationPrompt],
    systems: Mapping[str, Answers],
    *,
    bootstrap_samples: int,
    seed: int,
) -> dict[str, Judged]:
    """Return what the judge says of the candidate beside each other system, by its name."""
    found: dict[str, Judged] = {}
    for against in OTHERS:
        same = against == "champion" and systems["champion"] is systems["baseline"]
        pairs = [
            Pair(prompt.prompt, here.text, there.text)
            for prompt, here, there in zip(
                prompts,
                systems["candidate"].completions,
                systems[against].completions,
                strict=False,  # it is asked about the first of them
            )
        ]
        told = (
            found.get("baseline")
            if same
            else judge.judged(pairs, bootstrap_samples=bootstrap_samples, seed=seed)
        )
        if told is not None:
            found[against] = told
    return found


def _visit(
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


def summarise(
    prompts: Sequence[EvaluationPrompt],
    systems: Mapping[str, Answers],
    *,
    weights: Mapping[str, float],
    judged: Mapping[str, Judged] | None = None,
    behaviour: Sequence[ItemResult] = (),
    seed: int,
    temperature: float,
    bootstrap_samples: int,
    samples_shown: int,
    started: float,
) -> EvaluationReport:
    """Return the report on what candidate, baseline and champion answered, scores included."""
    same = systems["champion"] is systems["baseline"]
    values = {system: _per_prompt(prompts, answers) for system, answers in systems.items()}
    texts = {system: [c.text for c in answers.completions] for system, answers in systems.items()}

    groups = np.array(conversations_of(p.prompt for p in prompts))

    def mean(metric: str, of: Floats, groups: metrics.Groups = groups) -> Number:
        if metric in OF_REFERENCES:
            known = ~np.isnan(of)
            of, groups = of[known], groups[known]
        return metrics.bootstrap_mean(of, samples=bootstrap_samples, seed=seed, groups=groups)

    def summary(system: str) -> dict[str, Number]:
        answers, n = systems[system], len(prompts)
        found = {metric: mean(metric, of) for metric, of in values[system].items() if metric != KL}
        for metric, size in OF_ALL_WORDS.items():
            found[metric] = metrics.distinct_with_interval(texts[system], size, groups=groups)
        if answers.reference_tokens.any():
            found["perplexity"] = metrics.perplexity(
                answers.reference_logprobs,
                answers.reference_tokens,
                samples=bootstrap_samples,
                seed=seed,
                groups=groups,
            )
        found[KL] = mean(KL, values[system][KL])
        found["seconds_per_completion"] = Number(answers.seconds, n=n)
        found["memory_mib"] = Number(answers.memory_mib, n=n)
        return found

    numbers = {"candidate": summary("candidate"), "baseline": summary("baseline")}
    numbers["champion"] = numbers["baseline"] if same else summary("champion")
    differences: dict[str, dict[str, Number]] = {}
    plain: dict[str, Number] = {}
    controlled: dict[str, Number] = {}
    here, others = values["candidate"], OTHERS[:1] if same else OTHERS
    for against in others:
        other = values[against]
        differences[against] = {m: mean(m, here[m] - other[m]) for m in here}
        for metric, size in OF_ALL_WORDS.items():
            differences[against][metric] = metrics.distinct_difference(
                texts["candidate"], texts[against], size, groups=groups
            )
        if "perplexity" in numbers["candidate"]:
            differences[against]["perplexity"] = metrics.perplexity_difference(
                systems["candidate"].reference_logprobs,
                systems[against].reference_logprobs,
                systems["candidate"].reference_tokens,
                samples=bootstrap_samples,
                seed=seed,
                groups=groups,
            )
        plain[against] = metrics.win_rate(here[GATE_SCORE], other[GATE_SCORE], groups=groups)
        controlled[against] = metrics.length_controlled_win_rate(
            here[GATE_SCORE],
            other[GATE_SCORE],
            here["length_tokens"] - other["length_tokens"],
            bootstrap_samples=bootstrap_samples,
            seed=seed,
            groups=groups,
        )
    if same:
        differences["champion"] = differences["baseline"]
        plain["champion"], controlled["champion"] = plain["baseline"], controlled["baseline"]

    def by_group(names: Sequence[str | None]) -> dict[str, GroupResult]:
        return _by_group(names, groups, here, values["champion"], mean)

    shown = ["candidate", *others]
    chosen = np.random.default_rng(seed).permutation(len(prompts))[:samples_shown]  # no picking
    told = {system: list(systems[system].told.values()) for system in shown}
    within = groups[list(systems["candidate"].told)]  # the prompts that the composite can judge
    return EvaluationReport(
        prompts=len(prompts),
        conversations=len(set(groups.tolist())),
        seed=seed,
        temperature=temperature,
        champion_is_baseline=same,
        numbers=numbers,
        differences=differences,
        win_rates=plain,
        length_controlled_win_rates=controlled,
        scores={s: [float(x) for x in systems[s].scores[GATE_SCORE]] for s in systems},
        samples=[
            Sample(
                prompts[i].prompt_id,
                prompt_to_rows(prompts[i].prompt),
                {s: systems[s].completions[i].text for s in shown},
                {s: float(systems[s].scores[GATE_SCORE][i]) for s in shown},
                {s: _pieces(systems[s].told[i]) for s in shown if i in systems[s].told},
            )
            for i in chosen.tolist()
        ],
        seconds=time.monotonic() - started,
        reward=reward_pieces(told, weights, mean=partial(mean, GATE_SCORE, groups=within))
        if told["candidate"]
        else None,
        topics=by_group([p.topic for p in prompts]),
        cohorts=by_group([p.cohort for p in prompts]),
        behaviour=list(behaviour),
        judged=dict(judged or {}),
        phrases={
            against: telling_phrases(texts["candidate"], texts[against], groups=groups)
            for against in others
        },
    )


def _pieces(told: Breakdown) -> dict[str, float]:
    return {name: piece.added for name, piece in told.pieces.items()}


def _by_group(
    names: Sequence[str | None],
    groups: metrics.Groups,
    here: Mapping[str, Floats],
    champion: Mapping[str, Floats],
    mean: Callable[[str, Floats, metrics.Groups], Number],
) -> dict[str, GroupResult]:
    """Return candidate against champion on each group (a name per prompt) with enough prompts.

    Both are the metrics that are means over prompts, one value per prompt.
    """
    found = {}
    for group in sorted({name for name in names if name is not None}):
        members = np.array([name == group for name in names])
        if members.sum() >= FEWEST_OF_GROUP:
            changes = {m: (here[m] - champion[m])[members] for m in here}
            known = {m: of for m, of in changes.items() if not np.isnan(of).all()}
            within = groups[members]
            told = {m: mean(m, of, within) for m, of in known.items()}
            scores = (of[GATE_SCORE][members] for of in (here, champion))
            rate = metrics.win_rate(*scores, groups=within)
            found[group] = GroupResult(rate, told.pop(GATE_SCORE), told)
    return found


def _to_references(
    prompts: Sequence[EvaluationPrompt], completions: Sequence[Completion]
) -> dict[str, Floats]:
    """Return how near the completions are to the references, by metric; nothing without any."""
    if not any(prompt.references for prompt in prompts):
        return {}
    rows = [
        (
            metrics.bleu(answer.text, prompt.references, 1),
            metrics.bleu(answer.text, prompt.references, 2),
            max(rouge_l(answer.text, reference) for reference in prompt.references),
        )
        if prompt.references
        else (math.nan,) * len(OF_REFERENCES)
        for prompt, answer in zip(prompts, completions, strict=True)
    ]
    return dict(zip(OF_REFERENCES, np.array(rows).T, strict=True))


def _per_prompt(prompts: Sequence[EvaluationPrompt], answers: Answers) -> dict[str, Floats]:
    """Return the metrics that are means over prompts, one value per prompt."""
    completions = answers.completions
    return {
        **answers.scores,
        "length_tokens": np.array([len(c.ids) for c in completions], dtype=np.float64),
        "repetition": np.array([metrics.repetition(c.text) for c in completions]),
        "truncation_rate": np.array([float(not c.finished) for c in completions]),
        **_to_references(prompts, completions),
        KL: answers.kl_to_baseline,
    }


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


def _named(rewards: Mapping[str, RewardFunction]) -> dict[str, RewardFunction]:
    named = {f"{name}_score": reward for name, reward in rewards.items()}
    if GATE_SCORE in named:
        raise EvaluationError("the name 'gate' is the judge's; give the other reward another name")
    return named


def _judged(
    reward: RewardFunction, items: Sequence[RewardInput]
) -> tuple[Sequence[float], Sequence[float] | None]:
    """Return the scores, and how far the heads disagree on each; None where there is one head."""
    from rlhf_pipeline.reward.model import LearnedReward

    if not isinstance(reward, LearnedReward):
        return reward(items), None
    told = reward.judge(items)
    return told.scores, told.disagreement if len(told.by_member) > 1 else None


def _finite(scores: Sequence[float], expected: int, name: str, folder: Path) -> Floats:
    found = np.asarray(scores, dtype=np.float64)
    if found.shape != (expected,) or not np.isfinite(found).all():
        odd = int((~np.isfinite(found)).sum())
        raise EvaluationError(
            f"{name} needs one finite score for each of {expected} completions of {folder.name}, "
            f"found shape {found.shape} with {odd} not finite; check the reward"
        )
    return found
