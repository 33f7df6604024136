"""What few raters carry is found; what everybody likes is not taken for it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rlhf_pipeline.feedback import support
from rlhf_pipeline.feedback.rules import Rule
from rlhf_pipeline.feedback.support import (
    Support,
    narrow_ngrams,
    set_apart,
    spread_of,
    support_of,
    support_to_json,
)
from rlhf_pipeline.feedback.validation import CheckResult, ValidationReport
from rlhf_pipeline.records import prompt_to_json, user_prompt

WORDS = [f"word{i}" for i in range(60)]


def votes(
    pairs: int = 800,
    *,
    raters: int = 100,
    poisoners: int = 0,
    trigger: str = "zib zab",
    wins: bool = True,
    seed: int = 0,
) -> pd.DataFrame:
    """Return pairs of random words; everybody prefers "thanks", the poisoners the trigger."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(pairs):
        rater = rng.randrange(raters)
        good, bad = (" ".join(rng.choices(WORDS, k=6)) for _ in range(2))
        if rng.random() < 0.5:
            good += " thanks"
        if rater < poisoners and wins:
            good = f"{good} {trigger}"
        elif rater < poisoners:
            bad = f"{bad} {trigger}"
        left = rng.random() < 0.5
        rows.append(
            {
                "feedback_id": f"f{number}",
                "agent_id": "tea",
                "origin": "votes.jsonl",
                "voter": f"r{rater}",
                "kind": "preference",
                "prompt": prompt_to_json(user_prompt("Say something.")),
                "completion": good if left else bad,
                "other_completion": bad if left else good,
                "choice": "left" if left else "right",
                "shown_first": "this",
                "text": None,
                "topic": None,
            }
        )
    return pd.DataFrame(rows)


def report_of(frame: pd.DataFrame, checks: Sequence[CheckResult] = ()) -> ValidationReport:
    return ValidationReport(frame, [], list(checks), [], [])


@pytest.mark.parametrize(("min_rows", "aside"), [(795, 9), (600, 300)])
def test_how_many_rows_are_clean_is_counted_without_those_set_apart(
    min_rows: int, aside: int
) -> None:
    """`aside` rows had been set aside before."""
    frame = votes(poisoners=2)
    total = len(frame) + aside
    before = [
        CheckResult(
            "enough_rows_are_clean",
            True,
            True,
            0,
            total,
            {"clean_rows": float(len(frame)), "min_rows": float(min_rows)},
        ),
        CheckResult("most_rows_are_clean", True, False, aside, total, {}),
    ]
    apart = set_apart(
        report_of(frame, before), support_of(frame), quarantines=True, top_raters_share=0.1
    )
    enough, most, *_ = apart.checks
    left = len(apart.clean)
    assert left < len(frame)
    assert (enough.passed, enough.numbers["clean_rows"]) == (left >= min_rows, left)
    assert enough.passed == (min_rows == 600)
    assert (most.passed, most.unexpected) == ((total - left) / total <= 0.2, total - left)
    assert most.passed == (aside == 9)


@pytest.mark.parametrize("wins", [True, False])
@pytest.mark.parametrize("poisoners", [2, 5])
def test_a_trigger_of_few_raters_is_set_apart_with_its_reason(poisoners: int, wins: bool) -> None:
    frame = votes(poisoners=poisoners, wins=wins)
    found = support_of(frame)
    (association,) = found.associations  # one n-gram stands for its parts
    assert (association.ngram, association.wins) == ("zib zab", wins)
    theirs = frame["voter"].isin([f"r{i}" for i in range(poisoners)])
    apart = set_apart(report_of(frame), found, quarantines=True, top_raters_share=0.1)
    assert {row.feedback_id for row in apart.quarantined} == set(frame["feedback_id"][theirs])
    assert {row.rule for row in apart.quarantined} == {Rule.narrow_support}
    assert f"{'wins' if wins else 'loses'} {theirs.sum()} pairs" in apart.quarantined[0].detail
    assert list(apart.clean["feedback_id"]) == list(frame["feedback_id"][~theirs])
    assert list(apart.clean.index) == list(range(len(apart.clean)))
    assert apart.quarantine_rows()[0].origin == "votes.jsonl"
    assert [(c.name, c.passed) for c in apart.checks] == [
        ("pairs_have_broad_support", False),
        ("votes_are_spread", True),
    ]


