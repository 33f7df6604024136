"""Does the service slow down as its store fills? A vote, and the review queue, in two stores.

    python -m benchmarks.large_store [--interactions 1000000] [--rounds 300]

The small store holds one queue's worth of answers, the large one a million and half as many votes.
Each has a real server process; votes go to one and the other in turn, over HTTP, and the queue of
the review page is made in turn in this process. Medians, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx

from benchmarks.promises import tell
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import hash_rater, hashed, user_prompt, uuid7
from rlhf_pipeline.records import prompt_to_json as written
from rlhf_pipeline.serving.pages import review
from tests.serving.kills import start
from tests.serving.pages.world import free_port

SMALL = review.NEWEST
AGENT = "tea"


def fill(state: Path, interactions: int) -> list[str]:
    """Make a store of so many answers and half as many votes; return the newest answers' ids."""
    database = Database(f"sqlite:///{state / 'feedback.db'}")
    FeedbackStore(database).ensure_agent(AGENT)
    ids = [uuid7() for _ in range(interactions)]
    first = datetime(2026, 1, 1, tzinfo=UTC)

    def moment(n: int) -> str:
        return (first + timedelta(seconds=10 * n)).strftime("%Y-%m-%d %H:%M:%S.%f")

    with sqlite3.connect(state / "feedback.db") as raw:
        raw.executemany(
            "INSERT INTO interactions (interaction_id, agent_id, session_id, model_version, "
            "prompt, completion, sampling, created_at) VALUES (?, ?, ?, 1, ?, ?, ?, ?)",
            (
                (
                    key,
                    AGENT,
                    f"session {n // 4}",
                    written(user_prompt(f"Why is the sky blue on day {n}?")),
                    f"Because of how air scatters light, number {n}.",
                    json.dumps({"disagreement": (n * 7919 % 1000) / 1000, "seed": n}),
                    moment(n),
                )
                for n, key in enumerate(ids)
            ),
        )
        raw.executemany(
            "INSERT INTO feedback (feedback_id, agent_id, idempotency_key, body_sha256, kind, "
            "target, voter, rater_id, interaction_id, number, shown_first, source, origin, tags, "
            "occurred_at, received_at) VALUES "
            "(?, ?, ?, ?, 'thumbs', ?, ?, ?, ?, ?, 'this', 'human', 'api', '[]', ?, ?)",
            (
                (
                    uuid7(),
                    AGENT,
                    f"vote {n}",
                    hashed(str(n)),
                    ids[2 * n],
                    hash_rater(AGENT, f"person {n % 5000}"),
                    hash_rater(AGENT, f"person {n % 5000}"),
                    ids[2 * n],
                    float(n % 3 > 0),
                    moment(2 * n),
                    moment(2 * n),
                )
                for n in range(interactions // 2)
            ),
        )
    raw.close()
    database.close()
    return ids[-SMALL:]


def posts(address: str, ids: list[str]) -> Callable[[int], None]:
    """Return what sends the n-th vote on one of the newest answers."""
    client = httpx.Client(base_url=address, timeout=30)

    def post(n: int) -> None:
        vote = {
            "agent_id": AGENT,
            "kind": "thumbs",
            "value": "up",
            "interaction_id": ids[n % len(ids)],
            "rater": f"reader {n}",
        }
        assert client.post("/v1/feedback", json=vote).status_code == 200

    return post


def queues(state: Path) -> Callable[[int], None]:
    """Return what makes a review queue and its line on agreement, as the page does."""
    database = Database(f"sqlite:///{state / 'feedback.db'}")

    def queue(n: int) -> None:
        rater = hash_rater(AGENT, f"annotator:{n}")
        assert len(review.queue(database, AGENT, rater)) == review.AT_ONCE
        review.agreement(database, AGENT)

    return queue


def in_turn(works: list[Callable[[int], None]], rounds: int) -> list[float]:
    """Return the median milliseconds of each, done one after the other in every round."""
    took: list[list[float]] = [[] for _ in works]
    for n in range(-5, rounds):  # the first five warm up
        for work, seconds in zip(works, took, strict=True):
            began = time.perf_counter()
            work(n)
            if n >= 0:
                seconds.append(1000 * (time.perf_counter() - began))
    return [statistics.median(seconds) for seconds in took]


def main() -> None:
    """Print the table; status 1 where a promise is short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interactions", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    rows: list[tuple[str, str, str, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        states = [Path(folder) / "small", Path(folder) / "large"]
        newest = []
        for state, answers in zip(states, (SMALL, options.interactions), strict=True):
            state.mkdir()
            newest.append(fill(state, answers))
            print(f"{state.name} store: {answers:,} answers, {answers // 2:,} votes", flush=True)
        ports = [free_port(), free_port()]
        servers = [start(state, port) for state, port in zip(states, ports, strict=True)]
        try:
            voting = [
                posts(f"http://127.0.0.1:{port}", ids)
                for port, ids in zip(ports, newest, strict=True)
            ]
            for what, works, rounds in (
                ("one vote", voting, options.rounds),
                ("review queue", [queues(state) for state in states], options.rounds // 3),
            ):
                small, large = in_turn(works, rounds)
                ratio = large / small
                told = f"{ratio:.2f} ({large:.1f} / {small:.1f} ms)"
                rows.append((f"{what}, large over small store", "≤ 1.2", told, ratio <= 1.2))
        finally:
            for server in servers:
                server.kill()
                server.wait()
    tell(rows)


if __name__ == "__main__":
    main()
