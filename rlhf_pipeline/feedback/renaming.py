"""A file's own names for what our formats name otherwise: its columns, and its words for a vote.

And which zone its moments are of, where they do not say.

Rows come out as if the file had been written with our names, so whatever reads, refuses, keeps or
erases rows knows no others. What is not renamed and no field of ours is left unread; so are tags
that are no list, and beside a `value` that is told what else could be one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from rlhf_pipeline.errors import SourceError
from rlhf_pipeline.feedback.flat import cell_text, value_of
from rlhf_pipeline.feedback.formats import (
    EVENT_FIELDS,
    NUMBER,
    SOURCES,
    VALUE_NAMES,
    WHO,
    Values,
    is_message,
)

FIELDS = EVENT_FIELDS | {
    *("chosen", "rejected", "messages", "tie", "chosen_score", "rejected_score"),
    *("quality", "label", "completion_a", "completion_b", "preference", "evaluator"),
}
"""What may be named: the fields of `events`, `pairs`, `quality` and `judgements`."""
NAMING = (*WHO, "interaction_id", "other_interaction_id")
"""The fields that say whose a row is, and what it is about: what an erasure looks for."""
SAID = ("value", "label", "preference", "choice", "quality", "number", "source")
"""The fields whose words may be told."""


@dataclass(frozen=True)
class Renaming:
    """Our fields by a file's columns, or paths into its objects; and what is the same in all rows.

    Raises SourceError for a field that no format has, or one that is named twice, and for a time
    zone that there is not.
    """

    columns: Mapping[str, str] = field(default_factory=dict)  # our field -> column, or path a.b.0
    fixed: Mapping[str, str] = field(default_factory=dict)  # our field -> its value in every row
    words: Mapping[str, str] = field(default_factory=dict)  # a value of theirs -> ours
    zone: str | None = None  # of moments that have none, by its IANA name: Europe/Berlin
    for_any_file: bool = False  # a file in which none of the columns is has our names
    anyway: Mapping[str, str] = field(default_factory=dict)  # the words of such a file too

    def __post_init__(self) -> None:
        unknown = sorted({*self.columns, *self.fixed} - FIELDS)
        if unknown:
            raise SourceError(
                f"needed fields out of {', '.join(sorted(FIELDS))}, found {', '.join(unknown)}"
            )
        if both := sorted(self.columns.keys() & self.fixed.keys()):
            raise SourceError(
                "needed each field from a column, or the same in every row, found "
                f"{', '.join(both)} told as both"
            )
        _ = self.tzinfo

    @cached_property
    def _first(self) -> dict[str, str]:
        """Return the field by each column, the first where it is named for several."""
        return {column: name for name, column in list(self.columns.items())[::-1]}

    @cached_property
    def _by_value(self) -> dict[str, str]:
        """Return the words by what they say: TRUE, True and true, or 1, 1.0 and 1,0, are one."""
        return {_value(word): ours for word, ours in list(self.words.items())[::-1]}

    @cached_property
    def tzinfo(self) -> ZoneInfo | None:
        """Return the zone of moments that have none."""
        if self.zone is None:
            return None
        try:
            return ZoneInfo(self.zone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise SourceError(
                "needed a time zone's IANA name, such as Europe/Berlin, found "
                f"{ascii(self.zone)[:80]}; correct it (where no name is known, pip install tzdata)"
            ) from error

    def __bool__(self) -> bool:
        return bool(self.columns or self.fixed or self.words)

    def with_words(self, words: Mapping[str, str], zone: str | None) -> Renaming:
        """Return it with words for every file, which hold before its own, and the zone if any."""
        said = set(map(_value, words))
        own = {word: ours for word, ours in self.words.items() if _value(word) not in said}
        return replace(self, words={**own, **words}, anyway=words, zone=zone or self.zone)

    @cached_property
    def of_our_names(self) -> Renaming:
        """Return what a file is read by that it is not for."""
        return Renaming(words=self.anyway, zone=self.zone)

    def is_for(self, lacking: Sequence[str]) -> bool:
        """Say whether it is for a file that has all columns but these."""
        return not self.for_any_file or len(lacking) < len(self.columns)

    def refused(self, lacking: Sequence[str]) -> list[str]:
        """Return which of these columns no file may lack that it is for.

        Told for one file, that is all of them. Told for any, the rater's: of other fields the rules
        for a row say whether it can do without, and unsigned votes count for less.
        """
        rater = self.columns.get("rater")
        return [name for name in lacking if not self.for_any_file or name == rater]

    def lost(self, told: Collection[str]) -> list[str]:
        """Return which of these told fields no file may have whose format has them not.

        Told for any file, those alone of who voted: others say of each format what it has.
        """
        return sorted(name for name in told if not self.for_any_file or name in WHO)

    def header(self, names: Sequence[str]) -> list[str]:
        """Return a table's columns by our names."""
        if not self.is_for([column for column in self.columns.values() if column not in names]):
            return list(names)
        told = {*self.columns, *self.fixed}  # a column of this very name says something else
        return [self._first.get(name, f"their {name}" if name in told else name) for name in names]

    def lacking(self, rows: Sequence[Values]) -> list[str]:
        """Return the columns and paths that are in none of these rows of objects."""
        return [
            column
            for column in self.columns.values()
            if not any(_found(row, column) for row in rows)
        ]

    def says(self, name: str, values: Values) -> bool:
        """Say whether an object has the column or path that one of our fields is told by."""
        return bool(_found(values, self.columns[name]))

    @cached_property
    def _into_lists(self) -> list[str]:
        """Return the paths that may name an entry of a list."""
        return [
            column for column in self.columns.values() if any(map(_is_place, column.split(".")))
        ]

    def left(self, row: Values) -> list[str]:
        """Return the lists in an object of which some entries are read by number and others not.

        Of objects, that is, each of which may be somebody's vote; a conversation holds none.
        """
        read: dict[str, set[int]] = {}
        lists: dict[str, list[Any]] = {}
        for column in self._into_lists:
            entered: list[tuple[list[Any], str]] = []
            if _found(row, column, entered):
                for here, rest in entered:
                    path = column.removesuffix(rest).removesuffix(".")
                    lists[path] = here
                    read.setdefault(path, set()).add(int(rest.split(".")[0]) % len(here))
        return [
            path
            for path, here in lists.items()
            if len(read[path]) < len(here)
            and all(isinstance(item, dict) and not is_message(item) for item in here)
        ]

    @cached_property
    def signed(self) -> str:
        """Return what is said in NAMING, the same of every row."""
        told = {name: self.fixed[name] for name in NAMING if name in self.fixed}
        return json.dumps(told, ensure_ascii=False)[1:-1]

    def naming(self, text: str, *, is_cells: bool) -> str:
        """Return what a line says in NAMING, by our names, that it does not say by them.

        That of an object is no JSON, or breaks off; of cells, `header` has given most their names.
        """
        found: dict[str, None] = {}
        for name in NAMING:
            if column := self.columns.get(name):
                last = self._first[column] if is_cells else column.rpartition(".")[2]
                if is_cells and last == name:
                    continue
                value = rf'"{re.escape(last)}"\s*:\s*("(?:[^"\\]|\\.)*"|-?[0-9]+)'
                found |= {f'"{name}": {said}': None for said in re.findall(value, text)}
        return ", ".join(found)

    def row(self, values: Values, *, is_cells: bool) -> dict[str, Any]:
        """Return a row by our names. Of cells `header` has given the names already."""
        if is_cells:
            named = dict(values)
            for name, column in self.columns.items():  # one column may say several things
                if self._first[column] in named:
                    named[name] = named[self._first[column]]
        else:
            told = {*self.columns, *self.fixed, *self.columns.values()}
            named = {name: value for name, value in values.items() if name not in told}
            for name, column in self.columns.items():
                for value in _found(values, column):
                    named[name] = value
        kind = self.fixed.get("kind", named.get("kind"))
        if kind is not None:
            read = EVENT_FIELDS - self._theirs(named)
            named = {name: value for name, value in named.items() if name in read}
        for name in SAID:
            word = cell_text(named.get(name)).strip()
            ours = self.words.get(word, self._by_value.get(_value(word)))
            if name == "source" and ours not in SOURCES:
                ours = None  # a word for a vote, which a source may be as well
            if name in named and ours is not None:
                named[name] = value_of(name, ours, kind)
            elif is_cells and isinstance(named.get(name), str):
                named[name] = value_of(name, named[name], kind)
        return named | {name: value_of(name, text, kind) for name, text in self.fixed.items()}

    def _theirs(self, named: Values) -> set[str]:
        """Return the fields of an event that a row has in name alone, told as none of ours."""
        told = {*self.columns, *self.fixed}
        theirs = set() if isinstance(named.get("tags"), list) else {"tags"}
        if "value" in told:
            theirs |= {*VALUE_NAMES}
        return theirs - told


