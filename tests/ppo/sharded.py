"""Two processes, each with half of every layer's weights (FSDP2 on CPUs), through our forward pass.

    python -m tests.ppo.sharded PORT

Prints what the trainer's own functions give with sharded weights beside whole ones, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from rlhf_pipeline.policy.sampling import completion_logprobs, trunk_of
from rlhf_pipeline.ppo.rollout import sample_completions
from tests.ppo.launched import SIZE, fork
from tests.ppo.world import tiny_policy


def shard_layers(model: Any) -> None:
    """Spread every layer of the trunk over the processes; embeddings, norm and head stay whole.

    The trunk is called by itself, without the model around it, so the model is no root of FSDP's,
    and the head's weights are read as they are.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (SIZE,))
    trunk: Any = trunk_of(model)
    for layer in trunk.layers:
        fully_shard(layer, mesh=mesh)


def compare(rank: int) -> dict[str, float]:
    """Return how far sharded log-probabilities, gradients and samples are from whole ones."""
    torch.set_num_threads(1)
    whole, sharded = tiny_policy(), tiny_policy()
    shard_layers(sharded.model)
    generator = torch.Generator().manual_seed(rank)  # each process has rows of its own
    prompts = torch.randint(5, 200, (3, 6), generator=generator)
    completions = torch.randint(5, 200, (3, 5), generator=generator)
    masks = torch.ones_like(prompts, dtype=torch.bool), torch.ones_like(completions).bool()
    logprobs = [
        completion_logprobs(p.model, prompts, masks[0], completions, masks[1], temperature=0.7)
        for p in (whole, sharded)
    ]
    found = {"logprobs": float((logprobs[0] - logprobs[1]).detach().abs().max())}
    for x in logprobs:
        x.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
    gaps = []
    ours = dict(sharded.model.named_parameters())
    for name, weight in whole.model.named_parameters():
        wanted, gradient = weight.grad, ours[name].grad
        assert wanted is not None
        assert gradient is not None
        dist.all_reduce(wanted)
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor() * SIZE  # FSDP gives the mean of the processes
        else:
            dist.all_reduce(gradient)
        gaps.append(float((gradient - wanted).abs().max() / wanted.abs().max()))
    found["gradients"] = max(gaps)
    texts = [
        sample_completions(
            policy,
            [[7, 8, 9], [10, 11]],  # the same in both processes: they take as many steps
            max_completion_tokens=6,
            temperature=0.7,
            top_k=0,
            top_p=1.0,
            at_once=8,
            generator=torch.Generator().manual_seed(0),
        ).texts
        for policy in (whole, sharded)
    ]
    found["same_samples"] = float(texts[0] == texts[1])
    held = sum(getattr(w, "to_local", lambda w=w: w)().numel() for w in ours.values())
    found["held"] = held / sum(w.numel() for w in whole.model.parameters())
    return found


def main() -> None:
    """Compare in every process; exit with 1 if one failed."""

    def work(rank: int) -> None:
        address = f"tcp://127.0.0.1:{sys.argv[1]}"
        dist.init_process_group("gloo", address, rank=rank, world_size=SIZE)
        found = compare(rank)
        if rank == 0:
            sys.stdout.write(json.dumps(found))
        dist.destroy_process_group()

    sys.exit(fork(work))


if __name__ == "__main__":
    main()
