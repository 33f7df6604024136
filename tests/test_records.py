"""Ids, hashes and the canonical JSON that everything else is compared by."""

from __future__ import annotations

import time
import uuid
from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_pipeline.records import (
    Message,
    age_of,
    hash_rater,
    hashed,
    now,
    prompt_from_json,
    prompt_to_json,
    user_prompt,
    uuid7,
)

messages = st.builds(
    Message, st.sampled_from(["system", "user", "assistant"]), st.text(max_size=40)
)


def test_ids_are_version_7_and_sort_by_time() -> None:
    made = [uuid7() for _ in range(5000)]  # hundreds in a millisecond
    assert len(set(made)) == 5000
    assert made == sorted(made)
    parsed = [uuid.UUID(each) for each in made]
    assert {each.version for each in parsed} == {7}
    assert {each.variant for each in parsed} == {uuid.RFC_4122}
    milliseconds = [each.int >> 80 for each in parsed]
    assert milliseconds == sorted(milliseconds)
    assert abs(milliseconds[-1] - time.time_ns() // 1_000_000) < 5_000


def test_an_id_says_how_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made, moment = uuid7(), time.time()
    for later in (0.0, 90.0, -90.0):
        monkeypatch.setattr(time, "time", lambda later=later: moment + later)
        age = age_of(made)
        assert age is not None
        assert abs(age - later) < 1.0
    for other in (made.upper(), f"{{{made}}}", str(uuid.uuid4()), "i0", ""):
        assert age_of(other) is None


@given(st.lists(messages, min_size=1, max_size=5).map(tuple))
def test_a_prompt_survives_its_json(prompt: tuple[Message, ...]) -> None:
    assert prompt_from_json(prompt_to_json(prompt)) == prompt


@given(
    st.lists(messages, min_size=1, max_size=3).map(tuple),
    st.lists(messages, min_size=1, max_size=3).map(tuple),
)
def test_different_prompts_have_different_json(
    one: tuple[Message, ...], other: tuple[Message, ...]
) -> None:
    assert (prompt_to_json(one) == prompt_to_json(other)) == (one == other)


def test_a_hash_depends_on_where_one_part_ends() -> None:
    assert hashed("ab", "c") != hashed("a", "bc")
    assert hashed("ab") != hashed("a", "b")
    assert hashed("a \ud800 lone surrogate") == hashed("a \ud800 lone surrogate")
    # SHA-256 of "a", 0x1f, "b", by sha256sum
    assert hashed("a", "b").startswith("f04cdced")


def test_a_rater_is_somebody_else_to_another_agent() -> None:
    assert hash_rater("tea", "ann") == hash_rater("tea", "ann")
    assert len({hash_rater("tea", "ann"), hash_rater("coffee", "ann"), "ann"}) == 3
    assert "ann" not in hash_rater("tea", "ann")


def test_now_knows_its_zone() -> None:
    assert now().tzinfo is UTC


def test_a_question_is_a_prompt_of_one_users_message() -> None:
    assert user_prompt("Why?") == (Message("user", "Why?"),)
