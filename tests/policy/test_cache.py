"""Rows that leave a cache and come into one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from rlhf_pipeline.policy import scripting
from rlhf_pipeline.policy.cache import RoomyLayer, keep_rows, make_room, merge, show


@pytest.fixture(params=[True, False], autouse=True)
def _script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TorchScript, and without."""
    if not request.param:
        monkeypatch.setattr(scripting, "_scripted", lambda function: function)


def filled(states: Tensor) -> DynamicCache:
    """Return a cache whose keys are the states (B, heads, length, width), its values their half.

    Its second layer's are a narrower part of them.
    """
    cache = DynamicCache()
    cache.layers = [RoomyLayer(), RoomyLayer()]
    cache.layers[0].update(states, states / 2)
    cache.layers[1].update(states[..., 1:], states[..., 1:] / 2)
    return cache


def assert_holds(cache: DynamicCache, states: Tensor) -> None:
    for layer, expected in zip(cache.layers, (states, states[..., 1:]), strict=True):
        torch.testing.assert_close(layer.keys, expected)
        torch.testing.assert_close(layer.values, expected / 2)


def test_a_row_takes_the_place_of_one_that_left_and_nothing_of_it_stays() -> None:
    states = torch.randn(3, 2, 5, 4)
    states[0] = torch.nan  # what a broken row leaves behind
    cache, other = filled(states.clone()), filled(states[1:2, :, :3].clone())
    storages = [buffer.data_ptr() for layer in cache.layers for buffer in layer.buffers]
    keep_rows(cache, [(0, 2)], 2, 0)
    assert_holds(cache, torch.stack([states[2], states[1]]))
    assert merge(cache, other) == (0, 2)
    # Nothing was copied.
    assert [b.data_ptr() for layer in cache.layers for b in layer.buffers] == storages
    newcomer = torch.cat([torch.zeros(1, 2, 2, 4), states[1:2, :, :3]], dim=2)
    expected = torch.cat([states[2:], states[1:2], newcomer])
    assert_holds(cache, expected)
    more = torch.randn(3, 2, 70, 4)  # beyond the room there was
    cache.layers[0].update(more, more / 2)
    cache.layers[1].update(more[..., 1:], more[..., 1:] / 2)
    assert_holds(cache, torch.cat([expected, more], dim=2))


def test_a_longer_row_moves_the_others_to_the_right() -> None:
    states, longer = torch.randn(2, 2, 3, 4), torch.randn(1, 2, 5, 4)
    cache = filled(states)
    assert merge(cache, filled(longer)) == (2, 0)
    moved = torch.cat([torch.zeros(2, 2, 2, 4), states], dim=2)
    assert_holds(cache, torch.cat([moved, longer]))
    keep_rows(cache, [], 2, 2)
    assert_holds(cache, states)


def test_room_is_made_where_there_is_none_and_what_was_there_stays() -> None:
    states = torch.randn(2, 2, 3, 4)
    cache = filled(states[..., :3])
    cache.layers = cache.layers[:1]
    buffers = make_room(cache, 2, 9, states[..., :3])
    assert all(one is other for one, other in zip(buffers, cache.layers[0].buffers, strict=True))
    buffers = make_room(cache, 2, 200, states[..., :3])
    assert [tuple(buffer.shape[:2]) for buffer in buffers] == [(2, 2)] * 2
    assert buffers[0].shape[2] >= 203
    torch.testing.assert_close(buffers[0][:, :, :3], states[..., :3])
    show(cache, [buffer[:, :, :3] for buffer in buffers])
    torch.testing.assert_close(cache.layers[0].values, states[..., :3] / 2)
