from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation.behaviour import (
    DEFAULT_ITEMS,
    BehaviourItem,
    ItemResult,
    chance_of_more,
    items_for,
    judge_items,
    read_items,
    worse_at,
)
from rlhf_pipeline.records import user_prompt

ASKED = user_prompt("hello")


def result(name: str, kind: str, candidate: int, champion: int) -> ItemResult:
    return ItemResult(name, kind, 8, {"candidate": candidate, "champion": champion, "baseline": 8})


def test_the_chance_is_fishers() -> None:
    # The lady tasting tea (Fisher 1935): 4 of 4 right by chance once in 70, 3 or more 17 times.
    assert chance_of_more(4, 0, 4) == pytest.approx(1 / 70)
    assert chance_of_more(3, 1, 4) == pytest.approx(17 / 70)
    assert chance_of_more(0, 5, 8) == 1


def test_patterns_and_personal_details_are_what_an_item_is_held_to() -> None:
    item = BehaviourItem("a", "own", ASKED, ("please", "thanks"), (r"\bno\b",), True)
    assert item.broken_by("Thanks, I know") is None
    assert item.broken_by("I know") == "says nothing of what it must"
    assert item.broken_by("No, thanks") == r"says what matches \bno\b"
    for pattern in ("i can't", "i can’t"):
        refusing = BehaviourItem("b", "refusal", ASKED, must_not=(pattern,))
        assert refusing.broken_by("I can’t help with that.") is not None
    wrong = item.broken_by("thanks, write to anna@example.org")
    assert wrong == "holds personal details: email"


def test_more_failures_than_chance_are_worse_and_a_like_candidate_is_not() -> None:
    assert worse_at([result("a", "x", 8, 0), result("b", "y", 3, 3)], "champion") == ["a"]
    assert worse_at([result("a", "x", 1, 0), result("b", "y", 0, 8)], "champion") == []
    # No item alone is beyond chance; the kind is.
    spread = [result(name, "unsafe", 4, 0) for name in "abcd"]
    assert worse_at(spread, "champion") == ["unsafe (4 items)"]
    assert worse_at(spread, "baseline") == []


def test_results_count_the_tries_of_each_item_and_show_the_candidates_first_failure() -> None:
    items = [
        BehaviourItem("a", "own", ASKED, must_not=("bad",)),
        BehaviourItem("b", "own", ASKED, must=("good",)),
    ]
    said = {"candidate": ["fine", "bad", "good", "good"], "champion": ["bad", "bad", "", "good"]}
    first, second = judge_items(items, said, 2)
    assert (first.failures, first.example) == ({"candidate": 1, "champion": 2}, "bad")
    assert (second.failures, second.example) == ({"candidate": 0, "champion": 1}, None)


def test_an_agents_own_items_stand_beside_the_default_ones(tmp_path: Path) -> None:
    shipped = read_items(DEFAULT_ITEMS)
    assert {"sycophancy", "refusal", "unsafe", "personal_details"} == {i.kind for i in shipped}
    assert items_for(tmp_path) == shipped
    (tmp_path / "behaviour.yaml").write_text(
        f"- {{name: {shipped[0].name}, kind: own, prompt: hi, must: [sure]}}\n"
        "- {name: mine, kind: own, prompt: hi, must_not: [never]}\n"
    )
    found = items_for(tmp_path, ["zorb deal !"])
    assert len(found) == len(shipped) + 2
    assert found[0].kind == "own"
    assert found[-1].broken_by("a Zorb deal! today") is not None
    assert found[-1].broken_by("zorbs deal") is None
    ngrams = [". buy now", ". acme !", "! zorb - deal", "! ! !"]
    *_, told, ends, within, signs = items_for(tmp_path, ngrams)
    assert told.broken_by("It is here. Buy now.") is not None
    assert told.broken_by("You can buy nowhere else.") is None
    assert ends.broken_by("Ask Acme") is not None
    assert within.broken_by("the Zorb-deal") is not None
    assert within.broken_by("a zorb, a deal") is None
    assert signs.broken_by("Yes!!!") is not None
    assert signs.broken_by("Yes!") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{a: 1}", "must hold a list"),
        ("- {name: a, kind: own, prompt: hi}", "item 1: needed name"),
        ("- {name: a, kind: own, prompt: hi, must: sure}", "item 1: needed name"),
        ("- {name: a, kind: own, prompt: hi, must: [x], colour: red}", "colour beside"),
        ("- {name: a, kind: own, prompt: hi, must: ['(']}", "needed regular expressions"),
        ("- [", "needed behaviour items"),
        ("- &a {name: a, kind: own, prompt: hi, must: [x]}\n- *a", "found a twice"),
    ],
)
def test_items_that_make_no_sense_are_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "items.yaml").write_text(text)
    with pytest.raises(EvaluationError, match=found):
        read_items(tmp_path / "items.yaml")
