"""Schemathesis over every operation of the service: no error of ours, no undocumented answer.

    python -m benchmarks.api_fuzz [--cases 100000] [--seed 0] [--seconds 1200] [--workers 2]

Requests follow the OpenAPI description, or break it on purpose (half of them, where they can). Each
goes with an admin's key, a client's, one agent's, or none. Judged: the status is documented and
below 500, the answer matches its schema and type, and what breaks the description is refused. Half
of the requests name an agent that is there: it has votes, and answers through an upstream that is a
function here; Dagster is one too, which trains that agent already. It goes in rounds, each of a
seed and a service of its own, `--workers` at a time. Exit code 1 says it fell short.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.python import asgi
from schemathesis.specs.openapi import checks

from benchmarks.promises import tell
from rlhf_pipeline.config import UpstreamSettings, load_settings
from rlhf_pipeline.database import open_database
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Feedback, FeedbackKind, Interaction, now, user_prompt
from rlhf_pipeline.serving import arms
from rlhf_pipeline.serving.access import OPEN
from rlhf_pipeline.serving.app import create_app
from rlhf_pipeline.serving.dagster_runs import DagsterRuns
from rlhf_pipeline.serving.keys import Keys

CHECKS = (
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
)
AGENT, INTERACTION = "tea", "i-1"
ROUND = 2500  # cases under one seed: one long run would remember all it drew, and slow down


@dataclass
class Found:
    """What a fuzz has met."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)  # by operation
    faults: dict[str, str] = field(default_factory=dict)  # the first of each kind, by its name
    faulty: int = 0  # cases

    @property
    def cases(self) -> int:
        """Return how many requests were sent."""
        return self.statuses.total()

    def add(self, more: Found) -> None:
        """Take over what another fuzz has met; of a kind of fault the first stays."""
        self.statuses += more.statuses
        self.faults = {**more.faults, **self.faults}
        self.faulty += more.faulty


@dataclass(frozen=True)
class World:
    """An application and the rights there are to it."""

    app: Any
    rights: dict[str, str | None]  # a name, and the key that is sent


@contextmanager
def world(state: Path) -> Iterator[World]:
    """Yield an application whose agent has votes, an upstream and a run at work."""
    upstream = {AGENT: UpstreamSettings(url="http://127.0.0.1:9/v1", model="none")}
    chosen = load_settings("tiny", {"state_dir": state, "serving": {"upstreams": upstream}})
    database = open_database(chosen.resolved_database_url)
    store = FeedbackStore(database)
    store.add_interactions([Interaction(INTERACTION, AGENT, user_prompt("hi"), "hello", 0, now())])
    score = FeedbackKind.score
    store.append(
        [
            Feedback(AGENT, score, f"k{i}", interaction_id=INTERACTION, number=i / 12)
            for i in range(12)
        ]
    )
    keys = Keys(state)
    rights = {
        "admin": keys.create("admin")[1],
        "client": keys.create("client")[1],
        "agent": keys.create("client", agent_id=AGENT)[1],
        "nobody": None,
    }

    async def echo(*_: Any, **__: Any) -> AsyncIterator[str | dict[str, Any]]:
        yield "hello"
        yield {"usage": {"prompt_tokens": 1, "completion_tokens": 1}, "finish_reason": "stop"}

    with ExitStack() as stack:
        stack.enter_context(patch.object(arms, "upstream_pieces", echo))
        stack.enter_context(patch.object(DagsterRuns, "at_work", lambda self, agent: "run-1"))
        yield World(create_app(chosen, pages=False), rights)
    database.close()


def fuzz_rounds(
    cases: int, *, start: int, workers: int, size: int = ROUND, until: float = math.inf
) -> Iterator[Found]:
    """Yield what each round of `size` cases has met, as it ends; so many at a time.

    Rounds have the seeds `start`, `start + 1`, ...; none begins after `until`, by time.time().
    """
    sizes = [min(size, cases - sent) for sent in range(0, cases, size)]
    apart = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(sizes)), mp_context=apart) as pool:
        rounds = [pool.submit(_round, n, start + i, until) for i, n in enumerate(sizes)]
        for done in as_completed(rounds):
            yield done.result()


