"""How state machines are played: so many runs of so many steps, the same ones every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def play(make: Callable[[], RuleBasedStateMachine], runs: int, steps: int) -> None:
    """Play so many runs of the machine, each made anew."""
    chosen = settings(
        max_examples=runs,
        stateful_step_count=steps,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    machine: Any = make  # annotated as a class upstream
    run_state_machine_as_test(machine, settings=chosen)
