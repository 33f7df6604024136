"""Feedback as flat cells of text (CSV), and back: what is written reads as the same event.

A workbook (.xlsx) is read too: its first sheet, each cell as the text it would be in a CSV file.
What a spreadsheet would run as a formula is written with an apostrophe before it, and read without:
the cell, and within it what follows a sign at which spreadsheets of other countries split lines.
In a table that cannot be one of those written here, quotes and apostrophes are of the text.
What this does not protect: a program that runs cells which begin with an apostrophe, or that splits
a quoted cell at its line breaks.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, time
from decimal import Decimal
from itertools import chain, islice, pairwise, product
from pathlib import Path
from typing import IO, Any

from rlhf_pipeline.errors import FeedbackRefused, SourceError
from rlhf_pipeline.feedback.formats import LABELLED, SIGNED, WHO
from rlhf_pipeline.feedback.lines import DAMAGE, LONGEST_ROW, Position, pieces, unpacking
from rlhf_pipeline.feedback.rules import Rule

COLUMNS = (
    *("agent_id", "kind", "value", "prompt", "completion", "other_completion", "other_prompt"),
    *("shown_first", "interaction_id", "other_interaction_id", "rater_id", "source"),
    *("occurred_at", "tags", "comment", "topic", "idempotency_key"),
)
STRUCTURED = ("tags", "criteria")  # messages are read out of a text by whatever format has them
NUMBERS = ("quality", "chosen_score", "rejected_score", "score_chosen", "score_rejected", "number")
SWITCHES = ("tie", "label")
FORMULA = r"[=+\-@＝＋－＠]"  # OWASP, CSV injection; the wide forms run too
RUNS = re.compile(rf"[\s']*(?:{FORMULA}|[\t\r\n])")
# After a separator, where a line is split at it: in many countries at ; and not at a comma.
WITHIN = re.compile(rf"([;,|\t][^\S\t]*)('*{FORMULA})")
# A person's number as pandas writes it where one is lacking; of more digits, two may be one.
FLOAT_NAME = re.compile(r"[0-9]{1,15}\.0")
SEPARATOR = re.compile(r'"?sep=([,;|\t])"?\s*', re.IGNORECASE)  # a line before the names, for Excel
BEFORE_QUOTE = re.compile(' +"')  # as in `"a", "b"`: the blank is the table's
QUOTE_WITHIN = "expected after '\"'"  # csv's words; a table cut off has other ones
LOOKED_AT = 20  # rows that show how a table is written
# A character that XML cannot hold as Excel writes it, and the _ of a text that looks like one.
ESCAPED = re.compile("_x(00[01][0-9A-F]|005F)_", re.IGNORECASE)
LAST_ROW = 1 << 20  # of a sheet, as Excel has it
LARGEST_WORKBOOK = 1 << 30  # bytes once unpacked: its texts are held in memory together
# Of its parts those that openpyxl reads as one tree, and how many bytes each may have. Others it
# reads a piece at a time or not at all.
LARGEST_PARTS = (
    (r"\[Content_Types\]\.xml|(xl/)?_rels/.+|docProps/.+", 8 << 20),
    (r"xl/(workbook|styles)\.xml|xl/theme/.+", 8 << 20),
    (r"xl/worksheets/_rels/.+", 64 << 20),  # a row for each link in a sheet, 65,530 at most
)
NUMERIC_KINDS = ("thumbs", "rating", "score")

# Columns that may be blank, and what a database's export has there. In a text it is what was said.
OPTIONAL = (
    *(*WHO, "idempotency_key", "interaction_id", "other_interaction_id", "shown_first"),
    *("source", "occurred_at", "tags", "comment", "topic"),
)
NULLS = ("NULL", r"\N")

TableRow = tuple[int, str, dict[str, Any] | FeedbackRefused]
"""Line, the row as it stands, and its values or why they cannot be told."""

Named = Callable[[Sequence[str]], list[str]]


def cell_of(value: Any) -> str:
    """Return a value as one inert cell."""
    if value is None:
        return ""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False) if _is_told_as_json(value) else value
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = json.dumps(value, ensure_ascii=False)
    return f"'{WITHIN.sub(_MARKED, text)}" if _runs(text) else text


def text_of(cell: str) -> str:
    """Return the text, or the JSON of a list or an object, that `cell_of` may have written so."""
    text = _without_marks(cell)
    if text[:1] != '"':
        return text
    try:
        said: str = json.loads(text)
    except ValueError:
        return text
    return said if _is_told_as_json(said) else text


def _is_told_as_json(text: str) -> bool:
    """Say whether it reads as JSON, or as no cell at all: it would come back as something else."""
    return text[:1] in ("", "[", "{", '"') or text.strip() in NULLS


def value_of(name: str, text: str, kind: str | None) -> Any:
    """Return what a text says; a number, true or JSON only where the column may hold it.

    Who is 17.0 in one table, as its column has a gap, is 17 in another; and nobody sees the blanks
    around a name.
    """
    if name in (*SIGNED, *LABELLED):
        text = text.strip() or text
        if FLOAT_NAME.fullmatch(text):
            return text.removesuffix(".0")
    structured = name in STRUCTURED or (name == "value" and kind == "criteria")
    if structured and text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    is_switch = name in SWITCHES or (name == "value" and kind == "thumbs")
    if is_switch and text.lower() in ("true", "false"):
        return text.lower() == "true"
    bounded = name == "quality" or (name == "value" and kind in NUMERIC_KINDS)
    if bounded or name in NUMBERS:
        try:
            # The bounded ones have no thousands: a comma is the decimal point of half the world.
            return float(text.replace(",", ".") if bounded else text)
        except ValueError:
            return text
    return text


def numbers_told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of typed columns with what numbers and truth values its texts say in theirs.

    A DECIMAL is the number it is, and NaN is none. Every other text is what it is: of a typed
    column none was made inert, and none is JSON.
    """
    kind = values.get("kind")
    counted = (*NUMBERS, *SWITCHES, *(("value",) if kind in NUMERIC_KINDS else ()))
    told = {
        name: value_of(name, values[name], kind)
        for name in counted
        if isinstance(values.get(name), str)
    }
    plain = {
        name: _plain(values[name]) for name in (*counted, *SIGNED, *LABELLED) if name in values
    }
    return {**values, **plain, **told}


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, float) and math.isnan(value) else value


