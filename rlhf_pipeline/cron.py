"""Whether a line says when something is to start as every cron does: five fields, or @daily.

A schedule that Dagster cannot read lets no definitions load, so a recipe is checked before. Taken
are numbers, names of months and weekdays, `*`, ranges that rise, lists and steps; what only some
crons know besides (L, #, ?) is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
WEEKDAYS = "sun mon tue wed thu fri sat".split()
FIELDS: Mapping[str, tuple[int, int, list[str]]] = {  # first, last, names from the first on
    "minute": (0, 59, []),
    "hour": (0, 23, []),
    "day": (1, 31, []),
    "month": (1, 12, MONTHS),
    "weekday": (0, 7, WEEKDAYS),  # 0 and 7 are Sunday
}
WHOLE = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
LONGEST = dict(zip(range(1, 13), (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))
PART = re.compile(r"(?:\*|([a-z]+|[0-9]+)(?:-([a-z]+|[0-9]+))?)(?:/([0-9]+))?")


def checked_cron(line: str) -> str:
    """Return the line as it is. Raises ValueError where it is none, or its day never comes."""
    if line in WHOLE:
        return line
    fields = line.split()
    if len(fields) != len(FIELDS):
        raise ValueError(
            "needed five fields, minute hour day month weekday, as in '0 2 * * *', or @daily, "
            f"found {line!r}"
        )
    numbers = {name: _numbers(name, field) for name, field in zip(FIELDS, fields, strict=True)}
    if min(numbers["day"]) > max(LONGEST[month] for month in numbers["month"]):
        raise ValueError(f"needed a day that its months have, found {line!r}; take an earlier one")
    return line


def _numbers(name: str, field: str) -> set[int]:
    """Return what a field names, in numbers."""
    first, last, names = FIELDS[name]
    known = {word: first + place for place, word in enumerate(names)}
    known |= {f"{n:0{width}}": n for n in range(first, last + 1) for width in (1, 2)}
    found: set[int] = set()
    for part in field.lower().split(","):
        match = PART.fullmatch(part)
        low, high, step = match.groups() if match else ("", None, None)
        start = first if low is None else known.get(low, last + 1)
        end = last if low is None else known.get(high or low, -1)
        if start > end or (step is not None and not 1 <= int(step) <= last):
            raise ValueError(
                f"needed {name}s from {first} to {last}, `*`, or a rising range, a list or a step "
                f"of them, found {part!r} in {field!r}"
            )
        found |= set(range(start, end + 1, int(step or 1)))
    return found
