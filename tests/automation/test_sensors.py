"""Each sensor and the schedule, as the daemon evaluates them: skips, fires once, not twice."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import json
import os
import shutil
import sqlite3
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dagster as dg
import pytest
import structlog
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from assets.common import Materialized
from automation import due_turns, outbox, sensors
from automation.dead import ASSETS
from automation.jobs import DROPPED, WATERMARK, why_failed
from automation.sensors import SETTLED
from resources.pipeline import AGENT, ASKED_BY, Pipeline, bootstrap_mark
from rlhf_pipeline.continuous import BACK_OFF
from rlhf_pipeline.definitions import definitions
from rlhf_pipeline.errors import NotEnoughData, RegistryError
from rlhf_pipeline.evaluation.facts import DRIFT
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.experiment.watch import WATCH
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.inbox import left_in, refused_files
from rlhf_pipeline.feedback.ingest import IngestSummary, ingest
from rlhf_pipeline.feedback.withdrawn import lines_in, unread_in
from rlhf_pipeline.files import folder_sha256, locked, read_yaml, write_text
from rlhf_pipeline.records import Feedback, FeedbackKind, Interaction, now, user_prompt, uuid7
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.stages import BEGAN, REWARD
from tests.assets.world import QUIET, Loop, chat, failures, write_recipe
from tests.experiment.world import ledger_of_two, meet
from tests.loopback import answering

EXPIRED = timedelta(seconds=-1)


class Ticks:
    """A fresh state folder, and ticks of its sensors and schedule as the daemon makes them."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.state, self.instance = folder / "state", instance
        self.recipe = folder / "minute.yaml"
        self.set()

    def set(self, **changes: Any) -> None:
        """Change the recipe."""
        write_recipe(self.recipe, self.state, **changes)
        self.pipeline = Pipeline(recipe=str(self.recipe))

    def tick(self, sensor: str, cursor: str | None = None) -> Any:
        """Evaluate a sensor; what comes back is what the daemon acts on."""
        defs = definitions()
        with dg.build_sensor_context(
            instance=self.instance,  # so that none is opened anew
            instance_ref=self.instance.get_ref(),
            definitions=defs,
            cursor=cursor,
            resources={"pipeline": self.pipeline},
            sensor_name=sensor,
        ) as context:
            return defs.resolve_sensor_def(sensor).evaluate_tick(context)

    def vote(self, agent_id: str, count: int, *, start: int = 0) -> None:
        """Store thumbs of as many people."""
        self.pipeline.store.append(
            [
                Feedback(
                    agent_id=agent_id,
                    kind=FeedbackKind.thumbs,
                    idempotency_key=f"{agent_id} {i}",
                    prompt=user_prompt("how much is the kettle?"),
                    completion="the kettle is 9 coins.",
                    number=1.0,
                    rater_id=f"rater {i}",
                )
                for i in range(start, start + count)
            ]
        )

    def start_run(self, agent_id: str, *, job: str = "bootstrap", **tags: str) -> dg.DagsterRun:
        """Make a run that is at work, as far as Dagster knows; the job's kind is no matter."""
        return self.instance.create_run_for_job(
            definitions().resolve_job_def(job),
            status=dg.DagsterRunStatus.STARTED,
            tags={AGENT: agent_id, **tags},
        )


@pytest.fixture
def ticks(tmp_path: Path, loop: Loop) -> Iterator[Ticks]:
    made = Ticks(tmp_path, loop.instance)
    yield made
    made.pipeline.database.close()


# -- enough_new_feedback ----------------------------------------------------------------------


def test_without_feedback_there_is_nothing_to_do(ticks: Ticks) -> None:
    tick = ticks.tick("enough_new_feedback")
    assert (tick.run_requests, tick.skip_message) == ([], "no agent has sent feedback yet")


def test_a_turn_is_asked_for_once_there_are_enough_votes(ticks: Ticks) -> None:
    agent = "enough"
    ticks.vote(agent, 39)
    tick = ticks.tick("enough_new_feedback")
    assert tick.run_requests == []
    [added] = tick.dynamic_partitions_requests  # a new agent is a partition from its first vote
    assert (added.partitions_def_name, list(added.partition_keys)) == ("agents", [agent])
    ticks.instance.add_dynamic_partitions("agents", [agent])
    assert ticks.tick("enough_new_feedback").skip_message == "enough: 39 new votes of the 40 needed"

    ticks.vote(agent, 1, start=39)
    [request] = ticks.tick("enough_new_feedback").run_requests
    watermark = snapshot.newest_seq(ticks.pipeline.database, agent)
    assert request.run_key == f"{agent}:{watermark}:1"
    assert (request.partition_key, request.job_name) == (agent, "retrain")
    assert request.run_config["ops"]["feedback_snapshot"]["config"] == {"watermark": watermark}
    assert request.tags[ASKED_BY] == "sensor"
    assert request.tags["rlhf/new_votes"] == "40"
    assert request.tags["dagster/max_runtime"] == str(480 * 60)
    # Until the run has begun, the same request comes again: the daemon starts a run key once.
    [same] = ticks.tick("enough_new_feedback").run_requests
    assert same.run_key == request.run_key


def test_a_new_agent_with_enough_votes_is_added_and_trained_in_the_same_tick(
    ticks: Ticks,
) -> None:
    ticks.vote("newcomer", 40)
    tick = ticks.tick("enough_new_feedback")
    assert [list(r.partition_keys) for r in tick.dynamic_partitions_requests] == [["newcomer"]]
    assert [r.partition_key for r in tick.run_requests] == ["newcomer"]


def test_no_second_turn_is_asked_for_while_one_runs_nor_from_the_same_votes(ticks: Ticks) -> None:
    agent = "once"
    ticks.instance.add_dynamic_partitions("agents", [agent])
    ticks.vote(agent, 40)
    [request] = ticks.tick("enough_new_feedback").run_requests
    mark = snapshot.fingerprint(ticks.pipeline.database, agent, 40)
    claims = ticks.pipeline.claims
    claim = claims.claim(agent, mark, 40, holder="run-of-it", asked_by="sensor")
    skipped = ticks.tick("enough_new_feedback")
    assert skipped.run_requests == []
    assert "run run-of-i holds attempt 1" in skipped.skip_message
    claims.finish(claim.token, "done", "promoted")
    assert ticks.tick("enough_new_feedback").skip_message == "once: 0 new votes of the 40 needed"

    ticks.vote(agent, 40, start=40)
    [second] = ticks.tick("enough_new_feedback").run_requests
    assert second.run_key != request.run_key


def test_while_a_run_waits_in_the_queue_newer_votes_ask_for_none_beside_it(ticks: Ticks) -> None:
    agent = "queueing"
    ticks.instance.add_dynamic_partitions("agents", [agent])
    ticks.vote(agent, 40)
    [first] = ticks.tick("enough_new_feedback").run_requests
    home = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "ours")
    run = ticks.instance.create_run_for_job(
        definitions().resolve_job_def("retrain"),
        status=dg.DagsterRunStatus.QUEUED,
        tags={AGENT: agent},
        remote_job_origin=RemoteJobOrigin(home, "retrain"),
    )
    ticks.vote(agent, 1, start=40)  # another watermark: the run key alone would let it through
    said = f"queueing: run {run.run_id[:8]} waits or is at work"
    for tick in (ticks.tick("enough_new_feedback"), night(ticks)):
        assert (tick.run_requests or [], tick.skip_message) == ([], said)

    ticks.instance.report_run_canceled(run)
    [second] = ticks.tick("enough_new_feedback").run_requests
    assert second.run_key != first.run_key


def test_a_person_who_votes_again_on_the_same_answer_is_one_vote(ticks: Ticks) -> None:
    agent = "fickle"
    ticks.instance.add_dynamic_partitions("agents", [agent])
    event = Feedback(
        agent_id=agent,
        kind=FeedbackKind.thumbs,
        idempotency_key="",
        prompt=user_prompt("how much is the kettle?"),
        completion="9 coins",
        number=1.0,
        rater_id="one person",
    )
    events = [replace(event, idempotency_key=str(i), number=float(i % 2)) for i in range(100)]
    ticks.pipeline.store.append(events)
    assert ticks.tick("enough_new_feedback").skip_message == "fickle: 1 new votes of the 40 needed"


def test_a_paused_agent_waits_and_another_does_not(ticks: Ticks) -> None:
    for agent in ("paused", "busy"):
        ticks.instance.add_dynamic_partitions("agents", [agent])
        ticks.vote(agent, 40)
    ticks.pipeline.store.set_agent("paused", paused_reason="a person is looking")
    assert [r.partition_key for r in ticks.tick("enough_new_feedback").run_requests] == ["busy"]
    ticks.pipeline.store.set_agent("busy", paused_reason="this one too")
    skipped = ticks.tick("enough_new_feedback").skip_message
    assert skipped == "paused: paused: a person is looking; busy: paused: this one too"


def test_each_agent_follows_its_own_recipe(ticks: Ticks, tmp_path: Path) -> None:
    own = write_recipe(
        tmp_path / "own.yaml", ticks.state, continuous_learning={"min_new_feedback": 5}
    )
    ticks.instance.add_dynamic_partitions("agents", ["eager", "plain"])
    ticks.pipeline.store.ensure_agent("eager", recipe=str(own))
    ticks.vote("eager", 5)
    ticks.vote("plain", 5)
    assert [r.partition_key for r in ticks.tick("enough_new_feedback").run_requests] == ["eager"]


