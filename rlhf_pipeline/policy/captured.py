"""Decoding as a CUDA graph.

One token of a small model is hundreds of kernels that a GPU is done with sooner than Python has
asked for them. Here a GPU is shown them once, and from then on does a token's at one call. What it
was shown it does again to the letter, at the same addresses: so keys and values have their room
beforehand, and what differs from token to token is a tensor.

Only the model's own forward pass is captured; tokens are drawn, and rows leave, as anywhere else.
A graph lives no longer than the completions it helps to write, so weights that change later cannot
be missed. Its first token is computed both ways: where the two differ, or a GPU refuses, decoding
goes on without a graph and says so. RLHF_CUDA_GRAPHS=0 keeps all decoding without.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from rlhf_pipeline.policy.cache import fix, let_go
from rlhf_pipeline.policy.packed import can_pack

ROOM = 256  # tokens that one graph writes at most: attention reads the room, used or not
WORTH = 8  # tokens: for fewer a graph takes longer than it saves
AGREE = 0.02  # of the largest logit: kernels may be others, and of bfloat16 two digits are right

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From ids (B, T), what may be seen of these and the cache's (B, past + T) or (B, 1, T, all places)
and positions (B, T), to logits (B, V) after the last; the cache then holds these ids too."""

Step = Callable[[], Tensor]

log = logging.getLogger(__name__)


def can_capture(trunk: nn.Module, device: torch.device) -> bool:
    """Say whether a step of the trunk is the same kernels every time.

    Known for the families that can be packed. Hooks (FSDP's gather a layer) are Python, which a
    graph does not run.
    """
    return (
        device.type == "cuda"
        and os.environ.get("RLHF_CUDA_GRAPHS", "1") != "0"
        and can_pack(trunk)
        and not any(part._forward_hooks or part._forward_pre_hooks for part in trunk.modules())
    )


def cuda_graph(step: Step, pool: Any = None) -> Step:
    """Return a call that does what the step does, captured from one call that does nothing.

    Graphs of one pool take turns: what one leaves is there until another is called.
    """
    graph, usual = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            found = step()
    except RuntimeError:
        torch.cuda.set_stream(usual)  # which a capture that broke off does not do
        raise

    def replay() -> Tensor:
        graph.replay()
        return found

    return replay


def new_pool(device: torch.device) -> Any:
    """Return memory for several graphs."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def check_memory(device: torch.device, share: float) -> None:
    """Raise RuntimeError where a peak such as the last, beside what graphs keep, takes more.

    More than this share of the GPU's memory, that is, or of what this process may have of it.
    """
    if device.type != "cuda":
        return
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    most = share * torch.cuda.get_device_properties(device).total_memory
    most *= torch.cuda.get_per_process_memory_fraction(device)
    needed = torch.cuda.max_memory_allocated(device) + kept
    if needed > most:
        raise RuntimeError(f"they would bring memory to {needed / 1e9:.1f} GB, of {most / 1e9:.1f}")


class CapturedForward:
    """A forward pass over a cache whose steps of one token are captured.

    The logits that it returns are overwritten by the next.
    """

    def __init__(self, forward: Forward, cache: DynamicCache, *, most: int) -> None:
        """`most`: tokens that a row of the cache holds at the end."""
        self._forward, self._cache, self._most = forward, cache, most
        self._replay: Step | None = None
        self._length = self._columns = 0  # of the cache: filled, and room
        self._refused = False

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Compute as `Forward` says; the mask is one of rows, (B, past + T)."""
        if self._length == self._columns:
            self.release()
        if self._replay is None and not self._refused:
            left = self._most - mask.shape[1]
            if ids.shape[1] == 1 and left >= WORTH:
                self._begin(ids, mask, positions)
        if self._replay is None:
            return self._forward(ids, mask, positions)
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        self._length += 1
        return self._replay()

    def release(self) -> None:
        """Let the graph go, so that the cache can be changed by others."""
        if self._replay is not None:
            self._replay = None
            let_go(self._cache, self._length)

    def _begin(self, ids: Tensor, mask: Tensor, positions: Tensor) -> None:
        past = mask.shape[1] - 1
        self._length, self._place = past, torch.tensor([past], device=ids.device)
        self._columns = fix(self._cache, self._place, min(ROOM, self._most - past))
        self._ids, self._positions = ids.clone(), positions.clone()
        self._seen = torch.zeros(len(ids), 1, 1, self._columns, dtype=torch.bool, device=ids.device)
        self._seen[:, 0, 0, :past] = mask[:, :past].bool()
        try:
            wanted = self._step()  # also loads what a first run loads, which no capture may
            self._place.fill_(past)
            replay = cuda_graph(self._step)
            found = replay()
            self._place.fill_(past)
            apart, size = (found - wanted).abs().max().item(), wanted.abs().max().item()
            if not apart <= AGREE * size:
                raise RuntimeError(f"logits {apart:.3g} apart, of {size:.3g}")
            self._replay = replay
        except RuntimeError as error:
            self._refused = True
            let_go(self._cache, past)
            log.warning(
                "decoding goes on without a CUDA graph, slower: %s; RLHF_CUDA_GRAPHS=0 tries none",
                error,
            )

    def _step(self) -> Tensor:
        self._seen.index_fill_(3, self._place, True)
        logits = self._forward(self._ids, self._seen, self._positions)
        self._place.add_(1)
        return logits
