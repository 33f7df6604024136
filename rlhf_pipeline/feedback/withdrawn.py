"""Votes taken out of what was made from them: a snapshot's folder, and files that were dropped.

Each file is written anew beside itself and renamed, the snapshot's own file last: an erasure that
was killed finds in it what is still to do.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline import stages
from rlhf_pipeline.config import INBOX_DONE
from rlhf_pipeline.feedback import datasets, gold, snapshot
from rlhf_pipeline.feedback.lines import (
    BLOCK,
    DAMAGE,
    LONGEST_ROW,
    PACKED,
    elements,
    is_array,
    pieces,
    unpacked,
    unpacking,
)
from rlhf_pipeline.feedback.raters import Person, is_signed_by, mentions
from rlhf_pipeline.feedback.renaming import Renaming
from rlhf_pipeline.feedback.sources import AS_IT_IS, LINES
from rlhf_pipeline.feedback.support import WORD
from rlhf_pipeline.files import made_by_another, new_file, read_json, write_bytes, write_json
from rlhf_pipeline.records import (
    EvaluationPrompt,
    Message,
    Prompt,
    SftExample,
    hash_rater,
    prompt_from_json,
)
from rlhf_pipeline.topics import ERASED, without_topics

if TYPE_CHECKING:
    import pandas as pd

TEXTS = ("completion", "other_completion", "text")
HALF_WRITTEN = re.compile(r"\..+\.new-[0-9a-f]{12}")  # as files.py names what it writes aside
LONGEST_SIGNED = 8 << 10  # bytes: a field with the longest name of a rater, all of it escaped
_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")  # of an array, a byte-order mark before it
_CLOSING = re.compile(rb"[\s,]*[\]}]?")  # of either kind: `elements` takes both for its end


@dataclass(frozen=True, slots=True)
class Said:
    """What the votes that go said, as their snapshot has it: what to look for elsewhere."""

    prompts: frozenset[str]  # JSON; those that no other vote is about
    topics: frozenset[str]  # likewise
    shared: frozenset[str]  # topics of other votes
    texts: tuple[str, ...]  # each as its words, one blank between them and around


def said_by(folder: Path, gone: Collection[str]) -> Said | None:
    """Return what the votes `gone` said in a snapshot; None where none of them is in there."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = folder / snapshot.FILE
    if not path.exists():
        return None
    source, names = pq.ParquetFile(path), ["feedback_id", "topic", *snapshot.PROMPTS]
    ids = source.iter_batches(columns=["feedback_id"])
    if not any(pc.any(_are_in("feedback_id", batch, gone)).as_py() for batch in ids):
        return None
    theirs: list[dict[str, Any]] = []
    for batch in source.iter_batches(columns=[*names, *TEXTS]):
        theirs += batch.filter(_are_in("feedback_id", batch, gone)).to_pylist()
    asked = {row[name] for row in theirs for name in snapshot.PROMPTS if row[name]}
    topics = {row["topic"] for row in theirs if row["topic"]}
    others: set[str] = set()  # of those prompts
    shared: set[str] = set()
    for batch in source.iter_batches(columns=names):
        kept = batch.filter(pc.invert(_are_in("feedback_id", batch, gone)))
        for name in snapshot.PROMPTS:
            others.update(kept.column(name).filter(_are_in(name, kept, asked)).unique().to_pylist())
        shared.update(text for text in kept.column("topic").unique().to_pylist() if text)
    texts = [row[name] for row in theirs for name in TEXTS if row[name]]
    return Said(
        frozenset(asked - others),
        frozenset(topics - shared),
        frozenset(shared),
        tuple(f" {' '.join(WORD.findall(text.lower()))} " for text in texts),
    )


def gone_topics(said: Collection[Said]) -> frozenset[str]:
    """Return the topics of the votes that go which no other vote has in any of the snapshots."""
    theirs = frozenset[str]().union(*(one.topics for one in said))
    return theirs.difference(*(one.shared for one in said))


def named_in(path: Path, said: Said) -> frozenset[str]:
    """Return the n-grams that a snapshot's support tells of and the votes that go have in them."""
    told = read_json(path)["associations"] if path.exists() else []
    ngrams = {association["ngram"] for association in told}
    return frozenset(n for n in ngrams if any(f" {n} " in text for text in said.texts))


