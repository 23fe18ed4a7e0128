"""Writes tensors in blocks: threads that hash a block and write it while it is in the cache.

What is saved has to be on the disk before it counts, so that a copy in the page cache spares no time: its memory has to
be found, which throws out what others use, and is copied to once more. Past it the disk takes whole pages from the
memory of the process; what lies before the first of a write and behind the last goes through the cache.

The hash is XXH3-128: it finds damage, not tampering, at the speed of memory, so that it costs next to nothing beside
the write.
"""

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xxhash

from modelstate.errors import MemoryBudgetError, UnsavableError
from modelstate.io import write_system
from modelstate.io.atomic import Output
from modelstate.io.digests import BLOCK_BYTES
from modelstate.io.engine import ALIGN_BYTES, FLAG, UNSUPPORTED, Buffer, memory_at, read_threads
from modelstate.io.memory import empty_cpu
from modelstate.io.own import ReadAll, elements, read_tensor
from modelstate.process import parallel_for
from modelstate.spec import Stored, StoredTensor, own_bytes, pieces
from modelstate.text_format import size
from modelstate.torch_compat.plain import is_plain_memory

LEAST_BYTES = 64 << 20
"""A smaller file stays in the page cache, where it is in nobody's way."""


class Uncached:
    """A file that is written to at any place, by any thread, past the page cache as far as that can be."""

    def __init__(self, output: Output, descriptor: int) -> None:
        self._output, self._descriptor = output, descriptor
        self._is_refused = False

    def write_at(self, offset: int, buffer: memoryview) -> None:
        """Writes the buffer, all of it. Its pages have to begin where those of the file do to go past the cache."""
        before = min(-offset % ALIGN_BYTES, len(buffer))
        done = before + self._write_pages(offset + before, buffer[before:])
        self._output.write_at(offset, buffer[:before])
        self._output.write_at(offset + done, buffer[done:])

    def _write_pages(self, offset: int, buffer: memoryview) -> int:
        """How many bytes were written: as many as the disk took at once, the page cache takes the others."""
        nbytes = len(buffer) // ALIGN_BYTES * ALIGN_BYTES
        if not nbytes or self._is_refused:
            return 0
        try:
            return write_system.pwritev(self._descriptor, [buffer[:nbytes]], offset)
        except OSError as error:
            # A file system may take the flag and refuse the write, or ask for larger blocks.
            if error.errno not in UNSUPPORTED:
                raise
            self._is_refused = True
            return 0


@contextmanager
def past_page_cache(output: Output, nbytes: int) -> Iterator[Output | Uncached]:
    """What to write so many bytes of a file with: `output` itself, where they are few or there is no other way."""
    descriptor = None
    if FLAG and nbytes >= LEAST_BYTES:
        with suppress(OSError):
            descriptor = write_system.open(output.path, os.O_WRONLY | FLAG)
    if descriptor is None:
        yield output
        return
    try:
        yield Uncached(output, descriptor)
    finally:
        with suppress(OSError):  # the sync of the other descriptor says what is wrong
            write_system.close(descriptor)


