"""A key-value cache with room to grow.

transformers' own DynamicLayer copies the whole cache at every token (torch.cat), which is half the
time of decoding with a small model. Here new keys and values are written into spare room, and the
copy happens once every ROOM tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 64  # tokens of spare room taken at a time


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers ships no strict types
    """One layer's keys and values (B, heads, length, width), as views of larger buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new states and return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        if self.buffers is None or self.buffers[0].shape[-2] < after:
            self.buffers = (
                _larger(self.keys, before, key_states, after),
                _larger(self.values, before, value_states, after),
            )
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., before:after, :] = states
        self._look_at(after)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch."""
        if self.buffers is not None:
            length = self.get_seq_length()
            self.buffers = (self.buffers[0][indices], self.buffers[1][indices])
            self._look_at(length)

    def take_in(self, other: RoomyLayer, left: int, others_left: int) -> None:
        """Add another layer's rows below these, each side moved right by its columns of padding."""
        mine, theirs = (self.keys, self.values), (other.keys, other.values)
        length = left + self.keys.shape[-2]
        rows = self.keys.shape[0]
        merged = []
        for own, added in zip(mine, theirs, strict=True):
            _, heads, _, width = own.shape
            buffer = own.new_zeros(rows + added.shape[0], heads, length + ROOM, width)
            buffer[:rows, :, left:length] = own
            buffer[rows:, :, others_left:length] = added
            merged.append(buffer)
        self.buffers = (merged[0], merged[1])
        self._look_at(length)

    def drop_left(self, columns: int) -> None:
        """Forget the first columns, which are padding in every row."""
        if self.buffers is not None:
            length = self.get_seq_length() - columns
            keys, values = self.buffers
            self.buffers = (keys[..., columns:, :], values[..., columns:, :])
            self._look_at(length)

    def _look_at(self, length: int) -> None:
        assert self.buffers is not None
        self.keys = self.buffers[0][..., :length, :]
        self.values = self.buffers[1][..., :length, :]


def empty_cache(config: Any) -> DynamicCache:
    """Return an empty cache for a model; layers of other kinds (sliding windows) stay its own."""
    cache = DynamicCache(config=config)
    cache.layers = [
        RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def can_merge(cache: DynamicCache) -> bool:
    """Say whether rows of another cache can join this one: every layer keeps the whole past."""
    return all(type(layer) is RoomyLayer for layer in cache.layers)


def merge(cache: DynamicCache, other: DynamicCache) -> tuple[int, int]:
    """Add the other cache's rows below this one's, both ending together.

    Returns the columns of padding that each side (this, other) was moved to the right by: the
    shorter one's rows get so many more on their left.
    """
    mine, theirs = cache.get_seq_length(), other.get_seq_length()
    length = max(mine, theirs)
    left, others_left = length - mine, length - theirs
    for layer, added in zip(cache.layers, other.layers, strict=True):
        layer.take_in(added, left, others_left)
    return left, others_left


def _larger(current: Tensor, filled: int, states: Tensor, needed: int) -> Tensor:
    batch, heads, _, width = states.shape
    buffer = torch.empty(
        batch, heads, needed + ROOM, width, dtype=states.dtype, device=states.device
    )
    if filled:
        buffer[..., :filled, :] = current
    return buffer
