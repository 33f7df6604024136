from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation import metrics
from rlhf_pipeline.feedback.datasets import conversations_of
from rlhf_pipeline.records import Message


def floats(*values: float) -> metrics.Floats:
    return np.array(values, dtype=np.float64)


def test_distinct_on_a_hand_counted_corpus() -> None:
    # a b a b / a b: bigrams ab ba ab ab -> 2 of 4; unigrams a b a b a b -> 2 of 6
    assert metrics.distinct(["a b a b", "A b"], 2) == 0.5
    assert metrics.distinct(["a b a b", "a b"], 1) == pytest.approx(2 / 6)
    assert metrics.distinct([""], 2) == 0.0


def test_distinct_without_one_text_is_distinct_of_the_others() -> None:
    texts = ["a b a b", "a b c", "d e", "", "a b"]
    expected = [metrics.distinct(texts[:i] + texts[i + 1 :], 2) for i in range(len(texts))]
    assert metrics._distinct_without_each(texts, 2).tolist() == pytest.approx(expected)
    # Of two conversations whose turns alternate, the first and last text and the one between.
    others = [texts[1:4:2], texts[::2]]
    found = metrics._distinct_without_each(texts, 2, np.array([0, 1, 0, 1, 0]))
    assert found.tolist() == pytest.approx([metrics.distinct(some, 2) for some in others])


def test_the_interval_of_distinct_holds_where_a_bootstrap_never_would() -> None:
    generator = np.random.default_rng(0)
    weights = 1 / np.arange(1, 201)

    def corpus() -> list[str]:
        drawn = generator.choice(200, size=(40, 8), p=weights / weights.sum())
        return [" ".join(f"w{word}" for word in row) for row in drawn]

    truth = np.mean([metrics.distinct(corpus(), 1) for _ in range(200)])
    corpora = [corpus() for _ in range(100)]
    found = [metrics.distinct_with_interval(texts, 1) for texts in corpora]
    held = [(n.low or 0.0) <= truth <= (n.high or 1.0) for n in found]
    assert np.mean(held) >= 0.9
    changes = [
        metrics.distinct_difference(one, other, 1)
        for one, other in zip(corpora[::2], corpora[1::2], strict=True)
    ]
    assert np.mean([(n.low or 0.0) <= 0 <= (n.high or 0.0) for n in changes]) >= 0.9
    texts = corpora[0]
    again = [generator.choice(texts, size=len(texts)).tolist() for _ in range(200)]
    assert np.quantile([metrics.distinct(some, 1) for some in again], 0.95) < found[0].value


def test_a_difference_of_diversity_is_paired_and_turns_with_its_sides() -> None:
    texts = ["a b c", "a b d", "e f a", "g a b"]
    others = ["a a a", "a b b", "e f f", "c a a"]
    same = metrics.distinct_difference(texts, texts, 1)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    one = metrics.distinct_difference(texts, others, 1)
    turned = metrics.distinct_difference(others, texts, 1)
    assert one.low is not None
    assert one.high is not None
    assert (turned.value, turned.low, turned.high) == pytest.approx(
        (-one.value, -one.high, -one.low)
    )


def test_the_interval_of_a_share_of_distinct_words_is_within_0_and_1() -> None:
    # Without the one text in four that says b: 1 of 6, else 2 of 6; the value is 2 of 8.
    found = metrics.distinct_with_interval(["a a", "a a", "a a", "a b"], 1)
    reach = 3.182446 * math.sqrt(9 / 4 * np.var([1 / 3, 1 / 3, 1 / 3, 1 / 6], ddof=1))
    assert found.low == max(0.0, 0.25 - reach)  # Student's, of a deviation found from four
    assert found.high == pytest.approx(0.25 + reach)
    most = metrics.distinct_with_interval(["a b", "c d", "e f", "a g"], 1)
    assert most.high == 1.0