def clean_support(path: Path, said: Said, voters: Collection[str], topics: Collection[str]) -> bool:
    """Take the person, their words and these topics out of what a snapshot rests on."""
    if not path.exists():
        return False
    before, names = read_json(path), named_in(path, said)
    after = {
        **without_topics(before, topics),
        "associations": [
            {**one, "ngram": ERASED} if one["ngram"] in names else one
            for one in before["associations"]
        ],
        "by_rater": [one for one in before["by_rater"] if one["voter"] not in voters],
    }
    if after != before:
        write_json(path, after)
    return bool(after != before)


def clean_folder(folder: Path, gone: Collection[str], *, min_rating: int) -> int:
    """Take the votes out of a snapshot's folder and return how many files were written anew.

    The data sets keep the lines that the other votes give under the turn's own `min_rating`, in
    whichever split. Memory stays bounded: only the rows on prompts of the votes that go are held,
    and files are streamed.
    """
    changed = 0
    validated = folder / snapshot.VALIDATED
    if validated.exists():
        prompts, kept = _others_beside(validated, gone)
        # A release may have divided the prompts otherwise: each is taken for one of either split.
        train, held_out = (
            datasets.build(kept, evaluation_share=share, min_rating=min_rating) for share in (0, 1)
        )
        changed += _clean_datasets(
            folder, gone, prompts, train.sft_examples, held_out.evaluation_prompts
        )
        changed += _without_rows(validated, gone)
    return changed + _without_rows(folder / snapshot.FILE, gone)


def clean_inbox(
    inbox: Path, person: Person, interactions: Collection[str], renaming: Renaming = AS_IT_IS
) -> int:
    """Take rows with the person's name, or about their interactions, out of dropped files.

    They are read as ingestion reads them, so by the `renaming` too. A file that was taken in may
    have been read by another: a row there that holds the person's name as any value is a copy of
    theirs. Of a damaged gzip file is left what came out of it. A file is held in memory, unpacked,
    where something of theirs is in it.
    """
    changed = 0
    for path in _files_in(inbox):
        if HALF_WRITTEN.fullmatch(path.name):  # of an erasure that was killed
            path.unlink()
            changed += 1
    for taken in (False, True):
        theirs = _Theirs(person, interactions, renaming, by_any_value=taken)
        changed += sum(_without_lines(path, theirs) for path in lines_in(inbox, taken=taken))
    return changed


def lines_in(inbox: Path, *, taken: bool) -> list[Path]:
    """Return the dropped files of rows that ingestion has taken in, or those that wait."""
    return [
        path
        for path in _files_in(inbox)
        if _is_looked_into(path, inbox) and taken == _was_taken(path, inbox)
    ]


def unread_in(inbox: Path) -> list[Path]:
    """Return the dropped tables, workbooks and files of other names: nothing looks into these.

    Nor into files elsewhere that were taken in by a link. Not those that hide, which systems leave
    in every folder.
    """
    return [
        path
        for path in _files_in(inbox)
        if not (_is_looked_into(path, inbox) or path.name.startswith("."))
    ]


def _is_looked_into(path: Path, inbox: Path) -> bool:
    """Say whether it is of rows, and no link that was taken in: what that leads to is others'."""
    return _is_of_rows(path) and not (path.is_symlink() and _was_taken(path, inbox))


def _was_taken(path: Path, inbox: Path) -> bool:
    return INBOX_DONE in path.relative_to(inbox).parts


def _files_in(inbox: Path) -> list[Path]:
    """Return the files of an inbox. Of folders behind links, which rglob passes over, it has that
    of the files that were taken in: ingestion moves them there.
    """
    done = inbox / INBOX_DONE
    folders = [inbox, done] if done.is_symlink() and not made_by_another(done) else [inbox]
    return sorted(path for each in folders for path in each.rglob("*") if path.is_file())


def _is_of_rows(path: Path) -> bool:
    """Say whether rows were taken in from it, or will be: what waits may still be written to."""
    name = path.name.lower()
    # A second file of one name was once kept there as name.ndjson.<number>.gz.
    was_taken = path.parent.name == INBOX_DONE and "json" in name
    return was_taken or name.endswith(LINES)


