"""Writes tensors in blocks on several threads, each of which hashes a block and writes it while it is in the CPU cache.

The hash is XXH3-128. It detects damage, not tampering, at the speed of memory, and so adds hardly any time to the
write.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash

from modelstate.errors import MemoryBudgetError, ModelStateError, UnsavableError
from modelstate.formats.manifest import BLOCK_BYTES
from modelstate.io.atomic import Output
from modelstate.io.engine import for_each, memory_at, read_threads
from modelstate.io.memory import DIRECT_ALIGN_BYTES, Buffer, empty_cpu
from modelstate.io.tensors import ReadAll, elements, read_tensor, runs
from modelstate.spec import Assemble, Stored, StoredComposite, StoredTensor, elements_bytes, is_run, own_bytes, pieces
from modelstate.text_format import size
from modelstate.torch_compat.plain import in_a_row, is_plain_memory

if TYPE_CHECKING:
    from modelstate.remote.upload import ObjectWriter

TOGETHER_BYTES = 64 << 10
"""The memory of tensors that are read together where each tensor needs less."""


Make = Callable[[int, int], torch.Tensor]
OnCast = Callable[[torch.Tensor, torch.Tensor], object]
REPEATED_BYTES, REPEATED_TIMES = 1 << 30, 16
"""The limit of a tensor that is larger than its storage, because it shows the same bytes again and again: 16 times what
is stored, and 1 GiB."""


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """A plain tensor whose values are computed when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    key: object
    """Equal for tensors that are the same bytes (tied tensors)."""
    make: Make
    """Returns the elements from the first index to before the second, in their order, in any shape. Called by any
    thread; for all elements at once unless `in_pieces` is set."""
    in_pieces: bool
    memory_bytes: int
    """The memory for computing a piece, including the piece."""
    stored_bytes: int
    """The bytes of the storages that the tensor is computed from."""
    run: Run | None = field(default=None, kw_only=True)
    """Where the elements are contiguous in a file, so that those of several small tensors can be read at once."""

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.itemsize


class Run(msgspec.Struct, frozen=True, eq=False):
    """The elements of a lazy tensor that is contiguous in a file."""

    stored: StoredTensor
    read_all: ReadAll
    on_cast: OnCast


