"""Describes what a checkpoint holds without its data: where the bytes of each tensor lie, and what they mean.

Nothing here needs torch before a dtype, or a live tensor, is used: headers are read, and checkpoints inspected, without
it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias, TypeGuard

import msgspec
from msgspec.structs import replace

from modelstate.errors import DamagedFileError, OpenError
from modelstate.process import cached_attribute

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs


class ByteRange(NamedTuple):
    """A run of bytes of one file. (A named tuple, since there are very many of them, and they are dictionary keys.)"""

    path: str
    """The file."""
    start: int
    """Bytes from the beginning of the file."""
    nbytes: int
    """Length in bytes."""


Box = tuple[range, ...]
"""A region of a tensor: for each dimension the indices, with a step of 1."""

GAP_BYTES = 4 << 10
"""The largest gap that is read with the bytes around it: reading one page too much is cheaper than another read."""


def box_of(shape: Sequence[int], slices: Sequence[slice]) -> Box:
    """Returns the region that slices select in a tensor of this shape, by the rules of Python for bounds.

    A dimension without a slice is selected whole. The step of each slice is 1.
    """
    bounds = [index.indices(size) for size, index in zip(shape, slices, strict=False)]
    selected = [range(start, max(start, stop)) for start, stop, _ in bounds]
    return (*selected, *map(range, shape[len(slices) :]))


def slices_of(box: Box) -> tuple[slice, ...]:
    """Returns the slices that select a region."""
    return tuple(slice(indices.start, indices.stop) for indices in box)


def moved(box: Box, origin: Sequence[int]) -> Box:
    """Returns a region with its indices counted from another origin."""
    return tuple(range(indices.start - start, indices.stop - start) for indices, start in zip(box, origin, strict=True))


class StoredTensor(msgspec.Struct, frozen=True):
    """A strided tensor as a file describes it: a view of a storage.

    Created by `view`, which checks that the elements lie within the storage, and by `whole`. So every `StoredTensor` is
    safe to map.
    """

    dtype_name: str
    """The name that torch has for the dtype: "float32". Reading a header needs no torch."""
    shape: tuple[int, ...]
    storage: ByteRange
    """The whole storage, which several tensors may share."""
    extent: ByteRange
    """The bytes of the file from the first element to the end of the last; empty for an empty tensor."""
    nbytes: int
    """The number of elements times their size: the size of a contiguous copy."""
    is_contiguous: bool = True
    """Whether the elements lie in the file in their logical order, without gaps."""
    own_stride: tuple[int, ...] | None = None
    """The stride; None for that of a contiguous tensor."""
    offset: int = 0
    """Elements from the beginning of the storage to the first element."""
    requires_grad: bool = False
    is_parameter: bool = False

    @classmethod
    def view(
        cls,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        storage: ByteRange,
        offset: int = 0,
        requires_grad: bool = False,
    ) -> StoredTensor:
        """A view of a storage.

        Args:
            dtype: The dtype.
            shape: The sizes.
            stride: The steps in elements, one for each dimension.
            storage: The bytes of the whole storage.
            offset: Elements from the beginning of the storage to the first element.
            requires_grad: Whether the tensor requires a gradient.

        Raises:
            DamagedFileError: The view leaves its storage, or the size of the tensor is impossible.
        """
        numel, last, in_order, possible = 1, 0, True, len(shape) == len(stride) and offset >= 0
        for size, step in zip(reversed(shape), reversed(stride), strict=False):
            possible = possible and size >= 0 and step >= 0
            in_order = in_order and (size == 1 or step == numel)
            last += (size - 1) * step
            numel *= size
        nbytes, start = numel * dtype.itemsize, offset * dtype.itemsize
        extent_bytes = (last + 1) * dtype.itemsize if nbytes else 0
        if not possible or max(nbytes, extent_bytes) >= 2**63:
            raise DamagedFileError(
                "a tensor has an impossible layout",
                where=storage.path,
                expected="as many strides as dimensions, none of the numbers negative, and fewer than 2**63 bytes",
                found=f"shape {shape}, stride {stride}, offset {offset} of {dtype}",
            )
        if extent_bytes and start + extent_bytes > storage.nbytes:
            raise DamagedFileError(
                "a tensor leaves its storage",
                where=storage.path,
                expected=f"an end within {storage.nbytes} bytes",
                found=f"shape {shape}, stride {stride} from element {offset} of {dtype}",
            )
        is_whole = not start and extent_bytes == storage.nbytes
        return cls(
            str(dtype).removeprefix("torch."),
            shape,
            storage,
            storage if is_whole else ByteRange(storage.path, storage.start + start, extent_bytes),
            nbytes,
            is_contiguous=in_order or nbytes == 0,
            own_stride=None if stride == contiguous_stride(shape) else stride,
            offset=offset,
            requires_grad=requires_grad,
        )

    @classmethod
    def whole(cls, dtype_name: str, shape: tuple[int, ...], storage: ByteRange) -> StoredTensor:
        """A contiguous tensor that fills a storage. The caller guarantees that it does; nothing is checked."""
        return cls(dtype_name, shape, storage, storage, storage.nbytes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype, which needs torch."""
        if (dtype := DTYPES.get(self.dtype_name)) is None:
            import torch

            dtype = DTYPES[self.dtype_name] = getattr(torch, self.dtype_name)
        return dtype

    @property
    def stride(self) -> tuple[int, ...]:
        """In elements, one for each dimension; a contiguous tensor has the stride that torch gives it."""
        return contiguous_stride(self.shape) if self.own_stride is None else self.own_stride

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def read_bytes(self) -> int:
        """The bytes that are read for the values: small gaps between elements are read with them."""
        return self.nbytes if self.is_contiguous else self.runs().nbytes

    def region(self, slices: Sequence[slice]) -> StoredTensor:
        """Returns a region of the tensor as a view of the same storage.

        Args:
            slices: a slice with a step of 1 for each dimension; later dimensions without a slice are whole.
        """
        box = box_of(self.shape, slices)
        shape = tuple(map(len, box))
        if shape == self.shape:
            return self
        first = sum(indices.start * step for indices, step in zip(box, self.stride, strict=True)) if all(shape) else 0
        return StoredTensor.view(self.dtype, shape, self.stride, self.storage, self.offset + first)

    def runs(self) -> Runs:
        """Returns the runs of bytes that are read for the values."""
        itemsize = self.dtype.itemsize
        whole = Runs(self.extent, self.extent.nbytes, (), self.stride)
        if self.is_contiguous:
            return whole
        run, span, stride, dims = 1, 1, list(self.stride), list[tuple[int, int, int]]()
        for step, size, dim in sorted(zip(self.stride, self.shape, range(len(self.shape)), strict=True)):
            if size == 1 or step == 0:
                continue
            if step < span:
                return whole  # elements overlap
            span += (size - 1) * step
            if not dims and (step - run) * itemsize <= GAP_BYTES:
                run = span
            else:
                stride[dim] = run * math.prod(count for count, _, _ in dims)
                dims.append((size, step * itemsize, stride[dim] * itemsize))
        return Runs(self.extent, run * itemsize, tuple(reversed(dims)), tuple(stride))


