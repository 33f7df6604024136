"""A snapshot: the effective votes up to a watermark, frozen in a file, known by a fingerprint.

A training run reads a snapshot, never "the table now", so what it learned from can be said, and
done again, later. What identifies people (feedback/privacy.py) does not get into the file unless
asked for; how much was taken out stands in the file's own metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.errors import FeedbackError, NotEnoughData
from rlhf_pipeline.feedback.privacy import NATIONAL, Counts, redact
from rlhf_pipeline.files import file_sha256, new_file
from rlhf_pipeline.records import Message, now, prompt_from_json, prompt_to_json, uuid7

if TYPE_CHECKING:
    import pandas as pd

CHUNK_ROWS = 50_000
FILE = "feedback.parquet"  # in the turn's data folder
VALIDATED = "validated.parquet"  # beside it: the rows of it that keep every rule
PACKED: dict[str, Any] = {"compression": "zstd", "compression_level": 3}
"""How votes are written: parquet's own choice takes 1.7 times the room, and every version keeps its
votes for ever. Readers find out by themselves what a file is packed with."""
PROMPTS = ("prompt", "other_prompt")  # JSON of messages
TEXTS = ("completion", "other_completion", "text", "comment", "topic")
TAGS = ("tags",)  # JSON list of texts
CRITERIA = ("criteria",)  # JSON object: a value by each criterion's name
REDACTED = "rlhf.redacted"  # in the file's metadata: {kind: how many}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A frozen set of effective votes."""

    agent_id: str
    fingerprint: str  # SHA-256 over the votes' ids: the same votes, the same fingerprint
    watermark: int  # the newest feedback.seq that was looked at
    rows: int
    path: str
    sha256: str  # of the file


def newest_seq(database: db.Database, agent_id: str, *, up_to: int | None = None) -> int:
    """Return the agent's newest feedback number, none above `up_to`; 0 where there is none."""
    f = db.feedback.c
    query = sa.select(f.seq).where(f.agent_id == agent_id).order_by(f.seq.desc()).limit(1)
    if up_to is not None:
        query = query.where(f.seq <= up_to)
    with database.read() as connection:
        return int(connection.execute(query).scalar() or 0)


def oldest_seq(database: db.Database, agent_id: str) -> int:
    """Return the agent's first feedback number that is there; 0 where there is none."""
    f = db.feedback.c
    query = sa.select(f.seq).where(f.agent_id == agent_id).order_by(f.seq).limit(1)
    with database.read() as connection:
        return int(connection.execute(query).scalar() or 0)


def fingerprint(database: db.Database, agent_id: str, watermark: int) -> str:
    """Return the fingerprint of the effective votes up to the watermark."""
    digest = hashlib.sha256(agent_id.encode())
    for some in _read(database, _VOTES, agent_id, watermark):
        digest.update("".join(row[0] for row in some).encode())
    return digest.hexdigest()


