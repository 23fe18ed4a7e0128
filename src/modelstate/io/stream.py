"""Files in blocks: threads that each read one into a buffer and hand it on before they read the next.

While one thread computes, another one reads.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from modelstate.io.engine import Batch, Request, coalesce, open_files, reader
from modelstate.io.files import FileFingerprint
from modelstate.io.memory import aligned, empty_cpu
from modelstate.process import parallel_for
from modelstate.spec import ByteRange

_GAP_BYTES = 4 << 10


class Wanted(NamedTuple):
    """A range of a file that is wanted in pieces."""

    source: ByteRange
    unit: int
    """A piece is a multiple of so many bytes, but for the last one."""


class Part(NamedTuple):
    """A piece of a range, in a buffer."""

    which: int
    """Of the ranges, by its number among those that are wanted."""
    first: int
    """Bytes from the beginning of the range."""
    nbytes: int
    at: int
    """Bytes from the beginning of the buffer."""


@dataclass(frozen=True, slots=True)
class Block:
    """What is read into a buffer at once."""

    parts: tuple[Part, ...]
    nbytes: int
    """Of the buffer."""

    @property
    def wanted_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Wait = Callable[[], object]
Consume = Callable[[Block, torch.Tensor], Wait | None]
"""Gets a block and the buffer, of bytes, that it is in. What it returns is called before the buffer is used again."""


def in_blocks(wanted: Sequence[Wanted], block_bytes: int) -> list[Block]:
    """Every byte of every range once, in the order of the files.

    A block takes at most `block_bytes` of a buffer, or one unit that is larger.
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

    def place(index: int) -> tuple[str, int]:
        return wanted[index].source.path, wanted[index].source.start

    for index in sorted(range(len(wanted)), key=place):
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


def stream(
    wanted: Sequence[Wanted],
    consume: Consume,
    *,
    threads: int,
    block_bytes: int,
    stamps: Mapping[str, FileFingerprint],
    on_block: Callable[[Block, float], None],
    buffers: int = 1,
    pinned: bool = False,
    uncached: Collection[str] = (),
) -> None:
    """Reads `wanted` in blocks, and has each consumed by the thread that has read it.

    Each thread has so many buffers, `pinned` where a device copies from them: more than one lets it read on while what
    `consume` has begun goes on. `on_block` hears of each block that has been consumed, and of the seconds that it took,
    from one thread at a time. Files that are named in `uncached` are read past the page cache, through one more buffer
    of each thread. Raises `ReadFailedError`, and what `consume` raises; then, too, no thread is at work any more.
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
        turn = 0
        while not stop.is_set():
            with lock:
                block = next(waiting, None)
            if block is None:
                break
            started = time.perf_counter()
            if (wait := waits[turn]) is not None:
                wait()
            for batch in _batches(own[turn], block, wanted):
                read(descriptors[batch.path], batch)
            waits[turn] = consume(block, own[turn])
            turn = (turn + 1) % buffers
            with lock:
                on_block(block, time.perf_counter() - started)
        for wait in waits:
            if wait is not None:
                wait()

    with open_files((one.source.path for one in wanted), stamps, uncached) as descriptors:
        parallel_for(work, min(threads, len(blocks)), with_torch=True)


def _buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if pinned else empty_cpu((nbytes,), torch.uint8)


def _batches(buffer: torch.Tensor, block: Block, wanted: Sequence[Wanted]) -> list[Batch]:
    requests = _requests(block.parts, wanted, buffer.data_ptr())
    return coalesce(requests, batch_bytes=block.nbytes, gap_bytes=_GAP_BYTES)


def _requests(parts: Iterable[Part], wanted: Sequence[Wanted], address: int) -> list[Request]:
    found = []
    for part in parts:
        source = wanted[part.which].source
        found.append(Request(ByteRange(source.path, source.start + part.first, part.nbytes), address + part.at))
    return found
