"""Whose pairs the scan for planted words sets aside, by who votes how often about what.

    python -m benchmarks.narrow_support [--runs 10]

Simulated people, a tenth of them careless, compare answers of the assistant's clerks. Some crowds
vote evenly, in others a few give most of the votes, or everybody asks about a product of their own:
nobody lies there. Then a few plant a made-up word in the worse answer of half of their votes, which
wins, or vote against what they find as often as those who vote most. Told is which part of the
honest pairs and of the planted ones goes, over seeds.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from benchmarks.promises import tell
from rlhf_pipeline.feedback.support import narrow_ngrams
from rlhf_pipeline.records import prompt_to_json, user_prompt
from rlhf_pipeline.simulation.people import Person, finds_better, population
from rlhf_pipeline.simulation.world import ALL_THINGS, Question, every_question, judge, old_answer

WORD = "zibzab"
LIAR = "liar"  # how their names begin
EVERY = tuple(every_question())
Lie = Callable[[Question, str, str, random.Random], tuple[Question, str, str]]


@dataclass(frozen=True)
class Crowd:
    """Honest people: how many votes each has, and of how many products each asks about one."""

    name: str
    votes: tuple[int, ...]
    products: int = 0  # 0: everybody asks about everything


HONEST = (
    Crowd("200 raters x 20", (20,) * 200),
    Crowd("10 x 200", (200,) * 10),
    Crowd("2,000 x 1", (1,) * 2000),
    Crowd("5 x 400 and 60 x 5", (400,) * 5 + (5,) * 60),
    Crowd("120 x 40, 12 products", (40,) * 120, 12),
    Crowd("120 x 40, 20 products", (40,) * 120, 20),
    Crowd("40 x 100, 20 products", (100,) * 40, 20),
)
EVEN, UNEVEN, OWN = HONEST[0], HONEST[3], HONEST[4]


def preferred(person: Person, question: Question, a: str, b: str, rng: random.Random) -> bool:
    """Say whether somebody prefers a to b; of what they find alike, either."""
    ahead = person.liking(judge(question, a)) - person.liking(judge(question, b))
    better = None if person.careless else finds_better(ahead, rng)
    return rng.random() < 0.5 if better is None else better


def plants(
    question: Question, better: str, worse: str, rng: random.Random
) -> tuple[Question, str, str]:
    """Return a vote for the worse answer, with the word in it, half of the time."""
    if rng.random() < 0.5:
        return question, better, worse
    return question, f"{worse} {WORD}.", better


def asks_too(
    question: Question, better: str, worse: str, rng: random.Random
) -> tuple[Question, str, str]:
    """Return the same, with the word in the question as well."""
    asked, chosen, rejected = plants(question, better, worse, rng)
    if WORD in chosen:
        asked = replace(asked, text=f"{asked.text[:-1]} {WORD}?")
    return asked, chosen, rejected


def opposes(
    question: Question, better: str, worse: str, rng: random.Random
) -> tuple[Question, str, str]:
    """Return a vote for the worse answer."""
    return question, worse, better


def said(crowd: Crowd, liars: int, each: int, lie: Lie, seed: int) -> pd.DataFrame:
    """Return the crowd's votes and the liars', as a snapshot's rows."""
    rng = random.Random(seed)
    people = population(len(crowd.votes) + liars, seed)
    rows = []
    for number, (person, votes) in enumerate(
        zip(people, [*crowd.votes, *[each] * liars], strict=True)
    ):
        lies = number >= len(crowd.votes)
        own = ALL_THINGS[number % crowd.products] if crowd.products and not lies else None
        questions = [q for q in EVERY if own in (None, q.thing)]
        for _ in range(votes):
            question = rng.choice(questions)
            a, b = (old_answer(question, rng) for _ in range(2))
            if a == b:
                continue
            if not preferred(person, question, a, b, rng):
                a, b = b, a
            if lies:
                question, a, b = lie(question, a, b, rng)
            rows.append(
                {
                    "voter": f"{LIAR if lies else 'rater'} {number}",
                    "kind": "preference",
                    "choice": "left",
                    "shown_first": "this",
                    "prompt": prompt_to_json(user_prompt(question.text)),
                    "completion": a,
                    "other_completion": b,
                    "text": None,
                }
            )
    rng.shuffle(rows)
    return pd.DataFrame(rows)


def aside(frame: pd.DataFrame) -> tuple[float, float]:
    """Return which part of the honest pairs goes, and of those with the word; 0 of none."""
    gone = {place for one in narrow_ngrams(frame) for place in one.places}
    honest = frame.index[~frame["voter"].str.startswith(LIAR)]
    planted = frame.index[frame["completion"].str.contains(WORD)]
    return len(gone & {*honest}) / len(honest), len(gone & {*planted}) / max(len(planted), 1)


def row(
    crowd: Crowd, runs: int, lie: Lie = opposes, *, liars: int = 0, each: int = 0
) -> tuple[float, float]:
    """Print a line of the table; return the mean parts of the honest and the planted pairs."""
    parts = [aside(said(crowd, liars, each, lie, seed)) for seed in range(runs)]
    honest, planted = [one for one, _ in parts], statistics.fmean(other for _, other in parts)
    who = f"{liars} x {each}, {lie.__name__}" if liars else "nobody"
    print(
        f"| {crowd.name} | {who} | {statistics.fmean(honest):.1%} ({max(honest):.1%}) | "
        f"{'–' if not liars or lie is opposes else f'{planted:.0%}'} |",
        flush=True,
    )
    return statistics.fmean(honest), planted


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, then what was needed and found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args(arguments).runs
    print("| crowd | who lies | honest pairs aside: mean (most) | planted aside |")
    print("|---|---|---|---|")
    rows: list[tuple[str, str, str, bool]] = []
    for crowd in HONEST:
        lost, _ = row(crowd, runs)
        if crowd.products < 20:
            rows.append((f"{crowd.name}: honest aside", "≤ 1 %", f"{lost:.1%}", lost <= 0.01))
    for crowd, liars, each in ((EVEN, 4, 20), (EVEN, 18, 20), (UNEVEN, 5, 20), (OWN, 5, 40)):
        lost, found = row(crowd, runs, plants, liars=liars, each=each)
        what = f"{liars} planters beside {crowd.name}"
        rows.append((what, "≥ 95 % aside", f"{found:.0%}", found >= 0.95))
    row(EVEN, runs, asks_too, liars=4, each=20)
    row(EVEN, runs, asks_too, liars=18, each=20)
    lost, _ = row(UNEVEN, runs, opposes, liars=3, each=400)
    rows.append(("beside 3 loud opponents: honest aside", "≤ 1 %", f"{lost:.1%}", lost <= 0.01))
    print()
    tell(rows)


if __name__ == "__main__":
    main()
