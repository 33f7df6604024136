"""The database as everything above it counts on it: synced, migrated, one writer at a time."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from rlhf_pipeline import database as db
from rlhf_pipeline.database import Database, open_database
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.records import now
from tests.leavings import kept, people_who_went


def add_agent(connection: sa.Connection, agent_id: str, at: datetime | None = None) -> None:
    connection.execute(db.agents.insert().values(agent_id=agent_id, created_at=at or now()))


def agent_ids(database: Database) -> list[str]:
    with database.read() as connection:
        query = sa.select(db.agents.c.agent_id).order_by(db.agents.c.agent_id)
        return list(connection.execute(query).scalars())


def agent_count(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(sa.func.count()).select_from(db.agents)).scalar_one())


def wait_until_so_many_wait(connection: sa.Connection, count: int) -> None:
    """Return once so many transactions wait for a lock of this PostgreSQL database's own."""
    query = (
        "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
        "WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"
    )
    deadline = time.monotonic() + 60
    while connection.exec_driver_sql(query).scalar_one() != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sqlite_commit_is_synced_and_does_not_block_readers(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/deep/er/feedback.db")
    with database.read() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,  # FULL
        "foreign_keys": 1,
        "busy_timeout": 60000,
    }
    database.close()


def test_migrations_make_exactly_the_tables_the_code_describes(any_database: Database) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with any_database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, db.metadata) == []
        views = sa.inspect(connection).get_view_names()
    assert "effective_feedback" in views


def test_two_who_start_together_migrate_one_after_the_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/feedback.db"
    start = threading.Barrier(4)

    def begin(number: int) -> None:
        database = Database(url)  # as four processes would: nothing shared but the file
        start.wait()
        with database.write() as connection:
            add_agent(connection, f"agent-{number}")
        database.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(begin, range(4)))
    database = Database(url)
    assert agent_ids(database) == [f"agent-{n}" for n in range(4)]
    database.close()


def test_who_waited_for_a_migration_sees_what_it_did(postgres_server: str) -> None:
    name = "waited_for"
    server = Database(postgres_server)
    with server.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
        connection.exec_driver_sql(  # as an administrator may have chosen for every program
            f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'"
        )
    server.close()
    url = sa.engine.make_url(postgres_server).set(database=name)
    both = [Database(url.render_as_string(hide_password=False)) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        with both[0].engine.connect() as holder:
            holder.exec_driver_sql("SELECT pg_advisory_xact_lock(712007)")
            migrated = [threads.submit(database.migrate) for database in both]
            wait_until_so_many_wait(holder, 2)
        for each in migrated:
            each.result()
    for database in both:
        assert agent_ids(database) == []
        database.close()


def test_votes_under_way_are_in_before_a_migration_looks_at_any(postgres_url: str) -> None:
    old, new = Database(postgres_url), Database(postgres_url)
    with old.write() as connection:  # the schema of then
        for index in (
            "ix_interactions_person",
            "ix_feedback_other_interaction",
            "ix_feedback_from_mlflow",
            "ix_feedback_erased",
        ):
            connection.exec_driver_sql(f"DROP INDEX {index}")
        connection.exec_driver_sql("DROP TABLE erased_keys")
        connection.exec_driver_sql("ALTER TABLE experiments DROP COLUMN began_under")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0007'")
    old._revision = "0007"
    with ThreadPoolExecutor(1) as threads:
        with old.write(alone=True) as voting:
            migrated = threads.submit(new.migrate)
            wait_until_so_many_wait(voting, 1)
            add_agent(voting, "tea")
        migrated.result()
    with pytest.raises(sa.exc.OperationalError, match="newer release"), old.write(alone=True):
        pass
    with new.write(alone=True) as connection:
        assert agent_count(connection) == 1
    old.close()
    new.close()


def test_an_older_database_is_brought_up_without_losing_a_row(any_database: Database) -> None:
    with any_database.write() as connection:
        add_agent(connection, "tea")
    again = Database(any_database.url.render_as_string(hide_password=False))
    assert agent_ids(again) == ["tea"]  # migrating what is migrated changes nothing
    again.close()


def test_a_block_that_raises_writes_nothing(any_database: Database) -> None:
    def stop_half_way() -> None:
        with any_database.write() as connection:
            add_agent(connection, "tea")
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        stop_half_way()
    assert agent_ids(any_database) == []


def test_an_error_quotes_no_value_that_was_to_be_written(any_database: Database) -> None:
    row = {"agent_id": "tea", "created_at": now(), "paused_reason": "what somebody wrote"}
    with any_database.write() as connection:
        connection.execute(db.agents.insert(), row)
    with pytest.raises(sa.exc.IntegrityError) as raised, any_database.write() as connection:
        connection.execute(db.agents.insert(), row)
    assert "what somebody wrote" not in str(raised.value)


def test_writers_wait_for_each_other_instead_of_failing(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE counter (n INTEGER)")
        connection.exec_driver_sql("INSERT INTO counter VALUES (0)")

    def count() -> None:
        for _ in range(20):
            with database.write() as connection:  # reads first, so it must hold the lock already
                n = connection.exec_driver_sql("SELECT n FROM counter").scalar_one()
                connection.exec_driver_sql("UPDATE counter SET n = ?", (n + 1,))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: count(), range(4)))
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT n FROM counter").scalar_one() == 80
    database.close()


