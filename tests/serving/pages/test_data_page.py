"""Whose data is seen and erased in the browser: one's own, by a signed cookie; any, by admins."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rlhf_pipeline import database as db
from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.rules import LONGEST_RATER
from rlhf_pipeline.files import folder_sha256, write_json
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    hash_rater,
    now,
    user_prompt,
)
from rlhf_pipeline.serving.access import COOKIE as SESSION
from rlhf_pipeline.serving.access import add_access, sign
from rlhf_pipeline.serving.keys import Keys
from rlhf_pipeline.serving.pages import review_page
from rlhf_pipeline.serving.pages.data_page import ANYBODY, MINE, add_data_pages
from rlhf_pipeline.serving.pages.visitors import COOKIE, PURPOSE, KnowAgain, Visitors

ORIGIN = {"origin": "http://localhost"}


class Shop:
    """A service with both pages, a key of each role, and what ann and bob said."""

    def __init__(self, state: Path) -> None:
        self.here = Workspace(None, str(state))
        self.keys = Keys(state)
        self.secret = self.keys.signing_secret()
        app = FastAPI()
        app.add_api_route("/ui/", lambda: "chat", methods=["GET"])
        app.add_middleware(KnowAgain, visitors=Visitors(self.secret))
        add_data_pages(
            app, self.here.settings, self.here.registry, self.here.store.agents, self.secret
        )
        add_access(app, self.here.store, self.keys)
        self.app = app

    def said(self, *people: str) -> None:
        """Answer these people once, and take their votes on it."""
        for person in people:
            rater = hash_rater("shop", person)
            said = Interaction(f"i-{person}", "shop", user_prompt("hi"), "hello", 0, now())
            self.here.store.add_interactions([replace(said, user_id=rater)])
            thumb = Feedback("shop", FeedbackKind.thumbs, person, number=1.0, rater_id=rater)
            self.here.store.append([replace(thumb, interaction_id=said.interaction_id)])

    def holds(self, person: str) -> bool:
        return self.here.store.interaction(f"i-{person}") is not None

    def browser(self, person: str | None = None, *, key: str | None = None) -> TestClient:
        """Return a browser with this person's cookie, signed in with a key."""
        client = TestClient(self.app, base_url="http://localhost", headers=ORIGIN)
        if person is not None:
            client.cookies.set(COOKIE, sign(self.secret, PURPOSE, {"person": person}, 60))
        if key is not None:
            found = self.keys.find(key)
            assert found is not None
            client.cookies.set(SESSION, sign(self.secret, "session", {"key": found.key_id}, 60))
        return client


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("data") / "state")
    yield made
    made.here.store.database.close()


def fields(page: str, action: str) -> dict[str, str]:
    """Return what a page's form sends by itself."""
    [form] = re.findall(rf'<form method="post" action="{action}">(.*?)</form>', page, re.DOTALL)
    hidden = re.findall(r'<input type="hidden" name="(\w+)" value="(.*?)">', form)
    return {name: html.unescape(value) for name, value in hidden}


def test_a_person_sees_and_erases_their_own_data_and_nobody_elses(shop: Shop) -> None:
    shop.said("ann", "bob")
    ann = shop.browser("ann")
    shown = ann.get(MINE)
    assert "<td>shop</td><td>1</td><td>1</td>" in shown.text
    assert "form-action 'self'" in shown.headers["content-security-policy"]
    assert shown.headers["referrer-policy"] == "same-origin"
    told = ann.post(f"{MINE}/download", data={"rater": "bob"})  # a field says nothing here
    [held] = told.json()["agents"]
    assert [one["user_id"] for one in held["interactions"]] == [hash_rater("shop", "ann")]
    assert "attachment" in told.headers["content-disposition"]
    word = fields(ann.post(f"{MINE}/erase").text, f"{MINE}/erase")["confirmed"]
    for sent in ({"sure": "yes"}, {"confirmed": word}, {"confirmed": word + "x", "sure": "yes"}):
        assert "cannot be undone" in ann.post(f"{MINE}/erase", data=sent).text
    # Ann's word does not confirm for bob, nor does one that was signed for something else.
    for other in (word, sign(shop.secret, "session", {"rater": "bob"}, 60)):
        shop.browser("bob").post(f"{MINE}/erase", data={"confirmed": other, "sure": "yes"})
    assert shop.holds("ann")
    assert shop.holds("bob")
    done = ann.post(f"{MINE}/erase", data={"confirmed": word, "sure": "yes"})
    assert 'id="erased"' in done.text
    assert "feedback 1, interactions 1" in done.text
    assert not shop.holds("ann")
    assert shop.holds("bob")
    assert "Erased before" in ann.get(MINE).text


