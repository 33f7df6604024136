"""What Dagster's pages show of a person: blank afterwards, and Dagster reads the rest as before."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from structlog.testing import capture_logs

from assets.common import table
from rlhf_pipeline.errors import OrchestratorAway
from rlhf_pipeline.event_logs import (
    SIDE_BY_SIDE,
    Traces,
    forget_examples,
    without_quotes,
)
from rlhf_pipeline.topics import ERASED

HERS = "is *nougat* “good”?"
ANN = Traces(frozenset({HERS}), "a" * 32, frozenset({"nougat bar"}), frozenset({"nougat_pie"}))
TABLES = """numbers

### By topic, against the champion

| nougat\\_pie | 12 |
| pies | 9 |"""
LEFT = TABLES.replace("nougat\\_pie", "\\[erased\\]")
QUOTED = f"{TABLES}\n\n{SIDE_BY_SIDE}\n\n> **user:** is \\*nougat\\* “good”?\n\n- **candidate** yes"


@dg.asset
def told() -> dg.MaterializeResult[Any]:
    """Tell two examples, and a comparison that quotes one."""
    samples = [
        {"update": 1, "prompt": text, "baseline": "b", "completion": text, "score": 0.5}
        for text in (HERS, "is pear good?")
    ]
    ngrams = [{"found": f"'{words}' wins 9 pairs"} for words in ("nougat bar", "pear")]
    groups = [{"group": f"topic {name}"} for name in ("nougat_pie", "pies")]
    raters = [{"voter": name * 32, "votes": 2} for name in "ab"]
    return dg.MaterializeResult(
        metadata={
            "samples": table(samples),
            "comparison": dg.MetadataValue.md(QUOTED),
            "n": 3,
            "ngrams": table(ngrams),
            "groups": table(groups),
            "topics": table([{"topic": "nougat_pie", "votes": 60}]),
            "raters": table(raters),
        }
    )


def test_of_a_storage_elsewhere_it_is_told_that_it_was_not_reached(tmp_path: Path) -> None:
    settings = (Path(__file__).parents[1] / "dagster.yaml").read_text()
    (tmp_path / "dagster.yaml").write_text(settings)
    with capture_logs() as logs:
        assert forget_examples(tmp_path, "shop", ANN) == 0
    assert logs == []
    (tmp_path / "dagster.yaml").write_text(f"{settings}\nstorage:\n  postgres: {{}}\n")
    with capture_logs() as logs:
        assert forget_examples(tmp_path, "shop", ANN) == 0
    assert ["left there" in line["event"] for line in logs] == [True]


def test_examples_are_blank_wherever_dagster_keeps_them(tmp_path: Path) -> None:
    folder = tmp_path / "dagster"
    folder.mkdir()
    with dg.DagsterInstance.local_temp(str(folder)) as instance:
        run = dg.materialize([told], instance=instance)
        pear = Traces(frozenset({"is pear better?"}), "c" * 32)
        assert forget_examples(folder, "shop", pear) == 0
        # The step's output and the materialisation, that for all runs, and beside the asset.
        assert forget_examples(folder, "shop", ANN) == 4
        assert forget_examples(folder, "shop", ANN) == 0
        events = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
        newest = instance.get_latest_materialization_event(dg.AssetKey("told"))
        assert newest is not None
        for event in (*events, newest):
            assert event.asset_materialization is not None
            metadata = event.asset_materialization.metadata
            shown: Any = metadata["samples"].value
            rows = [record.data for record in shown.records]
            assert [row["prompt"] for row in rows] == [ERASED, "is pear good?"]
            assert [row["completion"] for row in rows] == [ERASED, "is pear good?"]
            for name, kept in (("ngrams", "'pear' wins 9 pairs"), ("raters", "b" * 32)):
                told_of: Any = metadata[name].value
                assert [next(iter(r.data.values())) for r in told_of.records] == [ERASED, kept]
            by_group: Any = metadata["groups"].value
            named = [record.data["group"] for record in by_group.records]
            assert named == [f"topic {ERASED}", "topic pies"]
            assert metadata["comparison"].value == f"{LEFT}\n"
            assert metadata["n"].value == 3
        assert instance.get_run_by_id(run.run_id) is not None
    held = [path for path in folder.rglob("*") if path.is_file() and hers(path)]
    assert held == []


def test_what_another_agent_shows_stays(tmp_path: Path) -> None:
    agents = dg.DynamicPartitionsDefinition(name="agents")

    @dg.asset(partitions_def=agents)
    def samples() -> dg.MaterializeResult[Any]:
        return dg.MaterializeResult(metadata={"samples": table([{"prompt": HERS}])})

    def shown(run_id: str) -> list[Any]:
        events = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
        metadata: Any = events[0].asset_materialization.metadata  # type: ignore[union-attr]
        return [record.data["prompt"] for record in metadata["samples"].value.records]

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.add_dynamic_partitions("agents", ["shop", "desk"])
        run = {
            agent: dg.materialize([samples], instance=instance, partition_key=agent).run_id
            for agent in ("shop", "desk")
        }
        # The step's output and the materialisation, and that for all runs.
        assert forget_examples(tmp_path, "shop", ANN) == 3
        assert (shown(run["shop"]), shown(run["desk"])) == ([ERASED], [HERS])
        assert forget_examples(tmp_path, "desk", ANN) == 4  # its is the newest, beside the asset
        assert shown(run["desk"]) == [ERASED]


def test_a_run_that_has_not_made_the_asset_anew_hides_nobodys_words(tmp_path: Path) -> None:
    """Dagster puts a run's id beside the asset as soon as that run is planned to make it."""
    agents = dg.DynamicPartitionsDefinition(name="agents")

    ended: list[str] = []

    @dg.asset(partitions_def=agents)
    def first() -> None:
        if ended:
            raise RuntimeError("the run ends before the samples")
        ended.append("shop")

    @dg.asset(partitions_def=agents, deps=[first])
    def samples() -> dg.MaterializeResult[Any]:
        return dg.MaterializeResult(metadata={"samples": table([{"prompt": HERS}])})

    def beside() -> str:
        newest: Any = instance.get_latest_materialization_event(dg.AssetKey("samples"))
        rows = newest.asset_materialization.metadata["samples"].value.records
        return str(rows[0].data["prompt"])

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.add_dynamic_partitions("agents", ["shop", "desk"])
        both = dg.Definitions([first, samples], jobs=[dg.define_asset_job("both", "*")])
        job = both.resolve_job_def("both")
        made, failed = (
            job.execute_in_process(instance=instance, partition_key=agent, raise_on_error=False)
            for agent in ("shop", "desk")
        )
        assert (made.success, failed.success) == (True, False)
        forget_examples(tmp_path, "desk", ANN)
        assert beside() == HERS
        forget_examples(tmp_path, "shop", ANN)
        assert beside() == ERASED


def hers(path: Path) -> bool:
    content = path.read_bytes()
    return b"nougat" in content or ANN.rater_id.encode() in content


def test_a_comparison_that_quotes_others_stays_whole() -> None:
    assert without_quotes(QUOTED, {"nougat"}) == QUOTED


def test_a_database_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "index.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(OrchestratorAway, match=r"index\.db to take examples out of, found"):
        forget_examples(tmp_path, "shop", ANN)


def test_a_database_whose_disk_is_full_is_not_said_to_be_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clean(connection: sqlite3.Connection, *_: object) -> int:
        connection.execute("PRAGMA max_page_count = 2")
        connection.execute("CREATE TABLE rows (row)")
        return connection.execute("INSERT INTO rows VALUES (zeroblob(100000))").rowcount

    sqlite3.connect(tmp_path / "index.db").close()
    monkeypatch.setattr("rlhf_pipeline.event_logs._clean", clean)
    with pytest.raises(OrchestratorAway, match=r"^needed room on the disk, found .*make room, and"):
        forget_examples(tmp_path, "shop", ANN)