def _round(cases: int, start: int, until: float) -> Found:
    """Fuzz a service of its own, so that what is found is found again with the seed alone."""
    if time.time() > until:
        return Found()
    with tempfile.TemporaryDirectory() as folder, world(Path(folder)) as made:
        return fuzz(made, cases, start=start)


def fuzz(made: World, cases: int, *, start: int = 0) -> Found:
    """Send about so many requests, spread over all operations, and return what was met.

    An operation without parameters has but a few different requests.
    """
    found = Found()
    schema = schemathesis.openapi.from_dict(made.app.openapi())
    schema.config.generation.with_security_parameters = False  # rights are ours to send
    operations: list[Any] = [each.ok() for each in schema.get_all_operations()]  # type: ignore[union-attr]
    fit, unfit = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
    ways = [(op, fit) for op in operations]
    ways += [(op, unfit) for op in operations if op.body or op.query]  # any path is a fit one
    each = -(-cases // sum(_varies(op) for op, _ in ways))
    with asgi.get_client(made.app, max_stream_events=100) as client:
        client.trust_env = False  # nor does it look for a proxy, each time
        for operation, mode in ways:
            many = each if _varies(operation) else min(each, 4)
            _send(made, client, operation, mode, many, start, found)
    return found


def _varies(operation: Any) -> bool:
    return bool(operation.body or operation.query or operation.path_parameters)


def _send(
    made: World,
    client: Any,
    operation: Any,
    mode: GenerationMode,
    many: int,
    start: int,
    found: Found,
) -> None:
    @seed(start)
    @settings(
        max_examples=many,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        operation.as_strategy(generation_mode=mode),
        st.sampled_from(["admin", "admin", *made.rights]),
        st.booleans(),
    )
    def one(case: Any, who: str, known: bool) -> None:
        if (
            known and mode is GenerationMode.POSITIVE
        ):  # another body would no longer break what this one breaks
            _name_what_is_there(case)
        key = made.rights[who]
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        answer = case.call(session=client, base_url="http://localhost", headers=headers)
        found.statuses[operation.label, answer.status_code] += 1
        try:
            judged = list(CHECKS)
            if answer.status_code != 413:  # a refusal too, which Schemathesis counts as none
                judged.append(checks.negative_data_rejection)
            case.validate_response(answer, checks=judged)
            # What is too long is refused before it is read, and before a key is asked for.
            refused = answer.status_code in (401, 413)
            if key is None and operation.path not in OPEN and not refused:
                raise AssertionError(f"nobody was answered {answer.status_code}")
        except (AssertionError, BaseExceptionGroup) as error:
            found.faulty += 1
            kind = f"{operation.label} {answer.status_code} {type(error).__name__}"
            found.faults.setdefault(kind, f"{error}\n{who}: {case.body!r}"[:3000])

    one()


def _name_what_is_there(case: Any) -> None:
    """Put the agent and the interaction that are there in place of what was made up."""
    for name in ("agent_id", "name"):
        if name in (case.path_parameters or {}):
            case.path_parameters[name] = AGENT
    if isinstance(case.body, dict):
        for name, value in (
            ("agent_id", AGENT),
            ("model", AGENT),
            ("interaction_id", INTERACTION),
        ):
            if isinstance(case.body.get(name), str):
                case.body[name] = value
        if isinstance(messages := case.body.get("messages"), list):
            messages.append({"role": "user", "content": "hi"})  # or few have words to be answered


def main() -> None:
    """Fuzz, print what was answered how often, and whether it held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="Then no new round.")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="Processes.")
    asked = parser.parse_args()
    began, until = time.monotonic(), time.time() + asked.seconds
    found = Found()
    for met in fuzz_rounds(asked.cases, start=asked.seed, workers=asked.workers, until=until):
        found.add(met)
        took = time.monotonic() - began
        print(f"{found.cases} cases, {found.faulty} faulty, {took:.0f} s", flush=True)
    for (operation, status), count in sorted(found.statuses.items()):
        print(f"{operation:45} {status}  {count}")
    for kind, words in found.faults.items():
        print(f"\n{kind}\n{words}")
    print(f"{found.cases} cases in {time.monotonic() - began:.0f} s")
    what = "requests that follow or break the description, answered as it says"
    tell([(what, "all", f"{found.cases - found.faulty} of {found.cases}", not found.faulty)])


if __name__ == "__main__":
    main()
