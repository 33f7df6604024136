"""The page of an experiment: its words follow from the bounds, and nothing on it can act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from matplotlib.figure import Figure

from rlhf_pipeline.config import Settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.experiment.book import LOOK_APART, ExperimentBook, Look, State
from rlhf_pipeline.experiment.decision import GUARDRAILS, PRIMARY, SIGN, Metric
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.serving.pages.dashboard import experiment_figure
from rlhf_pipeline.serving.pages.experiment_page import (
    WORDS,
    add_experiment_page,
    render,
    sequences_figure,
    told,
    verdict_on,
    who_meets,
)

HOSTILE = '<script>alert("x")</script>'
METRICS = (PRIMARY, *GUARDRAILS)


def difference(low: float | None, high: float | None) -> dict[str, Any]:
    return {"value": 0.01, "low": low, "high": high, "challenger_users": 7, "champion_users": 9}


@pytest.mark.parametrize(
    ("metric", "low", "high", "words"),
    [
        (PRIMARY, None, None, "not yet sure"),
        (PRIMARY, -0.2, 0.3, "not yet sure"),
        (PRIMARY, 0.01, 0.3, "surely better"),
        (PRIMARY, -0.3, -0.01, "surely worse"),
        (GUARDRAILS[0], -0.04, 0.1, "not worse than allowed"),  # 0.05 are allowed
        (GUARDRAILS[0], -0.04, -0.01, "not worse than allowed"),
        (GUARDRAILS[0], -0.06, 0.1, "not yet sure"),
        (GUARDRAILS[0], -0.2, -0.06, "surely worse"),
    ],
)
def test_the_bounds_say_it_in_words(
    metric: Metric, low: float | None, high: float | None, words: str
) -> None:
    assert verdict_on(metric, difference(low, high)) == words


def test_every_way_to_end_has_its_words() -> None:
    assert set(WORDS) == set(get_args(State))


@pytest.mark.parametrize(
    "figure_of",
    [
        lambda look: sequences_figure([look], METRICS),
        lambda look: experiment_figure(cast("Any", SimpleNamespace(looks=[look]))),
    ],
    ids=["page", "dashboard"],
)
def test_one_look_is_drawn_until_the_next_may_come(figure_of: Callable[[Look], Figure]) -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    found = {m.name: difference(-0.2, 0.3) for m in METRICS}
    look = Look(1, 0.9, "continue", {"reasons": [], "differences": found}, at)
    figure = figure_of(look)
    figure.draw_without_rendering()  # and no locator warns of a span that it cannot cut
    line = figure.axes[0].lines[0]
    assert np.asarray(line.get_xdata()).tolist() == [at, at + LOOK_APART]
    assert np.asarray(line.get_ydata()).tolist() == [0.01, 0.01]
    (band,) = figure.axes[0].collections
    assert band.get_datalim(figure.axes[0].transData).width > 0
    ramp = figure.axes[1 if len(figure.axes) == 2 else len(METRICS)]
    assert np.asarray(ramp.lines[0].get_ydata()).tolist() == [90, 90]
    assert ramp.get_ylim() == (0, 100)  # none of it is out of sight


@pytest.mark.parametrize("value", [None, -0.8], ids=["unknown", "of-an-older-release"])
def test_a_difference_from_nobody_is_neither_told_nor_drawn(
    tmp_path: Path, value: float | None
) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    book = ExperimentBook(database)
    FeedbackStore(database).ensure_agent("tea")
    begun = book.start("tea", champion=1, challenger=2, share=0.1, actor="test")
    alone = {**difference(None, None), "value": value, "challenger_users": 0}
    book.record(begun, "continue", {"reasons": [], "differences": {PRIMARY.name: alone}})
    [look] = looks = book.looks(begun.experiment_id)
    assert look.verdict["differences"][PRIMARY.name] == {**alone, "value": None}
    figure = sequences_figure(looks, [PRIMARY])
    figure.draw_without_rendering()
    assert np.isnan(np.asarray(figure.axes[0].lines[0].get_ydata(), dtype=float)).all()
    page = render(begun, looks, [PRIMARY], [begun], "nonce")
    assert "<td>?</td><td>? to ?</td><td>0 and 9</td>" in page
    database.close()


def test_every_metric_is_told_and_drawn_and_what_is_written_is_inert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.experiment.book.LOOK_APART", timedelta(0))  # keep them all
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    store, book = FeedbackStore(database), ExperimentBook(database)
    store.ensure_agent("tea")
    begun = book.start("tea", champion=1, challenger=2, share=0.1, actor="test")
    for low in (None, -0.2, 0.02):
        found = {m.name: difference(low, 0.3) for m in METRICS}
        book.record(begun, "continue", {"reasons": [HOSTILE], "differences": found})
    figure = sequences_figure(book.looks(begun.experiment_id), METRICS)
    titled = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titled == [*(m.name for m in METRICS), "share of users, %"]
    assert figure.get_supylabel() == "how much better the challenger is"
    line = figure.axes[1].lines[0]
    assert np.asarray(line.get_ydata()).tolist() == [0.01] * 4  # the last look's holds on
    app = FastAPI()
    gateway = SimpleNamespace(store=store, rules_of_trials=lambda _: Settings().experiments)
    add_experiment_page(app, cast("Any", gateway), store.agents)
    client = TestClient(app)
    page = client.get("/experiments/tea")
    assert page.status_code == 200
    assert "<script" not in page.text
    assert page.text.count("&lt;script&gt;") == 3
    since = f"{begun.started_at:%Y-%m-%d %H:%M}"
    assert f"<p>Since {since} UTC, 10% of the users meet it. It goes on.</p>" in page.text
    wider = replace(begun, share=0.5, share_since=begun.started_at + timedelta(days=2))
    grown = begun.started_at + timedelta(days=2)
    assert who_meets(wider) == (
        f"Since {grown:%Y-%m-%d %H:%M} UTC, 50% of the users meet it, which began {since} UTC."
    )
    assert "Surely better: satisfaction, thumbs_down," in page.text
    assert "<td>7 and 9</td>" in page.text
    assert f"<h2>Now</h2><p>{SIGN}</p>" in page.text
    assert page.text.count("data:image/png;base64,") == 1
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    book.end(begun, "rolled_back", HOSTILE)
    ended, looks = book.history("tea")[0], book.looks(begun.experiment_id)
    state = f"It ended: the challenger was rolled back: {HOSTILE}."
    assert ended.ended_at is not None
    times = f"{ended.started_at:%Y-%m-%d %H:%M} to {ended.ended_at:%Y-%m-%d %H:%M} UTC"
    met = f"From {times}, at last 10% of the users met it."
    assert told(ended, looks, METRICS)[0] == f"{met} {state}"
    other = client.get("/experiments/tea?experiment=other")
    assert other.status_code == 404
    assert f'"/experiments/tea?experiment={begun.experiment_id}"' in other.text
    for _ in range(7):
        book.end(
            book.start("tea", champion=1, challenger=2, share=0.1, actor="test"), "stopped", ""
        )
    newest = client.get("/experiments/tea").text
    assert newest.count('"/experiments/tea?experiment=') == 6
    assert '<a href="/experiments/tea?older=1">and 2 older</a>' in newest
    older = client.get("/experiments/tea?older=1").text
    assert older.count('"/experiments/tea?experiment=') == 8
    assert "older</a>" not in older
    nobody = client.get("/experiments/nobody")
    assert (nobody.status_code, "<h1>No such agent</h1>" in nobody.text) == (404, True)
    store.ensure_agent("milk")
    none = client.get("/experiments/milk")
    assert none.status_code == 404
    assert "rlhf experiment start --agent milk --version N" in none.text
    assert '<a href="/dashboard/milk">' in none.text
    database.close()
