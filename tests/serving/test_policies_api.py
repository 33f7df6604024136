"""The published contract of agent policies, with a Dagster that is a table of answers."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from gql import GraphQLRequest
from gql.transport import Transport
from gql.transport.exceptions import TransportConnectionFailed
from graphql import ExecutionResult, OperationDefinitionNode

from rlhf_pipeline import database as db
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.claims import ERASURE, PRUNE
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    hash_rater,
    now,
    user_prompt,
    uuid7,
)
from rlhf_pipeline.serving import dagster_runs, policies_api
from rlhf_pipeline.serving.app import create_app
from rlhf_pipeline.serving.dagster_runs import DagsterRuns
from rlhf_pipeline.serving.feedback_api import Inbox
from rlhf_pipeline.serving.limits import Buckets, RaterLimit
from rlhf_pipeline.serving.policies_api import Policies, add_policy_routes
from tests.serving.kills import until_it_answers
from tests.serving.pages.world import free_port

SCORE: dict[str, Any] = {"prompt": "hi", "response": "hello", "score": 0.75, "runId": "r1"}


class FakeDagster(Transport):
    """Answers what Dagster's GraphQL answers, and remembers what it was asked."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.partitions: list[str] = []
        self.states: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.failure: dict[str, Any] | None = None
        self.away = False
        self.on_status: Callable[[str], None] = lambda run_id: None

    def execute(self, request: GraphQLRequest, *args: Any, **kwargs: Any) -> ExecutionResult:
        if self.away:
            raise TransportConnectionFailed("nobody listens")
        [operation] = [
            d for d in request.document.definitions if isinstance(d, OperationDefinitionNode)
        ]
        name: str = operation.selection_set.selections[0].name.value  # type: ignore[attr-defined]
        said = getattr(self, f"_{name}")(request.variable_values or {})
        return ExecutionResult(data={name: said})

    def _repositoriesOrError(self, asked: dict[str, Any]) -> dict[str, Any]:
        jobs = [{"name": "retrain"}, {"name": "bootstrap"}]
        node = {"name": "__repository__", "location": {"name": "here"}, "jobs": jobs}
        return {"__typename": "RepositoryConnection", "nodes": [node]}

    def _addDynamicPartition(self, asked: dict[str, Any]) -> dict[str, Any]:
        known = asked["key"] in self.partitions
        self.partitions.append(asked["key"])
        kind = "DuplicateDynamicPartitionError" if known else "AddDynamicPartitionSuccess"
        return {"__typename": kind}

    def _launchPipelineExecution(self, asked: dict[str, Any]) -> dict[str, Any]:
        run_id = f"run-{len(self.launched)}"
        self.launched.append(asked["executionParams"])
        self.states[run_id] = "STARTED"
        return {"__typename": "LaunchRunSuccess", "run": {"runId": run_id}}

    def _runsOrError(self, asked: dict[str, Any]) -> dict[str, Any]:
        [tag] = asked["filter"]["tags"]
        runs = [
            {"runId": run_id}
            for (run_id, state), launched in zip(self.states.items(), self.launched, strict=True)
            if state in asked["filter"]["statuses"] and tag in launched["executionMetadata"]["tags"]
        ]
        return {"__typename": "Runs", "results": runs}

    def _pipelineRunOrError(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.on_status(asked["runId"])
        if asked["runId"] in self.deleted:
            return {"__typename": "RunNotFoundError", "message": "no such run"}
        return {"__typename": "Run", "status": self.states[asked["runId"]]}

    def _logsForRun(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["run"] in self.deleted:
            return {"__typename": "RunNotFoundError"}
        events = [{"__typename": "MaterializationEvent"}, self.failure]
        return {"__typename": "EventConnection", "events": [e for e in events if e]}


class Service:
    """The routes on a store of their own."""

    def __init__(self, state: Path) -> None:
        self.dagster = FakeDagster()
        self.database = Database(f"sqlite:///{state}/feedback.db")
        self.store = FeedbackStore(self.database)
        self.policies = Policies(
            load_settings("tiny", {"state_dir": state}),
            self.store,
            Inbox(self.store),
            DagsterRuns("http://dagster.test", transport=lambda: self.dagster),
        )
        self.app = FastAPI()
        add_policy_routes(self.app, self.policies)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                if isinstance(body, bytes):
                    kind = {"content-type": "application/json"}
                    return await client.request(method, path, content=body, headers=kind)
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(asked())

    def score(self, agent_id: str, body: Any, **headers: str) -> httpx.Response:
        return self.ask("POST", f"/api/policies/feedback/{agent_id}", body, **headers)

    def train(self, agent_id: str, query: str = "", **body: Any) -> httpx.Response:
        return self.ask("POST", f"/api/policies/train_policy/{agent_id}{query}", body)

    def registers(
        self,
        agent_id: str,
        run_id: str,
        *,
        folder: str = "m1",
        fails: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Do what the run last asked for does: a version of its votes, and the claim's verdict."""
        config = self.dagster.launched[-1]["runConfigData"]["ops"]["feedback_snapshot"]["config"]
        watermark, again = config["watermark"], config["again"]
        mark = snapshot.fingerprint(self.database, agent_id, watermark)
        claims, ledger = self.policies.claims, self.policies.ledger
        claim = claims.claim(agent_id, mark, watermark, holder=run_id, asked_by="api", again=again)
        lineage = {"votes": 12, "token": claim.token, "fingerprint": mark}
        training = {"updates": 7, "reward_mean": 0.5, "reward_std": 0.25}
        training |= {} if seconds is None else {"seconds": seconds}
        where = self.policies.settings.state_dir
        if not ledger.versions(agent_id):
            files = {"model.safetensors": "0" * 64}
            ledger.add_baseline(
                agent_id, label="v12", path=where / "m0", files=files, lineage=lineage, actor="test"
            )
        ledger.add_version(
            agent_id,
            label="v12",
            path=where / folder / "ppo" / "policy",
            files={"model.safetensors": "1" * 64},
            lineage={**lineage, "training": training},
            gate={"passed": False, "results": []},
            fingerprint=mark,
            token=claim.token,
        )
        claims.finish(claim.token, "failed" if fails else "done")

    def filled(self, agent_id: str, scores: int = 12) -> str:
        for i in range(scores):
            sent = {**SCORE, "prompt": f"q{i}", "score": (i % 4) / 4, "runId": f"r{i}"}
            assert self.score(agent_id, sent).status_code == 200
        return agent_id


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("policies"))
    yield made
    made.database.close()


def test_the_names_that_dagster_knows_are_its_own() -> None:
    from assets.common import agents
    from automation import jobs
    from resources import pipeline

    ours = dagster_runs
    assert (jobs.retrain.name, agents.name) == (ours.JOB, ours.PARTITIONS)
    assert (ours.AGENT, ours.ASKED_BY) == (pipeline.AGENT, pipeline.ASKED_BY)
    assert (ours.MAX_STEPS, ours.LEARNING_RATE) == (pipeline.MAX_STEPS, pipeline.LEARNING_RATE)
    assert ours.WATERMARK == jobs.WATERMARK


def test_a_score_is_answered_with_exactly_the_published_names(service: Service) -> None:
    before = now()
    first = service.score("names", {**SCORE, "notes": "fine"}, **{"idempotency-key": "k"})
    between = now()
    assert first.status_code == 200
    assert set(first.json()) == {"id", "agentId", "score", "createdAt"}
    assert (first.json()["agentId"], first.json()["score"]) == ("names", 0.75)
    again = service.score("names", {**SCORE, "notes": "fine"}, **{"idempotency-key": "k"})
    assert again.json() == first.json()
    second = service.score("names", SCORE, **{"idempotency-key": "of another"})
    stored = [datetime.fromisoformat(one.json()["createdAt"]) for one in (first, second)]
    assert before <= stored[0] <= between <= stored[1] <= now()
    other = service.score("names", {**SCORE, "score": 0.0}, **{"idempotency-key": "k"})
    assert other.status_code == 409


def test_a_run_that_scores_again_has_changed_its_mind(service: Service) -> None:
    for score, run in ((0.0, "a"), (1.0, "a"), (0.5, "b"), (0.0, "a")):
        service.score("mind", {**SCORE, "score": score, "runId": run})
    assert service.store.counts("mind") == {"score": 2}
    assert service.store.opinion("mind").mean == 0.25


def test_a_run_scores_only_so_often_and_no_other_run_waits(tmp_path: Path) -> None:
    service = Service(tmp_path)
    limit = RaterLimit(3, Buckets(lambda: 0.0))
    service.policies = replace(service.policies, inbox=Inbox(service.store, limit))
    service.app = FastAPI()
    add_policy_routes(service.app, service.policies)
    answers = [service.score("tea", {**SCORE, "prompt": f"q{i}"}) for i in range(4)]
    assert [one.status_code for one in answers] == [200, 200, 200, 429]
    assert answers[3].headers["retry-after"] == "20"
    assert "3 votes a minute" in answers[3].json()["error"]
    assert service.score("tea", {**SCORE, "runId": "r2"}).status_code == 200
    assert service.store.counts("tea") == {"score": 4}
    service.database.close()


def test_one_limit_holds_for_a_run_whichever_route_it_takes(tmp_path: Path) -> None:
    chosen = {"state_dir": tmp_path, "feedback": {"votes_per_minute": 2}}
    service = Service(tmp_path)
    service.app = create_app(load_settings("tiny", chosen), pages=False, names=["test"])
    rater = hash_rater("tea", "run:r1")
    vote = {"agent_id": "tea", "kind": "score", "value": 1, "prompt": "hi", "completion": "hello"}
    there = service.ask("POST", "/v1/feedback", {**vote, "rater_id": rater})
    assert there.status_code == 200
    assert [service.score("tea", SCORE).status_code for _ in range(2)] == [200, 429]
    service.database.close()


def test_a_run_id_that_is_an_interactions_is_about_what_it_answered(service: Service) -> None:
    interaction = Interaction(uuid7(), "tied", user_prompt("hi"), "hello", 3, now())
    service.store.add_interactions([interaction])
    run_id = interaction.interaction_id
    assert service.score("tied", {**SCORE, "runId": run_id}).status_code == 200
    for change in ({"response": "put in my mouth"}, {"prompt": "never asked"}):
        put = service.score("tied", {**SCORE, "runId": run_id, **change})
        assert (put.status_code, put.json()["rule"]) == (422, "two_targets")
    assert service.score("other", {**SCORE, "runId": run_id}).status_code == 200  # only a text
    with service.database.read() as connection:
        rows = connection.exec_driver_sql(
            "SELECT agent_id, interaction_id, completion FROM feedback WHERE agent_id IN "
            "('tied', 'other') ORDER BY seq"
        ).all()
    assert [tuple(row) for row in rows] == [("tied", run_id, None), ("other", None, "hello")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"score": 1.01}, "score"),
        ({"score": "0.5"}, "score"),
        ({"score": True}, "score"),
        ({"runId": None}, "runId"),
        ({"response": "\ud800"}, "surrogate"),
        ({"prompt": "\x00"}, "NUL"),
        ({"notes": "x" * 10_001}, "'notes': needed at most 10000 characters, found 10001"),
        ({"rating": 3}, "rating"),
    ],
)
def test_a_body_that_breaks_the_contract_names_the_field(
    service: Service, change: dict[str, Any], says: str
) -> None:
    refused = service.score("wrong", json.dumps({**SCORE, **change}).encode())
    assert refused.status_code == 422
    assert says in refused.json()["error"]
    assert service.store.counts("wrong") == {}


