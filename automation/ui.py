"""`make ui`: Dagster's page and daemon, MLflow's page, chat and review; a line each says where."""

import argparse
import signal
import sys
import time
from pathlib import Path

import psutil

from automation import processes
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.database import open_database
from rlhf_pipeline.errors import PipelineError


def main() -> None:
    """Start what people look at and run until interrupted; what prevents it is told in a line."""
    parser = argparse.ArgumentParser(
        prog="python -m automation.ui", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--dagster-port", type=int, default=3000)
    parser.add_argument("--mlflow-port", type=int, default=5000)
    parser.add_argument("--service-port", type=int, default=8080)
    parser.add_argument("--state", type=Path, default=None, help="default: the settings' state_dir")
    arguments = parser.parse_args()
    try:
        settings = load_settings(None, arguments.state and {"state_dir": arguments.state})
        open_database(settings.resolved_database_url).reached().close()
        run(
            settings.state_dir,
            dagster_port=processes.free_port(arguments.dagster_port),
            mlflow_port=processes.free_port(arguments.mlflow_port),
            service_port=processes.free_port(arguments.service_port),
        )
    except PipelineError as error:
        sys.stderr.write(f"error: {error}\n")  # as `rlhf` does
        sys.exit(1)


def run(state: Path, *, dagster_port: int, mlflow_port: int, service_port: int) -> None:
    """Start everything at these ports, say where it is, and end it all when interrupted."""
    processes.prepare_home(state)
    asks_at = {
        "RLHF_DAGSTER_URL": f"http://127.0.0.1:{dagster_port}",
        "RLHF_MLFLOW_URL": f"http://127.0.0.1:{mlflow_port}",
    }
    children = [
        processes.start_daemon(
            state,
            f"`make ui` (Dagster http://127.0.0.1:{dagster_port}, chat "
            f"http://127.0.0.1:{service_port})",
        ),
        processes.start_webserver(state, dagster_port),
        processes.start_mlflow(state, mlflow_port),
        processes.start_service(state, service_port, asks_at),
    ]
    known: set[psutil.Process] = set()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        sys.stdout.write(f"starting  Dagster, MLflow and the chat; their logs: {state / 'logs'}\n")
        sys.stdout.flush()
        for name, port, path, child in (
            ("Dagster", dagster_port, "/server_info", children[1]),
            ("MLflow", mlflow_port, "/health", children[2]),
            ("chat", service_port, "/health", children[3]),
        ):
            processes.wait_for(f"http://127.0.0.1:{port}{path}", child)
            sys.stdout.write(f"{name:9} http://127.0.0.1:{port}\n")
            sys.stdout.flush()
        for name, path in (("review", "/ui/review/"), ("dashboard", "/dashboard")):
            sys.stdout.write(f"{name:9} http://127.0.0.1:{service_port}{path}\n")
        sys.stdout.write(f"state     {state}   (Ctrl-C ends all of it)\n")
        sys.stdout.flush()
        while all(child.poll() is None for child in children):
            known = {*filter(processes.lives, known), *processes.started_by(children)}
            processes.shorten_logs(state)
            time.sleep(1)
        raise PipelineError(f"a server ended by itself; see {state / 'logs'}")
    except KeyboardInterrupt:
        pass
    finally:
        processes.stop(*children, known=known)


if __name__ == "__main__":
    main()
