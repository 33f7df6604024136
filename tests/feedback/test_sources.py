"""Every format from a file written here, dirt of every sort, and bounded memory."""

from __future__ import annotations

import gzip
import json
import re
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_pipeline.errors import SourceError
from rlhf_pipeline.feedback import flat as tables
from rlhf_pipeline.feedback import formats, lines, sources
from rlhf_pipeline.feedback.formats import event_of, to_row
from rlhf_pipeline.feedback.lines import Position, parse, raw_rows, unpacked
from rlhf_pipeline.feedback.raters import Person, is_signed_by
from rlhf_pipeline.feedback.renaming import Renaming
from rlhf_pipeline.feedback.rules import check_event
from rlhf_pipeline.feedback.sources import files_in, passed_over, read
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Message,
    QuarantinedRow,
    hash_rater,
    user_prompt,
)

THUMBS = {"kind": "thumbs", "value": "up", "prompt": "Why?", "completion": "Because."}


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """Write one row a line: values as JSON, bytes as they are."""
    content = b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read_all(path: Path | str, **options: Any) -> tuple[list[Feedback], list[QuarantinedRow]]:
    """Return the events and the rows set aside, each in order."""
    rows = list(read(path, "tea", **options))
    return (
        [row for row in rows if isinstance(row, Feedback)],
        [row for row in rows if isinstance(row, QuarantinedRow)],
    )


def rules_of(aside: list[QuarantinedRow]) -> list[tuple[int | None, str]]:
    return [(row.line, row.rule) for row in aside]


# -- our own events -----------------------------------------------------------------------------


def test_events_of_every_kind_are_read(tmp_path: Path) -> None:
    target = {"prompt": [{"role": "user", "content": "Why?"}], "completion": "Because."}
    rows = [
        {"kind": "thumbs", "value": True, **target},
        {"kind": "thumbs", "value": "down", **target},
        {"kind": "rating", "value": 4, "interaction_id": "i-1", "rater": "ann@example.org"},
        {"kind": "score", "value": 0.25, **target, "tags": ["short"], "topic": "tea"},
        {"kind": "correction", "value": "Because of tea.", **target},
        {"kind": "preference", "value": "right", "other_completion": "No.", **target},
        {"kind": "criteria", "value": {"safety": 1}, **target},
        {"kind": "comment", "value": "hm", **target, "occurred_at": "2026-01-02T03:04:05Z"},
    ]
    events, aside = read_all(write_lines(tmp_path / "f.jsonl", rows))
    assert aside == []
    assert [e.number for e in events] == [1, 0, 4, 0.25, None, None, None, None]
    assert events[2].rater_id == hash_rater("tea", "ann@example.org")
    assert events[2].interaction_id == "i-1"
    assert events[3].tags == ("short",)
    assert events[3].topic == "tea"
    assert events[4].text == "Because of tea."
    assert events[5].choice == "right"
    assert events[5].other_completion == "No."
    assert events[6].criteria == {"safety": 1.0}
    assert events[7].occurred_at == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert {e.origin for e in events} == {"f.jsonl"}


