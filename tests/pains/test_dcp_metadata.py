"""The `.metadata` of a distributed checkpoint is a pickle, and stock torch runs whatever it says."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import whole
from tests.pains.conftest import StockFails
from tests.programs import run_program


class Hostile:
    """Its pickle writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.write_text, (self.marker, "was here")


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {name: value.clone() for name, value in nn.Linear(3, 2).state_dict().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed is not initialised
        dcp.save(state(), checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


STOCK = """
import sys, warnings
import torch.distributed.checkpoint as dcp
from torch import nn
warnings.simplefilter("ignore")
dcp.load(nn.Linear(3, 2).state_dict(), checkpoint_id=sys.argv[1])
"""


@pytest.mark.slow
def test_a_hostile_one(folder: Path, tmp_path: Path, stock_fails: StockFails) -> None:
    marker = tmp_path / "marker"
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(marker)))
    run_program(STOCK, folder)
    stock_fails("torch.distributed.checkpoint runs the code in .metadata", marker.exists())

    marker.unlink(missing_ok=True)
    model = nn.Linear(3, 2)
    before = whole(model)
    with pytest.raises(ms.errors.ForbiddenGlobalError) as caught:
        ms.open(folder)
    assert any("write_text" in name for name, _ in caught.value.refused)
    with pytest.raises(ms.errors.ForbiddenGlobalError):
        ms.load(model, folder)
    assert not marker.exists()
    assert whole(model) == before


def test_a_good_one(folder: Path) -> None:
    checkpoint = ms.open(folder)
    assert {name: tuple(spec.shape) for name, spec in checkpoint.items()} == {"weight": (2, 3), "bias": (2,)}
    model = nn.Linear(3, 2)
    assert ms.load(model, folder).coverage == 1
    assert all(torch.equal(value, state()[name]) for name, value in model.state_dict().items())


def test_a_flipped_bit(folder: Path, stock_fails: StockFails) -> None:
    """Stock torch loads it; here a check finds it, or says that there is nothing to check against."""
    (data,) = folder.glob("*.distcp")
    damaged = bytearray(data.read_bytes())
    at = damaged.find(state()["weight"].numpy().tobytes())
    damaged[at] ^= 1
    data.write_bytes(damaged)
    loaded = {name: torch.zeros_like(value) for name, value in state().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=folder)
    stock_fails("a flipped bit loads silently", not torch.equal(loaded["weight"], state()["weight"]))
    with pytest.raises(ms.errors.ChecksumError):
        ms.load(nn.Linear(3, 2), folder, verify=True)
