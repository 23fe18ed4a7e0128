"""Writes a checkpoint of a store, complete and durable.

Each file holds tensors and nothing that changes with the step, and its name has a digest of its content. A file of the
checkpoint before is not written again where none of its tensors has changed: the new checkpoint gets a hard link to
it, and stays complete when the old one is removed. So tensors that change and tensors that do not are in different
files. An index says which file has which tensor.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch
from msgspec.structs import replace

from modelstate.distributed.agreement import Agreement, Digest
from modelstate.distributed.writing import CollectiveWriter, ShardedTensor
from modelstate.errors import ModelStateError, TargetExistsError, UnsavableError
from modelstate.formats.block_writer import LazyTensor, write_blocks
from modelstate.formats.layers import NewLayers, PatchLayer, chains, patch_layer
from modelstate.formats.manifest import KEY, LAYERS, MAX_PARTS, check_size, digest, index_of
from modelstate.formats.safetensors import (
    METADATA_NAME,
    FileLayout,
    Written,
    blank_digests,
    dtype_and_shape,
    layout,
    parts_of,
)
from modelstate.formats.serialize import SerializedState, serialize
from modelstate.formats.sharded import INDEX_SUFFIX, SHARD_METADATA, SUFFIX, in_shards
from modelstate.io.atomic import Output, new_file
from modelstate.io.engine import for_each
from modelstate.io.staging import StagingBuffer
from modelstate.objects.objects import Target, capture
from modelstate.objects.parts import Kind
from modelstate.objects.per_rank import gathered
from modelstate.process import unstoppable
from modelstate.store.backend import NewDirectory, name_of
from modelstate.store.directory import READS_AT_ONCE, StepEntry, StepIndex, WriteAccess
from modelstate.store.record import MAX_RECORD_BYTES, FileRecord, ObjectEntry, Record
from modelstate.store.retention import Keep
from modelstate.text_format import size
from modelstate.torch_compat.sharding import reshard

if TYPE_CHECKING:
    from modelstate.store.bucket import NewObjects
    from modelstate.store.delta import Delta, LastObject, LinkedObject, ModuleDeltas

CHOOSING = "choosing the files"
"""The phase in which ranks learn which files are linked."""
_logger = logging.getLogger(__name__)
_Tensors: TypeAlias = Mapping[str, torch.Tensor | LazyTensor]
_Key = tuple[str, str]
"""The path of an object, and the name of a tensor."""
_Split = Callable[[_Tensors], Iterable[_Tensors]]
NewFiles: TypeAlias = "NewDirectory | NewObjects"
"""Writes the files of a checkpoint where no reader sees them yet."""


class SavedStep(msgspec.Struct, frozen=True):
    """A checkpoint that is complete and durable: the result of `Store.save`.

    Examples:
        >>> saved = store.save(1000, {"model": model})
        >>> saved.step, saved.pruned
        (1000, ())
    """

    step: int
    path: str
    """The directory of the checkpoint."""
    written_bytes: int
    linked_bytes: int
    """Bytes of files that are links to those of the checkpoint before; they take no more space."""
    staging_bytes: int
    """Memory that the state was copied to, which the store keeps until `close`; 0 for a save that blocked."""
    blocked_seconds: float
    """From the call of `Store.save` to its return."""
    seconds: float
    """From the call of `Store.save` until the checkpoint was durable, without the pruning after it."""
    pruned: tuple[int, ...]
    """Steps that were removed afterwards."""

    def __str__(self) -> str:
        linked = f", {size(self.linked_bytes)} linked" if self.linked_bytes else ""
        return f"step {self.step}: {size(self.written_bytes)} written{linked} in {self.seconds:.3f} s, {self.path}"


class EncodedObject(msgspec.Struct, frozen=True):
    """An object of a checkpoint that is about to be written."""

    kind: Kind
    ranks: int
    """The number of ranks whose states it has; 0 for one state for all of them."""
    state: SerializedState
    frozen: Set[str]
    """Of a module the names of the parameters that training does not change."""
    is_spread: bool
    """Whether its tensors are spread over several ranks."""
    of_first: Set[str]
    """Of a module the names of the buffers that may differ between the ranks, since those of the first one count."""

    @property
    def has_one_state(self) -> bool:
        """Whether there is one state for all ranks. The states of other objects may differ between the ranks."""
        return self.kind in (Kind.MODULE, Kind.OPTIMIZER)


def encode_objects(
    targets: Mapping[str, Target], agreement: Agreement, writer: CollectiveWriter | None, delta: Delta | None
) -> dict[str, EncodedObject]:
    """Captures and encodes the state of the objects, by path, with the dtype of `delta`.

    Raises the error for which it cannot be saved.
    """
    with agreement.phase("capturing the state"):
        for target in targets.values():
            if agreement.is_collective and target.kind is Kind.MODULE:
                reshard(target.obj.modules())
        parts = capture(targets)
    if agreement.is_collective:
        parts = gathered(parts, agreement)
    of_shard = None if writer is None else writer.of_shard
    objects = {}
    with agreement.phase("encoding the state"):
        for path, part in parts.items():
            is_module = part.kind is Kind.MODULE
            state = serialize(part.tree, path, as_tree=not is_module, of_shard=of_shard)
            if is_module and delta is not None:
                delta.cast(state)
            with size_errors(path):
                check_size(state.manifest(None, blank_digests(state.tensors)))
            params = targets[path].obj.named_parameters(remove_duplicate=False) if is_module else ()
            frozen = {name for name, param in params if not param.requires_grad}
            is_spread = any(isinstance(tensor, ShardedTensor) for tensor in state.tensors.values())
            of_first = targets[path].buffers_of_first(agreement.ranks) if agreement.is_collective else frozenset[str]()
            objects[path] = EncodedObject(part.kind, part.ranks, state, frozen, is_spread, of_first)
    return objects


def replicated_values(
    objects: Mapping[str, EncodedObject], digests: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, object]:
    """Returns what stands for each value that all ranks must have alike, by its name, for `Digest.of_values`.

    Args:
        objects: the objects, by path.
        digests: the digests of the tensors of each object, where they are known; None computes them.
    """
    values: dict[str, object] = {}
    for path, encoded in objects.items():
        values |= encoded.state.values(path)
        tensors = {name: tensor for name, tensor in encoded.state.live.items() if name not in encoded.of_first}
        of_object = {} if digests is None else digests[path]
        if digests is None:
            of_object = dict(zip(tensors, write_blocks(None, 0, list(tensors.values())), strict=True))
        for name, tensor in tensors.items():
            values[f"{path}.{name}"] = (tensor.dtype, tuple(tensor.shape), of_object[name])
    return values


class ObjectFiles(msgspec.Struct):
    """The files of an object in a checkpoint, by their names."""

    records: dict[str, FileRecord] = msgspec.field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The names of the tensors in each file, in the order of the layers."""
    patches: dict[str, PatchLayer] = msgspec.field(default_factory=dict)
    """The files that have patches."""
    digests: dict[str, str] = msgspec.field(default_factory=dict)
    """The digest of each tensor."""
    written_bytes: int = 0
    """The bytes of the files that are not links."""

    @property
    def saves(self) -> set[int]:
        """The saves whose patches it needs."""
        return {layer.save for layer in self.patches.values()}


