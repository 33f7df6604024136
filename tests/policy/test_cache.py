"""Rows that leave a cache and come into one."""

from __future__ import annotations

import torch

from rlhf_pipeline.policy.cache import RoomyLayer


def filled(states: torch.Tensor) -> RoomyLayer:
    """Return a layer whose keys are the states (B, heads, length, width), its values their half."""
    layer = RoomyLayer()
    layer.update(states, states / 2)
    return layer


def test_a_row_takes_the_place_of_one_that_left_and_nothing_of_it_stays() -> None:
    states = torch.randn(3, 2, 5, 4)
    states[0] = torch.nan  # what a broken row leaves behind
    layer, other = filled(states.clone()), filled(states[1:2, :, :3].clone())
    assert layer.buffers is not None
    storage = layer.buffers[0].data_ptr()
    layer.move_rows([(0, 2)], 2)
    layer.take_in(other, 0, 2)
    assert layer.buffers[0].data_ptr() == storage  # nothing was copied
    newcomer = torch.cat([torch.zeros(1, 2, 2, 4), states[1:2, :, :3]], dim=2)
    expected = torch.cat([states[2:], states[1:2], newcomer])
    torch.testing.assert_close(layer.keys, expected)
    torch.testing.assert_close(layer.values, expected / 2)
    more = torch.randn(3, 2, 70, 4)  # beyond the room there was
    torch.testing.assert_close(layer.update(more, more)[0], torch.cat([expected, more], dim=2))


def test_a_longer_row_moves_the_others_to_the_right() -> None:
    states, longer = torch.randn(2, 2, 3, 4), torch.randn(1, 2, 5, 4)
    layer = filled(states)
    layer.take_in(filled(longer), 2, 0)
    moved = torch.cat([torch.zeros(2, 2, 2, 4), states], dim=2)
    torch.testing.assert_close(layer.keys, torch.cat([moved, longer]))
    layer.move_rows([], 2)
    layer.drop_left(2)
    torch.testing.assert_close(layer.keys, states)
