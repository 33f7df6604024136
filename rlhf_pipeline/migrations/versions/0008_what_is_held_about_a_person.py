"""What is held about a person is found along indexes, not among all that the agent has."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_index("ix_interactions_person", "interactions", ["agent_id", "user_id", "session_id"])
    op.create_index("ix_feedback_other_interaction", "feedback", ["other_interaction_id"])
    op.create_index(
        "ix_feedback_from_mlflow",
        "feedback",
        ["agent_id"],
        sqlite_where=sa.text("origin = 'mlflow'"),
        postgresql_where=sa.text("origin = 'mlflow'"),
    )
