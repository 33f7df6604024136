"""`/experiments/AGENT`: a live experiment, every metric drawn over its looks, told in plain words.

Differences are signed so that above 0 the challenger is better. The bounds hold at any look: when
one is past a line it stays so, up to the chances that `experiments` in the settings allows. The
page shows nothing that anybody wrote, and to whom which version answered stands nowhere on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from rlhf_pipeline.experiment.assignment import percent
from rlhf_pipeline.experiment.book import LOOK_APART, Experiment, ExperimentBook, Look
from rlhf_pipeline.experiment.decision import PRIMARY, SIGN, Metric, as_read
from rlhf_pipeline.experiment.live import guardrails_under
from rlhf_pipeline.serving.pages.parts import (
    Html,
    answer,
    inert,
    new_nonce,
    no_such_agent,
    picture,
    table,
    when,
    whole,
)

if TYPE_CHECKING:
    from fastapi import FastAPI
    from matplotlib.figure import Figure

    from rlhf_pipeline.serving.gateway import Gateway

PATH = "/experiments"
SHOWN = 10  # looks in the table
NEWEST = 6  # experiments to lead to, until a person asks for all
DRAWN = (
    "The difference is surely within the band; dotted: how much worse it may be and still be "
    "promoted. Beyond ±0.1 the scale is logarithmic."
)
WORDS = {
    "running": "goes on",
    "promoted": "ended: the challenger was promoted",
    "rolled_back": "ended: the challenger was rolled back",
    "timed_out": "ended: time was up and the champion stayed",
    "gave_up": "ended early: it would hardly have come to more, and the champion stayed",
    "invalid": "ended without a verdict: users did not arrive as planned",
    "stopped": "was stopped",
}


def add_experiment_page(
    app: FastAPI, gateway: Gateway, agents: Callable[[], Sequence[str]]
) -> None:
    """Add the page. `agents` names everybody known."""

    def made(agent_id: str, experiment_id: str | None, older: bool) -> Response:
        nonce = new_nonce()
        book = ExperimentBook(gateway.store.database)
        if agent_id not in agents():
            return no_such_agent()
        every = book.history(agent_id)
        chosen = [e for e in every if experiment_id in (None, e.experiment_id)]
        if not chosen:
            return answer(_none(agent_id, every, nonce), nonce, 404)
        metrics = [PRIMARY, *guardrails_under(gateway.rules_of_trials(agent_id))]
        looks = book.looks(chosen[0].experiment_id)
        return answer(render(chosen[0], looks, metrics, every, nonce, older=older), nonce)

    async def page(agent_id: str, experiment: str | None = None, older: str = "") -> Response:
        """Show an agent's newest experiment, or the one that is named; lead to `older` ones too."""
        return await run_in_threadpool(made, agent_id, experiment, bool(older))

    app.add_api_route(PATH + "/{agent_id}", page, include_in_schema=False)


def render(
    experiment: Experiment,
    looks: Sequence[Look],
    metrics: Sequence[Metric],
    every: Sequence[Experiment],
    nonce: str,
    *,
    older: bool = False,
) -> str:
    """Return the page of one experiment; `every` are the agent's, newest first.

    It leads to the newest of them, or to the `older` ones too.
    """
    e = experiment
    parts = [
        _nav(e.agent_id, every, older=older),
        f"<h1>Version {e.challenger} beside champion {e.champion}</h1>",
        "".join(f"<p>{inert(line)}</p>" for line in told(e, looks, metrics)),
    ]
    if looks:
        newest = looks[-1].verdict["differences"]
        head = ("metric", "what", "found", "surely between", "users", "verdict")
        rows = [_row(metric, newest[metric.name]) for metric in metrics if metric.name in newest]
        drawn = sequences_figure(looks, metrics)
        parts += [
            "<h2>Now</h2>",
            f"<p>{SIGN}</p>",
            table(head, rows),
            "<h2>Over time</h2>",
            f"<p>{DRAWN}</p>",
            picture(drawn, "each metric's difference over the looks, with its bounds"),
            f"<h2>The last {SHOWN} looks</h2>",
            table(
                ("look", "UTC", "share", "then", "why"),
                [
                    (
                        look.look,
                        when(look.looked_at),
                        percent(look.share),
                        look.action,
                        "; ".join(look.verdict["reasons"]),
                    )
                    for look in reversed(looks[-SHOWN:])
                ],
            ),
        ]
    return _whole(e.agent_id, "".join(parts), nonce)


def told(experiment: Experiment, looks: Sequence[Look], metrics: Sequence[Metric]) -> list[str]:
    """Return where the experiment stands, in plain sentences."""
    e = experiment
    state = f"It {WORDS[e.state]}" + (f": {e.reason}" if e.reason else "") + "."
    lines = [f"{who_meets(e)} {state}"]
    if not looks:
        return [*lines, "Nobody has looked at it yet."]
    newest = looks[-1].verdict["differences"]
    by_verdict: dict[str, list[str]] = {}
    for metric in metrics:
        if metric.name in newest:
            by_verdict.setdefault(verdict_on(metric, newest[metric.name]), []).append(metric.name)
    lines += [f"{words.capitalize()}: {', '.join(names)}." for words, names in by_verdict.items()]
    return lines


