"""The page cache: what of files is in it, reads ahead, and reads of files that are leased within a commit.

Reads ahead: a few threads that read a cold file keep a few requests in flight. The kernel can keep many in flight,
which a disk needs to be fast.

A load that reads straight into the memory of a live module is all or nothing only if no read fails. So all that can
make a read fail comes before the first byte is written:

1. What the page cache lacks is read into it. An I/O error shows here.
2. A read lease is taken on each file. A process that opens the file for writing, or truncates it, waits until the lease
   is released, or until `/proc/sys/fs/lease-break-time` is over (usually 45 seconds). Where a process has the file open
   for writing already, there is no lease.
3. Each file is compared with its fingerprint. From here on its bytes are those of the checkpoint.

Then the bytes are read from the page cache; values that are only cast come out of a map, by torch's own copies. Other
values are read: where nothing else runs, that takes about as long as copies out of a map, and where other processes use
the processors far less, since the threads of such a copy wait for each other. A disk that fails is an error there.

What remains: the kernel lacks a page between two that it was asked about, or evicts one after the first step, and the
disk does not return it; or a writer waits, and the process is stopped for longer than the break time. Some values are
then old or damaged, or, of a map, the kernel ends the process (SIGBUS). `in_place=False` excludes both.
"""

from __future__ import annotations

import mmap
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from modelstate.errors import ReadFailedError
from modelstate.io import lease, system
from modelstate.io.engine import block_buffers, in_blocks, read_threads, stream
from modelstate.io.files import FileFingerprint, LocalFile, OpenFiles, open_unchanged
from modelstate.io.memory import Buffer
from modelstate.process import start_threads
from modelstate.spec import ByteRange

LEAST_BYTES_AHEAD = 16 << 20
"""A smaller range is read before a thread has been started."""
_LEAST_BYTES_DIRECT = 64 << 20
"""A smaller range takes little room in the page cache, where it is for the next reader."""
_JOINED_BYTES = 1 << 20
_STEP_BYTES = 128 << 10
"""The length of one read-ahead request. The kernel silently cuts a larger one to the read-ahead of its block device."""
_SAMPLES, _LEAST_STEP_BYTES, _MOST_STEP_BYTES = 16, 64 << 10, 4 << 20
"""The pages of a range that `look` asks for, and the bytes from one to the next."""
_LEAST_SECONDS = 5.0
"""With a shorter break time there are no leases."""
_BYTES_PER_SECOND = 2e9
"""The least speed of a read from the page cache. A read must take at most half of the break time."""
_READ_BYTES = 1 << 20
"""What a thread reads at once of a range that the page cache lacks."""


# What is in the page cache.

Looks = Mapping[ByteRange, bytes | None]
"""A byte for each page of a range that was looked at, 1 where the page cache has it; None where the kernel does not
tell."""


