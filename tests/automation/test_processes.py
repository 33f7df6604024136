"""The processes behind the loop: where they live, how they are awaited and ended."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from unittest.mock import patch

import dagster as dg
import psutil
import pytest
from typer.testing import CliRunner

from assets.common import GPU
from automation import processes, ui
from rlhf_pipeline.cli import app
from rlhf_pipeline.database import open_database
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.files import sqlite_url


@pytest.fixture
def environment() -> Iterator[None]:
    """Put os.environ back as it was."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[bytes]]:
    """A child that waits to be told to end."""
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_dagsters_home_is_in_the_state_folder_and_tells_nobody(
    tmp_path: Path, environment: None
) -> None:
    home = processes.prepare_home(tmp_path / "state")
    assert home == tmp_path / "state" / "dagster"
    made = {path.name: path for path in home.rglob("*.db")}
    assert set(made) == {"runs.db", "index.db", "schedules.db"}  # by nobody else at the same time
    assert heads(home) == [1, 1, 1]
    with dg.DagsterInstance.from_config(str(home)) as instance:
        # Dagster's queue holds nobody back for a pool whose row it has yet to make.
        [pool] = instance.event_log_storage.get_pool_limits()
    assert (pool.name, pool.limit) == (GPU, 1)
    (home / "dagster.yaml").write_text("stale: true")
    assert processes.prepare_home(tmp_path / "state") == home  # again, over what is there
    assert (home / "dagster.yaml").read_text() == (processes.ROOT / "dagster.yaml").read_text()
    assert os.environ["DAGSTER_HOME"] == str(home)
    assert os.environ["RLHF_STATE_DIR"] == str(tmp_path / "state")
    assert {os.environ[name] for name in processes.QUIET} == set(processes.QUIET.values())


def heads(home: Path) -> list[int]:
    """Return how many heads of its migrations each of Dagster's databases has."""
    found = []
    for path in home.rglob("*.db"):
        with closing(sqlite3.connect(path)) as connection:
            [(count,)] = connection.execute("SELECT count(*) FROM alembic_version")
            found.append(count)
    return found


def test_two_commands_in_one_moment_make_dagsters_databases_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import dagster, assets.common\n"
        "from automation.processes import prepare_home\n"
        "print('ready', flush=True); sys.stdin.read(1); prepare_home(Path(sys.argv[1]))"
    )
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "state")],
            cwd=processes.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for command in commands:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
    for command in commands:
        assert command.stdin is not None
        command.stdin.write("\n")
        command.stdin.flush()
    assert [command.communicate(timeout=60)[1] for command in commands] == ["", ""]
    assert [command.returncode for command in commands] == [0, 0]
    assert heads(tmp_path / "state" / "dagster") == [1, 1, 1]


KILLED_BEFORE = {  # in Dagster's order: which database, and what the statement begins with
    "runs": ("runs.db", "INSERT INTO alembic_version"),
    "events": ("index.db", "PRAGMA"),
    "schedules": ("schedules.db", "INSERT INTO alembic_version"),
    "pool": ("index.db", "INSERT INTO concurrency_limits"),
}


def test_dagsters_databases_are_made_to_the_end_after_a_kill_among_them(
    tmp_path: Path, environment: None
) -> None:
    code = (
        "import json, os, sys; from pathlib import Path; import dagster, assets.common\n"
        "import sqlalchemy as sa; from automation.processes import prepare_home\n"
        "def kill(connection, cursor, statement, *_):\n"
        "    if connection.engine.url.database.endswith(file) and statement.startswith(begins):\n"
        "        os.kill(os.getpid(), 9)\n"
        "sa.event.listen(sa.Engine, 'before_cursor_execute', kill)\n"
        "for name, (file, begins) in json.loads(sys.argv[2]).items():\n"
        "    if not (child := os.fork()): os._exit(bool(prepare_home(Path(sys.argv[1]) / name)))\n"
        "    assert os.waitpid(child, 0)[1] == 9, name"
    )
    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(KILLED_BEFORE)]
    subprocess.run(command, cwd=processes.ROOT, check=True)
    whole = marks(processes.prepare_home(tmp_path / "whole"))
    for name in KILLED_BEFORE:
        home = processes.prepare_home(tmp_path / name)
        assert heads(home) == [1, 1, 1], name
        assert marks(home) == whole, name
        with dg.DagsterInstance.from_config(str(home)) as instance:
            instance.add_dynamic_partitions("agents", ["tea"])
            assert [each.name for each in instance.event_log_storage.get_pool_limits()] == [GPU]


