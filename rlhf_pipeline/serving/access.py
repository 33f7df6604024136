"""Who may do what: the one place every request passes, whatever route or mount answers it.

A right is an API key (`Authorization: Bearer …`), a session cookie that a browser got for a key at
/sign-in and gives up at /sign-out, or, for votes on one interaction, a feedback token
(`X-Feedback-Token`); whoever holds one votes as the person who was answered, and as nobody else. A
path that no rule here names is for admins. While no key was ever made, and the service listens on
loopback, it is open. What this does not protect against: who can read a key or a token on its way;
off this machine, put TLS in front. Who has copied a session's cookie keeps it when it is given up.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import math
import re
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlencode

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_pipeline.errors import FeedbackRefused
from rlhf_pipeline.feedback.lines import RawRow, parse
from rlhf_pipeline.feedback.rules import LONGEST_KEY
from rlhf_pipeline.records import hash_rater, hashed
from rlhf_pipeline.serving.contract import Closed, Told, refusals, refused
from rlhf_pipeline.serving.feedback_api import (
    AGAIN_SECONDS,
    NOT_JSON,
    READ_AT_ONCE,
    REFUSED,
    TOO_LARGE,
    TOO_LATE,
    is_json,
    may_be_under_way,
)
from rlhf_pipeline.serving.keys import ApiKey, Keys, Role
from rlhf_pipeline.serving.limits import Buckets
from rlhf_pipeline.serving.pages.parts import FORMS, STYLE, inert, new_nonce, whole
from rlhf_pipeline.serving.pages.parts import answer as page_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.feedback.store import FeedbackStore

T = TypeVar("T")

OPEN = frozenset({"/health", "/healthz", "/readyz", "/sign-in", "/favicon.ico"})
"""What needs no right. Everything else does."""
PAGES = ("/ui", "/your-data")
SIGN_OUT = "/sign-out"
ASK_THEMSELVES = ("/", SIGN_OUT, "/openapi.json", "/v1/feedback/tokens", "/v1/models", *PAGES)
"""What says itself which agent a key for one reaches there, and so whatever lies below PAGES; or is
of none, as the description of the API is."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "rlhf_session"
SESSION_SECONDS = 12 * 3600
TOKEN_SECONDS = 24 * 3600
LONGEST_BODY = 4 << 20  # bytes
# With a token; a vote whose texts are all as long as they may be, in \u escapes, has 1.3 MiB.
LONGEST_VOTE = 2 << 20  # bytes
BODY_SECONDS = 10.0  # for a whole body, whoever reads it
RATE_PER_SECOND, BURST = 1000.0, 2000.0  # requests of one key, and at once after a pause
INTERACTION = re.compile(r"[!-~]{1,36}")
HERE = re.compile(r"/(?![/\\])[!-~]{0,500}")  # a path of this service; two slashes begin another's
SAFE = ("GET", "HEAD", "OPTIONS")
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")  # as browsers send them
TOKEN_FIELDS = frozenset(
    "agent_id kind value interaction_id rater comment tags topic idempotency_key".split()
)
POLICY = "default-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
REFUSED_LATER = 1008  # the WebSocket code for "against the rules"


@dataclass(frozen=True, slots=True)
class Right:
    """What a request may do."""

    key_id: str
    role: Role
    agent_id: str | None  # None: every agent

    def reaches(self, agent_id: str) -> bool:
        """Say whether the agent is within the right."""
        return self.agent_id in (None, agent_id)

    @property
    def alone(self) -> str:
        """Return the words for who asks beyond the right's one agent."""
        return f"this key is for agent {self.agent_id!r} alone"


EVERYTHING = Right("", "admin", None)


class TokenBody(Closed):
    """What a feedback token is to be for."""

    interaction_id: str = Field(pattern=f"^{INTERACTION.pattern}$")


class Token(Told):
    """A right to vote on one interaction."""

    token: str
    expires_in_seconds: int


class _Refused(HTTPException):
    """What the door answers instead of a route; raised below it, the application answers so."""

    def __init__(self, status: int, why: str, retry_after: int | None = None) -> None:
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        super().__init__(status, why, headers)


