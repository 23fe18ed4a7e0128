"""What of a file is in the page cache, and ways to bring the rest in: readahead, prefault.

A few threads that read a cold file have a few requests under way. The kernel can have many, which is what a disk needs
to be fast. For maps see `modelstate.io.page_cache`.

Whoever uses a map that is not in the page cache waits for the disk again and again. The kernel reads ahead of one who
goes through it in order; two or more who go through different parts of it have the disk read at its full speed. The
parts come in the order in which they are used, and not as they lie in the file, which may have its layers sorted by
name, the tenth before the second: then a model can run right behind them.
"""

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from modelstate.errors import ReadFailedError
from modelstate.io import system
from modelstate.io.engine import read_threads
from modelstate.io.files import FileFingerprint, open_unchanged
from modelstate.io.system import function
from modelstate.process import parallel_for, run_detached
from modelstate.spec import ByteRange

LEAST_BYTES = 16 << 20
"""Less than this is read before a thread has been started."""
_GAP_BYTES = 1 << 20
_STEP_BYTES = 128 << 10
"""What one call asks for. The kernel cuts larger ones down to what its block device reads ahead, without saying so."""
_PROBES, _PROBE_BYTES = 16, 64 << 10
_CACHESTAT = 451
"""The number of the system call, the same on all processors that have got it since Linux 6.5."""
_MOST_OF_MEMORY = 0.5


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def read_ahead(ranges: Iterable[ByteRange], stamps: Mapping[str, FileFingerprint]) -> int:
    """Has the kernel begin to read what of these ranges is not in the page cache, without waiting for it.

    Returns the bytes that it is asked for; none where they are there already, where nobody can tell, or where they
    are too few to matter. Never more than half of the memory that is available.
    """
    spans = merged(ranges)
    if sum(span.nbytes for span in spans) < LEAST_BYTES:
        return 0
    cold = cold_ranges(spans, stamps)
    total = min(sum(span.nbytes for span in cold), most_to_read())
    if total:
        run_detached(partial(_ask, cold, total, stamps))
    return total


def merged(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """The ranges in the order of their files, those that lie near each other as one."""
    spans: list[ByteRange] = []
    for one in sorted((one for one in ranges if one.nbytes), key=lambda one: (one.path, one.start)):
        last = spans[-1] if spans else None
        if last is not None and last.path == one.path and one.start - (last.start + last.nbytes) <= _GAP_BYTES:
            end = max(last.start + last.nbytes, one.start + one.nbytes)
            spans[-1] = ByteRange(one.path, last.start, end - last.start)
        else:
            spans.append(one)
    return spans


def cold_ranges(ranges: Iterable[ByteRange], stamps: Mapping[str, FileFingerprint]) -> list[ByteRange]:
    """Those of which less than half is in the page cache."""
    return [one for one in ranges if is_cold(one, stamps.get(one.path))]


def is_cold(span: ByteRange, stamp: FileFingerprint | None = None) -> bool:
    """Whether less than half of a range is in the page cache, by samples; False where nobody can tell."""
    try:
        descriptor = open_unchanged(span.path, stamp)
    except ReadFailedError:
        return False  # the read itself will say it
    try:
        probes = list(_probes(span))
        shares = [cached_share(descriptor, start, nbytes) for start, nbytes in probes]
    finally:
        os.close(descriptor)
    known = [share for share in shares if share is not None]
    return bool(known) and sum(known) < len(known) / 2


def _probes(span: ByteRange) -> Iterator[tuple[int, int]]:
    if span.nbytes <= _PROBES * _PROBE_BYTES:
        yield span.start, span.nbytes
        return
    apart = (span.nbytes - _PROBE_BYTES) // (_PROBES - 1)
    for index in range(_PROBES):
        yield span.start + index * apart, _PROBE_BYTES


def cached_share(descriptor: int, start: int, nbytes: int) -> float | None:
    """The part of a range that is in the page cache, from 0 to 1; None where the kernel does not say."""
    page = mmap.PAGESIZE
    first, behind = start // page, -(-(start + nbytes) // page)
    asked, pages = _Range(first * page, (behind - first) * page), _Pages()
    if _libc is None:
        return None
    if _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(asked), ctypes.byref(pages), 0):
        return _share_by_map(_libc, descriptor, first * page, start + nbytes)
    return float(min(pages.cached / max(behind - first, 1), 1.0))


