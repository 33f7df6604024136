"""A remote reward against a real server on loopback that answers as it is told to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import Message, RewardInput, user_prompt
from rlhf_pipeline.reward.functions import as_reward
from rlhf_pipeline.reward.named import as_scored, check_function, check_keys, named_reward
from rlhf_pipeline.reward.remote import HOW_ASKED, LONGEST_WAIT_SECONDS, RemoteReward
from rlhf_pipeline.reward.settings import FunctionSettings
from tests.loopback import answering

ITEMS = [RewardInput(user_prompt("hi"), "a" * n) for n in (3, 1, 2)]


class Service(ThreadingHTTPServer):
    """A reward service: by default it scores a completion by its length."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.heard: list[dict[str, Any]] = []
        self.sent_headers: list[dict[str, str]] = []
        self.answers: list[tuple[int, dict[str, str], bytes]] = []  # said first, in this order
        self.hangs_seconds = 0.0

    def handle_error(self, *args: Any) -> None:
        """Say nothing of callers who did not wait."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class Answer(BaseHTTPRequestHandler):
    """One request to the service."""

    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.heard.append(body)
        self.server.sent_headers.append(dict(self.headers))
        time.sleep(self.server.hangs_seconds)
        scores = {"scores": [len(item["completion"]) for item in body["items"]]}
        answer = json.dumps(scores).encode()
        status, headers = 200, dict[str, str]()
        if self.server.answers:
            status, headers, answer = self.server.answers.pop(0)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            if value:  # "" leaves the header out
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    with answering(Service()) as server:
        yield server


def test_items_go_out_in_batches_and_scores_come_back_in_order(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORES_KEY", "s3cret")
    prompt = (Message("system", "be kind"), *user_prompt("hi"))
    items = [*ITEMS, RewardInput(prompt, "ä", ("b",), {"turn": 2})]
    reward = RemoteReward(service.url, batch_size=3, key_variable="SCORES_KEY")
    assert reward(items) == [3.0, 1.0, 2.0, 1.0]
    assert [len(heard["items"]) for heard in service.heard] == [3, 1]
    assert service.heard[1]["items"][0] == {
        "prompt": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        "completion": "ä",
        "references": ["b"],
        "metadata": {"turn": 2},
    }
    assert service.sent_headers[0]["Authorization"] == "Bearer s3cret"
    assert reward([]) == []
    assert as_reward(service.url)(ITEMS) == [3.0, 1.0, 2.0]
    assert reward.version != RemoteReward(service.url + "2").version


def test_a_recipe_says_how_a_service_is_asked(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"key_variable": "SCORES_KEY", "timeout_seconds": 5, "attempts": 1, "batch_size": 2}
    asked = FunctionSettings(function=service.url, options=options)
    check_function("mine", asked)  # asks nothing, and needs no key yet
    reward = named_reward(service.url, options)
    unset = "needs its key in SCORES_KEY, found it unset"
    with pytest.raises(ModelError, match=unset):
        check_keys({"mine": asked})
    with pytest.raises(ModelError, match=unset):
        reward(ITEMS)
    check_keys({"mine": replace(asked, weight=0.0)})  # which is not asked
    monkeypatch.setenv("SCORES_KEY", "s3cret")
    check_keys({"mine": asked})
    assert reward(ITEMS) == [3.0, 1.0, 2.0]
    assert [len(heard["items"]) for heard in service.heard] == [2, 1]
    assert {sent["Authorization"] for sent in service.sent_headers} == {"Bearer s3cret"}
    # Another key or patience is the same reward: a run resumed with it goes on.
    assert getattr(reward, "version", None) == RemoteReward(service.url).version
    service.answers = [(503, {}, b"")]
    with pytest.raises(ModelError, match="at the last of 1 attempts"):
        reward(ITEMS)
    with pytest.raises(ModelError, match="timeout_seconds above 0"):
        named_reward(service.url, {"timeout_seconds": 0})


def test_what_may_pass_is_asked_again_with_growing_waits(service: Service) -> None:
    waits: list[float] = []
    service.answers = [(503, {}, b""), (429, {"Retry-After": "7"}, b""), (500, {}, b"")]
    reward = RemoteReward(service.url, sleep=waits.append)
    assert reward(ITEMS) == [3.0, 1.0, 2.0]
    assert waits == [1.0, 7.0, 4.0]
    service.answers = [(503, {"Retry-After": wait}, b"") for wait in ("\xb2", "-1", "soon")]
    assert reward(ITEMS) == [3.0, 1.0, 2.0]
    assert waits[3:] == [1.0, 2.0, 4.0]
    service.answers = [(200, {"Content-Length": "26"}, b'{"scores": [3')]  # it breaks off
    assert reward(ITEMS) == [3.0, 1.0, 2.0]
    assert waits[6:] == [1.0]
    service.answers = [(503, {}, b"")] * 2
    with pytest.raises(ModelError, match=r"found status 503 at the last of 2 attempts"):
        RemoteReward(service.url, attempts=2, sleep=waits.append)(ITEMS)


def test_what_is_said_of_how_a_service_is_asked_decides_no_score() -> None:
    judge = {"url": "https://judge.example/v1", "model": "m", "rubric": "Is it kind?"}
    patience = {"timeout_seconds": 9, "attempts": 9, "key_variable": "KEY"}
    patience |= {"allow_plain_http": True}
    asked = {
        "mine": ("https://reward.example/score", {}, {**patience, "batch_size": 9}),
        "judge": ("judge", judge, {**patience, "at_once": 9}),
    }
    assert {name for _, _, how in asked.values() for name in how} == set(HOW_ASKED)
    for name, (target, options, how) in asked.items():
        plain = FunctionSettings(function=target, options=options)
        other = FunctionSettings(function=target, options={**options, **how})
        check_function(name, other)
        assert as_scored({name: other}) == {name: plain}
        versions = {
            getattr(named_reward(target, one.options), "version", None) for one in (plain, other)
        }
        assert len(versions) == 1
    assert as_scored({"judge": FunctionSettings(options=judge | patience)}) == {
        "judge": FunctionSettings(options=judge)
    }
    own = {"own": FunctionSettings(function="taste:taste", options=patience)}
    assert as_scored(own) == own  # what such an option says there is its own affair


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 507, 520, 529])
def test_a_status_that_may_pass_is_asked_again(service: Service, status: int) -> None:
    service.answers = [(status, {}, b"overloaded")]
    assert RemoteReward(service.url, sleep=lambda seconds: None)(ITEMS) == [3.0, 1.0, 2.0]
    assert len(service.heard) == 2


def test_an_answer_of_no_told_length_that_breaks_off_is_asked_again(service: Service) -> None:
    """As services of HTTP/1.0 answer, and proxies before them: its end is the connection's."""
    waits: list[float] = []
    reward = RemoteReward(service.url, sleep=waits.append)
    untold = {"Content-Length": ""}
    service.answers = [(200, untold, b'{"score'), (200, untold, b""), (200, untold, b"\xff")]
    assert reward(ITEMS) == [3.0, 1.0, 2.0]
    assert waits == [1.0, 2.0, 4.0]
    service.answers = [(200, untold, b'{"scores": [4, 5, 6]}')]
    assert reward(ITEMS) == [4.0, 5.0, 6.0]
    service.answers = [(200, untold, b"[" * 4000)] * 2
    found = "must answer, found 4000 bytes that are no whole JSON at the last of 2 attempts"
    with pytest.raises(ModelError, match=found):
        RemoteReward(service.url, attempts=2, sleep=waits.append)(ITEMS)
    # What is whole and no list of scores stays so.
    service.answers = [(200, untold, b'{"error": "overloaded"}')]
    with pytest.raises(ModelError, match="found 23 bytes that are not; correct the service"):
        reward(ITEMS)
    assert not service.answers


