"""What flows between stages. Small, frozen, typed; no stage invents a shape of its own."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable
from uuid import UUID

from rlhf_pipeline.errors import PipelineError

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


Prompt = tuple[Message, ...]
"""A conversation that waits for the assistant: its last message is the user's."""


class FeedbackKind(StrEnum):
    """What a person can say about a completion; DESIGN.md 3 says what each trains."""

    thumbs = "thumbs"
    rating = "rating"
    score = "score"
    correction = "correction"
    preference = "preference"
    criteria = "criteria"
    comment = "comment"


Choice = Literal["left", "right", "tie", "both_bad"]
Source = Literal["human", "model", "code"]
Split = Literal["train", "evaluation"]


# Origins of which every row is one request, click or assessment: what unsigned people say there may
# be the same, or the opposite. In a file the same again is a repeat.
LIVE = ("api", "chat", "mlflow", "policies", "review", "terminal")
MOST_SCORE = 3.4e38  # of a reward, either way: more is infinite in 32 bits
ELSEWHERE = -1  # the version of an answer by a model that the ledger does not know


@dataclass(frozen=True, slots=True)
class Interaction:
    """One prompt and the completion a known model version answered with; written by the server."""

    interaction_id: str
    agent_id: str
    prompt: Prompt
    completion: str
    model_version: int  # the ledger's version number that answered, or ELSEWHERE
    created_at: datetime
    session_id: str | None = None
    user_id: str | None = None  # hashed
    experiment: str | None = None
    arm: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    latency_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Feedback:
    """One event, kept for ever, about an interaction or about an inline prompt and completion.

    Which value fields are set follows from `kind`:
    thumbs -> number 1 (up) or 0 (down); rating -> number 1..5; score -> number 0..1;
    correction and comment -> text; criteria -> criteria; preference -> choice, shown_first and the
    other completion (by interaction or inline).
    """

    agent_id: str
    kind: FeedbackKind
    idempotency_key: str
    # what it is about
    interaction_id: str | None = None
    prompt: Prompt | None = None
    completion: str | None = None
    # the value
    number: float | None = None
    text: str | None = None
    criteria: Mapping[str, float] | None = None
    other_interaction_id: str | None = None
    other_completion: str | None = None
    other_prompt: Prompt | None = None  # only where the source gave the other side its own context
    choice: Choice | None = None
    shown_first: Literal["this", "other"] = "this"  # which completion stood on the left
    # who, when, why
    rater_id: str | None = None  # hashed
    source: Source = "human"
    origin: str = "api"  # where the row came from: api, chat, a file's name
    occurred_at: datetime | None = None
    tags: tuple[str, ...] = ()
    comment: str | None = None
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One prompt, two completions, and which one a person preferred."""

    pair_id: str
    prompt: Prompt
    chosen: str
    rejected: str
    voter: str  # hashed rater, or the feedback id where nobody signed
    origin: str
    split: Split
    tie: bool = False  # True: neither is better; chosen and rejected are in no order
    both_bad: bool = False
    corrected: bool = False  # chosen was written by a person over rejected, not sampled

    @property
    def decided(self) -> bool:
        """Say whether one completion was preferred over the other."""
        return not (self.tie or self.both_bad)


@dataclass(frozen=True, slots=True)
class RewardExample:
    """One completion and what one person said about it alone."""

    example_id: str
    prompt: Prompt
    completion: str
    kind: FeedbackKind  # thumbs, rating, score or criteria
    number: float | None
    criteria: Mapping[str, float] | None
    voter: str
    split: Split
    origin: str = ""  # where the vote came in, as a pair's


@dataclass(frozen=True, slots=True)
class SftExample:
    """A completion worth imitating."""

    prompt: Prompt
    completion: str
    origin: str  # seed, correction, rating, score, thumbs, preference


@dataclass(frozen=True, slots=True)
class EvaluationPrompt:
    """A prompt of which no votes train; seed conversations may have it all the same."""

    prompt_id: str
    prompt: Prompt
    references: tuple[str, ...] = ()
    topic: str | None = None  # what people filed it under, where they did
    cohort: str | None = None  # where the first vote on it came from: chat, api, a file


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward function is asked to score."""

    prompt: Prompt
    completion: str
    references: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


