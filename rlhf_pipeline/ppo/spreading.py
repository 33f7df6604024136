"""A frozen base whose layers are spread over the processes that train adapters on it (FSDP).

Each process holds its share of every layer; a layer is gathered as it is run and let go after.
Adapters, embeddings, norm and head stay whole in each, so gradients, optimizer, checkpoints and
everything else that training moves are what they are without. The layers are spread by torch's
`fully_shard`, which is what accelerate's FSDP 2 puts around a model.

To gather a layer all processes must run it at once, and here each samples until its own
completions end and cuts its own share into microbatches. So every pass through the trunk is
announced, and a process with nothing left to run makes the others' passes with them, on a token of
no consequence, until all are done (`LockStep.keep_up`, which Team asks before anything else that
goes between processes).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.policy.sampling import trunk_of

RESTING, READING, TRAINING = range(3)  # what a process is about to do with the trunk


class LockStep:
    """Passes through a spread trunk that all processes make together."""

    def __init__(self, trunk: nn.Module, device: torch.device) -> None:
        self._trunk, self._device, self._follows = trunk, device, False
        trunk.register_forward_pre_hook(self._announce)

    def keep_up(self) -> None:
        """Make the passes that other processes still have to make; return when none has any."""
        self._follows = True
        try:
            while (doing := self._most(RESTING)) != RESTING:
                token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
                with torch.set_grad_enabled(doing == TRAINING):
                    hidden: Any = self._trunk(input_ids=token, use_cache=False).last_hidden_state
                    if doing == TRAINING:  # its layers are gathered once more on the way back
                        (0.0 * hidden.sum()).backward()
        finally:
            self._follows = False

    def _announce(self, *_: Any) -> None:
        if not self._follows:
            self._most(TRAINING if torch.is_grad_enabled() else READING)

    def _most(self, doing: int) -> int:
        """Return the most that any process is about to do; all of them ask at once."""
        most = torch.tensor(doing, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)


def layers_of(trunk: nn.Module) -> list[nn.Module]:
    """Return the layers that are gathered as wholes; none where transformers does not name them."""
    kinds = set(getattr(trunk, "_no_split_modules", None) or ())
    return [module for module in trunk.modules() if type(module).__name__ in kinds]


def spread_layers(model: Any, device: torch.device) -> LockStep:
    """Spread the layers of a model on the CPU over the processes; the rest moves to the device.

    Adapters in the layers are left out, those that are there and those that will come.
    Raises ConfigError where transformers does not say what a layer of the model is.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    trunk = trunk_of(model)
    layers = layers_of(trunk)
    if not layers:
        raise ConfigError(
            f"FSDP needs a model that names its layers, found {type(trunk).__name__}; take plain "
            "data parallelism or another base"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    adapters = {p for name, p in model.named_parameters() if ".lora_" in name}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    model.to(device)
    return LockStep(trunk, device)
