"""Asks every route of the whole application, mounts included, without a right, and prints them."""

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

from rlhf_pipeline.config import load_settings
from rlhf_pipeline.serving.app import create_app
from rlhf_pipeline.serving.keys import Keys

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
    """Print [[method, path, status]] as JSON, after one key was made."""
    settings = load_settings("tiny", {"state_dir": Path(sys.argv[1])})
    keys = Keys(settings.state_dir)
    keys.create("admin")
    world = World(create_app(settings), keys, "", "", "")
    found = sorted(set(paths(world.app.routes)) | {"/nowhere"})
    asked = [[m, path, world.ask(m, path).status_code] for path in found for m in METHODS]
    sys.stdout.write(json.dumps(asked) + "\n")


if __name__ == "__main__":
    main()
