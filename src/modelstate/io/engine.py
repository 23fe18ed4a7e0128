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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from modelstate.errors import OPEN_AGAIN, ReadFailedError
from modelstate.io import lease, linux, system
from modelstate.io.files import Descriptor, FileFingerprint, Opened, fingerprint_of, open_unchanged, read_failed
from modelstate.io.memory import DIRECT_ALIGN_BYTES, HUGE_PAGE_BYTES, Buffer, fresh_tensors
from modelstate.process import parallel_for
from modelstate.remote.location import CACHE_BLOCK_BYTES, CONNECTIONS
from modelstate.spec import GAP_BYTES, MOST_THREADS, ByteRange

if TYPE_CHECKING:
    import torch

    from modelstate.remote.file import RemoteFile

_LEAST_REMOTE_BYTES, _MOST_REMOTE_BYTES = 1 << 20, 8 << 20
"""One request to a server for a part of a larger range: reading the least takes longer than the wait for the answer."""
_REPLY_BYTES = 5 << 19
"""The memory of the client for the reply to one request, at most: measured 2.2 MB."""
_IOV_MAX = 1024
"""The number of buffers that Linux accepts in one call."""
_LEAST_DIRECT_BYTES = 256 << 10
"""Less is read from the page cache, which reads ahead."""
_PyBUF_WRITE = 0x200
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


# Files that are read by range.


