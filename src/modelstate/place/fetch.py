"""Bytes that are brought near before they are wanted: read ahead where they are read, mapped where they are shown."""

from collections.abc import Callable, Iterable

import torch

from modelstate.plan.assignment import Assignment
from modelstate.plan.prepare import Preparation
from modelstate.read.populate import begin_to_populate, populate
from modelstate.read.readahead import LEAST_BYTES, cold_ranges, most_to_read
from modelstate.spec import ByteRange, StoredTensor
from modelstate.words import size


def ask_for(preparation: Preparation, *, maps: bool) -> list[str]:
    """Has the kernel begin with what it does not have in its page cache, and does not wait. Returns what to note.

    What is read is read ahead. Of what is shown the pages are brought in, if `maps` says so.
    """
    checkpoint = preparation.checkpoint
    whole = [ByteRange(path, 0, stamp.nbytes) for path, stamp in checkpoint.stamps.items()]
    if sum(one.nbytes for one in whole) < LEAST_BYTES or not cold_ranges(whole, checkpoint.stamps):
        return []
    notes = []
    read = [made.stored for made in preparation.assignments if not made.placement.mapped]
    if asked := checkpoint.read_ahead(one.extent for one in read if isinstance(one, StoredTensor)):
        notes.append(f"the file was not in the page cache: {size(asked)} of it are read ahead")
    shown, left = _shown(preparation.assignments) if maps else ([], "")
    if sum(extent.nbytes for extent, _ in shown) >= LEAST_BYTES:
        begin_to_populate(shown)
        notes.append("the file was not in the page cache: its map is brought in, while the program goes on" + left)
    return notes


def bring_in(assignments: Iterable[Assignment], progress: Callable[[int], None]) -> list[str]:
    """Brings in the pages that are shown, and waits for them. Returns what to note. Raises `ReadFailedError`."""
    shown, left = _shown(assignments)
    populate(shown, progress)
    return [f"the map is brought in{left}"] if left else []


def _shown(assignments: Iterable[Assignment]) -> tuple[list[tuple[ByteRange, torch.Tensor]], str]:
    """What shows files, as far as memory has place for it, and what to say where there is more."""
    most, pairs = most_to_read(), list[tuple[ByteRange, torch.Tensor]]()
    for made in assignments:
        if made.placement.mapped and isinstance(made.stored, StoredTensor):
            if (most := most - made.stored.nbytes) < 0:
                return pairs, ": as much of it as half of the memory holds"
            pairs.append((made.stored.extent, made.value))
    return pairs, ""
