"""How fast a snapshot is validated: rows per second and peak memory, per size.

Run: python benchmarks/validation_speed.py [ROWS ...]. Each size runs in a process of its own, so
that its peak memory is its own; importing Great Expectations is not counted, it is paid once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pandas as pd

from rlhf_pipeline.feedback.validation import validate
from rlhf_pipeline.records import prompt_to_json, user_prompt

SIZES = (10_000, 100_000, 1_000_000)


def snapshot_like(rows: int, seed: int = 0) -> pd.DataFrame:
    """Return a frame of pairs, thumbs and ratings; one row in fifty is dirty."""
    rng = np.random.default_rng(seed)
    words = np.array(["tea", "rain", "about", "the", "gâteau", "how", "why", "42", "日本", "ok."])
    text = [" ".join(words[rng.integers(0, 10, 40)]) for _ in range(5_000)]

    def some_texts(label: str) -> list[str]:
        picked = rng.integers(0, len(text), rows)
        return [f"{label} {i} {text[j]}" for i, j in enumerate(picked)]

    prompts = [prompt_to_json(user_prompt(f"{i} {text[i][:80]}?")) for i in range(len(text))]
    kind = rng.choice(["preference", "thumbs", "rating"], rows)
    pair = kind == "preference"
    completion = np.array(some_texts("this"), dtype=object)
    completion[rng.random(rows) < 0.02] = ""
    frame = pd.DataFrame(
        {
            "feedback_id": [f"id-{i}" for i in range(rows)],
            "agent_id": "speed",
            "kind": kind,
            "voter": [f"rater-{i}" for i in rng.integers(0, 1_000, rows)],
            "origin": "made.jsonl",
            "prompt": np.array(prompts, dtype=object)[rng.integers(0, len(prompts), rows)],
            "completion": completion,
            "number": np.where(
                pair, np.nan, np.where(kind == "thumbs", rng.random(rows) < 0.6, 4.0)
            ),
            "other_completion": pd.Series(some_texts("other")).where(pair),
            "choice": pd.Series(rng.choice(["left", "right", "tie"], rows)).where(pair),
            "shown_first": "this",
        }
    )
    frame["rater_id"] = frame["voter"]
    for name in ("interaction_id", "text", "criteria", "other_prompt", "comment"):
        frame[name] = pd.Series([None] * rows, dtype="str")
    return frame.astype({name: "str" for name in frame.columns if name != "number"})


def measure(rows: int) -> tuple[float, float, float, int]:
    """Return seconds, peak GiB, GiB before, and how many rows were set aside."""
    frame = snapshot_like(rows)
    validate(frame.head(100))  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    started = time.perf_counter()
    report = validate(frame)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return seconds, peak, before, len(report.quarantined)


def main(sizes: Sequence[int]) -> None:
    """Print one line per size."""
    print(f"{'rows':>10} {'seconds':>8} {'rows/s':>10} {'peak GiB':>9} {'before':>7} {'aside':>7}")
    context = multiprocessing.get_context("spawn")
    for rows in sizes:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            seconds, peak, before, aside = pool.submit(measure, rows).result()
        print(
            f"{rows:>10} {seconds:>8.2f} {rows / seconds:>10.0f} {peak:>9.2f} "
            f"{before:>7.2f} {aside:>7}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="*", type=int, default=SIZES, help="of each snapshot")
    main(parser.parse_args().rows)
