"""Rules by hand-worked numbers, and the composite by its sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import RewardInput, user_prompt
from rlhf_pipeline.reward.composite import CompositeReward, Term, named_reward
from rlhf_pipeline.reward.rules import RULES, distinct_share, length_fit, rouge_l, unrepeated_share

PROMPT = user_prompt("hi")
NOT_A_FUNCTION = 3


def letters(items: Sequence[RewardInput], /) -> list[float]:
    return [float(len(item.completion)) for item in items]


def test_distinct_counts_different_ngrams_among_all() -> None:
    assert distinct_share("a b a b", 1) == 2 / 4
    assert distinct_share("a b a b", 2) == 2 / 3
    assert distinct_share("a", 2) == 0


def test_length_falls_on_both_sides_of_the_window() -> None:
    assert [length_fit(" ".join("x" * n), 4, 8) for n in (0, 1, 4, 8, 16)] == [0, 0.25, 1, 1, 0.5]


def test_a_trigram_said_again_counts_against_a_completion() -> None:
    assert unrepeated_share("a b c a b c") == 3 / 4
    assert unrepeated_share("yes yes") == 1


def test_rouge_l_agrees_with_the_papers_example() -> None:
    # Lin 2004, section 3.1: S1 is "police killed the gunman"; S2 0.75, S3 0.5.
    reference = "police killed the gunman"
    assert rouge_l("police kill the gunman", reference) == 0.75
    assert rouge_l("the gunman kill police", reference) == 0.5
    assert rouge_l("nothing", reference) == 0


def test_rouge_takes_the_nearest_reference_and_refuses_to_guess_without_one() -> None:
    near = RewardInput(PROMPT, "a b", ("c d", "a b"))
    assert RULES["rouge-l"]([near]) == [1.0]
    with pytest.raises(ModelError, match="found none for item 1"):
        RULES["rouge-l"]([near, RewardInput(PROMPT, "a b")])


def test_a_breakdown_adds_up_to_the_score() -> None:
    terms = {
        "letters": Term(letters, weight=-0.5, centre=2, scale=4),
        "length": Term(RULES["length"], weight=2),
    }
    told = CompositeReward(terms).breakdown(PROMPT, "a b c d e f")
    # 11 letters and spaces: (11 - 2) / 4 = 2.25, times -0.5; six words are within the window.
    assert told.pieces["letters"].added == -1.125
    assert told.pieces["length"].added == 2
    assert told.score == 0.875
    assert CompositeReward(terms)([RewardInput(PROMPT, "a b c d e f")]) == [0.875]


def test_no_weight_buys_off_a_floor() -> None:
    reward = CompositeReward(
        {"letters": Term(letters, weight=100), "distinct": Term(RULES["distinct-1"], floor=0.6)}
    )
    sound, parrot = reward.judge([RewardInput(PROMPT, t) for t in ("a b", "a a a a a a")])
    assert sound.score == 301
    assert parrot.score == -5
    assert parrot.pieces["distinct"].below_floor


def test_a_version_changes_with_what_changes_scores() -> None:
    def version(**change: float) -> str:
        return CompositeReward({"letters": Term(letters, **change)}).version

    assert version() == version()
    assert len({version(), version(weight=2), version(scale=2), version(floor=0)}) == 4


@pytest.mark.parametrize(
    "term", [Term(letters, weight=0), Term(letters, scale=0), Term(letters, weight=math.nan)]
)
def test_a_term_that_makes_no_sum_is_refused(term: Term) -> None:
    with pytest.raises(ModelError, match="the term letters needs finite numbers"):
        CompositeReward({"letters": term})


def test_a_composite_of_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="one term or more"):
        CompositeReward({})


def test_a_function_of_ones_own_is_a_reward_by_its_place() -> None:
    reward = named_reward(f"{__name__}:letters")
    assert list(reward([RewardInput(PROMPT, "four")])) == [4.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("distinct-9", "needed a reward's name"),
        ("no_such_module:f", "in the module 'no_such_module', found none"),
        (f"{__name__}:no_such", "'no_such' in the module"),
        (f"{__name__}:NOT_A_FUNCTION", "found a int"),
    ],
)
def test_a_name_nobody_knows_is_refused_at_once(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        named_reward(name)
