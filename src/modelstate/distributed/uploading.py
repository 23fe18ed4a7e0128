"""Writes a checkpoint into a bucket with all ranks: each rank uploads objects of its own, which hold whole tensors.

An object has one writer: the providers have no common way to write one from several processes, and the parts of a
multipart upload have a least size that regions of ranks do not have. So a checkpoint has about as many objects as there
are ranks, and each object has one rank as its owner. The owner gets the rows of its tensors from the ranks that hold
them, a few megabytes at a time, and sends them on as they come: in the order of the file, hashed on the way. Each byte
is uploaded once. All ranks upload at the same time, and none of them needs the memory of a whole object.

The objects have names that no reader knows before the first rank commits the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from math import ceil

import torch
import xxhash

from modelstate.distributed.agreement import Agreement
from modelstate.distributed.shards import Mesh, Part, replicated
from modelstate.distributed.writing import (
    FINISHING,
    ROUND_BYTES,
    WRITING,
    CollectiveWriter,
    Piece,
    ShardedTensor,
    elements_of,
)
from modelstate.errors import ModelStateError
from modelstate.formats.block_writer import LazyTensor
from modelstate.formats.manifest import BLOCK_BYTES
from modelstate.formats.safetensors import FileLayout, Written, finished_header
from modelstate.formats.sharded import Kind, balanced
from modelstate.io.atomic import write_errors
from modelstate.io.engine import memory_at
from modelstate.remote.location import is_remote, locate
from modelstate.remote.requests import cleanup
from modelstate.remote.upload import PART_BYTES, ObjectWriter, new_object, remove
from modelstate.torch_compat.plain import in_a_row

PIECE_BYTES = BLOCK_BYTES
"""The most bytes that a rank gets of a tensor at once."""


def writer_of(agreement: Agreement, path: str) -> CollectiveWriter:
    """Returns the writer of all ranks of an agreement for a path, or for the URL of an object in a bucket."""
    return CollectiveUploader(agreement, path) if is_remote(path) else CollectiveWriter(agreement, path)


class CollectiveUploader(CollectiveWriter):
    """Writes the objects of a checkpoint with all ranks of an agreement: a `CheckpointWriter`.

    Args:
        agreement: The ranks.
        path: The URL of the target.
    """

    digests_of_parts = False

    def shards(self, tensors: Mapping[str, Kind]) -> list[dict[str, Kind]]:
        """Groups tensors into objects, at least one for each rank where that is worth a request."""
        parts = ceil(sum(tensor.nbytes for tensor in tensors.values()) / PART_BYTES)
        return balanced(tensors, max(1, min(parts, len(self.ranks))))

    def upload(
        self,
        layouts: Sequence[FileLayout],
        names: Callable[[], Sequence[str]],
        compared: Callable[[], Mapping[str, object]],
    ) -> Sequence[Written]:
        """Writes objects, as `CheckpointWriter.upload` describes.

        Raises:
            DistributedError: The ranks have different states or arguments.
            RankLostError: A rank did not take part in time.
            WriteFailedError: A rank cannot upload.

        After an error each rank has removed what it has uploaded, as far as the bucket lets it. Where the error comes
        after the uploads, the first rank removes all.
        """
        agreement = self._agreement
        meshes, urls = self.planned(layouts, compared, names)
        owned = self._owned([planned.nbytes for planned in layouts])
        uploads = _Objects({number: layouts[number] for number in owned[self._agreement.rank]}, urls)
        try:
            with agreement.phase(WRITING), write_errors(self._path):
                self._transfer(layouts, owned, meshes, uploads)
        except BaseException:
            uploads.discard()
            raise
        with agreement.phase(FINISHING, decides=True), write_errors(self._path):
            own = [(number, index, 0, text) for number, of in uploads.hashes.items() for index, text in enumerate(of)]
            hashes = self._digests_of_all(layouts, own)
            return [finished_header(*of_object) for of_object in zip(layouts, hashes, strict=False)]

    def _owned(self, sizes: Sequence[int]) -> dict[int, list[int]]:
        """Returns for each rank the numbers of the objects that it uploads: of the largest ones first, one each."""
        owned: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        loads = dict.fromkeys(self.ranks, 0)
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            rank = min(loads, key=loads.__getitem__)
            owned[rank].append(number)
            loads[rank] += sizes[number]
        return owned

    def _transfer(
        self,
        layouts: Sequence[FileLayout],
        owned: Mapping[int, Sequence[int]],
        meshes: Mapping[Mesh, Mesh],
        objects: _Objects,
    ) -> None:
        """Brings all tensors to their owners, which append them to their objects. Ends early where a rank has failed.

        The ranks vote after each round, so that no rank uploads in vain for long.
        """
        failed: BaseException | None = None
        try:
            rounds = self._rounds_of_all(layouts, owned, meshes)
            while True:
                with self._agreement.barrier():
                    pieces = next(rounds, None)
                    if pieces is None:
                        break
                    chunk = self.exchanged([piece for piece in pieces if piece.part.region is None])
                try:
                    exchanged = iter(chunk)
                    for piece in (piece for piece in pieces if piece.rank == self._agreement.rank):
                        objects.append(piece, elements_of(piece) if piece.part.region else next(exchanged)[1])
                except Exception as error:
                    failed = error
                chunk, exchanged = [], iter(())  # frees the memory before the next round
                if any(self._agreement.maximum(WRITING, [failed is not None])):
                    objects.abort(failed or InterruptedError("another rank has failed"))
                    break
            if failed is not None:
                raise failed
            objects.finish()
        except BaseException as error:
            objects.abort(error)
            raise

    def _rounds_of_all(
        self, layouts: Sequence[FileLayout], owned: Mapping[int, Sequence[int]], meshes: Mapping[Mesh, Mesh]
    ) -> Iterator[list[Piece]]:
        """Yields the pieces of each round: for each rank those that come next in its objects, of a few megabytes."""
        remaining = [self._pieces_for(rank, numbers, layouts, meshes) for rank, numbers in owned.items()]
        while True:
            pieces: list[Piece] = []
            for of_rank in remaining:
                nbytes = 0
                for piece in of_rank:
                    pieces.append(piece)
                    nbytes += piece.nbytes
                    if nbytes + PIECE_BYTES > ROUND_BYTES:
                        break
            if not pieces:
                return
            yield pieces

    def _pieces_for(
        self, rank: int, numbers: Sequence[int], layouts: Sequence[FileLayout], meshes: Mapping[Mesh, Mesh]
    ) -> Iterator[Piece]:
        """Yields the pieces of the objects of a rank, in their order, each of them part of one tensor."""
        for number in numbers:
            at = layouts[number].header_bytes
            for index, (_, tensor) in enumerate(layouts[number].tensors):
                if isinstance(tensor, ShardedTensor):
                    parts = tensor.parts_on(meshes[tensor.mesh])
                    region = None
                else:
                    parts = replicated(tensor.numel(), tensor.itemsize, self.ranks)
                    region = parts.regions[0]
                for block in _blocks(tensor.numel(), parts.row_elements, PIECE_BYTES // tensor.itemsize):
                    part = Part(block.start, block.stop, self.ranks, region)
                    start = at + block.start * tensor.itemsize
                    yield Piece(tensor, start, part, rank, parts, (number, index))
                at += tensor.nbytes


def _blocks(elements: int, row_elements: int, most: int) -> Iterator[range]:
    """Yields ranges of at most `most` elements: whole rows, or a range of one row where a row is longer."""
    if not elements:
        return
    step = most // row_elements * row_elements
    rows = [range(elements)] if step else (range(row, row + row_elements) for row in range(0, elements, row_elements))
    for row in rows:
        for start in range(row.start, row.stop, step or most):
            yield range(start, min(start + (step or most), row.stop))


class _Objects:
    """The objects that this rank uploads, one after the other, in the order of their bytes.

    Args:
        layouts: What each of them holds, by its number.
        urls: The URLs by these numbers.
    """

    def __init__(self, layouts: Mapping[int, FileLayout], urls: Sequence[str]) -> None:
        self.hashes = {number: [""] * len(planned.tensors) for number, planned in layouts.items()}
        """The digests of the tensors of each object."""
        self._layouts, self._urls = layouts, urls
        self._remaining = iter(layouts)
        self._number = -1
        self._object = ExitStack()
        self._output: ObjectWriter | None = None
        self._begun: list[str] = []
        self._hash, self._hashed_bytes = xxhash.xxh3_128(), 0

    def append(self, piece: Piece, values: torch.Tensor | LazyTensor) -> None:
        """Adds the next piece. Raises `WriteFailedError`."""
        number, index = piece.place
        while self._number != number:
            self._next(next(self._remaining))
        values = in_a_row(values if isinstance(values, torch.Tensor) else values.make(0, values.numel()))
        data = memory_at(values.data_ptr(), piece.nbytes)
        assert self._output is not None
        self._output.append(data)
        while data:
            block = data[: BLOCK_BYTES - self._hashed_bytes]
            self._hash.update(block)
            self._hashed_bytes += len(block)
            data = data[len(block) :]
            is_end = not data and piece.part.end == piece.tensor.numel()
            if self._hashed_bytes == BLOCK_BYTES or is_end:
                self.hashes[number][index] += self._hash.hexdigest()
                self._hash.reset()
                self._hashed_bytes = 0

    def finish(self) -> None:
        """Ends the last object, and writes those that have no bytes of tensors. Raises `WriteFailedError`."""
        for number in self._remaining:
            self._next(number)
        self._object.close()

    def _next(self, number: int) -> None:
        """Ends the object, and begins another one."""
        self._object.close()
        self._number = number
        planned, url = self._layouts[number], self._urls[number]
        self._begun.append(url)
        self._output = self._object.enter_context(new_object(locate(url), planned.nbytes, overwrite=True))
        self._output.append(finished_header(planned, [""] * len(planned.tensors)).header)

    def abort(self, error: BaseException) -> None:
        """Ends without the object that is being uploaded, and without those that have not begun."""
        self._remaining = iter(())
        with suppress(ModelStateError, type(error)), self._object:
            raise error

    def discard(self) -> None:
        """Removes what was uploaded, and ignores errors of the bucket."""
        with suppress(ModelStateError), cleanup():
            remove([locate(url) for url in self._begun])
