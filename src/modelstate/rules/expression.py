"""Source expressions: tensors that are computed from the tensors of a checkpoint when their values are needed.

Building an expression reads no values. An operation that only selects or reorders elements of one stored tensor yields
another stored tensor. Every source has regions: `region(source, slices)` reads little more than the bytes of the slice
where the operations pass the slice on to their parts: transpositions, casts, concatenations, products with scales, and
reshapes as far as the first dimension tells. Of other results, such as that of a user's function, a region is cut from
the whole.
`read_bytes(source)` says how many bytes a source reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import msgspec
import torch

from modelstate.spec import (
    Assemble,
    Blocks,
    Box,
    Combined,
    Runs,
    Stored,
    StoredComposite,
    StoredTensor,
    box_of,
    contiguous_stride,
    moved,
    own_bytes,
    pieces,
    slices_of,
)
from modelstate.torch_compat.plain import has_its_memory, is_plain

Read = Callable[[Stored], torch.Tensor]
"""Returns the values of a stored tensor."""
OnCast = Callable[[torch.Tensor, torch.Tensor], object]
"""Called with the values before and after a step that changes the dtype of one tensor."""
Change = Callable[..., torch.Tensor]
"""Computes a tensor from others. The result may share their memory."""
Cut: TypeAlias = "Callable[[Box], Source]"
"""Returns a region of an expression."""


class Derived(msgspec.Struct, frozen=True, eq=False):
    """A tensor that is computed from other tensors when its values are needed."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Source, ...]
    change: Change
    """Called with the values of the parts."""
    is_certain: bool = True
    """Whether the computation cannot fail once the stored tensors have been read: no function of a user is called."""
    cut: Cut | None = None
    """Computes a region from regions of the parts. None where a region is cut from the whole result."""
    joined_dim: int | None = None
    """The dimension along which the parts are joined; None where the values are those that `change` returns."""

    def __post_init__(self) -> None:
        if not all(part.is_certain for part in self.parts if isinstance(part, Derived)):
            msgspec.structs.force_setattr(self, "is_certain", False)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(
            leaf.numel() * leaf.itemsize if isinstance(leaf, torch.Tensor) else leaf.nbytes for leaf in leaves(self)
        )

    @property
    def of_files(self) -> bool:
        """Whether all stored tensors are in files, so that a load cannot change them while it runs."""
        return not any(isinstance(piece, torch.Tensor) for piece in pieces_of(self))

    @property
    def scratch_bytes(self) -> int:
        """Memory that the computation needs beside its result, including the parts that are read for it."""
        if self.joined_dim is not None:
            # A part that is a concatenation itself is read into its place in the result.
            return max(
                part.scratch_bytes if isinstance(part, Derived) and part.joined_dim is not None else memory_bytes(part)
                for part in self.parts
            )
        needed = sum(map(memory_bytes, self.parts))
        return needed - self.result_bytes if self.change is unchanged or isinstance(self.change, Scaling) else needed

    @property
    def result_bytes(self) -> int:
        """Bytes of the result, when it is dense."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def read_in_blocks(self) -> Combined | None:
        """The combined tensor that this is, where its values can be computed into existing memory block by block."""
        part = self.parts[0] if self.change is unchanged else None
        return part if isinstance(part, Combined) and part.is_read_in_blocks else None


Source = Stored | Derived
"""Where the values of a tensor come from."""


def region(source: Source, slices: Sequence[slice]) -> Source:
    """Returns a region of any source: `read(region(source, slices))` equals `read(source)[slices]`.

    Args:
        source: A stored tensor, a tensor in memory, or an expression.
        slices: A slice with a step of 1 for each dimension; later dimensions without a slice are whole.

    Raises `ValueError` for too many slices, and for steps other than 1.
    """
    if isinstance(source, StoredTensor):
        return source.region(slices)
    box = box_of(source.shape, slices)
    if tuple(map(len, box)) == tuple(source.shape):
        return source
    if isinstance(source, Derived):
        return _cropped(source, box) if source.cut is None else source.cut(box)
    if isinstance(source, torch.Tensor):
        return source.detach()[slices_of(box)]
    return source.region(slices) or _cropped(source, box)


def read_bytes(source: Source) -> int:
    """Returns the bytes that are read from files for the values of a source."""
    return sum(piece.read_bytes for piece in pieces_of(source) if isinstance(piece, StoredTensor))


def leaves(source: Source) -> Iterator[Stored]:
    """Yields the stored tensors that a source is computed from."""
    if isinstance(source, Derived):
        for part in source.parts:
            yield from leaves(part)
    else:
        yield source


def pieces_of(source: Source) -> Iterator[StoredTensor | torch.Tensor]:
    """Yields the single tensors, in files or in memory, that a source is computed from."""
    for leaf in leaves(source):
        yield from pieces(leaf)


def values_of(source: Source, read: Read, on_cast: OnCast | None = None) -> torch.Tensor:
    """Computes the values of a source.

    Args:
        source: A stored tensor or an expression.
        read: Returns the values of a tensor of the checkpoint.
        on_cast: Called with the values before and after each step that changes the dtype of one tensor.
    """
    if not isinstance(source, Derived):
        return read(source)
    if source.joined_dim is not None:
        in_memory = (piece for piece in pieces_of(source) if isinstance(piece, torch.Tensor))
        first = next(in_memory, None)
        out = torch.empty(source.shape, dtype=source.dtype, device="cpu" if first is None else first.device)
        _read_into(out, source, read, on_cast)
        return out
    parts = [values_of(part, read, on_cast) for part in source.parts]
    result = source.change(*parts)
    if on_cast is not None and len(parts) == 1 and parts[0].dtype != result.dtype and parts[0].shape == result.shape:
        on_cast(parts[0], result)
    return result


def _read_into(out: torch.Tensor, source: Source, read: Read, on_cast: OnCast | None) -> None:
    """Computes values in existing memory. Of nested concatenations, one part at a time is in memory beside it."""
    if not isinstance(source, Derived) or source.joined_dim is None:
        out.copy_(values_of(source, read, on_cast))
        return
    start, dim = 0, source.joined_dim
    for part in source.parts:
        _read_into(out.narrow(dim, start, part.shape[dim]), part, read, on_cast)
        start += part.shape[dim]


def memory_bytes(source: Source) -> int:
    """Returns the memory that computing the values needs, including the values."""
    return source.result_bytes + source.scratch_bytes if isinstance(source, Derived) else own_bytes(source)


# Operations.


def unchanged(values: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor as they are, computed late."""
    return values


