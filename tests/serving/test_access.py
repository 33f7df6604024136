"""Who may do what: every route, mounts included, asked with every right."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from rlhf_pipeline.config import load_settings
from rlhf_pipeline.database import Database, open_database
from rlhf_pipeline.errors import ConfigError, RegistryError
from rlhf_pipeline.feedback.lines import RawRow, parse
from rlhf_pipeline.feedback.rules import (
    LONGEST_COMMENT,
    LONGEST_KEY,
    LONGEST_NAME,
    LONGEST_TEXT,
    MOST_TAGS,
)
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import Interaction, hash_rater, now, user_prompt, uuid7
from rlhf_pipeline.serving import access, chat_api, feedback_api, raters_api
from rlhf_pipeline.serving.access import (
    COOKIE,
    LONGEST_BODY,
    OPEN,
    REFUSED_LATER,
    add_access,
    sign,
    unsign,
)
from rlhf_pipeline.serving.app import create_app, run
from rlhf_pipeline.serving.chat_api import SORRY
from rlhf_pipeline.serving.keys import Keys
from rlhf_pipeline.serving.pages.chat_page import ANEW
from rlhf_pipeline.serving.pages.mount import AT_ONCE
from tests.serving.doors import PATIENCE, World

EMPTY = "needed a message with words in it, found none"
ROOT = Path(__file__).parents[2]
VOTE = {"agent_id": "tea", "kind": "thumbs", "value": "up", "prompt": "hi", "completion": "hello"}
ABOUT = {"agent_id": "tea", "kind": "thumbs", "value": "up", "interaction_id": "i-1"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service with three keys, and an interaction of the agent `tea`."""
    settings = load_settings("tiny", {"state_dir": tmp_path_factory.mktemp("access")})
    database = open_database(settings.resolved_database_url)
    said = Interaction("i-1", "tea", user_prompt("hi"), "hello", 0, now())
    FeedbackStore(database).add_interactions([said])
    keys = Keys(settings.state_dir)
    rights = (keys.create("admin"), keys.create("client"), keys.create("client", agent_id="tea"))
    yield World(create_app(settings, pages=False), keys, *(secret for _, secret in rights))
    database.close()


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory, warmed: list[str]) -> Any:
    """What every route answers, mounts included, as tests/serving/doors.py prints it."""
    # In a process of its own: Gradio leaves sockets and loops open behind itself.
    state = tmp_path_factory.mktemp("doors") / "state"
    command = [*warmed, "-m", "tests.serving.doors", str(state)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_what_people_wrote_is_shown_to_admins_alone(doors: Any) -> None:
    texts: dict[str, list[str]] = doors["texts"]
    assert texts == {
        "admin": ["/explain/agent_id", "/v1/raters/rater:path"],
        "client": [],
        "tea": [],
    }


def test_why_an_answer_scored_so_is_shown_and_told_to_admins_alone(doors: Any) -> None:
    why = {who: [chat["shows_why"], chat["why"]] for who, chat in doors["chat"].items()}
    nobody = [False, "This is for admins."]
    assert why == {"admin": [True, "There is no answer yet."], "client": nobody, "tea": nobody}


def test_one_agents_key_opens_the_chat_with_that_agent_and_no_other(doors: Any) -> None:
    offers = {who: chat["offers"] for who, chat in doors["chat"].items()}
    assert offers == {"admin": ["milk", "tea"], "client": ["milk", "tea"], "tea": ["tea"]}
    # They were asked, and nobody is there; where that was is for admins.
    assert all(said.startswith("the upstream at") for said in doors["chat"]["admin"]["says"])
    assert all(said == SORRY for said in doors["chat"]["client"]["says"])
    own, *others, unknown, odd = doors["chat"]["tea"]["says"]
    assert (own, unknown, odd) == (SORRY, SORRY, SORRY)
    assert others == ["this key is for agent 'tea' alone"] * 2
    assert not doors["chat"]["tea"]["names_milk"]


def test_the_page_says_that_the_conversation_went_with_the_session(doors: Any) -> None:
    assert {chat["says_first"] for chat in doors["chat"].values()} == {ANEW}


def test_as_many_are_answered_at_once_on_the_page_as_share_a_batch(doors: Any) -> None:
    assert doors["crowd"] == AT_ONCE == load_settings("tiny").serving.batch_rows


def test_a_new_conversation_and_another_assistant_stop_what_is_answered(doors: Any) -> None:
    asked = ["question submit", "send click"]
    # The last is the page's own count of how often another assistant was chosen.
    begun_by = {"renew": asked, "talk": asked, "null": asked}
    assert doors["chat"]["client"]["stopped_by"] == begun_by


def test_an_open_page_is_told_how_to_sign_in_again(world: World) -> None:
    ended = world.ask("POST", "/ui/gradio_api/queue/join")
    assert ended.status_code == 401
    assert "load the page again to sign in" in ended.json()["error"]


@pytest.mark.parametrize("path", ["/ui/review", "/ui/review/config", "/ui/review/gradio_api/info"])
def test_no_clients_key_opens_the_review_page(world: World, path: str) -> None:
    for right in (world.client, world.tea):
        for method in ("GET", "POST"):
            assert world.ask(method, path, right).status_code == 403
    # Nor by another spelling: to a mount these are no path below /ui/review.
    for odd in ("/ui/%72eview/config", "/ui/x/../review/config", "/UI/review/config"):
        assert world.ask("GET", odd, world.client).status_code in (403, 404)


def test_every_route_is_refused_without_a_right_except_the_list(doors: Any) -> None:
    found: list[tuple[str, str, int]] = doors["doors"]
    assert len(found) > 200  # Gradio alone brings dozens of routes
    assert {path for _, path, _ in found} >= OPEN | {"/ui/config", "/ui/review/config"}
    for method, path, code in found:
        asks_itself = (method, path) == ("POST", "/sign-in")  # for the key that is typed there
        assert (code == 401) == (path not in OPEN or asks_itself), (method, path, code)


@pytest.mark.parametrize(
    ("method", "path", "codes"),  # of the admin's, the client's and the one agent's key
    [
        ("GET", "/ui/", (404, 404, 404)),  # there are no pages here
        ("GET", "/your-data", (404, 404, 404)),
        ("GET", "/", (404, 404, 404)),
        ("GET", "/ui/review/", (404, 403, 403)),
        ("GET", "/uirest", (404, 403, 403)),
        ("GET", "/metrics", (200, 403, 403)),
        ("GET", "/openapi.json", (200, 200, 200)),
        ("GET", "/v1/models", (200, 200, 200)),
        ("GET", "/v1/models/tea:baseline", (404, 404, 404)),  # it has none
        ("GET", "/v1/models/milk:baseline", (404, 404, 403)),
        ("GET", "/api/policies/tea", (200, 200, 200)),
        ("GET", "/api/policies/milk", (200, 200, 403)),
        ("GET", "/v1/chat/events/milk", (404, 404, 403)),
        ("POST", "/api/policies/train_policy/tea", (422, 403, 403)),
        ("GET", "/nowhere", (404, 403, 403)),
        ("GET", "/v1/raters/nobody", (404, 403, 403)),
        ("DELETE", "/v1/raters/tea/nobody", (404, 403, 403)),
    ],
)
def test_a_key_opens_what_its_role_and_agent_say(
    world: World, method: str, path: str, codes: tuple[int, int, int]
) -> None:
    body: dict[str, str] | None = {} if method == "POST" else None
    for right, code in zip((world.admin, world.client, world.tea), codes, strict=True):
        assert world.ask(method, path, right, body).status_code == code


def test_an_admin_sees_and_erases_a_person_and_a_repeat_says_the_same(world: World) -> None:
    vote = {**VOTE, "rater": "ann/of-4711"}
    assert world.ask("POST", "/v1/feedback", world.client, vote).status_code == 200
    shown = world.ask("GET", "/v1/raters/ann/of-4711", world.admin)
    assert shown.headers["cache-control"] == "no-store"
    assert shown.json()["tables"] == []
    [tea] = shown.json()["agents"]
    assert [one["prompt"] for one in tea["feedback"]] == ['[["user", "hi"]]']
    path = f"/v1/raters/{tea['rater_id']}"  # the hash does as well
    assert world.ask("DELETE", f"{path}?agent=milk", world.admin).status_code == 404
    misspelt = world.ask("DELETE", f"{path}?agent_id=milk", world.admin)
    assert (misspelt.status_code, "query.agent_id: " in misspelt.text) == (422, True)
    done = world.ask("DELETE", path, world.admin)
    assert done.json()["erasures"][0]["counts"]["feedback"] == 1
    assert world.ask("DELETE", path, world.admin).json() == done.json()
    assert world.ask("GET", path, world.admin).json()["agents"] == []
    assert world.ask("POST", "/v1/feedback", world.client, vote).status_code == 200
    for method in ("GET", "DELETE"):  # no agent is called so: it must not look as if all was gone
        assert world.ask(method, f"{path}?agent=", world.admin).status_code == 404
    assert "of-4711" not in world.ask("GET", "/metrics", world.admin).text


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (RegistryError("the folder was moved by hand"), "the folder was moved by hand"),
        (
            sa.exc.OperationalError("SELECT", {"voter": "ann"}, Exception("full")),
            "OperationalError",
        ),
    ],
)
def test_why_a_person_could_not_be_erased_is_in_the_log_without_their_name(
    world: World, monkeypatch: pytest.MonkeyPatch, trouble: Exception, why: str
) -> None:
    """Of what does not pass by itself nobody would hear however often they ask again."""

    def fails(*_: Any, **__: Any) -> dict[str, Any]:
        raise trouble

    monkeypatch.setattr(raters_api, "erase", fails)
    with capture_logs() as logs:
        answer = world.ask("DELETE", "/v1/raters/ann", world.admin)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "the folder" not in answer.text
    [line] = [log for log in logs if log["event"] == "data of a person not reached"]
    assert why in line["why"]
    assert "ann" not in line["why"]


