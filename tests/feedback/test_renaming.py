"""A file's own names are told, and it is read as if it had ours."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import SourceError
from rlhf_pipeline.feedback import export, formats
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.feedback.raters import Person, is_signed_by
from rlhf_pipeline.feedback.renaming import Renaming
from rlhf_pipeline.feedback.sources import read
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Feedback, FeedbackKind, QuarantinedRow, hash_rater, user_prompt

SURVEY = Renaming(
    {"prompt": "Question", "completion": "Answer", "value": "Feedback", "rater": "Customer"},
    {"kind": "thumbs"},
    {"like": "up", "dislike": "down"},
)
CSV = (
    "Customer,prompt,Question,Answer,Feedback,Comment\n"
    "ann,of another survey,Where is it?,On its way.,like,late though\n"
    "bob,,Where is it?,No idea.,dislike,\n"
    ",,Why?,So.,up,\n"
    'eve,,Why?,"Because, you know.",meh,\n'
)


def rows_of(path: Path, renaming: Renaming, format: str = "auto") -> list[Any]:
    return list(read(path, "tea", format, renaming=renaming))


def plain(events: list[Any]) -> list[Feedback]:
    """Return events without what a file's name and a row's own words give them."""
    assert all(isinstance(one, Feedback) for one in events)
    return [replace(one, origin="", idempotency_key="") for one in events]


def thumb(prompt: str, completion: str, value: float, rater: str | None) -> Feedback:
    rater_id = None if rater is None else hash_rater("tea", rater)
    return Feedback(
        *("tea", FeedbackKind.thumbs, ""),
        prompt=user_prompt(prompt),
        completion=completion,
        number=value,
        rater_id=rater_id,
        origin="",
        shown_first="this",
    )


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_tables_columns_and_words_are_told(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "survey.csv"
    path.write_text(CSV.replace(",", separator))
    *events, aside = rows_of(path, SURVEY)
    assert plain(events) == [
        thumb("Where is it?", "On its way.", 1, "ann"),
        thumb("Where is it?", "No idea.", 0, "bob"),
        thumb("Why?", "So.", 1, None),  # a word of ours stays
    ]
    # What is set aside names its rater as we do, where an erasure looks, and has all that stood.
    assert isinstance(aside, QuarantinedRow)
    assert (aside.rule, aside.line) == ("wrong_type", 5)
    told = json.loads(aside.raw or "")
    assert (told["rater"], told["value"]) == ("eve", "meh")
    comma = separator  # within quotes it is text
    assert told["completion"] == f"Because{comma} you know."


@pytest.mark.parametrize(
    ("kind", "told", "column", "found"),
    [
        ("thumbs", {"TRUE": "down", "FALSE": "up"}, "true false", [0, 1]),
        ("thumbs", {"true": "down", "False": "up"}, "True FALSE", [0, 1]),
        ("rating", {"1": "5", "5": "1"}, "1.0 5,0", [5, 1]),
        ("rating", {"1,0": "5", "1.0": "4", "2": "1"}, "1.0 2.00", [4, 1]),  # the same first
        ("score", {"none": "0", "half": "0.5"}, "none half", [0, 0.5]),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_word_is_told_however_its_value_is_written(
    tmp_path: Path, kind: str, told: dict[str, str], column: str, found: list[float], suffix: str
) -> None:
    """Else what was to be turned round would go in as it stands."""
    path = tmp_path / f"votes.{suffix}"
    cells = column.split()
    if suffix == "csv":
        path.write_text("q;a;flag\n" + "".join(f"Why?;So {n}.;{c}\n" for n, c in enumerate(cells)))
    else:
        rows = [{"q": "Why?", "a": f"So {n}.", "flag": c} for n, c in enumerate(cells)]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    renaming = Renaming({"prompt": "q", "completion": "a", "value": "flag"}, {"kind": kind}, told)
    assert [event.number for event in rows_of(path, renaming)] == found


def test_one_column_may_say_two_things(tmp_path: Path) -> None:
    columns = {"prompt": "Q", "completion": "A", "value": "V", "rater": "Who", "topic": "Who"}
    renaming = Renaming(columns, {"kind": "thumbs"})
    (tmp_path / "votes.csv").write_text("Q,A,V,Who\nWhy?,So.,up,ann\n")
    row = {"Q": "Why?", "A": "So.", "V": "up", "Who": "ann"}
    (tmp_path / "votes.jsonl").write_text(json.dumps(row))
    for name in ("votes.csv", "votes.jsonl"):
        [event] = rows_of(tmp_path / name, renaming)
        assert (event.rater_id, event.topic) == (hash_rater("tea", "ann"), "ann")


@pytest.mark.parametrize(
    ("fixed", "word", "remedy", "meant"),
    [
        ({"kind": "thumbs"}, "👎", "--means '👎=up|down'", "down"),
        ({"kind": "rating"}, "great", "--means 'great=1 to 5'", "5"),
        ({"kind": "score"}, "it's ok", "--means 'it'\"'\"'s ok=0 to 1'", "0.5"),
        ({"kind": "thumbs"}, "\x1b[2J", "--means 'WORD=up|down'", None),
        ({"kind": "thumbs"}, "x" * 41, "--means 'WORD=up|down'", None),
        (
            {"kind": "preference", "other_completion": "No."},
            "second",
            "--means 'second=left|right|tie|both_bad'",
            "right",
        ),
    ],
)
def test_who_has_another_word_for_a_vote_is_told_how_to_say_what_it_means(
    tmp_path: Path, fixed: dict[str, str], word: str, remedy: str, meant: str | None
) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps({"q": "Why?", "a": "So.", "v": word}))
    columns = {"prompt": "q", "completion": "a", "value": "v"}
    [aside] = rows_of(path, Renaming(columns, fixed))
    assert aside.detail.endswith(f"say which of these the word means: rlhf ingest {remedy}")
    theirs, _, ours = shlex.split(remedy)[1].rpartition("=")
    [aside] = rows_of(path, Renaming(columns, fixed, {theirs: ours}))
    assert not isinstance(aside, Feedback)  # who pastes it as it stands has said nothing
    if meant is not None:
        [event] = rows_of(path, Renaming(columns, fixed, {theirs: meant}))
        assert isinstance(event, Feedback)


@pytest.mark.parametrize(
    ("fixed", "field", "ways"),
    [
        ({"kind": "score"}, "value", 2),
        ({"kind": "thumbs"}, "value", 1),
        ({}, "quality", 2),
    ],
)
def test_who_sends_stars_as_something_else_is_told_that_their_1s_passed(
    tmp_path: Path, fixed: dict[str, str], field: str, ways: int
) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("prompt,completion,stars\n" + "".join(f"q,a {n},{n}\n" for n in range(1, 6)))
    stars = Renaming({field: "stars"}, fixed)
    passed, *aside = rows_of(path, stars)
    assert passed.number == 1
    told = {row.detail.partition("of a scale as 1 to 5, ")[2] for row in aside}
    assert len(told) == 1
    [way] = told
    assert "the 1s of a file have passed as the best vote: take it back" in way
    assert way.count("--set kind=rating --map value=COLUMN") == 1
    assert ("--means 5=1 --means 4=0.75 and so on to --means 1=0" in way) == (ways == 2)
    ratings = rows_of(path, Renaming({"value": "stars"}, {"kind": "rating"}))
    assert [event.number for event in ratings] == [1, 2, 3, 4, 5]
    if ways == 2:
        words = {"5": "1", "4": "0.75", "3": "0.5", "2": "0.25", "1": "0"}
        scores = rows_of(path, replace(stars, words=words))
        assert [event.number for event in scores] == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize(
    ("fixed", "field"),
    [({"kind": "thumbs"}, "value"), ({"kind": "score"}, "value"), ({}, "quality")],
)
def test_who_sends_a_scale_around_0_is_told_that_its_0s_passed_as_the_worst_vote(
    tmp_path: Path, fixed: dict[str, str], field: str
) -> None:
    path = tmp_path / "thumbs.csv"
    path.write_text("prompt,completion,vote\nq,a,1\nq,b,0\nq,c,-1\n")
    votes = Renaming({field: "vote"}, fixed)
    *passed, aside = rows_of(path, votes)
    assert [event.number for event in passed] == [1, 0]
    _, _, way = aside.detail.partition("of a scale as -1 to 1, ")
    assert way.startswith("the 0s of a file have passed as the worst vote: take it back (rlhf ")
    means = "--means -1=0 --means 0=0.5 --means 1=1"
    as_score = f"--set kind=score --map value=COLUMN {means})"
    assert (as_score if fixed == {"kind": "thumbs"} else means) in way
    words = {"-1": "0", "0": "0.5", "1": "1"}
    kind = {"kind": "score"} if fixed else {}
    scores = rows_of(path, Renaming({field: "vote"}, kind, words))
    assert [event.number for event in scores] == [1, 0.5, 0]
    if fixed == {"kind": "thumbs"}:
        assert "or without the rows that say 0 and with --means -1=down" in way
        path.write_text("prompt,completion,vote\nq,a,1\nq,c,-1\n")
        thumbs = rows_of(path, replace(votes, words={"-1": "down"}))
        assert [event.number for event in thumbs] == [1, 0]


def test_who_sends_a_longer_scale_as_ratings_is_told_that_its_lower_numbers_passed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "scale.csv"
    path.write_text("prompt,completion,stars\n" + "".join(f"q,a {n},{n}\n" for n in range(1, 11)))
    votes = rows_of(path, Renaming({"value": "stars"}, {"kind": "rating"}))
    assert [vote.number for vote in votes[:5]] == [1, 2, 3, 4, 5]
    [way] = {row.detail.partition("of a scale as 1 to 10, ")[2] for row in votes[5:]}
    passed, _, again = way.partition(": take it back (rlhf feedback withdraw ")
    assert passed == "the whole numbers from 1 to 5 of a file have passed as ratings"
    assert "every vote as a `score` from 0 to 1 (rlhf ingest --set kind=score --map" in again
    assert "--means 10=1 --means 9=0.89 and so on to --means 1=0" in again
    words = {str(n): f"{(n - 1) / 9:.2f}" for n in range(1, 11)}
    scores = rows_of(path, Renaming({"value": "stars"}, {"kind": "score"}, words))
    assert [scores[n - 1].number for n in (10, 9, 1)] == [1, 0.89, 0]


def test_a_percentage_is_no_word_to_tell(tmp_path: Path) -> None:
    row = {"kind": "score", "prompt": "Why?", "completion": "So.", "value": "80%"}
    (tmp_path / "votes.jsonl").write_text(json.dumps(row))
    [aside] = rows_of(tmp_path / "votes.jsonl", Renaming())
    assert aside.detail.endswith("mend the row and send it again, as a score (0.8 for 80%)")


def test_a_number_written_as_text_is_no_word(tmp_path: Path) -> None:
    row = {"kind": "rating", "prompt": "Why?", "completion": "So.", "value": "4"}
    (tmp_path / "votes.jsonl").write_text(json.dumps(row))
    [aside] = rows_of(tmp_path / "votes.jsonl", Renaming())
    assert aside.detail.endswith("found '4'; mend the row and send it again")


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"completion": "So.", "label": "bad"}, "bad=true|false"),
        ({"completion": "So.", "label": 0}, "0=true|false"),
        (
            {"completion_a": "So.", "completion_b": "No.", "preference": "B"},
            "B=a-is-better|a-is-slightly-better|tie|b-is-slightly-better|b-is-better",
        ),
    ],
)
def test_words_of_other_formats_may_be_told_too(
    tmp_path: Path, row: dict[str, str | int], remedy: str
) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps({"prompt": "Why?", **row}))
    [aside] = rows_of(path, Renaming())
    assert aside.detail.endswith(f"rlhf ingest --means '{remedy}'")
    theirs, _, ours = remedy.partition("=")
    assert plain(rows_of(path, Renaming(words={theirs: ours.split("|")[-1]})))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_another_sign_in_a_columns_name_is_text(tmp_path: Path, separator: str) -> None:
    columns = {"prompt": "Frage", "completion": "Antwort", "value": "Wie gut, insgesamt?"}
    renaming = Renaming({**columns, "rater": "Kunde, Nr."}, {"kind": "rating"})
    head = separator.join(("Frage", "Antwort", '"Wie gut, insgesamt?"', "Kunde, Nr."))
    (tmp_path / "votes.csv").write_text(f"{head}\n{separator.join(('Wo?', 'Da.', '4', 'ann'))}\n")
    [event] = rows_of(tmp_path / "votes.csv", renaming)
    assert (event.number, event.rater_id) == (4, hash_rater("tea", "ann"))


def test_paths_lead_into_objects_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    rows: list[Any] = [
        {
            "name": "user-feedback",
            "value": 1,
            "timestamp": "2026-05-01T12:00:00Z",
            "trace": {
                "input": {"messages": [{"role": "user", "content": "Where is it?"}]},
                "output": [{"content": "On its way."}],
                "userId": "ann",
            },
        },
        {
            "value": 0,
            "trace": {
                "input": {"messages": [{"role": "user", "content": "Why?"}]},
                "output": [{"content": "Hm."}, {"content": "So."}],
            },
        },
        {"value": 0, "trace": {"input": {}, "output": [], "userId": "bob"}},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    renaming = Renaming(
        {
            "prompt": "trace.input.messages",
            "completion": "trace.output.-1.content",
            "rater": "trace.userId",
            "occurred_at": "timestamp",
        },
        {"kind": "thumbs"},
    )
    first, second, aside = rows_of(path, renaming)
    assert first.occurred_at is not None
    assert plain([replace(first, occurred_at=None), second]) == [
        thumb("Where is it?", "On its way.", 1, "ann"),
        thumb("Why?", "So.", 0, None),
    ]
    assert json.loads(aside.raw)["rater"] == "bob"
    assert json.loads(aside.raw)["trace"] == rows[2]["trace"]


def test_scores_of_langfuse_are_read_as_the_guide_says(tmp_path: Path) -> None:
    trace = {
        **{"id": "t1", "userId": "ann", "tags": ["shop"], "timestamp": "2026-05-01T11:59:00Z"},
        "input": {"messages": [{"role": "user", "content": "Where is it?"}]},
        "output": {"role": "assistant", "content": "On its way."},
    }
    score = {
        **{"id": "s1", "traceId": "t1", "name": "user-feedback", "dataType": "NUMERIC"},
        **{"value": 0, "stringValue": None, "comment": None, "authorUserId": None},
        **{"observationId": None, "configId": None, "queueId": None, "source": "API"},
        "timestamp": "2026-05-01T12:00:00Z",
    }
    judged = {**score, "id": "s2", "name": "judge", "source": "EVAL", "value": 1}
    path = tmp_path / "scores.jsonl"
    path.write_text(json.dumps({**score, "trace": trace}))
    guide = (Path(__file__).parents[2] / "docs" / "feedback.md").read_text()
    [line] = [line for line in guide.replace("\\\n", "").splitlines() if "ingest scores" in line]
    told: dict[str, dict[str, str]] = {"--map": {}, "--set": {}, "--means": {}}
    for option, word in pairwise(shlex.split(line)):
        if option in told:
            name, _, value = word.partition("=")
            told[option][name] = value
    renaming = Renaming(told["--map"], told["--set"], told["--means"])
    [event] = rows_of(path, renaming)
    assert event.occurred_at == datetime(2026, 5, 1, 12, tzinfo=UTC)
    expected = thumb("Where is it?", "On its way.", 0, "ann")
    assert plain([replace(event, occurred_at=None)]) == [expected]
    # A judge's that got in there is no person's.
    path.write_text(json.dumps({**judged, "trace": trace}))
    [aside] = rows_of(path, renaming)
    assert aside.rule == "unknown_source"
    assert aside.detail.endswith("rlhf ingest --means 'EVAL=human|model|code'")
    words_told = {**renaming.words, "EVAL": "model"}
    [event] = rows_of(path, replace(renaming, words=words_told))
    assert (event.source, event.number) == ("model", 1)


def test_a_word_for_a_vote_is_none_for_its_source(tmp_path: Path) -> None:
    row = {"kind": "thumbs", "prompt": "Why?", "completion": "So.", "value": "human"}
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps({**row, "source": "human"}))
    [event] = rows_of(path, Renaming(words={"human": "up", "model": "down"}))
    assert (event.source, event.number) == ("human", 1)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_column_with_the_name_of_a_field_that_it_is_not_is_left_unread(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"survey.{suffix}"
    row = {"q": "Why?", "a": "So.", "vote": "up", "text": "late", "tags": "shop, web", "number": 7}
    if suffix == "csv":
        path.write_text("q;a;vote;text;tags;number\nWhy?;So.;up;late;shop, web;7\n")
    else:
        path.write_text(json.dumps(row))
    columns = {"prompt": "q", "completion": "a", "value": "vote"}
    renaming = Renaming(columns, {"kind": "thumbs"})
    assert plain(rows_of(path, renaming)) == [thumb("Why?", "So.", 1, None)]
    with_tag = replace(renaming, columns={**columns, "tags": "text"})
    [aside] = rows_of(path, with_tag)
    assert (aside.rule, aside.detail[:29]) == ("wrong_type", "needed a list of tags, found ")
    path.write_text("prompt;completion;value;text\nWhy?;So.;up;late\n")
    if suffix == "csv":
        [aside] = rows_of(path, Renaming(fixed={"kind": "thumbs"}))
        assert aside.detail.endswith("say which column is it: rlhf ingest --map value=COLUMN")
        assert plain(rows_of(path, Renaming({"value": "value"}, {"kind": "thumbs"})))


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_of_a_label_and_a_quality_the_one_that_is_told_is_the_vote(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"chats.{suffix}"
    row = {"prompt": "Why?", "completion": "So.", "thumb": True, "label": False, "quality": 0.93}
    if suffix == "csv":
        path.write_text("prompt;completion;thumb;label;quality\nWhy?;So.;true;false;0.93\n")
    else:
        path.write_text(json.dumps(row))
    told = [("label", "thumb"), ("label", "label"), ("quality", "quality")]
    events = [rows_of(path, Renaming({name: column}))[0] for name, column in told]
    votes = [(event.kind.value, event.number) for event in events]
    assert votes == [("thumbs", 1), ("thumbs", 0), ("score", 0.93)]
    for renaming in (Renaming(), Renaming({"label": "thumb", "quality": "quality"})):
        [aside] = rows_of(path, renaming)
        assert aside.rule == "repeated_field"
        assert aside.detail.endswith("--map label=label or --map quality=quality")


PAIR = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
THUMB = {"kind": "thumbs", "prompt": "Why?", "completion": "So.", "value": "up"}
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Hm."}]
JUDGED = {"prompt": "Why?", "completion_a": "So.", "completion_b": "No.", "preference": "tie"}
ANSWERS = {"question": "Why?", "prediction 1": "So.", "prediction 2": "No.", "preference": [1]}
TREE = {
    **{"message_id": "q", "parent_id": None, "role": "prompter", "text": "Why?"},
    "replies": [
        {"message_id": said, "role": "assistant", "text": said, "rank": rank, "replies": []}
        for rank, said in enumerate(("So.", "No."))
    ],
}
ANN = hash_rater("tea", "ann")


@pytest.mark.parametrize(
    ("row", "columns", "rater"),
    [
        ({**PAIR, "prompt": "template-3", "conv": CHAT[:1]}, {"messages": "conv"}, None),
        ({**PAIR, "messages": CHAT, "question": "7"}, {"prompt": "prompt"}, None),
        ({"q": "Why?", "a": "So.", "messages": CHAT}, {"prompt": "q", "completion": "a"}, None),
        ({"a": "So.", "messages": CHAT[:1], "text": "late"}, {"completion": "a"}, None),
        ({**PAIR, "rater_id": "R-17", "who": "ann"}, {"rater": "who"}, ANN),
        ({**THUMB, "rater_id": "R-17", "who": "ann"}, {"rater": "who"}, ANN),
        ({**JUDGED, "rater": "batch-7", "who": "ann"}, {"evaluator": "who"}, ANN),
        ({**JUDGED, "annotator": "batch-7", "who": ANN}, {"rater_id": "who"}, ANN),
        ({**JUDGED, "labeler": "batch-7", "who": None}, {"rater": "who"}, None),
    ],
)
def test_what_is_told_is_read_and_no_column_that_might_say_it_too(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], rater: str | None
) -> None:
    path = tmp_path / "votes.jsonl"
    fixed = {} if {"chosen", "kind", "preference"} & row.keys() else {"label": "true"}
    path.write_text(json.dumps(row))
    [event] = rows_of(path, Renaming(columns, fixed))
    assert (event.prompt, event.completion) == (user_prompt("Why?"), "So.")
    assert event.rater_id == rater


def test_a_column_that_a_file_lacks_takes_no_others_place(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({**PAIR, "who": "ann"}))
    recipe = Renaming({"rater": "who", "messages": "conv"}, for_any_file=True)
    [event] = rows_of(path, recipe)
    assert (event.prompt, event.rater_id) == (user_prompt("Why?"), ANN)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (ANSWERS, {"prompt": "theirs"}),
        (JUDGED, {"messages": "theirs"}),
        (TREE, {"messages": "theirs", "occurred_at": "when"}),
    ],
)
def test_a_recipes_name_for_another_format_takes_no_fields_place(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str]
) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps({**row, "theirs": "x", "when": "yesterday"}))
    untold = rows_of(path, Renaming())
    assert plain(rows_of(path, Renaming(columns, for_any_file=True))) == plain(untold)


@pytest.mark.parametrize("answer", [{"answer": None}, {}])
def test_no_other_answer_is_voted_on_where_the_one_that_is_told_lacks(
    tmp_path: Path, answer: dict[str, None]
) -> None:
    path = tmp_path / "votes.jsonl"
    other = {"text": "\n\nHuman: Why?\n\nAssistant: So.", "label": True}
    whole = {**other, "answer": "Yes."}
    path.write_text(f"{json.dumps({**other, **answer, 'prompt': 'Why?'})}\n{json.dumps(whole)}")
    aside, _ = rows_of(path, Renaming({"completion": "answer"}))
    assert isinstance(aside, QuarantinedRow)
    assert "completion" in aside.detail


def test_a_key_that_is_told_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    for row in (LABELLED, PAIR):
        path.write_text(json.dumps({**row, "id": 17}))
        [aside] = rows_of(path, Renaming({"idempotency_key": "id"}))
        assert (aside.rule, "idempotency_key as text" in aside.detail) == ("wrong_type", True)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("v.csv", "prompt,completion,label\nq,a,maybe\n", Renaming(fixed={"rater": "ann"})),
        ("v.jsonl", '{"prompt": "q", "completion', Renaming(fixed={"rater": "ann"})),
        (
            "v.csv",
            "prompt,completion,label,Who\nq,a,maybe,ann\n",
            Renaming({"topic": "Who", "rater": "Who"}),
        ),
    ],
)
def test_what_is_set_aside_carries_a_name_that_is_told(
    tmp_path: Path, name: str, text: str, told: Renaming
) -> None:
    path = tmp_path / name
    path.write_text(text)
    [aside] = rows_of(path, told, "quality")
    assert is_signed_by(aside.raw, Person("tea", ANN))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("v.jsonl", json.dumps(THUMB) + '\n{"kind": "thumbs', {"rater": "ann"}),
        ("v.csv", "kind,prompt,completion,value,topic\nthumbs,q,a,up,ann,more\n", {}),
    ],
)
def test_what_is_set_aside_of_a_file_with_our_names_carries_none_that_is_told_for_others(
    tmp_path: Path, name: str, text: str, told: dict[str, str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    columns = {"topic": "Who"} if told else {"topic": "Who", "rater": "Who"}
    renaming = replace(Renaming(columns, told), for_any_file=True)
    *_, aside = rows_of(path, renaming, "events")
    assert isinstance(aside, QuarantinedRow)
    assert not is_signed_by(aside.raw or "", Person("tea", ANN))


@pytest.mark.parametrize("row", [PAIR, THUMB])
def test_a_row_whose_told_rater_stood_before_others_is_known_as_before(
    tmp_path: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps({**row, "who": "ann", "worker_id": 7}))
    renaming = Renaming({"rater": "who"})
    now = rows_of(path, renaming)
    monkeypatch.setattr(formats, "INSTEAD", ())
    assert rows_of(path, renaming) == now


LABELLED = {"prompt": "Why?", "completion": "So.", "label": True}
WHOLE = {
    "chosen": "\n\nHuman: Why?\n\nAssistant: So.",
    "rejected": "\n\nHuman: Why?\n\nAssistant: No.",
}
NOTES = {"at": "2026-05-01T12:00:00Z", "judge": "llm", "note": "late", "on": "web", "also": ["a"]}
BESIDE = dict(zip(("occurred_at", "source", "comment", "topic", "tags"), NOTES, strict=True))


@pytest.mark.parametrize("row", [PAIR, WHOLE, LABELLED, JUDGED])
def test_what_stands_beside_a_vote_is_stored_where_it_is_told(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps({**row, **NOTES}))
    [event] = rows_of(path, Renaming(BESIDE, words={"llm": "model"}))
    assert event.occurred_at == datetime(2026, 5, 1, 12, tzinfo=UTC)
    assert (event.source, event.comment, event.topic) == ("model", "late", "web")
    assert event.tags == ("a",)
    for wrong, rule in (
        ({"occurred_at": "yesterday"}, "bad_time"),
        ({"source": "robot"}, "unknown_source"),
        ({"tags": "shop"}, "wrong_type"),
    ):
        [aside] = rows_of(path, Renaming(fixed=wrong))
        assert aside.rule == rule


@pytest.mark.parametrize("row", [PAIR, WHOLE, LABELLED, JUDGED])
def test_a_column_that_is_called_as_what_stands_beside_a_vote_changes_none_untold(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    """A data set's source may be `ultrachat`, or `model` for who wrote the answers."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row))
    expected = plain(rows_of(path, Renaming()))
    for source in ("ultrachat", "model"):
        theirs = {"source": source, "topic": 7, "tags": "a, b", "occurred_at": "spring"}
        path.write_text(json.dumps({**row, **theirs, "who": None}))
        assert plain(rows_of(path, Renaming())) == expected
        assert plain(rows_of(path, Renaming({"rater": "who"}))) == expected


