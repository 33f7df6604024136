"""How sure satisfaction is by how many people, where nearly all are content."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from rlhf_pipeline.overview import FEWEST, margin_of


def of_so_many(people: int, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what so many may say, each content or not: chances, means and their margins."""
    content = range(people + 1)
    chances = [comb(people, n) * share**n * (1 - share) ** (people - n) for n in content]
    margins = [margin_of([1.0] * n + [0.0] * (people - n)) for n in content]
    return np.array(chances), np.arange(people + 1) / people, np.array(margins)


def test_where_all_say_the_same_it_is_not_sure_that_everybody_does() -> None:
    assert margin_of([1.0] * FEWEST) == pytest.approx(1.96 * (2 / 24 * 22 / 23 / 20) ** 0.5)
    assert margin_of([0.0] * FEWEST) == margin_of([1.0] * FEWEST)
    assert margin_of([1.0] * 400) < 0.01


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 0.95, 0.98])
def test_the_mean_is_within_its_margin_as_often_as_said_and_equals_are_seldom_told_apart(
    share: float,
) -> None:
    known = [of_so_many(people, share) for people in (FEWEST, 100, 300)]
    for chances, means, margins in known:
        assert chances[np.abs(means - share) <= margins].sum() > 0.91
    for chances, means, margins in known:
        for others, liked, apart in known:
            less = (means + margins)[:, None] < (liked - apart)[None]
            assert (chances[:, None] * others[None])[less].sum() < 0.02
