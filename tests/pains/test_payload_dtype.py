"""What tensors are made of is converted with them: the payload of a subclass, the values of a sparse tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.pains.quantized import quantized, quantized_class


def wrapped_twice() -> nn.Linear:
    """The tutorial's subclass around another one of its kind."""
    cls = quantized_class()
    module = quantized(nn.Linear(3, 5), cls)
    module.weight = nn.Parameter(cls(cls(module.weight.elem, 0.5), 2.0))
    return module


def wrapped() -> nn.Linear:
    torch.manual_seed(0)
    return quantized(nn.Linear(3, 5), quantized_class())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_stock_leaves_the_values_of_csr(stock_fails: StockFails) -> None:
    theirs = nn.Linear(3, 3)
    theirs.weight = nn.Parameter(torch.eye(3).to_sparse_csr())
    theirs.double()
    left = theirs.weight.dtype is torch.float64 and theirs.weight.detach().values().dtype is torch.float32
    stock_fails("a CSR tensor says float64, and its values are float32", left)

    ours = nn.Linear(3, 3)
    ours.weight = nn.Parameter(torch.eye(3).to_sparse_csr())
    held = ours.weight
    ms.convert(ours, torch.float64)
    assert ours.weight is held
    assert held.dtype is held.detach().values().dtype is torch.float64
    assert held.layout is torch.sparse_csr
    assert torch.equal(held.detach().to_dense(), torch.eye(3, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("keeping", [False, True], ids=["convert", "reference_keeping"])
def test_there_and_back(keeping: bool) -> None:
    ours = wrapped()
    weight, elem = ours.weight, ours.weight.elem.detach().clone()
    for dtype in (torch.float64, torch.float32):
        if keeping:
            with ms.reference_keeping():
                ours.to(dtype)
        else:
            ms.convert(ours, dtype)
        assert ours.weight is weight
        assert weight.dtype is weight.elem.dtype is ours.bias.dtype is dtype
        assert weight.scale == 0.5
        assert weight.requires_grad
        assert isinstance(weight, nn.Parameter)
    assert torch.equal(weight.elem, elem)


def test_a_subclass_within_a_subclass() -> None:
    ours = wrapped_twice()
    weight = ours.weight
    ms.convert(ours, torch.bfloat16)
    assert ours.weight is weight
    assert weight.dtype is weight.elem.dtype is weight.elem.elem.dtype is torch.bfloat16
    assert (weight.scale, weight.elem.scale) == (2.0, 0.5)


@pytest.mark.slow
def test_the_class_may_change_on_request() -> None:
    """Quantize: what was a plain parameter becomes the subclass, under the same object."""
    cls = quantized_class()

    def quantize(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return cls(tensor.clone(), 0.25) if name == "weight" else ms.conversion.UNCHANGED

    ours = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(ours.parameters())
    weight, value = ours.weight, ours.weight.detach().clone()
    report = ms.convert(ours, transform=quantize)
    assert ours.weight is weight is optimizer.param_groups[0]["params"][0]
    assert type(weight) is cls
    assert torch.equal(weight.elem, value)
    assert [step.name for step in report.steps] == ["weight"]
    ms.convert(
        ours, transform=lambda name, tensor: tensor.elem.clone() if isinstance(tensor, cls) else ms.conversion.UNCHANGED
    )
    assert ours.weight is weight
    assert torch.equal(weight, value)


FAILURES: dict[str, Callable[[torch.Tensor], object]] = {
    "None": lambda tensor: None,
    "another shape": lambda tensor: tensor[:1].clone(),
    "its input": lambda tensor: tensor,
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_function_that_is_wrong_about_the_last(kind: str) -> None:
    ours = wrapped()
    weight, bias = ours.weight, ours.bias.detach().clone()

    def convert(name: str, tensor: torch.Tensor) -> object:
        return FAILURES[kind](tensor) if name == "bias" else tensor.to(torch.float64)

    with pytest.raises(ms.errors.TransformError, match="bias"):
        ms.convert(ours, transform=convert)
    assert ours.weight is weight
    assert weight.elem.dtype is torch.float32
    assert torch.equal(ours.bias, bias)
