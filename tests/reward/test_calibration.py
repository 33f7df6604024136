"""The report's arithmetic against hand-worked answers."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable

import numpy as np
import pytest
from scipy.stats import t as student

from rlhf_pipeline.evaluation.metrics import design_effect, wilson_interval
from rlhf_pipeline.records import Message, PreferencePair, user_prompt
from rlhf_pipeline.reward.calibration import (
    Confidence,
    HangsOn,
    accuracy_interval,
    by_length,
    calibration_effect,
    calibration_error,
    calibration_noise,
    fit_confidence,
    hangs_on,
    highest_floor,
    pair_accuracy,
    reliability,
    shared_effect,
    sigmoid,
)


def test_accuracy_counts_a_margin_of_zero_as_half() -> None:
    assert pair_accuracy([1.0, -1.0, 0.0, 2.0]) == 0.625


@pytest.mark.parametrize(
    ("longer", "words", "best"),
    [(0.7, "always longer", 0.7), (0.5, "always longer", 0.5), (0.25, "always shorter", 0.75)],
)
def test_length_alone_knows_as_much_where_people_like_short_answers(
    longer: float, words: str, best: float
) -> None:
    floors = {"longer": longer, "random": 0.5, "bag_of_words": 0.9}  # the last has learnt
    assert by_length(floors) == (words, best)
    assert highest_floor(floors) == best


def test_bins_and_calibration_error_by_hand() -> None:
    sure = math.log(9)  # confidence 0.9
    margins = [sure, sure, sure, -sure, 0.0]
    bins = reliability(margins, Confidence())
    assert [b.n for b in bins] == [1, 4]
    assert bins[0].confidence == 0.5
    assert bins[0].accuracy == 0.5
    assert bins[1].confidence == pytest.approx(0.9)
    assert bins[1].accuracy == 0.75
    assert bins[1].low <= 0.9 <= bins[1].high
    assert calibration_error(bins) == pytest.approx(4 / 5 * 0.15)
    assert reliability([1e6], Confidence())[0].high == pytest.approx(1.0)


def test_temperature_undoes_overconfidence() -> None:
    rng = random.Random(0)
    true = [rng.gauss(0, 2) for _ in range(20_000)]
    signed = [m if rng.random() < sigmoid(m) else -m for m in true]
    assert fit_confidence(signed).temperature == pytest.approx(1.0, rel=0.05)
    inflated = [3 * m for m in signed]
    found = fit_confidence(inflated)
    assert found.temperature == pytest.approx(3.0, rel=0.05)
    assert found.lapse < 0.01
    after = calibration_error(reliability(inflated, found))
    assert after < 0.02 < calibration_error(reliability(inflated, Confidence()))
    few = [fit_confidence(signed[i : i + 200]).lapse for i in range(0, 20_000, 200)]
    assert sum(lapse > 0 for lapse in few) <= 10  # of 100, where 5 are to be expected at most
    separable = fit_confidence([1.5] * 6)  # as seven of eight: six right, one more of either kind
    assert separable.chance(1.5) == pytest.approx(7 / 8, abs=1e-4)
    assert separable.lapse == 0


def test_votes_by_chance_are_a_lapse_that_no_temperature_follows() -> None:
    rng = random.Random(2)
    votes = []
    for _ in range(20_000):
        margin = rng.gauss(0, 4)
        chance = 0.5 if rng.random() < 0.2 else sigmoid(margin)
        votes.append(margin if rng.random() < chance else -margin)
    found = fit_confidence(votes)
    assert found.lapse == pytest.approx(0.2, abs=0.02)
    assert found.temperature == pytest.approx(1.0, rel=0.1)
    assert found.chance(100) == pytest.approx(0.9, abs=0.01)
    assert found.chance(-1) == pytest.approx(1 - found.chance(1))
    assert calibration_error(reliability(votes, found)) < 0.01
    log_temperatures = [math.log(0.05) + i * 0.02 for i in range(300)]
    without = min(
        calibration_error(reliability(votes[::10], Confidence(math.exp(t))))
        for t in log_temperatures
    )
    assert without > 0.02

    def log_loss(some: Confidence) -> float:
        return -sum(math.log(some.chance(m)) for m in votes)

    for temperature in (0.9, 1.0, 1.1):  # none of the neighbours is better
        for lapse in (-0.02, 0.0, 0.02):
            near = Confidence(found.temperature * temperature, found.lapse + lapse)
            assert log_loss(near) >= log_loss(found) - 1e-3


def test_confidences_that_were_fitted_apart_share_the_bins() -> None:
    apart = reliability([2.0, -1.0, 3.0], [Confidence(), Confidence(2.0), Confidence()])
    together = reliability([2.0, -0.5, 3.0], Confidence())
    assert apart == together


@pytest.mark.parametrize("count", [50, 150, 1000])
def test_a_calibrated_model_shows_more_error_than_the_noise_once_in_20_times(count: int) -> None:
    rng = random.Random(1)
    beyond, errors = 0, []
    for _ in range(400):
        true = [abs(rng.gauss(0, 2)) for _ in range(count)]
        bins = reliability([m if rng.random() < sigmoid(m) else -m for m in true], Confidence())
        errors.append(calibration_error(bins))
        beyond += errors[-1] > calibration_noise(bins)
    assert 0.02 < beyond / len(errors) < 0.09
    if count <= 150:
        assert sum(errors) / len(errors) > 0.05  # so few pairs cannot show an error below 0.05


def test_extreme_numbers_do_not_overflow() -> None:
    assert sigmoid(-1e4) == 0.0
    assert sigmoid(1e4) == 1.0
    assert fit_confidence([1e4, -1e4] * 5).lapse == pytest.approx(0.5, abs=1e-4)


def by(people: Iterable[tuple[str, ...]]) -> list[HangsOn]:
    """Return what is in no conversation, and hangs on these people."""
    return [HangsOn(who) for who in people]


def test_answers_of_few_people_tell_less_than_their_number() -> None:
    # Two people of ten answers: 9 and 5 are right. By hand: the mean is 0.7, and 0.2 away without
    # either, so 1 / 2 * (0.04 + 0.04) between, over 0.7 * 0.3 / 19 alone; Student's t is
    # 2.776 of two people, who count as five, and 2.093 of twenty answers.
    right = [1.0] * 9 + [0.0] + [1.0, 0.0] * 5
    voters = [("ann",)] * 10 + [("bob",)] * 10
    effect = 0.04 * 19 / 0.21 * (2.77645 / 2.09302) ** 2
    assert design_effect(right, voters) == pytest.approx(effect, rel=1e-5)
    assert design_effect(right, [(str(n),) for n in range(20)]) == 1
    assert design_effect(right, [("ann",)] * 20) == 1  # whom nobody can be held against
    assert design_effect([1.0] * 20, voters) == 1
    even = [1.0, 0.0] * 10
    assert design_effect(even, voters) == 1  # both are right as often
    margins = [one - 0.5 for one in right]
    assert accuracy_interval(margins, by(voters)) == pytest.approx(
        wilson_interval(0.7, 20 / effect), rel=1e-5
    )
    assert accuracy_interval(margins) == wilson_interval(0.7, 20)
    twos = [(f"a{n}", f"b{n}") for n in range(20)]
    assert design_effect(right, twos) == 1
    # Whom every answer hangs on can be held against nobody: the others are left.
    assert design_effect(right, [("ann", f"b{n}") for n in range(20)]) == 1
    assert design_effect(right, [(*one, "eve") for one in voters]) == pytest.approx(
        effect, rel=1e-5
    )
    assert design_effect(right, [("ann", "bob")] * 20) == 1


def test_intervals_hold_the_truth_as_often_as_they_say_where_people_differ() -> None:
    generator = np.random.default_rng(0)
    held, naive, tries = 0, 0, 600
    for _ in range(tries):
        # Thirty people, of whom the model knows some far better; 5 to 60 answers of each.
        of_each = generator.integers(5, 61, 30)
        skill = generator.beta(7, 3, 30)  # the mean is 0.7
        right = [generator.random(n) < p for n, p in zip(of_each, skill, strict=True)]
        margins = np.where(np.concatenate(right), 1.0, -1.0).tolist()
        voters = np.repeat(np.arange(30), of_each).astype(str).tolist()
        low, high = accuracy_interval(margins, by((voter,) for voter in voters))
        held += low <= 0.7 <= high
        low, high = accuracy_interval(margins)
        naive += low <= 0.7 <= high
    assert held / tries > 0.90
    assert naive / tries < 0.75


@pytest.mark.parametrize(
    ("of_each", "least"),
    [([60, *[3] * 19], 0.93), ([20] * 10, 0.93), ([30] * 5, 0.93), ([100, 20, 10], 0.87)],
    ids=["one gave half", "ten", "five", "three"],
)
def test_intervals_hold_the_truth_of_few_people_and_where_one_gave_most(
    of_each: list[int], least: float
) -> None:
    generator = np.random.default_rng(0)
    who = np.repeat(np.arange(len(of_each)), of_each)
    voters = [(str(person),) for person in who]
    held, tries = 0, 400
    for _ in range(tries):
        skill = generator.beta(7, 3, len(of_each))  # the mean is 0.7
        margins = np.where(generator.random(len(who)) < skill[who], 1.0, -1.0)
        low, high = accuracy_interval(margins.tolist(), by(voters))
        held += low <= 0.7 <= high
    assert held / tries > least


def test_values_that_share_one_of_two_people_go_together() -> None:
    rng = np.random.default_rng(3)
    values = rng.random(40).tolist()
    people = [tuple(map(str, two)) for two in rng.integers(0, 7, (40, 2))]

    def moved(gone: Collection[str]) -> float:
        """How far the mean moves without the values that hang on all of these people, squared."""
        left = [v for v, two in zip(values, people, strict=True) if not {*gone} <= {*two}]
        return float((np.mean(left) - np.mean(values)) ** 2)

    assert any(a == b for a, b in people)  # one is set beside another of their own
    twos = {frozenset(two) for two in people if len({*two}) == 2}
    together = 6 / 7 * sum(map(moved, map(str, range(7)))) - sum(map(moved, twos))
    alone = float(np.var(values, ddof=1)) / 40
    given = [sum(str(person) in two for two in people) for person in range(7)]
    evenly = sum(given) ** 2 / sum(n**2 for n in given)
    found = student.ppf(0.975, evenly - 1) / student.ppf(0.975, 39)
    assert together > alone
    assert design_effect(values, people) == pytest.approx(together / alone * found**2)
    assert design_effect(values, [(b, a) for a, b in people]) == design_effect(values, people)
    # A person whom the model knows well, whoever stands beside them.
    known = [0.0] * 30 + [1.0] * 10
    others = [(f"a{n}", f"b{n}") for n in range(30)]
    assert design_effect(known, [*others, *(("ann", f"c{n}") for n in range(10))]) > 3
    assert design_effect(known, [*others, *((f"d{n}", f"c{n}") for n in range(10))]) < 1.1


def test_intervals_of_votes_set_beside_others_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    held, naive, tries = 0, 0, 600
    for _ in range(tries):
        # Forty people; an answer that one of them liked beside one that another did not. How far
        # ahead the model has the liked one hangs on how well it knows either.
        liker, disliker = rng.integers(0, 40, (2, 400))
        knows = rng.normal(0.5, 1.0, 40)
        margins = (knows[liker] + knows[disliker] + rng.normal(0, 1, 400)).tolist()
        truth = 0.7181  # the normal distribution's share above 0, mean 1, deviation the root of 3
        low, high = accuracy_interval(
            margins, by((f"p{a}", f"p{b}") for a, b in zip(liker, disliker, strict=True))
        )
        held += low <= truth <= high
        low, high = accuracy_interval(margins)
        naive += low <= truth <= high
    assert held / tries > 0.90
    assert naive / tries < 0.70


@pytest.mark.parametrize("of_each", [[300, *[16] * 19], [60] * 5], ids=["one gave half", "five"])
def test_intervals_of_votes_beside_others_hold_the_truth_where_few_gave_most(
    of_each: list[int],
) -> None:
    rng = np.random.default_rng(1)
    votes = np.repeat(np.arange(len(of_each)), of_each)
    held, tries = 0, 300
    for _ in range(tries):
        liker, disliker = rng.permutation(votes).reshape(2, -1)
        knows = rng.normal(0.5, 0.5, len(of_each))
        margins = (knows[liker] + knows[disliker] + rng.normal(0, 1, len(liker))).tolist()
        truth = 0.7929  # the normal distribution's share above 0, mean 1, variance 1.5
        low, high = accuracy_interval(
            margins, by((f"p{a}", f"p{b}") for a, b in zip(liker, disliker, strict=True))
        )
        held += low <= truth <= high
    assert held / tries > 0.90


def test_a_conversation_weighs_as_a_person_does() -> None:
    right = [1.0] * 9 + [0.0] + [1.0, 0.0] * 5
    ann_and_bob = [("ann",)] * 10 + [("bob",)] * 10
    effect = design_effect(right, ann_and_bob)
    assert effect > 1
    alone = [(str(n),) for n in range(20)]
    assert shared_effect(right, list(map(HangsOn, ann_and_bob, alone))) == effect
    assert shared_effect(right, list(map(HangsOn, alone, ann_and_bob))) == effect
    # Whoever has a conversation to themselves is not counted for both.
    assert shared_effect(right, list(map(HangsOn, ann_and_bob, ann_and_bob))) == effect
    # Five conversations, in each of which both take part.
    five = [(f"c{n % 5}",) for n in range(20)]
    both = (
        design_effect(right, five)
        + effect
        - design_effect(
            right, [(f"{who} {where}",) for (who,), (where,) in zip(ann_and_bob, five, strict=True)]
        )
    )
    assert shared_effect(right, list(map(HangsOn, ann_and_bob, five))) == max(both, effect)
    assert shared_effect(right, list(map(HangsOn, alone, [("all",)] * 20))) == 1
    begun = (*user_prompt("hi"), Message("assistant", "hello"))
    first, other = ((*begun, Message("user", text)) for text in ("when is it due?", "how are you?"))
    later = (*first, Message("assistant", "soon"), Message("user", "when?"))
    one, two, another = (
        PreferencePair("p", prompt, "a", "b", "v", "", "train") for prompt in (first, later, other)
    )
    assert hangs_on(one) == hangs_on(two) != hangs_on(another)
    assert hangs_on(one, another) == HangsOn(
        ("v", "v"), (*hangs_on(two).conversations, *hangs_on(another).conversations)
    )


@pytest.mark.parametrize(
    ("conversations", "of_each", "raters"),
    [(30, 10, 0), (12, 25, 0), (60, 5, 0), (15, 40, 15)],
    ids=["thirty", "twelve", "five annotators", "few raters too"],
)
def test_intervals_hold_the_truth_where_conversations_are_few(
    conversations: int, of_each: int, raters: int
) -> None:
    rng = np.random.default_rng(2)
    held, naive, tries, count = 0, 0, 250, conversations * of_each
    where = np.repeat(np.arange(conversations), of_each)
    for _ in range(tries):
        # The model knows some questions far better than others, and some people.
        who = rng.integers(0, raters, count) if raters else np.arange(count)
        ahead = 0.7 + rng.normal(0, 1, conversations)[where] + rng.normal(0, 1, count)
        if raters:
            ahead += rng.normal(0, 1, raters)[who]
        truth = 0.6897 if not raters else 0.6570  # the normal's share above 0, variance 2, or 3
        on = [HangsOn((f"p{a}",), (f"c{b}",)) for a, b in zip(who, where, strict=True)]
        low, high = accuracy_interval(ahead.tolist(), on)
        held += low <= truth <= high
        low, high = accuracy_interval(
            ahead.tolist(), [one._replace(conversations=()) for one in on]
        )
        naive += low <= truth <= high
    assert held / tries > 0.92
    assert naive / tries < 0.90


@pytest.mark.parametrize(("conversations", "of_each"), [(30, 10), (12, 25), (300, 1)])
def test_a_calibrated_model_is_beyond_the_noise_as_seldom_where_conversations_are_few(
    conversations: int, of_each: int
) -> None:
    rng = np.random.default_rng(1)
    beyond, naive, tries = 0, 0, 400
    on = [HangsOn((str(n),), (f"c{n // of_each}",)) for n in range(conversations * of_each)]
    for _ in range(tries):
        margins = np.abs(rng.normal(0, 2, (conversations, of_each)))
        # Whom a question surprises it mostly surprises together: a third of each outcome is shared.
        shared = rng.random((conversations, 1))
        drawn = np.where(rng.random(margins.shape) < 0.55, shared, rng.random(margins.shape))
        foreseen = 1 / (1 + np.exp(-margins))
        told = np.where(drawn < foreseen, margins, -margins).ravel().tolist()
        bins = reliability(told, Confidence())
        effect = calibration_effect(told, Confidence(), on)
        beyond += calibration_error(bins) > calibration_noise(bins, effect)
        naive += calibration_error(bins) > calibration_noise(bins)
    assert beyond / tries < 0.09
    assert of_each == 1 or naive / tries > 0.12
