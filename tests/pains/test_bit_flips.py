"""One flipped bit: stock torch loads it, the checksums of the file find it."""

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails

FLIPS = 8


class Damaged:
    """A file of `torch.save`, and the bytes in it that are tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        torch.manual_seed(1)
        self.state = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).state_dict()
        torch.save(self.state, path)
        self.good = path.read_bytes()
        self.extents = [(name, spec.stored.storage) for name, spec in ms.open(path).items()]

    def flip(self, seed: int) -> str:
        """Flips one bit in one of the tensors, and says in which."""
        chance = random.Random(seed)
        sizes = [extent.nbytes for _, extent in self.extents]
        name, extent = chance.choices(self.extents, sizes)[0]
        data = bytearray(self.good)
        data[extent.start + chance.randrange(extent.nbytes)] ^= 1 << chance.randrange(8)
        self.path.write_bytes(data)
        return name


@pytest.fixture
def damaged(tmp_path: Path) -> Damaged:
    return Damaged(tmp_path / "model.pt")


def test_every_flip_is_found(damaged: Damaged, stock_fails: StockFails) -> None:
    silent = 0
    for seed in range(FLIPS):
        name = damaged.flip(seed)
        loaded = torch.load(damaged.path)
        bits = loaded[name].contiguous().view(torch.uint8)
        silent += not torch.equal(bits, damaged.state[name].contiguous().view(torch.uint8))
        with pytest.raises(ms.errors.ChecksumError, match=name):
            ms.open(damaged.path).verify()
    stock_fails("torch.load gives damaged tensors and says nothing", silent == FLIPS)
