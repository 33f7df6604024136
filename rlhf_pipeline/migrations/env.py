"""Alembic's entry: always on the connection that `database` hands over."""

from alembic import context

from rlhf_pipeline.database import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
