"""Tensors that are made when their turn comes to be written, so that no more of a state is in memory than that."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from modelstate.read.digests import BLOCK_BYTES
from modelstate.read.fresh import fresh
from modelstate.read.own import ReadAll, elements, own_values
from modelstate.spec import Stored, StoredTensor, own_bytes

Make = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """A plain tensor that has no values yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    key: object
    """Equal for those that are the same bytes: tied tensors."""
    make: Make
    """The elements from one to before another, in their order, with any shape; called by any thread. Where it is not
    made `in_pieces`, it is asked for all of them."""
    in_pieces: bool
    memory_bytes: int
    """What making a piece takes, with the piece."""

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def later(stored: Stored, key: object, read_all: ReadAll, dtype: torch.dtype | None = None) -> Later:
    """A tensor of a checkpoint, cast to a dtype where one is given.

    `read_all` reads in the thread that calls it.
    """
    to = stored.dtype if dtype is None else dtype
    shape = tuple(stored.shape)
    if isinstance(stored, StoredTensor) and stored.is_contiguous and stored.nbytes:
        piece = min(BLOCK_BYTES, math.prod(shape) * to.itemsize)
        read = piece // to.itemsize * stored.dtype.itemsize
        return Later(to, shape, key, partial(_piece, stored, read_all, to), True, read + (piece if dtype else 0))
    return whole(to, shape, key, partial(own_values, stored, read_all), own_bytes(stored))


def whole(
    dtype: torch.dtype, shape: tuple[int, ...], key: object, values: Callable[[], torch.Tensor], memory_bytes: int
) -> Later:
    """A tensor that is made at once; `memory_bytes` is what that takes beside the result."""
    result = math.prod(shape) * dtype.itemsize
    return Later(dtype, shape, key, partial(_whole, values, dtype), False, memory_bytes + result)


def _piece(stored: StoredTensor, read_all: ReadAll, dtype: torch.dtype, first: int, end: int) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _cast(elements(stored, first, end - first, read_all), dtype)


def _whole(values: Callable[[], torch.Tensor], dtype: torch.dtype, first: int, end: int) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _cast(values().detach(), dtype)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # In memory that goes back to the system, for very many are made one after the other.
    return tensor if tensor.dtype == dtype else fresh(tensor.shape, dtype).copy_(tensor)
