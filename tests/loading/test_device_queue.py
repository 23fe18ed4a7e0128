"""The way of blocks to a device, with the CPU in the place of a CUDA device: these tests run on every machine.

`test_devices.py` has the tests with a real device.
"""

import errno
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.io.blocks import Block
from modelstate.io.engine import ReadStrategy
from modelstate.io.memory import MemoryTracker
from modelstate.loading import stream
from modelstate.planning.memory import peak_bytes
from modelstate.torch_compat.dtypes import Overflows
from tests.faults import faulty_reads


class Stream:
    """A stream of a device that has done everything at once."""

    def __init__(self, *_: object) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, _: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> "Stream":
        return self


@pytest.fixture(autouse=True)
def queued(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The queues that blocks have gone through."""
    init, run, used = stream.StreamBuffers.__init__, stream.CudaQueue.run, list[object]()

    def with_queue(self: Any, *args: Any) -> None:
        init(self, *args)
        self.queues[torch.device("cpu")] = stream.CudaQueue(torch.device("cpu"))

    def noted(self: Any, *args: Any) -> Any:
        used.append(self)
        return run(self, *args)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(stream, "pinned_memory", lambda nbytes, _: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(stream.StreamBuffers, "__init__", with_queue)
    monkeypatch.setattr(stream.CudaQueue, "run", noted)
    return used


def network(seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    small = [nn.Linear(1 + i % 7, 1 + i % 5) for i in range(200)]
    return nn.Sequential(nn.Linear(900, 1100), *small, nn.LayerNorm(3000), nn.Linear(1100, 900)).to(dtype)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ms.save(network(1, torch.float32), tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [None, False, True])
@pytest.mark.parametrize(
    ("is_direct", "inference", "max_memory_bytes"),
    [(False, False, None), (False, True, 40_000_000), (True, False, 40_000_000), (True, True, None)],
)
def test_every_value_gets_where_it_belongs(
    is_direct: bool,
    max_memory_bytes: int | None,
    inference: bool,
    in_place: bool | None,
    path: Path,
    queued: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a copy of the block on the device, and straight from the buffer, as values of few tensors get there."""
    monkeypatch.setattr(stream, "goes_straight", lambda _: is_direct)
    expected, module = network(1, torch.float32).bfloat16(), network(2, torch.bfloat16)
    with torch.inference_mode(inference):
        ms.load(module, path, dtype=torch.bfloat16, in_place=in_place, max_memory_bytes=max_memory_bytes)
    assert queued
    for (name, value), wanted in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, wanted), name
    module[0](torch.ones(1, 900, dtype=torch.bfloat16)).sum().backward()


