"""`/dashboard`: where every agent stands, on one page for people who run the service.

Made by the server, without a script: numbers, tables and pictures (PNG, inside the page), so its
content security policy lets nothing else in. It shows no words that anybody wrote, but for the
names of dropped files and of their columns, where those could not be taken in.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from rlhf_pipeline.alerts import UNSEEN, Alert, alerts_about
from rlhf_pipeline.feedback.inbox import MOST_LEFT, left_in
from rlhf_pipeline.overview import (
    FEWEST,
    HUNDREDTH,
    LATEST_ANSWERS,
    NEWEST_TROUBLES,
    Overview,
    Standing,
    overview,
)
from rlhf_pipeline.records import now
from rlhf_pipeline.registry.models import model_name
from rlhf_pipeline.serving.pages.experiment_page import draw_bounds, draw_ramp, who_meets
from rlhf_pipeline.serving.pages.parts import (
    Html,
    answer,
    inert,
    new_nonce,
    no_agent_yet,
    no_such_agent,
    picture,
    table,
    to_first,
    when,
    whole,
)

if TYPE_CHECKING:
    from fastapi import FastAPI
    from matplotlib.figure import Figure

    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.feedback.claims import Claim
    from rlhf_pipeline.serving.gateway import Gateway

PATH = "/dashboard"
RUN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # a Dagster run's id
FRESH_SECONDS = 20.0  # a page asked for again within them is the same one
AGAIN_SECONDS = 60  # after which a browser asks again
COLOURS = ("#1b7837", "#2166ac", "#b2182b", "#762a83", "#b35806", "#666666", "#35978f")


def add_dashboard(
    app: FastAPI, gateway: Gateway, agents: Callable[[], Sequence[str]], links: Mapping[str, str]
) -> None:
    """Add the page. `agents` names everybody known, `links` other pages by their name."""
    kept: dict[str, tuple[float, Overview]] = {}

    def looked(agent_id: str, settings: Settings | None = None) -> Overview:
        before = kept.get(agent_id)
        if before is not None and time.monotonic() - before[0] < FRESH_SECONDS:
            return before[1]
        ledger = gateway.champions.registry.ledger
        enough, latest = None, LATEST_ANSWERS
        if settings is not None:
            enough = settings.continuous_learning.min_new_feedback
            latest = settings.experiments.trouble_answers
        found = overview(gateway.store, ledger, agent_id, enough=enough, latest=latest)
        kept[agent_id] = (time.monotonic(), found)
        return found

    def made(agent_id: str) -> Response:
        known, nonce = agents(), new_nonce()
        if agent_id not in known:
            return no_such_agent()
        alerts = alerts_about(agent_id, gateway.champions.settings_of, looked, at=now())
        if any(alert.name == UNSEEN for alert in alerts):
            body = f"{_nav(agent_id, known, links)}<h1>{inert(agent_id)}</h1>{_told(alerts)}"
            return answer(whole(agent_id, body, nonce), nonce, 503)
        found = looked(agent_id)
        page = render(
            found,
            alerts,
            known,
            links,
            left=left_in(gateway.champions.settings, agent_id),
            waiting=gateway.waiting,
            nonce=nonce,
        )
        return answer(page, nonce)

    def nobody() -> Response:
        return no_agent_yet(above=_nav("", [], links))

    async def one(agent_id: str) -> Response:
        """Show where an agent stands."""
        return await run_in_threadpool(made, agent_id)

    app.add_api_route(PATH, to_first(PATH, agents, nobody), include_in_schema=False)
    app.add_api_route(PATH + "/{agent_id}", one, include_in_schema=False)


def render(
    o: Overview,
    alerts: Sequence[Alert],
    agents: Sequence[str],
    links: Mapping[str, str],
    *,
    left: Sequence[str] = (),
    waiting: int,
    nonce: str,
) -> str:
    """Return the whole page as HTML."""
    parts = [
        _nav(o.agent_id, agents, links),
        f"<h1>{inert(o.agent_id)}</h1><p>{_summary(o)}</p>",
        _told(alerts),
        _left(left),
        _facts(o, waiting),
        f"<h2>Feedback, {_last(len(o.votes.days))}</h2>",
        picture(votes_figure(o), "votes received, by day") if o.votes.by_kind else "<p>None.</p>",
        "<h2>Raters of the newest snapshot</h2>",
        _raters(o.support),
        "<h2>Versions</h2>",
        picture(versions_figure(o.standings), "score, KL, satisfaction and learning by version")
        if len(o.standings) > 1 or any(s.satisfaction is not None for s in o.standings)
        else "",
        "<p>Dashed: the baseline was reset. Scores and KL before it count from another one.</p>"
        if resets(o.standings[::-1])
        else "",
        _versions(o.standings, o.agent_id, links.get("MLflow")),
        "<h2>Experiment</h2>",
        _experiment(o),
        "<h2>Training</h2>",
        table(
            ("asked", "attempt", "state", "asked by", "why it ended"),
            [
                (
                    _run(a, links.get("Dagster")),
                    a.attempt,
                    a.state,
                    a.asked_by,
                    a.reason or "",
                )
                for a in o.attempts
            ],
        ),
        "<h2>Drift of the newest snapshot</h2>",
        _drift(o.drift),
        f"<h2>Blocked and failed answers, of the newest {NEWEST_TROUBLES:,}</h2>",
        table(("rule", "times"), list(o.troubles.items())),
        f"<p>Made {when(now())} UTC</p>",
    ]
    again = f'<meta http-equiv="refresh" content="{AGAIN_SECONDS}">'
    return whole(o.agent_id, "".join(parts), nonce, head=again)


def _nav(agent_id: str, agents: Sequence[str], links: Mapping[str, str]) -> str:
    tabs = " ".join(
        f'<a href="{PATH}/{quote(a)}">{_b(inert(a)) if a == agent_id else inert(a)}</a>'
        for a in agents
    )
    others = " ".join(f'<a href="{inert(url)}">{inert(name)}</a>' for name, url in links.items())
    return f"<nav>{tabs} {others}</nav>"


def _told(alerts: Sequence[Alert]) -> str:
    return "".join(
        f'<p class="bad">{_b(inert(a.name.replace("_", " ")))}: {inert(a.words)}</p>'
        for a in alerts
    )


def _left(left: Sequence[str]) -> str:
    shown = [inert(why) for why in left[:MOST_LEFT]]
    if len(left) > MOST_LEFT:
        shown.append(f"and {len(left) - MOST_LEFT} more: <code>rlhf status --json</code>")
    return "".join(f'<p class="bad">{_b("inbox")}: {why}</p>' for why in shown)


def votes_figure(o: Overview) -> Figure:
    """Return the votes of each day, stacked by kind."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.add_subplot()
    below = [0] * len(o.votes.days)
    for (kind, counts), colour in zip(o.votes.by_kind.items(), COLOURS, strict=False):
        axes.bar(date2num(o.votes.days), counts, bottom=below, label=kind, color=colour)
        below = [a + b for a, b in zip(below, counts, strict=True)]
    places = AutoDateLocator()
    axes.xaxis.set_major_locator(places)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(places))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(ylabel="votes received")
    axes.legend(fontsize="small", ncols=4, loc="upper left")
    axes.set_ylim(0, max(1, *below) * 1.35)
    return figure


