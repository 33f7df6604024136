"""Puts the pages into a FastAPI application: chat at /ui, review at /ui/review, `/` leads to chat.

Nothing comes from another host: fonts are the system's, analytics, sharing and run history are off,
and a content security policy says so to the browser. Gradio's page begins with inline scripts, so
inline ones must be allowed there; scripts, images and connections of other hosts are not.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rlhf_pipeline.serving.keys import Keys
from rlhf_pipeline.serving.pages.chat_page import SENT, chat_page
from rlhf_pipeline.serving.pages.desk import Desk
from rlhf_pipeline.serving.pages.parts import no_such_page
from rlhf_pipeline.serving.pages.review_page import SHORTCUTS, UNREAD, review_page
from rlhf_pipeline.serving.pages.visitors import KnowAgain, Visitors

if TYPE_CHECKING:
    from fastapi import FastAPI

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.2  # between two looks whether the service is to end
AT_ONCE = 16
"""Answers under way, of all visitors; who comes then waits for one of them to end. Each holds one
of the forty threads that the whole service has for what blocks, the API's votes among it."""

POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
# Gradio's own are 1.9 (what a box asks for) and 2.8 to 1 (its main button) on what is behind them.
LEGIBLE = {
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_hover_dark": "*primary_800",
    "button_primary_border_color": "*primary_700",
    "button_primary_border_color_dark": "*primary_700",
    "input_placeholder_color": "*neutral_500",
    "input_placeholder_color_dark": "*neutral_400",
    "body_text_color_subdued": "*neutral_500",
}
STYLE = """
footer { display: none !important }
.gradio-container { width: 100%; max-width: 60rem !important; margin: 0 auto }
#agent:not(:focus-within) [role=listbox] { display: none }
#agent input { text-overflow: ellipsis; padding-right: 1.6rem }
#talk .md { white-space: pre-wrap }
#talk .md, textarea { unicode-bidi: plaintext }
input:focus-visible, textarea:focus-visible { outline: auto !important }
@media (prefers-reduced-motion: reduce) {
  * { animation: none !important; transition: none !important } }
#pieces textarea { font-family: monospace; white-space: pre; overflow-x: auto }
#spoken { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
textarea:disabled, input:disabled { -webkit-text-fill-color: var(--body-text-color); opacity: 1 }
"""

# What is written into a text box is no change of the page, of which a screen reader would tell.
SPOKEN = """<script>
const spoken = document.createElement('div');
spoken.id = 'spoken';
spoken.setAttribute('role', 'status');
setInterval(() => {
  if (!spoken.isConnected) document.body.append(spoken);
  const said = document.querySelector('#notice textarea, #notice input')?.value ?? '';
  if (spoken.textContent !== said) spoken.textContent = said;
}, 300);
</script>"""


# Where a request fails, Gradio's page loads itself again once the service can be reached: nothing
# says that the vote was not stored, and what was typed is gone. Of an answer it shows the error.
AWAY = """<script>
const UNSENT = 'Not sent: the service cannot be reached now; please try again.';
const UNFINISHED = 'Not finished: the connection to the service broke off; please try again.';
const failed = {msg: 'process_completed', output: {error: UNFINISHED, visible: true}};
const BROKEN_OFF = [failed, {msg: 'close_stream'}].map(
  (event) => `\\n\\ndata: ${JSON.stringify(event)}\\n\\n`).join('');
const reach = window.fetch;
const toItsEnd = (body) => {
  const reader = body.getReader();
  return new ReadableStream({
    cancel: (why) => reader.cancel(why),
    pull: async (page) => {
      try {
        const {done, value} = await reader.read();
        if (done) page.close();
        else page.enqueue(value);
      } catch {
        page.enqueue(new TextEncoder().encode(BROKEN_OFF));
        page.close();
      }
    },
  });
};
window.fetch = async (address, options) => {
  const {pathname} = new URL(address.url ?? address, location);
  const [joins, follows] = ['/queue/join', '/queue/data'].map((end) => pathname.endsWith(end));
  if (!joins && !follows) return reach(address, options);
  const answer = await reach(address, options).catch(() => null);
  if (follows && answer?.ok) return new Response(toItsEnd(answer.body), answer);
  if (follows) return new Response(BROKEN_OFF);
  // Proxies say so by 500, 502, 503, 504 or 404 in words of their own; Gradio refuses in JSON.
  const fails = !answer || answer.status >= 500 || answer.status === 404;
  const refused = answer?.headers.get('content-type')?.includes('json');
  return fails && !refused ? Response.json({detail: UNSENT}, {status: 502}) : answer;
};
</script>"""


