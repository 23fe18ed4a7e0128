"""The transaction: a block that does not commit leaves the model as it was, also when interrupts arrive."""

from typing import Any

import torch
from torch import nn

from modelstate.transaction.exclusive import exclusive
from modelstate.transaction.transaction import Transaction, Write
from tests.loading.fingerprint import whole


class Copy(Write):
    """A write that copies a value into a tensor."""

    __slots__ = ()

    def run(self, transaction: Transaction | None) -> None:
        if transaction is not None:
            transaction.save_tensor(self.target)
        with torch.no_grad():
            self.target.copy_(self.value)


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.extra = {"steps": [1, 2]}
    model(torch.ones(1, 2)).sum().backward()
    return model


def change(model: nn.Module, transaction: Transaction) -> None:
    """Adds writes that wait, and changes objects as model code does."""
    for parameter in model.parameters():
        transaction.add(Copy(parameter, torch.full_like(parameter, 7)))
    with transaction.model_code():
        model.extra["steps"].append(3)
        model.extra["new"] = model[0].weight.sum()
        model[1].bias.grad = None
        model[1].weight.data = torch.zeros(3)


def test_a_commit_runs_the_writes_and_then_the_last_steps() -> None:
    model, order = make_model(), list[Any]()
    with exclusive(model), Transaction(model) as transaction:
        transaction.add(Copy(model[0].bias, torch.ones(2)))
        assert model[0].bias.tolist() != [1, 1]
        transaction.commit(lambda: order.append(model[0].bias.tolist()))
    assert order == [[1, 1]]
    transaction.rollback()  # has no effect after the commit
    assert model[0].bias.tolist() == [1, 1]


def test_a_block_without_a_commit_is_undone() -> None:
    model = make_model()
    before = whole(model)
    with exclusive(model), Transaction(model) as transaction:
        change(model, transaction)
        assert model.extra["new"].item() == 28
    assert whole(model) == before
