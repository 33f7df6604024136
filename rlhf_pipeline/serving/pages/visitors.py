"""Who a browser is on the chat page: a random person in a signed cookie, who nobody else can be.

The service signs the name it made up, so a browser may bring it back but cannot choose one: what is
shown or erased under /your-data is its own. What this does not do: keep people apart who share a
browser, or know somebody again in another one, or in the same one without the cookie; that they are
of one network is all that tells of it.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, MutableMapping
from http.cookies import SimpleCookie
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rlhf_pipeline.records import uuid7
from rlhf_pipeline.serving.access import sign, unsign

COOKIE = "rlhf_person"
SECONDS = 400 * 24 * 3600  # the longest that browsers keep a cookie; every visit begins it anew
PURPOSE = "person"
PREFIX = {4: 32, 6: 48}  # of a network, in bits; a line at home has /64s by the hundred


class Visitors:
    """Makes and reads the cookie of one service."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def person(self, cookies: Mapping[str, str]) -> str | None:
        """Return who sent these cookies, or None: no cookie of ours, another's, or an old one."""
        told = unsign(self._secret, PURPOSE, cookies.get(COOKIE, ""))
        return None if told is None else str(told["person"])

    def network(self, address: str) -> str | None:
        """Return a mark of the network an address is of; without our secret nobody finds it by it.

        None for one that is none of the internet's: behind it stands a proxy that does not say
        whom it asks for, or a colleague.
        """
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return None
        found = getattr(found, "ipv4_mapped", None) or found
        if not found.is_global:
            return None
        network = ipaddress.ip_network((found, PREFIX[found.version]), strict=False)
        return hmac.digest(self._secret, f"network\0{network}".encode(), "sha256").hex()

    def header(self, person: str, *, secure: bool) -> bytes:
        """Return the Set-Cookie header that makes a browser this person."""
        cookie = SimpleCookie({COOKIE: sign(self._secret, PURPOSE, {"person": person}, SECONDS)})
        # Lax, so that who follows a link to the page is known; no other site's form brings it.
        told = {"path": "/", "max-age": SECONDS, "httponly": True, "samesite": "Lax"}
        for name, value in {**told, "secure": secure}.items():
            cookie[COOKIE][name] = value
        return cookie[COOKIE].OutputString().encode()


class KnowAgain:
    """Middleware: who opens the chat page becomes a person, or stays the one they were."""

    def __init__(self, app: ASGIApp, visitors: Visitors) -> None:
        self.app = app
        self.visitors = visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, with the cookie on the page itself."""
        if scope["type"] != "http" or scope["path"] not in ("/ui", "/ui/"):
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        person = self.visitors.person(request.cookies) or uuid7()
        header = self.visitors.header(person, secure=request.url.scheme == "https")

        async def with_cookie(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"set-cookie", header)]
            await send(message)

        await self.app(scope, receive, with_cookie)
