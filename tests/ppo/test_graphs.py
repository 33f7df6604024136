"""What a microbatch's graph adds to the weights is what Python would have asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.policy import captured
from rlhf_pipeline.policy.captured import Step
from rlhf_pipeline.policy.packed import Room
from rlhf_pipeline.ppo import learner, specialists
from rlhf_pipeline.ppo.graphs import shape_of
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.optimising import accumulate_gradients, train_on
from rlhf_pipeline.ppo.rollout import Rollouts, Tokens
from rlhf_pipeline.ppo.specialists import Specialist, train_specialists
from tests.policy.recorded import recorded
from tests.ppo.world import PROMPTS, changed, learner_at, lower_share, rollouts_of, save_base

CASES: dict[str, dict[str, Any]] = {
    "shared critic": {},
    "separate critic": {"critic": "separate"},
    "without a critic": {"estimator": "rloo", "completions_per_prompt": 2},
    "adapters": {"lora_rank": 2},
    "adapters of two": {"critic": "separate", "lora_rank": 2},
    "a narrow choice": {"top_k": 40, "top_p": 0.9},
    "bfloat16": {"precision": "bfloat16", "ratio_tolerance": 0.1},
}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Let training capture, and return the list of what it captures."""
    return capturing(monkeypatch)


def capturing(patch: pytest.MonkeyPatch, capture: Callable[..., Step] = recorded) -> list[Step]:
    found: list[Step] = []

    def kept(step: Step, pool: Any = None) -> Step:
        found.append(capture(step))
        return found[-1]

    patch.setattr(learner, "can_capture", lambda trunk, device: True)
    patch.setattr(captured, "cuda_graph", kept)
    return found


def weights(of: Learner) -> Tensor:
    return torch.cat([w.detach().flatten() for w in of.trained_weights])


def trained(base: Path, epochs: int = 4, **changes: Any) -> tuple[dict[str, float], Tensor]:
    """Return the facts of the epochs, and the weights after them."""
    one = learner_at(base, changed(epochs=epochs, learning_rate=1e-3, **changes))
    facts = train_on(one, rollouts_of(one), torch.Generator().manual_seed(3))
    return facts, weights(one)