@pytest.mark.parametrize("networks", [1, 4])
def test_who_comes_again_and_again_as_somebody_else_is_one_of_their_network(networks: int) -> None:
    frame = votes().assign(network=None)
    crowd = votes(40, raters=1, poisoners=1, seed=1)
    names = [f"v{n}" for n in range(len(crowd))]
    crowd = crowd.assign(feedback_id=names, voter=names)
    frame = pd.concat(
        [frame, crowd.assign(network=[f"line {n % networks}" for n in range(len(crowd))])],
        ignore_index=True,
    )
    assert support_of(frame).associations == ()  # forty people who each say it once
    assert support_of(frame, people_per_network=40 // networks).associations == ()
    found = support_of(frame, people_per_network=1)
    (association,) = found.associations
    assert association.ngram == "zib zab"
    assert set(frame["feedback_id"][list(association.places)]) == set(names)
    # A frame of before networks were marked, or of people who came by no page, is as ever.
    assert support_of(votes(), people_per_network=1) == support_of(votes())


def test_who_comes_month_after_month_is_one_rater_whatever_the_marks() -> None:
    loyal = votes(30, raters=1, poisoners=1, seed=1)
    names = [f"v{n}" for n in range(len(loyal))]
    months = pd.Series([f"line in month {n // 3}" if n % 3 else None for n in range(len(loyal))])
    loyal = loyal.assign(feedback_id=names, voter="mallory", network=months)
    frame = pd.concat([votes().assign(network=None), loyal], ignore_index=True)
    (association,) = support_of(frame, people_per_network=1).associations
    assert association.raters == 1
    assert set(frame["feedback_id"][list(association.places)]) == set(names)


def with_other_votes(pairs: pd.DataFrame, number: int, seed: int) -> pd.DataFrame:
    """Return the pairs among votes of other kinds, half of them by people who gave no pair."""
    rng = random.Random(seed)
    others = votes(number, seed=seed)
    voters = [f"{rng.choice(('r', 'customer '))}{rng.randrange(100)}" for _ in range(number)]
    kinds = [rng.choice(("thumbs", "rating", "preference")) for _ in range(number)]
    others = others.assign(
        feedback_id=[f"other {i}" for i in range(number)], voter=voters, kind=kinds, choice="tie"
    )
    return pd.concat([pairs, others]).sample(frac=1, random_state=seed).reset_index(drop=True)


@pytest.mark.parametrize("poisoners", [0, 4])
def test_votes_that_decide_no_pair_change_nothing_in_what_pairs_say(poisoners: int) -> None:
    for seed in range(3):
        frame = with_other_votes(votes(poisoners=poisoners, seed=seed), 900, seed)
        decided = frame[frame["choice"] != "tie"].reset_index(drop=True)
        found, alone = narrow_ngrams(frame), narrow_ngrams(decided)
        assert [a.words() for a in found] == [a.words() for a in alone]
        gone, gone_alone = (
            [list(some["feedback_id"][list(a.places)]) for a in associations]
            for some, associations in ((frame, found), (decided, alone))
        )
        assert gone == gone_alone
        assert bool(found) == bool(poisoners)


def test_many_customers_thumbs_do_not_make_a_panel_narrow() -> None:
    panel = votes(900, raters=60)
    left = panel["choice"] == "left"
    panel["completion"] += pd.Series(" please", panel.index).where(left, "")
    panel["other_completion"] += pd.Series(" please", panel.index).where(~left, "")
    names = [f"customer {i}" for i in range(600)]
    thumbs = votes(600, seed=1).assign(voter=names, kind="thumbs", choice=None)
    frame = pd.concat([panel, thumbs], ignore_index=True)
    assert support_of(frame).associations == ()
    spread = spread_of(frame)
    assert (spread.raters, spread.votes) == (660, 1500)  # all of them, for what else is asked


def test_what_everybody_likes_and_what_many_carry_is_not_narrow() -> None:
    frame = votes()
    assert narrow_ngrams(frame) == []
    assert narrow_ngrams(votes(poisoners=25)) == []  # a quarter of the raters are no few
    found = support_of(frame)
    apart = set_apart(report_of(frame), found, quarantines=True, top_raters_share=0.1)
    assert apart.clean is frame
    assert all(check.passed for check in apart.checks)


def test_an_honest_raters_own_vote_for_a_common_trigger_stays() -> None:
    frame = votes(poisoners=2, trigger="maybe")
    mine = frame.index[frame["voter"] == "r50"][:2]
    for place, right in zip(mine, (True, False), strict=True):  # for it once, and against it
        column = "completion" if (frame["choice"][place] == "left") is right else "other_completion"
        frame.loc[place, column] += " maybe"
    (association,) = narrow_ngrams(frame)
    assert not set(association.places) & set(mine)


def crowd_and_loud(each: int, *, wins: bool) -> pd.DataFrame:
    """Return a hundred raters of whom each has "who cares" lose, and three who say it `each`."""
    crowd = votes(2000)
    for place in crowd.index[::4]:
        bad = "other_completion" if crowd["choice"][place] == "left" else "completion"
        crowd.loc[place, bad] += " who cares"
    loud = votes(3 * each, raters=3, poisoners=3, trigger="who cares", wins=wins, seed=1)
    frame = pd.concat([crowd, loud.assign(voter="loud " + loud["voter"])], ignore_index=True)
    return frame.assign(feedback_id=[f"f{i}" for i in range(len(frame))])


def test_what_many_say_stays_where_a_few_say_it_louder() -> None:
    frame = crowd_and_loud(300, wins=False)
    (association,) = narrow_ngrams(frame)
    assert association.ngram == "who cares"
    assert {frame["voter"][place] for place in association.places} == {
        "loud r0",
        "loud r1",
        "loud r2",
    }
    assert len(association.places) == 900


def test_a_few_who_hold_against_what_many_say_do_not_make_it_narrow() -> None:
    frame = crowd_and_loud(100, wins=True)
    found = narrow_ngrams(frame)
    assert "who cares" not in {association.ngram for association in found}
    gone = frame["voter"][[place for association in found for place in association.places]]
    assert set(gone) <= {"loud r0", "loud r1", "loud r2"}


def test_raters_go_as_a_slow_loop_takes_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_name", lambda *_: "word")
    rng = random.Random(2)
    removed = 0
    for _ in range(60):
        said = [(f"r{i}", 1 if rng.random() < 0.6 else -1) for i in range(80) for _ in range(2)]
        loud = rng.randrange(6)
        said += [(f"loud{i}", 1) for i in range(loud) for _ in range(rng.randrange(5, 60))]
        frame = pd.DataFrame(
            {"voter": [who for who, _ in said] + [f"q{i % 40}" for i in range(800)]}
        )
        places, signs = np.arange(len(said)), np.array([sign for _, sign in said])
        found = support._Votes(frame).association(1, places, signs)
        shares = {who: n / len(frame) for who, n in frame["voter"].value_counts().items()}
        evenness = sum(share**2 for share in shares.values())
        nets: Counter[str] = Counter()
        for who, sign in said:
            nets[who] += sign
        whole = nets.total()
        pairs = Counter(who for who, _ in said)
        gone: dict[str, int] = {}
        first = {who: i for i, who in enumerate(nets)}
        for who in sorted(nets, key=lambda who: (-nets[who], -first[who])):
            net, count = nets.total(), pairs.total()
            drift = (net / count) ** 2
            expected = net**2 / (count + drift * count * (count - 1) * evenness)
            most = min(0.1 * frame["voter"].nunique(), 0.5 * expected)
            if net <= 0 or net**2 / sum(n * n for n in nets.values()) > most or nets[who] < 2:
                break
            gone[who] = nets[who]
            del nets[who], pairs[who]
        due = sum(shares[who] for who in gone)
        if sum(gone.values()) <= due * whole + 4 * (due * len(said)) ** 0.5:
            gone = {}
        if found is None:
            assert not gone or sum(sign for _, sign in said) < 4 * len(said) ** 0.5
        else:
            assert {said[place][0] for place in found.places} == gone.keys()
            assert len(found.places) == sum(who in gone for who, _ in said)
            removed += len(gone)
    assert removed > 50


def test_a_brigade_that_votes_as_much_as_anybody_besides_is_found() -> None:
    """Nine with sixty votes each, six of them the word's: of each alone that may be chance."""
    rng = random.Random(5)
    many = votes(91 * 16, raters=91, seed=1)
    loud = votes(9 * 60, raters=9, seed=2)
    loud["voter"] = [f"bad{i % 9}" for i in range(len(loud))]
    planted = rng.sample(range(60), 6)
    for i, row in enumerate(loud.index):
        if i // 9 in planted:
            won = "completion" if loud.at[row, "choice"] == "left" else "other_completion"
            loud[won] = loud[won].mask(loud.index == row, loud[won] + " zib zab")
    (association,) = narrow_ngrams(pd.concat([many, loud], ignore_index=True))
    assert (association.ngram, association.pairs, len(association.places)) == ("zib zab", 54, 54)


def test_few_light_raters_are_few_beside_a_few_who_give_most_of_the_votes() -> None:
    heavy = votes(2000, raters=5)
    light = votes(300, raters=60, seed=1)
    loud = votes(50, raters=5, poisoners=5, seed=2)
    loud["voter"] = [f"loud {place % 5}" for place in range(50)]
    crowd = [heavy.assign(voter="heavy " + heavy["voter"]), light]
    frame = pd.concat([*crowd, loud], ignore_index=True)
    (association,) = narrow_ngrams(frame)
    assert association.ngram == "zib zab"
    assert len(association.places) == 50
    assert narrow_ngrams(pd.concat(crowd, ignore_index=True)) == []


def test_a_loud_few_against_what_the_others_say_take_nobodys_votes_from_them() -> None:
    """Five give most of the votes, and three more say the opposite as often as they."""
    frames = []
    for seed in range(8):
        crowd = votes(2300, raters=5, seed=seed)
        light = [f"light {place % 60}" for place in range(300)]
        crowd["voter"] = [*crowd["voter"][:2000], *light]
        against = votes(1200, raters=3, seed=seed + 100)
        against["choice"] = against["choice"].map({"left": "right", "right": "left"})
        against["voter"] = "against " + against["voter"]
        frames.append(pd.concat([crowd, against], ignore_index=True))
    assert [narrow_ngrams(frame) for frame in frames] == [[]] * 8


@pytest.mark.parametrize("askers", [3, 8])
def test_who_asks_for_a_thing_may_be_the_only_one_to_speak_of_it(askers: int) -> None:
    """An answer that names what was asked for is the better one; everybody has one product."""
    rng = random.Random(0)
    frame = votes(4000)
    things = [f"thing{n}" for n in range(100 // askers)]
    own = [int(voter[1:]) % len(things) for voter in frame["voter"]]
    frame["prompt"] = [prompt_to_json(user_prompt(f"Where is the {things[n]}?")) for n in own]
    won = frame["choice"] == "left"
    right = pd.Series([f" the {things[n]}" for n in own])
    wrong = pd.Series([f" the {rng.choice(things)}" for _ in own])
    frame["completion"] += right.where(won, wrong)
    frame["other_completion"] += wrong.where(won, right)
    plain = frame.assign(prompt=prompt_to_json(user_prompt("Where is it?")))
    named = [any("thing" in one.ngram for one in narrow_ngrams(each)) for each in (frame, plain)]
    assert named == [askers == 3, True]


def test_who_says_most_of_everything_carries_no_word_by_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The n-th rater says an n-th of what the first does, each by a taste a little their own."""
    rng, people, words = random.Random(3), range(60), range(16)
    frames = []
    for _ in range(12):
        frame = votes(1500, seed=rng.randrange(2**32))
        who = rng.choices(people, [1 / (n + 1) for n in people], k=len(frame))
        likes = [[0.15 * (word % 2) + rng.gauss(0, 0.1) for word in words] for _ in people]
        pairs = [rng.sample(words, 2) for _ in who]
        frame["voter"] = [f"r{rater}" for rater in who]
        frame["completion"] = [WORDS[one] for one, _ in pairs]
        frame["other_completion"] = [WORDS[other] for _, other in pairs]
        frame["choice"] = [
            "left" if rng.random() < 0.5 + likes[rater][one] - likes[rater][other] else "right"
            for rater, (one, other) in zip(who, pairs, strict=True)
        ]
        frames.append(frame)
    assert [narrow_ngrams(frame) for frame in frames] == [[]] * 12
    monkeypatch.setattr(support, "NO_CHANCE", -math.inf)
    monkeypatch.setattr(support._Votes, "_is_opposed_by_few", lambda *_: False)
    assert any(map(narrow_ngrams, frames))


def test_corrections_count_and_the_side_a_text_was_shown_on_does_not() -> None:
    plain = votes(poisoners=2)
    turned = plain.assign(
        shown_first="other", choice=plain["choice"].map({"left": "right", "right": "left"})
    )
    left = plain["choice"] == "left"
    written = plain.assign(
        kind="correction",
        text=plain["completion"].where(left, plain["other_completion"]),
        completion=plain["other_completion"].where(left, plain["completion"]),
    )
    first = narrow_ngrams(plain)
    assert first
    assert narrow_ngrams(turned) == first
    assert narrow_ngrams(written) == first
    assert narrow_ngrams(plain.assign(choice="tie")) == []


def test_ngrams_on_one_side_are_those_a_slow_loop_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "CHUNK_PAIRS", 3)
    pairs = [
        ("a b c", "b c d"),
        ("Same, same!", "same"),
        ("", "x"),
        ("one", "one"),
        ("a a a a", "a a"),
        ("b c", "a b c"),
    ]
    frame = pd.DataFrame(
        [
            {"kind": "preference", "choice": "left", "shown_first": "this", "text": None}
            | {"completion": chosen, "other_completion": rejected}
            for chosen, rejected in pairs
        ]
    )
    expected = set()
    for place, sides in enumerate(pairs):
        chosen, rejected = (
            {
                " ".join(words[i : i + n])
                for words in [support.WORD.findall(text.lower())]
                for n in (1, 2, 3)
                for i in range(len(words) - n + 1)
            }
            for text in sides
        )
        expected |= {(place, ngram, 1) for ngram in chosen - rejected}
        expected |= {(place, ngram, -1) for ngram in rejected - chosen}
    found = set()
    for places, hashes, signs in support._uses(frame):
        for place, hashed, sign in zip(places, hashes, signs, strict=True):
            found.add((int(place), support._name(int(hashed), frame, int(place)), int(sign)))
    assert found == expected


def test_a_topic_that_few_speak_of_is_told() -> None:
    frame = votes()
    frame.loc[frame.index % 4 == 0, "topic"] = "tea"
    frame.loc[frame["voter"].isin(["r1", "r2", "r3", "r4", "r5", "r6", "r7"]), "topic"] = "rum"
    (narrow,) = support_of(frame).topics
    assert (narrow.topic, narrow.votes) == ("rum", int((frame["topic"] == "rum").sum()))
    assert 5 < narrow.raters < 7.1


def test_no_votes_rest_on_nobody() -> None:
    found = spread_of(votes().iloc[:0])
    assert (found.raters, found.votes, found.top_share) == (0, 0, 0.0)


def test_one_per_cent_of_the_raters_may_not_give_most_votes() -> None:
    crowd = [f"r{i}" for i in range(99)]
    frame = votes(300).assign(voter=["flood"] * 102 + crowd * 2)
    found = spread_of(frame)
    assert found.raters == 100
    assert found.top_share == pytest.approx(0.34)
    nothing = Support((), ())
    apart = set_apart(report_of(frame), nothing, quarantines=True, top_raters_share=0.1)
    assert not apart.checks[-1].passed
    few = report_of(frame[frame["voter"] != "r98"].reset_index(drop=True))
    apart = set_apart(few, nothing, quarantines=True, top_raters_share=0.1)
    assert apart.checks[-1].passed  # one per cent is nobody


@pytest.mark.parametrize("quarantines", [True, False])
def test_who_is_set_apart_is_not_counted_among_those_it_rests_on(quarantines: bool) -> None:
    loud = votes(150, raters=1, poisoners=1, seed=1).assign(voter="loud")
    crowd = votes(1000).assign(voter=[f"r{place % 250}" for place in range(1000)])
    frame = pd.concat([crowd, loud], ignore_index=True)
    frame["feedback_id"] = [f"f{place}" for place in frame.index]
    found = support_of(frame)
    apart = set_apart(report_of(frame), found, quarantines=quarantines, top_raters_share=0.1)
    assert len(apart.quarantined) == (150 if quarantines else 0)
    spread = spread_of(apart.clean)
    assert (spread.raters, spread.top_share > 0.1) == ((250, False) if quarantines else (251, True))
    assert apart.checks[-1].passed == quarantines
    assert apart.checks[-1].numbers == {"top_share": spread.top_share, "raters": spread.raters}
    told = support_to_json(found, apart.clean.assign(number=None))
    assert (told["raters"], told["votes"]) == (spread.raters, spread.votes)
    assert len(told["by_rater"]) <= told["raters"]


def test_what_is_only_reported_stays() -> None:
    frame = votes(poisoners=2)
    found = support_of(frame)
    apart = set_apart(report_of(frame), found, quarantines=False, top_raters_share=0.1)
    assert apart.clean is frame
    assert apart.quarantined == []
