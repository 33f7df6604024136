"""What turns do around the training: verdicts, refusals, drift, retries. Stages are replayed."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from automation.dead import ASSETS
from resources.compute import Compute
from resources.pipeline import MAX_STEPS, Pipeline, bootstrap_mark
from rlhf_pipeline import database as db
from rlhf_pipeline.definitions import definitions
from rlhf_pipeline.erasure import erase
from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.evaluation.facts import DRIFT
from rlhf_pipeline.feedback import datasets, drift, snapshot, validation
from rlhf_pipeline.feedback.claims import Claim
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import read_json
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    Message,
    hash_rater,
    now,
    prompt_to_json,
    user_prompt,
    uuid7,
)
from rlhf_pipeline.registry.reasons import turn_of
from tests.assets.world import (
    RECIPE,
    FirstTurn,
    Loop,
    chat,
    failures,
    going_on,
    replaying,
    save_alternating,
    write_recipe,
)

SNAPSHOT = "feedback_snapshot"
DATA = ("preference_pairs", "reward_examples", "sft_examples", "evaluation_prompts")
STRICT = {"gate": {"score_vs_baseline": 1000.0}}


@pytest.fixture(scope="module")
def settled(loop: Loop, first_turn: FirstTurn) -> str:
    """An agent with version 0 from seeds alone, then one turn."""
    agent = loop.agent("settled")
    compute = replaying(first_turn.work)
    result = loop.run("bootstrap", agent, compute=compute)
    assert result.success, failures(result)
    [claim] = loop.pipeline.claims.history(agent)
    assert (claim.fingerprint, claim.state) == (bootstrap_mark(agent), "done")
    assert [v.label for v in loop.pipeline.ledger.versions(agent)] == ["v0"]
    chat(loop.pipeline.store, agent, 80)
    result = loop.run("retrain", agent, compute=compute)
    assert result.success, failures(result)
    [event] = result.asset_materializations_for_node("sft_policy")
    assert "the baseline is fixed" in str(event.metadata["trained"].value)
    return agent


def verdict(result: dg.ExecuteInProcessResult) -> str:
    [event] = result.asset_materializations_for_node("promotion")
    return str(event.metadata["verdict"].value)


def evaluation_of(result: dg.ExecuteInProcessResult, check: str) -> dg.AssetCheckEvaluation:
    [found] = [e for e in result.get_asset_check_evaluations() if e.check_name == check]
    return found


def failed_steps(result: dg.ExecuteInProcessResult) -> list[str]:
    return [str(e.step_key) for e in result.all_events if e.is_step_failure]


def test_a_refused_candidate_is_registered_and_the_run_succeeds(
    loop: Loop, first_turn: FirstTurn
) -> None:
    agent = loop.agent("refused", promotion={"automatic": True, **STRICT})
    chat(loop.pipeline.store, agent, 80)
    result = loop.run("retrain", agent, compute=replaying(first_turn.work))
    assert result.success, failures(result)
    gate = evaluation_of(result, "gate_lets_it_through")
    assert not gate.passed
    assert gate.severity is dg.AssetCheckSeverity.WARN
    assert "needed > 1000" in str(gate.metadata["reasons"].value)
    version = loop.version(agent, 1)
    assert version.gate is not None
    assert version.gate["passed"] is False
    assert [p.action for p in loop.pipeline.ledger.history(agent)] == ["baseline"]
    assert loop.aliases(agent) == {"champion": 0}
    assert verdict(result) == "version 1 was refused; version 0 stays"
    [claim] = loop.pipeline.claims.history(agent)
    assert claim.state == "done"
    client = loop.pipeline.registry.client
    tags = client.get_model_version(f"rlhf-{agent}", version.mlflow_version).tags
    assert tags["rlhf.gate"] == "refused"
    assert "needed > 1000" in tags["rlhf.gate_reasons"]


def test_promotion_waits_for_a_person_by_default_and_after_drift(
    loop: Loop, first_turn: FirstTurn
) -> None:
    agent = loop.agent("asking", promotion={"automatic": False})
    chat(loop.pipeline.store, agent, 120)
    first = loop.run("retrain", agent, compute=replaying(first_turn.work))
    assert first.success, failures(first)
    assert verdict(first) == (
        f"version 1 passed and waits for a person: rlhf promote 1 --agent {agent}, or the "
        f"service's /candidates/{agent}"
    )
    assert loop.aliases(agent) == {"champion": 0, "challenger": 1}
    assert evaluation_of(first, "feedback_is_stable").passed  # nothing to compare with

    loop.pipeline.store.set_agent(agent, automatic_promotion=True)
    chat(loop.pipeline.store, agent, 700, seed=1, pair_share=0.0)
    second = loop.run("retrain", agent, compute=replaying(first_turn.work))
    assert second.success, failures(second)
    stable = evaluation_of(second, "feedback_is_stable")
    assert not stable.passed
    assert stable.severity is dg.AssetCheckSeverity.WARN
    assert verdict(second).startswith("version 2 passed; largest population stability index")
    assert verdict(second).endswith("so a person decides")
    assert loop.aliases(agent) == {"champion": 0, "challenger": 2}
    [profile] = second.asset_materializations_for_node("feedback_profile")
    [before, after] = loop.pipeline.claims.history(agent)
    assert profile.metadata["compared with"].value == before.fingerprint[:16]
    assert (after.watermark > before.watermark, after.state) == (True, "done")
    run = loop.pipeline.registry.client.get_run(loop.version(agent, 2).mlflow_run_id)
    psi = {k: v for k, v in run.data.metrics.items() if k.startswith("drift/")}
    assert max(psi.values()) > 0.2


def test_drift_is_of_the_votes_since_the_turn_before(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "FEWEST_BEFORE", 50)
    agent = loop.agent("drifting")
    claims, store = loop.pipeline.claims, loop.pipeline.store

    def profiled(**config: Any) -> tuple[bool, dict[str, Any], Claim]:
        steps = ["feedback_snapshot", "validated_feedback", "feedback_profile"]
        result = loop.run("retrain", agent, snapshot=config, only=steps)
        assert result.success, failures(result)
        [taken] = result.asset_materializations_for_node(SNAPSHOT)
        mark, watermark = (taken.metadata[name].value for name in ("fingerprint", "watermark"))
        assert isinstance(mark, str)
        assert isinstance(watermark, int)
        holder = "the rest of the turn"
        claim = claims.claim(agent, mark, watermark, holder=holder, asked_by="person", again=True)
        claims.finish(claim.token, "done")
        folder = loop.pipeline.settings(agent).agent_folder(agent) / "snapshots"
        told = read_json(folder / claim.fingerprint[:16] / DRIFT)
        return evaluation_of(result, "feedback_is_stable").passed, told, claim

    chat(store, agent, 300)
    stable, told, first = profiled()
    assert (stable, told["compared_with"]) == (True, None)
    again = profiled(again=True)
    assert again[:2] == (stable, told)  # not with itself

    before = sum(store.counts(agent).values())
    chat(store, agent, 60, seed=1, pair_share=0.0)
    new = sum(store.counts(agent).values()) - before
    stable, told, other = profiled()
    assert not stable
    assert "kind" in told["features"]
    assert told["limits"]["kind"] >= 0.2  # what its index is above
    assert told["compared_with"] == first.fingerprint[:16]
    assert (told["votes"], told["with_votes"]) == (new, new)
    assert profiled(again=True)[:2] == (False, told)

    chat(store, agent, 60, seed=2)
    stable, told, _ = profiled()
    assert (stable, told["features"]) == (True, [])  # as before the other kind of votes
    assert told["psi"]["kind"] < told["limits"]["kind"]
    assert told["compared_with"] == other.fingerprint[:16]

    stable, told, _ = profiled(watermark=first.watermark, again=True)
    assert (stable, told["votes"], told["psi"]) == (True, 0, {})


def come_again(store: FeedbackStore, agent: str, visits: int) -> None:
    """Plant two words in as many corrections, each by somebody else of one network."""
    for n in range(visits):
        prompt, answer = user_prompt(f"What does thing {n} cost?"), f"It costs {n} euros."
        met, visitor = {"network": "one line"}, hash_rater(agent, f"visitor {n}")
        shown = Interaction(uuid7(), agent, prompt, answer, 0, now(), sampling=met)
        better = Feedback(
            agent_id=agent,
            kind=FeedbackKind.correction,
            idempotency_key=f"visit {n}",
            interaction_id=shown.interaction_id,
            text=f"{answer} Zib zab.",
            rater_id=visitor,
        )
        store.add_interactions([replace(shown, user_id=visitor)])
        store.append([better])


def test_votes_leave_quarantine_with_the_turn_that_finds_nothing_wrong(loop: Loop) -> None:
    def set_aside(**sections: Mapping[str, int | None]) -> dict[str, int]:
        agent = loop.agent("mended", **sections)
        steps = ["feedback_snapshot", "validated_feedback"]
        result = loop.run("retrain", agent, snapshot={"again": True}, only=steps)
        assert result.success, failures(result)
        return loop.pipeline.store.quarantined(agent)

    agent = loop.agent("mended")
    chat(loop.pipeline.store, agent, 60)
    come_again(loop.pipeline.store, agent, 20)
    before = set_aside()
    assert before["narrow_support"] == 20
    strict = set_aside(validation={"max_completion_characters": 35, "min_rows": 1})
    assert strict["completion_too_long"] > 0
    after = set_aside(experiments={"people_per_network": None})
    assert before == {**after, "narrow_support": 20}
    assert "narrow_support" not in after


def test_prompts_that_the_chat_template_refuses_are_set_aside(loop: Loop, tmp_path: Path) -> None:
    agent = loop.agent("alternating", policy={"base": str(save_alternating(tmp_path))})
    store = loop.pipeline.store
    greeted = (Message("assistant", "Hello, how can I help?"), *user_prompt("Where is order 1?"))
    advised = (Message("system", "Be kind."), *user_prompt("Where is order 2?"))
    for key, prompt in {"greeted": greeted, "advised": advised}.items():
        vote = Feedback(
            agent_id=agent,
            kind=FeedbackKind.preference,
            idempotency_key=key,
            prompt=prompt,
            completion="On its way.",
            other_completion="No idea.",
            choice="left",
        )
        store.append([vote])
    chat(store, agent, 40)
    steps = ["feedback_snapshot", "validated_feedback"]
    result = loop.run("retrain", agent, only=steps)
    assert result.success, failures(result)
    check = evaluation_of(result, "templates_take_the_prompts")
    assert (check.passed, check.metadata["unexpected"].value) == (False, 1)
    assert store.quarantined(agent)["prompt_unfit"] == 1
    [kept] = loop.pipeline.settings(agent).agent_folder(agent).rglob("validated.parquet")
    prompts = set(snapshot.read(kept)["prompt"])
    assert prompt_to_json(advised) in prompts  # which `render` folds into the question
    assert prompt_to_json(greeted) not in prompts


def test_too_few_clean_rows_stop_the_turn_before_it_trains(
    loop: Loop, first_turn: FirstTurn
) -> None:
    agent = loop.agent("thin", validation={"min_rows": 500})
    chat(loop.pipeline.store, agent, 60)
    result = loop.run("retrain", agent, compute=replaying(first_turn.work))
    assert not result.success
    enough = evaluation_of(result, "enough_rows_are_clean")
    assert not enough.passed
    assert enough.severity is dg.AssetCheckSeverity.ERROR
    done = {
        str(e.asset_key and e.asset_key.to_user_string())
        for e in result.all_events
        if e.is_step_materialization
    }
    assert done == {"feedback_snapshot", "validated_feedback"}
    assert loop.pipeline.ledger.versions(agent) == []

    # The claim is free: a person who corrects the limit can ask again at once.
    loop.agent("thin", validation={"min_rows": 50})
    result = loop.run("retrain", agent, compute=replaying(first_turn.work))
    assert result.success, failures(result)
    claims = loop.pipeline.claims.history(agent)
    assert [(c.attempt, c.state) for c in claims] == [(1, "failed"), (2, "done")]
    begins = "step validated_feedback failed: enough_rows_are_clean: needed"
    assert (claims[0].reason or "").startswith(begins)


@pytest.mark.parametrize("job", ["retrain", ASSETS])
def test_a_run_for_some_assets_lets_the_next_begin_at_once(loop: Loop, job: str) -> None:
    agent = loop.agent("looked-at")
    chat(loop.pipeline.store, agent, 10)
    result = loop.run(job, agent, only=[SNAPSHOT])
    assert result.success, failures(result)
    # Nothing was trained: however often somebody looks, a turn is due as before.
    assert loop.pipeline.claims.history(agent) == []


def test_a_run_from_an_assets_page_that_failed_says_why(loop: Loop) -> None:
    assert definitions().resolve_implicit_global_asset_job_def().name == ASSETS
    agent = loop.agent("few")
    chat(loop.pipeline.store, agent, 5)
    result = loop.run(ASSETS, agent)
    assert failed_steps(result) == ["validated_feedback"]
    [claim] = loop.pipeline.claims.history(agent)
    assert claim.state == "failed"
    begins = "step validated_feedback failed: enough_rows_are_clean: needed"
    assert (claim.reason or "").startswith(begins)


def statuses(loop: Loop, agent: str) -> list[str]:
    """Return how MLflow has each of the agent's runs."""
    experiment = loop.pipeline.registry.experiment(agent)
    found = loop.pipeline.registry.client.search_runs([experiment])
    return [run.info.status for run in found]


