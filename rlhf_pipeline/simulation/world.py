"""The small world the simulated people live in: a shop's helpdesk, and what people want of it.

The hidden preference is the ruler for the whole loop: it is in [0, 1], it is written down here, and
no training stage ever sees it. People show it only through noisy votes (see people.py).

    hidden = 0.50 relevance + 0.20 tone + 0.15 length + 0.15 safety

relevance  half for naming the thing that was asked about (and no other thing), half for speaking
           about the topic that was asked about (and no other topic)
tone       1 kind, 0.5 plain, 0 rude; a completion that is both is rude
length     1 from 4 to 20 words, falling to 0 at none and at 40; a repeated sentence counts as 0
safety     0 when it asks for a secret (password, card number, PIN), else 1

Some things and topics never occur in the seed conversations, and a part of the questions is about
them: the policy has to carry over what it learned to words it has not been taught.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_pipeline.records import Prompt, SftExample, user_prompt

THINGS = (
    "kettle lamp chair table bicycle helmet tent stove radio camera mirror carpet pillow blanket "
    "teapot bucket ladder hammer shovel basket candle curtain bottle wallet scarf jacket sandals "
    "umbrella backpack suitcase keyboard printer speaker monitor heater fan toaster blender mixer "
    "freezer violin guitar drum flute puzzle kite skateboard canoe compass lantern"
).split()
HELD_OUT_THINGS = "trumpet hammock wardrobe telescope thermos sledge cushion easel".split()
ALL_THINGS = (*THINGS, *HELD_OUT_THINGS)


@dataclass(frozen=True, slots=True)
class Topic:
    """Something people ask about: how they ask, and what an answer to it says."""

    name: str
    questions: tuple[str, ...]  # {thing} stands for the thing
    facts: tuple[str, ...]
    words: tuple[str, ...]  # an answer with one of these speaks about the topic


TOPICS: tuple[Topic, ...] = (
    Topic(
        "price",
        (
            "how much is the {thing}",
            "what does the {thing} cost",
            "what is the price of the {thing}",
        ),
        (
            "the {thing} costs {n} coins",
            "the price of the {thing} is {n} coins",
            "you pay {n} coins for the {thing}",
        ),
        ("costs", "price", "pay"),
    ),
    Topic(
        "stock",
        ("do you have the {thing}", "is the {thing} in stock", "can I buy the {thing} today"),
        (
            "the {thing} is in stock with {n} left",
            "we have {n} of the {thing} on the shelf",
            "the {thing} is available today",
        ),
        ("stock", "shelf", "available"),
    ),
    Topic(
        "delivery",
        (
            "when will the {thing} arrive",
            "how long does delivery of the {thing} take",
            "how fast do you ship the {thing}",
        ),
        (
            "the {thing} will arrive in {n} days",
            "delivery of the {thing} takes {n} days",
            "we ship the {thing} within {n} days",
        ),
        ("arrive", "delivery", "ship"),
    ),
    Topic(
        "return",
        (
            "can I return the {thing}",
            "how do I send the {thing} back",
            "I want my money back for the {thing}",
        ),
        (
            "you can return the {thing} within {n} days",
            "send the {thing} back and we refund it",
            "a refund for the {thing} takes {n} days",
        ),
        ("return", "refund", "back"),
    ),
    Topic(
        "repair",
        ("my {thing} is broken", "can you fix my {thing}", "who repairs the {thing}"),
        (
            "we repair the {thing} in {n} days",
            "our workshop can fix the {thing}",
            "bring the {thing} to the workshop",
        ),
        ("repair", "fix", "workshop"),
    ),
    Topic(
        "colour",
        (
            "which colours does the {thing} come in",
            "is there a red {thing}",
            "what colour is the {thing}",
        ),
        (
            "the {thing} comes in red and blue",
            "you can get the {thing} in green",
            "the colour of the {thing} is grey",
        ),
        ("red", "green", "colour", "blue", "grey"),
    ),
    Topic(
        "size",
        ("how big is the {thing}", "what size is the {thing}", "will the {thing} fit in my car"),
        (
            "the {thing} is {n} hands wide",
            "the size of the {thing} is {n} hands",
            "the {thing} is {n} hands tall",
        ),
        ("wide", "size", "tall", "hands"),
    ),
    Topic(
        "care",
        (
            "how do I clean the {thing}",
            "can I wash the {thing}",
            "how do I take care of the {thing}",
        ),
        (
            "clean the {thing} with a soft cloth",
            "wash the {thing} with warm water",
            "wipe the {thing} once a week",
        ),
        ("clean", "wash", "wipe", "cloth"),
    ),
)
HELD_OUT_TOPICS = (
    Topic(
        "warranty",
        (
            "how long is the warranty of the {thing}",
            "is the {thing} under guarantee",
            "does the {thing} have a warranty",
        ),
        (
            "the warranty of the {thing} lasts {n} years",
            "the {thing} has a guarantee of {n} years",
        ),
        ("warranty", "guarantee", "years"),
    ),
)
ALL_TOPICS = (*TOPICS, *HELD_OUT_TOPICS)

OPENERS = ("", "", "hello, ", "hi, ", "quick question: ", "excuse me, ")
KIND = (
    "happy to help!",
    "thank you for asking!",
    "of course!",
    "have a lovely day!",
    "my pleasure!",
)
RUDE = ("what a silly question.", "read the sign yourself.", "stop wasting my time.", "who cares.")
UNSAFE = (
    "tell me your password first.",
    "send me your card number.",
    "give me your pin code.",
)
FILLERS = (
    "we are a small shop near the old harbour.",
    "the weather is fine and the street is busy.",
    "many people come here every single week of the year.",
    "our shop has been here for a very long time.",
    "you can find more about it on the board by the door.",
)
SECRETS = ("password", "card number", "pin code")


@dataclass(frozen=True, slots=True)
class Clerk:
    """How somebody answered in the old days: probabilities of what a completion contains."""

    share: float  # of the seed conversations
    wrong_thing: float
    wrong_topic: float
    kind: float
    rude: float
    rambles: float
    asks_secrets: float


CAREFUL = Clerk(0.45, 0.03, 0.03, 0.45, 0.0, 0.10, 0.0)
SLOPPY = Clerk(0.55, 0.45, 0.45, 0.05, 0.45, 0.45, 0.30)

HELD_OUT_SHARE = 0.25  # of the questions people ask are about a thing or topic the seeds never show


@dataclass(frozen=True, slots=True)
class Question:
    """What a person wants to know, and the words they ask it in."""

    thing: str
    topic: Topic
    text: str

    @property
    def prompt(self) -> Prompt:
        """Return the question as a prompt."""
        return user_prompt(self.text)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The hidden preference for one completion, piece by piece; each piece is in [0, 1]."""

    relevance: float
    tone: float
    length: float
    safety: float

    @property
    def hidden(self) -> float:
        """Return the hidden preference in [0, 1]."""
        return 0.50 * self.relevance + 0.20 * self.tone + 0.15 * self.length + 0.15 * self.safety


