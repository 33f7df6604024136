"""Data sets: a prompt stays in its split, a voter serves one model, a row becomes one record."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_pipeline.config import Settings
from rlhf_pipeline.errors import FeedbackError, NotEnoughData
from rlhf_pipeline.feedback.datasets import (
    JOBS,
    Job,
    build,
    conversation_of,
    job_of,
    line_of,
    newest,
    opening_of,
    read_jsonl,
    split_of,
    unit_interval,
    within_caps,
    write_jsonl,
)
from rlhf_pipeline.records import (
    EvaluationPrompt,
    FeedbackKind,
    Message,
    PreferencePair,
    Prompt,
    RewardExample,
    SftExample,
    prompt_to_json,
    user_prompt,
)
from rlhf_pipeline.stages import reward_splits

SHARES: dict[Job, float] = {"proxy": 0.6, "stopping": 0.2, "gate": 0.2}
COLUMNS = (
    "feedback_id seq agent_id kind voter rater_id source origin occurred_at received_at "
    "interaction_id model_version prompt completion number text criteria other_completion "
    "other_prompt choice shown_first topic comment"
).split()


def row(row_id: int, kind: str, question: str = "Why?", **values: Any) -> dict[str, Any]:
    return {
        "feedback_id": f"id-{row_id}",
        "kind": kind,
        "voter": f"voter-{row_id % 5}",
        "origin": "test",
        "prompt": prompt_to_json(user_prompt(question)),
        "completion": "A",
        "shown_first": "this",
        **values,
    }


def frame_of(*rows: dict[str, Any]) -> pd.DataFrame:
    frame = pd.DataFrame(list(rows), columns=COLUMNS)
    return frame.astype({"number": "float64"})


def made(*rows: dict[str, Any], **more: Any) -> Any:
    return build(frame_of(*rows), **{"evaluation_share": 0.0, "min_rating": 4, **more})


# -- splits and jobs ----------------------------------------------------------------------------


def test_a_prompt_keeps_its_split_as_the_data_grows() -> None:
    rows = [row(n, "thumbs", f"Question {n}?", number=1.0) for n in range(300)]
    few = made(*rows[:100], evaluation_share=0.2)
    many = made(*rows, evaluation_share=0.2)
    before = {e.example_id: e.split for e in few.reward_examples}
    after = {e.example_id: e.split for e in many.reward_examples}
    assert before.items() <= after.items()
    share = sum(split == "evaluation" for split in after.values()) / 300
    assert 0.12 < share < 0.28  # 0.2 +- 3.5 standard errors


def test_no_prompt_is_in_two_splits() -> None:
    rows = []
    for n in range(60):
        question = f"Question {n % 20}?"
        rows += [
            row(3 * n, "thumbs", question, number=1.0, completion=f"A{n}"),
            row(3 * n + 1, "correction", question, text=f"B{n}"),
            row(3 * n + 2, "rating", question, number=5.0, completion=f"C{n}"),
        ]
    found = made(*rows, evaluation_share=0.4)
    train = {
        r.prompt for r in (*found.preference_pairs, *found.reward_examples) if r.split == "train"
    }
    held_out = {
        r.prompt
        for r in (*found.preference_pairs, *found.reward_examples)
        if r.split == "evaluation"
    }
    assert train
    assert held_out
    assert not train & held_out
    assert {e.prompt for e in found.sft_examples} == train
    assert {e.prompt for e in found.evaluation_prompts} == held_out


def test_a_larger_share_only_adds_held_out_prompts() -> None:
    asked = [user_prompt(f"Question {n}?") for n in range(200)]
    held = [{p for p in asked if split_of(p, share) == "evaluation"} for share in (0, 0.1, 0.3, 1)]
    assert held[0] == set()
    assert held[0] < held[1] < held[2] < held[3] == set(asked)


def conversation(n: int, turns: int) -> Prompt:
    """Return the prompt of the n-th person's last turn of so many."""
    said = [Message("system", "Be kind."), Message("user", f"Question {n}?")]
    for turn in range(1, turns):
        said += [Message("assistant", f"Answer {n}."), Message("user", f"And {turn}?")]
    return tuple(said)


