"""Executes read requests: coalesces byte ranges, reads them in parallel, and bypasses the page cache where asked.

The kernel spends as long on filling its page cache from a cold file and copying the bytes out of it as a fast disk
takes to read the file, and it evicts what other processes use. With O_DIRECT the disk writes into memory of this
process at hardly any CPU cost. O_DIRECT requires offsets, lengths and addresses that are multiples of a block, so a
window around the requested bytes is read into a small buffer, and the requested bytes are copied from there to their
destinations.

The buffer is one huge page. The disk of a virtual machine takes a few hundred contiguous pieces of memory at a time:
with small pages, which are scattered, O_DIRECT was measured to be slower than the page cache.

Invariants:

- Every byte of every request is written once, and no thread writes to a destination after a read has returned or
  raised.
- A file is checked against its fingerprint before its first byte is read and after its last.
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

BATCH_BYTES = 8 << 20
"""The most that one call reads: large enough to amortise the call, small enough to share the work out evenly."""
GAP_BYTES = 4 << 10
"""The largest gap between two ranges of one call: reading one page too much is cheaper than another call."""
_IOV_MAX = 1024
"""The number of buffers that Linux accepts in one call."""
_PyBUF_WRITE = 0x200

_HUGE_PAGE_BYTES = 2 << 20
BUFFER_BYTES = _HUGE_PAGE_BYTES
"""The size of one O_DIRECT read."""
ALIGN_BYTES = 4096
"""A multiple of the alignment that disks and file systems require for O_DIRECT."""
_LEAST_UNCACHED_THREADS = 4
"""O_DIRECT threads wait for the disk and do not compute, so more threads than processors keep the disk busy."""
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
"""Available since Linux 5.14 and 6.1."""
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The errors of a file system that does not support O_DIRECT."""
FLAG = getattr(os, "O_DIRECT", 0)
"""0 where the operating system has no O_DIRECT."""

Piece = tuple[int | None, int]
"""The destination of a part of a file: an address, or None for bytes that are discarded, and a length in bytes."""


@dataclass(frozen=True, slots=True)
class Request:
    """A byte range of a file, and the memory address that it is read to."""

    source: ByteRange
    address: int
    """The caller keeps the memory alive until the read has ended."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One read call: a contiguous run of a file that is scattered to several places in memory."""

    path: str
    start: int
    """Bytes from the beginning of the file."""
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self.pieces)

    @property
    def wanted_bytes(self) -> int:
        """The bytes that were requested, without the gaps between them."""
        return sum(length for address, length in self.pieces if address is not None)


def read_ranges(
    requests: Iterable[Request],
    *,
    fingerprints: Mapping[str, FileFingerprint],
    on_read: Callable[[int], None] | None = None,
    threads: int | None = None,
    uncached: Collection[str] = (),
    filler: UffdFiller | None = None,
) -> None:
    """Coalesces the requests into batches of the default size and executes them.

    Args:
        requests: The byte ranges and their destinations.
        fingerprints: See `read_batches`.
        on_read: See `read_batches`.
        threads: The number of threads; by default one for each processor, up to 8.
        uncached: See `read_batches`.
        filler: See `read_batches`.

    Raises:
        ReadFailedError: As `read_batches` raises it.
    """
    batches = coalesce(requests, batch_bytes=BATCH_BYTES, gap_bytes=GAP_BYTES)
    threads = threads or (uncached_threads(read_threads()) if uncached else read_threads())
    read_batches(batches, threads=threads, fingerprints=fingerprints, on_read=on_read, uncached=uncached, filler=filler)


