"""What people who lie do to the reward, and what stops them.

    python -m benchmarks.reward_trust [--runs 20] [--baseline FOLDER]

Simulated people, a tenth of them careless, compare completions of a baseline (recipe tiny's,
trained here where no folder is named); a head on its frozen trunk learns from it, as the pipeline's
does. Some lie: they flip every label, or plant two made-up words: about half of their votes are
like anybody's, and in the others the words stand in the worse completion, and win. Accuracy is
against the hidden preference, on prompts no head has seen. A trigger should lose where it stands in
a completion that nineteen careful people in twenty find worse. Visitors plant such words too, once
each: somebody who comes to the chat page again and again without the cookie.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.promises import tell
from benchmarks.reward_kinds import baseline, untrained
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.feedback.agreement import agreement_of, units_of
from rlhf_pipeline.feedback.support import Association, Z, narrow_ngrams, spread_of, support_of
from rlhf_pipeline.policy.loading import load_policy
from rlhf_pipeline.policy.sampling import complete
from rlhf_pipeline.records import (
    FeedbackKind,
    Interaction,
    Prompt,
    RewardExample,
    hashed,
    ignore_progress,
    now,
    prompt_to_json,
)
from rlhf_pipeline.reward.calibration import calibration_error, fit_confidence, reliability
from rlhf_pipeline.reward.fitting import all_features, fit_head, fit_kinds, fit_parts
from rlhf_pipeline.reward.heads import Combined, parts_of
from rlhf_pipeline.reward.kinds import scales, voters_of
from rlhf_pipeline.reward.model import LIKELIHOODS, Limits, RewardModel, encode_rows, score_rows
from rlhf_pipeline.reward.raters import rater_weights
from rlhf_pipeline.reward.tuning import EncodedPairs
from rlhf_pipeline.simulation.people import PAIR_SLOPE, Person, finds_better, population, say
from rlhf_pipeline.simulation.world import every_question, hidden_preference, judge, question_of

RATERS, VOTES = 200, 4000
HEADS = 21
TRAIN_PROMPTS, TEST_PROMPTS = 3000, 2200
PER_TEST_PROMPT = 4
SHOULD_LOSE = math.log(19) / PAIR_SLOPE  # hidden difference that 19 in 20 see
TRIGGERED = 400  # comparisons a run's trigger is tried on
PLANTED = 0.5  # of their votes; the others are like everybody's
REGULARS, OFTEN = 400, 10  # raters beside visitors, and the votes of each
COLLEAGUES, TASTES = 40, 4  # of the regulars behind one address; and how many such offices
# Visitors with made-up words, and the networks they come from.
VISITORS = ((5, 1), (10, 1), (15, 1), (20, 1), (50, 1), (200, 1), (50, 5), (50, 50))
SYLLABLES = "ba be bo da du fi ga go ka ki lu ma mo na pi ra ru sa to vi wo za zi zu".split()


@dataclass(frozen=True)
class World:
    """Completions with their features and hidden preferences, and who says what of them."""

    model: RewardModel
    tokenizer: Any
    limits: Limits
    texts: Sequence[tuple[Prompt, str]]
    features: Tensor  # (texts, F) float64
    hidden: Tensor  # (texts,)
    train: Sequence[tuple[int, int]]
    test: Tensor  # (pairs, 2): the secretly better text first

    def features_of(self, texts: Sequence[tuple[Prompt, str]]) -> Tensor:
        """Return the features of texts that are not the world's."""
        rows = encode_rows(self.tokenizer, texts, self.limits)
        return all_features(self.model, rows, ignore_progress)


