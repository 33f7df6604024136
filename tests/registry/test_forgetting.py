"""A person taken out of a real MLflow: their traces with their files, what they said, examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.erasure import erase, held_about
from rlhf_pipeline.errors import RegistryError
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    hash_rater,
    now,
    user_prompt,
)
from rlhf_pipeline.registry import forgetting
from rlhf_pipeline.registry.traces import INTERACTION, log_interaction, read_assessments
from rlhf_pipeline.serving.tracing import Tracing
from tests.assets.world import Loop

SECRET = "nougat"


def said(key: str, user: str, text: str, agent: str) -> Interaction:
    person = hash_rater(agent, user)
    prompt = user_prompt(f"{text}?")
    return Interaction(key, agent, prompt, f"{text}.", 0, now(), user_id=person)


def assess(loop: Loop, trace_id: str, person: str, value: Any) -> None:
    from mlflow.entities import AssessmentSource
    from mlflow.entities import Feedback as Assessment

    source = AssessmentSource("HUMAN", person)
    judged = Assessment(name="liked", value=value, source=source, rationale=SECRET)
    loop.pipeline.registry.client._tracing_client.log_assessment(trace_id, judged)


def bytes_under(folder: Path) -> list[str]:
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and ".db" not in path.name and SECRET.encode() in path.read_bytes()
    ]


@pytest.mark.parametrize("deleted", ["nothing", "run", "experiment"])
def test_traces_assessments_and_logged_examples_of_a_person_go_and_others_stay(
    loop: Loop, deleted: str
) -> None:
    """So they do from what was deleted on MLflow's page, which keeps it to be restored."""
    agent = loop.agent(f"forgotten-{deleted}")
    pipeline = loop.pipeline
    registry, store, database = pipeline.registry, pipeline.store, pipeline.database
    theirs, other = (
        said(f"f-{name}-{deleted}", name, text, agent)
        for name, text in (("ann", SECRET), ("bob", "pear"))
    )
    store.add_interactions([theirs, other])
    log_interaction(registry, theirs)
    kept = log_interaction(registry, other)
    assess(loop, kept, "ann", True)
    assess(loop, kept, "bob", False)
    store.append(list(read_assessments(registry, agent).events))
    rater = hash_rater(agent, "bob")
    store.append(
        [
            Feedback(
                agent,
                FeedbackKind.thumbs,
                key,
                interaction_id=key,
                number=1.0,
                rater_id=rater,
                topic=topic,
            )
            for key, topic in ((theirs.interaction_id, SECRET), (other.interaction_id, "pears"))
        ]
    )
    newest = snapshot.newest_seq(database, agent)
    mark = snapshot.fingerprint(database, agent, newest)
    settings = pipeline.settings()
    place = settings.agent_folder(agent) / "snapshots" / mark[:16] / snapshot.FILE
    snapshot.take(database, agent, newest, place)
    texts = (f"{SECRET}?", "pear?")
    samples = [{"update": 0, "prompt": text, "completion": text} for text in texts]
    with registry.run(agent, fingerprint=mark, stage="turn", parameters={}) as run:
        run.log_table("ppo/samples.json", samples)
        run.log_json("ppo/result.json", {"evaluations": [{"samples": samples}], "x": 1})
        run.log_text(
            "evaluation/report.md", f"numbers\n\n### Side by side\n\n> **user:** {SECRET}?"
        )
        topics = (SECRET, "pears")
        by_topic = {name: {"n": 10} for name in topics}
        run.log_json("reward/gate/report.json", {"findings": {"by_topic": by_topic}})
        groups = [{"group": f"topic {name}", "metric": "score"} for name in topics]
        run.log_table("evaluation/groups.json", groups)
        run.log_text("drift/drift.html", json.dumps(topics))
    folder = settings.state_dir / "mlflow"
    assert len(bytes_under(folder)) == 7
    client = registry.client
    if deleted == "run":
        client.delete_run(run.run_id)
    elif deleted == "experiment":
        client.delete_experiment(registry.experiment(agent))

    [shown] = held_about(registry, "ann", agent)["agents"]
    assert (len(shown["traces"]), len(shown["assessments"])) == (1, 1)
    [done] = erase(settings, registry, "ann", agent)["erasures"]
    assert (done["counts"]["traces"], done["counts"]["assessments"]) == (1, 1)

    assert bytes_under(folder) == []
    [left] = registry.client.search_traces(locations=[registry.experiment(agent)])
    assert left.info.trace_id == kept
    assert [a.source.source_id for a in left.info.assessments] == ["bob"]
    events = read_assessments(registry, agent).events
    assert {event.rater_id for event in events} == {rater}  # hers do not come in again
    if deleted == "run":
        assert client.get_run(run.run_id).info.lifecycle_stage == "deleted"
    table = json.loads(Path(client.download_artifacts(run.run_id, "ppo/samples.json")).read_text())
    assert table["data"] == [[0, "pear?", "pear?"]]
    result = json.loads(Path(client.download_artifacts(run.run_id, "ppo/result.json")).read_text())
    assert result == {"evaluations": [{"samples": samples[1:]}], "x": 1}
    report = Path(client.download_artifacts(run.run_id, "evaluation/report.md")).read_text()
    assert report == "numbers\n"
    worth, groups = (
        json.loads(Path(client.download_artifacts(run.run_id, name)).read_text())
        for name in ("reward/gate/report.json", "evaluation/groups.json")
    )
    assert worth == {"findings": {"by_topic": {"[erased]": {"n": 10}, "pears": {"n": 10}}}}
    assert groups["data"] == [["topic [erased]", "score"], ["topic pears", "score"]]


def test_a_trace_that_comes_while_somebody_is_erased_does_not_outlive_them(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = loop.agent("overtaken")
    pipeline = loop.pipeline
    registry, store, settings = pipeline.registry, pipeline.store, pipeline.settings()
    theirs, other = said("o-ann", "ann", SECRET, agent), said("o-bob", "bob", "pear", agent)
    store.add_interactions([theirs, other])
    tracing, forget_traces = Tracing(settings, store, registry), forgetting.forget_traces
    tracing.enabled = True

    def overtaken(*given: Any) -> dict[str, int]:
        found = forget_traces(*given)
        tracing.note(theirs)
        tracing.finish()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(forgetting, "forget_traces", overtaken)
        erase(settings, registry, "ann", agent)
    later = Tracing(settings, store, registry)
    later.enabled = True
    later.note(other)
    later.finish()
    [left] = registry.client.search_traces(locations=[registry.experiment(agent)])
    assert left.info.tags[INTERACTION] == "o-bob"
    assert bytes_under(settings.state_dir / "mlflow") == []


def test_an_mlflow_that_is_away_leaves_everything_to_be_asked_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    agent = loop.agent("unforgotten")
    pipeline = loop.pipeline
    pipeline.store.add_interactions([said("f-eve", "eve", SECRET, agent)])
    registry = pipeline.registry

    def away(*_: Any, **__: Any) -> Any:
        raise MlflowException("away")

    with monkeypatch.context() as patch:
        patch.setattr(registry.client, "search_experiments", away)
        with pytest.raises(RegistryError, match="looking through traces"):
            erase(pipeline.settings(), registry, "eve", agent)
    assert pipeline.store.interaction("f-eve") is not None
    erase(pipeline.settings(), registry, "eve", agent)
    assert pipeline.store.interaction("f-eve") is None
