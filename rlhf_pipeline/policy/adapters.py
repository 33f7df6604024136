"""Several sets of low-rank adapters on one base, through peft: LoRA, arXiv:2106.09685.

A set has a name, such as `critic`, and sits in every linear layer of a model's trunk, which the
experts of a mixture are not. Which set computes is decided by `only`, so one base in memory serves
policy, reference (no set), critic and reward models. The base's weights are frozen and may be
bfloat16; adapters are float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import folder_sha256, read_json, write_json
from rlhf_pipeline.policy.loading import ADAPTER, Policy, base_of_adapter, load_policy
from rlhf_pipeline.policy.low_rank import take_few_passes
from rlhf_pipeline.policy.sampling import trunk_of
from rlhf_pipeline.records import hashed

POLICY = "default"  # the set that PEFT's own wrapper trains, merges and saves
ALPHA_PER_RANK = 2.0  # adapters of SFT and reward models count alpha / rank = 2
WEIGHTS = "adapter_model.safetensors"  # beside PEFT's adapter_config.json
# What PEFT 0.21 takes for a mixture's router and experts (utils/transformers_weight_conversion.py).
EXPERTS = frozenset(("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
KEPT = "adapter"  # folder of a saved policy: its set before it was merged, for the next turn
WITH = "+"  # between an adapter's digest and its base's
BASE = "base.json"  # in that folder: the digest of the base it belongs to


@dataclass(frozen=True)
class SharedBase:
    """A policy with adapters whose base other models read with sets of their own."""

    policy: Policy  # the plain causal LM; adapters sit inside it
    wrapper: Any  # PEFT's, of the policy's own set: what merges and saves it; None without one
    digest: str  # of the base's weights
    keep_up: Callable[[], None] = lambda: None  # Team's, where processes share the base's weights


def load_base(
    policy_dir: str | Path,
    reference_dir: str | Path,
    *,
    rank: int,
    alpha: float,
    seed: int,
    device: str = "auto",
    dtype: str = "float32",
) -> SharedBase:
    """Return the policy with trainable adapters of this rank, on the reference where it can be.

    It can where policy_dir is the reference itself (fresh adapters), or was trained on it with
    adapters of this rank (they go on, with the alpha they have). Otherwise policy_dir is the base,
    with fresh adapters.
    """
    from peft import PeftModel

    if _goes_on(policy_dir, reference_dir, rank):
        kept = Path(policy_dir) / KEPT
        its = read_json(kept / ADAPTER)
        if its["lora_alpha"] != alpha:  # another would make another policy of them
            warnings.warn(
                f"adapters of alpha {its['lora_alpha']:g} go on with that, found lora_alpha "
                f"{alpha:g}, which is for fresh ones; set it to theirs to silence this, or "
                "take another rank to begin with fresh ones",
                stacklevel=2,
            )
        policy = load_policy(reference_dir, device=device, dtype=dtype)
        wrapper = PeftModel.from_pretrained(policy.model, str(kept), is_trainable=True)
        take_few_passes(policy.model)
        return SharedBase(policy, wrapper, read_json(kept / BASE)["digest"])
    policy = load_policy(policy_dir, device=device, dtype=dtype)
    wrapper = with_adapters(policy.model, rank=rank, alpha=alpha, seed=seed)
    return SharedBase(policy, wrapper, base_digest(policy_dir))


def with_adapters(model: Any, *, rank: int, alpha: float, seed: int) -> Any:
    """Return PEFT's wrapper of a causal LM with fresh adapters in float32, the rest frozen."""
    from peft import get_peft_model

    torch.manual_seed(seed)  # PEFT draws the adapters' first weights from torch's own generator
    config = lora_config(trunk_of(model), rank=rank, alpha=alpha, task_type="CAUSAL_LM")
    wrapper = get_peft_model(model, config)
    take_few_passes(model)
    return wrapper


def shares_base(policy_dir: str | Path, reference_dir: str | Path, rank: int) -> bool:
    """Return whether what `load_base` would load is the reference's base; nothing is loaded."""
    return _goes_on(policy_dir, reference_dir, rank) or (
        base_digest(policy_dir) == base_digest(reference_dir)
    )


def bare_base(folder: str | Path, *, device: str, dtype: str) -> SharedBase:
    """Return a base without a policy's adapters, for reward models to read with."""
    policy = load_policy(folder, device=device, dtype=dtype)
    policy.model.requires_grad_(False)
    return SharedBase(policy, None, base_digest(folder))