def test_what_is_told_of_a_judgement_goes_with_each_of_its_votes_and_its_comment_with_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "judged.csv"
    path.write_text(
        "prompt,completion_a,completion_b,completion_a_is_acceptable,preference,at,note,also\n"
        'Why?,So.,No.,yes,a-is-slightly-better,2026-05-01 12:00,late,"[""shop""]"\n'
    )
    told = {name: BESIDE[name] for name in ("occurred_at", "comment", "tags")}
    preference, thumb = rows_of(path, Renaming(told, zone="Europe/Berlin"))
    assert {preference.occurred_at, thumb.occurred_at} == {datetime(2026, 5, 1, 10, tzinfo=UTC)}
    assert (preference.comment, thumb.comment) == ("late", None)
    assert (preference.tags, thumb.tags) == (("slightly", "shop"), ("shop",))


def test_who_goes_back_to_what_they_said_before_has_said_it_last(tmp_path: Path) -> None:
    path = tmp_path / "judged.jsonl"
    sides = ("a-is-better", "b-is-better", "a-is-better")
    rows = [
        {**JUDGED, "preference": side, "evaluator": "ann", "at": f"2026-05-0{day}T12:00:00Z"}
        for day, side in enumerate(sides, 1)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    store = FeedbackStore(Database(f"sqlite:///{tmp_path / 'feedback.db'}"))
    told = Renaming({"occurred_at": "at"})
    assert [ingest(store, path, "tea", renaming=told).stored for _ in range(2)] == [3, 0]
    [last] = export.events(store.database, "tea")
    assert (last["value"], last["occurred_at"][:10]) == ("left", "2026-05-03")
    store.database.close()


def test_a_row_of_which_more_is_read_now_is_the_row_that_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps({**PAIR, **NOTES, "rater": "ann"}))
    store = FeedbackStore(Database(f"sqlite:///{tmp_path / 'feedback.db'}"))
    told = Renaming({name: BESIDE[name] for name in BESIDE if name != "source"})
    with monkeypatch.context() as earlier:
        earlier.setattr(formats, "BESIDE", ())
        ingest(store, path, "tea", renaming=told)
    again = ingest(store, path, "tea", renaming=told)
    assert (again.stored, again.known) == (0, 1)
    # But what somebody writes into an export is no reading of its row.
    [row] = export.events(store.database, "tea")
    out.write_text(json.dumps({**row, "comment": "late"}))
    assert ingest(store, out, "tea").quarantined == {"idempotency_conflict": 1}
    # And whose judgement it is has been said.
    path.write_text(json.dumps({**PAIR, "source": "model"}))
    assert ingest(store, path, "tea").stored == 1
    judged = ingest(store, path, "tea", renaming=Renaming({"source": "source"}))
    assert "rlhf feedback withdraw --file" in judged.examples["idempotency_conflict"]
    store.database.close()


