"""The people: how they vote, given what they secretly prefer.

Each person weighs the four pieces of the hidden preference a little differently, votes with noise,
and some are lenient or harsh, or careless: their thumbs, ratings, scores and choices are random,
though what they write and how they grade each criterion is what they think. Nothing here is
visible to training but the votes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    Message,
    hash_rater,
    hashed,
    prompt_to_json,
)
from rlhf_pipeline.simulation.world import ALL_TOPICS, Judgement, good_answer, judge, question_of

CARELESS_SHARE = 0.10
THUMBS_UP_AT = 0.65  # the hidden preference at which a person is as likely to like as to dislike
THUMBS_SLOPE = 12.0
PAIR_SLOPE = 20.0  # log-odds of the better one per unit of hidden difference
TIE_BELOW = 0.02
GOOD_ENOUGH = 0.8  # nobody rewrites a completion they like this much; they give it a thumb


@dataclass(frozen=True, slots=True)
class Person:
    """One simulated person."""

    name: str
    weights: Mapping[str, float]  # relevance, tone, length, safety; sums to 1
    careless: bool
    leniency: float  # added to every judgement, about -0.1 to 0.1

    def liking(self, judgement: Judgement) -> float:
        """Return how much this person likes a completion, about 0 to 1."""
        pieces = {
            "relevance": judgement.relevance,
            "tone": judgement.tone,
            "length": judgement.length,
            "safety": judgement.safety,
        }
        return sum(self.weights[name] * value for name, value in pieces.items())


def population(size: int, seed: int) -> list[Person]:
    """Return the people of a simulation; the same seed, the same people."""
    rng = random.Random(f"people {seed}")
    people = []
    for number in range(size):
        weights = {
            name: weight * rng.uniform(0.7, 1.3)
            for name, weight in (
                ("relevance", 0.5),
                ("tone", 0.2),
                ("length", 0.15),
                ("safety", 0.15),
            )
        }
        total = sum(weights.values())
        people.append(
            Person(
                name=f"person-{seed}-{number}",
                weights={name: weight / total for name, weight in weights.items()},
                careless=rng.random() < CARELESS_SHARE,
                leniency=rng.gauss(0, 0.05),
            )
        )
    return people


def thumbs_up_probability(hidden: float) -> float:
    """Return how likely an average, careful person is to give a thumbs-up."""
    return _logistic(THUMBS_SLOPE * (hidden - THUMBS_UP_AT))


def finds_better(ahead: float, rng: random.Random) -> bool | None:
    """Return whether somebody finds better what they like so much more; None: no difference."""
    return None if abs(ahead) < TIE_BELOW else rng.random() < _logistic(PAIR_SLOPE * ahead)


def compare(person: Person, left: Interaction, right: Interaction, rng: random.Random) -> Feedback:
    """Return the person's preference between two completions shown left and right."""
    question = question_of(left.prompt[-1].content)
    a = person.liking(judge(question, left.completion))
    b = person.liking(judge(question, right.completion))
    if person.careless:
        choice = rng.choice(("left", "right"))
    elif (better := finds_better(a - b, rng)) is None:
        choice = "both_bad" if a + person.leniency < 0.3 else "tie"
    else:
        choice = "left" if better else "right"
    return Feedback(
        agent_id=left.agent_id,
        kind=FeedbackKind.preference,
        idempotency_key=hashed(person.name, left.interaction_id, right.interaction_id)[:40],
        interaction_id=left.interaction_id,
        other_interaction_id=right.interaction_id,
        choice=choice,  # type: ignore[arg-type]  # one of the four literals above
        rater_id=hash_rater(left.agent_id, person.name),
        origin="simulation",
        topic=question.topic.name,
    )


def say(
    person: Person, interaction: Interaction, kind: FeedbackKind, rng: random.Random
) -> Feedback:
    """Return what the person says about one completion, as feedback of the given kind."""
    question = question_of(interaction.prompt[-1].content)
    judgement = judge(question, interaction.completion)
    liking = min(1.0, max(0.0, person.liking(judgement) + person.leniency + rng.gauss(0, 0.05)))
    if person.careless:
        liking = rng.random()
    if kind is FeedbackKind.correction and judgement.hidden >= GOOD_ENOUGH:
        kind = FeedbackKind.thumbs
    number: float | None = None
    text: str | None = None
    criteria: dict[str, float] | None = None
    if kind is FeedbackKind.thumbs:
        up = _logistic(THUMBS_SLOPE * (liking - THUMBS_UP_AT))
        number = float(rng.random() < up)
    elif kind is FeedbackKind.rating:
        number = float(min(5, 1 + int(liking * 5)))
    elif kind is FeedbackKind.score:
        number = round(liking, 3)
    elif kind is FeedbackKind.correction:
        text = interaction.completion
        while text == interaction.completion:
            # They mend what is wrong and keep the tone, unless it was rude.
            text = good_answer(question, rng, kind=0.9 if judgement.tone == 1 else 0.3)
    elif kind is FeedbackKind.criteria:
        criteria = {
            "relevance": _near(judgement.relevance, rng),
            "helpfulness": _near((judgement.relevance + judgement.tone) / 2, rng),
            "safety": _near(judgement.safety, rng),
        }
    elif kind is FeedbackKind.comment:
        text = "that was not my question" if judgement.relevance < 0.5 else "good, thank you"
    else:
        raise ValueError(f"{kind} is about two completions; use compare()")
    return Feedback(
        agent_id=interaction.agent_id,
        kind=kind,
        idempotency_key=hashed(person.name, interaction.interaction_id, kind.value)[:40],
        interaction_id=interaction.interaction_id,
        number=number,
        text=text,
        criteria=criteria,
        rater_id=hash_rater(interaction.agent_id, person.name),
        origin="simulation",
        topic=question.topic.name,
    )


def _near(value: float, rng: random.Random) -> float:
    return round(min(1.0, max(0.0, value + rng.gauss(0, 0.1))), 3)


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def customers(conversations: Sequence[tuple[Message, ...]], /) -> list[str | None]:
    """Return what customers say next: another question about the same thing, or nothing.

    They leave where they were asked for a secret, and where they asked something nobody asks. What
    they ask follows from the conversation, so that training which is killed can go on.
    """
    return [_next_question(conversation) for conversation in conversations]


def _next_question(conversation: tuple[Message, ...]) -> str | None:
    *before, answer = conversation
    try:
        asked = question_of(before[-1].content)
    except KeyError:
        return None
    if judge(asked, answer.content).safety == 0:
        return None
    rng = random.Random(hashed("customer", prompt_to_json(conversation)))
    topic = rng.choice([topic for topic in ALL_TOPICS if topic != asked.topic])
    return rng.choice(topic.questions).format(thing=asked.thing) + "?"
