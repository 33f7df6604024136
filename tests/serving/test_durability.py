"""A 2xx survives kill -9: nothing acknowledged is lost, nothing is stored twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.kills import Toll, play


def check(toll: Toll, *, votes: int) -> None:
    assert toll.lost == 0
    assert toll.doubled == 0
    assert toll.slowest_recovery < 2
    assert len(toll.acknowledged) >= votes
    assert toll.repeated > 0  # kills did meet requests under way


def test_no_acknowledged_vote_is_lost_to_five_kills(tmp_path: Path) -> None:
    check(play(tmp_path / "state", 5, seed=0, forked=True), votes=100)


@pytest.mark.slow
def test_no_acknowledged_vote_is_lost_to_a_hundred_kills(tmp_path: Path) -> None:
    check(play(tmp_path / "state", 100, seed=1, forked=True), votes=2000)
