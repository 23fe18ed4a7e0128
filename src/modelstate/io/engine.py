"""Executes read requests: cuts ranges into blocks, reads them on several threads, and hands them to who consumes them.

Invariants:

- Every byte of every request is written once, and no thread writes to a destination after a read has returned or
  raised.
- A file is checked against its fingerprint after its last byte is read, and before the first one where the read
  overwrites values.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from modelstate.errors import OPEN_AGAIN, ReadFailedError
from modelstate.io import system
from modelstate.io.files import FileFingerprint, OpenFiles, RangeFile
from modelstate.io.memory import DIRECT_ALIGN_BYTES, fresh_tensors
from modelstate.process import parallel_for
from modelstate.remote.location import CACHE_BLOCK_BYTES, CONNECTIONS
from modelstate.spec import GAP_BYTES, MOST_THREADS, ByteRange

if TYPE_CHECKING:
    import torch

_LEAST_REMOTE_BYTES, _MOST_REMOTE_BYTES = 1 << 20, 8 << 20
"""One request to a server for a part of a larger range: reading the least takes longer than the wait for the answer."""
_REPLY_BYTES = 5 << 19
"""The memory of the client for the reply to one request, at most: measured 2.2 MB."""
_IOV_MAX = 1024
"""The number of buffers that Linux accepts in one call."""
BLOCK_BYTES = 4 << 20
"""The most that one call reads: large enough to amortise the call, small enough to share the work out evenly, and for
what is cast or checked right after the read to be in the processor's cache."""
_LARGE_TRANSFER_BYTES = 256 << 20
"""From so many bytes on, the blocks for a device are larger."""
_LEAST_BLOCK_BYTES = 64 << 10

ROWS_BYTES = 256 << 10
"""The part of a file that a thread reads at once to take rows from it: it fits into a cache of the processor."""

_Item = TypeVar("_Item")


# Policy: with how many threads and how much memory to read.


