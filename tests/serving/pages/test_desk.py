"""Answers are stored before they can be voted on, by a model whose files were checked."""

from __future__ import annotations

import asyncio
import html
import inspect
import random
import shutil
import statistics
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

import pytest
import sqlalchemy as sa
import torch
from structlog.testing import capture_logs

from rlhf_pipeline.config import UpstreamSettings
from rlhf_pipeline.erasure import erase
from rlhf_pipeline.errors import (
    ChatAway,
    FeedbackError,
    FeedbackRefused,
    HashMismatch,
    ModelError,
    RegistryError,
)
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.experiment.live import measured
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    RewardInput,
    hash_rater,
    hashed,
    now,
    user_prompt,
)
from rlhf_pipeline.reward.model import (
    Calibration,
    LearnedReward,
    Limits,
    load_reward_model,
    new_reward_model,
    save_reward_model,
)
from rlhf_pipeline.serving import arms
from rlhf_pipeline.serving import tracing as tracing_module
from rlhf_pipeline.serving.arms import Wishes
from rlhf_pipeline.serving.batching import Decoder
from rlhf_pipeline.serving.chat_api import SORRY
from rlhf_pipeline.serving.gateway import Gateway, Reply
from rlhf_pipeline.serving.limits import Buckets, RaterLimit
from rlhf_pipeline.serving.metrics import Metrics
from rlhf_pipeline.serving.pages import chat_page, review_page
from rlhf_pipeline.serving.pages import desk as desk_module
from rlhf_pipeline.serving.pages.desk import ALTERNATIVES, Answer, Desk, _in_turn
from rlhf_pipeline.serving.pages.visitors import Visitors
from tests.serving.pages.world import made_desk

ASKED: dict[str, Any] = {"session_id": "s", "person": "ann", "network": "home"}
STOPPED = {"finish_reason": "stop"}
KEEP = "as it was"  # what a page is told of a box that stays as it is
EMPTY = "Not stored: nothing is written yet."


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return made_desk(tmp_path / "state")


def ask(desk: Desk, *, pair: bool = False) -> tuple[list[str], Answer]:
    *pieces, last = desk.answer("shop", user_prompt("how much?"), pair=pair, **ASKED)
    assert isinstance(last, Answer)
    return [str(piece) for piece in pieces], last


def on_screen(waiting: list[Interaction]) -> tuple[list[Interaction], list[str], str]:
    """Return what the review page sends along: its queue, what was skipped, and what it shows."""
    return waiting, [], waiting[0].interaction_id


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


@pytest.mark.parametrize("first", ["this", "other"])
def test_what_is_said_after_a_choice_is_about_the_answer_that_was_chosen(
    desk: Desk, first: Literal["this", "other"]
) -> None:
    gr = SimpleNamespace(skip=lambda: "same", update=lambda **changes: changes)
    _, answer = ask(desk, pair=True)
    assert answer.other is not None
    vote = chat_page._vote(desk)
    for choice, kept in (
        ("right", answer.other if first == "this" else answer.interaction),
        ("left", answer.interaction if first == "this" else answer.other),
        ("tie", answer.interaction),
    ):
        choose = chat_page._choose(gr, vote, choice)  # type: ignore[arg-type]
        words, pair, talk, turns, said, thumbs, *_ = choose(
            answer, seen_of(answer), [], first, [("how?", "?")]
        )
        assert (words, pair, thumbs) == (chat_page.THANKS, {"visible": False}, {"visible": True})
        assert turns == [("how?", kept.completion)]
        assert talk[-1] == chat_page._said("assistant", kept.completion)
        assert said.interaction == kept
        assert (
            choose(said, seen_of(said), [], first, turns)[0] == "There is nothing to compare."
        )  # only once
    vote(said, seen_of(said), [], FeedbackKind.thumbs, number=0.0)
    with desk.store.database.read() as connection:
        about = "SELECT interaction_id FROM feedback WHERE kind = 'thumbs'"
        assert connection.exec_driver_sql(about).scalar_one() == kept.interaction_id


def test_an_answer_is_given_up_wherever_the_page_drops_it() -> None:
    ended = threading.Event()

    async def pieces() -> AsyncGenerator[str, None]:
        try:
            yield "It costs "
            yield "nothing."
        finally:
            await asyncio.to_thread(ended.set)

    async def dropped() -> None:
        written = desk_module._in_turn(pieces())
        assert await asyncio.to_thread(next, written) == "It costs "
        written.close()  # beside everybody else's requests, as when a tab is closed

    asyncio.run(dropped())
    assert ended.wait(20)


