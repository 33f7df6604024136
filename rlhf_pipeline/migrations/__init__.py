"""Alembic migrations of the store; run by `database.Database.migrate`."""