def read_batches(
    batches: Sequence[Batch],
    *,
    threads: int,
    fingerprints: Mapping[str, FileFingerprint],
    on_read: Callable[[int], None] | None = None,
    uncached: Collection[str] = (),
    filler: UffdFiller | None = None,
) -> None:
    """Executes the batches on several threads. No thread writes to memory any more when this returns or raises.

    Args:
        batches: The read calls, as `coalesce` makes them.
        threads: The largest number of threads.
        fingerprints: What each file must be before the first byte is read and after the last.
        on_read: Called with the number of requested bytes after each batch, by one thread at a time.
        uncached: Paths of files that are read with O_DIRECT, through one buffer for each thread.
        filler: Fills destinations with UFFDIO_COPY; all of them must be fresh memory.

    Raises:
        ReadFailedError: The first I/O error, a short read, or a file that has changed.
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

    with open_files((batch.path for batch in batches), fingerprints, uncached) as descriptors:
        parallel_for(work, min(threads, len(batches)))


def coalesce(requests: Iterable[Request], *, batch_bytes: int, gap_bytes: int) -> list[Batch]:
    """Returns the fewest read calls that execute `requests`, in the order of the file.

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

    # An empty request must not open a gap: the request behind it would count that gap again.
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


@contextmanager
def open_files(
    paths: Iterable[str], fingerprints: Mapping[str, FileFingerprint], uncached: Collection[str] = ()
) -> Iterator[dict[str, int]]:
    """Opens files for a `reader`, and yields their descriptors by path.

    Raises `ReadFailedError` where a file does not match its fingerprint when it is opened, or when the block ends.
    """
    descriptors: dict[str, int] = {}
    try:
        for path in dict.fromkeys(paths):
            descriptors[path] = (open_uncached if path in uncached else open_unchanged)(path, fingerprints.get(path))
        yield descriptors
        for path, descriptor in descriptors.items():
            check_unchanged(descriptor, path, fingerprints.get(path))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def reader(uncached: Collection[str], filler: UffdFiller | None = None) -> Callable[[int, Batch], None]:
    """Returns the function with which one thread reads batches of files that `open_files` has opened."""
    buffer: Buffer | None = None
    with suppress(OSError):  # hardly any memory is left: the read goes through the page cache instead
        buffer = Buffer() if uncached else None

    def read(descriptor: int, batch: Batch) -> None:
        if batch.path in uncached:
            if buffer is not None:
                _read_uncached(descriptor, batch, buffer)
                return
            use_page_cache(descriptor)
        for part in [batch] if filler is None else _fill(filler, descriptor, batch):
            _read_batch(descriptor, part)

    return read


def _fill(filler: UffdFiller, descriptor: int, batch: Batch) -> list[Batch]:
    """Fills what the filler can of a batch, and returns what is left to read."""
    left = []
    for start, address, nbytes in _contiguous_runs(batch):
        first, last = filler.fill(descriptor, batch.path, start, address, nbytes)
        left.append(Request(ByteRange(batch.path, start, first), address))
        left.append(Request(ByteRange(batch.path, start + last, nbytes - last), address + last))
    return coalesce(left, batch_bytes=BATCH_BYTES, gap_bytes=GAP_BYTES)


