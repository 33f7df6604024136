"""Interactions as MLflow traces, and what people say about them there as feedback.

Somebody who labels in MLflow's review queues needs nothing else: thumbs, numbers, categories, an
expected answer, or {"chosen", "rejected"} on a trace come back as votes on its interaction. Each
assessment is one event however often it is read. What one said before it was changed, or overridden
by another as MLflow's page does it, is taken back.

MLflow can be asked for what was said lately, not for what was assessed lately. So a look reads the
NEWEST traces, and of all of them the next IN_TURN, oldest first and round again: it costs the same
however many there are, and what is said about an old one is heard after traces / IN_TURN looks at
most. What this does not see: assessments whose trace names no interaction, and that one was deleted
after it was heard.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from rlhf_pipeline.errors import FeedbackRefused
from rlhf_pipeline.feedback.rules import Rule, check_event, refuse
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    QuarantinedRow,
    Source,
    as_messages,
    hash_rater,
)
from rlhf_pipeline.registry.tracking import AGENT, mlflow_refusals

if TYPE_CHECKING:
    from rlhf_pipeline.registry.models import ModelRegistry

NEWEST = 1000  # traces that every look reads
IN_TURN = 500  # and so many of all of them, further at each look
PAGE = 100  # traces a call
INTERACTION = "rlhf.interaction_id"  # a trace's tag
SHOWN = 1000  # characters of a preview
NOBODY = ("User", "default")  # whom MLflow's page and its calls name where nobody signed
SOURCES: dict[str, Source] = {"HUMAN": "human", "LLM_JUDGE": "model", "CODE": "code"}
YES = ("up", "yes", "true", "good", "pass")
NO = ("down", "no", "false", "bad", "fail")


@dataclass(frozen=True, slots=True)
class Read:
    """What a look at an agent's traces found."""

    events: tuple[Feedback, ...]
    aside: tuple[QuarantinedRow, ...]
    turn_ms: int  # since 1970: when the trace was said at which the next look's turn begins
    revised: Mapping[str, str | None]
    """Of assessments that were changed or overridden: what their keys begin with, and the one that
    still counts, if any."""

    def outdated(self, keys: Iterable[str]) -> list[str]:
        """Return which of the keys are of what nobody says any more."""
        return [key for key in keys if self.revised.get(key.rpartition(":")[0], key) != key]


def log_interaction(registry: ModelRegistry, interaction: Interaction) -> str:
    """Write the interaction as a finished trace of its agent's experiment; return the trace's id.

    Goes past MLflow's tracing of functions, which writes to one global tracking URI, later and
    without saying when it failed. Raises RegistryError where MLflow does not take it.
    """
    from mlflow.entities import LiveSpan, TraceData, TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.utils import TraceJSONEncoder
    from opentelemetry.sdk.trace import TracerProvider

    messages = as_messages(interaction.prompt)
    trace_id = f"tr-{uuid.uuid4().hex}"
    latency = interaction.latency_seconds or 0.0
    begun = int(interaction.created_at.timestamp() * 1e9) - int(latency * 1e9)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("rlhf")
    timed = tracer.start_span("chat", start_time=begun)
    span = LiveSpan(timed, trace_id, "CHAT_MODEL")
    span.set_inputs({"messages": messages})
    span.set_outputs({"role": "assistant", "content": interaction.completion})
    timed.end(begun + int(latency * 1e9))
    with mlflow_refusals("logging an interaction as a trace"):
        experiment = registry.experiment(interaction.agent_id)
        client = registry.client._tracing_client
        info = client.start_trace(
            TraceInfo(
                trace_id=trace_id,
                trace_location=TraceLocation.from_experiment_id(experiment),
                request_time=begun // 1_000_000,
                execution_duration=int(latency * 1000),
                state=TraceState.OK,
                request_preview=interaction.prompt[-1].content[:SHOWN],
                response_preview=interaction.completion[:SHOWN],
                tags={
                    INTERACTION: interaction.interaction_id,
                    AGENT: interaction.agent_id,
                    "rlhf.version": str(interaction.model_version),
                },
            )
        )
        data = TraceData(spans=[span.to_immutable_span()]).to_dict()
        words = json.dumps(data, cls=TraceJSONEncoder, ensure_ascii=False)
        trace_files(registry, info).upload_trace_data(words)
    return trace_id


