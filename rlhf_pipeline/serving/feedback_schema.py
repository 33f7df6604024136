"""What `POST /v1/feedback` takes and answers, as JSON Schema: for OpenAPI, and for who reads it.

The rules themselves stand in feedback/formats.py and feedback/rules.py; a test sends what this
allows and what it does not, and holds its fields against theirs. Not shown: other names under which
a file's row may give its value (`number`, `text`, `criteria`, `choice`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_pipeline.feedback.formats import ROLES
from rlhf_pipeline.feedback.rules import (
    AGENT_ID,
    LONGEST_COMMENT,
    LONGEST_KEY,
    LONGEST_NAME,
    LONGEST_PROMPT,
    LONGEST_RATER,
    LONGEST_TEXT,
    MOST_TAGS,
)
from rlhf_pipeline.records import FeedbackKind
from rlhf_pipeline.serving.contract import Refusal, Told

MOST_EVENTS = 1000  # in one body


class StoredVote(Told):
    """A vote that is synced to disk."""

    feedback_id: str


class StoredVotes(Told):
    """An answer to each of many votes, in order."""

    results: list[StoredVote | Refusal]


Schema = Mapping[str, Any]


def _text(longest: int, **more: Any) -> Schema:
    return {"type": ["string", "null"], "maxLength": longest, **more}


PART: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "text"},
        "text": {"type": "string", "maxLength": LONGEST_PROMPT},
    },
    "required": ["type", "text"],
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": "string", "maxLength": LONGEST_PROMPT},
                {"type": "array", "items": PART, "minItems": 1},
            ]
        },
    },
    "required": ["role", "content"],
}
PROMPT: Schema = {
    "description": "A text is one user's message.",
    "anyOf": [
        {"type": "string", "maxLength": LONGEST_PROMPT},
        {"type": "array", "items": MESSAGE, "minItems": 1},
        {"type": "null"},
    ],
}
AGENT: Schema = {"type": "string", "pattern": f"^{AGENT_ID.pattern}$"}
RATER = "Who votes: any text, hashed before it is stored."
COMMON: Schema = {
    "agent_id": AGENT,
    "interaction_id": _text(36, description="A chat completion's id."),
    "prompt": PROMPT,
    "completion": _text(LONGEST_TEXT),
    "rater": {
        "type": ["string", "integer", "null"],
        "maxLength": LONGEST_RATER,
        "description": RATER,
    },
    "rater_id": {"type": ["string", "null"], "pattern": "^[0-9a-f]{32}$"},
    "source": {"enum": ["human", "model", "code", None]},
    "occurred_at": {"type": ["string", "null"], "format": "date-time"},
    "tags": {
        "type": ["array", "null"],
        "items": {"type": "string", "maxLength": LONGEST_NAME},
        "maxItems": MOST_TAGS,
    },
    "comment": _text(LONGEST_COMMENT),
    "topic": _text(200),
    "idempotency_key": _text(LONGEST_KEY, minLength=1),
}
OTHER: Schema = {
    "other_interaction_id": _text(36),
    "other_completion": _text(LONGEST_TEXT),
    "other_prompt": PROMPT,
    "shown_first": {"enum": ["this", "other", None]},
}
VALUES: Mapping[FeedbackKind, Schema] = {
    FeedbackKind.thumbs: {"enum": ["up", "down", 1, 0, True, False]},
    FeedbackKind.rating: {"type": "integer", "minimum": 1, "maximum": 5},
    FeedbackKind.score: {"type": "number", "minimum": 0, "maximum": 1},
    FeedbackKind.correction: {"type": "string", "pattern": r"\S", "maxLength": LONGEST_TEXT},
    FeedbackKind.preference: {"enum": ["left", "right", "tie", "both_bad"]},
    FeedbackKind.criteria: {
        "description": "One that is null was not judged; one at least was.",
        "type": "object",
        "additionalProperties": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "propertyNames": {"minLength": 1, "maxLength": LONGEST_NAME},
        "minProperties": 1,
    },
    FeedbackKind.comment: {"type": "string", "pattern": r"\S", "maxLength": LONGEST_COMMENT},
}


def _vote(kind: FeedbackKind) -> Schema:
    compares = kind is FeedbackKind.preference
    targets = [["interaction_id"], ["prompt", "completion"]]
    others = [["other_interaction_id"], ["other_completion"]] if compares else [[]]
    return {
        "title": kind.value,
        "type": "object",
        "properties": {
            "kind": {"const": kind.value},
            "value": VALUES[kind],
            **COMMON,
            **(OTHER if compares else {}),
        },
        "required": ["agent_id", "kind", "value"],
        "additionalProperties": False,
        "anyOf": [{"required": [*this, *other]} for this in targets for other in others],
    }


SCHEMAS: Mapping[str, Schema] = {
    "Vote": {"oneOf": [_vote(kind) for kind in FeedbackKind]},
    "Votes": {
        "type": "object",
        "properties": {
            "events": {
                "description": "Each a Vote; one that is none gets a refusal of its own, so here "
                "anything may stand.",
                "type": "array",
                "items": {},
                "minItems": 1,
                "maxItems": MOST_EVENTS,
            }
        },
        "required": ["events"],
        "additionalProperties": False,
    },
}
BODY: Schema = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in SCHEMAS]}
EXAMPLES: Schema = {
    "thumb": {
        "summary": "Thumbs on an answer the chat gave",
        "value": {
            "agent_id": "support",
            "kind": "thumbs",
            "value": "up",
            "interaction_id": "01a1fdff-875a-7a05-9573-f037b670d0b7",
            "rater": "customer-17",
        },
    },
    "rating": {
        "summary": "Stars on an answer another program gave",
        "value": {
            "agent_id": "support",
            "kind": "rating",
            "value": 2,
            "prompt": "Where is my order?",
            "completion": "I cannot know.",
        },
    },
}
