"""The feedback service under load, and under kill -9.

    python -m benchmarks.feedback_service [--seconds 60] [--kills 1000]

A real server process on loopback, 16 connections from wrk (apt-get install wrk). Each 200 is a vote
committed and synced to this machine's disk; the rate is bounded by how fast that disk syncs and by
the two sides sharing the cores. The servers that are killed are forked from one that has imported
everything, so that a restart is not mostly imports.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.promises import tell
from rlhf_pipeline.database import Database
from tests.serving.kills import play, start
from tests.serving.pages.world import free_port

SENDERS = 16
BATCH = 500
SCRIPT = Path(__file__).with_name("votes.lua")


def load(address: str, seconds: float, run: str, senders: int, rows: int = 1) -> dict[str, float]:
    """Return what wrk found: requests, seconds, p50_ms, p99_ms, errors."""
    told = subprocess.run(
        f"wrk -t1 -c{senders} -d{seconds:.0f}s --timeout 10s".split()
        + f"-s {SCRIPT.name} {address}/v1/feedback".split(),
        cwd=SCRIPT.parent,
        env={**os.environ, "ROWS": str(rows), "RUN": run},
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    return found


def stored(state: Path) -> int:
    """Return how many votes the store holds."""
    database = Database(f"sqlite:///{state / 'feedback.db'}")
    with database.read() as connection:
        votes: int = connection.exec_driver_sql("SELECT count(*) FROM feedback").scalar_one()
    database.close()
    return votes


def main() -> None:
    """Print the table; status 1 where a promise is short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--kill-seconds", type=float, default=math.inf, help="Then no more.")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        parser.error("needed the load generator wrk, found none; install it: apt-get install wrk")
    rows: list[tuple[str, str, str, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        port, state = free_port(), Path(folder) / "load"
        server = start(state, port)
        address = f"http://127.0.0.1:{port}"
        try:
            load(address, 3, "warm", SENDERS)
            before = stored(state)
            single = load(address, options.seconds, "one", SENDERS)
            between = stored(state)
            bulk = load(address, min(options.seconds, 20), "bulk", 2, BATCH)
            after = stored(state)
        finally:
            server.kill()
            server.wait()
        rate, p99 = (between - before) / single["seconds"], single["p99_ms"]
        errors = single["errors"] + bulk["errors"]
        missing = single["requests"] - (between - before)
        bulk_rate = (after - between) / bulk["seconds"]
        rows.append(("votes per second, one by one", "≥ 500", f"{rate:.0f}", rate >= 500))
        rows.append(("median", "-", f"{single['p50_ms']:.1f} ms", True))
        rows.append(("99th percentile", "< 50 ms", f"{p99:.1f} ms", p99 < 50))
        rows.append(("acknowledged, not in the store", "0", f"{max(missing, 0)}", missing <= 0))
        rows.append(("errors", "0", f"{errors:.0f}", errors == 0))
        rows.append(("rows/s in batches", "≥ 5,000", f"{bulk_rate:.0f}", bulk_rate >= 5000))
        toll = play(
            Path(folder) / "kills", options.kills, 2, forked=True, seconds=options.kill_seconds
        )
        rows.append(
            (
                f"{toll.kills} kills: lost / doubled of {len(toll.acknowledged):,}",
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
