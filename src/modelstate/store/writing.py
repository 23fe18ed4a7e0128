"""Writes a checkpoint into a store's directory, complete and durable, and removes checkpoints.

Each file holds tensors and nothing that changes with the step, and its name has a digest of its content. A file of the
checkpoint before is not written again where none of its tensors has changed: the new checkpoint gets a hard link to
it, and stays complete when the old one is removed. Tensors that change and tensors that do not go into different files.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from modelstate.errors import ModelStateError, OpenError, UnsavableError
from modelstate.formats import safetensors, sharded
from modelstate.formats.block_writer import digests_of
from modelstate.formats.manifest import KEY, check_size
from modelstate.formats.safetensors import layout, nbytes_of, write
from modelstate.formats.serialize import SerializedState
from modelstate.formats.sharded import INDEX_SUFFIX, SHARD_METADATA, SUFFIX, in_shards, index_of
from modelstate.io import write_system
from modelstate.io.atomic import new_file, sync_directory
from modelstate.io.digests import digest
from modelstate.io.files import SourceFile
from modelstate.objects.objects import Kind
from modelstate.store.records import (
    MAX_BYTES,
    PIN_FILE,
    RECORD_FILE,
    Entry,
    FileRecord,
    Place,
    Record,
    name_of,
    unfinished,
    unfinished_name,
)
from modelstate.store.step_index import StepEntry

_Layout = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Before:
    """The files of an object in the checkpoint before, which the new one may link to."""

    files: Mapping[str, tuple[str, ...]]
    """The names of the tensors in each file, by its path."""
    records: Mapping[str, FileRecord]
    """The record of each file, by its path."""
    layouts: Mapping[str, _Layout]
    """The dtype and shape of each tensor."""
    digests: Mapping[str, str]
    """The digest of each tensor."""


@dataclass(slots=True)
class Written:
    """The entry of an object that has been written, and its cost."""

    entry: Entry
    bytes_written: int = 0
    bytes_linked: int = 0


@dataclass(slots=True)
class _Files:
    """The files of an object that is being written."""

    directory: str
    tensors: dict[str, Sequence[str]] = field(default_factory=dict)
    """The names of the tensors in each file, by the file's name."""
    digests: dict[str, str] = field(default_factory=dict)
    """The digest of each tensor."""
    linked_records: dict[str, FileRecord] = field(default_factory=dict)
    bytes_written: int = 0
    bytes_linked: int = 0


def before_of(directory: str, entry: Entry | None, doubtful: Set[tuple[int, int]] = frozenset()) -> Before | None:
    """Returns the files of an object that can be linked; None where there are none.

    They are those that have not changed since they were written, and whose device and inode are not `doubtful`.
    """
    if entry is None or not entry.index:
        return None
    try:
        weight_map, metadata = sharded.read_index(os.path.join(directory, entry.index))
        digests = json.loads(metadata[KEY])["digests"]["tensors"]
        layouts: dict[str, _Layout] = {}
        files, records = {}, {}
        for name in dict.fromkeys(weight_map.values()):
            path = os.path.join(directory, name)
            record = entry.files.get(name)
            if record is not None and _is_untouched(path, record, doubtful):
                tensors = safetensors.read(path).tree
                assert isinstance(tensors, Mapping)
                layouts |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
                files[path], records[path] = tuple(tensors), record
    except (OpenError, OSError, ValueError, KeyError, TypeError):
        return None  # all files are written
    return Before(files, records, layouts, digests)


def _is_untouched(path: str, record: FileRecord, doubtful: Set[tuple[int, int]]) -> bool:
    status = os.stat(path, follow_symlinks=False)
    if (status.st_dev, status.st_ino) in doubtful:
        return False
    if (status.st_size, status.st_mtime_ns) != (record.nbytes, record.mtime_ns):
        return False
    with SourceFile(path) as file:
        return digest(file.read(0, record.head_bytes, "its header")) == record.head


