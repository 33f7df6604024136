"""What the routes take and answer, as OpenAPI says it; refusals have one shape.

Every refusal is {"error": …} (the chat's are OpenAI's, the door's too: its clients show nothing
else; and a browser that finds no page is shown one). What the door before the routes (access.py)
may answer to any of them is added here, and so is what counts as a right. Text that no database
keeps (NUL, half a surrogate pair) is refused where a body is read: `Text`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import sqlalchemy as sa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlhf_pipeline.serving.pages.parts import no_such_page

if TYPE_CHECKING:
    from fastapi import FastAPI

WORDS: Mapping[int, str] = {
    400: "The request is not what the route takes, or names a host this service is not.",
    401: "No right was sent, or one that does not hold.",
    403: "The right does not reach this.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    409: "It contradicts what is there: a key used before for another body or for a "
    "vote that was erased, or a run at work.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    422: "The body, path or query breaks a rule; the answer names the field or the place.",
    429: "Too many at once; Retry-After says in how many seconds to come again.",
    502: "Training failed.",
    503: "It cannot be done now; Retry-After says in how many seconds to come again.",
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
FOR_OPENAI = ("/v1/chat/", "/v1/models")
"""How the paths begin that OpenAI's clients ask for."""
BY_DOOR = (401, 403, 413, 429)
BY_DOOR_OF_BODIES = (408,)
KEY_HEADER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same body is stored once; with another body it is 409.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200},
}


def _storable(text: str) -> str:
    if "\x00" in text:
        raise ValueError("text without NUL is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("whole characters are needed, found half a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_storable)]
"""Text that every database keeps."""


class Closed(BaseModel):
    """A part of a request: what it does not know it refuses."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Told(BaseModel):
    """A part of an answer: nothing else is in it."""

    model_config = ConfigDict(extra="forbid")


class Refusal(Told):
    """Why a request was refused."""

    error: str = Field(description="What was needed, what was found, what to do.")
    rule: str = Field("", description="The name of the rule a row broke, as quarantine has it.")


class ChatProblem(Told):
    """Why a chat request has no answer."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ChatRefusal(Told):
    """A refusal as OpenAI's clients read it."""

    error: ChatProblem


class Status(Told):
    """That the process answers."""

    status: str


def refusals(*codes: int, model: Any = Refusal) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's entries for what a route refuses."""
    return {code: {"model": model, "description": WORDS[code]} for code in codes}


def refused(
    path: str,
    status: int,
    words: str,
    *,
    rule: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return a refusal as those read it who ask for the path."""
    told: dict[str, Any] = {"error": words} if rule is None else {"error": words, "rule": rule}
    if path.startswith(FOR_OPENAI):
        told = for_openai(status, words, code=rule)
    return JSONResponse(told, status, headers)


def for_openai(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return a refusal as OpenAI's clients read it (`ChatRefusal`)."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def words_of(problem: Mapping[str, Any]) -> str:
    """Return what pydantic says of a problem; of a text that is too long it would count items."""
    sent = problem.get("input")
    if problem["type"] == "too_long" and isinstance(sent, str):
        return f"needed at most {problem['ctx']['max_length']} characters, found {len(sent)}"
    return str(problem["msg"])


def add_contract(
    app: FastAPI, *, open_paths: Collection[str], schemas: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give every refusal its shape, and OpenAPI what the door adds; call it after the routes.

    `schemas` are parts that routes refer to by name. A store that cannot be used is 503.
    """
    from fastapi.exceptions import RequestValidationError
    from fastapi.openapi.utils import get_openapi

    async def unfit(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        words = f"{where}: {words_of(problem)}; mend it and send again"
        return refused(request.url.path, 422, words, rule="wrong_type")

    async def nowhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404 and "text/html" in request.headers.get("accept", ""):
            return no_such_page()  # somebody reads it
        path, code = request.url.path, error.status_code
        return refused(path, code, str(error.detail), headers=error.headers)

    async def away(request: Request, error: Exception) -> JSONResponse:
        words = "the store cannot be used now; send it again"
        return refused(request.url.path, 503, words, headers={"retry-after": "5"})

    app.add_exception_handler(RequestValidationError, unfit)
    app.add_exception_handler(HTTPException, nowhere)
    app.add_exception_handler(sa.exc.DBAPIError, away)

    def made() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title,
                version=app.version,
                openapi_version=app.openapi_version,
                description="Refusals say what was needed, what was found and what to do.",
                routes=app.routes,
            )
            _add_rights(made, open_paths)
            made["components"]["schemas"] |= {name: dict(part) for name, part in schemas.items()}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = made  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _add_rights(openapi: dict[str, Any], open_paths: Collection[str]) -> None:
    """Add the rights there are, and what is answered where one is missing or used too much."""
    key = "An API key; none is needed on loopback until the first one is made."
    token = "A vote on one interaction, from POST /v1/feedback/tokens."
    openapi["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": key},
        "session": {"type": "apiKey", "in": "cookie", "name": "rlhf_session"},
        "token": {
            "type": "apiKey",
            "in": "header",
            "name": "X-Feedback-Token",
            "description": token,
        },
    }
    for path, operations in openapi["paths"].items():
        shape = "ChatRefusal" if path.startswith(FOR_OPENAI) else "Refusal"
        refusal = {"$ref": f"#/components/schemas/{shape}"}
        for operation in operations.values():
            answers = operation["responses"]
            operation["security"] = [] if path in open_paths else [{"key": []}, {"session": []}]
            if path == "/v1/feedback":
                operation["security"].append({"token": []})
            by_door = () if path in open_paths else BY_DOOR
            with_body = BY_DOOR_OF_BODIES if "requestBody" in operation else ()
            for code in (*by_door, *with_body):
                schema = answers.setdefault(str(code), {"description": WORDS[code]})
                content = schema.setdefault("content", {}).setdefault("application/json", {})
                own = content.get("schema", refusal)
                content["schema"] = own if own == refusal else {"anyOf": [own, refusal]}
            for code in {"429", "503"} & answers.keys():
                answers[code].setdefault("headers", RETRY_AFTER)
