"""Lazy buffers in trees of modules, in copies and in programs."""

from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.problems import ProblemKind
from tests.objects.test_lazy import Lazy, Load, every_load, same

# Trees of modules.


@every_load
def test_shared_modules(load: Load) -> None:
    def build(p: torch.Tensor | None) -> nn.Module:
        shared = Lazy(p)
        return nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, Lazy(torch.zeros(1))])})

    for value in (None, torch.arange(3.0)):
        for there in (None, torch.zeros(2), torch.zeros(3)):
            target: Any = build(there)
            load(target, build(value).state_dict())
            assert same(target["a"].p, value)
            assert target["a"] is target["b"][0]


@every_load
def test_two_states_for_a_shared_module(load: Load) -> None:
    shared = Lazy()
    target = nn.ModuleDict({"a": shared, "b": shared})
    one, other = (
        nn.ModuleDict({"a": Lazy(torch.ones(3)), "b": Lazy()}),
        nn.ModuleDict({"a": Lazy(), "b": Lazy(torch.ones(3))}),
    )
    for source in (one, other):
        state: Any = source.state_dict()
        for name in ("weight", "bias"):
            state[f"b.linear.{name}"] = state[f"a.linear.{name}"]
        with pytest.raises(RuntimeError, match="set under one name of a shared module, and None under another"):
            load(target, state)


def test_names_that_are_not_lazy_stay_strict() -> None:
    target = Lazy()
    target.register_buffer("q", None)
    target.register_buffer("r", torch.zeros(2))
    state = {**Lazy(torch.ones(3)).state_dict(), "q": torch.ones(1), "r": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"q"'):
        target.load_state_dict(state)
    plan = ms.plan(target, state)
    assert {problem.name for problem in plan.problems} == {"q", "r"}
    assert [problem.why for problem in plan.problems if problem.kind is ProblemKind.UNEXPECTED] == [
        "registered as None in the model"
    ]


# Copies, and programs.
