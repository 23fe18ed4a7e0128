"""Predicts the memory that a load needs beyond the final tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from modelstate.io.engine import ReadStrategy, read_threads
from modelstate.io.memory import aligned
from modelstate.planning.transfer import Sink, Transfer, Transfers, Way


def peak_bytes(transfers: Iterable[Transfers], strategy: ReadStrategy) -> int:
    """The memory beyond the final tensors: staged values, and buffers of casts and moves."""
    reading = [item for item in transfers if item.way is not Way.MAP]
    blocks = [item for item in reading if item.sink is Sink.BLOCKS]
    singles = [item for item in reading if isinstance(item, Transfer)]
    whole = [item for item in singles if item.sink is Sink.WHOLE]
    combined = [item.combined for item in singles if item.sink is Sink.COMPUTED]
    computing = read_threads() * max((each.thread_bytes for each in combined if each is not None), default=0)
    has_ranges = any(item.sink is Sink.MEMORY for item in reading) or bool(whole)
    ranges = (strategy.buffer_bytes if has_ranges else 0) + placed_bytes(reading)
    ranges += max((item.turn_bytes for item in whole), default=0)
    # These reads follow each other, and each frees its memory.
    return sum(item.staged_bytes for item in reading) + max(_stream(blocks, strategy), computing, ranges)


def placed_bytes(transfers: Iterable[Transfers]) -> int:
    """The memory of the threads that read runs together with the gaps between them."""
    return read_threads() * max((part.buffer_bytes for item in transfers for part in item.placed), default=0)


def _stream(blocks: Sequence[Transfers], strategy: ReadStrategy) -> int:
    """The memory of the threads of a stream of these values, and of a block on each device."""
    if not blocks:
        return 0
    devices = {item.device for item in blocks if item.device.type == "cuda"}
    threads_bytes, block_bytes = strategy.stream_bytes(
        total=sum(aligned(nbytes) for item in blocks for nbytes in item.sizes),
        unit=max(min(item.unit_bytes, item.nbytes) for item in blocks),
        working=max(item.working_bytes(strategy.block_bytes) for item in blocks),
        to_device=bool(devices),
    )
    return threads_bytes + len(devices) * block_bytes
