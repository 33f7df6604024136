"""One row of a known file format in, feedback events out. Pure: no files, no clock, no store.

| format | fields |
|---|---|
| events | `kind` (thumbs, rating, score, correction, preference, criteria, comment), `value`; the target: `interaction_id`, or `prompt` (text or messages) and `completion`; for a preference also `other_completion` or `other_interaction_id`, and `shown_first` (this, other); optional: `rater` (any text, hashed here) or `rater_id` (hashed already), `source`, `occurred_at`, `tags`, `comment`, `topic`, `idempotency_key`, `agent_id`, `other_prompt` |
| pairs | `chosen`, `rejected` (text, a message, or messages: what follows the prompt, or all of the conversation), `prompt` (text or messages; also `messages`, `conversations`, `question`); optional: `tie`, `idempotency_key`, `chosen_score` and `rejected_score` (also `score_chosen`, `score_rejected`; equal is a tie) |
| hh_rlhf | `chosen`, `rejected`: whole dialogues with "\\n\\nHuman:" and "\\n\\nAssistant:" turns, split at the last "\\n\\nAssistant:" |
| oasst | message trees (`message_tree_id`, `prompt`, nested `replies`), bare nested messages, or flat messages (`message_id`, `parent_id`, `text`, `role`), a tree's rows together; ranked siblings become pairs, +1 and -1 reactions thumbs |
| answers | `question`, `prediction 1`, `prediction 2` and so on (nine at most), `preference` (a number per pair), `feedback` with `corrected-prediction`: pairs with ties, and corrections |
| judgements | `prompt`, `completion_a`, `completion_b`, `preference` (a-is-better, a-is-slightly-better, tie, b-is-slightly-better, b-is-better), optional: `completion_a_is_acceptable` and `completion_b_is_acceptable` (yes, no): a preference, both bad where a tie is between two that are not acceptable, and thumbs |
| quality | `messages` ending with the assistant's, or `prompt` and `completion` (text, a message, or messages), or `text` holding a dialogue with turns as in hh_rlhf; and `quality` (0 to 1, a score) or `label` (true, false: thumbs), not both |

Whoever voted is `rater`, `annotator`, `evaluator`, `annotator_id`, `labeler`, `labeler_id` or
`worker_id` (any text, hashed here), or `rater_id` (hashed already): in pairs, hh_rlhf, judgements and
quality; in events `rater` or `rater_id` alone. Where they are told, pairs, hh_rlhf, judgements and
quality have `occurred_at`, `source`, `comment`, `topic` and `tags` as events do (answers the rater
and all but the `comment`, oasst the `source`), and quality an `idempotency_key` as pairs does.

Messages may stand in a text as JSON, as a column of texts has them, but for an event's answer, which
is text; and a text prompt that begins with "\\n\\nHuman:" and ends with "\\n\\nAssistant:" has turns
as in hh_rlhf.

`text` without turns has no prompt, so its quality says nothing a reward model could condition on: it
is refused as `no_prompt`. Fields a format does not name are ignored, but in our own events an
unknown field is refused: a misspelt one would lose what somebody said.

Sources of the formats: arXiv:2204.05862 (HH-RLHF), arXiv:2304.07327 (OASST), arXiv:2306.01693 (answers:
fine-grained feedback), arXiv:2306.04751 (judgements: how the Tulu models were compared by people).
"""  # noqa: E501 - table rows cannot be broken

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from datetime import MAXYEAR, MINYEAR, UTC, date, datetime, time, tzinfo
from itertools import combinations
from typing import Any, get_args

from rlhf_pipeline.errors import FeedbackRefused
from rlhf_pipeline.feedback.rules import (
    CHOICES,
    LONGEST_RATER,
    MEND,
    Rule,
    check_text,
    refuse,
    refuse_word,
)
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Message,
    Prompt,
    Role,
    Source,
    as_messages,
    hash_rater,
    hashed,
)