def test_repetition_counts_fourgrams_said_before() -> None:
    # a b c d a b c d: fourgrams abcd bcda cdab dabc abcd -> 4 distinct of 5
    assert metrics.repetition("a b c d a b c d") == pytest.approx(0.2)
    assert metrics.repetition("one two three") == 0.0
    assert metrics.repetition("no no no no no no no no") == pytest.approx(1 - 1 / 5)


def test_words_split_signs_from_letters() -> None:
    assert metrics.words("Don't stop, Ann.") == ["don", "'", "t", "stop", ",", "ann", "."]


def test_perplexity_of_a_fair_die_is_six() -> None:
    sums = floats(3 * math.log(1 / 6), math.log(1 / 6), 0)
    number = metrics.perplexity(sums, floats(3, 1, 0), samples=50, seed=0)
    assert number.value == pytest.approx(6)
    assert number.n == 2
    with pytest.raises(EvaluationError, match="reference token"):
        metrics.perplexity(floats(0), floats(0), samples=50, seed=0)


def test_a_perplexity_twice_as_high_is_so_on_every_text() -> None:
    tokens = floats(3, 1, 0, 5)
    here, there = tokens * math.log(1 / 8), tokens * math.log(1 / 4)
    found = metrics.perplexity_difference(here, there, tokens, samples=50, seed=0)
    assert (found.value, found.low, found.high) == pytest.approx((4, 4, 4))


def test_perplexity_weighs_tokens_not_texts() -> None:
    # 3 tokens at 1/2 and 1 at 1/32: nats 3 ln 2 + 5 ln 2 over 4 tokens = 2 ln 2
    number = metrics.perplexity(
        floats(3 * math.log(1 / 2), math.log(1 / 32)), floats(3, 1), samples=50, seed=0
    )
    assert number.value == pytest.approx(4)


def test_win_rate_counts_ties_half() -> None:
    rate = metrics.win_rate(floats(1, 2, 3, 0), floats(0, 2, 4, -1))
    assert rate.value == (1 + 0.5 + 0 + 1) / 4
    assert rate.n == 4


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1))
def test_swapping_the_sides_mirrors_the_win_rate(scores: list[tuple[int, int]]) -> None:
    a, b = np.array(scores, dtype=np.float64).T
    here, there = metrics.win_rate(a, b), metrics.win_rate(b, a)
    assert here.value == pytest.approx(1 - there.value)
    assert here.low == pytest.approx(1 - (there.high or 0.0))


def test_wilson_agrees_with_statsmodels() -> None:
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    for successes, n in ((0, 10), (3, 10), (10, 10), (137, 400)):
        expected = proportion.proportion_confint(successes, n, method="wilson")
        assert metrics.wilson_interval(successes / n, n) == pytest.approx(expected, abs=1e-9)
    with pytest.raises(EvaluationError):
        metrics.wilson_interval(0, 0)


def test_the_wilson_interval_is_the_published_one() -> None:
    low, high = metrics.wilson_interval(0.8, 10)  # 8 of 10: 0.490 to 0.943
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert metrics.wilson_interval(0.0, 5)[0] == 0
    assert metrics.wilson_interval(1.0, 5)[1] == 1


def test_wilson_solves_its_quadratic() -> None:
    # Its ends are where (p - share)^2 = z^2 p (1 - p) / n.
    for p in metrics.wilson_interval(7 / 20, 20):
        assert (p - 7 / 20) ** 2 == pytest.approx(metrics.Z**2 * p * (1 - p) / 20)


def test_equal_lengths_leave_the_plain_win_rate() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(0.3, 1, 80), generator.normal(0, 1, 80)
    controlled = metrics.length_controlled_win_rate(
        a, b, np.zeros(80), bootstrap_samples=200, seed=0
    )
    assert controlled.value == pytest.approx(metrics.win_rate(a, b).value, abs=1e-7)


