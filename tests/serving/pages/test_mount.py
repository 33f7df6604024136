"""The pages' door: where they are, and what the browser may do there."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from rlhf_pipeline.serving.app import GRACE_SECONDS
from tests.serving.kills import until_it_answers
from tests.serving.pages.world import free_port, served

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory, warmed: list[str]) -> Iterator[tuple[int, int]]:
    """Two embedded services of one state, as two starts of one are."""
    state = tmp_path_factory.mktemp("pages") / "state"
    ports = (free_port(), free_port())
    command = ["tests.serving.pages.world", str(state), *map(str, ports)]
    with served(command, *ports, python=warmed):
        yield ports


def test_the_pages_are_at_ui_and_bring_everything_with_them(ports: tuple[int, int]) -> None:
    base = f"http://127.0.0.1:{ports[0]}"
    with httpx.Client(base_url=base, trust_env=False) as visitor:
        assert visitor.get("/").headers["location"] == "/ui/"
        assert visitor.get("/health").json() == {"status": "ok"}
        assert visitor.get("/favicon.ico").status_code == 204
        models = visitor.get("/v1/models").json()["data"]  # of the state that create_app() finds
        assert [one["id"] for one in models] == ["shop", "shop:champion", "shop:baseline"]
        for path in ("/ui/", "/ui/review/"):
            page = visitor.get(path)
            assert page.status_code == 200
            policy = page.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in policy
            assert "http" not in policy
            assert page.headers["x-content-type-options"] == "nosniff"
            named = r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?://[^\"]+)"
            assert [u for u in re.findall(named, page.text) if not u.startswith(base)] == []
            config = visitor.get(f"{path}config").json()
            assert config["analytics_enabled"] is False
            assert visitor.get(f"{path}gradio_api/info").json()["named_endpoints"] == {}
        assert visitor.get("/ui/", headers={"host": "evil.example"}).status_code == 400


def test_the_last_of_quick_choices_is_the_one_that_is_told(ports: tuple[int, int]) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", trust_env=False) as visitor:
        events = visitor.get("/ui/config").json()["dependencies"]
    chosen = [e for e in events if any(trigger == "input" for _, trigger in e["targets"])]
    told = [event["trigger_mode"] for event in chosen]
    assert told == ["always_last"] * 3  # the assistant, the stars, the wishes


def test_what_a_browser_keeps_is_read_after_a_restart_too(ports: tuple[int, int]) -> None:
    told = []
    for port in ports:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as visitor:
            config = visitor.get("/ui/config").json()
        told += [c["props"]["secret"] for c in config["components"] if "secret" in c["props"]]
    assert len(told) == 2
    assert len(set(told)) == 1


@pytest.mark.parametrize("asked", ["queue/join", "run/predict", "api/nothing"])
def test_a_page_of_an_earlier_release_is_told_to_load_again(
    ports: tuple[int, int], asked: str
) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", trust_env=False) as visitor:
        body = {"data": [], "session_hash": "s"} | ({} if "api" in asked else {"fn_index": 9999})
        for path in ("/ui/", "/ui/review/"):
            answer = visitor.post(f"{path}gradio_api/{asked}", json=body)
            assert (answer.status_code, "load the page again" in answer.text) == (404, True)


def test_an_address_below_the_pages_at_which_there_is_none_is_a_page(
    ports: tuple[int, int],
) -> None:
    """A program, Gradio's own script among them, is told in JSON as before."""
    with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", trust_env=False) as visitor:
        for path in ("/ui/nothing/here", "/ui/review/nothing/here", "/ui/nothing"):
            read = visitor.get(path, headers={"accept": "text/html,*/*"})
            assert (read.status_code, "No such page" in read.text) == (404, True), path
            assert visitor.get(path).json() == {"detail": "Not Found"}


def test_no_open_page_keeps_the_service_from_ending(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf_pipeline.cli", "--state", str(tmp_path), "serve"]
    port = free_port()
    process = subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        until_it_answers(port, lambda: process.poll() is None)
        base = f"http://127.0.0.1:{port}"
        with ExitStack() as open_pages:
            for path in ("/ui/", "/ui/review/"):
                address = f"{base}{path}gradio_api/heartbeat/some"
                beats = open_pages.enter_context(httpx.stream("GET", address, timeout=60))
                assert "ALIVE" in next(beats.iter_lines())
            process.terminate()
            began = time.monotonic()
            _, said = process.communicate(timeout=60)
            assert time.monotonic() - began < GRACE_SECONDS
    finally:
        process.kill()
        process.wait()
    assert "graceful shutdown exceeded" not in said


def test_the_service_loads_without_gradio_and_torch() -> None:
    code = "import sys, rlhf_pipeline.serving.app, rlhf_pipeline.serving.pages.mount\n"
    code += "print('gradio' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
