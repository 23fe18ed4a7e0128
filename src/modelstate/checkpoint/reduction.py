"""Reduces tensors block by block: what statistics and differences are computed from, in bounded memory.

An item is one tensor, or several of one shape that are compared: its operands. `reduce` reads a few megabytes of all
operands of an item at once, on several threads, and passes them on in chunks that stay in the cache of the processor.
So each byte is read once, and the memory does not depend on the sizes of the tensors.

Operands are cut into regions of rows. Those whose elements lie in their order in a file are read together with their
neighbours in the file, and those in memory of this process are not copied. The regions of all other operands (strided
views, sharded tensors, tensors that rules compute) are larger, and are read one by one.

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
from modelstate.io.engine import Request, for_each, read_ranges, read_threads
from modelstate.io.files import FileFingerprint, OpenFiles
from modelstate.io.memory import aligned, empty_cpu
from modelstate.io.page_cache import look, read_ahead
from modelstate.io.tensors import read_tensor
from modelstate.process import progress_bar
from modelstate.spec import (
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
    extent: ByteRange | None = None
    """The bytes of a file, where the elements lie in them in their order."""


class Operand(msgspec.Struct, frozen=True, eq=False):
    """A tensor whose elements are read in regions."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    region: Callable[[Sequence[slice]], Region]
    """Returns a region, which is selected by a slice for each dimension."""


def operand_of(stored: Stored, read: Callable[[Stored], torch.Tensor]) -> Operand:
    """Returns the operand for a stored tensor, or for a tensor in memory.

    Args:
        stored: The tensor. One that needs several others (a sparse one, a subclass) is read as a whole.
        read: Reads the values of a stored tensor, on one thread.
    """

    def region(slices: Sequence[slice]) -> Region:
        if isinstance(stored, torch.Tensor):
            view = stored.detach()[tuple(slices)]
            return Region(0 if is_plain_memory(view) else view.numel() * view.itemsize, partial(_in_memory, view))
        part = stored.region(slices)
        if part is None:
            return Region(own_bytes(stored), lambda: read(stored)[tuple(slices)])
        return Region(own_bytes(part), partial(read, part), part.extent if is_run(part) else None)

    return Operand(stored.dtype, tuple(stored.shape), region)


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
    check_expanded(dict(tensors), where, UnsupportedTensorError, "leave the tensor out with only=[pattern, ...]")


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
    if kind_of(stored) == "strided" or not isinstance(stored, StoredComposite | torch.Tensor):
        return {"": stored}
    parts: Mapping[str, Stored]
    if isinstance(stored, StoredComposite):
        sparse = {str(layout).removeprefix("torch."): names for layout, names in SPARSE_PARTS.items()}
        names = stored.part_names or sparse.get(stored.kind, ())
        if len(names) != len(stored.parts):
            names = tuple(f"part {index}" for index in range(len(stored.parts)))
        parts = dict(zip(names, stored.parts, strict=True))
    elif stored.layout in SPARSE_PARTS:
        tensor = stored.detach()
        tensor = tensor.coalesce() if stored.layout is torch.sparse_coo else tensor
        parts = {name: getattr(tensor, name)() for name in SPARSE_PARTS[stored.layout]}
    elif hasattr(stored, "__tensor_flatten__"):
        parts = {name: getattr(stored, name) for name in stored.__tensor_flatten__()[0]}
    else:
        return {"values": stored}
    return {
        f"{name}.{inner}".rstrip("."): tensor
        for name, part in parts.items()
        for inner, tensor in parts_of(part).items()
    }


def read_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the values that are read of a tensor: torch's own quantized tensors are dequantized."""
    return torch.float32 if dtype in QUANTIZED else dtype


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        values = tensor.resolve_conj().resolve_neg()
        return (values.dequantize() if values.is_quantized else values).cpu()


