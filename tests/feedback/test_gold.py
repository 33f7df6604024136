"""Gold questions are answered, counted, and kept away from training and testing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest

from rlhf_pipeline.config import load_settings
from rlhf_pipeline.errors import ClaimLost, SourceError
from rlhf_pipeline.feedback import datasets
from rlhf_pipeline.feedback.gold import Tally, read_answers, read_questions, set_apart, tallies
from rlhf_pipeline.fence import writing_while
from rlhf_pipeline.records import prompt_to_json, user_prompt
from rlhf_pipeline.stages import GOLD, Turn, without_gold

QUESTIONS = [
    {"prompt": "Name a bird. Mail ann@example.org.", "chosen": "A finch.", "rejected": "A cat."},
    {"prompt": "Two and two?", "chosen": "4", "rejected": "5"},
]
BIRD = prompt_to_json(user_prompt("Name a bird. Mail [email]."))
SUM, PLAIN = (prompt_to_json(user_prompt(text)) for text in ("Two and two?", "Why?"))


def votes(*said: tuple[str, str, str, str, str, str]) -> pd.DataFrame:
    """Return a snapshot's rows: voter, prompt, completion, other, choice, shown first."""
    rows: list[dict[str, Any]] = [
        {
            "feedback_id": f"id-{number}",
            "kind": "preference",
            "voter": voter,
            "origin": "test",
            "prompt": prompt,
            "completion": this,
            "other_completion": other,
            "choice": choice,
            "shown_first": first,
            "text": None,
            "criteria": None,
            "number": float("nan"),
        }
        for number, (voter, prompt, this, other, choice, first) in enumerate(said)
    ]
    return pd.DataFrame(rows)