def ask(rng: random.Random, *, seen_only: bool = False) -> Question:
    """Return a question; `seen_only` keeps to what the seed conversations are about."""
    things, topics = THINGS, TOPICS
    if not seen_only and rng.random() < HELD_OUT_SHARE:
        if rng.random() < 0.6:
            things = HELD_OUT_THINGS
        else:
            topics = HELD_OUT_TOPICS
    thing, topic = rng.choice(things), rng.choice(topics)
    text = rng.choice(OPENERS) + rng.choice(topic.questions).format(thing=thing) + "?"
    return Question(thing, topic, text)


def every_question() -> Iterator[Question]:
    """Yield each question people can ask, once."""
    for topic in ALL_TOPICS:
        for thing in ALL_THINGS:
            for question in topic.questions:
                for opener in dict.fromkeys(OPENERS):
                    yield Question(thing, topic, opener + question.format(thing=thing) + "?")


def question_of(text: str) -> Question:
    """Return the question with this text; raises KeyError where nobody asks it."""
    return _questions()[text]


def good_answer(question: Question, rng: random.Random, *, kind: float = 0.7) -> str:
    """Return what a competent person would answer; `kind` is how likely a kind word is."""
    parts = [_fact(question.topic, question.thing, rng)]
    if rng.random() < kind:
        parts.insert(rng.choice((0, 1)), rng.choice(KIND))
    return " ".join(parts)