def test_an_agents_key_writes_for_its_agent_alone(world: World) -> None:
    other = {**VOTE, "agent_id": "milk"}
    for body, code in (
        (VOTE, 200),
        ({"events": [VOTE, VOTE]}, 200),
        (other, 403),
        ({"events": [VOTE, other]}, 403),
        ({"events": []}, 403),
        ({"events": [1]}, 403),
        (b'{"agent_id": "tea", "agent_id": "milk"}', 422),
        (b"[" * 100_000, 422),
    ):
        assert world.ask("POST", "/v1/feedback", world.tea, body).status_code == code, body
    asked = {"model": "milk:baseline", "messages": [{"role": "user", "content": "hi"}]}
    assert world.ask("POST", "/v1/chat/completions", world.tea, asked).status_code == 403
    asked["model"] = "tea"
    assert world.ask("POST", "/v1/chat/completions", world.tea, asked).status_code == 404


def test_a_revoked_expired_or_changed_key_opens_nothing(world: World) -> None:
    made, secret = world.keys.create("client")
    assert world.ask("GET", "/v1/models", secret).status_code == 200
    world.keys.revoke(made.key_id)
    late = world.keys.create("client", expires_at=now() - timedelta(seconds=1))[1]
    for wrong in (secret, late, world.admin[:-1], f"{world.admin}x", "rlhf", ""):
        assert world.ask("GET", "/v1/models", wrong).status_code == 401, wrong
    with pytest.raises(ConfigError, match="needed the id of a key"):
        world.keys.revoke("nobody")
    with pytest.raises(ConfigError, match="for every agent"):
        world.keys.create("admin", agent_id="tea")


