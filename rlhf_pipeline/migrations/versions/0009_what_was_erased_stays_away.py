"""What an erasure took stays away, whoever sends it again: the hashes of its keys are kept."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "erased_keys",
        sa.Column("agent_id", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("agent_id", "key", name=op.f("pk_erased_keys")),
    )
