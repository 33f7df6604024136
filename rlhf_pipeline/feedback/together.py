"""Group commit: callers that arrive while a commit is under way share the next one.

A commit costs a sync of the disk and a turn at the store, whatever is in it; a store that is asked
by many at once would else spend its time on those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import sqlalchemy as sa

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(slots=True)
class Ticket(Generic[Item, Outcome]):
    """What one caller brings to a group commit, and what became of it."""

    items: Sequence[Item]
    outcomes: list[Outcome] = field(default_factory=list)  # one per item, in order
    error: BaseException | None = None  # none of the items is stored
    done: bool = False

    def told(self) -> list[Outcome]:
        """Return each item's outcome, in order; raises what kept all of them from the store."""
        if self.error is not None:
            raise self.error
        return self.outcomes


class GroupCommit(Generic[Item, Outcome]):
    """Commits what callers bring, one commit after the other, each for all who wait by then."""

    def __init__(self, write: Callable[[Sequence[Item]], Sequence[Outcome]]) -> None:
        """Take what writes items in one synced transaction and returns an outcome for each."""
        self._write = write
        self._waiting: list[Ticket[Item, Outcome]] = []
        self._queue = threading.Lock()
        self._leader = threading.Lock()

    @property
    def waiting(self) -> int:
        """Return how many items wait for the next commit."""
        with self._queue:
            return sum(len(ticket.items) for ticket in self._waiting)

    def commit(self, tickets: Sequence[Ticket[Item, Outcome]]) -> None:
        """Write the items of every ticket, and of all who came meanwhile; fill the tickets in.

        Returns once they are synced, or why not stands in the ticket. Whoever gets the lock first
        commits for all who wait; they find theirs done.
        """
        with self._queue:
            self._waiting.extend(tickets)
        with self._leader:
            if not all(ticket.done for ticket in tickets):
                with self._queue:
                    waiting, self._waiting = self._waiting, []
                self._commit(waiting)

    def _commit(self, tickets: Sequence[Ticket[Item, Outcome]]) -> None:
        try:
            outcomes = iter(self._write([item for ticket in tickets for item in ticket.items]))
        except BaseException as error:  # noqa: BLE001 - every waiting caller must hear of it
            away = isinstance(error, sa.exc.OperationalError) or not isinstance(error, Exception)
            if len(tickets) > 1 and not away:
                for ticket in tickets:  # one caller's unfit row is nobody else's trouble
                    self._commit([ticket])
                return
            for ticket in tickets:
                ticket.error, ticket.done = error, True
            return
        for ticket in tickets:
            ticket.outcomes = [next(outcomes) for _ in ticket.items]
            ticket.done = True
