"""Executes read requests: coalesces byte ranges, reads them in parallel, bypasses the page cache.

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
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from modelstate.errors import ReadFailedError
from modelstate.io import system
from modelstate.io.files import FileFingerprint, check_unchanged, open_unchanged
from modelstate.io.memory import UffdFiller
from modelstate.process import parallel_for
from modelstate.spec import ByteRange

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


def can_read_uncached(path: str, stamp: FileFingerprint | None) -> bool:
    """Whether a file can be opened for it, as far as that says, and there is memory in which it is fast."""
    try:
        if not FLAG or not Buffer().is_huge:
            return False
        os.close(open_unchanged(path, stamp, FLAG))
    except (OSError, ReadFailedError):
        return False  # the read itself will say what is wrong
    return True


def open_uncached(path: str, stamp: FileFingerprint | None) -> int:
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


BATCH_BYTES = 8 << 20
"""What one call reads at the most: large enough to amortise the call, small enough to share work out evenly."""
GAP_BYTES = 4 << 10
"""Reading a page too much is cheaper than another call."""
_IOV_MAX = 1024
"""How many buffers Linux takes in one call."""
_PyBUF_WRITE = 0x200


@dataclass(frozen=True, slots=True)
class Request:
    """A byte range of a file, and the address in memory where it belongs."""

    source: ByteRange
    address: int
    """Of memory that the caller keeps alive until the read has ended."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call reads: a run of a file that is spread over several places in memory."""

    path: str
    start: int
    """Bytes from the beginning of the file."""
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self.pieces)

    @property
    def wanted_bytes(self) -> int:
        """Without what is thrown away."""
        return sum(length for address, length in self.pieces if address is not None)


def coalesce(requests: Iterable[Request], *, batch_bytes: int, gap_bytes: int) -> list[Batch]:
    """The fewest calls that carry out `requests`, in the order of the file.

    A call reads at most `batch_bytes`; larger requests are split. Two ranges that lie at most `gap_bytes` apart share
    a call. The batches cover every byte of every request once.
    """
    batches: list[Batch] = []
    pieces: list[Piece] = []
    path, start, end = "", 0, 0

    def close() -> None:
        if pieces:
            batches.append(Batch(path, start, tuple(pieces)))
            pieces.clear()

    # An empty request must not open a gap: what follows it would count that gap again.
    for request in sorted((r for r in requests if r.source.nbytes), key=lambda r: (r.source.path, r.source.start)):
        source, taken = request.source, 0
        gap = source.start - end
        if source.path != path or not 0 <= gap <= gap_bytes or end - start + gap >= batch_bytes:
            close()
        elif gap and pieces:
            pieces.append((None, gap))
        while taken < source.nbytes:
            if not pieces:
                path, start = source.path, source.start + taken
                end = start
            length = min(source.nbytes - taken, max(batch_bytes - (source.start + taken - start), 1))
            pieces.append((request.address + taken, length))
            taken += length
            end = source.start + taken
            if end - start >= batch_bytes or len(pieces) >= _IOV_MAX - 1:
                close()
    close()
    return batches


def read_batches(
    batches: Sequence[Batch],
    *,
    threads: int,
    stamps: Mapping[str, FileFingerprint],
    on_read: Callable[[int], None] | None = None,
    uncached: Collection[str] = (),
    filler: UffdFiller | None = None,
) -> None:
    """Carries out `batches` with so many threads; `on_read` hears of the wanted bytes of each as it ends, from one
    thread at a time.

    `stamps` are what the files must be, before the first byte is read and after the last. Files that are named in
    `uncached` are read past the page cache, with a buffer for each thread. A `filler` is for memory that is fresh, all
    of it. Raises `ReadFailedError` for the first I/O error, short read or changed file. No thread writes to memory any
    more when this returns or raises.
    """
    waiting, lock = iter(batches), threading.Lock()

    def work(stop: threading.Event) -> None:
        read = reader(uncached, filler)
        while not stop.is_set():
            with lock:
                batch = next(waiting, None)
            if batch is None:
                return
            read(descriptors[batch.path], batch)
            if on_read:
                with lock:
                    on_read(batch.wanted_bytes)

    with open_files((batch.path for batch in batches), stamps, uncached) as descriptors:
        parallel_for(work, min(threads, len(batches)))


