"""Tensors into a file, in blocks: several threads, each of which hashes a block and writes it while it is in its cache.

The hash is XXH3-128: it finds damage, not tampering, at the speed of memory, so that it costs next to nothing beside
the write.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from modelstate.read.checkpoint import is_plain_memory
from modelstate.read.digests import BLOCK_BYTES
from modelstate.read.ranges import memory_at, read_threads
from modelstate.read.uncached import ALIGN_BYTES, Buffer
from modelstate.read.workers import work_together
from modelstate.write.files import Output
from modelstate.write.later import Later
from modelstate.write.uncached import Uncached


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
    output: Output | Uncached | None, start: int, tensors: Sequence[torch.Tensor | Later], threads: int | None = None
) -> list[str]:
    """Writes the elements of each tensor, in their order, one tensor behind the other from `start` on.

    Without an output they are only hashed.

    Returns the digest of each: the hexadecimal digests of its blocks in a row. Each thread copies a block at a time; of
    tensors that are not in a row of CPU memory, or that come `Later`, one at a time, or one block of one that is made
    in pieces.
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

    work_together(work, threads or read_threads(), with_torch=True)
    return ["".join(digests) for digests in found]


def digests_of(tensors: Sequence[torch.Tensor | Later], threads: int | None = None) -> list[str]:
    """What `write_blocks` would return, with nothing written."""
    return write_blocks(None, 0, tensors, threads)


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
            count = min(BLOCK_BYTES, nbytes - first)
            if not job.blocks or job.nbytes + count > BLOCK_BYTES:
                job = _Job(start)
                jobs.append(job)
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


def _nbytes(tensor: torch.Tensor | Later) -> int:
    return tensor.numel() * tensor.itemsize
