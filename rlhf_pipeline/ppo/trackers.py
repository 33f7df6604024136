"""Metrics to TensorBoard or Weights & Biases, through accelerate's trackers.

MLflow gets every metric from the pipeline itself; these are for people who look elsewhere too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.policy.loading import choose_device
from rlhf_pipeline.records import Progress

TRACKERS = ("tensorboard", "wandb")


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError where a tracker is unknown or not installed."""
    for name in names:
        if name not in TRACKERS or find_spec(name) is None:
            raise ConfigError(
                f"training.report_to needs each of {', '.join(names)} to be one of "
                f"{', '.join(TRACKERS)} and installed, found {name!r} is not; "
                f"pip install {name if name in TRACKERS else TRACKERS[0]}, or leave it out"
            )


@contextmanager
def reporting(
    names: Sequence[str], folder: Path, run_name: str, *, device: str = "auto"
) -> Iterator[Progress]:
    """Yield a Progress that logs the numbers of every update to the trackers with these names.

    TensorBoard's files go under folder/run_name; Weights & Biases asks for its own sign-in, or
    takes WANDB_MODE=offline. `device` is the settings'.
    Raises ConfigError as `check_trackers` does.
    """
    check_trackers(names)
    if not names:
        yield lambda facts: None
        return

    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    # Trackers log on the main process only, and ask it which that is. Whoever asks first decides
    # how processes are joined, so it is asked as `join_team` asks.
    PartialState(cpu=choose_device(device).type == "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    trackers: list[Any] = []
    waiting = [LOGGER_TYPE_TO_CLASS[name] for name in names if name == "tensorboard"]

    def start(tracker: Any) -> None:
        tracker.start()
        trackers.append(tracker)

    for name in names:
        if name != "tensorboard":
            start(LOGGER_TYPE_TO_CLASS[name](run_name))

    def report(facts: Mapping[str, float | int | str]) -> None:
        update = facts.get("update")
        numbers = {k: v for k, v in facts.items() if "/" in k and isinstance(v, (int, float))}
        if not isinstance(update, int) or not numbers:
            return
        while waiting:  # a resumed run tells some updates again; TensorBoard drops its earlier ones
            start(waiting.pop()(run_name, logging_dir=str(folder), purge_step=update))
        for tracker in trackers:
            tracker.log(numbers, step=update)

    try:
        yield report
    finally:
        for tracker in trackers:
            tracker.finish()