def write_entry(
    directory: str,
    key: str,
    kind: Kind,
    state: SerializedState,
    *,
    frozen: Set[str] = frozenset(),
    before: Before | None = None,
    shard_bytes: int | None = None,
) -> Written:
    """Writes an object into a directory that is not visible to readers yet.

    `frozen` has the names of tensors that are not expected to change. It decides the files of a first checkpoint;
    later, the tensors that have not changed since the one before go into files of their own.
    Raises `OSError`, and `ValueError` for a header that is too large.
    """
    files = _Files(directory)
    if not state.tensors:
        # An index without files is invalid, so the manifest goes into a file without tensors.
        planned = layout({}, lambda digests: {**SHARD_METADATA, KEY: state.manifest(None, digests)})
        name = f"{key}{SUFFIX}"
        with new_file(os.path.join(directory, name)) as output:
            write(output, planned)
        return Written(Entry(kind, name, {name: _record(directory, name)}), planned.nbytes)
    unwritten = state.live
    if before is not None:
        frozen = _link_unchanged(files, unwritten, before)
    for is_frozen in (True, False):
        group = {name: tensor for name, tensor in unwritten.items() if (name in frozen) == is_frozen}
        for shard in in_shards(group, shard_bytes) if group and shard_bytes else [group]:
            if shard:
                _write_file(files, key, shard)
    total = sum(map(nbytes_of, state.tensors.values()))
    index = f"{key}{SUFFIX}{INDEX_SUFFIX}"
    with new_file(os.path.join(directory, index)) as output:
        output.append(index_of(files.tensors, total, state.manifest(None, files.digests)))
        files.bytes_written += output.nbytes
    records = {name: files.linked_records.get(name) or _record(directory, name) for name in (*files.tensors, index)}
    return Written(Entry(kind, index, records), files.bytes_written, files.bytes_linked)


def _link_unchanged(files: _Files, unwritten: dict[str, torch.Tensor], before: Before) -> set[str]:
    """Links files whose tensors have not changed, and removes their tensors from `unwritten`.

    Returns the names of the other tensors that have not changed.
    """
    comparable = {
        name: tensor
        for name, tensor in unwritten.items()
        if before.layouts.get(name) == (tensor.dtype, tuple(tensor.shape))
    }
    digests = dict(zip(comparable, digests_of(list(comparable.values())), strict=True))
    unchanged = {name for name, value in digests.items() if before.digests.get(name) == value}
    for path, names in before.files.items():
        if not unchanged.issuperset(names):
            continue
        name = os.path.basename(path)
        try:
            write_system.link(path, os.path.join(files.directory, name))
        except OSError:
            continue  # the file system has no links, or the file has too many: it is written
        files.tensors[name], files.linked_records[name] = names, before.records[path]
        files.bytes_linked += os.stat(path).st_size
        for tensor_name in names:
            files.digests[tensor_name] = digests[tensor_name]
            del unwritten[tensor_name]
    return unchanged & set(unwritten)


