"""The one place that opens the database: engine, tables, migrations.

SQLite by default (WAL, synchronous=FULL: a commit that returned survives a power cut), PostgreSQL
by URL (commits synced there too, whatever its default; texts as UTF-8). Tables are described here
once; `migrations/` brings an older database up to them. What this module does not protect against:
a disk that lies about fsync, and somebody who edits the file.
"""

from __future__ import annotations

import functools
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
import structlog

from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.files import file_identity, make_private, no_room

log = structlog.get_logger(__name__)

T = TypeVar("T")

AT_ONCE = 400  # values per IN (...): SQLite takes 999 variables in its oldest builds
FOLD_SECONDS = 60.0  # that SQLite's log may take to be emptied
FOLD_MOMENT = 0.1  # seconds that one try waits for who reads, and the pause after it
REWRITTEN = 2**28  # bytes of an SQLite file up to which it is rewritten while votes wait

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class UtcDateTime(sa.TypeDecorator[datetime]):
    """A moment in UTC. SQLite forgets zones: they are checked going in, put back coming out."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Refuse a naive moment; keep the rest in UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a moment needs its time zone, found {value!r}; use records.now()")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Return the moment with its zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the values in their order, AT_ONCE at the most."""
    for start in range(0, len(values), AT_ONCE):
        yield values[start : start + AT_ONCE]


def storable(text: str) -> str:
    """Return text a database can hold: lone surrogates and NUL shown as escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


class Reason(sa.TypeDecorator[str]):
    """Why something was done: whatever a person or an error said, so that it can be stored."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """Return what a database can hold of it."""
        return None if value is None else storable(value)


BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite counts only INTEGER keys up

RECIPE_CHARACTERS = 200
CONNECT_SECONDS = 10  # for a server on PostgreSQL's side of a network to answer

LOCK_SECONDS = 60.0  # that SQLite waits for who writes
IDLE_SECONDS = 30.0  # that a writer may leave PostgreSQL waiting for its next statement
ALONE_SECONDS = 10.0  # that one who would be alone waits: those who send votes wait as well
LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's word for a wait that was given up

SAID_FIRST = sa.text(
    "SELECT set_config('idle_in_transaction_session_timeout', :idle, true), "
    "CASE current_setting('synchronous_commit') "
    "WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END"
)
"""On PostgreSQL what was acknowledged is synced, even where a server's default is `off`; what waits
for more than the disk, as for replicas, goes on waiting. And a process that stands still, or whose
machine is gone, loses its locks: the server alone would hold them for hours. Said in every
transaction: what is said to a session reaches somebody else's behind a pooler such as PgBouncer."""

ALONE = sa.text(
    "WITH said AS (SELECT set_config('lock_timeout', :most, true)) "
    "SELECT pg_advisory_xact_lock(712008) FROM said"
)
"""On PostgreSQL waits until no other transaction takes in what people say, `most` milliseconds for
this lock as for every later one of the transaction; 0: as long as it takes."""

agents = sa.Table(
    "agents",
    metadata,
    sa.Column("agent_id", sa.String(64), primary_key=True),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("recipe", sa.String(RECIPE_CHARACTERS)),  # None: the settings' own
    sa.Column("automatic_promotion", sa.Boolean),  # None: as the settings say
    sa.Column("paused_reason", Reason),  # None: not paused
)

interactions = sa.Table(
    "interactions",
    metadata,
    sa.Column("interaction_id", sa.String(36), primary_key=True),
    sa.Column("agent_id", sa.String(64), nullable=False),
    sa.Column("session_id", sa.String(64)),
    sa.Column("user_id", sa.String(64)),
    sa.Column("model_version", sa.Integer, nullable=False),
    sa.Column("experiment", sa.String(64)),
    sa.Column("arm", sa.String(32)),
    sa.Column("prompt", sa.Text, nullable=False),
    sa.Column("completion", sa.Text, nullable=False),
    sa.Column("sampling", sa.JSON, nullable=False),
    sa.Column("latency_seconds", sa.Float),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index("ix_interactions_agent_created", "agent_id", "created_at"),
    sa.Index("ix_interactions_experiment_created", "experiment", "created_at"),
    sa.Index("ix_interactions_person", "agent_id", "user_id", "session_id"),
)

