"""Two versions of a real turn on logged prompts: who has seen them is found out another way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.errors import EvaluationError, RegistryError
from rlhf_pipeline.evaluation.metrics import Number
from rlhf_pipeline.experiment.offline import Offline, logged, offline, seen_by
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.datasets import conversation_of, split_of
from rlhf_pipeline.feedback.privacy import redact
from rlhf_pipeline.records import Feedback, FeedbackKind, prompt_from_json, user_prompt
from tests.assets.world import FirstTurn, Loop


@pytest.fixture(scope="module")
def found(loop: Loop, first_turn: FirstTurn) -> Offline:
    agent, pipeline = first_turn.agent_id, loop.pipeline
    vote = Feedback(
        agent,
        FeedbackKind.thumbs,
        "after the turn",
        prompt=user_prompt("write to ann@example.org about the lamp"),
        completion="no",
        number=0.0,
    )
    pipeline.store.append([vote])
    settings = pipeline.settings(agent)
    return offline(pipeline.registry, settings, agent, "baseline", "1", prompts=12)


def test_prompts_that_were_trained_on_are_told_from_those_held_out(
    loop: Loop, first_turn: FirstTurn, found: Offline
) -> None:
    agent, pipeline = first_turn.agent_id, loop.pipeline
    settings, version = pipeline.settings(agent), loop.version(first_turn.agent_id, 1)
    taken = settings.agent_folder(agent) / "snapshots" / (version.fingerprint or "")[:16]
    rows = snapshot.read(taken / snapshot.FILE)
    share = settings.feedback.evaluation_share
    prompts = [prompt_from_json(text) for text in rows["prompt"]]
    trained = {conversation_of(p) for p in prompts if split_of(p, share) == "train"}
    assert trained
    assert seen_by(pipeline.ledger, settings, version) <= trained
    every = logged(pipeline.database, agent)
    assert len(every) == len(set(every)) == found.logged
    assert any("ann@example.org" in text for text in every)
    learnt_from = seen_by(pipeline.ledger, settings, version)
    held_out = [
        text for text in every if conversation_of(prompt_from_json(text)) not in learnt_from
    ]
    assert found.held_out == min(12, len(held_out))
    assert found.held_out + found.seen == found.report.prompts == 12


def test_scores_are_paired_and_judged_by_the_later_versions_gate_model(found: Offline) -> None:
    assert (found.first, found.second, found.judge, found.same_raters) == (0, 1, 1, True)
    pairs = zip(found.report.scores["candidate"], found.report.scores["baseline"], strict=True)
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]
    assert found.report.win_rates["baseline"].value == pytest.approx(sum(wins) / len(wins))
    told = json.loads(json.dumps(found.to_json()))
    assert told["words"] == found.words
    assert "length-controlled win rate" in found.words


def test_a_verdict_needs_an_interval_on_one_side(found: Offline) -> None:
    for low, high, word in (
        (0.51, 0.7, "is better"),
        (0.2, 0.49, "is worse"),
        (0.4, 0.6, "surely"),
    ):
        rates = {"baseline": Number(0.5, low, high, 12)}
        report = replace(found.report, length_controlled_win_rates=rates)
        assert word in replace(found, report=report).words
        few = replace(found, report=replace(report, prompts=7))
        assert few.words.startswith("too few prompts to tell version 1 from version 0, needed 8: ")


def test_seed_conversations_of_a_file_were_trained_on(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    agent = first_turn.agent_id
    settings, version = loop.pipeline.settings(agent), loop.version(agent, 0)
    path, recipe = tmp_path / "seeds.jsonl", version.lineage["recipe"]
    said = [
        {"role": "user", "content": "seeded for ann@example.org?"},
        {"role": "assistant", "content": "yes"},
    ]
    path.write_text(json.dumps({"messages": said}) + "\n")
    recipe = {**recipe, "sft": {**recipe["sft"], "seed_conversations": str(path)}}
    seeded = replace(version, lineage={**version.lineage, "recipe": recipe})
    conversation = conversation_of(user_prompt(redact("seeded for ann@example.org?")[0]))
    ledger = loop.pipeline.ledger
    assert conversation in seen_by(ledger, settings, seeded)
    assert conversation not in seen_by(ledger, settings, version)
    path.unlink()
    with pytest.raises(RegistryError, match=r"trained from .*seeds\.jsonl: needed"):
        seen_by(ledger, settings, seeded)


def test_what_cannot_be_compared_is_said(loop: Loop, first_turn: FirstTurn) -> None:
    agent, pipeline = first_turn.agent_id, loop.pipeline
    settings = pipeline.settings(agent)
    with pytest.raises(EvaluationError, match="needs two versions, found version 0 as both"):
        offline(pipeline.registry, settings, agent, "0", "baseline", prompts=12)
    version = loop.version(agent, 1)
    elsewhere = settings.model_copy(update={"state_dir": settings.state_dir / "elsewhere"})
    with pytest.raises(RegistryError, match="found none there; restore it"):
        seen_by(pipeline.ledger, elsewhere, version)
