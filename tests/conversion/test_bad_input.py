"""Bad input to `convert`: each has an error of its own, which says what to do, and nothing is changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import described, holding, whole
from tests.pains.quantized import quantized_class

Quantized = quantized_class()


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model in the middle of training, with a tie and a buffer of integers; its last tensor is `3.weight`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@contextmanager
def unchanged(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[None]:
    before, who = whole(model), ms.identity(model, optimizers)
    state = [described(one.state_dict()) for one in optimizers]
    yield
    assert whole(model) == before
    assert who.differences(ms.identity(model, optimizers)) == []
    assert [described(one.state_dict()) for one in optimizers] == state


def on_last(make: Callable[[torch.Tensor], Any]) -> Callable[[str, torch.Tensor], Any]:
    """A function that does as it should until it comes to the last tensor."""
    return lambda name, tensor: make(tensor) if name == "3.weight" else tensor.double()


def raising(tensor: torch.Tensor) -> torch.Tensor:
    raise LookupError("no such codebook")


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "None": (lambda tensor: None, "returned no tensor"),
    "a different shape": (lambda tensor: tensor[:1].double(), "another shape"),
    "a sparse tensor of a different shape": (lambda tensor: torch.eye(3).to_sparse(), "another shape"),
    "a wrapper of a different shape": (lambda tensor: Quantized(torch.ones(3), 1.0), "another shape"),
    "its own input": (lambda tensor: tensor, "returned its own input"),
    "its own input without a cast to be done": (lambda tensor: tensor.float(), "returned its own input"),
    "an error": (raising, "the function raised"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_function_that_returns(case: str) -> None:
    make, words = FUNCTIONS[case]
    model, optimizer = trained()
    with unchanged(model, optimizer), pytest.raises(errors.TransformError, match=words) as caught:
        ms.convert(model, transform=on_last(make), optimizers=[optimizer])
    assert "3.weight" in caught.value.where
    assert caught.value.remedy
    assert "[" not in caught.value.found or "shape" in words  # no values of a tensor
    assert (type(caught.value.__cause__) is LookupError) == (case == "an error")


def test_a_function_that_writes_to_its_input() -> None:
    """The bytes are the function's doing, which it is told; all else is what it was."""
    model, optimizer = trained()
    others = [one for one in model.state_dict().values() if one is not model[3].weight]
    before, who = [one.clone() for one in others[:-1]], ms.identity(model, [optimizer])
    with pytest.raises(errors.TransformError, match="changed its input in place") as caught:
        ms.convert(model, transform=on_last(lambda tensor: tensor.mul_(2).double()), optimizers=[optimizer])
    assert "clone" in caught.value.remedy
    assert all(map(torch.equal, before, others))
    assert who == ms.identity(model, [optimizer])
    assert all(param.dtype is torch.float32 for param in model.parameters())


# The same for two.

FOR_ALL: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(2, 2),
    "COO": lambda: torch.eye(2).to_sparse(),
    "CSR": lambda: torch.eye(2).to_sparse_csr(),
    "wrapper": lambda: Quantized(torch.ones(2, 2), 0.5),
    "wrapper on meta": lambda: Quantized(torch.ones(2, 2, device="meta"), 0.5),
}


def pair(kind: str = "buffers") -> nn.Module:
    a, b = torch.ones(2, 2), torch.full((2, 2), 2.0)
    return holding(a=a, b=b) if kind == "buffers" else holding(a=nn.Parameter(a), b=nn.Parameter(b))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["buffers", "parameters"])
@pytest.mark.parametrize("case", FOR_ALL)
def test_the_same_tensor_for_two_slots(case: str, kind: str) -> None:
    module, one = pair(kind), FOR_ALL[case]()
    with unchanged(module), pytest.raises(errors.TransformError, match="same tensor, or the same memory") as caught:
        ms.convert(module, transform=lambda name, tensor: one)
    assert "a and b" in caught.value.where


