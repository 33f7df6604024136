"""What lies in an inbox and is not taken in by itself: which file, and why, for who may mend it.

Only Dagster knows of the runs that were to take a file in. Its sensor keeps what came of them in
the state folder, where `rlhf status` and the dashboard look without asking Dagster.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.config import INBOX_DONE
from rlhf_pipeline.errors import FeedbackRefused, PipelineError
from rlhf_pipeline.feedback.rules import check_agent_id
from rlhf_pipeline.feedback.sources import in_order, is_passed_over, why_left
from rlhf_pipeline.files import printable, read_json, write_json

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


def passed_over_in(settings: Settings, agent_id: str) -> list[str]:
    """Return what nothing looks into in the agent's inbox, and what to do if it holds votes.

    Somebody may have put it there on purpose: who asks is told, nobody is alarmed.
    """
    told = []
    for path in in_order(settings.inbox_folder(agent_id).glob("*")):
        if path.name == INBOX_DONE or not is_passed_over(Path(path.name)):
            continue
        if path.is_dir():
            told.append(
                f"{printable(path.name)} is a folder, which nothing looks into; move its files "
                "up, or name it to `rlhf ingest`, then move it away"
            )
        # Who writes slowly is told to call it so.
        elif why_left(path) is None and path.suffix.lower() != ".part":
            told.append(
                f"{path.name} is of no kind that is read; if it holds votes, make it .jsonl, or a "
                "table for `rlhf ingest`, else move it away"
            )
    return told


def left_beside(settings: Settings, agents: Collection[str]) -> list[str]:
    """Return why what lies in the inbox, but not for these agents, is not taken in, and what to do.

    What waits there for its first run, which makes an agent known, is not among it.
    """
    inbox, told = settings.inbox_folder(""), list[str]()
    for path in in_order(inbox.glob("*")):
        name = path.name
        if name in agents or name.startswith("."):
            continue
        if not path.is_dir():
            told.append(f"{printable(name)} lies in no agent's folder; move it to {inbox}/AGENT/")
            continue
        try:
            check_folder(name)
        except FeedbackRefused as refusal:
            told.append(str(refusal))
            continue
        left = [*left_in(settings, name), *passed_over_in(settings, name)]
        told += [f"for {name}, no known agent yet: {why}" for why in left]
    return told


def check_folder(name: str) -> None:
    """Raise FeedbackRefused if no agent can have the name of a folder in the inbox."""
    check_agent_id(name, "rename the folder in the inbox")


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
