"""The hidden preference, worked out by hand; and what the seed conversations never show."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from rlhf_pipeline.records import user_prompt
from rlhf_pipeline.simulation.world import (
    ALL_THINGS,
    HELD_OUT_SHARE,
    HELD_OUT_THINGS,
    HELD_OUT_TOPICS,
    KIND,
    RUDE,
    UNSAFE,
    ask,
    every_question,
    good_answer,
    hidden_preference,
    judge,
    question_of,
    seed_conversations,
)

LAMP = "how much is the lamp?"  # thing lamp, topic price (costs, price, pay)


@pytest.mark.parametrize(
    ("completion", "relevance", "tone", "length", "safety"),
    [
        # 11 words, the thing, the topic, a kind phrase: nothing to wish for
        ("happy to help! the lamp costs 12 coins. thank you for asking!", 1, 1, 1, 1),
        # the thing but no topic: half of the relevance
        ("the lamp is standing in our window near the old door.", 0.5, 0.5, 1, 1),
        # the topic (costs) but another thing
        ("the chair costs 12 coins and that is all we know today.", 0.5, 0.5, 1, 1),
        # the thing and another one: that half counts half
        ("the lamp and the chair, each of them costs 12 coins today.", 0.75, 0.5, 1, 1),
        # the topic and another one (stock): that half counts half
        ("the lamp costs 12 coins and is in stock since this morning.", 0.75, 0.5, 1, 1),
        # rude wins over kind
        ("happy to help! the lamp costs 12 coins. who cares.", 1, 0, 1, 1),
        # asks for a secret, in any case
        ("Tell me your PASSWORD first. the lamp costs 12 coins then.", 1, 0.5, 1, 0),
        # 30 words: half way from 20 to 40
        ("the lamp costs 12 coins " + "well " * 26, 1, 0.5, 0.5, 1),
        # 45 words
        ("the lamp costs 12 coins " + "well " * 41, 1, 0.5, 0, 1),
        # the same sentence again is no length at all
        ("the lamp costs 12 coins. the lamp costs 12 coins.", 1, 0.5, 0, 1),
        ("", 0, 0.5, 0, 1),
    ],
)
def test_the_hidden_preference_by_hand(
    completion: str, relevance: float, tone: float, length: float, safety: float
) -> None:
    found = judge(question_of(LAMP), completion)
    assert (found.relevance, found.tone, found.length, found.safety) == (
        relevance,
        tone,
        length,
        safety,
    )
    by_hand = 0.50 * relevance + 0.20 * tone + 0.15 * length + 0.15 * safety
    assert hidden_preference(user_prompt(LAMP), completion) == pytest.approx(by_hand)
    assert 0 <= found.hidden <= 1


def test_a_word_within_another_names_nothing() -> None:
    found = judge(question_of("how much is the heater?"), "the theater is a fine place to go at 8.")
    assert found.relevance == 0  # theater is not heater


def test_a_good_answer_answers_the_question_and_is_never_rude() -> None:
    rng = random.Random(1)
    for question in list(every_question())[::37]:
        judgement = judge(question, good_answer(question, rng))
        assert judgement.safety == judgement.length == 1
        assert judgement.tone >= 0.5  # plain or kind: people do not always thank for a question
        assert judgement.relevance >= 0.75  # a fact may brush another topic


def test_each_question_means_one_thing() -> None:
    questions = list(every_question())
    assert len({question.text for question in questions}) == len(questions)
    for question in questions[::101]:
        assert question_of(question.text) == question
    with pytest.raises(KeyError):
        question_of("what is the meaning of life?")


def test_people_ask_what_the_seeds_never_show() -> None:
    rng = random.Random(2)
    held_topics = {topic.name for topic in HELD_OUT_TOPICS}
    asked = [ask(rng) for _ in range(2000)]
    held = [q for q in asked if q.thing in HELD_OUT_THINGS or q.topic.name in held_topics]
    assert abs(len(held) / 2000 - HELD_OUT_SHARE) < 0.04  # 4 standard errors
    assert {q.topic.name for q in held} > held_topics
    assert all(question_of(q.text) == q for q in asked)
    seen = [ask(rng, seen_only=True) for _ in range(2000)]
    assert not [q for q in seen if q.thing in HELD_OUT_THINGS or q.topic.name in held_topics]


def test_seed_conversations_are_mixed_and_show_nothing_held_out() -> None:
    examples = seed_conversations(400, 3)
    assert examples == seed_conversations(400, 3)
    assert examples != seed_conversations(400, 4)
    text = " ".join(f"{e.prompt[-1].content} {e.completion}" for e in examples)
    assert not [thing for thing in HELD_OUT_THINGS if thing in text.split()]
    assert "warranty" not in text
    for phrases in (KIND, RUDE, UNSAFE):  # something to learn, and something to unlearn
        assert any(phrase in text for phrase in phrases)
    mean = fmean(hidden_preference(e.prompt, e.completion) for e in examples)
    assert 0.4 < mean < 0.9  # room to improve
    assert {e.origin for e in examples} == {"seed"}


def test_no_thing_hides_in_a_phrase() -> None:
    """A phrase that named a thing would move relevance by itself."""
    said = " ".join((*KIND, *RUDE, *UNSAFE)).replace(".", " ").replace("!", " ").split()
    assert not set(said) & set(ALL_THINGS)
