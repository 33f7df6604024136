"""Real people's feedback through the whole of it: what comes in, and what is set aside and why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_pipeline import database as db
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.agreement import agreement_of, by_rater, units_of
from rlhf_pipeline.feedback.ingest import IngestSummary, ingest
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.feedback.validation import ValidationReport, validate

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("RLHF_SHARED_DATA", ROOT.parent / "shared" / "data"))

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not DATA.is_dir(), reason=f"needs real feedback at {DATA}; set RLHF_SHARED_DATA"
    ),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeedbackStore]:
    database = db.Database(f"sqlite:///{tmp_path}/rlhf.db")
    yield FeedbackStore(database)
    database.close()


def run(store: FeedbackStore, path: Path, tmp_path: Path) -> tuple[IngestSummary, ValidationReport]:
    """Ingest, take a snapshot, validate, and keep what was set aside, as a turn does."""
    summary = ingest(store, path, "real")
    newest = snapshot.newest_seq(store.database, "real")
    frozen = snapshot.take(store.database, "real", newest, tmp_path / "feedback.parquet")
    report = validate(snapshot.read(frozen.path))
    store.quarantine(report.quarantine_rows())
    return summary, report


@pytest.mark.parametrize(
    ("name", "pairs", "refused", "aside"),
    [
        (
            "helpful-base",
            2354,
            {},
            {"identical_pair": 2, "contexts_differ": 9, "empty_completion": 4},
        ),
        # Two dialogues end with the human's words.
        ("helpful-online", 1137, {"wrong_type": 2}, {"identical_pair": 2, "empty_completion": 3}),
    ],
)
def test_the_dirt_of_the_helpful_pairs_is_found_exactly(
    store: FeedbackStore,
    tmp_path: Path,
    name: str,
    pairs: int,
    refused: dict[str, int],
    aside: dict[str, int],
) -> None:
    path = DATA / "hh_rlhf" / f"{name}.test.jsonl.gz"
    summary, report = run(store, path, tmp_path)
    stored = pairs - sum(refused.values())
    assert (summary.read, summary.stored, dict(summary.quarantined)) == (pairs, stored, refused)
    assert store.quarantined("real") == aside | refused
    assert len(report.clean) == stored - sum(aside.values())
    assert not any(check.told for check in report.checks)
    assert ingest(store, path, "real").stored == 0


def test_ranked_trees_give_their_sibling_pairs_and_reactions(
    store: FeedbackStore, tmp_path: Path
) -> None:
    trees = DATA / "oasst_en100" / "en_100_tree.jsonl"
    summary, report = run(store, trees, tmp_path)
    assert store.counts("real") == {"preference": 754, "thumbs": 430}
    assert summary.quarantined == {}
    assert report.quarantined == []
    as_messages = ingest(store, DATA / "oasst_en100" / "en_100_message.jsonl", "real")
    assert (as_messages.stored, as_messages.known) == (0, 1184)


def test_labels_and_conversations_are_read(store: FeedbackStore, tmp_path: Path) -> None:
    summary, report = run(store, DATA / "llamafactory_demo_ai_feedback", tmp_path)
    assert summary.read == 600
    kinds = Counter(report.clean["kind"])
    assert kinds["thumbs"] > 290
    assert kinds["preference"] > 290


def test_judged_answers_give_pairs_with_ties_and_corrections(
    store: FeedbackStore, tmp_path: Path
) -> None:
    summary, report = run(store, DATA / "qa_feedback_finegrained", tmp_path)
    assert summary.quarantined == {}
    assert summary.read == 3_000 + 487
    kinds = Counter(report.clean["kind"])
    assert kinds["correction"] >= 470
    assert Counter(report.clean["choice"])["tie"] > 300
    assert not any(check.told for check in report.checks)


def test_signed_judgements_say_how_far_their_raters_agree(
    store: FeedbackStore, tmp_path: Path
) -> None:
    pytest.importorskip("openpyxl")
    path = DATA / "tulu_human_eval" / "eval_annotations_tulu_1.xlsx"
    summary, report = run(store, path, tmp_path)
    assert summary.quarantined == {}
    preferences = report.clean[report.clean["kind"] == "preference"]
    choices = Counter(preferences["choice"])
    # Two ties of somebody's were judged again with the answers in the other order. One tie is
    # between answers of which one stands in quotes and the other does not.
    assert (choices["tie"], choices["both_bad"]) == (284, 50)
    assert preferences["voter"].nunique() == 16
    units = units_of(report.clean)
    found = agreement_of([list(unit.values()) for unit in units["pairs"]])
    assert found.answers > 80
    assert found.alpha is not None
    assert 0 < found.alpha < 1
    table = by_rater(units["pairs"], Counter(report.clean["voter"]))
    assert sum(one.alike is not None for one in table) >= 10
    assert ingest(store, path, "real").stored == 0
