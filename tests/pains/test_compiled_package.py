"""A package of AOTInductor: what it takes as weights, what it has no place for, and what it does without any."""

from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import LiveTargetError
from tests.pains.conftest import StockFails
from tests.programs import run_program
from tests.serve.models import Small, everything
from tests.serve.packages import package_of, package_of_torch, without_weights

pytestmark = pytest.mark.slow

X = torch.arange(12.0).view(3, 4)


def constants(package: Any, model: Small) -> dict[str, torch.Tensor]:
    """The values in a model of all that a package holds, among them a constant of its code."""
    values = {**model.state_dict(), "shift": model.shift, "_tensor_constant0": model.constant}
    return {name: values[name] for name in package.get_constant_fqns()}


@pytest.fixture(scope="module")
def ours() -> Path:
    return package_of(everything(), X)


@pytest.fixture(scope="module")
def stocks() -> Path:
    """What torch compiles by itself."""
    return package_of_torch(Small(), X)


def outcome(script: str, path: Path) -> tuple[int, str]:
    """How a process of its own ends, and what it has said."""
    lines = ("import sys, torch", "package = torch._inductor.aoti_load_package(sys.argv[1])", script)
    done = run_program("\n".join(lines), path)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "weight",
    ["torch.full((16, 4), 2.).half()", "torch.full((16, 4), 2.).double()", "torch.arange(300.)[7:71].view(16, 4)"],
    ids=["another dtype", "a wider dtype", "a view of other memory"],
)
def test_weights_of_another_kind_are_taken(weight: str, ours: Path, stocks: Path, stock_fails: StockFails) -> None:
    code, said = outcome(
        "from tests.pains.test_compiled_package import Small, X, constants\n"
        f"weight, model = {weight}, Small()\n"
        "package.load_constants({**constants(package, model), 'lin.weight': weight}, check_full_update=True)\n"
        "print('taken', flush=True)\n"
        "model.load_state_dict({'lin.weight': weight, 'again': weight}, strict=False)\n"
        "print(torch.allclose(package(X), model(X)))",
        stocks,
    )
    wrong = said.startswith("taken") and (code < 0 or "False" in said)
    stock_fails("load_constants looks at names alone, and answers are wrong, or the process ends", wrong)

    live = ms.Live(ours, training=True)
    value = eval(weight, {"torch": torch})[:4]
    with pytest.raises(ms.ModelStateError, match="weight"):
        live.swap({**everything().state_dict(), "a.weight": value})
    assert torch.allclose(live(X), everything()(X))


def test_small_tensors_are_built_in(ours: Path, stocks: Path, stock_fails: StockFails) -> None:
    package = torch._inductor.aoti_load_package(str(stocks))
    names = package.get_constant_fqns()
    trained = Small(2.0)
    package.load_constants(constants(package, trained), check_full_update=True)
    stock_fails("weights that are small are numbers in the code", {"bias", "scale"}.isdisjoint(names))
    stock_fails("a full update leaves them as they were, silently", not torch.allclose(package(X), trained(X)))

    live, other = ms.Live(ours, training=True), everything(1)
    live.swap(other.state_dict())
    other.shift = everything().shift  # a buffer that no checkpoint has comes with the program
    assert torch.allclose(live(X), other(X))
    with pytest.raises(ms.ModelStateError, match="bias"):
        ms.Live(stocks).swap(trained.state_dict())


def test_a_package_without_weights_is_called(stock_fails: StockFails) -> None:
    path = without_weights()
    code, said = outcome("print('loaded', flush=True)\npackage(torch.ones(3, 4))", path)
    stock_fails("a call before there are weights ends the process", said == "loaded\n" and code < 0)

    with pytest.raises(LiveTargetError, match="no weights"):
        ms.Live(path)
