"""Who may use Dagster's page: whoever opened it, and no other site by way of their browser."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from automation import processes
from automation.dagster_page import OTHERS, guarded

HERE = "http://127.0.0.1:3000"
ASKED = "/graphql?query=mutation+%7B+x+%7D"


async def answered(socket: WebSocket) -> None:
    await socket.accept()
    await socket.close()


def page() -> TestClient:
    methods = ["GET", "POST"]
    routes = [
        Route("/{path:path}", lambda _: PlainTextResponse("done"), methods=methods),
        WebSocketRoute("/graphql", answered),
    ]
    return TestClient(guarded(Starlette(routes=routes)), base_url=HERE)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/graphql", {"origin": HERE}, 200),
        ("POST", "/graphql", {}, 200),  # our own service, and curl
        ("GET", "/runs", {}, 200),  # a link on the dashboard, or somebody's
        ("GET", "/graphql", {"accept": "text/html"}, 200),
        ("POST", "/graphql", {"host": "localhost:3001", "origin": "http://localhost:3001"}, 200),
        ("POST", "/graphql", {"host": "[::1]:3000", "origin": "http://[::1]:3000"}, 200),
        ("POST", ASKED, {"origin": "https://evil.example", "content-type": "text/plain"}, 403),
        ("POST", "/graphql", {"origin": "http://127.0.0.1:8000"}, 403),
        ("POST", "/graphql", {"origin": "null"}, 403),
        ("GET", ASKED, {"sec-fetch-site": "cross-site"}, 403),  # a picture's address
        ("GET", ASKED, {}, 403),
        ("GET", ASKED.replace("?", "/?"), {}, 403),
        ("GET", ASKED.replace("query", "q%75ery"), {}, 403),
        ("GET", ASKED.replace("?", "?x=1&"), {}, 403),
        ("POST", "/report_asset_materialization/x", {"origin": "https://evil.example"}, 403),
        ("GET", "/runs", {"host": "evil.example:3000"}, 400),  # a name that was pointed here
        ("POST", "/graphql", {"host": "evil.example", "origin": "http://evil.example"}, 400),
    ],
)
def test_no_other_site_has_a_browser_do_something_there(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    assert page().request(method, path, headers=headers).status_code == status


def test_a_socket_is_opened_by_the_pages_own_alone() -> None:
    with page().websocket_connect("/graphql", headers={"origin": HERE, "host": HERE[7:]}):
        pass
    evil = {"origin": "https://evil.example", "host": HERE[7:]}
    with pytest.raises(WebSocketDisconnect), page().websocket_connect("/graphql", headers=evil):
        pass


def test_other_names_are_answered_to_where_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"host": "dagster.example.org"}
    assert page().get("/runs", headers=asked).status_code == 400
    monkeypatch.setenv(OTHERS, "a.example.org, dagster.example.org")
    assert page().get("/runs", headers=asked).status_code == 200


def test_the_page_is_started_behind_its_door(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(processes, "start", lambda name, command, *_: started.append(command))
    processes.start_webserver(processes.ROOT, 3000)
    assert "automation.dagster_page" in started[0]


CHILD = """
import signal, sys, time
from automation import dagster_page

def deaf(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

signal.signal(signal.SIGTERM, deaf)
dagster_page.import_module = lambda name: sys.modules[__name__]
create_app_from_workspace_process_context = None

def main():
    print("ready", flush=True)
    time.sleep(60)

dagster_page.main()
"""


def test_a_page_that_was_deaf_when_its_parent_was_killed_ends_all_the_same() -> None:
    """While Dagster starts, the one signal that Linux sends may be lost."""
    start = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", start, CHILD], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    [child] = psutil.Process(parent.pid).children()
    parent.kill()
    try:
        child.wait(30)
    finally:
        if child.is_running():
            child.kill()
        parent.communicate()
