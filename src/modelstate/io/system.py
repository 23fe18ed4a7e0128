"""The system calls that read files, in one module so that tests can replace them.

Callers look the functions up in this module at each call, so that `modelstate.testing` can replace them.
"""

import ctypes
import errno
import mmap as _mmap
import os
import platform
from builtins import open as _open
from collections.abc import Callable, Sequence
from typing import cast

_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
"""The number of the system call, by processor."""
_UFFD_USER_MODE_ONLY = 1
"""Without privileges a process may only handle page faults of user code."""


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


def mmap(descriptor: int, nbytes: int, flags: int, offset: int = 0) -> _mmap.mmap:
    """`mmap.mmap`."""
    return _mmap.mmap(descriptor, nbytes, flags=flags, offset=offset)


def userfaultfd() -> int:
    """Calls `userfaultfd`, which Python's library lacks, and returns the descriptor. Raises `OSError`."""
    number = _USERFAULTFD.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        raise OSError(errno.ENOSYS, "there is no userfaultfd here")
    with _open("/proc/self/status", encoding="ascii", errors="replace") as status:
        if "\nSeccomp:\t0\n" not in status.read():
            raise OSError(errno.EPERM, "the system calls of this process are filtered, and some filters end it")
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(number, os.O_CLOEXEC | _UFFD_USER_MODE_ONLY))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def function(name: str, *arguments: type) -> Callable[..., int] | None:
    """A function of the C library, or None where it is missing. It sets `ctypes.get_errno`.

    `arguments` are the ctypes of the function's arguments.
    """
    try:
        symbol = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    symbol.argtypes = arguments
    return cast(Callable[..., int], symbol)