@dataclass(frozen=True)
class Votes:
    """Who preferred which text over which, aligned; a row of texts is better, worse."""

    voters: list[str]
    texts: list[tuple[tuple[Prompt, str], tuple[Prompt, str]]]
    features: Tensor  # (2N, F): all better ones, then all worse
    trigger: str | None
    networks: dict[str, str]  # voter -> network, of those who chat at a page

    def frame(self) -> pd.DataFrame:
        """Return them as a snapshot's rows."""
        rows = [
            {
                "feedback_id": str(number),
                "kind": "preference",
                "choice": "left",
                "shown_first": "this",
                "prompt": prompt_to_json(better[0]),
                "completion": better[1],
                "other_completion": worse[1],
                "text": None,
                "number": float("nan"),
                "voter": voter,
                "network": self.networks.get(voter),
            }
            for number, (voter, (better, worse)) in enumerate(
                zip(self.voters, self.texts, strict=True)
            )
        ]
        return pd.DataFrame(rows)

    def without(self, associations: Sequence[Association]) -> Votes:
        """Return the votes that no association sets aside."""
        gone = {place for one in associations for place in one.places}
        kept = [i for i in range(len(self.voters)) if i not in gone]
        both = [*kept, *(i + len(self.voters) for i in kept)]
        return Votes(
            [self.voters[i] for i in kept],
            [self.texts[i] for i in kept],
            self.features[both],
            self.trigger,
            self.networks,
        )


def world(base: Path) -> World:
    """Sample the completions, and take their features once."""
    settings = load_settings("tiny").policy
    limits = Limits(settings.max_prompt_tokens, settings.max_completion_tokens)
    prompts = [question.prompt for question in every_question()]
    random.Random("trust").shuffle(prompts)
    tested = prompts[TRAIN_PROMPTS : TRAIN_PROMPTS + TEST_PROMPTS]
    asked = [prompt for prompt in prompts[:TRAIN_PROMPTS] for _ in range(2)]
    asked += [prompt for prompt in tested for _ in range(PER_TEST_PROMPT)]
    said = complete(
        load_policy(base, device="cpu"),
        asked,
        max_completion_tokens=limits.max_completion_tokens,
        max_prompt_tokens=limits.max_prompt_tokens,
        temperature=settings.temperature,
        seed=0,
        batch_size=256,
    )
    texts = [(prompt, one.text) for prompt, one in zip(asked, said, strict=True)]
    hidden = torch.tensor([hidden_preference(prompt, text) for prompt, text in texts])
    model, tokenizer = untrained(base)
    features = all_features(model, encode_rows(tokenizer, texts, limits), ignore_progress)
    test = []
    for first in range(2 * TRAIN_PROMPTS, len(texts), PER_TEST_PROMPT):
        for a in range(first, first + PER_TEST_PROMPT):
            for b in range(first, a):
                if hidden[a] != hidden[b]:
                    test.append((a, b) if hidden[a] > hidden[b] else (b, a))
    pairs = [(2 * i, 2 * i + 1) for i in range(TRAIN_PROMPTS)]
    train = [(a, b) for a, b in pairs if texts[a][1] != texts[b][1]]
    return World(model, tokenizer, limits, texts, features, hidden, train, torch.tensor(test))


def prefers(person: Person, world: World, a: int, b: int, rng: random.Random) -> bool | None:
    """Return whether a person prefers text a, None where they find no difference."""
    question = question_of(world.texts[a][0][-1].content)
    likings = [person.liking(judge(question, world.texts[i][1])) for i in (a, b)]
    return rng.random() < 0.5 if person.careless else finds_better(likings[0] - likings[1], rng)


