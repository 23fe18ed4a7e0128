"""A conversion between the forward and the backward pass."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import whole
from tests.pains.conftest import StockFails


def begun() -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    return module, module(torch.ones(1, 3)).square().sum()


@pytest.fixture
def expected() -> torch.Tensor:
    module, loss = begun()
    loss.backward()
    return module.weight.grad


def swapped(module: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_stock_finds_out_at_the_backward(stock_fails: StockFails) -> None:
    module, loss = begun()
    swapped(module)
    message = ""
    try:
        loss.backward()
    except RuntimeError as error:
        message = str(error)
    stock_fails("the backward after a swap raises", "poisoned" in message)


def test_stock_without_swapping_never_finds_out(stock_fails: StockFails) -> None:
    module, loss = begun()
    module.double()
    loss.backward()
    differ = module.weight.dtype is torch.float64 and module.weight.grad.dtype is torch.float32
    stock_fails("a float64 parameter has a float32 gradient, silently", differ)


@pytest.mark.slow
@pytest.mark.parametrize("keeping", [False, True], ids=["convert", "reference_keeping"])
def test_found_before_anything_is_changed(keeping: bool, expected: torch.Tensor) -> None:
    module, loss = begun()

    def convert() -> None:
        if keeping:
            with ms.reference_keeping():
                module.double()
        else:
            ms.convert(module, torch.float64)

    before = whole(module)
    with pytest.raises(ms.errors.PlacementError) as caught:
        convert()
    assert whole(module) == before
    assert "an autograd graph that still waits for backward" in caught.value.found
    assert "`loss` in frame `test_found_before_anything_is_changed`" in caught.value.found
    assert "run backward first" in caught.value.remedy

    loss.backward()  # nothing is poisoned
    assert torch.equal(module.weight.grad, expected)
    convert()  # the graph has been used up, and the loss is still there
    assert module.weight.dtype is module.weight.grad.dtype is torch.float64
    assert torch.equal(module.weight.grad, expected.double())
    module.zero_grad()
    module(torch.ones(1, 3, dtype=torch.float64)).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, expected.double())


@pytest.mark.slow
@pytest.mark.parametrize("swap", [torch.utils.swap_tensors, ms.swap_tensors], ids=["stock", "ours"])
def test_swap_tensors(swap: Callable[[torch.Tensor, torch.Tensor], None], stock_fails: StockFails) -> None:
    module, loss = begun()
    other = nn.Parameter(torch.zeros(2, 3))
    if swap is torch.utils.swap_tensors:
        swap(module.weight, other)
        with pytest.raises(RuntimeError) as poisoned:
            loss.backward()
        stock_fails("a swap is accepted that the backward refuses", "poisoned" in str(poisoned.value))
        return
    before = module.weight.detach().clone()
    with pytest.raises(ms.errors.PlacementError, match="still waits for backward"):
        swap(module.weight, other)
    assert torch.equal(module.weight, before)
    loss.backward()
    swap(module.weight, other)
    assert torch.equal(other, before)
