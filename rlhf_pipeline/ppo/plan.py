"""What a PPO run will hold and how long it will take, before it is launched.

Weights are counted on a model of the same configuration without memory; activations, logits and
gradients by running one microbatch, forwards and backwards, through it on fake tensors, which
have shapes and lifetimes but no numbers: whatever the architecture, what is counted is what
autograd keeps. Completions count as if all had full length, the most there can be.

On a CPU a small model's run holds more than its tensors: libraries load as they are first used,
and the C library keeps freed blocks for itself. No counting foresees that, so `rehearse` runs one
batch and one microbatch for real and puts what they held in the plan. A large model's blocks are
given back as they are freed (memory.py), so there counting suffices.

Not counted: the interpreter with its imports (some 0.5 GiB), the CUDA context, plots drawn at the
end, the reward models' adapters and a remote reward's memory.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.initialization import TORCH_INIT_FUNCTIONS
from transformers.integrations import moe
from transformers.pytorch_utils import Conv1D

from rlhf_pipeline.errors import ModelError, TrainingError
from rlhf_pipeline.policy.adapters import linear_names, unique_bytes
from rlhf_pipeline.policy.cache import ROOM, empty_cache
from rlhf_pipeline.policy.loading import (
    base_of_adapter,
    choose_device,
    context_length_of,
    local_folder,
    switch_off_dropout,
    text_config,
)
from rlhf_pipeline.policy.low_rank import adapted, in_autocasts_type
from rlhf_pipeline.policy.packed import fuse_steps, rectangle_hidden
from rlhf_pipeline.policy.sampling import (
    decode,
    draw,
    output_head,
    state_logprobs,
    state_width,
    trunk_of,
)
from rlhf_pipeline.ppo.learner import (
    allow_recomputing,
    autocast,
    check_context,
    new_scaler,
    recomputing,
)
from rlhf_pipeline.ppo.memory import (
    LARGE_MODEL,
    forget_peak,
    give_back_freed,
    resident_memory,
    suit_allocator,
)
from rlhf_pipeline.ppo.optimising import descend
from rlhf_pipeline.ppo.processes import base_shares
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.spreading import layers_of

GIB = 2**30
FULL = 4  # bytes of a number in float32, which all that is trained is kept in
SHARE_USED = 0.9  # of the memory found that a plan may fill; others live there too
PROBE_TOKENS = 1024  # in the probe's microbatch
REHEARSALS = 3  # passes after which freed blocks lie about as they do in a run
RESIDENT = ("policy", "critic", "reference", "reward models", "optimiser", "rollouts")
JOINED = "rollouts, joined"  # in one rectangle, beside those collected, with what is learned from
OTHERS = "other specialists"
RECIPE_NAMES = {  # where recipes set what PPO shares with other stages
    "lora_rank": "policy.lora.enabled true with rank",
    "precision": "policy.dtype",
}


@dataclass(frozen=True, slots=True)
class RewardModels:
    """The learned rewards that a run asks: the proxy and the stopping one."""

    count: int = 2
    config: Any = None  # of the base they begin with, causal or an encoder; None: the policy's
    shares: bool = True  # they read with the policy's base where PPO adapts that
    likelihood: bool = False  # they keep the output layer
    number_bytes: int = FULL  # of one of their weights
    tokens_at_once: int = 16_384  # in one pass of theirs, padded
    beside: tuple[RewardModels, ...] = ()  # those that the recipe's functions name by their folders

    @property
    def each(self) -> tuple[RewardModels, ...]:
        """The learned ones, then those beside them."""
        return (self, *self.beside)


REWARDS = RewardModels()
NO_MODELS = RewardModels(count=0)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run's sizes. Memory in bytes; `phases` are sums of `parts` that stand together."""

    settings: PpoSettings
    device: str
    parameters: int  # of the policy, adapters left out
    trained: int  # policy and critic
    parts: dict[str, int]
    phases: dict[str, int]
    tokens_per_update: int  # sampled and trained on at full length, prompts counted once
    tokens: int  # of the run

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max(self.phases.values())

    def fits(self, found: int) -> bool:
        """Return whether the run may fill so much of `found` bytes."""
        return self.peak <= SHARE_USED * found