def _value(word: str) -> str:
    """Return a truth value or a number as `cell_text` writes it, and any other word as it is."""
    if word.lower() in ("true", "false"):
        return word.lower()
    return cell_text(float(word.replace(",", "."))) if NUMBER.fullmatch(word) else word


def _is_place(step: str) -> bool:
    return step.removeprefix("-").isdecimal()


def _found(here: Any, column: str, entered: list[tuple[list[Any], str]] | None = None) -> list[Any]:
    """Return the value of a column, or at the end of a path, in a list; none where it is not.

    A name may hold dots of its own: of several that the path may begin with the longest is tried
    first. `entered` takes the lists on the way, each with what of the path is left at it.
    """
    steps = column.split(".")
    if isinstance(here, list):
        if not _is_place(steps[0]):
            return []
        place, rest = int(steps[0]), ".".join(steps[1:])
        if not -len(here) <= place < len(here):
            return []
        if entered is not None:
            entered.append((here, column))
        return _found(here[place], rest, entered) if rest else [here[place]]
    if isinstance(here, Mapping):
        if column in here:
            return [here[column]]
        for end in range(len(steps) - 1, 0, -1):
            name, rest = ".".join(steps[:end]), ".".join(steps[end:])
            if name in here and (found := _found(here[name], rest, entered)):
                return found
    return []
