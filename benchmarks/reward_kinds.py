"""What every kind of feedback adds to the reward: accuracy against the hidden preference.

    python -m benchmarks.reward_kinds [--seeds 5] [--events 2000 10000] [--baseline FOLDER]

Simulated people, a fifth of them careless, say things of every kind about completions of a baseline
(recipe tiny's, trained here where no folder is named). A head on its frozen trunk learns from the
preferences alone, from preferences and corrections (both as the pipeline does by default, raters
weighed by each other), and from every kind; then the trunk is trained on every kind as well, and
21 heads on parts of the raters read the frozen one. Judged on pairs of prompts that no head has
seen, by the hidden preference.

Two ceilings stand beside: every kind with the careless left out, as nobody could know them; and the
same head on the hidden preference itself between every two completions of the training prompts, as
nobody could ask it: what is missing from that to 1 no vote could teach a head on this trunk.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.promises import tell
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.feedback.datasets import Datasets, build, conversation_of
from rlhf_pipeline.policy.loading import load_policy
from rlhf_pipeline.policy.sampling import complete
from rlhf_pipeline.records import (
    FeedbackKind,
    Interaction,
    PreferencePair,
    Prompt,
    RewardExample,
    ignore_progress,
    now,
    prompt_to_json,
)
from rlhf_pipeline.reward.fitting import (
    all_features,
    encode_pairs,
    fit_head,
    fit_kinds,
)
from rlhf_pipeline.reward.heads import Combined, parts_of
from rlhf_pipeline.reward.kinds import scales, voters_of
from rlhf_pipeline.reward.model import (
    LIKELIHOODS,
    Limits,
    RewardModel,
    Row,
    encode_rows,
    new_reward_model,
)
from rlhf_pipeline.reward.raters import rater_weights
from rlhf_pipeline.reward.tuning import Descent
from rlhf_pipeline.simulation.people import compare, population, say
from rlhf_pipeline.simulation.world import every_question, hidden_preference
from rlhf_pipeline.stages import Turn, train_baseline

SHARES = {
    FeedbackKind.preference: 0.20,
    FeedbackKind.correction: 0.15,
    FeedbackKind.thumbs: 0.30,
    FeedbackKind.rating: 0.20,
    FeedbackKind.score: 0.10,
    FeedbackKind.criteria: 0.05,
}
CARELESS = 0.20
RATERS = 200
TEST_SHARE = 0.3  # of the prompts
ARMS = ("preferences", "and corrections", "every kind", "careless left out", "trunk too", "heads")
FEWER, MORE, ALL = ARMS[0], ARMS[2], ARMS[4]  # the gain is that of the second over the first
HEADS = 21  # of the last arm
DESCENT = Descent(epochs=4, learning_rate=1e-4, batch_size=32, seed=0)
GAIN, ACCURATE = 5.0, 0.90  # points at 2,000 events, accuracy at 10,000


@dataclass(frozen=True)
class Pool:
    """Completions of the baseline: two of each training prompt, pairs of each test prompt."""

    prompts: Sequence[Prompt]
    completions: Sequence[tuple[str, str]]
    tested: Sequence[Row]  # the side of each test pair that is secretly better, then the others
    features: Tensor  # (2 x test pairs, F): the frozen trunk's, of these rows
    limits: Limits


def pool(base: Path) -> Pool:
    """Sample the completions, and take the test pairs' features once."""
    settings = load_settings("tiny").policy
    limits = Limits(settings.max_prompt_tokens, settings.max_completion_tokens)
    prompts = [question.prompt for question in every_question()]
    random.Random("kinds").shuffle(prompts)
    tested = round(TEST_SHARE * len(prompts))
    asked = [*prompts, *prompts[:tested]]  # test prompts have two pairs
    said = complete(
        load_policy(base, device="cpu"),
        [prompt for prompt in asked for _ in range(2)],
        max_completion_tokens=limits.max_completion_tokens,
        max_prompt_tokens=limits.max_prompt_tokens,
        temperature=settings.temperature,
        seed=0,
        batch_size=256,
    )
    both = [(said[2 * i].text, said[2 * i + 1].text) for i in range(len(asked))]
    test = [(asked[i], both[i]) for i in (*range(tested), *range(len(prompts), len(asked)))]
    better, worse = [], []
    for prompt, (a, b) in test:
        liked = hidden_preference(prompt, a), hidden_preference(prompt, b)
        if liked[0] != liked[1]:
            better.append((prompt, a if liked[0] > liked[1] else b))
            worse.append((prompt, b if liked[0] > liked[1] else a))
    model, tokenizer = untrained(base)
    rows = encode_rows(tokenizer, [*better, *worse], limits)
    return Pool(
        prompts[tested:], both[tested : len(prompts)], rows, features_of(model, rows), limits
    )