def _need_utf8(path: Path) -> None:
    """Raise SourceError, with the line, where a file is not UTF-8; up to the damage if any."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    whole = path.suffix != ".gz"  # of which may be read what comes out before its damage
    for piece in chain(pieces(path), (b"",)):
        try:
            line += decoder.decode(piece, final=whole and not piece).count("\n")
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            raise SourceError(
                f"needed UTF-8, found the byte {error.object[error.start]:#x} in line {line} of "
                f"{path.name}; save the table as UTF-8 (Excel: CSV UTF-8)"
            ) from error


_MARKED = r"\1'\2"


def _runs(text: str) -> bool:
    """Say whether it would run, or reads as a cell that was marked because it would."""
    return RUNS.match(text) is not None or WITHIN.search(text) is not None


def _without_marks(cell: str) -> str:
    # The first apostrophe says that the others are ours: text like a,'-b' has its own.
    if not (cell.startswith("'") and _runs(cell[1:])):
        return cell
    return WITHIN.sub(lambda found: found[1] + found[2].removeprefix("'"), cell[1:])


def csv_rows(path: Path, position: Position, named: Named) -> Iterator[TableRow]:
    """Yield every row that says something; empty cells are left out, and a database's NULL.

    `named` says by which names the columns are read. Cells are split at commas, semicolons or tabs,
    at whichever cut the first rows into most (spreadsheets of many countries write the latter), or
    at what a first line `sep=;` tells. Blanks after them are left out where the first rows have
    some before a quote, and blanks after a quoted cell everywhere.
    Raises SourceError for a table that is not UTF-8 throughout: of one in another encoding, rows
    without an accent alone would go in.
    """
    _need_utf8(path)
    csv.field_size_limit(LONGEST_ROW)
    position.bytes_total = path.stat().st_size
    with path.open("rb") as packed, _text(packed) as file:
        lines = _split(file, path)
        unpacked = _whole(lines, "gzip file", DAMAGE)
        # A row over the limit, a cell cut off, or a quote within a text that is not doubled.
        whole = _whole(unpacked, "table", (csv.Error,))
        yield from _rows(whole, position, named)
    position.bytes_read = position.bytes_total


def sheet_rows(path: Path, position: Position, named: Named) -> Iterator[TableRow]:
    """Yield every row of a workbook's first sheet that says something, by its number.

    A hidden sheet is the first only where all are. `named` is as in `csv_rows`. Formulas give what
    they last came to, if it is no error. Raises SourceError where the file is no workbook, unpacks
    to more than LARGEST_WORKBOOK, or openpyxl is not installed; and where the first sheet has no
    rows and there are others, which may have them.
    """
    try:
        import openpyxl
    except ImportError as error:
        raise SourceError(
            f"a workbook needs openpyxl, found none to read {path} with; pip install '.[xlsx]', "
            "or save the sheet as .csv"
        ) from error
    position.bytes_total = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as packed:
            parts = packed.infolist()
        unpacked = sum(part.file_size for part in parts)
        if unpacked > LARGEST_WORKBOOK:
            raise SourceError(
                f"a workbook of at most {LARGEST_WORKBOOK:,} bytes unpacked is needed, found "
                f"{unpacked:,} in {path}; save the sheet as .csv"
            )
        for part, (names, most) in product(parts, LARGEST_PARTS):
            if part.file_size > most and re.fullmatch(names, part.filename, re.IGNORECASE):
                raise SourceError(
                    f"at most {most:,} bytes unpacked are needed in {part.filename!a} of "
                    f"a workbook, found {part.file_size:,} in {path}; save the sheet as .csv"
                )
        book = openpyxl.load_workbook(path, read_only=True, data_only=True, keep_links=False)
        shown = [sheet for sheet in book.worksheets if sheet.sheet_state == "visible"]
        sheet = (shown or book.worksheets)[0]
    except (OSError, SourceError):
        raise
    except Exception as error:  # of a damaged one openpyxl raises a dozen unrelated types
        raise SourceError(
            f"a workbook is needed at {path}, found: {_words(error)}; save the sheet as .csv"
        ) from error
    try:
        lines = _cells(sheet)
        others = [ascii(other.title) for other in book.worksheets if other is not sheet]
        is_cover = bool(others)
        for row in _rows(_whole(lines, "workbook", (Exception,)), position, named):
            is_cover = False
            yield row
        if is_cover:
            raise SourceError(
                f"needed names and rows below them in the first sheet of {path}, found none in "
                f"{sheet.title!a} and other sheets ({', '.join(others)[:300]}); move the one "
                "that has them to the front, where it is not hidden, or save it as .csv"
            )
    finally:
        book.close()
    position.bytes_read = position.bytes_total


_Line = tuple[int, Sequence[str]]


def _cells(sheet: Any) -> Iterator[_Line]:
    """Yield a sheet's rows by their own numbers, each as wide as the cells that it has.

    openpyxl's `iter_rows` ends where the file says that the sheet does, which programs write
    wrongly, leaves out a row that stands after a later one, and makes up those that lack.
    Raises ValueError where rows are out of order, one is beyond the last there can be, or longer
    than LONGEST_ROW: a text that is there once may be in each of its cells.
    """
    from openpyxl.worksheet._reader import WorkSheetParser

    book, last = sheet.parent, 0
    with sheet._get_source() as source:
        parser = WorkSheetParser(
            source,
            sheet._shared_strings,
            data_only=True,
            epoch=book.epoch,
            date_formats=book._date_formats,
            timedelta_formats=book._timedelta_formats,
        )
        for number, cells in parser.parse():
            if number <= last:
                raise ValueError(f"row {number} after row {last}")
            if number > LAST_ROW:
                raise ValueError(f"row {number:,}, though a sheet ends at {LAST_ROW:,}")
            last = number
            texts, length = {}, 0
            for cell in cells:
                text = texts[cell["column"]] = _sheet_text(cell)
                length += len(text)
                if length > LONGEST_ROW:
                    raise ValueError(f"row {number} has more than {LONGEST_ROW:,} characters")
            row = [texts.get(column, "") for column in range(1, max(texts, default=0) + 1)]
            yield number, _without_last_blanks(row)


def _sheet_text(cell: Mapping[str, Any]) -> str:
    """Return a sheet's cell as CSV would hold it; one that came to an error says nothing."""
    if cell["data_type"] == "e":
        return ""
    return ESCAPED.sub(lambda found: chr(int(found[1], 16)), cell_text(cell["value"]))


