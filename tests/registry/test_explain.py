from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from rlhf_pipeline import records
from rlhf_pipeline.config import load_settings, shown
from rlhf_pipeline.database import Database, claims, snapshots
from rlhf_pipeline.errors import RegistryError
from rlhf_pipeline.evaluation.phrases import Phrase
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import write_json
from rlhf_pipeline.registry.comparison import OUTCOME
from rlhf_pipeline.registry.explain import explain, to_text
from rlhf_pipeline.registry.ledger import PromotionLedger
from tests.evaluation.test_gate import report

AGENT = "support"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[PromotionLedger]:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    ledger = PromotionLedger(database, root=tmp_path)
    ledger.add_baseline(
        AGENT,
        label="v0",
        path=tmp_path / "b",
        files={"model.safetensors": "00"},
        lineage={},
        actor="setup",
    )
    for number, passed in ((1, True), (2, False)):
        verdict = "pass" if passed else "fail"
        result = {"rule": "kl_stop", "verdict": verdict, "words": "KL: needed ≤ 20, found 4"}
        ledger.add_version(
            AGENT,
            label=f"v{number}00",
            path=tmp_path / str(number),
            files={"model.safetensors": f"0{number}"},
            lineage={"base_model": "tiny", "seeds": {"ppo": 7}},
            gate={"passed": passed, "results": [result]},
            fingerprint=f"print{number}",
        )
    ledger.promote(AGENT, 1, actor="ann", reason="won 62 %", expected_champion=0)
    moment = records.now()
    with database.write() as connection:
        connection.execute(
            snapshots.insert().values(
                snapshot_id="s",
                agent_id=AGENT,
                fingerprint="print1",
                watermark=40,
                rows=37,
                path="x",
                sha256="ab",
                created_at=moment,
            )
        )
        connection.execute(
            claims.insert().values(
                agent_id=AGENT,
                fingerprint="print1",
                watermark=40,
                attempt=1,
                state="done",
                holder="run-9",
                asked_by="sensor",
                reason="version 1 passed; few prompts were compared, so a person decides",
                created_at=moment,
                heartbeat_at=moment,
                expires_at=moment + timedelta(minutes=1),
            )
        )
    yield ledger
    database.close()


def test_a_champion_is_explained_from_the_feedback_to_the_decision(
    ledger: PromotionLedger,
) -> None:
    found = explain(ledger, AGENT, 1)
    assert found["standing"] == ["champion"]
    assert found["data"]["snapshot"]["rows"] == 37
    assert found["data"]["attempts"][0]["holder"] == "run-9"
    assert [e["action"] for e in found["ledger"]] == ["promote"]
    text = to_text(found)
    for part in ("won 62 %", "0 → 1", "kl_stop", "ppo: 7", "rows: 37", "01  model.safetensors"):
        assert part in text
    json.dumps(found)


def test_which_of_its_votes_were_taken_back_since_is_told(ledger: PromotionLedger) -> None:
    assert "taken_back" not in to_text(explain(ledger, AGENT, 1))
    store = FeedbackStore(ledger.database)

    def votes(origin: str, *raters: str) -> list[records.Feedback]:
        return [
            records.Feedback(
                agent_id=AGENT,
                kind=records.FeedbackKind.thumbs,
                idempotency_key=rater,
                prompt=records.user_prompt("Why?"),
                completion="Because.",
                number=1.0,
                rater_id=rater,
                origin=origin,
            )
            for rater in raters
        ]

    store.append([*votes("swapped.csv", "ann", "bob", "cat"), *votes("sound.csv", "dan")])
    with ledger.database.write() as connection:
        mark = {"watermark": snapshot.newest_seq(ledger.database, AGENT)}
        connection.execute(snapshots.update().values(mark))
    store.append(votes("swapped.csv", "eve"))
    store.withdraw(AGENT, store.keys_from(AGENT, "swapped.csv"))
    found = explain(ledger, AGENT, 1)
    assert found["data"]["taken_back"] == {"swapped.csv": 3}
    assert "\n  taken_back:\n    swapped.csv: 3\n" in to_text(found)
    assert explain(ledger, AGENT, 0)["data"] == {"fingerprint": None}