def test_the_memory_on_the_device_is_free_before_other_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reads at the commit, those that are not streamed come last."""
    released: list[object] = []
    release = stream.CudaQueue.release
    monkeypatch.setattr(stream.CudaQueue, "release", lambda queue: (release(queue), released.append(queue)))
    ms.load(network(2, torch.bfloat16), path, dtype=torch.bfloat16)
    assert released
    assert not any(queue._there.nbytes for queue in released)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_skeleton_and_what_becomes_infinite(path: Path, queued: list[object]) -> None:
    state = dict(network(1, torch.float32).state_dict())
    state["0.weight"][7, 7], state["202.bias"][0] = 1e38, float("nan")  # in two blocks
    ms.save(state, path)
    with ms.skeleton():
        module = network(2, torch.float32)
    report = ms.load(module, path, dtype=torch.float16, map=False)
    assert queued
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state[name].half(), rtol=0, atol=0, equal_nan=True)
    assert any("1 in all: 0.weight (1)" in note for note in report.notes), report.notes
    assert any("1 in all: 202.bias (1)" in note for note in report.notes), report.notes


@pytest.mark.slow
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


@pytest.mark.slow
def test_memory_of_a_model_on_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads share their buffers, and each device has memory for the largest block."""
    module = nn.Sequential(nn.Linear(4000, 4000, bias=False), nn.Linear(10, 10, bias=False))
    state = {"0.weight": torch.zeros(4000, 4000).half(), "1.weight": torch.zeros(10, 10).bfloat16()}
    save_file(state, tmp_path / "x.safetensors")
    seen: list[list[Any]] = []
    monkeypatch.setattr("modelstate.loading.load.limit_memory", lambda _, planned: seen.append([*planned]))
    ms.load(module, tmp_path / "x.safetensors", max_memory_bytes=1 << 30)
    large, small = sorted(seen[0], key=lambda table: -table.nbytes)
    strategy, block_bytes = ReadStrategy(threads=4, block_bytes=1 << 20), 1 << 20
    assert peak_bytes([large, small], strategy) == 4 * block_bytes
    small.device = torch.device("cuda", 0)
    assert peak_bytes([large, small], strategy) == (4 + 1) * block_bytes
    large.device = torch.device("cuda", 1)
    assert peak_bytes([large, small], strategy) == (3 + 2) * block_bytes  # at most an eighth of 32,000,000 is pinned


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("in_place", [None, False, True], ids=["default", "staged", "in place"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_queued_any_more_after_an_error(
    error: type[BaseException],
    in_place: bool | None,
    path: Path,
    queued: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = stream.CudaQueue.run

    def fails(self: Any, *args: Any) -> Any:
        run(self, *args)
        raise error  # what was queued has no event to wait for

    monkeypatch.setattr(stream.CudaQueue, "run", fails)
    monkeypatch.setattr(Stream, "synchronize", lambda _: queued.clear())
    with pytest.raises((error, ms.ModelStateError)):
        ms.load(network(2, torch.bfloat16), path, dtype=torch.bfloat16, in_place=in_place)
    assert not queued


def test_values_of_few_tensors_that_are_not_cast_need_no_copy_of_the_block() -> None:
    def run(count: int, dtype: torch.dtype) -> stream.Run:
        return stream.Run(
            0, count, torch.float32, [stream.Value("x", at, torch.empty(1, dtype=dtype)) for at in range(count)]
        )

    assert stream.goes_straight([run(1, torch.float32)] * 4)
    assert not stream.goes_straight([run(5, torch.float32)])
    assert not stream.goes_straight([run(1, torch.float32)] * 5)
    assert not stream.goes_straight([run(1, torch.float32), run(1, torch.bfloat16)])


@pytest.mark.slow
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_cast_that_could_not_be_looked_at_is_noted(
    error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are there by then."""
    state = dict(network(1, torch.float32).state_dict())
    state["0.weight"][7, 7] = 1e38
    ms.save(state, path)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Overflows, "check", fail)
    report = ms.load(network(2, torch.float16), path, dtype=torch.float16)
    assert any("there was no memory to look" in note and "0.weight" in note for note in report.notes), report.notes


def test_the_memory_that_is_reported_is_what_was_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    reserve = stream.CudaQueue.reserve

    def pinned(nbytes: int, _: object) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def reserved(queue: stream.CudaQueue, nbytes: int) -> int:
        asked.append(reserve(queue, nbytes))
        return asked[-1]

    monkeypatch.setattr(stream, "pinned_memory", pinned)
    monkeypatch.setattr(stream.CudaQueue, "reserve", reserved)
    report = ms.load(network(2, torch.bfloat16), path, dtype=torch.bfloat16)
    assert len(asked) == 2
    assert report.peak_memory_bytes == sum(asked)


def test_memory_that_is_released_is_counted_no_more() -> None:
    staging: Any = SimpleNamespace(held=MemoryTracker(), strategy=ReadStrategy.fastest())
    buffers = stream.StreamBuffers(staging, [])
    buffers.need([Block((), 1_000)], 1)
    buffers.reserve()
    buffers.release()
    staging.held.take(1_500)
    # Beside the buffer, which is pinned here, the stand-in of the device has had a block.
    assert staging.held.peak_bytes == 2_000
