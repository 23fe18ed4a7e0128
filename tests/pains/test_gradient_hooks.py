"""A hook on a parameter that had no memory yet goes on working when it gets some."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails

HOOKS: dict[str, Callable[[nn.Parameter, Callable[[Any], None]], Any]] = {
    "register_hook": lambda param, hook: param.register_hook(hook),
    "register_post_accumulate_grad_hook": lambda param, hook: param.register_post_accumulate_grad_hook(hook),
}


def linear(target: str) -> nn.Linear:
    if target == "materialised":
        return nn.Linear(3, 2)
    with ms.skeleton():
        return nn.Linear(3, 2)


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("target", ["materialised", "skeleton"])
def test_hooks_are_called_after_the_load(kind: str, target: str, stock_fails: StockFails) -> None:
    theirs, their_calls = linear(target), list[Any]()
    HOOKS[kind](theirs.weight, their_calls.append)
    theirs.load_state_dict(nn.Linear(3, 2).state_dict(), assign=True)
    theirs(torch.ones(1, 3)).sum().backward()
    stock_fails("assign=True loses the hooks of a parameter", not their_calls)

    model, calls = linear(target), list[Any]()
    handle = HOOKS[kind](model.weight, calls.append)
    ms.load(model, nn.Linear(3, 2).state_dict())
    model(torch.ones(1, 3)).sum().backward()
    assert len(calls) == 1
    handle.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert len(calls) == 1