def test_the_length_controlled_fit_is_the_maximum_of_its_likelihood() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    generator = np.random.default_rng(1)
    difference = generator.normal(5, 20, 60)
    a = generator.normal(0, 1, 60) + 0.05 * difference
    b = np.zeros(60)
    x = np.tanh(difference / difference.std())
    won = (a > b).astype(float)

    def loss(theta: metrics.Floats) -> float:
        eta = theta[0] + theta[1] * x
        return float((np.log1p(np.exp(eta)) - won * eta).sum() + theta[1] ** 2 / 2)

    best = optimize.minimize(loss, np.zeros(2)).x
    controlled = metrics.length_controlled_win_rate(a, b, difference, bootstrap_samples=50, seed=0)
    assert controlled.value == pytest.approx(1 / (1 + math.exp(-best[0])), abs=1e-4)


def test_a_judge_that_counts_words_is_seen_through() -> None:
    generator = np.random.default_rng(2)
    difference = generator.normal(15, 20, 400)  # the candidate is longer on average
    score = difference + generator.normal(0, 5, 400)  # and the judge likes nothing but length
    plain = metrics.win_rate(score, np.zeros(400))
    controlled = metrics.length_controlled_win_rate(
        score, np.zeros(400), difference, bootstrap_samples=200, seed=0
    )
    assert plain.low is not None
    assert plain.low > 0.6
    assert controlled.low is not None
    assert controlled.low < 0.5


def test_a_clean_sweep_stays_finite() -> None:
    controlled = metrics.length_controlled_win_rate(
        np.ones(20), np.zeros(20), np.arange(20.0), bootstrap_samples=100, seed=0
    )
    assert controlled.low is not None
    assert 0.9 < controlled.low <= controlled.value < 1


def test_one_prompt_has_no_interval() -> None:
    one = floats(1.0)
    assert metrics.bootstrap_mean(one, samples=10, seed=0) == metrics.Number(1.0, n=1)
    controlled = metrics.length_controlled_win_rate(
        one, floats(0), floats(3), bootstrap_samples=10, seed=0
    )
    assert controlled.low is None
    with pytest.raises(EvaluationError):
        metrics.bootstrap_mean(floats(), samples=10, seed=0)


def test_the_bootstrap_interval_is_the_normal_one_for_normal_values() -> None:
    values = np.random.default_rng(3).normal(2.0, 3.0, 2000)
    number = metrics.bootstrap_mean(values, samples=2000, seed=1)
    half = metrics.Z * values.std() / math.sqrt(len(values))
    assert number.value == pytest.approx(values.mean())
    assert number.low == pytest.approx(values.mean() - half, abs=0.02)
    assert number.high == pytest.approx(values.mean() + half, abs=0.02)
    assert metrics.bootstrap_mean(values, samples=2000, seed=1) == number


def test_the_bootstrap_interval_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(4)
    covered = 0
    for trial in range(300):
        number = metrics.bootstrap_mean(generator.exponential(1.0, 50), samples=300, seed=trial)
        covered += (number.low or 0.0) <= 1.0 <= (number.high or 0.0)
    assert 0.88 <= covered / 300 <= 0.98


def test_turns_of_one_conversation_are_no_independent_tries() -> None:
    generator = np.random.default_rng(5)
    groups = np.repeat(np.arange(20), 5)
    covered = {"mean": 0, "rate": 0, "plain": 0}
    for trial in range(200):
        # Half of the variance is the conversation's.
        ahead = generator.normal(0, 1, 20)[groups] + generator.normal(0, 1, 100)
        zero = np.zeros(100)
        found = {
            "mean": metrics.bootstrap_mean(ahead, samples=300, seed=trial, groups=groups),
            "plain": metrics.bootstrap_mean(ahead, samples=300, seed=trial),
        }
        rate = metrics.win_rate(ahead, zero, groups=groups)
        for name, number in found.items():
            covered[name] += (number.low or 0.0) <= 0.0 <= (number.high or 0.0)
        covered["rate"] += (rate.low or 0.0) <= 0.5 <= (rate.high or 0.0)
    assert covered["mean"] / 200 > 0.9
    assert covered["rate"] / 200 > 0.9
    assert covered["plain"] / 200 < 0.85


