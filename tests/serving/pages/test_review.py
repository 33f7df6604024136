"""What annotators are shown, and how their agreement is counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Feedback, FeedbackKind, Interaction, Source, user_prompt
from rlhf_pipeline.serving.pages import review
from rlhf_pipeline.serving.pages.desk import disagreement_of, said_so_far
from rlhf_pipeline.serving.pages.review import queue

START = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeedbackStore]:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    yield FeedbackStore(database)
    database.close()


def interaction(n: int, disagreement: float | None) -> Interaction:
    sampling = {} if disagreement is None else {"disagreement": disagreement}
    return Interaction(
        interaction_id=f"i{n}",
        agent_id="tea",
        prompt=user_prompt("hi"),
        completion=f"answer {n}",
        model_version=0,
        created_at=START + timedelta(minutes=n),
        sampling=sampling,
    )


def vote(
    store: FeedbackStore,
    n: int,
    rater: str,
    number: float,
    kind: str = "thumbs",
    source: Source = "human",
) -> None:
    store.append(
        [
            Feedback(
                agent_id="tea",
                kind=FeedbackKind(kind),
                idempotency_key=f"{n}{rater}{kind}",
                interaction_id=f"i{n}",
                number=number,
                rater_id=rater,
                source=source,
            )
        ]
    )


def test_the_queue_holds_uncertain_and_random_answers_not_judged_yet(store: FeedbackStore) -> None:
    store.ensure_agent("tea")
    store.add_interactions([interaction(n, n / 100 if n % 2 else None) for n in range(60)])
    ids = [one.interaction_id for one in queue(store.database, "tea", "ann", size=10)]
    assert len(ids) == len(set(ids)) == 10
    assert {"i59", "i57", "i55"} <= set(ids)  # the least sure of the newest
    assert set(ids) - {f"i{n}" for n in range(41, 60, 2)}  # and some from anywhere
    vote(store, 59, "ann", 1.0)
    assert "i59" not in [one.interaction_id for one in queue(store.database, "tea", "ann")]
    assert "i59" in [one.interaction_id for one in queue(store.database, "tea", "bob")]
    assert queue(store.database, "nobody", "ann") == []
    skipped = ["i58", "i57"]
    left = [queue(store.database, "tea", "bob", size=60, without=skipped) for _ in range(3)]
    assert not {one.interaction_id for some in left for one in some} & set(skipped)


def test_every_answer_is_as_likely_whatever_pauses_there_were(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FeedbackStore(any_database)
    months = timedelta(days=60)
    new = [replace(interaction(n, None), created_at=START + months) for n in range(20, 40)]
    store.add_interactions([*(interaction(n, None) for n in range(20)), *new])
    monkeypatch.setattr(review, "random", random.Random(0))
    drawn = [review._random(any_database, "tea", 10) for _ in range(20)]
    assert [len({one.interaction_id for one in some}) for some in drawn] == [10] * 20
    assert len({one.interaction_id for some in drawn for one in some}) == 40
    assert len(review._random(any_database, "tea", 99)) == 40
    monkeypatch.setattr(review, "AMONG", 20)
    drawn = [review._random(any_database, "tea", 10) for _ in range(20)]
    assert {one.interaction_id for some in drawn for one in some} == {
        f"i{n}" for n in range(20, 40)
    }


def test_who_has_judged_the_newest_gets_older_answers(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(review, "NEWEST", 3)
    monkeypatch.setattr(review, "AMONG", 3)
    store = FeedbackStore(any_database)
    blank = replace(interaction(4, None), completion=" \n")
    store.add_interactions([blank, *(interaction(n, None) for n in (0, 1, 2, 3, 5, 6, 7))])
    for n in (5, 6, 7, 2):
        vote(store, n, "ann", 1.0)
    store.append(  # of an answer that nobody here gave
        [
            Feedback(
                agent_id="tea",
                kind=FeedbackKind.thumbs,
                idempotency_key="elsewhere",
                prompt=user_prompt("hi"),
                completion="ho",
                number=1.0,
                rater_id="ann",
            )
        ]
    )

    def left(*without: str) -> list[str]:
        found = queue(any_database, "tea", "ann", size=2, without=without)
        return [one.interaction_id for one in found]

    assert left() == ["i3", "i1"]
    assert left("i3") == ["i1", "i0"]
    assert left("i3", "i1", "i0") == []


def test_answers_the_reward_models_heads_disagree_about_are_uncertain_too() -> None:
    """Each by its place among its own kind: scores have no common scale."""
    said: dict[str, dict[str, Any]] = {
        "drawn most": {"disagreement": 0.9},
        "drawn least": {"disagreement": 0.1},
        "heads most": {"disagreement": 0.5, "reward_disagreement": 70.0, "reward_model": "a"},
        "heads least": {"disagreement": 0.3, "reward_disagreement": 60.0, "reward_model": "a"},
        "other scale": {"disagreement": 0.2, "reward_disagreement": 0.1, "reward_model": "b"},
        "nothing": {},
    }
    some = [
        replace(interaction(n, None), completion=name, sampling=sampling)
        for n, (name, sampling) in enumerate(said.items())
    ]
    found = [one.completion for one in review.most_uncertain(some)]
    assert found == [
        "drawn most",  # above 4 of 5
        "heads most",  # above 3 of 5; and above 1 of 2
        "heads least",  # above 2 of 5
        "other scale",  # above 1 of 5
        "drawn least",
        "nothing",
    ]


def test_agreement_reads_the_votes_of_the_newest_answers(store: FeedbackStore) -> None:
    store.ensure_agent("tea")
    store.add_interactions([interaction(n, None) for n in range(3)])
    assert "no answer was judged by two" in review.agreement(store.database, "tea").words()
    vote(store, 0, "ann", 1.0)
    vote(store, 0, "bob", 5.0, "rating")
    vote(store, 1, "ann", 0.0)
    vote(store, 1, "bob", 3.0, "rating")  # the middle says neither
    vote(store, 2, "ann", 0.0)
    vote(store, 2, "bob", 1.0)
    vote(store, 0, "judge", 0.0, source="model")  # which is nobody
    found = review.agreement(store.database, "tea")
    assert (found.answers, found.alike) == (2, 0.5)
    assert "50% on 2 answers" in found.words()


def test_disagreement_is_the_distance_of_the_words() -> None:
    assert disagreement_of(["a b", "B a"]) == 0
    assert disagreement_of(["a b", "c d", "e"]) == 1
    assert disagreement_of(["a b", "b c"]) == pytest.approx(2 / 3)
    assert disagreement_of(["", ""]) == 0
    assert disagreement_of(["only one"]) == 0


def test_a_prompt_holds_the_conversation_and_a_question() -> None:
    prompt = said_so_far([("a", "b")], "c")
    assert [(m.role, m.content) for m in prompt] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    with pytest.raises(Exception, match="found an empty one"):
        said_so_far([], " ")
