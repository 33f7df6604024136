"""The pages in a real browser: what people click lands in the store, and nothing they write runs.

Run with `make test-ui`. The screenshots of the README are written when PAGES_SCREENSHOTS names a
folder; PAGES_EPOCHS=8 teaches the model first, so that they can be read.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlhf_pipeline.database import Database
from tests.serving.pages.world import free_port, made_desk, served

pytestmark = pytest.mark.ui

HOSTILE = "hi <img src=x onerror=\"document.title='owned'\"> ![x](http://evil.example/x.png)"
PATIENCE = 30_000  # milliseconds a busy machine may take

Votes = Callable[[], list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    state = tmp_path_factory.mktemp("ui") / "state"
    desk = made_desk(state, epochs=int(os.environ.get("PAGES_EPOCHS", "0")))
    shop = desk.registry.ledger.version("shop", 0)
    desk.store.ensure_agent("tea")
    desk.registry.ledger.add_baseline(
        "tea", label="v0", path=shop.path, files=shop.files, lineage={}, actor="test"
    )
    desk.store.database.close()
    port = free_port()
    with served(["rlhf_pipeline.cli", "--state", str(state), "serve", "--port", str(port)], port):
        yield f"http://127.0.0.1:{port}", state


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="`make test-ui` installs it")
    with playwright.sync_playwright() as running:
        path = shutil.which("chromium")
        options = {"executable_path": path} if path else {}
        chromium = running.chromium.launch(args=["--no-sandbox"], **options)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, service: tuple[str, Path]) -> Iterator[Any]:
    """A fresh visitor; afterwards: nothing came from elsewhere, and no policy was broken."""
    context = browser.new_context(viewport={"width": 1000, "height": 860})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(f"Security: {error}"))
    yield page
    context.close()
    local = (service[0], "data:", "blob:")
    assert [url for url in asked if not url.startswith(local)] == []
    assert [text for text in said if "Security" in text] == []


@pytest.fixture
def votes(service: tuple[str, Path]) -> Iterator[Votes]:
    """Return what was stored since the test began."""
    database = Database(f"sqlite:///{service[1]}/feedback.db")
    query = "SELECT kind, number, text, choice, shown_first, tags, origin, criteria FROM feedback "

    def read(after: int = 0) -> list[tuple[Any, ...]]:
        with database.read() as connection:
            rows = connection.exec_driver_sql(f"{query} WHERE seq > {after} ORDER BY seq").all()
        return [tuple(row) for row in rows]

    with database.read() as connection:  # not how many there are: some were erased
        before = connection.exec_driver_sql("SELECT max(seq) FROM feedback").scalar() or 0
    yield lambda: read(before)
    database.close()


def ask(page: Any, base: str, text: str) -> None:
    page.goto(base)
    page.fill("#question textarea", text)
    page.click("#send")


def ask_again(page: Any, text: str) -> None:
    """Ask within the open page, and wait for the answer."""
    page.fill("#question textarea", text)
    page.click("#send")
    eventually(lambda: text in page.inner_text("#talk") and page.is_visible("#up"))


def eventually(found: Callable[[], Any]) -> None:
    """Wait until something is so; the pages' policy forbids the browser to evaluate a condition."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not found():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.1)


def counted(page: Any, votes: Votes, wanted: int) -> None:
    """Wait until the vote is stored and the person is thanked."""
    eventually(lambda: len(votes()) == wanted)
    eventually(lambda: page.input_value("#notice textarea").startswith("Thank you"))


