"""Answers of an experiment are read once, and count as if all were read at every look."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from rlhf_pipeline import database as db
from rlhf_pipeline.database import Database
from rlhf_pipeline.experiment import live
from rlhf_pipeline.experiment.book import Experiment
from rlhf_pipeline.feedback import raters
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.raters import Person
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    hash_rater,
    now,
    user_prompt,
    uuid7,
)
from tests.experiment.world import AGENT, SETTINGS, begin, meet

LATER = live.SETTLED + timedelta(minutes=1)


@pytest.fixture
def store(any_database: Database) -> FeedbackStore:
    found = FeedbackStore(any_database)
    found.ensure_agent(AGENT)
    return found


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything that is stored now be settled."""
    monkeypatch.setattr(live, "now", lambda: now() + LATER)


def read_anew(store: FeedbackStore, experiment: Experiment) -> object:
    live._KEPT.clear()
    return live.measured(store.database, experiment, SETTINGS)


def answer(
    experiment: Experiment, user: str, *, at: datetime | None = None, fell_back: bool = False
) -> Interaction:
    return Interaction(
        interaction_id=uuid7(),
        agent_id=AGENT,
        prompt=user_prompt("what now?"),
        completion="I can't say." if fell_back else "this and that",
        model_version=experiment.challenger,
        created_at=at or now() - timedelta(seconds=1),
        user_id=user,
        experiment=experiment.experiment_id,
        arm="challenger",
        sampling={"challenger_share": experiment.share, "fell_back": fell_back},
    )


