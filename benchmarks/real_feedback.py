"""Real people's votes with ties and raters: what comes in, and how far the raters agree.

    python -m benchmarks.real_feedback [--data FOLDER]

Tulu's human evaluation (signed judgements on five levels) and QA-Feedback (unsigned pairs with
ties, corrections), taken in as a turn takes them. The data is read where it lies: --data, or
RLHF_SHARED_DATA. Reading Tulu's workbook needs the extra `xlsx`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.database import open_database
from rlhf_pipeline.evaluation.metrics import wilson_interval
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.agreement import agreement_of, by_rater, units_of
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.feedback.validation import validate

if TYPE_CHECKING:
    import pandas as pd

DATA = Path(os.environ.get("RLHF_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
FILES = {
    "Tulu": "tulu_human_eval/eval_annotations_tulu_1.xlsx",
    "QA-Feedback": "qa_feedback_finegrained/dev_feedback.json",
}


def taken_in(path: Path, folder: Path) -> tuple[pd.DataFrame, str]:
    """Return the votes that validation lets through, and a table's cells on what came in."""
    database = open_database(f"sqlite:///{folder}/{path.stem}.db")
    store = FeedbackStore(database)
    summary = ingest(store, path, "real")
    watermark = snapshot.newest_seq(database, "real")
    frozen = snapshot.take(database, "real", watermark, folder / f"{path.stem}.parquet")
    report = validate(snapshot.read(frozen.path))
    database.close()
    aside = Counter(row.rule for row in report.quarantine_rows()) + Counter(summary.quarantined)
    told = ", ".join(f"{n} {rule}" for rule, n in aside.most_common()) or "none"
    return report.clean, f"{summary.read:,} | {len(report.clean):,} | {told}"


def main() -> None:
    """Print what came in, and for signed votes every rater beside the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    arguments = parser.parse_args()
    frames = {}
    print("| | events | effective and clean | set aside | kinds | choices | raters |")
    print("|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, file in FILES.items():
            frame, cells = taken_in(arguments.data / file, Path(scratch))
            frames[name] = frame
            kinds, choices = (
                ", ".join(f"{n:,} {one}" for one, n in Counter(column.dropna()).most_common())
                for column in (frame["kind"], frame["choice"])
            )
            signed = frame["rater_id"].dropna().nunique()
            print(f"| {name} | {cells} | {kinds} | {choices} | {signed or 'unsigned'} |")
    for name, frame in frames.items():
        if frame["rater_id"].notna().any():
            print(f"\n{name}")
            agreement(frame)


def agreement(frame: pd.DataFrame) -> None:
    """Print how far the raters agree, on pairs and on thumbs, then each of them."""
    units = units_of(frame)
    for on, judged in units.items():
        print(f"{on}: {agreement_of([list(unit.values()) for unit in judged]).words()}")
    votes = Counter(frame["voter"])
    print("\n| rater | votes | on pairs alike (95 %) | of | on thumbs alike (95 %) | of |")
    print("|---|---|---|---|---|---|")
    pairs, thumbs = (
        {one.voter: one for one in by_rater(units[on], votes)} for on in ("pairs", "thumbs")
    )
    for number, voter in enumerate(sorted(pairs, key=lambda v: -votes[v]), 1):
        cells = []
        for one in (pairs[voter], thumbs[voter]):
            if one.alike is None:
                cells.append("nothing to compare | 0")
                continue
            low, high = wilson_interval(one.alike, one.compared)
            cells.append(f"{one.alike:.2f} ({low:.2f} to {high:.2f}) | {one.compared}")
        print(f"| {number} | {votes[voter]} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
