"""Reads ranges of files in blocks: the thread that has read a block consumes it while another one reads the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from modelstate.io.engine import (
    OpenFiles,
    ReadStrategy,
    Request,
    coalesce,
    common_align_bytes,
    for_each,
    open_files,
    read_batch,
)
from modelstate.io.files import FileFingerprint
from modelstate.io.memory import aligned, fresh_tensors
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


class Block(msgspec.Struct, frozen=True):
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


def block_buffers(blocks: Sequence[Block], threads: int) -> list[torch.Tensor]:
    """Allocates the byte buffers of a read: one for each thread."""
    import torch

    layout = torch.Size([max((block.nbytes for block in blocks), default=0)]), None, torch.uint8
    return fresh_tensors([layout] * min(threads, len(blocks)))


def stream(
    wanted: Sequence[Wanted],
    consume: Consume,
    *,
    strategy: ReadStrategy,
    files: OpenFiles | Mapping[str, FileFingerprint],
    on_block: Callable[[Block, float], None],
    blocks: Sequence[Block] | None = None,
    buffers: list[torch.Tensor] | None = None,
) -> None:
    """Reads the requested ranges in blocks; the thread that has read a block consumes it while another one reads.

    No thread is at work any more, and nothing that `consume` has started, when this returns or raises.

    Args:
        wanted: The ranges to read.
        consume: Called with each block and its buffer, without autograd and outside of inference mode.
        strategy: The number of threads and the size of a block.
        files: As for `read_ranges`.
        on_block: Called with each consumed block and the seconds that it took, by one thread at a time.
        blocks: The blocks, for a caller that needs parts of several ranges in one block; by default `in_blocks`.
        buffers: A buffer for each thread, for a caller that has allocated them before; by default `block_buffers`.

    Raises:
        ReadFailedError: An I/O error, a short read, or a file that has changed. What `consume` raises passes through.
    """
    import torch

    if blocks is None:
        paths = {entry.source.path for entry in wanted}
        fingerprints = files.fingerprints if isinstance(files, OpenFiles) else files
        blocks = in_blocks(wanted, strategy.block_bytes, common_align_bytes(paths, fingerprints))
    if buffers is None:
        buffers = block_buffers(blocks, strategy.threads)
    waits: list[Wait | None] = [None] * len(buffers)

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait_for(number: int) -> None:
        wait, waits[number] = waits[number], None
        if wait is not None:
            wait()

    @torch.inference_mode(False)
    @torch.no_grad()
    def process(number: int, buffer: torch.Tensor, block: Block) -> None:
        wait_for(number)
        requests = []
        for part in block.parts:
            source = wanted[part.which].source
            extent = ByteRange(source.path, source.start + part.first, part.nbytes)
            requests.append(Request(extent, buffer.data_ptr() + part.at))
        for batch in coalesce(requests, batch_bytes=block.nbytes, gap_bytes=GAP_BYTES):
            read_batch(opened[batch.path], batch)
        waits[number] = consume(block, buffer)

    with open_files((entry.source.path for entry in wanted), files) as opened:
        try:
            workers = [partial(process, number, buffer) for number, buffer in enumerate(buffers)]
            for_each(blocks, workers, on_block, with_torch=True)
        finally:
            for number in range(len(waits)):
                wait_for(number)


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
