"""How often somebody may come: buckets that fill again, one per name, the latest names kept.

One process's own: several services on one store each keep theirs. What this does not protect
against: somebody who takes another name each time; their key's bucket is for that.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping

from rlhf_pipeline.errors import TooManyVotes
from rlhf_pipeline.records import Feedback

MOST_NAMES = 10_000


class Buckets:
    """Buckets by name; of names the MOST_NAMES that came last are remembered, others are full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (left, when)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._left)

    def spend(self, wanted: Mapping[str, int], *, rate: float, burst: float) -> float:
        """Take from each name's bucket, or from none; return the seconds to wait, 0 where taken.

        `rate` is per second, `burst` what a full one holds. Who wants more than is left gets it
        and owes the rest, so that a batch longer than a burst is not refused for ever.
        """
        with self._lock:
            now = self._clock()
            left = {name: self._now_in(name, now, rate, burst) for name in wanted}
            wait = max((1 - held) / rate for held in left.values()) if left else 0.0
            if wait > 0:
                return wait
            for name, held in left.items():
                self._left[name] = (held - wanted[name], now)
                self._left.move_to_end(name)
            while len(self._left) > MOST_NAMES:
                self._left.popitem(last=False)
            return 0.0

    def _now_in(self, name: str, now: float, rate: float, burst: float) -> float:
        held, then = self._left.get(name, (burst, now))
        return min(burst, held + (now - then) * rate)


class RaterLimit:
    """How many votes a minute one person may send to one agent."""

    def __init__(self, per_minute: int | None, buckets: Buckets | None = None) -> None:
        """None as `per_minute` sets no limit."""
        self.per_minute = per_minute
        self._buckets = Buckets() if buckets is None else buckets

    def admit(self, votes: Iterable[Feedback]) -> None:
        """Count the votes that people signed. Raises TooManyVotes, and then counts none."""
        if self.per_minute is None:
            return
        wanted = Counter(
            f"{vote.agent_id} {vote.rater_id}"
            for vote in votes
            if vote.rater_id is not None and vote.source == "human"
        )
        wait = self._buckets.spend(wanted, rate=self.per_minute / 60, burst=self.per_minute)
        if wait > 0:
            raise TooManyVotes(self.per_minute, math.ceil(wait))
