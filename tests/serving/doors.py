"""Asks every route of the whole application, mounts included, without a right and with a client's.

Printed are every answer's status without one, and which GETs give back what somebody once wrote.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.routing import BaseRoute, Mount

from rlhf_pipeline.config import Settings, load_settings
from rlhf_pipeline.database import open_database
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

WRITTEN = "somebody once wrote this"
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
    settings = load_settings("tiny", {"state_dir": Path(sys.argv[1])})
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
    why = asyncio.run(whys(world))
    sys.stdout.write(json.dumps({"doors": asked, "texts": texts, "why": why}) + "\n")


async def whys(world: World) -> dict[str, list[Any]]:
    """Return what `told_why` does for each kind of right, from the application as it is served."""
    async with world.app.router.lifespan_context(world.app):  # Gradio's queue begins with it
        return {
            who: await told_why(world, right)
            for who, right in (("admin", world.admin), ("client", world.client))
        }


async def told_why(world: World, right: str) -> list[Any]:
    """Return whether the chat page shows a right why answers score so, and what it says if asked.

    Both are asked for as the page's own script does, so also where the page shows nothing.
    """
    headers = {"authorization": f"Bearer {right}"}
    transport = httpx.ASGITransport(world.app)
    base = "http://localhost/ui/gradio_api/queue"
    async with httpx.AsyncClient(transport=transport, headers=headers, timeout=60) as user:
        page = (await user.get("http://localhost/ui/config")).json()
        known = {one["id"]: one["props"].get("elem_id") for one in page["components"]}
        opened, expanded = (
            next(
                one["id"]
                for one in page["dependencies"]
                for target, event in one["targets"]
                if event == name and known.get(target) in (None, "why")
            )
            for name in ("load", "expand")
        )
        found = []
        for number, data in ((opened, [[], None]), (expanded, [None])):
            body = {"data": data, "fn_index": number, "session_hash": f"{right[-9:]}{number}"}
            (await user.post(f"{base}/join", json=body)).raise_for_status()
            told = await user.get(f"{base}/data", params={"session_hash": body["session_hash"]})
            events = [
                json.loads(line[6:]) for line in told.text.splitlines() if line[:5] == "data:"
            ]
            said = [e["output"]["data"] for e in events if (e.get("output") or {}).get("data")]
            found.append(said[-1] if number == opened else said[0])
        return [found[0][3]["visible"], found[1][0]]


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
    if path.startswith("/ui/") and "gradio_api" in path and right == world.client:
        if not path.startswith("/ui/review"):
            return False  # the chat's own queue and streams, which have no end
    elif path.startswith("/ui/") and right != world.client:
        return False  # no agent's key opens the pages; an admin's does by intention
    names = {"rater:path": "ann", "agent_id": "tea", "interaction_id": "i-1", "name": "tea"}
    for name, known in names.items():
        path = path.replace(name, known)
    return WRITTEN in world.ask("GET", path, right).text


if __name__ == "__main__":
    main()
