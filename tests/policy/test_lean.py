"""The lean forward pass against transformers' own."""

from __future__ import annotations

import sys
import threading
import time
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rlhf_pipeline.policy import lean
from rlhf_pipeline.policy.adapters import add_adapters
from rlhf_pipeline.policy.cache import empty_cache, make_room, show
from rlhf_pipeline.policy.lean import (
    Drawing,
    LeanLlama,
    can_lean,
    drawn,
    plain_forward,
    plain_write,
)
from rlhf_pipeline.policy.sampling import draw
from rlhf_pipeline.policy.scripting import scripted


def llama(**changes: Any) -> LlamaForCausalLM:
    """Return a small Llama whose every weight is a number of its own, norms and biases too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, **{**sizes, **changes})
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape) / 4)
    return model


def drawing(uniforms: Tensor, *settings: tuple[float, float], eos_id: int = -1) -> Drawing:
    """Return how to draw, every so many rows with each of the settings."""
    n = len(settings)
    alike = [torch.arange(i, len(uniforms), n) for i in range(n)]
    return Drawing(uniforms, list(settings), alike, eos_id, torch.zeros(1, dtype=torch.uint8))


GREEDY, USUAL, NARROW = (0.0, 1.0), (1.0, 1.0), (0.7, 0.5)


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "head_dim": 16}],
)
@torch.inference_mode()
def test_lean_logits_are_those_of_transformers(changes: dict[str, Any], script: bool) -> None:
    """Prompts of other lengths, then tokens one by one: what real tokens see is the same."""
    model = llama(**changes)
    assert can_lean(model)
    ours, steps = LeanLlama(model), 70  # more than a cache has room for at first
    kept = [cell.cell_contents for cell in ours.written.__closure__ or ()]
    assert any(isinstance(one, torch.jit.ScriptFunction) for one in kept)
    run = scripted(lean._run) if script else lean._run
    starts = torch.tensor([0, 3, 6])
    ids = torch.randint(50, (3, 7 + steps))
    caches = [empty_cache(model.config) for _ in range(2)]
    for begin, end in [(0, 7), *((7 + t, 8 + t) for t in range(steps))]:
        theirs = plain_forward(model, ids[:, begin:end], starts, caches[0])
        buffers = make_room(caches[1], 3, end - begin, ours.kept)
        found, seen = run(ids[:, begin:end], starts, begin, buffers, ours.weights)
        show(caches[1], seen)
        torch.testing.assert_close(found, theirs, atol=1e-4, rtol=1e-4)
    mask = torch.arange(7 + steps) >= starts[:, None]
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        for theirs, found in ((one.keys, other.keys), (one.values, other.values)):
            assert found.isfinite().all()
            real = found.transpose(1, 2)[mask], theirs.transpose(1, 2)[mask]
            torch.testing.assert_close(*real, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("settings", [[GREEDY], [NARROW], [USUAL, NARROW, GREEDY]])
@torch.inference_mode()
def test_many_tokens_at_once_are_those_of_one_by_one(
    settings: list[tuple[float, float]], script: bool
) -> None:
    """In one go, in goes of a few, and as transformers computes it: the same tokens and cache."""
    model = llama()
    ours, steps = LeanLlama(model), 70
    if not script:
        ours.written = lean._written
    starts, prompt = torch.tensor([0, 3, 6, 1]), torch.randint(50, (4, 7))
    uniforms = torch.rand(4, steps)
    found = []
    for go in (steps, 9, 1, 0):
        cache, ids, tokens = empty_cache(model.config), prompt, [prompt[:, :0]]
        while sum(some.shape[1] for some in tokens) < steps:
            done = sum(some.shape[1] for some in tokens)
            how = drawing(uniforms[:, done : done + max(1, go)], *settings)
            one = ours.write(ids, starts, cache, how) if go else None
            some, sound = one or plain_write(model, ids, starts, cache, how)
            assert sound.all()
            assert some.shape == sound.shape == how.uniforms.shape
            assert cache.get_seq_length() == 7 + done + some.shape[1] - 1
            ids = some[:, -1:]
            tokens.append(some)
        found.append(torch.cat(tokens, 1))
    assert all(tokens.equal(found[0]) for tokens in found[1:])


@torch.inference_mode()
def test_no_more_is_written_once_a_row_has_ended_or_is_broken_or_it_is_enough() -> None:
    model = llama()
    ours, prompt = LeanLlama(model), torch.randint(50, (3, 5))
    starts, uniforms = torch.zeros(3, dtype=torch.long), torch.rand(3, 12)

    def write(how: Drawing) -> tuple[Tensor, Tensor]:
        return ours.write(prompt, starts, empty_cache(model.config), how)

    tokens, _ = write(drawing(uniforms, USUAL))
    assert tokens.shape == (3, 12)
    last = tokens[1, 6]  # a token may have come earlier too
    first = int((tokens == last).any(0).nonzero()[0])
    ended, sound = write(drawing(uniforms, USUAL, eos_id=int(last)))
    assert ended.equal(tokens[:, : first + 1])
    assert sound.all()
    now = drawing(uniforms, USUAL)
    now.enough[0] = 1
    assert write(now)[0].equal(tokens[:, :1])
    model.model.embed_tokens.weight.data[tokens[2, 0]] = float("nan")
    broken, sound = LeanLlama(model).write(
        prompt, starts, empty_cache(model.config), drawing(uniforms, USUAL)
    )
    assert not sound[:, -1].all()
    assert sound[:, :-1].all()
    assert broken.shape[1] <= 2  # what was drawn first is read for the second


@pytest.mark.parametrize("settings", [USUAL, NARROW, GREEDY])
@torch.inference_mode()
def test_tokens_are_drawn_as_everywhere_and_broken_rows_are_told(
    settings: tuple[float, float],
) -> None:
    logits, uniforms = torch.randn(40, 30), torch.rand(40)
    expected, _ = draw(logits, uniforms, settings[0], 0, settings[1])
    logits[3, 2], logits[5, 0] = float("nan"), float("inf")
    for function in (drawn, scripted(drawn)):
        tokens, sound = function(logits, uniforms, drawing(uniforms[:, None], settings))
        assert (~sound).nonzero().flatten().tolist() == [3, 5]
        assert tokens[sound].equal(expected[sound])


@pytest.mark.slow  # by the clock, so not beside everything else
@torch.inference_mode()
def test_a_token_waits_for_the_interpreters_lock_once() -> None:
    """Beside a thread that lets go of it only when asked, and then 50 ms later."""
    model = llama()
    ours, cache, over = LeanLlama(model), empty_cache(model.config), threading.Event()
    ids, starts, how = (
        torch.ones(3, 1).long(),
        torch.zeros(3).long(),
        drawing(torch.rand(3, 1), USUAL),
    )

    def write() -> float:
        began = time.perf_counter()
        ours.write(ids, starts, cache, how)
        return time.perf_counter() - began

    def keep_busy() -> None:
        while not over.is_set():
            pass

    for _ in range(5):  # the first ones compile
        write()
    busy, interval = threading.Thread(target=keep_busy), sys.getswitchinterval()
    sys.setswitchinterval(0.05)
    busy.start()
    try:
        assert median(write() for _ in range(8)) < 3 * 0.05
    finally:
        over.set()
        sys.setswitchinterval(interval)
        busy.join()


def test_a_pytorch_without_torchscript_runs_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.jit, "script")

    def unmet(states: Tensor) -> Tensor:
        return states

    assert scripted(unmet) is unmet


def test_other_models_keep_their_own_forward() -> None:
    """Other kinds, types, adapters, positions that change with the length: none is run lean."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    eager = llama()
    eager.config._attn_implementation = "eager"
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
    adapted = llama()
    add_adapters(adapted.model, "some", rank=2, alpha=4, seed=0)
    others = [gpt2, llama().bfloat16(), llama(rope_parameters=dynamic), eager, adapted]
    others.append(llama(hidden_act="gelu"))
    assert not any(can_lean(model) for model in others)