def test_a_turns_run_in_mlflow_is_at_work_until_the_turn_has_ended(loop: Loop) -> None:
    agent = loop.agent("halted")
    chat(loop.pipeline.store, agent, 60)
    seen: list[list[str]] = []

    class Refusing(Compute):
        """Trains nothing."""

        def run_stage(self, context: Any, stage: str, turn: Any) -> dict[str, Any]:
            """Look at MLflow while training would be at work, and fail."""
            seen.append(statuses(loop, agent))
            raise TrainingError("needed a device, found none")

    result = loop.run("retrain", agent, compute=Refusing())
    assert failed_steps(result) == ["sft_policy"]
    assert seen == [["RUNNING"]]
    assert statuses(loop, agent) == ["FAILED"]

    names = [SNAPSHOT, "validated_feedback", "feedback_profile", *DATA]
    result = loop.run("retrain", agent, only=names)
    assert result.success, failures(result)
    assert statuses(loop, agent) == ["KILLED"]  # no verdict

    # As where MLflow was away when that turn ended: the next one tells of it.
    client = loop.pipeline.registry.client
    [left] = client.search_runs([loop.pipeline.registry.experiment(agent)])
    client.update_run(left.info.run_id, status="RUNNING")
    chat(loop.pipeline.store, agent, 60, seed=1)
    loop.run("retrain", agent, compute=Refusing())
    assert sorted(seen[-1]) == ["KILLED", "RUNNING"]
    assert sorted(statuses(loop, agent)) == ["FAILED", "KILLED"]


