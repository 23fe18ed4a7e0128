"""Reads tensors into memory of their own, for code that computes with them.

Values that are only displayed may be mapped. Values that code computes with are read instead: a file that is truncated
meanwhile is then an error, and does not end the process with SIGBUS at the first use of a map.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from modelstate.errors import ReadFailedError
from modelstate.io.engine import Request, for_each, read_threads
from modelstate.io.memory import empty_cpu
from modelstate.spec import AT_ONCE_BYTES, PIECE_BYTES, ByteRange, Combined, Stored, StoredComposite, StoredTensor
from modelstate.torch_compat.plain import has_its_memory


class ReadAll(Protocol):
    """Executes read requests, with the arguments of `read_ranges`."""

    def __call__(self, requests: list[Request], *, threads: int | None = None) -> None:
        """Executes the requests with at most this many threads."""


def read_tensor(stored: Stored, read_all: ReadAll) -> torch.Tensor:
    """Reads a tensor into memory of its own, without large gaps; returns a live tensor as a detached alias.

    Raises what `read_all` raises, and what combining the parts raises.
    """
    if torch.is_inference_mode_enabled():
        # A tensor that is created in inference mode cannot be trained later.
        with torch.inference_mode(False):
            return read_tensor(stored, read_all)
    if isinstance(stored, StoredTensor):
        return _read_strided(stored, read_all)
    if isinstance(stored, StoredComposite):
        return stored.build([read_tensor(part, read_all) for part in stored.parts])
    if isinstance(stored, Combined):
        with torch.no_grad():
            if stored.is_read_in_pieces:
                return _read_in_pieces(stored, read_all)
            return stored.build([read_tensor(part, read_all) for part in stored.parts])
    is_strided = stored.layout is torch.strided and not stored.is_meta
    if type(stored) in (torch.Tensor, torch.nn.Parameter) and is_strided and not has_its_memory(stored):
        raise ReadFailedError(
            "the memory of a tensor has been freed",
            expected=f"{stored.nbytes} bytes",
            found=f"a storage of {stored.untyped_storage().nbytes()}",
            remedy="open the state dict before that, or a file",
        )
    return stored.detach()


def elements(stored: StoredTensor, start: int, count: int, read_all: ReadAll) -> torch.Tensor:
    """Reads `count` elements of a contiguous tensor, from `start` on, into memory of their own.

    Raises what `read_all` raises.
    """
    itemsize, extent = stored.dtype.itemsize, stored.extent
    source = ByteRange(extent.path, extent.start + start * itemsize, count * itemsize)
    return _read_strided(StoredTensor.whole(stored.dtype, (count,), source), read_all)


def same_bytes(first: ByteRange, second: ByteRange, read_all: ReadAll) -> bool:
    """Whether two ranges hold the same bytes. Reads a piece of each at a time."""
    if first.nbytes != second.nbytes:
        return False
    a, b = (StoredTensor.whole(torch.uint8, (extent.nbytes,), extent) for extent in (first, second))
    for start in range(0, first.nbytes, AT_ONCE_BYTES):
        count = min(AT_ONCE_BYTES, first.nbytes - start)
        if not torch.equal(elements(a, start, count, read_all), elements(b, start, count, read_all)):
            return False
    return True


def _read_strided(stored: StoredTensor, read_all: ReadAll) -> torch.Tensor:
    if stored.nbytes == 0:
        return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device="cpu")
    runs = stored.runs()
    memory = empty_cpu((runs.nbytes,), torch.uint8)
    addresses = range(memory.data_ptr(), memory.data_ptr() + runs.nbytes, runs.run_bytes)
    read_all([Request(source, address) for source, address in zip(runs, addresses, strict=True)])
    empty = torch.empty(0, dtype=stored.dtype, device="cpu")
    return empty.set_(memory.untyped_storage(), 0, stored.shape, runs.stride)


def _read_in_pieces(stored: Combined, read_all: ReadAll) -> torch.Tensor:
    """Combines the parts piece by piece on several threads, each with memory for a piece of each part.

    Pieces that stay in the cache of the processor are combined several times as fast as whole tensors.
    """
    result = empty_cpu(stored.shape, stored.dtype)
    flat = result.view(-1)
    parts = [part for part in stored.parts if isinstance(part, StoredTensor)]
    step = PIECE_BYTES // max(part.dtype.itemsize for part in parts)

    @contextmanager
    def worker() -> Iterator[Callable[[int], None]]:
        buffers = [torch.empty(min(step, flat.numel()), dtype=part.dtype, device="cpu") for part in parts]

        def compute(start: int) -> None:
            pieces = [buffer[: flat.numel() - start] for buffer in buffers]
            requests = []
            for part, piece in zip(parts, pieces, strict=True):
                path, first, _ = part.extent
                source = ByteRange(path, first + start * part.dtype.itemsize, piece.nbytes)
                requests.append(Request(source, piece.data_ptr()))
            read_all(requests, threads=1)
            with torch.no_grad():
                flat[start : start + step].copy_(stored.build(pieces))

        yield compute

    starts = range(0, flat.numel(), step)
    for_each(starts, worker, min(read_threads(), len(starts)), with_torch=True)
    return result
