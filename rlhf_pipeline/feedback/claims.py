"""Claims: which run may train from which fingerprint; lease, heartbeat and fencing token.

Whoever asks for training (sensor, schedule, API, person) claims first. One claim per agent is held
at a time; the database's unique index says so, not this code. A holder that stops its heartbeat
loses the claim to the next one, whose token is higher; everything the old holder still tries is
refused by `check`, which fence.py asks before whatever becomes visible. Protects against two
trainings of one fingerprint and against a run that wakes up late. Does not stop the late run's
computing, only its writing. A holder's clock may be behind that of whoever looks by two minutes,
and AHEAD of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.errors import ClaimLost, ClaimRefused
from rlhf_pipeline.records import now

LEASE = timedelta(minutes=3)
BEAT_SECONDS = 20.0
AHEAD = timedelta(hours=1)
INTERRUPTED = "interrupted"  # why an attempt ended that a person stopped by Ctrl-C
"""How far another machine's clock may be ahead; what is dated later was dated by a wrong one."""
ERASURE, PRUNE = "erasure", "prune"
NO_TRAINING = {ERASURE: "cleared of somebody's data", PRUNE: "cleared of old files"}
"""asked_by of claims that only keep turns away, no attempts at one; what is done meanwhile."""

ClaimState = Literal["held", "failed", "lost", "done"]


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to train one agent from one fingerprint."""

    token: int  # higher is newer
    agent_id: str
    fingerprint: str
    watermark: int
    attempt: int  # 1 for the first try at this fingerprint
    state: ClaimState
    holder: str  # the run's id
    asked_by: str
    created_at: datetime
    heartbeat_at: datetime
    expires_at: datetime
    reason: str | None = None


class ClaimBook:
    """The claims table of one database."""

    def __init__(self, database: db.Database, *, clock: Callable[[], datetime] = now) -> None:
        self.database = database
        self.clock = clock

    def claim(
        self,
        agent_id: str,
        fingerprint: str,
        watermark: int,
        *,
        holder: str,
        asked_by: str,
        lease: timedelta = LEASE,
        again: bool = False,
    ) -> Claim:
        """Return the claim; the same holder asking again (a retried step) gets the one it has.

        Raises ClaimRefused while another holder's lease lives, and for a fingerprint that was
        trained on already unless `again`. A failed attempt leaves the fingerprint free; a stale
        lease is taken over with a higher token.
        """
        self._shorten_leases()
        try:
            with self.database.write() as connection:
                return self._claim(
                    connection, agent_id, fingerprint, watermark, holder, asked_by, lease, again
                )
        except sa.exc.IntegrityError as error:
            # Two asked in the same instant; the index let one through.
            raise ClaimRefused(f"agent {agent_id!r} was claimed by another run just now") from error

    def _claim(
        self,
        connection: sa.Connection,
        agent_id: str,
        fingerprint: str,
        watermark: int,
        holder: str,
        asked_by: str,
        lease: timedelta,
        again: bool,
    ) -> Claim:
        c = db.claims.c
        moment = self.clock()
        held = _one(connection, db.claims.select().where(c.agent_id == agent_id, c.state == "held"))
        if held is not None and held.holder == holder and held.fingerprint == fingerprint:
            if _update(connection, held.token, heartbeat_at=moment, expires_at=moment + lease):
                return replace(held, heartbeat_at=moment, expires_at=moment + lease)
            raise ClaimLost(f"claim {held.token} of run {holder} was taken over just now")
        if held is not None and held.expires_at > moment:
            if held.asked_by in NO_TRAINING:  # its holder is no run anybody could follow
                raise ClaimRefused(
                    f"agent {agent_id!r} is being {NO_TRAINING[held.asked_by]}; do it again once "
                    "that is over"
                )
            raise ClaimRefused(
                f"agent {agent_id!r} is being trained by run {held.holder} (token {held.token}, "
                f"heartbeat {held.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC); wait for it or stop it"
            )
        if held is not None:
            _lose(connection, held, reason=f"lease ran out; {holder} took over")
        earlier = _all(
            connection,
            db.claims.select().where(c.agent_id == agent_id, c.fingerprint == fingerprint),
        )
        if any(claim.state == "done" for claim in earlier) and not again:
            raise ClaimRefused(
                f"fingerprint {fingerprint[:16]} of agent {agent_id!r} was trained on already; "
                "collect new feedback, or ask for it `again` (AGAIN=1 for `make train`)"
            )
        key = connection.execute(
            db.claims.insert().values(
                agent_id=agent_id,
                fingerprint=fingerprint,
                watermark=watermark,
                attempt=len(earlier) + 1,
                state="held",
                holder=holder,
                asked_by=asked_by,
                created_at=moment,
                heartbeat_at=moment,
                expires_at=moment + lease,
            )
        ).inserted_primary_key
        assert key is not None  # one row was inserted
        claim = _one(connection, db.claims.select().where(c.token == key[0]))
        assert claim is not None  # the same row, in the same transaction
        return claim

    def check(self, token: int) -> None:
        """Raise ClaimLost unless this token is still the one that counts."""
        with self.database.read() as connection:
            check_token(connection, token)

    def beat(self, token: int, *, lease: timedelta = LEASE) -> None:
        """Say that the holder lives; raises ClaimLost if somebody has taken over."""
        moment = self.clock()
        with self.database.write() as connection:
            check_token(connection, token)
            if not _update(connection, token, heartbeat_at=moment, expires_at=moment + lease):
                check_token(connection, token)  # taken over since: says by whom

    @contextmanager
    def kept_alive(self, token: int, *, every_seconds: float = BEAT_SECONDS) -> Iterator[None]:
        """Keep the claim's heartbeat going from a thread while the block runs."""
        self.beat(token)
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(every_seconds):
                try:
                    self.beat(token)
                except ClaimLost:
                    return  # the work finds out at its next check
                except sa.exc.SQLAlchemyError:
                    continue  # away, or read-only in a failover: the lease outlasts several beats

        thread = threading.Thread(target=beat, name=f"claim-{token}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def finish(self, token: int, state: Literal["done", "failed"], reason: str = "") -> None:
        """Close the claim; raises ClaimLost if it is no longer this holder's to close."""
        with self.database.write() as connection:
            check_token(connection, token)
            if not _update(connection, token, state=state, reason=reason or None):
                check_token(connection, token)  # taken over since: says by whom

    def let_go(self, token: int) -> None:
        """Take back a claim that trained nothing, so that it counts as no attempt and no turn."""
        with self.database.write() as connection:
            _let_go(connection, token)

    def give_up(self, token: int, reason: str) -> None:
        """Close a claim whose holder is gone, if its lease has run out and nobody has yet.

        Its lease ends at this moment then, however long ago the holder was last heard of.
        """
        c, moment = db.claims.c, self.clock()
        with self.database.write() as connection:
            claim = _one(connection, db.claims.select().where(c.token == token))
            if claim is not None and claim.state == "held" and claim.expires_at <= moment:
                _lose(connection, claim, reason=reason, expires_at=moment)

    def held(self, agent_id: str) -> Claim | None:
        """Return the claim that is held now, its lease alive or stale, or None."""
        c = db.claims.c
        with self.database.read() as connection:
            return _one(
                connection, db.claims.select().where(c.agent_id == agent_id, c.state == "held")
            )

    def of_holder(self, holder: str) -> Claim | None:
        """Return the newest claim of a run, whatever its state, or None."""
        c = db.claims.c
        query = db.claims.select().where(c.holder == holder).order_by(c.token.desc()).limit(1)
        with self.database.read() as connection:
            return _one(connection, query)

    def last_done(self, agent_id: str, *, other_than: str = "") -> Claim | None:
        """Return the newest claim that was trained to its verdict, or None.

        Version 0 from seeds counts only where no votes were trained on: made again later, it takes
        none of them back. `other_than` is a fingerprint whose claims do not count.
        """
        c = db.claims.c
        query = (
            db.claims.select()
            .where(c.agent_id == agent_id, c.state == "done", c.fingerprint != other_than)
            .order_by((c.watermark > 0).desc(), c.token.desc())
            .limit(1)
        )
        with self.database.read() as connection:
            return _one(connection, query)

    def history(self, agent_id: str) -> list[Claim]:
        """Return every claim of the agent, oldest first."""
        c = db.claims.c
        with self.database.read() as connection:
            return _all(
                connection, db.claims.select().where(c.agent_id == agent_id).order_by(c.token)
            )

    def verdicts_before(self, claim: Claim) -> int:
        """Return how often this claim's fingerprint had been trained to its verdict before it."""
        return len([c for c in self._earlier(claim) if c.state == "done"])

    def attempts(self, claim: Claim) -> list[Claim]:
        """Return the claims on this claim's turn up to itself: those since the last verdict."""
        earlier = self._earlier(claim)
        done = max((c.token for c in earlier if c.state == "done"), default=0)
        return [*(c for c in earlier if c.token > done), claim]

    def _earlier(self, claim: Claim) -> list[Claim]:
        history = self.history(claim.agent_id)
        mark = claim.fingerprint
        return [c for c in history if c.fingerprint == mark and c.token < claim.token]

    def stale(self) -> list[Claim]:
        """Return the held claims whose lease has run out: their holders are gone or stuck."""
        self._shorten_leases()
        c = db.claims.c
        query = db.claims.select().where(c.state == "held", c.expires_at <= self.clock())
        with self.database.read() as connection:
            return _all(connection, query)

    def _shorten_leases(self) -> None:
        """Let a lease that a clock far ahead wrote run out as one that is written now.

        None is taken from its holder: one that lives writes its own again within BEAT_SECONDS.
        """
        c, moment = db.claims.c, self.clock()
        too_long = sa.and_(c.state == "held", c.expires_at > moment + LEASE + AHEAD)
        with self.database.read() as connection:
            if connection.execute(sa.select(c.token).where(too_long)).first() is None:
                return  # as ever: nobody waits to write
        with self.database.write() as connection:
            connection.execute(db.claims.update().where(too_long).values(expires_at=moment + LEASE))


def check_token(connection: sa.Connection, token: int, *, keep: bool = False) -> None:
    """Raise ClaimLost unless the token's claim is held; for use inside another transaction.

    With `keep` nobody takes it over before that has ended, however long the claim's holder is out.
    """
    c = db.claims.c
    query = db.claims.select().where(c.token == token)
    claim = _one(connection, query.with_for_update() if keep else query)
    if claim is None or claim.state != "held":
        found = "no such claim" if claim is None else f"{claim.state}: {claim.reason or 'closed'}"
        raise ClaimLost(f"needed claim {token} to be held, found {found}; this run must stop")


def _one(connection: sa.Connection, query: sa.Select[tuple[object, ...]]) -> Claim | None:
    row = connection.execute(query).first()
    return None if row is None else _claim_of(row)


def _all(connection: sa.Connection, query: sa.Select[tuple[object, ...]]) -> list[Claim]:
    return [_claim_of(row) for row in connection.execute(query)]


def _claim_of(row: sa.Row[tuple[object, ...]]) -> Claim:
    return Claim(**row._mapping)


def _lose(connection: sa.Connection, claim: Claim, **values: object) -> None:
    """Close a claim whose holder is gone; one that was to train nothing counts as no attempt."""
    if claim.asked_by in NO_TRAINING:
        _let_go(connection, claim.token)
    else:
        _update(connection, claim.token, state="lost", **values)


def _let_go(connection: sa.Connection, token: int) -> None:
    c = db.claims.c
    connection.execute(db.claims.delete().where(c.token == token, c.state == "held"))


def _update(connection: sa.Connection, token: int, **values: object) -> bool:
    """Change the claim if it is still held, and say whether it was.

    PostgreSQL shows a transaction what others committed since it looked, so looking is not enough.
    """
    c = db.claims.c
    held = sa.and_(c.token == token, c.state == "held")
    return connection.execute(db.claims.update().where(held).values(**values)).rowcount == 1
