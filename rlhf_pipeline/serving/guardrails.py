"""Rules around generation: what may be asked, and what may be said.

Each rule is a pattern or a count, cheap enough to run at every word. What they do not protect
against: whoever says an unsafe thing in words that are on no list, and personal details written
out in prose. They are a floor under the model's own manners, not a judge.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlhf_pipeline.feedback.privacy import RUN_ON, plain
from rlhf_pipeline.records import Prompt
from rlhf_pipeline.safety import compiled, leaked

if TYPE_CHECKING:
    from rlhf_pipeline.config import GuardrailSettings


class Rail(StrEnum):
    """The rules, by the name under which a block is recorded."""

    unsafe_request = "unsafe_request"
    prompt_empty = "prompt_empty"
    prompt_too_long = "prompt_too_long"
    prompt_unreadable = "prompt_unreadable"
    personal_details = "personal_details"
    repetition = "repetition"
    completion_empty = "completion_empty"
    completion_too_long = "completion_too_long"


@dataclass(frozen=True, slots=True)
class Blocked:
    """Which rule a text breaks, and how; `detail` quotes nothing that anybody wrote."""

    rail: Rail
    detail: str


UNFINISHED = re.compile(
    rf"(?:[^\s\d@_+./:{RUN_ON}-]*[\d@_+./:-][^\s{RUN_ON}]*|[+(\d][\d\s().+-]*)\Z"
)
"""The end of a text that may still become a personal detail: a word with a digit or a mark in it,
or a run of digits. A plain word goes out at once: an address cut off before its @ is none. Where
no blanks stand between words, the next letter ends one.
"""
LAST_WORD = re.compile(rf"[^\s{RUN_ON}]*\Z")

LONGEST_DETAIL = 400  # characters; what comes next belongs to none that begins before as many
LONGEST_REPEATED = 200  # characters: a line
COMPARED = 2000  # characters of a text's end in which something is looked for again
LONGEST_WORD = 72  # letters; what stands for a key or a hash (ffff) has 64 at most
LETTER = r"[^\W\d_\u3007\u30fc\uff70]"  # not East Asia's zero, nor ー, which also draws lines
BEGUN = re.compile(rf"(?<![^\W_]){LETTER}|[\U0001f300-\U0001f6ff\U0001f900-\U0001faff]")
"""A letter that begins a word (that of 0x00 does not), or a picture."""
UNSPACED = re.compile(rf"(?=[{RUN_ON}]){LETTER}")
"""A letter of a script that puts no blanks between words: what is said again begins anywhere."""


def input_block(prompt: Prompt, rules: GuardrailSettings) -> Blocked | None:
    """Return the rule that the prompt breaks, None where it may go to the model."""
    size = sum(len(message.content) for message in prompt)
    newest = prompt[-1].content if prompt else ""
    if not newest.strip():
        return Blocked(Rail.prompt_empty, "needed a message with words in it, found none")
    if prompt[-1].role != "user":  # an upstream would go on writing it, past the rules below
        return Blocked(
            Rail.prompt_unreadable,
            f"a prompt must end with a user message, found one that ends with {prompt[-1].role!r}; "
            "add the question",
        )
    if size > rules.max_prompt_characters:
        return Blocked(
            Rail.prompt_too_long,
            f"needed at most {rules.max_prompt_characters} characters, found {size}",
        )
    for number, pattern in enumerate(compiled(rules.unsafe_requests)):
        if pattern.search(newest):
            return Blocked(Rail.unsafe_request, f"matches unsafe_requests[{number}]")
    return None


def output_block(
    text: str, prompt: Prompt, rules: GuardrailSettings, *, whole: bool, looked_at: int = 0
) -> Blocked | None:
    """Return the rule that a completion breaks, None where it may be shown.

    `whole` says that nothing follows: only then can it be empty. `looked_at` characters at its
    beginning broke none before.
    """
    if whole and not text.strip():
        return Blocked(Rail.completion_empty, "the model wrote nothing")
    if rules.max_completion_characters and len(text) > rules.max_completion_characters:
        return Blocked(
            Rail.completion_too_long, f"more than {rules.max_completion_characters} characters"
        )
    if rules.pii and (found := leaked(text, prompt, max(0, looked_at - LONGEST_DETAIL))):
        return Blocked(Rail.personal_details, f"{found} that the request does not hold")
    if rules.max_repeats and (said := _repeats(text, rules.max_repeats)):
        return Blocked(Rail.repetition, said)
    return None


def certain(text: str) -> str:
    """Return the text without an end that may still become a personal detail."""
    since = max(0, len(text) - LONGEST_DETAIL)
    end = plain(text[since:])  # of a long text its end alone, at every word
    found = UNFINISHED.search(end)
    if found is None:
        return text
    # Digits and a blank may be a key's last: they are as uncertain as the word that they end.
    return text[: since + len(LAST_WORD.sub("", end[: found.start()]))]


def _repeats(text: str, most: int) -> str | None:
    """Say what the end of the text says more often than that in a row: words, up to a line of them.

    Numbers, tables' rules and ruling lines say nothing. Letters that come again within a word count
    where it is longer than any word.
    """
    end = "".join(f" {word}" for word in text[-COMPARED:].lower().split())
    for size in range(1, min(LONGEST_REPEATED, len(end) // (most + 1)) + 1):
        said = end[-size:]
        if end[-1 - size] != end[-1] or not end.endswith(said * (most + 1)):
            continue
        if said[0] == " " and BEGUN.search(said):
            return f"the same {said.count(' ')} words more than {most} times in a row"
        in_a_word = said.isalpha() and end.endswith(said * math.ceil(LONGEST_WORD / size))
        if in_a_word or UNSPACED.search(said):
            return f"the same {size} characters more than {most} times in a row"
    return None
