"""`/your-data`: what is held about this browser's person; `/raters`: about anybody, for admins.

Both say how much there is, give it as a JSON file, and erase it once that was confirmed on a page
of its own, all by what /v1/raters calls as well. Whose data it is, the browser's signed cookie says
on the one (with a key for one agent, what that agent holds), and an admin on the other; access.py
keeps clients from that. To erase takes a word that the page before signed, so a form on another
site cannot do it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from rlhf_pipeline.erasure import erase, held_about, told
from rlhf_pipeline.errors import UnknownRater
from rlhf_pipeline.feedback.rules import LONGEST_RATER
from rlhf_pipeline.serving.access import right_in, sign, unsign
from rlhf_pipeline.serving.pages.parts import (
    FORMS,
    STYLE,
    add_form,
    answer,
    inert,
    new_nonce,
    table,
    whole,
)
from rlhf_pipeline.serving.pages.visitors import Visitors
from rlhf_pipeline.serving.raters_api import REFUSALS, refusal

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.registry.models import ModelRegistry

MINE, ANYBODY = "/your-data", "/raters"
PURPOSE = "erase"
CONFIRM_SECONDS = 600  # after which it is asked again
# Bytes. Of each character of the longest name at most 12 are sent and, in the word that confirms
# it, 16 of what JSON writes as \ud83d\ude00; and as much as any other field needs.
LONGEST_FORM = 8192 + LONGEST_RATER * (12 + 16)
NOTHING_YET = "This browser is nobody yet: open the chat first, with cookies let in."
NOTHING_HELD = "Nothing is held about you."
REMAINS = (
    "Votes, conversations, traces and every row of a snapshot go, for ever. Counts and "
    "fingerprints stay, and a model keeps what it learned until a new one is trained. Backups and "
    "exports that were made before are not reached."
)
COUNTED = {
    "votes": "feedback",
    "answers": "interactions",
    "others' votes on those": "votes_about_them",
    "in quarantine": "quarantined",
    "traces": "traces",
    "said in MLflow": "assessments",
    "answers nobody signed": "unsigned_interactions",
}

Asked = Mapping[str, str]
"""Whose data: `rater`, `agent` ("" for every one), `unsigned` ("yes": their unsigned chats too)."""


def add_data_pages(
    app: FastAPI,
    settings: Settings,
    registry: ModelRegistry,
    agents: Callable[[], Sequence[str]],
    secret: bytes,
) -> None:
    """Add both pages. `agents` names everybody known; `secret` signs cookies and confirmations."""
    visitors = Visitors(secret)

    def person(request: Request, typed: Asked) -> Asked:
        rater = visitors.person(request.cookies)
        if rater is None:
            raise UnknownRater(NOTHING_YET)
        return {"rater": rater, "agent": right_in(request.scope).agent_id or "", "unsigned": ""}

    def rater(request: Request, typed: Asked) -> Asked:
        return {name: typed.get(name, "") for name in ("rater", "agent", "unsigned")}

    def rater_form() -> str:
        return _rater_form(agents())

    for page in (
        _DataPage(MINE, "Your data", settings, registry, secret, person, lambda: ""),
        _DataPage(ANYBODY, "A rater's data", settings, registry, secret, rater, rater_form),
    ):
        methods = ["GET", "POST"]  # an id in an address would stay in the history
        app.add_api_route(page.path, page.show, methods=methods, include_in_schema=False)
        add_form(app, page.path, "/download", page.download)
        add_form(app, page.path, "/erase", page.erase)


@dataclass(frozen=True)
class _DataPage:
    """One of the two pages: they differ in whose data it is and in who may say so."""

    path: str
    title: str
    settings: Settings
    registry: ModelRegistry
    secret: bytes
    whose: Callable[[Request, Asked], Asked]
    above: Callable[[], str]  # HTML that comes first

    async def show(self, request: Request) -> Response:
        """Show how much is held."""
        return await self._answered(request, self._held)

    async def download(self, request: Request) -> Response:
        """Give everything that is held as a JSON file."""
        return await self._answered(request, self._file)

    async def erase(self, request: Request) -> Response:
        """Ask whether it is meant; erase where the form says so."""
        return await self._answered(request, self._erased)

    async def _answered(
        self, request: Request, work: Callable[[Asked, Asked], Response]
    ) -> Response:
        typed = await form_of(request)

        def done() -> Response:
            try:
                return work(self.whose(request, typed), typed)
            except REFUSALS as error:
                status, words, headers = refusal(error)
                page = self._page(f'<p class="bad" id="refused">{inert(words)}</p>', status)
                page.headers.update(headers)
                return page

        return await run_in_threadpool(done)

    def _held(self, asked: Asked, typed: Asked) -> Response:
        if not asked["rater"]:
            return self._page("")
        found = self._look(asked)
        rows = [
            (one["agent_id"], *(len(one[name]) for name in COUNTED.values()))
            for one in found["agents"]
        ]
        learned = [
            f"{one['agent_id']}: version {version['version']} ({version['label']}) is of a "
            f"snapshot with {version['rows']} rows of theirs"
            for one in found["agents"]
            for version in one["versions"]
        ]
        body = f"<h2>Rater {inert(asked['rater'])}</h2>" if self.path == ANYBODY else ""
        body += table(("assistant", *COUNTED), rows) + _lines(learned)
        if rows:
            body += form(f"{self.path}/download", asked, "<button>Download all of it</button>")
            unsigned = (
                '<label><input type="checkbox" name="unsigned" value="yes"> also answers nobody '
                "signed that they voted on (not for annotators)</label>"
                if self.path == ANYBODY
                else ""
            )
            words = f'{unsigned}<button class="erase" id="erase">Erase …</button>'
            body += form(f"{self.path}/erase", {**asked, "unsigned": ""}, words)
        if found["erased_before"]:
            body += "<h2>Erased before</h2>" + _lines(told(found["erased_before"]))
        return self._page(body)

    def _file(self, asked: Asked, typed: Asked) -> Response:
        text = json.dumps(self._look(asked), ensure_ascii=False, indent=2)
        headers = {
            "content-disposition": 'attachment; filename="your-data.json"',
            "cache-control": "no-store",
        }
        return Response(text, media_type="application/json", headers=headers)

    def _erased(self, asked: Asked, typed: Asked) -> Response:
        told_before = unsign(self.secret, PURPOSE, typed.get("confirmed", ""))
        meant = told_before is not None and all(told_before[name] == asked[name] for name in asked)
        if not meant or typed.get("sure") != "yes":
            self._look(asked)  # who is unknown is told so now
            return self._page(self._question(asked))
        agent, unsigned = asked["agent"] or None, asked["unsigned"] == "yes"
        done = erase(self.settings, self.registry, asked["rater"], agent, unsigned=unsigned)
        tables = done["tables"] if self.path == ANYBODY else []  # for an operator to look through
        lines = _lines(told(done["erasures"], tables))
        return self._page(f'<h2 id="erased">It is erased</h2><p>{REMAINS}</p>{lines}')

    def _question(self, asked: Asked) -> str:
        where = f"agent {asked['agent']}" if asked["agent"] else "every assistant"
        who = "you" if self.path == MINE else f"rater {asked['rater']}"
        words = (
            f"<h2>Erase everything that is held about {inert(who)}, in {inert(where)}?</h2>"
            f"<p>{REMAINS}</p>"
            '<label><input type="checkbox" name="sure" value="yes" required id="sure"> '
            "I know that this cannot be undone</label>"
            '<button class="erase" id="erase-for-good">Erase for good</button> '
            f'<a href="{self.path}">Keep it</a>'
        )
        signed = sign(self.secret, PURPOSE, dict(asked), CONFIRM_SECONDS)
        return form(f"{self.path}/erase", {**asked, "confirmed": signed}, words)

    def _look(self, asked: Asked) -> dict[str, Any]:
        try:
            return held_about(self.registry, asked["rater"], asked["agent"] or None)
        except UnknownRater as error:
            if self.path == MINE:
                raise UnknownRater(NOTHING_HELD) from error
            raise

    def _page(self, body: str, status: int = 200) -> Response:
        nonce = new_nonce()
        back = (
            '<a href="/ui/">Chat</a>' if self.path == MINE else '<a href="/dashboard">Dashboard</a>'
        )
        body = f"<nav>{back}</nav><h1>{self.title}</h1>{self.above()}{body}"
        page = whole(self.title, body, nonce, style=STYLE + FORMS)
        return answer(page, nonce, status, forms=True)


async def form_of(request: Request) -> dict[str, str]:
    """Return what a form sent; of what is too long, nothing."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST_FORM:
            return {}
    return {name: said[0] for name, said in parse_qs(body.decode("utf-8", "replace")).items()}


def form(path: str, fields: Asked, inside: str) -> str:
    """Return a form that sends these fields along with what is inside."""
    hidden = "".join(
        f'<input type="hidden" name="{name}" value="{inert(value)}">'
        for name, value in fields.items()
        if value
    )
    return f'<form method="post" action="{path}">{hidden}{inside}</form>'


def _rater_form(agents: Sequence[str]) -> str:
    options = "".join(f"<option>{inert(agent)}</option>" for agent in agents)
    words = (
        "<label>Rater, as the sender wrote it (of the review page: annotator: and the name, in "
        'small letters), or the stored hash <input name="rater" required '
        f'maxlength="{2 * LONGEST_RATER}" size="40" id="rater"></label>'
        '<label>Agent <select name="agent"><option value="">every one</option>'
        f'{options}</select></label><button id="look">Look</button>'
    )
    return form(ANYBODY, {}, words)


def _lines(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{inert(line)}</li>' for line in lines)}</ul>" if lines else ""
