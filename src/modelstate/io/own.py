"""The values of tensors in memory of their own, for whoever looks at them while a load goes on.

What is only shown may be mapped. What is looked at is read instead: a file that somebody shortens meanwhile is an error
then, and not the end of the process, which it would be at the first use of a map.
"""

from collections.abc import Callable

import torch

from modelstate.errors import ReadFailedError
from modelstate.io.engine import Request
from modelstate.io.memory import empty_cpu
from modelstate.spec import AT_ONCE_BYTES, ByteRange, Combined, Stored, StoredComposite, StoredTensor
from modelstate.torch_compat.plain import has_its_memory

ReadAll = Callable[[list[Request]], None]


def read_tensor(stored: Stored, read_all: ReadAll) -> torch.Tensor:
    """The tensor in memory of its own, in the layout that it has in its file; a live one as a detached alias.

    Raises what `read_all` raises, and what combining raises.
    """
    if torch.is_inference_mode_enabled():
        # What is made in that mode could never be trained.
        with torch.inference_mode(False):
            return read_tensor(stored, read_all)
    if isinstance(stored, StoredTensor):
        return _strided(stored, read_all)
    if isinstance(stored, StoredComposite):
        return stored.build([read_tensor(part, read_all) for part in stored.parts])
    if isinstance(stored, Combined):
        with torch.no_grad():
            if stored.is_read_in_pieces:
                return _in_pieces(stored, read_all)
            return stored.build([read_tensor(part, read_all) for part in stored.parts])
    if _is_plain(stored) and not has_its_memory(stored):
        raise ReadFailedError(
            "the memory of a tensor has been freed",
            expected=f"{stored.nbytes} bytes",
            found=f"a storage of {stored.untyped_storage().nbytes()}",
            remedy="open the state dict before that, or a file",
        )
    return stored.detach()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def same_bytes(one: ByteRange, other: ByteRange, read_all: ReadAll) -> bool:
    """Whether two ranges hold the same bytes, with a piece of each in memory at a time."""
    if one.nbytes != other.nbytes:
        return False
    for start in range(0, one.nbytes, AT_ONCE_BYTES):
        count = min(AT_ONCE_BYTES, one.nbytes - start)
        there = [ByteRange(place.path, place.start + start, count) for place in (one, other)]
        a, b = (_strided(StoredTensor.whole(torch.uint8, (count,), (1,), place), read_all) for place in there)
        if not torch.equal(a, b):
            return False
    return True


def _strided(stored: StoredTensor, read_all: ReadAll) -> torch.Tensor:
    if stored.nbytes == 0:
        return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device="cpu")
    memory = empty_cpu((stored.extent.nbytes,), torch.uint8)
    read_all([Request(stored.extent, memory.data_ptr())])
    empty = torch.empty(0, dtype=stored.dtype, device="cpu")
    return empty.set_(memory.untyped_storage(), 0, stored.shape, stored.stride)


def _in_pieces(stored: Combined, read_all: ReadAll) -> torch.Tensor:
    """Each piece of all parts, one after the other, so that not all of all parts is in memory at a time."""
    whole = empty_cpu(stored.shape, stored.dtype)
    into = whole.view(-1)
    step = AT_ONCE_BYTES // max(part.dtype.itemsize for part in stored.parts)
    for start in range(0, into.numel(), step):
        count = min(step, into.numel() - start)
        pieces = [elements(part, start, count, read_all) for part in stored.parts if isinstance(part, StoredTensor)]
        into[start : start + count].copy_(stored.build(pieces))
    return whole


def elements(stored: StoredTensor, start: int, count: int, read_all: ReadAll) -> torch.Tensor:
    """So many elements of a contiguous tensor, in memory of their own. Raises what `read_all` raises."""
    size, extent = stored.dtype.itemsize, stored.extent
    where = ByteRange(extent.path, extent.start + start * size, count * size)
    return _strided(StoredTensor.whole(stored.dtype, (count,), (1,), where), read_all)
