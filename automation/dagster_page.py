"""Dagster's page for the people at this machine; it takes the options of dagster-webserver.

Whoever reaches that page may stop sensors and start runs, and it asks nobody who they are. So that
no web site does it from a visitor's browser, it answers to this machine's own names alone (others:
RLHF_DAGSTER_ALLOWED_HOSTS, commas between), to no request that another site's page sent, and runs
no query that is written in an address. What this does not protect against: other users and programs
of this machine.
"""

import os
import signal
import threading
import time
from importlib import import_module
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost", "[::1]")
OTHERS = "RLHF_DAGSTER_ALLOWED_HOSTS"


class OwnPagesOnly:
    """Middleware: refuses what a browser was made to send by another site's page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, or refuse."""
        if scope["type"] == "lifespan" or not _from_elsewhere(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            told = PlainTextResponse("needed a request of this page's own, found another's\n", 403)
            await told(scope, receive, send)


def _from_elsewhere(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2] != headers.get("host")
    # An address that a picture or a link names comes without an origin, and so does curl. Names in
    # it may be written in many ways (q%75ery), so they are read as who answers reads them.
    asked = "query" in QueryParams(scope.get("query_string", b""))
    return scope["path"].rstrip("/").endswith("/graphql") and asked


def guarded(app: ASGIApp) -> ASGIApp:
    """Return Dagster's application behind both rules."""
    others = [name.strip() for name in os.environ.get(OTHERS, "").split(",") if name.strip()]
    return TrustedHostMiddleware(OwnPagesOnly(app), [*HOSTS, *others], www_redirect=False)


def end_with_parent() -> None:
    """End this process once the one that started it is gone, however often it has to be asked.

    Linux asks once (automation/processes.py), and while Dagster starts, an interrupt may be lost:
    the page then stayed for ever, at the port that the next one wanted.
    """
    parent = os.getppid()

    def watch() -> None:
        while True:
            time.sleep(1)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    """Serve the page until interrupted."""
    end_with_parent()
    cli: Any = import_module("dagster_webserver.cli")  # has no types
    made = cli.create_app_from_workspace_process_context
    # dagster-webserver takes no middleware: its application is wrapped where it is made.
    cli.create_app_from_workspace_process_context = lambda *args, **options: guarded(
        made(*args, **options)
    )
    cli.main()


if __name__ == "__main__":
    main()
