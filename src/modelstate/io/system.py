"""The system calls that read files, in one module so that tests can replace them.

Callers look the functions up in this module at each call, so that `modelstate.testing` can replace them.
"""

import errno
import mmap as _mmap
import os
from collections.abc import Sequence

from modelstate.io import linux

_RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


def open(path: str, flags: int) -> int:
    """`os.open`."""
    return os.open(path, flags)


def stat(path: str) -> os.stat_result:
    """`os.stat`."""
    return os.stat(path)


def fstat(descriptor: int) -> os.stat_result:
    """`os.fstat`."""
    return os.fstat(descriptor)


def pread(descriptor: int, nbytes: int, offset: int) -> bytes:
    """`os.pread`."""
    return os.pread(descriptor, nbytes, offset)


def pread_fully(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Reads `nbytes` bytes, or fewer where the file ends before: one `pread` may return less than was asked for."""
    pieces: list[bytes] = []
    while nbytes:
        piece = pread(descriptor, nbytes, offset)
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        nbytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """`os.preadv`."""
    return os.preadv(descriptor, buffers, offset)


def preadv_cached(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """`os.preadv` that never waits for a disk: it stops before the first byte that is not in the page cache.

    Raises `OSError`: `EAGAIN` where the first byte is not there, `EOPNOTSUPP` where the system cannot read in this way.
    """
    if not _RWF_NOWAIT:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return os.preadv(descriptor, buffers, offset, _RWF_NOWAIT)


def mmap(descriptor: int, nbytes: int, flags: int, offset: int = 0) -> _mmap.mmap:
    """`mmap.mmap`."""
    return _mmap.mmap(descriptor, nbytes, flags=flags, offset=offset)


def userfaultfd() -> int:
    """`linux.userfaultfd`."""
    return linux.userfaultfd()
