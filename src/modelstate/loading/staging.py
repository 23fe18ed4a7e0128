"""What a load reads, with which strategy, and what it holds meanwhile; and the pages that the page cache lacks."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import MemoryBudgetError
from modelstate.io import prefetch
from modelstate.io.engine import ReadStrategy
from modelstate.io.held import why_not_held
from modelstate.io.memory import MemoryTracker
from modelstate.io.prefetch import LEAST_BYTES, Shown, are_cached, files_to_read_uncached, most_to_read, prefault
from modelstate.planning.assignment import Assignment
from modelstate.planning.memory import peak_bytes, strategy_within, uncached_strategy
from modelstate.planning.plan import Options
from modelstate.process import cached_attribute
from modelstate.spec import ByteRange, StoredTensor, overlapping
from modelstate.text_format import size
from modelstate.torch_compat.dtypes import Overflows
from modelstate.transaction.slots import Addresses, Slots

_LEAST_LEASED_BYTES = 1 << 20
"""Fewer bytes are staged: it takes no longer than to hold their files."""


@dataclass(eq=False)
class Staging:
    """The values of a load between the checkpoint and the slots."""

    checkpoint: Checkpoint
    options: Options
    slots: Slots
    """The slots of the model."""
    assignments: list[Assignment] = field(default_factory=list)
    moves: list[Assignment] = field(default_factory=list)
    """Tensors that get no value, and only move to another device."""
    strategy: ReadStrategy = field(default_factory=ReadStrategy.fastest)
    """The threads, buffers and files of the reads."""
    max_memory_bytes: int | None = None
    """The most memory that the load may need beyond the final tensors."""
    overflows: Overflows = field(default_factory=Overflows)
    """Counts values that casts make infinite or NaN."""
    held: MemoryTracker = field(default_factory=MemoryTracker)

    @property
    def nbytes(self) -> int:
        """Bytes that are read or mapped."""
        return sum(assignment.nbytes for assignment in self.assignments)

    @cached_attribute
    def own_memory(self) -> Addresses:
        """The memory of the model's tensors."""
        return Addresses(slot.tensor for slot in self.slots.tensors)

    @property
    def leased(self) -> list[Assignment]:
        """The assignments whose values are read at the commit, from files that are held."""
        return [
            assignment for assignment in self.assignments if assignment.placement.leased and assignment.final is None
        ]

    @property
    def leased_extents(self) -> list[ByteRange]:
        """What is read at the commit."""
        return [assignment.stored.extent for assignment in self.leased if isinstance(assignment.stored, StoredTensor)]

    def why_not_leased(self) -> str:
        """Why the values that are planned to be read at the commit cannot be, as far as is known; else empty."""
        extents = self.leased_extents
        if not extents:
            return ""
        if sum(extent.nbytes for extent in extents) < _LEAST_LEASED_BYTES:
            return "they are small"
        return why_not_held(extents, self.checkpoint.fingerprints)

    def stage_leased(self, reason: str) -> None:
        """Has all values read before the commit."""
        for assignment in self.leased:
            assignment.stage(reason)

    def leased_from(self, extents: Sequence[ByteRange]) -> list[str]:
        """The names of the tensors that are read at the commit from these ranges, or of all where there is none."""
        leased = [assignment for assignment in self.assignments if assignment.placement.leased]
        found = [
            assignment
            for assignment in leased
            if isinstance(assignment.stored, StoredTensor)
            and any(
                extent.path == assignment.stored.extent.path and overlapping(extent, assignment.stored.extent)
                for extent in extents
            )
        ]
        return [assignment.name for assignment in found or leased]

    def limit_memory(self, max_memory_bytes: int | None) -> None:
        """Chooses a read strategy that keeps to the memory budget. Raises `MemoryBudgetError` if there is none."""
        self.max_memory_bytes = max_memory_bytes
        if max_memory_bytes is None:
            return
        self.strategy = strategy_within(self.assignments, max_memory_bytes)
        needed = peak_bytes(self.assignments, self.strategy)
        if needed <= max_memory_bytes:
            return
        could = not self.options.in_place and any(assignment.staged_bytes for assignment in self.assignments)
        raise MemoryBudgetError(
            "the load needs more memory beyond the final tensors than it was given; nothing has been changed",
            expected=f"at most {max_memory_bytes} bytes",
            found=f"{needed} bytes, at the least",
            remedy=f"max_memory_bytes={needed}" + (", or in_place=True, which needs no second copy" if could else ""),
        )


def prefetch_range(staging: Staging) -> list[str]:
    """Brings in what is read and not in the page cache, and does not wait. Returns remarks for the report.

    Large runs are read past the page cache, where that is possible; anything else is read ahead.
    """
    checkpoint = staging.checkpoint
    if sum(fingerprint.nbytes for fingerprint in checkpoint.fingerprints.values()) < LEAST_BYTES:
        return []
    if are_cached(checkpoint.fingerprints):
        staging.strategy = replace(staging.strategy, cached=True)
        return []
    notes = []
    read = [assignment for assignment in staging.assignments if not assignment.placement.mapped]
    if nbytes := _past_the_cache(staging, [assignment for assignment in read if _may_be_uncached(assignment)]):
        notes.append(f"the file was not in the page cache: {size(nbytes)} of it are read past it")
    left = (assignment.stored for assignment in read if not _is_uncached(assignment, staging.strategy.uncached))
    if asked := checkpoint.read_ahead(stored.extent for stored in left if isinstance(stored, StoredTensor)):
        notes.append(f"the file was not in the page cache: {size(asked)} of it are read ahead")
    return notes


def _past_the_cache(staging: Staging, read: Sequence[Assignment]) -> int:
    """Chooses the files that are read past the page cache; returns the bytes."""
    extents = (assignment.stored.extent for assignment in read if isinstance(assignment.stored, StoredTensor))
    files = files_to_read_uncached(extents, staging.checkpoint.fingerprints)
    if files:
        staging.strategy = uncached_strategy(staging.assignments, staging.strategy, staging.max_memory_bytes, files)
    return sum(assignment.nbytes for assignment in read if _is_uncached(assignment, staging.strategy.uncached))


def _may_be_uncached(assignment: Assignment) -> bool:
    return assignment.is_read_together and not assignment.placement.leased


def _is_uncached(assignment: Assignment, files: Collection[str]) -> bool:
    stored = assignment.stored
    return _may_be_uncached(assignment) and isinstance(stored, StoredTensor) and stored.extent.path in files


def prefault_async(staging: Staging) -> list[str]:
    """Brings in the mapped pages that are not in the page cache, and does not wait. Returns remarks for the report."""
    shown = _shown(staging.assignments)
    if staging.strategy.cached or sum(extent.nbytes for extent, _ in shown) < LEAST_BYTES:
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
