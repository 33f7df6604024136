"""What one piece of feedback must be, and the name of every rule a row can break.

`check_event` stands at every door (API, chat, files): it refuses what could not be kept or never
mean anything. It lets through what is whole but useless for training (an empty completion, two
equal completions, two contexts): such rows are stored, and validation sets them aside under one
rule each, wherever they came from. What it does not judge: whether a text is true, kind or meant.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import NoReturn, get_args

from rlhf_pipeline.errors import FeedbackRefused
from rlhf_pipeline.records import Choice, Feedback, FeedbackKind, Message

LONGEST_PROMPT = 200_000  # characters, all messages together
LONGEST_TEXT = 100_000  # characters of a completion or a correction
LONGEST_COMMENT = 10_000
LONGEST_KEY = 200
LONGEST_RATER = 512  # characters of a person's name, as the sender gives it; `user` in the chat too
MOST_TAGS = 32
LONGEST_WORD = 40  # of a vote that a message shows
LONGEST_NAME = 64  # a tag, a criterion, a rater id, an agent id

CHOICES: tuple[Choice, ...] = get_args(Choice)
MEND = "mend the row and send it again"

AGENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Safe as a folder, a Dagster partition and a model's name."""


class Rule(StrEnum):
    """Every rule by the name that quarantine, API answers and reports use."""

    # a file's row cannot be read
    broken_json = "broken_json"
    not_an_object = "not_an_object"
    not_utf8 = "not_utf8"
    not_finite = "not_finite"
    line_too_long = "line_too_long"
    damaged_file = "damaged_file"
    # a row can be read but is not what its format says
    missing_field = "missing_field"
    unknown_field = "unknown_field"
    repeated_field = "repeated_field"
    wrong_type = "wrong_type"
    bad_time = "bad_time"
    other_agent = "other_agent"
    no_prompt = "no_prompt"
    orphan_message = "orphan_message"
    # one event contradicts what feedback is
    bad_agent = "bad_agent"
    bad_key = "bad_key"
    unknown_kind = "unknown_kind"
    unknown_source = "unknown_source"
    no_target = "no_target"
    two_targets = "two_targets"
    prompt_end = "prompt_end"
    value_missing = "value_missing"
    value_out_of_range = "value_out_of_range"
    bad_text = "bad_text"
    too_long = "too_long"
    # the store does not take it
    idempotency_conflict = "idempotency_conflict"
    unknown_interaction = "unknown_interaction"
    unknown_agent = "unknown_agent"
    # the row is kept, and set aside from training
    malformed_prompt = "malformed_prompt"
    empty_prompt = "empty_prompt"
    empty_completion = "empty_completion"
    empty_text = "empty_text"
    prompt_too_long = "prompt_too_long"
    prompt_unfit = "prompt_unfit"
    completion_too_long = "completion_too_long"
    garbled_text = "garbled_text"
    contexts_differ = "contexts_differ"
    identical_pair = "identical_pair"
    duplicate = "duplicate"
    contradiction = "contradiction"
    narrow_support = "narrow_support"


