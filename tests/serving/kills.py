"""A real service killed with -9 again and again while people keep sending votes.

Senders repeat a vote under its key until it is acknowledged, as a client should. At the end the
store is held against what was acknowledged.
"""

from __future__ import annotations

import http.client
import itertools
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from rlhf_pipeline.database import Database
from tests.serving.pages.world import free_port

SENDERS = 8
PER_SECOND = 200.0  # votes sent, all senders together


@dataclass
class Toll:
    """What a run with kills came to."""

    acknowledged: set[str] = field(default_factory=set)
    kills: int = 0
    repeated: int = 0  # requests that had to be sent again
    lost: int = 0
    doubled: int = 0
    slowest_recovery: float = 0.0  # seconds until a killed process's store reads and writes again


@dataclass
class Processes:
    """One server at a time, each started as a user starts one."""

    state: Path
    port: int
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a server and return once it answers."""
        self._process = start(self.state, self.port)

    def kill(self) -> None:
        """Kill the server with -9 and return once it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End what started them: nothing here."""


@dataclass
class Servers:
    """One server at a time, each forked from a process that has imported everything (forks.py)."""

    state: Path
    port: int

    def __post_init__(self) -> None:
        root = Path(__file__).parents[2]
        words = ["-m", "tests.serving.forks", str(self.state), str(self.port)]
        self._parent = subprocess.Popen(
            [sys.executable, *words],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(root),
        )

    def start(self) -> None:
        """Start a server and return once it answers."""
        self._ask(b"start\n")
        until_it_answers(self.port, lambda: self._parent.poll() is None)

    def kill(self) -> None:
        """Kill the server with -9 and return once it is gone."""
        self._ask(b"kill\n")

    def close(self) -> None:
        """End what started them; the last one must be killed by now."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait()
        self._parent.stdout.close()

    def _ask(self, what: bytes) -> None:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(what)
        self._parent.stdin.flush()
        assert self._parent.stdout.readline() == b"done\n"


def play(
    state: Path, kills: int, seed: int, *, forked: bool = False, seconds: float = math.inf
) -> Toll:
    """Kill the service `kills` times under load and return what became of the votes.

    `forked` starts servers as Servers does, each in a tenth of the time; after so many `seconds`
    no more are killed.
    """
    port, rng, toll = free_port(), random.Random(seed), Toll()
    numbers, ended, lock = itertools.count(), threading.Event(), threading.Lock()

    def send() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            while not ended.is_set():
                key = f"key {next(numbers)}"
                vote = {
                    "agent_id": "tea",
                    "kind": "thumbs",
                    "value": "up",
                    "prompt": "Why?",
                    "completion": key,
                }
                while True:
                    try:
                        told = client.post(
                            "/v1/feedback", json=vote, headers={"Idempotency-Key": key}
                        )
                    except httpx.TransportError:
                        told = None
                    if told is not None and told.status_code == 200:
                        with lock:
                            toll.acknowledged.add(key)
                        break
                    if ended.is_set():
                        return
                    with lock:
                        toll.repeated += 1
                    time.sleep(0.02)
                time.sleep(SENDERS / PER_SECOND)

    servers = Servers(state, port) if forked else Processes(state, port)
    last = time.monotonic() + seconds
    servers.start()
    senders = [threading.Thread(target=send, daemon=True) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    try:
        while toll.kills < kills and time.monotonic() < last:
            time.sleep(rng.uniform(0.05, 0.8))
            servers.kill()
            toll.kills += 1
            began = time.monotonic()
            database = Database(f"sqlite:///{state / 'feedback.db'}")
            with database.write() as connection:
                connection.exec_driver_sql("UPDATE agents SET recipe = recipe")
            database.close()
            toll.slowest_recovery = max(toll.slowest_recovery, time.monotonic() - began)
            servers.start()
        time.sleep(0.5)
        ended.set()
        for sender in senders:
            sender.join(20)
    finally:
        ended.set()
        servers.kill()
        servers.close()
    database = Database(f"sqlite:///{state / 'feedback.db'}")
    with database.read() as connection:
        # What was said, not the key: two rows of one vote would differ in their keys.
        keys = connection.exec_driver_sql("SELECT completion FROM feedback").scalars().all()
    database.close()
    toll.lost = len(toll.acknowledged - set(keys))
    toll.doubled = len(keys) - len(set(keys))
    return toll


def start(state: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the service and return once it answers."""
    words = ["rlhf_pipeline.cli", "--state", str(state), "serve", "--port", str(port), "--no-pages"]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=root, stdout=subprocess.DEVNULL, env=_environment(root)
    )
    until_it_answers(port, lambda: process.poll() is None)
    return process


def until_it_answers(port: int, lives: Callable[[], bool]) -> None:
    """Return once a service answers on the port."""
    deadline = time.monotonic() + 60
    while True:
        try:
            asked = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            asked.request("GET", "/health")
            if asked.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            asked.close()
        assert lives(), "the service ended"
        assert time.monotonic() < deadline, "the service did not begin to answer"
        time.sleep(0.02)


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root)}
