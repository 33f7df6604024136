"""Which rows of the store go and which never do, on both databases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline import old_rows
from rlhf_pipeline.config import KeptSettings, RetentionSettings
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import FeedbackRefused
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.feedback import raters
from rlhf_pipeline.feedback.rules import Rule
from rlhf_pipeline.feedback.store import FeedbackStore, _insert_events
from rlhf_pipeline.old_rows import RowKind
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    QuarantinedRow,
    hash_rater,
    now,
    user_prompt,
)
from rlhf_pipeline.serving import chat_events

TODAY = now()
ALL_OLD = KeptSettings(newest=0, days=30)


def said(key: str, days_ago: float = 99, **more: Any) -> Interaction:
    at = TODAY - timedelta(days=days_ago)
    return Interaction(key, "tea", user_prompt(key), "Yes.", 1, at, **more)


def vote(key: str, on: str, **more: Any) -> Feedback:
    told = {"kind": FeedbackKind.thumbs, "number": 1.0, "rater_id": "bob", **more}
    return Feedback(agent_id="tea", idempotency_key=key, interaction_id=on, **told)


@pytest.fixture
def store(any_database: Database) -> FeedbackStore:
    return FeedbackStore(any_database)


def left(store: FeedbackStore, column: sa.Column[Any] = db.interactions.c.interaction_id) -> Any:
    with store.database.read() as connection:
        return list(connection.execute(sa.select(column).order_by(column)).scalars())


def go(store: FeedbackStore, kind: RowKind, kept: KeptSettings = ALL_OLD, **more: Any) -> int:
    """Remove what goes of a kind, and find that as many were counted."""
    before = old_rows.bound(store.database, kind, "tea", kept, TODAY)
    if before is None:
        return 0
    without = more.get("without", ())
    counted = old_rows.count(store.database, kind, "tea", before, without)
    assert old_rows.remove(store.database, kind, "tea", before, **more) == counted
    return counted


def test_an_answer_that_anything_was_said_about_never_goes(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_rows, "PAGE", 2)
    monkeypatch.setattr(old_rows, "SOME", 1)
    told = [said(name) for name in ("judged", "one", "other", "shown", "two", "three")]
    store.add_interactions([*told, said("young", days_ago=29)])
    store.add_interactions([said("theirs"), said("elsewhere")])
    with store.database.write() as connection:
        i = db.interactions
        connection.execute(
            i.update().where(i.c.interaction_id == "elsewhere").values(agent_id="cocoa")
        )
    pair = {"kind": FeedbackKind.preference, "number": None, "choice": "left"}
    store.append([vote("1", "judged"), vote("2", "shown", other_interaction_id="other", **pair)])
    # As out of MLflow: with the prompt of the chat it is about, and no interaction's id.
    store.add_interactions([said("traced")])
    of_trace = {"prompt": user_prompt("traced"), "completion": "No.", "other_completion": "Yes."}
    traced: dict[str, Any] = {**pair, **of_trace, "rater_id": "bob", "origin": "mlflow"}
    store.append([Feedback(agent_id="tea", idempotency_key="4", **traced)])
    assert go(store, "chats", without={"theirs"}) == 3
    assert left(store) == ["elsewhere", "judged", "other", "shown", "theirs", "traced", "young"]
    with pytest.raises(FeedbackRefused, match="found no two; send both texts inline"):
        store.append([vote("3", "two")])
    assert store.append([vote("1", "judged")])[0].known


def test_the_newest_stay_however_old(store: FeedbackStore) -> None:
    store.add_interactions([said(f"{days}", days_ago=days) for days in (90, 91, 92, 93)])
    store.append([vote("1", "90")])  # the newest are counted whether or not anybody voted
    assert go(store, "chats", KeptSettings(newest=5, days=30)) == 0
    assert go(store, "chats", KeptSettings(newest=2, days=30)) == 2
    assert left(store) == ["90", "91"]


def test_a_vote_that_comes_while_rows_go_finds_its_answer(store: FeedbackStore) -> None:
    store.add_interactions([said("voted"), said("silent")])

    def somebody_votes() -> None:
        store.append([vote("1", "voted")])

    assert old_rows.remove(store.database, "chats", "tea", TODAY, (), somebody_votes) == 1
    assert left(store) == ["voted"]


def test_a_vote_that_is_being_stored_keeps_its_answer(store: FeedbackStore) -> None:
    """On PostgreSQL what another has not committed yet cannot be seen: it is waited for."""
    store.add_interactions([said("voted"), said("silent")])
    looked = threading.Event()
    gone: list[int] = []

    def remove() -> None:
        gone.append(old_rows.remove(store.database, "chats", "tea", TODAY, keep_going=looked.set))

    other = threading.Thread(target=remove)
    with store.database.write(alone=True) as connection:
        _insert_events(connection, [vote("1", "voted")])
        other.start()
        assert looked.wait(60)
        other.join(0.3)  # as long as it takes to do harm
    other.join(60)
    assert gone == [1]
    assert left(store) == ["voted"]


def test_an_erasure_finds_all_that_it_found_before(store: FeedbackStore) -> None:
    """What nobody signed is known as a person's by what they signed in the same session."""
    ann = hash_rater("tea", "ann")
    talk: dict[str, Any] = {"session_id": "s"}
    store.add_interactions(
        [said("signed", user_id=ann, **talk), said("unsigned", **talk), said("other", user_id=ann)]
    )
    store.append([vote("1", "unsigned")])
    person = raters.Person("tea", ann)
    assert go(store, "chats") == 1
    with store.database.read() as connection:
        assert raters.held(connection, person).interactions == {"signed", "unsigned"}
    with store.database.write() as connection:
        connection.execute(db.feedback.delete())
    assert [go(store, "chats"), go(store, "chats")] == [1, 1]  # the one that is known by it first
    assert left(store) == []