Values = Mapping[str, Any]

ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
VALUE_FIELD: Mapping[FeedbackKind, str] = {
    FeedbackKind.thumbs: "number",
    FeedbackKind.rating: "number",
    FeedbackKind.score: "number",
    FeedbackKind.correction: "text",
    FeedbackKind.comment: "text",
    FeedbackKind.preference: "choice",
    FeedbackKind.criteria: "criteria",
}
SOURCES: tuple[Source, ...] = get_args(Source)
VALUE_NAMES = ("value", *dict.fromkeys(VALUE_FIELD.values()))
EVENT_TEXTS = (
    "interaction_id",
    "completion",
    "other_interaction_id",
    "other_completion",
    "comment",
    "topic",
)
ANSWERS = ("completion", "other_completion")
EVENT_FIELDS = {
    *EVENT_TEXTS,
    *("agent_id", "kind", "value", "number", "text", "criteria", "choice", "shown_first"),
    *("prompt", "other_prompt", "rater", "rater_id", "source", "occurred_at", "tags"),
    "idempotency_key",
}
STORE_FIELDS = {
    "feedback_id",
    "seq",
    "origin",
    "received_at",
    "target",
    "voter",
}  # our own, ignored
SIGNED = ("rater", "annotator", "evaluator")
LABELLED = ("annotator_id", "labeler", "labeler_id", "worker_id")
"""The fields that may name the rater, as the sender does; and those by which labelling tools do,
where no other is there: they are passed over where they hold anything but a name."""
WHO = (*SIGNED, *LABELLED, "rater_id")
PROMPTS = ("prompt", "messages", "conversations", "question")  # the first that is there is it
VOTED = ("quality", "label")
BESIDE = ("occurred_at", "source", "comment", "topic", "tags")
"""Fields of `events` that other formats hold where they are told: a data set's own source or tags
say something else, and whose judgement it is they would say wrongly."""
INSTEAD = (PROMPTS, WHO, VOTED)
"""Fields of which each may say what another would: where one is told, the untold are not read."""
SCORES = ("chosen_score", "rejected_score", "score_chosen", "score_rejected")
JUDGED = tuple(f"completion_{side}{what}" for side in "ab" for what in ("", "_is_acceptable"))
NUMBER = re.compile(r"[+-]?[0-9]{1,9}(?:[.,][0-9]{1,9})?")
COUNT = re.compile(r"[0-9]{9}")  # one digit more than a date, where a T or a blank has to stand
HASHED_RATER = re.compile(r"[0-9a-f]{32}")
TURN = re.compile(r"\n\n(Human|Assistant):")
FIRST_TURN, LAST_TURN = "\n\nHuman:", "\n\nAssistant:"
# Messages as Python shows them, and so pandas in a CSV file: refused, as nobody's format. It is the
# first itself that has to say who speaks or what is said, and not something within it.
IN_PYTHON = re.compile(
    r"\s*(?:\[\s*)?\{(?=[^{}]*'(?:role|content|from|value|tool_calls)': )"
    rf"(?=.*'(?:role|from)': '(?:{'|'.join(ROLES)})')"
    r"""(?=.*'(?:content|value|tool_calls)': (?:['"[]|None)).*\}\s*(?:\]\s*)?""",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it came from."""

    values: Values  # what is read of it
    whole: Values
    agent_id: str
    origin: str
    source: Source  # whose judgement the file holds, where the row does not say
    zone: tzinfo | None = None  # of a moment that has none
    told: Set[str] = frozenset()  # the fields that somebody said the file has, or its format has

    @property
    def key(self) -> str:
        """The idempotency key of a row without one: the same row again is the same key."""
        return "row:" + hashed(self.agent_id, canonical(self.whole))

    def event(self, kind: FeedbackKind, **fields: Any) -> Feedback:
        """Return an event of this row, with what is told of BESIDE where that is not given."""
        if "idempotency_key" not in fields:
            fields["idempotency_key"] = self.key
        fields = {**_beside(self), **fields}
        return Feedback(agent_id=self.agent_id, kind=kind, origin=self.origin, **fields)

    def said(self, kind: FeedbackKind, **fields: Any) -> Feedback:
        """Return one of several events of this row; its key follows from what it says.

        A comment goes with the one that it is given for, or would be said of each.
        """
        fields.setdefault("comment", None)
        event = self.event(kind, idempotency_key="", **fields)
        return replace(
            event, idempotency_key="said:" + hashed(self.agent_id, canonical(to_row(event)))
        )


@dataclass(frozen=True, slots=True)
class Format:
    """A format: how its rows are known, and what they mean."""

    name: str
    matches: Callable[[Values], bool]
    events: Callable[[Row], Iterable[Feedback]]
    fields: frozenset[str] = frozenset()  # that it reads, where its rows may name their rater
    told: frozenset[str] = frozenset(BESIDE)  # that it reads where they are told

    def row(self, values: Values, told: Set[str], **where: Any) -> Row:
        """Return a row of it: nothing is read in whose place another field of it is told."""
        told = (told & (self.fields | self.told)) | (self.fields & frozenset(BESIDE))
        instead = {name for names in INSTEAD if not told.isdisjoint(names) for name in names}
        unread = instead - told
        read = {n: v for n, v in values.items() if n not in unread} if unread else values
        return Row(read, values, told=told, **where)


# -- our own events -----------------------------------------------------------------------------


def events(row: Row) -> Iterator[Feedback]:
    """Yield the one event an `events` row holds."""
    values = row.values
    unknown = sorted(values.keys() - EVENT_FIELDS - STORE_FIELDS)
    if unknown:
        refuse(Rule.unknown_field, f"fields out of {', '.join(sorted(EVENT_FIELDS))}", unknown)
    if values.get("agent_id", row.agent_id) != row.agent_id:
        own = ascii(row.agent_id)
        remedy = f"{MEND}, or, of a file that is meant for it: rlhf ingest --set agent_id={own}"
        refuse(Rule.other_agent, f"rows of agent {own}", values["agent_id"], remedy)
    kind = _kind(values)
    fields: dict[str, Any] = {name: _text(values, name) for name in EVENT_TEXTS}
    for name in ANSWERS:
        if (text := fields[name]) is not None:
            fields[name] = _next_turn(values, text)
    fields[VALUE_FIELD[kind]] = _value(values, kind)
    for name in ("prompt", "other_prompt"):
        if values.get(name) is not None:
            fields[name] = messages_of(values[name], name)
    first = values.get("shown_first")
    fields["shown_first"] = "this" if first is None else first
    fields["rater_id"] = _rater(row)
    if (key := _text(values, "idempotency_key")) is not None:
        fields["idempotency_key"] = key
    yield row.event(kind, **fields)


def event_of(values: Values, agent_id: str, origin: str) -> Feedback:
    """Return the event of an `events` row that came by itself, a person's where it says nothing."""
    row = EVENTS.row(values, frozenset(), agent_id=agent_id, origin=origin, source="human")
    [event] = events(row)
    return event


def to_row(event: Feedback) -> dict[str, Any]:
    """Return the `events` row of an event: reading it back gives the same event."""
    row: dict[str, Any] = {
        "agent_id": event.agent_id,
        "kind": event.kind.value,
        "idempotency_key": event.idempotency_key,
        "value": getattr(event, VALUE_FIELD[event.kind]),
        "shown_first": event.shown_first,
        "rater_id": event.rater_id,
        "source": event.source,
        "tags": list(event.tags),
    }
    if event.criteria is not None:
        row["value"] = dict(event.criteria)
    for name in EVENT_TEXTS:
        row[name] = getattr(event, name)
    for name in ("prompt", "other_prompt"):
        prompt: Prompt | None = getattr(event, name)
        if prompt is not None:
            row[name] = as_messages(prompt)
    if event.occurred_at is not None:
        row["occurred_at"] = event.occurred_at.isoformat()
    return {name: value for name, value in row.items() if value is not None}


def _kind(values: Values) -> FeedbackKind:
    try:
        return FeedbackKind(values["kind"])
    except KeyError:
        refuse(Rule.missing_field, "the field kind", None)
    except ValueError:
        refuse(Rule.unknown_kind, f"a kind out of {', '.join(FeedbackKind)}", values["kind"])


def _value(values: Values, kind: FeedbackKind) -> Any:
    given = [name for name in VALUE_NAMES if values.get(name) is not None]
    if len(given) > 1:  # one of them would be lost
        remedy = f"{MEND}, or, of a file, say which column is it: rlhf ingest --map value=COLUMN"
        refuse(Rule.repeated_field, f"one value, or as many rows, of {kind}", given, remedy)
    value = values.get("value", values.get(VALUE_FIELD[kind]))
    if kind is FeedbackKind.thumbs:
        if isinstance(value, str):
            value = {"up": 1.0, "down": 0.0}.get(value.lower(), value)
        elif isinstance(value, bool):
            value = float(value)
        if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
            refuse(Rule.wrong_type, "up or down (1 or 0, and no text) as the thumbs value", value)
        if isinstance(value, str):
            refuse_word(
                Rule.wrong_type, "up or down (1 or 0) as the thumbs value", value, "up|down"
            )
    if kind is FeedbackKind.preference and isinstance(value, str) and value not in CHOICES:
        needed = f"a choice out of {', '.join(CHOICES)}"
        refuse_word(Rule.value_out_of_range, needed, value, "|".join(CHOICES))
    if value is not None and VALUE_FIELD[kind] == "number":
        if isinstance(value, str) and not _is_number(value):
            span = "1 to 5" if kind is FeedbackKind.rating else "0 to 1"
            if value.rstrip().endswith("%"):  # one of a hundred: nobody tells what each means
                remedy = f"{MEND}, as a score (0.8 for 80%)"
                refuse(Rule.wrong_type, f"{kind} value as a number, {span}", value, remedy)
            refuse_word(Rule.wrong_type, f"{kind} value as a number, {span}", value, span)
        return _number(value, f"{kind} value")
    if kind is FeedbackKind.criteria and isinstance(value, str):
        try:  # as our own data sets write it: names that differ fit no column type
            value = json.loads(value)
        except (ValueError, RecursionError):
            refuse(Rule.wrong_type, "criteria as an object of numbers", value)
    if kind is FeedbackKind.criteria and isinstance(value, dict):
        return {
            name: _number(v, f"criterion {name[:64]!r}")
            for name, v in value.items()
            if v is not None  # not judged: a column of Parquet has every row's names in each
        }
    return value


def _beside(row: Row) -> dict[str, Any]:
    """Return what a row says of BESIDE, of what is told."""
    values = {name: row.values.get(name) for name in BESIDE if name in row.told}
    source = values.get("source")
    if isinstance(source, str) and source not in SOURCES:
        needed = f"a source out of {', '.join(SOURCES)}"
        refuse_word(Rule.unknown_source, needed, source, "|".join(SOURCES))
    return {
        "source": row.source if source is None else source,
        "occurred_at": _moment(values, row.zone),
        "comment": _text(values, "comment"),
        "topic": _text(values, "topic"),
        "tags": _tags(values),
    }


def _moment(values: Values, zone: tzinfo | None) -> datetime | None:
    told = values.get("occurred_at")
    if told is None:
        return None
    if isinstance(told, datetime):  # a data set's column may hold moments
        moment = told
    elif isinstance(told, date):  # or days
        moment = datetime.combine(told, time())
    else:
        try:
            if COUNT.match(told):  # of milliseconds, which as ISO 8601 may be the year 1770
                raise ValueError(told)
            moment = datetime.fromisoformat(told)
        except (ValueError, TypeError):  # a number may count seconds or milliseconds
            which = "with its zone" if zone is None else "(2026-05-01 12:00)"
            remedy = f"{MEND}; write a count of seconds or milliseconds as 2026-05-01T12:00:00Z"
            refuse(Rule.bad_time, f"occurred_at as ISO 8601 {which}", told, remedy)
    if moment.tzinfo is None and zone is None:
        remedy = f"{MEND}, or say of which zone such moments are: rlhf ingest --zone Europe/Berlin"
        refuse(Rule.bad_time, "occurred_at with its zone, such as a final Z", told, remedy)
    try:
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=zone)
        moment = moment.astimezone(UTC)
        if MINYEAR < moment.year < MAXYEAR:  # else in a zone it is of no year that there is
            return moment
    except (OverflowError, ValueError):  # nanoseconds reach from 1677 to 2262
        pass
    refuse(Rule.bad_time, f"a moment after the year {MINYEAR} and before {MAXYEAR}", told)