@pytest.mark.parametrize(
    "case", ["halves", "rows", "a transpose", "a view of what the other has", "of the other", "inside a wrapper"]
)
def test_memory_that_two_slots_would_share(case: str) -> None:
    module, flat = pair(), torch.zeros(4, 2)
    makers: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
        "halves": lambda name, tensor: flat[:2] if name == "a" else flat[1:3],
        "rows": lambda name, tensor: flat[::2] if name == "a" else flat[:2],
        "a transpose": lambda name, tensor: flat[:2] if name == "a" else flat[:2].t(),
        "a view of what the other has": lambda name, tensor: flat[:2] if name == "a" else flat[:2].detach(),
        "of the other": lambda name, tensor: module.b.detach() if name == "a" else ms.conversion.UNCHANGED,
        "inside a wrapper": lambda name, tensor: flat[:2] if name == "a" else Quantized(flat[:2], 0.5),
    }
    with unchanged(module), pytest.raises(errors.TransformError, match="same memory"):
        ms.convert(module, transform=makers[case])


def test_a_buffer_does_not_become_a_parameter() -> None:
    """What a function returns decides on dtype, memory and subclass, and not on what the slot is."""
    module = holding(plain=torch.ones(2), sparse=torch.eye(2).to_sparse())
    ms.convert(module, transform=lambda name, tensor: nn.Parameter(tensor.double()))
    assert type(module.plain) is torch.Tensor
    assert type(module.sparse) is torch.Tensor
    assert not module.plain.requires_grad
    assert not module.sparse.requires_grad


# Arguments.

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a text that is no dtype": ({"dtype": "float65"}, "float65"),
    "a device as a dtype": ({"dtype": torch.device("cpu")}, "to do: ms.convert(model, device='cpu')"),
    "an integer dtype": ({"dtype": torch.int8}, "int8"),
    "a device that is not there": ({"device": "cuda:99"}, "cuda:99"),
    "a device as text, as a dtype": ({"dtype": "cuda:0"}, "to do: ms.convert(model, device='cuda:0')"),
    "nothing": ({}, "nothing to convert to"),
    "a text instead of a function": ({"transform": "double"}, "double"),
    "empty and a function": ({"transform": torch.zeros_like, "empty": True}, "transform="),
    "an optimizer that is none": ({"dtype": torch.float64, "optimizers": [nn.Linear(1, 1)]}, "Linear"),
    "a budget as text": ({"dtype": torch.float64, "max_memory_bytes": "1 GB"}, "max_memory_bytes"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_that_means_nothing(case: str) -> None:
    arguments, words = ARGUMENTS[case]
    model, optimizer = trained()
    with unchanged(model, optimizer), pytest.raises(errors.OptionError) as caught:
        ms.convert(model, **{"optimizers": [optimizer], **arguments})
    assert words in str(caught.value)


def test_an_optimizer_of_another_model() -> None:
    model, optimizer = trained()
    with unchanged(model, optimizer), pytest.raises(errors.OptionError, match="another model"):
        ms.convert(model, torch.float64, optimizers=[optimizer, torch.optim.SGD([nn.Parameter(torch.ones(1))])])


# What is in the way.


@pytest.mark.slow
@pytest.mark.parametrize(
    "to",
    [{"dtype": torch.float64}, {"device": "meta"}, {"transform": lambda name, tensor: tensor.double()}],
    ids=["dtype", "device", "transform"],
)
def test_a_graph_that_waits_for_backward(to: dict[str, Any]) -> None:
    """It names the result that holds the graph, and where it is; after backward there is nothing in the way."""
    model, optimizer = trained()
    optimizer.zero_grad()
    cost = model(torch.randn(4, 2)).square().sum()
    with unchanged(model, optimizer), pytest.raises(errors.PlacementError, match="waits for backward") as caught:
        ms.convert(model, optimizers=[optimizer], **to)
    assert "`cost` in frame `test_a_graph_that_waits_for_backward`" in caught.value.found
    assert "backward" in caught.value.remedy
    cost.backward()
    ms.convert(model, optimizers=[optimizer], **to)


# Memory.


def test_state_of_an_optimizer_counts() -> None:
    """Moments take as much memory as what they belong to, twice for Adam."""
    model, optimizer = trained()
    without = ms.convert(trained()[0], torch.float64).peak_memory_bytes
    with unchanged(model, optimizer), pytest.raises(errors.MemoryBudgetError):
        ms.convert(model, torch.float64, optimizers=[optimizer], max_memory_bytes=without)