def features_of(model: RewardModel, rows: Sequence[Row]) -> Tensor:
    """Return what the model's head reads of the rows, (N, F) float32."""
    return all_features(model, rows, ignore_progress).float()


def untrained(base: Path) -> tuple[RewardModel, Any]:
    """Return the reward model of recipe tiny's judges, its head untrained."""
    return new_reward_model(base, seed=0, reads="mean", likelihood=True, device="cpu")


def votes(
    pool: Pool,
    events: int,
    seed: int,
    *,
    shares: Mapping[FeedbackKind, float] = SHARES,
    evaluation_share: float = 0.0,
) -> tuple[Datasets, frozenset[str]]:
    """Return what people say, `events` in all, as data sets; and who of them is careless."""
    rng = random.Random(f"kinds {seed}")
    people = [replace(p, careless=rng.random() < CARELESS) for p in population(RATERS, seed)]
    rows: list[dict[str, Any]] = []
    for kind, share in shares.items():
        wanted = len(rows) + round(share * events)
        while len(rows) < wanted:
            i, person = rng.randrange(len(pool.prompts)), rng.choice(people)
            prompt, texts = pool.prompts[i], pool.completions[i]
            left, right = (Interaction(f"{i}{t}", "x", prompt, t, 0, now()) for t in texts)
            if kind is FeedbackKind.preference:
                if left.completion == right.completion:
                    continue
                said = compare(person, left, right, rng)
            else:
                said = say(person, left, kind, rng)
            if said.kind is not kind:
                continue  # nobody rewrites what they like
            rows.append(
                {
                    "feedback_id": f"{seed}-{len(rows)}",
                    "prompt": prompt_to_json(prompt),
                    "completion": left.completion,
                    "other_completion": right.completion,
                    "kind": kind.value,
                    "number": float("nan") if said.number is None else said.number,
                    "text": said.text,
                    "criteria": None if said.criteria is None else json.dumps(dict(said.criteria)),
                    "voter": person.name,
                    "choice": said.choice,
                    "shown_first": "this",
                    "origin": "simulation",
                }
            )
    careless = frozenset(person.name for person in people if person.careless)
    data = build(pd.DataFrame(rows), evaluation_share=evaluation_share, min_rating=4)
    return data, careless


def accuracies(
    base: Path, pool: Pool, data: Datasets, careless: frozenset[str]
) -> dict[str, float]:
    """Return the share of test pairs that each arm's head ranks as the hidden preference does."""
    pairs = [pair for pair in data.preference_pairs if not pair.both_bad]
    alone = [pair for pair in pairs if not pair.corrected]
    kinds = {kind.value: 1.0 for kind in SHARES}
    said: dict[str, tuple[Sequence[PreferencePair], Sequence[RewardExample]]] = {
        ARMS[2]: (data.preference_pairs, data.reward_examples),
        ARMS[3]: (
            [pair for pair in data.preference_pairs if pair.voter not in careless],
            [one for one in data.reward_examples if one.voter not in careless],
        ),
        ARMS[4]: (data.preference_pairs, data.reward_examples),
        ARMS[5]: (data.preference_pairs, data.reward_examples),
    }
    found = {}
    for arm, used in zip(ARMS[:2], (alone, pairs), strict=True):
        model, tokenizer = untrained(base)
        fit_pairs(model, tokenizer, used, pool.limits)
        found[arm] = accuracy(model, pool.features)
    for arm, (some, examples) in said.items():
        model, tokenizer = untrained(base)
        descent = DESCENT if arm == ALL else None
        parts = parts_of(voters_of(some, examples, kinds), HEADS) if arm == ARMS[5] else None
        model.combined = Combined("median")  # of one head, that head's
        fit_kinds(
            model,
            tokenizer,
            some,
            examples,
            kinds,
            pool.limits,
            descent=descent,
            parts=parts,
            report=ignore_progress,
        )
        model.eval()
        features = pool.features if descent is None else features_of(model, pool.tested)
        found[arm] = accuracy(model, features)
    return found


