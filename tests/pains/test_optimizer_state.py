"""State that an optimizer has from the start is there after the load, or the load says what to do."""

from pathlib import Path

import pytest
import torch

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.pains.test_optimizers import EAGER, OPTIMIZERS, model, optimizer, reference, train


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_they_are(name: str) -> None:
    assert bool(optimizer(name, model(name, 1)).state) == (name in EAGER)


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
