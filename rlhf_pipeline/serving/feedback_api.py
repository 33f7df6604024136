"""`POST /v1/feedback`: votes from other programs, one or many, stored before they are answered.

A body is an `events` row (feedback/formats.py), or {"events": [rows]}; `agent_id` names the agent.
The same `Idempotency-Key` header (or `idempotency_key` field) with the same body gets the same
answer, with another body 409. A 2xx means committed and synced; a store that cannot be written is
503 with Retry-After. An answer's id is out with its first words, and it is stored after its last:
a vote that comes in between waits for that. Refused: what is not JSON (so that no page elsewhere
can send it as a form), and rows that break a rule, by its name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

from rlhf_pipeline.errors import FeedbackError, FeedbackRefused, TooManyVotes, VoteErased
from rlhf_pipeline.feedback.formats import event_of
from rlhf_pipeline.feedback.lines import RawRow, parse
from rlhf_pipeline.feedback.rules import LONGEST_KEY, Rule, check_event, refuse
from rlhf_pipeline.feedback.store import Stored, VoteTicket, interaction_ids
from rlhf_pipeline.records import Feedback, age_of, hashed, uuid7
from rlhf_pipeline.serving.contract import KEY_HEADER, refusals
from rlhf_pipeline.serving.feedback_schema import (
    BODY,
    EXAMPLES,
    MOST_EVENTS,
    StoredVote,
    StoredVotes,
)
from rlhf_pipeline.serving.limits import RaterLimit

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.feedback.store import FeedbackStore

READ_AT_ONCE = 16 << 10  # bytes; a longer body is read in a thread, the others need not wait for it
AGAIN_SECONDS = 0.2  # between two looks for an answer that is not stored yet
FASTER_SECONDS = 3600.0  # that the clock of the machine whose answer it is may be ahead of this
KEY_IS_USED = "this key was used before for another body; send a new key for a new vote"
WAS_ERASED = "the vote under this key was erased with who gave it; send a new key for a new vote"
TOO_LATE, CONFLICT, TOO_LARGE, NOT_JSON, REFUSED, TOO_MANY, AWAY = 408, 409, 413, 415, 422, 429, 503

Answer = tuple[int, dict[str, Any]]


def add_feedback_route(app: FastAPI, inbox: Inbox, *, enabled: bool) -> None:
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
            code, told = await take(inbox, body, key)
        except TooManyVotes as refusal:
            return too_many(refusal)
        except sa.exc.DBAPIError:  # locked, full, read-only, damaged or gone
            code, told = AWAY, {"error": "the store cannot be written now; send it again"}
        return answer(code, told)

    content = {"application/json": {"schema": BODY, "examples": EXAMPLES}}
    app.add_api_route(
        "/v1/feedback",
        post_feedback,
        methods=["POST"],
        tags=["feedback"],
        response_model=StoredVote | StoredVotes,
        response_description="Stored and synced; of a batch all in `results` but those with an "
        "`error`, which were not.",
        responses=refusals(CONFLICT, TOO_LARGE, NOT_JSON, REFUSED, AWAY),
        openapi_extra={
            "requestBody": {"required": True, "content": content},
            "parameters": [KEY_HEADER],
        },
    )


class Inbox:
    """The votes of all requests on their way into the store: one commit after the other.

    What arrives while one is under way shares the next. One thread at a time commits for
    everybody; with a thread per request they would fight over the interpreter instead.
    """

    def __init__(
        self, store: FeedbackStore, limit: RaterLimit | None = None, *, longest_answer: float = 0.0
    ) -> None:
        """Open it; without `limit` everybody votes as often as they like.

        `longest_answer` is how many seconds after its id was made an answer may not be stored yet.
        """
        self._store = store
        self._limit = limit or RaterLimit(None)
        self._longest_answer = longest_answer
        self._waiting: list[tuple[VoteTicket, asyncio.Future[None]]] = []
        self._emptying: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Return how many events wait for the next commit."""
        return sum(len(ticket.items) for ticket, _ in self._waiting)

    async def put(self, events: Sequence[Feedback]) -> list[Stored | FeedbackError]:
        """Store the events; return each one's outcome, in order, once they are synced.

        One on an answer that may be under way waits until it is stored, or no longer may be: as
        long as an answer may take at the most, whatever another machine's clock made of its id.
        Raises TooManyVotes where somebody votes too fast; then none is stored.
        """
        self._limit.admit(events)
        outcomes = await self._commit(events)
        until = time.monotonic() + self._longest_answer
        while time.monotonic() < until and (
            early := [n for n, one in enumerate(outcomes) if await self._is_early(events[n], one)]
        ):
            await asyncio.sleep(AGAIN_SECONDS)
            again = await self._commit([events[n] for n in early])
            for n, outcome in zip(early, again, strict=True):
                outcomes[n] = outcome
        return outcomes

    async def _is_early(self, event: Feedback, outcome: Stored | FeedbackError) -> bool:
        """Say whether all it is about is this agent's by now, or may soon be."""
        if not isinstance(outcome, FeedbackRefused) or outcome.rule != Rule.unknown_interaction:
            return False
        about = interaction_ids(event)
        if not any(may_be_under_way(one, self._longest_answer) for one in about):
            return False
        found = {one: await run_in_threadpool(self._store.interaction, one) for one in about}
        return all(
            may_be_under_way(one, self._longest_answer)
            if there is None
            else there.agent_id == event.agent_id
            for one, there in found.items()
        )

    async def _commit(self, events: Sequence[Feedback]) -> list[Stored | FeedbackError]:
        ticket, done = VoteTicket(events), asyncio.get_running_loop().create_future()
        self._waiting.append((ticket, done))
        if self._emptying is None:
            self._emptying = asyncio.create_task(self._empty())
        await done
        return ticket.told()

    async def _empty(self) -> None:
        while self._waiting:
            now, self._waiting = self._waiting, []
            error: BaseException | None = None
            try:
                await run_in_threadpool(self._store.commit, [ticket for ticket, _ in now])
            except BaseException as problem:  # noqa: BLE001 - every waiting request must hear of it
                error = problem
            for ticket, done in now:
                ticket.error = ticket.error or error
                if not done.done():  # its request was given up
                    done.set_result(None)
        self._emptying = None