def _tags(values: Values) -> tuple[str, ...]:
    tags = values.get("tags")
    if tags is None:
        return ()
    if not isinstance(tags, list):
        refuse(Rule.wrong_type, "a list of tags", tags)
    return tuple(tags)


# -- pairs --------------------------------------------------------------------------------------


def pairs(row: Row) -> Iterator[Feedback]:
    """Yield the preference a `pairs` row holds."""
    values = row.values
    given = _prompt(values)
    context, chosen = _side(values, "chosen", given)
    other_context, rejected = _side(values, "rejected", given)
    yield _preference(row, (context, chosen), (other_context, rejected), tie=_is_tie(values))


def hh_rlhf(row: Row) -> Iterator[Feedback]:
    """Yield the preference two whole dialogues hold."""
    chosen, rejected = (
        split_dialogue(_needed_text(row.values, name), name) for name in ("chosen", "rejected")
    )
    yield _preference(row, chosen, rejected, tie=False)


def split_dialogue(text: str, name: str) -> tuple[Prompt, str]:
    """Return prompt and completion of a dialogue, split at its last assistant's turn.

    Each message is stripped of the blanks around it, which are the format's, not the speaker's.
    A dialogue whose last turn is the user's is refused: those words are nobody's completion.
    """
    context, found, completion = text.rpartition(LAST_TURN)
    before, *turns = TURN.split(context)
    if not found or not turns or before.strip():
        refuse(Rule.no_prompt, f"{name} as \\n\\nHuman: ... \\n\\nAssistant: ...", text[:40])
    if TURN.search(completion):
        refuse(Rule.wrong_type, f"{name} ending with the assistant's message", "user")
    roles = ("user" if who == "Human" else "assistant" for who in turns[::2])
    prompt = tuple(Message(ROLES[r], t.strip()) for r, t in zip(roles, turns[1::2], strict=True))
    return prompt, completion.strip()