class Runs(msgspec.Struct, frozen=True):
    """The reads of a strided tensor: runs of bytes of equal length, in a file and in memory."""

    extent: ByteRange
    """Of the tensor in the file. The first run begins where it does."""
    run_bytes: int
    dims: tuple[tuple[int, int, int], ...]
    """Count, step in the file and step in memory, in bytes, of each dimension that the runs are repeated in, the
    outermost first."""
    stride: tuple[int, ...]
    """The stride, in elements, of the tensor in memory."""
    first: int = 0
    """Bytes from the beginning of the memory to the first run."""

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.run_bytes * math.prod(count for count, _, _ in self.dims)

    def places(self, dims: int | None = None) -> Iterator[tuple[ByteRange, int]]:
        """Yields the first run of each index of the first dimensions, or of all, and where it goes in memory."""
        path, start, _ = self.extent
        outer = self.dims[:dims]
        for index in product(*(range(count) for count, _, _ in outer)):
            offsets = list(zip(index, outer, strict=True))
            at = start + sum(i * file_step for i, (_, file_step, _) in offsets)
            yield ByteRange(path, at, self.run_bytes), self.first + sum(i * step for i, (_, _, step) in offsets)


def is_run(stored: object) -> TypeGuard[StoredTensor]:
    """Whether a tensor is stored as one run of bytes: its elements in their order, and at least one."""
    return isinstance(stored, StoredTensor) and stored.is_contiguous and stored.nbytes > 0


