"""`/candidates`: a person decides on promotion, with what the gate found and answers side by side.

It quotes what people asked, so it is an admin's. What is promoted is what was looked at: the form
carries the version and the champion of that moment, signed, and the ledger refuses where another is
champion by then. A version that the gate refused is shown too, but only `rlhf promote --force`
takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from rlhf_pipeline.errors import PipelineError, RegistryError
from rlhf_pipeline.evaluation.gate import GateDecision
from rlhf_pipeline.evaluation.page import STYLE as REPORT
from rlhf_pipeline.evaluation.page import body
from rlhf_pipeline.evaluation.plots import pictures_in
from rlhf_pipeline.registry.comparison import by_place, compared_with, comparison_of
from rlhf_pipeline.serving.access import right_in, sign, unsign
from rlhf_pipeline.serving.pages.data_page import form, form_of
from rlhf_pipeline.serving.pages.parts import (
    FORMS,
    STYLE,
    answer,
    inert,
    new_nonce,
    no_such_agent,
    to_first,
    when,
    whole,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.registry.ledger import ModelVersion
    from rlhf_pipeline.registry.models import ModelRegistry

PATH = "/candidates"
PURPOSE = "promote"
DECIDE_SECONDS = 3600  # after which the page is to be looked at again


def add_approval_page(
    app: FastAPI, registry: ModelRegistry, agents: Callable[[], Sequence[str]], secret: bytes
) -> None:
    """Add the page. `agents` names everybody known; `secret` signs what is decided on."""

    def shown(agent_id: str, version: str | None, words: str = "", status: int = 200) -> Response:
        nonce, known = new_nonce(), agents()
        if agent_id not in known:
            return no_such_agent()
        waiting = registry.ledger.standing(agent_id).waiting
        title = f"Candidates of {agent_id}"
        told = [f'<nav><a href="/dashboard/{quote(agent_id)}">{inert(agent_id)}</a></nav>']
        told += [f"<h1>{inert(title)}</h1>", words, _list(agent_id, waiting)]
        try:
            wanted = registry.ledger.find(agent_id, version or "challenger")
        except RegistryError as error:
            if version is not None:
                told, status = [*told, f'<p class="bad">{inert(str(error))}</p>'], 404
        else:
            told += [_candidate(registry, wanted, secret)]
        text = whole(title, "".join(told), nonce, style=REPORT + STYLE + FORMS)
        return answer(text, nonce, status, forms=True)

    def decided(agent_id: str, typed: dict[str, str], actor: str) -> Response:
        asked = unsign(secret, PURPOSE, typed.get("signed", ""))
        if asked is None or asked["agent"] != agent_id or typed.get("looked") != "yes":
            words = "Nothing is promoted: look at the answers, and say so within the hour."
            return shown(agent_id, typed.get("version") or None, _refused(words), 409)
        ledger = registry.ledger
        try:
            wanted = ledger.version(agent_id, int(asked["version"]))
            registry.folder_of(wanted)  # its files are those that were registered
            outcome = ledger.promote(
                agent_id,
                wanted.version,
                actor=actor,
                reason=typed.get("reason", "").strip() or "approved after a look at its answers",
                expected_champion=int(asked["champion"]),
            )
        except PipelineError as error:
            return shown(agent_id, str(asked["version"]), _refused(str(error)), 409)
        words = f'<p class="good" id="promoted">{inert(outcome.words)}</p>'
        try:
            registry.reconcile(agent_id)
        except RegistryError as error:  # the ledger holds; a sensor brings the aliases after it
            words += f"<p>MLflow's aliases will follow: {inert(str(error))}</p>"
        return shown(agent_id, None, words)

    async def page(agent_id: str, version: str | None = None) -> Response:
        """Show the newest version that waits for a person, or the one that is named."""
        return await run_in_threadpool(shown, agent_id, version)

    async def decide(agent_id: str, request: Request) -> Response:
        """Promote what the form names."""
        typed = await form_of(request)
        right = right_in(request.scope)
        actor = f"key:{right.key_id}" if right.key_id else "person:at the page"
        return await run_in_threadpool(decided, agent_id, typed, actor)

    app.add_api_route(PATH, to_first(PATH, agents), include_in_schema=False)
    app.add_api_route(PATH + "/{agent_id}", page, include_in_schema=False)
    app.add_api_route(PATH + "/{agent_id}", decide, methods=["POST"], include_in_schema=False)


def _list(agent_id: str, waiting: Sequence[ModelVersion]) -> str:
    if not waiting:
        words = "none newer than the champion passed the gate without being rolled back since"
        return f"<p>No version waits: {words}.</p>"
    lines = "".join(
        f'<li><a href="{PATH}/{quote(agent_id)}?version={v.version}">Version {v.version}</a> '
        f"({inert(v.label)}), registered {when(v.created_at)} UTC</li>"
        for v in reversed(waiting)
    )
    return f"<p>Passed the gate, and waiting:</p><ul>{lines}</ul>"


def _candidate(registry: ModelRegistry, version: ModelVersion, secret: bytes) -> str:
    """Return what there is to look at of one version, and the form where it may be promoted."""
    ledger, agent_id = registry.ledger, version.agent_id
    standing = ledger.standing(agent_id)
    then = compared_with(version, by_place(ledger.versions(agent_id)))
    champion = standing.champion
    told = f"<h2>Version {version.version} ({inert(version.label)})</h2>"
    if champion is not None and then is not None:
        beside = "the champion" if then.version == champion.version else "the champion of that day"
        told += f"<p>It was compared with version {then.version}, {beside}.</p>"
    may = champion is not None and version in standing.waiting
    if may and champion is not None:
        asked = {"agent": agent_id, "version": str(version.version)}
        signed = sign(secret, PURPOSE, {**asked, "champion": str(champion.version)}, DECIDE_SECONDS)
        told += form(
            f"{PATH}/{quote(agent_id)}",
            {"version": str(version.version), "signed": signed},
            '<label><input type="checkbox" name="looked" value="yes" required id="looked"> '
            "I have looked at the answers below</label>"
            '<label>Why <input name="reason" maxlength="500" size="60" id="reason"></label>'
            f'<button id="promote">Promote version {version.version}: it answers from the next '
            f"request on, in place of version {champion.version}</button>",
        )
    else:
        told += (
            "<p>It does not wait for a decision; <code>rlhf promote --force</code> takes any "
            "version.</p>"
        )
    report = comparison_of(version)
    if report is None:
        return (
            told + "<p>Its comparison is not there: it had none, or its turn's folder is gone.</p>"
        )
    decision = GateDecision.from_json(version.gate) if version.gate is not None else None
    return told + body(report, decision, pictures_in(version.work))


def _refused(words: str) -> str:
    return f'<p class="bad" id="refused">{inert(words)}</p>'