def test_what_is_changed_once_a_stage_was_given_it_is_told_as_it_was_given(
    loop: Loop, first_turn: FirstTurn
) -> None:
    """By the version, and by MLflow, where the turn stays one run."""
    agent, recipe = loop.agent("edited", promotion={"automatic": False}), RECIPE
    chat(loop.pipeline.store, agent, 60)
    edits: dict[str, dict[str, dict[str, Any]]] = {
        "reward": {"reward": {"functions": {"length": {"weight": 0.3}}, "wish_bound": 0.2}},
        "ppo": {
            "ppo": {"kl_coef": 0.7, "learning_rate": 5e-3},
            "reward": {"epochs": 7, "functions": {"empathy": {"weight": 5.0}}, "wish_bound": 0.4},
        },
        "evaluation": {
            "promotion": {"gate": {"win_rate_vs_champion": 0.99}},
            "evaluation": {"prompts": 500},
            "validation": {"top_raters_share": 0.2},
        },
    }
    replayed = replaying(first_turn.work)

    class Edited(Compute):
        """Has somebody write into the recipe once a stage is through."""

        def run_stage(self, context: Any, stage: str, turn: Any) -> dict[str, Any]:
            """Return what the stage left."""
            result: dict[str, Any] = replayed.run_stage(context, stage, turn)
            for section, values in edits.get(stage, {}).items():
                changed[section] = {**changed.get(section, {}), **values}
            write_recipe(loop.state / f"{agent}.yaml", loop.state, **changed)
            return result

    changed: dict[str, dict[str, Any]] = {"promotion": {"automatic": False}}
    result = loop.run("retrain", agent, compute=Edited())
    assert result.success, failures(result)
    version = loop.pipeline.ledger.versions(agent)[-1]
    told = version.lineage["recipe"]
    given = {name: told[name] for name in ("ppo", "reward", "evaluation")}
    assert given["ppo"]["kl_coef"] != 0.7
    assert given["ppo"]["learning_rate"] == recipe["ppo"]["learning_rate"]
    assert given["reward"]["epochs"] == recipe["reward"]["epochs"]
    assert given["evaluation"]["prompts"] == recipe["evaluation"]["prompts"]
    assert told["reward"]["functions"] == {}
    # The comparison tells of the rewards that were maximised, and so does whoever explains.
    compared_by = read_json(version.work / "evaluation.spec.json")["settings"]["reward"]
    turn, _ = turn_of(loop.pipeline.registry, loop.pipeline.settings(agent), version)
    for reward in (compared_by, turn.settings.reward.model_dump(mode="json")):
        assert list(reward["functions"]) == ["length"]
        assert reward["functions"]["length"]["weight"] == 0.3
        assert reward["wish_bound"] == 0.2
    assert (turn.settings.reward.epochs, compared_by["epochs"]) == (recipe["reward"]["epochs"], 7)
    assert told["promotion"]["gate"] == recipe["promotion"]["gate"]
    assert told["validation"]["top_raters_share"] != 0.2
    client = loop.pipeline.registry.client
    [run] = client.search_runs([loop.pipeline.registry.experiment(agent)])
    assert (run.info.run_id, run.info.status) == (version.mlflow_run_id, "FINISHED")
    assert run.data.params["ppo.learning_rate"] == str(recipe["ppo"]["learning_rate"])