def trace_files(registry: ModelRegistry, info: Any) -> Any:
    """Return MLflow's repository of the trace's files.

    MLflow's client, asked for it, looks on the server of the process's own tracking URI, which
    need not be the registry's.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.tracing.utils.artifact_utils import get_artifact_uri_for_trace

    place = get_artifact_uri_for_trace(info)
    return get_artifact_repository(place, tracking_uri=registry.tracking_uri)


def read_assessments(
    registry: ModelRegistry,
    agent_id: str,
    turn_ms: int = 0,
    names: Collection[str] | None = None,
) -> Read:
    """Return what is said about the newest traces, and about those whose turn it is.

    Under these names, where they are given. The turn begins with what was said at `turn_ms`, as the
    look before returned it. What was read before comes again with the same key, so the store knows
    it.
    """
    events: list[Feedback] = []
    aside: list[QuarantinedRow] = []
    revised: dict[str, str | None] = {}
    traces, next_turn = _looked_at(registry, agent_id, turn_ms)
    # In the order they were said: of a person's answers the one that is stored last counts.
    counts = [one for one in _assessments(traces) if names is None or one[2].name in names]
    said = sorted(counts, key=lambda one: _changed(one[2]))
    tops = _tops(assessment for _, _, assessment in said)
    for interaction_id, trace_id, assessment in said:
        changed = _changed(assessment)
        if assessment.valid is False:  # overridden by another
            revised[_name(assessment)] = None
            continue
        if changed != assessment.create_time_ms:
            revised[_name(assessment)] = _key(assessment, changed)
        try:
            top = tops.get(assessment.name)
            event = event_of(assessment, agent_id, interaction_id, registry, changed, top)
            check_event(event)
        except FeedbackRefused as refusal:
            rule, detail = refusal.rule, str(refusal)
        except (ValueError, OverflowError, TypeError) as error:  # no value that anybody expects
            rule, detail = Rule.wrong_type, f"needed a value that can be kept, found {error}"
        else:
            events.append(event)
            continue
        raw = f"{trace_id} {assessment.assessment_id} {assessment.name} {changed}"
        aside.append(QuarantinedRow(agent_id, rule, detail, "mlflow", raw=raw))
    return Read(tuple(events), tuple(aside), next_turn, revised)


def _name(assessment: Any) -> str:
    return f"mlflow:{assessment.assessment_id}"


def _key(assessment: Any, changed: int) -> str:
    return f"{_name(assessment)}:{changed}"


def _changed(assessment: Any) -> int:
    """Return when it was last said, in milliseconds."""
    return int(assessment.last_update_time_ms or assessment.create_time_ms or 0)


def event_of(
    assessment: Any,
    agent_id: str,
    interaction_id: str,
    registry: ModelRegistry,
    changed: int,
    top: int | None = None,
) -> Feedback:
    """Return the vote an assessment is; `top` is where its name's scale ends, if that is known.

    | value | vote |
    |---|---|
    | true, false; up, down, yes, no, good, bad, pass, fail | thumbs |
    | a whole number from 2 to 5, unless it is named `score` | rating |
    | another number, or one named `score` | score, 0 to 1 |
    | 1 | rating where it is named so or others of its name are above, score where below |
    | {"chosen", "rejected"} | preference |
    | an expectation (text, or {"expected_response"}) | correction |
    | other text | comment |

    Raises FeedbackRefused for anything else.
    """
    value = assessment.value
    about: dict[str, Any] = {"interaction_id": interaction_id}
    kind, said = _said(value, assessment.name, top, expected=assessment.expectation is not None)
    if kind is FeedbackKind.preference:
        interaction = _interaction(registry, agent_id, interaction_id)
        about = {"prompt": interaction.prompt, "completion": value["chosen"]}
    source = SOURCES.get(str(assessment.source.source_type))
    if source is None:
        refuse(Rule.unknown_source, f"a source out of {', '.join(SOURCES)}", assessment.source)
    person = assessment.source.source_id
    is_unsigned = not person or (source == "human" and person in NOBODY)
    return Feedback(
        agent_id=agent_id,
        kind=kind,
        idempotency_key=_key(assessment, changed),
        rater_id=None if is_unsigned else hash_rater(agent_id, person),
        source=source,
        origin="mlflow",
        occurred_at=_moment(changed),
        comment=assessment.rationale,
        **about,
        **said,
    )


def _moment(changed: int) -> datetime:
    try:
        return datetime.fromtimestamp(changed / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        refuse(Rule.bad_time, "a moment in milliseconds since 1970", changed)


def _tops(assessments: Iterable[Any]) -> dict[str, int]:
    """Return, of each name whose numbers tell, where its scale ends: 1 or 5.

    MLflow hands every number back as a float, so 1 alone may be the best or the worst.
    """
    below, above = set(), set()
    for assessment in assessments:
        value = assessment.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            below |= {assessment.name} if 0 <= value < 1 else set()
            above |= {assessment.name} if value in (2, 3, 4, 5) else set()
    return {**dict.fromkeys(below - above, 1), **dict.fromkeys(above - below, 5)}


def _said(
    value: Any, name: str, top: int | None, *, expected: bool
) -> tuple[FeedbackKind, dict[str, Any]]:
    """Return an assessment's kind and the fields that hold its value."""
    if expected:
        text = value.get("expected_response") if isinstance(value, dict) else value
        return FeedbackKind.correction, {"text": text}
    if isinstance(value, dict) and {"chosen", "rejected"} <= value.keys():
        return FeedbackKind.preference, {"other_completion": value["rejected"], "choice": "left"}
    if isinstance(value, bool):
        return FeedbackKind.thumbs, {"number": float(value)}
    if isinstance(value, int | float):
        top = {"score": 1, "rating": 5}.get(name.lower(), top)
        if value == 1 and top is None:
            needed = "a number whose scale is known (1 ends one and begins another; call it score "
            refuse(Rule.wrong_type, f"{needed}or rating, or give others of its name)", value)
        rated = top != 1 and value in (1, 2, 3, 4, 5)
        kind = FeedbackKind.rating if rated else FeedbackKind.score
        return kind, {"number": float(value)}
    if isinstance(value, str):
        word = value.strip().lower()
        if word in YES or word in NO:
            return FeedbackKind.thumbs, {"number": float(word in YES)}
        return FeedbackKind.comment, {"text": value}
    refuse(Rule.wrong_type, "true, a number, text or {chosen, rejected}", type(value).__name__)


