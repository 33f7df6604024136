"""A key-value cache with room to grow.

transformers' own DynamicLayer copies the whole cache at every token (torch.cat), which is half the
time of decoding with a small model. Here new keys and values are written into spare room, and the
copy happens once every ROOM tokens.

A layer takes tokens as transformers hands them to it. What the service does between tokens is done
to all layers in one call (policy/scripting.py), whose lists of tensors are keys and values in turn,
layer after layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rlhf_pipeline.policy.scripting import scripted

ROOM = 64  # tokens of spare room taken at a time


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers ships no strict types
    """One layer's keys and values (B, heads, length, width), as views of larger buffers."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.buffers: tuple[Tensor, Tensor] | None = None  # may have room for more rows, too
        self.place: Tensor | None = None  # (1,) the next token's column, while `fix` holds

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new states and return all of them."""
        if self.place is not None and self.buffers is not None:
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer.index_copy_(2, self.place, states)
            return self.buffers
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, _, new, _ = key_states.shape
        past = self.get_seq_length()
        buffers = self.buffers
        if buffers is None or buffers[0].shape[-2] < past + new:
            held = [self.keys, self.values] if past else [key_states, value_states]
            most = rows if buffers is None else buffers[0].shape[0]
            keys, values = _grown(held, past, most, past + new + ROOM)
            buffers = self.buffers = keys, values
        self.keys, self.values = _looked_at(list(buffers), rows, past + new)
        self.keys[:, :, -new:], self.values[:, :, -new:] = key_states, value_states
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep only these rows of the batch, and no room for others."""
        if self.buffers is not None:
            keys, values = self.buffers[0][beam_idx], self.buffers[1][beam_idx]
            length = self.get_seq_length()
            self.buffers = keys, values
            self.keys, self.values = _looked_at([keys, values], keys.shape[0], length)


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


def make_room(cache: DynamicCache, rows: int, new: int, states: Tensor) -> list[Tensor]:
    """Return all layers' buffers with room for so many more tokens.

    Of a cache that is empty they are for so many rows, of these states' type, heads and width.
    Whoever writes there tells `show` what is to be seen then.
    """
    buffers, past = _buffers(cache), cache.get_seq_length()
    if not buffers or buffers[0].shape[-2] < past + new:
        held = _seen(cache) if past else [states] * (2 * len(cache.layers))
        most = buffers[0].shape[0] if buffers else rows
        buffers = scripted(_grown)(held, past, most, past + new + ROOM)
        _hold(cache, buffers)
    return buffers


def fix(cache: DynamicCache, place: Tensor, new: int) -> int:
    """Give every layer room for so many more tokens, at addresses that stay; return its columns.

    Until `let_go`, a token is written at the column that `place` (1,) holds, and all of the room is
    handed out: zeros where nothing was written.
    """
    past: int = cache.get_seq_length()
    columns = -(-(past + new) // 8) * 8  # attention's kernels copy a mask of another width
    for layer in cache.layers:
        keys, values = _grown([layer.keys, layer.values], past, layer.keys.shape[0], columns)
        keys[:, :, past:], values[:, :, past:] = 0, 0  # 0 times what is no number is no number
        layer.buffers, layer.place = (keys, values), place
        layer.keys, layer.values = _looked_at([keys, values], keys.shape[0], past)
    return columns


def let_go(cache: DynamicCache, length: int) -> None:
    """Let the layers grow again; so many of their columns were written."""
    for layer in cache.layers:
        layer.place = None
        layer.keys, layer.values = _looked_at(list(layer.buffers), layer.keys.shape[0], length)


def show(cache: DynamicCache, seen: Sequence[Tensor]) -> None:
    """Let these views of the buffers be all layers' keys and values."""
    for n, layer in enumerate(cache.layers):
        layer.keys, layer.values = seen[2 * n : 2 * n + 2]
        layer.is_initialized = True


def merge(cache: DynamicCache, other: DynamicCache) -> tuple[int, int]:
    """Add the other cache's rows below this one's, both ending together.

    Returns the columns of padding that each side (this, other) was moved to the right by: the
    shorter one's rows get so many more on their left.
    """
    mine, theirs = cache.get_seq_length(), other.get_seq_length()
    length = max(mine, theirs)
    left, others_left = length - mine, length - theirs
    buffers, seen = scripted(_taken_in)(
        _buffers(cache), _seen(cache), _seen(other), left, others_left, length + ROOM
    )
    _hold(cache, buffers)
    show(cache, seen)
    return left, others_left


def keep_rows(
    cache: DynamicCache, moves: Sequence[tuple[int, int]], rows: int, columns: int
) -> None:
    """Put rows in others' places, (to, from) each; forget all but the first `rows`.

    The first `columns`, padding in every row that stays, are forgotten too. A row that is forgotten
    leaves room for one that `merge` adds, where nothing need be copied.
    """
    buffers, seen = scripted(_kept)(
        _buffers(cache), list(moves), rows, columns, cache.get_seq_length()
    )
    _hold(cache, buffers)
    show(cache, seen)


def _buffers(cache: DynamicCache) -> list[Tensor]:
    return [buffer for layer in cache.layers for buffer in layer.buffers or ()]


def _seen(cache: DynamicCache) -> list[Tensor]:
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


def _hold(cache: DynamicCache, buffers: Sequence[Tensor]) -> None:
    for n, layer in enumerate(cache.layers):
        layer.buffers = buffers[2 * n], buffers[2 * n + 1]


# -- TorchScript reads these ----------------------------------------------------------------------


def _looked_at(buffers: list[Tensor], rows: int, length: int) -> list[Tensor]:
    return [buffer[:rows, :, :length] for buffer in buffers]


def _grown(held: list[Tensor], filled: int, rows: int, columns: int) -> list[Tensor]:
    """Return buffers with so many rows and columns, the first `filled` as they are held."""
    grown: list[Tensor] = []
    for states in held:
        buffer = states.new_empty([rows, states.shape[1], columns, states.shape[3]])
        if filled > 0:
            buffer[: states.shape[0], :, :filled] = states[:, :, :filled]
        grown.append(buffer)
    return grown


def _taken_in(
    buffers: list[Tensor],
    seen: list[Tensor],
    added: list[Tensor],
    left: int,
    others_left: int,
    columns: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return buffers, and what is to be seen of them, with the added rows below those seen.

    Each side is moved right by its columns of padding. Where the buffers have no room for that,
    there are others, with so many columns.
    """
    kept, length = seen[0].shape[0], left + seen[0].shape[2]
    rows = kept + added[0].shape[0]
    taken: list[Tensor] = []
    for n, buffer in enumerate(buffers):
        if left > 0 or buffer.shape[0] < rows:
            _, heads, _, width = buffer.shape
            buffer = buffer.new_zeros([max(rows, buffer.shape[0]), heads, columns, width])
            buffer[:kept, :, left:length] = seen[n]
        # Padding is not seen, but 0 times what is no number is no number.
        buffer[kept:rows, :, :others_left] = 0
        buffer[kept:rows, :, others_left:length] = added[n]
        taken.append(buffer)
    return taken, _looked_at(taken, rows, length)


def _kept(
    buffers: list[Tensor], moves: list[tuple[int, int]], rows: int, columns: int, length: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return buffers, and what is to be seen of them, as `keep_rows` says."""
    for buffer in buffers:
        for to, source in moves:
            buffer[to, :, :length] = buffer[source, :, :length]
    if columns > 0:
        buffers = [buffer[:, :, columns:] for buffer in buffers]
    return buffers, _looked_at(buffers, rows, length - columns)
