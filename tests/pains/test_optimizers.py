"""Every optimizer that runs on the CPU, made before the load or after it, trains the weights that were loaded."""

import inspect
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails

OPTIMIZERS = {
    name: cls
    for name, cls in sorted(vars(torch.optim).items())
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
EAGER = ("Adagrad",)
"""Those that make their state when they are made, and not in the first step."""
CASES = [
    (name, order, target)
    for name, order, target in product(OPTIMIZERS, ("before", "after"), ("materialised", "skeleton"))
    if not (name in EAGER and order == "before" and target == "skeleton")  # see the last test
]
TOKENS = torch.arange(6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.head(self.embed(tokens)))


class Matrices(nn.Module):
    """For the optimizer that takes matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5, bias=False), nn.Linear(5, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(nn.functional.one_hot(tokens, 7).float())))


class Sparse(nn.Module):
    """For the optimizer that takes sparse gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)


MODELS = {"Muon": Matrices, "SparseAdam": Sparse}


def model(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS.get(name, Net)()


def optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = OPTIMIZERS[name](module.parameters(), lr=0.05)
    return made


def train(module: nn.Module, steps: torch.optim.Optimizer) -> dict[str, Any]:
    def closure() -> torch.Tensor:
        steps.zero_grad()
        loss: torch.Tensor = (module(TOKENS) - 0.5).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        steps.step(closure)
    return module.state_dict()


def reference(name: str, path: Path) -> dict[str, Any]:
    """What stock torch makes of it: a model with memory, the load, and then the optimizer."""
    module = model(name, 2)
    module.load_state_dict(torch.load(path))
    return train(module, optimizer(name, module))


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.save(model(request.node.callspec.params["name"], 1).state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.mark.slow_except(16)
@pytest.mark.parametrize(("name", "order", "target"), CASES)
@pytest.mark.parametrize("in_place", [False, True])
def test_training(name: str, order: str, target: str, in_place: bool, path: Path) -> None:
    if target == "materialised":
        module = model(name, 3)
    else:
        with ms.skeleton():
            module = model(name, 3)
    if order == "before":
        steps = optimizer(name, module)
        ms.load(module, path, in_place=in_place, optimizers=[steps])
    else:
        ms.load(module, path, in_place=in_place)
        steps = optimizer(name, module)
    trained, expected = train(module, steps), reference(name, path)
    for key, value in expected.items():
        # Not bit for bit: the last bits of a sum depend on where in memory its operands begin.
        torch.testing.assert_close(
            trained[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    loaded = torch.load(path)
    assert any(not torch.equal(trained[key], loaded[key]) for key, _ in module.named_parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stock_needs_the_optimizer_last(name: str, path: Path, stock_fails: StockFails) -> None:
    with ms.skeleton():
        module = model(name, 3)
    steps = optimizer(name, module)
    loaded = torch.load(path)
    module.load_state_dict(loaded, assign=True)
    before = {key: param.detach().clone() for key, param in module.named_parameters()}
    with suppress(RuntimeError, IndexError, NotImplementedError):  # some notice that there is nothing to train
        train(module, steps)
    still = all(torch.equal(param, before[key]) for key, param in module.named_parameters())
    stock_fails(f"{name}, made before a load with assign=True, trains nothing", still)


@pytest.mark.parametrize("name", EAGER)
def test_state_of_parameters_that_had_no_memory(name: str, stock_fails: StockFails, tmp_path: Path) -> None:
    torch.save(model(name, 1).state_dict(), tmp_path / "model.pt")
    with ms.skeleton():
        theirs, module = model(name, 3), model(name, 3)
    their_steps, steps = optimizer(name, theirs), optimizer(name, module)
    theirs.load_state_dict(torch.load(tmp_path / "model.pt"), assign=True)
    for group in their_steps.param_groups:
        group["params"] = list(theirs.parameters())
    stock_fails("state that was made on meta is lost", not any(p in their_steps.state for p in theirs.parameters()))

    ms.load(module, tmp_path / "model.pt", optimizers=[steps])
    assert not any(
        value.is_meta for state in steps.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )
    trained, expected = train(module, steps), reference(name, tmp_path / "model.pt")
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value)
