"""`/explain`: why a version prefers what was said, on a page for people who run the service.

It quotes what people wrote, so it is an admin's. Tokens are coloured and underlined by how much
likelier training made them, and the same stands in a table. Each page loads the version, the
baseline and the reward models, one page at a time; where this machine has no memory for that beside
the models that serve, `rlhf explain interaction` does the same on another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

import sqlalchemy as sa
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from rlhf_pipeline import database as db
from rlhf_pipeline.errors import FeedbackError, PipelineError
from rlhf_pipeline.records import prompt_from_json
from rlhf_pipeline.registry.reasons import Judgement, Reasons, need_interaction, reasons
from rlhf_pipeline.registry.reasons_told import FLOORED, answerer, below_floor, verdict
from rlhf_pipeline.serving.pages.parts import (
    STYLE,
    Html,
    answer,
    inert,
    new_nonce,
    no_such_agent,
    table,
    to_first,
    when,
    whole,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.policy.shift import TokenShift
    from rlhf_pipeline.serving.gateway import Gateway

PATH = "/explain"
NEWEST = 50  # interactions that are listed
SHOWN = 120  # characters of a question in the list
STEPS = (0.1, 0.5, 2.0)  # nats from which a token is coloured, more strongly, most strongly
TOKENS = """
.tokens { font-size: 1.05rem; line-height: 2; white-space: pre-wrap }
.tokens span { padding: .1rem 0; border-bottom: 3px none }
.tokens .u1, .tokens .u2, .tokens .u3 { border-bottom: 3px solid #1b7837 }
.tokens .d1, .tokens .d2, .tokens .d3 { border-bottom: 3px dotted #b2182b }
.u1 { background: #eef7f0 } .u2 { background: #cfead5 } .u3 { background: #9fd4ab }
.d1 { background: #fcefee } .d2 { background: #f7d2cf } .d3 { background: #eda9a4 }
.u1, .u2, .u3, .d1, .d2, .d3 { color: #1c1c1c }
.said { white-space: pre-wrap; border-left: 3px solid #ddd; padding-left: .8rem }
"""
LEGEND = (
    ("u3", f"likelier by {STEPS[2]:g} nats or more"),
    ("u2", f"by {STEPS[1]:g}"),
    ("u1", f"by {STEPS[0]:g}"),
    ("d1", f"less likely by {STEPS[0]:g}"),
    ("d2", f"by {STEPS[1]:g}"),
    ("d3", f"by {STEPS[2]:g} or more"),
)


def add_explain_page(app: FastAPI, gateway: Gateway, agents: Callable[[], Sequence[str]]) -> None:
    """Add the list of newest interactions and the page of each. `agents` names everybody known."""
    one_at_a_time = threading.Lock()
    registry = gateway.champions.registry

    def made(interaction_id: str, version: str | None) -> Response:
        nonce = new_nonce()
        try:
            asked = need_interaction(registry, interaction_id)
            settings = gateway.champions.settings_of(asked.agent_id)
            with one_at_a_time:
                found = reasons(registry, settings, interaction_id, version=version)
        except PipelineError as error:
            status = 404 if isinstance(error, FeedbackError) else 409
            nav = f'<nav><a href="{PATH}">Answers</a></nav>'
            body = f"{nav}<h1>Not explained</h1><p>{inert(str(error))}</p>"
            return answer(_whole("Not explained", body, nonce), nonce, status)
        return answer(render(found, nonce), nonce)

    def listed(agent_id: str) -> Response:
        nonce, known = new_nonce(), agents()
        if agent_id not in known:
            return no_such_agent()
        return answer(_list(gateway.store.database, agent_id, known, nonce), nonce)

    async def newest(agent_id: str) -> Response:
        """List an agent's newest interactions."""
        return await run_in_threadpool(listed, agent_id)

    async def one(interaction_id: str, version: str | None = None) -> Response:
        """Show why a version prefers what was said."""
        return await run_in_threadpool(made, interaction_id, version)

    app.add_api_route(PATH, to_first(PATH, agents), include_in_schema=False)
    app.add_api_route(PATH + "/{agent_id}", newest, include_in_schema=False)
    app.add_api_route(PATH + "/interaction/{interaction_id}", one, include_in_schema=False)


def render(found: Reasons, nonce: str) -> str:
    """Return the page of one interaction."""
    facts = (
        f"{when_said(found.created_at)} UTC, answered by {answerer(found.answered_by)}; as "
        f"version {found.version} ({found.label}) finds it, beside the baseline, version "
        f"{found.baseline}."
    )
    questions = "".join(
        f'<p class="said"><b>{inert(role)}:</b> {inert(content)}</p>'
        for role, content in found.prompt
    )
    erased = (
        f"<p>{found.erased_rows} rows were erased from its snapshot since.</p>"
        if found.erased_rows
        else ""
    )
    body = "".join(
        (
            f'<nav><a href="{PATH}/{quote(found.agent_id)}">{inert(found.agent_id)}</a></nav>',
            f"<h1>Interaction {inert(found.interaction_id)}</h1><p>{inert(facts)}</p><ul>",
            *(f"<li>{inert(line)}</li>" for line in verdict(found)),
            f"</ul><h2>What was said</h2>{questions}",
            _tokens(found),
            "<h2>Beside it, the baseline's likeliest</h2>",
            f'<p class="said">{inert(found.baseline_completion)}</p>',
            f"<p>Version {found.version} finds that {abs(found.baseline_shift):.2f} nats "
            f"{'likelier' if found.baseline_shift > 0 else 'less likely'} than the baseline does."
            "</p>",
            "<h2>Rewards</h2>",
            _rewards(found),
            f"<h2>Nearest of {found.trained_on} votes it learned from</h2>",
            _near(found),
            erased,
        )
    )
    return _whole(f"Interaction {found.interaction_id}", body, nonce)


def _tokens(found: Reasons) -> str:
    shown = "".join(
        f'<span class="{step_of(t.shift)}">{"⏎" if t.ends else inert(t.text)}</span>'
        for t in found.tokens
    )
    legend = " ".join(f'<span class="{name}">{inert(words)}</span>' for name, words in LEGEND)
    rows = [
        ("the end" if t.ends else t.text, _two(t.logprob), _two(t.reference_logprob), _change(t))
        for t in found.tokens
    ]
    rows.append(("together", "", "", f"{found.shift:+.2f}"))
    head = ("token", "version, nats", "baseline, nats", "change")
    return (
        f'<p class="tokens">{shown}</p><p>{legend}. Underlined: solid where likelier, dotted where '
        f"less likely. At temperature {found.temperature:g}.</p>"
        f"<details><summary>The same in numbers</summary>{table(head, rows)}</details>"
    )


def step_of(shift: float) -> str:
    """Return the style of a token: u1 to u3 likelier, d1 to d3 less likely, empty between."""
    strength = sum(abs(shift) >= step for step in STEPS)
    return f"{'u' if shift > 0 else 'd'}{strength}" if strength else ""


def _rewards(found: Reasons) -> str:
    head = ("", "this", "the baseline's", "change")
    rows = [row for judged in found.judgements for row in _of_judge(judged)]
    if found.composite is not None:
        rows.append(_scored(Html("<b>composite</b>"), *found.composite))
    for part in found.parts:
        below = below_floor(part)
        name = f"{part.name}, added" + (f" ({below})" if below else "")
        rows.append(_scored(name, part.added, part.baseline_added))
    floored = f"<p>{FLOORED.capitalize()}.</p>" if any(map(below_floor, found.parts)) else ""
    left_out = (
        f"<p>{inert(', '.join(found.left_out))}: left out, nothing to compare with is known.</p>"
        if found.left_out
        else ""
    )
    return table(head, rows) + floored + left_out


def _of_judge(judged: Judgement) -> list[tuple[str, ...]]:
    whole = Html(f"<b>{inert(judged.judge)} model</b>")
    heads = [
        _scored(name, score, judged.baseline_heads[name]) for name, score in judged.heads.items()
    ]
    return [_scored(whole, judged.score, judged.baseline_score), *heads]


def _scored(name: str, here: float, other: float) -> tuple[str, ...]:
    return (name, f"{here:.3f}", f"{other:.3f}", f"{here - other:+.3f}")


def _near(found: Reasons) -> str:
    head = ("alike", "question", "completion", "people said", "against", "learned by")
    note = "<p>Alike: TF-IDF cosine of the questions' words, 1 for the same.</p>"
    rows = [
        (_two(n.similarity), n.question, n.completion, n.said, n.other or "", n.learned_by)
        for n in found.near
    ]
    return note + table(head, rows)


def _list(database: db.Database, agent_id: str, known: Sequence[str], nonce: str) -> str:
    i = db.interactions.c
    query = (
        sa.select(i.interaction_id, i.created_at, i.model_version, i.arm, i.prompt)
        .where(i.agent_id == agent_id)
        .order_by(i.created_at.desc())
        .limit(NEWEST)
    )
    with database.read() as connection:
        found = connection.execute(query).all()
    rows = [
        (
            Html(
                f'<a href="{PATH}/interaction/{quote(row.interaction_id)}">'
                f"{inert(prompt_from_json(row.prompt)[-1].content[:SHOWN].strip() or '…')}</a>"
            ),
            answerer(row.model_version),
            row.arm or "",
            when(row.created_at),
        )
        for row in found
    ]
    tabs = " ".join(f'<a href="{PATH}/{quote(agent)}">{inert(agent)}</a>' for agent in known)
    head = ("question", "answered by", "arm", "UTC")
    body = f"<nav>{tabs}</nav><h1>{inert(agent_id)}: the newest answers</h1>{table(head, rows)}"
    return _whole(agent_id, body, nonce)


def _whole(title: str, body: str, nonce: str) -> str:
    return whole(title, body, nonce, style=STYLE + TOKENS)


def when_said(moment: str) -> str:
    """Return an ISO moment to the minute."""
    return moment[:16].replace("T", " ")


def _two(number: float) -> str:
    return f"{number:.2f}"


def _change(token: TokenShift) -> str:
    return f"{token.shift:+.2f}"
