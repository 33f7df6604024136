"""Progress bars for the terminal, fed by the files that training stages write."""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rlhf_pipeline.stages import STAGES


class Bars:
    """One bar per thing that goes on, with its latest numbers."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:28}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[facts]}"),
            console=console,
        )
        self._tasks: dict[str, Any] = {}
        self._earlier: dict[Path, int] = {}  # when an earlier attempt wrote there last
        self._began = time.monotonic()

    def show(self, name: str, facts: Mapping[str, Any]) -> None:
        """Show a stage's latest facts."""
        done, total = _done_of(facts)
        words = ", ".join(
            f"{key} {value:.3g}"
            for key, value in facts.items()
            if isinstance(value, float) and key not in ("at", "epoch")
        )
        if name not in self._tasks:
            if not self.progress.console.is_terminal:  # bars are drawn there at the end alone
                at = time.monotonic() - self._began
                self.progress.console.print(f"after {at:.0f} s: {name}", markup=False)
            self._tasks[name] = self.progress.add_task(name, total=total, facts="")
        self.progress.update(self._tasks[name], completed=done, total=total, facts=words[:60])

    def pass_over(self, folder: Path) -> None:
        """Show nothing of what an earlier attempt at this turn has reported."""
        for path in folder.glob("*.progress.jsonl"):
            self._earlier[path] = path.stat().st_mtime_ns

    def look(self, folder: Path) -> None:
        """Show the newest line of every stage at work in a turn's folder."""
        for stage in STAGES:
            path = folder / f"{stage}.progress.jsonl"
            if not path.exists() or path.stat().st_mtime_ns == self._earlier.get(path):
                continue
            facts = _last_line(path)
            if facts is not None:
                self.show(f"{stage} {facts['model']}" if "model" in facts else stage, facts)


@contextmanager
def looking(bars: Bars, folder: Path) -> Iterator[None]:
    """Look at a turn's files from a thread while the block works."""
    stop = threading.Event()
    bars.pass_over(folder)

    def look() -> None:
        while not stop.wait(0.5):
            bars.look(folder)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def be_quiet() -> None:
    """Keep the screen for the bars; the run's own log has everything."""
    import logging
    import warnings

    import structlog

    warnings.filterwarnings("ignore", category=dg.BetaWarning)
    warnings.filterwarnings("ignore", category=dg.PreviewWarning)
    # MLflow configures its logger when it is imported, so its own switch is the one that counts.
    os.environ["MLFLOW_LOGGING_LEVEL"] = "WARNING"
    logging.getLogger("alembic").setLevel(logging.WARNING)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def _done_of(facts: Mapping[str, Any]) -> tuple[float, float | None]:
    done = next((facts[k] for k in ("step", "update", "events", "done") if k in facts), 0)
    total = next((facts[k] for k in ("of", "updates", "steps") if k in facts), None)
    return float(done), None if total is None else float(total)


def _last_line(path: Path) -> dict[str, Any] | None:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = [line for line in file.read().split(b"\n") if line.startswith(b"{")]
    for line in reversed(lines):
        try:
            return dict(json.loads(line))
        except ValueError:
            continue  # the writer is in the middle of it
    return None
