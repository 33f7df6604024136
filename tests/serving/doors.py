"""Asks every route of the whole application, mounts included, without a right and with a client's.

Printed are every answer's status without one, and which GETs give back what somebody once wrote.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.routing import BaseRoute, Mount

from rlhf_pipeline.config import Settings, load_settings
from rlhf_pipeline.database import open_database
from rlhf_pipeline.errors import ChatRefused
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    QuarantinedRow,
    hash_rater,
    now,
    user_prompt,
)
from rlhf_pipeline.serving.app import create_app
from rlhf_pipeline.serving.keys import Keys
from rlhf_pipeline.serving.pages.desk import Desk
from rlhf_pipeline.serving.pages.mount import AT_ONCE

WRITTEN = "somebody once wrote this"
PATIENCE = 20.0  # seconds
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD")


@dataclass(frozen=True)
class World:
    """The whole application, its keys, and one key of each kind."""

    app: FastAPI
    keys: Keys
    admin: str
    client: str
    tea: str

    def ask(
        self, method: str, path: str, right: str | None = None, body: Any = None, **headers: str
    ) -> httpx.Response:
        """Send one request; a right is a key."""
        if right is not None:
            headers["authorization"] = f"Bearer {right}"
        if body is not None:
            headers["content-type"] = "application/json"
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as user:
                return await user.request(method, path, content=content, headers=sent)

        return asyncio.run(asked())


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Run an application in a thread, on a port of its own, and give its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


def paths(routes: list[BaseRoute], above: str = "") -> Iterator[str]:
    """Return the path of every route, of mounted applications too, names as values."""
    for route in routes:
        path = f"{above}{getattr(route, 'path', '')}".replace("{", "").replace("}", "")
        yield path
        if isinstance(route, Mount):
            yield f"{path}/"
            yield from paths(list(route.routes or ()), path)


def main() -> None:
    """Print {"doors": [[method, path, status]], "texts": {who: [path]}} as JSON."""
    away = {"url": "http://127.0.0.1:9/v1", "model": "none"}  # the discard port
    upstreams = {"tea": away, "milk": away}
    settings = load_settings(
        "tiny", {"state_dir": Path(sys.argv[1]), "serving": {"upstreams": upstreams}}
    )
    write_something(settings)
    keys = Keys(settings.state_dir)
    rights = keys.create("admin"), keys.create("client"), keys.create("client", agent_id="tea")
    world = World(create_app(settings), keys, *(secret for _, secret in rights))
    found = sorted(set(paths(world.app.routes)) | {"/nowhere"})
    asked = [[m, path, world.ask(m, path).status_code] for path in found for m in METHODS]
    texts = {
        who: [path for path in found if gives_text(world, path, right)]
        for who, right in (("admin", world.admin), ("client", world.client), ("tea", world.tea))
    }
    chat, crowd = asyncio.run(chats(world))
    told = {"doors": asked, "texts": texts, "chat": chat, "crowd": crowd}
    sys.stdout.write(json.dumps(told) + "\n")


async def chats(world: World) -> tuple[dict[str, dict[str, Any]], int]:
    """Return what `chat` does for each kind of right, from the application as it is served.

    And how many were answered of a crowd of whom nobody is before all of them are being answered.
    """
    async with world.app.router.lifespan_context(world.app):  # Gradio's queue begins with it
        found = {
            who: await chat(world, right)
            for who, right in (("admin", world.admin), ("client", world.client), ("tea", world.tea))
        }
        together = threading.Barrier(AT_ONCE, timeout=PATIENCE)

        def answer(*_: Any, **__: Any) -> NoReturn:
            together.wait()
            raise ChatRefused("together", "answered")

        with patch.object(Desk, "answer", answer):
            return found, sum(
                await asyncio.gather(*(one_of_many(world, n) for n in range(AT_ONCE)))
            )


async def one_of_many(world: World, number: int) -> bool:
    """Ask something on the chat page, in a session of one's own, and say whether it is answered."""
    transport = httpx.ASGITransport(world.app)
    async with httpx.AsyncClient(
        transport=transport,
        base_url="http://localhost/ui/",
        headers={"authorization": f"Bearer {world.admin}"},
    ) as user:
        page = (await user.get("config")).json()
        send = {one["id"] for one in page["components"] if one["props"].get("elem_id") == "send"}
        [event] = [one for one in page["dependencies"] if one["targets"][0][0] in send]
        session = f"crowd {number}"
        asked = {"data": ["hi", None, "tea", None, False, None, ""], "fn_index": event["id"]}
        joined = await user.post("gradio_api/queue/join", json={**asked, "session_hash": session})
        joined.raise_for_status()
        told = await user.get("gradio_api/queue/data", params={"session_hash": session})
        return '"answered"' in told.text


