"""The store: once, acknowledged when synced, the last word counts, nothing lost to a kill."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from structlog.testing import capture_logs

from rlhf_pipeline import database as db
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import (
    ClaimLost,
    ConfigError,
    FeedbackError,
    FeedbackRefused,
    IdempotencyConflict,
)
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.export import events as events_of
from rlhf_pipeline.feedback.formats import event_of
from rlhf_pipeline.feedback.store import LONGEST_RAW, FeedbackStore, Opinion, Stored, target_of
from rlhf_pipeline.fence import writing_while
from rlhf_pipeline.overview import overview
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    Message,
    QuarantinedRow,
    hashed,
    now,
    prompt_to_json,
    user_prompt,
    uuid7,
)
from rlhf_pipeline.registry.ledger import PromotionLedger

THUMBS = Feedback(
    agent_id="tea",
    kind=FeedbackKind.thumbs,
    idempotency_key="one",
    prompt=user_prompt("Why?"),
    completion="Because.",
    number=1.0,
    rater_id="ann",
)


def vote(key: str, **changes: Any) -> Feedback:
    return replace(THUMBS, idempotency_key=key, **changes)


def interaction(**changes: Any) -> Interaction:
    given = Interaction(
        interaction_id=uuid7(),
        agent_id="tea",
        prompt=(Message("system", "Be brief."), Message("user", "Why?")),
        completion="Because.",
        model_version=3,
        created_at=now(),
        sampling={"temperature": 0.7},
        latency_seconds=0.25,
    )
    return replace(given, **changes)


@pytest.fixture
def store(any_database: Database) -> FeedbackStore:
    return FeedbackStore(any_database)


def stored_keys(store: FeedbackStore) -> list[str]:
    with store.database.read() as connection:
        query = sa.select(db.feedback.c.idempotency_key).order_by(db.feedback.c.seq)
        return list(connection.execute(query).scalars())


def effective(store: FeedbackStore) -> list[tuple[str, float | None]]:
    e = db.effective_feedback.c
    with store.database.read() as connection:
        rows = connection.execute(sa.select(e.idempotency_key, e.number).order_by(e.seq))
        return [(row.idempotency_key, row.number) for row in rows]


# -- once ---------------------------------------------------------------------------------------


def test_a_retry_is_answered_with_the_same_id(store: FeedbackStore) -> None:
    first = store.append([THUMBS])
    again = store.append([THUMBS, vote("two", rater_id="bob")])
    assert not first[0].known
    assert (again[0].feedback_id, again[0].known) == (first[0].feedback_id, True)
    assert not again[1].known
    assert stored_keys(store) == ["one", "two"]


def test_who_listens_hears_of_a_vote_once(tmp_path: Path) -> None:
    heard: list[str] = []
    database = Database(f"sqlite:///{tmp_path}/store.db")
    store = FeedbackStore(database, on_stored=lambda event: heard.append(event.idempotency_key))
    store.append([THUMBS, THUMBS])
    store.append([THUMBS, vote("two", rater_id="bob")])
    assert heard == ["one", "two"]
    database.close()


def test_a_key_sent_twice_in_one_batch_is_stored_once(store: FeedbackStore) -> None:
    answers = store.append([THUMBS, THUMBS])
    assert [answer.known for answer in answers] == [False, True]
    assert answers[0].feedback_id == answers[1].feedback_id


def test_a_key_with_another_body_is_refused_and_the_rest_is_stored(store: FeedbackStore) -> None:
    store.append([THUMBS])
    with pytest.raises(IdempotencyConflict, match="'one' was used before for another body"):
        store.append([vote("two"), vote("one", number=0.0), vote("three", rater_id="bob")])
    assert stored_keys(store) == ["one", "two", "three"]


@pytest.mark.parametrize("together", [True, False])
def test_topic_and_time_are_part_of_what_a_key_was_used_for(
    store: FeedbackStore, together: bool
) -> None:
    then, later = datetime(2024, 1, 1, tzinfo=UTC), datetime(2025, 1, 1, tzinfo=UTC)
    timed = vote("timed", topic="prices", occurred_at=then)
    bare = vote("bare", rater_id="bob")
    refused: list[str] = []

    def hear(event: Feedback, error: FeedbackError) -> None:
        assert isinstance(error, IdempotencyConflict)
        refused.append(event.idempotency_key)

    first = [] if together else store.append([timed, bare])
    changed = [
        replace(timed, topic="opening hours"),
        replace(timed, topic=None),
        replace(timed, occurred_at=later),
        replace(timed, occurred_at=None),
        replace(bare, topic="prices"),
        replace(bare, occurred_at=then),
    ]
    there = datetime(2024, 1, 1, 5, 30, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    again = [timed, bare, replace(timed, occurred_at=there)]
    answers = store.append([timed, bare, *changed, *again], on_refused=hear)
    assert refused == ["timed"] * 4 + ["bare"] * 2
    assert all(answer.known for answer in answers[2:])
    one, two = (answer.feedback_id for answer in first or answers[:2])
    assert [answer.feedback_id for answer in answers] == [one, two, one, two, one]
    assert stored_keys(store) == ["timed", "bare"]


def test_no_moment_is_taken_that_postgresql_gives_back_as_none(postgres_url: str) -> None:
    """A server tells moments in its own zone, where it may be the year 10,000 or one before 1."""
    zone = "Pacific/Kiritimati"  # 14 hours before UTC, and in the year 1 as many after it as Hawaii
    database = Database(postgres_url)
    with database.engine.begin() as connection:
        name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET timezone = '{zone}'")
    database.close()  # the next session has it
    store, said = FeedbackStore(database), {"kind": "thumbs", "value": 1, "prompt": "Why?"}
    taken: list[Feedback] = []
    for told in (
        "0001-12-31T23:59Z",
        "0002-01-01T00:00Z",
        "9998-12-31T23:59Z",
        "9999-01-01T00:00Z",
    ):
        row = {**said, "completion": "So.", "occurred_at": told, "idempotency_key": told[:4]}
        with suppress(FeedbackRefused):
            taken.append(event_of(row, "tea", "api"))
    first = store.append(taken)
    assert [one.feedback_id for one in store.append(taken)] == [one.feedback_id for one in first]
    assert [event.idempotency_key for event in taken] == ["0002", "9998"]
    database.close()


def test_what_is_refused_can_be_handed_over_instead(store: FeedbackStore) -> None:
    refused: list[tuple[str, str]] = []

    def hear(event: Feedback, error: FeedbackError) -> None:
        refused.append((event.idempotency_key, type(error).__name__))

    lost = replace(THUMBS, prompt=None, completion=None, interaction_id="nobody-saw-it")
    answers = store.append(
        [THUMBS, vote("one", number=0.0), replace(lost, idempotency_key="lost"), vote("four")],
        on_refused=hear,
    )
    assert len(answers) == 2
    assert refused == [("one", "IdempotencyConflict"), ("lost", "FeedbackRefused")]
    assert stored_keys(store) == ["one", "four"]


def test_agents_do_not_share_keys(store: FeedbackStore) -> None:
    answers = store.append([THUMBS, replace(THUMBS, agent_id="coffee", number=0.0)])
    assert [answer.known for answer in answers] == [False, False]
    assert store.agents() == ["coffee", "tea"]


# -- effective votes ----------------------------------------------------------------------------


def test_the_last_word_counts_and_the_history_stays(store: FeedbackStore) -> None:
    store.append([THUMBS])
    store.append([vote("two", number=0.0)])
    store.append([vote("three", number=1.0)])
    assert stored_keys(store) == ["one", "two", "three"]
    assert effective(store) == [("three", 1.0)]
    assert store.counts("tea") == {"thumbs": 1}


def test_raters_targets_and_kinds_are_separate_votes(store: FeedbackStore) -> None:
    events = [
        THUMBS,
        vote("rater", rater_id="bob"),
        vote("completion", completion="Who knows."),
        vote("prompt", prompt=user_prompt("How?")),
        vote("kind", kind=FeedbackKind.rating, number=4.0),
        vote("agent", agent_id="coffee"),
    ]
    store.append(events)
    assert [key for key, _ in effective(store)] == [event.idempotency_key for event in events]
    assert store.counts("tea") == {"rating": 1, "thumbs": 4}


def test_answers_are_liked_or_not_or_neither_as_most_votes_have_it(store: FeedbackStore) -> None:
    store.append([THUMBS, vote("two", rater_id="bob", number=0.0)])
    store.append([vote("mind", number=0.0)])  # ann's, who liked it first
    for answer, ups, downs in (("good", 3, 1), ("either", 2, 2), ("bad", 0, 1)):
        store.append(
            [
                vote(f"{answer} {n}", rater_id=f"{n}", completion=answer, number=float(n < ups))
                for n in range(ups + downs)
            ]
        )
    for kind, numbers in (
        (FeedbackKind.rating, (1.0, 2.0, 3.0, 4.0, 5.0, 5.0)),
        (FeedbackKind.score, (0.0, 0.5, 0.51)),
    ):
        store.append(
            [
                vote(f"{kind} {i}", completion=f"answer {i}", kind=kind, number=n)
                for i, n in enumerate(numbers)
            ]
        )
    store.append([vote("elsewhere", agent_id="coffee")])
    assert store.sides("tea") == {"rating": (3, 2), "score": (1, 1), "thumbs": (1, 2)}
    assert store.sides("milk") == {}


def test_preferences_that_prefer_neither_are_ties(store: FeedbackStore) -> None:
    store.append(
        [
            vote(
                f"{agent} {choice}",
                agent_id=agent,
                kind=FeedbackKind.preference,
                number=None,
                choice=choice,
                other_completion="Who knows.",
                rater_id=choice,
            )
            for agent in ("tea", "coffee")
            for choice in ("left", "right", "tie", "both_bad")
        ]
    )
    assert store.ties("tea") == 2
    assert store.ties("milk") == 0


@pytest.mark.parametrize("least", [1e-200, -1e-200, 5e-324])
def test_a_score_too_small_to_be_squared_is_part_of_an_opinion(
    store: FeedbackStore, least: float
) -> None:
    score = FeedbackKind.score
    for rater, number in (("ann", 0.5), ("bob", least)):
        store.append([vote(rater, rater_id=rater, kind=score, number=number)])
    assert store.opinion("tea") == Opinion(2, 0.25, 0.25)


def test_votes_are_counted_by_who_gave_them_where_few_did(store: FeedbackStore) -> None:
    store.append([THUMBS, vote("again", completion="Another."), vote("bob's", rater_id="bob")])
    store.append([vote("mind", number=0.0)])  # ann's first, once more
    store.append([vote("unsigned", rater_id=None), vote("unsigned too", rater_id=None)])
    store.append([vote("stars", kind=FeedbackKind.rating, number=4.0)])
    found = store.votes_by_voter("tea", ["thumbs"], most=4)
    assert found is not None
    assert sorted(found.values()) == [1, 1, 1, 2]
    assert store.votes_by_voter("tea", ["thumbs"], most=3) is None
    assert store.votes_by_voter("tea", ["criteria"], most=3) == {}


def test_ranking_one_over_two_others_is_two_votes(store: FeedbackStore) -> None:
    better = vote("a", kind=FeedbackKind.preference, number=None, choice="left")
    store.append(
        [
            replace(better, other_completion="B", idempotency_key="ab"),
            replace(better, other_completion="C", idempotency_key="ac"),
            replace(better, other_completion="B", idempotency_key="ab again", choice="right"),
        ]
    )
    assert [key for key, _ in effective(store)] == ["ac", "ab again"]


def ranked(key: str, this: str, other: str, choice: str, **changes: Any) -> Feedback:
    """Return a preference between two texts, or two interactions named by their ids."""
    sides: dict[str, Any] = {"completion": this, "other_completion": other}
    if this.startswith("i-"):
        sides = {"prompt": None, "completion": None}
        sides |= {"interaction_id": this, "other_interaction_id": other}
    said = {"kind": FeedbackKind.preference, "number": None, "choice": choice}
    return vote(key, **{**said, **sides, **changes})


@pytest.mark.parametrize(("a", "b"), [("A", "B"), ("i-a", "i-b")])
def test_a_pair_is_the_same_whichever_side_is_named_first(
    store: FeedbackStore, a: str, b: str
) -> None:
    store.add_interactions([interaction(interaction_id=one, completion=one) for one in (a, b)])
    store.append(
        [
            ranked("prefers a", a, b, "left"),
            ranked("now b", b, a, "left"),
            ranked("a once", a, b, "left", rater_id="bob"),
            ranked("a again", b, a, "right", rater_id="bob"),
            ranked("unsigned", a, b, "left", rater_id=None),
            ranked("another unsigned", b, a, "left", rater_id=None),
            ranked("with itself", a, a, "tie"),
        ]
    )
    kept = ["now b", "a again", "unsigned", "another unsigned", "with itself"]
    assert [key for key, _ in effective(store)] == kept


def test_pairs_with_prompts_of_their_own_are_the_same_the_other_way_round(
    store: FeedbackStore,
) -> None:
    how, why = user_prompt("How?"), user_prompt("Why?")
    store.append(
        [
            ranked("first", "A", "B", "left", prompt=why, other_prompt=how),
            ranked("turned", "B", "A", "left", prompt=how, other_prompt=why),
            ranked("another pair", "A", "B", "left", prompt=how, other_prompt=why),
        ]
    )
    assert [key for key, _ in effective(store)] == ["turned", "another pair"]


def test_no_vote_goes_into_a_store_that_a_newer_release_has_migrated(store: FeedbackStore) -> None:
    """As a service does that goes on while another one with the next release has begun."""
    store.append([vote("before")])
    with store.database.write() as connection:
        was = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with capture_logs() as logs:
        with pytest.raises(sa.exc.OperationalError, match=f"{was}, found it at 9999, .* end this"):
            store.append([vote("meanwhile")])
        with pytest.raises(sa.exc.OperationalError, match="newer release"):
            store.quarantine([QuarantinedRow("tea", "broken_json", "no JSON", "votes.jsonl")])
    assert [line["log_level"] for line in logs] == ["error"]  # once, however often it is asked
    store.ensure_agent("coffee")  # a training that is under way comes to its end
    assert (stored_keys(store), store.quarantined("tea")) == (["before"], {})
    with store.database.write() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{was}'")
    assert not store.append([vote("meanwhile")])[0].known  # sent again, it is a new one


def test_pairs_stored_in_the_order_they_were_named_become_one(any_database: Database) -> None:
    """As a store of before had them: the target told which side was named first."""
    store, ask = FeedbackStore(any_database), prompt_to_json(user_prompt("Why?"))
    store.add_interactions([interaction(interaction_id=one) for one in ("i-a", "i-b")])
    a, b = (hashed("tea", ask, text) for text in "AB")
    how = hashed("tea", prompt_to_json(user_prompt("How?")), "B")
    named = {
        "ann a": (ranked("ann a", "A", "B", "left"), hashed(a, b)),
        "ann b": (ranked("ann b", "B", "A", "left"), hashed(b, a)),
        "bob": (ranked("bob", "A", "B", "left", rater_id="bob"), hashed(a, b)),
        "cat": (ranked("cat", "B", "A", "left", rater_id="cat"), hashed(b, a)),
        "dan": (ranked("dan", "i-b", "i-a", "left", rater_id="dan"), hashed("i-b", "i-a")),
        "dan too": (ranked("dan too", "i-a", "i-b", "left", rater_id="dan"), hashed("i-a", "i-b")),
        "how": (ranked("how", "A", "B", "tie", other_prompt=user_prompt("How?")), hashed(a, how)),
        "erased": (ranked("erased", "B", "A", "left", rater_id="eve"), hashed(b, a)),
        "thumbs": (vote("thumbs", completion="A"), a),
    }
    store.append([event for event, _ in named.values()])
    f = db.feedback
    with any_database.write() as connection:
        for key, (_, target) in named.items():
            changed = f.update().where(f.c.idempotency_key == key)
            connection.execute(changed.values(target=target))
        erased = f.update().where(f.c.idempotency_key == "erased")
        connection.execute(erased.values(erased_at=now()))
        # The schema of then, where the test database has the newest one.
        for index in (
            "ix_interactions_experiment_created",
            "ix_interactions_person",
            "ix_feedback_other_interaction",
            "ix_feedback_from_mlflow",
            "ix_feedback_erased",
        ):
            connection.exec_driver_sql(f"DROP INDEX {index}")
        connection.exec_driver_sql(
            "CREATE INDEX ix_interactions_experiment ON interactions (experiment)"
        )
        connection.exec_driver_sql("ALTER TABLE experiments DROP COLUMN began_under")
        connection.exec_driver_sql("ALTER TABLE quarantine DROP COLUMN closed_at")
        connection.exec_driver_sql("DROP TABLE erased_keys")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0004'")
    whole = [key for key in named if key != "erased"]
    assert [key for key, _ in effective(store)] == whole  # both ways round counted

    again = Database(any_database.url.render_as_string(hide_password=False))
    store = FeedbackStore(again)
    assert stored_keys(store) == list(named)  # every vote is still there
    once = ["ann b", "bob", "cat", "dan too", "how", "thumbs"]
    assert [key for key, _ in effective(store)] == once
    with again.read() as connection:
        rows = connection.execute(sa.select(f.c.idempotency_key, f.c.target))
        targets = {row.idempotency_key: row.target for row in rows}
    unchanged = {"erased": hashed(b, a), "thumbs": a}
    assert targets == {key: target_of(event) for key, (event, _) in named.items()} | unchanged
    store.append([ranked("cat too", "A", "B", "left", rater_id="cat")])
    assert "cat" not in [key for key, _ in effective(store)]
    again.close()


def test_what_a_machine_says_replaces_no_persons_vote_whoever_it_is_named_with(
    any_database: Database,
) -> None:
    """A judge's verdicts, sent with the name of the person whose chat it judged."""
    store, ann = FeedbackStore(any_database), "ann"
    store.append(
        [
            vote("ann's", number=0.0, rater_id=ann),
            vote("a judge's", number=1.0, rater_id=ann, source="model"),
            vote("a check's", number=1.0, rater_id=ann, source="code"),
        ]
    )
    every = [("ann's", 0.0), ("a judge's", 1.0), ("a check's", 1.0)]
    assert effective(store) == every
    f = db.feedback
    with any_database.write() as connection:  # as a store of before had them
        connection.execute(f.update().values(voter=f.c.rater_id))
        connection.exec_driver_sql("DROP INDEX ix_feedback_erased")
        connection.exec_driver_sql("ALTER TABLE experiments DROP COLUMN began_under")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0009'")
    assert effective(store) == every[2:]
    again = Database(any_database.url.render_as_string(hide_password=False))
    store = FeedbackStore(again)
    assert stored_keys(store) == [key for key, _ in every]  # which migrates
    assert effective(store) == every
    store.append([vote("anew", number=0.0, rater_id=ann, source="model")])
    assert effective(store) == [every[0], every[2], ("anew", 0.0)]
    again.close()


