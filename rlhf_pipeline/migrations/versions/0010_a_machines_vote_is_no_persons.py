"""What a model or a program says with a person's name takes the place of no vote of theirs."""

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.execute(
        "UPDATE feedback SET voter = source || ':' || rater_id "
        "WHERE source <> 'human' AND rater_id IS NOT NULL"
    )
