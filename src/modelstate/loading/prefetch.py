"""Bytes that are not in the page cache: read past it or ahead where they are read, mapped where they are shown."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from modelstate.io.engine import can_read_uncached
from modelstate.io.page_cache import LEAST_BYTES, Shown, begin_to_populate, cold_ranges, merged, most_to_read, prefault
from modelstate.planning.assignment import Assignment
from modelstate.planning.memory import means_past_the_cache
from modelstate.planning.prepare import Preparation
from modelstate.spec import ByteRange, StoredTensor
from modelstate.text_format import size

_SETTLING_SECONDS = 0.5
"""A model that computes right away maps what it uses as it comes to it, and needs all processors for itself: where one
is busy, the kernel may put two of its threads on the other one, and there they wait for each other, 10 to 30 ms. One
that waits for its first request finds everything mapped."""
LEAST_WARM_BYTES = 128 << 20
"""What is less, and in the page cache, its first use maps in a few milliseconds."""
_FAULT_BYTES = 64 << 10
"""What the kernel maps of a warm file around the place that is used. Of smaller tensors there are so many that to say
where they are takes longer, and holds up the program more, than to leave them to who uses them."""


def prefetch_range(preparation: Preparation) -> list[str]:
    """Sees to what is read and not in the kernel's page cache, and does not wait. Returns what to note.

    What is read in large runs is going to be read past the page cache, where that is possible; anything else is read
    ahead.
    """
    checkpoint = preparation.checkpoint
    whole = [ByteRange(path, 0, stamp.nbytes) for path, stamp in checkpoint.fingerprints.items()]
    if sum(one.nbytes for one in whole) < LEAST_BYTES:
        return []
    if not cold_ranges(whole, checkpoint.fingerprints):
        preparation.means = replace(preparation.means, cached=True)
        return []
    notes = []
    read = [made for made in preparation.assignments if not made.placement.mapped]
    if nbytes := _past_the_cache(preparation, [made for made in read if made.is_read_together]):
        notes.append(f"the file was not in the page cache: {size(nbytes)} of it are read past it")
    left = (made.stored for made in read if not _is_uncached(made, preparation.means.uncached))
    if asked := checkpoint.read_ahead(stored.extent for stored in left if isinstance(stored, StoredTensor)):
        notes.append(f"the file was not in the page cache: {size(asked)} of it are read ahead")
    return notes


def _past_the_cache(preparation: Preparation, read: Sequence[Assignment]) -> int:
    """Chooses the files that are read past the page cache; returns the bytes."""
    stamps = preparation.checkpoint.fingerprints
    extents = merged(made.stored.extent for made in read if isinstance(made.stored, StoredTensor))
    if sum(one.nbytes for one in extents) < LEAST_BYTES:
        return 0
    cold, wanted = Counter[str](), Counter[str]()
    for one in extents:
        wanted[one.path] += one.nbytes
    for one in cold_ranges(extents, stamps):
        cold[one.path] += one.nbytes
    files = [path for path in cold if cold[path] > wanted[path] / 2 and can_read_uncached(path, stamps.get(path))]
    if files:
        preparation.means = means_past_the_cache(
            preparation.assignments, preparation.means, preparation.max_memory_bytes, files
        )
    return sum(made.nbytes for made in read if _is_uncached(made, preparation.means.uncached))


def _is_uncached(made: Assignment, files: Collection[str]) -> bool:
    return made.is_read_together and isinstance(made.stored, StoredTensor) and made.stored.extent.path in files


def prefault_async(preparation: Preparation) -> list[str]:
    """Brings in the pages that are shown, and does not wait. Returns what to note.

    Those that are in the page cache are put into the map, which one thread does faster than several that run into pages
    which others are mapping.
    """
    warm = preparation.means.cached
    shown = _shown(preparation.assignments, least_bytes=_FAULT_BYTES if warm else 0)
    if sum(extent.nbytes for extent, _ in shown) < (LEAST_WARM_BYTES if warm else LEAST_BYTES):
        return []
    if warm:
        begin_to_populate(shown, threads=1, after=_SETTLING_SECONDS)
        return []
    shown, rest = _that_fits(shown)
    begin_to_populate(shown)
    return ["the file was not in the page cache: its map is brought in, while the program goes on" + rest]


def bring_in(assignments: Iterable[Assignment], progress: Callable[[int], None]) -> list[str]:
    """Brings in the pages that are shown, and waits for them. Returns what to note. Raises `ReadFailedError`."""
    shown, left = _that_fits(_shown(assignments))
    prefault(shown, progress)
    return [f"the map is brought in{left}"] if left else []


def _shown(assignments: Iterable[Assignment], least_bytes: int = 0) -> list[Shown]:
    return [
        (made.stored.extent, made.value)
        for made in assignments
        if made.placement.mapped and isinstance(made.stored, StoredTensor) and made.stored.nbytes >= least_bytes
    ]


def _that_fits(shown: Sequence[Shown]) -> tuple[list[Shown], str]:
    """As much of it as memory has place for, and what to say where there is more."""
    most, fits = most_to_read(), list[Shown]()
    for extent, tensor in shown:
        if (most := most - extent.nbytes) < 0:
            return fits, ": as much of it as half of the memory holds"
        fits.append((extent, tensor))
    return fits, ""