@dataclass(frozen=True, slots=True)
class Seconds:
    """What a probe says one update takes, by phase, at full length."""

    sample: float
    measure: float  # reference, values and rewards
    train: float

    @property
    def update(self) -> float:
        """The whole update."""
        return self.sample + self.measure + self.train


def read_config(source: str | Path) -> Any:
    """Return a model's configuration, from its folder or, for a hub id, from what is kept here.

    An adapter's folder stands for its base. Raises ModelError where neither holds one.
    """
    source = local_folder(source)
    source = base_of_adapter(source) or source
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"a plan needs the configuration of {source}, found none on this machine; download "
            f"its config.json first (`hf download {source} config.json`), or name a local folder"
        ) from error


def make_plan(
    config: Any,
    settings: PpoSettings,
    rewards: RewardModels = REWARDS,
    *,
    shares_reference: bool = True,
) -> Plan:
    """Return the plan of a run that trains a model of this configuration.

    With LoRA the critic, the reference and reward models that share it are the policy's base with
    adapters; where a launcher asked for FSDP, this process's share of it. Not `shares_reference`,
    where the policy's base is another than the reference (adapters.shares_base): then that, and
    reward models on it, are held beside it. Nothing is loaded. Raises ConfigError for a precision
    that this machine cannot train in, and for more tokens than the model's context has.
    """
    check_context(context_length_of(config), settings)
    device = choose_device(settings.device)
    new_scaler(device, settings)
    adapts = settings.lora_rank > 0
    frozen = 2 if adapts and settings.precision == "bfloat16" else FULL
    longest = settings.max_prompt_tokens + settings.max_completion_tokens
    separate = settings.has_critic and settings.critic == "separate"
    with FakeTensorMode(allow_non_fake_inputs=True), _looking_at_no_numbers():
        model = _random_model(config, settings)
        own = sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n)
        trunk = sum(p.numel() for n, p in trunk_of(model).named_parameters() if "lora_" not in n)
        moved = sum(p.numel() for p in model.parameters() if p.requires_grad)
        bases = [m.base_layer for m in trunk_of(model).modules() if isinstance(m, _Adapted)]
        # Saved in float32 on the CPU; what is that already, and has no adapters, is not copied.
        merged = own if frozen < FULL else sum(m.weight.numel() for m in bases)
        here = own - _left_to_others(trunk_of(model)) if adapts else own
        training = _peak_of_training(model, settings)
        rows = _rows_at_once(settings, _trained_on(settings))
        with torch.no_grad(), _Held(model) as held:
            _forward(model, rows, settings)
        measuring = held.peak
        sampling, cached = _peak_of_sampling(model, settings)
        scored = [(one, *_peak_of_scoring(config, settings, one)) for one in rewards.each]
    alone = adapts and shares_reference
    held_apart = (
        one.count * one.number_bytes * judge
        for one, _, judge in scored
        if not (alone and one.shares and one.config is None)
    )
    scoring = max(peak for _, peak, _ in scored)
    head = state_width(model.config) + 1 if settings.has_critic else 0
    critic = (moved if adapts else trunk) * separate + head
    reach = settings.max_completion_tokens * _bytes_of_reach(model, settings)
    collected = (8 + 1) * longest + 2 * FULL * settings.max_completion_tokens + reach
    learned_from = collected + 6 * FULL * settings.max_completion_tokens
    rollouts = settings.rollouts_per_update * settings.max_turns
    parts = {
        "policy": frozen * here + (FULL * moved if adapts else 0),
        "critic": FULL * critic,
        "reference": 0 if alone else frozen * own,
        "reward models": sum(held_apart),
        "optimiser": 2 * FULL * (moved + critic),
        "rollouts": rollouts * collected * (1 + settings.replay_updates),
        JOINED: rollouts * learned_from * (1 + settings.replay_updates),
        "gradients": FULL * (moved + critic),
        "activations, logits": max(0, training - FULL * (moved + critic)),
        "keys and values": cached,
        "logits of sampling": sampling,
        "scoring": scoring,
        "merged weights": FULL * merged * (adapts and device.type == "cpu"),
    }
    resident = sum(parts[name] for name in RESIDENT)
    phases = {
        # What was in reach stands twice while the parts of a batch are put together.
        "sample": resident + sampling + cached + rollouts * reach,
        "measure": resident + max(parts[JOINED] + measuring, scoring),
        "train": resident + parts[JOINED] + training,
    }
    if parts["merged weights"]:
        phases["save"] = resident + parts["merged weights"]
    tokens = rollouts * longest
    return Plan(
        settings,
        device.type,
        own,
        moved + critic,
        parts,
        phases,
        tokens,
        tokens * settings.updates,
    )


