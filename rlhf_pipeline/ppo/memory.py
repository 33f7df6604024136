"""How much memory this process holds, and how its allocator is kept from holding more."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

LARGE_MODEL = 2**28  # bytes of weights from which memory matters more than page faults
LARGE_BLOCK = 2**20  # bytes
KEPT_BLOCK = 2**25  # bytes; glibc takes no more
KEPT_FREE = 2**28  # bytes at the end of the heap
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def suit_allocator(weights: Sequence[Tensor]) -> bool:
    """Tell the C library what to do with a model's freed blocks; return whether it listened.

    glibc by itself raises the size from which blocks are mapped on their own up to 32 MiB as it
    goes. Of a large model's blocks, every one is given back when freed: otherwise a layer's
    activations and gradients share one heap, whose holes stay this process's (measured on 124M
    weights: 390 MiB at the end of a backward pass). A small model's are kept for the next minibatch
    to write to: fresh pages took 2 % of an update's time (1M weights a layer), or nothing, as the
    heap happened to lie. Of other C libraries nothing is asked.
    """
    held = sum(weight.numel() * weight.element_size() for weight in weights)
    options = {_M_MMAP_THRESHOLD: LARGE_BLOCK}
    if held < LARGE_MODEL:
        options = {_M_MMAP_THRESHOLD: KEPT_BLOCK, _M_TRIM_THRESHOLD: KEPT_FREE}
    if sys.platform != "linux":
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and all(set_option(*option) for option in options.items())


def give_back_freed() -> None:
    """Have the C library give the operating system what was freed and not taken again.

    Between phases, which need blocks of other sizes: otherwise one's leavings stand beside the
    next one's peak (measured with 4 layers of width 768: 1,450 MiB after training, 450 in use).
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def resident_memory() -> tuple[int, int]:
    """Return the bytes this process holds in memory, and the most since `forget_peak` (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    return int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024


def forget_peak() -> None:
    """Let the peak of resident memory count from here (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return the most memory this process has held, and torch on its GPU, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    facts = {"memory/process_peak": peak / 2**20}
    if device.type == "cuda":
        facts["memory/gpu_peak"] = torch.cuda.max_memory_allocated(device) / 2**20
    return facts