def test_keys_are_kept_as_hashes_that_only_the_owner_reads(world: World) -> None:
    for path in world.keys.folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0
        text = path.read_bytes().decode("latin-1")
        assert not any(secret in text for secret in (world.admin, world.client, world.tea))
    assert world.keys.folder.stat().st_mode & 0o077 == 0


def test_a_feedback_token_takes_votes_on_its_interaction_and_nothing_else(world: World) -> None:
    asked = {"interaction_id": "i-1"}
    token = world.ask("POST", "/v1/feedback/tokens", world.tea, asked).json()["token"]
    for body, code in (
        (ABOUT, 200),
        ({**ABOUT, "interaction_id": "i-2"}, 403),
        ({**ABOUT, "agent_id": "milk"}, 403),
        ({**ABOUT, "completion": "other"}, 403),
        ({"events": [ABOUT]}, 403),
    ):
        answer = world.ask("POST", "/v1/feedback", None, body, x_feedback_token=token)
        assert answer.status_code == code, body
    for wrong in (f"{token}A", token[1:], "!.?", ".", f"{token.partition('.')[0]}."):
        answer = world.ask("POST", "/v1/feedback", None, ABOUT, x_feedback_token=wrong)
        assert answer.status_code == 401, wrong
    assert world.ask("GET", "/v1/models", None, x_feedback_token=token).status_code == 401
    for unfit, code in (({"interaction_id": "i-9"}, 404), ({"interaction_id": 3}, 422), ({}, 422)):
        answer = world.ask("POST", "/v1/feedback/tokens", world.client, unfit)
        assert answer.status_code == code, unfit
    other, milk = world.keys.create("client", agent_id="milk")
    assert world.ask("POST", "/v1/feedback/tokens", milk, asked).status_code == 404
    made, tea = world.keys.create("client", agent_id="tea")
    token = world.ask("POST", "/v1/feedback/tokens", tea, asked).json()["token"]
    for key, code in ((other, 200), (made, 401)):
        world.keys.revoke(key.key_id)  # a token is worth what the key is that it was made with
        answer = world.ask("POST", "/v1/feedback", None, ABOUT, x_feedback_token=token)
        assert answer.status_code == code


