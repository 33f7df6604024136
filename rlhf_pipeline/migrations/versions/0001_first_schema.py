"""The first schema: what was said, what people think of it, who trains, who is champion."""

import sqlalchemy as sa
from alembic import op

from rlhf_pipeline.database import BigId, UtcDateTime

revision = "0001"
down_revision = None

EFFECTIVE_FEEDBACK = """
CREATE VIEW effective_feedback AS
SELECT f.* FROM feedback f
WHERE NOT EXISTS (
    SELECT 1 FROM feedback newer
    WHERE newer.agent_id = f.agent_id AND newer.voter = f.voter
      AND newer.target = f.target AND newer.kind = f.kind AND newer.seq > f.seq
)
"""


def upgrade() -> None:
    op.create_table(
        "agents",
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("recipe", sa.String(length=200), nullable=True),
        sa.Column("automatic_promotion", sa.Boolean(), nullable=True),
        sa.Column("paused_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("agent_id", name=op.f("pk_agents")),
    )
    op.create_table(
        "claims",
        sa.Column("token", BigId, autoincrement=True, nullable=False),
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("watermark", BigId, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("asked_by", sa.String(length=32), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("heartbeat_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("token", name=op.f("pk_claims")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_claims_agent_token", "claims", ["agent_id", "token"], unique=False)
    op.create_index(
        "uq_claims_one_held_per_agent",
        "claims",
        ["agent_id"],
        unique=True,
        sqlite_where=sa.text("state = 'held'"),
        postgresql_where=sa.text("state = 'held'"),
    )
    op.create_table(
        "feedback",
        sa.Column("seq", BigId, autoincrement=True, nullable=False),
        sa.Column("feedback_id", sa.String(length=36), nullable=False),
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=False),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("target", sa.String(length=64), nullable=False),
        sa.Column("voter", sa.String(length=64), nullable=False),
        sa.Column("interaction_id", sa.String(length=36), nullable=True),
        sa.Column("prompt", sa.Text(), nullable=True),
        sa.Column("completion", sa.Text(), nullable=True),
        sa.Column("number", sa.Float(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("criteria", sa.Text(), nullable=True),
        sa.Column("other_interaction_id", sa.String(length=36), nullable=True),
        sa.Column("other_completion", sa.Text(), nullable=True),
        sa.Column("other_prompt", sa.Text(), nullable=True),
        sa.Column("choice", sa.String(length=8), nullable=True),
        sa.Column("shown_first", sa.String(length=8), nullable=False),
        sa.Column("rater_id", sa.String(length=64), nullable=True),
        sa.Column("source", sa.String(length=8), nullable=False),
        sa.Column("origin", sa.String(length=400), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("topic", sa.String(length=200), nullable=True),
        sa.Column("occurred_at", UtcDateTime, nullable=False),
        sa.Column("received_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_feedback")),
        sa.UniqueConstraint(
            "agent_id", "idempotency_key", name=op.f("uq_feedback_agent_id_idempotency_key")
        ),
        sa.UniqueConstraint("feedback_id", name=op.f("uq_feedback_feedback_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_feedback_agent_seq", "feedback", ["agent_id", "seq"], unique=False)
    op.create_index("ix_feedback_interaction", "feedback", ["interaction_id"], unique=False)
    op.create_index(
        "ix_feedback_vote", "feedback", ["agent_id", "voter", "target", "kind", "seq"], unique=False
    )
    op.create_table(
        "interactions",
        sa.Column("interaction_id", sa.String(length=36), nullable=False),
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=True),
        sa.Column("user_id", sa.String(length=64), nullable=True),
        sa.Column("model_version", sa.Integer(), nullable=False),
        sa.Column("experiment", sa.String(length=64), nullable=True),
        sa.Column("arm", sa.String(length=32), nullable=True),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("completion", sa.Text(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("latency_seconds", sa.Float(), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("interaction_id", name=op.f("pk_interactions")),
    )
    op.create_index(
        "ix_interactions_agent_created", "interactions", ["agent_id", "created_at"], unique=False
    )
    op.create_table(
        "model_versions",
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("label", sa.String(length=32), nullable=False),
        sa.Column("mlflow_version", sa.String(length=16), nullable=True),
        sa.Column("mlflow_run_id", sa.String(length=64), nullable=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("lineage", sa.JSON(), nullable=False),
        sa.Column("gate", sa.JSON(), nullable=True),
        sa.Column("fingerprint", sa.String(length=64), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("agent_id", "version", name=op.f("pk_model_versions")),
    )
    op.create_table(
        "promotions",
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("entry", sa.Integer(), nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("previous_version", sa.Integer(), nullable=True),
        sa.Column("token", BigId, nullable=True),
        sa.Column("actor", sa.String(length=100), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("agent_id", "entry", name=op.f("pk_promotions")),
    )
    op.create_table(
        "quarantine",
        sa.Column("quarantine_id", sa.String(length=64), nullable=False),
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("rule", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("origin", sa.String(length=400), nullable=False),
        sa.Column("line", sa.Integer(), nullable=True),
        sa.Column("feedback_id", sa.String(length=36), nullable=True),
        sa.Column("raw", sa.Text(), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("quarantine_id", name=op.f("pk_quarantine")),
    )
    op.create_index("ix_quarantine_agent_rule", "quarantine", ["agent_id", "rule"], unique=False)
    op.create_table(
        "snapshots",
        sa.Column("snapshot_id", sa.String(length=36), nullable=False),
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("watermark", BigId, nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("snapshot_id", name=op.f("pk_snapshots")),
        sa.UniqueConstraint(
            "agent_id", "fingerprint", name=op.f("uq_snapshots_agent_id_fingerprint")
        ),
    )
    op.execute(EFFECTIVE_FEEDBACK)