def _others_beside(path: Path, gone: Collection[str]) -> tuple[frozenset[Prompt], pd.DataFrame]:
    """Return the prompts of the votes that go, and the rows of other votes on those prompts.

    What a data set has for a prompt comes of the votes on that prompt alone.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    source = pq.ParquetFile(path)
    asked: set[str] = set()
    for batch in source.iter_batches(columns=["feedback_id", "prompt"]):
        theirs = batch.filter(_are_in("feedback_id", batch, gone))
        asked.update(theirs.column("prompt").to_pylist())
    rows = []
    for batch in source.iter_batches():
        beside = batch.filter(_are_in("prompt", batch, asked))
        rows.append(beside.filter(pc.invert(_are_in("feedback_id", beside, gone))))
    table = pa.Table.from_batches(rows, source.schema_arrow).replace_schema_metadata(None)
    return frozenset(prompt_from_json(text) for text in asked), table.to_pandas()


def _are_in(name: str, batch: Any, values: Collection[str]) -> Any:
    """Return for each row of a parquet file's batch whether a column has one of the values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(batch.column(name).cast(pa.string()), value_set=pa.array(values, pa.string()))


def _clean_datasets(
    folder: Path,
    gone: Collection[str],
    prompts: Collection[Prompt],
    examples: Iterable[SftExample],
    asked_of_others: Iterable[EvaluationPrompt],
) -> int:
    """Take the votes out of the data sets; the last two are what others give for their prompts."""
    imitable = {(e.prompt, e.completion): e for e in examples}
    held_out = {prompt.prompt_id: prompt for prompt in asked_of_others}

    def judged(line: str, key: str) -> str:
        return "" if json.loads(line)[key] in gone else line

    def imitated(line: str) -> str:
        values = json.loads(line)
        prompt = _prompt_of(values)
        if prompt not in prompts:
            return line
        example = imitable.get((prompt, values["completion"]))
        return "" if example is None else datasets.line_of(example)

    def asked(line: str) -> str:
        values = json.loads(line)
        if _prompt_of(values) not in prompts:
            return line
        left = held_out.get(values["prompt_id"])
        return "" if left is None else datasets.line_of(left)

    changed = (
        _rewritten(folder / stages.PAIRS, lambda line: judged(line, "pair_id"))
        + _rewritten(folder / stages.EXAMPLES, lambda line: judged(line, "example_id"))
        + _rewritten(folder / stages.SFT_EXAMPLES, imitated)
        + _rewritten(folder / stages.PROMPTS, asked)
    )
    answers = gold.read_answers(folder / stages.GOLD)
    others = [answer for answer in answers if answer.feedback_id not in gone]
    if others != answers:
        gold.write_answers(folder / stages.GOLD, others)
    return changed + (others != answers)


def _prompt_of(values: Mapping[str, Any]) -> Prompt:
    return tuple(Message(**message) for message in values["prompt"])


def _rewritten(path: Path, left: Callable[[str], str]) -> int:
    """Write a data set anew with what is `left` of each line; return how many files changed.

    Of a turn that two releases were at work on there are two.
    """
    return sum(_rewritten_file(each, left) for each in datasets.names_of(path) if each.exists())


def _rewritten_file(path: Path, left: Callable[[str], str]) -> bool:
    changed = False
    with new_file(path, may_stay=True) as aside:
        with datasets.reading(path) as before, datasets.writing(aside, path) as after:
            for line in before:
                kept = left(line)
                changed |= kept != line
                after.write(kept)
        if not changed:
            aside.unlink()
    return changed


