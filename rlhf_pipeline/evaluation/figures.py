"""The numbers of a comparison: of each system, of the candidate beside the others, of groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rlhf_pipeline.evaluation import metrics
from rlhf_pipeline.evaluation.answers import Answers
from rlhf_pipeline.evaluation.behaviour import ItemResult
from rlhf_pipeline.evaluation.metrics import Floats, Number
from rlhf_pipeline.evaluation.pair_judge import Judged
from rlhf_pipeline.evaluation.phrases import Phrase, telling_phrases
from rlhf_pipeline.evaluation.pieces import reward_pieces
from rlhf_pipeline.evaluation.report import (
    GATE_SCORE,
    KL,
    EvaluationReport,
    GroupResult,
    Sample,
    prompt_to_rows,
)
from rlhf_pipeline.feedback.datasets import conversations_of
from rlhf_pipeline.records import EvaluationPrompt
from rlhf_pipeline.reward.rules import rouge_l

if TYPE_CHECKING:
    from rlhf_pipeline.policy.sampling import Completion
    from rlhf_pipeline.reward.composite import Breakdown

T = TypeVar("T")

OTHERS = ("baseline", "champion")
OF_REFERENCES = ("bleu_1", "bleu_2", "rouge_l")  # NaN where a prompt has no reference
OF_ALL_WORDS = {"distinct_1": 1, "distinct_2": 2}  # n-grams of this size, all texts together
FEWEST_OF_GROUP = 10  # prompts; fewer say nothing


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
    figures = _Figures(prompts, systems, bootstrap_samples, seed)
    others = OTHERS[:1] if same else OTHERS

    def of_others(figure: Callable[[str], T]) -> dict[str, T]:
        found = {against: figure(against) for against in others}
        return {against: found["baseline" if same else against] for against in OTHERS}

    shown = ["candidate", *others]
    chosen = np.random.default_rng(seed).permutation(len(prompts))[:samples_shown]  # no picking
    told = {system: list(systems[system].told.values()) for system in shown}
    # the prompts that the composite can judge
    within = figures.groups[list(systems["candidate"].told)]
    return EvaluationReport(
        prompts=len(prompts),
        conversations=len(set(figures.groups.tolist())),
        seed=seed,
        temperature=temperature,
        champion_is_baseline=same,
        numbers={"candidate": figures.of("candidate"), **of_others(figures.of)},
        differences=of_others(figures.differences),
        win_rates=of_others(figures.win_rate),
        length_controlled_win_rates=of_others(figures.length_controlled_win_rate),
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
        reward=reward_pieces(told, weights, mean=partial(figures.mean, GATE_SCORE, groups=within))
        if told["candidate"]
        else None,
        topics=figures.by_group([p.topic for p in prompts]),
        cohorts=figures.by_group([p.cohort for p in prompts]),
        behaviour=list(behaviour),
        judged=dict(judged or {}),
        phrases={against: figures.phrases(against) for against in others},
    )


class _Figures:
    """Numbers of systems that answered the same prompts; intervals resample conversations."""

    def __init__(
        self,
        prompts: Sequence[EvaluationPrompt],
        systems: Mapping[str, Answers],
        samples: int,
        seed: int,
    ) -> None:
        self.systems, self.samples, self.seed = systems, samples, seed
        self.groups = np.array(conversations_of(p.prompt for p in prompts))
        self.values = {s: _per_prompt(prompts, answers) for s, answers in systems.items()}
        self.texts = {s: [c.text for c in answers.completions] for s, answers in systems.items()}

    def mean(self, metric: str, of: Floats, groups: metrics.Groups | None = None) -> Number:
        """Return the mean of a metric's values, one per prompt of `groups` (None: of all)."""
        groups = self.groups if groups is None else groups
        if metric in OF_REFERENCES:
            known = ~np.isnan(of)
            of, groups = of[known], groups[known]
        return metrics.bootstrap_mean(of, samples=self.samples, seed=self.seed, groups=groups)

    def of(self, system: str) -> dict[str, Number]:
        """Return the system's own numbers."""
        answers, values = self.systems[system], self.values[system]
        n = len(answers.completions)
        found = {metric: self.mean(metric, of) for metric, of in values.items() if metric != KL}
        for metric, size in OF_ALL_WORDS.items():
            found[metric] = metrics.distinct_with_interval(
                self.texts[system], size, groups=self.groups
            )
        if answers.reference_tokens.any():
            found["perplexity"] = metrics.perplexity(
                answers.reference_logprobs,
                answers.reference_tokens,
                samples=self.samples,
                seed=self.seed,
                groups=self.groups,
            )
        found[KL] = self.mean(KL, values[KL])
        found["seconds_per_completion"] = Number(answers.seconds, n=n)
        found["memory_mib"] = Number(answers.memory_mib, n=n)
        return found

    def differences(self, against: str) -> dict[str, Number]:
        """Return the candidate's numbers less the other system's, paired by prompt."""
        here, there = self.values["candidate"], self.values[against]
        found = {metric: self.mean(metric, here[metric] - there[metric]) for metric in here}
        for metric, size in OF_ALL_WORDS.items():
            found[metric] = metrics.distinct_difference(
                self.texts["candidate"], self.texts[against], size, groups=self.groups
            )
        candidate = self.systems["candidate"]
        if candidate.reference_tokens.any():
            found["perplexity"] = metrics.perplexity_difference(
                candidate.reference_logprobs,
                self.systems[against].reference_logprobs,
                candidate.reference_tokens,
                samples=self.samples,
                seed=self.seed,
                groups=self.groups,
            )
        return found

    def win_rate(self, against: str) -> Number:
        """Return how often the candidate's answer has the higher score."""
        here, there = self.values["candidate"], self.values[against]
        return metrics.win_rate(here[GATE_SCORE], there[GATE_SCORE], groups=self.groups)

    def length_controlled_win_rate(self, against: str) -> Number:
        """Return the win rate that answers of one length would have."""
        here, there = self.values["candidate"], self.values[against]
        return metrics.length_controlled_win_rate(
            here[GATE_SCORE],
            there[GATE_SCORE],
            here["length_tokens"] - there["length_tokens"],
            bootstrap_samples=self.samples,
            seed=self.seed,
            groups=self.groups,
        )

    def phrases(self, against: str) -> list[Phrase]:
        """Return what the candidate says more often than the other system, or less."""
        return telling_phrases(self.texts["candidate"], self.texts[against], groups=self.groups)

    def by_group(self, names: Sequence[str | None]) -> dict[str, GroupResult]:
        """Return candidate against champion on each group (a name per prompt) with enough prompts.

        Compared are the metrics that are means over prompts, one value per prompt.
        """
        here, champion = self.values["candidate"], self.values["champion"]
        found = {}
        for group in sorted({name for name in names if name is not None}):
            members = np.array([name == group for name in names])
            if members.sum() >= FEWEST_OF_GROUP:
                changes = {m: (here[m] - champion[m])[members] for m in here}
                known = {m: of for m, of in changes.items() if not np.isnan(of).all()}
                within = self.groups[members]
                told = {m: self.mean(m, of, within) for m, of in known.items()}
                scores = (of[GATE_SCORE][members] for of in (here, champion))
                rate = metrics.win_rate(*scores, groups=within)
                found[group] = GroupResult(rate, told.pop(GATE_SCORE), told)
        return found


def _pieces(told: Breakdown) -> dict[str, float]:
    return {name: piece.added for name, piece in told.pieces.items()}


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
