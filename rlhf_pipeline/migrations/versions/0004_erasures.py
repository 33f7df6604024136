"""Erasures: what was taken out for a person who asked, and votes that are kept as numbers alone."""

import sqlalchemy as sa
from alembic import op

from rlhf_pipeline.database import UtcDateTime

revision = "0004"
down_revision = "0003"

EFFECTIVE_FEEDBACK = """
CREATE VIEW effective_feedback AS
SELECT f.* FROM feedback f
WHERE f.erased_at IS NULL AND NOT EXISTS (
    SELECT 1 FROM feedback newer
    WHERE newer.agent_id = f.agent_id AND newer.voter = f.voter
      AND newer.target = f.target AND newer.kind = f.kind AND newer.seq > f.seq
)
"""


def upgrade() -> None:
    op.execute("DROP VIEW effective_feedback")
    op.add_column("feedback", sa.Column("erased_at", UtcDateTime, nullable=True))
    op.execute(EFFECTIVE_FEEDBACK)
    op.create_table(
        "erasures",
        sa.Column("erasure_id", sa.String(length=36), nullable=False),
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("person", sa.String(length=64), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("snapshots", sa.JSON(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("erased_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("erasure_id", name=op.f("pk_erasures")),
    )
    op.create_index("ix_erasures_agent_person", "erasures", ["agent_id", "person"], unique=False)
