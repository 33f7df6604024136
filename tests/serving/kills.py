"""A real service killed with -9 again and again while people keep sending votes.

Senders repeat a vote under its key until it is acknowledged, as a client should. At the end the
store is held against what was acknowledged.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
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
    repeated: int = 0  # requests that had to be sent again
    lost: int = 0
    doubled: int = 0
    slowest_recovery: float = 0.0  # seconds until a killed process's store reads and writes again


def play(state: Path, kills: int, seed: int) -> Toll:
    """Kill the service `kills` times under load and return what became of the votes."""
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

    process = start(state, port)
    senders = [threading.Thread(target=send, daemon=True) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    try:
        for _ in range(kills):
            time.sleep(rng.uniform(0.05, 0.8))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            began = time.monotonic()
            database = Database(f"sqlite:///{state / 'feedback.db'}")
            with database.write() as connection:
                connection.exec_driver_sql("UPDATE agents SET recipe = recipe")
            database.close()
            toll.slowest_recovery = max(toll.slowest_recovery, time.monotonic() - began)
            process = start(state, port)
        time.sleep(0.5)
        ended.set()
        for sender in senders:
            sender.join(20)
    finally:
        ended.set()
        process.kill()
        process.wait()
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
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return process
        except httpx.TransportError:
            pass
        assert process.poll() is None, "the service ended"
        assert time.monotonic() < deadline, "the service did not begin to answer"
        time.sleep(0.05)


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root)}
