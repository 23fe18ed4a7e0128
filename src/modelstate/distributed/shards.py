"""`LocalShard`: the part of a tensor that one rank of a mesh holds; and `Parts`, in which ranks write a tensor.

Pure arithmetic, without a process group: what a rank of any mesh holds can be computed in any process.

For a write, a region is a range of rows and columns of a tensor, seen as a matrix. Where it is a few long runs of the
bytes of the tensor, the rank that holds it writes them where they belong. Short runs, as the columns of `Shard(1)` or a
bias on many ranks, are exchanged first, a few megabytes at a time, so that one rank has whole rows. So a file is
written in parts that are long and contiguous, each with digests of its own, and their number does not grow with the
number of ranks. What is the same on several ranks is one region, and one of them writes it, or each of them a share.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from modelstate.errors import DistributedError
from modelstate.formats.manifest import BLOCK_BYTES
from modelstate.spec import Box
from modelstate.text_format import short_repr
from modelstate.torch_compat.sharding import DimensionSplit, is_split, local_tensor, split_indices

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    from modelstate.rules.expression import Source


class LocalShard(msgspec.Struct, frozen=True):
    """The part of a tensor that one rank of a mesh holds."""

    global_shape: tuple[int, ...]
    """The shape of the whole tensor."""
    runs: tuple[tuple[range, ...], ...]
    """For each dimension the runs of global indices, in the order in which they lie in the local tensor. An empty shard
    has one empty run in a dimension."""

    def __str__(self) -> str:
        """The runs of each dimension, as slices: "[2:4, 0:8]", or "[0:2+4:6, 0:8]" where runs do not adjoin."""
        dims = ("+".join(f"{run.start}:{run.stop}" for run in runs) for runs in self.runs)
        return f"[{', '.join(dims)}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return tuple(sum(map(len, runs)) for runs in self.runs)

    @property
    def numel(self) -> int:
        """The number of elements of the local tensor."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds the whole tensor, in its order."""
        return all(runs == (range(size),) for runs, size in zip(self.runs, self.global_shape, strict=True))

    def has_whole_blocks(self, block_shape: Sequence[int]) -> bool:
        """Whether the rank holds whole blocks of this shape, of those that the whole tensor is divided into."""
        return all(
            run.start % step == 0 and (run.stop % step == 0 or run.stop == size)
            for runs, step, size in zip(self.runs, block_shape, self.global_shape, strict=True)
            for run in runs
        )

    def boxes(self) -> tuple[tuple[Box, Box], ...]:
        """Returns the regions of the whole tensor that the rank holds, each with its place in the local tensor."""
        return _boxes(self.runs)

    def of(self, source: Source) -> Source:
        """Returns the source of the local tensor, for a source of the whole tensor."""
        return self._joined(source, ())

    def _joined(self, source: Source, slices: tuple[slice, ...]) -> Source:
        from modelstate.rules.expression import concatenated, region  # a save needs no rules

        dim = len(slices)
        if dim == len(self.runs):
            return region(source, slices)
        parts = [self._joined(source, (*slices, slice(run.start, run.stop))) for run in self.runs[dim]]
        return concatenated(parts, dim)


@lru_cache(maxsize=4096)
def _boxes(runs: tuple[tuple[range, ...], ...]) -> tuple[tuple[Box, Box], ...]:
    placed = []
    for of_dim in runs:
        bounds = pairwise(accumulate(map(len, of_dim), initial=0))
        placed.append([(run, range(*bound)) for run, bound in zip(of_dim, bounds, strict=True)])
    return tuple((tuple(run for run, _ in dims), tuple(place for _, place in dims)) for dims in product(*placed))


