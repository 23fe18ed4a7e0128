"""Writes a checkpoint of a store, complete and durable, also in the background.

Each file holds tensors and nothing that changes with the step, and its name has a digest of its content. A file of the
checkpoint before is not written again where none of its tensors has changed: the new checkpoint gets a hard link to
it, and stays complete when the old one is removed. Tensors that change and tensors that do not go into different files.
"""

import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from modelstate.background import AtExit, BackgroundTask
from modelstate.distributed.agreement import Agreement, Digest
from modelstate.distributed.writing import COMPARING, CollectiveWriter, ShardedTensor
from modelstate.errors import OpenError, TargetExistsError
from modelstate.formats import safetensors, sharded
from modelstate.formats.block_writer import LazyTensor, write_blocks
from modelstate.formats.manifest import KEY, digest
from modelstate.formats.safetensors import Layout, layout, nbytes_of, parts_of
from modelstate.formats.sharded import INDEX_SUFFIX, SHARD_METADATA, SUFFIX, in_shards, index_of
from modelstate.io import system
from modelstate.io.atomic import Output, new_file
from modelstate.store.directory import StepEntry, StepIndex
from modelstate.store.medium import NewFiles, record_of
from modelstate.store.record import MAX_RECORD_BYTES, FileRecord, ObjectEntry, Record
from modelstate.store.snapshot import Job, local_part, size_errors, unsavable
from modelstate.text_format import size


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint that is complete and durable: the result of `Store.save`.

    Examples:
        >>> saved = store.save(1000, {"model": model})
        >>> saved.step, saved.pruned
        (1000, ())
    """

    step: int
    path: str
    """The directory of the checkpoint."""
    bytes_written: int
    bytes_linked: int
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
        linked = f", {size(self.bytes_linked)} linked" if self.bytes_linked else ""
        return f"step {self.step}: {size(self.bytes_written)} written{linked} in {self.seconds:.3f} s, {self.path}"


class PendingSave(BackgroundTask[SavedStep]):
    """A save that runs in a thread: the result of `Store.save(background=True)`.

    Attributes:
        step: the number of the checkpoint.
        staging_bytes: the memory that the state was copied to.

    Examples:
        >>> pending = store.save(1000, {"model": model}, background=True)
        >>> pending.result().step
        1000
    """

    def __init__(self, step: int, staging_bytes: int, write: Callable[[Callable[[], None]], SavedStep]) -> None:
        """Takes a function that writes; its argument raises where the save was cancelled."""
        super().__init__(
            lambda task: write(task.check),
            kind="save",
            where=f"step {step}",
            at_exit=AtExit.FINISH,
            failure=f"step {step} was not saved",
        )
        self.step, self.staging_bytes = step, staging_bytes


class NewStep:
    """A checkpoint that is written where no reader sees it, until it is complete.

    Of several ranks only the first one calls the methods; the others have nothing to discard.

    Args:
        index: the checkpoints of the store.
        name: the temporary name: the result of `unfinished_name`.
        record: the record of the checkpoint, without its objects, and without the names that the store gives.
        job: the objects.
        shard_bytes: the most bytes of tensors in a file; None for no limit.
    """

    def __init__(self, index: StepIndex, name: str, record: Record, job: Job, shard_bytes: int | None) -> None:
        self.index, self.name, self.record, self.job = index, name, record, job
        self._shard_bytes = shard_bytes
        self._new: NewFiles | None = None
        self._before: StepEntry | None = None
        """The last checkpoint; unchanged files of it are linked."""
        self._revisions: list[StepEntry] = []
        """The checkpoints of the same step."""
        self._by_age: list[StepEntry] = []
        """The checkpoints of the store, the newest last."""
        self._is_pinned = job.pin
        self._objects: dict[str, tuple[ObjectEntry, _Files]] = {}
        self._links = set[str]()

    def begin(self, overwrite: bool) -> None:
        """Lists the store. Raises `TargetExistsError` where it has a checkpoint of this step that is not replaced."""
        revisions = self.index.all_revisions()
        self._by_age = self.index.by_age(revisions)
        self._revisions = [entry for entry in revisions if entry.place.step == self.record.step]
        existing = next((entry for entry in self._by_age if entry.place.step == self.record.step), None)
        if existing is None or existing.is_damaged or (overwrite and existing.is_whole):
            return
        raise TargetExistsError(
            "there is a checkpoint of this step already",
            where=existing.place.path,
            found="" if existing.error is None else existing.error.what,
            remedy="overwrite=True replaces it; Store.restore says from which step to go on"
            if existing.is_whole
            else "it is another store's, or a newer version's: take it away, or take another directory",
        )

    def write(self, check: Callable[[], object]) -> None:
        """Writes the objects that this process holds whole.

        `check` is called before each object, and may raise. Raises `OSError` and `UnsavableError`, too.
        """
        medium = self.index.medium
        medium.clear(self.index.read_all)
        self._before = next((entry for entry in reversed(self._by_age) if entry.is_whole and entry.record), None)
        self._is_pinned |= any(entry.is_pinned for entry in self._revisions)
        serial = medium.serial(max((entry.serial or 0 for entry in self._by_age), default=0))
        self.record = replace(self.record, store=self.index.ensure_name(), serial=serial)
        places = [entry.place for entry in self._revisions]
        self._new = new = medium.new_step(self.name, self.record.step, serial, places)
        spread = self.job.spread
        for path in self.job.states:
            check()
            if path not in spread:
                self._objects[path] = _write_object(new, path, self.job, self._before, self._shard_bytes, self.index)

    def linkable(self) -> "dict[str, _Linkable]":
        """Returns what can be linked of the last checkpoint, for the objects that several ranks write."""
        found = {path: _linkable(self._before, path, self.index) for path in self.job.spread}
        return {path: linkable for path, linkable in found.items() if linkable is not None}

    def link(self, file: "SpreadFile") -> bool:
        """Links a file of the last checkpoint, where it is there as it was written. Returns whether it did."""
        before = self._before
        if before is None or before.record is None or file.key not in before.record.entries:
            return False
        record = before.record.entries[file.key].files.get(file.name)
        path = os.path.join(before.place.files, file.name)
        new = self._new
        if new is None or record is None or not _is_untouched(self.index, path, record) or not new.link(path):
            return False
        self._links.add(file.name)
        return True

    def commit(self, files: "Sequence[SpreadFile]", check: Callable[[], object]) -> tuple[str, int, int]:
        """Makes the checkpoint visible and durable.

        Args:
            files: the files of the objects that several ranks have written.
            check: called right before the checkpoint becomes visible; it may raise.

        Returns:
            Its path, the bytes that were written, and those of linked files.

        Raises:
            OSError: An I/O error. The checkpoint is not visible then.
            UnsavableError: The values are too large.
        """
        assert self._new is not None
        self._add(self._new, files)
        entries = {path: replace(self._objects[path][0], ranks=ranks) for path, ranks in self.job.ranks.items()}
        text = replace(self.record, entries=entries).text()
        if len(text) > MAX_RECORD_BYTES:
            raise unsavable(
                "the values that are no tensors", f"{len(text):,} bytes of them, above {MAX_RECORD_BYTES:,}"
            )
        path = self._new.commit(text, self._is_pinned, check)
        self.index.note_whole(path)
        of_objects = [of_object for _, of_object in self._objects.values()]
        return path, sum(one.bytes_written for one in of_objects), sum(one.bytes_linked for one in of_objects)

    def _add(self, new: NewFiles, files: "Sequence[SpreadFile]") -> None:
        """Adds the objects that several ranks have written: names new files, and removes links that are not needed."""
        for name in self._links.difference(file.name for file in files if not file.is_new):
            system.unlink(os.path.join(new.path, name))
        of_objects = {path: _Files() for path in self.job.spread}
        for file in files:
            of_object, path = of_objects[file.key], os.path.join(new.path, file.name)
            if file.is_new:
                system.replace(os.path.join(new.path, file.unnamed), path)
                of_object.bytes_written += file.nbytes
            else:
                of_object.bytes_linked += file.nbytes
            of_object.tensors[file.name], of_object.records[file.name] = tuple(file.digests), record_of(path)
            of_object.digests |= file.digests
        for path, of_object in of_objects.items():
            self._objects[path] = _finish_object(new, path, self.job, of_object), of_object

    @property
    def replaced(self) -> list[StepEntry]:
        """The checkpoints of the same step that this one replaces."""
        return [entry for entry in self._revisions if entry.is_whole or entry.is_damaged]

    def discard(self) -> None:
        """Removes what was written, unless the checkpoint has been committed."""
        if self._new is not None:
            self._new.discard()


_Tensor = TypeVar("_Tensor", torch.Tensor, torch.Tensor | LazyTensor)


@dataclass(slots=True)
class _Files:
    """The files of an object that is being written."""

    tensors: dict[str, Sequence[str]] = field(default_factory=dict)
    """The names of the tensors in each file, by the file's name."""
    digests: dict[str, str] = field(default_factory=dict)
    """The digest of each tensor."""
    records: dict[str, FileRecord] = field(default_factory=dict)
    bytes_written: int = 0
    bytes_linked: int = 0


