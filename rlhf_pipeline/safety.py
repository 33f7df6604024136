"""What should not be said, by patterns: unsafe requests, personal details nobody gave.

One list for the chat service's guardrails and the safety reward. What they do not protect against:
whoever says an unsafe thing in words that are on no list, and personal details written out in
prose. What is taken out before training has patterns of its own, in feedback/privacy.py.
"""

from __future__ import annotations

import re
from functools import lru_cache

from rlhf_pipeline.feedback.privacy import (
    AFTER,
    BEFORE,
    EMAIL,
    GROUPS,
    NUMBERED,
    PRIVATE,
    SECRET,
    cards_in,
    is_as_long_as_its_countrys,
    is_somebodys_address,
    plain,
)
from rlhf_pipeline.records import Prompt

UNSAFE = (
    r"\b(build|make|assemble)\b.{0,40}\b(bomb|explosive|nerve agent|pipe ?bomb)",
    r"\bhow (to|do i|can i)\b.{0,40}\bkill (myself|someone|him|her|them)\b",
    r"\bhow (to|do i|can i)\b.{0,40}\bpoison (someone|somebody|my|him|her|them)\b",
    r"\bsynthesi[sz]e\b.{0,40}\b(sarin|ricin|methamphetamine|fentanyl)",
    r"\bsexual\b.{0,40}\b(child|minor|underage)",
)

PERSONAL: dict[str, tuple[str, re.Pattern[str]]] = {
    "an email address": ("@", EMAIL),
    "a key": (
        "[_-]|AKIA",
        re.compile(
            rf"{BEFORE}(?<!-)(?:{SECRET}|gh[pousr]_[A-Za-z0-9]{{30,}}"
            rf"|AKIA[A-Z0-9]{{16}}{AFTER}|xox[abprs]-[A-Za-z0-9-]{{10,}})"
            rf"|-----BEGIN {PRIVATE}"
        ),
    ),
    "a card number": (r"\d", re.compile(rf"(?<![\d.]){GROUPS}(?!\.?\d)")),
    "an IP address": (
        r"\d",
        re.compile(rf"(?<![\d.]){NUMBERED}\d{{1,3}}(?:\.\d{{1,3}}){{3}}(?!\.?\d)"),
    ),
    "a phone number": (
        r"\d",
        re.compile(
            rf"{BEFORE}(?<!\.)(?:\+\d{{1,3}}[ .-]?)(?:\(?\d{{1,4}}\)?[ .-]?){{2,5}}\d{{2,4}}{AFTER}"
            rf"|{BEFORE}(?<![.-])\(?\d{{3}}\)?[ .-]\d{{3}}[ .-]\d{{4}}(?!-){AFTER}"
        ),
    ),
}
"""What each kind looks like; before it, what all of that kind hold and is sooner looked for."""


CONTEXT = 1200  # characters in which what stands before a detail excuses it
OF_A_NUMBER = "0123456789 .,:+()/-"  # in whose middle another would seem to begin


def leaked(text: str, prompt: Prompt, since: int = 0) -> str | None:
    """Return what kind of personal detail the text holds that nobody in the prompt wrote.

    However it is written there: numbers are compared by their digits, the rest without its case.
    Looked for is what begins at `since` or later, in the light of what stands before that.
    """
    before = max(0, since - CONTEXT)  # of a long text that is being written its end alone
    text = plain(text[before:])
    since = len(text[: since - before].rstrip(OF_A_NUMBER))
    for kind, (held, pattern) in PERSONAL.items():
        if not re.search(held, text):
            continue
        for match in pattern.finditer(text, since):
            for found in _real(kind, match[0]):
                if _compared(kind, found) not in _said(kind, prompt):
                    return kind
    return None


@lru_cache(maxsize=64)
def _said(kind: str, prompt: Prompt) -> str:
    """Return what the prompt says, as it is compared: an answer under way is looked at often."""
    return _compared(kind, plain(" ".join(message.content for message in prompt)))


def _compared(kind: str, text: str) -> str:
    is_number = kind in ("a card number", "a phone number")
    return re.sub(r"\D", "", text) if is_number else text.strip().casefold()


def _real(kind: str, match: str) -> list[str]:
    """Return what of digits that look like one is one: by check digit, by range, by length."""
    if kind == "a card number":
        return [match[start:stop] for start, stop in cards_in(match)]
    if kind == "an IP address" and not is_somebodys_address(match):
        return []
    if kind == "a phone number" and not is_as_long_as_its_countrys(match):
        return []
    return [match]


@lru_cache(maxsize=64)
def compiled(expressions: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Return the regular expressions, case ignored, . matching a new line too."""
    return tuple(re.compile(e, re.IGNORECASE | re.DOTALL) for e in expressions)
