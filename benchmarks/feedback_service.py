"""The feedback service under load, and under kill -9.

    python -m benchmarks.feedback_service [--seconds 60] [--kills 1000]

A real server process on loopback, senders in a process of their own. Each 200 is a vote
committed and synced to this machine's disk; the rate is bounded by how fast that disk syncs and by
the two sides sharing the cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from benchmarks.promises import tell
from tests.serving.kills import play, start
from tests.serving.pages.world import free_port

THREADS = 16
BATCH = 500


def vote(n: int) -> dict[str, object]:
    """Return one vote as a sender writes it."""
    return {
        "agent_id": "tea",
        "kind": "thumbs",
        "value": "up",
        "prompt": "Why is the sky blue?",
        "completion": f"Because of how air scatters light, number {n}.",
        "idempotency_key": f"key {n}",
    }


def post(address: str, thread: int, until: float, seconds: list[float], errors: list[int]) -> None:
    """Send one vote after the other, keeping how long each took."""
    with httpx.Client(base_url=address, timeout=30) as client:
        n = 0
        while time.monotonic() < until:
            began = time.perf_counter()
            told = client.post("/v1/feedback", json=vote(thread * 10_000_000 + n))
            seconds.append(time.perf_counter() - began)
            errors.append(told.status_code != 200)
            n += 1


def singles(address: str, seconds: float) -> tuple[float, float, int]:
    """Return votes per second, the 99th percentile in ms, and errors."""
    took: list[float] = []
    errors: list[int] = []
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=post, args=(address, t, until, took, errors))
        for t in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(took) / seconds, float(np.percentile(took, 99)) * 1000, sum(errors)


def batches(address: str, seconds: float) -> float:
    """Return rows per second in batches."""
    rows, began = 0, time.monotonic()
    with httpx.Client(base_url=address, timeout=60) as client:
        while time.monotonic() - began < seconds:
            events = [vote(-1 - rows - n) for n in range(BATCH)]
            told = client.post("/v1/feedback", json={"events": events})
            assert all("feedback_id" in r for r in told.json()["results"]), told.text[:300]
            rows += BATCH
    return rows / (time.monotonic() - began)


def main() -> None:
    """Print the table; status 1 where a promise is short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kills", type=int, default=1000)
    options = parser.parse_args()
    rows: list[tuple[str, str, str, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        server = start(Path(folder) / "load", port)
        address = f"http://127.0.0.1:{port}"
        try:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rate, p99, errors = pool.apply(singles, (address, options.seconds))
                bulk = pool.apply(batches, (address, min(options.seconds, 20)))
        finally:
            server.kill()
            server.wait()
        rows.append(("votes per second, one by one", "≥ 500", f"{rate:.0f}", rate >= 500))
        rows.append(("99th percentile", "< 50 ms", f"{p99:.1f} ms", p99 < 50))
        rows.append(("errors", "0", str(errors), errors == 0))
        rows.append(("rows per second in batches", "≥ 5,000", f"{bulk:.0f}", bulk >= 5000))
        toll = play(Path(folder) / "kills", options.kills, seed=2)
        rows.append(
            (
                f"{options.kills} kills: lost / doubled of {len(toll.acknowledged):,}",
                "0 / 0",
                f"{toll.lost} / {toll.doubled}",
                toll.lost == toll.doubled == 0,
            )
        )
        recovery = toll.slowest_recovery
        rows.append(("slowest recovery", "< 2 s", f"{recovery:.2f} s", recovery < 2))
    tell(rows)


if __name__ == "__main__":
    main()
