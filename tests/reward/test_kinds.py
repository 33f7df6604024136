"""One score from every kind of feedback: each likelihood by hand, and all of them together."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pipeline.config import load_settings
from rlhf_pipeline.errors import ConfigError, ModelError, NotEnoughData
from rlhf_pipeline.feedback.gold import Tally
from rlhf_pipeline.files import read_json
from rlhf_pipeline.records import (
    FeedbackKind,
    PreferencePair,
    RewardExample,
    RewardInput,
    ignore_progress,
    user_prompt,
)
from rlhf_pipeline.reward.fitting import fit_kinds
from rlhf_pipeline.reward.kinds import (
    Likelihoods,
    Opinions,
    Text,
    fit,
    gather,
    of_others,
    part,
    until_turned,
)
from rlhf_pipeline.reward.model import (
    Calibration,
    Limits,
    encode_rows,
    load_reward_model,
    new_reward_model,
    save_reward_model,
    score_rows,
)
from rlhf_pipeline.reward.named import check_function, composite_of
from rlhf_pipeline.reward.settings import FunctionSettings
from rlhf_pipeline.reward.training import train_reward_model
from rlhf_pipeline.reward.tuning import Descent
from tests.reward.conftest import Planted, scored_sides

EVERY = {kind.value: 1.0 for kind in FeedbackKind if kind is not FeedbackKind.comment}
PAIR = PreferencePair("p", user_prompt("q?"), "good", "bad", "v", "test", "train")
EXAMPLE = RewardExample(
    "e", user_prompt("q?"), "good", FeedbackKind.thumbs, 1.0, None, "v", "train"
)


def likelihood(opinions: Opinions, scores: list[float]) -> list[float]:
    """Return what fresh likelihoods (slopes 1, no leniency) say of each opinion."""
    judge = Likelihoods(opinions, 1, EVERY)
    found, _, _ = judge.said(torch.tensor(scores), torch.zeros(len(scores), 1))
    return [math.exp(x) for x in found.tolist()]


def test_the_four_outcomes_of_a_preference_are_all_there_is() -> None:
    said = [(0, 1, 0, 0), (1, 0, 0, 0), (0, 1, 2, 0), (0, 1, 3, 0)]
    won, lost, tie, bad = likelihood(Opinions(voters=["v"], preferences=said), [1.5, -0.5])
    assert won + lost + tie + bad == pytest.approx(1, abs=1e-6)
    assert won / (won + lost) == pytest.approx(1 / (1 + math.exp(-2)))  # Bradley-Terry
    assert tie / math.sqrt(won * lost) == pytest.approx(math.exp(-1))  # Davidson's width
    worse = likelihood(Opinions(voters=["v"], preferences=said), [-1.5, -3.5])
    assert worse[3] > bad  # two bad ones are likelier to be called so
    assert worse[0] / worse[1] == pytest.approx(won / lost, rel=1e-5)  # and the margin is the same


def test_ratings_thumbs_and_scores_follow_the_score() -> None:
    stars = [(0, float(k), 0) for k in range(1, 6)]
    for score in (-2.0, 0.0, 3.0):
        chances = likelihood(Opinions(voters=["v"], singles={"rating": stars}), [score])
        assert sum(chances) == pytest.approx(1, abs=1e-6)
    assert chances[4] == max(chances)  # of the highest score
    # By hand: the thresholds begin at -1.5 and are 1 apart.
    assert chances[0] == pytest.approx(1 / (1 + math.exp(3.0 + 1.5)), rel=1e-4)
    [up] = likelihood(Opinions(voters=["v"], singles={"thumbs": [(0, 1.0, 0)]}), [0.7])
    assert up == pytest.approx(1 / (1 + math.exp(-0.7)))
    near, far = likelihood(
        Opinions(voters=["v"], singles={"score": [(0, 0.5, 0), (0, 0.9, 0)]}), [0.0]
    )
    deviation = math.exp(-1.5) + 0.02
    assert near == pytest.approx(1 / (deviation * math.sqrt(2 * math.pi)), rel=1e-4)
    assert far / near == pytest.approx(math.exp(-0.5 * (0.4 / deviation) ** 2), rel=1e-4)


def test_only_what_has_a_weight_is_gathered_and_thumbs_are_never_a_pair() -> None:
    down = replace(EXAMPLE, prompt=user_prompt("other?"), number=0.0)
    bad = replace(PAIR, tie=True, both_bad=True)
    opinions = gather([PAIR, bad, replace(PAIR, corrected=True)], [EXAMPLE, down], EVERY)
    assert [outcome for _, _, outcome, _ in opinions.preferences] == [0, 3]
    assert len(opinions.corrections) == 1
    assert [t.sampled for t in opinions.texts] == [True] * 4 + [False] * 2 + [True] * 2
    assert [(value, who) for _, value, who in opinions.singles["thumbs"]] == [(1.0, 0), (0.0, 0)]
    alone = gather([PAIR, replace(PAIR, corrected=True)], [EXAMPLE], {"thumbs": 1.0})
    assert (alone.count, len(alone.texts)) == (1, 1)
    half = part(opinions, [i < 4 for i in range(8)])
    assert (len(half.preferences), half.count) == (2, 2)


def test_what_others_said_is_all_but_theirs() -> None:
    said = Opinions(
        voters=["ann", "bob"],
        preferences=[(0, 1, 0, 0), (2, 3, 0, 1)],
        corrections=[(4, 5, 1)],
        singles={"thumbs": [(6, 1.0, 0), (6, 0.0, 1)]},
        criteria={"safety": [(7, 0.5, 1)]},
    )
    others = of_others(said, {"bob", "never heard of"})
    assert others.preferences == [(0, 1, 0, 0)]
    assert others.singles == {"thumbs": [(6, 1.0, 0)]}
    assert (others.count, others.voters) == (2, ["ann", "bob"])


def planted_votes(rng: random.Random, raters: int, each: int) -> tuple[torch.Tensor, Opinions]:
    """Return features whose first is what people like, and what they say; a quarter do not look."""
    opinions = Opinions(voters=[f"r{i}" for i in range(raters)])
    features = torch.randn(raters * each, 6, generator=torch.Generator().manual_seed(0)).double()
    for who in range(raters):
        kindness = rng.gauss(0, 1)
        for i in range(who * each, (who + 1) * each):
            liked = 2 * float(features[i, 0]) + kindness
            if who % 4 == 0:
                liked = rng.gauss(0, 2)
            if i % 2:
                up = float(rng.random() < 1 / (1 + math.exp(-liked)))
                opinions.singles.setdefault("thumbs", []).append((i, up, who))
            else:
                stars = float(min(5, max(1, round(3 + liked / 1.5 + rng.gauss(0, 0.3)))))
                opinions.singles.setdefault("rating", []).append((i, stars, who))
    return features, opinions


def test_who_does_not_look_is_found_and_who_is_kind_moves_no_score() -> None:
    features, opinions = planted_votes(random.Random(0), 40, 16)
    found = fit(features, opinions, EVERY, ridge=1.0)
    weight = found.weight / found.weight.norm()
    assert float(weight[0]) > 0.99  # nothing else was liked
    careful = [found.careful[f"r{who}"] for who in range(40)]
    assert max(careful[::4]) < 0.1
    assert sorted(p for who, p in enumerate(careful) if who % 4)[3] > 0.9
    again = fit(features, opinions, EVERY, ridge=1.0)
    assert torch.equal(found.weight, again.weight)


def test_scores_alone_train_a_reward_that_ranks_pairs(planted: Planted, tmp_path: Path) -> None:
    both = scored_sides(planted.train, [f"v{i}" for i in range(9)])
    # One completion of a prompt: nothing that could be compared.
    examples = [both[2 * i + i % 2] for i in range(len(planted.train))]
    settings: dict[str, Any] = {
        "freeze_trunk": False,
        "centre_on": planted.centre,
        "epochs": 1,
        "learning_rate": 1e-4,
        "batch_size": 16,
        "max_prompt_tokens": 32,
        "max_completion_tokens": 40,
        "seed": 0,
        "device": "cpu",
        "kinds": {"score": 1.0},
    }
    out = tmp_path / "reward"
    report = train_reward_model(planted.base, [], planted.test, out, examples=examples, **settings)
    assert report.accuracy > 0.8
    assert len(report.loss_curve) > 1  # the trunk was trained too
    assert report.score_deviation > 0.1  # two round numbers are no sign that nobody had looked
    centred = load_reward_model(out, device="cpu")(planted.centre)
    assert sum(centred) / len(centred) == pytest.approx(0, abs=1e-3)
    assert set(read_json(out / "raters.json")["careful"]) == {f"v{i}" for i in range(9)}
    with pytest.raises(
        NotEnoughData, match="needs 2 votes of the kinds rating, found 0; collect 2"
    ):
        train_reward_model(
            planted.base,
            [],
            planted.test,
            out,
            examples=examples,
            **{**settings, "kinds": {"rating": 1.0}},
        )


def test_a_descent_that_unlearns_what_people_said_is_undone(planted: Planted) -> None:
    examples = scored_sides(planted.train, [f"v{i}" for i in range(9)])

    def fitted(learning_rate: float | None) -> tuple[str | None, list[float]]:
        model, tokenizer = new_reward_model(planted.base, seed=0, device="cpu")
        went, _, _ = fit_kinds(
            model,
            tokenizer,
            [],
            examples,
            {"score": 1.0},
            Limits(32, 40),
            descent=None if learning_rate is None else Descent(1, learning_rate, 16, 0),
            report=ignore_progress,
        )
        rows = [(pair.prompt, pair.chosen) for pair in planted.test]
        return went.undone, score_rows(model.eval(), encode_rows(tokenizer, rows, Limits(32, 40)))

    (_, alone), (kept, trained), (undone, back) = map(fitted, (None, 1e-5, 0.03))
    assert kept is None
    assert trained != alone
    assert undone is not None
    assert "less likely" in undone
    assert "reward.learning_rate from 0.03" in undone
    assert back == alone


@pytest.mark.parametrize("descent", [None, Descent(1, 1e-4, 16, 0)])
def test_a_criterion_that_people_rate_is_a_reward_of_its_own(
    planted: Planted, tmp_path: Path, descent: Descent | None
) -> None:
    """Scores like the chosen side, and people find it a little kinder."""
    said = [
        (i, pair, text, kind, number)
        for i, pair in enumerate(planted.train)
        for text, liked, kind_ in ((pair.chosen, 0.9, 0.8), (pair.rejected, 0.2, 0.3))
        for kind, number in ((FeedbackKind.score, liked), (FeedbackKind.criteria, kind_))
    ]
    examples = [
        replace(
            EXAMPLE,
            example_id=f"{i}{kind}{text}",
            prompt=pair.prompt,
            completion=text,
            kind=kind,
            number=number if kind is FeedbackKind.score else None,
            criteria={"kind": number} if kind is FeedbackKind.criteria else None,
            voter=f"v{i % 9}",
        )
        for i, pair, text, kind, number in said
    ]
    frozen = descent is None
    model, tokenizer = new_reward_model(planted.base, seed=0, on_base=frozen, device="cpu")
    limits = Limits(32, 40)
    kinds = {"score": 1.0, "criteria": 1.0}
    fit_kinds(
        model, tokenizer, [], examples, kinds, limits, descent=descent, report=ignore_progress
    )
    folder = tmp_path / "reward"
    folder.mkdir()
    save_reward_model(model, tokenizer, folder, limits=limits, calibration=Calibration())
    learned = load_reward_model(folder, device="cpu")
    functions = {"learned": FunctionSettings(weight=0), "learned:kind": FunctionSettings()}
    kind_alone = composite_of(functions, learned)
    chosen = [RewardInput(pair.prompt, pair.chosen) for pair in planted.test]
    rejected = [RewardInput(pair.prompt, pair.rejected) for pair in planted.test]
    n = len(planted.test)
    assert sum(a > b for a, b in zip(learned(chosen), learned(rejected), strict=True)) > 0.8 * n
    kinder, less = kind_alone(chosen), kind_alone(rejected)
    assert sum(a > b for a, b in zip(kinder, less, strict=True)) > 0.8 * n
    assert sum(kinder) / n == pytest.approx(0.8, abs=0.1)
    assert sum(less) / n == pytest.approx(0.3, abs=0.1)
    with pytest.raises(ModelError, match=r"the criterion safety needs people's votes .* kind"):
        composite_of({"learned:safety": FunctionSettings()}, learned)
    with pytest.raises(ModelError, match="takes no options"):
        check_function("learned:kind", FunctionSettings(options={"a": 1}))


def test_what_is_said_part_by_part_is_all_that_is_said() -> None:
    """As minibatches have it: every thing once, with its own rater, whatever the order of texts."""
    rng = random.Random(0)
    pairs = [
        replace(PAIR, pair_id=str(i), voter=f"r{i % 3}", corrected=i % 2 == 0, tie=i == 5)
        for i in range(12)
    ]
    examples = [
        replace(EXAMPLE, example_id=str(i), kind=kind, number=number, criteria=named, voter="r1")
        for i, (kind, number, named) in enumerate(
            [
                (FeedbackKind.thumbs, 1.0, None),
                (FeedbackKind.rating, 4.0, None),
                (FeedbackKind.score, 0.3, None),
                (FeedbackKind.criteria, None, {"kind": 0.5, "safe": 0.1}),
            ]
        )
    ]
    opinions = gather(pairs, examples, EVERY)
    judge = Likelihoods(opinions, 4, EVERY).double()
    features = torch.randn(len(opinions.texts), 4, dtype=torch.float64)
    scores = features.sum(1)
    with torch.no_grad():
        judge.apart.normal_()
        judge.written.normal_()
    about = opinions.about()
    assert sorted(i for texts in about for i in texts) == list(range(len(opinions.texts)))
    rng.shuffle(about)
    found = []
    for some in (about[:5], about[5:9], about[9:]):
        texts = [i for together in some for i in together]
        with torch.no_grad():
            found.append(judge.said(scores[texts], features[texts], texts))
    with torch.no_grad():
        whole = judge.said(scores, features)
    for n in range(2):
        parts = torch.cat([some[n] for some in found])
        torch.testing.assert_close(parts.sort().values, whole[n].sort().values)
    for rater in range(3):
        of_parts = sum(float(p[0][p[2] == rater].sum()) for p in found)
        assert of_parts == pytest.approx(float(whole[0][whole[2] == rater].sum()))


def test_the_kinds_are_a_setting() -> None:
    plain = load_settings("tiny")
    assert not plain.reward.reads_every_kind
    assert load_settings("tiny", {"reward": {"kinds": EVERY}}).reward.reads_every_kind
    with pytest.raises(ConfigError, match="at least one kind"):
        load_settings("tiny", {"reward": {"kinds": {}, "freeze_trunk": True}})


def test_a_gold_question_moves_who_has_looked_by_its_odds() -> None:
    said = [(0, 1, 0, 0), (0, 1, 0, 1)]
    opinions = Opinions(voters=["ann", "bob"], preferences=said)
    scores = torch.tensor([0.5, 0.0], dtype=torch.float64)
    features = torch.zeros(2, 1, dtype=torch.float64)
    plain = Likelihoods(opinions, 1, EVERY).double().careful(scores, features)
    judge = Likelihoods(opinions, 1, EVERY, {"bob": Tally(0, 2)}).double()
    told = judge.careful(scores, features)
    assert float(told[0]) == pytest.approx(float(plain[0]))
    odds = (plain[1] / (1 - plain[1])) * (0.05 / 0.5) ** 2
    assert float(told[1]) == pytest.approx(float(odds / (1 + odds)), rel=1e-4)


def test_what_a_rater_says_once_they_turned_is_left_out() -> None:
    rng = random.Random(1)
    raters, each = 12, 40
    opinions = Opinions(voters=[f"r{who}" for who in range(raters)])
    record = PreferencePair("p", user_prompt("?"), "a", "b", "v", "o", "train")
    scores: list[float] = []
    for i in range(raters * each):
        who, margin = i // each, abs(rng.gauss(0, 3))
        surely = rng.random() < 1 / (1 + math.exp(-margin))
        careful = surely != (who == 3 and i % each >= 25)  # r3 turns after 25
        better, worse = len(scores), len(scores) + 1
        scores += [margin, 0.0] if careful else [0.0, margin]
        opinions.texts.extend([Text(record, "a"), Text(record, "b")])
        opinions.preferences.append((better, worse, 0, who))
        if who == 3 and i % each in (10, 30):  # and finds two alike before, and two after
            scores += [0.0, 0.0]
            opinions.texts.extend([Text(record, "a"), Text(record, "b")])
            opinions.preferences.append((len(scores) - 2, len(scores) - 1, 1, who))
    left, turned = until_turned(opinions, scores)
    assert list(turned) == ["r3"]
    assert 22 <= turned["r3"] <= 27
    kept = Counter(who for *_, who in left.preferences)
    assert kept == {who: turned["r3"] + 1 if who == 3 else each for who in range(raters)}
    few = Opinions(opinions.texts, opinions.voters, opinions.preferences[: 9 * each])
    assert until_turned(few, scores) == (few, {})  # nine raters cannot outvote each other