def test_a_feedback_token_votes_as_who_was_answered_and_nobody_else(world: World) -> None:
    """Whatever rater a browser names, what is stored is signed by the interaction's own."""
    database = open_database(f"sqlite:///{world.keys.folder.parent}/feedback.db")
    store, ann = FeedbackStore(database), hash_rater("tea", "ann")
    whose = {"i-ann": ("ann", "s-1"), "i-session": (None, "s-2"), "i-nobody": (None, None)}
    for number, (name, (user, session)) in enumerate(whose.items()):
        said = Interaction(name, "tea", user_prompt(f"hi {number}"), "hello", 0, now(), session)
        store.add_interactions([replace(said, user_id=ann if user else None)])

    def vote(name: str, **more: Any) -> httpx.Response:
        body = {**ABOUT, "interaction_id": name, **more}
        return world.ask("POST", "/v1/feedback", None, body, x_feedback_token=tokens[name])

    asked = {name: {"interaction_id": name} for name in whose}
    tokens = {
        name: world.ask("POST", "/v1/feedback/tokens", world.client, body).json()["token"]
        for name, body in asked.items()
    }
    for other in ("bob", "Ann", "ann ", ann, "i-ann", "s-1", 7, True, ["ann"], {"ann": 1}):
        answer = vote("i-ann", rater=other)
        assert (answer.status_code, "rater" in answer.text) == (403, True), other
    assert "'rater_id'" in vote("i-ann", rater_id=hash_rater("tea", "bob")).json()["error"]
    assert vote("i-ann").status_code == 200
    assert vote("i-ann", rater="ann", value="down").status_code == 200  # a change of mind
    assert vote("i-session", rater="").status_code == 200
    assert vote("i-nobody", rater=None).status_code == 200
    assert vote("i-session", rater="i-session").status_code == 403
    with database.read() as connection:
        query = "SELECT interaction_id, rater_id, number FROM effective_feedback ORDER BY seq"
        rows = [tuple(row) for row in connection.exec_driver_sql(query)]
    database.close()
    assert [row for row in rows if row[0] in whose] == [
        ("i-ann", ann, 0.0),
        ("i-session", hash_rater("tea", "s-2"), 1.0),
        ("i-nobody", hash_rater("tea", "i-nobody"), 1.0),
    ]
    without = sign(world.keys.signing_secret(), "feedback", {"interaction": "i-ann"}, 60)
    answer = world.ask("POST", "/v1/feedback", None, ABOUT, x_feedback_token=without)
    assert answer.status_code == 401


def test_a_browser_that_guesses_the_key_of_anothers_vote_takes_nothing_from_it(
    world: World,
) -> None:
    """Its own keys still do what they are for, sent as a header or in the row."""
    asked = {"interaction_id": "i-1"}
    token = world.ask("POST", "/v1/feedback/tokens", world.tea, asked).json()["token"]
    guessed = {"idempotency_key": "ticket-1"}

    def browser(value: str, row: Any = None, **headers: str) -> httpx.Response:
        body = {**ABOUT, **(row or {}), "value": value}
        return world.ask("POST", "/v1/feedback", None, body, x_feedback_token=token, **headers)

    first = browser("down", **guessed)
    assert first.status_code == 200
    assert browser("down", **guessed).json() == first.json()
    assert browser("down", guessed).json() == first.json()
    used = browser("up", **guessed)
    assert (used.status_code, "token:" in used.text) == (409, False)  # a key that nobody sent
    for unfit in ({"idempotency_key": ""}, {"idempotency_key": "k" * 201}, {"idempotency_key": 7}):
        assert browser("up", unfit).status_code == 422, unfit
    assert browser("up", idempotency_key="k" * 201).status_code == 422
    server = world.ask("POST", "/v1/feedback", world.tea, {**VOTE, **guessed})
    assert server.status_code == 200


@given(st.data())
def test_a_forged_token_says_nothing_else(data: st.DataObject) -> None:
    facts = {"interaction": "i-1", "agent": "tea", "rater": hash_rater("tea", "ann")}
    signed = sign(b"s" * 32, "feedback", facts, 60)
    place = data.draw(st.integers(0, len(signed)))
    cut = data.draw(st.integers(0, 3))
    forged = f"{signed[:place]}{data.draw(st.text(max_size=3))}{signed[place + cut :]}"
    told = unsign(b"s" * 32, "feedback", forged)
    assert told is None or told == unsign(b"s" * 32, "feedback", signed)


def test_what_was_signed_holds_for_its_purpose_and_its_time() -> None:
    signed = sign(b"s" * 32, "feedback", {"key": "k"}, 60)
    told = unsign(b"s" * 32, "feedback", signed)
    assert told is not None
    assert told["key"] == "k"
    assert unsign(b"s" * 32, "session", signed) is None
    assert unsign(b"t" * 32, "feedback", signed) is None
    assert unsign(b"s" * 32, "feedback", sign(b"s" * 32, "feedback", {}, -1)) is None


