"""DTensors on a GPU: one rank with nccl, and two ranks that share the device."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import modelstate as ms
from tests.distributed import models
from tests.distributed.models import ROWS, Net
from tests.distributed.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: DTensors on one are not tested"),
]

SLEEP_CYCLES = 100_000_000
"""Some 50 ms of an H100."""


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    """One rank, whose process group is of nccl: several ranks would need several devices."""
    started = Ranks(1, "nccl")
    yield started
    started.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks with one device. They call no collective of torch for it: gloo does not have all of them."""
    started = Ranks(2)
    yield started
    started.close()


@cache
def mesh() -> DeviceMesh:
    os.environ["LOCAL_RANK"] = "0"  # all ranks have the first device, which torch would choose by this
    torch.cuda.set_device(0)
    return init_device_mesh("cuda", (dist.get_world_size(),))


def sharded(seed: int = 1, *, meta: bool = False) -> Net:
    if meta:
        with ms.skeleton():
            net = Net()
    else:
        net = models.plain("fsdp", seed=seed).to("cuda")
    models.fsdp(net, mesh())
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-2, fused=True)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimizer alone, which needs nothing of the other ranks."""
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


def copied(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What this rank holds of a model and of its optimizer, in memory of its own."""
    found = {name: models.local(tensor) for name, tensor in net.state_dict().items()}
    for name, param in net.named_parameters():
        found |= {f"{name}.{key}": models.local(value) for key, value in optimizer.state[param].items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [
        name
        for name, tensor in expected.items()
        if found[name].device != tensor.device or not torch.equal(found[name], tensor)
    ]


# Training.


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    losses = []
    for number in range(first, first + 3):
        tokens = torch.randint(ROWS, (2, 5), generator=torch.Generator().manual_seed(number)).to("cuda")
        loss = net(tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_and_resume(folder: Path) -> tuple[list[float], list[float], list[str]]:
    net = sharded()
    optimizer = optimizer_of(net)
    trained(net, optimizer, 0)
    objects, store = {"model": net, "optimizer": optimizer, "rng": ms.RNG()}, ms.Store(folder / "store")
    torch.cuda._sleep(SLEEP_CYCLES)
    for param in net.parameters():
        param.data.add_(0.125)
    expected = copied(net, optimizer)
    store.save(3, objects, background=True)
    losses = trained(net, optimizer, 3)
    store.wait()
    other = sharded(2)
    other_optimizer = optimizer_of(other)
    store.restore({"model": other, "optimizer": other_optimizer, "rng": ms.RNG()})
    wrong = differing(copied(other, other_optimizer), expected)
    return losses, trained(other, other_optimizer, 3), wrong


def test_training_goes_on_from_a_checkpoint(one: Ranks, tmp_path: Path) -> None:
    ((losses, resumed, wrong),) = one.values(train_and_resume, tmp_path)
    assert wrong == []
    assert resumed == pytest.approx(losses, rel=1e-5)


# Saving and loading.


class Parts(nn.Module):
    """DTensors of every placement: split rows, split columns (which the ranks have to exchange), and replicas."""

    def __init__(self, wholes: dict[str, torch.Tensor]) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("replicas", Replicate())):
            whole = wholes[name]
            part = whole if isinstance(placement, Replicate) else whole.chunk(size, placement.dim)[rank]
            held = DTensor.from_local(part.to("cuda").clone(), mesh(), [placement], run_check=False)
            self.register_parameter(name, nn.Parameter(held))


def wholes(value: float) -> dict[str, torch.Tensor]:
    numbers = torch.arange(2 * 600 * 14, dtype=torch.float32).view(1200, 14) + value
    return {"rows": numbers, "columns": numbers * 2, "replicas": numbers * 3}


def save_parts(folder: Path) -> None:
    parts, store = Parts(wholes(0.0)), ms.Store(folder / "store")
    torch.cuda._sleep(SLEEP_CYCLES)
    for name, param in parts.named_parameters():
        models.local(param).data.copy_(models.local(Parts(wholes(1.0)).get_parameter(name)))
    ms.save(parts, folder / "x.safetensors")
    store.save(1, {"model": parts})
    store.save(2, {"model": parts}, background=True)
    for param in parts.parameters():
        models.local(param).data.zero_()
    store.wait()


@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_every_placement(size: int, one: Ranks, two: Ranks, tmp_path: Path) -> None:
    (one if size == 1 else two).values(save_parts, tmp_path)
    opened = ms.open(tmp_path / "x.safetensors")
    found = [{name: opened.tensor(name) for name in opened}]
    for number in (1, 2):
        plain: Any = nn.ParameterDict({name: torch.empty(1200, 14) for name in wholes(0.0)})
        ms.Store(tmp_path / "store").restore({"model": plain}, number)
        found.append({name: param.detach() for name, param in plain.items()})
    for tensors in found:
        assert all(torch.equal(tensors[name], whole) for name, whole in wholes(1.0).items())


# Another number of ranks.
