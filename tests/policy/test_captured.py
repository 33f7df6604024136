"""What is decoded through a graph is what is decoded without one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from rlhf_pipeline.policy import captured, sampling
from rlhf_pipeline.policy.captured import can_capture
from rlhf_pipeline.policy.packed import PACKABLE
from rlhf_pipeline.policy.sampling import Sampled, decode, pad_left, trunk_of
from tests.policy.recorded import recorded
from tests.policy.test_families import EOS, FAMILIES, PAD, family_model

B, T, ROOM = 12, 40, 16
PROMPTS = [[2 + (i * j) % 20 for j in range(1 + i % 7)] for i in range(B)]
Step = Callable[[], Tensor]


def decoded(model: Any, **changes: Any) -> Sampled:
    ids, mask = pad_left(PROMPTS, PAD)
    uniforms = torch.rand(B, T, generator=torch.Generator().manual_seed(5))
    settings: dict[str, Any] = {"temperature": 1.0, "eos_id": EOS, "pad_id": PAD} | changes
    return decode(model, ids, mask, uniforms, **settings)


def assert_same(one: Sampled, other: Sampled) -> None:
    assert one.completion_ids.tolist() == other.completion_ids.tolist()
    assert one.likeliest.tolist() == other.likeliest.tolist()
    torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)
    assert (one.support is None) == (other.support is None)
    if one.support is not None and other.support is not None:
        assert torch.equal(one.support[one.completion_mask], other.support[other.completion_mask])


def capturing(patch: pytest.MonkeyPatch, capture: Callable[[Step], Step] = recorded) -> list[str]:
    """Let decoding capture its steps. The list tells, in order, of passes and of captures."""
    events: list[str] = []
    run = sampling.run_trunk

    def told(step: Step) -> Step:
        events.append("capture")
        return capture(step)

    def running(trunk: Any, ids: Tensor, *rest: Any) -> Tensor:
        events.append(f"{ids.shape[0]} rows")
        return run(trunk, ids, *rest)

    patch.setattr(sampling, "can_capture", lambda trunk, device: True)
    patch.setattr(sampling, "run_trunk", running)
    patch.setattr(captured, "cuda_graph", told)
    patch.setattr(captured, "ROOM", ROOM)
    return events


@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, {}) for family in sorted(PACKABLE)]
    + [("gpt2", {"top_k": 9, "top_p": 0.95, "keeps_support": True}), ("gpt2", {"temperature": 0})],
)
def test_a_graph_writes_what_is_written_without(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_model(family)
    without = decoded(model, **changes)
    events = capturing(monkeypatch)
    assert_same(decoded(model, **changes), without)
    assert "capture" in events
    assert family in FAMILIES


def test_a_graph_ends_with_its_room_and_where_half_of_the_rows_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = family_model("llama")
    without = decoded(model, eos_id=-1)
    events = capturing(monkeypatch)
    assert_same(decoded(model, eos_id=-1), without)
    graph = ["12 rows", "capture", "12 rows"]  # Python runs its first token, and while it is shown
    # Of 7 columns of prompts and 40 tokens: places 7 to 23, to 39, and too few for another.
    assert events == ["12 rows", *graph, *graph, *["12 rows"] * 6]
    events.clear()
    decoded(model)
    rows = [int(event.split()[0]) for event in events if event != "capture"]
    assert all(less <= more / 2 for more, less in pairwise(sorted(set(rows), reverse=True)))
    assert len(set(rows)) > 2


def adapted(model: Any) -> Any:
    torch.manual_seed(3)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return wrapped.eval()


def test_adapters_and_autocast_are_captured_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(family_model("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        without = decoded(model)
        with model.disable_adapter():
            base = decoded(model)
        events = capturing(monkeypatch)
        assert_same(decoded(model), without)
        with model.disable_adapter():
            assert_same(decoded(model), base)
    assert events.count("capture") >= 2
    assert base.completion_ids.tolist() != without.completion_ids.tolist()


def test_weights_that_change_between_two_calls_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("gpt2")
    capturing(monkeypatch)
    before = decoded(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    after = decoded(model)
    monkeypatch.undo()
    assert before.completion_ids.tolist() != after.completion_ids.tolist()
    assert_same(after, decoded(model))


def refuses(step: Step) -> Step:
    raise RuntimeError("operation not permitted when stream is capturing")


def deludes(step: Step) -> Step:
    found = step()
    return lambda: found + 1


@pytest.mark.parametrize(
    ("capture", "said"), [(refuses, "not permitted"), (deludes, "logits 1 apart")]
)
def test_where_no_graph_can_be_had_decoding_goes_on_without(
    capture: Callable[[Step], Step],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = family_model("llama")
    without = decoded(model)
    events = capturing(monkeypatch, capture)
    with caplog.at_level(logging.WARNING):
        assert_same(decoded(model), without)
    assert events.count("capture") == 1
    assert [said in message for message in caplog.messages] == [True]
    assert "RLHF_CUDA_GRAPHS=0" in caplog.text


def test_what_the_host_would_read_in_a_step_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = family_model("llama")
    without = decoded(model)
    norm: Any = trunk_of(model).norm
    plain = norm.forward

    def looks(states: Tensor) -> Tensor:
        return plain(states) if states.sum().item() != 0.1 else states

    monkeypatch.setattr(norm, "forward", looks)
    capturing(monkeypatch)
    assert_same(decoded(model), without)
    assert "_local_scalar_dense" in caplog.text


def test_only_what_is_the_same_every_time_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    model = family_model("llama")
    assert can_capture(trunk_of(model), gpu)
    assert not can_capture(trunk_of(model), torch.device("cpu"))
    assert not can_capture(trunk_of(family_model("gpt_neo")), gpu)  # its window moves in Python
    assert not can_capture(trunk_of(family_model("mistral", sliding_window=8)), gpu)
    trunk: Any = trunk_of(model)
    hook = trunk.layers[0].register_forward_pre_hook(lambda *_: None)
    assert not can_capture(trunk_of(model), gpu)
    hook.remove()
    monkeypatch.setenv("RLHF_CUDA_GRAPHS", "0")
    assert not can_capture(trunk_of(model), gpu)


@pytest.mark.gpu
def test_a_gpu_writes_through_graphs_what_it_writes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for family in sorted(PACKABLE):
        model = family_model(family).cuda()
        ids, mask = (each.cuda() for each in pad_left(PROMPTS, PAD))
        uniforms = torch.rand(B, T, generator=torch.Generator().manual_seed(5)).cuda()

        def write(model: Any = model, *given: Tensor) -> Sampled:
            return decode(model, *given, temperature=1.0, eos_id=EOS, pad_id=PAD)

        monkeypatch.setenv("RLHF_CUDA_GRAPHS", "0")
        without = write(model, ids, mask, uniforms)
        monkeypatch.delenv("RLHF_CUDA_GRAPHS")
        assert_same(write(model, ids, mask, uniforms), without)
    assert not caplog.messages