def test_a_browser_whose_key_does_not_reach_a_page_is_led_to_another_key(world: World) -> None:
    page = world.ask("GET", "/dashboard/tea", world.client, accept="text/html")
    assert page.status_code == 403
    assert "needed an admin&#x27;s key, found a client&#x27;s" in page.text
    assert '<a href="/sign-in?to=%2Fdashboard%2Ftea">' in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    told = world.ask("GET", "/dashboard/tea", world.client)
    assert told.json() == {"error": "needed an admin's key, found a client's"}


def test_a_browser_whose_file_is_too_long_is_told_where_it_goes_in(world: World) -> None:
    sent: Any = ("POST", "/feedback-files/take", world.admin, b"x" * (LONGEST_BODY + 1))
    page = world.ask(*sent, accept="text/html,*/*")
    assert page.status_code == 413
    assert f"at most {LONGEST_BODY} bytes" in page.text
    assert "rlhf ingest" in page.text
    assert '<a href="/feedback-files">' in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert world.ask(*sent).json() == {"error": f"needed a body of at most {LONGEST_BODY} bytes"}


def test_a_browser_at_an_address_without_a_page_is_shown_the_way_to_one(world: World) -> None:
    page = world.ask("GET", "/dashbord", world.admin, accept="text/html,*/*")
    assert page.status_code == 404
    assert '<a href="/ui/">' in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert world.ask("GET", "/dashbord", world.admin).json() == {"error": "Not Found"}


def test_a_browser_signs_in_with_a_key_and_stays_on_its_own_pages(world: World) -> None:
    sent = world.ask("GET", "/ui/", accept="text/html")
    assert (sent.status_code, sent.headers["location"]) == (303, "/sign-in?to=%2Fui%2F")
    one = world.ask("GET", "/candidates/tea?version=2", accept="text/html")
    assert one.headers["location"] == "/sign-in?to=%2Fcandidates%2Ftea%3Fversion%3D2"
    form = {"content_type": "application/x-www-form-urlencoded"}
    refused = _sign_in(world, "<script>", form)
    assert refused.status_code == 401
    assert "default-src 'none'" in refused.headers["content-security-policy"]
    made, secret = world.keys.create("client")
    entered = _sign_in(world, secret, form)
    assert (entered.status_code, entered.headers["location"]) == (303, "/ui/")
    asked_for = _sign_in(world, secret, form, to="/dashboard/tea")
    assert asked_for.headers["location"] == "/dashboard/tea"
    for elsewhere in ("//evil.example", "/\\evil.example", "https://evil.example", "ui", "/a\nb"):
        assert _sign_in(world, secret, form, to=elsewhere).headers["location"] == "/ui/"
    again = _sign_in(world, "wrong", form, to='/ui/"><script>')
    assert "<script>" not in again.text
    assert 'value="/ui/&quot;&gt;&lt;script&gt;"' in again.text  # a mistyped key loses no place
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Secure" not in cookie
    typed = urlencode({"key": secret}).encode()
    over_tls = world.ask("POST", "https://localhost/sign-in", None, typed, **form)
    assert "Secure" in over_tls.headers["set-cookie"]
    assert _sign_in(world, "k" * 4096, form).status_code == 413
    assert secret not in cookie
    kept = f"{COOKIE}={entered.cookies[COOKIE]}"
    # On localhost other applications' cookies come along, some against the rules for cookies.
    for cookies in (kept, f'consent={{"ads":false}}; {kept}', f"a b=[c]; ; d; {kept}; e"):
        assert world.ask("GET", "/v1/models", cookie=cookies).status_code == 200, cookies
    for origin, code, closed in (  # a WebSocket is closed: nothing listens there, or refused
        ("http://localhost", 200, 1000),
        ("http://evil.example", 403, REFUSED_LATER),
        ("http://localhost.evil.example", 403, REFUSED_LATER),
    ):
        answer = world.ask("POST", "/v1/feedback", None, VOTE, cookie=kept, origin=origin)
        assert answer.status_code == code
        assert _socket(world, cookie=kept, origin=origin, host="localhost") == closed
    assert world.ask("POST", "/v1/feedback", None, VOTE, cookie=kept).status_code == 403
    world.keys.revoke(made.key_id)
    assert world.ask("GET", "/v1/models", cookie=kept).status_code == 401


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "Multipart/form-data; b=x"])
def test_a_form_that_is_sent_after_the_session_ended_leads_to_sign_in(
    world: World, kind: str
) -> None:
    """And from there to where it was sent, which leads to the page it is on."""

    def sent(path: str, **headers: str) -> httpx.Response:
        return world.ask("POST", path, **{"accept": "text/html,*/*", **headers})

    for path in ("/raters/erase", "/candidates/tea"):
        shown = sent(path, content_type=kind)
        to = {"to": path}
        assert (shown.status_code, shown.headers["location"]) == (303, f"/sign-in?{urlencode(to)}")
    form = {"content_type": "application/x-www-form-urlencoded"}
    back = _sign_in(world, world.admin, form, to="/raters/erase")
    assert back.headers["location"] == "/raters/erase"
    # Some programs accept HTML too, and must not take a page for an answer.
    as_programs: list[dict[str, str]] = [{"content_type": "application/json"}, {}]
    for headers in (*as_programs, {"content_type": kind, "accept": "*/*"}):
        told = sent("/v1/feedback", **headers)
        assert (told.status_code, "needed an API key" in told.json()["error"]) == (401, True)


