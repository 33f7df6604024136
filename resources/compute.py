"""Runs a training stage in a process of its own and streams what it reports into the run.

A stage's process is started before its turn comes (`python -m resources.worker --ahead`): it has
imported torch and its like by then, on a core that light steps or the stage before leave idle.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pipes import PipesDefaultMessageWriter
from pydantic import Field, PrivateAttr

from resources.worker import AHEAD, specification
from rlhf_pipeline.files import read_json, write_json
from rlhf_pipeline.stages import Turn

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.3  # between looks at a stage and at what it reports
OBSERVE_SECONDS = 5.0  # between observations: the UI plots them, the event log keeps them
# For a launcher, to end its processes; a stage alone ends at once. automation/processes.py's `stop`
# asks a run after 5 s and kills it after 30: what is left is for the run to free its claim.
TERMINATE_SECONDS = 20.0
FOLLOWED = ("reward", "ppo")  # stages that another stage comes after, in every turn
# The last line of a traceback, to which torch may add whose it is of several processes.
OUR_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?rlhf_pipeline\.errors\.\w+: (.+)$", re.MULTILINE)
ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Interrupt|Exit)(?:: .*)?)$", re.MULTILINE
)
WORKER = (sys.executable, "-m", "resources.worker")


class WholeLines(dg.PipesMessageReader):
    """Hands on what a stage reports, by a temporary file, a whole line at a time.

    Dagster's own reader (1.13) takes the half of a line that a write across pages shows for a
    moment for a message, and ends over it: the rest of what the stage reports is then lost.
    """

    @contextmanager
    def read_messages(self, handler: dg.PipesMessageHandler) -> Iterator[dict[str, Any]]:
        """Read until the context ends, in a thread; yield what tells the stage where to write."""
        ended = threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "messages"
            path.touch()
            reader = threading.Thread(target=self._read, args=(path, handler, ended))
            reader.start()
            try:
                yield {PipesDefaultMessageWriter.FILE_PATH_KEY: str(path)}
            finally:
                ended.set()
                reader.join()

    def no_messages_debug_text(self) -> str:
        """Return what Dagster's warning of a stage that reported nothing ends with."""
        return "Attempted to read messages from a temporary file."

    @staticmethod
    def _read(path: Path, handler: dg.PipesMessageHandler, ended: threading.Event) -> None:
        rest, is_last = b"", False
        with path.open("rb") as messages:
            while not is_last:
                is_last = ended.wait(POLL_SECONDS)  # the stage has ended: all is written
                *lines, rest = (rest + messages.read()).split(b"\n")
                for line in lines:
                    handler.handle_message(json.loads(line))