def _contiguous_runs(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """File offset, address and length of each run that is contiguous in the file and in memory."""
    start = offset = batch.start
    first: int | None = None
    for address, nbytes in batch.pieces:
        if first is not None and address != first + offset - start:
            yield start, first, offset - start
            first = None
        if first is None:
            start, first = offset, address
        offset += nbytes
    if first is not None:
        yield start, first, offset - start


def _read_batch(descriptor: int, batch: Batch) -> None:
    offset, left = batch.start, batch.nbytes
    largest_gap = max((length for address, length in batch.pieces if address is None), default=0)
    scratch = memoryview(bytearray(largest_gap))
    views = [memory_at(a, n) if a is not None else scratch[:n] for a, n in batch.pieces]
    while left:
        try:
            count = system.preadv(descriptor, views, offset)
        except OSError as error:
            raise ReadFailedError("reading failed", where=f"{batch.path}, byte {offset}", found=error) from error
        if count == 0:
            raise _ends_early(batch.path, offset, left)
        offset, left = offset + count, left - count
        if left:
            views = _views_after(views, count)


def _views_after(views: list[memoryview], count: int) -> list[memoryview]:
    """The buffers behind the first `count` bytes, after a call that read less than was asked for."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def _ends_early(path: str, offset: int, left: int) -> ReadFailedError:
    return ReadFailedError(
        "the file ends before the tensor does",
        where=f"{path}, byte {offset}",
        expected=f"{left} more bytes",
        remedy="open the checkpoint again, when nothing writes to it any more",
    )


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of memory at an address. The caller keeps the memory alive."""
    return _view_of_memory(address, nbytes, _PyBUF_WRITE)


_view_of_memory: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


def read_threads() -> int:
    """The number of threads for a read: as many as there are processors for this process, up to 8."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, 8)


# Reading with O_DIRECT.


def uncached_threads(usual: int) -> int:
    """The number of threads for an O_DIRECT read, where a read through the page cache uses `usual`."""
    return max(usual, _LEAST_UNCACHED_THREADS)


def can_read_uncached(path: str, fingerprint: FileFingerprint | None) -> bool:
    """Whether the file can be opened with O_DIRECT, and memory for a fast buffer is available."""
    try:
        if not FLAG or not Buffer().is_huge:
            return False
        os.close(open_unchanged(path, fingerprint, FLAG))
    except (OSError, ReadFailedError):
        return False  # the read itself reports what is wrong
    return True


def open_uncached(path: str, fingerprint: FileFingerprint | None) -> int:
    """Opens the file with O_DIRECT, or for the page cache where the file system does not support O_DIRECT.

    Raises `ReadFailedError`.
    """
    try:
        return open_unchanged(path, fingerprint, FLAG)
    except ReadFailedError as error:
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in UNSUPPORTED):
            raise
    return open_unchanged(path, fingerprint)


def is_uncached(descriptor: int) -> bool:
    """Whether reads with the descriptor bypass the page cache."""
    if not FLAG:
        return False
    import fcntl  # missing on systems without O_DIRECT

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & FLAG)


def use_page_cache(descriptor: int) -> None:
    """Makes the descriptor read through the page cache, from any offset, for every thread that uses it."""
    if is_uncached(descriptor):
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~FLAG)


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
        self._memory = mmap.mmap(-1, nbytes + 2 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        offset = -first % _HUGE_PAGE_BYTES
        self.address = first + offset
        self.view = memoryview(self._memory)[offset : offset + nbytes]
        self.is_huge = False
        """Whether the memory is known to lie in huge pages."""
        if nbytes < _HUGE_PAGE_BYTES:
            return
        nbytes = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        with suppress(OSError, AttributeError, ValueError):
            self._memory.madvise(mmap.MADV_HUGEPAGE, offset, nbytes)
            self._memory.madvise(_MADV_POPULATE_WRITE, offset, nbytes)
            self._memory.madvise(_MADV_COLLAPSE, offset, nbytes)
            self.is_huge = True


def _read_uncached(descriptor: int, batch: Batch, buffer: Buffer) -> None:
    for window in windows(batch.start, batch.pieces):
        _read_window(descriptor, batch.path, window, buffer.view)
        for at, address, nbytes in window.copies:
            ctypes.memmove(address, buffer.address + at, nbytes)


def _read_window(descriptor: int, path: str, window: Window, view: memoryview) -> None:
    done = 0
    while done < window.needed_bytes:
        offset = window.start + done
        uncached = is_uncached(descriptor)
        try:
            count = system.preadv(descriptor, [view[done : window.nbytes]], offset)
        except OSError as error:
            # A file system may accept the flag and refuse the read, or require larger blocks; and the rest of a short
            # read may begin at an offset that is not aligned.
            if uncached and error.errno in UNSUPPORTED:
                use_page_cache(descriptor)
                continue
            raise ReadFailedError("reading failed", where=f"{path}, byte {offset}", found=error) from error
        if count == 0:
            raise _ends_early(path, offset, window.needed_bytes - done)
        done += count
