"""A process that has imported what training needs, and forks whoever wants to begin from there.

    python -m tests.warmed SOCKET                        forks until its standard input ends
    python tests/warmed.py SOCKET -m MODULE WORDS...     runs MODULE.main() in such a fork

A training process of these tests spends most of its life importing torch. The second command is
what a test starts instead of `python -m MODULE WORDS...` and stands for the process it asked for:
folder, environment and output are its own, it ends with that one's exit code or signal, hands it a
SIGTERM, and takes it along with a SIGKILL. What this does not show is that a fresh interpreter
finds everything: tests/resources/test_worker.py and the slow tests start one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

WARM = {  # what each module imports late, MODULE:NAME where the module itself imports that late
    "resources.worker": (
        "rlhf_pipeline.policy.sft trl:SFTTrainer datasets peft rlhf_pipeline.reward.training "
        "rlhf_pipeline.ppo.trainer rlhf_pipeline.evaluation.compare matplotlib.pyplot "
        "alembic.command"
    ),
    "tests.serving.doors": "gradio alembic.command",
    "tests.serving.pages.world": "gradio alembic.command rlhf_pipeline.policy.streaming",
}
LONGEST = 60.0  # seconds until the process that forks has to listen


# -- who asks -----------------------------------------------------------------------------------


def ask(address: str, words: list[str]) -> None:
    """Have the words run in a fork, and end as it ended."""
    with _connected(address) as channel:
        asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
        body = json.dumps(asked).encode()
        socket.send_fds(channel, [len(body).to_bytes(4, "big")], [1, 2])
        channel.sendall(body)
        signal.signal(signal.SIGTERM, lambda *_: channel.sendall(b"T"))
        ended = int(channel.recv(16) or b"1")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if ended < 0:
        os.kill(os.getpid(), -ended)
    sys.exit(ended)


def _connected(address: str) -> socket.socket:
    deadline = time.monotonic() + LONGEST
    while True:
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.connect(address)
        except OSError:
            channel.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return channel


# -- who forks ----------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork one process for each that asks, until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for them
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        while door in select.select([door, sys.stdin], [], [])[0]:
            channel, _ = door.accept()
            head, outputs, _, _ = socket.recv_fds(channel, 4, 2)
            asked = json.loads(_exactly(channel, int.from_bytes(head, "big")))
            _warm(asked["words"][1])
            gc.freeze()
            if os.fork() == 0:
                os._exit(_keep(channel, asked, outputs))
            channel.close()
            for output in outputs:
                os.close(output)


def _exactly(channel: socket.socket, size: int) -> bytes:
    body = b""
    while len(body) < size:
        body += channel.recv(size - len(body))
    return body


def _warm(module: str) -> None:
    """Import here, once, what each fork would import again."""
    for word in [module, *WARM.get(module, "").split()]:
        name, _, late = word.partition(":")
        found = importlib.import_module(name)
        if late:
            getattr(found, late)


def _keep(channel: socket.socket, asked: Mapping[str, Any], outputs: Sequence[int]) -> int:
    """Fork the process, pass signals on to it and how it ended back."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        channel.close()
        os._exit(_run(asked, outputs))
    asks = True
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if not asks or not select.select([channel], [], [], 0.01)[0]:
            continue
        asks = bool(channel.recv(1))  # nothing: who asked is gone
        os.kill(child, signal.SIGTERM if asks else signal.SIGKILL)
    if asks:
        channel.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    return 0


def _run(asked: Mapping[str, Any], outputs: Sequence[int]) -> int:
    """Be the process that was asked for; return its exit code."""
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    _, module, *words = asked["words"]
    sys.argv[1:] = words
    try:
        importlib.import_module(module).main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001  # as an interpreter does at its end
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    if sys.argv[2:3] == ["-m"]:
        ask(sys.argv[1], sys.argv[2:])
    else:
        serve(sys.argv[1])
