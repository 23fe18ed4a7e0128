"""An optimizer's state goes by positions: parameters that have changed places get each other's."""

import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


class Net(nn.Module):
    def __init__(self, *order: str) -> None:
        super().__init__()
        made = {"weight": nn.Parameter(torch.ones(2, 2)), "scale": nn.Parameter(torch.ones(2))}
        made["shift"] = nn.Parameter(torch.ones(2))
        for name in order:
            self.register_parameter(name, made[name])


def trained(*order: str) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(*order)
    optimizer = torch.optim.Adam(net.parameters())
    for grad, name in enumerate(("weight", "scale", "shift"), 1):
        param = net.get_parameter(name)
        param.grad = torch.full_like(param, float(grad))
    optimizer.step()
    return net, optimizer


def test_a_parameter_of_another_shape(stock_fails: StockFails) -> None:
    """The moments of a (2, 2) parameter end up at one of shape (2,), and nothing says so."""
    saved, optimizer = trained("weight", "scale", "shift")
    net = Net("scale", "weight", "shift")
    theirs = torch.optim.Adam(net.parameters())
    theirs.load_state_dict(optimizer.state_dict())
    stock_fails("state of another shape is taken", theirs.state[net.scale]["exp_avg"].shape == (2, 2))

    ours = torch.optim.Adam(net.parameters())
    ms.load_optimizer_state(net, ours, ms.optimizer_state(saved, optimizer))
    for name, param in net.named_parameters():
        assert torch.equal(ours.state[param]["exp_avg"], optimizer.state[saved.get_parameter(name)]["exp_avg"])


def test_a_parameter_of_the_same_shape(stock_fails: StockFails) -> None:
    saved, optimizer = trained("weight", "scale", "shift")
    net = Net("weight", "shift", "scale")
    theirs = torch.optim.Adam(net.parameters())
    theirs.load_state_dict(optimizer.state_dict())
    wrong = torch.equal(theirs.state[net.shift]["exp_avg"], optimizer.state[saved.scale]["exp_avg"])
    stock_fails("one parameter's moments go to another", wrong)

    ours = torch.optim.Adam(net.parameters())
    ms.load_optimizer_state(net, ours, ms.optimizer_state(saved, optimizer))
    assert torch.equal(ours.state[net.shift]["exp_avg"], optimizer.state[saved.shift]["exp_avg"])