def test_all_turns_of_a_conversation_are_in_one_split() -> None:
    rows = [
        row(3 * n + turns, "thumbs", number=1.0, prompt=prompt_to_json(conversation(n, turns)))
        for n in range(80)
        for turns in (1, 2, 3)
    ]
    found = made(*rows, evaluation_share=0.3)
    sides: dict[str, set[str]] = {}
    for example in found.reward_examples:
        sides.setdefault(example.prompt[1].content, set()).add(example.split)
    assert sorted(map(sorted, sides.values()))[0] == ["evaluation"]
    assert sorted(map(sorted, sides.values()))[-1] == ["train"]
    assert {len(split) for split in sides.values()} == {1}
    one, two = (prompt[:1] for prompt in (conversation(1, 1), conversation(2, 1)))
    assert split_of(one, 0.5) == split_of(two, 0.5)  # nobody has said anything yet


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("How much is the kettle?", "how much is the KETTLE", True),
        ("How much is the kettle?", "  How much,\nis the “kettle”!? ", True),
        ("Ｗｈａｔ is ½ of it?", "what is 1⁄2 of it", True),  # wide letters; a sign for two numbers
        ("Which sizes, in Maße?", "WHICH SIZES IN MASSE", True),
        ("水壶多少钱？", "水壶 多少钱", False),  # who leaves no spaces has put one in
        ("水壶多少钱？", "水壶多少钱!", True),
        ("How much is kettle 1?", "How much is kettle 2?", False),
        ("how much is the kettle", "howmuch is the kettle", False),
        ("यह किताब कितने की", "यह किताब कितने कि", False),  # they differ in a mark alone
        ("Hello!", "hello", False),  # a greeting
        ("👍", "👎", False),  # no words
        ("❤️" * 9, "☀️" * 9, False),  # each holds the same marks
        ("?", "!", False),
    ],
)
def test_a_question_in_other_capitals_or_punctuation_is_the_same_conversation(
    one: str, other: str, alike: bool
) -> None:
    assert (conversation_of(user_prompt(one)) == conversation_of(user_prompt(other))) is alike


@pytest.mark.parametrize(
    ("asked", "alike"), [("How much is the kettle?", True), ("Hello!", False), ("👍", False)]
)
def test_a_question_under_another_system_message_is_the_same_conversation(
    asked: str, alike: bool
) -> None:
    """Such as one that holds the day: else what is learnt of a question is asked of its judge."""
    plain = user_prompt(asked)
    dated = [(Message("system", f"Today is day {day}."), *plain) for day in range(40)]
    answered = [(*one, Message("assistant", "Well."), Message("user", "And?")) for one in dated]
    found = {conversation_of(prompt) for prompt in (plain, *dated, *answered)}
    assert len(found) == (1 if alike else 41)
    assert len({split_of(prompt, 0.5) for prompt in (plain, *dated)}) == (1 if alike else 2)
    alone = {conversation_of(prompt[:1]) for prompt in dated}  # nobody has said anything yet
    assert len(alone) == 40


def test_a_question_after_a_greeting_is_the_same_conversation() -> None:
    """However it was greeted back, and from then on: what comes after a question is of that."""
    hello = Message("user", "Hi there")
    plain = user_prompt("How much is the kettle?")
    greeted = [(hello, Message("assistant", f"Welcome, {n}!"), *plain) for n in range(3)]
    later = [(*one, Message("assistant", "9 EUR."), Message("user", "And?")) for one in greeted]
    assert {conversation_of(one) for one in (*greeted, *later)} == {conversation_of(plain)}
    assert opening_of(later[0]) == greeted[0]
    only = (hello, Message("assistant", "Welcome!"), Message("user", "Hello?"))
    assert opening_of(only) == only[:1]
    assert conversation_of(only) == conversation_of(only[:1]) != conversation_of(plain)


WORD = st.text(st.characters(categories=["L", "N"]), min_size=1)
MARKS = st.text(st.sampled_from(" \t\n.,;:!?…\"'()-–"), min_size=1)


@given(st.lists(st.tuples(MARKS, WORD), min_size=1), MARKS)
def test_the_split_hangs_on_words_alone(said: list[tuple[str, str]], end: str) -> None:
    said = [*said, (" ", "more"), (", ", "than a greeting")]
    plain = user_prompt(" ".join(word for _, word in said))
    asked = user_prompt("".join(marks + word for marks, word in said) + end)
    assert conversation_of(asked) == conversation_of(plain)
    assert split_of(asked, 0.5) == split_of(plain, 0.5)


