"""`modelstate.Store`: a directory of checkpoints of a training run."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, Self, overload

import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import argument_order, is_objects
from modelstate.errors import (
    OptionError,
    SaveTargetError,
    SourceTypeError,
    StepExistsError,
    StepNotFoundError,
    StoreLockedError,
    StoreMovedError,
)
from modelstate.formats.safetensors import nbytes_of
from modelstate.formats.serialize import serialize
from modelstate.io import write_system
from modelstate.io.atomic import new_file, sync_directory, write_errors
from modelstate.io.files import local_path
from modelstate.io.lock import WriterLock, check_directory
from modelstate.objects.loaders import preserved_generators
from modelstate.objects.objects import Kind, capture, targets_of
from modelstate.objects.restore import Restored, RulesOf, restore_objects
from modelstate.store import records
from modelstate.store.background import PendingSave, SavedStep, Staging
from modelstate.store.reading import Step, of_first_whole, parts_of, problem_of, to_go, usable
from modelstate.store.records import PIN_FILE, STORE_FILE, Record, name_of
from modelstate.store.retention import CheckpointInfo, Keep, as_keep, metric_value
from modelstate.store.step_index import StepEntry, StepIndex, store_file_problem
from modelstate.store.writing import Job, clear, discard, make_directory, probe, publish
from modelstate.text_format import size

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RestoredStep(Restored):
    """What came back, and of which step. A mapping from names to the plain values that were asked for."""

    step: int
    time: float
    """Seconds since 1970, when it was saved."""
    metrics: Mapping[str, float]
    skipped: Mapping[int, str]
    """Newer steps that are damaged, with what is wrong with each."""


class Store:
    """Checkpoints of a training run in a directory: each is there in full and durable, or not at all.

    Nothing is written before the first `save`, which also takes the store for this process: another one that saves is
    refused until this one closes the store or ends, however it does. Reading needs no lock. Whatever a killed process
    has left behind is taken away by the next one that writes. A directory that is renamed, removed or replaced after
    something was restored from it or saved to it is not made anew until `close`: that is a `StoreMovedError`.

    Args:
        directory: where it is, or is going to be.
        keep: which checkpoints stay when another one has been saved: a `Keep`, or the number of the last ones; None
            keeps all.
        shard_size_bytes: the most bytes of tensors in one file; None has one file for what an object has.

    Raises `SaveTargetError` for what can be no directory, and `OptionError`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: Keep | int | None = None,
        shard_size_bytes: int | None = None,
    ) -> None:
        self.directory = _directory(directory)
        self.keep = as_keep(keep)
        if shard_size_bytes is not None and (type(shard_size_bytes) is not int or shard_size_bytes < 1):
            raise OptionError("shard_size_bytes= is a number of bytes", expected="1 or more", found=shard_size_bytes)
        self._shard_bytes = shard_size_bytes
        self._shelf = StepIndex(self.directory)
        self._lock = WriterLock(self.directory)
        self._in_use: os.stat_result | None = None
        """The directory that something has been restored from, or saved to: then no other takes its place."""
        self._turn = threading.RLock()
        self._is_busy = False
        self._staging = Staging()
        self._pending: PendingSave | None = None
        _watch_forks(self)

    def __repr__(self) -> str:
        return f"<Store {self.directory!r}>"

    # Saving.

    @overload
    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        block: Literal[True] = True,
        metrics: Mapping[str, float] | None = ...,
        pin: bool = ...,
        overwrite: bool = ...,
        when_busy: Literal["wait", "skip"] = ...,
    ) -> SavedStep: ...
    @overload
    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        block: Literal[False],
        metrics: Mapping[str, float] | None = ...,
        pin: bool = ...,
        overwrite: bool = ...,
        when_busy: Literal["wait", "skip"] = ...,
    ) -> PendingSave | None: ...
    @argument_order("store.save", lambda value: isinstance(value, int), is_objects, is_method=True)
    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        block: bool = True,
        metrics: Mapping[str, float] | None = None,
        pin: bool = False,
        overwrite: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
    ) -> SavedStep | PendingSave | None:
        """Saves the state of several objects as a checkpoint, which is visible when it is complete and durable.

        Tensors that have not changed since the checkpoint before are not written again.

        Args:
            step: its number, 0 or more.
            objects: modules, optimizers, anything with `state_dict` and `load_state_dict`, `torch.Generator`s and plain
                values, under names; nested mappings are possible. The modules of the optimizers have to be among them.
            block: whether to return when it is durable; else when the state has been copied to memory that is used
                again by the next save. Then a thread writes, and a `PendingSave` comes back. What it raises comes
                through at its `result`, at `wait`, or at the next save; the process waits for it before it ends.
            metrics: numbers that say how good it is, for `Keep(best=...)`.
            pin: keeps it whatever `keep` says, until `unpin`.
            overwrite: replaces a step that is there. Without it that is refused, unless the one there is damaged.
            when_busy: what to do while an earlier save is still being written: wait for it, or skip this one and
                return None.

        Raises `StepExistsError`, `StoreLockedError`, `StoreMovedError`, `OptionError`, what capturing the state raises,
        `UnsavableError` and `UnsupportedValueError` for what cannot be stored, `WriteFailedError` for an I/O error, and
        what an earlier save in the background has raised. No checkpoint that was there before is changed by it.
        """
        begun = time.perf_counter()
        numbers = _checked(step, metrics, when_busy)
        if when_busy == "skip" and self._pending is not None and not self._pending.done:
            return None
        with self._my_turn(wait=when_busy == "wait") as is_mine:
            if not is_mine:
                return None
            self.wait()
            job = self._job(step, objects, numbers, pin, begun)
            job.check()
            self._become_writer()
            self._check_new(step, overwrite)
            if block:
                return self._write(job)
            self._staging.copy(job.drafts.values())
            blocked = time.perf_counter() - begun
            write = partial(self._write, job, self._staging.nbytes, blocked)
            self._pending = pending = PendingSave(step, self._staging.nbytes, write)
            pending.start()
            return pending

    def check(self, objects: Mapping[str, Any]) -> None:
        """Finds out whether a save of these objects would work, without saving them.

        The state of every object is encoded as `save` does it, with no tensor copied. The store is taken for this
        process, and a small file is written to its directory, synced, renamed and removed. A warning is logged where
        the file system has less free space than the state takes. Random generators are left as they are.

        Args:
            objects: as `save` takes them.

        Raises what `save` raises.

            store = ms.Store("checkpoints")
            store.check({"model": model, "optimizer": optimizer})
        """
        with self._my_turn():
            self.wait()
            nbytes = self.check_state(objects)
            self._become_writer()
            with self._in_its_directory(), write_errors(self.directory):
                probe(self.directory)
                space = os.statvfs(self.directory)
        free_bytes = space.f_bavail * space.f_frsize
        if free_bytes < nbytes:
            _logger.warning(
                "%s: a checkpoint takes up to %s, and %s are free", self.directory, size(nbytes), size(free_bytes)
            )

    def check_state(self, objects: Mapping[str, Any]) -> int:
        """Raises what keeps the objects from being saved. Returns how many bytes their tensors have.

        Nothing is copied or written, and random generators are left as they are.
        """
        late = [target.obj for target in targets_of(objects).values() if target.is_restored_last]
        with preserved_generators(late):
            job = self._job(0, objects, {}, False, 0.0)
        job.check()
        return sum(nbytes_of(tensor) for made in job.drafts.values() for tensor in made.live.values())

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until what is being written is durable. Raises what its write has raised, once, and
        `SaveTimeoutError`."""
        pending = self._pending
        if pending is None:
            return
        is_over = pending.done
        if not (is_over and (pending.error is None or pending.is_reported)):
            try:
                pending.result(timeout_s)
            finally:
                is_over = pending.done
        if is_over and self._pending is pending:
            self._pending = None

    @contextmanager
    def _my_turn(self, wait: bool = True) -> Iterator[bool]:
        """Within it no other thread saves or takes away. False where it was not to wait, and one does."""
        if not self._turn.acquire(blocking=wait):
            yield False
            return
        try:
            if self._is_busy:
                raise StoreLockedError(
                    "a save in this thread has been interrupted by another one, as by a signal's handler",
                    where=self.directory,
                    remedy="have the handler set a flag, and the loop save: see modelstate.Deadline",
                )
            self._is_busy = True
            try:
                yield True
            finally:
                self._is_busy = False
        finally:
            self._turn.release()

    def _job(self, step: int, objects: Mapping[str, Any], metrics: dict[str, float], pin: bool, begun: float) -> Job:
        parts = capture(objects)
        drafts = {
            path: serialize(part.tree, path, as_tree=part.kind is not Kind.MODULE) for path, part in parts.items()
        }
        steady = {
            path: _frozen(target.obj) for path, target in targets_of(objects).items() if target.kind is Kind.MODULE
        }
        kinds = {path: part.kind for path, part in parts.items()}
        return Job(step, kinds, drafts, steady, metrics, pin, begun, time.time())

    def _check_new(self, step: int, overwrite: bool) -> None:
        there = [found for found in self._shelf.steps() if found.place.step == step]
        is_ours = bool(there) and (there[0].is_whole or there[0].is_damaged)
        if there and not there[0].is_damaged and not (overwrite and is_ours):
            raise StepExistsError(
                "there is a checkpoint of this step already",
                where=there[0].place.path,
                found="" if there[0].error is None else there[0].error.what,
                remedy="overwrite=True replaces it; Store.restore says from which step to go on"
                if is_ours
                else "it is another store's, or a newer version's: take it away, or take another directory",
            )

    def _write(self, job: Job, staging_bytes: int = 0, blocked: float | None = None) -> SavedStep:
        with self._in_its_directory(), write_errors(os.path.join(self.directory, name_of(job.step, 0))):
            clear(self.directory)
            shelf = self._shelf.for_a_moment()
            every = shelf.by_age()
            revisions = [one for one in shelf.all_revisions() if one.place.step == job.step]
            before = next((found for found in reversed(every) if found.is_whole), None)
            store = shelf.ensure_name()
            serial = 1 + max((one.record.serial for one in every if one.record is not None), default=0)
            final, written = publish(
                self.directory,
                store,
                serial,
                job,
                revisions,
                before,
                self._shard_bytes,
                shelf.doubtful,
                self._lock.check_directory,
            )
            shelf.note_whole(final)
        seconds = time.perf_counter() - job.begun
        pruned: tuple[int, ...] = ()
        with suppress(OSError):  # it is saved; the next save tries again
            discard(self.directory, [one.place for one in revisions if one.is_whole or one.is_damaged])
            pruned = self._prune(self.keep, shelf)
        return SavedStep(
            job.step,
            final,
            sum(one.bytes_written for one in written),
            sum(one.bytes_linked for one in written),
            staging_bytes,
            seconds if blocked is None else blocked,
            seconds,
            pruned,
        )

    # Restoring.

    @argument_order("store.restore", is_objects, lambda value: isinstance(value, int | str), is_method=True)
    def restore(
        self,
        objects: Mapping[str, Any],
        step: Step = "latest",
        *,
        rules: RulesOf = (),
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
        keep_options: Iterable[str] = (),
        device: torch.device | str | None = None,
        map: bool | None = None,
        verify: bool = True,
        progress: bool | None = None,
        max_memory_bytes: int | None = None,
        init_missing: bool = False,
    ) -> RestoredStep:
        """Gives the objects back what was saved of them: all of them, or none.

        Of the latest checkpoints the newest one is taken that is whole; those that are not are reported by a
        `DamagedCheckpointWarning` and in `RestoredStep.skipped`. A plain value among the objects says that the value
        is wanted; it comes back in the result. The other arguments are those of `modelstate.load`, where patterns of
        names begin with the path of an object; `verify` compares everything with its digest before anything is used,
        and `init_missing` initialises the parameters that the checkpoint lacks, for which the optimizers then have no
        state.

        Raises `StepNotFoundError`, `DamagedCheckpointError`, `ForeignCheckpointError`, `NewerManifestError`, what
        `restore_objects` raises, and what a save in the background has raised.
        """
        self.wait()
        may_miss, may_exceed = (
            _patterns("allow_missing", allow_missing),
            _patterns("allow_unexpected", allow_unexpected),
        )
        kept_options = _patterns("keep_options", keep_options)

        def attempt(found: StepEntry) -> tuple[Record, Restored]:
            record, parts = parts_of(self._shelf, found, verify)
            return record, restore_objects(
                objects,
                parts,
                rules=rules,
                allow_missing=may_miss,
                allow_unexpected=may_exceed,
                keep_options=kept_options,
                device=device,
                map=map,
                progress=progress,
                max_memory_bytes=max_memory_bytes,
                init_missing=init_missing,
            )

        (record, restored), skipped = of_first_whole(self._shelf, step, attempt)
        with suppress(OSError):
            self._in_use = os.stat(self.directory)
        same = {one.name: getattr(restored, one.name) for one in fields(restored)}
        return RestoredStep(**same, step=record.step, time=record.time, metrics=dict(record.metrics), skipped=skipped)

    @argument_order(
        "store.open", lambda value: isinstance(value, str), lambda value: isinstance(value, int | str), is_method=True
    )
    def open(self, name: str, step: Step = "latest", *, verify: bool = False) -> Checkpoint:
        """The tensors and values of one object of a checkpoint, for whatever takes a `Checkpoint`.

        With `verify` all of the object, and nothing else of the checkpoint, is read and compared with its digests.

        Raises as `restore` does, and `StepNotFoundError` for an object that is not in it, or has no tensors.
        """
        self.wait()

        def attempt(found: StepEntry) -> Checkpoint:
            record = usable(found)
            entry = record.entries.get(name)
            if entry is None or not entry.index:
                raise StepNotFoundError(
                    "there is no such object with tensors in the checkpoint",
                    where=found.place.path,
                    expected=", ".join(key for key, one in record.entries.items() if one.index) or "none has any",
                    found=repr(name),
                )
            checkpoint = records.opened(found.place.path, entry)
            if verify:
                # Behind the opening: a file that changes from here on is refused when it is read.
                records.verify(found.place.path, entry)
            return checkpoint

        return of_first_whole(self._shelf, step, attempt)[0]

    # What is there.

    def steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints that are whole, as far as is known without reading them, from old to new."""
        return tuple(found.place.step for found in self._shelf.steps() if found.is_whole)

    def latest(self) -> int | None:
        """The one that was saved last; None where there is none.

        That is the highest, unless training has gone back to an earlier one and on from there.
        """
        return next((one.place.step for one in reversed(self._shelf.by_age()) if one.is_whole), None)

    def infos(self, *, by_age: bool = False) -> tuple[CheckpointInfo, ...]:
        """What is known of each checkpoint, damaged ones too, without reading tensors, in the order of the steps.

        With `by_age` they come in the order in which they were saved; one that cannot be used, behind the step before.
        """
        return tuple(found.info for found in (self._shelf.by_age() if by_age else self._shelf.steps()))

    def verify(self, step: int | None = None) -> dict[int | str, str]:
        """Reads checkpoints, one or all, and compares every byte with its digest.

        Args:
            step: the checkpoint to read; all of them without it, and the store's own file `store.json` as well.

        Returns:
            What is wrong by the step; empty text where nothing is. Where `store.json` is damaged, what is wrong with it
            stands under "store.json".

        Raises:
            StepNotFoundError: There is no such step.

        Example:
            >>> damaged = {step: problem for step, problem in store.verify().items() if problem}
        """
        self.wait()
        every = self._shelf.steps() if step is None else [self._shelf.step(step)]
        problems: dict[int | str, str] = {}
        if step is None and (problem := store_file_problem(self.directory)):
            problems[STORE_FILE] = problem
        for found in every:
            if (of_step := problem_of(self._shelf, found)) is not None:
                problems[found.place.step] = of_step
        return problems

    # Keeping.

    def prune(self, keep: Keep | int | None = None, *, dry_run: bool = False) -> tuple[int, ...]:
        """Takes away what `keep`, or the store's own rules, do not keep, and returns the steps.

        The newest checkpoint that is whole is never taken away: before anything is, all of it is read, unless this
        object has written or verified it. With `dry_run` nothing is. Raises `StoreLockedError`, `OptionError`, and
        `WriteFailedError` for an I/O error, after which the rest is still there.
        """
        rules = self.keep if keep is None else as_keep(keep)
        if dry_run:
            return tuple(found.place.step for found in to_go(self._shelf, rules))
        with self._my_turn():
            self.wait()
            self._become_writer()
            with write_errors(self.directory):
                clear(self.directory)
                return self._prune(rules, self._shelf)

    def pin(self, step: int) -> None:
        """Keeps a checkpoint whatever `keep` says. Raises `StepNotFoundError`, `StoreLockedError`."""
        self._set_pin(step, True)

    def unpin(self, step: int) -> None:
        """Lets `keep` decide again. Raises `StepNotFoundError`, `StoreLockedError`."""
        self._set_pin(step, False)

    def _set_pin(self, step: int, pinned: bool) -> None:
        with self._my_turn():
            self.wait()
            found = self._shelf.step(step)
            self._become_writer()
            path = os.path.join(found.place.path, PIN_FILE)
            if pinned == found.is_pinned:
                return
            with write_errors(path):
                if pinned:
                    with new_file(path):
                        pass
                else:
                    write_system.unlink(path)
                sync_directory(found.place.path)

    def _prune(self, keep: Keep | None, shelf: StepIndex) -> tuple[int, ...]:
        gone = [found.place.step for found in to_go(shelf, keep)]
        every = shelf.all_revisions() if gone else []
        discard(self.directory, [found.place for found in every if found.place.step in gone])
        return tuple(gone)

    # The writer.

    def _become_writer(self) -> None:
        with write_errors(self.directory):
            if self._lock.held:
                try:
                    self._lock.confirm()
                    return
                except StoreLockedError:
                    # The lock is no longer what it was. If nobody else has it, it is taken anew.
                    self._lock.release()
            if self._in_use is not None:
                check_directory(self.directory, self._in_use)
            make_directory(self.directory)
            self._lock.acquire()
            try:
                # First of all: what a newer version has written is not for this one to tidy up.
                self._shelf.ensure_name()
                self._in_use = os.stat(self.directory)
                clear(self.directory)
            except BaseException:
                self._lock.release()
                raise

    @contextmanager
    def _in_its_directory(self) -> Iterator[None]:
        """Around what is written: an I/O error comes through as `StoreMovedError` where that is why."""
        self._lock.check_directory()
        try:
            yield
        except OSError as error:
            try:
                self._lock.check_directory()
            except StoreMovedError as why:
                raise why from error
            raise

    def close(self) -> None:
        """Waits for what is being written, and lets others write. Raises what that write has raised."""
        try:
            self.wait()
        finally:
            self._lock.release()
            self._in_use = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_stores: "weakref.WeakSet[Store]" = weakref.WeakSet()
