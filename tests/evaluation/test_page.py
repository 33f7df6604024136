from __future__ import annotations

import base64
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlhf_pipeline.evaluation.behaviour import ItemResult
from rlhf_pipeline.evaluation.gate import decide
from rlhf_pipeline.evaluation.metrics import Number, bleu
from rlhf_pipeline.evaluation.page import body, page
from rlhf_pipeline.evaluation.phrases import Phrase
from rlhf_pipeline.evaluation.report import EvaluationReport, GroupResult, Sample
from tests.evaluation.test_gate import report

EVIL = "<script>alert(1)</script><img src=http://example.org/x onerror=alert(2)>"


class Found(HTMLParser):
    """Collects tags and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href") or k.startswith("on")]


def full() -> EvaluationReport:
    failures = {"candidate": 8, "baseline": 8, "champion": 0}
    return replace(
        report(),
        samples=[Sample("p", [["user", EVIL]], {"candidate": EVIL}, {"candidate": 1.0})],
        topics={EVIL: GroupResult(Number(0.7, 0.5, 0.9, 20), Number(0.2, 0.1, 0.3, 20))},
        cohorts={EVIL: GroupResult(Number(0.6, 0.4, 0.8, 20), Number(0.1, 0.0, 0.2, 20))},
        judge={EVIL: Number(0.55, 0.45, 0.65, 90)},
        behaviour=[ItemResult("polite", "own", 8, failures, EVIL, "says what it must not")],
        phrases={"champion": [Phrase(EVIL, 0.62, 0.05)]},
    )


def test_the_page_needs_nothing_else_and_lets_nothing_act(tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    picture.write_bytes(b"\x89PNG")
    found = full()
    text = page(EVIL, body(found, decide(found), [picture]))
    parser = Found()
    parser.feed(text)
    assert "script" not in parser.tags
    assert parser.addresses == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()]
    assert "default-src &#x27;none&#x27;" in text
    # title twice, phrase, groups, behaviour, sample
    assert text.count("&lt;script&gt;") == 9


def test_the_page_shows_absolute_numbers_changes_and_intervals() -> None:
    text = page("t", body(full(), decide(full()), []))
    cells = ["0.500", "1.000", "+0.500", "–", "+0.200 to +0.600"]  # a score is no share of another
    assert "</td>" + "</td>".join(f"<td class=n>{cell}" for cell in cells) in text
    assert "+0.0 %" in text  # other numbers are
    assert "<th class=n>change %</th>" in text  # above its numbers
    assert text.count('<div class="scroll"><table>') == text.count("<table>")
    assert "8 of 8" in text
    assert "The gate refuses it" in text
    # Of a rule its words stand below its name, so that number and verdict fit beside them.
    rules = text.partition("<th>rule</th>")[2].partition("</table>")[0]
    assert rules.startswith("<th>verdict</th><th class=n>number</th><th class=n>limit</th></tr>")
    assert "score_<wbr>vs_<wbr>champion<br><small>held-out score minus" in rules


def test_the_page_fits_a_phone_and_the_dark() -> None:
    text = page("t", body(full(), None, [Path(__file__).parents[2] / "docs/images/chat.png"]))
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "color-scheme:light dark" in text
    # A picture is white paper: in the dark it is turned, its colours kept.
    assert "img{filter:invert(.93) hue-rotate(180deg)}" in text.partition("scheme:dark")[2]
    assert '<img alt="chat" src="data:' in text


def test_what_a_candidate_does_worse_than_the_champion_refuses_it() -> None:
    found = full()
    assert found.metrics()["vs_champion/behaviour_worse"] == 1
    assert found.metrics()["vs_baseline/behaviour_worse"] == 0
    assert [r.rule for r in decide(found).results if r.verdict == "fail"] == ["behaviour"]
    assert decide(replace(found, behaviour=[])).passed
    assert "Worse than the champion at 1 of 1 items: polite" in found.to_markdown()


def test_what_is_said_more_often_stands_in_every_form() -> None:
    found = full()
    assert found.phrase_table() == [
        {"against": "champion", "words": EVIL, "other": "5%", "candidate": "62%"}
    ]
    markdown = found.to_markdown()
    assert "### What the candidate says more often, and less than the champion" in markdown
    assert "less than the baseline" not in markdown  # there is nothing to say
    assert "&lt;script>alert(1)&lt;/script>" in markdown
    assert "| 5% | 62% |" in markdown
    text = page("t", body(found, None, []))
    assert text.count("What the candidate says more often") == 1
    assert "<td class=n>5%</td><td class=n>62%</td>" in text


def test_topics_phrases_and_behaviour_survive_json() -> None:
    assert EvaluationReport.from_json(json.loads(json.dumps(full().to_json()))) == full()


def test_bleu_of_a_hand_worked_example() -> None:
    # Papineni et al. 2002, example 2: clipped unigrams 2 of 7; no pair is shared.
    the = "the the the the the the the"
    references = ["the cat is on the mat", "there is a cat on the mat"]
    assert bleu(the, references, 1) == pytest.approx(2 / 7)
    assert bleu(the, references, 2) == 0
    # 3 of 3 words, 2 of 2 pairs, three words against six: exp(1 - 6 / 3)
    assert bleu("the cat is", references[:1], 2) == pytest.approx(0.36788, abs=1e-5)
    assert bleu(references[0], references, 2) == pytest.approx(1)
