"""Allocates the memory that values are read into."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelstate.errors import MemoryBudgetError
from modelstate.io import system
from modelstate.spec import span

if TYPE_CHECKING:
    from typing import Self

    import torch

HUGE_PAGE_BYTES = 2 << 20
DIRECT_ALIGN_BYTES = 4096
"""A multiple of the alignment that disks and file systems require for O_DIRECT."""
TENSOR_ALIGN_BYTES = 64
_LARGE_BYTES = 256 << 10
"""Smaller tensors are not worth system calls of their own."""

Layout = tuple["torch.Size", tuple[int, ...] | None, "torch.dtype"]
"""Shape, stride (None for contiguous) and dtype of a tensor."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a tensor's memory."""
    return -(-nbytes // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES


def empty_cpu(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous CPU tensor, as of `fresh_tensors`."""
    import torch

    return fresh_tensors([(torch.Size(shape), None, dtype)])[0]


def fresh_tensors(like: Sequence[Layout]) -> list[torch.Tensor]:
    """A new CPU tensor for each shape, stride (None for contiguous) and dtype, in memory that no other tensor uses.

    The memory of a large one is returned to the system when it is freed: `malloc` keeps what is freed between other
    allocations. Three loads of 600 MB, of 16 MB a tensor, were measured to leave 1.3 GB there.

    Raises `MemoryBudgetError` where the system has no memory.
    """
    import torch

    tensors = list[torch.Tensor]()
    flags, nbytes = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0
    try:
        with torch.inference_mode(False):  # otherwise they could never be trained
            for shape, stride, dtype in like:
                count = shape.numel() if stride is None else span(shape, stride)
                if (nbytes := count * dtype.itemsize) < _LARGE_BYTES:
                    flat = torch.empty(count, dtype=dtype, device="cpu")
                else:
                    # In small pages: on a virtual machine whose host has not backed the memory yet, faults of huge
                    # pages were measured to take two to three times as long as those of small pages, which the kernel
                    # takes from memory that was used before.
                    flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=dtype)
                # Reshaped in place, without another object.
                tensors.append(flat.resize_(shape) if stride is None else flat.as_strided_(shape, stride))
    except (OSError, RuntimeError) as error:
        raise MemoryBudgetError(
            "the system has no memory for the tensors; nothing has been changed",
            expected=f"{nbytes} bytes at once",
            found=error,
            remedy="map=True on a skeleton and in_place=True elsewhere need the least",
        ) from error
    return tensors


class Buffer(mmap.mmap):
    """Memory that one thread reads and writes files through, or that a device copies from: in huge pages, if possible.

    The disk of a virtual machine takes a few hundred contiguous pieces of memory at a time: with small pages, which
    are scattered, O_DIRECT was measured to be slower than the page cache.

    Raises `OSError` where no memory is available.
    """

    def __new__(cls, nbytes: int, *advice: system.Advice) -> Self:
        # Larger than asked for, so that it can begin and end at a huge page; the rest is never touched.
        return super().__new__(cls, -1, nbytes + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, nbytes: int, *advice: system.Advice) -> None:
        """Advises the kernel; by default it allocates all pages."""
        first, unit = ctypes.addressof(ctypes.c_char.from_buffer(self)), mmap.PAGESIZE
        self._start, self._end = -first % HUGE_PAGE_BYTES, -first % HUGE_PAGE_BYTES + nbytes
        self.address = first + self._start
        if nbytes >= HUGE_PAGE_BYTES:
            unit = HUGE_PAGE_BYTES
        for each in advice or (system.Advice.HUGEPAGE, system.Advice.POPULATE_WRITE, system.Advice.COLLAPSE):
            system.madvise(self.address, -(-nbytes // unit) * unit, each)

    @property
    def view(self) -> memoryview:
        """The memory, which stays while there is a view of it."""
        return memoryview(self)[self._start : self._end]