def test_a_browser_signs_out_from_our_own_pages_alone(world: World) -> None:
    form = {"content_type": "application/x-www-form-urlencoded"}
    for key in (world.admin, world.client, world.tea):
        kept = f"{COOKIE}={_sign_in(world, key, form).cookies[COOKIE]}"
        page = world.ask("GET", "/sign-out", cookie=kept)
        assert (page.status_code, '<form method="post" action="/sign-out">' in page.text) == (
            200,
            True,
        )
        assert page.headers["referrer-policy"] == "same-origin"  # else its form told no origin
        for origin in ({}, {"origin": "http://evil.example"}):
            refused = world.ask("POST", "/sign-out", cookie=kept, **origin)
            assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
        done = world.ask("POST", "/sign-out", cookie=kept, origin="http://localhost", **form)
        assert (done.status_code, done.headers["location"]) == (303, "/sign-in")
        gone = done.headers["set-cookie"]
        assert gone.startswith(f'{COOKIE}="";')
        assert "Max-Age=0" in gone
    assert "Nobody is signed in" in world.ask("GET", "/sign-out", world.client).text
    ended = world.ask("POST", "/sign-out", accept="text/html", origin="http://localhost")
    assert (ended.status_code, ended.headers["location"]) == (303, "/sign-in")


def _socket(world: World, **headers: str) -> int:
    """Return the code with which a WebSocket below the chat page is closed."""
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "websocket", "path": "/ui/live", "query_string": b"", "headers": named}
    sent: list[Any] = []

    async def opened() -> None:
        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await world.app(scope, receive, send)

    asyncio.run(opened())
    [closed] = sent
    return int(closed["code"])


def _sign_in(world: World, key: str, form: dict[str, str], to: str = "") -> httpx.Response:
    return world.ask("POST", "/sign-in", None, urlencode({"key": key, "to": to}).encode(), **form)


def test_too_many_or_too_long_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"interaction_id": "i-1"}
    token = world.ask("POST", "/v1/feedback/tokens", world.client, asked).json()["token"]
    wrong = {**ABOUT, "agent_id": "milk"}
    answers = [
        world.ask("POST", "/v1/feedback", None, wrong, x_feedback_token=token) for _ in range(40)
    ]
    assert answers[-1].status_code == 429
    assert answers[-1].headers["retry-after"] == "1"
    long = b'{"agent_id": "' + b"x" * (4 << 20) + b'"}'
    assert world.ask("POST", "/v1/feedback", world.admin, long).status_code == 413
    for length in ("-1", "9" * 5000):
        answer = world.ask("GET", "/v1/models", world.admin, content_length=length)
        assert answer.status_code == 413
    packed = gzip.compress(json.dumps(ABOUT).encode())
    answer = world.ask("POST", "/v1/feedback", world.admin, packed, content_encoding="gzip")
    assert (answer.status_code, answer.json()["error"]) == (
        415,
        "needed a body as it is, found content-encoding 'gzip'",
    )


@pytest.mark.parametrize(
    ("method", "path", "right", "headers", "status", "said"),
    [
        ("GET", "/v1/models", None, {}, 401, "needed an API key"),
        ("GET", "/v1/models/milk", "tea", {}, 403, "this key is for agent 'tea' alone"),
        ("POST", "/v1/chat/completions", "tea", {}, 422, "one JSON value"),
        ("POST", "/v1/chat/completions", "tea", {"content_encoding": "gzip"}, 415, "a body as it"),
        ("POST", "/v1/chat/completions", "tea", {"content_length": "9" * 9}, 413, "at most"),
        ("GET", "/v1/chat/completions", "admin", {}, 405, "Method Not Allowed"),
    ],
)
def test_who_speaks_openais_language_is_told_in_it_why_the_door_refuses(
    world: World, method: str, path: str, right: str | None, headers: Any, status: int, said: str
) -> None:
    """Its clients show error.message, and nothing of what has another shape."""
    key = None if right is None else getattr(world, right)
    answer = world.ask(method, path, key, None if method == "GET" else b"{", **headers)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]
    answers = world.app.openapi()["paths"]["/v1/chat/completions"]["post"]["responses"]
    shapes = {one["content"]["application/json"]["schema"]["$ref"] for one in answers.values()}
    assert {shape.rpartition("/")[2] for shape in shapes} == {"ChatCompletion", "ChatRefusal"}


