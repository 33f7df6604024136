"""A key-value cache with room to grow.

transformers' own DynamicLayer copies the whole cache at every token (torch.cat), which is half the
time of decoding with a small model. Here new keys and values are written into spare room, and the
copy happens once every ROOM tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        self.rows = 0  # B; the buffers may have room for more

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new states and return all of them."""
        new = key_states.shape[-2]
        self.make_room(key_states.shape[0], new, key_states, value_states)
        self._look_at(self.get_seq_length() + new)
        self.keys[:, :, -new:], self.values[:, :, -new:] = key_states, value_states
        return self.keys, self.values

    def make_room(self, rows: int, new: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers with room for so many more tokens, of the widths and type of these.

        Whoever writes there sets `keys` and `values` to what is to be seen then.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.rows = rows
        before = self.get_seq_length()
        if self.buffers is None or self.buffers[0].shape[-2] < before + new:
            rows = self.rows if self.buffers is None else self.buffers[0].shape[0]
            self.buffers = (
                _larger(self.keys, before, keys, rows, before + new),
                _larger(self.values, before, values, rows, before + new),
            )
        return self.buffers

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch, and no room for others."""
        if self.buffers is not None:
            length = self.get_seq_length()
            self.buffers = (self.buffers[0][indices], self.buffers[1][indices])
            self.rows = self.buffers[0].shape[0]
            self._look_at(length)

    def move_rows(self, moves: Iterable[tuple[int, int]], rows: int) -> None:
        """Put rows in others' places, (to, from) each, and forget all but the first `rows`.

        What is forgotten leaves room for rows that `take_in` adds, where nothing need be copied.
        """
        assert self.buffers is not None
        length = self.get_seq_length()
        for to, source in moves:
            for buffer in self.buffers:
                buffer[to, :, :length] = buffer[source, :, :length]
        self.rows = rows
        self._look_at(length)

    def take_in(self, other: RoomyLayer, left: int, others_left: int) -> None:
        """Add another layer's rows below these, each side moved right by its columns of padding."""
        assert self.buffers is not None
        length, kept = left + self.keys.shape[-2], self.rows
        self.rows += other.rows
        roomy = self.buffers[0].shape[0] >= self.rows and self.buffers[0].shape[-2] >= length
        if left or not roomy:
            self.buffers = (
                _moved(self.keys, left, max(self.rows, self.buffers[0].shape[0]), length),
                _moved(self.values, left, max(self.rows, self.buffers[0].shape[0]), length),
            )
        for buffer, added in zip(self.buffers, (other.keys, other.values), strict=True):
            # Padding is not seen, but 0 times what is no number is no number.
            buffer[kept : self.rows, :, :others_left] = 0
            buffer[kept : self.rows, :, others_left:length] = added
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
        self.keys = self.buffers[0][: self.rows, :, :length]
        self.values = self.buffers[1][: self.rows, :, :length]


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


def _larger(current: Tensor, filled: int, states: Tensor, rows: int, needed: int) -> Tensor:
    _, heads, _, width = states.shape
    buffer = torch.empty(
        rows, heads, needed + ROOM, width, dtype=states.dtype, device=states.device
    )
    if filled:
        buffer[: current.shape[0], :, :filled] = current
    return buffer


def _moved(current: Tensor, left: int, rows: int, length: int) -> Tensor:
    """Return a buffer with the states moved right by `left` columns of zeros."""
    _, heads, _, width = current.shape
    buffer = current.new_zeros(rows, heads, length + ROOM, width)
    buffer[: current.shape[0], :, left:length] = current
    return buffer