def _share_by_map(libc: Any, descriptor: int, first: int, end: int) -> float | None:
    """The same by `mincore`, for older kernels: they count the pages of a map that nobody has touched.

    Of files that the user could not write to they say that all of them are there.
    """
    try:
        # Written to by nobody; ctypes wants a buffer that could be.
        with system.mmap(descriptor, end - first, mmap.MAP_PRIVATE, first) as shown:
            there = (ctypes.c_ubyte * -(-(end - first) // mmap.PAGESIZE))()
            begin = ctypes.c_char.from_buffer(shown)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(end - first), there)
            del begin
    except (OSError, ValueError):
        return None
    return None if failed else sum(page & 1 for page in there) / len(there)


def _ask(spans: list[ByteRange], total: int, stamps: Mapping[str, FileFingerprint]) -> None:
    with suppress(OSError, ReadFailedError):  # whoever reads will say what is wrong
        for span in spans:
            descriptor = open_unchanged(span.path, stamps.get(span.path))
            try:
                for start in range(span.start, span.start + min(span.nbytes, total), _STEP_BYTES):
                    length = min(_STEP_BYTES, span.start + span.nbytes - start)
                    os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
            total -= span.nbytes
            if total <= 0:
                return


def most_to_read() -> int:
    """The most bytes that may be brought into the page cache before they are used: half of the memory available."""
    return int(_available_bytes() * _MOST_OF_MEMORY)


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def _find_libc() -> Any:
    try:
        found: Any = ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None
    return found if hasattr(found, "syscall") and hasattr(found, "mincore") else None


_libc = _find_libc()


_PIECE_BYTES = 64 << 20
"""What a thread asks for at once: many of the windows that the kernel reads ahead, so that it finds them in order. What
is used one after the other, up to so much, is asked for as it lies in the file."""
_EHWPOISON = 133
_MADV_POPULATE_READ = 22
"""Since Linux 5.14; with it a file that has become shorter is an error, and no SIGBUS."""

Shown = tuple[ByteRange, torch.Tensor]
"""A range of a file, and the tensor that shows it."""


class _Piece(NamedTuple):
    path: str
    address: int
    nbytes: int


def prefault(shown: Iterable[Shown], on_read: Callable[[int], None]) -> None:
    """Brings in the pages of tensors that show files, by several threads, and waits for them.

    `on_read` hears of the bytes after every piece, from one thread at a time, and ends it by raising. Raises
    `ReadFailedError`.
    """
    pieces = list(_pieces(shown))
    waiting, lock = iter(pieces), threading.Lock()

    def work(stop: threading.Event) -> None:
        while not stop.is_set():
            with lock:
                piece = next(waiting, None)
            if piece is None:
                return
            _map_pages(piece)
            with lock:
                on_read(piece.nbytes)

    parallel_for(work, min(_threads(), len(pieces)))


def begin_to_populate(shown: Sequence[Shown], threads: int | None = None, after: float = 0.0) -> None:
    """Begins to bring in the pages, in the order in which they are given, `after` so many seconds, and goes on.

    Who uses what cannot be read will hear of it then.
    """
    waiting, lock = _pieces(shown), threading.Lock()

    def work(_: Sequence[Shown]) -> None:  # has the tensors, so that their maps are there
        time.sleep(after)
        while True:
            with lock:
                piece = next(waiting, None)
            if piece is None:
                return
            try:
                _map_pages(piece)
            except ReadFailedError:
                return

    for _ in range(threads or _threads()):
        run_detached(partial(work, shown))


def _threads() -> int:
    return max(read_threads(), 2)


def _pieces(shown: Iterable[Shown]) -> Iterator[_Piece]:
    for some in _in_turn(shown):
        for path, start, end in _runs(some):
            for at in range(start, end, _PIECE_BYTES):
                yield _Piece(path, at, min(_PIECE_BYTES, end - at))


def _in_turn(shown: Iterable[Shown]) -> Iterator[list[Shown]]:
    """What is used one after the other, as much as is asked for at once."""
    some, nbytes = list[Shown](), 0
    for one in shown:
        some.append(one)
        nbytes += one[0].nbytes
        if nbytes >= _PIECE_BYTES:
            yield some
            some, nbytes = [], 0
    yield some


def _runs(shown: Iterable[Shown]) -> Iterator[tuple[str, int, int]]:
    """Paths, and addresses from the beginning of a page to an end, of what lies near each other in one map."""
    known = sorted((extent.path, tensor.data_ptr(), extent) for extent, tensor in shown if extent.nbytes)
    last: tuple[str, int, int, int] | None = None
    for path, address, extent in known:
        distance, end = address - extent.start, address + extent.nbytes
        if last is not None and (path, distance) == last[:2] and address - last[3] <= _GAP_BYTES:
            last = (*last[:3], max(end, last[3]))
            continue
        if last is not None:
            yield last[0], last[2], last[3]
        last = path, distance, address // mmap.PAGESIZE * mmap.PAGESIZE, end
    if last is not None:
        yield last[0], last[2], last[3]


def _map_pages(piece: _Piece) -> None:
    if _madvise is None or not _madvise(piece.address, piece.nbytes, _MADV_POPULATE_READ):
        return
    failed = ctypes.get_errno()
    if failed in (errno.EFAULT, _EHWPOISON):  # anything else says that this kernel cannot do it
        raise ReadFailedError(
            "the pages of a map cannot be read: an I/O error, or a file that has become shorter",
            where=piece.path,
            found=os.strerror(failed),
            remedy="open the checkpoint again, when nothing writes to it any more",
        )


_madvise = function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