def _awaits_a_turn(prompt: object) -> bool:
    """Say whether a prompt is a dialogue up to where the assistant's answer would follow."""
    return (
        isinstance(prompt, str)
        and prompt.startswith(FIRST_TURN)
        and prompt.rstrip().endswith(LAST_TURN)
    )


def _next_turn(values: Values, answer: str) -> str:
    """Return an answer; to a dialogue, without the blanks around it, which are the format's."""
    follows = any(_awaits_a_turn(values.get(name)) for name in PROMPTS)
    return answer.strip() if follows else answer


def _preference(
    row: Row, chosen: tuple[Prompt, str], rejected: tuple[Prompt, str], *, tie: bool
) -> Feedback:
    """Return the event; where the contexts differ each side keeps its own.

    `prompt` must end with the user's message, so of two contexts the one that does is put there.
    """
    this, other = chosen, rejected
    if this[0] != other[0] and this[0][-1].role != "user":
        this, other = other, this
    choice = "tie" if tie else "left" if this is chosen else "right"
    return row.event(
        FeedbackKind.preference,
        prompt=this[0],
        completion=this[1],
        other_completion=other[1],
        other_prompt=other[0] if other[0] != this[0] else None,
        choice=choice,
        rater_id=_rater(row),
        idempotency_key=_own_key(row),
    )


