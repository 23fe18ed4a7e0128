"""The files of an object in a checkpoint: those of the last checkpoint that are linked, and those that are written.

An index says which file has which tensor. Tensors that change and tensors that do not are in different files, so that a
file of the checkpoint before is linked where none of its tensors has changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec
import torch

from modelstate.errors import ModelStateError, UnsavableError
from modelstate.formats.block_writer import LazyTensor
from modelstate.formats.layers import PatchLayer, chains, patch_layer
from modelstate.formats.manifest import KEY, LAYERS, MAX_PARTS, check_size, index_of
from modelstate.formats.safetensors import METADATA_NAME, FileLayout, dtype_and_shape, layout
from modelstate.formats.serialize import SerializedState
from modelstate.formats.sharded import INDEX_SUFFIX, SHARD_METADATA, SUFFIX, in_shards
from modelstate.io.engine import for_each
from modelstate.objects.parts import Kind
from modelstate.store.backend import NewDirectory
from modelstate.store.directory import READS_AT_ONCE, StepIndex
from modelstate.store.record import FileRecord, ObjectEntry

if TYPE_CHECKING:
    from modelstate.store.bucket import NewObjects

NewFiles: TypeAlias = "NewDirectory | NewObjects"
"""Writes the files of a checkpoint where no reader sees them yet."""
Key = tuple[str, str]
"""The path of an object, and the name of a tensor."""
_Tensor = TypeVar("_Tensor", torch.Tensor, torch.Tensor | LazyTensor)


class LastFiles(msgspec.Struct):
    """The files of an object in the last checkpoint that can be linked."""

    entry: ObjectEntry
    names: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The names of the tensors in each file, in the order of the layers."""
    layouts: dict[str, tuple[object, object]] = msgspec.field(default_factory=dict)
    digests: dict[str, str] = msgspec.field(default_factory=dict)
    patches: dict[str, PatchLayer] = msgspec.field(default_factory=dict)
    """The files that have patches."""
    chains: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """The files that the value of each tensor needs."""

    def needed(self, names: Iterable[str]) -> set[str]:
        """Returns the files that the values of tensors need."""
        return {file for name in names for file in self.chains[name]}

    def comparable(self, tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
        """Returns the tensors that have the same dtypes and shapes there."""
        return {
            name: tensor
            for name, tensor in tensors.items()
            if name in self.digests and self.layouts.get(name) == dtype_and_shape(tensor)
        }

    def kept(self, state: SerializedState, same: Set[str], payloads: Mapping[str, int] | None = None) -> Set[str]:
        """Returns the tensors whose files are to be linked.

        Args:
            state: the object as it is saved.
            same: the tensors that have not changed.
            payloads: the bytes of the payloads of those that can be patched; None for a step that is to be whole.
        """
        if payloads is not None:
            kept = same | payloads.keys()
            written_bytes = sum(tensor.nbytes for name, tensor in state.tensors.items() if name not in kept)
            written_bytes += sum(payloads.values())
            linked_bytes = sum(self.entry.files[file].nbytes for file in self.needed(kept))
            if 2 * written_bytes <= state.nbytes and written_bytes + linked_bytes <= 2 * state.nbytes:
                return kept
        # A whole step links only files that have whole tensors and no tensor that has changed.
        whole = (names for file, names in self.names.items() if all(self.chains[name] == [file] for name in names))
        return {name for names in whole if same >= {*names} for name in names}


def read_last_files(index: StepIndex, directory: str, entry: ObjectEntry | None) -> LastFiles | None:
    """Reads which files of an object in the last checkpoint can be linked, and what they have.

    Returns None where the last checkpoint lacks the object, or its files cannot be read: all files are written then.

    Args:
        index: the checkpoints of the store.
        directory: where the files of the last checkpoint are.
        entry: the object there; None where it lacks the object.
    """
    if entry is None or not entry.index.endswith(INDEX_SUFFIX):
        return None
    last, read = LastFiles(entry), dict[str, bytes]()

    def read_head(file: tuple[str, FileRecord]) -> None:
        head = index.untouched_head(os.path.join(directory, file[0]), file[1])
        # Parsing one with more parts could need gigabytes.
        if head is not None and sum(map(head.count, (b"[", b"{", b","))) <= MAX_PARTS:
            read[file[0]] = head

    threads = READS_AT_ONCE if index.backend.is_lazy else 1
    for_each(entry.files.items(), [read_head] * min(threads, len(entry.files)))
    heads = {name: read[name] for name in entry.files if name in read}
    parse = msgspec.json.decode
    try:
        metadata = parse(heads.pop(entry.index))["metadata"]
        check_size(metadata[KEY])
        digests = parse(metadata[KEY])["digests"]["tensors"]
        layers = parse(metadata.get(LAYERS, "[]"))
        if layers and heads.keys() != {*layers}:
            return None
        for file in layers or heads:
            entries = parse(heads[file][8:])
            metadata = entries.pop(METADATA_NAME)
            last.names[file] = tuple(entries)
            if layers and (patches := patch_layer(metadata, entries)) is not None:
                last.patches[file] = patches
                last.digests |= {name: patch.after for name, patch in patches.tensors.items()}
                continue
            last.layouts |= {key: (of["dtype"], of["shape"]) for key, of in entries.items()}
            last.chains |= {name: [file] for name in entries}
        last.digests |= digests
        if layers:
            last.chains = chains(last.names, last.patches)
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return last


class ObjectFiles(msgspec.Struct):
    """The files of an object that is being written."""

    tensors: dict[str, Sequence[str]] = msgspec.field(default_factory=dict)
    """The names of the tensors in each file, by the file's name."""
    digests: dict[str, str] = msgspec.field(default_factory=dict)
    """The digest of each tensor."""
    records: dict[str, FileRecord] = msgspec.field(default_factory=dict)
    written_bytes: int = 0
    linked_bytes: int = 0
    patched: set[str] = msgspec.field(default_factory=set)
    """The tensors with patches."""
    saves: set[int] = msgspec.field(default_factory=set)
    """The saves whose patches it needs."""

    def add(self, file: str, record: FileRecord, digests: Mapping[str, str], save: int | None = None) -> None:
        """Adds a file that was written: with the digests of its tensors, and the save that has patched them, if any."""
        self.tensors[file], self.records[file] = tuple(digests), record
        self.digests |= digests
        self.written_bytes += record.nbytes
        if save is not None:
            self.saves.add(save)
            self.patched |= digests.keys()


def write_index(new: NewFiles, path: str, kind: Kind, state: SerializedState, files: ObjectFiles) -> ObjectEntry:
    """Writes the index of the files of an object. Returns the entry of the object."""
    is_layered = sum(map(len, files.tensors.values())) > len(files.digests)
    with size_errors(path):
        manifest = state.manifest(None, files.digests, files.patched)
        text = index_of(files.tensors, state.nbytes, manifest, is_layered)
    index, record = new.write_text(f"{path}{SUFFIX}{INDEX_SUFFIX}", text)
    files.records[index] = record
    files.written_bytes += len(text)
    return ObjectEntry(kind, index, files.records, written_bytes=files.written_bytes, patches=len(files.saves))


Split = Callable[[Mapping[str, _Tensor]], Iterable[Mapping[str, _Tensor]]]


def splitter(shard_bytes: int | None) -> Split[_Tensor]:
    """Returns a function that groups tensors into files of at most so many bytes; None stands for one file."""
    return lambda tensors: [tensors] if shard_bytes is None else in_shards(tensors, shard_bytes)


class WrittenModule(msgspec.Struct, frozen=True):
    """What is to be written of a module."""

    whole: Mapping[str, torch.Tensor | LazyTensor]
    constant: Set[str]
    """The tensors that have not changed since the last checkpoint."""
    payloads: Mapping[str, torch.Tensor | LazyTensor]
    layer: PatchLayer
    """Describes the payloads."""


def planned_files(
    tensors: Mapping[str, torch.Tensor | LazyTensor],
    constant: Set[str],
    split: Split[torch.Tensor | LazyTensor],
    module: WrittenModule | None,
) -> Iterator[tuple[FileLayout, str, dict[str, str]]]:
    """Yields the files of an object. With each come the suffix of its name, and the digests of tensors with patches.

    Args:
        tensors: the tensors that are written whole.
        constant: the tensors that do not change; they are in files of their own.
        split: divides tensors into files.
        module: the patches of a module; None for other objects.
    """
    for is_constant in (True, False):
        alike = {name: tensor for name, tensor in tensors.items() if (name in constant) == is_constant}
        for group in split(alike) if alike else ():
            yield layout(group, lambda _: SHARD_METADATA), "", {}
    if module is not None and module.payloads:
        patches = module.layer.tensors
        for group in split(module.payloads):
            yield layout(group, module.layer.metadata), ".delta", {name: patches[name].after for name in group}


@contextmanager
def size_errors(path: str) -> Iterator[None]:
    """Raises `UnsavableError` in place of the `ValueError` for a header or a manifest that is too large."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, ModelStateError):
            raise
        raise unsavable(path, error) from error


def unsavable(where: str, found: object) -> UnsavableError:
    """Returns the error for a state with more in it than one checkpoint can hold."""
    return UnsavableError(
        "this is more than a checkpoint of a store holds",
        where=where,
        found=found,
        remedy="keep large values as tensors or arrays, and save very many tensors as several objects: two optimizers "
        "for half of the parameters each, say; where a header is too large, shard_size_bytes= makes more files",
    )
