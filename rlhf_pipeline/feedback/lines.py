"""Rows out of a file in bounded memory: JSON lines or one JSON array, plain or gzip.

A row longer than the limit is walked past, never held. What this does not protect against: a file
that grows while it is read, and a limit set above the memory there is.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from rlhf_pipeline.errors import FeedbackRefused, SourceError
from rlhf_pipeline.feedback.rules import Rule

LONGEST_ROW = 8 << 20  # bytes
SHOWN = 2_000  # bytes of a row too long to hold that are kept to show
BLOCK = 1 << 16
PACKED_BLOCK = 1 << 13  # bytes of a gzip file at a time: at most a thousand times as many come out
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PACKED = b"\x1f\x8b"  # what a gzip file begins with, whatever its name
DAMAGE = (EOFError, zlib.error)  # what a broken one raises
DEEPEST = 256  # lists and objects inside each other; our own code may recurse that far


@dataclass(slots=True)
class Position:
    """How far a reader is; it is updated while the rows are drawn."""

    line: int = 0  # of the row drawn last; for an array the line its element begins on
    bytes_read: int = 0  # of the file on disk, so compressed where it is
    bytes_total: int = 0
    columns: Sequence[str] = ()  # of a table: a row leaves out those it says nothing in
    header: Sequence[str] = ()  # the same as the table has them
    unread: Sequence[str] | None = None  # at the end, where rows may name their rater: no field's
    left: Counter[str] = field(default_factory=Counter)  # list -> rows that have more in it


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row's bytes, or with `problem` the beginning of what could not be taken."""

    line: int
    content: bytes
    problem: Rule | None = None
    detail: str = ""


def raw_rows(path: Path, position: Position, longest: int = LONGEST_ROW) -> Iterator[RawRow]:
    """Yield every non-blank row of the file, whatever is inside it.

    Raises SourceError where its first object stands on several lines: none of them is a row.
    """
    position.bytes_total = path.stat().st_size
    with path.open("rb") as file:
        try:
            for row in _rows(unpacking(file), path, longest):
                position.line, position.bytes_read = row.line, file.tell()
                yield row
        except DAMAGE as error:
            yield RawRow(
                position.line + 1,
                str(error).encode(),
                Rule.damaged_file,
                f"needed a whole gzip file, found: {error}; make it again and ingest it again",
            )
        position.bytes_read = file.tell()


def unpacking(file: io.BufferedReader) -> io.BufferedReader:
    """Return what reads the file's content: if it is gzip, up to the damage if any, raised there.

    A line that the damage cuts off is not given: nobody can say what it would have been.
    """
    packed = file.peek(2).startswith(PACKED)
    return io.BufferedReader(_Unpacked(file), BLOCK) if packed else file


def unpacked(content: bytes) -> bytes:
    """Return what a file holds: if it is gzip what comes out of it, up to the damage if any."""
    if not content.startswith(PACKED):
        return content
    text = bytearray()
    with suppress(*DAMAGE):
        for piece in _unpacked_pieces(io.BytesIO(content)):
            text += piece
    return bytes(text)


def pieces(path: Path) -> Iterator[bytes]:
    """Yield what a file holds, a few megabytes at a time at most, as `unpacked` returns it."""
    with path.open("rb") as file, suppress(*DAMAGE):
        if file.peek(2).startswith(PACKED):
            yield from _unpacked_pieces(file)
        else:
            while piece := file.read(BLOCK):
                yield piece