DTYPES: dict[str, torch.dtype] = {}
"""The dtypes of torch by their names, as far as they have been looked up."""


class Assemble(msgspec.Struct, frozen=True):
    """Builds a tensor from chunks. Each chunk is a region of the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    """The region of each chunk. All together they cover the tensor."""

    def __call__(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for box, chunk in zip(self.boxes, chunks, strict=True):
            whole[slices_of(box)].copy_(chunk)
        return whole


class StoredComposite(msgspec.Struct, frozen=True, eq=False):
    """A tensor that consists of others: a sparse layout, a wrapper subclass."""

    kind: str
    """The type for messages: "sparse_coo", "torchao.dtypes.AffineQuantizedTensor", ..."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredTensor | StoredComposite | Combined, ...]
    """Of a tensor in chunks, each is a `StoredTensor`."""
    build: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """Creates the tensor from its parts, in their order; it is no parameter and requires no gradient. Runs only code
    that was allowed when the file was opened."""
    is_parameter: bool = False
    requires_grad: bool = False
    part_names: tuple[str, ...] = ()
    """What each part is, such as "qdata" and "scale"; empty where the file does not say."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def region(self, slices: Sequence[slice]) -> StoredComposite | None:
        """Returns a region of a tensor that is stored in chunks, which reads the chunks in it; None for other kinds."""
        if not isinstance(self.build, Assemble):
            return None
        wanted = box_of(self.shape, slices)
        parts, boxes = [], []
        for part, box in zip(self.parts, self.build.boxes, strict=True):
            common = tuple(
                range(max(chunk.start, indices.start), min(chunk.stop, indices.stop))
                for chunk, indices in zip(box, wanted, strict=True)
            )
            if all(common):
                assert isinstance(part, StoredTensor)
                starts = [chunk.start for chunk in box]
                parts.append(part.region(slices_of(moved(common, starts))))
                boxes.append(moved(common, [indices.start for indices in wanted]))
        shape = tuple(map(len, wanted))
        return StoredComposite(self.kind, self.dtype, shape, tuple(parts), Assemble(shape, self.dtype, tuple(boxes)))


Allocate: TypeAlias = "Callable[[Sequence[int], torch.dtype], torch.Tensor]"
"""Returns contiguous memory of a thread, with any values, for an intermediate tensor of a shape and dtype."""
FillBlock: TypeAlias = "Callable[[torch.Tensor, Sequence[torch.Tensor], int], None]"
"""Computes a block of a combined tensor, from the memory of the block, the same block of each part that is not needed
whole, and the index of the block's first element. All blocks are flat. The first part's may be that memory."""


class Blocks(msgspec.Struct, frozen=True):
    """How a combined tensor is computed block by block, into existing memory, by several threads.

    The computation cannot fail once the parts have been read.
    """

    begin: Callable[[Sequence[torch.Tensor], Allocate], FillBlock]
    """Called by each thread with the parts that are needed whole. Returns the function that computes a block."""
    whole: int = 0
    """The number of parts, the last ones, that are needed whole, or in `pieces`. The others have the shape of the
    result."""
    unit: int = 1
    """The elements of a row. A block consists of whole rows."""
    scratch_bytes: int = 0
    """What `begin` and its function allocate in each thread."""
    pieces: Callable[[int, int], Sequence[tuple[int, int]]] | None = None
    """Returns the elements of each of the last parts, from the first to before the last, that the elements of a block,
    from an index to before another, are computed from: further blocks for `FillBlock`. None for whole parts."""
    piece_bytes: int = 0
    """The most bytes of the pieces of a block."""
    starting_at: Callable[[int], Blocks] | None = None
    """Returns how a run of elements is computed that begins at an element, from the same run of the parts that are not
    needed whole. None where this is not possible."""


class Combined(msgspec.Struct, frozen=True, eq=False):
    """A strided tensor that is computed from tensors of several checkpoints, at each read."""

    kind: str
    """The type for messages: "average of 3", ..."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Stored, ...]
    build: Callable[[Sequence[torch.Tensor]], torch.Tensor] | Blocks
    """Computes the values from the parts, in their order. A function may return one of the parts, and changes none."""
    is_parameter: ClassVar[bool] = False
    requires_grad: ClassVar[bool] = False

    @property
    def is_read_in_blocks(self) -> bool:
        """Whether the values can be computed into existing memory, from blocks that are read from files."""
        in_files = all(isinstance(part, StoredTensor) and part.is_contiguous for part in self.parts)
        return isinstance(self.build, Blocks) and in_files and math.prod(self.shape) > 0

    @property
    def is_elementwise(self) -> bool:
        """Whether each element depends only on the elements at its place in the parts."""
        return isinstance(self.build, Blocks) and not self.build.whole and self.build.unit == 1

    def region(self, slices: Sequence[slice]) -> Combined | None:
        """Returns a region of the tensor, which reads a region of each part; None where it takes whole parts."""
        box, build, whole = box_of(self.shape, slices), self.build, tuple[Stored, ...]()
        if isinstance(build, Blocks) and build.starting_at is not None and box[1:] == (*map(range, self.shape[1:]),):
            whole = self.parts[len(self.parts) - build.whole :]
            build = build.starting_at(box[0].start * math.prod(self.shape[1:]) if box else 0)
        elif not (self.is_elementwise and self.parts):
            return None
        parts = []
        for part in self.parts[: len(self.parts) - len(whole)]:
            of_part = part.region(slices) if isinstance(part, Described) else part.detach()[slices_of(box)]
            if of_part is None:
                return None
            parts.append(of_part)
        return replace(self, shape=tuple(map(len, box)), parts=(*parts, *whole), build=build)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, all of which are read."""
        return sum(map(elements_bytes, self.parts))

    @property
    def thread_bytes(self) -> int:
        """Memory of each thread that computes blocks, beside the result."""
        if not isinstance(self.build, Blocks):
            return 0
        count, aligned = block_elements(self.shape, self.build.unit), len(self.parts) - self.build.whole
        into_result = aligned > 0 and self.parts[0].dtype == self.dtype  # the first part's block
        blocks = sum(count * part.dtype.itemsize for part in self.parts[into_result:aligned])
        whole = self.build.piece_bytes
        if self.build.pieces is None:
            whole = sum(math.prod(part.shape) * part.dtype.itemsize for part in self.parts[aligned:])
        return blocks + whole + self.build.scratch_bytes + _ALIGNMENT_BYTES


Described = StoredTensor | StoredComposite | Combined
"""A tensor that is not in memory: in a file, in several parts of a file, or in several checkpoints."""

if TYPE_CHECKING:
    Stored = Described | torch.Tensor
    """Where a tensor is: described, or in memory."""
else:
    Stored = Described  # for annotations only: `Described` tells the two apart


class TensorColumns(msgspec.Struct, frozen=True, dict=True):
    """Contiguous tensors in files, as the columns of a table. The reader of the files has checked them."""

    dtype_names: Sequence[str]
    """The names that torch has for the dtypes."""
    shapes: Sequence[tuple[int, ...]]
    paths: Sequence[str]
    """The files."""
    starts: Sequence[int]
    """Bytes from the beginning of the file to the first element."""
    nbytes: Sequence[int]

    def rows(self) -> Iterator[tuple[torch.dtype, tuple[int, ...], str, int, int]]:
        """Yields dtype, shape, file, first byte and number of bytes of each tensor."""
        import torch

        dtypes = {name: getattr(torch, name) for name in {*self.dtype_names}}
        names = (dtypes[name] for name in self.dtype_names)
        return zip(names, self.shapes, self.paths, self.starts, self.nbytes, strict=True)

    def ranges(self) -> list[ByteRange]:
        """Returns the range of each tensor."""
        return [*map(ByteRange, self.paths, self.starts, self.nbytes)]

    @cached_attribute
    def extents(self) -> list[ByteRange]:
        """The ranges in the order of the files, where ranges that adjoin or are equal are one."""
        found, of_path, begin, end = list[ByteRange](), "", 0, 0
        for path, start, nbytes in sorted(zip(self.paths, self.starts, self.nbytes, strict=True)):
            if path != of_path or start > end:
                if of_path:
                    found.append(ByteRange(of_path, begin, end - begin))
                of_path, begin, end = path, start, start
            if start + nbytes > end:
                end = start + nbytes
        return [*found, ByteRange(of_path, begin, end - begin)] if of_path else found

    def selected(self, rows: Sequence[int]) -> TensorColumns:
        """Returns some rows, in this order; this object itself for all rows in their order."""
        if len(rows) == len(self.nbytes) and [*rows] == [*range(len(rows))]:
            return self
        columns = (getattr(self, name) for name in TensorColumns.__struct_fields__)
        return TensorColumns(*([column[row] for row in rows] for column in columns))


class StoredTensors(Mapping[str, StoredTensor]):
    """Tensors in files by name: rows of `TensorColumns`.

    A `StoredTensor` is created when it is first accessed. To create one takes longer than to read its entry of a
    header, and a file may have tens of thousands.
    """

    def __init__(
        self, rows: dict[str, int], columns: TensorColumns, created: dict[str, StoredTensor] | None = None
    ) -> None:
        """The mapping takes over `rows`, the row of each name, and the tensors that have been created already."""
        self.rows, self.columns = rows, columns
        self._metadata: Mapping[str, object] | None = None
        """As of a state dict; see `set_version_metadata`."""
        self._created = {} if created is None else created

    @classmethod
    def of(cls, tensors: Mapping[str, Stored]) -> StoredTensors | None:
        """Tensors that a reader has created one by one, as a table.

        Names of the same bytes, such as those of tied tensors, have one row. Returns None where the tensors have no
        table: one is not contiguous, not in a file, or has attributes; or two share only a part of their bytes, or have
        the same bytes in different shapes or dtypes.
        """
        rows, firsts = dict[str, int](), list[StoredTensor]()
        row_of: dict[ByteRange, int] = {}
        for name, stored in tensors.items():
            if type(stored) is not StoredTensor or not stored.is_contiguous:
                return None
            row = row_of.setdefault(stored.extent, len(firsts)) if stored.nbytes else len(firsts)
            if row == len(firsts):
                firsts.append(stored)
            elif (firsts[row].shape, firsts[row].dtype) != (stored.shape, stored.dtype):
                return None
            rows[name] = row
        if any(a.path == b.path and b.start < a.start + a.nbytes for a, b in pairwise(sorted(row_of))):
            return None
        dtypes = [stored.dtype for stored in firsts]
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in {*dtypes}}
        paths, starts, nbytes = zip(*[stored.extent for stored in firsts], strict=True) if firsts else ((), (), ())
        columns = TensorColumns(
            [names[dtype] for dtype in dtypes], [stored.shape for stored in firsts], paths, starts, nbytes
        )
        return cls(rows, columns, dict(tensors))  # type: ignore[arg-type]  # each has been checked

    @classmethod
    def joined(cls, tables: Sequence[StoredTensors]) -> StoredTensors:
        """The tensors of several files, whose names differ."""
        rows, rows_before = dict[str, int](), 0
        for table in tables:
            rows.update((name, rows_before + row) for name, row in table.rows.items())
            rows_before += len(table.columns.starts)
        columns = (
            [value for table in tables for value in getattr(table.columns, column)]
            for column in TensorColumns.__struct_fields__
        )
        return cls(rows, TensorColumns(*columns))

    def under_names(self, names: Mapping[str, str]) -> StoredTensors:
        """Some of the tensors under other names; `names` has the name here for each new name."""
        return StoredTensors({new: self.rows[old] for new, old in names.items()}, self.columns)

    def keys(self) -> KeysView[str]:
        """The names."""
        return self.rows.keys()

    def __getitem__(self, name: str) -> StoredTensor:
        stored = self._created.get(name)
        if stored is None:
            row, columns = self.rows[name], self.columns
            stored = StoredTensor.whole(columns.dtype_names[row], columns.shapes[row], self.extent(name))
            self._created[name] = stored
        return stored

    def extent(self, name: str) -> ByteRange:
        """The bytes of the elements of a tensor; creates no `StoredTensor`."""
        row, columns = self.rows[name], self.columns
        return ByteRange(columns.paths[row], columns.starts[row], columns.nbytes[row])

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{len(self)} stored tensors>"


def under_names(tensors: Mapping[str, Stored], names: Mapping[str, str]) -> Mapping[str, Stored]:
    """Some tensors of a mapping under other names; `names` has the name in `tensors` for each new name."""
    if isinstance(tensors, StoredTensors):
        return tensors.under_names(names)
    return {new: tensors[old] for new, old in names.items()}


AT_ONCE_BYTES = 8 << 20
"""The size of the pieces in which a tensor is read or compared piece by piece."""
_BLOCK_ELEMENTS = 1 << 20
"""The elements that a thread computes at once. With smaller blocks, threads wait longer for the interpreter lock than
they gain from the cache of the processor: 196 instead of 114 ms for a merge of 400 MB with two threads."""
_ALIGNMENT_BYTES = 4096
"""What the alignment of blocks and intermediate tensors adds."""
MOST_THREADS = 8
"""The most threads that read, or compute, at once."""


def block_elements(shape: Sequence[int], unit: int) -> int:
    """The elements of a block of a combined tensor whose rows have `unit` elements."""
    return min(max(_BLOCK_ELEMENTS // unit, 1) * unit, math.prod(shape))


def own_bytes(stored: Stored) -> int:
    """The memory that reading the values takes, the intermediate buffers included."""
    if isinstance(stored, StoredTensor):
        return stored.read_bytes
    if isinstance(stored, StoredComposite):
        return sum(map(own_bytes, stored.parts))
    if not isinstance(stored, Combined):
        return 0
    result_bytes = math.prod(stored.shape) * stored.dtype.itemsize
    if not isinstance(stored.build, Blocks):
        return sum(map(own_bytes, stored.parts)) + result_bytes
    blocks = -(-math.prod(stored.shape) // max(block_elements(stored.shape, stored.build.unit), 1))
    threads = min(blocks, MOST_THREADS, os.cpu_count() or 1)
    return sum(map(_bytes_in_order, stored.parts)) + threads * stored.thread_bytes + result_bytes


def _bytes_in_order(part: Stored) -> int:
    """The memory of a part that cannot be read in blocks, and of a copy in the order of its elements."""
    if isinstance(part, StoredTensor):
        in_order = part.is_contiguous
    else:
        in_order = not isinstance(part, Described) and part.is_cpu and part.is_contiguous() and not part.is_conj()
    return 0 if in_order else own_bytes(part) + math.prod(part.shape) * part.dtype.itemsize


def pieces(stored: Stored) -> Iterator[StoredTensor | torch.Tensor]:
    """The tensors that the tensor consists of, recursively."""
    if isinstance(stored, StoredComposite | Combined):
        for part in stored.parts:
            yield from pieces(part)
    else:
        yield stored


class Encoded(msgspec.Struct, frozen=True, eq=False):
    """A value other than a tensor, as `modelstate.codec` has encoded it. It is decoded when it is first accessed."""

    tree: object
    """JSON."""
    tensors: Mapping[str, StoredTensor]
    """The tensors that the tree refers to."""
    where: str
    """The file and the name, for messages."""


class Refused:
    """An inert placeholder for a value of a pickle that is not read.

    It stands for a class or function that is not allowed, for an object of it, for a tensor of a kind that is not
    supported, or for a container within itself. It never becomes live state: `modelstate.formats.construct.refusal`
    is the error for it.
    """

    __slots__ = ("error", "held", "name")

    def __init__(self, name: str, *held: object, error: OpenError | None = None) -> None:
        self.name = name
        """Module and qualified name of the class or function, or what else is not read."""
        self.held = list(held)
        """The arguments and the state, which are not used; more refused names may be among them."""
        self.error = error
        """Why the value is not read; None for a class or function that is not allowed."""

    def __repr__(self) -> str:
        return f"<refused {self.name}>"

    @property
    def module_fields(self) -> dict[str, object] | None:
        """The attributes of the object if it is a `torch.nn.Module`; None for any other."""
        state = self.held[-1] if self.held and self.error is None else None
        if type(state) is tuple and len(state) == 2:  # the state of a class with slots
            state = state[0]
        if not isinstance(state, dict):
            return None
        is_module = all(isinstance(state.get(name), dict) for name in ("_parameters", "_buffers", "_modules"))
        return state if is_module else None


class Checksum(NamedTuple):
    """A checksum that a file stores for some of its bytes."""

    algorithm: str
    """ "crc32", or "xxh3-128"."""
    block_bytes: int
    """The size of the blocks, each with a checksum of its own; 0 for a single checksum of all bytes."""
    value: str
    """Hexadecimal; the checksums of the blocks are concatenated."""
    parts: tuple[int, ...] = ()
    """The bytes of the parts that are split into blocks one by one; empty where the whole is one part."""

    def blocks(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yields the begin and the end of each block of a storage of `nbytes` bytes."""
        start = 0
        for part in self.parts or (nbytes,):
            end = start + part
            for first in range(start, end, self.block_bytes or part):
                yield first, min(first + (self.block_bytes or part), end)
            start = end


