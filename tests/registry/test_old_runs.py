"""Old traces and runs leave MLflow with their files; newer ones, and other people's, stay."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from rlhf_pipeline.records import Interaction, now, user_prompt
from rlhf_pipeline.registry.forgetting import forget_old_traces, forget_runs, old_traces, runs_of
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.registry.traces import log_interaction


def test_old_traces_go_but_for_the_newest(registry: ModelRegistry) -> None:
    ids = []
    for days in (100, 95, 1):
        said = Interaction(
            f"t{days}", "old", user_prompt("hi"), "yes", 0, now() - timedelta(days=days)
        )
        ids.append(log_interaction(registry, said))
    before = now() - timedelta(days=90)
    assert [info.trace_id for info in old_traces(registry, "old", 0, before)] == [ids[1], ids[0]]
    assert [info.trace_id for info in old_traces(registry, "old", 2, before)] == [ids[0]]
    forget_old_traces(registry, "old", 2, before)
    assert [info.trace_id for info in old_traces(registry, "old", 0, now())] == [ids[2], ids[1]]
    files = [path.parts for path in registry.folder.rglob("*") if path.is_file()]
    assert [any(trace_id in parts for parts in files) for trace_id in ids] == [False, True, True]
    assert old_traces(registry, "nobody", 0, now()) == []


def test_runs_of_a_turn_go_with_their_files(registry: ModelRegistry, tmp_path: Path) -> None:
    made = {}
    for mark in ("a" * 64, "b" * 64):
        with registry.run("old", fingerprint=mark, stage="turn", parameters={"x": 1}) as run:
            run.log_text("ppo/samples.json", "quoted")
            made[mark[0]] = run.run_id
    assert runs_of(registry, "old", "a" * 16) == [made["a"]]
    files = [p for p in registry.folder.rglob("samples.json") if made["a"] in p.parts]
    assert len(files) == 1
    forget_runs(registry, [made["a"]])
    assert not files[0].exists()
    assert runs_of(registry, "old", "a" * 16) == []
    assert runs_of(registry, "old", "b" * 16) == [made["b"]]
    assert runs_of(registry, "nobody", "a" * 16) == []
