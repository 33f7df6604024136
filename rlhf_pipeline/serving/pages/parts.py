"""What pages made by the server share: safe headers, tables, text that cannot act as HTML.

No page has a script. Its content security policy lets in the one style it brings, by a nonce, and
pictures inside the page; so what somebody wrote could not act even where escaping was forgotten.
"""

from __future__ import annotations

import base64
import html
import io
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from fastapi import FastAPI
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem;
       color: CanvasText; background: Canvas; overflow-wrap: anywhere }
nav a { margin-right: 1rem } h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem;
       border-bottom: 1px solid #ddd; vertical-align: top } .n { text-align: right }
img { max-width: 100%; height: auto } .facts { display: flex; flex-wrap: wrap; gap: 1rem }
.facts div { border: 1px solid #ddd; border-radius: .4rem; padding: .5rem .9rem }
.facts b { display: block; font-size: 1.25rem } .bad { color: #b2182b } .good { color: #1b7837 }
.scroll { overflow-x: auto; overflow-wrap: break-word }
@media (max-width: 40rem) { .scroll img { max-width: none } }
@media (prefers-color-scheme: dark) { td, th, .facts div { border-color: #444 }
       .bad { color: #ff9a9a } .good { color: #7fd495 }
       img { filter: invert(.93) hue-rotate(180deg) } }
"""
FORMS = """
form { margin: 1rem 0 } input, select, button { font: inherit; padding: .3rem .6rem;
       max-width: 100%; box-sizing: border-box }
label { display: block; margin: .6rem 0 } .erase { background: #b2182b; color: #fff; border: 0;
       border-radius: .3rem; padding: .5rem 1rem }
"""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def new_nonce() -> str:
    """Return what one answer's own style is known by."""
    return secrets.token_urlsafe(16)


def whole(title: str, body: str, nonce: str, *, style: str = STYLE, head: str = "") -> str:
    """Return a page's HTML; `head` is what else stands in its head."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{inert(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{head}'
        f'<style nonce="{nonce}">{style}</style></head><body><main>{body}</main></body></html>'
    )


def answer(page: str, nonce: str, status: int = 200, *, forms: bool = False) -> HTMLResponse:
    """Return the page with headers that let nothing in but its own style and pictures.

    With `forms` it may send what is typed to this service.
    """
    to = "'self'" if forms else "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src 'nonce-{nonce}'; base-uri 'none'; "
        f"form-action {to}; frame-ancestors 'none'"
    )
    safe = {"content-security-policy": policy, "cache-control": "no-store"}
    if forms:  # with no-referrer a browser would not say that the form is our own page's
        safe["referrer-policy"] = "same-origin"
    return HTMLResponse(page, status, headers=safe)


def no_such_agent() -> HTMLResponse:
    """Return the page of an agent that nobody knows."""
    there = "<p>Those that there are stand on the dashboard; feedback makes one known.</p>"
    return _short("No such agent", there, 404, above='<nav><a href="/dashboard">Agents</a></nav>')


def no_agent_yet(above: str = "") -> HTMLResponse:
    """Return the page of a service that no feedback has made an agent known to."""
    return _short("No agent yet", "<p>Nobody has sent feedback.</p>", 200, above=above)


def no_such_page() -> HTMLResponse:
    """Return the page of an address at which there is none."""
    there = '<p>Correct the address, or go to the <a href="/ui/">chat</a>.</p>'
    return _short("No such page", there, 404)


def _short(title: str, words: str, status: int, *, above: str = "") -> HTMLResponse:
    nonce = new_nonce()
    return answer(whole(title, f"{above}<h1>{title}</h1>{words}", nonce), nonce, status)


def to_first(
    path: str,
    agents: Callable[[], Sequence[str]],
    nobody: Callable[[], Response] = no_agent_yet,
) -> Callable[[], Awaitable[Response]]:
    """Return what leads from a page's path to the first agent's, or shows that there is none."""

    async def first() -> Response:
        known = await run_in_threadpool(agents)
        return RedirectResponse(f"{path}/{quote(known[0])}") if known else nobody()

    return first


def add_form(app: FastAPI, page: str, below: str, route: Callable[..., Any]) -> None:
    """Have what a form of the page sends answered below it; who opens that is led to the page.

    A browser opens it where it asks again for what was sent last, or after a sign-in.
    """
    app.add_api_route(page + below, route, methods=["POST"], include_in_schema=False)
    app.add_api_route(page + below, lambda: RedirectResponse(page), include_in_schema=False)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; cells are escaped unless they are Html."""
    if not rows:
        return "<p>None.</p>"
    top = "".join(f"<th>{inert(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{c if isinstance(c, Html) else inert(str(c))}</td>" for c in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def picture(figure: Figure, what: str) -> str:
    """Return a figure as a PNG inside the page; `what` is read out instead of it."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    encoded = base64.b64encode(content.getvalue()).decode()
    drawn = f'<img alt="{inert(what)}" src="data:image/png;base64,{encoded}">'
    return f'<div class="scroll">{drawn}</div>'  # on a phone it keeps its size, to be read


def when(moment: datetime) -> str:
    """Return a moment to the minute; the page says that it is UTC."""
    return f"{moment:%Y-%m-%d %H:%M}"


def inert(text: str) -> str:
    """Return text that is shown as it is, whatever it holds."""
    return html.escape(text)
