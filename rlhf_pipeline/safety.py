"""What should not be said, by patterns: unsafe requests, personal details nobody gave.

One list for the chat service's guardrails and the safety reward. What they do not protect against:
whoever says an unsafe thing in words that are on no list, and personal details written out in
prose. Addresses and keys are what feedback/privacy.py takes out before training, but for what only
stands for one, as answers about code and networks hold: hf_xxxx, YOUR_TOKEN, documentation's
addresses. Cards and phone numbers have patterns of their own here.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from rlhf_pipeline.feedback.privacy import (
    AFTER,
    BEFORE,
    EMAIL,
    GROUPS,
    IP4,
    IP6,
    KEY,
    PRIVATE,
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

PERSONAL: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("an email address", "@", EMAIL),
    ("a key", "", KEY),
    ("a key", "-----BEGIN", re.compile(f"-----BEGIN {PRIVATE}")),
    ("a card number", r"\d", re.compile(rf"(?<![\d.]){GROUPS}(?!\.?\d)")),
    ("an IP address", r"\d", IP4),
    ("an IP address", ":", IP6),
    (
        "a phone number",
        r"\d",
        re.compile(
            rf"{BEFORE}(?<!\.)(?:\+\d{{1,3}}[ .-]?)(?:\(?\d{{1,4}}\)?[ .-]?){{2,5}}\d{{2,4}}{AFTER}"
            rf"|{BEFORE}(?<![.-])\(?\d{{3}}\)?[ .-]\d{{3}}[ .-]\d{{4}}(?!-){AFTER}"
        ),
    ),
)
"""Kinds and what they look like; between, what all of that look hold and is sooner looked for."""

WORD = "(?:[A-Z]{1,14}|[A-Z]?[a-z]{1,13})"  # of one case, as random letters are not for long
PLACEHOLDER = re.compile(
    rf"""(?:(?:[A-Z]{{0,6}}|[a-z]{{0,6}})[0-9]{{0,2}}[-_.]){{0,3}}  # sk-ant-api03-, dop_v1_
        (?:AKIA|ASIA|AIza|AC|SK|eyJ)?
        (?:
            (?P<x>[A-Za-z0-9])(?:(?P=x)|[-_.])*  # of one sign, or two: xxxxxxxx, 0000-xxxx
            (?:(?!(?P=x))(?P<y>[A-Za-z0-9])(?:(?P=x)|(?P=y)|[-_.])*)?
            | {WORD}(?:[-_]{WORD})*(?:[-_][0-9]{{1,2}})?[-_.]*  # YOUR_TOKEN_FROM_STEP_2
            | (?<=AKIA|ASIA)[A-Z0-9]{{9}}EXAMPLE  # those of Amazon's documentation
        )""",
    re.VERBOSE,
)
"""A key to be filled in: after what all of its kind begin with come no random signs."""
LONGEST_PLACEHOLDER = 200  # characters: where one goes on as a key, a stream still sees it begin

DOCUMENTATION = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),  # RFC 5737
        *("2001:db8::/32", "3fff::/20"),  # RFC 3849, RFC 9637
    )
)
NETWORK = re.compile(r"[0-9.]+\.0\.0|(?:[0-9A-Fa-f]{1,4}:){1,2}:")
"""How whole networks are written, larger than any household's: 10.0.0.0/8, fe80::/10."""

CONTEXT = 1200  # characters in which what stands before a detail excuses it
OF_A_NUMBER = "0123456789 .,:+()/-"  # in whose middle another would seem to begin


def leaked(text: str, prompt: Prompt, since: int = 0) -> str | None:
    """Return what kind of personal detail the text holds that nobody in the prompt wrote.

    However it is written there: numbers are compared by their digits, the rest without its case.
    Looked for is what begins at `since` or later, in the light of what stands before that.
    """
    before = max(0, since - CONTEXT)  # of a long text that is being written its end alone
    text = plain(text[before:])
    since -= before
    word = max(text.rfind(" ", 0, since), text.rfind("\n", 0, since)) + 1
    if word or not before:  # a key is looked at from its beginning, however long
        since = word
    since = len(text[:since].rstrip(OF_A_NUMBER))
    for kind, held, pattern in PERSONAL:
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
    """Return what of that which looks like one is one: by check digit, by range, by length.

    What only stands for one is none.
    """
    if kind == "a card number":
        return [match[start:stop] for start, stop in cards_in(match)]
    if kind == "a key" and _is_placeholder(match):
        return []
    if kind == "an IP address" and (not is_somebodys_address(match) or _is_documentation(match)):
        return []
    if kind == "a phone number" and not is_as_long_as_its_countrys(match):
        return []
    return [match]


def _is_placeholder(key: str) -> bool:
    return len(key) <= LONGEST_PLACEHOLDER and PLACEHOLDER.fullmatch(key) is not None


def _is_documentation(text: str) -> bool:
    """Say whether an address is one for examples, or a whole network: no machine has either."""
    address = ipaddress.ip_address(text)
    return NETWORK.fullmatch(text) is not None or any(address in one for one in DOCUMENTATION)


@lru_cache(maxsize=64)
def compiled(expressions: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Return the regular expressions, case ignored, . matching a new line too."""
    return tuple(re.compile(e, re.IGNORECASE | re.DOTALL) for e in expressions)
