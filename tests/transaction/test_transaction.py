"""The transaction: a block that does not commit leaves the model as it was, also when interrupts arrive."""

import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.transaction import transaction as transaction_module
from modelstate.transaction.transaction import Transaction, Write, exclusive
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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.log = {"steps": [1, 2]}
    model(torch.ones(1, 2)).sum().backward()
    return model


def change(model: Any, transaction: Transaction) -> None:
    """Adds writes that wait, and changes objects as model code does."""
    for parameter in model.parameters():
        transaction.add(Copy(parameter, torch.full_like(parameter, 7)))
    with transaction.model_code():
        model.log["steps"].append(3)
        model.log["sum"] = model[0].weight.sum().item()
        model[1].bias.grad = None
        model[1].weight.data = torch.zeros(3)


# Commit and rollback.


def test_a_commit_runs_the_writes_before_the_last_steps() -> None:
    model, order = make_model(), list[Any]()
    with exclusive(model), Transaction(model) as transaction:
        transaction.add(Copy(model[0].bias, torch.ones(2)))
        assert model[0].bias.tolist() != [1, 1]
        transaction.at_commit(lambda: order.append(model[0].bias.tolist()))
        transaction.commit()
    assert order == [[1, 1]]


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, None])
def test_a_block_without_a_commit_is_undone(error: type[BaseException] | None) -> None:
    model = make_model()
    before = whole(model)

    def run() -> None:
        with exclusive(model), Transaction(model) as transaction:
            change(model, transaction)
            assert model.log["sum"] == 28
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert whole(model) == before


def test_an_undo_step_that_raises_does_not_prevent_the_others() -> None:
    order: list[str] = []

    def fail() -> None:
        raise OSError("no such device")

    def run() -> None:
        with Transaction(nn.Module()) as transaction:
            transaction.register_undo(lambda: order.append("first"))
            transaction.register_undo(fail)
            raise LookupError("the cause")

    with pytest.raises(errors.RollbackError, match="no such device") as caught:
        run()
    assert order == ["first"]
    assert isinstance(caught.value.__cause__, OSError)


# Waiting writes.


def test_a_write_runs_before_model_code_uses_its_tensor_and_not_earlier() -> None:
    model = make_model()
    with Transaction(model) as transaction:
        for module in (model[0], model[1]):
            transaction.add(Copy(module.weight, torch.ones(2, 2)))
        with transaction.model_code():
            _ = model[0].weight.shape  # metadata only
            assert [write.done for write in transaction.writes] == [False, False]
            assert model[1].weight.sum() == 4
            assert [write.done for write in transaction.writes] == [False, True]


def test_writes_that_read_the_model_run_in_order() -> None:
    model = make_model()
    old = model[0].bias.detach().clone()
    with Transaction(model) as transaction:
        transaction.arm()
        transaction.add(Copy(model[1].bias, model[0].bias.detach()))
        transaction.add(Copy(model[0].bias, torch.ones(2)))
        with transaction.model_code():
            assert model[0].bias.sum() == 2
        assert torch.equal(model[1].bias, old)
        transaction.commit()


# Interrupts.


@pytest.mark.parametrize("function", ["commit", "rollback"])
def test_a_signal_within_commit_and_undo_is_deferred_to_their_end(function: str) -> None:
    model = make_model()
    before, seen = whole(model), list[str]()

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append("deferred")

    def run() -> None:
        with exclusive(model), Transaction(model) as transaction:
            change(model, transaction)
            if function == "commit":
                transaction.at_commit(interrupt)
                transaction.at_commit(lambda: model.log.clear())
                transaction.commit()
            transaction.register_undo(interrupt)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert seen == ["deferred"]
    if function == "commit":
        assert model.log == {}
        assert model[1].bias.tolist() == [7, 7]
    else:
        assert whole(model) == before


def test_two_threads_that_wait_for_each_other_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_module, "_TIMEOUT_SECONDS", 0.3)
    module, raised = nn.Sequential(nn.Linear(2, 2)), list[BaseException]()

    def load_child() -> None:
        try:
            ms.load(module[0], {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
        except errors.ModelBusyError as error:
            raised.append(error)

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=load_child)
        thread.start()
        thread.join(60)

    module.register_load_state_dict_post_hook(hook)
    ms.load(module, {"0.weight": torch.zeros(2, 2), "0.bias": torch.zeros(2)})
    assert len(raised) == 1
    assert not module[0].weight.any()
