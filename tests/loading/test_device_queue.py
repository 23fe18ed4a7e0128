"""The way of blocks to a device, with the CPU in the place of a CUDA device: these tests run on every machine.

`test_devices.py` has the tests with a real device.
"""

import errno
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.loading import stage
from tests.faults import faulty_reads


class Stream:
    """A stream of a device that has done everything at once."""

    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> "Stream":
        return self


@pytest.fixture(autouse=True)
def queued(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The queues that blocks have gone through."""
    run, used = stage.CudaQueue.run, list[object]()

    def noted(self: Any, *args: Any) -> Any:
        used.append(self)
        return run(self, *args)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(stage, "pinned_memory", lambda nbytes, _: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(stage, "_QUEUED_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(stage, "_is_cast_from_map", lambda _: False)  # as for the values of a device
    monkeypatch.setattr(stage.CudaQueue, "run", noted)
    return used


def network(seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    small = [nn.Linear(1 + i % 7, 1 + i % 5) for i in range(100)]
    return nn.Sequential(nn.Linear(900, 1100), *small, nn.LayerNorm(3000), nn.Linear(1100, 900)).to(dtype)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ms.save(network(1, torch.float32), tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("in_place", [None, False, True])
@pytest.mark.parametrize("has_budget", [False, True])
def test_every_value_gets_where_it_belongs(
    has_budget: bool, in_place: bool | None, path: Path, queued: list[object]
) -> None:
    expected, module = network(1, torch.float32).bfloat16(), network(2, torch.bfloat16)
    budget = 40_000_000 if has_budget else None
    with torch.inference_mode(has_budget):
        ms.load(module, path, dtype=torch.bfloat16, in_place=in_place, max_memory_bytes=budget)
    assert queued
    for (name, value), wanted in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, wanted), name
    module[0](torch.ones(1, 900, dtype=torch.bfloat16)).sum().backward()


def test_what_becomes_infinite_is_counted(path: Path, queued: list[object]) -> None:
    state = dict(network(1, torch.float32).state_dict())
    state["0.weight"][7, 7], state["102.bias"][0] = 1e38, float("nan")  # in two blocks
    ms.save(state, path)
    with ms.skeleton():
        module = network(2, torch.float32)
    report = ms.load(module, path, dtype=torch.float16, map=False)
    assert queued
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state[name].half(), rtol=0, atol=0, equal_nan=True)
    assert any("1 in all: 0.weight (1)" in note for note in report.notes), report.notes
    assert any("1 in all: 102.bias (1)" in note for note in report.notes), report.notes


@pytest.mark.slow
def test_each_read_that_fails_changes_nothing(path: Path) -> None:
    old, new = network(2, torch.bfloat16).state_dict(), network(1, torch.float32).bfloat16().state_dict()
    at, failed = 0, 0
    while True:
        module, at = network(2, torch.bfloat16), at + 1
        with faulty_reads(at=at, error=OSError(errno.EIO, "bad sector")) as faults:
            try:
                ms.load(module, path, dtype=torch.bfloat16)
                expected = new
            except ms.errors.ModelStateError:
                expected, failed = old, failed + 1
        assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items()), at
        if at > len(faults.requests):
            break
    assert failed > 1


@pytest.mark.parametrize("in_place", [None, True], ids=["staged", "in place"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_queued_any_more_after_an_error(
    error: type[BaseException], in_place: bool | None, path: Path, queued: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage.CudaQueue.run

    def fails(self: Any, *args: Any) -> Any:
        run(self, *args)
        raise error  # what was queued has no event to wait for

    monkeypatch.setattr(stage.CudaQueue, "run", fails)
    monkeypatch.setattr(Stream, "synchronize", lambda _: queued.clear())
    with pytest.raises((error, ms.ModelStateError)):
        ms.load(network(2, torch.bfloat16), path, dtype=torch.bfloat16, in_place=in_place)
    assert not queued