def _unpacked_pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield what comes out of a gzip file, all of it up to the damage if any, raised there."""
    member = zlib.decompressobj(31)  # with gzip's head and checksum
    while packed := file.read(PACKED_BLOCK):
        while packed:
            if member.eof:
                packed = packed.lstrip(b"\0")  # may stand between members, and after them
                if not packed:
                    break
                member = zlib.decompressobj(31)
            whole = member.copy()
            try:
                piece = member.decompress(packed)
            except zlib.error:
                for at in range(len(packed)):  # byte by byte, as a call that fails gives nothing
                    yield whole.decompress(packed[at : at + 1])
                raise
            if piece:
                yield piece
            packed = member.unused_data
    if not member.eof:
        raise EOFError("it ends before its last part does")


def is_array(path: Path, beginning: bytes) -> bool:
    """Tell whether a file is read as one JSON array, by its name and what it begins with.

    Under a name for lines it must begin with an object: no line that could be read begins so.
    """
    content = _begun(beginning)
    named = ".json" in [suffix.lower() for suffix in path.suffixes]
    return content[:1] == b"[" and (named or content[1:].lstrip()[:1] == b"{")


def parse(row: RawRow) -> dict[str, Any]:
    """Return the row's JSON object. Raises FeedbackRefused with the rule it breaks, and where."""
    if row.problem is not None:
        raise FeedbackRefused(row.problem, row.detail)
    try:
        text = row.content.decode("utf-8-sig" if row.line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        message = f"needed UTF-8, found {error.reason} at byte {error.start}; save it as UTF-8"
        raise FeedbackRefused(Rule.not_utf8, message) from error
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(text)
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        if not isinstance(error, json.JSONDecodeError):
            _refuse_odd(text)
        message = f"needed one JSON value, found {error}; mend the line"
        raise FeedbackRefused(Rule.broken_json, message) from error
    if not isinstance(value, dict):
        raise FeedbackRefused(
            Rule.not_an_object,
            f"needed an object with named fields, found {type(value).__name__}; see the formats",
        )
    return value


class _Unpacked(io.RawIOBase):
    """A gzip file's content for BufferedReader, whose readline is in C and takes a limit."""

    def __init__(self, file: IO[bytes]) -> None:
        self._pieces = _unpacked_pieces(file)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            try:
                self._left = memoryview(next(self._pieces))
            except StopIteration:
                return 0
        length = min(len(buffer), len(self._left))
        buffer[:length] = self._left[:length]
        self._left = self._left[length:]
        return length


def _begun(beginning: bytes) -> bytes:
    return beginning.removeprefix(BYTE_ORDER_MARK).lstrip()


def _rows(stream: io.BufferedReader, path: Path, longest: int) -> Iterator[RawRow]:
    beginning = stream.peek(BLOCK)
    if is_array(path, beginning):
        return elements(stream, longest)
    if _PRETTY.match(_begun(beginning)):
        raise SourceError(
            f"one JSON object a line is needed, or one array of them, found an object over several "
            f"lines in {path}; write each on one line (jq -c ., or jq -c '.data[]' of a list in it "
            "that is called data)"
        )
    return _lines(stream, longest)


def _lines(stream: io.BufferedReader, longest: int) -> Iterator[RawRow]:
    line = 0
    while content := stream.readline(longest + 1):
        line += 1
        if len(content) > longest and not content.endswith(b"\n"):
            length, rest = len(content), content
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(BLOCK)
                length += len(rest)
            yield _too_long(line, content[:SHOWN], length, longest)
        elif content.strip():
            yield RawRow(line, content)


def _too_long(line: int, shown: bytes, length: int, longest: int) -> RawRow:
    detail = f"needed at most {longest} bytes in a row, found {length}; split it or leave it out"
    return RawRow(line, shown, Rule.line_too_long, detail)


_PRETTY = re.compile(rb'\{\s*\n\s*"')  # an object whose first name stands on the next line
_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')


@dataclass(slots=True)
class _Element:
    """The array element being gathered."""

    longest: int
    line: int  # where the next element begins
    content: bytearray
    length: int = 0
    newlines: int = 0

    def add(self, piece: bytes) -> None:
        self.length += len(piece)
        self.newlines += piece.count(b"\n")
        if self.length <= self.longest:
            self.content += piece
        elif len(self.content) > SHOWN:
            del self.content[SHOWN:]

    def take(self) -> RawRow | None:
        content, length = bytes(self.content), self.length
        stripped = content.lstrip()
        line = self.line + content[: len(content) - len(stripped)].count(b"\n")
        self.line += self.newlines
        self.content.clear()
        self.length = self.newlines = 0
        if length > self.longest:
            return _too_long(line, content[:SHOWN], length, self.longest)
        return RawRow(line, content) if stripped else None


def elements(stream: io.BufferedReader | io.BytesIO, longest: int) -> Iterator[RawRow]:
    """Yield a JSON array's elements unparsed: only quotes, commas and brackets are looked at.

    The content of each is what stands between two commas, byte by byte.
    """
    element = _Element(longest, 1, bytearray())
    depth, inside, escaped = 0, False, False
    while block := stream.read1(BLOCK):  # read() would lose what it has where a file is damaged
        begin = at = 0
        if escaped:
            at, escaped = 1, False
        while found := (_INSIDE if inside else _OUTSIDE).search(block, at):
            at = found.end()
            match found[0]:
                case b'"':
                    inside = not inside
                case b"\\":
                    escaped = at == len(block)
                    at += 1
                case b"[" | b"{":
                    depth += 1
                    if depth == 1:  # the array itself opens
                        element.line += block[:at].count(b"\n")
                        begin = at
                case b"]" | b"}" | b",":
                    depth -= found[0] != b","
                    if depth == 0 or (depth == 1 and found[0] == b","):
                        element.add(block[begin : found.start()])
                        if row := element.take():
                            yield row
                        begin = at
                    if depth == 0:
                        yield from _after_array(block[at:] + stream.read(SHOWN), element.line)
                        return
        element.add(block[begin:])
    if row := element.take():
        yield row
    detail = "needed a closing ] at the end of the file, found none; it may have been cut short"
    yield RawRow(element.line, b"", Rule.damaged_file, detail)


def _after_array(rest: bytes, line: int) -> Iterator[RawRow]:
    if rest.strip():
        detail = "needed nothing after the array's ], found more; put one value in a .json file"
        yield RawRow(line, rest[:SHOWN], Rule.damaged_file, detail)


_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_BRACKETS = re.compile(_STRING + r"|[][{}]", re.DOTALL)
_ODD = re.compile(_STRING + r"|-?Infinity|NaN|[0-9]{4301,}", re.DOTALL)


def _check_depth(text: str) -> None:
    """Raise FeedbackRefused where more than DEEPEST lists and objects stand inside each other."""
    depth = 0
    for found in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > DEEPEST:
            words = f"at most {DEEPEST} lists and objects inside each other, found more"
            _refuse_at(Rule.broken_json, words, text, found.start())


def _refuse_odd(text: str) -> None:
    """Raise FeedbackRefused at the first number that Python's reader knows and JSON does not.

    Or at the first that has more digits than it reads.
    """
    for found in _ODD.finditer(text):
        token = found[0]
        if token.isdigit():
            _refuse_at(Rule.broken_json, "shorter numbers, found one", text, found.start())
        if token[0] != '"':
            _refuse_at(Rule.not_finite, f"finite numbers, found {token}", text, found.start())


def _refuse_at(rule: Rule, words: str, text: str, at: int) -> NoReturn:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    where = f"line {line} column {column} (char {at})"  # as JSON's own reader says it
    raise FeedbackRefused(rule, f"needed {words} at {where}; leave the row out or mend it")


def _odd(name: str) -> NoReturn:
    raise ValueError(name)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Two readers of the same bytes must not see two things: a door one, a route the other.
    values = dict(pairs)
    if len(values) != len(pairs):
        times = Counter(name for name, _ in pairs)
        twice = next(name for name, count in times.items() if count > 1)
        message = f"needed each field once, found {ascii(twice)[:80]} again; leave one out"
        raise FeedbackRefused(Rule.repeated_field, message)
    return values


_DECODER = json.JSONDecoder(parse_constant=_odd, object_pairs_hook=_each_once)