def test_nobody_becomes_somebody_else_by_a_cookie_of_their_own(shop: Shop) -> None:
    others = sign(b"x" * 32, PURPOSE, {"person": "bob"}, 60)
    for cookie in ("bob", hash_rater("shop", "bob"), others):
        browser = shop.browser()
        browser.cookies.set(COOKIE, cookie)
        for method, path in (("GET", ""), ("POST", "/download"), ("POST", "/erase")):
            answer = browser.request(method, MINE + path)
            assert answer.status_code == 404
            assert "open the chat first" in answer.text
    fresh = shop.browser("nobody yet").get(MINE)
    assert (fresh.status_code, "Nothing is held about you" in fresh.text) == (404, True)


def test_the_chat_page_makes_a_browser_a_person_and_knows_it_again(shop: Shop) -> None:
    browser, visitors = shop.browser(), Visitors(shop.secret)
    first = browser.get("/ui/").headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} < set(first.split("; "))
    person = visitors.person(browser.cookies)
    assert person is not None
    browser.get("/ui/")
    assert visitors.person(browser.cookies) == person
    assert "set-cookie" not in browser.get(MINE).headers


def test_an_admin_sees_what_learned_from_a_rater_and_erases_them(shop: Shop) -> None:
    shop.said("carol", "dan")
    trained_from(shop, "f" * 64)
    admin = shop.browser()
    page = admin.get(ANYBODY).text
    assert 'name="rater"' in page
    assert review_page._person("Eve") == "annotator:eve"
    assert "annotator: and the name, in small letters" in page
    unknown = admin.post(ANYBODY, data={"rater": "<b>x</b>"})
    assert (unknown.status_code, "<b>x" in unknown.text) == (404, False)
    typed = {"rater": "carol", "agent": "shop"}
    shown = admin.post(ANYBODY, data=typed).text
    assert "version 0 (v0) is of a snapshot with 1 rows of theirs" in shown
    assert fields(shown, f"{ANYBODY}/erase") == typed
    told = admin.post(f"{ANYBODY}/download", data=typed).json()
    assert told["agents"][0]["rater_id"] == hash_rater("shop", "carol")
    word = fields(admin.post(f"{ANYBODY}/erase", data=typed).text, f"{ANYBODY}/erase")
    # The word is for whom it was given.
    admin.post(f"{ANYBODY}/erase", data={**word, "rater": "dan", "sure": "yes"})
    assert shop.holds("dan")
    done = admin.post(f"{ANYBODY}/erase", data={**word, "sure": "yes"}).text
    assert "snapshot ffffffffffffffff: 1 rows" in done
    assert "version 0 (v0) is of a snapshot with 1 rows of theirs" in done
    assert (shop.holds("carol"), shop.holds("dan")) == (False, True)


def test_an_id_that_was_sent_with_blanks_is_found_and_is_not_that_without(shop: Shop) -> None:
    shop.said(" frank ", "frank")
    admin, typed = shop.browser(), {"rater": " frank "}
    assert fields(admin.post(ANYBODY, data=typed).text, f"{ANYBODY}/download") == typed
    word = fields(admin.post(f"{ANYBODY}/erase", data=typed).text, f"{ANYBODY}/erase")
    assert "It is erased" in admin.post(f"{ANYBODY}/erase", data={**word, "sure": "yes"}).text
    assert (shop.holds(" frank "), shop.holds("frank")) == (False, True)
    unknown = admin.post(ANYBODY, data={"rater": "frank "}).text
    assert "give the id as it was sent, with any blanks around it" in unknown