@pytest.mark.parametrize("case", CASES)
def test_training_with_graphs_is_training_without(
    case: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of bfloat16 one epoch: in four, at this rate, its rounding grows fiftyfold.
    epochs, close = (1, 0.02) if case == "bfloat16" else (4, 1e-4)
    plain, wanted = trained(base, epochs, **CASES[case])
    captures = capturing(monkeypatch)
    facts, found = trained(base, epochs, **CASES[case])
    assert captures
    for name in plain:
        if "clip_fraction" not in name:  # of few tokens, one's rounding shows
            assert facts[name] == pytest.approx(plain[name], rel=close, abs=close), name
    way = wanted - weights(learner_at(base, changed(**CASES[case])))
    assert (found - wanted).norm() <= close * way.norm()
    assert case == "bfloat16" or torch.allclose(found, wanted, atol=2e-5)


def test_a_graph_reads_each_microbatch_anew(base: Path, captures: list[Step]) -> None:
    one = learner_at(base)
    rollouts = rollouts_of(one)
    rows = torch.arange(4)
    for _ in range(2):
        accumulate_gradients(one, rollouts, rows)
        one.optimizer.zero_grad()
    assert len(captures) == 1
    # The same shape, and everything else other.
    choices = torch.tensor(list(combinations(range(4, 12), 4)))
    fitting = [few for few in choices if shape_of(rollouts.rows(few)) in one.graphs._shown]
    other = fitting[0]
    changed_rollouts = rollouts._changed(
        rollouts.tokens, lambda numbers: numbers.flip(0) * 1.5 + 0.1
    )
    with torch.no_grad():
        for weight in one.trained_weights:
            weight.mul_(1.1)
    facts = accumulate_gradients(one, changed_rollouts, other)
    found = [w.grad.clone() for w in one.trained_weights if w.grad is not None]
    assert len(captures) == 1
    one.optimizer.zero_grad()
    one.graphs._refused = True
    one.graphs.let_go()
    wanted = accumulate_gradients(one, changed_rollouts, other)
    assert facts == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    for weight, gradient in zip(one.trained_weights, found, strict=True):
        assert weight.grad is not None
        assert (gradient - weight.grad).norm() <= 1e-5 * weight.grad.norm()


def test_gradients_of_several_microbatches_add_up(base: Path, captures: list[Step]) -> None:
    one = learner_at(base, changed(tokens_per_microbatch=60))
    rollouts = rollouts_of(one)
    everybody = torch.arange(len(rollouts))
    wanted = accumulate_gradients(one, rollouts, everybody)
    plain = [w.grad.clone() for w in one.trained_weights if w.grad is not None]
    for _ in range(3):
        one.optimizer.zero_grad()
        facts = accumulate_gradients(one, rollouts, everybody)
    assert len(captures) > 0
    assert facts == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for weight, gradient in zip(one.trained_weights, plain, strict=True):
        torch.testing.assert_close(weight.grad, gradient, atol=1e-6, rtol=1e-4)


def test_weights_that_have_moved_are_seen(base: Path, captures: list[Step]) -> None:
    one = learner_at(base)
    rollouts, rows = rollouts_of(one), torch.arange(4)
    for _ in range(3):
        accumulate_gradients(one, rollouts, rows)
    assert len(captures) == 1
    moved = one.trained_weights[0]
    moved.data = moved.detach() * 1.5
    one.optimizer.zero_grad()
    found = accumulate_gradients(one, rollouts, rows)
    one.graphs._refused = True
    assert not one.graphs._shown
    assert found == accumulate_gradients(one, rollouts, rows)


def refuses(step: Step) -> Step:
    raise RuntimeError("operation not permitted when stream is capturing")


def deludes(step: Step) -> Step:
    step()
    return step_and_nothing(step())


def step_and_nothing(found: Tensor) -> Step:
    return lambda: found


@pytest.mark.parametrize(("capture", "said"), [(refuses, "not permitted"), (deludes, "gradients")])
def test_where_no_graph_can_be_had_training_goes_on_without(
    capture: Callable[[Step], Step],
    said: str,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, wanted = trained(base)
    capturing(monkeypatch, capture)
    if capture is deludes:
        # A graph that leaves another gradient than the one asked for.
        monkeypatch.setattr(torch, "_foreach_copy_", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        facts, found = trained(base)
    assert facts == pytest.approx(plain, rel=1e-4, abs=1e-4)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert [said in message for message in caplog.messages] == [True]
    assert "RLHF_CUDA_GRAPHS=0" in caplog.text


def test_graphs_that_would_fill_the_gpu_are_let_go(
    base: Path,
    captures: list[Step],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(device: torch.device, share: float) -> None:
        raise RuntimeError("they would bring memory to 75.0 GB, of 64.0")

    _, wanted = trained(base)
    captures.clear()
    monkeypatch.setattr(captured, "check_memory", full)
    with caplog.at_level(logging.WARNING):
        _, found = trained(base)
    assert len(captures) == 1
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert "75.0 GB" in caplog.text


def test_one_agents_graph_moves_no_other_agents_policy(
    base: Path, tmp_path: Path, captures: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Specialists share an optimizer, which steps every weight that has a gradient, were it 0."""
    moved: list[float] = []
    update = specialists._update

    def watched(agent: Any, *rest: Any, **named: Any) -> None:
        own = set(map(id, agent.training.learner.weights))
        groups = agent.training.learner.optimizer.param_groups
        others = [w for group in groups for w in group["params"] if id(w) not in own]
        before = [w.detach().clone() for w in others]
        update(agent, *rest, **named)
        moved.extend(
            float((a.detach() - b).abs().max()) for a, b in zip(others, before, strict=True)
        )

    monkeypatch.setattr(specialists, "_update", watched)
    agent = Specialist(base, base, lower_share, PROMPTS, PROMPTS[:4])
    settings = changed(critic="separate", epochs=4, updates=2, evaluate_every=2)
    train_specialists(
        specialists={"a": agent, "b": agent}, output_dir=tmp_path / "out", settings=settings
    )
    assert captures
    assert moved
    assert max(moved) == 0.0


@pytest.mark.gpu
def test_a_gpu_trains_with_graphs_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = save_base(tmp_path / "base")
    for case, changes in CASES.items():
        monkeypatch.setenv("RLHF_CUDA_GRAPHS", "0")
        _, wanted = trained(base, device="cuda", **changes)
        monkeypatch.setenv("RLHF_CUDA_GRAPHS", "1")
        replays: list[Any] = []
        plain = torch.cuda.CUDAGraph.replay

        def told(graph: Any, plain: Any = plain, replays: list[Any] = replays) -> None:
            replays.append(graph)
            plain(graph)

        with monkeypatch.context() as patch:
            patch.setattr(captured, "WORTH", 1000)  # none for decoding
            patch.setattr(torch.cuda.CUDAGraph, "replay", told)
            _, found = trained(base, device="cuda", **changes)
        assert len(replays) > len(set(replays)), case  # the first of each is looked at
        close = 0.05 if case == "bfloat16" else 1e-3
        assert (found - wanted).norm() <= close * wanted.norm(), case
    assert not caplog.messages
    asked = learner_at(base, changed(device="cuda", epochs=4))
    read = Learner.logprobs_and_shared_values

    def looks(self: Learner, tokens: Tokens, room: Room | None = None) -> Any:
        logprobs, values = read(self, tokens, room)
        return logprobs + 0 * logprobs.sum().item(), values

    monkeypatch.setattr(Learner, "logprobs_and_shared_values", looks)
    train_on(asked, rollouts_of(asked), torch.Generator().manual_seed(3))
    assert ["without CUDA graphs" in message for message in caplog.messages] == [True]


def some_rollouts(prompts: list[int], completions: list[int]) -> Rollouts:
    """Return rollouts of such lengths, in columns with room to spare."""
    P, T = max(prompts), max(completions)
    prompt_mask = torch.arange(P) >= P - torch.tensor(prompts)[:, None]
    completion_mask = torch.arange(T) < torch.tensor(completions)[:, None]
    tokens = Tokens(prompt_mask.long(), prompt_mask, completion_mask.long(), completion_mask)
    numbers = partial(torch.zeros, completion_mask.shape)
    return Rollouts(tokens, *(numbers() for _ in range(6)))


def test_shapes_come_back_and_hold_all_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = set()
    for _ in range(200):
        prompts, completions = torch.randint(1, 257, (2, 8), generator=generator).tolist()
        few = some_rollouts(prompts, completions)
        shape = shape_of(few)
        run, read = sum(prompts) + sum(completions) - 8, sum(completions)
        rectangle = 8 * (shape.prompt + shape.completion - 1)
        assert run <= shape.room.tokens <= run + rectangle / 16 + 64
        assert read <= shape.room.read <= read + shape.completion + 64
        assert shape.room.read <= shape.room.tokens <= rectangle
        assert not shape.room.is_full
        shapes.add(shape)
    assert len(shapes) < 100
    full = shape_of(some_rollouts([256] * 8, [256] * 8))
    assert full.room.is_full
    assert (full.room.tokens, full.room.read) == (8 * 511, 8 * 256)
