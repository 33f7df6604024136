"""What lies in an inbox and is not taken in by itself: which file, and why, for who may mend it.

Only Dagster knows of the runs that were to take a file in. Its sensor keeps what came of them in
the state folder, where `rlhf status` and the dashboard look without asking Dagster.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.feedback.sources import why_left
from rlhf_pipeline.files import read_json, write_json

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings

REFUSED = "inbox.json"
MOST_LEFT = 5  # files that a terminal or a page shows


@dataclass(frozen=True, slots=True)
class Refused:
    """A dropped file whose runs came to nothing, as the sensor saw it last."""

    stamp: str  # of the file as it was then
    runs: int
    is_over: bool  # no other run starts until the file changes
    why: str  # the last one failed


def stamp_of(found: os.stat_result) -> str:
    """Return what another file of the name, or another state of the file, differs in."""
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def refused_files(settings: Settings) -> dict[str, Refused]:
    """Return what `keep_refused` kept, by agent/name; nothing where that is not there or damaged.

    The sensor's next look makes it again.
    """
    try:
        kept = read_json(settings.state_dir / REFUSED)
    except PipelineError:
        return {}
    return {name: Refused(**one) for name, one in kept.items()}


def keep_refused(settings: Settings, files: Mapping[str, Refused]) -> None:
    """Keep which files' runs came to nothing, by agent/name. Raises OSError where it cannot."""
    kept = {name: asdict(one) for name, one in files.items()}
    write_json(settings.state_dir / REFUSED, kept)


def left_in(settings: Settings, agent_id: str) -> list[str]:
    """Return why files in the agent's inbox are not taken in, and what to do about each.

    One that is still being written, or waits for its first run, is not among them.
    """
    refused, inbox = refused_files(settings), settings.inbox_folder(agent_id)
    told = [
        why_left(path) or _why_refused(path, refused.get(f"{agent_id}/{path.name}"))
        for path in sorted(inbox.glob("*"))
        if path.is_file()
    ]
    return [why for why in told if why is not None]


def _why_refused(path: Path, refused: Refused | None) -> str | None:
    try:
        found = path.stat()
    except OSError:  # taken away since the folder was listed
        return None
    if refused is None or stamp_of(found) != refused.stamp:
        return None
    since = datetime.fromtimestamp(found.st_ctime, UTC)  # a moved file keeps its other times
    what_next = "mend that, then touch the file" if refused.is_over else "another starts by itself"
    return (
        f"{path.name} has lain there since {since:%Y-%m-%d %H:%M} UTC; {refused.runs} runs for it "
        f"came to nothing, the last of them so: {refused.why}; {what_next}"
    )
