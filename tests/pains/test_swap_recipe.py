"""PyTorch's tutorial on `swap_tensors`, the parts on `swap_tensors` and `.to()`: what it prints, before and after."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.pains.quantized import quantized_class

Swap = Callable[[torch.Tensor, torch.Tensor], None]
Convert = Callable[[nn.Module], Any]
SWAPS: dict[str, Swap] = {"stock": torch.utils.swap_tensors, "ours": ms.swap_tensors}


@pytest.mark.parametrize("which", SWAPS)
def test_swap_tensors(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    t1 = torch.arange(2)
    t2 = torch.arange(3)
    print(f"Before swapping, t1: {t1}, t2: {t2}")
    SWAPS[which](t1, t2)
    print(f"After swapping, t1: {t1}, t2: {t2}")
    assert capsys.readouterr().out == (
        "Before swapping, t1: tensor([0, 1]), t2: tensor([0, 1, 2])\n"
        "After swapping, t1: tensor([0, 1, 2]), t2: tensor([0, 1])\n"
    )


def double_weight(change: Callable[[nn.Linear], None]) -> tuple[str, str, bool]:
    """What the tutorial prints of module and optimizer afterwards, and whether a step trains the module."""
    torch.manual_seed(0)
    mod = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        mod.weight.copy_(torch.tensor([[0.25], [-0.5]]))
    optimizer = torch.optim.SGD(mod.parameters())
    change(mod)
    printed = f"weight in mod: {mod.weight}", f"weight in optimizer: {optimizer.param_groups[0]['params']}"
    before = mod.weight.detach().clone()
    mod(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return *printed, not torch.equal(mod.weight, before)


def replaced(mod: nn.Linear) -> None:
    mod.weight = nn.Parameter(2 * mod.weight)


def swapped(swap: Swap) -> Callable[[nn.Linear], None]:
    return lambda mod: swap(mod.weight, nn.Parameter(2 * mod.weight.detach()))


def converted(mod: nn.Linear) -> None:
    ms.convert(mod, transform=lambda name, tensor: 2 * tensor)


OLD = "tensor([[ 0.2500],\n        [-0.5000]], requires_grad=True)"
NEW = "tensor([[ 0.5000],\n        [-1.0000]], requires_grad=True)"


def test_the_optimizer_sees_what_becomes_of_the_weight(stock_fails: StockFails) -> None:
    in_mod, in_optimizer, trains = double_weight(replaced)
    assert in_mod == f"weight in mod: Parameter containing:\n{NEW}"
    lost = in_optimizer == f"weight in optimizer: [Parameter containing:\n{OLD}]" and not trains
    stock_fails("an optimizer goes on with a parameter that the module no longer has", lost)

    for change in (swapped(torch.utils.swap_tensors), swapped(ms.swap_tensors), converted):
        assert double_weight(change) == (
            f"weight in mod: Parameter containing:\n{NEW}",
            f"weight in optimizer: [Parameter containing:\n{NEW}]",
            True,
        )


def bfloat16(convert: Convert, capsys: pytest.CaptureFixture[str]) -> str:
    """The tutorial's script; where it prints numbers for ids, these are the names of the objects they were before."""
    m = nn.Linear(3, 5, dtype=torch.float32)
    m.weight = torch.nn.Parameter(quantized_class()(m.weight, 0.5))
    names = {id(m.weight): "the weight", id(m.bias): "the bias"}
    held = m.weight, m.bias
    print(f"Before: id(m.weight)={names.get(id(m.weight))}, id(m.bias)={names.get(id(m.bias))}")
    print(f"m.weight.dtype: {m.weight.dtype}, m.weight.elem.dtype: {m.weight.elem.dtype}")
    convert(m)
    print(f"After: id(m.weight)={names.get(id(m.weight))}, id(m.bias)={names.get(id(m.bias))}")
    print(f"m.weight.dtype: {m.weight.dtype}")
    print(f"m.weight.elem.dtype: {m.weight.elem.dtype}")
    print(f"m.bias.dtype: {m.bias.dtype}")
    assert held
    return capsys.readouterr().out


def printed(payload: str) -> str:
    return (
        "Before: id(m.weight)=the weight, id(m.bias)=the bias\n"
        "m.weight.dtype: torch.float32, m.weight.elem.dtype: torch.float32\n"
        "After: id(m.weight)=the weight, id(m.bias)=the bias\n"
        "m.weight.dtype: torch.bfloat16\n"
        f"m.weight.elem.dtype: torch.{payload}\n"
        "m.bias.dtype: torch.bfloat16\n"
    )


def with_the_switch(m: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        m.bfloat16()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def keeping(m: nn.Module) -> None:
    with ms.reference_keeping():
        m.bfloat16()


OURS: dict[str, Convert] = {"convert": lambda m: ms.convert(m, torch.bfloat16), "reference_keeping": keeping}


def test_stock_prints_what_the_tutorial_says(capsys: pytest.CaptureFixture[str], stock_fails: StockFails) -> None:
    left = bfloat16(lambda m: m.bfloat16(), capsys) == printed("float32")
    stock_fails("without the switch, the payload keeps its dtype", left)
    assert bfloat16(with_the_switch, capsys) == printed("bfloat16")


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("switch", [False, True], ids=["swapping is off", "swapping is on"])
def test_ours_needs_no_switch(way: str, switch: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.__future__.set_swap_module_params_on_conversion(switch)
    try:
        assert bfloat16(OURS[way], capsys) == printed("bfloat16")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