def test_who_does_not_sign_is_somebody_else_each_time(store: FeedbackStore) -> None:
    store.append([vote(f"key {i}", rater_id=None) for i in range(5)])
    assert store.counts("tea") == {"thumbs": 5}
    with store.database.read() as connection:
        voters = list(connection.execute(sa.select(db.feedback.c.voter)).scalars())
    assert len(set(voters)) == 5
    assert all(voter.startswith("anonymous:") for voter in voters)


# -- interactions and agents --------------------------------------------------------------------


def test_a_vote_that_is_withdrawn_counts_until_then(store: FeedbackStore, tmp_path: Path) -> None:
    store.append([vote("one"), vote("two", rater_id=None)])
    [kept] = store.append([vote("three", rater_id="bob")])
    then = snapshot.newest_seq(store.database, "tea")
    before = snapshot.fingerprint(store.database, "tea", then)
    assert store.withdraw("tea", ["one", "two", "unheard of"]) == (2, 0)
    assert store.withdraw("tea", ["one", "two"]) == (0, 0)  # nothing is left of them
    assert store.counts("tea") == {"thumbs": 1}
    assert store.new_since("tea", then).votes == 0
    assert store.arrived("tea", then, 1) is None
    assert [store.new_since("tea", 0, most=most).votes for most in (None, 9)] == [1, 1]
    assert store.arrived("tea", 0, 1) == store.received_at(kept.feedback_id)
    assert store.arrived("tea", 0, 2) is None
    told = overview(store, PromotionLedger(store.database), "tea").votes
    assert (told.counted, told.voters) == (3, 2)  # as they were received
    newest = snapshot.newest_seq(store.database, "tea")
    taken = snapshot.take(store.database, "tea", newest, tmp_path / "votes.parquet")
    assert taken.rows == 1
    assert snapshot.fingerprint(store.database, "tea", then) == before
    store.append([vote("four")])  # they may say something else
    assert store.counts("tea") == {"thumbs": 2}
    assert store.new_since("tea", 0).votes == 2