class Compute(dg.ConfigurableResource):  # type: ignore[type-arg]  # generic only for its own value
    """One stage, one process. Several GPUs: `launcher` is put before the command."""

    # What RLHF_LAUNCHER says, such as accelerate launch --multi_gpu --num_processes 4.
    launcher: list[str] = Field(
        default_factory=lambda: shlex.split(os.environ.get("RLHF_LAUNCHER", ""))
    )

    _ahead: "subprocess.Popen[bytes] | None" = PrivateAttr(default=None)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Start the first stage's process when the run begins."""
        self.start_ahead()

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """End a process that no stage came for."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            _end_ahead(ahead)

    def start_ahead(self) -> None:
        """Start the process that the next stage will run in; a launcher's cannot be."""
        if self._ahead is None and not self.launcher:
            self._ahead = subprocess.Popen(
                [*WORKER, AHEAD],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def _start(
        self, stage: str, spec_path: Path, log_path: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Return the stage's process: the one started ahead where it lives, else a new one."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.stdin is not None:
            told = {
                "stage": stage,
                "specification": str(spec_path.absolute()),
                "log": str(log_path.absolute()),
                "environment": dict(environment),
            }
            try:
                ahead.stdin.write(json.dumps(told).encode() + b"\n")
                ahead.stdin.close()
                return ahead
            except OSError:  # it has ended; a new one says why in the stage's log
                _end_ahead(ahead)
        with log_path.open("ab") as log:
            return subprocess.Popen(
                [*(self.launcher or [sys.executable]), *WORKER[1:], stage, str(spec_path)],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run_stage(
        self, context: dg.AssetExecutionContext, stage: str, turn: Turn
    ) -> dict[str, Any]:
        """Return the stage's result. Raises dg.Failure, retryable when its process dies."""
        turn.work.mkdir(parents=True, exist_ok=True)
        spec_path = turn.work / f"{stage}.spec.json"
        write_json(spec_path, specification(turn))
        log_path = turn.work / f"{stage}.log"
        deadline = time.monotonic() + 60 * turn.settings.training.stage_timeout_minutes
        log_path.touch()
        start = log_path.stat().st_size  # earlier attempts wrote what is before it
        with dg.open_pipes_session(
            # Given an asset's context, Dagster 1.13 warns of what it reads from it itself.
            context=context.op_execution_context,
            context_injector=dg.PipesTempFileContextInjector(),
            message_reader=WholeLines(),
        ) as session:
            environment = {**_secrets(turn), **session.get_bootstrap_env_vars()}
            process = self._start(stage, spec_path, log_path, environment)
            if stage in FOLLOWED:
                self.start_ahead()
            try:
                shown = _follow(context, session, process, stage, deadline)
            except dg.DagsterExecutionInterruptedError:
                # Ctrl-C, or terminated in the UI: Dagster's retries would begin the step again.
                raise dg.Failure(
                    f"interrupted; asked for again, {_where_it_begins(stage, turn)}",
                    allow_retries=False,
                ) from None
            finally:
                _end(process)
        _observe(context, stage, session.get_custom_messages()[shown:])  # what came at the end
        if process.returncode != 0:
            tail = log_path.read_bytes()[start:].decode("utf-8", "replace")[-3000:]
            # What ended a process by a signal is not in its log.
            why = _why_ended(tail) if process.returncode > 0 else None
            raise dg.Failure(
                why or f"stage {stage} exited with {process.returncode}; see {log_path}",
                metadata={"log": str(log_path), "its end": tail},
                allow_retries="rlhf_pipeline.errors." not in tail,  # what is refused stays refused
            )
        return dict(read_json(turn.work / f"{stage}.json")["result"])


def _where_it_begins(stage: str, turn: Turn) -> str:
    """Return, in words, where an interrupted stage begins when it is asked for again."""
    if stage == "ppo" and turn.settings.ppo.estimator != "dpo":  # nothing else writes checkpoints
        return "it goes on from its last checkpoint"
    return "its stage begins anew"


def _why_ended(tail: str) -> str | None:
    """Return the words of our own error that a log ends with, else its last line of a traceback.

    None where a log has neither, as of a process that was killed.
    """
    if ours := OUR_ERROR.findall(tail):
        return str(ours[-1])
    lines = ERROR_LINE.findall(tail)
    return str(lines[-1]) if lines else None


def _follow(
    context: dg.AssetExecutionContext,
    session: Any,
    process: subprocess.Popen[bytes],
    stage: str,
    deadline: float,
) -> int:
    """Show now and then what a stage reports, until it ends; return how much has been shown."""
    shown, last = 0, -OBSERVE_SECONDS
    while process.poll() is None:
        messages = session.get_custom_messages()[shown:]
        if messages and time.monotonic() - last >= OBSERVE_SECONDS:
            _observe(context, stage, messages)
            shown, last = shown + len(messages), time.monotonic()
        if time.monotonic() > deadline:
            raise dg.Failure(
                f"stage {stage} needed more than training.stage_timeout_minutes, with what it "
                "stood still; raise it, or train less",
                allow_retries=False,
            )
        time.sleep(POLL_SECONDS)
    return shown


def _observe(
    context: dg.AssetExecutionContext, stage: str, messages: Sequence[Mapping[str, Any]]
) -> None:
    """Put the latest of what was reported into the run's events, where the UI plots it.

    With it the latest alarm, which other reports follow at once.
    """
    if messages:
        alarms = [message for message in messages if "alarm" in message]
        facts = {**(alarms[-1] if alarms else {}), **messages[-1]}
        part = facts.pop("stage", None)  # some stages name the part they are at
        context.log_event(
            dg.AssetObservation(
                asset_key=context.asset_key,
                partition=context.partition_key,
                metadata={"stage": f"{stage}: {part}" if part else stage, **facts},
            )
        )


def _secrets(turn: Turn) -> dict[str, str]:
    """Return what the worker needs and no file may hold, as environment variables."""
    url = turn.settings.database_url
    return {} if url is None else {"RLHF_DATABASE_URL": url.get_secret_value()}


def _end_ahead(process: "subprocess.Popen[bytes]") -> None:
    """End a process that has no work."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    process.kill()  # it holds nothing that is worth a farewell
    process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage that still runs, at once where the run is asked again: none is left behind."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(TERMINATE_SECONDS)
        except (subprocess.TimeoutExpired, dg.DagsterExecutionInterruptedError):
            process.kill()
            process.wait()