def test_turns_of_one_conversation_are_no_independent_words() -> None:
    """Two systems alike, each with a manner of its own in every conversation."""
    generator = np.random.default_rng(8)
    groups = np.repeat(np.arange(20), 8)

    def answers() -> list[str]:
        known = [generator.choice(500, size=generator.integers(4, 40)) for _ in range(20)]
        drawn = [generator.choice(known[group], 8) for group in groups]
        return [" ".join(f"w{word}" for word in row) for row in drawn]

    missed, plain = 0, 0
    for _ in range(50):
        here, other = answers(), answers()
        found = metrics.distinct_difference(here, other, 2, groups=groups)
        missed += not (found.low or 0.0) <= 0.0 <= (found.high or 0.0)
        alone = metrics.distinct_difference(here, other, 2)
        plain += not (alone.low or 0.0) <= 0.0 <= (alone.high or 0.0)
    assert missed <= 5
    assert plain > 10


def test_few_conversations_do_not_tell_their_own_deviation() -> None:
    """Two systems alike over five conversations: the normal's interval misses in one of ten."""
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(5), 8)

    def answers() -> list[str]:
        known = [generator.choice(500, size=generator.integers(4, 40)) for _ in range(5)]
        return [" ".join(f"w{word}" for word in generator.choice(known[g], 8)) for g in groups]

    missed = 0
    for _ in range(300):
        found = metrics.distinct_difference(answers(), answers(), 2, groups=groups)
        missed += not (found.low or 0.0) <= 0.0 <= (found.high or 0.0)
    assert missed <= 21


def test_groups_of_one_are_no_groups() -> None:
    values = np.random.default_rng(6).normal(0, 1, 30)
    each = np.arange(30)
    plain = metrics.bootstrap_mean(values, samples=200, seed=0)
    assert metrics.bootstrap_mean(values, samples=200, seed=0, groups=each) == plain
    rate = metrics.win_rate(values, -values)
    assert metrics.win_rate(values, -values, groups=each) == rate
    texts = [f"a b{i % 7} c" for i in range(30)]
    diversity = metrics.distinct_with_interval(texts, 2)
    assert metrics.distinct_with_interval(texts, 2, groups=each) == diversity
    same = metrics.distinct_with_interval(texts, 2, groups=np.zeros(30, dtype=np.int64))
    assert (same.value, same.low, same.n) == (diversity.value, None, 30)
    one = metrics.bootstrap_mean(values, samples=200, seed=0, groups=np.zeros(30, dtype=np.int64))
    assert (one.value, one.low) == (plain.value, None)
    assert metrics.win_rate(values, -values, groups=np.zeros(30, dtype=np.int64)).low is None
    four = metrics.win_rate(np.ones(40), np.zeros(40), groups=np.arange(40) // 10)
    assert four.low == metrics.win_rate(np.ones(4), np.zeros(4)).low  # not of forty tries
    prompts = [(Message("user", "a"),), (Message("user", "b"),)]
    later = (*prompts[0], Message("assistant", "x"), Message("user", "c"))
    assert conversations_of([*prompts, later]) == [0, 1, 0]


def test_of_ten_tries_the_interval_misses_as_seldom_as_it_says() -> None:
    generator = np.random.default_rng(7)
    missed = 0
    for trial in range(1000):
        number = metrics.bootstrap_mean(generator.normal(0, 1, 10), samples=500, seed=trial)
        missed += not (number.low or 0.0) <= 0.0 <= (number.high or 0.0)
    assert 0.03 <= missed / 1000 <= 0.07


@pytest.mark.parametrize("apart", [0.0, 1e-16, 2.0**-52, 1e-3, 5.0])
@pytest.mark.parametrize("value", [0.0, 0.7, -3e7])
def test_a_histogram_shows_every_value_however_near_they_are(value: float, apart: float) -> None:
    values = [value, value + apart, value]
    counts, edges = np.histogram(values, bins=metrics.bin_edges(values))
    assert counts.sum() == 3
    assert counts.max() == (3 if apart < 1e-6 else 2)
    assert (np.diff(edges) > 0).all()