WITHDRAWN = "withdrawn:"  # how the keys of rows begin that only take an earlier vote back
RETIRED = "retired:"  # and those of votes whose own keys are other rows' now, or free for them
FROM_MLFLOW = sa.text("origin = 'mlflow'")
"""Said of feedback; written out, as an index of some rows is used where its condition is."""

feedback = sa.Table(
    "feedback",
    metadata,
    sa.Column("seq", BigId, primary_key=True, autoincrement=True),  # the watermark counts in these
    sa.Column("feedback_id", sa.String(36), nullable=False, unique=True),
    sa.Column("agent_id", sa.String(64), nullable=False),
    sa.Column("idempotency_key", sa.String(200), nullable=False),
    sa.Column("body_sha256", sa.String(64), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("target", sa.String(64), nullable=False),
    sa.Column("voter", sa.String(64), nullable=False),
    sa.Column("interaction_id", sa.String(36)),
    sa.Column("prompt", sa.Text),
    sa.Column("completion", sa.Text),
    sa.Column("number", sa.Float),
    sa.Column("text", sa.Text),
    sa.Column("criteria", sa.Text),  # JSON
    sa.Column("other_interaction_id", sa.String(36)),
    sa.Column("other_completion", sa.Text),
    sa.Column("other_prompt", sa.Text),
    sa.Column("choice", sa.String(8)),
    sa.Column("shown_first", sa.String(8), nullable=False),
    sa.Column("rater_id", sa.String(64)),
    sa.Column("source", sa.String(8), nullable=False),
    sa.Column("origin", sa.String(400), nullable=False),
    sa.Column("tags", sa.Text, nullable=False),  # JSON list
    sa.Column("comment", sa.Text),
    sa.Column("topic", sa.String(200)),
    sa.Column("occurred_at", UtcDateTime, nullable=False),
    sa.Column("received_at", UtcDateTime, nullable=False),
    # Set: it was about what a person asked to have erased, or it only takes an earlier vote back.
    sa.Column("erased_at", UtcDateTime),
    sa.UniqueConstraint("agent_id", "idempotency_key"),
    sa.Index("ix_feedback_agent_seq", "agent_id", "seq"),
    sa.Index("ix_feedback_vote", "agent_id", "voter", "target", "kind", "seq"),
    sa.Index("ix_feedback_interaction", "interaction_id"),
    sa.Index("ix_feedback_other_interaction", "other_interaction_id"),
    sa.Index(
        "ix_feedback_from_mlflow",
        "agent_id",
        sqlite_where=FROM_MLFLOW,
        postgresql_where=FROM_MLFLOW,
    ),
    sa.Index(
        "ix_feedback_erased",
        "agent_id",
        "seq",
        sqlite_where=sa.text("erased_at IS NOT NULL"),
        postgresql_where=sa.text("erased_at IS NOT NULL"),
    ),
    sqlite_autoincrement=True,  # a sequence number is never given twice, even after an erasure
)

effective_feedback = sa.table(
    "effective_feedback", *(sa.column(c.name, c.type) for c in feedback.columns)
)
"""The view of the votes that count: received last per (voter, target, kind), and not erased."""

quarantine = sa.Table(
    "quarantine",
    metadata,
    sa.Column("quarantine_id", sa.String(64), primary_key=True),  # hash: the same dirt once
    sa.Column("agent_id", sa.String(64), nullable=False),
    sa.Column("rule", sa.String(64), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("origin", sa.String(400), nullable=False),
    sa.Column("line", sa.Integer),
    sa.Column("feedback_id", sa.String(36)),  # set where a stored row was set aside later
    sa.Column("raw", sa.Text),  # the line, its middle cut out where it is very long
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("closed_at", UtcDateTime),  # set: a person dealt with it; the same again stays so
    sa.Index("ix_quarantine_agent_rule", "agent_id", "rule"),
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("snapshot_id", sa.String(36), primary_key=True),
    sa.Column("agent_id", sa.String(64), nullable=False),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("watermark", BigId, nullable=False),  # feedback.seq up to here
    sa.Column("rows", sa.Integer, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),  # of the file
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("agent_id", "fingerprint"),
)

claims = sa.Table(
    "claims",
    metadata,
    sa.Column("token", BigId, primary_key=True, autoincrement=True),  # fencing: higher is newer
    sa.Column("agent_id", sa.String(64), nullable=False),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("watermark", BigId, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("state", sa.String(12), nullable=False),  # held, failed, lost, done
    sa.Column("holder", sa.String(64), nullable=False),  # the run that asked
    # By sensor, schedule, watchdog, api or person; erasure and prune keep turns away.
    sa.Column("asked_by", sa.String(32), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("heartbeat_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Column("reason", Reason),
    sa.Index("ix_claims_agent_token", "agent_id", "token"),
    sa.Index(
        "uq_claims_one_held_per_agent",
        "agent_id",
        unique=True,
        sqlite_where=sa.text("state = 'held'"),
        postgresql_where=sa.text("state = 'held'"),
    ),
    sqlite_autoincrement=True,
)

model_versions = sa.Table(
    "model_versions",
    metadata,
    sa.Column("agent_id", sa.String(64), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),  # 0 is the baseline
    sa.Column("label", sa.String(32), nullable=False),  # v{feedback count}
    sa.Column("mlflow_version", sa.String(16)),
    sa.Column("mlflow_run_id", sa.String(64)),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("files", sa.JSON, nullable=False),  # name -> SHA-256
    sa.Column("lineage", sa.JSON, nullable=False),
    sa.Column("gate", sa.JSON),  # the verdict and every rule's number; None for the baseline
    sa.Column("fingerprint", sa.String(64)),  # the snapshot it was trained from
    sa.Column("created_at", UtcDateTime, nullable=False),
)

promotions = sa.Table(
    "promotions",
    metadata,
    sa.Column("agent_id", sa.String(64), primary_key=True),
    sa.Column("entry", sa.Integer, primary_key=True),  # 1, 2, 3: the key is the compare-and-set
    sa.Column("action", sa.String(16), nullable=False),  # baseline, promote, rollback, adopt
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("previous_version", sa.Integer),
    sa.Column("token", BigId),  # the claim's, where a run did it
    sa.Column("actor", sa.String(100), nullable=False),
    sa.Column("reason", Reason, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

chat_events = sa.Table(
    "chat_events",
    metadata,
    sa.Column("seq", BigId, primary_key=True, autoincrement=True),
    sa.Column("agent_id", sa.String(64), nullable=False),
    sa.Column("interaction_id", sa.String(36)),  # the answer's, whether or not there was one
    sa.Column("arm", sa.String(32), nullable=False),  # champion or baseline: whose trouble it was
    sa.Column("rule", sa.String(64), nullable=False),  # a guardrail's name, or what failed
    sa.Column("detail", sa.Text, nullable=False),  # nothing that anybody wrote
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index("ix_chat_events_agent_seq", "agent_id", "seq"),
)

experiments = sa.Table(
    "experiments",
    metadata,
    sa.Column("experiment_id", sa.String(36), primary_key=True),  # the salt of its assignment too
    sa.Column("agent_id", sa.String(64), nullable=False),
    sa.Column("champion", sa.Integer, nullable=False),
    sa.Column("challenger", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # running, or how it ended
    sa.Column("reason", Reason, nullable=False),
    sa.Column("share", sa.Float, nullable=False),  # of the users, that meet the challenger
    sa.Column("share_since", UtcDateTime, nullable=False),
    sa.Column("actor", sa.String(100), nullable=False),
    sa.Column("started_at", UtcDateTime, nullable=False),
    sa.Column("ended_at", UtcDateTime),
    sa.Column("began_under", sa.Integer, nullable=False, server_default="0"),  # a promotion's entry
    sa.Index(
        "ix_experiments_running",
        "agent_id",
        unique=True,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    ),
)

experiment_looks = sa.Table(
    "experiment_looks",
    metadata,
    sa.Column("experiment_id", sa.String(36), primary_key=True),
    sa.Column("look", sa.Integer, primary_key=True),  # 1, 2, 3
    sa.Column("share", sa.Float, nullable=False),
    sa.Column("action", sa.String(16), nullable=False),
    sa.Column("verdict", sa.JSON, nullable=False),
    sa.Column("looked_at", UtcDateTime, nullable=False),
)

erasures = sa.Table(
    "erasures",
    metadata,
    sa.Column("erasure_id", sa.String(36), primary_key=True),
    sa.Column("agent_id", sa.String(64), nullable=False),
    sa.Column("person", sa.String(64), nullable=False),  # a hash of the rater's hash
    sa.Column("counts", sa.JSON, nullable=False),  # what went, by kind
    sa.Column("snapshots", sa.JSON, nullable=False),  # [{fingerprint, rows}] that held their rows
    sa.Column("versions", sa.JSON, nullable=False),  # [{version, label, rows, through}]
    sa.Column("erased_at", UtcDateTime, nullable=False),
    sa.Index("ix_erasures_agent_person", "agent_id", "person"),
)

erased_keys = sa.Table(
    "erased_keys",
    metadata,
    sa.Column("agent_id", sa.String(64), primary_key=True),
    sa.Column("key", sa.String(64), primary_key=True),  # of a vote, hashed; or of a line set aside
)
"""What an erasure took, so that it stays away when its file is taken in, or it is sent, again."""


class Database:
    """One database: `read()` and `write()` hand out connections in a transaction."""

    def __init__(self, url: str) -> None:
        try:
            self.url = sa.engine.make_url(url)
        except (sa.exc.ArgumentError, ValueError):
            raise ConfigError(  # its own words may quote a password
                "database_url needs sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME, found "
                "what is no URL; correct RLHF_DATABASE_URL or the recipe"
            ) from None
        if self.url.get_backend_name() not in ("sqlite", "postgresql"):
            raise ConfigError(
                "database_url needs sqlite:///FILE or postgresql://…, found "
                f"{self.url.drivername}://…; set one of the two, or leave it out"
            )
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if not self.is_sqlite and "@" in f"{self.url.host}/{self.url.database}":
            raise ConfigError(  # what it read as the host is a part of the password
                "database_url needs one @, before the host, found another after it; write an @ of "
                "the password as %40, in RLHF_DATABASE_URL or the recipe"
            )
        if self.url.drivername == "postgresql":
            # SQLAlchemy 2.1 reads a bare postgresql:// as psycopg 3; ours is psycopg2.
            self.url = self.url.set(drivername="postgresql+psycopg2")
        if self.is_sqlite and self.url.database:
            try:
                make_private(Path(self.url.database).parent)  # the state: what people wrote
            except OSError as error:
                raise self._away(error) from error
        options: dict[str, Any]
        if self.is_sqlite:
            options = {"connect_args": {"timeout": LOCK_SECONDS}}
            if self.url.database not in (None, "", ":memory:"):
                # As many connections as there are threads: a few long looks keep no vote waiting
                # for one. A PostgreSQL server has only so many for all who use it.
                options["max_overflow"] = -1
        else:
            options = {"connect_args": _postgresql_arguments(self.url), "pool_pre_ping": True}
        try:
            # Without parameters, which are what people wrote: errors go to logs.
            self.engine = sa.create_engine(self.url, hide_parameters=True, **options)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"database_url needs the module {error.name}, found it not installed; "
                "pip install '.[postgres]'"
            ) from error
        except sa.exc.NoSuchModuleError as error:
            raise ConfigError(
                "database_url needs a driver that is there, found none called "
                f"{self.url.drivername}; write postgresql:// alone"
            ) from error
        if self.engine.driver == "psycopg2":
            _check_options(self.engine)
        if self.is_sqlite:
            sa.event.listen(self.engine, "connect", _set_sqlite_pragmas)
            sa.event.listen(self.engine, "begin", _begin_as_asked)
        if not sa.event.contains(sa.Engine, "handle_error", _note_file):
            sa.event.listen(sa.Engine, "handle_error", _note_file)  # MLflow's own among them
        self._migrate_once = threading.Lock()
        self._revision: str | None = None  # that the schema was brought up to here
        self._file: tuple[int, int] | None = None  # SQLite's, as it was opened
        self._overtaken = self._put_away = False

    @contextmanager
    def write(
        self, *, alone: bool = False, lock_seconds: float | None = None
    ) -> Iterator[sa.Connection]:
        """Yield a connection in a transaction that commits, synced, when the block ends well.

        `alone` is for what people say: of such blocks one at a time, as on SQLite all are, and none
        once a newer release has migrated the store: what this one writes may mean another thing to
        that one. It raises OperationalError then, as of a database that is away, and where its turn
        does not come within ALONE_SECONDS.

        On PostgreSQL a block that says nothing to the server for IDLE_SECONDS is ended by it. On
        SQLite it raises OperationalError where another writes for longer than `lock_seconds`
        (None: LOCK_SECONDS).
        """
        self.migrate()
        begun: dict[str, Any] = {"sqlite_begin": "IMMEDIATE", "sqlite_wait": lock_seconds}
        asked = self._connected("READ COMMITTED", **begun)
        with asked as connection, connection.begin():
            if not self.is_sqlite:
                connection.execute(SAID_FIRST, {"idle": _milliseconds(IDLE_SECONDS)})
            if alone:
                self.wait_for_turn(connection, ALONE_SECONDS)
                self._refuse_if_overtaken(connection)
            yield connection
            self._refuse_if_replaced()

    def wait_for_turn(self, connection: sa.Connection, most_seconds: float) -> None:
        """Keep others from taking in what people say until this transaction has ended.

        On SQLite whoever writes does that. Raises OperationalError where another keeps it for
        longer than `most_seconds`.
        """
        if self.is_sqlite:
            return
        try:
            connection.execute(ALONE, {"most": _milliseconds(most_seconds)})
        except sa.exc.OperationalError as error:
            if getattr(error.orig, "pgcode", None) != LOCK_NOT_AVAILABLE:
                raise
            log.warning("no vote can be taken in: another has the turn", over=most_seconds)
            raise sa.exc.OperationalError(
                None,
                None,
                PipelineError(
                    f"needed the turn to take in what people say within {most_seconds:g} s, found "
                    "another that keeps it; try again, and where that does not help see "
                    "pg_stat_activity for who does not end"
                ),
            ) from error

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Yield a connection that sees one consistent state."""
        self.migrate()
        with self._connected("REPEATABLE READ") as connection:
            yield connection

    @contextmanager
    def _connected(self, isolation: Any, **options: Any) -> Iterator[sa.Connection]:
        """Yield a connection, on PostgreSQL at this isolation whatever the server's default is.

        SQLite's transactions see one state, and write one after the other, by themselves. On
        PostgreSQL a writer has to see what was committed while it waited for its turn.
        """
        if not self.is_sqlite:
            options["isolation_level"] = isolation
        self._refuse_if_replaced()  # before a new connection makes a file where none is
        try:
            connection = self.engine.execution_options(**options).connect()
        except sa.exc.TimeoutError as error:
            # Every connection of this process is waiting: to whoever asks, a database that is away.
            raise sa.exc.OperationalError("connect", None, error) from error
        with connection:
            yield connection

    def migrate(self) -> None:
        """Bring the schema up to date; the first use does this by itself."""
        with self._migrate_once:
            if self._revision is None:
                self._revision = _run_migrations(self.engine)
                self._file = self._file_there()

    def overtaken_by(self, connection: sa.Connection) -> str | None:
        """Return to which migration a newer release has brought the store since, or None."""
        found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
        return None if found == self._revision else str(found)

    def _refuse_if_overtaken(self, connection: sa.Connection) -> None:
        found = self.overtaken_by(connection)
        if found is not None:
            if not self._overtaken:  # once: senders try again and again
                log.error("a newer release has migrated the store: no vote is taken in here now")
            self._overtaken = True
            raise sa.exc.OperationalError(
                None,
                None,
                PipelineError(
                    f"needed the store at migration {self._revision}, found it at {found}, where a "
                    "newer release has brought it since; end this process and start that release"
                ),
            )

    def is_replaced(self) -> bool:
        """Say whether SQLite's file is no longer the one that was opened here, or not there."""
        return self._revision is not None and self._file_there() != self._file

    def _file_there(self) -> tuple[int, int] | None:
        return file_identity(self.url.database or ":memory:") if self.is_sqlite else None

    def _refuse_if_replaced(self) -> None:
        """Raise OperationalError where a commit would go into a file that nobody reads again.

        SQLite goes on writing to an open file, wherever it was moved to, or removed. To open the
        one that is there now would not do: models, keys and MLflow are held of the former too.
        """
        if not self.is_replaced():
            return
        if not self._put_away:  # once: senders try again and again
            log.error(
                "the store's file was put away or replaced: nothing is stored from here now",
                file=self.url.database,
            )
        self._put_away = True
        raise sa.exc.OperationalError(
            None,
            None,
            PipelineError(
                f"needed the store's file that this process opened, found another or none at "
                f"{self.url.database}; end this process and start it again"
            ),
        )

    def reached(self) -> Database:
        """Return this database once it has answered and is up to date: for a door to a person.

        Raises ConfigError where it does not answer; elsewhere the driver's own error tells whoever
        tries again that it may come back.
        """
        try:
            self.migrate()
        except sa.exc.OperationalError as error:
            raise self._away(error.orig) from error
        return self

    def _away(self, error: BaseException | None) -> ConfigError:
        words = " ".join(str(error).split())
        if self.is_sqlite:
            if full := no_room(error, self.url.database or ""):
                return ConfigError(full)
            return ConfigError(
                f"needed a database file that can be read and written, found {self.url.database}: "
                f"{words}; mend that, or name another state folder with --state or RLHF_STATE_DIR"
            )
        shown = self.url.set(query={}).render_as_string(hide_password=True)
        return ConfigError(
            f"needed a database that answers, found {shown}: {words}; start it, or correct "
            "RLHF_DATABASE_URL or the recipe's database_url"
        )

    def fold_back(self) -> None:
        """Write SQLite's log back into the file and empty it: it holds what rows said before.

        It can be emptied when nobody reads what is older; until then this tries again and again,
        and gives up after FOLD_SECONDS, with a line in the log.
        """
        if not self.is_sqlite:
            return
        deadline = time.monotonic() + FOLD_SECONDS
        # SQLite keeps the writer's lock while it waits for readers: an export would hold every
        # vote up. So it waits for moments only, and others write between two tries.
        with closing(sqlite3.connect(self.url.database or "", timeout=FOLD_MOMENT)) as connection:
            while _is_read(connection):
                if time.monotonic() > deadline:
                    log.warning("the database's log was not emptied: somebody reads all the while")
                    return
                time.sleep(FOLD_MOMENT)

    def overwrite_leavings(self) -> None:
        """Rewrite SQLite's file: its pages keep copies of rows that were moved before they went.

        secure_delete overwrites a row, or an index's key, where it lies; when pages are balanced
        some move elsewhere, and where they lay is not overwritten (3.40: 3 to 22 copies of 2,000
        short rows and their keys). Who writes waits meanwhile: 8 s for 550 MiB on two cores. A file
        larger than REWRITTEN, or one that the disk has no room for twice, stays: the log says so.
        """
        if not self.is_sqlite:
            return
        path = self.url.database or ""
        if (size := Path(path).stat().st_size) > REWRITTEN:
            log.warning("the database was not rewritten: VACUUM it in a quiet hour", bytes=size)
            return
        with closing(sqlite3.connect(path, LOCK_SECONDS, isolation_level=None)) as connection:
            try:
                connection.execute("VACUUM")
            except sqlite3.OperationalError as error:
                log.warning("the database was not rewritten: VACUUM it", error=str(error))

    def close(self) -> None:
        """Give back every connection."""
        self.engine.dispose()


@functools.lru_cache(maxsize=32)
def open_database(url: str) -> Database:
    """Return the process's one Database for this URL; raises ConfigError for one in memory."""
    database = Database(url)
    if database.is_sqlite and database.url.database in (None, "", ":memory:"):
        raise ConfigError(
            f"database_url needs a file that outlives the process, found {url}; name it: "
            "sqlite:////srv/feedback.db, or leave database_url out"
        )
    return database


def _is_read(connection: sqlite3.Connection) -> bool:
    """Try to empty SQLite's log, and say whether somebody kept it from that."""
    busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return bool(busy)


def _set_sqlite_pragmas(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; _begin_as_asked does
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_milliseconds(LOCK_SECONDS)}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    # What is deleted is overwritten; what was moved before, by overwrite_leavings.
    cursor.execute("PRAGMA secure_delete=ON")
    cursor.close()


def _note_file(context: sa.ExceptionContext) -> None:
    """Add to a failed statement's error which file it was about: SQLite's own words name none."""
    error, engine = context.sqlalchemy_exception, context.engine
    if error is not None and engine is not None and engine.dialect.name == "sqlite":
        error.add_note(str(engine.url.database))


def _postgresql_arguments(url: sa.URL) -> dict[str, Any]:
    """Return what psycopg2 is to connect with, but what the URL says itself.

    A server that no packet reaches is given up within half a minute: the kernel alone waits for a
    quarter of an hour, and every request with it.
    """
    arguments = {
        "client_encoding": "utf8",  # whatever PGCLIENTENCODING says
        "connect_timeout": CONNECT_SECONDS,
        "keepalives_idle": 10,  # seconds
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,  # milliseconds
    }
    return {name: value for name, value in arguments.items() if name not in url.query}


def _check_options(engine: sa.Engine) -> None:
    """Raise ConfigError for an option in the URL that libpq does not know."""
    driver: Any = engine.dialect.dbapi
    asked = engine.dialect.create_connect_args(engine.url)[1]
    try:
        driver.extensions.make_dsn(**asked)  # as connecting does
    except driver.ProgrammingError as error:
        raise ConfigError(
            f"database_url needs options that libpq knows, found {str(error).strip()}; correct "
            "RLHF_DATABASE_URL or the recipe"
        ) from error


def _milliseconds(seconds: float) -> str:
    """Return a limit as PostgreSQL's settings and SQLite's take it."""
    return str(round(1000 * seconds))


def _begin_as_asked(connection: sa.Connection) -> None:
    # A writer takes the lock at once: a reader that turns writer half-way would fail as busy.
    options = connection.get_execution_options()
    mode, wait = options.get("sqlite_begin", "DEFERRED"), options.get("sqlite_wait") or LOCK_SECONDS
    connection.exec_driver_sql(f"PRAGMA busy_timeout={_milliseconds(wait)}")
    connection.exec_driver_sql(f"BEGIN {mode}")


def _run_migrations(engine: sa.Engine) -> str | None:
    """Bring the schema up to date and return the migration it then is at, this release's last."""
    from alembic import command
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    newest = ScriptDirectory.from_config(config).get_current_head()
    options: dict[str, Any] = {"sqlite_begin": "IMMEDIATE"}
    if engine.dialect.name == "postgresql":
        options = {"isolation_level": "READ COMMITTED"}  # who waited sees what the other did
    with engine.execution_options(**options).begin() as connection:
        if connection.dialect.name == "postgresql":
            # Two processes that start together migrate one after the other.
            connection.execute(SAID_FIRST, {"idle": _milliseconds(IDLE_SECONDS)})
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(712007)"))
            _need_utf8(connection)
        if MigrationContext.configure(connection).get_current_revision() == newest:
            return newest
        if connection.dialect.name == "postgresql":
            # Votes under way are in before it looks at any; those that wait are refused after it.
            connection.execute(ALONE, {"most": "0"})
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            if not sa.inspect(connection).has_table(feedback.name):
                raise ConfigError(
                    "needed a database of the store's own, found another program's, as Dagster's "
                    "or MLflow's: their tables have the names of some of ours; make one more with "
                    "CREATE DATABASE, and name that"
                ) from error
            raise PipelineError(
                f"needed a store that this release or an older one wrote, found: {error}; "
                "install the release that it was used with last, or restore a backup from before"
            ) from error
    return newest


def _need_utf8(connection: sa.Connection) -> None:
    """Raise ConfigError where a vote with a letter that the encoding lacks would never go in."""
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding != "UTF8":
        raise ConfigError(
            f"needed a database whose encoding is UTF8, found {encoding}, which cannot hold what "
            "people write; make one with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0, and "
            "move what is there with pg_dump"
        )
