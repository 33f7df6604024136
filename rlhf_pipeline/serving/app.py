"""The service as one application: `create_app()`; `rlhf serve` runs it on loopback.

It answers to the names it was given alone (a page elsewhere cannot reach it by pointing its own
name here). Who may use it is serving/access.py's to say: on loopback everybody until a key is made,
on any other address nobody without one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from rlhf_pipeline.config import Settings, load_settings
from rlhf_pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.serving.gateway import Gateway

GRACE_SECONDS = 10  # for streams in flight when the service is asked to stop
STARTUP_FAILURE = 3  # as uvicorn's own command exits
HOSTS = ("127.0.0.1", "localhost", "[::1]", "::1")
NAME = re.compile(r"\*|(?:\*\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
"""A name people may reach it by, without its port; `*.example.org` is every name below that."""


def create_app(
    settings: Settings | None = None,
    *,
    pages: bool = True,
    open_without_keys: bool = True,
    names: Sequence[str] = (),
) -> FastAPI:
    """Return the application of a state folder; without arguments the embedded one.

    Without pages it is the API alone, which starts in a moment. Models load when first asked; `run`
    loads every champion ahead. `names` are host names it answers to besides this machine's own.
    Raises ConfigError for one that no request could name.
    """
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from rlhf_pipeline.database import open_database
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.registry.ledger import PromotionLedger
    from rlhf_pipeline.registry.models import ModelRegistry
    from rlhf_pipeline.serving.access import OPEN, SIGN_OUT, add_access
    from rlhf_pipeline.serving.chat_api import add_chat_routes
    from rlhf_pipeline.serving.contract import Status, add_contract, refusals
    from rlhf_pipeline.serving.dagster_runs import DagsterRuns
    from rlhf_pipeline.serving.feedback_api import Inbox, add_feedback_route
    from rlhf_pipeline.serving.feedback_schema import SCHEMAS
    from rlhf_pipeline.serving.gateway import Gateway
    from rlhf_pipeline.serving.health import add_health_routes
    from rlhf_pipeline.serving.keys import Keys
    from rlhf_pipeline.serving.limits import RaterLimit
    from rlhf_pipeline.serving.metrics import Metrics, add_metrics
    from rlhf_pipeline.serving.policies_api import Policies, add_policy_routes
    from rlhf_pipeline.serving.raters_api import add_rater_routes
    from rlhf_pipeline.serving.upstream import connections_kept

    settings = settings or load_settings()
    hosts = [*HOSTS, *map(_as_sent, names)]
    database = open_database(settings.resolved_database_url)
    metrics = Metrics()
    store = FeedbackStore(database, on_stored=metrics.count_feedback)
    limit = RaterLimit(settings.feedback.votes_per_minute)  # one for the API and the pages
    longest_answer = settings.serving.longest_answer
    inbox = Inbox(store, limit, longest_answer=longest_answer)
    metrics.watch_queue("feedback", lambda: store.waiting + inbox.waiting)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Keep connections to upstreams, and let the models go when the service ends."""
        async with connections_kept():
            yield
        await app.state.gateway.settled()  # the process ends at once after this
        app.state.gateway.close()

    # Without FastAPI's own pages of documentation: those load from a CDN.
    app = FastAPI(title="rlhf-pipeline", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.get("/health", response_model=Status, responses=refusals(503), tags=["operations"])
    def health() -> dict[str, str]:
        """Say that the process answers and its database can be read."""
        with database.read() as connection:
            connection.exec_driver_sql("SELECT 1")
        return {"status": "ok"}

    add_feedback_route(app, inbox, enabled=settings.feedback.enabled)
    runs = DagsterRuns(settings.training.dagster_url)
    app.state.is_ending = lambda: False  # `run` knows

    def is_ending() -> bool:
        return bool(app.state.is_ending())

    add_policy_routes(app, Policies(settings, store, inbox, runs, is_ending=is_ending))
    ledger = PromotionLedger(database, settings.state_dir)
    registry = ModelRegistry(ledger, settings.resolved_mlflow_uri, settings.mlflow_folder)
    gateway = app.state.gateway = Gateway(settings, store, registry, metrics, is_ending)
    add_health_routes(app, database, settings, gateway.champions)
    metrics.watch_queue("chat", lambda: gateway.waiting)
    add_chat_routes(app, gateway)
    add_rater_routes(app, settings, registry)
    keys = Keys(settings.state_dir)
    if pages:
        from rlhf_pipeline.serving.pages.approval_page import PATH as CANDIDATES
        from rlhf_pipeline.serving.pages.approval_page import add_approval_page
        from rlhf_pipeline.serving.pages.dashboard import add_dashboard
        from rlhf_pipeline.serving.pages.data_page import ANYBODY, add_data_pages
        from rlhf_pipeline.serving.pages.desk import Desk
        from rlhf_pipeline.serving.pages.experiment_page import add_experiment_page
        from rlhf_pipeline.serving.pages.explain_page import PATH as EXPLAIN
        from rlhf_pipeline.serving.pages.explain_page import add_explain_page
        from rlhf_pipeline.serving.pages.files_page import PATH as FILES
        from rlhf_pipeline.serving.pages.files_page import add_files_page
        from rlhf_pipeline.serving.pages.mount import mount_pages

        secret = keys.signing_secret()
        mount_pages(app, Desk(settings, store, registry, gateway, limit))
        links = {"Chat": "/ui/", "Review": "/ui/review/", "Dagster": settings.training.dagster_url}
        tracked = settings.pages.mlflow_url or settings.mlflow_uri or ""
        if tracked.startswith(("http://", "https://")) and "@" not in tracked:  # no password shown
            links["MLflow"] = tracked.rstrip("/")
        links |= {"Candidates": CANDIDATES, "Answers": EXPLAIN, "Raters": ANYBODY, "Files": FILES}
        links |= {"Sign out": SIGN_OUT}
        add_dashboard(app, gateway, store.agents, links)
        add_explain_page(app, gateway, store.agents)
        add_experiment_page(app, gateway, store.agents)
        add_data_pages(app, settings, registry, store.agents, secret)
        add_files_page(app, settings, store, store.agents, secret)
        add_approval_page(app, registry, store.agents, secret)
    add_access(app, store, keys, open_without_keys=open_without_keys, longest_answer=longest_answer)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    add_metrics(app, metrics)
    add_contract(app, open_paths=OPEN, schemas=SCHEMAS)
    return app


def run(
    settings: Settings,
    port: int,
    *,
    pages: bool = True,
    host: str = "127.0.0.1",
    names: Sequence[str] = (),
    about_to: Callable[[], None] = lambda: None,
) -> None:
    """Serve until interrupted; `about_to` is called once all that may be refused was looked at.

    Raises ConfigError where it cannot listen, and off loopback while no key was made.
    """
    import structlog
    import uvicorn

    from rlhf_pipeline.serving.access import LOOPBACK
    from rlhf_pipeline.serving.champions import settle
    from rlhf_pipeline.serving.keys import Keys

    keyed, loopback = bool(Keys(settings.state_dir).all()), host in LOOPBACK
    if not keyed and not loopback:
        raise ConfigError(
            f"needed an API key before it listens on {host}, found none; make one with "
            "`rlhf keys create --role admin`"
        )
    if not keyed:
        structlog.get_logger().warning(
            "OPEN: everybody on this machine may do everything; `rlhf keys create` ends that"
        )
    _need_port(host, port)
    app = create_app(settings, pages=pages, open_without_keys=loopback, names=[host, *names])
    settle()
    gateway: Gateway = app.state.gateway
    gateway.champions.preload_beside()
    about_to()
    logging.getLogger("uvicorn.error").addFilter(_is_no_cut)
    # No access log: a line a request would bury what matters.
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = uvicorn.Server(config)
    app.state.is_ending = lambda: server.should_exit
    with suppress(KeyboardInterrupt):  # said again once all has ended
        server.run()
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def _is_no_cut(record: logging.LogRecord) -> bool:
    """Say whether a line tells more than the traceback of an answer cut off after the grace.

    How many were cut off stands in the line before, and where each of them waited is no news.
    """
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, asyncio.CancelledError)


def _as_sent(name: str) -> str:
    """Return a name or an address as requests have it: an IPv6 address in brackets.

    Raises ConfigError for what no request could name.
    """
    if NAME.fullmatch(name):
        return name
    try:
        return f"[{ipaddress.IPv6Address(name)}]"
    except ValueError as error:
        raise ConfigError(
            "needed a host's name to answer to, as chat.example.org or *.example.org, without "
            f"http:// and port, found {name!r}; correct --host or --answers-to"
        ) from error


def _need_port(host: str, port: int) -> None:
    """Raise ConfigError unless one can listen there: uvicorn would end the process with a 3."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"needed to listen on {host}, port {port}, found {error.strerror}; end what does, "
                "or name another --port"
            ) from error