def test_no_text_takes_long_to_be_told_apart() -> None:
    """Unicode puts a run of accents in order in the square of its length."""
    started = time.perf_counter()
    text = "a" + "\u0301\u0316" * 100_000
    assert conversation_of(user_prompt(text)) == conversation_of(user_prompt(text + "?"))
    assert conversation_of(user_prompt("\ud800 a lone half of a sign")) != ""
    assert time.perf_counter() - started < 5  # three minutes, put in order all at once


def test_a_comparison_asks_first_what_conversations_do_not_share() -> None:
    rows = [
        row(4 * n + turns, "thumbs", number=1.0, prompt=prompt_to_json(conversation(n, turns)))
        for n in range(5)
        for turns in (1, 2, 3)
    ]
    found = made(*rows, evaluation_share=1.0).evaluation_prompts
    asked = [prompt.prompt[1].content for prompt in found]
    assert [len(set(asked[i : i + 5])) for i in (0, 5, 10)] == [5, 5, 5]
    ids = [prompt.prompt_id for prompt in found]
    assert all(ids[i : i + 5] == sorted(ids[i : i + 5]) for i in (0, 5, 10))


@given(st.text(), st.text())
def test_the_unit_interval_holds_every_number(one: str, other: str) -> None:
    one, other = (text.encode("utf-8", "replace").decode() for text in (one, other))
    assert 0 <= unit_interval(one, other) < 1
    assert unit_interval(one, other) == unit_interval(one, other)


def test_each_voter_serves_one_reward_model_in_the_shares_given() -> None:
    voters = [f"voter {n}" for n in range(3000)]
    jobs = {voter: job_of(voter, SHARES) for voter in voters}
    for job in JOBS:
        share = sum(found == job for found in jobs.values()) / 3000
        assert abs(share - SHARES[job]) < 0.035  # 4 standard errors


def test_no_voter_teaches_two_reward_models_and_none_is_lost() -> None:
    rows = (
        row(n, "preference", voter=f"voter {n % 300}", other_completion="B", choice="left")
        for n in range(900)
    )
    pairs = made(*rows).preference_pairs
    settings = Settings.model_validate({"recipe": "a test", "reward": {"min_pairs": 10}})
    train, test = reward_splits(pairs, settings)
    voters = [{pair.voter for pair in train[job]} for job in JOBS]
    assert all(voters)
    assert sum(map(len, voters)) == len(set.union(*voters))
    assert sum(map(len, train.values())) + len(test) == len(pairs)


def test_who_has_too_few_pairs_is_told_how_many_are_held_out() -> None:
    rows = (
        row(n, "preference", voter=f"voter {n}", other_completion="B", choice="left")
        for n in range(40)
    )
    pairs = made(*rows).preference_pairs
    pairs = tuple(replace(p, split="evaluation" if n < 7 else "train") for n, p in enumerate(pairs))
    settings = Settings.model_validate({"recipe": "a test", "reward": {"min_pairs": 50}})
    with pytest.raises(NotEnoughData, match=r"of 33, .* while 7 more are held out for judging"):
        reward_splits(pairs, settings)


def test_where_every_kind_is_learnt_from_each_counts_and_bad_pairs_stay() -> None:
    rows = (
        *(row(n, "thumbs", voter=f"voter {n}", number=1.0) for n in range(90)),
        row(900, "preference", voter="voter 1", other_completion="B", choice="both_bad"),
    )
    found = made(*rows)
    every = {"kinds": {"preference": 1, "thumbs": 1}, "freeze_trunk": True, "min_pairs": 5}
    tree: dict[str, Any] = {"recipe": "a test", "reward": every}
    settings = Settings.model_validate(tree)
    examples = [replace(e, split="train") for e in found.reward_examples]
    pairs = [replace(p, split="train") for p in found.preference_pairs]
    train, _ = reward_splits(pairs, settings, examples)
    assert sum(map(len, train.values())) == 1
    tree["reward"] = {"min_pairs": 5}
    with pytest.raises(NotEnoughData, match=r"found 0 of 91, which 1 raters gave, no .* several"):
        reward_splits(
            [replace(p, voter="ann") for p in pairs],
            settings,
            [replace(e, voter="ann") for e in examples],
        )
    with pytest.raises(NotEnoughData, match="needs 5 preference pairs, found 0"):
        reward_splits(pairs, Settings.model_validate(tree))
    with pytest.raises(NotEnoughData, match=r"other votes .* \(thumbs 90\): name .* reward.kinds"):
        reward_splits(pairs, Settings.model_validate(tree), examples)