class LastFiles(ObjectFiles):
    """The files of an object in the last checkpoint that can be linked. It has none that cannot be read."""

    directory: str = ""
    index: str = ""
    """The name of their index; empty for no files."""
    layouts: dict[str, tuple[object, object]] = msgspec.field(default_factory=dict)
    chains: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """The files that the value of each tensor needs."""

    def needed(self, names: Iterable[str]) -> set[str]:
        """Returns the files that the values of tensors need."""
        return {file for name in names for file in self.chains[name]}

    def kept(self, state: SerializedState, same: Set[str], payloads: Mapping[str, int] | None) -> Set[str]:
        """Returns the tensors whose files are to be linked. The arguments are those of `NewStep.link_object`."""
        if payloads is not None:
            kept = same | payloads.keys()
            written_bytes = sum(tensor.nbytes for name, tensor in state.tensors.items() if name not in kept)
            written_bytes += sum(payloads.values())
            linked_bytes = sum(self.records[file].nbytes for file in self.needed(kept))
            if 2 * written_bytes <= state.nbytes and written_bytes + linked_bytes <= 2 * state.nbytes:
                return kept
        # A whole step links only files that have whole tensors and no tensor that has changed.
        whole = (names for file, names in self.names.items() if all(self.chains[name] == [file] for name in names))
        return {name for names in whole if same >= {*names} for name in names}