class LocalFile:
    """A file of this machine. A `RemoteFile` has the same methods.

    Raises `ReadFailedError` where the file does not match the fingerprint.

    Args:
        path: The file.
        fingerprint: What the file must be.
        opened: The open file; by default it is opened.
    """

    _leased_at: float | None = None
    """When the read lease was taken; None without one."""
    _direct: Descriptor | None = None
    """The file once more, with O_DIRECT."""

    def __init__(self, path: str, fingerprint: FileFingerprint | None, opened: Opened | None = None) -> None:
        self.path, self._fingerprint = path, fingerprint
        self.descriptor, status = open_unchanged(path, fingerprint, opened)
        self._has_name = status.st_nlink > 0

    def lease(self) -> str:
        """Takes a read lease. Returns an empty string, or the reason why there is none.

        Raises `ReadFailedError` where the file is not what its fingerprint says.
        """
        refusal = lease.hold_for_now(self.descriptor) if self._has_name else lease.NAMELESS
        if not refusal:
            self._leased_at = time.monotonic()
            self._compare()
        return refusal

    def _compare(self) -> None:
        if self._fingerprint is not None:
            self._fingerprint.check(self.path, fingerprint_of(self.path, self.descriptor))

    def release(self) -> None:
        """Releases the lease, if there is one: a writer that waits goes on."""
        if self._leased_at is not None:
            self._leased_at = None
            lease.release(self.descriptor)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads from `offset` on into the buffers, one after the other, and returns the number of bytes, 0 at the end.

        What the page cache does not return at once of a leased file is read again. Raises `ReadFailedError`.
        """
        with suppress(OSError):  # which the usual call has again
            if self._leased_at is not None:
                count = system.preadv_cached(self.descriptor, buffers, offset)
            else:
                count = 0 if self._direct is None else self._read_window(self._direct, buffers, offset)
            if count:
                return count
        try:
            return system.preadv(self.descriptor, buffers, offset)
        except OSError as error:
            raise read_failed("reading failed", f"{self.path}, byte {offset}", error) from error

    def skip_page_cache(self, windows: list[Buffer]) -> bool:
        """Lets large reads go past the page cache. Returns whether the file system may have this.

        `windows` are the buffers for it, which files share: a thread that finds none allocates one.
        """
        if linux.O_DIRECT and self._direct is None:
            with suppress(OSError):
                opened = system.open(f"/proc/self/fd/{int(self.descriptor)}", os.O_RDONLY | linux.O_DIRECT)
                self._direct, self._windows = Descriptor(opened), windows
        return self._direct is not None

    def _read_window(self, direct: Descriptor, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads whole pages of the file into a huge page, and copies what is asked for. Returns its length, or 0."""
        wanted, start = sum(map(len, buffers)), offset // DIRECT_ALIGN_BYTES * DIRECT_ALIGN_BYTES
        if wanted < _LEAST_DIRECT_BYTES:
            return 0
        try:
            window = self._windows.pop()
        except IndexError:
            window = Buffer(HUGE_PAGE_BYTES)
        pages = -(-(offset + wanted - start) // DIRECT_ALIGN_BYTES)
        end = system.preadv(direct, [window.view[: pages * DIRECT_ALIGN_BYTES]], start)
        at = offset - start
        for buffer in buffers:
            if at >= end:
                break
            nbytes = min(len(buffer), end - at)
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), window.address + at, nbytes)
            at += nbytes
        self._windows.append(window)
        return max(at - (offset - start), 0)

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where the file has changed since it was opened.

        A leased file has not changed before a writer has waited for too long.
        """
        if self._leased_at is None:
            # After the last read and before the file is closed: a change during the read may have been read in part.
            self._compare()
        elif not lease.is_intact(self.descriptor) and time.monotonic() - self._leased_at > lease.safe_seconds():
            raise ReadFailedError(
                "a process that waited to write to the file was let go on before the read was over",
                where=self.path,
                expected=f"at most {lease.safe_seconds():.0f} seconds",
                remedy=OPEN_AGAIN,
            )

    def close(self) -> None:
        """Closes the file, and releases its lease."""
        self.release()
        if self._direct is not None:
            self._direct.close()
        self.descriptor.close()


RangeFile: TypeAlias = "LocalFile | RemoteFile"


class OpenFiles:
    """Files, each opened at its first use. A context manager, whose end closes them.

    A file without a fingerprint is one of this machine.

    Args:
        fingerprints: What each file must be, by path.
        opened: Files that are open already, by path. They are taken out of it.
    """

    def __init__(self, fingerprints: Mapping[str, FileFingerprint], opened: dict[str, Opened] | None = None) -> None:
        self.fingerprints, self._opened = fingerprints, {} if opened is None else opened
        self._files: dict[str, RangeFile] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: str) -> RangeFile:
        """Returns a file. Raises `ReadFailedError` where it does not match its fingerprint."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                known = self.fingerprints.get(path)
                if known is not None and known.is_remote:
                    from modelstate.remote.file import ObjectVersion, RemoteFile

                    file = RemoteFile(path, ObjectVersion(known.nbytes, known.modified_ns, known.tag), known.cache)
                else:
                    file = LocalFile(path, known, self._opened.pop(path, None))
                self._files[path] = file
            return file

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where a file has changed since it was opened."""
        for file in self._files.values():
            file.check_unchanged()

    def release(self) -> None:
        """Releases the leases: a writer that waits goes on."""
        for file in self._files.values():
            if isinstance(file, LocalFile):
                file.release()

    def close(self) -> None:
        """Closes the files. The next use of a file opens it again."""
        while self._opened:
            self._opened.popitem()[1][0].close()
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def for_each(
    items: Iterable[_Item],
    workers: Sequence[Callable[[_Item], object]],
    on_done: Callable[[_Item, float], object] | None = None,
    *,
    with_torch: bool = False,
    takes_part: bool = False,
) -> None:
    """Processes the items on several threads. No thread is at work any more when this returns or raises.

    Args:
        items: The items. A thread takes the next one when it has processed the one before.
        workers: The function that processes an item, for each thread. A single thread is the caller's own.
        on_done: Called with each processed item and the seconds that it took, by one thread at a time.
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
            started = time.perf_counter()
            process(item)
            if on_done is not None:
                with lock:
                    on_done(item, time.perf_counter() - started)

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
    parts: tuple[Part, ...]

    @property
    def wanted_bytes(self) -> int:
        """The bytes of the parts, without the gaps between them."""
        return sum(part.nbytes for part in self.parts)


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
    runs, parts = list[tuple[str, int, list[Part]]](), list[Part]()
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
            if at + length > end:
                end = at + length
    return [
        Block(ByteRange(path, start, max(part.at + part.nbytes for part in parts)), tuple(parts))
        for path, start, parts in runs
    ]


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
    align_bytes = common_align_bytes(paths, known)
    if is_remote:
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
        for part in item.parts if is_new_memory else ():
            linux.populate(addresses[part.which] + part.first, part.nbytes)
        _read_scattered(file, item, addresses)

    # The buffers are there before memory is written to that must not be left half written.
    span = max((entry.count * entry.file_step for entry in rows if entry.has_small_gaps), default=0)
    workers = [partial(process, memoryview(bytearray(span))) for _ in range(min(threads, len(items)))]

    on_done = None if on_read is None else lambda item, _: on_read(item.wanted_bytes)
    with nullcontext(files) if isinstance(files, OpenFiles) else OpenFiles(files) as opened:
        for path in paths:
            _ = opened[path]
        for_each(items, workers, on_done, with_torch=bool(span), takes_part=not is_remote)
        if opened is not files:
            opened.check_unchanged()


def _read_scattered(file: RangeFile, block: Block, addresses: Sequence[int]) -> None:
    """Reads a block in the calling thread: each part to its place behind the address of its range."""
    views, end = list[memoryview](), 0
    for part in block.parts:
        if part.at > end:
            views.append(memoryview(bytearray(part.at - end)))
        views.append(memory_at(addresses[part.which] + part.first, part.nbytes))
        end = part.at + part.nbytes
    read_fully(file, views, block.source.start, end)


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


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of memory at an address. The caller keeps the memory alive."""
    return _view_of_memory(address, nbytes, _PyBUF_WRITE)


_view_of_memory: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


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
    on_block: Callable[[Block, float], object],
) -> None:
    """Reads blocks; the thread that has read a block consumes it while another one reads.

    No thread is at work any more, and nothing that `consume` has started, when this returns or raises.

    Args:
        blocks: The blocks, such as those of `in_blocks`.
        buffers: A buffer for each thread, such as those of `block_buffers`.
        consume: Called with each block and its buffer, without autograd and outside of inference mode.
        files: The files, whose owner compares them when all has been read.
        on_block: Called with each consumed block and the seconds that it took, by one thread at a time.

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
