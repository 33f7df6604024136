"""`POST /v1/feedback`: votes from other programs, one or many, stored before they are answered.

A body is an `events` row (feedback/formats.py), or {"events": [rows]}; `agent_id` names the agent.
The same `Idempotency-Key` header (or `idempotency_key` field) with the same body gets the same
answer, with another body 409. A 2xx means committed and synced; a store that cannot be written is
503 with Retry-After. Refused: what is not JSON (so that no page elsewhere can send it as a form),
bodies over LONGEST_BODY, and rows that break a rule, by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

from rlhf_pipeline.errors import FeedbackError, FeedbackRefused
from rlhf_pipeline.feedback.formats import Row, events
from rlhf_pipeline.feedback.lines import RawRow, parse
from rlhf_pipeline.feedback.rules import Rule, check_event, refuse
from rlhf_pipeline.records import Feedback, uuid7

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.feedback.store import FeedbackStore

LONGEST_BODY = 4 << 20  # bytes
MOST_EVENTS = 1000  # in one body
CONFLICT, REFUSED, TOO_LARGE, NOT_JSON, AWAY = 409, 422, 413, 415, 503

Answer = tuple[int, dict[str, Any]]


def add_feedback_route(app: FastAPI, store: FeedbackStore, *, enabled: bool) -> None:
    """Add the route; while feedback is switched off it answers 503."""

    async def post_feedback(request: Request) -> JSONResponse:
        """Store one vote, or each of many, and answer with ids once they are synced."""
        body = await read_body(request)
        if not isinstance(body, bytes):
            return body
        if not enabled:
            return answer(AWAY, {"error": "feedback.enabled is off"})
        key = request.headers.get("idempotency-key")
        try:
            code, told = await run_in_threadpool(take, store, body, key)
        except sa.exc.DatabaseError:  # locked, full, read-only, damaged or gone
            code, told = AWAY, {"error": "the store cannot be written now; send it again"}
        return answer(code, told)

    app.add_api_route("/v1/feedback", post_feedback, methods=["POST"], tags=["feedback"])


async def read_body(request: Request) -> bytes | JSONResponse:
    """Return a JSON request's body, or the answer that refuses it: no JSON, or too long."""
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        return answer(NOT_JSON, {"error": "needed content-type application/json"})
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST_BODY:
            return answer(TOO_LARGE, {"error": f"needed at most {LONGEST_BODY} bytes"})
    return bytes(body)


def take(store: FeedbackStore, body: bytes, key: str | None) -> Answer:
    """Store what the body holds; return the status and what to say."""
    try:
        values = parse(RawRow(1, body))
        rows = values.get("events")
        if rows is None:
            return _take_one(store, values, key)
        if not isinstance(rows, list) or not 1 <= len(rows) <= MOST_EVENTS or len(values) > 1:
            refuse(Rule.wrong_type, f"events alone, a list of 1 to {MOST_EVENTS} rows", type(rows))
    except FeedbackRefused as refusal:
        return REFUSED, refusal_of(refusal)
    return _take_many(store, rows, key)


def _take_one(store: FeedbackStore, values: Mapping[str, Any], key: str | None) -> Answer:
    try:
        [stored] = store.append([_event(values, key)])
    except FeedbackRefused as refusal:
        return REFUSED, refusal_of(refusal)
    except FeedbackError as conflict:
        return CONFLICT, {"error": str(conflict)}
    return 200, {"feedback_id": stored.feedback_id, "known": stored.known}


def _take_many(store: FeedbackStore, rows: list[Any], key: str | None) -> Answer:
    """Store the sound rows in one commit; each row has its answer, in order."""
    answers: list[dict[str, Any]] = [{} for _ in rows]
    sound: list[tuple[int, Feedback]] = []
    for i, row in enumerate(rows):
        try:
            sound.append((i, _event(row, None if key is None else f"{key}:{i}")))
        except FeedbackRefused as refusal:
            answers[i] = refusal_of(refusal)
    lost: dict[int, FeedbackError] = {}
    stored = iter(
        store.append(
            [event for _, event in sound],
            on_refused=lambda event, error: lost.__setitem__(id(event), error),
        )
    )
    for i, event in sound:
        error = lost.get(id(event))
        if error is None:
            one = next(stored)
            answers[i] = {"feedback_id": one.feedback_id, "known": one.known}
        elif isinstance(error, FeedbackRefused):
            answers[i] = refusal_of(error)
        else:
            answers[i] = {"error": str(error), "rule": Rule.idempotency_conflict}
    return 200, {"results": answers}


def _event(values: Any, key: str | None) -> Feedback:
    """Return the checked event of one row. Raises FeedbackRefused with the rule it breaks."""
    if not isinstance(values, dict):
        refuse(Rule.not_an_object, "an object with named fields", type(values).__name__)
    agent_id = values.get("agent_id")
    if not isinstance(agent_id, str):
        refuse(Rule.bad_agent, "agent_id as text", agent_id)
    if key is not None:
        values = {**values, "idempotency_key": key}
    elif values.get("idempotency_key") is None:
        # Two unsigned people may say the very same: without a key each request is a vote.
        values = {**values, "idempotency_key": f"sent:{uuid7()}"}
    [event] = events(Row(values, agent_id, "api", "human"))
    check_event(event)
    return event


def refusal_of(refusal: FeedbackRefused) -> dict[str, Any]:
    """Return what a refused row's sender is told."""
    return {"error": str(refusal), "rule": str(refusal.rule)}


def answer(code: int, told: Any) -> JSONResponse:
    """Return the answer; one that says to come back says when."""
    return JSONResponse(told, code, headers={"retry-after": "5"} if code == AWAY else None)
