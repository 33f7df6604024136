"""Adapted layers in few passes: what PEFT's own layers compute, forward and back."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_pipeline.policy import low_rank
from rlhf_pipeline.policy.low_rank import adapted_linear, rounding_once, take_few_passes


class Two(nn.Module):
    """Two linear layers with something between, GPT-2's or the usual kind."""

    def __init__(self, transposed: bool, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.first = Conv1D(8, 6) if transposed else nn.Linear(6, 8, bias=bias)
        self.second = Conv1D(5, 8) if transposed else nn.Linear(8, 5, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(self.norm(states))))
        return found


def adapted(transposed: bool, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """Return such layers with a set of adapters that is not 0."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model: Any = Two(transposed, bias).to(dtype)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["first", "second"], fan_in_fan_out=transposed
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        for name in ("a", "b"):
            inject_adapter_in_model(config, model, name)
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            weight.data = torch.randn_like(weight, dtype=max(dtype, torch.float32, key=digits))
        weight.requires_grad_(".lora_" in name)
    return model


def digits(dtype: torch.dtype) -> float:
    """Return how small a step the type can tell apart, the smallest highest."""
    return -torch.finfo(dtype).eps


def results(
    model: Any, active: list[str], *, half: bool = False, grads: bool = True, device: str = "cpu"
) -> Any:
    """Return what the layers say of some states, and the gradients of all that is trained."""
    model.to(device)
    for layer in (model.first, model.second):
        layer._active_adapter = active
    model.zero_grad()
    states = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1))
    states = states.to(device, model.norm.weight.dtype).requires_grad_(grads)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=half), torch.set_grad_enabled(grads):
        found = model(states)
    if not grads:
        return [found.cpu()]
    found.square().sum().backward()
    trained = [p.grad for p in model.parameters() if p.requires_grad]
    return [None if x is None else x.cpu() for x in (found.detach(), states.grad, *trained)]


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("active", [["a"], ["b"], [], ["a", "b"]])
@pytest.mark.parametrize(("transposed", "bias"), [(True, True), (False, True), (False, False)])
def test_layers_and_gradients_are_pefts(
    transposed: bool, bias: bool, active: list[str], grads: bool
) -> None:
    theirs = adapted(transposed, bias, torch.float64)
    ours = copy.deepcopy(theirs)
    take_few_passes(ours)
    assert type(ours.first) is not type(theirs.first)
    pairs = zip(
        results(ours, active, grads=grads), results(theirs, active, grads=grads), strict=True
    )
    for mine, wanted in pairs:
        assert (mine is None) == (wanted is None)
        if mine is not None:
            torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("grads", [True, False])
def test_half_of_float32_stays_as_near_as_pefts(grads: bool, device: str) -> None:
    exact = results(adapted(True), ["a"], grads=grads)
    theirs = adapted(True)
    for layer in (theirs.first, theirs.second):  # the frozen base alone
        layer.base_layer.to(torch.bfloat16)
    ours = copy.deepcopy(theirs)
    take_few_passes(ours)
    mine = results(ours, ["a"], half=True, grads=grads, device=device)
    wanted = results(theirs, ["a"], half=True, grads=grads, device=device)
    for found, other, right in zip(mine, wanted, exact, strict=True):
        if found is not None:
            assert found.dtype == other.dtype
            apart, usual = ((x.float() - right).norm() for x in (found, other))
            assert apart <= 1.5 * usual + 1e-6


def test_a_base_of_another_type_without_autocast_is_left_to_peft() -> None:
    theirs = adapted(False, dtype=torch.bfloat16)
    ours = copy.deepcopy(theirs)
    take_few_passes(ours)
    for mine, wanted in zip(results(ours, ["a"]), results(theirs, ["a"]), strict=True):
        assert mine is wanted is None or torch.equal(mine, wanted)


def test_a_base_that_is_trained_too_has_its_gradient() -> None:
    theirs = adapted(False, dtype=torch.float64)
    for layer in (theirs.first, theirs.second):
        layer.base_layer.requires_grad_(True)
    ours = copy.deepcopy(theirs)
    take_few_passes(ours)
    for mine, wanted in zip(results(ours, ["a"]), results(theirs, ["a"]), strict=True):
        assert (mine is None) == (wanted is None)
        if mine is not None:
            torch.testing.assert_close(mine, wanted)


def test_adapters_are_rounded_anew_after_a_step_and_once_inside_a_block() -> None:
    model = adapted(True)
    take_few_passes(model)
    for layer in (model.first, model.second):
        layer.base_layer.to(torch.bfloat16)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)  # leaves a weight's version as it is

    def said() -> Tensor:
        found: Tensor = results(model, ["a"], half=True, grads=False)[0]
        return found

    before = said()
    with rounding_once():
        assert torch.equal(said(), before)
        for weight in trained:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert torch.equal(said(), before)  # so no weight may change inside
    assert not torch.equal(said(), before)


def test_without_gradients_layers_say_what_they_say_with_them() -> None:
    model = adapted(True)
    take_few_passes(model)
    for half in (False, True):
        for layer in (model.first, model.second):
            layer.base_layer.to(torch.bfloat16 if half else torch.float32)
        with_them, without = (
            results(model, ["a"], half=half, grads=grads)[0] for grads in (True, False)
        )
        assert torch.equal(with_them, without)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    shapes = [(2, 3, 4), (4, 5), (5,), (2, 4), (5, 2)]
    states, weight, bias, down, up = (torch.randn(s, dtype=torch.float64) for s in shapes)
    trained = [x.requires_grad_() for x in (states, bias, down, up)]

    def computed(states: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return adapted_linear(states, weight, bias, down, up, 0.7)

    assert torch.autograd.gradcheck(computed, trained)
    plain = states @ weight + bias + 0.7 * (states @ down.T @ up.T)
    torch.testing.assert_close(computed(states, bias, down, up), plain)


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "ROOMY", frozenset({"cpu"}))


def halved(transposed: bool, bias: bool = True) -> Any:
    """Return layers on a base of half of float32, whose adapters have room beside it."""
    model = adapted(transposed, bias)
    for layer in (model.first, model.second):
        layer.base_layer.to(torch.bfloat16)
    take_few_passes(model)
    return model


def said(model: Any, active: str = "a") -> Tensor:
    found: Tensor = results(model, [active], half=True, grads=False)[0]
    return found


@pytest.mark.parametrize(("transposed", "bias"), [(True, True), (False, True), (False, False)])
def test_one_product_with_room_beside_the_base_is_the_several(
    transposed: bool, bias: bool, roomy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = halved(transposed, bias)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    alone = said(model), said(model, "b")
    products, once = [], low_rank._in_one_product

    def told(*given: Any) -> Tensor:
        products.append(given)
        return once(*given)

    monkeypatch.setattr(low_rank, "_in_one_product", told)
    for active, wanted in zip("ab", alone, strict=True):
        with rounding_once():
            torch.testing.assert_close(said(model, active), wanted, atol=2e-2, rtol=2e-2)
    with rounding_once():  # one set after the other
        torch.testing.assert_close(said(model, "b"), alone[1], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(said(model, "a"), alone[0], atol=2e-2, rtol=2e-2)
    assert len(products) == 8
    assert (alone[0] - alone[1]).abs().max() > 1
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name])


def test_room_holds_the_adapters_of_each_block_anew(roomy: None) -> None:
    model = halved(True)
    with rounding_once():
        before = said(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_A." in name:
                weight.mul_(-1)
    with rounding_once():
        found = said(model)
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, said(model), atol=2e-2, rtol=2e-2)


def test_training_reads_nothing_of_the_room(roomy: None) -> None:
    model, plain = halved(True), copy.deepcopy(adapted(True))
    for layer in (plain.first, plain.second):
        layer.base_layer.to(torch.bfloat16)
    take_few_passes(plain)
    with rounding_once():
        said(model)
    for mine, wanted in zip(
        results(model, ["a"], half=True), results(plain, ["a"], half=True), strict=True
    ):
        assert mine is wanted is None or torch.equal(mine, wanted)


def test_weights_that_left_their_room_are_read_where_they_are(roomy: None) -> None:
    model = halved(False)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (copied.first, copied.second):
            layer.base_layer.weight.mul_(2)
    with rounding_once():
        apart = said(copied)
    assert torch.equal(apart, said(copied))
    assert not torch.equal(apart, said(model))


def test_saved_weights_are_the_base_alone(roomy: None, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for transposed in (False, True):
        base = halved(transposed).first.base_layer
        assert base.with_room.numel() > base.weight.numel()
        save_file({"weight": base.weight.detach().contiguous()}, tmp_path / "one.safetensors")
        assert torch.equal(load_file(tmp_path / "one.safetensors")["weight"], base.weight)
        assert set(base.state_dict()) == {"weight", "bias"}
