"""Pages of maps that are brought in."""

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms
from modelstate.errors import ReadFailedError
from modelstate.read import populate as module
from modelstate.read.populate import populate
from modelstate.read.readahead import cached_share
from tests.place.test_background import shown_bytes

NUMBERS = torch.arange(1 << 20, dtype=torch.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.safetensors"
    save_file({"a": NUMBERS, "b": NUMBERS + 1, "empty": torch.empty(0)}, found)
    return found


def pairs(checkpoint: ms.Checkpoint) -> list[Any]:
    maps = checkpoint.maps()
    stored: list[Any] = [checkpoint.stored(name) for name in checkpoint]
    return [(one.extent, maps.tensor(one)) for one in stored]


def share(path: Path) -> float | None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return cached_share(descriptor, 0, path.stat().st_size)
    finally:
        os.close(descriptor)


def forget(path: Path) -> None:
    """Leaves the page cache without the file, where it can be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    if share(path) != 0:
        pytest.skip("this file system keeps its files in memory, or does not say")


def test_pages_are_there_afterwards(path: Path) -> None:
    checkpoint, told = ms.open(path), list[int]()
    shown = pairs(checkpoint)
    assert shown_bytes(path) == 0
    populate(checkpoint, shown, told.append)
    assert shown_bytes(path) >= 8 << 20
    assert sum(told) == checkpoint.nbytes
    same = [torch.equal(tensor, checkpoint.tensor(name)) for name, (_, tensor) in zip(checkpoint, shown, strict=True)]
    assert same == [True] * 3


def test_a_cold_file_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(path)
    checkpoint, told = ms.open(path), list[int]()
    monkeypatch.setattr(module, "_madvise", None)
    populate(checkpoint, pairs(checkpoint), told.append)
    assert share(path) == 1
    assert told[0] == 0
    assert sum(told) == checkpoint.nbytes


def test_a_cold_file_can_be_stopped_before_all_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(path)
    monkeypatch.setattr(module, "_ROUND_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_PIECE_BYTES", 1 << 20)
    checkpoint, read = ms.open(path), list[int]()
    real = checkpoint.read_all

    def noted(requests: Any, on_read: Any = None) -> None:
        read.append(len(requests))
        real(requests, on_read)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "read_all", noted)
    with pytest.raises(KeyboardInterrupt):
        populate(checkpoint, pairs(checkpoint), stop)
    assert len(read) == 1


def test_a_file_that_was_cut(path: Path) -> None:
    checkpoint = ms.open(path)
    shown = pairs(checkpoint)
    os.truncate(path, mmap.PAGESIZE)
    with pytest.raises(ReadFailedError, match=r"cannot be read|has changed"):
        populate(checkpoint, shown, lambda _: None)


def test_a_kernel_that_cannot_do_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_POPULATE_READ", 9999)
    checkpoint, told = ms.open(path), list[int]()
    populate(checkpoint, pairs(checkpoint), told.append)
    assert sum(told) == checkpoint.nbytes
