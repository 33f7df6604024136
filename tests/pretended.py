"""A pretended accelerator: the CPU's arithmetic on tensors that say they are elsewhere.

Most of what breaks a program on its first GPU is not arithmetic but place: a mask made on the CPU
meets weights that are not there, an array is asked for where no array can be. Here tensors hold
CPU tensors and say that they are on DEVICE; PyTorch's own rules are applied to every operation:
tensors of two places meet only where one is a scalar of the CPU, where one is copied to the other,
or where the CPU's are the indices. What this does not show is a kernel's rounding, memory, speed,
which operations autocast casts, and what only CUDA has.

PyTorch counts the devices there are at the first backward pass of a process: import this before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map


class _Module(backend_registration._DummyBackendModule):
    """What PyTorch asks a backend."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return what autocast may cast to."""
        return [torch.bfloat16, torch.float16]


NAME = "pretended"
backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
DEVICE = torch.device(NAME, 0)
COPIES = {"aten::copy_", "aten::_to_copy"}  # from one place to the other
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Elsewhere(Tensor):
    """A tensor that says it is on the pretended device; `held` is what it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        """Return the tensor's stand-in."""
        stand_in: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        stand_in.held = held
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as PyTorch calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute on what is held."""
        return computed(func, *args, **(kwargs or {}))

    def __getitem__(self, index: Any) -> Tensor:
        """Return what is at a place; of a list PyTorch makes a tensor without asking Python."""
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy: PyTorch's own reads the memory."""
        copy: Tensor = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def new_tensor(self, data: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return a new tensor of this type there."""
        return torch.tensor(data, **{"dtype": self.dtype, **kwargs}, device=DEVICE)

    def tolist(self) -> Any:
        """Return the numbers; a subclass has to do this itself."""
        return self.held.tolist()

    def data_ptr(self) -> int:
        """Return that of what is held: by it, and by the storage, tied weights are found."""
        return self.held.data_ptr()

    @property
    def data(self) -> Tensor:
        """Return the tensor without its gradient's history; set it for other numbers."""
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter  # type: ignore[override]  # no other tensors come here
    def data(self, new: Elsewhere) -> None:
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.held = new.held

    def storage(self) -> Any:
        """Return that of what is held."""
        return self.held.storage()  # type: ignore[no-untyped-call]

    def untyped_storage(self) -> Any:
        """Return that of what is held."""
        return self.held.untyped_storage()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Show what is held."""
        return f"Elsewhere({self.held!r})"


def computed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the operation on what is held, and let its results be where PyTorch would have them."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    elsewhere = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere)]
    name = func._schema.name
    if elsewhere and name not in COPIES and not _may_meet(name, args, here):
        places = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RuntimeError(f"all tensors must be on the same device, found {func} of {places}")
    device = kwargs.get("device")
    leaves = bool(elsewhere) if device is None else torch.device(device).type == DEVICE.type
    inner_args, inner_kwargs = tree_map(_held, (args, kwargs))
    found = func(*inner_args, **inner_kwargs)
    known = {id(tensor.held): tensor for tensor in elsewhere} | {id(t): t for t in here}

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in known:  # changed in place
            return known[id(leaf)]
        return Elsewhere(leaf) if leaves else leaf

    return tree_map(placed, found)


def _may_meet(name: str, args: tuple[Any, ...], here: list[Tensor]) -> bool:
    """Say whether these tensors of the CPU may meet the others."""
    if all(tensor.dim() == 0 for tensor in here):
        return True
    return name in INDEXED and isinstance(args[0], Elsewhere)


def _held(leaf: Any) -> Any:
    if isinstance(leaf, Elsewhere):
        return leaf.held
    if isinstance(leaf, torch.device) and leaf.type == DEVICE.type:
        return torch.device("cpu")
    return leaf


# What is made without a tensor, `torch.zeros(3, device=DEVICE)`, in whatever thread.
_MAKING = torch.library.Library("_", "IMPL", "PrivateUse1")  # type: ignore[no-untyped-call]  # for the whole process
_MAKING.fallback(computed)  # type: ignore[no-untyped-call]
_CASTING = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
_CASTING.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights are untied
_made = torch.tensor
_device_constructors()  # `with torch.device("meta")` knows it by what it is now


def tensor_of(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """Return `torch.tensor`, made on the CPU and taken to the device: it leaves Python out."""
    if device is None or torch.device(device).type != NAME:
        return _made(data, device=device, **kwargs)
    return _made(data, device="cpu", **kwargs).to(device)


torch.tensor = tensor_of  # type: ignore[assignment]
