"""Every rule an event can break, and everything that is let through on purpose."""

from __future__ import annotations

import dataclasses
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_pipeline.errors import FeedbackRefused
from rlhf_pipeline.feedback.rules import MEANINGS, Rule, check_event
from rlhf_pipeline.records import Feedback, FeedbackKind, Message, user_prompt

HALF_A_PAIR = "\ud83d"


def event(kind: FeedbackKind = FeedbackKind.thumbs, **fields: Any) -> Feedback:
    """Return a sound event of the kind, with some fields changed."""
    value: dict[FeedbackKind, dict[str, Any]] = {
        FeedbackKind.thumbs: {"number": 1.0},
        FeedbackKind.rating: {"number": 4.0},
        FeedbackKind.score: {"number": 0.5},
        FeedbackKind.correction: {"text": "Better."},
        FeedbackKind.comment: {"text": "Nice."},
        FeedbackKind.preference: {"choice": "left", "other_completion": "No."},
        FeedbackKind.criteria: {"criteria": {"safety": 0.5}},
    }
    sound = {
        "agent_id": "tea",
        "kind": kind,
        "idempotency_key": "k",
        "prompt": user_prompt("Why?"),
        "completion": "Because.",
        **value[kind],
    }
    return Feedback(**{**sound, **fields})


def test_every_rule_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Rule)


@pytest.mark.parametrize("kind", FeedbackKind)
def test_a_sound_event_of_each_kind_passes(kind: FeedbackKind) -> None:
    check_event(event(kind))
    check_event(event(kind, prompt=None, completion=None, interaction_id="i-1"))


def test_what_is_whole_but_useless_for_training_passes() -> None:
    check_event(event(completion=""))
    pair = event(FeedbackKind.preference, completion="Same.", other_completion="Same.")
    check_event(pair)
    elsewhere = (*user_prompt("Other?"), Message("assistant", "Hm."))
    check_event(dataclasses.replace(pair, other_prompt=elsewhere))


BROKEN: list[tuple[Rule, Feedback]] = [
    (Rule.bad_agent, event(agent_id="../up")),
    (Rule.bad_agent, event(agent_id="")),
    (Rule.bad_key, event(idempotency_key="")),
    (Rule.unknown_source, event(source="bot")),
    (Rule.no_target, event(prompt=None, completion=None)),
    (Rule.no_target, event(completion=None)),
    (Rule.two_targets, event(interaction_id="i-1")),
    (
        Rule.two_targets,
        event(FeedbackKind.preference, other_interaction_id="i-2"),
    ),
    (Rule.prompt_end, event(prompt=())),
    (Rule.prompt_end, event(prompt=(*user_prompt("a"), Message("assistant", "b")))),
    (Rule.wrong_type, event(prompt="Why?")),
    (Rule.wrong_type, event(prompt=(Message("tool", "x"),))),  # type: ignore[arg-type] # on purpose
    (Rule.value_missing, event(number=None)),
    (Rule.wrong_type, event(number=True)),
    (Rule.wrong_type, event(number="1")),
    (Rule.not_finite, event(number=math.nan)),
    (Rule.not_finite, event(FeedbackKind.score, number=math.inf)),
    (Rule.value_out_of_range, event(number=0.5)),
    (Rule.value_out_of_range, event(FeedbackKind.rating, number=0)),
    (Rule.value_out_of_range, event(FeedbackKind.rating, number=3.5)),
    (Rule.value_out_of_range, event(FeedbackKind.score, number=1.01)),
    (Rule.value_missing, event(FeedbackKind.correction, text=" \n")),
    (Rule.value_missing, event(FeedbackKind.comment, text=None)),
    (Rule.value_missing, event(FeedbackKind.preference, choice=None)),
    (Rule.value_out_of_range, event(FeedbackKind.preference, choice="both")),
    (Rule.value_missing, event(FeedbackKind.preference, other_completion=None)),
    (Rule.value_out_of_range, event(FeedbackKind.preference, shown_first="left")),
    (Rule.value_out_of_range, event(shown_first={"no": "database keeps that"})),
    (Rule.value_missing, event(FeedbackKind.criteria, criteria={})),
    (Rule.wrong_type, event(FeedbackKind.criteria, criteria={"": 0.5})),
    (Rule.wrong_type, event(FeedbackKind.criteria, criteria={"safety": True})),
    (Rule.value_out_of_range, event(FeedbackKind.criteria, criteria={"safety": math.nan})),
    (Rule.value_out_of_range, event(FeedbackKind.criteria, criteria={"safety": -0.1})),
    (Rule.bad_text, event(completion=HALF_A_PAIR)),
    (Rule.bad_text, event(prompt=user_prompt("a\x00b"))),
    (Rule.bad_text, event(tags=(HALF_A_PAIR,))),
    (Rule.wrong_type, event(comment=7)),
    (Rule.too_long, event(completion="x" * 100_001)),
    (Rule.too_long, event(prompt=tuple(Message("user", "x" * 99_999) for _ in range(3)))),
    (Rule.too_long, event(tags=("t",) * 33)),
    (Rule.too_long, event(rater_id="r" * 65)),
    (Rule.bad_time, event(occurred_at=datetime(2026, 1, 1))),  # noqa: DTZ001 - that is the point
]


@pytest.mark.parametrize(("rule", "broken"), BROKEN)
def test_a_broken_event_is_refused_under_its_rule(rule: Rule, broken: Feedback) -> None:
    with pytest.raises(FeedbackRefused, match=r"needed .*, found ") as caught:
        check_event(broken)
    assert caught.value.rule == rule
    str(caught.value).encode()  # the reason itself can be stored


def test_a_kind_that_is_not_one_is_refused() -> None:
    with pytest.raises(FeedbackRefused) as caught:
        check_event(dataclasses.replace(event(), kind="stars"))  # type: ignore[arg-type] # on purpose
    assert caught.value.rule == Rule.unknown_kind


def test_a_moment_with_its_zone_passes() -> None:
    check_event(event(occurred_at=datetime(2026, 1, 1, tzinfo=UTC)))


@given(st.text(st.characters()), st.text(st.characters()))
def test_any_text_either_passes_and_encodes_or_is_refused(prompt: str, completion: str) -> None:
    said = event(prompt=user_prompt(prompt), completion=completion)
    if "\x00" in prompt + completion or any("\ud800" <= c <= "\udfff" for c in prompt + completion):
        with pytest.raises(FeedbackRefused) as caught:
            check_event(said)
        assert caught.value.rule == Rule.bad_text
    else:
        check_event(said)
