"""The table a benchmark ends with: what was promised, what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def tell(rows: Sequence[tuple[str, str, str, bool]]) -> NoReturn:
    """Print (what, needed, found, met) as Markdown; end with status 1 where one is short."""
    print("| what | needed | found | |\n|---|---|---|---|")
    for what, needed, found, met in rows:
        print(f"| {what} | {needed} | {found} | {'met' if met else 'short'} |")
    sys.exit(0 if all(met for *_, met in rows) else 1)
