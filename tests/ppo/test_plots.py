"""The curves of a training run: whatever the method measured is drawn, and can be seen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from matplotlib.figure import Figure

from rlhf_pipeline.ppo.plots import CURVES, DPO_CURVES, _draw_over_optimisation, _draw_training
from tests.ppo.test_reports import RESULT

PPO = {name for name, _ in CURVES}
CRITICS = {name for name in PPO if name.startswith("critic/")}
DPO = {name for name, _ in DPO_CURVES}
LOOKS = {name for name in DPO if name.startswith("watch/")}


def drawn(history: list[dict[str, float]], chosen: int = 1) -> dict[str, Any]:
    """Return the pictures by their labels, in a figure of the size that is written."""
    result = replace(
        RESULT,
        history=tuple(history),
        reward_history=tuple(0.0 for _ in history),
        chosen_update=chosen,
    )
    figure = Figure(figsize=(10, 6), layout="constrained")
    _draw_training(figure, result)
    figure.draw_without_rendering()
    return {axis.get_ylabel(): axis for axis in figure.axes}


@pytest.mark.parametrize("measured", [PPO, PPO - CRITICS, DPO], ids=["gae", "rloo", "dpo"])
def test_every_method_has_a_curve_of_what_it_measures_and_no_empty_one(measured: set[str]) -> None:
    known = {**dict(CURVES), **dict(DPO_CURVES)}
    found = drawn([{name: float(n) for name in measured} for n in range(3)])
    assert found.keys() == {known[name] for name in measured}
    for axis in found.values():
        assert axis.lines[0].get_xydata().tolist() == [[1, 0], [2, 1], [3, 2]]


def test_looks_that_lie_apart_are_joined() -> None:
    known = dict(DPO_CURVES)
    often = dict.fromkeys(DPO - LOOKS, 0.5)
    found = drawn([often, often | dict.fromkeys(LOOKS, 1.0), often, often | {"watch/kl": 2.0}])
    assert found[known["watch/kl"]].lines[0].get_xydata().tolist() == [[2, 1.0], [4, 2.0]]


@pytest.mark.parametrize("chosen", [0, 1])
def test_one_update_is_a_point_among_whole_numbers(chosen: int) -> None:
    for axis in drawn([dict.fromkeys(PPO, 1.0)], chosen).values():
        curve, line = axis.lines
        assert curve.get_marker() == "."
        assert axis.figure.get_suptitle().startswith("1 update, ")
        assert list(line.get_xdata()) == [chosen, chosen]
        low, high = axis.get_xlim()
        assert [tick for tick in axis.get_xticks() if low <= tick <= high] == [*range(chosen, 2)]


@pytest.mark.parametrize("updates", [3, 200, 2000])
def test_the_numbers_of_many_updates_lie_apart(updates: int) -> None:
    for axis in list(drawn([dict.fromkeys(PPO, 1.0)] * updates).values())[-3:]:
        assert axis.figure.get_suptitle().startswith(f"{updates} updates, ")
        low, high = axis.get_xlim()
        shown = zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
        places = [label.get_window_extent() for tick, label in shown if low <= tick <= high]
        assert len(places) > 1
        assert all(here.x1 + 2 < after.x0 for here, after in pairwise(places))


@pytest.mark.parametrize(("looks", "numbered"), [(3, 3), (60, 15)])
def test_the_way_to_over_optimisation_can_be_followed(looks: int, numbered: int) -> None:
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    look = replace(RESULT.evaluations[0], stopping_mean=0.5)
    first = 9000
    evaluations = [replace(look, update=first + n) for n in range(looks)]
    _draw_over_optimisation(figure, evaluations, first + 1)
    told = [text.get_text() for text in figure.axes[0].texts]
    assert told == [str(first + n) for n in range(0, looks, looks // numbered)]
    assert "falls" in figure.axes[0].get_title()
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 3
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert box.y1 <= figure.axes[0].xaxis.label.get_window_extent().y0  # it covers no point
