"""The ledger's entry that an experiment began under: clocks are set back, entries only follow."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    began = sa.Column("began_under", sa.Integer, nullable=False, server_default="0")
    op.add_column("experiments", began)
    op.execute(
        "UPDATE experiments SET began_under = (SELECT coalesce(max(entry), 0) FROM promotions"
        " WHERE promotions.agent_id = experiments.agent_id"
        " AND promotions.created_at <= experiments.started_at)"
    )
