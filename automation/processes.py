"""The processes behind the loop: Dagster's home and daemon, its web page, MLflow's page.

Each is a child that ends with its parent, on Linux with one that was killed too; what it started
(Dagster's code servers, a run and its stages) ends with it where `stop` ends it, and goes on where
the parent was killed. Each logs to <state>/logs/<name>.log, and what was in it before it grew large
to <name>.log.1 beside it.
"""

import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.files import locked, make_private

ROOT = Path(__file__).resolve().parents[1]
QUIET: Mapping[str, str] = {  # telemetry of every dependency is off
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DAGSTER_DISABLE_TELEMETRY": "1",
}
BY_ITSELF_SECONDS = 5.0  # for what a child started: Ctrl-C or the child's own end may do
KILLED_SECONDS = 10.0  # the kernel's, to end what was killed; longer where it waits for a disk
ORPHAN_SECONDS = 60.0  # a daemon whose parent was killed has ended by then, also where it is slow
LOG_BYTES = 16 * 2**20  # twice that a child, at most; Dagster's daemon writes 30 MB on a quiet day
# Asks Linux for SIGTERM once the parent (argv 1) is gone, then becomes the command (argv 2 on). A
# program of its own: what Popen would run between fork and exec may hang where there are threads.
# A parent's ignoring the signal, or holding it back, would be inherited.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, prctl(2); exec keeps it
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def prepare_home(state_dir: Path) -> Path:
    """Return <state>/dagster with dagster.yaml and databases in it, and point this process at it.

    Raises ConfigError as `home_of` does.
    """
    home = home_of(state_dir)
    make_private(home.parent)
    home.mkdir(exist_ok=True)
    shutil.copyfile(ROOT / "dagster.yaml", home / "dagster.yaml")
    os.environ.update(QUIET)
    # Threads that spin while they wait starve the other processes of a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["DAGSTER_HOME"] = str(home)
    os.environ["RLHF_STATE_DIR"] = str(state_dir.absolute())
    _make_databases(home)
    return home


def home_of(state_dir: Path) -> Path:
    """Return <state>/dagster, there or not.

    Raises ConfigError for a folder whose name Dagster would read otherwise in its databases' URLs.
    """
    home = state_dir.absolute() / "dagster"
    if re.search(r"\?|%[0-9A-Fa-f]{2}", str(home)):
        raise ConfigError(
            f"needed a state folder without ? and %41 in its path, found {home}: Dagster would "
            "keep its databases elsewhere; name another with --state or RLHF_STATE_DIR"
        )
    return home