def picture(page: Any, name: str) -> None:
    if folder := os.environ.get("PAGES_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def slowed(page: Any, milliseconds: int) -> None:
    """Have every answer come so much later."""
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send(
        "Network.emulateNetworkConditions",
        {
            "offline": False,
            "latency": milliseconds,
            "downloadThroughput": -1,
            "uploadThroughput": -1,
        },
    )


def open_more(page: Any) -> None:
    if not page.is_visible("#stars"):
        page.click("text=Say more about this answer")
    page.wait_for_selector("#stars")


def test_every_kind_of_vote_is_stored(page: Any, service: tuple[str, Path], votes: Votes) -> None:
    ask(page, service[0], "how much is the lamp?")
    page.wait_for_selector("#up")
    page.click("text=What should it learn?")
    page.check("#wants input >> nth=0")
    page.click("#up")
    counted(page, votes, 1)
    open_more(page)
    page.click("#stars label >> nth=3")
    counted(page, votes, 2)
    page.fill("#better textarea", "It is 9 euros.")
    page.click("#send-better")
    counted(page, votes, 3)
    page.click("#send-criteria")
    counted(page, votes, 4)
    page.fill("#comment textarea", "not sure")
    page.click("#send-comment")
    counted(page, votes, 5)
    eventually(lambda: page.input_value("#comment textarea") == "")
    page.evaluate("window.scrollTo(0, 0)")
    picture(page, "chat")
    stored = votes()
    assert [row[:3] for row in stored] == [
        ("thumbs", 1.0, None),
        ("rating", 4.0, None),
        ("correction", None, "It is 9 euros."),
        ("criteria", None, None),
        ("comment", None, "not sure"),
    ]
    assert {row[5] for row in stored} == {'["wants:shorter"]'}
    assert {row[6] for row in stored} == {"chat"}


def test_the_last_of_quick_stars_is_stored(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    ask(page, service[0], "how much is the lamp?")
    page.wait_for_selector("#up")
    open_more(page)
    slowed(page, 300)
    for star in (2, 4):  # the second while the first is under way
        page.locator("#stars input[type=radio]").nth(star).click()
    eventually(lambda: votes() and votes()[-1][:2] == ("rating", 5.0))
    slowed(page, 0)


def test_two_answers_are_compared(page: Any, service: tuple[str, Path], votes: Votes) -> None:
    page.goto(service[0])
    page.check("#pair-mode input")
    page.fill("#question textarea", "where is the kettle?")
    page.click("#send")
    page.wait_for_selector("#choose-left")
    right = page.input_value("#right textarea")
    picture(page, "chat-pair")
    page.click("#choose-right")
    counted(page, votes, 1)
    (stored,) = votes()
    assert (stored[0], stored[3]) == ("preference", "right")
    assert stored[4] in ("this", "other")
    eventually(lambda: right.split()[0][:4] in page.inner_text("#talk"))
    page.click("#up")  # about the answer that was chosen
    counted(page, votes, 2)
    database = Database(f"sqlite:///{service[1]}/feedback.db")
    with database.read() as connection:
        about = (
            "SELECT i.completion FROM feedback f JOIN interactions i USING (interaction_id) "
            "ORDER BY f.seq DESC LIMIT 1"
        )
        said = connection.exec_driver_sql(about).scalar_one()
        # An untaught model says carriage returns too, and a text area has every line end as \n.
        assert said.replace("\r\n", "\n").replace("\r", "\n") == right
    database.close()


def test_who_reviews_takes_a_file_in_and_writes_one_out(
    page: Any, service: tuple[str, Path], votes: Votes, tmp_path: Path
) -> None:
    page.goto(f"{service[0]}/ui/review/")
    link = page.locator("a", has_text="Feedback from files")
    page.goto(link.evaluate("link => link.href"))  # it would open beside the queue
    path = tmp_path / "votes.jsonl"
    row = {"kind": "rating", "value": 2, "prompt": "why?", "completion": "=because()"}
    path.write_text(json.dumps(row))
    page.set_input_files("#file", path)
    page.fill("#agent", "shop")
    page.click("#take")
    page.wait_for_selector("#taken")
    assert [vote[:2] for vote in votes()] == [("rating", 2.0)]
    page.select_option("#kind", "csv")
    with page.expect_download() as waiting:
        page.click("#give")
    assert "'=because()" in Path(waiting.value.path()).read_text()


def interactions(state: Path) -> int:
    database = Database(f"sqlite:///{state}/feedback.db")
    with database.read() as connection:
        found = connection.exec_driver_sql("SELECT count(*) FROM interactions").scalar_one()
    database.close()
    return int(found)


def chatted(page: Any, base: str, votes: Votes) -> None:
    ask(page, base, "how much is the lamp?")
    page.wait_for_selector("#up")
    page.click("#up")
    counted(page, votes, 1)


def test_a_person_sees_downloads_and_erases_what_is_held_about_them(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    before = interactions(service[1])
    chatted(page, service[0], votes)
    page.goto(page.locator("#your-data a >> nth=0").evaluate("link => link.href"))
    assert page.locator("td").all_inner_texts()[:3] == ["shop", "1", "1"]
    picture(page, "your-data")
    with page.expect_download() as waiting:
        page.click("text=Download all of it")
    told = json.loads(Path(waiting.value.path()).read_text())
    [shop] = told["agents"]
    assert "how much is the lamp?" in json.dumps(shop["interactions"])
    page.click("#erase")
    page.click("#erase-for-good")  # the browser keeps the form until it is meant
    assert page.locator("#erased").count() == 0
    assert len(votes()) == 1
    page.check("#sure")
    picture(page, "your-data-confirm")
    page.click("#erase-for-good")
    page.wait_for_selector("#erased")
    assert votes() == []
    assert interactions(service[1]) == before
    page.goto(f"{service[0]}/your-data")
    assert "Erased before" in page.inner_text("body")


def test_who_runs_it_erases_a_rater(page: Any, service: tuple[str, Path], votes: Votes) -> None:
    chatted(page, service[0], votes)
    database = Database(f"sqlite:///{service[1]}/feedback.db")
    with database.read() as connection:
        last = "SELECT voter FROM feedback ORDER BY seq DESC LIMIT 1"
        rater = connection.exec_driver_sql(last).scalar_one()
    database.close()
    page.goto(f"{service[0]}/dashboard/shop")
    page.click("nav >> text=Raters")
    page.fill("#rater", "nobody <b>here</b>")
    page.click("#look")
    assert "found none" in page.inner_text("#refused")
    page.fill("#rater", rater)
    page.click("#look")
    assert page.locator("td").all_inner_texts()[:3] == ["shop", "1", "1"]
    picture(page, "raters")
    page.click("#erase")
    page.check("#sure")
    page.click("#erase-for-good")
    page.wait_for_selector("#erased")
    assert "agent shop" in page.inner_text("li")
    picture(page, "raters-erased")
    assert votes() == []


def test_nothing_that_is_written_runs(page: Any, service: tuple[str, Path]) -> None:
    ask(page, service[0], HOSTILE)
    page.wait_for_selector("#up")
    shown = page.inner_text("#talk")
    assert "<img src=x" in shown
    assert "![x](http://evil.example/x.png)" in shown
    assert page.title() != "owned"


def test_a_new_conversation_forgets_the_old_one(page: Any, service: tuple[str, Path]) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    page.click("#renew")
    page.wait_for_selector("#up", state="hidden")
    assert "hello there" not in page.inner_text("#talk")


def test_what_is_typed_while_a_message_is_under_way_stays(
    page: Any, service: tuple[str, Path]
) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    slowed(page, 2000)
    page.fill("#question textarea", "and then?")
    page.press("#question textarea", "Enter")
    page.wait_for_timeout(1000)  # nothing has been answered yet
    assert page.input_value("#question textarea") == ""
    page.type("#question textarea", "half of the next")
    eventually(lambda: "and then?" in page.inner_text("#talk") and page.is_visible("#up"))
    assert page.input_value("#question textarea") == "half of the next"


def test_what_was_not_answered_comes_back_before_what_was_typed_since(
    page: Any, service: tuple[str, Path]
) -> None:
    def unknown(route: Any) -> None:
        asked = json.loads(route.request.post_data)
        asked["data"][2] = "nobody"  # the assistant
        route.continue_(post_data=json.dumps(asked))

    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    page.route("**/queue/join*", unknown)
    slowed(page, 2000)
    for typed, left in (("half of\nthe next", "and then?\nhalf of\nthe next"), ("", "and then?")):
        page.fill("#question textarea", "and then?")  # the same twice
        page.click("#send")
        eventually(lambda: page.input_value("#question textarea") == "")
        page.fill("#question textarea", typed)
        eventually(lambda: page.input_value("#question textarea") == left)  # noqa: B023 - at once
    assert "hello there" in page.inner_text("#talk")
    slowed(page, 0)
    page.unroute("**/queue/join*")
    page.click("#send")
    eventually(lambda: "and then?" in page.inner_text("#talk") and page.is_visible("#up"))
    assert page.input_value("#question textarea") == ""


def test_a_message_that_cannot_be_sent_comes_back(page: Any, service: tuple[str, Path]) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    eventually(lambda: page.input_value("#question textarea") == "")
    page.route("**/queue/join*", lambda route: route.abort())
    page.fill("#question textarea", "and then?")
    page.click("#send")
    page.wait_for_timeout(1000)
    assert page.input_value("#question textarea") == "and then?"


def loaded_again(page: Any) -> Callable[[], int]:
    """Return what tells how often the page has been loaded since."""
    loads: list[Any] = []
    page.on("framenavigated", lambda frame: loads.append(frame.url))
    return lambda: len(loads)


def said_in_passing(page: Any, words: str) -> None:
    """Wait for a note that lies over the page, and take it away."""
    page.locator(".toast-body", has_text=words).first.wait_for()
    page.locator(".toast-body button").first.click()


def test_who_chats_while_the_network_is_away_is_told_and_loses_nothing(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    open_more(page)
    page.fill("#better textarea", "It is 9 euros.")
    page.fill("#question textarea", "and then?")
    loads = loaded_again(page)
    for button in ("#up", "#send"):
        page.context.set_offline(True)
        page.click(button)
        said_in_passing(page, "Not sent: the service cannot be reached")
        page.context.set_offline(False)
    page.wait_for_timeout(2500)  # in which Gradio would have loaded it again
    assert loads() == 0
    assert "hello there" in page.inner_text("#talk")
    assert page.input_value("#question textarea") == "and then?"
    assert votes() == []
    page.click("#send-better")
    counted(page, votes, 1)
    assert votes()[0][2] == "It is 9 euros."
    page.click("#send")
    eventually(lambda: "and then?" in page.inner_text("#talk"))


def of_a_proxy(route: Any) -> None:
    """Answer as one does that stands in front of a service which is away."""
    route.fulfill(status=503, content_type="text/html", body="<html>503</html>")


def test_who_votes_while_a_proxy_finds_no_service_is_told_and_loses_nothing(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    loads = loaded_again(page)
    page.route("**/queue/join*", of_a_proxy)
    page.click("#up")
    said_in_passing(page, "Not sent: the service cannot be reached")
    page.unroute("**/queue/join*")
    page.click("#up")
    counted(page, votes, 1)
    assert loads() == 0


def test_what_a_page_is_refused_is_shown_in_the_words_of_who_refuses(
    page: Any, service: tuple[str, Path]
) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    stale = {"detail": "load the page again"}
    page.route("**/queue/join*", lambda route: route.fulfill(status=404, json=stale))
    page.click("#up")
    said_in_passing(page, "load the page again")


@pytest.mark.parametrize("away", [lambda route: route.abort(), of_a_proxy])
def test_who_waits_for_an_answer_is_told_that_the_connection_broke_off(
    away: Callable[[Any], None], page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    eventually(lambda: page.input_value("#seen textarea") not in ("", "…"))
    loads = loaded_again(page)
    page.route("**/queue/data*", away)
    page.fill("#question textarea", "and then?")
    page.click("#send")
    said_in_passing(page, "Not finished: the connection to the service broke off")
    page.unroute("**/queue/data*")
    page.wait_for_timeout(2500)
    assert loads() == 0
    ask_again(page, "once more?")
    page.click("#up")
    counted(page, votes, 1)


def test_a_conversation_stays_where_the_list_of_assistants_is_passed(
    page: Any, service: tuple[str, Path]
) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    page.focus("#agent input")
    page.keyboard.press("Tab")
    page.click("#agent input")
    page.click("#question textarea")
    assert page.locator("#agent [role=option]:visible").count() == 0
    ask_again(page, "and then?")
    assert "hello there" in page.inner_text("#talk")
    page.click("#agent input")
    page.click("#agent [role=option] >> text=tea")
    page.wait_for_selector("#up", state="hidden")
    eventually(lambda: page.inner_text("#talk").strip() == "")


def test_the_bin_forgets_what_was_said(page: Any, service: tuple[str, Path], votes: Votes) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    page.click("#talk [aria-label=Clear]")
    page.wait_for_selector("#up", state="hidden")
    ask_again(page, "and then?")
    page.click("#up")
    counted(page, votes, 1)
    database = Database(f"sqlite:///{service[1]}/feedback.db")
    with database.read() as connection:
        last = "SELECT prompt FROM interactions ORDER BY created_at DESC LIMIT 1"
        prompt = connection.exec_driver_sql(last).scalar_one()
    database.close()
    assert "and then?" in prompt
    assert "hello there" not in prompt


def test_every_control_has_a_name_and_code_keeps_its_shape(
    page: Any, service: tuple[str, Path]
) -> None:
    for path, named in (("/ui/", "Your message"), ("/ui/review/", "Agreement")):
        page.goto(service[0] + path)
        page.wait_for_selector("#notice textarea, #notice input")
        session = page.context.new_cdp_session(page)
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        controls = {"button", "checkbox", "combobox", "link", "radio", "slider", "textbox"}
        names = [n["name"]["value"] for n in nodes if n.get("role", {}).get("value") in controls]
        assert named in names
        assert not {"", "Textbox"} & set(names)
    ask(page, service[0], "def f():\n    pass")
    page.wait_for_selector("#up")
    assert "    pass" in page.inner_text("#talk .md >> nth=0")


CONTRASTS = """colours => colours.map(pair => {
  const [a, b] = pair.map(colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(part => {
      const c = part / 255;
      return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  });
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_main_button_and_what_a_box_asks_for_are_legible(
    page: Any, service: tuple[str, Path], scheme: str
) -> None:
    """4.5 to 1 is what WCAG 2.2 wants of text (1.4.3)."""
    page.emulate_media(color_scheme=scheme)
    page.goto(service[0])
    page.wait_for_selector("#question textarea")
    button = page.locator("#send").evaluate(
        "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
    )
    box = page.locator("#question textarea").evaluate(
        "e => [getComputedStyle(e, '::placeholder').color, getComputedStyle(e).backgroundColor]"
    )
    assert min(page.evaluate(CONTRASTS, [button, box])) >= 4.5


def test_what_the_page_says_is_read_out(page: Any, service: tuple[str, Path]) -> None:
    """By a screen reader, of which nothing leads into a box that nobody can write in."""
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    page.click("#up")
    eventually(lambda: page.inner_text("#spoken[role=status]").startswith("Thank you"))
    page.goto(f"{service[0]}/ui/review/")
    page.click("#start")
    eventually(lambda: page.inner_text("#spoken[role=status]").startswith("A name is needed"))
    assert page.locator("#spoken[role=status]").bounding_box()["height"] <= 1


def test_who_uses_the_keyboard_sees_which_slider_it_moves(
    page: Any, service: tuple[str, Path]
) -> None:
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    open_more(page)
    page.focus("#relevance input[type=number]")
    page.keyboard.press("Tab")  # to what resets it
    page.keyboard.press("Tab")
    around = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(f"[document.activeElement.type, {around}]") == ["range", "auto"]
    page.keyboard.press("Tab")  # to the next one's number; a radio is seen as well
    assert page.evaluate(f"[document.activeElement.type, {around}]") == ["number", "auto"]
    page.focus("#stars input >> nth=0")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(f"[document.activeElement.type, {around}]") == ["radio", "auto"]


def test_it_fits_a_phone(page: Any, service: tuple[str, Path]) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    ask(page, service[0], "hello there")
    page.wait_for_selector("#up")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("#send").bounding_box()["height"] >= 30


def test_a_long_notice_is_whole_on_a_phone(page: Any, service: tuple[str, Path]) -> None:
    page.set_viewport_size({"width": 375, "height": 740})
    page.goto(service[0])
    notice = page.locator("#notice textarea")
    words = "The answer ends here because it has reached its greatest length. Was it good? " * 3
    notice.evaluate(
        "(e, words) => { e.value = words; e.dispatchEvent(new Event('input')); }", words
    )
    eventually(lambda: notice.evaluate("e => e.scrollHeight - e.clientHeight") <= 1)


def test_a_long_name_fits_a_phone(page: Any, service: tuple[str, Path]) -> None:
    rater = "x" * 200
    vote = {"agent_id": "shop", "kind": "thumbs", "value": "up", "prompt": "hi", "completion": "a"}
    answer = httpx.post(f"{service[0]}/v1/feedback", json={**vote, "rater": rater})
    assert answer.status_code == 200
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{service[0]}/raters")
    page.fill("#rater", rater)
    page.click("#look")
    for then in ("#erase", "#sure"):
        page.wait_for_selector(then)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.click(then)


def review(page: Any, service: tuple[str, Path], who: str) -> None:
    """Ask three questions, and have an annotator look at the answers."""
    for question in ("one?", "two?", "three?"):
        ask(page, service[0], question)
        page.wait_for_selector("#up")
    page.goto(f"{service[0]}/ui/review/")
    page.fill("#who input, #who textarea", who)
    page.click("#start")
    eventually(lambda: page.input_value("#completion textarea"))
    read(page)


def read(page: Any) -> None:
    """Take the time to read an answer; the page drops what comes sooner."""
    page.wait_for_timeout(1000)


def next_shown(page: Any, shown: str) -> None:
    """Wait until another answer is on the screen than the one whose id is given."""
    eventually(lambda: page.input_value("#seen textarea") not in (shown, ""))


def test_annotators_review_by_keyboard(page: Any, service: tuple[str, Path], votes: Votes) -> None:
    review(page, service, "Ann")
    picture(page, "review")
    page.locator("body").click(position={"x": 5, "y": 5})
    for key, expected in (("g", ("thumbs", 1.0)), ("4", ("rating", 4.0)), ("b", ("thumbs", 0.0))):
        shown = page.input_value("#completion textarea")
        page.keyboard.press(key)
        eventually(lambda: votes() and votes()[-1][:2] == expected)  # noqa: B023 - called at once
        eventually(lambda: page.input_value("#completion textarea") != shown)  # noqa: B023
        read(page)
        assert votes()[-1][6] == "review"
    assert "greement" in page.input_value("#agreement textarea, #agreement input")


def test_a_key_that_is_held_down_votes_once(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    review(page, service, "Bea")
    page.locator("body").click(position={"x": 5, "y": 5})
    for _ in range(40):
        page.keyboard.down("g")
        page.wait_for_timeout(50)
    page.keyboard.up("g")
    page.focus("#good")
    for _ in range(40):
        page.keyboard.down("Enter")
        page.wait_for_timeout(50)
    page.keyboard.up("Enter")
    read(page)
    page.keyboard.press("b")
    eventually(lambda: votes() and votes()[-1][:2] == ("thumbs", 0.0))
    assert [vote[:2] for vote in votes()] == [("thumbs", 1.0), ("thumbs", 1.0), ("thumbs", 0.0)]


def test_an_answer_that_nobody_can_have_read_yet_is_not_judged(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    review(page, service, "Dan")
    page.locator("body").click(position={"x": 5, "y": 5})

    def press(key: str | None) -> None:
        if key:
            page.keyboard.press(key)
        else:
            page.click("#good")

    for stored, key in enumerate((None, "g"), 1):
        first = page.input_value("#seen textarea")
        press(key)
        next_shown(page, first)
        second = page.input_value("#seen textarea")
        press(key)
        read(page)
        assert (len(votes()), page.input_value("#seen textarea")) == (stored, second)
        assert "Not stored" not in page.input_value("#notice textarea, #notice input")
    page.click("#bad")
    eventually(lambda: votes()[-1][:2] == ("thumbs", 0.0))


def test_a_better_answer_that_is_not_sent_yet_is_not_lost(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    review(page, service, "Eli")
    shown = page.input_value("#seen textarea")
    page.fill("#better textarea", "It is 9 euros.")
    for button in ("#good", "#bad", "#star-3", "#skip", "#start"):
        page.fill("#who input, #who textarea", "")  # of which something else is said meanwhile
        page.click("#send-better")
        eventually(lambda: "A name is needed" in page.input_value("#notice textarea"))
        page.fill("#who input, #who textarea", "Eli")
        page.click(button)
        eventually(lambda: page.input_value("#notice textarea").startswith("Send the better"))
        kept = page.input_value("#seen textarea"), page.input_value("#better textarea")
        assert kept == (shown, "It is 9 euros.")
    assert votes() == []
    page.click("#send-better")
    next_shown(page, shown)
    eventually(lambda: page.input_value("#better textarea") == "")
    assert [vote[:3] for vote in votes()] == [("correction", None, "It is 9 euros.")]


def test_who_reviews_while_the_network_is_away_is_told_and_loses_nothing(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    review(page, service, "Fay")
    shown = page.input_value("#seen textarea")
    page.fill("#better textarea", "It is 9 euros.")
    loads = loaded_again(page)
    page.context.set_offline(True)
    page.click("#send-better")
    said_in_passing(page, "Not sent: the service cannot be reached")
    page.context.set_offline(False)
    page.wait_for_timeout(2500)
    kept = page.input_value("#seen textarea"), page.input_value("#better textarea")
    assert (loads(), *kept) == (0, shown, "It is 9 euros.")
    page.click("#send-better")
    next_shown(page, shown)
    assert [vote[:3] for vote in votes()] == [("correction", None, "It is 9 euros.")]


@pytest.mark.parametrize("width", [1000, 390])
def test_the_question_that_was_answered_is_seen_below_a_long_conversation(
    page: Any, service: tuple[str, Path], width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 860})
    ask(page, service[0], "line\n" * 12 + "first?")
    page.wait_for_selector("#up")
    ask_again(page, "line\n" * 12 + f"second at {width}?")
    review(page, service, f"Fay {width}")
    while f"second at {width}?" not in page.input_value("#prompt textarea"):
        shown = page.input_value("#seen textarea")
        page.click("#skip")
        next_shown(page, shown)
        read(page)
    box = page.locator("#prompt textarea")
    hidden, below = box.evaluate(
        "e => [e.scrollTop, e.scrollHeight - e.clientHeight - e.scrollTop]"
    )
    assert hidden > 50  # of the conversation's beginning
    assert below < 2


def test_a_key_that_is_pressed_before_the_next_answer_is_shown_judges_nothing(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    review(page, service, "Cid")
    page.locator("body").click(position={"x": 5, "y": 5})
    first = page.input_value("#completion textarea")
    slowed(page, 2000)
    page.keyboard.press("g")
    eventually(votes)  # it is stored, and what was judged is still to be read
    assert page.input_value("#completion textarea") == first
    page.keyboard.press("b")
    slowed(page, 0)
    eventually(lambda: "Not stored" in page.input_value("#notice textarea, #notice input"))
    assert [vote[:2] for vote in votes()] == [("thumbs", 1.0)]
    assert page.input_value("#completion textarea") != first


def test_the_dashboard_shows_where_an_agent_stands(
    page: Any, service: tuple[str, Path], votes: Votes
) -> None:
    ask(page, service[0], "how much is the lamp?")
    page.wait_for_selector("#up")
    page.click("#up")
    counted(page, votes, 1)
    page.goto(f"{service[0]}/dashboard")
    assert page.url == f"{service[0]}/dashboard/shop"
    assert page.inner_text("nav b") == "shop"
    assert page.inner_text("body").count("how much is the lamp?") == 0
    widths = "Array.from(document.images).map(image => image.naturalWidth)"
    assert min(page.evaluate(widths)) > 0  # the votes' picture at least, which the policy lets in
    assert page.evaluate("getComputedStyle(document.body).maxWidth") != "none"  # and the style
    picture(page, "dashboard")
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