@lru_cache(maxsize=4096)  # the tensors of a model have few different shapes
def local_shard(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> LocalShard:
    """Returns the part of a tensor that one rank of a mesh holds.

    Args:
        shape: The shape of the whole tensor.
        placements: The placement of the tensor for each dimension of the mesh: `Shard`, `Replicate`, and placements of
            torch that split a dimension in another order.
        mesh_shape: The number of ranks along each dimension of the mesh.
        coordinate: The position of the rank in the mesh.

    Returns:
        The shard. Torch's own code splits the dimensions.

    Raises:
        DistributedError: A placement is `Partial`, or neither splits nor replicates; or it does not fit the shape.

    Examples:
        >>> local_shard((8, 8), (Shard(0),), mesh_shape=(4,), coordinate=(1,)).runs
        ((range(2, 4),), (range(0, 8),))
    """
    splits: dict[int, list[DimensionSplit]] = {}
    for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if is_split(placement) and -len(shape) <= placement.dim < len(shape):
            splits.setdefault(placement.dim % len(shape), []).append(DimensionSplit(placement, count, index))
            continue
        problem = "the layout of a DTensor is unknown"
        if placement.is_partial():
            problem = "the ranks hold partial sums, which no checkpoint has"
        elif is_split(placement):
            problem = f"a DTensor of shape {tuple(shape)} is split in a dimension that it does not have"
        expected = "Shard or Replicate for each dimension of the mesh"
        raise DistributedError(problem, expected=expected, found=short_repr(placement))
    return LocalShard(shape, tuple(_runs(size, tuple(splits.get(dim, ()))) for dim, size in enumerate(shape)))


@lru_cache(maxsize=4096)
def _runs(size: int, splits: tuple[DimensionSplit, ...]) -> tuple[range, ...]:
    """Returns the runs of a dimension."""
    return tuple(split_indices(size, splits)) or (range(0),) if splits else (range(size),)


@lru_cache(maxsize=64)
def _is_ascending(mesh: DeviceMesh) -> bool:
    """Whether the ranks of a mesh have ascending numbers along each of its dimensions."""
    return all(bool((mesh.mesh.diff(dim=dim) > 0).all()) for dim in range(mesh.mesh.dim()))


def shard_of(tensor: torch.Tensor) -> LocalShard | None:
    """Returns the part of a DTensor that this rank holds; None where the rank is not in the mesh of the DTensor.

    Raises:
        DistributedError: A placement is `Partial` or unknown, the local tensor has another shape than its placements
            say, or the ranks of the mesh are not in ascending order.
    """
    held = cast("DTensor", tensor)
    mesh = held.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    if not _is_ascending(mesh):
        # A process group sorts its ranks, so FSDP2 and a DTensor disagree about which rank holds which part.
        raise DistributedError(
            "the mesh of a DTensor lists its ranks in another order than that of their numbers",
            expected="ascending numbers along each dimension of the mesh",
            found=mesh.mesh.tolist(),
        )
    shard = local_shard(tuple(tensor.shape), tuple(held.placements), tuple(mesh.shape), tuple(coordinate))
    if (found := tuple(local_tensor(tensor).shape)) != shard.shape:
        raise DistributedError(
            "the local tensor of a DTensor does not have the shape that its placements say",
            expected=f"{shard.shape} of {tuple(tensor.shape)}, placed {list(held.placements)}",
            found=found,
        )
    return shard


# The parts in which ranks write a tensor.

Mesh = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a mesh, and its ranks in the order of their coordinates."""


class Region(msgspec.Struct, frozen=True):
    """What some ranks hold of a tensor, which is seen as a matrix."""

    ranks: tuple[int, ...]
    rows: tuple[range, ...]
    """In the order in which they lie in the local tensor; so are the columns."""
    columns: tuple[range, ...]

    @property
    def width(self) -> int:
        """The elements of a row of the local tensor."""
        return sum(map(len, self.columns))

    def runs(self, row_elements: int) -> Iterator[range]:
        """Yields the ranges of elements of the whole tensor."""
        if self.width == row_elements:
            yield from (range(rows.start * row_elements, rows.stop * row_elements) for rows in self.rows)
        else:
            for row in (row for rows in self.rows for row in rows):
                yield from (
                    range(row * row_elements + own.start, row * row_elements + own.stop) for own in self.columns
                )


class Part(msgspec.Struct, frozen=True):
    """A range of elements of a tensor that one rank writes."""

    start: int
    end: int
    ranks: tuple[int, ...]
    """The ranks that hold it. Any of them may write it."""
    region: Region | None
    """The region that it is part of; None where it is exchanged."""


class Parts(msgspec.Struct, frozen=True, dict=True):
    """The parts of a tensor, in the order of its bytes."""

    row_elements: int
    regions: tuple[Region, ...]
    parts: tuple[Part, ...]

    @cached_property
    def rows(self) -> list[tuple[range, int, Region]]:
        """The rows of the regions by their starts, each with its first row in the local tensor."""
        rows = [
            (own, before, region)
            for region in self.regions
            for own, before in zip(region.rows, accumulate(map(len, region.rows), initial=0), strict=False)
        ]
        return sorted(rows, key=_start)

    @cached_property
    def reach(self) -> list[int]:
        """The greatest end of these rows and those before them."""
        return [*accumulate((own.stop for own, _, _ in self.rows), max)]

    def overlapping(self, first: int, end: int) -> Iterator[tuple[range, int, Region]]:
        """Yields the rows that overlap with those from `first` to before `end`. Of many ranks, few hold such rows."""
        for rows in self.rows[bisect_right(self.reach, first) : bisect_left(self.rows, end, key=_start)]:
            if rows[0].stop > first:
                yield rows

    def rectangles(self, elements: range) -> Iterator[tuple[int, range, range]]:
        """Yields the first element, the rows and the columns of whole rows, and of what is before and behind them."""
        row = self.row_elements
        first, last = -(-elements.start // row) * row, elements.stop // row * row
        bounds = {elements.start, elements.stop, min(first, elements.stop), max(last, elements.start)}
        for start, stop in pairwise(sorted(bounds)):
            rows = range(start // row, -(-stop // row))
            column = start % row
            yield start, rows, range(column, column + stop - start) if len(rows) == 1 else range(row)


@lru_cache(maxsize=4096)
def parts_of(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: Mesh, itemsize: int, least: int, most_row: int
) -> Parts:
    """Returns the parts of a tensor over a mesh. The tensors of a model have few different layouts.

    Runs of `least` bytes or more on average, and rows of more than `most_row` bytes, are not exchanged.
    """
    mesh_shape, ranks = mesh
    holders: dict[LocalShard, list[int]] = {}
    for rank, coordinate in zip(ranks, product(*map(range, mesh_shape)), strict=True):
        holders.setdefault(local_shard(shape, placements, mesh_shape, coordinate), []).append(rank)
    split = [placement.dim % len(shape) for placement in placements if is_split(placement)]
    # Rows are made of the dimensions before the last one that is split.
    dim = max([*split, 1]) if shape else 0
    row_elements, inner = math.prod(shape[dim:]), math.prod(shape[dim + 1 :])
    regions = []
    for shard, own in holders.items():
        if shard.numel:
            rows = [range(1)]
            for size, runs in zip(shape[:dim], shard.runs[:dim], strict=True):
                rows = _within(rows, size, runs)
            columns = (
                [range(run.start * inner, run.stop * inner) for run in shard.runs[dim]] if shard.runs[dim:] else []
            )
            regions.append(Region(tuple(own), tuple(rows), tuple(columns or [range(row_elements)])))
    nbytes = math.prod(shape) * itemsize
    if not nbytes:
        return Parts(row_elements, (), ())
    runs_of = [len(r.rows) if r.width == row_elements else sum(map(len, r.rows)) * len(r.columns) for r in regions]
    if sum(runs_of) == 1 or nbytes // sum(runs_of) >= least or row_elements * itemsize > most_row:
        parts = [
            Part(start, min(start + step, run.stop), region.ranks, region)
            for region in regions
            for run in region.runs(row_elements)
            for step in [_share(len(run), itemsize, len(region.ranks))]
            for start in range(run.start, run.stop, step)
        ]
        parts.sort(key=lambda part: part.start)
        return Parts(row_elements, tuple(regions), tuple(parts))
    step = max(1, max(BLOCK_BYTES, least) // (row_elements * itemsize)) * row_elements
    starts = range(0, math.prod(shape), step)
    exchanged = (Part(start, min(start + step, math.prod(shape)), ranks, None) for start in starts)
    return Parts(row_elements, tuple(regions), tuple(exchanged))


@lru_cache(maxsize=4096)
def parts_of_ranges(ranges: tuple[tuple[int, int], ...]) -> Parts:
    """Returns the parts of a tensor that several ranks have: each range is a rank and a number of elements."""
    ends = [*accumulate(count for _, count in ranges)]
    runs = [(rank, range(end - count, end)) for (rank, count), end in zip(ranges, ends, strict=True)]
    of_ranks: dict[int, list[range]] = {}
    for rank, run in runs:
        of_ranks.setdefault(rank, []).append(run)
    regions = {rank: Region((rank,), tuple(own), (range(1),)) for rank, own in of_ranks.items()}
    parts = tuple(Part(run.start, run.stop, (rank,), regions[rank]) for rank, run in runs)
    return Parts(1, tuple(regions.values()), parts)


def _start(rows: tuple[range, int, Region]) -> int:
    return rows[0].start


def common_range(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _within(rows: Sequence[range], size: int, runs: Sequence[range]) -> list[range]:
    """Returns the indices of two dimensions as those of one, for indices of the first one and runs of the second."""
    if sum(map(len, runs)) == size and len(runs) == 1:
        return [range(own.start * size, own.stop * size) for own in rows]
    found: list[range] = []
    for row in (row for own in rows for row in own):
        for run in runs:
            start, stop = row * size + run.start, row * size + run.stop
            if found and found[-1].stop == start:
                found[-1] = range(found[-1].start, stop)
            else:
                found.append(range(start, stop))
    return found


def replicated(elements: int, itemsize: int, ranks: tuple[int, ...]) -> Parts:
    """Returns the parts of a tensor that all ranks hold."""
    region = Region(ranks, (range(elements),), (range(1),))
    step = _share(elements, itemsize, len(ranks))
    starts = range(0, elements, step) if elements else ()
    return Parts(1, (region,), tuple(Part(start, min(start + step, elements), ranks, region) for start in starts))


def _share(elements: int, itemsize: int, ranks: int) -> int:
    """Returns the elements that each of several ranks writes of a run that all of them hold: whole blocks."""
    unit = BLOCK_BYTES // itemsize
    return elements if ranks == 1 else -(-elements // (ranks * unit)) * unit
