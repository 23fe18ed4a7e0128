"""The versions of modules go where their names go."""

from pathlib import Path

import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.pains.test_versions import Turned


def test_versions_follow_the_rules(stock_fails: StockFails, tmp_path: Path) -> None:
    """A file of a wrapped model says `module.0` of what the model calls `0`, in its versions too."""
    torch.save(nn.ModuleDict({"module": nn.Sequential(Turned(10.0))}).state_dict(), tmp_path / "wrapped.pt")
    theirs, ours = nn.Sequential(Turned()), nn.Sequential(Turned())
    state = torch.load(tmp_path / "wrapped.pt")
    theirs.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    stock_fails("the usual way to take a prefix off loses the versions", theirs[0].weight[0, 1].item() == 13)

    ms.load(ours, tmp_path / "wrapped.pt", rules=[ms.rules.Prefix(strip="module.")])
    assert torch.equal(ours[0].weight, Turned(10.0).weight)