def _write_file(files: _Files, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
    planned = layout(tensors, lambda _: SHARD_METADATA)
    unnamed = os.path.join(files.directory, f".{len(files.tensors)}{SUFFIX}")  # no object has such a name
    with new_file(unnamed) as output:
        written = write(output, planned)
    name = f"{key}-{written.content[:16]}{SUFFIX}"
    write_system.replace(unnamed, os.path.join(files.directory, name))
    files.tensors[name] = tuple(tensors)
    files.digests |= written.digests
    files.bytes_written += planned.nbytes


def _record(directory: str, name: str) -> FileRecord:
    path = os.path.join(directory, name)
    status = os.stat(path)
    with SourceFile(path) as file:
        nbytes = file.nbytes
        if not name.endswith(INDEX_SUFFIX):
            nbytes = 8 + int.from_bytes(file.read(0, 8, "the length of its header"), "little")
        head = file.read(0, nbytes, "its header")
    return FileRecord(status.st_size, status.st_mtime_ns, len(head), digest(head))


def remove_directory(path: str) -> None:
    """Removes a directory of a store with its files, and ignores errors; of a symbolic link only the link."""
    with suppress(OSError):
        if os.path.islink(path):
            write_system.unlink(path)
            return
        for name in os.listdir(path):
            with suppress(OSError):
                write_system.unlink(os.path.join(path, name))
        write_system.rmdir(path)


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint that is about to be written. The mappings go by the paths of the objects."""

    step: int
    kinds: Mapping[str, Kind]
    states: Mapping[str, SerializedState]
    frozen: Mapping[str, frozenset[str]]
    """For each module, the names of parameters that training does not change."""
    metrics: Mapping[str, float]
    pin: bool
    begin_seconds: float
    """When the save began, by `time.perf_counter`."""
    time: float

    def check(self) -> None:
        """Raises `UnsavableError` for values that are too large to be read again."""
        for path, state in self.states.items():
            with _size_errors(path):
                check_size(state.manifest(None, {}))


def publish(
    directory: str,
    store: str,
    serial: int,
    job: Job,
    revisions: list[StepEntry],
    before: StepEntry | None,
    shard_bytes: int | None,
    doubtful: Set[tuple[int, int]] = frozenset(),
    check: Callable[[], object] = lambda: None,
) -> tuple[str, list[Written]]:
    """Writes a checkpoint under a temporary name and renames it, so that it is complete where it is visible.

    Args:
        directory: the directory of the store.
        store: the name of the store.
        serial: the number of this save, higher than that of any checkpoint in the store.
        job: the checkpoint.
        revisions: the checkpoints of the same step.
        before: the last checkpoint; unchanged files of it are linked.
        shard_bytes: the most bytes of tensors in a file; None for no limit.
        doubtful: devices and inodes of files that are not linked.
        check: called before each object and before the rename; it may raise.

    Returns:
        The path of the checkpoint, which is durable, and what was written of each object.

    Raises:
        OSError: An I/O error. The checkpoint does not exist then.
        UnsavableError: A value is too large. The checkpoint does not exist then.
    """
    revision = max((entry.place.revision + 1 for entry in revisions), default=0)
    final = os.path.join(directory, name_of(job.step, revision))
    beside = os.path.join(directory, unfinished_name(job.step))
    is_pinned = job.pin or any(entry.is_pinned for entry in revisions)
    try:
        write_system.mkdir(beside, _mode(revisions))
        written = {}
        for path in job.states:
            check()
            written[path] = _write_object(beside, path, job, before, shard_bytes, doubtful)
        entries = {path: saved.entry for path, saved in written.items()}
        text = Record(store, job.step, job.time, job.metrics, entries, serial).text()
        if len(text) > MAX_BYTES:
            raise _unsavable("the values that are no tensors", f"{len(text):,} bytes of them, above {MAX_BYTES:,}")
        if is_pinned:
            with new_file(os.path.join(beside, PIN_FILE)):
                pass
        with new_file(os.path.join(beside, RECORD_FILE)) as output:
            output.append(text)
        sync_directory(beside)
        check()
        write_system.replace(beside, final)
        try:
            sync_directory(directory)
        except BaseException:
            write_system.replace(final, beside)
            raise
    except BaseException:
        remove_directory(beside)
        raise
    return final, list(written.values())


def _mode(revisions: list[StepEntry]) -> int:
    """Returns the permission bits for a step's directory: those of the one that it replaces, else the default."""
    newest = max((entry.place for entry in revisions), default=None)
    with suppress(OSError):
        if newest is not None:
            return os.stat(newest.path).st_mode & 0o777
    return 0o777


def probe(directory: str) -> None:
    """Writes a small directory with the steps of `publish`, and removes it. Raises `OSError`."""
    beside, renamed = (os.path.join(directory, unfinished_name(0)) for _ in range(2))
    try:
        write_system.mkdir(beside)
        with new_file(os.path.join(beside, RECORD_FILE)) as output:
            output.append(b"{}\n")
        sync_directory(beside)
        write_system.replace(beside, renamed)
        sync_directory(directory)
    finally:
        for path in (beside, renamed):
            remove_directory(path)


def discard(directory: str, removed: Iterable[Place]) -> None:
    """Removes checkpoints. They are renamed first, durably, so that a reader never sees a part of one.

    Raises `OSError`.
    """
    renamed = []
    for place in removed:
        beside = os.path.join(directory, unfinished_name(place.step))
        write_system.replace(place.path, beside)
        renamed.append(beside)
    if renamed:
        sync_directory(directory)
    for path in renamed:
        remove_directory(path)


def clear(directory: str) -> None:
    """Removes what interrupted saves and prunes have left, and ignores errors."""
    with suppress(OSError):
        for path in unfinished(directory):
            remove_directory(path)


def make_directory(path: str) -> None:
    """Creates a directory and its parents, durably. Raises `OSError`."""
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        make_directory(parent)
        with suppress(FileExistsError):
            write_system.mkdir(path)
        sync_directory(parent)


def _write_object(
    directory: str,
    path: str,
    job: Job,
    before: StepEntry | None,
    shard_bytes: int | None,
    doubtful: Set[tuple[int, int]],
) -> Written:
    state, kind = job.states[path], job.kinds[path]
    if not state.tensors and isinstance(state.tree, dict) and set(state.tree) == {"value"}:
        return Written(Entry(kind, value=state.tree["value"]))
    record = before.record if before is not None else None
    old = None if before is None or record is None else before_of(before.place.path, record.entries.get(path), doubtful)
    frozen = job.frozen.get(path, frozenset())
    with _size_errors(path):
        return write_entry(directory, path, kind, state, frozen=frozen, before=old, shard_bytes=shard_bytes)


@contextmanager
def _size_errors(path: str) -> Iterator[None]:
    """Raises `UnsavableError` in place of the `ValueError` for a header or a manifest that is too large."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, ModelStateError):
            raise
        raise _unsavable(path, error) from error


def _unsavable(where: str, found: object) -> UnsavableError:
    return UnsavableError(
        "this is more than a checkpoint of a store holds",
        where=where,
        found=found,
        remedy="large values are better kept as tensors or arrays; shard_size_bytes= makes more files",
    )
