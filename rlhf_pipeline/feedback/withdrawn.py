"""Votes taken out of what was made from them: a snapshot's folder, and files that were dropped.

Each file is written anew beside itself and renamed, the snapshot's own file last: an erasure that
was killed finds in it what is still to do.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline import stages
from rlhf_pipeline.feedback import datasets, gold, snapshot
from rlhf_pipeline.feedback.lines import BLOCK, PACKED, elements, is_array, unpacked
from rlhf_pipeline.feedback.raters import Person, is_signed_by, mentions
from rlhf_pipeline.feedback.support import WORD
from rlhf_pipeline.files import read_json, write_bytes, write_json
from rlhf_pipeline.records import (
    EvaluationPrompt,
    PreferencePair,
    RewardExample,
    SftExample,
    uuid7,
)
from rlhf_pipeline.topics import ERASED, without_topics

VALIDATED = "validated.parquet"  # as the asset validated_feedback names it
TEXTS = ("completion", "other_completion", "text")
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
    import pyarrow.parquet as pq

    path = folder / snapshot.FILE
    if not path.exists():
        return None
    asked: dict[bool, set[str]] = {True: set(), False: set()}
    topics: dict[bool, set[str]] = {True: set(), False: set()}
    texts: list[str] = []
    found = False
    names = ["feedback_id", "topic", *snapshot.PROMPTS, *TEXTS]
    for batch in pq.ParquetFile(path).iter_batches(columns=names):
        for row in batch.to_pylist():
            is_gone = row["feedback_id"] in gone
            found |= is_gone
            asked[is_gone].update(row[name] for name in snapshot.PROMPTS if row[name])
            topics[is_gone].update([row["topic"]] if row["topic"] else [])
            if is_gone:
                told = (row[name] for name in TEXTS if row[name])
                texts += [f" {' '.join(WORD.findall(text.lower()))} " for text in told]
    if not found:
        return None
    prompts, kept = (frozenset(both[True] - both[False]) for both in (asked, topics))
    return Said(prompts, kept, frozenset(topics[False]), tuple(texts))


def gone_topics(said: Collection[Said]) -> frozenset[str]:
    """Return the topics of the votes that go which no other vote has in any of the snapshots."""
    theirs = frozenset[str]().union(*(one.topics for one in said))
    return theirs.difference(*(one.shared for one in said))


def named_in(path: Path, said: Said) -> frozenset[str]:
    """Return the n-grams that a snapshot's support tells of and the votes that go have in them."""
    told = read_json(path)["associations"] if path.exists() else []
    ngrams = {association["ngram"] for association in told}
    return frozenset(n for n in ngrams if any(f" {n} " in text for text in said.texts))


def clean_support(path: Path, said: Said, rater_id: str, topics: Collection[str]) -> bool:
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
        "by_rater": [one for one in before["by_rater"] if one["voter"] != rater_id],
    }
    if after != before:
        write_json(path, after)
    return bool(after != before)


def clean_folder(
    folder: Path, gone: Collection[str], *, evaluation_share: float, min_rating: int
) -> int:
    """Take the votes out of a snapshot's folder and return how many files were written anew.

    The data sets keep the lines that the other votes give under the turn's own settings.
    """
    changed = 0
    for leftover in folder.glob("*.partial"):  # of an attempt that was killed
        leftover.unlink()
        changed += 1
    validated = folder / VALIDATED
    if validated.exists():
        frame = snapshot.read(validated)
        kept = frame[~frame["feedback_id"].isin(list(gone))].reset_index(drop=True)
        built = datasets.build(kept, evaluation_share=evaluation_share, min_rating=min_rating)
        changed += _clean_datasets(folder, gone, built)
        changed += _without_rows(validated, gone)
    return changed + _without_rows(folder / snapshot.FILE, gone)


def clean_inbox(inbox: Path, person: Person, interactions: Collection[str]) -> int:
    """Take rows with the person's name, or about their interactions, out of dropped files.

    They are read as ingestion reads them; of a damaged gzip file is left what came out of it.
    """
    changed = 0
    for path in sorted(inbox.rglob("*.json*")):
        if path.is_file():
            changed += _without_lines(path, person, interactions)
    return changed


def _clean_datasets(folder: Path, gone: Collection[str], built: datasets.Datasets) -> int:
    imitable = {(e.prompt, e.completion): e for e in built.sft_examples}
    held_out = {prompt.prompt_id: prompt for prompt in built.evaluation_prompts}
    pairs, examples = folder / stages.PAIRS, folder / stages.EXAMPLES
    imitated, prompts = folder / stages.SFT_EXAMPLES, folder / stages.PROMPTS
    changed = 0
    if pairs.exists():
        before = datasets.read_jsonl(pairs, PreferencePair)
        changed += _rewritten(pairs, before, [p for p in before if p.pair_id not in gone])
    if examples.exists():
        said = datasets.read_jsonl(examples, RewardExample)
        changed += _rewritten(examples, said, [e for e in said if e.example_id not in gone])
    if imitated.exists():
        shown = datasets.read_jsonl(imitated, SftExample)
        keys = [(e.prompt, e.completion) for e in shown]
        kept = [imitable[key] for key in keys if key in imitable]
        changed += _rewritten(imitated, shown, kept)
    if prompts.exists():
        asked = datasets.read_jsonl(prompts, EvaluationPrompt)
        left = [held_out[p.prompt_id] for p in asked if p.prompt_id in held_out]
        changed += _rewritten(prompts, asked, left)
    answers = gold.read_answers(folder / stages.GOLD)
    others = [answer for answer in answers if answer.feedback_id not in gone]
    if others != answers:
        gold.write_answers(folder / stages.GOLD, others)
    return changed + (others != answers)


def _rewritten(path: Path, before: list[Any], after: list[Any]) -> bool:
    if before != after:
        datasets.write_jsonl(path, after)
    return before != after


def _without_rows(path: Path, gone: Collection[str]) -> bool:
    """Write a parquet file of votes without some, in bounded memory; say whether any was there."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    source = pq.ParquetFile(path)
    theirs = pa.array(sorted(gone), pa.string())
    schema = source.schema_arrow.remove_metadata()  # pandas' counts the rows that were there
    noted = {
        name: value
        for name, value in (source.metadata.metadata or {}).items()
        if name not in (b"pandas", b"ARROW:schema")
    }
    aside = path.with_suffix(f".{uuid7()}.partial")
    found = 0
    try:
        with pq.ParquetWriter(aside, schema) as writer:
            for batch in source.iter_batches():
                ids = batch.column("feedback_id").cast(pa.string())
                kept = batch.filter(pc.invert(pc.is_in(ids, value_set=theirs)))
                found += batch.num_rows - kept.num_rows
                writer.write_table(pa.Table.from_batches([kept]).cast(schema))
            writer.add_key_value_metadata(noted)
        if found:
            aside.replace(path)
    finally:
        source.close()
        aside.unlink(missing_ok=True)
    return found > 0


def _without_lines(path: Path, person: Person, interactions: Collection[str]) -> bool:
    def is_theirs(row: bytes) -> bool:
        return _is_about(row, person, interactions)

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


def _is_about(row: bytes, person: Person, interactions: Collection[str]) -> bool:
    text = row.decode("utf-8-sig", "replace").strip()
    told = [text]
    if "\\" in text:  # a name or an id may be written with escapes
        with suppress(ValueError, RecursionError):
            told.append(json.dumps(json.loads(text), ensure_ascii=False))
    return any(is_signed_by(each, person) or mentions(each, interactions) for each in told)
