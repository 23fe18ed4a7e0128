"""Blocks of tensors that are spread over several ranks: each block goes to one rank, which gets all of its elements.

Digests and deltas are made of blocks of elements that lie one behind the other, wherever the rows of a rank end. So the
ranks divide the blocks among themselves. A rank takes those of its own rows as they are; of a block that several ranks
hold, one of them gets the rest from the others, a few megabytes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import msgspec
import torch

from modelstate.distributed.shards import Mesh, Part, Parts, common_range, parts_of_ranges, replicated
from modelstate.distributed.writing import ROUND_BYTES, CollectiveWriter, Piece, ShardedTensor, elements_of, unmade
from modelstate.formats.block_writer import LazyTensor
from modelstate.formats.manifest import BLOCK_BYTES, HEX


class TensorBlock(msgspec.Struct, frozen=True):
    """A block of a tensor."""

    name: str
    tensor: torch.Tensor | LazyTensor
    elements: range
    rank: int
    """The rank that gets it."""
    pieces: tuple[Piece, ...]
    """The block: as one piece that the rank has itself, or as pieces that are exchanged."""

    @property
    def nbytes(self) -> int:
        return len(self.elements) * self.tensor.itemsize

    @property
    def digests(self) -> slice:
        """The place of its digests in those of the tensor."""
        start = self.elements.start * self.tensor.itemsize // BLOCK_BYTES
        return slice(start * HEX, (start + -(-self.nbytes // BLOCK_BYTES)) * HEX)


def divided(
    tensors: Mapping[str, torch.Tensor | LazyTensor],
    meshes: Mapping[Mesh, Mesh],
    ranks: tuple[int, ...],
    elements: Callable[[int], int],
) -> list[TensorBlock]:
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
            blocks.append(TensorBlock(name, tensor, block, rank, _pieces(tensor, block, rank, parts)))
            loads[rank] += blocks[-1].nbytes
    return blocks


def _pieces(tensor: torch.Tensor | LazyTensor, block: range, rank: int, parts: Parts) -> tuple[Piece, ...]:
    row, bounds = parts.row_elements, [block.start, block.stop]
    region = next((region for region in parts.regions if rank in region.ranks), None)
    if region is None or region.width != row or not any(common_range(run, block) == block for run in region.runs(row)):
        # Whole rows, and what is before and behind them.
        first, last = -(-block.start // row) * row, block.stop // row * row
        region, bounds = None, sorted({*bounds, min(first, block.stop), max(last, block.start)})
    return tuple(
        Piece(tensor, 0, Part(start, stop, (rank,), region), rank, parts, (0, 0)) for start, stop in pairwise(bounds)
    )


def exchanged(
    blocks: Sequence[TensorBlock], writer: CollectiveWriter | None, rank: int
) -> Iterator[list[tuple[TensorBlock, torch.Tensor | LazyTensor]]]:
    """Yields the blocks of this rank with their elements, in several rounds. All ranks take part in all rounds."""
    rounds: list[list[TensorBlock]] = [[]]
    loads: dict[int, int] = {}
    for block in blocks:
        if block.pieces[0].part.region is None:
            loads[block.rank] = loads.get(block.rank, 0) + block.nbytes
            if loads[block.rank] > ROUND_BYTES:
                rounds.append([])
                loads = {block.rank: block.nbytes}
        rounds[-1].append(block)
    for of_round in rounds:
        pieces = [piece for block in of_round for piece in block.pieces if piece.part.region is None]
        received = iter([] if writer is None else writer.exchanged(pieces))
        own: list[tuple[TensorBlock, torch.Tensor | LazyTensor]] = []
        for block in (block for block in of_round if block.rank == rank):
            if block.pieces[0].part.region is None:
                octets = torch.cat([values for _, values in islice(received, len(block.pieces))])
                own.append((block, octets.view(block.tensor.dtype)))
            else:
                own.append((block, elements_of(block.pieces[0])))
        yield own


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