@pytest.mark.parametrize(
    "error", [ChatAway("x"), sa.exc.OperationalError("INSERT", {}, Exception("database is locked"))]
)
def test_a_question_without_an_answer_goes_back_into_its_box(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def answer(*args: Any, **more: Any) -> Iterator[str]:
        yield "It costs "
        raise error

    gr = SimpleNamespace(
        skip=lambda: "same", update=lambda **changes: changes, Request=SimpleNamespace
    )
    monkeypatch.setattr(desk, "answer", answer)
    say = chat_page._say(gr, desk, Visitors(b"s" * 32))
    before = [("how?", "so.")]
    *_, last = say("how much?", before, "shop", "s", False, None, "", SimpleNamespace(cookies={}))
    talk, question, words, *rest = last
    assert [said["content"] for said in talk] == ["how?", "so."]  # and no … that nothing follows
    assert (question, words, set(rest)) == ("how much?", SORRY, {"same"})


def test_an_answer_that_is_late_after_its_first_words_ends_as_any_that_breaks_off(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(*_: Any, **__: Any) -> AsyncGenerator[str, None]:
        yield "It costs nine euros and "
        raise TimeoutError

    gr = SimpleNamespace(
        skip=lambda: "same", update=lambda **changes: changes, Request=SimpleNamespace
    )
    monkeypatch.setattr(Decoder, "pieces", late)
    say = chat_page._say(gr, desk, Visitors(b"s" * 32))
    *_, shown, last = say(
        "how much?", [], "shop", "s", False, None, "", SimpleNamespace(cookies={})
    )
    assert shown[0][-1]["content"].startswith("It costs nine euros")
    assert last[:3] == ([], "how much?", SORRY)
    with desk.store.database.read() as connection:
        kept = connection.exec_driver_sql("SELECT completion FROM interactions").scalar_one()
    assert kept.startswith("It costs nine euros")  # a vote may be about it
    with pytest.raises(ChatAway, match="within"):
        ask(desk)


def test_who_asks_nothing_is_told_so_and_not_that_nobody_can_answer(desk: Desk) -> None:
    gr = SimpleNamespace(skip=lambda: "same", Request=SimpleNamespace)
    say = chat_page._say(gr, desk, Visitors(b"s" * 32))
    [told] = say(
        " ", [], "shop", "s", False, None, "", SimpleNamespace(cookies={})
    )  # as a client's key
    assert told[2] == "a question is needed, found an empty one; write something"


@pytest.mark.parametrize(("apart", "shown"), [(0.0, 100), (1e6, 1)])
def test_what_is_written_fast_is_shown_together(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, apart: float, shown: int
) -> None:
    """Each time the browser draws all of the answer again."""
    _, answer = ask(desk)

    def written(*args: Any, **more: Any) -> Iterator[Any]:
        yield from (f"word {number} " for number in range(100))
        yield answer

    gr = SimpleNamespace(
        skip=lambda: "same", update=lambda **changes: changes, Request=SimpleNamespace
    )
    monkeypatch.setattr(desk, "answer", written)
    monkeypatch.setattr(chat_page, "SHOWN_EVERY_SECONDS", apart)
    say = chat_page._say(gr, desk, Visitors(b"s" * 32))
    _, *between, last = say(
        "how much?", [], "shop", "s", False, None, "", SimpleNamespace(cookies={})
    )
    assert len(between) == shown
    assert last[0][-1] == chat_page._said("assistant", answer.interaction.completion)


@pytest.mark.parametrize(
    ("question", "agent", "words"),
    [
        ("how much?", "nobody", "this assistant is not here; load the page again"),
        ("how much?", "\ud800", "this assistant is not here; load the page again"),
        (None, "shop", "a question is needed, found an empty one; write something"),
        ({"a": 1}, ["shop"], "a question is needed, found an empty one; write something"),
    ],
)
def test_what_no_page_would_send_is_refused_in_words(
    desk: Desk, question: Any, agent: Any, words: str
) -> None:
    gr = SimpleNamespace(skip=lambda: "same", Request=SimpleNamespace)
    say = chat_page._say(gr, desk, Visitors(b"s" * 32))
    [told] = say(question, [], agent, "s", None, None, None, SimpleNamespace(cookies={}))
    assert told[1:3] == (question if isinstance(question, str) else "", words)
    with desk.store.database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM chat_events").scalar_one() == 0


def test_an_answer_leaves_a_half_written_question_and_clears_what_was_said_of_the_last(
    desk: Desk,
) -> None:
    gr = SimpleNamespace(
        skip=lambda: "same", update=lambda **changes: changes, Request=SimpleNamespace
    )
    say = chat_page._say(gr, desk, Visitors(b"s" * 32))
    first, *_, last = say(
        "how much?", [], "shop", "s", False, None, "", SimpleNamespace(cookies={})
    )
    assert len(first) == len(last)
    assert (first[1], last[1]) == ("same", "same")
    assert last[-2 - len(chat_page.UNSAID) : -2] == (None, "", "", 0.5, 0.5, 0.5)


@pytest.mark.parametrize("pair", [False, True])
def test_a_conversation_that_was_erased_begins_anew_with_the_next_question(
    desk: Desk, pair: bool
) -> None:
    gr = SimpleNamespace(
        skip=lambda: "same", update=lambda **changes: changes, Request=SimpleNamespace
    )
    say = chat_page._say(gr, desk, Visitors(b"s" * 32))

    def asked(question: str, history: Any, answer: Any) -> tuple[Any, ...]:
        seen = seen_of(answer) if answer else ""
        first, *_, last = say(
            question, history, "shop", "s", pair, answer, seen, SimpleNamespace(cookies={})
        )
        assert first[4] == "same"  # or who is not answered would lose what tells of an erasure
        return last

    _, _, notice, history, answer, *_ = asked("my secret?", [], None)
    assert chat_page.ANEW not in notice
    _, _, notice, history, answer, *_ = asked("and then?", history, answer)
    assert chat_page.ANEW not in notice
    assert [said.content for said in answer.interaction.prompt][::2] == ["my secret?", "and then?"]
    erase(desk.settings, desk.registry, "s")
    talk, _, notice, history, answer, *_ = asked("what now?", history, answer)
    assert notice.startswith(chat_page.ANEW)
    assert answer.interaction.prompt == user_prompt("what now?")
    assert [question for question, _ in history] == ["what now?"]
    assert [said["content"] for said in talk][::2] == ["what now?"]


def test_a_conversation_that_the_session_knows_nothing_of_begins_anew_until_it_is_answered(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    gr = SimpleNamespace(
        skip=lambda: "same", update=lambda **changes: changes, Request=SimpleNamespace
    )
    say = chat_page._say(gr, desk, Visitors(b"s" * 32))

    def asked(answer: Any, seen: str) -> list[tuple[Any, ...]]:
        return [
            *say("what now?", [], "shop", "s", False, answer, seen, SimpleNamespace(cookies={}))
        ]

    def away(*_: Any, **__: Any) -> NoReturn:
        raise ChatAway("away")

    first, *_, last = asked(None, "")
    assert chat_page.ANEW not in first[2] + last[2]
    assert first[-2] == "same"  # a service that ends here forgets nothing that was said before
    second, *_ = asked(last[4], last[-2])
    for seen in (last[-2], second[-2]):  # one that ends after the first answer, or in the second
        with monkeypatch.context() as patched:
            patched.setattr(desk, "answer", away)
            unanswered, failed = asked(None, seen)
        assert (unanswered[2], unanswered[-2], failed[-2]) == (chat_page.ANEW, "same", "same")
        talk, _, notice, _, answer, *_ = asked(None, seen)[-1]
        assert notice.startswith(chat_page.ANEW)
        assert [said["content"] for said in talk][::2] == ["what now?"]
        assert answer.interaction.prompt == user_prompt("what now?")


@pytest.mark.parametrize("host", ["8.8.8.7", "10.0.0.7", None])
def test_the_page_says_of_which_network_a_question_is_where_there_is_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, host: str | None
) -> None:
    told: list[str | None] = []

    def answer(*args: Any, network: str | None, **more: Any) -> Iterator[str]:
        told.append(network)
        yield "It"

    gr = SimpleNamespace(skip=lambda: "same", update=lambda **c: c, Request=SimpleNamespace)
    monkeypatch.setattr(desk, "answer", answer)
    visitors = Visitors(b"s" * 32)
    client = SimpleNamespace(host=host) if host else None
    request = SimpleNamespace(cookies={}, client=client)
    list(chat_page._say(gr, desk, visitors)("how much?", [], "shop", "s", False, None, "", request))
    assert told == [visitors.network(host) if host else None]
    assert (told[0] is not None) is (host == "8.8.8.7")


def test_what_is_shown_is_what_was_written() -> None:
    text = 'if a < b & c:\n    return "<b>&lt;</b>"\n\tx'
    shown = inspect.cleandoc(chat_page._said("user", text)["content"])  # as Gradio cleans it
    assert "<" not in shown
    assert html.unescape(shown) == text


def seen_of(answer: Answer) -> str:
    """Return what the page holds of the answer that is on the screen."""
    return answer.interaction.interaction_id


def test_a_vote_that_is_late_is_not_one_on_the_answer_after(desk: Desk) -> None:
    gr = SimpleNamespace(skip=lambda: "same")
    (_, first), (_, second) = ask(desk), ask(desk)
    vote = chat_page._vote(desk)
    stars = chat_page._stars(gr, vote)
    assert stars(second, seen_of(first), [], 5) == chat_page.BEFORE
    assert (
        stars(second, chat_page.UNDER_WAY, [], 5) == chat_page.BEFORE
    )  # while the answer is written
    assert stars(second, seen_of(second), [], None) == "same"  # the next one has none yet
    assert desk.store.counts("shop") == {}
    assert stars(second, seen_of(second), [], 5) == chat_page.THANKS
    assert judged(desk) == [(seen_of(second), "rating")]


def test_a_vote_that_the_store_cannot_take_is_told(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, answer = ask(desk)

    def locked(*args: Any, **more: Any) -> str:
        raise sa.exc.OperationalError("INSERT", {}, Exception("database is locked"))

    monkeypatch.setattr(desk, "vote", locked)
    told = chat_page._vote(desk)(answer, seen_of(answer), [], FeedbackKind.thumbs, number=1.0)
    assert told == "Not stored: the store cannot be written now; please vote again."
    waiting, *_, notice, _, _ = review_page._judge(desk, KEEP)(
        *on_screen([answer.interaction]), "shop", "bea", FeedbackKind.thumbs, number=1.0
    )
    assert (waiting, notice) == ([answer.interaction], told)


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


def test_a_vote_on_an_answer_that_was_erased_is_told_as_on_the_review_page(desk: Desk) -> None:
    _, answer = ask(desk, pair=True)
    assert answer.other is not None
    erase(desk.settings, desk.registry, "ann")
    vote = chat_page._vote(desk)
    assert vote(answer, seen_of(answer), [], FeedbackKind.thumbs, number=1.0) == chat_page.GONE
    compared: dict[str, Any] = {"other_interaction_id": answer.other.interaction_id}
    compared |= {"choice": "left", "kind": FeedbackKind.preference}
    assert vote(answer, seen_of(answer), [], **compared) == chat_page.GONE
    assert desk.store.counts("shop") == {}


def test_a_comment_is_a_vote_that_stays_in_its_box_until_it_is_stored(desk: Desk) -> None:
    comment = chat_page._comment(chat_page._vote(desk))
    assert comment(None, "", [], "so so") == (chat_page.NO_ANSWER, "so so")
    assert "Not stored" in chat_page.NO_ANSWER
    _, answer = ask(desk)
    assert comment(answer, seen_of(answer), [], " ") == (EMPTY, " ")
    assert comment(answer, seen_of(answer), [], "so so") == (chat_page.THANKS, "")
    assert desk.store.counts("shop") == {"comment": 1}


@pytest.mark.parametrize("text", ["", " \n", None])
def test_who_sends_a_better_answer_without_words_is_told_so_in_plain_ones(
    desk: Desk, text: str | None
) -> None:
    _, answer = ask(desk)
    empty = {"kind": FeedbackKind.correction, "text": text}
    assert chat_page._vote(desk)(answer, seen_of(answer), [], **empty) == EMPTY
    waiting, *_, notice, _, _ = review_page._judge(desk, KEEP)(
        *on_screen([answer.interaction]), "shop", "bea", **empty
    )
    assert (waiting, notice) == ([answer.interaction], EMPTY)
    assert desk.store.counts("shop") == {}


def test_the_pages_and_the_api_count_one_persons_votes_together(desk: Desk) -> None:
    now = [0.0]
    desk.limit = RaterLimit(3, Buckets(lambda: now[0]))
    _, answer = ask(desk)
    sent = Feedback("shop", FeedbackKind.comment, "k", rater_id=hash_rater("shop", "ann"))
    desk.limit.admit([sent])  # as the API's inbox does, which has the same limit
    chat = chat_page._vote(desk)
    thumb = (answer, seen_of(answer), ["shorter"], FeedbackKind.thumbs)
    bobs = replace(answer, interaction=replace(answer.interaction, user_id="b" * 32))
    said = [chat(*thumb, number=n) for n in (0.0, 1.0, 0.0)]
    assert said[:2] == [chat_page.THANKS] * 2
    assert said[2] == "Thank you, but that was too fast to count. Please vote again in 20 s."
    assert chat(bobs, seen_of(bobs), [], FeedbackKind.thumbs, number=1.0) == chat_page.THANKS
    assert desk.store.counts("shop") == {"thumbs": 2}
    judge, waiting = review_page._judge(desk, KEEP), [answer.interaction] * 5
    for _ in range(4):
        waiting, *_, notice, _, _ = judge(
            *on_screen(waiting), "shop", "Eve", FeedbackKind.thumbs, number=1.0
        )
    assert notice == "Thank you, but that was too fast to count. Please vote again in 20 s."
    assert len(waiting) == 2  # the one that did not count is still to judge
    now[0] = 20.0
    assert chat(*thumb, number=0.0) == chat_page.THANKS


@pytest.mark.parametrize("name", ["", "   ", None, "\ud800", "a\x00b", "x" * 65])
def test_nobody_judges_without_a_name(desk: Desk, name: str | None) -> None:
    _, answer = ask(desk)
    fetch, judge = review_page._fetch(desk, KEEP), review_page._judge(desk, KEEP)
    assert fetch("shop", name)[0] == []
    assert fetch(None, "Eve")[-3].startswith("No assistant has a model yet")
    [first, *_] = waiting = fetch("shop", "Eve")[0]
    assert first == answer.interaction
    for kind, value in (
        (FeedbackKind.thumbs, {"number": 1.0}),
        (FeedbackKind.correction, {"text": "It is 9 euros."}),
        (None, {}),
    ):
        still, *_, notice, _, typed = judge(*on_screen(waiting), "shop", name, kind, **value)
        assert still == waiting
        assert ("Not stored" in notice, "name" in notice) == (True, True)
        assert typed == KEEP  # it need not be written again
    assert desk.store.counts("shop") == {}
    judge(*on_screen(waiting), "shop", " Eve ", FeedbackKind.thumbs, number=1.0)
    assert desk.store.counts("shop") == {"thumbs": 1}


def test_the_page_says_how_many_answers_there_are_to_judge(desk: Desk) -> None:
    fetch = review_page._fetch(desk, KEEP)
    told = []
    for _ in range(2):
        ask(desk)
        told.append(fetch("shop", "Eve")[-3])
    assert told == ["1 answer to judge", "2 answers to judge"]


def test_a_better_answer_that_is_not_sent_yet_stays_with_its_answer(desk: Desk) -> None:
    answers = [ask(desk)[1].interaction for _ in range(2)]
    fetch, judge = review_page._fetch(desk, KEEP), review_page._judge(desk, KEEP)
    first = on_screen(answers)
    blocked = (*[KEEP] * 5, review_page.UNSENT, KEEP, KEEP)
    for act, given in (
        (partial(judge, kind=FeedbackKind.thumbs, number=0.0), (*first, "shop", "Eve")),
        (partial(judge, kind=None), (*first, "shop", "Eve")),
        (fetch, ("shop", "Eve")),
    ):
        assert review_page._unless_typed(act, KEEP)(first[-1], "Nine euros.", *given) == blocked
    assert judged(desk) == []
    # Where no answer is shown it is in nobody's way.
    fetched = review_page._unless_typed(fetch, KEEP)("", "Nine euros.", "shop", "Eve")
    assert (len(fetched[0]), fetched[-1]) == (2, KEEP)
    thumbs = partial(judge, kind=FeedbackKind.thumbs, number=0.0)
    for box in ("", " \n", None):
        after = review_page._unless_typed(thumbs, KEEP)(first[-1], box, *first, "shop", "Eve")
        assert (after[0], after[-1]) == (answers[1:], KEEP)  # it may be written in already
    for left in (answers, answers[1:]):
        sent = judge(*on_screen(left), "shop", "Eve", FeedbackKind.correction, text="Nine.")
        assert sent[-1] == ""


def judged(desk: Desk) -> list[tuple[str, str]]:
    """Return the stored votes: about which answer, and of which kind."""
    with desk.store.database.read() as connection:
        rows = connection.exec_driver_sql("SELECT interaction_id, kind FROM feedback ORDER BY seq")
        return [(row[0], row[1]) for row in rows]


def test_only_what_was_on_the_screen_is_judged(desk: Desk) -> None:
    answers = [ask(desk)[1].interaction for _ in range(3)]
    judge, first = review_page._judge(desk, KEEP), on_screen(answers)
    waiting, *_ = judge(*first, "shop", "Eve", FeedbackKind.thumbs, number=1.0)
    assert waiting == answers[1:]
    # A second press, before the page has drawn the next one: the session is there already.
    for kind, value in (
        (FeedbackKind.thumbs, {"number": 0.0}),
        (FeedbackKind.correction, {"text": "Nine."}),
        (None, {}),
    ):
        still, skipped, seen, *_, notice, _, typed = judge(
            waiting, [], first[-1], "shop", "Eve", kind, **value
        )
        assert (still, skipped, seen) == (answers[1:], [], answers[1].interaction_id)
        assert notice == "Not stored: that was for the answer before this one."
        assert typed == KEEP
    assert judged(desk) == [(answers[0].interaction_id, "thumbs")]


def test_an_answer_that_was_erased_meanwhile_leaves_the_queue(desk: Desk) -> None:
    answers = [ask(desk)[1].interaction for _ in range(2)]
    with desk.store.database.write(alone=True) as connection:
        gone = answers[0].interaction_id
        connection.exec_driver_sql(f"DELETE FROM interactions WHERE interaction_id = '{gone}'")
    waiting, _, seen, *_, notice, _, typed = review_page._judge(desk, KEEP)(
        *on_screen(answers), "shop", "Eve", FeedbackKind.thumbs, number=1.0
    )
    assert (waiting, seen, typed) == (answers[1:], answers[1].interaction_id, KEEP)
    assert notice == "Not stored: this answer is no longer there."


def test_a_judgement_after_the_session_has_ended_is_of_what_is_on_the_screen(desk: Desk) -> None:
    one, other = (ask(desk)[1].interaction for _ in range(2))
    judge = review_page._judge(desk, KEEP)
    gone: tuple[Any, ...] = ([], [], one.interaction_id)
    nameless = judge(*gone, "shop", "", FeedbackKind.correction, text="Nine.")
    assert (nameless[0], nameless[-1]) == ([one], KEEP)
    waiting, *_ = judge(*gone, "shop", "Eve", FeedbackKind.correction, text="Nine.")
    assert judged(desk) == [(one.interaction_id, "correction")]
    assert waiting == [other]  # and the page goes on
    erased = judge([], [], "gone", "shop", "Eve", FeedbackKind.correction, text="Ten.")
    assert "Not stored: this answer is no longer there" in erased[-3]
    assert erased[-1] == KEEP
    assert judge([], [], "", "shop", "Eve", FeedbackKind.thumbs, number=1.0)[0] == [other]
    assert len(judged(desk)) == 1


def test_what_was_skipped_comes_back_only_when_answers_are_fetched(desk: Desk) -> None:
    answers = [ask(desk)[1].interaction for _ in range(2)]
    fetch, judge = review_page._fetch(desk, KEEP), review_page._judge(desk, KEEP)
    waiting, skipped, seen, *_ = fetch("shop", "Eve")
    for left in (1, 0):
        waiting, skipped, seen, *_, notice, _, _ = judge(
            waiting, skipped, seen, "shop", "Eve", None
        )
        assert len(waiting) == left
    assert notice == "Nothing left but what was skipped; fetch answers to see it again."
    new = ask(desk)[1].interaction
    assert fetch("shop", "Eve", skipped)[0] == [new]
    again, skipped, *_ = fetch("shop", "Eve")
    assert {one.interaction_id for one in again} == {one.interaction_id for one in (*answers, new)}
    assert skipped == []


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


def test_people_of_both_arms_are_asked_equally_often(desk: Desk) -> None:
    """Also where the challenger's answers differ more among themselves."""
    _, answer = ask(desk)
    rng, asked = random.Random(0), {0: 0, 1: 0}
    for _ in range(2000):
        for version in asked:
            said = {"disagreement": rng.gauss(0.35 + 0.1 * version, 0.1)}
            one = replace(answer.interaction, model_version=version, sampling=said)
            asked[version] += desk._is_doubtful(one)
    assert asked[0] == pytest.approx(200, abs=50)
    assert asked[1] == pytest.approx(200, abs=50)


def test_two_answers_to_one_question_are_one_in_an_experiment(desk: Desk, tmp_path: Path) -> None:
    first = desk.registry.ledger.baseline("shop")
    assert first is not None
    challenger = tmp_path / "challenger"
    shutil.copytree(first.path, challenger)
    desk.registry.ledger.add_version(
        "shop",
        label="v1",
        path=challenger,
        files=folder_sha256(challenger),
        lineage={},
        gate=None,
        fingerprint="f1",
    )
    book = ExperimentBook(desk.store.database)
    begun = book.start("shop", champion=0, challenger=1, share=0.5, actor="test")
    until = time.monotonic() + 60
    while (answer := ask(desk, pair=True)[1]).interaction.experiment is None:
        # Of no experiment: nor does it say anything of another agent's marks, or another month's.
        mark = hashed("network", f"shop {answer.interaction.created_at:%Y-%m}", "home")[:16]
        assert answer.interaction.sampling["network"] == mark
        assert time.monotonic() < until  # the challenger loads meanwhile
        time.sleep(0.05)
    assert answer.other is not None
    desk.vote(
        answer.interaction,
        FeedbackKind.preference,
        person="ann",
        other_interaction_id=answer.other.interaction_id,
        choice="right",
    )
    arms, _ = measured(desk.store.database, begun, desk.settings.experiments)
    rate = arms["feedback_rate"]
    assert max(rate.challenger.mean, rate.champion.mean) == 1.0
    own = {"challenger_share", "ending", "fell_back"}
    assert own <= set(answer.interaction.sampling)
    assert not own & set(answer.other.sampling)
    # Who goes on from the second answer is of the same network.
    assert answer.other.sampling["network"] == answer.interaction.sampling["network"]
    # Of another experiment's marks it says nothing.
    assert (
        answer.interaction.sampling["network"]
        == hashed("network", begun.experiment_id, "home")[:16]
    )


def with_heads(desk: Desk, heads: int) -> LearnedReward:
    """Promote a version whose reward model has so many heads, untaught, and return that."""
    state = desk.settings.state_dir
    turn = state / f"turn-{heads}"
    shutil.copytree(state / "agents/shop/v0", turn / "ppo/policy")
    model, tokenizer = new_reward_model(state / "agents/shop/v0", seed=0, device="cpu")
    torch.manual_seed(0)
    model.head = torch.nn.Linear(model.head.in_features, heads)
    folder = turn / "reward/proxy"
    limits = Limits(max_prompt_tokens=60, max_completion_tokens=60)
    save_reward_model(model, tokenizer, folder, limits=limits, calibration=Calibration(offset=0.5))
    ledger = desk.registry.ledger
    version = ledger.add_version(
        "shop",
        label=f"v{heads}",
        path=turn / "ppo/policy",
        files=folder_sha256(turn / "ppo/policy"),
        lineage={"reward_models": {"proxy": folder_sha256(folder)}},
        gate=None,
        fingerprint=f"f{heads}",
    )
    before = ledger.champion("shop")
    assert before is not None
    ledger.promote(
        "shop",
        version.version,
        actor="test",
        reason="test",
        expected_champion=before.version,
        force=True,
    )
    return load_reward_model(folder, device="cpu")


def loaded(desk: Desk) -> LearnedReward | None:
    """Return the champion's reward model of several heads once it is loaded, if it has them."""
    desk.doubts.about("shop", user_prompt("hi"), "hello")
    return desk.doubts._loaded["shop"][1].result()


def test_heads_that_disagree_unusually_far_are_a_reason_to_ask_and_to_show_a_pair(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = desk.settings.pages.model_copy(update={"collection_rate": 0.0})
    desk.settings = desk.settings.model_copy(update={"pages": pages})
    _, answer = ask(desk)
    assert "reward_disagreement" not in answer.interaction.sampling  # version 0 has no such model
    reward = with_heads(desk, 3)
    _, answer = ask(desk)
    assert "reward_disagreement" not in answer.interaction.sampling  # nobody waits while it loads
    assert loaded(desk) is not None
    happened: list[str] = []
    about = desk.doubts.about

    def told(*asked: Any) -> dict[str, Any]:
        happened.append("judged")
        return about(*asked)

    monkeypatch.setattr(desk.doubts, "about", told)
    for piece in desk.answer("shop", user_prompt("how much?"), **ASKED):
        if isinstance(piece, Answer):
            answer = piece
        else:
            happened.append("shown")
    assert happened[0] == "shown"
    assert happened[-1] == "judged"  # once, when every word was shown
    assert happened.count("judged") == 1
    assert not answer.asks
    this = answer.interaction
    heads = reward.judge([RewardInput(this.prompt, this.completion)]).by_member
    assert len(heads) == 3
    spread = statistics.pstdev(scores[0] for scores in heads.values())
    assert this.sampling["reward_disagreement"] == pytest.approx(spread, rel=1e-5)
    assert this.sampling["reward_model"] == reward.version
    assert desk.store.interaction(this.interaction_id) == this
    usual = desk._disagreements
    mine = f"shop {this.model_version}"
    usual[f"{mine} drawn"].extend([1.0] * desk_module.REMEMBERED)  # nothing is above that
    usual[f"{mine} {reward.version}"].extend([spread / 100] * desk_module.ENOUGH)
    _, answer = ask(desk)
    assert answer.asks
    assert answer.other is not None
    assert not {"disagreement", "reward_disagreement"} & set(answer.other.sampling)
    off = pages.model_copy(update={"reward_disagreement": False})
    desk.settings = desk.settings.model_copy(update={"pages": off})
    _, answer = ask(desk)
    assert not answer.asks


def test_a_reward_model_of_one_head_or_of_other_files_says_nothing(desk: Desk) -> None:
    with_heads(desk, 1)
    assert loaded(desk) is None
    with_heads(desk, 2)
    settings = desk.settings.state_dir / "turn-2/reward/proxy/reward_model.json"
    whole = settings.read_text()
    settings.write_text(whole.replace("{", "{ ", 1))
    with capture_logs() as logs:
        assert loaded(desk) is None
    assert "reward_model.json changed or missing" in logs[0]["why"]
    settings.write_text(whole)
    settings.with_name("report.json").write_text("{}")  # as an erasure may leave it
    desk.doubts._loaded.clear()
    reward = loaded(desk)
    assert reward is not None
    with torch.no_grad():
        reward.model.head.bias.fill_(float("nan"))
    with capture_logs() as logs:
        assert desk.doubts.about("shop", user_prompt("hi"), "hello") == {}
    assert logs[0]["event"] == "reward disagreement not known"


def test_answers_of_an_upstream_are_compared_too(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that gives fewer answers than were asked of it still answers."""
    texts = iter(["It is nine.", "Nine euros.", "It is nine.", "Ten."])
    asked: list[dict[str, Any]] = []

    async def upstream(
        _: Any, prompt: Any, settings: dict[str, Any], **__: Any
    ) -> AsyncIterator[Any]:
        asked.append(settings)
        number = len(asked)
        await asyncio.sleep(0)
        if number > 4:  # beside the second answer
            raise ModelError("it is busy")
        yield next(texts)
        yield {"usage": {"prompt_tokens": 1, "completion_tokens": 3}, "finish_reason": "stop"}

    monkeypatch.setattr(arms, "upstream_pieces", upstream)
    there = UpstreamSettings(url="http://127.0.0.1:9/v1", model="far")
    serving = desk.settings.serving.model_copy(update={"upstreams": {"far": there}})
    far = Desk(desk.settings.model_copy(update={"serving": serving}), desk.store, desk.registry)
    *_, answer = far.answer("far", user_prompt("how much?"), pair=True, **ASKED)
    assert isinstance(answer, Answer)
    assert answer.other is not None
    assert {answer.interaction.completion, answer.other.completion} == {
        "It is nine.",
        "Nine euros.",
    }
    for one in (answer.interaction, answer.other):
        kept = far.store.interaction(one.interaction_id)
        assert kept is not None
        assert kept.sampling["upstream"] == "far"
    assert 0 < answer.interaction.sampling["disagreement"] < 1
    choice: dict[str, Any] = {"other_interaction_id": answer.other.interaction_id, "choice": "left"}
    far.vote(answer.interaction, FeedbackKind.preference, person="ann", **choice)
    assert far.store.counts("far") == {"preference": 1}
    *_, answer = far.answer("far", user_prompt("and that?"), pair=True, **ASKED)
    assert isinstance(answer, Answer)
    assert (answer.interaction.completion, answer.other) == ("Ten.", None)
    assert len(asked) == 6


def test_tokens_of_answers_drawn_beside_one_are_counted(desk: Desk) -> None:
    """Each of them read the prompt, and wrote, whether or not it is shown."""
    metrics = Metrics()
    counting = Gateway(desk.settings, desk.store, desk.registry, metrics)
    wishes = Wishes(max_completion_tokens=5, seed=0)  # each is as long as it may be
    pieces = counting.reply("shop", user_prompt("how much?"), wishes, others=ALTERNATIVES)
    reply = list(_in_turn(pieces))[-1]
    assert isinstance(reply, Reply)
    assert len(reply.others) == ALTERNATIVES

    def counted(side: str) -> float:
        labels = {"agent": "shop", "side": side}
        return metrics.registry.get_sample_value("rlhf_tokens_total", labels) or 0.0

    assert counted("prompt") == (1 + ALTERNATIVES) * reply.prompt_tokens
    assert counted("completion") == (1 + ALTERNATIVES) * 5
    counting.close()


def test_tokens_of_an_upstreams_second_answers_are_as_it_tells_them(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on its bill, one that broke off as well."""
    asked: list[dict[str, Any]] = []

    async def upstream(
        _: Any, prompt: Any, settings: dict[str, Any], **__: Any
    ) -> AsyncIterator[Any]:
        asked.append(settings)
        number = len(asked)
        await asyncio.sleep(0)
        yield "It is "
        if number == 3:
            raise ModelError("it is busy")
        yield f"{number}."
        yield {"usage": {"prompt_tokens": 7, "completion_tokens": 10 * number}} | STOPPED

    monkeypatch.setattr(arms, "upstream_pieces", upstream)
    there = UpstreamSettings(url="http://127.0.0.1:9/v1", model="far")
    serving = desk.settings.serving.model_copy(update={"upstreams": {"far": there}})
    settings, metrics = desk.settings.model_copy(update={"serving": serving}), Metrics()
    far = Desk(
        settings, desk.store, desk.registry, Gateway(settings, desk.store, desk.registry, metrics)
    )
    *_, answer = far.answer("far", user_prompt("how much?"), pair=True, **ASKED)
    assert isinstance(answer, Answer)
    counted = metrics.shown().decode()
    assert 'rlhf_tokens_total{agent="far",side="completion"} 31.0' in counted  # 10 + 20 + a piece
    by_length = len("how much?") // 4 + 1
    assert f'rlhf_tokens_total{{agent="far",side="prompt"}} {14 + by_length}.0' in counted


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
    desk.gateway.tracing.enabled = True  # as pages.log_traces says
    with capture_logs() as said:
        _, answer = ask(desk, pair=True)
        desk.gateway.tracing.finish()
    assert answer.other is not None
    about = [one for one in said if "not logged" in one["event"]]  # other threads log as well
    assert {"MLflow is away"} == {one["why"] for one in about}
    assert not any("exc_info" in one for one in said)  # while it is away, so many lines a day
    assert logged == [answer.interaction.interaction_id, answer.other.interaction_id]


def test_a_trace_that_comes_after_an_erasure_is_taken_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_pipeline.registry import forgetting, traces

    gone: list[str] = []
    monkeypatch.setattr(
        traces, "log_interaction", lambda _, interaction: f"tr-{interaction.interaction_id}"
    )
    monkeypatch.setattr(forgetting, "forget_trace", lambda _, agent, trace: gone.append(trace))
    _, answer = ask(desk)
    desk.gateway.tracing.enabled = True
    for one in (answer.interaction, replace(answer.interaction, interaction_id="erased")):
        desk.gateway.tracing.note(one)
    desk.gateway.tracing.finish()
    assert gone == ["tr-erased"]


def test_more_answers_than_mlflow_takes_are_named_and_not_held(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_pipeline.registry import traces

    begun, slow = threading.Event(), threading.Event()
    logged: list[Any] = []
    monkeypatch.setattr(tracing_module, "MOST_WAITING", 2)

    def takes_long(_: Any, interaction: Any) -> None:
        begun.set()
        slow.wait(10)
        logged.append(interaction)

    monkeypatch.setattr(traces, "log_interaction", takes_long)
    tracing = tracing_module.Tracing(desk.settings, desk.store, desk.registry)
    tracing.enabled = True
    _, answer = ask(desk)
    with capture_logs() as said:
        for _ in range(3):
            tracing.note(answer.interaction)
        assert begun.wait(10)
        tracing.close()
    assert [one["event"] for one in said] == ["trace not logged", "traces not logged"]
    assert said[1]["answers"] == 2
    slow.set()
    tracing.finish()
    assert logged == [answer.interaction]  # the one under way


def test_a_person_is_told_why_an_answer_ends_where_it_does() -> None:
    import gradio as gr

    said = Interaction("i-1", "tea", user_prompt("what now?"), "this and", 1, now())
    plain = Answer(said, asks=False)

    def told(answer: Answer) -> str:
        words: str = chat_page._finished(gr, answer, [], "what now?", pair_mode=False)[2]
        return words

    assert told(plain) == ""
    assert "must not be shown" in told(replace(plain, ending="content_filter"))
    asked = told(replace(plain, ending="length", asks=True))
    assert asked.startswith("The answer ends here because it has reached its greatest length. Was")


def test_who_wants_two_answers_is_told_where_there_is_one_to_see() -> None:
    def told(*, pair: bool, asks: bool = False) -> str:
        said = Interaction("i-1", "tea", user_prompt("what now?"), "nothing", 1, now())
        gr = SimpleNamespace(update=dict, skip=dict)
        return str(chat_page._finished(gr, Answer(said, asks), [], "what now?", pair)[2])

    assert told(pair=True) == told(pair=True, asks=True) == chat_page.ALIKE
    assert told(pair=False) == ""
