"""Memory for what is computed from tensors of files."""

import math
import mmap
from collections.abc import Sequence

import torch

from modelstate.spec import contiguous_stride

_LARGE_BYTES = 1 << 20


def fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous CPU tensor of zeros. A large one goes back to the system as soon as nobody has it.

    `malloc` keeps what is freed between other allocations, so a loop over large tensors could end up with all of them
    in the process's memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), contiguous_stride(shape))