def marks(home: Path) -> dict[str, set[str]]:
    """Return what each of Dagster's databases says is done in it."""
    found = {}
    for path in home.rglob("*.db"):
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute("SELECT name FROM secondary_indexes").fetchall()
            found[path.name] = {name for (name,) in rows}
    return found


def test_dagsters_databases_may_lie_elsewhere(
    tmp_path: Path, environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide to PostgreSQL has them, by lines of one's own in dagster.yaml."""
    usual = (processes.ROOT / "dagster.yaml").read_text(encoding="utf-8")
    own = f"storage: {{sqlite: {{base_dir: {tmp_path / 'elsewhere'}}}}}\n"
    (tmp_path / "dagster.yaml").write_text(f"{usual}\n{own}", encoding="utf-8")
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    for _ in range(2):
        home = processes.prepare_home(tmp_path / "state")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert [each.name for each in instance.event_log_storage.get_pool_limits()] == [GPU]
    assert not [*home.rglob("*.db")]


def test_a_home_of_an_earlier_release_keeps_what_it_has(tmp_path: Path, environment: None) -> None:
    home = processes.prepare_home(tmp_path / "state")
    (home / "schedules" / "made").unlink()
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.event_log_storage.set_concurrency_slots(GPU, 2)  # as a person on the page
        instance.add_dynamic_partitions("agents", ["tea"])
    processes.prepare_home(tmp_path / "state")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert [each.limit for each in instance.event_log_storage.get_pool_limits()] == [2]
        assert instance.get_dynamic_partitions("agents") == ["tea"]


def test_a_child_logs_to_a_file_of_its_own(tmp_path: Path) -> None:
    code = "import os, sys; print('out', os.environ['PYTHON']); print('err', file=sys.stderr)"
    for _ in range(2):
        child = processes.start("talker", [sys.executable, "-c", code], tmp_path)
        assert child.wait(30) == 0
    lines = (tmp_path / "logs" / "talker.log").read_text().splitlines()
    assert sorted(lines) == sorted([f"out {sys.executable}", "err"] * 2)  # appended


def test_a_log_that_has_grown_large_is_put_aside_while_its_child_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOG_BYTES", 1000)
    code = "import sys; [print(line.strip() * 60, flush=True) for line in sys.stdin]"
    go_on = tmp_path / "go on"
    os.mkfifo(go_on)
    command = ["sh", "-c", f"exec {sys.executable} -c '{code}' < '{go_on}'"]
    child = processes.start("talker", command, tmp_path)
    log, before = tmp_path / "logs" / "talker.log", tmp_path / "logs" / "talker.log.1"
    with go_on.open("w") as told:
        for letter, kept in (("a", ""), ("b", "a"), ("c", "b")):
            told.write(f"{letter}\n" * 20)
            told.flush()
            wait_until(lambda: log.stat().st_size == 20 * 61)
            if kept:
                assert set(before.read_text()) == {kept, "\n"}
            processes.shorten_logs(tmp_path)
            assert log.stat().st_size == 0
            processes.shorten_logs(tmp_path)  # a small one is left alone
    assert child.wait(30) == 0
    assert set(before.read_text()) == {"c", "\n"}


def test_a_log_that_a_full_disk_has_no_room_to_put_aside_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOG_BYTES", 10)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    log = tmp_path / "logs" / "talker.log"
    log.parent.mkdir()
    log.write_text("a long line\n")
    child = processes.start("talker", [sys.executable, "-c", "print('on')"], tmp_path)
    assert child.wait(30) == 0
    processes.shorten_logs(tmp_path)  # as `make ui` does every second
    assert log.read_text() == "a long line\non\n"  # nothing of it is lost


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the signal")
@pytest.mark.parametrize(
    "also",
    [
        "pass",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])",
    ],
)
def test_a_child_ends_with_a_parent_that_was_killed(tmp_path: Path, also: str) -> None:
    code = (
        "from pathlib import Path; from automation import processes; import signal, sys, time;"
        f"{also};"
        "child = processes.start('idle', ['sleep', '600'], Path(sys.argv[1]));"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=processes.ROOT, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: child.name() == "sleep")
        parent.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_state_folder_has_one_daemon_until_that_has_ended(
    tmp_path: Path, environment: None
) -> None:
    processes.prepare_home(tmp_path)
    address = "`make ui` (Dagster http://127.0.0.1:3000)"
    daemon = processes.start_daemon(tmp_path, address)
    try:
        with pytest.raises(PipelineError, match=f"found {re.escape(address)} already at work"):
            processes.start_daemon(tmp_path)
        second = subprocess.run(
            [sys.executable, "-m", "automation.ui", "--state", str(tmp_path)],
            cwd=processes.ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 1
        assert second.stderr.startswith("error: needed a state folder that no Dagster daemon works")
        assert address in second.stderr
        assert second.stderr.count("\n") == 1
        assert second.stdout == ""
    finally:
        daemon.kill()
        daemon.wait()
    third = processes.start_daemon(tmp_path)  # nobody had to take the lock away
    threading.Timer(0.5, third.kill).start()
    processes.stop(processes.start_daemon(tmp_path, patience_seconds=20))
    assert third.wait(20) == -signal.SIGKILL


def test_a_daemon_whose_parent_was_killed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster").mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(processes, "start", lambda *_, **__: gone)
    with (tmp_path / "dagster" / "daemon.lock").open("w") as held:
        held.write(f"{gone.pid} `make ui`")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.5, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        assert processes.start_daemon(tmp_path, "the next") is gone
    written = (tmp_path / "dagster" / "daemon.lock").read_text()
    assert written == f"{os.getpid()} the next"


def test_a_port_that_is_taken_gives_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = processes.free_port(port)
        assert other != port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", other))  # it is free indeed
    assert processes.free_port(other) == other


def test_waiting_ends_when_the_server_answers(idle: subprocess.Popen[bytes]) -> None:
    port = processes.free_port(0)

    def serve_late() -> None:
        time.sleep(0.6)
        with HTTPServer(("127.0.0.1", port), Silent) as server:
            server.handle_request()

    thread = threading.Thread(target=serve_late, daemon=True)
    began = time.monotonic()
    thread.start()
    processes.wait_for(f"http://127.0.0.1:{port}/", idle, seconds=20)
    assert time.monotonic() - began >= 0.6
    thread.join()


class Silent(SimpleHTTPRequestHandler):
    """Answers without a word in the log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_waiting_for_a_server_that_ended_or_never_answers_raises(
    idle: subprocess.Popen[bytes],
) -> None:
    url = f"http://127.0.0.1:{processes.free_port(0)}/"
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(PipelineError, match=f"the server behind {url} ended; see the logs"):
        processes.wait_for(url, ended)
    with pytest.raises(PipelineError, match=f"{url} did not answer within 0.2 s"):
        processes.wait_for(url, idle, seconds=0.2)


def test_stopping_asks_first_and_kills_who_does_not_listen(
    idle: subprocess.Popen[bytes],
) -> None:
    processes.stop(idle)
    assert idle.returncode == -15
    processes.stop(idle)  # one that has ended is left alone
    deaf_code = "trap '' TERM; echo ready; while true; do sleep 0.1; done"
    with ExitStack() as both:
        deaf = [
            both.enter_context(subprocess.Popen(["sh", "-c", deaf_code], stdout=subprocess.PIPE))
            for _ in range(2)
        ]
        for child in deaf:
            both.callback(child.kill)
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        began = time.monotonic()
        processes.stop(*deaf, within_seconds=2)
        assert time.monotonic() - began < 4  # one grace for both
        assert [child.returncode for child in deaf] == [-9, -9]
    assert not any(psutil.pid_exists(child.pid) for child in deaf)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[bytes], int]]]:
    """Starts a child that starts one of its own, and ends without it, as Dagster's daemon does."""
    started: list[psutil.Process] = []

    def start(code: str) -> tuple[subprocess.Popen[bytes], int]:
        both = f'{sys.executable} -c "{code}" & echo $!; wait'
        child = subprocess.Popen(["sh", "-c", both], stdout=subprocess.PIPE)
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        started.extend((psutil.Process(child.pid), psutil.Process(pid)))
        assert child.stdout.readline() == b"ready\n"
        child.stdout.close()
        return child, pid

    yield start
    for process in started:
        if processes.lives(process):
            process.kill()


WAITS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.mark.parametrize("before", ["", "import signal; signal.signal(15, signal.SIG_IGN); "])
def test_what_a_child_started_ends_with_it(
    before: str,
    parent: Callable[[str], tuple[subprocess.Popen[bytes], int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that does not listen too: a run would train on, and promote, with nothing over it."""
    monkeypatch.setattr(processes, "BY_ITSELF_SECONDS", 0.2)
    child, pid = parent(before + WAITS)
    grandchild = psutil.Process(pid)
    processes.stop(child, within_seconds=1)
    assert child.returncode == -signal.SIGTERM
    assert not processes.lives(grandchild)


def test_what_a_child_started_is_not_asked_where_it_ends_by_itself(
    tmp_path: Path, parent: Callable[[str], tuple[subprocess.Popen[bytes], int]]
) -> None:
    """After Ctrl-C a run frees its claim, and asked again it would not come to that."""
    asked = tmp_path / "asked"
    child, pid = parent(
        f"import signal, time; signal.signal(15, lambda *_: open('{asked}', 'w')); "
        "print('ready', flush=True); time.sleep(1)"
    )
    grandchild = psutil.Process(pid)
    processes.stop(child)
    assert not processes.lives(grandchild)
    assert not asked.exists()


def test_make_ui_ends_what_its_daemon_started_where_that_died_by_itself(
    tmp_path: Path,
    parent: Callable[[str], tuple[subprocess.Popen[bytes], int]],
    idle: subprocess.Popen[bytes],
    environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon, pid = parent(WAITS)
    run = psutil.Process(pid)
    monkeypatch.setattr(processes, "BY_ITSELF_SECONDS", 0.2)
    monkeypatch.setattr(processes, "prepare_home", lambda _: None)
    monkeypatch.setattr(processes, "start_daemon", lambda *_: daemon)
    for name in ("start_webserver", "start_mlflow", "start_service"):
        monkeypatch.setattr(processes, name, lambda *_: idle)
    monkeypatch.setattr(processes, "wait_for", lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.5, daemon.kill).start()
    try:
        with pytest.raises(PipelineError, match="a server ended by itself"):
            ui.run(tmp_path, dagster_port=1, mlflow_port=2, service_port=3)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not processes.lives(run)
    assert idle.returncode == -signal.SIGTERM


@pytest.mark.parametrize("name", ["what?", "50%41"])
def test_a_folder_that_dagster_would_read_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="Dagster would keep its databases elsewhere"):
        processes.prepare_home(tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["what?", "50%41"])
def test_nothing_is_pruned_in_a_folder_that_dagster_would_read_otherwise(
    tmp_path: Path, name: str
) -> None:
    state = tmp_path / name  # as a restore makes it
    open_database(sqlite_url(state / "feedback.db")).reached().close()
    (state / "dagster").mkdir()
    shutil.copyfile(processes.ROOT / "dagster.yaml", state / "dagster" / "dagster.yaml")
    told = CliRunner().invoke(app, ["--state", str(state), "prune"])
    assert told.exit_code == 1
    assert "Dagster would keep its databases elsewhere; name another" in told.stderr
    assert list(tmp_path.iterdir()) == [state]
