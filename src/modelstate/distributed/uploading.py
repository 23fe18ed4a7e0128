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
from contextlib import contextmanager, suppress
from itertools import chain, groupby
from math import ceil

import torch

from modelstate.distributed.agreement import Agreement
from modelstate.distributed.shards import Mesh
from modelstate.distributed.writing import (
    FINISHING,
    WRITING,
    CollectiveWriter,
    Hashed,
    Piece,
    ShardedTensor,
    rounds,
)
from modelstate.errors import ModelStateError
from modelstate.formats.block_writer import write_blocks
from modelstate.formats.manifest import BLOCK_BYTES
from modelstate.formats.safetensors import FileLayout, Written, finished_header
from modelstate.formats.sharded import Kind, balanced
from modelstate.io.atomic import write_errors
from modelstate.io.engine import memory_at
from modelstate.remote.location import is_remote, locate
from modelstate.remote.requests import cleanup
from modelstate.remote.upload import PART_BYTES, ObjectWriter, new_object, remove
from modelstate.torch_compat.plain import in_a_row


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
        pieces = {rank: self._pieces_of(rank, numbers, layouts, meshes) for rank, numbers in owned.items()}
        begun: list[int] = []
        hashes: list[Hashed] = []

        @contextmanager
        def new(number: int) -> Iterator[ObjectWriter]:
            planned = layouts[number]
            begun.append(number)
            with new_object(locate(urls[number]), planned.nbytes, overwrite=True) as output:
                output.append(finished_header(planned, [""] * len(planned.tensors)).header)
                yield output

        def upload() -> None:
            received = chain.from_iterable(rounds(agreement, pieces))
            for number, group in groupby(received, lambda item: item[0].place[0]):
                with new(number) as output:
                    for piece, values in group:
                        made = values if isinstance(values, torch.Tensor) else values.make(0, len(piece.elements))
                        row = in_a_row(made)
                        hashes.append((number, piece.place[1], piece.at, write_blocks(None, 0, [row])[0]))
                        output.append(memory_at(row.data_ptr(), piece.nbytes))
            for number in set(owned[agreement.rank]) - {*begun}:  # without elements
                with new(number):
                    pass

        try:
            with agreement.phase(WRITING), agreement.barrier(), write_errors(self._path):
                upload()
        except BaseException:
            with suppress(ModelStateError), cleanup():
                remove([locate(urls[number]) for number in begun])
            raise
        with agreement.phase(FINISHING, decides=True), write_errors(self._path):
            of_all = self._digests_of_all(layouts, hashes)
            return [finished_header(*of_object) for of_object in zip(layouts, of_all, strict=False)]

    def _owned(self, sizes: Sequence[int]) -> dict[int, list[int]]:
        """Returns for each rank the numbers of the objects that it uploads: of the largest ones first, one each."""
        owned: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        loads = dict.fromkeys(self.ranks, 0)
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            rank = min(loads, key=loads.__getitem__)
            owned[rank].append(number)
            loads[rank] += sizes[number]
        return owned

    def _pieces_of(
        self, rank: int, numbers: Sequence[int], layouts: Sequence[FileLayout], meshes: Mapping[Mesh, Mesh]
    ) -> Iterator[Piece]:
        """Yields the pieces of the objects of a rank, in their order: one for each digest."""
        for number in numbers:
            for index, (name, tensor) in enumerate(layouts[number].tensors):
                parts, step = self.parts(tensor, meshes), BLOCK_BYTES // tensor.itemsize
                region = None if isinstance(tensor, ShardedTensor) else parts.regions[0]
                for start in range(0, tensor.numel(), step):
                    elements = range(start, min(start + step, tensor.numel()))
                    yield Piece(name, tensor, elements, rank, parts, region, (number, index), start)