def read_last_files(index: StepIndex, checkpoint: StepEntry | None, path: str) -> LastFiles:
    """Reads which files of an object in the last checkpoint can be linked, and what they have.

    Args:
        index: the checkpoints of the store.
        checkpoint: the last one; None where there is none.
        path: the path of the object.
    """
    entry = None if checkpoint is None else checkpoint.usable_record.entries.get(path)
    if checkpoint is None or entry is None or not entry.index.endswith(INDEX_SUFFIX):
        return LastFiles()
    last = LastFiles({**entry.files}, directory=checkpoint.place.files, index=entry.index)
    read = dict[str, bytes]()

    def read_head(file: tuple[str, FileRecord]) -> None:
        head = index.untouched_head(os.path.join(last.directory, file[0]), file[1])
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
            return LastFiles()
        for file in layers or heads:
            entries = parse(heads[file][8:])
            metadata = entries.pop(METADATA_NAME)
            last.names[file] = tuple(entries)
            if layers and (patches := patch_layer(metadata, entries)) is not None:
                last.patches[file] = patches
                last.digests |= {name: patch.after for name, patch in patches.tensors.items()}
                continue
            last.layouts |= {key: (of["dtype"], of["shape"]) for key, of in entries.items()}
        last.digests |= digests
        whole = {name: [file] for file, names in last.names.items() for name in names}
        last.chains = chains(last.names, last.patches) if layers else whole
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return LastFiles()
    return last


class PlannedFile(msgspec.Struct, frozen=True):
    """A file that is about to be written."""

    path: str
    """The path of the object."""
    layout: FileLayout
    patches: PatchLayer | None = None
    """The patches of the object, where it has some of them; None for whole tensors."""

    @property
    def key(self) -> str:
        """What its name begins with."""
        return f"{self.path}.delta" if self.patches else self.path

    def digests(self, written: Written) -> Mapping[str, str]:
        """Returns the digests of its tensors, after its patches, when it has been written."""
        patches = None if self.patches is None else self.patches.tensors
        return written.digests if patches is None else {name: patches[name].after for name in written.digests}


def planned_files(path: str, new: NewLayers, split: _Split) -> Iterator[PlannedFile]:
    """Yields the files of an object. Tensors that do not change are in files of their own.

    Args:
        path: the path of the object.
        new: what is written of it.
        split: divides tensors into files.
    """
    with size_errors(path):
        for is_constant in (True, False):
            alike = {name: tensor for name, tensor in new.whole.items() if (name in new.constant) == is_constant}
            for group in split(alike) if alike else ():
                yield PlannedFile(path, layout(group, lambda _: SHARD_METADATA))
        if new.patches is not None and new.payloads:
            for group in split(new.payloads):
                yield PlannedFile(path, layout(group, new.patches.metadata), new.patches)


class SpreadTensors(msgspec.Struct):
    """The tensors that are spread over several ranks, as the last save of this process has written them."""

    save: str = ""
    """The temporary name of that save, which no other save has; empty before the first save."""
    parts: Mapping[_Key, object] = {}
    """For each tensor its layout, and the digest of what this rank holds."""
    digests: Mapping[_Key, str] = {}
    """On the first rank, those of the tensors."""


