"""PyTorch's tutorial on `swap_tensors` and `module_load`, to the letter of what it prints."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.pains.quantized import from_plain, quantized_class

WEIGHT = """tensor([[ 0.2430,  0.5155,  0.3337],
        [-0.2524,  0.3333,  0.1033],
        [ 0.2932, -0.3519, -0.5715],
        [-0.2231, -0.4428,  0.4737],
        [ 0.1663,  0.2391,  0.1826]])"""
BIAS = "tensor([-0.0100,  0.4518, -0.4102,  0.0364, -0.3941])"


class Printed:
    """Prints as a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def printed(weight: str, bias: str) -> str:
    """A state dict as this Python prints it: from 3.12 on with braces."""
    return repr(OrderedDict(weight=Printed(weight), bias=Printed(bias)))


ON_META = "tensor(..., device='meta', size=({}))"
# Where the tutorial prints numbers for ids, these are the names of the objects that they were before.
PRINTED = f"""\
Before: id(weight)=the weight, id(bias)=the bias
m.state_dict() before load_state_dict():
 {printed(f"MyQuantizedLinearWeight({ON_META.format('5, 3')}, scale=0.5)", ON_META.format("5,"))}
state_dict:
 {printed(WEIGHT, BIAS)}
After: id(weight)=the weight, id(bias)=the bias
m.state_dict() after load_state_dict():
 {printed(f"MyQuantizedLinearWeight({WEIGHT}, scale=0.5)", BIAS)}
"""


def state() -> "OrderedDict[str, torch.Tensor]":
    """What `nn.Linear(3, 5).state_dict()` was when the tutorial was run."""
    return OrderedDict(
        (name, eval(text, {"tensor": torch.tensor})) for name, text in (("weight", WEIGHT), ("bias", BIAS))
    )


def skeleton() -> nn.Linear:
    """The model of the tutorial: a layer on meta, with its weight in the subclass."""
    cls = quantized_class()
    from_plain(cls)

    def fn(m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            requires_grad = m.weight.requires_grad
            m.weight = nn.Parameter(cls(m.weight, 0.5), requires_grad=requires_grad)

    with torch.device("meta"):
        m = nn.Linear(3, 5)
        m.apply(fn)
    return m


def recipe(load: Callable[[nn.Module, Any], Any]) -> nn.Linear:
    """The part of the tutorial that loads."""
    m = skeleton()
    names = {id(m.weight): "the weight", id(m.bias): "the bias"}
    held = (m.weight, m.bias)  # so that no other object gets their ids
    print(f"Before: id(weight)={names[id(m.weight)]}, id(bias)={names[id(m.bias)]}")
    print(f"m.state_dict() before load_state_dict():\n {m.state_dict()}")
    state_dict = state()
    print(f"state_dict:\n {state_dict}")
    load(m, state_dict)
    print(f"After: id(weight)={names.get(id(m.weight))}, id(bias)={names.get(id(m.bias))}")
    print(f"m.state_dict() after load_state_dict():\n {m.state_dict()}")
    assert all(param.requires_grad and isinstance(param, nn.Parameter) for param in held)
    return m


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
def test_stock_prints_what_the_tutorial_says(capsys: pytest.CaptureFixture[str]) -> None:
    recipe(lambda m, state_dict: m.load_state_dict(state_dict, assign=True))
    assert capsys.readouterr().out == PRINTED


@pytest.mark.usefixtures("swapping")
def test_ours_in_place_of_the_method(capsys: pytest.CaptureFixture[str]) -> None:
    recipe(lambda m, state_dict: ms.load_state_dict(m, state_dict, assign=True))
    assert capsys.readouterr().out == PRINTED


@pytest.mark.parametrize("swap", [True, False], ids=["swapping is on", "swapping is off"])
@pytest.mark.parametrize("source", ["mapping", "file"])
def test_load(swap: bool, source: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def load(m: nn.Module, state_dict: Any) -> None:
        torch.save(state_dict, tmp_path / "state.pt")
        ms.load(m, state_dict if source == "mapping" else tmp_path / "state.pt")

    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        recipe(load)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert capsys.readouterr().out == PRINTED


def test_stock_without_the_switch(stock_fails: StockFails, capsys: pytest.CaptureFixture[str]) -> None:
    m = recipe(lambda m, state_dict: m.load_state_dict(state_dict, assign=True))
    lost = type(m.weight) is nn.Parameter and "id(weight)=None" in capsys.readouterr().out
    stock_fails("with swapping off, assign=True loses the subclass and the identity, silently", lost)


def test_stock_converts_all_but_the_payload(stock_fails: StockFails) -> None:
    """The other half of the tutorial; what a load that converts does is in `test_subclass_memory`."""
    cls = quantized_class()
    m = nn.Linear(3, 5, dtype=torch.float32)
    m.weight = nn.Parameter(cls(m.weight, 0.5))
    m.bfloat16()
    payload_is_left = m.weight.dtype is torch.bfloat16 and m.weight.elem.dtype is torch.float32
    stock_fails("a conversion leaves the payload of a subclass as it was", payload_is_left)