def _write_object(
    new: NewFiles, path: str, job: Job, before: StepEntry | None, shard_bytes: int | None, index: StepIndex
) -> tuple[ObjectEntry, _Files]:
    """Writes an object where readers do not see it yet. Raises `OSError` and `UnsavableError`."""
    state, kind, files = job.states[path], job.kinds[path], _Files()
    if not state.tensors and isinstance(state.tree, dict) and set(state.tree) == {"value"}:
        return ObjectEntry(kind, value=state.tree["value"]), files
    with size_errors(path):
        if not state.tensors:
            # An index without files is invalid, so the manifest goes into a file without tensors.
            planned = layout({}, lambda digests: {**SHARD_METADATA, KEY: state.manifest(None, digests)})
            name, _, record = new.write_tensors(path, planned)
            files.bytes_written += planned.nbytes
            return ObjectEntry(kind, name, {name: record}), files
        unwritten: dict[str, torch.Tensor] = state.live
        constant: Set[str] = job.frozen[path]
        linkable = _linkable(before, path, index)
        if linkable is not None:
            # The tensors that have not changed since the checkpoint before go into files of their own.
            constant = _link_unchanged(new, files, unwritten, linkable)
        for group in _groups(unwritten, constant, shard_bytes):
            planned = layout(group, lambda _: SHARD_METADATA)
            name, written, record = new.write_tensors(path, planned)
            files.records[name] = record
            files.tensors[name] = tuple(name for name, _ in planned.tensors)
            files.digests |= written.digests
            files.bytes_written += planned.nbytes
    return _finish_object(new, path, job, files), files


