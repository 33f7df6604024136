"""Sensors and schedules go on where the clock was set back."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    InProcessCodeLocationOrigin,
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    SensorInstigatorData,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget

from automation.daemon import bring_back, going_on
from tests.assets.world import keep_dagsters_engines

NOW = 1_800_000_000.0  # the beginning of a minute


@dg.job
def nothing() -> None:
    """Do nothing."""


@dg.schedule(
    job=nothing, cron_schedule="* * * * *", default_status=dg.DefaultScheduleStatus.RUNNING
)
def every_minute() -> dg.SkipReason:
    """Ask for nothing."""
    return dg.SkipReason("nothing to do")


defs = dg.Definitions(schedules=[every_minute])


@pytest.mark.parametrize(
    ("completed", "begun", "ahead"),
    [(0, 0, False), (-3600, -3590, False), (3, 4, False), (3600, 3600, True), (-9, 3600, True)],
)
def test_a_tick_dated_ahead_is_dated_now_and_nothing_else_changes(
    tmp_path: Path, completed: float, begun: float, ahead: bool
) -> None:
    location = RegisteredCodeLocationOrigin("rlhf_pipeline.definitions")
    origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "all"), "alerts")
    data = SensorInstigatorData(
        last_tick_timestamp=NOW + completed,
        last_tick_start_timestamp=NOW + begun,
        last_run_key="tea:7:1",
        min_interval=15,
        cursor="7",
    )
    state = InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.DECLARED_IN_CODE, data)
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.add_instigator_state(state)
        assert bring_back(instance, NOW) == (["alerts"] if ahead else [])
        [found] = instance.all_instigator_state()
        right = data._replace(last_tick_timestamp=NOW, last_tick_start_timestamp=NOW)
        assert found.instigator_data == (right if ahead else data)
        assert found.status == InstigatorStatus.DECLARED_IN_CODE
        assert bring_back(instance, NOW) == []


# Dagster asks for it itself where it loads a schedule within its own process.
@pytest.mark.filterwarnings("ignore:Property .ScheduleDefinition.environment_vars.")
def test_schedules_go_on_where_a_clock_far_ahead_was_set_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the daemon that ran all the while; one set back by an hour does nothing twice."""
    # Which cannot be imported before Dagster's daemon, as automation.daemon has by now.
    from dagster._scheduler.scheduler import launch_scheduled_runs

    keep_dagsters_engines(monkeypatch)
    place = LoadableTargetOrigin(module_name=__name__, attribute="defs")
    target = InProcessWorkspaceLoadTarget(InProcessCodeLocationOrigin(place))
    far, known = 8 * 60, set[int]()
    with (
        dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
        WorkspaceProcessContext(instance, target) as context,
    ):

        def looked(minute: int, remembered: dict[str, Any]) -> list[float]:
            """Return of which minutes the schedule was due that it was not due of before."""
            look = going_on(launch_scheduled_runs)(
                context,
                logging.getLogger(),
                end_datetime_utc=datetime.fromtimestamp(NOW + 60 * minute + 1, UTC),
                iteration_times=remembered,
            )
            assert not any(look), "an error"
            [state] = instance.all_instigator_state()
            every = instance.get_ticks(state.instigator_origin_id, state.selector_id)
            fresh = [tick for tick in every if tick.tick_id not in known]
            known.update(tick.tick_id for tick in fresh)
            return [(tick.timestamp - NOW) / 60 for tick in fresh]

        running: dict[str, Any] = {}
        assert looked(far - 1, running) == []  # as it was found first
        assert [looked(minute, running) for minute in range(3)] == [[], [1], [2]]
        assert looked(63, running) == [63]
        assert [looked(minute, running) for minute in (4, 5)] == [[], []]
        assert [looked(minute, {}) for minute in (6, 7)] == [[], []]
        assert [looked(minute, running) for minute in (63, 64)] == [[], [64]]
        assert looked(far, running) == [far]
        assert [looked(minute, running) for minute in (65, 66, 67)] == [[], [66], [67]]
        assert looked(far + 1, running) == [far + 1]
        assert [looked(minute, {}) for minute in (68, 69, 70)] == [[], [69], [70]]
