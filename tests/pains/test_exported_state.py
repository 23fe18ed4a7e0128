"""The state of an exported program: its names are not those of the checkpoints, and it takes anything."""

from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


class Wrapper(nn.Module):
    """A level that the state dict does not show."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_state_dict_post_hook(Wrapper._leave_out)
        self.register_load_state_dict_pre_hook(Wrapper._put_in)

    @staticmethod
    def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}layer.")]:
            state[prefix + name.removeprefix(f"{prefix}layer.")] = state.pop(name)

    @staticmethod
    def _put_in(module: "Wrapper", state: dict[str, Any], prefix: str, *_: object) -> None:
        for name in module.layer.state_dict():
            if prefix + name in state:
                state[f"{prefix}layer.{name}"] = state.pop(prefix + name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Wrapper(nn.Linear(4, 4)))


def test_a_checkpoint_has_other_names(stock_fails: StockFails) -> None:
    old, new = model(), model()
    program = torch.export.export(old, (X,))
    with pytest.raises(RuntimeError, match="Missing key"):
        program.module().load_state_dict(new.state_dict())
    stock_fails("the program does not take the checkpoint of its own model", True)

    live = ms.Live(torch.export.export(model(), (X,)), names=ms.serve.NameMap.of(model()))
    for state in (new.state_dict(), ms.serve.runtime_state(new)):
        live.swap(model().state_dict())
        live.swap(state)
        assert torch.allclose(live(X), new(X))


def test_a_typo_is_taken(stock_fails: StockFails) -> None:
    program, trained = torch.export.export(model(), (X,)), ms.serve.runtime_state(model())
    trained["0.wieght"] = trained.pop("0.weight")
    expected = program.module()(X)
    program.state_dict["0.wieght"] = trained["0.wieght"]
    stock_fails("a name that nobody has changes nothing, silently", torch.equal(program.module()(X), expected))

    live = ms.Live(torch.export.export(model(), (X,)))
    with pytest.raises(ms.PlanError, match=r"0\.wieght"):
        live.swap(trained)


def test_a_wrong_shape_is_taken(stock_fails: StockFails) -> None:
    program, trained = torch.export.export(model(), (X,)), ms.serve.runtime_state(model())
    expected = program.module()(X)
    trained["0.bias"] = nn.Parameter(torch.ones(1))
    program.state_dict["0.bias"] = trained["0.bias"]
    found = program.module()(X)
    stock_fails("a shape that broadcasts gives other answers, silently", found.shape == expected.shape)

    live = ms.Live(torch.export.export(model(), (X,)))
    with pytest.raises(ms.PlanError, match=r"0\.bias"):
        live.swap(trained)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.a(x))
        return found


def test_two_values_for_tied_weights_are_taken(stock_fails: StockFails) -> None:
    program = torch.export.export(Tied(), (X,))
    values = {"a.weight": torch.eye(4), "b.weight": 2 * torch.eye(4)}
    module = program.module()
    module.load_state_dict(values)
    stock_fails("of two values for tied weights the last one wins, silently", torch.allclose(module(X), X * 4))

    live = ms.Live(torch.export.export(Tied(), (X,)))
    with pytest.raises(ms.PlanError, match="values differ"):
        live.swap(values)
    live.swap({name: 3 * torch.eye(4) for name in values})
    assert torch.allclose(live(X), 9 * X)


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
