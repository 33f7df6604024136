"""What nobody sends by accident, at every JSON route: refused by name, and no error of ours."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis.python import asgi

from benchmarks.api_fuzz import AGENT, CHECKS, Found, World, fuzz, fuzz_rounds, world
from rlhf_pipeline.feedback.formats import EVENT_FIELDS
from rlhf_pipeline.feedback.lines import DEEPEST
from rlhf_pipeline.serving.feedback_schema import COMMON, OTHER

HOLE = "@HOLE@"
"""Where a hostile value goes; the text with its quotes is replaced by raw JSON."""
TARGET = {"agent_id": "tea", "prompt": "hi", "completion": "hello"}

Ask = Callable[[str, Sequence[tuple[bytes, dict[str, str]]]], list[httpx.Response]]


@dataclass(frozen=True)
class Door:
    """A JSON route, a body it takes, and the fields of it that can be spoilt (dots between)."""

    path: str
    body: dict[str, Any]
    numbers: str
    texts: str


DOORS = {
    "vote": Door(
        "/v1/feedback",
        {**TARGET, "kind": "score", "value": 0.5, "rater": "ann", "comment": "fine"},
        "value",
        "agent_id kind prompt completion comment topic idempotency_key interaction_id source "
        "occurred_at rater_id",
    ),
    "criteria": Door(
        "/v1/feedback", {**TARGET, "kind": "criteria", "value": {"safety": 0.5}}, "value.safety", ""
    ),
    "votes": Door(
        "/v1/feedback",
        {"events": [{**TARGET, "kind": "rating", "value": 5}]},
        "events.0.value",
        "events.0.agent_id events.0.completion",
    ),
    "token": Door("/v1/feedback/tokens", {"interaction_id": "i-1"}, "", "interaction_id"),
    "chat": Door(
        "/v1/chat/completions",
        {"model": "tea", "messages": [{"role": "user", "content": "hi"}]},
        "temperature seed",
        "model messages.0.role messages.0.content user session_id",
    ),
    "score": Door(
        "/api/policies/feedback/tea",
        {"prompt": "hi", "response": "hello", "score": 0.5, "runId": "r-1", "notes": "x"},
        "score",
        "prompt response runId notes",
    ),
    "training": Door(
        "/api/policies/train_policy/tea",
        {"dryRun": True, "maxSteps": 5, "learningRate": 0.1},
        "maxSteps learningRate",
        "",
    ),
}
DEEP, NESTED = ("[" * n + "]" * n for n in (10_000, DEEPEST - 10))
NEVER = ("NaN", "Infinity", "-Infinity", "9" * 5000, DEEP, NESTED, "[]", "{}")
NO_NUMBER = (*NEVER, "1e999", "9" * 400, "true", '"1"', "[1]")
NO_TEXT = (*NEVER, "7", "true", '["a"]', '{"a": 1}', r'"\ud800"', r'"a\u0000b"')
AT = "line 1 column "  # where a field cannot be named, for the body cannot be read


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("hostile")) as made:
        yield made


@pytest.fixture(scope="module")
def ask(made: World) -> Ask:
    """Return what sends bodies to a path, each with headers of its own, with an admin's key."""
    right = {"authorization": f"Bearer {made.rights['admin']}", "content-type": "application/json"}

    async def asked(
        path: str, sent: Sequence[tuple[bytes, dict[str, str]]]
    ) -> list[httpx.Response]:
        transport = httpx.ASGITransport(made.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as user:
            return [
                await user.post(path, content=body, headers={**right, **headers})
                for body, headers in sent
            ]

    return lambda path, sent: asyncio.run(asked(path, sent))


def spoilt(body: dict[str, Any], path: str, raw: str) -> bytes:
    """Return the body with raw JSON in place of one field."""
    changed = json.loads(json.dumps(body))
    *above, last = (int(name) if name.isdigit() else name for name in path.split("."))
    inside = changed
    for name in above:
        inside = inside[name]
    inside[last] = HOLE
    return json.dumps(changed).replace(f'"{HOLE}"', raw).encode()


def refusal(answer: httpx.Response) -> str:
    """Return why a request, or the first of its votes, was refused; empty where it was not."""
    told = answer.json()
    if answer.status_code == 200 and "results" in told:
        return str(told["results"][0].get("error", ""))
    assert answer.status_code < 500, answer.text
    return answer.text if answer.status_code >= 400 else ""


@pytest.mark.parametrize("name", DOORS)
def test_a_hostile_value_is_refused_by_its_fields_name_or_its_place(ask: Ask, name: str) -> None:
    door = DOORS[name]
    cases = [(field, raw) for field in door.numbers.split() for raw in NO_NUMBER]
    cases += [(field, raw) for field in door.texts.split() for raw in NO_TEXT]
    sent: list[tuple[bytes, dict[str, str]]] = [(spoilt(door.body, *case), {}) for case in cases]
    for (field, raw), answer in zip(cases, ask(door.path, sent), strict=True):
        why = refusal(answer)
        assert field.rpartition(".")[2] in why or AT in why, (field, raw[:20], why[:300])


@pytest.mark.parametrize("name", DOORS)
def test_a_hostile_body_is_refused(ask: Ask, name: str) -> None:
    door = DOORS[name]
    whole = json.dumps(door.body).encode()
    first = next(iter(door.body))
    unread = name in ("chat", "score", "training")  # pydantic says no name it cannot write
    bodies = {
        b"": AT,
        b"null": "object",
        b"[]": "object",
        b'"a"': "object",
        b"1e999": "object",
        DEEP.encode(): AT,
        whole[:-1]: AT,
        whole[:-1] + b", " + whole[1:]: first,  # every field twice
        b"\xff\xfe": "UTF-8",
        whole.decode().encode("utf-16"): "UTF-8",
        b"\x00": AT,
        json.dumps({**door.body, "x\x00": 1}).encode(): "x",
        json.dumps({**door.body, "x\ud800": 1}).encode(): "name" if unread else "x",
        b'"' + b"a" * (5 << 20) + b'"': "at most",
    }
    for (body, says), answer in zip(
        bodies.items(), ask(door.path, [(body, {}) for body in bodies]), strict=True
    ):
        why = refusal(answer)
        assert says in why, (body[:40], why[:300])
    kinds = ("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data")
    answers = ask(door.path, [(whole, {"content-type": kind}) for kind in kinds])
    assert [answer.status_code for answer in answers] == [415] * len(kinds)
    [upper] = ask(door.path, [(whole, {"content-type": "Application/JSON; charset=UTF-8"})])
    assert upper.status_code == 200


@pytest.mark.parametrize("name", ["vote", "votes", "score"])
@pytest.mark.parametrize("key", ["", "x" * 201])
def test_an_idempotency_key_nobody_can_keep_is_refused_by_name(
    ask: Ask, name: str, key: str
) -> None:
    door = DOORS[name]
    [answer] = ask(door.path, [(json.dumps(door.body).encode(), {"idempotency-key": key})])
    assert answer.status_code == 422
    assert "Idempotency-Key" in answer.text or "idempotency key" in answer.text


def test_true_is_no_1_where_a_chat_field_must_ask_for_nothing(ask: Ask) -> None:
    bodies = [{**DOORS["chat"].body, name: v} for name, v in (("n", True), ("top_logprobs", False))]
    bodies += [{**DOORS["chat"].body, "n": 1}]
    answers = ask("/v1/chat/completions", [(json.dumps(body).encode(), {}) for body in bodies])
    assert [answer.status_code for answer in answers] == [400, 400, 200]


def test_every_field_of_a_vote_is_described() -> None:
    other_names = {"number", "text", "criteria", "choice"}
    assert set(COMMON) | set(OTHER) | {"kind", "value"} == EVENT_FIELDS - other_names


def _fuzzed(made: World, cases: int) -> Found:
    found = fuzz(made, cases)
    assert not found.faults, "\n".join(found.faults.values())
    assert found.cases >= cases
    assert {status for _, status in found.statuses} >= {200, 400, 401, 403, 404, 409, 422}
    return found


def test_schemathesis_finds_no_undocumented_answer(made: World) -> None:
    _fuzzed(made, 200)


def test_every_event_of_a_streamed_reply_is_as_described(made: World) -> None:
    schema = schemathesis.openapi.from_dict(made.app.openapi())
    body: Any = {"model": AGENT, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    asked = schema["/v1/chat/completions"]["POST"].Case(body=body, media_type="application/json")
    with asgi.get_client(made.app, max_stream_events=100) as client:
        headers = {"authorization": f"Bearer {made.rights['admin']}"}
        answer = asked.call(session=client, base_url="http://localhost", headers=headers)
    assert answer.headers["content-type"][0].startswith("text/event-stream")
    assert "[DONE]" in answer.text
    asked.validate_response(answer, checks=list(CHECKS))


@pytest.mark.slow
def test_schemathesis_finds_none_in_two_thousand(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        found = _fuzzed(made, 2000)
    operations = {label for label, _ in found.statuses if "/v1/raters" not in label}  # has none
    taken = {label for label, status in found.statuses if status == 200}
    assert taken == operations  # every operation was reached, behind its rules too


def test_what_rounds_have_met_adds_up() -> None:
    found = Found(Counter({("GET /a", 200): 2}), {"a": "first"}, 1)
    found.add(Found(Counter({("GET /a", 200): 1, ("GET /b", 500): 1}), {"a": "later", "b": "b"}, 2))
    assert (found.cases, found.faulty) == (4, 3)
    assert found.statuses == {("GET /a", 200): 3, ("GET /b", 500): 1}
    assert found.faults == {"a": "first", "b": "b"}


@pytest.mark.slow
def test_rounds_side_by_side_meet_what_they_meet_one_by_one() -> None:
    def counted(workers: int, until: float = math.inf) -> list[int]:
        rounds = fuzz_rounds(80, start=0, workers=workers, size=40, until=until)
        return sorted(found.cases for found in rounds)

    two = counted(2)
    assert len(two) == 2
    assert sum(two) >= 80
    assert two == counted(1)
    assert counted(2, until=0.0) == [0, 0]