def test_not_a_number_and_a_strange_agent_are_refused(service: Service) -> None:
    body = json.dumps({**SCORE, "score": float("nan")}).encode()
    assert service.score("wrong", body).status_code == 422
    assert service.score("..%2Fx", SCORE).status_code in (404, 422)
    assert service.score("a b", SCORE).json()["rule"] == "bad_agent"


def test_too_few_samples_say_how_many_more(service: Service) -> None:
    service.filled("few", 7)
    for dry in (True, False):
        refused = service.train("few", dryRun=dry)
        assert refused.status_code == 422
        assert "3 more" in refused.json()["error"]
    assert "10 more" in service.train("nobody", dryRun=False).json()["error"]
    assert service.dagster.launched == []


def test_comments_are_no_samples(service: Service) -> None:
    agent_id = service.filled("talked", 4)
    said: dict[str, Any] = {"prompt": user_prompt("hi"), "completion": "hello", "text": "nice"}
    comments = [Feedback(agent_id, FeedbackKind.comment, f"c{n}", **said) for n in range(12)]
    service.store.append(comments)
    for dry in (True, False):
        refused = service.train(agent_id, dryRun=dry)
        assert refused.status_code == 422
        assert "found 4 beside 12 comments" in refused.json()["error"]
        assert (refused.json()["feedbackCount"], refused.json()["missing"]) == (16, 6)
    told = service.train(service.filled(agent_id, 10), dryRun=True)
    assert (told.status_code, told.json()["feedbackCount"]) == (200, 22)  # as its version has it