def test_a_reader_sees_one_state_while_another_writes(any_database: Database) -> None:
    database = any_database
    count = sa.select(sa.func.count()).select_from(db.agents)
    with database.read() as reading:
        before = reading.execute(count).scalar_one()
        with database.write() as connection:
            add_agent(connection, "tea")
        assert reading.execute(count).scalar_one() == before == 0
    assert agent_ids(database) == ["tea"]


def test_a_writer_sees_what_was_committed_while_it_waited(postgres_url: str) -> None:
    name = sa.engine.make_url(postgres_url).database
    first = Database(postgres_url)
    with first.write() as connection:  # as an administrator may have chosen for every program
        connection.exec_driver_sql(
            f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
        )
    first.close()
    database = Database(postgres_url)
    with database.write() as writing:
        assert agent_count(writing) == 0
        with database.write() as connection:
            add_agent(connection, "tea")
        assert agent_count(writing) == 1
    database.close()


def test_a_commit_is_synced_whatever_the_server_does_for_others(postgres_url: str) -> None:
    name = sa.engine.make_url(postgres_url).database
    for default, held in (("off", "on"), ("local", "local"), ("remote_apply", "remote_apply")):
        database = Database(postgres_url)
        with database.write() as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET synchronous_commit = {default}")
        database.close()
        with database.write() as connection:
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == held
        database.close()


def test_what_a_write_sets_is_its_own_and_ends_with_it(postgres_url: str) -> None:
    name = sa.engine.make_url(postgres_url).database
    database = Database(postgres_url)
    with database.write() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
    database.close()
    show = "SHOW synchronous_commit"
    for _ in range(2):  # the second in a session that somebody else reset, as a pooler's may be
        with database.write() as connection:
            assert connection.exec_driver_sql(show).scalar() == "on"
        with database.engine.connect() as connection:
            assert connection.exec_driver_sql(show).scalar() == "off"
            connection.exec_driver_sql("RESET ALL")
            connection.commit()
    database.close()


def test_what_people_write_goes_in_whatever_the_environment_says(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    database = Database(postgres_url)
    with database.write() as connection:
        add_agent(connection, "お茶 🍵")
    assert agent_ids(database) == ["お茶 🍵"]
    database.close()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_hold_every_letter_is_refused(
    postgres_server: str, encoding: str
) -> None:
    name = f"in_{encoding}".lower()
    server = Database(postgres_server)
    with server.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(
            f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' "
            "TEMPLATE template0"
        )
    server.close()
    url = sa.engine.make_url(postgres_server).set(database=name)
    database = Database(url.render_as_string(hide_password=False))
    with pytest.raises(ConfigError, match=f"encoding is UTF8, found {encoding}, .* pg_dump"):
        database.reached()
    with database.engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == []
    database.close()


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "CONNECT_SECONDS", 2)  # the least that PostgreSQL's library takes
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConfigError, match="timeout expired; start it"):
            Database(f"postgresql://me@127.0.0.1:{port}/rlhf").reached()


def test_who_gets_no_connection_hears_of_a_database_that_is_away(any_database: Database) -> None:
    any_database.migrate()
    pool = any_database.engine.pool
    assert isinstance(pool, sa.pool.QueuePool)
    pool._timeout = 0.05
    pool._max_overflow = 2  # SQLite's is without bound
    with ExitStack() as others:
        for _ in range(pool.size() + pool._max_overflow):
            others.enter_context(any_database.read())
        for ask in (any_database.read, any_database.write):
            with pytest.raises(sa.exc.OperationalError, match="QueuePool limit"), ask():
                pass
    assert agent_ids(any_database) == []


def test_moments_keep_their_instant_and_need_a_zone(any_database: Database) -> None:
    there = datetime(2026, 5, 1, 9, 30, 0, 123456, timezone(timedelta(hours=5, minutes=30)))
    with any_database.write() as connection:
        add_agent(connection, "tea", there)
    with any_database.read() as connection:
        back = connection.execute(sa.select(db.agents.c.created_at)).scalar_one()
    assert back == there
    assert back.tzinfo is UTC
    naive = there.replace(tzinfo=None)
    with (
        pytest.raises(sa.exc.StatementError, match="needs its time zone"),
        any_database.write() as connection,
    ):
        add_agent(connection, "coffee", naive)


