"""Reduces tensors block by block: what statistics and differences are computed from, in bounded memory.

An item is one tensor, or several of one shape that are compared: its operands. `reduce` reads a few megabytes of all
operands of an item at once, on several threads, and passes them on in chunks that stay in the cache of the processor.
So each byte is read once, and the memory does not depend on the sizes of the tensors.

Operands whose elements lie in their order in a file, or in memory of this process, are streamed. All other operands
(strided views, sharded tensors, tensors that rules compute) are read region by region.

Invariants:

- Every element of every item is folded once, together with the elements at its place in the other operands.
- No thread reads or folds any more when `reduce` returns or raises.
- A file is checked against its fingerprint before its first byte is read and after its last.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import msgspec
import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import ComparisonError, UnsupportedTensorError
from modelstate.formats.block_writer import check_expanded
from modelstate.io.engine import OpenFiles, Request, coalesce, for_each, read_batch, read_ranges, read_threads
from modelstate.io.files import FileFingerprint
from modelstate.io.memory import aligned, empty_cpu
from modelstate.io.page_cache import read_ahead
from modelstate.io.tensors import read_tensor
from modelstate.process import progress_bar
from modelstate.spec import (
    GAP_BYTES,
    Assemble,
    Box,
    ByteRange,
    Stored,
    StoredComposite,
    box_of,
    is_run,
    own_bytes,
    pieces,
    slices_of,
)
from modelstate.text_format import count, listed, printable
from modelstate.torch_compat.dtypes import QUANTIZED
from modelstate.torch_compat.plain import SPARSE_PARTS, has_its_memory, is_plain, is_plain_memory, remedies_for

_BLOCK_BYTES = 4 << 20
"""What a thread reads at once, of all operands together."""
_CHUNK_ELEMENTS = 256 << 10
"""What is folded at once. Each operation of torch lets other threads run Python: with smaller chunks, threads wait for
each other more than the cache of the processor saves."""
_REGION_BYTES = 32 << 20
"""What a thread reads at once of operands that are read region by region, of all operands together."""


class Region(NamedTuple):
    """A region of an operand, which is not read yet."""

    nbytes: int
    """The memory that reading it takes."""
    read: Callable[[], torch.Tensor]


class Operand(msgspec.Struct, frozen=True, eq=False):
    """A tensor whose elements are read in pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    region: Callable[[Sequence[slice]], Region]
    """Returns a region, which is selected by a slice for each dimension."""
    extent: ByteRange | None = None
    """The bytes of a file, where the elements lie in them in their order."""
    memory: torch.Tensor | None = None
    """The elements in their order, where they are in memory of the CPU: a tensor of one dimension."""


def operand_of(stored: Stored, read: Callable[[Stored], torch.Tensor]) -> Operand:
    """Returns the operand for a stored tensor, or for a tensor in memory.

    Args:
        stored: The tensor. One that needs several others (a sparse one, a subclass) is read as a whole.
        read: Reads the values of a stored tensor, on one thread.
    """

    def region(slices: Sequence[slice]) -> Region:
        if isinstance(stored, torch.Tensor):
            view = stored.detach()[tuple(slices)]
            return Region(view.numel() * view.itemsize, lambda: _values_in_memory(view))
        part = stored.region(slices)
        if part is not None:
            return Region(own_bytes(part), lambda: read(part))
        return Region(own_bytes(stored), lambda: read(stored)[tuple(slices)])

    extent = stored.extent if is_run(stored) else None
    memory = None
    if isinstance(stored, torch.Tensor) and is_plain_memory(stored):
        memory = stored.detach().as_strided((stored.numel(),), (1,))
    return Operand(stored.dtype, tuple(stored.shape), region, extent, memory)


def reader_of(checkpoint: Checkpoint) -> Callable[[Stored], torch.Tensor]:
    """Returns the function that reads the values of a stored tensor on one thread."""
    return partial(read_tensor, read_all=partial(read_ranges, files=checkpoint.fingerprints, threads=1))


def check_readable(tensors: Iterable[tuple[str, Stored]], *, where: str, remedy: str) -> None:
    """Checks that there are values to read, and that they are not far more than are stored.

    Args:
        tensors: The names and the tensors that are read.
        where: The source, for messages.
        remedy: What to do where tensors have no values.

    Raises:
        ComparisonError: Tensors have no values.
        UnsupportedTensorError: A tensor is an expanded view that has very many elements.
    """
    tensors = list(tensors)
    lacking = {
        name: piece
        for name, stored in tensors
        for piece in pieces(stored)
        if isinstance(piece, torch.Tensor)
        and (piece.is_meta or remedies_for([piece]) or (is_plain(piece) and not has_its_memory(piece)))
    }
    if lacking:
        raise ComparisonError(
            f"{count(len(lacking), 'tensor')} cannot be read, since there are no values",
            where=where,
            found=listed(map(printable, lacking), 4),
            remedy="; ".join(remedies_for(lacking.values())) or remedy,
            names=tuple(lacking),
        )
    what = "expanded views have far more elements than are stored, and would take too long to read"
    check_expanded(dict(tensors), where, UnsupportedTensorError, what, "leave the tensor out with only=[pattern, ...]")