def read_threads() -> int:
    """The number of threads for a read: as many as there are processors for this process, up to 8."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MOST_THREADS)


def common_align_bytes(paths: Iterable[str], fingerprints: Mapping[str, FileFingerprint]) -> int:
    """A multiple at which reads end, so that no two of them need a part of the same block of a cache or a disk."""
    known = (fingerprints.get(path) for path in paths)
    is_cached = any(each is not None and each.cache is not None for each in known)
    return CACHE_BLOCK_BYTES if is_cached else DIRECT_ALIGN_BYTES


class ReadStrategy(msgspec.Struct, frozen=True):
    """The threads and the memory of the reads of one load: by default the fastest, without a memory budget."""

    threads: int = msgspec.field(default_factory=read_threads)
    """Threads that read blocks and cast them."""
    block_bytes: int = BLOCK_BYTES
    """The size of a block."""
    remote: bool = False
    """Whether files are read from servers within a memory budget, which then counts the replies under way, too."""

    def for_devices(self, total: int) -> ReadStrategy:
        """The strategy of a stream whose blocks are copied to devices.

        Pinned memory is dear to allocate: for each megabyte, several times what a copy from it saves. So it takes at
        most an eighth of what is read, unless that is very little. What is done for each block takes longer than the
        copy of a small one.

        Args:
            total: The bytes of all ranges.
        """
        block_bytes = self.block_bytes * (2 if total >= _LARGE_TRANSFER_BYTES else 1)
        if self.threads > MOST_THREADS:  # threads that wait for a network
            return replace(self, block_bytes=block_bytes)
        threads = min(self.threads, max(2, total // (8 * block_bytes)))
        return replace(self, threads=threads, block_bytes=block_bytes)

    @property
    def reply_bytes(self) -> int:
        """Memory of one reply of a server that is read: the client joins its pieces, so it has a short one twice."""
        return min(_REPLY_BYTES, 2 * self.block_bytes) if self.remote else 0

    def smaller(self) -> Iterator[ReadStrategy]:
        """Strategies that need less and less memory."""
        threads, block_bytes = self.threads, self.block_bytes
        while threads > 1 or block_bytes > _LEAST_BLOCK_BYTES:
            # Of a server, fewer replies at a time rather than more and smaller requests.
            if threads > 1 if self.remote else block_bytes <= _LEAST_BLOCK_BYTES:
                threads //= 2
            else:
                block_bytes //= 2
            yield replace(self, threads=threads, block_bytes=block_bytes)


def for_each(
    items: Iterable[_Item],
    workers: Sequence[Callable[[_Item], object]],
    on_done: Callable[[_Item], object] | None = None,
    *,
    with_torch: bool = False,
    takes_part: bool = False,
) -> None:
    """Processes the items on several threads. No thread is at work any more when this returns or raises.

    Args:
        items: The items. A thread takes the next one when it has processed the one before.
        workers: The function that processes an item, for each thread. A single thread is the caller's own.
        on_done: Called with each processed item, by one thread at a time.
        with_torch: See `parallel_for`.
        takes_part: See `parallel_for`.
    """
    waiting, free, lock = iter(items), [*workers], threading.Lock()

    def work(stop: threading.Event) -> None:
        process = free.pop()  # one call: threads do this at the same time
        while not stop.is_set():
            with lock:
                item = next(waiting, None)
            if item is None:
                return
            process(item)
            if on_done is not None:
                with lock:
                    on_done(item)

    if len(free) > 1:
        parallel_for(work, len(free), with_torch=with_torch, takes_part=takes_part)
    elif free:
        work(threading.Event())


# Cutting ranges into blocks.


class Part(msgspec.Struct, frozen=True, gc=False):
    """A piece of a range, in a block."""

    which: int
    """The index of the range among those that are requested."""
    first: int
    """Bytes from the beginning of the range."""
    nbytes: int
    at: int
    """Bytes from the beginning of the block."""


class Block(msgspec.Struct, frozen=True):
    """A run of a file that is read at once, and the parts of ranges in it, between which there may be gaps."""

    source: ByteRange
    parts: list[Part]
    wanted_bytes: int
    """The bytes of the parts, without the gaps between them."""


def in_blocks(
    wanted: Iterable[tuple[ByteRange, int]],
    block_bytes: int,
    align_bytes: int = 1,
    *,
    gap_bytes: int = GAP_BYTES,
    is_scattered: bool = False,
) -> list[Block]:
    """Cuts every byte of every range once into blocks, in the order of the files.

    Ranges with small gaps between them share a block. A block has at most `block_bytes`, or the bytes of a larger unit.

    Args:
        wanted: The ranges, each with its unit. The length of every part but the last is a multiple of the unit, and so
            is its place in the block.
        block_bytes: The size of a buffer.
        align_bytes: A block that ends within a range ends at a multiple of this in the file, if there is one.
        gap_bytes: The largest gap in a block.
        is_scattered: Whether a block is read to several places in memory by one call. Then its parts do not overlap,
            there are no more of them than the call takes, and each full block ends at a multiple of `align_bytes`.
    """
    runs, parts, ends, counts = list[tuple[str, int, list[Part]]](), list[Part](), list[int](), list[int]()
    of_block, begin, end, limit, vectors = "", 0, 0, 0, 0
    for ((path, start, nbytes), unit), which in sorted(zip(wanted, count(), strict=False)):
        done = 0
        while done < nbytes:
            at, left = start + done, nbytes - done
            is_next = path == of_block and begin <= at < limit and at - end <= gap_bytes and (at - begin) % unit == 0
            if is_scattered and (at < end or vectors >= _IOV_MAX - 1):
                is_next = False
            if not is_next:
                parts, vectors = [], 0
                runs.append((path, at, parts))
                ends.append(at)
                counts.append(0)
                of_block, begin, end, limit = path, at, at, at + block_bytes
                if is_scattered and limit - limit % align_bytes > at:
                    limit -= limit % align_bytes
            length = left
            if at + left > limit:
                aligned = limit - limit % align_bytes
                length = ((aligned if aligned > at else limit) - at) // unit * unit
                if not length and at > begin:
                    limit = at
                    continue
                length = length or min(unit, left)
                limit = at + length
            parts.append(Part(which, done, length, at - begin))
            vectors += 2 if at > end else 1
            done += length
            counts[-1] += length
            if at + length > end:
                end = ends[-1] = at + length
    of_runs = zip(runs, ends, counts, strict=True)
    return [Block(ByteRange(path, start, end - start), parts, nbytes) for (path, start, parts), end, nbytes in of_runs]


# Reading ranges to addresses.


class Request(NamedTuple):
    """A byte range of a file, and the memory address that it is read to.

    A named tuple, because a load may have very many.
    """

    source: ByteRange
    address: int
    """The caller keeps the memory alive until the read has ended."""


class Rows(msgspec.Struct, frozen=True):
    """Runs of equal length at equal distances in a file, and in memory: a part of the columns of a matrix."""

    source: ByteRange
    """The first run."""
    address: int
    """Of the first run in memory. The caller keeps the memory alive until the read has ended."""
    count: int
    file_step: int
    """Bytes from the beginning of a run to that of the next one, in the file."""
    memory_step: int

    @property
    def wanted_bytes(self) -> int:
        """Bytes of all runs."""
        return self.count * self.source.nbytes

    @property
    def has_small_gaps(self) -> bool:
        """Whether the gaps are read with the runs."""
        return 0 <= self.file_step - self.source.nbytes <= GAP_BYTES

    def split(self, most_bytes: int) -> Iterator[Rows]:
        """Yields groups of rows that span at most this number of bytes of the file, or one row."""
        path, start, nbytes = self.source
        most = max(most_bytes // max(self.file_step, nbytes), 1)
        for first in range(0, self.count, most):
            source = ByteRange(path, start + first * self.file_step, nbytes)
            address = self.address + first * self.memory_step
            yield Rows(source, address, min(most, self.count - first), self.file_step, self.memory_step)


def read_ranges(
    requests: Sequence[Request | Rows],
    *,
    files: OpenFiles | Mapping[str, FileFingerprint],
    on_read: Callable[[int], None] | None = None,
    threads: int | None = None,
    batch_bytes: int | None = None,
    is_new_memory: bool = False,
) -> None:
    """Executes read requests on several threads. No thread writes to memory any more when this returns or raises.

    Args:
        requests: The byte ranges and their destinations.
        files: The files, whose owner compares them when all has been read; or what each file must be before the first
            byte is read and after the last.
        on_read: Called with the number of requested bytes after each read, by one thread at a time.
        threads: The number of threads; by default one for each processor, up to 8.
        batch_bytes: The most that one call reads; by default `BLOCK_BYTES`, and of servers a share for each thread.
        is_new_memory: Whether the destinations may not have memory yet.

    Raises:
        ReadFailedError: The first I/O error, a short read, or a file that has changed.
    """
    single = [request for request in requests if isinstance(request, Request)]
    rows = [each for request in requests if isinstance(request, Rows) for each in request.split(ROWS_BYTES)]
    paths = {request.source.path for request in single} | {each.source.path for each in rows}
    known = files.fingerprints if isinstance(files, OpenFiles) else files
    is_remote = any(path in known and known[path].is_remote for path in paths)
    threads = threads or (CONNECTIONS if is_remote else read_threads())
    align_bytes = DIRECT_ALIGN_BYTES
    if is_remote:
        align_bytes = common_align_bytes(paths, known)
        share = sum(request.source.nbytes for request in single) // threads
        share = min(max(share, _LEAST_REMOTE_BYTES), _MOST_REMOTE_BYTES)
        batch_bytes = max(batch_bytes or share, align_bytes)  # not two requests for a block of the cache
    wanted = [(request.source, 1) for request in single]
    blocks = in_blocks(wanted, batch_bytes or BLOCK_BYTES, align_bytes, is_scattered=True)
    items: list[Block | Rows] = [*blocks, *rows]
    addresses = [request.address for request in single]

    def process(buffer: memoryview, item: Block | Rows) -> None:
        file = opened[item.source.path]
        if isinstance(item, Rows):
            _read_rows(file, item, buffer if item.has_small_gaps else None)
            return
        views, end = list[memoryview](), 0  # each part goes to its place behind the address of its range
        for part in item.parts:
            address = addresses[part.which] + part.first
            if is_new_memory:
                system.populate(address, part.nbytes)
            if part.at > end:
                views.append(memoryview(bytearray(part.at - end)))
            views.append(memory_at(address, part.nbytes))
            end = part.at + part.nbytes
        read_fully(file, views, item.source.start, end)

    # The buffers are there before memory is written to that must not be left half written.
    span = max((entry.count * entry.file_step for entry in rows if entry.has_small_gaps), default=0)
    workers = [partial(process, memoryview(bytearray(span))) for _ in range(min(threads, len(items)))]

    on_done = None if on_read is None else lambda item: on_read(item.wanted_bytes)
    with nullcontext(files) if isinstance(files, OpenFiles) else OpenFiles(files) as opened:
        for path in paths:
            _ = opened[path]
        for_each(items, workers, on_done, with_torch=bool(span), takes_part=not is_remote)
        if opened is not files:
            opened.check_unchanged()


def _read_rows(file: RangeFile, rows: Rows, buffer: memoryview | None) -> None:
    """Reads rows one by one; or all of them with the gaps between them, into a buffer, and copies them from there."""
    _, start, nbytes = rows.source
    if buffer is None:
        for index in range(rows.count):
            view = memory_at(rows.address + index * rows.memory_step, nbytes)
            read_fully(file, [view], start + index * rows.file_step, nbytes)
        return
    import torch

    span = (rows.count - 1) * rows.file_step + nbytes
    read_fully(file, [buffer[:span]], start, span)
    memory = memory_at(rows.address, (rows.count - 1) * rows.memory_step + nbytes)
    shape = (rows.count, nbytes)
    with torch.inference_mode(False), torch.no_grad():  # also for `frombuffer`: an inference tensor is read-only here
        target, source = (torch.frombuffer(view, dtype=torch.uint8) for view in (memory, buffer))
        target.as_strided(shape, (rows.memory_step, 1)).copy_(source.as_strided(shape, (rows.file_step, 1)))


def read_fully(file: RangeFile, views: list[memoryview], offset: int, left: int) -> None:
    """Reads at least `left` bytes, in as many calls as it takes: one call may return less than was asked for."""
    while left > 0:
        count = file.read_into(views, offset)
        if count == 0:
            raise ReadFailedError(
                "the file ends before the tensor does",
                where=f"{getattr(file, 'path', '')}, byte {offset}",
                expected=f"{left} more bytes",
                remedy=OPEN_AGAIN,
            )
        offset, left = offset + count, left - count
        if left <= 0:
            return
        done = 0
        while count >= len(views[done]):
            count -= len(views[done])
            done += 1
        views = [views[done][count:], *views[done + 1 :]]


memory_at: Callable[[int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi), ((1, "address"), (1, "nbytes"), (1, "flags", 0x200)))
"""Returns a writable view (`PyBUF_WRITE`) of the bytes at an address. The caller keeps the memory alive."""


# Reading blocks, which the thread that has read one consumes while another one reads the next.


Wait = Callable[[], object]
Consume = Callable[[Block, "torch.Tensor"], Wait | None]
"""Consumes a block from a byte buffer. The function that it returns is called before the buffer is used again."""


def block_buffers(blocks: Sequence[Block], threads: int) -> list[torch.Tensor]:
    """Allocates the byte buffers of a read: one for each thread."""
    import torch

    layout = torch.Size([max((block.source.nbytes for block in blocks), default=0)]), None, torch.uint8
    return fresh_tensors([layout] * min(threads, len(blocks)))


def stream(
    blocks: Sequence[Block],
    buffers: Sequence[torch.Tensor],
    consume: Consume,
    *,
    files: OpenFiles,
    on_block: Callable[[Block], object],
) -> None:
    """Reads blocks; the thread that has read a block consumes it while another one reads.

    No thread is at work any more, and nothing that `consume` has started, when this returns or raises.

    Args:
        blocks: The blocks, such as those of `in_blocks`.
        buffers: A buffer for each thread, such as those of `block_buffers`.
        consume: Called with each block and its buffer, without autograd and outside of inference mode.
        files: The files, whose owner compares them when all has been read.
        on_block: Called with each consumed block, by one thread at a time.

    Raises:
        ReadFailedError: An I/O error, a short read, or a file that has changed. What `consume` raises passes through.
    """
    import torch

    waits: dict[int, Wait] = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def process(number: int, buffer: torch.Tensor, block: Block) -> None:
        if (wait := waits.pop(number, None)) is not None:
            wait()
        path, start, nbytes = block.source
        read_fully(files[path], [memory_at(buffer.data_ptr(), nbytes)], start, nbytes)
        if (wait := consume(block, buffer)) is not None:
            waits[number] = wait

    try:
        workers = [partial(process, number, buffer) for number, buffer in enumerate(buffers)]
        for_each(blocks, workers, on_block, with_torch=True)
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for wait in waits.values():
                wait()
