"""Publishes a checkpoint into a store's directory, complete and durable, and removes checkpoints.

Each file holds tensors and nothing that changes with the step, and is named by what is in it. So a file of the
checkpoint before, all of whose tensors are still what they were, is not written again: the new checkpoint gets a link
to it, and is as complete without the old one as with it. What changes and what does not is kept in different files.
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
from modelstate.formats.sharded import INDEX_SUFFIX, SUFFIX, in_shards, index_of
from modelstate.formats.write import SHARD_METADATA
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

_Kind = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Before:
    """The files of an object in the checkpoint before."""

    files: Mapping[str, tuple[str, ...]]
    """Paths, each with the names of its tensors."""
    records: Mapping[str, FileRecord]
    """Of the same paths."""
    kinds: Mapping[str, _Kind]
    digests: Mapping[str, str]


@dataclass(slots=True)
class Written:
    """What has been written of an object."""

    entry: Entry
    bytes_written: int = 0
    bytes_linked: int = 0


@dataclass(slots=True)
class _Files:
    """Files of a checkpoint that is being written."""

    directory: str
    names: dict[str, Sequence[str]] = field(default_factory=dict)
    """Each with its tensors."""
    digests: dict[str, str] = field(default_factory=dict)
    records: dict[str, FileRecord] = field(default_factory=dict)
    """Of files that are linked."""
    written: int = 0
    linked: int = 0


def before_of(directory: str, entry: Entry | None, doubtful: Set[tuple[int, int]] = frozenset()) -> Before | None:
    """What is known of an object's files: only those that nobody has touched since they were written, and whose device
    and inode are not among the doubtful ones."""
    if entry is None or not entry.index:
        return None
    try:
        weight_map, said = sharded.read_index(os.path.join(directory, entry.index))
        digests = json.loads(said[KEY])["digests"]["tensors"]
        kinds: dict[str, _Kind] = {}
        files, records = {}, {}
        for name in dict.fromkeys(weight_map.values()):
            path = os.path.join(directory, name)
            record = entry.files.get(name)
            if record is not None and _is_untouched(path, record, doubtful):
                tensors = safetensors.read(path).tree
                assert isinstance(tensors, Mapping)
                kinds |= {key: (one.dtype, tuple(one.shape)) for key, one in tensors.items()}
                files[path], records[path] = tuple(tensors), record
    except (OpenError, OSError, ValueError, KeyError, TypeError):
        return None  # it is written anew
    return Before(files, records, kinds, digests)


def _is_untouched(path: str, record: FileRecord, doubtful: Set[tuple[int, int]]) -> bool:
    found = os.stat(path, follow_symlinks=False)
    if (found.st_dev, found.st_ino) in doubtful:
        return False
    if (found.st_size, found.st_mtime_ns) != (record.nbytes, record.mtime_ns):
        return False
    with SourceFile(path) as file:
        return digest(file.read(0, record.head_bytes, "its header")) == record.head


def write_entry(
    directory: str,
    key: str,
    kind: Kind,
    made: SerializedState,
    *,
    steady: Set[str] = frozenset(),
    before: Before | None = None,
    shard_bytes: int | None = None,
) -> Written:
    """Writes an object into a directory that nobody reads yet.

    `steady` has the names of tensors that are not expected to change, for the first time that they are written.
    Raises `OSError`, and `ValueError` for more than a header holds.
    """
    files = _Files(directory)
    if not made.tensors:
        return _write_without_tensors(files, key, kind, made)
    left = made.live
    if before is not None:
        steady = _link_what_is_unchanged(files, left, before)
    for group in _groups(left, steady, shard_bytes):
        _write_file(files, key, group)
    total = sum(map(nbytes_of, made.tensors.values()))
    index = f"{key}{SUFFIX}{INDEX_SUFFIX}"
    with new_file(os.path.join(directory, index)) as output:
        output.append(index_of(files.names, total, made.manifest(None, files.digests)))
        files.written += output.nbytes
    records = {name: files.records.get(name) or _record(directory, name) for name in (*files.names, index)}
    return Written(Entry(kind, index, records), files.written, files.linked)


def _write_without_tensors(files: _Files, key: str, kind: Kind, made: SerializedState) -> Written:
    """An index of no files is none: what is said of the object stands in a file that has no tensors."""
    planned = layout({}, lambda digests: {**SHARD_METADATA, KEY: made.manifest(None, digests)})
    name = f"{key}{SUFFIX}"
    with new_file(os.path.join(files.directory, name)) as output:
        write(output, planned)
    return Written(Entry(kind, name, {name: _record(files.directory, name)}), planned.nbytes)


def _link_what_is_unchanged(files: _Files, left: dict[str, torch.Tensor], before: Before) -> set[str]:
    """Links files, takes their tensors out of what is left, and returns the names of others that have not changed."""
    same_kind = {name: one for name, one in left.items() if before.kinds.get(name) == (one.dtype, tuple(one.shape))}
    now = dict(zip(same_kind, digests_of(list(same_kind.values())), strict=True))
    unchanged = {name for name, value in now.items() if before.digests.get(name) == value}
    for path, names in before.files.items():
        if not unchanged.issuperset(names):
            continue
        name = os.path.basename(path)
        try:
            write_system.link(path, os.path.join(files.directory, name))
        except OSError:
            continue  # no links here, or too many: it is written
        files.names[name], files.records[name] = names, before.records[path]
        files.linked += os.stat(path).st_size
        for one in names:
            files.digests[one] = now[one]
            del left[one]
    return unchanged & set(left)


def _groups(
    left: Mapping[str, torch.Tensor], steady: Set[str], shard_bytes: int | None
) -> Iterator[dict[str, torch.Tensor]]:
    for is_steady in (True, False):
        some = {name: tensor for name, tensor in left.items() if (name in steady) == is_steady}
        if some:
            yield from in_shards(some, shard_bytes) if shard_bytes else [some]


def _write_file(files: _Files, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
    planned = layout(tensors, lambda _: SHARD_METADATA)
    unnamed = os.path.join(files.directory, f".{len(files.names)}{SUFFIX}")  # no object has such a name
    with new_file(unnamed) as output:
        written = write(output, planned)
    name = f"{key}-{written.content[:16]}{SUFFIX}"
    write_system.replace(unnamed, os.path.join(files.directory, name))
    files.names[name] = tuple(tensors)
    files.digests |= written.digests
    files.written += planned.nbytes


def _record(directory: str, name: str) -> FileRecord:
    path = os.path.join(directory, name)
    found = os.stat(path)
    with SourceFile(path) as file:
        nbytes = file.nbytes
        if not name.endswith(INDEX_SUFFIX):
            nbytes = 8 + int.from_bytes(file.read(0, 8, "the length of its header"), "little")
        head = file.read(0, nbytes, "its header")
    return FileRecord(found.st_size, found.st_mtime_ns, len(head), digest(head))


def remove_directory(path: str) -> None:
    """Takes away a directory of a store with its files, as far as that can be done; of a link to one only the link."""
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
    """A checkpoint that is about to be written."""

    step: int
    kinds: Mapping[str, Kind]
    drafts: Mapping[str, SerializedState]
    """Of each object."""
    steady: Mapping[str, frozenset[str]]
    """Names of tensors, of each module, that training does not change."""
    metrics: Mapping[str, float]
    pin: bool
    begun: float
    time: float

    def check(self) -> None:
        """Raises `UnsavableError` for values that nobody would read again."""
        for path, made in self.drafts.items():
            with _too_much(path):
                check_size(made.manifest(None, {}))


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
    """Writes a checkpoint, with links to what the one `before` has already, beside the `revisions` of its step.

    Files are not linked whose device and inode are among the doubtful ones. `check` may raise before all is in place.

    Returns its path, when it is complete and durable. Raises `OSError`, `UnsavableError`; then it is not there.
    """
    revision = max((one.place.revision + 1 for one in revisions), default=0)
    final = os.path.join(directory, name_of(job.step, revision))
    beside = os.path.join(directory, unfinished_name(job.step))
    is_pinned = job.pin or any(one.is_pinned for one in revisions)
    try:
        write_system.mkdir(beside, _mode(revisions))
        written = {path: _write_entry(beside, path, job, before, shard_bytes, doubtful) for path in job.drafts}
        entries = {path: one.entry for path, one in written.items()}
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
    """The permission bits of a step's directory: those of the one that it replaces, else those of new directories."""
    newest = max((one.place for one in revisions), default=None)
    with suppress(OSError):
        if newest is not None:
            return os.stat(newest.path).st_mode & 0o777
    return 0o777