def test_a_number_is_never_given_twice(any_database: Database) -> None:
    values = {
        "agent_id": "tea",
        "fingerprint": "f",
        "watermark": 1,
        "attempt": 1,
        "state": "failed",
        "holder": "run",
        "asked_by": "test",
        "created_at": now(),
        "heartbeat_at": now(),
        "expires_at": now(),
    }
    tokens = []
    for _ in range(2):
        with any_database.write() as connection:
            key = connection.execute(db.claims.insert().values(**values)).inserted_primary_key
            assert key is not None
            tokens.append(key[0])
            connection.execute(db.claims.delete())
    assert tokens[1] > tokens[0]


def test_a_process_opens_a_database_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/feedback.db"
    assert open_database(url) is open_database(url)
    open_database(url).close()
    open_database.cache_clear()


def test_a_store_that_a_newer_release_wrote_is_left_alone(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    again = Database(f"sqlite:///{tmp_path}/feedback.db")
    with pytest.raises(PipelineError, match=r"'9999'; install the release"), again.read():
        pass
    database.close()
    again.close()


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    with database.engine.begin() as connection:  # Dagster and MLflow have one of these too
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.exec_driver_sql("INSERT INTO alembic_version VALUES ('29b539ebc72a')")
    with pytest.raises(ConfigError, match=r"the store's own, found another program's, .* one more"):
        database.reached()
    database.close()


def test_a_database_of_another_kind_or_without_its_driver_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"found mysql://…; set one of the two"):
        Database("mysql://me:secret@host/rlhf")
    monkeypatch.setitem(sys.modules, "psycopg2", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"the module psycopg2, .* pip install"):
        Database("postgresql://me@host/rlhf")


@pytest.mark.parametrize(
    "url",
    ["hunter2", "postgresql:/me:hunter2@h/d", "postgresql://me:hunter2@h:port/d", "://hunter2"],
)
def test_what_is_no_url_is_refused_and_not_told(url: str) -> None:
    with pytest.raises(
        ConfigError, match="found what is no URL; correct RLHF_DATABASE_URL"
    ) as told:
        Database(url)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("password", ["hunt@er2", "hunt@er2/x", "@hunter2"])
def test_a_password_that_would_be_read_as_the_host_is_refused_and_not_told(password: str) -> None:
    with pytest.raises(ConfigError, match="write an @ of the password as %40") as told:
        Database(f"postgresql://me:{password}@h:5432/d")
    assert "er2" not in str(told.value)
    sound = Database("postgresql://me@work:hunt%40er2@h/d?user=me@home")
    assert (sound.url.username, sound.url.password) == ("me@work", "hunt@er2")


def test_an_option_that_libpq_does_not_know_is_named_on_one_line() -> None:
    with pytest.raises(ConfigError, match=r'libpq knows, found invalid .* "foo"; correct') as told:
        Database("postgresql://me:hunter2@h/rlhf?foo=1")
    assert "hunter2" not in str(told.value)
    assert "\n" not in str(told.value)


def test_a_driver_nobody_knows_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"none called postgresql\+foo; write postgresql:// alone"
    ):
        Database("postgresql+foo://me:hunter2@h/d")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_a_store_that_would_end_with_its_process_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="a file that outlives the process, found sqlite"):
        open_database(url)


def test_a_file_that_cannot_be_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"found {tmp_path}: unable to open database file; mend"):
        Database(f"sqlite:///{tmp_path}").reached()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"found {tmp_path}/file/x.db: .*File exists"):
        Database(f"sqlite:///{tmp_path}/file/x.db")


def test_a_server_that_refuses_is_told_without_the_password(postgres_url: str) -> None:
    gone = sa.engine.make_url(postgres_url).set(
        database="nowhere", query={**sa.engine.make_url(postgres_url).query, "password": "hunter2"}
    )
    with pytest.raises(ConfigError, match='database "nowhere" does not exist; start it') as told:
        Database(gone.render_as_string(hide_password=False)).reached()
    assert "hunter2" not in str(told.value)
    away = Database("postgresql://me:hunter2@127.0.0.1:9/rlhf")
    with pytest.raises(ConfigError, match=r"//me:\*\*\*@127.0.0.1:9/rlhf: .*Connection refused"):
        away.reached()
    with pytest.raises(sa.exc.OperationalError), away.read():  # who tries again counts on it
        pass


