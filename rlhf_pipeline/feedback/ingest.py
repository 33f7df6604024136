"""Files into the store: whatever is sound goes in once, whatever is not goes to quarantine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeGuard

from rlhf_pipeline.errors import FeedbackError, FeedbackRefused, SourceError, VoteErased
from rlhf_pipeline.feedback.formats import canonical, to_row
from rlhf_pipeline.feedback.lines import LONGEST_ROW, Position
from rlhf_pipeline.feedback.renaming import Renaming
from rlhf_pipeline.feedback.rules import Rule
from rlhf_pipeline.feedback.sources import AS_IT_IS, HUB, SUFFIXES, files_in, read
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import (
    Feedback,
    Progress,
    QuarantinedRow,
    Source,
    ignore_progress,
)

MOST_COLUMNS, LONGEST_COLUMN = 20, 60  # names that a sentence shows, characters of a column's


@dataclass(frozen=True, slots=True)
class IngestSummary:
    """What became of what was read; `read` is stored + known + erased + quarantined."""

    read: int
    stored: int
    known: int  # the same row was there already
    erased: int  # it was, and went in an erasure
    quarantined: Mapping[str, int]  # by rule
    seconds: float
    files: int
    unreadable: Mapping[str, str] = field(default_factory=dict)  # of a folder: file -> why
    examples: Mapping[str, str] = field(default_factory=dict)  # rule -> where first, and what
    unsigned: int = 0  # of people's votes in files where none is signed, though each may be
    unread: Sequence[str] = ()  # columns of those files that were left, of which one may say who
    left: Mapping[str, int] = field(default_factory=dict)  # list -> rows with unread entries in it

    @property
    def counted_files(self) -> str:
        """Return how many files were read, in words."""
        return "1 file" if self.files == 1 else f"{self.files} files"

    @property
    def taken(self) -> list[tuple[str, int, str]]:
        """Return what became of rows that are not set aside: in a word, how many, and why."""
        rows = [
            ("stored", self.stored, ""),
            ("already known", self.known, "the same row was there before"),
        ]
        if self.erased:
            rows.append(("erased before", self.erased, "an erasure took it: it stays out"))
        return rows

    @property
    def remarks(self) -> list[str]:
        """Return what the numbers do not say: whose votes nobody signed, or that no row was there.

        What of the file stands in them is printable.
        """
        said = []
        if self.unsigned:
            said.append(
                f"{self.unsigned:,} of {self.read:,} rows name no rater: each counts as another "
                f"person{_left(self.unread)}"
            )
        for name, rows in self.left.items():
            said.append(
                f"{rows:,} of {self.read:,} rows have more entries in {name[:LONGEST_COLUMN]!r} "
                f"than are named by number, and those were not read{_one_each(name)}"
            )
        if not self.read and not self.unreadable:
            said.append(
                f"no row was found in {self.counted_files}: a row is a line, or an entry of a list"
            )
        return said


def _left(names: Sequence[str]) -> str:
    """Return which columns may say who voted, as the end of a sentence."""
    if not names:
        return "; no other column is there that may say who voted"
    shown = ", ".join(repr(name[:LONGEST_COLUMN]) for name in names[:MOST_COLUMNS])
    more = ", …" if len(names) > MOST_COLUMNS else ""
    return (
        f"; not read were the columns {shown}{more}. If one of them says who voted, take these "
        "back (`rlhf feedback withdraw`), and the file in again with --map rater=COLUMN, or once "
        "the recipe names it (feedback.names)"
    )


def _one_each(name: str) -> str:
    """Return how rows are written that hold one entry of the list each, as a sentence's end."""
    if not (name.isascii() and name.isidentifier()):
        return "; if they are votes too, write a row of each and take that in"
    each = f"(arrays | .[]), objects | . as $row | .{name}[] | $row + {{{name}: [.]}}"
    return f"; if they are votes too, write a row of each (jq -c '{each}') and take that in"


