"""Sensors go on where the clock was set back."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    SensorInstigatorData,
)

from automation.daemon import bring_back

NOW = 1_800_000_000.0


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
