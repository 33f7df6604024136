"""A process that has imported all a server needs, and forks one at each asking: ready in a moment.

    python -m tests.serving.forks STATE PORT

A server that is killed a thousand times spends most of its life importing, which a kill there shows
nothing about. On standard input, `start` forks one and `kill` kills it with -9; each is answered
with `done`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile

import uvicorn

from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.serving.app import create_app, run


def main() -> None:
    """Serve who asks until standard input ends."""
    state, port = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:  # what is imported late is imported here
        app = create_app(Workspace(None, folder).settings, pages=False)
        uvicorn.Config(app, port=port).load()
    gc.freeze()
    child = 0
    for line in sys.stdin:
        if line == "start\n":
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # its log
                run(Workspace(None, state).settings, port, pages=False)
                os._exit(0)
        elif child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child = 0
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
