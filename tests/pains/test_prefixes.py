"""Wrappers leave their names in checkpoints, which load without them; another prefix is answered with the rule."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.problems import ProblemKind
from tests.pains.conftest import StockFails
from tests.wrappers import data_parallel


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
        "_fsdp_wrapped_module."
        + name.replace("encoder.1.", "encoder.1._fsdp_wrapped_module.").replace(
            "encoder.", "encoder._fsdp_wrapped_module."
        )
    ),
    "different ones around and within": lambda name: "module." + name.replace("encoder.", "encoder._orig_mod."),
    "a part is compiled": lambda name: name.replace("head.", "head._orig_mod."),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_no_rule_is_needed(case: str, stock_fails: StockFails, tmp_path: Path) -> None:
    wanted = model(2).state_dict()
    state = {WRAPPED[case](name): value for name, value in wanted.items()}
    torch.save(state, tmp_path / "wrapped.pt")
    theirs, ours = model(1), model(1)
    theirs.load_state_dict(state, strict=False)
    lost = any(not torch.equal(value, wanted[name]) for name, value in theirs.state_dict().items())
    stock_fails(f"{case}: with strict=False it is ignored", lost)

    report = ms.load(ours, tmp_path / "wrapped.pt")
    assert report.coverage == 1
    assert "names of the checkpoint are read without" in str(report)
    assert all(torch.equal(value, wanted[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("prefix", ["model.", "net.module."])
def test_another_prefix_is_answered_with_the_rule(prefix: str) -> None:
    wanted = model(2).state_dict()
    state = {prefix + name: value for name, value in wanted.items()}
    ours = model(1)
    with pytest.raises(ms.PlanError) as caught:
        ms.load(ours, state)
    (problem,) = caught.value.problems
    assert problem.kind is ProblemKind.OTHER_NAMES
    assert f"{len(state)} names differ only by the prefix {prefix!r}" in str(caught.value)
    assert f"rules=[{problem.rules[0]}]" in str(caught.value)
    ms.load(ours, state, rules=[eval(problem.rules[0], {"ms": ms})])
    assert all(torch.equal(value, wanted[name]) for name, value in ours.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [data_parallel, torch.compile], ids=["data parallel", "compiled"])
def test_real_wrappers_both_ways(wrap: Callable[[nn.Module], nn.Module], stock_fails: StockFails) -> None:
    plain, wrapped = model(2), wrap(model(3))
    with pytest.raises(RuntimeError, match="Missing key"):
        model(1).load_state_dict(wrapped.state_dict())
    result = wrap(model(1)).load_state_dict(plain.state_dict(), strict=False)
    stock_fails(
        "a bare checkpoint into a wrapped model: nothing fits", len(result.missing_keys) == len(plain.state_dict())
    )

    bare = model(1)
    ms.load(bare, wrapped.state_dict())
    assert torch.equal(bare.head.weight, next(p for n, p in wrapped.named_parameters() if n.endswith("head.weight")))
    ms.load(wrapped, plain.state_dict())
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
    ms.load(ours, twice)
    assert torch.equal(ours.module.weight, state["module.weight"])
