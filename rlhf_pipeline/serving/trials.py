"""Who meets the challenger in this process, and the trigger that ends it at once.

The book is read every LOOK_EVERY_SECONDS, so an experiment that another process ended is over here
within as many. Trouble seen here ends it here, and in the book: no request after it meets the
challenger, also where the book cannot be written now; it is told again at every look. Where the
book cannot be read, everybody meets the champion.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sqlalchemy as sa
import structlog

from rlhf_pipeline.experiment.assignment import Arm, arm_of, counted_as
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook, State
from rlhf_pipeline.experiment.watch import USUAL, Failures, is_trouble, persons_share, usual_of
from rlhf_pipeline.logs import ToldOnce

if TYPE_CHECKING:
    from rlhf_pipeline import database as db
    from rlhf_pipeline.config import ExperimentSettings

log = structlog.get_logger(__name__)

LOOK_EVERY_SECONDS = 2.0


@dataclass(slots=True)
class _Heard:
    """How an arm did here of late."""

    answers: deque[tuple[int, str, bool]]  # the how manyeth here, who had it, whether it failed
    people: dict[str, bool] = field(default_factory=dict)  # at their latest; who asked last is last

    def hear(self, number: int, who: str, *, fell_back: bool) -> None:
        """Take in an answer, of as many people as of answers at most."""
        self.answers.append((number, who, fell_back))
        self.people.pop(who, None)
        self.people[who] = fell_back
        if len(self.people) > (self.answers.maxlen or 0):
            del self.people[next(iter(self.people))]

    @property
    def first(self) -> int:
        """Return the number of the oldest answer that is kept; 0 of none."""
        return self.answers[0][0] if self.answers else 0

    @property
    def found(self) -> Failures:
        """Return the same as the store would tell it, but for the rules."""
        return Failures(
            answers=len(self.answers),
            failed=sum(failed for _, _, failed in self.answers),
            people=len(self.people),
            people_failed=sum(self.people.values()),
            persons_share=persons_share(self.since(0)),
            rules={},
        )

    def since(self, first: int) -> list[tuple[str, bool]]:
        """Return who had the answers from that number on, and which failed."""
        return [(who, failed) for number, who, failed in self.answers if number >= first]


class Trials:
    """The running experiments of all agents, as this process knows them."""

    def __init__(
        self, database: db.Database, settings_of: Callable[[str], ExperimentSettings]
    ) -> None:
        self.book = ExperimentBook(database)
        self.settings_of = settings_of  # by agent: a recipe of its own may say otherwise
        self._running: dict[str, Experiment] = {}
        self._rules: dict[str, ExperimentSettings] = {}  # by experiment, read once
        self._heard: dict[tuple[str, Arm], _Heard] = {}  # by experiment and arm
        self._answers = 0  # heard of in all
        self._ended: dict[str, tuple[State, str]] = {}  # by experiment that was ended here
        self._looked = -LOOK_EVERY_SECONDS
        self._blind = ToldOnce(
            log,
            "experiments cannot be read: all meet the champion now",
            "experiments can be read again",
        )
        self._lock = threading.Lock()

    def running(self, agent_id: str) -> Experiment | None:
        """Return the agent's experiment, as it was at the last look."""
        self._refresh()
        return self._running.get(agent_id)

    def is_challenged(self, experiment: Experiment, user_id: str) -> bool:
        """Say whether the user meets the challenger."""
        return arm_of(experiment.experiment_id, user_id, experiment.share) == "challenger"

    def tell(
        self,
        experiment: Experiment,
        user_id: str,
        *,
        fell_back: bool,
        arm: Arm = "challenger",
        network: str | None = None,
    ) -> None:
        """Hear of an answer asked of an arm; too many the challenger failed at end the experiment.

        It failed where the answer broke off, or the baseline had to give it: far oftener than the
        champion, of the same days, and of the same answers: what is away is away for both.
        """
        settings = self._rules.get(experiment.experiment_id)
        if settings is None:
            settings = self._rules[experiment.experiment_id] = self.settings_of(experiment.agent_id)
        most, share = settings.trouble_answers, settings.trouble_share
        who = counted_as(user_id, network, settings.people_per_network)
        with self._lock:
            self._answers += 1
            self._of(experiment, arm, most).hear(self._answers, who, fell_back=fell_back)
            if arm != "challenger" or not fell_back or experiment.experiment_id in self._ended:
                return
            challenger = self._of(experiment, "challenger", most)
            champion = self._of(experiment, "champion", most)
            its, champions = challenger.found, champion.found
            usual = max(champions.usual, usual_of(champion.since(challenger.first)))
            if not is_trouble(its, most=most, share=share, usual=usual):
                return
            reason = (
                f"the challenger failed at {its.failed} of its latest {its.answers} answers, and "
                f"{its.people_failed} of the latest {its.people} people; the champion at "
                f"{champions.failed} of {champions.answers}"
            )
        self._end(experiment, "rolled_back", reason)

    def stop(self, experiment: Experiment, reason: str) -> None:
        """End the experiment with nothing said against its challenger: a person decides."""
        self._end(experiment, "stopped", reason)

    def _of(self, experiment: Experiment, arm: Arm, most: int) -> _Heard:
        many = most if arm == "challenger" else USUAL * most
        return self._heard.setdefault((experiment.experiment_id, arm), _Heard(deque(maxlen=many)))

    def _end(self, experiment: Experiment, state: State, reason: str) -> None:
        with self._lock:
            if experiment.experiment_id in self._ended:
                return
            self._ended[experiment.experiment_id] = state, reason
            self._running.pop(experiment.agent_id, None)
        log.warning("experiment ended", agent=experiment.agent_id, state=state, reason=reason)
        self._write_down(experiment)

    def _write_down(self, experiment: Experiment) -> None:
        """End in the book what ended here."""
        try:
            self.book.end(experiment, *self._ended[experiment.experiment_id])
        except Exception:  # a store that cannot be written now
            log.exception("an ended experiment stands in the book as running; told again soon")

    def _refresh(self) -> None:
        if time.monotonic() - self._looked < LOOK_EVERY_SECONDS:
            return
        with self._lock:
            if time.monotonic() - self._looked < LOOK_EVERY_SECONDS:
                return
            self._looked = time.monotonic()
            try:
                running = self.book.all_running()
                self._running = {
                    e.agent_id: e for e in running if e.experiment_id not in self._ended
                }
            except sa.exc.DBAPIError as error:
                self._blind.met(error.orig)
                self._running = {}
                return
            except Exception:
                log.exception("experiments could not be read; everybody meets the champion")
                self._running = {}
                return
            self._blind.over()
            for experiment in running:
                if experiment.experiment_id in self._ended:
                    self._write_down(experiment)
