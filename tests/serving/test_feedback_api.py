"""Votes from other programs: answered once they are stored, once however often they are sent."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_pipeline import database as db
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import FeedbackRefused, IdempotencyConflict
from rlhf_pipeline.experiment.live import CLOCKS_APART
from rlhf_pipeline.feedback.formats import EVENT_FIELDS
from rlhf_pipeline.feedback.store import FeedbackStore, Stored, VoteTicket
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    now,
    prompt_to_json,
    user_prompt,
    uuid7,
)
from rlhf_pipeline.serving import feedback_api
from rlhf_pipeline.serving.chat_api import ChatMessage
from rlhf_pipeline.serving.feedback_api import Inbox, add_feedback_route, take
from rlhf_pipeline.serving.feedback_schema import COMMON

VOTE: dict[str, Any] = {
    "agent_id": "tea",
    "kind": "thumbs",
    "value": "up",
    "prompt": "hi",
    "completion": "hello",
    "rater": "ann",
}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FeedbackStore]:
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('api')}/feedback.db")
    yield FeedbackStore(database)
    database.close()


def send(
    store: FeedbackStore,
    body: bytes | dict[str, Any],
    *,
    enabled: bool = True,
    headers: dict[str, str] | None = None,
) -> Any:
    """Return the answer of a real application, without a socket."""

    import httpx
    from fastapi import FastAPI

    app = FastAPI()
    add_feedback_route(app, Inbox(store), enabled=enabled)

    async def post() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(
                "/v1/feedback", content=content, headers={**JSON, **(headers or {})}
            )

    return asyncio.run(post())


def test_a_vote_is_stored_once(store: FeedbackStore) -> None:
    first = send(store, VOTE, headers={"idempotency-key": "k1"})
    assert first.status_code == 200
    again = send(store, VOTE, headers={"idempotency-key": "k1"})
    assert again.json() == first.json()
    other = send(store, {**VOTE, "value": "down"}, headers={"idempotency-key": "k1"})
    assert other.status_code == 409
    keyless = {**VOTE, "agent_id": "keyless"}
    assert send(store, keyless).json() != send(store, keyless).json()  # somebody else's
    assert store.counts("tea") == {"thumbs": 1}


def test_a_prompt_is_taken_as_the_chat_takes_it(store: FeedbackStore) -> None:
    asked: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("how much", "is it?")]},
    ]
    assert send(store, {**VOTE, "agent_id": "asked", "prompt": asked}).status_code == 200
    with store.database.read() as connection:
        query = "SELECT prompt FROM feedback WHERE agent_id = 'asked'"
        kept = connection.exec_driver_sql(query).scalar_one()
    assert kept == prompt_to_json(tuple(ChatMessage.model_validate(one).message() for one in asked))
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    for parts in ([], [picture], [*asked[1]["content"], picture]):
        refused = send(store, {**VOTE, "prompt": [{"role": "user", "content": parts}]})
        assert (refused.status_code, refused.json()["rule"]) == (422, "wrong_type")


def test_a_criterion_that_is_null_was_not_judged(store: FeedbackStore) -> None:
    vote = {**VOTE, "agent_id": "judged", "kind": "criteria"}
    judged = send(store, {**vote, "value": {"helpful": 0.5, "polite": None}})
    assert judged.status_code == 200
    with store.database.read() as connection:
        query = "SELECT criteria FROM feedback WHERE agent_id = 'judged'"
        assert json.loads(connection.exec_driver_sql(query).scalar_one()) == {"helpful": 0.5}
    nothing = send(store, {**vote, "value": {"polite": None}})
    assert (nothing.status_code, nothing.json()["rule"]) == (422, "value_missing")


def test_many_votes_get_an_answer_each(store: FeedbackStore) -> None:
    rows = [
        {**VOTE, "agent_id": "many"},
        {**VOTE, "agent_id": "many", "value": 7},
        {**VOTE, "agent_id": "many", "interaction_id": "i0", "prompt": None, "completion": None},
        "no object",
        {**VOTE, "agent_id": "many", "kind": "rating", "value": 5},
    ]
    answer = send(store, {"events": rows}, headers={"idempotency-key": "batch"})
    assert len({one["feedback_id"] for one in answer.json()["results"] if "rule" not in one}) == 2
    found = [one.get("rule", "stored") for one in answer.json()["results"]]
    expected = "stored value_out_of_range unknown_interaction not_an_object stored"
    assert found == expected.split()
    assert store.counts("many") == {"rating": 1, "thumbs": 1}
    again = send(store, {"events": rows}, headers={"idempotency-key": "batch"})
    assert again.json() == answer.json()


def test_a_row_that_has_a_key_keeps_it_whatever_request_carries_it(store: FeedbackStore) -> None:
    unsigned = {k: v for k, v in VOTE.items() if k != "rater"} | {"agent_id": "keyed"}
    rows = [{**unsigned, "idempotency_key": f"ticket-{n}"} for n in range(3)]
    requests: list[Any] = [{"events": rows}, {"events": rows}, {"events": rows[1:]}, rows[0]]
    for n, body in enumerate(requests):
        headers = {"idempotency-key": f"request-{n}"} if n else None
        assert send(store, body, headers=headers).status_code == 200
    assert store.counts("keyed") == {"thumbs": 3}


def test_a_key_for_another_topic_or_time_is_refused(store: FeedbackStore) -> None:
    key, then = {"idempotency-key": "about"}, "2024-01-01T00:00:00Z"
    sent = {**VOTE, "agent_id": "about", "topic": "prices", "occurred_at": then}
    first = send(store, sent, headers=key)
    assert send(store, sent, headers=key).json() == first.json()
    for change in ({"topic": "hours"}, {"occurred_at": "2025-01-01T00:00:00Z"}):
        assert send(store, {**sent, **change}, headers=key).status_code == 409


@pytest.mark.parametrize("length", [1, 197, 198, 199, 200])
def test_a_key_of_any_length_that_is_allowed_serves_many_votes(
    store: FeedbackStore, length: int
) -> None:
    agent, key = f"long-{length}", {"idempotency-key": "k" * length}
    rows = [{**VOTE, "agent_id": agent, "rater": n} for n in range(11)]
    answer = send(store, {"events": rows}, headers=key)
    assert store.counts(agent) == {"thumbs": 11}
    assert send(store, {"events": rows}, headers=key).json() == answer.json()
    other = send(store, {"events": rows}, headers={"idempotency-key": "j" * length})
    assert not {str(one) for one in other.json()["results"]} & {
        str(one) for one in answer.json()["results"]
    }
    with store.database.read() as connection:
        query = sa.select(db.feedback.c.idempotency_key).where(db.feedback.c.agent_id == agent)
        keys = list(connection.execute(query).scalars())
    assert len(set(keys)) == 22
    plain = {f"{'k' * length}:{n}" for n in range(11)}
    assert plain & set(keys) == {one for one in plain if len(one) <= 200}


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"{", 422, "broken_json"),
        (b"[1]", 422, "not_an_object"),
        (b'{"agent_id": "tea", "kind": "score", "value": NaN}', 422, "not_finite"),
        (b'{"agent_id": 3}', 422, "bad_agent"),
        (b'{"agent_id": "tea", "kind": "thumbs", "vlaue": 1}', 422, "unknown_field"),
        (b'{"events": []}', 422, "wrong_type"),
        (b"[" * 100_000, 422, "broken_json"),
        (b"\xff", 422, "not_utf8"),
    ],
)
def test_what_is_no_vote_is_refused_by_name(
    store: FeedbackStore, body: bytes, code: int, says: str
) -> None:
    answer = send(store, body)
    assert answer.status_code == code
    assert says in answer.text


@pytest.mark.parametrize(
    ("rater", "rule"),
    [("\ud800", "bad_text"), ("a\x00b", "bad_text"), ("x" * 2_000_000, "too_long")],
)
def test_a_rater_that_cannot_be_one_is_named(store: FeedbackStore, rater: str, rule: str) -> None:
    sent = {**VOTE, "agent_id": "nameless", "rater": rater}
    alone = send(store, sent)
    [one] = send(store, {"events": [sent]}).json()["results"]
    assert alone.status_code == 422
    for refusal in (alone.json(), one):
        assert (refusal["rule"], "rater" in refusal["error"]) == (rule, True)
        assert len(refusal["error"]) < 200
    assert store.counts("nameless") == {}


def test_the_longest_rater_is_what_openapi_says(store: FeedbackStore) -> None:
    sent = {**VOTE, "agent_id": "long-names", "rater": "x" * COMMON["rater"]["maxLength"]}
    assert send(store, sent).status_code == 200
    assert send(store, {**sent, "rater": sent["rater"] + "x"}).status_code == 422


def test_a_form_from_another_page_is_refused(store: FeedbackStore) -> None:
    assert send(store, VOTE, headers={"content-type": "text/plain"}).status_code == 415


@pytest.mark.parametrize("trouble", ["query_only=ON", "max_page_count=1"])
def test_a_store_that_cannot_be_written_says_to_come_back(trouble: str, tmp_path: Path) -> None:
    """SQLite itself refuses: a read-only database, and one that may not grow."""
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    store = FeedbackStore(database)
    long = {**VOTE, "comment": "x" * 9000}
    assert send(store, {**VOTE, "agent_id": "before"}).status_code == 200

    def spoil(connection: Any, *_: Any) -> None:
        connection.execute(f"PRAGMA {trouble}")

    sa.event.listen(database.engine, "checkout", spoil)
    answer = send(store, long)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    sa.event.remove(database.engine, "checkout", spoil)
    database.close()
    assert send(store, long).status_code == 200
    assert store.counts("tea") == {"thumbs": 1}
    database.close()


def test_a_release_that_was_overtaken_says_to_come_back(tmp_path: Path) -> None:
    store = FeedbackStore(Database(f"sqlite:///{tmp_path}/feedback.db"))
    assert send(store, VOTE).status_code == 200
    with store.database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    answer = send(store, VOTE)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert store.counts("tea") == {"thumbs": 1}
    store.database.close()


def test_a_vote_waits_for_an_answer_whose_machine_has_a_faster_clock(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timedelta(seconds=feedback_api.FASTER_SECONDS) == CLOCKS_APART
    ahead = time.time_ns() + int(0.99 * feedback_api.FASTER_SECONDS * 1e9)
    with monkeypatch.context() as faster:
        faster.setattr(time, "time_ns", lambda: ahead)
        written, failed = uuid7(), uuid7()
    looks = iter(range(1000))

    def looked_for(interaction_id: str) -> Interaction | None:
        if interaction_id == written and next(looks) == 1:
            said = Interaction(written, "ahead", user_prompt("hi"), "hello", 0, now())
            store.add_interactions([said])
        return found_in(interaction_id)

    found_in = store.interaction
    monkeypatch.setattr(store, "interaction", looked_for)
    vote = {"agent_id": "ahead", "kind": "thumbs", "value": "up"}
    answers = {
        one: asyncio.run(
            take(
                Inbox(store, longest_answer=longest),
                json.dumps({**vote, "interaction_id": one}).encode(),
                None,
            )
        )[0]
        for one, longest in ((written, 120.0), (failed, 0.5))
    }
    assert answers == {written: 200, failed: 422}


def test_a_closed_door_says_so(store: FeedbackStore) -> None:
    assert send(store, VOTE, enabled=False).status_code == 503


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*sorted(EVENT_FIELDS), "events"]), JSON_VALUES))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_no_body_is_an_error_of_ours(store: FeedbackStore, changes: dict[str, Any]) -> None:
    body = json.dumps({**VOTE, **changes}).encode()
    code, told = asyncio.run(take(Inbox(store), body, None))
    assert code in (200, 409, 422)
    assert "feedback_id" in told or "error" in told or "results" in told


def thumb(key: str, **changes: Any) -> Feedback:
    said: dict[str, Any] = {"prompt": user_prompt("hi"), "completion": key, "number": 1.0}
    return Feedback("crowd", FeedbackKind.thumbs, idempotency_key=key, **{**said, **changes})


def test_votes_that_arrive_together_share_commits(store: FeedbackStore) -> None:
    commits: list[int] = []

    class Counted(FeedbackStore):
        def commit(self, tickets: Sequence[VoteTicket]) -> None:
            commits.append(len(tickets))
            super().commit(tickets)

    async def crowd() -> list[Any]:
        inbox = Inbox(Counted(store.database))
        lost = {"prompt": None, "completion": None, "interaction_id": "nobody's"}
        sent = [[thumb(f"vote {n}")] for n in range(40)]
        sent += [[thumb("vote 7", number=0.0)], [thumb("gone", **lost)], [thumb("vote 7")]]
        tasks = [asyncio.create_task(inbox.put(events)) for events in sent]
        await asyncio.sleep(0)
        tasks[3].cancel()  # who asked is gone; the vote is in, and the others are answered
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert inbox.waiting == 0
        return answers

    answers = asyncio.run(crowd())
    assert sum(commits) == 43
    assert len(commits) <= 3
    assert isinstance(answers.pop(3), asyncio.CancelledError)
    *fresh, conflict, unknown, again = (outcome for [outcome] in answers)
    assert all(isinstance(one, Stored) and not one.known for one in fresh)
    assert isinstance(conflict, IdempotencyConflict)
    assert isinstance(unknown, FeedbackRefused)
    assert again == Stored(fresh[6].feedback_id, known=True)
    assert store.counts("crowd") == {"thumbs": 40}


def test_the_readmes_example_is_a_vote(store: FeedbackStore) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [body] = re.findall(r"-d '(\{.*?\})'", readme, flags=re.DOTALL)
    assert send(store, body.encode()).status_code == 200
    assert store.counts("support") == {"thumbs": 1}