def probe(directory: str) -> None:
    """Makes a small directory in the way in which `publish` makes a checkpoint, and removes it. Raises `OSError`."""
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


def discard(directory: str, gone: Iterable[Place]) -> None:
    """Takes checkpoints away: first their names, durably, so that nobody ever sees half of one. Raises `OSError`."""
    renamed = []
    for place in gone:
        beside = os.path.join(directory, unfinished_name(place.step))
        write_system.replace(place.path, beside)
        renamed.append(beside)
    if renamed:
        sync_directory(directory)
    for path in renamed:
        remove_directory(path)


def clear(directory: str) -> None:
    """Takes away what saves and prunes have left that did not come to their end, as far as that can be done."""
    with suppress(OSError):
        for path in unfinished(directory):
            remove_directory(path)


def make_directory(path: str) -> None:
    """Makes a directory, and those above it, durably. Raises `OSError`."""
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        make_directory(above)
        with suppress(FileExistsError):
            write_system.mkdir(path)
        sync_directory(above)


def _write_entry(
    directory: str,
    path: str,
    job: Job,
    before: StepEntry | None,
    shard_bytes: int | None,
    doubtful: Set[tuple[int, int]],
) -> Written:
    made, kind = job.drafts[path], job.kinds[path]
    if not made.tensors and isinstance(made.tree, dict) and set(made.tree) == {"value"}:
        return Written(Entry(kind, value=made.tree["value"]))
    record = before.record if before is not None else None
    old = None if before is None or record is None else before_of(before.place.path, record.entries.get(path), doubtful)
    steady = job.steady.get(path, frozenset())
    with _too_much(path):
        return write_entry(directory, path, kind, made, steady=steady, before=old, shard_bytes=shard_bytes)


@contextmanager
def _too_much(path: str) -> Iterator[None]:
    """Around what raises `ValueError` for more than a header or a manifest holds."""
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