def _without_last_blanks(cells: list[str]) -> list[str]:
    # A sheet's rows end where any of them does.
    while cells and not cells[-1].strip():
        cells.pop()
    return cells


def _split(file: IO[str], path: Path) -> Iterator[_Line]:
    read = _Lines(file)
    begun = [next(read, "")]
    while begun[-1].isspace():
        read.length = 0
        begun.append(next(read, ""))
    at = len(begun) - 1
    # What cuts all rows into most, or else the names: one of these may hold another sign.
    separator = max(",;\t", key=lambda sign: _widths(_first_rows(path, at, sign)))
    if told := SEPARATOR.fullmatch(begun[-1]):
        separator, begun[-1] = told[1], "\n"  # a line still, for the numbers of those below
        at += 1
    plain, without = (_first_rows(path, at, separator, skips) for skips in (False, True))
    # Where a text begins with it, it stands within the quotes, and is left out of neither. Or
    # it stands in none, where lines were joined: what follows ` "Yes"` would then be damage.
    told_by = plain[: len(without)]
    skips = any(BEFORE_QUOTE.match(cell) for cell in {*chain(*told_by)} - {*chain(*without)})
    header, *rows = (without if skips else plain) or [[]]
    width = len(header)
    # Every row ends in a separator, which is no comma in their texts: a blank would follow that.
    ends = bool(rows) and all(
        len(cells) == width + 1 and not cells[-1] and not any(cell[:1] == " " for cell in cells)
        for cells in rows
    )
    # Nor is it the comma of 0,7 in each of them.
    ends &= not all(any(a.isdigit() and b.isdigit() for a, b in pairwise(row)) for row in rows)
    # Strictly: else what follows a quote in a text goes into one cell with it, rows and all.
    lines = _without_blanks_after_quotes(chain(begun, read), separator, skips)
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=skips, strict=True)
    for cells in reader:
        read.length = 0
        yield reader.line_num, cells[:-1] if ends and cells[width:] == [""] else cells