def test_whether_votes_were_taken_back_is_known_of_those_up_to_a_number(
    any_database: Database,
) -> None:
    store = FeedbackStore(any_database)
    store.append([vote("one", origin="votes.csv"), vote("two", rater_id="bob", origin="mlflow")])
    seen = snapshot.newest_seq(any_database, "tea")
    store.append([vote("three", rater_id="cat", origin="late.csv"), vote("four", rater_id="dan")])
    store.append([vote("anew", rater_id="dan", origin="late.csv")])  # a change of mind
    store.withdraw("tea", ["two", *store.keys_from("tea", "late.csv")])
    assert not store.withdrawn_from("tea", seen)
    assert store.withdrawn_from("tea", seen + 1)
    store.withdraw("tea", ["one"])
    newest = snapshot.newest_seq(any_database, "tea")
    store.append([vote("one", number=0.0, origin="votes.csv")])
    found = [store.withdrawn_from("tea", number) for number in (0, seen, newest, newest + 1)]
    assert found == [False, True, False, False]
    assert not store.withdrawn_from("coffee", seen)
    assert store.new_since("tea", 0).votes == 2  # dan's first counts again


def test_rows_of_a_vote_taken_back_count_when_they_come_in_again(store: FeedbackStore) -> None:
    raters = {"one": "a" * 32, "two": None, "three": "b" * 32}
    rows = [vote(key, rater_id=who, origin="votes.csv") for key, who in raters.items()]
    first = store.append(rows)
    then = snapshot.newest_seq(store.database, "tea")
    before = snapshot.fingerprint(store.database, "tea", then)
    for number in (0.0, 1.0):  # read otherwise, then as it was; a second time as well
        store.withdraw("tea", ["one", "two"])
        again = store.append([replace(row, number=number) for row in rows[:2]] + rows[2:])
        assert [one.known for one in again] == [False, False, True]
        assert again[2] == Stored(first[2].feedback_id, known=True)  # nobody took it back
        assert effective(store) == [("three", 1.0), ("one", number), ("two", number)]
    assert store.append(rows) == [Stored(one.feedback_id, known=True) for one in again]
    assert snapshot.fingerprint(store.database, "tea", then) == before
    history = list(events_of(store.database, "tea", history=True))
    assert sum(row["idempotency_key"].startswith(db.RETIRED) for row in history) == 4
    read = [event_of(row, "tea", "out.jsonl") for row in history]
    assert all(one.known for one in store.append(read))  # what is history stays it


