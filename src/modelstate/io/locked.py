"""Copies held files from maps whose pages are locked in memory.

`preadv` copies slower than a program does from a map, and values that are cast need a buffer between the two. But the
first access to a page of a map that cannot be read ends the process (SIGBUS). So the pages are locked (`mlock`) before
anything looks at them: the kernel reads then what the page cache lacks, says whether it could, and does not evict a
page again until it is unlocked. The lease keeps other processes from cutting the file meanwhile.

Where the page cache has most of a file, and the limit allows it, the file is locked as a whole (`lock_all`): from then
on no read can fail. Otherwise a window after the other is locked while it is copied. Each window has a map of its own:
windows of two threads may have a page in common, and a map has a page locked or not, however often it was locked.

Whatever cannot be locked is left for the reads of `modelstate.io.held`: where the limit (RLIMIT_MEMLOCK) is too small,
where a page cannot be read, or where locking takes longer than it saves. That is so where the page cache has a file in
single pages: each is locked by itself.

What remains: a process that is stopped for longer than the lease holds, in the middle of a copy, ends with SIGBUS when
it goes on, if another process has cut the file meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from modelstate.errors import ReadFailedError
from modelstate.forks import is_forked
from modelstate.io import lease, linux, system
from modelstate.io.blocks import Block, Consume, Part, Wanted
from modelstate.io.engine import Request, Rows, coalesce, for_each, memory_at, read_threads
from modelstate.io.files import Descriptor, FileFingerprint, open_unchanged
from modelstate.io.prefetch import begin_to_read, merged, most_to_read
from modelstate.process import torch_threads
from modelstate.spec import GAP_BYTES, ByteRange

if TYPE_CHECKING:
    import torch

LEAST_BYTES = 4 << 20
"""Of fewer bytes, maps are not worth their system calls."""
LEAST_COPIED_BYTES = 256 << 20
"""Of fewer bytes that need no cast, reading takes no longer than to make the maps and to lock them: in a fresh process,
89 MB were read in 17 ms and copied in 20 ms. Fewer bytes that are cast are shared out by torch among threads that it
has: to start others takes longer."""
_MOST_WINDOW_BYTES, _LEAST_WINDOW_BYTES = 16 << 20, 5 << 20
"""What is copied at a time: at least a block that is cast. A window that is larger than the processor's cache is copied
past it."""
_PAGES_BYTES = 64 << 10
"""More than the pages that are locked beyond a window, at both ends."""
_LEAST_PIECE_BYTES = 64 << 10
"""One `preadv` fills many smaller pieces in less time than torch takes for the calls."""
_COPY_SPEED, _CAST_SPEED = 25e9, 15e9
"""Maps are used where the kernel locks so many bytes in a second of processor time. Measured: 200e9 to 800e9 where the
page cache has large folios, 30e9 where they are of 128 KiB, and 16e9 where they are single pages."""
_SAMPLES, _SAMPLE_BYTES = 2, 4 << 20
_LEAST_CACHED = 0.9
"""The share of a file in the page cache from which on locking brings in the rest. A colder one is read by threads."""
_ALIGN_BYTES = 64
_Item = TypeVar("_Item")


def can_lock_all(fingerprints: Mapping[str, FileFingerprint]) -> bool:
    """Whether `LockedFiles.lock_all` is likely to succeed for whole files, so that nothing else need look at them."""
    is_enough = sum(known.nbytes for known in fingerprints.values()) >= LEAST_COPIED_BYTES
    if not is_enough or any(known.is_remote for known in fingerprints.values()):
        return False
    extents = [ByteRange(path, 0, known.nbytes) for path, known in fingerprints.items()]
    descriptors: dict[str, Descriptor] = {}
    try:
        for path, known in fingerprints.items():
            descriptors[path] = open_unchanged(path, known)
        return _can_lock_all(descriptors, extents)
    except ReadFailedError:
        return False  # the read itself reports it
    finally:
        for descriptor in descriptors.values():
            descriptor.close()


class LeasedFile(Protocol):
    """A file that is held by a lease."""

    descriptor: Descriptor

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where a writer may have changed the file."""


