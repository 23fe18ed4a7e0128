"""Bringing the pages of mapped tensors in, so that nobody has to wait for them when they are used."""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from modelstate.errors import ReadFailedError
from modelstate.read.ranges import Request
from modelstate.read.readahead import is_cold, merged
from modelstate.spec import ByteRange

if TYPE_CHECKING:
    from modelstate.read.checkpoint import Checkpoint

_PIECE_BYTES = 8 << 20
"""What is brought in before anybody may stop it."""
_ROUND_BYTES = 256 << 20
"""What is read at once into the page cache."""
_EHWPOISON = 133
_MADV_POPULATE_READ = 22
"""Since Linux 5.14; with it a file that has become shorter is an error, and no SIGBUS."""


def populate(
    checkpoint: "Checkpoint", mapped: Iterable[tuple[ByteRange, torch.Tensor]], on_read: Callable[[int], None]
) -> None:
    """Brings in the pages of tensors that show these ranges of the checkpoint's files.

    What is not in the page cache is read by several threads, for a map that is touched by one does not keep a disk
    busy; then the pages are mapped. `on_read` hears of the bytes after every piece, and ends it by raising. Raises
    `ReadFailedError`.
    """
    pairs = sorted((pair for pair in mapped if pair[0].nbytes), key=lambda pair: (pair[0].path, pair[0].start))
    _read_what_is_cold(checkpoint, [extent for extent, _ in pairs], lambda: on_read(0))
    for extent, tensor in pairs:
        start, end = tensor.data_ptr(), tensor.data_ptr() + extent.nbytes
        for at in range(start, end, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, end - at)
            _map_pages(extent.path, at, nbytes)
            on_read(nbytes)


def _read_what_is_cold(checkpoint: "Checkpoint", extents: list[ByteRange], on_read: Callable[[], None]) -> None:
    spans = [span for span in merged(extents) if is_cold(span, checkpoint.stamps.get(span.path))]
    if not spans:
        return
    # All of it goes to the same memory: only that it has been read matters.
    waste = ctypes.create_string_buffer(_PIECE_BYTES)
    address = ctypes.addressof(waste)
    for span in spans:
        for first in range(span.start, span.start + span.nbytes, _ROUND_BYTES):
            behind = min(first + _ROUND_BYTES, span.start + span.nbytes)
            starts = range(first, behind, _PIECE_BYTES)
            pieces = [ByteRange(span.path, at, min(_PIECE_BYTES, behind - at)) for at in starts]
            checkpoint.read_all([Request(piece, address) for piece in pieces], lambda _: on_read())


def _map_pages(path: str, address: int, nbytes: int) -> None:
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    if _madvise is None or not _madvise(first, address + nbytes - first, _MADV_POPULATE_READ):
        return
    failed = ctypes.get_errno()
    if failed in (errno.EFAULT, _EHWPOISON):  # anything else says that this kernel cannot do it
        raise ReadFailedError(
            "the pages of a map cannot be read: an I/O error, or a file that has become shorter",
            where=path,
            found=os.strerror(failed),
            remedy="open the checkpoint again, when nothing writes to it any more",
        )


def _find_madvise() -> Callable[..., int] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).madvise  # it lets other threads of Python go on, as mmap's does not
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


_madvise = _find_madvise()
