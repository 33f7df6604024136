"""Live experiments, and every look at one."""

import sqlalchemy as sa
from alembic import op

from rlhf_pipeline.database import UtcDateTime

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "experiments",
        sa.Column("experiment_id", sa.String(length=36), nullable=False),
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("champion", sa.Integer(), nullable=False),
        sa.Column("challenger", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("share", sa.Float(), nullable=False),
        sa.Column("share_since", UtcDateTime, nullable=False),
        sa.Column("actor", sa.String(length=100), nullable=False),
        sa.Column("started_at", UtcDateTime, nullable=False),
        sa.Column("ended_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("experiment_id", name=op.f("pk_experiments")),
    )
    running = sa.text("state = 'running'")
    op.create_index(
        "ix_experiments_running",
        "experiments",
        ["agent_id"],
        unique=True,
        sqlite_where=running,
        postgresql_where=running,
    )
    op.create_table(
        "experiment_looks",
        sa.Column("experiment_id", sa.String(length=36), nullable=False),
        sa.Column("look", sa.Integer(), nullable=False),
        sa.Column("share", sa.Float(), nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("verdict", sa.JSON(), nullable=False),
        sa.Column("looked_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("experiment_id", "look", name=op.f("pk_experiment_looks")),
    )
    op.create_index("ix_interactions_experiment", "interactions", ["experiment"], unique=False)
