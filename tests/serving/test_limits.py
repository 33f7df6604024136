"""How often one key, one token and one person may come."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rlhf_pipeline.config import FeedbackSettings
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.serving import limits
from rlhf_pipeline.serving.feedback_api import Inbox, add_feedback_route
from rlhf_pipeline.serving.limits import Buckets, RaterLimit

VOTE = {"agent_id": "tea", "kind": "thumbs", "value": "up", "prompt": "hi", "completion": "hello"}


class Clock:
    """Stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_then_its_rate_and_never_more() -> None:
    clock = Clock()
    buckets = Buckets(clock)
    given = []
    for tenth in range(101):  # ten seconds: 5 at once, then 2 a second
        clock.now = tenth / 10
        given += [buckets.spend({"a": 1}, rate=2, burst=5) == 0 for _ in range(3)]
    assert sum(given) == 5 + 2 * 10
    assert buckets.spend({"a": 1}, rate=2, burst=5) == pytest.approx(0.5)
    assert buckets.spend({"a": 1, "b": 1}, rate=2, burst=5) > 0  # and so b's is still full
    assert all(buckets.spend({"b": 1}, rate=2, burst=5) == 0 for _ in range(5))
    clock.now += 3600
    assert buckets.spend({"a": 9}, rate=2, burst=5) == 0  # more than a burst: the rest is owed
    assert buckets.spend({"a": 1}, rate=2, burst=5) == pytest.approx((1 + 9 - 5) / 2)


def test_names_without_end_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_NAMES", 3)
    buckets = Buckets(Clock())
    for name in "abcde":
        buckets.spend({name: 1}, rate=1, burst=1)
    assert len(buckets) == 3
    assert [buckets.spend({name: 1}, rate=1, burst=1) > 0 for name in "cde"] == [True] * 3


def test_one_person_votes_only_so_often_and_nobody_else_waits(tmp_path: Path) -> None:
    database, clock = Database(f"sqlite:///{tmp_path}/feedback.db"), Clock()
    store, app = FeedbackStore(database), FastAPI()
    limit = RaterLimit(3, Buckets(clock))
    add_feedback_route(app, Inbox(store, limit), enabled=True)

    def send(**changes: Any) -> httpx.Response:
        rows = changes.pop("events", None)
        body = {**VOTE, **changes} if rows is None else {"events": [{**VOTE, **r} for r in rows]}

        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            headers = {"content-type": "application/json"}
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as user:
                return await user.post("/v1/feedback", content=json.dumps(body), headers=headers)

        return asyncio.run(post())

    ann = [send(rater="ann").status_code for _ in range(4)]
    assert ann == [200, 200, 200, 429]
    refused = send(events=[{"rater": "ann"}, {"rater": "bea"}])
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "20")
    assert "3 votes a minute" in refused.json()["error"]
    free: list[dict[str, Any]] = [
        {"rater": "bea"},
        {"rater": "ann", "agent_id": "milk"},
        {"rater": "ann", "source": "model"},
        {},
    ]
    for other in free:
        assert send(**other).status_code == 200
    clock.now = 20.0
    assert [send(rater="ann").status_code for _ in range(2)] == [200, 429]
    assert store.counts("tea") == {"thumbs": 4}  # ann's, a model's, bea's, an unsigned one
    database.close()


def test_the_default_lets_a_person_vote_twice_a_second() -> None:
    assert FeedbackSettings().votes_per_minute == 120