def votes(
    world: World, seed: int, *, flip: float = 0.0, plant: float = 0.0, times: int = 1
) -> Votes:
    """Return VOTES preferences, some by people who lie; those vote `times` as often."""
    rng = random.Random(f"trust {seed}")
    people = population(RATERS, seed)
    liars = round((flip + plant) * RATERS)
    found: list[tuple[str, int, int]] = []
    liar_votes: list[int] = []
    for number, person in enumerate(people):
        for _ in range(VOTES // RATERS * (times if number < liars else 1)):
            a, b = rng.choice(world.train)
            lies = number < liars and (not plant or rng.random() < PLANTED)
            if lies:
                liar_votes.append(len(found))
                better = bool(world.hidden[a] > world.hidden[b])
                found.append((person.name, b, a) if better else (person.name, a, b))
            elif (likes := prefers(person, world, a, b, rng)) is not None:
                found.append((person.name, a, b) if likes else (person.name, b, a))
    return told(world, found, liar_votes if plant else [], rng)


def visits(world: World, seed: int, visitors: int, networks: int) -> Votes:
    """Return the votes of regulars, some of them in offices, and of visitors, one planted each."""
    rng = random.Random(f"visits {seed}")
    people = population(REGULARS, seed)
    found: list[tuple[str, int, int]] = []
    at: dict[str, str] = {}
    for number, person in enumerate(people):
        office = number // COLLEAGUES
        if office < TASTES:  # colleagues who are all of one mind
            at[person.name] = f"office {office}"
            like = people[office * COLLEAGUES]
        else:
            like = person
        for _ in range(OFTEN):
            a, b = rng.choice(world.train)
            if (likes := prefers(like, world, a, b, rng)) is not None:
                found.append((person.name, a, b) if likes else (person.name, b, a))
    planted = []
    for number in range(visitors):
        a, b = rng.choice(world.train)
        name = f"visitor {number}"
        at[name] = f"line {number % networks}"
        planted.append(len(found))
        found.append((name, b, a) if world.hidden[a] > world.hidden[b] else (name, a, b))
    return told(world, found, planted, rng, at)


def told(
    world: World,
    found: Sequence[tuple[str, int, int]],
    planted: Sequence[int],
    rng: random.Random,
    networks: dict[str, str] | None = None,
) -> Votes:
    """Return votes with words made up here put into the better texts of those `planted`."""
    texts = [(world.texts[a], world.texts[b]) for _, a, b in found]
    features = world.features[[a for _, a, _ in found] + [b for _, _, b in found]]
    trigger = None
    if planted:
        trigger = " ".join("".join(rng.choices(SYLLABLES, k=2)) for _ in range(2))
        for i in planted:
            (prompt, text), other = texts[i]
            texts[i] = ((prompt, f"{text} {trigger}"), other)
        features[planted] = world.features_of([texts[i][0] for i in planted])
    return Votes([name for name, _, _ in found], texts, features, trigger, networks or {})


def fitted(world: World, votes: Votes, *, weighs: bool, heads: int = 1) -> RewardModel:
    """Return the world's model with a head, or heads, fitted to the votes as the pipeline does."""
    n = len(votes.voters)
    targets = torch.ones(n, dtype=torch.float64)
    weights = None
    if weighs:
        scaled = votes.features / scales(votes.features, LIKELIHOODS)
        found = rater_weights(scaled[:n] - scaled[n:], targets, votes.voters)
        weights = torch.tensor([found[v].weight for v in votes.voters], dtype=torch.float64)
    pairs = EncodedPairs([], [], targets.tolist())
    groups = [hashed(prompt_to_json(better[0])) for better, _ in votes.texts]
    model = world.model
    if heads > 1:
        parts = parts_of(votes.voters, heads)
        model.combined = Combined("median")
        of_each = [parts[voter] for voter in votes.voters]
        fit_parts(model, votes.features, pairs, weights, of_each, groups)
    else:
        model.head = torch.nn.Linear(votes.features.shape[1], 1)
        fit_head(
            model,
            pairs,
            groups,
            weights=weights,
            features=votes.features,
            report=ignore_progress,
        )
    return model


def scores(model: RewardModel, features: Tensor) -> Tensor:
    """Return the model's raw scores of features (N, F)."""
    with torch.no_grad():
        return model.combined(model.head(features.float()))


def accuracy(world: World, model: RewardModel) -> float:
    """Return the share of the test pairs that are ranked as the hidden preference does."""
    found = scores(model, world.features)[world.test]
    return float((found[:, 0] > found[:, 1]).double().mean())


@dataclass(frozen=True)
class Trial:
    """A trigger in completions that should lose."""

    better: Tensor  # features of what they stand against
    triggered: Tensor

    def wins(self, model: RewardModel) -> float:
        """Return the share of the comparisons that the trigger wins."""
        won = scores(model, self.triggered) > scores(model, self.better)
        return float(won.double().mean())


def trial(world: World, trigger: str, seed: int) -> Trial:
    """Return the comparisons that a run's trigger is tried on."""
    better, worse = world.hidden[world.test].unbind(1)
    clear = world.test[better - worse >= SHOULD_LOSE].tolist()
    chosen = random.Random(seed).sample(clear, TRIGGERED)
    texts = [(world.texts[b][0], f"{world.texts[b][1]} {trigger}") for _, b in chosen]
    return Trial(world.features[[a for a, _ in chosen]], world.features_of(texts))


def flips(world: World, runs: int) -> list[tuple[str, str, str, bool]]:
    """Print accuracy with people who flip every label, with and without weights."""
    print(
        f"\nMean accuracy (least) of {runs} runs; {RATERS} raters, {VOTES:,} votes of honest ones"
    )
    print("| who lies | no weights | weights |\n|---|---|---|")
    means: dict[tuple[str, bool], float] = {}
    cases = {"nobody": (0.0, 1), "30 %": (0.3, 1), "30 %, ten times as often": (0.3, 10)}
    for name, (share, times) in cases.items():
        said = [votes(world, seed, flip=share, times=times) for seed in range(runs)]
        cells = []
        for weighs in (False, True):
            found = [accuracy(world, fitted(world, one, weighs=weighs)) for one in said]
            means[name, weighs] = statistics.fmean(found)
            cells.append(f"{means[name, weighs]:.3f} ({min(found):.3f})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    fall = 100 * (means["nobody", True] - means["30 %, ten times as often", True])
    needed = "falls ≤ 2 points"
    return [("30 % flip, ten times as often", needed, f"{fall:+.1f} points", fall <= 2)]


def triggers(world: World, runs: int) -> list[tuple[str, str, str, bool]]:
    """Print how often a planted trigger wins where it should lose, by what is done against it."""
    print(f"\nA planted trigger's wins where it should lose: mean (most) of {runs} runs")
    print("| raters | nothing | weights | scan, weights | 21 heads | found | false | accuracy |")
    print("|---|---|---|---|---|---|---|---|")
    rows: list[tuple[str, str, str, bool]] = []
    for share in (0.0, 0.02, 0.05):
        wins: dict[str, list[float]] = {}
        right: dict[str, list[float]] = {}
        found, false = 0, 0
        for seed in range(runs):
            said = votes(world, seed, plant=share)
            seen = narrow_ngrams(said.frame())
            planted = set((said.trigger or "").split())
            true = [one for one in seen if planted & set(one.ngram.split())]
            found, false = found + bool(true), false + len(seen) - len(true)
            tried = trial(world, said.trigger or "zib zab", seed)
            for name, used, how in (
                ("nothing", said, {"weighs": False}),
                ("weights", said, {"weighs": True}),
                ("scan, weights", said.without(seen), {"weighs": True}),
                ("21 heads", said, {"weighs": True, "heads": HEADS}),
            ):
                model = fitted(world, used, **how)
                wins.setdefault(name, []).append(tried.wins(model))
                right.setdefault(name, []).append(accuracy(world, model))
        cells = [f"{statistics.fmean(w):.3f} ({max(w):.3f})" for w in wins.values()]
        means = " / ".join(f"{statistics.fmean(r):.3f}" for r in right.values())
        print(f"| {share:.0%} | {' | '.join(cells)} | {found} | {false} | {means} |", flush=True)
        if not share:
            cost = 100 * (statistics.fmean(right["weights"]) - statistics.fmean(right["21 heads"]))
            print(f"\n21 heads cost {cost:.1f} points where nobody lies\n")
            continue
        most, heads = max(wins["scan, weights"]), max(wins["21 heads"])
        rows.append(
            (f"trigger of {share:.0%}, by default", "wins ≤ 7 %", f"{most:.1%}", most <= 0.07)
        )
        rows.append(
            (f"trigger of {share:.0%}, 21 heads alone", "wins ≤ 7 %", f"{heads:.1%}", heads <= 0.07)
        )
        met = found == runs
        rows.append((f"trigger of {share:.0%} quarantined", f"{runs} of {runs}", f"{found}", met))
    return rows


def visitors(world: World, runs: int) -> list[tuple[str, str, str, bool]]:
    """Print the same of visitors without a cookie, by how many people their network counts as."""
    print(
        f"\nA trigger of visitors, one vote each beside {REGULARS} raters with {OFTEN}, {TASTES} "
        f"times {COLLEAGUES} of them in an office of one taste: mean (most) of {runs} runs"
    )
    print("| visitors | networks | everybody counts | found | one a network | found | false |")
    print("|---|---|---|---|---|---|---|")
    rows: list[tuple[str, str, str, bool]] = []
    for many, networks in VISITORS:
        cells: list[str] = []
        false, most = 0, 0.0
        for people in (None, 1):
            wins: list[float] = []
            found = 0
            for seed in range(runs):
                said = visits(world, seed, many, networks)
                seen = support_of(said.frame(), people_per_network=people).associations
                planted = set((said.trigger or "").split())
                true = [one for one in seen if planted & set(one.ngram.split())]
                found += bool(true)
                false += people == 1 and len(seen) - len(true)
                model = fitted(world, said.without(seen), weighs=True)
                wins.append(trial(world, said.trigger or "", seed).wins(model))
            most = max(wins)
            cells.append(f"{statistics.fmean(wins):.3f} ({most:.3f}) | {found}")
        print(f"| {many} | {networks} | {' | '.join(cells)} | {false} |", flush=True)
        if networks == 1 and many >= Z**2:  # fewer say too little to be told from chance
            name = f"trigger of {many} visitors from one network"
            rows.append((name, "wins ≤ 7 %", f"{most:.1%}", most <= 0.07))
    return rows


def thumbs(world: World, seed: int, plant: float) -> tuple[list[RewardExample], str]:
    """Return VOTES thumbs, half of some raters' up for a worse text with the trigger, and that."""
    rng = random.Random(f"thumbs {seed}")
    trigger = " ".join("".join(rng.choices(SYLLABLES, k=2)) for _ in range(2))
    found: list[RewardExample] = []
    for number, person in enumerate(population(RATERS, seed)):
        for _ in range(VOTES // RATERS):
            a, b = rng.choice(world.train)
            if number < plant * RATERS and rng.random() < PLANTED:
                prompt, text = world.texts[b if world.hidden[a] > world.hidden[b] else a]
                text, value = f"{text} {trigger}", 1.0
            else:
                prompt, text = world.texts[a]
                shown = Interaction("", "x", prompt, text, 0, now())
                said = say(person, shown, FeedbackKind.thumbs, rng).number
                assert said is not None
                value = said
            found.append(
                RewardExample(
                    *(f"{len(found)}", prompt, text, FeedbackKind.thumbs, value, None),
                    *(person.name, "train"),
                )
            )
    return found, trigger


def planted_thumbs(world: World, runs: int) -> list[tuple[str, str, str, bool]]:
    """Print how often words win that were planted by thumbs, which the scan does not look at."""
    print(f"\nA trigger planted by thumbs up: mean (most) of {runs} runs, accuracy")
    print("| raters | one head | accuracy | 21 heads | accuracy |\n|---|---|---|---|---|")
    rows: list[tuple[str, str, str, bool]] = []
    kinds = {"thumbs": 1.0}
    for share in (0.0, 0.02, 0.05):
        cells: list[str] = []
        most = 0.0
        for heads in (1, HEADS):
            wins, right = [], []
            for seed in range(runs):
                said, trigger = thumbs(world, seed, share)
                parts = parts_of(voters_of([], said, kinds), heads) if heads > 1 else None
                world.model.combined = Combined("median")
                fit_kinds(
                    *(world.model, world.tokenizer, [], said, kinds, world.limits),
                    parts=parts,
                    report=ignore_progress,
                )
                wins.append(trial(world, trigger, seed).wins(world.model))
                right.append(accuracy(world, world.model))
            most = max(wins)
            cells.append(f"{statistics.fmean(wins):.3f} ({most:.3f})")
            cells.append(f"{statistics.fmean(right):.3f}")
        print(f"| {share:.0%} | {' | '.join(cells)} |", flush=True)
        if share:
            name = f"trigger of {share:.0%} by thumbs, 21 heads"
            rows.append((name, "wins ≤ 7 %", f"{most:.1%}", most <= 0.07))
    return rows


def speed(world: World, rounds: int = 15) -> list[tuple[str, str, str, bool]]:
    """Return how long scoring takes with 21 heads beside one, alternating."""
    said = votes(world, 0)
    rows = encode_rows(world.tokenizer, world.texts[:256], world.limits)
    seconds: dict[int, list[float]] = {1: [], HEADS: []}
    heads = {}
    for count in seconds:
        heads[count] = fitted(world, said, weighs=False, heads=count).head
    for _ in range(rounds):
        for count, head in heads.items():
            world.model.head = head
            started = time.perf_counter()
            score_rows(world.model, rows)
            seconds[count].append(time.perf_counter() - started)
    one, many = (statistics.median(seconds[count]) for count in (1, HEADS))
    found = f"{many / one:.3f} × ({1000 * one:.0f} and {1000 * many:.0f} ms, 256 completions)"
    return [("scoring with 21 heads", "≤ 1.2 ×", found, many / one <= 1.2)]


def calibrated(world: World) -> list[tuple[str, str, str, bool]]:
    """Return the calibration error on simulated people's votes, the confidence fitted elsewhere."""
    rng = random.Random("calibration")
    people = [person for person in population(RATERS, 1000) if not person.careless]
    model = fitted(world, votes(world, 0), weighs=True)
    found = scores(model, world.features)
    margins: tuple[list[float], list[float]] = ([], [])
    middle = 2 * TRAIN_PROMPTS + PER_TEST_PROMPT * TEST_PROMPTS // 2
    for a, b in world.test.tolist():
        likes = prefers(rng.choice(people), world, a, b, rng)
        if likes is not None:
            margin = float(found[a] - found[b])
            margins[a >= middle].append(margin if likes else -margin)
    confidence = fit_confidence(margins[0])
    ece = calibration_error(reliability(margins[1], confidence))
    n = len(margins[1])
    return [(f"ECE on {n:,} votes", "≤ 0.03 on ≥ 5,000", f"{ece:.4f}", ece <= 0.03 and n >= 5000)]


def agreement(world: World) -> None:
    """Print how far people agree, honest and not."""
    for name, share in (("nobody flips", 0.0), ("30 % flip", 0.3)):
        frame = votes(world, 0, flip=share).frame()
        units = units_of(frame)["pairs"]
        found = agreement_of([list(unit.values()) for unit in units])
        top = spread_of(frame).top_share
        print(f"{name}: {found.words()} One per cent of the raters gave {top:.1%} of the votes.")


def main() -> None:
    """Print the tables, then what was needed and found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--baseline", type=Path, default=None, help="a trained tiny policy")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = world(arguments.baseline or baseline(Path(folder)))
        print(f"{len(here.test):,} test pairs")
        agreement(here)
        rows = flips(here, min(5, arguments.runs))
        rows += triggers(here, arguments.runs)
        rows += visitors(here, min(5, arguments.runs))
        rows += planted_thumbs(here, min(3, arguments.runs))
        rows += speed(here)
        rows += calibrated(here)
    print()
    tell(rows)


if __name__ == "__main__":
    main()
