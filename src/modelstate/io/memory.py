"""Allocates the memory that values are read into, fills it, and counts what a load holds.

A read into untouched memory faults at each page, and the kernel clears the page only for it to be overwritten.
`UFFDIO_COPY` creates pages that are copies from the beginning, many in one call, so that no page is cleared in vain. It
copies from a map of the file; where that cannot be read, because the file was truncated or its disk fails, the call
returns an error instead of SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from modelstate.arguments import check_integer
from modelstate.errors import MemoryBudgetError
from modelstate.io import linux, system
from modelstate.io.files import Descriptor
from modelstate.process import ThreadValue
from modelstate.spec import contiguous_stride, span

if TYPE_CHECKING:
    import torch

HUGE_PAGE_BYTES = 2 << 20
TENSOR_ALIGN_BYTES = 64
_ARENA_BYTES = 256 << 20
_TRIM_BYTES = 16 << 20
_LARGE_BYTES = 1 << 20
"""Smaller tensors and runs are not worth system calls of their own."""
_LEAST_POOLED_BYTES = 1 << 20
"""Smaller mappings are not kept for later tensors."""


class HeapTrim:
    """Returns freed heap memory to the operating system.

    A large tensor that a transform frees on the heap leaves a hole, and the next small tensor that is kept takes a bit
    of the hole, which is then too small for the next large tensor. Without trimming, the heap grows by all that has
    been allocated: 600 instead of 280 MB for 16 weights of 16 MB that become float8.
    """

    def __init__(self) -> None:
        self._freed_bytes = 0

    def on_freed(self, nbytes: int) -> None:
        """Counts freed bytes, and trims the heaps of all threads after each `_TRIM_BYTES` of them."""
        self._freed_bytes += nbytes
        if self._freed_bytes >= _TRIM_BYTES:
            self._freed_bytes = 0
            linux.trim_heap()


@dataclass(eq=False, slots=True)
class MemoryTracker:
    """Counts the bytes that a load holds beyond the final tensors, and the most that it has held at once.

    It counts buffers, values that wait to be copied, and what is kept to undo; not each tensor that is read to where it
    stays, so that very many small ones cost nothing.
    """

    peak_bytes: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def take(self, nbytes: int) -> None:
        """Adds to the running total; a negative value releases memory."""
        if nbytes:
            with self._lock:
                self._now += nbytes
                self.peak_bytes = max(self.peak_bytes, self._now)

    @contextmanager
    def during(self, nbytes: int) -> Iterator[None]:
        """Counts memory as long as the context lasts."""
        self.take(nbytes)
        try:
            yield
        finally:
            self.take(-nbytes)


# Allocation.

Layout = tuple["torch.Size", tuple[int, ...] | None, "torch.dtype"]
"""Shape, stride (None for contiguous) and dtype of a tensor."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a tensor's memory."""
    return -(-nbytes // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES


def empty_cpu(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous CPU tensor of zeros. The memory of a large one is returned to the system when it is freed.

    `malloc` keeps memory that is freed between other allocations, so a loop over large tensors could end up with all of
    them in the memory of the process.

    Raises `MemoryBudgetError` where the system has no memory.
    """
    import torch

    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    storage = torch.frombuffer(new_mapping(nbytes), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), contiguous_stride(shape))


class MemoryPool:
    """Memory of tensors that are gone, for new tensors: the kernel clears each page of new memory when it is touched.

    `fresh_tensors` takes its memory from the pool within `lending()`. A storage refers to the mapping that it lies in.
    So a mapping to which nothing but the pool refers has no tensor, view or array left, and only such a mapping is
    lent again. Threads may use the pool at the same time, and an interrupt can at most make it forget a mapping.
    """

    def __init__(self) -> None:
        self._kept: deque[mmap.mmap] = deque()

    @property
    def kept_bytes(self) -> int:
        """The memory that the pool keeps, whether or not tensors still use it."""
        return sum(map(len, self._kept.copy()))

    @contextmanager
    def lending(self) -> Iterator[list[mmap.mmap]]:
        """In this thread, `fresh_tensors` uses memory of the pool within the block, and new memory for the rest.

        Yields the list of the mappings that it has used, for `keep`.
        """
        lender = _Lender(self, [])
        with _lender.replaced(weakref.ref(lender)):
            yield lender.lent

    def keep(self, mappings: Iterable[mmap.mmap], most_bytes: int) -> None:
        """Keeps mappings for later tensors, and releases the oldest ones beyond `most_bytes` in all."""
        if _COUNTS_REFERENCES:  # else nothing is ever lent
            self._kept.extend(mappings)
        while self.kept_bytes > most_bytes:
            with suppress(IndexError):  # another thread has taken the last one
                self._kept.popleft()

    def take(self, nbytes: int) -> mmap.mmap | None:
        """Returns a mapping of about this size that nothing uses any more, with old values in it; None without one."""
        if not _COUNTS_REFERENCES:
            return None
        for _ in range(len(self._kept)):
            try:
                mapping, references = _next_of(self._kept)
            except IndexError:
                break
            if nbytes <= len(mapping) <= nbytes + nbytes // 8 and references <= _UNUSED_REFERENCES:
                return mapping
            self._kept.append(mapping)
        return None


def _next_of(mappings: deque[mmap.mmap]) -> tuple[mmap.mmap, int]:
    mapping = mappings.popleft()
    return mapping, sys.getrefcount(mapping)


_UNUSED_REFERENCES = _next_of(deque([mmap.mmap(-1, mmap.PAGESIZE)]))[1]
"""What `_next_of` counts for a mapping that has no storage."""
_COUNTS_REFERENCES = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Without the interpreter lock, Python counts only some of the references to an object."""


class _Lender(msgspec.Struct, weakref=True):
    pool: MemoryPool
    lent: list[mmap.mmap]


_lender = ThreadValue[weakref.ref[_Lender] | None](None)
"""A weak reference, which an interrupt that keeps it from being reset makes invalid."""


def fresh_tensors(like: Sequence[Layout]) -> list[torch.Tensor]:
    """A new CPU tensor for each shape, stride (None for contiguous) and dtype, in memory that no other tensor uses.

    Small tensors share mappings of up to 256 MB, each with a storage of its own. The memory is untouched, or within
    `MemoryPool.lending` that of the pool.

    Raises `MemoryBudgetError` where the system has no memory.
    """
    import torch

    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # otherwise they could never be trained
            return fresh_tensors(like)
    tensors: list[torch.Tensor] = []
    counts = [shape.numel() if stride is None else span(shape, stride) for shape, stride, _ in like]
    sizes = [
        -(-count * dtype.itemsize // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES
        for count, (_, _, dtype) in zip(counts, like, strict=True)
    ]
    arena: mmap.mmap | None = None
    free = left = 0
    for index, ((shape, stride, dtype), count, nbytes) in enumerate(zip(like, counts, sizes, strict=True)):
        if count == 0:
            tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
            continue
        if arena is None or nbytes > left:
            free, left = 0, nbytes
            for more in islice(sizes, index + 1, None):
                if left + more > _ARENA_BYTES:
                    break
                left += more
            arena = _mapping(left)
        flat = torch.frombuffer(arena, dtype=dtype, count=count, offset=free)
        free, left = free + nbytes, left - nbytes
        # Reshaped in place, without another object.
        tensors.append(flat.resize_(shape) if stride is None else flat.as_strided_(shape, stride))
    return tensors


_spare = MemoryPool()
_spare_pinned = MemoryPool()
_spare_bytes = 128 << 20


def spare_tensors(like: Sequence[Layout]) -> list[torch.Tensor]:
    """`fresh_tensors` for values that are soon gone, in the memory of such values of earlier loads where it fits."""
    if sum(shape.numel() * dtype.itemsize for shape, _, dtype in like) < _LEAST_POOLED_BYTES:
        return fresh_tensors(like)
    with _spare.lending() as lent:
        tensors = fresh_tensors(like)
    _spare.keep(lent, _spare_bytes)
    return tensors


def spare_pinned_mapping(nbytes: int, allocate: Callable[[int], mmap.mmap | None]) -> mmap.mmap | None:
    """A mapping of pinned memory of an earlier load, or else what `allocate` returns, which is kept for later loads."""
    mapping = _spare_pinned.take(nbytes)
    if mapping is None:
        mapping = allocate(nbytes)
    if mapping is not None:
        # Pinned mappings are larger by a huge page than what lies in them.
        _spare_pinned.keep([mapping], _spare_bytes + HUGE_PAGE_BYTES if _spare_bytes else 0)
    return mapping


def set_spare_bytes(nbytes: int) -> None:
    """Sets how much temporary memory the process keeps from one load for the next.

    A load that cannot read into the model's memory directly reads all values into temporary memory first. The kernel
    clears each page of new memory, which takes longer than the read, so the memory of one load is used again by the
    next one of about the same size. The process keeps up to 128 MiB (134,217,728 bytes) of it unless it sets another
    size, and as much of the pinned memory by which blocks get to CUDA devices.

    Args:
        nbytes: The most bytes to keep. 0 returns all of the memory to the system now, and that of later loads when
            they end.

    Raises:
        OptionError: `nbytes` is not an integer of 0 or more.

    Examples:
        >>> modelstate.loading.set_spare_bytes(2 << 30)  # a process that loads one checkpoint of 2 GB after the other
    """
    global _spare_bytes
    check_integer("nbytes", nbytes, least=0)
    _spare_bytes = nbytes
    for pool in (_spare, _spare_pinned):
        pool.keep((), nbytes)


def _mapping(nbytes: int) -> mmap.mmap:
    """Returns private memory, of the pool that lends to this thread where it has any. Raises `MemoryBudgetError`.

    In small pages: on a virtual machine whose host has not backed the memory yet, faults of huge pages were measured to
    take two to three times as long as those of small pages, which the kernel takes from memory that was used before.
    """
    of_block = _lender.value
    lender = None if of_block is None or nbytes < _LEAST_POOLED_BYTES else of_block()
    mapping = None if lender is None else lender.pool.take(nbytes)
    if mapping is None:
        mapping = new_mapping(nbytes)
    if lender is not None:
        lender.lent.append(mapping)
    return mapping


def new_mapping(nbytes: int) -> mmap.mmap:
    """Returns new private memory of zeros. Raises `MemoryBudgetError` where the system has none."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryBudgetError(
            "the system has no memory for the tensors; nothing has been changed",
            expected=f"{nbytes} bytes at once",
            found=error,
            remedy="map=True on a skeleton and in_place=True elsewhere need the least",
        ) from error


# Filling memory by userfaultfd.

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
    """Fills whole pages of private, untouched memory that no other code uses."""

    def __init__(self) -> None:
        self._maps: dict[str, _Source | None] = {}
        self._lock = threading.Lock()
        self._descriptor: int = -1
        self.is_able = True
        """False once a range could not be filled: then the others cannot be either."""

    def close(self) -> None:
        """Releases the descriptor and the maps."""
        self.is_able = False
        self._descriptor = -1  # which closes the one that was there
        self._maps.clear()

    def fill(self, descriptor: int, path: str, start: int, address: int, nbytes: int) -> tuple[int, int]:
        """Fills what it can of the memory at `address` with the bytes of an open file from `start` on.

        Returns the beginning and the end of the filled part, in bytes from `address`; the caller reads the rest.
        """
        first = -address % mmap.PAGESIZE
        last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - address
        if last - first < _LARGE_BYTES or not self._is_ready():
            return 0, 0
        source = self._source(descriptor, path, start + last)
        if source is None:
            return 0, 0
        with self._registered(address + first, last - first) as is_registered:
            done = self._copy(address + first, source.address + start + first, last - first) if is_registered else 0
        if not done:
            self.is_able = False  # the first page is there already: the memory was used before, and so is the rest
        source.forget(start + first, last - first)
        return first, first + done

    def _is_ready(self) -> bool:
        with self._lock:
            if self.is_able and self._descriptor < 0:
                try:
                    self._descriptor = _open_userfaultfd()
                except OSError:  # a container, a kernel or an operating system without userfaultfd
                    self.is_able = False
            return self.is_able

    def _source(self, descriptor: int, path: str, end: int) -> _Source | None:
        """A map of the file, if it reaches to `end`."""
        with self._lock:
            if path not in self._maps:
                self._maps[path] = None
                with suppress(OSError, ValueError):
                    self._maps[path] = _Source(descriptor)
            source = self._maps[path]
            return source if source is not None and end <= source.nbytes else None

    @contextmanager
    def _registered(self, address: int, nbytes: int) -> Iterator[bool]:
        """Registers the range only while it is filled, since a process forked meanwhile keeps the descriptor."""
        request = _Range(address, nbytes, _MODE_MISSING)
        try:
            yield _ioctl(self._descriptor, _REGISTER, request)
        finally:
            _ioctl(self._descriptor, _UNREGISTER, request)

    def _copy(self, to: int, source: int, nbytes: int) -> int:
        """Returns the bytes copied: all, or whole pages up to one that is present already or cannot be read."""
        done = 0
        while done < nbytes:
            request = _Copied(to + done, source + done, nbytes - done, _MODE_DONT_WAKE, 0)
            if _ioctl(self._descriptor, _COPY, request):
                return nbytes
            if ctypes.get_errno() != errno.EAGAIN or request.done <= 0:
                return done
            done += request.done
        return done


class _Source:
    """A map of a file that only the kernel reads."""

    def __init__(self, descriptor: int) -> None:
        self._map = system.mmap(descriptor, 0, mmap.MAP_PRIVATE | linux.MAP_NORESERVE)
        import torch

        self._shown = torch.frombuffer(self._map, dtype=torch.uint8)
        self.nbytes, self.address = self._shown.nbytes, self._shown.data_ptr()

    def forget(self, start: int, nbytes: int) -> None:
        """Drops the pages from the map: they would count as resident memory of the process."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)


def _open_userfaultfd() -> Descriptor:
    descriptor = Descriptor.of(system.userfaultfd)
    if not _ioctl(descriptor, _API, _Hello(_VERSION)):
        descriptor.close()
        raise OSError(ctypes.get_errno(), "userfaultfd has another version")
    return descriptor


_libc_ioctl = linux.function("ioctl", ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)


def _ioctl(descriptor: int, call: int, request: ctypes.Structure) -> bool:
    """Calls ioctl, and returns whether it did all that was asked for."""
    return _libc_ioctl is not None and _libc_ioctl(descriptor, call, ctypes.byref(request)) == 0