def test_a_rows_own_key_is_one_for_a_label_where_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({**LABELLED, "idempotency_key": "k-1"}))
    keys = [
        event.idempotency_key
        for told in ({}, {"idempotency_key": "idempotency_key"})
        for event in rows_of(path, Renaming(told))
    ]
    assert (keys[0][:4], keys[1]) == ("row:", "k-1")


def test_who_judged_several_answers_is_stored_where_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    corrected = {"feedback": {"corrected-prediction": "So, then."}}
    path.write_text(json.dumps([{**ANSWERS, **corrected, **NOTES, "by": "ann", "rater_id": "R"}]))
    preference, correction = rows_of(path, Renaming({"rater": "by", "occurred_at": "at"}))
    assert {preference.rater_id, correction.rater_id} == {ANN}
    assert {preference.occurred_at, correction.occurred_at} == {
        datetime(2026, 5, 1, 12, tzinfo=UTC)
    }
    assert {event.rater_id for event in rows_of(path, Renaming())} == {None}


@pytest.mark.parametrize(
    ("row", "field", "format"),
    [
        (PAIR, "interaction_id", "pairs"),
        (WHOLE, "tie", "hh_rlhf"),
        (LABELLED, "choice", "quality"),
        (JUDGED, "idempotency_key", "judgements"),
        (JUDGED, "messages", "judgements"),
        (THUMB, "evaluator", "events"),
        (ANSWERS, "comment", "answers"),
        (TREE, "rater", "oasst"),
        (TREE, "occurred_at", "oasst"),
    ],
)
def test_a_field_that_is_told_and_that_the_format_has_not_is_refused(
    tmp_path: Path, row: dict[str, Any], field: str, format: str
) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps({**row, "who": "ann", "theirs": "x"}))
    needed = f"the format {format} has, as votes.jsonl is read, found {field} told, .* out of "
    for told in (Renaming({field: "theirs"}), Renaming(fixed={field: "x"})):
        with pytest.raises(SourceError, match=f"{needed}--map and --set"):
            rows_of(path, told)
    known = {"source": "who"} if format == "oasst" else {"rater": "who"}
    recipe = Renaming({**known, field: "theirs"}, for_any_file=True)
    # Of others than who voted a recipe says it for whatever files have them.
    if field in formats.WHO:
        with pytest.raises(SourceError, match=f"{needed}feedback.names in the recipe"):
            rows_of(path, recipe)
    else:
        assert rows_of(path, recipe)
    if field != "rater":  # which no file may lack
        assert rows_of(path, replace(recipe, columns={**known, field: "not there"}))


