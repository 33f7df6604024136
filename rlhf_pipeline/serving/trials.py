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

import structlog

from rlhf_pipeline.experiment.assignment import arm_of, counted_as
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook
from rlhf_pipeline.experiment.watch import is_trouble

if TYPE_CHECKING:
    from rlhf_pipeline import database as db
    from rlhf_pipeline.config import ExperimentSettings

log = structlog.get_logger(__name__)

LOOK_EVERY_SECONDS = 2.0


@dataclass(slots=True)
class _Heard:
    """How a challenger did here of late."""

    answers: deque[bool]  # whether it failed at them
    people: dict[str, bool] = field(default_factory=dict)  # at their latest; who asked last is last


class Trials:
    """The running experiments of all agents, as this process knows them."""

    def __init__(
        self, database: db.Database, settings_of: Callable[[str], ExperimentSettings]
    ) -> None:
        self.book = ExperimentBook(database)
        self.settings_of = settings_of  # by agent: a recipe of its own may say otherwise
        self._running: dict[str, Experiment] = {}
        self._rules: dict[str, ExperimentSettings] = {}  # by experiment, read once
        self._heard: dict[str, _Heard] = {}  # by experiment
        self._ended: dict[str, str] = {}  # by experiment that trouble ended here: why
        self._looked = -LOOK_EVERY_SECONDS
        self._lock = threading.Lock()

    def meeting(self, agent_id: str, user_id: str | None) -> Experiment | None:
        """Return the experiment that this user takes part in, None for nobody in particular."""
        if user_id is None:
            return None
        self._refresh()
        return self._running.get(agent_id)

    def is_challenged(self, experiment: Experiment, user_id: str) -> bool:
        """Say whether the user meets the challenger."""
        return arm_of(experiment.experiment_id, user_id, experiment.share) == "challenger"

    def tell(
        self, experiment: Experiment, user_id: str, *, fell_back: bool, network: str | None = None
    ) -> None:
        """Hear of an answer asked of the challenger; too many that it failed at end the experiment.

        It failed where the answer broke off, or the baseline had to give it.
        """
        settings = self._rules.get(experiment.experiment_id)
        if settings is None:
            settings = self._rules[experiment.experiment_id] = self.settings_of(experiment.agent_id)
        most, share = settings.trouble_answers, settings.trouble_share
        who = counted_as(user_id, network, settings.people_per_network)
        with self._lock:
            heard = self._heard.setdefault(experiment.experiment_id, _Heard(deque(maxlen=most)))
            heard.answers.append(fell_back)
            people = heard.people
            people.pop(who, None)
            people[who] = fell_back
            if len(people) > most:
                del people[next(iter(people))]
            failed, met = sum(heard.answers), sum(people.values())
            trouble = is_trouble(failed, met, len(people), most=most, share=share)
            if not trouble or experiment.experiment_id in self._ended:
                return
            reason = (
                f"the challenger failed at {failed} of its latest {len(heard.answers)} answers, "
                f"and {met} of the latest {len(people)} people"
            )
            self._ended[experiment.experiment_id] = reason
            self._running.pop(experiment.agent_id, None)
        log.warning("experiment rolled back", agent=experiment.agent_id, reason=reason)
        self._write_down(experiment)

    def _write_down(self, experiment: Experiment) -> None:
        """End in the book what trouble ended here."""
        try:
            self.book.end(experiment, "rolled_back", self._ended[experiment.experiment_id])
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
            except Exception:  # a store that cannot be read now
                log.exception("experiments could not be read; everybody meets the champion")
                self._running = {}
                return
            for experiment in running:
                if experiment.experiment_id in self._ended:
                    self._write_down(experiment)