class _Lines(Iterator[str]):
    """A table's lines. Raises csv.Error before more of a row is held than LONGEST_ROW.

    Who reads sets `length`, of the row's lines so far, back to 0 where one ends.
    """

    def __init__(self, file: IO[str]) -> None:
        self.file, self.length = file, 0

    def __next__(self) -> str:
        line = self.file.readline(LONGEST_ROW + 1)
        self.length += len(line)
        if self.length > LONGEST_ROW:
            raise csv.Error(f"a row of more than {LONGEST_ROW:,} characters")
        if not line:
            raise StopIteration
        return line


def _widths(rows: list[list[str]]) -> tuple[int, int]:
    """Return how many cells all of the rows have, and the first of them."""
    return min(map(len, rows), default=0), len(rows[0]) if rows else 0


def _first_rows(path: Path, at: int, separator: str, skips: bool = False) -> list[list[str]]:
    """Return the first rows that say something, of the lines after `at`, up to a damage if any.

    What follows a quoted cell's end is damage where blanks before the quote are skipped.
    """
    rows: list[list[str]] = []
    with path.open("rb") as packed, _text(packed) as file, suppress(csv.Error, *DAMAGE):
        read = _Lines(file)
        for _ in islice(read, at):
            read.length = 0
        lines = _without_blanks_after_quotes(read, separator, skips)
        for cells in csv.reader(lines, delimiter=separator, skipinitialspace=skips, strict=skips):
            read.length = 0
            rows += [cells] if any(cells) else []
            if len(rows) == LOOKED_AT:
                break
    return rows


def _without_blanks_after_quotes(
    lines: Iterable[str], separator: str, skips: bool
) -> Iterator[str]:
    """Yield the lines without the blanks between the quote that ends a cell and what follows it.

    Strictly read they are damage. A quoted cell is matched whole, so that none are within a text.
    """
    before, after = rf"(?:^|[{separator}]){' *' if skips else ''}", rf"(?=[{separator}\r\n]|\Z)"
    quoted = re.compile(rf'({before}"[^"]*(?:""[^"]*)*)(?:(") *{after}|\Z)')
    opened = ""  # the quote of a cell that goes on in the next line, which is matched with it
    for line in lines:
        whole = opened + line
        if '"' not in whole:  # as most lines of most tables
            yield line
            continue
        last = deque(quoted.finditer(whole), maxlen=1)
        yield quoted.sub(r"\1\2", whole)[len(opened) :]
        opened = '"' if last and last[0][2] is None else ""


