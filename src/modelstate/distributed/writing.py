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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from modelstate.distributed.agreement import Agreement, Digest
from modelstate.distributed.connections import number_of
from modelstate.distributed.shards import Mesh, Part, Parts, common_range, parts_of, replicated, shard_of
from modelstate.errors import DistributedError
from modelstate.formats.block_writer import LazyTensor, write_blocks
from modelstate.formats.manifest import BLOCK_BYTES
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

PLANNING, CREATING, OPENING = "planning", "creating the files", "opening the files"
WRITING, FINISHING, COMMIT = "writing", "writing the headers", "the commit"
"""The phases of a save. Each ends with a vote of all ranks."""

_SHOWN = 40
"""The most characters of a value in an error."""
_LEAST = -(2**63)
"""Less than each number of a digest, and than its negative."""


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
    """A part of a tensor that one rank writes to a place in a file."""

    tensor: torch.Tensor | LazyTensor
    at: int
    """Bytes from the beginning of the file."""
    part: Part
    rank: int
    parts: Parts
    place: tuple[int, int]
    """The numbers of the file, and of the tensor in it."""

    @property
    def nbytes(self) -> int:
        return (self.part.end - self.part.start) * self.tensor.itemsize


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
        with agreement.phase(WRITING), write_errors(self._path):
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
        with self._agreement.phase(COMMIT, effect=effect), write_errors(self._path):
            files: Files = self._agreement.on_first(put)
            return files

    # The plan, which is the same on all ranks.

    def planned(
        self,
        layouts: Sequence[FileLayout],
        compared: Callable[[], Mapping[str, object]],
        on_first: Callable[[], Sequence[str]],
    ) -> tuple[dict[Mesh, Mesh], Sequence[str]]:
        """Returns the ranks that write for each mesh, and what the first rank returns in a phase."""
        agreement = self._agreement
        with agreement.phase(PLANNING, lambda: self._digests(layouts, compared)):
            meshes = self._meshes(layouts)
            every = enumerate(item for planned in layouts for item in planned.tensors)
            whole = [(number, name, self._whole(tensor)) for number, (name, tensor) in every]
            plain = [(number, name, tensor) for number, name, tensor in whole if tensor is not None]
            hashes = write_blocks(None, 0, [tensor for _, _, tensor in plain])
            values = {
                name: value for of in compared().values() if isinstance(of, Mapping) for name, value in of.items()
            }
            for (number, name, _), hashed in zip(plain, hashes, strict=True):
                values[name if name not in values else f"{name} (tensor {number})"] = hashed
        agreement.check_equal(PLANNING, values)
        with agreement.phase(CREATING), write_errors(self._path):
            found, first_meshes = agreement.on_first(lambda: (on_first(), meshes)) or ([], [])
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
        (is_different,) = agreement.maximum(PLANNING, [any(own != first for own, first in of_first.items())])
        if not is_different:
            return
        numbers: list[int] = []
        with agreement.phase(PLANNING):
            tensors = [tensor for planned in layouts for _, tensor in planned.tensors]
            for own in of_first:
                held = [tensor.local for tensor in tensors if isinstance(tensor, ShardedTensor) and tensor.mesh == own]
                number = number_of(write_blocks(None, 0, held)) if here in own[1] else 0
                # For each place in the mesh, of all ranks that have it, the largest and the smallest number.
                numbers += (sign * number if rank == here else _LEAST for rank in own[1] for sign in (1, -1))
        found = agreement.maximum(PLANNING, numbers)
        if any(high != -low for high, low in zip(found[::2], found[1::2], strict=True)):
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
        options = {name: value for name, value in compared().items() if not isinstance(value, Mapping)}
        return [
            Digest.of("the states", count(total, "tensor"), described),
            Digest.of(
                "the path, the options or the versions of modelstate",
                ", ".join([self._name, *starmap(_described, options.items()), f"modelstate {__version__}"]),
                [__version__, self._name, *options.items()],
            ),
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
            for index, (_, tensor) in enumerate(planned.tensors):
                if isinstance(tensor, ShardedTensor):
                    parts = tensor.parts_on(meshes[tensor.mesh])
                else:
                    parts = replicated(tensor.numel(), tensor.itemsize, self.ranks)
                for part in parts.parts:
                    if part.region is None:
                        nbytes = (part.end - part.start) * tensor.itemsize
                        if turn_bytes and turn_bytes + nbytes > most_bytes:
                            turn, turn_bytes = turn + 1, 0
                        turn_bytes += nbytes
                        rank = part.ranks[turn % len(part.ranks)]
                    else:
                        rank = min(part.ranks, key=loads.__getitem__)
                    piece = Piece(tensor, start + part.start * tensor.itemsize, part, rank, parts, (number, index))
                    loads[rank] += piece.nbytes
                    files[-1].append(piece)
                start += tensor.nbytes
        return files

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

    def _write(self, layouts: Sequence[FileLayout], paths: Sequence[str], files: list[list[Piece]]) -> list[Hashed]:
        """Writes the pieces of this rank, and returns their digests.

        Takes part in all exchanges, also after an error.
        """
        hashes: list[Hashed] = []
        failed: BaseException | None = None
        with self._agreement.barrier():
            for planned, path, pieces in zip(layouts, paths, files, strict=True):
                own = [piece for piece in pieces if piece.rank == self._agreement.rank]
                chunk = [(piece, elements_of(piece)) for piece in own if piece.part.region is not None]
                rounds = _rounds(pieces)
                output: Output | None = None
                with ExitStack() as opened:
                    for number in range(len(rounds) + 1):
                        if number:
                            chunk = [*self.exchanged(rounds[number - 1])]
                        try:
                            if failed is None and own:
                                if output is None:
                                    output = opened.enter_context(_opened(path))
                                    opened.enter_context(output.past_page_cache(planned.nbytes))
                                places = [piece.at for piece, _ in chunk]
                                texts = write_blocks(output, places, [elements for _, elements in chunk])
                                hashed = zip(chunk, texts, strict=True)
                                hashes += [(*piece.place, piece.at, text) for (piece, _), text in hashed]
                                if number == len(rounds):
                                    output.sync()
                        except Exception as error:
                            failed = error
                        chunk = []  # frees its memory before the next one is received
        if failed is not None:
            raise failed
        return hashes

    def exchanged(self, pieces: Sequence[Piece]) -> list[tuple[Piece, torch.Tensor]]:
        """Exchanges pieces, and returns the bytes of those that this rank writes, in their order."""
        sent: list[list[torch.Tensor]] = [[] for _ in self.ranks]
        blocks: list[list[tuple[torch.Tensor, range, list[range], int]]] = [[] for _ in self.ranks]
        position = {rank: index for index, rank in enumerate(self.ranks)}
        result: list[tuple[Piece, torch.Tensor]] = []
        here = self._agreement.rank
        for number, piece in enumerate(pieces):
            tensor = piece.tensor
            assert isinstance(tensor, ShardedTensor)
            rows, columns = piece.part.block(piece.parts.row_elements)
            target = torch.empty(0, device="cpu")
            if piece.rank == here:
                target = torch.empty(len(rows), len(columns) * tensor.itemsize, dtype=torch.uint8, device="cpu")
                result.append((piece, target.view(-1)))
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
                    place = range(overlap.start - rows.start, overlap.stop - rows.start)
                    common = [range(both.start - columns.start, both.stop - columns.start) for both in common]
                    blocks[position[sender]].append((target, place, common, tensor.itemsize))
        counts = [sum(len(place) * sum(map(len, common)) * size for _, place, common, size in own) for own in blocks]
        received = self._agreement.exchange(sent, counts)
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

    def _digests_of_all(self, layouts: Sequence[FileLayout], hashes: Sequence[Hashed]) -> list[list[str]]:
        """Sends the digests to the first rank, and returns there those of the tensors of each file; else nothing."""
        with self._agreement.barrier():
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
    with Descriptor(system.open_to_write(path, os.O_RDWR)) as descriptor:
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


def _rounds(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Groups the pieces whose rows are exchanged, so that no rank receives much in a round."""
    rounds: list[list[Piece]] = []
    loads: dict[int, int] = {}
    for piece in pieces:
        if piece.part.region is None:
            loads[piece.rank] = loads.get(piece.rank, 0) + piece.nbytes
            if not rounds or loads[piece.rank] > ROUND_BYTES:
                rounds.append([])
                loads = {piece.rank: piece.nbytes}
            rounds[-1].append(piece)
    return rounds


def elements_of(piece: Piece) -> torch.Tensor | LazyTensor:
    """Returns the elements of a piece, which this rank holds in a row."""
    tensor, part, region = piece.tensor, piece.part, piece.part.region
    assert region is not None
    count = part.end - part.start
    if not isinstance(tensor, ShardedTensor):
        assert isinstance(tensor, torch.Tensor)
        source, start = tensor, part.start
    else:
        source = tensor.local
        row, column = divmod(part.start, piece.parts.row_elements)
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
