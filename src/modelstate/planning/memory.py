"""How much memory a load needs beyond the final tensors, and how it keeps to a budget."""

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from modelstate.io.engine import BUFFER_BYTES, read_threads, uncached_threads
from modelstate.io.memory import aligned
from modelstate.planning.assignment import Assignment
from modelstate.planning.transforms import asked_bytes

_BLOCK_BYTES = 4 << 20
"""What a thread reads before it casts it: threads that take turns at the interpreter lose more with smaller blocks than
the processor's cache, which holds a part of this, saves them."""
_LEAST_BLOCK_BYTES = 64 << 10
_SCRATCH_BYTES = 64 << 20
"""What is read at once of tensors that are needed whole, unless a single one is larger."""


@dataclass(frozen=True, slots=True)
class ReadStrategy:
    """What a load reads with."""

    threads: int
    """That stream."""
    block_bytes: int
    """That each of them reads at once."""
    scratch_bytes: int
    """Read at once of what cannot be streamed."""
    ahead: bool
    """Whether more of that is read while transforms compute with what is there."""
    uncached: frozenset[str] = frozenset()
    """Files that are read past the page cache, through a buffer for each thread more."""

    cached: bool = False
    """Whether all of the files were found in the page cache."""

    @property
    def turn_bytes(self) -> int:
        """Read in one go of what cannot be streamed: the half of it, while the other half is computed with."""
        return self.scratch_bytes // 2 if self.ahead else self.scratch_bytes


def usual_means() -> ReadStrategy:
    """What is fast."""
    return ReadStrategy(read_threads(), _BLOCK_BYTES, _SCRATCH_BYTES, True)


def means_within(assignments: Sequence[Assignment], max_bytes: int | None) -> ReadStrategy:
    """The fastest means that need at most so much memory; those that need least, if none do.

    Where threads and blocks are not enough, what is remade by rows is remade by fewer of them at a time.
    """
    usual = usual_means()
    if max_bytes is None:
        return usual
    while True:
        for found in (usual, *_lesser(usual)):
            if peak_bytes(assignments, found) <= max_bytes:
                return found
        if not _have_fewer_rows(assignments):
            return found


def _have_fewer_rows(assignments: Iterable[Assignment]) -> bool:
    """Has values remade by half as many rows at a time; False where it is one already."""
    by_rows = [made for made in assignments if made.remake_rows > 1]
    for made in by_rows:
        made.remake_rows = -(-made.remake_rows // 2)
        if made.remake is not None:
            part = (made.remake_rows, *made.param.shape[1:])
            made.remake_bytes = asked_bytes(made.remake.transform, made.name, part, made.dtype)
    return bool(by_rows)


def means_past_the_cache(
    assignments: Sequence[Assignment], means: ReadStrategy, max_bytes: int | None, files: Collection[str]
) -> ReadStrategy:
    """The same means for reading these files past the page cache, if that needs at most so much memory."""
    found = replace(means, uncached=frozenset(files))
    computes = any(made.remake is not None for made in assignments)  # which more threads do no faster
    wide = found if computes else replace(found, threads=uncached_threads(means.threads))
    for one in (wide, found):
        if max_bytes is None or peak_bytes(assignments, one) <= max_bytes:
            return one
    return means


def _lesser(usual: ReadStrategy) -> Iterator[ReadStrategy]:
    """From fast to small."""
    yield replace(usual, ahead=False)
    yield replace(usual, ahead=False, scratch_bytes=0)
    threads, block_bytes = usual.threads, usual.block_bytes
    while threads > 1 or block_bytes > _LEAST_BLOCK_BYTES:
        if block_bytes > _LEAST_BLOCK_BYTES:
            block_bytes //= 2
        else:
            threads //= 2
        yield ReadStrategy(threads, block_bytes, 0, False)


def peak_bytes(assignments: Iterable[Assignment], means: ReadStrategy) -> int:
    """Memory that is needed beyond the final tensors: what is staged, and the buffers for what is cast or moved."""
    needing = [made for made in assignments if not made.placement.mapped]
    streamed: list[Assignment] = []
    whole: list[Assignment] = []
    for made in needing:
        (streamed if made.is_streamed else whole).append(made)
    staged = sum(made.staged_bytes for made in needing)
    # One after the other: what one of them takes is gone when the next one begins.
    read = _uncached(whole, means) + max(_scratch(whole, means), _alone(whole, means))
    return staged + max(_streaming(streamed, means), read)


def _streaming(streamed: Sequence[Assignment], means: ReadStrategy) -> int:
    if not streamed:
        return 0
    total = sum(aligned(made.nbytes) for made in streamed)
    unit = max(min(made.unit_bytes, made.nbytes) for made in streamed)
    buffer = min(aligned(max(means.block_bytes, unit)), total)
    buffers = 1 if all(made.on_cpu for made in streamed) else 2
    threads = means.threads if total > buffer else 1
    past_the_cache = BUFFER_BYTES if means.uncached else 0
    return threads * (past_the_cache + buffers * buffer + max(made.working_bytes for made in streamed))


def _uncached(whole: Sequence[Assignment], means: ReadStrategy) -> int:
    return past_the_cache_bytes(means) if any(made.is_run_of_bytes for made in whole) else 0


def past_the_cache_bytes(means: ReadStrategy) -> int:
    """Buffers of a read that goes past the page cache."""
    return uncached_threads(read_threads()) * BUFFER_BYTES if means.uncached else 0


def _scratch(whole: Sequence[Assignment], means: ReadStrategy) -> int:
    through = [made for made in whole if made.needs_buffer and made.transform is None]
    runs = [aligned(made.buffer_bytes) for made in through if made.is_run_of_bytes]
    others = [aligned(made.buffer_bytes) for made in through if not made.is_run_of_bytes]
    buffer = max(max(runs, default=0), min(sum(runs), means.turn_bytes))
    buffers = 2 if means.ahead and sum(runs) > buffer else 1
    # The buffers are there while values are remade out of them.
    remaking = max((made.passing_bytes for made in whole if made.remake is not None), default=0)
    return max(buffers * buffer, max(others, default=0)) + remaking


def _alone(whole: Sequence[Assignment], means: ReadStrategy) -> int:
    """For what one transform is given, and what is read for the next one."""
    given = sorted((made for made in whole if made.transform is not None), key=lambda made: made.passing_bytes)
    if not given:
        return 0
    ahead = max((made for made in given if made.is_read_ahead), key=lambda made: made.passing_bytes, default=None)
    if not means.ahead or ahead is None:
        return given[-1].passing_bytes
    rest = [made.passing_bytes for made in given if made is not ahead]
    return ahead.passing_bytes + max(rest, default=0)


class MemoryTracker:
    """Bytes that a load holds beyond the final tensors, and the most that it has held at once.

    It is told of buffers, of values that wait to be copied, and of what is kept to undo; not of each tensor that is
    read to where it stays, so that very many small ones cost nothing.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._now, self._lock = 0, threading.Lock()

    def take(self, nbytes: int) -> None:
        """Hears of memory that has been made; of some that is gone, where it is less than 0."""
        if nbytes:
            with self._lock:
                self._now += nbytes
                self.peak_bytes = max(self.peak_bytes, self._now)

    @contextmanager
    def during(self, nbytes: int) -> Iterator[None]:
        """Counts memory as long as the context lasts."""
        self.take(nbytes)
        try:
            yield
        finally:
            self.take(-nbytes)
