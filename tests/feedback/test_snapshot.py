"""Snapshots: the votes that counted at a moment, however the table goes on."""

from __future__ import annotations

import errno
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import NotEnoughData
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.store import FeedbackStore, target_of
from rlhf_pipeline.feedback.support import support_of
from rlhf_pipeline.feedback.wishes import wished_shares
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    Message,
    now,
    prompt_to_json,
    user_prompt,
    uuid7,
)

THUMBS = Feedback(
    agent_id="tea",
    kind=FeedbackKind.thumbs,
    idempotency_key="one",
    prompt=user_prompt("Why?"),
    completion="Because.",
    number=1.0,
    rater_id="ann",
)


def vote(key: str, **changes: Any) -> Feedback:
    return replace(THUMBS, idempotency_key=key, **changes)


@pytest.fixture
def store(any_database: Database) -> FeedbackStore:
    return FeedbackStore(any_database)


def mark(store: FeedbackStore, watermark: int | None = None, agent_id: str = "tea") -> str:
    newest = snapshot.newest_seq(store.database, agent_id)
    return snapshot.fingerprint(
        store.database, agent_id, newest if watermark is None else watermark
    )


def test_the_same_votes_have_the_same_fingerprint(store: FeedbackStore) -> None:
    store.append([THUMBS, vote("two", rater_id="bob")])
    first = mark(store)
    store.append([THUMBS])  # a retry
    store.append([vote("other", agent_id="coffee")])
    assert mark(store) == mark(store, 10_000) == first
    assert mark(store, agent_id="coffee") != first
    assert len(first) == 64


def test_a_new_vote_and_a_change_of_mind_change_the_fingerprint(store: FeedbackStore) -> None:
    marks = [mark(store)]
    for event in (
        THUMBS,
        vote("two", rater_id="bob"),
        vote("three", number=0.0),  # ann changes her mind
        vote("four", number=1.0),  # and back: another vote than the first
    ):
        store.append([event])
        marks.append(mark(store))
    assert len(set(marks)) == 5


def test_what_comes_later_does_not_leak_in(store: FeedbackStore, tmp_path: Path) -> None:
    store.append([THUMBS, vote("two", rater_id="bob")])
    watermark = snapshot.newest_seq(store.database, "tea")
    before = mark(store, watermark)
    store.append([vote("three", number=0.0), vote("four", rater_id="cat")])
    assert mark(store, watermark) == before
    taken = snapshot.take(store.database, "tea", watermark, tmp_path / "then.parquet")
    assert (taken.fingerprint, taken.rows, taken.watermark) == (before, 2, watermark)
    frame = snapshot.read(taken.path)
    assert list(frame.rater_id) == ["ann", "bob"]
    assert list(frame.number) == [1.0, 1.0]  # ann's later change of mind is not in it
    assert snapshot.kinds_in(taken.path) == {"thumbs": 2}
    now_there = snapshot.take(store.database, "tea", watermark + 2, tmp_path / "now.parquet")
    assert list(snapshot.read(now_there.path).rater_id) == ["bob", "ann", "cat"]
    assert snapshot.find(store.database, "tea", before) == taken
    assert snapshot.find(store.database, "tea", "unknown") is None


def test_the_file_is_the_one_that_was_recorded(store: FeedbackStore, tmp_path: Path) -> None:
    store.append([THUMBS])
    path = tmp_path / "deep" / "er" / "feedback.parquet"
    first = snapshot.take(store.database, "tea", 10, path)
    assert first.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    again = snapshot.take(store.database, "tea", 10, path)  # an attempt after one that failed
    assert again.fingerprint == first.fingerprint
    with store.database.read() as connection:
        assert len(connection.execute(db.snapshots.select()).all()) == 1
    assert [p.name for p in path.parent.iterdir()] == ["feedback.parquet"]


