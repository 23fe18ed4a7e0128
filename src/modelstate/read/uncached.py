"""Reads past the page cache (`O_DIRECT`), of files that are not in it.

The kernel spends as long on bringing a cold file into its page cache, and copying it out of there, as a fast disk takes
to read it; and it throws out what others use. Without the cache the disk writes into memory of the process, which takes
hardly any time of a processor. It asks for offsets, lengths and addresses that are multiples of a block: what is wanted
is read with what lies around it into a small buffer, and copied from there to its places.

The buffer is one huge page. A disk of a virtual machine takes pieces of memory that lie together, a few hundred at a
time: with small pages, which lie anywhere, it was slower than the page cache.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from modelstate.errors import ReadFailedError
from modelstate.read import system
from modelstate.read.stamp import Stamp, open_unchanged

_HUGE_PAGE_BYTES = 2 << 20
BUFFER_BYTES = _HUGE_PAGE_BYTES
"""What a thread reads at once."""
ALIGN_BYTES = 4096
"""What disks and file systems ask for, or a multiple of it."""
_LEAST_THREADS = 4
"""Threads wait for the disk here, and do not compute: more of them than processors keep it at work."""
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
"""Of Linux since 5.14 and 6.1."""
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems answer that cannot do it."""
FLAG = getattr(os, "O_DIRECT", 0)

Piece = tuple[int | None, int]
"""An address and a length in bytes: where a part of a file goes. Without an address it is thrown away."""


class Copy(NamedTuple):
    """A part of a window that is wanted."""

    at: int
    """Bytes from the beginning of the window."""
    address: int
    nbytes: int


class Window(NamedTuple):
    """What is read into the buffer at once."""

    start: int
    """Bytes from the beginning of the file: a multiple of `ALIGN_BYTES`, as `nbytes` is."""
    nbytes: int
    """To ask for; the file may end before that."""
    needed_bytes: int
    """To have, from the beginning."""
    copies: tuple[Copy, ...]


def windows(start: int, pieces: Iterable[Piece], most_bytes: int = BUFFER_BYTES) -> Iterator[Window]:
    """What to read of a run of a file that begins at `start` and goes to these places, in windows of `most_bytes`.

    The windows lie one behind the other, and their copies have every byte once that has a place.
    """
    at = start // ALIGN_BYTES * ALIGN_BYTES
    copies: list[Copy] = []
    place = start
    for address, nbytes in pieces:
        done = 0
        while done < nbytes:
            if place == at + most_bytes:
                yield Window(at, most_bytes, most_bytes, tuple(copies))
                at, copies = place, []
            length = min(nbytes - done, at + most_bytes - place)
            if address is not None:
                copies.append(Copy(place - at, address + done, length))
            done, place = done + length, place + length
    if place > start:
        yield Window(at, -(-(place - at) // ALIGN_BYTES) * ALIGN_BYTES, place - at, tuple(copies))


class Buffer:
    """Memory of one thread that files are read into, or written from: in huge pages, if it is as large as one.

    Raises `OSError` where there is none.
    """

    def __init__(self, nbytes: int = BUFFER_BYTES) -> None:
        # Larger than it is, to begin and to end where a huge page can; nothing else is ever touched.
        self._memory = mmap.mmap(-1, nbytes + 2 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        offset = -first % _HUGE_PAGE_BYTES
        self.address = first + offset
        self.view = memoryview(self._memory)[offset : offset + nbytes]
        self.is_huge = False
        """Whether it is known to lie in such pages."""
        if nbytes < _HUGE_PAGE_BYTES:
            return
        nbytes = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        with suppress(OSError, AttributeError, ValueError):
            self._memory.madvise(mmap.MADV_HUGEPAGE, offset, nbytes)
            self._memory.madvise(_MADV_POPULATE_WRITE, offset, nbytes)
            self._memory.madvise(_MADV_COLLAPSE, offset, nbytes)
            self.is_huge = True


def uncached_threads(usual: int) -> int:
    """Threads for such a read, where one through the page cache has so many."""
    return max(usual, _LEAST_THREADS)


def can_read_uncached(path: str, stamp: Stamp | None) -> bool:
    """Whether a file can be opened for it, as far as that says, and there is memory in which it is fast."""
    try:
        if not FLAG or not Buffer().is_huge:
            return False
        os.close(open_unchanged(path, stamp, FLAG))
    except (OSError, ReadFailedError):
        return False  # the read itself will say what is wrong
    return True


def open_uncached(path: str, stamp: Stamp | None) -> int:
    """A descriptor of the file, for `read_uncached`; through the page cache, where the file system has no other way.

    Raises `ReadFailedError`.
    """
    try:
        return open_unchanged(path, stamp, FLAG)
    except ReadFailedError as error:
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in UNSUPPORTED):
            raise
    return open_unchanged(path, stamp)


def read_uncached(descriptor: int, path: str, start: int, pieces: Sequence[Piece], buffer: Buffer) -> None:
    """Reads a run of a file, from `start` on, to its places. Raises `ReadFailedError`."""
    for window in windows(start, pieces):
        _fill(descriptor, path, window, buffer.view)
        for at, address, nbytes in window.copies:
            ctypes.memmove(address, buffer.address + at, nbytes)


def _fill(descriptor: int, path: str, window: Window, view: memoryview) -> None:
    got = 0
    while got < window.needed_bytes:
        at = window.start + got
        uncached = is_uncached(descriptor)
        try:
            count = system.preadv(descriptor, [view[got : window.nbytes]], at)
        except OSError as error:
            # A file system may take the flag and refuse the read, or ask for larger blocks; and what is left of a read
            # that came short may begin anywhere.
            if uncached and error.errno in UNSUPPORTED:
                use_page_cache(descriptor)
                continue
            raise ReadFailedError("reading failed", where=f"{path}, byte {at}", found=error) from error
        if count == 0:
            raise ends_early(path, at, window.needed_bytes - got)
        got += count


def ends_early(path: str, at: int, left: int) -> ReadFailedError:
    """That a file has ended where a tensor goes on for so many bytes."""
    return ReadFailedError(
        "the file ends before the tensor does",
        where=f"{path}, byte {at}",
        expected=f"{left} more bytes",
        remedy="open the checkpoint again, when nothing writes to it any more",
    )


def is_uncached(descriptor: int) -> bool:
    """Whether what is read with the descriptor goes past the page cache."""
    if not FLAG:
        return False
    import fcntl  # not there where the flag is not

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & FLAG)


def use_page_cache(descriptor: int) -> None:
    """From now on the descriptor reads through the page cache, from any offset, for all threads that have it."""
    if is_uncached(descriptor):
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~FLAG)