def _make_databases(home: Path) -> None:
    """Make Dagster's databases where they are not whole, and the pool's row in them.

    What two processes leave that make them at once may be beyond mending: two heads of the
    migrations, which every later one refuses. And a pool that has no row yet, Dagster's queue holds
    nobody back for: it reads the rows first and makes those that were missing after.
    """
    made = home / "schedules" / "made"  # a database is there before its tables are
    if made.exists():
        return
    import dagster as dg

    from assets.common import GPU

    with (home / "made.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not made.exists():
            with dg.DagsterInstance.get() as instance:
                # What a kill cut short Dagster takes for made, by a file or by a first table.
                schedules, events = instance.schedule_storage, instance.event_log_storage
                assert schedules is not None  # by dagster.yaml
                for storage in (instance.run_storage, schedules):
                    storage.migrate()
                    storage.optimize()
                events.reindex_events()
                events.reindex_assets()
                if GPU not in {pool.name for pool in events.get_pool_limits()}:  # a person's stays
                    events.initialize_concurrency_limit_to_default(GPU)
            made.parent.mkdir(exist_ok=True)  # none of them lies there where PostgreSQL has them
            made.touch()


def start(
    name: str,
    command: list[str],
    state_dir: Path,
    environment: Mapping[str, str] | None = None,
    *,
    keeps_open: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a child process that logs to <state>/logs/<name>.log; it inherits `keeps_open`, files.

    To be called in the main thread: Linux takes the end of the thread for the parent's.
    """
    logs = state_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    shorten_logs(state_dir)
    if sys.platform == "linux":
        parent = str(os.getpid())
        command = [sys.executable, "-ISc", _END_WITH_PARENT, parent, *command]
    with (logs / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHON": sys.executable, **(environment or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            pass_fds=keeps_open,
        )


def shorten_logs(state_dir: Path) -> None:
    """Put what a log holds that has grown large into <name>.log.1; whoever writes it goes on.

    The file stays the one its writer has open, so it is copied and emptied; what is written
    between the two is lost. On a full disk it is left as it is: nobody ends for a log's sake.
    """
    for log in (state_dir / "logs").glob("*.log"):
        with suppress(OSError):
            if log.stat().st_size > LOG_BYTES:
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                os.truncate(log, 0)  # its writer appends: the next line is the first


def start_daemon(
    state_dir: Path, within: str = "a program", *, patience_seconds: float = 0
) -> "subprocess.Popen[bytes]":
    """Start Dagster's daemon: sensors, schedules, the run queue, run monitoring.

    Two would ask for everything twice, so it holds a lock on the state folder for as long as it
    lives, however it ends. Raises PipelineError where another has it, with what that one was
    started `within`; one whose parent was killed takes seconds to end, and is waited for, as any
    other is for `patience_seconds`.
    """
    command = [sys.executable, "-m", "automation.daemon", "run", "-w", "workspace.yaml"]
    path = state_dir / "dagster" / "daemon.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as lock:
        began = time.monotonic()
        while not locked(lock):
            lock.seek(0)
            parent, _, other = lock.read().partition(" ")
            ends = parent.isdecimal() and not psutil.pid_exists(int(parent))
            patience = max(patience_seconds, ORPHAN_SECONDS if ends else 0)
            if time.monotonic() - began >= patience:
                raise PipelineError(
                    f"needed a state folder that no Dagster daemon works on, found {other} "
                    f"already at work on {state_dir}; use that one, end it, or name another folder "
                    "in RLHF_STATE_DIR"
                )
            time.sleep(0.2)
        lock.truncate(0)
        lock.write(f"{os.getpid()} {within}")
        lock.flush()
        return start("dagster-daemon", command, state_dir, keeps_open=[lock.fileno()])


def start_webserver(state_dir: Path, port: int) -> "subprocess.Popen[bytes]":
    """Start Dagster's page on loopback."""
    command = [sys.executable, "-m", "automation.dagster_page", "-w", "workspace.yaml"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return start("dagster-webserver", command, state_dir)


def start_mlflow(state_dir: Path, port: int) -> "subprocess.Popen[bytes]":
    """Start MLflow's page on loopback (mlflow/start says how)."""
    command = ["sh", str(ROOT / "mlflow" / "start"), str(state_dir.absolute()), str(port)]
    return start("mlflow", command, state_dir)


def start_service(
    state_dir: Path,
    port: int,
    environment: Mapping[str, str] | None = None,
    *,
    pages: bool = True,
) -> "subprocess.Popen[bytes]":
    """Start the service on loopback: pages, feedback, policies; without `pages` the API alone."""
    command = [sys.executable, "-m", "rlhf_pipeline.cli", "--state", str(state_dir.absolute())]
    command += ["serve", "--port", str(port), "--pages" if pages else "--no-pages"]
    return start("service", command, state_dir, environment)


def started_by(
    children: Iterable["subprocess.Popen[bytes] | psutil.Process"],
) -> set[psutil.Process]:
    """Return what these processes have started, and what that has; of one that has ended, nothing.

    Dagster's daemon starts code servers, and those the runs; neither ends with it.
    """
    found: set[psutil.Process] = set()
    for child in children:
        with suppress(psutil.NoSuchProcess):  # it knows its own process from another of that number
            process = child if isinstance(child, psutil.Process) else psutil.Process(child.pid)
            found.update(process.children(recursive=True))
    return found


def stop(
    *children: "subprocess.Popen[bytes]",
    known: Collection[psutil.Process] = (),
    within_seconds: float = 30.0,
) -> None:
    """End children and what they started: all are asked, and those killed that do not listen.

    The children first: what they started may have been asked already, by Ctrl-C, and a run that is
    asked again while it frees its claim would not come to that. `known` is what had been started
    before a child ended by itself: from then on nobody tells whose it was.
    """
    asked = [child for child in children if child.poll() is None]
    family = {*known, *started_by([*asked, *known])}
    for child in asked:
        child.terminate()
    began = time.monotonic()
    _wait(asked, family, began + min(BY_ITSELF_SECONDS, within_seconds / 2))
    family |= started_by([*asked, *family])
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.terminate()
    _wait(asked, family, began + within_seconds)
    for each in (*asked, *family):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    _wait(asked, family, began + within_seconds + KILLED_SECONDS)


def _wait(
    children: Iterable["subprocess.Popen[bytes]"],
    family: Iterable[psutil.Process],
    deadline: float,
) -> None:
    """Return once all have ended, or at the deadline."""
    while any(child.poll() is None for child in children) or any(map(lives, family)):
        if time.monotonic() >= deadline:
            return
        time.sleep(0.05)


def lives(process: psutil.Process) -> bool:
    """Return whether a process still runs; one that nobody has reaped yet does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def free_port(wanted: int) -> int:
    """Return the wanted port, or one the system gives where it is taken."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise PipelineError("no free port on 127.0.0.1; stop a server and try again")


def wait_for(url: str, process: "subprocess.Popen[bytes]", *, seconds: float = 600.0) -> None:
    """Return when the address answers; raises PipelineError when its process ends or time is up.

    A server that cannot start ends, which is told at once. One that lives is only slow: on two busy
    cores MLflow has taken over two minutes.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PipelineError(f"the server behind {url} ended; see the logs in the state folder")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise PipelineError(f"{url} did not answer within {seconds:g} s; see the logs")