def _own_key(row: Row) -> str:
    told = "idempotency_key" in row.told
    key = _text(row.values, "idempotency_key") if told else row.values.get("idempotency_key")
    return key if isinstance(key, str) and key.strip() else row.key


def _prompt(values: Values) -> Prompt:
    """Return the prompt the row gives for both sides; empty where it gives none."""
    for name in PROMPTS:
        if values.get(name) is not None:
            return messages_of(values[name], name)
    return ()


def _side(values: Values, name: str, given: Prompt) -> tuple[Prompt, str]:
    """Return one side's context and completion.

    Formats: TRL's documentation, "Dataset formats", preference and unpaired preference.
    """
    value = values.get(name)
    if isinstance(value, str):
        value = _messages_in(value, name) or value
    if isinstance(value, str):
        context, completion = given, _next_turn(values, value)
    else:
        *before, last = messages_of([value] if isinstance(value, dict) else value, name)
        if last.role != "assistant":
            refuse(Rule.wrong_type, f"{name} ending with the assistant's message", last.role)
        context, completion = _context(tuple(before), given, name), last.content
    if not context:
        refuse(Rule.no_prompt, f"prompt, or {name} with its context", None)
    return context, completion


def _context(before: Prompt, given: Prompt, name: str) -> Prompt:
    """Return what a side's answer follows: the messages before it, after the given prompt or alone.

    A side in which the prompt stands, but for an answer at the prompt's end, is the whole
    conversation. One that begins with who may speak next goes on with the prompt. Of one that may
    be both, unless it begins with the prompt, or neither nobody can tell what was answered.
    """
    if not before or not given:
        return before or given
    said, asked = ([(m.role, m.content.strip()) for m in some] for some in (before, given))
    while len(asked) > 1 and asked[-1][0] == "assistant":
        asked.pop()
    places = [n for n in range(len(said)) if said[n : n + len(asked)] == asked]
    goes_on = before[0].role not in ("system", given[-1].role)
    if 0 in places or bool(places) != goes_on:
        return before if places else (*given, *before)
    found = "the prompt further down" if places else f"{before[0].role} after {given[-1].role}"
    needed = f"{name} that begins with the prompt, or goes on after it"
    remedy = f"{MEND}, without the prompt where {name} is the whole conversation"
    refuse(Rule.repeated_field, needed, found, remedy)


def _is_tie(values: Values) -> bool:
    tie = values.get("tie", False)
    if not isinstance(tie, bool | None):
        refuse(Rule.wrong_type, "tie as true or false", tie)
    scores = []
    for side in ("chosen", "rejected"):
        score = values.get(f"{side}_score", values.get(f"score_{side}"))
        if score is not None:
            scores.append(_number(score, f"{side}_score"))
    if len(scores) == 2 and scores[0] < scores[1]:
        refuse(Rule.value_out_of_range, "chosen_score not below rejected_score", scores)
    return bool(tie) or (len(scores) == 2 and scores[0] == scores[1])


# -- ranked trees -------------------------------------------------------------------------------


def oasst(row: Row) -> Iterator[Feedback]:
    """Yield every pair of ranked sibling answers and every message's reactions in a tree.

    Rank 0 is best. Keys follow from what an event says, so a tree and its flat messages give the
    same events. Reactions come as counts, without raters: a message's are one unsigned vote, the
    majority's, and an even split says nothing. Deleted messages are left out with their replies.
    """
    root = row.values["prompt"] if isinstance(row.values.get("prompt"), dict) else row.values
    path: tuple[Message, ...] = ()
    waiting: list[tuple[Any, tuple[Message, ...]]] = [(root, path)]
    while waiting:
        node, before = waiting.pop()
        if not isinstance(node, dict):
            refuse(Rule.wrong_type, "a message as an object", node)
        if node.get("deleted") is True:
            continue
        path = (*before, Message(_role(node.get("role")), _needed_text(node, "text")))
        replies = node.get("replies") or []
        if not isinstance(replies, list):
            refuse(Rule.wrong_type, "replies as a list", replies)
        waiting.extend((reply, path) for reply in reversed(replies))
        if path[-1].role == "user":
            for better, worse in combinations(_ranked(replies), 2):
                choice = "tie" if better["rank"] == worse["rank"] else "left"
                yield row.said(
                    FeedbackKind.preference,
                    prompt=path,
                    completion=_needed_text(better, "text"),
                    other_completion=_needed_text(worse, "text"),
                    choice=choice,
                )
        vote = _reactions(node)
        if vote is not None and path[-1].role == "assistant" and before:
            yield row.said(
                FeedbackKind.thumbs, prompt=before, completion=path[-1].content, number=vote
            )


