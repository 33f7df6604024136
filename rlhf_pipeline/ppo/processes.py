"""Several processes that train one policy: each takes its share of the rows, all know the whole.

Completions, scores and log-probabilities are computed in shares and gathered, so whitening, the KL
coefficient and the order of minibatches are one arithmetic, done alike in every process. Of a
minibatch each process runs its share forward and backward; gradients are summed before the step,
and since losses are divided by the token count of the whole, the sum is that of one process. The
settings' numbers are those of all processes together: more of them change speed, not the result
beyond rounding.

Processes are joined through accelerate's PartialState, whoever launched them (`accelerate launch`,
torchrun, Slurm). Every process holds all weights, DDP's way, or, where FSDP is asked for, its share
of the frozen base that adapters are trained on (spreading.py). Nothing but tensors goes between
processes. What this does not protect: processes trust each other and the network between them.

FSDP without adapters, and DeepSpeed, are refused: what is trained would have to be gathered for the
optimizer's, the checkpoints' and the export's sake too, and Adam's moments with it. A base that is
too large for one GPU is trained with adapters here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_pipeline.errors import ConfigError, TrainingError
from rlhf_pipeline.policy.loading import choose_device
from rlhf_pipeline.ppo.rollout import join_rows
from rlhf_pipeline.ppo.settings import PpoSettings

CPU = torch.device("cpu")
SUMMED_AT_ONCE = 2**24  # elements of gradients that are sent together: 64 MiB in float32


@dataclass(frozen=True, slots=True)
class Team:
    """The processes of one run, seen from one of them; alone, everything below is the identity."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU  # where tensors are sent from
    # Called before anything goes between processes: with a base that is spread over them, the
    # others' passes through it come first.
    keep_up: Callable[[], None] = lambda: None

    @property
    def is_main(self) -> bool:
        """Whether this process writes what the run leaves: checkpoints, policy, plots, result."""
        return self.rank == 0

    def span(self, count: int) -> slice:
        """Return this process's share of `count` rows in order; shares differ by one at most."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def part(self, members: Tensor) -> Tensor:
        """Return every size-th of the members, so that long and short ones are spread."""
        return members[self.rank :: self.size]

    def gather(self, rows: Tensor, *, on_the_left: bool = False) -> Tensor:
        """Return the rows (B, width, …) of all processes in order, narrower ones filled with 0."""
        if self.size == 1:
            return rows
        shapes = self._each(torch.tensor(rows.shape[:2], device=self.device)).tolist()
        tallest, widest = (max(shape[i] for shape in shapes) for i in (0, 1))
        sent = torch.zeros(
            (tallest, widest, *rows.shape[2:]),
            dtype=torch.uint8 if rows.dtype == torch.bool else rows.dtype,
            device=self.device,
        )
        sent[: rows.shape[0], : rows.shape[1]] = rows.to(self.device)
        every = self._each(sent)
        parts = [every[i, :tall, :wide] for i, (tall, wide) in enumerate(shapes)]
        return join_rows(parts, on_the_left=on_the_left).to(rows)

    def gather_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers of all processes, in order."""
        if self.size == 1:
            return list(numbers)
        rows = torch.tensor(numbers, dtype=torch.float64).view(len(numbers), 1)
        gathered: list[float] = self.gather(rows)[:, 0].tolist()
        return gathered

    def gather_texts(self, texts: Sequence[str | None]) -> list[str | None]:
        """Return the texts of all processes, in order; what is None stays so."""
        if self.size == 1:
            return list(texts)
        said = [(text or "").encode(errors="surrogatepass") for text in texts]
        lengths = [-1 if text is None else len(one) for text, one in zip(texts, said, strict=True)]
        widest = max(map(len, said), default=0)
        filled = [list(one.ljust(widest, b"\0")) for one in said]
        rows = self.gather(torch.tensor(filled, dtype=torch.uint8).view(len(said), widest))
        return [
            None if length < 0 else bytes(row[: int(length)]).decode(errors="surrogatepass")
            for length, row in zip(self.gather_numbers(lengths), rows.tolist(), strict=True)
        ]

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of x over all processes."""
        if self.size > 1:
            self.keep_up()
            x = x.to(self.device, copy=True)
            dist.all_reduce(x)
        return x

    def add_facts(self, facts: Mapping[str, float]) -> dict[str, float]:
        """Return every fact's sum over all processes, which have the same names."""
        if self.size == 1:
            return dict(facts)
        names = sorted(facts)
        sums = self.add(torch.tensor([facts[name] for name in names], dtype=torch.float64))
        return dict(zip(names, sums.tolist(), strict=True))

    def add_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Put the sum over all processes in the place of every weight's gradient."""
        if self.size == 1:
            return
        self.keep_up()
        waiting: list[nn.Parameter] = []
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if waiting and sum(w.numel() for w in waiting) + weight.numel() > SUMMED_AT_ONCE:
                _add_together(waiting)
                waiting = []
            waiting.append(weight)
        if waiting:
            _add_together(waiting)

    def check_alike(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Raise TrainingError unless every process has the same tensors, by their sums."""
        if self.size == 1:
            return
        sums = torch.stack([x.detach().double().sum() for x in tensors]).to(self.device)
        every = self._each(sums)
        # Numbers that are none are alike too: what becomes of them is not said here.
        if not torch.isclose(every, every[:1], rtol=0, atol=0, equal_nan=True).all():
            raise TrainingError(
                f"{self.size} processes train one policy: needed the same {name} in each, found "
                "others; give all of them one kind of device, one version of torch, and rewards "
                "that answer alike, and go on from the last checkpoint"
            )

    def wait(self) -> None:
        """Return when every process is here."""
        if self.size > 1:
            self.keep_up()
            dist.barrier()

    def _each(self, x: Tensor) -> Tensor:
        """Return x of every process, stacked."""
        self.keep_up()
        every = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(every, x.contiguous())
        return torch.stack(every)


ALONE = Team()


def base_shares() -> int:
    """Return how many processes a frozen base is spread over; 1 where nobody asked for FSDP."""
    return _launched() if _asked_for("FSDP") else 1


def _launched() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _asked_for(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


def check_launch(settings: PpoSettings) -> None:
    """Raise ConfigError for what several processes, where so many were launched, cannot do.

    It needs no other process: stages before PPO, which run in one, ask too.
    """
    size = _launched()
    if size == 1:
        return
    if _asked_for("DEEPSPEED"):
        raise ConfigError(
            "PPO spreads weights by FSDP alone: needed plain data parallelism or FSDP, found "
            "DEEPSPEED; launch with --use_fsdp, or without either"
        )
    if _asked_for("FSDP") and not settings.lora_rank:
        raise ConfigError(
            "FSDP spreads a frozen base that adapters are trained on: needed policy.lora, found "
            "every weight trained (lora_rank 0); enable it, or take plain data parallelism"
        )
    if settings.device[-1].isdigit():
        raise ConfigError(
            f"each of {size} processes takes a device of its own: needed policy.device auto, cuda "
            f"or cpu, found {settings.device}; change it"
        )
    smallest = settings.rollouts_per_update // settings.minibatches
    if smallest < size:
        raise ConfigError(
            f"each of {size} processes takes a share of every minibatch: needed at least {size} "
            f"rollouts in one, found {smallest}; raise ppo.rollouts_per_update, or lower "
            "ppo.minibatches"
        )


def join_team(settings: PpoSettings) -> Team:
    """Return the processes this one was launched with, connected; ALONE where it is the only one.

    Raises ConfigError for what several processes cannot do.
    """
    size = _launched()
    if size == 1:
        return ALONE
    check_launch(settings)
    # With it transformers would load weights in one process alone and leave the others' empty.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    from accelerate import PartialState

    state = PartialState(cpu=choose_device(settings.device).type == "cpu")
    if state.num_processes != size:  # each would train alone, all into one folder
        raise ConfigError(
            f"{size} processes train one policy: needed accelerate to join as many, found "
            f"{state.num_processes}, as it was asked before training with another device; make no "
            "Accelerator or PartialState first, or one with cpu=True where policy.device is cpu"
        )
    return Team(int(state.process_index), int(state.num_processes), state.device)


def _add_together(weights: Sequence[nn.Parameter]) -> None:
    gradients = [w.grad for w in weights if w.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    sums = torch.split(flat, [g.numel() for g in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))
