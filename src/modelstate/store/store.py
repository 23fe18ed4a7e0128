"""`modelstate.Store`: the checkpoints of a training run in a directory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, TypedDict, Unpack, overload

from modelstate.arguments import check_choice, check_integer, checked_call, invalid_option, seconds_of
from modelstate.background import AtExit, BackgroundTask
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import patterns_of
from modelstate.checkpoint.write import target_path
from modelstate.distributed.agreement import TIMEOUT_SECONDS, Agreement, Digest, agreement_of
from modelstate.distributed.writing import CollectiveWriter
from modelstate.errors import BackgroundCancelledError, StepNotFoundError, UnsavableError
from modelstate.html.page import Page, Shown
from modelstate.io.staging import StagingBuffer
from modelstate.objects.objects import RestoreArguments, Restored, RestoreOptions, targets_of, tensors_within
from modelstate.objects.stateful import preserved_generators
from modelstate.process import stopped_by
from modelstate.remote.location import is_remote
from modelstate.store.backend import STORE_FILE, name_of, unfinished_name
from modelstate.store.directory import Step, StepEntry, StepIndex, WriteAccess, not_shared, store_file_problem
from modelstate.store.record import RECORD_FILE, Record
from modelstate.store.retention import CheckpointInfo, Keep, as_keep, infos_page, metric_value
from modelstate.store.saving import NewStep, SavedStep, SpreadTensors, encode_objects, replicated_values, stage
from modelstate.text_format import as_given, size
from modelstate.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which torch may have been built without

    from modelstate.comparison.result import Diff
    from modelstate.remote.cache import Cache
    from modelstate.store.delta import Delta, ModuleDeltas

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RestoredStep(Restored):
    """The result of `Store.restore`: a mapping from names to the plain values that were asked for, and the step.

    Examples:
        >>> restored = store.restore({"model": model, "epoch": 0})
        >>> restored.step, restored["epoch"]
        (3000, 3)
    """

    step: int
    time: float
    """When it was saved, in seconds since 1970."""
    metrics: Mapping[str, float]
    skipped: Mapping[int, str]
    """What is wrong with the newer checkpoints that were passed over, by step. The restored step itself is among them
    where an earlier save of it was restored: of a save that was to be replaced, by one that is damaged."""


class _SaveOptions(TypedDict, total=False):
    metrics: Mapping[str, float] | None
    pin: bool
    overwrite: bool
    when_busy: Literal["wait", "skip"]


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
            run, kind="save", where=f"step {step}", at_exit=AtExit.FINISH, failure=f"step {step} was not saved"
        )
        self.step, self.staging_bytes = step, staging_bytes


class Store(Shown):
    """Checkpoints of a training run in a directory: each one is complete and durable, or does not exist.

    Nothing is written before the first `save`. It locks the store for this process: another process that saves is
    refused until this one closes the store or ends, in whatever way. Reading needs no lock. The next process that
    writes removes the unfinished files of a killed one. A directory that is renamed, removed or replaced after a
    restore from it or a save to it is not created again until `close`; a save raises `StoreMovedError`.

    On several ranks `save`, `restore` and `check` are calls of all ranks of the meshes of the objects'
    DTensors, or of `process_group`: all ranks succeed, or each of them raises. The first rank locks the directory,
    which all of them need to see. Every other method is a call of one rank: those that write are for the first one.

    Args:
        directory: the directory, which need not exist yet; or the URL of a prefix in a bucket, as "s3://bucket/run".
        keep: the checkpoints that stay when another one has been saved: a `Keep`, or the number of the last ones; None
            keeps all.
        shard_size_bytes: the most bytes of tensors in one file; None writes one file for each object.
        delta: writes modules as differences to the checkpoint before; None writes them whole.
        process_group: the ranks that save and restore together; None for those of the meshes of the modules' DTensors.
        timeout_seconds: how long a rank waits for the others.
        cache: where what is read of a bucket is kept, a `Cache`: by `restore`, `open`, `diff`, `verify` and `follow`.

    Raises:
        UnsavableError: The path cannot be a directory.
        OptionError: An option cannot be used.

    Examples:
        >>> with ms.Store("checkpoints", keep=3) as store:
        ...     saved = store.save(1000, {"model": model, "optimizer": optimizer})
        ...     restored = store.restore({"model": model, "optimizer": optimizer})
        >>> restored.step
        1000
    """

    @checked_call("ms.Store")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: Keep | int | None = None,
        shard_size_bytes: int | None = None,
        process_group: ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        cache: Cache | None = None,
        delta: Delta | None = None,
    ) -> None:
        self.directory = _directory(directory)
        self.keep = as_keep(keep)
        check_integer("shard_size_bytes", shard_size_bytes, least=1, accepts_none=True)
        self._shard_bytes = shard_size_bytes
        self._process_group = process_group
        self._timeout_seconds = seconds_of("timeout_seconds", timeout_seconds, accepts_zero=False)
        if cache is not None:
            from modelstate.remote.cache import check_cache

            check_cache(cache)
        self.index = StepIndex(self.directory, cache=cache)
        """The checkpoints of the directory, as they are now."""
        self._backend, self._access = self.index.backend, WriteAccess(self.index)
        self._staging = StagingBuffer()
        self._delta, self._deltas = delta, _deltas(delta, self.index)
        self._spread = SpreadTensors()
        self._pending: PendingSave | None = None

    def __repr__(self) -> str:
        return f"<Store {as_given(self.directory)!r}>"

    def _page(self) -> Page:
        return infos_page(self.directory, self.infos())

    # Saving.

    @overload
    def save(
        self,
        step: int,
        objects: Mapping[str, object],
        *,
        background: Literal[False] = False,
        **of: Unpack[_SaveOptions],
    ) -> SavedStep: ...
    @overload
    def save(
        self, step: int, objects: Mapping[str, object], *, background: Literal[True], **of: Unpack[_SaveOptions]
    ) -> PendingSave | None: ...
    @checked_call(
        "store.save",
        within=lambda store, *args, **options: store._agreement((args, options), "Store.save").phase("beginning"),
    )
    def save(
        self,
        step: int,
        objects: Mapping[str, object],
        *,
        background: bool = False,
        metrics: Mapping[str, float] | None = None,
        pin: bool = False,
        overwrite: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
    ) -> SavedStep | PendingSave | None:
        """Saves the state of several objects as a checkpoint, which is visible when it is complete and durable.

        Files whose tensors have not changed since the checkpoint before are linked, not written again.

        Args:
            step: the number of the checkpoint, 0 or more.
            objects: modules, optimizers, anything with `state_dict` and `load_state_dict`, `torch.Generator`s and plain
                values, by name; nested mappings are possible. The modules of the optimizers have to be among them.
            background: False returns when the checkpoint is durable. True returns when the state has been copied to
                memory, which the next save uses again, and a thread writes it. An error of the thread is raised by
                `PendingSave.result`, by `wait`, or by the next save. The process waits for the thread before it ends.
                `PendingSave.cancel` ends it without a checkpoint.
            metrics: numbers that rate the checkpoint, for `Keep(best=...)`.
            pin: keeps the checkpoint whatever `keep` says, until `unpin`.
            overwrite: whether to replace an existing checkpoint of this step. A damaged one is always replaced.
            when_busy: what to do while an earlier save is being written: "wait" for it, or "skip" this one and return
                None.

        Returns:
            The saved checkpoint; with `background=True` a handle of the save; None where it was skipped.

        Raises:
            TargetExistsError: There is a checkpoint of this step, and `overwrite` is false; or it is of another store,
                or a newer version of modelstate wrote it.
            LockedError: Another process writes to the store.
            StoreMovedError: The directory was renamed, removed or replaced.
            OptionError: An argument cannot be used.
            DistributedError: The ranks save different objects or steps, or do not see the same directory.
            RankLostError: A rank did not take part in time. The checkpoint is complete, or does not exist.
            ObjectStateError: The own code of an object raised.
            OptimizerStateError: An optimizer has parameters of a module that is not among the objects.
            UnsavableError: The format does not have the kind of a tensor or a name.
            CodecError: A value has no encoding.
            WriteFailedError: An I/O error.

        The error of an earlier save in the background is raised too. No earlier checkpoint is changed by an error.

        Examples:
            >>> store.save(1000, {"model": model, "optimizer": optimizer}, metrics={"loss": 0.3})
        """
        begin_seconds = time.perf_counter()
        agreement = self._agreement((step, objects), "Store.save")

        def arguments() -> list[Digest]:
            # A directory may have other names on other ranks; a URL is the same on all of them.
            place = self.directory if is_remote(self.directory) else "a directory"
            return _same(f"{place}, {step=}, {background=}, {pin=}, {overwrite=}, {when_busy=}, delta={self._delta}")

        with agreement.collective():
            with agreement.phase("beginning", arguments):
                targets = targets_of(objects)
                checked_metrics = _check_save(step, metrics, when_busy)
            if when_busy == "skip":
                is_busy = self._pending is not None and not self._pending.done
                if any(agreement.texts("looking for an earlier save", "busy" if is_busy else "")):
                    return None
            with self._access.exclusive(wait=when_busy == "wait" or agreement.is_collective) as is_acquired:
                if not is_acquired:
                    return None
                with agreement.phase("waiting for the earlier save"):
                    self.wait()
                # The thread votes over connections of its own, while this thread may load, or save again. Each store
                # has others, since the threads of two stores do not vote in the same order on all ranks.
                channel, name, calls = agreement.decided(
                    "naming the directory",
                    lambda: (f"saving to {self.directory}", unfinished_name(step), time.time_ns()),
                )
                writing = agreement.on_channel(channel, calls) if background else agreement
                if background:
                    with writing.phase("connecting"):
                        pass
                writer = _writer(writing, os.path.join(self.directory, name))
                encoded = encode_objects(targets, agreement, writer, self._delta)
                new_step = NewStep(
                    access=self._access,
                    index=self.index,
                    name=name,
                    record=Record("", step, time.time(), checked_metrics, {}),
                    objects=encoded,
                    agreement=writing,
                    writer=writer,
                    spread=self._spread,
                    deltas=self._deltas,
                    shard_bytes=self._shard_bytes,
                    keep=self.keep,
                    pin=pin,
                    begin_seconds=begin_seconds,
                )
                with agreement.phase("opening the store"):
                    if agreement.is_first:
                        new_step.begin(overwrite)
                    if background:
                        stage(self._staging, [of_object.state for of_object in encoded.values()])
                if not background:
                    return new_step.save()
                nbytes, blocked_seconds = self._staging.nbytes, time.perf_counter() - begin_seconds
                self._pending = pending = PendingSave(step, nbytes, partial(new_step.save, nbytes, blocked_seconds))
                try:
                    effect = f"{name_of(step, 0)} is complete, or does not exist"  # threads that have begun may end
                    with agreement.phase("starting the thread", effect=effect):
                        pending.start()
                except BaseException:
                    if agreement.is_collective:  # the threads of the other ranks would wait for that of this one
                        pending.cancel(wait=False)
                    raise
                return pending

    def check(self, objects: Mapping[str, object]) -> None:
        """Checks that a save of these objects would work, without saving them.

        The state of every object is encoded as in `save`, with no tensor copied. The store is locked for this process,
        and a small file is written to its directory, synced, renamed and removed. A warning is logged where the file
        system has less free space than the state takes. Random generators are left as they are.

        Args:
            objects: as `save` takes them.

        Raises:
            ModelStateError: The error that `save` would raise.

        Examples:
            >>> store = ms.Store("checkpoints")
            >>> store.check({"model": model, "optimizer": optimizer})
        """
        agreement = self._agreement(objects, "Store.check")
        with agreement.collective(), self._access.exclusive():
            with agreement.phase("waiting for the earlier save"):
                self.wait()
            nbytes = self._check_state(objects, agreement)
            with agreement.phase("opening the store"):
                if agreement.is_first:
                    self._access.acquire()
                    with self._access.errors():
                        self._backend.probe()
            with agreement.phase("looking for the store"):
                try:
                    free_bytes = self._backend.free_bytes()
                except OSError as error:
                    raise not_shared(self.directory, "the directory that the first rank has made", error) from error
        if free_bytes is not None and free_bytes < nbytes:
            _logger.warning(
                "%s: a checkpoint takes up to %s, and %s are free", self.directory, size(nbytes), size(free_bytes)
            )

    def _check_state(self, objects: Mapping[str, object], agreement: Agreement) -> int:
        """Encodes the state of the objects without a copy or a write, and returns the bytes of their tensors.

        Random generators are left as they are. Raises the error that `save` would raise for the objects.
        """
        with agreement.collective():
            with agreement.phase("beginning"):
                targets = targets_of(objects)
            generators = [target.obj for target in targets.values() if target.is_restored_last]
            with preserved_generators(generators):
                encoded = encode_objects(targets, agreement, _writer(agreement, self.directory), self._delta)

                def values() -> list[Digest]:
                    alike = {path: of_object for path, of_object in encoded.items() if of_object.has_one_state}
                    return [Digest.of_values(replicated_values(alike))]

                with agreement.phase("comparing the ranks", values):
                    pass
                return sum(of_object.state.nbytes for of_object in encoded.values())

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits until the save in the background is durable.

        Args:
            timeout_seconds: the most seconds to wait; None waits until the end.

        Raises:
            BackgroundTimeoutError: The save is not durable in time. It goes on.

        The error of the save in the background is raised too, once.

        Examples:
            >>> pending = store.save(1000, {"model": model}, background=True)
            >>> store.wait()
        """
        pending = self._pending
        if pending is None:
            return
        try:
            if not pending.wait(timeout_seconds):
                raise pending.timeout_error(timeout_seconds)
            if pending.has_unreported_error:
                with suppress(BackgroundCancelledError):
                    pending.result()
        finally:
            if pending.done and self._pending is pending:
                self._pending = None

    # Restoring.

    @checked_call(
        "store.restore",
        within=lambda store, *args, **options: store._agreement((args, options), "Store.restore").phase("beginning"),
        options=RestoreArguments,
        defaults=RestoreOptions(),
    )
    def restore(
        self,
        objects: Mapping[str, object],
        step: Step = "latest",
        *,
        verify: bool = True,
        **options: Unpack[RestoreArguments],
    ) -> RestoredStep:
        """Restores the objects from a checkpoint: all of them, or none.

        Args:
            objects: the objects, under the names that they were saved under. A plain value asks for the value that was
                saved under its name; the result has it.
            step: the checkpoint; "latest" takes the newest one that is whole. Newer ones that are not are reported by a
                `DamagedCheckpointWarning` and in `RestoredStep.skipped`. So is the last save of a step where an
                earlier save of it is restored, which a killed process had no time to remove.
            rules, allow_missing, allow_unexpected, keep_options, in_place: as in `modelstate.restore`; names begin with
                the path of an object.
            verify: compares everything with its digest before it is used.
            init_missing: initialises the parameters that the checkpoint lacks. Optimizers have no state for them then.
            device, map, progress, max_memory_bytes: as in `modelstate.loading.LoadOptions`.

        Returns:
            The plain values by path, the step with its time and metrics, and the report of the load.

        Raises:
            StepNotFoundError: There is no such checkpoint, or none that is whole.
            DamagedCheckpointError: The checkpoint is not what was saved, or is of another store or step.
            NewerManifestError: A newer version of modelstate wrote it.
            ReadFailedError: It cannot be read now: an I/O error, or a missing permission.
            DistributedError: The ranks see different checkpoints, or have different arguments.
            RankLostError: A rank did not take part in time.

        It raises what `modelstate.restore` raises, and the error of a save in the background.

        Examples:
            >>> restored = store.restore({"model": model, "optimizer": optimizer})
            >>> restored.step
            1000
        """
        from modelstate.objects.restore import restore_objects  # a save needs no loading

        agreement = self._agreement((step, objects), "Store.restore")

        def attempt(entry: StepEntry) -> tuple[Record, Restored]:
            record, parts = self.index.opened(entry, verify, agreement, options.get("progress"))
            return record, restore_objects(objects, parts, agreement=agreement, **options)

        with agreement.collective():
            with agreement.phase("beginning", lambda: _same(f"step {step!r}")):
                self.wait()
                for name in ("allow_missing", "allow_unexpected", "keep_options"):  # may be used for several steps
                    options[name] = patterns_of(name, options.get(name, ()))
                check_integer("max_memory_bytes", options.get("max_memory_bytes"), least=0, accepts_none=True)
            (record, restored), skipped = self.index.first_usable(step, attempt, agreement)
        with suppress(OSError):
            self._access.note_directory()
        inherited = {field.name: getattr(restored, field.name) for field in fields(restored)}
        return RestoredStep(
            **inherited, step=record.step, time=record.time, metrics=dict(record.metrics), skipped=skipped
        )

    @checked_call("store.open")
    def open(self, name: str, step: Step = "latest", *, verify: bool = False) -> Checkpoint:
        """Opens one object of a checkpoint, for every function that takes a `Checkpoint`.

        Args:
            name: the path of the object.
            step: the checkpoint; "latest" takes the newest one that is whole.
            verify: reads all of this object, and compares it with its digests.

        Returns:
            The tensors and values of the object.

        Raises:
            StepNotFoundError: There is no such checkpoint, or it has no such object with tensors.
            DamagedCheckpointError: The checkpoint is not what was saved, or is of another store or step.
            NewerManifestError: A newer version of modelstate wrote it.
            ReadFailedError: It cannot be read now: an I/O error, or a missing permission.

        Examples:
            >>> ms.load(model, store.open("model", 1000))
        """
        self.wait()

        def attempt(entry: StepEntry) -> Checkpoint:
            return entry.open_object(name, verify=verify)

        return self.index.first_usable(step, attempt)[0]

    @checked_call("store.diff")
    def diff(self, a: Step, b: Step, *, only: Iterable[str] = (), values: bool = True) -> Diff:
        """Compares two checkpoints of the store, with all their objects: see `modelstate.diff`.

        The names begin with the path of an object, such as "model.weight". Tensors that are the same in both steps are
        not read, since they have digests.

        Args:
            a: the first checkpoint; "latest" takes the newest one that is whole.
            b: the second checkpoint.
            only, values: as in `modelstate.diff`.

        Returns:
            The differences.

        Raises:
            StepNotFoundError: There is no such checkpoint.
            DamagedCheckpointError: A checkpoint is not what was saved, or is of another store or step.
            NewerManifestError: A newer version of modelstate wrote it.
            ReadFailedError: It cannot be read now: an I/O error, or a missing permission.

        It raises what `modelstate.diff` raises, too.

        Examples:
            >>> store.diff(1000, 2000, only=["model.*"]).is_equal
            False
        """
        from modelstate.comparison.diff import diff

        self.wait()

        def attempt(entry: StepEntry) -> Checkpoint:
            return entry.usable_record.open(entry.place.files, self.index.cache)

        first, second = (self.index.first_usable(step, attempt)[0] for step in (a, b))
        # With a key, all objects are compared, even if no name is in both.
        return diff(first, second, key=(None, None), only=only, values=values)

    def _agreement(self, objects: object, call: str) -> Agreement:
        """Returns the ranks that save and restore these objects together; `call` is the call of all ranks, for errors.

        The objects are not checked here, so that a wrong argument on one rank reaches the others. Raises
        `DistributedError` where there are DTensors, and no process group of all ranks of their mesh.
        """
        return agreement_of(tensors_within(objects), self._process_group, self._timeout_seconds, call)

    # Listing.

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of all checkpoints that are whole, as far as is known without reading them, in order.

        Examples:
            >>> store.steps()
            (1000, 2000)
        """
        return tuple(entry.place.step for entry in self.index.steps() if entry.is_whole)

    def latest(self) -> int | None:
        """Returns the step that was saved last; None where there is none.

        It is the highest step, unless training has gone back to an earlier one and on from there.

        Examples:
            >>> store.latest()
            2000
        """
        return next((entry.place.step for entry in reversed(self.index.by_age()) if entry.is_whole), None)

    def infos(self) -> tuple[CheckpointInfo, ...]:
        """Returns a description of each checkpoint, damaged ones too, without reading tensors, in the order of steps.

        Examples:
            >>> [info.step for info in store.infos() if info.intact]
            [1000, 2000]
        """
        return tuple(entry.info for entry in self.index.read_all(self.index.steps()))

    @checked_call("store.verify")
    def verify(self, step: int | None = None, *, progress: bool | None = None) -> dict[int | str, str]:
        """Reads checkpoints, one or all, and compares every byte with its digest.

        Args:
            step: the checkpoint to read; None reads all of them, and the store's own file `store.json`.
            progress: whether to show a progress bar. None shows one on a terminal after half a second.

        Returns:
            What is wrong with each step; empty text for a step that is whole. A damaged `store.json` is reported under
            "store.json".

        Raises:
            StepNotFoundError: There is no such step.

        Examples:
            >>> damaged = {step: problem for step, problem in store.verify().items() if problem}
        """
        self.wait()
        latest_first = self.index.saves("latest" if step is None else step)
        last_saves = {entry.place.step: entry for entry in reversed(latest_first)}
        problems: dict[int | str, str] = {}
        if step is None and (problem := store_file_problem(self.directory)):
            problems[STORE_FILE] = problem
        for number in sorted(last_saves):
            with suppress(StepNotFoundError):  # it was replaced or removed while it was read
                problems[number] = self.index.problem_of(last_saves[number], progress)
        return problems

    # Pruning.

    @checked_call("store.prune")
    def prune(self, keep: Keep | int | None = None, *, dry_run: bool = False) -> tuple[int, ...]:
        """Removes the checkpoints that `keep`, or the store's own rules, do not keep.

        The newest checkpoint that is whole always stays. All of it is read before any other is removed, unless this
        object has written or verified it.

        Args:
            keep: the rules; None takes those of the store.
            dry_run: removes nothing.

        Returns:
            The steps that were removed, or would be.

        Raises:
            LockedError: Another process writes to the store.
            OptionError: The rules cannot be used, or no checkpoint has their metric.
            WriteFailedError: An I/O error, after which the other checkpoints are still there.

        Examples:
            >>> store.prune(keep=2, dry_run=True)
            (1000,)
        """
        rules = self.keep if keep is None else as_keep(keep)
        if dry_run:
            return tuple(self.index.steps_to_prune(rules))
        with self._access.exclusive():
            self.wait()
            self._access.acquire()
            with self._access.errors():
                return self.index.prune(rules)

    def pin(self, step: int) -> None:
        """Keeps a checkpoint whatever `keep` says, until `unpin`.

        Args:
            step: the number of the checkpoint.

        Raises:
            StepNotFoundError: There is no such checkpoint.
            LockedError: Another process writes to the store.

        Examples:
            >>> store.pin(1000)
        """
        self._set_pin(step, True)

    def unpin(self, step: int) -> None:
        """Undoes `pin`: `keep` decides again whether the checkpoint stays.

        Args:
            step: the number of the checkpoint.

        Raises:
            StepNotFoundError: There is no such checkpoint.
            LockedError: Another process writes to the store.

        Examples:
            >>> store.unpin(1000)
        """
        self._set_pin(step, False)

    def _set_pin(self, step: int, pinned: bool) -> None:
        with self._access.exclusive():
            self.wait()
            self.index.step(step)  # raises where there is none, before a directory is created
            self._access.acquire()
            entry = self.index.step(step)  # the last writer may have replaced it until then
            with self._access.errors(os.path.basename(entry.place.path)):
                self._backend.set_pin(entry.place, pinned)

    def close(self) -> None:
        """Waits for the save in the background, unlocks the store for other processes, and frees the staging memory.

        Raises the error of the save in the background. A store that is closed can be used again. Where an interrupt
        (Ctrl-C) ends the wait, the store stays locked for this process, since the save goes on.

        Examples:
            >>> store.close()
        """
        try:
            self.wait()
        finally:
            if self._pending is None:
                self._access.release()
                self._staging, self._deltas = StagingBuffer(), _deltas(self._delta, self.index)
                self._spread = SpreadTensors()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _same(text: str) -> list[Digest]:
    """Returns the digests of what all ranks must call a method with, in the same version of modelstate."""
    return [
        Digest.of("the arguments", text, [text]),
        Digest.of("the versions of modelstate", __version__, [__version__]),
    ]


def _deltas(delta: object, index: StepIndex) -> ModuleDeltas | None:
    """Returns what writes modules as differences. Raises `OptionError` for another value than a `Delta`."""
    if delta is None:
        return None
    from modelstate.store.delta import Delta, ModuleDeltas  # a store without deltas needs no codec for them

    if not isinstance(delta, Delta):
        raise invalid_option("delta", "must be a Delta, or None", delta, expected="such as modelstate.Delta()")
    return ModuleDeltas(delta, index)


def _writer(agreement: Agreement, directory: str) -> CollectiveWriter | None:
    """Returns the writer of DTensors; None where one process saves alone."""
    if not agreement.ranks:
        return None
    from modelstate.distributed.uploading import writer_of

    return writer_of(agreement, os.path.join(directory, RECORD_FILE))


def _directory(given: object) -> str:
    path = target_path(given, "directory")
    if is_remote(path):
        return path
    parts = path.split(os.sep)
    if ".." in parts:  # after a symbolic link it leads to the directory above the link's target
        end = len(parts) - parts[::-1].index("..")
        path = os.path.join(os.path.realpath(os.sep.join(parts[:end])), *parts[end:])
    path = os.path.abspath(path)
    if os.path.lexists(path) and not os.path.isdir(path):
        found = "a symbolic link to something that is not there" if not os.path.exists(path) else "a file"
        raise UnsavableError("a store is a directory", where=path, found=found, remedy="take another path")
    return path


def _check_save(step: object, metrics: object, when_busy: object) -> dict[str, float]:
    """Checks the arguments of `Store.save`, and returns the metrics as floats. Raises `OptionError`."""
    if type(step) is not int or not 0 <= step < 10**18:
        raise invalid_option("step", "must be an integer >= 0", step, expected="an int, 0 or more")
    check_choice("when_busy", when_busy, ("wait", "skip"))
    if not isinstance(metrics, Mapping | None):
        raise invalid_option("metrics", "must be a mapping of numbers", metrics, expected='such as {"loss": 0.5}')
    return {name: metric_value(name, value) for name, value in (metrics or {}).items()}
