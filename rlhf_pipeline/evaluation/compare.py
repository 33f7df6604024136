"""Candidate, baseline and champion answer the same held-out prompts; the gate's judge scores them.

answers.py lets each of them write, figures.py makes the numbers. Failure is an exception, never a
bad number.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation.answers import Answers, Sampling, visit
from rlhf_pipeline.evaluation.behaviour import BehaviourItem, judge_items
from rlhf_pipeline.evaluation.figures import OTHERS, summarise
from rlhf_pipeline.evaluation.metrics import Floats
from rlhf_pipeline.evaluation.pair_judge import Judged, Pair, PairJudge
from rlhf_pipeline.evaluation.report import (
    APART,
    GATE_SCORE,
    EvaluationReport,
)
from rlhf_pipeline.records import (
    EvaluationPrompt,
    Progress,
    RewardFunction,
    RewardInput,
    ignore_progress,
)
from rlhf_pipeline.reward.lexicon import empathy, item_ratio

if TYPE_CHECKING:
    from rlhf_pipeline.reward.composite import CompositeReward


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
        answers[folder] = visit(folder, prompts, weighs, how, report, asked)
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
