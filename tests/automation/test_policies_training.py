"""The policies contract over HTTP: a real service, Dagster's webserver and daemon, a real turn."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest

from automation import processes
from resources.pipeline import Pipeline
from tests.assets.world import chat, write_recipe

pytestmark = pytest.mark.slow
AGENT_ID = "shop"
SCORE = {"prompt": "How much is the kettle?", "response": "30 euros", "score": 1.0, "runId": "r1"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Pipeline]]:
    folder: Path = tmp_path_factory.mktemp("policies")
    state = folder / "state"
    never = {"min_new_feedback": 100_000}  # the sensor stays quiet
    recipe = write_recipe(folder / "minute.yaml", state, continuous_learning=never)
    dagster, port = processes.free_port(0), processes.free_port(0)
    asks_at = {"RLHF_DAGSTER_URL": f"http://127.0.0.1:{dagster}"}
    with patch.dict(os.environ, {"RLHF_RECIPE": str(recipe)}), ExitStack() as stack:
        processes.prepare_home(state)
        for started, address in (
            (processes.start_webserver(state, dagster), f"http://127.0.0.1:{dagster}/server_info"),
            (processes.start_service(state, port, asks_at), f"http://127.0.0.1:{port}/readyz"),
        ):
            stack.callback(processes.stop, started)
            processes.wait_for(address, started)
        stack.callback(processes.stop, processes.start_daemon(state))
        yield f"http://127.0.0.1:{port}", Pipeline(recipe=str(recipe))


def test_scores_in_a_trained_version_out(service: tuple[str, Pipeline]) -> None:
    address, pipeline = service
    train = f"{address}/api/policies/train_policy/{AGENT_ID}"
    with httpx.Client(timeout=600) as client:
        told = client.post(f"{address}/api/policies/feedback/{AGENT_ID}", json=SCORE)
        assert told.status_code == 200, told.text
        few = client.post(train, json={})
        assert (few.status_code, "9 more" in few.json()["error"]) == (422, True)
        chat(pipeline.store, AGENT_ID, 160)
        count = sum(pipeline.store.counts(AGENT_ID).values())
        dry = client.post(train, json={"dryRun": True, "maxSteps": 5}).json()
        assert (dry["status"], dry["feedbackCount"], dry["estimatedSteps"]) == ("dry_run", count, 5)

        answers: list[httpx.Response] = []
        asked = {"maxSteps": 5, "learningRate": 0.002}
        waiting = threading.Thread(
            target=lambda: answers.append(client.post(train, params={"wait": True}, json=asked))
        )
        waiting.start()
        deadline = time.monotonic() + 120
        busy = httpx.Response(200)
        while busy.status_code != 409 and not answers and time.monotonic() < deadline:
            time.sleep(1)
            if pipeline.claims.held(AGENT_ID) is not None:
                busy = httpx.post(train, json={}, timeout=60)
        waiting.join()
        [trained] = answers
        assert trained.status_code == 200, trained.text
        assert busy.status_code == 409
        claim = pipeline.claims.of_holder(busy.json()["runId"])
        assert claim is not None
        assert (claim.state, claim.asked_by) == ("done", "api")
        policy = trained.json()
        assert (policy["status"], policy["version"]) == ("trained", f"v{count}")
        assert (policy["trainingSteps"], policy["feedbackCount"]) == (5, count)
        assert (Path(policy["modelPath"]) / "model.safetensors").is_file()
        assert (Path(policy["rewardModelPath"]) / "report.json").is_file()
        versions = client.get(f"{address}/api/policies/{AGENT_ID}").json()
        assert [v["id"] for v in versions] == [f"{AGENT_ID}:0", policy["policyId"]]
        assert versions[1]["metrics"]["rewardMean"] == policy["rewardMean"]
        found = pipeline.ledger.version(AGENT_ID, 1).lineage["recipe"]["ppo"]
        assert (found["updates"], found["learning_rate"]) == (5, 0.002)
        again = client.post(train, json={})
        assert (again.status_code, again.json()["runId"]) == (409, busy.json()["runId"])
        ready = client.get(f"{address}/readyz")
        assert ready.json() == {"ready": True, "checks": {"store": "ok", "models": "ok"}}
        numbers = client.get(f"{address}/metrics").text
        assert 'rlhf_feedback_total{kind="score"} 1.0' in numbers
