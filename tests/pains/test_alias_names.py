"""Tied weights in safetensors files: the library refuses them, or writes one of their names only."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_stock_loses_a_name(tmp_path: Path, stock_fails: StockFails) -> None:
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(Tied().state_dict(), tmp_path / "a.safetensors")
    save_model(Tied(), str(tmp_path / "b.safetensors"))
    found = load_file(tmp_path / "b.safetensors")
    stock_fails("one of two names is gone", len(found) == 1)
    with pytest.raises(RuntimeError, match="Missing key"):
        Tied().load_state_dict(found)


def test_ours_keeps_all_names(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    report = ms.save(model, tmp_path / "c.safetensors")
    assert report.bytes < 2 * model.embed.weight.nbytes + 1000
    checkpoint = ms.open(tmp_path / "c.safetensors")
    other.load_state_dict({name: checkpoint.tensor(name) for name in checkpoint})
    assert torch.equal(other.head.weight, model.embed.weight)
    assert checkpoint.aliases == (("embed.weight", "head.weight"),)
