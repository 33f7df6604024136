"""`POST /v1/chat/completions` and `GET /v1/models`: what OpenAI's clients speak.

A model is an agent: `support` and `support:champion` are its champion, `support:baseline` its SFT
baseline. A completion's `id` is the interaction's, which is stored before the last byte goes out:
votes name it. Of OpenAI's fields those that change the answer are obeyed or refused by name, never
passed over; those that change nothing here (HARMLESS) are ignored. `max_tokens` above the agent's
own limit is cut down to it. Beyond `serving.admission_limit` requests at once the next is 429
before its body is read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import Query
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, field_validator
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rlhf_pipeline.errors import ChatRefused, FeedbackRefused, PipelineError
from rlhf_pipeline.feedback.lines import RawRow, parse
from rlhf_pipeline.feedback.rules import LONGEST_RATER
from rlhf_pipeline.records import Message, Prompt, hash_rater, uuid7
from rlhf_pipeline.serving import chat_events
from rlhf_pipeline.serving.access import right_in
from rlhf_pipeline.serving.arms import Wishes
from rlhf_pipeline.serving.champions import Arm
from rlhf_pipeline.serving.contract import (
    ChatRefusal,
    Closed,
    Text,
    Told,
    for_openai,
    refusals,
    words_of,
)
from rlhf_pipeline.serving.feedback_api import READ_AT_ONCE, is_json
from rlhf_pipeline.serving.gateway import Gateway, Reply
from rlhf_pipeline.serving.guardrails import Rail

if TYPE_CHECKING:
    from fastapi import FastAPI

LONGEST_BODY = 1 << 20  # bytes
SORRY = "Sorry, the assistant cannot answer right now; please try again."
ARMS: tuple[Arm, ...] = ("champion", "baseline")
HARMLESS = frozenset(
    "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls verbosity reasoning_effort".split()
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "prediction": (None,),
    "audio": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
}
"""Fields that are obeyed only where they ask for nothing."""


def _without_controls(value: str) -> str:
    if any(c < " " for c in value):
        raise ValueError("text without control characters is needed")
    return value


Name = Annotated[Text, AfterValidator(_without_controls)]
SessionId = Annotated[Name, Field(max_length=64)]
SESSION_ID: TypeAdapter[str] = TypeAdapter(SessionId)


class TextPart(Closed):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class ChatMessage(Closed):
    """One turn; `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: Text | None = None
    # What clients send back of an answer that they were given, where it says nothing.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def message(self) -> Message:
        """Return the turn as the engine knows it."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return Message("system" if self.role == "developer" else self.role, text)


class StreamOptions(Closed):
    """What a stream says beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(Closed):
    """The body of `POST /v1/chat/completions`."""

    model: Text = Field(max_length=200, description="An agent, or AGENT:champion, AGENT:baseline.")
    messages: list[ChatMessage] = Field(min_length=1, max_length=500)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Text | list[Text] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    user: Name | None = Field(None, max_length=LONGEST_RATER)
    session_id: SessionId | None = Field(None, description="Ours: joins a conversation.")

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > 4 or any(not 1 <= len(one) <= 200 for one in stops):
            raise ValueError("at most 4 texts of 1 to 200 characters are needed")
        return stop

    @property
    def prompt(self) -> Prompt:
        """Return the conversation."""
        return tuple(message.message() for message in self.messages)

    @property
    def wishes(self) -> Wishes:
        """Return what it asks of the sampling."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Wishes(
            max_completion_tokens=self.max_completion_tokens or self.max_tokens,
            limit_name="max_completion_tokens" if self.max_completion_tokens else "max_tokens",
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=stop,
        )


class Usage(Told):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Said(Told):
    """What the assistant said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Told):
    """The one completion."""

    index: int
    message: Said
    logprobs: None
    finish_reason: Literal["stop", "length", "content_filter"]


class ChatCompletion(Told):
    """A whole completion; `id` is the interaction's, which votes name."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(Told):
    """A name that answers."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Told):
    """Every name that answers."""

    object: Literal["list"]
    data: list[Model]


class ChatEvent(Told):
    """A reply that was blocked, or a model that failed."""

    seq: int
    agent_id: str
    interaction_id: str | None
    arm: str
    rule: str
    detail: str
    created_at: datetime


class ChatEvents(Told):
    """The newest events first, and how many there are by rule."""

    counts: dict[str, int]
    events: list[ChatEvent]


class _Refused(Exception):
    """A request that is answered with an error of its own."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class _Gone(Exception):
    """The client has gone away."""


def add_chat_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the chat, its models and its events."""

    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of server-sent events."""
        if gateway.under_way >= gateway.settings.serving.admission_limit:
            return _error(429, "all places are taken; come again in a second", code="overloaded")
        gateway.under_way += 1
        taken = True
        try:
            asked = await _read(request)
            agent_id, arm = await _find(gateway, asked.model)
            answer = _Answer(gateway, asked, agent_id, arm)
            if not asked.stream:
                async with _listening(request.receive):
                    return await answer.whole()
            events = answer.events()
            try:  # an answer that cannot begin is an error and no stream
                async with _listening(request.receive):
                    head = await anext(events)
            except BaseException:
                await events.aclose()
                raise
            taken = False  # the stream gives the place back
            return _Stream(head, events, gateway)
        except _Refused as refusal:
            return _error(refusal.status, str(refusal), param=refusal.param, code=refusal.code)
        except _Gone:
            return Response(status_code=499)  # nobody reads it
        finally:
            if taken:
                gateway.under_way -= 1

    def models(request: Request) -> dict[str, Any]:
        """List every agent that can answer, its champion and its baseline."""
        agents = filter(right_in(request.scope).reaches, gateway.agents())
        names = [n for agent in agents for n in (agent, *_arms(gateway, agent))]
        return {"object": "list", "data": [_model(name) for name in names]}

    def model(name: str) -> Any:
        """Show one model."""
        for agent in gateway.agents():
            if name in (agent, *_arms(gateway, agent)):
                return _model(name)
        return _error(404, f"no agent answers to {name!r}", param="model", code="model_not_found")

    def events(
        request: Request, agent_id: str, limit: Annotated[int, Query(ge=1, le=1000)] = 100
    ) -> Any:
        """Show what was blocked and what failed for an agent, newest first, and how often.

        What a failure said, addresses and paths in it, is for admins: others find it empty.
        """
        if not gateway.knows(agent_id):
            return _error(404, f"no agent answers to {agent_id!r}", code="model_not_found")
        database = gateway.store.database
        rows = chat_events.newest(database, agent_id, limit)
        if right_in(request.scope).role != "admin":
            rows = [row if row["rule"] in set(Rail) else {**row, "detail": ""} for row in rows]
        return {"counts": chat_events.counts(database, agent_id), "events": rows}

    body = {"application/json": {"schema": _request_schema()}}
    streamed = {"text/event-stream": {"schema": EVENT}}
    app.add_api_route(
        "/v1/chat/completions",
        chat_completions,
        methods=["POST"],
        tags=["chat"],
        response_model=ChatCompletion,
        responses={
            200: {"description": "The completion, whole or as events.", "content": streamed},
            **refusals(400, 404, 408, 413, 415, 422, 429, 503, model=ChatRefusal),
        },
        openapi_extra={"requestBody": {"required": True, "content": body}},
    )
    for path, route, shown, codes in (
        ("/v1/models", models, ModelList, (422, 503)),
        ("/v1/models/{name}", model, Model, (404, 422, 503)),
        ("/v1/chat/events/{agent_id}", events, ChatEvents, (404, 422, 503)),
    ):
        refused = refusals(*codes, model=ChatRefusal)
        app.add_api_route(
            path, route, methods=["GET"], tags=["chat"], response_model=shown, responses=refused
        )


# One event of a stream: before 3.2 OpenAPI's schema of a stream is that of each of its events.
EVENT = {
    "type": "object",
    "properties": {
        "data": {
            "type": "string",
            "description": "A chat.completion.chunk or an error as JSON, at the end [DONE].",
        }
    },
    "required": ["data"],
}
DONE = b"data: [DONE]\n\n"
NO_STORE = {"cache-control": "no-store", "x-accel-buffering": "no"}


class _Stream(Response):
    """An answer under way; however it ends, its row leaves the batch and its place is free."""

    def __init__(self, head: bytes, rest: AsyncGenerator[bytes, None], gateway: Gateway) -> None:
        self._head, self._rest = head, rest
        self._gateway = gateway
        super().__init__(media_type="text/event-stream", headers=NO_STORE)
        del self.headers["content-length"]  # of an answer that is not written yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def give(event: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": more})

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            with suppress(_Gone):  # nobody reads the rest
                async with aclosing(self._rest), _listening(receive):
                    await send(start)
                    await give(self._head)
                    async for event in self._rest:
                        # The last in one with the end: each time costs others' first texts.
                        if event.endswith(DONE):
                            await give(event, more=False)
                            return
                        await give(event)
                    await give(b"", more=False)
        finally:
            self._gateway.under_way -= 1


class _Answer:
    """One request under way."""

    def __init__(
        self,
        gateway: Gateway,
        asked: ChatRequest,
        agent_id: str,
        arm: Arm,
    ) -> None:
        self.asked = asked
        self.interaction_id = uuid7()
        self.created = int(time.time())
        name = asked.user or ""
        user = hash_rater(agent_id, name) if name.strip() else None  # blanks name nobody
        self.pieces = gateway.reply(
            agent_id,
            asked.prompt,
            asked.wishes,
            arm=arm,
            interaction_id=self.interaction_id,
            session_id=asked.session_id or None,
            user_id=user,
            at_once=bool(asked.stream),
        )

    async def whole(self) -> Response:
        """Return the completion as one object."""
        text = ""
        try:
            async with aclosing(self.pieces) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Reply):
                        choice = {
                            "index": 0,
                            "message": {"role": "assistant", "content": text, "refusal": None},
                            "logprobs": None,
                            "finish_reason": piece.ending,
                        }
                        kind = "chat.completion"
                        return JSONResponse(self._object(kind, [choice], usage=_usage(piece)))
                    text += piece
        except (PipelineError, TimeoutError, sa.exc.DBAPIError) as error:
            raise _told(error) from error
        raise AssertionError("a reply ends with a Reply")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events. What fails before the first raises _Refused; later an event."""
        begun, last = False, b""
        options = self.asked.stream_options
        usage: dict[str, Any] = {"usage": None} if options and options.include_usage else {}
        before, _, after = self._chunk({"content": ""}, None, usage).rpartition(b'""')
        try:
            async with aclosing(self.pieces) as pieces:
                async for piece in pieces:
                    text = piece if isinstance(piece, str) else ""
                    if not begun:
                        begun = True
                        yield self._chunk({"role": "assistant", "content": text}, None, usage)
                    elif text:
                        yield before + _json(text) + after
                    if isinstance(piece, Reply):
                        last = self._chunk({}, piece.ending, usage)
                        if usage:
                            told = {"usage": _usage(piece)}
                            last += _event(self._object("chat.completion.chunk", [], **told))
        except (PipelineError, TimeoutError, sa.exc.DBAPIError) as error:
            refusal = _told(error)
            if not begun:
                raise refusal from error
            yield _event(for_openai(refusal.status, str(refusal), code=refusal.code))
            return
        yield last + DONE

    def _chunk(self, delta: dict[str, str], ending: str | None, usage: dict[str, Any]) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": ending}
        return _event(self._object("chat.completion.chunk", [choice], **usage))

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.interaction_id,
            "object": kind,
            "created": self.created,
            "model": self.asked.model,
            "choices": choices,
            **more,
        }


@asynccontextmanager
async def _listening(receive: Receive) -> AsyncGenerator[None, None]:
    """Run the block for as long as the client is there. Raises _Gone where it leaves meanwhile.

    The block runs in this task: whoever asks at the same moment as others gets as far as the batch
    in one go, and not a step each by turns, after which all of them would be there late.
    """

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leaving.reschedule(0)  # what waits in the block is cancelled, and what it holds let go

    leaving = asyncio.timeout(None)
    try:
        async with leaving:
            listener = asyncio.create_task(listen())
            try:
                yield
            finally:
                listener.cancel()
    except TimeoutError as error:
        if not leaving.expired():
            raise
        raise _Gone from error


async def _read(request: Request) -> ChatRequest:
    """Return the checked body. Raises _Refused with the field's name."""
    if not is_json(request):
        raise _Refused(415, "needed content-type application/json")
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST_BODY:
                raise _Refused(413, f"needed at most {LONGEST_BODY} bytes")
    except HTTPException as error:  # the door's: it does not come whole, or not in time
        raise _Refused(error.status_code, error.detail) from error
    if len(body) <= READ_AT_ONCE:
        return _checked(bytes(body))
    return await run_in_threadpool(_checked, bytes(body))


def _checked(body: bytes) -> ChatRequest:
    """Return what a body asks for. Raises _Refused with the name of the field that is wrong."""
    try:
        values = dict(parse(RawRow(1, body)))
    except FeedbackRefused as refusal:
        raise _Refused(400, str(refusal)) from refusal
    for name, neutral in NEUTRAL.items():
        if name in values and not _among(values.pop(name), neutral):
            told = " or ".join(json.dumps(value) for value in neutral[1:] or neutral)
            raise _Refused(400, f"{name} is not supported here: needed {told}", param=name)
    metadata = values.get("metadata")
    for name in HARMLESS:
        values.pop(name, None)
    if isinstance(metadata, dict) and "session_id" in metadata:
        with suppress(ValidationError):  # what is somebody else's may be of another kind
            values.setdefault("session_id", SESSION_ID.validate_python(metadata["session_id"]))
    try:
        return ChatRequest.model_validate(values)
    except ValidationError as error:
        place, words = _innermost(error)
        where = ".".join(place) or "a field's name"
        raise _Refused(400, f"{where}: {words}", param=where) from error


def _innermost(error: ValidationError) -> tuple[list[str], str]:
    """Return where the first field is wrong, and what is; of one that may be of several types as
    deep in it as can be told: of a list of parts the part.
    """

    def place(loc: tuple[int | str, ...]) -> list[str]:
        return [str(part) for part in loc if "[" not in str(part)]  # no names of our types

    problems = [(place(each["loc"]), words_of(each)) for each in error.errors()]
    first, _ = problems[0]
    return max((p for p in problems if p[0][: len(first)] == first), key=lambda p: len(p[0]))


def _among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Say whether a value asks for nothing; in JSON true is no 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


async def _find(gateway: Gateway, model: str) -> tuple[str, Arm]:
    """Return the agent and arm that a model's name means. Raises _Refused where there is none."""
    agent_id, _, name = model.partition(":")
    arm = next((arm for arm in ARMS if arm == (name or "champion")), None)
    if arm is not None and gateway.champions.ready(agent_id, "champion"):
        return agent_id, arm
    if arm is None or not await run_in_threadpool(_answers, gateway, agent_id, arm):
        raise _Refused(
            404,
            f"no agent answers to {model!r}; GET /v1/models lists those that do",
            param="model",
            code="model_not_found",
        )
    return agent_id, arm


def _told(error: Exception) -> _Refused:
    """Return what a client is told of a failure: nothing of what is inside."""
    if isinstance(error, ChatRefused):
        return _Refused(400, f"messages: {error}", param="messages", code=error.rule)
    return _Refused(503, SORRY, code="unavailable")


def _arms(gateway: Gateway, agent_id: str) -> list[str]:
    """Return the names of the agent's arms."""
    return [f"{agent_id}:{arm}" for arm in ARMS if _has(gateway, agent_id, arm)]


def _answers(gateway: Gateway, agent_id: str, arm: Arm) -> bool:
    return gateway.knows(agent_id) and _has(gateway, agent_id, arm)


def _has(gateway: Gateway, agent_id: str, arm: Arm) -> bool:
    """Say whether an agent that can answer has the arm; only a ledger has a baseline."""
    ledger = gateway.champions.registry.ledger
    return arm == "champion" or ledger.baseline(agent_id) is not None


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rlhf-pipeline"}


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _error(
    status: int, message: str, *, param: str | None = None, code: str | None
) -> JSONResponse:
    headers = {429: {"retry-after": "1"}, 503: {"retry-after": "5"}}.get(status)
    return JSONResponse(for_openai(status, message, param, code), status, headers=headers)


def _request_schema() -> dict[str, Any]:
    """Return ChatRequest's schema with the fields that are taken and change nothing."""
    schema = _inlined(ChatRequest.model_json_schema())
    nothing = "Taken where it asks for nothing; else refused by name."
    schema["properties"] |= {
        **{
            name: {"enum": list(values), "description": nothing} for name, values in NEUTRAL.items()
        },
        **{name: {"description": "Taken, and changes nothing."} for name in sorted(HARMLESS)},
    }
    schema["properties"]["metadata"]["description"] += (
        " Where there is no session_id and one in here fits, it is taken for that."
    )
    return schema


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its parts in place of references to them."""
    parts = schema.pop("$defs", {})

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return put(parts[value["$ref"].rsplit("/", 1)[-1]])
            return {key: put(inner) for key, inner in value.items()}
        return [put(inner) for inner in value] if isinstance(value, list) else value

    return dict(put(schema))
