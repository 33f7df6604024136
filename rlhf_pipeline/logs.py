"""How log lines are shown by the processes that are ours: the command line's and Dagster's.

Nothing is configured where the package is only imported.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import structlog


def plain_lines() -> list[Any]:
    """Return structlog's processors, of an exception the traceback alone.

    structlog's own way to show one, where rich is there, adds the variables of every frame, and
    those hold what people wrote. Lines that somebody else shows otherwise stay theirs.
    """
    processors: list[Any] = structlog.get_config()["processors"]
    if not isinstance(processors[-1], structlog.dev.ConsoleRenderer):
        return processors
    plain = structlog.dev.plain_traceback
    shown = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
    return [*processors[:-1], shown]


class ToldOnce:
    """A trouble that is met again and again: told when it begins, and when it is over."""

    def __init__(self, log: Any, began: str, over: str) -> None:
        self._log, self._began, self._over, self._lasts = log, began, over, False

    def met(self, error: object) -> None:
        """Log a warning with the error's words, where the trouble is new."""
        if not self._lasts:
            self._log.warning(self._began, why=" ".join(str(error).split()))
        self._lasts = True

    def over(self) -> None:
        """Log that it is over, where it lasted."""
        if self._lasts:
            self._log.info(self._over)
        self._lasts = False


class Lines:
    """Where structlog's lines go: standard error, as it is when one comes.

    One that cannot be written, on a full disk for instance, is lost: the request or the thread that
    says it goes on, as what happens next is worth more than the line.
    """

    def msg(self, line: str) -> None:
        """Write one line."""
        with suppress(OSError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    debug = info = warning = error = critical = exception = msg