def _ranked(replies: list[Any]) -> list[Values]:
    ranked = [
        reply
        for reply in replies
        if isinstance(reply, dict)
        and reply.get("rank") is not None
        and reply.get("deleted") is not True
        and _role(reply.get("role")) == "assistant"
    ]
    return sorted(ranked, key=lambda r: (_number(r["rank"], "rank"), str(r.get("text"))))


def _reactions(node: Values) -> float | None:
    emojis = node.get("emojis") or {}
    if isinstance(emojis, dict) and isinstance(emojis.get("name"), list):  # as the hub's rows have
        names, counts = map(str, emojis["name"]), emojis.get("count") or []
        emojis = dict(zip(names, counts, strict=False)) if isinstance(counts, list) else counts
    if not isinstance(emojis, dict):
        refuse(Rule.wrong_type, "emojis as counts by name", emojis)
    up, down = (_number(emojis.get(name) or 0, f"emoji {name}") for name in ("+1", "-1"))
    return None if up == down else float(up > down)


# -- several answers to one question ------------------------------------------------------------


def answers(row: Row) -> Iterator[Feedback]:
    """Yield every judged pair of a question's answers, and the correction of the first answer.

    `preference` holds one number per pair in the order (1, 2), (1, 3), ..., (2, 3), ...: 0 for a
    tie, 1 where the first is better, 2 where the second is. The passages the answers drew on are no
    part of the prompt.
    """
    values = row.values
    rater = None if row.told.isdisjoint(WHO) else _rater(row)
    prompt = (Message("user", _needed_text(values, "question")),)
    names = [name for name in (f"prediction {i}" for i in range(1, 10)) if name in values]
    pairs_of = list(combinations([_needed_text(values, name) for name in names], 2))
    judged = values.get("preference")
    if not isinstance(judged, list) or len(judged) != len(pairs_of):
        refuse(Rule.wrong_type, f"preference as a list of {len(pairs_of)} numbers", judged)
    for (first, second), number in zip(pairs_of, judged, strict=True):
        if isinstance(number, bool) or not isinstance(number, int) or number not in (0, 1, 2):
            refuse(Rule.value_out_of_range, "0 (tie), 1 (first) or 2 (second)", number)
        yield row.said(
            FeedbackKind.preference,
            prompt=prompt,
            completion=first,
            other_completion=second,
            choice=("tie", "left", "right")[number],
            rater_id=rater,
        )
    remarks = values.get("feedback")
    corrected = remarks.get("corrected-prediction") if isinstance(remarks, dict) else None
    if isinstance(corrected, str) and corrected.strip():
        yield row.said(
            FeedbackKind.correction,
            prompt=prompt,
            completion=_needed_text(values, "prediction 1"),
            text=corrected,
            rater_id=rater,
        )


# -- judgements of two models' answers ----------------------------------------------------------

LEVELS = {
    "a-is-better": ("left", ()),
    "a-is-slightly-better": ("left", ("slightly",)),
    "tie": ("tie", ()),
    "b-is-slightly-better": ("right", ("slightly",)),
    "b-is-better": ("right", ()),
}
"""What is said -> the choice, and the tag that keeps how strongly."""
ACCEPTABLE = {"yes": 1.0, "no": 0.0}


def judgements(row: Row) -> Iterator[Feedback]:
    """Yield the preference a rater gave between two answers, and their thumbs for each."""
    values = row.values
    prompt = messages_of(values.get("prompt"), "prompt")
    sides = [_needed_text(values, name) for name in ("completion_a", "completion_b")]
    level = _needed_text(values, "preference")
    if level not in LEVELS:
        needed = f"preference out of {', '.join(LEVELS)}"
        refuse_word(Rule.value_out_of_range, needed, level, "|".join(LEVELS))
    choice, levels = LEVELS[level]
    tags = (*levels, *(_tags(values) if "tags" in row.told else ()))
    rater = _rater(row)
    accepted = [_acceptable(values, f"completion_{side}_is_acceptable") for side in "ab"]
    yield row.said(
        FeedbackKind.preference,
        prompt=prompt,
        completion=sides[0],
        other_completion=sides[1],
        choice="both_bad" if choice == "tie" and accepted == [0.0, 0.0] else choice,
        tags=tags,
        comment=_text(values, "comment"),
        rater_id=rater,
    )
    for text, number in dict(zip(sides, accepted, strict=True)).items():
        if number is not None:
            yield row.said(
                FeedbackKind.thumbs, prompt=prompt, completion=text, number=number, rater_id=rater
            )


