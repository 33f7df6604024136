"""Votes taken out of a snapshot's folder: what is left is what the other votes give, in all."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from rlhf_pipeline import stages
from rlhf_pipeline.feedback import datasets, snapshot
from rlhf_pipeline.feedback.datasets import split_of, unit_interval
from rlhf_pipeline.feedback.snapshot import VALIDATED
from rlhf_pipeline.feedback.withdrawn import clean_folder, said_by
from rlhf_pipeline.records import (
    EvaluationPrompt,
    PreferencePair,
    Prompt,
    RewardExample,
    SftExample,
    Split,
    prompt_to_json,
    user_prompt,
)

UNDER: dict[str, Any] = {"evaluation_share": 0.3, "min_rating": 4}


def row(n: int, question: str, chance: random.Random) -> dict[str, Any]:
    """Return one of all sorts of votes on a question."""
    kind = chance.choice(["thumbs", "rating", "preference", "correction", "comment"])
    return {
        "feedback_id": f"id-{n}",
        "kind": kind,
        "voter": f"voter-{n % 7}",
        "origin": f"file-{n % 3}",
        "prompt": prompt_to_json(user_prompt(question)),
        "other_prompt": None,
        "completion": chance.choice("ABC"),
        "other_completion": "D" if kind == "preference" else None,
        "number": {"thumbs": 1.0, "rating": 5.0}.get(kind),
        "criteria": None,
        "text": f"better {chance.choice('AB')}" if kind == "correction" else None,
        "choice": chance.choice(["left", "right", "tie"]) if kind == "preference" else None,
        "shown_first": "this",
        "topic": chance.choice([None, f"topic {n % 4}"]),
    }


def made(folder: Path, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Write a snapshot's folder as a turn leaves it; return its votes."""
    frame = pd.DataFrame(rows).astype({"number": "float64"})
    for name in (snapshot.FILE, VALIDATED):
        frame.to_parquet(folder / name)
    built = datasets.build(frame, **UNDER)
    datasets.write_jsonl(folder / stages.PAIRS, built.preference_pairs)
    datasets.write_jsonl(folder / stages.EXAMPLES, built.reward_examples)
    datasets.write_jsonl(folder / stages.SFT_EXAMPLES, built.sft_examples)
    datasets.write_jsonl(folder / stages.PROMPTS, built.evaluation_prompts)
    return frame


def split_by_letters(prompt: Prompt, evaluation_share: float) -> Split:
    """Return the split that a release before this one gave a prompt."""
    held_out = unit_interval("by letters", prompt_to_json(prompt)) < evaluation_share
    return "evaluation" if held_out else "train"


@pytest.mark.parametrize("release", ["this", "older"])
@pytest.mark.parametrize("seed", range(5))
def test_data_sets_are_what_the_other_votes_give(
    seed: int, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    rows = [row(n, f"question {chance.randrange(12)}?", chance) for n in range(60)]
    if release == "older":
        monkeypatch.setattr(datasets, "split_of", split_by_letters)
    frame = made(tmp_path, rows)
    gone = {f"id-{n}" for n in chance.sample(range(60), 15)}
    with monkeypatch.context() as now:
        now.setattr(datasets, "split_of", split_of)
        assert clean_folder(tmp_path, gone, min_rating=4) >= 3
    left = frame[~frame["feedback_id"].isin(list(gone))].reset_index(drop=True)
    wanted = datasets.build(left, **UNDER)
    files = (stages.PAIRS, stages.EXAMPLES, stages.SFT_EXAMPLES, stages.PROMPTS)
    kinds = (PreferencePair, RewardExample, SftExample, EvaluationPrompt)
    sets = (
        wanted.preference_pairs,
        wanted.reward_examples,
        wanted.sft_examples,
        wanted.evaluation_prompts,
    )
    for name, kind, records in zip(files, kinds, sets, strict=True):
        found = datasets.read_jsonl(tmp_path / name, kind)
        assert sorted(map(str, found)) == sorted(map(str, records)), name
    for name in (snapshot.FILE, VALIDATED):
        assert list(snapshot.read(tmp_path / name)["feedback_id"]) == list(left["feedback_id"])
        [*columns] = pq.read_metadata(tmp_path / name).row_group(0).to_dict()["columns"]
        assert {column["compression"] for column in columns} == {"ZSTD"}  # `made` packs as before


def test_data_sets_of_an_older_release_are_cleaned_beside_those_of_this_one(tmp_path: Path) -> None:
    chance = random.Random(0)
    made(tmp_path, [row(n, f"question {n}?", chance) for n in range(20)])
    for packed in tmp_path.glob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    (tmp_path / stages.EXAMPLES).unlink()
    gone = {f"id-{n}" for n in range(20)}
    clean_folder(tmp_path, gone, min_rating=4)
    left = {path.name: path for path in tmp_path.glob("*.jsonl*")}
    assert len(left) == 7
    for path in left.values():
        with datasets.reading(path) as lines:
            assert lines.read() == ""


@pytest.mark.parametrize("seed", range(5))
def test_what_goes_is_told_apart_from_what_others_said_too(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    rows = [row(n, f"question {chance.randrange(30)}?", chance) for n in range(60)]
    made(tmp_path, rows)
    gone = {f"id-{n}" for n in chance.sample(range(60), 15)}
    said = said_by(tmp_path, gone)
    assert said is not None
    theirs, others = (
        [r for r in rows if (r["feedback_id"] in gone) is one] for one in (True, False)
    )
    assert said.prompts == {r["prompt"] for r in theirs} - {r["prompt"] for r in others}
    assert said.shared == {r["topic"] for r in others if r["topic"]}
    assert said.topics == {r["topic"] for r in theirs if r["topic"]} - said.shared
    named = ("completion", "other_completion", "text")
    texts = sorted(r[name].lower() for r in theirs for name in named if r[name])
    assert sorted(text.strip() for text in said.texts) == texts
    assert said_by(tmp_path, {"nobody's"}) is None


def test_taking_votes_out_holds_the_rows_beside_them_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)
    made(tmp_path, [row(n, f"question {n // 2}?", chance) for n in range(2000)])
    held = []
    build = datasets.build

    def counted(frame: pd.DataFrame, **under: Any) -> datasets.Datasets:
        held.append(len(frame))
        return build(frame, **under)

    monkeypatch.setattr(datasets, "build", counted)
    clean_folder(tmp_path, {"id-4", "id-600"}, min_rating=4)
    assert held == [2, 2]  # the other vote on either question