@pytest.mark.parametrize("seed", range(4))
def test_what_was_counted_for_good_and_what_came_since_are_as_all_read_anew(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    _, experiment = begin(store, 0.3)
    for step in range(6):
        if rng.random() < 0.3:
            experiment = replace(experiment, share=experiment.share + 0.1)
        users = range(rng.randrange(40), rng.randrange(80, 130))
        meet(store, experiment, users, likes=(0.5, 0.7), fallbacks=0.2, seed=step)
        passed = rng.choice([timedelta(0), LATER])
        monkeypatch.setattr(live, "now", lambda passed=passed: now() + passed)
        found = live.measured(store.database, experiment, SETTINGS)
        kept = dict(live._KEPT)
        assert found == read_anew(store, experiment)
        live._KEPT.update(kept)  # go on from what was counted step by step
    assert found[0]["feedback_rate"].challenger.users > 10


@pytest.mark.usefixtures("later")
def test_an_answer_is_read_once(store: FeedbackStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _, experiment = begin(store, 0.5)
    meet(store, experiment, range(30), likes=(0.5, 0.5), silent=True)
    before = live.measured(store.database, experiment, SETTINGS)
    read: list[object] = []
    rows_of = live._rows

    def watched(*given: Any) -> Generator[Any]:
        for row in rows_of(*given):
            read.append(row)
            yield row

    monkeypatch.setattr(live, "_rows", watched)
    assert live.measured(store.database, experiment, SETTINGS) == before
    assert read == []
    store.add_interactions([answer(experiment, "new")])
    arms, _ = live.measured(store.database, experiment, SETTINGS)
    assert len(read) == 1
    assert arms["length"].challenger.users == before[0]["length"].challenger.users + 1


def test_a_young_answer_is_not_passed_over_though_a_younger_one_was_stored_first(
    store: FeedbackStore,
) -> None:
    _, experiment = begin(store, 0.5)
    store.add_interactions([answer(experiment, "ann")])
    live.measured(store.database, experiment, SETTINGS)
    late = answer(experiment, "bob", at=now() - live.SETTLED / 2)
    store.add_interactions([late])
    arms, _ = live.measured(store.database, experiment, SETTINGS)
    assert arms["length"].challenger.users == 2


def test_an_answer_of_a_machine_whose_clock_is_behind_is_not_passed_over(
    store: FeedbackStore,
) -> None:
    _, experiment = begin(store, 0.5)
    store.add_interactions([answer(experiment, "ann", at=now() - live.CLOCKS_APART / 2)])
    live.measured(store.database, experiment, SETTINGS)
    store.add_interactions([answer(experiment, "bob", at=now() - live.CLOCKS_APART)])
    arms, _ = live.measured(store.database, experiment, SETTINGS)
    assert arms["length"].challenger.users == 2


def test_what_comes_after_a_clock_was_set_back_is_not_passed_over(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, experiment = begin(store, 0.5)
    store.add_interactions([answer(experiment, "ann")])
    with monkeypatch.context() as ahead:
        ahead.setattr(live, "now", lambda: now() + LATER)
        live.measured(store.database, experiment, SETTINGS)
    store.add_interactions([answer(experiment, "bob", at=now() - live.SETTLED / 2)])
    for behind in (timedelta(0), LATER):  # and nothing is counted twice once its time has come
        monkeypatch.setattr(live, "now", lambda behind=behind: now() + behind)
        arms, _ = live.measured(store.database, experiment, SETTINGS)
        assert arms["length"].challenger.users == 2
        assert arms["length"].champion.users == 0


def test_votes_from_before_an_experiment_are_not_looked_at(store: FeedbackStore) -> None:
    _, experiment = begin(store, 0.5)
    assert list(live._votes(store.database, experiment)) == []
    before, said = answer(experiment, "ann"), answer(experiment, "ann")
    store.add_interactions([replace(before, experiment=None), said])
    for n, one in enumerate((before, said, before, said)):
        likes = Feedback(
            AGENT, FeedbackKind.thumbs, f"{n}", interaction_id=one.interaction_id, number=1.0
        )
        store.append([replace(likes, rater_id=f"rater-{n}")])
    # Whatever clocks say: one that was set back dates them before the experiment.
    with store.database.write() as connection:
        moved = db.feedback.update().where(db.feedback.c.seq >= 2)
        connection.execute(moved.values(received_at=experiment.started_at - LATER))
    assert live._first_vote(store.database, experiment) == 2
    assert [vote.rater_id for vote in live._votes(store.database, experiment)] == [
        "rater-1",
        "rater-3",
    ]


@pytest.mark.usefixtures("later")
def test_a_tick_counts_so_many_and_the_next_goes_on(store: FeedbackStore) -> None:
    _, experiment = begin(store, 0.5)
    at = now() - timedelta(hours=1)
    moments = [0, 1, 1, 1, 2, 3]  # three at one moment are counted together
    store.add_interactions(
        [
            answer(experiment, f"user-{n}", at=at + timedelta(seconds=s))
            for n, s in enumerate(moments)
        ]
    )

    def tick() -> tuple[bool, int]:
        done = live.catch_up(store.database, experiment, SETTINGS, most=2)
        return done, len(live._kept(store.database, experiment, SETTINGS).people)

    assert [tick() for _ in range(3)] == [(False, 4), (True, 6), (True, 6)]
    found = live.measured(store.database, experiment, SETTINGS)
    assert found == read_anew(store, experiment)


@pytest.mark.usefixtures("later")
def test_a_rule_that_changes_and_an_erasure_count_all_anew(store: FeedbackStore) -> None:
    _, experiment = begin(store, 0.5)
    ann = hash_rater(AGENT, "ann")
    said = [answer(experiment, ann, fell_back=True), answer(experiment, "bob")]
    store.add_interactions(said)
    arms, _ = live.measured(store.database, experiment, SETTINGS)
    assert arms["fallbacks"].challenger.mean == arms["refusals"].challenger.mean == 0.5
    assert arms["length"].challenger.mean == pytest.approx(3 / SETTINGS.long_words)
    short = SETTINGS.model_copy(update={"long_words": 6})
    arms, _ = live.measured(store.database, experiment, short)
    assert arms["length"].challenger.mean == 0.5
    assert arms["length"].challenger.users == 2
    met = {"challenger_share": experiment.share, "network": "office"}
    more = [replace(answer(experiment, user), sampling=met) for user in ("cid", "dot")]
    store.add_interactions(more)
    for most, people in ((1, 3), (None, 4)):
        rule = short.model_copy(update={"people_per_network": most})
        arms, _ = live.measured(store.database, experiment, rule)
        assert arms["length"].challenger.users == people

    person, claims = Person(AGENT, ann), ClaimBook(store.database)
    token = claims.claim(AGENT, "erasure", 0, holder="erasure", asked_by="erasure").token
    with store.database.read() as connection:
        held = raters.held(connection, person)
    raters.remove(store.database, person, held, token, counts={}, snapshots=(), versions=())
    arms, _ = live.measured(store.database, experiment, short)
    assert arms["fallbacks"].challenger.users == 2
    assert arms["fallbacks"].challenger.mean == 0


def test_a_refusal_is_one_with_any_apostrophe() -> None:
    refusals = ["I can't say.", "I can’t say.", "I am sorry, no.", "I’m unable to.", "I cannot."]
    assert all(map(live.refuses, refusals))
    assert not any(map(live.refuses, ["I can say.", "Sorry to hear that!", "I am not sure."]))