def _groups(
    tensors: Mapping[str, _Tensor], constant: Set[str], shard_bytes: int | None
) -> Iterator[Mapping[str, _Tensor]]:
    """Yields the tensors of each file. Those that are `constant` are in files of their own."""
    for is_constant in (True, False):
        group = {name: tensor for name, tensor in tensors.items() if (name in constant) == is_constant}
        if group:
            yield from in_shards(group, shard_bytes) if shard_bytes else [group]


def _finish_object(new: NewFiles, path: str, job: Job, files: _Files) -> ObjectEntry:
    """Writes the index of the files of an object."""
    state = job.states[path]
    with size_errors(path):
        total = sum(map(nbytes_of, state.tensors.values()))
        text = index_of(files.tensors, total, state.manifest(None, files.digests))
    index, record = new.write_text(f"{path}{SUFFIX}{INDEX_SUFFIX}", text)
    files.records[index] = record
    files.bytes_written += len(text)
    return ObjectEntry(job.kinds[path], index, files.records)


_Key = tuple[str, str]
"""The path of an object, and the name of a tensor."""


@dataclass(frozen=True, slots=True)
class SpreadFile:
    """A file that several ranks have written."""

    key: str
    """The path of the object."""
    tensors: tuple[str, ...]
    """The names of its tensors."""
    nbytes: int
    unnamed: str = ""
    """The name of the file while it is written."""
    name: str = ""
    """The name of the file, by its content; empty on other ranks than the first one."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Those of the tensors; none on other ranks than the first one."""
    is_new: bool = True
    """Whether the file was written for this checkpoint."""

    @property
    def keys(self) -> set[_Key]:
        return {(self.key, name) for name in self.tensors}