_watching_forks = False


def _watch_forks(store: Store) -> None:
    """In a forked child nobody gives back the turn that another thread had."""
    global _watching_forks
    _stores.add(store)
    if not _watching_forks:
        _watching_forks = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for store in list(_stores):
        store._turn, store._is_busy = threading.RLock(), False


def _directory(given: object) -> str:
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(text, str):
        raise SaveTargetError("a store is a directory", expected="a str or a pathlib.Path", found=repr(given)[:80])
    try:
        path = os.path.abspath(local_path(text))
    except SourceTypeError as error:
        raise SaveTargetError("this can be no directory", where=repr(text[:80]), found=error.what) from error
    if os.path.lexists(path) and not os.path.isdir(path):
        found = "a symbolic link to something that is not there" if not os.path.exists(path) else "a file"
        raise SaveTargetError("a store is a directory", where=path, found=found, remedy="take another path")
    return path


def _checked(step: object, metrics: object, when_busy: object) -> dict[str, float]:
    """The metrics. Raises `OptionError`."""
    if type(step) is not int or not 0 <= step < 10**18:
        raise OptionError("step= is the number of a step", expected="an int, 0 or more", found=repr(step))
    if when_busy not in ("wait", "skip"):
        raise OptionError("when_busy= says what to do", expected='"wait" or "skip"', found=repr(when_busy))
    if not isinstance(metrics, Mapping | None):
        raise OptionError(
            "metrics= has numbers under names", expected='such as {"loss": 0.5}', found=repr(metrics)[:200]
        )
    return {name: metric_value(name, value) for name, value in (metrics or {}).items()}


def _patterns(name: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise OptionError(
            f"{name}= has patterns of names", expected='such as ["ema", "optimizer.*"]', found=repr(given)
        )
    return tuple(given)


def _frozen(module: torch.nn.Module) -> frozenset[str]:
    """Names of what training does not change."""
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, param in named if not param.requires_grad)


def problem_now(store: Store, step: int) -> str:
    """What reading all of a step shows to be wrong; empty where nothing is.

    Raises `StepNotFoundError` where it is not there, and where it is taken away before all has been read.
    """
    while True:
        problems = store.verify(step)
        if step in problems:
            return problems[step]
        # It is not what it was when reading began: it is gone, or there is a new one.


def newest_whole(store: Store, passed_over: Callable[[int, str], None]) -> int | None:
    """The step that was saved last of those that are whole; None where none is.

    `passed_over` hears of those that were saved later, and of what is wrong with each.
    """
    while True:
        for step in [info.step for info in store.infos(by_age=True)][::-1]:
            try:
                problem = problem_now(store, step)
            except StepNotFoundError:
                break  # it was taken away: there are others now
            if not problem:
                return step
            passed_over(step, problem)
        else:
            return None