def test_what_its_turn_came_to_and_whom_it_was_compared_with_are_told(
    ledger: PromotionLedger, tmp_path: Path
) -> None:
    assert ": version 1 passed; few prompts were compared" in to_text(explain(ledger, AGENT, 1))
    ledger.add_version(
        AGENT,
        label="v300",
        path=tmp_path / "3",
        files={"w": "00"},
        lineage={"started_from": str(tmp_path / "b")},
        gate={"passed": True, "results": []},
        fingerprint="print3",
    )
    found = explain(ledger, AGENT, 3)
    assert found["compared_with"] == 0  # version 1 is the champion by now
    assert "\n  passed, compared with version 0\n" in to_text(found)


def test_a_recipe_is_told_by_what_it_has_otherwise(ledger: PromotionLedger, tmp_path: Path) -> None:
    recipe = shown(load_settings("tiny"))
    ledger.add_version(
        AGENT,
        label="v300",
        path=tmp_path / "3",
        files={"w": "00"},
        lineage={"recipe": recipe, "reward_models": {"proxy": {"head.safetensors": "0" * 64}}},
        gate=None,
        fingerprint="print1",
    )
    found = explain(ledger, AGENT, 3)
    assert found["lineage"]["recipe"] == recipe  # --json has all of it
    text = to_text(found)
    for line in ("Recipe tiny, where", "  ppo.updates: 40", "  reward_models: proxy"):
        assert f"\n{line}" in text
    assert "  attempt 1: done, asked by sensor 2" in text
    assert "clip_range" not in text  # as the defaults have it
    assert "0000" not in text
    assert text.count("\n") < 60


def test_the_page_of_the_comparison_is_named_where_it_is(
    ledger: PromotionLedger, tmp_path: Path
) -> None:
    assert explain(ledger, AGENT, 1)["report"] is None
    turn = tmp_path / "turn"
    (turn / "evaluation").mkdir(parents=True)
    (turn / "evaluation" / "report.html").write_text("")
    ledger.add_version(
        AGENT,
        label="v300",
        path=turn / "ppo" / "policy",
        files={"model.safetensors": "03"},
        lineage={},
        gate=None,
        fingerprint="print3",
    )
    assert f"report {turn}/evaluation/report.html" in to_text(explain(ledger, AGENT, 3))


def test_words_that_it_says_more_often_are_told(ledger: PromotionLedger, tmp_path: Path) -> None:
    assert "Words in its answers" not in to_text(explain(ledger, AGENT, 1))  # no report is left
    turn = tmp_path / "turn"
    told = {
        "champion": [Phrase("of course !", 0.63, 0.05), Phrase("pin code", 0.0, 0.125)],
        "baseline": [Phrase("kettle", 0.5, 0.0)],
    }
    compared = replace(report(), phrases=told)
    write_json(turn / OUTCOME, {"result": {"report": compared.to_json()}})
    ledger.add_version(
        AGENT,
        label="v300",
        path=turn / "ppo" / "policy",
        files={"model.safetensors": "03"},
        lineage={},
        gate={"passed": True, "results": []},
        fingerprint="print3",
    )
    text = to_text(explain(ledger, AGENT, 3))
    words = "\n    5% →  63%  of course !\n   12% →   0%  pin code\n"
    assert f"Words in its answers, after so many of the champion's had them{words}" in text
    assert "kettle" not in text


def test_standing_names_refused_rolled_back_and_baseline(ledger: PromotionLedger) -> None:
    assert explain(ledger, AGENT, 2)["standing"] == ["refused by the gate"]
    refused = to_text(explain(ledger, AGENT, 2))
    assert "never was champion" in refused
    assert "refused by kl_stop\n" in refused
    assert explain(ledger, AGENT, 0)["standing"] == ["previous", "baseline"]
    ledger.rollback(AGENT, actor="watch", reason="errors")
    assert explain(ledger, AGENT, 1)["standing"] == ["rolled back from"]
    assert explain(ledger, AGENT, 0)["standing"] == ["champion", "baseline"]
    assert "not judged" in to_text(explain(ledger, AGENT, 0))


def test_an_unknown_version_is_said_so(ledger: PromotionLedger) -> None:
    with pytest.raises(RegistryError, match="version 8"):
        explain(ledger, AGENT, 8)


def test_a_person_may_name_a_version_by_its_standing(ledger: PromotionLedger) -> None:
    assert ledger.find(AGENT, "champion").version == 1
    assert ledger.find(AGENT, "previous").version == 0
    assert ledger.find(AGENT, "baseline").version == 0
    assert ledger.find(AGENT, "2").version == 2
    for name in ("challenger", "newest", "v100"):
        with pytest.raises(RegistryError, match=f"no '{name}'"):
            ledger.find(AGENT, name)