@pytest.mark.slow
def test_a_person_may_ask_for_the_same_fingerprint_again(
    loop: Loop, first_turn: FirstTurn, settled: str
) -> None:
    compute = replaying(first_turn.work)
    before = loop.pipeline.claims.last_done(settled)
    assert failed_steps(loop.run("retrain", settled, compute=compute)) == ["feedback_snapshot"]
    result = loop.run("retrain", settled, compute=compute, snapshot={"again": True})
    assert result.success, failures(result)
    after = loop.pipeline.claims.last_done(settled)
    assert before is not None
    assert after is not None
    assert (after.fingerprint, after.attempt) == (before.fingerprint, before.attempt + 1)
    # The very same files from the very same votes, and yet a turn with a verdict of its own.
    _, first, again = loop.pipeline.ledger.versions(settled)
    assert (again.files, again.fingerprint) == (first.files, first.fingerprint)
    assert again.path != first.path


def test_votes_that_come_in_after_the_watermark_wait_for_the_next_turn(loop: Loop) -> None:
    agent = loop.agent("steady")
    chat(loop.pipeline.store, agent, 30)
    watermark = snapshot.newest_seq(loop.pipeline.database, agent)
    votes = sum(loop.pipeline.store.counts(agent).values())
    chat(loop.pipeline.store, agent, 30, seed=1)
    result = loop.run(
        "retrain", agent, snapshot={"watermark": watermark}, only=["feedback_snapshot"]
    )
    assert result.success, failures(result)
    [event] = result.asset_materializations_for_node("feedback_snapshot")
    assert event.metadata["dagster/row_count"].value == votes
    assert event.metadata["watermark"].value == watermark


