"""`Staging`: how the values of a load are read, and the memory that takes; and the pages that the page cache lacks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import MemoryBudgetError
from modelstate.io import prefetch
from modelstate.io.engine import ReadStrategy
from modelstate.io.held import why_not_held
from modelstate.io.memory import Layout, MemoryTracker, fresh_tensors, spare_tensors
from modelstate.io.prefetch import (
    LEAST_BYTES,
    Shown,
    are_cached,
    files_to_read_uncached,
    most_to_read,
    prefault,
    read_ahead,
)
from modelstate.loading.replicas import SharedRead
from modelstate.planning.assignment import Assignment
from modelstate.planning.memory import peak_bytes, strategy_within, uncached_strategy
from modelstate.planning.plain_table import PlainTable, Planned, leased
from modelstate.planning.plan import Options
from modelstate.process import cached_attribute
from modelstate.remote.file import CONNECTIONS
from modelstate.spec import ByteRange, StoredTensor
from modelstate.text_format import size
from modelstate.torch_compat.dtypes import Overflows
from modelstate.transaction.slots import Addresses, slots_of

Inspect = Callable[[torch.Tensor, torch.Tensor], None]
"""Looks at a piece of the final values of a tensor of the model, as a flat tensor. Several threads call it at the same
time."""
_LEAST_LEASED_BYTES = 1 << 20
"""Fewer bytes are staged: it takes no longer than to hold their files."""


@dataclass(eq=False)
class Staging:
    """How the values of a load are read: from where, with which threads and buffers, and the memory that they take."""

    checkpoint: Checkpoint
    options: Options
    model: nn.Module
    max_memory_bytes: int | None = None
    """The most memory that the load may need beyond the final tensors."""
    strategy: ReadStrategy = field(default_factory=ReadStrategy.fastest)
    """The threads, buffers and files of the reads."""
    overflows: Overflows = field(default_factory=Overflows)
    """Counts values that casts make infinite or NaN."""
    held: MemoryTracker = field(default_factory=MemoryTracker)
    shared: list[SharedRead] = field(default_factory=list)
    """The values that one rank reads for several."""
    inspect: Inspect | None = None
    """Called with the values that are read from a file to where they stay, by the threads that read them. Values that
    take another route are not inspected."""
    in_background: bool = False
    """Whether values are read while the model is in use: they may wait for long, and their memory is not kept."""

    def temporary(self, like: Sequence[Layout]) -> list[torch.Tensor]:
        """Returns memory for values that are copied into their slots at the commit, and then gone."""
        return fresh_tensors(like) if self.in_background else spare_tensors(like)

    @cached_attribute
    def own_memory(self) -> Addresses:
        """The memory of the model's tensors."""
        return Addresses(slot.tensor for slot in slots_of(self.model).tensors)

    def limit_memory(self, planned: Sequence[Planned]) -> None:
        """Chooses a read strategy that keeps to the memory budget. Raises `MemoryBudgetError` if there is none."""
        if self.max_memory_bytes is None:
            return
        usual = ReadStrategy.fastest()
        if any(file.is_remote for file in self.checkpoint.fingerprints.values()):
            usual = replace(usual, threads=CONNECTIONS, remote=True)
        self.strategy = strategy_within(planned, self.max_memory_bytes, usual)
        needed = peak_bytes(planned, self.strategy)
        if needed <= self.max_memory_bytes:
            return
        could = not self.options.in_place and any(item.staged_bytes for item in planned)
        raise MemoryBudgetError(
            "the load needs more memory beyond the final tensors than it was given; nothing has been changed",
            expected=f"at most {self.max_memory_bytes} bytes",
            found=f"{needed} bytes, at the least",
            remedy=f"max_memory_bytes={needed}" + (", or in_place=True, which needs no second copy" if could else ""),
        )


