"""The state of an exported program has no extra state: stock torch drops it, and a swap is refused."""

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


class Scaled(nn.Module):
    """The state dict has a number that is no tensor."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), scale

    def get_extra_state(self) -> float:
        return self.scale

    def set_extra_state(self, state: float) -> None:
        self.scale = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * self.scale
        return found


def test_extra_state_is_dropped(stock_fails: StockFails) -> None:
    old, new = Scaled(1.0), Scaled(3.0)
    program = torch.export.export(old, (X,))
    program.module().load_state_dict(
        {name: value for name, value in new.state_dict().items() if name in program.state_dict}
    )
    stock_fails("the program's state has no extra state", "_extra_state" not in program.state_dict)
    module = program.module()
    found = module.load_state_dict(new.state_dict(), strict=False)
    stock_fails("which strict=False passes over", found.unexpected_keys == ["_extra_state"])
    stock_fails("so that answers are those of no checkpoint", not torch.allclose(module(X), new(X)))

    live = ms.Live(torch.export.export(old, (X,)), names=ms.serve.NameMap.of(old))
    with pytest.raises(ms.PlanError, match="_extra_state: the program has the extra state that it was exported with"):
        live.swap(new.state_dict())
    assert torch.allclose(live(X), old(X))
