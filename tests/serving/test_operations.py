"""Health, readiness and metrics of the whole application."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse, StreamingResponse
from structlog.testing import capture_logs

from rlhf_pipeline import database as db
from rlhf_pipeline.backup import back_up, restore
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.rules import AGENT_ID
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import file_sha256
from rlhf_pipeline.records import now
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.serving import health
from rlhf_pipeline.serving.app import create_app
from rlhf_pipeline.serving.feedback_api import Inbox, add_feedback_route
from rlhf_pipeline.serving.metrics import Metrics, add_metrics

KEPT = "no vote can be taken in: another has the turn"
VOTE = {"agent_id": "tea", "kind": "thumbs", "value": "up", "prompt": "hi", "completion": "hello"}


def ask(app: FastAPI, path: str, body: Any = None, *, method: str | None = None) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            how = method or ("GET" if body is None else "POST")
            return await client.request(how, path, json=body)

    return asyncio.run(asked())


def probed(app: FastAPI, times: int) -> list[int]:
    """Return what as many probes are answered that come at once, as to one service."""

    async def asked() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = await asyncio.gather(*(client.get("/readyz") for _ in range(times)))
        return [answer.status_code for answer in answers]

    return asyncio.run(asked())


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return {(name, label values): number} of what Prometheus would read."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    state = tmp_path_factory.mktemp("operations")
    return create_app(load_settings("tiny", {"state_dir": state}), pages=False)


def test_what_the_service_does_is_counted(app: FastAPI) -> None:
    assert ask(app, "/healthz").json() == {"status": "ok"}
    assert ask(app, "/v1/feedback", VOTE).status_code == 200
    assert ask(app, "/v1/feedback", {**VOTE, "value": "sideways"}).status_code == 422
    assert ask(app, "/api/policies/tea").json() == []
    assert ask(app, "/api/policies/milk").json() == []
    assert ask(app, "/nowhere/1").status_code == 404
    told = ask(app, "/metrics")
    assert told.headers["content-type"].startswith("text/plain; version=")
    found = samples(told.text)
    seconds = "rlhf_http_request_seconds_count"
    assert found[seconds, ("POST", "/v1/feedback", "200")] == 1
    assert found[seconds, ("POST", "/v1/feedback", "422")] == 1
    assert found[seconds, ("GET", "/api/policies/{agent_id}", "200")] == 2  # the template
    assert found[seconds, ("GET", "none", "404")] == 1
    assert found["rlhf_feedback_total", ("thumbs",)] == 1
    assert found["rlhf_queue_depth", ("feedback",)] == 0
    assert found["rlhf_http_requests_under_way", ()] == 1  # this one
    assert not [key for key in found if key[0] == "rlhf_http_errors_total"]


def test_errors_streams_and_mounted_pages_are_measured() -> None:
    app, metrics = FastAPI(), Metrics()

    async def pieces() -> Any:
        for piece in ("a", "b"):
            await asyncio.sleep(0.02)
            yield piece

    def broken() -> None:
        raise RuntimeError("boom")

    app.add_api_route("/stream", lambda: StreamingResponse(pieces()))
    app.add_api_route("/broken", broken)
    inner = FastAPI()
    inner.add_api_route("/deep/{i}", lambda i: PlainTextResponse(i))
    app.mount("/ui", inner)
    add_metrics(app, metrics)
    assert ask(app, "/stream").text == "ab"
    assert ask(app, "/broken").status_code == 500
    assert ask(app, "/ui/deep/7").text == "7"
    metrics.count_tokens("tea", "completion", 12)
    found = samples(metrics.shown().decode())
    assert found["rlhf_http_request_seconds_sum", ("GET", "/stream", "200")] >= 0.04
    assert found["rlhf_http_first_byte_seconds_sum", ("GET", "/stream")] >= 0.02
    assert found["rlhf_http_errors_total", ("GET", "/broken")] == 1
    assert found["rlhf_tokens_total", ("tea", "completion")] == 12
    routes = {key[1][1] for key in found if key[0] == "rlhf_http_request_seconds_count"}
    assert routes == {"/stream", "/broken", "/ui"}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path}/feedback.db")
    yield made
    made.close()


def test_ready_means_that_the_store_takes_a_write(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, settings = FastAPI(), load_settings("tiny", {"state_dir": tmp_path})
    health.add_health_routes(app, database, settings)
    ready = ask(app, "/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert FeedbackStore(database).agents() == []  # the probe was taken back
    assert not AGENT_ID.fullmatch(health.PROBE)  # or one vote for such an agent would stand in it

    def spoil(connection: Any, *_: Any) -> None:
        connection.execute("PRAGMA query_only=ON")

    sa.event.listen(database.engine, "checkout", spoil)
    away = ask(app, "/readyz")
    assert (away.status_code, away.headers["retry-after"]) == (503, "5")
    assert "cannot be" in away.json()["checks"]["store"]
    assert ask(app, "/healthz").status_code == 200  # alive, though of no use now
    probes = [ask(app, path, method="HEAD").status_code for path in ("/healthz", "/readyz")]
    assert probes == [200, 503]
    sa.event.remove(database.engine, "checkout", spoil)
    database.close()
    monkeypatch.setattr(health, "ROOM_BYTES", 1 << 62)
    full = ask(app, "/readyz")
    assert (full.status_code, "free" in full.json()["checks"]["store"]) == (503, True)


def test_probes_wait_together_and_not_long_for_a_store_that_another_writes_to(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "TURN_SECONDS", 0.3)
    app = FastAPI()
    health.add_health_routes(app, database, load_settings("tiny", {"state_dir": tmp_path}))
    assert ask(app, "/readyz").status_code == 200
    with closing(sqlite3.connect(str(database.url.database), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with capture_logs() as lines:
            assert probed(app, 50) == [503] * 50
        assert time.monotonic() - began < 5
        assert [line["event"] for line in lines] == ["not ready"]
        other.execute("ROLLBACK")
    assert ask(app, "/readyz").status_code == 200
    with database.write() as connection:  # a vote waits as long as ever
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 60_000


def test_a_release_that_was_overtaken_is_not_ready(database: Database, tmp_path: Path) -> None:
    app, settings = FastAPI(), load_settings("tiny", {"state_dir": tmp_path})
    health.add_health_routes(app, database, settings)
    assert ask(app, "/readyz").status_code == 200
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    overtaken = ask(app, "/readyz")
    assert (overtaken.status_code, overtaken.headers["retry-after"]) == (503, "5")
    assert "newer release has migrated it, to 9999" in overtaken.json()["checks"]["store"]


def test_a_process_that_stands_still_keeps_votes_waiting_for_a_moment(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "IDLE_SECONDS", 2.0)
    monkeypatch.setattr(db, "ALONE_SECONDS", 0.1)
    monkeypatch.setattr(health, "TURN_SECONDS", 0.1)
    frozen, database = Database(postgres_url), Database(postgres_url)
    app, store = FastAPI(), FeedbackStore(database)
    health.add_health_routes(app, database, load_settings("tiny", {"state_dir": tmp_path}))
    add_feedback_route(app, Inbox(store), enabled=True)
    assert ask(app, "/readyz").status_code == ask(app, "/v1/feedback", VOTE).status_code == 200

    def stand_still_half_way() -> None:
        with frozen.write(alone=True) as connection:
            connection.execute(db.agents.insert().values(agent_id="half", created_at=now()))
            with capture_logs() as lines:  # from here on the server hears no more of this one
                refused, away = ask(app, "/v1/feedback", VOTE), ask(app, "/readyz")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert (away.status_code, away.json()["checks"]["models"]) == (503, "ok")
            assert [line["event"] for line in lines if "over" in line] == [KEPT, KEPT]
            deadline = time.monotonic() + 30
            while ask(app, "/readyz").status_code != 200:
                assert time.monotonic() < deadline
            assert ask(app, "/v1/feedback", VOTE).status_code == 200
            connection.execute(db.agents.select())

    with pytest.raises(sa.exc.DBAPIError):
        stand_still_half_way()
    assert (store.counts("tea"), store.agents()) == ({"thumbs": 2}, ["tea"])
    frozen.close()
    database.close()


def test_no_vote_is_acknowledged_into_a_store_that_was_put_aside(tmp_path: Path) -> None:
    state, aside = tmp_path / "state", tmp_path / "aside"
    app = create_app(load_settings("tiny", {"state_dir": state}), pages=False)
    assert ask(app, "/v1/feedback", VOTE).status_code == 200
    back_up(load_settings("tiny", {"state_dir": state}), tmp_path / "copy")
    state.rename(aside)
    restore(load_settings("tiny", {"state_dir": state}), tmp_path / "copy")
    refused = ask(app, "/v1/feedback", VOTE)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    away = ask(app, "/readyz")
    assert away.status_code == 503
    assert away.json()["checks"]["store"].endswith("; end this process and start it again")
    shutil.rmtree(state)
    aside.rename(state)
    assert ask(app, "/v1/feedback", VOTE).status_code == 200


def test_ready_means_that_somebody_answers_for_every_agent(
    database: Database, tmp_path: Path
) -> None:
    ledger = PromotionLedger(database, tmp_path)
    for number in (0, 1):
        folder = tmp_path / f"m{number}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([number]) * 64)
        files = {"model.safetensors": file_sha256(folder / "model.safetensors")}
        if number == 0:
            ledger.add_baseline(
                "tea", label="v0", path=folder, files=files, lineage={}, actor="test"
            )
        else:
            ledger.add_version(
                "tea",
                label="v12",
                path=folder,
                files=files,
                lineage={},
                gate={"passed": True, "results": []},
                fingerprint="f" * 64,
            )
    ledger.promote("tea", 1, actor="test", reason="better", expected_champion=0)
    app = FastAPI()
    health.add_health_routes(app, database, load_settings("tiny", {"state_dir": tmp_path}))
    assert ask(app, "/readyz").json()["checks"]["models"] == "ok"
    champion = tmp_path / "m1" / "model.safetensors"
    champion.write_bytes(b"\x02" * 64)
    os.utime(champion, ns=(1, 1))
    degraded = ask(app, "/readyz")
    assert degraded.status_code == 200
    assert "1 of 1 agents are answered by their baseline" in degraded.json()["checks"]["models"]
    (tmp_path / "m0" / "model.safetensors").unlink()
    lost = ask(app, "/readyz")
    assert (lost.status_code, "neither" in lost.json()["checks"]["models"]) == (503, True)


def test_who_asks_while_a_model_is_hashed_does_not_begin_anew(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m0").mkdir()
    weights = tmp_path / "m0" / "model.safetensors"
    weights.write_bytes(b"0" * 64)
    files = {weights.name: file_sha256(weights)}
    PromotionLedger(database, tmp_path).add_baseline(
        "tea", label="v0", path=weights.parent, files=files, lineage={}, actor="test"
    )
    hashed: list[Path] = []

    def slowly(path: Path) -> str:
        hashed.append(path)
        time.sleep(0.3)
        return file_sha256(path)

    monkeypatch.setattr(health, "file_sha256", slowly)
    app = FastAPI()
    health.add_health_routes(app, database, load_settings("tiny", {"state_dir": tmp_path}))
    assert probed(app, 3) == [200] * 3
    assert hashed == [weights]
