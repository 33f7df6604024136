"""A version finds whom it was compared with, at a cost that more versions do not raise."""

from __future__ import annotations

import cProfile
from pathlib import Path

import pytest

from rlhf_pipeline import records
from rlhf_pipeline.database import Database, model_versions
from rlhf_pipeline.overview import standings
from rlhf_pipeline.registry.comparison import baseline_of, by_place, compared_with
from rlhf_pipeline.registry.ledger import PromotionLedger


def ledger_of(state: Path, agent_id: str, number: int) -> PromotionLedger:
    """Return a ledger in which each version started from the one before it."""
    ledger = PromotionLedger(Database(f"sqlite:///{state}/store.db"), root=state)
    places = [f"agents/{agent_id}/turns/{n}/ppo/policy" for n in range(number)]
    ledger.add_baseline(
        agent_id,
        label="v0",
        path=state / places[0],
        files={"model.safetensors": "0"},
        lineage={},
        actor="test",
    )
    rows = [
        {
            "agent_id": agent_id,
            "version": n,
            "label": f"v{n}",
            "path": places[n],
            "files": {"model.safetensors": str(n)},
            "lineage": {"started_from": f"/elsewhere/{places[n - 1]}", "baseline": places[0]},
            "created_at": records.now(),
        }
        for n in range(1, number)
    ]
    with ledger.database.write() as connection:
        connection.execute(model_versions.insert(), rows)
    return ledger


def test_a_lineage_names_versions_also_in_a_state_folder_that_was_elsewhere(
    tmp_path: Path,
) -> None:
    ledger = ledger_of(tmp_path, "shop", 13)
    known = by_place(versions := ledger.versions("shop"))
    assert [compared_with(version, known) for version in versions] == [None, *versions[:-1]]
    assert [baseline_of(version, known) for version in versions] == [None, *12 * [versions[0]]]
    ledger.database.close()


def test_twice_the_versions_cost_twice_the_work(tmp_path: Path) -> None:
    def calls(agent_id: str, number: int) -> int:
        ledger = ledger_of(tmp_path, agent_id, number)
        standings(ledger.database, ledger, agent_id)  # what is made once is made
        profile = cProfile.Profile()
        assert len(profile.runcall(standings, ledger.database, ledger, agent_id)) == number
        ledger.database.close()
        return sum(entry.callcount for entry in profile.getstats())

    assert calls("many", 400) / calls("few", 200) == pytest.approx(2, rel=0.1)
