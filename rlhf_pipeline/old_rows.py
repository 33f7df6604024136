"""Rows of the store that nobody needs any more: which may go, by age and number, and their going.

  chats       answers that nobody said anything about
  looks       at experiments that ended, but for the last look at each
  events      what the chat blocked, and what failed it
  quarantine  lines that a person dealt with
What always stays: votes, and every answer that one is about; answers of a running experiment, and
those that MLflow keeps a trace of, which an erasure finds by them; what a person was answered while
an answer that nobody signed lies in the same session, as that is known as theirs by it alone; and
what stored votes, and people's words in MLflow, are set aside for: the next look would set them
aside once more, for somebody to deal with again.

Some rows go at a time, in a transaction of their own, and after each the store is left to others
for as long as it took: a vote waits for some rows and never for all. What this does not do: give
the room back to the disk (the store fills it again; VACUUM gives it back).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, Literal, get_args

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.config import KeptSettings

RowKind = Literal["chats", "looks", "events", "quarantine"]
KINDS: tuple[RowKind, ...] = get_args(RowKind)
SOME = 400  # rows that go together: SQLite takes 999 variables in its oldest builds
PAGE = 5_000  # rows that are looked for together

Which = Sequence[sa.ColumnElement[bool]]

_TABLES: dict[RowKind, sa.Table] = {
    "chats": db.interactions,
    "looks": db.experiment_looks,
    "events": db.chat_events,
    "quarantine": db.quarantine,
}


def bound(
    database: db.Database, kind: RowKind, agent_id: str, kept: KeptSettings, at: datetime
) -> datetime | None:
    """Return before when the agent's rows go; None where there are too few for any to go."""
    before = at - timedelta(days=kept.days)
    if kept.newest == 0:
        return before
    moment, counted = _ages(kind, agent_id)
    query = sa.select(moment).where(*counted).order_by(moment.desc())
    with database.read() as connection:
        of_last = connection.execute(query.offset(kept.newest - 1).limit(1)).scalar()
    return None if of_last is None else min(before, of_last)


def count(
    database: db.Database,
    kind: RowKind,
    agent_id: str,
    before: datetime,
    without: Collection[str] = (),
) -> int:
    """Return how many rows from before that moment would go; `without` these interactions."""
    return sum(
        len(keys)
        for old, still in _may_go(kind, agent_id, before)
        for keys in _pages(database, kind, [*old, *still], without)
    )


def remove(
    database: db.Database,
    kind: RowKind,
    agent_id: str,
    before: datetime,
    without: Collection[str] = (),
    keep_going: Callable[[], None] = lambda: None,
) -> int:
    """Remove the rows that `count` counts, and return how many went.

    `keep_going` is asked before any go, each time, and raises to end it; begun again, it goes on.
    """
    table, gone = _TABLES[kind], 0
    for old, still in _may_go(kind, agent_id, before):
        for keys in _pages(database, kind, [*old, *still], without):
            for start in range(0, len(keys), SOME):
                keep_going()
                # Not asked whether they are old: SQLite would go along all that are.
                some = table.delete().where(_are(table, keys[start : start + SOME]), *still)
                # Alone: a vote on one of them is there to be seen, or refused.
                with database.write(alone=True) as connection:
                    began = time.perf_counter()
                    gone += connection.execute(some).rowcount
                time.sleep(time.perf_counter() - began)
    return gone


def _are(table: sa.Table, keys: Sequence[tuple[Any, ...]]) -> sa.ColumnElement[bool]:
    """Say of rows that they are these; keys that begin alike stand together.

    Not as a list of tuples: along an index SQLite finds single values alone.
    """
    *shared, last = table.primary_key
    return sa.or_(
        *(
            sa.and_(
                *(column == value for column, value in zip(shared, alike, strict=True)),
                last.in_([key[-1] for key in some]),
            )
            for alike, some in groupby(keys, key=lambda key: key[:-1])
        )
    )


def _pages(
    database: db.Database, kind: RowKind, which: Which, without: Collection[str]
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the primary keys of these rows, some at a time, each time from where it was left."""
    table = _TABLES[kind]
    keys = tuple(table.primary_key)
    # Along an index that is there: what was passed over is not read again for every page.
    order = (table.c.created_at, *keys) if kind == "chats" else keys
    query = sa.select(*order).where(*which).order_by(*order).limit(PAGE)
    after: sa.Row[Any] | None = None
    while True:
        page = query if after is None else query.where(sa.tuple_(*order) > sa.tuple_(*after))
        with database.read() as connection:
            found = connection.execute(page).all()
        if not found:
            return
        after = found[-1]
        yield [key for row in found if (key := tuple(row[-len(keys) :]))[0] not in without]


def _ages(kind: RowKind, agent_id: str) -> tuple[sa.ColumnElement[datetime], Which]:
    """Return from when a kind's age counts, and the rows of which the newest stay."""
    table = db.experiments if kind == "looks" else _TABLES[kind]
    moment = table.c[{"looks": "ended_at", "quarantine": "closed_at"}.get(kind, "created_at")]
    return moment, [table.c.agent_id == agent_id, moment.is_not(None)]


def _may_go(kind: RowKind, agent_id: str, before: datetime) -> list[tuple[Which, Which]]:
    """Return what says of rows that they may go, and what of it may change until they do.

    The rows of each pair in turn, the first first.
    """
    moment, counted = _ages(kind, agent_id)
    old = [*counted, moment < before]
    if kind == "events":
        return [(old, [])]
    if kind == "quarantine":
        q = db.quarantine.c
        return [([*old, q.feedback_id.is_(None), q.origin != "mlflow"], [])]
    e = db.experiments.c
    if kind == "looks":
        look, later = db.experiment_looks.c, db.experiment_looks.alias("later").c
        last = sa.select(sa.func.max(later.look)).where(later.experiment_id == look.experiment_id)
        ended = sa.select(e.experiment_id).where(*old)
        return [([look.experiment_id.in_(ended), look.look < last.scalar_subquery()], [])]
    i, f, beside = db.interactions.c, db.feedback.c, db.interactions.alias("beside").c
    running = sa.select(e.experiment_id).where(e.agent_id == agent_id, e.state == "running")
    old.append(sa.or_(i.experiment.is_(None), i.experiment.not_in(running)))
    # A preference out of MLflow has the chat's prompt alone.
    asked = sa.select(f.prompt).where(f.agent_id == agent_id, db.FROM_MLFLOW, f.prompt.is_not(None))
    unjudged = [
        ~sa.exists().where(f.interaction_id == i.interaction_id),
        ~sa.exists().where(f.other_interaction_id == i.interaction_id),
        i.prompt.not_in(asked),
    ]
    unsigned = sa.exists().where(
        beside.agent_id == agent_id, beside.user_id.is_(None), beside.session_id == i.session_id
    )
    # What nobody signed goes last, so that as many go as were counted.
    return [
        ([*old, i.user_id.is_not(None)], [*unjudged, ~unsigned]),
        ([*old, i.user_id.is_(None)], unjudged),
    ]
