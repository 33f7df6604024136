"""What people say the assistant should learn, counted from a snapshot: one voice for each person.

A wish is a tag `wants:…` of a vote, as the chat page sends what is ticked under "What should it
learn?". A person's newest tagged vote speaks for them. Votes that nobody signed count for nothing
here, and fewer than LEAST people move nothing; what this does not protect against is somebody with
many sign-ins.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

WANTS = "wants:"  # what a tag that is a wish begins with
LEAST = 10  # people who wish for something, for wishes to count


def wished_shares(path: Path, counts: Callable[[str], bool]) -> Mapping[str, float]:
    """Return the share of those who wish for something that wish for each thing, 0 to 1.

    `counts` says of a voter whether they are asked. Empty where fewer than LEAST people wish.
    """
    import pyarrow.parquet as pq

    held = pq.read_schema(path).names
    if "tags" not in held:  # frozen before wishes were
        return {}
    rows = pq.read_table(path, columns=["seq", "voter", "rater_id", "tags"]).to_pylist()
    newest: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: int(row["seq"])):
        tags = json.loads(row["tags"] or "[]")
        wishes = [tag.removeprefix(WANTS) for tag in tags if tag.startswith(WANTS)]
        is_a_persons = row["voter"] == row["rater_id"]  # no machine's, and signed
        if wishes and is_a_persons and counts(row["voter"]):
            newest[row["rater_id"]] = wishes
    if len(newest) < LEAST:
        return {}
    found = Counter(wish for wishes in newest.values() for wish in set(wishes))
    return {wish: count / len(newest) for wish, count in found.items()}