def test_a_request_sent_again_after_its_vote_was_taken_back_stays_known(
    store: FeedbackStore,
) -> None:
    first = store.append([vote("one"), vote("two", origin="mlflow", rater_id="bob")])
    store.withdraw("tea", ["one", "two"])
    again = store.append([vote("one"), vote("two", origin="mlflow", rater_id="bob")])
    assert again == [Stored(one.feedback_id, known=True) for one in first]
    assert effective(store) == []


def test_what_mlflow_names_nobody_for_stays_what_an_earlier_release_took_it_for(
    store: FeedbackStore,
) -> None:
    said = vote("mlflow:tr-1:2", origin="mlflow")
    first = store.append([said])
    unsigned = replace(said, rater_id=None)
    assert store.append([unsigned]) == [Stored(first[0].feedback_id, known=True)]
    with pytest.raises(IdempotencyConflict):
        store.append([replace(unsigned, number=0.0)])
    with pytest.raises(IdempotencyConflict):
        store.append([replace(unsigned, origin="api")])


def test_what_a_vote_taken_back_had_replaced_counts_again(any_database: Database) -> None:
    store = FeedbackStore(any_database)
    asked = vote("asked")
    [first] = store.append([asked])
    early = vote("early", number=0.0, origin="early.csv")
    store.append([vote("bobs", rater_id="bob")])
    store.append([early, vote("again", number=0.25, origin="early.csv")])
    store.append([vote("late", number=0.5, origin="late.csv"), vote("other", rater_id="cat")])
    then = snapshot.newest_seq(any_database, "tea")
    before = snapshot.fingerprint(any_database, "tea", then)
    others = [("bobs", 1.0), ("other", 1.0)]

    def withdraw(origin: str) -> tuple[int, int]:
        return store.withdraw("tea", store.keys_from("tea", origin))

    assert withdraw("late.csv") == (1, 1)
    assert effective(store) == [*others, ("again", 0.25)]
    assert withdraw("early.csv") == (1, 1)  # with all that it said
    assert effective(store) == [*others, ("asked", 1.0)]
    [known] = store.append([asked])  # sent again
    assert known.known
    assert known.feedback_id != first.feedback_id
    assert store.new_since("tea", then).votes == 1
    assert snapshot.fingerprint(any_database, "tea", then) == before

    otherwise = replace(early, number=0.75)  # the file comes again, read by other names
    assert [one.known for one in store.append([otherwise])] == [False]
    assert effective(store) == [*others, ("early", 0.75)]
    assert store.withdraw("tea", ["asked", "early"]) == (1, 0)
    assert effective(store) == others
    assert withdraw("early.csv") == (0, 0)


