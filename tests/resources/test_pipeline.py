"""What the resource decides: whose settings hold, and when a version is promoted by itself."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
import yaml
from pydantic import ValidationError

from resources.pipeline import (
    LEARNING_RATE,
    MAX_STEPS,
    MOST_STEPS,
    Pipeline,
    asked_for,
    bootstrap_mark,
    code_version,
    count_lines,
    flattened,
)
from resources.worker import same_work, specification, turn_from
from rlhf_pipeline import database as db
from rlhf_pipeline.config import UpstreamSettings
from rlhf_pipeline.erasure import erase
from rlhf_pipeline.errors import ClaimLost, ConfigError, RegistryError
from rlhf_pipeline.experiment.book import ExperimentBook, State
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.files import folder_sha256, write_text
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.serving.policies_api import TrainBody
from rlhf_pipeline.stages import BEGAN, Turn
from tests.assets.world import write_recipe

PASSED = {"passed": True, "results": []}
REFUSED = {"passed": False, "results": []}
PAUSED = {
    "passed": True,
    "results": [{"verdict": "pause", "words": "prompt_drift 0.3, limit 0.2"}],
}


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "s", promotion={"automatic": False})
    return Pipeline(recipe=str(recipe))


def context_of(run_id: str, parent: str | None = None) -> Any:
    """Return what an asset of agent `a` is given; `parent` is the run that it goes on with."""
    run = SimpleNamespace(run_id=run_id, root_run_id=parent, parent_run_id=parent, tags={})
    return SimpleNamespace(has_partition_key=True, partition_key="a", run=run)


def judged(pipeline: Pipeline, tmp_path: Path, gate: dict[str, Any]) -> Turn:
    """Return a turn of agent `a` whose version 1 the gate has judged."""
    pipeline.store.ensure_agent("a")
    claim = pipeline.claims.claim("a", "f" * 64, 1, holder="run", asked_by="person")
    ledger: PromotionLedger = pipeline.ledger
    common: dict[str, Any] = {"lineage": {}, "token": claim.token}
    folder = pipeline._folder_of(claim, pipeline.settings("a"))
    ledger.add_baseline(
        "a", label="v0", path=tmp_path / "0", files={"w": "0"}, actor="test", **common
    )
    ledger.add_version(
        "a",
        label="v1",
        path=folder / "ppo" / "policy",
        files={"w": "1"},
        gate=gate,
        fingerprint=claim.fingerprint,
        **common,
    )
    return pipeline._turn(claim)


def test_an_agent_may_have_a_recipe_of_its_own(pipeline: Pipeline, tmp_path: Path) -> None:
    own = write_recipe(tmp_path / "own.yaml", tmp_path / "s", promotion={"automatic": True})
    pipeline.store.ensure_agent("own", recipe=str(own))
    pipeline.store.ensure_agent("plain")
    assert pipeline.settings("own").promotion.automatic
    assert not pipeline.settings("plain").promotion.automatic
    assert not pipeline.settings("never heard of").promotion.automatic


def test_an_agents_own_recipe_is_at_work_where_the_others_are(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    places = {
        "state_dir": str(tmp_path / "s"),
        "database_url": f"sqlite:///{tmp_path}/elsewhere/feedback.db",
        "mlflow_uri": "http://127.0.0.1:1",
        "serving": {"upstreams": {"own": {"url": "http://127.0.0.1:9/v1", "model": "m"}}},
    }
    recipe.write_text(yaml.safe_dump(places))
    own = tmp_path / "own.yaml"
    own.write_text(f"state_dir: {tmp_path}/own\npromotion: {{automatic: true}}")
    pipeline = Pipeline(recipe=str(recipe))
    pipeline.store.ensure_agent("own", recipe=str(own))
    settings = pipeline.settings("own")
    assert settings.promotion.automatic
    assert list(settings.serving.upstreams) == ["own"]
    assert settings.state_dir == tmp_path / "s"
    assert settings.resolved_database_url == places["database_url"]
    assert settings.mlflow_uri == places["mlflow_uri"]
    pipeline.database.close()


def test_a_run_may_be_asked_for_with_other_settings(pipeline: Pipeline) -> None:
    claim = pipeline.claims.claim("asked", "f" * 64, 1, holder="run", asked_by="api")
    plain = pipeline._turn(claim).settings
    turn = pipeline._turn(claim, {MAX_STEPS: "3", LEARNING_RATE: "0.0002", "other": "x"})
    ppo = turn.settings.ppo
    assert (ppo.updates, ppo.learning_rate) == (3, 0.0002)
    assert (plain.ppo.updates, plain.ppo.learning_rate) != (3, 0.0002)
    assert ppo.rollouts_per_update == plain.ppo.rollouts_per_update
    assert turn_from(specification(turn)).settings.ppo == ppo  # it reaches the stage's process


@pytest.mark.parametrize(
    ("tag", "found"),
    [
        *((MAX_STEPS, wrong) for wrong in ("lots", "", "-3", "0", "2.5", "100001")),
        *((LEARNING_RATE, wrong) for wrong in ("fast", "0", "-1e-4", "1e9", "nan", "inf")),
    ],
)
def test_a_run_that_asks_for_no_number_is_refused(pipeline: Pipeline, tag: str, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"tag {tag} needed .*, found '{found}'; correct it"):
        asked_for(pipeline.settings(), {tag: found})


def test_what_the_api_takes_of_a_run_the_run_takes(pipeline: Pipeline) -> None:
    most = TrainBody(maxSteps=MOST_STEPS, learningRate=1)
    ppo = asked_for(
        pipeline.settings(), {MAX_STEPS: str(most.maxSteps), LEARNING_RATE: str(most.learningRate)}
    ).ppo
    assert (ppo.updates, ppo.learning_rate) == (MOST_STEPS, 1)
    with pytest.raises(ValidationError):
        TrainBody(maxSteps=MOST_STEPS + 1)


@pytest.mark.parametrize(
    ("gate", "automatic", "words", "champion"),
    [
        (PASSED, None, "version 1 passed and waits for a person: rlhf promote 1", 0),
        (PASSED, True, "champion moved from 0 to 1", 1),
        (PAUSED, True, "version 1 passed; prompt_drift 0.3, limit 0.2, so a person decides", 0),
        (PASSED, False, "version 1 passed and waits for a person", 0),
        (REFUSED, True, "version 1 was refused; version 0 stays", 0),
        (REFUSED, None, "version 1 was refused; version 0 stays", 0),
    ],
)
def test_who_promotes(
    pipeline: Pipeline,
    tmp_path: Path,
    gate: dict[str, Any],
    automatic: bool | None,
    words: str,
    champion: int,
) -> None:
    turn = judged(pipeline, tmp_path, gate)
    pipeline.store.set_agent("a", automatic_promotion=automatic)
    assert pipeline.promote_if_due(turn).startswith(words)
    standing = pipeline.ledger.champion("a")
    assert standing is not None
    assert standing.version == champion


def test_a_turn_that_died_after_its_promotion_is_not_trained_from_its_own_version(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    turn = judged(pipeline, tmp_path, PASSED)
    pipeline.store.set_agent("a", automatic_promotion=True)
    turn = replace(turn, champion=pipeline.ledger.version("a", 0).path)
    assert pipeline.promote_if_due(turn) == "champion moved from 0 to 1"
    pipeline.claims.beat(turn.token, lease=timedelta(seconds=-1))  # and here it died
    again = pipeline.claims.claim("a", turn.fingerprint, 1, holder="run 2", asked_by="watchdog")
    second = pipeline._turn(again)
    # The same specification, so every stage's result is found and nothing is trained.
    ledger = pipeline.ledger
    turn = replace(turn, baseline=second.baseline)  # `judged` began before there was one
    assert second.champion == turn.champion != ledger.version("a", 1).path
    assert same_work("ppo", specification(second)) == same_work("ppo", specification(turn))
    words = "champion moved from 0 to 1, by an attempt that ended before it could say so"
    assert pipeline.promote_if_due(second) == words
    ledger.rollback("a", actor="ann", reason="no")  # a person's word stands
    assert pipeline.promote_if_due(second) == words
    assert [(p.action, p.version) for p in ledger.history("a")][1:] == [
        ("promote", 1),
        ("rollback", 0),
    ]


def test_a_stalled_turn_that_wakes_after_another_ended_it_writes_nothing(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    stalled = judged(pipeline, tmp_path, PASSED)
    pipeline.store.set_agent("a", automatic_promotion=True)
    pipeline.claims.beat(stalled.token, lease=timedelta(seconds=-1))
    claim = pipeline.claims.claim("a", stalled.fingerprint, 1, holder="run 2", asked_by="watchdog")
    pipeline.promote_if_due(pipeline._turn(claim))
    ledger = pipeline.ledger
    ledger.promote("a", 0, actor="ann", reason="worse", expected_champion=1)
    pipeline.claims.finish(claim.token, "done")
    story = ledger.history("a")
    assert [(p.action, p.version, p.token) for p in story] == [
        ("baseline", 0, stalled.token),
        ("promote", 1, claim.token),
        ("promote", 0, None),
    ]
    with pytest.raises(ClaimLost, match=f"found the newer token {claim.token}"):
        pipeline.promote_if_due(stalled)
    with pytest.raises(ClaimLost):
        pipeline.claims.finish(stalled.token, "done")
    assert ledger.history("a") == story


def test_a_turn_asked_for_again_trains_in_a_folder_of_its_own_from_todays_champion(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    turn = judged(pipeline, tmp_path, PASSED)
    pipeline.store.set_agent("a", automatic_promotion=True)
    pipeline.promote_if_due(turn)
    pipeline.claims.finish(turn.token, "done")
    more: dict[str, Any] = {"asked_by": "person", "again": True}
    claim = pipeline.claims.claim("a", turn.fingerprint, 1, holder="run 2", **more)
    second = pipeline._turn(claim)
    assert second.champion == pipeline.ledger.version("a", 1).path
    assert (second.work.name, second.data) == (f"{turn.work.name}-2", turn.data)
    pipeline.claims.finish(claim.token, "failed")
    retried = pipeline.claims.claim("a", turn.fingerprint, 1, holder="run 3", **more)
    assert pipeline._turn(retried).work == second.work


def test_a_retried_promotion_finds_the_experiment_it_began(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    turn = judged(pipeline, tmp_path, PASSED)
    pipeline.store.set_agent("a", automatic_promotion=True)
    experiments = turn.settings.experiments.model_copy(update={"enabled": True})
    turn = replace(turn, settings=turn.settings.model_copy(update={"experiments": experiments}))
    words = pipeline.promote_if_due(turn)
    assert "version 1 passed and meets" in words
    assert pipeline.promote_if_due(turn) == words


def test_a_version_whose_people_an_upstream_answers_waits_for_a_person(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    turn = judged(pipeline, tmp_path, PASSED)
    pipeline.store.set_agent("a", automatic_promotion=True)
    upstream = UpstreamSettings(url="http://127.0.0.1:9/v1", model="m")
    changed = {
        "experiments": turn.settings.experiments.model_copy(update={"enabled": True}),
        "serving": turn.settings.serving.model_copy(update={"upstreams": {"a": upstream}}),
    }
    turn = replace(turn, settings=turn.settings.model_copy(update=changed))
    assert "an experiment would reach nobody" in pipeline.promote_if_due(turn)
    assert ExperimentBook(pipeline.database).history("a") == []
    champion = pipeline.ledger.champion("a")
    assert champion is not None
    assert champion.version == 0


def take_in_a_vote(pipeline: Pipeline, tmp_path: Path) -> None:
    votes = tmp_path / "votes.jsonl"
    vote = {"kind": "thumbs", "prompt": "Why?", "completion": "Because.", "value": "up"}
    write_text(votes, json.dumps({**vote, "rater": "ann"}))
    ingest(pipeline.store, votes, "a")


def another(ledger: PromotionLedger, tmp_path: Path) -> ModelVersion:
    """Return a version that passed the gate, of votes of its own."""
    return ledger.add_version(
        "a",
        label="v9",
        path=tmp_path / "9",
        files={"w": "9"},
        lineage={},
        gate=PASSED,
        fingerprint="e" * 64,
    )


def test_no_turn_ends_an_experiment_that_a_person_began_meanwhile(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    turn = judged(pipeline, tmp_path, PASSED)
    pipeline.store.set_agent("a", automatic_promotion=True)
    other = another(pipeline.ledger, tmp_path)
    book = ExperimentBook(pipeline.database)
    book.start("a", champion=0, challenger=other.version, share=0.5, actor="ann")
    assert not turn.settings.experiments.enabled
    assert pipeline.promote_if_due(turn) == (
        f"version 1 passed; version {other.version} is in an experiment, so this one waits for a "
        "person"
    )
    assert book.running("a") is not None


def test_what_beat_another_champion_than_todays_is_a_persons_to_promote(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    turn = judged(pipeline, tmp_path, PASSED)
    ledger = pipeline.ledger
    pipeline.store.set_agent("a", automatic_promotion=True)
    other = another(ledger, tmp_path)
    ledger.promote("a", other.version, actor="ann", reason="far better", expected_champion=0)
    said = pipeline.promote_if_due(turn)
    assert said == (
        "version 1 passed against version 0, but version 2 is the champion now, so a person decides"
    )
    champion = ledger.champion("a")
    assert champion is not None
    assert champion.version == 2


def test_a_turn_goes_on_from_the_champion_that_it_began_with(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    """A person promoted its version before it could end: from that one it would train over it."""
    first = judged(pipeline, tmp_path, PASSED)
    pipeline.claims.beat(first.token, lease=timedelta(seconds=-1))
    pipeline.ledger.promote("a", 1, actor="ann", reason="reads well", expected_champion=0)
    claim = pipeline.claims.claim("a", first.fingerprint, 1, holder="run 2", asked_by="watchdog")
    again = pipeline._turn(claim)
    assert again.champion == first.champion == tmp_path / "0"
    assert same_work("ppo", specification(again)) == same_work("ppo", specification(first))
    pipeline.store.set_agent("a", automatic_promotion=True)
    assert pipeline.promote_if_due(again) == "version 1 is the champion"


def test_a_turn_ends_with_the_baseline_that_it_began_with(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    first = judged(pipeline, tmp_path, PASSED)
    pipeline.ledger.promote("a", 1, actor="ann", reason="reads well", expected_champion=0)
    pipeline.ledger.reset_baseline("a", actor="ann", reason="where we want to be")
    claim = pipeline.claims.held("a")
    assert claim is not None
    assert pipeline._turn(claim).baseline == first.baseline == tmp_path / "0"
    (began,) = first.work.glob("*.json")
    told = {"champion": 0, "baseline": 0, "token": claim.token}
    assert json.loads(began.read_text()) == told
    began.write_text('{"champion": 0}')  # as older code wrote it
    again = pipeline._turn(claim)
    assert (again.champion, again.baseline) == (
        tmp_path / "0",
        pipeline.ledger.version("a", 1).path,
    )


def test_another_attempt_does_not_begin_with_who_was_rolled_back(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    first = judged(pipeline, tmp_path, PASSED)
    ledger, claims = pipeline.ledger, pipeline.claims
    ledger.promote("a", 1, actor="ann", reason="reads well", expected_champion=0)
    claims.finish(first.token, "done")
    claim = claims.claim("a", "e" * 64, 2, holder="run 2", asked_by="sensor")
    begun = pipeline._turn(claim)
    assert begun.champion == ledger.version("a", 1).path
    ledger.rollback("a", actor="watch", reason="it fails")
    assert pipeline._turn(claim).champion == begun.champion  # of one attempt all steps agree
    claims.finish(claim.token, "failed")
    retried = claims.claim("a", "e" * 64, 2, holder="run 3", asked_by="sensor")
    assert pipeline._turn(retried).champion == tmp_path / "0"
    assert pipeline._turn(claim).champion == tmp_path / "0"  # who stalled takes nothing back
    assert json.loads((begun.work / BEGAN).read_text())["token"] == retried.token


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            "rolled_back",
            "version 1 passed, but was rolled back in an experiment (it is over); version 0 stays",
        ),
        (
            "timed_out",
            "version 1 passed and has met people; that timed out: it is over; a person decides",
        ),
    ],
)
def test_an_experiment_that_ended_is_not_begun_again(
    pipeline: Pipeline, tmp_path: Path, state: State, words: str
) -> None:
    turn = judged(pipeline, tmp_path, PASSED)
    pipeline.store.set_agent("a", automatic_promotion=True)
    met = turn.settings.experiments.model_copy(update={"enabled": True})
    turn = replace(turn, settings=turn.settings.model_copy(update={"experiments": met}))
    assert "meets" in pipeline.promote_if_due(turn)
    book = ExperimentBook(pipeline.database)
    running = book.running("a")
    assert running is not None
    book.end(running, state, "it is over")
    assert pipeline.promote_if_due(turn) == words
    assert [e.state for e in book.history("a")] == [state]


@pytest.mark.parametrize("met", [False, True])
def test_what_was_rolled_back_is_not_promoted_again(
    pipeline: Pipeline, tmp_path: Path, met: bool
) -> None:
    """As where the same votes are trained on again, and come to the same files."""
    turn = judged(pipeline, tmp_path, PASSED)
    ledger, book = pipeline.ledger, ExperimentBook(pipeline.database)
    pipeline.store.set_agent("a", automatic_promotion=True)
    trials = turn.settings.experiments.model_copy(update={"enabled": met})
    turn = replace(turn, settings=turn.settings.model_copy(update={"experiments": trials}))
    ledger.promote("a", 1, actor="ann", reason="reads well", expected_champion=0)
    ledger.rollback("a", actor="ann", reason="it does not")
    said = pipeline.promote_if_due(turn)
    assert said == "version 1 passed, but was rolled back from; version 0 stays"
    assert book.history("a") == []


def test_the_heartbeat_goes_on_between_steps_until_the_run_ends(pipeline: Pipeline) -> None:
    def beating(token: int) -> bool:
        return f"claim-{token}" in {thread.name for thread in threading.enumerate()}

    pipeline.store.ensure_agent("a")
    claim = pipeline.claims.claim("a", "f" * 64, 1, holder="run", asked_by="person")
    for _ in range(2):  # each step says so
        pipeline._keep_alive(claim.token)
        assert beating(claim.token)
    pipeline.teardown_after_execution(dg.build_init_resource_context())
    assert not beating(claim.token)
    pipeline.claims.finish(claim.token, "failed")
    with pytest.raises(ClaimLost):
        pipeline._keep_alive(claim.token)
    assert not beating(claim.token)


def test_no_turn_begins_with_files_that_are_not_the_registered_ones(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    folder = tmp_path / "0"
    folder.mkdir()
    weights = folder / "w"
    weights.write_text("as they were")
    pipeline.store.ensure_agent("a")
    pipeline.ledger.add_baseline(
        "a", label="v0", path=folder, files=folder_sha256(folder), lineage={}, actor="test"
    )
    context = context_of("run")
    weights.write_text("as they were not")
    with pytest.raises(dg.Failure, match="version 0") as failed:
        pipeline.begin_turn(context, "f" * 64, 1)
    assert not failed.value.allow_retries
    held = pipeline.claims.held("a")
    assert held is not None
    pipeline.claims.finish(held.token, "failed")
    assert not list(pipeline.settings().state_dir.rglob("began.json"))
    weights.write_text("as they were")
    assert pipeline.begin_turn(context, "f" * 64, 1).champion == folder
    pipeline.teardown_after_execution(dg.build_init_resource_context())


@pytest.mark.parametrize("made_from", ["tiny", "here", "gpt2", None])
def test_no_turn_begins_under_a_recipe_that_names_another_base(
    pipeline: Pipeline, tmp_path: Path, made_from: str | None
) -> None:
    """And where nobody can tell, the run says so, and the version what it was made from."""
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    base = str(folder) if made_from == "here" else made_from
    told = {} if base is None else {"base": base}
    if made_from == "gpt2":
        told |= {"started_from": "gpt2", "base_digest": "gpt2"}
    pipeline.store.ensure_agent("a")
    pipeline.ledger.add_baseline(
        "a", label="v0", path=folder, files=folder_sha256(folder), lineage=told, actor="test"
    )
    warned: list[str] = []
    context = context_of("run")
    context.log = SimpleNamespace(warning=warned.append)
    recipe = write_recipe(tmp_path / "other.yaml", tmp_path / "s", policy={"base": "our/gpt2"})
    other = Pipeline(recipe=str(recipe))
    if made_from == "tiny":
        with pytest.raises(
            dg.Failure, match=r"needed policy\.base 'tiny', .* 'our/gpt2'"
        ) as failed:
            other.begin_turn(context, "f" * 64, 1)
        assert not failed.value.allow_retries
        assert "a new agent's name" in str(failed.value)
        assert not list(tmp_path.rglob("began.json"))
        held = pipeline.claims.held("a")
        assert held is not None
        pipeline.claims.finish(held.token, "failed")
        context.run.run_id = "the next"
        turn = pipeline.begin_turn(context, "f" * 64, 1)
    else:
        turn = other.begin_turn(context, "f" * 64, 1)
        assert len(warned) == (base is not None)
        assert all("nobody can tell" in words for words in warned)
        assert other.lineage(turn)["base"] == (base or "our/gpt2")
    pipeline.teardown_after_execution(dg.build_init_resource_context())
    other.teardown_after_execution(dg.build_init_resource_context())
    assert turn.champion == folder


def test_a_turn_begins_where_only_mlflow_has_the_champions_files(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "model.safetensors").write_text("as it was")
    pipeline.store.ensure_agent("a")
    version = pipeline.registry.register_baseline("a", folder, label="v0", lineage={}, actor="test")
    shutil.rmtree(folder)
    context = context_of("run")
    turn = pipeline.begin_turn(context, "f" * 64, 1)
    pipeline.teardown_after_execution(dg.build_init_resource_context())
    assert turn.champion == folder
    assert folder_sha256(folder) == dict(version.files)


def test_a_turn_that_failed_lets_its_claim_go_though_mlflow_is_away(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> int:
        raise RegistryError("MLflow is away")

    monkeypatch.setattr(ModelRegistry, "end_runs", away)
    claim = pipeline.claims.claim("a", "f" * 64, 1, holder="run", asked_by="person")
    pipeline.end_without_verdict(claim, "the disk is full", "FAILED")
    [closed] = pipeline.claims.history("a")
    assert (closed.state, closed.reason) == ("failed", "the disk is full")
    with pytest.raises(ClaimLost):
        pipeline.end_without_verdict(claim, "again", "FAILED")


@pytest.mark.parametrize("ahead", [timedelta(0), timedelta(minutes=10)])
def test_no_failed_run_goes_on_with_what_had_learned_from_somebody_erased_since(
    pipeline: Pipeline, tmp_path: Path, ahead: timedelta
) -> None:
    """Nor where the clock of who trained was ahead of that of who erases."""
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "model.safetensors").write_text("as it was")
    vote = {"kind": "thumbs", "prompt": "Why?", "completion": "Because.", "value": "up"}
    votes = tmp_path / "votes.jsonl"
    write_text(votes, json.dumps({**vote, "rater": "ann"}))
    ingest(pipeline.store, votes, "a")
    pipeline.registry.register_baseline("a", folder, label="v0", lineage={}, actor="test")
    context = context_of("run")
    mark = snapshot.fingerprint(pipeline.database, "a", 1)
    pipeline.begin_turn(context, mark, 1)
    snapshot.take(pipeline.database, "a", 1, tmp_path / snapshot.FILE)
    claim = pipeline.claims.held("a")
    assert claim is not None
    pipeline.end_without_verdict(claim, "disk full", "FAILED")
    once_more = context_of("again", parent="run")
    with pipeline.turn(once_more) as turn:
        assert turn.token != claim.token
    claim = pipeline.claims.held("a")
    assert claim is not None
    pipeline.end_without_verdict(claim, "disk full", "FAILED")
    with pipeline.database.write() as connection:
        moved = db.claims.update().where(db.claims.c.token == claim.token)
        connection.execute(moved.values(created_at=claim.created_at + ahead))
    assert erase(pipeline.settings(), pipeline.registry, "ann", "a")["erasures"]
    with (
        pytest.raises(dg.Failure, match="somebody was erased since") as failed,
        pipeline.turn(once_more),
    ):
        pass
    assert not failed.value.allow_retries
    assert pipeline.claims.held("a") is None
    pipeline.teardown_after_execution(dg.build_init_resource_context())


def test_no_failed_run_goes_on_with_votes_that_were_taken_back(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    take_in_a_vote(pipeline, tmp_path)
    claim = pipeline.claims.claim("a", "f" * 64, 1, holder="run", asked_by="person")
    pipeline.end_without_verdict(claim, "disk full", "FAILED")
    assert pipeline.store.withdraw("a", pipeline.store.keys_from("a", "votes.jsonl")) == (1, 0)
    with (
        pytest.raises(dg.Failure, match="some were taken back since") as failed,
        pipeline.turn(context_of("again", parent="run")),
    ):
        pass
    assert not failed.value.allow_retries
    assert pipeline.claims.held("a") is None


def test_what_learned_from_votes_that_were_taken_back_meanwhile_waits_for_a_person(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    """Where chosen and rejected are swapped, the same file's pairs judge its candidate."""
    take_in_a_vote(pipeline, tmp_path)
    turn = judged(pipeline, tmp_path, PASSED)
    pipeline.store.set_agent("a", automatic_promotion=True)
    assert pipeline.store.withdraw("a", pipeline.store.keys_from("a", "votes.jsonl")) == (1, 0)
    assert pipeline.promote_if_due(turn) == (
        "version 1 passed, but votes that it learned from were taken back since, so a person "
        "decides"
    )
    champion = pipeline.ledger.champion("a")
    assert champion is not None
    assert champion.version == 0


def test_promoting_needs_a_champion_to_replace(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.store.ensure_agent("a")
    claim = pipeline.claims.claim("a", "f" * 64, 1, holder="run", asked_by="person")
    with pytest.raises(RegistryError, match="found 0 versions and no champion of agent a"):
        pipeline.promote_if_due(pipeline._turn(claim))


def test_small_things(tmp_path: Path) -> None:
    assert flattened({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}
    (tmp_path / "f").write_text("one\ntwo\n")
    assert count_lines(tmp_path / "f") == 2
    assert bootstrap_mark("a") != bootstrap_mark("b")
    assert code_version() == "unknown" or len(code_version().split("+")[0]) >= 7
