"""Blocks of tensors that are spread over several ranks: each block goes to one rank, which gets all of its elements.

Digests and deltas are made of blocks of elements that lie one behind the other, wherever the rows of a rank end. So the
ranks divide the blocks among themselves. A rank takes those of its own rows as they are; of a block that several ranks
hold, one of them gets the rest from the others, a few megabytes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from modelstate.distributed.shards import Mesh, Parts, Region, common_range, parts_of_ranges, replicated
from modelstate.distributed.writing import CollectiveWriter, Piece, ShardedTensor, unmade
from modelstate.formats.block_writer import LazyTensor


def divided(
    tensors: Mapping[str, torch.Tensor | LazyTensor],
    meshes: Mapping[Mesh, Mesh],
    ranks: tuple[int, ...],
    elements: Callable[[int], int],
) -> list[Piece]:
    """Divides tensors into blocks, in their order.

    Of the ranks that hold elements of a block, the one with the least work gets it.

    Args:
        tensors: The tensors, the same on all ranks.
        meshes: For the mesh of each tensor the ranks that hold it.
        ranks: All ranks.
        elements: Returns the elements of a block, for elements of a size.
    """
    loads = dict.fromkeys(ranks, 0)
    blocks = []
    for name, tensor in tensors.items():
        if isinstance(tensor, ShardedTensor):
            parts = tensor.parts_on(meshes[tensor.mesh])
        else:
            parts = replicated(tensor.numel(), tensor.itemsize, ranks)
        step = elements(tensor.itemsize)
        for start in range(0, tensor.numel(), step):
            block = range(start, min(start + step, tensor.numel()))
            rows = start // parts.row_elements, -(-block.stop // parts.row_elements)
            holders = {rank for _, _, region in parts.overlapping(*rows) for rank in region.ranks} or {*ranks}
            rank = min(sorted(holders), key=loads.__getitem__)
            blocks.append(Piece(name, tensor, block, rank, parts, _region_of(block, rank, parts)))
            loads[rank] += blocks[-1].nbytes
    return blocks


def _region_of(block: range, rank: int, parts: Parts) -> Region | None:
    """Returns the region of a rank where it holds all elements of a block in a row."""
    row = parts.row_elements
    region = next((region for region in parts.regions if rank in region.ranks), None)
    if region is None or region.width != row or not any(common_range(run, block) == block for run in region.runs(row)):
        return None
    return region


@dataclass(frozen=True, slots=True, eq=False)
class BlockTensor(ShardedTensor):
    """A tensor that the ranks hold in ranges of elements, in the order of the tensor."""

    ranges: tuple[tuple[int, int], ...]
    """The rank of each range, and the number of its elements."""

    def parts_on(self, mesh: Mesh) -> Parts:
        return parts_of_ranges(self.ranges)


def block_tensor(
    local: torch.Tensor, shape: tuple[int, ...], ranges: Sequence[tuple[int, int]], writer: CollectiveWriter | None
) -> torch.Tensor | LazyTensor:
    """Returns a tensor that the ranks hold in ranges of elements.

    Args:
        local: The elements that this rank has: its ranges, one after another.
        shape: The shape of the whole tensor.
        ranges: As `BlockTensor.ranges`.
        writer: The writer of the ranks; None where this process has the whole tensor.
    """
    if writer is None:
        return local.view(shape)
    ranges = tuple((rank, count) for rank, count in ranges if count)
    nbytes, mesh = math.prod(shape) * local.itemsize, ((len(writer.ranks),), writer.ranks)
    return BlockTensor(local.dtype, shape, object(), unmade, True, 0, nbytes, local, (), mesh, writer, ranges)
