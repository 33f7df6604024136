"""What people say about a trace in MLflow becomes a vote, late or changed, each once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from automation.assessments import assessments_in_mlflow
from resources.pipeline import Pipeline
from rlhf_pipeline.records import Interaction, now, user_prompt, uuid7
from rlhf_pipeline.registry import traces
from rlhf_pipeline.registry.traces import log_interaction
from tests.assets.world import write_recipe

AGENT = "shop"


class Traced:
    """An agent whose interactions are traces, and a person who labels them in MLflow."""

    def __init__(self, folder: Path, *, log_traces: bool = True, **pages: Any) -> None:
        recipe = folder / "minute.yaml"
        write_recipe(recipe, folder / "state", pages={"log_traces": log_traces, **pages})
        self.pipeline = Pipeline(recipe=str(recipe))
        self.pipeline.store.ensure_agent(AGENT)
        self.client = self.pipeline.registry.client._tracing_client
        self.cursor: str | None = None

    def say(self, completion: str, when: datetime | None = None) -> str:
        prompt = user_prompt("how much?")
        interaction = Interaction(uuid7(), AGENT, prompt, completion, 0, when or now())
        self.pipeline.store.add_interactions([interaction])
        return log_interaction(self.pipeline.registry, interaction)

    def label(self, trace_id: str, name: str, value: Any, *, kind: str = "HUMAN") -> Any:
        from mlflow.entities import AssessmentSource, Feedback

        source = AssessmentSource(kind, "ann")
        return self.client.log_assessment(trace_id, Feedback(name=name, value=value, source=source))

    def expect(self, trace_id: str, value: Any) -> None:
        from mlflow.entities import AssessmentSource, Expectation

        source = AssessmentSource("HUMAN", "ann")
        said = Expectation(name="expected_response", value=value, source=source)
        self.client.log_assessment(trace_id, said)

    def tick(self) -> str:
        resources = {"pipeline": self.pipeline}
        with dg.build_sensor_context(cursor=self.cursor, resources=resources) as context:
            result = assessments_in_mlflow(context)
        if isinstance(result, dg.SkipReason):
            return str(result.skip_message)
        assert isinstance(result, dg.SensorResult)
        self.cursor = result.cursor
        return str(result.skip_reason.skip_message if result.skip_reason else "")

    def votes(self) -> list[tuple[Any, ...]]:
        query = (
            "SELECT kind, number, text, completion, other_completion, choice, source "
            "FROM effective_feedback ORDER BY seq"
        )
        with self.pipeline.database.read() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(query).all()]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    made = Traced(tmp_path)
    yield made
    made.pipeline.database.close()


def test_every_kind_of_assessment_is_a_vote_once(traced: Traced) -> None:
    assert traced.tick() == "nothing was assessed since the last look"
    first, second = traced.say("9 coins"), traced.say("10 coins")
    traced.label(first, "thumbs", True)
    traced.label(first, "stars", 4)
    traced.label(first, "score", 1)
    traced.label(first, "why", "polite")
    traced.expect(first, "nine coins, please")
    traced.label(second, "rank", {"chosen": "A", "rejected": "B"})
    traced.label(second, "verdict", "no", kind="LLM_JUDGE")
    traced.label(second, "stars", 17)
    assert traced.tick() == "shop: 7 new votes, 1 set aside"
    assert set(traced.votes()) == {
        ("thumbs", 1.0, None, None, None, None, "human"),
        ("rating", 4.0, None, None, None, None, "human"),
        ("score", 1.0, None, None, None, None, "human"),
        ("comment", None, "polite", None, None, None, "human"),
        ("correction", None, "nine coins, please", None, None, None, "human"),
        ("preference", None, None, "A", "B", "left", "human"),
        ("thumbs", 0.0, None, None, None, None, "model"),
    }
    assert traced.pipeline.store.quarantined(AGENT) == {"value_out_of_range": 1}
    before = traced.votes()
    assert traced.tick() == "nothing was assessed since the last look"
    traced.cursor = None  # as after a lost cursor: everything is read again
    assert traced.tick() == "nothing was assessed since the last look"
    assert traced.votes() == before


def test_what_is_said_late_or_changed_is_heard(traced: Traced) -> None:
    from mlflow.entities import Feedback

    old, new = traced.say("old"), traced.say("new")
    traced.label(new, "thumbs", True)
    traced.tick()
    time.sleep(0.01)
    late = traced.label(old, "thumbs", True)  # on an older trace than the last look saw
    assert traced.tick().startswith("shop: 1 new votes")
    time.sleep(0.01)
    changed = Feedback(name="thumbs", value=False, source=late.source)
    traced.client.update_assessment(old, late.assessment_id, changed)
    assert traced.tick().startswith("shop: 1 new votes")
    assert [vote[1] for vote in traced.votes()] == [1.0, 0.0]


@pytest.mark.parametrize("between", [False, True], ids=["one look", "a look between"])
@pytest.mark.parametrize("first", ["ann", ""], ids=["signed", "unsigned"])
@pytest.mark.parametrize("how", ["overridden", "overridden by another kind", "changed"])
def test_what_is_said_no_more_counts_no_more(
    traced: Traced, first: str, how: str, between: bool
) -> None:
    from mlflow.entities import AssessmentSource, Feedback

    source, trace = AssessmentSource("HUMAN", first), traced.say("9 coins")
    said = Feedback(name="thumbs", value=True, source=source)
    before = traced.client.log_assessment(trace, said)
    if between:
        traced.tick()
    time.sleep(0.01)
    value = 2.0 if how == "overridden by another kind" else False
    if how == "changed":
        after = Feedback(name="thumbs", value=value, source=source)
        traced.client.update_assessment(trace, before.assessment_id, after)
    else:  # as MLflow's page does it, which knows nobody's name
        nobody = AssessmentSource("HUMAN", "")
        after = Feedback("thumbs", value, source=nobody, overrides=before.assessment_id)
        traced.client.log_assessment(trace, after)
    traced.tick()
    assert [vote[1] for vote in traced.votes()] == [value]
    assert traced.tick() == "nothing was assessed since the last look"


def test_people_whom_mlflow_names_nobody_for_are_not_one(traced: Traced) -> None:
    """Its page signs everything as `User`, and its calls as `default`."""
    from mlflow.entities import AssessmentSource, Feedback

    trace = traced.say("9 coins")
    for name in ("User", "User", "default", "ann", "ann"):
        said = Feedback("thumbs", True, source=AssessmentSource("HUMAN", name))
        traced.client.log_assessment(trace, said)
    for name in ("User", "default", "default"):
        said = Feedback("thumbs", False, source=AssessmentSource("LLM_JUDGE", name))
        traced.client.log_assessment(trace, said)
    traced.tick()
    assert sorted(vote[1] for vote in traced.votes()) == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert traced.tick() == "nothing was assessed since the last look"


def test_only_what_is_named_counts_where_names_are_told(tmp_path: Path) -> None:
    traced = Traced(tmp_path, assessments=["correct", "expected_response"])
    trace = traced.say("9 coins")
    traced.label(trace, "correct", True)
    traced.label(trace, "too_long", False)
    traced.expect(trace, "8 coins")
    traced.tick()
    assert [vote[:3] for vote in traced.votes()] == [
        ("thumbs", 1.0, None),
        ("correction", None, "8 coins"),
    ]
    traced.pipeline.teardown_after_execution(dg.build_init_resource_context())


def test_of_two_answers_read_in_one_look_the_last_word_counts(traced: Traced) -> None:
    from mlflow.entities import Feedback

    trace = traced.say("9 coins")
    first = traced.label(trace, "is it kind?", False)
    time.sleep(0.01)
    traced.label(trace, "is it right?", False)
    time.sleep(0.01)
    changed = Feedback(name="is it kind?", value=True, source=first.source)
    traced.client.update_assessment(trace, first.assessment_id, changed)
    traced.tick()
    assert [vote[1] for vote in traced.votes()] == [1.0]


@pytest.mark.parametrize(
    ("name", "others", "kind"),
    [
        ("helpful", (0.0, 0.9), "score"),
        ("stars", (4, 5), "rating"),
        ("rating", (), "rating"),
        ("unheard of", (), None),
        ("both", (0.5, 4), None),
    ],
)
def test_a_one_is_the_best_or_the_worst_as_its_name_is_used(
    traced: Traced, name: str, others: tuple[float, ...], kind: str | None
) -> None:
    for number in others:
        traced.label(traced.say(f"answer {number}"), name, number)
    traced.label(traced.say("the answer"), name, 1)
    traced.tick()
    assert [vote[0] for vote in traced.votes() if vote[1] == 1] == ([kind] if kind else [])
    assert traced.pipeline.store.quarantined(AGENT) == ({} if kind else {"wrong_type": 1})


def test_what_is_said_about_an_old_trace_is_heard_in_its_turn(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in (("NEWEST", 2), ("IN_TURN", 3), ("PAGE", 2)):
        monkeypatch.setattr(traces, name, number)
    days = (400, 90, 60, 60, 60, 60, *range(40, 25, -1))  # four of one moment: longer than a turn
    noon = now()
    said = [traced.say(f"{n}", noon - timedelta(days=n)) for n in days]
    read: list[str] = []
    search = traced.pipeline.registry.client.search_traces

    def searched(**asked: Any) -> Any:
        page = search(**asked)
        read.extend(trace.info.trace_id for trace in page)
        return page

    monkeypatch.setattr(traced.pipeline.registry.client, "search_traces", searched)
    for labelled in (said[0], said[4], said[12], said[-1], said[1]):
        traced.label(labelled, "thumbs", True)
        told = []
        for _ in range(-(-len(said) // 3) + 1):
            before = len(read)
            told.append(traced.tick())
            assert (
                len(read) - before <= 2 + 3 + 3 + 2
            )  # newest, turn, of one moment, rest of a page
        assert told.count("shop: 1 new votes, 0 set aside") == 1
        assert told.count("nothing was assessed since the last look") == len(told) - 1
    assert set(read) == set(said)
    assert len(traced.votes()) == 5


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ({"value": 10**400}, "wrong_type"),
        ({"value": True, "last_update_time_ms": 10**18}, "bad_time"),
    ],
)
def test_what_cannot_be_a_vote_is_set_aside_and_the_others_are_heard(
    traced: Traced, said: dict[str, Any], rule: str
) -> None:
    from mlflow.entities import AssessmentSource, Feedback, IssueReference

    source, trace = AssessmentSource("HUMAN", "ann"), traced.say("9 coins")
    issue = IssueReference(issue_id="iss-1", issue_name="rude", source=source)
    traced.client.log_assessment(trace, issue)
    traced.client.log_assessment(trace, Feedback(name="odd", source=source, **said))
    traced.label(trace, "thumbs", True)
    assert traced.tick() == "shop: 1 new votes, 1 set aside"
    assert traced.pipeline.store.quarantined(AGENT) == {rule: 1}


def test_a_preference_takes_no_prompt_of_another_agent(traced: Traced) -> None:
    theirs = Interaction(uuid7(), "bank", user_prompt("my balance?"), "4711", 0, now())
    traced.pipeline.store.ensure_agent("bank")
    traced.pipeline.store.add_interactions([theirs])
    trace = traced.say("9 coins")
    traced.client.set_trace_tag(trace, traces.INTERACTION, theirs.interaction_id)
    traced.label(trace, "rank", {"chosen": "A", "rejected": "B"})
    assert traced.tick() == "shop: 0 new votes, 1 set aside"
    assert traced.pipeline.store.quarantined(AGENT) == {"unknown_interaction": 1}


def test_an_agent_that_cannot_be_looked_at_keeps_no_other_from_it(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    interaction = Interaction(uuid7(), "bank", user_prompt("how much?"), "9 coins", 0, now())
    traced.pipeline.store.ensure_agent("bank")  # after the shop, so looked at after it
    traced.pipeline.store.add_interactions([interaction])
    traced.label(log_interaction(traced.pipeline.registry, interaction), "thumbs", True)
    read = traces.read_assessments

    def fails_for_the_shop(registry: Any, agent_id: str, *given: Any) -> traces.Read:
        if agent_id == AGENT:
            raise ValueError("boom")
        return read(registry, agent_id, *given)

    monkeypatch.setattr(traces, "read_assessments", fails_for_the_shop)
    assert "shop: ValueError: boom; bank: 1 new votes" in traced.tick()
    assert "bank" in (traced.cursor or "")  # its turn moves on
    with pytest.raises(RuntimeError, match=r"shop: ValueError: boom"):
        traced.tick()  # nothing does any more
    assert len(traced.votes()) == 1


def test_without_traces_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    assert "log_traces is off" in Traced(tmp_path, log_traces=False).tick()
