"""Feedback as flat cells of text (CSV), and back: what is written reads as the same event.

A cell that a spreadsheet would run as a formula is written with an apostrophe before it, and read
without. What this does not protect: a program that runs cells which begin with an apostrophe.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rlhf_pipeline.feedback.lines import LONGEST_ROW, Position

COLUMNS = (
    *("agent_id", "kind", "value", "prompt", "completion", "other_completion", "other_prompt"),
    *("shown_first", "interaction_id", "other_interaction_id", "rater_id", "source"),
    *("occurred_at", "tags", "comment", "topic", "idempotency_key"),
)
STRUCTURED = ("prompt", "other_prompt", "messages", "chosen", "rejected", "tags", "criteria")
NUMBERS = ("quality", "chosen_score", "rejected_score", "score_chosen", "score_rejected", "number")
SWITCHES = ("tie", "label")
RUNS = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")  # OWASP, CSV injection; the wide forms run too
NUMERIC_KINDS = ("thumbs", "rating", "score")


def cell_of(value: Any) -> str:
    """Return a value as one inert cell."""
    if value is None:
        return ""
    if isinstance(value, str):
        # Text that reads as JSON would come back as something else, so it is written as JSON.
        text = json.dumps(value, ensure_ascii=False) if value[:1] in ("[", "{", '"') else value
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = json.dumps(value, ensure_ascii=False)
    return f"'{text}" if RUNS.match(text) else text


def value_of(name: str, cell: str, kind: str | None) -> Any:
    """Return what a cell says; a number, true or JSON only where the column may hold it."""
    text = cell[1:] if cell.startswith("'") and RUNS.match(cell) else cell
    structured = name in STRUCTURED or (name == "value" and kind == "criteria")
    if text[:1] == '"' or (structured and text[:1] in ("[", "{")):
        try:
            return json.loads(text)
        except ValueError:
            return text
    if name in SWITCHES and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if name in NUMBERS or (name == "value" and kind in NUMERIC_KINDS):
        try:
            return float(text)
        except ValueError:
            return text
    return text


def csv_rows(path: Path, position: Position) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield line, the row as it stands, and its values; empty cells are left out.

    Bytes that are not UTF-8 become half surrogates, which the rules then refuse by name.
    """
    csv.field_size_limit(LONGEST_ROW)
    position.bytes_total = path.stat().st_size
    with _opened(path) as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        for cells in reader:
            if not any(cells):
                continue
            position.line = reader.line_num
            named = dict(zip(header, cells, strict=False))
            kind = named.get("kind")
            values = {n: value_of(n, c, kind) for n, c in named.items() if c != "" and n}
            yield reader.line_num, json.dumps(cells, ensure_ascii=False), values
    position.bytes_read = position.bytes_total


def write_csv(file: IO[str], rows: Iterator[Mapping[str, Any]]) -> int:
    """Write a header and a line per row; return how many rows."""
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    count = 0
    for row in rows:
        writer.writerow([cell_of(row.get(name)) for name in COLUMNS])
        count += 1
    return count


def _opened(path: Path) -> IO[str]:
    raw: Any = path.open("rb")
    if path.name.lower().endswith(".gz"):
        raw = gzip.GzipFile(fileobj=raw)
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