def _without_rows(path: Path, gone: Collection[str]) -> bool:
    """Write a parquet file of votes without some, in bounded memory; say whether any was there."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found = 0
    with pq.ParquetFile(path) as source, new_file(path, may_stay=True) as aside:
        schema = source.schema_arrow.remove_metadata()  # pandas' counts the rows that were there
        noted = {
            name: value
            for name, value in (source.metadata.metadata or {}).items()
            if name not in (b"pandas", b"ARROW:schema")
        }
        with pq.ParquetWriter(aside, schema, **snapshot.PACKED) as writer:
            for batch in source.iter_batches():
                kept = batch.filter(pc.invert(_are_in("feedback_id", batch, gone)))
                found += batch.num_rows - kept.num_rows
                writer.write_table(pa.Table.from_batches([kept]).cast(schema))
            writer.add_key_value_metadata(noted)
        if not found:
            aside.unlink()
    return found > 0


@dataclass(frozen=True, slots=True)
class _Theirs:
    """Says of rows, as bytes, whether they are a person's, or about interactions of theirs."""

    person: Person
    interactions: Collection[str]
    renaming: Renaming = AS_IT_IS
    by_any_value: bool = False

    def __call__(self, row: bytes) -> bool:
        text = row.decode("utf-8-sig", "replace").strip()
        told, values = [text], None
        if "\\" in text or self.renaming or self.by_any_value:
            with suppress(ValueError, RecursionError):
                values = json.loads(text)
                # A name or an id may be written with escapes.
                told.append(json.dumps(values, ensure_ascii=False))
        if self.renaming and isinstance(values, dict):
            told.append(json.dumps(self.renaming.row(values, is_cells=False), ensure_ascii=False))
        elif self.renaming:
            told.append(self.renaming.naming(text, is_cells=False))
        if self.by_any_value and any(map(self._names, _strings_in(values))):
            return True
        return any(
            is_signed_by(each, self.person) or mentions(each, self.interactions) for each in told
        )

    def _names(self, said: str) -> bool:
        """Say whether it is the person's name; a single sign is a rating, of whomever."""
        person = self.person
        return len(said) > 1 and person.rater_id in (said, hash_rater(person.agent_id, said))


def _strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in what JSON said, numbers as they are written, but no names of fields."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(one)
    elif isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        yield str(value)


def _without_lines(path: Path, is_theirs: _Theirs) -> bool:
    if not _holds_any(path, is_theirs):
        return False
    content = path.read_bytes()
    text = unpacked(content)
    arrays, at = [], 0
    if _holds_array(path, text):
        while opening := _OPENING.match(text, at):  # once, but where files were put together
            array, at = _array_without(text, at, opening.end(), is_theirs)
            arrays.append(array)
    # Cut at \n alone, as ingestion does: \r may stand within a row.
    lines = [line for line in io.BytesIO(text[at:]) if not is_theirs(line)]
    kept = b"".join([*arrays, *lines])
    if kept == text:
        return False
    write_bytes(path, gzip.compress(kept) if content.startswith(PACKED) else kept)
    return True


def _holds_any(path: Path, is_theirs: Callable[[bytes], bool]) -> bool:
    """Say whether any row of a file is theirs, in bounded memory: a small file may unpack to much.

    What is longer than a row may be is looked at piece by piece.
    """
    line = bytearray()
    for piece in pieces(path):
        first, *others = piece.split(b"\n")
        line += first
        for other in others:
            if is_theirs(bytes(line)):
                return True
            line = bytearray(other)
        if len(line) > LONGEST_ROW:
            if is_theirs(bytes(line)):
                return True
            del line[:-LONGEST_SIGNED]
    if is_theirs(bytes(line)):
        return True
    with path.open("rb") as file, suppress(*DAMAGE):  # an array's row may stand on many lines
        stream = unpacking(file)
        rows = elements(stream, LONGEST_ROW) if _OPENING.match(stream.peek(BLOCK)) else ()
        return any(is_theirs(row.content) for row in rows)
    return False


def _holds_array(path: Path, text: bytes) -> bool:
    """Say whether ingestion reads the file as an array, or the whole file is one.

    The latter under a name for lines: ingestion takes none of it, and a line is less than a row.
    """
    if is_array(path, text[:BLOCK]):
        return True
    try:
        return _OPENING.match(text) is not None and isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def _array_without(
    text: bytes, begin: int, at: int, is_theirs: Callable[[bytes], bool]
) -> tuple[bytes, int]:
    """Return an array without rows of theirs, and where it ends; `at` is behind its bracket.

    All else stays as it stands: one that was cut short is still seen to be when it is taken in. A
    row that does not end, for want of a bracket, goes whole.
    """
    head, rows = text[begin:at], []
    stream = io.BytesIO(text)
    stream.seek(begin)
    for row in elements(stream, len(text)):
        if row.problem is None:  # the others tell how the array ends
            at = text.index(row.content, at) + len(row.content)
            rows.append(row.content)
    closing = _CLOSING.match(text, at)
    end = closing.end() if closing else at
    kept = [row for row in rows if not is_theirs(row)]
    if len(kept) == len(rows):
        return text[begin:end], end
    return head + b",".join(kept) + text[at:end], end
