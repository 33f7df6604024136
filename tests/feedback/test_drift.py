"""Drift is seen where something changed, and chance alone is not called drift."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rlhf_pipeline.errors import ValidationFailed
from rlhf_pipeline.feedback import drift
from rlhf_pipeline.feedback.drift import FEATURES, feedback_drift, newest_of
from rlhf_pipeline.records import prompt_to_json, user_prompt
from rlhf_pipeline.topics import names_any

WORDS = ["tea", "water", "kettle", "morning", "leaves", "sugar", "porcelain", "steam"]


def snapshot(rows: int, seed: int, **changes: Any) -> pd.DataFrame:
    """Return a frame of thumbs and ratings about tea; `changes` replace whole columns."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(["thumbs", "rating"], rows)
    rated = rng.integers(1, 6, rows)

    def text(shortest: int, longest: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(shortest, longest)))

    frame = pd.DataFrame(
        {
            "kind": kind,
            "prompt": [prompt_to_json(user_prompt(text(3, 12) + "?")) for _ in range(rows)],
            "completion": [text(5, 60) for _ in range(rows)],
            "text": pd.Series([None] * rows, dtype="str"),
            "number": np.where(kind == "thumbs", rng.random(rows) < 0.7, rated).astype(float),
            "source": "human",
            "rater_id": pd.Series(rng.choice(["ann", "bo"], rows)).where(rng.random(rows) < 0.5),
            "topic": rng.choice(["green", "black"], rows),
            "model_version": pd.Series([0] * rows, dtype="Int64"),
            "seq": range(rows),
        }
    )
    return frame.assign(**changes)