MEANINGS: Mapping[Rule, str] = {
    Rule.broken_json: "the line is not one JSON value",
    Rule.not_an_object: "the line is JSON, but not an object with named fields",
    Rule.not_utf8: "the line is not UTF-8 text",
    Rule.not_finite: "NaN or Infinity stands where a number is needed",
    Rule.line_too_long: "the row is longer than a reader holds in memory",
    Rule.damaged_file: "the file breaks off, its compression is damaged, or a quote in a table is "
    "not doubled; what came before is in",
    Rule.missing_field: "a field the format needs is not there",
    Rule.unknown_field: "a field our event format does not know, so perhaps a misspelt one; in a "
    "table a cell under no name",
    Rule.repeated_field: "a field stands twice in one object or table, under one name or two, so "
    "it may mean two things",
    Rule.wrong_type: "a field holds another type than the format says",
    Rule.bad_time: "a moment that is not ISO 8601 with its zone",
    Rule.other_agent: "the row names another agent than it was sent to",
    Rule.no_prompt: "a completion without the prompt it answers",
    Rule.orphan_message: "a message whose parent is not in its tree",
    Rule.bad_agent: "an agent id that is not 1 to 64 letters, digits, - and _, the first a letter "
    "or digit",
    Rule.bad_key: "an idempotency key that is empty or too long",
    Rule.unknown_kind: "a kind of feedback that does not exist",
    Rule.unknown_source: "a source other than human, model and code",
    Rule.no_target: "neither an interaction nor an inline prompt and completion",
    Rule.two_targets: "an interaction and inline texts at once: only one can be what was meant",
    Rule.prompt_end: "a prompt that does not end with a user's message",
    Rule.value_missing: "the value its kind needs is not there",
    Rule.value_out_of_range: "a value outside its kind's range",
    Rule.bad_text: "text with NUL or half a surrogate pair, which no database keeps",
    Rule.too_long: "a text over its length limit",
    Rule.idempotency_conflict: "a known idempotency key with another body",
    Rule.unknown_interaction: "an interaction nobody has seen",
    Rule.unknown_agent: "an agent nobody has named",
    Rule.malformed_prompt: "a stored prompt that is not a list of messages ending with the user's",
    Rule.empty_prompt: "the user's last message is blank",
    Rule.empty_completion: "a completion that is blank, or one side of a pair is",
    Rule.empty_text: "a correction that is blank",
    Rule.prompt_too_long: "a prompt longer than the settings allow for training",
    Rule.prompt_unfit: "roles in an order that a chat template of what is trained refuses",
    Rule.completion_too_long: "a completion longer than the settings allow for training",
    Rule.garbled_text: "text that is damaged, all one character, or hardly a letter or digit",
    Rule.contexts_differ: "the two completions of a pair answer different prompts",
    Rule.identical_pair: "both completions of a pair are the same, or look the same",
    Rule.duplicate: "the same row again from one origin, signed or of a file; the first one counts",
    Rule.contradiction: "the same voter prefers both completions of one pair over the other",
    Rule.narrow_support: "words whose success few raters carry decide the pair",
}
"""One line per rule; docs and the UI print these."""


def check_agent_id(agent_id: object, remedy: str = MEND) -> None:
    """Raise FeedbackRefused if it cannot name an agent."""
    if not isinstance(agent_id, str) or not AGENT_ID.fullmatch(agent_id):
        refuse(
            Rule.bad_agent,
            "agent_id as 1 to 64 letters, digits, - and _, the first a letter or digit",
            agent_id,
            remedy,
        )


def check_event(event: Feedback) -> None:
    """Raise FeedbackRefused, with the rule's name, if the event breaks a rule."""
    check_agent_id(event.agent_id)
    if not isinstance(event.kind, FeedbackKind):
        refuse(Rule.unknown_kind, f"a kind out of {', '.join(FeedbackKind)}", event.kind)
    if event.source not in ("human", "model", "code"):
        refuse(Rule.unknown_source, "a source out of human, model, code", event.source)
    if not 1 <= len(event.idempotency_key) <= LONGEST_KEY:
        refuse(
            Rule.bad_key,
            f"an idempotency key of 1 to {LONGEST_KEY} characters",
            event.idempotency_key,
        )
    _check_target(event)
    _check_value(event)
    _check_texts(event)
    if event.occurred_at is not None and event.occurred_at.tzinfo is None:
        refuse(Rule.bad_time, "a moment with its time zone", event.occurred_at)


def _check_target(event: Feedback) -> None:
    inline = event.prompt is not None or event.completion is not None
    if event.interaction_id is not None and inline:
        refuse(Rule.two_targets, "interaction_id or inline texts, not both", event.interaction_id)
    if event.interaction_id is None and (event.prompt is None or event.completion is None):
        found = "no interaction_id and no "
        found += "prompt" if event.prompt is None else "completion"
        refuse(Rule.no_target, "interaction_id, or prompt and completion", found)
    if event.prompt is not None:
        _check_prompt(event.prompt)
        if event.prompt[-1].role != "user":
            refuse(
                Rule.prompt_end, "a prompt whose last message is the user's", event.prompt[-1].role
            )
    if event.other_prompt is not None:  # where it may end is judged with the pair, by validation
        _check_prompt(event.other_prompt)
    if event.other_interaction_id is not None and (
        event.other_completion is not None or event.other_prompt is not None
    ):
        refuse(
            Rule.two_targets,
            "other_interaction_id or the other side inline, not both",
            event.other_interaction_id,
        )