def test_a_path_may_begin_with_a_name_that_holds_dots(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"  # as Argilla writes them flat
    row = {"q": "Why?", "a": "So.", "q.responses": [None, 4], "q.responses.users": ["ann", "bob"]}
    deep = {"q": "Why?", "a": "So.", "q.responses": {"1": 3}, "q.responses.users": {"-1": "eve"}}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(deep)}\n")
    columns = {"prompt": "q", "completion": "a", "value": "q.responses.1"}
    renaming = Renaming({**columns, "rater": "q.responses.users.-1"}, {"kind": "rating"})
    votes = [(event.number, event.rater_id) for event in rows_of(path, renaming)]
    assert votes == [(4, hash_rater("tea", "bob")), (3, hash_rater("tea", "eve"))]


def test_numbers_switches_and_pairs_by_other_names_are_what_they_are_by_ours(
    tmp_path: Path,
) -> None:
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    cases: list[tuple[str, str, Renaming]] = [
        (
            "kind;prompt;completion;value\nscore;q;a;0,8\nscore;q;b;1\n",
            "frage;antwort;note\nq;a;0,8\nq;b;1\n",
            Renaming(
                {"prompt": "frage", "completion": "antwort", "value": "note"}, {"kind": "score"}
            ),
        ),
        (
            "prompt,completion,label,rater\nq,a,true,ann\nq,b,false,ann\n",
            "q,a,ok\nq,a,good\nq,b,bad\n",
            Renaming(
                {"prompt": "q", "completion": "a", "label": "ok"},
                {"rater": "ann"},
                {"good": "true", "bad": "false"},
            ),
        ),
        (
            "prompt,chosen,rejected,tie\nq,a,b,\nq,a,c,true\n",
            "prompt,better,worse,same\nq,a,b,\nq,a,c,true\n",
            Renaming({"chosen": "better", "rejected": "worse", "tie": "same"}),
        ),
        (
            'kind,prompt,completion,value\ncriteria,q,a,"{""polite"": 1}"\n',
            'p,r,said\nq,a,"{""polite"": 1}"\n',
            Renaming({"prompt": "p", "completion": "r", "value": "said"}, {"kind": "criteria"}),
        ),
        (
            "kind,prompt,completion,value\nrating,q,a,5\nrating,q,b,1\n",
            "prompt,completion,stars\nq,a,five stars\nq,b,1\n",
            Renaming({"value": "stars"}, {"kind": "rating"}, {"five stars": "5"}),
        ),
    ]
    for own, other, renaming in cases:
        ours.write_text(own)
        theirs.write_text(other)
        expected = plain(rows_of(ours, Renaming()))
        assert len(expected) > 0
        assert plain(rows_of(theirs, renaming)) == expected
    theirs.with_suffix(".jsonl").write_text('{"q": "q", "a": "a", "good": true}\n')
    [event] = rows_of(
        theirs.with_suffix(".jsonl"), Renaming({"prompt": "q", "completion": "a", "label": "good"})
    )
    assert (event.kind, event.number) == (FeedbackKind.thumbs, 1.0)
    theirs.with_suffix(".jsonl").write_text('{"q": "q", "a": "a", "good": 2}\n')
    words = Renaming({"prompt": "q", "completion": "a", "label": "good"}, {}, {"2": "true"})
    [event] = rows_of(theirs.with_suffix(".jsonl"), words)
    assert event.number == 1.0


