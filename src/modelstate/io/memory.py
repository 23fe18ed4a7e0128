"""Allocates the memory that values are read into.

Who reads into memory that nobody has touched stops at each page, and has it cleared only to write to it. `UFFDIO_COPY`
makes pages that are copies from the beginning, many in one call. It copies out of a map of the file; where that cannot
be read, since the file has become shorter or its disk fails, it returns, and there is no SIGBUS.
"""

import ctypes
import errno
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Any

import torch

from modelstate.errors import MemoryBudgetError
from modelstate.io import system
from modelstate.io.system import function
from modelstate.spec import contiguous_stride

TENSOR_ALIGN_BYTES = 64


_HUGE_PAGE = 2 << 20
_SAMPLE_BYTES = 16 << 20
_SLOW_BYTES_PER_SECOND = 2.5e9
"""What a thread reads into small pages, or less."""
_MADV_POPULATE_WRITE = 23
"""Of Linux since 5.14."""
_LEAST_PROBED_BYTES = 2 * _HUGE_PAGE
"""So much has a huge page in it, wherever it begins."""
_SLOW_PAGE_SECONDS = 0.0015
"""Twice what as much memory in small pages takes."""
_ARENA_BYTES = 256 << 20
_TRIM_BYTES = 16 << 20


class HugePagePolicy:
    """Has fresh memory made of huge pages where they are fast, and of small ones where they are not.

    A huge page is cleared at memory speed where the machine has it at hand. On a virtual machine whose host has to
    find the memory first, it may take 5 ms, and small pages that the guest has used lately are several times as fast.
    Only trying can tell: one page of each piece of memory, and the read itself later on. (A slow disk looks the
    same there, and then it does not matter.)
    """

    def __init__(self, threads: int) -> None:
        """`threads` is how many read into the memory at once."""
        self._slow = _SLOW_BYTES_PER_SECOND * min(threads, 2)
        self._arenas: list[mmap.mmap] = []
        self._started: float | None = None
        self._nbytes = 0
        self.small = not hasattr(mmap, "MADV_NOHUGEPAGE")
        """Whether it has gone back to small pages, from where there is no way."""

    def add(self, arena: mmap.mmap) -> None:
        """Hears of memory that is about to be read into."""
        self._arenas.append(arena)
        if self.small:
            _use_small_pages(arena)
        elif len(arena) >= _LEAST_PROBED_BYTES and _seconds_to_fault(arena) > _SLOW_PAGE_SECONDS:
            self._go_small()

    def on_read(self, nbytes: int) -> None:
        """Hears of bytes that have come into the memory."""
        if self._started is None:  # the first one only starts the clock
            self._started = time.perf_counter()
            return
        self._nbytes += nbytes
        if self.small or self._nbytes < _SAMPLE_BYTES:
            return
        seconds = time.perf_counter() - self._started
        if self._nbytes > self._slow * seconds:
            self._started, self._nbytes = time.perf_counter(), 0  # fast so far: look again after the next bytes
            return
        self._go_small()

    def _go_small(self) -> None:
        """Also where the first pages of memory were fast: the next ones are as those that have just been met."""
        self.small = True
        for arena in self._arenas:
            _use_small_pages(arena)