def test_what_was_taken_back_before_counts_no_more(store: FeedbackStore) -> None:
    store.append([vote("one", origin="one.csv")])
    store.withdraw("tea", ["one"])
    store.append([vote("two", origin="two.csv")])
    assert store.withdraw("tea", ["two"]) == (1, 0)
    store.append([vote("said", origin="mlflow"), vote("three", origin="three.csv")])
    assert store.withdraw("tea", ["three"]) == (1, 1)
    assert store.withdraw("tea", ["said"]) == (1, 0)
    assert effective(store) == []


def test_a_vote_counts_again_whose_file_comes_after_what_replaced_it_was_taken_back(
    store: FeedbackStore,
) -> None:
    early, late = vote("early", origin="votes.csv"), vote("late", number=0.0, origin="votes.csv")
    store.append([early, late])
    assert [one.known for one in store.append([early])] == [True]
    store.withdraw("tea", ["early", "late"])
    assert effective(store) == []
    assert [one.known for one in store.append([early])] == [False]
    assert effective(store) == [("early", 1.0)]
    store.withdraw("tea", ["early"])
    store.append([vote("last", number=0.0)])
    assert effective(store) == [("last", 0.0)]
    store.append([late])
    store.append([early, early])
    assert effective(store) == [("early", 1.0)]  # of votes on one thing that which came in last


def test_an_interaction_comes_back_as_it_was_said(store: FeedbackStore) -> None:
    said = interaction(session_id="s", user_id="u", experiment="e", arm="a")
    store.add_interactions([said])
    store.add_interactions([replace(said, completion="Something else.")])  # known: left alone
    assert store.interaction(said.interaction_id) == said
    assert store.interaction("nobody") is None


def test_interactions_sent_again_beside_new_ones_are_stored_once(store: FeedbackStore) -> None:
    said = [interaction(completion=str(n)) for n in range(6)]
    store.add_interactions(said[1::2])
    store.add_interactions(list(reversed(said)))
    assert [store.interaction(one.interaction_id) for one in said] == said


def test_a_vote_about_an_unknown_interaction_is_refused(store: FeedbackStore) -> None:
    said, others = interaction(), interaction(agent_id="coffee")
    store.add_interactions([said, others])
    bare = replace(THUMBS, prompt=None, completion=None)
    store.append([replace(bare, interaction_id=said.interaction_id)])
    for unknown in ("nobody-saw-it", others.interaction_id):
        with pytest.raises(FeedbackRefused, match="send both texts inline") as caught:
            store.append([replace(bare, idempotency_key="two", interaction_id=unknown)])
        assert caught.value.rule == "unknown_interaction"
    preference = replace(
        bare,
        kind=FeedbackKind.preference,
        idempotency_key="three",
        number=None,
        choice="tie",
        interaction_id=said.interaction_id,
        other_interaction_id="nobody-saw-it",
    )
    with pytest.raises(FeedbackRefused, match="found no nobody-saw-it"):
        store.append([preference])
    assert stored_keys(store) == ["one"]


def test_many_may_make_one_agent_known_at_once(store: FeedbackStore) -> None:
    store.database.migrate()
    start = threading.Barrier(12)

    def ensure(_: int) -> None:
        start.wait()
        store.ensure_agent("tea")

    for _ in range(5):
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(ensure, range(12)))
        assert store.agents() == ["tea"]
        with store.database.write() as connection:
            connection.execute(db.agents.delete())