class RewardFunction(Protocol):
    """Any reward: a learned model, a rule, a remote service, a composite. Higher is better."""

    def __call__(self, items: Sequence[RewardInput], /) -> Sequence[float]:
        """Return one finite score per item, in order."""
        ...


def checked_scores(
    reward: RewardFunction, items: Sequence[RewardInput], *, name: str, error: type[PipelineError]
) -> list[float]:
    """Return one score per item, MOST_SCORE at most; raises `error` if the reward gives others.

    `name` says in the message whose scores they are. Where there is nothing to score it is not
    asked.
    """
    given = reward(items) if items else []
    try:
        scores = [float(score) for score in given]
    except (TypeError, ValueError, RuntimeError) as problem:  # the last is a tensor's, of several
        raise error(
            f"the {name} reward must give one number per item, found what is none: {problem}; "
            "correct the reward function"
        ) from problem
    if len(scores) != len(items):
        raise error(
            f"the {name} reward must give one score per item: needed {len(items)}, found "
            f"{len(scores)}; correct the reward function"
        )
    wrong = [i for i, score in enumerate(scores) if not abs(score) <= MOST_SCORE]  # NaN neither
    if wrong:
        raise error(
            f"the {name} reward must give finite scores of at most {MOST_SCORE:g} either way, "
            f"found {scores[wrong[0]]} for item {wrong[0]} and {len(wrong)} such in all; correct "
            "the reward function"
        )
    return scores


@dataclass
class ScoreMoments:
    """Mean and variance of all scores so far; kept in checkpoints. Source: Welford (1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, scores: Sequence[float]) -> None:
        """Take more scores into account."""
        for score in scores:
            self.count += 1
            distance = score - self.mean
            self.mean += distance / self.count
            self.squares += distance * (score - self.mean)

    def normalised(self, scores: Sequence[float]) -> list[float]:
        """Return the scores less the mean, over the deviation; only centred where that is 0."""
        return [(score - self.mean) / self.scale for score in scores]

    @property
    def scale(self) -> float:
        """Return the deviation, 1 where there is none."""
        return (math.sqrt(self.squares / self.count) if self.count else 0.0) or 1.0


Gather = Callable[[Sequence[float]], list[float]]
"""Takes this process's numbers, returns those of all processes that train together, in order."""


@runtime_checkable
class SharedReward(Protocol):
    """A reward that wants to know, of a share, what the other processes' shares came to."""

    def of_share(
        self, items: Sequence[RewardInput], gather: Gather, /
    ) -> tuple[Sequence[float], Sequence[Mapping[str, float]]]:
        """Return what asking for all items at once would give this share, which may be empty.

        Scores, and pieces as PiecedReward's. Every process asks for its share at the same time.
        """
        ...


@runtime_checkable
class ChangingReward(Protocol):
    """A reward whose scores depend on how far training is: scheduled weights, scales it learns.

    Between two `begin_update` it is a plain function of items. What it becomes follows from its
    state alone, so that a run which is killed and resumed goes on as it would have.
    """

    def __call__(self, items: Sequence[RewardInput], /) -> Sequence[float]:
        """Return one finite score per item, in order."""
        ...

    @property
    def learns_scales(self) -> bool:
        """Whether it wants to see completions of the starting policy before the first update."""
        ...

    def begin_update(self, update: int) -> None:
        """Take the weights for where `update` updates are made; note what is scored from here."""
        ...

    def end_update(self, gather: Gather) -> dict[str, float]:
        """Learn from what was scored since `begin_update`, and return metrics of it."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that has changed in it, as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state` described; an empty one is the beginning."""
        ...


@runtime_checkable
class PiecedReward(Protocol):
    """A reward made of named pieces, each with a score of its own: a composite, or criteria."""

    def __call__(self, items: Sequence[RewardInput], /) -> Sequence[float]:
        """Return one finite score per item, in order."""
        ...

    @property
    def piece_names(self) -> tuple[str, ...]:
        """Return the pieces' names."""
        ...

    def scores_and_pieces(
        self, items: Sequence[RewardInput]
    ) -> tuple[list[float], list[dict[str, float]]]:
        """Return the scores as a call would, and of each item its pieces' raw scores by name.

        A piece that could not judge an item is left out of that item's.
        """
        ...


