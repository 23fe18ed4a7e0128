"""Reads ahead: makes the kernel bring what the page cache lacks of files into it.

A few threads that read a cold file keep a few requests in flight. The kernel can keep many in flight, which a disk
needs to be fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from modelstate.errors import ReadFailedError
from modelstate.io import linux
from modelstate.io.engine import LocalFile, OpenFiles, open_files
from modelstate.io.files import FileFingerprint, open_unchanged
from modelstate.process import run_detached
from modelstate.spec import ByteRange

LEAST_BYTES = 16 << 20
"""A smaller range is read before a thread has been started."""
_GAP_BYTES = 1 << 20
_STEP_BYTES = 128 << 10
"""The length of one read-ahead request. The kernel silently cuts a larger one to the read-ahead of its block device."""
_LOOKS, _LOOK_BYTES = 32, 1 << 20
_MOST_OF_MEMORY = 0.5


def read_ahead(ranges: Iterable[ByteRange], files: OpenFiles | Mapping[str, FileFingerprint]) -> int:
    """Makes the kernel start to read those of the ranges that are not in the page cache, without waiting for them.

    Returns the number of bytes that the kernel is asked for, at most half of the available memory. It is 0 where the
    ranges are cached already, where the kernel does not say whether they are, and where they are too small to matter.
    """
    spans = merged(ranges)
    if sum(span.nbytes for span in spans) < LEAST_BYTES:
        return 0
    try:
        with open_files((span.path for span in spans), files) as opened:
            cold = [span for span in spans if is_cold(span, opened)]
    except ReadFailedError:
        return 0  # the read itself reports it
    total = min(sum(span.nbytes for span in cold), most_to_read())
    if total:
        run_detached(partial(_read_ahead, cold, total, opened.fingerprints))
    return total


def merged(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """The ranges in the order of their files; ranges with small gaps between them become one."""
    spans: list[ByteRange] = []
    for path, start, nbytes in sorted(span for span in ranges if span.nbytes):
        last = spans[-1] if spans else None
        if last is not None and last.path == path and start - last.start - last.nbytes <= _GAP_BYTES:
            spans[-1] = last._replace(nbytes=max(last.nbytes, start + nbytes - last.start))
        else:
            spans.append(ByteRange(path, start, nbytes))
    return spans


def most_to_read() -> int:
    """The most bytes to bring into the page cache before they are used: half of the available memory."""
    return int(linux.available_bytes() * _MOST_OF_MEMORY)


def is_cold(span: ByteRange, files: OpenFiles) -> bool:
    """Returns whether less than half of a range seems to be in the page cache; False where the kernel does not say.

    It looks at pieces of the range, since a look at each page of a large file takes milliseconds.
    """
    file = files[span.path]
    if not isinstance(file, LocalFile):
        return False
    step = max(span.nbytes // _LOOKS, _LOOK_BYTES)
    shares = [
        linux.cached_share(file.descriptor, at, min(_LOOK_BYTES, span.start + span.nbytes - at))
        for at in range(span.start, span.start + span.nbytes, step)
    ]
    known = [share for share in shares if share is not None]
    return bool(known) and sum(known) < len(known) / 2


def _read_ahead(spans: Sequence[ByteRange], total: int, fingerprints: Mapping[str, FileFingerprint]) -> None:
    with suppress(OSError, ReadFailedError):  # the read itself reports what is wrong
        for path, first, nbytes in spans:
            end = first + min(nbytes, total)
            descriptor, _ = open_unchanged(path, fingerprints.get(path))
            with descriptor:
                for start in range(first, end, _STEP_BYTES):
                    linux.will_need(descriptor, start, min(_STEP_BYTES, end - start))
            total -= end - first
