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


def _larger(current: Tensor, filled: int, states: Tensor, needed: int) -> Tensor:
    batch, heads, _, width = states.shape
    buffer = torch.empty(
        batch, heads, needed + ROOM, width, dtype=states.dtype, device=states.device
    )
    if filled:
        buffer[..., :filled, :] = current
    return buffer