def to_be_computed(stored: Stored, computed: dict[Stored, Derived]) -> Source:
    """Wraps a `Combined` tensor in a `Derived`; returns any other tensor as it is.

    `computed` caches the wrappers, so that equal tensors share one.
    """
    if not isinstance(stored, Combined):
        return stored
    if stored not in computed:
        computed[stored] = _unchanged(stored, isinstance(stored.build, Blocks))
    return computed[stored]


def _unchanged(source: Source, is_certain: bool) -> Derived:
    def cut(box: Box) -> Source:
        return _unchanged(region(source, slices_of(box)), is_certain)

    return Derived(source.dtype, tuple(source.shape), (source,), unchanged, is_certain, cut)


def _cropped(source: Source, box: Box) -> Source:
    """Returns a region of a source that is computed whole, or of one that is read by region."""
    shape, slices = tuple(map(len, box)), slices_of(box)
    if shape == tuple(source.shape):
        return source
    if isinstance(source, StoredTensor | torch.Tensor):
        return region(source, slices)

    def cut(inner: Box) -> Source:
        within = tuple(outer[part.start : part.stop] for outer, part in zip(box, inner, strict=True))
        return region(source, slices_of(within))

    return Derived(source.dtype, shape, (source,), lambda values: values[slices], cut=cut)


def cast(source: Source, dtype: torch.dtype) -> Source:
    """Returns the source in another dtype."""
    if source.dtype == dtype:
        return source
    return Derived(
        dtype,
        tuple(source.shape),
        (source,),
        lambda values: values.to(dtype),
        cut=lambda box: cast(region(source, slices_of(box)), dtype),
    )


def transposed(source: Source, dim0: int, dim1: int) -> Source:
    """Returns the source with two dimensions exchanged. Raises `IndexError` as torch does."""
    if isinstance(source, torch.Tensor):
        return source.detach().transpose(dim0, dim1)
    view = meta_like(source).transpose(dim0, dim1)
    if isinstance(source, StoredTensor):
        return _view(source, view)

    def cut(box: Box) -> Source:
        swapped = list(slices_of(box))
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        return transposed(region(source, swapped), dim0, dim1)

    shape = tuple(view.shape)
    return Derived(source.dtype, shape, (source,), lambda values: values.transpose(dim0, dim1), cut=cut)


