"""The system calls: those that read and write files, which tests replace, and those that only Linux has.

Callers look the functions up in this module at each call, so that `tests.faults` can replace them.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import mmap as _mmap
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from itertools import starmap
from typing import Any, Self

_FAILURES = (errno.EINVAL, errno.EBADF, errno.EPERM, errno.ENODEV, errno.EMLINK, errno.EXDEV)
UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, *_FAILURES)
"""The errors of a file system that lacks what a call needs: locks, permission bits, syncs of directories, second names
of a file. A file may also have the most names, or, with `EXDEV`, count for another quota than its directory."""


# Reads.

open, stat, fstat = os.open, os.stat, os.fstat
pread, preadv = os.pread, os.preadv


def most_open() -> int:
    """The most files that one use keeps open, such as maps or leases: the process needs descriptors for others."""
    limit = os.sysconf("SC_OPEN_MAX")
    return limit // 4 if limit >= 0 else sys.maxsize  # -1 is no limit


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


# Calls that only Linux has, each behind one check. Where one is missing, it does nothing or says that it failed. macOS
# has `madvise`, with other advice. Leases have their check in `modelstate.io.lease`.

IS_LINUX = platform.system() == "Linux"
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag of `open` for reading and writing past the page cache; 0 where there is none."""
MAP_NORESERVE: int = getattr(_mmap, "MAP_NORESERVE", 0x4000 if IS_LINUX else 0)
"""Without this flag Linux counts a writable map as memory, and refuses a file that is larger than the free memory."""

MAP_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1
"""The result of a `mmap` that has failed."""
_LEAST_POPULATED_BYTES = 256 << 10


class Advice(IntEnum):
    """The advice about a range of memory that `madvise` passes to the kernel."""

    HUGEPAGE = 14
    WIPEONFORK = 18
    """Since Linux 4.14. In a process that is forked, the memory is there, and has zeros in it."""
    POPULATE_READ = 22
    """Since Linux 5.14. With it a truncated file is an error instead of SIGBUS."""
    POPULATE_WRITE = 23
    """Since Linux 5.14."""
    COLLAPSE = 25
    """Since Linux 6.1."""


def processor_flags() -> frozenset[str]:
    """What the processors can do, by the names of the kernel, such as "avx2"; empty where it is not known."""
    with suppress(OSError), builtins.open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def madvise(address: int, nbytes: int, advice: Advice) -> int:
    """Advises the kernel about whole pages of memory. Returns 0 or an error number: `ENOSYS` where it is not Linux."""
    if not IS_LINUX:
        return errno.ENOSYS
    return ctypes.get_errno() if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) else 0


def populate(address: int, nbytes: int) -> None:
    """Gives memory to the pages that lie within a range, where the kernel can, in less time than faults take for each.

    Memory that is there already keeps its values. A small range is left to the faults.
    """
    if nbytes < _LEAST_POPULATED_BYTES:
        return
    first = -(-address // _mmap.PAGESIZE) * _mmap.PAGESIZE
    whole = (address + nbytes - first) // _mmap.PAGESIZE * _mmap.PAGESIZE
    madvise(first, whole, Advice.POPULATE_WRITE)


def advise(descriptor: int, advice: str, start: int = 0, nbytes: int = 0) -> None:
    """Advises the kernel about a range of a file in the page cache, or all of it, where it can be told."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, nbytes, getattr(os, advice))


def resident(descriptor: int, start: int, nbytes: int, *, step: int = 0) -> bytes | None:
    """A byte for each page of a range of a file: 1 where the page cache has it, read without an error, else 0.

    With a `step`, only for one page in every so many bytes.

    Unlike `cachestat` it does not count pages whose read has failed, or is not over. Returns None where the kernel does
    not say. For a file that the user neither owns nor may write to, all pages seem to be there.
    """
    if not IS_LINUX or not nbytes:
        return None if nbytes else b""
    first = start // _mmap.PAGESIZE * _mmap.PAGESIZE
    nbytes += start - first
    # Not `_mmap.mmap`, which duplicates the descriptor, and asks for the status of the file.
    address = _libc.mmap(None, nbytes, _mmap.PROT_READ, _mmap.MAP_PRIVATE | MAP_NORESERVE, descriptor, first)
    if address == MAP_FAILED:
        return None
    try:
        step = step // _mmap.PAGESIZE * _mmap.PAGESIZE
        pages = bytearray(-(-nbytes // (step or _mmap.PAGESIZE)))
        first_byte = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for number, at in enumerate(range(0, nbytes, step or nbytes)):
            if _libc.mincore(address + at, 1 if step else nbytes, first_byte + number):
                return None
        return bytes(pages)
    finally:
        _libc.munmap(address, nbytes)


def filesystem_type(descriptor: int) -> int:
    """The number of the type of a file's file system (`f_type` of `fstatfs`); 0 where the kernel does not say."""
    status = bytearray(512)  # larger than `struct statfs`, which begins with the type
    if not IS_LINUX or _libc.fstatfs(descriptor, ctypes.addressof(ctypes.c_char.from_buffer(status))):
        return 0
    return ctypes.c_long.from_buffer(status).value & 0xFFFFFFFF


def available_bytes() -> int:
    """The memory of the system that can be used without swapping; half of all memory where the system does not say.

    Limits of control groups do not count: within one, the kernel evicts what was read from files.
    """
    try:
        with builtins.open("/proc/meminfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") // 2


def trim_heap() -> None:
    """Returns free memory of the heaps of all threads to the system, where the C library can."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(ctypes.c_size_t(0))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
if IS_LINUX:
    _libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    _libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)


# Open files.


class Descriptor(int):
    """The descriptor of an open file. The file is closed with this object: at the latest when nothing refers to it."""

    is_open = True

    @classmethod
    def of(cls, function: Callable[..., int], *arguments: Any) -> Self:
        """Returns the descriptor that a function such as `os.open` returns.

        No statement stands between the two, so that no interrupt leaves the file open.
        """
        return next(map(cls, starmap(function, [arguments])))

    def close(self) -> None:
        """Closes the file, if it is open. An error is ignored: what was written has been synced, or is removed."""
        if self.is_open:
            try:  # an interrupt comes before the call, and leaves the file open, or after it
                close(self)
            except OSError:
                pass
            finally:
                self.is_open = False

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.is_open:  # in one call: an interrupt is lost here, and must not keep the file open
            os.close(self)