def lazy_tensor(
    stored: Stored, key: object, read_all: ReadAll, dtype: torch.dtype | None, on_cast: OnCast
) -> LazyTensor:
    """A tensor of a checkpoint that is read when it is written.

    Args:
        stored: The tensor.
        key: Equal for tied tensors.
        read_all: Reads in the thread that calls it.
        dtype: The dtype to cast to, if any.
        on_cast: Called with the values before and after each cast.
    """
    to = stored.dtype if dtype is None else dtype
    shape = tuple(stored.shape)
    if is_run(stored):
        piece = min(BLOCK_BYTES, math.prod(shape) * to.itemsize)
        read = piece // to.itemsize * stored.dtype.itemsize
        taken = read + (piece if dtype else 0)
        make = partial(_cast, lambda first, end: elements(stored, first, end - first, read_all), to, on_cast)
        run = Run(stored, read_all, on_cast)
        return LazyTensor(to, shape, key, make, True, taken, bytes_stored(stored), run=run)
    row = math.prod(shape[1:])
    is_in_chunks = isinstance(stored, StoredComposite) and isinstance(stored.build, Assemble)
    if isinstance(stored, StoredComposite) and is_in_chunks and 0 < row * stored.dtype.itemsize <= BLOCK_BYTES:
        rows = min(-(-BLOCK_BYTES // (row * to.itemsize)) + 1, shape[0])
        read = rows * row * stored.dtype.itemsize
        taken = 2 * read + (rows * row * to.itemsize if dtype else 0)  # the chunks, and the rows made of them
        make = partial(_cast, partial(_piece_of_chunks, stored, row, read_all), to, on_cast)
        return LazyTensor(to, shape, key, make, True, taken, bytes_stored(stored))
    values = partial(read_tensor, stored, read_all)
    return whole(to, shape, key, values, own_bytes(stored), bytes_stored(stored), on_cast)


def whole(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    key: object,
    values: Callable[[], torch.Tensor],
    memory_bytes: int,
    stored_bytes: int,
    on_cast: OnCast = lambda *_: None,
) -> LazyTensor:
    """A tensor that is computed at once; `memory_bytes` is the memory for that, without the result."""
    result = math.prod(shape) * dtype.itemsize
    make = partial(_cast, lambda first, end: values().detach(), dtype, on_cast)
    return LazyTensor(dtype, shape, key, make, False, memory_bytes + result, stored_bytes)


def bytes_stored(stored: Stored | LazyTensor) -> int:
    """The bytes of the storages that hold the elements of a tensor."""
    if isinstance(stored, LazyTensor):
        return stored.stored_bytes
    total = 0
    for piece in pieces(stored):
        if isinstance(piece, StoredTensor):
            total += piece.storage.nbytes
        else:
            try:
                total += piece.untyped_storage().nbytes()
            except (NotImplementedError, RuntimeError):  # tensors of some devices have no storage
                total += piece.nbytes
    return total


def check_expanded(
    tensors: Mapping[str, Stored | LazyTensor],
    where: str,
    kind: type[ModelStateError] = UnsavableError,
    remedy: str = "leave the tensor out, or save what it was expanded from",
) -> None:
    """Raises an error of a kind for a tensor whose elements are far more bytes than its storages have.

    A small file can describe tensors of any size, with strides of 0.
    """
    for name, tensor in tensors.items():
        nbytes = tensor.nbytes if isinstance(tensor, LazyTensor) else elements_bytes(tensor)
        if nbytes <= REPEATED_BYTES:
            continue
        stored = bytes_stored(tensor)
        if nbytes > (most := REPEATED_TIMES * stored + REPEATED_BYTES):
            raise kind(
                "expanded views have far more elements than are stored",
                where=f"{where}: {name}",
                expected=f"at most {size(most)}: {REPEATED_TIMES} times what is stored, and {size(REPEATED_BYTES)}",
                found=f"{size(nbytes)} of elements, and {size(stored)} stored",
                remedy=remedy,
                names=(name,),
            )


def _piece_of_chunks(stored: StoredComposite, row: int, read_all: ReadAll, first: int, end: int) -> torch.Tensor:
    """Reads the rows around some elements, which several chunks may hold. `row` is the number of elements of a row."""
    start = first // row
    rows = stored.region([slice(start, -(-end // row))])
    assert rows is not None
    return read_tensor(rows, read_all).view(-1)[first - start * row : end - start * row]


def _cast(read: Make, dtype: torch.dtype, on_cast: OnCast, first: int, end: int) -> torch.Tensor:
    """Reads elements of a tensor, and casts them where they have another dtype."""
    with torch.inference_mode(False), torch.no_grad():
        return _converted(read(first, end), dtype, on_cast)


def _converted(tensor: torch.Tensor, dtype: torch.dtype, on_cast: OnCast) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    # In memory that returns to the system when it is freed, since very many are created one after the other.
    cast = empty_cpu(tensor.shape, dtype).copy_(tensor)
    on_cast(tensor, cast)
    return cast


_IN_MEMORY = object()


class _Job(msgspec.Struct):
    """What one thread writes: a tensor, a block of it, or several small tensors that are contiguous in the file."""

    start: int
    """Bytes from the beginning of the file."""
    group: object
    """The same object for tensors that may be written together: those in plain memory, and those that are read by the
    same function; None for other tensors."""
    pieces: list[tuple[int, int, int, int]]
    """Index of the tensor, index of the first block, first element, and the element behind the last."""
    nbytes: int
    memory_bytes: int


def write_blocks(
    output: Output | ObjectWriter | None,
    start: int | Sequence[int],
    tensors: Sequence[torch.Tensor | LazyTensor],
    threads: int | None = None,
    on_written: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Writes the elements of each tensor, in their order.

    Each thread copies one block at a time, also from another device and of a tensor that is not contiguous. A
    `LazyTensor` that is not computed in pieces is computed whole, one at a time in each thread.

    Args:
        output: The file; None only computes the digests. With one thread, the bytes are written in their order.
        start: The offset of the first tensor, which the others follow one behind the other; or that of each tensor.
        tensors: The tensors.
        threads: The number of threads; by default one for each processor, up to 8.
        on_written: Called with numbers of bytes that were written, by one thread at a time; may raise to end the
            write.

    Returns:
        The digest of each tensor: the concatenated hexadecimal digests of its blocks.
    """
    sizes = [tensor.nbytes for tensor in tensors]
    digests: list[list[str]] = [[""] * -(-nbytes // BLOCK_BYTES) for nbytes in sizes]
    most_bytes = min(sum(sizes), BLOCK_BYTES)

    def write(buffer: Buffer | None, job: _Job) -> None:
        start, filled = job.start, 0
        for (number, block, first, end), values in zip(job.pieces, _values(job, tensors), strict=True):
            itemsize = values.itemsize
            address = values.data_ptr() + (first * itemsize if job.group is _IN_MEMORY else 0)
            nbytes = (end - first) * itemsize
            for offset in range(0, nbytes, BLOCK_BYTES):
                count = min(BLOCK_BYTES, nbytes - offset)
                data = memory_at(address + offset, count)
                if output is not None and buffer is not None:
                    if filled + count > BLOCK_BYTES:
                        output.write_at(start, buffer.view[start % DIRECT_ALIGN_BYTES :][:filled])
                        start, filled = start + filled, 0
                    # Pages of memory are pages of the file. Other code may change a tensor while it is written: the
                    # digest and the file are of the same copy.
                    at = start % DIRECT_ALIGN_BYTES + filled
                    ctypes.memmove(buffer.address + at, address + offset, count)
                    data = buffer.view[at : at + count]
                digests[number][block + offset // BLOCK_BYTES] = xxhash.xxh3_128_hexdigest(data)
                filled += count
        if output is not None and buffer is not None:
            output.write_at(start, buffer.view[start % DIRECT_ALIGN_BYTES :][:filled])

    starts = [*accumulate(sizes, initial=start)][:-1] if isinstance(start, int) else start
    jobs = _jobs(starts, tensors)

    def on_done(job: _Job) -> None:
        on_written(job.nbytes)

    threads = min(threads or read_threads(), len(jobs))
    buffers = [None if output is None else Buffer(most_bytes + DIRECT_ALIGN_BYTES) for _ in range(threads)]
    for_each(jobs, [partial(write, buffer) for buffer in buffers], on_done, with_torch=True)
    return ["".join(blocks) for blocks in digests]


def _values(job: _Job, tensors: Sequence[torch.Tensor | LazyTensor]) -> Sequence[torch.Tensor]:
    """Returns the elements of the pieces of a job, or, for tensors in plain memory, the tensors."""
    of_job = [tensors[number] for number, *_ in job.pieces]
    lazy = [tensor for tensor in of_job if isinstance(tensor, LazyTensor)]
    if len(lazy) > 1:
        given = [tensor.run for tensor in lazy if tensor.run is not None]
        with torch.inference_mode(False), torch.no_grad():
            read = runs([run.stored for run in given], given[0].read_all)
            return [
                _converted(values, tensor.dtype, run.on_cast)
                for values, tensor, run in zip(read, lazy, given, strict=True)
            ]
    _, _, first, end = job.pieces[0]
    if lazy:
        return [in_a_row(lazy[0].make(first, end))]
    live = [tensor for tensor in of_job if isinstance(tensor, torch.Tensor)]
    return live if job.group is _IN_MEMORY else [in_a_row(live[0], first, end)]


def _jobs(starts: Sequence[int], tensors: Sequence[torch.Tensor | LazyTensor]) -> list[_Job]:
    """The work of the threads."""
    jobs: list[_Job] = []
    # Tensors that are read together need no more memory than the largest one, or little.
    needs = (tensor.memory_bytes for tensor in tensors if isinstance(tensor, LazyTensor))
    most_bytes = max(min(max(needs, default=0), BLOCK_BYTES), TOGETHER_BYTES)
    for number, (start, tensor) in enumerate(zip(starts, tensors, strict=True)):
        numel, itemsize = tensor.numel(), tensor.itemsize
        step, memory_bytes = BLOCK_BYTES // itemsize, 0
        group: object = None
        if isinstance(tensor, LazyTensor):
            step = step if tensor.in_pieces else max(numel, 1)
            memory_bytes = tensor.memory_bytes
            group = tensor.run.read_all if tensor.run is not None and numel <= step else None
        elif is_plain_memory(tensor):
            group = _IN_MEMORY
        for block, first in enumerate(range(0, numel, step)):
            end = min(first + step, numel)
            at, nbytes, last = start + first * itemsize, (end - first) * itemsize, jobs[-1] if jobs else None
            if (
                last is not None
                and group is not None
                and last.group is group
                and last.start + last.nbytes == at
                and last.nbytes + nbytes <= BLOCK_BYTES
                and last.memory_bytes + memory_bytes <= most_bytes
            ):
                last.pieces.append((number, block, first, end))
                last.nbytes += nbytes
                last.memory_bytes += memory_bytes
            else:
                jobs.append(_Job(at, group, [(number, block, first, end)], nbytes, memory_bytes))
    return jobs


def threads_within(tensors: Mapping[str, object], max_memory_bytes: int | None, where: str) -> int:
    """The number of threads that fit into the memory budget. Raises `MemoryBudgetError` where one does not fit."""
    needs = {name: tensor.memory_bytes for name, tensor in tensors.items() if isinstance(tensor, LazyTensor)}
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
            options=f"--max-memory {needs[largest]}B or more, or leave it out",
        )
    return max(1, min(threads, max_memory_bytes // max(needs[largest], 1)))
