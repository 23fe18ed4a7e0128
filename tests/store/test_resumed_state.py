"""What comes back is what was saved: optimizers of others, dtypes, and the run that was saved last."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import OptimizerStateError


class Rows(torch.optim.Optimizer):
    """State of another shape and of other dtypes than the parameter, as those of quantized optimizers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["rows"] = torch.zeros(param.shape[:1])
                    state["codes"] = torch.zeros(7, dtype=torch.uint8)
                    state["master"] = param.detach().to(torch.float32, copy=True)
                state["rows"] += param.grad.float().pow(2).sum(tuple(range(1, param.dim())))
                state["codes"] += 1
                state["master"] -= group["lr"] * param.grad.float()
                param.copy_(state["master"])


class Counting(torch.optim.SGD):
    calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}


def trained(make: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    optimizer = make(model.parameters())
    of = {"model": model, "optimizer": optimizer}
    train(of, 3)
    return of


def train(of: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        of["optimizer"].zero_grad()
        param = next(of["model"].parameters())
        of["model"](torch.full((2, 4), step + 1.0, dtype=param.dtype)).square().mean().backward()
        of["optimizer"].step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [Rows, torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW], ids=lambda m: m.__name__
)
def test_resume_is_exact(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    of, store = trained(make, dtype), ms.Store(tmp_path)
    store.save(3, of)
    again = {"model": nn.Linear(4, 3).to(dtype)}
    again["optimizer"] = make(again["model"].parameters())
    store.restore(again)
    for one, other in zip(of["optimizer"].state.values(), again["optimizer"].state.values(), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key]))
            assert torch.as_tensor(one[key]).dtype == torch.as_tensor(other[key]).dtype
    train(of, 5)
    train(again, 5)
    assert all(map(torch.equal, of["model"].parameters(), again["model"].parameters()))


def test_state_under_other_keys_is_restored_and_a_layout_that_nothing_takes_is_refused(tmp_path: Path) -> None:
    of, again = (trained(lambda params: torch.optim.SGD(params, 0.1)) for _ in range(2))
    of["optimizer"].state["global"]["k"] = 3
    store = ms.Store(tmp_path / "run")
    store.save(1, of)
    store.restore(again)
    assert again["optimizer"].state["global"] == {"k": 3}
    with pytest.raises(OptimizerStateError, match="no load_state_dict"):
        store.save(2, trained(lambda params: Counting(params, 0.1)))
    assert store.steps() == (1,)


def test_the_latest_is_what_was_saved_last(tmp_path: Path) -> None:
    store, of = ms.Store(tmp_path), {"model": nn.Linear(1, 1)}
    for step in (10, 20, 30):
        store.save(step, of)
    store.restore(of, 10)
    of["model"].weight.data.fill_(7)
    store.save(15, of)
    assert store.latest() == 15
    again = {"model": nn.Linear(1, 1)}
    assert ms.resumable(store, again, steps=50, save_every=5).start == 15
    assert again["model"].weight.item() == 7
    assert store.steps() == (10, 15, 20, 30)