@dataclasses.dataclass(kw_only=True, eq=False)
class NewStep:
    """A checkpoint that is written where no reader sees it, until it is complete.

    Of several ranks only the first one writes it, but for the tensors that are spread over the ranks.
    """

    access: WriteAccess
    """The right to change the store."""
    index: StepIndex
    name: str
    """The temporary name: the result of `unfinished_name`."""
    record: Record
    """Without the objects, and without the names that the store gives."""
    objects: Mapping[str, EncodedObject]
    """By path."""
    agreement: Agreement
    writer: CollectiveWriter | None
    """That of the ranks; None where this process saves alone."""
    spread: SpreadTensors
    deltas: ModuleDeltas | None
    """Writes modules as differences to the last checkpoint; None writes them whole."""
    shard_bytes: int | None
    """The most bytes of tensors in a file; None for no limit."""
    keep: Keep | None
    """The rules for which checkpoints stay."""
    pin: bool
    """Whether the checkpoint is pinned. It also is where it replaces one that is."""
    begin_seconds: float
    """When the save began, by `time.perf_counter`."""
    new: NewFiles = dataclasses.field(init=False)
    """Writes the files, on the first rank, which has it from `_write` on."""
    last: StepEntry | None = None
    """The last checkpoint that is whole; unchanged files of it are linked."""
    revisions: Sequence[StepEntry] = ()
    """The checkpoints of the same step."""
    by_age: Sequence[StepEntry] = ()
    """The checkpoints of the store, the newest last."""
    last_files: dict[str, LastFiles] = dataclasses.field(default_factory=dict)
    """The files of its objects."""
    files: defaultdict[str, ObjectFiles] = dataclasses.field(default_factory=partial(defaultdict, ObjectFiles))
    entries: dict[str, ObjectEntry] = dataclasses.field(default_factory=dict)
    """The objects that have been written."""

    def begin(self, overwrite: bool) -> None:
        """Locks and lists the store. Raises `TargetExistsError` where it has this step, and does not replace it."""
        store, step = self.access.acquire(), self.record.step
        revisions = self.index.all_revisions(store)
        self.by_age = self.index.by_age(revisions)
        self.revisions = [entry for entry in revisions if entry.place.step == step]
        existing = next((entry for entry in self.by_age if entry.place.step == step), None)
        if existing is not None and not existing.is_damaged:
            _, error, problem = existing.read()
            remedies = {
                "": "overwrite=True replaces it; Store.restore says from which step to go on",
                "not readable": "overwrite=True saves the step again, and leaves this checkpoint as it is",
            }
            elsewhere = "it is another store's, or a newer version's: take it away, or take another directory"
            if not overwrite or problem not in remedies:
                raise TargetExistsError(
                    "there is a checkpoint of this step already",
                    where=existing.place.path,
                    found="" if error is None else error.what,
                    remedy=remedies.get(problem, elsewhere),
                )
        serial = self.index.backend.serial(max((entry.serial or 0 for entry in self.by_age), default=0))
        self.record = replace(self.record, store=store, serial=serial)

    def save(
        self,
        staging_bytes: int = 0,
        blocked_seconds: float | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> SavedStep:
        """Writes the checkpoint, makes it visible and durable, and removes those that are not kept.

        Args:
            staging_bytes: the memory that the state was copied to.
            blocked_seconds: how long `Store.save` has blocked, where it has returned.
            check_cancelled: raises `Stopped` where the save was cancelled, which the other ranks are told.

        Raises:
            WriteFailedError: An I/O error. The checkpoint is not visible then.
            StoreMovedError: The directory was renamed, removed or replaced.
            UnsavableError: The values are too large.
            BackgroundCancelledError: The save was cancelled.
        """
        agreement, step, final_name = self.agreement, self.record.step, name_of(self.record.step, 0)

        def check() -> None:
            if check_cancelled is not None:
                check_cancelled()
            self.access.lock.check_directory()

        def commit() -> tuple[str, int, int, float, tuple[int, ...]]:
            with self._errors():
                path, record = self._commit(files, check)
            seconds = time.perf_counter() - self.begin_seconds
            pruned: tuple[int, ...] = ()
            try:
                if replaced := [entry for entry in self.revisions if entry.is_whole or entry.is_damaged]:
                    self.index.discard(replaced)
                pruned = self.index.prune(self.keep)
            except OSError as error:  # the checkpoint is saved; the next save prunes again
                _logger.warning(
                    "%s: earlier checkpoints that are not kept were not removed: %s", self.index.directory, error
                )
            return path, record.written_bytes, record.nbytes - record.written_bytes, seconds, pruned

        try:
            with agreement.collective():
                with agreement.phase(f"writing step {step}", self._values):
                    if agreement.is_first:
                        self._write(check)
                files = self._write_spread()
                # A commit without an answer may have succeeded, so `cancel` waits for it.
                with nullcontext() if check_cancelled is None else unstoppable():
                    path, written, linked, seconds, pruned = agreement.decided(
                        f"committing step {step}", commit, effect=f"{final_name} is complete, or does not exist"
                    )
        except BaseException:
            if "new" in vars(self):
                self.new.discard()
            raise
        finally:
            # The traceback of an error keeps this object, which would keep the lock of the store and the copied state.
            vars(self).clear()
        blocked_seconds = seconds if blocked_seconds is None else blocked_seconds
        return SavedStep(step, path, written, linked, staging_bytes, blocked_seconds, seconds, tuple(pruned))

    def _values(self) -> list[Digest]:
        """Returns the digest of what all ranks have and the first one has written."""
        alike = {path: of for path, of in self.objects.items() if of.has_one_state and not of.is_spread}
        written = {path: self.files[path].digests for path in alike} if self.agreement.is_first else None
        return [Digest.of_values(replicated_values(alike, written))]

    def _errors(self) -> AbstractContextManager[None]:
        return self.access.errors(name_of(self.record.step, 0))

    def _write(self, check: Callable[[], object]) -> None:
        """Writes the objects that this process holds whole. `check` is called before each of them, and may raise."""
        with self._errors():
            check()
            backend, record = self.index.backend, self.record
            backend.clear(self.index.file_names)
            for entry in reversed(self.by_age):
                entry.read()
                if entry.is_whole:
                    self.last = entry
                    break
            places = [entry.place for entry in self.revisions]
            self.new = backend.new_step(self.name, record.step, record.serial, places)
            for path, encoded in self.objects.items():
                if not encoded.is_spread:
                    check()
                    self.entries[path] = self._write_object(path, encoded)

    def _write_object(self, path: str, encoded: EncodedObject) -> ObjectEntry:
        """Writes an object where readers do not see it yet. Raises `OSError` and `UnsavableError`."""
        state = encoded.state
        if not state.tensors and isinstance(state.tree, dict) and set(state.tree) == {"value"}:
            return ObjectEntry(encoded.kind, value=state.tree["value"])
        if not state.tensors:
            # An index without files is invalid, so the manifest goes into a file without tensors.
            with size_errors(path):
                planned = layout({}, lambda digests: {**SHARD_METADATA, KEY: state.manifest(None, digests)})
            self._write_file(PlannedFile(path, planned))
            files = self.files[path]
            (name,) = files.records
            return ObjectEntry(encoded.kind, name, files.records, written_bytes=files.written_bytes)
        layers = self._patched(path, encoded, Agreement((), 0))
        if layers is None:
            last, index, _ = self.last_object(path)
            live = state.live
            hashes = write_blocks(None, 0, [live[name] for name in last])
            same = {name for name, hashed in zip(last, hashes, strict=True) if last[name] == hashed}
            linked = {*self.link_object(path, same, None)[2]}
            rest = {name: tensor for name, tensor in live.items() if name not in linked}
            layers = NewLayers(rest, same if index else encoded.frozen)
        for file in planned_files(path, layers, splitter(self.shard_bytes)):
            self._write_file(file)
        return self._write_index(path)

    def _patched(self, path: str, encoded: EncodedObject, agreement: Agreement) -> NewLayers | None:
        """Returns what is to be written of a module with differences; None for others."""
        if self.deltas is None or encoded.kind is not Kind.MODULE:
            return None
        writer = self.writer if agreement.is_collective else None
        last, link = partial(self.last_object, path), partial(self.link_object, path)
        return self.deltas.write(path, encoded.state, encoded.frozen, agreement, writer, last, link)

    def last_object(self, path: str) -> LastObject:
        """Returns what the last checkpoint has of an object."""
        with self._errors():
            last = self.last_files[path] = read_last_files(self.index, self.last, path)
        tensors = self.objects[path].state.tensors
        digests = {
            name: last.digests[name]
            for name, tensor in tensors.items()
            if name in last.digests and last.layouts.get(name) == dtype_and_shape(tensor)
        }
        index = os.path.join(last.directory, last.index)[len(self.index.directory) + 1 :]
        takes_patches = (
            self.deltas is not None
            and index != ""
            and last.chains.keys() <= tensors.keys()
            and len(last.saves) + 1 < self.deltas.delta.full_every
        )
        return digests, index, takes_patches

    def link_object(self, path: str, same: Set[str], payloads: Mapping[str, int] | None) -> LinkedObject:
        """Links files of an object, after `last_object`, but for those of tensors with a file that cannot be linked.

        Args:
            path: the path of the object.
            same: the tensors that have not changed.
            payloads: the bytes of the payloads of those that can be patched; None for a step that is to be whole.
        """
        files, last, new = self.files[path], self.last_files[path], self.new
        names = last.kept(self.objects[path].state, same, payloads)
        with self._errors():
            linked = {file for file in last.needed(names) if new.link(os.path.join(last.directory, file))}
            complete = {name for name in names if linked.issuperset(last.chains[name])}
            used = last.needed(complete)
            for file in linked - used:
                new.unlink(file)
        for file in filter(used.__contains__, last.names):
            files.names[file], files.records[file] = last.names[file], last.records[file]
        files.patches |= {file: layer for file, layer in last.patches.items() if file in used}
        files.digests |= {name: digest for name, digest in last.digests.items() if name in complete}
        return self.record.step, self.record.serial, [*files.digests]

    def _write_file(self, file: PlannedFile) -> None:
        """Writes a file with this process alone."""
        path = self.new.begin(file.key)
        self._add(file, path, self.new.write(path, file.layout))

    def _add(self, file: PlannedFile, path: str, written: Written) -> None:
        """Adds a file that was written to those of its object."""
        name, record = self.new.finish(path, file.key, written, file.layout.nbytes)
        files, digests = self.files[file.path], file.digests(written)
        files.names[name], files.records[name] = tuple(digests), record
        files.digests |= digests
        files.written_bytes += record.nbytes
        if file.patches is not None:
            files.patches[name] = file.patches

    def _write_index(self, path: str) -> ObjectEntry:
        """Writes the index of the files of an object. Returns the entry of the object."""
        encoded, files = self.objects[path], self.files[path]
        is_layered = sum(map(len, files.names.values())) > len(files.digests)
        of_layers = chains(files.names, files.patches) if is_layered else {}
        patched = {name for name, chain in of_layers.items() if len(chain) > 1}
        with size_errors(path):
            manifest = encoded.state.manifest(None, files.digests, patched)
            is_whole = self.deltas is not None and encoded.kind is Kind.MODULE and not is_layered
            layers = files.names if is_layered else () if is_whole else None
            text = index_of(files.names, encoded.state.nbytes, manifest, layers)
        index, record = self.new.write_text(f"{path}{SUFFIX}{INDEX_SUFFIX}", text)
        records, nbytes = {**files.records, index: record}, files.written_bytes + record.nbytes
        return ObjectEntry(encoded.kind, index, records, written_bytes=nbytes, patches=len(files.saves))

    def _write_spread(self) -> list[tuple[PlannedFile, str, Written]]:
        """Writes the tensors that are spread over the ranks: a call of all ranks.

        A file is not written again where no rank's part of its tensors has changed since the last checkpoint: the first
        rank links it. Other tensors that have not changed go into files of their own. Each rank knows the digests of
        what it held in the last save of this process, and the first one those that the files have. The first save of a
        process writes all tensors.

        Returns:
            Each file, its path, and its digests, on the first rank. The bytes are durable.

        Raises what `CollectiveWriter.write` raises.
        """
        agreement, writer = self.agreement, self.writer
        objects = {path: encoded for path, encoded in self.objects.items() if encoded.is_spread}
        if writer is None or not objects:
            return []
        from modelstate.distributed.uploading import CollectiveUploader

        layers = {path: self._patched(path, encoded, agreement) for path, encoded in objects.items()}
        with writer.planning():
            parts = {
                key: part
                for path, encoded in objects.items()
                if layers[path] is None
                for key, part in _parts(path, encoded.state)
            }
        unchanged = self._unchanged(parts)
        known = {key: digest for key, digest in self.spread.digests.items() if key in unchanged}
        linked: set[_Key] = set()
        if unchanged:
            linked = {(path, name) for path, name in agreement.decided(CHOOSING, lambda: self._link_unchanged(known))}
        split: _Split = splitter(self.shard_bytes)
        if isinstance(writer, CollectiveUploader) and self.shard_bytes is None:
            split = writer.shards
        planned: list[PlannedFile] = []
        with writer.planning():
            for path, encoded in objects.items():
                new = layers[path]
                if new is None:
                    tensors = encoded.state.tensors
                    rest = {name: tensor for name, tensor in tensors.items() if (path, name) not in linked}
                    constant = {name for name in rest if (path, name) in unchanged} if unchanged else encoded.frozen
                    new = NewLayers(rest, constant)
                planned += planned_files(path, new, split)
        layouts, paths = [file.layout for file in planned], list[str]()

        def compared() -> dict[str, object]:
            return {path: encoded.state.values(path) for path, encoded in objects.items()}

        def begin() -> list[str]:
            paths.extend(self.new.begin(file.key) for file in planned)
            return paths

        def outputs() -> Generator[Output]:
            for path in begin():
                with new_file(path) as output:
                    yield output

        if isinstance(writer, CollectiveUploader):
            written = writer.upload(layouts, begin, compared)
        else:
            written = writer.write(layouts, outputs, compared)
        files = [*zip(planned, paths, written, strict=True)] if agreement.is_first else []
        digests = {key: digest for key, digest in known.items() if key in linked}
        digests |= {(file.path, name): of for file, _, w in files for name, of in file.digests(w).items()}
        self.spread.save, self.spread.parts, self.spread.digests = self.name, parts, digests
        return files

    def _unchanged(self, parts: Mapping[_Key, object]) -> set[_Key]:
        """Returns the tensors that no rank has changed; none where the ranks have no last save in common."""
        changes = "".join("01"[self.spread.parts.get(key) != part] for key, part in parts.items())
        own = f"{self.spread.save} {int(changes or '0', 2):x}"
        of_ranks = [text.rpartition(" ") for text in self.agreement.texts("comparing tensors", own)]
        if {save for save, _, _ in of_ranks} != {self.spread.save} or not self.spread.save:
            return set()
        changed = reduce(or_, (int(bits, 16) for _, _, bits in of_ranks))
        return {key for index, key in enumerate(reversed([*parts])) if not changed >> index & 1}

    def _link_unchanged(self, digests: Mapping[_Key, str]) -> list[_Key]:
        """Links the files of the last checkpoint all of whose tensors have these digests. Returns the tensors."""
        linked = []
        for path in dict.fromkeys(path for path, _ in digests):
            last, _, _ = self.last_object(path)
            same = {name for name, digest in last.items() if digests.get((path, name)) == digest}
            linked += [(path, name) for name in self.link_object(path, same, None)[2]]
        return linked

    def _commit(
        self, spread: Iterable[tuple[PlannedFile, str, Written]], check: Callable[[], object]
    ) -> tuple[str, Record]:
        """Makes the checkpoint visible and durable, with the files that several ranks have written.

        `check` is called right before the checkpoint becomes visible; it may raise. Returns the path, and the record.
        """
        for written in spread:
            self._add(*written)
        entries = {
            path: replace(self._write_index(path) if of.is_spread else self.entries[path], ranks=of.ranks)
            for path, of in self.objects.items()
        }
        of_step = replace(self.record, entries=entries)
        text = of_step.text()
        if len(text) > MAX_RECORD_BYTES:
            raise unsavable(
                "the values that are no tensors", f"{len(text):,} bytes of them, above {MAX_RECORD_BYTES:,}"
            )
        pinned = self.pin or any(entry.is_pinned for entry in self.revisions)
        path = self.new.commit(text, {*of_step.files}, pinned, check)
        self.index.note_whole(path)
        return path, of_step


def splitter(shard_bytes: int | None) -> _Split:
    """Returns a function that groups tensors into files of at most so many bytes; None stands for one file."""
    return lambda tensors: [tensors] if shard_bytes is None else in_shards(tensors, shard_bytes)


def _parts(path: str, state: SerializedState) -> Iterator[tuple[_Key, object]]:
    """Yields the layout of each tensor of an object, and the digest of what this rank holds of it."""
    hashes = write_blocks(None, 0, [local_part(tensor) for tensor in state.tensors.values()])
    for (name, tensor), hashed in zip(state.tensors.items(), hashes, strict=True):
        spread = (tensor.placements, tensor.mesh) if isinstance(tensor, ShardedTensor) else ()
        yield (path, name), (tensor.dtype, tuple(tensor.shape), *spread, parts_of(tensor), digest(hashed.encode()))


def stage(buffer: StagingBuffer, states: Sequence[SerializedState]) -> None:
    """Replaces the tensors of states by copies in a buffer. The copies before are overwritten.

    Raises torch's error where there is not enough memory; then no tensor is replaced.
    """
    copies = iter(buffer.copies(local_part(tensor) for state in states for tensor in state.tensors.values()))
    for state in states:
        state.tensors = {
            name: dataclasses.replace(tensor, local=next(copies)) if isinstance(tensor, ShardedTensor) else next(copies)
            for name, tensor in state.tensors.items()
        }


def local_part(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor of a live state."""
    held = tensor.local if isinstance(tensor, ShardedTensor) else tensor
    assert isinstance(held, torch.Tensor)
    return held


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
