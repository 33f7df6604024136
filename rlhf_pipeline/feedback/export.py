"""Feedback out of the store: events that `rlhf ingest` takes back, or preference pairs for TRL.

| written to | what it is |
|---|---|
| `name.jsonl` | a JSON object a line |
| `-` | the same, to standard output |
| `name.csv` | a line each, cells that a spreadsheet would run made inert; events only |
| a folder | a Hugging Face data set: `datasets.load_dataset(folder)` |

Rows stream from the database, so memory stays bounded. Events about an interaction are written with
its prompt and completion, so another store can take them; with `by_interaction` they keep its id,
for the store that has it. Each row has its idempotency key, so that a store knows its own again.

Source of the pairs' format: TRL's documentation, "Dataset formats", preference with an explicit
prompt, conversational.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TextIO

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.errors import FeedbackError
from rlhf_pipeline.feedback import flat
from rlhf_pipeline.files import new_file, new_folder
from rlhf_pipeline.records import this_won

What = Literal["events", "pairs"]
CHUNK_ROWS = 5_000
STDOUT = Path("-")
CARD = """---
configs:
- config_name: default
  data_files: data/train.parquet
---
Feedback of the agent `{agent_id}`: {what}, {rows} rows, written by `rlhf feedback export`.
"""


def export(
    database: db.Database,
    agent_id: str,
    out: Path,
    *,
    what: What = "events",
    history: bool = False,
    by_interaction: bool = False,
) -> int:
    """Write the agent's feedback, whole or not at all, and return how many rows there are.

    What people said is for whoever writes it alone to read, until they say otherwise (chmod). The
    votes that count; with `history` also those that later ones replaced (events only). Raises
    FeedbackError where there is nothing to write or the file's kind is not known.
    """
    if what == "events":
        rows = events(database, agent_id, history=history, by_interaction=by_interaction)
    else:
        rows = pairs(database, agent_id)
    first = next(rows, None)
    if first is None:
        raise FeedbackError(
            f"needed {what} of agent {agent_id!r} to write, found none; send feedback first"
        )
    rows = chain([first], rows)
    if out == STDOUT:
        return _write_lines(codecs.getwriter("utf-8")(sys.stdout.buffer), rows)
    if out.suffix == ".jsonl":
        with _lines_of(out) as file:
            return _write_lines(file, rows)
    if out.suffix == ".csv" and what == "events":
        with _lines_of(out) as file:
            return flat.write_csv(file, rows)
    if out.suffix:
        kinds = ".jsonl, .csv or a folder" if what == "events" else ".jsonl or a folder"
        raise FeedbackError(f"{what} go to {kinds}, found {out.name!r}; choose another name")
    with new_folder(out, private=True) as folder:
        (folder / "data").mkdir()
        count = _write_parquet(folder / "data" / "train.parquet", rows, what)
        card = CARD.format(agent_id=agent_id, what=what, rows=count)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return count


def events(
    database: db.Database, agent_id: str, *, history: bool = False, by_interaction: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield each event as the row of our own format that reads back as it."""
    for row in _rows(database, agent_id, history=history):
        told: dict[str, Any] = {
            "agent_id": agent_id,
            "kind": row.kind,
            "value": _value(row),
            "shown_first": row.shown_first,
            "rater_id": row.rater_id,
            "source": row.source,
            "occurred_at": row.occurred_at.isoformat(),
            "tags": json.loads(row.tags) or None,
            "comment": row.comment,
            "topic": row.topic,
            "idempotency_key": row.idempotency_key,
        }
        if by_interaction and row.interaction_id is not None:
            told["interaction_id"] = row.interaction_id
        else:
            told |= {"prompt": _messages(row.prompt), "completion": row.completion}
        if by_interaction and row.other_interaction_id is not None:
            told["other_interaction_id"] = row.other_interaction_id
        elif row.kind == "preference":
            told["other_completion"] = row.other_completion
            was_sent = row.other_interaction_id is None  # and is part of what its key stands for
            if was_sent or row.other_prompt != row.prompt:
                told["other_prompt"] = _messages(row.other_prompt)
        yield {name: value for name, value in told.items() if value is not None}