def test_an_agent_whose_recipe_has_gone_keeps_no_other_one_waiting(ticks: Ticks) -> None:
    agents = ["gone", "here"]
    ticks.instance.add_dynamic_partitions("agents", agents)
    for agent in agents:
        ticks.vote(agent, 40)
    ticks.pipeline.store.set_agent("gone", recipe="/srv/recipes/gone.yaml")
    for asked in (ticks.tick("enough_new_feedback"), night(ticks)):
        assert [r.partition_key for r in asked.run_requests] == ["here"]
    ticks.pipeline.store.set_agent("here", paused_reason="enough")
    skipped = ticks.tick("enough_new_feedback").skip_message
    assert "gone: needed a recipe, found no /srv/recipes/gone.yaml" in skipped
    told = ticks.tick("alerts")
    assert json.loads(told.cursor) == ["gone/settings_unsound"]

    ticks.pipeline.store.set_agent("here", paused_reason=None)
    for agent in agents:
        run = ticks.start_run(agent, job="retrain")
        mark = snapshot.fingerprint(ticks.pipeline.database, agent, 80)
        ticks.pipeline.claims.claim(
            agent, mark, 80, holder=run.run_id, asked_by="sensor", lease=EXPIRED
        )
    assert [r.partition_key for r in ticks.tick("dead_runs").run_requests] == ["here"]


@pytest.mark.parametrize("damage", ["a date that is none", "a folder not ours", "a turn's file"])
def test_an_agent_that_cannot_be_judged_keeps_no_other_one_waiting(
    ticks: Ticks, tmp_path: Path, damage: str
) -> None:
    for agent in ("aaa", "good"):
        ticks.instance.add_dynamic_partitions("agents", [agent])
        ticks.vote(agent, 40)
    recipe, told_as = tmp_path / "private" / "own.yaml", "settings_unsound"
    with contextlib.ExitStack() as held:
        if damage == "a turn's file":
            told_as = "not_looked_at"
            begun = began_and_failed(ticks, "aaa")
            write_text(begun, "")
            later = now() + BACK_OFF + timedelta(minutes=1)
            for module in (due_turns, sensors):
                held.enter_context(patch.object(module, "now", lambda: later))
        else:
            recipe.parent.mkdir()
            recipe.write_text("note: 2026-02-30\n")
            ticks.pipeline.store.set_agent("aaa", recipe=str(recipe))
        if damage == "a folder not ours":  # root, who may run the tests, enters every folder

            def read(path: Path) -> Any:
                if path == recipe:
                    raise PermissionError(13, "Permission denied", str(path))
                return read_yaml(path)

            held.enter_context(patch("rlhf_pipeline.config.read_yaml", read))
        asked = ticks.tick("enough_new_feedback").run_requests
        assert [request.partition_key for request in asked] == ["good"]
        assert [request.partition_key for request in night(ticks).run_requests] == ["good"]
        assert f"aaa/{told_as}" in json.loads(ticks.tick("alerts").cursor)


def began_and_failed(ticks: Ticks, agent_id: str) -> Path:
    """Let a turn fail once its rewards are trained; return the file that says how it began."""
    ticks.pipeline.ledger.add_baseline(
        agent_id,
        label="v0",
        path=ticks.state / "0",
        files={"model.safetensors": "00"},
        lineage={},
        actor="test",
    )
    watermark = snapshot.newest_seq(ticks.pipeline.database, agent_id)
    mark = snapshot.fingerprint(ticks.pipeline.database, agent_id, watermark)
    claims = ticks.pipeline.claims
    claim = claims.claim(agent_id, mark, watermark, holder="run", asked_by="sensor")
    claims.finish(claim.token, "failed", "the disk is full")
    folder = ticks.pipeline.settings(agent_id).turn_folder(agent_id, mark)
    write_text(folder / REWARD, "{}")
    return folder / BEGAN


@pytest.mark.parametrize(("agent", "end"), [("stillborn", "failed"), ("unqueued", "canceled")])
def test_a_run_that_ended_before_it_began_is_asked_for_again_later(
    ticks: Ticks, agent: str, end: str
) -> None:
    ticks.instance.add_dynamic_partitions("agents", [agent])
    ticks.vote(agent, 40)
    [first] = ticks.tick("enough_new_feedback").run_requests

    def die(asked: dg.RunRequest) -> None:
        run = ticks.start_run(agent, job="retrain", **{WATERMARK: asked.tags[WATERMARK]})
        getattr(ticks.instance, f"report_run_{end}")(run)

    die(first)
    skipped = ticks.tick("enough_new_feedback").skip_message
    assert f"{agent}: 1 runs ended before they began; next in 0:0" in skipped

    def later(after: timedelta) -> Any:
        moment = now() + after
        with patch.object(sensors, "now", lambda: moment):
            return ticks.tick("enough_new_feedback")

    [again] = later(BACK_OFF).run_requests
    assert again.run_key == f"{first.run_key}.1"  # the daemon would not start the first key twice
    assert later(-timedelta(days=30)).run_requests  # a clock far ahead dated its end
    die(again)
    assert "2 runs ended" in later(BACK_OFF).skip_message
    [third] = later(2 * BACK_OFF).run_requests
    assert third.run_key == f"{first.run_key}.2"
    die(third)
    assert "a person must look" in later(99 * BACK_OFF).skip_message
    # Other votes are asked for again, and not at once for the fourth time.
    ticks.vote(agent, 1, start=40)
    assert "3 runs ended before they began; next in" in later(2 * BACK_OFF).skip_message
    [other] = later(4 * BACK_OFF).run_requests
    assert other.tags[WATERMARK] != third.tags[WATERMARK]


def test_a_turn_whose_claim_went_as_the_store_was_put_back_is_asked_for_again(
    ticks: Ticks,
) -> None:
    agent, database = "put-back", ticks.pipeline.database
    ticks.instance.add_dynamic_partitions("agents", [agent])
    ticks.vote(agent, 40)
    [asked] = ticks.tick("enough_new_feedback").run_requests
    key = asked.run_key
    for n in (1, 2):
        older = sqlite3.connect(":memory:")
        with contextlib.closing(sqlite3.connect(str(database.url.database))) as store:
            store.backup(older)
        run = ticks.instance.create_run_for_job(
            definitions().resolve_job_def("retrain"),
            status=dg.DagsterRunStatus.SUCCESS,
            tags={**asked.tags, AGENT: agent},
        )
        claims = ticks.pipeline.claims
        claim = claims.claim(agent, "f" * 64, 40, holder=run.run_id, asked_by="sensor")
        claims.finish(claim.token, "done", "promoted")
        assert "0 new votes of" in ticks.tick("enough_new_feedback").skip_message
        with contextlib.closing(sqlite3.connect(str(database.url.database))) as store:
            older.backup(store)
        older.close()
        [asked] = ticks.tick("enough_new_feedback").run_requests
        assert asked.run_key == f"{key}.{n}"  # the daemon would not start a key twice


# -- dropped_files ----------------------------------------------------------------------------


def line(number: int) -> str:
    return json.dumps(
        {
            "prompt": f"how much is thing {number}?",
            "chosen": f"it is {number} coins.",
            "rejected": "who cares.",
        }
    )


def settle(path: Path) -> None:
    """Let a minute pass since the file was written to."""
    written = path.stat().st_mtime - SETTLED.total_seconds()
    os.utime(path, (written, written))


def test_dropped_files_are_asked_for_by_the_numbers_in_their_names(ticks: Ticks) -> None:
    inbox = ticks.state / "inbox" / "numbered"
    inbox.mkdir(parents=True)
    for number in (10, 9):
        (inbox / f"votes-{number}.jsonl").write_text(line(number))
        settle(inbox / f"votes-{number}.jsonl")
    found = ticks.tick("dropped_files", ticks.tick("dropped_files").cursor)
    assert [str(request.run_key).count("votes-9") for request in found.run_requests] == [1, 0]


def test_a_dropped_file_is_taken_in_once_it_has_stopped_growing(ticks: Ticks) -> None:
    agent = "dropping"
    inbox = ticks.state / "inbox" / agent
    inbox.mkdir(parents=True)
    empty = ticks.tick("dropped_files")
    assert (empty.run_requests, empty.skip_message) == (
        [],
        f"0 files in {inbox.parent}, none ready to take in",
    )
    path = inbox / "monday.jsonl"
    path.write_text(line(1) + "\n")
    first = ticks.tick("dropped_files", empty.cursor)
    assert first.run_requests == []  # seen for the first time
    path.write_text("\n".join([line(1), line(2), "{not json", line(3)]) + "\n")
    second = ticks.tick("dropped_files", first.cursor)
    assert second.run_requests == []  # still being written
    paused = ticks.tick("dropped_files", second.cursor)
    assert paused.run_requests == []  # its writer may go on
    settle(path)
    third = ticks.tick("dropped_files", paused.cursor)
    [request] = third.run_requests
    assert definitions().resolve_sensor_def("dropped_files").job_name == "ingest_file"
    [same] = ticks.tick("dropped_files", third.cursor).run_requests
    assert same.run_key == request.run_key

    result = take_in(ticks, request)
    assert result.success, failures(result)
    assert not path.exists()
    assert (inbox / "done" / "monday.jsonl").exists()
    assert ticks.pipeline.store.counts(agent) == {"preference": 3}
    assert sum(ticks.pipeline.store.quarantined(agent).values()) == 1
    after = ticks.tick("dropped_files", third.cursor)
    assert (after.run_requests, json.loads(after.cursor)) == ([], {})
    # A run that comes late finds it done, and stores nothing twice.
    assert take_in(ticks, request).success
    assert ticks.pipeline.store.counts(agent) == {"preference": 3}