def who_meets(experiment: Experiment) -> str:
    """Return when how many users meet the challenger, or met it, as a sentence."""
    began, share = when(experiment.started_at), percent(experiment.share)
    if experiment.ended_at is None:
        since = when(experiment.share_since)
        grew = "" if since == began else f", which began {began} UTC"
        return f"Since {since} UTC, {share} of the users meet it{grew}."
    return f"From {began} to {when(experiment.ended_at)} UTC, at last {share} of the users met it."


def verdict_on(metric: Metric, found: Mapping[str, Any]) -> str:
    """Return what a metric's bounds say, in plain words."""
    low, high = found["low"], found["high"]
    if high is not None and high < -metric.margin:
        return "surely worse"
    if low is not None and low > 0:
        return "surely better"
    if low is not None and metric is not PRIMARY and low > -metric.margin:
        return "not worse than allowed"
    return "not yet sure"


def sequences_figure(looks: Sequence[Look], metrics: Sequence[Metric]) -> Figure:
    """Return each metric's difference and bounds over the looks, and the ramp, as small pictures.

    The dotted line is how much worse a guardrail may be and the challenger still be promoted.
    """
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    rows = -(-(len(metrics) + 1) // 3)
    figure = Figure(figsize=(10, 2.1 * rows))
    figure.supylabel("how much better the challenger is", fontsize="small")
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.1, top=0.94, hspace=0.35)
    places = figure.subplots(rows, 3, sharex=True, squeeze=False).flatten()
    for axes, metric in zip(places, metrics, strict=False):
        draw_bounds(axes, looks, metric)
        if metric.margin:
            axes.axhline(-metric.margin, color="#b2182b", linewidth=1, linestyle=":")
        axes.set_title(metric.name, fontsize="small")
        axes.set_yscale("symlog", linthresh=0.1)  # margins are a tenth of the widest bound
        axes.set_ylim(-1, 1)
        axes.set_yticks([-1, -0.1, 0, 0.1, 1], ["−1", "−.1", "0", ".1", "1"], fontsize="x-small")
        axes.minorticks_off()
    ramp = places[len(metrics)]
    draw_ramp(ramp, looks)
    ramp.set_title("share of users, %", fontsize="small")
    ramp.set_ylim(0, 100)
    for spare in places[len(metrics) + 1 :]:
        spare.set_axis_off()
    ticks = AutoDateLocator(maxticks=4)
    ramp.xaxis.set_major_locator(ticks)
    ramp.xaxis.set_major_formatter(ConciseDateFormatter(ticks))
    return figure


def draw_bounds(axes: Any, looks: Sequence[Look], metric: Metric) -> None:
    """Draw a metric's difference and its bounds, each look's until the next one."""
    known = [look for look in looks if metric.name in look.verdict["differences"]]
    found = [look.verdict["differences"][metric.name] for look in [*known, *known[-1:]]]
    # A bound not yet known is the widest there is: shares differ by at most one.
    low = [-1.0 if d["low"] is None else d["low"] for d in found]
    high = [1.0 if d["high"] is None else d["high"] for d in found]
    axes.fill_between(_until(known), low, high, alpha=0.25, step="post")
    values = [math.nan if d["value"] is None else d["value"] for d in found]
    axes.step(_until(known), values, where="post")
    axes.axhline(0, color="#666666", linewidth=1)


def draw_ramp(axes: Any, looks: Sequence[Look]) -> None:
    """Draw the share of users who met the challenger, in per cent."""
    shares = [100 * look.share for look in [*looks, *looks[-1:]]]
    axes.step(_until(looks), shares, where="post")


def _until(looks: Sequence[Look]) -> list[datetime]:
    """Return when the looks were, and when the one after the last may be."""
    return [*(look.looked_at for look in looks), *(e.looked_at + LOOK_APART for e in looks[-1:])]


def _row(metric: Metric, found: Mapping[str, Any]) -> tuple[object, ...]:
    value, low, high = as_read(found)
    words = verdict_on(metric, found)
    colour = {"surely worse": "bad", "surely better": "good"}.get(words, "")
    allowed = f", may be {metric.margin:g} worse" if metric.margin else ""
    return (
        metric.name,
        metric.meaning + allowed,
        value,
        f"{low} to {high}",
        f"{found['challenger_users']} and {found['champion_users']}",
        Html(f'<span class="{colour}">{words}</span>'),
    )


def _nav(agent_id: str, every: Sequence[Experiment], *, older: bool = False) -> str:
    path, shown = f"{PATH}/{quote(agent_id)}", every if older else every[:NEWEST]
    links = " ".join(
        f'<a href="{path}?experiment={quote(other.experiment_id)}">{when(other.started_at)}</a>'
        for other in shown
    )
    if more := len(every) - len(shown):
        links += f' <a href="{path}?older=1">and {more} older</a>'
    return f'<nav><a href="/dashboard/{quote(agent_id)}">{inert(agent_id)}</a> {links}</nav>'


def _none(agent_id: str, every: Sequence[Experiment], nonce: str) -> str:
    """Return the page where there is nothing to show: the agent's others, or how one begins."""
    words = "<h1>No such experiment</h1><p>Those above are all there are.</p>"
    if not every:
        words = (
            "<h1>No experiment yet</h1><p>One begins by itself for a version that the gate lets "
            "through, where the recipe has <code>experiments.enabled</code>, or by hand: "
            f"<code>rlhf experiment start --agent {inert(agent_id)} --version N</code>.</p>"
        )
    return _whole(agent_id, _nav(agent_id, every) + words, nonce)


def _whole(agent_id: str, body: str, nonce: str) -> str:
    return whole(f"Experiments of {agent_id}", body, nonce)
