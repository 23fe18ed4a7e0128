"""Bringing the pages of mapped tensors in, so that nobody has to wait for them when they are used.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from modelstate.errors import ReadFailedError
from modelstate.read.libc import function
from modelstate.read.ranges import read_threads
from modelstate.read.workers import go_on_behind, work_together
from modelstate.spec import ByteRange

_PIECE_BYTES = 64 << 20
"""What a thread asks for at once: many of the windows that the kernel reads ahead, so that it finds them in order. What
is used one after the other, up to so much, is asked for as it lies in the file."""
_GAP_BYTES = 1 << 20
_EHWPOISON = 133
_MADV_POPULATE_READ = 22
"""Since Linux 5.14; with it a file that has become shorter is an error, and no SIGBUS."""

Shown = tuple[ByteRange, torch.Tensor]
"""A range of a file, and the tensor that shows it."""


class _Piece(NamedTuple):
    path: str
    address: int
    nbytes: int


def populate(shown: Iterable[Shown], on_read: Callable[[int], None]) -> None:
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

    work_together(work, min(_threads(), len(pieces)))


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
        go_on_behind(partial(work, shown))


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
