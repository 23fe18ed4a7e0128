"""The system calls that read checkpoints: all of `read` makes them through here, under their own names.

Callers look them up in this module at each call, so that `modelstate.testing` can put others in their places.
"""

import mmap as _mmap
import os
from collections.abc import Sequence


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


def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """`os.preadv`."""
    return os.preadv(descriptor, buffers, offset)


def mmap(descriptor: int, nbytes: int, flags: int, offset: int = 0) -> _mmap.mmap:
    """`mmap.mmap`."""
    return _mmap.mmap(descriptor, nbytes, flags=flags, offset=offset)
