"""Gold questions: pairs whose better answer is known, asked among the others to see who looks.

`feedback.gold_questions` names a file of them, in any format that gives preferences. Whoever is
asked one and says which answer is better has answered it, right or wrong; a tie or both-bad judges
nobody. Answers count in a rater's reliability (reward/raters.py, reward/kinds.py). What anybody
says on a gold question's prompt, whatever the kind, is never trained on and never tested on. What
this does not protect against: raters who know which questions these are.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.errors import SourceError
from rlhf_pipeline.feedback.lines import Position
from rlhf_pipeline.feedback.privacy import NATIONAL, redact
from rlhf_pipeline.feedback.sources import read
from rlhf_pipeline.files import write_text
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Message,
    QuarantinedRow,
    prompt_to_json,
    this_won,
)

if TYPE_CHECKING:
    import pandas as pd

Question = tuple[str, frozenset[str]]
"""A prompt as JSON, and its two answers."""


@dataclass(frozen=True, slots=True)
class GoldAnswer:
    """What one rater made of one gold question."""

    feedback_id: str
    voter: str
    right: bool


@dataclass(frozen=True, slots=True)
class Tally:
    """How many gold questions a rater answered, right and wrong."""

    right: int = 0
    wrong: int = 0

    @property
    def asked(self) -> int:
        """Return how many they answered."""
        return self.right + self.wrong


def read_questions(
    path: Path, agent_id: str, *, redacts: bool, regions: Sequence[str] = NATIONAL
) -> dict[Question, str]:
    """Return each question's better answer, as a snapshot has the texts that was taken alike.

    Raises SourceError where the file cannot be read, holds nothing, or anything but pairs of which
    one is better.
    """
    better: dict[Question, str] = {}
    position = Position()
    for row in read(path, agent_id, position=position):
        if isinstance(row, QuarantinedRow):
            found = row.detail
        elif row.kind is FeedbackKind.preference and row.choice in ("left", "right") and row.prompt:
            question, chosen = _question(row, redacts, regions)
            if len(question[1]) == 2:
                better[question] = chosen
                continue
            found = "the same answer twice"
        else:
            found = f"a {row.kind} ({row.choice})" if row.choice else f"a {row.kind}"
        raise SourceError(
            f"gold questions are inline pairs of which one answer is better: line {position.line} "
            f"of {path} is not ({found}); correct it or take it out"
        )
    if not better:
        raise SourceError(
            f"feedback.gold_questions needs pairs with a known answer, found none in {path}; add "
            "some or leave the setting out"
        )
    return better


def set_apart(
    frame: pd.DataFrame, better: Mapping[Question, str]
) -> tuple[pd.DataFrame, list[GoldAnswer]]:
    """Return the rows that are on no gold question's prompt, and the answers among the others.

    Of a rater's answers to one question, which come by other votes than one of its own words too
    (interactions whose answers are these), the last counts. `frame` is in the order of voting.
    """
    prompts = {prompt for prompt, _ in better}
    asked = frame["prompt"].isin(prompts)
    answers: dict[tuple[str, Question], GoldAnswer] = {}
    rows: Iterable[Any] = frame[asked & (frame["kind"] == FeedbackKind.preference)].itertuples()
    for row in rows:
        question = (row.prompt, frozenset((row.completion, row.other_completion)))
        known = better.get(question)
        if known is None or row.choice not in ("left", "right"):
            continue
        won = this_won(row.choice, row.shown_first)
        chosen = row.completion if won else row.other_completion
        answers[row.voter, question] = GoldAnswer(row.feedback_id, row.voter, chosen == known)
    return frame[~asked].reset_index(drop=True), list(answers.values())


def tallies(answers: Iterable[GoldAnswer]) -> dict[str, Tally]:
    """Return how each rater did."""
    counts = Counter((answer.voter, answer.right) for answer in answers)
    voters = sorted({voter for voter, _ in counts})
    return {voter: Tally(counts[voter, True], counts[voter, False]) for voter in voters}


def write_answers(path: Path, answers: Iterable[GoldAnswer]) -> None:
    """Write one JSON object a line, whole or not at all."""
    lines = (json.dumps(dataclasses.asdict(answer)) + "\n" for answer in answers)
    write_text(path, "".join(lines))


def read_answers(path: Path) -> list[GoldAnswer]:
    """Return what `write_answers` wrote; nothing where no gold questions were asked."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [GoldAnswer(**json.loads(line)) for line in file]


def _question(row: Feedback, redacts: bool, regions: Sequence[str]) -> tuple[Question, str]:
    def seen(text: str | None) -> str:
        return redact(text or "", regions)[0] if redacts else text or ""

    prompt = tuple(Message(m.role, seen(m.content)) for m in row.prompt or ())
    this, other = seen(row.completion), seen(row.other_completion)
    chosen = this if this_won(row.choice, row.shown_first) else other
    return (prompt_to_json(prompt), frozenset((this, other))), chosen
