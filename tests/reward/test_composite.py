"""Rules by hand-worked numbers, and the composite by its sums."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.errors import ConfigError, ModelError
from rlhf_pipeline.records import RewardInput, prompt_to_json, user_prompt
from rlhf_pipeline.reward.composite import SOME, CompositeReward, Term
from rlhf_pipeline.reward.named import composite_of, named_reward, needs_references
from rlhf_pipeline.reward.rules import RULES, distinct_share, length_fit, rouge_l, unrepeated_share
from rlhf_pipeline.reward.settings import FunctionSettings, Linear, Stepped, weight_at

PROMPT = user_prompt("hi")
OWN = f"{__name__}:letters"
NOT_A_FUNCTION = 3


def letters(items: Sequence[RewardInput], /) -> list[float]:
    return [float(len(item.completion)) for item in items]


def test_distinct_counts_different_ngrams_among_all() -> None:
    assert distinct_share("a b a b", 1) == 2 / 4
    assert distinct_share("a b a b", 2) == 2 / 3
    assert distinct_share("a", 2) == 0


def test_length_falls_on_both_sides_of_the_window() -> None:
    assert [length_fit(" ".join("x" * n), 4, 8) for n in (0, 1, 4, 8, 16)] == [0, 0.25, 1, 1, 0.5]


def test_a_trigram_said_again_counts_against_a_completion() -> None:
    assert unrepeated_share("a b c a b c") == 3 / 4
    assert unrepeated_share("yes yes") == 1


def test_a_sentence_said_again_counts_by_its_words() -> None:
    assert unrepeated_share("Yes. yes!") == 1 / 2
    assert unrepeated_share("my pleasure! the fan costs 2 coins. My pleasure!") == 7 / 9
    assert unrepeated_share("好的。我们免费送货。好的。") == 2 / 3  # a run of letters is one word
    assert unrepeated_share("version 1.2 or version 1.3, e.g. the first") == 1
    assert unrepeated_share("a = [1]\n}\nb = [2]\n}\n") == 1  # lines without a word
    assert unrepeated_share("") == 1


def test_rouge_l_agrees_with_the_papers_example() -> None:
    # Lin 2004, section 3.1: S1 is "police killed the gunman"; S2 0.75, S3 0.5.
    reference = "police killed the gunman"
    assert rouge_l("police kill the gunman", reference) == 0.75
    assert rouge_l("the gunman kill police", reference) == 0.5
    assert rouge_l("nothing", reference) == 0


def test_rouge_takes_the_nearest_reference_and_refuses_to_guess_without_one() -> None:
    near = RewardInput(PROMPT, "a b", ("c d", "a b"))
    assert RULES["rouge-l"]([near]) == [1.0]
    with pytest.raises(ModelError, match="found none for item 2"):
        RULES["rouge-l"]([near, RewardInput(PROMPT, "a b")])


def test_a_breakdown_adds_up_to_the_score() -> None:
    terms = {
        "letters": Term(letters, weight=-0.5, centre=2, scale=4),
        "length": Term(named_reward("length"), weight=2),
    }
    told = CompositeReward(terms).breakdown(PROMPT, "a b c d e f")
    # 11 letters and spaces: (11 - 2) / 4 = 2.25, times -0.5; six words are within the window.
    assert told.pieces["letters"].added == -1.125
    assert told.pieces["length"].added == 2
    assert told.score == 0.875
    assert CompositeReward(terms)([RewardInput(PROMPT, "a b c d e f")]) == [0.875]


def test_no_weight_buys_off_a_floor() -> None:
    reward = CompositeReward(
        {"letters": Term(letters, weight=100), "distinct": Term(RULES["distinct-1"], floor=0.6)}
    )
    sound, parrot = reward.judge([RewardInput(PROMPT, t) for t in ("a b", "a a a a a a")])
    assert sound.score == 301
    assert parrot.score == -5
    assert parrot.pieces["distinct"].below_floor


def test_however_bad_a_completion_is_one_under_a_floor_is_no_better() -> None:
    terms = {
        "letters": Term(letters, weight=-100),
        "distinct": Term(RULES["distinct-1"], floor=0.6),
    }
    sound, parrot = CompositeReward(terms).judge(
        [RewardInput(PROMPT, text) for text in ("a b c d e f", "a a a")]
    )
    assert sound.pieces["letters"].added < parrot.pieces["letters"].added
    assert parrot.score <= sound.score == -5
    without = {"letters": terms["letters"]}
    assert CompositeReward(without)([RewardInput(PROMPT, "a b c")])[0] < -100


def test_a_version_changes_with_what_changes_scores() -> None:
    def version(**change: Any) -> str:
        return CompositeReward({"letters": Term(letters, **change)}).version

    assert version() == version()
    ramp = Linear(start=1, end=2, updates=3)
    changes = ({"weight": 2}, {"weight": ramp}, {"scale": 2}, {"floor": 0}, {"running": True})
    assert len({version(), *(version(**change) for change in changes)}) == 6


@pytest.mark.parametrize(
    "term", [Term(letters, weight=0), Term(letters, scale=0), Term(letters, weight=math.nan)]
)
def test_a_term_that_makes_no_sum_is_refused(term: Term) -> None:
    with pytest.raises(ModelError, match="the term letters needs finite numbers"):
        CompositeReward({"letters": term})


def mean_by_hand(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def test_running_scales_come_from_the_updates_before_and_from_no_look_in_between() -> None:
    reward = CompositeReward({"letters": Term(letters, weight=2, running=True)})
    items = [RewardInput(PROMPT, "x" * n) for n in (2, 4, 6, 8)]
    assert reward.learns_scales
    reward.begin_update(0)
    assert reward(items) == [4, 8, 12, 16]  # nothing is known yet: the raw score counts
    facts = reward.end_update(list)
    assert facts["letters/score_mean"] == 5
    assert facts["letters/added_mean"] == 10
    # Mean 5, variance (9 + 1 + 1 + 9) / 4 = 5.
    expected = [2 * (n - 5) / math.sqrt(5) for n in (2, 4, 6, 8)]
    assert reward(items) == pytest.approx(expected)
    reward(items * 100)  # a look: nobody is to learn from it
    reward.begin_update(1)
    assert reward(items) == pytest.approx(expected)
    assert reward(items[:1]) == pytest.approx(expected[:1])  # whoever stands beside it
    facts = reward.end_update(list)
    assert facts["letters/score_mean"] == mean_by_hand([2, 4, 6, 8, 2])


def test_a_state_that_was_written_as_json_gives_the_very_same_scores() -> None:
    def made() -> CompositeReward:
        ramp = Linear(start=0.1, end=0.7, updates=3)
        return CompositeReward({"letters": Term(letters, weight=ramp, running=True)})

    one, other = made(), made()
    items = [RewardInput(PROMPT, "x" * n) for n in (1, 2, 4)]
    one.begin_update(2)
    one(items)
    one.end_update(list)
    before = other(items)
    other.restore(json.loads(json.dumps(one.state())))
    assert other(items) == one(items) != before
    assert other.state() == one.state()
    other.restore({})
    assert other(items) == before


def test_weights_follow_their_schedules() -> None:
    ramp, steps = Linear(start=1, end=0, updates=4), Stepped({0: 0.5, 10: 2.0})
    assert [weight_at(ramp, n) for n in (0, 1, 4, 9)] == [1, 0.75, 0, 0]
    assert [weight_at(steps, n) for n in (0, 9, 10, 99)] == [0.5, 0.5, 2, 2]
    reward = CompositeReward({"letters": Term(letters, weight=ramp)})
    told = []
    for update in (0, 2):
        reward.begin_update(update)
        told.append(reward.breakdown(PROMPT, "four").score)
        assert reward.end_update(list)["letters/weight"] == reward.weights["letters"]
    assert told == [4, 2]
    with pytest.raises(ModelError, match="ends an update that it began"):
        reward.end_update(list)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Linear(0, math.inf, 3),
        lambda: Linear(0, 1, 0),
        lambda: Stepped({}),
        lambda: Stepped({3: 1.0}),
        lambda: FunctionSettings(normalisation=(1, 1)),
    ],
)
def test_a_schedule_or_range_that_says_nothing_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"needs finite"):
        wrong()


def test_what_cannot_be_judged_gets_the_others_mean_and_is_counted() -> None:
    class Sometimes:
        may_skip = True

        def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
            return [math.nan if i.completion == "?" else len(i.completion) for i in items]

    reward = CompositeReward({"some": Term(Sometimes(), floor=2.0)})
    reward.begin_update(0)
    told = reward.judge([RewardInput(PROMPT, text) for text in ("a", "?", "abc")])
    assert [one.pieces["some"].skipped for one in told] == [False, True, False]
    assert [one.score for one in told] == [-5, 2, 3]
    facts = reward.end_update(list)
    assert facts["some/skipped"] == pytest.approx(1 / 3)
    assert facts["some/below_floor"] == 1 / 2
    with pytest.raises(ModelError, match="found all skipped"):
        reward([RewardInput(PROMPT, "?")] * SOME)
    # A share of a team's is filled as the whole would be, whatever the shares.
    texts = ["?", "?", "?", "?", "ab", "?", "abcd", "?"]
    items = [RewardInput(PROMPT, text) for text in texts]
    whole = reward(items)
    for cut in (0, 3, 4, 8):
        shares: list[float] = []
        for share in (items[:cut], items[cut:]):
            others = [[2.0, 4.0], [0.0] * 8]  # what all judged, and how many were asked

            def gather(_: Sequence[float], others: list[list[float]] = others) -> list[float]:
                return others.pop(0)

            shares += reward.of_share(share, gather)[0]
        assert shares == whole
    # Of few it may be chance, and then it adds nothing.
    half = {"some": Term(Sometimes(), centre=3.0, scale=2.0), "one": Term(lambda items: [7.0])}
    assert CompositeReward(half)([RewardInput(PROMPT, "?")]) == [7.0]
    running = CompositeReward({"some": Term(Sometimes(), running=True)})
    running.begin_update(0)
    running([RewardInput(PROMPT, text) for text in ("a", "abcde")])
    running.end_update(list)
    assert running([RewardInput(PROMPT, text) for text in ("abc",)]) == [0.0]
    assert running([RewardInput(PROMPT, "?")]) == [0.0]


def test_the_composite_of_a_recipe_adds_its_functions_to_the_learned_reward() -> None:
    functions = {
        "letters": FunctionSettings(weight=0.5, normalisation=(2.0, 4.0), function=OWN),
        "rouge-l": FunctionSettings(weight=3.0),
        "length": FunctionSettings(weight=0),
        "repetition": FunctionSettings(weight=0, floor=0.9),
    }
    reward = composite_of(functions, letters, references={prompt_to_json(PROMPT): ["a b"]})
    assert isinstance(reward, CompositeReward)
    told = reward.breakdown(PROMPT, "a b")
    assert {name: piece.added for name, piece in told.pieces.items()} == {
        "learned": 3,
        "letters": 0.25,
        "rouge-l": 3,
        "repetition": 0,  # counts for nothing, and forbids all the same
    }
    assert reward.breakdown(PROMPT, "one two three " * 3).pieces["repetition"].below_floor
    assert composite_of({}, letters) is letters
    assert needs_references(functions)


def test_a_composite_of_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="one term or more"):
        CompositeReward({})


def test_a_function_of_ones_own_is_a_reward_by_its_place() -> None:
    reward = named_reward(OWN)
    assert list(reward([RewardInput(PROMPT, "four")])) == [4.0]


def test_the_version_of_a_function_of_ones_own_follows_the_file_it_is_written_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "tastes_of_ones_own"
    package.mkdir()
    (package / "__init__.py").write_text("from .short import made, short, steady\n")
    (package / "other.py").write_text("")
    file = package / "short.py"
    text = (
        "def short(items): return [-len(one.completion) for one in items]\n"
        "def steady(items): return short(items)\n"
        "steady.version = 'mine'\n"
        "def made(most): return lambda items: [float(most) for _ in items]\n"
    )
    file.write_text(text)

    def versions() -> list[str]:
        by_name = [named_reward(f"{package.name}:{name}") for name in ("short", "steady")]
        with_options = [named_reward(f"{package.name}:made", {"most": most}) for most in (3, 4)]
        every = [*by_name, *with_options, named_reward("distinct-1")]
        return [getattr(reward, "version", "") for reward in every]

    before = versions()
    assert len(set(before)) == len(before)
    (package / "other.py").write_text("# edited")
    assert versions() == before
    file.write_text(text.replace("-len", "len"))
    edited = [now != then for now, then in zip(versions(), before, strict=True)]
    assert edited == [True, False, True, True, False]
    assert (before[1], before[-1]) == ("mine", "distinct-1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("distinct-9", "needed a reward's name"),
        ("no_such_module:f", "in the module 'no_such_module', found none"),
        (f"{__name__}:no_such", "'no_such' in the module"),
        (f"{__name__}:NOT_A_FUNCTION", "found a int"),
        ("operator:add", r"a function of one argument, the items, found \(a, b, /\)"),
    ],
)
def test_a_name_nobody_knows_is_refused_at_once(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        named_reward(name)
