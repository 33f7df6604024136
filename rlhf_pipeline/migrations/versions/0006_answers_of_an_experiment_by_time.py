"""An experiment's answers lie in the order in which a look reads them."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_index(
        "ix_interactions_experiment_created", "interactions", ["experiment", "created_at"]
    )
    op.drop_index("ix_interactions_experiment", "interactions")