class PageHeaders:
    """Sets the pages' headers on every answer below /ui, streams included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, with the headers."""
        if scope["type"] != "http" or not scope["path"].startswith("/ui"):
            await self.app(scope, receive, send)
            return
        names = {name for name, _ in HEADERS}

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                kept = [(n, v) for n, v in message.get("headers", []) if n.lower() not in names]
                message["headers"] = [*kept, *HEADERS]
            await send(message)

        await self.app(scope, receive, with_headers)


async def _stale(request: Request, error: Exception) -> Response:
    """Answer who asks for what a page does not do, as one of an earlier release does."""
    log.warning("page asked for what it is not", path=request.url.path, why=type(error).__name__)
    words = "needed something that this page does, found something else; load the page again"
    return JSONResponse({"detail": words}, 404)  # Gradio shows the detail


async def _nowhere(request: Request, error: Exception) -> Response:
    """Answer as Gradio does, but who reads an address at which there is none is shown a page."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and "text/html" in request.headers.get("accept", ""):
        return no_such_page()
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def mount_pages(app: FastAPI, desk: Desk) -> None:
    """Mount both pages; who may enter is serving/access.py's to say."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    import gradio as gr
    from gradio.route_utils import FnIndexInferError

    secret = Keys(desk.settings.state_dir).signing_secret()
    visitors = Visitors(secret)
    # Gradio makes one up at each start, and then cannot read what browsers kept before. It tells
    # every page, so it is none by which ours is found.
    kept_with = hmac.digest(secret, b"browser state", "sha256").hex()
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    theme.set(**LEGIBLE)

    @asynccontextmanager
    async def with_the_service(mounted: Any) -> AsyncIterator[None]:
        """End the heartbeats of open pages once the service is to end, which would wait for them.

        Gradio stops them so where it serves by itself; of an application around it, it knows none.
        """

        async def watch() -> None:
            while not app.state.is_ending():
                await asyncio.sleep(LOOK_SECONDS)
            mounted.stop_event.set()

        watching = asyncio.create_task(watch())
        yield
        watching.cancel()

    for path, page, head in (
        ("/ui/review", review_page(desk, kept_with), SPOKEN + AWAY + UNREAD + SHORTCUTS),
        # After what lies below it.
        ("/ui", chat_page(desk, visitors, kept_with), SPOKEN + AWAY + SENT),
    ):
        page.queue(max_size=64, default_concurrency_limit=AT_ONCE)
        gr.mount_gradio_app(
            app,
            page,
            path,
            theme=theme,
            css=STYLE,
            head=head,
            footer_links=[],
            run_history=False,
            show_error=False,
            max_file_size=1,  # nothing is uploaded here
            ssr_mode=False,
            mcp_server=False,
            app_kwargs={
                "lifespan": with_the_service,
                "exception_handlers": {
                    LookupError: _stale,
                    FnIndexInferError: _stale,
                    HTTPException: _nowhere,
                },
            },
            enable_monitoring=False,
            pwa=False,
        )
    app.add_middleware(PageHeaders)
    app.add_middleware(KnowAgain, visitors=visitors)
    app.add_api_route("/", lambda: RedirectResponse("/ui/"), include_in_schema=False)
    # Browsers ask for it whatever a page says, and complain where it is not there.
    app.add_api_route("/favicon.ico", lambda: Response(status_code=204), include_in_schema=False)