def accuracy(model: RewardModel, features: Tensor) -> float:
    """Return the share of pairs whose first side scores higher, by the features of all of these.

    Shape (2N, F): the first sides of N pairs, then the second.
    """
    with torch.no_grad():
        scores = model.combined(model.head(features))
    better, worse = scores.chunk(2)
    return float((better > worse).double().mean())


def ceiling(base: Path, pool: Pool) -> tuple[float, int]:
    """Return the accuracy of a head that was told the truth of every pair, and of how many."""
    pairs = []
    for prompt, (a, b) in zip(pool.prompts, pool.completions, strict=True):
        liked = hidden_preference(prompt, a), hidden_preference(prompt, b)
        if liked[0] != liked[1]:
            better, worse = (a, b) if liked[0] > liked[1] else (b, a)
            pairs.append(PreferencePair("", prompt, better, worse, "truth", "bench", "train"))
    model, tokenizer = untrained(base)
    fit_pairs(model, tokenizer, pairs, pool.limits)
    return accuracy(model, pool.features), len(pairs)


def fit_pairs(
    model: RewardModel, tokenizer: Any, pairs: Sequence[PreferencePair], limits: Limits
) -> None:
    """Fit the head to pairs as the pipeline's default does."""
    encoded = encode_pairs(tokenizer, pairs, limits)
    groups = [conversation_of(pair.prompt) for pair in pairs]
    voters = [pair.voter for pair in pairs]
    features = all_features(model, [*encoded.chosen, *encoded.rejected], ignore_progress)
    told = features / scales(features, LIKELIHOODS)
    targets = torch.tensor(encoded.targets, dtype=torch.float64)
    weighed = rater_weights(told[: len(pairs)] - told[len(pairs) :], targets, voters)
    weights = torch.tensor([weighed[voter].weight for voter in voters], dtype=torch.float64)
    fit_head(model, encoded, groups, weights=weights, features=features, report=ignore_progress)


def baseline(folder: Path) -> Path:
    """Train recipe tiny's version 0."""
    settings = load_settings("tiny", {"state_dir": folder})
    turn = Turn("bench", "0" * 64, 0, 0, folder, folder, None, None, settings)
    return Path(train_baseline(turn, ignore_progress, lambda: None)["path"])


def main() -> None:
    """Print a row per seed and the means, for each number of events."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--events", type=int, nargs="+", default=[2000, 10_000])
    parser.add_argument("--baseline", type=Path, default=None, help="a trained tiny policy")
    arguments = parser.parse_args()
    asked: list[tuple[str, str, str, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        base = arguments.baseline or baseline(Path(folder))
        completions = pool(base)
        told, count = ceiling(base, completions)
        print(
            f"{len(completions.tested) // 2:,} test pairs; told the truth of {count:,}: {told:.3f}"
        )
        print(f"| events | seed | {' | '.join(ARMS)} | gain, points | seconds |")
        print("|---" * (len(ARMS) + 4) + "|")
        for events in arguments.events:
            rows = []
            for seed in range(arguments.seeds):
                started = time.perf_counter()
                rows.append(accuracies(base, completions, *votes(completions, events, seed)))
                seconds = time.perf_counter() - started
                print(_row(events, str(seed), rows[-1], f"{seconds:.0f}"), flush=True)
            means = {arm: statistics.fmean(row[arm] for row in rows) for arm in ARMS}
            print(_row(events, "mean", means, ""), flush=True)
            gain, right = 100 * (means[MORE] - means[FEWER]), means[ALL]
            if events == 2000:
                needed = f"≥ {GAIN:.0f} points"
                asked.append(("every kind, 2,000 events", needed, f"{gain:+.1f}", gain >= GAIN))
            if events == 10_000:
                met = right > ACCURATE
                asked.append(("trunk too, 10,000 events", "> 0.90", f"{right:.4f}", met))
    print()
    tell(asked)


def _row(events: int, seed: str, found: dict[str, float], seconds: str) -> str:
    gain = 100 * (found[MORE] - found[FEWER])
    numbers = " | ".join(f"{found[arm]:.3f}" for arm in ARMS)
    return f"| {events:,} | {seed} | {numbers} | {gain:+.1f} | {seconds} |"


if __name__ == "__main__":
    main()
