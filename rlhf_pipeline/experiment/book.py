"""The book of live experiments: who meets whom, at what share, what looks saw, how it ended.

An agent has one running experiment at most; the database itself refuses a second. Every change is
a compare-and-set on the row being still running, so two watchers cannot both end one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.errors import ExperimentError
from rlhf_pipeline.experiment.assignment import percent
from rlhf_pipeline.records import now, uuid7

LOOK_APART = timedelta(minutes=5)

State = Literal["running", "promoted", "rolled_back", "timed_out", "gave_up", "invalid", "stopped"]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A challenger beside a champion."""

    experiment_id: str  # and the salt of its assignment
    agent_id: str
    champion: int
    challenger: int
    state: State
    reason: str
    share: float  # of the users, that meet the challenger
    share_since: datetime
    actor: str
    started_at: datetime
    ended_at: datetime | None
    began_under: int  # the ledger's newest entry then


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the numbers, as it was stored."""

    look: int
    share: float
    action: str
    verdict: dict[str, Any]
    looked_at: datetime


class ExperimentBook:
    """Experiments of every agent in one database."""

    def __init__(self, database: db.Database) -> None:
        self.database = database

    def start(
        self, agent_id: str, *, champion: int, challenger: int, share: float, actor: str
    ) -> Experiment:
        """Begin an experiment; raises ExperimentError where one runs or both are one version."""
        if champion == challenger:
            raise ExperimentError(
                f"an experiment needs two versions, found version {champion} as both; name another"
            )
        at, p = now(), db.promotions.c
        entries = sa.select(sa.func.coalesce(sa.func.max(p.entry), 0)).where(p.agent_id == agent_id)
        values: dict[str, Any] = {
            "experiment_id": uuid7(),
            "agent_id": agent_id,
            "champion": champion,
            "challenger": challenger,
            "state": "running",
            "reason": "",
            "share": share,
            "share_since": at,
            "actor": actor,
            "started_at": at,
            "ended_at": None,
        }
        try:
            with self.database.write() as connection:
                values["began_under"] = connection.execute(entries).scalar_one()
                connection.execute(db.experiments.insert().values(**values))
        except sa.exc.IntegrityError as error:
            running = self.running(agent_id)
            raise ExperimentError(
                f"agent {agent_id!r} may have one experiment at a time, found version "
                f"{running.challenger if running else 'another'} in one; wait, or stop it with "
                "`rlhf experiment stop`"
            ) from error
        return Experiment(**values)

    def running(self, agent_id: str) -> Experiment | None:
        """Return the agent's running experiment, or None."""
        e = db.experiments.c
        query = db.experiments.select().where(e.agent_id == agent_id, e.state == "running")
        with self.database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else Experiment(**row._mapping)

    def all_running(self) -> list[Experiment]:
        """Return every agent's running experiment."""
        e = db.experiments.c
        with self.database.read() as connection:
            rows = connection.execute(db.experiments.select().where(e.state == "running"))
            return [Experiment(**row._mapping) for row in rows]

    def history(self, agent_id: str) -> list[Experiment]:
        """Return all experiments of the agent, the running one and then the newest first.

        One that a clock ahead dated may seem to have begun later than the one that runs.
        """
        e = db.experiments.c
        order = (e.state == "running").desc(), e.started_at.desc()
        query = db.experiments.select().where(e.agent_id == agent_id).order_by(*order)
        with self.database.read() as connection:
            return [Experiment(**row._mapping) for row in connection.execute(query)]

    def ramp(self, experiment: Experiment, share: float) -> bool:
        """Widen the challenger's share; return whether the experiment was still running there.

        Raises ExperimentError for a smaller share: people would be moved back.
        """
        if share < experiment.share:
            raise ExperimentError(
                f"a ramp goes up only, found {percent(experiment.share)} and then "
                f"{percent(share)}; stop the experiment instead"
            )
        return self._change(experiment, share=share, share_since=now())

    def date(self, experiment: Experiment) -> bool:
        """Keep since when it runs, and with its share; return whether it still runs with that."""
        return self._change(
            experiment,
            started_at=experiment.started_at,
            share=experiment.share,
            share_since=experiment.share_since,
        )

    def end(self, experiment: Experiment, state: State, reason: str) -> bool:
        """End the experiment; return False where somebody else had ended it."""
        return self._change(experiment, state=state, reason=reason, ended_at=now())

    def record(self, experiment: Experiment, action: str, verdict: dict[str, Any]) -> int:
        """Keep one look and return its number.

        Of looks that change nothing one in LOOK_APART is kept, and the newest: at four a minute
        those of a fortnight would be eighty thousand.
        """
        looks = db.experiment_looks
        mine = looks.c.experiment_id == experiment.experiment_id
        columns = (looks.c.look, looks.c.share, looks.c.action, looks.c.looked_at)
        newest = sa.select(*columns).where(mine).order_by(looks.c.look.desc()).limit(2)
        seen = {"share": experiment.share, "action": action, "looked_at": now()}
        with self.database.write() as connection:
            before = connection.execute(newest).all()
            alike = all((b.share, b.action) == (experiment.share, action) for b in before)
            number = before[0].look if before else 0
            # Either may be the later one: clocks are set back.
            soon = len(before) == 2 and abs(before[0].looked_at - before[1].looked_at) < LOOK_APART
            if alike and soon:
                change = looks.update().where(mine, looks.c.look == number)
                connection.execute(change.values(verdict=verdict, **seen))
                return number
            number += 1
            connection.execute(
                looks.insert().values(
                    experiment_id=experiment.experiment_id, look=number, verdict=verdict, **seen
                )
            )
        return number

    def looks(self, experiment_id: str) -> list[Look]:
        """Return every look at the experiment, first first."""
        c = db.experiment_looks.c
        columns = (c.look, c.share, c.action, c.verdict, c.looked_at)
        query = sa.select(*columns).where(c.experiment_id == experiment_id).order_by(c.look)
        with self.database.read() as connection:
            return [
                Look(row.look, row.share, row.action, _known(row.verdict), row.looked_at)
                for row in connection.execute(query)
            ]

    def moments(self, experiment_id: str, *, until: datetime) -> list[datetime]:
        """Return when the experiment was looked at, up to a moment, earliest first."""
        c = db.experiment_looks.c
        # By their moments: a clock that was set back has dated a look before an earlier one.
        query = (
            sa.select(c.looked_at)
            .where(c.experiment_id == experiment_id, c.looked_at <= until)
            .order_by(c.looked_at)
        )
        with self.database.read() as connection:
            return list(connection.execute(query).scalars())

    def _change(self, experiment: Experiment, **values: Any) -> bool:
        e = db.experiments.c
        conditions = [e.experiment_id == experiment.experiment_id, e.state == "running"]
        if "share" in values:  # an end does not depend on where the ramp stands
            conditions.append(e.share == experiment.share)
        with self.database.write() as connection:
            done = connection.execute(db.experiments.update().where(*conditions).values(**values))
            return done.rowcount == 1


def _known(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a verdict as it was read, but with no difference where an arm had nobody.

    Looks of older releases have the other arm's mean there.
    """
    for found in verdict.get("differences", {}).values():
        if 0 in (found.get("challenger_users"), found.get("champion_users")):
            found["value"] = None
    return verdict
