"""Writes a checkpoint with all ranks: each rank writes its regions of the tensors straight into the final files.

Regions that are long runs of the bytes of a tensor are written by the ranks that hold them; rows of the others are
exchanged first, a few megabytes at a time (`modelstate.distributed.shards`).

All ranks plan the same parts, from the global shapes and placements. What is the same on several ranks (replicas, and
tensors that are no DTensors) is written once; the ranks share that work. No tensor is gathered. The digests go to the
first rank, which writes the headers.

Invariant: between two collectives of a phase no rank raises, except where a rank is lost: the others would wait.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from modelstate.distributed.agreement import COMMIT, PLANNING, Agreement, Digest
from modelstate.distributed.connections import number_of
from modelstate.distributed.shards import Mesh, Parts, Region, common_range, parts_of, replicated, shard_of
from modelstate.errors import DistributedError
from modelstate.formats.block_writer import LazyTensor, write_blocks
from modelstate.formats.manifest import BLOCK_BYTES, HEX
from modelstate.formats.safetensors import FileLayout, Written, write_header
from modelstate.formats.writing import CheckpointWriter, Files, Outputs
from modelstate.io import system
from modelstate.io.atomic import Output, write_errors
from modelstate.io.system import Descriptor
from modelstate.process import cached_attribute
from modelstate.remote.location import is_remote
from modelstate.text_format import count
from modelstate.torch_compat.plain import in_a_row, why_not_plain
from modelstate.torch_compat.private import storage_id
from modelstate.torch_compat.sharding import local_tensor
from modelstate.version import __version__

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

PART_BYTES = 1 << 20
"""A tensor whose runs are shorter than that on average is exchanged."""
MOST_PARTS = 400_000
"""About the most parts of a checkpoint, so that a manifest has room for their digests: those of a large checkpoint are
larger."""
ROUND_BYTES = 16 << 20
"""About the most bytes that a rank receives at once when rows are exchanged."""

CREATING, OPENING = "creating the files", "opening the files"
WRITING, FINISHING = "writing", "writing the headers"
"""The phases that only a save has."""

_SHOWN = 40
"""The most characters of a value in an error."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensor(LazyTensor):
    """A DTensor that all of its ranks write together. Created by `CollectiveWriter.of_shard`."""

    local: torch.Tensor
    """The local tensor."""
    placements: tuple[Placement, ...]
    mesh: Mesh
    writer: CollectiveWriter

    @property
    def parts(self) -> tuple[int, ...]:
        if not self.writer.digests_of_parts:
            return ()
        sizes = [(part.end - part.start) * self.itemsize for part in self.parts_on(self.mesh).parts]
        return tuple(sizes) if any(nbytes % BLOCK_BYTES for nbytes in sizes[:-1]) else ()

    def cast(self, dtype: torch.dtype) -> ShardedTensor:
        """Returns the tensor in another dtype."""
        return dataclasses.replace(
            self, dtype=dtype, local=self.local.to(dtype), stored_bytes=self.numel() * dtype.itemsize
        )

    def parts_on(self, mesh: Mesh) -> Parts:
        """Returns the parts, for the ranks of a mesh of the same shape."""
        return parts_of(self.shape, self.placements, mesh, self.itemsize, self.writer.least_bytes, ROUND_BYTES)