def _seconds_to_fault(arena: mmap.mmap) -> float:
    """The time that the first huge page of the memory takes; 0 where the kernel cannot be asked for it."""
    first = -torch.frombuffer(arena, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
    started = time.perf_counter()
    try:
        arena.madvise(_MADV_POPULATE_WRITE, first, mmap.PAGESIZE)
    except (OSError, ValueError):
        return 0.0
    return time.perf_counter() - started


def _use_small_pages(arena: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):
            arena.madvise(mmap.MADV_NOHUGEPAGE)


@torch.inference_mode(False)
def fresh_tensors(
    like: Sequence[tuple[torch.Size, tuple[int, ...] | None, torch.dtype]], watch: "HugePagePolicy | None" = None
) -> list[torch.Tensor]:
    """A new CPU tensor for each shape, stride (None for contiguous) and dtype, in memory that has not been touched.

    Small tensors share mappings of up to 256 MB, each with a storage of its own. The mappings ask the kernel for huge
    pages, since faulting in small pages takes longer than reading into them; see `HugePagePolicy`.
    """
    made: list[torch.Tensor] = []
    sizes = [_span(shape, stride) * dtype.itemsize for shape, stride, dtype in like]
    arena: mmap.mmap | None = None
    free = left = 0
    for index, ((shape, stride, dtype), nbytes) in enumerate(zip(like, sizes, strict=True)):
        if nbytes == 0:
            made.append(torch.empty(shape, dtype=dtype, device="cpu"))
            continue
        if arena is None or nbytes > left:
            arena = _arena(_batch(sizes, index))
            if watch is not None:
                watch.add(arena)
            free, left = 0, len(arena)
        storage = torch.frombuffer(arena, dtype=torch.uint8, count=nbytes, offset=free).untyped_storage()
        used = aligned(nbytes)
        free, left = free + used, left - used
        empty = torch.empty(0, dtype=dtype, device="cpu")
        made.append(empty.set_(storage, 0, shape, stride or contiguous_stride(shape)))
    return made


class HeapTrim:
    """Gives back what code of others has freed on the heap between what it keeps.

    A large tensor that is freed there leaves a hole, and the next small one that is kept takes a bit of it: then the
    hole is too small for the next large tensor, and the heap grows by all that it has ever allocated.
    """

    def __init__(self, every_bytes: int = _TRIM_BYTES) -> None:
        """`every_bytes` that were freed it gives back what it can."""
        self._every_bytes, self._nbytes = every_bytes, 0

    def on_freed(self, nbytes: int) -> None:
        """Hears of bytes that have been freed."""
        self._nbytes += nbytes
        if self._nbytes >= self._every_bytes:
            self.trim()

    def trim(self) -> None:
        """Gives back what is free, of all threads."""
        self._nbytes = 0
        if (call := _malloc_trim()) is not None:
            call(0)


@cache
def _malloc_trim() -> Any:
    """Where there is one. To look for it takes longer than to place a tensor."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _batch(sizes: Sequence[int], start: int) -> int:
    """Bytes for as many of the next tensors as share one mapping."""
    total = 0
    for nbytes in sizes[start:]:
        used = aligned(nbytes)
        if total and total + used > _ARENA_BYTES:
            break
        total += used
    return total


def _arena(nbytes: int) -> mmap.mmap:
    try:
        arena = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryBudgetError(
            "the system has no memory for the tensors; nothing has been changed",
            expected=f"{nbytes} bytes at once",
            found=error,
            remedy="map=True on a skeleton and in_place=True elsewhere need the least",
        ) from error
    if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: the memory is as good, only slower to fault in
            arena.madvise(mmap.MADV_HUGEPAGE)
    return arena


def _span(shape: Sequence[int], stride: Sequence[int] | None) -> int:
    """Elements from the first to behind the last."""
    if 0 in shape:
        return 0
    steps = stride or contiguous_stride(shape)
    return 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))


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


class UffdFiller:
    """Fills whole pages of private memory that nobody has touched and nobody else knows of. Use it as a context."""

    def __init__(self, may: Callable[[], bool]) -> None:
        """`may` says, each time anew, whether it is worth while."""
        self._may = may
        self._maps: dict[str, _Source | None] = {}
        self._lock = threading.Lock()
        self._descriptor = -1
        self._is_able = True

    def __enter__(self) -> "UffdFiller":
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


_LARGE_BYTES = 1 << 20


def empty_cpu(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous CPU tensor of zeros. A large one goes back to the system as soon as nobody has it.

    `malloc` keeps what is freed between other allocations, so a loop over large tensors could end up with all of them
    in the process's memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), contiguous_stride(shape))


def aligned(nbytes: int) -> int:
    """The next multiple of what a tensor's memory begins at."""
    return -(-nbytes // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES
