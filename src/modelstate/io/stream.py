"""Reads files in blocks: each thread reads a block into a buffer and has it consumed before it reads the next one.

While one thread computes, another one reads.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from modelstate.io.engine import GAP_BYTES, Batch, Request, coalesce, open_files, reader
from modelstate.io.files import FileFingerprint
from modelstate.io.memory import aligned, empty_cpu
from modelstate.process import parallel_for
from modelstate.spec import ByteRange


class Wanted(NamedTuple):
    """A range of a file that is requested in pieces."""

    source: ByteRange
    unit: int
    """The length of every piece but the last is a multiple of this number of bytes."""


class Part(NamedTuple):
    """A piece of a range, in a buffer."""

    which: int
    """The index of the range among those that are requested."""
    first: int
    """Bytes from the beginning of the range."""
    nbytes: int
    at: int
    """Bytes from the beginning of the buffer."""


@dataclass(frozen=True, slots=True)
class Block:
    """The parts that are read into a buffer at once."""

    parts: tuple[Part, ...]
    nbytes: int
    """The size of the buffer that the block needs."""

    @property
    def wanted_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Wait = Callable[[], object]
Consume = Callable[[Block, torch.Tensor], Wait | None]
"""Consumes a block from a byte buffer. The function that it returns is called before the buffer is used again."""


def stream(
    wanted: Sequence[Wanted],
    consume: Consume,
    *,
    threads: int,
    block_bytes: int,
    fingerprints: Mapping[str, FileFingerprint],
    on_block: Callable[[Block, float], None],
    buffers: int = 1,
    pinned: bool = False,
    uncached: Collection[str] = (),
) -> None:
    """Reads the requested ranges in blocks; the thread that has read a block consumes it.

    No thread is at work any more when this returns or raises.

    Args:
        wanted: The ranges to read.
        consume: Called with each block and its buffer.
        threads: The largest number of threads.
        block_bytes: The size of a block; a unit that is larger is a block of its own.
        fingerprints: What each file must be before the first byte is read and after the last.
        on_block: Called with each consumed block and the seconds that it took, by one thread at a time.
        buffers: Buffers of each thread. With more than one, a thread reads on while an operation that `consume` has
            started is still running.
        pinned: Whether a device copies from the buffers.
        uncached: Paths of files that are read with O_DIRECT, through one more buffer for each thread.

    Raises:
        ReadFailedError: An I/O error, a short read, or a file that has changed. What `consume` raises passes through.
    """
    blocks = in_blocks(wanted, block_bytes)
    if not blocks:
        return
    largest = max(block.nbytes for block in blocks)
    waiting, lock = iter(blocks), threading.Lock()

    def work(stop: threading.Event) -> None:
        read = reader(uncached)
        own = [_buffer(largest, pinned) for _ in range(buffers)]
        waits: list[Wait | None] = [None for _ in own]
        index = 0
        while not stop.is_set():
            with lock:
                block = next(waiting, None)
            if block is None:
                break
            started = time.perf_counter()
            if (wait := waits[index]) is not None:
                wait()
            for batch in _batches(own[index], block, wanted):
                read(descriptors[batch.path], batch)
            waits[index] = consume(block, own[index])
            index = (index + 1) % buffers
            with lock:
                on_block(block, time.perf_counter() - started)
        for wait in waits:
            if wait is not None:
                wait()

    with open_files((entry.source.path for entry in wanted), fingerprints, uncached) as descriptors:
        parallel_for(work, min(threads, len(blocks)), with_torch=True)


def in_blocks(wanted: Sequence[Wanted], block_bytes: int) -> list[Block]:
    """Packs every byte of every range once into blocks, in the order of the files.

    A block needs a buffer of at most `block_bytes`, or holds one unit that is larger.
    """
    blocks: list[Block] = []
    parts: list[Part] = []
    used = 0

    def close() -> None:
        nonlocal used
        if parts:
            blocks.append(Block(tuple(parts), used))
            parts.clear()
        used = 0

    for index in sorted(range(len(wanted)), key=lambda i: (wanted[i].source.path, wanted[i].source.start)):
        source, unit = wanted[index]
        first = 0
        while first < source.nbytes:
            left, room = source.nbytes - first, block_bytes - used
            nbytes = left if left <= room else room // unit * unit
            if nbytes <= 0:
                if parts:
                    close()
                    continue
                nbytes = min(unit, left)
            parts.append(Part(index, first, nbytes, used))
            first += nbytes
            used += aligned(nbytes)
    close()
    return blocks


def _buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if pinned else empty_cpu((nbytes,), torch.uint8)


def _batches(buffer: torch.Tensor, block: Block, wanted: Sequence[Wanted]) -> list[Batch]:
    requests, address = [], buffer.data_ptr()
    for part in block.parts:
        source = wanted[part.which].source
        requests.append(Request(ByteRange(source.path, source.start + part.first, part.nbytes), address + part.at))
    return coalesce(requests, batch_bytes=block.nbytes, gap_bytes=GAP_BYTES)
