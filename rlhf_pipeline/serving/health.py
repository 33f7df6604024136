"""Is the service alive, and can it do its work? `/healthz` and `/readyz`, for whoever restarts it.

Alive: the process answers. Ready: the store takes a write, its disk has room, the ledger can be
read, the champions were loaded, where the service began with that, and every agent that has models
has one whose files are the registered ones and which, where it was asked for, could be loaded.
Where a version's folder is gone, who was loaded from MLflow's copy counts: that was held against
the hashes then, and MLflow is not asked at each probe. An agent whose champion is not sound is
still answered by its baseline, which the answer then says; names and paths go to the log, not to
whoever asks.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
import structlog
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from rlhf_pipeline import database as db
from rlhf_pipeline.files import file_sha256
from rlhf_pipeline.records import now
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
from rlhf_pipeline.serving.contract import WORDS, Status, Told

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.serving.champions import Arm, Champions

log = structlog.get_logger()
ROOM_BYTES = 64 << 20  # below it the disk of the embedded store counts as full
TURN_SECONDS = 5.0  # that the probe waits for the turn to take in votes
PROBE = "readyz probe"  # an agent that is never committed, and that no agent can be called


class Readiness(Told):
    """Whether the service can do its work, and a word about each part."""

    ready: bool
    checks: dict[str, str]


Seen = dict[tuple[str, int], tuple[tuple[tuple[int, int], ...], bool]]


def add_health_routes(
    app: FastAPI,
    database: db.Database,
    settings: Settings,
    champions: Champions | None = None,
) -> None:
    """Add `/healthz` and `/readyz`; `champions` are the models that answer here."""
    ledger = PromotionLedger(database, settings.state_dir)
    seen: Seen = {}
    under_way: asyncio.Future[tuple[bool, dict[str, str]]] | None = None

    def is_sound(version: ModelVersion, arm: Arm) -> bool:
        if champions is not None:
            if champions.why_unfit(version.agent_id, version.version):
                return False
            if not version.path.is_dir():  # until a new one is loaded, the one before it answers
                return champions.ready(version.agent_id, arm) is not None
        return _sound(version, seen)

    async def healthz() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    async def readyz() -> JSONResponse:
        """Say whether requests may come: 200, or 503 with what is wrong."""
        nonlocal under_way
        if under_way is None or under_way.done():
            loading = champions is not None and champions.is_preloading
            looks = run_in_threadpool(look, database, ledger, is_sound, loading, settings.state_dir)
            under_way = asyncio.ensure_future(looks)
        # Who asks meanwhile shares the answer: to wait for the store, or to hash a large model,
        # outlasts several questions, and each would hold one of the threads that votes need.
        ready, checks = await asyncio.shield(under_way)
        headers = None if ready else {"retry-after": "5"}
        return JSONResponse({"ready": ready, "checks": checks}, 200 if ready else 503, headers)

    tags = ["operations"]
    app.add_api_route("/healthz", healthz, methods=["GET"], tags=list(tags), response_model=Status)
    app.add_api_route(
        "/readyz",
        readyz,
        methods=["GET"],
        tags=list(tags),
        response_model=Readiness,
        responses={503: {"model": Readiness, "description": WORDS[503]}},
    )
    for path, answer in (("/healthz", healthz), ("/readyz", readyz)):  # as wget and proxies probe
        app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)


def look(
    database: db.Database,
    ledger: PromotionLedger,
    is_sound: Callable[[ModelVersion, Arm], bool],
    loading: bool,
    state_dir: Path,
) -> tuple[bool, dict[str, str]]:
    """Return whether everything works, and a word about each part."""
    checks = {
        "store": _told(lambda: _write(database, state_dir)),
        "models": "they are being loaded" if loading else _told(lambda: _models(ledger, is_sound)),
    }
    return all(word.startswith("ok") for word in checks.values()), checks


def _told(check: Callable[[], str]) -> str:
    try:
        return check()
    except (sa.exc.SQLAlchemyError, OSError) as error:
        log.warning("not ready", reason=type(error).__name__)
        return "it cannot be read or written now"


def _write(database: db.Database, state_dir: Path) -> str:
    """Write a row and take it back: what a read-only or locked store refuses.

    It waits for its turn as a vote does, and not as long.
    """
    if database.is_replaced():
        return "its file was put away or replaced; end this process and start it again"
    with database.write(lock_seconds=TURN_SECONDS) as connection:
        if (found := database.overtaken_by(connection)) is not None:
            return f"a newer release has migrated it, to {found}; start that release here"
        database.wait_for_turn(connection, TURN_SECONDS)
        connection.execute(db.agents.insert().values(agent_id=PROBE, created_at=now()))
        connection.rollback()
    if database.is_sqlite:
        folder = Path(database.url.database or state_dir).parent
        free = shutil.disk_usage(folder).free
        if free < ROOM_BYTES:
            return f"needed {ROOM_BYTES >> 20} MiB free on its disk, found {free >> 20}"
    return "ok"


def _models(ledger: PromotionLedger, is_sound: Callable[[ModelVersion, Arm], bool]) -> str:
    """Look at every agent's champion, and at its baseline where the champion is not sound."""
    lost = degraded = 0
    with ledger.database.read() as connection:
        agents = list(connection.execute(sa.select(db.promotions.c.agent_id).distinct()).scalars())
    for agent_id in agents:
        champion, baseline = ledger.champion(agent_id), ledger.baseline(agent_id)
        if champion is None or is_sound(champion, "champion"):
            continue
        answered = baseline is not None and is_sound(baseline, "baseline")
        log.warning(
            "champion not sound", agent=agent_id, version=champion.version, answers=answered
        )
        degraded, lost = degraded + answered, lost + (not answered)
    if lost:
        return f"{lost} of {len(agents)} agents have neither a sound champion nor a baseline"
    if degraded:
        return f"ok, but {degraded} of {len(agents)} agents are answered by their baseline"
    return "ok"


def _sound(version: ModelVersion, seen: Seen) -> bool:
    """Say whether the files are the registered ones; hashed again only when one has changed."""
    try:
        stats = [(version.path / name).stat() for name in version.files]
    except FileNotFoundError:
        return False
    look = tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
    key = (version.agent_id, version.version)
    if key not in seen or seen[key][0] != look:
        hashes = {name: file_sha256(version.path / name) for name in version.files}
        seen[key] = (look, hashes == dict(version.files))
    return seen[key][1]
