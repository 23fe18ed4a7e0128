"""Programs set a default device for the tensors that they create. Those that the library creates for itself stay.

"meta" stands for a GPU here: what is created there by mistake cannot be read.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import modelstate as ms
from tests.distributed.ranks import Ranks
from tests.loading.fingerprint import described, whole

DEVICES = [
    "meta",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device to be the default one"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


class Run:
    def __init__(self, on: str, seed: int = 0) -> None:
        with torch.device("cpu"):
            torch.manual_seed(seed)
            self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(on)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
            self.rng = ms.RNG(cuda=False)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
            for _ in range(2):
                self.model(torch.ones(3, 4).to(on)).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()

    @property
    def objects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "rng")}

    def state(self) -> Any:
        values = whole(self.model)[0], described(self.optimizer.state_dict()), described(self.scheduler.state_dict())
        return {name: value for name, value in values[0].items() if not name.endswith(".grad")}, values[1:]


@pytest.mark.parametrize("how", ["file", "shards", "torch", "objects", "store", "background"])
def test_a_save_and_a_load(how: str, device: str, tmp_path: Path) -> None:
    on = "cpu" if device == "meta" else device
    run, other, store = Run(on), Run(on, 1), ms.Store(tmp_path / "store")
    path = tmp_path / ("x.pt" if how == "torch" else "x.safetensors")
    if how in ("file", "shards", "torch"):
        ms.save(run.model, path, shard_size_bytes=64 if how == "shards" else None)
        assert ms.diff(run.model, path).is_equal
        ms.load(other.model, path, **({} if how == "torch" else {"verify": True}))
        assert described(other.model.state_dict()) == described(run.model.state_dict())
        with ms.skeleton():
            skeleton: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        ms.load(skeleton, path, device=on)
        assert described(skeleton.state_dict()) == described(run.model.state_dict())
        return
    expected = run.state()
    if how == "objects":
        ms.save(run.objects, path)
        ms.restore(other.objects, path)
    else:
        store.save(1, run.objects, background=how == "background")
        store.wait()
        store.save(2, run.objects, background=how == "background")
        store.restore(other.objects)
    assert other.state() == expected


def test_a_conversion(device: str) -> None:
    on = "cpu" if device == "meta" else device
    run = Run(on)
    expected = run.state()
    ms.convert(run.model, torch.float64, optimizers=[run.optimizer])
    ms.convert(run.model, torch.float32, optimizers=[run.optimizer])
    assert run.state() == expected


def test_rules_and_averages(device: str, tmp_path: Path) -> None:
    on = "cpu" if device == "meta" else device
    first, second = (Run(on, seed).model for seed in (1, 2))
    ms.save(first, tmp_path / "a.safetensors")
    ms.save(second, tmp_path / "b.safetensors")
    both = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    ms.load(first, ms.open(both, combine=ms.merge.Average(weights=[0.0, 1.0])))
    assert described(first.state_dict()) == described(second.state_dict())
    renamed = {f"net.{name}": value for name, value in second.state_dict().items()}
    ms.load(first, renamed, rules=[ms.rules.Rename("net.*", "*")])
    ms.load(first, both[0], dtype=torch.float64)
    assert first[0].weight.dtype is torch.float64


def save_and_load_parts(folder: Path, device: str) -> list[bool]:
    on = "cpu" if device == "meta" else device

    def parts(value: float) -> Any:
        module = nn.Module()
        for name, dim in (("rows", 0), ("columns", 1)):
            local = torch.full((6, 3) if dim == 0 else (12, 3), value, device=on)
            held = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            module.register_parameter(name, nn.Parameter(held))
        module.register_buffer("plain", torch.full((5,), value, device=on))
        return module

    os.environ["LOCAL_RANK"] = "0"  # by which torch chooses the GPU: there may be one
    mesh = init_device_mesh(on, (2,))
    torch.set_default_device(device)
    try:
        module, store, found = parts(1.0), ms.Store(folder / "store"), []
        ms.save(module, folder / "x.safetensors")
        store.save(1, {"model": module}, background=True)
        for how in ("file", "store"):
            other = parts(2.0)
            if how == "file":
                ms.load(other, folder / "x.safetensors")
            else:
                store.restore({"model": other})
            tensors = [other.rows.to_local(), other.columns.to_local(), other.plain]
            found += [bool((tensor == 1).all()) for tensor in tensors]
    finally:
        torch.set_default_device(None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_ranks(device: str, tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        assert ranks.values(save_and_load_parts, tmp_path, device) == [[True] * 6] * 2
    finally:
        ranks.close()
