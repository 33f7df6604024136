"""A day at the shop, into a real store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import FeedbackKind, Prompt, prompt_from_json
from rlhf_pipeline.simulation.people import population
from rlhf_pipeline.simulation.play import OTHER_KINDS, Day, play

PEOPLE = population(40, 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeedbackStore]:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    yield FeedbackStore(database)
    database.close()


def parrot(prompts: Sequence[Prompt]) -> list[str]:
    """Answer with the question and a number, so that no two are the same."""
    return [f"{prompt[-1].content} {n}" for n, prompt in enumerate(prompts)]


def a_day(store: FeedbackStore, answer: Any = parrot, **more: Any) -> Day:
    given: dict[str, Any] = {"model_version": 3, "events": 300, "pair_share": 0.45, "seed": 5}
    return play(store, "shop", answer, PEOPLE, **(given | more))


def test_a_day_brings_in_what_was_asked_for(store: FeedbackStore) -> None:
    told: list[Any] = []
    day = a_day(store, events=600, report=told.append)
    assert day.events == sum(day.by_kind.values()) == 600
    assert day.by_kind["preference"] == 270  # 45 %
    assert day.interactions == 600 + 270
    assert set(day.by_kind) == set(FeedbackKind)
    assert sum(store.counts("shop").values()) == 600  # each about a completion of its own
    assert [t["of"] for t in told] == [600] * len(told)
    assert told[-1]["events"] == 600
    assert abs(sum(OTHER_KINDS.values()) - 1) < 1e-9


def test_completions_are_kept_with_the_version_that_said_them(store: FeedbackStore) -> None:
    a_day(store)
    i, f = db.interactions.c, db.feedback.c
    with store.database.read() as connection:
        said = connection.execute(sa.select(i.model_version, i.completion, i.prompt)).all()
        votes = connection.execute(sa.select(f.voter, f.rater_id, f.interaction_id)).all()
    assert {row.model_version for row in said} == {3}
    for row in said:
        assert row.completion.startswith(prompt_from_json(row.prompt)[-1].content)
    assert all(vote.interaction_id and vote.rater_id == vote.voter for vote in votes)
    assert 30 < len({vote.voter for vote in votes}) <= 40


def test_the_same_seed_asks_the_same_and_another_day_asks_something_else(
    store: FeedbackStore,
) -> None:
    def asked(seed: int) -> list[str]:
        heard: list[str] = []

        def listen(prompts: Sequence[Prompt]) -> list[str]:
            heard.extend(prompt[-1].content for prompt in prompts)
            return parrot(prompts)

        a_day(store, listen, seed=seed, events=50)
        return heard

    first = asked(1)
    assert asked(1) == first
    assert asked(2) != first


def test_nobody_is_asked_to_choose_between_the_same_text_twice(store: FeedbackStore) -> None:
    day = a_day(store, lambda prompts: ["the same to everybody"] * len(prompts), pair_share=1.0)
    assert day.by_kind == {"thumbs": 300}


def test_both_completions_of_a_pair_answer_one_question(store: FeedbackStore) -> None:
    a_day(store, pair_share=1.0, events=60)
    this, other = db.interactions.alias("this"), db.interactions.alias("other")
    f = db.feedback.c
    with store.database.read() as connection:
        rows = connection.execute(
            sa.select(this.c.prompt, other.c.prompt.label("second")).select_from(
                db.feedback.join(this, this.c.interaction_id == f.interaction_id).join(
                    other, other.c.interaction_id == f.other_interaction_id
                )
            )
        ).all()
    assert len(rows) == 60
    assert all(row.prompt == row.second for row in rows)
