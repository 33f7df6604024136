"""How log lines are shown by the processes that are ours: the command line's and Dagster's.

Nothing is configured where the package is only imported.
"""

from __future__ import annotations

import sys
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