def test_a_body_that_stops_half_way_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "BODY_SECONDS", 0.1)
    token = _token_for(world, "i-half")

    async def half() -> AsyncIterator[bytes]:
        yield b'{"model": "tea", '
        await asyncio.sleep(PATIENCE)

    async def asked(path: str, right: dict[str, str]) -> httpx.Response:
        transport = httpx.ASGITransport(world.app)
        headers = {**right, "content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as user:
            async with asyncio.timeout(PATIENCE / 4):
                return await user.post(path, content=half(), headers=headers)

    keys = [{"authorization": f"Bearer {key}"} for key in (world.admin, world.tea)]
    for path, rights in (
        ("/v1/chat/completions", keys),
        ("/v1/feedback", [*keys, {"x-feedback-token": token}]),
        ("/v1/feedback/tokens", keys),
        ("/api/policies/feedback/tea", keys),
        ("/api/policies/train_policy/tea", keys[:1]),
        ("/sign-in", [{}]),
    ):
        for right in rights:
            answer = asyncio.run(asked(path, right))
            assert (answer.status_code, "whole body" in answer.text) == (408, True), path


def test_a_body_whose_sender_has_gone_is_refused_and_no_error_of_ours(world: World) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/feedback",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"authorization", f"Bearer {world.admin}".encode()),
            (b"content-type", b"application/json"),
        ],
    }
    coming = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(world.app(scope, receive, send))
    assert sent[0]["status"] == 400


def test_the_longest_vote_fits_beside_a_token_and_what_is_longer_does_not(world: World) -> None:
    about = {**ABOUT, "interaction_id": "i-long"}
    token = _token_for(world, "i-long")
    letter = "\N{SPEAKER}"  # twelve bytes of JSON where only ASCII is sent
    longest = {
        **about,
        "kind": "correction",
        "value": letter * LONGEST_TEXT,
        "comment": letter * LONGEST_COMMENT,
        "tags": [letter * (LONGEST_NAME - 1) + chr(65 + n) for n in range(MOST_TAGS)],
        "topic": letter * 200,
        "idempotency_key": letter * LONGEST_KEY,
    }
    longer = json.dumps(about).encode().ljust(3 << 20)
    for body, code in ((longest, 200), (longer, 413)):
        answer = world.ask("POST", "/v1/feedback", None, body, x_feedback_token=token)
        assert answer.status_code == code, answer.text


