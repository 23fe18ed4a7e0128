"""A load that fails leaves the model alone; stock torch leaves it half loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import described, described_module, whole
from tests.pains.conftest import StockFails


class Scale(nn.Module):
    """Its extra state is one value, and it refuses some values when it has already begun to take them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.factor = 1.0
        self.seen: list[Any] = []

    def get_extra_state(self) -> Any:
        return {"factor": self.factor}

    def set_extra_state(self, state: Any) -> None:
        self.seen.append(state)
        self.factor = state["factor"]
        if self.factor <= 0:
            raise ValueError("a factor is positive")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale.weight * self.last(self.norm(self.first(x)))


def trained(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    """A model with gradients, and an optimizer with state."""
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def broken(how: str) -> dict[str, Any]:
    """A state dict in which one of the last entries is wrong."""
    state: dict[str, Any] = trained(2)[0].state_dict()
    match how:
        case "size mismatch":
            state["last.bias"] = torch.ones(5)
        case "missing key":
            del state["last.bias"]
        case "unexpected key":
            state["last.gain"] = torch.ones(2)
        case "not a tensor":
            state["last.bias"] = [0.0, 1.0]
        case "extra state refused":
            state["scale._extra_state"] = {"factor": -1.0}
        case "extra state missing":
            del state["scale._extra_state"]
    return state


BROKEN = (
    "size mismatch",
    "missing key",
    "unexpected key",
    "not a tensor",
    "extra state refused",
    "extra state missing",
)


def from_file(net: nn.Module, state: Any, folder: Path) -> None:
    torch.save(state, folder / "state.pt")
    ms.load(net, folder / "state.pt")


OURS: dict[str, Callable[[nn.Module, Any, Path], Any]] = {
    "load_state_dict": lambda net, state, _: ms.load_state_dict(net, state),
    "load from a file": from_file,
}


@pytest.mark.parametrize("how", BROKEN)
def test_stock_leaves_a_mixture(how: str, stock_fails: StockFails) -> None:
    net, _ = trained(1)
    before, wanted = described_module(net), broken(how)
    with pytest.raises((RuntimeError, ValueError)):
        net.load_state_dict(wanted)
    overwritten = torch.equal(net.first.weight, wanted["first.weight"])
    stock_fails(f"{how}: the tensors that fit are overwritten", overwritten and described_module(net) != before)


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("load", OURS)
def test_ours_leaves_everything_bit_for_bit(how: str, load: str, tmp_path: Path) -> None:
    net, optimizer = trained(1)
    before, optimizer_before = whole(net), described(optimizer.state_dict())
    with pytest.raises((RuntimeError, ValueError)) as caught:
        OURS[load](net, broken(how), tmp_path)
    assert isinstance(caught.value, ms.ModelStateError) or load == "load_state_dict"
    assert whole(net) == before
    assert described(optimizer.state_dict()) == optimizer_before
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in net.parameters()]
