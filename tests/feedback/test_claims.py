"""Claims: one at a time, taken over when stale, and what the old holder writes is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import ClaimLost, ClaimRefused
from rlhf_pipeline.feedback import raters
from rlhf_pipeline.feedback.claims import AHEAD, LEASE, NO_TRAINING, Claim, ClaimBook, check_token


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.at = datetime(2026, 3, 1, 2, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.at

    def passes(self, time: timedelta) -> None:
        self.at += time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(any_database: Database, clock: Clock) -> ClaimBook:
    return ClaimBook(any_database, clock=clock)


def claim(book: ClaimBook, mark: str = "votes", holder: str = "run-1", **more: Any) -> Claim:
    return book.claim("tea", mark, 10, holder=holder, asked_by="sensor", **more)


def test_a_claim_says_who_holds_what(book: ClaimBook, clock: Clock) -> None:
    made = claim(book)
    assert (made.agent_id, made.fingerprint, made.watermark) == ("tea", "votes", 10)
    assert (made.state, made.attempt, made.holder, made.asked_by) == ("held", 1, "run-1", "sensor")
    assert made.created_at == made.heartbeat_at == clock.at
    assert made.expires_at == clock.at + LEASE
    assert book.held("tea") == book.of_holder("run-1") == made
    assert book.held("coffee") is book.of_holder("run-2") is book.last_done("tea") is None


def test_another_run_is_refused_while_the_lease_lives(book: ClaimBook, clock: Clock) -> None:
    claim(book)
    clock.passes(LEASE - timedelta(seconds=1))
    for mark in ("votes", "newer votes"):
        with pytest.raises(ClaimRefused, match="is being trained by run run-1"):
            claim(book, mark, holder="run-2")
    book.claim("coffee", "votes", 10, holder="run-2", asked_by="person")  # agents do not wait


def test_the_same_run_asking_again_gets_its_own_and_a_new_lease(
    book: ClaimBook, clock: Clock
) -> None:
    made = claim(book)
    clock.passes(timedelta(minutes=2))
    again = claim(book)
    assert (again.token, again.attempt) == (made.token, 1)
    assert again == book.held("tea")
    assert again.expires_at == clock.at + LEASE
    with pytest.raises(ClaimRefused):
        claim(book, "newer votes")  # its own claim is for other votes
    assert len(book.history("tea")) == 1


def test_a_stale_claim_is_taken_over_with_a_higher_token(book: ClaimBook, clock: Clock) -> None:
    old = claim(book)
    clock.passes(LEASE)
    assert [stale.token for stale in book.stale()] == [old.token]
    new = claim(book, holder="run-2")
    assert new.token > old.token
    assert new.attempt == 2
    assert book.stale() == []
    first, second = book.history("tea")
    assert (first.state, second.state) == ("lost", "held")
    assert first.reason == "lease ran out; run-2 took over"


def test_a_dead_claim_of_a_clock_that_was_ahead_runs_out_as_one_of_now(
    book: ClaimBook, clock: Clock
) -> None:
    old = claim(book)
    clock.passes(-timedelta(days=30))  # and the run is gone
    with pytest.raises(ClaimRefused, match=r"heartbeat 2026-03-01 02:00:00 UTC"):
        claim(book, holder="run-2")
    clock.passes(LEASE)
    assert [stale.token for stale in book.stale()] == [old.token]
    assert claim(book, holder="run-2").attempt == 2


def test_a_claim_whose_holder_lives_outlasts_a_clock_that_is_set_back(
    book: ClaimBook, clock: Clock
) -> None:
    made = claim(book)
    clock.passes(-timedelta(days=30))
    for _ in range(3):
        assert book.stale() == []
        clock.passes(LEASE - timedelta(seconds=1))
        book.beat(made.token)
    with pytest.raises(ClaimRefused):
        claim(book, holder="run-2")


def test_a_holder_whose_clock_is_ahead_as_clocks_may_be_keeps_its_lease(
    book: ClaimBook, clock: Clock
) -> None:
    made = claim(book)
    clock.passes(-AHEAD)
    assert book.stale() == []
    with pytest.raises(ClaimRefused):
        claim(book, holder="run-2")
    assert book.held("tea") == made


def test_one_agents_claims_are_no_business_of_another(book: ClaimBook) -> None:
    tea = claim(book)
    coffee = book.claim("coffee", "beans", 7, holder="run-2", asked_by="sensor")
    book.let_go(tea.token)
    assert (book.held("tea"), book.held("coffee")) == (None, coffee)
    again = claim(book)
    book.finish(coffee.token, "done")
    assert book.last_done("tea") is None  # or its votes would count as trained on
    assert book.held("tea") == again
    assert book.history("tea") == [again]


def test_of_a_runs_claims_the_newest_is_meant(book: ClaimBook) -> None:
    book.finish(claim(book).token, "failed")
    newest = claim(book, "more votes")
    assert book.of_holder("run-1") == newest


def test_what_the_old_holder_writes_is_refused(book: ClaimBook, clock: Clock) -> None:
    old = claim(book)
    clock.passes(LEASE)
    new = claim(book, holder="run-2")
    writes: tuple[Callable[[], None], ...] = (
        lambda: book.check(old.token),
        lambda: book.beat(old.token),
        lambda: book.finish(old.token, "done"),
    )
    for write in writes:
        with pytest.raises(ClaimLost, match="run-2 took over; this run must stop"):
            write()
    with pytest.raises(ClaimLost, match="no such claim"):
        book.check(new.token + 100)
    book.check(new.token)
    book.finish(new.token, "done")
    done = book.last_done("tea")
    assert done is not None
    assert done.holder == "run-2"
    assert book.last_done("tea", other_than="another") == done
    assert book.last_done("tea", other_than=done.fingerprint) is None


def test_version_0_made_again_is_no_newer_turn_than_that_from_votes(book: ClaimBook) -> None:
    def trained(mark: str, watermark: int) -> Claim:
        made = book.claim("tea", mark, watermark, holder=mark, asked_by="person")
        book.finish(made.token, "done")
        done = book.last_done("tea")
        assert done is not None
        return done

    assert trained("seeds", 0).fingerprint == "seeds"
    assert trained("votes", 10).fingerprint == "votes"
    assert trained("seeds again", 0).fingerprint == "votes"
    assert trained("more votes", 20).fingerprint == "more votes"


def test_a_heartbeat_keeps_the_claim(book: ClaimBook, clock: Clock) -> None:
    made = claim(book)
    for _ in range(5):
        clock.passes(LEASE - timedelta(seconds=1))
        book.beat(made.token)
    assert book.stale() == []
    with pytest.raises(ClaimRefused):
        claim(book, holder="run-2")


def test_what_was_trained_on_is_refused_unless_asked_for_again(book: ClaimBook) -> None:
    made = claim(book)
    book.finish(made.token, "done", "promoted")
    with pytest.raises(ClaimRefused, match=r"or ask for it `again` \(AGAIN=1 for"):
        claim(book, holder="run-2")
    assert claim(book, "newer votes", holder="run-2").attempt == 1
    book.finish(claim(book, "newer votes", holder="run-2").token, "failed", "out of memory")
    again = claim(book, holder="run-3", again=True)
    assert again.attempt == 2
    assert [c.reason for c in book.history("tea")] == ["promoted", "out of memory", None]


def test_a_failed_attempt_leaves_the_votes_free(book: ClaimBook) -> None:
    book.finish(claim(book).token, "failed", "killed")
    assert book.held("tea") is None
    assert claim(book, holder="run-2").attempt == 2
    with pytest.raises(ClaimLost, match="failed: killed"):
        book.finish(book.history("tea")[0].token, "done")


def test_only_a_stale_claim_can_be_given_up(book: ClaimBook, clock: Clock) -> None:
    made = claim(book)
    book.give_up(made.token, "too early")
    book.check(made.token)
    clock.passes(LEASE)
    book.give_up(made.token, "the worker died")
    with pytest.raises(ClaimLost, match="lost: the worker died"):
        book.check(made.token)
    book.give_up(made.token, "twice")
    assert book.history("tea")[0].reason == "the worker died"


def test_a_token_is_checked_within_the_writers_transaction(book: ClaimBook) -> None:
    made = claim(book)
    with book.database.write() as connection:
        check_token(connection, made.token)


def test_of_many_who_ask_at_once_one_wins(any_database: Database) -> None:
    any_database.migrate()
    start = threading.Barrier(6)

    def ask(number: int) -> int | None:
        start.wait()
        try:
            return claim(ClaimBook(any_database), holder=f"run-{number}").token
        except ClaimRefused:
            return None

    with ThreadPoolExecutor(6) as threads:
        tokens = list(threads.map(ask, range(6)))
    assert sum(token is not None for token in tokens) == 1
    assert len(ClaimBook(any_database).history("tea")) == 1


def test_of_many_who_take_over_at_once_one_wins(any_database: Database, clock: Clock) -> None:
    claim(ClaimBook(any_database, clock=clock))
    clock.passes(LEASE)
    start = threading.Barrier(4)

    def ask(number: int) -> bool:
        start.wait()
        try:
            claim(ClaimBook(any_database, clock=clock), holder=f"heir-{number}")
        except ClaimRefused:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(ask, range(4))) == 1
    assert [c.state for c in ClaimBook(any_database).history("tea")] == ["lost", "held"]


@pytest.mark.parametrize("write", ["finish", "beat"])
def test_who_is_overtaken_between_look_and_write_writes_nothing(
    postgres_url: str, clock: Clock, write: str
) -> None:
    """PostgreSQL lets the heir in after the old holder has looked; SQLite's lock does not."""
    database, heirs = Database(postgres_url), Database(postgres_url)
    book = ClaimBook(database, clock=clock)
    old = claim(book)
    clock.passes(LEASE)

    came: list[Claim] = []

    def overtake(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE claims") and not came:
            came.append(claim(ClaimBook(heirs, clock=clock), holder="heir"))

    sa.event.listen(database.engine, "before_cursor_execute", overtake)
    with pytest.raises(ClaimLost, match="heir took over"):
        book.finish(old.token, "done") if write == "finish" else book.beat(old.token)
    assert [c.state for c in book.history("tea")] == ["lost", "held"]
    assert book.history("tea")[0].heartbeat_at == old.heartbeat_at
    database.close()
    heirs.close()


def test_an_erasure_keeps_its_claim_to_its_end_though_it_takes_longer_than_the_lease(
    postgres_url: str,
) -> None:
    """Else a turn could begin on the votes that are being taken out."""
    database, heirs = Database(postgres_url), Database(postgres_url)
    made = claim(ClaimBook(database), lease=timedelta(seconds=-1))
    person = raters.Person("tea", "r" * 64)
    nobody = raters.Held((), (), frozenset(), frozenset(), frozenset())
    found: list[str] = []

    def overtake() -> None:
        claim(ClaimBook(heirs), holder="heir")
        found.append("overtaken")

    heir = threading.Thread(target=overtake)

    def look(*_: Any) -> tuple[frozenset[str], frozenset[str]]:
        heir.start()
        heir.join(1.0)
        found.append("erased")
        return frozenset(), frozenset()

    with patch.object(raters, "_lines", look):
        raters.remove(database, person, nobody, made.token, counts={}, snapshots=[], versions=[])
    heir.join()
    assert found == ["erased", "overtaken"]
    database.close()
    heirs.close()


def heartbeat(book: ClaimBook) -> datetime:
    held = book.held("tea")
    assert held is not None
    return held.heartbeat_at


def test_work_keeps_its_claim_alive(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    book = ClaimBook(database)
    made = claim(book)
    with book.kept_alive(made.token, every_seconds=0.02):
        deadline = time.monotonic() + 20
        beats = {made.heartbeat_at}
        while len(beats) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
            beats.add(heartbeat(book))
    assert len(beats) >= 4
    assert not [t for t in threading.enumerate() if t.name == f"claim-{made.token}"]
    database.close()


def beats_again(book: ClaimBook) -> bool:
    """Wait for the next beat, and say whether it came."""
    back = heartbeat(book)
    deadline = time.monotonic() + 20
    while heartbeat(book) == back and time.monotonic() < deadline:
        time.sleep(0.01)
    return heartbeat(book) > back


def test_a_heartbeat_outlives_a_database_that_was_away(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    book = ClaimBook(database)
    made = claim(book)
    with book.kept_alive(made.token, every_seconds=0.02):
        with database.write() as connection:
            connection.exec_driver_sql("ALTER TABLE claims RENAME TO gone")
        time.sleep(0.1)
        with database.write() as connection:
            connection.exec_driver_sql("ALTER TABLE gone RENAME TO claims")
        assert beats_again(book)
    database.close()


def test_a_heartbeat_outlives_a_server_that_was_read_only(postgres_url: str) -> None:
    database = Database(postgres_url)
    book = ClaimBook(database)
    made = claim(book)
    with book.kept_alive(made.token, every_seconds=0.02):
        for read_only in ("on", "off"):  # as the old primary is in a failover
            with database.engine.begin() as connection:
                connection.exec_driver_sql("SET TRANSACTION READ WRITE")
                connection.exec_driver_sql(
                    f"ALTER DATABASE {database.url.database} "
                    f"SET default_transaction_read_only = {read_only}"
                )
            with database.read() as connection:
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            database.engine.dispose()
            time.sleep(0.3)
        assert beats_again(book)
    database.close()


@pytest.mark.parametrize("asked_by", NO_TRAINING)
def test_a_dead_claim_that_trained_nothing_leaves_no_failed_attempt(
    book: ClaimBook, clock: Clock, asked_by: str
) -> None:
    def dies(holder: str) -> Claim:
        made = book.claim("tea", "files", 0, holder=holder, asked_by=asked_by)
        clock.passes(LEASE)
        return made

    found = dies("killed")
    book.give_up(found.token, "the worker died")
    assert book.history("tea") == []
    taken_over = dies("killed as well")
    turn = claim(book)
    assert book.history("tea") == [turn]
    assert turn.token > taken_over.token > found.token
    with pytest.raises(ClaimLost, match="no such claim"):
        book.check(taken_over.token)  # it may only have slept


def test_a_heartbeat_ends_when_the_claim_is_lost(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    book = ClaimBook(database)
    made = claim(book)
    with book.kept_alive(made.token, every_seconds=0.02):
        with database.write() as connection:
            connection.execute(db.claims.update().values(state="lost", reason="taken over"))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and [
            t for t in threading.enumerate() if t.name == f"claim-{made.token}"
        ]:
            time.sleep(0.01)
        assert not [t for t in threading.enumerate() if t.name == f"claim-{made.token}"]
        with pytest.raises(ClaimLost):
            book.check(made.token)
    with pytest.raises(ClaimLost), book.kept_alive(made.token):
        pytest.fail("a lost claim lets no work begin")
    database.close()


def test_a_claim_is_closed_whatever_the_error_said(book: ClaimBook, clock: Clock) -> None:
    said = "caf\udce9 \x00"
    book.finish(claim(book).token, "failed", said)
    given_up = claim(book, holder="run-2")
    clock.passes(LEASE)
    book.give_up(given_up.token, said)
    assert book.held("tea") is None
    assert [one.reason for one in book.history("tea")] == ["caf\\udce9 \\x00"] * 2
