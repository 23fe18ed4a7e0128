"""Reads and writes past the page cache: the aligned windows of a file, and the buffer that they go through.

O_DIRECT requires offsets, lengths and addresses that are multiples of a block, so a window around the requested bytes
is read into a small buffer, and the requested bytes are copied from there to their destinations.

The buffer is one huge page. The disk of a virtual machine takes a few hundred contiguous pieces of memory at a time:
with small pages, which are scattered, O_DIRECT was measured to be slower than the page cache.
"""

import ctypes
import errno
import mmap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from modelstate.io import linux
from modelstate.io.memory import HUGE_PAGE_BYTES

BUFFER_BYTES = HUGE_PAGE_BYTES
"""The size of one O_DIRECT read."""
ALIGN_BYTES = 4096
"""A multiple of the alignment that disks and file systems require for O_DIRECT."""
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The errors of a file system that does not support O_DIRECT."""

Piece = tuple[int | None, int]
"""The destination of a part of a file: an address, or None for bytes that are discarded, and a length in bytes."""


class Copy(NamedTuple):
    """A requested part of a window."""

    at: int
    """Bytes from the beginning of the window."""
    address: int
    nbytes: int


class Window(NamedTuple):
    """One O_DIRECT read into the buffer."""

    start: int
    """Bytes from the beginning of the file: a multiple of `ALIGN_BYTES`, as `nbytes` is."""
    nbytes: int
    """The length to ask for; the file may end before that."""
    needed_bytes: int
    """The length that must arrive."""
    copies: tuple[Copy, ...]


def windows(start: int, pieces: Iterable[Piece], most_bytes: int = BUFFER_BYTES) -> Iterator[Window]:
    """The O_DIRECT reads of a run of a file that begins at `start`, each of at most `most_bytes`.

    The windows are contiguous, and their copies cover every byte that has a destination once.
    """
    window_start = start // ALIGN_BYTES * ALIGN_BYTES
    copies: list[Copy] = []
    offset = start
    for address, nbytes in pieces:
        done = 0
        while done < nbytes:
            if offset == window_start + most_bytes:
                yield Window(window_start, most_bytes, most_bytes, tuple(copies))
                window_start, copies = offset, []
            length = min(nbytes - done, window_start + most_bytes - offset)
            if address is not None:
                copies.append(Copy(offset - window_start, address + done, length))
            done, offset = done + length, offset + length
    if offset > start:
        needed = offset - window_start
        yield Window(window_start, -(-needed // ALIGN_BYTES) * ALIGN_BYTES, needed, tuple(copies))


class Buffer:
    """Memory that one thread reads files into, or writes them from; in huge pages if it is at least one page large.

    Raises `OSError` where no memory is available.
    """

    def __init__(self, nbytes: int = BUFFER_BYTES) -> None:
        # Larger than asked for, so that it can begin and end at a huge page; the rest is never touched.
        self._memory = mmap.mmap(-1, nbytes + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        offset = -first % HUGE_PAGE_BYTES
        self.address = first + offset
        self.view = memoryview(self._memory)[offset : offset + nbytes]
        self.is_huge = False
        """Whether the memory is known to lie in huge pages."""
        if nbytes < HUGE_PAGE_BYTES:
            return
        nbytes = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        advice = (linux.Advice.HUGEPAGE, linux.Advice.POPULATE_WRITE, linux.Advice.COLLAPSE)
        self.is_huge = all(linux.madvise(self.address, nbytes, each) == 0 for each in advice)