def test_what_is_told_wrong_is_refused_before_anything_is_stored(tmp_path: Path) -> None:
    path, lines = tmp_path / "survey.csv", tmp_path / "survey.jsonl"
    path.write_text(CSV)
    lines.write_text('{"a": {"b": 1}}\n{"a": {"c": [1]}}\n')
    wrong = Renaming({"prompt": "Questoin", "completion": "Answer"}, {"kind": "thumbs"})
    with pytest.raises(SourceError, match=r"'Questoin' among .* survey.csv, found \[.*'Answer'"):
        rows_of(path, wrong)
    inside = Renaming({"prompt": "a.b", "completion": "a.c.1", "rater": "a.c.0"})
    with pytest.raises(SourceError, match=r"needed 'a.c.1' among .* survey.jsonl, found \['a'\]"):
        rows_of(lines, inside)
    with pytest.raises(SourceError, match=r"needed fields out of .*, found promt, ratr"):
        Renaming({"promt": "Question"}, {"ratr": "ann"})
    with pytest.raises(SourceError, match="found rater told as both"):
        Renaming({"rater": "Customer"}, {"rater": "ann"})
    store = FeedbackStore(Database(f"sqlite:///{tmp_path / 'feedback.db'}"))
    with pytest.raises(SourceError, match="correct --map"):
        ingest(store, path, "tea", renaming=wrong)
    assert store.agents() == []
    first = ingest(store, path, "tea", renaming=SURVEY)
    again = ingest(store, path, "tea", renaming=SURVEY)
    assert (first.stored, first.quarantined) == (3, {"wrong_type": 1})
    assert (again.stored, again.known) == (0, 3)
    store.database.close()