class LockedFiles:
    """The copies from maps of held files.

    Args:
        files: The files. Their leases last as long as this object is used.
        extents: What is going to be read of them.
    """

    def __init__(self, files: Mapping[str, LeasedFile], extents: Iterable[ByteRange]) -> None:
        self._files, self._spans = files, merged(extents)
        nbytes = sum(span.nbytes for span in self._spans)
        self._copies = nbytes >= LEAST_COPIED_BYTES
        self._threads = 1 if not self._copies and torch_threads() > 1 else read_threads()
        self._is_able = nbytes >= LEAST_BYTES and not is_forked()  # the threads of torch do not exist there
        self._maps: dict[str, linux.PageMap] = {}
        """Where `lock_all` has locked all ranges."""
        self._speed, self._window_bytes = 0.0, 0

    @property
    def _descriptors(self) -> Mapping[str, int]:
        return {path: file.descriptor for path, file in self._files.items()}

    def lock_all(self) -> bool:
        """Locks all that is going to be read, where that is fast. Returns whether it has."""
        descriptors = self._descriptors
        if not _can_lock_all(descriptors, self._spans):
            return False
        for path, start, nbytes in self._spans:
            begin_to_read(descriptors[path], start, nbytes)
        ends = {path: start + nbytes for path, start, nbytes in self._spans}
        try:
            for path, start, nbytes in self._spans:
                if path not in self._maps:
                    self._maps[path] = linux.PageMap(descriptors[path], ends[path], start)
                system.mlock(descriptors[path], nbytes, start, self._maps[path].address(start))
        except (OSError, ValueError):
            self.close()
            return False
        self._window_bytes = _MOST_WINDOW_BYTES
        return True

    def close(self) -> None:
        """Unlocks what is locked."""
        while self._maps:
            self._maps.popitem()[1].close()

    def copy(self, requests: Iterable[Request | Rows]) -> list[Request | Rows]:
        """Copies what it can to the addresses, and returns the requests that are left."""
        import torch

        from modelstate.torch_compat.private import copy_each

        left = [*requests]
        if not (self._copies and self._uses_maps(_COPY_SPEED)):
            return left
        single = [request for request in left if isinstance(request, Request)]
        left = [request for request in left if isinstance(request, Rows)]
        batches = []
        for batch in coalesce(single, batch_bytes=self._window_bytes, gap_bytes=GAP_BYTES):
            is_large = batch.wanted_bytes >= len(batch.pieces) * _LEAST_PIECE_BYTES
            if is_large:
                batches.append(batch)
            else:
                left += batch.requests()
        undone = dict.fromkeys(range(len(batches)))

        def process(index: int) -> None:
            batch = batches[index]
            with self._shown(batch.path, batch.start, batch.nbytes) as shown:
                targets, sources, at = [], [], 0
                for address, nbytes in batch.pieces:
                    if address is not None:
                        targets.append(torch.frombuffer(memory_at(address, nbytes), dtype=torch.uint8))
                        sources.append(shown[at : at + nbytes])
                    at += nbytes
                copy_each(targets, sources)
            del undone[index]

        self._run(range(len(batches)), process)
        for index in undone:
            left += batches[index].requests()
        return left

    def stream(
        self,
        wanted: Sequence[Wanted],
        blocks: Iterable[Block],
        consume: Consume,
        on_block: Callable[[Block, float], None],
        itemsize: int,
    ) -> None:
        """Consumes the blocks that it can, from the maps.

        Args:
            wanted: The ranges that the blocks are parts of.
            blocks: The blocks, in the order of the files.
            consume: See `stream`. It returns None, must not write to the buffer, and is called again where it fails.
            on_block: See `stream`. It is called for each block that has been consumed.
            itemsize: The bytes of the largest element: each range must begin at a multiple in memory.
        """
        if not self._uses_maps(_CAST_SPEED):
            return
        lock = threading.Lock()

        def process(group: _Group) -> None:
            started, whole = time.perf_counter(), group.whole
            if any(part.at % itemsize for part in whole.parts):
                return
            with self._shown(group.path, group.start, whole.nbytes) as shown:
                consume(whole, shown)
            seconds = time.perf_counter() - started
            with lock:
                for block in group.blocks:
                    on_block(block, seconds * block.wanted_bytes / whole.wanted_bytes)

        self._run(_groups(blocks, wanted, self._window_bytes), process)

    def _uses_maps(self, least_speed: float) -> bool:
        """Whether parts of the maps can be locked, and at this speed."""
        if self._maps or not (self._is_able and self._files):
            return bool(self._maps)
        if not self._window_bytes:
            limit = linux.lockable_bytes()
            if limit // self._threads - _PAGES_BYTES < _LEAST_WINDOW_BYTES:
                self._threads = 1  # which shares its window with the threads of torch
            share = limit // self._threads - _PAGES_BYTES
            if share < _LEAST_WINDOW_BYTES:
                return False
            self._window_bytes = min(share, _MOST_WINDOW_BYTES)
            self._speed = _speed(self._descriptors, self._spans)
        return self._speed >= least_speed

    @contextmanager
    def _shown(self, path: str, start: int, nbytes: int) -> Iterator[torch.Tensor]:
        """The bytes of a range, and a few more. Raises an error where they cannot be shown, or may have changed."""
        import torch

        file = self._files[path]
        if not lease.is_intact(file.descriptor):
            raise ReadFailedError("a process waits to write to the file", where=path)
        with nullcontext(self._maps[path]) if self._maps else _window(file.descriptor, start, nbytes) as mapped:
            rounded = -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
            yield torch.frombuffer(memory_at(mapped.address(start), rounded), dtype=torch.uint8)
        file.check_unchanged()

    def _run(self, items: Iterable[_Item], process: Callable[[_Item], None]) -> None:
        import torch

        @contextmanager
        def worker() -> Iterator[Callable[[_Item], None]]:
            with torch.inference_mode(False), torch.no_grad():

                def attempt(item: _Item) -> None:
                    with suppress(Exception):  # the reads of what is left report what is wrong
                        process(item)

                yield attempt

        for_each(items, worker, self._threads, with_torch=True)