def test_a_dry_run_says_what_training_would_take(service: Service) -> None:
    told = service.train(service.filled("dry"), dryRun=True, maxSteps=20, learningRate=1e-4)
    assert told.status_code == 200
    assert told.json() == {
        "status": "dry_run",
        "feedbackCount": 12,
        "estimatedSteps": 20,
        "estimatedTimeMinutes": pytest.approx(20 * policies_api.MINUTES_PER_STEP),
        "scoreMean": pytest.approx(0.375),
        "scoreStd": pytest.approx((5 / 64) ** 0.5),  # of 0, ¼, ½, ¾
        "modelConfig": {"base_model": "tiny", "use_lora": False, "learning_rate": 1e-4},
    }
    assert service.dagster.launched == []


def test_training_is_asked_of_dagster_once(service: Service) -> None:
    before = len(service.dagster.launched)
    told = service.train(service.filled("real"), maxSteps=5, learningRate=0.0002)
    assert told.status_code == 200, told.text
    run_id = told.json()["runId"]
    assert told.json() == {"status": "started", "runId": run_id}
    [launched] = service.dagster.launched[before:]
    assert launched["selector"]["pipelineName"] == "retrain"
    config = launched["runConfigData"]["ops"]["feedback_snapshot"]["config"]
    assert config["watermark"] > 0
    assert config["again"] is False
    tags = {t["key"]: t["value"] for t in launched["executionMetadata"]["tags"]}
    assert tags["dagster/partition"] == "real"
    assert (tags["rlhf/max_steps"], tags["rlhf/learning_rate"]) == ("5", "0.0002")
    assert tags["rlhf/asked_by"] == "api"
    assert "real" in service.dagster.partitions
    busy = service.train("real")
    assert (busy.status_code, busy.json()["runId"]) == (409, run_id)
    service.dagster.states[run_id] = "FAILURE"
    assert service.train("real").status_code == 200