def test_a_dropped_file_is_read_by_the_names_that_the_agents_recipe_tells(ticks: Ticks) -> None:
    own = ticks.recipe.with_name("logs.yaml")
    columns = {"prompt": "trace.question", "completion": "reply", "rater": "user.id"}
    names = {
        "columns": {**columns, "value": "verdict"},
        "fixed": {"kind": "thumbs"},
        "words": {"liked": "up", "disliked": "down"},
    }
    write_recipe(own, ticks.state, feedback={"names": names})
    ticks.pipeline.store.ensure_agent("logs", recipe=str(own))
    inbox = ticks.state / "inbox" / "logs"
    inbox.mkdir(parents=True)
    row = {"trace": {"question": "why?"}, "reply": "so.", "user": {"id": "ann"}}
    rows = [{**row, "verdict": "liked"}, {**row, "verdict": "meh"}]
    (inbox / "night.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (inbox / "ours.jsonl").write_text(line(1))
    seen = ticks.tick("dropped_files")
    for path in inbox.glob("*.jsonl"):
        settle(path)
    requests = ticks.tick("dropped_files", seen.cursor).run_requests
    for request in requests:
        assert (result := take_in(ticks, request)).success, failures(result)
    assert ticks.pipeline.store.counts("logs") == {"preference": 1, "thumbs": 1}
    assert sum(ticks.pipeline.store.quarantined("logs").values()) == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"prompt": "Why?", "chosen": "So.", "rejected": "No.", "Kunde": "ann"}', "'Kunde'"),
        ("", "no row was found in 1 file"),
    ],
)
def test_a_run_says_what_the_numbers_of_a_dropped_file_do_not(
    ticks: Ticks, content: str, told: str
) -> None:
    path = ticks.state / "inbox" / "unsigned" / "votes.jsonl"
    write_text(path, content)
    asked = {"ops": {"take_in": {"config": {"agent_id": "unsigned", "path": str(path)}}}}
    result = take_in(ticks, dg.RunRequest(run_config=asked))
    [output] = [event for event in result.events_for_node("take_in") if event.is_successful_output]
    assert told in str(output.step_output_data.metadata["remarks"].value)


def test_a_table_in_the_inbox_is_said_to_wait_for_a_person(ticks: Ticks) -> None:
    inbox = ticks.state / "inbox" / "tables"
    inbox.mkdir(parents=True)
    for name in ("votes.tsv", "votes.part"):
        (inbox / name).write_text("kind\tvalue\n")
    tick = ticks.tick("dropped_files")
    assert tick.run_requests == []
    assert "votes.tsv is not called .jsonl; `rlhf ingest` takes it in" in str(tick.skip_message)
    assert "votes.part" not in str(tick.skip_message)
    shutil.rmtree(inbox)


def test_a_name_that_is_not_utf_8_keeps_no_other_file_waiting(ticks: Ticks) -> None:
    inbox = ticks.state / "inbox" / "latin"
    inbox.mkdir(parents=True)
    latin = Path(os.fsdecode(os.fsencode(inbox) + b"/f\xfcr-alle.jsonl"))  # of an old archive
    for path in (latin, inbox / "votes.jsonl"):
        path.write_text(line(1) + "\n")
        settle(path)
    seen = ticks.tick("dropped_files")
    told = r"latin/f\xfcr-alle.jsonl is not named in UTF-8; rename it"
    assert told in str(seen.skip_message)
    [request] = ticks.tick("dropped_files", seen.cursor).run_requests
    assert take_in(ticks, request).success
    assert list(inbox.glob("*.jsonl")) == [latin]


@pytest.mark.parametrize("leads_to", ["votes.jsonl", "file/votes.jsonl"])
def test_a_link_to_nowhere_keeps_no_other_file_waiting(ticks: Ticks, leads_to: str) -> None:
    inbox = ticks.state / "inbox"
    write_text(inbox / "good" / "votes.jsonl", line(1) + "\n")
    settle(inbox / "good" / "votes.jsonl")
    write_text(inbox / "bad" / "file", "")
    (inbox / "bad" / "votes.jsonl").symlink_to(leads_to)
    first = ticks.tick("dropped_files")
    assert "votes.jsonl cannot be looked at: " in first.skip_message
    [asked] = ticks.tick("dropped_files", first.cursor).run_requests
    assert asked.run_config["ops"]["take_in"]["config"]["agent_id"] == "good"


def test_what_a_program_is_still_copying_is_left_alone(ticks: Ticks) -> None:
    inbox = ticks.state / "inbox" / "copied"
    inbox.mkdir(parents=True)
    names = ("votes.jsonl.part", "votes.JSONL.filepart", ".votes.jsonl.Xy12Zq", "whole.JSONL")
    for name in names:  # as browsers, WinSCP and rsync call theirs until they are whole
        (inbox / name).write_text(line(1) + "\n")
    seen = ticks.tick("dropped_files")
    for name in names:
        settle(inbox / name)
    tick = ticks.tick("dropped_files", seen.cursor)
    [request] = tick.run_requests
    assert "whole.JSONL" in str(request.run_config)
    (inbox / "whole.JSONL").unlink()
    told = str(ticks.tick("dropped_files", tick.cursor).skip_message)
    assert "votes.jsonl.part does not end in .jsonl; rename it when it is whole" in told
    assert "Xy12Zq" not in told
    shutil.rmtree(inbox)