class SpreadWriter:
    """Writes the objects whose tensors are spread over the ranks.

    A file is not written again where no rank's part of its tensors has changed since the last checkpoint: the first
    rank links it. Other tensors that have not changed go into files of their own.

    Each rank knows the digests of what it held in the last save of this process. In the first save the first rank has
    those of the last checkpoint, by the parts that ranks have written. The ranks compute the digests of the same parts,
    for which short rows are exchanged. On another number of ranks or in another layout the parts are other ones, and
    the tensors are written.
    """

    def __init__(self) -> None:
        self._files: Sequence[SpreadFile] = ()
        """Those of the last save."""
        self._parts: Mapping[_Key, object] = {}
        """For each tensor of the last save its layout, and the digest of what this rank holds."""
        self._save = ""
        """The last save: its temporary name, which no other save has."""

    def write(
        self,
        directory: str,
        job: Job,
        agreement: Agreement,
        writer: CollectiveWriter,
        shard_bytes: int | None,
        new: NewStep | None,
    ) -> Sequence[SpreadFile]:
        """Writes the files: a call of all ranks.

        Args:
            directory: the directory of the new step, as this rank names it.
            job: the objects.
            agreement: the ranks.
            writer: their writer.
            shard_bytes: the most bytes of tensors in a file; None for no limit.
            new: the new step, on the first rank.

        Returns:
            The files that were written, whose bytes are durable, and those that are linked.

        Raises what `CollectiveWriter.write` raises.
        """
        layouts: list[Layout] = []
        files: list[SpreadFile] = []

        def compared() -> list[object]:
            return [job.states[path].manifest(None, {}) for path in job.spread]

        with writer.planning():
            parts = {key: part for path in job.spread for key, part in _parts(path, job)}
        last, unchanged = self._files, self._unchanged(parts, agreement, new)
        if unchanged is None:
            last, unchanged = _compared_with_the_disk(job, agreement, writer, new, compared)
        linked = [replace(file, is_new=False) for file in last if file.keys <= unchanged]
        in_links = {key for file in linked for key in file.keys}
        saved = {file.key for file in last}
        with writer.planning():
            for path in job.spread:
                tensors = job.states[path].tensors
                rest = {name: tensor for name, tensor in tensors.items() if (path, name) not in in_links}
                constant: Set[str] = job.frozen[path]
                if path in saved:
                    same = {name for name in rest if (path, name) in unchanged}
                    # Nothing is the same as in a checkpoint of another layout. What is frozen still gets files of its
                    # own, which the next save links.
                    constant = same if last is self._files else same | constant
                for group in _groups(rest, constant, shard_bytes):
                    with size_errors(path):
                        layouts.append(layout(group, lambda _: SHARD_METADATA))
                    unnamed = f".{len(files)}{SUFFIX}"  # no object has such a name
                    files.append(SpreadFile(path, tuple(group), layouts[-1].nbytes, unnamed))

        def outputs() -> Generator[Output]:
            for file in files:
                with new_file(os.path.join(directory, file.unnamed)) as output:
                    yield output

        written = writer.write(layouts, outputs, compared)
        if agreement.is_first:
            files = [
                replace(file, name=f"{file.key}-{of_file.content[:16]}{SUFFIX}", digests=of_file.digests)
                for file, of_file in zip(files, written, strict=True)
            ]
        self._files, self._parts, self._save = [*linked, *files], parts, os.path.basename(directory)
        return self._files

    def _unchanged(self, parts: Mapping[_Key, object], agreement: Agreement, new: NewStep | None) -> Set[_Key] | None:
        """Returns the tensors that no rank has changed; None where the ranks have no last save in common."""
        same = {key for key, part in parts.items() if self._parts.get(key) == part}
        same -= _not_linked(self._files, same, new)
        save = Digest.of("", "", [self._save]).number
        numbers = [save, -save, *(key not in same for key in parts)]
        reduced = agreement.maximum(COMPARING, numbers)
        if not self._save or not reduced or reduced[0] != -reduced[1]:
            return None
        return {key for key, is_changed in zip(parts, reduced[2:], strict=True) if not is_changed}