@contextmanager
def _window(descriptor: int, start: int, nbytes: int) -> Iterator[linux.PageMap]:
    """A map of a range of a file that is locked within the block. Raises `OSError` or `ValueError`."""
    mapped = linux.PageMap(descriptor, start + nbytes, start)
    try:
        system.mlock(descriptor, nbytes, start, mapped.address(start))
        yield mapped
    finally:
        mapped.close()


def _can_lock_all(descriptors: Mapping[str, int], spans: Sequence[ByteRange]) -> bool:
    """Whether the page cache has most of the ranges, and they can be locked fast and within the limits."""
    nbytes = sum(span.nbytes for span in spans)
    if is_forked() or nbytes > min(linux.lockable_bytes(), most_to_read()):
        return False
    for path, start, length in spans:
        share = linux.cached_share(descriptors[path], start, length)
        if share is None or share < _LEAST_CACHED:
            return False
    return _speed(descriptors, spans) >= _COPY_SPEED


def _speed(descriptors: Mapping[str, int], spans: Sequence[ByteRange]) -> float:
    """How many bytes the kernel locks in a second of processor time, by samples; 0 where it does not."""
    path, start, nbytes = max(spans, key=lambda span: span.nbytes)
    length, seconds = min(_SAMPLE_BYTES, nbytes), 0.0
    for index in range(_SAMPLES):
        first = start + (nbytes - length) // (_SAMPLES - 1) * index
        try:
            mapped = linux.PageMap(descriptors[path], first + length, first)
            began = time.thread_time()
            system.mlock(descriptors[path], length, first, mapped.address(first))
            seconds += time.thread_time() - began
            mapped.close()
        except (OSError, ValueError):
            return 0
    return _SAMPLES * length / max(seconds, 1e-9)


class _Group(NamedTuple):
    """Blocks that follow each other in a file."""

    path: str
    start: int
    """Bytes from the beginning of the file to those that `whole` is about: a multiple of `_ALIGN_BYTES`."""
    whole: Block
    """The blocks as one, whose parts lie as they do in the file."""
    blocks: Sequence[Block]


def _groups(blocks: Iterable[Block], wanted: Sequence[Wanted], most_bytes: int) -> Iterator[_Group]:
    """Joins blocks that lie in a part of a file of at most `most_bytes`. Leaves out those that do not."""
    waiting: list[Block] = []
    path, start, end = "", 0, 0

    def joined() -> Iterator[_Group]:
        if waiting:
            yield _group(path, start, waiting, wanted)

    for block in blocks:
        extents = [_source(part, wanted) for part in block.parts]
        paths = {extent.path for extent in extents}
        first = min(extent.start for extent in extents) // _ALIGN_BYTES * _ALIGN_BYTES
        last = max(extent.start + extent.nbytes for extent in extents)
        if len(paths) > 1 or last - first > most_bytes:
            continue
        is_next = path in paths and max(start, end - GAP_BYTES) <= first <= end + GAP_BYTES
        if not is_next or last - start > most_bytes:
            yield from joined()
            waiting, path, start = [], paths.pop(), first
        waiting.append(block)
        end = last
    yield from joined()


def _group(path: str, start: int, blocks: list[Block], wanted: Sequence[Wanted]) -> _Group:
    parts: list[Part] = []
    for part in (part for block in blocks for part in block.parts):
        at = _source(part, wanted).start - start
        last = parts[-1] if parts else None
        if last is not None and last.which == part.which and last.first + last.nbytes == part.first:
            parts[-1] = last._replace(nbytes=last.nbytes + part.nbytes)
        else:
            parts.append(part._replace(at=at))
    return _Group(path, start, Block(tuple(parts), max(part.at + part.nbytes for part in parts)), blocks)


def _source(part: Part, wanted: Sequence[Wanted]) -> ByteRange:
    path, start, _ = wanted[part.which].source
    return ByteRange(path, start + part.first, part.nbytes)
