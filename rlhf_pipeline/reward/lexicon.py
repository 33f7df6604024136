"""Rewards from lists of words: empathy, recommendation, safety. Each in [0, 1], higher is better.

A list sees words and not what is meant by them: "I am not sorry" holds an apology, a title in a
question is not a recommendation. They are for steering beside a learned reward, under a small
weight, and for reading; as the only reward each is emptied of meaning within a few updates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import Prompt, RewardFunction, RewardInput
from rlhf_pipeline.reward.rules import words_of
from rlhf_pipeline.safety import UNSAFE, compiled, leaked

PHRASES: Mapping[str, Sequence[str]] = {
    "reaction": (
        "sorry to hear",
        "so sorry",
        "i'm sorry",
        "i am sorry",
        "glad to hear",
        "happy to hear",
        "congratulations",
        "that must be",
        "that must have been",
        "here for you",
        "thank you for telling",
        "thanks for telling",
    ),
    "interpretation": (
        "i understand",
        "i can imagine",
        "i hear you",
        "i see why",
        "it makes sense",
        "that makes sense",
        "sounds like you",
        "sounds frustrating",
        "sounds hard",
        "sounds difficult",
        "sounds stressful",
        "you must feel",
        "no wonder",
    ),
    "exploration": (
        "how are you feeling",
        "how do you feel",
        "what happened",
        "tell me more",
        "would you like to talk",
        "what would help",
        "how can i help",
        "is there anything else",
    ),
}
"""What says that somebody reacts, has understood, and asks. Source of the three: EPITOME, Sharma et
al., arXiv:2009.08441 section 3, which learns from labels how strongly each is there; the phrases
are ours."""

TITLE = re.compile(
    r"@\d+\b|\b[A-Z0-9][\w'&:.,-]*(?:\s+(?:[A-Z0-9][\w'&:.,-]*|of|the|and|in|to|a|for))*\s+\(\d{4}\)"
)
"""An item without a list of them: a marked one (@12345, as ReDial has them), or Title (1999)."""
YEAR = re.compile(r"\s*\(\d{4}\)\s*$")


def empathy(phrases: Mapping[str, Sequence[str]] | None = None) -> RewardFunction:
    """Return a reward that is the share of the three kinds of PHRASES the completion has one of.

    Saying one twice adds nothing. `phrases` takes the list's place, for another language or tone.
    """
    kinds = [
        re.compile(rf"\b(?:{'|'.join(re.escape(p.lower()) for p in some)})\b")
        for some in (PHRASES if phrases is None else phrases).values()
        if some
    ]
    if not kinds:
        raise ModelError("the reward empathy needs phrases by kind, found none; name some")

    def reward(items: Sequence[RewardInput], /) -> list[float]:
        texts = [item.completion.lower().replace("’", "'") for item in items]
        return [sum(bool(kind.search(text)) for kind in kinds) / len(kinds) for text in texts]

    return reward


@dataclass(frozen=True)
class Catalogue:
    """Titles that can be recommended, in small letters without a year, with words about each."""

    tags: Mapping[str, frozenset[str]]  # empty: any TITLE is an item, and nothing is known of it

    def mentions(self, text: str) -> list[str]:
        """Return the items that the text names, in order, again where it names one again."""
        if not self.tags:
            return [_plain(found.group()) for found in TITLE.finditer(text)]
        return [found.group() for found in self._pattern().finditer(text.lower())]

    def _pattern(self) -> re.Pattern[str]:
        titles = sorted(self.tags, key=len, reverse=True)  # the longest of those that begin alike
        return compiled((rf"(?<!\w)(?:{'|'.join(map(re.escape, titles))})(?!\w)",))[0]


def catalogue(items: str | Sequence[str] | Mapping[str, Sequence[str]] | None) -> Catalogue:
    """Return the catalogue of titles, of {title: words about it}, or of a JSON file with either.

    Raises ModelError where that is not to be read.
    """
    if items is None:
        return Catalogue({})
    if isinstance(items, str):
        try:
            items = json.loads(Path(items).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _no_catalogue(items) from error
    if isinstance(items, Mapping) and all(
        isinstance(words, list | tuple) for words in items.values()
    ):
        return Catalogue({_plain(t): frozenset(_words(words)) for t, words in items.items()})
    if isinstance(items, list | tuple) and items and all(isinstance(t, str) for t in items):
        return Catalogue({_plain(title): frozenset() for title in items})
    raise _no_catalogue(items)


def recommendation(
    items: str | Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> RewardFunction:
    """Return a reward for naming an item that nobody in the conversation has named before.

    1 where one of the new items fits, 0.5 where none does, 0 without a new item. An item fits when
    it shares a word about it with what the user said, or when the user said no word that any item
    is about. `items` is a catalogue's; without one any Title (1999) or @12345 is an item and fits.
    """
    titles = catalogue(items)
    about = frozenset().union(*titles.tags.values())

    def score(item: RewardInput) -> float:
        before = set(titles.mentions(_said(item.prompt, ("user", "assistant", "system"))))
        new = [title for title in titles.mentions(item.completion) if title not in before]
        if not new:
            return 0.0
        asked = about & set(words_of(_said(item.prompt, ("user",))))
        fits = not asked or any(asked & titles.tags[title] for title in new)
        return 1.0 if fits else 0.5

    return _each(score)


def item_ratio(
    items: str | Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> RewardFunction:
    """Return a reward that is the share of the completion's words that name items of a catalogue.

    A list of titles and nothing else has 1: it tells talk from recommending, not good from bad.
    """
    titles = catalogue(items)

    def score(item: RewardInput) -> float:
        said = len(words_of(item.completion))
        named = sum(len(words_of(title)) for title in titles.mentions(item.completion))
        return min(named / said, 1.0) if said else 0.0

    return _each(score)


def safety(patterns: Sequence[str] = UNSAFE, *, personal_details: bool = True) -> RewardFunction:
    """Return a reward that is 1, and 0 for a completion with something that safety.py finds.

    That is a match of `patterns`, the guardrails' own by default, or a personal detail that the
    prompt does not hold. A refusal that repeats the request matches too. Give it a floor of 0.5 to
    have such a completion refused whatever else it earns.
    """
    try:
        expressions = compiled(tuple(patterns))
    except re.error as error:
        raise ModelError(
            f"the reward safety needs regular expressions, found one that is none: {error}; "
            "correct it"
        ) from error

    def score(item: RewardInput) -> float:
        unsafe = any(pattern.search(item.completion) for pattern in expressions)
        return float(not unsafe and not (personal_details and leaked(item.completion, item.prompt)))

    return _each(score)


def _each(score: Callable[[RewardInput], float]) -> RewardFunction:
    def reward(items: Sequence[RewardInput], /) -> list[float]:
        return [score(item) for item in items]

    return reward


def _said(prompt: Prompt, roles: Sequence[str]) -> str:
    return "\n".join(message.content for message in prompt if message.role in roles)


def _plain(title: str) -> str:
    return YEAR.sub("", title).strip().lower()


def _words(texts: Iterable[str]) -> list[str]:
    return [word for text in texts for word in words_of(str(text))]


def _no_catalogue(found: object) -> ModelError:
    return ModelError(
        "items must be titles, {title: [words about it]}, or a JSON file with either, found "
        f"{str(found)[:80]!r}; correct it"
    )