def _not_linked(files: Iterable[SpreadFile], same: Set[_Key], new: NewStep | None) -> set[_Key]:
    """Links the files whose tensors are all the same, on the first rank. Returns the tensors for which it could not."""
    return {key for file in files if new is not None and file.keys <= same and not new.link(file) for key in file.keys}


def _compared_with_the_disk(
    job: Job,
    agreement: Agreement,
    writer: CollectiveWriter,
    new: NewStep | None,
    compared: Callable[[], Sequence[object]],
) -> tuple[Sequence[SpreadFile], Set[_Key]]:
    """Returns the files of the last checkpoint, and tensors of them that are the same now: a call of all ranks.

    First the smallest tensor of each file is compared: where training has changed all of them, the others need not be.
    """
    linkable: dict[str, _Linkable] = {}
    files: list[SpreadFile] = []

    def smallest(file: SpreadFile) -> str:
        tensors = job.states[file.key].tensors
        return min(file.tensors, key=lambda name: nbytes_of(tensors[name]))

    def look() -> list[_Key]:
        if new is not None:
            linkable.update(new.linkable())
        for path, before in linkable.items():
            tensors = job.states[path].tensors
            for file in before.as_spread(path):
                if all(name in tensors and before.is_alike(name, tensors[name]) for name in file.tensors):
                    files.append(file)
        return [(file.key, smallest(file)) for file in files]

    def same(keys: Sequence[Sequence[str]]) -> set[_Key]:
        """Returns the tensors among `keys` that are the same; on the first rank only."""
        chosen = {(path, name) for path, name in keys}
        with writer.planning():
            tensors = {path: [*job.states[path].tensors.items()] for path in job.spread}
            tensors = {path: [item for item in of if (path, item[0]) in chosen] for path, of in tensors.items()}
        found = set[_Key]()
        for path, hashes in writer.digests(tensors, compared).items() if chosen else ():
            digests = {name: value for (name, _), value in zip(tensors[path], hashes, strict=True)}
            if path in linkable:
                found |= {(path, name) for name in linkable[path].unchanged(dict(tensors[path]), digests)}
        return found

    probes = same(agreement.decided(COMPARING, look))
    keys = agreement.decided(
        COMPARING, lambda: [key for file in files if (file.key, smallest(file)) in probes for key in file.keys]
    )
    unchanged = same(keys)

    def link() -> tuple[list[tuple[str, tuple[str, ...], int]], list[_Key]]:
        left = unchanged - _not_linked(files, unchanged, new)
        return [(file.key, file.tensors, file.nbytes) for file in files], [*left]

    of_all, of_first = agreement.decided(COMPARING, link)
    files = files or [SpreadFile(key, tuple(names), nbytes) for key, names, nbytes in of_all]
    return files, {(path, name) for path, name in of_first}


def _parts(path: str, job: Job) -> Iterator[tuple[_Key, object]]:
    """Yields the layout of each tensor of an object, and the digest of what this rank holds of it."""
    tensors = job.states[path].tensors
    hashes = write_blocks(None, 0, [local_part(tensor) for tensor in tensors.values()])
    for (name, tensor), hashed in zip(tensors.items(), hashes, strict=True):
        spread = (tensor.placements, tensor.mesh) if isinstance(tensor, ShardedTensor) else ()
        yield (path, name), (tensor.dtype, tuple(tensor.shape), *spread, parts_of(tensor), digest(hashed.encode()))


