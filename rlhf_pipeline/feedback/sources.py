"""Feedback files and data sets as a stream of events; what cannot be taken comes out beside them.

`read` holds one row at a time (of flat OASST messages one tree), whatever the file's size, and goes
on after a bad row. What it does not protect against: a file that lies about who rated what.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import tzinfo
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_pipeline.errors import FeedbackRefused, SourceError
from rlhf_pipeline.feedback import formats
from rlhf_pipeline.feedback.flat import Named, csv_rows, numbers_told, sheet_rows
from rlhf_pipeline.feedback.formats import FORMATS, Format, Values
from rlhf_pipeline.feedback.lines import LONGEST_ROW, SHOWN, Position, RawRow, parse, raw_rows
from rlhf_pipeline.feedback.renaming import Renaming
from rlhf_pipeline.feedback.rules import Rule, check_event, refuse
from rlhf_pipeline.files import printable
from rlhf_pipeline.records import Feedback, QuarantinedRow, Source

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import RowGroupMetaData

TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
WORKBOOK, PARQUET = ".xlsx", ".parquet"
OLD_WORKBOOK, ZIP = bytes.fromhex("d0cf11e0a1b11ae1"), b"PK\3\4"  # what .xls, .xlsx begin with
ARROW_FILE, ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"
SAVED = ("state.json", "dataset_info.json")  # what save_to_disk writes beside a data set's rows
BEGINNING = 512  # bytes of a file that say what it is
LINES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
CELLS = (*TABLES, WORKBOOK, PARQUET)
SUFFIXES = (*LINES, *CELLS)
HUB = "hf://"
STORE = "feedback.db"  # what a state folder is known by
PARQUET_ROWS = 1000  # of a parquet file that are held at once, at most
PARQUET_HELD = 256 << 20  # bytes that their texts may have, unpacked
LOOKED_AT = 1000  # rows in one of which what is renamed has to be
AS_IT_IS = Renaming()
MOST_NAMES = 1000  # of a file's columns that are remembered
MOST_MESSAGES = 10_000  # of one flat tree: what is held while its rows come in

# What pandas calls the numbers of a table's rows where they were saved, as a column of no name.
INDEX = re.compile(r"Unnamed: 0(\.[0-9]+)?|__index_level_[0-9]+__")

FORMAT_NAMES = ("auto", *(each.name for each in FORMATS))


def read(
    path: str | Path,
    agent_id: str,
    format: str = "auto",
    *,
    source: Source = "human",
    split: str = "train",
    longest_row: int = LONGEST_ROW,
    position: Position | None = None,
    renaming: Renaming = AS_IT_IS,
) -> Iterator[Feedback | QuarantinedRow]:
    """Yield the file's events, in order, and in their places the rows that break a rule.

    `path` is a file (`SUFFIXES`, gzip or not; a table's columns are the fields) or `hf://NAME` for
    a Hugging Face data set's `split`. `source` says whose judgement the file holds where its rows
    do not. `position`, where given, tells line and bytes of what was yielded last. `renaming` says
    how the file names what a format names otherwise.

    Raises SourceError where the file or data set cannot be read at all, where the first row that
    is an object fits no format, where what is to be renamed is not there, or is no field of the
    format's.
    """
    position = position or Position()
    if str(path).startswith(HUB):
        origin = str(path)
        rows = _hub_rows(origin.removeprefix(HUB), split, position)
    else:
        # A name that is no UTF-8 may be read by; no database holds it.
        origin = printable(Path(path).name)
        rows = _file_rows(Path(path), position, longest_row, renaming.header)
    names: dict[str, None] = {}
    rows = _noting_names(rows, names, position)
    told: set[str] = set()
    if renaming:
        rows = _renamed(rows, renaming, position, origin, told)
    is_parquet = origin.lower().endswith(PARQUET)
    chosen = _named(format)
    trees = _FlatTrees()
    for line, raw, values in rows:
        if isinstance(values, FeedbackRefused):
            yield _aside(agent_id, origin, line, values, raw)
            continue
        if is_parquet:
            values = numbers_told(values)
        chosen = chosen or _detect({**dict.fromkeys(position.columns), **values}, origin)
        if lost := renaming.lost(told - chosen.fields - chosen.told):
            told_by = _told_by(renaming, "--map and --set")
            raise SourceError(
                f"needed fields that the format {chosen.name} has, as {origin} is read, found "
                f"{', '.join(lost)} told, which would be lost; leave it out of {told_by}, "
                "or, where the file is of another format, name that (--format)"
            )
        if chosen.name == "oasst" and _is_flat(values):
            ready = trees.add(line, raw, values)
        else:
            ready = [(line, raw, values)]
        for each in ready:
            position.line = each[0]
            yield from _events(chosen, each, agent_id, origin, source, renaming.tzinfo, told)
        position.line = line
    for each in trees.finish():
        position.line = each[0]
        yield from _events(formats.OASST, each, agent_id, origin, source, renaming.tzinfo, told)
    if chosen is not None and chosen.fields:
        read = {*(chosen.fields - {*formats.LABELLED}), *renaming.columns.values()}
        position.unread = [name for name in names if not _is_read(name, read)]


def files_in(folder: Path) -> list[Path]:
    """Return every file in a folder to read, `in_order`, but for those in a state folder there.

    Snapshots and data sets are made of votes that its store has: read again they would count twice.
    """
    return [path for path in _in(folder) if path.name.lower().endswith(SUFFIXES)]


def passed_over(folder: Path) -> list[Path]:
    """Return the files in a folder whose names say that nothing is read, but what tools leave."""
    return [path for path in _in(folder) if is_passed_over(path.relative_to(folder))]


def is_passed_over(path: Path) -> bool:
    """Say whether a name in a folder says that nothing is read of it, but for what tools leave.

    That is hidden, begins with _ as Spark's marks do, or is checksums, or a data set's card.
    """
    tools = any(part.startswith((".", "_")) for part in path.parts)
    return not (tools or path.name.lower().endswith((*SUFFIXES, ".crc", ".md")))


def _in(folder: Path) -> list[Path]:
    every = list(folder.rglob("*"))
    states = [path.parent for path in every if path.name == STORE]
    saved = {path.parent for path in every if path.name == SAVED[0] and _is_saved(path.parent)}
    # One file stands for such a data set, so that it is refused once, however many it has.
    beside = {folder.parent / "dataset_dict.json" for folder in saved}
    return in_order(
        path
        for path in every
        if not path.name.startswith(".")
        and path.is_file()
        and not any(path.is_relative_to(state) for state in states)
        and (path.parent not in saved or path.name == SAVED[0])
        and path not in beside
    )


def _is_saved(folder: str | Path) -> bool:
    """Say whether a folder is a data set as `save_to_disk` of Hugging Face's datasets writes it."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in SAVED)


def _refuse_arrow(where: str | Path) -> NoReturn:
    raise SourceError(
        f"lines or a table are needed, found Arrow in {where}; write it as lines (of a data set "
        "that save_to_disk wrote, datasets.load_from_disk(FOLDER).to_json('votes.jsonl')) or as "
        "parquet, and ingest that"
    )


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Return the paths by their names, and votes-9 before votes-10: the later vote counts."""
    return sorted(paths, key=lambda path: ([*map(_with_numbers, path.parts)], path))


def _with_numbers(name: str) -> list[str | int]:
    """Return a name in pieces, every other of them a number; so no text is compared with one."""
    pieces = re.split("([0-9]+)", name)
    return [int(piece) if place % 2 else piece for place, piece in enumerate(pieces)]


def why_left(path: Path) -> str | None:
    """Return why a file in an inbox is not taken in by itself; None where it is, or is no rows."""
    name = path.name.lower()
    if name.startswith("."):
        return None
    told = printable(path)
    if told != str(path):  # neither a run's configuration nor a message can hold it
        return f"{'/'.join(told.split(os.sep)[-2:])} is not named in UTF-8; rename it"
    if name.endswith(LINES):
        return None
    if name.endswith(SUFFIXES):
        return f"{path.name} is not called .jsonl; `rlhf ingest` takes it in, then move it away"
    if ".json" in name:
        return f"{path.name} does not end in .jsonl; rename it when it is whole"
    return None


_Parsed = tuple[int, str, "Values | FeedbackRefused"]


def _noting_names(
    rows: Iterator[_Parsed], names: dict[str, None], position: Position
) -> Iterator[_Parsed]:
    """Yield the rows; `names` takes their columns as the file has them; of an object a.b."""
    for line, raw, values in rows:
        if position.header:
            names.update({} if names else dict.fromkeys(filter(None, position.header)))
        elif not isinstance(values, FeedbackRefused) and len(names) < MOST_NAMES:
            for name, value in values.items():
                inner = [f"{name}.{key}" for key in value] if isinstance(value, dict) else [name]
                names.update(dict.fromkeys(map(str, inner)))
        yield line, raw, values


def _is_read(name: str, read: Collection[str]) -> bool:
    """Say whether a column is read, or a part of it is, or what it is a part of."""
    return any(f"{one}.".startswith(f"{name}.") or f"{name}.".startswith(f"{one}.") for one in read)


def _told_by(renaming: Renaming, options: str) -> str:
    return "feedback.names in the recipe" if renaming.for_any_file else options


def _renamed(
    rows: Iterator[_Parsed],
    renaming: Renaming,
    position: Position,
    origin: str,
    told: set[str],
) -> Iterator[_Parsed]:
    """Yield the rows by our names, once what is renamed was found among the first of them.

    `told` takes the fields that are told and there, before the first row that has them is yielded.
    """
    some = list(islice(rows, LOOKED_AT))
    is_cells = bool(position.columns)
    objects = [values for _, _, values in some if not isinstance(values, FeedbackRefused)]
    if is_cells:
        there = list(filter(None, position.header))
        lacking = [column for column in renaming.columns.values() if column not in there]
    else:
        lacking = renaming.lacking(objects)
        there = sorted({str(name) for values in objects for name in values})
    is_ours = not renaming.is_for(lacking)
    if not is_ours and (missed := renaming.refused(lacking)) and (objects or is_cells):
        raise SourceError(
            f"needed {', '.join(map(repr, missed))} among the columns of {origin}, found "
            f"{repr(there)[:300]}; correct {_told_by(renaming, '--map')} (where it is inside an "
            "object is written a.b)"
        )
    if not is_ours:
        told.update(renaming.fixed)
        told.update(name for name, column in renaming.columns.items() if column not in lacking)
    # A field of objects may come first beyond those rows; who voted is no less said by it there.
    lacking_yet: set[str] = set() if is_ours or is_cells else renaming.columns.keys() - told
    reading = renaming.of_our_names if is_ours else renaming
    # What is kept of a row that is set aside names its rater as we do: an erasure looks there.
    for line, raw, values in chain(some, rows):
        if isinstance(values, FeedbackRefused):
            naming = "" if is_cells and is_ours else renaming.naming(raw, is_cells=is_cells)
            yield line, _signed(raw, naming, "" if is_ours else renaming.signed), values
        elif not reading:
            yield line, raw, values
        else:
            later = {name for name in lacking_yet if renaming.says(name, values)}
            told |= later
            lacking_yet -= later
            ours = reading.row(values, is_cells=is_cells)
            position.left.update(() if is_cells else reading.left(values))
            if is_cells:
                naming = reading.naming(raw, is_cells=True)
                yield line, _signed(raw, naming, reading.signed), ours
            else:
                yield line, formats.canonical({**values, **ours}), ours


def _signed(raw: str, *namings: str) -> str:
    """Return a line to keep, names first: what is cut out of one that is too long is its middle."""
    said = ", ".join(filter(None, namings))
    return f"{said} … {raw}" if said else raw


def _file_rows(path: Path, position: Position, longest_row: int, named: Named) -> Iterator[_Parsed]:
    try:
        _check_beginning(path)
        if path.name.lower().endswith(TABLES):
            yield from csv_rows(path, position, named)
            return
        if path.name.lower().endswith(WORKBOOK):
            yield from sheet_rows(path, position, named)
            return
        if path.name.lower().endswith(PARQUET):
            yield from _parquet_rows(path, position, longest_row)
            return
        for row in raw_rows(path, position, longest_row):
            try:
                yield row.line, _shown(row), parse(row)
            except FeedbackRefused as refusal:
                yield row.line, _shown(row), refusal
    except OSError as error:
        raise SourceError(
            f"a readable file is needed at {path}, found none ({error}); check the path"
        ) from error


def _check_beginning(path: Path) -> None:
    """Raise SourceError where the file begins as UTF-16, a workbook or Arrow; it has no rows."""
    if path.name in SAVED and _is_saved(path.parent):
        _refuse_arrow(path.parent)
    with path.open("rb") as file:
        beginning = file.read(BEGINNING)
    # Without one of the zeros that its quotes and commas have, it is a first line that is damaged.
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" in beginning:
        raise SourceError(
            f"a file in UTF-8 is needed, found UTF-16 in {path}; save it as UTF-8 (in Excel: "
            "CSV UTF-8; in PowerShell: Out-File -Encoding utf8)"
        )
    is_stream = beginning.startswith(ARROW_STREAM) and b"\0" in beginning
    if is_stream or beginning.startswith(ARROW_FILE):
        _refuse_arrow(path)
    is_named = path.name.lower().endswith(WORKBOOK)
    if beginning.startswith((OLD_WORKBOOK, ZIP)) and not is_named:
        raise SourceError(
            f"lines or a table in UTF-8 are needed, found a workbook or an archive in {path}; save "
            "a workbook as .xlsx or as CSV UTF-8, unpack an archive"
        )


def _parquet_rows(path: Path, position: Position, longest_row: int) -> Iterator[_Parsed]:
    """Yield the rows of one file of a data set's folder, as `rlhf feedback export` writes one.

    What this does not protect against: one row in whose lists a text is repeated; it is unpacked
    to be measured.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    position.bytes_total = path.stat().st_size
    try:
        with pq.ParquetFile(path) as file:
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            texts = max(map(_bytes_of_texts, groups), default=0)
            at_once = min(PARQUET_HELD // max(texts, 1) or 1, PARQUET_ROWS)
            for some in file.iter_batches(at_once):
                for raw, values in _made(_decoded(some), longest_row):
                    position.line += 1
                    yield position.line, raw, values
    except (pa.ArrowException, UnicodeError) as error:
        raise SourceError(
            f"a whole parquet file is needed at {path}, found: {str(error)[:300]}; write it again"
        ) from error
    position.bytes_read = position.bytes_total


def _bytes_of_texts(group: RowGroupMetaData) -> int:
    """Return how long the texts are that a group holds; each of its rows may repeat them all."""
    columns = map(group.column, range(group.num_columns))
    return sum(
        column.total_uncompressed_size
        for column in columns
        if column.physical_type.endswith("BYTE_ARRAY")
    )


def _decoded(rows: RecordBatch) -> RecordBatch:
    """Return the rows so that each has its own values, to be measured by."""
    import pyarrow as pa

    columns = [
        column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
        for column in rows.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _made(rows: RecordBatch, longest: int) -> Iterator[tuple[str, Values | FeedbackRefused]]:
    """Yield each row as text and as values, or why it cannot be made; the rest of them is."""
    try:
        if rows.nbytes <= longest:
            yield from [(formats.canonical(values), values) for values in rows.to_pylist()]
            return
        detail = f"needed at most {longest} bytes in a row, found {rows.nbytes}; leave it out"
        refusal = FeedbackRefused(Rule.line_too_long, detail)
    except UnicodeDecodeError as error:
        refusal = FeedbackRefused(Rule.not_utf8, f"needed UTF-8, found {error}; mend the row")
    except (ArithmeticError, LookupError, ValueError) as error:  # of a date there cannot be
        refusal = FeedbackRefused(Rule.bad_time, f"needed a moment, found {error}; mend the row")
    if rows.num_rows > 1:
        half = rows.num_rows // 2
        yield from _made(rows.slice(0, half), longest)
        yield from _made(rows.slice(half), longest)
        return
    shown = {}  # what can be, so that an erasure finds who signed it
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        with suppress(ArithmeticError, LookupError, ValueError):
            if column.nbytes <= SHOWN:
                shown[name] = column[0].as_py()
    yield formats.canonical(shown), refusal


def _shown(row: RawRow) -> str:
    return row.content.decode("utf-8", "backslashreplace").strip()


def _hub_rows(name: str, split: str, position: Position) -> Iterator[_Parsed]:
    """Stream a data set from the hub, or from a folder in the hub's layout."""
    if _is_saved(name):
        _refuse_arrow(name)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets

    try:
        for values in datasets.load_dataset(name, split=split, streaming=True):
            position.line += 1
            yield position.line, formats.canonical(values), values
    except Exception as error:  # the hub's client raises a dozen unrelated types
        kind = type(error).__name__
        raise SourceError(
            f"the data set {name!r} (split {split!r}) is needed from the hub, found {kind}: "
            f"{str(error)[:300]}; check name, split, network and HF_ENDPOINT, or download its "
            ".jsonl files where there is a network and ingest those"
        ) from error


def _named(name: str) -> Format | None:
    if name == "auto":
        return None
    for each in FORMATS:
        if each.name == name:
            return each
    raise SourceError(f"needed a format out of {', '.join(FORMAT_NAMES)}, found {name!r}")


def _detect(values: Values, origin: str) -> Format:
    for each in FORMATS:
        if each.matches(values):
            return each
    way = "or name the format"
    if name := next((name for name in values if _holds_rows(name, values[name])), None):
        way += f", or, as its {name!r} is a list, write each of that on a line (jq -c '.{name}[]')"
    raise SourceError(
        f"needed a row of a known format ({', '.join(FORMAT_NAMES[1:])}) in {origin}, found one "
        f"with the fields {repr(sorted(map(str, values)))[:200]}; rename them to those of "
        "`events` (kind, prompt, completion, value, rater), `pairs` (prompt, chosen, rejected) or "
        "`quality` (messages, label), tell `rlhf ingest` which they are with --map and --set, or "
        f"once in the recipe (feedback.names), {way}"
    )


def _holds_rows(name: str, value: Any) -> bool:
    """Say whether it is a list of objects, but no conversation, under a name that jq takes bare."""
    return (
        name.isascii()
        and name.isidentifier()
        and isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and not formats.is_message(item) for item in value)
    )


def _events(
    chosen: Format,
    parsed: _Parsed,
    agent_id: str,
    origin: str,
    source: Source,
    zone: tzinfo | None,
    told: Set[str],
) -> Iterator[Feedback | QuarantinedRow]:
    line, raw, values = parsed
    if isinstance(values, FeedbackRefused):
        yield _aside(agent_id, origin, line, values, raw)
        return
    count = 0
    where = {"agent_id": agent_id, "origin": origin[-400:], "source": source, "zone": zone}
    values = {name: value for name, value in values.items() if not INDEX.fullmatch(name)}
    row = chosen.row(values, told, **where)
    try:
        for event in chosen.events(row):
            count += 1
            try:
                check_event(event)
            except FeedbackRefused as refusal:
                said = raw if count == 1 else formats.canonical(formats.to_row(event))
                yield _aside(agent_id, origin, line, refusal, said)
            else:
                yield event
    except FeedbackRefused as refusal:
        yield _aside(agent_id, origin, line, refusal, raw)
    except RecursionError:
        deep = FeedbackRefused(Rule.broken_json, "needed flatter JSON, found it nested too deep")
        yield _aside(agent_id, origin, line, deep, raw)


def _aside(
    agent_id: str, origin: str, line: int, refusal: FeedbackRefused, raw: str
) -> QuarantinedRow:
    return QuarantinedRow(agent_id, refusal.rule, str(refusal), origin, line, raw)


def _is_flat(values: Values) -> bool:
    return "parent_id" in values and not isinstance(values.get("replies"), list)


@dataclass(slots=True)
class _FlatTrees:
    """Flat OASST messages on their way back into a tree; one tree is held at a time."""

    tree_id: object = None
    rows: list[tuple[int, str, Values]] = field(default_factory=list)

    def add(self, line: int, raw: str, values: Values) -> list[_Parsed]:
        """Take one message and return what it completes: the tree before, when a new one begins."""
        is_root = values.get("parent_id") is None
        tree_id = values.get("message_tree_id") or (
            values.get("message_id") if is_root else self.tree_id
        )
        finished: list[_Parsed] = []
        if tree_id != self.tree_id:
            finished = self.finish()
            self.tree_id = tree_id
        if len(self.rows) >= MOST_MESSAGES:
            message = f"needed trees of at most {MOST_MESSAGES} messages, found more; split it"
            return [*finished, (line, raw, FeedbackRefused(Rule.too_long, message))]
        self.rows.append((line, raw, values))
        return finished

    def finish(self) -> list[_Parsed]:
        """Return the held tree as one nested row, and its messages that do not hang on it.

        Those are the ones whose parent is missing, and all that is said below them.
        """
        rows, self.rows = self.rows, []
        nodes: dict[str, dict[str, Any]] = {}
        for _, _, values in rows:
            if isinstance(message_id := values.get("message_id"), str):
                nodes[message_id] = {**values, "replies": []}
        for node in nodes.values():
            if isinstance(parent := node.get("parent_id"), str) and parent in nodes:
                nodes[parent]["replies"].append(node)
        hanging = [node for node in nodes.values() if node.get("parent_id") is None]
        for node in hanging:  # grows until every leaf was reached; a ring is never entered
            hanging += node["replies"]
        reached = {id(node) for node in hanging}
        parsed: list[_Parsed] = []
        for line, raw, values in rows:
            message_id, parent_id = values.get("message_id"), values.get("parent_id")
            if not isinstance(message_id, str):
                found: Any = _refusal(Rule.missing_field, "message_id as text", None)
            elif id(nodes[message_id]) not in reached:
                needed = "a message that hangs, by its parents, on the tree's first one"
                found = _refusal(Rule.orphan_message, needed, f"parent {parent_id!r}")
            elif parent_id is None:
                found = nodes[message_id]
            else:
                continue
            parsed.append((line, raw, found))
        return parsed


def _refusal(rule: Rule, needed: str, found: object) -> FeedbackRefused:
    try:
        refuse(rule, needed, found)
    except FeedbackRefused as refusal:
        return refusal
