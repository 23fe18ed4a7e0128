"""Tensors that are made when their turn comes to be written, so that no more of a state is in memory than that."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from modelstate.errors import UnsavableError
from modelstate.read.digests import BLOCK_BYTES
from modelstate.read.fresh import fresh
from modelstate.read.own import ReadAll, elements, own_values
from modelstate.spec import Stored, StoredTensor, own_bytes, pieces
from modelstate.words import size

Make = Callable[[int, int], torch.Tensor]
OnCast = Callable[[torch.Tensor, torch.Tensor], object]
REPEATED_BYTES, REPEATED_TIMES = 1 << 30, 16
"""A state may take as many bytes, and as many times more than are stored of it, when each view is written in full."""


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
    storages: Mapping[object, int]
    """Bytes of the storages that it is made of, each by a key of its own."""

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def later(
    stored: Stored, key: object, read_all: ReadAll, dtype: torch.dtype | None = None, on_cast: OnCast = lambda *_: None
) -> Later:
    """A tensor of a checkpoint, cast to a dtype where one is given.

    `read_all` reads in the thread that calls it. `on_cast` is called with the values before and after each cast.
    """
    to = stored.dtype if dtype is None else dtype
    shape = tuple(stored.shape)
    if isinstance(stored, StoredTensor) and stored.is_contiguous and stored.nbytes:
        piece = min(BLOCK_BYTES, math.prod(shape) * to.itemsize)
        read = piece // to.itemsize * stored.dtype.itemsize
        taken = read + (piece if dtype else 0)
        return Later(to, shape, key, partial(_piece, stored, read_all, to, on_cast), True, taken, storages_of(stored))
    values = partial(own_values, stored, read_all)
    return whole(to, shape, key, values, own_bytes(stored), storages_of(stored), on_cast)


def whole(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    key: object,
    values: Callable[[], torch.Tensor],
    memory_bytes: int,
    storages: Mapping[object, int],
    on_cast: OnCast = lambda *_: None,
) -> Later:
    """A tensor that is made at once; `memory_bytes` is what that takes beside the result."""
    result = math.prod(shape) * dtype.itemsize
    return Later(dtype, shape, key, partial(_whole, values, dtype, on_cast), False, memory_bytes + result, storages)


def storages_of(stored: Stored | Later) -> Mapping[object, int]:
    """Bytes of the storages that the elements of a tensor lie in, each by a key of its own."""
    if isinstance(stored, StoredTensor):
        return {stored.storage: stored.storage.nbytes}
    if isinstance(stored, Later):
        return stored.storages
    found: dict[object, int] = {}
    for piece in pieces(stored):
        if isinstance(piece, StoredTensor):
            found[piece.storage] = piece.storage.nbytes
        else:
            with suppress(NotImplementedError, RuntimeError):  # of a device that has no storages to be asked
                storage = piece.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def check_repeated(tensors: Mapping[str, torch.Tensor | Later], where: str) -> None:
    """Raises `UnsavableError` where views show the bytes of their storages so often that a file would be far larger.

    A small file can describe tensors of any size: with strides of 0, or with many views of one storage.
    """
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if total <= REPEATED_BYTES:
        return
    storages: dict[object, int] = {}
    for tensor in tensors.values():
        storages |= storages_of(tensor)
    stored = sum(storages.values())
    if total > (most := REPEATED_TIMES * stored + REPEATED_BYTES):
        times = {
            name: one.numel() * one.itemsize / max(sum(storages_of(one).values()), 1) for name, one in tensors.items()
        }
        raise UnsavableError(
            "the tensors show the bytes that are stored of them so often that a file of them would be far larger",
            where=f"{where}: {max(times, key=lambda name: times[name])}",
            expected=f"at most {size(most)}: {REPEATED_TIMES} times what is stored, and {size(REPEATED_BYTES)}",
            found=f"{size(total)} of elements, and {size(stored)} stored",
            remedy="leave the tensor out, or save what it was expanded from",
        )


def _piece(
    stored: StoredTensor, read_all: ReadAll, dtype: torch.dtype, on_cast: OnCast, first: int, end: int
) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _cast(elements(stored, first, end - first, read_all), dtype, on_cast)


def _whole(
    values: Callable[[], torch.Tensor], dtype: torch.dtype, on_cast: OnCast, first: int, end: int
) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _cast(values().detach(), dtype, on_cast)


def _cast(tensor: torch.Tensor, dtype: torch.dtype, on_cast: OnCast) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    # In memory that goes back to the system, for very many are made one after the other.
    cast = fresh(tensor.shape, dtype).copy_(tensor)
    on_cast(tensor, cast)
    return cast