def _interaction(registry: ModelRegistry, agent_id: str, interaction_id: str) -> Interaction:
    """Return the interaction; another agent's, which anybody may name in a tag, is none of this."""
    from rlhf_pipeline.feedback.store import FeedbackStore

    found = FeedbackStore(registry.ledger.database).interaction(interaction_id)
    if found is None or found.agent_id != agent_id:
        refuse(Rule.unknown_interaction, f"an interaction of agent {agent_id!r}", interaction_id)
    return found


def _assessments(traces: Iterable[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield interaction id, trace id and assessment, of the traces that name an interaction.

    Not the issues that MLflow links to a trace among its assessments: these say nothing of it.
    """
    for trace in traces:
        interaction_id = trace.info.tags.get(INTERACTION)
        for assessment in trace.info.assessments if interaction_id else ():
            if assessment.feedback is not None or assessment.expectation is not None:
                yield interaction_id, trace.info.trace_id, assessment


def _looked_at(registry: ModelRegistry, agent_id: str, turn_ms: int) -> tuple[Collection[Any], int]:
    """Return the newest traces and those whose turn it is, each once, and where the next begins."""
    with mlflow_refusals("reading assessments"):
        place = registry.known_experiment(agent_id)
        if place is None:
            return (), 0
        newest = list(islice(traces_in(registry, place), NEWEST))
        found = {trace.info.trace_id: trace for trace in newest}
        if len(newest) < NEWEST:
            return found.values(), 0  # that is all there are
        last_ms = turn_ms
        for n, trace in enumerate(traces_in(registry, place, "ASC", turn_ms)):
            said_ms = int(trace.info.request_time)
            if n >= IN_TURN and said_ms > last_ms:  # those of one moment stay together
                return found.values(), said_ms
            found[trace.info.trace_id], last_ms = trace, said_ms
        return found.values(), 0


def traces_in(
    registry: ModelRegistry,
    experiment: str,
    order: Literal["ASC", "DESC"] = "DESC",
    since_ms: int = 0,
) -> Iterator[Any]:
    """Yield an experiment's traces by their time, without their spans, a page at a call."""
    token: str | None = None
    while True:
        page = registry.client.search_traces(
            locations=[experiment],
            filter_string=f"trace.timestamp_ms >= {since_ms}",
            order_by=[f"timestamp_ms {order}"],
            include_spans=False,
            max_results=PAGE,
            page_token=token,
        )
        yield from page
        token = page.token
        if not token:
            return