def _acceptable(values: Values, name: str) -> float | None:
    said = _text(values, name)
    if said is not None and said not in ACCEPTABLE:
        refuse(Rule.value_out_of_range, f"{name} as yes or no", said)
    return None if said is None else ACCEPTABLE[said]


# -- quality and labels -------------------------------------------------------------------------


ANSWERED = ("messages", "completion", "text")  # the first that is there has the answer


def quality(row: Row) -> Iterator[Feedback]:
    """Yield the score or thumbs a `quality` row holds."""
    values = row.values
    told = [name for name in ANSWERED if name in row.told]
    usual = "text" if values.get("prompt") is None else "completion"
    there = (name for name in told or ANSWERED if values.get(name) is not None)
    answered = next(there, (told or [usual])[0])
    if answered == "messages":
        prompt, completion = _last_answer(messages_of(values.get("messages"), "messages"))
    elif answered == "completion":
        prompt, completion = _side(values, "completion", _prompt(values))
    else:
        prompt, completion = split_dialogue(_needed_text(values, "text"), "text")
    given = [name for name in VOTED if values.get(name) is not None]
    if len(given) > 1:  # one of them would be lost
        ways = "--map label=label or --map quality=quality"
        remedy = f"{MEND}, or, of a file, say which is the vote: rlhf ingest {ways}"
        refuse(Rule.repeated_field, "quality or label, or as many rows", given, remedy)
    if values.get("quality") is not None:
        kind, number = FeedbackKind.score, _number(values["quality"], "quality")
    else:
        label = values.get("label")
        if isinstance(label, str | int | float) and not isinstance(label, bool):
            refuse_word(Rule.wrong_type, "label as true or false", str(label), "true|false")
        if not isinstance(label, bool):
            refuse(Rule.wrong_type, "quality from 0 to 1, or label as true or false", label)
        kind, number = FeedbackKind.thumbs, float(label)
    yield row.event(
        kind,
        prompt=prompt,
        completion=completion,
        number=number,
        rater_id=_rater(row),
        idempotency_key=_own_key(row) if "idempotency_key" in row.told else row.key,
    )


def _last_answer(messages: Prompt) -> tuple[Prompt, str]:
    *before, last = messages
    if last.role != "assistant":
        refuse(Rule.wrong_type, "messages ending with the assistant's", last.role)
    if not before:
        refuse(Rule.no_prompt, "a user's message before the assistant's", None)
    return tuple(before), last.content


# -- fields -------------------------------------------------------------------------------------


def messages_of(value: Any, name: str) -> Prompt:
    """Return a text as one user's message, or a list of messages, or a text of them, as it is."""
    if isinstance(value, str):
        value = _messages_in(value, name) or value
    if isinstance(value, str):
        if _awaits_a_turn(value):
            return split_dialogue(value.rstrip(), name)[0]
        return (Message("user", value),)
    if not isinstance(value, list) or not value:
        refuse(Rule.wrong_type, f"{name} as text or a list of messages", value)
    messages = []
    for item in value:
        if not isinstance(item, dict):
            refuse(Rule.wrong_type, f"{name}: each message as an object", item)
        content = item.get("content", item.get("value"))
        if isinstance(content, list):
            content = _joined(content)
        if not isinstance(content, str):
            refuse(Rule.wrong_type, f"{name}: each message's content as text", item.get("content"))
        messages.append(Message(_role(item.get("role", item.get("from"))), content))
    return tuple(messages)


def _messages_in(text: str, name: str) -> list[Any] | None:
    """Return the messages, or the one, that a text is as JSON; None where it is no such text.

    Where one of them is a message so are all that somebody says, though they cannot be taken.
    """
    if IN_PYTHON.fullmatch(text):
        raise FeedbackRefused(
            Rule.wrong_type,
            f"needed {name} as text or a list of messages, found messages written as Python text; "
            "write them as JSON",
        )
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    items = said if isinstance(said, list) else [said]
    return items if all(map(_has_a_role, items)) and any(map(is_message, items)) else None


def is_message(item: Any) -> bool:
    """Say whether it can be but a message: an answer may be JSON of something else."""
    if not isinstance(item, dict):
        return False
    # Where a tool is called nothing need be said.
    ways = (("role", "content"), ("from", "value"), ("role", "tool_calls"))
    return any(
        isinstance(role := item.get(who), str)
        and role in ROLES
        and said in item
        and isinstance(item[said], str | list | None)
        for who, said in ways
    )