def stage_unleased(checkpoint: Checkpoint, planned: Iterable[Planned], in_use: str) -> None:
    """Has values staged that are planned to be read at the commit, where it is known that their files cannot be held.

    `in_use` is another reason to stage them; empty without one.
    """
    waiting = leased(planned)
    if sum(item.nbytes for item in waiting) < _LEAST_LEASED_BYTES:
        reason = "they are small"
    else:
        extents = [extent for item in waiting for extent in item.extents]
        reason = why_not_held(extents, checkpoint.fingerprints) or in_use
    for item in waiting if reason else ():
        item.stage_instead(reason)


def prefetch_range(staging: Staging, planned: Sequence[Planned]) -> list[str]:
    """Brings in what is read and not in the page cache, and does not wait. Returns remarks for the report.

    Large runs are read past the page cache, where that is possible; anything else is read ahead.
    """
    checkpoint = staging.checkpoint
    if any(file.is_remote for file in checkpoint.fingerprints.values()):
        if staging.max_memory_bytes is None:
            staging.strategy = replace(staging.strategy, threads=CONNECTIONS)
        return []
    if sum(fingerprint.nbytes for fingerprint in checkpoint.fingerprints.values()) < LEAST_BYTES:
        return []
    if are_cached(checkpoint.fingerprints):
        staging.strategy = replace(staging.strategy, cached=True)
        return []
    notes = []
    runs: list[ByteRange] = []
    others: list[ByteRange] = []
    for item in planned:
        if item.placement.mapped:
            continue
        if isinstance(item, PlainTable):
            (others if item.placement.leased else runs).extend(item.extents)
        elif item.placed or isinstance(item.stored, StoredTensor):
            is_run = item.is_run_of_bytes and item.is_read_together
            (runs if is_run and not item.placement.leased else others).extend(item.extents)
    if files := files_to_read_uncached(runs, checkpoint.fingerprints):
        strategy, budget = staging.strategy, staging.max_memory_bytes
        staging.strategy = uncached_strategy(planned, strategy, budget, files)
    uncached = staging.strategy.uncached
    if past := sum(extent.nbytes for extent in runs if extent.path in uncached):
        notes.append(f"the file was not in the page cache: {size(past)} of it are read past it")
    others += [extent for extent in runs if extent.path not in uncached]
    if asked := read_ahead(others, checkpoint.fingerprints):
        notes.append(f"the file was not in the page cache: {size(asked)} of it are read ahead")
    return notes


def prefault_async(staging: Staging, planned: Iterable[Planned]) -> list[str]:
    """Brings in the mapped pages that are not in the page cache, and does not wait. Returns remarks for the report."""
    shown = _shown(planned)
    if staging.strategy.cached or sum(extent.nbytes for extent, _ in shown) < LEAST_BYTES:
        return []
    shown, rest = _that_fits(shown)
    prefetch.prefault_async(shown)
    return ["the file was not in the page cache: its map is brought in, while the program goes on" + rest]


def bring_in(planned: Iterable[Planned], progress: Callable[[int], None]) -> list[str]:
    """Brings in the mapped pages, and waits for them. Returns remarks for the report. Raises `ReadFailedError`."""
    shown, left = _that_fits(_shown(planned))
    prefault(shown, progress)
    return [f"the map is brought in{left}"] if left else []


def _shown(planned: Iterable[Planned]) -> list[Shown]:
    """The mapped tensors, with the bytes of their files."""
    shown: list[Shown] = []
    for item in planned:
        if item.placement.mapped and isinstance(item, PlainTable):
            values = zip(item.params, item.final or item.params, strict=True)
            # A slot that has its memory has exchanged it with the value.
            mapped = [value if param.is_meta else param for param, value in values]
            shown += zip(item.sources, mapped, strict=True)
        elif item.placement.mapped and isinstance(item, Assignment) and isinstance(item.stored, StoredTensor):
            shown.append((item.stored.extent, item.value))
    return shown


def _that_fits(shown: Sequence[Shown]) -> tuple[list[Shown], str]:
    """The tensors that fit into half of the memory, and a remark where there are more."""
    most, fits = most_to_read(), list[Shown]()
    for extent, tensor in shown:
        if (most := most - extent.nbytes) < 0:
            return fits, ": as much of it as half of the memory holds"
        fits.append((extent, tensor))
    return fits, ""
