"""`Staging`: how the values of a load are read, and the memory that it takes."""

from collections.abc import Callable

import msgspec
import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.io.engine import ReadStrategy
from modelstate.io.memory import MemoryTracker
from modelstate.loading.replicas import SharedRead
from modelstate.planning.options import LoadOptions
from modelstate.process import cached_attribute
from modelstate.torch_compat.dtypes import Overflows
from modelstate.transaction.slots import Addresses, slots_of

Inspect = Callable[[torch.Tensor, torch.Tensor], None]
"""Looks at a piece of the final values of a tensor of the model, as a flat tensor. Several threads call it at the same
time."""

SMALL_BYTES = 1 << 16
"""A value with fewer bytes is not inspected by itself: the call takes longer than a later look at many such values."""


class Staging(msgspec.Struct, eq=False, dict=True):
    """How the values of a load are read: from where, with which threads and buffers, and the memory that they take."""

    checkpoint: Checkpoint
    options: LoadOptions
    model: nn.Module
    strategy: ReadStrategy = msgspec.field(default_factory=ReadStrategy.fastest)
    """The threads, buffers and files of the reads."""
    overflows: Overflows = msgspec.field(default_factory=Overflows)
    """Counts values that casts make infinite or NaN."""
    held: MemoryTracker = msgspec.field(default_factory=MemoryTracker)
    shared: list[SharedRead] = msgspec.field(default_factory=list)
    """The values that one rank reads for several."""
    inspect: Inspect | None = None
    """Called with the values that are read from a file, or copied from a tensor, to where they stay, by the threads
    that do so. Values that take another route are not inspected, nor are those of less than `SMALL_BYTES`."""

    @cached_attribute
    def own_memory(self) -> Addresses:
        """The memory of the model's tensors."""
        return Addresses(slot.tensor for slot in slots_of(self.model).tensors)
