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
from rlhf_pipeline.feedback.privacy import SIGN
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
    Raises ModelError where they are not lists of phrases by kind.
    """
    told = PHRASES if phrases is None else phrases
    if not isinstance(told, Mapping) or not all(_are_texts(some) for some in told.values()):
        raise ModelError(
            "the reward empathy needs phrases by kind, {kind: [phrases]}, found "
            f"{str(told)[:80]!r}; correct them"
        )
    kinds = [re.compile(_whole(map(_folded, some))) for some in told.values() if some]
    if not kinds:
        raise ModelError("the reward empathy needs phrases by kind, found none; name some")

    def reward(items: Sequence[RewardInput], /) -> list[float]:
        texts = [_folded(item.completion) for item in items]
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
        return [found.group() for found in self._pattern().finditer(_folded(text))]

    def _pattern(self) -> re.Pattern[str]:
        titles = sorted(self.tags, key=len, reverse=True)  # the longest of those that begin alike
        return compiled((_whole(titles),))[0]


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
    if isinstance(items, Mapping):
        about = items
    else:
        about = dict.fromkeys(items, ()) if _are_texts(items) else {}
    lists = all(isinstance(words, list | tuple) for words in about.values())
    if not about or not lists or not all(_plain(str(title)) for title in about):
        raise _no_catalogue(items)
    return Catalogue({_plain(str(t)): frozenset(_words(words)) for t, words in about.items()})


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
        said = len(words_of(_folded(item.completion)))
        named = sum(len(words_of(title)) for title in titles.mentions(item.completion))
        return min(named / said, 1.0) if said else 0.0

    return _each(score)


def safety(patterns: Sequence[str] = UNSAFE, *, personal_details: bool = True) -> RewardFunction:
    """Return a reward that is 1, and 0 for a completion with something that safety.py finds.

    That is a match of `patterns`, the guardrails' own by default, or a personal detail that the
    prompt does not hold. A refusal that repeats the request matches too. Give it a floor of 0.5 to
    have such a completion refused whatever else it earns. Raises ModelError where `patterns` is no
    list of regular expressions.
    """
    if not _are_texts(patterns):
        raise ModelError(
            "the reward safety needs a list of regular expressions, found "
            f"{str(patterns)[:80]!r}; correct it"
        )
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
    return _folded(YEAR.sub("", title).strip())


def _folded(text: str) -> str:
    """Return the text as it is compared: in small letters, with one kind of apostrophe."""
    return text.lower().replace("’", "'")


def _are_texts(some: object) -> bool:
    """Say whether these are texts; one text is none: its letters would be taken."""
    return isinstance(some, list | tuple) and all(isinstance(text, str) for text in some)


def _whole(phrases: Iterable[str]) -> str:
    """Return what matches any of the phrases, and none within a word.

    Words are parted by blanks where a phrase begins and ends with a letter of such a script.
    """
    return "|".join(
        (rf"(?<!{SIGN})" if re.match(SIGN, phrase) else "")
        + re.escape(phrase)
        + (rf"(?!{SIGN})" if re.match(SIGN, phrase[-1]) else "")
        for phrase in phrases
        if phrase
    )


def _words(texts: Iterable[str]) -> list[str]:
    return [word for text in texts for word in words_of(str(text))]


def _no_catalogue(found: object) -> ModelError:
    return ModelError(
        "items must be titles, none of them blank, {title: [words about it]}, or a JSON file with "
        f"either, found {str(found)[:80]!r}; correct it"
    )