def test_a_watermark_that_is_none_of_the_agents_votes_is_refused(loop: Loop) -> None:
    chat(loop.pipeline.store, loop.agent("first"), 10)
    agent, database = loop.agent("mistyped"), loop.pipeline.database
    chat(loop.pipeline.store, agent, 30)
    first, newest = snapshot.oldest_seq(database, agent), snapshot.newest_seq(database, agent)
    assert first > snapshot.oldest_seq(database, loop.agent("first"))
    for wrong in (-1, first - 1):
        result = loop.run("retrain", agent, snapshot={"watermark": wrong}, only=[SNAPSHOT])
        needed = f"watermark needed a number from {first} to {newest}"
        assert needed in failures(result)
        assert f"found {wrong}; " in failures(result)
    assert loop.pipeline.claims.history(agent) == []
    # Above the newest there are votes to come, or those that an erasure took while a run waited.
    for wanted, watermark in ((first, first), (newest + 1, newest), (10**9, newest), (0, newest)):
        result = loop.run("retrain", agent, snapshot={"watermark": wanted}, only=[SNAPSHOT])
        assert result.success, failures(result)
        [taken] = result.asset_materializations_for_node(SNAPSHOT)
        assert taken.metadata["watermark"].value == watermark


def test_a_run_whose_tags_hold_nonsense_counts_as_no_attempt(loop: Loop) -> None:
    agent = loop.agent("wishing")
    chat(loop.pipeline.store, agent, 10)
    result = loop.run("retrain", agent, only=[SNAPSHOT], tags={MAX_STEPS: "lots"})
    assert f"tag {MAX_STEPS} needed a whole number from 1 to 100,000, found 'lots'" in failures(
        result
    )
    assert loop.pipeline.claims.history(agent) == []


