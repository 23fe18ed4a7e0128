"""`Staging`: how the values of a load are read, and the memory that it takes."""

from functools import partial

import msgspec
import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.io.engine import OpenFiles, ReadStrategy, read_ranges
from modelstate.io.memory import MemoryTracker
from modelstate.io.tensors import read_tensor
from modelstate.loading.replicas import SharedRead
from modelstate.planning.options import LoadOptions
from modelstate.process import cached_attribute
from modelstate.spec import Stored
from modelstate.torch_compat.dtypes import Overflows
from modelstate.transaction.slots import Addresses, slots_of


class Staging(msgspec.Struct, eq=False, dict=True):
    """How the values of a load are read: from where, with which threads and buffers, and the memory that they take."""

    checkpoint: Checkpoint
    options: LoadOptions
    model: nn.Module
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
        return OpenFiles(self.checkpoint.fingerprints)

    def read(self, stored: Stored) -> torch.Tensor:
        """Reads the values of a stored tensor into memory of their own."""
        return read_tensor(stored, partial(read_ranges, files=self.files))

    @cached_attribute
    def own_memory(self) -> Addresses:
        """The memory of the model's tensors."""
        return Addresses(slot.tensor for slot in slots_of(self.model).tensors)
