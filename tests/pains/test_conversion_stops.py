"""A conversion that stops partway, because somebody refers to a parameter."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import whole
from tests.pains.conftest import StockFails


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def view_of(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.view(-1)


REFERENCES: dict[str, Callable[[torch.Tensor], Any]] = {"a weak reference": weakref.ref, "a live view": view_of}


def dtypes(module: nn.Module) -> list[torch.dtype]:
    return [param.dtype for param in module.parameters()]


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.slow
@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("kind", REFERENCES)
def test_to(kind: str, stock_fails: StockFails) -> None:
    theirs = model()
    held = REFERENCES[kind](theirs[1].weight)
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        theirs.to(torch.float64)
    half = [torch.float64, torch.float64, torch.float32, torch.float32]
    stock_fails(f"{kind} stops a conversion partway", dtypes(theirs) == half)
    del held

    for convert in (lambda m: ms.convert(m, torch.float64), keeping):
        ours = model()
        held = REFERENCES[kind](ours[1].weight)
        params, values = list(ours.parameters()), [param.detach().clone() for param in ours.parameters()]
        convert(ours)
        assert all(now is before for now, before in zip(ours.parameters(), params, strict=True))
        assert all(torch.equal(now, old.double()) for now, old in zip(params, values, strict=True))
        assert dtypes(ours) == [torch.float64] * 4
        if isinstance(held, torch.Tensor):
            assert torch.equal(held, values[2].view(-1))
        else:
            assert held() is ours[1].weight


def keeping(module: nn.Module) -> None:
    with ms.reference_keeping():
        module.to(torch.float64)


@pytest.mark.slow
def test_a_refusal_comes_before_the_first_change() -> None:
    ours = model()
    ours[1].weight.cache = view_of(ours[1].weight)  # in a swap, it would go on with the other tensor
    before = whole(ours)
    with pytest.raises(ms.errors.PlacementError, match=r"^1\.weight: .*\n.*\n  found: a view"):
        ms.convert(ours, transform=lambda name, tensor: tensor.to_sparse())
    assert whole(ours) == before
    del ours[1].weight.cache
    ms.convert(ours, transform=lambda name, tensor: tensor.to_sparse())


def test_swap_tensors_of_an_lstm(stock_fails: StockFails) -> None:
    def lstm() -> tuple[nn.LSTM, nn.Parameter]:
        torch.manual_seed(0)
        module = nn.LSTM(3, 2)
        return module, nn.Parameter(torch.zeros_like(module.weight_ih_l0))

    theirs, other = lstm()
    refused = False
    try:
        torch.utils.swap_tensors(theirs.weight_ih_l0, other)
    except RuntimeError as error:
        refused = "weakref" in str(error)
    stock_fails("an LSTM keeps weak references to its weights, so that they cannot be swapped", refused)

    ours, other = lstm()
    weight, value = ours.weight_ih_l0, ours.weight_ih_l0.detach().clone()
    ms.swap_tensors(weight, other)
    assert ours.weight_ih_l0 is weight is ours._flat_weights[0]
    assert not weight.any()
    assert torch.equal(other, value)
    assert not ours(torch.ones(1, 3))[0].isnan().any()


@pytest.mark.slow
def test_swap_tensors_says_who_is_in_the_way(stock_fails: StockFails) -> None:
    def train(swap: Callable[[torch.Tensor, torch.Tensor], None], a: torch.Tensor, b: torch.Tensor) -> str:
        cache = [view_of(a)]
        with pytest.raises(RuntimeError) as caught:
            swap(a, b)
        assert cache
        return str(caught.value)

    theirs = train(torch.utils.swap_tensors, torch.zeros(2), torch.ones(3))
    stock_fails("a refusal does not say who holds the tensor", "cache" not in theirs)

    a, b = torch.zeros(2), torch.ones(3)
    ours = train(ms.swap_tensors, a, b)
    assert "list `cache` in frame `train`" in ours
    assert (a.numel(), b.numel()) == (2, 3)
