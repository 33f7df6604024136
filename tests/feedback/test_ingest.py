"""Files into a real store: once, with what is wrong beside it."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.errors import SourceError
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.feedback.measures import measured
from rlhf_pipeline.feedback.renaming import Renaming
from rlhf_pipeline.feedback.sources import AS_IT_IS, files_in
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import hash_rater

THUMBS = {"kind": "thumbs", "value": "up", "prompt": "Why?", "completion": "Because."}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeedbackStore]:
    database = db.Database(f"sqlite:///{tmp_path}/state/rlhf.db")
    yield FeedbackStore(database)
    database.close()


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text(text)
    return path


def test_the_same_file_again_stores_nothing_twice(store: FeedbackStore, tmp_path: Path) -> None:
    rows = [{**THUMBS, "completion": f"Answer {i}."} for i in range(25)]
    path = write(tmp_path / "a.jsonl", *rows, "{broken", rows[0])
    first = ingest(store, path, "tea", batch=4)
    assert (first.read, first.stored, first.known) == (27, 25, 1)
    assert first.quarantined == {"broken_json": 1}
    renamed = write(tmp_path / "b.jsonl", *rows, "{broken")
    second = ingest(store, [path, renamed], "tea")
    assert (second.read, second.stored, second.known) == (53, 0, 51)
    assert store.counts("tea") == {"thumbs": 25}
    assert store.quarantined("tea") == {"broken_json": 1}


@pytest.mark.parametrize(
    ("more", "votes"),
    [({}, 1), ({"idempotency_key": "id"}, 1), ({"occurred_at": "at"}, 3), ({"rater": "id"}, 3)],
)
def test_rows_that_differ_in_an_id_alone_are_one_vote(
    store: FeedbackStore, tmp_path: Path, more: dict[str, str], votes: int
) -> None:
    path = tmp_path / "likes.csv"
    path.write_text("id,at,q,a\n" + "".join(f"{n},2026-05-0{n} 12:00Z,Q,A\n" for n in (1, 2, 3)))
    columns = {"prompt": "q", "completion": "a", **more}
    ingest(store, path, "tea", renaming=Renaming(columns, {"kind": "thumbs", "value": "up"}))
    snapshot.take(store.database, "tea", 3, tmp_path / "votes.parquet")
    found = measured(snapshot.read(tmp_path / "votes.parquet"))
    assert (found["is_repeated"] == 0).sum() == votes


def test_rows_of_a_file_whose_name_is_no_text_are_taken_in(
    store: FeedbackStore, tmp_path: Path
) -> None:
    path = write(tmp_path / os.fsdecode(b"caf\xe9.jsonl"), THUMBS, "{broken")
    summary = ingest(store, path, "tea")
    assert (summary.stored, summary.quarantined) == (1, {"broken_json": 1})
    with store.database.read() as connection:
        for table in (db.feedback, db.quarantine):
            assert connection.execute(sa.select(table.c.origin)).scalar() == "caf\\xe9.jsonl"


def test_another_agent_has_its_own_copy(store: FeedbackStore, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", THUMBS)
    assert ingest(store, path, "tea").stored == 1
    assert ingest(store, path, "coffee").stored == 1


PAIR = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
DIALOGUE = "\n\nHuman: Why?\n\nAssistant: "


@pytest.mark.parametrize("column", ["annotator_id", "labeler", "labeler_id", "worker_id"])
@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"chosen": f"{DIALOGUE}Because.", "rejected": f"{DIALOGUE}No."},
        {"prompt": "Why?", "completion": "Because.", "label": True},
        {
            **{"prompt": "Why?", "completion_a": "Because.", "completion_b": "No."},
            "preference": "tie",
        },
    ],
)
def test_who_voted_is_found_under_the_names_that_labelling_tools_give(
    store: FeedbackStore, tmp_path: Path, row: dict[str, Any], column: str
) -> None:
    path = write(tmp_path / "a.jsonl", *({**row, column: who, "id": 7} for who in ("ann", 4711)))
    summary = ingest(store, path, "tea")
    with store.database.read() as connection:
        raters = set(connection.execute(sa.select(db.feedback.c.rater_id)).scalars())
    assert raters == {hash_rater("tea", "ann"), hash_rater("tea", "4711")}
    assert (summary.unsigned, summary.unread) == (0, ())


@pytest.mark.parametrize(
    ("renaming", "unread"),
    [
        (AS_IT_IS, ("id", "meta.by", "meta.at")),
        (Renaming({"source": "meta.by"}), ("id", "meta.at")),
        (Renaming({"rater": "meta.by"}), ()),
    ],
)
def test_votes_that_nobody_signed_are_told_with_the_columns_that_may_say_who(
    store: FeedbackStore, tmp_path: Path, renaming: Renaming, unread: tuple[str, ...]
) -> None:
    more = {"meta": {"by": "human", "at": "noon"}}
    lines = write(tmp_path / "a.jsonl", *({**PAIR, "id": n, **more} for n in range(3)))
    summary = ingest(store, lines, "tea", renaming=renaming)
    assert (summary.unsigned, summary.unread) == (3 if unread else 0, unread)


def test_of_votes_that_somebody_signed_or_no_person_gave_nothing_is_told(
    store: FeedbackStore, tmp_path: Path
) -> None:
    table = tmp_path / "a.csv"
    table.write_text("prompt,chosen,rejected,id,user\nWhy?,Because.,No.,1,ann\n")
    assert ingest(store, table, "tea").unread == ("id", "user")
    thumbs = Renaming({"completion": "chosen"}, {"kind": "thumbs", "value": "up"})
    assert ingest(store, table, "tea", renaming=thumbs).unread == ("rejected", "id", "user")
    plain = write(tmp_path / "b.jsonl", {**THUMBS, "tags": ["a"]}, {**THUMBS, "value": "down"})
    some = write(tmp_path / "c.jsonl", {**PAIR, "id": 1}, {**PAIR, "rater": "ann", "id": 2})
    told = ingest(store, plain, "tea")
    assert (told.unsigned, told.unread) == (2, ())
    assert ingest(store, some, "tea").unsigned == 0
    assert ingest(store, table, "model", source="model").unsigned == 0
    assert ingest(store, [table, plain, some], "all").unsigned == 3


@pytest.mark.parametrize(
    ("found", "unread"),
    [(["u1"], "annotator_id"), ({"id": 3}, "annotator_id.id"), (b"ann", "annotator_id")],
)
def test_a_column_in_which_a_name_was_looked_for_and_not_found_is_told(
    store: FeedbackStore, tmp_path: Path, found: object, unread: str
) -> None:
    path = tmp_path / "a.parquet"
    pd.DataFrame([{**PAIR, "annotator_id": found}]).to_parquet(path)
    summary = ingest(store, path, "tea")
    assert (summary.unsigned, summary.unread) == (1, (unread,))


def test_a_second_annotator_whom_no_name_reads_is_told_of(
    store: FeedbackStore, tmp_path: Path
) -> None:
    def by(name: str, word: str) -> dict[str, Any]:
        return {"who": {"mail": name}, "result": [{"value": {"choices": [word, "other"]}}]}

    names = Renaming(
        {
            **{"prompt": "data.turns.0.content", "completion": "data.answer"},
            **{"value": "notes.0.result.0.value.choices.0", "rater": "notes.0.who.mail"},
        },
        {"kind": "thumbs"},
    )
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    rows = [
        {"data": {"turns": turns, "answer": f"Because {n}."}, "notes": notes}
        for n, notes in enumerate(([by("ann", "up"), by("bob", "down")], [by("ann", "up")]))
    ]
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(rows))
    summary = ingest(store, path, "tea", renaming=names)
    assert (summary.stored, summary.left) == (2, {"notes": 1})
    (remark,) = summary.remarks
    assert remark.startswith("1 of 2 rows have more entries in 'notes' than are named by number")
    assert ".notes[] | $row + {notes: [.]}" in remark
    each = [{**row, "notes": [note]} for row in rows for note in row["notes"]]
    again = ingest(store, write(tmp_path / "each.jsonl", *each), "tea", renaming=names)
    assert (again.stored, again.known, again.remarks) == (1, 2, [])
    both = replace(names, columns={**names.columns, "comment": "notes.-1.who.mail"})
    assert ingest(store, path, "two", renaming=both).left == {}


def test_what_the_store_refuses_goes_to_quarantine_with_its_line(
    store: FeedbackStore, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {**THUMBS, "idempotency_key": "one"},
        {**THUMBS, "idempotency_key": "one", "value": "down"},
        {"kind": "thumbs", "value": 1, "interaction_id": "nobody-saw-it"},
    )
    summary = ingest(store, path, "tea")
    assert (summary.read, summary.stored) == (3, 1)
    assert summary.quarantined == {"idempotency_conflict": 1, "unknown_interaction": 1}
    with store.database.read() as connection:
        lines = connection.execute(db.quarantine.select().order_by(db.quarantine.c.line)).all()
    assert [(row.line, row.rule) for row in lines] == [
        (2, "idempotency_conflict"),
        (3, "unknown_interaction"),
    ]


def test_a_rater_that_cannot_be_one_goes_to_quarantine(
    store: FeedbackStore, tmp_path: Path
) -> None:
    raters = ["\ud800", "a\x00b", "x" * 513, "x" * 512, 7, "", None]
    rows: list[Any] = [{**THUMBS, "rater": rater} for rater in raters]
    pair = {"prompt": "Why?", "chosen": "A.", "rejected": "B."}
    pairs = [{**pair, "annotator": rater} for rater in ("\ud800", "ann")]
    found = [
        ingest(store, write(tmp_path / f"{n}.jsonl", *some), "tea")
        for n, some in enumerate((rows, pairs))
    ]
    assert [one.stored for one in found] == [4, 1]
    assert [one.quarantined for one in found] == [{"bad_text": 2, "too_long": 1}, {"bad_text": 1}]
    with store.database.read() as connection:
        details = list(connection.execute(sa.select(db.quarantine.c.detail)).scalars())
    assert all("rater" in detail for detail in details)


def test_what_was_made_of_votes_is_not_read_again_with_the_folder_around_it(
    store: FeedbackStore, tmp_path: Path
) -> None:
    pair = {"prompt": "Why?", "chosen": "A.", "rejected": "B."}
    write(tmp_path / "around" / "votes.jsonl", THUMBS)
    state = tmp_path / "around" / "state"
    write(state / "feedback.db", "")
    write(state / "agents" / "tea" / "snapshots" / "1f" / "preference_pairs.jsonl", pair)
    assert ingest(store, tmp_path / "around", "tea").read == 1
    write(state / "inbox" / "tea" / "dropped.jsonl", THUMBS)
    assert ingest(store, state / "inbox" / "tea", "tea").read == 1  # who names it, means it


def test_a_folder_is_read_file_by_file_and_an_unreadable_one_is_named(
    store: FeedbackStore, tmp_path: Path
) -> None:
    folder = tmp_path / "inbox"
    write(folder / "a.jsonl", THUMBS)
    write(folder / "deeper" / "b.json", [{"prompt": "Why?", "chosen": "A.", "rejected": "B."}])
    write(folder / "c.jsonl", {"apples": 3})
    write(folder / "notes.txt", "not feedback")
    write(folder / ".half-written.jsonl", THUMBS)
    (folder / "a.csv.gz").write_bytes(gzip.compress(b"kind,value\n")[:-9])
    summary = ingest(store, folder, "tea")
    assert (summary.files, summary.read, summary.stored) == (3, 3, 2)
    assert summary.quarantined == {"damaged_file": 1}
    assert list(summary.unreadable) == [str(folder / "c.jsonl")]
    assert "known format" in summary.unreadable[str(folder / "c.jsonl")]


def test_a_folders_files_come_by_the_numbers_in_their_names(
    store: FeedbackStore, tmp_path: Path
) -> None:
    folder = tmp_path / "votes"
    for name, word in (("may-9/1", "up"), ("may-10/1", "down"), ("may-10/02", "up")):
        write(folder / f"{name}.jsonl", {**THUMBS, "value": word, "rater": "ann", "tags": [name]})
    names = [str(path.relative_to(folder)) for path in files_in(folder)]
    assert names == ["may-9/1.jsonl", "may-10/1.jsonl", "may-10/02.jsonl"]
    ingest(store, folder, "tea")
    with store.database.read() as connection:
        assert (
            connection.execute(sa.select(db.effective_feedback.c.tags)).scalar_one()
            == '["may-10/02"]'
        )


def test_of_rows_set_aside_no_more_are_held_than_a_long_one(
    store: FeedbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.feedback.ingest.LONGEST_ROW", 100)
    rows = [{**THUMBS, "value": f"{'perhaps' * 9} {i}"} for i in range(5)]
    path, told = write(tmp_path / "a.jsonl", *rows), list[object]()
    summary = ingest(store, path, "tea", on_progress=lambda facts: told.append(facts["read"]))
    assert (summary.quarantined, told) == ({"wrong_type": 5}, [1, 2, 3, 4, 5])


def test_a_named_file_that_cannot_be_read_is_an_error(store: FeedbackStore, tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", THUMBS)
    with pytest.raises(SourceError, match="check the path"):
        ingest(store, [good, tmp_path / "missing.jsonl"], "tea")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(SourceError, match="found a pipe or device"):
        ingest(store, [good, tmp_path / "pipe.jsonl"], "tea")
    assert store.counts("tea") == {}
    other = write(tmp_path / "u.jsonl", {"apples": 3})
    with pytest.raises(SourceError, match=r"known format.*name the format$"):
        ingest(store, other, "tea")
    told = "of 1 rows before that 1 were stored, 0 were known and 0 are in quarantine"
    with pytest.raises(SourceError, match=f"known format.*; {told}$"):
        ingest(store, [good, other], "tea")
    assert store.counts("tea") == {"thumbs": 1}
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="check the folder"):
        ingest(store, tmp_path / "empty", "tea")


def test_progress_is_told_in_bytes_and_rows(store: FeedbackStore, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({**THUMBS, "completion": f"{i}"} for i in range(10)))
    heard: list[dict[str, Any]] = []
    ingest(store, path, "tea", batch=4, on_progress=lambda facts: heard.append(dict(facts)))
    assert [facts["read"] for facts in heard] == [4, 8, 10]
    assert heard[-1]["bytes_read"] == heard[-1]["bytes_total"] == path.stat().st_size
    assert {facts["file"] for facts in heard} == {str(path)}