def reshaped(source: Source, shape: Sequence[int]) -> Source:
    """Returns the elements of the source, in their order, in another shape. Raises `RuntimeError` as torch does."""
    meta = meta_like(source)
    view = meta.reshape(tuple(shape))
    before, after = tuple(source.shape), tuple(view.shape)
    if before == after:
        return source
    if isinstance(source, torch.Tensor):
        with suppress(RuntimeError):  # the elements do not lie in this order
            return source.detach().view(after)
    elif isinstance(source, StoredTensor) and view._base is meta:
        return _view(source, view)
    whole = Derived(source.dtype, after, (source,), lambda values: values.reshape(after))

    def cut(box: Box) -> Source:
        """Returns a region of what the first dimensions of both shapes can be cut to; else of the whole."""
        row, source_row = math.prod(after[1:]), math.prod(before[1:])
        if not (before and row and source_row) or not box[0]:
            return _cropped(whole, box)
        first, last = box[0].start * row // source_row, -(-box[0].stop * row // source_row)
        start, rest = divmod(first * source_row, row)
        if rest or (last - first) * source_row % row:
            return _cropped(whole, box)
        rows = reshaped(region(source, [slice(first, last)]), ((last - first) * source_row // row, *after[1:]))
        return _cropped(rows, moved(box, (start, *[0] * (len(box) - 1))))

    return msgspec.structs.replace(whole, cut=cut)


def narrowed(source: Source, dim: int, start: int, size: int) -> Source:
    """Returns `size` indices of a dimension, or as many as there are."""
    slices = [slice(None)] * len(source.shape)
    slices[dim] = slice(start, start + size)
    return region(source, slices)


def concatenated(sources: Sequence[Source], dim: int) -> Source:
    """Returns sources joined along a dimension. Raises `ValueError` where their dtypes or their other sizes differ."""
    if len({source.dtype for source in sources}) != 1:
        raise ValueError("the parts have several dtypes, or there are none")
    if len(sources) == 1:
        return sources[0]
    shape = list(sources[0].shape)
    dim %= len(shape)
    if len({(*source.shape[:dim], *source.shape[dim + 1 :]) for source in sources}) > 1:
        shapes = dict.fromkeys(tuple(source.shape) for source in sources)
        raise ValueError(f"the shapes {[*map(list, shapes)][:4]} differ in more than dimension {dim}")
    shape[dim] = sum(source.shape[dim] for source in sources)

    def cut(box: Box) -> Source:
        slices, start, regions = list(slices_of(box)), 0, list[Source]()
        for source in sources:
            size = source.shape[dim]
            first, end = max(box[dim].start - start, 0), min(box[dim].stop - start, size)
            if first < end:
                slices[dim] = slice(first, end)
                regions.append(region(source, slices))
            start += size
        if not regions:
            slices[dim] = slice(0)
            return region(sources[0], slices)
        return concatenated(regions, dim)

    parts = tuple(sources)
    return Derived(sources[0].dtype, tuple(shape), parts, lambda *values: torch.cat(values, dim), True, cut, dim)


def constant(dtype: torch.dtype, shape: tuple[int, ...], value: float | complex) -> Derived:
    """Returns a tensor whose elements are all equal."""
    return Derived(dtype, shape, (), partial(torch.full, shape, value, dtype=dtype, device="cpu"))


class Scaling(msgspec.Struct, frozen=True):
    """The product of a float32 tensor, which is overwritten, and a scale for each block of its elements."""

    block: tuple[int, ...]
    """The sizes of a block."""
    offset: tuple[int, ...]
    """The place of the first element in its block."""

    def __call__(self, *values: torch.Tensor) -> torch.Tensor:
        product, scales = values
        if not product.numel():
            return product
        if all(count in (1, size) for count, size in zip(scales.shape, product.shape, strict=True)):
            return product.mul_(scales)  # each scale is for one index, or for all
        rows = max(_SCALES_AT_ONCE * len(product) // product.numel(), 1)
        for first in range(0, len(product), rows):
            part, expanded = product[first : first + rows], scales
            for dim, (size, block, offset) in enumerate(zip(part.shape, self.block, self.offset, strict=True)):
                start = offset + (first if dim == 0 else 0)
                if scales.shape[dim] > 1:
                    index = torch.arange(start, start + size, device=scales.device) // block
                    expanded = expanded.index_select(dim, index)
            part.mul_(expanded)
        return product

    def of(self, weight: Source, scales: Source) -> Derived:
        """Returns the products of a weight and its scales."""
        shape, cut = tuple(weight.shape), partial(self._cut, weight, scales)
        return Derived(torch.float32, shape, (weight, scales), self, cut=cut)

    def _cut(self, weight: Source, scales: Source, box: Box) -> Derived:
        starts = [indices.start + offset for indices, offset in zip(box, self.offset, strict=True)]
        stops = [start + len(indices) for start, indices in zip(starts, box, strict=True)]
        of_scales = [
            slice(start // block, -(-stop // block)) if count > 1 else slice(None)
            for start, stop, block, count in zip(starts, stops, self.block, scales.shape, strict=True)
        ]
        offset = tuple(start % block if block else 0 for start, block in zip(starts, self.block, strict=True))
        return Scaling(self.block, offset).of(region(weight, slices_of(box)), region(scales, of_scales))


_SCALES_AT_ONCE = 1 << 20
"""The scales of blocks are expanded for this many elements at a time."""


def is_dequantized(source: object) -> bool:
    """Whether values are products of quantized weights and scales, which are rounded to the dtype of the model."""
    if not isinstance(source, Derived):
        return False
    return isinstance(source.change, Scaling) or (bool(source.parts) and all(map(is_dequantized, source.parts)))


# Parts of files that are read into their places in the result.

_LEAST_RUN_BYTES = 64
"""Shorter runs are read together into memory of their own, and copied from there element by element."""


def placed_runs(source: Source) -> tuple[Runs, ...]:
    """Returns the reads of the stored tensors that a source consists of, into a contiguous result.

    Returns nothing for a source without elements, for one that is computed, and for one with very short runs of bytes.
    """
    found = _placed(source, 0, contiguous_stride(source.shape))
    if found is None or sum(runs.nbytes for runs in found) != math.prod(source.shape) * source.dtype.itemsize:
        return ()
    return tuple(found) if all(runs.run_bytes >= _LEAST_RUN_BYTES for runs in found) else ()


def _placed(source: Source, first: int, stride: tuple[int, ...]) -> list[Runs] | None:
    parts: list[tuple[Source, int]]
    if isinstance(source, StoredTensor):
        return [_runs_to(source, first, stride)] if source.nbytes else []
    if isinstance(source, StoredComposite) and isinstance(source.build, Assemble):
        firsts = [sum(run.start * step for run, step in zip(box, stride, strict=True)) for box in source.build.boxes]
        parts = list(zip(source.parts, firsts, strict=True))
    elif isinstance(source, Derived) and source.joined_dim is not None:
        dim = source.joined_dim
        starts = accumulate((part.shape[dim] for part in source.parts), initial=0)
        parts = [(part, start * stride[dim]) for part, start in zip(source.parts, starts, strict=False)]
    else:
        return None
    found: list[Runs] = []
    for part, at in parts:
        inner = _placed(part, first + at, stride)
        if inner is None or part.dtype != source.dtype:
            return None
        found += inner
    return found


def _runs_to(stored: StoredTensor, first: int, stride: tuple[int, ...]) -> Runs:
    """The reads of a tensor into a region of a result, which begins at an element and has a stride, in elements."""
    itemsize, run, dims = stored.dtype.itemsize, 1, list[tuple[int, int, int]]()
    for size, file_step, step in zip(*map(reversed, (stored.shape, stored.stride, stride)), strict=True):
        if not dims and (size == 1 or file_step == step == run):
            run *= size
        elif size != 1:
            dims.insert(0, (size, file_step * itemsize, step * itemsize))
    return Runs(stored.extent, run * itemsize, tuple(dims), stride, first * itemsize)


# Tensors without values.


def meta_like(source: Source) -> torch.Tensor:
    """Returns a tensor on the meta device with the shape and dtype of the source, and its strides if it has any."""
    if isinstance(source, StoredTensor):
        return torch.empty_strided(source.shape, source.stride, dtype=source.dtype, device="meta")
    if isinstance(source, torch.Tensor):
        return source.detach().to("meta")
    return torch.empty(source.shape, dtype=source.dtype, device="meta")


def _view(stored: StoredTensor, view: torch.Tensor) -> StoredTensor:
    """Returns the stored tensor that `view` shows of the meta tensor of another one."""
    offset = int(view.storage_offset()) if view.numel() else 0
    return StoredTensor.view(
        stored.dtype, tuple(view.shape), tuple(view.stride()), stored.storage, stored.offset + offset
    )


def why_not_plain(source: Source) -> str:
    """Returns why the elements of a tensor cannot be changed by rules; empty if they can."""
    if isinstance(source, StoredComposite) and (source.kind.startswith("sparse") or "." in source.kind):
        return f"it is {source.kind}, and not a plain tensor"
    if isinstance(source, torch.Tensor):
        if not is_plain(source):
            return f"it is {type(source).__name__} of layout {source.layout}, and not a plain tensor"
        if not source.is_meta and source.numel() and source.untyped_storage().nbytes() == 0:
            return "its memory has been freed"
    return ""


def lacks_values(source: Source) -> bool:
    """Whether it is, or contains, a tensor in memory without values: on the meta device, or with freed memory."""
    return any(
        isinstance(piece, torch.Tensor) and (piece.is_meta or (is_plain(piece) and not has_its_memory(piece)))
        for piece in pieces_of(source)
    )
