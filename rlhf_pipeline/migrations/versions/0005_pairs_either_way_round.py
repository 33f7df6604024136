"""A preference's target no longer depends on which completion was named first.

Where one person judged a pair both ways round, the later vote now replaces the earlier one. Erased
votes keep their target: what it was made of is gone, and nobody can vote on it again.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from rlhf_pipeline.records import hashed

revision = "0005"
down_revision = "0004"

SOME = 500  # rows in memory at once

SIDES = sa.text("""
SELECT seq, target, agent_id, interaction_id, prompt, completion,
       other_interaction_id, other_prompt, other_completion
FROM feedback
WHERE kind = 'preference' AND erased_at IS NULL AND seq > :after
ORDER BY seq LIMIT :some
""")
CHANGE = sa.text("UPDATE feedback SET target = :target WHERE seq = :seq")


def upgrade() -> None:
    connection, after = op.get_bind(), -1
    while rows := connection.execute(SIDES, {"after": after, "some": SOME}).all():
        changes = []
        for row in rows:
            this, other = _sides(row)
            # A target made in any other way is none of ours to change.
            if this > other and row.target == hashed(this, other):
                changes.append({"target": hashed(other, this), "seq": row.seq})
        if changes:
            connection.execute(CHANGE, changes)
        after = rows[-1].seq


def _sides(row: sa.Row[Any]) -> tuple[str, str]:
    prompt = row.prompt or "[]"
    this = row.interaction_id or hashed(row.agent_id, prompt, row.completion or "")
    other = row.other_interaction_id or hashed(
        row.agent_id, row.other_prompt or prompt, row.other_completion or ""
    )
    return this, other
