"""Reading many byte ranges into memory that exists: a pure plan of the requests, and threads that carry it out."""

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from modelstate.errors import ReadFailedError
from modelstate.read import system
from modelstate.read.fill import Filler
from modelstate.read.stamp import Stamp, check_unchanged, open_unchanged
from modelstate.read.uncached import (
    Buffer,
    Piece,
    ends_early,
    open_uncached,
    read_uncached,
    uncached_threads,
    use_page_cache,
)
from modelstate.read.workers import work_together
from modelstate.spec import ByteRange

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
    stamps: Mapping[str, Stamp],
    on_read: Callable[[int], None] | None = None,
    uncached: Collection[str] = (),
    filler: Filler | None = None,
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
        work_together(work, min(threads, len(batches)))


@contextmanager
def open_files(
    paths: Iterable[str], stamps: Mapping[str, Stamp], uncached: Collection[str] = ()
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
    stamps: Mapping[str, Stamp],
    on_read: Callable[[int], None] | None = None,
    threads: int | None = None,
    uncached: Collection[str] = (),
    filler: Filler | None = None,
) -> None:
    """Plans the requests and carries them out, in the sizes that are good for most. Raises as `read_batches`."""
    batches = coalesce(requests, batch_bytes=BATCH_BYTES, gap_bytes=GAP_BYTES)
    threads = threads or (uncached_threads(read_threads()) if uncached else read_threads())
    read_batches(batches, threads=threads, stamps=stamps, on_read=on_read, uncached=uncached, filler=filler)


def reader(uncached: Collection[str], filler: Filler | None = None) -> Callable[[int, Batch], None]:
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


def _left_by(filler: Filler, descriptor: int, batch: Batch) -> list[Batch]:
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
