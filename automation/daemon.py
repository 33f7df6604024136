"""Dagster's daemon, with sensors that go on where the clock was set back; takes its options.

Dagster asks a sensor again once its interval has passed since the moment of its last tick. That
moment lies ahead after the clock was set back by an hour, and nothing would be asked for an hour,
also by a daemon that is started anew: no turn, no look at an experiment, no alert that tells of it.
So such moments are brought back to now. Not those of schedules: what was due in the hour that comes
again has been done.
"""

import threading
import time

import dagster as dg
import structlog
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import SensorInstigatorData

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
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
    from dagster._daemon.cli import main as daemon

    threading.Thread(target=_keep_going, name="clock", daemon=True).start()
    daemon()


if __name__ == "__main__":
    main()