def _whole(
    lines: Iterable[_Line], what: str, damage: tuple[type[Exception], ...]
) -> Iterator[_Line]:
    """Yield the lines. Raises FeedbackRefused where reading on fails as it does on damage."""
    try:
        yield from lines
    except damage as error:
        undoubled = QUOTE_WITHIN in str(error)
        remedy = "double the quotes within its texts" if undoubled else "make it again"
        raise FeedbackRefused(
            Rule.damaged_file,
            f"needed a whole {what}, found: {_words(error)}; {remedy} and ingest it again",
        ) from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _rows(lines: Iterator[_Line], position: Position, named: Named) -> Iterator[TableRow]:
    """Yield what the lines say by the names in the first that is not blank, or `named` for them.

    The last says where a file is damaged.
    """
    last = 0
    try:
        last, header = next((one for one in lines if any(one[1])), (0, ()))
        position.header = [name.strip() for name in header]
        names = named(position.header)
        while names and not names[-1]:
            names.pop()
        position.columns = names
        is_ours = "kind" in position.header  # or may be: `write_csv` writes events
        for last, cells in lines:
            if not any(cells):
                continue
            raw, values = _read(names, cells, is_ours)
            if said := _refusal(names, cells, len(position.header)) or values:
                position.line = last
                yield last, raw, said
    except FeedbackRefused as refusal:
        yield last + 1, str(refusal.__cause__), refusal


def _refusal(names: Sequence[str], cells: Sequence[str], width: int) -> FeedbackRefused | None:
    """Return why the row cannot be told; None where every cell stands under its own name.

    Of `width` cells, of which the last may have no name, no row has more.
    """
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        return FeedbackRefused(
            Rule.repeated_field,
            f"needed each column once, found {ascii(twice)[:80]} again; rename one or leave it out",
        )
    # A comma in a text that is not quoted moves what follows under another's name; what it moves
    # beyond them all may be blank.
    unnamed = sum(cell.strip() != "" for cell in cells[len(names) :])
    if beside := max(unnamed, len(cells) - width):
        return FeedbackRefused(
            Rule.unknown_field,
            f"needed a name over every cell, found {beside} beyond the {len(names)} columns; quote "
            "the text that holds a comma, name the column, or leave out the cell",
        )
    return None


def _read(header: Sequence[str], cells: Sequence[str], is_ours: bool) -> tuple[str, dict[str, Any]]:
    """Return the row as one line, and its values by name; cells that say nothing are in neither.

    The line is a JSON object's, so that an erasure finds who signed it. Nothing is left out of it:
    a name may stand twice in there, and a cell that no name stands over has an empty one.
    """
    kind = dict(zip(header, cells, strict=False)).get("kind")
    said: list[str] = []
    values: dict[str, Any] = {}
    for name, cell in zip(header, cells, strict=False):
        if cell != "" and not (name in OPTIONAL and cell.strip() in NULLS):
            value = value_of(name, text_of(cell) if is_ours else cell, kind)
            # Text without what makes it inert: the name as the sender's other rows have it.
            said.append(_member(name, value if isinstance(value, str) else cell))
            if name:
                values[name] = value
    said += [_member("", cell) for cell in cells[len(header) :] if cell != ""]
    return "{" + ", ".join(said) + "}", values


def _member(name: str, text: str) -> str:
    return f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(text, ensure_ascii=False)}"


def cell_text(cell: Any) -> str:
    """Return a cell as CSV would hold it: 3 for 3.0, true, 2024-05-01T12:00:00."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return cell.isoformat() if isinstance(cell, date | time) else str(cell)


def write_csv(file: IO[str], rows: Iterator[Mapping[str, Any]]) -> int:
    """Write a header and a line per row; return how many rows.

    Every cell is quoted: a spreadsheet that also splits at ; or | leaves them whole.
    """
    writer = csv.writer(file, quoting=csv.QUOTE_ALL)
    writer.writerow(COLUMNS)
    count = 0
    for row in rows:
        writer.writerow([cell_of(row.get(name)) for name in COLUMNS])
        count += 1
    return count


def _text(file: io.BufferedReader) -> IO[str]:
    plain = unpacking(file)
    return io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape", newline="")