def kind_of(stored: object) -> str:
    """Returns "strided" for a plain tensor, also one that is computed or stored in chunks; or its layout or class."""
    if isinstance(stored, StoredComposite):
        return "strided" if isinstance(stored.build, Assemble) else stored.kind
    if isinstance(stored, torch.Tensor) and not is_plain(stored):
        cls = type(stored)
        is_subclass = stored.layout is torch.strided
        return f"{cls.__module__}.{cls.__qualname__}" if is_subclass else str(stored.layout).removeprefix("torch.")
    return "strided"


def parts_of(stored: Stored) -> dict[str, Stored]:
    """Returns the plain tensors that a sparse tensor or a subclass consists of, by what they are: "qdata", "scale".

    The names are numbers where a file does not say what the parts are. A plain tensor is its only part, without a name.
    """
    if kind_of(stored) == "strided":
        return {"": stored}
    if isinstance(stored, StoredComposite):
        sparse = {str(layout).removeprefix("torch."): names for layout, names in SPARSE_PARTS.items()}
        names = stored.part_names or sparse.get(stored.kind, ())
        if len(names) != len(stored.parts):
            names = tuple(f"part {index}" for index in range(len(stored.parts)))
        return dict(zip(names, stored.parts, strict=True))
    assert isinstance(stored, torch.Tensor)
    if stored.layout in SPARSE_PARTS:
        tensor = stored.detach()
        tensor = tensor.coalesce() if stored.layout is torch.sparse_coo else tensor
        return {name: getattr(tensor, name)() for name in SPARSE_PARTS[stored.layout]}
    if not hasattr(stored, "__tensor_flatten__"):
        return {"values": stored}
    parts: dict[str, Stored] = {}
    for name in stored.__tensor_flatten__()[0]:
        inner = getattr(stored, name)
        parts |= {f"{name}.{part}".rstrip("."): tensor for part, tensor in parts_of(inner).items()}
    return parts


def read_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the values that are read of a tensor: torch's own quantized tensors are dequantized."""
    return torch.float32 if dtype in QUANTIZED else dtype


def _values_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        values = tensor.resolve_conj().resolve_neg()
        return (values.dequantize() if values.is_quantized else values).cpu()


class _Piece(NamedTuple):
    item: int
    first: int
    """The first element."""
    elements: int
    regions: tuple[Region, ...] = ()
    """The regions of the operands, where these are read by region."""


Fold = Callable[[int, tuple[torch.Tensor, ...]], None]
"""Called with the index of an item and elements of each operand at the same places: contiguous CPU tensors of one
dimension, whose memory is used again afterwards."""


def reduce(
    items: Sequence[tuple[Operand, ...]],
    fold: Fold,
    *,
    fingerprints: Mapping[str, FileFingerprint],
    progress: bool | None,
    what: str,
) -> int:
    """Reads all operands of all items, and folds their elements chunk by chunk.

    Args:
        items: The items. The operands of one item have the same shape.
        fold: Called with each chunk, by several threads at once and in any order, without autograd.
        fingerprints: What each file must be before the first byte is read and after the last.
        progress: Whether to show a progress bar. None shows one on a terminal after half a second.
        what: What the progress bar says that is done: "comparing".

    Returns:
        The bytes of all operands.

    Raises:
        ReadFailedError: A file cannot be read, or has changed.
    """
    jobs = _jobs(items)
    extents = [operand.extent for operands in items for operand in operands if operand.extent is not None]

    @torch.inference_mode(False)
    @torch.no_grad()
    def work(buffer: torch.Tensor, job: list[_Piece]) -> None:
        requests, flat, used = list[Request](), list[list[torch.Tensor]](), 0
        for piece in job:
            flat.append([region.read().reshape(-1) for region in piece.regions])
            for operand in () if piece.regions else items[piece.item]:
                if operand.memory is not None:
                    flat[-1].append(operand.memory[piece.first : piece.first + piece.elements])
                elif operand.extent is not None:
                    path, start, _ = operand.extent
                    itemsize = operand.dtype.itemsize
                    source = ByteRange(path, start + piece.first * itemsize, piece.elements * itemsize)
                    part = buffer[used : used + source.nbytes]
                    used += aligned(source.nbytes)
                    requests.append(Request(source, part.data_ptr()))
                    flat[-1].append(part.view(operand.dtype))
        for batch in coalesce(requests, batch_bytes=_BLOCK_BYTES, gap_bytes=GAP_BYTES):
            read_batch(opened[batch.path], batch)
        for piece, values in zip(job, flat, strict=True):
            for first in range(0, piece.elements, _CHUNK_ELEMENTS):
                fold(piece.item, tuple(each[first : first + _CHUNK_ELEMENTS] for each in values))

    def on_done(job: list[_Piece], _: float) -> None:
        advance(sum(piece.elements * operand.dtype.itemsize for piece in job for operand in items[piece.item]))

    buffers = [empty_cpu((_BLOCK_BYTES,), torch.uint8) for _ in range(min(read_threads(), len(jobs)))]
    total_bytes = sum(math.prod(operand.shape) * operand.dtype.itemsize for operands in items for operand in operands)
    with progress_bar(progress, total_bytes, what) as advance, OpenFiles(fingerprints) as opened:
        read_ahead(extents, opened)
        for_each(jobs, [partial(work, buffer) for buffer in buffers], on_done, with_torch=True)
        opened.check_unchanged()
    return total_bytes