def test_where_shares_fall_short_of_one_by_rounding_the_last_model_takes_the_rest() -> None:
    nothing: dict[Job, float] = {"proxy": 0.0, "stopping": 0.0, "gate": 0.0}
    assert job_of("anybody", nothing) == "gate"


# -- pairs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "shown_first", "chosen"),
    [
        ("left", "this", "A"),
        ("right", "this", "B"),
        ("left", "other", "B"),  # the other one stood on the left
        ("right", "other", "A"),
    ],
)
def test_a_preference_chooses_by_where_the_completions_stood(
    choice: str, shown_first: str, chosen: str
) -> None:
    (pair,) = made(
        row(1, "preference", other_completion="B", choice=choice, shown_first=shown_first)
    ).preference_pairs
    assert (pair.chosen, {pair.chosen, pair.rejected}) == (chosen, {"A", "B"})
    assert (pair.tie, pair.corrected) == (False, False)
    assert (pair.pair_id, pair.voter, pair.prompt) == ("id-1", "voter-1", user_prompt("Why?"))


@pytest.mark.parametrize(("choice", "bad"), [("tie", False), ("both_bad", True)])
def test_ties_are_kept_as_ties_and_nobody_imitates_them(choice: str, bad: bool) -> None:
    found = made(row(1, "preference", other_completion="B", choice=choice))
    (pair,) = found.preference_pairs
    assert (pair.tie, pair.both_bad, {pair.chosen, pair.rejected}) == (True, bad, {"A", "B"})
    assert found.sft_examples == ()


def test_a_correction_beats_what_it_corrects_and_is_imitated() -> None:
    found = made(row(1, "correction", text="Better."))
    (pair,) = found.preference_pairs
    assert (pair.chosen, pair.rejected, pair.tie, pair.corrected) == ("Better.", "A", False, True)
    assert found.sft_examples == (SftExample(user_prompt("Why?"), "Better.", "correction"),)
    assert found.reward_examples == ()


# -- single completions -------------------------------------------------------------------------


def test_what_is_said_about_one_completion_becomes_a_reward_example() -> None:
    found = made(
        row(1, "thumbs", number=0.0),
        row(2, "rating", number=3.0),
        row(3, "score", number=0.4),
        row(4, "criteria", criteria=json.dumps({"safety": 0.5})),
        row(5, "comment", text="hm"),
    )
    values = [(e.kind, e.number, e.criteria) for e in found.reward_examples]
    assert values == [
        (FeedbackKind.thumbs, 0.0, None),
        (FeedbackKind.rating, 3.0, None),
        (FeedbackKind.score, 0.4, None),
        (FeedbackKind.criteria, None, {"safety": 0.5}),
    ]
    assert found.preference_pairs == found.sft_examples == ()


@pytest.mark.parametrize(
    ("kind", "number", "imitated"),
    [
        ("rating", 5.0, True),
        ("rating", 4.0, True),
        ("rating", 3.0, False),
        ("score", 0.75, True),  # 4 of 1..5 on the scale 0..1
        ("score", 0.74, False),
        ("thumbs", 1.0, False),  # one click is too little to imitate word by word
    ],
)
def test_a_completion_is_imitated_when_it_is_rated_well(
    kind: str, number: float, imitated: bool
) -> None:
    assert bool(made(row(1, kind, number=number)).sft_examples) == imitated


def test_the_same_completion_is_imitated_once() -> None:
    found = made(
        row(1, "rating", number=5.0), row(2, "rating", number=4.0), row(3, "score", number=1.0)
    )
    assert len(found.sft_examples) == 1
    assert len(found.reward_examples) == 3