def test_a_rater_of_blanks_is_nobody(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text("kind,value,prompt,completion,rater\nthumbs,up,Why?,Because., \n")
    blank = write_lines(tmp_path / "f.jsonl", [{**THUMBS, "rater": name} for name in ("", "\t ")])
    for file in (path, blank):
        events, aside = read_all(file)
        assert ({event.rater_id for event in events}, aside) == ({None}, [])


def test_two_voters_or_two_values_in_one_row_are_refused(tmp_path: Path) -> None:
    ann, bob = (hash_rater("tea", name) for name in ("ann", "bob"))
    rows = [
        {**THUMBS, "rater": "ann", "rater_id": bob},
        {**THUMBS, "rater": "ann", "rater_id": ann},
        {**THUMBS, "rater": "", "rater_id": bob},
        {**THUMBS, "number": 0},
        {**THUMBS, "text": "No help at all."},
        {**THUMBS, "value": None, "text": "No help at all."},
    ]
    events, aside = read_all(write_lines(tmp_path / "f.jsonl", rows))
    assert [event.rater_id for event in events] == [ann, bob]
    assert rules_of(aside) == [
        (1, "repeated_field"),
        (4, "repeated_field"),
        (5, "repeated_field"),
        (6, "value_missing"),
    ]


def test_a_data_set_of_pandas_is_read(tmp_path: Path) -> None:
    path, when = tmp_path / "votes.parquet", datetime(2026, 5, 1, 12, tzinfo=UTC)
    frame = pd.DataFrame([{**THUMBS, "value": 1.0, "rater": 7, "occurred_at": when}] * 2)
    frame["rater"] = [7, None]  # a number, so 7.0 and NaN
    frame["completion"] = ["A.", "B."]
    frame["kind"] = frame["kind"].astype("category")
    frame.to_parquet(path)
    events, aside = read_all(path)
    assert aside == []
    assert [event.rater_id for event in events] == [hash_rater("tea", "7"), None]
    assert [event.occurred_at for event in events] == [when, when]
    frame["occurred_at"] = frame["occurred_at"].dt.tz_localize(None)
    frame.to_parquet(path)
    assert rules_of(read_all(path)[1]) == [(1, "bad_time"), (2, "bad_time")]
    assert rules_of(read_all(write_lines(tmp_path / "f.jsonl", [{**THUMBS, "rater": 2e16}]))[1])


def test_the_index_that_pandas_saved_is_no_field(tmp_path: Path) -> None:
    first, path = tmp_path / "once.csv", tmp_path / "again.csv"
    frame = pd.DataFrame([{**THUMBS, "completion": name} for name in "abc"])
    frame.to_csv(first)
    pd.read_csv(first).to_csv(path)
    pd.read_csv(path).to_csv(tmp_path / "thrice.csv")
    pd.read_csv(first).to_parquet(tmp_path / "again.parquet")
    frame.loc[[2, 0, 1]].to_parquet(tmp_path / "sorted.parquet")
    keys = {event.idempotency_key for event in read_all(first)[0]}
    for name in ("again.csv", "thrice.csv", "again.parquet", "sorted.parquet"):
        events, aside = read_all(tmp_path / name)
        assert ({event.idempotency_key for event in events}, aside) == (keys, [])
    numbered = Renaming(columns={"idempotency_key": "Unnamed: 0"})  # unless it is told as one
    events, _ = read_all(path, renaming=numbered)
    assert [event.idempotency_key for event in events] == ["0", "1", "2"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_criterion_that_is_null_was_not_judged(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"judged.{suffix}"
    judged: list[dict[str, float | None]] = [{"helpful": 0.5}, {"polite": 1.0}, {"helpful": None}]
    frame = pd.DataFrame([{**THUMBS, "kind": "criteria", "value": value} for value in judged])
    if suffix == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)
    events, aside = read_all(path)
    assert [event.criteria for event in events] == judged[:2]
    assert rules_of(aside) == [(3, "value_missing")]


BERLIN = Renaming(zone="Europe/Berlin")


def test_moments_without_a_zone_are_of_the_one_that_is_told(tmp_path: Path) -> None:
    told = ("2026-05-01 14:00", "2026-01-01", "2026-05-01T12:00:00Z", "2026-05-01T12:00:00-04:00")
    rows = [{**THUMBS, "completion": when, "occurred_at": when} for when in (*told, "1.5.2026")]
    events, aside = read_all(write_lines(tmp_path / "f.jsonl", rows), renaming=BERLIN)
    assert [event.occurred_at for event in events] == [
        datetime(2026, 5, 1, 12, tzinfo=UTC),  # in summer two hours before Greenwich
        datetime(2025, 12, 31, 23, tzinfo=UTC),
        datetime(2026, 5, 1, 12, tzinfo=UTC),  # what has one keeps it
        datetime(2026, 5, 1, 16, tzinfo=UTC),
    ]
    assert rules_of(aside) == [(5, "bad_time")]
    assert aside[0].detail.startswith("needed occurred_at as ISO 8601 (2026-05-01 12:00), found")
    _, aside = read_all(write_lines(tmp_path / "f.jsonl", rows))
    assert rules_of(aside) == [(1, "bad_time"), (2, "bad_time"), (5, "bad_time")]
    assert aside[0].detail.endswith("rlhf ingest --zone Europe/Berlin")


def test_moments_at_the_edge_of_the_calendar_are_of_a_year_that_every_zone_has(
    tmp_path: Path,
) -> None:
    told = ("0002-01-01T00:00+14:00", "9998-12-31T23:59:59-12:00", "0002-01-01T00:00Z")
    rows = [{**THUMBS, "completion": when, "occurred_at": when} for when in told]
    events, aside = read_all(write_lines(tmp_path / "f.jsonl", rows))
    assert rules_of(aside) == [(1, "bad_time"), (2, "bad_time")]
    assert [event.occurred_at for event in events] == [datetime(2, 1, 1, tzinfo=UTC)]


def test_a_moment_as_a_number_is_told_how_moments_are_written(tmp_path: Path) -> None:
    counts = (1682351591.1, 1682351591100, True)
    # As text they could be the year 1770 at 23:45.
    texts = ("1770123112345", "1770123112345.0", "1770123112345Z", "1795000000000", "1770123112")
    rows = [{**THUMBS, "occurred_at": when} for when in (*counts, *texts)]
    _, aside = read_all(write_lines(tmp_path / "f.jsonl", rows))
    assert rules_of(aside) == [(line, "bad_time") for line in range(1, 9)]
    assert aside[0].detail.startswith(
        "needed occurred_at as ISO 8601 with its zone, found 1682351591.1;"
    )
    words = "write a count of seconds or milliseconds as 2026-05-01T12:00:00Z"
    assert {row.detail.rpartition("; ")[2] for row in aside} == {words}
    (tmp_path / "f.csv").write_text(
        "kind,value,prompt,completion,occurred_at\n"
        "thumbs,up,Why?,So.,1770123112345\n"
        "thumbs,up,Why?,So.,20260501\n"
        "thumbs,up,Why?,So.,20260501T1400\n"
    )
    events, aside = read_all(tmp_path / "f.csv", renaming=BERLIN)
    assert rules_of(aside) == [(2, "bad_time")]
    days = [datetime(2026, 4, 30, 22, tzinfo=UTC), datetime(2026, 5, 1, 12, tzinfo=UTC)]
    assert [event.occurred_at for event in events] == days


def test_a_number_that_a_parquet_column_has_as_text_is_read_as_in_other_tables(
    tmp_path: Path,
) -> None:
    path, words = tmp_path / "votes.parquet", ["'=a', '-b'", '"so"', "[1]"]
    kinds, values = ["score", "rating", "thumbs"], ["0,8", "4,0", "1"]
    frame = pd.DataFrame({"prompt": words, "completion": words, "kind": kinds, "value": values})
    frame.to_parquet(path)
    events, aside = read_all(path)
    assert ([event.number for event in events], aside) == ([0.8, 4, 1], [])
    texts = [(event.prompt, event.completion) for event in events]
    assert texts == [(user_prompt(word), word) for word in words]  # as they stand there
    frame.rename(columns={"value": "note"}).to_parquet(path)
    named = Renaming(columns={"value": "note"}, words={"1": "down"})
    events, aside = read_all(path, renaming=named)
    assert ([event.number for event in events], aside) == ([0.8, 4, 0], [])
    labels = ["True", "false", "maybe"]
    pd.DataFrame({"prompt": words, "completion": words, "label": labels}).to_parquet(path)
    events, aside = read_all(path)
    assert ([event.number for event in events], rules_of(aside)) == ([1, 0], [(3, "wrong_type")])


def test_numbers_of_a_database_are_numbers_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "votes.parquet"
    rows = [
        {**THUMBS, "kind": "rating", "value": Decimal("4.00"), "rater": Decimal(10**20 + 17)},
        {**THUMBS, "kind": "score", "value": Decimal("0.25"), "rater": Decimal(17)},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    events, aside = read_all(path)
    assert ([event.number for event in events], aside) == ([4, 0.25], [])
    raters = [hash_rater("tea", f"{10**20 + 17}"), hash_rater("tea", "17")]
    assert [event.rater_id for event in events] == raters
    stars = Renaming(columns={"value": "stars"}, words={"4": "up"})
    pq.write_table(pa.Table.from_pylist([{**THUMBS, "value": None, "stars": Decimal("4.0")}]), path)
    assert [event.number for event in read_all(path, renaming=stars)[0]] == [1]


def test_a_number_that_is_none_is_missing_in_parquet(tmp_path: Path) -> None:
    path, nan = tmp_path / "votes.parquet", float("nan")
    pair = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
    rows = [{**pair, "rater": nan, "chosen_score": nan}, {**pair, "rater": 7.0, "chosen_score": 1}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    events, aside = read_all(path)
    assert [event.rater_id for event in events] == [None, hash_rater("tea", "7")]
    assert aside == []
    pq.write_table(pa.Table.from_pylist([{**THUMBS, "value": nan}]), path)
    assert rules_of(read_all(path)[1]) == [(1, "value_missing")]


def test_a_row_of_parquet_that_cannot_be_read_is_set_aside_by_itself(tmp_path: Path) -> None:
    path, n = tmp_path / "votes.parquet", 9
    texts = [b"Why?"] * n
    texts[3] = b"\xff"
    moments = [0] * n
    moments[6] = 10**17  # the year 5138
    moments[7] = 9 * 10**17
    columns = {
        **{name: [THUMBS[name]] * n for name in ("kind", "value", "completion")},
        "prompt": pa.array(texts, pa.binary()).view(pa.string()),
        "occurred_at": pa.array(moments, pa.int64()).view(pa.timestamp("us", tz="UTC")),
        "rater": [f"ann{i}" for i in range(n)],
    }
    pq.write_table(pa.table(columns), path)
    events, aside = read_all(path)
    assert len(events) == n - 2
    assert rules_of(aside) == [(4, "not_utf8"), (8, "bad_time")]
    assert "can't decode byte 0xff" in aside[0].detail
    signed = [json.loads(str(row.raw))["rater"] for row in aside]  # so that an erasure finds it
    assert signed == ["ann3", "ann7"]


@pytest.mark.parametrize("is_dictionary", [True, False])
def test_a_text_that_rows_of_parquet_share_is_not_held_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dictionary: bool
) -> None:
    monkeypatch.setattr("rlhf_pipeline.feedback.sources.PARQUET_HELD", 8 << 20)
    path, n = tmp_path / "votes.parquet", 500
    columns = {name: [said] * n for name, said in THUMBS.items()}
    texts = pa.array(["x" * (1 << 19), "short"])
    comments = pa.DictionaryArray.from_arrays([0] * (n - 1) + [1], texts)
    if not is_dictionary:
        comments = comments.dictionary_decode()
    pq.write_table(pa.table({**columns, "comment": comments, "rater": ["ann"] * n}), path)
    del comments
    before, peak = pa.total_allocated_bytes(), 0
    rows: list[Feedback | QuarantinedRow] = []
    for row in read(path, "tea", longest_row=1 << 19):
        rows.append(row)
        peak = max(peak, pa.total_allocated_bytes() - before)
    *aside, last = rows
    assert (len(aside), type(last)) == (n - 1, Feedback)
    for row in aside:
        assert isinstance(row, QuarantinedRow)
        assert row.rule == "line_too_long"
        assert "at most 524288 bytes in a row, found 5243" in row.detail
        assert '"rater": "ann"' in str(row.raw)  # for an erasure
        assert len(str(row.raw)) < lines.SHOWN
    assert peak < 40 << 20


@pytest.mark.parametrize("suffix", ["xlsx", "parquet"])
def test_dates_in_the_cells_of_a_table_are_of_the_zone_that_is_told(
    tmp_path: Path, suffix: str
) -> None:
    moment, day = datetime(2026, 5, 1, 14), date(2026, 5, 1)  # noqa: DTZ001 - as a cell has it
    events = []
    for cell in (moment, day):
        row = {**THUMBS, "occurred_at": cell}
        path = tmp_path / f"votes.{suffix}"
        if suffix == "xlsx":
            import openpyxl

            book = openpyxl.Workbook()
            book.active.append(list(row))
            book.active.append(list(row.values()))
            book.save(path)
        else:
            pq.write_table(pa.Table.from_pylist([row]), path)
        events += read_all(path, renaming=BERLIN)[0]
        assert rules_of(read_all(path)[1]) == [(2 if suffix == "xlsx" else 1, "bad_time")]
    assert [event.occurred_at for event in events] == [
        datetime(2026, 5, 1, 12, tzinfo=UTC),
        datetime(2026, 4, 30, 22, tzinfo=UTC),
    ]


@pytest.mark.parametrize("name", ["Europe/Berlinn", "", "Europe", "../etc/passwd", "+02:00"])
def test_a_zone_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(SourceError, match="IANA name, such as Europe/Berlin, found"):
        Renaming(zone=name)


def test_a_row_without_a_key_gets_one_from_what_it_says(tmp_path: Path) -> None:
    turned = dict(reversed(THUMBS.items()))
    rows = [THUMBS, turned, {**THUMBS, "completion": "So."}, {**THUMBS, "idempotency_key": "mine"}]
    events, _ = read_all(write_lines(tmp_path / "a.jsonl", rows))
    keys = [e.idempotency_key for e in events]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert keys[3] == "mine"
    again, _ = read_all(write_lines(tmp_path / "renamed.jsonl", rows))
    assert [e.idempotency_key for e in again] == keys
    other_agent = list(read(tmp_path / "a.jsonl", "coffee"))
    assert isinstance(other_agent[0], Feedback)
    assert other_agent[0].idempotency_key != keys[0]


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30)
prompts = st.builds(
    lambda before, last: (*before, Message("user", last)),
    st.lists(st.builds(Message, st.sampled_from(["user", "assistant", "system"]), texts)),
    texts,
)
unit = st.floats(0, 1)
values = st.one_of(
    st.builds(lambda n: (FeedbackKind.thumbs, {"number": float(n)}), st.integers(0, 1)),
    st.builds(lambda n: (FeedbackKind.rating, {"number": float(n)}), st.integers(1, 5)),
    st.builds(lambda n: (FeedbackKind.score, {"number": n}), unit),
    st.builds(lambda t: (FeedbackKind.correction, {"text": t + "."}), texts),
    st.builds(lambda t: (FeedbackKind.comment, {"text": t + "."}), texts),
    st.builds(
        lambda c, o, p, s: (
            FeedbackKind.preference,
            {"choice": c, "other_completion": o, "other_prompt": p, "shown_first": s},
        ),
        st.sampled_from(["left", "right", "tie", "both_bad"]),
        texts,
        st.none() | prompts,
        st.sampled_from(["this", "other"]),
    ),
    st.builds(
        lambda c: (FeedbackKind.criteria, {"criteria": c}),
        st.dictionaries(texts.map(lambda t: t + "."), unit, min_size=1, max_size=3),
    ),
)
feedback = st.builds(
    lambda value, prompt, completion, **rest: Feedback(
        agent_id="tea", kind=value[0], prompt=prompt, completion=completion, **value[1], **rest
    ),
    values,
    prompts,
    texts,
    idempotency_key=texts.map(lambda t: t + "."),
    rater_id=st.none() | st.text("0123456789abcdef", min_size=32, max_size=32),
    source=st.sampled_from(["human", "model", "code"]),
    occurred_at=st.none() | st.datetimes(datetime(2000, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001 - zone added
    tags=st.lists(texts, max_size=3).map(tuple),
    comment=st.none() | texts,
    topic=st.none() | texts,
)


@given(feedback)
def test_an_event_written_as_a_row_reads_back_the_same(event: Feedback) -> None:
    check_event(event)
    line = lines.RawRow(2, json.dumps(to_row(event)).encode())
    assert event_of(parse(line), "tea", event.origin) == event


# -- other formats ------------------------------------------------------------------------------


def test_pairs_as_text_messages_and_conversations_are_the_same_pair(tmp_path: Path) -> None:
    def said(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text}]

    rows = [
        {"prompt": "Why?", "chosen": "A.", "rejected": "B.", "rater": 7, "score": 3},
        {"prompt": said("")[:1], "chosen": said("A.")[1:], "rejected": said("B.")[1:]},
        {"chosen": said("A."), "rejected": said("B."), "tie": True},
        {
            "conversations": [{"from": "human", "value": "Why?"}],
            "chosen": {"from": "gpt", "value": "A."},
            "rejected": {"from": "gpt", "value": "B."},
        },
        {
            "question": "Why?",
            "chosen": "A.",
            "rejected": "B.",
            "score_chosen": 2,
            "score_rejected": 2,
        },
    ]
    events, aside = read_all(write_lines(tmp_path / "p.jsonl.gz", rows))
    assert aside == []
    assert {(e.prompt, e.completion, e.other_completion) for e in events} == {
        (user_prompt("Why?"), "A.", "B.")
    }
    assert [e.choice for e in events] == ["left", "left", "tie", "left", "tie"]
    assert events[0].rater_id == hash_rater("tea", "7")


SYSTEM = {"role": "system", "content": "You sell tea."}
ASKED, BACK = ({"role": "user", "content": text} for text in ("Which is mild?", "Price?"))
HELLO, WHITE = ({"role": "assistant", "content": text} for text in ("Hello.", "White tea."))


def of_sides(prompt: Any, before: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield a row as TRL has it, and one with a label, whose sides have these messages first."""
    four, ask = ([*before, {"role": "assistant", "content": text}] for text in ("Four.", "Ask."))
    yield {"prompt": prompt, "chosen": four, "rejected": ask}
    yield {"prompt": prompt, "completion": four, "label": True}


@pytest.mark.parametrize(
    ("prompt", "before", "whole"),
    [
        ([SYSTEM, ASKED], [WHITE, BACK], [SYSTEM, ASKED, WHITE, BACK]),
        ([SYSTEM], [BACK], [SYSTEM, BACK]),
        ([SYSTEM], [HELLO, BACK], [SYSTEM, HELLO, BACK]),
        ([ASKED, WHITE], [BACK], [ASKED, WHITE, BACK]),
        # A side that is the whole conversation brings the prompt, and what stands before it.
        (f"{ASKED['content']}\n", [ASKED], [ASKED]),
        ([ASKED, WHITE], [ASKED, WHITE, BACK], [ASKED, WHITE, BACK]),
        (ASKED["content"], [SYSTEM, ASKED], [SYSTEM, ASKED]),
        (BACK["content"], [ASKED, WHITE, BACK], [ASKED, WHITE, BACK]),
        ([ASKED, WHITE], [ASKED], [ASKED]),  # as a chat that has an answer already
    ],
)
def test_a_side_of_several_messages_goes_on_where_the_prompt_ends_or_is_all_of_it(
    tmp_path: Path, prompt: Any, before: list[dict[str, str]], whole: list[dict[str, str]]
) -> None:
    expected = tuple(Message(formats.ROLES[one["role"]], one["content"]) for one in whole)
    for row in of_sides(prompt, before):
        events, aside = read_all(write_lines(tmp_path / "t.jsonl", [row]))
        assert aside == []
        assert [(e.prompt, e.completion, e.other_prompt) for e in events] == [
            (expected, "Four.", None)
        ]


@pytest.mark.parametrize(
    ("prompt", "before", "found"),
    [
        ([SYSTEM, ASKED], [BACK], "user after user"),
        ("template-3", [ASKED], "user after user"),
        ([ASKED], [SYSTEM, BACK], "system after user"),
        ([ASKED], [HELLO, ASKED], "the prompt further down"),
    ],
)
def test_a_side_that_may_be_all_of_a_conversation_or_go_on_with_one_is_set_aside(
    tmp_path: Path, prompt: Any, before: list[dict[str, str]], found: str
) -> None:
    for row in of_sides(prompt, before):
        events, aside = read_all(write_lines(tmp_path / "t.jsonl", [row]))
        assert (events, rules_of(aside)) == ([], [(1, "repeated_field")])
        assert f"or goes on after it, found '{found}'; mend the row" in aside[0].detail
        assert aside[0].detail.endswith("is the whole conversation")


def test_pairs_that_cannot_be_meant_are_set_aside(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Why?", "chosen": "A.", "rejected": "B."},
        {"prompt": "Why?", "chosen": "A.", "rejected": None},
        {"chosen": "A.", "rejected": "B."},
        {"prompt": "Why?", "chosen": "A.", "rejected": "B.", "tie": "yes"},
        {
            "prompt": "Why?",
            "chosen": "A.",
            "rejected": "B.",
            "chosen_score": 1,
            "rejected_score": 2,
        },
        {"prompt": "Why?", "chosen": [{"role": "user", "content": "A."}], "rejected": "B."},
        {"prompt": "Why?", "chosen": [{"role": "alien", "content": "A."}], "rejected": "B."},
        {"prompt": [7], "chosen": "A.", "rejected": "B."},
    ]
    events, aside = read_all(write_lines(tmp_path / "p.jsonl", rows))
    assert len(events) == 1
    assert [row.rule for row in aside] == [
        "wrong_type",
        "no_prompt",
        "wrong_type",
        "value_out_of_range",
        "wrong_type",
        "wrong_type",
        "wrong_type",
    ]


SPOKEN = [{"content": "Why?", "role": "user"}]
ANSWERED = [*SPOKEN, {"content": "It's so.", "role": "assistant"}]
REFUSED = [*SPOKEN, {"content": "No.", "role": "assistant"}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_messages_as_json_text_are_read_as_messages(tmp_path: Path, suffix: str) -> None:
    vote = {"kind": "thumbs", "value": 1.0, "prompt": json.dumps(SPOKEN), "completion": "It's so."}
    files: dict[str, list[dict[str, Any]]] = {
        "pairs": [{"chosen": json.dumps(ANSWERED), "rejected": json.dumps(REFUSED)}],
        "asked": [{"prompt": json.dumps(SPOKEN), "chosen": "It's so.", "rejected": "No."}],
        "quality": [{"messages": json.dumps(ANSWERED), "quality": 1.0}],
        "events": [vote],
    }
    for name, rows in files.items():
        path = tmp_path / f"{name}.{suffix}"
        frame = pd.DataFrame(rows)
        if suffix == "jsonl":
            frame.to_json(path, orient="records", lines=True)
        elif suffix == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False)
        events, aside = read_all(path)
        assert aside == []
        said = {(event.prompt, event.completion, event.other_completion) for event in events}
        other = "No." if name in ("pairs", "asked") else None
        assert said == {(user_prompt("Why?"), "It's so.", other)}


def test_messages_that_pandas_wrote_into_a_csv_file_as_python_does_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "p.csv"
    frame = pd.DataFrame([{"prompt": "Why?", "chosen": ANSWERED, "rejected": REFUSED}] * 2)
    frame.to_csv(path, index=False)
    frame.to_parquet(tmp_path / "p.parquet")
    assert read_all(tmp_path / "p.parquet")[0]
    again = tmp_path / "again.csv"  # lists of a Parquet file are written without commas
    pd.read_parquet(tmp_path / "p.parquet").to_csv(again, index=False)
    for file in (path, again):
        events, aside = read_all(file)
        assert (events, {row.rule for row in aside}) == ([], {"wrong_type"})
        assert aside[0].detail == (
            "needed chosen as text or a list of messages, found messages written as Python text; "
            "write them as JSON"
        )
    code = [{"prompt": "[{'role': 1}]", "chosen": "{'value': '1'}", "rejected": "[1]"}]
    events, aside = read_all(write_lines(tmp_path / "code.jsonl", code))
    assert (len(events), aside) == (1, [])


CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
CALLED = [*SPOKEN, CALL, {"role": "tool", "content": "Sunny."}, ANSWERED[-1]]


@pytest.mark.parametrize(
    "messages",
    [
        [CALL],
        CALLED,
        [{**CALL, "content": "A moment."}, *CALLED[2:]],
        [{name: CALL[name] for name in ("role", "tool_calls")}],  # without what is None
        {"role": "assistant", "content": None, "refusal": "No."},
        [{"from": "gpt", "value": None}],
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_messages_without_a_text_are_no_text_of_messages(
    tmp_path: Path, suffix: str, messages: Any
) -> None:
    told = json.dumps(messages)
    for name, row in (
        ("pairs", {"prompt": "Why?", "chosen": told, "rejected": "No."}),
        ("asked", {"prompt": told, "chosen": "Yes.", "rejected": "No."}),
        ("quality", {"messages": told, "label": True}),
        ("events", {**THUMBS, "prompt": told}),
    ):
        path, frame = tmp_path / f"{name}.{suffix}", pd.DataFrame([row])
        if suffix == "jsonl":
            write_lines(path, [row])
        elif suffix == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False)
        events, aside = read_all(path)
        assert (events, rules_of(aside)) == ([], [(2 if suffix == "csv" else 1, "wrong_type")])
        assert "each message's content as text, found" in aside[0].detail or (
            "a role out of user, human" in aside[0].detail
        )


@pytest.mark.parametrize(
    "message",
    [
        {"id": 1, "role": "user", "content": "hi"},
        {
            "created": datetime(2026, 5, 1, tzinfo=UTC),
            "name": None,
            "role": "user",
            "content": "hi",
        },
        {"content": None, "role": "assistant"},
        {"role": "assistant", "content": None},
        CALL,
    ],
)
def test_messages_of_python_are_refused_whatever_they_begin_with(
    tmp_path: Path, message: dict[str, Any]
) -> None:
    path = tmp_path / "p.csv"
    for messages in (message, [message], [message, *ANSWERED]):
        pd.DataFrame([{"prompt": messages, "chosen": "Yes.", "rejected": "No."}]).to_csv(path)
        events, aside = read_all(path)
        assert (events, rules_of(aside)) == ([], [(2, "wrong_type")])
        assert "found messages written as Python text; write them as JSON" in aside[0].detail


@pytest.mark.parametrize(
    "text",
    [
        '{"from": "EUR", "to": "USD", "value": 1.08}',
        "{'from': 'EUR', 'to': 'USD', 'value': '1.08'}",
        '[{"from": "Berlin", "to": "Bonn", "value": "478"}]',
        '{"role": "editor", "content": "x"}',
        '[{"role": "user", "name": "Ann"}, {"role": "admin", "name": "Bob"}]',
        '[{"name": "x"}]',
        '{"total": 5}',
        '[{"role": "user", "content": "hi"}, {"total": 5}]',
        "[]",
        "{}",
        '{"messages": [{"role": "user", "content": "hi"}]}',
        "{'messages': [{'role': 'user', 'content': 'hi'}]}",
        "{'name': 'Ann', 'role': 'user'}",
        "[{'role': 'user', 'content': 'hi'}] gives me a 400, why?",
    ],
)
def test_what_is_json_or_python_of_something_else_is_the_text_it_is(
    tmp_path: Path, text: str
) -> None:
    pair = {"prompt": text, "chosen": text, "rejected": "No."}
    table = tmp_path / "pairs.csv"
    pd.DataFrame([pair]).to_csv(table, index=False)
    for path in (write_lines(tmp_path / "pairs.jsonl", [pair]), table):
        [told], aside = read_all(path)
        assert (told.prompt, told.completion, aside) == (user_prompt(text), text, [])
    # An answer of an event is text, whatever it reads as.
    for answer in (text, json.dumps(ANSWERED), repr(ANSWERED)):
        vote = {**THUMBS, "prompt": text, "completion": answer}
        [told], aside = read_all(write_lines(tmp_path / "votes.jsonl", [vote]))
        assert (told.prompt, told.completion, aside) == (user_prompt(text), answer, [])


def dialogue(*turns: str) -> str:
    names = ("Human", "Assistant")
    return "".join(f"\n\n{names[i % 2]}: {turn}" for i, turn in enumerate(turns))


def test_whole_dialogues_split_at_the_last_answer(tmp_path: Path) -> None:
    rows = [
        {"chosen": dialogue("a", "b", "c", "good"), "rejected": dialogue("a", "b", "c", "bad")},
        {"chosen": dialogue("a", "same"), "rejected": dialogue("a", "same")},
        {"chosen": dialogue("a", "x"), "rejected": dialogue("a", "")},
        {"chosen": "no turns at all", "rejected": dialogue("a", "b")},
        {"chosen": dialogue("a", "b", "thanks"), "rejected": dialogue("a", "b")},
        {"chosen": dialogue("a", "a Human: b"), "rejected": dialogue("a", "b")},
    ]
    events, aside = read_all(write_lines(tmp_path / "h.jsonl.gz", rows))
    before = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    assert (events[0].prompt, events[0].completion) == (before, "good")
    assert (events[0].other_completion, events[0].choice) == ("bad", "left")
    assert events[1].completion == events[1].other_completion == "same"
    assert events[2].other_completion == ""
    assert all(event.other_prompt is None for event in events)
    assert events[3].completion == "a Human: b"
    assert rules_of(aside) == [(4, "no_prompt"), (5, "wrong_type")]
    assert "chosen ending with the assistant's message, found 'user'" in aside[1].detail


def test_a_prompt_of_turns_is_split_as_whole_dialogues_are(tmp_path: Path) -> None:
    asked = f"{dialogue('a', 'b', 'c')}\n\nAssistant:"
    rows: dict[str, dict[str, Any]] = {
        "pairs": {"prompt": asked, "chosen": " good", "rejected": " bad"},
        "whole": {
            "chosen": dialogue("a", "b", "c", "good"),
            "rejected": dialogue("a", "b", "c", "bad"),
        },
        "quality": {"prompt": asked, "completion": " good", "label": True},
        "events": {**THUMBS, "prompt": f"{asked} ", "completion": " good"},
    }
    before = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    for name, row in rows.items():
        [event], aside = read_all(write_lines(tmp_path / f"{name}.jsonl", [row]))
        assert (event.prompt, event.completion, aside) == (before, "good", [])
        assert event.other_completion in ("bad", None)
    told = [f"As I said:{asked}", dialogue("a"), "\n\nAssistant:"]  # nobody cut these
    plain = [{"prompt": text, "chosen": " good", "rejected": "bad"} for text in told]
    events, _ = read_all(write_lines(tmp_path / "plain.jsonl", plain))
    assert [event.prompt for event in events] == [user_prompt(text) for text in told]
    assert {event.completion for event in events} == {" good"}


def test_two_contexts_are_both_kept_and_the_prompt_ends_with_the_user(tmp_path: Path) -> None:
    cut_late = dialogue("a", "b") + "\n\nAssistant: c"
    path = write_lines(
        tmp_path / "h.jsonl",
        [
            {"chosen": dialogue("a", "good"), "rejected": cut_late},
            {"chosen": cut_late, "rejected": dialogue("a", "bad")},
        ],
    )
    events, aside = read_all(path)
    assert aside == []
    assert [(e.completion, e.other_completion, e.choice) for e in events] == [
        ("good", "c", "left"),
        ("bad", "c", "right"),
    ]
    late = (Message("user", "a"), Message("assistant", "b"))
    assert all(e.prompt == user_prompt("a") and e.other_prompt == late for e in events)


def message(name: str, parent: str | None, role: str, **rest: Any) -> dict[str, Any]:
    return {
        "message_id": name,
        "parent_id": parent,
        "text": f"text {name}",
        "role": role,
        **rest,
    }


def tree() -> dict[str, Any]:
    """Return a question with three ranked answers (one deleted) and a follow-up under the best."""
    best = message("b", "a", "assistant", rank=0, emojis={"+1": 3, "-1": 1, "_skip_reply": 9})
    best["replies"] = [
        {
            **message("e", "b", "prompter"),
            "replies": [
                message("f", "e", "assistant", rank=1, replies=[]),
                message("g", "e", "assistant", rank=1.0, replies=[]),
            ],
        }
    ]
    worse = message("c", "a", "assistant", rank=2, emojis={"name": ["-1"], "count": [1]})
    middle = message("d", "a", "assistant", rank=1, emojis={"+1": 1, "-1": 1})
    gone = message("x", "a", "assistant", rank=3, deleted=True)
    root = message("a", None, "prompter", emojis={"+1": 5})
    return {**root, "replies": [worse, best, middle, gone]}


def flat(node: dict[str, Any], tree_id: str) -> list[dict[str, Any]]:
    own = {k: v for k, v in node.items() if k != "replies"} | {"message_tree_id": tree_id}
    return [own, *(row for reply in node.get("replies", []) for row in flat(reply, tree_id))]


def said(events: list[Feedback]) -> set[tuple[Any, ...]]:
    return {
        (e.kind, e.prompt, e.completion, e.other_completion, e.choice, e.number) for e in events
    }


def test_a_ranked_tree_becomes_pairs_and_thumbs(tmp_path: Path) -> None:
    rows = [{"message_tree_id": "a", "tree_state": "ready_for_export", "prompt": tree()}]
    events, aside = read_all(write_lines(tmp_path / "t.jsonl", rows))
    assert aside == []
    question = (Message("user", "text a"),)
    asked_on = (*question, Message("assistant", "text b"), Message("user", "text e"))
    preference, thumbs = FeedbackKind.preference, FeedbackKind.thumbs
    assert said(events) == {
        (preference, question, "text b", "text d", "left", None),
        (preference, question, "text b", "text c", "left", None),
        (preference, question, "text d", "text c", "left", None),
        (preference, asked_on, "text f", "text g", "tie", None),
        (thumbs, question, "text b", None, None, 1.0),
        (thumbs, question, "text c", None, None, 0.0),
    }


@pytest.mark.parametrize("shape", ["bare", "flat", "flat, children first"])
def test_the_same_tree_in_another_shape_is_the_same_feedback(tmp_path: Path, shape: str) -> None:
    whole, _ = read_all(
        write_lines(tmp_path / "t.jsonl", [{"message_tree_id": "a", "prompt": tree()}])
    )
    rows = [tree()] if shape == "bare" else flat(tree(), "a")
    if shape == "flat, children first":
        rows.reverse()
    second = flat(tree() | {"text": "another root"}, "z") if shape != "bare" else []
    events, aside = read_all(write_lines(tmp_path / "m.jsonl", [*rows, *second]))
    assert aside == []
    assert {e.idempotency_key for e in whole} <= {e.idempotency_key for e in events}
    assert len(events) == len(whole) * (2 if second else 1)


def test_flat_messages_without_their_tree_are_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_MESSAGES", 4)
    rows = [
        message("a", None, "prompter"),
        message("b", "a", "assistant", rank=0),
        message("q", "nowhere", "assistant", rank=1),
        message("c", "a", "assistant", rank=1) | {"message_id": 7},
        message("d", "a", "assistant", rank=1),
    ]
    _, aside = read_all(write_lines(tmp_path / "m.jsonl", rows))
    assert sorted(rules_of(aside)) == [(3, "orphan_message"), (4, "missing_field"), (5, "too_long")]


@pytest.mark.parametrize("missing", ["e", "a"])
def test_what_was_said_below_a_missing_message_is_set_aside_too(
    tmp_path: Path, missing: str
) -> None:
    rows = [row for row in flat(tree(), "a") if row["message_id"] != missing]
    events, aside = read_all(write_lines(tmp_path / "m.jsonl", rows))
    lost = {"e": {"f", "g"}, "a": {"b", "c", "d", "x", "e", "f", "g"}}[missing]
    lines = {n for n, row in enumerate(rows, 1) if row["message_id"] in lost}
    assert {*rules_of(aside)} == {(n, "orphan_message") for n in lines}
    assert bool(events) == (missing == "e")


def test_messages_that_are_each_others_parents_are_set_aside(tmp_path: Path) -> None:
    root, *rest = flat(tree(), "a")
    ring = [{**message("r", "s", "prompter"), "message_tree_id": "a"}]
    ring += [{**message("s", "r", "assistant", rank=0), "message_tree_id": "a"}]
    whole, _ = read_all(write_lines(tmp_path / "t.jsonl", [root, *rest]))
    events, aside = read_all(write_lines(tmp_path / "m.jsonl", [root, *ring, *rest]))
    assert said(events) == said(whole)
    assert {*rules_of(aside)} == {(2, "orphan_message"), (3, "orphan_message")}


def test_judged_answers_become_pairs_with_ties_and_a_correction(tmp_path: Path) -> None:
    asked = {"question": "Why?", "passages": [], "prediction 1": "A.", "prediction 2": "B."}
    three = {**asked, "prediction 3": "C.", "preference": [0, 1, 2]}
    rows = [
        {**three, "feedback": {"corrected-prediction": "A, rather."}},
        {**three, "feedback": {"corrected-prediction": ""}, "preference": [1, 1]},
        {**three, "preference": [0, 1.0, 2]},
    ]
    events, aside = read_all(write_lines(tmp_path / "q.jsonl", rows))
    assert [(e.completion, e.other_completion, e.choice, e.text) for e in events] == [
        ("A.", "B.", "tie", None),
        ("A.", "C.", "left", None),
        ("B.", "C.", "right", None),
        ("A.", None, None, "A, rather."),
        ("A.", "B.", "tie", None),
    ]
    assert {e.prompt for e in events} == {user_prompt("Why?")}
    assert rules_of(aside) == [(2, "wrong_type"), (3, "value_out_of_range")]


def test_quality_and_labels_become_scores_and_thumbs(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    rows = [
        {"messages": messages, "quality": 0.75, "rater": "bo"},
        {"messages": messages, "label": False},
        {"prompt": "Why?", "completion": "So.", "label": True},
        {"text": dialogue("Why?", "So."), "quality": 1},
        {"text": "Only a text.", "quality": 0.5},
        {"text": dialogue("Why?", "So.", "Thanks."), "quality": 1},
        {"messages": messages, "quality": 1.5},
        {"messages": messages[:1], "quality": 0.5},
        {"messages": messages[1:], "quality": 0.5},
        {"messages": messages, "quality": True},
        {"completion": "So.", "quality": 0.5},
        {"messages": messages, "label": "good"},
        # As TRL has unpaired preferences.
        {"prompt": messages[:1], "completion": messages[1:], "label": True},
        {"completion": messages, "label": False},
        {"prompt": messages[:1], "completion": messages[:1], "label": True},
    ]
    events, aside = read_all(write_lines(tmp_path / "q.jsonl", rows))
    assert {(e.prompt, e.completion) for e in events} == {(user_prompt("Why?"), "So.")}
    assert [(e.kind.value, e.number) for e in events] == [
        ("score", 0.75),
        ("thumbs", 0.0),
        ("thumbs", 1.0),
        ("score", 1.0),
        ("thumbs", 1.0),
        ("thumbs", 0.0),
    ]
    assert rules_of(aside) == [
        (5, "no_prompt"),
        (6, "wrong_type"),
        (7, "value_out_of_range"),
        (8, "wrong_type"),
        (9, "no_prompt"),
        (10, "wrong_type"),
        (11, "no_prompt"),
        (12, "wrong_type"),
        (15, "wrong_type"),
    ]


WHOLE_ROWS: dict[str, Any] = {
    "events": {
        **THUMBS,
        "kind": "preference",
        "value": "left",
        "other_completion": "c",
        "tags": ["a"],
    },
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c", "tie": False, "chosen_score": 1},
    "hh_rlhf": dict.fromkeys(("chosen", "rejected"), "\n\nHuman: a\n\nAssistant: b"),
    "oasst": {
        "message_tree_id": "1",
        "prompt": {
            "message_id": "1",
            "text": "a",
            "role": "prompter",
            "replies": [
                {"text": "b", "role": "assistant", "rank": 0, "emojis": {"+1": 2}},
                {"text": "c", "role": "assistant", "emojis": {"name": ["+1"], "count": [1]}},
            ],
        },
    },
    "answers": {
        "question": "a",
        "prediction 1": "b",
        "prediction 2": "c",
        "preference": [1],
        "feedback": {"corrected-prediction": "d"},
    },
    "judgements": {
        **dict.fromkeys(("prompt", "completion_a", "completion_b", "evaluator"), "a"),
        "preference": "tie",
        "completion_a_is_acceptable": "yes",
    },
    "quality": {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}], "quality": 1},
}
ODD: tuple[Any, ...] = (
    None,
    "",
    7,
    0.5,
    True,
    [],
    {},
    [None],
    [[]],
    [{}],
    {"name": [{}]},
    {"name": [], "count": 1},
)


def _changed_in_one_place(value: Any) -> Iterator[Any]:
    """Yield the value with something odd in each place, and without each place."""
    places = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, inside in places:
        rest = {k: v for k, v in places if k != key}
        changed = [
            *ODD,
            *(_changed_in_one_place(inside) if isinstance(inside, dict | list) else ()),
        ]
        for whole in (rest, *({**rest, key: each} for each in changed)):
            yield whole if isinstance(value, dict) else [whole[k] for k in sorted(whole)]


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_a_row_with_anything_in_any_place_is_taken_or_set_aside(tmp_path: Path, name: str) -> None:
    path, sound = tmp_path / "rows.jsonl", WHOLE_ROWS[name]
    whole, nothing = read_all(write_lines(path, [sound]), format=name)
    assert nothing == []
    odd = list(_changed_in_one_place(sound))
    events, aside = read_all(write_lines(path, [sound, *odd, sound]), format=name)
    assert events[: len(whole)] == whole == events[-len(whole) :]
    assert {row.line for row in aside} <= {*range(2, len(odd) + 2)}


def test_a_hub_data_set_streams_and_an_unknown_one_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"prompt": "Why?", "chosen": "A.", "rejected": "B."}] * 2)
    events, aside = read_all(f"hf://{folder}")
    assert (len(events), aside) == (2, [])
    assert events[0].origin == f"hf://{folder}"
    with pytest.raises(SourceError, match=r"check name, split, network and HF_ENDPOINT"):
        read_all(f"hf://{tmp_path}/nobody/nothing")


# -- dirt ---------------------------------------------------------------------------------------


def test_bad_lines_are_set_aside_by_file_line_and_rule_and_the_rest_goes_in(tmp_path: Path) -> None:
    rows: list[Any] = [
        THUMBS,
        b"{broken",
        b'"a string"',
        b'{"kind": "score", "value": NaN, "prompt": "a", "completion": "b"}',
        b'{"kind": "score", "value": 1e999, "prompt": "a", "completion": "b"}',
        {**THUMBS, "kind": "rating", "value": 6},
        {**THUMBS, "completion": "\ud800"},
        b'{"kind": "thumbs", "value": 1, "prompt": "a", "completion": "\xff"}',
        b"",
        {**THUMBS, "ratter": "ann"},
        {**THUMBS, "kind": "stars"},
        {**THUMBS, "agent_id": "coffee"},
        {**THUMBS, "occurred_at": "2026-01-01T00:00:00"},
        {**THUMBS, "occurred_at": "yesterday"},
        {**THUMBS, "occurred_at": "0001-01-01T00:00:00+14:00"},
        {**THUMBS, "value": [1]},
        {**THUMBS, "tags": "one"},
        {**THUMBS, "rater_id": "ann@example.org"},
        {**THUMBS, "rater": 1.5},
        {**THUMBS, "completion": 3},
        {key: value for key, value in THUMBS.items() if key != "kind"},
        {**THUMBS, "kind": "score", "value": 10**400},
        b"[" * 100_000,
        {**THUMBS, "completion": "the last one"},
    ]
    events, aside = read_all(write_lines(tmp_path / "dirty.jsonl", rows))
    assert [e.completion for e in events] == ["Because.", "the last one"]
    assert rules_of(aside) == [
        (2, "broken_json"),
        (3, "not_an_object"),
        (4, "not_finite"),
        (5, "not_finite"),
        (6, "value_out_of_range"),
        (7, "bad_text"),
        (8, "not_utf8"),
        (10, "unknown_field"),
        (11, "unknown_kind"),
        (12, "other_agent"),
        (13, "bad_time"),
        (14, "bad_time"),
        (15, "bad_time"),
        (16, "wrong_type"),
        (17, "wrong_type"),
        (18, "wrong_type"),
        (19, "wrong_type"),
        (20, "wrong_type"),
        (21, "missing_field"),
        (22, "value_out_of_range"),
        (23, "broken_json"),
    ]
    assert {row.origin for row in aside} == {"dirty.jsonl"}
    assert aside[0].raw == "{broken"
    assert "ann@example.org" not in " ".join(row.detail for row in aside)


def test_a_line_of_fifty_megabytes_is_walked_past(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.write(json.dumps(THUMBS).encode() + b"\n{")
        for _ in range(50):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + json.dumps({**THUMBS, "completion": "after"}).encode())
    tracemalloc.start()
    events, aside = read_all(path, longest_row=1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [e.completion for e in events] == ["Because.", "after"]
    assert rules_of(aside) == [(2, "line_too_long")]
    assert "found 52428" in aside[0].detail
    assert len(aside[0].raw or "") <= lines.SHOWN
    assert peak < 8 << 20


def test_a_huge_element_of_an_array_is_walked_past(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    content = json.dumps([THUMBS, {"x": "y" * 300_000}, {**THUMBS, "completion": "after"}])
    path.write_text(content)
    events, aside = read_all(path, longest_row=10_000)
    assert [e.completion for e in events] == ["Because.", "after"]
    assert [row.rule for row in aside] == ["line_too_long"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=50)
@given(
    st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), max_size=5),
    st.sampled_from([None, 1]),
    st.integers(1, 40),
    st.booleans(),
)
def test_an_array_streams_what_json_loads(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    indent: int | None,
    block: int,
    packed: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / ("rows.json.gz" if packed else "rows.json")
    content = json.dumps(rows, indent=indent, ensure_ascii=False).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK", block)
        assert [parse(row) for row in raw_rows(path, Position())] == rows


def test_an_array_gives_the_line_each_element_begins_on(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n{"a": 1},\n\n{"b":\n 2}, {"c": 3}\n]')
    assert [row.line for row in raw_rows(path, Position())] == [2, 4, 5]


@pytest.mark.parametrize("name", ["ROWS.JSON", "rows.jsonl", "rows.ndjson"])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_one_whatever_the_files_name(
    tmp_path: Path, name: str, indent: int | None
) -> None:
    path, rows = tmp_path / name, [{"a": 1}, {"b": [2, {}]}]
    path.write_text(f"\n {json.dumps(rows, indent=indent)}\n")
    assert [parse(row) for row in raw_rows(path, Position())] == rows


def test_an_object_over_several_lines_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "pretty.json"
    path.write_text("\ufeff" + json.dumps(THUMBS, indent=2), encoding="utf-8")
    with pytest.raises(SourceError, match=r"over several lines .* \(jq -c \., or jq -c '.data"):
        read_all(path)


@pytest.mark.parametrize("end", ['[{"a": 1}, {"b": 2}', '[{"a": 1}, {"b": 2}] more'])
def test_an_array_that_ends_wrongly_is_reported_after_its_rows(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(end)
    rows = list(raw_rows(path, Position()))
    assert [row.problem for row in rows] == [None, None, "damaged_file"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_damaged_gzip_gives_every_row_before_the_damage(tmp_path: Path, kind: str) -> None:
    rows = [{**THUMBS, "completion": f"{i} {i**9}"} for i in range(5_000)]
    text = {
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "json": json.dumps(rows, indent=0),
        "csv": TABLE + "".join(f"thumbs,up,Why {i}?,{i**9},ann\n" for i in range(5_000)),
    }[kind]
    path, packer = tmp_path / f"damaged.{kind}.gz", zlib.compressobj(wbits=31)
    begun = packer.compress(text[:100_000].encode()) + packer.flush(zlib.Z_SYNC_FLUSH)
    rest = packer.compress(text[100_000:].encode()) + packer.flush()
    for damaged in (begun + rest[: len(rest) // 2], begun + b"\xff" * len(rest)):
        came_out, member = b"", zlib.decompressobj(31)
        with suppress(zlib.error):
            for at in range(len(damaged)):
                came_out += member.decompress(damaged[at : at + 1])
        ends = {"jsonl": b"}\n", "json": b"},", "csv": b"\n"}[kind]
        whole = came_out.count(ends) - (kind == "csv")  # less its header
        assert 500 < whole < 5_000
        path.write_bytes(damaged)
        events, aside = read_all(path)
        assert (len(events), [row.rule for row in aside]) == (whole, ["damaged_file"])


def test_gzip_is_unpacked_whole_or_up_to_the_damage() -> None:
    text = "".join(f"{i} {i**9}\n" for i in range(500)).encode()
    one = gzip.compress(text)
    two = one + bytes(512) + one + bytes(9)  # zeros as tapes pad with
    assert unpacked(text) == text
    assert unpacked(two) == gzip.decompress(two) == text + text
    assert unpacked(two + b"more") == text + text
    assert unpacked(one[:-8] + bytes(8)) == text  # a wrong checksum
    assert unpacked(one[:5]) == unpacked(one[:10] + b"\xff" * 99) == b""
    cut = unpacked(one + bytes(512) + one[:-200])
    assert (text + text).startswith(cut)
    assert len(cut) > 1.5 * len(text)
    half = len(one) // 2
    broken = unpacked(one[:half] + bytes(99) + one[half + 99 :])
    assert broken[: len(text) // 3] == text[: len(text) // 3]


TABLE = "kind,value,prompt,completion,rater\n"


def write_sheet(path: Path, table: str) -> Path:
    """Write a table, whose cells hold no commas, as a workbook."""
    import openpyxl

    book = openpyxl.Workbook()
    for line in table.splitlines():
        book.active.append([cell or None for cell in line.split(",")])
    book.save(path)
    return path


@pytest.mark.parametrize("suffix", ["csv", "xlsx"])
def test_a_cell_beyond_the_columns_is_nobodys(tmp_path: Path, suffix: str) -> None:
    rows = ["thumbs,up,Why?,Because, dear,bob", "thumbs,up,Why?,Because.,bob,, ", "", ",,,,,note"]
    if suffix == "csv":  # in which nothing but a separator too many makes a cell
        rows[1] = rows[1].removesuffix(",, ")
    text = TABLE + "\n".join(rows)
    path = tmp_path / f"f.{suffix}"
    if suffix == "csv":
        path.write_text(text)
    else:
        write_sheet(path, text)
    events, aside = read_all(path)
    assert [event.rater_id for event in events] == [hash_rater("tea", "bob")]
    assert rules_of(aside) == [(2, "unknown_field"), (5, "unknown_field")]
    assert "found 1 beyond the 5 columns" in aside[0].detail
    assert '"rater": "dear", "": "bob"' in str(aside[0].raw)


@pytest.mark.parametrize("end", [",", ""])
def test_a_row_that_a_comma_moved_is_set_aside_though_its_last_cell_is_blank(
    tmp_path: Path, end: str
) -> None:
    path, shifted = tmp_path / "f.csv", "Hello, where is it?,On its way.,No idea.,ann,"
    rows = ("prompt,chosen,rejected,rater,comment", "Why?,Because.,No.,bob,", shifted)
    path.write_text("".join(f"{row}{end}\n" for row in rows))
    events, aside = read_all(path)
    assert [event.completion for event in events] == ["Because."]
    assert rules_of(aside) == [(3, "unknown_field")]
    assert "found 1 beyond the 5 columns" in aside[0].detail
    path.write_text("".join(f"{row}{end}\n" for row in (rows[0], *[shifted] * 30)))
    assert rules_of(read_all(path)[1]) == [(line, "unknown_field") for line in range(2, 32)]


def test_rows_that_all_end_in_a_separator_are_read(tmp_path: Path) -> None:
    path, row = tmp_path / "f.csv", "thumbs,up,Why?,Because {n}.,ann,\n"
    moved = "thumbs,up,Why?,Because, dear,ann,\n"
    path.write_text(TABLE + "".join(row.format(n=n) for n in range(30)) + moved)
    events, aside = read_all(path)
    assert [event.rater_id for event in events] == [hash_rater("tea", "ann")] * 30
    assert rules_of(aside) == [(32, "unknown_field")]


def test_a_decimal_comma_in_every_row_is_no_separator_too_many(tmp_path: Path) -> None:
    path, row = tmp_path / "f.csv", "Why?,Because {n}.,score,0,{n},\n"
    names = "prompt,completion,kind,value,comment\n"
    path.write_text(names + "".join(row.format(n=n) for n in range(30)))
    events, aside = read_all(path)
    assert events == []
    assert rules_of(aside) == [(line, "unknown_field") for line in range(2, 32)]


@pytest.mark.parametrize("name", ["prompt", '"prompt"'])
@pytest.mark.parametrize("sign", [",", ";"])
def test_a_blank_between_a_separator_and_a_quote_is_no_text(
    tmp_path: Path, name: str, sign: str
) -> None:
    path, names = tmp_path / "f.csv", (name, "chosen", "rejected", "rater")
    rows = [names, ('"Hi, you?"', ' "Good; I\nam."', '  " ""Bad"" "', ' "ann"')]
    path.write_text("\n".join(sign.join(row) for row in rows))
    [event], aside = read_all(path)
    assert (event.prompt, event.completion) == (user_prompt("Hi, you?"), "Good; I\nam.")
    assert (event.other_completion, event.rater_id) == (' "Bad" ', hash_rater("tea", "ann"))
    assert aside == []


@pytest.mark.parametrize("begins", ["", " "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_blank_after_a_quoted_cell_is_no_text(tmp_path: Path, begins: str, end: str) -> None:
    path, texts = (
        tmp_path / "f.csv",
        ["Hi, you", 'A ""b"" , c""', f'x,"" ,{end}"" ,{end}"",y "" '],
    )
    rows = [f'"{text}" ,{begins}"Good",thumbs,{begins}"up"  ,"ann" ' for text in texts]
    names = f'"prompt","completion" ,{begins}"kind","value","rater"'
    path.write_bytes(end.join([names, *rows]).encode())
    events, aside = read_all(path)
    assert aside == []
    assert [event.prompt for event in events] == [
        user_prompt(text.replace('""', '"')) for text in texts
    ]
    assert {event.rater_id for event in events} == {hash_rater("tea", "ann")}


def test_a_blank_that_a_text_begins_with_is_of_the_text(tmp_path: Path) -> None:
    path, texts = tmp_path / "f.csv", [" Good.", ' "Good," he said.', "Good."]
    frame = pd.DataFrame([THUMBS] * 3).assign(completion=texts, topic=" tea")
    frame.to_csv(path, index=False)
    events, aside = read_all(path)
    assert ([event.completion for event in events], aside) == (texts, [])
    assert {event.topic for event in events} == {" tea"}


def test_a_text_that_begins_with_a_blank_and_a_quote_hides_no_row(tmp_path: Path) -> None:
    path, texts = tmp_path / "f.tsv", ["Fine.", ' "Yes" is right.', "Good.", ' "No"']
    rows = [TABLE.strip().split(","), *(["thumbs", "up", "Why?", text, "ann"] for text in texts)]
    path.write_text("\n".join("\t".join(row) for row in rows))
    events, aside = read_all(path)
    assert ([event.completion for event in events], aside) == (texts, [])


def test_a_quote_that_is_not_doubled_leaves_no_blank_before_others(tmp_path: Path) -> None:
    path, row = tmp_path / "f.csv", '"thumbs", "up", "Why?", "{text}", "ann"\n'
    path.write_text(TABLE + "".join(row.format(text=text) for text in ("Hi, you", 'A "b" c')))
    [event], aside = read_all(path)
    assert (event.completion, rules_of(aside)) == ("Hi, you", [(3, "damaged_file")])


@pytest.mark.parametrize("suffix", ["csv", "xlsx"])
def test_a_table_may_begin_with_blank_lines(tmp_path: Path, suffix: str) -> None:
    text, path = (
        f"\n\n{TABLE}thumbs,up,Why?,Because.,ann\nthumbs,yes,Why?,No.,ann\n",
        tmp_path / "f",
    )
    path = path.with_suffix(f".{suffix}")
    if suffix == "csv":
        path.write_text(text.replace(",", ";"))
    else:
        write_sheet(path, text)
    events, aside = read_all(path)
    assert [event.completion for event in events] == ["Because."]
    assert rules_of(aside) == [(5, "wrong_type")]


@pytest.mark.parametrize("sign", [";", "\t"])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_table_of_a_spreadsheet_that_splits_elsewhere_is_read(
    tmp_path: Path, sign: str, suffix: str
) -> None:
    path = tmp_path / f"f.{suffix}"
    header, cells = TABLE.strip().replace(",", sign), ("thumbs", "up", "Why, now?", "Because, dear")
    path.write_text(f"{header}\n{sign.join(cells)}{sign}ann\n")
    [event], aside = read_all(path)
    assert aside == []
    assert (event.prompt, event.completion) == (user_prompt("Why, now?"), "Because, dear")
    path.write_text(f"{TABLE}thumbs,up,Why; now?,Because{sign}dear,ann\n")
    [event], aside = read_all(path)
    assert event.completion == f"Because{sign}dear"


def test_a_columns_name_may_hold_commas_in_a_table_of_semicolons(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text("prompt;completion;value (1, 2, 3, 4, 5)\nWhy?;Because, dear.;4\nWho?;I.;5\n")
    named = Renaming({"value": "value (1, 2, 3, 4, 5)"}, {"kind": "rating"})
    events, aside = read_all(path, renaming=named)
    assert [(event.completion, event.number) for event in events] == [
        ("Because, dear.", 4),
        ("I.", 5),
    ]
    assert aside == []


@pytest.mark.parametrize("told", ["sep=;\r\n", '\n"sep=;"\n', "\ufeffSEP=|\n", "sep=\t\r\n"])
def test_a_line_before_the_names_may_tell_where_cells_are_split(tmp_path: Path, told: str) -> None:
    path, sign = tmp_path / "f.csv", next(sign for sign in ";|\t" if sign in told)
    cells = sign.join(("thumbs", "up", "Why?", "Because, dear, so", "ann"))
    path.write_text(f"{told}{TABLE.replace(',', sign)}{cells}\n{cells}{sign}x\n", newline="")
    [event], aside = read_all(path)
    assert (event.completion, event.rater_id) == ("Because, dear, so", hash_rater("tea", "ann"))
    assert rules_of(aside) == [(told.count("\n") + 3, "unknown_field")]


@pytest.mark.parametrize("sign", [";", ","])
def test_a_spreadsheets_decimal_comma_is_read_where_it_can_be_nothing_else(
    tmp_path: Path, sign: str
) -> None:
    path = tmp_path / "f.csv"
    rows = ("kind", "value", "prompt", "completion"), ("score", '"0,25"', "Why?", "Because.")
    more = ("rating", '"4,0"', "Why?", "No."), ("rating", '"4,5"', "Why?", "So.")
    path.write_text("\n".join(sign.join(row) for row in (*rows, *more)))
    events, aside = read_all(path)
    assert [event.number for event in events] == [0.25, 4.0]
    assert "found 4.5;" in aside[0].detail
    path.write_text('prompt,chosen,rejected,chosen_score\nWhy?,Because.,No.,"1,250"\n')
    assert rules_of(read_all(path)[1]) == [(2, "wrong_type")]  # a thousand, or one and a quarter


@pytest.mark.parametrize("suffix", ["csv", "xlsx"])
def test_a_rater_who_became_a_float_in_a_table_is_who_they_are(tmp_path: Path, suffix: str) -> None:
    path, raters = tmp_path / f"f.{suffix}", ["17", "17.0", "17.5", f"{'9' * 16}.0"]
    frame = pd.DataFrame([THUMBS] * 4).assign(rater=raters, topic="17.0")
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_excel(path, index=False)
    events, aside = read_all(path)
    whose = [hash_rater("tea", name) for name in ("17", "17", *raters[2:])]
    assert ([event.rater_id for event in events], aside) == (whose, [])
    assert {event.topic for event in events} == {"17.0"}
    frame["kind"] = "thumb"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_excel(path, index=False)
    found = [is_signed_by(str(row.raw), Person("tea", whose[0])) for row in read_all(path)[1]]
    assert found == [True, True, False, False]  # what an erasure takes


@pytest.mark.parametrize("suffix", ["csv", "xlsx"])
def test_blanks_around_a_raters_cell_make_nobody_else(tmp_path: Path, suffix: str) -> None:
    path, raters = tmp_path / f"f.{suffix}", ["ann", "ann ", "  ann", "ann\u00a0", "17.0 ", " "]
    frame = pd.DataFrame([THUMBS] * 6).assign(rater=raters, topic=" tea ")
    for kind in ("thumbs", "thumb"):  # of what is set aside an erasure finds the same
        frame["kind"] = kind
        frame.to_csv(path, index=False) if suffix == "csv" else frame.to_excel(path, index=False)
        events, aside = read_all(path)
        ann = Person("tea", hash_rater("tea", "ann"))
        found = [is_signed_by(str(row.raw), ann) for row in aside]
        if kind == "thumbs":
            whose = [ann.rater_id] * 4 + [hash_rater("tea", "17"), None]
            assert [event.rater_id for event in events] == whose
            assert {event.topic for event in events} == {" tea "}
    assert found == [True] * 4 + [False] * 2


@pytest.mark.parametrize("suffix", ["csv", "xlsx"])
@pytest.mark.parametrize("null", ["NULL", r"\N"])
def test_what_a_database_writes_for_nothing_is_nobody_and_no_key(
    tmp_path: Path, suffix: str, null: str
) -> None:
    path = tmp_path / f"f.{suffix}"
    names = ("rater", "rater_id", "idempotency_key", "topic", "occurred_at", "source")
    frame = pd.DataFrame([{**THUMBS, "completion": text} for text in ("A.", "B.", null)])
    frame = frame.assign(**dict.fromkeys(names, null))
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_excel(path, index=False)
    events, aside = read_all(path)
    assert ([event.completion for event in events], aside) == (["A.", "B.", null], [])
    assert len({event.idempotency_key for event in events}) == 3
    assert {(event.rater_id, event.topic, event.occurred_at) for event in events} == {(None,) * 3}
    frame[["prompt", "completion", "rater", "label"]] = [["Why?", "A.", null, "true"]] * 3
    frame = frame[["prompt", "completion", "rater", "label"]].assign(annotator_id="ann")
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_excel(path, index=False)
    assert {event.rater_id for event in read_all(path)[0]} == {hash_rater("tea", "ann")}


@pytest.mark.parametrize("suffix", ["csv", "xlsx"])
def test_quotes_and_apostrophes_that_a_text_has_are_of_the_text(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"f.{suffix}"
    texts = ['"Save 5 euros"', "Save 5 euros", "'+' is the sign", "+' is the sign", '"[sic]"', '""']
    rows = [{"prompt": text, "chosen": text, "rejected": f"Not {text}"} for text in texts]
    voted = {"kind": "thumbs", "prompt": "Why?", "completion": texts[0], "value": "up"}
    for frame, told in ((pd.DataFrame(rows), texts), (pd.DataFrame([voted]), texts[:1])):
        frame.to_csv(path, index=False) if suffix == "csv" else frame.to_excel(path, index=False)
        events, aside = read_all(path)
        assert ([event.completion for event in events], aside) == (told, [])
        prompts = told if "kind" not in frame else ["Why?"]
        assert [event.prompt for event in events] == list(map(user_prompt, prompts))


def test_a_table_is_known_by_its_columns_whatever_its_first_row_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,chosen,rejected\nWhy?,Because.,\nWhy?,Because.,No.\n")
    events, aside = read_all(path)
    assert [(event.completion, event.other_completion) for event in events] == [("Because.", "No.")]
    assert rules_of(aside) == [(2, "wrong_type")]


def test_a_spreadsheet_says_true_and_false_of_a_thumb(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text(f"{TABLE}thumbs,TRUE,Why?,A.,ann\nthumbs,False,Why?,B.,ann\n")
    events, aside = read_all(path)
    assert ([event.number for event in events], aside) == ([1.0, 0.0], [])


def test_a_table_in_another_encoding_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    rows = "thumbs,up,¿Dónde está?,Grüße,jürgen\nthumbs,up,Why?,Because.,ann\n"
    path.write_bytes((TABLE + rows).encode("cp1252"))
    with pytest.raises(SourceError, match=r"0xbf in line 2 of f\.csv; save the table as UTF-8"):
        read_all(path)
    path.write_bytes(f"{TABLE.strip()},número\nthumbs,up,Why?,Because.,ann,1\n".encode("cp1252"))
    with pytest.raises(SourceError, match="0xfa in line 1 of"):
        read_all(path)


@pytest.mark.parametrize("name", ["f.csv", "f.tsv.gz"])
def test_nothing_is_taken_of_a_table_whose_last_row_is_in_another_encoding(
    tmp_path: Path, name: str
) -> None:
    """Else it goes in by halves, and the rows that are set aside are those of some people."""
    path = tmp_path / name
    rows = "".join(f"thumbs,up,Why?,Because {n}.,ann\n" for n in range(20_000))
    content = (TABLE + rows).encode() + "thumbs,up,Why?,Grüße,ann\n".encode("cp1252")
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(SourceError, match="0xfc in line 20002"):
        next(read(path, "tea"))
    last = tmp_path / "last.csv"
    last.write_bytes((TABLE + "thumbs,up,Why?,caf").encode() + b"\xe9")  # and there it ends
    with pytest.raises(SourceError, match="0xe9 in line 2"):
        next(read(last, "tea"))
    lines = write_lines(tmp_path / "f.jsonl", [THUMBS, "Grüße".encode("cp1252"), THUMBS])
    events, aside = read_all(lines)  # of which each stands for itself
    assert (len(events), rules_of(aside)) == (2, [(2, "not_utf8")])


@pytest.mark.parametrize("name", ["f.csv", "f.jsonl", "f.json"])
def test_a_file_in_utf_16_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for encoding in ("utf-16-le", "utf-16-be"):
        path.write_bytes(f"\ufeff{TABLE}".encode(encoding))
        with pytest.raises(SourceError, match="in UTF-8 is needed, found UTF-16"):
            read_all(path)


def test_a_first_line_that_is_damaged_makes_no_other_a_file_in_utf_16(tmp_path: Path) -> None:
    events, aside = read_all(write_lines(tmp_path / "f.jsonl", [b"\xff\xfe", THUMBS]))
    assert (len(events), rules_of(aside)) == (1, [(1, "not_utf8")])


@pytest.mark.parametrize("name", ["f.xls", "f.csv", "f.jsonl"])
def test_a_workbook_under_another_name_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(bytes.fromhex("d0cf11e0a1b11ae1") + bytes(504))  # as a file of Excel 97 begins
    with pytest.raises(SourceError, match=r"found a workbook .* as \.xlsx or as CSV"):
        read_all(path)
    pd.DataFrame([THUMBS]).to_excel(tmp_path / "f.xlsx")
    path.write_bytes((tmp_path / "f.xlsx").read_bytes())
    with pytest.raises(SourceError, match="found a workbook"):
        read_all(path)


def test_a_data_set_of_save_to_disk_is_refused_once_and_told_how_to_write_it(
    tmp_path: Path,
) -> None:
    from datasets import Dataset, DatasetDict

    votes = Dataset.from_list([THUMBS] * 4)
    votes.save_to_disk(str(tmp_path / "one"), num_shards=2)
    DatasetDict({"train": votes}).save_to_disk(str(tmp_path / "many"))
    write_lines(tmp_path / "votes.jsonl", [THUMBS])
    (arrow,) = tmp_path.glob("many/train/*.arrow")
    renamed = tmp_path / "renamed.parquet"
    renamed.write_bytes(arrow.read_bytes())
    pd.DataFrame([THUMBS]).to_feather(tmp_path / "votes.feather")
    one, train = tmp_path / "one", tmp_path / "many" / "train"
    for path, where in (
        (one / "state.json", one),
        (one / "dataset_info.json", one),
        (f"hf://{one}", one),
        (arrow, arrow),
        (renamed, renamed),
        (tmp_path / "votes.feather", tmp_path / "votes.feather"),
    ):
        said = rf"found Arrow in {re.escape(str(where))}; .*\.to_json\('votes\.jsonl'\)"
        with pytest.raises(SourceError, match=said):
            read_all(path)
    states = [train / "state.json", one / "state.json"]
    assert files_in(tmp_path) == [*states, renamed, tmp_path / "votes.jsonl"]
    assert passed_over(tmp_path) == [tmp_path / "votes.feather"]


def test_a_first_line_that_is_damaged_makes_no_other_a_file_of_arrow(tmp_path: Path) -> None:
    events, aside = read_all(write_lines(tmp_path / "f.jsonl", [b"\xff" * 9, THUMBS]))
    assert (len(events), rules_of(aside)) == (1, [(1, "not_utf8")])


def test_a_column_that_stands_twice_in_a_table_says_nothing_for_certain(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text(f"{TABLE.strip()},rater,,\nthumbs,up,Why?,Because.,ann,bob\n,,,,,\n")
    events, aside = read_all(path)
    assert (events, rules_of(aside)) == ([], [(2, "repeated_field")])
    assert "found 'rater' again" in aside[0].detail
    assert '"rater": "ann", "rater": "bob"' in str(aside[0].raw)


def test_a_table_that_breaks_off_gives_what_came_before(tmp_path: Path) -> None:
    text = TABLE + "".join(f"thumbs,up,Why {i}?,{i**9},ann\n" for i in range(5_000))
    packed = gzip.compress(text.encode())
    path = tmp_path / "f.csv.gz"
    for content, fewest, most in (
        (packed[:-2_000], 1, 4_999),
        (packed[:-8] + bytes(8), 5_000, 5_000),  # what was read does not add up
        (packed[:10] + b"\xff" * 99, 0, 0),
    ):
        path.write_bytes(content)
        events, aside = read_all(path)
        assert fewest <= len(events) <= most
        assert [row.rule for row in aside] == ["damaged_file"]
        assert "needed a whole gzip file, found: " in aside[0].detail
    path.write_text(text)  # unpacked by whoever fetched it: the name alone says gzip
    events, aside = read_all(path)
    assert (len(events), aside) == (5_000, [])
    book = write_sheet(tmp_path / "book.xlsx", text)
    content = book.read_bytes()
    with zipfile.ZipFile(book) as parts:
        sheet = parts.getinfo("xl/worksheets/sheet1.xml")
    half = sheet.header_offset + sheet.compress_size // 2
    book.write_bytes(content[:half] + bytes(99) + content[half + 99 :])
    events, aside = read_all(book)
    assert 0 < len(events) < 5_000
    assert rules_of(aside) == [(len(events) + 2, "damaged_file")]
    assert "needed a whole workbook, found: " in aside[0].detail


def test_a_table_with_a_row_too_long_gives_what_came_before(tmp_path: Path) -> None:
    path, row = tmp_path / "open.csv", "thumbs,up,Why?,Because.,ann\n"
    path.write_text(f'{TABLE}{row}thumbs,up,"Why not?,Because.,bob\n{row * 300_000}')
    events, aside = read_all(path)
    assert [event.rater_id for event in events] == [hash_rater("tea", "ann")]
    assert rules_of(aside) == [(3, "damaged_file")]
    assert "needed a whole table, found: a row of more than 8,388,608 characters" in aside[0].detail
    assert "; make it again and ingest it again" in aside[0].detail


def test_a_row_of_a_table_is_not_held_beyond_the_longest(tmp_path: Path) -> None:
    path, row = tmp_path / "long.csv.gz", b"thumbs,up,Why?,Because.,ann\n"
    beyond = (b"x" * (1 << 20), b'"' + b"x" * (1 << 20) + b'\n",')  # one line; a line for each cell
    for piece in beyond:
        path.write_bytes(gzip.compress(TABLE.encode() + row + piece * 100 + b"\n" + row))
        tracemalloc.start()
        events, aside = read_all(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert [event.rater_id for event in events] == [hash_rater("tea", "ann")]
        assert [row.rule for row in aside] == ["damaged_file"]
        assert peak < 80 << 20


def test_rows_of_a_table_may_be_longer_together_than_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.feedback.flat.LONGEST_ROW", 99)
    path = tmp_path / "f.csv"
    path.write_text(TABLE + "".join(f"thumbs,up,Why?,{i},ann\n" for i in range(99)))
    assert len(read_all(path)[0]) == 99


def test_a_quote_that_is_not_closed_takes_no_row_in_silence(tmp_path: Path) -> None:
    path, row = tmp_path / "open.csv", "thumbs,up,Why?,Because.,ann\n"
    path.write_text(
        f'{TABLE}{row}thumbs,up,Why?,"So, "" it is.",bob\nthumbs,up,Why?,No.,"c\n{row * 9}'
    )
    events, aside = read_all(path)
    assert [event.completion for event in events] == ["Because.", 'So, " it is.']
    assert rules_of(aside) == [(4, "damaged_file")]
    assert "found: unexpected end of data; make it again" in aside[0].detail
    path.write_text(f'{TABLE}{row}thumbs,up,Why?,No.,"cy"')
    assert len(read_all(path)[0]) == 2


@pytest.mark.parametrize(
    "texts",
    [
        ('"Why" is it?\tBecause.', '"Who" is it?\tNobody.'),  # each with its own
        ('"Why is it?\tBecause.', '"Who is it?\tNobody.'),  # one begins, and the next one ends it
        ('"She said \\"why\\"?"\t"Because."', "Who?\tNobody."),  # marked as MySQL does
    ],
)
def test_a_quote_within_a_text_takes_no_row_in_silence(
    tmp_path: Path, texts: tuple[str, str]
) -> None:
    path, row = tmp_path / "joined.tsv", 'thumbs\tup\tA 5" pipe?\tSay "so".\tann\n'
    rows = "".join(f"thumbs\tup\t{text}\tbob\n" for text in texts)
    path.write_text(TABLE.replace(",", "\t") + row + rows + row)
    events, aside = read_all(path)
    assert [event.completion for event in events] == ['Say "so".']
    assert rules_of(aside) == [(3, "damaged_file")]
    assert "expected after '\"'; double the quotes within its texts" in aside[0].detail
    path.write_text("\n" + TABLE.replace(",", "\t") + "\n" + rows)
    assert rules_of(read_all(path)[1]) == [(4, "damaged_file")]  # below names and blank lines


def test_a_cell_nested_too_deep_is_text(tmp_path: Path) -> None:
    path, deep = tmp_path / "deep.csv", "[" * 100_000
    path.write_text(f"{TABLE}thumbs,up,{deep},Because.,ann\nthumbs,up,Why?,Because.,ann\n")
    events, _ = read_all(path)
    assert [event.prompt for event in events] == [user_prompt(deep), user_prompt("Why?")]


def test_a_thumb_that_is_none_is_told_what_one_is(tmp_path: Path) -> None:
    without = {name: value for name, value in THUMBS.items() if name != "value"}
    rows = [{**THUMBS, "value": "yes"}, without]
    events, aside = read_all(write_lines(tmp_path / "f.jsonl", rows))
    assert (events, rules_of(aside)) == ([], [(1, "wrong_type"), (2, "value_missing")])
    assert all("needed up or down (1 or 0) as the thumbs value" in row.detail for row in aside)


def test_the_position_follows_the_reading(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [THUMBS] * 5)
    position = Position()
    seen = [position.line for _ in read(path, "tea", position=position)]
    assert seen == [1, 2, 3, 4, 5]
    assert position.bytes_read == position.bytes_total == path.stat().st_size


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "b.jsonl", [b"\xef\xbb\xbf" + json.dumps(THUMBS).encode()])
    assert len(read_all(path)[0]) == 1
    path = write_lines(tmp_path / "b.json", [b"\xef\xbb\xbf" + json.dumps([THUMBS]).encode()])
    assert len(read_all(path)[0]) == 1


def test_a_file_of_no_known_format_lists_the_formats(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "u.jsonl", [b"{", {"apples": 3}])
    with pytest.raises(
        SourceError, match=r"events, hh_rlhf, pairs, oasst, answers, judgements, quality"
    ):
        read_all(path)
    events, aside = read_all(path, format="pairs")
    assert (events, len(aside)) == ([], 2)
    with pytest.raises(SourceError, match="needed a format out of auto"):
        read_all(path, format="xml")


def test_a_list_of_rows_in_an_object_on_one_line_is_told_how_to_write_them(tmp_path: Path) -> None:
    rows = [{"question": "Why?", "reply": "So.", "score": 1}]
    hint = r"or, as its 'data' is a list, write each of that on a line \(jq -c '\.data\[\]'\)$"
    with pytest.raises(SourceError, match=hint):
        read_all(write_lines(tmp_path / "u.json", [{"data": rows, "meta": {"page": 1}}]))
    chat = [{"role": "user", "content": "Why?"}]
    others: list[dict[str, Any]] = [{"turns": chat}, {"data": []}, {"my rows": rows}, {"a": ["b"]}]
    for row in others:
        with pytest.raises(SourceError, match=r"or name the format$"):
            read_all(write_lines(tmp_path / "u.json", [row]))


def test_rows_of_another_agent_are_told_how_they_are_taken_in_all_the_same(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", [{**THUMBS, "agent_id": "te"}])
    _, [aside] = read_all(path)
    assert aside.rule == "other_agent"
    assert aside.detail.endswith("of a file that is meant for it: rlhf ingest --set agent_id='tea'")
    [event], _ = read_all(path, renaming=Renaming(fixed={"agent_id": "tea"}))
    assert event.agent_id == "tea"


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="check the path"):
        read_all(tmp_path / "nothing.jsonl")


def test_the_judge_of_a_whole_file_can_be_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "s.jsonl", [THUMBS, {**THUMBS, "source": "code"}])
    events, _ = read_all(path, source="model")
    assert [e.source for e in events] == ["model", "code"]
    assert replace(events[0], source="code") != events[0]


# -- judgements, and workbooks ------------------------------------------------------------------

JUDGED = {
    "prompt": "Name a bird.",
    "completion_a": "A finch.",
    "completion_b": "A cat.",
    "completion_a_is_acceptable": "yes",
    "completion_b_is_acceptable": "no",
    "preference": "a-is-slightly-better",
    "evaluator": "ann",
}


def test_a_judgement_is_a_preference_and_a_thumb_for_each_answer(tmp_path: Path) -> None:
    poor = {"completion_a_is_acceptable": "no"}
    rows = [
        JUDGED,
        {**JUDGED, "preference": "b-is-better"},
        {**JUDGED, "preference": "tie"},
        {**JUDGED, "preference": "tie", **poor},  # neither will do
        {**JUDGED, "preference": "a", "evaluator": "bob"},
        {**JUDGED, "completion_b_is_acceptable": "perhaps"},
    ]
    events, aside = read_all(write_lines(tmp_path / "f.jsonl", rows))
    said = [event for event in events if event.kind is FeedbackKind.preference]
    assert [event.choice for event in said] == ["left", "right", "tie", "both_bad"]
    assert [event.tags for event in said] == [("slightly",), (), (), ()]
    assert {event.rater_id for event in events} == {hash_rater("tea", "ann")}
    assert [(e.completion, e.number) for e in events if e.kind is FeedbackKind.thumbs][:2] == [
        ("A finch.", 1.0),
        ("A cat.", 0.0),
    ]
    assert rules_of(aside) == [(5, "value_out_of_range"), (6, "value_out_of_range")]


def test_a_workbook_says_what_the_same_table_would(tmp_path: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    book.active.append([*JUDGED, "id", "timestamp"])
    when = datetime(2023, 5, 19, 13, 11, tzinfo=None)  # noqa: DTZ001 - a workbook knows no zones
    book.active.append([*JUDGED.values(), 213.0, when])
    book.active.append([])  # a gap
    book.active.append([*(JUDGED | {"completion_a": 42, "preference": "c"}).values()])
    book.active.append([*(JUDGED | {"completion_a": 42}).values()])
    book.save(tmp_path / "judged.xlsx")
    events, aside = read_all(tmp_path / "judged.xlsx")
    as_lines, _ = read_all(
        write_lines(tmp_path / "f.jsonl", [JUDGED, {**JUDGED, "completion_a": "42"}])
    )
    assert [to_row(event) for event in events] == [to_row(event) for event in as_lines]
    assert rules_of(aside) == [(4, "value_out_of_range")]
    assert '"evaluator": "ann"' in str(aside[0].raw)  # so that an erasure finds it


def test_a_workbook_that_begins_with_a_cover_is_told_of_its_other_sheets(tmp_path: Path) -> None:
    path = tmp_path / "votes.xlsx"
    for cover in ([], ["Votes of May"]):
        with pd.ExcelWriter(path) as book:
            pd.DataFrame(columns=cover).to_excel(book, sheet_name="Cover", index=False)
            pd.DataFrame([THUMBS]).to_excel(book, sheet_name="May", index=False)
        with pytest.raises(SourceError, match=r"none in 'Cover' and other sheets \('May'\); move"):
            read_all(path)
    pd.DataFrame(columns=list(THUMBS)).to_excel(path, index=False)
    assert read_all(path) == ([], [])


def rewrite(path: Path, part: str, changes: Sequence[tuple[str, str]]) -> None:
    """Change a part of a workbook, as another program might have written it."""
    with zipfile.ZipFile(path) as book:
        parts = {name: book.read(name) for name in book.namelist()}
    for old, new in changes:
        assert old.encode() in parts[part]
        parts[part] = parts[part].replace(old.encode(), new.encode(), 1)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as book:
        for name, content in parts.items():
            book.writestr(name, content)


SHEET = "xl/worksheets/sheet1.xml"
VOTES = TABLE + "".join(f"thumbs,up,Why {i}?,Because.,ann{i}\n" for i in range(9))


@pytest.mark.parametrize("size", ["A1", "A1:E1", "A1:E3", "A1:D10", "A1:Z3000"])
def test_a_workbooks_rows_are_those_it_has_whatever_size_it_says(tmp_path: Path, size: str) -> None:
    path = write_sheet(tmp_path / "votes.xlsx", VOTES)
    rewrite(path, SHEET, [('ref="A1:E10"', f'ref="{size}"')])
    events, aside = read_all(path)
    assert [event.rater_id for event in events] == [hash_rater("tea", f"ann{i}") for i in range(9)]
    assert aside == []


def test_a_row_far_below_the_others_is_reached_at_once(tmp_path: Path) -> None:
    path = write_sheet(tmp_path / "votes.xlsx", VOTES + "thumbs,up,Why?,,ann")
    rewrite(path, SHEET, [('<row r="11"', '<row r="1048576"')])
    events, aside = read_all(path)
    assert (len(events), rules_of(aside)) == (9, [(1 << 20, "no_target")])


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (3, "row 3 after row 9"),
        (9, "row 9 after row 9"),
        (3_000_000_000, "row 3,000,000,000, though a sheet ends at 1,048,576"),
    ],
)
def test_a_row_where_none_can_be_takes_no_other_in_silence(
    tmp_path: Path, number: int, why: str
) -> None:
    path = write_sheet(tmp_path / "votes.xlsx", VOTES)
    rewrite(path, SHEET, [('<row r="10"', f'<row r="{number}"')])
    events, aside = read_all(path)
    assert (len(events), rules_of(aside)) == (8, [(10, "damaged_file")])
    assert f"a whole workbook, found: {why}; make it again" in aside[0].detail


def test_a_cell_that_came_to_an_error_says_nothing(tmp_path: Path) -> None:
    rows = [
        "thumbs,up,Why?,Because.,#N/A",
        "thumbs,up,Who?,#REF!,ann",
        "thumbs,#DIV/0!,Who?,I.,bob",
    ]
    events, aside = read_all(write_sheet(tmp_path / "votes.xlsx", TABLE + "\n".join(rows)))
    assert [(event.completion, event.rater_id) for event in events] == [("Because.", None)]
    assert rules_of(aside) == [(3, "no_target"), (4, "value_missing")]


def test_a_character_that_a_workbook_escapes_is_that_character(tmp_path: Path) -> None:
    path = write_sheet(tmp_path / "votes.xlsx", TABLE + "thumbs,up,Why?,One.,ann")
    rewrite(path, SHEET, [("One.", "One._x000D_\nTwo, _xD800_, _x005F_x000D_.")])
    assert read_all(path)[0][0].completion == "One.\r\nTwo, _xD800_, _x000D_."


@pytest.mark.parametrize(
    ("part", "is_read"),
    [
        ("xl/worksheets/sheet7.xml", True),
        ("xl/SharedStrings.xml", True),
        ("xl/pivotCache/pivotCacheRecords1.xml", True),
        ("xl/media/image1.png", True),
        ("xl/worksheets/_rels/sheet7.xml.rels", True),  # as many rows as a sheet has links
        ("xl/comments1.xml", True),
        ("xl/drawings/drawing1.xml", True),
        ("customXml/item1.xml", True),
        ("docProps/more.xml", False),
        ("XL/Theme/theme1.xml", False),
    ],
)
def test_a_workbooks_parts_may_be_long_where_they_are_not_held(
    tmp_path: Path, part: str, is_read: bool
) -> None:
    path = write_sheet(tmp_path / "votes.xlsx", VOTES)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as book:
        book.writestr(part, bytes((8 << 20) + 1))
    if is_read:
        assert len(read_all(path)[0]) == 9
    else:
        with pytest.raises(SourceError, match=f"'{part}' of a workbook, found 8,388,609 in "):
            read_all(path)


def test_a_sheet_that_is_hidden_is_not_the_first(tmp_path: Path) -> None:
    import openpyxl

    path = tmp_path / "votes.xlsx"
    for state in ("hidden", "veryHidden"):
        pd.DataFrame([THUMBS]).to_excel(path, sheet_name="May", index=False)
        book = openpyxl.load_workbook(path)
        lists = book.create_sheet("Lists", 0)
        lists.append([*THUMBS])
        lists.append(["thumbs", "down", "Who?", "I."])
        lists.sheet_state = state
        book.save(path)
        assert [event.completion for event in read_all(path)[0]] == ["Because."]
    rewrite(path, "xl/workbook.xml", [('state="visible"', 'state="hidden"')])
    assert [event.completion for event in read_all(path)[0]] == ["I."]


def test_what_is_no_workbook_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "votes.xlsx"
    write_sheet(path, TABLE)
    with zipfile.ZipFile(path) as parts:
        styles = parts.getinfo("xl/styles.xml")
    begin = styles.header_offset + len(styles.filename) + 30
    packed = path.read_bytes()
    for content in (b"kind,value", packed[:begin] + bytes(99) + packed[begin + 99 :]):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"a workbook is needed at .*save the sheet as \.csv"):
            read_all(path)
    import openpyxl

    openpyxl.Workbook().save(path)
    small = [(names, 1_000) for names, _ in tables.LARGEST_PARTS]
    monkeypatch.setattr(tables, "LARGEST_PARTS", small)
    with pytest.raises(SourceError, match=r"at most 1,000 bytes .* in 'xl/(theme|styles)"):
        read_all(path)
    monkeypatch.setattr("rlhf_pipeline.feedback.flat.LARGEST_WORKBOOK", 1_000)
    with pytest.raises(SourceError, match="at most 1,000 bytes"):
        read_all(path)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(SourceError, match=r"needs openpyxl, found none .*pip install"):
        read_all(path)


def test_a_sheets_row_that_is_too_long_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells may all be of one text that stands in the file once: 14 kB that come to 3 GB."""
    monkeypatch.setattr(tables, "LONGEST_ROW", 1_000)
    row = "thumbs,up,Why?,Because.,bob"
    table = f"{TABLE}{row}\n{row},{'x' * 500},{'x' * 500}"
    votes, aside = read_all(write_sheet(tmp_path / "votes.xlsx", table))
    assert len(votes) == 1
    assert rules_of(aside) == [(3, "damaged_file")]
    assert "row 3 has more than 1,000 characters" in aside[0].detail


def test_blank_lines_above_a_table_are_no_row_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LONGEST_ROW", 1_000)
    path = tmp_path / "votes.csv"
    path.write_text("\n" * 2_000 + TABLE + "thumbs,up,Why?,Because.,bob\n")
    votes, aside = read_all(path)
    assert (len(votes), aside) == (1, [])