def _jobs(items: Sequence[tuple[Operand, ...]]) -> list[list[_Piece]]:
    """Divides the items among jobs, in the order of the files. The streamed operands of a job fit into a buffer."""
    jobs: list[list[_Piece]] = []
    used = _BLOCK_BYTES

    def place(index: int) -> tuple[str, int]:
        extents = [operand.extent for operand in items[index] if operand.extent is not None]
        return (extents[0].path, extents[0].start) if extents else ("", 0)

    for index in sorted(range(len(items)), key=place):
        operands, numel = items[index], math.prod(items[index][0].shape)
        if not all(operand.extent is not None or operand.memory is not None for operand in operands):
            jobs += [[piece] for piece in _region_pieces(index, operands)] if numel else []
            used = _BLOCK_BYTES
            continue
        # Each operand begins at an aligned address, which takes at most 64 bytes more.
        slack, each = len(operands) * aligned(1), sum(operand.dtype.itemsize for operand in operands)
        step = (_BLOCK_BYTES - slack) // each
        for first in range(0, numel, step):
            count = min(step, numel - first)
            if used + slack + count * each > _BLOCK_BYTES:
                jobs.append([])
                used = 0
            jobs[-1].append(_Piece(index, first, count))
            used += slack + count * each
    return jobs


def _region_pieces(index: int, operands: Sequence[Operand]) -> list[_Piece]:
    """Returns a piece for each region of an item: for the whole, where regions read much more than that together."""
    shape, each = operands[0].shape, sum(operand.dtype.itemsize for operand in operands)
    pieces, whole = (
        [
            _Piece(index, 0, math.prod(map(len, box)), tuple(operand.region(slices_of(box)) for operand in operands))
            for box in _boxes(shape, most_elements)
        ]
        for most_elements in (_REGION_BYTES // each, math.prod(shape))
    )
    costs = [sum(region.nbytes for piece in cut for region in piece.regions) for cut in (pieces, whole)]
    return pieces if costs[0] <= 2 * costs[1] else whole


def _boxes(shape: tuple[int, ...], most_elements: int) -> Iterator[Box]:
    """Cuts a tensor into regions of at most `most_elements`, in the order of its elements."""
    dim = 0
    while dim < len(shape) and math.prod(shape[dim + 1 :]) > most_elements:
        dim += 1
    if dim >= len(shape):
        yield box_of(shape, ())
        return
    rows = max(1, most_elements // math.prod(shape[dim + 1 :]))
    for outer in product(*(range(size) for size in shape[:dim])):
        for start in range(0, shape[dim], rows):
            slices = [slice(at, at + 1) for at in outer] + [slice(start, start + rows)]
            yield box_of(shape, slices)


# For the code that folds.


def exact_sum(values: Iterable[float]) -> float:
    """Returns the sum, rounded once; NaN or infinity where it, or a value, leaves the range of float64."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # a sum that is too large, and infinity less infinity
        return math.nan


def if_finite(measure: float) -> float | None:
    """Returns a measure, or None where it has left the range of float64."""
    return measure if math.isfinite(measure) else None


_scratch = threading.local()


def scratch(slot: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns memory of this thread for some elements: new pages cost more than the arithmetic in them.

    Args:
        slot: What it is for. The memory is used again by the next call with this slot and dtype.
        count: The number of elements.
        dtype: Their dtype.
    """
    memory: dict[str, torch.Tensor] = vars(_scratch)
    key = f"{slot} {dtype}"
    if key not in memory or len(memory[key]) < count:
        memory[key] = torch.empty(count, dtype=dtype, device="cpu")
    return memory[key][:count]


def _is_convertible(dtype: torch.dtype) -> bool:
    try:
        values = torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)
        values.to(torch.complex64 if dtype.is_complex else torch.float32)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return "torch.q" not in str(dtype)


CONVERTIBLE = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and _is_convertible(dtype)
)
"""The dtypes whose values torch can convert to float32, or to complex64."""