class Access:
    """Middleware: refuses what has no right, before any route sees it."""

    def __init__(self, app: ASGIApp, keys: Keys, *, open_without_keys: bool) -> None:
        self.app = app
        self.keys = keys
        self.open_without_keys = open_without_keys
        self.secret = keys.signing_secret()
        self._buckets = Buckets()  # of key ids, and of tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, or refuse."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        receive = _bounded(receive) if scope["type"] == "http" else receive
        try:
            right, receive = await self._admit(scope, receive)
        except _Refused as refusal:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": REFUSED_LATER})
                return
            await _refusal(scope, refusal)(scope, receive, _with_headers(send))
            return
        scope["rlhf.right"] = right
        await self.app(scope, receive, _with_headers(send))

    async def _admit(self, scope: Scope, receive: Receive) -> tuple[Right | None, Receive]:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:18]) > LONGEST_BODY:
            raise _Refused(TOO_LARGE, f"needed a body of at most {LONGEST_BODY} bytes")
        packed = headers.get("content-encoding", "identity")
        if packed != "identity":
            raise _Refused(415, f"needed a body as it is, found content-encoding {packed[:40]!r}")
        path, method = scope["path"], scope.get("method", "GET")
        if path in OPEN:
            return None, receive
        token = headers.get("x-feedback-token")
        if token is not None and (method, path) == ("POST", "/v1/feedback"):
            key = headers.get("idempotency-key")
            return await self._admit_token(token, key, receive)  # where all is open too
        if self.open_without_keys and not self.keys.all():
            return EVERYTHING, receive
        right = self._right(scope, headers)
        self._spend(right.key_id)
        if _role_of(path) == "admin" and right.role != "admin":
            raise _Refused(403, "needed an admin's key, found a client's")
        if right.agent_id is None:
            return right, receive
        return right, await _check_agent(right, method, path, receive)

    def _right(self, scope: Scope, headers: Headers) -> Right:
        """Return the right of the request's key or cookie. Raises _Refused where there is none."""
        sent = headers.get("authorization")
        if sent is not None:
            scheme, _, secret = sent.partition(" ")
            found = self.keys.find(secret.strip()) if scheme.lower() == "bearer" else None
            if found is None:
                raise _Refused(401, "needed an API key that holds, found another; ask an admin")
            return _right_of(found)
        found = self._signed_in(scope)
        if found is None:
            words = "needed an API key (authorization: Bearer …), found none"
            raise _Refused(401, f"{words}; in a browser, load the page again to sign in")
        # The browser sends a cookie along wherever a click leads: another site's must not count.
        changes = scope.get("method", "GET") not in SAFE or scope["type"] == "websocket"
        origin = headers.get("origin")
        if changes and (origin is None or origin.partition("://")[2] != headers.get("host")):
            raise _Refused(403, "needed a request from our own pages, found another origin")
        return _right_of(found)

    def _signed_in(self, scope: Scope) -> ApiKey | None:
        # Not http.cookies: at a cookie against its grammar it drops those that follow, ours too.
        told = unsign(self.secret, "session", HTTPConnection(scope).cookies.get(COOKIE, ""))
        return self.keys.holding(str(told["key"])) if told else None

    async def _admit_token(
        self, token: str, key: str | None, receive: Receive
    ) -> tuple[Right, Receive]:
        told = unsign(self.secret, "feedback", token)
        if told is None or "rater" not in told:
            raise _Refused(401, "needed a feedback token that holds, found another")
        if told["key"] and not self.keys.holding(told["key"]):  # "" is of a service that is open
            raise _Refused(401, "needed a feedback token whose key holds, found a revoked one's")
        self._spend(f"token {told['interaction']}", rate=1.0, burst=20.0)
        body = await _read_whole(receive, LONGEST_VOTE)
        signed = await _look(body, partial(_signed_vote, told, key))
        return Right(str(told["key"]), "client", str(told["agent"])), _giving(signed, receive)

    def _spend(self, who: str, rate: float = RATE_PER_SECOND, burst: float = BURST) -> None:
        """Take one request out of the bucket. Raises _Refused where it is empty."""
        wait = self._buckets.spend({who: 1}, rate=rate, burst=burst)
        if wait > 0:
            words = "too many requests with this right; send fewer"
            raise _Refused(429, words, retry_after=math.ceil(wait))


def right_in(scope: Mapping[str, Any]) -> Right:
    """Return the right a request was let in with; without a door before it, every client's."""
    found = scope.get("rlhf.right")
    return found if isinstance(found, Right) else Right("", "client", None)


def _role_of(path: str) -> Role:
    """Return who may ask for a path: clients what is named here, admins everything."""
    if path.startswith("/api/policies/train_policy/"):
        return "admin"
    below = ("/v1/chat/", "/v1/models/", "/api/policies/", "/ui/", "/your-data/")
    if path == "/ui/review" or path.startswith("/ui/review/"):
        return "admin"
    named = ("/", "/ui", "/your-data", "/openapi.json", SIGN_OUT)
    sent = ("/v1/feedback", "/v1/feedback/tokens", "/v1/models")
    return "client" if path in (*named, *sent) or path.startswith(below) else "admin"