def may_be_under_way(interaction_id: str, longest: float) -> bool:
    """Say whether an answer of this id, which is not in the store, may be there soon."""
    age = age_of(interaction_id)
    return age is not None and -FASTER_SECONDS < age < longest


async def read_body(request: Request) -> bytes | JSONResponse:
    """Return a JSON request's body, or the answer that refuses what is no JSON."""
    if not is_json(request):
        return answer(NOT_JSON, {"error": "needed content-type application/json"})
    return await request.body()


def is_json(request: Request) -> bool:
    """Say whether the request calls its body JSON; a form from another page cannot."""
    kind = request.headers.get("content-type", "").partition(";")[0]
    return kind.strip().lower() == "application/json"


async def take(inbox: Inbox, body: bytes, key: str | None) -> Answer:
    """Store what the body holds; return the status and what to say."""
    try:
        if len(body) <= READ_AT_ONCE:
            sent = read(body, key)
        else:
            sent = await run_in_threadpool(read, body, key)
    except FeedbackRefused as refusal:
        return REFUSED, refusal_of(refusal)
    if isinstance(sent, Feedback):
        [outcome] = await inbox.put([sent])
        if isinstance(outcome, FeedbackRefused):
            return REFUSED, refusal_of(outcome)
        if isinstance(outcome, FeedbackError):
            return CONFLICT, {"error": _conflict(outcome)}
        return 200, _stored(outcome)
    sound = [row for row in sent if isinstance(row, Feedback)]
    outcomes = iter(await inbox.put(sound) if sound else [])
    return 200, {
        "results": [_told(next(outcomes) if isinstance(row, Feedback) else row) for row in sent]
    }


def read(body: bytes, key: str | None) -> Feedback | list[Feedback | FeedbackRefused]:
    """Return the one event of a body, or what became of each of its rows, in order.

    Raises FeedbackRefused for a body that is neither, and for one event that breaks a rule.
    """
    if key is not None and not 1 <= len(key) <= LONGEST_KEY:
        refuse(Rule.bad_key, f"Idempotency-Key of 1 to {LONGEST_KEY} characters", len(key))
    values = parse(RawRow(1, body))
    rows = values.get("events")
    if rows is None:
        return _event(values, key)
    if beside := sorted(values.keys() - {"events"}):
        refuse(Rule.unknown_field, "events alone", beside)
    if not isinstance(rows, list) or not 1 <= len(rows) <= MOST_EVENTS:
        what = f"{len(rows)} rows" if isinstance(rows, list) else type(rows).__name__
        refuse(Rule.wrong_type, f"events as a list of 1 to {MOST_EVENTS} rows", what)
    found: list[Feedback | FeedbackRefused] = []
    for i, row in enumerate(rows):
        try:
            found.append(_event(row, None if key is None else _row_key(key, i)))
        except FeedbackRefused as refusal:
            found.append(refusal)
    return found


def _row_key(key: str, place: int) -> str:
    """Return the key of one row of many: the header's and its place, hashed where that is long."""
    row_key = f"{key}:{place}"
    return row_key if len(row_key) <= LONGEST_KEY else f"rows:{hashed(key)}:{place}"


def _stored(outcome: Stored) -> dict[str, Any]:
    return {"feedback_id": outcome.feedback_id}  # and no more: sent again it is the same answer


def _told(outcome: Stored | FeedbackError) -> dict[str, Any]:
    """Return what the sender of one row of many is told."""
    if isinstance(outcome, Stored):
        return _stored(outcome)
    if isinstance(outcome, FeedbackRefused):
        return refusal_of(outcome)
    return {"error": _conflict(outcome), "rule": Rule.idempotency_conflict}


def _conflict(outcome: FeedbackError) -> str:
    return WAS_ERASED if isinstance(outcome, VoteErased) else KEY_IS_USED


def _event(values: Any, key: str | None) -> Feedback:
    """Return the checked event of one row. Raises FeedbackRefused with the rule it breaks."""
    if not isinstance(values, dict):
        refuse(Rule.not_an_object, "an object with named fields", type(values).__name__)
    agent_id = values.get("agent_id")
    if not isinstance(agent_id, str):
        refuse(Rule.bad_agent, "agent_id as text", agent_id)
    if values.get("idempotency_key") is None:  # a row's own key is the vote's, whatever carries it
        # Two unsigned people may say the very same: without a key each request is a vote.
        values = {**values, "idempotency_key": f"sent:{uuid7()}" if key is None else key}
    event = event_of(values, agent_id, "api")
    check_event(event)
    return event


def refusal_of(refusal: FeedbackRefused) -> dict[str, Any]:
    """Return what a refused row's sender is told."""
    return {"error": str(refusal), "rule": str(refusal.rule)}


def answer(code: int, told: Any) -> JSONResponse:
    """Return the answer; one that says to come back says when."""
    return JSONResponse(told, code, headers={"retry-after": "5"} if code == AWAY else None)


def too_many(refusal: TooManyVotes) -> JSONResponse:
    """Return the answer to somebody who votes too fast: in how many seconds to come again."""
    told, wait = {"error": str(refusal)}, str(refusal.seconds)
    return JSONResponse(told, TOO_MANY, {"retry-after": wait})