def test_a_long_body_is_read_beside_the_loop_that_everybody_shares(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = _token_for(world, "i-beside")
    threads: list[int] = []

    def noting(row: RawRow) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return parse(row)

    for module in (access, chat_api, feedback_api):
        monkeypatch.setattr(module, "parse", noting)
    about = {**ABOUT, "interaction_id": "i-beside"}
    # Blanks would not do: the door hands a token's vote on without them.
    better = {**about, "kind": "correction", "value": "x" * feedback_api.READ_AT_ONCE}
    chat = {"model": "tea", "messages": [{"role": "user", "content": "hi"}]}
    for path, body, right, code, times in (
        ("/v1/feedback", better, None, 200, 2),
        ("/v1/feedback", {"events": [VOTE]}, world.tea, 200, 2),
        ("/v1/feedback/tokens", {"interaction_id": "i-beside"}, world.tea, 200, 1),
        ("/v1/chat/completions", chat, world.tea, 404, 2),
    ):
        threads.clear()
        sent = {"x_feedback_token": token} if right is None else {}
        long = json.dumps(body).encode().ljust(2 * feedback_api.READ_AT_ONCE)
        assert world.ask("POST", path, right, long, **sent).status_code == code
        assert len(threads) == times  # by the door, and by the route
        assert threading.get_ident() not in threads  # which runs the loop


def _token_for(world: World, name: str) -> str:
    """Store an answer of `tea`, and return a token to vote on it."""
    database = open_database(f"sqlite:///{world.keys.folder.parent}/feedback.db")
    said = Interaction(name, "tea", user_prompt("hi"), "hello", 0, now())
    FeedbackStore(database).add_interactions([said])
    database.close()
    answer = world.ask("POST", "/v1/feedback/tokens", world.client, {"interaction_id": name})
    return str(answer.json()["token"])


def test_what_failed_inside_is_told_to_admins_alone(tmp_path: Path) -> None:
    away = {"tea": {"url": "http://127.0.0.1:9/v1", "model": "none"}}
    settings = load_settings("tiny", {"state_dir": tmp_path, "serving": {"upstreams": away}})
    keys = Keys(tmp_path)
    admin, client = (keys.create(role)[1] for role in ("admin", "client"))
    world = World(create_app(settings, pages=False), keys, admin, client, "")
    asked = {"model": "tea", "messages": [{"role": "user", "content": "hi"}]}
    answer = world.ask("POST", "/v1/chat/completions", client, asked)
    assert answer.json()["error"]["message"] == SORRY
    asked["messages"] = [{"role": "user", "content": " "}]
    assert world.ask("POST", "/v1/chat/completions", client, asked).status_code == 400
    told = {
        who: {
            event["rule"]: event["detail"]
            for event in world.ask("GET", "/v1/chat/events/tea", key).json()["events"]
        }
        for who, key in (("admin", admin), ("client", client))
    }
    assert "127.0.0.1:9" in told["admin"]["ModelError"]
    assert told["client"] == {**dict.fromkeys(told["admin"], ""), "prompt_empty": EMPTY}
    secret = {"tea": {"url": "http://me:secret@127.0.0.1:9/v1", "model": "none"}}
    with pytest.raises(ConfigError, match="url"):
        load_settings("tiny", {"serving": {"upstreams": secret}})


@pytest.mark.parametrize(("mebibytes", "code"), [(4, 200), (5, 413)])
def test_a_body_of_untold_length_is_no_longer_than_others(
    tmp_path: Path, mebibytes: int, code: int
) -> None:
    """Whichever route reads it, a mounted page's too."""
    page, app = FastAPI(), FastAPI()

    @page.post("/take")
    async def take(request: Request) -> int:
        return len(await request.body())

    app.mount("/ui", page)
    database = open_database(f"sqlite:///{tmp_path / 'feedback.db'}")
    add_access(app, FeedbackStore(database), Keys(tmp_path))

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(16 * mebibytes):
            yield b"x" * (1 << 16)

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as user:
            return await user.post("/ui/take", content=pieces())

    assert asyncio.run(asked()).status_code == code
    database.close()


def test_a_token_for_an_answer_of_a_faster_clock_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as faster:
        ahead = time.time_ns() + 60_000_000_000
        faster.setattr(time, "time_ns", lambda: ahead)
        written, failed = uuid7(), uuid7()
    app, database = FastAPI(), Database(f"sqlite:///{tmp_path / 'feedback.db'}")
    store = FeedbackStore(database)
    add_access(app, store, Keys(tmp_path), longest_answer=1.0)

    async def asked(name: str) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as user:
            sent = await user.post("/v1/feedback/tokens", json={"interaction_id": name})
        return sent.status_code

    async def answered() -> None:
        await asyncio.sleep(0.3)
        said = Interaction(written, "tea", user_prompt("hi"), "hello", 0, now())
        await asyncio.to_thread(store.add_interactions, [said])

    async def both() -> tuple[int, int]:
        of_written, of_failed, _ = await asyncio.gather(asked(written), asked(failed), answered())
        return of_written, of_failed

    assert asyncio.run(both()) == (200, 404)
    database.close()


def test_it_answers_to_its_names_alone_and_to_each_of_them(tmp_path: Path) -> None:
    settings = load_settings("tiny", {"state_dir": tmp_path})
    names = ("chat.example.org", "*.shop.example", "2001:db8::17")
    named = World(create_app(settings, pages=False, names=names), Keys(tmp_path), "", "", "")
    for host, code in (
        ("Chat.example.org:8443", 200),
        ("a.shop.example", 200),
        ("[2001:db8::17]:8080", 200),
        ("[::1]:8080", 200),
        ("shop.example", 400),
        ("[2001:db8::18]", 400),
    ):
        assert named.ask("GET", "/health", host=host).status_code == code, host
    for wrong in (
        "a*b",
        "https://chat.example.org",
        "chat.example.org:8443",
        "chat.example.org/",
        "",
    ):
        with pytest.raises(ConfigError, match="needed a host's name"):
            create_app(settings, pages=False, names=[wrong])


def test_the_service_is_open_until_a_key_is_made_but_only_on_loopback(tmp_path: Path) -> None:
    settings = load_settings("tiny", {"state_dir": tmp_path})
    opened = World(create_app(settings, pages=False), Keys(tmp_path), "", "", "")
    assert opened.ask("GET", "/v1/models").status_code == 200
    assert opened.ask("GET", "/v1/models", host="evil.example").status_code == 400
    forged = opened.ask("POST", "/v1/feedback", None, ABOUT, x_feedback_token="forged")
    assert forged.status_code == 401
    closed = World(
        create_app(settings, pages=False, open_without_keys=False), Keys(tmp_path), "", "", ""
    )
    assert closed.ask("GET", "/v1/models").status_code == 401
    with pytest.raises(ConfigError, match="needed an API key before it listens"):
        run(settings, 1, host="0.0.0.0")
    made, _ = Keys(tmp_path).create("client")
    assert opened.ask("GET", "/v1/models").status_code == 401
    Keys(tmp_path).revoke(made.key_id)  # the last key's end opens nothing
    assert opened.ask("GET", "/v1/models").status_code == 401
