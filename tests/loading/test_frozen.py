"""Compiled code in which Inductor has made constants of the weights (`torch._inductor.config.freezing`)."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

import modelstate as ms

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def freezing() -> Iterator[None]:
    with config.patch(freezing=True):
        yield
    torch._dynamo.reset()
    sys.modules.pop("torch._inductor.freezing", None)  # every later commit would drop what is compiled


CHANGES: dict[str, Callable[[nn.Module, dict[str, torch.Tensor]], Any]] = {
    "load": ms.load,
    "load_state_dict": ms.load_state_dict,
    "convert": lambda model, values: ms.convert(model, transform=lambda name, _: values[name].clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_compiled_code_computes_with_the_new_weights(change: str) -> None:
    """A product of matrices is a call of torch's own kernel: no C++ has to be compiled."""
    model, x = nn.Sequential(nn.Linear(3, 2, bias=False)).eval(), torch.ones(4, 3)
    compiled = torch.compile(model)
    with torch.no_grad():
        old = compiled(x)
    report = CHANGES[change](model, {name: value + 1 for name, value in model.state_dict().items()})
    with torch.no_grad():
        new = compiled(x)
        torch.testing.assert_close(new, model(x))
    torch.testing.assert_close(new, old + 3)
    if isinstance(report, ms.LoadReport):
        assert any("compiled code is dropped" in note for note in report.notes)
