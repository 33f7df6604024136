"""What held-out votes say of a reward model: for whom, beside what, and where it is wrong."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.transforms import Bbox
from scipy.stats import t as student
from typer.testing import CliRunner

from assets.reward_tables import beside, groups_of, worst_of
from rlhf_pipeline.cli import app
from rlhf_pipeline.evaluation.metrics import wilson_interval
from rlhf_pipeline.feedback.datasets import JOBS
from rlhf_pipeline.files import read_json
from rlhf_pipeline.records import FeedbackKind, RewardExample, prompt_to_json
from rlhf_pipeline.reward import WORST
from rlhf_pipeline.reward.calibration import Bin, Confidence, HangsOn, by_length
from rlhf_pipeline.reward.held_out import (
    MOST_SINGLES,
    Lead,
    Measured,
    annotators_agree,
    is_good,
    learning_curve,
    of_like_length,
    of_pairs,
    rank_correlation,
    some_of_each_kind,
    tells_apart,
    word_margins,
)
from rlhf_pipeline.reward.model import load_reward_model
from rlhf_pipeline.reward.plots import _held_out, _reliability
from rlhf_pipeline.reward.training import RewardModelReport, train_reward_model
from tests.reward.conftest import SETTINGS, Planted

NUMBERS = itertools.count()
TURNED = 4  # held-out pairs that people have the other way round


@pytest.fixture(scope="module")
def trained(
    planted: Planted, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RewardModelReport, Path]:
    """Return a reward model's report and folder: two topics, a file's raters, single votes."""
    test = [
        replace(
            pair,
            origin="/in/votes.jsonl" if i % 2 else "chat",
            corrected=i % 4 == 0,
            **({"chosen": pair.rejected, "rejected": pair.chosen} if i < TURNED else {}),  # type: ignore[arg-type]
        )
        for i, pair in enumerate(planted.test)
    ]
    thumbs = [
        RewardExample(
            f"{side} {i}", p.prompt, text, FeedbackKind.thumbs, up, None, "v", "evaluation"
        )
        for i, p in enumerate(planted.test[:30])
        for side, text, up in (("good", p.chosen, 1.0), ("bad", p.rejected, 0.0))
    ]
    topics = {prompt_to_json(p.prompt): "tea" if i < 40 else "few" for i, p in enumerate(test[:49])}
    folder = tmp_path_factory.mktemp("held out") / "rm"
    report = train_reward_model(
        planted.base,
        planted.train,
        test,
        folder,
        freeze_trunk=True,
        centre_on=planted.centre,
        test_examples=thumbs,
        topics=topics,
        **SETTINGS,
    )
    return report, folder


def test_the_report_says_for_whom_it_is_right_and_beside_what(
    trained: tuple[RewardModelReport, Path],
) -> None:
    report, _ = trained
    found = report.findings
    assert found is not None
    assert (found.by_topic["tea"].n, set(found.by_topic)) == (40, {"tea"})
    assert {name: of.n for name, of in found.by_kind.items()} == {
        "correction": 20,
        "preference": 60,
        "thumbs": 60,
    }
    assert {name: of.n for name, of in found.by_cohort.items()} == {"chat": 40, "votes.jsonl": 40}
    by_cohort = [of.share * of.n for of in found.by_cohort.values()]
    assert sum(by_cohort) / 80 == pytest.approx(report.accuracy)
    assert found.by_kind["thumbs"].share > 0.9  # they say what the model learnt
    assert found.bag_of_words is not None
    assert found.bag_of_words.share > 0.9  # one word decides here
    assert report.floors["bag_of_words"] == found.bag_of_words.share
    assert found.annotators is None  # nobody judged what another judged
    matched = found.length_matched
    assert matched is not None
    assert matched.low < matched.share <= matched.high
    assert matched.n < report.n
    assert found.length_correlation is not None
    assert abs(found.length_correlation) < 0.5
    assert [one.pairs for one in found.learning_curve] == [30, 60, 120, 240]
    last = found.learning_curve[-1].accuracy
    assert last.share > found.learning_curve[0].accuracy.share
    assert last.n == 80
    assert last.share == pytest.approx(report.accuracy, abs=0.1)


def test_the_worst_disagreements_are_kept_as_examples(
    planted: Planted, trained: tuple[RewardModelReport, Path]
) -> None:
    report, folder = trained
    assert report.findings is not None
    worst = report.findings.worst
    assert {pair.pair_id for pair in planted.test[:TURNED]} <= {one.pair_id for one in worst[:6]}
    assert [one.margin for one in worst] == sorted(one.margin for one in worst)
    assert worst[0].margin < 0
    words = read_json(folder / WORST)["pairs"]
    assert [one["pair_id"] for one in words] == [one.pair_id for one in worst]
    wrong = next(p for p in planted.test if p.pair_id == worst[0].pair_id)
    assert {words[0]["people preferred"], words[0]["the model prefers"]} == {
        wrong.chosen,
        wrong.rejected,
    }
    # What is shown beyond the folder has no words of anybody's.
    assert wrong.chosen not in (folder / "report.json").read_text()


def test_mlflow_and_dagster_are_told_all_of_it(trained: tuple[RewardModelReport, Path]) -> None:
    report, folder = trained
    assert report.findings is not None
    saved = read_json(folder / "report.json")
    metrics = beside(saved)
    assert set(metrics) == {
        "accuracy/bag_of_words",
        "accuracy/length_matched",
        "length_correlation",
    }
    rows = groups_of(dict.fromkeys(JOBS, saved))
    assert [row["group"] for row in rows if row["model"] == "gate"] == [
        "bag of words",
        "length matched",
        *(f"kind {name}" for name in ("correction", "preference", "thumbs")),
        "topic tea",
        "cohort chat",
        "cohort votes.jsonl",
        *(f"head on {pairs} pairs" for pairs in (30, 60, 120, 240)),
    ]
    given = {n: v for n, v in saved.items() if n != "findings"}  # by an earlier version of this
    assert (beside(given), groups_of(dict.fromkeys(JOBS, given)), worst_of(given)) == ({}, [], [])
    again = given | {"on_new_votes": {"share": 0.7, "low": 0.6, "high": 0.8, "n": 50}}
    assert beside(again) == {"accuracy/on_new_votes": 0.7}
    assert groups_of(dict.fromkeys(JOBS, again))[0]["group"] == "new votes"
    assert (folder / "held_out.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_holds_long_names_and_says_what_its_lines_are(
    trained: tuple[RewardModelReport, Path],
) -> None:
    report, _ = trained
    assert report.findings is not None
    names = ("votes-of-the-first-quarter.jsonl", "save $$ now.jsonl")  # the latter is no formula
    long = dict.fromkeys(names, Measured(0.8, 0.7, 0.9, 1234))
    figure = _held_out(report, replace(report.findings, by_cohort=long))
    figure.draw_without_rendering()
    groups, curve = figure.axes
    assert min(label.get_window_extent().x0 for label in groups.get_yticklabels()) >= 0
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [by_length(report.floors)[0]]
    drawn = (groups.patch, groups.xaxis.label, *groups.get_yticklabels())
    assert not any(legend.get_window_extent().overlaps(one.get_window_extent()) for one in drawn)
    assert (curve.get_xlabel(), curve.get_ylabel()) == ("training pairs", "accuracy, 95 %")


@pytest.mark.parametrize("most", [40_000, 400_000, 1_250_000])
def test_the_picture_holds_the_numbers_of_many_training_pairs(
    trained: tuple[RewardModelReport, Path], most: int
) -> None:
    report, _ = trained
    assert report.findings is not None
    learnt = tuple(
        replace(one, pairs=most // n)
        for one, n in zip(report.findings.learning_curve, (8, 4, 2, 1), strict=True)
    )
    figure = _held_out(report, replace(report.findings, learning_curve=learnt))
    figure.draw_without_rendering()
    axis = figure.axes[1].xaxis
    low, high = axis.get_view_interval()
    shown = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    places = [tick.label1.get_window_extent() for tick in shown]
    assert len(places) > 1
    assert places[-1].x1 <= figure.bbox.width
    assert all(here.x1 + 2 < after.x0 for here, after in itertools.pairwise(places))


@pytest.mark.parametrize("confidence", [0.5, 1.0])
@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_a_bin_of_all_pairs_is_a_whole_dot_beside_the_legend(
    trained: tuple[RewardModelReport, Path], confidence: float, accuracy: float
) -> None:
    report, _ = trained
    one = Bin(confidence, confidence, report.n, confidence, accuracy)
    figure = _reliability(replace(report, reliability=(one,)), "held-out votes, two by two")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (dots,) = axes.collections
    (place,) = axes.transData.transform(dots.get_offsets())
    radius = math.sqrt(dots.get_sizes()[0]) / 2 * figure.dpi / 72
    around = Bbox([place - radius, place + radius])
    assert all(axes.bbox.contains(*corner) for corner in around.corners())
    legend = axes.get_legend()
    assert not legend.get_window_extent().overlaps(around)
    assert math.sqrt(legend.legend_handles[-1].get_sizes()[0]) < legend.get_texts()[0].get_size()


def alone(values: Iterable[float]) -> list[Lead]:
    """Return them as leads of as many people."""
    return [Lead(value, HangsOn((f"alone {next(NUMBERS)}",))) for value in values]


def test_what_tells_votes_apart_is_as_sure_as_it_says_where_people_differ() -> None:
    rng = np.random.default_rng(0)
    held, naive, tries = 0, 0, 300
    for _ in range(tries):
        # Thirty people, whose liked answers the model knows better or worse than their others.
        knows = rng.normal(1.0, 1.0, 30)
        voters = [rng.integers(0, 30, 150) for _ in range(2)]
        liked, disliked = rng.normal(knows[voters[0]], 1), rng.normal(0, 1, 150)
        truth = 0.7181  # of a normal difference, mean 1, variance 1 of people and 1 of each vote
        sides = [
            [
                Lead(value, HangsOn((f"p{who}",)))
                for value, who in zip(values.tolist(), by, strict=True)
            ]
            for values, by in zip((liked, disliked), voters, strict=True)
        ]
        found = tells_apart(*sides)
        held += found.low <= truth <= found.high
        found = tells_apart(*(alone(lead.value for lead in side) for side in sides))
        naive += found.low <= truth <= found.high
    assert held / tries > 0.90
    assert naive / tries < 0.85


def test_few_votes_that_are_told_apart_whole_are_no_proof_that_all_are() -> None:
    rng = np.random.default_rng(0)
    truth, held, tries = 0.9615, 0, 400  # of normal differences, mean 2.5, variance 2
    for _ in range(tries):
        found = tells_apart(alone(rng.normal(2.5, 1, 10)), alone(rng.normal(0, 1, 10)))
        held += found.low <= truth <= found.high
        assert found.low < found.share or found.share == 0.0
    assert held / tries > 0.93


def test_good_and_bad_are_told_apart_as_often_as_every_two_of_them_are() -> None:
    rng = random.Random(0)
    better = alone([float(rng.randint(0, 9)) for _ in range(13)])
    worse = alone([float(rng.randint(0, 7)) for _ in range(7)])
    each = [1.0 if b > w else 0.5 if b == w else 0.0 for b, _ in better for w, _ in worse]
    found = tells_apart(better, worse)
    assert found.share == pytest.approx(statistics.fmean(each))
    assert found.low < found.share < found.high
    assert tells_apart(worse, better).share == pytest.approx(1 - found.share)
    nine = [alone([lead.value for lead in side] * 9) for side in (better, worse)]
    assert tells_apart(*nine).high < found.high
    again = tells_apart(better * 9, worse * 9)  # of as many people, who say it nine times
    assert again.high == pytest.approx(found.high, abs=0.02)
    # The paper's example, 109 pictures rated from 1 to 5: 0.893 with a standard error of 0.032.
    normal, abnormal = (33, 6, 6, 11, 2), (3, 2, 2, 11, 33)
    rated = [
        alone([float(i) for i, n in enumerate(side) for _ in range(n)])
        for side in (abnormal, normal)
    ]
    published = tells_apart(*rated)
    assert published.share == pytest.approx(0.893, abs=0.0005)
    odds = [math.log(share / (1 - share)) for share in (published.low, published.high)]
    deviation = (odds[1] - odds[0]) / 2 / 1.96 * published.share * (1 - published.share)
    assert deviation == pytest.approx(0.032, abs=0.0005)


def test_so_many_single_votes_are_scored_of_a_kind_and_none_that_says_neither() -> None:
    def one(kind: FeedbackKind, number: float, i: int) -> RewardExample:
        return RewardExample(f"{kind} {i}", (), "c", kind, number, None, "v", "evaluation")

    thumbs = [one(FeedbackKind.thumbs, i % 2, i) for i in range(MOST_SINGLES + 9)]
    ratings = [one(FeedbackKind.rating, stars, stars) for stars in range(1, 6)]
    found = some_of_each_kind([*thumbs, *ratings])
    assert found == some_of_each_kind([*reversed(ratings), *reversed(thumbs)])
    kinds = [example.kind for example in found]
    assert kinds.count(FeedbackKind.thumbs) == MOST_SINGLES
    assert {e.number for e in found if e.kind is FeedbackKind.rating} == {1, 2, 4, 5}


def test_single_votes_are_good_bad_or_neither() -> None:
    def one(kind: FeedbackKind, number: float | None, **criteria: float) -> bool | None:
        return is_good(RewardExample("e", (), "c", kind, number, criteria, "v", "evaluation"))

    kinds = FeedbackKind
    assert [one(kinds.rating, stars) for stars in (1, 2, 3, 4, 5)] == [
        False,
        False,
        None,
        True,
        True,
    ]
    assert [one(kinds.thumbs, up) for up in (0, 1)] == [False, True]
    assert [one(kinds.score, share) for share in (0.2, 0.5, 0.7)] == [False, None, True]
    assert one(kinds.criteria, None, safety=1.0, helpfulness=0.4) is True


def test_annotators_agree_as_often_as_two_of_them_say_the_same(planted: Planted) -> None:
    first, second = planted.test[:2]
    votes = [replace(first, voter=name) for name in ("ann", "bob")]
    votes.append(replace(first, voter="eve", chosen=first.rejected, rejected=first.chosen))
    found = annotators_agree([*votes, second])  # the second has one vote: it says nothing
    assert found is not None
    assert found.share == pytest.approx(1 / 3)  # ann and bob, of three twos
    assert found.n == 1


def test_one_pair_that_many_judged_is_one_pair(planted: Planted) -> None:
    """Half of the votes are on one pair, on which all agree; of the others' every second two do."""
    popular, *rest = planted.test[:21]
    votes = [replace(popular, voter=f"v{i}") for i in range(40)]
    for i, pair in enumerate(rest):
        votes += [replace(pair, voter="ann"), replace(pair, voter="bob")]
        if i % 2:
            votes[-1] = replace(votes[-1], chosen=pair.rejected, rejected=pair.chosen)
    found = annotators_agree(votes)
    assert found is not None
    assert (found.share, found.n) == (0.75, 21)
    # By hand: 40 (1 - 0.75) on the popular pair, 2 (1 - 0.75) on ten, 2 (0 - 0.75) on ten more,
    # each over how many are left without; 80^2 / (40^2 + 20 * 2^2) even pairs count as five.
    together = ((10 / 40) ** 2 + 10 * (0.5 / 78) ** 2 + 10 * (1.5 / 78) ** 2) * 20 / 21
    alone = 0.75 * 0.25 / 79
    few = float(student.ppf(0.975, 5 - 1) / student.ppf(0.975, 79))
    worth = 80 * alone / together / few**2
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.75, worth))
    unanimous = annotators_agree(votes[:40])
    assert unanimous is not None
    assert unanimous.low < 0.3  # of one pair