def test_a_turn_begun_on_dagsters_page_is_named(service: Service) -> None:
    """All that Dagster's own page says of the agent is which partition it is."""
    tags = [{"key": "dagster/partition", "value": service.filled("page")}]
    begun = service.dagster._launchPipelineExecution(
        {"executionParams": {"executionMetadata": {"tags": tags}}}
    )["run"]["runId"]
    busy = service.train("page")
    assert (busy.status_code, busy.json()["runId"]) == (409, begun)
    service.dagster.states[begun] = "SUCCESS"
    assert service.train("page").status_code == 200


def test_of_two_who_ask_in_one_moment_the_second_is_told_the_firsts_run(service: Service) -> None:
    """And what has kept them apart is gone when they are: any name may be asked for."""
    path = f"/api/policies/train_policy/{service.filled('moment')}"

    async def asked() -> list[httpx.Response]:
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(client.post(path, json={}) for _ in range(2)))

    before = len(service.dagster.launched)
    first, second = sorted(asyncio.run(asked()), key=lambda told: told.status_code)
    assert (first.status_code, second.status_code) == (200, 409)
    assert first.json()["runId"] == second.json()["runId"]
    assert len(service.dagster.launched) == before + 1
    gc.collect()
    assert len(service.policies.one_at_a_time) == 0


