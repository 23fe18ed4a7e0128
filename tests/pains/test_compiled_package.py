"""A package of AOTInductor: what it takes as weights, what it has no place for, and what it does without any."""

from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import LiveTargetError, WeightsError
from tests.pains.conftest import StockFails
from tests.programs import run_program
from tests.serve.packages import package_of, package_of_torch, without_weights

pytestmark = pytest.mark.slow

X = torch.ones(4, 16)


class Model(nn.Module):
    """A matrix, and what is small: a vector of eight elements, and a number."""

    def __init__(self, k: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16, 8), k))
        self.bias = nn.Parameter(torch.full((8,), k))
        self.register_buffer("scale", torch.tensor(k))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight + self.bias) * self.scale


@pytest.fixture(scope="module")
def ours() -> Path:
    return package_of(Model(), X)


@pytest.fixture(scope="module")
def stocks() -> Path:
    """What torch compiles by itself."""
    return package_of_torch(Model(), X)


def outcome(script: str, path: Path) -> tuple[int, str]:
    """How a process of its own ends, and what it has said."""
    lines = ("import sys, torch", "package = torch._inductor.aoti_load_package(sys.argv[1])", script)
    done = run_program("\n".join(lines), path)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "weight",
    ["torch.full((16, 8), 2.).half()", "torch.full((16, 8), 2.).double()", "torch.arange(300.)[7:135].view(16, 8)"],
    ids=["another dtype", "a wider dtype", "a view of other memory"],
)
def test_weights_of_another_kind_are_taken(weight: str, ours: Path, stocks: Path, stock_fails: StockFails) -> None:
    code, said = outcome(
        f"weight = {weight}\n"
        "package.load_constants({'weight': weight}, check_full_update=True)\n"
        "print('taken', flush=True)\n"
        "print(torch.equal(package(torch.ones(4, 16)), torch.ones(4, 16) @ weight.float() + 1))",
        stocks,
    )
    wrong = said.startswith("taken") and (code < 0 or "False" in said)
    stock_fails("load_constants looks at names alone, and answers are wrong, or the process ends", wrong)

    live = ms.Live(ours)
    value = eval(weight, {"torch": torch})
    with pytest.raises(ms.ModelStateError, match="weight"):
        live.swap({"weight": value, "bias": torch.ones(8), "scale": torch.tensor(1.0)})
    assert torch.equal(live(X), Model()(X))


def test_small_tensors_are_built_in(ours: Path, stocks: Path, stock_fails: StockFails) -> None:
    package = torch._inductor.aoti_load_package(str(stocks))
    names = package.get_constant_fqns()
    state = {name: value.detach() for name, value in Model(2.0).state_dict().items()}
    package.load_constants({name: state[name] for name in names}, check_full_update=True)
    stock_fails("weights that are small are numbers in the code", {"bias", "scale"}.isdisjoint(names))
    stock_fails("a full update leaves them as they were, silently", not torch.equal(package(X), Model(2.0)(X)))

    live = ms.Live(ours)
    assert live.fixed == ()
    live.swap(state)
    assert torch.equal(live(X), Model(2.0)(X))
    with pytest.raises(WeightsError, match="bias"):
        ms.Live(stocks).swap(state)


def test_a_package_without_weights_is_called(stock_fails: StockFails) -> None:
    path = without_weights()
    code, said = outcome("print('loaded', flush=True)\npackage(torch.ones(3, 4))", path)
    stock_fails("a call before there are weights ends the process", said == "loaded\n" and code < 0)

    with pytest.raises(LiveTargetError, match="no weights"):
        ms.Live(path)