def pairs(database: db.Database, agent_id: str) -> Iterator[dict[str, Any]]:
    """Yield each preference and correction as TRL reads it.

    Left out is what a pair cannot say: ties, equal or empty sides, sides that answer other prompts.
    """
    for row in _rows(database, agent_id, kinds=("preference", "correction")):
        this, other = row.completion, row.other_completion
        if row.kind == "correction":
            chosen, rejected = row.text, this
        else:
            if row.choice not in ("left", "right") or row.other_prompt not in (None, row.prompt):
                continue
            won = this_won(row.choice, row.shown_first)
            chosen, rejected = (this, other) if won else (other, this)
        if not chosen or not rejected or chosen.strip() == rejected.strip():
            continue
        yield {
            "prompt": _messages(row.prompt),
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
            "rater_id": row.rater_id,
            "idempotency_key": row.idempotency_key,
        }


def _rows(
    database: db.Database,
    agent_id: str,
    *,
    history: bool = False,
    kinds: tuple[str, ...] | None = None,
) -> Iterator[sa.Row[Any]]:
    """Yield the agent's events, oldest first, each with its texts or those of its interactions."""
    f = db.feedback if history else db.effective_feedback
    this, other = db.interactions.alias("this"), db.interactions.alias("other_one")
    texts = {
        "prompt": this.c.prompt,
        "completion": this.c.completion,
        "other_prompt": other.c.prompt,
        "other_completion": other.c.completion,
    }
    query = (
        sa.select(
            *(column for column in f.c if column.name not in texts),
            *(sa.func.coalesce(f.c[name], text).label(name) for name, text in texts.items()),
        )
        .select_from(
            f.outerjoin(this, this.c.interaction_id == f.c.interaction_id).outerjoin(
                other, other.c.interaction_id == f.c.other_interaction_id
            )
        )
        .where(f.c.agent_id == agent_id, f.c.erased_at.is_(None))
        .order_by(f.c.seq)
    )
    if kinds is not None:
        query = query.where(f.c.kind.in_(kinds))
    with database.read() as connection:
        result: sa.Result[Any] = connection.execution_options(yield_per=CHUNK_ROWS).execute(query)
        yield from result


def _value(row: sa.Row[Any]) -> Any:
    if row.kind == "criteria":
        return json.loads(row.criteria)
    if row.kind == "preference":
        return row.choice
    if row.kind in ("correction", "comment"):
        return row.text
    return row.number


def _messages(prompt_json: str | None) -> list[dict[str, str]] | None:
    if prompt_json is None:
        return None
    return [{"role": role, "content": content} for role, content in json.loads(prompt_json)]


@contextmanager
def _lines_of(out: Path) -> Iterator[TextIO]:
    with (
        new_file(out, private=True) as aside,
        aside.open("w", encoding="utf-8", newline="") as file,
    ):
        yield file


def _write_lines(file: Any, rows: Iterator[Mapping[str, Any]]) -> int:
    count = 0
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        count += 1
    return count


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]], what: What) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(pa, what)
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        while some := list(islice(rows, CHUNK_ROWS)):
            if what == "events":
                some = [_typed(row) for row in some]
            writer.write_table(pa.Table.from_pylist(some, schema))
            count += len(some)
    return count


def _typed(row: dict[str, Any]) -> dict[str, Any]:
    """Return an event's row with its value in the column of its type."""
    value = row.pop("value", None)
    if isinstance(value, str):
        row["choice" if row["kind"] == "preference" else "text"] = value
    elif isinstance(value, dict):
        row["criteria"] = json.dumps(value)  # names differ from row to row, so no struct fits
    else:
        row["number"] = value
    return row


def _schema(pa: Any, what: What) -> Any:
    text = pa.string()
    messages = pa.list_(pa.struct([("role", text), ("content", text)]))
    if what == "pairs":
        return pa.schema(
            [
                ("prompt", messages),
                ("chosen", messages),
                ("rejected", messages),
                ("rater_id", text),
                ("idempotency_key", text),
            ]
        )
    own = {
        "value": None,
        "prompt": messages,
        "other_prompt": messages,
        "tags": pa.list_(text),
    }
    columns = [(name, own.get(name, text)) for name in flat.COLUMNS if name != "value"]
    return pa.schema(
        [*columns, ("number", pa.float64()), ("text", text), ("choice", text), ("criteria", text)]
    )