def test_a_turn_somebody_else_holds_is_named(service: Service) -> None:
    claim = service.policies.claims.claim(
        service.filled("held"), "f" * 64, 1, holder="run-of-sensor", asked_by="sensor"
    )
    busy = service.train("held")
    assert (busy.status_code, busy.json()["runId"]) == (409, "run-of-sensor")
    service.policies.claims.finish(claim.token, "done")
    assert service.train("held").status_code == 200


@pytest.mark.parametrize(
    ("holder", "says"),
    [(ERASURE, "cleared of somebody's data"), (PRUNE, "old files")],
)
def test_what_holds_an_agent_without_training_it_is_said(
    service: Service, holder: str, says: str
) -> None:
    agent_id, claims = service.filled(f"busy-{holder}"), service.policies.claims
    claim = claims.claim(agent_id, "f" * 64, 0, holder=f"{holder}-0123", asked_by=holder)
    busy = service.train(agent_id)
    assert (busy.status_code, says in busy.json()["error"]) == (409, True)
    assert "trained" not in busy.text
    assert "runId" not in busy.json()  # nobody could follow it
    claims.let_go(claim.token)
    assert service.train(agent_id).status_code == 200


def test_who_waits_is_told_what_was_trained(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies_api, "LOOK_SECONDS", 0.01)
    agent_id, claims = service.filled("waits"), service.policies.claims

    def trains(run_id: str) -> None:
        if claims.of_holder(run_id) is not None:
            service.dagster.states[run_id] = "SUCCESS"
            return
        service.registers(agent_id, run_id)

    service.dagster.on_status = trains
    told = service.train(agent_id, "?wait=true")
    service.dagster.on_status = lambda run_id: None
    assert told.status_code == 200, told.text
    state = service.policies.settings.state_dir
    assert told.json() == {
        "status": "trained",
        "policyId": "waits:1",
        "version": "v12",
        "modelPath": str(state / "m1" / "ppo" / "policy"),
        "rewardModelPath": str(state / "m1" / "reward" / "proxy"),
        "feedbackCount": 12,
        "trainingSteps": 7,
        "rewardMean": 0.5,
        "rewardStd": 0.25,
    }
    listed = service.ask("GET", "/api/policies/waits").json()
    assert [p["id"] for p in listed] == ["waits:0", "waits:1"]
    assert set(listed[1]) == {"id", "agentId", "version", "createdAt", "metrics"}
    assert listed[0]["metrics"] == {"feedbackCount": 12, "rewardMean": None, "rewardStd": None}
    assert listed[1]["metrics"] == {"feedbackCount": 12, "rewardMean": 0.5, "rewardStd": 0.25}
    twice = service.train(agent_id)
    assert (twice.status_code, twice.json()["runId"]) == (409, claims.history(agent_id)[-1].holder)
    assert service.train(agent_id, "?again=true").status_code == 200
    service.dagster.states = dict.fromkeys(service.dagster.states, "SUCCESS")


@pytest.mark.parametrize(("seconds", "minutes"), [(None, 60), (7 * 60, 23 + 20), (70 * 60, 200)])
def test_an_estimate_goes_by_how_long_the_agents_last_turn_and_its_updates_took(
    service: Service, seconds: float | None, minutes: float
) -> None:
    """A turn of 7 updates took half an hour: in all of it, in 7 minutes of it alone, or in 70 with
    those of an attempt before.
    """
    agent_id = service.filled(f"estimate-{minutes}")
    begun = service.train(agent_id).json()["runId"]
    service.registers(agent_id, begun, seconds=seconds)
    claim = service.policies.claims.history(agent_id)[-1]
    began = {"created_at": claim.heartbeat_at - timedelta(minutes=30)}
    with service.database.write() as connection:
        connection.execute(db.claims.update().where(db.claims.c.token == claim.token).values(began))
    service.dagster.states[begun] = "SUCCESS"
    told = service.train(agent_id, dryRun=True, maxSteps=14 if seconds is None else 20).json()
    assert told["estimatedTimeMinutes"] == pytest.approx(minutes, abs=0.01)


