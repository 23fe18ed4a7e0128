"""Tensors into a file, in blocks: several threads, each of which hashes a block and writes it while it is in its cache.

The hash is XXH3-128: it finds damage, not tampering, at the speed of memory, so that it costs next to nothing beside
the write.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from modelstate.read.checkpoint import is_plain_memory
from modelstate.read.digests import BLOCK_BYTES
from modelstate.read.ranges import memory_at, read_threads
from modelstate.read.workers import work_together
from modelstate.write.files import Output
from modelstate.write.later import Later


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
    output: Output, start: int, tensors: Sequence[torch.Tensor | Later], threads: int | None = None
) -> list[str]:
    """Writes the elements of each tensor, in their order, one tensor behind the other from `start` on.

    Returns the digest of each: the hexadecimal digests of its blocks in a row. Each thread copies a block at a time; of
    tensors that are not in a row of CPU memory, or that come `Later`, one at a time, or one block of one that is made
    in pieces.
    """
    found: list[list[str]] = [[""] * -(-_nbytes(tensor) // BLOCK_BYTES) for tensor in tensors]
    waiting, lock = iter(_jobs(start, tensors)), threading.Lock()

    def work(stop: threading.Event) -> None:
        room = None if isinstance(output, _Nowhere) else _Room()
        while not stop.is_set():
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            if isinstance(job, _Job):
                _write(output, job, found, room)
                continue
            row = in_a_row(_values(tensors[job.number], job))
            for one in _jobs(job.start, [row]):
                assert isinstance(one, _Job)
                one.blocks = [(job.number, job.block + which, at, nbytes) for _, which, at, nbytes in one.blocks]
                _write(output, one, found, room)
            del row  # before the next one is made

    work_together(work, threads or read_threads(), with_torch=True)
    return ["".join(digests) for digests in found]


def digests_of(tensors: Sequence[torch.Tensor | Later], threads: int | None = None) -> list[str]:
    """What `write_blocks` would return, with nothing written."""
    return write_blocks(_Nowhere(), 0, tensors, threads)


class _Nowhere(Output):
    def __init__(self) -> None:
        super().__init__(-1, "")

    def write_at(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        pass


def _values(tensor: torch.Tensor | Later, job: _Made) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else tensor.make(job.first, job.end)


def _jobs(start: int, tensors: Sequence[torch.Tensor | Later]) -> list[_Job | _Made]:
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
            if not job.blocks or job.nbytes >= BLOCK_BYTES:
                job = _Job(start)
                jobs.append(job)
            count = min(BLOCK_BYTES, nbytes - first)
            job.blocks.append((number, which, address + first, count))
            job.nbytes += count
            start += count
    return jobs


def _to_be_made(start: int, number: int, tensor: torch.Tensor | Later) -> Iterator[_Made]:
    count = tensor.numel()
    step = BLOCK_BYTES // tensor.itemsize if isinstance(tensor, Later) and tensor.in_pieces else count
    for block, first in enumerate(range(0, count, step)):
        yield _Made(start + first * tensor.itemsize, number, block, first, min(first + step, count))


class _Room:
    """Memory of one thread, through which blocks go to the file.

    Somebody may change a tensor while it is written. What is hashed has to be what is written all the same, so neither
    is taken from the tensor itself.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * BLOCK_BYTES)  # which goes back to the system at once
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._view = memoryview(self._memory)

    def taken(self, at: int, address: int, nbytes: int) -> memoryview:
        """A copy of so many bytes, at a place of this memory."""
        ctypes.memmove(self._address + at, address, nbytes)
        return self._view[at : at + nbytes]

    def first(self, nbytes: int) -> memoryview:
        return self._view[:nbytes]


def _write(output: Output, job: _Job, found: list[list[str]], room: _Room | None) -> None:
    at = 0
    for number, which, address, nbytes in job.blocks:
        block = memory_at(address, nbytes) if room is None else room.taken(at, address, nbytes)
        found[number][which] = xxhash.xxh3_128_hexdigest(block)
        at += nbytes
    if room is not None:
        output.write_at(job.start, [room.first(at)])


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their order in one run of CPU memory: the tensor's own where it has them so, else a copy."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # A single element may have any stride, which `view` minds.
        return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def _nbytes(tensor: torch.Tensor | Later) -> int:
    return tensor.numel() * tensor.itemsize
