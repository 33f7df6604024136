"""What a candidate says more often, and less: told where it is so, and nothing where it is not."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_pipeline.evaluation.phrases import MOST, Phrase, telling_phrases

WORDS = [f"word{i}" for i in range(200)]


def answers(n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=12)) for _ in range(n)]


def test_what_is_said_more_often_is_told_with_both_shares() -> None:
    plain = answers(100, 0)
    here = [f"{text}. Happy to help!" if n < 60 else text for n, text in enumerate(answers(100, 1))]
    other = [f"{text}. Happy to help!" if n >= 95 else text for n, text in enumerate(plain)]
    more = [phrase for phrase in telling_phrases(here, other) if phrase.here > phrase.other]
    # One phrase stands for its parts, and full stops for themselves: they are the other's too.
    assert more == [Phrase(". happy to help !", 0.6, 0.05)]
    assert telling_phrases(other, here) == [Phrase(". happy to help !", 0.05, 0.6)]


def test_sixteen_prompts_tell_what_fifteen_do_not() -> None:
    here, other = answers(200, 2), answers(200, 3)
    for count, found in ((15, []), (16, [Phrase("zib zab", 0.08, 0.0)])):
        said = [f"{text} zib zab" if n < count else text for n, text in enumerate(here)]
        assert telling_phrases(said, other) == found


def test_turns_of_one_conversation_say_a_phrase_once() -> None:
    here, other = answers(160, 10), answers(160, 11)
    for conversations, found in ((15, []), (16, [Phrase("zib zab", 0.8, 0.0)])):
        turns = 128 // conversations  # that say it; the rest of the 160 do not
        groups = np.array([min(n // turns, conversations) for n in range(160)])
        said = [
            f"{text} zib zab" if group < conversations else text
            for text, group in zip(here, groups, strict=True)
        ]
        assert telling_phrases(said, other, groups=groups) == found
        assert telling_phrases(said, other) != []
    # One conversation that gains it often is no more than one, and what it loses again is nothing.
    more, less = ["zib"] * 40 + [""] * 10, [""] * 40 + ["zib"] * 10
    assert telling_phrases(more, less) == [Phrase("zib", 0.8, 0.2)]
    assert telling_phrases(more, less, groups=np.zeros(50, dtype=np.int64)) == []


def test_what_is_on_both_sides_of_a_prompt_says_nothing() -> None:
    here = [f"{text} thank you" for text in answers(100, 4)]
    assert telling_phrases(here, [f"thank you {text}" for text in answers(100, 5)]) == []


def test_a_word_that_comes_in_many_phrases_is_told_once() -> None:
    rng = random.Random(6)
    here = [f"of course {rng.choice(WORDS)} {text}" for text in answers(300, 7)]
    found = telling_phrases(here, answers(300, 8))
    assert found == [Phrase("of course", 1.0, 0.0)]


def test_of_many_phrases_the_most_telling_come() -> None:
    rng = random.Random(9)
    here = [
        " ".join(f"{rng.choice(WORDS)} new{i}" for i in range(2 * MOST) if n < 100 - 5 * i)
        for n in range(100)
    ]
    expected = [Phrase(f"new{i}", (100 - 5 * i) / 100, 0.0) for i in range(MOST)]
    assert telling_phrases(here, [""] * 100)[:MOST] == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_answers_of_one_kind_differ_in_nothing(seed: int) -> None:
    """By chance hardly ever: of 50 comparisons of a system with itself none may tell two things."""
    assert len(telling_phrases(answers(60, seed), answers(60, seed + 1))) < 2


def test_nothing_is_said_of_no_answers() -> None:
    assert telling_phrases([], []) == []
    assert telling_phrases(["", "  "], ["", "a"]) == []