def test_again_trains_from_votes_that_were_trained_on_and_is_else_refused_as_any(
    service: Service,
) -> None:
    agent_id, dagster = service.filled("again"), service.dagster
    begun = service.train(agent_id).json()["runId"]
    service.registers(agent_id, begun)
    dagster.states[begun] = "SUCCESS"
    before = len(dagster.launched)
    assert service.train(agent_id).json()["runId"] == begun  # has trained from these votes
    assert service.train(agent_id, "?again=true", dryRun=True).json()["status"] == "dry_run"
    service.store.set_agent(agent_id, paused_reason="audit")
    assert service.train(agent_id, "?again=true").status_code == 503
    service.store.set_agent(agent_id, paused_reason=None)
    assert service.train("again-few", "?again=true").json()["missing"] == 10
    assert len(dagster.launched) == before

    told = service.train(agent_id, "?again=true", maxSteps=3)
    assert told.status_code == 200, told.text
    [launched] = dagster.launched[before:]
    config = launched["runConfigData"]["ops"]["feedback_snapshot"]["config"]
    assert config["again"] is True
    assert {"key": "rlhf/max_steps", "value": "3"} in launched["executionMetadata"]["tags"]
    for query in ("", "?again=true"):  # while it is at work
        busy = service.train(agent_id, query)
        assert (busy.status_code, busy.json()["runId"]) == (409, told.json()["runId"])
    service.registers(agent_id, told.json()["runId"], folder="m2")
    dagster.states[told.json()["runId"]] = "SUCCESS"
    versions = [p["id"] for p in service.ask("GET", f"/api/policies/{agent_id}").json()]
    assert versions == ["again:0", "again:1", "again:2"]
    assert service.train(agent_id).json()["runId"] == told.json()["runId"]  # the newest that has


