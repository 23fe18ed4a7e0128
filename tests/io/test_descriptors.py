"""Descriptors of files are closed."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from modelstate.errors import ReadFailedError
from modelstate.io import system
from modelstate.io.files import Descriptor, SourceFile


def opened(below: Path) -> set[str]:
    """The files and directories that this process has open below a directory."""
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if link.startswith(str(below))}


def test_a_descriptor_is_closed_once(tmp_path: Path) -> None:
    first = Descriptor(os.open(tmp_path, os.O_RDONLY))
    first.close()
    with Descriptor(os.open(tmp_path, os.O_RDONLY)) as second:
        assert second == first
        first.close()
        del first
        assert opened(tmp_path) == {str(tmp_path)}
    assert opened(tmp_path) == set()
    unused = Descriptor(os.open(tmp_path, os.O_RDONLY))
    assert opened(tmp_path) == {str(tmp_path)}
    del unused
    assert opened(tmp_path) == set()


def test_a_file_whose_head_cannot_be_read_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def pread(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(system, "pread", pread)
    with pytest.raises(ReadFailedError, match="its beginning cannot be read") as caught:
        SourceFile(str(path))
    assert opened(tmp_path) == set(), caught.value  # whose traceback refers to the file
