"""A known-bad frame for every expectation, one rule per row, and who blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pandas as pd
import pytest

from rlhf_pipeline.errors import ValidationFailed
from rlhf_pipeline.feedback import validation
from rlhf_pipeline.feedback.rules import MEANINGS, Rule
from rlhf_pipeline.feedback.validation import (
    BLOCKING,
    CHECKS,
    COLUMNS,
    ROW_CHECKS,
    ValidationReport,
    validate,
)
from rlhf_pipeline.records import Message, Role, prompt_to_json, user_prompt

WHY = prompt_to_json(user_prompt("Why is tea hot?"))
GREETED = prompt_to_json((Message("assistant", "Hello!"), *user_prompt("Why is tea hot?")))
THUMBS = {"kind": "thumbs", "number": 1.0, "prompt": WHY, "completion": "Because."}
PAIR = {
    "kind": "preference",
    "prompt": WHY,
    "completion": "Because of fire.",
    "other_completion": "No idea.",
    "choice": "left",
}
CORRECTION = {"kind": "correction", "prompt": WHY, "completion": "Fire.", "text": "Boiling water."}
CRITERIA = {**THUMBS, "kind": "criteria", "number": None, "criteria": '{"safety": 0.5}'}
RATING = {**THUMBS, "kind": "rating", "number": 4.0}
SCORE = {**THUMBS, "kind": "score", "number": 0.5}
COMMENT = {"kind": "comment", "prompt": WHY, "completion": "Fire.", "text": "hm"}


def frame_of(*rows: dict[str, Any]) -> pd.DataFrame:
    """Return a snapshot frame; what a row does not say is missing, and nobody signed."""
    base = dict.fromkeys(COLUMNS) | {"agent_id": "tea", "origin": "f.jsonl", "shown_first": "this"}
    full = [{**base, "feedback_id": f"id-{i}", **row} for i, row in enumerate(rows)]
    frame = pd.DataFrame(full, columns=list(COLUMNS))
    frame["number"] = frame["number"].astype(float)
    return frame.astype({name: "str" for name in COLUMNS if name != "number"})


def rules_of(report: ValidationReport) -> dict[str, str]:
    return {row.feedback_id: row.rule for row in report.quarantined}


def blocked(report: ValidationReport) -> set[str]:
    return {check.name for check in report.checks if check.told}


def test_sound_rows_of_every_kind_are_clean() -> None:
    rows: list[dict[str, Any]] = [THUMBS, RATING, SCORE, CORRECTION, CRITERIA, PAIR, COMMENT]
    rows += [
        {**THUMBS, "interaction_id": "i-1"},
        {**THUMBS, "interaction_id": "i-1"},  # two people about one answer
        {**PAIR, "choice": "tie", "completion": "Tea."},
        {**PAIR, "other_prompt": WHY, "completion": "Hot."},
        # A line's blanks at its begin, and joiners within, are seen.
        {**CORRECTION, "completion": "if a:\n  b()\nc()", "text": "if a:\n  b()\n  c()"},
        {**CORRECTION, "completion": "میخواهم", "text": "می\u200cخواهم"},
        {**CORRECTION, "completion": "👩👧", "text": "👩\u200d👧"},
        {**THUMBS, "completion": "42"},
        {**THUMBS, "completion": "はい、お茶は熱いです。" * 12},
        {**THUMBS, "completion": "| a | b |\n|---|---|\n| 1 | 2 |\n" * 6},
        {**CRITERIA, "criteria": json.dumps({"a": 0, "b": 1, "c": 1e-7, "d é": 1.0})},
        {**THUMBS, "prompt": prompt_to_json((Message("system", 'Say "no"'), *user_prompt("\n?")))},
    ]
    report = validate(frame_of(*rows))
    assert report.quarantined == []
    assert len(report.clean) == len(rows)
    assert [check.name for check in report.checks] == list(CHECKS)
    assert all(check.passed for check in report.checks)
    assert blocked(report) == set()


BAD: list[tuple[Rule, dict[str, Any]]] = [
    (Rule.unknown_kind, {**THUMBS, "kind": "stars"}),
    (Rule.no_target, {**THUMBS, "prompt": None}),
    (Rule.no_target, {**THUMBS, "completion": None}),
    (Rule.malformed_prompt, {**THUMBS, "prompt": "Why?"}),
    (Rule.malformed_prompt, {**THUMBS, "prompt": '[["assistant", "a"]]'}),
    (
        Rule.malformed_prompt,
        {**THUMBS, "prompt": '[["user", "a"], ["assistant", "[\\"user\\", "]]'},
    ),
    (Rule.malformed_prompt, {**THUMBS, "prompt": "[]"}),
    (Rule.value_missing, {**THUMBS, "number": None}),
    (Rule.value_missing, {**RATING, "number": None}),
    (Rule.value_missing, {**CORRECTION, "text": None}),
    (Rule.value_missing, {**CRITERIA, "criteria": None}),
    (Rule.value_missing, {**PAIR, "choice": None}),
    (Rule.value_missing, {**PAIR, "other_completion": None}),
    (Rule.value_out_of_range, {**THUMBS, "number": 0.5}),
    (Rule.value_out_of_range, {**RATING, "number": 0.0}),
    (Rule.value_out_of_range, {**RATING, "number": 2.5}),
    (Rule.value_out_of_range, {**SCORE, "number": 1.5}),
    (Rule.value_out_of_range, {**SCORE, "number": float("inf")}),
    (Rule.value_out_of_range, {**PAIR, "choice": "up"}),
    (Rule.value_out_of_range, {**PAIR, "shown_first": "left"}),
    (Rule.value_out_of_range, {**CRITERIA, "criteria": '{"safety": 1.5}'}),
    (Rule.value_out_of_range, {**CRITERIA, "criteria": '{"safety": -0.5}'}),
    (Rule.value_out_of_range, {**CRITERIA, "criteria": '{"a": 0.5, "safety": "high"}'}),
    (Rule.value_out_of_range, {**CRITERIA, "criteria": "{}"}),
    (Rule.contexts_differ, {**PAIR, "other_prompt": prompt_to_json(user_prompt("Other?"))}),
    (Rule.empty_prompt, {**THUMBS, "prompt": prompt_to_json(user_prompt(" \n\t"))}),
    (Rule.empty_prompt, {**THUMBS, "prompt": prompt_to_json(user_prompt("\u3000\xa0\u2028"))}),
    (Rule.empty_prompt, {**THUMBS, "prompt": prompt_to_json(user_prompt("\f\v\x1c\x85"))}),
    (Rule.empty_completion, {**THUMBS, "completion": " \n"}),
    (Rule.empty_completion, {**PAIR, "completion": ""}),
    (Rule.empty_completion, {**PAIR, "other_completion": "\u3000"}),
    (Rule.empty_completion, {**THUMBS, "completion": "\u200b \u200d"}),
    (Rule.empty_text, {**CORRECTION, "text": " "}),
    (Rule.empty_text, {**CORRECTION, "text": "\u200b"}),
    (Rule.identical_pair, {**PAIR, "other_completion": " Because of fire.\n"}),
    (Rule.identical_pair, {**PAIR, "other_completion": "Because  of\u00a0fire."}),
    (Rule.identical_pair, {**CORRECTION, "text": "Fire."}),
    (Rule.identical_pair, {**CORRECTION, "text": "\u202aFi\u00adre.\u2060 \u200d"}),
    (Rule.prompt_too_long, {**THUMBS, "prompt": prompt_to_json(user_prompt("why " * 300))}),
    (Rule.prompt_unfit, {**THUMBS, "prompt": GREETED}),
    (Rule.completion_too_long, {**THUMBS, "completion": "tea " * 300}),
    (Rule.completion_too_long, {**PAIR, "other_completion": "tea " * 300}),
    (Rule.completion_too_long, {**CORRECTION, "text": "tea " * 300}),
    (Rule.garbled_text, {**THUMBS, "completion": "caf\ufffd and th\ufffd"}),
    (Rule.garbled_text, {**THUMBS, "completion": "a\x07b\x08c"}),
    (Rule.garbled_text, {**THUMBS, "completion": "a" * 40}),
    (Rule.garbled_text, {**PAIR, "other_completion": "茶" * 16}),
    (Rule.garbled_text, {**CORRECTION, "text": "#$%&/()=?" * 20}),
    (Rule.garbled_text, {**THUMBS, "prompt": prompt_to_json(user_prompt("\ufffd" * 20 + "?"))}),
]


@pytest.fixture(scope="module")
def judged() -> ValidationReport:
    """Return one report on every known-bad row, in order, between sound ones."""
    frame = frame_of(*(row for _, row in BAD), THUMBS, RATING, PAIR)
    return validate(
        frame,
        max_prompt_characters=1_000,
        max_completion_characters=1_000,
        takes_roles=lambda roles: roles[0] != "assistant",
    )


@pytest.mark.parametrize("number", range(len(BAD)), ids=lambda i: f"{i}-{BAD[i][0].value}")
def test_a_known_bad_row_is_set_aside_under_its_rule(number: int, judged: ValidationReport) -> None:
    rule, _ = BAD[number]
    assert rules_of(judged).get(f"id-{number}") == rule


def test_templates_are_asked_where_user_and_assistant_do_not_take_turns() -> None:
    says: dict[str, Role] = {"s": "system", "u": "user", "a": "assistant"}
    orders = ["u", "su", "uau", "suauau", "au", "uu", "sau", "usu", "au"]
    prompts = [
        prompt_to_json(tuple(Message(says[x], 'Say "hi", [x]') for x in order)) for order in orders
    ]
    rows = [{**THUMBS, "prompt": p, "completion": f"{i}."} for i, p in enumerate(prompts)]
    asked: list[str] = []

    def takes_roles(roles: tuple[Role, ...]) -> bool:
        asked.append("".join(role[0] for role in roles))
        return asked[-1] == "uu"

    report = validate(frame_of(*rows), takes_roles=takes_roles)
    assert asked == orders[4:]
    refused = [i for i, order in enumerate(orders) if order in ("au", "sau", "usu")]
    assert rules_of(report) == {f"id-{i}": "prompt_unfit" for i in refused}
    assert validate(frame_of(*rows)).quarantined == []  # nobody knows what will read them


def test_each_bad_row_is_counted_once_and_the_sound_ones_stay(judged: ValidationReport) -> None:
    assert len(judged.quarantined) == len(BAD)
    assert list(judged.clean["feedback_id"]) == [f"id-{len(BAD) + i}" for i in range(3)]
    kept = sum(c.numbers["quarantined"] for c in judged.checks if c.name in ROW_CHECKS)
    assert kept == len(BAD)
    by_name = {check.name: check for check in judged.checks}
    for name, rule in ROW_CHECKS.items():
        expected = sum(each is rule for each, _ in BAD)
        assert by_name[name].numbers["quarantined"] == expected, name
        assert by_name[name].passed == (expected == 0), name
    assert not by_name["most_rows_are_clean"].passed
    assert not by_name["enough_rows_are_clean"].passed


def test_the_reason_says_what_was_found(judged: ValidationReport) -> None:
    details = {row.feedback_id: row.detail for row in judged.quarantined}
    by_rule = {rule: details[f"id-{i}"] for i, (rule, _) in enumerate(BAD)}
    assert by_rule[Rule.unknown_kind] == f"{MEANINGS[Rule.unknown_kind]}: kind 'stars'"
    assert by_rule[Rule.prompt_unfit].endswith(": refused_roles 'assistant, user'")
    assert "text_characters 1199.0" in by_rule[Rule.completion_too_long]
    rows = judged.quarantine_rows()
    assert {(row.agent_id, row.origin) for row in rows} == {("tea", "f.jsonl")}
    assert [row.feedback_id for row in rows] == [row.feedback_id for row in judged.quarantined]


def test_duplicates_are_the_later_inline_rows_of_one_origin() -> None:
    signed = {**THUMBS, "rater_id": "ann"}
    frame = frame_of(
        THUMBS,  # 0
        THUMBS,  # 1: again
        {**THUMBS, "origin": "g.jsonl"},
        {**THUMBS, "number": 0.0},
        {**THUMBS, "comment": "mine"},
        signed,  # 5
        {**signed, "rater_id": "bo"},
        signed,  # 7: again
        {**THUMBS, "interaction_id": "i-1"},
        {**THUMBS, "interaction_id": "i-1"},
        {**PAIR},
        {**PAIR},  # 11: again
        {**THUMBS, "source": "model"},
    )
    assert rules_of(validate(frame)) == dict.fromkeys(["id-1", "id-7", "id-11"], "duplicate")


def test_a_voter_who_prefers_both_ways_loses_both_votes() -> None:
    turned = {"completion": PAIR["other_completion"], "other_completion": PAIR["completion"]}
    frame = frame_of(
        PAIR,  # 0: unsigned, one file ...
        {**PAIR, **turned},  # 1: ... says the opposite
        {**PAIR, "rater_id": "ann"},  # 2
        {**PAIR, "rater_id": "ann", "choice": "right", "origin": "g.jsonl"},  # 3: the opposite
        {**PAIR, "rater_id": "bo"},  # one of two people who disagree
        {**PAIR, **turned, "rater_id": "cy"},
        {**PAIR, "rater_id": "di"},
        {**PAIR, **turned, "rater_id": "di", "choice": "right"},  # the same said in other words
        {**PAIR, "rater_id": "ed"},
        {**PAIR, "rater_id": "ed", "shown_first": "other", "choice": "right"},  # the same again
        {**PAIR, "rater_id": "flo"},
        {**PAIR, **turned, "rater_id": "flo", "choice": "tie"},  # no preference contradicts none
        {**PAIR, "interaction_id": "i-1", "origin": "chat"},  # unsigned people in the chat
        {**PAIR, "interaction_id": "i-1", "origin": "chat", "choice": "right"},
        {**PAIR, "origin": "h.jsonl", "prompt": prompt_to_json(user_prompt("Another?"))},
        {**PAIR, **turned, "origin": "h.jsonl"},
    )
    report = validate(frame)
    assert rules_of(report) == dict.fromkeys(["id-0", "id-1", "id-2", "id-3"], "contradiction")


def test_unsigned_people_of_the_api_may_say_the_same_and_the_opposite() -> None:
    api = {"origin": "api"}
    signed = {**THUMBS, **api, "rater_id": "ann"}
    frame = frame_of(
        *({**THUMBS, **api, "number": float(i > 0)} for i in range(9)),
        *({**PAIR, **api, "choice": "right" if i else "left"} for i in range(9)),
        *({**PAIR, "origin": "mlflow"} for _ in range(2)),
        signed,
        signed,  # 21: one person, twice
        {**PAIR, **api, "rater_id": "bo"},  # 22
        {**PAIR, **api, "rater_id": "bo", "choice": "right"},  # 23: one person, both ways
    )
    assert rules_of(validate(frame)) == {
        "id-21": "duplicate",
        **dict.fromkeys(["id-22", "id-23"], "contradiction"),
    }


def test_unsigned_rows_of_a_file_with_moments_of_their_own_are_of_as_many_people() -> None:
    receipt = {"received_at": "2026-03-02T09:00:00"}
    at = [{**receipt, "occurred_at": f"2026-03-01T10:0{i}:00"} for i in range(3)]
    none = {**receipt, "occurred_at": receipt["received_at"]}  # as the store writes it then
    frame = frame_of(
        *({**THUMBS, **moment} for moment in at),
        *({**PAIR, **moment, "choice": "right" if i else "left"} for i, moment in enumerate(at)),
        {**THUMBS, **none},  # 6
        {**THUMBS, **none},  # 7: again
        *({**THUMBS, "rater_id": "ann", **moment} for moment in at[:2]),  # 9: one person, again
    )
    assert rules_of(validate(frame)) == dict.fromkeys(["id-7", "id-9"], "duplicate")


def test_lopsided_labels_warn_and_do_not_block() -> None:
    def many(row: dict[str, Any], numbers: list[float]) -> list[dict[str, Any]]:
        return [
            {**row, "number": number, "completion": f"Answer {i}."}
            for i, number in enumerate(numbers)
        ]

    frame = frame_of(*many(THUMBS, [1.0] * 30), *many(RATING, [5.0] * 39 + [4.0]))
    report = validate(frame)
    failed = {check.name: check for check in report.checks if not check.passed}
    assert set(failed) == {"thumbs_are_balanced", "ratings_are_spread"}
    assert failed["thumbs_are_balanced"].numbers == {"up_share": 1.0, "thumbs": 30}
    assert failed["ratings_are_spread"].numbers["spread"] == pytest.approx(0.0726, abs=1e-3)
    assert blocked(report) == set()
    mixed = frame_of(*many(THUMBS, [1.0, 0.0] * 15), *many(RATING, [1.0, 2.0, 3.0, 4.0, 5.0] * 8))
    checks = {check.name: check for check in validate(mixed).checks}
    assert checks["thumbs_are_balanced"].passed
    assert checks["ratings_are_spread"].numbers["spread"] == pytest.approx(1.0)


def test_a_criterion_of_nothing_is_one_whatever_its_sign() -> None:
    frame = frame_of({**CRITERIA, "criteria": '{"safety": -0.0}'})
    assert rules_of(validate(frame)) == {}


def test_too_few_clean_rows_block() -> None:
    report = validate(frame_of(*[{**THUMBS, "completion": f"Answer {i}."} for i in range(9)]))
    [check] = [check for check in report.checks if check.told]
    assert (check.name, dict(check.numbers)) == (
        "enough_rows_are_clean",
        {"clean_rows": 9.0, "min_rows": 10},
    )


def test_an_empty_frame_blocks() -> None:
    report = validate(frame_of())
    assert len(report.clean) == 0
    assert blocked(report) == {"enough_rows_are_clean"}


def test_missing_columns_block_and_nothing_else_is_looked_at() -> None:
    report = validate(frame_of(THUMBS).drop(columns=["choice", "origin"]))
    assert [check.name for check in report.checks] == list(CHECKS)
    assert blocked(report) == BLOCKING
    assert report.checks[0].numbers == {"missing:choice": 1.0, "missing:origin": 1.0}
    assert len(report.clean) == 0


def test_positions_count_whatever_the_index_is() -> None:
    frame = frame_of(THUMBS, {**THUMBS, "completion": ""}, RATING)
    frame.index = pd.Index([7, 7, 7])
    report = validate(frame)
    assert rules_of(report) == {"id-1": "empty_completion"}
    assert list(report.clean.index) == [0, 1]


def test_an_expectation_that_cannot_be_computed_is_an_error() -> None:
    gxe = validation._great_expectations().expectations
    unknown = {"x": [gxe.ExpectColumnValuesToBeInSet(column="nothing", value_set=[1])]}
    with pytest.raises(ValidationFailed, match="not a snapshot's"):
        validation._judge(frame_of(THUMBS), unknown)


def test_the_names_of_the_checks_cost_no_import() -> None:
    program = (
        "import sys; from rlhf_pipeline.feedback.validation import CHECKS; "
        "print(len(CHECKS), 'great_expectations' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(len(CHECKS)), "False"]