def test_a_running_experiment_keeps_its_answers(store: FeedbackStore) -> None:
    book = ExperimentBook(store.database)
    running = book.start("tea", champion=1, challenger=2, share=0.1, actor="ann")
    store.add_interactions(
        [said("a", experiment=running.experiment_id, arm="champion"), said("b", experiment="old")]
    )
    assert go(store, "chats") == 1
    book.end(running, "stopped", "enough")
    assert go(store, "chats") == 1


def test_of_experiments_that_ended_the_last_look_stays(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_rows, "SOME", 2)
    book = ExperimentBook(store.database)
    ids = []
    for days_ago in (90, 60, None):
        experiment = book.start("tea", champion=1, challenger=2, share=0.1, actor="ann")
        ids.append(experiment.experiment_id)
        for action in ("continue", "wait", "continue", "promote"):
            book.record(experiment, action, {"action": action})
        if days_ago is not None:
            book.end(experiment, "promoted", "better")
            e = db.experiments
            ended = e.update().where(e.c.experiment_id == experiment.experiment_id)
            with store.database.write() as connection:
                connection.execute(ended.values(ended_at=TODAY - timedelta(days=days_ago)))
    assert go(store, "looks", KeptSettings(newest=1, days=30)) == 3
    kept = [[look.look for look in book.looks(one)] for one in ids]
    assert kept == [[4], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert book.looks(ids[0])[0].verdict == {"action": "promote"}
    assert go(store, "looks") == 3
    assert len(book.history("tea")) == 3


def test_lines_that_somebody_dealt_with_go_and_what_would_come_back_stays(
    store: FeedbackStore,
) -> None:
    def bad(origin: str, **more: Any) -> QuarantinedRow:
        return QuarantinedRow("tea", Rule.broken_json, "no JSON", origin, **more)

    rows = {
        "line": bad("file", raw="{"),
        "stored": bad("file", feedback_id="id-1"),
        "mlflow": bad("mlflow", raw="key"),
    }
    store.quarantine(list(rows.values()))
    store.close_quarantined("tea")
    store.quarantine([bad("file", raw="[")])
    assert go(store, "quarantine", KeptSettings(newest=0, days=1)) == 0
    with store.database.write() as connection:
        closed = db.quarantine.update().where(db.quarantine.c.closed_at.is_not(None))
        connection.execute(closed.values(closed_at=TODAY - timedelta(days=90)))
    assert go(store, "quarantine", KeptSettings(newest=3, days=30)) == 0
    assert go(store, "quarantine") == 1
    assert store.quarantine([rows["stored"], rows["mlflow"]]) == 0
    assert sorted(raw for raw in left(store, db.quarantine.c.raw) if raw) == ["[", "key"]


def test_old_events_go(store: FeedbackStore) -> None:
    for number in range(4):
        chat_events.record(
            store.database, "tea", interaction_id=f"i{number}", arm="champion", rule="r", detail=""
        )
    with store.database.write() as connection:
        e = db.chat_events
        for number, days in enumerate((90, 80, 70)):
            old = e.update().where(e.c.interaction_id == f"i{number}")
            connection.execute(old.values(created_at=TODAY - timedelta(days=days)))
    assert go(store, "events", KeptSettings(newest=2, days=30)) == 2
    assert left(store, db.chat_events.c.interaction_id) == ["i2", "i3"]


@pytest.mark.parametrize("kind", old_rows.KINDS)
def test_what_goes_is_found_by_its_key(kind: RowKind, tmp_path: Path) -> None:
    """Nobody else can write while it is looked for: it must not be looked for among all."""
    database = Database(f"sqlite:///{tmp_path}/store.db")
    rows = [(1, 1), (2, 2)] if kind == "looks" else [(1,), (2,)]
    for _, still in old_rows._may_go(kind, "tea", TODAY):
        table = old_rows._TABLES[kind]
        delete = table.delete().where(old_rows._are(table, rows), *still)
        with database.read() as connection:
            text = delete.compile(connection, compile_kwargs={"literal_binds": True})
            plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]
        found = [line for line in plan if f" {table.name}" in line]  # SEARCH or SCAN
        by_key = ("sqlite_autoindex", "INTEGER PRIMARY KEY")
        assert found
        assert all(line.startswith("SEARCH") for line in found), plan
        assert all(any(key in line for key in by_key) for line in found), plan
    database.close()


def test_who_was_stopped_half_way_goes_on(
    store: FeedbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_rows, "SOME", 2)
    store.add_interactions([said(str(n)) for n in range(5)])
    times: Iterator[int] = iter(range(2))

    def stop_at_the_third() -> None:
        if next(times, None) is None:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        old_rows.remove(store.database, "chats", "tea", TODAY, keep_going=stop_at_the_third)
    assert len(left(store)) == 1
    assert go(store, "chats") == 1


def test_people_need_days_to_vote() -> None:
    with pytest.raises(ValueError, match=r"chats\.days must be 30 or more, found 7"):
        RetentionSettings(chats=KeptSettings(newest=1, days=7))
