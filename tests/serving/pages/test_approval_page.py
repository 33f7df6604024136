"""A person promotes what they looked at, and nothing else: no script, no form from elsewhere."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import RegistryError
from rlhf_pipeline.evaluation.gate import decide
from rlhf_pipeline.evaluation.report import Sample
from rlhf_pipeline.files import folder_sha256, write_json
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.serving.pages.approval_page import add_approval_page
from tests.evaluation.test_gate import FACTS, report

HOSTILE = '<script>alert("x")</script>'
YES = {"looked": "yes", "reason": "shorter and friendlier"}


class Shop:
    """A ledger with a baseline and three turns' versions: two passed, the last was refused."""

    def __init__(self, state: Path) -> None:
        self.database = Database(f"sqlite:///{state}/feedback.db")
        self.ledger = PromotionLedger(self.database, root=state)
        self.registry = ModelRegistry(self.ledger, f"sqlite:///{state}/m.db", state / "mlflow")
        self.known = ["tea"]
        baseline = self.weights(state / "turns" / "0" / "sft")
        self.ledger.add_baseline(
            "tea",
            label="v0",
            path=baseline,
            files=folder_sha256(baseline),
            lineage={},
            actor="test",
        )
        for number, kl in ((1, 4.0), (2, 4.0), (3, 99.0)):
            self.turn(state / "turns" / str(number), baseline, kl)
        app = FastAPI()
        add_approval_page(app, self.registry, lambda: self.known, b"secret")
        self.client = TestClient(app)

    def weights(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(str(folder))
        return folder

    def turn(self, work: Path, champion: Path, kl: float) -> None:
        said = {"candidate": f"{HOSTILE} of {work.name}", "champion": "what the champion says"}
        scores = {"candidate": 1.0, "champion": 0.5}
        samples = [Sample(f"p{n}", [["user", f"q{n}"]], said, scores) for n in range(30)]
        found = replace(report(kl_to_baseline=kl), samples=samples)
        write_json(work / "evaluation.json", {"result": {"report": found.to_json()}})
        policy = self.weights(work / "ppo" / "policy")
        self.ledger.add_version(
            "tea",
            label=f"v{work.name}00",
            path=policy,
            files=folder_sha256(policy),
            lineage={"started_from": str(champion)},
            gate=decide(found, facts=FACTS).to_json(),
            fingerprint=work.name,
        )

    def form(self, page: str) -> dict[str, str]:
        """Return what the page's form sends by itself."""
        found = re.findall(r'<input type="hidden" name="(\w+)" value="(.*?)">', page)
        return {name: html.unescape(value) for name, value in found}

    @property
    def champion(self) -> int:
        found = self.ledger.champion("tea")
        assert found is not None
        return found.version


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    def away(self: ModelRegistry, agent_id: str) -> None:
        raise RegistryError("MLflow is away")  # the ledger does not need it

    monkeypatch.setattr(ModelRegistry, "reconcile", away)
    made = Shop(tmp_path)
    yield made
    made.database.close()


def test_a_person_promotes_after_a_look_at_thirty_answers_side_by_side(shop: Shop) -> None:
    page = shop.client.get("/candidates").text  # leads to the first agent's newest that waits
    assert "Version 2 (v200)" in page
    assert page.count("what the champion says") == 30
    assert page.count("&lt;script&gt;alert(") == 30
    assert "<script" not in page
    assert "It was compared with version 0, the champion." in page
    for rule, verdict in (("kl_stop", "pass"), ("score_vs_champion", "pass")):
        named = rule.replace("_", "_<wbr>")
        assert re.search(rf"<td>{named}<br>.*?<span class=\"{verdict}\">", page)
    sent = shop.form(page)
    not_looked = shop.client.post("/candidates/tea", data=sent)
    assert (not_looked.status_code, shop.champion) == (409, 0)
    done = shop.client.post("/candidates/tea", data=sent | YES)
    assert done.status_code == 200
    assert "champion moved from 0 to 2" in done.text
    assert "aliases will follow: MLflow is away" in done.text
    assert shop.champion == 2
    entry = shop.ledger.history("tea")[-1]
    assert (entry.action, entry.reason) == ("promote", "shorter and friendlier")
    assert "No version waits" in shop.client.get("/candidates/tea").text


def test_only_what_was_shown_is_promoted(shop: Shop) -> None:
    first = shop.form(shop.client.get("/candidates/tea?version=1").text)
    forged = {**first, "signed": first["signed"][:-1] + "?"}
    assert shop.client.post("/candidates/tea", data=forged | YES).status_code == 409
    assert shop.client.post("/candidates/tea", data=YES).status_code == 409
    shop.ledger.promote("tea", 2, actor="test", reason="meanwhile", expected_champion=0)
    late = shop.client.post("/candidates/tea", data=first | YES)
    assert late.status_code == 409
    assert "champion" in late.text
    assert shop.champion == 2


def test_changed_files_and_refused_versions_are_not_promoted_here(shop: Shop) -> None:
    sent = shop.form(shop.client.get("/candidates/tea").text)
    (shop.ledger.version("tea", 2).path / "model.safetensors").write_text("other weights")
    changed = shop.client.post("/candidates/tea", data=sent | YES)
    assert (changed.status_code, shop.champion) == (409, 0)
    assert 'id="refused"' in changed.text
    refused = shop.client.get("/candidates/tea?version=3").text
    assert "The gate refuses it" in refused
    assert "<form" not in refused
    assert "<code>rlhf promote --force</code>" in refused
    assert "what the champion says" in refused
    for unknown in ("9", "9" * 23):  # the second fits no column
        assert shop.client.get(f"/candidates/tea?version={unknown}").status_code == 404
    assert shop.client.get("/candidates/nobody").status_code == 404


def test_without_its_turns_folder_a_version_is_told_to_have_no_comparison(shop: Shop) -> None:
    (shop.ledger.version("tea", 2).path.parents[1] / "evaluation.json").unlink()
    page = shop.client.get("/candidates/tea").text
    assert "Its comparison is not there" in page
    shop.known = []
    assert "No agent yet" in shop.client.get("/candidates").text