def _check_prompt(prompt: object) -> None:
    if not isinstance(prompt, tuple) or not all(isinstance(m, Message) for m in prompt):
        refuse(Rule.wrong_type, "a prompt as a tuple of messages", type(prompt).__name__)
    if not prompt:
        refuse(Rule.prompt_end, "a prompt of at least one message", "none")
    for message in prompt:
        if message.role not in ("system", "user", "assistant"):
            refuse(Rule.wrong_type, "a role out of system, user, assistant", message.role)


def _check_value(event: Feedback) -> None:
    match event.kind:
        case FeedbackKind.thumbs:
            if _number(event) not in (0, 1):
                needed = "value 0 (down) or 1 (up) for thumbs"
                refuse(Rule.value_out_of_range, needed, event.number, _of_a_scale(event))
        case FeedbackKind.rating:
            if _number(event) not in (1, 2, 3, 4, 5):
                needed = "a whole value from 1 to 5 for a rating"
                refuse(Rule.value_out_of_range, needed, event.number, _of_a_scale(event))
        case FeedbackKind.score:
            if not 0 <= _number(event) <= 1:
                needed = "a value from 0.0 to 1.0 for a score"
                refuse(Rule.value_out_of_range, needed, event.number, _of_a_scale(event))
        case FeedbackKind.correction | FeedbackKind.comment:
            if not isinstance(event.text, str) or not event.text.strip():
                refuse(Rule.value_missing, f"the {event.kind}'s text", event.text)
        case FeedbackKind.preference:
            if event.choice is None:
                refuse(Rule.value_missing, "a preference's choice", None)
            if event.choice not in CHOICES:
                refuse(
                    Rule.value_out_of_range, f"a choice out of {', '.join(CHOICES)}", event.choice
                )
            if event.other_interaction_id is None and event.other_completion is None:
                refuse(Rule.value_missing, "a preference's other completion", None)
        case FeedbackKind.criteria:
            _check_criteria(event.criteria)
    if event.shown_first not in ("this", "other"):  # of every kind: it is stored with each
        refuse(Rule.value_out_of_range, "shown_first: this or other", event.shown_first)


def _of_a_scale(event: Feedback) -> str:
    """Return what to do about a number that may be of a scale of which others have passed."""
    number, as_score = _number(event), "rlhf ingest --set kind=score --map value=COLUMN"
    if event.kind is FeedbackKind.rating:
        scale = "1 to 10, the whole numbers from 1 to 5 of a file have passed as ratings"
        means = "--means 10=1 --means 9=0.89 and so on to --means 1=0"
        again = f"with every vote as a `score` from 0 to 1 ({as_score} {means})"
    elif number < 0:
        scale = "-1 to 1, the 0s of a file have passed as the worst vote"
        means = "--means -1=0 --means 0=0.5 --means 1=1"
        again = f"with every vote from 0 to 1, as with {means}"
        if event.kind is FeedbackKind.thumbs:
            without = "without the rows that say 0 and with --means -1=down"
            again = f"as scores ({as_score} {means}), or {without}"
    elif number <= 1 or number % 1:
        return MEND
    else:
        scale = "1 to 5, the 1s of a file have passed as the best vote"
        means = "--means 5=1 --means 4=0.75 and so on to --means 1=0"
        told = f", or with {means}" if event.kind is FeedbackKind.score else ""
        again = f"as ratings (rlhf ingest --set kind=rating --map value=COLUMN){told}"
    return (
        f"{MEND}; of a scale as {scale}: take it back (rlhf feedback withdraw --agent AGENT --file "
        f"NAME), and in again {again}"
    )


