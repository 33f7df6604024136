"""Many operations on tensors in one call, for a thread that shares its interpreter.

Each operation that Python asks torch for lets go of the interpreter's lock and takes it again, for
which it waits while another thread has it. TorchScript does so once, for as many as a function has.

PyTorch has deprecated it for `torch.compile`, which needs a C++ compiler where people serve. With a
PyTorch that has it no more the same lines run in Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def scripted(function: Function) -> Function:
    """Return the function as TorchScript, made once, or as it is where there is none."""
    found: Function = _scripted(function)
    return found


@cache
def _scripted(function: Callable[..., Any]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        try:
            return torch.jit.script(function)
        except (AttributeError, RuntimeError):
            return function