def beside_others(plan: Plan, others: int, *, shares_critic: bool = True) -> Plan:
    """Return the plan of one specialist with what `others` hold while it is trained.

    Each has a policy, its moments and a reference, and a critic of its own where they share none.
    """
    each = 3 * plan.parts["policy"] + plan.parts["reference"]
    each += 0 if shares_critic else 3 * plan.parts["critic"]
    parts = plan.parts | {OTHERS: others * each}
    phases = {name: size + others * each for name, size in plan.phases.items()}
    return replace(plan, parts=parts, phases=phases)


def memory_found(device: str) -> int:
    """Return the bytes a run may take on this device: a GPU's free ones, or available RAM."""
    target = choose_device(device)
    if target.type == "cuda":
        return int(torch.cuda.mem_get_info(target)[0])
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.exists() and (most := limit.read_text().strip()).isdigit():
        found = min(found, int(most) - int(used.read_text()))
    return found


def what_fits(
    config: Any,
    settings: PpoSettings,
    room: int,
    rewards: RewardModels,
    *,
    shares_reference: bool,
    specialises: bool,
) -> dict[str, Any] | None:
    """Return the settings to change, mildest first, so that the peak is at most `room` bytes.

    Only such as specialists can have where it `specialises`. Empty where nothing need change; None
    where nothing here makes it fit.
    """
    changes: dict[str, Any] = {}
    for change in [{}, *_milder(settings, specialises=specialises)]:
        changes |= change
        tried = replace(settings, **changes)
        made = make_plan(config, tried, rewards, shares_reference=shares_reference)
        if made.peak <= room:
            return changes
    return None


def check_fits(
    config: Any,
    settings: PpoSettings,
    rewards: RewardModels = REWARDS,
    *,
    shares_reference: bool = True,
    made: Plan | None = None,
    room: int | None = None,
) -> Plan:
    """Return the plan; raises TrainingError, with the settings that would fit, if it does not.

    `made` is the plan where there is one already; `room`, bytes, is otherwise what is found free.
    """
    plan = made or make_plan(config, settings, rewards, shares_reference=shares_reference)
    found = memory_found(settings.device) if room is None else room
    if plan.fits(found):
        return plan
    most = int(SHARE_USED * found) - plan.parts.get(OTHERS, 0)
    changes = what_fits(
        config,
        settings,
        most,
        rewards,
        shares_reference=shares_reference,
        specialises=OTHERS in plan.parts,
    )
    advice = "no setting makes this model fit here: take a smaller base or a larger machine"
    if changes:
        advice = "these would fit: " + ", ".join(
            f"{RECIPE_NAMES.get(name, f'ppo.{name}')} {str(value).lower()}"
            for name, value in changes.items()
        )
    phase = max(plan.phases, key=lambda name: plan.phases[name])
    raise TrainingError(
        f"training needs about {plan.peak / GIB:.2f} GiB on the {plan.device} (most in the "
        f"{phase} phase), found {found / GIB:.2f} GiB of which {SHARE_USED:.0%} may be filled; "
        f"{advice}"
    )


