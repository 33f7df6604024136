"""`/v1/raters/{id}`: what is held about one person, shown (GET) or taken out (DELETE).

For admins: access.py names no client who may. The id is as the sender wrote it, or the stored hash;
`?agent=` means one agent alone; a parameter that is not known is refused, as a misspelt one would
reach every agent. An unknown id is 404, an agent that is being trained 409; the store, MLflow or
Dagster's database away is 503, and the log says what was in the way: not every such thing passes by
itself. After 409 and 503 the same request may be sent again. Nothing here logs an id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import sqlalchemy as sa
import structlog
from fastapi import Query
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from rlhf_pipeline.erasure import erase, held_about, tables_beside
from rlhf_pipeline.errors import (
    ClaimError,
    ConfigError,
    OrchestratorAway,
    RegistryError,
    UnknownRater,
)
from rlhf_pipeline.serving.contract import refusals

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.registry.models import ModelRegistry

log = structlog.get_logger(__name__)

UNKNOWN, TRAINING, REFUSED, AWAY = 404, 409, 422, 503


class Within(BaseModel):
    """How far a request reaches."""

    model_config = ConfigDict(extra="forbid")

    agent: str | None = None


class Erased(Within):
    """What goes."""

    unsigned: bool = False


def add_rater_routes(app: FastAPI, settings: Settings, registry: ModelRegistry) -> None:
    """Add both routes."""

    async def export_rater(rater: str, asked: Annotated[Within, Query()]) -> JSONResponse:
        """Return everything that is held about a person, and the tables that nobody looked into."""

        def told() -> dict[str, Any]:
            held = held_about(registry, rater, asked.agent)
            return {**held, "tables": tables_beside(settings, registry, rater, asked.agent)}

        return await run_in_threadpool(_told, told)

    async def erase_rater(rater: str, asked: Annotated[Erased, Query()]) -> JSONResponse:
        """Take a person out of everything; return what went, and which versions learned from it."""
        return await run_in_threadpool(
            _told, lambda: erase(settings, registry, rater, asked.agent, unsigned=asked.unsigned)
        )

    path = "/v1/raters/{rater:path}"  # an id may hold a slash
    for method, route in (("GET", export_rater), ("DELETE", erase_rater)):
        app.add_api_route(
            path,
            route,
            methods=[method],
            tags=["raters"],
            response_model=dict[str, Any],
            responses=refusals(UNKNOWN, TRAINING, REFUSED, AWAY),
        )


REFUSALS = (
    UnknownRater,
    ClaimError,
    ConfigError,
    RegistryError,
    OrchestratorAway,
    sa.exc.OperationalError,
    sa.exc.InterfaceError,  # of a connection that was cut while it read
)
"""What `held_about` and `erase` may be refused with."""


def refusal(error: Exception) -> tuple[int, str, dict[str, str]]:
    """Return the status, the words and the headers that answer one of the refusals."""
    if isinstance(error, UnknownRater):
        return UNKNOWN, str(error), {}
    if isinstance(error, ClaimError):
        return TRAINING, str(error), {"retry-after": "60"}
    if isinstance(error, ConfigError):
        return AWAY, str(error), {"retry-after": "60"}
    found = getattr(error, "orig", error)  # the driver's words, without what was asked for
    log.error("data of a person not reached", why=f"{type(error).__name__}: {found}")
    told = "a database is away, the log says why; ask again, what is done stays done"
    return AWAY, told, {"retry-after": "5"}


def _told(work: Callable[[], dict[str, Any]]) -> JSONResponse:
    try:
        return JSONResponse(work(), headers={"cache-control": "no-store"})
    except REFUSALS as error:
        status, words, headers = refusal(error)
        return JSONResponse({"error": words}, status, headers=headers)