def take_in(ticks: Ticks, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
    """Run what the sensor asked for."""
    job = definitions().resolve_job_def("ingest_file")
    return job.execute_in_process(
        instance=ticks.instance,
        run_config={**request.run_config, **QUIET},
        resources={"pipeline": ticks.pipeline},
        raise_on_error=False,
        tags=dict(request.tags),
    )


def test_a_file_whose_runs_failed_is_told_with_why_until_it_changes(ticks: Ticks) -> None:
    def left() -> list[str]:
        ticks.set()
        return left_in(ticks.pipeline.settings(), "refused")

    path = ticks.state / "inbox" / "refused" / "votes.jsonl"
    write_text(path, '{"apples": 3}\n')
    seen = ticks.tick("dropped_files")
    settle(path)
    [request] = ticks.tick("dropped_files", seen.cursor).run_requests
    assert left() == []  # it waits for its first run
    assert not take_in(ticks, request).success
    assert "refused" in ticks.pipeline.store.agents()  # or nobody could look at it
    (ticks.state / "inbox.json").mkdir()  # what cannot be written keeps nothing from going on
    assert "next in" in str(ticks.tick("dropped_files", seen.cursor).skip_message)
    (ticks.state / "inbox.json").rmdir()
    ticks.tick("dropped_files", seen.cursor)
    [told] = left()
    assert told.startswith("votes.jsonl has lain there since 20")
    assert "; 1 runs for it came to nothing, the last of them so: needed a row of a known" in told
    assert told.endswith("; another starts by itself")
    ticks.set(continuous_learning={"max_attempts": 2})
    run = ticks.start_run("refused", **request.tags)
    ticks.instance.report_run_failed(run, "the process was killed")
    tick = ticks.tick("dropped_files", seen.cursor)
    assert "2 runs for votes.jsonl came to nothing; a person must look" in str(tick.skip_message)
    [told] = left()
    assert told.endswith(" so: the process was killed; mend that, then touch the file")
    path.touch()
    assert left() == []
    ticks.tick("dropped_files", seen.cursor)
    assert refused_files(ticks.pipeline.settings()) == {}


@pytest.mark.parametrize(
    "name", ["votes.jsonl", "v" * 249 + ".jsonl", "votes.ndjson.gz", "v" * 245 + ".JSONL.gz"]
)
def test_a_file_of_a_name_that_was_there_before_overwrites_nothing(ticks: Ticks, name: str) -> None:
    inbox = ticks.state / "inbox" / f"daily-{len(name)}"
    inbox.mkdir(parents=True)
    for number in (1, 2):
        path, content = inbox / name, line(number).encode() + b"\n"
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        settle(path)
        seen = ticks.tick("dropped_files")
        [request] = ticks.tick("dropped_files", seen.cursor).run_requests
        assert take_in(ticks, request).success
    kept = sorted((inbox / "done").iterdir())
    whole = [p.read_bytes() for p in kept]
    if name.endswith(".gz"):
        whole = [gzip.decompress(content) for content in whole]
    assert {content.decode().strip() for content in whole} == {line(1), line(2)}
    assert sorted(lines_in(inbox, taken=True)) == kept  # an erasure looks into both


def test_files_are_put_where_ones_own_link_leads_and_erasures_look_there(
    ticks: Ticks, tmp_path: Path
) -> None:
    """On another disk, say, than the state folder."""
    agent, memory = "linked", Path("/dev/shm")
    inbox, export = ticks.state / "inbox" / agent, tmp_path / "export.jsonl"
    inbox.mkdir(parents=True)
    elsewhere = memory if memory.is_dir() and os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=elsewhere) as archive:
        (inbox / "done").symlink_to(archive)
        (inbox / "own.jsonl").write_text(line(1) + "\n")
        export.write_text(line(2) + "\n")
        (inbox / "link.jsonl").symlink_to(os.path.relpath(export, inbox))
        settle(inbox / "own.jsonl")
        settle(export)
        seen = ticks.tick("dropped_files")
        (inbox / "done" / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")  # of another day
        for request in ticks.tick("dropped_files", seen.cursor).run_requests:
            assert take_in(ticks, request).success
        (inbox / "done" / "link.jsonl").unlink()
        assert sum(ticks.pipeline.store.counts(agent).values()) == 2
        assert [path.name for path in inbox.iterdir()] == ["done"]
        own, [link] = inbox / "done" / "own.jsonl", sorted((inbox / "done").glob("link.*"))
        assert own.read_text() == line(1) + "\n"
        assert link.resolve() == export
        assert (lines_in(inbox, taken=True), unread_in(inbox)) == ([own], [link])
    shutil.rmtree(inbox)


def test_a_file_is_taken_in_once_an_erasure_is_through_with_it(ticks: Ticks) -> None:
    agent = "rewritten"
    path = ticks.state / "inbox" / agent / "votes.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(line(1) + "\n" + line(2) + "\n")
    settle(path)
    seen = ticks.tick("dropped_files")
    [request] = ticks.tick("dropped_files", seen.cursor).run_requests
    lock = ticks.pipeline.settings().inbox_lock(agent)
    lock.parent.mkdir(parents=True)
    with lock.open("w") as handle:
        assert locked(handle)

        def rewrite() -> None:
            write_text(path, line(2) + "\n")
            fcntl.flock(handle, fcntl.LOCK_UN)

        threading.Timer(0.5, rewrite).start()
        assert take_in(ticks, request).success
    assert ticks.pipeline.store.counts(agent) == {"preference": 1}


def test_nobody_else_writes_to_the_inbox_while_a_file_is_taken_in(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, held = "read", []
    path = ticks.state / "inbox" / agent / "votes.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(line(1) + "\n")

    def looked(*given: Any, **named: Any) -> IngestSummary:
        with ticks.pipeline.settings().inbox_lock(agent).open("w") as handle:
            held.append(not locked(handle))
        return ingest(*given, **named)

    monkeypatch.setattr("rlhf_pipeline.feedback.ingest.ingest", looked)
    asked = {"ops": {"take_in": {"config": {"agent_id": agent, "path": str(path)}}}}
    assert take_in(ticks, dg.RunRequest(run_config=asked)).success
    assert held == [True]


@pytest.mark.parametrize("sender", ["renames", "appends"])
def test_what_comes_while_a_file_is_taken_in_is_taken_in_next(
    ticks: Ticks, sender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = f"hurried-{sender}"
    path = ticks.state / "inbox" / agent / "votes.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(line(1) + "\n")
    settle(path)
    seen = ticks.tick("dropped_files")
    [first] = ticks.tick("dropped_files", seen.cursor).run_requests

    def come_after(*given: Any, **named: Any) -> IngestSummary:
        summary = ingest(*given, **named)
        if sender == "appends":
            with path.open("a") as file:
                file.write(line(2) + "\n")
        else:
            new = path.with_suffix(".part")
            new.write_text(line(2) + "\n")  # as long as the one before
            new.replace(path)
        return summary

    with monkeypatch.context() as patched:
        patched.setattr("rlhf_pipeline.feedback.ingest.ingest", come_after)
        assert take_in(ticks, first).success
    assert path.exists()
    settle(path)
    seen = ticks.tick("dropped_files", seen.cursor)
    [second] = ticks.tick("dropped_files", seen.cursor).run_requests
    assert second.run_key != first.run_key
    assert take_in(ticks, second).success
    assert not path.exists()
    assert ticks.pipeline.store.counts(agent) == {"preference": 2}


@pytest.mark.parametrize("end", ["failed", "canceled"])
def test_a_file_whose_run_ended_is_taken_in_by_another_after_a_while(
    ticks: Ticks, end: str
) -> None:
    inbox = ticks.state / "inbox" / f"resumed-{end}"
    inbox.mkdir(parents=True)
    path, other = inbox / "votes.jsonl", inbox / "other.jsonl"
    for each in (path, other):
        each.write_text(line(1) + "\n")
        settle(each)
    cursor = ticks.tick("dropped_files").cursor

    def asked(after: timedelta = timedelta()) -> tuple[dict[str, dg.RunRequest], str]:
        moment = now() + after
        with patch.object(sensors, "now", lambda: moment):
            tick = ticks.tick("dropped_files", cursor)
        by_path = {
            Path(r.run_config["ops"]["take_in"]["config"]["path"]).name: r
            for r in tick.run_requests or []
        }
        return by_path, tick.skip_message or ""

    def die(request: dg.RunRequest) -> None:
        run = ticks.instance.create_run_for_job(
            definitions().resolve_job_def("ingest_file"),
            run_config=request.run_config,
            status=dg.DagsterRunStatus.STARTED,
            tags=dict(request.tags),
        )
        getattr(ticks.instance, f"report_run_{end}")(run)

    first = asked()[0][path.name]
    die(first)
    assert set(asked()[0]) == {other.name}  # one bad file keeps no other one out
    other.unlink()
    assert "1 runs for votes.jsonl came to nothing; next in 0:0" in asked()[1]
    again = asked(BACK_OFF)[0][path.name]
    assert again.run_key == f"{first.run_key}.1"  # the daemon would not start the first key twice
    die(again)
    die(asked(2 * BACK_OFF)[0][path.name])
    assert "3 runs for votes.jsonl came to nothing; a person must look" in asked(99 * BACK_OFF)[1]
    path.write_text(line(2) + "\n")  # as they may, by putting a better one there
    settle(path)
    assert asked()[0][path.name].run_key == asked()[0][path.name].tags[DROPPED]


def test_what_was_dropped_by_a_link_or_a_pipe_is_left_where_it_is(
    ticks: Ticks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who drops files must not have the service move its keys, or put theirs among them."""
    inbox, keys = ticks.state / "inbox", tmp_path / "access"
    folders = [inbox / name for name in ("by-folder", "by-file", "by-done", "by-pipe")]
    for folder in (keys, *folders[1:]):
        folder.mkdir(parents=True)
    (keys / "keys.json").write_text("[]")
    settle(keys / "keys.json")
    (inbox / "by-folder").symlink_to(keys)
    (inbox / "by-file" / "votes.jsonl").symlink_to(keys / "keys.json")
    (inbox / "by-done" / "done").symlink_to(keys)
    (inbox / "by-done" / "more.json").write_text(line(1))
    settle(inbox / "by-done" / "more.json")
    os.mkfifo(inbox / "by-pipe" / "votes.jsonl")
    mine = ticks.tick("dropped_files", ticks.tick("dropped_files").cursor).run_requests
    assert len(mine) == 3  # one's own links are followed
    seen, theirs = Path.lstat, 7  # a user's number

    def somebody_elses(path: Path) -> os.stat_result:
        found = seen(path)
        return os.stat_result((*found[:4], theirs, *found[5:10]))

    monkeypatch.setattr(os, "getuid", lambda: theirs + 1)
    monkeypatch.setattr(Path, "lstat", somebody_elses)
    tick = ticks.tick("dropped_files", ticks.tick("dropped_files").cursor)
    assert (tick.run_requests, json.loads(tick.cursor)) == ([], {})
    assert str(tick.skip_message).count("a link that somebody else made") == 3
    assert "votes.jsonl is no file" in str(tick.skip_message)
    for request in mine:  # asked for before the link was put there
        assert not take_in(ticks, request).success
    assert [path.name for path in keys.iterdir()] == ["keys.json"]


@pytest.mark.parametrize("agent", ["other", "../other", "."])
def test_no_file_is_taken_but_out_of_the_agents_inbox(ticks: Ticks, agent: str) -> None:
    """Whoever reaches Dagster's page can ask for a run with any path."""
    path = ticks.state / "inbox" / "other" / ".." / agent / "votes.jsonl"
    if agent == "other":
        path = ticks.state / "access.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line(1) + "\n")
    asked = {"ops": {"take_in": {"config": {"agent_id": agent, "path": str(path)}}}}
    assert not take_in(ticks, dg.RunRequest(run_config=asked)).success
    assert path.exists()
    assert ticks.pipeline.store.counts(agent) == {}


def test_a_folder_that_names_no_agent_is_told_as_what_is_wrong(ticks: Ticks) -> None:
    path = ticks.state / "inbox" / "my agent" / "votes.jsonl"
    write_text(path, line(1) + "\n")
    seen = ticks.tick("dropped_files")
    settle(path)
    [request] = ticks.tick("dropped_files", seen.cursor).run_requests
    assert not take_in(ticks, request).success
    ticks.tick("dropped_files", seen.cursor)
    [refused] = refused_files(ticks.pipeline.settings()).values()
    assert refused.why.endswith("found 'my agent'; rename the folder in the inbox")
    assert "my agent" not in ticks.pipeline.store.agents()
    shutil.rmtree(path.parent)


def test_an_inbox_with_nothing_ready_asks_for_no_runs_of_the_past(ticks: Ticks) -> None:
    with patch.object(dg.DagsterInstance, "get_run_records", side_effect=AssertionError):
        assert ticks.tick("dropped_files").run_requests == []


def test_a_dead_run_without_a_heartbeat_holds_its_place_for_an_hour() -> None:
    for job in ("ingest_file", "prune_state"):
        assert definitions().resolve_job_def(job).run_tags["dagster/max_runtime"] == "3600"


def test_files_wait_while_feedback_is_switched_off(ticks: Ticks) -> None:
    ticks.set(feedback={"enabled": False})
    inbox = ticks.state / "inbox" / "off"
    inbox.mkdir(parents=True)
    path = inbox / "votes.jsonl"
    path.write_text(line(1) + "\n")
    settle(path)
    seen = ticks.tick("dropped_files")
    assert ticks.tick("dropped_files", seen.cursor).run_requests == []


# -- dead_runs --------------------------------------------------------------------------------


def test_a_dead_run_is_marked_failed_and_asked_for_again(ticks: Ticks) -> None:
    agent = "dead"
    ticks.instance.add_dynamic_partitions("agents", [agent])
    ticks.vote(agent, 40)
    [request] = ticks.tick("enough_new_feedback").run_requests
    run = ticks.start_run(agent, job="retrain")
    claims = ticks.pipeline.claims
    mark = snapshot.fingerprint(ticks.pipeline.database, agent, 40)
    claim = claims.claim(agent, mark, 40, holder=run.run_id, asked_by="sensor")
    assert ticks.tick("dead_runs").run_requests == []  # its lease lives
    claims.beat(claim.token, lease=EXPIRED)

    [again] = ticks.tick("dead_runs").run_requests
    assert again.run_key == request.run_key.removesuffix(":1") + ":2"
    assert again.run_config == request.run_config  # the same votes
    assert again.tags[ASKED_BY] == "watchdog"
    dead = ticks.instance.get_run_by_id(run.run_id)
    assert dead is not None
    assert dead.status is dg.DagsterRunStatus.FAILURE
    assert [(c.state, c.reason) for c in claims.history(agent)] == [
        ("lost", "the worker died: no heartbeat")
    ]
    skipped = ticks.tick("dead_runs")
    assert (skipped.run_requests, skipped.skip_message) == (
        [],
        "no claim without a heartbeat that may be tried again",
    )


def test_a_dead_turn_whose_votes_were_taken_back_is_not_asked_for_again(
    ticks: Ticks,
) -> None:
    agent, store = "mistaken", ticks.pipeline.store
    ticks.vote(agent, 40)
    run = ticks.start_run(agent, job="retrain")
    seen = snapshot.newest_seq(ticks.pipeline.database, agent)
    mark = snapshot.fingerprint(ticks.pipeline.database, agent, seen)
    ticks.pipeline.claims.claim(
        agent, mark, seen, holder=run.run_id, asked_by="sensor", lease=EXPIRED
    )
    assert store.withdraw(agent, store.keys_from(agent, "api")) == (40, 0)
    ticks.vote(agent, 1)
    assert ticks.tick("dead_runs").run_requests == []
    assert ticks.pipeline.claims.held(agent) is None


def test_a_dead_run_is_asked_for_again_though_mlflow_refuses_another(ticks: Ticks) -> None:
    for agent_id in ("aaa", "bbb"):
        ticks.vote(agent_id, 40)
        run = ticks.start_run(agent_id, job="retrain")
        mark = snapshot.fingerprint(ticks.pipeline.database, agent_id, 80)
        ticks.pipeline.claims.claim(
            agent_id, mark, 80, holder=run.run_id, asked_by="sensor", lease=EXPIRED
        )
    real = ModelRegistry.end_runs

    def ends(registry: ModelRegistry, agent_id: str, mark: str) -> None:
        if agent_id in refused:
            raise RegistryError("MLflow is away")
        real(registry, agent_id, mark)

    with patch.object(ModelRegistry, "end_runs", ends):
        refused = ["aaa", "bbb"]
        with pytest.raises(RegistryError, match="MLflow is away"):
            ticks.tick("dead_runs")
        refused = ["bbb"]
        assert [r.partition_key for r in ticks.tick("dead_runs").run_requests] == ["aaa"]
        refused = []
        assert [r.partition_key for r in ticks.tick("dead_runs").run_requests] == ["bbb"]


def test_a_dead_turn_that_newer_votes_have_a_run_for_is_not_asked_for_again(ticks: Ticks) -> None:
    agent = "overtaken"
    ticks.pipeline.store.ensure_agent(agent)
    dead = ticks.start_run(agent, job="retrain")
    ticks.pipeline.claims.claim(
        agent, "f" * 64, 40, holder=dead.run_id, asked_by="sensor", lease=EXPIRED
    )
    ticks.start_run(agent, job="retrain")
    assert ticks.tick("dead_runs").run_requests == []
    [claim] = ticks.pipeline.claims.history(agent)
    assert (claim.state, claim.reason) == ("lost", "the worker died: no heartbeat")


def test_a_turn_that_a_person_terminated_is_not_asked_for_again(ticks: Ticks) -> None:
    agent, claims = "unwanted", ticks.pipeline.claims
    ticks.pipeline.store.ensure_agent(agent)
    run = ticks.start_run(agent)
    claims.claim(agent, "f" * 64, 40, holder=run.run_id, asked_by="sensor", lease=EXPIRED)
    ticks.instance.report_run_canceled(run)
    assert ticks.tick("dead_runs").run_requests == []
    assert [(c.state, c.reason) for c in claims.history(agent)] == [("lost", "terminated by hand")]


def test_a_turn_that_used_the_budget_up_is_not_asked_for_again(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster ends it at its deadline; to begin again at once would train all day."""
    agent, claims = "long", ticks.pipeline.claims
    ticks.pipeline.store.ensure_agent(agent)
    run = ticks.start_run(agent)
    budget = ticks.pipeline.settings(agent).continuous_learning.gpu_minutes_per_night
    began = now() - timedelta(minutes=budget + 1)
    with monkeypatch.context() as then:
        then.setattr(claims, "clock", lambda: began)
        claim = claims.claim(agent, "f" * 64, 40, holder=run.run_id, asked_by="sensor")
    claims.beat(claim.token, lease=EXPIRED)
    ticks.instance.report_run_failed(run, message="Exceeded maximum runtime")
    assert ticks.tick("dead_runs").run_requests == []
    assert claims.history(agent)[0].state == "lost"


def test_a_turn_is_tried_at_most_as_often_as_the_settings_say(ticks: Ticks) -> None:
    agent = "hopeless"
    ticks.instance.add_dynamic_partitions("agents", [agent])
    asked = []
    for attempt in (1, 2, 3):
        run = ticks.start_run(agent)
        claim = ticks.pipeline.claims.claim(
            agent, "f" * 64, 40, holder=run.run_id, asked_by="sensor", lease=EXPIRED
        )
        assert claim.attempt == attempt
        asked.append(len(ticks.tick("dead_runs").run_requests))
    assert asked == [1, 1, 0]
    assert {c.state for c in ticks.pipeline.claims.history(agent)} == {"lost"}


def test_a_dead_bootstrap_is_asked_for_again(ticks: Ticks) -> None:
    agent = "unborn"
    ticks.pipeline.store.ensure_agent(agent)
    run = ticks.start_run(agent)
    ticks.pipeline.claims.claim(
        agent, bootstrap_mark(agent), 0, holder=run.run_id, asked_by="person", lease=EXPIRED
    )
    tick = ticks.tick("dead_runs")
    [request] = tick.run_requests
    [added] = tick.dynamic_partitions_requests  # nobody had named it to Dagster yet
    assert list(added.partition_keys) == [agent]
    assert (request.job_name, request.partition_key) == ("bootstrap", agent)
    assert request.run_key == "unborn:bootstrap:2"


@pytest.mark.parametrize("asked_by", ["erasure", "prune"])
def test_a_dead_erasure_or_prune_lets_the_agent_go_and_nothing_is_trained(
    ticks: Ticks, asked_by: str
) -> None:
    agent, claims = f"agent-of-{asked_by}", ticks.pipeline.claims
    ticks.pipeline.store.ensure_agent(agent)
    claims.claim(agent, "e" * 64, 0, holder=f"{asked_by}-1", asked_by=asked_by, lease=EXPIRED)
    assert ticks.tick("dead_runs").run_requests == []
    assert claims.held(agent) is None


def test_a_paused_agents_dead_run_is_ended_but_not_asked_for_again(ticks: Ticks) -> None:
    agent = "halted"
    ticks.pipeline.store.ensure_agent(agent)
    ticks.pipeline.store.set_agent(agent, paused_reason="a person is looking")
    run = ticks.start_run(agent)
    ticks.pipeline.claims.claim(
        agent, "f" * 64, 40, holder=run.run_id, asked_by="sensor", lease=EXPIRED
    )
    assert ticks.tick("dead_runs").run_requests == []
    dead = ticks.instance.get_run_by_id(run.run_id)
    assert dead is not None
    assert dead.is_finished
    assert ticks.pipeline.claims.held(agent) is None


def test_the_run_that_a_person_set_going_again_is_found_dead_too(ticks: Ticks) -> None:
    agent = "revived"
    ticks.pipeline.store.ensure_agent(agent)
    first = ticks.start_run(agent)
    ticks.instance.report_run_failed(first)
    second = ticks.start_run(
        agent, **{"dagster/root_run_id": first.run_id, "dagster/parent_run_id": first.run_id}
    )
    ticks.pipeline.claims.claim(
        agent, "f" * 64, 40, holder=first.run_id, asked_by="person", lease=EXPIRED
    )
    ticks.tick("dead_runs")
    dead = ticks.instance.get_run_by_id(second.run_id)
    assert dead is not None
    assert dead.status is dg.DagsterRunStatus.FAILURE


def test_runs_that_died_before_their_claim_or_after_its_end_are_ended_too(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = ticks.pipeline.claims
    done, alive = (ticks.start_run(name) for name in ("done", "alive"))
    unclaimed = ticks.start_run("unclaimed", job=ASSETS)
    for run in (done, alive):
        claims.claim(run.tags[AGENT], "f" * 64, 1, holder=run.run_id, asked_by="sensor")
    closed = claims.of_holder(done.run_id)
    assert closed is not None
    claims.finish(closed.token, "done")

    def statuses() -> list[str]:
        runs = [ticks.instance.get_run_by_id(r.run_id) for r in (unclaimed, done, alive)]
        return [run.status.value for run in runs if run is not None]

    ticks.tick("dead_runs")
    assert statuses() == ["STARTED"] * 3  # they may be about to claim, and about to end

    monkeypatch.setattr("automation.dead.now", lambda: now() + timedelta(minutes=15))
    assert ticks.tick("dead_runs").run_requests == []
    assert statuses() == ["FAILURE", "FAILURE", "STARTED"]
    ticks.instance.report_run_failed(alive)  # the instance is every test's


def test_a_run_that_waited_long_in_the_queue_is_not_dead_when_it_leaves_it(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "ours")
    run = ticks.instance.create_run_for_job(
        definitions().resolve_job_def("bootstrap"),
        status=dg.DagsterRunStatus.QUEUED,
        tags={AGENT: "patient"},
        remote_job_origin=RemoteJobOrigin(home, "bootstrap"),
    )
    hours = timedelta(hours=3)
    leaves = dg.DagsterEvent(
        event_type_value=dg.DagsterEventType.PIPELINE_STARTING.value, job_name="bootstrap"
    )
    later = (now() + hours).timestamp()
    ticks.instance.report_dagster_event(leaves, run.run_id, timestamp=later)

    def status_after(minutes: int) -> str:
        at = now() + hours + timedelta(minutes=minutes)
        monkeypatch.setattr("automation.dead.now", lambda: at)
        ticks.tick("dead_runs")
        found = ticks.instance.get_run_by_id(run.run_id)
        assert found is not None
        return found.status.value

    assert [status_after(minutes) for minutes in (1, 15)] == ["STARTING", "FAILURE"]


# -- aliases_moved_by_hand --------------------------------------------------------------------


def folder(path: Path, weights: str) -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text(weights)
    return path


def test_a_champion_chosen_in_mlflow_is_adopted_or_set_back(loop: Loop, tmp_path: Path) -> None:
    agent = loop.agent("by-hand")
    registry = loop.pipeline.registry
    registry.register_baseline(
        agent, folder(tmp_path / "0", "zero"), label="v0", lineage={}, actor="test"
    )
    for number, passed in ((1, True), (2, False)):
        registry.register(
            agent,
            folder(tmp_path / str(number), str(number)),
            label=f"v{number}",
            lineage={},
            gate={"passed": passed, "results": []},
            fingerprint=f"print {number}",
        )

    def tick() -> str:
        with dg.build_sensor_context(
            instance=loop.instance, resources={"pipeline": loop.pipeline}
        ) as context:
            found = sensors.aliases_moved_by_hand(context)
        assert isinstance(found, dg.SkipReason)
        return str(found.skip_message)

    def move(version: int) -> None:
        number = loop.version(agent, version).mlflow_version
        registry.client.set_registered_model_alias(f"rlhf-{agent}", "champion", number)

    assert tick() == "aliases and ledger agree"
    move(1)
    assert "adopted from the MLflow page: champion moved from 0 to 1" in tick()
    assert loop.aliases(agent) == {"champion": 1, "previous": 0}
    assert loop.pipeline.ledger.history(agent)[-1].action == "adopt"
    assert tick() == "aliases and ledger agree"
    move(2)
    assert "was set back" in tick()
    assert loop.aliases(agent) == {"champion": 1, "previous": 0}
    assert len(loop.pipeline.ledger.history(agent)) == 2


def test_an_agent_whose_files_are_lost_keeps_no_others_aliases_back(
    loop: Loop, tmp_path: Path
) -> None:
    registry = loop.pipeline.registry
    lost, sound = loop.agent("lost"), loop.agent("sound")
    for agent in (lost, sound):
        files = folder(tmp_path / agent, agent)
        registry.register_baseline(agent, files, label="v0", lineage={}, actor="test")
    registry.client.delete_registered_model(f"rlhf-{lost}")
    aside = (tmp_path / lost).rename(tmp_path / "aside")
    registry.client.delete_registered_model_alias(f"rlhf-{sound}", "champion")

    def tick() -> None:
        with dg.build_sensor_context(resources={"pipeline": loop.pipeline}) as context:
            sensors.aliases_moved_by_hand(context)

    with pytest.raises(RuntimeError, match=f"{lost}: "):
        tick()
    assert loop.aliases(sound) == {"champion": 0}
    aside.rename(tmp_path / lost)  # the loop is every test's
    tick()
    assert loop.aliases(lost) == {"champion": 0}


def test_a_server_that_is_away_costs_a_tick_the_tries_of_one_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # they take fourteen seconds
    monkeypatch.setenv("RLHF_MLFLOW_URI", "http://127.0.0.1:9")
    pipeline = Pipeline(recipe=str(write_recipe(tmp_path / "minute.yaml", tmp_path / "state")))
    for agent in ("first", "second"):
        pipeline.store.ensure_agent(agent)
        path = folder(tmp_path / agent, agent)
        pipeline.ledger.add_baseline(
            agent, label="v0", path=path, files=folder_sha256(path), lineage={}, actor="test"
        )

    with (
        dg.build_sensor_context(resources={"pipeline": pipeline}) as context,
        pytest.raises(RuntimeError, match="the next tick looks at the agents after it") as caught,
    ):
        sensors.aliases_moved_by_hand(context)
    assert str(caught.value).count("needs MLflow to answer") == 1


# -- run_failed -------------------------------------------------------------------------------


class Hook(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    received: list[dict[str, Any]]
    answer = 200
    refuses: str | None = None  # the text it answers 400 to
    moved_to = ""  # where a redirect leads
    asked_for: list[str]  # paths of GETs

    def do_POST(self) -> None:
        """Keep the body."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(json.loads(body))
        refused = self.received[-1]["text"] == self.refuses
        self.send_response(400 if refused else self.answer)
        self.send_header("Location", self.moved_to)
        self.end_headers()

    def do_GET(self) -> None:
        """Answer as a page does."""
        self.asked_for.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hook() -> Iterator[tuple[str, type[Hook]]]:
    kept = type("Kept", (Hook,), {"received": [], "asked_for": []})
    with answering(HTTPServer(("127.0.0.1", 0), kept)) as server:
        yield f"http://127.0.0.1:{server.server_port}/secret-path", kept


def fail(ticks: Ticks, agent_id: str) -> None:
    """Let a run fail and the sensor hear of it."""
    run = ticks.start_run(agent_id)
    ticks.instance.report_run_failed(run, message="the disk is full")
    hear_of(ticks, run)


def hear_of(ticks: Ticks, run: dg.DagsterRun) -> None:
    """Let the sensor hear of a run that failed."""
    [entry] = ticks.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    assert entry.dagster_event is not None
    failed = ticks.instance.get_run_by_id(run.run_id)
    assert failed is not None
    context = dg.build_run_status_sensor_context(
        sensor_name="run_failed",
        dagster_event=entry.dagster_event,
        dagster_instance=ticks.instance,
        dagster_run=failed,
        resources={"pipeline": ticks.pipeline},
    ).for_run_failure()
    with context:
        sensors.run_failed(context)


def test_people_hear_of_a_failed_run_by_webhook_and_log(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    with structlog.testing.capture_logs() as logs:
        fail(ticks, "unlucky")
    [body] = kept.received
    assert body["text"] == "bootstrap of unlucky failed"
    assert body["message"] == "the disk is full"
    [entry] = logs
    assert (entry["event"], entry["log_level"], entry["agent"], entry["run"]) == (
        "run failed",
        "error",
        "unlucky",
        body["run"],
    )
    assert "secret-path" not in str(logs)


def test_a_failed_run_of_no_agent_is_told_by_its_job(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    run = ticks.instance.create_run_for_job(
        definitions().resolve_job_def("prune_state"), status=dg.DagsterRunStatus.STARTED
    )
    ticks.instance.report_run_failed(run, message="a recipe is gone")
    hear_of(ticks, run)
    assert [body["text"] for body in kept.received] == ["prune_state failed"]


def test_people_hear_what_killed_a_run(ticks: Ticks, hook: tuple[str, type[Hook]]) -> None:
    """Dagster's server says it before it ends the run, whose own message is of no help."""
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    run = ticks.start_run("killed")
    ticks.instance.report_engine_event("Run execution process was terminated by signal 9", run)
    ticks.instance.report_run_failed(run)
    hear_of(ticks, run)
    assert [body["message"] for body in kept.received] == [
        "Run execution process was terminated by signal 9"
    ]


def test_people_hear_why_a_step_failed_in_our_words_alone(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, heard = hook
    ticks.set(notifications={"webhook": url})
    unfit = dg.AssetCheckSpec("rows", asset="judged", blocking=True)

    @dg.asset
    def model() -> None:
        raise NotEnoughData("needed 5 pairs, found 2")

    @dg.asset(check_specs=[unfit])
    def judged() -> Materialized:
        found = dg.AssetCheckResult(passed=False, check_name="rows", description="found 3 rows")
        return dg.MaterializeResult(check_results=[found])

    @dg.asset
    def elsewhere() -> None:
        raise ValueError("ann wrote this")

    @dg.asset
    def kept() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "what ann wrote")

    for asset in (model, judged, elsewhere, kept):
        result = dg.materialize(
            [asset], instance=ticks.instance, run_config=QUIET, raise_on_error=False
        )
        hear_of(ticks, result.dagster_run)
    by_step, by_check, by_another, by_disk = [body["message"] for body in heard.received]
    assert by_step == "model: needed 5 pairs, found 2"
    assert by_check == "rows: found 3 rows"
    assert by_another.endswith("Steps failed: ['elsewhere'].")
    assert by_disk == "needed room on the disk, found it full; make room, and ask for the run again"
    assert why_failed(result.all_events) == f"kept: {by_disk}"  # as `make train` says it


def test_a_run_that_died_is_told_once_whoever_began_it(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    """To Dagster one that `make train` ran in its own process is of no code location."""
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    here = RegisteredCodeLocationOrigin("here")
    begun = {"nightly": RemoteJobOrigin(RemoteRepositoryOrigin(here, "ours"), "retrain")}

    def failures(cursor: str | None) -> Any:
        with dg.build_sensor_context(
            instance=ticks.instance,
            repository_name="ours",
            cursor=cursor,
            resources={"pipeline": ticks.pipeline},
        ) as context:
            context._code_location_origin = here  # as the daemon's own look has it
            return sensors.run_failed.evaluate_tick(context).cursor

    cursor = failures(None)
    for agent in ("nightly", "by-hand"):
        run = ticks.instance.create_run_for_job(
            definitions().resolve_job_def("retrain"),
            status=dg.DagsterRunStatus.STARTED,
            tags={AGENT: agent},
            remote_job_origin=begun.get(agent),
        )
        ticks.pipeline.claims.claim(
            agent, "f" * 64, 40, holder=run.run_id, asked_by="person", lease=EXPIRED
        )
    ticks.tick("dead_runs")
    for _ in range(3):
        cursor = failures(cursor)
    told = sorted((body["text"], body["message"][:18]) for body in kept.received)
    assert told == [
        ("retrain of by-hand failed", "no heartbeat since"),
        ("retrain of nightly failed", "no heartbeat since"),
    ]


def test_without_a_webhook_the_log_has_it(ticks: Ticks) -> None:
    with structlog.testing.capture_logs() as logs:
        fail(ticks, "quiet")
    assert [entry["agent"] for entry in logs] == ["quiet"]


def test_a_webhook_that_refuses_shows_in_the_sensors_tick(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    kept.answer = 500
    ticks.set(notifications={"webhook": url})
    with pytest.raises(urllib.error.HTTPError, match="500"):
        fail(ticks, "unheard")


def test_a_failed_run_is_told_once_the_webhook_is_back(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    ticks.set(notifications={"webhook": "http://127.0.0.1:9/nobody-listens"})
    ticks.vote("calm", 3)
    for agent in ("first", "second"):
        with pytest.raises(urllib.error.URLError):
            fail(ticks, agent)
    assert "a failed run was not told: URLError" in ticks.tick("alerts").skip_message
    ticks.set(notifications={"webhook": url})
    for _ in range(2):
        assert "not told" not in ticks.tick("alerts").skip_message
    assert [body["text"] for body in kept.received] == [
        "bootstrap of first failed",
        "bootstrap of second failed",
    ]
    assert list((ticks.state / "outbox").iterdir()) == []


def test_a_message_that_is_refused_keeps_no_later_one_back(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    settings = ticks.pipeline.settings()
    for text in ("too long", "short"):
        outbox.keep(settings, {"text": text})
    kept.refuses = "too long"
    with pytest.raises(urllib.error.HTTPError):
        outbox.send_kept(settings, seconds=30)
    assert [body["text"] for body in kept.received] == ["too long", "short"]
    kept.refuses = None
    outbox.send_kept(settings, seconds=30)
    outbox.send_kept(settings, seconds=30)
    assert [body["text"] for body in kept.received] == ["too long", "short", "too long"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_webhook_that_has_moved_has_taken_nothing(
    ticks: Ticks, hook: tuple[str, type[Hook]], status: int
) -> None:
    """To follow it would be to get a page, without what was to be told."""
    url, kept = hook
    kept.answer, kept.moved_to = status, "/elsewhere"
    ticks.set(notifications={"webhook": url})
    settings = ticks.pipeline.settings()
    outbox.keep(settings, {"text": "it failed"})
    with pytest.raises(urllib.error.HTTPError, match=str(status)):
        outbox.send_kept(settings, seconds=30)
    assert kept.asked_for == []
    kept.answer = 200
    outbox.send_kept(settings, seconds=30)
    assert [body["text"] for body in kept.received] == ["it failed"] * 2


def test_messages_that_nobody_takes_neither_pile_up_nor_fill_a_tick(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    settings = ticks.pipeline.settings()
    for number in range(outbox.MOST + 3):
        outbox.keep(settings, {"text": str(number)})
    kept.answer = 503
    with pytest.raises(urllib.error.HTTPError):
        outbox.send_kept(settings, seconds=30)
    assert [body["text"] for body in kept.received] == ["3"]
    kept.answer = 200
    outbox.send_kept(settings, seconds=30)
    assert len(kept.received) == 1 + outbox.MOST


def test_a_webhook_whose_answer_comes_in_drips_is_waited_for_no_longer_than_another(
    ticks: Ticks, hook: tuple[str, type[Hook]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    heard = threading.Event()

    def drips(hook: Hook) -> None:
        hook.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        for _ in range(100):
            if not heard.wait(0.05):
                hook.wfile.write(b".")

    monkeypatch.setattr(kept, "do_POST", drips)
    monkeypatch.setattr(outbox, "ANSWER", 0.3)
    with pytest.raises(outbox.AWAY):
        outbox.tell(ticks.pipeline.settings(), {"text": "it failed"})
    heard.set()


def test_a_slow_webhook_is_told_part_of_it_in_a_tick_and_the_rest_later(
    ticks: Ticks, hook: tuple[str, type[Hook]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick that took a minute would be given up, its cursor lost, and all told again."""
    url, kept = hook
    ticks.set(alerts={"disk_gib": 10**6}, notifications={"webhook": url})
    for agent in ("support", "suport"):
        ticks.vote(agent, 3)
    for number in range(3):
        outbox.keep(ticks.pipeline.settings(), {"text": str(number)})
    takes = kept.do_POST

    def slow(hook: Hook) -> None:
        time.sleep(0.15)
        takes(hook)

    monkeypatch.setattr(kept, "do_POST", slow)
    monkeypatch.setattr(outbox, "TELLING", 0.25)
    cursor = "[]"
    told: list[int] = []
    while len(kept.received) < 5 and len(told) < 99:  # a tick that looks for long tells nothing
        cursor = ticks.tick("alerts", cursor).cursor
        told.append(len(kept.received))
    cursor = ticks.tick("alerts", cursor).cursor
    assert json.loads(cursor) == ["every agent/disk_nearly_full", "suport/name_alike"]
    assert [body["text"] for body in kept.received] == [
        *"012",
        "every agent: disk nearly full",
        "suport: name alike",
    ]
    assert told[0] < 5  # which would have taken three times as long as a tick has


def test_a_failed_run_is_told_though_the_disk_is_full(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(outbox, "write_json", side_effect=full):
        fail(ticks, "unlucky")
    assert [body["text"] for body in kept.received] == ["bootstrap of unlucky failed"]


# -- nightly ----------------------------------------------------------------------------------


def night(ticks: Ticks) -> Any:
    defs = definitions()
    with dg.build_schedule_context(
        instance=ticks.instance,
        instance_ref=ticks.instance.get_ref(),
        scheduled_execution_time=datetime(2026, 3, 1, 2, tzinfo=UTC),
        resources={"pipeline": ticks.pipeline},
        repository_def=defs.get_repository_def(),
    ) as context:
        return defs.resolve_schedule_def("nightly").evaluate_tick(context)


def test_every_night_each_agent_with_anything_new_is_trained(ticks: Ticks) -> None:
    assert night(ticks).skip_message == "no agent has sent feedback yet"
    ticks.vote("few", 1)
    ticks.vote("none-new", 1)
    claims = ticks.pipeline.claims
    mark = snapshot.fingerprint(ticks.pipeline.database, "none-new", 2)
    claims.finish(claims.claim("none-new", mark, 2, holder="r", asked_by="sensor").token, "done")
    requests = night(ticks).run_requests
    assert [(r.partition_key, r.tags[ASKED_BY]) for r in requests] == [("few", "schedule")]
    assert "few" in ticks.instance.get_dynamic_partitions("agents")
    claims.claim("few", "f" * 64, 1, holder="r2", asked_by="schedule")
    skipped = night(ticks).skip_message
    assert "none-new: 0 new votes of the 1 needed" in skipped
    assert "few: run r2 holds attempt 1" in skipped


def test_simulated_people_start_a_turn_like_real_ones(ticks: Ticks) -> None:
    ticks.instance.add_dynamic_partitions("agents", ["village"])
    chat(ticks.pipeline.store, "village", 60)
    [request] = ticks.tick("enough_new_feedback").run_requests
    votes = ticks.pipeline.store.new_since("village", 0).votes
    assert request.tags["rlhf/new_votes"] == str(votes)


# -- alerts -----------------------------------------------------------------------------------


def test_an_experiment_that_cannot_be_looked_at_keeps_no_other_from_it(ticks: Ticks) -> None:
    store, book = ticks.pipeline.store, ExperimentBook(ticks.pipeline.database)
    store.ensure_agent("astray", recipe=str(ticks.state / "gone.yaml"))
    store.ensure_agent("shop")
    for agent_id in ("astray", "shop"):
        book.start(agent_id, champion=0, challenger=1, share=0.1, actor="test")
    with pytest.raises(RuntimeError, match="astray: ConfigError") as failed:
        ticks.tick("live_experiments")
    assert "shop: stopped: the champion is none now" in str(failed.value)
    assert [e.state for e in book.history("shop")] == ["stopped"]
    assert book.running("astray") is not None


def test_an_experiment_promotes_nobody_once_promotion_is_automatic_no_more(ticks: Ticks) -> None:
    store, book = ticks.pipeline.store, ExperimentBook(ticks.pipeline.database)
    ledger = ledger_of_two(store, ticks.state)
    begun = book.start("shop", champion=0, challenger=1, share=0.5, actor="promotion")
    meet(store, begun, range(1200), likes=(0.50, 0.85))
    ticks.set(promotion={"automatic": True})
    store.set_agent("shop", automatic_promotion=False)
    said = ticks.tick("live_experiments").skip_message
    assert said == "shop: stopped: automatic promotion is off, so a person decides"
    book.start("shop", champion=0, challenger=1, share=0.5, actor="ann")
    meet(store, book.all_running()[0], range(1200), likes=(0.50, 0.85))
    said = ticks.tick("live_experiments").skip_message or ""
    assert said.startswith("shop: stopped: version 1 of agent shop needs")  # of its files is none
    store.set_agent("shop", automatic_promotion=None)
    book.start("shop", champion=0, challenger=1, share=0.5, actor="promotion")
    meet(store, book.all_running()[0], range(1200), likes=(0.50, 0.85))
    weights = ticks.state / "1" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    assert ticks.tick("live_experiments").skip_message == "shop: champion moved from 0 to 1"
    assert ledger.history("shop")[-1].version == 1


def test_a_young_champion_that_fails_is_rolled_back_and_told_of(
    ticks: Ticks, hook: tuple[str, type[Hook]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, kept = hook
    store = ticks.pipeline.store
    store.ensure_agent("astray", recipe=str(ticks.state / "gone.yaml"))
    ledger = ledger_of_two(store, ticks.state)
    ledger.promote("shop", 1, actor="ann", reason="passed", expected_champion=0)
    at = now()
    store.add_interactions(
        [
            Interaction(
                interaction_id=uuid7(),
                agent_id="shop",
                prompt=user_prompt("what now?"),
                completion="this",
                model_version=0,
                created_at=at + timedelta(milliseconds=n),
                user_id=f"user-{n}",
                arm="baseline",
                sampling={"events": [{"arm": "champion", "rule": "time_out"}]},
            )
            for n in range(10)
        ]
    )
    with pytest.raises(RuntimeError, match=r"looked at; shop: RegistryError: .*version 0 of"):
        ticks.tick("young_champions")  # there are no files to go back to
    monkeypatch.setattr(ModelRegistry, "folder_of", lambda _, version: version.path)
    said = ticks.tick("young_champions").skip_message  # of the other one `alerts` tells
    assert said.startswith("shop: rolled back from 1 to 0")
    store.set_agent("astray", recipe=None)
    assert ticks.tick("young_champions").skip_message == "no young champion fails"
    (ticks.state / "0").mkdir()  # the champion's files
    ticks.set(notifications={"webhook": url})
    first = ticks.tick("alerts").cursor
    [told] = [body["message"] for body in kept.received]
    assert told.startswith("version 1 failed at 10 of its latest 10 answers")
    assert told.endswith("version 0 answers again")

    # Promoted and rolled back once more before anybody looked: that is told too, and once.
    ledger.promote("shop", 1, actor="ann", reason="again", expected_champion=0, force=True)
    ledger.rollback("shop", actor=WATCH, reason="it fails", expected_champion=1)
    second = ticks.tick("alerts", first).cursor
    assert ticks.tick("alerts", second).cursor == second
    assert [body["message"] for body in kept.received[1:]] == ["it fails; version 0 answers again"]


def test_an_experiment_with_more_answers_than_a_tick_counts_is_looked_at_in_a_later_one(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, book = ticks.pipeline.store, ExperimentBook(ticks.pipeline.database)
    store.ensure_agent("shop")
    begun = book.start("shop", champion=0, challenger=1, share=0.5, actor="test")
    long_ago = now() - timedelta(hours=2)
    store.add_interactions(
        [
            Interaction(
                interaction_id=uuid7(),
                agent_id="shop",
                prompt=user_prompt("what now?"),
                completion="this",
                model_version=0,
                created_at=long_ago + timedelta(seconds=n),
                user_id=f"user-{n}",
                experiment=begun.experiment_id,
                arm="champion",
                sampling={"challenger_share": 0.5},
            )
            for n in range(5)
        ]
    )
    monkeypatch.setattr("automation.sensors.ANSWERS_AT_ONCE", 2)
    said = [ticks.tick("live_experiments").skip_message for _ in range(3)]
    assert said[:2] == ["shop: counts the answers so far"] * 2
    assert said[2] == "shop: stopped: the champion is none now"


def test_an_agent_that_cannot_be_looked_at_keeps_no_other_alert_from_being_told(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    for agent in ("broken", "gone"):
        ticks.vote(agent, 3)
    ticks.pipeline.store.set_agent("gone", recipe="/srv/recipes/gone.yaml")
    damaged = ticks.state / "taken" / DRIFT
    snapshot.take(ticks.pipeline.database, "broken", 99, damaged.parent / snapshot.FILE)
    damaged.write_text("{")
    told = ticks.tick("alerts")
    assert json.loads(told.cursor) == ["broken/not_looked_at", "gone/settings_unsound"]
    assert [body["text"] for body in kept.received] == [
        "broken: not looked at",
        "gone: settings unsound",
    ]
    assert f"a JSON file is needed at {damaged}" in kept.received[0]["message"]
    assert ticks.tick("alerts", told.cursor).cursor == told.cursor

    ticks.pipeline.store.set_agent("gone", recipe=None)
    over = ticks.tick("alerts", told.cursor)
    assert over.cursor == '["broken/not_looked_at"]'
    damaged.unlink()
    assert ticks.tick("alerts", over.cursor).skip_message == "nothing is worth a look"


def test_votes_by_a_name_that_may_be_misspelt_are_told_once(ticks: Ticks) -> None:
    ticks.vote("support", 3)
    ticks.vote("suport", 3)
    told = ticks.tick("alerts")
    assert json.loads(told.cursor) == ["suport/name_alike"]
    assert ticks.tick("alerts", told.cursor).cursor == told.cursor


def test_a_tick_that_can_say_nothing_of_any_agent_fails(ticks: Ticks) -> None:
    ticks.vote("broken", 3)
    with patch.object(sensors, "overview", side_effect=RegistryError("needed a ledger")):
        told = ticks.tick("alerts")
        assert told.cursor == '["broken/not_looked_at"]'
        with pytest.raises(RuntimeError, match=r"no agent could be looked at; broken: .*a ledger"):
            ticks.tick("alerts", told.cursor)


def test_an_alert_is_told_once_and_again_where_nobody_could_hear(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    full = {"alerts": {"disk_gib": 10**6}, "notifications": {"webhook": url}}
    ticks.set(**full)
    ticks.vote("calm", 3)
    kept.answer = 500
    deaf = ticks.tick("alerts")
    assert "was not told" in deaf.skip_message
    assert "secret-path" not in deaf.skip_message
    kept.answer = 200
    told = ticks.tick("alerts", deaf.cursor)
    again = ticks.tick("alerts", told.cursor)
    assert [body["text"] for body in kept.received] == ["every agent: disk nearly full"] * 2
    assert again.skip_message == "every agent/disk_nearly_full"
    ticks.set(notifications={"webhook": url})
    over = ticks.tick("alerts", again.cursor)
    assert (over.skip_message, over.cursor) == ("nothing is worth a look", "[]")


def test_a_webhook_in_trouble_is_told_no_second_alert_in_a_tick(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    """One that never answers takes ten seconds each time, and a tick may take a minute."""
    url, kept = hook
    ticks.set(alerts={"disk_gib": 10**6}, notifications={"webhook": url})
    for agent in ("support", "suport"):
        ticks.vote(agent, 3)
    kept.answer = 503
    tick = ticks.tick("alerts")
    assert tick.skip_message == (
        "every agent/disk_nearly_full was not told: HTTPError; suport/name_alike was not told"
    )
    assert len(kept.received) == 1
    outbox.keep(ticks.pipeline.settings(), {"text": "a run failed"})
    assert "a failed run was not told" in ticks.tick("alerts").skip_message
    kept.answer, kept.refuses = 200, "every agent: disk nearly full"  # and takes the others
    assert json.loads(ticks.tick("alerts").cursor) == ["suport/name_alike"]
    told = [body["text"] for body in kept.received]
    assert told[1:] == ["a run failed"] * 2 + [kept.refuses, "suport: name alike"]


def test_what_was_told_of_an_agent_stands_while_nobody_can_look_at_it(
    ticks: Ticks, hook: tuple[str, type[Hook]]
) -> None:
    url, kept = hook
    ticks.set(notifications={"webhook": url})
    ledger_of_two(ticks.pipeline.store, ticks.state)
    (ticks.state / "0").mkdir()  # the champion's files
    later = now() + timedelta(minutes=11)
    with patch.object(sensors, "now", lambda: later):
        cursor = ticks.tick("alerts").cursor
        ticks.pipeline.store.set_agent("shop", recipe="/srv/gone.yaml")
        cursor = ticks.tick("alerts", cursor).cursor
        ticks.pipeline.store.set_agent("shop", recipe=None)
        cursor = ticks.tick("alerts", cursor).cursor
    assert [body["text"] for body in kept.received] == [
        "shop: version waits",
        "shop: settings unsound",
    ]
    assert json.loads(cursor) == ["shop/version_waits"]