def psi(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
    return float(sum((a - b) * np.log(a / b) for a, b in zip(p, q, strict=True)))


def test_what_did_not_change_does_not_drift(tmp_path: Path) -> None:
    report = feedback_drift(snapshot(400, 1), snapshot(300, 2), html_path=tmp_path / "d.html")
    assert not report.drifted
    assert set(FEATURES) - set(report.features) == {"correction_characters", "score"}  # all null


@pytest.mark.parametrize(
    ("features", "changes"),
    [
        (
            {"completion_characters", "source", "signed", "topic", "kind", "thumbs"},
            {
                "completion": "short",
                "source": "model",
                "rater_id": "ann",
                "topic": "football",
                "kind": "thumbs",
                "number": 0.0,
            },
        ),
        (
            {"prompt_characters", "prompt_asks", "prompt_digit_share", "word_bucket", "rating"},
            {
                "prompt": prompt_to_json(user_prompt("Photosynthesis 12345, please!")),
                "kind": "rating",
                "number": 1.0,
            },
        ),
    ],
)
def test_a_change_is_seen_in_its_feature(
    tmp_path: Path, features: set[str], changes: dict[str, Any]
) -> None:
    current = snapshot(300, 1, **changes)
    report = feedback_drift(current, snapshot(300, 2), html_path=tmp_path / "d.html")
    drifted = {name for name, feature in report.features.items() if feature.drifted}
    assert drifted == features | {"kind"}
    assert report.drifted


def test_psi_is_the_textbook_sum_over_shares(tmp_path: Path) -> None:
    current = snapshot(400, 1, topic=["green"] * 100 + ["black"] * 300)
    reference = snapshot(400, 2, topic=["green"] * 200 + ["black"] * 200)
    report = feedback_drift(current, reference, html_path=tmp_path / "d.html")
    by_hand = psi(np.array([0.25, 0.75]), np.array([0.5, 0.5]))
    assert by_hand == pytest.approx(0.2747, abs=1e-4)
    assert report.psi["topic"] == pytest.approx(by_hand)
    assert report.features["topic"].drifted
    calmer = feedback_drift(current, reference, threshold_psi=0.3, html_path=tmp_path / "d.html")
    assert not calmer.features["topic"].drifted


def test_scores_that_lie_close_together_are_told_apart(tmp_path: Path) -> None:
    spread = np.linspace(0, 1, 400)
    middle = np.where((spread > 0.1) & (spread < 0.9), 0.5, spread)  # the ends stay
    before, now = (
        snapshot(400, 1, kind="score", number=0.8 + places / 100_000) for places in (spread, middle)
    )
    assert feedback_drift(now, before, html_path=tmp_path / "d.html").features["score"].drifted


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "drift.html"
    feedback_drift(snapshot(50, 1), snapshot(50, 2), html_path=path)
    page = path.read_text()
    assert page.lstrip().startswith("<")
    for loading in ('src="http', "src='http", 'rel="stylesheet" href="http'):
        assert loading not in page


def test_a_topic_runs_nothing_on_the_page_and_is_found_there(tmp_path: Path) -> None:
    topic = 'é\\u003c"</script><script>alert(1)</script>'
    now, before = (snapshot(60, seed, topic=[topic, "<"] * 30) for seed in (1, 2))
    report = feedback_drift(now, before, html_path=tmp_path / "d.html")
    page = Path(report.html_path).read_text()
    assert "</script><script>alert" not in page
    assert page.count("<script") > 4  # its own
    assert names_any(page, [topic])
    assert not names_any(page, ["another"])


@pytest.mark.parametrize(("new", "old"), [(60, 60), (8, 3000), (60, 3000)])
def test_few_rows_differ_by_chance_and_are_not_called_drift(
    monkeypatch: pytest.MonkeyPatch, new: int, old: int
) -> None:
    monkeypatch.setattr(drift, "FEATURES", ("prompt_characters", "topic"))
    rng = np.random.default_rng(0)

    def unchanged(rows: int) -> pd.DataFrame:
        topic = rng.choice(list("abcdefghij"), rows, p=np.arange(1, 11) / 55)
        return pd.DataFrame({"prompt_characters": rng.lognormal(size=rows), "topic": topic})

    false_alarms = above_setting = 0
    for _ in range(60):
        now, before = drift._binned(unchanged(new), unchanged(old))
        for name in drift.FEATURES:
            words = sorted({*now[name], *before[name]})
            p, q = (
                np.array([max((side[name] == w).mean(), 1e-4) for w in words])
                for side in (now, before)
            )
            above_setting += psi(p, q) > 0.2
            false_alarms += psi(p, q) > drift._threshold(now, before, name, 0.2)
    if new == old:
        assert above_setting > 0  # what a fixed 0.2 would have called drift
    assert false_alarms <= 1


def test_a_few_new_votes_of_another_kind_are_seen_beside_a_long_history() -> None:
    before = snapshot(3000, 1)
    for feature, changes in (("topic", {"topic": "football"}), ("signed", {"rater_id": "ann"})):
        new = snapshot(60, 2, **changes)
        now, then = drift._binned(drift._features(new), drift._features(before))
        words = sorted({*now[feature], *then[feature]})
        p, q = (np.array([max((s[feature] == w).mean(), 1e-4) for w in words]) for s in (now, then))
        assert psi(p, q) > drift._threshold(now, then, feature, 0.2)


@pytest.mark.parametrize(("new", "old"), [(60, 1), (1, 60)])
def test_topics_that_none_had_before_are_a_change_however_many_they_are(
    tmp_path: Path, new: int, old: int
) -> None:
    before = snapshot(1200, 1, topic=[f"old {n % old}" for n in range(1200)])
    now = snapshot(200, 2, topic=[f"new {n % new}" for n in range(200)])
    found = feedback_drift(now, before, html_path=tmp_path / "d.html")
    assert found.features["topic"].drifted


def test_so_few_new_votes_that_nothing_can_be_told_are_told_as_that(tmp_path: Path) -> None:
    """Not as a PSI of 0, whatever they are."""
    before = snapshot(1000, 1, topic="green")
    new = snapshot(10, 2, topic="football", source="model")
    found = feedback_drift(new, before, html_path=tmp_path / "d.html")
    assert found.features == {}
    assert not found.drifted
    more = feedback_drift(snapshot(20, 2, topic="football"), before, html_path=tmp_path / "d.html")
    assert set(more.psi) == {"source", "prompt_asks", "prompt_digit_share"}  # the same in all


def test_what_a_better_champion_says_and_is_liked_for_is_no_drift(tmp_path: Path) -> None:
    page, better = tmp_path / "d.html", {"kind": "thumbs", "number": 1.0, "completion": "tea!"}
    before = snapshot(1200, 1, kind="thumbs", number=np.arange(1200) % 2.0)
    same = feedback_drift(snapshot(600, 2, **better), before, html_path=page)
    assert {n for n, f in same.features.items() if f.drifted} == {"completion_characters", "thumbs"}
    for version in (1, pd.NA):
        of_it = pd.Series([version] * 600, dtype="Int64")
        new = snapshot(600, 2, model_version=of_it, **better)
        other = feedback_drift(new, before, html_path=page)
        assert not other.drifted
        assert not {"completion_characters", "thumbs"} & set(other.features)
        asked = feedback_drift(new.assign(topic="football"), before, html_path=page)
        assert [n for n, f in asked.features.items() if f.drifted] == ["topic"]


def test_that_another_of_two_versions_has_most_votes_now_is_no_drift(tmp_path: Path) -> None:
    """As where an experiment's ramp has grown, or a champion was rolled back."""

    def votes(rows: int, seed: int, challenged: float) -> pd.DataFrame:
        rng = np.random.default_rng(seed)
        version = (rng.random(rows) < challenged).astype(int)
        said = [("tea!" if v else "A kettle, perhaps.") * 3 for v in version]
        up = (rng.random(rows) < np.where(version, 0.9, 0.5)).astype(float)
        on = pd.Series(version, dtype="Int64")
        return snapshot(rows, seed, kind="thumbs", number=up, completion=said, model_version=on)

    before = votes(2000, 1, 0.1)
    for challenged in (0.5, 0.95):
        found = feedback_drift(votes(800, 2, challenged), before, html_path=tmp_path / "d.html")
        assert not found.drifted
        assert {"completion_characters", "thumbs"} <= set(found.features)


def test_the_return_to_what_was_there_before_is_no_drift(tmp_path: Path) -> None:
    page = tmp_path / "d.html"
    usual, mob = snapshot(300, 1), snapshot(300, 2, topic="football")
    back = snapshot(300, 3)
    assert feedback_drift(back, mob, html_path=page).features["topic"].drifted
    found = feedback_drift(back, mob, earlier=usual, html_path=page)
    assert not found.drifted
    assert found.psi["topic"] == feedback_drift(back, usual, html_path=page).psi["topic"]
    third = feedback_drift(back.assign(topic="tea"), mob, earlier=usual, html_path=page)
    assert [name for name, f in third.features.items() if f.drifted] == ["topic"]
    rated = back.assign(kind="rating", number=1.0)  # which the earlier had none of
    calm = mob.assign(kind="rating", number=5.0, topic=usual["topic"])
    new = feedback_drift(rated, calm, earlier=usual, html_path=page)
    assert [name for name, f in new.features.items() if f.drifted] == ["rating"]


def test_new_votes_are_held_against_the_newest_before_them() -> None:
    before = snapshot(5000, 1)
    assert newest_of(before, 60)["seq"].min() == 4000
    assert newest_of(before, 3000)["seq"].min() == 2000
    assert len(newest_of(before, 9000)) == 5000


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValidationFailed, match="found 0 and 5"):
        feedback_drift(snapshot(0, 1), snapshot(5, 2), html_path=tmp_path / "d.html")


def test_large_snapshots_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "MOST_ROWS", 100)
    assert [len(drift._sampled(snapshot(n, 1))) for n in (400, 90)] == [100, 90]
    report = feedback_drift(snapshot(400, 1), snapshot(90, 2), html_path=tmp_path / "d.html")
    assert not report.drifted


def test_a_report_without_tests_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = drift._compare

    class Untested:
        def __init__(self, *arguments: Any) -> None:
            self.document = json.loads(compare(*arguments).json())

        def json(self) -> str:
            return json.dumps({**self.document, "tests": []})

    monkeypatch.setattr(drift, "_compare", Untested)
    with pytest.raises(ValidationFailed, match="passes whatever it saw"):
        feedback_drift(snapshot(30, 1), snapshot(30, 2), html_path=tmp_path / "d.html")
