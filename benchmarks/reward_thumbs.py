"""Thumbs and nothing else: what a reward learns from them, and whether they tell how good it is.

    python -m benchmarks.reward_thumbs [--seeds 5] [--events 600 2000 6000] [--baseline FOLDER]

Simulated people, a fifth of them careless, give thumbs to single completions of a baseline (recipe
tiny's, trained here where no folder is named). A head on its frozen trunk learns from those of
training prompts, and is judged by those of the others as a turn does (reward/matched.py). Beside
stands what nobody could know: its accuracy on pairs of completions to one prompt, by the hidden
preference; how well its score alone tells thumbs up from thumbs down; and what a bag of words that
learnt from the same thumbs shows where they judge.

The control are people who give their thumbs by what was asked, whatever was answered: nine in ten
up where a question is of the half of the topics that please. There is nothing to learn of answers,
and what judges must say so.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.promises import tell
from benchmarks.reward_kinds import Pool, accuracy, baseline, pool, untrained, votes
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.policy.loading import Policy, load_policy
from rlhf_pipeline.policy.sampling import complete
from rlhf_pipeline.records import FeedbackKind, RewardExample, ignore_progress
from rlhf_pipeline.reward.calibration import hangs_on
from rlhf_pipeline.reward.fitting import fit_kinds
from rlhf_pipeline.reward.heads import Combined
from rlhf_pipeline.reward.held_out import (
    Lead,
    Measured,
    is_good,
    measured,
    tells_apart,
    word_margins,
)
from rlhf_pipeline.reward.matched import by_prompt, match, of_matches
from rlhf_pipeline.reward.model import encode_rows, score_rows
from rlhf_pipeline.simulation.world import ALL_TOPICS, question_of

THUMBS = {FeedbackKind.thumbs: 1.0}
KINDS = {kind.value: weight for kind, weight in THUMBS.items()}
EVALUATION_SHARE = 0.2
PLEASED = 0.9  # how likely a question that pleases gets a thumb up, and another one down
COVERED = 0.80  # of the controls' intervals, at least, hold 0.5: 95 % but for so few runs' luck


@dataclass(frozen=True)
class Found:
    """What one reward is worth."""

    on_pairs: float  # accuracy by the hidden preference, on pairs of completions
    judged: Measured  # accuracy by held-out votes two by two
    apart: Measured  # how well the plain score tells held-out thumbs apart
    words: Measured  # a bag of words, judged as the reward is


def by_question(examples: Sequence[RewardExample], seed: int) -> list[RewardExample]:
    """Return the examples as people vote who look at the question alone."""
    rng = random.Random(f"questions {seed}")
    pleasing = {topic.name for topic in ALL_TOPICS[::2]}
    told = []
    for example in examples:
        pleases = question_of(example.prompt[-1].content).topic.name in pleasing
        told.append(replace(example, number=float((rng.random() < PLEASED) == pleases)))
    return told


def learn(base: Path, policy: Policy, pool: Pool, examples: Sequence[RewardExample]) -> Found:
    """Fit a head to the training thumbs and judge it."""
    model, tokenizer = untrained(base)
    model.combined = Combined("median")  # of one head, that head's
    train = [e for e in examples if e.split == "train"]
    fit_kinds(model, tokenizer, [], train, KINDS, pool.limits, report=ignore_progress)
    model.eval()
    matches = match(examples, KINDS)
    asked = matches.asked
    said = complete(
        policy,
        asked,
        max_completion_tokens=pool.limits.max_completion_tokens,
        max_prompt_tokens=pool.limits.max_prompt_tokens,
        temperature=load_settings("tiny").policy.temperature,
        seed=1,
        batch_size=256,
    )
    texts = (one.text for one in said)
    held_out = of_matches(matches, by_prompt(zip(asked, texts, strict=True)))
    scores = score_rows(model, encode_rows(tokenizer, held_out.texts, pool.limits))
    voted = [e for e in examples if e.split == "evaluation"]
    rows = encode_rows(tokenizer, [(e.prompt, e.completion) for e in voted], pool.limits)
    plain = list(zip(voted, score_rows(model, rows), strict=True))
    return Found(
        accuracy(model, pool.features),
        measured(held_out.margins(torch.tensor(scores, dtype=torch.float64)), held_out.on),
        tells_apart(
            [Lead(score, hangs_on(e)) for e, score in plain if is_good(e)],
            [Lead(score, hangs_on(e)) for e, score in plain if not is_good(e)],
        ),
        measured(word_margins([], held_out, train), held_out.on),
    )


def main() -> None:
    """Print a row per number of events and seed, for people and for the control."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--events", type=int, nargs="+", default=[600, 2000, 6000])
    parser.add_argument("--baseline", type=Path, default=None, help="a trained tiny policy")
    arguments = parser.parse_args()
    people: list[Found] = []
    control: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        base = arguments.baseline or baseline(Path(folder))
        completions, policy = pool(base), load_policy(base, device="cpu")
        print(
            "| thumbs | seed | who | on pairs | judged by votes | matches | plain score | words |"
        )
        print("|---" * 8 + "|")
        for events in arguments.events:
            for seed in range(arguments.seeds):
                data, _ = votes(
                    completions, events, seed, shares=THUMBS, evaluation_share=EVALUATION_SHARE
                )
                said = data.reward_examples
                for who, examples, found in (
                    ("people", said, people),
                    ("by question", by_question(said, seed), control),
                ):
                    one = learn(base, policy, completions, examples)
                    found.append(one)
                    print(
                        f"| {events:,} | {seed} | {who} | {one.on_pairs:.3f} | "
                        f"{_with_interval(one.judged)} | {one.judged.n} | "
                        f"{_with_interval(one.apart)} | {_with_interval(one.words)} |",
                        flush=True,
                    )
    most = people[-arguments.seeds :]  # of the most events
    lowest = min(one.judged.low for one in most)
    chance = [one.judged for one in control]
    hold = statistics.fmean(one.low <= 0.5 <= one.high for one in chance)
    words = statistics.fmean(one.words.low <= 0.5 <= one.words.high for one in control)
    mean = statistics.fmean(one.share for one in chance)
    worst = min(one.on_pairs for one in most)
    print()
    tell(
        [
            (
                "people, most thumbs: accuracy on pairs, the worst",
                "> 0.75",
                f"{worst:.3f}",
                worst > 0.75,
            ),
            (
                "the same, judged by votes: surely above chance",
                "> 0.5",
                f"{lowest:.3f}",
                lowest > 0.5,
            ),
            (
                "by question: intervals that hold 0.5",
                f"≥ {COVERED:.0%}",
                f"{hold:.0%}",
                hold >= COVERED,
            ),
            (
                "by question: judged by votes, mean",
                "0.47 to 0.53",
                f"{mean:.3f}",
                abs(mean - 0.5) <= 0.03,
            ),
            (
                "by question: the bag of words' intervals that hold 0.5",
                f"≥ {COVERED:.0%}",
                f"{words:.0%}",
                words >= COVERED,
            ),
        ]
    )


def _with_interval(one: Measured) -> str:
    return f"{one.share:.3f} ({one.low:.3f} to {one.high:.3f})"


if __name__ == "__main__":
    main()