def rehearse(config: Any, plan: Plan) -> Plan:
    """Return the plan with what this process held when it ran each phase once, for real.

    For small models on a Linux CPU: some seconds of work with random weights, at the run's own
    sizes. Any other plan comes back as it is.
    """
    settings = plan.settings
    readable = Path("/proc/self/clear_refs").exists()
    if plan.device != "cpu" or not readable or plan.parts["policy"] >= LARGE_MODEL:
        return plan
    before = _settled_memory()
    model = _random_model(config, settings)
    suit_allocator(list(model.parameters()))
    separate = settings.has_critic and settings.critic == "separate"
    critic = _random_model(config, settings) if separate else None
    networks = [net for net in (model, critic) if net is not None]
    weights = [p for net in networks for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, fused=True)
    everything = _trained_on(settings)
    of_minibatch = _rows_at_once(settings, -(-everything // settings.minibatches))

    def sample() -> None:
        _decode(model, settings, settings.max_completion_tokens)

    def measure() -> None:
        with torch.no_grad():
            for _ in range(REHEARSALS):
                _forward(model, _rows_at_once(settings, everything), settings)

    def train() -> None:
        for _ in range(REHEARSALS):
            for net in networks:
                descend(_forward(net, of_minibatch, settings, values=net is critic))
        optimizer.step()
        optimizer.zero_grad()

    train()  # libraries load, Adam's moments are made
    held: dict[str, int] = {}
    for name, run in (("sample", sample), ("measure", measure), ("train", train)):
        begun = _settled_memory()
        forget_peak()
        run()
        held[name] = resident_memory()[1] - begun
    moments = [t for state in optimizer.state.values() for t in state.values()]
    tensors = unique_bytes([p for net in networks for p in net.parameters()] + moments)
    parts = dict(plan.parts) | {"libraries": max(0, _settled_memory() - before - tensors)}
    resident = sum(parts[name] for name in (*RESIDENT, "libraries"))
    held["measure"] = max(parts[JOINED] + held["measure"], parts["scoring"])
    held["train"] += parts[JOINED]
    if "save" in plan.phases:
        held["save"] = plan.parts["merged weights"]
    return replace(plan, parts=parts, phases={n: resident + size for n, size in held.items()})


def _settled_memory() -> int:
    give_back_freed()
    return resident_memory()[0]


def probe(config: Any, settings: PpoSettings, rewards: RewardModels) -> Seconds:
    """Return what an update takes, from a micro-run with random weights: some seconds of work.

    Decoding is timed over some tokens, training over one microbatch, and both are scaled to a whole
    update at full length. Sums of two timings each, so it is an estimate within tens of percent, on
    a machine as busy as it will be. A CPU's work follows the tokens, so a few tell; a GPU is shown
    a whole microbatch, and as many tokens that what it does once, a graph, stands apart.
    """
    device = choose_device(settings.device)
    on_gpu = device.type == "cuda"
    with torch.device(device):
        model = _random_model(config, settings)
    P, T = settings.max_prompt_tokens, settings.max_completion_tokens
    rows = max(1, min(settings.rollouts_per_update, settings.completions_at_once, 64))

    def decode_some(tokens: int) -> None:
        _decode(model, settings, tokens, most=rows)

    short, long = (min(32, T), min(96, T)) if on_gpu else (min(4, T), min(12, T))
    decode_some(short)  # the first run of anything is slow
    few = _seconds(device, partial(decode_some, short))
    per_token = few / short
    if long > short:
        more = _seconds(device, partial(decode_some, long))
        per_token = max(more - few, 0.0) / (long - short)
    batches = settings.rollouts_per_update / rows
    sample = batches * (few + per_token * (T - short))

    of_microbatch = max(1, min(PROBE_TOKENS // (P + T), settings.rollouts_per_update))
    if on_gpu:
        of_microbatch = _rows_at_once(settings, -(-_trained_on(settings) // settings.minibatches))
    fresh = settings.rollouts_per_update * settings.max_turns / of_microbatch
    trained_on = _trained_on(settings) / of_microbatch

    def train_some(values: bool) -> None:
        descend(_forward(model, of_microbatch, settings, values=values))

    def measure_some(values: bool) -> None:
        with torch.no_grad():
            _forward(model, of_microbatch, settings, values=values)

    # The policy trains, and a critic with its own trunk; the reference reads what is fresh, the
    # policy what is replayed, the critic both.
    critic = settings.has_critic and settings.critic == "separate"
    train_some(False)
    trained = [_seconds(device, partial(train_some, v)) for v in (False, True)[: 1 + critic]]
    read = (False, True)[: 1 + settings.has_critic]
    measured = trained_on * sum(_seconds(device, partial(measure_some, v)) for v in read)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, fused=True)
    optimizer.step()
    step = _seconds(device, optimizer.step)
    for one in rewards.each:
        if not one.count:
            continue
        with torch.device(device):
            judge = _judge(config, one)
        score_some = partial(_score, judge, of_microbatch, settings, one)
        score_some()
        measured += one.count * fresh * _seconds(device, score_some)
    return Seconds(
        sample * settings.max_turns,
        measured,
        sum(trained) * trained_on * settings.epochs
        + (1 + critic) * step * settings.steps_per_update,
    )


class _Held(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the bytes of the tensors made inside the block: how many there were at the most."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.peak = self._now = 0
        self._known: dict[int, int] = {}  # storage -> bytes; 0 for the model's own
        for weight in model.parameters():
            self._known[weight.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage())
        return result

    def _meet(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._known.pop(key)


@contextmanager
def _looking_at_no_numbers() -> Iterator[None]:
    """Let models be planned that look at numbers, which fake tensors do not have.

    torch's own products of a mixture's experts take bfloat16 alone: one expert's for all tokens has
    the shapes of each expert's for its own. A truncated normal draw, by which vision towers begin,
    looks for what lies outside.
    """
    usual, drawn = moe._grouped_mm, TORCH_INIT_FUNCTIONS["trunc_normal_"]
    moe._grouped_mm = lambda tokens, weights, offs: tokens.to(weights.dtype) @ weights[0]
    TORCH_INIT_FUNCTIONS["trunc_normal_"] = lambda weights, **_: weights
    try:
        yield
    finally:
        moe._grouped_mm, TORCH_INIT_FUNCTIONS["trunc_normal_"] = usual, drawn


def _random_model(config: Any, settings: PpoSettings) -> Any:
    """Return an untrained policy of this configuration, with adapters where the settings want."""
    config = copy.deepcopy(config)
    halved = settings.lora_rank > 0 and settings.precision == "bfloat16"
    dtype = torch.bfloat16 if halved else torch.float32
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    fuse_steps(model)
    switch_off_dropout(model)
    if settings.lora_rank:
        model.requires_grad_(False)
        names = linear_names(trunk_of(model))
        for module in list(trunk_of(model).modules()):
            for name, child in list(module.named_children()):
                if name in names and isinstance(child, (nn.Linear, Conv1D)):
                    setattr(module, name, _Adapted(child, settings.lora_rank))
    if settings.gradient_checkpointing:
        allow_recomputing(trunk_of(model))
    return model


def _judge(config: Any, rewards: RewardModels) -> Any:
    """Return one of the reward models, untrained and without its head; `config` is the policy's."""
    config = copy.deepcopy(rewards.config or config)
    text_config(config).use_cache = False  # what is read once is not gone on with
    kind = AutoModelForCausalLM if rewards.likelihood else AutoModel
    dtype = torch.bfloat16 if rewards.number_bytes < FULL else torch.float32
    model: Any = kind.from_config(config, dtype=dtype)
    if isinstance(getattr(model, "pooler", None), nn.Module):
        model.pooler = None  # reward models leave BERT's own out
    return model.eval()


def _score(judge: Any, rows: int, settings: PpoSettings, rewards: RewardModels) -> None:
    """Read so many full-length rollouts, or as much of each as there are positions for."""
    longest = settings.max_prompt_tokens + settings.max_completion_tokens
    known = getattr(text_config(judge.config), "max_position_embeddings", None) or sys.maxsize
    longest = min(longest, known - 2)  # RoBERTa's begin at 2
    device = next(judge.parameters()).device
    trunk = trunk_of(judge) if rewards.likelihood else judge
    with torch.no_grad():
        trunk(input_ids=torch.zeros(rows, longest, dtype=torch.long, device=device))


def _peak_of_scoring(config: Any, settings: PpoSettings, rewards: RewardModels) -> tuple[int, int]:
    """Return the most bytes one pass of a reward model holds, and how many weights it has."""
    if rewards.count == 0:
        return 0, 0
    judge = _judge(config, rewards)
    longest = settings.max_prompt_tokens + settings.max_completion_tokens
    rows = max(1, min(settings.rollouts_per_update, rewards.tokens_at_once // longest))
    with _Held(judge) as held:
        _score(judge, rows, settings, rewards)
    return held.peak, sum(p.numel() for p in judge.parameters())


def _left_to_others(trunk: Any) -> int:
    """Return how many of a frozen base's weights other processes hold, all but a layer at work."""
    layers = layers_of(trunk)
    each = [sum(p.numel() for n, p in x.named_parameters() if "lora_" not in n) for x in layers]
    shares = base_shares()
    return 0 if shares == 1 else sum(each) - sum(each) // shares - max(each, default=0)


class _Adapted(nn.Module):
    """A linear layer with an adapter as PEFT's would be.

    PEFT's own moves weights between devices as it makes them, which fake tensors refuse.
    """

    def __init__(self, layer: nn.Linear | Conv1D, rank: int) -> None:
        super().__init__()
        weight: Any = layer.weight
        width_in, width_out = weight.shape if isinstance(layer, Conv1D) else weight.shape[::-1]
        self.base_layer = layer
        self.lora_A = nn.Linear(width_in, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, width_out, bias=False, dtype=torch.float32)

    def forward(self, states: Tensor) -> Tensor:
        return adapted(self.base_layer, in_autocasts_type(states), self.lora_A, self.lora_B, 2.0)


def _trained_on(settings: PpoSettings) -> int:
    """Return how many completions an update trains on: of every turn, and replayed ones."""
    return settings.rollouts_per_update * settings.max_turns * (1 + settings.replay_updates)


def _rows_at_once(settings: PpoSettings, most: int) -> int:
    """Return how many full-length rollouts a forward pass takes, of `most` there are."""
    longest = settings.max_prompt_tokens + settings.max_completion_tokens
    return max(1, min(most, settings.tokens_per_microbatch // longest))


def _forward(model: Any, rows: int, settings: PpoSettings, *, values: bool = False) -> Tensor:
    """Return the sum of a pass's log-probabilities, or of its hidden states where values."""
    P, T = settings.max_prompt_tokens, settings.max_completion_tokens
    device, kind = next(model.parameters()).device, choose_device(settings.device).type
    with autocast(device, settings), recomputing(trunk_of(model), settings):
        ids = torch.zeros(rows, P + T - 1, dtype=torch.long, device=device)
        packed = rectangle_hidden(trunk_of(model), ids, read_from=P - 1, as_on=kind)
        where = torch.arange(rows * (P + T - 1), device=device)
        hidden = packed.new_zeros(packed.shape).index_copy(0, where, packed)
        hidden = hidden.view(rows, P + T - 1, -1)[:, P - 1 :].flatten(0, 1)
        if values:
            return hidden.float().sum()
        tokens = torch.zeros(rows * T, dtype=torch.long, device=device)
        states = hidden.index_select(0, torch.arange(rows * T, device=device))
        within = None
        if reach := _bytes_of_reach(model, settings):
            within = torch.full((rows * T, reach), 255, dtype=torch.uint8, device=device)
        return state_logprobs(model, states, tokens, settings.temperature, within, as_on=kind).sum()


def _decode(model: Any, settings: PpoSettings, tokens: int, *, most: int | None = None) -> None:
    """Sample so many tokens after full prompts, for all that decode together or `most` of them."""
    device = next(model.parameters()).device
    rows = min(settings.rollouts_per_update, settings.completions_at_once, most or sys.maxsize)
    shape = (rows, settings.max_prompt_tokens)
    ids = torch.randint(0, _vocabulary(model), shape, device=device)
    with autocast(device, settings):
        decode(
            model,
            ids,
            torch.ones_like(ids, dtype=torch.bool),
            torch.rand(rows, tokens, device=device),
            temperature=settings.temperature,
            eos_id=-1,  # nothing ends
            pad_id=0,
            top_k=settings.top_k,
            top_p=settings.top_p,
            keeps_support=True,
        )


def _peak_of_training(model: Any, settings: PpoSettings) -> int:
    """Return the most bytes that gradients and one microbatch's passes hold together.

    The first microbatch of a step makes the gradients while its activations go; the later ones
    find them there.
    """
    members = -(-_trained_on(settings) // settings.minibatches)
    rows = _rows_at_once(settings, members)
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = FULL * sum(p.numel() for p in weights)
    separate = settings.has_critic and settings.critic == "separate"
    first, later = 0, 0
    for values in (False, True)[: 1 + separate]:
        for weight in weights:
            weight.grad = None
        with _Held(model) as held:
            descend(_forward(model, rows, settings, values=values))
        first = max(first, held.peak + values * gradients)
        with _Held(model) as held:
            descend(_forward(model, rows, settings, values=values))
        later = max(later, held.peak + (1 + separate) * gradients)
    return first if rows == members else max(first, later)


def _peak_of_sampling(model: Any, settings: PpoSettings) -> tuple[int, int]:
    """Return the bytes of running the prompts, or of a draw, beyond full keys and values.

    And those of the keys and values, of all completions that decode together.
    """
    B = min(settings.rollouts_per_update, settings.completions_at_once)
    P = settings.max_prompt_tokens
    V = _vocabulary(model)
    trunk = trunk_of(model)
    with torch.no_grad(), _Held(model) as prompts, autocast(torch.device("cpu"), settings):
        mask = torch.ones(B, 1, P, P, dtype=torch.bool)
        cache = empty_cache(model.config)
        trunk(
            input_ids=torch.zeros(B, P, dtype=torch.long),
            past_key_values=cache,
            use_cache=True,
        )
        cached = _cache_bytes(cache, settings)
        del mask, cache
    with torch.no_grad(), _Held(model) as drawing:
        draw(
            torch.zeros(B, V),
            torch.zeros(B),
            settings.temperature,
            settings.top_k,
            settings.top_p,
        )
    return max(prompts.peak - cached, drawing.peak, 0), cached


def _vocabulary(model: Any) -> int:
    return int(output_head(model).weight.shape[0])


def _bytes_of_reach(model: Any, settings: PpoSettings) -> int:
    """Return the bytes that tell what top_k and top_p left in reach of a draw; 0 where all is."""
    narrows = settings.top_k > 0 or settings.top_p < 1
    return narrows * -(-_vocabulary(model) // 8)  # a bit for each token there is


def _cache_bytes(cache: DynamicCache, settings: PpoSettings) -> int:
    """Return the bytes that the keys and values of a filled cache have at full length.

    Read off what is there: where weights are float32, autocast's halved keys are float32 again once
    they are rotated, and values stay halved.
    """
    P, T = settings.max_prompt_tokens, settings.max_completion_tokens
    room = P + ROOM
    while room < P + T - 1:
        room += ROOM + 1
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    held = [states for x in layers for states in (x.keys, x.values) if states is not None]
    each_token: int = sum(states.nbytes // states.shape[-2] for states in held)
    return room * each_token


def _milder(settings: PpoSettings, *, specialises: bool) -> Iterator[dict[str, Any]]:
    """Yield changes that lower the peak, those that change no result first.

    Specialists have a separate critic, and no adapters.
    """
    longest = settings.max_prompt_tokens + settings.max_completion_tokens
    # Beyond what there is to run, these change nothing.
    tokens = min(settings.tokens_per_microbatch, _trained_on(settings) * longest)
    at_once = min(settings.completions_at_once, settings.rollouts_per_update)
    while tokens > longest or at_once > 1:
        tokens, at_once = max(longest, tokens // 4), max(1, at_once // 4)
        yield {"tokens_per_microbatch": tokens, "completions_at_once": at_once}
    if not settings.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if settings.has_critic and settings.critic == "separate" and not specialises:
        yield {"critic": "shared"}
    if not settings.lora_rank and not specialises:
        yield {"lora_rank": 16}
    if settings.precision == "float32":
        yield {"precision": "bfloat16"}


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Return how long a call takes; a GPU's work included, the quickest of three there."""
    taken = []
    for _ in range(3 if device.type == "cuda" else 1):  # one call in a few waits for memory there
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken)
