"""Values of another kind are bent into shape by stock torch, without a word."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import whole
from tests.pains.conftest import StockFails


class Holder(nn.Module):
    """One tensor, as a parameter or as a buffer."""

    def __init__(self, tensor: torch.Tensor, *, parameter: bool = False) -> None:
        super().__init__()
        if parameter:
            self.value = nn.Parameter(tensor.clone())
        else:
            self.register_buffer("value", tensor.clone())


FLOATS, INTEGERS = torch.zeros(2), torch.zeros(2, dtype=torch.int64)

BENT: dict[str, tuple[torch.Tensor, torch.Tensor, list[float], tuple[object, ...]]] = {
    "an int8 payload into floats": (
        FLOATS,
        torch.tensor([-128, 127], dtype=torch.int8),
        [-128.0, 127.0],
        ("WRONG_DTYPE", "float32", "int8", "casting changes their kind"),
    ),
    "complex into real": (
        FLOATS,
        torch.tensor([1 + 2j, 3 - 4j]),
        [1.0, 3.0],
        ("WRONG_DTYPE", "float32", "complex64", "casting changes their kind"),
    ),
    "floats into integers": (
        INTEGERS,
        torch.tensor([1.75, -2.75]),
        [1.0, -2.0],
        ("WRONG_DTYPE", "int64", "float32", "casting changes their kind"),
    ),
    "float64 into float32": (
        FLOATS,
        torch.tensor([1e300, 1.0], dtype=torch.float64),
        [float("inf"), 1.0],
        ("WRONG_DTYPE", "float32", "float64", "casting loses values"),
    ),
    "large integers into small ones": (
        torch.zeros(2, dtype=torch.int8),
        torch.tensor([300, 1]),
        [44.0, 1.0],
        ("WRONG_DTYPE", "int8", "int64", "casting loses values"),
    ),
    "one element into a scalar": (torch.zeros(()), torch.tensor([7.0]), [7.0], ("OTHER_DIMENSIONS", (), (1,), "")),
}


@pytest.mark.parametrize("case", BENT)
def test_what_does_not_fit_is_a_problem(case: str, stock_fails: StockFails) -> None:
    there, value, bent, problem = BENT[case]
    theirs, ours = Holder(there), Holder(there)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex numbers get one, once in a process
        theirs.load_state_dict({"value": value})
    stock_fails(f"{case}: silently", theirs.value.reshape(-1).tolist() == bent)

    before = whole(ours)
    with pytest.raises(ms.PlanError) as caught:
        ms.load(ours, {"value": value})
    (found,) = caught.value.problems
    assert (found.kind.name, found.expected, found.found, found.why) == problem
    assert whole(ours) == before


def test_a_parameter_does_not_turn_a_buffer_into_one(stock_fails: StockFails) -> None:
    state: dict[str, Any] = {"value": nn.Parameter(torch.ones(2))}
    theirs, ours = Holder(FLOATS), Holder(FLOATS)
    theirs.load_state_dict(state, assign=True)
    stock_fails("a parameter takes a buffer's place, and trains", "value" in dict(theirs.named_parameters()))

    ms.load(ours, state)
    assert list(dict(ours.named_buffers())) == ["value"]
    assert not list(ours.parameters())
    assert ours.value.tolist() == [1.0, 1.0]
