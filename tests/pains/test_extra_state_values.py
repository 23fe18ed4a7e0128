"""Extra state that is more than numbers and tensors: the safe way of torch to load refuses it."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from tests.codec.values import same
from tests.pains.conftest import StockFails


@dataclasses.dataclass
class Schedule:
    warmup: int
    decay: float


VALUES: dict[str, Any] = {
    "dataclass": Schedule(10, 0.1),
    "path": Path("/data/train"),
    "random state of NumPy": np.random.RandomState(3).get_state(),
    "scalar of NumPy": np.float32(0.5),
    "array of NumPy": np.arange(3),
    "range": range(3),
}


class Keeps(nn.Module):
    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("name", VALUES)
def test_stock_refuses_it(tmp_path: Path, name: str, stock_fails: StockFails) -> None:
    refused = False
    try:
        torch.save(Keeps(VALUES[name]).state_dict(), tmp_path / "x.pt")
        torch.load(tmp_path / "x.pt", weights_only=True)
    except Exception:
        refused = True
    stock_fails(f"a {name} cannot be saved, or loaded with weights_only", refused)


@pytest.mark.parametrize("name", VALUES)
def test_ours_brings_it_back(tmp_path: Path, name: str) -> None:
    ms.save(Keeps(VALUES[name]), tmp_path / "x.safetensors")
    model = Keeps()
    ms.load(model, tmp_path / "x.safetensors")
    assert same(model.state, VALUES[name])


def test_states_of_random_are_plain(tmp_path: Path) -> None:
    ms.save(Keeps(random.getstate()), tmp_path / "x.safetensors")
    assert ms.open(tmp_path / "x.safetensors").extra["_extra_state"] == random.getstate()


def test_a_snapshot_is_none_in_stock(tmp_path: Path, stock_fails: StockFails) -> None:
    model = Keeps({"seen": [1]})
    state = model.state_dict()
    ms.save(model, tmp_path / "x.safetensors")
    model.state["seen"].append(2)
    stock_fails("what was taken changes with the model", state["_extra_state"] == {"seen": [1, 2]})
    assert ms.open(tmp_path / "x.safetensors").extra["_extra_state"] == {"seen": [1]}
