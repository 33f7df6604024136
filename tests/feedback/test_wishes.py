"""What people wish for: one voice each, from the votes that count, and never far."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_pipeline import database as db
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.feedback.wishes import wished_shares
from rlhf_pipeline.records import Feedback, FeedbackKind, hash_rater, user_prompt
from rlhf_pipeline.reward.settings import FunctionSettings, Linear, Stepped, with_wishes


def vote(number: int, person: int | None, *wants: str) -> Feedback:
    return Feedback(
        agent_id="tea",
        kind=FeedbackKind.thumbs,
        idempotency_key=f"vote-{number}",
        prompt=user_prompt(f"question {number}"),
        completion="an answer",
        number=1.0,
        rater_id=None if person is None else hash_rater("tea", f"person {person}"),
        tags=("other", *(f"wants:{want}" for want in wants)),
    )


def frozen(folder: Path, votes: list[Feedback]) -> Path:
    store = FeedbackStore(db.open_database(f"sqlite:///{folder / 'feedback.db'}"))
    store.append(votes)
    path = folder / "feedback.parquet"
    snapshot.take(store.database, "tea", snapshot.newest_seq(store.database, "tea"), path)
    return path


def test_everybody_has_one_voice_and_the_newest_counts(tmp_path: Path) -> None:
    votes = [vote(i, i, "kinder") for i in range(8)]
    votes += [vote(100 + i, 0, "safer") for i in range(30)]  # one loud person, who changed
    votes += [vote(200 + i, i, "kinder", "shorter") for i in (8, 9)]
    votes += [vote(300 + i, None, "safer") for i in range(30)]  # signed by nobody
    votes += [vote(400 + i, i) for i in range(10)]  # ticked nothing this time: the wish stays
    shares = wished_shares(frozen(tmp_path, votes), lambda voter: True)
    assert shares == {"kinder": 0.9, "safer": 0.1, "shorter": 0.2}


def test_few_people_or_held_out_ones_move_nothing(tmp_path: Path) -> None:
    path = frozen(tmp_path, [vote(i, i, "kinder") for i in range(12)])
    assert wished_shares(path, lambda voter: True) == {"kinder": 1}
    assert wished_shares(path, lambda voter: False) == {}
    asked = iter([True] * 9 + [False] * 3)
    assert wished_shares(path, lambda voter: next(asked)) == {}


def test_votes_that_were_frozen_before_wishes_were_wish_for_nothing(tmp_path: Path) -> None:
    path = frozen(tmp_path, [vote(i, i, "kinder") for i in range(12)])
    snapshot.read(path).drop(columns="tags").to_parquet(path)
    assert wished_shares(path, lambda voter: True) == {}


def test_wishes_raise_weights_within_the_bound() -> None:
    functions = {
        "empathy": FunctionSettings(weight=Linear(0.2, 0.4, 5), wish="kinder"),
        "safety": FunctionSettings(weight=Stepped({0: 1.0}), wish="safer"),
        "length": FunctionSettings(weight=0.3),
    }
    moved = with_wishes(functions, {"kinder": 0.5, "shorter": 1.0}, 0.5)
    ramp = moved["empathy"].weight
    assert isinstance(ramp, Linear)
    assert [ramp.start, ramp.end] == pytest.approx([0.25, 0.5])
    assert ramp.updates == 5
    assert moved["safety"] == functions["safety"]
    assert moved["length"] == functions["length"]
