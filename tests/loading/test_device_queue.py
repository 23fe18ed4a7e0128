"""The way of values to a device, on machines without one: a stand-in for its queue copies on the CPU.

`test_devices.py` has the tests with a real device.
"""

import errno
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.loading import stream
from modelstate.loading.staging import Staging
from modelstate.testing import faulty_reads


class CpuQueue:
    """Does at the wait what a device has done by then at the latest."""

    used = 0

    def __init__(self, device: torch.device) -> None:
        self._lock, self._there = threading.Lock(), torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> int:
        with self._lock:
            before = len(self._there)
            if before < nbytes:
                self._there = torch.full((nbytes,), 255, dtype=torch.uint8)
            return len(self._there) - before

    def callers_stream(self) -> Any:
        return nullcontext()

    def run(
        self, buffer: torch.Tensor, nbytes: int, targets: int | None, put: Callable[[torch.Tensor], object]
    ) -> Callable[[], None]:
        CpuQueue.used += 1

        def wait() -> None:
            with self._lock, torch.no_grad():
                if targets is not None and targets <= stream._MOST_DIRECT:
                    put(buffer)
                else:
                    self._there[:nbytes].copy_(buffer[:nbytes])
                    put(self._there)

        return wait


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make = stream.StreamBuffers.__init__

    def made(self: stream.StreamBuffers, staging: Staging, devices: Iterable[torch.device]) -> None:
        found = {*devices}
        make(self, staging, found)
        self.queues = {device: CpuQueue(device) for device in found}  # type: ignore[misc]

    monkeypatch.setattr(stream.StreamBuffers, "__init__", made)
    monkeypatch.setattr(CpuQueue, "used", 0)


def network(seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    small = [nn.Linear(1 + i % 7, 1 + i % 5) for i in range(200)]
    return nn.Sequential(nn.Linear(900, 1100), *small, nn.LayerNorm(3000), nn.Linear(1100, 900)).to(dtype)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ms.save(network(1, torch.float32), tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("in_place", [None, False, True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("max_memory_bytes", [None, 40_000_000])
def test_every_value_gets_where_it_belongs(
    max_memory_bytes: int | None, inference: bool, in_place: bool | None, path: Path
) -> None:
    expected, module = network(1, torch.float32).bfloat16(), network(2, torch.bfloat16)
    with torch.inference_mode(inference):
        ms.load(module, path, dtype=torch.bfloat16, in_place=in_place, max_memory_bytes=max_memory_bytes)
    assert CpuQueue.used
    for (name, value), wanted in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, wanted), name
    module[0](torch.ones(1, 900, dtype=torch.bfloat16)).sum().backward()


def test_a_skeleton_and_what_becomes_infinite(path: Path) -> None:
    state = dict(network(1, torch.float32).state_dict())
    state["0.weight"][7, 7], state["1.bias"][0] = 1e38, float("nan")
    ms.save(state, path)
    with ms.skeleton():
        module = network(2, torch.float32)
    report = ms.load(module, path, dtype=torch.float16, map=False)
    assert CpuQueue.used
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state[name].half(), rtol=0, atol=0, equal_nan=True)
    assert any("1 in all: 0.weight (1)" in note for note in report.notes), report.notes
    assert any("1 in all: 1.bias (1)" in note for note in report.notes), report.notes


@pytest.mark.parametrize("in_place", [None, False])
def test_each_read_that_fails_changes_nothing(in_place: bool | None, path: Path) -> None:
    old, new = network(2, torch.bfloat16).state_dict(), network(1, torch.float32).bfloat16().state_dict()
    at, failed = 0, 0
    while True:
        module, at = network(2, torch.bfloat16), at + 1
        with faulty_reads(at=at, error=OSError(errno.EIO, "bad sector")) as faults:
            try:
                ms.load(module, path, dtype=torch.bfloat16, in_place=in_place)
                expected = new
            except ms.errors.ModelStateError:
                expected, failed = old, failed + 1
        assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items()), at
        if at > len(faults.requests):
            break
    assert failed > 1