class SimulatedUser(Protocol):
    """Whoever the assistant talks with where no person is: a script, a rule, another model.

    What it says must follow from the conversation alone, so that a run which is killed and resumed
    goes on as it would have; one who rolls dice takes them from a hash of the conversation.
    """

    def __call__(self, conversations: Sequence[tuple[Message, ...]], /) -> Sequence[str | None]:
        """Return what the user says next in each, after the assistant's turn; None: they leave."""
        ...


def checked_answers(
    user: SimulatedUser, conversations: Sequence[tuple[Message, ...]], error: type[PipelineError]
) -> Sequence[str | None]:
    """Return one answer per conversation; raises `error` if the user gives more or fewer.

    Where there is no conversation they are not asked.
    """
    answers = user(conversations) if conversations else []
    if len(answers) != len(conversations):
        raise error(
            "a simulated user must answer once in each conversation: needed "
            f"{len(conversations)}, found {len(answers)}; correct it"
        )
    return answers


Progress = Callable[[Mapping[str, float | int | str]], None]
"""Called by long work with facts as they happen, e.g. {"update": 3, "score_mean": 0.4}."""


def ignore_progress(facts: Mapping[str, float | int | str]) -> None:
    """The Progress for callers that do not watch."""


def uuid7() -> str:
    """Return a time-ordered id (RFC 9562 version 7): 48 bits of milliseconds, 12 bits of the part
    of one (its method 3, so that ids a process makes in one millisecond are in order), then random.
    """
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    part = rest * 4096 // 1_000_000
    value = (milliseconds << 80) | (0x7 << 76) | (part << 64) | (0x2 << 62)
    digits = f"{value | int.from_bytes(os.urandom(8), 'big') >> 2:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def age_of(made: str) -> float | None:
    """Return the seconds since `uuid7` made the id, None where it did not; < 0 by a fast clock."""
    try:
        value = UUID(made)
    except ValueError:
        return None
    if value.version != 7 or str(value) != made:
        return None
    return time.time() - (value.int >> 80) / 1000


def this_won(choice: str | None, shown_first: str) -> bool:
    """Say of a preference for the left or right completion whether it is for `completion`."""
    return (choice == "left") == (shown_first != "other")


def now() -> datetime:
    """Return the time in UTC, with its zone."""
    return datetime.now(UTC)


def hashed(*parts: str) -> str:
    """Return the SHA-256 hex digest of the parts; ("ab", "c") and ("a", "bc") differ."""
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def hash_rater(agent_id: str, rater: str) -> str:
    """Return what the store keeps of a person: stable within an agent, meaningless elsewhere."""
    return hashed("rater", agent_id, rater)[:32]


_AS_WRITTEN = json.JSONEncoder(ensure_ascii=False)  # json.dumps would build one per prompt


def prompt_to_json(prompt: Prompt) -> str:
    """Return the canonical JSON of a prompt: what is stored, hashed and compared."""
    return _AS_WRITTEN.encode([[m.role, m.content] for m in prompt])


def as_messages(prompt: Iterable[Message]) -> list[dict[str, str]]:
    """Return the prompt in the form that chat templates and OpenAI's API take."""
    return [{"role": message.role, "content": message.content} for message in prompt]


def prompt_from_json(text: str) -> Prompt:
    """Return the prompt that `prompt_to_json` wrote."""
    return tuple(Message(role, content) for role, content in json.loads(text))


def user_prompt(content: str) -> Prompt:
    """Return the one-message prompt for a plain question."""
    return (Message("user", content),)


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """One row that broke a rule: kept with its reason, never dropped, never repaired."""

    agent_id: str
    rule: str
    detail: str  # what was needed, what was found
    origin: str
    line: int | None = None
    raw: str | None = None
    feedback_id: str | None = None
