"""`LocalShard`: the part of a tensor that one rank of a mesh holds.

Pure arithmetic, without a process group: what a rank of any mesh holds can be computed in any process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import Any

import msgspec
import torch

from modelstate.errors import DistributedError
from modelstate.rules.expression import Source, concatenated, region
from modelstate.spec import Box
from modelstate.text_format import short_repr
from modelstate.torch_compat.sharding import DimensionSplit, is_split, local_tensor, split_indices


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


def local_shard(
    shape: Sequence[int], placements: Sequence[object], mesh_shape: Sequence[int], coordinate: Sequence[int]
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
        >>> local_shard((8, 8), [Shard(0)], mesh_shape=(4,), coordinate=(1,)).runs
        ((range(2, 4),), (range(0, 8),))
    """
    return _local_shard(tuple(shape), tuple(placements), tuple(mesh_shape), tuple(coordinate))


@lru_cache(maxsize=4096)  # the tensors of a model have few different shapes
def _local_shard(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> LocalShard:
    splits: dict[int, list[DimensionSplit]] = {}
    for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if not is_split(placement):
            raise DistributedError(
                "the ranks hold partial sums, which no checkpoint has"
                if placement.is_partial()
                else "the layout of a DTensor is unknown",
                expected="Shard or Replicate for each dimension of the mesh",
                found=short_repr(placement),
            )
        if not -len(shape) <= placement.dim < len(shape):
            raise DistributedError(
                "a DTensor is split in a dimension that it does not have",
                expected=f"a dimension of the shape {tuple(shape)}",
                found=short_repr(placement),
            )
        splits.setdefault(placement.dim % len(shape), []).append(DimensionSplit(placement, count, index))
    return LocalShard(shape, tuple(_runs(size, tuple(splits.get(dim, ()))) for dim, size in enumerate(shape)))


@lru_cache(maxsize=4096)
def _runs(size: int, splits: tuple[DimensionSplit, ...]) -> tuple[range, ...]:
    """Returns the runs of a dimension."""
    return tuple(split_indices(size, splits)) or (range(0),) if splits else (range(size),)


@lru_cache(maxsize=64)
def _is_ascending(mesh: Any) -> bool:
    """Whether the ranks of a mesh have ascending numbers along each of its dimensions."""
    return all(bool((mesh.mesh.diff(dim=dim) > 0).all()) for dim in range(mesh.mesh.dim()))


def shard_of(tensor: torch.Tensor) -> LocalShard | None:
    """Returns the part of a DTensor that this rank holds; None where the rank is not in the mesh of the DTensor.

    Raises:
        DistributedError: A placement is `Partial` or unknown, the local tensor has another shape than its placements
            say, or the ranks of the mesh are not in ascending order.
    """
    held: Any = tensor
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
    shard = local_shard(tensor.shape, held.placements, mesh.shape, coordinate)
    if (found := tuple(local_tensor(tensor).shape)) != shard.shape:
        raise DistributedError(
            "the local tensor of a DTensor does not have the shape that its placements say",
            expected=f"{shard.shape} of {tuple(tensor.shape)}, placed {list(held.placements)}",
            found=found,
        )
    return shard