async def chat(world: World, right: str) -> dict[str, Any]:
    """Return what the chat page shows and does for a right.

    That is whether it shows why answers score so, what it says if asked, which assistants it
    offers, and what it says when they are asked something: tea, milk, milk in a session that was
    opened for all, tea in one that this service knows nothing of, as after its restart, and what is
    no name. All of it is asked for as the page's own script does, so also what it does not show.
    """
    transport = httpx.ASGITransport(world.app)
    base = "http://localhost/ui/gradio_api/queue"
    async with httpx.AsyncClient(transport=transport, timeout=60) as user:
        user.headers["authorization"] = f"Bearer {right}"
        page = (await user.get("http://localhost/ui/config")).json()
        known = {one["id"]: one["props"].get("elem_id") for one in page["components"]}
        number = {
            (known.get(target), event): one["id"]
            for one in page["dependencies"]
            for target, event in one["targets"]
        }

        async def call(
            event: tuple[str | None, str], *data: Any, session: str = right[-9:], by: str = right
        ) -> list[list[Any]]:
            user.headers["authorization"] = f"Bearer {by}"
            body = {"data": data, "fn_index": number[event], "session_hash": session}
            (await user.post(f"{base}/join", json=body)).raise_for_status()
            told = await user.get(f"{base}/data", params={"session_hash": session})
            lines = [line for line in told.text.splitlines() if line[:5] == "data:"]
            events = [json.loads(line[6:]).get("output") or {} for line in lines]
            return [one.get("data") or [one.get("error")] for one in events if one]

        async def said(agent: Any, session: str) -> str:
            asked = ["hi", None, agent, None, False, None, ""]
            told = (await call(("send", "click"), *asked, session=session))[-1]
            return str(told[2] if len(told) > 2 else told[0])  # Gradio's own refusal stands alone

        opened = (await call((None, "load"), [], None))[-1]
        asks_on = ["hi", None, "tea", None, False, None, "an answer's id"]
        begun, *_ = await call(("send", "click"), *asks_on, session=f"lost {right[-9:]}")
        shared = f"shared {right[-9:]}"
        await call((None, "load"), [], None, session=shared, by=world.client)
        asked: list[tuple[Any, str]] = [("tea", right[-9:]), ("milk", right[-9:])]
        asked += [("milk", shared), ("tea", f"unknown {right[-9:]}"), (["tea"], right[-9:])]
        return {
            "shows_why": opened[3]["visible"],
            "why": (await call(("why", "expand"), None))[0][0],
            "offers": [name for name, _ in opened[2]["choices"]],
            "says": [await said(agent, session) for agent, session in asked],
            "says_first": begun[2],  # where something was said that the session knows nothing of
            "names_milk": "milk" in json.dumps(page),  # before it was opened
            "stopped_by": {
                known.get(target): sorted(
                    f"{t} {e}" for (t, e), n in number.items() if n in one["cancels"]
                )
                for one in page["dependencies"]
                for target, _ in one["targets"]
                if one["cancels"]
            },
        }


def write_something(settings: Settings) -> None:
    """Put the words into every kind of row that can hold what people write."""
    database = open_database(settings.resolved_database_url)
    store = FeedbackStore(database)
    said = Interaction("i-1", "tea", user_prompt(WRITTEN), WRITTEN, 0, now())
    store.add_interactions([said])
    about: dict[str, Any] = {"interaction_id": "i-1", "rater_id": hash_rater("tea", "ann")}
    better = Feedback("tea", FeedbackKind.correction, "k", text=WRITTEN, comment=WRITTEN, **about)
    store.append([better])
    store.quarantine([QuarantinedRow("tea", "broken_json", WRITTEN, "file", raw=WRITTEN)])
    database.close()


def gives_text(world: World, path: str, right: str) -> bool:
    """Say whether a GET gives the words back, of the agent and the person that are there."""
    streams = "gradio_api" in path and not path.startswith("/ui/review")
    if path.startswith("/ui/") and (streams or right == world.admin):
        return False  # the chat's own queue and streams have no end; an admin's are by intention
    names = {"rater:path": "ann", "agent_id": "tea", "interaction_id": "i-1", "name": "tea"}
    for name, known in names.items():
        path = path.replace(name, known)
    return WRITTEN in world.ask("GET", path, right).text


if __name__ == "__main__":
    main()
