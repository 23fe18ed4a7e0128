"""The system calls that read and write files, in one module so that tests can replace them.

Callers look the functions up in this module at each call, so that `tests.faults` can replace them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap as _mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

_FAILURES = (errno.EINVAL, errno.EBADF, errno.EPERM, errno.ENODEV, errno.EMLINK, errno.EXDEV)
UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, *_FAILURES)
"""The errors of a file system that lacks what a call needs: locks, permission bits, syncs of directories, second names
of a file. A file may also have the most names, or, with `EXDEV`, count for another quota than its directory."""


# Reads.

open, stat, fstat = os.open, os.stat, os.fstat
pread, preadv = os.pread, os.preadv


_RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


def preadv_cached(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """`os.preadv` that never waits for a disk: it stops before the first byte that is not in the page cache.

    Raises `OSError`, such as `EAGAIN` where the first byte is not there.
    """
    return os.preadv(descriptor, buffers, offset, _RWF_NOWAIT)


mmap = _mmap.mmap


# Writes.

fchmod, close, replace, unlink, mkdir, rmdir = os.fchmod, os.close, os.replace, os.unlink, os.mkdir, os.rmdir
pwritev = os.pwritev
open_to_write = os.open
"""For files that are written, and directories that are synced."""
link = partial(os.link, follow_symlinks=False)


def fallocate(descriptor: int, nbytes: int) -> None:
    """`os.posix_fallocate` from the beginning of the file. Does nothing where the system lacks the call."""
    if hasattr(os, "posix_fallocate") and nbytes:
        os.posix_fallocate(descriptor, 0, nbytes)


def _full_fsync(descriptor: int) -> None:
    with suppress(OSError):  # a file system that lacks it
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined]
        return
    os.fsync(descriptor)


fsync: Callable[[int], None] = _full_fsync if hasattr(fcntl, "F_FULLFSYNC") else os.fsync
"""On macOS, where `os.fsync` leaves the data in the cache of the disk, `F_FULLFSYNC`."""


# Open files.


class Descriptor(int):
    """The descriptor of an open file. The file is closed with this object: at the latest when nothing refers to it."""

    is_open = True

    def close(self) -> None:
        """Closes the file, if it is open. An error is ignored: what was written has been synced, or is removed."""
        if self.is_open:
            self.is_open = False
            with suppress(OSError):
                close(self)

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.is_open:  # in one call: an interrupt is lost here, and must not keep the file open
            os.close(self)
