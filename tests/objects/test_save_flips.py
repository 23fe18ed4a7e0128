"""A bit that flips anywhere in what was saved is found when it is opened or verified, and is never loaded."""

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.objects.saves import KINDS, NAME
from tests.sweeps import spread


class Net(nn.Module):
    """Small tensors, so that flips meet the header as often as the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
        self.norm = nn.BatchNorm1d(5)
        self.layers[1].weight = self.layers[0].weight
        self.state: object = None

    def get_extra_state(self) -> object:
        return {"seen": torch.arange(20), "step": 3}

    def set_extra_state(self, state: object) -> None:
        self.state = state


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_flip_is_found(tmp_path: Path, kind: str) -> None:
    options = {"file": {}, "shards": {"shard_size_bytes": 500}, "more": {"shard_size_bytes": 110}}[kind]
    report = ms.save(Net(), tmp_path / NAME, extra={"note": [torch.ones(4)]}, **options)
    whole = {Path(path): Path(path).read_bytes() for path in report.files}
    bits = [(path, place) for path, data in whole.items() for place in range(8 * len(data))]
    draw = random.Random(kind)
    seals = [(path, 8 * (data.index(b"modelstate_seal") + at)) for path, data in whole.items() for at in range(15)]
    model = Net()
    ms.load(model, tmp_path / NAME, verify=True)
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for path, place in [*draw.sample(bits, 80), *spread(seals, 20)]:
        data = bytearray(whole[path])
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(ms.ModelStateError):
            ms.open(tmp_path / NAME).verify()
        with pytest.raises(ms.ModelStateError):
            ms.load(model, tmp_path / NAME, verify=True)
        path.write_bytes(whole[path])
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_large_tensors_have_a_digest_for_each_block(tmp_path: Path) -> None:
    state = {"a": torch.arange(3_000_000.0), "b": torch.arange(10), "t": torch.arange(2_000_000.0).view(2, -1).t()}
    ms.save(state, tmp_path / NAME)
    checkpoint = ms.open(tmp_path / NAME)
    assert checkpoint.verify() == 20_000_080
    assert {len(one.value) // 32 for one in checkpoint.checksums.values()} == {3, 1, 2}
    data = bytearray((tmp_path / NAME).read_bytes())
    data[-5] ^= 1
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(ms.errors.ChecksumError):
        ms.open(tmp_path / NAME).verify()