def test_a_date_to_come_again_at_is_waited_for(service: Service) -> None:
    waits: list[float] = []
    now = datetime.now(UTC)
    dates = [format_datetime(now + timedelta(seconds=s), usegmt=True) for s in (30, -30)]
    dates.append("Fri, 31 Dec 9999 23:59:59 -0000")
    service.answers = [(503, {"Retry-After": date}, b"") for date in dates]
    assert RemoteReward(service.url, sleep=waits.append)(ITEMS) == [3.0, 1.0, 2.0]
    assert 20 < waits[0] <= 30
    assert waits[1:] == [0.0, LONGEST_WAIT_SECONDS]
    # What cannot be a date is none.
    service.answers = [(503, {"Retry-After": f"Wed, 21 Oct 2015 07:28:00 +{'9' * 20}"}, b"")]
    assert RemoteReward(service.url, sleep=waits.append)(ITEMS) == [3.0, 1.0, 2.0]
    assert waits[3:] == [1.0]


def test_a_service_that_hangs_or_is_gone_is_given_up_on(service: Service) -> None:
    service.hangs_seconds = 0.3
    with pytest.raises(ModelError, match="timed out at the last of 1 attempts"):
        RemoteReward(service.url, timeout_seconds=0.05, attempts=1)(ITEMS)
    gone = Service()
    gone.server_close()
    with pytest.raises(ModelError, match=r"refused.* at the last of 2 attempts"):
        RemoteReward(gone.url, attempts=2, sleep=lambda seconds: None)(ITEMS)
    waits: list[float] = []
    with pytest.raises(ModelError, match=r"refused.* at the last of 1030 attempts"):
        RemoteReward(gone.url, attempts=1030, sleep=waits.append)(ITEMS)
    assert waits == [1, 2, 4, 8, 16, 32] + [LONGEST_WAIT_SECONDS] * 1023


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {}, b'{"scores": [1, 2]}'), "needed 3, found 2"),
        ((200, {}, b'{"scores": [1, NaN, 2]}'), "found nan for item 1"),
        ((200, {}, b'{"scores": [1, 1%s, 2]}' % (b"0" * 400)), "found inf for item 1"),
        ((200, {}, b"[" * 4000), "found 4000 bytes that are not"),
        ((200, {}, b'{"scores": [1, "2", 3]}'), "must answer a list of numbers"),
        ((200, {}, b'{"scores": [1, true, 3]}'), "must answer a list of numbers"),
        ((200, {}, b'{"scores": "high"}'), "must answer a list of numbers"),
        ((200, {}, b"[1, 2, 3]"), r'must answer \{"scores": \[…\]\}, found 9 bytes'),
        ((200, {}, b"\xff"), "found 1 bytes that are not"),
        ((200, {}, b"1" * 9000), "found more than 4288 bytes"),
        ((401, {}, b""), "found status 401; check the address and the token"),
        ((403, {}, b""), "found status 403; check the address and the token"),
        ((404, {}, b""), "found status 404; check the address, or a judge's model"),
        ((413, {}, b""), "found status 413; let the service take longer requests, or send less"),
        ((422, {}, b""), "found status 422; its log says why it refuses what it was sent"),
        ((501, {}, b""), "found status 501; its log says why it refuses what it was sent"),
        ((505, {}, b""), "found status 505; its log says why it refuses what it was sent"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "redirects are not followed"),
        ((307, {"Location": "http://127.0.0.1:1/"}, b""), "redirects are not followed"),
        ((307, {"Location": "http://[bad"}, b""), "redirects are not followed"),
    ],
)
def test_an_answer_that_is_not_one_finite_score_each_is_refused_at_once(
    service: Service, answer: tuple[int, dict[str, str], bytes], message: str
) -> None:
    service.answers = [answer]
    with pytest.raises(ModelError, match=message):
        RemoteReward(service.url)(ITEMS)
    assert len(service.heard) == 1


