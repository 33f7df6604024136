"""What is exported comes back as it was, and nothing in it runs in a spreadsheet."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import FeedbackError, SourceError
from rlhf_pipeline.feedback import flat
from rlhf_pipeline.feedback.export import export
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.feedback.sources import read
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Feedback, FeedbackKind, Interaction, Message, now, user_prompt

AGENT = "tea"
WHEN = datetime(2026, 3, 1, 12, tzinfo=UTC)
INLINE: dict[str, Any] = {"prompt": user_prompt("=SUM(A1)"), "completion": "-1 + @you"}
LONG = (Message("system", "be kind"), Message("user", '["a list?"]'))


def event(kind: FeedbackKind, key: str, **fields: Any) -> Feedback:
    if "interaction_id" not in fields:
        fields = {**INLINE, **fields}
    return Feedback(
        agent_id=AGENT,
        kind=kind,
        idempotency_key=key,
        rater_id="a" * 32,
        occurred_at=WHEN,
        **fields,
    )


def everything() -> list[Feedback]:
    kinds = FeedbackKind
    return [
        event(kinds.thumbs, "1", number=1.0, tags=("kind", "=1+1"), comment="+good"),
        event(kinds.rating, "2", number=4.0, prompt=LONG),
        event(kinds.score, "3", number=0.25, topic="price"),
        event(kinds.correction, "4", text='{"a": "better\ttext"}\r\nline'),
        event(kinds.comment, "5", text="'=quoted; =1+1"),
        event(kinds.criteria, "6", criteria={"safety": 1.0, "helpfulness": 0.5}),
        event(kinds.criteria, "7", criteria={"tone": 0.0}, completion="other"),
        event(kinds.preference, "8", choice="right", other_completion="better", prompt=LONG),
        event(kinds.preference, "9", choice="tie", other_completion="same"),
        event(
            kinds.preference,
            "10",
            choice="left",
            shown_first="other",
            other_completion="first",
            other_prompt=user_prompt("another"),
        ),
        event(kinds.preference, "11", choice="left", other_completion=""),  # it said nothing
        event(
            kinds.preference,
            "12",
            choice="tie",
            other_completion="x",
            other_prompt=INLINE["prompt"],
        ),
    ]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeedbackStore]:
    database = Database(f"sqlite:///{tmp_path}/state/feedback.db")
    yield FeedbackStore(database)
    database.close()


@pytest.mark.parametrize("name", ["votes.jsonl", "votes.csv", "votes", "hf://votes"])
def test_events_come_back_as_they_were(store: FeedbackStore, tmp_path: Path, name: str) -> None:
    store.append(everything())
    out = tmp_path / name.removeprefix("hf://")
    assert export(store.database, AGENT, out) == 12
    source = f"hf://{out}" if name.startswith("hf://") else out
    found = list(read(out / "data" / "train.parquet" if name == "votes" else source, AGENT))
    expected = [_of_origin(e, found[0]) for e in everything()]
    assert found == expected
    again = ingest(store, str(source), AGENT)  # and the same store knows every one
    assert (again.known, again.stored, dict(again.quarantined)) == (12, 0, {})


@pytest.mark.parametrize("name", ["votes.jsonl", "votes.csv", "votes"])
def test_an_answer_that_reads_as_messages_comes_back_as_the_text_it_was(
    store: FeedbackStore, tmp_path: Path, name: str
) -> None:
    in_json = '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'
    texts = {"completion": in_json, "other_completion": "[{'role': 'user', 'content': 'q'}]"}
    said = [event(FeedbackKind.preference, "1", choice="left", **texts)]
    store.append(said)
    export(store.database, AGENT, tmp_path / name)
    again = ingest(store, tmp_path / name, AGENT)
    assert (again.known, again.stored, dict(again.quarantined)) == (1, 0, {})


def _of_origin(event: Feedback, like: Any) -> Feedback:
    return dataclasses.replace(event, origin=like.origin)


def test_votes_on_interactions_carry_their_texts_or_their_ids(
    store: FeedbackStore, tmp_path: Path
) -> None:
    said = [
        Interaction(f"i{n}", AGENT, user_prompt("hi"), f"answer {n}", 0, created_at=now())
        for n in (1, 2)
    ]
    store.add_interactions(said)
    store.append(
        [
            event(FeedbackKind.thumbs, "a", number=1.0, interaction_id="i1"),
            event(FeedbackKind.thumbs, "b", number=0.0, interaction_id="i1"),  # a change of mind
            event(
                FeedbackKind.preference,
                "c",
                choice="right",
                interaction_id="i1",
                other_interaction_id="i2",
            ),
        ]
    )
    out = tmp_path / "votes.jsonl"
    assert export(store.database, AGENT, out) == 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["value"], r["completion"]) for r in rows] == [
        (0.0, "answer 1"),
        ("right", "answer 1"),
    ]
    assert rows[1]["other_completion"] == "answer 2"
    assert "interaction_id" not in rows[0]
    elsewhere = Database(f"sqlite:///{tmp_path}/other/feedback.db")
    assert ingest(FeedbackStore(elsewhere), out, AGENT).stored == 2
    elsewhere.close()
    again = ingest(store, out, AGENT)  # whose votes on these answers they are
    assert (again.known, dict(again.quarantined)) == (2, {})
    rows[0]["value"] = 1.0
    out.write_text(json.dumps(rows[0]))
    assert dict(ingest(store, out, AGENT).quarantined) == {"idempotency_conflict": 1}
    assert export(store.database, AGENT, out, history=True, by_interaction=True) == 3
    assert ingest(store, out, AGENT).known == 3
    assert export(store.database, AGENT, tmp_path / "p.jsonl", what="pairs") == 1
    (pair,) = (json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines())
    assert pair["chosen"] == [{"role": "assistant", "content": "answer 2"}]


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs"])
def test_pairs_are_what_trl_reads_and_ingest_takes(
    store: FeedbackStore, tmp_path: Path, name: str
) -> None:
    store.append(everything())
    out = tmp_path / name
    assert export(store.database, AGENT, out, what="pairs") == 2  # no tie, no other context
    found = list(read(f"hf://{out}" if name == "pairs" else out, AGENT))
    assert all(isinstance(e, Feedback) and e.choice == "left" for e in found)
    assert [(e.completion, e.other_completion) for e in found if isinstance(e, Feedback)] == [
        ('{"a": "better\ttext"}\r\nline', "-1 + @you"),
        ("better", "-1 + @you"),
    ]
    import datasets
    from trl.data_utils import is_conversational

    if name == "pairs":
        rows = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
        assert is_conversational(rows[0])


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs", "hf://pairs", "pairs.csv"])
def test_pairs_come_back_as_the_votes_that_they_were(
    store: FeedbackStore, tmp_path: Path, name: str
) -> None:
    said = [
        Interaction(f"i{n}", AGENT, user_prompt("hi"), f"answer {n}", 0, created_at=now())
        for n in (1, 2)
    ]
    store.add_interactions(said)
    about = {"interaction_id": "i1", "other_interaction_id": "i2", "shown_first": "other"}
    votes = [
        event(FeedbackKind.preference, "on ids", choice="left", **about),
        event(
            *(FeedbackKind.preference, "by a model"),
            choice="left",
            other_completion="x",
            source="model",
        ),
        *(each for each in everything() if each.idempotency_key in ("4", "8")),
    ]
    unsigned = [
        dataclasses.replace(e, rater_id=None, idempotency_key=f"{e.idempotency_key}, unsigned")
        for e in votes
    ]
    store.append([*votes, *unsigned])
    out = tmp_path / name.removeprefix("hf://").replace(".csv", ".jsonl")
    assert export(store.database, AGENT, out, what="pairs") == 8
    source = f"hf://{out}" if name.startswith("hf://") else str(out)
    if name.endswith(".csv"):  # as a spreadsheet would make one of it
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        source = str(tmp_path / name)
        with open(source, "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(rows[0])
            table.writerows([[flat.cell_of(value) for value in row.values()] for row in rows])
    again = ingest(store, source, AGENT)
    assert (again.known, again.stored, dict(again.quarantined)) == (8, 0, {})
    elsewhere = Database(f"sqlite:///{tmp_path}/other/feedback.db")
    assert [ingest(FeedbackStore(elsewhere), source, AGENT).stored for _ in range(2)] == [8, 0]
    elsewhere.close()


def test_a_key_of_another_pair_or_person_is_a_conflict_all_the_same(
    store: FeedbackStore, tmp_path: Path
) -> None:
    store.append(everything())
    out = tmp_path / "pairs.jsonl"
    export(store.database, AGENT, out, what="pairs")
    row = json.loads(out.read_text().splitlines()[1])
    assert row["idempotency_key"] == "8"
    swapped = {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
    others = [swapped, {**row, "rater_id": "b" * 32}, {**row, "idempotency_key": "9"}]
    out.write_text("\n".join(map(json.dumps, others)))
    found = ingest(store, out, AGENT)
    assert (found.known, dict(found.quarantined)) == (0, {"idempotency_conflict": 3})


SIGNS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
    | st.text(" \t\r\n\u2028;,|'=+-@＝\"[a", max_size=12)
)
@example("ok;=1+1")
@example(" =1+1")
@example("' ;'=1")
@example("a,'-b'")
@example("'a','-b'")
@example("NULL")
def test_any_text_survives_a_cell_and_none_runs(text: str) -> None:
    cell = flat.cell_of(text)
    assert flat.text_of(cell) == text
    assert cell not in ("", "NULL", r"\N")  # which say nothing
    assert not cell.startswith((*SIGNS, "\t", "\r", "\n"))
    for piece in re.split(r"[;,|\t]", cell):  # wherever a spreadsheet may split it
        assert not piece.strip().startswith(SIGNS)


def test_text_of_others_keeps_its_apostrophes() -> None:
    for cell in (
        "it's",
        "'tis, they said",
        "['a','-b'];'=c'",
        "'",
        '"Quoted"',
        '"5"',
        '"',
        '"a" b',
    ):
        assert flat.text_of(cell) == cell


def test_every_cell_is_quoted_and_blanks_take_no_time() -> None:
    file = io.StringIO(newline="")
    rows = [{"kind": "comment", "value": "ok;=1+1"}, {"kind": "comment", "value": ' =1 "x"'}]
    assert flat.write_csv(file, iter(rows)) == 2
    _, first, second = file.getvalue().split("\r\n")[:3]
    assert first.startswith('"","comment","\'ok;\'=1+1","",')
    assert second.startswith('"","comment","\' =1 ""x""","",')
    started = time.process_time()
    for text in (";" + " " * 50_000, "\t" * 50_000, "; \n'" * 20_000, "' " * 50_000):
        assert flat.text_of(flat.cell_of(text)) == text
    assert time.process_time() - started < 1


def test_a_table_of_pairs_from_a_spreadsheet_is_taken(store: FeedbackStore, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows(
            [
                ["prompt", "chosen", "rejected", "tie", "rater"],
                ["hi", "hello", "go away", "", "ann"],
                [],
                ["hi", "hello", "hey", "true", "ann"],
                ["hi", "hello", "", "", "ann"],
            ]
        )
    summary = ingest(store, path, AGENT)
    assert (summary.stored, dict(summary.quarantined)) == (2, {"wrong_type": 1})


def test_a_data_set_that_is_no_parquet_is_named(store: FeedbackStore, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(SourceError, match=r"whole parquet file is needed at .*train\.parquet"):
        ingest(store, path, AGENT)


def test_what_cannot_be_written_is_refused(store: FeedbackStore, tmp_path: Path) -> None:
    with pytest.raises(FeedbackError, match="found none; send feedback first"):
        export(store.database, AGENT, tmp_path / "a.jsonl")
    store.append(everything())
    with pytest.raises(FeedbackError, match=r"pairs go to \.jsonl or a folder, found 'a\.csv'"):
        export(store.database, AGENT, tmp_path / "a.csv", what="pairs")
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
