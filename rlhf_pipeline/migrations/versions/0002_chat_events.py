"""What the chat service blocked, and what failed it."""

import sqlalchemy as sa
from alembic import op

from rlhf_pipeline.database import BigId, UtcDateTime

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "chat_events",
        sa.Column("seq", BigId, autoincrement=True, nullable=False),
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("interaction_id", sa.String(length=36), nullable=True),
        sa.Column("arm", sa.String(length=32), nullable=False),
        sa.Column("rule", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_chat_events")),
    )
    op.create_index("ix_chat_events_agent_seq", "chat_events", ["agent_id", "seq"], unique=False)
