"""Brings in what a load needs and the page cache lacks: reads past the cache, reads ahead, or faults in maps."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from modelstate.io import prefetch
from modelstate.io.prefetch import LEAST_BYTES, Shown, are_cached, files_to_read_uncached, most_to_read, prefault
from modelstate.planning.assignment import Assignment
from modelstate.planning.memory import uncached_strategy
from modelstate.planning.prepare import Preparation
from modelstate.spec import StoredTensor
from modelstate.text_format import size


def prefetch_range(preparation: Preparation) -> list[str]:
    """Brings in what is read and not in the page cache, and does not wait. Returns remarks for the report.

    Large runs are read past the page cache, where that is possible; anything else is read ahead.
    """
    checkpoint = preparation.checkpoint
    if sum(fingerprint.nbytes for fingerprint in checkpoint.fingerprints.values()) < LEAST_BYTES:
        return []
    if are_cached(checkpoint.fingerprints):
        preparation.strategy = replace(preparation.strategy, cached=True)
        return []
    notes = []
    read = [assignment for assignment in preparation.assignments if not assignment.placement.mapped]
    if nbytes := _past_the_cache(preparation, [assignment for assignment in read if assignment.is_read_together]):
        notes.append(f"the file was not in the page cache: {size(nbytes)} of it are read past it")
    left = (assignment.stored for assignment in read if not _is_uncached(assignment, preparation.strategy.uncached))
    if asked := checkpoint.read_ahead(stored.extent for stored in left if isinstance(stored, StoredTensor)):
        notes.append(f"the file was not in the page cache: {size(asked)} of it are read ahead")
    return notes


def _past_the_cache(preparation: Preparation, read: Sequence[Assignment]) -> int:
    """Chooses the files that are read past the page cache; returns the bytes."""
    extents = (assignment.stored.extent for assignment in read if isinstance(assignment.stored, StoredTensor))
    files = files_to_read_uncached(extents, preparation.checkpoint.fingerprints)
    if files:
        preparation.strategy = uncached_strategy(
            preparation.assignments, preparation.strategy, preparation.max_memory_bytes, files
        )
    return sum(assignment.nbytes for assignment in read if _is_uncached(assignment, preparation.strategy.uncached))


def _is_uncached(assignment: Assignment, files: Collection[str]) -> bool:
    stored = assignment.stored
    return assignment.is_read_together and isinstance(stored, StoredTensor) and stored.extent.path in files


def prefault_async(preparation: Preparation) -> list[str]:
    """Brings in the mapped pages that are not in the page cache, and does not wait. Returns remarks for the report."""
    shown = _shown(preparation.assignments)
    if preparation.strategy.cached or sum(extent.nbytes for extent, _ in shown) < LEAST_BYTES:
        return []
    shown, rest = _that_fits(shown)
    prefetch.prefault_async(shown)
    return ["the file was not in the page cache: its map is brought in, while the program goes on" + rest]


def bring_in(assignments: Iterable[Assignment], progress: Callable[[int], None]) -> list[str]:
    """Brings in the mapped pages, and waits for them. Returns remarks for the report. Raises `ReadFailedError`."""
    shown, left = _that_fits(_shown(assignments))
    prefault(shown, progress)
    return [f"the map is brought in{left}"] if left else []


def _shown(assignments: Iterable[Assignment]) -> list[Shown]:
    return [
        (assignment.stored.extent, assignment.value)
        for assignment in assignments
        if assignment.placement.mapped and isinstance(assignment.stored, StoredTensor)
    ]


def _that_fits(shown: Sequence[Shown]) -> tuple[list[Shown], str]:
    """The tensors that fit into half of the memory, and a remark where there are more."""
    most, fits = most_to_read(), list[Shown]()
    for extent, tensor in shown:
        if (most := most - extent.nbytes) < 0:
            return fits, ": as much of it as half of the memory holds"
        fits.append((extent, tensor))
    return fits, ""