def keep_adapters(wrapper: Any, digest: str, folder: Path) -> None:
    """Write the policy's own set beside its merged weights, with the digest of its base."""
    wrapper.save_pretrained(
        folder / KEPT,
        state_dict=adapter_weights(wrapper, POLICY),  # PEFT leaves out the sets it put in, no more
        save_embedding_layers=False,
        selected_adapters=[POLICY],
    )
    write_json(folder / KEPT / ADAPTER, described(folder / KEPT))
    (folder / KEPT / "README.md").unlink(missing_ok=True)  # PEFT's card of placeholders
    write_json(folder / KEPT / BASE, {"digest": digest})


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a causal LM's weights with its policy's set merged in, float32 on the CPU.

    Float32 whatever the base's type: a sum in bfloat16 rounds away most of what a few updates have
    taught. Layer by layer, so that no second copy of the base stands beside it on its device.
    """
    from peft.tuners.lora import LoraLayer

    adapted: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    weights: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}  # weights that are tied stay one
    for name, weight in model.state_dict().items():
        layer, inside, kind = name.rpartition(".base_layer.")
        if ".lora_" in name:
            continue
        whole = copies.setdefault(weight.data_ptr(), weight.detach().cpu().float())
        if inside and kind == "weight" and POLICY in adapted[layer].lora_A:
            with torch.no_grad():
                whole = whole + adapted[layer].get_delta_weight(POLICY).cpu().float()
        weights[f"{layer}.{kind}" if inside else name] = whole
    return weights


def lora_config(trunk: nn.Module, *, rank: int, alpha: float, task_type: str | None = None) -> Any:
    """Return PEFT's description of a set of adapters in the trunk's linear layers."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=linear_names(trunk),
        fan_in_fan_out=keeps_weights_transposed(trunk),
        task_type=task_type,
    )


def linear_names(trunk: nn.Module) -> list[str]:
    """Return the last part of the names of the trunk's linear layers, adapted ones included.

    PEFT's own "all-linear" would find the matrices of the sets that are there already. In a mixture
    of experts the names in EXPERTS are left out, an expert that all tokens share among them: PEFT
    takes them for the stacked experts', which it would build anew as wholes at every pass.
    """
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    names: set[str] = set()
    for name, module in trunk.named_modules():
        inside = ".lora_" in name or name.endswith("base_layer")
        if isinstance(module, (nn.Linear, Conv1D, LoraLayer)) and not inside:
            names.add(name.rpartition(".")[2])
    if _stacks_experts(trunk):
        names -= EXPERTS
    if not names:
        raise ModelError(
            f"adapters need a trunk with linear layers, found none in {type(trunk).__name__}; "
            "train all weights (lora_rank 0) or take another base"
        )
    return sorted(names)


def add_adapters(trunk: nn.Module, name: str, *, rank: int, alpha: float, seed: int) -> None:
    """Put a set of trainable adapters into every linear layer of the trunk.

    Fresh ones change nothing: one of their two matrices is 0. Which set computes, and which other
    sets are trained, stays as it was; the base is frozen.
    """
    _inject(trunk, name, lora_config(trunk, rank=rank, alpha=alpha), seed)


def load_adapters(trunk: nn.Module, name: str, folder: Path) -> None:
    """Put the set that `save_adapters` wrote into the trunk, trainable, under this name."""
    from peft import PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    try:
        config = PeftConfig.from_pretrained(str(folder))
        weights = load_file(folder / WEIGHTS)
        config.inference_mode = False
        _inject(trunk, name, config, seed=0)
        with only(trunk, name):
            found = set_peft_model_state_dict(trunk, weights, adapter_name=name)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"adapters for this base are needed at {folder}; found: {error}; train them again"
        ) from error
    missing = [key for key in found.missing_keys if f".{name}." in key]
    if missing or found.unexpected_keys:
        raise ModelError(
            f"adapters of exactly this base's layers are needed at {folder}, found "
            f"{len(missing)} missing and {len(found.unexpected_keys)} unknown; load them on the "
            "base they were trained on"
        )