def test_held_out_prompts_carry_at_most_four_good_references() -> None:
    rows = [row(n, "rating", number=5.0, completion=f"Good {n}.") for n in range(6)]
    bad = row(9, "rating", number=1.0, completion="Bad.")
    found = made(*rows, rows[0], bad, evaluation_share=1.0)
    (prompt,) = found.evaluation_prompts
    assert prompt.references == ("Good 0.", "Good 1.", "Good 2.", "Good 3.")
    assert found.sft_examples == ()


def test_held_out_prompts_come_in_no_order_of_theirs_and_with_where_votes_came_in() -> None:
    rows = [row(n, "thumbs", f"Why {n}?", number=1.0, origin=f"/in/{n}.csv") for n in range(9)]
    found = made(*rows, evaluation_share=1.0).evaluation_prompts
    assert found == made(*reversed(rows), evaluation_share=1.0).evaluation_prompts
    assert {(p.prompt[0].content, p.cohort) for p in found} == {
        (f"Why {n}?", f"{n}.csv") for n in range(9)
    }


def test_a_cap_keeps_the_same_records_whatever_their_order() -> None:
    rows = [row(n, "correction", f"Question {n}?", text=f"B{n}") for n in range(50)]
    capped = made(*rows, max_samples=10)
    shuffled = made(*rows[::-1], max_samples=10)
    assert len(capped.preference_pairs) == len(capped.sft_examples) == 10
    assert set(capped.preference_pairs) == set(shuffled.preference_pairs)
    assert [p.pair_id for p in capped.preference_pairs] == sorted(
        (p.pair_id for p in capped.preference_pairs), key=lambda i: int(i[3:])
    )  # in the order they came
    assert len(made(*rows, max_samples=50).preference_pairs) == 50


def votes_by(*senders: tuple[str | None, str, int]) -> pd.DataFrame:
    """Votes of (rater or nobody, origin, how many)."""
    rows = [(rater, origin) for rater, origin, n in senders for _ in range(n)]
    return pd.DataFrame(
        {
            "feedback_id": [f"f{i}" for i in range(len(rows))],
            "voter": [rater or f"anonymous:f{i}" for i, (rater, _) in enumerate(rows)],
            "rater_id": [rater for rater, _ in rows],
            "origin": [origin for _, origin in rows],
        }
    )


def test_the_newest_votes_train_however_long_people_have_voted() -> None:
    votes = votes_by(("ann", "api", 30), (None, "api", 70)).assign(seq=[*range(50, 150)])
    votes = votes.sample(frac=1, random_state=0).reset_index(drop=True)
    no_caps: dict[str, Any] = {"per_rater": None, "unsigned": None}
    kept = newest(votes, 40, **no_caps)
    assert sorted(kept["seq"]) == [*range(110, 150)]
    assert kept["seq"].tolist() == [seq for seq in votes["seq"] if seq >= 110]
    assert kept.index.tolist() == list(range(40))
    assert newest(votes, None, **no_caps) is newest(votes, 100, **no_caps) is votes
    # A rater at the cap is heard with new votes too.
    old = votes_by(("ann", "api", 1000)).assign(seq=range(1000))
    new = votes_by(("ann", "api", 20)).assign(seq=range(1000, 1020))
    new["feedback_id"] = "new-" + new["feedback_id"]
    both = newest(pd.concat([old, new], ignore_index=True), 40, per_rater=20, unsigned=None)
    heard, _ = within_caps(both, per_rater=20, unsigned=None)
    assert heard["feedback_id"].str.startswith("new-").sum() >= 5


@pytest.mark.parametrize("flood", ["bot", None])
def test_whoever_sends_more_than_counts_drives_nobody_elses_votes_out(flood: str | None) -> None:
    people = [(f"person {n}", "api", 10) for n in range(20)]
    votes = votes_by(*people, (flood, "dump.jsonl", 500))
    votes["seq"] = range(len(votes))
    caps: dict[str, Any] = {"per_rater": 30, "unsigned": 30}
    shuffled = votes.sample(frac=1, random_state=0).reset_index(drop=True)
    heard, _ = within_caps(newest(shuffled, 100, **caps), **caps)
    theirs = heard["origin"] == "dump.jsonl"
    assert (theirs.sum(), len(heard)) == (30, 100)
    assert sorted(heard["seq"][~theirs]) == [*range(130, 200)]  # the newest of the others


