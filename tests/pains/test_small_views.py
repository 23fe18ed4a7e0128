"""Small views of large storages: a file of torch holds all of the storage, and stock torch reads all of it back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails

ROWS = 11


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i in range(ROWS):
            self.register_buffer(f"row{i}", torch.zeros(10))


def rows() -> dict[str, torch.Tensor]:
    large = torch.arange(1e6).view(1000, 1000)
    return {f"row{i}": large[i, :10] for i in range(ROWS)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(rows(), tmp_path / "rows.pt")
    return tmp_path / "rows.pt"


def memory(model: nn.Module) -> int:
    """Bytes of all storages that the buffers keep alive."""
    storages = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in model.buffers()}
    return sum(storages.values())


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Rows()


def test_stock_writes_and_keeps_the_whole_storage(path: Path, stock_fails: StockFails) -> None:
    stock_fails("110 floats make a file of 4 MB", path.stat().st_size > 4_000_000)
    model = on_meta()
    model.load_state_dict(torch.load(path), assign=True)
    stock_fails("a model of 110 floats keeps 4 MB", memory(model) == 4_000_000)


OPTIONS: dict[str, dict[str, Any]] = {
    "by default": {},
    "mapped": {"map": True},
    "in memory of its own": {"map": False},
    "in place": {"in_place": True},
    "with a transform": {"transform": lambda name, tensor: tensor},
    "with a cast": {"dtype": torch.float64},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", [Rows, on_meta])
def test_ours_takes_the_viewed_bytes(make: Callable[[], nn.Module], options: str, path: Path) -> None:
    model = make()
    report = ms.load(model, path, **OPTIONS[options])
    assert memory(model) == sum(buffer.nbytes for buffer in model.buffers())
    assert report.bytes == ROWS * 10 * 4
    for name, row in rows().items():
        assert torch.equal(model.get_buffer(name).float(), row)
