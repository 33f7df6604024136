"""An SQLite store whose pages keep copies of rows that have gone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa

from rlhf_pipeline.database import Database


def people_who_went(database: Database) -> list[str]:
    """Add what people said to an SQLite store, and delete what half of them did."""
    draws = random.Random(7)
    people = [f"zqxv{n:03d};" for n in range(300)]
    gone = draws.sample(people, 150)
    said = sa.Table("said", sa.MetaData(), sa.Column("seq", sa.Integer, primary_key=True))
    said.append_column(sa.Column("words", sa.Text, index=True))
    rows = [draws.choice(people) + "x" * draws.choice([0, 20, 100, 400]) for _ in range(4000)]
    with database.write() as connection:
        said.create(connection)
        connection.execute(said.insert(), [{"words": words} for words in rows])
    for who in gone:
        with database.write() as connection:
            connection.execute(said.delete().where(said.c.words.startswith(who)))
    return gone


def kept(database: Database, gone: Sequence[str]) -> int:
    """Return how often an SQLite store's file names those who went."""
    database.fold_back()
    content = Path(database.url.database or "").read_bytes()
    return sum(content.count(who.encode()) for who in gone)