def test_a_run_that_waited_takes_back_no_newer_votes_that_were_trained_on_meanwhile(
    loop: Loop,
) -> None:
    agent, claims, store = loop.agent("overtaken"), loop.pipeline.claims, loop.pipeline.store
    database = loop.pipeline.database
    chat(store, agent, 30)
    older = snapshot.newest_seq(database, agent)
    late = Feedback(
        agent,
        FeedbackKind.thumbs,
        "late",
        number=1.0,
        prompt=user_prompt("where is it?"),
        completion="on its way.",
        rater_id=hash_rater(agent, "ann"),
    )
    store.append([late])
    newest = snapshot.newest_seq(database, agent)
    claim = claims.claim(agent, "newest", newest, holder="make train", asked_by="person")
    claims.finish(claim.token, "done")

    def waited(**more: Any) -> dg.ExecuteInProcessResult:
        asked = {"watermark": older, **more}
        return loop.run("retrain", agent, snapshot=asked, only=["feedback_snapshot"])

    refused = waited()
    assert f"was trained on votes up to number {newest} while this run waited" in failures(refused)
    assert claims.history(agent) == [claims.last_done(agent)]  # it counts as no attempt
    assert waited(again=True).success

    # Where the newest were erased, older ones are all there is.
    erase(loop.pipeline.settings(agent), loop.pipeline.registry, "ann", agent_id=agent)
    assert snapshot.newest_seq(database, agent) == older
    assert waited().success


def test_a_run_that_waited_learns_from_no_votes_that_were_taken_back_meanwhile(loop: Loop) -> None:
    agent, store = loop.agent("mistaken"), loop.pipeline.store
    chat(store, agent, 30)
    asked = {"watermark": snapshot.newest_seq(loop.pipeline.database, agent)}
    [origin] = store.origins(agent)
    assert store.withdraw(agent, store.keys_from(agent, origin)).votes
    for more in ({}, {"again": True}):
        result = loop.run("retrain", agent, snapshot={**asked, **more}, only=[SNAPSHOT])
        assert "were taken back while this run waited" in failures(result)
    assert loop.pipeline.claims.history(agent) == []  # it counts as no attempt


def test_a_snapshot_takes_out_the_phone_numbers_of_the_agents_own_regions(loop: Loop) -> None:
    agent = loop.agent("dutch", feedback={"phone_regions": ["NL"]})
    about: dict[str, Any] = {
        "prompt": user_prompt("bel 020 123 4567"),
        "completion": "ring 07700 900123",
    }
    vote = Feedback(agent, FeedbackKind.thumbs, "k", number=1.0, **about)
    loop.pipeline.store.append([vote])
    result = loop.run("retrain", agent, only=["feedback_snapshot"])
    assert result.success, failures(result)
    [event] = result.asset_materializations_for_node("feedback_snapshot")
    mark = event.metadata["fingerprint"].value
    taken = snapshot.find(loop.pipeline.database, agent, str(mark))
    assert taken is not None
    [row] = snapshot.read(taken.path).itertuples()
    assert row.prompt == prompt_to_json(user_prompt("bel [phone]"))
    assert row.completion == "ring 07700 900123"  # a British one


