"""Writing only while one may: what a run would write whose claim was taken over is refused.

A run that stood still for longer than its lease, on a machine that was suspended, goes on with what
it holds in memory: the rows of somebody who has been erased meanwhile, or what was pruned. Its
steps and stages run in `writing_while`; whatever makes something visible there asks
`need_right_to_write` just before: files and folders (files.py), the quarantine, what people read in
MLflow. What this does not protect: the instant between the question and the renaming, and between
a step's last write and what Dagster is told of it; what is appended to an open file (progress,
which is numbers); and threads that the block starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


def _everybody_may() -> None:
    """Let whoever holds no claim write: the service, an erasure, a person's command."""


_CHECK: ContextVar[Callable[[], None]] = ContextVar("check", default=_everybody_may)


@contextmanager
def writing_while(check: Callable[[], None]) -> Iterator[None]:
    """Let the block write until `check` raises, as one of a claim does once it is another's."""
    former = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(former)


def need_right_to_write() -> None:
    """Raise what the check of the block around raises; outside of one everybody may write."""
    _CHECK.get()()
