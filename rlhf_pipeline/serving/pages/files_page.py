"""`/feedback-files`: feedback from a file and into one, for who reviews; `rlhf ingest` as a page.

What is taken in passes the same rules as at the terminal, and what is written out is what
`rlhf feedback export` writes. It gives out what people wrote, so it is an admin's. A file that is
sent is at most as long as any request; longer ones go in by `rlhf ingest` or the inbox folder.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from rlhf_pipeline.errors import ConfigError, FeedbackError, SourceError
from rlhf_pipeline.feedback.export import What
from rlhf_pipeline.feedback.rules import AGENT_ID, MEANINGS, Rule
from rlhf_pipeline.serving.access import LONGEST_BODY, sign, unsign
from rlhf_pipeline.serving.pages.data_page import form_of
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

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.feedback.ingest import IngestSummary
    from rlhf_pipeline.feedback.store import FeedbackStore

PATH = "/feedback-files"
PURPOSE = "feedback file"
PAGE_SECONDS = 3600.0  # after which the page is asked for again before it takes a file
ODD = re.compile(r"[^\w.-]")  # in a file's name as a browser sends it


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of file that is written."""

    words: str
    what: What
    name: str  # a name without an ending is a folder, which is sent as a zip file


KINDS: Mapping[str, _Kind] = {
    "jsonl": _Kind("votes, JSON lines", "events", "votes.jsonl"),
    "csv": _Kind("votes, CSV", "events", "votes.csv"),
    "dataset": _Kind("votes, Hugging Face data set", "events", "votes"),
    "pairs": _Kind("preference pairs for TRL, JSON lines", "pairs", "pairs.jsonl"),
    "pairs-dataset": _Kind("preference pairs for TRL, data set", "pairs", "pairs"),
}


def add_files_page(
    app: FastAPI,
    settings: Settings,
    store: FeedbackStore,
    agents: Callable[[], Sequence[str]],
    secret: bytes,
) -> None:
    """Add the page. `agents` names everybody known; `secret` signs the form."""

    def page(said: str = "", status: int = 200) -> Response:
        return _page(said + _take_form(agents(), secret) + _give_form(agents()), status)

    def refused(error: Exception, status: int = 422) -> Response:
        return page(f'<p class="bad" id="refused">{inert(str(error))}</p>', status)

    async def show() -> Response:
        """Show both forms."""
        return await run_in_threadpool(page)

    async def take(request: Request) -> Response:
        """Take a file's feedback in, and say what became of every row."""
        try:
            async with request.form(max_files=1, max_fields=8) as sent:
                file, agent_id = sent.get("file"), str(sent.get("agent", "")).strip()
                # The word was on our own page: another site's form does not have it.
                if unsign(secret, PURPOSE, str(sent.get("word", ""))) is None:
                    raise FeedbackError("needed this page's own form, found another; send it again")
                if not isinstance(file, UploadFile) or not file.filename:
                    raise FeedbackError("needed a file, found none; choose one")
                _check_agent(agent_id)
                if not settings.feedback.enabled:
                    raise ConfigError("feedback.enabled is off in this recipe; nothing was stored")
                content = await file.read()
                name = _short(ODD.sub("_", Path(file.filename).name)).lstrip(".")
            found = await run_in_threadpool(_taken, settings, store, name, content, agent_id)
        except (FeedbackError, ConfigError) as error:
            return await run_in_threadpool(refused, error)
        except HTTPException as error:  # no form at all
            return await run_in_threadpool(refused, Exception(error.detail), error.status_code)
        return await run_in_threadpool(page, _told(found, agent_id))

    async def give(request: Request) -> Response:
        """Give an agent's feedback as a file."""
        typed = await form_of(request)
        try:
            _check_agent(agent_id := typed.get("agent", ""))
            kind = KINDS.get(typed.get("kind", ""))
            if kind is None:
                raise FeedbackError(f"needed a kind out of {', '.join(KINDS)}; choose one")
            return await run_in_threadpool(_written, store, agent_id, kind)
        except FeedbackError as error:
            return await run_in_threadpool(refused, error)

    app.add_api_route(PATH, show, include_in_schema=False)
    add_form(app, PATH, "/take", take)
    add_form(app, PATH, "/give", give)


