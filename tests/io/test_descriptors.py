"""Descriptors of files are closed, also where an interrupt comes between the call that opens a file and its `try`."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from torch import nn

import modelstate as ms
from modelstate.errors import ReadFailedError
from modelstate.io import atomic, files, leased, lock, system
from modelstate.io.files import Descriptor, SourceFile
from tests.sweeps import at_instruction, interrupt

OPENING = {module.__file__ for module in (atomic, files, leased, lock, system)}


def opened(below: Path) -> set[str]:
    """The files and directories that this process has open below a directory."""
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if link.startswith(str(below))}


def test_a_descriptor_is_closed_once(tmp_path: Path) -> None:
    first = Descriptor.of(os.open, tmp_path, os.O_RDONLY)
    first.close()
    with Descriptor.of(os.open, tmp_path, os.O_RDONLY) as second:
        assert second == first
        first.close()
        del first
        assert opened(tmp_path) == {str(tmp_path)}
    assert opened(tmp_path) == set()
    unused = Descriptor.of(os.open, tmp_path, os.O_RDONLY)
    assert opened(tmp_path) == {str(tmp_path)}
    del unused
    assert opened(tmp_path) == set()


def save_in_store(model: nn.Module, path: Path) -> None:
    with ms.Store(path.with_suffix("")) as store:
        store.save(1, {"model": model}, overwrite=True)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list open files")
@pytest.mark.parametrize("call", [ms.load, ms.save, save_in_store])
def test_an_interrupt_leaves_no_file_open(tmp_path: Path, call: Callable[[nn.Module, Path], object]) -> None:
    path, model = tmp_path / "x.safetensors", nn.Linear(2, 2)
    ms.save(model, path)

    def places(at: int) -> int:
        is_counted = at_instruction(at, lambda code: code.co_filename in OPENING, interrupt, as_signal=True)
        with is_counted as found, suppress(KeyboardInterrupt):
            call(model, path)
        return found.count

    places(0)  # what the first call imports
    assert places(0) > 30
    for at in range(1, places(0) + 1):
        places(at)
        assert opened(tmp_path) == set(), at


def test_a_file_whose_head_cannot_be_read_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def pread(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(system, "pread", pread)
    with pytest.raises(ReadFailedError, match="its beginning cannot be read") as caught:
        SourceFile(str(path))
    assert opened(tmp_path) == set(), caught.value  # whose traceback refers to the file
