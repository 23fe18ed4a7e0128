"""Fresh memory that gets its pages with the bytes of a file in them (`userfaultfd`, of Linux since 5.11).

Who reads into memory that nobody has touched stops at each page, and has it cleared only to write to it. `UFFDIO_COPY`
makes pages that are copies from the beginning, many in one call. It copies out of a map of the file; where that cannot
be read, since the file has become shorter or its disk fails, it returns, and there is no SIGBUS.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import torch

from modelstate.read import system
from modelstate.read.libc import function

_LEAST_BYTES = 1 << 20
"""Of a run that is worth the calls around it."""
_API, _REGISTER, _UNREGISTER, _COPY = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC028AA03
_VERSION, _MODE_MISSING, _MODE_DONT_WAKE = 0xAA, 1, 1


class _Hello(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("version", "features", "calls"))


class _Range(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("start", "nbytes", "mode", "calls"))


class _Copied(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("to", "source", "nbytes", "mode")),
        ("done", ctypes.c_int64),
    )


class Filler:
    """Fills whole pages of private memory that nobody has touched and nobody else knows of. Use it as a context."""

    def __init__(self, may: Callable[[], bool]) -> None:
        """`may` says, each time anew, whether it is worth while."""
        self._may = may
        self._maps: dict[str, _Source | None] = {}
        self._lock = threading.Lock()
        self._descriptor = -1
        self._is_able = True

    def __enter__(self) -> "Filler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_able = False
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._maps.clear()

    def fill(self, descriptor: int, path: str, start: int, address: int, nbytes: int) -> tuple[int, int]:
        """Fills what it can of memory at an address with the bytes of an open file from `start` on.

        Returns where what is filled begins and ends, in bytes from the beginning: the rest is to be read.
        """
        first = -address % mmap.PAGESIZE
        last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - address
        if last - first < _LEAST_BYTES or not self._may() or not self._is_ready():
            return 0, 0
        source = self._source(descriptor, path, start + last)
        if source is None:
            return 0, 0
        with self._registered(address + first, last - first) as is_registered:
            done = self._copy(address + first, source.address + start + first, last - first) if is_registered else 0
        source.forget(start + first, last - first)
        return first, first + done

    def _is_ready(self) -> bool:
        with self._lock:
            if self._is_able and self._descriptor < 0:
                try:
                    self._descriptor = _opened()
                except OSError:  # a container, a kernel or a system that does not have it
                    self._is_able = False
            return self._is_able

    def _source(self, descriptor: int, path: str, end: int) -> "_Source | None":
        """A map of the file that reaches to `end`."""
        with self._lock:
            if path not in self._maps:
                self._maps[path] = None
                with suppress(OSError, ValueError):
                    self._maps[path] = _Source(descriptor)
            source = self._maps[path]
            return source if source is not None and end <= source.nbytes else None

    @contextmanager
    def _registered(self, address: int, nbytes: int) -> Iterator[bool]:
        """Only as long as it is filled: a process that is forked meanwhile keeps the descriptor open."""
        asked = _Range(address, nbytes, _MODE_MISSING)
        try:
            yield _ioctl(self._descriptor, _REGISTER, asked)
        finally:
            _ioctl(self._descriptor, _UNREGISTER, asked)

    def _copy(self, to: int, source: int, nbytes: int) -> int:
        """How many bytes have come: all, or whole pages up to one that is there already or cannot be read."""
        done = 0
        while done < nbytes:
            asked = _Copied(to + done, source + done, nbytes - done, _MODE_DONT_WAKE, 0)
            if _ioctl(self._descriptor, _COPY, asked):
                return nbytes
            if ctypes.get_errno() != errno.EAGAIN or asked.done <= 0:
                return done
            done += asked.done
        return done


class _Source:
    """A file that is looked at by the kernel alone."""

    def __init__(self, descriptor: int) -> None:
        self._map = system.mmap(descriptor, 0, mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0))
        self._shown = torch.frombuffer(self._map, dtype=torch.uint8)
        self.nbytes, self.address = self._shown.nbytes, self._shown.data_ptr()

    def forget(self, start: int, nbytes: int) -> None:
        """Takes the pages out of the map again: else they would count as memory of the process."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)


def _opened() -> int:
    descriptor = system.userfaultfd()
    if not _ioctl(descriptor, _API, _Hello(_VERSION)):
        os.close(descriptor)
        raise OSError(ctypes.get_errno(), "userfaultfd has another version")
    return descriptor


_libc_ioctl = function("ioctl", ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)


def _ioctl(descriptor: int, call: int, asked: ctypes.Structure) -> bool:
    """Whether it has done all that was asked for."""
    return _libc_ioctl is not None and _libc_ioctl(descriptor, call, ctypes.byref(asked)) == 0
