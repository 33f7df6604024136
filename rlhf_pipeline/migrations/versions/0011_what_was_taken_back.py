"""Whether votes were taken back since a number is found along an index, not among all since."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_index(
        "ix_feedback_erased",
        "feedback",
        ["agent_id", "seq"],
        sqlite_where=sa.text("erased_at IS NOT NULL"),
        postgresql_where=sa.text("erased_at IS NOT NULL"),
    )