def answered(user_id: str | None, network: str | None) -> Interaction:
    marked = {"network": network} if network else {}
    shown = Interaction(uuid7(), "tea", user_prompt("Why?"), "Because.", 1, now(), sampling=marked)
    return replace(shown, user_id=user_id)


def vote_on(shown: Interaction, rater_id: str | None, **changes: Any) -> Feedback:
    of_it = {"prompt": None, "completion": None, "interaction_id": shown.interaction_id}
    return vote(f"{rater_id} {shown.interaction_id}", rater_id=rater_id, **of_it, **changes)


def test_a_vote_on_ones_own_answer_says_from_which_network_it_was_asked(
    store: FeedbackStore, tmp_path: Path
) -> None:
    asked, plain, nobodys = (
        answered(user, mark) for user, mark in (("ann", "a mark"), ("ann", None), (None, "a mark"))
    )
    store.add_interactions([asked, plain, nobodys])
    others = [vote_on(asked, rater) for rater in ("bob", None)]
    store.append([vote_on(asked, "ann"), *others, vote_on(plain, "ann"), vote_on(nobodys, "ann")])
    store.append([THUMBS])  # of another system's answer
    path = tmp_path / "feedback.parquet"
    snapshot.take(store.database, "tea", 9, path)
    found = snapshot.read(path)["network"].fillna("").tolist()
    assert found == ["a mark", "", "", "", "", ""]


@pytest.mark.parametrize(
    ("editors", "networks", "set_aside"),
    [(1, 30, [30]), (40, 1, [])],
    ids=["one corrects the answers of many networks", "many those of one office"],
)
def test_who_corrects_other_peoples_answers_is_one_rater_wherever_those_came_from(
    store: FeedbackStore, tmp_path: Path, editors: int, networks: int, set_aside: list[int]
) -> None:
    liked = {"kind": FeedbackKind.preference, "number": None, "choice": "left"}
    others = [
        vote(f"{n}", rater_id=f"r{n % 60}", other_completion=f"No idea, {n}.", **liked)
        for n in range(300)
    ]
    better = {"kind": FeedbackKind.correction, "number": None, "text": "Because. Zib zab."}
    shown = [
        answered(f"visitor {n}", f"line {n % networks}") for n in range(max(editors, networks))
    ]
    store.add_interactions(shown)
    corrected = [vote_on(one, f"editor {n % editors}", **better) for n, one in enumerate(shown)]
    store.append([*others, *corrected])
    path = tmp_path / "feedback.parquet"
    snapshot.take(store.database, "tea", 1000, path)
    support = support_of(snapshot.read(path), people_per_network=1)
    assert [len(a.places) for a in support.associations] == set_aside


def test_the_file_is_packed_the_same_way_each_time(store: FeedbackStore, tmp_path: Path) -> None:
    """Every version keeps one for ever."""
    store.append([vote(str(n), rater_id=f"rater {n}") for n in range(9)])
    taken = [snapshot.take(store.database, "tea", 9, tmp_path / name) for name in ("a", "b")]
    assert taken[0].sha256 == taken[1].sha256
    columns = pq.read_metadata(taken[0].path).row_group(0).to_dict()["columns"]
    assert {column["compression"] for column in columns} == {"ZSTD"}


