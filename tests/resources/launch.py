"""Stands before the worker's command, as a launcher does, and gives it stages that train nothing.

python tests/resources/launch.py -m resources.worker STAGE SPEC.json
"""

import os
import signal
import sys
import time
from typing import Any

sys.path.insert(0, os.getcwd())

from resources import worker
from rlhf_pipeline import stages
from rlhf_pipeline.errors import NotEnoughData
from rlhf_pipeline.records import Progress
from rlhf_pipeline.stages import KeepGoing, Turn


def count(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Report three updates and return."""
    for update in (1, 2, 3):
        report({"update": update, "score": update / 2})
    return {"sum": 6, "secret": turn.settings.resolved_database_url, "pid": os.getpid()}


def fall_over(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Die without a word, but only the first time."""
    marker = turn.work / "fell over"
    if not marker.exists():
        marker.touch()
        os._exit(9)
    return {"attempt": 2}


def refuse(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Refuse the work."""
    raise NotEnoughData("needed 30 preference pairs, found 2")


def hang(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Say which process this is and work until stopped, looking at the claim now and then."""
    (turn.work / "pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)
        keep_going()


def ignore_everything(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Say which process this is and work for ever."""
    (turn.work / "pid").write_text(str(os.getpid()))
    time.sleep(600)
    return {}


def end_slowly(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Say which process this is, work for ever, and when asked to end no more than note it."""
    signal.signal(signal.SIGTERM, lambda *_: (turn.work / "asked").touch())
    (turn.work / "pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


def main() -> None:
    """Do what the worker does, with more stages."""
    extra = (count, fall_over, refuse, hang, ignore_everything, end_slowly)
    stages.STAGES.update({stage.__name__: stage for stage in extra})  # type: ignore[attr-defined]  # a dict
    del sys.argv[1:3]  # -m resources.worker
    worker.IMPORTED_AHEAD = ()  # these stages need none of it
    worker.main()


if __name__ == "__main__":
    main()