async def _check_agent(right: Right, method: str, path: str, receive: Receive) -> Receive:
    """Refuse what reaches beyond one agent; return where the body is read again."""
    if path in ASK_THEMSELVES or path.startswith(tuple(f"{page}/" for page in PAGES)):
        return receive
    if path in ("/v1/feedback", "/v1/chat/completions") and method == "POST":
        body = await _read_whole(receive)
        within = await _look(body, partial(_is_within, right, path))
        receive = _giving(body, receive)
    else:
        named = ("/api/policies/", "/v1/models/", "/v1/chat/events/")
        agent = path.rpartition("/")[2].partition(":")[0]
        within = path.startswith(named) and agent == right.agent_id
    if not within:
        raise _Refused(403, right.alone)
    return receive


def _is_within(right: Right, path: str, values: Mapping[str, Any]) -> bool:
    """Say whether a chat, or each row of a body of votes, is about the right's one agent."""
    if path == "/v1/chat/completions":
        return str(values.get("model")).partition(":")[0] == right.agent_id
    rows = [row for row in values.get("events", [values]) if isinstance(row, dict)]
    return bool(rows) and all(row.get("agent_id") == right.agent_id for row in rows)


def _signed_vote(told: Mapping[str, Any], key: str | None, values: dict[str, Any]) -> bytes:
    """Return the vote as who a feedback token is for. Raises _Refused where it reaches further.

    `key` is the Idempotency-Key that came along. A browser's keys are its interaction's alone: who
    guesses the key of somebody's next vote must not have that refused as known.
    """
    if values.get("interaction_id") != told["interaction"]:
        raise _Refused(403, "interaction_id: needed the one the feedback token is for")
    if values.get("agent_id") != told["agent"]:
        raise _Refused(403, "agent_id: needed the one the feedback token is for")
    if more := sorted(set(values) - TOKEN_FIELDS):
        raise _Refused(403, f"{more[0][:64]!a}: a feedback token does not reach this field")
    named, rater = values.pop("rater", None), told["rater"]
    if named not in (None, "") and hash_rater(told["agent"], str(named)) != rater:
        raise _Refused(403, "rater: needed the one the feedback token is for, or none")
    sent = key if values.get("idempotency_key") is None else values["idempotency_key"]
    if isinstance(sent, str) and 1 <= len(sent) <= LONGEST_KEY:  # others the route refuses
        values["idempotency_key"] = f"token:{hashed(told['interaction'], sent)}"
    return json.dumps({**values, "rater_id": rater}).encode()


def _asked_for(values: Mapping[str, Any]) -> str:
    """Return the interaction a token is to be for. Raises _Refused where none, or more, is said."""
    if more := sorted(set(values) - {"interaction_id"}):
        raise _Refused(REFUSED, f"{more[0][:64]!a}: needed interaction_id alone")
    asked = values.get("interaction_id")
    if not isinstance(asked, str) or not INTERACTION.fullmatch(asked):
        raise _Refused(REFUSED, "interaction_id: needed an interaction's id")
    return asked


