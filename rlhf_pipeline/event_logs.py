"""Examples that Dagster's pages show, taken out of its own databases under the state folder.

Dagster keeps what an asset tells of itself as JSON, per run, once more for all runs, and beside the
asset; it has no way to change it. Here the JSON is read, blanked and written back, and nothing else
about the event changes. What this does not reach: a Dagster that keeps its storage elsewhere, as in
PostgreSQL; the log then says so.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import yaml

from rlhf_pipeline.errors import OrchestratorAway
from rlhf_pipeline.files import no_room
from rlhf_pipeline.topics import ERASED, without_topic_rows, without_topics

log = structlog.get_logger(__name__)

SIDE_BY_SIDE = "### Side by side"  # in a comparison's words: from here on it quotes
# table -> the column with the JSON of an event. Whose it is, is in there: the asset's `last_run_id`
# beside it may be another run's, which is to make the asset anew and has not, or failed before.
PLACES: Mapping[str, str] = {"event_logs": "event", "asset_keys": "last_materialization"}
EXAMPLE = ("prompt", "baseline", "completion")


@dataclass(frozen=True, slots=True)
class Traces:
    """What a person left in what is shown."""

    questions: frozenset[str]  # what examples answer
    rater_id: str = ""
    ngrams: frozenset[str] = frozenset()  # named among what few raters carry
    topics: frozenset[str] = frozenset()  # nobody else spoke of

    def blank(self, text: str) -> bool:
        """Say whether a text is their name, or begins by quoting their words."""
        quoted = (f"{ascii(ngram)[:80]} " for ngram in self.ngrams)
        is_named = bool(self.rater_id) and text == self.rater_id
        return is_named or any(text.startswith(one) for one in quoted)


def forget_examples(folder: Path, agent_id: str, traces: Traces) -> int:
    """Blank what a person left with this agent; return how many rows were changed.

    What another agent's runs show stays: its own people asked the same. `folder` is Dagster's,
    `<state>/dagster`; runs may be under way. Raises OrchestratorAway where one of its databases
    cannot be read or written.
    """
    if _keeps_elsewhere(folder):
        log.warning("Dagster keeps its storage elsewhere: what its pages quote was left there")
    changed = 0
    others: set[str] = set()  # runs of other agents
    # The list of runs lies above their logs, and says of which partition, of which agent, they are.
    for path in sorted(folder.rglob("*.db"), key=lambda path: len(path.parts)):
        try:
            with closing(sqlite3.connect(path, timeout=60)) as connection:
                tables = _tables(connection)
                if "runs" in tables:
                    where = "SELECT run_id FROM runs WHERE partition != ?"
                    others.update(run for (run,) in connection.execute(where, (agent_id,)))
                changed += _clean(connection, tables & PLACES.keys(), traces, others)
        except sqlite3.Error as error:
            raise OrchestratorAway(
                no_room(error, str(path))
                or f"needed Dagster's database {path} to take examples out of, found: {error}; "
                "mend it or move it away, and ask again"
            ) from error
    return changed


def _keeps_elsewhere(folder: Path) -> bool:
    """Say whether Dagster was told of another place for what its pages show."""
    told = folder / "dagster.yaml"
    settings = yaml.safe_load(told.read_text()) if told.exists() else None
    return bool({"storage", "event_log_storage"} & (settings or {}).keys())


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}


def _clean(
    connection: sqlite3.Connection,
    tables: Collection[str],
    traces: Traces,
    others: Collection[str],
) -> int:
    changed = 0
    connection.execute("PRAGMA secure_delete=ON")
    for table in tables:
        column = PLACES[table]
        # Both names are ours, from the constants above.
        rows = connection.execute(
            f"SELECT id, {column} FROM {table} "
            f"WHERE {column} LIKE '%TableRecord%' OR {column} LIKE ?",
            (f"%{SIDE_BY_SIDE}%",),
        ).fetchall()
        for number, text in rows:
            before = json.loads(text)
            event = before.get("event_log_entry", before)  # asset_keys has it in a record
            if event.get("run_id") in others:
                continue
            after = _blanked(without_topics(before, traces.topics), traces)
            if after != before:
                with connection:
                    connection.execute(
                        f"UPDATE {table} SET {column} = ? WHERE id = ? AND {column} = ?",
                        (json.dumps(after), number, text),
                    )
                changed += 1
    if changed:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
    return changed


def _blanked(value: Any, traces: Traces) -> Any:
    """Return JSON with what a person left blank, and comparisons that quote them cut."""
    if isinstance(value, dict):
        prompt = value.get("prompt")
        if isinstance(prompt, str) and prompt in traces.questions:
            value = {**value, **{name: ERASED for name in EXAMPLE if name in value}}
        return {name: _blanked(inner, traces) for name, inner in value.items()}
    if isinstance(value, list):
        return [_blanked(inner, traces) for inner in value]
    if isinstance(value, str) and SIDE_BY_SIDE in value:
        return without_quotes(without_topic_rows(value, traces.topics), traces.questions)
    return ERASED if isinstance(value, str) and traces.blank(value) else value


def without_quotes(markdown: str, questions: Collection[str]) -> str:
    """Return a comparison's words, cut before its examples where one quotes such a question."""
    from rlhf_pipeline.evaluation.report import quoted

    numbers, _, quotes = markdown.partition(SIDE_BY_SIDE)
    lines = {line.partition(":** ")[2] for line in quotes.splitlines() if line.startswith("> **")}
    return f"{numbers.rstrip()}\n" if any(quoted(q) in lines for q in questions) else markdown
