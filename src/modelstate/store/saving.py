"""Writes a checkpoint of a store, complete and durable, also in the background.

Each file holds tensors and nothing that changes with the step, and its name has a digest of its content. A file of the
checkpoint before is not written again where none of its tensors has changed: the new checkpoint gets a hard link to
it, and stays complete when the old one is removed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec.structs import replace

from modelstate.background import AtExit, BackgroundTask
from modelstate.distributed.agreement import Agreement
from modelstate.distributed.connections import number_of
from modelstate.distributed.writing import CollectiveWriter, ShardedTensor
from modelstate.errors import LockedError, ModelStateError, StoreMovedError, TargetExistsError
from modelstate.formats.block_writer import LazyTensor, write_blocks
from modelstate.formats.manifest import KEY, check_size, digest
from modelstate.formats.safetensors import FileLayout, blank_digests, layout, parts_of
from modelstate.formats.serialize import SerializedState, serialize
from modelstate.formats.sharded import SHARD_METADATA
from modelstate.io.atomic import Output, new_file, write_error
from modelstate.io.lock import check_directory
from modelstate.io.staging import StagingBuffer
from modelstate.objects.objects import Target, capture
from modelstate.objects.parts import Kind
from modelstate.objects.per_rank import gathered
from modelstate.process import stopped_by, unstoppable
from modelstate.store.backend import name_of
from modelstate.store.directory import StepEntry, StepIndex
from modelstate.store.object_files import (
    Key,
    LastFiles,
    NewFiles,
    ObjectFiles,
    Split,
    planned_files,
    read_last_files,
    size_errors,
    splitter,
    unsavable,
    write_index,
)
from modelstate.store.record import MAX_RECORD_BYTES, ObjectEntry, Record
from modelstate.store.retention import Keep
from modelstate.text_format import size
from modelstate.torch_compat.sharding import reshard

if TYPE_CHECKING:
    from modelstate.store.delta import Delta, LastObject, LinkedObject, ModuleDeltas

CHOOSING = "choosing the files"
"""The phase in which ranks learn which files are linked."""
_logger = logging.getLogger(__name__)


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

        def run(task: BackgroundTask[SavedStep]) -> SavedStep:
            with stopped_by(lambda: task.is_cancelled):
                return write(task.check)

        super().__init__(
            run,
            kind="save",
            where=f"step {step}",
            at_exit=AtExit.FINISH,
            failure=f"step {step} was not saved",
        )
        self.step, self.staging_bytes = step, staging_bytes


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
                reshard(target.obj)
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
    """Returns what stands for each value that all ranks must have alike, by its name, for `Agreement.check_equal`.

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