def take(
    database: db.Database,
    agent_id: str,
    watermark: int,
    path: Path,
    *,
    claimed: str | None = None,
    redacts: bool = True,
    regions: Sequence[str] = NATIONAL,
) -> Snapshot:
    """Write the votes up to the watermark to `path` (parquet) and record the snapshot.

    `regions` are as `redact` takes them. Memory stays bounded: rows stream from the database to the
    file. Raises NotEnoughData where the agent has no feedback at all, and FeedbackError where the
    votes are no longer those of the fingerprint that a turn has `claimed`: nothing would lead from
    its versions to a snapshot of another name, and from there to the people in it.
    """
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    mark = fingerprint(database, agent_id, watermark)
    if claimed not in (None, mark):
        raise FeedbackError(
            f"needed the votes of agent {agent_id!r} that this turn was begun for, found others: "
            "somebody was erased as it began; a new turn learns from what is left, by itself or "
            f"with `make train AGENT={agent_id}`"
        )
    rows = 0
    redacted: Counts = {}
    with new_file(path) as aside:
        with pq.ParquetWriter(aside, _schema(pa), **PACKED) as writer:
            for some in _read(database, _ROWS, agent_id, watermark):
                frame = pd.DataFrame(some, columns=_schema(pa).names)
                if redacts:
                    _redact(frame, redacted, regions)
                writer.write_table(pa.Table.from_pandas(frame, _schema(pa), preserve_index=False))
                rows += len(some)
            if redacts:
                told = json.dumps(dict(sorted(redacted.items())))
                writer.add_key_value_metadata({REDACTED: told})
        if rows == 0:
            raise NotEnoughData(
                f"needed feedback of agent {agent_id!r}, found none; send some with `rlhf ingest`"
            )
    digest = file_sha256(path)
    with database.write() as connection:
        s = db.snapshots
        connection.execute(
            s.delete().where(s.c.agent_id == agent_id, s.c.fingerprint == mark)
        )  # taken before by an attempt that failed: the same votes, so the same snapshot
        connection.execute(
            s.insert().values(
                snapshot_id=uuid7(),
                agent_id=agent_id,
                fingerprint=mark,
                watermark=watermark,
                rows=rows,
                path=str(path),
                sha256=digest,
                created_at=now(),
            )
        )
    return Snapshot(agent_id, mark, watermark, rows, str(path), digest)


def find(database: db.Database, agent_id: str, mark: str) -> Snapshot | None:
    """Return the recorded snapshot with this fingerprint, or None."""
    s = db.snapshots.c
    query = db.snapshots.select().where(s.agent_id == agent_id, s.fingerprint == mark)
    with database.read() as connection:
        row = connection.execute(query).first()
    if row is None:
        return None
    return Snapshot(row.agent_id, row.fingerprint, row.watermark, row.rows, row.path, row.sha256)


def read(path: str | Path) -> pd.DataFrame:
    """Return a snapshot's rows (one per effective vote) with a clean 0..n-1 index."""
    import pandas as pd

    return pd.read_parquet(path).reset_index(drop=True)


def count(path: Path) -> int:
    """Return how many votes a snapshot's file holds, from its last bytes."""
    import pyarrow.parquet as pq

    rows: int = pq.read_metadata(path).num_rows
    return rows


def kinds_in(path: str | Path) -> dict[str, int]:
    """Return how many votes of each kind a snapshot's file holds."""
    import pyarrow.parquet as pq

    kinds = pq.read_table(path, columns=["kind"])["kind"].value_counts().to_pylist()
    return dict(sorted((str(one["values"]), int(one["counts"])) for one in kinds))


def redacted_in(path: str | Path) -> Counts | None:
    """Return what was taken out of a snapshot's texts, by kind; None where nobody looked."""
    import pyarrow.parquet as pq

    told = (pq.read_metadata(path).metadata or {}).get(REDACTED.encode())
    return None if told is None else dict(json.loads(told))


def _redact(frame: pd.DataFrame, counts: Counts, regions: Sequence[str]) -> None:
    """Clean the frame's texts in place, and add what was found to `counts`."""

    def clean(text: str) -> str:
        cleaned, found = redact(text, regions)
        for kind, n in found.items():
            counts[kind] = counts.get(kind, 0) + n
        return cleaned

    # JSON is cleaned text by text: in it an escaped letter would read as part of a word, and what
    # ran on over a text's end would leave no JSON.
    def clean_prompt(text: str) -> str:
        turns = prompt_from_json(text)
        return prompt_to_json(tuple(Message(turn.role, clean(turn.content)) for turn in turns))

    def clean_tags(text: str) -> str:
        return json.dumps([clean(tag) for tag in json.loads(text)])

    def clean_criteria(text: str) -> str | None:
        told = [(clean(name), value) for name, value in json.loads(text).items()]
        times = Counter(name for name, _ in told)
        # Of names that have become one nobody can say whose value is whose: none of them stays, and
        # a vote that is left with none has no value.
        kept = {name: value for name, value in told if times[name] == 1}
        return json.dumps(kept) if kept else None

    cleaners = ((PROMPTS, clean_prompt), (TEXTS, clean), (TAGS, clean_tags))
    for names, cleaner in (*cleaners, (CRITERIA, clean_criteria)):
        for name in names:
            frame[name] = [cleaner(v) if isinstance(v, str) else v for v in frame[name]]


