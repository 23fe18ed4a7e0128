"""Tensor subclasses on either side of a load: the outcomes and errors of stock torch, and ours."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import described_module, identities, whole
from tests.pains.conftest import StockFails
from tests.pains.quantized import HANDLERS, every_way, quantized, quantized_class

WAYS = [(source, target) for source, target in itertools.product(("plain", "subclass"), repeat=2)][1:]


@pytest.fixture(params=[False, True], ids=["copy", "swap"])
def swapping(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 5)


def target_of(kind: str, cls: Any, device: str) -> nn.Linear:
    torch.manual_seed(1)
    with torch.device(device):
        made = nn.Linear(3, 5)
    return quantized(made, cls) if kind == "subclass" else made


def state_of(kind: str, cls: Any) -> Any:
    state = linear(2).state_dict()
    if kind == "subclass":
        state["weight"] = cls(state["weight"], 0.25)
    return state


def attempt(load: Callable[[], Any]) -> Any:
    try:
        return tuple(map(tuple, load()))
    except Exception as error:
        return type(error), str(error)


def payload(tensor: Any) -> torch.Tensor:
    return tensor.elem if hasattr(tensor, "elem") else tensor.detach()


@pytest.mark.slow_except(20)
@pytest.mark.filterwarnings("ignore:.*no-op:UserWarning")
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize(("source", "target"), WAYS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_does_what_torch_does(
    handler: str, source: str, target: str, device: str, assign: bool, swapping: bool
) -> None:
    def run(load: Callable[..., Any]) -> tuple[Any, nn.Linear, Any, Any]:
        cls = quantized_class()
        HANDLERS[handler](cls)
        model, state = target_of(target, cls, device), state_of(source, cls)
        before = whole(model)
        return attempt(lambda: load(model, state, assign=assign)), model, state, before

    expected, theirs, their_state, (_, their_ids) = run(nn.Module.load_state_dict)
    found, ours, our_state, before = run(ms.load_state_dict)
    assert found == expected
    if isinstance(expected[0], type):
        assert whole(ours) == before
        return
    assert described_module(ours) == described_module(theirs)
    their_new, our_new = identities(theirs), identities(ours)
    assert [our_new[k] == before[1][k] for k in our_new] == [their_new[k] == their_ids[k] for k in their_new]
    assert _shares(ours, our_state) == _shares(theirs, their_state)


def _shares(model: nn.Linear, state: Any) -> bool:
    there, given = payload(model.weight), payload(state["weight"])
    return not there.is_meta and there.data_ptr() == given.data_ptr()


def test_stock_half_loads(stock_fails: StockFails) -> None:
    cls = quantized_class()
    theirs = quantized(linear(1), cls)
    state = {"bias": torch.full((5,), 7.0), "weight": linear(2).weight.detach()}
    with pytest.raises(RuntimeError, match="Unsupported function"):
        theirs.load_state_dict(state)
    stock_fails("a subclass that refuses its value leaves the others overwritten", theirs.bias[0].item() == 7)

    ours = quantized(linear(1), cls)
    before = whole(ours)
    for load in (ms.load_state_dict, ms.load):
        with pytest.raises(RuntimeError, match="Unsupported function"):
            load(ours, state)
        assert whole(ours) == before


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("source", "target"), WAYS)
def test_load_asks_the_handler(source: str, target: str, device: str, swapping: bool) -> None:
    """Whatever the switch of `torch.__future__` says, and for every target."""
    cls = quantized_class()
    every_way(cls)
    model, state = target_of(target, cls, device), state_of(source, cls)
    held = [model.weight, model.bias]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = ms.load(model, state)
    assert report.coverage == 1
    assert model.weight is held[0]
    assert model.bias is held[1]
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.requires_grad
    assert isinstance(model.weight, cls) == (target == "subclass")
    wanted = linear(2).weight.detach()
    if source == "subclass" and target == "plain":
        wanted = wanted * 0.25
    assert torch.equal(payload(model.weight), wanted)
    if target == "subclass":
        assert model.weight.scale == (0.25 if source == "subclass" else 0.5)
    assert torch.equal(model.bias, linear(2).bias)