def asked(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "gold.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


SAID = votes(
    ("ann", BIRD, "A finch.", "A cat.", "left", "this"),  # right
    ("ann", SUM, "5", "4", "left", "other"),  # 4 stood on the left: right
    ("bob", SUM, "5", "4", "left", "this"),  # wrong
    ("bob", BIRD, "A cat.", "A finch.", "tie", "this"),  # judges nobody
    ("eve", SUM, "4", "6", "right", "this"),  # not the two that are known
    ("eve", PLAIN, "Because.", "No.", "left", "this"),
)


def test_answers_are_told_right_from_wrong_however_they_were_shown(tmp_path: Path) -> None:
    better = read_questions(asked(tmp_path, *QUESTIONS), "tea", redacts=True)
    rest, answers = set_apart(SAID, better)
    assert tallies(answers) == {"ann": Tally(2, 0), "bob": Tally(0, 1)}
    assert rest["prompt"].tolist() == [PLAIN]


def test_a_question_answered_often_is_one_answer_the_last(tmp_path: Path) -> None:
    better = read_questions(asked(tmp_path, *QUESTIONS), "tea", redacts=True)
    often = [("ann", SUM, "5", "4", choice, "this") for choice in ("right", "right", "left")]
    _, answers = set_apart(votes(*often, ("bob", SUM, "4", "5", "left", "this")), better)
    assert tallies(answers) == {"ann": Tally(0, 1), "bob": Tally(1, 0)}
    assert answers[0].feedback_id == "id-2"


@pytest.mark.parametrize(
    ("choice", "first", "better"),
    [
        ("left", "this", "4"),
        ("right", "this", "5"),
        ("left", "other", "5"),
        ("right", "other", "4"),
    ],
)
def test_the_better_answer_of_a_question_is_the_one_that_was_chosen(
    tmp_path: Path, choice: str, first: str, better: str
) -> None:
    row = {
        "kind": "preference",
        "value": choice,
        "prompt": "Two and two?",
        "completion": "4",
        "other_completion": "5",
        "shown_first": first,
    }
    found = read_questions(asked(tmp_path, row), "tea", redacts=True)
    assert found == {(SUM, frozenset(("4", "5"))): better}


def test_questions_are_read_as_a_snapshot_of_these_regions_has_them(tmp_path: Path) -> None:
    rows = {"prompt": "bel 020 123 4567?", "chosen": "yes", "rejected": "no"}
    path = asked(tmp_path, rows)
    frame = votes(("ann", prompt_to_json(user_prompt("bel [phone]?")), "yes", "no", "left", "this"))
    for regions, kept in ((["NL"], 0), (["US"], 1)):
        chosen = {"gold_questions": str(path), "phone_regions": regions}
        settings = load_settings("tiny", {"feedback": chosen})
        turn = Turn("tea", "0" * 64, 0, 0, tmp_path, tmp_path, None, None, settings)
        assert len(without_gold(turn, frame)) == kept


def test_a_run_whose_claim_was_taken_over_removes_no_answers(tmp_path: Path) -> None:
    turn = Turn("tea", "0" * 64, 0, 0, tmp_path, tmp_path, None, None, load_settings("tiny", {}))
    kept = tmp_path / GOLD
    kept.write_text("{}")
    with writing_while(Mock(side_effect=ClaimLost("taken over"))), pytest.raises(ClaimLost):
        without_gold(turn, SAID)
    assert kept.read_text() == "{}"
    without_gold(turn, SAID)
    assert not kept.exists()


def test_nothing_said_on_their_prompts_reaches_a_data_set(tmp_path: Path) -> None:
    thumb = SAID.tail(1).assign(kind="thumbs", prompt=SUM, number=1.0, choice=None)
    path = asked(tmp_path, *QUESTIONS)
    frame = pd.concat([SAID, thumb], ignore_index=True)
    kept = {}
    for name, gold in (("with", str(path)), ("without", None)):
        settings = load_settings("tiny", {"feedback": {"gold_questions": gold}})
        (tmp_path / name).mkdir()
        turn = Turn("tea", "0" * 64, 0, 0, tmp_path / name, tmp_path, None, None, settings)
        kept[name] = datasets.build(without_gold(turn, frame), evaluation_share=0.5, min_rating=4)
    for built in kept.values():
        everything: list[Any] = [
            *built.preference_pairs,
            *built.reward_examples,
            *built.sft_examples,
            *built.evaluation_prompts,
        ]
        known = {prompt_to_json(one.prompt) for one in everything} & {BIRD, SUM}
        assert known == (set() if built is kept["with"] else {BIRD, SUM})
    assert len(kept["with"].preference_pairs) == 1
    assert not (tmp_path / "without" / GOLD).exists()
    assert read_answers(tmp_path / "without" / GOLD) == []


def test_the_answers_are_kept_for_the_reward_models(tmp_path: Path) -> None:
    settings = load_settings(
        "tiny", {"feedback": {"gold_questions": str(asked(tmp_path, *QUESTIONS))}}
    )
    turn = Turn("tea", "0" * 64, 0, 0, tmp_path, tmp_path, None, None, settings)
    without_gold(turn, SAID)
    assert tallies(read_answers(tmp_path / GOLD)) == {"ann": Tally(2, 0), "bob": Tally(0, 1)}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([{**QUESTIONS[0], "tie": True}], r"line 1 of .* \(a preference \(tie\)\)"),
        ([*QUESTIONS, {**QUESTIONS[0], "rejected": "A finch."}], "line 3 .*the same answer twice"),
        ([QUESTIONS[0], {"prompt": "Why?"}], "line 2"),
        (
            [{"kind": "thumbs", "value": "up", "prompt": "Why?", "completion": "No."}],
            r"\(a thumbs\)",
        ),
        ([], "found none"),
    ],
)
def test_what_is_no_gold_question_is_refused_by_its_line(
    tmp_path: Path, rows: list[Any], found: str
) -> None:
    with pytest.raises(SourceError, match=found):
        read_questions(asked(tmp_path, *rows), "tea", redacts=False)
