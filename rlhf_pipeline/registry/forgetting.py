"""What is taken out of MLflow: a person's traces and words, logged examples, old traces, runs."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.errors import RegistryError
from rlhf_pipeline.evaluation import PAGE as COMPARISON
from rlhf_pipeline.evaluation.facts import DRIFT_PAGE
from rlhf_pipeline.event_logs import without_quotes
from rlhf_pipeline.feedback.datasets import JOBS
from rlhf_pipeline.records import hash_rater, prompt_from_json
from rlhf_pipeline.registry.traces import INTERACTION, PAGE, trace_files, traces_in
from rlhf_pipeline.registry.tracking import FINGERPRINT, mlflow_refusals
from rlhf_pipeline.topics import names_any, without_topic_rows, without_topics

if TYPE_CHECKING:
    from rlhf_pipeline.registry.models import ModelRegistry

SAMPLES, RESULT, REPORT = "ppo/samples.json", "ppo/result.json", "evaluation/report.md"
DRIFT = f"drift/{DRIFT_PAGE}"
BY_TOPIC = ("evaluation/groups.json", *(f"reward/{job}/report.json" for job in JOBS))
TAKEN_AWAY = "<!doctype html><p>Taken away: somebody whose words stood here was erased.</p>"


def traces_of(
    registry: ModelRegistry, agent_id: str, interactions: Collection[str], rater_id: str
) -> tuple[list[Any], list[tuple[str, str]]]:
    """Return the traces of these interactions, and (trace id, assessment id) of what they said.

    Assessments on those traces are not listed: they go with them.
    """
    traces: list[Any] = []
    said: list[tuple[str, str]] = []
    for info in _newest_first(registry, agent_id):
        if info.tags.get(INTERACTION) in interactions:
            traces.append(info)
            continue
        for assessment in info.assessments or ():
            person = assessment.source.source_id
            if person and hash_rater(agent_id, person) == rater_id:
                said.append((info.trace_id, str(assessment.assessment_id)))
    return traces, said


def forget_traces(
    registry: ModelRegistry, agent_id: str, interactions: Collection[str], rater_id: str
) -> dict[str, int]:
    """Delete those traces with their files, and those assessments; return how many of each."""
    traces, said = traces_of(registry, agent_id, interactions, rater_id)
    if not traces and not said:
        return {"traces": 0, "assessments": 0}
    _delete_traces(registry, agent_id, traces)
    client = registry.client._tracing_client
    with mlflow_refusals("deleting assessments"):
        for trace_id, assessment_id in said:
            client.delete_assessment(trace_id, assessment_id)
    return {"traces": len(traces), "assessments": len(said)}


def forget_trace(registry: ModelRegistry, agent_id: str, trace_id: str) -> None:
    """Delete one trace with its files."""
    with mlflow_refusals("looking for a trace"):
        info = registry.client._tracing_client.get_trace_info(trace_id)
    _delete_traces(registry, agent_id, [info])


def old_traces(registry: ModelRegistry, agent_id: str, newest: int, before: datetime) -> list[Any]:
    """Return the agent's traces from before that moment, but for its `newest` ones."""
    return _too_old(list(_newest_first(registry, agent_id)), newest, before)


def traced(
    registry: ModelRegistry, agent_id: str, newest: int, before: datetime, until: datetime
) -> frozenset[str]:
    """Return the interactions from before `until` with a trace that `old_traces` does not name."""
    found = list(_newest_first(registry, agent_id))
    gone = {info.trace_id for info in _too_old(found, newest, before)}
    moment = int(until.timestamp() * 1000)
    return frozenset(
        info.tags[INTERACTION]
        for info in found
        if INTERACTION in info.tags
        and int(info.request_time) < moment
        and info.trace_id not in gone
    )


def _newest_first(registry: ModelRegistry, agent_id: str) -> Iterator[Any]:
    """Yield what MLflow knows of every trace of the agent, however old, a page of it at a time."""
    with mlflow_refusals("looking through traces"):
        experiment = registry.known_experiment(agent_id)
        if experiment is not None:
            for trace in traces_in(registry, experiment):
                yield trace.info


def _too_old(found: Sequence[Any], newest: int, before: datetime) -> list[Any]:
    moment = int(before.timestamp() * 1000)
    return [info for info in found[newest:] if int(info.request_time) < moment]


def forget_old_traces(
    registry: ModelRegistry, agent_id: str, newest: int, before: datetime
) -> None:
    """Delete the traces that `old_traces` returns, with their files."""
    _delete_traces(registry, agent_id, old_traces(registry, agent_id, newest, before))


def _delete_traces(registry: ModelRegistry, agent_id: str, traces: Sequence[Any]) -> None:
    client = registry.client._tracing_client
    with mlflow_refusals("deleting traces"):
        for info in traces:
            # MLflow deletes a trace's rows and leaves its file; the file goes first.
            _delete_files(registry, trace_files(registry, info))
        for start in range(0, len(traces), PAGE):
            ids = [info.trace_id for info in traces[start : start + PAGE]]
            client.delete_traces(registry.experiment(agent_id), trace_ids=ids)