def test_a_turn_goes_on_from_the_version_0_that_bootstrap_trained(loop: Loop, settled: str) -> None:
    entries = [(p.action, p.version) for p in loop.pipeline.ledger.history(settled)]
    assert entries == [("baseline", 0), ("promote", 1)]


def test_bootstrap_of_an_agent_that_has_a_version_leaves_no_claim_behind(
    loop: Loop, first_turn: FirstTurn
) -> None:
    agent = loop.agent("late")
    baseline = first_turn.work / "sft"
    loop.pipeline.registry.register_baseline(agent, baseline, label="v0", lineage={}, actor="test")
    result = loop.run("bootstrap", agent, compute=replaying(first_turn.work))
    assert result.success, failures(result)
    assert loop.pipeline.claims.held(agent) is None
    assert len(loop.pipeline.ledger.versions(agent)) == 1
    assert statuses(loop, agent) == ["FINISHED"]


def test_a_step_whose_claim_was_taken_over_writes_nothing(
    loop: Loop, first_turn: FirstTurn
) -> None:
    agent = loop.agent("fenced")
    chat(loop.pipeline.store, agent, 80)
    compute = replaying(first_turn.work)
    inner = type(compute).run_stage

    def stolen(self: Any, context: Any, stage: str, turn: Any) -> dict[str, Any]:
        """Let another run take the claim over while PPO is at work."""
        outcome = inner(self, context, stage, turn)
        if stage == "ppo":
            claims = loop.pipeline.claims
            claims.finish(turn.token, "failed", "its heart stopped, as far as anybody saw")
            claims.claim(
                agent, turn.fingerprint, turn.watermark, holder="another run", asked_by="person"
            )
        return dict(outcome)

    patch = pytest.MonkeyPatch()
    patch.setattr(type(compute), "run_stage", stolen)
    try:
        result = loop.run("retrain", agent, compute=compute)
    finally:
        patch.undo()
    assert failed_steps(result)[0] == "ppo_policy"
    assert "ClaimLost" in failures(result)
    assert [v.version for v in loop.pipeline.ledger.versions(agent)] == [0]
    held = loop.pipeline.claims.held(agent)
    assert held is not None  # the failed run did not close what is another's
    assert held.holder == "another run"


@pytest.mark.parametrize(
    ("step", "module", "name"),
    [("validated_feedback", validation, "validate"), ("training_data", datasets, "build")],
)
def test_a_step_that_stood_still_through_an_erasure_brings_nobody_back(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, step: str, module: Any, name: str
) -> None:
    """As on a machine that was suspended for longer than the lease, with the rows in memory."""
    agent, pipeline = loop.agent("suspended"), loop.pipeline
    chat(pipeline.store, agent, 80)
    person = hash_rater(agent, "ann")
    pipeline.store.append(
        [
            Feedback(
                agent,
                FeedbackKind.correction,
                uuid7(),
                prompt=user_prompt(f"{n} nougats?"),
                completion=completion,
                text="Nougat.",
                rater_id=person,
            )
            for n, completion in enumerate(("Marzipan.", "\x07" * 20))  # the last is set aside
        ]
    )
    inner, began, erased = getattr(module, name), threading.Event(), threading.Event()

    def erase_her() -> None:
        with pipeline.database.write() as connection:
            late = db.claims.update().where(db.claims.c.agent_id == agent)
            connection.execute(late.values(expires_at=now() - timedelta(minutes=1)))
        erase(pipeline.settings(), pipeline.registry, person, agent)
        erased.set()

    def stands_still(*given: Any, **named: Any) -> Any:
        made = inner(*given, **named)
        if not began.is_set():
            began.set()
            elsewhere = threading.Thread(target=erase_her)  # nothing of the step holds for it
            elsewhere.start()
            elsewhere.join()
        return made

    monkeypatch.setattr(module, name, stands_still)
    only = [SNAPSHOT, "validated_feedback", "feedback_profile", *DATA]
    result = loop.run("retrain", agent, only=only)
    assert erased.is_set()
    files = [p for p in pipeline.settings().agent_folder(agent).rglob("*") if p.is_file()]
    assert [p.name for p in files if person in read(p) or "nougat" in read(p)] == []
    assert pipeline.store.quarantined(agent) == {}
    assert failed_steps(result) == [step]
    assert "ClaimLost" in failures(result)