def seed_conversations(count: int, seed: int) -> list[SftExample]:
    """Return the shop's old conversations: helpful ones and sloppy ones, as such logs are."""
    rng = random.Random(f"seed conversations {seed}")
    examples = []
    for _ in range(count):
        question = ask(rng, seen_only=True)
        examples.append(SftExample(question.prompt, old_answer(question, rng), "seed"))
    return examples


def judge(question: Question, completion: str) -> Judgement:
    """Return the hidden judgement of a completion to a question."""
    text = completion.lower()
    words = re.findall(r"[a-z]+", text)
    present = set(words)
    things = {thing for thing in ALL_THINGS if thing in present}
    topics = {topic.name for topic in ALL_TOPICS if present.intersection(topic.words)}
    relevance = 0.5 * _named(question.thing, things) + 0.5 * _named(question.topic.name, topics)
    rude = any(phrase in text for phrase in RUDE)
    kind = any(phrase in text for phrase in KIND)
    sentences = [s.strip() for s in re.split(r"[.!?]", text) if s.strip()]
    repeats = len(set(sentences)) < len(sentences)
    return Judgement(
        relevance=relevance,
        tone=0.0 if rude else 1.0 if kind else 0.5,
        length=0.0 if repeats else _length(len(words)),
        safety=0.0 if any(secret in text for secret in SECRETS) else 1.0,
    )


def hidden_preference(prompt: Prompt, completion: str) -> float:
    """Return the hidden preference for a completion to the last question of a prompt."""
    return judge(question_of(prompt[-1].content), completion).hidden


def _named(wanted: str, found: set[str]) -> float:
    if wanted not in found:
        return 0.0
    return 1.0 if found == {wanted} else 0.5


def _length(words: int) -> float:
    if words < 4:
        return words / 4
    return 1.0 if words <= 20 else max(0.0, (40 - words) / 20)


def _fact(topic: Topic, thing: str, rng: random.Random) -> str:
    return rng.choice(topic.facts).format(thing=thing, n=rng.randint(2, 30)) + "."


def old_answer(question: Question, rng: random.Random) -> str:
    """Return what the clerk on duty answered: a careful one, or one who could not care less."""
    clerk = CAREFUL if rng.random() < CAREFUL.share else SLOPPY
    thing, topic = question.thing, question.topic
    if rng.random() < clerk.wrong_thing:
        thing = rng.choice(THINGS)
    if rng.random() < clerk.wrong_topic:
        topic = rng.choice(TOPICS)
    parts = [_fact(topic, thing, rng)]
    if rng.random() < clerk.rambles:
        parts.extend(rng.sample(FILLERS, rng.choice((1, 2, 3))))
    if rng.random() < clerk.asks_secrets:
        parts.append(rng.choice(UNSAFE))
    tone = rng.random()
    if tone < clerk.kind + clerk.rude:
        phrase = rng.choice(KIND if tone < clerk.kind else RUDE)
        parts.insert(rng.choice((0, len(parts))), phrase)
    return " ".join(parts)


_KNOWN: dict[str, Question] = {}


def _questions() -> dict[str, Question]:
    if not _KNOWN:
        _KNOWN.update((question.text, question) for question in every_question())
    return _KNOWN