def test_what_is_no_answer_at_all_is_asked_again_and_told_on_one_line(service: Service) -> None:
    chunks = {"Transfer-Encoding": "chunked", "Content-Length": ""}
    service.answers = [(200, chunks, b"-5\r\n[1]\r\n0\r\n\r\n")] * 2
    with pytest.raises(ModelError, match="at the last of 2 attempts; look at the service") as told:
        RemoteReward(service.url, attempts=2, sleep=lambda seconds: None)(ITEMS)
    assert "\n" not in str(told.value)
    assert len(service.heard) == 2
    service.answers = [(200, chunks, b"-5\r\n[1]\r\n0\r\n\r\n")]
    assert RemoteReward(service.url, attempts=2, sleep=lambda seconds: None)(ITEMS) == [
        3.0,
        1.0,
        2.0,
    ]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://reward.example/score?key=hidden", "found http://reward.example/score; use https"),
        ("http://127.0.0.1.example/score", "use https"),
        ("file:///etc/passwd", "needs an http or https address"),
        ("https:///score", "needs an http or https address"),
        ("https://ann:hidden@reward.example/score", "must hold no user or password"),
        ("https://[::1/hidden", "a port's number, if any"),
        ("https://reward.example:hidden/score", "a port's number, if any"),
        ("https://reward.example:70000/score", "a port's number, if any"),
        ("https://reward.example/score hidden", "without spaces"),
        ("https://reward.example/größe", "or signs beyond ASCII"),
    ],
)
def test_an_address_prompts_must_not_go_to_is_refused_without_its_secrets(
    url: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        RemoteReward(url)
    assert "hidden" not in str(refused.value)


def test_https_loopback_and_plain_http_where_it_is_allowed_are_taken() -> None:
    for url in ("https://reward.example/score", "http://localhost:9/score", "http://[::1]:9/s"):
        assert RemoteReward(url).shown_url == url
    assert RemoteReward("http://reward.example/s", allow_plain_http=True).version
    with pytest.raises(ModelError, match="found 0 and 4"):
        RemoteReward("http://localhost:9/score", timeout_seconds=0)
    with pytest.raises(ModelError, match="a batch_size of 1, 2, 3 or more, found 0"):
        RemoteReward("http://localhost:9/score", batch_size=0)
