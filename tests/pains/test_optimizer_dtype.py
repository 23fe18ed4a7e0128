"""A model that is converted when its optimizer has state already."""

import copy

import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


def trained() -> tuple[nn.Linear, torch.optim.Adam]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    step(module, optimizer)
    return module, optimizer


def step(module: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.ones(1, 3, dtype=module.weight.dtype)).square().sum().backward()
    optimizer.step()


def moments(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    return {state[key].dtype for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}


def test_state_follows(stock_fails: StockFails) -> None:
    theirs, their_optimizer = trained()
    theirs.double()
    stock_fails("the moments stay in the old dtype", moments(their_optimizer) == {torch.float32})

    ours, optimizer = trained()
    groups = copy.deepcopy({**optimizer.param_groups[0], "params": None})
    held = {id(param): copy.deepcopy(state) for param, state in optimizer.state.items()}
    ms.convert(ours, torch.float64, optimizers=[optimizer])
    assert moments(optimizer) == {torch.float64}
    assert {**optimizer.param_groups[0], "params": None} == groups
    assert {id(param) for param in ours.parameters()} == held.keys()
    for param, state in optimizer.state.items():
        assert state["step"].dtype is torch.float32  # where the optimizer wants it
        assert state["step"] == held[id(param)]["step"]
        assert torch.equal(state["exp_avg"], held[id(param)]["exp_avg"].double())


def test_training_goes_on() -> None:
    """As if the model and the optimizer's state had been made in that dtype."""
    right, right_optimizer = trained()
    saved, saved_state = copy.deepcopy(right.state_dict()), copy.deepcopy(right_optimizer.state_dict())
    right = nn.Linear(3, 2, dtype=torch.float64)
    right.load_state_dict(saved)
    right_optimizer = torch.optim.Adam(right.parameters())
    right_optimizer.load_state_dict(saved_state)

    ours, optimizer = trained()
    ms.convert(ours, torch.float64, optimizers=[optimizer])
    for _ in range(3):
        step(ours, optimizer)
        step(right, right_optimizer)
    assert torch.equal(ours.weight, right.weight)
    assert torch.equal(ours.bias, right.bias)


def test_a_failure_leaves_the_state_too() -> None:
    ours, optimizer = trained()
    loss = ours(torch.ones(1, 3)).sum()
    before = copy.deepcopy(optimizer.state_dict())
    try:
        ms.convert(ours, torch.float64, optimizers=[optimizer])
    except ms.errors.PlacementError:
        pass
    else:
        raise AssertionError(f"a graph waits for backward: {loss}")
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert all(torch.equal(now["state"][number][key], value) for key, value in state.items())
        assert now["state"][number]["exp_avg"].dtype is torch.float32