def _short(name: str) -> str:
    """Return the end of a file's name that a disk takes: it counts bytes, 255 of them."""
    return name.encode()[-200:].decode(errors="ignore")


def _check_agent(agent_id: str) -> None:
    if not AGENT_ID.fullmatch(agent_id):
        raise FeedbackError(
            "needed an agent's name of 1 to 64 letters, digits, - and _, the first a letter or "
            f"digit, found {agent_id[:64]!r}; name one"
        )


def _taken(
    settings: Settings, store: FeedbackStore, name: str, content: bytes, agent_id: str
) -> IngestSummary:
    from rlhf_pipeline.config import own_settings
    from rlhf_pipeline.feedback.ingest import ingest

    own = own_settings(settings, store.recipe_of(agent_id))
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        path = Path(folder) / (name or "file")
        path.write_bytes(content)
        try:
            return ingest(store, path, agent_id, renaming=own.feedback.names.renaming())
        except SourceError as error:  # by the name that it was sent under
            raise SourceError(str(error).replace(f"{folder}/", "")) from error


def _told(found: IngestSummary, agent_id: str) -> str:
    aside = [
        (rule, n, f"{MEANINGS.get(Rule(rule), '')}; the first: {found.examples[rule]}")
        for rule, n in found.quarantined.items()
    ]
    rows = [("read", found.read, ""), *found.taken, *aside]
    words = f'<h2 id="taken">Taken in for {inert(agent_id)}</h2>'
    said = "".join(f"<p>{inert(remark)}</p>" for remark in found.remarks)
    return words + table(("", "rows", "why"), rows) + said


def _written(store: FeedbackStore, agent_id: str, kind: _Kind) -> Response:
    from rlhf_pipeline.feedback.export import export

    folder = tempfile.mkdtemp(prefix="rlhf-")
    try:
        out = Path(folder) / kind.name
        export(store.database, agent_id, out, what=kind.what)
        if out.is_dir():
            out = Path(shutil.make_archive(str(out), "zip", out))
    except BaseException:
        shutil.rmtree(folder)
        raise
    return FileResponse(
        out,
        filename=f"{agent_id}-{out.name}",
        headers={"cache-control": "no-store"},
        background=BackgroundTask(shutil.rmtree, folder),
    )


def _take_form(agents: Sequence[str], secret: bytes) -> str:
    word = sign(secret, PURPOSE, {}, PAGE_SECONDS)
    return (
        "<h2>Take in</h2><p>JSON lines, JSON, CSV, a workbook, or a data set's "
        "<code>data/train.parquet</code>, in any format that <code>rlhf ingest</code> knows, up to "
        f"{LONGEST_BODY >> 20} MB. The same row is stored once; what breaks a rule goes to "
        "quarantine.</p>"
        f'<form method="post" action="{PATH}/take" enctype="multipart/form-data">'
        f'<input type="hidden" name="word" value="{word}">'
        '<label>File <input type="file" name="file" required id="file"></label>'
        '<label>Agent <input name="agent" required maxlength="64" list="agents" id="agent"></label>'
        f'<datalist id="agents">{_options(agents)}</datalist><button id="take">Take in</button>'
        "</form>"
    )


def _give_form(agents: Sequence[str]) -> str:
    kinds = "".join(f'<option value="{name}">{kind.words}</option>' for name, kind in KINDS.items())
    return (
        "<h2>Write out</h2><p>The votes that count, with the texts they are about.</p>"
        f'<form method="post" action="{PATH}/give">'
        f'<label>Agent <select name="agent" required>{_options(agents)}</select></label>'
        f'<label>As <select name="kind" id="kind">{kinds}</select></label>'
        '<button id="give">Write out</button></form>'
    )


def _options(agents: Sequence[str]) -> str:
    return "".join(f"<option>{inert(agent)}</option>" for agent in agents)


def _page(body: str, status: int) -> Response:
    nonce = new_nonce()
    nav = '<nav><a href="/ui/review/">Review</a><a href="/dashboard">Dashboard</a></nav>'
    page = whole(
        "Feedback files", f"{nav}<h1>Feedback files</h1>{body}", nonce, style=STYLE + FORMS
    )
    return answer(page, nonce, status, forms=True)