def _delete_files(registry: ModelRegistry, kept: Any) -> None:
    """Delete the files at an artifact's place. Raises RegistryError unless they have gone."""
    uri = str(kept.artifact_uri)
    registry.need_ours(uri)
    # MLflow 3.17 takes a %41 in a local folder's path for an A once more, and looks for it there;
    # leave it to delete_artifacts alone when it does not.
    local = getattr(kept, "artifact_dir", None)
    if local is None:
        kept.delete_artifacts()
    elif Path(local).is_dir():
        shutil.rmtree(local)
    if left := kept.list_artifacts():
        raise RegistryError(
            f"deleting the files at {uri} needs them to go, found {left[0].path} still there; see "
            "whether the folder may be written to, and ask again"
        )


def runs_of(registry: ModelRegistry, agent_id: str, mark: str) -> list[str]:
    """Return the ids of the runs of the turns whose fingerprint begins with `mark`, deleted too."""
    with mlflow_refusals(f"finding the runs of {mark}"):
        return [str(run.info.run_id) for run in _runs(registry, agent_id, mark)]


def _runs(registry: ModelRegistry, agent_id: str, mark: str) -> Sequence[Any]:
    """Return those runs, deleted ones too: MLflow keeps their files, and its page restores them.

    It lets files be written and deleted there as before, so a deleted run stays deleted.
    """
    from mlflow.entities import ViewType

    experiment = registry.known_experiment(agent_id)
    if experiment is None:
        return ()
    wanted = f"tags.`{FINGERPRINT}` LIKE '{mark}%'"
    found: Sequence[Any] = registry.client.search_runs([experiment], wanted, ViewType.ALL)
    return found


def forget_runs(registry: ModelRegistry, run_ids: Sequence[str]) -> None:
    """Delete the runs with their files; MLflow keeps their rows, marked, until `mlflow gc`."""
    for run_id in run_ids:
        with mlflow_refusals(f"deleting run {run_id}"):
            # MLflow marks a run as deleted and leaves its files.
            _delete_files(registry, registry.client._tracking_client._get_artifact_repo(run_id))
            registry.client.delete_run(run_id)


def forget_samples(
    registry: ModelRegistry,
    agent_id: str,
    mark: str,
    prompts: Collection[str],
    topics: Collection[str],
    report: str | None,
) -> int:
    """Take answers to these prompts (JSON), and these topics, out of what a turn's runs logged.

    `mark` begins the turn's fingerprint; `report` is the comparison as it reads now, None where
    nobody knows: then its examples go if one is theirs. Returns how many files were logged anew.
    Raises RegistryError where they are another state folder's.
    """
    changed = 0
    with mlflow_refusals(f"cleaning the runs of {mark}"):
        for run in _runs(registry, agent_id, mark):
            run_id = run.info.run_id
            registry.need_ours(str(run.info.artifact_uri))
            changed += _clean_run(registry.client, run_id, asked(prompts), topics, report)
    return changed


def asked(prompts: Collection[str]) -> frozenset[str]:
    """Return the last message of each prompt: what an example shows of it."""
    return frozenset(prompt_from_json(text)[-1].content for text in prompts)


def without_samples(result: dict[str, Any], questions: Collection[str]) -> dict[str, Any]:
    """Return a training result (as JSON) without the samples that answer these questions."""
    looks = [
        {**look, "samples": [s for s in look["samples"] if s["prompt"] not in questions]}
        for look in result["evaluations"]
    ]
    return {**result, "evaluations": looks}


def _clean_run(
    client: Any,
    run_id: str,
    questions: Collection[str],
    topics: Collection[str],
    report: str | None,
) -> int:
    folders = ("ppo", "evaluation", "drift", *(f"reward/{job}" for job in JOBS))
    files = {f.path for folder in folders for f in client.list_artifacts(run_id, folder)}
    changed = 0
    for name in files.intersection(BY_TOPIC) if topics else ():
        table = json.loads(_text(client, run_id, name))
        cleaned = without_topics(table, topics)
        if cleaned != table:
            client.log_dict(run_id, cleaned, name)
            changed += 1
    if topics and DRIFT in files and names_any(_text(client, run_id, DRIFT), topics):
        client.log_text(run_id, TAKEN_AWAY, DRIFT)
        changed += 1
    if RESULT in files:
        result = json.loads(_text(client, run_id, RESULT))
        cleaned = without_samples(result, questions)
        if cleaned != result:
            client.log_dict(run_id, cleaned, RESULT)
            changed += 1
    if SAMPLES in files:
        table = json.loads(_text(client, run_id, SAMPLES))
        at = table["columns"].index("prompt")
        rows = [row for row in table["data"] if row[at] not in questions]
        if rows != table["data"]:
            client.log_dict(run_id, {**table, "data": rows}, SAMPLES)
            changed += 1
    if REPORT in files:
        before = _text(client, run_id, REPORT)
        named = without_topic_rows(before, topics)
        after = without_quotes(named, questions) if report is None else report
        if before != after:
            if COMPARISON in files:  # before the text, by which a retry knows what is to be done
                client.log_text(run_id, TAKEN_AWAY, COMPARISON)
            client.log_text(run_id, after, REPORT)
            changed += 1
    return changed


def _text(client: Any, run_id: str, name: str) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        path = client.download_artifacts(run_id, name, scratch)
        return Path(path).read_text(encoding="utf-8")
