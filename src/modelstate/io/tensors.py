"""Reads tensors into memory of their own, for code that computes with them.

Values that are only displayed may be mapped. Values that code computes with are read instead: a file that is truncated
meanwhile is then an error, and does not end the process with SIGBUS at the first use of a map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch

from modelstate.errors import ReadFailedError
from modelstate.io.engine import Request, for_each, read_threads
from modelstate.io.memory import aligned, empty_cpu, fresh_tensors
from modelstate.spec import (
    AT_ONCE_BYTES,
    Blocks,
    ByteRange,
    Combined,
    Stored,
    StoredComposite,
    StoredTensor,
    block_elements,
    is_run,
)
from modelstate.torch_compat.plain import has_its_memory

ReadAll = Callable[..., object]
"""Executes a list of `Request`, as `read_ranges` does: on several threads, or in the caller's with `threads=1`."""


def read_tensor(stored: Stored, read_all: ReadAll) -> torch.Tensor:
    """Reads a tensor into memory of its own, without large gaps; returns a live tensor as a detached alias.

    Raises what `read_all` raises, and what combining the parts raises.
    """
    if torch.is_inference_mode_enabled():
        # A tensor that is created in inference mode cannot be trained later.
        with torch.inference_mode(False):
            return read_tensor(stored, read_all)
    if isinstance(stored, StoredTensor):
        if stored.nbytes == 0:
            return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device="cpu")
        runs = stored.runs()
        (value,) = fresh_tensors([(torch.Size(stored.shape), runs.stride, stored.dtype)])
        read_all([Request(source, value.data_ptr() + at) for source, at in runs.places()])
        return value
    if isinstance(stored, StoredComposite):
        return stored.build([read_tensor(part, read_all) for part in stored.parts])
    if isinstance(stored, Combined):
        read_whole = partial(read_tensor, read_all=read_all)
        with torch.no_grad():
            if not isinstance(stored.build, Blocks):
                return stored.build([read_whole(part) for part in stored.parts])
            result = empty_cpu(stored.shape, stored.dtype)
            compute([(stored, result)], partial(read_all, threads=1), read_whole=read_whole)
            return result
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
    return runs([StoredTensor.whole(stored.dtype_name, (count,), source)], read_all)[0]


def runs(tensors: Sequence[StoredTensor], read_all: ReadAll) -> list[torch.Tensor]:
    """Reads contiguous tensors into memory of their own, with one call of `read_all`.

    Raises what `read_all` raises.
    """
    values = fresh_tensors([(torch.Size(stored.shape), None, stored.dtype) for stored in tensors])
    read_all([Request(stored.extent, value.data_ptr()) for stored, value in zip(tensors, values, strict=True)])
    return values


def same_bytes(first: ByteRange, second: ByteRange, read_all: ReadAll) -> bool:
    """Whether two ranges of equal length hold the same bytes. Reads a piece of each at a time."""
    for start in range(0, first.nbytes, AT_ONCE_BYTES):
        count = min(AT_ONCE_BYTES, first.nbytes - start)
        pieces = [ByteRange(path, begin + start, count) for path, begin, _ in (first, second)]
        if not torch.equal(*runs([StoredTensor.whole("uint8", (count,), piece) for piece in pieces], read_all)):
            return False
    return True