Make = Callable[[int, int], torch.Tensor]
OnCast = Callable[[torch.Tensor, torch.Tensor], object]
REPEATED_BYTES, REPEATED_TIMES = 1 << 30, 16
"""A state may take as many bytes, and as many times more than are stored of it, when each view is written in full."""


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """A plain tensor that has no values yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    key: object
    """Equal for those that are the same bytes: tied tensors."""
    make: Make
    """The elements from one to before another, in their order, with any shape; called by any thread. Where it is not
    made `in_pieces`, it is asked for all of them."""
    in_pieces: bool
    memory_bytes: int
    """What making a piece takes, with the piece."""
    storages: Mapping[object, int]
    """Bytes of the storages that it is made of, each by a key of its own."""

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def lazy_tensor(
    stored: Stored, key: object, read_all: ReadAll, dtype: torch.dtype | None = None, on_cast: OnCast = lambda *_: None
) -> LazyTensor:
    """A tensor of a checkpoint, cast to a dtype where one is given.

    `read_all` reads in the thread that calls it. `on_cast` is called with the values before and after each cast.
    """
    to = stored.dtype if dtype is None else dtype
    shape = tuple(stored.shape)
    if isinstance(stored, StoredTensor) and stored.is_contiguous and stored.nbytes:
        piece = min(BLOCK_BYTES, math.prod(shape) * to.itemsize)
        read = piece // to.itemsize * stored.dtype.itemsize
        taken = read + (piece if dtype else 0)
        return LazyTensor(
            to, shape, key, partial(_piece, stored, read_all, to, on_cast), True, taken, storages_of(stored)
        )
    values = partial(read_tensor, stored, read_all)
    return whole(to, shape, key, values, own_bytes(stored), storages_of(stored), on_cast)


def whole(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    key: object,
    values: Callable[[], torch.Tensor],
    memory_bytes: int,
    storages: Mapping[object, int],
    on_cast: OnCast = lambda *_: None,
) -> LazyTensor:
    """A tensor that is made at once; `memory_bytes` is what that takes beside the result."""
    result = math.prod(shape) * dtype.itemsize
    return LazyTensor(
        dtype, shape, key, partial(_whole, values, dtype, on_cast), False, memory_bytes + result, storages
    )


def storages_of(stored: Stored | LazyTensor) -> Mapping[object, int]:
    """Bytes of the storages that the elements of a tensor lie in, each by a key of its own."""
    if isinstance(stored, StoredTensor):
        return {stored.storage: stored.storage.nbytes}
    if isinstance(stored, LazyTensor):
        return stored.storages
    found: dict[object, int] = {}
    for piece in pieces(stored):
        if isinstance(piece, StoredTensor):
            found[piece.storage] = piece.storage.nbytes
        else:
            with suppress(NotImplementedError, RuntimeError):  # of a device that has no storages to be asked
                storage = piece.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def check_repeated(tensors: Mapping[str, torch.Tensor | LazyTensor], where: str) -> None:
    """Raises `UnsavableError` where views show the bytes of their storages so often that a file would be far larger.

    A small file can describe tensors of any size: with strides of 0, or with many views of one storage.
    """
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if total <= REPEATED_BYTES:
        return
    storages: dict[object, int] = {}
    for tensor in tensors.values():
        storages |= storages_of(tensor)
    stored = sum(storages.values())
    if total > (most := REPEATED_TIMES * stored + REPEATED_BYTES):
        times = {
            name: one.numel() * one.itemsize / max(sum(storages_of(one).values()), 1) for name, one in tensors.items()
        }
        raise UnsavableError(
            "the tensors show the bytes that are stored of them so often that a file of them would be far larger",
            where=f"{where}: {max(times, key=lambda name: times[name])}",
            expected=f"at most {size(most)}: {REPEATED_TIMES} times what is stored, and {size(REPEATED_BYTES)}",
            found=f"{size(total)} of elements, and {size(stored)} stored",
            remedy="leave the tensor out, or save what it was expanded from",
        )


def _piece(
    stored: StoredTensor, read_all: ReadAll, dtype: torch.dtype, on_cast: OnCast, first: int, end: int
) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _cast(elements(stored, first, end - first, read_all), dtype, on_cast)


def _whole(
    values: Callable[[], torch.Tensor], dtype: torch.dtype, on_cast: OnCast, first: int, end: int
) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _cast(values().detach(), dtype, on_cast)


def _cast(tensor: torch.Tensor, dtype: torch.dtype, on_cast: OnCast) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    # In memory that goes back to the system, for very many are made one after the other.
    cast = empty_cpu(tensor.shape, dtype).copy_(tensor)
    on_cast(tensor, cast)
    return cast


@dataclass(slots=True)
class _Job:
    """What one thread writes at once: blocks that lie one behind the other in the file."""

    start: int
    """Bytes from the beginning of the file."""
    blocks: list[tuple[int, int, int, int]] = field(default_factory=list)
    """The number of the tensor, that of the block in it, and where it is in memory: address and bytes."""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Made:
    """What one thread makes, and then writes: all of a tensor, or one block of it."""

    start: int
    number: int
    block: int
    first: int
    end: int
    """Elements of the tensor, from the first to before the last."""


def write_blocks(
    output: Output | Uncached | None,
    start: int,
    tensors: Sequence[torch.Tensor | LazyTensor],
    threads: int | None = None,
) -> list[str]:
    """Writes the elements of each tensor, in their order, one tensor behind the other from `start` on.

    Without an output they are only hashed.

    Returns the digest of each tensor: the hexadecimal digests of its blocks, joined. Each thread copies one block at a
    time. Tensors that are not contiguous in CPU memory, and a `LazyTensor`, are copied whole, one at a time, unless the
    `LazyTensor` is made in pieces.
    """
    found: list[list[str]] = [[""] * -(-_nbytes(tensor) // BLOCK_BYTES) for tensor in tensors]
    most_bytes = min(sum(map(_nbytes, tensors)), BLOCK_BYTES)
    waiting, lock = iter(_jobs(start, tensors)), threading.Lock()

    def work(stop: threading.Event) -> None:
        room = None if output is None else _Room(output, most_bytes)
        while not stop.is_set():
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            if isinstance(job, _Job):
                _write(job, found, room)
                continue
            row = in_a_row(_values(tensors[job.number], job))
            for one in _jobs(job.start, [row]):
                assert isinstance(one, _Job)
                one.blocks = [(job.number, job.block + which, at, nbytes) for _, which, at, nbytes in one.blocks]
                _write(one, found, room)
            del row  # before the next one is made

    parallel_for(work, threads or read_threads(), with_torch=True)
    return ["".join(digests) for digests in found]


def digests_of(tensors: Sequence[torch.Tensor | LazyTensor], threads: int | None = None) -> list[str]:
    """What `write_blocks` would return, with nothing written."""
    return write_blocks(None, 0, tensors, threads)


def _values(tensor: torch.Tensor | LazyTensor, job: _Made) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else tensor.make(job.first, job.end)


def _jobs(start: int, tensors: Sequence[torch.Tensor | LazyTensor]) -> list[_Job | _Made]:
    """What is written as it is, and what has to be made or copied first."""
    jobs: list[_Job | _Made] = []
    job = _Job(start)
    for number, tensor in enumerate(tensors):
        nbytes = _nbytes(tensor)
        if not nbytes:
            continue
        if not isinstance(tensor, torch.Tensor) or not is_plain_memory(tensor):
            jobs += _to_be_made(start, number, tensor)
            start += nbytes
            job = _Job(start)
            continue
        address = tensor.data_ptr()
        for which, first in enumerate(range(0, nbytes, BLOCK_BYTES)):
            count = min(BLOCK_BYTES, nbytes - first)
            if not job.blocks or job.nbytes + count > BLOCK_BYTES:
                job = _Job(start)
                jobs.append(job)
            job.blocks.append((number, which, address + first, count))
            job.nbytes += count
            start += count
    return jobs


def _to_be_made(start: int, number: int, tensor: torch.Tensor | LazyTensor) -> Iterator[_Made]:
    count = tensor.numel()
    step = BLOCK_BYTES // tensor.itemsize if isinstance(tensor, LazyTensor) and tensor.in_pieces else count
    for block, first in enumerate(range(0, count, step)):
        yield _Made(start + first * tensor.itemsize, number, block, first, min(first + step, count))


class _Room:
    """Memory of one thread, through which blocks go to the file.

    Somebody may change a tensor while it is written. What is hashed has to be what is written all the same, so neither
    is taken from the tensor itself.
    """

    def __init__(self, output: Output | Uncached, most_bytes: int) -> None:
        self._output = output
        self._buffer = Buffer(most_bytes + ALIGN_BYTES)

    def take(self, at: int, address: int, nbytes: int) -> memoryview:
        """A copy of so many bytes, at a place of this memory."""
        ctypes.memmove(self._buffer.address + at, address, nbytes)
        return self._buffer.view[at : at + nbytes]

    def write(self, first: int, end: int, start: int) -> None:
        """Writes what is between two places to the file."""
        self._output.write_at(start, self._buffer.view[first:end])


def _write(job: _Job, found: list[list[str]], room: _Room | None) -> None:
    at = first = job.start % ALIGN_BYTES  # pages of memory are then pages of the file
    for number, which, address, nbytes in job.blocks:
        block = memory_at(address, nbytes) if room is None else room.take(at, address, nbytes)
        found[number][which] = xxhash.xxh3_128_hexdigest(block)
        at += nbytes
    if room is not None:
        room.write(first, at, job.start)


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their order in one run of CPU memory: the tensor's own where it has them so, else a copy."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # A single element may have any stride, which `view` minds.
        return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def _nbytes(tensor: torch.Tensor | LazyTensor) -> int:
    return tensor.numel() * tensor.itemsize


def threads_within(tensors: Mapping[str, Any], max_memory_bytes: int | None, where: str) -> int:
    """How many threads may make tensors at once. Raises `MemoryBudgetError` where one is too many."""
    needs = {name: one.memory_bytes for name, one in tensors.items() if isinstance(one, LazyTensor)}
    threads = read_threads()
    if max_memory_bytes is None or not needs:
        return threads
    largest = max(needs, key=lambda name: needs[name])
    if needs[largest] > max_memory_bytes:
        raise MemoryBudgetError(
            "a tensor needs more memory while it is written than there may be",
            where=f"{where}: {largest}",
            expected=f"at most {size(max_memory_bytes)}",
            found=f"{needs[largest]:,} bytes",
            remedy=f"max_memory_bytes={needs[largest]} or more",
        )
    return max(1, min(threads, max_memory_bytes // max(needs[largest], 1)))