def _check_criteria(criteria: object) -> None:
    if not isinstance(criteria, Mapping) or not criteria:
        refuse(Rule.value_missing, "at least one criterion", criteria)
    for name, value in criteria.items():
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
            refuse(Rule.wrong_type, f"a criterion's name of 1 to {LONGEST_NAME} characters", name)
        check_text("a criterion's name", name, LONGEST_NAME)
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(Rule.wrong_type, f"a number for the criterion {name!r}", value)
        if not 0 <= value <= 1:
            refuse(Rule.value_out_of_range, f"{name!r} from 0.0 to 1.0", value)


def _number(event: Feedback) -> float:
    number = event.number
    if number is None:
        words = "up or down (1 or 0)" if event.kind is FeedbackKind.thumbs else "a number"
        refuse(Rule.value_missing, f"{words} as the {event.kind} value", None)
    if isinstance(number, bool) or not isinstance(number, int | float):
        refuse(Rule.wrong_type, f"a number as the {event.kind} value", number)
    if not math.isfinite(number):
        refuse(Rule.not_finite, f"a finite number as the {event.kind} value", number)
    return number


def _check_texts(event: Feedback) -> None:
    for name, prompt in (("prompt", event.prompt), ("other_prompt", event.other_prompt)):
        for message in prompt or ():
            check_text(name, message.content, LONGEST_PROMPT)
        total = sum(len(message.content) for message in prompt or ())
        if total > LONGEST_PROMPT:
            refuse(Rule.too_long, f"at most {LONGEST_PROMPT} characters of {name}", total)
    comment_like = event.kind is FeedbackKind.comment
    for name, text, limit in (
        ("completion", event.completion, LONGEST_TEXT),
        ("other_completion", event.other_completion, LONGEST_TEXT),
        ("text", event.text, LONGEST_COMMENT if comment_like else LONGEST_TEXT),
        ("comment", event.comment, LONGEST_COMMENT),
        ("idempotency_key", event.idempotency_key, LONGEST_KEY),
        ("interaction_id", event.interaction_id, 36),
        ("other_interaction_id", event.other_interaction_id, 36),
        ("rater_id", event.rater_id, LONGEST_NAME),
        ("origin", event.origin, 400),
        ("topic", event.topic, 200),
    ):
        if text is not None:
            check_text(name, text, limit)
    if len(event.tags) > MOST_TAGS:
        refuse(Rule.too_long, f"at most {MOST_TAGS} tags", len(event.tags))
    for tag in event.tags:
        check_text("a tag", tag, LONGEST_NAME)


def check_text(name: str, text: object, limit: int) -> None:
    """Raise FeedbackRefused, naming the field, for text that is too long or no database keeps."""
    if not isinstance(text, str):
        refuse(Rule.wrong_type, f"text for {name}", text)
    if len(text) > limit:
        refuse(Rule.too_long, f"at most {limit} characters of {name}", len(text))
    if "\x00" in text:
        refuse(Rule.bad_text, f"{name} without NUL", "NUL")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"needed whole characters in {name}, found half a surrogate pair; send UTF-8"
            raise FeedbackRefused(Rule.bad_text, message) from error


def refuse(rule: Rule, needed: str, found: object, remedy: str = MEND) -> NoReturn:
    """Raise FeedbackRefused with a message that says what was needed, found, and what to do."""
    shown = "nothing" if found is None else ascii(found)[:80]  # ascii: the reason can be stored
    raise FeedbackRefused(rule, f"needed {needed}, found {shown}; {remedy}")


def refuse_word(rule: Rule, needed: str, word: str, ours: str) -> NoReturn:
    """Raise FeedbackRefused for a word that is no vote to us, but may be one to who wrote it.

    The message shows the word itself where that prints, as it has to be told; `ours` names all that
    it may mean. One of them alone would be pasted as it stands, whatever the word means.
    """
    prints = word.isprintable() and 0 < len(word) <= LONGEST_WORD
    shown = repr(word) if prints else ascii(word)[:80]
    told = shlex.quote(f"{word if prints else 'WORD'}={ours}")
    raise FeedbackRefused(
        rule,
        f"needed {needed}, found {shown}; {MEND}, or, of a file, say which of these the word "
        f"means: rlhf ingest --means {told}",
    )
