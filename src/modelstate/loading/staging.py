"""`Staging`: how the values of a load are read, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import MemoryBudgetError
from modelstate.io.engine import OpenFiles, ReadStrategy, read_ranges
from modelstate.io.files import Opened
from modelstate.io.memory import MemoryTracker
from modelstate.io.page_cache import read_ahead
from modelstate.io.tensors import read_tensor
from modelstate.loading.collective import SharedRead
from modelstate.planning.options import LoadOptions
from modelstate.planning.transfer import Transfers, peak_bytes
from modelstate.process import cached_attribute
from modelstate.remote.location import CONNECTIONS
from modelstate.spec import Stored
from modelstate.text_format import size
from modelstate.torch_compat.dtypes import Overflows
from modelstate.transaction.slots import Addresses, slots_of


class Staging(msgspec.Struct, eq=False, dict=True):
    """How the values of a load are read: from where, with which threads and buffers, and the memory that they take."""

    checkpoint: Checkpoint
    options: LoadOptions
    model: nn.Module
    opened: dict[str, Opened] = msgspec.field(default_factory=dict)
    """Files that are open since the checkpoint was opened."""
    strategy: ReadStrategy = msgspec.field(default_factory=ReadStrategy.fastest)
    """The threads, buffers and files of the reads."""
    overflows: Overflows = msgspec.field(default_factory=Overflows)
    """Counts values that casts make infinite or NaN."""
    memory: MemoryTracker = msgspec.field(default_factory=MemoryTracker)
    shared: list[SharedRead] = msgspec.field(default_factory=list)
    """The values that one rank reads for several."""

    @cached_attribute
    def files(self) -> OpenFiles:
        """The files, which are opened once, and compared with their fingerprints when all has been read."""
        return OpenFiles(self.checkpoint.fingerprints, self.opened)

    def read(self, stored: Stored) -> torch.Tensor:
        """Reads the values of a stored tensor into memory of their own."""
        return read_tensor(stored, partial(read_ranges, files=self.files))

    @cached_attribute
    def own_memory(self) -> Addresses:
        """The memory of the model's tensors."""
        return Addresses(slot.tensor for slot in slots_of(self.model).tensors)


def limit_memory(staging: Staging, transfers: Sequence[Transfers]) -> None:
    """Chooses a read strategy that keeps to the memory budget. Raises `MemoryBudgetError` if there is none."""
    most_bytes = staging.options.max_memory_bytes
    if most_bytes is None:
        return
    usual = ReadStrategy.fastest()
    if any(file.is_remote for file in staging.checkpoint.fingerprints.values()):
        usual = replace(usual, threads=CONNECTIONS, remote=True)
    needed = 0
    for strategy in (usual, *usual.smaller()):
        staging.strategy, needed = strategy, peak_bytes(transfers, strategy)
        if needed <= most_bytes:
            return
    staged = 0 if staging.options.in_place else sum(item.staged_bytes for item in transfers)
    could = staged > 0 and needed - staged <= most_bytes
    raise MemoryBudgetError(
        "the load needs more memory beyond the final tensors than it was given; nothing has been changed",
        expected=f"at most {most_bytes} bytes",
        found=f"{needed} bytes, at the least",
        remedy=f"max_memory_bytes={needed}" + (", or in_place=True, which needs no second copy" if could else ""),
    )


def prefetch_range(staging: Staging, transfers: Sequence[Transfers]) -> list[str]:
    """Makes the kernel read what is not in the page cache, and does not wait. Returns remarks for the report."""
    fingerprints = staging.checkpoint.fingerprints
    if any(file.is_remote for file in fingerprints.values()):
        if staging.options.max_memory_bytes is None:
            staging.strategy = replace(staging.strategy, threads=CONNECTIONS)
        return []
    nbytes = read_ahead([extent for item in transfers for extent in item.extents], staging.files)
    return [f"the file was not in the page cache: {size(nbytes)} of it are read ahead"] if nbytes else []
