"""Tensors into a file, in blocks: several threads, each of which hashes a block and writes it while it is in its cache.

The hash is XXH3-128: it finds damage, not tampering, at the speed of memory, so that it costs next to nothing beside
the write; CRC-32 of zlib is a quarter as fast, BLAKE3 a fifth.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from modelstate.read.checkpoint import is_plain_memory
from modelstate.read.digests import BLOCK_BYTES
from modelstate.read.ranges import memory_at, read_threads
from modelstate.read.workers import work_together
from modelstate.write.files import Output

_MOST_BUFFERS = 1000
"""In one call; Linux takes 1,024."""


@dataclass(slots=True)
class _Job:
    """What one thread writes at once: blocks that lie one behind the other in the file."""

    start: int
    """Bytes from the beginning of the file."""
    blocks: list[tuple[int, int, int, int]] = field(default_factory=list)
    """The number of the tensor, that of the block in it, and where it is in memory: address and bytes."""
    nbytes: int = 0


def write_blocks(output: Output, start: int, tensors: Sequence[torch.Tensor], threads: int | None = None) -> list[str]:
    """Writes the elements of each tensor, in their order, one tensor behind the other from `start` on.

    Returns the digest of each: the hexadecimal digests of its blocks in a row. Tensors are written from their own
    memory, but for those that are not in a row of CPU memory, of which one a thread is copied at a time.
    """
    found: list[list[str]] = [[""] * -(-_nbytes(tensor) // BLOCK_BYTES) for tensor in tensors]
    waiting, lock = iter(_jobs(start, tensors)), threading.Lock()

    def work(stop: threading.Event) -> None:
        while not stop.is_set():
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            if isinstance(job, _Job):
                _write(output, job, found)
                continue
            at, number = job
            row = in_a_row(tensors[number])
            for one in _jobs(at, [row]):
                assert isinstance(one, _Job)
                one.blocks = [(number, which, address, nbytes) for _, which, address, nbytes in one.blocks]
                _write(output, one, found)

    work_together(work, threads or read_threads(), with_torch=True)
    return ["".join(digests) for digests in found]


def digests_of(tensors: Sequence[torch.Tensor], threads: int | None = None) -> list[str]:
    """What `write_blocks` would return, with nothing written."""
    return write_blocks(_Nowhere(), 0, tensors, threads)


class _Nowhere(Output):
    def __init__(self) -> None:
        super().__init__(-1, "")

    def write_at(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        pass


def _jobs(start: int, tensors: Sequence[torch.Tensor]) -> list[_Job | tuple[int, int]]:
    """Jobs, and places with the numbers of tensors that have to be copied first."""
    jobs: list[_Job | tuple[int, int]] = []
    job = _Job(start)
    for number, tensor in enumerate(tensors):
        nbytes = _nbytes(tensor)
        if not nbytes:
            continue
        if not is_plain_memory(tensor):
            jobs.append((start, number))
            start += nbytes
            job = _Job(start)
            continue
        address = tensor.data_ptr()
        for which, first in enumerate(range(0, nbytes, BLOCK_BYTES)):
            if not job.blocks or job.nbytes >= BLOCK_BYTES or len(job.blocks) >= _MOST_BUFFERS:
                job = _Job(start)
                jobs.append(job)
            count = min(BLOCK_BYTES, nbytes - first)
            job.blocks.append((number, which, address + first, count))
            job.nbytes += count
            start += count
    return jobs


def _write(output: Output, job: _Job, found: list[list[str]]) -> None:
    buffers = []
    for number, which, address, nbytes in job.blocks:
        buffer = memory_at(address, nbytes)
        found[number][which] = xxhash.xxh3_128_hexdigest(buffer)
        buffers.append(buffer)
    output.write_at(job.start, buffers)


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their order in one run of CPU memory: the tensor's own where it has them so, else a copy."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # A single element may have any stride, which `view` minds.
        return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize
