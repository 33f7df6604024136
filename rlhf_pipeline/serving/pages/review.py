"""What annotators look at, and how far they agree: queues and numbers, no page.

The cost of a queue does not grow with the table: it looks at the newest answers and at a few random
ones among many more, both along an index. Only for who has judged all of those does it go further
back, over as many answers as they have judged.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.feedback.agreement import Agreement, agreement_of
from rlhf_pipeline.records import Interaction, prompt_from_json

NEWEST = 500  # answers among which the most uncertain are looked for
AMONG = 5_000  # newest answers among which random ones are drawn
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
    some = _random(database, agent_id, (size + 1) // 2)
    anywhere = _unjudged(database, agent_id, rater_id, some, without)
    chosen: dict[str, Interaction] = {}
    for a, b in zip(_padded(uncertain, size), _padded(anywhere, size), strict=True):
        for one in (a, b):
            if one is not None:
                chosen.setdefault(one.interaction_id, one)
    return list(chosen.values())[:size] or _left(database, agent_id, rater_id, size, without)


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


def _newest_first(agent_id: str) -> sa.Select[Any]:
    i = db.interactions
    return i.select().where(i.c.agent_id == agent_id).order_by(i.c.created_at.desc())


def _newest(database: db.Database, agent_id: str) -> list[Interaction]:
    return _interactions(database, _newest_first(agent_id).limit(NEWEST))


def _random(database: db.Database, agent_id: str, size: int) -> list[Interaction]:
    """Return random ones of the newest answers.

    Each is as likely as another: a row is drawn, not a moment, which would be in the longest pause
    most often and then always give the answer after it.
    """
    rows = _newest_first(agent_id)
    moments = rows.with_only_columns(db.interactions.c.created_at).limit(AMONG).subquery()
    with database.read() as connection:
        n = connection.execute(sa.select(sa.func.count()).select_from(moments)).scalar_one()
    found: dict[str, Interaction] = {}
    for place in random.sample(range(n), min(size, n)):
        for one in _interactions(database, rows.offset(place).limit(1)):
            found[one.interaction_id] = one
    return list(found.values())


def _left(
    database: db.Database, agent_id: str, rater_id: str, size: int, without: Collection[str]
) -> list[Interaction]:
    """Return the newest answers this rater has not judged, however old they are."""
    f, i = db.feedback.c, db.interactions.c
    # A list and no EXISTS, for which SQLite would read all of the rater's votes for every answer.
    judged = sa.select(f.interaction_id).where(
        f.agent_id == agent_id, f.voter == rater_id, f.interaction_id.is_not(None)
    )
    query = _newest_first(agent_id).where(
        i.interaction_id.not_in(judged),
        i.interaction_id.not_in(list(without)),
        sa.func.trim(i.completion, " \t\r\n") != "",
    )
    return _interactions(database, query.limit(size))


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


def _interactions(database: db.Database, query: sa.Select[Any]) -> list[Interaction]:
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
