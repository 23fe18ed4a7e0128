"""Writes the tensors of a checkpoint that are spread over several ranks, or finds them in the last one."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from modelstate.distributed.agreement import Agreement
from modelstate.distributed.connections import number_of
from modelstate.distributed.writing import CollectiveWriter, ShardedTensor
from modelstate.formats.block_writer import LazyTensor, write_blocks
from modelstate.formats.manifest import digest
from modelstate.formats.safetensors import FileLayout, parts_of
from modelstate.io.atomic import Output, new_file
from modelstate.objects.parts import Kind
from modelstate.store.object_files import Key, Split, planned_files, size_errors, splitter
from modelstate.store.saving import EncodedObject, NewStep, SpreadFile, local_part

CHOOSING = "choosing the files"
"""The phase before tensors are written."""

if TYPE_CHECKING:
    from modelstate.store.delta import ModuleDeltas


class SpreadWriter:
    """Writes the objects whose tensors are spread over the ranks.

    A file is not written again where no rank's part of its tensors has changed since the last checkpoint: the first
    rank links it. Other tensors that have not changed go into files of their own.

    Each rank knows the digests of what it held in the last save of this process, and the first one those that the files
    have. The first save of a process writes all tensors.

    Args:
        deltas: writes modules as differences to the last checkpoint; None writes them whole.
    """

    def __init__(self, deltas: ModuleDeltas | None) -> None:
        self._deltas = deltas
        self._digests: dict[Key, str] = {}
        """On the first rank, those of the tensors of the last save."""
        self._parts: Mapping[Key, object] = {}
        """For each tensor of the last save its layout, and the digest of what this rank holds."""
        self._save = ""
        """The last save: its temporary name, which no other save has."""

    def write(
        self,
        directory: str,
        objects: Mapping[str, EncodedObject],
        agreement: Agreement,
        writer: CollectiveWriter | None,
        shard_bytes: int | None,
        new: NewStep,
    ) -> Sequence[SpreadFile]:
        """Writes the files: a call of all ranks.

        Args:
            directory: the directory of the new step, as this rank names it.
            objects: the objects whose tensors are spread over the ranks, by path.
            agreement: the ranks.
            writer: their writer.
            shard_bytes: the most bytes of tensors in a file; None for no limit.
            new: the new step; used on the first rank.

        Returns:
            The files that were written, whose bytes are durable.

        Raises what `CollectiveWriter.write` raises.
        """
        assert writer is not None  # a process that saves alone has whole tensors
        from modelstate.distributed.uploading import CollectiveUploader

        layouts: list[FileLayout] = []
        files: list[SpreadFile] = []
        paths: list[str] = []
        split: Split[torch.Tensor | LazyTensor] = splitter(shard_bytes)
        if isinstance(writer, CollectiveUploader) and shard_bytes is None:
            split = writer.shards

        def compared() -> dict[str, object]:
            return {path: encoded.state.values(path) for path, encoded in objects.items()}

        modules = {}
        for path, of in objects.items():
            if self._deltas is not None and of.kind is Kind.MODULE:
                modules[path] = self._deltas.write(path, of.state, of.frozen, agreement, writer, new)
        others = {path: encoded for path, encoded in objects.items() if path not in modules}
        with writer.planning():
            parts = {key: part for path, encoded in others.items() for key, part in _parts(path, encoded)}
        unchanged = self._unchanged(parts, agreement)
        known = {key: digest for key, digest in self._digests.items() if key in unchanged}
        linked: set[Key] = set()
        if unchanged:
            linked = {(path, name) for path, name in agreement.decided(CHOOSING, lambda: new.link_unchanged(known))}
        with writer.planning():
            for path, encoded in objects.items():
                module = modules.get(path)
                if module is not None:
                    rest, constant = module.whole, module.constant
                else:
                    tensors = encoded.state.tensors
                    rest = {name: tensor for name, tensor in tensors.items() if (path, name) not in linked}
                    constant = {name for name in rest if (path, name) in unchanged} if unchanged else encoded.frozen
                with size_errors(path):
                    for planned, suffix, patched in planned_files(rest, constant, split, module):
                        layouts.append(planned)
                        files.append(SpreadFile(path, planned.nbytes, digests=patched, suffix=suffix))

        def begin() -> list[str]:
            paths.extend(new.files.begin([file.key + file.suffix for file in files]))
            return paths

        def outputs() -> Generator[Output]:
            for path in begin():
                with new_file(path) as output:
                    yield output

        if isinstance(writer, CollectiveUploader):
            written = writer.upload(layouts, begin, compared)
        else:
            written = writer.write(layouts, outputs, compared)
        if agreement.is_first:
            files = [
                replace(
                    file,
                    path=path,
                    name=new.files.name_of(path, file.key + file.suffix, of_file),
                    digests=file.digests or of_file.digests,
                    header=of_file.header,
                )
                for file, path, of_file in zip(files, paths, written, strict=True)
            ]
            self._digests = {key: digest for key, digest in known.items() if key in linked}
            self._digests |= {(file.key, name): digest for file in files for name, digest in file.digests.items()}
        self._parts = parts
        self._save = os.path.basename(directory)
        return files

    def _unchanged(self, parts: Mapping[Key, object], agreement: Agreement) -> set[Key]:
        """Returns the tensors that no rank has changed; none where the ranks have no last save in common."""
        same = {key for key, part in parts.items() if self._parts.get(key) == part}
        save = number_of([self._save])
        reduced = agreement.maximum("comparing tensors", [save, -save, *(key not in same for key in parts)])
        if not self._save or not reduced or reduced[0] != -reduced[1]:
            return set()
        return {key for key, is_changed in zip(parts, reduced[2:], strict=True) if not is_changed}


def _parts(path: str, encoded: EncodedObject) -> Iterator[tuple[Key, object]]:
    """Yields the layout of each tensor of an object, and the digest of what this rank holds of it."""
    tensors = encoded.state.tensors
    hashes = write_blocks(None, 0, [local_part(tensor) for tensor in tensors.values()])
    for (name, tensor), hashed in zip(tensors.items(), hashes, strict=True):
        spread = (tensor.placements, tensor.mesh) if isinstance(tensor, ShardedTensor) else ()
        yield (path, name), (tensor.dtype, tuple(tensor.shape), *spread, parts_of(tensor), digest(hashed.encode()))
