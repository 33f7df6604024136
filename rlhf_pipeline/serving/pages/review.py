"""What annotators look at, and how far they agree: queues and arithmetic, no page.

The cost of a queue does not grow with the table: it looks at the newest answers and at a few from a
random moment, both along an index.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.records import Interaction, prompt_from_json

NEWEST = 500  # answers among which the most uncertain are looked for
AT_ONCE = 10


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far people agree whether answers are good."""

    answers: int  # that two or more people judged
    alike: float  # share of pairs of people who said the same, 0 to 1
    alpha: float  # Krippendorff's, nominal: 1 is perfect, 0 is chance

    def words(self) -> str:
        """Return it for a person."""
        if not self.answers:
            return "Agreement: no answer was judged by two people yet."
        return (
            f"Agreement: {self.alike:.0%} on {self.answers} answers judged by two or more "
            f"(Krippendorff's alpha {self.alpha:.2f})."
        )


def queue(
    database: db.Database, agent_id: str, rater_id: str, *, size: int = AT_ONCE
) -> list[Interaction]:
    """Return answers this rater has not judged: the most uncertain, every other one random."""
    newest = _unjudged(database, agent_id, rater_id, _newest(database, agent_id))
    uncertain = sorted(newest, key=_disagreement, reverse=True)
    anywhere = _unjudged(database, agent_id, rater_id, _random(database, agent_id, size))
    chosen: dict[str, Interaction] = {}
    for a, b in zip(_padded(uncertain, size), _padded(anywhere, size), strict=True):
        for one in (a, b):
            if one is not None:
                chosen.setdefault(one.interaction_id, one)
    return list(chosen.values())[:size]


def agreement(database: db.Database, agent_id: str) -> Agreement:
    """Return how far people agree on the newest answers: thumbs, and ratings off the middle."""
    f, newest = db.effective_feedback.c, _newest(database, agent_id)
    query = sa.select(f.interaction_id, f.voter, f.kind, f.number).where(
        f.agent_id == agent_id,
        f.interaction_id.in_([one.interaction_id for one in newest]),
        f.kind.in_(("thumbs", "rating")),
    )
    judged: dict[str, dict[str, bool]] = defaultdict(dict)
    with database.read() as connection:
        for row in connection.execute(query):
            middle = 0.5 if row.kind == "thumbs" else 3
            if row.number != middle:
                judged[row.interaction_id].setdefault(row.voter, row.number > middle)
    return agreement_of([list(votes.values()) for votes in judged.values()])


def agreement_of(judgements: Iterable[Sequence[bool]]) -> Agreement:
    """Return the agreement of each answer's judgements.

    Source of alpha: Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), nominal data
    with missing values, by the coincidence matrix.
    """
    coincidences: dict[tuple[bool, bool], float] = defaultdict(float)
    answers, alike, pairs = 0, 0, 0
    for votes in judgements:
        if len(votes) < 2:
            continue
        answers += 1
        for a, b in permutations(votes, 2):
            coincidences[a, b] += 1 / (len(votes) - 1)
            alike += a == b
            pairs += 1
    if not answers:
        return Agreement(0, 0.0, 0.0)
    ups = coincidences[True, True] + coincidences[True, False]
    downs = coincidences[False, False] + coincidences[False, True]
    differing, expected = 2 * coincidences[True, False], 2 * ups * downs
    alpha = 1.0 if expected == 0 else 1 - (ups + downs - 1) * differing / expected
    return Agreement(answers, alike / pairs, alpha)


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
    database: db.Database, agent_id: str, rater_id: str, some: Sequence[Interaction]
) -> list[Interaction]:
    f = db.feedback.c
    query = sa.select(f.interaction_id).where(
        f.interaction_id.in_([one.interaction_id for one in some]),
        f.agent_id == agent_id,
        f.voter == rater_id,
    )
    with database.read() as connection:
        judged = set(connection.execute(query).scalars())
    return [one for one in some if one.interaction_id not in judged and one.completion.strip()]


def _interactions(database: db.Database, query: sa.Select[tuple[object, ...]]) -> list[Interaction]:
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [Interaction(**{**row._mapping, "prompt": prompt_from_json(row.prompt)}) for row in rows]


def _disagreement(one: Interaction) -> float:
    value = one.sampling.get("disagreement")
    return value if isinstance(value, float) else 0.0


def _padded(some: Sequence[Interaction], size: int) -> list[Interaction | None]:
    return [*some[:size], *[None] * (size - len(some))]