def test_length_is_told_by_ranks_and_by_pairs_of_like_length(planted: Planted) -> None:
    assert rank_correlation([1, 2, 2, 9], [1, 5, 5, 6]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    pair = planted.test[0]
    assert of_like_length(replace(pair, chosen="a" * 10, rejected="b" * 9))
    assert not of_like_length(replace(pair, chosen="a" * 10, rejected="b" * 8))


def test_a_bag_of_words_and_a_curve_need_something_to_go_by(planted: Planted) -> None:
    alone: Any = [replace(planted.train[0], chosen="one", rejected="two")]
    assert word_margins(alone, of_pairs(planted.test, [], [])) == []
    damaged = torch.full((8, 3), float("nan"), dtype=torch.float64)
    ones = torch.ones(30, dtype=torch.float64)
    assert learning_curve(damaged, ones[:8], damaged) == ()
    wide = torch.randn(40, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wide[:, 0] += 9
    assert learning_curve(wide[:30], ones, wide[30:])[-1].accuracy.share == 1
    wide[35:, 0] -= 18  # half of what is held out is by somebody who finds the opposite
    many, two = (
        learning_curve(wide[:30], ones, wide[30:], [HangsOn(who) for who in people])[-1].accuracy
        for people in ([(str(n),) for n in range(10)], [("ann",)] * 5 + [("bob",)] * 5)
    )
    assert many.share == two.share == 0.5
    assert two.low < many.low < many.high < two.high


def test_its_score_is_offered_from_zero_to_one_too(
    trained: tuple[RewardModelReport, Path], tmp_path: Path
) -> None:
    _, folder = trained
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "question 1?", "completion": text} for text in ("please", "the", "order")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = ["--reward", str(folder), "--reward", "length"]
    done = CliRunner().invoke(app, ["score", str(file), *rewards, "--out", str(out)])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line)["pieces"] for line in out.read_text().splitlines()]
    said = load_reward_model(folder, device="cpu").calibration
    sure = Confidence(said.temperature, said.lapse)
    for piece in (line[str(folder)] for line in lines):
        chance = piece["zero_to_one"]
        assert 0 < chance < 1
        # 0 is as good as the baseline's completions.
        assert chance == pytest.approx(sure.chance(piece["score"]))
        assert (chance > 0.5) == (piece["score"] > 0)
    assert "zero_to_one" not in lines[0]["length"]