def dtype_name(stored: Stored) -> str:
    """The name that torch has for the dtype of a tensor: "float32"."""
    return stored.dtype_name if isinstance(stored, StoredTensor) else str(stored.dtype).removeprefix("torch.")


def elements_bytes(stored: Stored) -> int:
    """The bytes of a stored tensor, or of the elements of a live one."""
    return stored.nbytes if isinstance(stored, Described) else stored.numel() * stored.itemsize


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride, in elements, that torch gives a new tensor of this shape."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The elements of memory from the first to the last one of a strided tensor; 0 for an empty tensor."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def bytes_key(stored: Stored, name: str) -> object:
    """Equal keys for tensors that are the same bytes in the same shape; `name` for a tensor without bytes."""
    if isinstance(stored, Combined):
        return stored
    if isinstance(stored, StoredTensor):
        place = stored.storage, stored.offset, stored.shape, stored.stride, stored.dtype_name
        return place if stored.nbytes else name
    if isinstance(stored, StoredComposite):
        return tuple(bytes_key(part, name) for part in stored.parts) or name
    import torch

    is_plain = type(stored) in (torch.Tensor, torch.nn.Parameter) and stored.layout is torch.strided
    if is_plain and stored.device.type != "meta" and stored.numel():
        bits = stored.data_ptr(), str(stored.device), stored.shape, stored.stride(), stored.dtype
        return (*bits, stored.is_conj(), stored.is_neg())
    return id(stored)


# Live values. As long as torch has not been imported, no value is of a class of torch.


def is_tensor(value: object) -> TypeIs[torch.Tensor]:
    """Whether a value is a `torch.Tensor`."""
    # The attribute is missing while another thread imports torch.
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_size(value: object) -> bool:
    """Whether a value is a `torch.Size`, which is a tuple, too."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Size", ()))


def is_uninitialised(value: object) -> bool:
    """Whether a value is a parameter or buffer of a lazy module, which has no shape yet."""
    if not is_tensor(value):
        return False
    from torch.nn.parameter import is_lazy

    return is_lazy(value)


def set_version_metadata(state_dict: object, versions: Mapping[str, object]) -> None:
    """Attaches the version metadata of modules to an `OrderedDict`, where torch looks for it, or to a table."""
    state_dict._metadata = versions  # type: ignore[attr-defined]


def version_metadata(state_dict: object) -> Mapping[str, object] | None:
    """The version metadata of modules that `state_dict()` or a reader attaches; None without it."""
    versions = getattr(state_dict, "_metadata", None)
    return versions if isinstance(versions, Mapping) else None