def versions_figure(standings: Sequence[Standing]) -> Figure:
    """Return the versions over time, oldest first: score with its spread between prompts, KL,
    satisfaction with its 95 % interval, and what was learned for 1,000 more votes.
    """
    from matplotlib.figure import Figure

    seen = list(reversed(standings))
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    places = figure.subplots(2, 2, sharex=True).flatten()
    spreads = [(s.spread or 0.0, s.spread or 0.0) for s in seen]
    curves: tuple[tuple[str, list[float | None], list[tuple[float, float]]], ...] = (
        ("held-out score, ± spread", [s.score for s in seen], spreads),
        ("KL to the baseline, nats", [s.kl for s in seen], []),
        ("satisfaction, 95 %", [s.satisfaction for s in seen], [_sides(s) for s in seen]),
        ("score learned / 1,000 votes", [s.learned for s in seen], []),
    )
    for axes, (name, values, sides) in zip(places, curves, strict=True):
        known = [n for n, value in enumerate(values) if value is not None]
        axes.errorbar(
            known,
            [values[n] for n in known],
            yerr=np.transpose([sides[n] for n in known]) if any(map(any, sides)) else None,
            fmt="o-",
            capsize=4,
        )
        axes.set_title(name, fontsize="small")
        axes.grid(axis="y", alpha=0.3)
        if not known:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "not known yet", ha="center", transform=axes.transAxes)
        axes.set_xlim(-0.5, len(seen) - 0.5)
    for n in resets(seen):
        for axes in places[:2]:
            axes.axvline(n - 0.5, color="grey", linestyle="--")
    ticks = range(0, len(seen), max(1, len(seen) // 12))
    for axes in places[2:]:
        axes.set_xticks(ticks, [str(seen[n].version) for n in ticks])
        axes.set_xlabel("version")
    return figure


def _sides(s: Standing) -> tuple[float, float]:
    """Return how far its satisfaction's interval reaches below and above, within 0 to 1."""
    if s.satisfaction is None or s.margin is None:
        return 0.0, 0.0
    return min(s.margin, s.satisfaction), min(s.margin, 1 - s.satisfaction)


def resets(seen: Sequence[Standing]) -> list[int]:
    """Return the places of versions, oldest first, that have another baseline than those before."""
    known = [(n, s.baseline) for n, s in enumerate(seen) if s.baseline is not None]
    return [n for (_, before), (n, after) in pairwise(known) if before != after]


def experiment_figure(o: Overview) -> Figure:
    """Return the primary metric's confidence sequence over the looks, and the ramp below it."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    from rlhf_pipeline.experiment.decision import PRIMARY

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    draw_bounds(above, o.looks, PRIMARY)
    above.set(ylabel=f"{PRIMARY.name},\nchallenger − champion", ylim=(-1, 1))
    draw_ramp(below, o.looks)
    below.set(ylabel="ramp, %", ylim=(0, 100))
    places = AutoDateLocator()
    below.xaxis.set_major_locator(places)
    below.xaxis.set_major_formatter(ConciseDateFormatter(places))
    return figure


def _summary(o: Overview) -> str:
    champion = next((s for s in o.standings if "champion" in s.roles), None)
    if champion is None:
        told = "No champion yet: the first turn trains version 0."
    else:
        told = f"Version {champion.version} answers, registered {when(champion.created_at)} UTC."
    if o.paused is not None:
        told += f' <b class="bad">Paused: {inert(o.paused)}</b>'
    return told


def _facts(o: Overview, waiting: int) -> str:
    votes = o.votes
    facts = [
        (f"{votes.counted:,}", "newest votes received, replaced ones too"),
        (when(votes.newest_at) if votes.newest_at else "–", "last vote, UTC"),
        (f"{votes.voters:,}", "people among them"),
        (str(waiting), "requests waiting, here"),
        (_memory(), "peak memory, here"),
    ]
    if votes.top_share is not None:
        who = "1 %" if votes.voters >= HUNDREDTH else f"of {votes.voters}"
        facts.append((f"{votes.top_share:.0%}", f"by the busiest {who}"))
    if o.waits is not None:
        late = "p95" if o.waits.answers >= FEWEST else "slowest"
        told = f"{o.waits.median:.2f} / {o.waits.late:.2f} s"
        facts.append((told, f"an answer, median / {late} of {o.waits.answers:,}"))
    cards = "".join(f"<div>{_b(number)}{inert(what)}</div>" for number, what in facts)
    return f'<div class="facts">{cards}</div>'


def _run(attempt: Claim, dagster: str | None) -> str:
    """Return when it was asked for, as a link to the run on Dagster's page where it has one."""
    moment = when(attempt.created_at)
    if dagster is None or not RUN.fullmatch(attempt.holder):
        return moment
    return Html(f'<a href="{inert(dagster.rstrip("/"))}/runs/{attempt.holder}">{moment}</a>')


def _raters(support: Mapping[str, Any] | None) -> str:
    if support is None:
        return "<p>No snapshot yet.</p>"
    compared = [r for r in support["by_rater"] if r["compared"] >= FEWEST]
    against = sum(r["alike"] < 0.5 for r in compared)
    rows: list[tuple[object, ...]] = [
        (f"agreement on {on}", f"alpha {a['alpha']:.2f}, {a['alike']:.0%} alike", a["answers"])
        for on, a in support["agreement"].items()
        if a["answers"]
    ]
    rows += [
        ("who contradict the others more often than not", against, len(compared)),
        ("of the votes by the busiest hundredth", f"{support['top_share']:.0%}", support["raters"]),
        ("n-grams that few raters carry", len(support["associations"]), support["raters"]),
    ]
    return table(("raters", "found", "looked at"), rows)


def _versions(standings: Sequence[Standing], agent_id: str, mlflow: str | None) -> str:
    verdicts = {True: '<span class="good">passed</span>', False: "refused", None: "not judged"}
    rows = [
        (
            _version(s, agent_id, mlflow),
            s.label,
            ", ".join(s.roles),
            when(s.created_at),
            Html(verdicts[s.passed]),
            "–" if s.score is None else f"{s.score:+.2f} ± {s.spread or 0.0:.2f}",
            "–" if s.gain is None else f"{s.gain:+.2f}",
            "–" if s.kl is None else f"{s.kl:.1f}",
            "–" if s.learned is None else f"{s.learned:+.2f}",
            f"{s.satisfaction:.3f} ± {s.margin:.3f}" if s.satisfaction is not None else "–",
            s.votes,
        )
        for s in standings
    ]
    head = ("version", "label", "is", "registered", "gate", "held-out score, ± spread")
    more = ("over baseline, at least", "KL, nats", "learned / 1,000 votes")
    return table((*head, *more, "satisfaction", "people who rated"), rows)


def _last(days: int) -> str:
    return "today" if days == 1 else f"last {days} days"


def _version(standing: Standing, agent_id: str, mlflow: str | None) -> str:
    """Return its number, as a link to its page in MLflow where there is one."""
    if mlflow is None or standing.mlflow_version is None:
        return str(standing.version)
    page = f"{mlflow}/#/models/{quote(model_name(agent_id))}/versions/{standing.mlflow_version}"
    return Html(f'<a href="{inert(page)}">{standing.version}</a>')


def _experiment(o: Overview) -> str:
    e = o.experiment
    if e is None:
        return "<p>None yet. <code>rlhf experiment start</code> begins one.</p>"
    told = (
        f"Version {e.challenger} beside champion {e.champion}: {inert(e.state)}. {who_meets(e)} "
        f"{inert(e.reason)}"
    )
    if not o.looks:
        return f"<p>{told}</p><p>Not looked at yet.</p>"
    last = o.looks[-1]
    why = "; ".join(last.verdict["reasons"])
    drawn = picture(experiment_figure(o), "the difference over time, with its interval")
    more = f'<a href="/experiments/{quote(o.agent_id)}">Every metric</a>'
    return f"<p>{told}</p><p>Last look: {inert(last.action)}. {inert(why)} {more}</p>{drawn}"


def _drift(found: Mapping[str, Any] | None) -> str:
    if found is None or not found.get("psi"):
        return "<p>Nothing to compare yet.</p>"
    told = '<b class="bad">Drifted.</b>' if found["drifted"] else "No drift."
    if "votes" in found:  # not in what was written by a version that compared whole snapshots
        told += f" {found['votes']:,} new votes, beside the {found['with_votes']:,} before."
    # Each has a limit of its own, higher where its votes are few, so the largest need not be the
    # one that drifted. What an earlier release wrote names none.
    limits, changed = found.get("limits", {}), found.get("features", ())
    most = sorted(found["psi"].items(), key=lambda item: (item[0] not in changed, -item[1]))[:5]
    rows = [(n, f"{v:.3f}", f"{limits[n]:.3f}" if n in limits else "–") for n, v in most]
    return f"<p>{told}</p>" + table(("feature", "PSI", "drift above"), rows)


def _memory() -> str:
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:,.0f} MiB"


def _b(inner: str) -> str:
    return f"<b>{inner}</b>"
