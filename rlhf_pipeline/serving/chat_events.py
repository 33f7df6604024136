"""What the chat service blocked and what failed it, one row each, kept in the store.

Rows say which rule, whose answer and which interaction; never what anybody wrote.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.records import now


def record(
    database: db.Database,
    agent_id: str,
    *,
    interaction_id: str,
    arm: str,
    rule: str,
    detail: str,
) -> None:
    """Add one row."""
    with database.write() as connection:
        connection.execute(
            db.chat_events.insert().values(
                agent_id=agent_id,
                interaction_id=interaction_id,
                arm=arm,
                rule=rule,
                detail=detail[:1000],
                created_at=now(),
            )
        )


def newest(database: db.Database, agent_id: str, most: int) -> list[dict[str, Any]]:
    """Return an agent's newest rows first, at most so many."""
    table = db.chat_events
    query = (
        sa.select(table)
        .where(table.c.agent_id == agent_id)
        .order_by(table.c.seq.desc())
        .limit(most)
    )
    with database.read() as connection:
        return [dict(row._mapping) for row in connection.execute(query)]


def counts(database: db.Database, agent_id: str) -> dict[str, int]:
    """Return how many rows there are of each rule."""
    table = db.chat_events
    query = (
        sa.select(table.c.rule, sa.func.count())
        .where(table.c.agent_id == agent_id)
        .group_by(table.c.rule)
        .order_by(table.c.rule)
    )
    with database.read() as connection:
        return {row[0]: row[1] for row in connection.execute(query)}
