"""What annotators look at, and how far they agree: queues and numbers, no page.

The cost of a queue does not grow with the table: it looks at the newest answers and at a few from a
random moment, both along an index.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import timedelta

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.feedback.agreement import Agreement, agreement_of
from rlhf_pipeline.records import Interaction, prompt_from_json

NEWEST = 500  # answers among which the most uncertain are looked for
AT_ONCE = 10


def queue(
    database: db.Database,
    agent_id: str,
    rater_id: str,
    *,
    size: int = AT_ONCE,
    without: Collection[str] = (),
) -> list[Interaction]:
    """Return answers this rater has not judged: the most uncertain, every other one random.

    `without` are ids of those that are left out.
    """
    newest = _unjudged(database, agent_id, rater_id, _newest(database, agent_id), without)
    uncertain = most_uncertain(newest)
    some = _random(database, agent_id, size)
    anywhere = _unjudged(database, agent_id, rater_id, some, without)
    chosen: dict[str, Interaction] = {}
    for a, b in zip(_padded(uncertain, size), _padded(anywhere, size), strict=True):
        for one in (a, b):
            if one is not None:
                chosen.setdefault(one.interaction_id, one)
    return list(chosen.values())[:size]


def agreement(database: db.Database, agent_id: str) -> Agreement:
    """Return how far people agree on the newest answers: thumbs, and ratings off the middle."""
    f, newest = db.effective_feedback.c, _newest(database, agent_id)
    # The agent is not asked for: votes on its answers are its own, and with the agent in the
    # condition SQLite walks the index of all the agent's votes instead of the answers' own.
    query = sa.select(f.interaction_id, f.voter, f.kind, f.number).where(
        f.interaction_id.in_([one.interaction_id for one in newest]),
        f.kind.in_(("thumbs", "rating")),
        f.source == "human",
    )
    judged: dict[str, dict[str, bool]] = defaultdict(dict)
    with database.read() as connection:
        for row in connection.execute(query):
            middle = 0.5 if row.kind == "thumbs" else 3
            if row.number != middle:
                judged[row.interaction_id].setdefault(row.voter, row.number > middle)
    return agreement_of([list(votes.values()) for votes in judged.values()])


def _newest(database: db.Database, agent_id: str) -> list[Interaction]:
    i = db.interactions
    query = i.select().where(i.c.agent_id == agent_id).order_by(i.c.created_at.desc()).limit(NEWEST)
    return _interactions(database, query)


def _random(database: db.Database, agent_id: str, size: int) -> list[Interaction]:
    """Return answers from random moments between the first and the last."""
    i = db.interactions
    mine = i.c.agent_id == agent_id
    with database.read() as connection:
        ends = [
            connection.execute(
                sa.select(i.c.created_at).where(mine).order_by(order).limit(1)
            ).scalar()
            for order in (i.c.created_at, i.c.created_at.desc())
        ]
    first, last = ends
    if first is None or last is None:
        return []
    found: dict[str, Interaction] = {}
    for _ in range(size):
        moment = first + timedelta(seconds=random.random() * (last - first).total_seconds())
        query = i.select().where(mine, i.c.created_at >= moment).order_by(i.c.created_at).limit(1)
        for one in _interactions(database, query):
            found[one.interaction_id] = one
    return list(found.values())


def _unjudged(
    database: db.Database,
    agent_id: str,
    rater_id: str,
    some: Sequence[Interaction],
    without: Collection[str],
) -> list[Interaction]:
    f = db.feedback.c
    query = sa.select(f.interaction_id).where(
        f.interaction_id.in_([one.interaction_id for one in some]),
        f.agent_id == agent_id,
        f.voter == rater_id,
    )
    with database.read() as connection:
        left_out = {*connection.execute(query).scalars(), *without}
    return [one for one in some if one.interaction_id not in left_out and one.completion.strip()]


def _interactions(database: db.Database, query: sa.Select[tuple[object, ...]]) -> list[Interaction]:
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [Interaction(**{**row._mapping, "prompt": prompt_from_json(row.prompt)}) for row in rows]


def most_uncertain(some: Sequence[Interaction]) -> list[Interaction]:
    """Return the answers, the most uncertain first.

    What counts is the share of them with less disagreement, the larger of two: among answers drawn
    to one prompt, and among the heads of a reward model. Those with neither come last.
    """
    kinds: dict[str, list[float]] = defaultdict(list)
    for one in some:
        for kind, value in _disagreements(one):
            kinds[kind].append(value)
    for values in kinds.values():
        values.sort()
    shares = {
        one.interaction_id: max(
            (bisect_left(kinds[k], v) / len(kinds[k]) for k, v in _disagreements(one)), default=-1.0
        )
        for one in some
    }
    return sorted(some, key=lambda one: shares[one.interaction_id], reverse=True)


def _disagreements(one: Interaction) -> list[tuple[str, float]]:
    """Return an answer's disagreements, each with what it can be compared with."""
    found = (
        ("drawn", one.sampling.get("disagreement")),
        (str(one.sampling.get("reward_model")), one.sampling.get("reward_disagreement")),
    )
    return [(kind, value) for kind, value in found if isinstance(value, float)]


def _padded(some: Sequence[Interaction], size: int) -> list[Interaction | None]:
    return [*some[:size], *[None] * (size - len(some))]