@contextmanager
def open_files(
    paths: Iterable[str], stamps: Mapping[str, FileFingerprint], uncached: Collection[str] = ()
) -> Iterator[dict[str, int]]:
    """Descriptors of files by their paths, as long as the context lasts. What reads them is a `reader`.

    Raises `ReadFailedError` where a file is not that of its stamp, before or after.
    """
    descriptors: dict[str, int] = {}
    try:
        for path in dict.fromkeys(paths):
            descriptors[path] = (open_uncached if path in uncached else open_unchanged)(path, stamps.get(path))
        yield descriptors
        for path, descriptor in descriptors.items():
            check_unchanged(descriptor, path, stamps.get(path))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def read_ranges(
    requests: Iterable[Request],
    *,
    stamps: Mapping[str, FileFingerprint],
    on_read: Callable[[int], None] | None = None,
    threads: int | None = None,
    uncached: Collection[str] = (),
    filler: UffdFiller | None = None,
) -> None:
    """Plans the requests and carries them out, in the sizes that are good for most. Raises as `read_batches`."""
    batches = coalesce(requests, batch_bytes=BATCH_BYTES, gap_bytes=GAP_BYTES)
    threads = threads or (uncached_threads(read_threads()) if uncached else read_threads())
    read_batches(batches, threads=threads, stamps=stamps, on_read=on_read, uncached=uncached, filler=filler)


def reader(uncached: Collection[str], filler: UffdFiller | None = None) -> Callable[[int, Batch], None]:
    """What one thread reads batches with, of files that `open_files` has opened."""
    buffer: Buffer | None = None
    with suppress(OSError):  # there is hardly any memory left: without it the page cache will do
        buffer = Buffer() if uncached else None

    def read(descriptor: int, batch: Batch) -> None:
        if batch.path in uncached and buffer is not None:
            read_uncached(descriptor, batch.path, batch.start, batch.pieces, buffer)
            return
        if batch.path in uncached:
            use_page_cache(descriptor)
        for left in [batch] if filler is None else _left_by(filler, descriptor, batch):
            read_batch(descriptor, left)

    return read


def _left_by(filler: UffdFiller, descriptor: int, batch: Batch) -> list[Batch]:
    """What there is to read of a batch when the filler has filled what it can."""
    left = []
    for start, address, nbytes in _runs(batch):
        first, last = filler.fill(descriptor, batch.path, start, address, nbytes)
        left.append(Request(ByteRange(batch.path, start, first), address))
        left.append(Request(ByteRange(batch.path, start + last, nbytes - last), address + last))
    return coalesce(left, batch_bytes=BATCH_BYTES, gap_bytes=GAP_BYTES)


def _runs(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Places in the file, addresses and lengths in bytes of what lies together in both."""
    start = at = batch.start
    begins: int | None = None
    for address, nbytes in batch.pieces:
        if begins is not None and address != begins + at - start:
            yield start, begins, at - start
            begins = None
        if begins is None:
            start, begins = at, address
        at += nbytes
    if begins is not None:
        yield start, begins, at - start


def read_batch(descriptor: int, batch: Batch) -> None:
    """Carries out one batch. Raises `ReadFailedError`."""
    at, left = batch.start, batch.nbytes
    largest_gap = max((length for address, length in batch.pieces if address is None), default=0)
    scratch = memoryview(bytearray(largest_gap))
    views = [memory_at(a, n) if a is not None else scratch[:n] for a, n in batch.pieces]
    while left:
        try:
            got = system.preadv(descriptor, views, at)
        except OSError as error:
            raise ReadFailedError("reading failed", where=f"{batch.path}, byte {at}", found=error) from error
        if got == 0:
            raise ends_early(batch.path, at, left)
        at, left = at + got, left - got
        if left:
            views = _after(views, got)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What remains of the buffers behind the first `count` bytes, after a call that read fewer than asked."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def memory_at(address: int, nbytes: int) -> memoryview:
    """So many bytes at an address, which the caller keeps alive."""
    return _view_of_memory(address, nbytes, _PyBUF_WRITE)


_view_of_memory: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


def read_threads() -> int:
    """Threads for a read: as many as there are processors for this process, up to 8."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, 8)