def test_a_bare_postgresql_url_takes_the_driver_that_is_installed() -> None:
    assert Database("postgresql://me@host/rlhf").url.drivername == "postgresql+psycopg2"


def test_emptying_the_log_waits_for_readers_and_keeps_no_writer_waiting(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    with database.write() as connection:
        add_agent(connection, "before")
    journal = tmp_path / "feedback.db-wal"
    with ThreadPoolExecutor(2) as threads:
        with database.read() as reader:
            reader.execute(sa.select(db.agents)).all()
            with database.write() as connection:
                add_agent(connection, "newer")  # than what the reader sees
            folded = threads.submit(database.fold_back)

            def write(name: str) -> None:
                with database.write() as connection:
                    add_agent(connection, name)

            for n in range(20):
                threads.submit(write, f"meanwhile {n}").result(timeout=10)
            assert not folded.done()
            assert journal.stat().st_size > 0
        folded.result()
    assert journal.stat().st_size == 0
    assert len(agent_ids(database)) == 22
    database.close()


def test_what_was_moved_before_it_went_is_overwritten(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    gone = people_who_went(database)
    assert kept(database, gone) > 0
    with database.read() as reader:  # whoever reads sees what there was
        before = reader.execute(sa.text("SELECT count(*) FROM said")).scalar_one()
        database.overwrite_leavings()
        assert reader.execute(sa.text("SELECT count(*) FROM said")).scalar_one() == before
    assert kept(database, gone) == 0
    database.close()


@pytest.mark.parametrize("trouble", ["large", "locked"])
def test_a_store_that_cannot_be_rewritten_now_is_told_of(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    limit, value = {"large": ("REWRITTEN", 4096), "locked": ("LOCK_SECONDS", 0.1)}[trouble]
    monkeypatch.setattr(db, limit, value)
    assert agent_ids(database) == []  # the first who asks makes the file
    with ExitStack() as writing, capture_logs() as logs:
        if trouble == "locked":
            writing.enter_context(database.write())
        database.overwrite_leavings()
    assert [(line["log_level"], "VACUUM" in line["event"]) for line in logs] == [("warning", True)]
    database.close()


def test_a_log_that_somebody_reads_all_the_while_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "FOLD_SECONDS", 0.0)
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    with database.read() as reader, capture_logs() as logs:
        reader.execute(sa.select(db.agents)).all()
        with database.write() as connection:
            add_agent(connection, "newer")
        database.fold_back()
    assert [line["log_level"] for line in logs] == ["warning"]
    database.close()


def test_many_who_read_at_once_keep_nobody_from_writing(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/feedback.db")
    with ExitStack() as readers:
        for _ in range(50):  # as many threads as the service has, and more
            reader = readers.enter_context(database.read())
            reader.execute(sa.select(db.agents)).all()
        with database.write() as connection:
            add_agent(connection, "tea")
    assert agent_ids(database) == ["tea"]
    database.close()


def test_nothing_is_written_to_a_file_that_was_put_away_or_replaced(tmp_path: Path) -> None:
    folder, aside = tmp_path / "state", tmp_path / "aside"
    database = Database(f"sqlite:///{folder}/feedback.db")
    with database.write() as connection:
        add_agent(connection, "before")

    def refused(*, writing: bool) -> None:
        ask = database.write if writing else database.read
        with pytest.raises(sa.exc.OperationalError, match=r"none at .*; end this process"), ask():
            raise AssertionError("came in")

    with capture_logs() as logs:
        folder.rename(aside)
        refused(writing=True)
        folder.mkdir()
        refused(writing=True)
        refused(writing=False)
        assert list(folder.iterdir()) == []  # nor is one begun in its place
        other = Database(f"sqlite:///{folder}/feedback.db")
        assert agent_ids(other) == []
        refused(writing=True)
        refused(writing=False)
    assert [line["log_level"] for line in logs] == ["error"]
    assert agent_ids(other) == []
    other.close()

    shutil.rmtree(folder)
    aside.rename(folder)
    with database.write() as connection:
        add_agent(connection, "it is back")
    assert agent_ids(database) == ["before", "it is back"]
    database.close()


def test_what_is_under_way_while_the_file_is_put_away_is_not_committed(tmp_path: Path) -> None:
    file, aside = tmp_path / "feedback.db", tmp_path / "aside.db"
    database = Database(f"sqlite:///{file}")
    database.migrate()

    def write_while_it_goes() -> None:
        with database.write() as connection:
            add_agent(connection, "tea")
            file.rename(aside)

    with pytest.raises(sa.exc.OperationalError, match="the store's file that this process opened"):
        write_while_it_goes()
    aside.rename(file)
    assert agent_ids(database) == []
    database.close()