def test_a_vote_is_stored_though_another_makes_its_agent_known_first(postgres_url: str) -> None:
    """Embedded, one writes at a time; on PostgreSQL another may be through in between."""
    ours, others = Database(postgres_url), Database(postgres_url)

    def come_first(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("INSERT INTO agents"):
            FeedbackStore(others).ensure_agent("tea", recipe="tiny")

    sa.event.listen(ours.engine, "before_cursor_execute", come_first)
    [stored] = FeedbackStore(ours).append([vote("one")])
    assert isinstance(stored, Stored)
    row = FeedbackStore(ours).agent("tea")
    assert row is not None
    assert row.recipe == "tiny"
    ours.close()
    others.close()


def test_agents_keep_their_settings(store: FeedbackStore) -> None:
    store.ensure_agent("tea", recipe="tiny")
    store.ensure_agent("tea", recipe="gpt2")
    store.set_agent("tea", automatic_promotion=True, paused_reason="rest")
    row = store.agent("tea")
    assert row is not None
    assert (row.recipe, row.automatic_promotion, row.paused_reason) == ("tiny", True, "rest")
    assert store.agent("coffee") is None
    with pytest.raises(FeedbackRefused, match="'coffee' is not known; known: tea"):
        store.set_agent("coffee", paused_reason="rest")
    store.set_agent("tea", paused_reason="caf\udce9 \x00")  # as a terminal that speaks Latin-1 says
    row = store.agent("tea")
    assert row is not None
    assert row.paused_reason == "caf\\udce9 \\x00"
    with pytest.raises(ConfigError, match=r"found 'caf\\udce9.yaml'; rename"):
        store.set_agent("tea", recipe="caf\udce9.yaml")


# -- quarantine ---------------------------------------------------------------------------------


def test_the_same_dirt_is_set_aside_once(store: FeedbackStore) -> None:
    row = QuarantinedRow("tea", "broken_json", "needed JSON", "a.jsonl", 3, raw="{")
    moved = replace(row, origin="b.jsonl", line=9)
    other = replace(row, raw="[")
    assert store.quarantine([row, moved, other]) == 2
    assert store.quarantine([row]) == 0
    assert store.quarantine([replace(row, agent_id="coffee")]) == 1
    assert store.quarantined("tea") == {"broken_json": 2}


def test_a_vote_set_aside_for_another_word_than_before_says_so(store: FeedbackStore) -> None:
    [stored] = store.append([vote("key")])
    row = QuarantinedRow("tea", "narrow_support", "zib", "api", feedback_id=stored.feedback_id)
    assert store.quarantine([row]) == 1
    assert store.quarantine([replace(row, detail="moon")]) == 0
    assert [found.detail for found in store.quarantined_rows("tea")] == ["moon"]


def test_nothing_is_set_aside_by_a_run_whose_claim_was_taken_over(store: FeedbackStore) -> None:
    claims = ClaimBook(store.database)
    token = claims.claim("tea", "f" * 64, 1, holder="late", asked_by="person").token
    with writing_while(partial(claims.check, token)):
        assert store.quarantine([QuarantinedRow("tea", "empty_prompt", "", "api")]) == 1
        claims.finish(token, "failed", "its lease ran out")
        with pytest.raises(ClaimLost):
            store.quarantine([QuarantinedRow("tea", "empty_completion", "", "api")])
    assert store.quarantined("tea") == {"empty_prompt": 1}


@pytest.mark.parametrize("rule", ["damaged_file", "line_too_long"])
def test_damage_of_another_place_is_other_damage(store: FeedbackStore, rule: str) -> None:
    row = QuarantinedRow("tea", rule, "needed the end", "a.jsonl", 3, raw="{")
    assert store.quarantine([row, replace(row, origin="b.jsonl"), replace(row, line=4)]) == 3
    assert store.quarantine([row]) == 0


def test_votes_leave_quarantine_where_nothing_is_wrong_with_them_any_more(
    store: FeedbackStore,
) -> None:
    ids = [stored.feedback_id for stored in store.append([vote(f"key {n}") for n in range(4)])]
    aside = [QuarantinedRow("tea", "narrow_support", "", "api", feedback_id=key) for key in ids]
    line = QuarantinedRow("tea", "broken_json", "", "a.jsonl", 3, raw="{")
    store.quarantine([*aside, line])
    assert store.close_quarantined("tea", rule="broken_json") == 1
    watermark = store.new_since("tea", 0).newest_seq
    late = [stored.feedback_id for stored in store.append([vote("later")])]
    store.quarantine([QuarantinedRow("tea", "duplicate", "", "api", feedback_id=late[0])])
    still, other = aside[0], replace(aside[1], rule="duplicate")
    assert store.close_quarantined("tea", rule="narrow_support") == 4
    assert store.release("tea", watermark, [still, other]) == 3
    assert store.quarantine([still, other]) == 1
    # The first is dealt with and stays so, the second waits for another reason.
    assert store.quarantined("tea") == {"duplicate": 2}
    assert store.release("coffee", watermark, []) == 0


def test_two_who_meet_the_same_dirt_at_once_set_it_aside_once(postgres_url: str) -> None:
    rows = [QuarantinedRow("tea", "broken_json", "", "a.jsonl", n, raw=f"{n}") for n in range(300)]
    stores = [FeedbackStore(Database(postgres_url)) for _ in range(2)]
    together = threading.Barrier(2)

    def set_aside(store: FeedbackStore) -> int:
        together.wait()
        return store.quarantine(rows)

    with ThreadPoolExecutor(2) as threads:
        assert sum(threads.map(set_aside, stores)) == 300
    for store in stores:
        store.database.close()


def test_any_bytes_can_be_set_aside(store: FeedbackStore) -> None:
    raw = "\ud800 \x00 " + "x" * (2 * LONGEST_RAW)
    assert store.quarantine([QuarantinedRow("tea", "bad_text", raw, "\udcff.jsonl", raw=raw)]) == 1
    with store.database.read() as connection:
        row = connection.execute(db.quarantine.select()).one()
    assert row.raw.startswith("\\ud800 \\x00 xxx")
    assert "characters" in row.raw
    assert len(row.raw) < LONGEST_RAW + 50


@pytest.mark.parametrize("raw", ["{", '{"rater": "ann"', "x" * LONGEST_RAW])
def test_a_line_that_is_not_too_long_is_kept_whole(store: FeedbackStore, raw: str) -> None:
    row = QuarantinedRow("tea", "broken_json", "needed JSON", "a.jsonl", 3, raw=raw)
    store.quarantine([row])
    assert store.quarantined_rows("tea") == [row]


# -- many at once -------------------------------------------------------------------------------


def test_eight_threads_are_each_acknowledged_once(store: FeedbackStore) -> None:
    def send(thread: int) -> list[str]:
        ids = []
        for number in range(10):
            mine = vote(f"{thread}-{number}", rater_id=f"rater {thread}", completion=str(number))
            shared = vote(f"shared-{number}", rater_id="all", completion=str(number))
            ids += [answer.feedback_id for answer in store.append([mine, shared])]
        return ids

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(8)))
    assert sorted(stored_keys(store)) == sorted(
        [f"{t}-{n}" for t in range(8) for n in range(10)] + [f"shared-{n}" for n in range(10)]
    )
    assert len({feedback_id for ids in answers for feedback_id in ids}) == 90
    assert len({tuple(ids[1::2]) for ids in answers}) == 1  # the shared ones: one id for all