async def _read_whole(receive: Receive, longest: int = LONGEST_BODY) -> bytes:
    """Return a whole body. Raises _Refused where it is too long or does not come."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > longest:
            raise _Refused(TOO_LARGE, f"needed a body of at most {longest} bytes")
    return bytes(body)


async def _look(body: bytes, find: Callable[[dict[str, Any]], T]) -> T:
    """Return what is found in a body's object. Raises _Refused where the body is none.

    A long body is looked into in a thread: the others need not wait for it.
    """

    def found() -> T:
        try:
            values = parse(RawRow(1, body))
        except FeedbackRefused as refusal:
            raise _Refused(REFUSED, str(refusal)) from refusal
        if not isinstance(values.get("events", []), list):
            raise _Refused(REFUSED, "events: needed a list of rows; mend it and send again")
        return find(values)

    return found() if len(body) <= READ_AT_ONCE else await run_in_threadpool(found)


def _bounded(receive: Receive) -> Receive:
    """Return a receive that gives a body which comes whole, in time and is not too long.

    It raises _Refused otherwise. Every body comes through here, whoever reads it.
    """
    left, until, whole = LONGEST_BODY, math.inf, False

    async def bounded() -> Message:
        nonlocal left, until, whole
        if whole:
            return await receive()
        began = asyncio.get_running_loop().time()
        until = min(until, began + BODY_SECONDS)  # from the first time that somebody reads
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError:
            words = f"needed a whole body within {BODY_SECONDS:.0f} s; send it again"
            raise _Refused(TOO_LATE, words) from None
        if message["type"] == "http.disconnect":
            raise _Refused(400, "needed a whole body")
        left -= len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if left < 0:
            raise _Refused(TOO_LARGE, f"needed a body of at most {LONGEST_BODY} bytes")
        return message

    return bounded


def _giving(body: bytes, receive: Receive) -> Receive:
    """Return a receive that gives a whole body, and then what comes after it."""
    kept: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return kept.pop() if kept else await receive()

    return again


def sign(secret: bytes, purpose: str, facts: dict[str, str], seconds: float) -> str:
    """Return facts that `unsign` believes for some seconds, for one purpose."""
    told = json.dumps({**facts, "until": int(time.time() + seconds)}).encode()
    mark = hmac.digest(secret, purpose.encode() + b"\0" + told, "sha256")
    return f"{_text(told)}.{_text(mark)}"


def unsign(secret: bytes, purpose: str, signed: str) -> dict[str, Any] | None:
    """Return what `sign` was told, or None: another's, changed, or too late."""
    first, _, second = signed.partition(".")
    try:
        told, mark = _bytes(first), _bytes(second)
    except (binascii.Error, ValueError):
        return None
    expected = hmac.new(secret, purpose.encode() + b"\0" + told, sha256).digest()
    if not hmac.compare_digest(mark, expected):
        return None
    facts: dict[str, Any] = json.loads(told)
    return facts if facts["until"] > time.time() else None


