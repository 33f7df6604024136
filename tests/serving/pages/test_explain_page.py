"""The page of an interaction's reasons: nothing that people or models wrote can act on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rlhf_pipeline.config import Settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.nearest import Near
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.policy.shift import TokenShift
from rlhf_pipeline.records import Interaction, now, user_prompt
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.registry.reasons import Judgement, Part, Reasons
from rlhf_pipeline.registry.reasons_told import to_text, verdict
from rlhf_pipeline.serving.pages import explain_page

HOSTILE = '<script>alert("x")</script>'
FOUND = Reasons(
    interaction_id="i1",
    agent_id="tea",
    created_at=now().isoformat(),
    answered_by=2,
    version=2,
    label="v40",
    baseline=0,
    prompt=(("user", HOSTILE),),
    completion=f"{HOSTILE} sorry",
    baseline_completion=HOSTILE,
    temperature=1.0,
    tokens=(
        TokenShift(HOSTILE, -1.0, -4.0, False),
        TokenShift(" sorry", -2.0, -1.0, False),
        TokenShift("", -0.5, -0.52, True),
    ),
    baseline_shift=-0.25,
    judgements=(Judgement("proxy", 1.5, 0.5, {"head 1": 2.0}, {"head 1": 0.25}),),
    parts=(Part("length", 0.5, 0.8, 0.4, 0.4, 0.2, False),),
    composite=(1.9, 0.7),
    left_out=("bleu",),
    near=(Near("f1", 1.0, 0.5, "gate", HOSTILE, "preferred over", HOSTILE, HOSTILE),),
    trained_on=12,
    erased_rows=3,
)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    store = FeedbackStore(database)
    store.ensure_agent("tea")
    said = Interaction("i1", "tea", user_prompt(HOSTILE), HOSTILE, 2, now())
    store.add_interactions([said, replace(said, interaction_id="i2", model_version=0)])
    champions = SimpleNamespace(
        registry=SimpleNamespace(ledger=PromotionLedger(database, tmp_path)),
        settings_of=lambda agent_id: Settings(),
    )
    app = FastAPI()
    gateway = SimpleNamespace(store=store, champions=champions)
    explain_page.add_explain_page(app, cast("Any", gateway), store.agents)
    yield TestClient(app)
    database.close()


def test_what_was_written_is_shown_inert(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_page, "reasons", lambda *_, **__: FOUND)
    page = client.get("/explain/interaction/i1")
    assert page.status_code == 200
    assert "<script" not in page.text
    assert page.text.count("&lt;script&gt;") >= 7
    assert not re.search(r"\son\w+=|style=", page.text)  # the policy would not let it in
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'nonce-")
    assert f'<style nonce="{policy.split("nonce-")[1].split(chr(39))[0]}">' in page.text
    assert page.headers["cache-control"] == "no-store"


def test_tokens_are_coloured_by_shift_and_told_in_numbers_too(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_page, "reasons", lambda *_, **__: FOUND)
    page = client.get("/explain/interaction/i1").text
    assert '<span class="u3">&lt;script&gt;' in page
    assert '<span class="d2"> sorry</span>' in page
    assert '<span class="">⏎</span>' in page
    assert "<td>-2.00</td><td>-1.00</td><td>-1.00</td>" in page  # the text alternative
    assert "finds that 0.25 nats less likely than the baseline does" in page
    for told in ("head 1", "<b>composite</b>", "length, added", "bleu: left out", "3 rows were"):
        assert told in page


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (True, False, "this below its floor"),
        (False, True, "the baseline's below its floor"),
        (True, True, "this and the baseline's below its floor"),
        (False, False, ""),
    ],
)
def test_a_score_that_a_floor_made_is_explained(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, ours: bool, theirs: bool, told: str
) -> None:
    part = Part("length", 0.5, 0.8, 0.4, 0.4, 0.2, ours, theirs)
    found = replace(FOUND, parts=(part,), composite=(-5.0, 0.7))
    monkeypatch.setattr(explain_page, "reasons", lambda *_, **__: found)
    page = client.get("/explain/interaction/i1").text.replace("&#x27;", "'")
    for words in (to_text(found), page):
        assert told in words
        assert ("below a floor a completion gets -5 at most" in words.lower()) == bool(told)


def test_steps_of_colour() -> None:
    shifts = (0.05, 0.1, -0.1, 0.5, -1.9, 2.0, -7.0)
    assert [explain_page.step_of(s) for s in shifts] == ["", "u1", "d1", "u2", "d2", "u3", "d3"]


def test_the_newest_answers_are_listed_and_errors_are_pages(client: TestClient) -> None:
    listed = client.get("/explain")  # leads to the first agent
    assert '<a href="/explain/interaction/i1">&lt;' in listed.text  # named by what was asked
    assert "<script" not in listed.text
    assert client.get("/explain/nobody").status_code == 404
    gone = client.get("/explain/interaction/%3Cb%3E")
    assert gone.status_code == 404
    assert '<a href="/explain">Answers</a>' in gone.text
    assert "found none with the id &#x27;&lt;b&gt;&#x27;" in gone.text
    unknown = client.get("/explain/interaction/i2")  # of a version that nobody registered
    assert unknown.status_code == 409
    assert "version 0 of agent tea" in unknown.text


def test_the_strongest_facts_are_told_in_sentences() -> None:
    first, proxy, function, near = verdict(FOUND)
    assert "7.5 times likelier" in first  # e to the 2.02
    assert "+2.02 nats over 3 tokens" in first
    assert "gives it 1.00 more than what the baseline answers" in proxy
    assert "The proxy reward (learned from the votes that training went by)" in proxy
    assert function == "Of the reward's functions length speaks most for it: +0.20."
    assert near == "1 of the 1 nearest votes were about the same question."
    ended = replace(FOUND, tokens=FOUND.tokens[1:], near=())
    said = verdict(ended)
    assert "2.7 times less likely" in said[0]
    assert "most at “sorry”" in said[0]
    assert said[-1] == "No vote it learned from shares a word with the question."
    assert "as likely as" in verdict(replace(FOUND, tokens=FOUND.tokens[2:]))[0]
    assert "bleu: left out" in to_text(FOUND)
