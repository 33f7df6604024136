"""Rules around generation: what may be asked, and what may be said.

Each rule is a pattern or a count, cheap enough to run at every word. What they do not protect
against: whoever says an unsafe thing in words that are on no list, and personal details written
out in prose. They are a floor under the model's own manners, not a judge.
"""

from __future__ import annotations

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

LONGEST_DETAIL = 400  # characters of a text's end that are looked at as it grows
LONGEST_REPEATED = 8  # words


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
    text: str, prompt: Prompt, rules: GuardrailSettings, *, whole: bool
) -> Blocked | None:
    """Return the rule that a completion breaks, None where it may be shown.

    `whole` says that nothing follows: only then can it be empty.
    """
    if whole and not text.strip():
        return Blocked(Rail.completion_empty, "the model wrote nothing")
    if rules.max_completion_characters and len(text) > rules.max_completion_characters:
        return Blocked(
            Rail.completion_too_long, f"more than {rules.max_completion_characters} characters"
        )
    # As it grows, what is before its end has been looked at.
    if rules.pii and (found := leaked(text if whole else text[-LONGEST_DETAIL:], prompt)):
        return Blocked(Rail.personal_details, f"{found} that the request does not hold")
    if rules.max_repeats and (said := _repeats(text, rules.max_repeats)):
        return Blocked(Rail.repetition, said)
    return None


def certain(text: str) -> str:
    """Return the text without an end that may still become a personal detail."""
    since = max(0, len(text) - LONGEST_DETAIL)
    found = UNFINISHED.search(plain(text[since:]))  # of a long text its end alone, at every word
    return text if found is None else text[: since + found.start()]


def _repeats(text: str, most: int) -> str | None:
    """Say what the end of the text repeats more often than that: one to eight words in a row."""
    words = text[-2000:].lower().split()
    for size in range(1, LONGEST_REPEATED + 1):
        needed = size * (most + 1)
        if len(words) < needed:
            break
        tail = words[-needed:]
        if all(tail[i] == tail[i % size] for i in range(needed)):
            return f"the same {size} words more than {most} times in a row"
    return None
