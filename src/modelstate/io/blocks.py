"""Reads ranges of files in blocks: the thread that has read a block consumes it while another one reads the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from modelstate.io.engine import (
    RangeFile,
    ReadStrategy,
    Request,
    batch_reader,
    coalesce,
    common_align_bytes,
    for_all,
    for_each,
    open_files,
)
from modelstate.io.files import FileFingerprint
from modelstate.io.memory import aligned, spare_tensors
from modelstate.spec import GAP_BYTES, ByteRange

if TYPE_CHECKING:
    import torch


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
Consume = Callable[[Block, "torch.Tensor"], Wait | None]
"""Consumes a block from a byte buffer. The function that it returns is called before the buffer is used again."""


def stream(
    wanted: Sequence[Wanted],
    consume: Consume,
    *,
    strategy: ReadStrategy,
    fingerprints: Mapping[str, FileFingerprint],
    on_block: Callable[[Block, float], None],
    blocks: Sequence[Block] | None = None,
    buffers: int = 1,
    pinned: bool = False,
    held: Mapping[str, RangeFile] | None = None,
) -> None:
    """Reads the requested ranges in blocks; the thread that has read a block consumes it while another one reads.

    No thread is at work any more when this returns or raises.

    Args:
        wanted: The ranges to read.
        consume: Called with each block and its buffer.
        strategy: The number of threads, the size of a block, and the files to read with O_DIRECT.
        fingerprints: What each file must be before the first byte is read and after the last.
        on_block: Called with each consumed block and the seconds that it took, by one thread at a time.
        blocks: The blocks, for a caller that needs parts of several ranges in one block; by default `in_blocks`.
        buffers: Buffers of each thread. With more than one, a thread reads on while an operation that `consume` has
            started is still running.
        pinned: Whether a device copies from the buffers.
        held: As for `read_ranges`. `consume` may get a block twice.

    Raises:
        ReadFailedError: An I/O error, a short read, or a file that has changed. What `consume` raises passes through.
    """
    if blocks is None:
        paths = {entry.source.path for entry in wanted}
        blocks = in_blocks(wanted, strategy.block_bytes, common_align_bytes(paths, fingerprints))
    largest = max((block.nbytes for block in blocks), default=0)
    threads = min(strategy.threads, len(blocks))
    # From held files memory is written to that must not be left half written: the buffers are there before.
    ready = [_block_buffer(largest, pinned) for _ in range(threads * buffers)] if held is not None else []

    @contextmanager
    def worker() -> Iterator[Callable[[Block], None]]:
        read = batch_reader(strategy.uncached)
        own = [ready.pop() if ready else _block_buffer(largest, pinned) for _ in range(buffers)]
        waits: list[Wait | None] = [None for _ in own]

        def process(block: Block) -> None:
            buffer, wait = own[0], waits[0]
            if wait is not None:
                wait()
            requests = []
            for part in block.parts:
                source = wanted[part.which].source
                extent = ByteRange(source.path, source.start + part.first, part.nbytes)
                requests.append(Request(extent, buffer.data_ptr() + part.at))
            for batch in coalesce(requests, batch_bytes=block.nbytes, gap_bytes=GAP_BYTES):
                read(files[batch.path], batch)
            waits[0] = consume(block, buffer)
            own.append(own.pop(0))
            waits.append(waits.pop(0))

        try:
            yield process
            for wait in waits:
                if wait is not None:
                    wait()
        finally:
            ready.extend(own if held is not None else ())  # for the caller's thread, where this one has failed

    with open_files((entry.source.path for entry in wanted), fingerprints, strategy.uncached, held) as files:
        run = for_each if held is None else for_all
        run(blocks, worker, threads, on_block, with_torch=True)


def in_blocks(wanted: Sequence[Wanted], block_bytes: int, align_bytes: int = 1) -> list[Block]:
    """Packs every byte of every range once into blocks, in the order of the files.

    A block needs a buffer of at most `block_bytes`, or holds one unit that is larger. Where it ends within a range, it
    ends at a multiple of `align_bytes` in the file, if there is one.
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
            nbytes = left
            if left > room:
                nbytes = room // unit * unit
                excess = -(-((source.start + first + nbytes) % align_bytes) // unit) * unit
                nbytes -= excess if excess < nbytes else 0
            if nbytes <= 0:
                if parts:
                    close()
                    continue
                nbytes = min(unit, left)
            parts.append(Part(index, first, nbytes, used))
            first += nbytes
            used += aligned(nbytes)
            if first < source.nbytes:
                close()
    close()
    return blocks


def _block_buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    import torch

    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return spare_tensors([(torch.Size([nbytes]), None, torch.uint8)])[0]