def ingest(
    store: FeedbackStore,
    paths: str | Path | Sequence[str | Path],
    agent_id: str,
    format: str = "auto",
    *,
    batch: int = 1000,
    source: Source = "human",
    split: str = "train",
    renaming: Renaming = AS_IT_IS,
    on_progress: Progress = ignore_progress,
) -> IngestSummary:
    """Store the feedback in the paths and return what became of it.

    A path is a file, a folder (every file with a supported name in it that is not a state folder's)
    or `hf://NAME`. The same file again stores nothing twice. Memory is bounded by `batch` rows.
    `renaming` is the files' own names for what a format names otherwise.
    `on_progress` hears file, bytes_read, bytes_total, read, stored after each batch.

    Raises SourceError where a named file cannot be read; nothing is stored if one is not there. In
    a folder, a file that cannot be read is listed in `unreadable` and the others go in.
    """
    started = time.monotonic()
    files = _files([paths] if isinstance(paths, str | Path) else paths)
    totals: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    examples: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    unread: dict[str, None] = {}
    left: Counter[str] = Counter()
    for path, in_folder in files:
        position = Position()
        signed: Counter[bool] = Counter()
        rows = read(
            path,
            agent_id,
            format,
            source=source,
            split=split,
            position=position,
            renaming=renaming,
        )
        try:
            while some := _numbered(rows, batch, position):
                _take(store, some, totals, rules, examples)
                signed.update(row.rater_id is not None for _, row in some if _is_a_persons(row))
                on_progress(
                    {
                        "file": str(path),
                        "bytes_read": position.bytes_read,
                        "bytes_total": position.bytes_total,
                        "read": totals["read"],
                        "stored": totals["stored"],
                    }
                )
        except SourceError as error:
            if not in_folder:
                told = _so_far(totals)
                raise SourceError(f"{error}{told}") from error
            unreadable[str(path)] = str(error)
        if position.unread is not None and signed[False] and not signed[True]:
            totals["unsigned"] += signed[False]
            unread.update(dict.fromkeys(position.unread))
        left.update(position.left)
    return IngestSummary(
        read=totals["read"],
        stored=totals["stored"],
        known=totals["known"],
        erased=totals["erased"],
        quarantined=dict(sorted(rules.items())),
        seconds=time.monotonic() - started,
        files=len(files) - len(unreadable),
        unreadable=unreadable,
        examples=dict(sorted(examples.items())),
        unsigned=totals["unsigned"],
        unread=tuple(unread),
        left=left,
    )


def _is_a_persons(row: Feedback | QuarantinedRow) -> TypeGuard[Feedback]:
    return isinstance(row, Feedback) and row.source == "human"


def _so_far(totals: Counter[str]) -> str:
    """Return what became of the rows before a file that cannot be read, as a message's end."""
    if not totals["read"]:
        return ""
    known = totals["known"] + totals["erased"]
    aside = totals["read"] - totals["stored"] - known
    return (
        f"; of {totals['read']:,} rows before that {totals['stored']:,} were stored, "
        f"{known:,} were known and {aside:,} are in quarantine"
    )


def _numbered(
    rows: Iterator[Feedback | QuarantinedRow], batch: int, position: Position
) -> list[tuple[int, Feedback | QuarantinedRow]]:
    """Return the next rows: `batch` of them, or fewer where much is kept of what is set aside."""
    some: list[tuple[int, Feedback | QuarantinedRow]] = []
    kept = 0
    for row in islice(rows, batch):
        some.append((position.line, row))
        kept += len(row.raw or "") if isinstance(row, QuarantinedRow) else 0
        if kept > LONGEST_ROW:
            break
    return some


def _take(
    store: FeedbackStore,
    rows: Sequence[tuple[int, Feedback | QuarantinedRow]],
    totals: Counter[str],
    rules: Counter[str],
    examples: dict[str, str],
) -> None:
    """Store one batch; what the store refuses joins what the reader set aside."""
    events = [row for _, row in rows if isinstance(row, Feedback)]
    aside = [row for _, row in rows if isinstance(row, QuarantinedRow)]
    lines = {id(row): line for line, row in rows}

    def set_aside(event: Feedback, error: FeedbackError) -> None:
        if isinstance(error, VoteErased):
            totals["erased"] += 1
            return
        rule = error.rule if isinstance(error, FeedbackRefused) else Rule.idempotency_conflict
        raw = canonical(to_row(event))
        aside.append(
            QuarantinedRow(event.agent_id, rule, str(error), event.origin, lines[id(event)], raw)
        )

    stored = store.append(events, on_refused=set_aside)
    if aside:
        store.quarantine(aside)
    rules.update(row.rule for row in aside)
    for row in sorted(aside, key=lambda row: row.line or 0):
        examples.setdefault(row.rule, f"{row.origin}:{row.line}: {row.detail}")
    totals["read"] += len(rows)
    totals["known"] += sum(each.known for each in stored)
    totals["stored"] += sum(not each.known for each in stored)


def _files(paths: Sequence[str | Path]) -> list[tuple[str | Path, bool]]:
    """Return every file to read, and whether it was found in a folder rather than named."""
    files: list[tuple[str | Path, bool]] = []
    for path in paths:
        if str(path).startswith(HUB):
            files.append((path, False))
        elif Path(path).is_dir():
            found = files_in(Path(path))
            if not found:
                raise SourceError(
                    f"needed a file named {', '.join('*' + s for s in SUFFIXES)} in {path}, "
                    "found none; check the folder"
                )
            files += [(p, True) for p in found]
        elif Path(path).is_file():
            files.append((path, False))
        elif Path(path).exists():
            raise SourceError(
                f"needed a file or folder at {path}, found a pipe or device, which can be read but "
                "once; write it to a file"
            )
        else:
            raise SourceError(f"needed a file or folder at {path}, found none; check the path")
    return files
