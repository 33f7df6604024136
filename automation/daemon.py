"""Dagster's daemon, which goes on where the clock was set back; takes its options.

Dagster asks a sensor again once its interval has passed since the moment of its last tick. That
moment lies ahead after the clock was set back by an hour, and nothing would be asked for an hour,
also by a daemon that is started anew: no turn, no look at an experiment, no alert that tells of it.
So such moments are brought back to now. Those of schedules only where they lie further ahead, as a
clock that was wrong for a while leaves them: what was due in the hour that comes again has been
done. Schedules go on from now: what was due before has been done, or is over.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import dagster as dg
import structlog
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import ScheduleInstigatorData, SensorInstigatorData
from dagster._daemon.cli import main as daemon
from dagster._scheduler import scheduler

from rlhf_pipeline.feedback.claims import AHEAD

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
Look = TypeVar("Look", bound=Callable[..., Iterator[Any]])
AHEAD_SECONDS = 5.0  # by which a tick may be dated ahead: another process's clock is no other
LOOK_EVERY_SECONDS = 15.0


def bring_back(instance: dg.DagsterInstance, at: float) -> list[str]:
    """Date last ticks that lie ahead of `at` (seconds since 1970) then; return whose they were."""
    brought = []
    for state in instance.all_instigator_state(instigator_type=InstigatorType.SENSOR):
        data = state.instigator_data
        if not isinstance(data, SensorInstigatorData):
            continue
        moments = (data.last_tick_timestamp or 0.0, data.last_tick_start_timestamp or 0.0)
        if max(moments) > at + AHEAD_SECONDS:
            right = data._replace(last_tick_timestamp=at, last_tick_start_timestamp=at)
            instance.update_instigator_state(state.with_data(right))
            brought.append(state.instigator_name)
    return brought


def bring_back_schedules(instance: dg.DagsterInstance, at: float) -> list[str]:
    """Date moments of schedules that lie more than AHEAD after `at` then; return whose they were.

    What ran at such a moment does not run again, nor what has failed then.
    """
    latest = at + AHEAD.total_seconds()

    def right(moment: float | None) -> float | None:
        return at if moment is not None and moment > latest else moment

    brought = []
    for state in instance.all_instigator_state(instigator_type=InstigatorType.SCHEDULE):
        data = state.instigator_data
        if not isinstance(data, ScheduleInstigatorData):
            continue
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, after=latest)
        for tick in ticks:
            dated = tick.tick_data._replace(timestamp=at)
            instance.update_tick(tick._replace(tick_data=dated))
        dated_data = data._replace(
            start_timestamp=right(data.start_timestamp),
            last_iteration_timestamp=right(data.last_iteration_timestamp),
        )
        if dated_data != data:
            instance.update_instigator_state(state.with_data(dated_data))
        if ticks or dated_data != data:
            brought.append(state.instigator_name)
    return brought


def going_on(look: Look) -> Look:
    """Return Dagster's look at what its schedules are due, with them brought back before each."""

    @functools.wraps(look)
    def looks(context: Any, *args: Any, **named: Any) -> Iterator[Any]:
        if brought := bring_back_schedules(context.instance, named["end_datetime_utc"].timestamp()):
            log.warning("the clock was set back; schedules go on", schedules=brought)
            named["iteration_times"].clear()  # what it remembers of them lies ahead as well
        yield from look(context, *args, **named)

    return cast(Look, looks)


def _keep_going() -> None:
    with dg.DagsterInstance.get() as instance:
        while True:
            try:
                if brought := bring_back(instance, time.time()):
                    log.warning("the clock was set back; sensors go on", sensors=brought)
            except Exception:  # a database that is away for a moment
                log.exception("could not look whether the clock was set back")
            time.sleep(LOOK_EVERY_SECONDS)


def main() -> None:
    """Run the daemon until it is ended."""
    # What its scheduler remembers is out of reach from elsewhere; a look is handed it.
    scheduler.launch_scheduled_runs = going_on(scheduler.launch_scheduled_runs)
    threading.Thread(target=_keep_going, name="clock", daemon=True).start()
    daemon()


if __name__ == "__main__":
    main()