def save_adapters(trunk: nn.Module, name: str, folder: Path) -> None:
    """Write the set in PEFT's format: adapter_config.json and adapter_model.safetensors."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    model: Any = trunk
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    save_file({key: t.detach().cpu().contiguous() for key, t in state.items()}, folder / WEIGHTS)
    model.peft_config[name].save_pretrained(folder)
    write_json(folder / ADAPTER, described(folder))


def described(folder: Path) -> dict[str, Any]:
    """Return a saved set's description, the layers it sits in by name.

    PEFT keeps their names as a set and writes them as they come, in another order in each process.
    """
    found: dict[str, Any] = read_json(folder / ADAPTER)
    return {**found, "target_modules": sorted(found["target_modules"])}


def adapter_weights(trunk: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the parameters of one set, by the name they have in the trunk."""
    return {n: p for n, p in trunk.named_parameters() if f".{name}." in n and ".lora_" in n}


@contextmanager
def only(model: nn.Module, name: str | None) -> Iterator[None]:
    """Let this set alone compute inside the block; None is the bare base.

    PEFT's own switch would also change which sets are trained, and drop the gradients of the ones
    that computed before it.
    """
    layers = _adapted_layers(model)
    with _active(layers, [[] if name is None else [name]] * len(layers)):
        yield


def computing_as_now(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the sets compute that compute at this moment.

    For a backward pass that computes layers a second time, after `only` has ended.
    """
    layers = _adapted_layers(model)
    return _active(layers, [layer._active_adapter for layer in layers])


def base_digest(folder: str | Path) -> str:
    """Return what tells a base's weights from others': a digest, or the hub id itself.

    For an adapter's folder that is the adapter's own digest, a plus and its base's.
    """
    if not Path(folder).is_dir():
        return str(folder)
    files = folder_sha256(folder)
    weights = [f"{n}:{d}" for n, d in files.items() if n.endswith(".safetensors") and "/" not in n]
    own = hashed(*weights)[:32]
    base = base_of_adapter(Path(folder))
    return own if base is None else f"{own}{WITH}{base_digest(base)}"


def is_recorded_base(folder: str | Path, recorded: str) -> bool:
    """Return whether the base's weights are those of this digest.

    Earlier releases recorded of an adapter its own digest alone; then no more is compared.
    """
    found = base_digest(folder)
    return recorded in (found, found.partition(WITH)[0])


def unique_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes the tensors take in memory, storage that is shared counted once."""
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(stores.values())


def keeps_weights_transposed(model: nn.Module) -> bool:
    """Return whether the linear layers are GPT-2's, of weights (in, out); PEFT has to be told."""
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(module, Conv1D) for module in model.modules())


def _stacks_experts(trunk: nn.Module) -> bool:
    """Return whether there are mixtures, whose experts' weights are tensors of three dimensions."""
    apart = [module for module in trunk.modules() if not isinstance(module, nn.Conv1d)]
    return any(p.dim() == 3 for module in apart for p in module.parameters(recurse=False))


def _goes_on(policy_dir: str | Path, reference_dir: str | Path, rank: int) -> bool:
    """Return whether policy_dir keeps adapters of this rank that were trained on the reference."""
    kept = Path(policy_dir) / KEPT
    if not (kept / BASE).is_file() or read_json(kept / ADAPTER)["r"] != rank:
        return False
    return bool(read_json(kept / BASE)["digest"] == base_digest(reference_dir))


def _inject(trunk: nn.Module, name: str, config: Any, seed: int) -> None:
    from peft import inject_adapter_in_model

    known = _adapted_layers(trunk)
    active = [layer._active_adapter for layer in known]
    trained = {n for n, p in trunk.named_parameters() if p.requires_grad and ".lora_" in n}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # on purpose
        torch.manual_seed(seed)  # PEFT draws first weights from torch's own generator
        inject_adapter_in_model(config, trunk, name)
    take_few_passes(trunk)
    for layer in _adapted_layers(trunk):
        layer._active_adapter = []  # a set computes where `only` asks for it
    for layer, before in zip(known, active, strict=True):
        layer._active_adapter = before
    for n, p in trunk.named_parameters():
        fresh = ".lora_" in n and f".{name}." in n
        if fresh:
            p.data = p.data.float()
        p.requires_grad_(fresh or n in trained)


@contextmanager
def _active(layers: Sequence[Any], sets: Sequence[list[str] | str]) -> Iterator[None]:
    before = [layer._active_adapter for layer in layers]
    for layer, active in zip(layers, sets, strict=True):
        layer._active_adapter = active
    try:
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer._active_adapter = active


def _adapted_layers(model: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
