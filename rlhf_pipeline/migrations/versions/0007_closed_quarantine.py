"""Rows in quarantine that a person has dealt with."""

import sqlalchemy as sa
from alembic import op

from rlhf_pipeline.database import UtcDateTime

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("quarantine", sa.Column("closed_at", UtcDateTime, nullable=True))
