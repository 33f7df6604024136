"""Many operations on tensors in one call, for a thread that shares its interpreter.

Each operation that Python asks torch for lets go of the interpreter's lock and takes it again, for
which it waits while another thread has it. TorchScript does so once, for as many as a function has.

PyTorch has deprecated it for `torch.compile`, which needs a C++ compiler where people serve. With a
PyTorch that has it no more the same lines run in Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

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
            script, holding = torch.jit.script(function), torch._C.ScriptList
        except (AttributeError, RuntimeError):
            return function

    def called(*arguments: Any) -> Any:
        # Where it lets go of a tensor that only Python has besides, PyTorch takes the interpreter's
        # lock to say so: one wait for each. This list has them until the lock is here anyway.
        held = holding(list(_tensors(arguments)))
        found = script(*arguments)
        del held
        return found

    return called


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for one in arguments:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)
