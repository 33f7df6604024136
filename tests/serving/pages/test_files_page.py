"""Feedback from a file and into one on a page: what is written out is taken in again."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.serving.access import add_access
from rlhf_pipeline.serving.keys import Keys
from rlhf_pipeline.serving.pages.files_page import KINDS, PATH, add_files_page

VOTES = b"""\
{"kind": "rating", "value": 4, "prompt": "Why?", "completion": "=Because()", "rater": "ann"}
{"kind": "correction", "value": "So.", "prompt": "Why?", "completion": "=Because()"}
{"kind": "rating", "value": 9, "prompt": "Why?", "completion": "=Because()"}
"""


class Office:
    """The page behind its door, and an admin who looks at it."""

    def __init__(self, state: Path) -> None:
        self.here = Workspace(None, str(state))
        keys, store = Keys(state), self.here.store
        app = FastAPI()
        add_files_page(app, self.here.settings, store, store.agents, keys.signing_secret())
        add_access(app, store, keys)
        (_, admin), (_, client) = keys.create("admin"), keys.create("client")
        self.admin, self.client = (
            TestClient(
                app, base_url="http://localhost", headers={"authorization": f"Bearer {secret}"}
            )
            for secret in (admin, client)
        )

    def take(self, name: str, content: bytes, *, agent: str = "tea") -> str:
        [word] = re.findall(r'name="word" value="([^"]+)"', self.admin.get(PATH).text)
        sent = self.admin.post(
            f"{PATH}/take", files={"file": (name, content)}, data={"word": word, "agent": agent}
        )
        return f"{sent.status_code} {sent.text}"

    def rows(self, name: str, content: bytes, *, agent: str = "tea") -> dict[str, int]:
        """Return what the page says became of a file's rows."""
        page = self.take(name, content, agent=agent)
        assert page.startswith("200 ")
        return {name: int(n) for name, n in re.findall(r"<tr><td>([^<]+)</td><td>(\d+)<", page)}


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    made = Office(tmp_path_factory.mktemp("files") / "state")
    assert made.rows("../odd name.jsonl", VOTES) == {
        "read": 3,
        "stored": 2,
        "already known": 0,
        "value_out_of_range": 1,
    }
    yield made
    made.here.store.database.close()


@pytest.mark.parametrize("below", ["/take", "/give"])
def test_who_opens_the_address_that_a_form_was_sent_to_is_shown_the_page(
    office: Office, below: str
) -> None:
    opened = office.admin.get(PATH + below)
    assert (opened.status_code, opened.url.path) == (200, PATH)


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_written_out_is_taken_in_again(office: Office, kind: str) -> None:
    given = office.admin.post(f"{PATH}/give", data={"agent": "tea", "kind": kind})
    assert given.status_code == 200
    name = re.findall(r'filename="(.+)"', given.headers["content-disposition"])[0]
    content = given.content
    if name.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            assert "configs:" in packed.read("README.md").decode()
            name, content = "train.parquet", packed.read("data/train.parquet")
    if kind == "csv":
        assert b"'=Because()" in content
    if KINDS[kind].what == "events":  # the same votes, so the store knows them
        assert office.rows(name, content) == {"read": 2, "stored": 0, "already known": 2}
    else:
        rows = office.rows(name, content, agent="milk")
        assert (rows["read"], rows["stored"] + rows["already known"]) == (1, 1)


def test_what_is_no_file_of_ours_is_refused_in_words(office: Office) -> None:
    for name, content, agent, words in (
        ("a.jsonl", b'{"x": 1}', "tea", "needed a row of a known format"),
        ("a.parquet", b"PAR1", "tea", "a whole parquet file is needed at a.parquet"),
        ("a.xlsx", b"PK", "tea", "a workbook is needed at a.xlsx"),
        ("a.jsonl", VOTES, "../tea", "needed an agent&#x27;s name"),
        ("", VOTES, "tea", "needed a file"),
    ):
        told = office.take(name, content, agent=agent)
        assert told.startswith("422 "), told
        assert words in told
    for data in ({"agent": "tea", "kind": "pickle"}, {"agent": "nobody", "kind": "csv"}):
        assert office.admin.post(f"{PATH}/give", data=data).status_code == 422
    forged = office.admin.post(f"{PATH}/take", files={"file": ("a.jsonl", VOTES)})
    assert (forged.status_code, "own form" in forged.text) == (422, True)
    assert office.admin.post(f"{PATH}/take", content=b"x").status_code == 422
    for method, path in (("GET", PATH), ("POST", f"{PATH}/take"), ("POST", f"{PATH}/give")):
        assert office.client.request(method, path).status_code == 403  # an admin's alone


def test_the_page_says_what_the_command_says_beside_the_numbers(office: Office) -> None:
    page = office.take(
        "a.csv", b"prompt;completion;label;<Kunde>\nWhy?;So.;true;Anna\n", agent="shop"
    )
    assert "<p>1 of 1 rows name no rater: each counts as another person" in page
    assert "not read were the columns &#x27;&lt;Kunde&gt;&#x27;. If one of them says who" in page
    assert "<p>no row was found in 1 file: a row is a line" in office.take("empty.jsonl", b"")


@pytest.mark.parametrize("letter", ["x", "é", "漢", "\U0001f600"])
def test_a_file_may_have_any_name_however_long(office: Office, letter: str) -> None:
    for length in (60, 83, 100, 200):
        rows = office.rows(f"{letter * length}.jsonl", VOTES)
        assert rows["already known"] == 2


def test_a_files_own_names_are_those_that_the_agents_recipe_tells(
    office: Office, tmp_path: Path
) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "feedback: {names: {columns: {prompt: Q, completion: A, value: Liked, rater: Who},"
        " fixed: {kind: thumbs}, words: {'yes!': up}}}\n"
    )
    office.here.store.ensure_agent("logs", recipe=str(recipe))
    told = office.rows("survey.csv", b"Who,Q,A,Liked\nann,Why?,So.,yes!\n", agent="logs")
    assert (told["read"], told["stored"]) == (1, 1)
    page = office.take("survey.csv", b"Q,A,Liked\nWhy?,So.,yes!\n", agent="logs")
    assert "feedback.names in the recipe" in page
    recipe.unlink()
    assert "own.yaml" in office.take("survey.csv", b"Who,Q,A,Liked\n", agent="logs")


def test_nothing_goes_in_while_feedback_is_switched_off(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(office.here.settings.feedback.__dict__, "enabled", False)
    assert "feedback.enabled is off" in office.take("a.jsonl", VOTES)