def test_who_waits_for_a_commit_shares_the_next(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    store, commits = FeedbackStore(database), list[object]()
    database.migrate()
    sa.event.listen(database.engine, "commit", commits.append)
    blocker = sqlite3.connect(tmp_path / "feedback.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(store.append, [vote(str(n), rater_id=str(n))]) for n in range(8)]
        while store.waiting < 7:  # one leads and waits for the lock, seven stand behind
            time.sleep(0.01)
        blocker.execute("COMMIT")
        assert not any(answer.result()[0].known for answer in waiting)
    assert len(commits) == 2
    assert len(stored_keys(store)) == 8
    blocker.close()
    database.close()


def test_answers_that_end_together_share_a_commit(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    store, commits = FeedbackStore(database), list[object]()
    store.ensure_agent("tea")
    sa.event.listen(database.engine, "commit", commits.append)
    said = [interaction(completion=f"answer {n}") for n in range(6)]
    blocker = sqlite3.connect(tmp_path / "feedback.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(7) as threads:
        waiting = [threads.submit(store.add_interactions, said[:1])]
        while not store._answers._leader.locked() or store._answers.waiting:
            time.sleep(0.01)
        waiting += [threads.submit(store.add_interactions, [one]) for one in said[1:]]
        again = replace(said[5], completion="Something else.")  # a retry in the same commit
        while store._answers.waiting < 5:
            time.sleep(0.01)
        waiting.append(threads.submit(store.add_interactions, [again]))
        while store._answers.waiting < 6:
            time.sleep(0.01)
        blocker.execute("COMMIT")
        for one in waiting:
            one.result()
    assert len(commits) == 2
    assert [store.interaction(one.interaction_id) for one in said] == said
    blocker.close()
    database.close()


def test_one_callers_unfit_row_is_nobody_elses_trouble(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    store = FeedbackStore(database)
    database.migrate()
    blocker = sqlite3.connect(tmp_path / "feedback.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(store.append, [vote("first")])
        while not store._votes._leader.locked() or store.waiting:
            time.sleep(0.01)
        good = [threads.submit(store.append, [vote(f"good {n}")]) for n in range(2)]
        unfit = threads.submit(store.append, [vote("unfit", completion="\ud800")])
        while store.waiting < 3:
            time.sleep(0.01)
        blocker.execute("COMMIT")
        for answer in (first, *good):
            assert not answer.result()[0].known
        with pytest.raises(UnicodeEncodeError):
            unfit.result()
    assert len(stored_keys(store)) == 3
    blocker.close()
    database.close()


def test_all_who_wait_hear_that_the_database_is_gone(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/state/feedback.db")
    store = FeedbackStore(database)
    store.append([THUMBS])
    with database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE feedback RENAME TO gone")
    with pytest.raises(sa.exc.OperationalError):
        store.append([vote("two")])
    with database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE gone RENAME TO feedback")
    assert not store.append([vote("two")])[0].known  # and the next one is served
    database.close()


# -- cost ---------------------------------------------------------------------------------------


def statements_of_new_since(store: FeedbackStore, watermark: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []

    def keep(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        found.append((statement, parameters))

    engine = store.database.engine
    sa.event.listen(engine, "before_cursor_execute", keep)
    store.new_since("tea", watermark)
    sa.event.remove(engine, "before_cursor_execute", keep)
    return [(s, p) for s, p in found if "feedback" in s]


def steps_of_new_since(path: Path, old: int) -> int:
    """Return how many steps SQLite's machine takes to count 5 new votes among `old` others."""
    database = Database(f"sqlite:///{path}")
    store = FeedbackStore(database)
    for start in range(0, old, 2000):
        store.append([vote(str(n), completion=str(n)) for n in range(start, start + 2000)])
    watermark = snapshot.newest_seq(database, "tea")
    store.append([vote(f"new {n}", completion=f"new {n}") for n in range(5)])
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    with database.read() as connection:
        raw: Any = connection.connection.driver_connection
        raw.set_progress_handler(count, 1)
        for statement, parameters in statements_of_new_since(store, watermark):
            connection.exec_driver_sql(statement, parameters).all()
        raw.set_progress_handler(None, 0)
    assert store.new_since("tea", watermark).votes == 5
    database.close()
    return steps


def test_looking_for_what_is_new_costs_what_is_new(tmp_path: Path) -> None:
    few, many = (steps_of_new_since(tmp_path / f"{n}.db", n) for n in (2000, 20_000))
    assert many < few + 50  # a level more of the tree, not ten times the rows


def test_looking_for_what_is_new_searches_by_number(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    store = FeedbackStore(database)
    store.append([vote(str(n), completion=str(n)) for n in range(3000)])
    plans = []
    for _ in ("as it is", "with statistics"):
        for statement, parameters in statements_of_new_since(store, 2990):
            with database.read() as connection:
                rows = connection.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)
                plans += [row[3] for row in rows if " feedback " in f"{row[3]} "]
        with database.write() as connection:
            connection.exec_driver_sql("ANALYZE")
    assert len(plans) == 6
    assert sum("ix_feedback_erased" in plan for plan in plans) == 2
    for plan in plans:
        assert "agent_id=? AND seq>?" in plan or "rowid>?" in plan
    database.close()


def test_what_is_new_is_counted_by_vote_not_by_event(store: FeedbackStore) -> None:
    store.append([THUMBS])
    watermark = snapshot.newest_seq(store.database, "tea")
    nothing = store.new_since("tea", watermark)
    assert (nothing.votes, nothing.newest_seq, nothing.newest_received_at) == (0, watermark, None)
    store.append([vote("two", number=0.0), vote("three"), vote("four", rater_id="bob")])
    store.append([vote("other", agent_id="coffee")])
    store.append([vote("five", kind=FeedbackKind.comment, number=None, text="Thanks.")])
    new = store.new_since("tea", watermark)
    assert new.votes == 2  # a comment trains nothing
    assert new.newest_seq == snapshot.newest_seq(store.database, "tea")
    assert store.arrived("tea", watermark, 2) is not None
    assert store.arrived("tea", watermark, 3) is None  # one is the same again
    assert [store.new_since("tea", watermark, most=n).votes for n in (1, 2, 3)] == [1, 2, 2]
    assert new.newest_received_at is not None
    assert abs((now() - new.newest_received_at).total_seconds()) < 60


# -- a killed process ---------------------------------------------------------------------------

WRITER = """
import os, sys, threading
from dataclasses import replace
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Feedback, FeedbackKind, user_prompt

store = FeedbackStore(Database(sys.argv[1]))
event = Feedback("tea", FeedbackKind.thumbs, "", prompt=user_prompt("Why?"), completion="x",
                 number=1.0)

def write(thread):
    for number in range(100_000):
        key = f"{sys.argv[2]}-{thread}-{number}"
        answer, = store.append([replace(event, idempotency_key=key)])
        os.write(1, f"{key} {answer.feedback_id}\\n".encode())  # only what was acknowledged

for thread in range(3):
    threading.Thread(target=write, args=(thread,)).start()
"""


def kill_in_the_middle(url: str, name: str, acknowledgements: int) -> dict[str, str]:
    """Start a writer, kill it -9 after some acknowledgements; return those: key -> id."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITER, url, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(acknowledgements)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()  # written before the kill, so acknowledged as well
    assert process.returncode == -signal.SIGKILL
    whole = [line.decode().split() for line in lines if line.endswith(b"\n")]
    return dict(whole)


def check_after_kills(url: str, kills: int) -> None:
    rng, acknowledged = random.Random(kills), dict[str, str]()
    for number in range(kills):
        acknowledged |= kill_in_the_middle(url, str(number), rng.randint(5, 60))
    database = Database(url)
    store = FeedbackStore(database)
    with database.read() as connection:
        f = db.feedback.c
        rows = connection.execute(sa.select(f.idempotency_key, f.feedback_id)).all()
        if database.is_sqlite:
            check = connection.exec_driver_sql("PRAGMA integrity_check").scalar_one()
            assert check == "ok"
    stored = {row.idempotency_key: row.feedback_id for row in rows}
    assert len(stored) == len(rows)  # none twice
    assert acknowledged.items() <= stored.items()  # none lost
    sample = sorted(stored)[:50]
    again = store.append(
        [vote(key, rater_id=None, completion="x", prompt=user_prompt("Why?")) for key in sample]
    )
    assert [answer.feedback_id for answer in again] == [stored[key] for key in sample]
    database.close()


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    check_after_kills(f"sqlite:///{tmp_path}/feedback.db", 1)


@pytest.mark.slow
def test_twenty_killed_writers_lose_nothing_they_acknowledged(tmp_path: Path) -> None:
    check_after_kills(f"sqlite:///{tmp_path}/feedback.db", 20)


def test_a_killed_writer_loses_nothing_on_postgresql(postgres_url: str) -> None:
    check_after_kills(postgres_url, 1)


# -- every order of events ----------------------------------------------------------------------

RATERS = st.sampled_from(["ann", "bob", None])
COMPLETIONS = st.sampled_from(["A", "B"])
KINDS = st.sampled_from([FeedbackKind.thumbs, FeedbackKind.rating])


class Votes(RuleBasedStateMachine):
    """The store against a dictionary: last vote per (rater, completion, kind), each key once."""

    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.store = FeedbackStore(Database("sqlite://"))
        self.ids: dict[str, str] = {}
        self.last: dict[tuple[str, str, str], float] = {}

    @rule(target=sent, rater=RATERS, completion=COMPLETIONS, kind=KINDS, number=st.integers(0, 1))
    def somebody_votes(
        self, rater: str | None, completion: str, kind: FeedbackKind, number: int
    ) -> Feedback:
        key = f"key {len(self.ids)}"
        event = vote(key, rater_id=rater, completion=completion, kind=kind, number=1.0 + number)
        (answer,) = self.store.append([event])
        assert not answer.known
        self.ids[key] = answer.feedback_id
        self.last[rater or key, completion, kind.value] = 1.0 + number
        return event

    @rule(event=sent)
    def a_sender_tries_again(self, event: Feedback) -> None:
        (answer,) = self.store.append([event])
        assert answer.known
        assert answer.feedback_id == self.ids[event.idempotency_key]

    @rule(event=sent)
    def a_sender_uses_a_key_for_something_else(self, event: Feedback) -> None:
        with pytest.raises(IdempotencyConflict):
            self.store.append([replace(event, number=9.0)])

    @invariant()
    def the_last_word_counts(self) -> None:
        e = db.effective_feedback.c
        with self.store.database.read() as connection:
            rows = connection.execute(
                sa.select(e.idempotency_key, e.rater_id, e.completion, e.kind, e.number)
            ).all()
        found = {(r.rater_id or r.idempotency_key, r.completion, r.kind): r.number for r in rows}
        assert len(found) == len(rows)
        assert found == self.last
        assert self.store.new_since("tea", 0).votes == len(self.last)
        assert sum(self.store.counts("tea").values()) == len(self.last)

    def teardown(self) -> None:
        self.store.database.close()


Votes.TestCase.settings = settings(max_examples=15, stateful_step_count=25)
TestVotes = Votes.TestCase