class _Piece(NamedTuple):
    item: int
    elements: int
    regions: tuple[Region, ...]
    """The same region of each operand."""

    @property
    def nbytes(self) -> int:
        """The memory that reading it takes."""
        return sum(region.nbytes for region in self.regions)

    @property
    def extents(self) -> list[ByteRange]:
        """What is read from files together with what is beside it."""
        return [region.extent for region in self.regions if region.extent is not None]


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

    @torch.inference_mode(False)
    @torch.no_grad()
    def work(buffer: torch.Tensor, job: list[_Piece]) -> None:
        requests, flat, used = list[Request](), list[list[torch.Tensor]](), 0
        for piece in job:
            flat.append([])
            for operand, region in zip(items[piece.item], piece.regions, strict=True):
                if region.extent is None:
                    flat[-1].append(region.read().reshape(-1))
                else:
                    part = buffer[used : used + region.nbytes]
                    used += aligned(region.nbytes)
                    requests.append(Request(region.extent, part.data_ptr()))
                    flat[-1].append(part.view(operand.dtype))
        read_ranges(requests, files=opened, threads=1)
        for piece, values in zip(job, flat, strict=True):
            for first in range(0, piece.elements, _CHUNK_ELEMENTS):
                fold(piece.item, tuple(each[first : first + _CHUNK_ELEMENTS] for each in values))

    def on_done(job: list[_Piece]) -> None:
        advance(sum(piece.elements * operand.dtype.itemsize for piece in job for operand in items[piece.item]))

    buffers = [empty_cpu((_BLOCK_BYTES,), torch.uint8) for _ in range(min(read_threads(), len(jobs)))]
    total_bytes = sum(math.prod(operand.shape) * operand.dtype.itemsize for operands in items for operand in operands)
    with progress_bar(progress, total_bytes, what) as advance, OpenFiles(fingerprints) as opened:
        read_ahead(look((extent for job in jobs for piece in job for extent in piece.extents), opened), opened)
        for_each(jobs, [partial(work, buffer) for buffer in buffers], on_done, with_torch=True)
        opened.check_unchanged()
    return total_bytes


def _jobs(items: Sequence[tuple[Operand, ...]]) -> list[list[_Piece]]:
    """Divides the items among jobs, in the order of the files. What a job reads together fits into a buffer."""
    with_elements = ((index, operands) for index, operands in enumerate(items) if math.prod(operands[0].shape))
    pieces = (piece for index, operands in with_elements for piece in _pieces(index, operands))
    jobs: list[list[_Piece]] = []
    used = _BLOCK_BYTES
    for piece in sorted(pieces, key=lambda piece: piece.extents[:1]):
        nbytes = sum(aligned(piece.elements * operand.dtype.itemsize) for operand in items[piece.item])
        if used + nbytes > _BLOCK_BYTES:
            jobs.append([])
            used = 0
        jobs[-1].append(piece)
        used += nbytes
    return jobs


def _pieces(index: int, operands: Sequence[Operand]) -> list[_Piece]:
    """Cuts an item into pieces; leaves it whole where regions would read much more than the whole."""
    shape, elements = operands[0].shape, math.prod(operands[0].shape)
    pieces = [_Piece(index, elements, tuple(operand.region(()) for operand in operands))]
    nbytes = pieces[0].nbytes
    is_streamed = all(region.extent is not None or not region.nbytes for region in pieces[0].regions)
    # Each operand begins at an aligned address.
    most_bytes = (_BLOCK_BYTES if is_streamed else _REGION_BYTES) - len(operands) * aligned(1)
    most_elements = most_bytes // sum(operand.dtype.itemsize for operand in operands)
    if elements > most_elements:
        whole, pieces = pieces, []
        for box in _boxes(shape, most_elements):
            regions = tuple(operand.region(slices_of(box)) for operand in operands)
            pieces.append(_Piece(index, math.prod(map(len, box)), regions))
        if sum(piece.nbytes for piece in pieces) > 2 * nbytes:
            pieces = whole
    if is_streamed:
        return pieces
    # Larger than the buffer for what is read together.
    return [piece._replace(regions=tuple(each._replace(extent=None) for each in piece.regions)) for piece in pieces]


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
