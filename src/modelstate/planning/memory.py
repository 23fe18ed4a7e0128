"""How much memory a load needs beyond the final tensors, and how it keeps to a budget."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from modelstate.io.engine import ReadStrategy, uncached_threads
from modelstate.io.memory import aligned
from modelstate.planning.assignment import Assignment
from modelstate.planning.transforms import asked_bytes


def means_within(assignments: Sequence[Assignment], max_bytes: int | None) -> ReadStrategy:
    """The fastest means that need at most so much memory; those that need least, if none do.

    Where threads and blocks are not enough, what is remade by rows is remade by fewer of them at a time.
    """
    usual = ReadStrategy.fastest()
    if max_bytes is None:
        return usual
    while True:
        for found in (usual, *usual.smaller()):
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


def peak_bytes(assignments: Iterable[Assignment], means: ReadStrategy) -> int:
    """Memory that is needed beyond the final tensors: what is staged, and the buffers for what is cast or moved."""
    needing = [made for made in assignments if not made.placement.mapped]
    streamed: list[Assignment] = []
    whole: list[Assignment] = []
    for made in needing:
        (streamed if made.is_streamed else whole).append(made)
    staged = sum(made.staged_bytes for made in needing)
    # One after the other: what one of them takes is gone when the next one begins.
    read = means.uncached_bytes if any(made.is_run_of_bytes for made in whole) else 0
    read += max(_scratch(whole, means), _alone(whole, means))
    return staged + max(_streaming(streamed, means), read)


def _streaming(streamed: Sequence[Assignment], means: ReadStrategy) -> int:
    if not streamed:
        return 0
    return means.stream_bytes(
        total=sum(aligned(made.nbytes) for made in streamed),
        unit=max(min(made.unit_bytes, made.nbytes) for made in streamed),
        working=max(made.working_bytes for made in streamed),
        buffers=1 if all(made.on_cpu for made in streamed) else 2,
    )


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