@pytest.mark.parametrize("letter", ["\N{CJK UNIFIED IDEOGRAPH-738B}", "\N{SPEAKER}"])
def test_the_longest_name_there_may_be_is_erased(shop: Shop, letter: str) -> None:
    name = letter * LONGEST_RATER
    rater = hash_rater("shop", name)
    thumb = Feedback("shop", FeedbackKind.thumbs, f"{letter} long", number=1.0, rater_id=rater)
    shop.here.store.append([replace(thumb, prompt=user_prompt("hi"), completion="hello")])
    admin, typed = shop.browser(), {"rater": name, "agent": "shop"}
    [room] = re.findall(r'name="rater" required maxlength="(\d+)"', admin.get(ANYBODY).text)
    assert int(room) >= len(name.encode("utf-16-le")) // 2  # which a browser counts
    sent = fields(admin.post(ANYBODY, data=typed).text, f"{ANYBODY}/erase")
    word = fields(admin.post(f"{ANYBODY}/erase", data=sent).text, f"{ANYBODY}/erase")
    done = admin.post(f"{ANYBODY}/erase", data={**word, "sure": "yes"})
    assert "It is erased" in done.text


def trained_from(shop: Shop, fingerprint: str) -> None:
    """Register a version that a snapshot of everything so far was trained into."""
    folder = shop.here.settings.agent_folder("shop") / "v0"
    write_json(folder / "config.json", {})
    shop.here.ledger.add_baseline(
        "shop",
        label="v0",
        path=folder,
        files=folder_sha256(folder),
        lineage={},
        actor="test",
        fingerprint=fingerprint,
    )
    with shop.here.store.database.write() as connection:
        connection.execute(
            db.snapshots.insert().values(
                snapshot_id="s",
                agent_id="shop",
                fingerprint=fingerprint,
                watermark=1_000,
                rows=4,
                path="snapshots/ffffffffffffffff",
                sha256="",
                created_at=now(),
            )
        )


def test_an_erasure_waits_while_the_agent_is_trained(shop: Shop) -> None:
    shop.said("eve")
    book = ClaimBook(shop.here.store.database)
    claim = book.claim("shop", "e" * 64, 0, holder="run", asked_by="test")
    eve = shop.browser("eve")
    word = fields(eve.post(f"{MINE}/erase").text, f"{MINE}/erase")
    refused = eve.post(f"{MINE}/erase", data={**word, "sure": "yes"})
    book.let_go(claim.token)
    assert (refused.status_code, refused.headers["retry-after"]) == (409, "60")
    assert shop.holds("eve")


def test_who_opens_the_address_that_a_form_was_sent_to_is_shown_its_page(shop: Shop) -> None:
    shop.said("gil")
    for page in (MINE, ANYBODY):
        for below in ("/erase", "/download"):
            opened = shop.browser("gil").get(page + below)
            assert (opened.status_code, opened.url.path) == (200, page)


def test_only_an_admins_key_opens_anybodys_data_and_only_from_our_own_page(shop: Shop) -> None:
    shop.said("fay")
    keys = [shop.keys.create("admin"), shop.keys.create("client")]
    keys.append(shop.keys.create("client", agent_id="shop"))
    for (_, key), mine, anybody in zip(keys, (200, 200, 200), (200, 403, 403), strict=True):
        browser = shop.browser("fay", key=key)
        assert browser.get(MINE).status_code == mine
        assert browser.get(ANYBODY).status_code == anybody
        assert browser.post(f"{ANYBODY}/erase", data={"rater": "fay"}).status_code == anybody
    assert shop.browser("fay").get(MINE).status_code == 401
    browser = shop.browser("fay", key=keys[1][1])
    foreign = {"origin": "http://evil.example"}
    assert browser.post(f"{MINE}/erase", headers=foreign).status_code == 403
    for made, _ in keys:
        shop.keys.revoke(made.key_id)


def test_with_one_agents_key_a_person_reaches_what_that_agent_holds(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "state")
    shop.said("ann")
    _, tea = shop.keys.create("client", agent_id="tea")
    _, own = shop.keys.create("client", agent_id="shop")
    other = shop.browser("ann", key=tea)
    assert "Nothing is held about you." in other.get(MINE).text
    assert shop.browser("ann", key=own).get("/", follow_redirects=False).status_code == 404
    assert "<td>shop</td>" in shop.browser("ann", key=own).get(MINE).text
    assert "in agent shop" in shop.browser("ann", key=own).post(f"{MINE}/erase").text
    assert shop.browser("ann", key=own).get(ANYBODY).status_code == 403
    shop.here.store.database.close()