def compute(
    targets: Sequence[tuple[Combined, torch.Tensor]],
    read: ReadAll,
    *,
    read_whole: Callable[[Stored], torch.Tensor],
    on_block: Callable[[], object] = lambda: None,
) -> None:
    """Computes combined tensors block by block on several threads, each with memory for one block.

    Args:
        targets: The tensors, which are computed by `Blocks`, and the contiguous memory of their results.
        read: Reads a block in the thread of its caller; threads call it at the same time.
        read_whole: Returns a part that is not a contiguous range of a file.
        on_block: Called after each block, by one thread at a time; may raise to end the computation.

    Raises:
        ReadFailedError: A part cannot be read. The memory of the results is then partly overwritten.
    """
    computed = [_ComputedTensor(stored, out, read_whole) for stored, out in targets]
    blocks = [(tensor, first) for tensor in computed for first in range(0, tensor.out.numel(), max(tensor.step, 1))]
    if not blocks:
        return
    nbytes = max(stored.thread_bytes for stored, _ in targets)

    def worker(buffer: torch.Tensor) -> Callable[[tuple[_ComputedTensor, int]], None]:
        @lru_cache(maxsize=1)
        def begun(tensor: _ComputedTensor) -> Callable[[int], None]:
            return tensor.begin(buffer, read)

        def process(item: tuple[_ComputedTensor, int]) -> None:
            tensor, first = item
            if torch.is_grad_enabled():  # in a thread of its own, for all its blocks
                torch.set_grad_enabled(False)
            begun(tensor)(first)

        return process

    # Memory that is written to must not be left half written: the buffers are there before.
    workers = [worker(empty_cpu((nbytes,), torch.uint8)) for _ in range(min(read_threads(), len(blocks)))]
    with torch.inference_mode(False), torch.no_grad():
        for_each(blocks, workers, lambda _: on_block(), with_torch=True)


class _ComputedTensor:
    """A combined tensor with the memory of its result, and the parts in memory that are not read in blocks."""

    def __init__(self, stored: Combined, out: torch.Tensor, read_whole: Callable[[Stored], torch.Tensor]) -> None:
        assert isinstance(stored.build, Blocks)
        self.build, self.out = stored.build, out.detach().view(-1)
        self.step = block_elements(stored.shape, self.build.unit)
        parts = [
            part if is_run(part) else read_whole(part).detach().cpu().resolve_conj().resolve_neg().contiguous()
            for part in stored.parts
        ]
        count = len(parts) - self.build.whole
        self._whole = parts[count:]
        self._aligned = [part if isinstance(part, StoredTensor) else part.view(-1) for part in parts[:count]]

    def begin(self, buffer: torch.Tensor, read: ReadAll) -> Callable[[int], None]:
        """Reads the parts that are needed whole; returns the function that computes the block from an element on.

        Each byte of the buffer is used for one thing: the whole parts, what the computation allocates, then the block.
        """
        build, at, requests = self.build, 0, list[Request]()

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            nonlocal at
            nbytes = math.prod(shape) * dtype.itemsize
            start, at = at, at + aligned(nbytes)
            return buffer[start : start + nbytes].view(dtype).view(tuple(shape))

        def piece(
            part: StoredTensor | torch.Tensor, first: int, end: int, memory: torch.Tensor | None = None
        ) -> torch.Tensor:
            """Returns elements of a flat part, after the next read."""
            if not isinstance(part, StoredTensor):
                return part[first:end]
            memory = allocate((end - first,), part.dtype) if memory is None else memory
            start = part.extent.start + first * part.dtype.itemsize
            requests.append(Request(ByteRange(part.extent.path, start, memory.nbytes), memory.data_ptr()))
            return memory

        whole = [
            piece(part, 0, part.numel).view(part.shape) if isinstance(part, StoredTensor) else part
            for part in (self._whole if build.pieces is None else ())
        ]
        read(requests)
        fill = build.begin(whole, allocate)
        at_block = at

        def block(first: int) -> None:
            nonlocal at
            out, at = self.out[first : first + self.step], at_block
            end = first + len(out)
            requests.clear()
            values = [
                piece(part, first, end, out if index == 0 and part.dtype == out.dtype else None)
                for index, part in enumerate(self._aligned)
            ]
            if build.pieces is not None:
                bounds = zip(self._whole, build.pieces(first, end), strict=True)
                values += [piece(part, begin, stop) for part, (begin, stop) in bounds]
            read(requests)
            fill(out, values, first)

        return block