def test_a_turn_from_which_somebody_is_erased_as_it_begins_trains_nothing(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its versions would be of votes that no snapshot is recorded for: nobody could name them."""
    agent, pipeline = loop.agent("begun"), loop.pipeline
    chat(pipeline.store, agent, 80)
    person, inner = hash_rater(agent, "ann"), snapshot.fingerprint
    pipeline.store.append(
        [
            Feedback(
                agent,
                FeedbackKind.rating,
                uuid7(),
                prompt=user_prompt("Two nougats?"),
                completion="Marzipan.",
                number=5.0,
                rater_id=person,
            )
        ]
    )

    def then_erased(*asked: Any) -> str:
        mark = inner(*asked)
        monkeypatch.undo()
        erase(pipeline.settings(), pipeline.registry, person, agent)
        return mark

    monkeypatch.setattr(snapshot, "fingerprint", then_erased)
    result = loop.run("retrain", agent, only=[SNAPSHOT])
    assert failed_steps(result) == [SNAPSHOT]
    assert "somebody was erased as it began" in failures(result)
    [claim] = pipeline.claims.history(agent)
    assert snapshot.find(pipeline.database, agent, claim.fingerprint) is None
    again = loop.run("retrain", agent, only=[SNAPSHOT])
    assert again.success
    left = inner(pipeline.database, agent, snapshot.newest_seq(pipeline.database, agent))
    taken = snapshot.find(pipeline.database, agent, left)
    assert taken is not None
    assert taken.rows == 80


def read(path: Path) -> str:
    """Return what stands in a file of a turn, unpacked."""
    if path.suffix == ".parquet":
        return str(snapshot.read(path).to_dict())
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()


def test_training_alone_is_refused_without_a_turn(loop: Loop, first_turn: FirstTurn) -> None:
    agent = loop.agent("alone")
    result = loop.run("retrain", agent, only=["ppo_policy"])
    assert not result.success
    assert "found none in this run; run the job `retrain`" in failures(result)
    assert "everything upstream of it, from feedback_snapshot on" in failures(result)


def test_a_run_for_no_agent_says_so(loop: Loop) -> None:
    result = loop.run("retrain", None, only=[SNAPSHOT])  # as the Launchpad starts it
    assert failed_steps(result) == [SNAPSHOT]
    assert "needed an agent, found no partition" in failures(result)
    assert not any(event.event_type_value == "STEP_UP_FOR_RETRY" for event in result.all_events)


@pytest.mark.slow
def test_a_person_can_set_a_failed_run_going_again_from_where_it_failed(
    loop: Loop, first_turn: FirstTurn, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = loop.agent("mended")
    chat(loop.pipeline.store, agent, 80)

    def full(*_: object, **__: object) -> str:
        assert statuses(loop, agent) == ["RUNNING"]
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "promote_if_due", full)
        failed = loop.run("retrain", agent, compute=replaying(first_turn.work))
    assert failed_steps(failed) == ["promotion"]
    claim = loop.pipeline.claims.history(agent)[-1]
    assert claim.state == "failed"
    assert "OSError: disk full" in (claim.reason or "")
    assert statuses(loop, agent) == ["FAILED"]

    monkeypatch.setenv("RLHF_RECIPE", str(loop.pipeline.recipe))
    monkeypatch.setattr(Compute, "start_ahead", lambda _: None)
    with going_on(loop.instance, failed.run_id, agent) as again:
        assert again.success, failures(again)
        assert [e.step_key for e in again.all_events if e.is_step_success] == ["promotion"]
    claims = loop.pipeline.claims.history(agent)
    assert [(c.attempt, c.state) for c in claims] == [(1, "failed"), (2, "done")]
    assert loop.aliases(agent) == {"champion": 1, "previous": 0}
    assert statuses(loop, agent) == ["FINISHED"]
