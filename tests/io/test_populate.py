"""Pages of maps that are brought in."""

import errno
import mmap
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms
from modelstate.checkpoint.mapped import Maps
from modelstate.errors import ReadFailedError
from modelstate.io import linux
from modelstate.io import prefetch as module
from modelstate.io.linux import cached_share
from modelstate.io.prefetch import prefault, prefault_async
from tests.loading.test_background import shown_bytes

NUMBERS = torch.arange(1 << 20, dtype=torch.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.safetensors"
    save_file({"a": NUMBERS, "b": NUMBERS + 1, "empty": torch.empty(0)}, found)
    return found


def pairs(checkpoint: ms.Checkpoint) -> list[Any]:
    maps = Maps(checkpoint.fingerprints)
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
    prefault(shown, told.append)
    assert shown_bytes(path) >= 8 << 20
    assert checkpoint.nbytes <= sum(told) <= checkpoint.nbytes + mmap.PAGESIZE
    same = [torch.equal(tensor, checkpoint.tensor(name)) for name, (_, tensor) in zip(checkpoint, shown, strict=True)]
    assert same == [True] * 3


def test_a_cold_file_is_read(path: Path) -> None:
    forget(path)
    checkpoint = ms.open(path)
    shown = pairs(checkpoint)
    prefault(shown, lambda _: None)
    assert share(path) == 1
    assert shown_bytes(path) >= 8 << 20


def test_it_goes_on_behind_the_caller(path: Path) -> None:
    forget(path)
    checkpoint = ms.open(path)
    shown = pairs(checkpoint)
    prefault_async(shown)
    until = time.monotonic() + 60
    while shown_bytes(path) < 8 << 20 and time.monotonic() < until:
        time.sleep(0.01)
    assert shown_bytes(path) >= 8 << 20


def test_what_is_used_first_comes_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = list[int](), threading.Event()
    monkeypatch.setattr(module, "_PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_map_pages", lambda piece: asked.append(piece.address))
    shown = pairs(ms.open(path))
    (a, b) = (tensor for _, tensor in shown if tensor.numel())
    assert a.data_ptr() < b.data_ptr()
    weakref.finalize(shown[1][1], ended.set)  # the thread lets go of the tensors when it is done
    monkeypatch.setattr(module, "_threads", lambda: 1)
    prefault_async([shown[1], shown[0]])
    first = b.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    del a, b, shown
    assert ended.wait(60)
    assert asked[0] == first
    assert asked[1] == first + (1 << 20)  # in the order of the file
    assert min(asked[:4]) >= first >= max(asked[-4:])


def test_a_process_that_has_no_threads_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    prefault_async(pairs(ms.open(path)))
    assert shown_bytes(path) == 0


def test_it_can_be_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 1 << 20)
    told = list[int]()

    def stop(nbytes: int) -> None:
        told.append(nbytes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefault(pairs(ms.open(path)), stop)
    assert 0 < sum(told) < 8 << 20
    assert not [one for one in threading.enumerate() if one.name.startswith("modelstate-work-")]


def test_a_file_that_was_cut(path: Path) -> None:
    checkpoint = ms.open(path)
    shown = pairs(checkpoint)
    os.truncate(path, mmap.PAGESIZE)
    with pytest.raises(ReadFailedError, match=r"cannot be read|has changed"):
        prefault(shown, lambda _: None)


def test_a_kernel_that_cannot_do_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "madvise", lambda *_: errno.EINVAL)
    checkpoint, told = ms.open(path), list[int]()
    prefault(pairs(checkpoint), told.append)
    assert checkpoint.nbytes <= sum(told) <= checkpoint.nbytes + mmap.PAGESIZE
