"""Several rewards as one, against numbers worked by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import RewardFunction, RewardInput, user_prompt
from rlhf_pipeline.reward.ensemble import EnsembleReward
from rlhf_pipeline.reward.functions import as_reward

ITEMS = [RewardInput(user_prompt("hi"), text) for text in ("a", "b")]


def always(*scores: float) -> RewardFunction:
    def reward(items: Sequence[RewardInput], /) -> list[float]:
        return list(scores)

    return reward


MEMBERS = {"one": always(1.0, 0.0), "two": always(2.0, 0.0), "three": always(6.0, 3.0)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3.0, 1.0]),
        ({"combine": "median"}, [2.0, 0.0]),
        # Deviations: ((2² + 1² + 3²) / 3)^½ and ((1² + 1² + 2²) / 3)^½.
        ({"combine": "pessimistic"}, [3 - math.sqrt(14 / 3), 1 - math.sqrt(2)]),
        (
            {"combine": "pessimistic", "disagreement_weight": 0.5},
            [3 - 0.5 * math.sqrt(14 / 3), 1 - 0.5 * math.sqrt(2)],
        ),
        ({"combine": "pessimistic", "disagreement_weight": 0.0}, [3.0, 1.0]),
    ],
)
def test_scores_combine_as_worked_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    ensemble = EnsembleReward(MEMBERS, **options)
    assert ensemble(ITEMS) == pytest.approx(expected)
    judged = ensemble.judge(ITEMS)
    assert judged.disagreement == pytest.approx([math.sqrt(14 / 3), math.sqrt(2)])
    assert judged.by_member == {"one": (1.0, 0.0), "two": (2.0, 0.0), "three": (6.0, 3.0)}


def test_where_members_agree_nothing_is_taken_off() -> None:
    same = {"one": always(2.0, -1.0), "two": always(2.0, -1.0)}
    assert EnsembleReward(same, combine="pessimistic")(ITEMS) == [2.0, -1.0]
    assert EnsembleReward(same)([]) == []


@pytest.mark.parametrize("score", [math.nan, -math.inf, 1e39, -1e200])
def test_a_member_that_breaks_its_contract_is_named(score: float) -> None:
    said = f"the two reward must give finite scores of at most 3.4e+38 either way, found {score} "
    with pytest.raises(ModelError, match=re.escape(said)):
        EnsembleReward({"one": always(1.0, 1.0), "two": always(1.0, score)})(ITEMS)
    assert EnsembleReward({"one": always(1e38, 1.0), "two": always(1e38, 1.0)})(ITEMS)[0] == 1e38


def test_ensembles_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ModelError, match="at least two rewards, found 1"):
        EnsembleReward({"one": always(1.0)})
    with pytest.raises(ModelError, match="found 'vote'"):
        EnsembleReward(MEMBERS, combine="vote")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ModelError, match=r"found 'mean' and -1\.0"):
        EnsembleReward(MEMBERS, disagreement_weight=-1.0)


class Trained:
    """A reward model of one version."""

    def __init__(self, version: str) -> None:
        self.version = version

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        return [1.0 for _ in items]


def test_an_ensemble_is_another_version_when_a_member_is() -> None:
    first = as_reward({"one": Trained("1"), "two": Trained("2")})
    again = as_reward({"one": Trained("1"), "two": Trained("2")})
    later = as_reward({"one": Trained("1"), "two": Trained("3")})
    assert first(ITEMS) == [1.0, 1.0]
    versions = [getattr(reward, "version", None) for reward in (first, again, later)]
    assert versions[0] == versions[1] != versions[2]