def add_access(
    app: FastAPI,
    store: FeedbackStore,
    keys: Keys,
    *,
    open_without_keys: bool = True,
    longest_answer: float = 0.0,
) -> None:
    """Put the door before every route of the application, and add sign-in and feedback tokens.

    `longest_answer` is as for `feedback_api.Inbox`: a token asked for earlier comes when it can.
    """
    secret = keys.signing_secret()

    async def show_sign_in(to: str = "") -> Response:
        """Show where a browser types its key."""
        return _sign_in_page("", to)

    async def sign_in(request: Request) -> Response:
        """Give a browser a session for its key."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > 4096:
                return _sign_in_page("That is no key.", "", 413)
        form = parse_qs(body.decode("utf-8", "replace"))
        typed, to = (form.get(name, [""])[0].strip() for name in ("key", "to"))
        found = keys.find(typed)
        if found is None:
            return _sign_in_page("This key opens nothing.", to, 401)
        answer = RedirectResponse(to if HERE.fullmatch(to) else "/ui/", 303)
        answer.set_cookie(
            COOKIE,
            sign(secret, "session", {"key": found.key_id}, SESSION_SECONDS),
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    async def show_sign_out(request: Request) -> Response:
        """Show how a browser's session is ended."""
        return _sign_out_page(signed_in=COOKIE in request.cookies)

    async def sign_out() -> Response:
        """Take the session from a browser; the key, and its sessions elsewhere, hold."""
        answer = RedirectResponse("/sign-in", 303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    async def make_token(request: Request) -> Response:
        """Return a token with which a browser votes on one interaction, as who was answered."""
        if not is_json(request):
            raise _Refused(NOT_JSON, "needed content-type application/json")
        asked = await _look(await _read_whole(request.receive), _asked_for)
        right: Right = request.scope["rlhf.right"]
        found = await run_in_threadpool(store.interaction, asked)
        until = time.monotonic() + longest_answer  # whatever another machine's clock made of the id
        while (
            found is None and time.monotonic() < until and may_be_under_way(asked, longest_answer)
        ):
            await asyncio.sleep(AGAIN_SECONDS)
            found = await run_in_threadpool(store.interaction, asked)
        if found is None or not right.reaches(found.agent_id):
            return JSONResponse({"error": "interaction_id: no such interaction"}, 404)
        who = found.session_id or found.interaction_id  # where nobody was named, as on our pages
        facts = {
            "key": right.key_id,
            "interaction": asked,
            "agent": found.agent_id,
            "rater": found.user_id or hash_rater(found.agent_id, who),
        }
        token = sign(secret, "feedback", facts, TOKEN_SECONDS)
        return JSONResponse({"token": token, "expires_in_seconds": TOKEN_SECONDS})

    app.add_api_route("/sign-in", show_sign_in, methods=["GET"], include_in_schema=False)
    app.add_api_route("/sign-in", sign_in, methods=["POST"], include_in_schema=False)
    app.add_api_route(SIGN_OUT, show_sign_out, methods=["GET"], include_in_schema=False)
    app.add_api_route(SIGN_OUT, sign_out, methods=["POST"], include_in_schema=False)
    content = {"application/json": {"schema": TokenBody.model_json_schema()}}
    app.add_api_route(
        "/v1/feedback/tokens",
        make_token,
        methods=["POST"],
        tags=["feedback"],
        response_model=Token,
        responses=refusals(400, 404, TOO_LARGE, NOT_JSON, REFUSED),
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    app.add_middleware(Access, keys=keys, open_without_keys=open_without_keys)


def _right_of(key: ApiKey) -> Right:
    return Right(key.key_id, key.role, key.agent_id)


def _refusal(scope: Scope, refusal: _Refused) -> Response:
    wants_page = "text/html" in Headers(scope=scope).get("accept", "")
    if refusal.status_code == 401 and wants_page and scope["path"] == SIGN_OUT:
        return RedirectResponse("/sign-in", 303)  # the session has ended by itself
    asked = scope.get("query_string", b"").decode("latin-1")
    to = scope["path"] + (f"?{asked}" if asked else "")
    sign_in = f"/sign-in?{urlencode({'to': to})}"
    opens = wants_page and scope.get("method") == "GET"
    # A form is sent again from the page that it is on, to which its own address leads.
    if refusal.status_code == 401 and (opens or (wants_page and _sends_a_form(scope))):
        return RedirectResponse(sign_in, 303)
    if refusal.status_code == 403 and opens:
        nonce = new_nonce()
        body = (
            f"<h1>Not with this key</h1><p>{inert(refusal.detail)}</p>"
            f'<p><a href="{inert(sign_in)}">Sign in with another key</a>, or go to the '
            '<a href="/ui/">chat</a>.</p>'
        )
        return page_of(whole("Not with this key", body, nonce), nonce, 403)
    if refusal.status_code == TOO_LARGE and wants_page:  # of a browser's forms a file's alone
        nonce = new_nonce()
        body = (
            f"<h1>Too long</h1><p>Nothing was stored: {inert(refusal.detail)}.</p><p>A longer file "
            "is taken in by <code>rlhf ingest</code>, or from the inbox folder; or send it in "
            'parts on the <a href="/feedback-files">page it was chosen on</a>.</p>'
        )
        return page_of(whole("Too long", body, nonce), nonce, TOO_LARGE)
    code, headers = refusal.status_code, refusal.headers
    return refused(scope["path"], code, refusal.detail, headers=headers)


def _sends_a_form(scope: Scope) -> bool:
    """Say whether a page's form is sent; programs, some of which accept HTML too, send JSON."""
    sent = Headers(scope=scope).get("content-type", "").lower()
    return scope.get("method") == "POST" and sent.startswith(FORM_TYPES)


def _sign_in_page(said: str, to: str, status: int = 200) -> Response:
    nonce, why = new_nonce(), f'<p class="bad" role="alert">{inert(said)}</p>' if said else ""
    body = (
        f'<h1>Sign in</h1>{why}<form method="post" action="/sign-in"><label>API key '
        '<input type="password" name="key" required autocomplete="current-password" autofocus>'
        f'</label> <input type="hidden" name="to" value="{inert(to)}"><button>Sign in</button>'
        "</form><p>Who runs this service makes keys with <code>rlhf keys create</code>.</p>"
    )
    return page_of(whole("Sign in", body, nonce, style=STYLE + FORMS), nonce, status, forms=True)


def _sign_out_page(*, signed_in: bool) -> Response:
    nonce = new_nonce()
    body = (
        f'<form method="post" action="{SIGN_OUT}"><button>Sign out</button></form>'
        "<p>This browser then needs a key again.</p>"
        if signed_in
        else "<p>Nobody is signed in with this browser.</p>"
    )
    body = f'<h1>Sign out</h1>{body}<p>Or go back to the <a href="/ui/">chat</a>.</p>'
    return page_of(whole("Sign out", body, nonce, style=STYLE + FORMS), nonce, forms=True)


def _with_headers(send: Send) -> Send:
    """Return a send that adds the safe headers to an answer that does not bring its own."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            brought = {name.lower() for name, _ in message.get("headers", [])}
            added = [(name, value) for name, value in HEADERS if name not in brought]
            message["headers"] = [*message.get("headers", []), *added]
        await send(message)

    return sent


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