class SpreadFile(msgspec.Struct, frozen=True):
    """A file that several ranks have written."""

    key: str
    """The path of the object."""
    nbytes: int
    path: str = ""
    """The path of the file while it is written; empty on other ranks than the first one."""
    name: str = ""
    """The name of the file; empty on other ranks than the first one."""
    digests: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Those of the tensors; none on other ranks than the first one."""
    header: bytes = b""
    """The header of a file that the first rank has written."""
    suffix: str = ""
    """What its name has behind the path of the object; empty where it has no patches."""


class WriteAccess:
    """The right to change a store, of one process at a time, and of one thread of it.

    Args:
        index: the checkpoints of the store.
    """

    def __init__(self, index: StepIndex) -> None:
        self._index, self.lock = index, index.backend.lock
        self.in_use: os.stat_result | None = None
        """The directory of the last restore or save, which no other directory may replace."""
        self._pid, self._thread_lock = os.getpid(), threading.RLock()
        self._is_writing = False
        """Whether the thread that has the lock is writing: a signal handler runs in the same thread."""

    @contextmanager
    def exclusive(self, wait: bool = True) -> Iterator[bool]:
        """Keeps other threads from saving and pruning. Yields False where `wait` is false and another thread does."""
        if self._pid != os.getpid():  # a forked child lacks the thread that may hold the lock
            self._pid, self._thread_lock, self._is_writing = os.getpid(), threading.RLock(), False
        if not self._thread_lock.acquire(blocking=wait):
            yield False
            return
        try:
            if self._is_writing:
                raise LockedError(
                    "a save in this thread has been interrupted by another one, as by a signal's handler",
                    where=self._index.directory,
                    remedy="have the handler set a flag, and the loop save: see modelstate.Deadline",
                )
            self._is_writing = True
            try:
                yield True
            finally:
                self._is_writing = False
        finally:
            self._thread_lock.release()

    def acquire(self) -> str:
        """Creates the directory and locks it for this process, unless that is done. Returns the name of the store."""
        index = self._index
        with self.errors():
            if self.lock.held:
                try:
                    self.lock.confirm()
                    return index.ensure_name()
                except LockedError:
                    # The lock file was replaced. The lock is acquired again, unless another process has it.
                    self.lock.release()
            if self.in_use is not None:
                check_directory(index.directory, self.in_use)
            index.backend.make()
            try:
                self.lock.acquire()
            except LockedError as error:
                dist = sys.modules.get("torch.distributed")
                if dist is not None and dist.is_available() and dist.is_initialized():
                    error.remedy = (
                        "if the other writer is a rank of this run: Store(process_group=) for a save on all ranks, and "
                        f"prune(), pin() and unpin() on the first rank only; {error.remedy}"
                    )
                raise
            try:
                # Before anything is removed: a store of a newer version is refused here.
                store = index.ensure_name()
                self.in_use = index.backend.in_use()
                index.backend.clear(index.file_names)
                return store
            except BaseException:
                self.lock.release()
                raise

    @contextmanager
    def errors(self, *name: str) -> Iterator[None]:
        """Raises `WriteFailedError` in place of an I/O error, or `StoreMovedError` where the directory was moved.

        `name` is the file or the directory, in that of the store, that is written; without it, the store is.
        """
        try:
            yield
        except OSError as error:
            try:
                self.lock.check_directory()
            except StoreMovedError as moved:
                raise moved from error
            if isinstance(error, ModelStateError):
                raise
            raise write_error(os.path.join(self._index.directory, *name), error) from error

    def release(self) -> None:
        """Unlocks the store for other processes."""
        self.lock.release()
        self.in_use = None


class NewStep:
    """A checkpoint that is written where no reader sees it, until it is complete.

    Of several ranks only the first one writes it, but for the tensors that are spread over the ranks.

    Args:
        access: the right to change the store.
        index: the checkpoints of the store.
        name: the temporary name: the result of `unfinished_name`.
        record: the record of the checkpoint, without its objects, and without the names that the store gives.
        objects: the objects, by path.
        shard_bytes: the most bytes of tensors in a file; None for no limit.
        pin: whether the checkpoint is pinned. It also is where it replaces one that is.
        begin_seconds: when the save began, by `time.perf_counter`.
        deltas: writes modules as differences to the last checkpoint; None writes them whole.
    """

    def __init__(
        self,
        access: WriteAccess,
        index: StepIndex,
        name: str,
        record: Record,
        objects: Mapping[str, EncodedObject],
        *,
        shard_bytes: int | None,
        pin: bool,
        begin_seconds: float,
        deltas: ModuleDeltas | None,
    ) -> None:
        self.name, self._access, self._index, self._record, self._objects = name, access, index, record, objects
        self._shard_bytes, self._pin, self._begin_seconds = shard_bytes, pin, begin_seconds
        self._deltas = deltas
        self._final_name = name_of(record.step, 0)
        self._new: NewFiles | None = None
        self._before: Mapping[str, ObjectEntry] = {}
        """The objects of the last checkpoint; unchanged files of it are linked."""
        self._files_before = ""
        """The directory of these files."""
        self._revisions: list[StepEntry] = []
        """The checkpoints of the same step."""
        self._by_age: list[StepEntry] = []
        """The checkpoints of the store, the newest last."""
        self._written: dict[str, tuple[ObjectEntry, ObjectFiles]] = {}
        self._lasts: dict[str, LastFiles] = {}
        """The objects of the last checkpoint."""
        self._linked: dict[str, ObjectFiles] = {}
        """The files of the last checkpoint that are linked, by object."""

    def begin(self, overwrite: bool) -> None:
        """Locks and lists the store. Raises `TargetExistsError` where it has this step, and does not replace it."""
        store = self._access.acquire()
        revisions = self._index.all_revisions(store)
        self._by_age = self._index.by_age(revisions)
        step = self._record.step
        self._revisions = [entry for entry in revisions if entry.place.step == step]
        existing = next((entry for entry in self._by_age if entry.place.step == step), None)
        if existing is not None and not existing.is_damaged:
            remedy = "it is another store's, or a newer version's: take it away, or take another directory"
            if existing.is_whole:
                remedy = "overwrite=True replaces it; Store.restore says from which step to go on"
            elif existing.problem == "not readable":
                remedy = "overwrite=True saves the step again, and leaves this checkpoint as it is"
            if not overwrite or existing.problem not in ("", "not readable"):
                raise TargetExistsError(
                    "there is a checkpoint of this step already",
                    where=existing.place.path,
                    found="" if existing.error is None else existing.error.what,
                    remedy=remedy,
                )
        serial = self._index.backend.serial(max((entry.serial or 0 for entry in self._by_age), default=0))
        self._record = replace(self._record, store=store, serial=serial)

    def save(
        self,
        agreement: Agreement,
        keep: Keep | None,
        write_spread: Callable[[], Sequence[SpreadFile]],
        staging_bytes: int = 0,
        blocked_seconds: float | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> SavedStep:
        """Writes the checkpoint, makes it visible and durable, and removes those that are not kept.

        Args:
            agreement: the ranks.
            keep: the rules for which checkpoints stay.
            write_spread: writes the tensors that are spread over the ranks.
            staging_bytes: the memory that the state was copied to.
            blocked_seconds: how long `Store.save` has blocked, where it has returned.
            check_cancelled: raises `Stopped` where the save was cancelled, which the other ranks are told.

        Raises:
            WriteFailedError: An I/O error. The checkpoint is not visible then.
            StoreMovedError: The directory was renamed, removed or replaced.
            UnsavableError: The values are too large.
            BackgroundCancelledError: The save was cancelled.
        """
        record, files = self._record, list[SpreadFile]()

        def check() -> None:
            if check_cancelled is not None:
                check_cancelled()
            self._access.lock.check_directory()

        def commit() -> tuple[str, int, int, float, tuple[int, ...]]:
            with self._access.errors(self._final_name):
                path = self._commit(files, check)
            seconds = time.perf_counter() - self._begin_seconds
            pruned: tuple[int, ...] = ()
            try:
                if replaced := [entry for entry in self._revisions if entry.is_whole or entry.is_damaged]:
                    self._index.discard(replaced)
                if keep is not None:
                    pruned = self._index.prune(keep)
            except OSError as error:  # the checkpoint is saved; the next save prunes again
                _logger.warning(
                    "%s: earlier checkpoints that are not kept were not removed: %s", self._index.directory, error
                )
            of_objects = [of_object for _, of_object in self._written.values()]
            written_bytes = sum(of_object.written_bytes for of_object in of_objects)
            return path, written_bytes, sum(of_object.linked_bytes for of_object in of_objects), seconds, pruned

        try:
            with agreement.collective():
                with agreement.phase(f"writing step {record.step}"):
                    if agreement.is_first:
                        self._write(check)
                    values: dict[str, object] = {}
                    if agreement.is_collective:
                        every = self._objects.items()
                        alike = {path: of for path, of in every if of.has_one_state and not of.is_spread}
                        # The first rank has written them.
                        digests = {path: self._written[path][1].digests for path in alike} if self._written else None
                        values = replicated_values(alike, digests)
                agreement.check_equal(f"comparing the ranks in step {record.step}", values)
                files += write_spread()
                # A commit without an answer may have succeeded, so `cancel` waits for it.
                with nullcontext() if check_cancelled is None else unstoppable():
                    path, written, linked, seconds, pruned = agreement.decided(
                        f"committing step {record.step}",
                        commit,
                        effect=f"{self._final_name} is complete, or does not exist",
                    )
        except BaseException:
            if self._new is not None:
                self._new.discard()
            raise
        finally:
            # The traceback of an error keeps this object, which would keep the lock of the store and the copied state.
            vars(self).clear()
        blocked_seconds = seconds if blocked_seconds is None else blocked_seconds
        return SavedStep(record.step, path, written, linked, staging_bytes, blocked_seconds, seconds, tuple(pruned))

    def _write(self, check: Callable[[], object]) -> None:
        """Writes the objects that this process holds whole. `check` is called before each of them, and may raise."""
        with self._access.errors(self._final_name):
            check()
            backend, record = self._index.backend, self._record
            backend.clear(self._index.file_names)
            for entry in reversed(self._by_age):
                if entry.is_whole and (last := entry.record) is not None:
                    self._before, self._files_before = last.entries, entry.place.files
                    break
            places = [entry.place for entry in self._revisions]
            self._new = new = backend.new_step(self.name, record.step, record.serial, places)
            for path, encoded in self._objects.items():
                if not encoded.is_spread:
                    check()
                    self._written[path] = self._write_object(new, path, encoded)

    def _write_object(self, new: NewFiles, path: str, encoded: EncodedObject) -> tuple[ObjectEntry, ObjectFiles]:
        """Writes an object where readers do not see it yet. Raises `OSError` and `UnsavableError`."""
        state, kind, files = encoded.state, encoded.kind, ObjectFiles()
        if not state.tensors and isinstance(state.tree, dict) and set(state.tree) == {"value"}:
            return ObjectEntry(kind, value=state.tree["value"]), files
        with size_errors(path):
            if not state.tensors:
                # An index without files is invalid, so the manifest goes into a file without tensors.
                planned = layout({}, lambda digests: {**SHARD_METADATA, KEY: state.manifest(None, digests)})
                name, _, record = new.write_tensors(path, planned)
                files.written_bytes += planned.nbytes
                return ObjectEntry(kind, name, {name: record}), files
            module = None
            rest: Mapping[str, torch.Tensor | LazyTensor] = state.live
            if self._deltas is not None and kind is Kind.MODULE:
                module = self._deltas.write(path, state, encoded.frozen, Agreement((), 0), None, self)
                rest, constant = module.whole, module.constant
            else:
                last, index, _ = self.last_object(path)
                hashes = write_blocks(None, 0, [state.live[name] for name in last])
                same = {name for name, hashed in zip(last, hashes, strict=True) if last[name] == hashed}
                _, _, linked = self.link_object(path, same, None)
                rest = {name: tensor for name, tensor in rest.items() if name not in linked}
                constant = same if index else encoded.frozen
            files = self._linked.pop(path)
            for planned, suffix, patched in planned_files(rest, constant, splitter(self._shard_bytes), module):
                name, of_file, record = new.write_tensors(path + suffix, planned)
                files.add(name, record, patched or of_file.digests, self._record.serial if patched else None)
        return write_index(new, path, kind, state, files), files

    def last_object(self, path: str) -> LastObject:
        """Returns what the last checkpoint has of a module, or of another object."""
        with self._access.errors(self._final_name):
            last = read_last_files(self._index, self._files_before, self._before.get(path))
        if last is None:
            return {}, "", False
        self._lasts[path], tensors = last, self._objects[path].state.tensors
        digests = {name: last.digests[name] for name in last.comparable(tensors)}
        index = os.path.join(self._files_before, last.entry.index)[len(self._index.directory) + 1 :]
        saves = {layer.save for layer in last.patches.values()}
        full_every = 0 if self._deltas is None else self._deltas.delta.full_every
        return digests, index, last.chains.keys() <= tensors.keys() and len(saves) + 1 < full_every

    def link_object(self, path: str, same: Set[str], payloads: Mapping[str, int] | None) -> LinkedObject:
        """Links files of an object, after `last_object`, but for those of tensors with a file that cannot be linked.

        The arguments are those of `LastFiles.kept`.
        """
        files = self._linked[path] = ObjectFiles()
        if (last := self._lasts.get(path)) is not None:
            names = last.kept(self._objects[path].state, same, payloads)
            with self._access.errors(self._final_name):
                directory = self._files_before
                linked = {file for file in last.needed(names) if self.files.link(os.path.join(directory, file))}
                complete = {name for name in names if linked.issuperset(last.chains[name])}
                used = last.needed(complete)
                for file in linked - used:
                    self.files.unlink(file)
            for file in filter(used.__contains__, last.names):
                record, patches = last.entry.files[file], last.patches.get(file)
                files.tensors[file], files.records[file] = last.names[file], record
                files.linked_bytes += record.nbytes
                files.saves |= set() if patches is None else {patches.save}
            files.digests |= {name: digest for name, digest in last.digests.items() if name in complete}
            files.patched |= {name for name in complete if len(last.chains[name]) > 1}
        return self._record.step, self._record.serial, [*files.digests]

    @property
    def files(self) -> NewFiles:
        """The files that are being written, on the first rank."""
        assert self._new is not None
        return self._new

    def link_unchanged(self, digests: Mapping[Key, str]) -> list[Key]:
        """Links the files of the last checkpoint all of whose tensors have these digests. Returns the tensors."""
        linked = []
        for path in dict.fromkeys(path for path, _ in digests):
            last, _, _ = self.last_object(path)
            same = {name for name, digest in last.items() if digests.get((path, name)) == digest}
            linked += [(path, name) for name in self.link_object(path, same, None)[2]]
        return linked

    def _commit(self, files: Sequence[SpreadFile], check: Callable[[], object]) -> str:
        """Makes the checkpoint visible and durable, with the files that several ranks have written.

        `check` is called right before the checkpoint becomes visible; it may raise. Returns the path.
        """
        new = self.files
        spread = {path: of for path, of in self._objects.items() if of.is_spread}
        of_objects = {path: self._linked.get(path, ObjectFiles()) for path in spread}
        for file in files:
            record = new.finish(file.path, file.name, file.header, file.nbytes)
            of_objects[file.key].add(file.name, record, file.digests, self._record.serial if file.suffix else None)
        for path, of in spread.items():
            self._written[path] = write_index(new, path, of.kind, of.state, of_objects[path]), of_objects[path]
        entries = {path: replace(self._written[path][0], ranks=of.ranks) for path, of in self._objects.items()}
        text = replace(self._record, entries=entries).text()
        if len(text) > MAX_RECORD_BYTES:
            raise unsavable(
                "the values that are no tensors", f"{len(text):,} bytes of them, above {MAX_RECORD_BYTES:,}"
            )
        path = new.commit(text, self._pin or any(entry.is_pinned for entry in self._revisions), check)
        self._index.note_whole(path)
        return path


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
        writer: CollectiveWriter,
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


class Staging(StagingBuffer):
    """The buffer for the copy of a state."""

    def copy(self, states: Iterable[SerializedState]) -> None:
        """Copies the tensors of the states, and replaces them by the copies. The copies before are overwritten.

        Raises torch's error where there is not enough memory; then no tensor is replaced.
        """
        states = list(states)
        copies = iter(self.copies(local_part(tensor) for state in states for tensor in state.tensors.values()))
        for state in states:
            state.tensors = {
                name: dataclasses.replace(tensor, local=next(copies))
                if isinstance(tensor, ShardedTensor)
                else next(copies)
                for name, tensor in state.tensors.items()
            }


def local_part(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor of a live state."""
    held = tensor.local if isinstance(tensor, ShardedTensor) else tensor
    assert isinstance(held, torch.Tensor)
    return held