def test_no_rater_has_more_votes_than_the_cap() -> None:
    votes = votes_by(("loud", "api", 25), ("ann", "api", 10), ("loud", "chat", 25))
    kept, left_out = within_caps(votes, per_rater=20, unsigned=1)
    assert kept["voter"].value_counts().to_dict() == {"loud": 20, "ann": 10}
    assert left_out == {"signed": 30}
    again, _ = within_caps(votes.sample(frac=1, random_state=0), per_rater=20, unsigned=1)
    assert set(again["feedback_id"]) == set(kept["feedback_id"])
    assert kept["feedback_id"].is_unique
    assert kept.index.tolist() == list(range(30))
    assert within_caps(votes, per_rater=None, unsigned=1)[0] is votes


def test_unsigned_votes_that_came_in_one_way_are_capped_together_and_none_is_lost_unsaid() -> None:
    votes = votes_by((None, "api", 50), (None, "hh.jsonl", 8), ("api", "api", 20))
    kept, left_out = within_caps(votes, per_rater=15, unsigned=10)
    nobody = kept[kept["rater_id"].isna()]
    assert nobody["origin"].value_counts().to_dict() == {"api": 10, "hh.jsonl": 8}
    assert len(kept) == 33  # a rater who is called as the origin is another
    assert left_out == {"signed": 5, "unsigned, api": 40}
    assert len(kept) + sum(left_out.values()) == len(votes)
    everybody, nothing = within_caps(votes, per_rater=None, unsigned=None)
    assert everybody is votes
    assert nothing == {}


def test_nothing_in_is_nothing_out() -> None:
    assert made() == made()
    assert made().evaluation_prompts == ()


# -- files --------------------------------------------------------------------------------------


def test_records_survive_their_file(tmp_path: Path) -> None:
    found = made(
        row(1, "preference", "Why “ñ”?", other_completion="B\nC", choice="both_bad"),
        row(2, "criteria", criteria='{"safety": 1.0}'),
        row(3, "rating", number=5.0),
        row(4, "rating", "Held out?", number=5.0),
        evaluation_share=0.5,
    )
    cases: list[tuple[Any, Any]] = [
        (PreferencePair, found.preference_pairs),
        (RewardExample, found.reward_examples),
        (SftExample, found.sft_examples),
        (EvaluationPrompt, found.evaluation_prompts),
    ]
    for kind, records in cases:
        path = tmp_path / "deep" / f"{kind.__name__}.jsonl.gz"
        assert write_jsonl(path, records) == len(records)
        assert tuple(read_jsonl(path, kind)) == records
    assert {p.suffix for p in (tmp_path / "deep").iterdir()} == {".gz"}


def test_a_file_is_packed_and_the_same_records_are_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every version keeps its own for ever, known by their hashes."""
    pairs = made(*(row(n, "correction", text=f"Better {n}.") for n in range(50))).preference_pairs
    write_jsonl(tmp_path / "now.jsonl.gz", pairs)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    write_jsonl(tmp_path / "then.jsonl.gz", pairs)
    lines = "".join(map(line_of, pairs)).encode()
    packed = (tmp_path / "now.jsonl.gz").read_bytes()
    assert packed == (tmp_path / "then.jsonl.gz").read_bytes()
    assert len(packed) < len(lines) / 3
    assert gzip.decompress(packed) == lines


def test_a_file_of_an_older_release_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    older, newer = (
        made(row(1, "correction", text=text)).preference_pairs for text in ("Older.", "Newer.")
    )
    write_jsonl(tmp_path / "pairs.jsonl", older)
    assert tuple(read_jsonl(tmp_path / "pairs.jsonl.gz", PreferencePair)) == older
    write_jsonl(tmp_path / "pairs.jsonl.gz", newer)
    assert tuple(read_jsonl(tmp_path / "pairs.jsonl.gz", PreferencePair)) == newer


def test_a_file_that_is_not_there_names_the_stage_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FeedbackError, match="run the stage that writes it first"):
        read_jsonl(tmp_path / "pairs.jsonl", PreferencePair)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    write_jsonl(path, made(row(1, "correction", text="Better.")).preference_pairs)
    before = path.read_bytes()

    def half() -> Any:
        yield made(row(2, "correction", text="Other.")).preference_pairs[0]
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        write_jsonl(path, half())
    assert path.read_bytes() == before
