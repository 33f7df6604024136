"""Answers are stored before they can be voted on, by a model whose files were checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.errors import FeedbackError, FeedbackRefused, HashMismatch, RegistryError
from rlhf_pipeline.records import FeedbackKind, hash_rater, user_prompt
from rlhf_pipeline.serving.pages import desk as desk_module
from rlhf_pipeline.serving.pages.desk import Answer, Desk
from tests.serving.pages.world import made_desk

ASKED: dict[str, Any] = {"session_id": "s", "person": "ann"}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return made_desk(tmp_path / "state")


def ask(desk: Desk, *, pair: bool = False) -> tuple[list[str], Answer]:
    *pieces, last = desk.answer("shop", user_prompt("how much?"), pair=pair, **ASKED)
    assert isinstance(last, Answer)
    return [str(piece) for piece in pieces], last


def test_an_answer_is_stored_with_who_gave_it(desk: Desk) -> None:
    assert desk.agents() == ["shop"]
    pieces, answer = ask(desk)
    kept = desk.store.interaction(answer.interaction.interaction_id)
    assert kept == answer.interaction
    assert kept is not None
    assert kept.completion == "".join(pieces)
    assert (kept.model_version, kept.user_id) == (0, hash_rater("shop", "ann"))
    assert 0 <= kept.sampling["disagreement"] <= 1


def test_a_pair_is_two_stored_answers_to_one_prompt(desk: Desk) -> None:
    _, answer = ask(desk, pair=True)
    assert answer.other is not None
    assert answer.other.prompt == answer.interaction.prompt
    assert answer.other.completion != answer.interaction.completion
    desk.vote(
        answer.interaction,
        FeedbackKind.preference,
        person="ann",
        other_interaction_id=answer.other.interaction_id,
        choice="tie",
    )
    assert desk.store.counts("shop") == {"preference": 1}


def test_votes_pass_the_rules_and_carry_what_a_person_wants(desk: Desk) -> None:
    _, answer = ask(desk)
    this = answer.interaction
    desk.vote(this, FeedbackKind.thumbs, person="ann", number=1.0, wants=["shorter"])
    desk.vote(this, FeedbackKind.thumbs, person="ann", number=0.0)  # a change of mind
    assert desk.store.counts("shop") == {"thumbs": 1}
    with desk.store.database.read() as connection:
        rows = connection.exec_driver_sql("SELECT tags, origin FROM feedback ORDER BY seq").all()
    assert [tuple(row) for row in rows] == [('["wants:shorter"]', "chat"), ("[]", "chat")]
    with pytest.raises(FeedbackRefused, match="from 1 to 5"):
        desk.vote(this, FeedbackKind.rating, person="ann", number=9.0)
    feedback = desk.settings.feedback.model_copy(update={"enabled": False})
    desk.settings = desk.settings.model_copy(update={"feedback": feedback})
    with pytest.raises(FeedbackError, match="nothing was stored"):
        desk.vote(this, FeedbackKind.thumbs, person="ann", number=1.0)


def test_the_collection_rate_is_how_often_people_are_asked(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rate, shares in ((0.3, [0.0, 0.29, 0.31, 0.9]), (0.0, [0.0]), (1.0, [0.99])):
        pages = desk.settings.pages.model_copy(
            update={"collection_rate": rate, "active_learning": False}
        )
        desk.settings = desk.settings.model_copy(update={"pages": pages})
        for share in shares:
            monkeypatch.setattr(desk_module, "unit_interval", lambda *_, share=share: share)
            _, answer = ask(desk)
            assert answer.asks == (share < rate)
            assert answer.interaction.sampling["disagreement"] is None


def test_the_unusually_unsure_tenth_is_asked_about(desk: Desk) -> None:
    assert not any(desk._is_unusual("shop", 0.9) for _ in range(desk_module.ENOUGH))
    found = [desk._is_unusual("other", n / 100) for n in range(100)]
    assert not any(found[: desk_module.ENOUGH])
    assert all(found[desk_module.ENOUGH :])  # each is above all before it
    assert not desk._is_unusual("other", 0.5)


def test_nobody_answers_without_a_sound_champion(desk: Desk, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="found none; its first turn"):
        next(desk.answer("tea", user_prompt("hi"), **ASKED))
    config = tmp_path / "state/agents/shop/v0/config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    with pytest.raises(HashMismatch):
        next(desk.answer("shop", user_prompt("hi"), **ASKED))


def test_a_trace_is_logged_when_asked_to_and_its_failure_costs_no_answer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_pipeline.registry import traces

    logged: list[str] = []

    def fails(_: Any, interaction: Any) -> str:
        logged.append(interaction.interaction_id)
        raise RegistryError("MLflow is away")

    monkeypatch.setattr(traces, "log_interaction", fails)
    ask(desk)
    pages = desk.settings.pages.model_copy(update={"log_traces": True})
    desk.settings = desk.settings.model_copy(update={"pages": pages})
    _, answer = ask(desk)
    desk._tracing.shutdown()
    assert logged == [answer.interaction.interaction_id]


def test_a_trace_that_comes_after_an_erasure_is_taken_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_pipeline.registry import forgetting, traces

    gone: list[set[str]] = []
    monkeypatch.setattr(traces, "log_interaction", lambda registry, interaction: "tr-1")
    monkeypatch.setattr(forgetting, "forget_traces", lambda r, agent, ids, rater: gone.append(ids))
    _, answer = ask(desk)
    desk._trace(answer.interaction)
    assert gone == []
    desk._trace(replace(answer.interaction, interaction_id="erased"))
    assert gone == [{"erased"}]