class Piece(msgspec.Struct, frozen=True):
    """A run of consecutive elements of a tensor. One rank receives all of them."""

    name: str
    """The name of the tensor."""
    tensor: torch.Tensor | LazyTensor
    elements: range
    rank: int
    parts: Parts
    region: Region | None
    """What the rank holds, if all of them are in it; None where ranks send each other what they hold."""
    place: tuple[int, int] = 0, 0
    """The numbers of the file, and of the tensor in it."""
    at: int = 0
    """Bytes from the beginning of the file."""

    @property
    def nbytes(self) -> int:
        return len(self.elements) * self.tensor.itemsize

    @property
    def digests(self) -> slice:
        """The place of its digests in those of the tensor, where it begins with a block of these."""
        start = self.elements.start * self.tensor.itemsize // BLOCK_BYTES
        return slice(start * HEX, (start + -(-self.nbytes // BLOCK_BYTES)) * HEX)


Values = torch.Tensor | LazyTensor
"""The elements of a piece."""
Hashed = tuple[int, int, int, str]
"""The number of a file, the number of a tensor in it, a place in the file, and the digest of the bytes there."""


class CollectiveWriter(CheckpointWriter):
    """Writes the files of a checkpoint with all ranks of an agreement: a `CheckpointWriter`.

    Args:
        agreement: The ranks.
        path: The target, as this rank names it. The files are created in its directory.
    """

    digests_of_parts = True
    """Whether each part of a tensor that a rank writes has digests of its own."""

    def __init__(self, agreement: Agreement, path: str) -> None:
        super().__init__()
        self._agreement, self._path = agreement, path
        # Directories may have other names on other ranks; a URL is the same on all of them.
        self._name = path if is_remote(path) else os.path.basename(path)
        self.ranks = agreement.ranks or (agreement.rank,)
        self._total_bytes = 0

    @cached_attribute
    def least_bytes(self) -> int:
        """The length from which on runs are written where they are held. Fixed when the first file is planned."""
        return max(PART_BYTES, self._total_bytes // MOST_PARTS)

    def of_shard(self, tensor: torch.Tensor) -> LazyTensor | str:
        """Returns what is written for a DTensor, or the reason why it cannot be written, for `serialize`.

        Raises:
            DistributedError: A placement is `Partial` or unknown.
        """
        shard_of(tensor)
        held = cast("DTensor", tensor)
        local = local_tensor(tensor).detach().resolve_conj().resolve_neg()
        if problem := why_not_plain(local):
            return f"a DTensor whose local tensor is {problem}"
        mesh = tuple(held.device_mesh.shape), tuple(map(int, held.device_mesh.mesh.flatten()))
        shape, placements, nbytes = tuple(tensor.shape), tuple(held.placements), tensor.numel() * tensor.itemsize
        # Ties must be the same on ranks whose local tensor is empty, where no two tensors share an address.
        key = (storage_id(local), local.storage_offset(), local.stride(), shape, placements, tensor.dtype)
        self._total_bytes += nbytes
        return ShardedTensor(tensor.dtype, shape, key, unmade, True, 0, nbytes, local, placements, mesh, writer=self)

    def planning(self) -> AbstractContextManager[None]:
        """A block before `write`, whose errors reach all ranks."""
        return self._agreement.before(PLANNING)

    def write(
        self, layouts: Sequence[FileLayout], outputs: Outputs, compared: Callable[[], Mapping[str, object]]
    ) -> Sequence[Written]:
        """Writes files, as `CheckpointWriter.write` describes.

        Raises:
            DistributedError: The ranks have different states or arguments, or do not see the same directory.
            RankLostError: A rank did not take part in time.
            WriteFailedError: An I/O error on any rank.

        No error leaves a file, but for what the first rank has created; the caller removes that.
        """
        agreement, directory = self._agreement, os.path.dirname(self._path)
        meshes, names = self.planned(layouts, compared, lambda: self._create(layouts, outputs))
        files = self._pieces(layouts, meshes)
        paths = [os.path.join(directory, name) for name in names]
        with agreement.phase(OPENING), write_errors(self._path):
            _check_visible(paths, directory, agreement.rank)
        with agreement.phase(WRITING), agreement.barrier(), write_errors(self._path):
            hashes = self._write(layouts, paths, files)
        with agreement.phase(FINISHING, decides=True), write_errors(self._path):
            written = []
            for planned, path, of_tensors in zip(layouts, paths, self._digests_of_all(layouts, hashes), strict=False):
                with _opened(path) as output:
                    written.append(write_header(output, planned, of_tensors))
                    output.sync()
            return written

    def commit(self, put: Callable[[], Files]) -> Files:
        """Returns on all ranks what `put` returns, which the first rank calls."""
        effect = f"{self._path} has the old checkpoint or the new one, in full"
        return self._agreement.decided(COMMIT, write_errors(self._path)(put), effect=effect)

    # The plan, which is the same on all ranks.

    def planned(
        self,
        layouts: Sequence[FileLayout],
        compared: Callable[[], Mapping[str, object]],
        on_first: Callable[[], Sequence[str]],
    ) -> tuple[dict[Mesh, Mesh], Sequence[str]]:
        """Returns the ranks that write for each mesh, and what the first rank returns in a phase."""
        agreement, meshes = self._agreement, self._meshes(layouts)
        with agreement.phase(PLANNING, lambda: self._digests(layouts, compared)):
            pass
        create = write_errors(self._path)(on_first)
        found, first_meshes = agreement.decided(CREATING, lambda: (create(), meshes))
        # Ranks of other replicas may have meshes of their own: those of the first rank write.
        of_first = {own: (tuple(shape), tuple(ranks)) for own, (shape, ranks) in zip(meshes, first_meshes, strict=True)}
        if any({*ranks} != {*self.ranks} for _, ranks in of_first.values()):
            self._check_replicas(layouts, of_first)
        return of_first, found

    def _whole(self, tensor: torch.Tensor | LazyTensor) -> torch.Tensor | None:
        """Returns a tensor that all ranks have as a whole: no DTensor, or one that is replicated on all of them."""
        if isinstance(tensor, ShardedTensor):
            is_replicated = tensor.placements and all(placement.is_replicate() for placement in tensor.placements)
            return tensor.local if is_replicated and {*tensor.mesh[1]} == {*self.ranks} else None
        return tensor if isinstance(tensor, torch.Tensor) else None

    def _check_replicas(self, layouts: Sequence[FileLayout], of_first: Mapping[Mesh, Mesh]) -> None:
        """Raises `DistributedError` where ranks of different meshes have other values under the same names."""
        agreement, here = self._agreement, self._agreement.rank
        is_different = any(own != first for own, first in of_first.items())
        if not any(agreement.texts(PLANNING, "other meshes" if is_different else "")):
            return
        numbers = []
        """Of each mesh its place among the meshes, that of this rank in it, and a digest of what the rank holds."""
        with agreement.phase(PLANNING):
            tensors = [tensor for planned in layouts for _, tensor in planned.tensors]
            for index, own in enumerate(of_first):
                held = [tensor.local for tensor in tensors if isinstance(tensor, ShardedTensor) and tensor.mesh == own]
                if here in own[1]:
                    numbers.append((index, own[1].index(here), number_of(write_blocks(None, 0, held))))
        of_ranks = [json.loads(text) for text in agreement.texts(PLANNING, json.dumps(numbers))]
        different = {tuple(number) for of_rank in of_ranks for number in of_rank}
        if len(different) > len({number[:2] for number in different}):
            raise DistributedError(
                "ranks of different meshes have other values of the same tensors; nothing has been changed",
                expected="the same names and values in each replica",
                remedy="give tensors that differ names of their own, or one mesh over all ranks that hold them",
            )

    def _meshes(self, layouts: Sequence[FileLayout]) -> list[Mesh]:
        tensors = (tensor for planned in layouts for _, tensor in planned.tensors)
        return list(dict.fromkeys(tensor.mesh for tensor in tensors if isinstance(tensor, ShardedTensor)))

    def _digests(self, layouts: Sequence[FileLayout], compared: Callable[[], Mapping[str, object]]) -> list[Digest]:
        meshes = self._meshes(layouts)
        described: list[object] = []
        for planned in layouts:
            described.append(planned.header_bytes)
            for name, tensor in planned.tensors:
                described += [name, tensor.dtype, tuple(tensor.shape)]
                if isinstance(tensor, ShardedTensor):
                    described += [tensor.placements, tensor.mesh[0], meshes.index(tensor.mesh)]
        total = sum(len(planned.tensors) for planned in layouts)
        options, values = dict[str, object](), dict[str, object]()
        for name, value in compared().items():
            if isinstance(value, Mapping):
                values |= value
            else:
                options[name] = value
        every = enumerate(item for planned in layouts for item in planned.tensors)
        plain = {number: (name, whole) for number, (name, each) in every if (whole := self._whole(each)) is not None}
        hashes = write_blocks(None, 0, [tensor for _, tensor in plain.values()])
        for (number, (name, _)), hashed in zip(plain.items(), hashes, strict=True):
            values[name if name not in values else f"{name} (tensor {number})"] = hashed
        return [
            Digest.of("the states", count(total, "tensor"), described),
            Digest.of(
                "the path, the options or the versions of modelstate",
                ", ".join([self._name, *starmap(_described, options.items()), f"modelstate {__version__}"]),
                [__version__, self._name, *options.items()],
            ),
            Digest.of_values(values),
        ]

    def _pieces(self, layouts: Sequence[FileLayout], meshes: dict[Mesh, Mesh]) -> list[list[Piece]]:
        """Returns the pieces of each file. Of several ranks that hold one, the one with the least work writes it.

        The ranks take turns with what is exchanged: each takes up to a block, or its share of all of it.
        """
        loads = dict.fromkeys(self.ranks, 0)
        files: list[list[Piece]] = []
        exchanged = (
            (part.end - part.start) * tensor.itemsize
            for planned in layouts
            for _, tensor in planned.tensors
            if isinstance(tensor, ShardedTensor)
            for part in tensor.parts_on(meshes[tensor.mesh]).parts
            if part.region is None
        )
        most_bytes = min(BLOCK_BYTES, -(-sum(exchanged) // len(self.ranks)))
        turn = turn_bytes = 0
        for number, planned in enumerate(layouts):
            files.append([])
            start = planned.header_bytes
            for index, (name, tensor) in enumerate(planned.tensors):
                parts = self.parts(tensor, meshes)
                for part in parts.parts:
                    nbytes = (part.end - part.start) * tensor.itemsize
                    if part.region is None:
                        if turn_bytes and turn_bytes + nbytes > most_bytes:
                            turn, turn_bytes = turn + 1, 0
                        turn_bytes += nbytes
                        rank = part.ranks[turn % len(part.ranks)]
                    else:
                        rank = min(part.ranks, key=loads.__getitem__)
                    loads[rank] += nbytes
                    elements, at = range(part.start, part.end), start + part.start * tensor.itemsize
                    piece = Piece(name, tensor, elements, rank, parts, part.region, (number, index), at)
                    files[-1].append(piece)
                start += tensor.nbytes
        return files

    def parts(self, tensor: torch.Tensor | LazyTensor, meshes: Mapping[Mesh, Mesh]) -> Parts:
        """Returns the parts of a tensor, for the ranks that write for each mesh."""
        if isinstance(tensor, ShardedTensor):
            return tensor.parts_on(meshes[tensor.mesh])
        return replicated(tensor.numel(), tensor.itemsize, self.ranks)

    # The files.

    def _create(self, layouts: Sequence[FileLayout], outputs: Outputs) -> list[str]:
        """Creates the files at their full size, so that a full disk is an error before anything is written."""
        names = []
        with closing(outputs()) as opened:
            for planned, output in zip(layouts, opened, strict=True):
                output.reserve(planned.nbytes)
                output.nbytes = planned.nbytes
                names.append(os.path.relpath(output.path, os.path.dirname(self._path)))
        return names

    def _write(
        self, layouts: Sequence[FileLayout], paths: Sequence[str], files: Sequence[Sequence[Piece]]
    ) -> list[Hashed]:
        """Writes the pieces of this rank, and returns their digests."""
        hashes: list[Hashed] = []
        for planned, path, pieces in zip(layouts, paths, files, strict=True):
            with ExitStack() as opened:
                output: Output | None = None
                for received in rounds(self._agreement, by_rank(pieces, self.ranks)):
                    if received and output is None:
                        output = opened.enter_context(_opened(path))
                        opened.enter_context(output.past_page_cache(planned.nbytes))
                    texts = write_blocks(
                        output, [piece.at for piece, _ in received], [values for _, values in received]
                    )
                    hashes += ((*piece.place, piece.at, text) for (piece, _), text in zip(received, texts, strict=True))
                    del received  # before the next one is received
                if output is not None:
                    output.sync()
        return hashes

    def _digests_of_all(self, layouts: Sequence[FileLayout], hashes: Sequence[Hashed]) -> list[list[str]]:
        """Sends the digests to the first rank, and returns there those of the tensors of each file; else nothing."""
        texts = self._agreement.texts(FINISHING, json.dumps(hashes))
        if not self._agreement.is_first:
            return []
        of_files = [[""] * len(planned.tensors) for planned in layouts]
        for file, tensor, _, hashed in sorted(item for text in texts for item in json.loads(text)):
            of_files[file][tensor] += hashed
        return of_files


@contextmanager
def _opened(path: str) -> Iterator[Output]:
    """Opens a file that is there, and closes it."""
    with Descriptor.of(system.open_to_write, path, os.O_RDWR) as descriptor:
        yield Output(descriptor, path)


def _check_visible(paths: Sequence[str], directory: str, rank: int) -> None:
    missing = [path for path in paths if not os.path.lexists(path)]
    if missing:
        raise DistributedError(
            "a rank does not see the files that the first rank has created",
            where=f"rank {rank}, {directory or '.'}",
            expected=os.path.basename(missing[0]),
            found="no such file",
            remedy="save to a directory that all ranks share, on one file system; nothing has been changed",
        )


def by_rank(pieces: Iterable[Piece], ranks: Sequence[int]) -> dict[int, list[Piece]]:
    """Returns the pieces of each rank."""
    of_ranks: dict[int, list[Piece]] = {rank: [] for rank in ranks}
    for piece in pieces:
        of_ranks[piece.rank].append(piece)
    return of_ranks


def rounds(agreement: Agreement, pieces: Mapping[int, Iterable[Piece]]) -> Iterator[list[tuple[Piece, Values]]]:
    """Yields the pieces of this rank with their elements, in several rounds. All ranks take part in all rounds.

    Of the pieces that are exchanged, a rank gets a few megabytes in a round.

    Args:
        agreement: The ranks.
        pieces: Those of each rank.
    """
    remaining = [iter(of_rank) for of_rank in pieces.values()]
    while True:
        pieces_of_round: list[Piece] = []
        for of_rank in remaining:
            nbytes = 0
            for piece in of_rank:
                pieces_of_round.append(piece)
                nbytes += piece.nbytes if piece.region is None else 0
                if nbytes + BLOCK_BYTES > ROUND_BYTES:
                    break
        if not pieces_of_round:
            return
        received = _exchanged(agreement, [piece for piece in pieces_of_round if piece.region is None])
        own = (piece for piece in pieces_of_round if piece.rank == agreement.rank)
        # Nothing of this round is left here when the next one is received.
        yield [(piece, received.pop(0) if piece.region is None else elements_of(piece)) for piece in own]


def _exchanged(agreement: Agreement, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Exchanges pieces, and returns the elements of those of this rank, in their order."""
    position = {rank: index for index, rank in enumerate(agreement.ranks or (agreement.rank,))}
    sent: list[list[torch.Tensor]] = [[] for _ in position]
    blocks: list[list[tuple[torch.Tensor, range, list[range], int]]] = [[] for _ in position]
    result: list[torch.Tensor] = []
    here = agreement.rank
    for number, piece in enumerate(pieces):
        tensor, itemsize = piece.tensor, piece.tensor.itemsize
        assert isinstance(tensor, ShardedTensor)
        memory = torch.empty(piece.nbytes if piece.rank == here else 0, dtype=torch.uint8, device="cpu")
        if piece.rank == here:
            result.append(memory.view(tensor.dtype))
        for start, rows, columns in piece.parts.rectangles(piece.elements):
            first, nbytes = (start - piece.elements.start) * itemsize, len(rows) * len(columns) * itemsize
            for own, before, region in piece.parts.overlapping(rows.start, rows.stop):
                common = [both for own_columns in region.columns if (both := common_range(own_columns, columns))]
                if not common:
                    continue
                sender = piece.rank if piece.rank in region.ranks else region.ranks[number % len(region.ranks)]
                overlap, width = common_range(own, rows), sum(map(len, common))
                if sender == here:
                    start = (before + overlap.start - own.start) * region.width
                    start += sum(len(common_range(own_columns, range(columns.start))) for own_columns in region.columns)
                    octets = in_a_row(tensor.local, start, start + len(overlap) * width).view(torch.uint8)
                    sent[position[piece.rank]].append(octets)
                if piece.rank == here:
                    target = memory[first : first + nbytes].view(len(rows), len(columns) * itemsize)
                    place = range(overlap.start - rows.start, overlap.stop - rows.start)
                    common = [range(both.start - columns.start, both.stop - columns.start) for both in common]
                    blocks[position[sender]].append((target, place, common, itemsize))
    counts = [sum(len(place) * sum(map(len, common)) * size for _, place, common, size in own) for own in blocks]
    received = agreement.exchange(sent, counts)
    at = 0
    for target, place, common, itemsize in (block for own in blocks for block in own):
        width = sum(map(len, common)) * itemsize
        block = received[at : at + len(place) * width].view(len(place), width)
        at, column = at + block.numel(), 0
        for own_columns in common:
            nbytes = len(own_columns) * itemsize
            target[place.start : place.stop, own_columns.start * itemsize : own_columns.stop * itemsize] = block[
                :, column : column + nbytes
            ]
            column += nbytes
    return result


def elements_of(piece: Piece) -> Values:
    """Returns the elements of a piece, which this rank holds in a row."""
    tensor, region, start, count = piece.tensor, piece.region, piece.elements.start, len(piece.elements)
    assert region is not None
    if not isinstance(tensor, ShardedTensor):
        assert isinstance(tensor, torch.Tensor)
        source = tensor
    else:
        source = tensor.local
        row, column = divmod(start, piece.parts.row_elements)
        start = _index(region.rows, row) * region.width + _index(region.columns, column)
    if source.is_contiguous():
        with torch.inference_mode(False), torch.no_grad():
            return source.detach().view(-1)[start : start + count]

    def make(first: int, end: int) -> torch.Tensor:
        return in_a_row(source, start + first, start + end)

    return LazyTensor(tensor.dtype, (count,), None, make, True, min(BLOCK_BYTES, piece.nbytes), piece.nbytes)


def _index(ranges: Sequence[range], index: int) -> int:
    """Returns the place of an index among ranges that lie one behind the other."""
    before = 0
    for own in ranges:
        if index in own:
            return before + index - own.start
        before += len(own)
    raise AssertionError(f"{index} is in none of {ranges}")


def unmade(first: int, end: int) -> torch.Tensor:
    raise AssertionError("a tensor of several ranks is written by CollectiveWriter")


def _described(name: str, value: object) -> str:
    """What an error says of a value that differs between ranks."""
    text = repr(value)
    return f"{name}={text}" if len(text) <= _SHOWN else f"{name} with digest {number_of([text]):x}"
