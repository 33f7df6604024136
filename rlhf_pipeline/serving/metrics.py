"""What the service counts, for Prometheus at `/metrics`: latency, errors, tokens, votes, queues.

One `Metrics` per application. Labels have few values: a route's template and never its path, an
agent that is known, a kind of feedback. Counts begin at 0 with the process; Prometheus knows that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.records import Feedback

NO_ROUTE = "none"  # whatever people try that is not there
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The service's numbers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Histogram(
            "rlhf_http_request_seconds",
            "Seconds to the last byte of an answer, streams included.",
            ("method", "route", "status"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._first = Histogram(
            "rlhf_http_first_byte_seconds",
            "Seconds to the first byte of an answer's body.",
            ("method", "route"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._errors = Counter(
            "rlhf_http_errors_total",
            "Answers of status 500 and above, and requests that ended in an exception.",
            ("method", "route"),
            registry=self.registry,
        )
        self.under_way = Gauge(
            "rlhf_http_requests_under_way", "Requests not answered yet.", registry=self.registry
        )
        self._tokens = Counter(
            "rlhf_tokens_total",
            "Tokens read (prompt) and written (completion), by agent; estimated where an upstream "
            "tells none.",
            ("agent", "side"),
            registry=self.registry,
        )
        self._feedback = Counter(
            "rlhf_feedback_total",
            "Feedback events stored, by kind; a repeated one counts once.",
            ("kind",),
            registry=self.registry,
        )
        self._chat_events = Counter(
            "rlhf_chat_events_total",
            "Replies blocked, and models that failed, by rule.",
            ("rule",),
            registry=self.registry,
        )
        self._queues = Gauge(
            "rlhf_queue_depth", "What waits, by queue.", ("queue",), registry=self.registry
        )

    def count_feedback(self, event: Feedback) -> None:
        """Count one stored event: FeedbackStore's `on_stored`."""
        self._feedback.labels(event.kind.value).inc()

    def count_tokens(self, agent_id: str, side: Literal["prompt", "completion"], n: int) -> None:
        """Count tokens that a model of the agent read or wrote."""
        self._tokens.labels(agent_id, side).inc(n)

    def count_chat_event(self, rule: str) -> None:
        """Count one block or failure of the chat."""
        self._chat_events.labels(rule).inc()

    def watch_queue(self, name: str, depth: Callable[[], float]) -> None:
        """Show a queue's depth, asked for whenever somebody looks."""
        self._queues.labels(name).set_function(depth)

    def observe(
        self, method: str, route: str, status: int | None, seconds: float, first: float | None
    ) -> None:
        """Take one request in; no status: it ended in an exception."""
        shown = "exception" if status is None else str(status)
        self._requests.labels(method, route, shown).observe(seconds)
        if first is not None:
            self._first.labels(method, route).observe(first)
        if status is None or status >= 500:
            self._errors.labels(method, route).inc()

    def shown(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)


class Measured:
    """Middleware: times every request, to the last byte of its answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | None = None
        first: float | None = None

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal status, first
            if message["type"] == "http.response.start":
                status = message["status"]
            elif first is None and message.get("body"):
                first = time.perf_counter() - started
            await send(message)

        self.metrics.under_way.inc()
        try:
            await self.app(scope, receive, watched)
        except BaseException:
            status = None
            raise
        finally:
            self.metrics.under_way.dec()
            seconds = time.perf_counter() - started
            self.metrics.observe(_method(scope), _route(scope), status, seconds, first)


def add_metrics(app: FastAPI, metrics: Metrics) -> None:
    """Add `/metrics`, and measure every request; call it last, so that nothing is left out."""

    def shown() -> Response:
        """Show the service's numbers in Prometheus's text format."""
        return Response(metrics.shown(), media_type=CONTENT_TYPE_LATEST)

    app.add_api_route(
        "/metrics",
        shown,
        methods=["GET"],
        tags=["operations"],
        response_class=PlainTextResponse,
    )
    app.add_middleware(Measured, metrics=metrics)


def _route(scope: Scope) -> str:
    """Return the template of the route that answered; a mounted application counts as one."""
    mounted: str = scope.get("root_path", "").removeprefix(scope.get("app_root_path", ""))
    path = getattr(scope.get("route"), "path", None)
    return mounted or (path if isinstance(path, str) else NO_ROUTE)


def _method(scope: Scope) -> str:
    known = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
    return scope["method"] if scope["method"] in known else "other"