_DtypeAndShape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Linkable:
    """The files of an object in the checkpoint before, which the new one may link to."""

    files: Mapping[str, tuple[str, ...]]
    """The names of the tensors in each file, by its path."""
    records: Mapping[str, FileRecord]
    """The record of each file, by its path."""
    layouts: Mapping[str, _DtypeAndShape]
    """The dtype and shape of each tensor."""
    digests: Mapping[str, str]
    """The digest of each tensor."""

    def unchanged(self, tensors: Mapping[str, torch.Tensor | LazyTensor], hashes: Mapping[str, str]) -> set[str]:
        """Returns which of the tensors, with their digests, are the same."""
        return {
            name
            for name, value in hashes.items()
            if self.is_alike(name, tensors[name]) and self.digests.get(name) == value
        }

    def is_alike(self, name: str, tensor: torch.Tensor | LazyTensor) -> bool:
        """Whether there is a tensor of this name, dtype and shape."""
        return self.layouts.get(name) == (tensor.dtype, tuple(tensor.shape))

    def as_spread(self, key: str) -> Iterator[SpreadFile]:
        """Yields the files, for the object at a path that several ranks write."""
        for path, names in self.files.items():
            digests = {name: self.digests.get(name, "") for name in names}
            yield SpreadFile(key, names, self.records[path].nbytes, name=os.path.basename(path), digests=digests)


def _is_untouched(index: StepIndex, path: str, record: FileRecord) -> bool:
    """Whether a file can be linked: it has not changed since it was written, and no damaged checkpoint has it."""
    return index.medium.file_key(path) not in index.doubtful and index.medium.is_untouched(path, record)


def _linkable(before: StepEntry | None, key: str, index: StepIndex) -> _Linkable | None:
    """Returns the files of an object in the checkpoint before that can be linked.

    None where it is not there, or cannot be read: all files are written then.
    """
    entry = before.record.entries.get(key) if before is not None and before.record is not None else None
    if before is None or entry is None or not entry.index:
        return None
    directory = before.place.files
    try:
        weight_map, metadata = sharded.read_index(os.path.join(directory, entry.index))
        digests = json.loads(metadata[KEY])["digests"]["tensors"]
        layouts: dict[str, _DtypeAndShape] = {}
        files, records = {}, {}
        for name in dict.fromkeys(weight_map.values()):
            path = os.path.join(directory, name)
            record = entry.files.get(name)
            if record is not None and _is_untouched(index, path, record):
                tensors = safetensors.read(path).tree
                assert isinstance(tensors, Mapping)
                layouts |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
                files[path], records[path] = tuple(tensors), record
    except (OpenError, OSError, ValueError, KeyError, TypeError):
        return None
    return _Linkable(files, records, layouts, digests)


def _link_unchanged(new: NewFiles, files: _Files, unwritten: dict[str, torch.Tensor], before: _Linkable) -> set[str]:
    """Links files whose tensors have not changed, and removes their tensors from `unwritten`.

    Returns the names of the other tensors that have not changed.
    """
    comparable = {name: tensor for name, tensor in unwritten.items() if before.is_alike(name, tensor)}
    digests = dict(zip(comparable, write_blocks(None, 0, list(comparable.values())), strict=True))
    unchanged = before.unchanged(comparable, digests)
    for path, names in before.files.items():
        if not unchanged.issuperset(names):
            continue
        if not new.link(path):
            continue  # it is written
        name = os.path.basename(path)
        files.tensors[name], files.records[name] = names, before.records[path]
        files.bytes_linked += before.records[path].nbytes
        for tensor_name in names:
            files.digests[tensor_name] = digests[tensor_name]
            del unwritten[tensor_name]
    return unchanged & set(unwritten)
