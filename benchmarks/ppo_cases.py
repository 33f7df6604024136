"""What the throughput benchmark runs: shapes, a model folder both engines load, one protocol.

Nothing of the pipeline is imported, so the peer's own virtual environment can run this file.
The end token's logit is made a constant through the final norm's bias, so that completions have
the length distribution a case asks for in either engine, whatever else the random weights say.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PAD, EOS = 0, 1
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Case:
    """One shape to measure; both engines get it word for word."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    rollouts: int
    prompt_tokens: int
    completion_tokens: int
    ends_per_token: float  # chance that a completion ends at each token; 0: all have full length
    epochs: int = 4
    minibatches: int = 4
    threads: int = 2
    weights: str = "float32"  # as they lie in the folder


def write_model(case: Case, folder: Path) -> None:
    """Write a random GPT-2 of the case's shape, untied, and a tokenizer of as many words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<end>": EOS} | {f"w{i}": i for i in range(2, case.vocabulary)}
    fast = Tokenizer(models.WordLevel(words, unk_token="w2"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where random numbers come fast
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=case.vocabulary,
        n_positions=case.prompt_tokens + case.completion_tokens,
        n_embd=case.width,
        n_layer=case.layers,
        n_head=case.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    with torch.device(device), torch.no_grad():
        model = GPT2LMHeadModel(config)
        bias = model.transformer.ln_f.bias
        bias.normal_(generator=torch.Generator(device).manual_seed(1))
        rows = model.lm_head.weight
        rows -= torch.outer(rows @ bias, bias) / bias.square().sum()  # the others ignore the bias
        others = (rows[2:] @ torch.randn(case.width, 256)).div(TEMPERATURE).exp().sum(0).mean()
        rate = case.ends_per_token
        odds = math.log(rate / (1 - rate)) + math.log(float(others)) if rate else -100.0
        rows[EOS] = bias * (odds * TEMPERATURE / bias.square().sum())
        rows[PAD] = bias * (-100.0 / bias.square().sum())
    model.to(getattr(torch, case.weights)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompts_of(case: Case, updates: int) -> list[list[int]]:
    """Return the token ids of enough prompts for the updates, all of the case's length."""
    import torch

    generator = torch.Generator().manual_seed(2)
    shape = (case.rollouts * updates, case.prompt_tokens)
    ids: list[list[int]] = torch.randint(2, case.vocabulary, shape, generator=generator).tolist()
    return ids


class Worker:
    """The worker's side of the protocol: wait for a line, run an update, answer with its facts.

    The line may name environment variables, NAME=VALUE, to set first. Whatever else is printed goes
    to standard error.
    """

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def wait(self) -> bool:
        """Return True to run an update, False where the benchmark is over."""
        order, *switches = sys.stdin.readline().split() or ["end"]
        os.environ |= dict(switch.split("=", 1) for switch in switches)
        return order == "go"

    def answer(self, **facts: Any) -> None:
        """Send one update's facts."""
        self.answers.write(json.dumps(facts) + "\n")
        self.answers.flush()


def memory_bytes() -> tuple[int, int]:
    """Return this process's resident memory now, and its peak since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {name: line.split()[1] for line in lines for name in [line.split(":")[0]] if "kB" in line}
    return int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024


def forget_peak() -> None:
    """Let the peak of resident memory count from here."""
    Path("/proc/self/clear_refs").write_text("5")


def touch(model: Any) -> None:
    """Read every weight of a model, so that all of it is resident memory."""
    for weight in model.parameters():
        weight.sum()


def case_from(argument: str) -> Case:
    """Return the case another process wrote with `as_argument`."""
    return Case(**json.loads(argument))


def as_argument(case: Case) -> str:
    """Return the case for a command line."""
    return json.dumps(asdict(case))


def patched(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace owner.name by a function that calls around(original, *its arguments)."""
    original = getattr(owner, name)

    def wrapper(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    setattr(owner, name, wrapper)
