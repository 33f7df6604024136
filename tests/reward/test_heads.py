"""Several heads on parts of the raters, and how far each rater's word goes."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.errors import NotEnoughData, TrainingError
from rlhf_pipeline.evaluation.compare import _judged
from rlhf_pipeline.feedback.gold import Tally
from rlhf_pipeline.files import read_json
from rlhf_pipeline.records import (
    FeedbackKind,
    PreferencePair,
    RewardExample,
    RewardInput,
    user_prompt,
)
from rlhf_pipeline.reward.ensemble import Combine
from rlhf_pipeline.reward.heads import HEAD_RIDGES, Combined, disagreement, fit_heads, parts_of
from rlhf_pipeline.reward.influence import of_heads, of_one_head
from rlhf_pipeline.reward.kinds import Opinions, Text, fit, fit_parts_of_kinds, of_others
from rlhf_pipeline.reward.logistic import logistic
from rlhf_pipeline.reward.model import load_reward_model
from rlhf_pipeline.reward.raters import TURN_ALPHA, rater_weights, turn_of, vote_weights
from rlhf_pipeline.reward.training import RewardModelReport, train_reward_model
from tests.reward.conftest import Planted, scored_sides

RATERS = 12
EXAMPLE = RewardExample("e", user_prompt("q?"), "good", FeedbackKind.score, 0.9, None, "v", "train")


def train(planted: Planted, folder: Path, **changes: Any) -> RewardModelReport:
    settings: dict[str, Any] = {
        "freeze_trunk": True,
        "epochs": 1,
        "learning_rate": 1e-3,
        "batch_size": 16,
        "max_prompt_tokens": 32,
        "max_completion_tokens": 40,
        "seed": 0,
        "device": "cpu",
        "centre_on": planted.centre,
    }
    pairs = changes.pop("pairs", None) or signed(planted.train)
    return train_reward_model(planted.base, pairs, planted.test, folder, **(settings | changes))


def signed(pairs: Sequence[PreferencePair], flipped: int = 0, times: int = 1) -> list[Any]:
    """Return the pairs dealt out to RATERS people; the first `flipped` vote against them."""
    found = []
    for i, pair in enumerate(pairs):
        rater = i % RATERS
        one = replace(pair, voter=f"r{rater:02d}")
        if rater < flipped:
            one = replace(one, chosen=pair.rejected, rejected=pair.chosen)
        found += [one] * (times if rater < flipped else 1)
    return found


def test_the_scores_are_those_of_a_hand_worked_example() -> None:
    scores = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0]])
    assert Combined("median")(scores).tolist() == [2.0, 0.0]
    assert Combined("mean")(scores).tolist() == [3.0, 0.0]
    deviation = (14 / 3) ** 0.5
    assert disagreement(scores).tolist() == pytest.approx([deviation, 0.0])
    assert Combined("pessimistic", 2.0)(scores).tolist() == pytest.approx([3 - 2 * deviation, 0.0])
    assert Combined("median")(torch.tensor([[1.0, 5.0, 2.0, 9.0]])).tolist() == [3.5]
    assert Combined("pessimistic")(torch.tensor([[4.0]])).tolist() == [4.0]


def test_every_head_has_raters_of_its_own_and_more_people_move_no_hash() -> None:
    voters = [f"v{i}" for i in range(9)]
    parts = parts_of(voters * 3, 4)
    assert sorted(parts) == voters
    assert sorted(parts.values()) == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert parts_of(list(reversed(voters)), 4) == parts
    with pytest.raises(NotEnoughData, match="10 heads need 10 raters, one each at least, found 9"):
        parts_of(voters, 10)


@pytest.mark.parametrize("combine", ["median", "mean", "pessimistic"])
def test_the_ridge_is_the_best_of_margins_between_combined_scores(combine: Combine) -> None:
    """A median of differences is no difference of medians, nor is a difference less a deviation."""
    combined = Combined(combine)
    part, kept_out = torch.arange(200) % 3, torch.arange(200) % 5 == 0
    ones = torch.ones(200, dtype=torch.float64)
    for seed in range(12):
        draw = torch.Generator().manual_seed(seed)
        taste = 0.35 * torch.randn(16, generator=draw, dtype=torch.float64)
        one, other = 0.7 * torch.randn(2, 200, 16, generator=draw, dtype=torch.float64)
        likes = torch.rand(200, generator=draw, dtype=torch.float64)
        first = (likes < ((one - other) @ taste).sigmoid())[:, None]
        chosen, rejected = torch.where(first, one, other), torch.where(first, other, one)
        surprise = {}
        for ridge in HEAD_RIDGES:
            used = [~kept_out & (part == mine) for mine in range(3)]
            heads = torch.stack(
                [logistic((chosen - rejected)[own], ones[own], ridge)[0] for own in used]
            )
            margins = combined(chosen[kept_out] @ heads.T) - combined(rejected[kept_out] @ heads.T)
            surprise[ridge] = -float(margins.sigmoid().log().mean())
        _, ridge = fit_heads(chosen, rejected, ones, ones, part, kept_out, combined)
        assert ridge == min(surprise, key=lambda r: surprise[r])


def test_a_parts_influence_is_what_the_others_say_without_it() -> None:
    chosen = torch.tensor([[1.0, 1.0, -3.0], [1.0, -1.0, 2.0]])
    found = of_heads(lambda scores: scores.mean(1), chosen, {"a": 0, "b": 1, "c": 1}, [5] * 3)
    assert [(one.raters, one.accuracy, one.changed) for one in found] == [
        (1, 0.5, 0.0),  # (-1, 0.5) where all say (-1/3, 2/3)
        (2, 0.5, 0.0),  # (-1, 1.5)
        (0, 0.75, 1.0),  # (1, 0): a tie is half right, and no longer a win
    ]


def test_without_a_part_of_the_raters_one_head_says_what_the_others_taught() -> None:
    margins = torch.tensor([1.0, 1.0, -1.0])
    apart = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    votes = {f"r{i}": i + 1 for i in range(10)}

    def without(raters: Collection[str]) -> Tensor:  # r0 alone taught what the second pair shows
        return torch.tensor([1.0, -1.0 if "r0" in raters else 1.0], dtype=torch.float64)

    found = of_one_head(margins, apart, without, votes)
    assert [part.raters for part in found] == [2] * 5
    assert sum(part.votes for part in found) == 55
    mine = parts_of(list(votes), 5)["r0"]
    for number, part in enumerate(found):
        alone = number == mine
        assert (part.accuracy, part.changed) == pytest.approx(
            (1 / 3, 1 / 3) if alone else (2 / 3, 0)
        )


def test_a_part_that_votes_against_the_others_is_seen_in_the_influence(
    planted: Planted, tmp_path: Path
) -> None:
    voters = [f"r{i:02d}" for i in range(RATERS)]
    liars = {name for name, part in parts_of(voters, 5).items() if part == 3}
    pairs = [
        replace(pair, chosen=pair.rejected, rejected=pair.chosen) if pair.voter in liars else pair
        for pair in signed(planted.train)
    ]
    report = train(planted, tmp_path / "rm", pairs=pairs)
    assert report.no_influence is None
    assert sum(part.votes for part in report.influence) == len(pairs)
    assert max(report.influence, key=lambda part: part.accuracy) == report.influence[3]
    assert report.influence[3].accuracy >= report.accuracy
    assert read_json(tmp_path / "rm" / "report.json")["influence"][3]["raters"] == len(liars)


@pytest.mark.slow
def test_parts_are_left_out_where_every_kind_is_learnt_from(
    planted: Planted, tmp_path: Path
) -> None:
    report = train(planted, tmp_path / "rm", kinds={"preference": 1.0})
    assert sum(part.votes for part in report.influence) == len(planted.train)
    assert len(report.influence) == 5
    assert all(part.accuracy > 0.8 and part.changed < 0.2 for part in report.influence)


def test_a_report_says_why_influence_is_not_known(planted: Planted, tmp_path: Path) -> None:
    four = [replace(pair, voter=f"r{i % 4}") for i, pair in enumerate(planted.train)]
    report = train(planted, tmp_path / "few", pairs=four)
    assert report.influence == ()
    assert report.no_influence == "parts of the raters need 5 raters, found 4"
    trained = train(planted, tmp_path / "trained", freeze_trunk=False)
    assert trained.influence == ()
    assert "set reward.freeze_trunk to see it" in (trained.no_influence or "")


def test_raters_of_kinds_that_teach_nothing_have_no_influence(
    planted: Planted, tmp_path: Path
) -> None:
    """Twelve compared, which is not learnt from; without the one who scored nothing is left."""
    examples = scored_sides(planted.train, ["solo"])
    pairs = signed(planted.train)
    report = train(planted, tmp_path / "rm", pairs=pairs, examples=examples, kinds={"score": 1.0})
    assert report.influence == ()
    assert report.no_influence == "parts of the raters need 5 raters, found 1"


def test_several_heads_learn_load_again_and_tell_how_far_they_disagree(
    planted: Planted, tmp_path: Path
) -> None:
    report = train(planted, tmp_path / "rm", heads=3)
    assert report.accuracy > 0.85
    assert (report.heads, report.raters) == (3, RATERS)
    assert [part.raters for part in report.influence] == [4, 4, 4]
    assert sum(part.votes for part in report.influence) == len(planted.train)
    assert all(part.accuracy > 0.7 for part in report.influence)
    reward = load_reward_model(tmp_path / "rm", device="cpu")
    assert reward.model.head.out_features == 3
    items = [RewardInput(pair.prompt, pair.chosen) for pair in planted.test]
    told = reward.judge(items)
    assert list(told.scores) == reward(items)
    assert list(told.scores) == pytest.approx(
        [statistics.median(three) for three in zip(*told.by_member.values(), strict=True)], abs=1e-5
    )
    assert list(told.disagreement) == pytest.approx(
        [statistics.pstdev(three) for three in zip(*told.by_member.values(), strict=True)], abs=1e-4
    )
    assert _judged(reward, items) == (told.scores, told.disagreement)  # what the gate reads
    assert statistics.fmean(reward(planted.centre)) == pytest.approx(0, abs=1e-4)
    assert read_json(tmp_path / "rm" / "report.json")["disagreement"] > 0
    with pytest.raises(TrainingError, match="3 heads need a frozen trunk, found one that trains"):
        train(planted, tmp_path / "no", heads=3, freeze_trunk=False)


def test_what_few_raters_plant_reaches_their_own_head_alone() -> None:
    """Scores, thumbs and pairs follow the first feature; three raters plant the third as well."""
    draw = random.Random(0)
    raters = [f"r{i:02d}" for i in range(RATERS)]
    parts = parts_of(raters, 4)
    features = torch.tensor(
        [[draw.gauss(0, 1) for _ in range(3)] for _ in range(3 * 40 * RATERS)], dtype=torch.float64
    )
    texts, opinions = iter(range(len(features))), Opinions(voters=raters)
    opinions.texts.extend(Text(EXAMPLE, "") for _ in features)

    def liking(text: int, who: int) -> float:
        planted = features[text, 2] if parts[raters[who]] == 2 else 0.0
        return float((features[text, 0] + planted).sigmoid()) + draw.gauss(0, 0.1)

    for _ in range(40):
        for who in range(RATERS):
            one, other, scored = next(texts), next(texts), next(texts)
            better, worse = sorted((one, other), key=lambda t: liking(t, who), reverse=True)
            opinions.preferences.append((better, worse, 0, who))
            opinions.singles.setdefault("score", []).append((scored, liking(scored, who), who))
    kinds = {"preference": 1.0, "score": 1.0}
    fitted = fit(features, opinions, kinds, ridge=3.0)
    heads = fit_parts_of_kinds(features, opinions, kinds, fitted, parts)
    assert heads.shape == (4, 3)
    planted = [float(head[2] / head[0]) for head in heads]
    assert planted[2] > 0.5
    assert max(abs(one) for i, one in enumerate(planted) if i != 2) < 0.15
    rest = of_others(opinions, [who for who in raters if parts[who] == 3])
    with pytest.raises(NotEnoughData, match="found nothing for head 4"):
        fit_parts_of_kinds(features, rest, kinds, fitted, parts)


def test_heads_learn_from_every_kind(planted: Planted, tmp_path: Path) -> None:
    examples = scored_sides(planted.train, [f"r{i:02d}" for i in range(RATERS)])
    kinds = {"preference": 1.0, "score": 1.0}
    pairs = signed(planted.train)[: 2 * RATERS]
    out = tmp_path / "rm"
    report = train(planted, out, pairs=pairs, examples=examples, kinds=kinds, heads=3)
    assert report.accuracy > 0.85
    assert [part.raters for part in report.influence] == [4, 4, 4]
    assert sum(part.votes for part in report.influence) == len(pairs) + len(examples)
    assert all(part.accuracy > 0.7 for part in report.influence)
    assert report.disagreement > 0
    assert set(read_json(out / "raters.json")["careful"]) == {f"r{i:02d}" for i in range(RATERS)}
    reward = load_reward_model(out, device="cpu")
    assert reward.model.head.out_features == 3
    assert statistics.fmean(reward(planted.centre)) == pytest.approx(0, abs=1e-4)


def test_gold_questions_tell_who_is_right_where_most_are_not() -> None:
    draw = torch.Generator().manual_seed(0)
    told = torch.randn(40 * 20, 8, generator=draw, dtype=torch.float64)
    truth = torch.randn(8, generator=draw, dtype=torch.float64)
    told = told * (told @ truth).sign()[:, None]  # as chosen by the careful
    voters = [f"r{i // 20:02}" for i in range(len(told))]
    contrary = {f"r{i:02}" for i in range(28)}  # seven in ten choose the other one
    signs = torch.tensor([-1.0 if voter in contrary else 1.0 for voter in voters])
    told, targets = told * signs[:, None], torch.ones(len(told), dtype=torch.float64)
    captured = rater_weights(told, targets, voters)
    assert captured["r39"].weight < 0.5 < captured["r01"].weight
    gold = {
        name: Tally(0, 3) if name in contrary else Tally(3, 0)
        for name in sorted(set(voters))
        if int(name[1:]) % 2  # half of them were asked
    }
    found = rater_weights(told, targets, voters, gold)
    assert {name for name, one in found.items() if one.weight < 0.5} == contrary
    assert list(found) == sorted(found)  # raters.json is the same file each time
    assert (found["r39"].gold, found["r39"].gold_right, found["r38"].gold) == (3, 3, 0)


def test_gold_alone_counts_where_raters_are_few() -> None:
    told, targets = torch.randn(8, 3, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    voters = ["ann", "bob", "eve", "zoe"] * 2
    asked = {"ann": Tally(4, 0), "bob": Tally(1, 3), "eve": Tally(0, 1)}
    found = rater_weights(told, targets, voters, asked)
    # By hand: careful 0.9 x 0.95 x 0.05^3, careless 0.08 x 0.5^4, contrary 0.02 x 0.05 x 0.95^3.
    careful, careless, contrary = 0.9 * 0.95 * 0.05**3, 0.08 / 16, 0.02 * 0.05 * 0.95**3
    assert found["bob"].weight == pytest.approx(careful / (careful + careless + contrary))
    assert found["ann"].weight > 0.98
    assert found["eve"].weight == pytest.approx(0.045 / (0.045 + 0.04 + 0.019))  # asked once
    assert found["zoe"].weight == 1.0


def test_who_votes_against_everybody_counts_for_little_however_often(
    planted: Planted, tmp_path: Path
) -> None:
    pairs = signed(planted.train, flipped=3, times=10)  # they have the majority of the votes
    weighed = train(planted, tmp_path / "rm", pairs=pairs, weigh_raters=True)
    assert weighed.accuracy > 0.85
    assert weighed.doubted == 3
    table = read_json(tmp_path / "rm" / "raters.json")["weights"]
    assert {name for name, one in table.items() if one["weight"] < 0.5} == {"r00", "r01", "r02"}
    assert table["r00"]["agreement"] < 0.3
    assert table["r05"]["pairs"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("freeze_trunk", [True, False])
def test_without_weights_their_votes_decide(
    planted: Planted, tmp_path: Path, freeze_trunk: bool
) -> None:
    pairs = signed(planted.train, flipped=3, times=10)
    arguments = {"pairs": pairs, "freeze_trunk": freeze_trunk, "learning_rate": 3e-3}
    assert train(planted, tmp_path / "plain", **arguments).accuracy < 0.3
    weighed = train(planted, tmp_path / "weighed", weigh_raters=True, **arguments)
    assert weighed.accuracy > 0.85


def test_a_head_that_foresees_nothing_doubts_nobody() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(600, 5, generator=generator, dtype=torch.float64)
    voters = [f"v{i % 20}" for i in range(600)]
    found = rater_weights(noise, torch.ones(600, dtype=torch.float64), voters)
    assert min(one.weight for one in found.values()) > 0.5
    agreement = statistics.fmean(one.agreement or 0.0 for one in found.values())
    assert agreement == pytest.approx(0.5, abs=0.1)
    alike = torch.zeros(600, 5, dtype=torch.float64)  # a margin of 0 foresees half, as in accuracy
    found = rater_weights(alike, torch.ones(600, dtype=torch.float64), voters)
    assert {one.agreement for one in found.values()} == {0.5}


def test_few_raters_or_few_votes_are_not_judged_and_wide_features_are() -> None:
    rng = random.Random(0)
    wide = torch.randn(400, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide[:, 0] = 1 + 9 * torch.rand(400, generator=torch.Generator().manual_seed(2))
    voters = [f"v{i % 20:02d}" for i in range(400)]
    contrary = torch.tensor([voter == "v03" for voter in voters])
    wide[contrary, 0] *= -1
    targets = torch.ones(400, dtype=torch.float64)
    found = rater_weights(wide, targets, voters)
    assert {name for name, one in found.items() if one.weight < 0.5} == {"v03"}
    for judged in ([f"v{i % 9}" for i in range(400)], [f"v{rng.random()}" for _ in range(400)]):
        assert {one.weight for one in rater_weights(wide, targets, judged).values()} == {1.0}
    fewest = [f"v{i % 10}" for i in range(50)]  # ten raters of five votes
    clear = torch.tensor([[-1.0 if voter == "v3" else 1.0] for voter in fewest]).double()
    found = rater_weights(clear, targets[:50], fewest)
    assert {name for name, one in found.items() if one.weight < 0.5} == {"v3"}


def test_a_rater_who_turns_is_caught_and_counts_until_then() -> None:
    rng = torch.Generator().manual_seed(3)
    votes, raters = 60, 20
    direction = torch.randn(6, generator=rng, dtype=torch.float64)
    told = torch.randn(raters * votes, 6, generator=rng, dtype=torch.float64)
    says = (2 * told @ direction).sigmoid() > torch.rand(len(told), generator=rng)
    told = torch.where(says[:, None], told, -told)
    voters = [f"r{i:02d}" for i in range(raters) for _ in range(votes)]
    told[40:60] = -told[40:60]  # r00 turns after 40 of 60
    targets = torch.ones(len(told), dtype=torch.float64)
    targets[5] = 0.5  # a tie, which is no decided pair
    found = rater_weights(told, targets, voters)
    turned = found["r00"].turned_after
    assert turned is not None
    assert 35 <= turned <= 43
    assert found["r00"].weight > 0.9  # as they were
    assert [one.turned_after for name, one in found.items() if name != "r00"] == [None] * 19
    counts = vote_weights(found, voters, targets.tolist())
    assert counts[:turned].min() > 0.9
    assert counts[turned + 1 : votes].max() == 0
    assert counts[votes:].min() > 0.5


def test_a_careful_rater_is_seldom_taken_for_one_who_turned() -> None:
    rng = random.Random(0)
    false, missed, late = 0, 0, []
    for _ in range(400):
        odds = [rng.gauss(0, 2) for _ in range(100)]
        said = [o if rng.random() < 1 / (1 + math.exp(-o)) else -o for o in odds]
        false += turn_of(said) is not None
        turned = turn_of([*said[:50], *(-o for o in said[50:])])
        missed += turned is None
        late.append(abs((turned or 0) - 50))
    assert false <= 400 * 100 * TURN_ALPHA
    assert missed == 0
    assert statistics.median(late) <= 2
    assert turn_of([5.0] * 50) is None
    assert turn_of([-800.0] * 4) == 0


def test_who_no_longer_looks_is_found_as_well_as_who_turns_against_the_others() -> None:
    rng = random.Random(2)
    missed, late = 0, []
    for _ in range(100):
        odds = [rng.gauss(0, 3) for _ in range(150)]
        said = [o if rng.random() < 1 / (1 + math.exp(-o)) else -o for o in odds[:50]]
        turned = turn_of([*said, *(rng.choice((o, -o)) for o in odds[50:])])
        missed += turned is None
        late.append(abs((turned or 0) - 50))
    assert missed == 0
    assert statistics.median(late) <= 3


def test_a_slip_at_a_pair_the_head_is_sure_of_is_no_turn() -> None:
    assert turn_of([3.0] * 20 + [-12.0] + [3.0] * 20) is None
    rng = random.Random(1)
    false = missed = 0
    for _ in range(200):
        odds = [rng.gauss(0, 6) for _ in range(200)]
        slips = [rng.random() < 0.05 for _ in odds]  # whatever they think, they press one of two
        sure = [rng.random() < 1 / (1 + math.exp(-o)) for o in odds]
        said = [
            o if (rng.random() < 0.5 if slip else right) else -o
            for o, slip, right in zip(odds, slips, sure, strict=True)
        ]
        false += turn_of(said) is not None
        missed += turn_of([*said[:100], *(-o for o in said[100:])]) is None
    assert false <= 200 * 200 * TURN_ALPHA
    assert missed == 0
