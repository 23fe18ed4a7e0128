"""Finds out what is in the page cache, and brings in the rest: reads and read-ahead of files, prefault of maps.

A few threads that read a cold file keep a few requests in flight. The kernel can keep many in flight, which a disk
needs to be fast.

A thread that uses a map whose pages are not in the page cache waits for the disk again and again. The kernel reads
ahead of a thread that goes through a map in order; two or more threads in different parts make the disk read at full
speed. The parts are brought in in the order in which they are used, which may not be their order in the file: a file
may sort its layers by name, the tenth before the second. Then a model can run right behind the prefault.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

from modelstate.errors import ReadFailedError
from modelstate.io import linux, system
from modelstate.io.engine import LocalFile, can_read_uncached, for_each, open_files, read_fully, read_threads
from modelstate.io.files import Descriptor, FileFingerprint, open_unchanged
from modelstate.process import run_detached, try_start
from modelstate.spec import ByteRange

if TYPE_CHECKING:
    import torch

LEAST_BYTES = 16 << 20
"""A smaller range is read before a thread has been started."""
_GAP_BYTES = 1 << 20
_STEP_BYTES = 128 << 10
"""The length of one read-ahead request. The kernel silently cuts a larger one to the read-ahead of its block device."""
_PROBES, _PROBE_BYTES = 16, 64 << 10
_MOST_OF_MEMORY = 0.5
_READ_BYTES = 1 << 20
"""What a thread reads at once of a range that the page cache lacks."""
_LOOK_BYTES = 16 << 20
"""What a thread looks at at once, whether it is in the page cache."""
_CHECK_BYTES = 4 << 20
"""What `cachestat` is asked for at once."""
_MOST_AHEAD = 16
"""The pieces of `_LOOK_BYTES` that are looked at before it is known what is needed."""
_MOST_ROUNDS, _MOST_AGAIN = 3, 0.25
"""How often, and how much of the ranges, is read again that the kernel has evicted before all of them were read."""
_RECENT_SECONDS = 1.0
"""Later, pages may have been evicted since a look."""


def read_ahead(ranges: Iterable[ByteRange], fingerprints: Mapping[str, FileFingerprint]) -> int:
    """Makes the kernel start to read those of the ranges that are not in the page cache, without waiting for them.

    Returns the number of bytes that the kernel is asked for, at most half of the available memory. It is 0 where the
    ranges are cached already, where the kernel does not say whether they are, and where they are too small to matter.
    """
    spans = merged(ranges)
    if sum(span.nbytes for span in spans) < LEAST_BYTES:
        return 0
    cold = _cold_ranges(spans, fingerprints)
    total = min(sum(span.nbytes for span in cold), most_to_read())
    if total:
        run_detached(partial(_read_ahead, cold, total, fingerprints))
    return total


def merged(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """The ranges in the order of their files; ranges with small gaps between them become one."""
    spans: list[ByteRange] = []
    path, start, end = "", 0, 0
    for span in sorted(span for span in ranges if span.nbytes):
        if span.path == path and span.start - end <= _GAP_BYTES:
            end = max(end, span.start + span.nbytes)
            continue
        if end > start:
            spans.append(ByteRange(path, start, end - start))
        path, start, end = span.path, span.start, span.start + span.nbytes
    if end > start:
        spans.append(ByteRange(path, start, end - start))
    return spans


def files_to_read_uncached(ranges: Iterable[ByteRange], fingerprints: Mapping[str, FileFingerprint]) -> frozenset[str]:
    """The files that are faster to read with O_DIRECT: those that support it, and have most of their ranges on disk."""
    spans = merged(ranges)
    if sum(span.nbytes for span in spans) < LEAST_BYTES:
        return frozenset()
    cold, wanted = Counter[str](), Counter[str]()
    for span in spans:
        wanted[span.path] += span.nbytes
    for span in _cold_ranges(spans, fingerprints):
        cold[span.path] += span.nbytes
    files = (path for path in cold if cold[path] > wanted[path] / 2)
    return frozenset(path for path in files if can_read_uncached(path, fingerprints.get(path)))


def _cold_ranges(ranges: Iterable[ByteRange], fingerprints: Mapping[str, FileFingerprint]) -> list[ByteRange]:
    """The ranges that are less than half in the page cache."""
    return [span for span in ranges if is_cold(span, fingerprints.get(span.path))]


def is_cold(span: ByteRange, fingerprint: FileFingerprint | None = None) -> bool:
    """Whether less than half of a range is in the page cache, by samples; False where the kernel does not say."""
    try:
        opened = open_unchanged(span.path, fingerprint)
    except ReadFailedError:
        return False  # the read itself reports it
    with opened as descriptor:
        shares = [linux.cached_share(descriptor, start, nbytes) for start, nbytes in _probes(span)]
    known = [share for share in shares if share is not None]
    return bool(known) and sum(known) < len(known) / 2


def _probes(span: ByteRange) -> Iterator[tuple[int, int]]:
    if span.nbytes <= _PROBES * _PROBE_BYTES:
        yield span.start, span.nbytes
        return
    apart = (span.nbytes - _PROBE_BYTES) // (_PROBES - 1)
    for index in range(_PROBES):
        yield span.start + index * apart, _PROBE_BYTES


def begin_to_read(descriptor: int, start: int, nbytes: int) -> None:
    """Makes the kernel start to read what the page cache lacks of a range that is mostly there."""
    for first in range(start, start + nbytes, _CHECK_BYTES):
        end = min(first + _CHECK_BYTES, start + nbytes)
        if linux.cached_share(descriptor, first, end - first) != 1:
            for at in range(first, end, _STEP_BYTES):
                linux.will_need(descriptor, at, min(_STEP_BYTES, end - at))


# Bringing ranges in, with the errors of the reads.


def bring_into_cache(
    ranges: Iterable[ByteRange],
    fingerprints: Mapping[str, FileFingerprint],
    on_read: Callable[[int], None] = lambda _: None,
    look: CacheLook | None = None,
) -> bool:
    """Reads what the page cache lacks of the ranges, on several threads, and waits.

    Returns whether the page cache has all of the ranges now. It has not where they do not fit, where the kernel does
    not say, and where the user may not know.

    Args:
        ranges: Ranges of files.
        fingerprints: What each file must be.
        on_read: Called with numbers of bytes that were read, by one thread at a time; may raise to end the reads.
        look: A look at the files that has been started (`look_ahead`).

    Raises:
        ReadFailedError: A range cannot be read, or a file has changed.
    """
    wanted = merged(ranges)
    missing = look.missing(wanted) if look is not None and look.is_recent else None
    if missing == []:
        return True
    with open_files((span.path for span in wanted), fingerprints) as opened:
        files = {path: file for path, file in opened.items() if isinstance(file, LocalFile)}
        if len(files) < len(opened) or not all(_may_know(file.descriptor) for file in files.values()):
            return False
        if look is None or missing is None:
            look = CacheLook({path: file.descriptor for path, file in files.items()})
            missing = look.missing(wanted)
            if not missing:
                return True
        total, lacking = (sum(span.nbytes for span in spans) for spans in (wanted, missing))
        # To ask the system for its memory takes longer than to read a few pages.
        most = most_to_read() if lacking >= LEAST_BYTES else lacking
        for _ in range(_MOST_ROUNDS):
            if sum(span.nbytes for span in missing) > most:
                return False
            _bring_in(missing, files, fingerprints, on_read)
            if not look.still_lacks(missing):
                return True
            look = CacheLook({path: file.descriptor for path, file in files.items()})
            missing, most = look.missing(wanted), int(total * _MOST_AGAIN)
        return not missing


def _bring_in(
    missing: list[ByteRange],
    files: Mapping[str, LocalFile],
    fingerprints: Mapping[str, FileFingerprint],
    on_read: Callable[[int], None],
) -> None:
    total = sum(span.nbytes for span in missing)
    if total >= LEAST_BYTES:
        run_detached(partial(_read_ahead, missing, total, fingerprints))
    else:  # a few pages that have been evicted: the disk reads all of them at once
        with suppress(OSError):  # the read itself reports what is wrong
            for path, start, nbytes in _split(missing, _STEP_BYTES):
                linux.will_need(files[path].descriptor, start, nbytes)

    @contextmanager
    def worker() -> Iterator[Callable[[ByteRange], None]]:
        buffer = memoryview(bytearray(longest))
        yield lambda span: read_fully(files[span.path], [buffer[: span.nbytes]], span.start, span.nbytes)

    pieces, threads = _split(missing, _READ_BYTES), min(_threads(), -(-total // _READ_BYTES))
    longest = max((piece.nbytes for piece in pieces), default=0)
    for_each(pieces, worker, threads, lambda piece, _: on_read(piece.nbytes))


def _may_know(descriptor: int) -> bool:
    """Whether `mincore` tells this user the truth about a file."""
    try:
        status = system.fstat(descriptor)
    except OSError as error:
        raise ReadFailedError("the owner of the file cannot be read", found=error) from error
    return status.st_uid == os.geteuid() or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)


class CacheLook:
    """Finds out which parts of open files the page cache lacks. Threads share the work, piece by piece.

    Args:
        descriptors: The files, by path. They may be closed afterwards.
    """

    def __init__(self, descriptors: Mapping[str, int]) -> None:
        self._began = time.monotonic()
        self._maps: dict[str, linux.PageMap] = {}
        for path, descriptor in descriptors.items():
            with suppress(OSError, ValueError):
                self._maps[path] = linux.PageMap(descriptor, system.fstat(descriptor).st_size)
        self._taken: dict[ByteRange, object] = {}
        self._absent: dict[ByteRange, list[ByteRange]] = {}
        """What is missing of the pieces that have been looked at."""
        self._ahead = threading.Lock()
        """Held by the thread of `begin` while it looks at a piece."""

    def begin(self) -> None:
        """Starts to look at the first pieces in a thread of its own, which `missing` continues."""
        pieces = list(islice((piece for path in self._maps for piece in self._pieces(path, 0)), _MOST_AHEAD))

        def work() -> None:
            for piece in pieces:
                with self._ahead:
                    self._look(piece)

        # Started by `run_detached`, the thread was measured to begin on the processor that the caller goes on to use.
        try_start(threading.Thread(target=work, name="modelstate-look", daemon=True))

    @property
    def is_recent(self) -> bool:
        """Whether what was found is likely to hold still."""
        return time.monotonic() - self._began < _RECENT_SECONDS

    def missing(self, spans: Iterable[ByteRange]) -> list[ByteRange]:
        """The parts of the ranges that the page cache lacks. All counts as missing where the kernel gives no answer."""
        spans = list(spans)
        of_spans = [list(self._pieces(*span)) for span in spans]
        # From the end: the thread of `begin` comes from the beginning.
        left = [piece for pieces in of_spans for piece in pieces if piece not in self._taken][::-1]

        @contextmanager
        def worker() -> Iterator[Callable[[ByteRange], None]]:
            yield self._look

        # One thread looks at less in the time that it takes to start another one.
        threads = min(read_threads(), -(-len(left) // _MOST_AHEAD))
        for_each(left, worker, threads, takes_part=True)
        with self._ahead:  # the thread of `begin` is not within a piece any more
            pass
        missing: list[ByteRange] = []
        for (path, start, nbytes), pieces in zip(spans, of_spans, strict=True):
            mapped = self._maps.get(path)
            if mapped is None or start + nbytes > mapped.nbytes:
                missing.append(ByteRange(path, start, nbytes))
                continue
            for piece in pieces:
                for _, first, length in self._absent.get(piece, [piece]):
                    at, end = max(first, start), min(first + length, start + nbytes)
                    if at < end:
                        missing.append(ByteRange(path, at, end - at))
        return missing

    def still_lacks(self, spans: Iterable[ByteRange]) -> bool:
        """Looks again at ranges that were missing: whether the page cache still lacks a part of one."""
        whole_pages = []
        for path, start, nbytes in spans:
            before = start % mmap.PAGESIZE
            whole_pages.append(ByteRange(path, start - before, nbytes + before))
        return any(self._absent_of(piece) != [] for piece in _split(whole_pages, _LOOK_BYTES))

    def _pieces(self, path: str, start: int, nbytes: int | None = None) -> Iterator[ByteRange]:
        """The pieces of a file that have a part of a range, each always the same."""
        if path not in self._maps:
            return
        whole = self._maps[path].nbytes
        end = whole if nbytes is None else min(start + nbytes, whole)
        for first in range(start // _LOOK_BYTES * _LOOK_BYTES, end, _LOOK_BYTES):
            yield ByteRange(path, first, min(_LOOK_BYTES, whole - first))

    def _look(self, piece: ByteRange) -> None:
        claim = object()
        if self._taken.setdefault(piece, claim) is not claim:
            return
        absent = self._absent_of(piece)
        if absent is not None:
            self._absent[piece] = absent

    def _absent_of(self, piece: ByteRange) -> list[ByteRange] | None:
        """The runs of pages of a piece that the page cache lacks now; None where the kernel gives no answer."""
        path, first, nbytes = piece
        mapped = self._maps.get(path)
        pages = None if mapped is None or first + nbytes > mapped.nbytes else mapped.resident(first, first + nbytes)
        if pages is None:
            return None
        absent, at = list[ByteRange](), pages.find(b"\0")
        while at >= 0:
            present = pages.find(b"\1", at)
            until = len(pages) if present < 0 else present
            absent.append(ByteRange(path, first + at * mmap.PAGESIZE, (until - at) * mmap.PAGESIZE))
            at = pages.find(b"\0", until)
        return absent


def look_ahead(fingerprints: Mapping[str, FileFingerprint]) -> CacheLook | None:
    """Starts to look at files of this machine; None where a file is remote, or the user may not know."""
    if any(known.is_remote for known in fingerprints.values()):
        return None
    descriptors: dict[str, Descriptor] = {}
    try:
        for path, known in fingerprints.items():
            descriptors[path] = open_unchanged(path, known)
            if not _may_know(descriptors[path]):
                return None
        look = CacheLook(descriptors)
    except ReadFailedError:
        return None  # the read itself reports it
    finally:
        for descriptor in descriptors.values():
            descriptor.close()
    look.begin()
    return look


def _split(spans: Iterable[ByteRange], most_bytes: int) -> list[ByteRange]:
    return [
        ByteRange(path, at, min(most_bytes, start + nbytes - at))
        for path, start, nbytes in spans
        for at in range(start, start + nbytes, most_bytes)
    ]


def _read_ahead(spans: list[ByteRange], total: int, fingerprints: Mapping[str, FileFingerprint]) -> None:
    with suppress(OSError, ReadFailedError):  # the read itself reports what is wrong
        for path, of_file in groupby(spans, lambda span: span.path):
            with open_unchanged(path, fingerprints.get(path)) as descriptor:
                for _, first, nbytes in of_file:
                    end = first + min(nbytes, total)
                    for start in range(first, end, _STEP_BYTES):
                        linux.will_need(descriptor, start, min(_STEP_BYTES, end - start))
                    total -= end - first
            if total <= 0:
                return


def most_to_read() -> int:
    """The most bytes to bring into the page cache before they are used: half of the available memory."""
    return int(linux.available_bytes() * _MOST_OF_MEMORY)


_PIECE_BYTES = 64 << 20
"""What a thread asks for at once: many read-ahead windows of the kernel, so that it sees sequential access. Ranges that
are used one after the other are sorted by their place in the file, up to this size at a time."""
_EHWPOISON = 133

Shown = tuple[ByteRange, "torch.Tensor"]
"""A range of a file, and the tensor that is mapped from it."""


class _Piece(NamedTuple):
    path: str
    address: int
    nbytes: int


def prefault(shown: Iterable[Shown], on_read: Callable[[int], None]) -> None:
    """Faults in the pages of mapped tensors on several threads, and waits for them.

    Args:
        shown: The mapped tensors.
        on_read: Called with the number of bytes after every piece, by one thread at a time. The prefault ends with
            the exception that it raises.

    Raises:
        ReadFailedError: A page cannot be read.
    """
    pieces = list(_pieces(shown))

    @contextmanager
    def worker() -> Iterator[Callable[[_Piece], None]]:
        yield _map_pages

    for_each(pieces, worker, min(_threads(), len(pieces)), lambda piece, _: on_read(piece.nbytes))


def prefault_async(shown: Sequence[Shown]) -> None:
    """Starts to fault in the pages in the background, in the given order, on at least two threads.

    Pages that cannot be read are skipped: the code that uses them meets the error.
    """
    pieces = list(_pieces(shown))
    pieces.reverse()

    def work(_: Sequence[Shown]) -> None:  # the argument keeps the maps of the tensors alive
        while True:
            try:
                _map_pages(pieces.pop())  # from the list that all threads share
            except (IndexError, ReadFailedError):
                return

    for _ in range(_threads()):
        run_detached(partial(work, shown))


def _threads() -> int:
    return max(read_threads(), 2)


def _pieces(shown: Iterable[Shown]) -> Iterator[_Piece]:
    for batch in _batches(shown):
        for path, start, end in _runs(batch):
            for address in range(start, end, _PIECE_BYTES):
                yield _Piece(path, address, min(_PIECE_BYTES, end - address))


def _batches(shown: Iterable[Shown]) -> Iterator[list[Shown]]:
    """Splits the tensors, which are in the order of their use, into lists of about `_PIECE_BYTES`."""
    batch, nbytes = list[Shown](), 0
    for extent, tensor in shown:
        batch.append((extent, tensor))
        nbytes += extent.nbytes
        if nbytes >= _PIECE_BYTES:
            yield batch
            batch, nbytes = [], 0
    yield batch


def _runs(shown: Iterable[Shown]) -> Iterator[tuple[str, int, int]]:
    """Path, address of the first page and end address of each run of tensors that lie close together in one map."""
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
    failed = linux.madvise(piece.address, piece.nbytes, linux.Advice.POPULATE_READ)
    if failed in (errno.EFAULT, _EHWPOISON):  # any other error means that this kernel does not support the call
        raise ReadFailedError(
            "the pages of a map cannot be read: an I/O error, or a file that has become shorter",
            where=piece.path,
            found=os.strerror(failed),
            remedy="open the checkpoint again, when nothing writes to it any more",
        )
