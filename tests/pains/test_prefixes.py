"""Wrappers leave their names in checkpoints: they are recognised, and the rule that takes them out is proposed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.plan.problems import OtherNames, Problem
from tests.pains.conftest import StockFails


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        self.head = nn.Linear(4, 2)


def model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def before(prefix: str) -> Callable[[str], str]:
    return lambda name: prefix + name


def after(part: str, wrapper: str) -> Callable[[str], str]:
    return lambda name: name.replace(part, part + wrapper)


WRAPPED: dict[str, Callable[[str], str]] = {
    "data parallel": before("module."),
    "compiled": before("_orig_mod."),
    "sharded": before("_fsdp_wrapped_module."),
    "checkpointed": before("_checkpoint_wrapped_module."),
    "compiled, then data parallel": before("module._orig_mod."),
    "data parallel, then compiled": before("_orig_mod.module."),
    "twice the same": before("module.module."),
    "all three": before("module._orig_mod._fsdp_wrapped_module."),
    "data parallel within": after("encoder.", "module."),
    "compiled within": after("encoder.", "_orig_mod."),
    "sharded within": after("encoder.", "_fsdp_wrapped_module."),
    "every layer compiled": lambda name: name.replace("encoder.0.", "encoder.0._orig_mod.").replace(
        "encoder.1.", "encoder.1._orig_mod."
    ),
    "two within": after("encoder.", "_fsdp_wrapped_module._checkpoint_wrapped_module."),
    "sharded around and within": lambda name: (
        "_fsdp_wrapped_module." + name.replace("encoder.1.0.", "encoder._fsdp_wrapped_module.1._fsdp_wrapped_module.0.")
    ),
    "different ones around and within": lambda name: "module." + name.replace("encoder.", "encoder._orig_mod."),
    "a part is compiled": lambda name: name.replace("head.", "head._orig_mod."),
}


def proposed(problems: tuple[Problem, ...]) -> list[Any]:
    """The rules of the problems, from the lines that a reader would paste."""
    assert all(isinstance(problem, OtherNames) for problem in problems)
    return [eval(problem.rule, {"ms": ms, "re": re}) for problem in problems if isinstance(problem, OtherNames)]


@pytest.mark.parametrize("case", WRAPPED)
def test_the_proposed_rule_works(case: str, stock_fails: StockFails, tmp_path: Path) -> None:
    wanted = model(2).state_dict()
    state = {WRAPPED[case](name): value for name, value in wanted.items()}
    torch.save(state, tmp_path / "wrapped.pt")
    theirs, ours = model(1), model(1)
    theirs.load_state_dict(state, strict=False)
    lost = any(not torch.equal(value, wanted[name]) for name, value in theirs.state_dict().items())
    stock_fails(f"{case}: with strict=False it is ignored", lost)

    with pytest.raises(ms.PlanError) as caught:
        ms.load(ours, tmp_path / "wrapped.pt")
    rules = proposed(caught.value.problems)
    assert all(problem.rule in str(caught.value) for problem in caught.value.problems)
    assert len(str(caught.value).splitlines()) <= 6
    assert ms.load(ours, tmp_path / "wrapped.pt", rules=rules).coverage == 1
    assert all(torch.equal(value, wanted[name]) for name, value in ours.state_dict().items())


def test_each_group_is_counted() -> None:
    state = {f"module.{name}": value for name, value in model(2).state_dict().items()}
    (problem,) = ms.plan(model(1), state).problems
    assert isinstance(problem, OtherNames)
    assert problem.count == len(state)
    assert f"{len(state)} names differ only by the prefix 'module.'" in problem.line()


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["data parallel", "compiled"])
def test_real_wrappers_both_ways(wrap: Callable[[nn.Module], nn.Module], stock_fails: StockFails) -> None:
    plain, wrapped = model(2), wrap(model(3))
    with pytest.raises(RuntimeError, match="Missing key"):
        model(1).load_state_dict(wrapped.state_dict())
    result = wrap(model(1)).load_state_dict(plain.state_dict(), strict=False)
    stock_fails(
        "a bare checkpoint into a wrapped model: nothing fits", len(result.missing_keys) == len(plain.state_dict())
    )

    bare = model(1)
    ms.load(bare, wrapped.state_dict(), rules=proposed(ms.plan(bare, wrapped.state_dict()).problems))
    assert torch.equal(bare.head.weight, next(p for n, p in wrapped.named_parameters() if n.endswith("head.weight")))
    ms.load(wrapped, plain.state_dict(), rules=proposed(ms.plan(wrapped, plain.state_dict()).problems))
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name.partition(".")[2]])


def test_a_wrapper_of_the_models_own_stays() -> None:
    """A child may be called `module` for reasons of its own."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    state = Own().state_dict()
    ours = Own()
    assert ms.load(ours, state).coverage == 1
    assert torch.equal(ours.module.weight, state["module.weight"])
    twice = {f"module.{name}": value for name, value in state.items()}
    ours = Own()
    ms.load(ours, twice, rules=proposed(ms.plan(ours, twice).problems))
    assert torch.equal(ours.module.weight, state["module.weight"])
