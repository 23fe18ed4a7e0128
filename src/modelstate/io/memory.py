"""Allocates the memory that values are read into, and counts what a load holds."""

from __future__ import annotations

import math
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from modelstate.errors import MemoryBudgetError
from modelstate.process import ThreadValue
from modelstate.spec import contiguous_stride, span

if TYPE_CHECKING:
    import torch

HUGE_PAGE_BYTES = 2 << 20
TENSOR_ALIGN_BYTES = 64
_ARENA_BYTES = 256 << 20
_LARGE_BYTES = 1 << 20
"""Smaller tensors are not worth system calls of their own."""
_LEAST_POOLED_BYTES = 1 << 20
"""Smaller mappings are not kept for later tensors."""


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