def test_who_waits_is_told_of_a_version_that_an_attempt_before_has_registered(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who asks for it `again` of the version that comes of that."""
    monkeypatch.setattr(policies_api, "LOOK_SECONDS", 0.01)
    agent_id, dagster = service.filled("twice"), service.dagster
    states = iter(["FAILURE", "SUCCESS", "SUCCESS"])  # the first: MLflow was away at its end
    folders = iter(["m1", "m1", "m2"])

    def trains(run_id: str) -> None:
        dagster.states[run_id] = state = next(states)
        service.registers(agent_id, run_id, folder=next(folders), fails=state == "FAILURE")

    dagster.on_status, dagster.failure = trains, None
    told = [service.train(agent_id, f"?wait=true{more}") for more in ("", "", "&again=true")]
    dagster.on_status = lambda run_id: None
    assert [one.status_code for one in told] == [502, 200, 200], told[1].text
    assert [one.json()["policyId"] for one in told[1:]] == ["twice:1", "twice:2"]
    assert told[1].json()["rewardModelPath"] != told[2].json()["rewardModelPath"]


def test_who_waits_is_told_why_it_failed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies_api, "LOOK_SECONDS", 0.01)
    fail = {"message": "wrapped", "causes": [{"message": "NotEnoughData: needed 30 pairs\n"}]}
    service.dagster.failure = {
        "__typename": "ExecutionStepFailureEvent",
        "stepKey": "reward_model",
        "error": fail,
    }
    service.dagster.on_status = lambda run_id: service.dagster.states.update({run_id: "FAILURE"})
    told = service.train(service.filled("fails"), "?wait=true")
    service.dagster.on_status = lambda run_id: None
    assert told.status_code == 502
    assert told.json()["error"] == "training failed: reward_model: NotEnoughData: needed 30 pairs"
    assert told.json()["runId"].startswith("run-")


def test_who_waits_for_a_run_that_is_deleted_is_told_so(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies_api, "LOOK_SECONDS", 0.01)
    service.dagster.on_status = service.dagster.deleted.add
    told = service.train(service.filled("deleted"), "?wait=true")
    service.dagster.on_status = lambda run_id: None
    assert (told.status_code, told.json()["error"]) == (502, "training failed: the run was deleted")
    assert told.json()["runId"] in service.dagster.deleted


def test_who_waits_goes_on_waiting_while_dagster_is_away(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies_api, "LOOK_SECONDS", 0.01)
    looks: list[str] = []

    def looked(run_id: str) -> None:
        looks.append(run_id)
        if len(looks) <= 2:
            raise TransportConnectionFailed("restarting")
        service.dagster.states[run_id] = "FAILURE"

    service.dagster.on_status, service.dagster.failure = looked, None
    told = service.train(service.filled("patient"), "?wait=true")
    service.dagster.on_status = lambda run_id: None
    assert len(looks) == 3
    assert (told.status_code, told.json()["runId"]) == (502, looks[0])


def test_who_waits_for_a_dagster_that_stays_away_is_told_the_run(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(run_id: str) -> None:
        raise TransportConnectionFailed("gone")

    clock = count()
    passed = SimpleNamespace(monotonic=lambda: float(next(clock)) * 60)
    monkeypatch.setattr(policies_api, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(policies_api, "time", passed)
    service.dagster.on_status = lost
    told = service.train(service.filled("lost"), "?wait=true")
    service.dagster.on_status = lambda run_id: None
    assert (told.status_code, told.headers["retry-after"]) == (503, "5")
    assert told.json()["runId"] == f"run-{len(service.dagster.launched) - 1}"
    assert "start it" in told.json()["error"]
    assert next(clock) > service.policies.settings.continuous_learning.deadline_minutes


ENDS_WHILE_WAITED_FOR = """
import json, sys
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.serving import app, dagster_runs
from tests.serving.test_policies_api import DagsterRuns, FakeDagster

dagster = FakeDagster()
dagster.on_status = lambda run_id: print(run_id, flush=True)
dagster_runs.DagsterRuns = lambda url: DagsterRuns(url, transport=lambda: dagster)
app.run(load_settings("tiny", json.loads(sys.argv[1])), int(sys.argv[2]), pages=False)
"""


def test_who_waits_is_told_the_run_when_the_service_is_to_stop(tmp_path: Path) -> None:
    Service(tmp_path).filled("stops")
    port, tree = free_port(), json.dumps({"state_dir": str(tmp_path)})
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS_WHILE_WAITED_FOR, tree, str(port)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        until_it_answers(port, lambda: process.poll() is None)
        to = f"http://127.0.0.1:{port}/api/policies/train_policy/stops?wait=true"
        with ThreadPoolExecutor() as pool:
            waits = pool.submit(httpx.post, to, json={}, timeout=60)
            run_id = next(s.strip() for s in process.stdout if s.startswith("run-"))
            process.send_signal(signal.SIGTERM)
            told = waits.result()
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    assert (told.status_code, told.json()) == (200, {"status": "started", "runId": run_id})


def test_without_dagster_the_answer_says_how_to_start_it(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.dagster.away = True
    away = service.train(service.filled("away"))
    assert (away.status_code, away.headers["retry-after"]) == (503, "5")
    assert "make ui" in away.json()["error"]
    nobody = DagsterRuns("http://127.0.0.1:9")  # the discard port: a real transport, no server
    service.policies = replace(service.policies, runs=nobody)
    service.app = FastAPI()
    add_policy_routes(service.app, service.policies)
    assert "127.0.0.1:9" in service.train("away").json()["error"]
    assert service.train("away", dryRun=True).status_code == 200
    service.database.close()


def test_a_paused_agent_does_not_train(service: Service) -> None:
    service.store.set_agent(service.filled("paused"), paused_reason="audit")
    away = service.train("paused")
    assert (away.status_code, "audit" in away.text) == (503, True)


def test_an_agent_that_is_known_hears_that_training_is_off(tmp_path: Path) -> None:
    service = Service(tmp_path)
    off = load_settings("tiny", {"state_dir": tmp_path, "training": {"enabled": False}})
    service.policies = replace(service.policies, settings=off)
    service.app = FastAPI()
    add_policy_routes(service.app, service.policies)
    away = service.train(service.filled("known"))
    assert (away.status_code, away.json()["error"]) == (
        503,
        "agent known does not train now: training.enabled is off",
    )
    service.database.close()
