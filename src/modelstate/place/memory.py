"""Fresh memory for tensors."""

import ctypes
import mmap
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from modelstate.errors import MemoryBudgetError
from modelstate.read.stream import aligned
from modelstate.spec import contiguous_stride

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


class PageWatch:
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
    like: Sequence[tuple[torch.Size, tuple[int, ...] | None, torch.dtype]], watch: "PageWatch | None" = None
) -> list[torch.Tensor]:
    """A new CPU tensor for each shape, stride (None for contiguous) and dtype, in memory that has not been touched.

    Small tensors share mappings of up to 256 MB, each with a storage of its own. The mappings ask the kernel for huge
    pages, since faulting in small pages takes longer than reading into them; see `PageWatch`.
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