def look(ranges: Iterable[ByteRange], files: OpenFiles) -> Looks:
    """Asks the kernel for some pages of ranges: to ask for all takes a seventh of the time of a load.

    Ranges with small gaps between them become one.

    Args:
        ranges: Ranges of files.
        files: The files.

    Raises:
        ReadFailedError: A file cannot be opened, or has changed.
    """
    found: dict[ByteRange, bytes | None] = {}
    for block in in_blocks(((span, 1) for span in ranges), sys.maxsize, gap_bytes=_JOINED_BYTES):
        path, start, nbytes = block.source
        step = min(max(nbytes // _SAMPLES, _LEAST_STEP_BYTES), _MOST_STEP_BYTES)
        file = files[path]
        found[block.source] = None
        if isinstance(file, LocalFile):
            found[block.source] = system.resident(file.descriptor, start, nbytes, step=step)
    return found


def most_to_read() -> int:
    """The most bytes to bring into the page cache before they are used: half of the available memory."""
    return system.available_bytes() // 2


# Reads ahead.


def read_ahead(looks: Looks, files: OpenFiles) -> int:
    """Makes the kernel start to read those of the ranges that are not in the page cache, without waiting for them.

    Returns the number of bytes that the kernel is asked for, at most half of the available memory. It is 0 where the
    ranges are cached already, where the kernel does not say whether they are, and where they are too small to matter.

    Args:
        looks: The result of `look`.
        files: The files.
    """
    cold = _cold(looks)
    total = sum(span.nbytes for span in cold)
    if total < LEAST_BYTES_AHEAD:
        return 0
    total = min(total, most_to_read())
    start_threads(partial(_read_ahead, cold, total, files.fingerprints))
    return total


def skip_page_cache(looks: Looks, files: OpenFiles) -> int:
    """Lets reads go past the page cache where it has little of the ranges: it would take longer than the disk.

    Returns the number of bytes of these ranges. Each thread that reads them takes `HUGE_PAGE_BYTES` of memory. The
    arguments are those of `read_ahead`.
    """
    total, windows = 0, list[Buffer]()
    for path, _, nbytes in _cold(looks):
        file = files[path]
        if nbytes >= _LEAST_BYTES_DIRECT and isinstance(file, LocalFile) and file.skip_page_cache(windows):
            total += nbytes
    return total


def _cold(looks: Looks) -> list[ByteRange]:
    """Returns the ranges that lack over half of the pages asked for. Ranges without an answer are left out."""
    return [span for span, pages in looks.items() if pages is not None and 2 * pages.count(1) < len(pages)]


def _read_ahead(spans: Sequence[ByteRange], total: int, fingerprints: Mapping[str, FileFingerprint]) -> None:
    with suppress(OSError, ReadFailedError):  # the read itself reports what is wrong
        for path, first, nbytes in spans:
            end = first + min(nbytes, total)
            with open_unchanged(path, fingerprints.get(path)).descriptor as descriptor:
                for start in range(first, end, _STEP_BYTES):
                    system.advise(descriptor, "POSIX_FADV_WILLNEED", start, min(_STEP_BYTES, end - start))
            total -= end - first


# Leases for a commit.


def lease_files(extents: Sequence[ByteRange], files: OpenFiles) -> str:
    """Leases the files of ranges until `OpenFiles.release`, all or none. Returns why one cannot be leased, or "".

    Raises `ReadFailedError` where a file does not match its fingerprint.
    """
    nbytes = sum(extent.nbytes for extent in extents)
    if lease.safe_seconds() < max(_LEAST_SECONDS, 2 * nbytes / _BYTES_PER_SECOND):
        return "the kernel lets a writer wait for a shorter time than the read may take"
    paths = dict.fromkeys(extent.path for extent in extents)
    if len(paths) > system.most_open():
        return "the files are more than a quarter of those that this process may have open (ulimit -n)"
    for path in paths:
        file = files[path]
        refusal = file.lease() if isinstance(file, LocalFile) else "it is not a file of this machine"
        if refusal:
            files.release()
            return refusal
    return ""


def bring_into_cache(looks: Looks, files: OpenFiles, on_read: Callable[[int], object] = lambda _: None) -> bool:
    """Reads what the page cache lacks of the ranges, on several threads, and waits.

    The kernel is asked about all pages where `look` finds that it lacks one. It evicts what has not been used for the
    longest time, which are neighbours in a file that was read in order.

    Returns whether the page cache has the ranges now, as far as was asked. It has not where they do not fit, and where
    the kernel does not say what it has.

    Args:
        looks: The result of `look`.
        files: The files.
        on_read: Called with numbers of bytes that were read, by one thread at a time; may raise to end the reads.

    Raises:
        ReadFailedError: A range cannot be read, or a file has changed.
    """
    missing: list[ByteRange] = []
    for (path, start, nbytes), pages in looks.items():
        file, origin = files[path], start // mmap.PAGESIZE * mmap.PAGESIZE
        if pages is not None and 0 in pages and isinstance(file, LocalFile):
            pages = system.resident(file.descriptor, start, nbytes)
        if pages is None:
            return False
        for absent in re.finditer(rb"\0+", pages) if 0 in pages else ():
            first = max(origin + absent.start() * mmap.PAGESIZE, start)
            end = min(origin + absent.end() * mmap.PAGESIZE, start + nbytes)
            missing.append(ByteRange(path, first, end - first))
    if not missing:
        return True
    if sum(span.nbytes for span in missing) > most_to_read():
        return False
    blocks = in_blocks([(span, 1) for span in missing], _READ_BYTES)
    buffers = block_buffers(blocks, read_threads())
    stream(blocks, buffers, lambda *_: None, files=files, on_block=lambda block: on_read(block.wanted_bytes))
    return True
