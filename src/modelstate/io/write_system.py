"""The system calls that write to a disk, in one module so that tests can replace them.

Callers look the functions up in this module at each call, so that `modelstate.testing` can replace them.
"""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress


def open(path: str, flags: int, mode: int = 0o666) -> int:
    """`os.open`, for files that are written and directories that are synced."""
    return os.open(path, flags | getattr(os, "O_CLOEXEC", 0), mode)


def fallocate(descriptor: int, nbytes: int) -> None:
    """`os.posix_fallocate` from the beginning of the file. Does nothing where the system lacks the call."""
    if hasattr(os, "posix_fallocate") and nbytes:
        os.posix_fallocate(descriptor, 0, nbytes)


def pwritev(descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
    """`os.pwritev`."""
    return os.pwritev(descriptor, buffers, offset)


def fchmod(descriptor: int, mode: int) -> None:
    """`os.fchmod`."""
    os.fchmod(descriptor, mode)


def fsync(descriptor: int) -> None:
    """`os.fsync`; on macOS, where that leaves the data in the cache of the disk, `F_FULLFSYNC`."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with suppress(OSError):  # a file system that lacks it
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """`os.close`."""
    os.close(descriptor)


def replace(source: str, target: str) -> None:
    """`os.replace`."""
    os.replace(source, target)


def link(source: str, target: str) -> None:
    """`os.link`, which does not follow symbolic links."""
    os.link(source, target, follow_symlinks=False)


def unlink(path: str) -> None:
    """`os.unlink`."""
    os.unlink(path)


def mkdir(path: str, mode: int = 0o777) -> None:
    """`os.mkdir`."""
    os.mkdir(path, mode)


def rmdir(path: str) -> None:
    """`os.rmdir`."""
    os.rmdir(path)