def _has_a_role(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role", item.get("from")), str)


def _joined(parts: list[Any]) -> str | None:
    """Return the text of a message in parts, as the chat joins them; None where one is no text."""
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    said = [text for text in texts if isinstance(text, str)]
    return "\n".join(said) if said and len(said) == len(texts) else None


def _role(value: Any) -> Role:
    role = ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        refuse(Rule.wrong_type, f"a role out of {', '.join(ROLES)}", value)
    return role


def _rater(row: Row) -> str | None:
    """Return the hashed rater, or None where nobody signed."""
    ready, named = row.values.get("rater_id"), _named_rater(row)
    if ready is None:
        return named or _labeller(row)
    if not isinstance(ready, str) or not HASHED_RATER.fullmatch(ready):
        refuse(Rule.wrong_type, "rater_id as 32 hex digits; else name it rater", type(ready))
    if named not in (None, ready):
        refuse(Rule.repeated_field, "one person as rater and as rater_id, or one field", "two")
    return ready


def _named_rater(row: Row) -> str | None:
    rater = next((row.values[name] for name in SIGNED if row.values.get(name) is not None), None)
    if rater is None or (isinstance(rater, str) and not rater.strip()):  # a cell of blanks
        return None
    if (name := _as_name(rater)) is None:
        refuse(Rule.wrong_type, "rater as text", type(rater))
    check_text("rater", name, LONGEST_RATER)
    return hash_rater(row.agent_id, name)


def _labeller(row: Row) -> str | None:
    for name in map(_as_name, map(row.values.get, LABELLED)):
        if name is not None and name.strip():
            check_text("rater", name, LONGEST_RATER)
            return hash_rater(row.agent_id, name)
    return None


def _as_name(value: Any) -> str | None:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # pandas has 7 as 7.0 beside an empty cell; beyond, two may be one
    return None if isinstance(value, bool) or not isinstance(value, str | int) else str(value)


def _text(values: Values, name: str) -> str | None:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        refuse(Rule.wrong_type, f"{name} as text", value)
    return value


def _needed_text(values: Values, name: str) -> str:
    text = _text(values, name)
    if text is None:
        refuse(Rule.missing_field, f"the field {name}", None)
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return NUMBER.fullmatch(text.strip()) is not None
    return True


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(Rule.wrong_type, f"{name} as a number", value)
    try:
        return float(value)
    except OverflowError:
        refuse(Rule.value_out_of_range, f"{name} that fits a number", "more digits")


def canonical(values: Values) -> str:
    """Return the one JSON text of the values, whatever the order of their fields."""
    return json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)


# -- the table ----------------------------------------------------------------------------------


def _is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and LAST_TURN in value


OASST = Format(
    "oasst",
    lambda row: (
        ("message_tree_id" in row and isinstance(row.get("prompt"), dict))
        or {"message_id", "text", "role"} <= row.keys()
    ),
    oasst,
    told=frozenset({"prompt", "text", "source"}),  # its rankings and reactions are many people's
)

EVENTS = Format("events", lambda row: "kind" in row, events, frozenset(EVENT_FIELDS | STORE_FIELDS))

FORMATS: tuple[Format, ...] = (
    EVENTS,
    Format(
        "hh_rlhf",
        lambda row: (
            _is_dialogue(row.get("chosen"))
            and _is_dialogue(row.get("rejected"))
            and row.get("prompt") is None
        ),
        hh_rlhf,
        frozenset({"chosen", "rejected", "prompt", "idempotency_key", *WHO}),
    ),
    Format(
        "pairs",
        lambda row: "chosen" in row and "rejected" in row,
        pairs,
        frozenset({"chosen", "rejected", "tie", "idempotency_key", *SCORES, *PROMPTS, *WHO}),
    ),
    OASST,
    Format(
        "answers",
        lambda row: {"question", "prediction 1", "preference"} <= row.keys(),
        answers,
        told=frozenset({"preference", *WHO, *BESIDE} - {"comment"}),
    ),
    Format(
        "judgements",
        lambda row: {"prompt", "completion_a", "completion_b", "preference"} <= row.keys(),
        judgements,
        frozenset({"prompt", "preference", "comment", *JUDGED, *WHO}),
    ),
    Format(
        "quality",
        lambda row: (
            bool({"quality", "label"} & row.keys())
            and bool({"messages", "text", "completion"} & row.keys())
        ),
        quality,
        frozenset({"quality", "label", "completion", "text", *PROMPTS, *WHO}),
        frozenset({"idempotency_key", *BESIDE}),
    ),
)
"""Tried in this order on the first row that can be read."""