def _effective(columns: list[Any], source: sa.FromClause = db.feedback) -> sa.Select[Any]:
    """Return the query for the votes of `:agent` that count up to `:watermark`, oldest first."""
    f, newer = db.feedback, db.feedback.alias("newer")
    watermark = sa.bindparam("watermark", type_=f.c.seq.type)
    superseded = sa.exists().where(
        newer.c.agent_id == f.c.agent_id,
        newer.c.voter == f.c.voter,
        newer.c.target == f.c.target,
        newer.c.kind == f.c.kind,
        newer.c.seq > f.c.seq,
        newer.c.seq <= watermark,
    )
    return (
        sa.select(*columns)
        .select_from(source)
        .where(
            f.c.agent_id == sa.bindparam("agent"),
            f.c.seq <= watermark,
            f.c.erased_at.is_(None),
            ~superseded,
        )
        .order_by(f.c.seq)
    )


def _whole() -> sa.Select[Any]:
    """Return the query for the rows of a snapshot's file."""
    f = db.feedback.c
    this, other = db.interactions.alias("this"), db.interactions.alias("other_one")
    # Who speaks of another person's answer came from elsewhere.
    is_own = f.rater_id == this.c.user_id
    columns = [
        f.feedback_id,
        f.seq,
        f.agent_id,
        f.kind,
        f.voter,
        f.rater_id,
        f.source,
        f.origin,
        f.occurred_at,
        f.received_at,
        f.interaction_id,
        this.c.model_version,
        sa.func.coalesce(f.prompt, this.c.prompt).label("prompt"),
        sa.func.coalesce(f.completion, this.c.completion).label("completion"),
        f.number,
        f.text,
        f.criteria,
        sa.func.coalesce(f.other_completion, other.c.completion).label("other_completion"),
        sa.func.coalesce(f.other_prompt, other.c.prompt).label("other_prompt"),
        f.choice,
        f.shown_first,
        f.topic,
        f.comment,
        f.tags,
        sa.case((is_own, this.c.sampling["network"].as_string())).label("network"),
    ]
    joined = db.feedback.outerjoin(this, this.c.interaction_id == f.interaction_id)
    joined = joined.outerjoin(other, other.c.interaction_id == f.other_interaction_id)
    return _effective(columns, joined)


# Built once: a fingerprint is asked for at every look of a sensor, and building its query takes
# longer than the answer of a small store.
_VOTES, _ROWS = _effective([db.feedback.c.feedback_id]), _whole()


def _read(
    database: db.Database, query: sa.Select[Any], agent_id: str, watermark: int
) -> Iterator[list[tuple[Any, ...]]]:
    asked = {"agent": agent_id, "watermark": watermark}
    with database.read() as connection:
        result = connection.execution_options(yield_per=CHUNK_ROWS).execute(query, asked)
        for some in result.partitions():
            yield [tuple(row) for row in some]


def _schema(pa: Any) -> Any:
    text = pa.string()
    moment = pa.timestamp("us", tz="UTC")
    return pa.schema(
        [
            ("feedback_id", text),
            ("seq", pa.int64()),
            ("agent_id", text),
            ("kind", text),
            ("voter", text),
            ("rater_id", text),
            ("source", text),
            ("origin", text),
            ("occurred_at", moment),
            ("received_at", moment),
            ("interaction_id", text),
            ("model_version", pa.int64()),
            ("prompt", text),
            ("completion", text),
            ("number", pa.float64()),
            ("text", text),
            ("criteria", text),
            ("other_completion", text),
            ("other_prompt", text),
            ("choice", text),
            ("shown_first", text),
            ("topic", text),
            ("comment", text),
            ("tags", text),  # JSON list
            ("network", text),  # a mark of whence the voter was answered at /ui/
        ]
    )