ANY = replace(SURVEY, for_any_file=True)
OURS = [
    {"kind": "rating", "value": 4, "prompt": "Why?", "completion": "So.", "rater": "ann"},
    {"kind": "thumbs", "value": 0, "prompt": "Where?", "completion": "Here.", "rater": "bob"},
]


@pytest.mark.parametrize("name", ["own.jsonl", "own.csv", "own.json"])
def test_told_once_for_any_file_one_with_our_names_is_read_by_these(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if name.endswith(".csv"):
        rows = [",".join(map(str, row.values())) for row in OURS]
        path.write_text("\n".join([",".join(OURS[0]), *rows]))
    elif name.endswith(".json"):
        path.write_text(json.dumps(OURS))
    else:
        path.write_text("\n".join(map(json.dumps, OURS)))
    assert rows_of(path, ANY) == rows_of(path, Renaming())
    assert [row.kind.value for row in rows_of(path, ANY)] == ["rating", "thumbs"]


def test_told_once_for_any_file_one_with_those_names_is_read_by_those(tmp_path: Path) -> None:
    path, lines = tmp_path / "survey.csv", tmp_path / "survey.jsonl"
    path.write_text(CSV)
    assert rows_of(path, ANY) == rows_of(path, SURVEY)
    said = {"Question": "Why?", "Answer": "So.", "Feedback": "like", "Customer": "ann"}
    lines.write_text(f"{json.dumps(said)}\n")
    assert plain(rows_of(lines, ANY)) == [thumb("Why?", "So.", 1.0, "ann")]


def test_told_once_for_any_file_a_row_may_lack_what_a_vote_may_but_no_file_its_raters(
    tmp_path: Path,
) -> None:
    lines = tmp_path / "log.jsonl"
    some = replace(ANY, columns={**ANY.columns, "comment": "Remark"})
    said = {"Question": "Why?", "Answer": "So.", "Feedback": "like", "Customer": "ann"}
    lines.write_text(f"{json.dumps(said)}\n")
    assert plain(rows_of(lines, some)) == [thumb("Why?", "So.", 1.0, "ann")]
    lines.write_text(json.dumps({**said, "Answer": None}) + "\n")
    [aside] = rows_of(lines, some)
    assert isinstance(aside, QuarantinedRow)
    del said["Customer"]
    lines.write_text(f"{json.dumps(said)}\n")
    with pytest.raises(SourceError, match=r"needed 'Customer' among .*correct feedback.names in"):
        rows_of(lines, some)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("names", [ANY, Renaming(for_any_file=True)])
def test_words_told_beside_hold_in_a_file_with_our_names_and_before_those_told_once(
    tmp_path: Path, suffix: str, names: Renaming
) -> None:
    ours, theirs = tmp_path / f"ours.{suffix}", tmp_path / f"theirs.{suffix}"
    row = {"kind": "thumbs", "prompt": "Why?", "completion": "So.", "value": "meh", "rater": "ann"}
    said = {"Question": "Why?", "Answer": "So.", "Feedback": "meh", "Customer": "ann"}
    for path, values in ((ours, row), (theirs, said)):
        table = f"{','.join(values)}\n{','.join(values.values())}\n"
        path.write_text(table if suffix == "csv" else json.dumps(values))
    words = names.with_words({"meh": "down", "True": "down"}, None)
    assert plain(rows_of(ours, words)) == [thumb("Why?", "So.", 0, "ann")]
    if names is ANY:
        assert plain(rows_of(theirs, words)) == [thumb("Why?", "So.", 0, "ann")]
    once = replace(names, words={"meh": "up", "true": "up", "like": "up"}, zone="Europe/Berlin")
    both = once.with_words({"meh": "down", "True": "down"}, None)
    assert (both.words, both.zone) == (
        {"meh": "down", "True": "down", "like": "up"},
        "Europe/Berlin",
    )
    assert once.with_words({}, "America/Lima").zone == "America/Lima"


def test_a_field_that_comes_first_late_in_a_file_says_who_voted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.feedback.sources.LOOKED_AT", 2)
    names = Renaming(
        {"label": "ok", "source": "meta.by", "comment": "meta.note"},
        words={"EVAL": "model"},
        for_any_file=True,
    )
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    said = {"messages": turns, "ok": True}
    judged = {**said, "meta": {"by": "EVAL", "note": "short"}}
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (said, said, said, judged, said)))
    found = [(row.source, row.comment) for row in rows_of(path, names, "quality")]
    person = ("human", None)
    assert found == [person, person, person, ("model", "short"), person]


@pytest.mark.parametrize("names", [SURVEY, Renaming()])
def test_columns_found_are_shown_as_they_are_written(tmp_path: Path, names: Renaming) -> None:
    path = tmp_path / "survey.csv"
    path.write_text("質問,\u202e\nx,y\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"'質問'.*") as refused:
        rows_of(path, names)
    assert "\u202e" not in str(refused.value)
