"""Krippendorff's alpha against published examples, and who agrees with whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from fractions import Fraction
from itertools import permutations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_pipeline.feedback.agreement import Agreement, agreement_of, by_rater, units_of


def test_alpha_is_the_worked_example_of_two_observers() -> None:
    """Krippendorff (2011), section A: ten binary units, alpha 0.095."""
    first = [0, 1, 0, 0, 0, 0, 0, 0, 1, 0]
    second = [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]
    units = [[bool(a), bool(b)] for a, b in zip(first, second, strict=True)]
    found = agreement_of(units)
    assert found.alpha == pytest.approx(0.095, abs=5e-4)
    assert found.alike == 0.6
    assert agreement_of([[True, True], [False, False]]).alpha == 1.0
    assert agreement_of([[True]]) == Agreement(0, None, None)  # not: nobody agrees


def test_alpha_is_the_worked_example_of_four_observers_and_gaps() -> None:
    """Krippendorff (2011), section C: twelve units of five values, some unseen, alpha 0.743."""
    rows = [
        "1 2 3 3 2 1 4 1 2 . . .",
        "1 2 3 3 2 2 4 1 2 5 . 3",
        ". 3 3 3 2 3 4 2 2 5 1 .",
        "1 2 3 3 2 4 4 1 2 5 1 .",
    ]
    units = zip(*(row.split() for row in rows), strict=True)
    found = agreement_of([[said for said in unit if said != "."] for unit in units])
    assert found.answers == 11
    assert found.alpha == pytest.approx(0.743, abs=5e-4)


UNITS = st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([True, False, "x"])))


@given(UNITS)
def test_counting_gives_what_every_two_judgements_give(units: list[dict[str, Hashable]]) -> None:
    matrix: dict[tuple[Hashable, Hashable], Fraction] = defaultdict(Fraction)
    each: dict[str, list[bool]] = {voter: [] for voter in "abcdefgh"}
    for unit in units:
        for (one, a), (_, b) in permutations(unit.items(), 2):
            matrix[a, b] += Fraction(1, len(unit) - 1)
            each[one].append(a == b)
    twos = [same for one in each.values() for same in one]
    found = agreement_of([list(unit.values()) for unit in units])
    assert found.answers == sum(len(unit) > 1 for unit in units)
    assert found.alike == (sum(twos) / len(twos) if twos else None)
    total = sum(matrix.values())
    differing = sum(weight for (a, b), weight in matrix.items() if a != b)
    rows = [sum(w for (a, _), w in matrix.items() if a == said) for said in (True, False, "x")]
    expected = total**2 - sum(row**2 for row in rows)
    alpha = float(1 - (total - 1) * differing / expected) if expected else 1.0
    assert found.alpha == (pytest.approx(alpha) if twos else None)
    for rater in by_rater(units, dict.fromkeys("abcdefgh", 2)):
        same = each[rater.voter]
        assert rater.compared == len(same)
        assert rater.alike == (sum(same) / len(same) if same else None)


def test_an_answer_that_thousands_judged_is_counted_not_paired() -> None:
    unit = {f"rater {i}": i % 4 > 0 for i in range(100_000)}  # ten billion ordered pairs
    assert agreement_of([list(unit.values())]).alike == pytest.approx(0.625, abs=1e-4)
    assert by_rater([unit], dict.fromkeys(unit, 2))[0].compared == 99_999


def test_a_pair_is_one_unit_however_it_was_shown() -> None:
    rows = [
        ("ann", "good", "bad", "left", "this"),
        ("bob", "bad", "good", "left", "other"),  # good stood on the left, and was chosen
        ("cat", "bad", "good", "left", "this"),
        ("dan", "good", "bad", "tie", "this"),
    ]
    frame = pd.DataFrame(
        rows, columns=["voter", "completion", "other_completion", "choice", "shown_first"]
    ).assign(kind="preference", prompt="p", number=float("nan"))
    thumbs = pd.DataFrame(
        {"kind": "thumbs", "prompt": "p", "completion": "good", "voter": ["ann", "bob"]}
    ).assign(number=[1.0, 0.0])
    units = units_of(pd.concat([frame, thumbs], ignore_index=True))
    assert units["pairs"] == [{"ann": "second", "bob": "second", "cat": "first", "dan": "tie"}]
    assert units["thumbs"] == [{"ann": True, "bob": False}]
    table = by_rater(units["pairs"], {"ann": 2, "bob": 9, "cat": 2, "eve": 5, "one": 1})
    assert [(r.voter, r.compared, r.alike) for r in table] == [
        ("cat", 3, 0.0),
        ("ann", 3, pytest.approx(1 / 3)),
        ("bob", 3, pytest.approx(1 / 3)),
        ("eve", 0, None),
    ]