def test_a_fingerprint_is_asked_for_without_building_its_query_again(
    store: FeedbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append([THUMBS])
    before = snapshot.fingerprint(store.database, "tea", 9)

    def built(*columns: object) -> None:
        raise AssertionError(f"a query was built: {columns}")

    monkeypatch.setattr("rlhf_pipeline.feedback.snapshot.sa.select", built)
    assert snapshot.fingerprint(store.database, "tea", 9) == before
    assert snapshot.fingerprint(store.database, "milk", 9) != before
    taken = snapshot.take(store.database, "tea", 9, tmp_path / "taken.parquet")
    assert (taken.fingerprint, taken.rows) == (before, 1)


def test_what_identifies_people_stays_out_of_the_file(store: FeedbackStore, tmp_path: Path) -> None:
    asked = user_prompt("I am\nann@example.org, who are you?")
    store.append(
        [replace(THUMBS, prompt=asked, completion="Call +49 30 1234567", comment="me@a.io")]
    )
    paths = tmp_path / "first.parquet", tmp_path / "second.parquet", tmp_path / "raw.parquet"
    first, again = (snapshot.take(store.database, "tea", 9, path) for path in paths[:2])
    assert first.sha256 == again.sha256
    [row] = snapshot.read(paths[0]).itertuples()
    assert row.prompt == prompt_to_json(user_prompt("I am\n[email], who are you?"))
    assert (row.completion, row.comment) == ("Call [phone]", "[email]")
    assert snapshot.redacted_in(paths[0]) == {"email": 2, "phone": 1}
    store.append([replace(THUMBS, completion="bel 020 123 4567", idempotency_key="nl")])
    snapshot.take(store.database, "tea", 10, paths[1], regions=("NL",))
    assert snapshot.read(paths[1]).completion[1] == "bel [phone]"
    snapshot.take(store.database, "tea", 9, paths[2], redacts=False)
    assert snapshot.read(paths[2]).prompt[0] == prompt_to_json(asked)
    assert snapshot.redacted_in(paths[2]) is None


def test_tags_are_a_list_whatever_was_taken_out_of_them(
    store: FeedbackStore, tmp_path: Path
) -> None:
    tags = ("wants:short", "-----BEGIN PRIVATE KEY-----", "éann@example.org", "a\nb@example.org")
    store.append([replace(THUMBS, tags=tags)])
    path = tmp_path / "feedback.parquet"
    snapshot.take(store.database, "tea", 9, path)
    assert json.loads(snapshot.read(path).tags[0]) == [
        "wants:short",
        "[key]",
        "[email]",
        "a\n[email]",
    ]
    assert wished_shares(path, lambda voter: True) == {}  # it is read, and one is too few


def test_names_of_criteria_say_nobodys_address(store: FeedbackStore, tmp_path: Path) -> None:
    names: list[dict[str, float]] = [
        {"helpful": 0.5, "as ann@example.org is": 1},
        # Which of the two is 0.2 nobody could say any more.
        {"ann@example.org": 0.2, "bob@example.org": 0.8, "polite": 0.4, "[phone]": 0.1},
        {"ann@example.org": 0.2, "bob@example.org": 0.8},
    ]
    rated = {"kind": FeedbackKind.criteria, "number": None}
    store.append(
        [vote(f"{n}", rater_id=f"r{n}", criteria=told, **rated) for n, told in enumerate(names)]
    )
    path = tmp_path / "feedback.parquet"
    snapshot.take(store.database, "tea", 9, path)
    assert pq.read_table(path)["criteria"].to_pylist() == [
        '{"helpful": 0.5, "as [email] is": 1}',
        '{"polite": 0.4, "[phone]": 0.1}',
        None,  # a vote without a value, which validation sets aside
    ]
    assert snapshot.redacted_in(path) == {"email": 5}


def test_without_feedback_there_is_nothing_to_freeze(store: FeedbackStore, tmp_path: Path) -> None:
    assert snapshot.newest_seq(store.database, "tea") == 0
    with pytest.raises(NotEnoughData, match="rlhf ingest"):
        snapshot.take(store.database, "tea", 0, tmp_path / "feedback.parquet")
    assert not (tmp_path / "feedback.parquet").exists()
    assert list(tmp_path.glob(".*")) == []


def test_a_snapshot_that_fails_leaves_no_words_behind(
    store: FeedbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*inputs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store.append([vote("one")])
    monkeypatch.setattr(snapshot, "_redact", full)
    with pytest.raises(OSError, match="No space left"):
        snapshot.take(store.database, "tea", 1, tmp_path / "taken" / snapshot.FILE)
    assert list((tmp_path / "taken").iterdir()) == []


def test_rows_carry_the_interactions_they_are_about(store: FeedbackStore, tmp_path: Path) -> None:
    prompt = (Message("system", "Be brief."), Message("user", "Why?"))
    said = [
        Interaction(uuid7(), "tea", prompt, text, model_version=version, created_at=now())
        for version, text in ((3, "Because."), (4, "Who knows."))
    ]
    store.add_interactions(said)
    bare = replace(THUMBS, prompt=None, completion=None, interaction_id=said[0].interaction_id)
    store.append(
        [
            bare,
            replace(
                bare,
                kind=FeedbackKind.preference,
                idempotency_key="pair",
                number=None,
                other_interaction_id=said[1].interaction_id,
                choice="right",
                shown_first="other",
                topic="whys",
                comment="shorter",
            ),
            vote("inline", rater_id=None, criteria={"safety": 0.5}, kind=FeedbackKind.criteria),
            vote(
                "inline pair",
                kind=FeedbackKind.preference,
                number=None,
                other_completion="No.",
                other_prompt=user_prompt("Why not?"),
                choice="tie",
            ),
            vote("text", kind=FeedbackKind.correction, number=None, text="Since."),
        ]
    )
    taken = snapshot.take(store.database, "tea", 100, tmp_path / "feedback.parquet")
    frame = snapshot.read(taken.path)
    rows: dict[str, Any] = {str(row.kind): row for row in frame.itertuples()}
    thumbs, correction = rows["thumbs"], rows["correction"]
    assert (thumbs.prompt, thumbs.completion) == (prompt_to_json(prompt), "Because.")
    assert (thumbs.model_version, thumbs.number) == (3, 1.0)
    assert (correction.text, correction.completion) == ("Since.", "Because.")
    assert rows["criteria"].criteria == '{"safety": 0.5}'
    assert list(frame.index) == list(range(5))
    both = frame[frame.kind == "preference"].sort_values("seq")
    assert list(both.completion) == ["Because.", "Because."]
    assert list(both.other_completion) == ["Who knows.", "No."]
    assert list(both.other_prompt) == [
        prompt_to_json(prompt),
        prompt_to_json(user_prompt("Why not?")),
    ]
    assert list(both.choice) == ["right", "tie"]
    assert list(both.shown_first) == ["other", "this"]
    assert list(both.topic.dropna()) == ["whys"]
    assert str(frame.received_at.dtype).startswith("datetime64[us, UTC")


def slow_effective(events: list[Feedback], watermark: int) -> list[str]:
    """Return the keys of the votes that count, by the definition and nothing else."""
    last: dict[tuple[str, str, str], int] = {}
    for number, event in enumerate(events[:watermark]):
        last[event.rater_id or event.idempotency_key, target_of(event), event.kind] = number
    return [events[number].idempotency_key for number in sorted(last.values())]


def test_a_snapshot_holds_what_a_slow_loop_finds(
    store: FeedbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    events = [
        vote(
            f"key {n}",
            rater_id=rng.choice(["ann", "bob", "cat", None]),
            completion=rng.choice("ABC"),
            kind=rng.choice([FeedbackKind.thumbs, FeedbackKind.rating]),
        )
        for n in range(120)
    ]
    store.append(events)
    with store.database.read() as connection:
        f = db.feedback.c
        by_id = {
            row.feedback_id: row.idempotency_key
            for row in connection.execute(sa.select(f.feedback_id, f.idempotency_key))
        }
        first = connection.execute(sa.select(sa.func.min(f.seq))).scalar_one()
    whole = mark(store)
    monkeypatch.setattr(snapshot, "CHUNK_ROWS", 7)  # boundaries everywhere
    assert mark(store) == whole
    for watermark in (1, 30, 77, 120):
        path = tmp_path / f"{watermark}.parquet"
        taken = snapshot.take(store.database, "tea", first + watermark - 1, path)
        found = [by_id[feedback_id] for feedback_id in snapshot.read(path).feedback_id]
        assert found == slow_effective(events, watermark)
        assert taken.rows == len(found)
