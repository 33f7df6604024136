"""Topics that only a person who was erased spoke of: their names blank in every table by topic.

A topic is free text of whoever sent a vote, so it may hold their words. The numbers of the group
stay beside the blank. The rule which topics go is in `feedback/withdrawn.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

ERASED = "[erased]"
TABLES = ("by_topic", "topics", "judge")  # by name: of a reward model's report, of a comparison
FIELDS = ("topic", "group")  # of a row
BY_GROUP = ("### By topic", "### The gate's reward model, by group")  # in a comparison's words
WORD = "topic "  # before its name where a table has groups of several kinds


def without_topics(value: Any, topics: Collection[str]) -> Any:
    """Return JSON with the names of these topics blank: as a table's keys, and in rows."""
    if isinstance(value, list):
        return [without_topics(inner, topics) for inner in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        return {**value, "data": _without(value["columns"], value["data"], topics)}  # MLflow's
    found: dict[str, Any] = {}
    for name, inner in value.items():
        if name in FIELDS and isinstance(inner, str):
            found[name] = _blank(inner, topics)
        elif name in TABLES and isinstance(inner, dict):
            found[name] = _renamed(inner, topics)
        else:
            found[name] = without_topics(inner, topics)
    return found


def without_topic_rows(markdown: str, topics: Collection[str]) -> str:
    """Return a comparison's words with the names of these topics blank in its tables by group."""
    from rlhf_pipeline.evaluation.report import quoted

    cells = {
        f"| {quoted(word + name)} | ": f"| {quoted(word + ERASED)} | "
        for name in topics
        for word in ("", WORD)
    }
    lines = []
    by_group = False
    for line in markdown.split("\n"):
        by_group = line.startswith(BY_GROUP) or (by_group and not line.startswith("#"))
        cell = next((c for c in cells if by_group and line.startswith(c)), None)
        lines.append(line if cell is None else cells[cell] + line.removeprefix(cell))
    return "\n".join(lines)


def inert_topics(page: str, topics: Iterable[str]) -> str:
    """Return a page that carries its numbers as JSON in scripts, with no script in these topics.

    Evidently writes them as they are, and a browser ends a script at the first `</script`, though
    it stands within quotes. In JSON, as in a script, an escaped sign is the same one.
    """
    for topic in topics:
        for written in _written(topic):
            page = page.replace(written, _inert(written))
    return page


def names_any(page: str, topics: Collection[str]) -> bool:
    """Say whether a page that carries its numbers as JSON has one of these topics among them."""
    found = (written for topic in topics for written in _written(topic))
    return any(written in page or _inert(written) in page for written in found)


def _written(topic: str) -> tuple[str, str]:
    return json.dumps(topic), json.dumps(topic, ensure_ascii=False)


def _inert(written: str) -> str:
    return written.replace("<", "\\u003c")


def _blank(name: str, topics: Collection[str]) -> str:
    if name in topics:
        return ERASED
    return WORD + ERASED if name.startswith(WORD) and name[len(WORD) :] in topics else name


def _renamed(table: dict[str, Any], topics: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, inner in table.items():
        first = key = _blank(name, topics)
        number = 1
        while key in found:  # several were blanked
            number += 1
            key = f"{first} {number}"
        found[key] = without_topics(inner, topics)
    return found


def _without(columns: list[Any], rows: list[Any], topics: Collection[str]) -> list[Any]:
    places = {place for place, name in enumerate(columns) if name in FIELDS}
    return [
        [
            _blank(cell, topics) if place in places and isinstance(cell, str) else cell
            for place, cell in enumerate(row)
        ]
        for row in rows
    ]
