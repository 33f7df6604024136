"""Somebody who comes again and again as somebody else, in a live experiment.

    python -m benchmarks.stuffing [--runs 20] [--honest 400]

Honest visitors come to the last step of the ramp, half of them to either arm, each from a network
of their own, and vote on two answers. Somebody who drops the cookie after every visit, and knows
which version answered, votes up the one and down the other: at once as the step begins, which is
worse than in between, from so many networks. Rows are in a store, and every look is the service's
own: `measured` and `decide`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from rlhf_pipeline.config import ExperimentSettings
from rlhf_pipeline.database import Database
from rlhf_pipeline.experiment.assignment import Arm, arm_of
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.experiment.decision import decide
from rlhf_pipeline.experiment.live import bounds_under, guardrails_under, measured
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Feedback, FeedbackKind, Interaction, now, user_prompt, uuid7

AGENT = "shop"
RATE = 0.70  # of the champion's answers that people like
SPREAD = 1 / 0.3 - 1  # people agree with themselves: an intra-class correlation of 0.3
VISITS = (0, 5, 20, 50, 100, 200, 400)
NETWORKS = (1, 20, 50, 100, 200)  # from which as many visits as are most come
CASES: tuple[tuple[str, float, Arm, str], ...] = (
    ("10 points worse: promoted", -0.1, "challenger", "promote"),
    ("as good: promoted", 0.0, "challenger", "promote"),
    ("10 points better: rolled back", 0.1, "champion", "roll_back"),
)
EVERY = 20  # visits between looks


@dataclass(frozen=True)
class Visit:
    """One visitor, who chats twice and votes on both answers."""

    name: str
    network: str
    favours: Arm | None = None  # of somebody who stuffs: the arm whose answers they praise


def visits(
    rng: random.Random, honest: int, stuffed: int, favours: Arm, *, networks: int, first: bool
) -> list[Visit]:
    """Return who comes, in order: those who stuff all at once at the beginning, or in between."""
    names = [f"{rng.random()}" for _ in range(honest)]
    people = [Visit(name, f"home {name}") for name in names]
    crowd = [
        Visit(f"stuffed {rng.random()}", f"line {number % networks}", favours)
        for number in range(stuffed)
    ]
    if first:
        return [*crowd, *people]
    people += crowd
    rng.shuffle(people)
    return people


def play(
    seed: int,
    lift: float,
    stuffed: int,
    favours: Arm,
    *,
    honest: int,
    networks: int,
    settings: ExperimentSettings,
    first: bool = True,
) -> str:
    """Return how one experiment ends whose challenger is so much better."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{Path(folder)}/store.db")
        try:
            store = FeedbackStore(database)
            store.ensure_agent(AGENT)
            book = ExperimentBook(database)
            begun = book.start(
                AGENT, champion=0, challenger=1, share=settings.ramp[-1], actor="benchmark"
            )
            coming = visits(rng, honest, stuffed, favours, networks=networks, first=first)
            at = now() - timedelta(days=1)
            for start in range(0, len(coming), EVERY):
                said: list[Interaction] = []
                votes: list[Feedback] = []
                for visit in coming[start : start + EVERY]:
                    arm = arm_of(begun.experiment_id, visit.name, begun.share)
                    rate = RATE + (lift if arm == "challenger" else 0.0)
                    own = rng.betavariate(rate * SPREAD, (1 - rate) * SPREAD)
                    if visit.favours is not None:
                        own = float(arm == visit.favours)
                    for _ in range(2):
                        at += timedelta(milliseconds=1)
                        one = Interaction(
                            interaction_id=uuid7(),
                            agent_id=AGENT,
                            prompt=user_prompt("how much is the kettle?"),
                            completion="twelve pounds",
                            model_version=int(arm == "challenger"),
                            created_at=at,
                            user_id=visit.name,
                            experiment=begun.experiment_id,
                            arm=arm,
                            sampling={
                                "challenger_share": begun.share,
                                "fell_back": False,
                                "network": visit.network,
                            },
                            latency_seconds=0.2,
                        )
                        said.append(one)
                        vote = Feedback(
                            AGENT,
                            FeedbackKind.thumbs,
                            uuid7(),
                            interaction_id=one.interaction_id,
                            number=float(rng.random() < own),
                        )
                        votes.append(replace(vote, rater_id=visit.name))
                store.add_interactions(said)
                store.append(votes)
                arms, steps = measured(database, begun, settings)
                verdict = decide(
                    arms,
                    steps,
                    bounds=bounds_under(settings),
                    guardrails=guardrails_under(settings),
                    timed_out=start + EVERY >= len(coming),
                )
                if verdict.action != "continue":
                    return verdict.action
        finally:
            database.close()
    raise AssertionError("an experiment that is out of time ends")


def main() -> None:
    """Print how often what must not happen does, of so many experiments each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--honest", type=int, default=400)
    options = parser.parse_args()

    def wrong(
        lift: float, favours: Arm, end: str, visits: int, networks: int, most: int | None
    ) -> str:
        settings = ExperimentSettings(people_per_network=most)
        ends = Counter(
            play(
                seed,
                lift,
                visits,
                favours,
                honest=options.honest,
                networks=networks,
                settings=settings,
            )
            for seed in range(options.runs)
        )
        return f"{ends[end]}"

    for name, lift, favours, end in CASES:
        print(f"\n{name}, of {options.runs}; {options.honest} honest visitors\n")
        print("| visits | each counts | by network, of one |\n|---|---|---|")
        for visits in VISITS:
            cells = [wrong(lift, favours, end, visits, 1, most) for most in (None, 1)]
            print(f"| {visits} | {' | '.join(cells)} |", flush=True)
        for networks in NETWORKS[1:]:
            found = wrong(lift, favours, end, VISITS[-1], networks, 1)
            print(f"| {VISITS[-1]} of {networks} networks | | {found} |", flush=True)


if __name__ == "__main__":
    main()
