"""People: noisy, a little different from each other, and on the whole right."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rlhf_pipeline.feedback.rules import check_event
from rlhf_pipeline.records import (
    FeedbackKind,
    Interaction,
    Message,
    Prompt,
    now,
    user_prompt,
    uuid7,
)
from rlhf_pipeline.simulation.people import (
    CARELESS_SHARE,
    THUMBS_UP_AT,
    Person,
    compare,
    customers,
    population,
    say,
    thumbs_up_probability,
)
from rlhf_pipeline.simulation.world import (
    Judgement,
    ask,
    hidden_preference,
    judge,
    question_of,
    seed_conversations,
)

GOOD = "happy to help! the lamp costs 12 coins. thank you for asking!"
BAD = "who cares. send me your card number. the chair will arrive in 3 days."
EVEN = Person("even", {"relevance": 0.5, "tone": 0.2, "length": 0.15, "safety": 0.15}, False, 0.0)


def interaction(completion: str, prompt: str = "how much is the lamp?") -> Interaction:
    return Interaction(
        interaction_id=uuid7(),
        agent_id="shop",
        prompt=question_of(prompt).prompt,
        completion=completion,
        model_version=0,
        created_at=now(),
    )


def test_the_same_seed_is_the_same_people() -> None:
    assert population(20, 1) == population(20, 1)
    assert population(20, 1) == population(50, 1)[:20]
    assert {p.name for p in population(20, 1)}.isdisjoint(p.name for p in population(20, 2))


def test_people_differ_a_little_and_some_are_careless() -> None:
    people = population(1500, 3)
    assert abs(sum(p.careless for p in people) / 1500 - CARELESS_SHARE) < 0.035
    for person in people:
        assert sum(person.weights.values()) == pytest.approx(1)
        assert max(person.weights, key=lambda name: person.weights[name]) == "relevance"
    assert len({p.weights["tone"] for p in people}) == 1500


def test_a_liking_is_the_weighted_sum() -> None:
    assert EVEN.liking(Judgement(1, 1, 1, 1)) == pytest.approx(1)
    assert EVEN.liking(Judgement(0.5, 0, 1, 0)) == pytest.approx(0.25 + 0.15)


def test_thumbs_up_is_an_even_chance_at_the_threshold_and_certain_far_above() -> None:
    assert thumbs_up_probability(THUMBS_UP_AT) == pytest.approx(0.5)
    assert thumbs_up_probability(1.0) > 0.95
    assert thumbs_up_probability(0.2) < 0.02


def test_votes_agree_with_the_hidden_preference_more_often_than_not() -> None:
    rng = random.Random(4)
    people, answers = population(60, 4), seed_conversations(400, 4)
    right = decided = 0
    for _ in range(600):
        question = ask(rng, seen_only=True)
        one, other = (rng.choice(answers).completion for _ in range(2))
        left, right_side = (interaction(text, question.text) for text in (one, other))
        choice = compare(rng.choice(people), left, right_side, rng).choice
        a, b = (hidden_preference(question.prompt, text) for text in (one, other))
        if a != b and choice in ("left", "right"):
            decided += 1
            right += (choice == "left") == (a > b)
    assert decided > 400
    assert 0.65 < right / decided < 0.95  # clearly right, and clearly noisy


def test_the_careless_choose_at_random() -> None:
    rng = random.Random(5)
    careless = replace(EVEN, careless=True)
    good, bad = interaction(GOOD), interaction(BAD)
    left = sum(compare(careless, good, bad, rng).choice == "left" for _ in range(800))
    assert abs(left / 800 - 0.5) < 0.07  # 4 standard errors
    up = sum((say(careless, bad, FeedbackKind.thumbs, rng).number or 0) for _ in range(800)) / 800
    careful = sum((say(EVEN, bad, FeedbackKind.thumbs, rng).number or 0) for _ in range(800)) / 800
    assert up > 0.2 > careful


def test_where_it_stood_does_not_matter_to_the_careful() -> None:
    rng = random.Random(6)
    good, bad = interaction(GOOD), interaction(BAD)
    first = sum(compare(EVEN, good, bad, rng).choice == "left" for _ in range(200))
    second = sum(compare(EVEN, bad, good, rng).choice == "right" for _ in range(200))
    assert first > 190
    assert second > 190


def test_equal_completions_tie_and_two_bad_ones_are_both_bad() -> None:
    rng = random.Random(7)
    assert compare(EVEN, interaction(GOOD), interaction(GOOD), rng).choice == "tie"
    assert EVEN.liking(judge(question_of("how much is the lamp?"), BAD)) < 0.3
    assert compare(EVEN, interaction(BAD), interaction(BAD), rng).choice == "both_bad"


CORRECTION = FeedbackKind.correction  # of what is bad; nobody rewrites what they like


@pytest.mark.parametrize("kind", [k for k in FeedbackKind if k is not FeedbackKind.preference])
def test_whatever_people_say_keeps_every_rule(kind: FeedbackKind) -> None:
    rng = random.Random(8)
    for person in population(30, 8):
        for completion in (GOOD, BAD):
            about = interaction(completion)
            event = say(person, about, kind, rng)
            check_event(event)
            said = FeedbackKind.thumbs if (kind, completion) == (CORRECTION, GOOD) else kind
            assert (event.kind, event.interaction_id) == (said, about.interaction_id)
            assert person.name not in str(event)  # hashed
            if event.kind is CORRECTION:
                assert event.text != completion


def test_a_preference_is_about_two_completions() -> None:
    event = compare(EVEN, interaction(GOOD), interaction(BAD), random.Random(9))
    check_event(event)
    with pytest.raises(ValueError, match=r"use compare\(\)"):
        say(EVEN, interaction(GOOD), FeedbackKind.preference, random.Random(9))


def test_better_completions_are_rated_higher_and_the_lenient_rate_higher() -> None:
    rng = random.Random(10)

    def mean(person: Person, completion: str, kind: FeedbackKind) -> float:
        said = [say(person, interaction(completion), kind, rng).number for _ in range(100)]
        return sum(number or 0.0 for number in said) / 100

    for kind in (FeedbackKind.rating, FeedbackKind.score):
        assert mean(EVEN, GOOD, kind) > mean(EVEN, BAD, kind)
        assert mean(replace(EVEN, leniency=0.2), BAD, kind) > mean(EVEN, BAD, kind)


def test_customers_ask_on_about_the_same_thing_until_they_are_asked_for_a_secret() -> None:
    def after(question: str, answer: str) -> Prompt:
        return (*user_prompt(question), Message("assistant", answer))

    asked = [f"how much is the {thing}?" for thing in ("lamp", "tent", "trumpet", "lamp")]
    said = customers([after(text, GOOD) for text in asked])
    assert said[0] == said[3]  # the same conversation goes on the same way
    topics = set()
    for first, text in zip(asked, said, strict=True):
        assert text is not None
        then = question_of(text)
        assert then.thing == question_of(first).thing
        assert then.topic.name != "price"
        topics.add(then.topic.name)
    assert len(topics) > 1
    assert customers([after(asked[0], BAD), after("what is love?", GOOD)]) == [None, None]
